"""Which windows make up step s, and who computes which of them: pure functions, the whole data state of a run.

Everything that chooses data follows from the seed and the position, so a resume needs the step alone, at any world
size.
"""

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_U64 = TypeVar("_U64", int, NDArray[Any])  # one number or an array of uint64
_64_BITS = (1 << 64) - 1


def _scramble(z: _U64) -> _U64:
    """One step of splitmix64, a bijection of 64 bits (Steele, Lea, Flood 2014, "Fast splittable PRNGs")."""
    z = (z + 0x9E3779B97F4A7C15) & _64_BITS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return z ^ (z >> 31)


def mix(*numbers: int) -> int:
    """A 64-bit hash of whole numbers in their order: the one source of derived seeds. Its values never change."""
    state = 0
    for number in numbers:
        state = _scramble(state ^ (number & _64_BITS))
    return state


def _epoch_key(seed: int, epoch: _U64) -> _U64:
    """`mix(seed, epoch)`, for many epochs at once too."""
    return _scramble(mix(seed) ^ epoch)


def permute(seed: int, epoch: int | NDArray[np.int64], i: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Where position `i` (each in `range(n)`) of an epoch's order lies: a permutation of `range(n)` for every epoch.

    Nothing is stored: a Feistel network permutes the next power of four, and what falls outside `range(n)` walks on
    until it is inside (cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
    `epoch` is one number or one per position. Its values never change.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    x = i.astype(np.uint64)
    keys = _epoch_key(seed, np.broadcast_to(np.asarray(epoch, dtype=np.uint64), x.shape))
    walking = np.arange(x.size)
    while walking.size:
        left, right = x[walking] >> half, x[walking] & low
        for number in range(8):
            round_keys = _scramble(keys[walking] ^ number)
            left, right = right, left ^ (_scramble(round_keys ^ right) & low)
        x[walking] = left << half | right
        walking = walking[x[walking] >= n]
    return x.astype(np.int64)


@dataclass(frozen=True)
class Grid:
    """The training tokens as windows, and the windows that make up each step.

    A window is `block_size + 1` tokens, of which neighbours share one; an epoch is `windows` of them from an offset of
    its own. A step reads `global_batch_size` windows, in `cells` pieces of `micro_batch_size`.
    Raises ValueError where the tokens do not fill one window.
    """

    n_tokens: int
    block_size: int
    global_batch_size: int
    micro_batch_size: int
    seed: int

    def __post_init__(self) -> None:
        assert self.global_batch_size % self.micro_batch_size == 0, "the config lets no other pass"
        if self.n_tokens <= self.block_size:
            raise ValueError(
                f"data.path: the training split has {self.n_tokens} tokens, and model.block_size={self.block_size} "
                f"needs at least {self.block_size + 1}; set a smaller model.block_size, or take a longer text or a "
                "smaller data.val_fraction"
            )

    @property
    def windows(self) -> int:
        """Windows in every epoch."""
        return max(1, self.n_tokens // self.block_size - 1)

    @property
    def cells(self) -> int:
        """Cells in every step."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.block_size

    def offset(self, epoch: _U64) -> _U64:
        """The token at which the epoch's first window starts; any of them leaves the last window inside the text."""
        return _epoch_key(self.seed, epoch) % (self.n_tokens - self.windows * self.block_size)

    def starts(self, step: int) -> NDArray[np.int64]:
        """First token of each window that update `step` reads, (global_batch_size,), one cell's after the other's."""
        first = self.samples_seen(step)
        samples = np.arange(first, first + self.global_batch_size)
        epochs, positions = np.divmod(samples, self.windows)
        windows = permute(self.seed, epochs, positions, self.windows)
        return self.offset(epochs.astype(np.uint64)).astype(np.int64) + windows * self.block_size

    def samples_seen(self, step: int) -> int:
        """Windows read by the first `step` updates."""
        return step * self.global_batch_size

    def epoch(self, step: int) -> float:
        """Epochs completed, in parts too, after `step` updates."""
        return self.samples_seen(step) / self.windows

    def steps(self, epochs: float) -> int:
        """The updates it takes to read every window `epochs` times, at least one."""
        needed = epochs * self.windows / self.global_batch_size
        return max(1, math.ceil(round(needed, 6)))  # 0.55 * 100 is 55.00000000000001


def share(rank: int, world_size: int, cells: int) -> range:
    """The cells that `rank` computes; empty for some where there are more ranks than cells."""
    return range(rank * cells // world_size, (rank + 1) * cells // world_size)


def split_point(n_tokens: int, val_fraction: float) -> int:
    """Where validation starts: it is the last floor(n_tokens * val_fraction) tokens, training is all before."""
    return n_tokens - int(n_tokens * val_fraction)
