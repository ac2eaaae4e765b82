"""The grid's promises at any world size, token files, and one prepared file for every way in."""

import hashlib
import io
import json
import logging
import math
import multiprocessing
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mingpt import data, storage
from mingpt.data import Batches, Grid, Validation, mix, open_corpus, open_tokens, permute, share, split_point
from mingpt.tokenizer import BPETokenizer, CharTokenizer

CPU = torch.device("cpu")
seeds = st.integers(0, 2**64 - 1)
examples = settings(deadline=None, max_examples=60)  # a busy machine is no failure


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    block_size, micro, cells = draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    return Grid(block_size + draw(st.integers(1, 200)), block_size, micro * cells, micro, draw(seeds))


def numbers(count: int) -> data.Tokens:
    return np.arange(count, dtype=np.uint16)


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


# --- token files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chars", "dtype"), [("ab", "<u2"), ("".join(map(chr, range(0x10000, 0x20001))), "<u4")])
def test_a_token_file_comes_back_whole(tmp_path: Path, chars: str, dtype: str) -> None:
    tokenizer = CharTokenizer(chars)
    ids = tokenizer.encode(chars * 2)
    data.write_tokens(tmp_path / "x", [ids[:1], ids[1:1], ids[1:]], tokenizer)
    file = open_tokens(tmp_path / "x")
    assert file.tokens.tolist() == ids.tolist() and file.tokens.dtype == dtype
    assert isinstance(file.tokens, np.memmap) and file.tokens.offset % 64 == 0
    assert file.tokenizer == tokenizer
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_the_fingerprint_tells_tokens_and_tokenizers_apart(tmp_path: Path) -> None:
    def fingerprint(chars: str, *chunks: list[int]) -> str:
        arrays = [np.array(chunk, np.uint16) for chunk in chunks]
        data.write_tokens(tmp_path / "x", arrays, CharTokenizer(chars))
        return open_tokens(tmp_path / "x").fingerprint

    assert fingerprint("ab", [0, 1]) == fingerprint("ab", [0], [1])
    assert len({fingerprint("ab", [0, 1]), fingerprint("ac", [0, 1]), fingerprint("ab", [1, 0])}) == 3


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    data.write_tokens(tmp_path / "x", [numbers(3)], CharTokenizer("abc"))
    return tmp_path / "x"


def test_more_tokens_than_32_bits_count(token_file: Path) -> None:
    raw = token_file.read_bytes()
    count, header = 2_200_000_000, raw[16:-6].replace(b'"count": 3', b'"count": 2200000000')
    token_file.write_bytes(raw[:8] + len(header).to_bytes(8, "little") + header)
    os.truncate(token_file, 16 + len(header) + 2 * count)  # sparse: it takes no space
    assert len(open_tokens(token_file).tokens) == count


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (0, "is not a"),
        (5, "is not a"),
        (12, "cut short inside"),
        (100, "cut short inside"),
        (-1, "should hold 3 tokens"),
    ],
)
def test_a_token_file_that_is_cut_short(token_file: Path, cut: int, message: str) -> None:
    token_file.write_bytes(token_file.read_bytes()[:cut])
    with pytest.raises(ValueError, match=message):
        open_tokens(token_file)


def test_a_newer_token_file_is_told_from_a_damaged_one(token_file: Path) -> None:
    token_file.write_bytes(token_file.read_bytes().replace(b'"format": 1', b'"format": 2'))
    with pytest.raises(ValueError, match="has format 2, this version reads 1"):
        open_tokens(token_file)


@pytest.mark.parametrize(
    ("sound", "damaged"),
    [(b"{", b"\xff"), (b'"count"', b'"cuont"'), (b'"uint16"', b'"uint61"'), (b'"count": 3', b'"count": x')],
)
def test_a_damaged_header_is_told_in_one_line(token_file: Path, sound: bytes, damaged: bytes) -> None:
    token_file.write_bytes(token_file.read_bytes().replace(sound, damaged, 1))
    with pytest.raises(ValueError, match="has a damaged header; delete it and prepare it again$"):
        open_tokens(token_file)


def test_an_error_while_writing_leaves_the_old_file(token_file: Path) -> None:
    before = token_file.read_bytes()

    def chunks() -> Iterator[data.Tokens]:
        yield numbers(1)
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        data.write_tokens(token_file, chunks(), CharTokenizer("ab"))
    assert token_file.read_bytes() == before and len(list(token_file.parent.iterdir())) == 1


# --- texts ------------------------------------------------------------------------------------------------------------


def corpus(path: Path, raw: bytes) -> str:
    path.write_bytes(raw)
    file = open_corpus(str(path), "char")
    return file.tokenizer.decode(file.tokens)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"ab\r\ncd\r\n", "ab\ncd\n"),
        (b"ab\rcd\r", "ab\ncd\n"),
        (b"a\r\r\n\n\rb", "a\n\n\n\nb"),
        (b"\xef\xbb\xbfhello", "hello"),
        (b"a\xef\xbb\xbfb", "a\ufeffb"),  # a mark inside the text is a character
        (b"a\x00b", "a\x00b"),
        ("é“日😀\u2028x".encode(), "é“日😀\u2028x"),
        (b"foo <|endoftext|> bar", "foo <|endoftext|> bar"),
    ],
)
@pytest.mark.parametrize("chunk", [3, 4, 5, 1 << 22])
def test_one_rule_for_texts(tmp_path: Path, raw: bytes, text: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_CHUNK", chunk)  # so that borders cut characters and line ends in two
    assert corpus(tmp_path / "x.txt", raw) == text


@examples
@given(st.binary(max_size=12), st.integers(3, 8))
def test_the_first_wrong_byte_is_named(raw: bytes, chunk: int) -> None:
    fsspec.filesystem("memory").pipe("/wrong.txt", raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "_CHUNK", chunk)
        try:
            expected = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            with pytest.raises(ValueError, match=rf"=memory://wrong\.txt is not UTF-8 at byte {error.start} "):
                list(data.read_text("memory://wrong.txt"))
        else:
            expected = expected.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
            if expected:
                assert "".join(data.read_text("memory://wrong.txt")) == expected


def test_half_a_surrogate_pair_is_not_utf8(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not UTF-8 at byte 1 "):
        corpus(tmp_path / "x.txt", b"a\xed\xa0\x80")


@pytest.mark.parametrize("raw", [b"", b"\xef\xbb\xbf"])
def test_an_empty_text_is_refused(tmp_path: Path, raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"data\.path=.*x\.txt has no text"):
        corpus(tmp_path / "x.txt", raw)


def test_a_mark_and_the_vocabulary_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mingpt")
    corpus(tmp_path / "x.txt", "\ufeffa\né".encode())
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [
        f"data.path={tmp_path}/x.txt starts with a byte-order mark, which is left out"
    ]
    assert r"3 symbols: '\na\xe9'" in caplog.messages


@pytest.mark.parametrize(("uri", "size"), [("{folder}/x.txt", " of 8 MB, 6 s left"), ("memory://folder/x.txt", "")])
def test_a_long_text_tells_how_far_it_is(
    tmp_path: Path, uri: str, size: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = b"a" * 8_000_000
    (tmp_path / "x.txt").write_bytes(raw)
    fsspec.filesystem("memory").pipe("/folder/x.txt", raw)
    monkeypatch.setattr(data, "_CHUNK", 1_000_000)
    if not size:  # a driver that does not know it
        monkeypatch.setattr(storage, "open_read", lambda uri: io.BufferedReader(io.BytesIO(raw)))  # type: ignore[arg-type]
    caplog.set_level(logging.INFO, "mingpt")
    clock = iter(range(0, 100, 2))
    list(data.read_text(uri.format(folder=tmp_path), clock=lambda: next(clock)))
    first = "reading: 3 MB, 0.5 MB/s"
    assert caplog.messages[0] == (f"reading: 3{size.replace('6 s', '10 s')}, 0.5 MB/s" if size else first)
    assert len(caplog.messages) == 2  # every third of eight looks at the clock


WORDS = st.text(alphabet="ab \n\t.日", max_size=60)


@examples
@given(st.lists(WORDS), st.integers(2, 12))
def test_a_text_is_cut_where_no_token_crosses(texts: list[str], size: int) -> None:
    pieces, text = list(data.cut(texts, size)), "".join(texts)
    assert "".join(pieces) == text and all(0 < len(piece) <= size for piece in pieces)
    assert pieces == list(data.cut([text], size)) == list(data.cut(text, size))
    tokenizer = BPETokenizer.train(["ab ab aba .. \n\n  ab 日日 日"] * 9, 280)
    if max(map(len, re.findall(r"\S*\s*", text))) < size:  # else some word is longer than a piece may be
        assert [i for piece in pieces for i in tokenizer.encode(piece)] == tokenizer.encode(text).tolist()


@pytest.mark.parametrize(("kind", "vocab_size"), [("gpt2", 4096), ("bpe", 280)])
def test_a_text_in_byte_pairs_is_one_document(tmp_path: Path, kind: str, vocab_size: int) -> None:
    text = "the quick fox <|endoftext|> jumps, it's 日本\n\n  far. " * 300
    (tmp_path / "x.txt").write_text(text, encoding="utf-8")
    file = open_corpus(str(tmp_path / "x.txt"), kind, vocab_size)
    assert file.tokenizer.kind == kind and file.tokenizer.vocab_size == (280 if kind == "bpe" else 50257)
    assert file.tokens.tolist() == [*file.tokenizer.encode(text), file.tokenizer.end_of_text]
    assert (file.tokens == file.tokenizer.end_of_text).sum() == 1  # the one in the text is text


def test_learning_stops_where_distinct_words_would_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_DISTINCT", 1000)
    again = ["the same words again and again " * 40000] * 3
    assert "".join(data._to_learn_from(again)) == "".join(again)
    other = " ".join(map(str, range(400_000)))
    assert "".join(data._to_learn_from([other])) == next(data.cut([other]))


def test_each_tokenizer_has_its_own_prepared_file(tmp_path: Path, preparations: list[str]) -> None:
    (tmp_path / "x.txt").write_text("text and more text " * 50, encoding="utf-8")
    asked = [("char", 4096), ("bpe", 260), ("bpe", 265)]
    for _ in range(2):
        sizes = [open_corpus(str(tmp_path / "x.txt"), *it).tokenizer.vocab_size for it in asked]
    assert len(preparations) == 3 and sizes[1:] == [260, 265]


# --- shards and prepared folders --------------------------------------------------------------------------------------


@examples
@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 60), st.integers(0, 60), st.data())
def test_shards_read_as_one_array(sizes: list[int], start: int, stop: int, draw: st.DataObject) -> None:
    whole = np.arange(sum(sizes), dtype=np.uint16)
    shards = data.Shards(np.split(whole, np.cumsum(sizes)[:-1]) if sizes else [])
    assert len(shards) == len(whole)
    expected, part = whole[start:stop], shards[start:stop]
    assert len(part) == len(expected)
    where = draw.draw(st.lists(st.integers(0, len(expected) - 1), max_size=9)) if len(expected) else []
    index = np.array([where, where], np.int64)
    assert part[index].tolist() == expected[index].tolist()


def write_folder(folder: Path, *splits: list[int]) -> data.Index:
    """A prepared folder with shards of three tokens."""
    folder.mkdir(exist_ok=True)
    written = []
    for name, ids in zip(("train", "val"), splits, strict=True):
        shards = []
        for i in range(0, len(ids), 3):
            path = folder / f"{name}-{i // 3:05d}.tokens"
            data.write_tokens(path, [np.array(ids[i : i + 3], np.uint16)], CharTokenizer("abcdefghij"))
            raw = path.read_bytes()
            shards.append(data.Shard(path.name, len(ids[i : i + 3]), len(raw), hashlib.sha256(raw).hexdigest()))
        written.append(tuple(shards))
    index = data.Index(written[0], written[1], {})
    (folder / data.INDEX).write_bytes(index.to_json())
    return index


@pytest.fixture
def folder_here(tmp_path: Path) -> Path:
    write_folder(tmp_path / "prepared", [0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 0])
    return tmp_path / "prepared"


@pytest.fixture
def folder_there(folder_here: Path) -> Iterator[str]:
    memory = fsspec.filesystem("memory")
    memory.put(str(folder_here), "/store/prepared", recursive=True)
    yield "memory://store/prepared"
    memory.rm("/store", recursive=True)


def test_a_prepared_folder_is_one_stream_with_its_own_split(folder_here: Path) -> None:
    corpus = open_corpus(str(folder_here), "char")
    assert corpus.tokens[np.arange(11)].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert corpus.split(0.5) == 7 and corpus.tokenizer.vocab_size == 10
    assert open_corpus(str(folder_here / "index.json"), "char").fingerprint == corpus.fingerprint
    write_folder(folder_here, [0, 1, 2, 3], [])
    assert open_corpus(str(folder_here), "char").split(0.5) == 2, "without validation of its own, as the config says"


def test_batches_come_out_of_shards_as_out_of_an_array(folder_here: Path) -> None:
    shards = open_corpus(str(folder_here), "char").tokens[:7]
    grid = Grid(7, 2, 4, 2, seed=1)
    for tokens in (shards, np.arange(7, dtype=np.uint16)):
        batches = Batches(tokens, grid, CPU)
        for starts, (idx, targets) in zip(grid.starts(3).reshape(2, 2), batches.cells(3, range(2)), strict=True):
            assert idx[:, 0].tolist() == starts.tolist() and torch.equal(targets, idx + 1)
        batches.close()
    assert Validation(shards, 3, 2).cell(0, CPU)[1].tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("damage", ["swapped", "index", "version", "path", "missing"])
def test_a_damaged_folder_is_refused(folder_here: Path, damage: str) -> None:
    raw = json.loads((folder_here / "index.json").read_bytes())
    if damage == "swapped":
        (folder_here / "val-00001.tokens").rename(folder_here / "train-00001.tokens")
    elif damage == "missing":
        (folder_here / "train-00001.tokens").unlink()
    raw["format"] = 2 if damage == "version" else 1
    raw["train"][0]["name"] = "../x.tokens" if damage == "path" else raw["train"][0]["name"]
    (folder_here / "index.json").write_text("{" if damage == "index" else json.dumps(raw), encoding="utf-8")
    with pytest.raises((ValueError, FileNotFoundError), match=r"prepare the folder again|No such file"):
        open_corpus(str(folder_here), "char")


def test_a_folder_at_a_uri_is_downloaded_once(
    folder_here: Path, folder_there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    open_read = storage.open_read
    monkeypatch.setattr(storage, "open_read", lambda uri: (read.append(uri), open_read(uri))[1])
    for _ in range(2):
        corpus = open_corpus(folder_there, "char")
    assert corpus.fingerprint == open_corpus(str(folder_here), "char").fingerprint
    assert corpus.tokens[np.arange(11)].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert len(read) == 2 + 5 and len({*read}) == 1 + 5, "the index each time, each file once"


def test_a_folder_at_a_uri_is_verified_and_goes_on_after_a_failure(folder_there: str, private_temp: Path) -> None:
    memory = fsspec.filesystem("memory")
    good = memory.cat("/store/prepared/val-00000.tokens")
    memory.pipe("/store/prepared/val-00000.tokens", good[:-1] + b"\x07")
    with pytest.raises(OSError, match=r"memory://store/prepared/val-00000\.tokens has other bytes than index\.json"):
        open_corpus(folder_there, "char")
    kept = {path.name for path in private_temp.rglob("*.tokens")}
    assert kept == {"train-00000.tokens", "train-00001.tokens", "train-00002.tokens"}
    memory.pipe("/store/prepared/val-00000.tokens", good)
    assert len(open_corpus(folder_there, "char").tokens) == 11


def test_the_cache_of_downloaded_folders_is_bounded(tmp_path: Path, private_temp: Path) -> None:
    memory = fsspec.filesystem("memory")
    for name in "abc":
        write_folder(tmp_path / name, [ord(name) % 10, 1, 2], [3, 4])
        memory.put(str(tmp_path / name), f"/store/{name}", recursive=True)
    size = sum(file.stat().st_size for file in (tmp_path / "a").iterdir()) / 1e9
    first = open_corpus("memory://store/a", "char", cache_gb=2.5 * size)
    os.utime(first.path, (1, 1))
    for name in "bc":
        open_corpus(f"memory://store/{name}", "char", cache_gb=2.5 * size)
    assert not first.path.exists() and len([*private_temp.glob("*/folders/*/")]) == 2
    assert first.tokens[np.arange(5)].tolist() == [7, 1, 2, 3, 4], "who has it open keeps it"
    with pytest.raises(ValueError, match=r"data\.cache_gb"):
        open_corpus("memory://store/a", "char", cache_gb=size / 3)
    memory.rm("/store", recursive=True)


def test_two_gigabytes_of_tokens_take_no_memory_of_our_own(token_file: Path) -> None:
    raw, count = token_file.read_bytes(), 1_000_000_000
    header = raw[16:-6].replace(b'"count": 3', b'"count": 1000000000')
    token_file.write_bytes(raw[:8] + len(header).to_bytes(8, "little") + header)
    os.truncate(token_file, 16 + len(header) + 2 * count)
    tokens = open_corpus(str(token_file), "char").tokens
    grid = Grid(count, 1024, 64, 16, seed=1)
    batches = Batches(tokens, grid, CPU)

    def own() -> int:
        status = Path("/proc/self/status").read_text(encoding="utf-8") if sys.platform == "linux" else "RssAnon: 0 kB"
        return int(re.search(r"RssAnon:\s+(\d+)", status)[1])  # type: ignore[index]

    batches.cells(0, range(grid.cells))
    before = own()
    for step in range(30):
        batches.cells(step, range(grid.cells))
    batches.close()
    assert own() - before < 20_000  # kB; 200 MB are allowed


# --- preparing once ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def private_temp(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    temp = tmp_path_factory.mktemp("temp")
    monkeypatch.setattr("tempfile.tempdir", str(temp))
    return temp


@pytest.fixture
def preparations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were prepared, one entry each time."""
    done: list[str] = []
    prepare = data._prepare

    def counted(uri: str, *args: Any) -> None:
        done.append(uri)
        prepare(uri, *args)

    monkeypatch.setattr(data, "_prepare", counted)
    return done


def test_a_text_is_prepared_again_when_it_changes_only(tmp_path: Path, preparations: list[str]) -> None:
    text = tmp_path / "x.txt"
    assert corpus(text, b"one") == "one"
    open_corpus(str(text), "char")
    assert len(preparations) == 1
    assert corpus(text, b"other") == "other"
    assert len(preparations) == 2
    assert len(list((tmp_path / ".mingpt-cache").glob("*.tokens"))) == 1  # the first one's is not kept


def test_any_name_makes_a_file_name_and_none_takes_anothers_place(tmp_path: Path, preparations: list[str]) -> None:
    texts = [tmp_path / f"{char * 80}.txt" for char in "\u6f22\u5b57"]  # of 244 bytes each; 255 is the most
    for text in texts:
        assert corpus(text, text.name[0].encode()) == text.name[0]
    for text in texts:
        open_corpus(str(text), "char")
    assert len(preparations) == 2
    assert all(path.name.isascii() for path in (tmp_path / ".mingpt-cache").iterdir())


def test_a_prepared_text_takes_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus(tmp_path / "x.txt", b"text")
    monkeypatch.delattr(data, "only_process")  # a folder that someone else prepared may be read-only
    open_corpus(str(tmp_path / "x.txt"), "char")


@pytest.mark.parametrize("damage", [b"", b"junk", b"MINGPTOK\xff\xff"])
def test_a_damaged_preparation_is_made_again(
    tmp_path: Path, preparations: list[str], damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abc")
    first = open_corpus(str(path), "char")
    first.path.write_bytes(damage)
    again = open_corpus(str(path), "char")
    assert again.fingerprint == first.fingerprint
    assert len(preparations) == 2
    assert "is damaged: making it again" in caplog.text


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), os.devnull):
        with pytest.raises(ValueError, match="is no regular file"):
            open_corpus(path, "char")


def test_a_token_file_is_opened_as_it_is(tmp_path: Path, token_file: Path, preparations: list[str]) -> None:
    assert open_corpus(str(token_file), "char").tokens.tolist() == [0, 1, 2]
    assert not preparations and not (tmp_path / ".mingpt-cache").exists()


def test_local_and_remote_texts_are_the_same_data(tmp_path: Path, private_temp: Path, preparations: list[str]) -> None:
    raw = "\ufeffab\r\ncdé\r".encode()
    fsspec.filesystem("memory").pipe("/folder/x.txt", raw)
    (tmp_path / "x.txt").write_bytes(raw)
    uris = [str(tmp_path / "x.txt"), f"file://{tmp_path}/x.txt", "memory://folder/x.txt", "memory://folder/x.txt"]
    assert len({open_corpus(uri, "char").fingerprint for uri in uris}) == 1
    assert preparations == [str(tmp_path / "x.txt"), "memory://folder/x.txt"]
    (private,) = private_temp.iterdir()
    assert private.name == f"mingpt-{os.getuid()}" and stat.S_IMODE(private.stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_written(tmp_path: Path, private_temp: Path, preparations: list[str]) -> None:
    (tmp_path / ".mingpt-cache").write_text("a file where the folder should be: it stops root too", encoding="utf-8")
    assert corpus(tmp_path / "x.txt", b"text") == "text"
    open_corpus(str(tmp_path / "x.txt"), "char")
    assert len(preparations) == 1 and len(list(private_temp.rglob("*.tokens"))) == 1


def test_a_private_folder_of_someone_else_is_not_trusted(private_temp: Path, tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe("/x.txt", b"text")
    (private_temp / f"mingpt-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="cannot be trusted"):
        open_corpus("memory://x.txt", "char")


def test_a_text_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, write = tmp_path / "x.txt", data.write_tokens
    monkeypatch.setattr(data, "write_tokens", lambda *args: (write(*args), text.write_text("more", encoding="utf-8")))
    with pytest.raises(OSError, match="changed while it was read"):
        corpus(text, b"text")
    assert not list(tmp_path.rglob("*.tokens"))


@pytest.mark.parametrize(
    ("path", "message"), [("x.txt", "does not exist"), ("", "neither index.json nor input.txt nor prepare.py")]
)
def test_what_is_not_there(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(FileNotFoundError, match=message):
        open_corpus(str(tmp_path / path), "char")


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("text", encoding="utf-8")
    with pytest.raises(ValueError, match=r"data\.tokenizer='words' is not known"):
        open_corpus(str(tmp_path / "x.txt"), "words")


def in_process(name: str, folder: Path, barrier: Barrier, log: Path) -> None:
    """What a rank does; `name` says how this one ends."""
    logging.basicConfig(filename=log, level=logging.INFO, format="%(message)s")
    write = data.write_tokens

    def killed(path: Path, chunks: Iterable[data.Tokens], tokenizer: CharTokenizer) -> None:
        def first_then_die() -> Iterator[data.Tokens]:
            yield next(iter(chunks))
            os.kill(os.getpid(), signal.SIGKILL)

        write(path, first_then_die(), tokenizer)

    if name == "killed":
        data.write_tokens = killed
    barrier.wait()
    open_corpus(str(folder), "char")


@pytest.fixture
def prepared_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    script = """
        from pathlib import Path
        here = Path(__file__).parent
        with open(here / "runs", "a") as runs: runs.write("run\\n")
        (here / "input.txt").write_text("text " * 100000)
    """
    (folder / "prepare.py").write_text("\n".join(line.strip() for line in script.splitlines()), encoding="utf-8")
    return folder


def run_processes(names: list[str], folder: Path, log: Path) -> list[int | None]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mingpt.data"])
    barrier = context.Barrier(len(names))
    processes = [context.Process(target=in_process, args=(name, folder, barrier, log)) for name in names]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


def test_several_processes_prepare_once(prepared_folder: Path, tmp_path: Path) -> None:
    assert run_processes(["rank"] * 4, prepared_folder, tmp_path / "log") == [0] * 4
    assert (prepared_folder / "runs").read_text(encoding="utf-8").splitlines() == ["run"]
    messages = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert Counter(message.split()[0] for message in messages)["prepared"] == 1


def test_a_killed_preparation_is_made_again(prepared_folder: Path, tmp_path: Path) -> None:
    assert run_processes(["killed"], prepared_folder, tmp_path / "log") == [-signal.SIGKILL]
    cache = prepared_folder / ".mingpt-cache"
    assert [path.name for path in cache.iterdir()] == ["lock"]
    assert run_processes(["rank"], prepared_folder, tmp_path / "log") == [0]
    file = open_corpus(str(prepared_folder), "char")
    assert file.tokenizer.decode(file.tokens) == "text " * 100000


def test_who_comes_second_says_that_it_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mingpt")
    inside, waiting = threading.Event(), threading.Event()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if re.fullmatch(r"waiting for another process \(process \d+ on .+\) to prepare x", record.getMessage()):
                waiting.set()

    def hold() -> None:
        with data.only_process(tmp_path, "x"):
            inside.set()
            assert waiting.wait(30)

    handler = Told()
    data.log.addHandler(handler)
    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait(30)
    with data.only_process(tmp_path, "x"):
        assert waiting.is_set()
    holder.join()
    data.log.removeHandler(handler)


def test_a_killed_prepare_is_run_again(tmp_path: Path) -> None:
    (tmp_path / "prepare.py").write_text(
        "from pathlib import Path\nimport os, sys, signal\nhere = Path(__file__).parent\n"
        "(here / 'input.txt').write_text('half')\n"
        "if not (here / 'again').exists(): os.kill(os.getppid(), signal.SIGKILL); sys.exit()\n"
        "(here / 'input.txt').write_text('whole text')\n"
    )
    start = [sys.executable, "-c", f"from mingpt.data import open_corpus; open_corpus({str(tmp_path)!r}, 'char')"]
    assert subprocess.run(start, check=False).returncode == -signal.SIGKILL
    (tmp_path / "again").touch()
    corpus = open_corpus(str(tmp_path), "char")
    assert corpus.tokenizer.decode(corpus.tokens) == "whole text"


def test_a_folder_whose_prepare_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "prepare.py").write_text("import sys; sys.exit('no index: give a file')", encoding="utf-8")
    with pytest.raises(ChildProcessError, match=r"made no input\.txt: no index: give a file"):
        open_corpus(str(tmp_path), "char")
