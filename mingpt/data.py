"""Which tokens make up step s, who computes which of them, and where the tokens come from.

Everything that chooses data is a pure function of the seed and the position, so the whole data state of a run is its
step, at any world size. Tokens lie in one file that is mapped, not read: the pages in use count as page cache, which
the kernel takes back under pressure, and processes of one host share them; memory of our own stays that of a batch.

A token file carries its tokenizer, so that whoever has a snapshot can sample. A prepared folder (mingpt/prepare.py)
holds many, read as one stream. Ids of another origin need no file from here: `Trainer` and everything below "feeding"
take any 1-D numpy array of whole numbers, an `np.memmap` too.

torch is imported where tensors are made: who only prepares a text needs none of its 200 MB.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import itertools
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from mingpt import storage
from mingpt.tokenizer import BPETokenizer, CharTokenizer, Tokenizer, tokenizer_from_dict

if TYPE_CHECKING:
    import torch
    from torch import Tensor

log = logging.getLogger(__name__)

Ids = NDArray[np.unsignedinteger]
_U64 = TypeVar("_U64", int, NDArray[Any])  # one number or an array of uint64
_64_BITS = (1 << 64) - 1


# --- the grid: pure ---------------------------------------------------------------------------------------------------


def _scramble(z: _U64) -> _U64:
    """One step of splitmix64, a bijection of 64 bits (Steele, Lea, Flood 2014, "Fast splittable PRNGs")."""
    z = (z + 0x9E3779B97F4A7C15) & _64_BITS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return z ^ (z >> 31)


def mix(*numbers: int) -> int:
    """A 64-bit hash of whole numbers in their order: the one source of derived seeds. Its values never change."""
    state = 0
    for number in numbers:
        state = _scramble(state ^ (number & _64_BITS))
    return state


def _epoch_key(seed: int, epoch: _U64) -> _U64:
    """`mix(seed, epoch)`, for many epochs at once too."""
    return _scramble(mix(seed) ^ epoch)


def permute(seed: int, epoch: int | NDArray[np.int64], i: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Where position `i` (each in `range(n)`) of an epoch's order lies: a permutation of `range(n)` for every epoch.

    Nothing is stored: a Feistel network permutes the next power of four, and what falls outside `range(n)` walks on
    until it is inside (cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
    `epoch` is one number or one per position. Its values never change.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    x = i.astype(np.uint64)
    keys = _epoch_key(seed, np.broadcast_to(np.asarray(epoch, dtype=np.uint64), x.shape))
    walking = np.arange(x.size)
    while walking.size:
        left, right = x[walking] >> half, x[walking] & low
        for number in range(8):
            round_keys = _scramble(keys[walking] ^ number)
            left, right = right, left ^ (_scramble(round_keys ^ right) & low)
        x[walking] = left << half | right
        walking = walking[x[walking] >= n]
    return x.astype(np.int64)


@dataclass(frozen=True)
class Grid:
    """The training tokens as windows, and the windows that make up each step.

    A window is `block_size + 1` tokens, of which neighbours share one; an epoch is `windows` of them from an offset of
    its own. A step reads `global_batch_size` windows, in `cells` pieces of `micro_batch_size`.
    Raises ValueError where the tokens do not fill one window.
    """

    n_tokens: int
    block_size: int
    global_batch_size: int
    micro_batch_size: int
    seed: int

    def __post_init__(self) -> None:
        assert self.global_batch_size % self.micro_batch_size == 0, "the config lets no other pass"
        if self.n_tokens <= self.block_size:
            raise ValueError(
                f"data.path: the training split has {self.n_tokens} tokens, and model.block_size={self.block_size} "
                f"needs at least {self.block_size + 1}; set a smaller model.block_size, or take a longer text or a "
                "smaller data.val_fraction"
            )

    @property
    def windows(self) -> int:
        """Windows in every epoch."""
        return max(1, self.n_tokens // self.block_size - 1)

    @property
    def cells(self) -> int:
        """Cells in every step."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.block_size

    def offset(self, epoch: _U64) -> _U64:
        """The token at which the epoch's first window starts; any of them leaves the last window inside the text."""
        return _epoch_key(self.seed, epoch) % (self.n_tokens - self.windows * self.block_size)

    def starts(self, step: int) -> NDArray[np.int64]:
        """First token of each window that update `step` reads, (global_batch_size,), one cell's after the other's."""
        first = self.samples_seen(step)
        samples = np.arange(first, first + self.global_batch_size)
        epochs, positions = np.divmod(samples, self.windows)
        windows = permute(self.seed, epochs, positions, self.windows)
        return self.offset(epochs.astype(np.uint64)).astype(np.int64) + windows * self.block_size

    def samples_seen(self, step: int) -> int:
        """Windows read by the first `step` updates."""
        return step * self.global_batch_size

    def epoch(self, step: int) -> float:
        """Epochs completed, in parts too, after `step` updates."""
        return self.samples_seen(step) / self.windows

    def steps(self, epochs: float) -> int:
        """The updates it takes to read every window `epochs` times, at least one."""
        needed = epochs * self.windows / self.global_batch_size
        return max(1, math.ceil(round(needed, 6)))  # 0.55 * 100 is 55.00000000000001


def share(rank: int, world_size: int, cells: int) -> range:
    """The cells that `rank` computes; empty for some where there are more ranks than cells."""
    return range(rank * cells // world_size, (rank + 1) * cells // world_size)


def split_point(n_tokens: int, val_fraction: float) -> int:
    """Where validation starts: it is the last floor(n_tokens * val_fraction) tokens, training is all before."""
    return n_tokens - int(n_tokens * val_fraction)


# --- token files ------------------------------------------------------------------------------------------------------

_MAGIC = b"MINGPTOK"  # then the header's length (uint64), the header (JSON, padded), and the tokens, all little-endian
_FORMAT = 1
_ALIGNMENT = 64  # bytes; where the tokens start
_CHUNK = 1 << 22  # bytes; a text of any size is prepared in some 150 MB
_TELL = 5.0  # seconds between two lines about a long text


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

    Needs the space twice for a moment. Raises ValueError if there is no token, OSError if it cannot be written.
    """
    digest, count = hashlib.sha256(tokenizer.dtype.str.encode()), 0
    with tempfile.TemporaryFile(dir=path.parent) as body:  # the header comes first and is known last
        for chunk in chunks:
            raw = np.ascontiguousarray(chunk, dtype=tokenizer.dtype).data
            digest.update(raw)
            body.write(raw)
            count += len(chunk)
        if not count:
            raise ValueError(f"{path}: no tokens to write")
        digest.update(tokenizer.fingerprint.encode())
        description = {
            "format": _FORMAT,
            "dtype": tokenizer.dtype.name,
            "count": count,
            "fingerprint": digest.hexdigest(),
            "tokenizer": tokenizer.to_dict(),
        }
        header = json.dumps(description).encode()
        header += b" " * (-(len(_MAGIC) + 8 + len(header)) % _ALIGNMENT)
        body.seek(0)
        head = _MAGIC + len(header).to_bytes(8, "little") + header
        storage.replace_file(path, itertools.chain([head], iter(lambda: body.read(_CHUNK), b"")))


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
        case {"format": int(version)} if version != _FORMAT:
            raise ValueError(
                f"{path} has format {version}, this version reads {_FORMAT}; update it, or prepare it again"
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


# --- prepared folders: token files and an index, which is written last ------------------------------------------------

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
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).encode()


def read_index(raw: bytes, source: str) -> Index:
    """The index that `Index.to_json` wrote. Raises ValueError that names `source` for anything else."""
    with suppress(ValueError, TypeError, KeyError):
        description = json.loads(raw)
        if description["format"] == _FORMAT:
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


def _remote_folder(uri: str, cache_gb: float) -> TokenFile:
    """The prepared folder at `uri`, downloaded once per host and content.

    What was downloaded before and used least lately makes room. Raises OSError where it is not to be had, or other
    bytes than its index says; ValueError where it is larger than the cache may be.
    """
    uri = uri.rstrip("/")
    raw = storage.read_bytes(f"{uri}/{INDEX}")
    index = read_index(raw, f"{uri}/{INDEX}")
    cache = _private_folder("folders")
    folder = cache / _hex(raw.decode())
    with only_process(cache, uri):
        folder.mkdir(exist_ok=True)
        storage.remove_leftovers(folder)
        os.utime(folder)
        needed = sum(shard.size for shard in index.train + index.val)
        for old in sorted(cache.glob("*/"), key=lambda it: it.stat().st_mtime):
            used = sum(file.stat().st_size for file in cache.glob("*/*") if file.parent != folder)
            if old != folder and used + needed > cache_gb * 1e9:
                shutil.rmtree(old)  # who has it mapped keeps it
        if needed > cache_gb * 1e9:
            raise ValueError(
                f"data.path={uri} takes {needed / 1e9:.1f} GB, data.cache_gb={cache_gb:g} allows less; allow more"
            )
        for number, shard in enumerate(index.train + index.val, 1):
            if not (folder / shard.name).exists():
                log.info("downloading %s/%s (%d of %d)", uri, shard.name, number, len(index.train + index.val))
                storage.replace_file(folder / shard.name, _verified(f"{uri}/{shard.name}", shard.sha256))
        storage.replace_file(folder / INDEX, [raw])
        return open_folder(folder)


def _verified(uri: str, expected: str) -> Iterator[bytes]:
    digest = hashlib.sha256()
    with storage.open_read(uri) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            yield chunk
    if digest.hexdigest() != expected:
        raise OSError(f"{uri} has other bytes than {INDEX} beside it says; start again, or upload the folder again")


# --- from a text to a token file --------------------------------------------------------------------------------------


Reject = Callable[[str, int], None]  # (what is wrong and where, bytes left out): raises, or lets it be left out


def decode(chunks: Iterable[bytes], reject: Reject, start: int = 0) -> Iterator[str]:
    """The text of `chunks`: strict UTF-8, a byte-order mark at byte 0 dropped, CRLF and CR turned into LF.

    start: the first chunk's place in its file, in bytes. `reject` hears the first wrong byte of a chunk.
    """
    newlines = io.IncrementalNewlineDecoder(None, translate=True)  # it and `rest` keep what a border cuts in two
    position, rest = start, b""
    for chunk in itertools.chain(chunks, [b""]):
        raw = rest + chunk
        try:
            text, used = codecs.utf_8_decode(raw, "strict", not chunk)
        except UnicodeDecodeError as error:
            text, used = codecs.utf_8_decode(raw, "ignore", not chunk)
            reject(f"not UTF-8 at byte {position + error.start} ({error.reason})", used - len(text.encode()))
        if position == 0:
            text = text.removeprefix("\ufeff")
        position, rest = position + used, raw[used:]
        if text := newlines.decode(text, final=not chunk):
            yield text


def cut(texts: Iterable[str], size: int = 1 << 20) -> Iterator[str]:
    """The same text in pieces of at most `size` characters, cut where a word ends: no token crosses that place.

    Only a word longer than `size` is cut inside. How `texts` was in pieces makes no difference.
    """
    text = ""
    for more in texts:
        text, start = text + more, 0
        while len(text) - start > size:
            word_end = _WORD_END.match(text, start, start + size + 1)
            at = word_end.end() if word_end else start + size
            yield text[start:at]
            start = at
        text = text[start:]
    if text:
        yield text


_WORD_END = re.compile(r".*\S(?=[ \t\n])", re.DOTALL)  # the last one


def read_text(uri: str, verb: str = "reading", *, clock: Callable[[], float] = time.monotonic) -> Iterator[str]:
    """The text at `uri` in pieces, as `decode` has it; tells every few seconds of `clock` how far it is.

    Raises ValueError that names the first wrong byte, or says that there is no text; OSError if unreadable.
    """

    def chunks() -> Iterator[bytes]:
        position, started = 0, clock()
        told = started
        with storage.open_read(uri) as file:
            # Of a remote file the driver may know the size.
            size = getattr(file, "size", None) if storage.is_remote(uri) else os.fstat(file.fileno()).st_size
            while chunk := file.read(_CHUNK):
                yield chunk
                position += len(chunk)
                if (now := clock()) - told >= _TELL:
                    told, rate = now, position / (now - started)
                    left = f" of {size / 1e6:.0f} MB, {(size - position) / rate:.0f} s left" if size else " MB"
                    log.info("%s: %.0f%s, %.1f MB/s", verb, position / 1e6, left, rate / 1e6)

    def reject(problem: str, count: int) -> None:
        raise ValueError(f"data.path={uri} is {problem}; convert the file")

    empty = True
    for text in decode(chunks(), reject):
        empty = False
        yield text
    if empty:
        raise ValueError(f"data.path={uri} has no text; give a file with more than model.block_size characters")


def make_tokenizer(kind: str, vocab_size: int, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names, of `texts` unless it is GPT-2's; byte pairs take their beginning.

    vocab_size: for `bpe` only. Raises ValueError for another kind, OSError where GPT-2's is not to be had.
    """
    match kind:
        case "char":
            return CharTokenizer.from_text(texts)
        case "gpt2":
            return BPETokenizer.gpt2()
        case "bpe":
            learned = BPETokenizer.train(_to_learn_from(texts), vocab_size)
            if learned.vocab_size < vocab_size:
                log.warning("of %d tokens the text gives %d, it has no more pairs", vocab_size, learned.vocab_size)
            return learned
    raise ValueError(f"data.tokenizer={kind!r} is not known; expected char, gpt2 or bpe")


LEARNED = 64  # pieces of a million characters from which byte pairs are learned; more change little
_DISTINCT = 6_000_000  # bytes of distinct words after which no more are taken: each costs some 40 bytes of memory


def _to_learn_from(texts: Iterable[str]) -> Iterator[str]:
    words: set[str] = set()
    size = 0
    for text in itertools.islice(cut(texts), LEARNED):
        if size > _DISTINCT:  # natural English stays far below; a script without spaces gets here
            return
        new = {*text.split()} - words
        words |= new
        size += sum(len(word.encode()) for word in new)
        yield text


def open_corpus(path: str, tokenizer: str, vocab_size: int = 4096, cache_gb: float = 100.0) -> TokenFile:
    """The tokens of `data.path`: a token file, a prepared folder, a text, or a folder whose `prepare.py` makes either.

    A prepared folder or a text may be at a URI. A text is prepared once per content and tokenizer, as one document, by
    whichever process of this host comes first while the others wait, into `.mingpt-cache/` beside it, or into a folder
    of this user's for temporary files where that cannot be written.
    Raises ValueError for a text or file that cannot be used, OSError where something cannot be read, made or written.
    """
    if storage.is_remote(path) and storage.is_folder(path):
        return _remote_folder(path, cache_gb)
    if not storage.is_remote(path):
        local = storage.local_path(path)
        if not local.exists():
            script = local.parent / "prepare.py"
            cure = f"`python {script}` makes it" if script.exists() else "give a text or token file, a folder or a URI"
            where = "" if local.is_absolute() else f" in {Path.cwd()}"
            raise FileNotFoundError(f"data.path={path} does not exist{where}; {cure}")
        if local.is_dir():
            local = _made_by_folder(local)
        if not local.is_file():  # a fifo would wait for ever, and cannot be read twice
            raise ValueError(f"data.path={path} is no regular file; write the text into one first")
        if local.name == INDEX:
            return open_folder(local.parent)
        with open(local, "rb") as file:
            if file.read(len(_MAGIC)) == _MAGIC:
                return open_tokens(local)
        path = str(local)
    name = path.rsplit("/", 1)[-1]
    stem = "".join(c if c.isascii() and c.isalnum() or c in "-_." else "_" for c in name)[:80]  # of 255 bytes
    kind = f"{tokenizer}{vocab_size}" if tokenizer == "bpe" else tokenizer
    stem += f"-{_hex(name)}.{kind}.{_FORMAT}-"
    name = f"{stem}{_hex(storage.identity(path))}.tokens"
    folder = _cache_folder(path, name)
    prepared = folder / name
    if (corpus := _cached(prepared)) is None:
        with only_process(folder, path):
            if (corpus := _cached(prepared)) is None:  # else whoever held the lock before has made it
                if prepared.exists():
                    log.warning("%s is damaged: making it again", prepared)
                _prepare(path, prepared, tokenizer, vocab_size)
                for old in set(folder.glob(f"{stem}*.tokens")) - {prepared}:
                    old.unlink()  # of the text as it was before; who has it mapped keeps it
                corpus = open_tokens(prepared)
    return corpus


def _cached(path: Path) -> TokenFile | None:
    """The token file at `path`, or None where there is none that is whole."""
    with suppress(FileNotFoundError, ValueError):
        return open_tokens(path)
    return None


def _prepare(uri: str, path: Path, kind: str, vocab_size: int) -> None:
    started, identity = time.monotonic(), storage.identity(uri)
    log.info("preparing %s", uri)
    with storage.open_read(uri) as file:
        if file.read(3) == codecs.BOM_UTF8:
            log.warning("data.path=%s starts with a byte-order mark, which is left out", uri)
    tokenizer = make_tokenizer(kind, vocab_size, read_text(uri))
    if isinstance(tokenizer, CharTokenizer):
        log.info("%d symbols: %s", tokenizer.vocab_size, ascii(tokenizer.chars))
    ids = map(tokenizer.encode, cut(read_text(uri, "encoding")))
    write_tokens(path, itertools.chain(ids, [end_of_document(tokenizer)]), tokenizer)
    if storage.identity(uri) != identity:
        path.unlink()
        raise OSError(f"data.path={uri} changed while it was read; start again when it is complete")
    log.info("prepared %s in %.1f s: %s", uri, time.monotonic() - started, path)


def end_of_document(tokenizer: Tokenizer) -> Ids:
    """What is added to the ids of a document: its end where the tokenizer has an id for it."""
    return np.array([] if tokenizer.end_of_text is None else [tokenizer.end_of_text], tokenizer.dtype)


def _made_by_folder(folder: Path) -> Path:
    """The index of a prepared folder, else its `input.txt`; its `prepare.py` makes one of them if there is none."""
    index, text, script = folder / INDEX, folder / "input.txt", folder / "prepare.py"
    if index.exists():  # written last
        return index
    cache = _cache_folder(str(text), script.name)
    unfinished = cache / "unfinished"  # a script that was killed may have left half a text

    def made() -> Path | None:
        return index if index.exists() else text if text.exists() and not unfinished.exists() else None

    if found := made():
        return found
    if not script.exists():
        raise FileNotFoundError(
            f"data.path={folder} has neither {INDEX} nor input.txt nor prepare.py; give a text, a URI, or a folder "
            "that python -m mingpt.prepare has finished"
        )
    with only_process(cache, str(folder)) as lock:
        if found := made():
            return found
        log.info("running %s", script)
        unfinished.touch()
        command = [sys.executable, str(script.resolve())]
        # It inherits the lock: where it outlives us nobody starts it a second time beside it.
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=False, pass_fds=[lock.fileno()]
        )
        if not text.exists() or done.returncode == 0:
            unfinished.unlink()  # what is there is whole, also what comes by hand after a failure
        found = made()
        if done.returncode or not found:
            said = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
            raise ChildProcessError(f"data.path={folder}: {script} made no input.txt: {said[-1]}")
        log.info("made %s: %s", found, done.stdout.strip().rpartition("\n")[2])
        return found


def _cache_folder(path: str, name: str) -> Path:
    """Where what is made of `path` lies: beside it if `name` is there or can be written, else in a private folder."""
    if not storage.is_remote(path):
        beside = Path(path).parent / ".mingpt-cache"
        if (beside / name).exists():
            return beside
        with suppress(OSError):
            beside.mkdir(exist_ok=True)
            tempfile.TemporaryFile(dir=beside).close()  # rights alone do not tell: read-only mounts, network folders
            return beside
        path = os.path.abspath(path)
    return _private_folder(_hex(path))


def _private_folder(name: str) -> Path:
    """A folder of this user's among the temporary files."""
    private = Path(tempfile.gettempdir(), f"mingpt-{os.getuid()}")
    private.mkdir(mode=0o700, exist_ok=True)
    if private.is_symlink() or private.stat().st_uid != os.getuid():
        raise PermissionError(f"{private} is not this user's and cannot be trusted; remove it or set TMPDIR")
    (private / name).mkdir(exist_ok=True)
    return private / name


@contextmanager
def only_process(folder: Path, work: str) -> Iterator[BinaryIO]:
    """Holds the folder's lock, which the kernel gives back when its holder ends, however it ends."""
    with ExitStack() as held:
        try:
            lock = held.enter_context(storage.lock(folder / "lock", patience=0))
        except BlockingIOError as holder:
            log.info("waiting for another process (%s) to prepare %s", holder, work)
            lock = held.enter_context(storage.lock(folder / "lock"))
        storage.remove_leftovers(folder)
        yield lock


def _hex(text: str) -> str:
    return sha256(text)[:16]


def sha256(text: str) -> str:
    """Of its UTF-8, hex; a file's name may hold other bytes."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


# --- feeding ----------------------------------------------------------------------------------------------------------


class Batches:
    """The training batches of any step, on `device`; the next step's is read by a thread while this one is in use."""

    def __init__(self, tokens: Tokens, grid: Grid, device: torch.device) -> None:
        assert len(tokens) == grid.n_tokens, "the grid is of these tokens"
        self._tokens, self._grid, self._device = tokens, grid, device
        # Pinning memory in a thread that has not chosen its device would open a second context, on device 0.
        import torch

        choose = (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "batches", initializer=choose)
        self._ahead: tuple[int, range, Future[tuple[Tensor, Tensor]]] | None = None

    def cells(self, step: int, share: range) -> list[tuple[Tensor, Tensor]]:
        """(idx, targets) of each cell in `share` of update `step`, int64, (micro_batch_size, block_size) each.

        Raises what reading them raised, in whichever thread.
        """
        ahead, self._ahead = self._ahead, None
        if ahead and ahead[:2] == (step, share):
            idx, targets = ahead[2].result()
        else:
            idx, targets = self._read(step, share)
        self._ahead = step + 1, share, self._thread.submit(self._read, step + 1, share)
        idx, targets = (x.to(self._device, non_blocking=True) for x in (idx, targets))
        return list(zip(idx, targets, strict=True))

    def close(self) -> None:
        """Ends the thread; `cells` cannot be called again."""
        self._thread.shutdown(cancel_futures=True)

    def _read(self, step: int, share: range) -> tuple[Tensor, Tensor]:
        size, length = self._grid.micro_batch_size, self._grid.block_size
        starts = self._grid.starts(step)[share.start * size : share.stop * size]
        rows = _rows(self._tokens, starts, length).view(len(share), size, length + 1)
        idx, targets = rows[..., :-1].contiguous(), rows[..., 1:].contiguous()
        return (idx.pin_memory(), targets.pin_memory()) if self._device.type == "cuda" else (idx, targets)


class Validation:
    """The validation tokens as windows from the first token on, every target once, in cells for the ranks to share.

    `eval_sequences` takes that many windows only (0 = all). The last, shorter window is a cell of its own.
    Raises ValueError where there is no target.
    """

    def __init__(self, tokens: Tokens, block_size: int, micro_batch_size: int, eval_sequences: int = 0) -> None:
        if len(tokens) < 2:
            raise ValueError(
                f"data.path: the validation split has {len(tokens)} tokens and needs at least 2; take a longer text or "
                "a larger data.val_fraction, or set data.val_fraction=0 to go without"
            )
        self._tokens, self._block_size = tokens, block_size
        starts = np.arange(0, len(tokens) - 1, block_size)[: eval_sequences or None]
        full = int(np.count_nonzero(starts + block_size < len(tokens)))
        self._cells = [starts[i : min(i + micro_batch_size, full)] for i in range(0, full, micro_batch_size)]
        if full < len(starts):
            self._cells.append(starts[full:])

    def __len__(self) -> int:
        """The number of cells."""
        return len(self._cells)

    def cell(self, i: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(idx, targets) of cell `i`, int64, (at most micro_batch_size, block_size), in the last cell maybe shorter."""
        starts = self._cells[i]
        length = min(self._block_size, len(self._tokens) - 1 - int(starts[0]))
        rows = _rows(self._tokens, starts, length).to(device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _rows(tokens: Tokens, starts: NDArray[np.int64], length: int) -> Tensor:
    """(len(starts), length + 1) int64: the window at each start, gathered by one indexing."""
    import torch

    return torch.from_numpy(tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64))
