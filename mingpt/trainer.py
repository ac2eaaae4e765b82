"""The loop: one step in execution order, and when to log, evaluate, sample, save and stop.

    trainer = Trainer(model, train_tokens, val_tokens, block_size=64, max_steps=500)
    trainer.fit()

`model` is any module whose `model(idx, targets)` returns `(anything, mean loss)`, the tokens any 1-D array of whole
numbers. Under torchrun every rank runs the same lines between `distributed.connect` and `distributed.leave`, and the
number of ranks changes nothing but the speed: of models whose every parameter has a gradient in every step, and that
keep no statistics of the batches (as BatchNorm does, on each rank its own).
"""

import gc
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mingpt import distributed
from mingpt.data import Batches, Validation, check_tokens
from mingpt.distributed import Control, World
from mingpt.elastic import Notes, StopSignals
from mingpt.grid import Grid, mix, share
from mingpt.image import Image, restore_rng, rng_tensors, xxh3
from mingpt.keeper import Keeper
from mingpt.metrics import Ledger, Metrics, duration
from mingpt.optim import SCHEDULES, learning_rate_at, make_optimizer, optimizer_tensors
from mingpt.reduction import ExactReduction, FastReduction
from mingpt.snapshot import Manifest, Snapshots, model_tensors
from mingpt.tokens import Tokens
from mingpt.watch import SPIKE, Losses, StallWatch, Stopwatch, Waiting

log = logging.getLogger(__name__)

_SETTINGS: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("block_size", "max_steps", "global_batch_size", "micro_batch_size", "log_interval"),
        (Integral, lambda value: value >= 1, "a whole number, at least 1"),
    ),
    **dict.fromkeys(
        ("seed", "warmup_steps", "eval_interval", "eval_sequences", "sample_interval", "save_interval"),
        (Integral, lambda value: value >= 0, "a whole number, at least 0"),
    ),
    **dict.fromkeys(
        ("learning_rate", "min_lr", "weight_decay", "grad_clip", "save_interval_seconds", "stall_seconds"),
        (Real, lambda value: 0 <= value < math.inf, "a number, at least 0"),
    ),
    **dict.fromkeys(("beta1", "beta2"), (Real, lambda value: 0 <= value < 1, "a number from 0 to below 1")),
    "decay_fraction": (Real, lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "schedule": (str, SCHEDULES.__contains__, f"one of {', '.join(SCHEDULES)}"),
    "on_error": (str, ("warn", "stop").__contains__, "one of warn, stop"),
    "on_nonfinite": (str, ("stop", "skip").__contains__, "one of stop, skip"),
    "reduction": (str, ("fast", "exact").__contains__, "one of fast, exact"),
    "dtype": (
        torch.dtype, (torch.float32, torch.bfloat16, torch.float16).__contains__, "torch.float32, bfloat16 or float16",
    ),
}  # fmt: skip
BAD_IN_A_ROW = 20  # updates that may be skipped one after the other: more are no accident
SKIPS_LISTED = 64  # the newest ones that the state lists
STOP_INTERVAL = 8  # cells of an evaluation from one look at the wish to stop to the next


class Trainer:
    """Trains `model` on `train_tokens` (1-D, token ids) and knows how to go on where an image left off.

    Settings are those of the config sections `optim`, `train`, `snapshot` and `log`, by the same names; intervals are
    in optimizer steps. `world` is this process among the ranks (None: as the environment says), `generation` the number
    of its formation. Rank 0 alone writes into `snapshots` (None: nothing is saved) and `metrics`; the first rank of
    each node keeps images of that run in `ram_dir` (None: nowhere), until `fit` is done. `sample` returns a text to
    show, `description` is kept in every image. `flops_per_token` (of forward and backward) is what a share of the
    device's peak is told by; of a run that goes on `began` is the unix time of its first start, `steps_lost` how many
    steps it does again. Where a step takes longer than `stall_seconds` (0: never), each rank's stacks go into a file in
    `logs`. Call `restore` to go on from an image, then `fit`, once; afterwards `step`, `val_loss` and
    `stopped` tell how it ended.

    Raises ValueError for settings that contradict each other or the data.
    """

    def __init__(
        self,
        model: nn.Module,
        train_tokens: Tokens,
        val_tokens: Tokens | None = None,
        *,
        block_size: int,
        max_steps: int = 1000,
        global_batch_size: int = 32,
        micro_batch_size: int = 8,
        seed: int = 1337,
        reduction: str = "fast",
        learning_rate: float = 1e-3,
        min_lr: float = 1e-4,
        warmup_steps: int = 100,
        schedule: str = "cosine",
        decay_fraction: float = 0.2,
        weight_decay: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.99,
        grad_clip: float = 1.0,
        on_nonfinite: str = "stop",
        dtype: torch.dtype = torch.float32,
        compile: bool = False,
        eval_interval: int = 250,
        eval_sequences: int = 0,
        sample_interval: int = 0,
        log_interval: int = 10,
        stall_seconds: float = 0.0,
        logs: Path | None = None,
        save_interval: int = 250,
        save_interval_seconds: float = 0.0,
        on_error: str = "warn",
        world: World | None = None,
        generation: int = 1,
        snapshots: Snapshots | None = None,
        ram_dir: Path | None = None,
        metrics: Metrics | None = None,
        sample: Callable[[], str] | None = None,
        description: Mapping[str, object] | None = None,
        flops_per_token: float | None = None,
        began: float | None = None,
        steps_lost: int | None = None,
    ) -> None:
        given = dict(locals())
        for name, (kind, fits, expected) in _SETTINGS.items():
            if not isinstance(given[name], kind) or not fits(given[name]):
                raise ValueError(f"{name}={given[name]!r}: expected {expected}")
        check_tokens(train_tokens, "train_tokens")
        if global_batch_size % micro_batch_size:
            raise ValueError(f"train.micro_batch_size={micro_batch_size} does not divide {global_batch_size=}")
        self.world = world or distributed.locate()
        if reduction == "exact":
            if dtype == torch.float16 or self.world.device.type == "mps":
                raise ValueError("exact reduction supports neither float16 nor MPS; take bfloat16, or a CPU or CUDA")
            if any(p.dtype == torch.float16 for p in model.parameters()):
                raise ValueError("exact reduction needs parameters of float32 or bfloat16, and there are float16 ones")
            distributed.make_deterministic(compile)
        self.model = model.to(self.world.device)
        self.grid = Grid(len(train_tokens), block_size, global_batch_size, micro_batch_size, seed)
        self.share = share(self.world.rank, self.world.world_size, self.grid.cells)
        self.batches = Batches(train_tokens, self.grid, self.world.device)
        self.validation = None
        if val_tokens is not None and len(val_tokens):
            check_tokens(val_tokens, "val_tokens")
            self.validation = Validation(val_tokens, block_size, micro_batch_size, eval_sequences)
        self.optimizer: Any = make_optimizer(
            self.model, learning_rate=learning_rate, weight_decay=weight_decay, beta1=beta1, beta2=beta2
        )
        self.scaler = torch.amp.GradScaler(self.world.device.type, enabled=dtype == torch.float16)
        self.reduction = self._make_reduction(reduction)
        self.metrics = metrics if metrics and self.world.is_main else Metrics()
        self._stopwatch = Stopwatch()
        self.keeper = Keeper(
            self.world,
            self.metrics,
            self._stopwatch,
            snapshots,
            ram_dir,
            save_interval,
            save_interval_seconds,
            on_error,
        )
        self.max_steps = max_steps

        self._seed, self._dtype, self._compile = seed, dtype, compile
        self._grad_clip = grad_clip or math.inf
        self._schedule: dict[str, Any] = {
            "schedule": schedule, "learning_rate": learning_rate, "min_lr": min_lr, "warmup_steps": warmup_steps,
            "max_steps": max_steps, "decay_fraction": decay_fraction,
        }  # fmt: skip
        self._eval_interval, self._sample_interval, self._log_interval = eval_interval, sample_interval, log_interval
        self._stall_seconds, self._logs = stall_seconds, logs
        self._generation, self._sample = generation, sample
        self._description = dict(description or {})
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        peak = distributed.peak_flops(self.world.device, dtype)
        # The share of what the devices could do that a token a second is.
        self._mfu_per_rate = flops_per_token / peak / self.world.world_size if flops_per_token and peak else None

        # The position, and what is known at it.
        self.step = 0
        self.val_loss: float | None = None  # of the weights at `evaluated_step`
        self.best_val_loss: float | None = None
        self.evaluated_step = self.sampled_step = -1
        self.compiled = self.stopped = self._forms_anew = False

        self._control = Control(self.world, ["stop", "leave", "broken", "starved"])
        self._loss: Tensor | None = None
        self._grad_norm = torch.zeros((), device=self.world.device)
        # Non-finite gradients in a row, and the update at which there were too many, which the host gets to know of
        # without waiting for the device. A GradScaler meets some whenever it tries a larger scale.
        self._bad_in_a_row = torch.zeros((), dtype=torch.int64, device=self.world.device)
        self._bad_allowed = BAD_IN_A_ROW if on_nonfinite == "skip" or self.scaler.is_enabled() else 0
        # Updates that changed nothing: how many, and the newest of them, in a ring.
        self._skips = torch.zeros(1, dtype=torch.int64, device=self.world.device)
        self._skipped = torch.full((SKIPS_LISTED,), -1, dtype=torch.int64, device=self.world.device)
        self._skips_told = 0
        self._broken = torch.full((), -1, device=self.world.device)
        self._broken_seen = torch.full((), -1, pin_memory=self.world.device.type == "cuda")
        self._losses = Losses()
        self._waiting = Waiting()
        self._starved_told = False
        # What the first row after a restart tells.
        self._restart: dict[str, float] = {} if steps_lost is None else {"elastic/steps_lost": steps_lost}
        self.ledger = Ledger(began or time.time())
        self._restored = False
        self._restored_compiled: bool | None = None
        self._first_step = 0
        self._replayed: dict[int, float] = {}

    # The step and what is due between steps

    def fit(self, signals: StopSignals | None = None, notes: Notes | None = None) -> None:
        """Trains until `max_steps`, or until a signal asks to stop (then `stopped` is True and the state is saved).

        `signals` are the caller's, where it has them in hand already, `notes` are for the launcher.
        Raises ArithmeticError where the loss or the gradient is not finite, OSError where the last snapshot fails.
        """
        distributed.keep_freed_memory()
        if not self._restored:
            self.restore(None)  # every rank has rank 0's weights, whatever each of them was given
        if self._compile:
            self._warm_up()
        self.keeper.open(self.step, self._state)
        distributed.seed_all(mix(self._seed, self.step), self.world.device)
        self._first_step = self.step
        self._stopwatch.lap(self.step)  # the first one begins
        self._stalls = StallWatch(self._stall_seconds, self._logs, self.world.rank, self.metrics)
        try:
            with nullcontext(signals) if signals else StopSignals() as signals:
                self._signals, self._notes = signals, notes
                while self._due_before_step():
                    broken, starved = not self._is_sound(), self._waiting.lasts
                    self._control.start(stop=signals.wanted, leave=self._leaves, broken=broken, starved=starved)
                    self._stalls.begin(self.step)
                    self._update()
                    self.metrics.progress(self.step, self.max_steps)
                    if notes and self.world.local_rank == 0:
                        notes.step(self.step)
                distributed.barrier(self.world)  # the last snapshot is safe
                # It may lie on a disk of a node that leaves: those that stay go on from what they have in memory.
                stays = self.stopped and not self.world.is_main and not self._leaves
                if self.keeper.slots and not self._forms_anew and not stays:
                    self.keeper.slots.remove()
        finally:
            self._stalls.close()
            self.close()

    def _update(self) -> None:
        """One optimizer step, in execution order."""
        lr = learning_rate_at(self.step, **self._schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # The state before this update is copied beside the forward and the backward.
        self.keeper.begin(self.step, self._state, self._is_sound)
        cells = self.batches.cells(self.step, self.share)
        self.reduction.begin()
        for cell, (idx, targets) in zip(self.share, cells, strict=True):
            # Dropout does not know who runs it.
            distributed.seed_all(mix(self._seed, self.step, cell), self.world.device)
            with self.reduction.cell(last=cell == self.share[-1]):
                with self._autocast():
                    loss = loss_of(self.reduction.module(idx, targets))
                self.scaler.scale(loss * self.reduction.loss_weight).backward()
            self.reduction.add(loss)
        self._loss = self.reduction.finish(with_loss=self._is_log_due(self.step + 1))
        self.scaler.unscale_(self.optimizer)
        self._grad_norm = nn.utils.clip_grad_norm_(self._parameters, self._grad_clip)
        self.keeper.finish()
        self._guard()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        # Whoever draws now draws the same on every rank.
        distributed.seed_all(mix(self._seed, self.step), self.world.device)

    def _due_before_step(self) -> bool:
        """Does what is due at `step`; False when the training ends here. In this order a kill anywhere is harmless."""
        flags = self._control.read()
        end = self.step >= self.max_steps
        if end:
            self._signals.settle()
        elif flags["stop"]:
            self._stop(leave=flags["leave"] > 0)
        # The flag of the last update would come too late.
        if flags["broken"] or ((end or self.stopped) and int(self._broken) >= 0):
            self._report_broken()
        if self.step == self._first_step + 1:
            self._tell_recovery()
        if flags["starved"] and not self._starved_told:
            self._starved_told = True
            self._tell_starved()
        row: dict[str, float] = {}
        if self.step > self._first_step and self._is_log_due(self.step):
            row = self._log()
        self._stalls.end()
        with self._stopwatch.paused():
            improved = False
            if self.validation and (end or self._is_eval_due()) and not self.stopped:
                improved = self._evaluate(row)
            if "perf/step_seconds" in row:
                row["perf/goodput"] = self.ledger.goodput
            if row:
                self.metrics.row(self.step, row)
            if self._sample and (end or self._is_due(self._sample_interval, self.step)) and not self.stopped:
                self._show_sample()
            self.keeper.collect()
            if not self._forms_anew and (end or self.stopped or improved or self.keeper.is_save_due(self.step)):
                self.keeper.want(self.step, last=end or self.stopped)
            if end or self.stopped:  # the last image, and the last snapshot, which is awaited
                self.keeper.begin(self.step, self._state, self._is_sound, last=True)
                self.keeper.finish()
                if not self._forms_anew:
                    self.keeper.collect(wait=True, must=True)
        return not (end or self.stopped)

    @property
    def _leaves(self) -> bool:
        """Whether this node is to leave, for all that is known; a stop without it is for a node that joins."""
        told = self._notes.is_leaving if self._notes else None  # before the signal comes
        return self._signals.wanted if told is None else told

    def _stop(self, leave: bool) -> None:
        """All ranks have agreed to stop here; `leave`: some node does."""
        self.stopped = True
        # Nobody leaves: another node joins, so the images in memory are enough, and no upload holds the others up.
        self._forms_anew = not leave and self.keeper.outlives
        self._signals.settle()

    @staticmethod
    def _is_due(interval: int, step: int) -> bool:
        return interval > 0 and step > 0 and step % interval == 0

    def _is_log_due(self, step: int) -> bool:
        return self._is_due(self._log_interval, step) or step == self.max_steps

    def _is_eval_due(self) -> bool:
        return self._eval_interval > 0 and self.step % self._eval_interval == 0  # before the first step too

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.world.device.type, self._dtype, enabled=self._dtype != torch.float32)

    def _guard(self) -> None:
        """Lets an update with a non-finite gradient change nothing, without waiting for the device to know of it."""
        bad = ~torch.isfinite(self._grad_norm)
        if not self.scaler.is_enabled():  # a GradScaler does this itself
            self.optimizer.found_inf = bad.float()  # the fused kernels skip where it is 1
        self._bad_in_a_row = (self._bad_in_a_row + 1) * bad
        place = self._skips % SKIPS_LISTED
        self._skipped.index_copy_(0, place, torch.where(bad, self.step, self._skipped[place]))
        self._skips += bad
        too_many = (self._bad_in_a_row > self._bad_allowed) & (self._broken < 0)
        self._broken = torch.where(too_many, self.step, self._broken)
        self._broken_seen.copy_(self._broken, non_blocking=True)

    def _is_sound(self) -> bool:
        """Whether, for all that the host knows, no update was broken; asked by the thread that copies, after it did."""
        return int(self._broken_seen) < 0

    def _report_broken(self) -> None:
        self.keeper.collect(wait=True)
        update, manifest = int(self._broken), self.keeper.last_manifest
        kept = f"the last snapshot is {manifest.image_uri}" if manifest else "there is no snapshot"
        raise ArithmeticError(
            f"the gradient of update {update} ({self._samples_of(update)}) is not finite, in {self.reduction.blame()}; "
            f"{kept}; lower optim.learning_rate, or look at these samples"
        )

    def _samples_of(self, update: int) -> str:
        batch = self.grid.global_batch_size
        return f"samples {update * batch} to {(update + 1) * batch - 1}"

    # Starting

    def _make_reduction(self, reduction: str) -> FastReduction | ExactReduction:
        if reduction == "exact":
            return ExactReduction(self.model, self.world, self.grid.cells)
        idle = not self.share
        if idle:
            self.share = range(1)  # DDP needs a backward of every rank; its gradient counts as zero
        return FastReduction(self.model, self.world, self.grid.cells, idle)

    def _warm_up(self) -> None:
        """Compiles by one cell without collectives; all ranks fall back if one cannot."""
        log.info("compiling the model: the first cell takes up to some minutes")
        self.model.compile()  # in place, so that names stay clean
        failed = torch.zeros(1, dtype=torch.int64)
        idx, targets = self.batches.cells(self.step, range(1))[0]
        try:
            with self.reduction.cell(last=self.world.world_size == 1), self._autocast():
                loss_of(self.reduction.module(idx, targets)).backward()
        except Exception as error:  # noqa: BLE001  the compiler's own kinds are many and private
            failed += 1
            reason = (str(error).strip().splitlines() or [""])[0]
            log.warning("compile=true does not work here (%s: %s)", type(error).__name__, reason[:200])
        self.reduction.begin()
        distributed.all_reduce_sum(failed, self.world)
        if int(failed):
            log.info("going on without compiling, on every rank")
            self.model._compiled_call_impl = None
        if self._restored_compiled not in (None, not int(failed)) and isinstance(self.reduction, ExactReduction):
            log.warning("warning: compiled and plain training differ in bits, and this run changes between them here")
        self.compiled = not int(failed)

    # What is due

    def _log(self) -> dict[str, float]:
        """Tells of the last update on the console, and gives its row; on rank 0 alone, who waits for the device."""
        loss = norm = math.nan
        if self.world.is_main:
            assert self._loss is not None, "it is summed in every step whose row is due"
            loss, norm = float(self._loss), float(self._grad_norm)
        steps, seconds = self._stopwatch.lap(self.step)
        self.ledger.note(self.step, seconds)  # by every rank: rank 0 may be the one that is lost
        waiting = self._waiting.note(self.batches.waited_seconds, steps * seconds)
        if not self.world.is_main:
            return {}
        lr = learning_rate_at(self.step - 1, **self._schedule)  # of the update that this row is about
        restart, self._restart = self._restart, {}
        rate = self.grid.tokens_per_step / seconds
        mfu = {"perf/mfu": rate * self._mfu_per_rate} if self._mfu_per_rate else {}
        log.info(
            "step %*d/%d  loss %.4f  lr %.2e  norm %.2f  %9s tokens/s%s  left %s",
            len(str(self.max_steps)), self.step, self.max_steps, loss, lr, norm, f"{rate:,.0f}",
            "".join(f"  mfu {share:5.1%}" for share in mfu.values()), duration((self.max_steps - self.step) * seconds),
        )  # fmt: skip
        if (skips := int(self._skips)) > self._skips_told:
            last = int(self._skipped[(skips - 1) % SKIPS_LISTED])
            log.warning(
                "%d update(s) skipped: the gradient was not finite; the last one was update %d (%s)",
                skips - self._skips_told, last, self._samples_of(last),
            )  # fmt: skip
            self.metrics.event("skipped", last + 1, updates=skips)
            self._skips_told = skips
        if (score := self._losses.score(loss)) > SPIKE:
            odd = f"the loss of step {self.step} is {loss:.4f}, {score:.0f} standard deviations above the last ones"
            self.metrics.warn("loss_spike", self.step, f"{odd} ({self._samples_of(self.step - 1)})")
        before = self._replayed.get(self.step)
        if before is not None and before != loss and isinstance(self.reduction, ExactReduction):
            log.warning("step %d is not what it was before the restart: loss %r, then %r", self.step, before, loss)
        return {
            "train/loss": loss,
            "train/lr": lr,
            "train/grad_norm": norm,
            "perf/tokens_per_second": rate,
            "perf/step_seconds": seconds,
            **mfu,
            "perf/data_wait_share": waiting,
            **self.keeper.row(self.step),
            "data/samples_seen": self.grid.samples_seen(self.step),
            "data/tokens_seen": self.grid.samples_seen(self.step) * self.grid.block_size,
            "data/epoch": self.grid.epoch(self.step),
            "elastic/world_size": self.world.world_size,
            "elastic/generation": self._generation,
            "elastic/restarts": self._generation - 1,
            **restart,
        }

    def _tell_recovery(self) -> None:
        """The first step of this start is done: how long there was none before it, as the nodes know that were there.

        A newcomer, on which rank 0 may be, does not.
        """
        mine = self._notes.stepped() if self._notes and self.world.local_rank == 0 else {}
        parts = max(distributed.gather_json(self.world, mine), key=lambda parts: float(parts.get("seconds", 0.0)))
        if not parts or not self.world.is_main:
            return
        self._restart["elastic/recovery_seconds"] = parts["seconds"]
        self.metrics.event("recovery", self.step, **parts)
        named = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items() if name != "seconds")
        log.info("recovered: %.1f s from the last step before to this one (%s)", parts["seconds"], named)

    def _tell_starved(self) -> None:
        """Some rank waits for data, and all others for it: the one that waits longest is named."""
        shares = distributed.gather_json(self.world, self._waiting.share)
        rank = shares.index(max(shares))
        place = f" on rank {rank} ({distributed.hosts(self.world)[rank]})" if self.world.world_size > 1 else ""
        if self.world.is_main:
            message = f"{shares[rank]:.0%} of a step is waiting for data.path{place}: give it a faster disk"
            self.metrics.warn("starved", self.step, message)

    def _evaluate(self, row: dict[str, float]) -> bool:
        """Evaluates the weights at `step`, once, into `row`; whether they are the best so far, and worth keeping."""
        if self.evaluated_step == self.step:
            return False
        # The last one is not given up: nobody would come back for it.
        loss = self._mean_loss(self._signals if self.step < self.max_steps else None)
        if loss is None:
            self._stop(leave=distributed.any_rank(self.world, self._leaves))
            return False
        self.val_loss, self.evaluated_step = loss, self.step
        improved = math.isfinite(self.val_loss) and (self.best_val_loss is None or self.val_loss < self.best_val_loss)
        if improved:
            self.best_val_loss = self.val_loss
        log.info("step %d  val loss %.4f%s", self.step, self.val_loss, "  (best so far)" if improved else "")
        row["val/loss"] = self.val_loss
        return improved and self.step > 0

    def evaluate(self) -> float:
        """The mean loss over every validation token: the same at any world size, and each time it is asked for."""
        loss = self._mean_loss()
        assert loss is not None
        return loss

    @torch.inference_mode()
    def _mean_loss(self, signals: StopSignals | None = None) -> float | None:
        """As `evaluate`, but None, on every rank, where a stop was wanted before all was read."""
        assert self.validation is not None
        was_training = self.model.training
        self.model.eval()
        means = torch.zeros(len(self.validation), device=self.world.device)
        counts = torch.zeros(len(self.validation), dtype=torch.float64)
        mine = share(self.world.rank, self.world.world_size, len(self.validation))
        longest = math.ceil(len(self.validation) / self.world.world_size)  # the same count of questions on every rank
        for turn, i in itertools.zip_longest(range(longest), mine):
            if signals and turn % STOP_INTERVAL == 0 and distributed.any_rank(self.world, signals.wanted):
                self.model.train(was_training)
                return None
            if i is None:
                break
            idx, targets = self.validation.cell(i, self.world.device)
            with self._autocast():
                means[i] = loss_of(self.model(idx, targets))
            counts[i] = targets.numel()
        self.model.train(was_training)
        sums = torch.stack([means.cpu().double() * counts, counts])  # one wait for the device; MPS has no float64
        distributed.all_reduce_sum(sums, self.world)
        losses, targets_seen = sums.tolist()
        # fsum has no order: the same bits, whoever computed which cell.
        return float(math.fsum(losses) / sum(targets_seen))

    def _show_sample(self) -> None:
        if self.sampled_step == self.step:
            return
        self.sampled_step = self.step
        if self.world.is_main and self._sample:
            text = self._sample()
            log.info("--- sample at step %d ---\n%s\n---", self.step, text)
            self.metrics.event("sample", self.step, text=text)

    # The state, out and in

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What an image holds. Copied is what a forward may change, its buffers: all else waits for the update."""
        tensors = self._tensors()
        names = {f"model.{name}" for name, _ in self.model.named_buffers()} & tensors.keys()
        return tensors | {name: tensors[name].clone() for name in names}, self._metadata()

    def _tensors(self) -> dict[str, Tensor]:
        return {
            **{f"model.{name}": tensor for name, tensor in model_tensors(self.model).items()},
            **{f"optimizer.{name}": tensor for name, tensor in optimizer_tensors(self.model, self.optimizer).items()},
            "trainer.skips": self._skips,
            "trainer.skipped": self._skipped,
            **rng_tensors(self.world.device),
        }

    def _metadata(self) -> dict[str, Any]:
        return {
            "config": {},
            "fingerprints": {},
            **self._description,
            "step": self.step,
            "samples_seen": self.grid.samples_seen(self.step),
            "generation": self._generation,
            "world_size": self.world.world_size,
            "val_loss": self.val_loss if self.evaluated_step == self.step else None,
            "best_val_loss": self.best_val_loss,
            "evaluated_step": self.evaluated_step,
            "sampled_step": self.sampled_step,
            "compiled": self.compiled,
            "ledger": asdict(self.ledger),
            "scaler": self.scaler.state_dict(),
            "torch": torch.__version__,
        }

    @torch.no_grad()
    def restore(
        self,
        image: Image | None,
        manifest: Manifest | None = None,
        replayed: Mapping[int, float] | None = None,
        owner: int = 0,
    ) -> None:
        """Brings every rank to the state of the `image` of rank `owner`, or, where that is None, to its fresh state.

        The other ranks' `image` is not looked at. `replayed` are losses by step that were logged before a restart:
        exact mode must see them again. Raises ValueError, on every rank, where the image's tensors are not this
        trainer's, ConnectionError where a rank does not end up with the same state.
        """
        live = self._tensors()
        state = distributed.decide(self.world, lambda: self._position_in(image, live), owner)
        for name, tensor in live.items():
            if self.world.rank == owner and image is not None and name in image.tensors:
                tensor.copy_(image.tensors[name])
            distributed.broadcast(tensor, self.world, owner)  # one by one: no rank holds a second copy of the state
        restore_rng(live, self.world.device)
        if state is not None:
            self.step = state["step"]
            self.evaluated_step, self.sampled_step = state["evaluated_step"], state["sampled_step"]
            self._restored_compiled = state["compiled"]
            self.val_loss, self.best_val_loss = state["val_loss"], state["best_val_loss"]
            self.ledger.step = self.step  # of an image without one nothing is known of what the steps took
            if kept := state["ledger"]:
                self.ledger = Ledger(**kept | {"began": min(kept["began"], self.ledger.began)})
            if state["scaler"] and self.scaler.is_enabled():
                self.scaler.load_state_dict(state["scaler"])
        self._skips_told = int(self._skips)
        self._check_alike(owner)
        self._restored = True
        self.keeper.go_on(manifest, in_memory=state is not None and manifest is None)
        self._replayed = dict(replayed or {})

    def _check_alike(self, owner: int) -> None:
        """Before the first step: ranks that differed would train on silently, each from its own state."""
        states = distributed.gather_json(self.world, f"step {self.step}, state {xxh3(self._tensors())}")
        hosts = distributed.hosts(self.world)
        strange = [f"rank {r} ({hosts[r]}) {state}" for r, state in enumerate(states) if state != states[owner]]
        if strange:
            raise ConnectionError(
                f"not all ranks have the state that rank {owner} ({hosts[owner]}) sent, {states[owner]}: "
                f"{'; '.join(strange)}; look at the memory and the network of these hosts, and start again"
            )

    @staticmethod
    def _position_in(image: Image | None, live: Mapping[str, Tensor]) -> dict[str, Any] | None:
        if image is None:
            return None
        theirs = {name: (t.dtype, t.shape) for name, t in image.tensors.items() if not name.startswith("rng.")}
        ours = {name: (t.dtype, t.shape) for name, t in live.items() if not name.startswith("rng.")}
        strange = sorted(name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name))
        if strange:
            raise ValueError(
                f"the snapshot does not fit this model and optimizer: {len(strange)} tensors differ, {strange[0]} first"
            )
        keys = ("step", "evaluated_step", "sampled_step", "compiled", "val_loss", "best_val_loss", "scaler")
        if missing := [key for key in keys if key not in image.metadata]:
            raise ValueError(f"the snapshot lacks what a training goes on from: {', '.join(missing)}")
        return {key: image.metadata[key] for key in keys} | {"ledger": image.metadata.get("ledger")}

    def close(self) -> None:
        """Ends the reading thread and drops DDP, which must go before the process group: at exit gloo aborts else."""
        self.batches.close()
        self.keeper.close(wait=not self._forms_anew)
        if reduction := self.__dict__.pop("reduction", None):
            reduction.close()
        gc.collect()
        distributed.free_kept_memory()


def loss_of(output: object) -> Tensor:
    """The second of what `model(idx, targets)` returned. Raises ValueError where that is no loss."""
    loss = output[1] if isinstance(output, tuple) and len(output) == 2 else None
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        raise ValueError("model(idx, targets) must return a pair, of which the second is the mean loss, a 0-d tensor")
    return loss
