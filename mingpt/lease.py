"""Whose run this is, and who may write it: run.json names the run, the lease its one writer.

Both lie beside the snapshots, run.json also in the run's folder. The lease is a small object that its holder writes
anew every second or so (its beat). It needs no atomic create, which stores differ in: whoever writes looks again, and
of two the higher (generation, nonce) stays.
"""

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mingpt.storage import LocalStore, Store

log = logging.getLogger(__name__)

BEAT_SECONDS = 2.0
PATIENCE_SECONDS = 7.0  # without a beat, after which a holder counts as gone
_LEASE, _RECORD = "lease.json", "run.json"
_FACTS = {"run_id": str, "generation": int, "saved_in": str, "began": float}  # of a run, in its record


class TakenOverError(RuntimeError):
    """This writer is no longer the run's: a later start is."""


@dataclass(frozen=True)
class Run:
    """A run's identity and the number of this formation of the world.

    `saved_in` is the store that it was saved in once, empty where nothing tells of one: a world that finds nothing
    there has lost it, and may not start over. `began` is the unix time of its first start.
    """

    run_id: str
    generation: int
    saved_in: str = field(default="", compare=False)
    began: float = field(default_factory=time.time, compare=False)


@dataclass(frozen=True)
class Holder:
    """Who holds the lease: a process (`started`: when, in kernel ticks), and what tells its rights from others."""

    generation: int
    nonce: str
    machine: str
    pid: int
    started: int
    beat: int = 0  # how often it was written

    @property
    def rights(self) -> tuple[int, str]:
        """The greater of two holders' stays."""
        return self.generation, self.nonce

    def is_gone(self) -> bool:
        """Whether it is a process of this machine that has ended; False where that cannot be known."""
        return self.machine == _machine() and _started(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.machine.split()[0]}"


class Lease:
    """The right of one process, among all that may look, to write the snapshots in `store`.

    `wait` for it, `take` it before the first write, `check` it before every one, `release` it at the end. `clock` and
    `sleep` count in seconds.
    """

    def __init__(
        self,
        store: Store,
        generation: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._clock = clock
        self._sleep = sleep
        self._mine = Holder(generation, secrets.token_hex(8), _machine(), os.getpid(), _started(os.getpid()))
        self._turn = threading.Lock()  # the beat's thread and the writer's
        self._end = threading.Event()
        self._lost: Holder | None = None

    def wait(self) -> None:
        """Waits until nobody has the lease: not at all where its holder has ended, else for `PATIENCE_SECONDS`.

        Raises ValueError where it is in use: its beat was seen to advance.
        """
        theirs = read_holder(self._store)
        if theirs is not None and not theirs.is_gone():
            log.info("%s holds the lease of %s; looking whether it is alive", theirs, self._store.uri)
            deadline = self._clock() + PATIENCE_SECONDS
            while (now := read_holder(self._store)) == theirs and self._clock() < deadline and not theirs.is_gone():
                self._sleep(BEAT_SECONDS / 4)
            if now is not None and now != theirs:
                raise ValueError(f"{self._store.uri} is in use by another start of this run ({now})")

    def take(self) -> None:
        """Takes the lease, and keeps it by a beat until `release`. Raises TakenOverError where another was faster."""
        self._write()
        self.check()
        threading.Thread(target=self._beat, name="lease", daemon=True).start()

    def check(self, beat: bool = False) -> None:
        """Raises TakenOverError where a later start took the lease; an earlier one's claim is overwritten."""
        with self._turn:
            theirs = read_holder(self._store)
            if theirs is not None and theirs.rights > self._mine.rights:
                self._lost = theirs
            elif self._end.is_set():
                pass  # it is given back already
            elif beat or theirs is None or theirs.rights != self._mine.rights:
                self._write()
        self.raise_if_lost()

    def raise_if_lost(self) -> None:
        """`check` by what is known already, without a look at the store."""
        if self._lost:
            raise TakenOverError(
                f"{self._store.uri} was taken over by a later start of this run ({self._lost}, generation "
                f"{self._lost.generation}; this is {self._mine.generation}): the training stops here"
            )

    def release(self) -> None:
        """Ends the beat, and gives the lease back if it is still ours; if that fails, the next start waits a little."""
        self._end.set()
        try:
            with self._turn:
                theirs = read_holder(self._store)
                if theirs is not None and theirs.rights == self._mine.rights:
                    self._store.delete(_LEASE)
        except (OSError, ValueError) as error:
            log.warning("the lease of %s is not given back: %s", self._store.uri, error)

    def _beat(self) -> None:
        failed = False
        while not self._end.wait(BEAT_SECONDS):
            try:
                self.check(beat=True)
                failed = False
            except TakenOverError:
                return
            except (OSError, ValueError) as error:  # whatever a store raises: without a beat another would take the run
                if not failed:
                    log.warning("the lease of %s is not renewed: %s", self._store.uri, error)
                failed = True

    def _write(self) -> None:
        self._mine = Holder(**{**asdict(self._mine), "beat": self._mine.beat + 1})
        self._store.put(_LEASE, [json.dumps(asdict(self._mine)).encode()])


def read_holder(store: Store) -> Holder | None:
    """Who holds the lease of the run whose snapshots `store` has."""
    try:
        content = store.read(_LEASE)  # what it raises else is no proof that nobody has it
    except FileNotFoundError:
        return None
    try:
        holder = Holder(**json.loads(content))
        numbers, texts = (holder.generation, holder.pid, holder.started, holder.beat), (holder.nonce, holder.machine)
        sound = all(type(it) is int for it in numbers) and all(type(it) is str for it in texts)
        return holder if sound else None
    except (ValueError, TypeError):  # a damaged one, which nobody renews
        return None


def look_for_runs(out_dir: Path, store: Store | None, saved: Iterable[tuple[str, int]]) -> dict[str, Any]:
    """What `out_dir` and `store` (None: not looked into) tell of runs, as JSON for `open_run`; writes nothing.

    saved: the (run id, generation) of the snapshots in `store`. Raises OSError where something cannot be read.
    """
    records: list[dict[str, Any]] = []
    damaged: list[str] = []
    for place in (LocalStore(out_dir), store):
        try:
            if place and (record := read_record(place)):
                records.append({"uri": place.uri, **{key: record[key] for key in _FACTS}})
        except ValueError as error:
            damaged.append(str(error))
    holder = read_holder(store) if store else None
    return {
        "records": records,
        "damaged": damaged,
        "saved": sorted(set(saved)),
        "store": store.uri if store else "",
        "held": holder.generation if holder else 0,
    }


def open_run(nodes: Mapping[str, Mapping[str, Any]]) -> Run:
    """The run that `nodes` (`look_for_runs`, by their names) tell of, or a new one; its next generation.

    Raises ValueError where they tell of different runs, naming who does of which.
    """
    found: dict[str, list[str]] = {}  # run id -> where
    for name, node in nodes.items():
        for record in node["records"]:
            found.setdefault(record["run_id"], []).append(f"{record['uri']}{name and f' of {name}'}")
    if not found:
        for name, node in nodes.items():
            for run_id in sorted({run_id for run_id, _ in node["saved"]}):
                found.setdefault(run_id, []).append(f"{node['store']}{name and f' of {name}'}")
    damaged = [f"{name and f'{name}: '}{damage}" for name, node in nodes.items() for damage in node["damaged"]]
    if damaged and not found:
        raise ValueError(damaged[0])
    for damage in damaged:
        log.warning("going by what else tells of the run: %s", damage)
    if len(found) > 1:
        # The fewest first: most likely they are the ones that do not belong.
        rivals = sorted(found.items(), key=lambda item: len(item[1]))
        told = "; ".join(
            f"run {run_id} in {', '.join(places[:3])}{' and others' if places[3:] else ''}" for run_id, places in rivals
        )
        raise ValueError(
            f"there are different runs: {told}; move away what does not belong, or give another --name, out_dir or "
            "snapshot.uri"
        )
    run_id = next(iter(found), secrets.token_hex(8))
    records = [record for node in nodes.values() for record in node["records"]]
    saved_in = [record["saved_in"] for record in records]
    saved_in += [node["store"] for node in nodes.values() if run_id in [other for other, _ in node["saved"]]]
    known = max(last_generation(run_id, node) for node in nodes.values())
    began = min((record["began"] for record in records), default=time.time())
    return Run(run_id, 1 + known, next(filter(None, saved_in), ""), began)


def last_generation(run_id: str, node: Mapping[str, Any]) -> int:
    """The highest one of the run, or of the lease, that `node` (`look_for_runs`) tells of; 0 for none."""
    known: list[int] = [node["held"], *(generation for other, generation in node["saved"] if other == run_id)]
    known += [record["generation"] for record in node["records"] if record["run_id"] == run_id]
    return max(known)


def record_run(run: Run, out_dir: Path, store: Store | None, facts: Mapping[str, object]) -> None:
    """Writes `run.json` into `store`, then into `out_dir`, which is made."""
    content = json.dumps({**asdict(run), **facts}, indent=1).encode()
    for place in (store, LocalStore(out_dir)):
        if place:
            place.put(_RECORD, [content])


def read_record(place: Store) -> dict[str, Any] | None:
    """The `run.json` there, None where there is none. Raises ValueError for one that names no run."""
    try:
        content = place.read(_RECORD)
    except FileNotFoundError:
        return None
    try:
        record = json.loads(content)
    except ValueError as error:
        raise ValueError(
            f"{place.uri}/{_RECORD} is damaged ({error}): restore it, or move the folder away to start over"
        ) from error
    # Of an older version: the images know when the run began.
    record = {"saved_in": "", "began": time.time(), **record} if isinstance(record, dict) else {}
    if not all(type(record.get(key)) is kind for key, kind in _FACTS.items()):
        raise ValueError(f"{place.uri}/{_RECORD} names no run: restore it, or move the folder away to start over")
    return record


def _machine() -> str:
    """This host, since it was started, and the processes that see each other on it."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        if os.path.exists(path):
            parts.append(os.readlink(path) if os.path.islink(path) else Path(path).read_text(encoding="ascii").strip())
    return " ".join(parts)


def _started(pid: int) -> int:
    """When the process started, in the kernel's ticks, so that a later one of the same number is told apart.

    0 where there is none, or a system without /proc does not tell.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
