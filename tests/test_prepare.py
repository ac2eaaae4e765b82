"""Any corpus becomes the same prepared folder with any number of workers and after any kill; bad input is named."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zstandard
from conftest import ROOT, text

from mingpt import corpus, prepare, tokens
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


def documents(corpus: tokens.TokenFile) -> list[str]:
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
    assert documents(make(folder, "--val-fraction=0")) == expected
    index = json.loads((tmp_path / "out" / "index.json").read_bytes())
    assert index["facts"]["documents"] == 8 and index["facts"]["rejected"] == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["index.json", "train-00000.tokens"]


def test_frames_may_cut_characters_and_be_empty(tmp_path: Path, make: MAKE) -> None:
    frames = b"".join(map(zstandard.compress, (b"a\xe6", b"", b"\x97", b"\xa5\r", b"\n")))
    (tmp_path / "a.txt.zst").write_bytes(frames)
    assert documents(make(tmp_path / "a.txt.zst")) == ["a日\n"]


def test_damaged_parquet_is_left_out_on_request(tmp_path: Path, make: MAKE, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": [f"row {i}" for i in range(500)]}), tmp_path / "a.parquet")
    raw = bytearray((tmp_path / "a.parquet").read_bytes())
    raw[4:40] = b"\xff" * 36  # the first page
    (tmp_path / "a.parquet").write_bytes(raw)
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    (tmp_path / "c.txt").write_bytes(b"text")
    make(tmp_path / "a.parquet", expect=2)
    assert "a.parquet: damaged from row 0 on" in capsys.readouterr().err
    assert documents(make(*(tmp_path / name for name in ("a.parquet", "b.parquet", "c.txt")), "--on-error=skip")) == [
        "text"
    ]
    assert "2 rejected" in capsys.readouterr().out


@pytest.mark.parametrize("source", ["memory://in/a.txt", "memory://in", "memory://in/*.txt", "{here}/*.txt"])
def test_files_folders_and_patterns_here_and_at_a_uri(tmp_path: Path, make: MAKE, source: str) -> None:
    fsspec.filesystem("memory").pipe("/in/a.txt", b"a text")
    (tmp_path / "a.txt").write_bytes(b"a text")
    assert documents(make(source.format(here=tmp_path))) == ["a text"]


def test_rows_of_parquet(tmp_path: Path, make: MAKE, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [f"row {i}" for i in range(200)]
    parquet.write_table(pyarrow.table({"x": range(200), "body": rows}), tmp_path / "a.parquet", row_group_size=30)
    assert documents(make(tmp_path / "a.parquet", "--text-field=body", "--val-fraction=0")) == rows
    (tmp_path / "out" / "index.json").unlink()
    make(tmp_path / "a.parquet", expect=2)
    assert "a.parquet: it has no column 'text' but 'x', 'body'; name it with --text-field" in capsys.readouterr().err
    parquet.write_table(pyarrow.table({"text": ["one", None, "three"]}), tmp_path / "a.parquet")
    make(tmp_path / "a.parquet", expect=2)
    assert "a.parquet: row 1 has no text in 'text' but NoneType" in capsys.readouterr().err


def test_ids_as_nanogpt_writes_them(tmp_path: Path, make: MAKE, capsys: pytest.CaptureFixture[str]) -> None:
    gpt2 = BPETokenizer.gpt2()
    ids = np.concatenate([[*gpt2.encode(f"document {i}"), gpt2.end_of_text] for i in range(5)]).astype("<u2")
    ids.tofile(tmp_path / "train.bin")
    corpus = make(tmp_path / "train.bin", "--bin-dtype=uint16", tokenizer="gpt2")
    assert corpus.tokens[np.arange(len(ids))].tolist() == ids.tolist() and len(corpus.tokens) == len(ids)
    assert documents(corpus) == [f"document {i}" for i in range(5)]
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

ODD = "word wörter \u3000 日本。\n\n  x\u00a0 \u2003y\r\n" + "a" * 70 + "\r\n \t end"


@pytest.mark.parametrize("piece", [5, 16, 40, 1 << 25])
@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
def test_pieces_of_a_text_do_not_show(
    tmp_path: Path, make: MAKE, piece: int, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "PIECE", piece)
    content = ODD * 3
    (tmp_path / "a.txt").write_bytes(content.encode())
    corpus = make(tmp_path / "a.txt", tokenizer=tokenizer)
    expected = corpus.tokenizer.encode(content.replace("\r\n", "\n")).tolist()
    end = [] if tokenizer == "char" else [corpus.tokenizer.end_of_text]
    assert corpus.tokens[np.arange(len(corpus.tokens))].tolist() == expected + end


@pytest.mark.parametrize("piece", [5, 64, 1 << 25])
def test_pieces_of_lines_do_not_show(
    tmp_path: Path, make: MAKE, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(prepare, "PIECE", piece)
    texts = [f"document {i} é" * (i % 7) + "." for i in range(30)]
    (tmp_path / "a.jsonl").write_bytes(lines(*texts))
    assert documents(make(tmp_path / "a.jsonl")) == texts


def test_shards_and_both_ways_to_choose_validation(tmp_path: Path, make: MAKE) -> None:
    texts = [f"document {i}" for i in range(100)]
    (tmp_path / "a.jsonl").write_bytes(lines(*texts))
    by_position = make(tmp_path / "a.jsonl", "--shard-tokens=37", "--val-fraction=0.25")
    n_tokens = len(by_position.tokens)
    assert by_position.split(0.9) == n_tokens - n_tokens // 4, "the folder's split, not the config's"
    counts = [shard["count"] for shard in json.loads((tmp_path / "out/index.json").read_bytes())["train"]]
    assert counts[:-1] == [37] * (len(counts) - 1) and documents(by_position) == texts
    (tmp_path / "out" / "index.json").unlink()
    by_document = make(tmp_path / "a.jsonl", "--val-fraction=0.25", "--val-by=document")
    at = by_document.split(0)
    train = documents(tokens.TokenFile(by_document.tokens[:at], by_document.tokenizer, "", tmp_path))
    val = documents(tokens.TokenFile(by_document.tokens[at:], by_document.tokenizer, "", tmp_path))
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
        ("a.txt.gz", gzip.compress(b"packed text")[:-9], "a.txt.gz: damaged after byte", None),
        ("a.txt.gz", b"no gzip", "a.txt.gz: damaged after byte 0 ", None),
        ("a.txt.zst", zstandard.compress(b"packed text" * 9)[:-3], "a.txt.zst: damaged after byte", None),
        ("a.txt.zst", b"no zstd at all", "a.txt.zst: damaged after byte 0 ", None),
        ("a.bin.gz", gzip.compress(b"ab"), "a.bin.gz: a packed .bin is not read; unpack it first", None),
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
    if left and tokenizer == "bpe":
        assert documents(make(tmp_path / name, "--on-error=skip", tokenizer=tokenizer)) == left
        assert f"left out: {tmp_path}" in capsys.readouterr().err
        assert json.loads((tmp_path / "out/index.json").read_bytes())["facts"]["rejected"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vocab-size=300"], "--vocab-size is for --tokenizer=bpe"),
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


def test_the_same_command_again_and_another(tmp_path: Path, make: MAKE, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text(text(), encoding="utf-8")
    make(tmp_path / "a.txt")
    said = capsys.readouterr().out
    make(tmp_path / "a.txt")
    assert capsys.readouterr().out.split(";")[0] == said.split(";")[0]
    make(tmp_path / "a.txt", "--val-fraction=0.5", expect=2)
    assert "holds another corpus" in capsys.readouterr().err


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


RUN = """
import os, signal, sys
from mingpt import prepare
prepare.PIECE = 4000
each, kill = prepare._each, int(sys.argv.pop(1))
def killed(pool, verb, *args):
    for number, result in enumerate(each(pool, verb, *args), 1):
        if verb == "encoding" and number == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        yield result
prepare._each = killed
if __name__ == "__main__":
    sys.exit(prepare.main())
"""


def test_a_kill_and_other_workers_change_no_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text(60_000), encoding="utf-8")
    (tmp_path / "b.jsonl").write_bytes(lines(*text(20_000).split("\n")))

    def run(kill: int, out: str, workers: int) -> tuple[int, str]:
        command = [sys.executable, "-c", RUN, str(kill), "a.txt", "b.jsonl", "--tokenizer=bpe", f"--out={out}"]
        done = subprocess.run(
            [*command, f"--workers={workers}", "--shard-tokens=9000", "--val-by=document"], cwd=tmp_path, text=True,
            capture_output=True, check=False, env={"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        return done.returncode, done.stderr

    assert run(0, "undisturbed", 1)[0] == 0
    assert run(5, "killed", 2)[0] == -9
    assert not (tmp_path / "killed/index.json").exists()
    code, said = run(0, "killed", 2)
    assert code == 0 and "going on: " in said
    files = {path.name: path.read_bytes() for path in (tmp_path / "undisturbed").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "killed").iterdir()} and len(files) > 3


def test_a_text_is_prepared_without_torch() -> None:
    command = "import mingpt.prepare, sys; sys.exit(bool({'torch', 'tiktoken', 'fsspec'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", command], cwd=ROOT, check=False).returncode == 0


def test_a_long_work_tells_how_far_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 10.0])
    monkeypatch.setattr(prepare.time, "monotonic", lambda: next(clock))
    pieces = [prepare.Piece(i, 0, "a.txt", 0, None, False, size) for i, size in enumerate((10**7, 4 * 10**7))]
    assert sorted(prepare._each(Inline(), "encoding", pieces, lambda piece: piece.number)) == [0, 1]
    assert capsys.readouterr().err == "encoding: 50 of 50 MB, 5.0 MB/s, 0 s left\n"


def test_long_lines_come_whole() -> None:
    chunks = [b"a\r\nb", b"c" * 100, b"", b"\n\n", b"d"]
    assert [bytes(line) for line in prepare._lines(chunks)] == [b"a\r\n", b"b" + b"c" * 100 + b"\n", b"\n", b"d"]
