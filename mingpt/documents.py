"""What is read: a piece of a source file, of any format, and the documents in it."""

import functools
import gzip
import io
import json
import re
import secrets
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mingpt import storage
from mingpt.corpus import decode
from mingpt.tokenizer import Tokenizer, cut, normalize
from mingpt.tokens import Ids

PIECE = 1 << 25  # bytes of a plain file in a piece: a kill costs each worker at most one, some seconds
NAMED = 10  # rejected inputs told one by one
_CHUNK = 1 << 22  # bytes read at once
_PACKED = 1 << 10  # bytes of zstd read at once: they may unpack to 30,000 times as many
_LONG = 1 << 20  # bytes of a line, and of a string in it, from which on it is not unescaped as a whole
_BESIDE = 1 << 24  # bytes that a line may have beside its long strings: as objects they take ten times as many
_WORD_END = re.compile(rb"[^\s](?=[ \t\r\n])")
_LINE_END = re.compile(rb"\n")
_HALVES = re.compile("[\ud800-\udfff]")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # of JSON; the last one may be cut short
# Up to a million characters of a JSON string: no escape, no pair of them and no UTF-8 is cut.
_CHARACTERS = re.compile(
    rb"(?:[ -\[\]-~]{1,16}+|[^\\][\x80-\xbf]*+|\\u[dD][89abAB]..\\u....|\\u....|\\.){1,65536}+", re.DOTALL
)


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
        suffix = Path(self._name.removesuffix(self.packing)).suffix
        return {".jsonl": "lines", ".ndjson": "lines", ".parquet": "rows", ".bin": "ids"}.get(suffix, "text")

    @property
    def packing(self) -> str:
        suffix = Path(self._name).suffix
        return suffix if suffix in (".gz", ".zst") else ""

    @property
    def _name(self) -> str:
        """Without what a server is asked beside it."""
        return (self.uri.partition("?")[0] if storage.is_remote(self.uri) else self.uri).lower()


# --- pieces -----------------------------------------------------------------------------------------------------------


def plan_pieces(files: Sequence[str]) -> Iterator[Piece]:
    """Plain local files and parquet files in pieces of about `PIECE` bytes, others whole. Reads only near the cuts."""
    numbers = iter(range(sys.maxsize))
    for place, uri in enumerate(files):
        size = storage.size(uri)
        whole = Piece(0, place, uri, 0, None, True, size)
        cuts: list[Any] = [0, None]
        if whole.packing and whole.format in ("rows", "ids"):
            raise ValueError(f"{uri}: a packed {Path(uri).suffixes[-2]} is not read; unpack it first")
        if whole.format == "rows":
            with suppress(ValueError, OSError):  # it is told where it is read
                cuts = _row_group_cuts(uri)
        elif not whole.packing and not storage.is_remote(uri) and whole.format != "ids":
            cuts = _byte_cuts(uri, size, _LINE_END if whole.format == "lines" else _WORD_END)
        for start, stop in pairwise(cuts):
            part = (stop - start) * size // cuts[-1] if stop else size
            yield Piece(next(numbers), place, uri, start, stop, stop == cuts[-1], part)


def _byte_cuts(uri: str, size: int, pattern: re.Pattern[bytes]) -> list[Any]:
    """Bytes where a piece starts, and the end."""
    cuts = [0]
    with open(storage.local_path(uri), "rb") as file:
        for at in range(PIECE, size, PIECE):
            if at > cuts[-1]:
                cuts.append(_cut_after(file, at, pattern, size))
    return [*(at for at in cuts if at < size), size or None]


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


def _row_group_cuts(uri: str) -> list[Any]:
    """Row groups where a piece starts, and their number."""
    with storage.open_read(uri) as raw:
        metadata = _parquet(raw).metadata
        cuts, filled = [0], 0
        for group in range(metadata.num_row_groups):
            if filled >= PIECE:
                cuts, filled = [*cuts, group], 0
            filled += metadata.row_group(group).total_byte_size
        return [*cuts, metadata.num_row_groups or None]


# --- documents --------------------------------------------------------------------------------------------------------


class Reader:
    """A piece as documents. It counts what has to be left out, and writes into `work` how far it is."""

    def __init__(self, piece: Piece, text_field: str, bin_dtype: str | None, on_error: str, work: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []  # the first ones
        self._piece, self._text_field, self._bin_dtype, self._on_error = piece, text_field, bin_dtype, on_error
        self._progress = np.memmap(work / "progress", np.int64, "r+")

    def reject(self, problem: str) -> None:
        problem = f"{self._piece.uri}: {problem}"
        if self._on_error == "stop":
            raise ValueError(f"{problem}; --on-error=skip leaves such things out")
        self.counts["rejected"] += 1
        self.problems = [*self.problems, problem][:NAMED]

    def texts(self) -> Iterator[tuple[str, bool]]:
        """(a text of at most `CUT` characters, whether its document ends with it)."""
        piece = self._piece
        if piece.format == "text":
            empty = piece.start == 0
            for text in cut(decode(self._bytes(), self.reject, piece.start)):
                empty = False
                yield text, False
            if piece.last and not empty:
                yield "", True
            return
        for where, parts in self._rows() if piece.format == "rows" else self._lines():
            try:
                problem = next(filter(None, map(self._problem, parts())), "")
            except ValueError as error:
                problem = f"cannot be read: {error}"
            if problem:
                self.reject(f"{where} {problem}")
                continue
            empty = True
            for text in cut(normalize(parts())):
                empty = False
                yield text, False
            if not empty:
                yield "", True

    def _problem(self, text: Any) -> str:
        if not isinstance(text, str):
            return f"has no text in {self._text_field!r} but {type(text).__name__}"
        if not text.isascii() and _HALVES.search(text):
            return "has half of a surrogate pair, which is no character"
        return ""

    def _lines(self) -> Iterator[tuple[str, Callable[[], Iterable[Any]]]]:
        """Where each document is, and what gives its text in parts, as often as it is called."""
        position, name = self._piece.start, self._text_field
        for line in _lines(self._bytes()):
            where, position = f"the line at byte {position}", position + len(line)
            if line.isspace():
                continue
            try:
                short, strings = _without_long_strings(line)
                document = json.loads(short.decode().removeprefix("\ufeff"))
            except (ValueError, RecursionError) as error:
                self.reject(f"{where} is not JSON: {error}")
                continue
            if isinstance(document, dict) and name in document:
                value = document[name]
                long = strings.get(value) if isinstance(value, str) else None
                yield where, functools.partial(_unescape, line, *long) if long else functools.partial(iter, [value])
            else:
                has = f"but {', '.join(map(repr, document))}" if isinstance(document, dict) else "it is no object"
                self.reject(f"{where} has no field {name!r}, {has}; name it with --text-field")

    def _rows(self) -> Iterator[tuple[str, Callable[[], Iterable[Any]]]]:
        """As `_lines`."""
        piece, name, row, problem = self._piece, self._text_field, 0, ""
        with storage.open_read(piece.uri) as raw:
            try:
                file = _parquet(raw)
                groups = range(piece.start, piece.stop or 0)
                first = row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
                rows = sum(file.metadata.row_group(group).num_rows for group in groups)
                has = file.schema_arrow.names
                if name not in has:
                    problem = f"it has no column {name!r} but {', '.join(map(repr, has))}; name it with --text-field"
                    groups = range(0)
                for batch in file.iter_batches(64, [*groups], [name] if groups else [], use_threads=False):
                    for value in batch.column(0):
                        yield f"row {row}", functools.partial(_of_row, value)
                        row += 1
                    self._progress[piece.number] = piece.size * (row - first) // rows
            except (ValueError, OSError) as error:
                problem = f"not parquet, or damaged from row {row} on ({' '.join(str(error).split())})"
                if isinstance(error, OSError) and storage.is_remote(piece.uri):  # the way to it may be what fails
                    raise OSError(f"{piece.uri}: cannot be read from row {row} on: {error}") from error
        if problem:
            self.reject(problem)

    def ids(self, tokenizer: Tokenizer) -> Iterator[tuple[Ids, bool]]:
        """(ids of a document without its end, whether it ends with them)."""
        if self._bin_dtype is None:
            raise ValueError(
                f"{self._piece.uri} holds ids without a header; name their type: --bin-dtype=uint16 or uint32"
            )
        dtype = np.dtype(self._bin_dtype).newbyteorder("<")
        position, rest = 0, b""
        for chunk in self._bytes():
            raw = rest + chunk
            ids = np.frombuffer(raw, dtype, len(raw) // dtype.itemsize)
            rest = raw[ids.nbytes :]
            wrong = np.flatnonzero(ids >= tokenizer.vocab_size)
            if len(wrong):
                at = position + int(wrong[0]) * dtype.itemsize
                self.reject(f"id {ids[wrong[0]]} at byte {at} is none of the {tokenizer.vocab_size} of the tokenizer")
            position += ids.nbytes
            ids = np.delete(ids, wrong).astype(tokenizer.dtype)
            ends = np.flatnonzero(ids == tokenizer.end_of_text)
            for start, end in zip([0, *(ends[:-1] + 1)], ends, strict=True) if len(ends) else ():
                yield ids[start:end], True
            yield ids[ends[-1] + 1 if len(ends) else 0 :], False
        if rest:
            self.reject(f"it ends in the middle of an id, at byte {position}")

    def _bytes(self) -> Iterator[bytes]:
        """The piece's bytes, unpacked."""
        piece, position, problem = self._piece, 0, ""
        size = sys.maxsize if piece.stop is None else piece.stop - piece.start
        with storage.open_read(piece.uri) as raw:
            if piece.start:
                raw.seek(piece.start)
            unpacked = {".gz": _gunzip, ".zst": _unzstd}[piece.packing](raw) if piece.packing else _plain(raw, size)
            try:
                for chunk in filter(None, unpacked):
                    yield chunk
                    position += len(chunk)
                    self._progress[piece.number] = raw.tell() - piece.start
            except _DamagedError as error:
                problem = f"damaged after byte {position} of what it unpacks to ({error})"
        if problem:
            self.reject(problem)


# --- unpacking --------------------------------------------------------------------------------------------------------


class _DamagedError(ValueError):
    """A packed file is."""


def _plain(raw: BinaryIO, size: int) -> Iterator[bytes]:
    while chunk := raw.read(min(_CHUNK, size)):
        yield chunk
        size -= len(chunk)


def _gunzip(raw: BinaryIO) -> Iterator[bytes]:
    file = gzip.GzipFile(fileobj=raw)
    try:
        while chunk := file.read1(_CHUNK):  # and not `read`, which keeps what comes before an error
            yield chunk
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _DamagedError(error) from error


def _unzstd(raw: BinaryIO) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise OSError("a .zst needs the package zstandard: pip install zstandard") from error
    frame = zstandard.ZstdDecompressor().decompressobj()
    try:
        for packed in iter(lambda: raw.read(_PACKED), b""):
            while packed:
                if frame.eof:  # a file may be several frames
                    frame = zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(packed)
                packed = frame.unused_data
    except zstandard.ZstdError as error:
        raise _DamagedError(error) from error
    if not frame.eof:
        raise _DamagedError("it is cut short")


# --- lines and rows ---------------------------------------------------------------------------------------------------


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


def _without_long_strings(line: bytearray) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The line with a name in place of each long string, and the bytes of the line inside its quotes by that name."""
    strings: dict[str, tuple[int, int]] = {}

    def short(string: re.Match[bytes]) -> bytes:
        start, stop = string.span()
        if stop - start < _LONG:
            return string[0]
        name = secrets.token_hex(16)  # which no text has
        strings[name] = start + 1, stop - 1
        return b'"%b"' % name.encode()

    rest = bytes(line) if len(line) < _LONG else _STRING.sub(short, line)
    if len(rest) > _BESIDE:
        raise ValueError(f"it has {len(rest)} bytes beside its long strings, more than {_BESIDE} are not read")
    return rest, strings


def _unescape(line: bytearray, start: int, stop: int) -> Iterator[str]:
    for part in _CHARACTERS.finditer(line, start, stop):
        yield json.loads(f'"{part[0].decode()}"')


def _of_row(value: Any) -> list[Any]:
    return [value.as_py()]


def _parquet(raw: BinaryIO) -> Any:
    """Raises ValueError for what is not parquet."""
    try:
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise OSError("a .parquet needs the package pyarrow: pip install pyarrow") from error
    return pyarrow.parquet.ParquetFile(raw, buffer_size=1 << 20)  # else a whole column of a row group is in memory
