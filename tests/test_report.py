"""python -m mingpt.report: what it reads, what it reckons, and its page in a real browser."""

import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mingpt import report
from mingpt.history import History, read_runs

HTML = '</script><script>document.title = "owned"</script><img src=x onerror=alert(1)> & "\ud800'
CONFIG = {"name": "tiny", "train.global_batch_size": 4, "model.block_size": 8, "train.max_steps": 40}


def start(step: int, when: float, generation: int, **facts: object) -> dict[str, Any]:
    known = {"world_size": 2, "run_id": "one", "changes": {}, "config": CONFIG}
    return {"event": "start", "step": step, "time": when, "generation": generation, **known, **facts}


def row(step: int, when: float, generation: int = 1, **metrics: object) -> dict[str, Any]:
    known = {"train/loss": 5 - step / 20, "perf/step_seconds": 1.0}
    return {"step": step, "time": when, "generation": generation, **known, **metrics}


def write(file: Path, *entries: dict[str, Any], torn: str = "") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries) + torn, encoding="utf-8")
    return file


def only(*places: Path) -> History:
    (run,) = read_runs(map(str, places))
    return run


KILLED = [  # at step 25, of which 20 was saved; again at once at 30, whose image was in memory
    start(0, 100, 1),
    row(10, 110),
    row(20, 120, **{"val/loss": 4.5}),
    row(25, 125, **{"train/loss": 99.0}),
    start(20, 140, 2, world_size=1, changes={"optim.learning_rate": [0.1, 0.2]}),
    {"event": "recovery", "step": 21, "time": 141.5, "generation": 2, "seconds": 16.5},
    row(25, 147.5, 2, **{"perf/step_seconds": 1.5}),
    row(30, 155, 2, **{"perf/step_seconds": 1.5, "train/loss": "nan"}),
    {"event": "stop", "step": 30, "time": 155.5, "generation": 2},
    start(30, 160, 3),
    row(40, 170, 3, **{"val/loss": 4.0}),
    {"event": "sample", "step": 40, "time": 170, "generation": 3, "text": HTML},
    {"event": "end", "step": 40, "time": 170.5, "generation": 3},
]


def test_a_run_through_kill_replay_and_stop(tmp_path: Path) -> None:
    run = only(write(tmp_path / "tiny/metrics.jsonl", *KILLED, torn='{"step": 41, "ti'))
    assert list(run.rows) == [10, 20, 25, 30, 40]
    assert run.rows[25]["train/loss"] == 3.75, "the last word on a step counts"
    # 10 + 10 steps of 1 s, 5 + 5 of 1.5 s, 10 of 1 s, in the 70.5 s from the first start to the last line
    assert run.goodput == pytest.approx((10 + 10 + 5 * 1.5 + 5 * 1.5 + 10) / 70.5)
    assert [(it.steps_lost, it.before, it.world_size) for it in run.starts] == [
        (0, "", 2), (5, "killed", 1), (0, "stopped", 2),
    ]  # fmt: skip
    assert math.isnan(run.starts[0].seconds)
    assert [(it.seconds, it.is_measured) for it in run.starts[1:]] == [(16.5, True), (14.5, False)]
    told = report.facts(run)
    assert told["state"] == "finished" and told["restarts"] == "2" and told["steps lost"] == "5"
    assert told["best val loss"] == "4.0000 at step 40" and told["tokens"] == "1,280"
    assert report.sizes(run) == [(0, 0, 2), (20, 25, 0), (20, 40, 1), (30, 55.5, 0), (30, 60, 2), (40, 70.5, 2)]


def test_what_was_beyond_the_newest_start_counts_when_it_is_done_again(tmp_path: Path) -> None:
    file = write(tmp_path / "metrics.jsonl", *KILLED[:5])
    assert list(only(file).rows) == [10, 20]
    assert list(only(write(file, *KILLED[:7])).rows) == [10, 20, 25]


def test_files_of_several_nodes_go_together_by_run(tmp_path: Path) -> None:
    first, second = KILLED[:4], KILLED[4:]
    write(tmp_path / "b/run/metrics.jsonl", *first)
    write(tmp_path / "a/run/metrics.jsonl", *second, start(0, 500, 1, run_id="two"), row(1, 501))
    write(tmp_path / "copy.jsonl", *first)
    (tmp_path / "c").mkdir()
    (tmp_path / "c/run.json").touch()  # of a node that never had the first rank
    runs = read_runs(str(tmp_path / name) for name in ("a/run", "b/run", "copy.jsonl", "c"))
    assert [run.run_id for run in runs] == ["one", "two"] and runs[0].goodput == only(
        write(tmp_path / "x", *KILLED)
    ).goodput
    assert len(runs[0].starts) == 3 and len(runs[1].rows) == 1
    assert [run.label for run in runs] == ["a/run one", "a/run two"], "one folder, used by one after the other"


def test_clocks_that_go_back_and_old_files(tmp_path: Path) -> None:
    back = only(write(tmp_path / "back", start(0, 100, 1), row(1, 101), row(2, 50), row(3, 103)))
    assert back.series("train/loss")[1].tolist() == [1, 1, 3]
    again = [start(0, 150, 2), row(10, 160, 2), row(20, 170, 2), start(20, 180, 3)]  # at another log.interval
    replayed = only(write(tmp_path / "replayed", start(0, 100, 1), row(10, 110), row(15, 115), row(20, 120), *again))
    assert replayed.series("train/loss")[1].tolist() == [60, 60, 70]
    contradicted = only(write(tmp_path / "before", start(0, 100, 1), row(9, 101)))
    assert math.isnan(contradicted.goodput), "nine seconds of steps in one"
    old = only(write(tmp_path / "old", {"step": 5, "train/loss": 1.0}, {"step": 6, "train/loss": "inf", "time": "x"}))
    assert old.starts == [] and math.isnan(old.goodput) and report.facts(old)["step"] == "6"
    assert len(report.page([back, contradicted, old])) > 50_000


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist: name a run's folder"), ("", "no run has written anything"), ("no\n[1]\n", "no run has")],
)
def test_nothing_to_show_is_told_in_a_line(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content, encoding="utf-8")
    assert report.main([str(tmp_path), f"--html={tmp_path / 'page.html'}"]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1 and not (tmp_path / "page.html").exists()


def test_the_page_goes_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "metrics.jsonl", *KILLED)
    assert report.main([str(file), f"--html={tmp_path / 'a new' / 'folder' / 'page.html'}"]) == 0
    assert (tmp_path / "a new" / "folder" / "page.html").exists()
    assert report.main([str(file), f"--html={tmp_path / 'a new'}"]) == 1
    assert report.main([str(file), f"--html={file / 'page.html'}"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"mingpt.report: {tmp_path / 'a new'}: Is a directory"
    assert second.startswith(f"mingpt.report: {file}") and "Errno" not in second


def test_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((80, 24)))
    file = write(tmp_path / "metrics.jsonl", *KILLED)
    assert report.main([str(file)]) == 0
    told = capsys.readouterr().out
    assert "┤" in told and "\x1b" not in told and max(map(len, told.splitlines())) <= 80
    table = [line.split()[2:] for line in told.split("started")[1].splitlines()[1:]]
    assert table[1] == ["2", "1", "20", "5", "16.5", "killed"] and table[3][4] == "~14.5"
    assert "optim.learning_rate: 0.1 -> 0.2" in told
    assert report.main([str(file), str(write(tmp_path / "b" / "x", start(0, 1, 1, run_id="two")))]) == 0, "no row yet"


def test_thinning_keeps_every_peak() -> None:
    values = np.sin(np.arange(100_000) / 50)
    values[77_777], values[5] = 40, math.nan
    kept = report.thin(values, 600)
    assert len(kept) <= 600 and 77_777 in kept and (np.diff(kept) > 0).all()
    assert values[kept].min() < -0.999
    assert report.smooth(np.array([1.0, math.nan, 3.0])).tolist()[::2] == [1.0, 3.0]
    assert report.smooth(np.ones(1000) * 7) == pytest.approx(7)


def long(folder: Path, steps: int, name: str = "long") -> Path:
    entries = [start(0, 100, 1, run_id="long", config=CONFIG | {"name": name, "optim.learning_rate": 0.5})]
    for step in range(1, steps + 1):
        metrics = {
            "train/loss": 3 + math.sin(step),
            "train/lr": 1e-3,
            "train/grad_norm": 1.0,
            "data/tokens_seen": step * 32,
        }
        validation = {"val/loss": 3.1} if step % (steps // 20) == 0 else {}
        entries.append(row(step, 100 + step, **metrics, **validation, **{"perf/tokens_per_second": 1e5 + step}))
        if step % 9 == 0:
            entries.append({"event": "snapshot", "step": step, "time": 100 + step, "generation": 1, "uri": "x" * 50})
    sample = {"event": "sample", "step": steps, "time": 100 + steps, "generation": 1, "text": HTML * 1000}
    return write(folder / "metrics.jsonl", *entries, sample)


def test_a_long_run_makes_a_light_page_soon(tmp_path: Path) -> None:
    folder = long(tmp_path / "long", 100_000).parent
    began = time.process_time()
    assert report.main([str(folder), f"--html={tmp_path / 'page.html'}"]) == 0
    assert time.process_time() - began < 30, "a few seconds, where nothing else runs"
    assert (tmp_path / "page.html").stat().st_size < 400_000


@pytest.mark.browser
def test_the_page_in_chromium(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    write(tmp_path / "tiny/metrics.jsonl", *KILLED)
    long(tmp_path / "long", 2000, name=f"<b>{'long' * 20}</b>")
    page = tmp_path / "page.html"
    assert report.main([str(tmp_path / "tiny"), str(tmp_path / "long"), f"--html={page}"]) == 0
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width in (360, 1280):
            colours = {scheme: look(browser, page, width, scheme) for scheme in ("light", "dark")}
            assert sum(colours["light"]) > 3 * 200 > sum(colours["dark"])
        browser.close()


def look(browser: Any, page: Path, width: int, scheme: str) -> list[int]:
    """Opens the page, switches what it can, and looks for what should not be; the colour behind it."""
    tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    said: list[str] = []
    asked: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(page.as_uri())
    coloured = """plots => plots.map(({chart: {ctx}}) => {
        const data = ctx.getImageData(0, 0, ctx.canvas.width, ctx.canvas.height).data;
        let count = 0;
        for (let i = 0; i < data.length; i += 4) {
            const colour = data.slice(i, i + 3);
            if (data[i + 3] > 60 && Math.max(...colour) - Math.min(...colour) > 90) count++;
        }
        return count;
    })"""
    ends = "plots => plots.map(plot => plot.chart.scales.x.max)"
    plots = "figure:not([hidden]) .plot"
    for axis, end in {"step": 2000, "tokens": 64000, "time": 2000}.items():
        tab.click(f"#axes button[value={axis}]")
        assert tab.get_attribute(f"#axes button[value={axis}]", "aria-pressed") == "true"
        tab.wait_for_function(f"document.querySelector('.plot').chart.scales.x.max == {end}")
        assert {*tab.eval_on_selector_all(plots, ends)} == {end}
        counts = tab.eval_on_selector_all(plots, coloured)
        assert len(counts) >= 5 and min(counts) > 50, counts
    tab.click("#scale button[value=log]")
    assert tab.evaluate("document.querySelector('.plot').chart.scales.y.distr") == 3
    both = tab.eval_on_selector_all(plots, coloured)[0]
    tab.click("#legend button >> nth=1")
    assert tab.eval_on_selector_all(plots, coloured)[0] < both
    tab.hover(".plot >> nth=1")
    assert tab.text_content(".readout >> nth=1")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert "owned" not in tab.title() and HTML[:-1] in tab.text_content("#samples pre")
    assert "before: killed" in tab.text_content("#events") and "0.1 -> 0.2" in tab.text_content("#config")
    assert said == [] and asked == [page.as_uri()]
    behind = tab.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    tab.close()
    return [int(part) for part in behind]
