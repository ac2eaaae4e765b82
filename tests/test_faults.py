"""Faults between any two operations on files: what was durable stays, and the next start goes on."""

import errno
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import find_run, image_file, in_world, manifest_file, manifests, snapshots
from test_snapshot import image, save

from mingpt.lease import read_holder
from mingpt.remote import open_store
from mingpt.snapshot import read_verified

OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir"}
STEPS = (2, 3, 4)  # saved with keep_last=1, so that older ones are removed as well


def start(folder: Path) -> Any:
    """A start that finds what is there and takes the run."""
    run = find_run(folder, open_store(str(folder)))
    ours = snapshots(folder, run.run_id, keep_last=1)
    ours.newest()
    ours.claim(run, folder, {})
    return run, ours


def saves_with_fault(folder: Path, number: int, fault: Any, told: int) -> None:
    """In a process of its own: `fault()` in the `number`-th operation on a file in `folder`; tells of durable steps."""
    count = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in OPERATIONS and str(folder) in os.fsdecode(arguments[0] if isinstance(arguments[0], str) else b""):
            count += 1
            if count == number:
                fault()

    sys.addaudithook(watch)
    try:
        run, ours = start(folder)  # in a restart too
    except OSError:
        os._exit(1)
    for step in STEPS:
        try:
            ours.save(image(step, run.run_id), step=step, generation=run.generation, facts={})
        except OSError:
            continue
        os.write(told, bytes([step]))
    os._exit(0 if count < number else 1)


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def kill() -> None:
    os._exit(9)


def every_fault(place: str, kind: str) -> tuple[int, list[str]]:
    """Tries the fault in every operation; how many there were, and what went wrong."""
    wrong = []
    for number in range(1, 1000):
        folder = Path(place) / f"{kind}{number}"
        run, ours = start(folder)
        ours.save(image(1, run.run_id), step=1, generation=run.generation, facts={})
        ours.release()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                saves_with_fault(folder, number, kill if kind == "kill" else full, writing)
            finally:
                os._exit(3)
        os.close(writing)
        durable = max(os.read(reading, 99), default=1)
        os.close(reading)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        wrong += [f"{kind} in operation {number}: {problem}" for problem in problems(folder, durable)]
        if code not in (0, 1, 9):
            wrong.append(f"{kind} in operation {number}: exit code {code}")
        if code == 0:
            return number - 1, wrong
    raise AssertionError("it never came to an end")


def problems(folder: Path, durable: int) -> list[str]:
    found = []
    run, ours = start(folder)
    newest = ours.newest()
    if newest is None or newest[0].facts["step"] < durable:
        found.append(f"step {durable} was durable, found is {newest and newest[0].facts['step']}")
    for manifest in manifests(folder):
        try:
            read_verified(manifest)
        except (OSError, ValueError) as error:
            found.append(str(error))
    ours.save(image(9, run.run_id), step=9, generation=run.generation, facts={})
    left = [name for name in os.listdir(folder) if name.endswith(".tmp")]
    found += [f"left: {name}" for name in left]
    if [manifest.facts["step"] for manifest in manifests(folder)] != [9]:
        found.append("a save after it keeps others")
    ours.release()
    if read_holder(open_store(str(folder))):
        found.append("the lease is not given back")
    return found


@pytest.mark.parametrize("kind", ["kill", "full"])
def test_a_fault_in_any_operation_loses_nothing_that_was_durable(tmp_path: Path, kind: str) -> None:
    ((operations, wrong),) = in_world(1, every_fault, str(tmp_path), kind, timeout=240)
    assert not wrong, "\n".join(wrong)
    assert operations > 20, "the faults landed"


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    newest, older = manifests(tmp_path)
    chance = random.Random(0)
    for trial in range(1000):
        path = (image_file, manifest_file)[trial % 2](newest)
        sound = path.read_bytes()
        damaged = bytearray(sound)
        if trial % 3:
            damaged[chance.randrange(len(sound))] ^= 1 << chance.randrange(8)
        else:
            del damaged[chance.randrange(len(sound)) :]
        path.write_bytes(damaged)
        found = snapshots(tmp_path).newest()
        assert found is not None and found[0] == older, f"trial {trial}"
        path.write_bytes(sound)
    found = snapshots(tmp_path).newest()
    assert found is not None and found[0] == newest
