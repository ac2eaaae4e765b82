"""The grid's promises, at any seed, step and world size."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mingpt.grid import Grid, mix, permute, share, split_point

seeds = st.integers(0, 2**64 - 1)
examples = settings(deadline=None, max_examples=60)  # a busy machine is no failure


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    block_size, micro, cells = draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    return Grid(block_size + draw(st.integers(1, 200)), block_size, micro * cells, micro, draw(seeds))


# --- derived numbers --------------------------------------------------------------------------------------------------


def test_golden_values_of_mix() -> None:
    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of splitmix64 from state 0, as published
    assert [mix(1), mix(1, 2), mix(2, 1), mix(-1)] == [
        0x910A2DEC89025CC1,
        0xBCD9DBB49673066B,
        0xE06DD043328BD285,
        0xE4D971771B652C20,
    ]


def test_golden_values_of_permute() -> None:
    assert permute(1337, 0, np.arange(10), 10).tolist() == [7, 8, 1, 2, 0, 6, 3, 5, 4, 9]
    assert permute(1337, 1, np.arange(10), 10).tolist() == [9, 3, 6, 7, 1, 0, 4, 2, 8, 5]
    far = permute(1337, 3, np.array([0, 1, 10**6, 10**12 - 1]), 10**12)
    assert far.tolist() == [550875945510, 363936546754, 913002721321, 538948719416]


def test_golden_values_of_starts() -> None:
    grid = Grid(1000, 64, 6, 2, seed=1337)
    assert grid.windows == 14 and [grid.offset(epoch) for epoch in range(3)] == [90, 30, 68]
    assert grid.starts(0).tolist() == [730, 858, 154, 218, 90, 474]
    assert grid.starts(2).tolist() == [922, 602, 606, 222, 798, 478]  # its first two samples end an epoch


@examples
@given(seeds, st.integers(0, 1000), st.integers(1, 300))
def test_permute_permutes(seed: int, epoch: int, n: int) -> None:
    assert sorted(permute(seed, epoch, np.arange(n), n).tolist()) == list(range(n))


@examples
@given(seeds, st.integers(1, 40), st.lists(st.tuples(st.integers(0, 99), st.integers(0, 39)), min_size=1))
def test_permute_takes_many_epochs_at_once(seed: int, n: int, places: list[tuple[int, int]]) -> None:
    epochs, i = np.array([epoch for epoch, _ in places]), np.array([i % n for _, i in places])
    alone = [int(permute(seed, epoch, i[[k]], n)[0]) for k, epoch in enumerate(epochs.tolist())]
    assert permute(seed, epochs, i, n).tolist() == alone


@pytest.mark.parametrize("n", range(2, 9))
def test_epochs_of_few_windows_differ(n: int) -> None:
    epochs, places = np.divmod(np.arange(1000 * n), n)
    orders = permute(1337, epochs, places, n).reshape(1000, n)
    same_as_the_next = (orders[1:] == orders[:-1]).all(axis=1).mean()
    assert same_as_the_next < 1.3 / min(24, math.factorial(n))
    often = np.stack([np.bincount(orders[:, k], minlength=n) for k in range(n)]) / 1000
    assert np.abs(often - 1 / n).max() < 0.06  # every window comes at every place equally often


# --- the grid ---------------------------------------------------------------------------------------------------------


@examples
@given(grids())
def test_an_epoch_reads_every_window_once(grid: Grid) -> None:
    steps = -(-2 * grid.windows // grid.global_batch_size)
    starts = np.concatenate([grid.starts(step) for step in range(steps)])
    for epoch in range(2):
        read = np.sort(starts[epoch * grid.windows : (epoch + 1) * grid.windows])
        assert read.tolist() == [grid.offset(epoch) + k * grid.block_size for k in range(grid.windows)]


@examples
@given(grids(), st.integers(0, 50))
def test_windows_stay_inside_the_text(grid: Grid, step: int) -> None:
    starts = grid.starts(step)
    assert starts.min() >= 0 and starts.max() + grid.block_size + 1 <= grid.n_tokens


@examples
@given(grids())
def test_the_last_token_is_reached_and_alignments_differ(grid: Grid) -> None:
    room = grid.n_tokens - grid.windows * grid.block_size
    offsets = {grid.offset(epoch) for epoch in range(40 * room)}
    assert offsets == set(range(room))
    assert max(offsets) + grid.windows * grid.block_size + 1 == grid.n_tokens


@examples
@given(grids(), st.integers(1, 12), st.integers(0, 9))
def test_the_shares_of_all_ranks_join_to_the_global_batch(grid: Grid, world_size: int, step: int) -> None:
    shares = [share(rank, world_size, grid.cells) for rank in range(world_size)]
    assert [cell for cells in shares for cell in cells] == list(range(grid.cells))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_batch_across_epochs_uses_the_offset_of_each() -> None:
    grid = Grid(50, 8, 8, 4, seed=5)  # 5 windows: step 0 is epoch 0 and three samples of epoch 1
    expected = [grid.offset(i // 5) + 8 * int(permute(5, i // 5, np.array([i % 5]), 5)[0]) for i in range(8)]
    assert grid.offset(0) != grid.offset(1)
    assert grid.starts(0).tolist() == expected


def test_the_smallest_text_is_one_window() -> None:
    grid = Grid(9, 8, 3, 1, seed=1)
    assert grid.windows == 1 and grid.starts(7).tolist() == [0, 0, 0]


@pytest.mark.parametrize("n_tokens", [0, 1, 8])
def test_a_text_without_a_window_is_refused_with_both_cures(n_tokens: int) -> None:
    with pytest.raises(ValueError, match="training split") as error:
        Grid(n_tokens, 8, 3, 1, seed=1)
    line = str(error.value)
    assert "\n" not in line and f"training split has {n_tokens} tokens" in line and "at least 9" in line
    assert "smaller model.block_size" in line and "smaller data.val_fraction" in line


def test_positions_in_samples_epochs_and_steps() -> None:
    grid = Grid(320, 10, 6, 2, seed=1)
    assert (grid.windows, grid.cells, grid.tokens_per_step) == (31, 3, 60)
    assert (grid.samples_seen(31), grid.epoch(31), grid.steps(6.0), grid.steps(0.5)) == (186, 6.0, 31, 3)
    assert Grid(1010, 10, 1, 1, seed=1).steps(0.55) == 55 < 0.55 * 100  # floats must not cost a step
    assert grid.steps(1e-9) == 1  # a run has a step


@examples
@given(st.integers(0, 10_000), st.floats(0, 1, exclude_max=True))
def test_the_split_is_by_position(n_tokens: int, val_fraction: float) -> None:
    assert n_tokens - split_point(n_tokens, val_fraction) == int(np.floor(n_tokens * val_fraction))
