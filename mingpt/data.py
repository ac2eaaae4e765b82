"""Which tokens make up step s, who computes which of them, and where the tokens come from.

Everything that chooses data is a pure function of the seed and the position, so the whole data state of a run is its
step, at any world size. Tokens lie in one file that is mapped, not read: the pages in use count as page cache, which
the kernel takes back under pressure, and processes of one host share them; memory of our own stays that of a batch.

A token file carries its tokenizer, so that whoever has a snapshot can sample. Ids of another origin need no file from
here: `Trainer` and everything below "feeding" take any 1-D numpy array of whole numbers, an `np.memmap` too.
"""

import codecs
import hashlib
import io
import itertools
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingpt import storage
from mingpt.tokenizer import CharTokenizer, Tokenizer, tokenizer_from_dict

log = logging.getLogger(__name__)

Tokens = NDArray[np.unsignedinteger]
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


@dataclass(frozen=True, eq=False)
class TokenFile:
    """An open token file: `tokens` (1-D, mapped from `path`), their tokenizer, and the sha256 of both."""

    tokens: Tokens
    tokenizer: Tokenizer
    fingerprint: str
    path: Path


def write_tokens(path: Path, chunks: Iterable[Tokens], tokenizer: Tokenizer) -> None:
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
    tokens = np.memmap(path, dtype, mode="r", offset=start, shape=(count,))
    return TokenFile(tokens, tokenizer_from_dict(tokenizer), fingerprint, path)


# --- from a text to a token file --------------------------------------------------------------------------------------


def read_text(uri: str, *, again: bool = False, clock: Callable[[], float] = time.monotonic) -> Iterator[str]:
    """The text at `uri` in pieces: strict UTF-8, a byte-order mark dropped, CRLF and CR turned into LF.

    Tells every few seconds of `clock` how far it is; `again`: the second of two readings, which warns no more.
    Raises ValueError that names the first wrong byte, or says that there is no text; OSError if unreadable.
    """
    utf8 = codecs.getincrementaldecoder("utf-8")()
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)  # it and `utf8` keep what a border cuts in two
    position, empty, chunk = 0, True, b"?"
    started = told = clock()
    with storage.open_read(uri) as file:
        # Of a remote file the driver may know the size.
        size = getattr(file, "size", None) if storage.is_remote(uri) else os.fstat(file.fileno()).st_size
        while chunk:
            chunk = file.read(_CHUNK)
            start = position - len(utf8.getstate()[0])  # of what is decoded now, in bytes of the file
            position += len(chunk)
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"data.path={uri} is not UTF-8 at byte {start + error.start} ({error.reason}); convert the file"
                ) from error
            if start == 0 and text.startswith("\ufeff"):
                text = text[1:]
                if not again:
                    log.warning("data.path=%s starts with a byte-order mark, which is left out", uri)
            if text:
                empty = False
                yield text
            if (now := clock()) - told >= _TELL:
                told, rate = now, position / (now - started)
                left = f" of {size / 1e6:.0f} MB, {(size - position) / rate:.0f} s left" if size else " MB"
                log.info("reading %d of 2: %.0f%s, %.1f MB/s", 1 + again, position / 1e6, left, rate / 1e6)
    if empty:
        raise ValueError(f"data.path={uri} has no text; give a file with more than model.block_size characters")


def open_corpus(path: str, tokenizer: str) -> TokenFile:
    """The tokens of `data.path`: a token file, a text file or URI, or a folder whose `prepare.py` makes `input.txt`.

    A text is prepared once per content, by whichever process of this host comes first while the others wait, into
    `.mingpt-cache/` beside it, or into a folder of this user's for temporary files where that cannot be written.
    Raises ValueError for a text or file that cannot be used, OSError where something cannot be read, made or written.
    """
    if tokenizer != CharTokenizer.kind:
        raise ValueError(f"data.tokenizer={tokenizer!r} is not known; expected {CharTokenizer.kind!r}")
    if not storage.is_remote(path):
        local = storage.local_path(path)
        if not local.exists():
            raise FileNotFoundError(
                f"data.path={path} does not exist{'' if local.is_absolute() else f' in {Path.cwd()}'}; give a text or "
                "token file, a folder or a URI"
            )
        if local.is_dir():
            local = _text_of_folder(local)
        if not local.is_file():  # a fifo would wait for ever, and cannot be read twice
            raise ValueError(f"data.path={path} is no regular file; write the text into one first")
        with open(local, "rb") as file:
            if file.read(len(_MAGIC)) == _MAGIC:
                return open_tokens(local)
        path = str(local)
    name = path.rsplit("/", 1)[-1]
    stem = "".join(c if c.isascii() and c.isalnum() or c in "-_." else "_" for c in name)[:80]  # of 255 bytes
    stem += f"-{_hex(name)}.{tokenizer}{_FORMAT}-"
    name = f"{stem}{_hex(storage.identity(path))}.tokens"
    folder = _cache_folder(path, name)
    prepared = folder / name
    if (corpus := _cached(prepared)) is None:
        with _only_process(folder, path):
            if (corpus := _cached(prepared)) is None:  # else whoever held the lock before has made it
                if prepared.exists():
                    log.warning("%s is damaged: making it again", prepared)
                _prepare(path, prepared)
                for old in set(folder.glob(f"{stem}*.tokens")) - {prepared}:
                    old.unlink()  # of the text as it was before; who has it mapped keeps it
                corpus = open_tokens(prepared)
    return corpus


def _cached(path: Path) -> TokenFile | None:
    """The token file at `path`, or None where there is none that is whole."""
    with suppress(FileNotFoundError, ValueError):
        return open_tokens(path)
    return None


def _prepare(uri: str, path: Path) -> None:
    started, identity = time.monotonic(), storage.identity(uri)
    log.info("preparing %s", uri)
    tokenizer = CharTokenizer.from_text(read_text(uri))
    log.info("%d symbols: %s", tokenizer.vocab_size, ascii(tokenizer.chars))
    write_tokens(path, map(tokenizer.encode, read_text(uri, again=True)), tokenizer)
    if storage.identity(uri) != identity:
        path.unlink()
        raise OSError(f"data.path={uri} changed while it was read; start again when it is complete")
    log.info("prepared %s in %.1f s: %s", uri, time.monotonic() - started, path)


def _text_of_folder(folder: Path) -> Path:
    """`input.txt` in the folder, made by the folder's `prepare.py` if it is not there."""
    text, script = folder / "input.txt", folder / "prepare.py"
    cache = _cache_folder(str(text), script.name)
    unfinished = cache / "unfinished"  # a script that was killed may have left half a text
    if text.exists() and not unfinished.exists():
        return text
    if not script.exists():
        raise FileNotFoundError(f"data.path={folder} has neither input.txt nor prepare.py; give a text file or a URI")
    with _only_process(cache, str(text)) as lock:
        if not text.exists() or unfinished.exists():
            log.info("running %s", script)
            unfinished.touch()
            command = [sys.executable, str(script.resolve())]
            # It inherits the lock: where it outlives us nobody starts it a second time beside it.
            done = subprocess.run(
                command, capture_output=True, encoding="utf-8", errors="replace", check=False, pass_fds=[lock.fileno()]
            )
            if done.returncode or not text.exists():
                if not text.exists():
                    unfinished.unlink()  # a text put there by hand is whole
                said = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
                raise ChildProcessError(f"data.path={folder}: {script} made no input.txt: {said[-1]}")
            unfinished.unlink()
            log.info("made %s: %s", text, done.stdout.strip().rpartition("\n")[2])
    return text


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
    private = Path(tempfile.gettempdir(), f"mingpt-{os.getuid()}")
    private.mkdir(mode=0o700, exist_ok=True)
    if private.is_symlink() or private.stat().st_uid != os.getuid():
        raise PermissionError(f"{private} is not this user's and cannot be trusted; remove it or set TMPDIR")
    folder = private / _hex(path)
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def _only_process(folder: Path, work: str) -> Iterator[BinaryIO]:
    with ExitStack() as held:
        try:
            lock = held.enter_context(storage.lock(folder / "lock", patience=0))
        except BlockingIOError as holder:
            log.info("waiting for another process (%s) to prepare %s", holder, work)
            lock = held.enter_context(storage.lock(folder / "lock"))
        storage.remove_leftovers(folder)
        yield lock


def _hex(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


# --- feeding ----------------------------------------------------------------------------------------------------------


class Batches:
    """The training batches of any step, on `device`; the next step's is read by a thread while this one is in use."""

    def __init__(self, tokens: Tokens, grid: Grid, device: torch.device) -> None:
        assert len(tokens) == grid.n_tokens, "the grid is of these tokens"
        self._tokens, self._grid, self._device = tokens, grid, device
        # Pinning memory in a thread that has not chosen its device would open a second context, on device 0.
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
    return torch.from_numpy(tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64))
