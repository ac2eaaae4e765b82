"""configs/launch/slurm.sbatch on a real SLURM of two nodes, both on this machine: for `make slurm-check`."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, SMALL, Runs, free_port
from test_clusters import COMMANDS
from test_launch import Nodes, overrides

SCRIPT = ROOT / "configs" / "launch" / "slurm.sbatch"
# Debian has the daemons in /usr/sbin, where not every user looks.
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("127.0.0.2", "127.0.0.3")  # names that every Linux machine can resolve, to itself
MOST_LOST = 20  # steps that a killed node costs: as many as an image in memory may lack where steps take milliseconds

if missing := [name for name in DAEMONS if not shutil.which(name, path=PATH)]:
    pytest.skip(f"no {', '.join(missing)}: apt-get install slurm-wlm munge", allow_module_level=True)
if os.geteuid():
    pytest.skip("slurmd, which starts the jobs of all users, has to be root", allow_module_level=True)
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

# cred_expire: a requeued job waits that long, 120 s by default. SlurmdTimeout: a silent node is down, after 300 s.
CONFIG = """
ClusterName=mingpt
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
NodeName={nodes[0]} NodeHostname={host} NodeAddr={nodes[0]} Port={ports[1]} CPUs=1
NodeName={nodes[1]} NodeHostname={host} NodeAddr={nodes[1]} Port={ports[2]} CPUs=1
PartitionName=all Nodes=ALL Default=YES State=UP
"""

# Ends everything that was started with this configuration, whatever became of its parents, when its input is closed:
# by the test, or by the end of the test's process.
REAPER = """
import os, signal, sys
from pathlib import Path
sys.stdin.read()
mark, left = b"SLURM_CONF=" + sys.argv[1].encode() + b"\\0", 1
while left:
    left = 0
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environ.read_bytes() + b"\\0":
                os.kill(int(environ.parent.name), signal.SIGKILL)
                left += (environ.parent / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:  # it has ended, or is none of ours
            pass
"""


class Cluster:
    """Its own munge, controller and nodes, with their own ports and files in a folder that goes with them."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mingpt-slurm-"))  # short: the path of a socket has 107 characters
        conf = str(self.folder / "slurm.conf")
        self._reaper = subprocess.Popen(
            [sys.executable, "-c", REAPER, conf], stdin=subprocess.PIPE, start_new_session=True
        )
        names = ("SLURM_", "SBATCH_", "SRUN_", "PYTEST_")
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith(names)} | {
            "SLURM_CONF": conf,
            "PATH": PATH,
            "PYTHONPATH": str(ROOT),
        }
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        host, ports = socket.gethostname().partition(".")[0], [free_port() for _ in range(3)]
        conf = self.folder / "slurm.conf"
        conf.write_text(CONFIG.format(host=host, ports=ports, folder=self.folder, nodes=NODES), encoding="ascii")
        for name in ("state", *NODES):
            (self.folder / name).mkdir()
        (self.folder / "key").write_bytes(os.urandom(128))
        (self.folder / "key").chmod(0o600)
        files = {"socket": "munge.sock", "key-file": "key", "pid-file": "munge.pid", "log-file": "munge.log"}
        files["seed-file"] = "munge.seed"
        self._start("munged", "--foreground", "--force", *(f"--{key}={self.folder / it}" for key, it in files.items()))
        self._start("slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        self.wait_for("sinfo", "--noheader", "--format=%D %t", gives="2 idle")

    def _start(self, *command: str) -> "subprocess.Popen[bytes]":
        with open(self.folder / "daemons.log", "ab") as log:
            return subprocess.Popen(
                [shutil.which(command[0], path=PATH) or "", *command[1:]], env=self.environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def start_node(self, node: str) -> None:
        self._nodes[node] = self._start("slurmd", "-D", "-N", node)

    def lose(self, node: str) -> None:
        """As when its power fails: SLURM hears nothing of it any more."""
        self._nodes[node].kill()
        self._nodes[node].wait()
        here = [pid for pid in processes() if f"SLURMD_NODENAME={node}\0".encode() in environment_of(pid)]
        daemons = {parent(pid) for pid in here if b"slurmstepd" in name_of(parent(pid))}
        for pid in [*daemons, *here]:
            if str(self.folder).encode() in environment_of(pid):
                os.kill(pid, signal.SIGKILL)

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def wait_for(self, *command: str, gives: str, seconds: float = 90) -> str:
        """What the command gives, as soon as the pattern is found in it."""
        deadline, said = time.monotonic() + seconds, ""
        while time.monotonic() < deadline:
            done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
            said = done.stdout + done.stderr
            if re.search(gives, said):
                return said
            time.sleep(0.3)
        raise AssertionError(
            f"{gives!r} is not in {said!r}; the daemons: {(self.folder / 'daemons.log').read_text(encoding='utf-8')}"
        )

    def close(self) -> None:
        self._reaper.communicate(b"")
        shutil.rmtree(self.folder, ignore_errors=True)


def processes() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def environment_of(pid: int) -> bytes:
    return _read(pid, "environ") + b"\0"


def name_of(pid: int) -> bytes:
    return _read(pid, "comm")


def parent(pid: int) -> int:
    stat = _read(pid, "stat").rpartition(b")")[2].split()
    return int(stat[1]) if stat else 0


class Job(Nodes):
    """A job of the script; what is said is in its log, which goes on over its restarts."""

    def __init__(self, cluster: Cluster, runs: Runs, *options: str, **settings: str) -> None:
        self.runs = runs
        self._cluster = cluster
        if not (runs.folder / "train_gpt.py").exists():
            (runs.folder / "train_gpt.py").symlink_to(ROOT / "train_gpt.py")
        self.configure("max_steps: 1000000")
        settings_given = [word for word in overrides(**settings) if word != "--train.max_steps="]
        words = [f"--chdir={runs.folder}", *options, str(SCRIPT), "small.yaml", *settings_given]
        self.id = cluster.run("sbatch", "--parsable", *words)
        self.log = runs.folder / f"mingpt-{self.id}.log"

    @property
    def said(self) -> list[str]:  # type: ignore[override]
        return self.log.read_text(encoding="utf-8").splitlines(keepends=True) if self.log.exists() else []

    def configure(self, steps: str = "max_steps: 40", snapshot: str = "snapshot: {") -> None:
        text = SMALL.replace("max_steps: 40", steps).replace("snapshot: {", snapshot)
        (self.runs.folder / "small.yaml").write_text(text, encoding="utf-8")

    def wait_for_state(self, *facts: str, seconds: float = 90) -> None:
        """Until `scontrol show job` gives all of them, in their order there."""
        pattern = ".*".join(rf"\b{fact}\b" for fact in facts)
        self._cluster.wait_for("scontrol", "show", "job", "--oneliner", self.id, gives=pattern, seconds=seconds)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
        mark = str(cluster.folder).encode()
        assert not [pid for pid in processes() if mark in environment_of(pid)], "a process is left"


def test_a_job_that_its_time_limit_ends_goes_on_to_the_end(cluster: Cluster, runs: Runs) -> None:
    # SLURM looks at its clock twice a minute, and may send USR1 a minute too early: here it comes in the second look.
    job = Job(cluster, runs, "--time=2", "--signal=B:USR1@60", train__max_steps="")
    said = job.wait_for_world(2)
    said = job.wait("the launchers have ended with code 75", said)
    job.wait_for_state("JobState=PENDING", "Restarts=1")
    cluster.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")
    last = runs.manifest()["step"] + 50
    job.configure(f"max_steps: {last}", "snapshot: {resume: must, ")  # the same command, of which the end is known now
    job.wait("the launchers have ended with code 0", said)
    job.wait_for_state("JobState=COMPLETED", "Restarts=1", "ExitCode=0:0")
    assert runs.manifest()["step"] == last
    job.configure()
    assert job.check() == [0], "no step was done twice, and none is missing"


def test_the_node_of_the_script_fails_and_scancel(cluster: Cluster, runs: Runs) -> None:
    job = Job(cluster, runs)
    job.wait_for_world(2)
    cluster.lose(NODES[0])
    job.wait_for_state("JobState=RUNNING", "Restarts=1", f"NodeList={NODES[1]}")
    said = job.wait_for_world(1, len(job.said))
    cluster.run("scancel", job.id)
    job.wait("the launchers have ended with code 75", said)
    job.wait_for_state("JobState=CANCELLED", "Restarts=1")
    first, *others = job.check()  # the other node has gone on by itself until SLURM noticed
    assert first <= MOST_LOST and not any(others)


def test_nodes_that_are_jobs_of_their_own_come_and_go(cluster: Cluster, runs: Runs) -> None:
    (command,) = (command for command in COMMANDS if "--array" in command)
    job = Job(cluster, runs, *[word.replace("1-4", "1-2") for word in command.split() if word.startswith("--")])
    said = job.wait_for_world(2)
    cluster.lose(NODES[1])
    said = job.wait_for_world(1, said)
    job.wait_for_state("JobState=PENDING", "Restarts=1")
    job.wait_for_state("JobState=RUNNING", "Restarts=0")
    cluster.start_node(NODES[1])
    said = job.wait_for_world(2, said)
    cluster.run("scancel", job.id)
    for _ in NODES:
        said = job.wait("the launchers have ended with code 75", said)
    before, after = job.check()
    assert before <= MOST_LOST and after == 0


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"train__max_steps": "20"}, 0),
        ({"optim__learning_rate": "1e9", "optim__warmup_steps": "0"}, 1),
        ({"seed": "x"}, 2),
    ],
)
def test_a_job_that_is_done_or_fails_is_not_requeued(
    cluster: Cluster, runs: Runs, settings: dict[str, str], code: int
) -> None:
    job = Job(cluster, runs, **settings)
    job.wait_for_state("JobState=(COMPLETED|FAILED)", "Restarts=0", f"ExitCode={code}:0")
    assert f"the launchers have ended with code {code}" in job.said[-1]
