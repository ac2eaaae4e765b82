"""wandb beside the training: what it is told, and that nothing it does or fails to do holds the training up."""

import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Runs

from mingpt import dashboard, distributed
from mingpt.dashboard import END_SECONDS, HURRY_SECONDS, Dashboard
from mingpt.metrics import Metrics


class FakeWandb:
    """Keeps what it is told. `log` is what happens at a row; `refuse` how often a start fails."""

    def __init__(self, log: Any = None, refuse: int = 0) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.axes: dict[str, Any] = {}
        self.config: Any = self
        self.summary: dict[str, Any] = {}
        self.starts: list[dict[str, Any]] = []
        self.finished = 0
        self.url, self.settings, self.sync_dir = "https://wandb/run", self, "place"
        self._log, self._refuse = log, refuse

    def setup(self, settings: Any) -> None: ...

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def Table(self, columns: list[str], data: list[list[Any]]) -> list[list[Any]]:
        return [columns, *data]

    def init(self, **settings: Any) -> "FakeWandb":
        self.starts.append(settings)
        if len(self.starts) <= self._refuse:
            raise RuntimeError("CommError: no")
        return self

    def define_metric(self, name: str, **settings: Any) -> None:
        self.axes[name] = settings.get("step_metric")

    def update(self, config: dict[str, Any], allow_val_change: bool) -> None:
        self.configured = config, allow_val_change

    def log(self, values: dict[str, Any], step: int) -> None:
        if self._log:
            self._log()
        self.rows.append((step, values))

    def finish(self) -> None:
        self.finished += 1


def opened(wandb: Any, mode: str = "offline", **settings: Any) -> Dashboard:
    load = wandb if callable(wandb) else lambda: wandb
    return Dashboard(
        "id1", name="us", project="mingpt", folder=Path("runs/us"), mode=mode, server="http://127.0.0.1:9", began=100.0,
        load=load, **settings,
    )  # fmt: skip


def row(step: int, when: float, **values: float) -> dict[str, Any]:
    return {"step": step, "time": when, "generation": 1, "train/loss": 1.0} | values


def event(name: str, step: int, when: float, **facts: Any) -> dict[str, Any]:
    return {"event": name, "step": step, "time": when, "generation": 1, **facts}


def test_one_run_goes_on_through_replayed_steps_and_keeps_what_was_best() -> None:
    wandb = FakeWandb()
    earlier = [
        event("start", 0, 100.0, changes={}, config={"seed": 1}),
        row(10, 110.0) | {"val/loss": 2.0},
        event("sample", 10, 111.0, text="before"),
    ]
    board = opened(wandb, earlier=earlier)
    board.put(event("start", 8, 120.0, changes={"optim.min_lr": [1, 2]}, config={"seed": 1}, restarts=1))
    for step in (9, 10):
        board.put(row(step, 120.5))
    board.put(row(11, 121.0) | {"val/loss": 3.0})
    board.put(row(12, 122.0) | {"val/loss": math.nan})
    board.put(row(13, 123.0) | {"val/loss": 1.5})
    board.put(event("snapshot", 13, 123.5, uri="s3://bucket/step-13", seconds=1.0))
    board.put(event("sample", 14, 124.0, text="after"))
    board.put(event("end", 14, 125.0, best_val_loss=1.5, goodput=0.5))
    board.close()
    (start,) = wandb.starts
    assert (start["id"], start["resume"], start["allow_val_change"]) == ("id1", "allow", True)
    assert wandb.axes == {"step": None, "*": "step"}
    assert wandb.configured == ({"seed": 1}, True)
    counters = [at for at, _ in wandb.rows]
    assert counters == sorted(set(counters)) and counters[:3] == [20_000, 20_500, 20_501], "it never goes back"
    assert [values["step"] for _, values in wandb.rows if "train/loss" in values] == [9, 10, 11, 12, 13]
    assert {"best_val_loss": 1.5, "best_step": 13, "snapshot": "s3://bucket/step-13", "goodput": 0.5}.items() <= (
        wandb.summary.items()
    )
    (samples,) = (values["samples"] for _, values in wandb.rows if "samples" in values)
    assert samples == [["step", "text"], [10, "before"], [14, "after"]]
    events = wandb.rows[-1][1]["events"]
    assert [it[2] for it in events[1:]] == ["start", "start", "snapshot", "end"]
    assert json.loads(events[2][3]) == {"changes": {"optim.min_lr": [1, 2]}, "restarts": 1}
    assert wandb.finished == 1


def test_what_waits_for_ever_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    go = threading.Event()
    board = opened(FakeWandb(log=lambda: go.wait(60)))
    book = Metrics(dashboard=board)
    started = time.monotonic()
    for step in range(dashboard.ROOM + 50):
        book.row(step, {"train/loss": 1.0})
    board.close(0.1)
    assert time.monotonic() - started < 30
    assert len(caplog.messages) == 1 and "too slow" in caplog.messages[0]
    go.set()


@pytest.mark.parametrize(
    ("wandb", "said"),
    [
        (lambda: __import__("no_such_wandb"), "wandb is not installed: pip install -r requirements-dashboard.txt"),
        (lambda: FakeWandb(refuse=9), "RuntimeError: CommError: no"),
        (lambda: FakeWandb(log=lambda: os.listdir("/nowhere")), "No such file"),
    ],
)
def test_what_fails_is_told_once_and_nothing_is_kept_for_it(
    wandb: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    board = opened(wandb)
    for step in range(30):
        board.put(row(step, 100.0 + step))
    board._thread.join(30)
    for step in range(30, 60):
        board.put(row(step, 100.0 + step))
    waiting = board._entries.qsize()
    assert waiting <= 30
    board.close()
    assert [said in message for message in caplog.messages] == [True]


def test_a_server_that_does_not_answer_or_refuses_leaves_it_offline(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    opened(wandb, "online").close()
    assert [start["mode"] for start in wandb.starts] == ["offline"]
    assert len(caplog.messages) == 1 and "http://127.0.0.1:9 does not answer" in caplog.messages[0]
    assert "wandb sync --yes --include-online runs/us/wandb/*run-*" in caplog.messages[0]
    monkeypatch.setattr(dashboard, "_silence", lambda server: "")
    wandb = FakeWandb(refuse=1)
    opened(wandb, "online").close()
    assert [start["mode"] for start in wandb.starts] == ["online", "offline"]
    assert wandb.finished == 1 and len(caplog.messages) == 2


def test_the_readme_tells_how_long_the_end_may_wait() -> None:
    told = f"process for {END_SECONDS:g} seconds, and workers that form anew for {HURRY_SECONDS:g}."
    assert told in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_key_is_found_where_wandb_login_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert distributed.wandb_server() == ("https://api.wandb.ai", False)
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password key\n", encoding="utf-8")
    (tmp_path / ".netrc").chmod(0o600)
    assert distributed.wandb_server() == ("https://api.wandb.ai", True)
    (tmp_path / ".netrc").write_bytes(b"machine \xff")
    assert distributed.wandb_server() == ("https://api.wandb.ai", False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://ours:8080/")
    assert distributed.wandb_server() == ("http://ours:8080", False)
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert distributed.wandb_server() == ("http://ours:8080", True)


def piece(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """The id and the rows of a start, as the real wandb wrote them."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    records = [json.loads(line) for line in subprocess.check_output(command, text=True).splitlines()]
    (run,) = (record["run"] for record in records if record["type"] == "run")
    assert run["resume"]
    return run["run_id"], [record["history"]["item"] for record in records if record["type"] == "history"]


def train_steps(entries: list[dict[str, Any]]) -> list[int]:
    return [entry["step"] for entry in entries if "train/loss" in entry]


def test_the_pieces_of_a_killed_run_are_one_curve(runs: Runs) -> None:
    pytest.importorskip("wandb")
    # So few rows that none is on disk before its time because others fill a block of the file.
    options = ("--log.wandb=offline", "--log.interval=50")
    first = runs.start("--train.max_steps=100000", *options, "--local-rank=unspeakable")
    since = math.inf  # the first row with a file of wandb's
    assert first.stdout
    for line in first.stdout:
        if re.match(r"step +\d+/", line) and [*runs.folder.glob("runs/small/wandb/offline-run-*/*.wandb")]:
            since = min(since, time.time())
            if (killed := time.time()) > since + 5:
                break
    first.kill()
    first.communicate()
    rows = runs.rows()
    end = train_steps(rows)[-1] + 100  # it may have gone on beyond the last row
    runs(f"--train.max_steps={end}", "--snapshot.resume=must", *options)

    run_id = json.loads((runs.folder / "runs/small/run.json").read_text(encoding="utf-8"))["run_id"]
    paths = sorted(runs.folder.glob("runs/small/wandb/offline-run-*/*.wandb"))
    (id1, before), (id2, after) = map(piece, paths)
    assert id1 == id2 == run_id
    steps = train_steps(before)
    assert steps == train_steps(rows)[: len(steps)]
    # A second of rows may be lost; on a busy machine more.
    assert len(steps) >= len(train_steps([row for row in rows if row["time"] < killed - 3])) > 0
    assert train_steps(after) == train_steps(runs.rows()[len(rows) :]) and train_steps(after)[-1] == end
    counters = [item["_step"] for item in before + after]
    assert counters == sorted(set(counters)), "one run takes both"
    assert {item["elastic/restarts"] for item in after if "train/loss" in item} == {1}
    written = [path for path in (runs.folder / "runs/small/wandb").rglob("*") if path.is_file()]
    assert len(written) > 4 and not any(b"unspeakable" in path.read_bytes() for path in written), "the command line"
    (command,) = re.findall(r"^wandb (sync .*)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    command = command.replace("shakespeare_char", "small")
    said = subprocess.run(
        f"{sys.executable} -m wandb {command} --dry-run", shell=True, cwd=runs.folder, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert all(path.name in said.stdout + said.stderr for path in paths) and "2 run" in said.stdout + said.stderr


def test_a_server_that_accepts_and_never_answers_delays_nobody(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(50)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        settings = ("--log.wandb=auto", "--train.max_steps=20", "--elastic.timeout_seconds=5")
        output = runs(*settings, ranks=2, launcher="torchrun")
        (ended,) = (entry["time"] for entry in runs.rows() if entry.get("event") == "end")
        assert time.time() - ended < 2.5 * END_SECONDS  # on a busy machine
    assert output.count("warning: ") == 1 and "wandb" in output
    assert "step 20/20" in output and "snapshot  " in output
    assert "a" * 40 not in output
