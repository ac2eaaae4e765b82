"""What is kept of a training, and when: images in memory by what they cost, snapshots by steps, by seconds, as owed."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mingpt.distributed import World
from mingpt.image import encoded_size
from mingpt.metrics import Metrics
from mingpt.slots import Slots
from mingpt.snapshot import Manifest, Saver, Snapshots
from mingpt.watch import Stopwatch

log = logging.getLogger(__name__)

RETRY_SECONDS = 10.0  # from a save that failed to the next try
LATE, LATE_SECONDS = 2, 60.0  # times the interval between snapshots, and how long, after which a newer one is missed
IMAGE_SHARE = 0.02  # of the training that RAM images may take
IMAGE_SECONDS = 1.0  # of training that a kill may cost, whatever RAM images take; a step where that is longer

State = Callable[[], tuple[dict[str, Tensor], dict[str, Any]]]  # an image's tensors and metadata, asked for where due


class Keeper:
    """Copies the state beside the training: `begin` before a step's work, `finish` before its update.

    On the first rank of each node that goes into `ram_dir`; rank 0 saves too: of a step that it was told to `want`,
    `finish` starts the save, and `collect` takes note of what became of it. The other ranks keep nothing.
    """

    def __init__(
        self, world: World, metrics: Metrics, stopwatch: Stopwatch, snapshots: Snapshots | None, ram_dir: Path | None,
        save_interval: int, save_interval_seconds: float, on_error: str,
    ) -> None:  # fmt: skip
        self.slots: Slots | None = None  # on the first rank of every node, while the training goes on
        self.saver: Saver | None = None  # on rank 0
        self.last_manifest: Manifest | None = None
        self._world, self._metrics, self._stopwatch = world, metrics, stopwatch
        self._snapshots, self._ram_dir = snapshots, ram_dir
        self._save_interval, self._save_interval_seconds = save_interval, save_interval_seconds
        self._on_error = on_error
        self._saved_at, self._saved_step = time.monotonic(), 0  # the last try
        self._owed_from = math.inf  # when a save is to be made up for: one failed, or was due while one was on its way
        self._durable = 0, 0.0  # the newest durable snapshot's step, and when (monotonic) it became known
        self._late = False  # and told
        self._wanted = False  # the image of this step is to be saved
        self._image: dict[str, Any] | None = None  # the metadata of the one that is being copied
        self._cadence = Cadence()
        self._cost = 0.0  # seconds that all images kept the training
        # Seconds that saving and RAM images kept the training since the last row.
        self._kept = {"perf/snapshot_stall_seconds": 0.0, "perf/ram_image_seconds": 0.0}

    def open(self, step: int, state: State) -> None:
        """Finds the place for images of `state`, at `step`."""
        if self._snapshots and (self._world.is_main or (self._world.local_rank == 0 and self._ram_dir)):
            self.slots = Slots.open(self._ram_dir, self._snapshots.run_id, encoded_size(*state()))
            self.saver = Saver(self._snapshots, self.slots) if self._world.is_main else None
        self._durable = step, time.monotonic()

    @property
    def outlives(self) -> bool:
        """Whether images are where the next process finds them."""
        return self.slots is not None and self.slots.shared

    def begin(self, step: int, state: State, sound: Callable[[], bool], last: bool = False) -> None:
        """Begins to copy `state`, at `step`, where an image is due: by the cadence, or because it is to be saved.

        sound: as `Slots.begin` takes it.
        """
        slots, now = self.slots, self._stopwatch.now()
        if not slots or not (self._wanted or (slots.shared and (last or self._cadence.is_due(step, now)))):
            return
        with self._counted():
            tensors, self._image = state()
            slots.begin(tensors, self._image, sound)
        # On CPUs a copy beside the training takes from it too, at most what it computes.
        beside = slots.thread_seconds if self._world.device.type == "cpu" else 0.0
        self._cadence.note(step, now, self._cost + beside)

    def finish(self) -> None:
        """Waits for the copy, before the state changes; then it can be saved."""
        if self._image is None or self.slots is None:
            return
        with self._counted():
            sound, image = self.slots.finish(), self._image
            if self._wanted and sound and self.saver:
                facts = {key: image[key] for key in ("val_loss", "world_size", "fingerprints", "config")}
                self.saver.start(step=image["step"], generation=image["generation"], facts=facts)
        self._wanted, self._image = False, None

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Time in here counts as what a save, or else a RAM image, kept the training.

        And not as time of the step, but on GPUs, which compute on meanwhile.
        """
        started = time.perf_counter()
        with self._stopwatch.paused() if self._world.device.type == "cpu" else nullcontext():
            yield
        device = self._world.device
        if device.type == "cuda" and not torch.cuda.current_stream(device).query():
            return  # the host waited, and the device, which is behind it, did not
        seconds = time.perf_counter() - started
        self._cost += seconds
        self._kept["perf/snapshot_stall_seconds" if self._wanted else "perf/ram_image_seconds"] += seconds

    def is_save_due(self, step: int) -> bool:
        """By steps, by seconds, or because one is owed; rank 0 alone saves, and asks nobody."""
        now, seconds, interval = time.monotonic(), self._save_interval_seconds, self._save_interval
        overdue = now >= self._owed_from or 0 < seconds < now - self._saved_at
        return overdue or (interval > 0 and step > 0 and step % interval == 0)

    def want(self, step: int, last: bool) -> None:
        """Has the image of `step` saved, unless it is already, or another is on its way: then it is owed."""
        if not self.saver:
            return
        now = time.monotonic()
        if last:
            self.collect(wait=True)
        if self.saver.busy:
            self._owed_from = now
        elif not self.last_manifest or self.last_manifest.facts["step"] != step:
            self._wanted = True
            self._saved_at, self._saved_step, self._owed_from = now, step, math.inf

    def go_on(self, manifest: Manifest | None, in_memory: bool) -> None:
        """From what is saved, or `in_memory` alone: then the last save may be lost, and the next an interval away."""
        self.last_manifest = manifest
        if in_memory and (self._save_interval or self._save_interval_seconds):
            self._owed_from = 0.0

    def collect(self, wait: bool = False, must: bool = False) -> None:
        """Takes note of the save that was on its way; one that failed is told at once and owed, or raises OSError."""
        if not self.saver:
            return
        try:
            manifest = self.saver.collect(wait)
        except (OSError, ValueError) as error:  # all that a store raises
            if must or self._on_error == "stop":
                raise OSError(f"the snapshot of step {self._saved_step} cannot be saved: {error}") from error
            log.warning("the snapshot of step %d is not saved: %s; trying again soon", self._saved_step, error)
            self._owed_from = time.monotonic() + RETRY_SECONDS
            return
        if manifest:
            now = time.monotonic()
            self.last_manifest, self._durable, self._late = manifest, (manifest.facts["step"], now), False
            seconds = now - self._saved_at
            self._metrics.event("snapshot", self._saved_step, uri=manifest.image_uri, seconds=seconds)
            log.info("saved %s in %.1f s", manifest.image_uri, seconds)

    def row(self, step: int) -> dict[str, float]:
        """What the row of `step` tells of all this; a snapshot that is late is told as a warning, once."""
        steps, seconds = step - self._durable[0], time.monotonic() - self._durable[1]
        missed = 0 < LATE * self._save_interval < steps or 0 < LATE * self._save_interval_seconds < seconds
        if self.saver and missed and seconds > LATE_SECONDS and not self._late:  # one may be on its way
            self._late = True
            self._metrics.warn(
                "snapshot_late", step,
                f"the newest durable snapshot is {steps} steps and {seconds:.0f} s old, more than {LATE} times what "
                "snapshot.save_interval asks for: a power failure costs as much; see whether the store is too slow",
            )  # fmt: skip
        kept, self._kept = self._kept, dict.fromkeys(self._kept, 0.0)
        return {**kept, "elastic/ram_image_interval": self._cadence.every if self.outlives else 0}

    def close(self, wait: bool) -> None:
        """Ends the threads; where `wait`, after the save that is on its way. The images stay."""
        if self.saver:
            self.saver.close(wait)
        if self.slots:
            self.slots.close()


class Cadence:
    """How many steps pass from one RAM image to the next.

    So many that images take `IMAGE_SHARE` of the training, but no more than fit into `IMAGE_SECONDS` of it. A power of
    two, so that it seldom changes. Judged by the middle of what the last images took.
    """

    def __init__(self) -> None:
        self.every = 1
        self._image: tuple[int, float, float] | None = None  # the last one: its step, when it began, `cost` then
        self._costs: deque[float] = deque(maxlen=5)
        self._steps: deque[float] = deque(maxlen=5)

    def is_due(self, step: int, now: float) -> bool:
        """Whether an image of `step` is due: at first, by steps, or, where these became slower, by seconds."""
        if self._image is None:
            return True
        after_it = now + (median(self._steps) if self._steps else 0.0)
        return step - self._image[0] >= self.every or after_it - self._image[1] > IMAGE_SECONDS

    def note(self, step: int, now: float, cost: float) -> None:
        """An image of `step` begins; `cost`: the seconds that all so far took."""
        last, self._image = self._image, (step, now, cost)
        if last is None or step == last[0]:
            return
        self._costs.append(cost - last[2])
        self._steps.append((now - last[1]) / (step - last[0]))
        cost, seconds = median(self._costs), median(self._steps)
        # An image is committed a little after its step, so a kill may cost one step more.
        fitting = [2**i for i in range(20) if (2**i + 1) * seconds <= IMAGE_SECONDS] or [1]
        enough, plenty = (
            next((every for every in fitting if cost <= share * every * seconds), fitting[-1])
            for share in (IMAGE_SHARE, IMAGE_SHARE / 2)
        )
        self.every = max(enough, min(self.every, plenty))
