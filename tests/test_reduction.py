"""The number of ranks changes nothing: float tolerance in fast mode, no bit in exact mode."""

import numpy as np
import pytest
import torch
from conftest import in_world
from torch import nn

from mingpt import distributed
from mingpt.image import sha256s
from mingpt.metrics import Metrics
from mingpt.model import GPT, GPTConfig
from mingpt.reduction import ExactReduction, FastReduction
from mingpt.trainer import Trainer

VOCABULARY = 11


class Book(Metrics):
    """Keeps what a trainer logs."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.val_losses: list[float] = []

    def row(self, step: int, values: dict[str, float]) -> None:
        self.losses += [values["train/loss"]] if "train/loss" in values else []
        self.val_losses += [values["val/loss"]] if "val/loss" in values else []


def train(reduction: str, steps: int, dtype: torch.dtype = torch.float32) -> tuple[list[float], list[float], str, str]:
    """Losses, validation losses, and the two sums of a run with 12 sequences in cells of 2, dropout on."""
    world = distributed.locate("cpu")
    distributed.connect(world, {}, timeout_seconds=60)
    torch.manual_seed(0)
    model = GPT(GPTConfig(VOCABULARY, block_size=16, n_layer=2, n_head=2, n_embd=16, dropout=0.1))
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 3000).astype(np.uint16)
    book = Book()
    trainer = Trainer(
        model, tokens[:2500], tokens[2500:], block_size=16, global_batch_size=12, micro_batch_size=2, max_steps=steps,
        reduction=reduction, learning_rate=1e-3, warmup_steps=5, dtype=dtype, log_interval=1, eval_interval=25,
        world=world, metrics=book,
    )  # fmt: skip
    trainer.restore(None)
    trainer.fit()
    weights_sha256, state_sha256 = sha256s(trainer._tensors())
    trainer.close()
    distributed.leave()
    return book.losses, book.val_losses, weights_sha256, state_sha256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_reduction_gives_the_same_bits_at_every_world_size(dtype: torch.dtype) -> None:
    worlds = [in_world(world_size, train, "exact", 100, dtype) for world_size in (1, 2, 3, 5, 7)]
    assert len({rank[2:] for world in worlds for rank in world}) == 1, "weights and moments of every rank"
    assert all(world[0][:2] == worlds[0][0][:2] for world in worlds), "logged losses, of training and validation"
    assert worlds[0][0][0][-1] < worlds[0][0][0][0], "it does learn"


def test_fast_reduction_is_equal_within_tolerance_and_not_in_bits() -> None:
    alone, *others = [in_world(world_size, train, "fast", 50)[0] for world_size in (1, 2, 3, 4, 5, 8)]
    for losses, val_losses, *_ in others:
        np.testing.assert_allclose(losses, alone[0], rtol=1e-5)
        np.testing.assert_allclose(val_losses, alone[1], rtol=1e-5)
    assert len({run[2] for run in [alone, *others]}) > 1, "the control: else the exact test would prove nothing"


class Line(nn.Module):
    """loss = mean of w * x, so that the gradient is the mean of x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).mean()


def reduce_cells(kind: str, values: list[float]) -> tuple[float, float | None, str]:
    """Gradient, loss and blame of `Line` over one cell per value."""
    world = distributed.locate("cpu")
    distributed.connect(world, {}, timeout_seconds=60)
    model, cells = Line(), len(values)
    mine = values[world.rank * cells // world.world_size : (world.rank + 1) * cells // world.world_size]
    idle = not mine
    reduction = (
        ExactReduction(model, world, cells) if kind == "exact" else FastReduction(model, world, cells, idle=idle)
    )
    if idle and kind == "fast":
        mine = [float("nan")]
    reduction.begin()
    for k, value in enumerate(mine):
        with reduction.cell(last=k == len(mine) - 1):
            loss = reduction.module(torch.tensor([value]))
            (loss * reduction.loss_weight).backward()
        reduction.add(loss)
    mean = reduction.finish(with_loss=True)
    assert model.w.grad is not None
    assert mean is not None
    result = float(model.w.grad), float(mean), reduction.blame()
    del reduction
    distributed.leave()
    return result


@pytest.mark.parametrize("kind", ["fast", "exact"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_gradient_is_the_mean_over_the_cells_of_all_ranks(kind: str, world_size: int) -> None:
    values = [1.0, 2.0, 4.0]  # three cells: unequal shares at 2 ranks, an idle rank (in fast mode fed with nan) at 4
    for gradient, loss, _ in in_world(world_size, reduce_cells, kind, values):
        assert gradient == pytest.approx(7 / 3, rel=1e-6)
        assert loss == pytest.approx(7 / 3, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2.0**17])
def test_exact_reduction_refuses_what_its_sum_cannot_hold_and_names_it_on_every_rank(bad: float) -> None:
    for gradient, _, blame in in_world(2, reduce_cells, "exact", [1.0, 2.0, 3.0, bad]):
        assert np.isnan(gradient)
        assert blame.startswith("w")


def test_exact_sums_do_not_depend_on_the_order_of_the_cells() -> None:
    values = [0.1, 0.7, -0.3, 1e-3, 5.5]
    gradients = {in_world(1, reduce_cells, "exact", order)[0][0] for order in (values, values[::-1])}
    assert len(gradients) == 1
