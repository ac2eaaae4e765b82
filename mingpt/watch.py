"""What is seen of a training: how long its steps take, and what is not as it should be."""

import faulthandler
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from mingpt.metrics import Metrics, log_file

log = logging.getLogger(__name__)

SPIKE = 6.0  # standard deviations of the last losses by which one is told to be out of line
STARVED = 0.2  # of the step, waiting for data, that is told
STARVED_ROWS = 3  # in a row: nothing is read ahead for the first step, and a busy machine has its moments


class Stopwatch:
    """A clock of the training, which stands still in evaluation, sampling and saving; in seconds."""

    def __init__(self) -> None:
        self._paused = 0.0
        self._stopped_at: float | None = None
        self._lap = 0, self.now()

    def now(self) -> float:
        return (time.perf_counter() if self._stopped_at is None else self._stopped_at) - self._paused

    def lap(self, step: int) -> tuple[int, float]:
        """The steps since the last lap, and the seconds of one."""
        (last_step, since), self._lap = self._lap, (step, self.now())
        return step - last_step, (self._lap[1] - since) / max(1, step - last_step)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here does not count; it may be entered within itself."""
        if self._stopped_at is not None:
            yield
            return
        self._stopped_at = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - self._stopped_at
            self._stopped_at = None


class Losses:
    """The last losses, and how far out of line the next one is."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=100)

    def score(self, loss: float) -> float:
        """Its distance from their median, in standard deviations as the median distance tells them (Iglewicz 1993).

        0 before there are twenty. A thousandth of the median counts as the least distance: of equal losses none is odd.
        """
        before = [*self._last]
        if math.isfinite(loss):
            self._last.append(loss)
        if len(before) < 20:
            return 0.0
        middle = median(before)
        distance = max(median(abs(it - middle) for it in before), 1e-3 * abs(middle))
        return 0.6745 * (loss - middle) / distance


class Waiting:
    """The share of a step that is spent waiting for data, and whether it stays large."""

    def __init__(self) -> None:
        self.share = 0.0  # of the last row
        self._seconds = 0.0  # up to it
        self._rows = 0  # in a row

    def note(self, waited_seconds: float, seconds: float) -> float:
        """The share of the `seconds` since the row before; `waited_seconds` are from the start on."""
        self.share, self._seconds = (waited_seconds - self._seconds) / seconds, waited_seconds
        self._rows = self._rows + 1 if self.share > STARVED else 0
        return self.share

    @property
    def lasts(self) -> bool:
        """Whether it was too large in the last rows."""
        return self._rows >= STARVED_ROWS


class StallWatch:
    """Where a step takes longer than `seconds`, the stacks of all threads of this rank go into its log file, once.

    That is in the folder `logs`; rank 0 tells of it too, in this watch's own thread. 0 seconds or no folder: never.
    """

    def __init__(self, seconds: float, logs: Path | None, rank: int, metrics: Metrics) -> None:
        self._seconds, self._rank, self._metrics = seconds, rank, metrics
        self._step: tuple[int, float] | None = None  # the one that is being made, and since when
        self._closed = threading.Event()
        if seconds and logs:
            threading.Thread(target=self._run, args=(logs,), name="stalls", daemon=True).start()

    def begin(self, step: int) -> None:
        self._step = step, time.monotonic()

    def end(self) -> None:
        self._step = None

    def close(self) -> None:
        self._closed.set()

    def _run(self, logs: Path) -> None:
        told = None
        while not self._closed.wait(min(1.0, self._seconds / 4)):
            now = self._step
            if now is None or now == told or time.monotonic() - now[1] < self._seconds:
                continue
            told = now
            try:
                with open(log_file(logs, self._rank), "a", encoding="utf-8") as file:
                    file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} the stacks, {self._seconds:g} s into a step\n")
                    file.flush()
                    faulthandler.dump_traceback(file, all_threads=True)
            except OSError as error:
                log.warning("the stacks of a step that stalls are not written: %s", error)
            if self._rank == 0:
                self._metrics.warn(
                    "stall", now[0], f"the step after {now[0]} takes longer than log.stall_seconds={self._seconds:g}: "
                    f"where each rank is, is written into {logs}",
                )  # fmt: skip
