"""Leaving together: signals become a wish that all ranks act on after the same step."""

import os
import signal
import time
from types import FrameType
from typing import Self

STOP_EXIT_CODE = 75  # EX_TEMPFAIL: stopped on request, everything kept; start again to go on
_SAME_WISH_SECONDS = 2.0  # an agent and a terminal often deliver one Ctrl-C twice


class StopSignals:
    """While it is entered, SIGTERM, SIGINT, SIGUSR1 and SIGHUP only note that a stop is wanted.

    SIGHUP (the terminal is gone) not where it is ignored already, as under nohup.

    A second SIGINT, more than two seconds after the first signal, leaves at once with code 130.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._since = 0.0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        numbers = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.add(signal.SIGHUP)
        for number in numbers:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.wanted and number == signal.SIGINT and now - self._since > _SAME_WISH_SECONDS:
            os._exit(130)
        if not self.wanted:
            self._since = now
        self.wanted = True
