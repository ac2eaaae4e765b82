"""Training on nodes that come and go: torchrun with the settings that make it survive them.

    python -m mingpt.launch --nnodes=1:4 --nproc-per-node=4 --rdzv-endpoint=HOST:PORT train_gpt.py [...]

Run on every node. It checks the node before it joins, so that a bad one leaves the others alone; starts torchrun's
agent, and starts it again where its rendezvous dies; ends a crash loop with the first failing rank's own message; and
turns SIGTERM and Ctrl-C into an agreed stop (exit code 75) of this node's workers, without which the other nodes go on.

It loads torch and the training's code once, and agents and workers are forked from it: a restart loads nothing.
"""

import argparse
import ctypes
import fcntl
import logging
import math
import multiprocessing
import os
import runpy
import shlex
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from mingpt.elastic import STOP_EXIT_CODE, Notes

FAILURES = 3  # of this node's own workers, each without a new step since the last: then trying again is in vain
STARTS = 10  # of any cause but a world that grows
LASTING_SECONDS = 60.0  # an agent that lived so long did not fail at its start
PATIENCE_SECONDS = 5.0  # for each rendezvous endpoint that comes before one of this host
QUIET_SECONDS = 2.0  # an agent without workers, after which its rendezvous is asked whether it is alive
ANSWER_SECONDS = 5.0  # within which it says so
_POLL_SECONDS = 0.1
_HUGE = 10**6
# Without it a node that joins, or the departure of the one that holds rank 0, hangs the job: the survivors would not
# publish the new round's address.
_ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# last_call: with fewer than max nodes every start waits that long for more. keep_alive: a node that is silent for 4 s
# is out; with 2 s a busy one was taken for dead and the job split in two. join_timeout: fewer than min nodes wait.
_RENDEZVOUS = f"last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=4,join_timeout={_HUGE},read_timeout=20"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m mingpt.launch`; returns the exit code."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    if options.dry_run:
        endpoint = options.endpoints[0]
        words = _torchrun(options, endpoint, is_host=not endpoint or _is_local(endpoint))
        print(" ".join([*(f"{key}={value}" for key, value in _ENVIRONMENT.items()), "torchrun", shlex.join(words)]))
        return 0
    with tempfile.TemporaryDirectory(prefix="mingpt-launch-") as folder:
        return Launcher(options, Path(folder)).run()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m mingpt.launch", description="torchrun for nodes that come and go.", allow_abbrev=False
    )
    parser.add_argument("--nnodes", default="1", metavar="MIN:MAX", help="nodes (%(default)s)")
    parser.add_argument("--nproc-per-node", "--nproc_per_node", default="1", metavar="N", help="workers on this one")
    parser.add_argument(
        "--rdzv-endpoint", "--rdzv_endpoint", default="", metavar="WHERE",
        help="where the nodes meet, the same on all: HOST:PORT of one of them or of more, the first that lives, "
        "separated by commas; or a file on a disk that all share",
    )  # fmt: skip
    parser.add_argument("--rdzv-id", "--rdzv_id", default="mingpt", metavar="NAME", help="the job (%(default)s)")
    parser.add_argument(
        "--local-addr", "--local_addr", metavar="ADDRESS", help="of this node, for the others (by which it gets there)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command and leave")
    parser.add_argument("script", help="train_gpt.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(argv)
    least, _, most = options.nnodes.partition(":")
    if not least.isdecimal() or not (most or least).isdecimal() or not 1 <= int(least) <= int(most or least):
        parser.error(f"--nnodes={options.nnodes}: expected N or MIN:MAX, from 1")
    workers = options.nproc_per_node
    if workers not in ("auto", "gpu", "cpu", "xpu") and not (workers.isdecimal() and int(workers) >= 1):
        parser.error(f"--nproc-per-node={workers}: expected a number, from 1, or auto, gpu, cpu, xpu")
    options.endpoints = options.rdzv_endpoint.split(",")
    if options.endpoints == [""] and int(most or least) > 1:
        parser.error(
            f"--nnodes={options.nnodes} needs --rdzv-endpoint=HOST:PORT, the same on all nodes: without one each host "
            "trains in a world of its own"
        )
    for endpoint in options.endpoints:
        if endpoint and "/" not in endpoint and not endpoint.rpartition(":")[2].isdecimal():
            parser.error(f"--rdzv-endpoint={endpoint}: expected HOST:PORT, or the path of a file")
    options.local_addr = options.local_addr or _local_address(options.endpoints[0])
    if not Path(options.script).is_file():
        parser.error(f"{options.script}: no such file")
    return options


def _torchrun(options: argparse.Namespace, endpoint: str, is_host: bool, over: int = 0) -> list[str]:
    """torchrun's arguments. `over`: the meetings of this name that are over, in a file that keeps them."""
    place = "store_type=file" if "/" in endpoint else f"is_host={int(is_host)}"
    return [
        f"--nnodes={options.nnodes}",
        f"--nproc-per-node={options.nproc_per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint or 'localhost:0'}",
        f"--rdzv-id={options.rdzv_id}{f'.{over}' if over else ''}",
        f"--rdzv-conf={place},{_RENDEZVOUS}",
        # Each survivor of a loss pays one. Crash loops are bounded here, by what our workers tell.
        f"--max-restarts={_HUGE if _is_ours(options.script) else STARTS}",
        "--monitor-interval=0.1",
        f"--signals-to-handle={','.join(number.name for number in _SIGNALS)}",
        *([f"--local-addr={options.local_addr}"] if options.local_addr else []),
        options.script,
        *options.arguments,
    ]


def _is_ours(script: str) -> bool:
    """Whether it is the train_gpt.py of this code, which knows `--preflight` and leaves notes for its launcher."""
    return Path(script).resolve() == Path(__file__).resolve().parent.parent / "train_gpt.py"


class Launcher:
    """One node's agent, kept running until the training ends, a signal asks to stop, or going on is in vain."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._notes = Notes(folder)
        defaults = {
            "OMP_NUM_THREADS": "1",  # as torchrun does, without a word
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # else a store that dies is a page of addresses
        }
        # Else gloo and NCCL go by the host's name, which on many hosts stands for 127.0.1.1.
        if interface := options.local_addr and _interface(options.local_addr):
            defaults |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        self._environment = {**defaults, **os.environ, **_ENVIRONMENT, "MINGPT_LAUNCH": str(folder)}
        self._main: Callable[[], int] | None = None  # our script's, with all that it needs
        self._child: ForkProcess | None = None  # the agent, or the look at the node before there is one
        self._stopping_since: float | None = None

    def run(self) -> int:
        """The exit code: of the training, 75 after a stop, 2 for a node that cannot take part."""
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._stop)
        os.environ.update(self._environment)  # before torch is loaded, which reads some of it
        import torch.distributed.run  # noqa: F401  once, and not in every agent

        if _is_ours(self._options.script):
            self._main = _load(self._options.script)
            if refused := self._preflight():
                return refused if self._stopping_since is None else STOP_EXIT_CODE
        attempts, progress = 0, 0
        while attempts < STARTS:
            endpoint, is_host = self._meeting_place()
            since = time.monotonic()
            if self._stopping_since is None:
                agent = self._fork("mingpt-agent", self._join, endpoint, is_host)
            if self._stopping_since is not None:
                self._end_child()
                return STOP_EXIT_CODE
            code = self._watch("" if is_host else endpoint)
            if code is not None:
                return code
            _say(f"the agent has ended with code {agent.exitcode}; joining again")
            time.sleep(min(attempts, 5))
            now = self._notes.progress()
            # One that waits for a place makes no steps, and outlives many who host the rendezvous.
            lasted = now > progress or time.monotonic() - since > LASTING_SECONDS
            attempts, progress = 1 if lasted else attempts + 1, now
        _say(f"error: the agent has ended {STARTS} times without a new step: see what it said")
        return 1

    def _fork(self, name: str, work: Callable[..., int], *arguments: Any) -> ForkProcess:
        """A process that ends with what `work` returns, and dies with this one."""
        launcher = os.getpid()
        handled = {number for number in _SIGNALS if signal.getsignal(number) == self._stop}

        def child() -> None:
            os.setsid()  # a Ctrl-C is the launcher's to pass on, once
            _settle(name, launcher, handled)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
            sys.exit(work(*arguments))

        self._child = multiprocessing.get_context("fork").Process(target=child)
        # Else one that comes now is the child's as well, in which our handler stops nobody, or finds no child to end.
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        try:
            self._child.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        return self._child

    def _preflight(self) -> int:
        """Our script's own look at the node; its exit code, its words are shown."""
        check = self._fork("mingpt-check", self._look)
        while check.exitcode is None:
            if self._stopping_since is not None:
                check.kill()
            time.sleep(_POLL_SECONDS / 5)
        if check.exitcode < 0 and self._stopping_since is None:  # no memory, most likely
            _say(f"error: the look at this node was ended by signal {-check.exitcode}")
        return check.exitcode if check.exitcode >= 0 else 1

    def _look(self) -> int:
        del os.environ["MINGPT_LAUNCH"]  # it has no say in what becomes of the agent
        return self._call("--preflight")

    def _join(self, endpoint: str, is_host: bool) -> int:
        """The agent: torchrun itself, whose workers are forked where they are ours."""
        os.environ["MINGPT_AGENT"] = str(os.getpid())  # when it dies before they look, their parent is another
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, dynamic_rendezvous
        from torch.distributed.launcher.api import elastic_launch

        # Torch looks once a second whether it is time to go on, for thousands of nodes: each recovery would wait.
        dynamic_rendezvous._delay = lambda seconds: time.sleep(_POLL_SECONDS)  # type: ignore[attr-defined]
        if self._main and not self._options.nproc_per_node.isdecimal():
            # Counted by another process: workers forked from one that has looked for GPUs could not use them.
            try:
                with multiprocessing.get_context("fork").Pool(1) as pool:
                    count = pool.apply(run.determine_local_world_size, (self._options.nproc_per_node,))
            except ValueError as error:
                reason = str(error).rstrip(".")
                _say(f"error: --nproc-per-node={self._options.nproc_per_node}: {reason}; give a number, or auto")
                return 2
            self._options.nproc_per_node = str(count)
        if self._main and "--train.reduction=exact" not in self._options.arguments:
            loader = threading.Thread(target=_load_for_ddp, daemon=True)  # while the nodes meet
            loader.start()
            os.register_at_fork(before=loader.join)  # a lock that it held then, nobody would let go in the child
        words, over = _torchrun(self._options, endpoint, is_host), 0
        while True:
            try:
                if self._main:
                    config, _, _ = run.config_from_args(run.parse_args(["--start-method=fork", *words]))
                    elastic_launch(config, self._work)()
                else:
                    run.main(words)
                return 0
            except SignalException:  # told of by who sent it
                return STOP_EXIT_CODE
            except RendezvousError as error:
                # A file keeps the meetings that are over: all nodes go to the first one that is not.
                if isinstance(error, RendezvousClosedError) and "/" in endpoint:
                    over += 1
                    words = _torchrun(self._options, endpoint, is_host, over)
                    continue
                _say(f"the rendezvous has failed: {error.__cause__ or str(error) or 'it is closed'}")
                return 1

    def _work(self) -> None:
        """A worker, which returns where it has succeeded."""
        _settle(f"mingpt-rank-{os.environ['RANK']}", int(os.environ.pop("MINGPT_AGENT")), _SIGNALS)
        if code := self._call():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _call(self, *words: str) -> int:
        """Our script with its arguments; its exit code."""
        assert self._main
        sys.argv = [self._options.script, *words, *self._options.arguments]
        try:
            return self._main()
        except Exception:  # noqa: BLE001  as Python itself does at the end of a script
            traceback.print_exc()
            return 1

    def _meeting_place(self) -> tuple[str, bool]:
        """The endpoint to meet at, and whether this node is its host: one that answers, else the first of this host."""
        started, told = time.monotonic(), False
        while self._stopping_since is None:
            taken = set()
            for endpoint in self._options.endpoints:
                if not endpoint or "/" in endpoint:
                    return endpoint, True
                if _is_taken(endpoint):
                    if _answers(endpoint):
                        return endpoint, False
                    taken.add(endpoint)
            waited = time.monotonic() - started
            for place, endpoint in enumerate(self._options.endpoints):
                if _is_local(endpoint) and endpoint not in taken and waited >= place * PATIENCE_SECONDS:
                    return endpoint, True
            if not told and waited > 1:
                _say(f"waiting for the rendezvous at {' or '.join(self._options.endpoints)}")
                told = True
            time.sleep(0.3)
        return "", False

    def _watch(self, endpoint: str = "") -> int | None:
        """Waits for the agent's end, or sees to it; the exit code, None where it is to be started again.

        endpoint: where it meets the others, if that is another node's.
        """
        assert self._child is not None and self._child.pid
        quiet_since = time.monotonic()
        silent_until = quiet_since + PATIENCE_SECONDS
        while self._child.exitcode is None:
            if not endpoint or _has_children(self._child.pid):
                quiet_since = time.monotonic()
            elif time.monotonic() - quiet_since > QUIET_SECONDS:
                # A host that is paused, or a machine that is gone without a word, keeps it waiting without an end.
                # Unless it ended meanwhile, or got its workers.
                if not (_answers(endpoint) or self._child.exitcode is not None or _has_children(self._child.pid)):
                    _say(f"the rendezvous at {endpoint} does not answer")
                    self._child.kill()
                    self._child.join()
                    if self._stopping_since is None:
                        return None
                    return 1 if self._notes.failures() else STOP_EXIT_CODE  # its workers had left by themselves
                quiet_since = time.monotonic()
            if self._stopping_since is None:
                if verdict := self._notes.verdict():
                    self._end_child()
                    return int(verdict["code"])
                failures, starts = self._notes.failures(), self._notes.starts()
                if len(failures) >= FAILURES or starts > STARTS:
                    self._end_child()
                    return _tell_loop([*failures.values()], starts)
                if time.monotonic() > silent_until and not self._notes.has_begun:
                    _say(
                        f"this node waits: fewer nodes are here than --nnodes={self._options.nnodes} needs, or as many "
                        "as it allows, and this one takes over when another leaves"
                    )
                    silent_until = math.inf
            self._child.join(_POLL_SECONDS)
        code = self._child.exitcode
        if code == 0:
            return 0
        if self._stopping_since is not None:
            killed = code == -signal.SIGKILL  # its workers with it, whatever they were keeping
            return 1 if killed or self._notes.failures() else STOP_EXIT_CODE
        if verdict := self._notes.verdict():
            return int(verdict["code"])
        return 2 if code == 2 else None

    def _end_child(self) -> None:
        """An agent with its workers, whom it gives the time to leave; nothing outlives it."""
        if self._child and self._child.is_alive():
            self._child.terminate()
            self._child.join(40)
            self._child.kill()
            self._child.join()

    def _stop(self, number: int, _: object) -> None:
        """Passes a signal on as the wish to stop; a second Ctrl-C, two seconds later, ends everything at once."""
        now = time.monotonic()
        if self._stopping_since is None:
            self._stopping_since = now
            self._notes.stop()
            if self._child and self._child.pid:
                self._child.terminate()
        elif number == signal.SIGINT and now - self._stopping_since > 2 and self._child:
            self._child.kill()  # the workers die with it


def _is_taken(endpoint: str) -> bool:
    """Whether somebody listens there; of a process that is paused the system takes connections too."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def _answers(endpoint: str) -> bool:
    """Whether a rendezvous is alive there. Asked by another process: torch's client waits for an answer without end."""
    asking = multiprocessing.get_context("fork").Process(target=_ask, args=(endpoint, os.getpid()))
    asking.start()
    asking.join(ANSWER_SECONDS)
    answered = asking.exitcode == 0
    asking.kill()
    asking.join()
    return answered


def _ask(endpoint: str, launcher: int) -> None:
    os.setsid()  # a Ctrl-C is no answer
    _settle("mingpt-ask", launcher, _SIGNALS)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, _, port = endpoint.rpartition(":")
    try:
        TCPStore(host, int(port), timeout=timedelta(seconds=ANSWER_SECONDS), wait_for_workers=False)
    except RuntimeError:
        os._exit(1)


def _has_children(pid: int) -> bool:
    """Whether a process has any that live; taken for granted where Linux does not tell."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        return any(Path(f"/proc/{child}/cmdline").read_bytes() for child in children)  # empty of one that has ended
    except OSError:
        return True


def _is_local(endpoint: str) -> bool:
    """Whether the endpoint's host is this one: an address can be bound only where it is."""
    host = endpoint.rpartition(":")[0]
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def _local_address(endpoint: str) -> str | None:
    """This node's address on the way to the endpoint; None where that is on this machine alone, or not known."""
    host, _, port = endpoint.rpartition(":")
    if not host or "/" in endpoint:
        return None
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            mine = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if mine.startswith("127.") or mine == "::1" else mine


def _interface(address: str) -> str | None:
    """The network interface that has an IPv4 address. On Linux."""
    if sys.platform != "linux":
        return None
    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, siocgifaddr, struct.pack("256s", name.encode()))[20:24]
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(found) == address:
                return name
    return None


def _tell_loop(failures: Sequence[dict[str, object]], starts: int) -> int:
    """Why it is in vain to go on; the exit code."""
    count = f"{starts} starts" if len(failures) < FAILURES else f"{len(failures)} failures"
    reason = "see above what ended them"
    if failures:
        last = failures[-1]
        reason = f"in the last one that failed rank {last['rank']} failed first: {last['message']}"
    _say(f"error: {count} in a row without a new step; {reason}")
    return 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _load(script: str) -> Callable[[], int]:
    """Our script's `main`, with all that it imports; this process has one thread still, and may fork."""
    sys.path.insert(0, str(Path(script).resolve().parent))
    main = runpy.run_path(script, run_name="mingpt.launched")["main"]
    # A worker that ended is one line, as torchrun itself has it, and no traceback of the agent's.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_without_traceback)
    return main  # type: ignore[no-any-return]


def _load_for_ddp() -> None:
    """What DDP loads when it is made: a second's work, once and not in every worker."""
    import torch._dynamo  # noqa: F401


def _without_traceback(record: logging.LogRecord) -> bool:
    record.exc_info = None
    return True


def _settle(name: str, parent: int, handled: Collection[signal.Signals]) -> None:
    """Begins the life of a forked process: with a name for ps, its own signals, and an end with its parent's."""
    for number in handled:
        signal.signal(number, signal.SIG_DFL)
    if sys.platform != "linux":
        return
    pr_set_pdeathsig, pr_set_name = 1, 15
    prctl = ctypes.CDLL(None).prctl
    prctl(pr_set_name, name.encode())
    prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
