"""Feeding: the tokens of a step's cells, and of validation's, as tensors on the device.

`tokens` is any 1-D numpy array of whole numbers, an `np.memmap` too, or what mingpt/tokens.py opens.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingpt.grid import Grid
from mingpt.tokens import Tokens


class Batches:
    """The training batches of any step, on `device`; the next step's is read by a thread while this one is in use."""

    def __init__(self, tokens: Tokens, grid: Grid, device: torch.device) -> None:
        assert len(tokens) == grid.n_tokens, "the grid is of these tokens"
        self._tokens, self._grid, self._device = tokens, grid, device
        # Pinning memory in a thread that has not chosen its device would open a second context, on device 0.
        choose = (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "batches", initializer=choose)
        self._ahead: tuple[int, range, Future[tuple[Tensor, Tensor]]] | None = None
        self.waited_seconds = 0.0  # by who asked for `cells`, in all

    def cells(self, step: int, share: range) -> list[tuple[Tensor, Tensor]]:
        """(idx, targets) of each cell in `share` of update `step`, int64, (micro_batch_size, block_size) each.

        Raises what reading them raised, in whichever thread.
        """
        ahead, self._ahead = self._ahead, None
        asked = time.perf_counter()
        if ahead and ahead[:2] == (step, share):
            idx, targets = ahead[2].result()
        else:
            idx, targets = self._read(step, share)
        self.waited_seconds += time.perf_counter() - asked
        self._ahead = step + 1, share, self._thread.submit(self._read, step + 1, share)
        idx, targets = (x.to(self._device, non_blocking=True) for x in (idx, targets))
        return list(zip(idx, targets, strict=True))

    def close(self) -> None:
        """Ends the thread; `cells` cannot be called again."""
        self._thread.shutdown(cancel_futures=True)

    def _read(self, step: int, share: range) -> tuple[Tensor, Tensor]:
        size, length = self._grid.micro_batch_size, self._grid.block_size
        starts = self._grid.starts(step)[share.start * size : share.stop * size]
        rows = _rows(self._tokens, starts, length).view(len(share), size, length + 1)
        idx, targets = rows[..., :-1].contiguous(), rows[..., 1:].contiguous()
        return (idx.pin_memory(), targets.pin_memory()) if self._device.type == "cuda" else (idx, targets)


class Validation:
    """The validation tokens as windows from the first token on, every target once, in cells for the ranks to share.

    `eval_sequences` takes that many windows only (0 = all). The last, shorter window is a cell of its own.
    Raises ValueError where there is no target.
    """

    def __init__(self, tokens: Tokens, block_size: int, micro_batch_size: int, eval_sequences: int = 0) -> None:
        if len(tokens) < 2:
            raise ValueError(
                f"data.path: the validation split has {len(tokens)} tokens and needs at least 2; take a longer text or "
                "a larger data.val_fraction, or set data.val_fraction=0 to go without"
            )
        self._tokens, self._block_size = tokens, block_size
        starts = np.arange(0, len(tokens) - 1, block_size)[: eval_sequences or None]
        full = int(np.count_nonzero(starts + block_size < len(tokens)))
        self._cells = [starts[i : min(i + micro_batch_size, full)] for i in range(0, full, micro_batch_size)]
        if full < len(starts):
            self._cells.append(starts[full:])

    def __len__(self) -> int:
        """The number of cells."""
        return len(self._cells)

    def cell(self, i: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(idx, targets) of cell `i`, int64, (at most micro_batch_size, block_size), in the last cell maybe shorter."""
        starts = self._cells[i]
        length = min(self._block_size, len(self._tokens) - 1 - int(starts[0]))
        rows = _rows(self._tokens, starts, length)
        rows = (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def check_tokens(tokens: Tokens, name: str) -> None:
    """Raises ValueError for what is no 1-D array of whole numbers, such as a list or a tensor."""
    if getattr(tokens, "ndim", None) != 1 or getattr(tokens.dtype, "kind", None) not in ("i", "u"):
        shape = f" of {tokens.dtype} and shape {tuple(tokens.shape)}" if hasattr(tokens, "shape") else ""
        raise ValueError(
            f"{name} is a {type(tokens).__name__}{shape}; give a 1-D numpy array of whole numbers, as from np.asarray "
            "or np.memmap"
        )


def _rows(tokens: Tokens, starts: NDArray[np.int64], length: int) -> Tensor:
    """(len(starts), length + 1) int64: the window at each start, gathered by one indexing."""
    return torch.from_numpy(tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64))
