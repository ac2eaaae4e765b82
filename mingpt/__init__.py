"""GPT training that cannot be killed. `from mingpt import GPT, GPTConfig, Trainer, load_snapshot`."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mingpt.model import GPT, GPTConfig
    from mingpt.snapshot import load_snapshot
    from mingpt.trainer import Trainer

__all__ = ["GPT", "GPTConfig", "Trainer", "load_snapshot"]

_HOMES = {"GPT": "model", "GPTConfig": "model", "Trainer": "trainer", "load_snapshot": "snapshot"}


def __getattr__(name: str) -> object:
    # On first use only: `import mingpt` alone costs nothing.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"mingpt.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'mingpt' has no attribute {name!r}")
