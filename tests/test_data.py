"""Feeding: every window of the grid and every target of validation, once, at any world size."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_grid import grids

from mingpt import data
from mingpt.data import Batches, Validation
from mingpt.grid import Grid, share, split_point
from mingpt.tokens import Tokens

CPU = torch.device("cpu")
examples = settings(deadline=None, max_examples=60)  # a busy machine is no failure


def numbers(count: int) -> Tokens:
    return np.arange(count, dtype=np.uint16)


# --- feeding ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def grid() -> Grid:
    return Grid(300, 7, 12, 3, seed=3)


@pytest.fixture
def batches(grid: Grid) -> Iterator[Batches]:
    batches = Batches(numbers(300), grid, CPU)
    yield batches
    batches.close()


def test_cells_are_the_windows_of_the_grid(batches: Batches, grid: Grid) -> None:
    cells = batches.cells(4, range(grid.cells))
    assert len(cells) == 4
    for starts, (idx, targets) in zip(torch.from_numpy(grid.starts(4)).split(3), cells, strict=True):
        assert torch.equal(idx, starts[:, None] + torch.arange(7)) and torch.equal(targets, idx + 1)
        assert idx.dtype == targets.dtype == torch.int64 and idx.is_contiguous() and targets.is_contiguous()


@examples
@given(asked=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4), st.integers(0, 4)), max_size=8))
def test_cells_do_not_depend_on_what_was_read_ahead(asked: list[tuple[int, int, int]]) -> None:
    grid = Grid(300, 7, 12, 3, seed=3)
    batches = Batches(numbers(300), grid, CPU)
    for step, start, stop in asked:
        first = [x for idx, _ in batches.cells(step, range(start, stop)) for x in idx[:, 0].tolist()]
        assert first == grid.starts(step)[start * 3 : stop * 3].tolist()
    batches.close()


def test_the_next_step_is_read_ahead_and_used(batches: Batches, grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[tuple[int, bool]] = []
    read = Batches._read

    def spy(self: Batches, step: int, share: range) -> Any:
        threads.append((step, threading.current_thread() is threading.main_thread()))
        return read(self, step, share)

    monkeypatch.setattr(Batches, "_read", spy)
    for step in range(3):
        batches.cells(step, range(4))
    batches.close()
    assert [step for step, in_main in threads if in_main] == [0]
    assert [step for step, in_main in threads if not in_main][:2] == [1, 2]


def test_an_error_while_reading_ahead_comes_out_of_cells(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        batches.cells(0, range(4))
        batches._thread.submit(lambda: None).result()  # step 1 has been read
        patch.setattr(data, "_rows", broken)
        batches.cells(1, range(4))
        with pytest.raises(OSError, match="the disk is gone"):
            batches.cells(2, range(4))
    assert len(batches.cells(2, range(4))) == 4  # and the error does not stay


def test_close_ends_the_thread(batches: Batches) -> None:
    batches.cells(0, range(4))
    (thread,) = (t for t in threading.enumerate() if t.name.startswith("batches"))
    batches.close()
    assert not thread.is_alive()
    batches.close()  # twice is harmless


@examples
@given(st.integers(2, 80), st.integers(1, 9), st.integers(1, 4), st.integers(1, 6))
def test_validation_reads_every_target_once_at_any_world_size(
    n_tokens: int, block_size: int, micro: int, world_size: int
) -> None:
    validation = Validation(numbers(n_tokens), block_size, micro)
    cells = [i for rank in range(world_size) for i in share(rank, world_size, len(validation))]
    pairs = [validation.cell(i, CPU) for i in cells]
    assert torch.cat([targets.flatten() for _, targets in pairs]).tolist() == list(range(1, n_tokens))
    assert torch.cat([idx.flatten() for idx, _ in pairs]).tolist() == list(range(n_tokens - 1))
    assert all(len(idx) <= micro for idx, _ in pairs)
    assert {idx.shape[1] for idx, _ in pairs[:-1]} <= {block_size}


def test_validation_of_the_first_windows_only() -> None:
    def shapes(eval_sequences: int) -> list[tuple[int, ...]]:
        validation = Validation(numbers(43), 10, 3, eval_sequences)
        return [tuple(validation.cell(i, CPU)[0].shape) for i in range(len(validation))]

    assert shapes(0) == shapes(9) == shapes(5) == [(3, 10), (1, 10), (1, 2)]
    assert shapes(4) == [(3, 10), (1, 10)] and shapes(2) == [(2, 10)]


@pytest.mark.parametrize("n_tokens", [0, 1])
def test_validation_without_a_target_is_refused_with_the_cures(n_tokens: int) -> None:
    with pytest.raises(ValueError, match=rf"validation split has {n_tokens} tokens .* larger data\.val_fraction"):
        Validation(numbers(n_tokens), 8, 1)


@examples
@given(grids(), st.floats(0, 0.9))
def test_no_training_window_touches_validation_text(grid: Grid, val_fraction: float) -> None:
    text = numbers(grid.n_tokens * 10)
    at = split_point(len(text), val_fraction)
    grid = Grid(at, grid.block_size, grid.global_batch_size, grid.micro_batch_size, grid.seed)
    batches = Batches(text[:at], grid, CPU)
    read = [x for step in range(3) for cell in batches.cells(step, range(grid.cells)) for x in cell]
    batches.close()
    assert max(int(x.max()) for x in read) < at
