"""Trains a small model while workers and nodes are killed, paused, taken away and added, and says whether it noticed.

    python -m mingpt.chaos [--faults N] [--steps N] [--nodes N] [--nproc-per-node N] [--seed S] [--folder F]

Every node is a `python -m mingpt.launch` with a folder of its own for its files and its images in memory, which a node
that is lost takes along; the snapshots are in a folder for all. The run is in exact mode: its last state must have the
sha256 of a process that nothing happened to. On Linux, for it finds processes in /proc.
"""

import argparse
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mingpt.elastic import STOP_EXIT_CODE
from mingpt.metrics import duration, read_metrics
from mingpt.snapshot import read_manifests
from mingpt.storage import LocalStore

ROOT = Path(__file__).resolve().parents[1]  # of the checkout
PATIENCE_SECONDS = 120.0  # for the next step after a fault
SAVE_INTERVAL = 50  # steps from one durable snapshot to the next
SETTINGS = (
    "--name=chaos", "--device=cpu", "--train.reduction=exact", "--train.num_threads=1", "--model.preset=null",
    "--model.n_layer=2", "--model.n_head=2", "--model.n_embd=64", "--model.block_size=64", "--model.dropout=0.1",
    "--train.global_batch_size=24", "--train.micro_batch_size=4", "--train.eval_interval=0", "--log.interval=1",
    f"--snapshot.save_interval={SAVE_INTERVAL}", "--elastic.ram_dir=memory", "--elastic.timeout_seconds=15",
)  # fmt: skip


class Node:
    """A machine of the cluster: a launcher, its agent and its workers, in a folder of their own."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self.folder, self._command, self._rows_read = folder, command, 0
        self.start()

    def start(self) -> None:
        (self.folder / "memory").mkdir(parents=True, exist_ok=True)
        with open(self.folder / "log.txt", "ab") as log:
            self.launcher = subprocess.Popen(
                self._command, cwd=self.folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def alive(self) -> bool:
        return self.launcher.poll() is None

    def agents(self) -> list[int]:
        return [pid for pid in children(self.launcher.pid) if name_of(pid) == "mingpt-agent"]

    def workers(self) -> list[int]:
        return [worker for agent in self.agents() for worker in children(agent)]

    def kill(self) -> None:
        for pid in [*self.workers(), *children(self.launcher.pid), self.launcher.pid]:
            send(pid, signal.SIGKILL)
        self.launcher.wait()

    def rows(self) -> list[dict[str, Any]]:
        """The steps that its metrics.jsonl tells of and that were not read yet."""
        rows = [row for row in read_metrics(self.folder / "runs/chaos/metrics.jsonl") if "train/loss" in row]
        fresh, self._rows_read = rows[self._rows_read :], len(rows)
        return fresh


@dataclass
class Fault:
    """What was done to the run, and what it cost."""

    kind: str
    step: int  # the last one that was known
    struck: float  # seconds, as time.time
    bound: int = 0  # steps that it may cost
    nodes: int = 0  # afterwards
    landed: bool = False
    lost: int = 0  # steps that were done again
    seconds: float = math.nan  # until the first new step; nan: the run ended first

    def __str__(self) -> str:
        told = "" if self.landed else "  (did not land)"
        return (
            f"{self.kind:<14} {self.step:>8} {self.nodes:>6} {self.lost:>11} {self.bound:>8} {self.seconds:>9.1f}{told}"
        )


class Cluster:
    """Nodes that come and go, and the steps that their run has told of."""

    def __init__(self, folder: Path, command: Sequence[str], most: int, rng: random.Random) -> None:
        self.nodes: list[Node] = []
        self.rows: list[dict[str, Any]] = []  # of every step that was done, in order of time
        self._folder, self._command, self._most, self._rng = folder, command, most, rng
        self._born = 0
        self._done: Counter[str] = Counter()
        self._durable = 0  # the step of the newest snapshot when the power failed

    def join(self) -> bool:
        self.nodes.append(Node(self._folder / f"node{self._born}", self._command))
        self._born += 1
        return True

    @property
    def step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    def has_done(self, step: int) -> bool:
        return self.step >= step

    def read(self) -> None:
        self.rows += sorted((row for node in self.nodes for row in node.rows()), key=lambda row: float(row["time"]))

    def wait(self, enough: Callable[[], bool]) -> bool:
        """Reads on until it is `enough`; False when the patience is over, or no node is left."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            over = time.monotonic() > deadline or not any(node.alive for node in self.nodes)
            self.read()  # after that look: what the last node said before it ended counts
            if enough():
                return True
            if over:
                return False
            time.sleep(0.1)  # a look reads all rows anew, on cores that are the training's

    def strike(self) -> Fault:
        """Does one fault, at random of those that were done least, and waits until the run goes on."""
        self.nodes = [node for node in self.nodes if node.alive]
        faults = self._possible()
        least = min(self._done[kind] for kind in faults)
        kind = self._rng.choice(sorted(kind for kind in faults if self._done[kind] == least))
        self._done[kind] += 1
        deed, costs = faults[kind]
        known, generation = len(self.rows), self.rows[-1]["generation"] + (kind != "worker paused")
        fault = Fault(kind, self.step, time.time())
        fault.landed = deed()
        fault.nodes = len(self.nodes)

        def first() -> dict[str, Any] | None:
            fresh = (row for row in self.rows[known:] if row["time"] > fault.struck)
            return next((row for row in fresh if row["generation"] >= generation), None)

        if self.wait(lambda: first() is not None) and (row := first()):
            before = [other for other in self.rows if other["time"] < row["time"]]
            fault.lost = max(0, before[-1]["step"] + 1 - row["step"])
            if kind == "power fails":
                fault.bound = max(0, before[-1]["step"] - self._durable)
            elif costs:  # what was done in the last second, or in the last step
                fault.bound = 1 + sum(other["time"] > before[-1]["time"] - 1 for other in before)
            fault.seconds = row["time"] - fault.struck
        return fault

    # The faults: each says whether it hit what it was meant for

    def _possible(self) -> dict[str, tuple[Callable[[], bool], bool]]:
        """What can strike now, and whether it may cost a step."""
        faults = {
            "worker killed": (self._kill_worker, True),
            "worker paused": (self._pause_worker, False),
            "agent killed": (self._kill_agent, True),
            "power fails": (self._power_fails, True),
        }
        if len(self.nodes) > 1:
            faults |= {"node lost": (self._lose_node, True), "node leaves": (self._leave, False)}
        if len(self.nodes) < self._most:
            faults["node joins"] = (self.join, False)
        return faults

    def _kill_worker(self) -> bool:
        return send(self._any(self._rng.choice(self.nodes).workers()), signal.SIGKILL)

    def _kill_agent(self) -> bool:
        return send(self._any(self._rng.choice(self.nodes).agents()), signal.SIGKILL)

    def _pause_worker(self) -> bool:
        worker = self._any(self._rng.choice(self.nodes).workers())
        paused = send(worker, signal.SIGSTOP)
        time.sleep(self._rng.uniform(0.2, 3))
        return send(worker, signal.SIGCONT) and paused

    def _lose_node(self) -> bool:
        node = self._rng.choice(self.nodes)
        node.kill()
        self.read()
        self.nodes.remove(node)
        with suppress(FileNotFoundError):  # as one who looked on would know it, for mingpt.report
            shutil.copy(node.folder / "runs/chaos/metrics.jsonl", self._folder / f"{node.folder.name}-lost.jsonl")
        shutil.rmtree(node.folder)
        return True

    def _leave(self) -> bool:
        node = self._rng.choice(self.nodes)
        sent = send(node.launcher.pid, signal.SIGTERM)
        code = node.launcher.wait(PATIENCE_SECONDS)
        self.read()
        self.nodes.remove(node)
        return sent and code == STOP_EXIT_CODE

    def _power_fails(self) -> bool:
        for node in self.nodes:
            node.kill()
        saved = read_manifests(LocalStore(self._folder / "snapshots"))
        self._durable = saved[0].facts["step"] if saved else 0
        for node in self.nodes:
            shutil.rmtree(node.folder / "memory")
            node.start()
        return True

    def _any(self, pids: Sequence[int]) -> int:
        return self._rng.choice(sorted(pids)) if pids else 0


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def send(pid: int, number: signal.Signals) -> bool:
    """Whether there was a process (0: none) to send the signal to."""
    try:
        if pid:
            os.kill(pid, number)
        return bool(pid)
    except ProcessLookupError:
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m mingpt.chaos`: faults at random on a small run, and what they cost."""
    parser = argparse.ArgumentParser("python -m mingpt.chaos", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--faults", type=int, default=7, metavar="N", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="of the run (%(default)s)")
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="at most (%(default)s)")
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="workers on each (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the faults (%(default)s)")
    parser.add_argument("--folder", type=Path, metavar="F", help="for all files, which stay; else a temporary one")
    options = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C does: no node outlives this
        signal.signal(number, lambda *_: sys.exit(1))
    if min(options.faults, options.steps, options.nodes, options.nproc_per_node) < 1:
        parser.error("--faults, --steps, --nodes, --nproc-per-node: give 1 or more")
    if options.folder:
        if options.folder.exists() and any(options.folder.iterdir()):
            parser.error(f"--folder={options.folder} is not empty")
        options.folder.mkdir(parents=True, exist_ok=True)
        code = chaos(options, options.folder.resolve())
        files = " ".join(sorted(str(file) for file in options.folder.glob("**/*.jsonl") if "calm" not in file.parts))
        print(f"see it: python -m mingpt.report {files}")
        return code
    with tempfile.TemporaryDirectory(prefix="mingpt-chaos-") as folder:
        return chaos(options, Path(folder))


def chaos(options: argparse.Namespace, folder: Path) -> int:
    """Trains without faults and with them; 0 where both come to the same bits, within the bound."""
    train = [
        str(ROOT / "train_gpt.py"), *SETTINGS, f"--train.max_steps={options.steps}",
        f"--data.path={ROOT / 'data/shakespeare'}",
    ]  # fmt: skip
    launch = [
        sys.executable, "-m", "mingpt.launch", f"--nnodes=1:{options.nodes}",
        f"--nproc-per-node={options.nproc_per_node}", f"--rdzv-endpoint={folder / 'rendezvous'}", *train,
        f"--snapshot.uri={folder / 'snapshots'}",
    ]  # fmt: skip
    print(f"{options.steps} steps in one process without faults, to compare with", flush=True)
    calm = folder / "calm"
    (calm / "memory").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, *train], cwd=calm, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        print(done.stdout[-2000:], file=sys.stderr)
        return 1

    rng = random.Random(options.seed)
    cluster = Cluster(folder, launch, options.nodes, rng)
    faults: list[Fault] = []
    print(f"{'fault':<14} {'at step':>8} {'nodes':>6} {'steps lost':>11} {'at most':>8} {'seconds':>9}", flush=True)
    began = time.time()
    try:
        for _ in range(options.nodes):
            cluster.join()
        apart = max(1, options.steps // (options.faults + 1))  # so that all of them fall into the run
        for number in range(1, options.faults + 1):
            due = number * apart - rng.randrange(math.ceil(apart / 2))
            if not cluster.wait(partial(cluster.has_done, due)) or cluster.has_done(options.steps):
                break
            faults.append(cluster.strike())
            print(faults[-1], flush=True)
        cluster.wait(partial(cluster.has_done, options.steps))
        codes = [node.launcher.wait(PATIENCE_SECONDS) for node in cluster.nodes]
        seconds = time.time() - began
    except subprocess.TimeoutExpired:
        codes, seconds = [1], time.time() - began
    finally:
        logs = [(node.folder / "log.txt").read_text(encoding="utf-8", errors="replace") for node in cluster.nodes]
        for node in cluster.nodes:
            node.kill()

    print()
    for kind in sorted({fault.kind for fault in faults}):
        of_it = [fault for fault in faults if fault.kind == kind]
        waits = sorted(fault.seconds for fault in of_it if not math.isnan(fault.seconds)) or [math.nan]
        print(
            f"{kind:<14} {len(of_it):>4} times, {sum(fault.lost for fault in of_it):>4} steps lost, going on after "
            f"{statistics.median(waits):.1f} s (median), {waits[-1]:.1f} s (most)"
        )
    times = [row["perf/step_seconds"] for row in cluster.rows]
    useful = options.steps * statistics.median(times) if times else 0.0
    bound = options.steps + sum(fault.bound for fault in faults)
    print(
        f"{len(cluster.rows)} steps were done for {options.steps} (at most {bound}), in {duration(seconds)}, of which "
        f"{useful / seconds:.0%} were useful"
    )
    ours, theirs = state_in(folder / "snapshots", options.steps), state_in(calm / "runs/chaos/snapshots", options.steps)
    within = len(cluster.rows) <= bound and all(fault.lost <= fault.bound for fault in faults)
    finished = bool(codes) and not any(codes)
    print(f"the weights and moments at the end, sha256   {ours}\nof the process without faults                {theirs}")
    if ours == theirs and within and finished:
        print("equal: the run did not notice")
        return 0
    print(
        f"NOT AS IT SHOULD BE: {'' if ours == theirs else 'other bits; '}{'' if within else 'too many steps lost; '}"
        f"{'' if finished else f'exit codes {codes}'}"
    )
    print(*(log[-3000:] for log in logs), sep="\n---\n", file=sys.stderr)
    return 1


def state_in(folder: Path, step: int) -> str:
    """The state_sha256 of the snapshot of `step`."""
    found = [manifest.facts for manifest in read_manifests(LocalStore(folder)) if manifest.facts["step"] == step]
    return str(found[0]["state_sha256"]) if found else "none"


if __name__ == "__main__":
    sys.exit(main())
