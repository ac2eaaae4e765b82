"""Any corpus becomes the same prepared folder with any number of workers and after any kill; bad input is named."""

import gzip
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zstandard
from conftest import ROOT, text
from hypothesis import given, settings
from hypothesis import strategies as st

from mingpt import corpus, documents, prepare, tokens
from mingpt.tokenizer import BPETokenizer

MAKE = Callable[..., tokens.TokenFile]


class Inline(Executor):
    """Does in this process what a pool of processes would, so that it is fast and sees what tests replace."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:  # noqa: BLE001  as a pool hands on whatever it is
            future.set_exception(error)
        return future


@pytest.fixture(autouse=True)
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "ProcessPoolExecutor", Inline)


@pytest.fixture
def make(tmp_path: Path) -> MAKE:
    """Prepares sources into tmp_path/out and opens what came of it."""

    def make(*sources: object, tokenizer: str = "bpe", expect: int = 0) -> tokens.TokenFile:
        vocabulary = [] if tokenizer != "bpe" or any("--vocab" in str(it) for it in sources) else ["--vocab-size=270"]
        code = prepare.main([*map(str, sources), f"--out={tmp_path / 'out'}", f"--tokenizer={tokenizer}", *vocabulary])
        assert code == expect
        return corpus.open_corpus(str(tmp_path / "out"), "char") if not expect else None  # type: ignore[return-value]

    return make


@pytest.fixture
def asked() -> prepare.Settings:
    return prepare.Settings("char", 4096, 0.1, "position", "text", None, 1000, "stop")


def documents_in(corpus: tokens.TokenFile) -> list[str]:
    """What stands between the ends of documents, in the whole stream."""
    ids = corpus.tokens[np.arange(len(corpus.tokens))]
    ends = np.flatnonzero(ids == corpus.tokenizer.end_of_text)
    assert ends[-1] == len(ids) - 1
    return [
        corpus.tokenizer.decode(part[part != corpus.tokenizer.end_of_text]) for part in np.split(ids, ends + 1)[:-1]
    ]


def lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"id": 1, "text": it}).encode() + b"\n" for it in texts)


# --- what a corpus may be ---------------------------------------------------------------------------------------------


def test_a_folder_of_every_kind_of_file(tmp_path: Path, make: MAKE) -> None:
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree <|endoftext|> four")
    (folder / "b.jsonl").write_bytes(lines("first é", "se\r\ncond 😀") + b"\n  \n" + lines("third", "").rstrip())
    (folder / "c.txt.gz").write_bytes(gzip.compress(b"packed ") + gzip.compress(b"twice"))
    frames = [zstandard.compress(part) for part in (lines("in ")[:9], lines("in ")[9:], lines("frames"))]
    (folder / "d.NDJSON.zst").write_bytes(b"".join(frames))
    (folder / "deep" / "e.md").write_text("below", encoding="utf-8")
    (folder / "empty.txt").touch()
    (folder / ".hidden").write_bytes(b"\xff")
    expected = ["one\ntwo\nthree <|endoftext|> four", "first é", "se\ncond 😀", "third", "packed twice"]
    expected += ["in ", "frames", "below"]
    assert documents_in(make(folder, "--val-fraction=0")) == expected
    index = json.loads((tmp_path / "out" / "index.json").read_bytes())
    assert index["facts"]["documents"] == 8 and index["facts"]["rejected"] == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".lock", "index.json", "train-00000.tokens"]


def test_frames_may_cut_characters_and_be_empty(tmp_path: Path, make: MAKE) -> None:
    frames = b"".join(map(zstandard.compress, (b"a\xe6", b"", b"\x97", b"\xa5\r", b"\n")))
    (tmp_path / "a.txt.zst").write_bytes(frames)
    assert documents_in(make(tmp_path / "a.txt.zst")) == ["a日\n"]


def test_damaged_parquet_is_left_out_on_request(tmp_path: Path, make: MAKE, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": [f"row {i}" for i in range(500)]}), tmp_path / "a.parquet")
    raw = bytearray((tmp_path / "a.parquet").read_bytes())
    raw[4:40] = b"\xff" * 36  # the first page
    (tmp_path / "a.parquet").write_bytes(raw)
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    (tmp_path / "c.txt").write_bytes(b"text")
    raw[-50:-8] = b"\xff" * 42  # the footer
    (tmp_path / "d.parquet").write_bytes(raw)
    for name in "abd":
        make(tmp_path / f"{name}.parquet", expect=2)
        said = capsys.readouterr().err.splitlines()
        assert f"{name}.parquet: not parquet, or damaged from row 0 on" in said[-1]
    names = ("a.parquet", "b.parquet", "c.txt", "d.parquet")
    assert documents_in(make(*(tmp_path / name for name in names), "--on-error=skip")) == ["text"]
    assert "3 lines, rows or places left out" in capsys.readouterr().out


def test_a_row_that_is_no_text_is_left_out_alone(
    tmp_path: Path, make: MAKE, capsys: pytest.CaptureFixture[str]
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    column = pyarrow.array([b"one", b"\xff", b"three"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    make(tmp_path / "a.parquet", expect=2)
    assert "a.parquet: row 1 cannot be read: 'utf-8' codec can't decode" in capsys.readouterr().err
    assert documents_in(make(tmp_path / "a.parquet", "--on-error=skip")) == ["one", "three"]


@pytest.mark.parametrize(
    ("uri", "kind"),
    [
        ("https://host/x.jsonl?download=true", ("lines", "")),
        ("https://host/x.TXT.zst?a=b.parquet", ("text", ".zst")),
        ("/folder/what?.jsonl", ("lines", "")),
    ],
)
def test_what_a_server_is_asked_is_no_part_of_the_name(uri: str, kind: tuple[str, str]) -> None:
    piece = documents.Piece(0, 0, uri, 0, None, True, 0)
    assert (piece.format, piece.packing) == kind


@pytest.mark.parametrize("source", ["memory://in/a.txt", "memory://in", "memory://in/*.txt", "{here}/*.txt"])
def test_files_folders_and_patterns_here_and_at_a_uri(tmp_path: Path, make: MAKE, source: str) -> None:
    fsspec.filesystem("memory").pipe("/in/a.txt", b"a text")
    (tmp_path / "a.txt").write_bytes(b"a text")
    assert documents_in(make(source.format(here=tmp_path))) == ["a text"]


def test_rows_of_parquet(tmp_path: Path, make: MAKE, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [f"row {i}" for i in range(200)]
    parquet.write_table(pyarrow.table({"x": range(200), "body": rows}), tmp_path / "a.parquet", row_group_size=30)
    assert documents_in(make(tmp_path / "a.parquet", "--text-field=body", "--val-fraction=0")) == rows
    (tmp_path / "out" / "index.json").unlink()
    make(tmp_path / "a.parquet", expect=2)
    assert "a.parquet: it has no column 'text' but 'x', 'body'; name it with --text-field" in capsys.readouterr().err
    parquet.write_table(pyarrow.table({"text": ["one", None, "three"]}), tmp_path / "a.parquet")
    make(tmp_path / "a.parquet", expect=2)
    assert "a.parquet: row 1 has no text in 'text' but NoneType" in capsys.readouterr().err


def test_ids_as_nanogpt_writes_them(
    tmp_path: Path, make: MAKE, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt2 = BPETokenizer.gpt2()
    ids = np.concatenate([[*gpt2.encode(f"document {i}"), gpt2.end_of_text] for i in range(5)]).astype("<u2")
    ids.tofile(tmp_path / "train.bin")
    corpus = make(tmp_path / "train.bin", "--bin-dtype=uint16", tokenizer="gpt2")
    assert corpus.tokens[np.arange(len(ids))].tolist() == ids.tolist() and len(corpus.tokens) == len(ids)
    assert documents_in(corpus) == [f"document {i}" for i in range(5)]
    # A read may give less than it was asked for.
    monkeypatch.setattr(documents, "_plain", lambda raw, size: iter(lambda: raw.read(3), b""))
    (tmp_path / "out" / "index.json").unlink()
    corpus = make(tmp_path / "train.bin", "--bin-dtype=uint16", tokenizer="gpt2")
    assert documents_in(corpus) == [f"document {i}" for i in range(5)]
    (tmp_path / "out" / "index.json").unlink()
    ids[3] = 60000
    (tmp_path / "train.bin").write_bytes(ids.tobytes() + b"\x01")
    for options, message in (
        ([], "name their type: --bin-dtype"),
        (["--bin-dtype=uint16"], "train.bin: id 60000 at byte 6 is none of the 50257"),
    ):
        make(tmp_path / "train.bin", *options, tokenizer="gpt2", expect=2)
        assert message in capsys.readouterr().err
    assert len(make(tmp_path / "train.bin", "--bin-dtype=uint16", "--on-error=skip", tokenizer="gpt2").tokens) == 14
    assert f"middle of an id, at byte {2 * len(ids)}" in capsys.readouterr().err
    make(tmp_path / "train.bin", "--bin-dtype=uint16", tokenizer="char", expect=2)


# --- pieces -----------------------------------------------------------------------------------------------------------

LONG = "a" * 70_000  # longer than what is read at once to find where a word ends
ODD = "word wörter \u3000 日本。\n\n  x\u00a0 \u2003y\r\n" + "a" * 70 + "\r\n \t end"


@pytest.mark.parametrize("piece", [5, 16, 40, 1 << 25])
@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
def test_pieces_of_a_text_do_not_show(
    tmp_path: Path, make: MAKE, piece: int, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE", piece)
    content = ODD * 3 + f"{LONG} {LONG}"
    (tmp_path / "a.txt").write_bytes(content.encode())
    corpus = make(tmp_path / "a.txt", tokenizer=tokenizer)
    expected = corpus.tokenizer.encode(content.replace("\r\n", "\n")).tolist()
    end = [] if tokenizer == "char" else [corpus.tokenizer.end_of_text]
    assert corpus.tokens[np.arange(len(corpus.tokens))].tolist() == expected + end


def test_no_piece_ends_after_a_space_beyond_ascii() -> None:
    for length in range((1 << 16) - 12, (1 << 16) + 4):  # so that it lies across what is read at once
        raw = b"a" * length + "\u3000 b c".encode()
        assert documents._cut_after(io.BytesIO(raw), 4, documents._WORD_END, len(raw)) == raw.index(b" c")


@pytest.mark.parametrize("piece", [5, 64, 1 << 25])
def test_pieces_of_lines_do_not_show(
    tmp_path: Path, make: MAKE, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(documents, "PIECE", piece)
    texts = [f"document {i} é" * (i % 7) + "." for i in range(30)]
    (tmp_path / "a.jsonl").write_bytes(lines(*texts))
    assert documents_in(make(tmp_path / "a.jsonl")) == texts


def test_small_files_share_a_part(tmp_path: Path, make: MAKE, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE", 100)
    texts = [f"document {i}" for i in range(90)]
    for i, content in enumerate(texts):
        (tmp_path / f"{i:02d}.jsonl").write_bytes(lines(content))
    batches = list(prepare.in_batches(documents.plan_pieces([str(tmp_path / f"{i:02d}.jsonl") for i in range(90)])))
    assert [len(batch) for batch in batches] == [3] * 30, "of some 32 bytes each"
    corpus = make(tmp_path / "*.jsonl", "--val-by=document", "--val-fraction=0.3")
    assert sorted(documents_in(corpus)) == sorted(texts) and documents_in(corpus) != texts
    assert 0 < corpus.split(0) < len(corpus.tokens)


def test_shards_and_both_ways_to_choose_validation(tmp_path: Path, make: MAKE) -> None:
    texts = [f"document {i}" for i in range(100)]
    (tmp_path / "a.jsonl").write_bytes(lines(*texts))
    by_position = make(tmp_path / "a.jsonl", "--shard-tokens=37", "--val-fraction=0.25")
    n_tokens = len(by_position.tokens)
    assert by_position.split(0.9) == n_tokens - n_tokens // 4, "the folder's split, not the config's"
    counts = [shard["count"] for shard in json.loads((tmp_path / "out/index.json").read_bytes())["train"]]
    assert counts[:-1] == [37] * (len(counts) - 1) and documents_in(by_position) == texts
    (tmp_path / "out" / "index.json").unlink()
    by_document = make(tmp_path / "a.jsonl", "--val-fraction=0.25", "--val-by=document")
    at = by_document.split(0)
    train = documents_in(tokens.TokenFile(by_document.tokens[:at], by_document.tokenizer, "", tmp_path))
    val = documents_in(tokens.TokenFile(by_document.tokens[at:], by_document.tokenizer, "", tmp_path))
    assert sorted(train + val) == sorted(texts) and 10 < len(val) < 45
    assert train == sorted(train, key=texts.index) and val == sorted(val, key=texts.index)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message", "left"),
    [
        ("a.txt", b"ab\xffcd", "a.txt: not UTF-8 at byte 2 (invalid start byte)", ["abcd"]),
        ("a.txt", b"ab\xe6\x97", "a.txt: not UTF-8 at byte 2 (unexpected end of data)", ["ab"]),
        ("a.jsonl", lines("x") + b"{oops\n" + lines("y"), "the line at byte 23 is not JSON", ["x", "y"]),
        ("a.jsonl", lines("x") + b'"text"\n', "the line at byte 23 has no field 'text', it is no object", ["x"]),
        ("a.jsonl", lines("x") + b'{"body": 1}\n', "has no field 'text', but 'body'; name it with --text-f", ["x"]),
        ("a.jsonl", lines("x") + b'{"text": 1}\n', "the line at byte 23 has no text in 'text' but int", ["x"]),
        ("a.jsonl", lines("x") + b'{"text": "\\ud800"}\n', "byte 23 has half of a surrogate pair", ["x"]),
        ("a.jsonl", lines("x") + b'{"text": "\xff"}\n', "the line at byte 23 is not JSON", ["x"]),
        ("a.jsonl", lines("x") + b"[" * 100_000 + b"\n", "the line at byte 23 is not JSON", ["x"]),
        ("a.txt.gz", gzip.compress(b"packed text", mtime=0)[:-9], "a.txt.gz: damaged after byte", ["packed text"]),
        ("a.txt.gz", b"no gzip", "a.txt.gz: damaged after byte 0 ", None),
        (
            "a.txt.zst",
            zstandard.compress(b"one") + zstandard.compress(b"two" * 9)[:-3],
            "damaged after byte 3",
            ["one"],
        ),
        ("a.txt.zst", b"no zstd at all", "a.txt.zst: damaged after byte 0 ", None),
        ("a.bin.gz", gzip.compress(b"ab", mtime=0), "a.bin.gz: a packed .bin is not read; unpack it first", None),
        ("a.parquet", b"no parquet", "a.parquet: not parquet, or damaged", None),
    ],
)
@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
def test_bad_input_is_named_and_left_out_on_request(
    tmp_path: Path, make: MAKE, capsys: pytest.CaptureFixture[str],
    name: str, content: bytes, message: str, left: list[str] | None, tokenizer: str,
) -> None:  # fmt: skip
    (tmp_path / name).write_bytes(content)
    make(tmp_path / name, tokenizer=tokenizer, expect=2)
    said = capsys.readouterr().err
    assert message in said.splitlines()[-1] and not (tmp_path / "out" / "index.json").exists()
    if left:
        corpus = make(tmp_path / name, "--on-error=skip", "--val-fraction=0", tokenizer=tokenizer)
        whole = corpus.tokenizer.decode(corpus.tokens[np.arange(len(corpus.tokens))])
        assert whole == ("" if tokenizer == "char" else "<|endoftext|>").join([*left, ""])
        assert f"left out: {tmp_path}" in capsys.readouterr().err
        assert json.loads((tmp_path / "out/index.json").read_bytes())["facts"]["rejected"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vocab-size=300"], "--vocab-size is for --tokenizer=bpe"),
        (["--tokenizer=bpe", "--vocab-size=0"], "--vocab-size=0: expected at least 257"),
        (["--out=s3://bucket/folder"], "--out: s3://bucket/folder is remote; write into a local folder"),
        (["--val-fraction=1"], "--val-fraction=1.0: expected at least 0 and below 1"),
        (["--workers=0"], "--workers=0: expected at least 1"),
        (["--shard-tokens=0"], "--shard-tokens=0: expected at least 1"),
    ],
)
def test_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        prepare.main(["x.txt", f"--out={tmp_path}", "--tokenizer=char", *options])
    assert message in capsys.readouterr().err


def test_what_is_not_there_or_empty(tmp_path: Path, make: MAKE, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "nothing", expect=2)
    assert f"{tmp_path}/nothing: no such file" in capsys.readouterr().err
    (tmp_path / "empty.txt").touch()
    make(tmp_path / "empty.txt", tokenizer="char", expect=2)
    assert "no text" in capsys.readouterr().err


# --- again, and after a kill ------------------------------------------------------------------------------------------


def test_the_same_command_again_and_another(
    tmp_path: Path, make: MAKE, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(text(), encoding="utf-8")
    make(tmp_path / "a.txt")
    said = capsys.readouterr().out
    monkeypatch.delattr(prepare, "_make")
    make(tmp_path / "a.txt")
    assert capsys.readouterr().out.split(";")[0] == said.split(";")[0]
    make(tmp_path / "a.txt", "--val-fraction=0.5", expect=2)
    assert "holds another corpus" in capsys.readouterr().err


def test_another_corpus_in_the_place_of_one(tmp_path: Path, make: MAKE) -> None:
    for content in ("abc", "xyz"):
        (tmp_path / "a.txt").write_text(content, encoding="utf-8")
        corpus = make(tmp_path / "a.txt", "--val-fraction=0", tokenizer="char")
        assert corpus.tokenizer.decode(corpus.tokens[np.arange(3)]) == content
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("source", [".", "**", "*"])
def test_a_result_among_the_sources_is_none(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(text(), encoding="utf-8")
    for _ in range(2):
        assert prepare.main([source, "--out=.", "--tokenizer=char"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "a.txt", ".lock", "index.json", "train-00000.tokens", "val-00000.tokens"
    }  # fmt: skip


def test_a_text_that_changes_while_it_is_read(
    tmp_path: Path, make: MAKE, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def appended(*args: Any) -> Any:
        with open(tmp_path / "a.txt", "a", encoding="utf-8") as file:
            file.write("more")
        return encode(*args)

    encode = prepare.encode
    (tmp_path / "a.txt").write_text(text(), encoding="utf-8")
    monkeypatch.setattr(prepare, "encode", appended)
    make(tmp_path / "a.txt", expect=1)
    assert "a.txt changed while it was read" in capsys.readouterr().err


# --- processes --------------------------------------------------------------------------------------------------------

RUN = """
import os, signal, sys, threading
from mingpt import documents, prepare, storage
documents.PIECE = 4000
trouble = sys.argv[1]
each, write_all, encode = prepare._each, storage.write_all, prepare.encode

def killed_while_encoding(pool, verb, *args):
    for number, result in enumerate(each(pool, verb, *args), 1):
        if verb == "encoding" and number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        yield result

def killed_while_writing(file, data):
    write_all(file, data)
    if "train-00001.tokens" in file.name:
        os.kill(os.getpid(), signal.SIGKILL)

def hanging(piece, settings, work):
    print("at work", flush=True)
    threading.Event().wait()

def killed(piece, settings, work):
    os.kill(os.getpid(), signal.SIGKILL)

if trouble == "encoding":
    prepare._each = killed_while_encoding
elif trouble == "writing":
    storage.write_all = killed_while_writing
elif trouble in ("hanging", "killed"):
    prepare.encode = globals()[trouble]
if __name__ == "__main__":
    sys.exit(prepare.main(sys.argv[2:]))
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts the command in processes of its own, with a trouble, on a.txt and b.jsonl."""
    (tmp_path / "a.txt").write_text(text(6000) * 10, encoding="utf-8")
    (tmp_path / "b.jsonl").write_bytes(lines(*text(2000).split("\n") * 10))
    (tmp_path / "run.py").write_text(RUN, encoding="utf-8")
    started = []

    def start(trouble: str = "none", out: str = "out", workers: int = 2) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "run.py", trouble, "a.txt", "b.jsonl", "--tokenizer=bpe", "--vocab-size=300",
             f"--out={out}", f"--workers={workers}", "--shard-tokens=9000", "--val-by=document"],
            cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


@pytest.mark.parametrize("trouble", ["encoding", "writing"])
def test_a_kill_and_other_workers_change_no_byte(
    tmp_path: Path, command: Callable[..., "subprocess.Popen[str]"], trouble: str
) -> None:
    undisturbed = command(out="undisturbed", workers=1)
    assert undisturbed.wait(60) == 0
    killed = command(trouble)
    assert killed.wait(60) == -9 and not (tmp_path / "out/index.json").exists()
    again = command()
    assert "going on: " in again.communicate(timeout=60)[1] and again.returncode == 0
    files, expected = (
        {path.name: path.read_bytes() for path in (tmp_path / out).iterdir() if path.name != ".lock"}
        for out in ("out", "undisturbed")
    )
    assert files == expected and len(files) > 3


def test_two_at_once_wait_for_each_other(tmp_path: Path, command: Callable[..., "subprocess.Popen[str]"]) -> None:
    (tmp_path / "out").mkdir()
    with corpus.only_process(tmp_path / "out", "out"):
        both = [command(), command()]
        for process in both:
            assert process.stderr and "waiting for another process" in process.stderr.readline()
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0].split(";")[0] == said[1].split(";")[0]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_workers_end_with_the_command(
    command: Callable[..., "subprocess.Popen[str]"], number: signal.Signals, code: int
) -> None:
    process = command("hanging")
    assert process.stdout and process.stdout.readline() == "at work\n"
    process.send_signal(number)
    process.communicate(timeout=60)  # comes back when nobody has the pipes any more
    assert process.returncode == code


def test_a_worker_that_is_killed_is_told(command: Callable[..., "subprocess.Popen[str]"]) -> None:
    process = command("killed")
    assert "a worker was killed, maybe for want of memory; the same" in process.communicate(timeout=60)[1]
    assert process.returncode == 1


def test_a_text_is_prepared_without_torch() -> None:
    command = "import mingpt.prepare, sys; sys.exit(bool({'torch', 'tiktoken', 'fsspec'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", command], cwd=ROOT, check=False).returncode == 0


def test_a_long_piece_tells_how_far_it_is(
    tmp_path: Path, asked: prepare.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(4 << 20))
    monkeypatch.setattr(prepare, "_TELL", 0.01)
    monkeypatch.setattr(documents, "_CHUNK", 1 << 20)
    told = threading.Event()

    def tell(line: str) -> None:
        if re.fullmatch(r"encoding: 3 of 4 MB, [\d.]+ MB/s, \d+ s left", line):
            told.set()

    monkeypatch.setattr(prepare, "tell", tell)

    def read(batch: prepare.Batch, *args: Any) -> str:
        reader = prepare._reader(batch[0], asked, tmp_path)
        for number, _ in enumerate(reader._bytes(), 1):
            if number == 4:
                assert told.wait(60)
        return "done"

    piece = documents.Piece(1, 0, str(tmp_path / "a.txt"), 0, None, False, 4 << 20)
    np.memmap(tmp_path / "progress", np.int64, "w+", shape=2).flush()
    with ThreadPoolExecutor(1) as pool:
        assert list(prepare._each(pool, "encoding", [(piece,)], read, asked, tmp_path)) == ["done"]


def test_learning_keeps_documents_apart(tmp_path: Path, make: MAKE) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(*"a" * 50))
    assert make(tmp_path / "a.jsonl").tokenizer.vocab_size == 257, "no pair of characters is in any document"


def test_a_folder_of_the_user_is_meant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prepare.parse(["x", "--out=~/out", "--tokenizer=char"]).out == tmp_path / "out"


# --- long lines and bombs ---------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(st.text() | st.text(alphabet='\\"/\r\n\u00e9\u65e5\U0001f600 u', max_size=300), st.booleans())
def test_a_long_string_of_json_comes_in_parts(value: str, ascii_only: bool) -> None:
    raw = json.dumps({"x": value, "text": value, "y": [1, {"z": value}]}, ensure_ascii=ascii_only)
    line = bytearray(raw.encode("utf-8", "surrogatepass"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_LONG", 12)
        patch.setattr(
            documents, "_CHARACTERS", re.compile(documents._CHARACTERS.pattern.replace(b"65536", b"2"), re.DOTALL)
        )
        short, strings = documents._without_long_strings(line)
        document = json.loads(short)
        assert document.keys() == {"x", "text", "y"} and document["y"][0] == 1
        where = strings.get(document["text"])
        assert ("".join(documents._unescape(line, *where)) if where else document["text"]) == value


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "long line\\x"}', "the line at byte 0 cannot be read: Invalid \\escape"),
        ('{"text": "long line\x01"}', "the line at byte 0 cannot be read: Invalid control character"),
        ('{"text": "long line\\ud800"}', "the line at byte 0 has half of a surrogate pair"),
        ('{"text": "long line', "the line at byte 0 is not JSON: "),
        ('{"x": "long line", "y": [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6]}', "bytes beside its long strings"),
    ],
)
def test_a_bad_long_line(
    tmp_path: Path, make: MAKE, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    line: str, message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(documents, "_LONG", 8)
    monkeypatch.setattr(documents, "_BESIDE", 80)
    (tmp_path / "a.jsonl").write_text(
        f'{line}\n{{"text": "short"}}\n{{"text": "a\\r\\nlong\\rline"}}', encoding="utf-8"
    )
    make(tmp_path / "a.jsonl", expect=2)
    assert message in capsys.readouterr().err
    assert documents_in(make(tmp_path / "a.jsonl", "--on-error=skip")) == ["short", "a\nlong\nline"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("unit", ["hello world ", "\U0001f600 hello\n"])
def test_a_long_line_takes_no_multiple_of_memory(tmp_path: Path, unit: str) -> None:
    size = 50_000_000
    raw = json.dumps({"text": unit * (size // len(unit))}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_text(raw, encoding="utf-8")
    np.memmap(tmp_path / "progress", np.int64, "w+", shape=1).flush()
    command = r"""
import re, sys
from pathlib import Path
from mingpt.documents import Piece
from mingpt.prepare import Settings, symbols_of
def peak():
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
settings = Settings("char", 4096, 0.1, "position", "text", None, 1000, "stop")
before = peak()
symbols_of((Piece(0, 0, "a.jsonl", 0, None, True, 0),), settings, Path())
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert int(done.stdout) < len(raw.encode()) * 1.3 + 40e6


def test_a_little_zstd_does_not_unpack_to_much_at_once() -> None:
    bomb = zstandard.compress(bytes(200 << 20))
    chunks = [len(chunk) for chunk in documents._unzstd(io.BytesIO(bomb))]
    assert len(bomb) < 30_000 and sum(chunks) == 200 << 20 and max(chunks) <= 1 << 25


def test_long_lines_come_whole() -> None:
    chunks = [b"a\r\nb", b"c" * 100, b"", b"\n\n", b"d"]
    assert [bytes(line) for line in documents._lines(chunks)] == [b"a\r\n", b"b" + b"c" * 100 + b"\n", b"\n", b"d"]
