"""Leaving together: signals become a wish that all ranks act on after the same step; what workers and launcher tell."""

import json
import logging
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Self

log = logging.getLogger(__name__)

STOP_EXIT_CODE = 75  # EX_TEMPFAIL: stopped on request, everything kept; start again to go on
_SAME_WISH_SECONDS = 2.0  # an agent and a terminal often deliver one Ctrl-C twice


class StopSignals:
    """While it is entered, SIGTERM, SIGINT, SIGUSR1 and SIGHUP only note that a stop is wanted.

    SIGHUP (the terminal is gone) not where it is ignored already, as under nohup.

    A second SIGINT, more than two seconds after the first signal, leaves at once with code 130. Where the training has
    not come to `settle` within `grace_seconds` of the wish, its step is abandoned and the process leaves: an agent
    kills it soon after anyway. A thread sees to both, since no Python handler runs inside a collective or a backward.
    """

    def __init__(self, grace_seconds: float = math.inf, notes: "Notes | None" = None) -> None:
        self.wanted = False
        self._grace_seconds = grace_seconds
        self._notes = notes
        self._since = math.inf
        self._settled = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        numbers = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.add(signal.SIGHUP)
        self._ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self._theirs = theirs
        self._before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        for number in numbers:
            self._previous[number] = signal.signal(number, self._handle)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._before)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._theirs.close()  # the thread reads the end
        self._thread.join()
        self._ours.close()

    def settle(self) -> None:
        """All ranks have agreed to stop here: what is left is to keep the state, however long that takes."""
        self._settled = True

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._note(number)

    def _listen(self) -> None:
        while True:
            overdue = math.inf if self._settled else self._since + self._grace_seconds
            wait = min(1.0, max(0.0, overdue - time.monotonic())) if self.wanted else None
            if select.select([self._ours], [], [], wait)[0]:
                numbers = self._ours.recv(64)
                if not numbers:
                    return
                for number in set(numbers) & self._previous.keys():
                    self._note(number)
            elif time.monotonic() >= overdue and not self._settled:
                log.warning(
                    "the step in flight takes longer than elastic.grace_seconds=%g after the wish to stop: it is "
                    "abandoned, and what was kept last stands", self._grace_seconds,
                )  # fmt: skip
                os._exit(STOP_EXIT_CODE)

    def _note(self, number: int) -> None:
        now = time.monotonic()
        if self.wanted and number == signal.SIGINT and now - self._since > _SAME_WISH_SECONDS:
            os._exit(130)
        if not self.wanted:
            self._since, self.wanted = now, True
            if self._notes:
                self._notes.mark("noticed")


class Notes:
    """What the workers of a node and their launcher tell each other, in small files of a folder that is the launcher's.

    Without a folder (under plain torchrun) nothing is told. `restart` counts the agent's restarts. The launcher reads
    `failures`, which end in a crash loop, and `verdict`; the workers read whether the node `is_leaving`, and when
    things happened before they were started.
    """

    def __init__(self, folder: Path | None, restart: int = 0) -> None:
        self._folder = folder
        self._restart = restart
        self._reached = 0  # the highest step before this start
        self.last: tuple[float, int] | None = None  # when (as time.time) the step before this start was done, and which

    def mark(self, what: str, **facts: object) -> None:
        """Notes that `what` happened now."""
        self._append("times", {"what": what, "time": time.time(), **facts})

    def fail(self, rank: int, code: int, message: str) -> None:
        """This worker fails, by no fault of another."""
        self._append("failures", {"restart": self._restart, "rank": rank, "code": code, "message": message})

    def reject(self, code: int, message: str) -> None:
        """This node cannot take part, and trying again would change nothing."""
        self._append("verdict", {"code": code, "message": message})

    def step(self, step: int) -> None:
        """`step` is done: the training is alive, and starts in vain no more where it never came that far before."""
        if self._folder is None:
            return
        (self._folder / "alive").write_text(str(step), encoding="ascii")
        if step > self._reached:
            for name in ("failures", "starts"):
                (self._folder / name).unlink(missing_ok=True)
            self._reached = 2**63

    def stepped(self) -> dict[str, float]:
        """The first step of this formation is done. The seconds since the last one of the formation before, in parts.

        Empty where there was none before, or nothing is known of it.
        """
        if self._folder is None:
            return {}
        times: dict[str, float] = {}
        for entry in self._read("times"):
            # Of those who noticed the first; everything else ends when the last one did it.
            times[entry["what"]] = times.get("noticed", entry["time"]) if entry["what"] == "noticed" else entry["time"]
        (self._folder / "times").unlink(missing_ok=True)
        end = time.time()
        if "before" not in times:
            return {}
        parts: dict[str, float] = {}
        since = times["before"]
        for what in ("noticed", "stopped", "rendezvous", "start", "restored"):
            if what in times:
                parts[what], since = max(0.0, times[what] - since), max(since, times[what])
        return {"seconds": end - times["before"], **parts, "first_step": end - since}

    def began(self, when: float, world_size: int = 1) -> None:
        """A worker was started at `when` (seconds, as time.time), one of `world_size`."""
        if self._folder is None:
            return
        alive, reached = self._folder / "alive", self._folder / "reached"
        self._reached = _number(reached)
        if alive.exists():
            self.last = alive.stat().st_mtime, _number(alive)
            self._append("times", {"what": "before", "time": self.last[0]})
            self._reached = max(self._reached, self.last[1])
            alive.unlink()
            reached.write_text(str(self._reached), encoding="ascii")
        self._append("times", {"what": "rendezvous", "time": when})
        self._append("starts", {"world_size": world_size})

    @property
    def is_leaving(self) -> bool | None:
        """Whether the launcher was asked to leave with its node; None where there is none, and nobody knows.

        Where it was not, a SIGTERM is of its agent, which has the world form anew, since another node has come.
        """
        return (self._folder / "stopping").exists() if self._folder else None

    # The launcher's side

    def stop(self) -> None:
        if self._folder:
            (self._folder / "stopping").touch()

    def verdict(self) -> dict[str, Any] | None:
        return next(self._read("verdict"), None)

    @property
    def has_begun(self) -> bool:
        """Whether workers were ever started."""
        return self._folder is not None and any((self._folder / name).exists() for name in ("times", "alive"))

    def failures(self) -> dict[int, dict[str, Any]]:
        """The first failure of each start, by restart and in order, since a step was new."""
        first: dict[int, dict[str, Any]] = {}
        for entry in self._read("failures"):
            first.setdefault(entry["restart"], entry)
        return first

    def progress(self) -> int:
        """The highest step that this node has seen."""
        return max(_number(self._folder / name) for name in ("alive", "reached")) if self._folder else 0

    def starts(self) -> int:
        """How often workers were started since a step was new: those that are killed tell of no failure.

        Nodes that come one after the other start all workers each time: it counts from the first of the largest world.
        """
        sizes = [entry["world_size"] for entry in self._read("starts")]
        return len(sizes) - sizes.index(max(sizes)) if sizes else 0

    def _append(self, name: str, entry: dict[str, object]) -> None:
        if self._folder is None:
            return
        try:
            with open(self._folder / name, "a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            log.debug("a note for the launcher is lost: %s", error)

    def _read(self, name: str) -> Iterator[dict[str, Any]]:
        if self._folder is None:
            return
        try:
            lines = (self._folder / name).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:  # none yet, or taken away just now
            return
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:  # it is just being written
                continue


def _number(file: Path) -> int:
    """What stands in a file of `Notes`; 0 where it is not there, or a kill tore it."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
