"""python -m mingpt.chaos: a short one of real faults, and that it sees what it is there to see."""

import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from mingpt.chaos import Cluster

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds its processes in /proc")


def chaos(folder: Path, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "mingpt.chaos", f"--folder={folder}", *options],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def outlives(folder: Path) -> str:
    """The processes that have the folder in their command, as every launcher, agent and worker has, and do not end."""
    left, deadline = "?", time.monotonic() + 5
    while left and time.monotonic() < deadline:
        left = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True, check=False).stdout
    return left


def test_a_short_one_ends_with_equal_bits(tmp_path: Path) -> None:
    code, said = chaos(tmp_path / "chaos", "--faults=3", "--steps=90", "--seed=3")
    assert code == 0, said
    struck = re.findall(r"^(\w+ \w+) +\d+ +\d+ +\d+ +\d+ +[\d.]+$", said, re.M)
    assert len(struck) == 3, said
    assert "equal: the run did not notice" in said
    sums = re.findall(r"\b[0-9a-f]{64}\b", said)
    assert len(sums) == 2 and len({*sums}) == 1
    assert not outlives(tmp_path)


def test_no_node_outlives_a_chaos_that_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mingpt.chaos", f"--folder={tmp_path / 'chaos'}", "--steps=100", "--nodes=1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "chaos/node0/log.txt"
    while process.poll() is None and not (log.exists() and "starting at step 0" in log.read_text(encoding="utf-8")):
        time.sleep(0.01)
    process.terminate()
    assert process.wait(60) == 1
    assert not outlives(tmp_path)


def test_wrong_use_is_told(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    for option in ("--faults=0", "--nodes=x", f"--folder={tmp_path}"):
        code, said = chaos(tmp_path / "new", option)
        assert code == 2 and "error: " in said


class Script(Cluster):
    """A cluster whose rows are given: which ones are told of after the deed."""

    def __init__(self, folder: Path, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
        super().__init__(folder, [], 1, random.Random(0))
        self.rows, self._after = before, after

    def _possible(self) -> dict[str, Any]:
        return {"worker killed": (lambda: True, True)}

    def read(self) -> None:
        self.rows, self._after = self.rows + self._after, []


@pytest.mark.parametrize(("first", "lost"), [(11, 0), (10, 1), (5, 6)])
def test_the_steps_lost_are_those_that_are_done_again(tmp_path: Path, first: int, lost: int) -> None:
    before = [{"step": step, "time": float(step), "generation": 1} for step in range(1, 11)]
    before.insert(0, {"step": 40, "time": 0.0, "generation": 1})  # lost in an earlier fault
    after = [{"step": first, "time": 1e12, "generation": 2}]
    fault = Script(tmp_path, before, after).strike()
    assert fault.lost == lost
    assert fault.landed and fault.seconds > 0
    assert fault.bound == 2, "a row a second: the last one, and the step in flight"
    assert f"{lost}" in str(fault)


def test_a_row_of_the_old_world_is_no_recovery(tmp_path: Path) -> None:
    before = [{"step": 1, "time": 1.0, "generation": 1}]
    after = [{"step": 2, "time": 1e12, "generation": 1}]
    fault = Script(tmp_path, before, after).strike()
    assert fault.lost == 0 and fault.seconds != fault.seconds
