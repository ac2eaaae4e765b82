"""Token files and prepared folders are whole or refused; one prepared file for every way in."""

import hashlib
import json
import logging
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

import train_gpt
from mingpt import corpus, storage, tokens
from mingpt.config import Config, DataSection
from mingpt.corpus import open_corpus
from mingpt.data import Batches, Validation
from mingpt.grid import Grid
from mingpt.tokenizer import CUT, BPETokenizer, CharTokenizer, cut
from mingpt.tokens import open_tokens

CPU = torch.device("cpu")
examples = settings(deadline=None, max_examples=60)  # a busy machine is no failure


def numbers(count: int) -> tokens.Tokens:
    return np.arange(count, dtype=np.uint16)


# --- token files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chars", "dtype"), [("ab", "<u2"), ("".join(map(chr, range(0x10000, 0x20001))), "<u4")])
def test_a_token_file_comes_back_whole(tmp_path: Path, chars: str, dtype: str) -> None:
    tokenizer = CharTokenizer(chars)
    ids = tokenizer.encode(chars * 2)
    tokens.write_tokens(tmp_path / "x", [ids[:1], ids[1:1], ids[1:]], tokenizer)
    file = open_tokens(tmp_path / "x")
    assert file.tokens.tolist() == ids.tolist() and file.tokens.dtype == dtype
    assert isinstance(file.tokens, np.memmap) and file.tokens.offset % 64 == 0
    assert file.tokenizer == tokenizer
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_the_fingerprint_tells_tokens_and_tokenizers_apart(tmp_path: Path) -> None:
    def fingerprint(chars: str, *chunks: list[int]) -> str:
        arrays = [np.array(chunk, np.uint16) for chunk in chunks]
        tokens.write_tokens(tmp_path / "x", arrays, CharTokenizer(chars))
        return open_tokens(tmp_path / "x").fingerprint

    assert fingerprint("ab", [0, 1]) == fingerprint("ab", [0], [1])
    assert len({fingerprint("ab", [0, 1]), fingerprint("ac", [0, 1]), fingerprint("ab", [1, 0])}) == 3


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    tokens.write_tokens(tmp_path / "x", [numbers(3)], CharTokenizer("abc"))
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

    def chunks() -> Iterator[tokens.Tokens]:
        yield numbers(1)
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        tokens.write_tokens(token_file, chunks(), CharTokenizer("ab"))
    assert token_file.read_bytes() == before and len(list(token_file.parent.iterdir())) == 1


# --- texts ------------------------------------------------------------------------------------------------------------


def text_of(path: Path, raw: bytes) -> str:
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
    monkeypatch.setattr(corpus, "_CHUNK", chunk)  # so that borders cut characters and line ends in two
    assert text_of(tmp_path / "x.txt", raw) == text


@examples
@given(st.binary(max_size=12), st.integers(3, 8))
def test_the_first_wrong_byte_is_named(raw: bytes, chunk: int) -> None:
    fsspec.filesystem("memory").pipe("/wrong.txt", raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "_CHUNK", chunk)
        try:
            expected = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            with pytest.raises(ValueError, match=rf"=memory://wrong\.txt is not UTF-8 at byte {error.start} "):
                list(corpus.read_text("memory://wrong.txt"))
        else:
            expected = expected.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
            if expected:
                assert "".join(corpus.read_text("memory://wrong.txt")) == expected


def test_half_a_surrogate_pair_is_not_utf8(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not UTF-8 at byte 1 "):
        text_of(tmp_path / "x.txt", b"a\xed\xa0\x80")


@pytest.mark.parametrize("raw", [b"", b"\xef\xbb\xbf"])
def test_an_empty_text_is_refused(tmp_path: Path, raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"data\.path=.*x\.txt has no text"):
        text_of(tmp_path / "x.txt", raw)


def test_a_mark_and_the_vocabulary_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mingpt")
    text_of(tmp_path / "x.txt", "\ufeffa\né".encode())
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
    monkeypatch.setattr(corpus, "_CHUNK", 1_000_000)
    if not size:  # a driver that does not know it
        monkeypatch.setattr(storage, "size", lambda uri: 0)
    caplog.set_level(logging.INFO, "mingpt")
    clock = iter(range(0, 100, 2))
    list(corpus.read_text(uri.format(folder=tmp_path), clock=lambda: next(clock)))
    first = "reading: 3 MB, 0.5 MB/s"
    assert caplog.messages[0] == (f"reading: 3{size.replace('6 s', '10 s')}, 0.5 MB/s" if size else first)
    assert len(caplog.messages) == 2  # every third of eight looks at the clock


WORDS = st.text(alphabet="ab \n\t.日", max_size=60)


@examples
@given(st.lists(WORDS), st.integers(2, 12))
def test_a_text_is_cut_where_no_token_crosses(texts: list[str], size: int) -> None:
    pieces, text = list(cut(texts, size)), "".join(texts)
    assert "".join(pieces) == text and all(0 < len(piece) <= size for piece in pieces)
    assert pieces == list(cut([text], size)) == list(cut(text, size))
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
    monkeypatch.setattr(corpus, "_DISTINCT", 1000)
    again = ["the same words again and again " * 40000] * 3
    assert "".join(corpus._to_learn_from(again)) == "".join(again)
    other = " ".join(map(str, range(400_000)))
    assert "".join(corpus._to_learn_from([other])) == next(cut([other]))


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
    shards = tokens.Shards(np.split(whole, np.cumsum(sizes)[:-1]) if sizes else [])
    assert len(shards) == len(whole)
    expected, part = whole[start:stop], shards[start:stop]
    assert len(part) == len(expected)
    where = draw.draw(st.lists(st.integers(0, len(expected) - 1), max_size=9)) if len(expected) else []
    index = np.array([where, where], np.int64)
    assert part[index].tolist() == expected[index].tolist()


def write_folder(folder: Path, *splits: list[int]) -> tokens.Index:
    """A prepared folder with shards of three tokens."""
    folder.mkdir(exist_ok=True)
    written = []
    for name, ids in zip(("train", "val"), splits, strict=True):
        shards = []
        for i in range(0, len(ids), 3):
            path = folder / f"{name}-{i // 3:05d}.tokens"
            tokens.write_tokens(path, [np.array(ids[i : i + 3], np.uint16)], CharTokenizer("abcdefghij"))
            raw = path.read_bytes()
            shards.append(tokens.Shard(path.name, len(ids[i : i + 3]), len(raw), hashlib.sha256(raw).hexdigest()))
        written.append(tuple(shards))
    index = tokens.Index(written[0], written[1], {})
    (folder / tokens.INDEX).write_bytes(index.to_json())
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


def test_a_prepared_folder_is_not_taken_for_something_else(folder_here: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpus = open_corpus(str(folder_here), "gpt2")
    with pytest.raises(
        ValueError, match=r"data\.tokenizer=gpt2, but .*prepared was prepared with char: give --data\.t"
    ):
        train_gpt.check_tokens(Config(data=DataSection(tokenizer="gpt2")), corpus)
    train_gpt.check_tokens(Config(), corpus)
    assert not caplog.messages
    train_gpt.check_tokens(Config(data=DataSection(val_fraction=0.2, vocab_size=300)), corpus)
    assert [re.findall(r"data\.\w+", message)[0] for message in caplog.messages] == [
        "data.val_fraction", "data.vocab_size"
    ]  # fmt: skip


def test_batches_come_out_of_shards_as_out_of_an_array(folder_here: Path) -> None:
    shards = open_corpus(str(folder_here), "char").tokens[:7]
    grid = Grid(7, 2, 4, 2, seed=1)
    for stream in (shards, np.arange(7, dtype=np.uint16)):
        batches = Batches(stream, grid, CPU)
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


def test_a_folder_at_a_uri_is_verified_and_goes_on_after_a_failure(folder_there: str, home: Path) -> None:
    memory = fsspec.filesystem("memory")
    good = memory.cat("/store/prepared/val-00000.tokens")
    memory.pipe("/store/prepared/val-00000.tokens", good[:-1] + b"\x07")
    with pytest.raises(OSError, match=r"memory://store/prepared/val-00000\.tokens has other bytes than index\.json"):
        open_corpus(folder_there, "char")
    kept = {path.name for path in home.rglob("*.tokens")}
    assert kept == {"train-00000.tokens", "train-00001.tokens", "train-00002.tokens"}
    memory.pipe("/store/prepared/val-00000.tokens", good)
    assert len(open_corpus(folder_there, "char").tokens) == 11


def test_the_cache_of_downloaded_folders_is_bounded(tmp_path: Path, home: Path) -> None:
    memory = fsspec.filesystem("memory")
    for name in "abc":
        write_folder(tmp_path / name, [ord(name) % 10, 1, 2], [3, 4])
        memory.put(str(tmp_path / name), f"/store/{name}", recursive=True)
    size = sum(file.stat().st_size for file in (tmp_path / "a").iterdir()) / 1e9
    first = open_corpus("memory://store/a", "char", cache_gb=2.5 * size)
    os.utime(first.path, (1, 1))
    for name in "bc":
        open_corpus(f"memory://store/{name}", "char", cache_gb=2.5 * size)
    assert not first.path.exists() and len([*home.glob(".cache/mingpt/folders/*/")]) == 2
    assert first.tokens[np.arange(5)].tolist() == [7, 1, 2, 3, 4], "who has it open keeps it"
    with pytest.raises(ValueError, match=r"data\.cache_gb"):
        open_corpus("memory://store/a", "char", cache_gb=size / 3)
    assert len([*home.glob(".cache/mingpt/folders/*/")]) == 2, "what is refused makes no room"
    memory.rm("/store", recursive=True)


def test_two_gigabytes_of_tokens_take_no_memory_of_our_own(token_file: Path) -> None:
    raw, count = token_file.read_bytes(), 1_000_000_000
    header = raw[16:-6].replace(b'"count": 3', b'"count": 1000000000')
    token_file.write_bytes(raw[:8] + len(header).to_bytes(8, "little") + header)
    os.truncate(token_file, 16 + len(header) + 2 * count)
    stream = open_corpus(str(token_file), "char").tokens
    grid = Grid(count, 1024, 64, 16, seed=1)
    batches = Batches(stream, grid, CPU)

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
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.fixture
def private_temp(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go, for a user whose home cannot be written."""
    monkeypatch.setenv("HOME", os.devnull)
    temp = tmp_path_factory.mktemp("temp")
    monkeypatch.setattr("tempfile.tempdir", str(temp))
    return temp


@pytest.fixture
def preparations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were prepared, one entry each time."""
    done: list[str] = []
    prepare = corpus._prepare

    def counted(uri: str, *args: Any) -> None:
        done.append(uri)
        prepare(uri, *args)

    monkeypatch.setattr(corpus, "_prepare", counted)
    return done


def test_a_text_is_prepared_again_when_it_changes_only(tmp_path: Path, preparations: list[str]) -> None:
    text = tmp_path / "x.txt"
    assert text_of(text, b"one") == "one"
    open_corpus(str(text), "char")
    assert len(preparations) == 1
    assert text_of(text, b"other") == "other"
    assert len(preparations) == 2
    assert len(list((tmp_path / ".mingpt-cache").glob("*.tokens"))) == 1  # the first one's is not kept


def test_any_name_makes_a_file_name_and_none_takes_anothers_place(tmp_path: Path, preparations: list[str]) -> None:
    texts = [tmp_path / f"{char * 80}.txt" for char in "\u6f22\u5b57"]  # of 244 bytes each; 255 is the most
    for text in texts:
        assert text_of(text, text.name[0].encode()) == text.name[0]
    for text in texts:
        open_corpus(str(text), "char")
    assert len(preparations) == 2
    assert all(path.name.isascii() for path in (tmp_path / ".mingpt-cache").iterdir())


def test_a_prepared_text_takes_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text_of(tmp_path / "x.txt", b"text")
    monkeypatch.delattr(corpus, "only_process")  # a folder that someone else prepared may be read-only
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


def test_a_folder_that_cannot_be_written(tmp_path: Path, home: Path, preparations: list[str]) -> None:
    (tmp_path / ".mingpt-cache").write_text("a file where the folder should be: it stops root too", encoding="utf-8")
    assert text_of(tmp_path / "x.txt", b"text") == "text"
    open_corpus(str(tmp_path / "x.txt"), "char")
    assert len(preparations) == 1 and len(list(home.rglob("*.tokens"))) == 1


def test_a_private_folder_of_someone_else_is_not_trusted(private_temp: Path, tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe("/x.txt", b"text")
    (private_temp / f"mingpt-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="cannot be trusted"):
        open_corpus("memory://x.txt", "char")


def test_a_text_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, write = tmp_path / "x.txt", tokens.write_tokens
    monkeypatch.setattr(corpus, "write_tokens", lambda *args: (write(*args), text.write_text("more", encoding="utf-8")))
    with pytest.raises(OSError, match="changed while it was read"):
        text_of(text, b"text")
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
    write = tokens.write_tokens

    def killed(path: Path, chunks: Iterable[tokens.Tokens], tokenizer: CharTokenizer) -> None:
        def first_then_die() -> Iterator[tokens.Tokens]:
            yield next(iter(chunks))
            os.kill(os.getpid(), signal.SIGKILL)

        write(path, first_then_die(), tokenizer)

    if name == "killed":
        corpus.write_tokens = killed
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
    context.set_forkserver_preload(["mingpt.corpus"])
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
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".tmp"]
    assert run_processes(["rank"], prepared_folder, tmp_path / "log") == [0]
    assert [path.suffix for path in cache.iterdir() if path.name != ".lock"] == [".tokens"], "what it left is gone"
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
        with corpus.only_process(tmp_path, "x"):
            inside.set()
            assert waiting.wait(30)

    handler = Told()
    corpus.log.addHandler(handler)
    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait(30)
    with corpus.only_process(tmp_path, "x"):
        assert waiting.is_set()
    holder.join()
    corpus.log.removeHandler(handler)


def test_a_killed_prepare_is_run_again(tmp_path: Path) -> None:
    (tmp_path / "prepare.py").write_text(
        "from pathlib import Path\nimport os, sys, signal\nhere = Path(__file__).parent\n"
        "(here / 'input.txt').write_text('half')\n"
        "if not (here / 'again').exists(): os.kill(os.getppid(), signal.SIGKILL); sys.exit()\n"
        "(here / 'input.txt').write_text('whole text')\n"
    )
    start = [sys.executable, "-c", f"from mingpt.corpus import open_corpus; open_corpus({str(tmp_path)!r}, 'char')"]
    assert subprocess.run(start, check=False).returncode == -signal.SIGKILL
    (tmp_path / "again").touch()
    corpus = open_corpus(str(tmp_path), "char")
    assert corpus.tokenizer.decode(corpus.tokens) == "whole text"


def test_a_folder_whose_prepare_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "prepare.py").write_text("import sys; sys.exit('no index: give a file')", encoding="utf-8")
    with pytest.raises(ChildProcessError, match=r"made no input\.txt: no index: give a file"):
        open_corpus(str(tmp_path), "char")


def test_pieces_that_are_encoded_at_once_keep_their_order(tmp_path: Path) -> None:
    text = "".join(f"{i} " for i in range(2 * CUT // 5))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    file = open_corpus(str(tmp_path / "text.txt"), "char")
    assert file.tokenizer.decode(file.tokens) == text
