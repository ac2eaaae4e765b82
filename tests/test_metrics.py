"""What a run says of itself is true: by a clock of the test's own, and by what anyone recomputes from the file."""

import io
import itertools
import json
import logging
import math
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Runs, in_world, read_until_step, snapshots
from torch import Tensor, nn

import train_gpt
from mingpt import distributed
from mingpt.distributed import _peak_of
from mingpt.elastic import Notes
from mingpt.grid import Grid
from mingpt.metrics import Bar, Ledger, Metrics, Past, look_back, read_metrics, recall
from mingpt.slots import Slots
from mingpt.snapshot import Snapshots, find_image, read_verified
from mingpt.trainer import Trainer
from mingpt.watch import SPIKE, Losses, StallWatch

TOKENS = np.random.default_rng(0).integers(0, 11, 900).astype(np.uint16)


class Clock:
    """Time that passes only where a test lets it; in place of the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    perf_counter = monotonic = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("trainer", "keeper", "watch", "metrics", "data"):
        monkeypatch.setattr(f"mingpt.{module}.time", clock)
    return clock


class Slow(nn.Module):
    """A table whose cells take a second in training and ten in evaluation."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 11)
        self._clock = clock

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[None, Tensor]:
        self._clock.now += 1 if self.training else 10
        return None, nn.functional.cross_entropy(self.table(idx).flatten(0, 1), targets.flatten())


def slow_trainer(clock: Clock, path: Path, **settings: Any) -> Trainer:
    def sample() -> str:
        clock.now += 50
        return "text"

    defaults: dict[str, Any] = {
        "block_size": 8, "global_batch_size": 8, "micro_batch_size": 2, "log_interval": 5, "eval_interval": 10,
        "sample_interval": 10, "sample": sample, "metrics": Metrics(path, settings.get("generation", 1)),
    }  # fmt: skip
    return Trainer(Slow(clock), TOKENS[:800], TOKENS[800:], **defaults | settings)


def by_hand(entries: list[dict[str, Any]]) -> float:
    """Goodput as README.md defines it."""
    rows = {row["step"]: row for row in entries if "perf/step_seconds" in row}
    steps = [0, *sorted(rows)]
    useful = sum((b - a) * rows[b]["perf/step_seconds"] for a, b in itertools.pairwise(steps))
    newest = max(row["time"] for row in rows.values())
    return float(useful / (newest - min(entry["time"] for entry in entries if entry.get("event") == "start")))


@pytest.mark.usefixtures("prompt_saves")
def test_speed_is_the_steps_alone_and_goodput_counts_everything_else(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Slots.finish

    def slow_finish(slots: Slots) -> bool:
        clock.now += 20
        return finish(slots)

    monkeypatch.setattr(Slots, "finish", slow_finish)
    path = tmp_path / "metrics.jsonl"
    ours = snapshots(tmp_path / "kept", "us", keep_last=9)
    first = slow_trainer(clock, path, max_steps=30, snapshots=ours, save_interval=17)
    first.metrics.event("start", 0)
    first.max_steps = 20  # as if it were killed then
    first.fit()
    clock.now += 500  # the machine is away
    manifest = next(kept for kept in ours.all() if kept.facts["step"] == 17)
    assert look_back([recall(read_metrics(path))]) == Past(20, 0)
    second = slow_trainer(clock, path, max_steps=30, snapshots=ours, save_interval=17, generation=2, steps_lost=3)
    second.restore(read_verified(manifest), manifest)
    second.metrics.event("start", 17)
    second.fit()

    entries = list(read_metrics(path))
    rows = [row for row in entries if "perf/step_seconds" in row]
    assert [row["step"] for row in rows] == [5, 10, 15, 20, 20, 25, 30]
    assert {row["perf/step_seconds"] for row in rows} == {4.0}, "four cells of a second each, and nothing else"
    assert {row["perf/tokens_per_second"] for row in rows} == {64 / 4}
    assert {row["perf/snapshot_stall_seconds"] for row in rows} == {0, 20}
    assert rows[-1]["perf/goodput"] == pytest.approx(by_hand(entries))
    assert rows[-1]["perf/goodput"] == pytest.approx(30 * 4 / (rows[-1]["time"] - 1000))
    assert [row["elastic/restarts"] for row in rows] == [0] * 4 + [1] * 3
    assert [row.get("elastic/steps_lost") for row in rows] == [None] * 4 + [3, None, None]
    assert rows[-1]["data/tokens_seen"] == 30 * 64
    assert {17, 30} <= {entry["step"] for entry in entries if entry.get("event") == "snapshot"}


def test_the_share_of_the_peak_and_of_waiting(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingpt.distributed.peak_flops", lambda *_: 800.0)
    path = tmp_path / "metrics.jsonl"
    trained = slow_trainer(clock, path, max_steps=5, flops_per_token=10.0)
    cells = trained.batches.cells

    def late(*place: Any) -> Any:
        clock.now += 1
        trained.batches.waited_seconds += 1
        return cells(*place)

    trained.batches.cells = late  # type: ignore[method-assign]
    trained.fit()
    (row,) = (row for row in read_metrics(path) if "perf/mfu" in row)
    assert row["perf/mfu"] == pytest.approx(64 / 5 * 10 / 800)
    assert row["perf/data_wait_share"] == pytest.approx(1 / 5)


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, False, 989.5e12),
        ("NVIDIA H100 PCIe", torch.float16, False, 756e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, True, 156e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, False, 19.5e12),
        ("NVIDIA A10G", torch.bfloat16, False, 70e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, False, None),
        ("NVIDIA GeForce RTX 4090 D", torch.bfloat16, False, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16, False, None),
        ("NVIDIA L40", torch.bfloat16, False, None),
        ("Tesla T4", torch.float16, False, None),
    ],
)
def test_peaks_are_those_of_the_device_and_not_of_another(
    name: str, dtype: torch.dtype, tf32: bool, peak: float | None
) -> None:
    assert _peak_of(name, dtype, tf32) == peak
    assert distributed.peak_flops(torch.device("cpu"), dtype) is None


def test_what_nodes_know_goes_together() -> None:
    first = [
        {"event": "start", "step": 0, "generation": 1, "time": 10.0, "steps_lost": 0},
        {"step": 40, "generation": 1, "time": 20.0, "train/loss": 1.0},
        {"event": "sample", "step": 99, "generation": 1, "time": 21.0},
    ]
    second = [
        {"event": "start", "step": 38, "generation": 2, "time": 30.0, "steps_lost": 2},
        {"step": 30, "generation": 2, "time": 31.0, "train/loss": 1.0},
    ]
    assert look_back([recall(first)]) == Past(40, 0)
    assert look_back([recall(second), recall([]), recall(first)]) == Past(30, 2), "the newest sign, not the highest"
    assert look_back([recall([])]) == Past(0, 0)


def test_only_what_follows_a_start_of_the_run_is_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"event": "start", "step": 0, "run_id": "old"}, {"step": 9}, {"event": "start", "step": 0, "run_id": "us"}]
    path.write_text("\n".join(json.dumps(line) for line in [*lines, {"step": 1}]), encoding="utf-8")
    assert [entry["step"] for entry in read_metrics(path, "us")] == [0, 1]
    assert len([*read_metrics(path)]) == 4


def recover(folder: str) -> list[dict[str, Any]]:
    """The events of two ranks, of which the second alone was there before."""
    world = distributed.locate("cpu")
    world = distributed.World(world.rank, 0, world.world_size, 1, world.device)  # each on a node of its own
    distributed.connect(world, {}, timeout_seconds=60)
    place = Path(folder) / str(world.rank)
    place.mkdir()
    if world.rank == 1:
        before = Notes(place)
        before.began(1.0)
        before.step(7)
    notes = Notes(place)
    notes.began(2.0)
    table = nn.Embedding(11, 11)

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, idx: Tensor, targets: Tensor) -> tuple[None, Tensor]:
            return None, nn.functional.cross_entropy(self.table(idx).flatten(0, 1), targets.flatten())

    trained = Trainer(
        Table(), TOKENS, block_size=8, max_steps=3, log_interval=1, world=world, steps_lost=0, generation=2,
        metrics=Metrics(place / "metrics.jsonl", 2),
    )  # fmt: skip
    trained.fit(notes=notes)
    distributed.leave()
    assert world.rank == 0 or notes.last is not None and notes.last[1] == 7
    return list(read_metrics(place / "metrics.jsonl"))


def test_rank_0_on_a_newcomer_learns_what_the_recovery_took(tmp_path: Path) -> None:
    told, _ = in_world(2, recover, str(tmp_path))
    (event,) = (entry for entry in told if entry.get("event") == "recovery")
    rows = [row for row in told if "train/loss" in row]
    assert event["seconds"] > 0 and event["step"] == 1
    assert [row.get("elastic/recovery_seconds") for row in rows] == [event["seconds"], None, None]
    assert rows[0]["elastic/steps_lost"] == 0


def test_a_ledger_counts_a_step_once() -> None:
    ledger = Ledger(began=0.0)
    ledger.note(10, 2.0)
    ledger.note(20, 1.0)
    assert ledger.useful_seconds == 30 and ledger.goodput < 1e-6
    again = Ledger(0.0, 10, 20.0)  # of an image at step 13
    again.note(20, 1.5)
    assert again.useful_seconds == 35 and math.isfinite(again.goodput)


def test_steps_of_which_no_ledger_tells_are_not_useful(clock: Clock, tmp_path: Path) -> None:
    ours = snapshots(tmp_path / "kept")
    slow_trainer(clock, tmp_path / "first", max_steps=10, snapshots=ours).fit()
    newest = ours.newest()
    assert newest
    manifest, image = newest
    image.metadata.pop("ledger")  # as older versions wrote it
    second = slow_trainer(clock, tmp_path / "second", max_steps=20)
    second.restore(image, manifest)
    second.fit()
    assert second.ledger.useful_seconds == 10 * 4


def test_a_whole_run_tells_of_its_starts(runs: Runs) -> None:
    process = runs.start("--train.max_steps=60", "--snapshot.save_interval=20", "--elastic.ram_image=off")
    read_until_step(process, 33)
    process.kill()
    process.communicate()
    done = [row["step"] for row in runs.rows() if "train/loss" in row][-1]
    runs("--train.max_steps=70", "--snapshot.save_interval=20", "--elastic.ram_image=off")
    entries = runs.rows()
    first, second = (entry for entry in entries if entry.get("event") == "start")
    assert (first["steps_lost"], first["restarts"], first["changes"]) == (0, 0, {})
    assert second["steps_lost"] == done - second["step"] and second["restarts"] == 1
    assert second["changes"] == {"train.max_steps": [60, 70]}
    assert second["hosts"] == [[second["hosts"][0][0], 1]]
    assert second["config"]["train.max_steps"] == 70
    rows = [row for row in entries if "perf/goodput" in row]
    assert rows[-1]["perf/goodput"] == pytest.approx(by_hand(entries), rel=0.05)
    (end,) = (entry for entry in entries if entry.get("event") == "end")
    assert end["best_val_loss"] == min(row["val/loss"] for row in entries if "val/loss" in row)
    assert 0 < end["goodput"] <= rows[-1]["perf/goodput"]
    assert [entry["step"] for entry in entries if entry.get("event") == "snapshot"][-1] == 70
    began = json.loads((runs.folder / "runs/small/run.json").read_text(encoding="utf-8"))["began"]
    ledger = find_image(str(runs.folder / "runs/small"))[1].metadata["ledger"]
    assert ledger["began"] == began < first["time"], "whatever becomes of metrics.jsonl"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_the_last_line_of_a_terminal_and_nothing_in_a_pipe(clock: Clock) -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        bar = Bar(stream)
        for step in range(10, 31):
            bar.show(step, 100)
            clock.now += 0.0625
        bar.clear()
    drawn = terminal.getvalue().split("\r\x1b[K")
    assert len(drawn) == 1 + 11 + 1, "every other step, as they take half of what is between two of them"
    assert drawn[1].endswith("] 10 of 100  left ? ") and drawn[-2].endswith("] 30 of 100  left 0:04 ")
    assert drawn[-2].count("#") == 12 and drawn[-1] == ""
    assert pipe.getvalue() == ""


def test_every_rank_can_have_its_log(runs: Runs) -> None:
    output = runs("--log.all_ranks=true", "--train.max_steps=8", ranks=2, launcher="torchrun")
    logs = [(runs.folder / f"runs/small/logs/rank-{rank}.log").read_text(encoding="utf-8") for rank in range(2)]
    assert "INFO step  8/8  loss" in logs[0] or "INFO step 8/8  loss" in logs[0]
    assert "step 8/8" not in logs[1] and " INFO " in logs[1]
    assert "\r" not in output and "\x1b" not in output
    balance = r"^goodput +[\d.]+ % of the \d+:\d\d since it began\nrestarts +0, 0 steps done again$"
    assert re.search(balance, output, re.M)
    assert "best val loss   " in output


def warnings_in(path: Path) -> list[tuple[str, int]]:
    return [(entry["kind"], entry["step"]) for entry in read_metrics(path) if entry.get("event") == "warning"]


def test_a_spike_is_told_and_noise_and_learning_are_not() -> None:
    noise = np.random.default_rng(0).normal(0, 0.05, 2000)
    falling = 3 * np.exp(-np.arange(2000) / 300) + 1 + noise
    losses = Losses()
    assert [i for i, loss in enumerate(falling) if losses.score(float(loss)) > SPIKE] == []
    assert losses.score(2.0) > SPIKE
    assert losses.score(math.nan) != losses.score(math.nan), "it is no number"
    assert losses.score(2.0) > SPIKE, "a few of them move no median"
    flat = Losses()
    assert all(flat.score(1.0) == 0 for _ in range(30)) and flat.score(1.001) < SPIKE < flat.score(1.1)
    assert all(Losses().score(loss) == 0 for loss in (1.0, 9.0)), "nothing is known yet"


def test_a_spike_is_an_event(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    trained = slow_trainer(clock, path, max_steps=30, log_interval=1, eval_interval=0, sample=None)
    update = trained._update

    def jump() -> None:
        if trained.step == 24:
            with torch.no_grad():
                trained.model.table.weight *= 50  # type: ignore[union-attr, operator]
        update()

    trained._update = jump  # type: ignore[method-assign]
    trained.fit()
    assert warnings_in(path)[0] == ("loss_spike", 25)


def test_starving_is_told_once(clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    trained = slow_trainer(clock, path, max_steps=30)
    cells = trained.batches.cells

    def late(*place: Any) -> Any:
        clock.now += 2
        trained.batches.waited_seconds += 2
        return cells(*place)

    trained.batches.cells = late  # type: ignore[method-assign]
    trained.fit()
    assert warnings_in(path) == [("starved", 16)], "after three rows in a row, and once"
    assert "33% of a step is waiting for data.path: give" in caplog.text


def starve(path: str) -> str:
    """What each of two ranks says, of which the second alone waits for data."""
    world = distributed.locate("cpu")
    distributed.connect(world, {}, timeout_seconds=60)
    said = io.StringIO()
    logging.getLogger("mingpt").addHandler(logging.StreamHandler(said))
    trained = slow_trainer(Clock(), Path(path), max_steps=8, log_interval=1, world=world)
    cells = trained.batches.cells

    def late(*place: Any) -> Any:
        trained.batches.waited_seconds += 100 * world.rank
        return cells(*place)

    trained.batches.cells = late  # type: ignore[method-assign]
    trained.fit()
    distributed.leave()
    return said.getvalue()


def test_a_rank_that_starves_and_holds_all_others_up_is_named_by_rank_0(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first, second = in_world(2, starve, str(path))
    assert warnings_in(path) == [("starved", 4)]
    assert re.search(r"% of a step is waiting for data\.path on rank 1 \(.+\): give", first)
    assert "waiting" not in second


@pytest.mark.parametrize("patience", [30.0, 1e6])
def test_a_snapshot_that_is_late_is_told_until_it_comes(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    monkeypatch.setattr("mingpt.keeper.LATE_SECONDS", patience)
    path, go, save = tmp_path / "metrics.jsonl", threading.Event(), Snapshots.save

    def stuck(ours: Snapshots, *args: Any, **more: Any) -> Any:
        assert go.wait(60)
        return save(ours, *args, **more)

    monkeypatch.setattr(Snapshots, "save", stuck)
    trained = slow_trainer(clock, path, max_steps=30, snapshots=snapshots(tmp_path / "kept"), save_interval=5)
    update = trained._update

    def release() -> None:
        if trained.step == 20:
            go.set()
            saver = trained.keeper.saver
            assert saver and saver._saving
            saver._saving.result()
        update()

    trained._update = release  # type: ignore[method-assign]
    trained.fit()
    if patience > 1e3:
        assert warnings_in(path) == [], "steps may be short"
        return
    assert warnings_in(path)[0] == ("snapshot_late", 15) and warnings_in(path).count(("snapshot_late", 20)) == 0


def test_the_stacks_of_a_step_that_stalls_are_written(tmp_path: Path) -> None:
    told, path = threading.Event(), tmp_path / "rank-0.log"
    steps: list[int] = []

    class Told(Metrics):
        def warn(self, kind: str, step: int, message: str) -> None:
            steps.append(step)
            told.set()

    watch = StallWatch(0.05, tmp_path, 0, Told())

    def a_step_that_hangs() -> None:
        watch.begin(7)
        assert told.wait(30)

    a_step_that_hangs()
    watch.end()
    told.clear()
    assert not told.wait(0.2), "between two steps nothing stalls"
    watch.close()
    assert steps == [7]
    said = path.read_text(encoding="utf-8")
    assert "a_step_that_hangs" in said and said.count("the stacks, 0.05 s into a step") == 1


def test_a_stall_in_a_training_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, stalled = tmp_path / "metrics.jsonl", threading.Event()
    clock = Clock()  # which the model moves, and nobody looks at
    trained = slow_trainer(clock, path, max_steps=4, stall_seconds=0.5, logs=tmp_path / "logs")
    update, warn = trained._update, trained.metrics.warn

    def hang() -> None:
        if trained.step == 2:
            assert stalled.wait(60)
        update()

    def told(*what: Any) -> None:
        warn(*what)
        stalled.set()

    trained._update, trained.metrics.warn = hang, told  # type: ignore[method-assign]
    trained.fit()
    assert warnings_in(path) == [("stall", 2)]
    assert "in hang" in (tmp_path / "logs" / "rank-0.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("ranks", "micro", "said"),
    [
        (1, 4, None),
        (3, 4, None),
        (2, 4, "uneven: the ranks wait for each other: 75% of the time is used.*=3 makes 4 cells and uses 100%"),
        (5, 4, "idle: 2 of 5 ranks have nothing to do; train.micro_batch_size=1 makes 12 cells"),
        (7, 1, None),
    ],
)
def test_shares_that_leave_ranks_idle_are_told(ranks: int, micro: int, said: str | None, tmp_path: Path) -> None:
    plan: Any = SimpleNamespace(
        grid=Grid(1000, 8, 12, micro, seed=0), world=distributed.World(0, 0, ranks, ranks, torch.device("cpu"))
    )
    train_gpt.check_shares(plan, 0, Metrics(tmp_path / "metrics.jsonl"))
    told = [f"{entry['kind']}: {entry['message']}" for entry in read_metrics(tmp_path / "metrics.jsonl")]
    assert told == [] if said is None else re.search(said, *told)
