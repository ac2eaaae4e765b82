"""Who am I among the ranks, which device and backend, and the few collectives that the trainer needs.

The only reader of the environment (torchrun's variables, or the same ones set by hand).
"""

import ctypes
import os
import signal
import sys
import time

_STARTED = os.getpid(), time.time()  # before torch is loaded


def die_with_parent() -> None:
    """Asks the kernel to end this worker with its agent: an orphan would train on and write into the run. On Linux."""
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = int(os.environ.pop("MINGPT_AGENT", os.getppid()))  # not for this worker's own children
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked; under plain torchrun perhaps before we looked
        os.kill(os.getpid(), signal.SIGKILL)


# Both before torch is loaded, which takes seconds in which an agent can die, and reads the spin count.
die_with_parent()
# GNU OpenMP's threads wait for each other by spinning; with any other load on the cores that costs up to 25 times the
# work (seen: 400 instead of 9,000 tokens/s), a short spin at most 8 % (on idle cores).
_SPINS_FOUND = os.environ.get("GOMP_SPINCOUNT", "300000")  # GNU OpenMP's own number
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

import json
import logging
import netrc
import platform
import random
import re
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist

# Before there is a process group: its functions take the one that is there by default, and what DDP imports later loads
# it. So kept alive, gloo's threads outlive the interpreter, and one exit in some hundred aborts.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

log = logging.getLogger(__name__)

T = TypeVar("T")

_BEAT_SECONDS = 1.0
# The longest work of one rank that others wait for in a collective: a download, a first compile. Whether the ranks live
# is the beat's to see.
_LONGEST_WORK = timedelta(minutes=30)
_START_PATIENCE = 10  # times the time-out: one host may have a text to prepare, or no core to spare


@dataclass(frozen=True)
class World:
    """This process among all: torchrun's numbers, and the device that is its own."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def heads_node(self) -> bool:
        """Whether this rank speaks for the ranks that share its memory and its disks."""
        return self.local_rank == 0 or self.is_main


def device_type(device: str) -> str:
    """`cuda`, `mps` or `cpu` for the setting `device` (`auto` takes the first that is there).

    MPS is left out of `auto` when there are several ranks: it has no collectives.
    """
    if device != "auto":
        return device.split(":")[0]
    if torch.cuda.is_available():
        return "cuda"
    if torch.backends.mps.is_available() and _number("WORLD_SIZE", 1) == 1:
        return "mps"
    return "cpu"


def locate(device: str = "auto") -> World:
    """Reads who this process is; talks to nobody. Raises ValueError for a device that is not there."""
    rank, world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    local_rank, local_world_size = _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK={rank} is outside 0 .. WORLD_SIZE-1={world_size - 1}: set both, or use torchrun")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if world_size > 1 and missing:
        raise ValueError(f"WORLD_SIZE={world_size} needs {', '.join(missing)} in the environment too: use torchrun")
    kind = device_type(device)
    if kind == "cuda":
        count = torch.cuda.device_count()
        index = int(device.split(":")[1]) if ":" in device else local_rank
        if index >= count:
            cure = (
                f"start at most {count} processes here, or set device=cpu" if count else "set device=auto or device=cpu"
            )
            raise ValueError(
                f"device={device}: local rank {local_rank} needs cuda:{index}, but this machine has {count} CUDA "
                f"devices; {cure}"
            )
        if world_size > 1 and ":" in device:
            raise ValueError(f"device={device}: with several ranks each takes its own; set device=cuda")
        torch.cuda.set_device(index)
        return World(rank, local_rank, world_size, local_world_size, torch.device("cuda", index))
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device={device}: this machine has no MPS; set device=auto or device=cpu")
    if kind == "mps" and world_size > 1:
        raise ValueError(f"device={device}: MPS trains in one process, not in {world_size}; set device=cpu")
    return World(rank, local_rank, world_size, local_world_size, torch.device(kind))


def rank() -> int:
    """This process's rank, for who must know it before the world does; 0 where the environment makes no sense."""
    try:
        return _number("RANK", 0)
    except ValueError:
        return 0


def hardware(device: torch.device) -> str:
    """What equal bits depend on besides the run's description: library, processor, its instruction set."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu("model name") or platform.machine()
    return f"torch {torch.__version__}, {name}, {torch.backends.cpu.get_cpu_capability()}"


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of the forward pass for the setting `dtype`; one that the device lacks is refused by ValueError.

    `auto` is bfloat16 where the hardware multiplies matrices in it (on CPUs: AMX or AVX-512 BF16; elsewhere it is
    emulated and slower), else float32.
    """
    if dtype == "auto":
        return torch.bfloat16 if _has_fast_bfloat16(device) else torch.float32
    if dtype == "float16" and device.type != "cuda":
        raise ValueError(f"dtype=float16 needs a CUDA device, but this is {device.type}; set dtype=auto")
    if dtype == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ValueError(f"dtype=bfloat16 is not supported by {torch.cuda.get_device_name(device)}; set dtype=auto")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]


# Of dense matrix products, in TFLOP/s: bfloat16 and float16, TF32, float32 (NVIDIA's data sheets). The first part of a
# name that fits counts. Other devices, parts of one (MIG), and those that have no such products, are not known.
_PEAKS = {
    "B200": (2250.0, 1125.0, 75.0),
    "H200 NVL": (835.5, 417.5, 60.0),
    "H200": (989.5, 494.5, 67.0),
    "H100 NVL": (835.5, 417.5, 60.0),
    "H100 PCIe": (756.0, 378.0, 51.0),
    "H100": (989.5, 494.5, 67.0),
    "A100": (312.0, 156.0, 19.5),
    "L40S": (362.0, 183.0, 91.6),
    "A40": (149.7, 74.8, 37.4),
    "L4": (121.0, 60.0, 30.3),
    "A10G": (70.0, 35.0, 31.5),
    "RTX 4090": (165.2, 82.6, 82.6),
    "RTX 3090": (71.0, 35.6, 35.6),
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s that the device could do in matrix products of `dtype`; None where that is not known, as of any CPU."""
    if device.type != "cuda":
        return None
    return _peak_of(torch.cuda.get_device_name(device), dtype, torch.get_float32_matmul_precision() != "highest")


def _peak_of(name: str, dtype: torch.dtype, tf32: bool) -> float | None:
    less = r"(?! D\b|.*(?:Laptop|MIG))"
    row = next((peaks for part, peaks in _PEAKS.items() if re.search(rf"\b{part}\b{less}", name)), None)
    return row and 1e12 * row[0 if dtype != torch.float32 else 1 if tf32 else 2]


def memory_bytes(device: torch.device) -> int:
    """The memory of the device, of all of this machine for CPUs and MPS."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _has_fast_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    flags = _cpu("flags").split() if device.type == "cpu" else []
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _cpu(field: str) -> str:
    """A field of the first processor in /proc/cpuinfo; empty where there is none."""
    if not os.path.exists("/proc/cpuinfo"):
        return ""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return next((line.partition(":")[2].strip() for line in file if line.startswith(field)), "")


def set_threads(num_threads: int, world: World) -> int:
    """Sets the CPU threads of this rank's operators (0: the cores of this machine over its ranks) and returns it."""
    if num_threads == 0:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        num_threads = max(1, cores // world.local_world_size)
    torch.set_num_threads(num_threads)
    return num_threads


def environment_of_others() -> dict[str, str]:
    """The environment for a process that is compared with ours: without what this module set for torch."""
    return {**os.environ, "GOMP_SPINCOUNT": _SPINS_FOUND}


def keep_freed_memory() -> None:
    """Lets glibc keep what a step frees for the next one: else the kernel clears the same pages for each step anew.

    Seen: some 5 % of a step. Blocks of more than 32 MB go back as ever: kept ones would not always be found again.
    """
    wanted = {"GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    if sys.platform == "linux" and not wanted and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # musl has none
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 32 * 2**20)  # glibc's most; it would get there by itself, but for the next line
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def free_kept_memory() -> None:
    """Gives back what `keep_freed_memory` kept."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


class UnlikeError(ValueError):
    """The ranks do not describe the same run."""


def connect(world: World, hello: Mapping[str, object], timeout_seconds: float) -> None:
    """Makes the process group, after all ranks have shown that they describe the same run.

    `hello` is compared through the store first, since ranks that differ in device would hang in their first
    collective. Raises UnlikeError, the same text on every rank, that names each difference; ConnectionError where the
    others do not come in time, ten times `timeout_seconds`.
    """
    if world.world_size == 1:
        return
    try:
        _connect(world, hello, timedelta(seconds=timeout_seconds * _START_PATIENCE))
    except RuntimeError as error:  # of the store, or of gloo, which has no kind of its own
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = (str(error).splitlines() or [""])[0]
        raise ConnectionError(
            f"rank {world.rank} of {world.world_size} did not meet the others at {place} ({reason}): are all of them "
            "started, with the same address? elastic.timeout_seconds sets how long to wait (ten times that)"
        ) from error


def _connect(world: World, hello: Mapping[str, object], timeout: timedelta) -> None:
    store, _, _ = next(rendezvous("env://", world.rank, world.world_size, timeout=timeout))
    store.set_timeout(timeout)
    store = PrefixStore(_formation(world, store, timeout), store)
    mine = {"hostname": socket.gethostname(), **hello}
    store.set(f"hello/{world.rank}", json.dumps(mine))
    # One rank compares and all obey: W readers of W greetings would be W * W reads of the store.
    if world.is_main:
        problems = []
        for rank in range(1, world.world_size):
            theirs = json.loads(store.get(f"hello/{rank}"))
            problems += [
                f"{key} is {theirs.get(key)} on rank {rank} ({theirs['hostname']}) but {value} on rank 0"
                for key, value in hello.items()
                if theirs.get(key) != value
            ]
        store.set("verdict", "; ".join(problems))
    verdict = store.get("verdict").decode()
    if verdict:
        raise UnlikeError(f"the ranks do not describe the same run: {verdict}; start all of them alike")
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=world.rank,
        world_size=world.world_size,
        timeout=max(timeout, _LONGEST_WORK),
        device_id=world.device if world.device.type == "cuda" else None,
    )


def _formation(world: World, store: Store, timeout: timedelta) -> str:
    """A word that only this formation of the world uses.

    torchrun's agents lend every attempt of a job the same store, in which the addresses of the dead still stand. So
    rank 0's fresh word goes to each rank under a fresh word of that rank's own, until all have it.
    """
    mine = secrets.token_hex(8)
    if not world.is_main:
        store.set(f"mingpt/arrived/{world.rank}", mine)
        word = store.get(f"mingpt/word/{mine}").decode()
        store.set(f"mingpt/{word}/met/{mine}", "")
        return f"mingpt/{word}"
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        # Who stands here may be of an older formation: look again until all have answered.
        arrived = [store.get(f"mingpt/arrived/{rank}").decode() for rank in range(1, world.world_size)]
        for theirs in arrived:
            store.set(f"mingpt/word/{theirs}", mine)
        if store.check([f"mingpt/{mine}/met/{theirs}" for theirs in arrived]):
            return f"mingpt/{mine}"
        time.sleep(0.02)
    raise dist.DistStoreError("not all ranks arrived in time")


class Beat:
    """A tiny all-reduce every second, in a thread and a group of its own: whether all ranks are there.

    It goes on in a long evaluation, a first compile or a download, so its time-out can be short where those of the
    collectives cannot. One that fails means that a process has ended, was stopped, or cannot be reached: the others
    could only wait for it, so this process ends too, with code 1, that its agent may form the world anew.
    """

    def __init__(self, world: World, timeout_seconds: float) -> None:
        self._world = world
        self._timeout = timeout_seconds
        self._now, self._leaving, self._lost = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)
        if world.world_size > 1:
            try:
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
            except RuntimeError as error:
                raise ConnectionError(f"rank {world.rank} did not meet the others: {error}") from error
            self._thread.start()

    def is_lost(self) -> bool:
        """Whether a rank is gone; for who has seen a collective fail, and wants to know why."""
        self._now.set()
        return self._thread.is_alive() and self._lost.wait(3 * _BEAT_SECONDS)

    def close(self) -> None:
        """Ends it, together with the other ranks' where they come to this within a few seconds."""
        self._leaving.set()
        self._now.set()
        if self._thread.is_alive() and not self._lost.is_set():
            self._thread.join(3 * _BEAT_SECONDS)

    def _run(self) -> None:
        leaving = 0
        try:
            while leaving < self._world.world_size:
                flag = torch.tensor([int(self._leaving.is_set())])
                dist.all_reduce(flag, group=self._group)
                leaving = int(flag)
                if leaving:
                    time.sleep(0.01)  # until all of them are
                elif self._now.wait(_BEAT_SECONDS):
                    time.sleep(0.01)
        except RuntimeError as error:
            self._lost.set()
            if self._leaving.is_set():  # the others were faster
                return
            reason = " ".join(str(error).split())
            log.warning(
                "error: rank %d of %d: another worker has ended, or gave no sign of life for "
                "elastic.timeout_seconds=%g: leaving, so that the world forms anew without it (%s)",
                self._world.rank, self._world.world_size, self._timeout, reason[:120],
            )  # fmt: skip
            if self._leaving.wait(_BEAT_SECONDS):  # the main thread is not stuck: it gives back what it holds
                time.sleep(_BEAT_SECONDS)
            os._exit(1)


def leave() -> None:
    """Ends the process group. The caller drops its DistributedDataParallel first: alive at exit, gloo aborts."""
    if dist.is_initialized():
        dist.destroy_process_group()


def barrier(world: World) -> None:
    """Waits for all ranks, on gloo: NCCL's barrier would occupy the device."""
    if world.world_size > 1:
        dist.all_reduce(torch.zeros(1, dtype=torch.int64))


def all_reduce_sum(tensor: Tensor, world: World) -> None:
    """Sums `tensor` over all ranks, in place."""
    if world.world_size > 1:
        dist.all_reduce(tensor)


def any_rank(world: World, flag: bool) -> bool:
    """Whether any rank's `flag` is true."""
    count = torch.tensor([int(flag)])
    all_reduce_sum(count, world)
    return bool(count)


def broadcast(tensor: Tensor, world: World, source: int = 0) -> None:
    """Gives every rank the `tensor` of rank `source`, in place."""
    if world.world_size > 1:
        dist.broadcast(tensor, src=source)


def broadcast_json(value: object, world: World, source: int = 0) -> object:
    """Gives every rank the `value` of rank `source` (JSON, not pickle: nothing that can execute crosses the wire)."""
    if world.world_size == 1:
        return value
    data = _json_bytes(value)
    length = torch.tensor([len(data)])
    dist.broadcast(length, src=source)
    if world.rank != source:
        data = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(data, src=source)
    return _from_json_bytes(data)


def gather_json(world: World, value: object) -> list[Any]:
    """Every rank's `value` (JSON), on every rank, in the order of the ranks."""
    if world.world_size == 1:
        return [value]
    data = _json_bytes(value)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world.world_size)]
    dist.all_gather(lengths, torch.tensor([len(data)]))
    longest = max(map(int, lengths))  # all pieces have one size on the wire
    pieces = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
    dist.all_gather(pieces, torch.nn.functional.pad(data, (0, longest - len(data))))
    return [_from_json_bytes(piece[: int(length)]) for piece, length in zip(pieces, lengths, strict=True)]


def _json_bytes(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_json_bytes(data: Tensor) -> object:
    return cast(object, json.loads(data.numpy().tobytes()))


def decide(world: World, question: Callable[[], T], source: int = 0) -> T:
    """Rank `source` answers (anything that JSON holds) and every rank gets its answer, or raises its error.

    That is a ValueError or an OSError; elsewhere it names the rank, if that is not rank 0.
    """
    outcome, error = _ask(question) if world.rank == source else ({}, None)
    outcome = cast(dict[str, Any], broadcast_json(outcome, world, source))
    _raise_any([outcome | {"place": ""} if source == 0 else outcome], error)
    return cast(T, outcome["answer"])


def gather(world: World, question: Callable[[], T]) -> list[T]:
    """Every rank answers (anything that JSON holds) and gets all the answers, or every rank raises.

    That is a ValueError or an OSError; a rank without an error of its own names all those that have one.
    """
    outcome, error = _ask(question)
    outcomes = gather_json(world, outcome)
    _raise_any(outcomes, error)
    return [outcome["answer"] for outcome in outcomes]


def _ask(question: Callable[[], object]) -> tuple[dict[str, Any], Exception | None]:
    """The answer, or the error, as others get to know of it; the error itself."""
    try:
        return {"answer": question()}, None
    except (ValueError, OSError) as error:
        where = f"rank {rank()} ({socket.gethostname()}): "
        return {"error": str(error), "place": where, "system": isinstance(error, OSError)}, error


def _raise_any(outcomes: Sequence[Mapping[str, Any]], mine: Exception | None) -> None:
    if mine:
        raise mine
    if failed := [outcome for outcome in outcomes if "error" in outcome]:
        text = "; ".join(outcome["place"] + outcome["error"] for outcome in failed)
        raise OSError(text) if any(outcome["system"] for outcome in failed) else ValueError(text)


def hosts(world: World) -> list[str]:
    """The host of each rank."""
    return gather_json(world, socket.gethostname())


def make_deterministic(compile: bool = False) -> None:
    """Makes torch, and with `compile` its compiler, choose algorithms that give the same bits every time.

    Before the first use of CUDA.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses determinism without it
    if compile:
        torch.use_deterministic_algorithms(True)
    else:  # the same without an import of the compiler, two seconds of every start
        torch.set_deterministic_debug_mode("error")
    # Else every new tensor is filled with nan first, lest somebody reads what was never written: up to 1 % of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class Control:
    """One small all-reduce per step, started before a step's work and read after it, so that no step waits for it.

    The flags of all ranks are summed: whatever one rank wants, every rank reads after the same step. int64 on gloo.
    """

    def __init__(self, world: World, names: Sequence[str]) -> None:
        self._world = world
        self._names = list(names)
        self._flags = torch.zeros(len(self._names), dtype=torch.int64)
        self._work: dist.Work | None = None

    def start(self, **flags: int) -> None:
        """Sends this rank's flags on their way; every rank must call it the same number of times."""
        assert self._work is None, "read() must come between two start()"
        self._flags = torch.tensor([int(flags.get(name, 0)) for name in self._names])
        if self._world.world_size > 1:
            self._work = cast(dist.Work, dist.all_reduce(self._flags, async_op=True))

    def read(self) -> dict[str, int]:
        """The sums that the last `start` brought (zeros before the first)."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return dict(zip(self._names, self._flags.tolist(), strict=True))


def seed_all(seed: int, device: torch.device) -> None:
    """Seeds torch's generators, of the CPU and of the devices of this kind, alone: for every cell of a step."""
    seed &= 2**63 - 1
    if device.type == "cpu":  # torch.manual_seed would note down a whole stack for a CUDA that never starts: 1.4 ms
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def seed_process(seed: int) -> None:
    """Seeds python's and numpy's generators too, which are the user's: once at the start."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed & (2**63 - 1))


def describe(world: World) -> str:
    """The world in one phrase for the start line: ranks, hosts, restarts, endpoint."""
    if world.world_size == 1:
        return f"1 process on {socket.gethostname()}"
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    endpoint = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    here = f"{world.world_size} ranks, {world.local_world_size} of them on this host"
    return f"{here}, restart {restart}, endpoint {endpoint}"


def started() -> float:
    """When this process began (seconds, as time.time); one that was forked with all code loaded begins now."""
    pid, when = _STARTED
    return when if pid == os.getpid() else time.time()


def restart_count() -> int:
    """How often this worker's agent has restarted its workers."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0)


def launch_folder() -> Path | None:
    """The folder of `mingpt.launch` for notes between it and its workers; None where it did not start us."""
    folder = os.environ.get("MINGPT_LAUNCH")
    return Path(folder) if folder else None


def wandb_server() -> tuple[str, bool]:
    """The URL of wandb's server, and whether there is a key for it: in the environment, or where `wandb login` puts it.

    That is `.netrc`; one that cannot be read holds none.
    """
    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").rstrip("/")
    if os.environ.get("WANDB_API_KEY"):
        return url, True
    for path in (os.environ.get("NETRC"), os.path.expanduser("~/.netrc"), os.path.expanduser("~/_netrc")):
        try:
            if path and netrc.netrc(path).authenticators(urlsplit(url).hostname or ""):
                return url, True
        except (OSError, UnicodeDecodeError, netrc.NetrcParseError):
            continue
    return url, False


def leave_process(code: int) -> NoReturn:
    """Ends this process; under an agent, which waits to start the next, without the half second that torch takes.

    At once also where another thread is left: one that waits for a dead server would hold the exit up.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or threading.active_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def end_agent() -> None:
    """Ends torchrun's agent of this node, where it would only start this worker again."""
    if _number("TORCHELASTIC_MAX_RESTARTS", 0) > 0:
        os.kill(os.getppid(), signal.SIGTERM)


def launch_warnings() -> list[str]:
    """One line, with the cure, where settings of torchrun will hurt as soon as a node comes or goes. On Linux."""
    agent = Path(f"/proc/{os.getppid()}/cmdline")
    if "TORCHELASTIC_RUN_ID" not in os.environ or launch_folder() or not agent.exists():
        return []
    nodes = _option(agent.read_bytes().decode(errors="replace").split("\0"), "--nnodes")
    least, _, most = (nodes or "1").partition(":")
    if not most or least == most:
        return []
    wrong = []
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        wrong.append("a node that joins hangs the job, as TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is not set on each")
    if _number("TORCHELASTIC_MAX_RESTARTS", 0) == 0:
        wrong.append("one lost worker ends it, as --max-restarts is 0")
    if not _option(agent.read_bytes().decode(errors="replace").split("\0"), "--rdzv-endpoint"):
        wrong.append("other hosts train in a world of their own, as --rdzv-endpoint is not given")
    cure = f"take python -m mingpt.launch --nnodes={nodes} --rdzv-endpoint=HOST:PORT in place of torchrun"
    return [f"warning: --nnodes={nodes} will not do what it says: {', and '.join(wrong)}; {cure}"] if wrong else []


def _option(words: Sequence[str], name: str) -> str:
    """The value of a command line's option, by its name with hyphens; empty where it is not given."""
    for i, word in enumerate(words):
        key, equals, value = word.partition("=")
        if key.replace("_", "-") == name:
            return value if equals else "".join(words[i + 1 : i + 2])
    return ""


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal():
        raise ValueError(f"the environment says {name}={text!r}, which is no number: unset it, or use torchrun")
    return int(text)
