"""The loop from Python: what a resume restores, what a step leaves alone, and how a run ends."""

import dataclasses
import itertools
import math
import signal
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from conftest import in_world, manifests, snapshots
from torch import Tensor, nn

from mingpt import distributed
from mingpt.elastic import Notes, StopSignals
from mingpt.image import Image, decode, encode, sha256s
from mingpt.keeper import IMAGE_SECONDS, IMAGE_SHARE, Cadence, Keeper
from mingpt.metrics import Metrics, read_metrics
from mingpt.model import GPT, GPTConfig
from mingpt.optim import learning_rate_at, make_optimizer
from mingpt.reduction import FastReduction
from mingpt.slots import Slots, newest_image
from mingpt.snapshot import Snapshots, read_verified
from mingpt.trainer import Trainer

VOCABULARY = 11
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, 900).astype(np.uint16)


def gpt(dropout: float = 0.1) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(VOCABULARY, block_size=8, n_layer=1, n_head=2, n_embd=16, dropout=dropout))


def trainer(model: nn.Module | None = None, **changes: Any) -> Trainer:
    settings: dict[str, Any] = {
        "block_size": 8, "global_batch_size": 8, "micro_batch_size": 2, "max_steps": 30, "warmup_steps": 5,
        "log_interval": 1, "eval_interval": 10,
    }  # fmt: skip
    return Trainer(model or gpt(), TOKENS[:800], TOKENS[800:], **settings | changes)


def state_of(trained: Trainer) -> Image:
    return decode(encode(trained._tensors(), trained._metadata()), "memory")


class Recorder(Metrics):
    """Metrics in memory, and a call of `at[step]` when that step is logged."""

    def __init__(self, at: dict[int, Callable[[], None]] | None = None) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}
        self._at = at or {}

    def row(self, step: int, values: dict[str, float]) -> None:
        self.rows.setdefault(step, {}).update(values)
        if "train/loss" in values:
            self._at.get(step, lambda: None)()


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_a_resumed_run_is_the_uninterrupted_one_in_every_bit(reduction: str) -> None:
    whole, first, second = Recorder(), Recorder(), Recorder()
    straight = trainer(reduction=reduction, metrics=whole)
    straight.fit()

    stopped = trainer(reduction=reduction, metrics=first)
    stopped.max_steps = 13  # in the middle of an epoch (800 tokens: 12.4 steps) and between two evaluations
    stopped.fit()
    other = gpt()
    torch.manual_seed(99)  # a new process has other generators and other weights
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    resumed = trainer(other, reduction=reduction, metrics=second)
    resumed.restore(state_of(stopped))
    assert resumed.step == 13
    resumed.fit()

    assert sha256s(resumed._tensors()) == sha256s(straight._tensors())
    assert {step: row.get("train/loss") for step, row in (first.rows | second.rows).items()} == {
        step: row.get("train/loss") for step, row in whole.rows.items()
    }
    assert [row["train/lr"] for row in second.rows.values() if "train/lr" in row] == [
        row["train/lr"] for step, row in whole.rows.items() if step > 13
    ]
    assert resumed.best_val_loss == straight.best_val_loss


def test_state_that_does_not_fit_is_refused_by_name() -> None:
    saved = state_of(trainer())
    other = trainer(GPT(GPTConfig(VOCABULARY, block_size=8, n_layer=2, n_head=2, n_embd=16)))
    with pytest.raises(ValueError, match=r"does not fit.*transformer\.h\.1"):
        other.restore(saved)


def test_the_optimizer_gets_the_rate_of_its_step() -> None:
    rates: list[float] = []
    trained = trainer(max_steps=12)
    step = trained.optimizer.step
    trained.optimizer.step = lambda *a, **k: (rates.append(trained.optimizer.param_groups[1]["lr"]), step(*a, **k))  # type: ignore[method-assign]
    trained.fit()
    expected = [
        learning_rate_at(s, schedule="cosine", learning_rate=1e-3, min_lr=1e-4, warmup_steps=5, max_steps=12)
        for s in range(12)
    ]
    assert rates == expected


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_schedules_warm_up_stay_between_their_bounds_and_end_where_they_should(schedule: str) -> None:
    def at(step: int) -> float:
        return learning_rate_at(
            step, schedule=schedule, learning_rate=1.0, min_lr=0.1, warmup_steps=10, max_steps=100, decay_fraction=0.3
        )

    assert [at(s) for s in range(10)] == pytest.approx([(s + 1) / 10 for s in range(10)])
    assert at(10) == 1.0
    assert all(0.1 <= at(s) <= at(s - 1) for s in range(11, 300))
    assert at(100) == at(10**6) == (1.0 if schedule == "constant" else pytest.approx(0.1))
    if schedule == "cosine":
        assert at(55) == pytest.approx(0.55)
    if schedule == "wsd":
        assert at(70) == 1.0
        assert at(85) == pytest.approx(0.55)


def test_evaluating_and_sampling_leave_training_alone() -> None:
    plain = trainer(eval_interval=0, max_steps=10)
    plain.fit()
    disturbed = trainer(
        eval_interval=1, sample_interval=1, max_steps=10, sample=lambda: str(torch.rand(3) + np.random.rand())
    )
    disturbed.fit()
    assert sha256s(disturbed._tensors()) == sha256s(plain._tensors())
    assert disturbed.model.training


def test_a_state_that_is_not_this_trainers_is_refused() -> None:
    ours = trainer()
    image = state_of(ours)
    short = {name: tensor for name, tensor in image.tensors.items() if name != "model.transformer.wte.weight"}
    other = {name: tensor.double() if "wte" in name else tensor for name, tensor in image.tensors.items()}
    for tensors in (short, other):
        with pytest.raises(ValueError, match=r"does not fit .*: \d+ tensors differ, \w+\.transformer\.wte"):
            ours.restore(Image(image.metadata, tensors))
    parts = {key: value for key, value in image.metadata.items() if key not in ("step", "scaler")}
    with pytest.raises(ValueError, match=r"lacks .*: step, scaler$"):
        ours.restore(Image(parts, image.tensors))


def val_loss() -> float:
    world = distributed.locate("cpu")
    distributed.connect(world, {}, timeout_seconds=60)
    tested = trainer(gpt(dropout=0.5), world=world)
    loss = tested.evaluate()
    assert tested.evaluate() == loss, "dropout is off, and nothing random is left"
    tested.close()
    distributed.leave()
    return loss


def test_validation_is_the_same_number_at_every_world_size() -> None:
    losses = {loss for world_size in (1, 2, 3, 6) for loss in in_world(world_size, val_loss)}
    assert len(losses) == 1
    with torch.no_grad():  # 100 tokens: 12 windows of 8 targets and one of 3, counted by hand
        model = gpt().eval()
        rows = [torch.from_numpy(TOKENS[800 + i : 800 + i + 9].astype(np.int64))[None] for i in range(0, 99, 8)]
        total = sum(float(model(row[:, :-1], row[:, 1:])[1]) * (row.numel() - 1) for row in rows)
    assert losses.pop() == pytest.approx(total / 99, rel=1e-6)


class Broken(nn.Module):
    """A GPT whose loss is not finite in the cells that hold `token`."""

    def __init__(self, when: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.gpt = gpt()
        self._when = when

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[None, Tensor]:
        _, loss = self.gpt(idx, targets)
        return None, loss * (math.inf if self.training and self._when(idx) else 1)


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_a_gradient_that_is_not_finite_ends_the_run_and_spoils_nothing(reduction: str, tmp_path: Path) -> None:
    calls = iter(range(10**6))
    broken = trainer(
        Broken(lambda idx: next(calls) == 4 * 7 + 2),  # in update 7, in its third cell
        reduction=reduction, snapshots=snapshots(tmp_path, "us"), save_interval=5, eval_interval=0,
    )  # fmt: skip
    named = r"gpt\.transformer\.wte\.weight, .*the loss" if reduction == "exact" else "some parameter"
    with pytest.raises(ArithmeticError, match=rf"update 7 \(samples 56 to 63\).* in {named}.*step-000000005"):
        broken.fit()
    assert [manifest.facts["step"] for manifest in manifests(tmp_path)] == [5]
    assert all(torch.isfinite(p).all() for p in broken.model.parameters())


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_a_gradient_that_is_not_finite_can_be_passed_over(
    reduction: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = iter(range(10**6))
    metrics = Recorder()
    skipping = trainer(
        Broken(lambda idx: next(calls) in (4 * 7 + 2, 4 * 12)), reduction=reduction, on_nonfinite="skip",
        snapshots=snapshots(tmp_path, "us"), metrics=metrics, eval_interval=0,
    )  # fmt: skip
    before: list[list[Tensor]] = []
    update = skipping._update

    def watched() -> None:
        before.append([p.detach().clone() for p in skipping.model.parameters()])
        update()

    skipping._update = watched  # type: ignore[method-assign]
    with caplog.at_level("WARNING", "mingpt"):
        skipping.fit()
    assert skipping.step == 30
    same = [all(map(torch.equal, *pair)) for pair in itertools.pairwise(before)]
    assert [step for step, equal in enumerate(same) if equal] == [7, 12], "the position advances, the weights do not"
    assert (
        "1 update(s) skipped: the gradient was not finite; the last one was update 7 (samples 56 to 63)" in caplog.text
    )
    image = read_verified(manifests(tmp_path)[0])
    assert image.tensors["trainer.skips"].tolist() == [2]
    assert image.tensors["trainer.skipped"].tolist()[:3] == [7, 12, -1]
    again = trainer(Broken(lambda idx: False), reduction=reduction, max_steps=31)
    again.restore(image)
    assert again._skipped.tolist()[:3] == [7, 12, -1]


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_skipping_without_an_end_ends(reduction: str) -> None:
    hopeless = trainer(
        Broken(lambda idx: True), reduction=reduction, on_nonfinite="skip", eval_interval=0, max_steps=60
    )
    with pytest.raises(ArithmeticError, match="update 20 "):
        hopeless.fit()


def test_a_broken_last_update_is_told_before_anything_is_made_of_it() -> None:
    said: list[int] = []
    calls = iter(range(10**6))
    broken = trainer(
        Broken(lambda idx: next(calls) == 4 * 4), max_steps=5, eval_interval=0, sample=lambda: str(said.append(1))
    )
    with pytest.raises(ArithmeticError, match="update 4 "):
        broken.fit()
    assert said == []


def test_no_snapshot_is_taken_right_after_a_broken_update(tmp_path: Path) -> None:
    calls = iter(range(10**6))
    broken = trainer(
        Broken(lambda idx: next(calls) == 4 * 4),
        snapshots=snapshots(tmp_path, "us"),
        save_interval=5,
        eval_interval=0,
    )
    with pytest.raises(ArithmeticError, match="update 4 .*there is no snapshot"):
        broken.fit()
    assert manifests(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_stops_after_a_step_with_everything_saved(number: int, tmp_path: Path) -> None:
    metrics = Recorder({7: lambda: signal.raise_signal(number)})
    stopping = trainer(metrics=metrics, snapshots=snapshots(tmp_path, "us"), save_interval=0)
    before = signal.getsignal(number)
    stopping.fit()
    assert stopping.stopped
    assert 7 < stopping.step <= 9
    assert [manifest.facts["step"] for manifest in manifests(tmp_path)] == [stopping.step]
    assert signal.getsignal(number) is before


def stop_in_evaluation(folder: str) -> tuple[int, bool]:
    world = distributed.locate("cpu")
    distributed.connect(world, {}, timeout_seconds=60)
    calls = iter(range(10**6))

    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = gpt()

        def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor | None]:
            if (
                not self.training and world.rank == 1 and next(calls) == 30
            ):  # in the second evaluation, of 25 cells a rank
                signal.raise_signal(signal.SIGTERM)
            return cast(tuple[Tensor | None, Tensor | None], self.gpt(idx, targets))

    stopping = Trainer(
        Interrupted(), TOKENS[:500], TOKENS[500:], block_size=8, global_batch_size=2, micro_batch_size=1, max_steps=30,
        eval_interval=10, save_interval=0, world=world, snapshots=snapshots(Path(folder), "us"),
    )  # fmt: skip
    stopping.fit()
    distributed.leave()
    return stopping.step, stopping.stopped


def test_a_wish_to_stop_ends_an_evaluation_on_all_ranks(tmp_path: Path) -> None:
    assert in_world(2, stop_in_evaluation, str(tmp_path)) == [(10, True)] * 2
    (kept,) = manifests(tmp_path)
    assert kept.facts["step"] == 10 and kept.facts["val_loss"] is None, "a resume makes up for the evaluation"


@pytest.mark.parametrize("evaluating", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
def test_a_stop_only_to_form_anew_waits_for_no_upload(tmp_path: Path, leaves: bool, evaluating: bool) -> None:
    launcher = folder(tmp_path, "notes")
    notes = Notes(launcher)
    if leaves:
        notes.stop()
    metrics = Recorder({} if evaluating else {7: lambda: signal.raise_signal(signal.SIGTERM)})
    memory, ours = folder(tmp_path, "ram"), snapshots(tmp_path / "store", "us")
    stopping = trainer(
        metrics=metrics, snapshots=ours, save_interval=0, eval_interval=10 * evaluating, ram_dir=memory,
        micro_batch_size=1,
    )  # fmt: skip
    assert stopping.validation
    cell = stopping.validation.cell

    def interrupted(*place: Any) -> Any:
        if stopping.step == 10:
            signal.raise_signal(signal.SIGTERM)
        return cell(*place)

    stopping.validation.cell = interrupted  # type: ignore[method-assign]
    stopping.fit(notes=notes)
    assert stopping.stopped
    assert not evaluating or stopping.step == 10 and stopping.evaluated_step == 0
    saved = [manifest.facts["step"] for manifest in manifests(tmp_path / "store")]
    held = newest_image(memory, "us")
    if leaves:
        assert saved == [stopping.step] and held is None
    else:
        assert saved == [] and held is not None and held[0] == (1, stopping.step)


@pytest.mark.parametrize("interval", [0, 100])
def test_what_was_in_memory_alone_is_saved_at_once(tmp_path: Path, interval: int) -> None:
    first = trainer(max_steps=7)
    first.fit()
    ours = snapshots(tmp_path, "us", keep_last=9)
    again = trainer(snapshots=ours, save_interval=interval, eval_interval=0, max_steps=12)
    again.restore(state_of(first))
    again.fit()
    assert [kept.facts["step"] for kept in manifests(tmp_path)] == ([12, 7] if interval else [12])
    found = ours.newest()
    assert found
    once_more = trainer(snapshots=ours, save_interval=100, eval_interval=0, max_steps=14)
    once_more.restore(found[1], found[0])
    once_more.fit()
    assert 13 not in [kept.facts["step"] for kept in manifests(tmp_path)], "that was durable"


def test_a_signal_before_the_last_step_does_not_leave_its_end_undone(tmp_path: Path) -> None:
    metrics = Recorder({29: lambda: signal.raise_signal(signal.SIGTERM)})
    ending = trainer(metrics=metrics, snapshots=snapshots(tmp_path, "us"))
    ending.fit()
    assert ending.step == 30
    assert not ending.stopped
    assert "val/loss" in metrics.rows[30]


def ranks_with_their_own_weights() -> str:
    world = distributed.locate("cpu")
    distributed.connect(world, {}, timeout_seconds=60)
    model = gpt()
    with torch.no_grad():
        model.transformer.wte.weight += world.rank
    trained = trainer(model, world=world, max_steps=3)
    trained.fit()
    distributed.leave()
    return sha256s(trained._tensors())[0]


def test_ranks_start_from_the_same_weights_whatever_each_was_given() -> None:
    assert len(set(in_world(2, ranks_with_their_own_weights))) == 1


def test_float16_that_never_gets_a_finite_gradient_ends() -> None:
    hopeless = trainer(Broken(lambda idx: True), dtype=torch.float16, eval_interval=0, max_steps=60)
    with pytest.raises(ArithmeticError, match="update 20 "):
        hopeless.fit()


@pytest.mark.parametrize("dtype", [torch.float16])
def test_exact_reduction_from_python_refuses_what_it_cannot_do(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="neither float16 nor MPS"):
        trainer(reduction="exact", dtype=dtype)


def test_a_validation_loss_that_is_no_number_is_not_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = trainer(max_steps=30)
    losses = iter([math.nan, 2.0, 1.0, 3.0])
    monkeypatch.setattr(tested, "_mean_loss", lambda _: next(losses))
    tested.fit()
    assert tested.best_val_loss == 1.0


def test_a_resume_repeats_no_sample() -> None:
    said: list[int] = []
    first = trainer(sample_interval=5, max_steps=10, sample=lambda: str(said.append(0)))
    first.fit()
    again = trainer(sample_interval=5, max_steps=12, sample=lambda: str(said.append(1)))
    again.restore(state_of(first))
    again.fit()
    assert said == [0, 0, 1]


def test_two_signals_at_once_are_one_wish() -> None:
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert signals.wanted


@pytest.mark.usefixtures("prompt_saves")
def test_snapshots_come_by_steps_by_time_and_when_validation_improves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saved(**settings: Any) -> set[int]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        trainer(snapshots=snapshots(folder, "us", keep_last=99), max_steps=12, **settings).fit()
        return {manifest.facts["step"] for manifest in manifests(folder)}

    assert saved(save_interval=5, eval_interval=0) == {5, 10, 12}
    assert saved(save_interval=0, eval_interval=0) == {12}
    assert saved(save_interval=0, eval_interval=4, learning_rate=1e-2) >= {4, 12}
    clock = iter(range(0, 10**6, 1))
    monkeypatch.setattr("mingpt.keeper.time.monotonic", lambda: next(clock))
    by_time = saved(save_interval=0, eval_interval=0, save_interval_seconds=5)
    assert 2 <= len(by_time) < 12


@pytest.mark.usefixtures("prompt_saves")
def test_a_full_disk_is_told_and_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours = snapshots(tmp_path, "us")
    save, tries = ours.save, []

    def full(data: Tensor, **kwargs: Any) -> Any:
        tries.append(kwargs["step"])
        if kwargs["step"] == 10 or kwargs["step"] == 30 and len(tries) < 9:
            raise OSError(28, "No space left on device")
        return save(data, **kwargs)

    monkeypatch.setattr(ours, "save", full)
    monkeypatch.setattr("mingpt.keeper.RETRY_SECONDS", 1e-9)
    with pytest.raises(OSError, match=r"step 30 cannot be saved.*No space"):
        trainer(snapshots=ours, save_interval=10, eval_interval=0).fit()
    assert (tries[0], *tries[2:]) == (10, 20, 30)
    assert 11 <= tries[1] < 20, "made up for as soon as the training hears of it"
    assert "step 10 is not saved" in caplog.text
    assert [manifest.facts["step"] for manifest in manifests(tmp_path)] == [20, tries[1]]


@pytest.mark.parametrize("broken", ["put", "delete"])
def test_whatever_a_store_raises_does_not_end_the_run(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours = snapshots(tmp_path, "us", keep_last=1)
    sound = getattr(ours.store, broken)

    def strange(*arguments: Any) -> None:
        if "step-000000010" in arguments[0]:
            raise ValueError("a driver's own")
        sound(*arguments)

    monkeypatch.setattr(ours.store, broken, strange)
    trainer(snapshots=ours, save_interval=10, eval_interval=0).fit()
    assert "a driver's own" in caplog.text


@pytest.mark.usefixtures("prompt_saves")
def test_a_full_disk_may_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Snapshots, data: Tensor, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Snapshots, "save", full)
    stopping = trainer(snapshots=snapshots(tmp_path, "us"), save_interval=10, eval_interval=0, on_error="stop")
    with pytest.raises(OSError, match=r"step 10 cannot be saved.*No space"):
        stopping.fit()
    assert 10 < stopping.step < 30


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_slow_save_holds_nothing_up_and_saves_its_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    save, go, saved, steps = Snapshots.save, threading.Event(), threading.Event(), []

    def slow(self: Snapshots, data: Tensor, **kwargs: Any) -> Any:
        assert go.wait(60)
        steps.append(kwargs["step"])
        manifest = save(self, data, **kwargs)
        saved.set()
        return manifest

    def release() -> None:
        go.set()
        assert saved.wait(60)

    monkeypatch.setattr(Snapshots, "save", slow)
    settings: dict[str, Any] = {"save_interval": 5, "eval_interval": 0, "max_steps": 23}
    metrics = Recorder({18: release})  # the save of step 5 is on its way until then
    ours = snapshots(tmp_path / "slow", "us", keep_last=9)
    if in_memory:
        monkeypatch.setattr(Cadence, "is_due", lambda *_: True)
        settings["ram_dir"] = folder(tmp_path, "ram")
    trainer(snapshots=ours, metrics=metrics, **settings).fit()
    assert steps[0] == 5
    assert 18 <= steps[1] <= 20, "what was due meanwhile is made up for at once"
    assert steps[-1] == 23
    monkeypatch.undo()
    trainer(snapshots=snapshots(tmp_path / "fast", "us", keep_last=9), **settings).fit()
    fast = {m.facts["step"]: m.facts["state_sha256"] for m in manifests(tmp_path / "fast")}
    slow_ones = {m.facts["step"]: m.facts["state_sha256"] for m in manifests(tmp_path / "slow")}
    assert slow_ones[5] == fast[5], "its bytes are those of step 5, though 13 more were made meanwhile"
    assert slow_ones[23] == fast[23]


def folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


class Counting(nn.Module):
    """A GPT whose every forward changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt()
        self.register_buffer("forwards", torch.zeros(1))

    def forward(self, idx: Tensor, targets: Tensor) -> Any:
        self.forwards += 1  # type: ignore[operator]
        return self.gpt(idx, targets)


def test_images_in_memory_hold_the_state_of_their_step_however_late_they_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ram = folder(tmp_path, "ram")
    monkeypatch.setattr(Cadence, "is_due", lambda *_: True)
    ours = trainer(Counting(), snapshots=snapshots(tmp_path / "kept"), ram_dir=ram, max_steps=12, generation=3)
    begin, guard, finish, late = Keeper.begin, ours._guard, Slots.finish, threading.Event()
    states: dict[int, dict[str, Tensor]] = {}
    seen = []

    def slow(*args: Any, **options: Any) -> Tensor:
        assert late.wait(60)
        return encode(*args, **options)

    def begin_late(keeper: Keeper, *state: Any, **last: Any) -> None:
        states[ours.step] = {name: tensor.clone() for name, tensor in ours._tensors().items()}
        late.clear()
        begin(keeper, *state, **last)

    def finish_late(slots: Slots) -> bool:
        late.set()  # forward and backward are done, and the generators elsewhere
        return finish(slots)

    def look() -> None:
        assert ours.keeper.slots and ours.keeper.slots._committing
        ours.keeper.slots._committing.result()
        newest = newest_image(ram, "us")
        assert newest is not None
        assert newest[0] == (3, ours.step)
        assert newest[1].metadata["samples_seen"] == 8 * ours.step
        assert newest[1].tensors.keys() == states[ours.step].keys()
        for name, tensor in states[ours.step].items():
            assert newest[1].tensors[name].numpy().tobytes() == tensor.detach().numpy().tobytes(), name
        seen.append(ours.step)
        guard()

    monkeypatch.setattr("mingpt.slots.encode", slow)
    monkeypatch.setattr(Slots, "finish", finish_late)
    monkeypatch.setattr(Keeper, "begin", begin_late)
    monkeypatch.setattr(ours, "_guard", look)
    ours.fit()
    assert seen == list(range(12))
    assert sha256s(states[12])[1] == manifests(tmp_path / "kept")[0].facts["state_sha256"]
    assert list(ram.iterdir()) == [], "the run has ended"


def test_images_in_memory_stay_where_the_run_did_not_end_and_none_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(10**6))
    monkeypatch.setattr(Cadence, "is_due", lambda *_: True)
    broken = trainer(
        Broken(lambda idx: next(calls) == 4 * 7), snapshots=snapshots(tmp_path / "kept"),
        ram_dir=folder(tmp_path, "ram"), eval_interval=0,
    )  # fmt: skip
    with pytest.raises(ArithmeticError, match="update 7 "):
        broken.fit()
    newest = newest_image(tmp_path / "ram", "us")
    assert newest is not None
    assert newest[0] == (1, 7)


def test_images_in_memory_go_after_an_agreed_stop(tmp_path: Path) -> None:
    ram = folder(tmp_path, "ram")
    there: list[str] = []

    def stop() -> None:
        there.extend(path.name for path in ram.iterdir())
        signal.raise_signal(signal.SIGTERM)

    stopping = trainer(metrics=Recorder({7: stop}), snapshots=snapshots(tmp_path / "kept"), ram_dir=ram)
    stopping.fit()
    assert stopping.stopped
    assert len(there) == 1
    assert list(ram.iterdir()) == []


@pytest.mark.parametrize(
    ("step_seconds", "image_seconds", "expected"),
    [
        (0.1, 0.001, {1}),
        (30.0, 0.5, {1}),
        (0.01, 0.001, {8, 16}),  # 0.2 ms of a step are the share
        (0.01, 0.009, {64}),  # as many as fit into a second
        (0.3, 0.05, {2}),
        (0.6, 0.5, {1}),  # a step fits
        (5.0, 4.0, {1}),
    ],
)
def test_images_in_memory_are_as_many_as_cost_little_but_one_a_second(
    step_seconds: float, image_seconds: float, expected: set[int]
) -> None:
    cadence, now, cost, step, images = Cadence(), 100.0, 0.0, 7, []
    for step in range(7, 3000):
        if cadence.is_due(step, now):
            cadence.note(step, now, cost)
            images.append(step)
            slow = step == 7 or step % 11 == 0  # the first, and others now and then
            cost += image_seconds * (5 if slow else 1)
        now += step_seconds
    assert images[0] == 7
    late = images[len(images) // 2 :]
    between = {b - a for a, b in pairwise(late)}
    assert between <= expected
    share = image_seconds / step_seconds / min(between)
    lost = (max(between) + 1) * step_seconds
    assert share <= IMAGE_SHARE or lost + max(between) * step_seconds > IMAGE_SECONDS
    assert lost <= IMAGE_SECONDS or between == {1}


def test_steps_that_become_slower_do_not_put_an_image_off() -> None:
    cadence, now, images = Cadence(), 0.0, []
    for step in range(400):
        if cadence.is_due(step, now):
            cadence.note(step, now, 0.005 * len(images))
            images.append((step, now))
        now += 0.01 if step < 200 else 0.4
    assert max(b[1] - a[1] for a, b in pairwise(images)) < IMAGE_SECONDS + 0.4
    assert images[-1][0] - images[-2][0] == 1


def first_ranks_of_nodes(ram: str) -> int:
    """What a rank of a node of its own finds in memory at step 5, where its rank is 1."""
    world = dataclasses.replace(distributed.locate("cpu"), local_rank=0, local_world_size=1)
    distributed.connect(world, {}, timeout_seconds=60)
    ours = trainer(
        world=world, max_steps=6, snapshots=snapshots(Path(ram) / "kept"), ram_dir=Path(ram) / str(world.rank)
    )
    found = []
    guard = ours._guard

    def look() -> None:
        if ours.step == 5:
            newest = newest_image(Path(ram) / str(world.rank), "us")
            found.append(newest[0][1] if newest else -1)
        guard()

    ours._guard = look  # type: ignore[method-assign]
    ours.fit()
    distributed.leave()
    assert list((Path(ram) / str(world.rank)).iterdir()) == []
    return found[0]


def test_every_node_keeps_an_image(tmp_path: Path) -> None:
    for name in ("0", "1", "kept"):
        folder(tmp_path, name)
    assert all(step >= 0 for step in in_world(2, first_ranks_of_nodes, str(tmp_path)))


def first_node_leaves(place: str, both: bool) -> tuple[int, int | None]:
    """Where a rank of a node of its own stopped, and what is in its memory then."""
    world = dataclasses.replace(distributed.locate("cpu"), local_rank=0, local_world_size=1)
    distributed.connect(world, {}, timeout_seconds=60)
    ram, store, launcher = (folder(Path(place), f"{name}{world.rank}") for name in ("ram", "store", "notes"))
    notes = Notes(launcher)
    if world.is_main or both:
        notes.stop()
    metrics = Recorder({5: lambda: signal.raise_signal(signal.SIGTERM)})  # of rank 0 alone
    ours = trainer(world=world, metrics=metrics, eval_interval=0, snapshots=snapshots(store), ram_dir=ram)
    ours.fit(notes=notes)
    distributed.leave()
    newest = newest_image(ram, "us")
    return ours.step, newest and newest[0][1]


@pytest.mark.parametrize("both", [False, True])
def test_a_node_that_stays_keeps_its_image_where_the_snapshot_leaves_with_another(tmp_path: Path, both: bool) -> None:
    (step, left), (same_step, kept) = in_world(2, first_node_leaves, str(tmp_path), both)
    assert 5 < step < 30
    assert (same_step, left, kept) == (step, None, None if both else step)


def test_exact_mode_says_when_a_replayed_step_differs(caplog: pytest.LogCaptureFixture) -> None:
    first = Recorder()
    trainer(reduction="exact", metrics=first, max_steps=5).fit()
    losses = {step: row["train/loss"] for step, row in first.rows.items() if "train/loss" in row}
    again = trainer(reduction="exact", max_steps=5)
    again.restore(None, replayed=losses)
    again.fit()
    assert "not what it was" not in caplog.text
    again = trainer(reduction="exact", max_steps=5)
    again.restore(None, replayed=losses | {3: 1.0})
    again.fit()
    assert "step 3 is not what it was" in caplog.text


class Bigram(nn.Module):
    """The smallest language model: a table. A user's own, with a buffer and nothing of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.table(idx) * self.scale
        loss = None if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def test_a_users_own_model_trains_and_resumes(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    ours = snapshots(tmp_path, "mine")
    own = trainer(Bigram(), learning_rate=0.1, snapshots=ours, metrics=metrics)
    own.fit()
    losses = [row["train/loss"] for row in read_metrics(tmp_path / "metrics.jsonl") if "train/loss" in row]
    assert losses[-1] < losses[0]
    found = ours.newest()
    assert found is not None
    again = trainer(Bigram())
    again.restore(found[1], found[0])
    assert sha256s(again._tensors()) == sha256s(own._tensors())
    assert "model.scale" in found[1].tensors


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"grad_clip": -1}, "grad_clip=-1: expected a number, at least 0"),
        ({"schedule": "foo"}, "schedule='foo': expected one of cosine, linear"),
        ({"global_batch_size": 0}, "global_batch_size=0: expected a whole number, at least 1"),
        ({"micro_batch_size": 3}, "does not divide"),
        ({"max_steps": 2.5}, "max_steps=2.5: expected a whole number"),
        ({"block_size": "8"}, "block_size='8': expected"),
        ({"beta2": 1.0}, "beta2=1.0: expected"),
        ({"learning_rate": math.nan}, "learning_rate=nan: expected"),
        ({"weight_decay": None}, "weight_decay=None: expected"),
        ({"dtype": torch.float64}, "dtype=torch.float64: expected"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16': expected"),
        ({"reduction": "slow"}, "reduction='slow': expected"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(**setting)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (TOKENS.tolist(), "train_tokens is a list; give a 1-D numpy array of whole numbers"),
        (TOKENS.tobytes(), "train_tokens is a bytes;"),
        (torch.arange(99), r"train_tokens is a Tensor of torch.int64 and shape \(99,\);"),
        (TOKENS.astype(float), r"train_tokens is a ndarray of float64 and shape \(900,\);"),
        (TOKENS.reshape(2, -1), r"train_tokens is a ndarray of uint16 and shape \(2, 450\);"),
    ],
)
def test_tokens_of_another_kind_are_refused(tokens: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(gpt(), tokens, block_size=8)


class Returning(Bigram):
    def __init__(self, output: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.output = output

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        return self.output(self.table(idx))


@pytest.mark.parametrize("output", [lambda x: x, lambda x: (x, None), lambda x: (x, x), lambda x: (x, 1.0)])
def test_a_model_without_a_loss_is_refused(output: Callable[[Tensor], object]) -> None:
    with pytest.raises(ValueError, match="must return a pair, of which the second is the mean loss"):
        Trainer(Returning(output), TOKENS, block_size=8).fit()


def test_an_idle_rank_leaves_the_model_as_it_was() -> None:
    model = nn.Linear(2, 1)
    idle = FastReduction(model, distributed.locate("cpu"), 1, idle=True)
    for expected in (0, 1):
        model.weight.grad = None
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.sum() == 2 * expected
        idle.close()


def test_a_longer_header_needs_no_second_buffer() -> None:
    state = {"model.weight": torch.ones(1000)}
    first = encode(state, {"step": 1})
    assert encode(state, {"step": 10**9, "val_loss": 1.23456789}, first).data_ptr() == first.data_ptr()


def test_hangup_is_no_stop_where_it_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert not signals.wanted
    finally:
        signal.signal(signal.SIGHUP, before)


def test_rows_survive_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    metrics.row(1, {"train/loss": 1.0})
    with open(path, "ab") as file:
        file.write(b'{"step": 2, "tra')
    metrics.row(2, {"train/loss": math.nan})
    with open(path, "ab") as file:
        file.write(b'{"step": null, "train/loss": 1.0}\n[]\n')
    assert [(row["step"], row["train/loss"]) for row in read_metrics(path)] == [(1, 1.0), (2, "nan")]


def test_metrics_that_cannot_be_written_are_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics(tmp_path / "missing" / "metrics.jsonl")
    metrics.row(1, {})
    metrics.row(2, {})
    assert len(caplog.records) == 1


def test_float16_keeps_its_scale() -> None:
    first = trainer(dtype=torch.float16, max_steps=10)
    first.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    first.fit()
    second = trainer(dtype=torch.float16, max_steps=10)
    second.restore(state_of(first))
    assert second.scaler.state_dict() == first.scaler.state_dict()
    assert second.scaler.get_scale() > 2.0**12


def test_a_scaled_update_is_skipped_without_waiting_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer, scaler = make_optimizer(model, learning_rate=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    before = model.weight.detach().clone()
    asked = Tensor.item
    for factor, changes in ((math.inf, False), (1.0, True)):
        scaler.scale(model(torch.ones(1, 3)).sum() * factor).backward()
        scaler.unscale_(optimizer)  # type: ignore[arg-type]
        monkeypatch.setattr(Tensor, "item", lambda x: pytest.fail("waits"))
        scaler.step(optimizer)  # type: ignore[arg-type]
        scaler.update()
        monkeypatch.setattr(Tensor, "item", asked)
        assert torch.equal(model.weight, before) != changes
        assert optimizer.state[model.weight]["step"] == int(changes)
        model.zero_grad()
    assert scaler.get_scale() == 4.0 and optimizer.found_inf is None
