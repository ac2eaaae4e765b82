"""What the run says of itself: lines on the console, rows and events in `metrics.jsonl` and for the dashboard.

The file is append-only and one JSON object a line, so that a kill costs at most the line it tore. A row is
`{"step", "time", "generation", <metric>: number, ...}`; after a restart a step may stand twice, and the last row wins.
An event is `{"event", "step", "time", "generation", ...}`. README.md says what each of them means.
"""

import io
import json
import logging
import math
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from mingpt.dashboard import END_SECONDS, Dashboard

log = logging.getLogger(__name__)

_ERASE = "\r\x1b[K"  # the line of a terminal


def open_console(rank: int) -> None:
    """Lets rank 0 speak at INFO on standard output, the others at WARNING with their number."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # an ASCII console gets an escape for what it cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler(sys.stdout)
    erase = _ERASE if sys.stdout.isatty() else ""  # a bar may stand there
    handler.setFormatter(logging.Formatter(erase + ("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s")))
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger = logging.getLogger("mingpt")
    logger.handlers = [handler]
    logger.setLevel(handler.level)
    logger.propagate = False
    logging.raiseExceptions = False  # a closed pipe must not end or flood the training


def log_file(folder: Path, rank: int) -> Path:
    """Where the log of a rank goes, in `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"rank-{rank}.log"


def open_log(folder: Path, rank: int) -> None:
    """Lets this rank write all it says into a file of its own too, with the time."""
    handler = logging.FileHandler(log_file(folder, rank), encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("mingpt")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


class Bar:
    """How far the training is, as the last line of a terminal; anything else than a terminal gets nothing."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream if stream.isatty() else None
        self._first: tuple[float, int] | None = None
        self._next = 0.0

    def show(self, step: int, max_steps: int) -> None:
        """`step` of `max_steps` are done; drawn ten times a second at most."""
        now = time.monotonic()
        if self._stream is None or now < self._next:
            return
        self._next = now + 0.1
        since, first = self._first = self._first or (now, step)
        left = duration((max_steps - step) * (now - since) / (step - first)) if step > first else "?"
        text = f" {step:,} of {max_steps:,}  left {left} "
        width = min(40, shutil.get_terminal_size().columns - len(text) - 3)
        self._write("[" + ("#" * (step * width // max_steps)).ljust(width) + "]" + text if width > 0 else text)

    def clear(self) -> None:
        self._write("")

    def _write(self, text: str) -> None:
        try:
            if self._stream:
                self._stream.write(_ERASE + text)
                self._stream.flush()
        except OSError:  # the terminal is gone
            self._stream = None


class Metrics:
    """Writes `metrics.jsonl` at `path`; with None it only speaks on the console, as on ranks other than 0.

    A file that cannot be written is told of once; the training goes on.
    """

    def __init__(
        self,
        path: Path | None = None,
        generation: int = 1,
        bar: Bar | None = None,
        dashboard: Dashboard | None = None,
    ) -> None:
        self._path = path
        self._generation = generation
        self._bar = bar
        self._dashboard = dashboard
        self._failed = False

    def progress(self, step: int, max_steps: int) -> None:
        """`step` is done; costs nothing where there is no terminal."""
        if self._bar:
            self._bar.show(step, max_steps)

    def close(self, seconds: float = END_SECONDS) -> None:
        """Nothing more is to be told. May take so many `seconds`, until the dashboard has it."""
        if self._bar:
            self._bar.clear()
        if self._dashboard:
            self._dashboard.close(seconds)

    def row(self, step: int, values: dict[str, float]) -> None:
        """Appends the metrics of `step`."""
        self._append({"step": step, "time": time.time(), "generation": self._generation, **values})

    def event(self, name: str, step: int, **facts: object) -> None:
        """Appends an event: a start, a resume, an evaluation's sample, a stop ..."""
        self._append({"event": name, "step": step, "time": time.time(), "generation": self._generation, **facts})

    def warn(self, kind: str, step: int, message: str) -> None:
        """Tells that something is not as it should be, on the console and as an event `warning`."""
        log.warning("warning: %s", message)
        self.event("warning", step, kind=kind, message=message)

    def _append(self, entry: dict[str, Any]) -> None:
        if self._dashboard:
            self._dashboard.put(entry)
        if self._path is None:
            return
        # JSON has no nan: a strict reader would stop at the line.
        entry = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()}
        try:
            with open(self._path, "a+b") as file:
                if file.tell() and not _ends_with_newline(file):
                    file.write(b"\n")  # a kill tore the last line
                file.write(json.dumps(entry).encode() + b"\n")
        except OSError as error:
            if not self._failed:
                log.warning("metrics are not written: %s: %s; training goes on", self._path, error)
            self._failed = True


def _ends_with_newline(file: Any) -> bool:
    file.seek(-1, 2)
    return bool(file.read(1) == b"\n")


@dataclass
class Ledger:
    """What the run's time went into, through all its restarts: every image carries it on."""

    began: float = 0.0  # unix time of the run's first start
    step: int = 0  # of the last row
    useful_seconds: float = 0.0  # of the steps up to that row, each counted once

    def note(self, step: int, step_seconds: float) -> None:
        """A row of `step` is due; the steps since the row before took `step_seconds` each."""
        self.useful_seconds += (step - self.step) * step_seconds
        self.step = step

    @property
    def seconds(self) -> float:
        """All the time since the run began."""
        return max(time.time() - self.began, 1e-9)

    @property
    def goodput(self) -> float:
        """The useful share of it."""
        return self.useful_seconds / self.seconds


@dataclass(frozen=True)
class Past:
    """What is known of a run's earlier starts."""

    step: int  # at which the run was last seen
    steps_lost: int  # that were done again, in all


def recall(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What one node's rows and events tell of them, as JSON for `look_back`.

    `starts` are (generation, steps lost), `last` is (time, step) of the newest sign of the run.
    """
    starts, last = [], None
    for entry in entries:
        if entry.get("event") == "start":
            starts.append((entry["generation"], entry.get("steps_lost", 0)))
        if entry.get("event") == "start" or "train/loss" in entry:
            last = entry["time"], entry["step"]
    return {"starts": starts, "last": last}


def look_back(nodes: Sequence[Mapping[str, Any]]) -> Past:
    """What all nodes' `recall` tell together: one that rank 0 was on knows its own starts alone."""
    lost = {generation: lost for node in nodes for generation, lost in node["starts"]}
    newest = max((node["last"] for node in nodes if node["last"]), default=(0, 0))
    return Past(newest[1], sum(lost.values()))


def read_metrics(path: Path, run_id: str | None = None) -> Iterator[dict[str, Any]]:
    """The rows and events of a `metrics.jsonl`, or those of one run in it, in the order they were written.

    Lines that are torn or not ours are skipped. Nothing where there is no such file; OSError where it cannot be read.
    """
    if not path.exists():
        return
    wanted = run_id is None
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
                continue
            if run_id is not None and entry.get("event") == "start":
                wanted = entry.get("run_id") == run_id
            if wanted:
                yield entry


def duration(seconds: float) -> str:
    """`h:mm:ss` or `m:ss`; `?` of what is no time."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
