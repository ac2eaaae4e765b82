"""GPT training that cannot be killed. `from mingpt import GPT, GPTConfig, Trainer, load_snapshot`."""

import os
import sys
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mingpt.model import GPT, GPTConfig
    from mingpt.snapshot import load_snapshot
    from mingpt.trainer import Trainer

__all__ = ["GPT", "GPTConfig", "Trainer", "load_snapshot"]

# A stream that the user closed (`>&-`) is None. What is written to it goes nowhere, without a crash; and no snapshot
# gets its number, which libraries of C print to.
for _stream in ("stdin", "stdout", "stderr"):
    if getattr(sys, _stream) is None:
        setattr(sys, _stream, open(os.devnull, "r" if _stream == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115

_HOMES = {"GPT": "model", "GPTConfig": "model", "Trainer": "trainer", "load_snapshot": "snapshot"}


def __getattr__(name: str) -> object:
    # On first use only: `import mingpt` alone costs nothing.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"mingpt.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'mingpt' has no attribute {name!r}")
