"""Makes a prepared folder of any corpus: `python -m mingpt.prepare SOURCE... --out DIR --tokenizer char|gpt2|bpe`.

A source is a file, a folder, a pattern or a URI. What a file is, its name tells: `.jsonl` or `.ndjson` a document a
line, `.parquet` a document a row, `.bin` token ids without a header as nanoGPT writes them, all else a text, one
document; each but parquet and ids may end in `.gz` or `.zst` too. Documents end with the tokenizer's end-of-text id
where it has one; `<|endoftext|>` inside a document is plain text. Line ends become LF, a byte-order mark is left out.

The work falls into pieces that depend on the sources alone, so the result has the same bytes with any number of
workers and after any kill: the same command goes on with the pieces that are missing. They lie in DIR/.work until
DIR/index.json, written last, makes the folder whole; for a moment they and the result need twice its space.
Exit codes: 0 done; 1 something cannot be read or written; 2 a wrong setting or input; 130 Ctrl-C.
"""

import argparse
import functools
import gzip
import hashlib
import io
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from mingpt import corpus, storage, tokens
from mingpt.corpus import Reject, cut, decode
from mingpt.grid import mix, split_point
from mingpt.tokenizer import CharTokenizer, Tokenizer, symbols, tokenizer_from_dict
from mingpt.tokens import Ids, Index, Shard

T = TypeVar("T")

PIECE = 1 << 25  # bytes of a plain file in a piece: a kill costs each worker at most one, some seconds
_CHUNK = 1 << 22  # bytes read at once
_PACKED = 1 << 14  # bytes of zstd read at once: they may unpack to thousands of times as many
_TELL = 5.0  # seconds between two lines of progress
_NAMED = 10  # rejected inputs told one by one
_WORD_END = re.compile(rb"[^\s](?=[ \t\r\n])")
_LINE_END = re.compile(rb"\n")


@dataclass(frozen=True)
class Settings:
    """What decides about the result, beside the sources."""

    tokenizer: str
    vocab_size: int
    val_fraction: float
    val_by: str
    text_field: str
    bin_dtype: str | None
    shard_tokens: int
    on_error: str


@dataclass(frozen=True)
class Piece:
    """A part of a source file that one worker reads: bytes, of parquet row groups, from `start` to `stop`."""

    number: int
    file: int  # the place of the file among all
    uri: str
    start: int
    stop: int | None  # None: as far as it goes
    last: bool  # of the file
    size: int  # bytes to read, for the progress

    @property
    def format(self) -> str:
        suffix = Path(self.uri.lower().removesuffix(self.packing)).suffix
        return {".jsonl": "lines", ".ndjson": "lines", ".parquet": "rows", ".bin": "ids"}.get(suffix, "text")

    @property
    def packing(self) -> str:
        suffix = Path(self.uri.lower()).suffix
        return suffix if suffix in (".gz", ".zst") else ""


@dataclass
class Done:
    """What came of a piece: tokens of each split, documents, and what was left out."""

    train: int = 0
    val: int = 0
    documents: int = 0
    rejected: int = 0
    problems: list[str] = field(default_factory=list)  # the first ones

    def add(self, other: "Done") -> None:
        for name in ("train", "val", "documents", "rejected"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.problems = (self.problems + other.problems)[:_NAMED]


# --- the whole --------------------------------------------------------------------------------------------------------


def prepare(sources: Sequence[str], out: Path, settings: Settings, workers: int) -> Index:
    """Prepares the sources into `out`, or goes on with it; the index of what is there then.

    Raises ValueError for a wrong setting or input, OSError where something cannot be read or written.
    """
    files = list(dict.fromkeys(file for source in sources for file in storage.find_files(source)))
    plan = json.dumps([asdict(settings), PIECE, [[file, storage.identity(file)] for file in files]])
    work = out / ".work"
    work.mkdir(parents=True, exist_ok=True)
    with corpus.only_process(work, str(out)):
        if not (out / tokens.INDEX).exists():
            if not (work / "plan.json").exists() or (work / "plan.json").read_text(encoding="utf-8") != plan:
                for leftover in set(work.iterdir()) - {work / "lock"}:
                    leftover.unlink()
                storage.replace_file(work / "plan.json", [plan.encode()])
            _make(files, plan, out, settings, workers)
        index = tokens.read_index((out / tokens.INDEX).read_bytes(), str(out / tokens.INDEX))
        shutil.rmtree(work)
    if index.facts["plan"] != tokens.sha256(plan):
        raise ValueError(f"--out={out} holds another corpus, or this one as it was before; delete it, or give another")
    return index


def _make(files: Sequence[str], plan: str, out: Path, settings: Settings, workers: int) -> None:
    work = out / ".work"
    pieces = list(plan_pieces(files))
    with ExitStack() as stack:
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_end_with_parent)
        stack.callback(pool.shutdown, cancel_futures=True)
        if not (work / "tokenizer.json").exists():
            tokenizer = _learn(pool, pieces, settings)
            storage.replace_file(work / "tokenizer.json", [json.dumps(tokenizer.to_dict()).encode()])
        missing = [piece for piece in pieces if not _record(work, piece).exists()]
        if len(missing) < len(pieces):
            tell(f"going on: {len(pieces) - len(missing)} of {len(pieces)} pieces are there")
        for _ in _each(pool, "encoding", missing, encode, settings, work):
            pass  # what it did is in its record
    for file, identity in json.loads(plan)[-1]:
        if storage.identity(file) != identity:
            raise OSError(f"{file} changed while it was read; start again when it is complete")
    total = Done()
    for piece in pieces:
        total.add(Done(**json.loads(_record(work, piece).read_bytes())))
    for problem in total.problems:
        tell(f"left out: {problem}")
    facts = {"plan": tokens.sha256(plan), "bytes": sum(piece.size for piece in pieces)}
    _join(pieces, out, settings, total, facts)


def _learn(pool: ProcessPoolExecutor, pieces: Sequence[Piece], settings: Settings) -> Tokenizer:
    """The tokenizer: of all characters, or of the same share of every piece."""
    if settings.tokenizer != "gpt2" and any(piece.format == "ids" for piece in pieces):
        raise ValueError(f"--tokenizer={settings.tokenizer} cannot be learned from ids in a .bin; give gpt2")
    share = (corpus.LEARNED << 20) // len(pieces)

    def texts() -> Iterator[str]:
        for piece in pieces:
            left = share
            for text in cut(text for text, _ in read(piece, settings, _stop_or_skip(piece, settings))):
                yield text[:left]
                left -= len(text)
                if left <= 0:
                    break

    if settings.tokenizer == "char":
        found = symbols(_each(pool, "reading", pieces, symbols_of, settings))
        if not found:
            raise ValueError("the sources have no text")
        return CharTokenizer(found)
    return corpus.make_tokenizer(settings.tokenizer, settings.vocab_size, texts())


def _join(pieces: Sequence[Piece], out: Path, settings: Settings, total: Done, facts: dict[str, Any]) -> None:
    """Writes the shards, and then the index."""
    tokenizer = _tokenizer(out / ".work" / "tokenizer.json")
    tell(f"writing {total.train + total.val:,} tokens")
    work = out / ".work"
    if settings.val_by == "position":
        n_train = split_point(total.train, settings.val_fraction)
        counts = {"train": n_train, "val": total.train - n_train}
        stream = _Stream((_part(work, piece, "train") for piece in pieces), tokenizer.dtype)
        streams = dict.fromkeys(counts, stream)  # validation is what training leaves
    else:
        counts = {"train": total.train, "val": total.val}
        streams = {split: _Stream([_part(work, piece, split) for piece in pieces], tokenizer.dtype) for split in counts}
    train, val = (_write(out, it, streams[it], counts[it], settings.shard_tokens, tokenizer) for it in counts)
    if not train:
        raise ValueError("the sources have no text for training; give more, or a smaller --val-fraction")
    facts |= {"documents": total.documents, "rejected": total.rejected, "tokenizer": tokenizer.kind}
    index = Index(train, val, facts | {"vocab_size": tokenizer.vocab_size})
    storage.replace_file(out / tokens.INDEX, [index.to_json()])
    for old in {*out.glob("*.tokens")} - {out / shard.name for shard in train + val}:
        old.unlink()


def _write(out: Path, split: str, stream: "_Stream", count: int, most: int, tokenizer: Tokenizer) -> tuple[Shard, ...]:
    """Writes the next `count` ids of the stream as token files of at most `most`."""
    shards: list[Shard] = []
    for first in range(0, count, most):
        path, n = out / f"{split}-{len(shards):05d}.tokens", min(most, count - first)
        tokens.write_tokens(path, stream.take(n), tokenizer)
        with open(path, "rb") as file:
            shards.append(Shard(path.name, n, path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()))
    return tuple(shards)


class _Stream:
    """The ids in files, one after the other."""

    def __init__(self, paths: Iterable[Path], dtype: np.dtype[np.unsignedinteger]) -> None:
        self._chunks = (np.frombuffer(raw, dtype) for path in paths for raw in _raw(path))
        self._rest: Ids = np.empty(0, dtype)

    def take(self, count: int) -> Iterator[Ids]:
        """The next `count` ids, which are there, in pieces."""
        while count:
            if not len(self._rest):
                self._rest = next(self._chunks)
            ids, self._rest = self._rest[:count], self._rest[count:]
            count -= len(ids)
            yield ids


def _raw(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while raw := file.read(_CHUNK):
            yield raw


# --- pieces -----------------------------------------------------------------------------------------------------------


def plan_pieces(files: Sequence[str]) -> Iterator[Piece]:
    """Plain local files and parquet files in pieces of about `PIECE` bytes, others whole. Reads only near the cuts."""
    numbers = iter(range(sys.maxsize))
    for place, uri in enumerate(files):
        size = storage.size(uri)
        whole = Piece(0, place, uri, 0, None, True, size)
        cuts = [0]
        if whole.packing and whole.format in ("rows", "ids"):
            raise ValueError(f"{uri}: a packed {Path(uri).suffixes[-2]} is not read; unpack it first")
        if whole.format == "rows":
            with suppress(ValueError):  # it is told where it is read
                cuts = _row_group_cuts(uri)
        elif not whole.packing and not storage.is_remote(uri) and whole.format in ("lines", "text"):
            pattern = _LINE_END if whole.format == "lines" else _WORD_END
            with open(storage.local_path(uri), "rb") as file:
                for at in range(PIECE, size, PIECE):
                    if at > cuts[-1]:
                        cuts.append(_cut_after(file, at, pattern, size))
            cuts = [*(at for at in cuts if at < size), size] if size else [0]
        stops: list[int | None] = [*cuts[1:]] or [None]
        for start, stop in zip(cuts, stops, strict=False):
            part = (stop - start) * size // cuts[-1] if stop else size
            yield Piece(next(numbers), place, uri, start, stop, stop in (None, cuts[-1]), part)


def _cut_after(file: BinaryIO, at: int, pattern: re.Pattern[bytes], size: int) -> int:
    """The first place from byte `at` on where a match ends and no white space beyond ASCII; `size` if there is none."""
    start = at - 4  # a character has at most four bytes
    file.seek(start)
    buffer = b""
    while chunk := file.read(1 << 16):
        buffer += chunk
        for match in pattern.finditer(buffer, 3):
            before = buffer[: match.end()][-4:].decode("utf-8", "ignore")
            if pattern is _LINE_END or not before[-1:].isspace():
                return start + match.end()
        start, buffer = start + len(buffer) - 4, buffer[-4:]
    return size


def _row_group_cuts(uri: str) -> list[int]:
    """Row groups where a piece starts, and their number."""
    with storage.open_read(uri) as raw:
        metadata = _parquet(raw).metadata
        cuts, filled = [0], 0
        for group in range(metadata.num_row_groups):
            if filled >= PIECE:
                cuts, filled = [*cuts, group], 0
            filled += metadata.row_group(group).total_byte_size
        return [*cuts, metadata.num_row_groups]


# --- in a worker ------------------------------------------------------------------------------------------------------


def encode(piece: Piece, settings: Settings, work: Path) -> Done:
    """Writes the piece's ids into `work`, and its record last."""
    done = Done()

    def reject(problem: str, count: int = 0) -> None:
        _stop_or_skip(piece, settings)(problem, count)
        done.rejected += 1
        done.problems = [*done.problems, f"{piece.uri}: {problem}"][:_NAMED]

    tokenizer = _tokenizer(work / "tokenizer.json")
    end = corpus.end_of_document(tokenizer)
    if piece.format == "ids":
        documents = _read_ids(piece, settings, tokenizer, reject)
    else:
        documents = ((tokenizer.encode(text), ends) for text, ends in read(piece, settings, reject))
    with ExitStack() as stack:
        outputs = {name: stack.enter_context(open(_part(work, piece, name), "wb")) for name in ("train", "val")}
        for ids, ends in documents:
            # A text is one document in all its pieces, else each has its own place.
            place = (piece.file, 0, 0) if piece.format == "text" else (piece.file, piece.start, done.documents)
            by_document = settings.val_by == "document" and mix(*place) < settings.val_fraction * 2**64
            split = "val" if by_document else "train"
            outputs[split].write(ids.data)
            count = len(ids)
            if ends:
                outputs[split].write(end.data)
                count += len(end)
                done.documents += 1
            setattr(done, split, getattr(done, split) + count)
        for output in outputs.values():
            output.flush()
            os.fsync(output.fileno())
    storage.replace_file(_record(work, piece), [json.dumps(asdict(done)).encode()])
    return done


def symbols_of(piece: Piece, settings: Settings) -> str:
    """The characters of the piece."""
    return symbols(text for text, _ in read(piece, settings, _stop_or_skip(piece, settings)))


def read(piece: Piece, settings: Settings, reject: Reject) -> Iterator[tuple[str, bool]]:
    """(a text of at most a million characters, whether its document ends with it)."""
    if piece.format == "text":
        empty = piece.start == 0
        for text in cut(decode(_bytes(piece, reject), reject, piece.start)):
            empty = False
            yield text, False
        if piece.last and not empty:
            yield "", True
        return
    documents = _read_rows(piece, settings, reject) if piece.format == "rows" else _read_lines(piece, settings, reject)
    for where, document in documents:
        if not isinstance(document, str):
            reject(f"{where} has no text in {settings.text_field!r} but {type(document).__name__}", 0)
        elif not document.isascii() and re.search("[\ud800-\udfff]", document):
            reject(f"{where} has half of a surrogate pair, which is no character", 0)
        elif document:
            for text in cut([document.replace("\r\n", "\n").replace("\r", "\n")]):
                yield text, False
            yield "", True


def _read_lines(piece: Piece, settings: Settings, reject: Reject) -> Iterator[tuple[str, Any]]:
    position = piece.start
    for line in _lines(_bytes(piece, reject)):
        where, size = f"the line at byte {position}", len(line)
        position += size
        if line.isspace():
            continue
        try:
            text = line.decode()
            line.clear()  # it may be long
            document = json.loads(text.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            reject(f"{where} is not JSON: {error}", size)
            continue
        text = ""
        if isinstance(document, dict) and settings.text_field in document:
            yield where, document[settings.text_field]
        else:
            has = f"but {', '.join(map(repr, document))}" if isinstance(document, dict) else "it is no object"
            reject(f"{where} has no field {settings.text_field!r}, {has}; name it with --text-field", size)


def _lines(chunks: Iterable[bytes]) -> Iterator[bytearray]:
    line = bytearray()
    for chunk in chunks:
        for part in io.BytesIO(chunk):
            line += part
            if line.endswith(b"\n"):
                yield line
                line = bytearray()
    if line:
        yield line


def _read_rows(piece: Piece, settings: Settings, reject: Reject) -> Iterator[tuple[str, Any]]:
    with storage.open_read(piece.uri) as raw:
        try:
            file = _parquet(raw)
        except ValueError as error:
            reject(f"not parquet, or damaged ({error})", piece.size)
            return
        if settings.text_field not in file.schema_arrow.names:
            has = ", ".join(map(repr, file.schema_arrow.names))
            reject(f"it has no column {settings.text_field!r} but {has}; name it with --text-field", 0)
            return
        groups = list(range(piece.start, piece.stop or 0))
        row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
        batches = iter(file.iter_batches(64, groups, [settings.text_field]))
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (ValueError, OSError) as error:
                if storage.is_remote(piece.uri):  # the way to it may be what fails
                    raise OSError(f"{piece.uri}: cannot be read from row {row} on: {error}") from error
                reject(f"damaged from row {row} on ({error})", 0)
                return
            for value in batch.column(0):
                yield f"row {row}", value.as_py()
                row += 1


def _read_ids(piece: Piece, settings: Settings, tokenizer: Tokenizer, reject: Reject) -> Iterator[tuple[Ids, bool]]:
    if settings.bin_dtype is None:
        raise ValueError(f"{piece.uri} holds ids without a header; name their type: --bin-dtype=uint16 or uint32")
    dtype = np.dtype(settings.bin_dtype).newbyteorder("<")
    position = 0
    for chunk in _bytes(piece, reject):
        odd = len(chunk) % dtype.itemsize  # at the end only: what is read at once is even
        ids = np.frombuffer(chunk[: len(chunk) - odd], dtype)
        wrong = np.flatnonzero(ids >= tokenizer.vocab_size)
        if len(wrong):
            at = position + int(wrong[0]) * dtype.itemsize
            reject(
                f"id {ids[wrong[0]]} at byte {at} is none of the {tokenizer.vocab_size} of the tokenizer", len(wrong)
            )
            ids = np.delete(ids, wrong)
        if odd:
            reject(f"it ends in the middle of an id, at byte {position + len(chunk) - odd}", odd)
        ids = ids.astype(tokenizer.dtype)
        ends = np.flatnonzero(ids == tokenizer.end_of_text)
        for start, end in zip([0, *(ends[:-1] + 1)], ends, strict=True) if len(ends) else ():
            yield ids[start:end], True
        yield ids[ends[-1] + 1 if len(ends) else 0 :], False
        position += len(chunk)


def _bytes(piece: Piece, reject: Reject) -> Iterator[bytes]:
    """The piece's bytes, unpacked."""
    position = 0
    with storage.open_read(piece.uri) as raw:
        if not piece.packing:
            if piece.start:
                raw.seek(piece.start)
            left = piece.size if piece.stop else sys.maxsize
            while chunk := raw.read(min(_CHUNK, left)):
                yield chunk
                left -= len(chunk)
            return
        unpacked, errors = _unzstd(raw) if piece.packing == ".zst" else _gunzip(raw)
        try:
            for chunk in filter(None, unpacked):
                yield chunk
                position += len(chunk)
        except errors as error:
            reject(f"damaged after byte {position} of what it unpacks to ({error})", 0)


def _gunzip(raw: BinaryIO) -> tuple[Iterator[bytes], tuple[type[Exception], ...]]:
    file = gzip.GzipFile(fileobj=raw)
    return iter(lambda: file.read(_CHUNK), b""), (EOFError, gzip.BadGzipFile, zlib.error)


def _unzstd(raw: BinaryIO) -> tuple[Iterator[bytes], tuple[type[Exception], ...]]:
    try:
        import zstandard
    except ImportError as error:
        raise OSError("a .zst needs the package zstandard: pip install zstandard") from error

    def chunks() -> Iterator[bytes]:
        frame = zstandard.ZstdDecompressor().decompressobj()
        for packed in iter(lambda: raw.read(_PACKED), b""):
            while packed:
                if frame.eof:  # a file may be several frames
                    frame = zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(packed)
                packed = frame.unused_data
        if not frame.eof:
            raise EOFError("it is cut short")

    return chunks(), (EOFError, zstandard.ZstdError)


def _parquet(raw: BinaryIO) -> Any:
    """Raises ValueError for what is not parquet."""
    try:
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise OSError("a .parquet needs the package pyarrow: pip install pyarrow") from error
    return pyarrow.parquet.ParquetFile(raw, buffer_size=1 << 20)  # else a whole column of a row group is in memory


def _stop_or_skip(piece: Piece, settings: Settings) -> Reject:
    def reject(problem: str, count: int) -> None:
        if settings.on_error == "stop":
            raise ValueError(f"{piece.uri}: {problem}; --on-error=skip leaves such things out")

    return reject


@functools.cache
def _tokenizer(path: Path) -> Tokenizer:
    return tokenizer_from_dict(json.loads(path.read_bytes()))


def _part(work: Path, piece: Piece, split: str) -> Path:
    return work / f"{piece.number:06d}.{split}"


def _record(work: Path, piece: Piece) -> Path:
    return work / f"{piece.number:06d}.json"


# --- processes --------------------------------------------------------------------------------------------------------


def _each(
    pool: ProcessPoolExecutor, verb: str, pieces: Sequence[Piece], work: Callable[..., T], *args: Any
) -> Iterator[T]:
    """What `work(piece, *args)` gives for each piece, in any order; tells how far it is."""
    started = told = time.monotonic()
    total, read = sum(piece.size for piece in pieces), 0
    tasks: dict[Future[T], Piece] = {pool.submit(work, piece, *args): piece for piece in pieces}
    try:
        for task in as_completed(tasks):
            yield task.result()
            read += tasks[task].size
            if (now := time.monotonic()) - told >= _TELL:
                told, rate = now, read / (now - started)
                tell(f"{verb}: {read / 1e6:,.0f} of {total / 1e6:,.0f} MB, {rate / 1e6:.1f} MB/s, "
                     f"{(total - read) / max(rate, 1):.0f} s left")  # fmt: skip
    except BrokenProcessPool as error:
        raise OSError(
            "a worker was killed, maybe for want of memory; the same command goes on, fewer --workers need less"
        ) from error


def _end_with_parent() -> None:
    """In a worker: Ctrl-C is the parent's to handle, and one whose parent was killed would wait for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# --- the command ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with `argv` (without the program's name) and returns its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = parse(argv)
    started = time.monotonic()
    try:
        settings = Settings(**{name: getattr(arguments, name) for name in Settings.__dataclass_fields__})
        index = prepare(arguments.sources, arguments.out, settings, arguments.workers)
    except KeyboardInterrupt:
        tell("stopped; the same command goes on")
        return 130
    except (OSError, ValueError) as error:
        tell(f"mingpt.prepare: {error}")
        return 2 if isinstance(error, ValueError | FileNotFoundError) else 1
    facts = index.facts
    train, val = (sum(shard.count for shard in split) for split in (index.train, index.val))
    print(
        f"{arguments.out}: {train:,} tokens for training, {val:,} for validation, {facts['documents']:,} documents "
        f"from {facts['bytes']:,} bytes, {facts['rejected']:,} rejected; {facts['tokenizer']}, vocabulary "
        f"{facts['vocab_size']}; {len(index.train + index.val)} files, {time.monotonic() - started:.1f} s\n"
        f"train on it: python train_gpt.py --data.path={arguments.out}"
    )
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m mingpt.prepare", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("sources", nargs="+", metavar="SOURCE", help="a file, folder, pattern or URI")
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the result, for --data.path")
    add("--tokenizer", required=True, choices=["char", "gpt2", "bpe"], help="by character, GPT-2's, or learned")
    add("--vocab-size", type=int, metavar="N", help="tokens that bpe learns, <|endoftext|> included (4096)")
    add("--val-fraction", type=float, default=0.1, metavar="F", help="share for validation (%(default)s)")
    add(
        "--val-by",
        choices=["position", "document"],
        default="position",
        help="validation is the last tokens, or whole documents, chosen by a hash of their places (%(default)s)",
    )
    add(
        "--workers",
        type=int,
        default=os.cpu_count(),
        metavar="N",
        help="processes; no matter for the result (%(default)s)",
    )
    add("--text-field", default="text", metavar="NAME", help="of JSON lines and parquet (%(default)s)")
    add("--bin-dtype", choices=["uint16", "uint32"], help="of the ids in a .bin, which --tokenizer made")
    add("--shard-tokens", type=int, default=100_000_000, metavar="N", help="most tokens in a file (%(default)s)")
    add(
        "--on-error",
        choices=["stop", "skip"],
        default="stop",
        help="what to do with bytes, lines, rows and ids that cannot be used: name the first and stop, or leave them "
        "out, counted, the first ones named (%(default)s)",
    )
    arguments = parser.parse_args(argv)
    if arguments.vocab_size is not None and arguments.tokenizer != "bpe":
        parser.error(f"--vocab-size is for --tokenizer=bpe; {arguments.tokenizer} has its own")
    arguments.vocab_size = arguments.vocab_size or 4096
    if not 0 <= arguments.val_fraction < 1:
        parser.error(f"--val-fraction={arguments.val_fraction}: expected at least 0 and below 1")
    for name, least in (("vocab_size", 257), ("workers", 1), ("shard_tokens", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name.replace('_', '-')}={getattr(arguments, name)}: expected at least {least}")
    return arguments


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
