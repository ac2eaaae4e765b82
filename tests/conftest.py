"""Worlds of several ranks and whole runs for the tests, without sleeping and without the network."""

import concurrent.futures
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Few cores: a thread pool in each of several processes makes all of them wait for each other. Before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from mingpt.lease import Run, open_run
from mingpt.remote import open_store
from mingpt.snapshot import Manifest, Saver, Snapshots, look_around, read_manifests
from mingpt.storage import Store

ROOT = Path(__file__).parent.parent

# The tests are of what CPUs do, also where there is a GPU: tests/gpu_check.py is for those.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# A shell that runs the tests in the background ignores SIGINT, nohup SIGHUP, and every process started from here would
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

_context = multiprocessing.get_context("forkserver")  # a warm process that never ran a thread: a rank starts in no time
_context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed", "mingpt.trainer"])


@pytest.fixture(autouse=True)
def signals_are_left_as_they_were() -> Iterator[None]:
    """What one test does to the process's signals would be the failure of another."""

    def found() -> tuple[dict[int, object], set[signal.Signals | int]]:
        handlers = {
            number: signal.getsignal(number)
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        }
        return handlers, set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    before = found()
    yield
    assert found() == before


def find_run(out_dir: Path, store: Store) -> Run:
    """The run that a world of one process would go on with."""
    return open_run({"": look_around(out_dir, store)})


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _rank(
    rank: int, world_size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...], pipe: Any
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send((True, function(*args)))
    except Exception as error:  # noqa: BLE001  whatever it is, the test must see it
        pipe.send((False, f"{type(error).__name__}: {error}"))


def in_world(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """What `function(*args)` gives on each of `world_size` ranks; AssertionError with the text of what it raised there.

    Each is a process of its own with torchrun's environment; `function` is importable from its module.
    """
    port = free_port()
    ranks = []
    for rank in range(world_size):
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_rank, args=(rank, world_size, port, function, args, theirs))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    answers = []
    try:
        for _, pipe in ranks:
            assert pipe.poll(timeout), "a rank gave no answer in time"
            answers.append(pipe.recv())
        for process, _ in ranks:
            process.join(timeout)
            assert process.exitcode == 0
    finally:
        for process, _ in ranks:
            process.kill()
    raised = [f"rank {rank}: {error}" for rank, (fine, error) in enumerate(answers) if not fine]
    assert not raised, "\n".join(raised)
    return [result for _, result in answers]


class Runs:
    """Runs of train_gpt.py in a folder with a small text and a small config."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        (folder / "text.txt").write_text(text(), encoding="utf-8")
        (folder / "ram").mkdir()  # what is killed leaves nothing in /dev/shm
        (folder / "small.yaml").write_text(SMALL, encoding="utf-8")

    def command(self, *overrides: str, ranks: int = 1, launcher: str = "python") -> list[str]:
        run = [str(ROOT / "train_gpt.py"), "small.yaml", *overrides]
        if launcher == "torchrun":
            return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *run]
        return [sys.executable, *run]

    def start(self, *overrides: str, **kwargs: Any) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            self.command(*overrides, **kwargs), cwd=self.folder, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.started.append(process)
        return process

    def __call__(self, *overrides: str, expect: int = 0, timeout: float = 180, **kwargs: Any) -> str:
        done = subprocess.run(
            self.command(*overrides, **kwargs), cwd=self.folder, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=timeout, check=False,
        )  # fmt: skip
        assert done.returncode == expect, done.stdout
        return done.stdout

    def rows(self, name: str = "small") -> list[dict[str, Any]]:
        lines = (self.folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def losses(self, name: str = "small") -> dict[int, float]:
        return {row["step"]: row["train/loss"] for row in self.rows(name) if "train/loss" in row}

    def manifest(self, name: str = "small") -> dict[str, Any]:
        """The newest one."""
        paths = (self.folder / "runs" / name / "snapshots").glob("step-*.json")
        manifests = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        return max(manifests, key=lambda facts: (facts["generation"], facts["step"]))


SMALL = """
name: small
device: cpu
model: {preset: null, n_layer: 2, n_head: 2, n_embd: 16, block_size: 16, dropout: 0.1}
data: {path: text.txt}
optim: {warmup_steps: 5}
train: {max_steps: 40, global_batch_size: 12, micro_batch_size: 2, eval_interval: 20, num_threads: 1}
snapshot: {save_interval: 10}
elastic: {ram_dir: ram}
log: {interval: 1}
"""


def text(length: int = 6000) -> str:
    """A text with some structure, the same every time."""
    words = "the quick brown fox jumps over a lazy dog and runs to its den while rain falls".split()
    state, out = 1, []
    while sum(map(len, out)) < length:
        state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        out.append(words[(state >> 33) % len(words)] + ("\n" if state >> 60 == 0 else " "))
    return "".join(out)[:length]


def snapshots(folder: Path, run_id: str = "us", *settings: Any, **more: Any) -> Snapshots:
    return Snapshots(open_store(str(folder)), run_id, *settings, **more)


def manifests(folder: Path) -> list[Manifest]:
    return read_manifests(open_store(str(folder)))


def image_file(manifest: Manifest) -> Path:
    path = manifest.store.path(manifest.image_name)
    assert path is not None
    return path


def manifest_file(manifest: Manifest) -> Path:
    return image_file(manifest).with_suffix(".json")


def read_until_step(process: "subprocess.Popen[str]", step: int) -> str:
    """What a run says until it logs `step`, that line included."""
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        logged = re.match(r"step +(\d+)/", line)
        if logged and int(logged[1]) >= step:
            return "".join(said)
    raise AssertionError("the run ended before:\n" + "".join(said))


@pytest.fixture
def prompt_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every save is over before the next step: how busy this machine is says nothing of which steps are saved."""
    start = Saver.start

    def start_and_wait(saver: Saver, **what: Any) -> None:
        start(saver, **what)
        assert saver._saving
        concurrent.futures.wait([saver._saving])

    monkeypatch.setattr(Saver, "start", start_and_wait)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    runs = Runs(tmp_path)
    yield runs
    for process in runs.started:
        process.kill()
