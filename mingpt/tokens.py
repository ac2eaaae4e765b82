"""Tokens on disk: a file of them, or a folder of such files read as one stream.

They are mapped, not read: the pages in use count as page cache, which the kernel takes back under pressure, and
processes of one host share them. A file carries its tokenizer, so that whoever has a snapshot can sample.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mingpt import storage
from mingpt.grid import split_point
from mingpt.tokenizer import Tokenizer, tokenizer_from_dict

Ids = NDArray[np.unsignedinteger]
_MAGIC = b"MINGPTOK"  # then the header's length (uint64), the header (JSON, padded), and the tokens, all little-endian
FORMAT = 1
_ALIGNMENT = 64  # bytes; where the tokens start


class Shards:
    """Several 1-D arrays read as one, as far as feeding needs: its length, contiguous slices, arrays of indices."""

    ndim, dtype = 1, np.dtype(np.uint32)

    def __init__(self, parts: Sequence[Ids]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, where: slice | NDArray[np.int64]) -> Any:
        """Another `Shards`, whose parts are views, for a slice; a numpy array of the shape of `where` for indices."""
        if isinstance(where, slice):
            start, stop, step = where.indices(len(self))
            assert step == 1, "nothing here strides"
            firsts = self._ends - [len(part) for part in self._parts]
            cuts = zip(self._parts, firsts.tolist(), strict=True)
            return Shards([part[max(start - first, 0) : max(stop - first, 0)] for part, first in cuts])
        ids = np.empty(where.shape, self.dtype)
        holders = np.searchsorted(self._ends, where, side="right")
        for k in np.unique(holders):
            held = holders == k
            ids[held] = self._parts[k][where[held] - self._ends[k] + len(self._parts[k])]
        return ids


Tokens = Ids | Shards


@dataclass(frozen=True, eq=False)
class TokenFile:
    """An open token file or prepared folder: `tokens` (mapped from `path`), their tokenizer, and the sha256 of both.

    n_val: the tokens at the end that are for validation; None where the file does not say.
    """

    tokens: Tokens
    tokenizer: Tokenizer
    fingerprint: str
    path: Path
    n_val: int | None = None

    def split(self, val_fraction: float) -> int:
        """Where validation starts: as it was prepared, or at `split_point`."""
        n_tokens = len(self.tokens)
        return split_point(n_tokens, val_fraction) if self.n_val is None else n_tokens - self.n_val


def write_tokens(path: Path, chunks: Iterable[Ids], tokenizer: Tokenizer) -> None:
    """Writes the tokens and their tokenizer as one file, whole or not at all.

    Raises ValueError if there is no token, OSError if it cannot be written.
    """
    description = {"format": FORMAT, "dtype": tokenizer.dtype.name, "tokenizer": tokenizer.to_dict()}

    def head(count: int, fingerprint: str) -> bytes:
        header = json.dumps({**description, "count": count, "fingerprint": fingerprint}).encode()
        return header + b" " * (-(len(_MAGIC) + 8 + len(header)) % _ALIGNMENT)

    digest, count = hashlib.sha256(tokenizer.dtype.str.encode()), 0
    with storage.replacing(path) as file:
        room = len(head(2**63, digest.hexdigest()))  # it comes first and is known last
        file.seek(len(_MAGIC) + 8 + room)
        for chunk in chunks:
            raw = np.ascontiguousarray(chunk, dtype=tokenizer.dtype).data
            digest.update(raw)
            storage.write_all(file, raw)
            count += len(chunk)
        if not count:
            raise ValueError(f"{path}: no tokens to write")
        digest.update(tokenizer.fingerprint.encode())
        file.seek(0)
        storage.write_all(file, _MAGIC + room.to_bytes(8, "little") + head(count, digest.hexdigest()).ljust(room))


def is_token_file(path: Path) -> bool:
    """Whether the file begins as one; raises OSError if unreadable."""
    with open(path, "rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def sha256(text: str) -> str:
    """Of its UTF-8, hex; a file's name may hold other bytes."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def open_tokens(path: Path) -> TokenFile:
    """Maps a token file; reads its header only.

    Raises ValueError for a file of another kind, a newer format, or one cut short or damaged; OSError if unreadable.
    """
    tokens, fingerprint, tokenizer = _map_tokens(path)
    return TokenFile(tokens, tokenizer_from_dict(tokenizer), fingerprint, path)


def _map_tokens(path: Path) -> tuple[Ids, str, dict[str, Any]]:
    """The tokens, their fingerprint, and the tokenizer as it is written down."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(f"{path} is not a token file; give the text itself, and it is prepared")
        length = int.from_bytes(file.read(8), "little")
        start = file.tell() + length
        if size < start:
            raise ValueError(f"{path} is cut short inside its header; delete it and prepare it again")
        header = None
        with suppress(ValueError):  # not JSON: none of the cases below
            header = json.loads(file.read(length))
    match header:
        case {"format": int(version)} if version != FORMAT:
            raise ValueError(
                f"{path} has format {version}, this version reads {FORMAT}; update it, or prepare it again"
            )
        case {
            "format": int(),
            "dtype": "uint16" | "uint32" as name,
            "count": int(count),
            "fingerprint": str(fingerprint),
            "tokenizer": dict(tokenizer),
        }:
            dtype = np.dtype(name).newbyteorder("<")
        case _:
            raise ValueError(f"{path} has a damaged header; delete it and prepare it again")
    if size != start + count * dtype.itemsize:
        raise ValueError(
            f"{path} should hold {count} tokens of {dtype.itemsize} bytes from byte {start} but has {size} bytes: "
            "it is cut short or damaged; delete it and prepare it again"
        )
    return np.memmap(path, dtype, mode="r", offset=start, shape=(count,)), fingerprint, tokenizer


INDEX = "index.json"


@dataclass(frozen=True)
class Shard:
    """A token file of a prepared folder: its name there, its tokens, its bytes, and their sha256."""

    name: str
    count: int
    size: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """What a prepared folder holds: `train` and then `val` is its stream; `facts` tells how it came about."""

    train: tuple[Shard, ...]
    val: tuple[Shard, ...]
    facts: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of the bytes of all shards and of the split: other shard sizes, another fingerprint."""
        return sha256(json.dumps([[shard.sha256 for shard in split] for split in (self.train, self.val)]))

    def to_json(self) -> bytes:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode()


def read_index(raw: bytes, source: str) -> Index:
    """The index that `Index.to_json` wrote. Raises ValueError that names `source` for anything else."""
    with suppress(ValueError, TypeError, KeyError):
        description = json.loads(raw)
        if description["format"] == FORMAT:
            train, val = (tuple(Shard(**shard) for shard in description[split]) for split in ("train", "val"))
            if train and all(re.fullmatch(r"[\w-]+\.tokens", shard.name) for shard in train + val):
                return Index(train, val, description["facts"])
    raise ValueError(f"{source} is damaged or of another version; prepare the folder again")


def open_folder(folder: Path) -> TokenFile:
    """Maps a prepared folder. Raises ValueError where a file is not what the index says, OSError if unreadable."""
    index = read_index((folder / INDEX).read_bytes(), str(folder / INDEX))
    parts: list[Ids] = []
    first: dict[str, Any] = {}
    for shard in index.train + index.val:
        ids, _, tokenizer = _map_tokens(folder / shard.name)
        first = first or tokenizer
        if len(ids) != shard.count or tokenizer != first:
            raise ValueError(f"{folder / shard.name} is not what {INDEX} beside it says; prepare the folder again")
        parts.append(ids)
    n_val = sum(shard.count for shard in index.val) if index.val else None
    return TokenFile(Shards(parts), tokenizer_from_dict(first), index.fingerprint, folder, n_val)
