"""Shows what became of a run, or of several to compare: in the terminal, and as one HTML page where one is asked for.

    python -m mingpt.report RUN [RUN ...] [--html=FILE]

RUN is a run's folder (`out_dir`) or a metrics.jsonl; those of one run from several nodes go together. The page is
report.html with the data and uPlot in it, and needs no network: uPlot's 50 kB zoom and tell values, which an image does
not, where plotly would put 4 MB and bokeh 1 MB into every page.

Exit codes: 0 done; 1 something cannot be read or written; 2 there is nothing to show; 130 Ctrl-C.
"""

import argparse
import io
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import plotext  # type: ignore[import-untyped]

from mingpt.faults import redact
from mingpt.history import Floats, History, number, read_runs
from mingpt.metrics import duration
from mingpt.storage import replace_file

SERIES = (
    "train/loss", "val/loss", "train/lr", "train/grad_norm", "perf/tokens_per_second", "perf/mfu", "perf/step_seconds",
    "perf/data_wait_share", "perf/snapshot_stall_seconds", "perf/ram_image_seconds", "perf/goodput",
)  # fmt: skip
POINTS = 2400  # of the training loss in a page, a quarter of it for the others; divided among the runs
EVENTS, SAMPLES, LETTERS = 400, 12, 4000  # at most, in a page, of a run and of a sample
Indices = npt.NDArray[np.int64]
STARTS = 40  # at most, in the terminal's table
SMOOTH = 100  # values that are needed for a smooth curve beside what was measured


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with `argv` (without the program's name) and returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an ASCII console gets ? for what it cannot show, in its place
            stream.reconfigure(errors="replace")
    parser = argparse.ArgumentParser("python -m mingpt.report", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, or a metrics.jsonl")
    parser.add_argument("--html", type=Path, metavar="FILE", help="writes the page there")
    arguments = parser.parse_args(argv)
    try:
        runs = read_runs(arguments.runs)
        if arguments.html:  # first: whoever closes the pipe early has it
            arguments.html.parent.mkdir(parents=True, exist_ok=True)
            replace_file(arguments.html, [page(runs).encode()])
        show(runs)
        if arguments.html:
            print(f"page  {arguments.html}")
        return 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head`; what Python would still flush goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, ValueError) as error:
        told = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        print(f"mingpt.report: {redact(told)}", file=sys.stderr)
        return 2 if isinstance(error, ValueError | FileNotFoundError) else 1


# What is told of a run


def facts(run: History) -> dict[str, str]:
    """What it came to, by name; only what is known."""
    steps, _, losses = run.series("val/loss")
    known = np.isfinite(losses)
    best = steps[known][losses[known].argmin()] if known.any() else math.nan
    training = run.series("train/loss")[2]
    tokens, most = run.step * run.tokens_per_step, number(run.config.get("train.max_steps"))
    told = {
        "state": run.status,
        "step": f"{run.step:,}" + (f" of {most:,.0f}" if math.isfinite(most) else ""),
        "tokens": f"{tokens:,.0f}" if math.isfinite(tokens) else "",
        "time": duration(run.seconds),
        "goodput": "" if math.isnan(run.goodput) else f"{run.goodput:.1%} of that time",
        "best val loss": f"{losses[known].min():.4f} at step {best:,.0f}" if known.any() else "",
        "last val loss": f"{losses[-1]:.4f} at step {steps[-1]:,.0f}" if len(losses) else "",
        "last train loss": f"{training[-1]:.4f}" if len(training) else "",
        "restarts": str(max(0, len(run.starts) - 1)),
        "steps lost": f"{sum(start.steps_lost for start in run.starts):,}",
    }
    return {name: text for name, text in told.items() if text}


def happenings(run: History) -> list[list[Any]]:
    """What happened: kind, step, seconds since the run began, steps and seconds that it cost (None: none), a text."""
    starts = iter(run.starts)
    told: list[list[Any]] = []
    for event in run.events:
        kind, lost, seconds, text = str(event["event"]), None, number(event.get("seconds")), ""
        if kind == "start":
            start = next(starts)
            text = f"generation {start.generation}, {count(start.world_size)} worker{'s' * (start.world_size != 1)}"
            if start.before:
                kind, lost, seconds = "restart", start.steps_lost, start.seconds
                text += f"; before: {start.before}"
            text = "; ".join([text, *changed(start.changes)])
        elif kind == "warning":
            kind, text = str(event.get("kind", kind)), str(event.get("message", ""))
        elif kind == "snapshot":
            text = str(event.get("uri", ""))
        elif kind == "skipped":
            text = f"updates {event.get('updates', '')}"
        if kind not in ("recovery", "sample"):  # a restart tells the one, the other has a place of its own
            told.append([kind, event["step"], event["elapsed"], lost, seconds, redact(text)])
    return told


def changed(changes: Mapping[str, Any]) -> list[str]:
    """`field: before -> now` of each."""
    pairs = {name: pair if isinstance(pair, list) and len(pair) == 2 else ["?", pair] for name, pair in changes.items()}
    return [f"{name}: {before} -> {now}" for name, (before, now) in pairs.items()]


def count(value: float) -> str:
    return f"{value:.0f}" if math.isfinite(value) else "?"


# In the terminal


def show(runs: Sequence[History]) -> None:
    """Prints curves of all runs together, then of each what it came to and its starts."""
    width = min(shutil.get_terminal_size().columns, 140)
    numbers = {run.label: f"{n} " if len(runs) > 1 else "" for n, run in enumerate(runs, 1)}

    def lines(*keys: str) -> list[tuple[str, Floats, Floats]]:
        of_each = [(f"{numbers[run.label]}{key}", *run.series(key)) for run in runs for key in keys]
        return [(label, steps, smooth(y) if "train/loss" in label else y) for label, steps, _, y in of_each]

    print(*curves("loss", lines("train/loss", "val/loss"), width, 20), sep="\n")
    halves = [curves("", lines(key), width // 2, 12) for key in ("train/grad_norm", "perf/tokens_per_second")]
    print(*("".join(pair) for pair in zip(*filter(None, halves), strict=True)), sep="\n")
    for run in runs:
        print(f"\n{numbers[run.label]}{run.label}")
        for name, text in facts(run).items():
            print(f"  {name:<16} {text}")
        print(f"\n  {'started':<19} {'generation':>10} {'workers':>7} {'step':>9} {'lost':>5} {'seconds':>8}  before")
        if len(run.starts) > STARTS:
            print(f"  ... {len(run.starts) - STARTS} earlier ones")
        for start in run.starts[-STARTS:]:
            seconds = "-" if math.isnan(start.seconds) else f"{'' if start.is_measured else '~'}{start.seconds:.1f}"
            print(
                f"  {clock(run.began + start.elapsed)} {start.generation:>10} {count(start.world_size):>7} "
                f"{start.step:>9} {start.steps_lost:>5} {seconds:>8}  {start.before or '-'}"
            )
            for line in changed(start.changes):
                print(f"      {line}")


def curves(title: str, lines: Sequence[tuple[str, Floats, Floats]], width: int, height: int) -> list[str]:
    """Lines of text with each (label, x, y) drawn; none where there is nothing to draw."""
    plotext.clear_figure()
    plotext.limit_size(False, False)
    plotext.plot_size(width, height)
    drawn = 0
    for label, x, y in lines:
        x, y = x[np.isfinite(y)], y[np.isfinite(y)]
        if len(y):
            kept = thin(y, 4 * width)
            drawn += 1
            # Without colours the runs differ by the number that draws them.
            marker = "braille" if sys.stdout.isatty() or not label[:1].isdigit() else label[0]
            plotext.plot(x[kept].tolist(), y[kept].tolist(), label=label or None, marker=marker)
    plotext.title(title)
    text = plotext.build()
    return (text if sys.stdout.isatty() else re.sub(r"\x1b\[[\d;]*m", "", text)).splitlines() if drawn else []


def clock(seconds: float) -> str:
    """A unix time as this machine's clock shows it."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return f"{'?':<19}"


# As a page


def page(runs: Sequence[History]) -> str:
    """The HTML; its size is bounded, however long the runs are."""
    folder = Path(__file__).parent
    told = plain({"made": clock(time.time()), "runs": [drawn(run, max(POINTS // len(runs), 400)) for run in runs]})
    # ASCII, as text may hold halves of characters; and no text may end the script element that it is in.
    data = json.dumps(told, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    html = (folder / "report.html").read_text(encoding="utf-8")
    for name in ("uPlot.min.css", "uPlot.iife.min.js"):
        html = html.replace(f"/* {name} */", (folder / "uplot" / name).read_text(encoding="utf-8").strip())
    return html.replace("/* data */", data)


def drawn(run: History, points: int) -> dict[str, Any]:
    """A run as report.html reads it, with at most `points` of its training loss and a quarter of them of all else."""
    few = points // 4
    series = {}
    for key in SERIES:
        steps, elapsed, values = run.series(key)
        if len(values):
            kept = thin(values, points if key == "train/loss" else few)
            series[key] = [steps[kept], elapsed[kept].round(2), short(values[kept])]
        if key == "train/loss" and len(values) >= SMOOTH:
            kept = np.linspace(0, len(values) - 1, min(len(values), few)).astype(int)
            series["smooth"] = [steps[kept], elapsed[kept].round(2), short(smooth(values)[kept])]
    events = happenings(run)
    shown = [event for event in events if event[0] != "snapshot"][-EVENTS:]
    shown += [event for event in events if event[0] == "snapshot"][::-1][: EVENTS - len(shown)]
    texts = {event["step"]: redact(str(event.get("text", ""))) for event in run.events if event["event"] == "sample"}
    samples = sorted(texts.items())  # a replay samples again
    spread = np.linspace(0, len(samples) - 1, min(len(samples), SAMPLES)).astype(int)
    return {
        "label": run.label,
        "facts": facts(run),
        "tokens_per_step": run.tokens_per_step,
        "series": series,
        "sizes": sizes(run),
        "events": sorted(shown, key=lambda event: float(event[2])),
        "changes": [[start.step, text] for start in run.starts for text in changed(start.changes)][-EVENTS:],
        "left_out": len(events) - len(shown),
        "samples": [[samples[i][0], samples[i][1][:LETTERS]] for i in spread],
        "config": {name: redact(str(value))[:LETTERS] for name, value in sorted(run.config.items())},
    }


def sizes(run: History) -> list[tuple[float, float, float]]:
    """Steps, seconds and number of workers from there on: none (0) from when one formation ceased to the next."""
    points = []
    for start in run.starts[-EVENTS:]:
        points += [(start.step, start.ceased, 0.0)] if start.before else []
        points += [(start.step, start.elapsed, start.world_size)]
    return [*points, (run.step, run.seconds, points[-1][2])] if points else []


def thin(values: Floats, most: int) -> Indices:
    """At most `most` indices: the lowest and the highest value of each stretch, so that no peak is missed."""
    if len(values) <= most:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), most // 2 + 1).astype(int)
    stretches = [np.nan_to_num(values[a:b], nan=np.inf) for a, b in pairwise(edges)]
    lows = [stretch.argmin() for stretch in stretches]
    highs = [np.where(np.isfinite(stretch), stretch, -np.inf).argmax() for stretch in stretches]
    return np.unique(np.concatenate([edges[:-1] + lows, edges[:-1] + highs]))


def smooth(values: Floats) -> Floats:
    """The mean of the values around each, 2 % of all; at the steep beginning of no more than came before it."""
    known = np.isfinite(values)
    sums, counts = (np.concatenate([[0.0], np.cumsum(it)]) for it in (np.where(known, values, 0.0), known))
    here = np.arange(len(values))
    reach = np.minimum(here, len(values) // 100)
    low, high = here - reach, np.minimum(here + reach + 1, len(values))
    with np.errstate(invalid="ignore"):
        return np.asarray((sums[high] - sums[low]) / (counts[high] - counts[low]))


def short(values: Floats) -> list[float]:
    """To five digits: more than a screen shows."""
    return [float(f"{value:.5g}") for value in values]


def plain(value: Any) -> Any:
    """For JSON, which has neither arrays nor nan: lists, null; whole numbers without a point."""
    if isinstance(value, dict):
        return {name: plain(it) for name, it in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(it) for it in value]
    if isinstance(value, float):
        return None if not math.isfinite(value) else int(value) if value.is_integer() else value
    return value


if __name__ == "__main__":
    sys.exit(main())
