"""How the gradients of a step's cells become one gradient, the mean over the global batch, on every rank.

`FastReduction` is DistributedDataParallel, equal at every world size within float tolerance. `ExactReduction` gives the
same bits at every world size. Both are driven alike: `begin`, for each cell of this rank a forward and backward inside
`cell` and then `add`, and at last `finish`; afterwards every parameter's `grad` is the mean.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from mingpt import distributed
from mingpt.distributed import World


class FastReduction:
    """Sums of floats, overlapped with the backward pass by DDP; a plain sum where there is one process.

    `cells` is the number of cells of a step over all ranks. A rank whose share is empty is `idle`: DDP needs a backward
    of every rank, so it runs a cell too (of the usual shape: nothing recompiles), whose gradient counts as zero.
    """

    def __init__(self, model: nn.Module, world: World, cells: int, idle: bool = False) -> None:
        self._world = world
        self._ddp: DistributedDataParallel | None = None
        self._loss = torch.zeros((), device=world.device)
        self._parameters = list(model.parameters())
        self.module: nn.Module = model
        # DDP averages over the ranks where we need the mean over the cells, whoever computed how many.
        self.loss_weight = world.world_size / cells
        self._cells = cells
        self._idle = idle
        self._hooks: list[RemovableHandle] = []
        if idle:
            # Zero-filled, not weighted by zero: 0 * nan is nan.
            self._hooks = [p.register_hook(torch.zeros_like) for p in self._parameters if p.requires_grad]
        if world.world_size > 1:
            # Ranks hold equal weights already, and buffers do not change in training: nothing to synchronise.
            with warnings.catch_warnings():
                # Its successor `forward_sync_buffers` is not in every torch that this runs on.
                warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
                self._ddp = DistributedDataParallel(
                    model, init_sync=False, broadcast_buffers=False, gradient_as_bucket_view=True
                )
            self.module = self._ddp

    def begin(self) -> None:
        """Starts a step."""
        for p in self._parameters:
            p.grad = None
        self._loss = torch.zeros_like(self._loss)

    def cell(self, last: bool) -> AbstractContextManager[None]:
        """Surrounds forward and backward of a cell; in this rank's last one DDP sums over the ranks meanwhile."""
        return nullcontext() if last or self._ddp is None else self._ddp.no_sync()

    def add(self, loss: Tensor) -> None:
        """Counts a cell's mean loss."""
        if not self._idle:
            self._loss += loss.detach() / self._cells

    def finish(self, with_loss: bool) -> Tensor | None:
        """Ends the step; the mean loss over the global batch (0-d) where asked for, by all ranks or none."""
        if not with_loss:
            return None
        distributed.all_reduce_sum(self._loss, self._world)
        return self._loss

    def close(self) -> None:
        """Leaves the model as it was."""
        for hook in self._hooks:
            hook.remove()

    def blame(self) -> str:
        """What is known of where a non-finite gradient came from."""
        return "some parameter (exact reduction names it)"


class ExactReduction:
    """Sums without order: each cell's gradient is rounded to multiples of 2**-44, summed as int64, reduced once.

    Integer sums do not depend on their order, so neither do the weights on the number of ranks. Per cell this costs one
    scaling and one rounding in place and one widening pass over the gradient, per step one all-reduce of 8 bytes a
    parameter. A gradient must be finite and below `2**18 / cells`, so that no sum can overflow; one that is not turns
    the whole gradient into nan on every rank, which the trainer takes for what it is.
    """

    SCALE = 2.0**44
    LIMIT = 2.0**18

    def __init__(self, model: nn.Module, world: World, cells: int) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._names = [name for name, _ in named] + ["the loss"]
        self._parameters = [p for _, p in named]
        self._world = world
        self._cells = cells
        self.module = model
        self.loss_weight = 1.0
        # One buffer and one all-reduce: every parameter's sum, the loss, and how many cells were bad per name.
        sizes = [p.numel() for p in self._parameters]
        self._sum = torch.zeros(sum(sizes) + 1 + len(self._names), dtype=torch.int64, device=world.device)
        *self._parts, self._loss, self._bad = self._sum.split([*sizes, 1, len(self._names)])
        self._scratch = torch.empty(max(sizes), dtype=torch.int64, device=world.device)
        self._first_bad = torch.zeros_like(self._bad)  # of the first step of the last row of such steps
        self._was_bad = torch.zeros((), dtype=torch.bool, device=world.device)
        self._empty = True

    def begin(self) -> None:
        """Starts a step."""
        self._empty = True
        self._loss.zero_()
        self._bad.zero_()

    def cell(self, last: bool) -> AbstractContextManager[None]:
        """Surrounds forward and backward of a cell."""
        for p in self._parameters:
            p.grad = None
        return nullcontext()

    @torch.no_grad()
    def add(self, loss: Tensor) -> None:
        """Adds a cell's gradients and mean loss to this rank's sums."""
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters]
        largest = torch.stack([*torch._foreach_norm(grads, float("inf")), loss.abs()])
        self._bad += ~(largest * self._cells < self.LIMIT)  # written so that nan is bad
        for grad, part in zip(grads, self._parts, strict=True):
            flat = grad.view(-1).mul_(self.SCALE).round_()  # a power of two: exact in float32 too
            if self._empty:
                part.copy_(flat)
            else:
                part += self._scratch[: part.numel()].copy_(flat)
        self._loss += (loss.double() * self.SCALE).round().to(torch.int64)
        self._empty = False

    @torch.no_grad()
    def finish(self, with_loss: bool) -> Tensor | None:
        """Ends the step; the mean loss over the global batch (0-d, float64) where asked for."""
        if self._empty:  # an idle rank
            self._sum.zero_()
        distributed.all_reduce_sum(self._sum, self._world)
        self._first_bad = torch.where(self._bad.any() & ~self._was_bad, self._bad, self._first_bad)
        self._was_bad = self._bad.any()
        scale = torch.where(self._bad.any(), torch.nan, 1 / (self.SCALE * self._cells))
        for p, part in zip(self._parameters, self._parts, strict=True):
            if p.grad is None:
                p.grad = torch.empty_like(p)
            p.grad.view(-1).copy_(part).mul_(scale)
        # Not times `scale`, which is float32; plus nothing, or nan where the sum is bad.
        return self._loss[0].double() / (self.SCALE * self._cells) + 0 * scale if with_loss else None

    def close(self) -> None:
        """Leaves the model as it was: nothing was done to it."""

    def blame(self) -> str:
        """The names whose gradient was not finite, or too large for the sum, in the first such step of a row."""
        bad = [name for name, count in zip(self._names, self._first_bad.tolist(), strict=True) if count]
        return f"{', '.join(bad)} (not finite, or a cell's gradient of {self.LIMIT / self._cells:g} or more)"
