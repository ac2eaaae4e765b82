"""Nodes that come and go under `python -m mingpt.launch`, as two agents on loopback; and what it is made of."""

import argparse
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Runs, free_port

from mingpt.elastic import STOP_EXIT_CODE, Notes
from mingpt.launch import (
    _SIGNALS,
    LASTING_SECONDS,
    STARTS,
    Launcher,
    _answers,
    _is_taken,
    _parse,
    _tell_loop,
    main,
)

# Without an end: the training stops where the test says, and a run of just so many steps must come to the same bits.
ENDLESS = {
    "train.reduction": "exact", "train.max_steps": "1000000", "optim.schedule": "constant",
    "snapshot.save_interval": "1", "train.eval_interval": "0",
}  # fmt: skip


def overrides(**settings: str) -> list[str]:
    """ENDLESS with other settings, in which `__` stands for the dot."""
    changed = ENDLESS | {key.replace("__", "."): value for key, value in settings.items()}
    return [f"--{key}={value}" for key, value in changed.items()]


class Node:
    """A launcher, and what it and its workers have said so far."""

    def __init__(self, nodes: "Nodes", prefix: tuple[str, ...] = (), **settings: str) -> None:
        command = [*prefix, sys.executable, "-m", "mingpt.launch", "--nnodes=1:3", *nodes.meeting]
        command += [str(ROOT / "train_gpt.py"), "small.yaml", *overrides(**settings)]
        self.process = subprocess.Popen(
            command, cwd=nodes.runs.folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        nodes.runs.started.append(self.process)
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, args=(nodes.said,), daemon=True)
        self._reader.start()

    def _read(self, together: list[str]) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.said.append(line)
            together.append(line)

    def agent(self) -> int:
        (pid,) = children(self.process.pid)
        assert Path(f"/proc/{pid}/comm").read_text() == "mingpt-agent\n"
        return pid

    def workers(self) -> list[int]:
        return children(self.agent())

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.end()

    def end(self) -> int:
        """Its exit code, when it and all that wrote into its pipe have ended: nothing is left over."""
        code = self.process.wait(90)
        self._reader.join(10)
        assert not self._reader.is_alive(), "a process outlives its launcher"
        return code


class Nodes:
    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.said: list[str] = []
        self.meeting = [f"--rdzv-endpoint=127.0.0.1:{free_port()}"]

    def start(self, prefix: tuple[str, ...] = (), **settings: str) -> Node:
        return Node(self, prefix, **settings)

    def wait(self, pattern: str, since: int = 0, seconds: float = 90) -> int:
        """Until a line after the first `since` ones matches; how many lines were said by then."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for i, line in enumerate(self.said[since:], since):
                if re.search(pattern, line):
                    return i + 1
            time.sleep(0.02)
        raise AssertionError(f"{pattern!r} was not said:\n" + "".join(self.said[since:]))

    def wait_for_world(self, ranks: int, since: int = 0) -> int:
        """Until a world of so many ranks has made ten steps."""
        world = "1 process on" if ranks == 1 else f"{ranks} ranks"
        said = self.wait(rf"generation \d+: {world}", since)
        for _ in range(10):
            said = self.wait(r"^step +\d+/", said)
        return said

    def check(self, name: str = "small") -> list[int]:
        """The oracle, once all have stopped: the bits of an undisturbed run. The steps lost at each new formation."""
        rows = [row for row in self.runs.rows(name) if "train/loss" in row]
        steps: dict[int, list[int]] = {}
        for row in rows:
            steps.setdefault(row["generation"], []).append(row["step"])
        lost = [before[-1] + 1 - after[0] for before, after in itertools.pairwise(steps.values())]
        assert all(made == list(range(made[0], made[-1] + 1)) for made in steps.values())
        assert min(lost, default=0) >= 0 and len(rows) == rows[-1]["step"] + sum(lost), "no step but those made again"
        for i, line in enumerate(self.said):
            if at := re.search(r"going on at step (\d+)", line):
                saved = [int(it[1]) for it in map(re.compile(r"^saved .*/step-(\d+)").search, self.said[:i]) if it]
                assert int(at[1]) >= saved[-1], "past the last one that was kept"
        end = self.runs.manifest(name)
        self.runs(*overrides(name="calm", snapshot__save_interval="0", train__max_steps=str(end["step"])))
        assert end["state_sha256"] == self.runs.manifest("calm")["state_sha256"]
        return lost


@pytest.fixture
def nodes(runs: Runs) -> Iterator[Nodes]:
    yield Nodes(runs)
    for process in runs.started:
        process.kill()


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds its processes in /proc")


def test_join_kill_leave_and_a_bad_newcomer(nodes: Nodes) -> None:
    first = nodes.start()
    nodes.wait(r"^step +5/")
    bad = nodes.start(optim__learning_rate="0.5")
    second = nodes.start()
    joined = nodes.wait_for_world(2)
    assert bad.end() == 2
    (refusal,) = [line for line in bad.said if line.startswith("error: ")]
    assert "optim.learning_rate was 0.001 in this run and is 0.5 now" in refusal
    os.kill(second.workers()[0], signal.SIGKILL)
    again = nodes.wait_for_world(2, joined)
    assert second.stop() == STOP_EXIT_CODE
    nodes.wait_for_world(1, again)
    assert first.stop(signal.SIGINT) == STOP_EXIT_CODE

    lost = nodes.check()
    assert len(lost) == 3, "the bad one never was in the world"
    assert lost[0] == lost[2] == 0, "a join and a leave cost no step"
    events = [row for row in nodes.runs.rows() if row.get("event") == "recovery"]
    assert len(events) == 3
    for event in events:
        parts = [
            event[key]
            for key in ("noticed", "stopped", "rendezvous", "start", "restored", "first_step")
            if key in event
        ]
        assert event["seconds"] == pytest.approx(sum(parts), abs=0.1)
    assert [row for row in nodes.runs.rows() if "elastic/recovery_seconds" in row]


def test_a_crash_loop_ends_with_the_message(nodes: Nodes) -> None:
    node = nodes.start(optim__learning_rate="1e9", optim__warmup_steps="0")
    assert node.end() == 1
    assert re.match("error: 3 failures in a row without a new step; .*rank 0 failed first: the gradient", node.said[-1])
    assert sum("going on at step" in line or "starting at step" in line for line in node.said) == 3


def test_dry_run_says_what_would_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    script = str(ROOT / "train_gpt.py")
    assert (
        main(["--nnodes=1:4", "--nproc-per-node=2", "--rdzv-endpoint=127.0.0.1:29400", "--dry-run", script, "a b"]) == 0
    )
    line = capsys.readouterr().out
    assert line.startswith("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=1:4 --nproc-per-node=2 ")
    assert "is_host=1,last_call_timeout=1," in line and line.endswith(f"{script} 'a b'\n")
    assert main(["--nnodes=4", "--rdzv-endpoint=192.0.2.1:29400", "--dry-run", script]) == 0
    assert "is_host=0" in capsys.readouterr().out
    assert main(["--nnodes=4", "--rdzv-endpoint=/shared/meet", "--dry-run", script]) == 0
    assert "store_type=file" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nnodes=1:2"], "needs --rdzv-endpoint=HOST:PORT, the same on all nodes"),
        (["--nnodes=3:2", "--rdzv-endpoint=a:1"], "expected N or MIN:MAX"),
        (["--nnodes=2", "--rdzv-endpoint=a"], "expected HOST:PORT"),
        (["--nproc-per-node=0"], "expected a number, from 1, or auto, gpu, cpu, xpu"),
        (["--nproc-per-node=1"], "no such file"),
    ],
)
def test_wrong_use_is_told(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*words, str(ROOT / "train_gpt.py") if "no such" not in expected else "missing.py"])
    assert stopped.value.code == 2
    assert expected in capsys.readouterr().err


# In an interpreter of its own, which is deaf for five seconds: as in a collective, no Python handler runs.
DEAF = """
import ctypes, signal, sys, threading, time
from mingpt.elastic import StopSignals
with StopSignals(grace_seconds=float(sys.argv[1])) as signals:
    def look():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        sent = time.monotonic()
        while not signals.wanted:
            time.sleep(0.0005)
        print(time.monotonic() - sent, flush=True)
    threading.Timer(0.1, look).start()
    libc, deadline = ctypes.CDLL(None), time.monotonic() + float(sys.argv[2])
    libc.pthread_mutex_lock(lock := ctypes.create_string_buffer(64))
    libc.pthread_mutex_timedlock(lock, (ctypes.c_long * 2)(int(time.time() + float(sys.argv[2])), 0))
"""


def deaf(grace: float, seconds: float) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", DEAF, str(grace), str(seconds)], cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


def test_a_signal_is_seen_where_no_handler_runs() -> None:
    seen = min(float(deaf(60, 2).stdout) for _ in range(2))  # of a machine that is busy with others, the best
    assert seen < 0.01


def test_a_step_that_takes_too_long_after_a_signal_is_abandoned() -> None:
    started = time.monotonic()
    done = deaf(0.2, 30)
    assert done.returncode == STOP_EXIT_CODE
    assert "elastic.grace_seconds=0.2" in done.stderr
    assert time.monotonic() - started < 10


def test_failures_and_starts_count_until_a_step_is_new(tmp_path: Path) -> None:
    for restart in range(3):
        notes = Notes(tmp_path, restart)
        notes.began(time.time())
        notes.step(1)
        notes.stepped()
        notes.step(2)  # again and again
        notes.fail(0, 1, f"at step 3, {restart}")
        notes.fail(1, 1, "since rank 0 is gone")
    assert [failure["message"] for failure in Notes(tmp_path).failures().values()] == [
        "at step 3, 0", "at step 3, 1", "at step 3, 2",
    ]  # fmt: skip
    assert Notes(tmp_path).starts() == 2, "the first one made a step"
    notes = Notes(tmp_path, 3)
    notes.began(time.time())
    notes.step(2)
    notes.stepped()
    assert set(Notes(tmp_path).failures()) == {0, 1, 2} and Notes(tmp_path).starts() == 3
    notes.step(3)
    assert not Notes(tmp_path).failures() and not Notes(tmp_path).starts()


def test_a_world_that_grows_does_not_start_in_vain(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    for world_size in range(1, 20):
        notes.began(time.time(), world_size)
    assert notes.starts() == 1
    for world_size in (18, 19, 18):
        notes.began(time.time(), world_size)
    assert notes.starts() == 4, "one that shrinks and grows again may be a loop"


def test_a_note_that_goes_while_it_is_looked_for_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda *_, **__: True)  # as a worker's first step takes it away just then
    assert Notes(tmp_path).failures() == {} and Notes(tmp_path).verdict() is None


@pytest.mark.parametrize(
    ("failures", "starts", "expected"),
    [
        (3, 3, "3 failures in a row without a new step; in the last one that failed rank 2 failed first: of 2"),
        (1, 11, "11 starts in a row without a new step; in the last one that failed rank 0 failed first: of 0"),
        (0, 11, "11 starts in a row without a new step; see above what ended them"),
    ],
)
def test_a_loop_is_told(failures: int, starts: int, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _tell_loop([{"rank": i, "message": f"of {i}"} for i in range(failures)], starts) == 1
    assert capsys.readouterr().err == f"error: {expected}\n"


def launcher(folder: Path) -> Launcher:
    """One of a script that needs no torch."""
    (folder / "script.py").touch()
    return Launcher(_parse([str(folder / "script.py")]), folder)


def test_a_file_serves_for_the_next_run_too(tmp_path: Path) -> None:
    words = [f"--rdzv-endpoint={tmp_path / 'meet'}", str(tmp_path / "script.py")]
    (tmp_path / "script.py").touch()
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "mingpt.launch", *words], cwd=ROOT, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0 and "joining again" not in done.stderr, done.stderr


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_signal_that_comes_while_an_agent_starts_is_not_lost(tmp_path: Path, when: str) -> None:
    node = launcher(tmp_path)
    node._join = lambda *_: time.sleep(60)  # type: ignore[method-assign, assignment]
    fork = node._fork

    def slowly(*args: Any) -> Any:
        if when == "before":
            os.kill(os.getpid(), signal.SIGTERM)
        agent = fork(*args)
        if when == "after":
            os.kill(os.getpid(), signal.SIGTERM)
        return agent

    node._fork = slowly  # type: ignore[method-assign]
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    environment = dict(os.environ)
    try:
        started = time.monotonic()
        assert node.run() == STOP_EXIT_CODE
        assert time.monotonic() - started < 20
    finally:
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert node._child and not node._child.is_alive()


def test_a_rendezvous_answers_and_a_listener_that_is_paused_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert _answers(f"127.0.0.1:{store.port}")
    monkeypatch.setattr("mingpt.launch.ANSWER_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        assert _is_taken(endpoint) and not _answers(endpoint)
    assert not _is_taken(endpoint) and not _answers(endpoint)


@pytest.mark.parametrize("outcome", ["ends", "is silent", "was to stop"])
def test_an_agent_whose_rendezvous_is_silent_is_left_unless_it_has_ended(
    tmp_path: Path, outcome: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node = launcher(tmp_path)
    agent = node._fork("agent", lambda: time.sleep(0.5 if outcome == "ends" else 60))  # type: ignore[arg-type]

    def asked(_: str) -> bool:
        if outcome == "ends":
            agent.join()
        return False

    if outcome == "was to stop":
        node._stopping_since = time.monotonic()
    monkeypatch.setattr("mingpt.launch.QUIET_SECONDS", 0.1)
    monkeypatch.setattr("mingpt.launch._answers", asked)
    code = node._watch("far:1")
    said = "the rendezvous at far:1 does not answer\n"
    expected = {"ends": (0, ""), "is silent": (None, said), "was to stop": (STOP_EXIT_CODE, said)}
    assert (code, capsys.readouterr().err) == expected[outcome]
    assert not agent.is_alive()


def test_a_look_at_the_node_that_is_killed_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = launcher(tmp_path)
    node._look = lambda: os.kill(os.getpid(), 9)  # type: ignore[method-assign, assignment, return-value]
    assert node._preflight() == 1
    assert capsys.readouterr().err == "error: the look at this node was ended by signal 9\n"


def test_gpus_that_are_not_there_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    node = launcher(tmp_path)
    node._options.nproc_per_node, node._main = "gpu", lambda: 0
    node._fork("agent", node._join, "", True)
    assert node._watch() == 2
    assert capfd.readouterr().err == "error: --nproc-per-node=gpu: Cuda is not available; give a number, or auto\n"


@pytest.mark.parametrize(("end", "code"), [(signal.SIGTERM, STOP_EXIT_CODE), (signal.SIGKILL, 1)])
def test_a_stop_that_is_cut_short_does_not_say_that_all_is_kept(tmp_path: Path, end: signal.Signals, code: int) -> None:
    node = launcher(tmp_path)
    agent, node._stopping_since = node._fork("agent", lambda: time.sleep(60)), time.monotonic()  # type: ignore[arg-type]
    assert agent.pid
    os.kill(agent.pid, end)
    assert node._watch() == code


@pytest.mark.parametrize("trains", [False, True])
def test_a_node_that_waits_says_so(
    tmp_path: Path, trains: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mingpt.launch.PATIENCE_SECONDS", 0.1)
    node = launcher(tmp_path)
    if trains:
        Notes(tmp_path).began(time.time())
    node._fork("agent", lambda: time.sleep(0.5))  # type: ignore[arg-type]
    assert node._watch() == 0
    assert capsys.readouterr().err.count("this node waits: fewer nodes are here than --nnodes=1 needs") == (not trains)


def test_a_node_that_waits_outlives_many_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of which takes its agent with it, after a minute or an hour."""
    node, ends = launcher(tmp_path), iter([None] * 3 * STARTS + [0])
    clock = itertools.count(0, 2 * LASTING_SECONDS)
    monkeypatch.setattr(node, "_fork", lambda *_: argparse.Namespace(exitcode=1))
    monkeypatch.setattr(node, "_watch", lambda *_: next(ends))
    monkeypatch.setattr("mingpt.launch.time", argparse.Namespace(monotonic=lambda: next(clock), sleep=lambda _: None))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert node.run() == 0


def test_a_process_that_may_fork_has_one_thread() -> None:
    """A lock that another thread holds at a fork is never let go in the child."""
    code = "import os, mingpt.launch; mingpt.launch._load('train_gpt.py'); print(len(os.listdir('/proc/self/task')))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "1\n", done.stderr


def test_a_worker_whose_agent_died_before_it_looked_ends() -> None:
    code = "import os; import mingpt.distributed; print(os.environ.get('MINGPT_AGENT'))"
    for agent, expected in ((os.getpid(), 0), (1, -signal.SIGKILL)):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False,
            env=os.environ | {"TORCHELASTIC_RUN_ID": "x", "MINGPT_AGENT": str(agent)},
        )  # fmt: skip
        assert done.returncode == expected
        assert done.stdout == ("None\n" if expected == 0 else ""), "it is not the agent of what this worker starts"


def test_settings_that_will_hurt_are_told_under_plain_torchrun(runs: Runs) -> None:
    command = runs.command("--train.max_steps=6", ranks=1, launcher="torchrun")
    command[command.index("--standalone")] = "--nnodes=1:2"
    settings = ["--rdzv_backend=c10d", "--rdzv-conf=last_call_timeout=1"]
    command[4:4] = settings
    done = subprocess.run(command, cwd=runs.folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "--nnodes=1:2 will not do what it says" in line]
    for part in ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "--max-restarts is 0", "--rdzv-endpoint is not given"):
        assert part in line
    assert "take python -m mingpt.launch --nnodes=1:2 --rdzv-endpoint=HOST:PORT" in line


# Longer ones, for `make proof`


@pytest.mark.slow
def test_under_plain_torchrun_a_bad_newcomer_takes_its_agent_with_it(nodes: Nodes) -> None:
    words = ["--nnodes=1:2", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--max-restarts=99"]
    agents = []
    for host, interval in ((1, "1"), (0, "2")):
        conf = f"--rdzv-conf=is_host={host},last_call_timeout=1,keep_alive_interval=1"
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words, conf, str(ROOT / "train_gpt.py"), "small.yaml",
             *overrides(log__interval=interval)],
            cwd=nodes.runs.folder, env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        nodes.runs.started.append(process)
        agents.append(process)
        if host:
            assert process.stdout
            threading.Thread(target=nodes.said.extend, args=(process.stdout,), daemon=True).start()
            nodes.wait(r"^step +5/")
    said, _ = agents[1].communicate(timeout=120)
    assert "log.interval is " in said and agents[1].returncode
    nodes.wait_for_world(1, len(nodes.said))
    agents[0].send_signal(signal.SIGTERM)
    agents[0].wait(60)
    nodes.check()


@pytest.mark.slow
def test_agents_and_the_rendezvous_host_die(nodes: Nodes) -> None:
    first, second = nodes.start(), nodes.start()
    said = nodes.wait_for_world(2)
    for node in (second, first):
        agent, workers = node.agent(), node.workers()
        os.kill(agent, signal.SIGKILL)
        deadline = time.monotonic() + 1
        while any(command_of(worker) for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(command_of(worker) for worker in workers), "workers die with their agent"
        said = nodes.wait_for_world(2, said)
    assert (first.stop(), second.stop()) == (STOP_EXIT_CODE, STOP_EXIT_CODE)
    nodes.check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["list", "file"])
def test_the_first_node_dies_for_good(nodes: Nodes, kind: str, tmp_path: Path) -> None:
    places = f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}" if kind == "list" else str(tmp_path / "meet")
    nodes.meeting = [f"--rdzv-endpoint={places}"]
    first = nodes.start()
    nodes.wait(r"^step +5/")
    second = nodes.start()
    said = nodes.wait_for_world(2)
    first.process.kill()
    first.end()
    nodes.wait_for_world(1, said)
    assert second.stop() == STOP_EXIT_CODE
    nodes.check()


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_left_behind(nodes: Nodes) -> None:
    first = nodes.start(elastic__timeout_seconds="5")
    nodes.wait_for_world(1)  # it is the rendezvous' host
    second = nodes.start(elastic__timeout_seconds="5")
    said = nodes.wait_for_world(2)
    os.kill(second.agent(), signal.SIGSTOP)
    (worker,) = second.workers()
    os.kill(worker, signal.SIGSTOP)
    said = nodes.wait("gave no sign of life for elastic.timeout_seconds=5", said)
    said = nodes.wait_for_world(1, said)
    os.kill(second.agent(), signal.SIGCONT)
    os.kill(worker, signal.SIGCONT)
    nodes.wait_for_world(2, said)
    assert (first.stop(), second.stop()) == (STOP_EXIT_CODE, STOP_EXIT_CODE)
    nodes.check()


@pytest.mark.slow
def test_a_host_of_the_rendezvous_that_is_paused_is_left_behind(nodes: Nodes) -> None:
    nodes.meeting = [f"--rdzv-endpoint=127.0.0.1:{free_port()},127.0.0.1:{free_port()}"]
    first = nodes.start(elastic__timeout_seconds="5")
    nodes.wait_for_world(1)
    second = nodes.start(elastic__timeout_seconds="5")
    said = nodes.wait_for_world(2)
    stopped = [first.agent(), *first.workers()]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    said = nodes.wait("the rendezvous at .* does not answer", said)
    nodes.wait_for_world(1, said)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    assert first.end() == 2, "the run is the other's now"
    assert second.stop() == STOP_EXIT_CODE
    nodes.check()


@pytest.mark.slow
def test_a_node_that_is_cut_off(nodes: Nodes) -> None:
    ip = shutil.which("ip")
    if not ip or os.geteuid():
        pytest.skip("network namespaces need root and the command ip")
    space = f"mingpt{os.getpid()}"

    def run(*words: str) -> None:
        subprocess.run([ip, *words], check=True, capture_output=True)

    net = f"10.{os.getpid() % 200 + 20}.7"
    run("netns", "add", space)
    try:
        run("link", "add", "mingpt0", "type", "veth", "peer", "name", "mingpt1", "netns", space)
        run("addr", "add", f"{net}.1/24", "dev", "mingpt0")
        run("link", "set", "mingpt0", "up")
        run("-n", space, "addr", "add", f"{net}.2/24", "dev", "mingpt1")
        for name in ("mingpt1", "lo"):
            run("-n", space, "link", "set", name, "up")
        endpoint = f"--rdzv-endpoint={net}.1:{free_port()}"
        nodes.meeting = [endpoint]
        first = nodes.start(elastic__timeout_seconds="5")
        nodes.wait(r"^step +5/")
        second = nodes.start((ip, "netns", "exec", space), elastic__timeout_seconds="5")
        said = nodes.wait_for_world(2)
        run("link", "set", "mingpt0", "down")
        cut = time.monotonic()
        said = nodes.wait_for_world(1, said)
        print(f"{time.monotonic() - cut:.1f} s from the cut to ten steps without the other")
        run("link", "set", "mingpt0", "up")
        nodes.wait_for_world(2, said)
        assert (first.stop(), second.stop()) == (STOP_EXIT_CODE, STOP_EXIT_CODE)
        nodes.check()
    finally:
        run("netns", "del", space)
        subprocess.run([ip, "link", "del", "mingpt0"], check=False, capture_output=True)
