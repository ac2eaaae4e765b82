"""From what `data.path` names to tokens on disk: texts and URIs are prepared or downloaded once per host.

Whichever process of a host comes first does it, while the others wait at a lock and not in a collective.
"""

import codecs
import hashlib
import itertools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mingpt import storage
from mingpt.faults import redact
from mingpt.tokenizer import CUT, BPETokenizer, CharTokenizer, Tokenizer, cut, normalize
from mingpt.tokens import (
    FORMAT,
    INDEX,
    Ids,
    TokenFile,
    is_token_file,
    open_folder,
    open_tokens,
    read_index,
    sha256,
    write_tokens,
)

log = logging.getLogger(__name__)

_TELL = 5.0  # seconds between two lines about a long text
_CHUNK = 1 << 22  # bytes read at once

Reject = Callable[[str], None]  # what is wrong and where: raises, or lets it be left out


def decode(chunks: Iterable[bytes], reject: Reject, start: int = 0) -> Iterator[str]:
    """The text of `chunks`: strict UTF-8, a byte-order mark at byte 0 dropped, CRLF and CR turned into LF.

    start: the first chunk's place in its file, in bytes. `reject` hears the first wrong byte of a chunk.
    """

    def texts() -> Iterator[str]:
        position, rest = start, b""  # which keeps the part of a character that a border cuts in two
        for chunk in itertools.chain(chunks, [b""]):
            raw = rest + chunk
            try:
                text, used = codecs.utf_8_decode(raw, "strict", not chunk)
            except UnicodeDecodeError as error:
                reject(f"not UTF-8 at byte {position + error.start} ({error.reason})")
                text, used = codecs.utf_8_decode(raw, "ignore", not chunk)
            yield text.removeprefix("\ufeff") if position == 0 else text
            position, rest = position + used, raw[used:]

    return filter(None, normalize(texts()))


def read_text(uri: str, verb: str = "reading", *, clock: Callable[[], float] = time.monotonic) -> Iterator[str]:
    """The text at `uri` in pieces, as `decode` has it; tells every few seconds of `clock` how far it is.

    Raises ValueError that names the first wrong byte, or says that there is no text; OSError if unreadable.
    """

    def chunks() -> Iterator[bytes]:
        position, started = 0, clock()
        told = started
        with storage.open_read(uri) as file:
            size = storage.size(uri)
            while chunk := file.read(_CHUNK):
                yield chunk
                position += len(chunk)
                if (now := clock()) - told >= _TELL:
                    told, rate = now, position / (now - started)
                    left = f" of {size / 1e6:.0f} MB, {(size - position) / rate:.0f} s left" if size else " MB"
                    log.info("%s: %.0f%s, %.1f MB/s", verb, position / 1e6, left, rate / 1e6)

    def reject(problem: str) -> None:
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


LEARNED = 1 << 26  # characters from which byte pairs are learned; more change little
_DISTINCT = 6_000_000  # bytes of distinct words after which no more are taken: each costs some 40 bytes of memory


def _to_learn_from(texts: Iterable[str]) -> Iterator[str]:
    words: set[str] = set()
    size = 0
    for text in itertools.islice(cut(texts), LEARNED // CUT):
        if size > _DISTINCT:  # natural English stays far below; a script without spaces gets here
            return
        new = {*text.split()} - words
        words |= new
        size += sum(len(word.encode()) for word in new)
        yield text


def open_corpus(path: str, tokenizer: str, vocab_size: int = 4096, cache_gb: float = 100.0) -> TokenFile:
    """The tokens of `data.path`: a token file, a prepared folder, a text, or a folder whose `prepare.py` makes either.

    A prepared folder or a text may be at a URI. A text is prepared once per content and tokenizer, as one document, by
    whichever process of this host comes first while the others wait, into `.mingpt-cache/` beside it, or below
    `~/.cache/mingpt/` where that cannot be written.
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
        if is_token_file(local):
            return open_tokens(local)
        path = str(local)
    name = path.rsplit("/", 1)[-1]
    stem = "".join(c if c.isascii() and c.isalnum() or c in "-_." else "_" for c in name)[:80]  # of 255 bytes
    kind = f"{tokenizer}{vocab_size}" if tokenizer == "bpe" else tokenizer
    stem += f"-{_hex(name)}.{kind}.{FORMAT}-"
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
    log.info("preparing %s", redact(uri))
    with storage.open_read(uri) as file:
        if file.read(3) == codecs.BOM_UTF8:
            log.warning("data.path=%s starts with a byte-order mark, which is left out", redact(uri))
    tokenizer = make_tokenizer(kind, vocab_size, read_text(uri))
    if isinstance(tokenizer, CharTokenizer):
        log.info("%d symbols: %s", tokenizer.vocab_size, ascii(tokenizer.chars))
    ids = _in_threads(tokenizer.encode, cut(read_text(uri, "encoding")))
    write_tokens(path, itertools.chain(ids, [end_of_document(tokenizer)]), tokenizer)
    if storage.identity(uri) != identity:
        path.unlink()
        raise OSError(f"data.path={uri} changed while it was read; start again when it is complete")
    log.info("prepared %s in %.1f s: %s", redact(uri), time.monotonic() - started, path)


def _in_threads(function: Callable[[str], Ids], texts: Iterable[str]) -> Iterator[Ids]:
    """As `map`, a few texts ahead and by some threads: tiktoken and numpy let others run."""
    threads = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        coming: deque[Future[Ids]] = deque()
        for text in texts:
            coming.append(pool.submit(function, text))
            if len(coming) > threads:
                yield coming.popleft().result()
        yield from (future.result() for future in coming)


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
        if (beside / name).exists() or _can_write(beside):
            return beside
        path = os.path.abspath(path)
    return _private_folder(_hex(path))


def _can_write(folder: Path) -> bool:
    """Whether the folder is there, or could be made, and takes a file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # rights alone do not tell: read-only mounts, network folders
        return True
    except OSError:
        return False


def _private_folder(name: str) -> Path:
    """A folder of this user's: in the home or, where that cannot be written, among the temporary files."""
    with suppress(RuntimeError):  # no home is known
        home = Path("~/.cache/mingpt").expanduser() / name  # temporary files may lie in memory, and these be large
        if _can_write(home):
            return home
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
            lock = held.enter_context(storage.lock(folder / ".lock", patience=0))
        except BlockingIOError as holder:
            log.info("waiting for another process (%s) to prepare %s", holder, work)
            lock = held.enter_context(storage.lock(folder / ".lock"))
        storage.remove_leftovers(folder)
        yield lock


def _hex(text: str) -> str:
    return sha256(text)[:16]


def _remote_folder(uri: str, cache_gb: float) -> TokenFile:
    """The prepared folder at `uri`, downloaded once per host and content.

    What was downloaded before and used least lately makes room. Raises OSError where it is not to be had, or other
    bytes than its index says; ValueError where it is larger than the cache may be.
    """
    uri = uri.rstrip("/")
    raw = storage.read_bytes(f"{uri}/{INDEX}")
    index = read_index(raw, f"{uri}/{INDEX}")
    needed = sum(shard.size for shard in index.train + index.val)
    if needed > cache_gb * 1e9:
        raise ValueError(
            f"data.path={uri} takes {needed / 1e9:.1f} GB, data.cache_gb={cache_gb:g} allows less; allow more"
        )
    cache = _private_folder("folders")
    folder = cache / _hex(raw.decode())
    with only_process(cache, uri):
        folder.mkdir(exist_ok=True)
        storage.remove_leftovers(folder)
        os.utime(folder)
        for old in sorted(cache.glob("*/"), key=lambda it: it.stat().st_mtime):
            used = sum(file.stat().st_size for file in cache.glob("*/*") if file.parent != folder)
            if old != folder and used + needed > cache_gb * 1e9:
                shutil.rmtree(old)  # who has it mapped keeps it
        for number, shard in enumerate(index.train + index.val, 1):
            if not (folder / shard.name).exists():
                log.info("downloading %s/%s (%d of %d)", redact(uri), shard.name, number, len(index.train + index.val))
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
