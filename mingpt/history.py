"""What became of a run, as its metrics.jsonl tell it: rows, events, starts and what they cost, goodput.

Files that were written by several nodes go together by the `run_id` of their starts, in order of generation: one
generation has one rank 0, so one writer. Replays, torn lines, clocks that go back and files of older versions are all
ordinary here.
"""

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mingpt.faults import redact
from mingpt.metrics import duration, read_metrics

Floats = npt.NDArray[np.float64]
Entry = dict[str, Any]  # a line of a file


@dataclass(frozen=True)
class Start:
    """One formation of the workers, and what it cost to get there."""

    elapsed: float  # seconds since the run began
    generation: int
    world_size: float  # nan where it is not told
    step: int
    steps_lost: int  # done before, and to be done again
    seconds: float  # from the last step before to the first one after; nan for the first start, or if there is none yet
    is_measured: bool  # else they are the time between two lines of the file
    before: str  # how what was before has ended; "" for the first start
    ceased: float  # seconds since the run began when that was last heard of
    changes: Mapping[str, Any]  # of the config: what was before, and now


@dataclass
class History:
    """A run: `rows` by step, in order, with the last word on each metric; `events` in the order they happened."""

    run_id: str
    homes: list[Path]  # the folders of its files
    began: float  # unix seconds
    heard: float  # of the newest line
    rows: dict[int, Entry]
    events: list[Entry]
    starts: list[Start]
    label: str = field(default="")  # of its own among the runs that are shown together

    def series(self, key: str) -> tuple[Floats, Floats, Floats]:
        """Steps, seconds since the run began (never falling, whatever clocks did) and values of a metric."""
        found = [(step, row["elapsed"], number(row[key])) for step, row in self.rows.items() if key in row]
        steps, elapsed, values = np.array(found, dtype=np.float64).reshape(-1, 3).T
        return steps, np.maximum.accumulate(elapsed), values

    @property
    def step(self) -> int:
        return max((*self.rows, *(event["step"] for event in self.events[-1:])), default=0)

    @property
    def seconds(self) -> float:
        """All the time since the run began, as far as it is told."""
        return max((entry["elapsed"] for entry in (*self.rows.values(), *self.events)), default=0.0)

    @property
    def config(self) -> Mapping[str, Any]:
        """The newest one, flat; empty where no start tells it."""
        told = (event.get("config") for event in reversed(self.events))
        return next((config for config in told if isinstance(config, dict)), {})

    @property
    def tokens_per_step(self) -> float:
        """The same all through a run; nan where it is not known."""
        steps, _, tokens = self.series("data/tokens_seen")
        if len(steps) and steps[-1] > 0:
            return float(tokens[-1] / steps[-1])
        return number(self.config.get("train.global_batch_size")) * number(self.config.get("model.block_size"))

    @cached_property
    def goodput(self) -> float:
        """Useful step time / wall time since the run began; nan where that is not known, or clocks contradict it.

        Useful are the steps that count, each once: those since the row before took a row's `perf/step_seconds` each.
        """
        steps, _, step_seconds = self.series("perf/step_seconds")
        first = self.starts[0].step if self.starts else 0  # above 0 where the file of an earlier node is missing
        useful = float(np.nansum(np.diff(steps, prepend=first) * step_seconds))
        wall = self.heard - self.began
        return useful / wall if 0 <= useful <= wall and wall > 0 else math.nan

    @property
    def status(self) -> str:
        """How it ended, as far as is known."""
        last = next((event["event"] for event in reversed(self.events) if event["event"] in _ENDS), "start")
        ago = "" if math.isnan(self.heard) else f", last heard of {duration(time.time() - self.heard)} ago"
        return _ENDS[last] or f"running or killed{ago}"


_ENDS = {"start": "", "stop": "stopped", "end": "finished"}


def number(value: object) -> float:
    """nan for what is none; those that JSON has no word for are written as text."""
    try:
        return float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def read_runs(places: Iterable[str]) -> list[History]:
    """The runs in the folders (`out_dir`) or files, in their order.

    Raises FileNotFoundError for a place that is not there and ValueError where no place tells of a run.
    """
    files = dict.fromkeys(_file_at(place) for place in places)
    told: dict[str, list[Entry]] = {}
    homes: dict[str, list[Path]] = {}
    for file in files:
        entries = [entry for entry in read_metrics(file) if 0 <= entry["step"] < 2**53]  # what a float64 can tell apart
        run_id = next((str(entry["run_id"]) for entry in entries if _starts(entry) and "run_id" in entry), str(file))
        for entry in entries:
            run_id = str(entry.get("run_id", run_id)) if _starts(entry) else run_id  # a folder may have been used again
            told.setdefault(run_id, []).append(entry)
            homes.setdefault(run_id, [])
            if file.parent not in homes[run_id]:
                homes[run_id].append(file.parent)
    if not told:
        raise ValueError(f"no run has written anything yet in {', '.join(redact(str(file)) for file in files)}")
    runs = [_history(run_id, homes[run_id], entries) for run_id, entries in told.items()]
    _label(runs)
    return runs


def _file_at(place: str) -> Path:
    path = Path(place).resolve()
    file = path / "metrics.jsonl" if path.is_dir() else path
    # A node whose workers never were the first ones has a run.json and no rows: others may.
    if not file.exists() and not (path / "run.json").exists():
        raise FileNotFoundError(f"{redact(str(file))} does not exist: name a run's folder, or its metrics.jsonl")
    return file


def _history(run_id: str, homes: list[Path], entries: list[Entry]) -> History:
    # Of copies of a file each line counts once.
    once = {
        (str(entry.get("event")), entry["step"], number(entry.get("time")), _generation(entry)): entry
        for entry in entries
    }
    entries = sorted(once.values(), key=_generation)
    first = next((entry for entry in entries if _starts(entry)), entries[0])
    began = heard = number(first.get("time"))
    elapsed = 0.0
    for entry in entries:
        when = number(entry.get("time"))
        elapsed = entry["elapsed"] = max(elapsed, when - began) if when - began > elapsed else elapsed
        heard = when if when > heard else heard
    starts = [index for index, entry in enumerate(entries) if _starts(entry)]
    rows: dict[int, Entry] = {}
    events: list[Entry] = []
    for index, entry in enumerate(entries):
        if "event" in entry:
            events.append(entry)
        # What was said beyond the step that the newest start went on from does not count until it is done again.
        elif not starts or index > starts[-1] or entry["step"] <= entries[starts[-1]]["step"]:
            rows.setdefault(entry["step"], {}).update(entry)
    parts = [entries[a:b] for a, b in pairwise((0, *starts, len(entries)))]  # the first one is before any start
    return History(
        run_id, homes, began, heard, dict(sorted(rows.items())), events,
        [_start(before, part) for before, part in pairwise(parts)],
    )  # fmt: skip


def _start(before: Sequence[Entry], part: Sequence[Entry]) -> Start:
    start = part[0]
    step = start["step"]
    lost = max((entry["step"] for entry in before), default=step) - step
    told = [number(entry.get("seconds")) for entry in part if entry.get("event") == "recovery"]
    told += [number(entry["elastic/recovery_seconds"]) for entry in part if "elastic/recovery_seconds" in entry]
    after = (entry["elapsed"] for entry in part if "train/loss" in entry)
    return Start(
        elapsed=start["elapsed"],
        generation=_generation(start),
        world_size=number(start.get("world_size")),
        step=step,
        steps_lost=start["steps_lost"] if isinstance(start.get("steps_lost"), int) else max(0, lost),
        seconds=told[0] if told else next(after, math.nan) - before[-1]["elapsed"] if before else math.nan,
        is_measured=bool(told),
        before=_ended(before) if before else "not told" if step else "",
        ceased=before[-1]["elapsed"] if before else 0.0,
        changes=start["changes"] if isinstance(start.get("changes"), dict) else {},
    )


def _ended(part: Sequence[Entry]) -> str:
    return next((_ENDS[entry["event"]] for entry in reversed(part) if entry.get("event") in ("stop", "end")), "killed")


def _starts(entry: Entry) -> bool:
    return bool(entry.get("event") == "start")


def _generation(entry: Entry) -> int:
    return entry["generation"] if isinstance(entry.get("generation"), int) else 0


def _label(runs: Sequence[History]) -> None:
    """Names each by its config, by its folder where others have that name, with its id where they share that too."""
    above = Path(os.path.commonpath([home for run in runs for home in run.homes]))
    for form in ("{name}", "{folder}", "{folder} {run_id}"):
        known = [run.label for run in runs]
        for run in runs:
            if not run.label or known.count(run.label) > 1:
                home = run.homes[0]
                name, folder = run.config.get("name", home.name), home.relative_to(above)
                label = form.format(name=name, folder=folder, run_id=run.run_id)
                run.label = "".join(letter if letter.isprintable() else "?" for letter in label)
