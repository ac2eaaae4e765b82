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
import hashlib
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mingpt import corpus, documents, storage, tokens
from mingpt.documents import Piece, Reader, plan_pieces
from mingpt.faults import redact
from mingpt.grid import mix, split_point
from mingpt.tokenizer import CharTokenizer, Tokenizer, symbols, tokenizer_from_dict
from mingpt.tokens import Ids, Index, Shard

T = TypeVar("T")

_CHUNK = 1 << 22  # bytes read at once
_AHEAD = 256  # batches handed out: more only take time to look after
_TELL = 5.0  # seconds between two lines of progress


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

    @property
    def splits(self) -> tuple[str, ...]:
        """Those that the pieces are sorted into."""
        return ("train", "val") if self.val_by == "document" else ("train",)


Batch = tuple[Piece, ...]  # what a worker does at once: a piece, or several small ones


# --- the whole --------------------------------------------------------------------------------------------------------


def prepare(sources: Sequence[str], out: Path, settings: Settings, workers: int) -> Index:
    """Prepares the sources into `out`, or goes on with it; the index of what is there then.

    Raises ValueError for a wrong setting or input, OSError where something cannot be read or written.
    """
    out.mkdir(parents=True, exist_ok=True)
    with corpus.only_process(out, str(out)):
        ours = re.compile(re.escape(f"{out.resolve()}/") + r"(\.(work|lock)\b|index\.json$|(train|val)-\d+\.tokens$)")
        found = dict.fromkeys(file for source in sources for file in storage.find_files(source))
        files = [file for file in found if storage.is_remote(file) or not ours.match(os.path.realpath(file))]
        identities = [[file, storage.identity(file)] for file in files]
        plan = json.dumps([tokens.FORMAT, asdict(settings), documents.PIECE, identities])
        work = out / ".work"
        work.mkdir(exist_ok=True)
        if not (out / tokens.INDEX).exists():
            if not (work / "plan.json").exists() or (work / "plan.json").read_text(encoding="utf-8") != plan:
                for leftover in work.iterdir():
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
    batches = list(in_batches(pieces))
    np.memmap(work / "progress", np.int64, "w+", shape=len(pieces) or 1).flush()
    with _pool(workers) as pool:
        if not (work / "tokenizer.json").exists():
            learned = _learn(pool, batches, settings, work)
            storage.replace_file(work / "tokenizer.json", [json.dumps(learned.to_dict()).encode()])
        missing = [batch for batch in batches if not _record(work, batch).exists()]
        if len(missing) < len(batches):
            tell(f"going on: {len(batches) - len(missing)} of {len(batches)} parts are there")
        for _ in _each(pool, "encoding", missing, encode, settings, work):
            pass  # what it did is in its record
    for file, identity in json.loads(plan)[-1]:
        if storage.identity(file) != identity:
            raise OSError(f"{file} changed while it was read; start again when it is complete")
    total: Counter[str] = Counter()
    named = 0
    for batch in batches:
        counts, problems = json.loads(_record(work, batch).read_bytes())
        total.update(counts)
        for problem in problems[: documents.NAMED - named]:
            tell(f"left out: {problem}")
        named += len(problems)
    facts = {
        "plan": tokens.sha256(plan),
        "bytes": sum(piece.size for piece in pieces),
        "documents": total["documents"],
        "rejected": total["rejected"],
    }
    _join(batches, out, settings, total, facts)


def _learn(pool: ProcessPoolExecutor, batches: Sequence[Batch], settings: Settings, work: Path) -> Tokenizer:
    """The tokenizer: of all characters, or of the same share of every piece."""
    pieces = [piece for batch in batches for piece in batch]
    if settings.tokenizer != "gpt2" and any(piece.format == "ids" for piece in pieces):
        raise ValueError(f"--tokenizer={settings.tokenizer} cannot be learned from ids in a .bin; give gpt2")

    def texts() -> Iterator[str]:
        for piece in pieces:
            left = corpus.LEARNED // len(pieces)
            for text, ends in _reader(piece, settings, work).texts():
                yield text[:left] + "\n" * ends  # else the last word of a document and the next one's first are one
                left -= len(text)
                if left <= 0:
                    break

    if settings.tokenizer == "char":
        found = symbols(_each(pool, "reading", batches, symbols_of, settings, work))
        if not found:
            raise ValueError("the sources have no text")
        return CharTokenizer(found)
    return corpus.make_tokenizer(settings.tokenizer, settings.vocab_size, texts())


def _join(batches: Sequence[Batch], out: Path, settings: Settings, total: Counter[str], facts: dict[str, Any]) -> None:
    """Writes the shards, and then the index."""
    work = out / ".work"
    tokenizer = _tokenizer((work / "tokenizer.json").read_bytes())
    tell(f"writing {total['train'] + total['val']:,} tokens")
    streams = {
        split: _Stream([_part(work, batch, split) for batch in batches], tokenizer.dtype) for split in settings.splits
    }
    counts = {split: total[split] for split in ("train", "val")}
    if settings.val_by == "position":
        counts["train"] = split_point(total["train"], settings.val_fraction)
        counts["val"] = total["train"] - counts["train"]
        streams["val"] = streams["train"]  # validation is what training leaves
    train, val = (
        _write(out, split, streams[split], count, settings.shard_tokens, tokenizer) for split, count in counts.items()
    )
    if not train:
        raise ValueError("the sources have no text for training; give more, or a smaller --val-fraction")
    for old in {*out.glob("*.tokens")} - {out / shard.name for shard in train + val}:
        old.unlink()
    facts |= {"tokenizer": tokenizer.kind, "vocab_size": tokenizer.vocab_size}
    storage.replace_file(out / tokens.INDEX, [Index(train, val, facts).to_json()])


def _write(
    out: Path, split: str, stream: "_Stream", count: int, shard_tokens: int, tokenizer: Tokenizer
) -> tuple[Shard, ...]:
    """Writes the next `count` ids of the stream as token files of at most `shard_tokens`."""
    shards: list[Shard] = []
    for first in range(0, count, shard_tokens):
        path, n = out / f"{split}-{len(shards):05d}.tokens", min(shard_tokens, count - first)
        tokens.write_tokens(path, stream.take(n), tokenizer)
        with open(path, "rb") as file:
            shards.append(Shard(path.name, n, path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()))
    return tuple(shards)


class _Stream:
    """The ids in files, one after the other."""

    def __init__(self, paths: Iterable[Path], dtype: np.dtype[np.unsignedinteger]) -> None:
        def chunks() -> Iterator[Ids]:
            for path in paths:
                with open(path, "rb") as file:
                    while raw := file.read(_CHUNK):
                        yield np.frombuffer(raw, dtype)

        self._chunks, self._rest = chunks(), np.empty(0, dtype)

    def take(self, count: int) -> Iterator[Ids]:
        """The next `count` ids, which are there, in pieces."""
        while count:
            if not len(self._rest):
                self._rest = next(self._chunks)
            ids, self._rest = self._rest[:count], self._rest[count:]
            count -= len(ids)
            yield ids


# --- batches ----------------------------------------------------------------------------------------------------------


def in_batches(pieces: Iterable[Piece]) -> Iterator[Batch]:
    """The pieces in their order, small ones together: what each batch costs is milliseconds, and files are many."""
    batch: list[Piece] = []
    filled = 0
    for piece in pieces:
        size = piece.size or documents.PIECE  # of a remote file it may be unknown
        if batch and filled + size > documents.PIECE:
            yield tuple(batch)
            batch, filled = [], 0
        batch.append(piece)
        filled += size
    if batch:
        yield tuple(batch)


def encode(batch: Batch, settings: Settings, work: Path) -> None:
    """Writes the batch's ids into `work`, and last its record: what is counted, and the first problems."""
    tokenizer = _tokenizer((work / "tokenizer.json").read_bytes())
    end = corpus.end_of_document(tokenizer)
    total: Counter[str] = Counter()
    problems: list[str] = []
    with ExitStack() as stack:
        outputs = {split: stack.enter_context(open(_part(work, batch, split), "wb")) for split in settings.splits}
        for piece in batch:
            reader = _reader(piece, settings, work)
            counts = reader.counts
            if piece.format == "ids":
                parts = reader.ids(tokenizer)
            else:
                parts = ((tokenizer.encode(text), ends) for text, ends in reader.texts())
            for ids, ends in parts:
                # A text is one document in all its pieces, else each has its own place.
                place = (piece.start, counts["documents"]) if piece.format != "text" else (0, 0)
                val = "val" in outputs and mix(piece.file, *place) < settings.val_fraction * 2**64
                split = "val" if val else "train"
                outputs[split].write(ids.data)
                counts[split] += len(ids)
                if ends:
                    outputs[split].write(end.data)
                    counts[split] += len(end)
                    counts["documents"] += 1
            total.update(counts)
            problems += reader.problems
        for output in outputs.values():
            output.flush()
            os.fsync(output.fileno())
    storage.replace_file(_record(work, batch), [json.dumps([total, problems[: documents.NAMED]]).encode()])


def symbols_of(batch: Batch, settings: Settings, work: Path) -> str:
    """The characters of the batch."""
    return symbols(text for piece in batch for text, _ in _reader(piece, settings, work).texts())


def _reader(piece: Piece, settings: Settings, work: Path) -> Reader:
    return Reader(piece, settings.text_field, settings.bin_dtype, settings.on_error, work)


@functools.lru_cache(1)  # a worker has many pieces, and making one takes longer than a small piece
def _tokenizer(raw: bytes) -> Tokenizer:
    return tokenizer_from_dict(json.loads(raw))


def _part(work: Path, batch: Batch, split: str) -> Path:
    return work / f"{batch[0].number:06d}.{split}"


def _record(work: Path, batch: Batch) -> Path:
    return work / f"{batch[0].number:06d}.json"


# --- processes --------------------------------------------------------------------------------------------------------


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes for the pieces; where anything goes wrong they end at once and not with their pieces."""
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_end_with_parent)
    try:
        yield pool
    except BaseException:
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _each(
    pool: ProcessPoolExecutor,
    verb: str,
    batches: Sequence[Batch],
    function: Callable[[Batch, Settings, Path], T],
    settings: Settings,
    work: Path,
) -> Iterator[T]:
    """What `function` gives for each batch, in any order; tells how far it is."""
    started = told = time.monotonic()
    total = sum(piece.size for batch in batches for piece in batch)
    progress = np.memmap(work / "progress", np.int64, "r+")  # bytes read of each piece
    progress[:] = 0
    waiting, tasks = iter(batches), set[Future[T]]()
    try:
        while tasks := tasks | {
            pool.submit(function, batch, settings, work) for batch in islice(waiting, _AHEAD - len(tasks))
        }:
            done, tasks = wait(tasks, _TELL, FIRST_COMPLETED)
            yield from (task.result() for task in done)
            if (now := time.monotonic()) - told >= _TELL:
                read = int(progress.sum())
                told, rate = now, read / (now - started)
                left = f"{(total - read) / rate:.0f} s left" if rate else "not known how long"
                tell(f"{verb}: {read / 1e6:,.0f} of {total / 1e6:,.0f} MB, {rate / 1e6:.1f} MB/s, {left}")
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
    logging.basicConfig(format="%(message)s")
    logging.getLogger("mingpt").setLevel(logging.INFO)  # and not what others say of their work
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
    option = "" if facts["tokenizer"] == "char" else f" --data.tokenizer={facts['tokenizer']}"
    print(
        f"{arguments.out}: {train:,} tokens for training, {val:,} for validation, {facts['documents']:,} documents "
        f"from {facts['bytes']:,} bytes, {facts['rejected']:,} lines, rows or places left out; {facts['tokenizer']}, "
        f"vocabulary {facts['vocab_size']}; {len(index.train + index.val)} files, {time.monotonic() - started:.1f} s\n"
        f"train on it: python train_gpt.py --data.path={arguments.out}{option}"
    )
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m mingpt.prepare", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    # fmt: off
    add("sources", nargs="+", metavar="SOURCE", help="a file, folder, pattern or URI")
    add("--out", type=_local, required=True, metavar="DIR", help="folder for the result, for --data.path")
    add("--tokenizer", required=True, choices=["char", "gpt2", "bpe"], help="by character, GPT-2's, or learned")
    add("--vocab-size", type=int, metavar="N", help="tokens that bpe learns, <|endoftext|> included (4096)")
    add("--val-fraction", type=float, default=0.1, metavar="F", help="share for validation (%(default)s)")
    add("--val-by", choices=["position", "document"], default="position",
        help="validation is the last tokens, or whole documents, chosen by a hash of their places (%(default)s)")
    add("--workers", type=int, default=os.cpu_count(), metavar="N",
        help="processes; no matter for the result (%(default)s)")
    add("--text-field", default="text", metavar="NAME", help="of JSON lines and parquet (%(default)s)")
    add("--bin-dtype", choices=["uint16", "uint32"], help="of the ids in a .bin, which --tokenizer made")
    add("--shard-tokens", type=int, default=100_000_000, metavar="N", help="most tokens in a file (%(default)s)")
    add("--on-error", choices=["stop", "skip"], default="stop",
        help="what to do with what cannot be used: name the first and stop, or leave it out. Counted are lines, rows, "
             "and places in a file (bytes or ids near each other are one); the first ones are named (%(default)s)")
    # fmt: on
    arguments = parser.parse_args(argv)
    if arguments.vocab_size is not None and arguments.tokenizer != "bpe":
        parser.error(f"--vocab-size is for --tokenizer=bpe; {arguments.tokenizer} has its own")
    if arguments.vocab_size is None:
        arguments.vocab_size = 4096
    if not 0 <= arguments.val_fraction < 1:
        parser.error(f"--val-fraction={arguments.val_fraction}: expected at least 0 and below 1")
    for name, least in (("vocab_size", 257), ("workers", 1), ("shard_tokens", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name.replace('_', '-')}={getattr(arguments, name)}: expected at least {least}")
    return arguments


def _local(folder: str) -> Path:
    if storage.is_remote(folder):
        raise argparse.ArgumentTypeError(f"{folder} is remote; write into a local folder, then copy it")
    return storage.local_path(folder)


def tell(line: str) -> None:
    print(redact(line), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
