"""One writer for a run, whoever else is started, paused or killed; and whose run it is."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from conftest import ROOT, find_run, manifests, snapshots
from test_snapshot import image, save

from mingpt import lease
from mingpt.lease import Holder, Lease, Run, TakenOverError, read_holder, record_run
from mingpt.remote import open_store
from mingpt.snapshot import Snapshots
from mingpt.storage import Store

ODD = b'{"generation": "9", "nonce": 1, "machine": null, "pid": 1, "started": 0, "beat": 0}'


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(str(tmp_path) if request.param == "folder" else f"memory://{tmp_path}")


class Clock:
    """Time that passes by `sleep` alone; `at[n]` is called in the n-th sleep."""

    def __init__(self, **at: object) -> None:
        self.now, self.sleeps, self._at = 0.0, 0, at

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now, self.sleeps = self.now + seconds, self.sleeps + 1
        if action := self._at.get(f"at{self.sleeps}"):
            action()  # type: ignore[operator]


def held(store: Store, **changes: object) -> Holder:
    """Someone's lease: of a process that lives, on this machine."""
    mine = Holder(1, "0" * 16, lease._machine(), os.getpid(), lease._started(os.getpid()))
    holder = replace(mine, **changes)  # type: ignore[arg-type]
    store.put("lease.json", [json.dumps(asdict(holder)).encode()])
    return holder


def taken(store: Store, generation: int, clock: Clock | None = None) -> Lease:
    clock = clock or Clock()
    mine = Lease(store, generation, clock, clock.sleep)
    mine.wait()
    mine._write()  # `take` without its thread
    mine.check()
    return mine


def test_a_lease_is_taken_kept_and_given_back(store: Store) -> None:
    mine = taken(store, 1)
    mine.check()
    holder = read_holder(store)
    assert holder is not None and (holder.generation, holder.pid) == (1, os.getpid())
    mine.release()
    assert read_holder(store) is None


def test_one_whose_beat_advances_is_alive(store: Store) -> None:
    holder = held(store)
    clock = Clock(at3=lambda: held(store, beat=holder.beat + 1))
    with pytest.raises(ValueError, match=rf"in use by another start of this run \(process {os.getpid()} on"):
        taken(store, 2, clock)
    assert read_holder(store) == replace(holder, beat=1), "nothing was written"
    assert clock.sleeps == 3, "and no longer waited than needed"


def test_one_whose_beat_stands_still_is_replaced(store: Store) -> None:
    held(store)
    clock = Clock()
    taken(store, 2, clock)
    assert clock.now >= lease.PATIENCE_SECONDS
    holder = read_holder(store)
    assert holder is not None and holder.generation == 2


@pytest.mark.parametrize("changes", [{"pid": 2**22 + 1}, {"started": 1}], ids=["no such process", "a later one"])
@pytest.mark.skipif(not os.path.exists("/proc"), reason="only /proc tells when a process began")
def test_one_that_has_ended_on_this_machine_is_replaced_at_once(store: Store, changes: dict[str, int]) -> None:
    held(store, **changes)
    clock = Clock()
    taken(store, 2, clock)
    assert clock.now == 0
    assert read_holder(store) is not None


def test_one_of_another_machine_is_waited_for(store: Store) -> None:
    held(store, machine="elsewhere", pid=2**22 + 1)
    clock = Clock()
    taken(store, 2, clock)
    assert clock.now > 0


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"generation": 1}', ODD])
def test_a_damaged_lease_is_nobodys(store: Store, content: bytes) -> None:
    store.put("lease.json", [content])
    taken(store, 1).check()


def test_a_lease_that_cannot_be_read_is_somebodys(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = taken(store, 1)
    monkeypatch.setattr(store, "read", lambda name: (_ for _ in ()).throw(ValueError("no JSON came")))
    with pytest.raises(ValueError, match="no JSON came"):
        Lease(store, 2).wait()
    mine.release()  # which cannot be, and does not hide why the run ended


def test_a_lease_that_is_given_back_stays_so(store: Store) -> None:
    mine = taken(store, 1)
    mine.release()
    mine.check()  # as a beat that was about to begin
    assert read_holder(store) is None


def test_a_paused_holder_that_wakes_finds_itself_replaced(store: Store) -> None:
    paused = taken(store, 1)
    taken(store, 2)
    with pytest.raises(
        TakenOverError, match=r"taken over by a later start .*generation 2; this is 1\): the training stops"
    ):
        paused.check()
    with pytest.raises(TakenOverError):
        paused.raise_if_lost()
    paused.release()
    holder = read_holder(store)
    assert holder is not None and holder.generation == 2, "it is not the paused one's to give back"


def test_of_two_that_collide_both_see_the_same_winner(store: Store) -> None:
    first, second = (Lease(store, 1, Clock(), lambda seconds: None) for _ in range(2))
    first.wait()
    second.wait()
    first._write()
    second._write()
    winner, loser = sorted((first, second), key=lambda it: it._mine.nonce, reverse=True)
    for _ in range(2):
        winner.check()
        with pytest.raises(TakenOverError):
            loser.check()


def test_the_beat_advances_and_notices_a_later_start(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.01)
    mine = Lease(store, 1)
    mine.wait()
    mine.take()
    before = read_holder(store)
    assert before is not None
    wait_until(lambda: (now := read_holder(store)) is not None and now.beat > before.beat)
    wait_until(lambda: held(store, generation=2) and mine._lost is not None)
    with pytest.raises(TakenOverError):
        mine.raise_if_lost()


def wait_until(fact: object) -> None:
    waiting = threading.Event()
    for _ in range(1000):
        if fact():  # type: ignore[operator]
            return
        waiting.wait(0.01)
    raise AssertionError("it did not come true in ten seconds")


@pytest.mark.parametrize("kind", [ConnectionError, ValueError])
def test_a_beat_that_cannot_be_written_is_told_once_and_goes_on(
    store: Store, kind: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.01)
    mine = Lease(store, 1)
    mine.wait()
    mine.take()
    put, tries = store.put, []

    def down(name: str, chunks: object) -> None:
        tries.append(name)
        raise kind("the store is down")

    monkeypatch.setattr(store, "put", down)
    wait_until(lambda: len(tries) > 3)
    monkeypatch.setattr(store, "put", put)
    before = read_holder(store)
    wait_until(lambda: read_holder(store) != before)
    mine.release()
    assert caplog.text.count("is not renewed: the store is down") == 1


def test_a_writer_that_was_overtaken_saves_and_removes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = find_run(out, open_store(str(tmp_path)))
    late = snapshots(tmp_path, run.run_id, keep_last=1)
    late.claim(run, out, {})
    late.save(image(1, run.run_id), step=1, generation=1, facts={})
    held(open_store(str(tmp_path)), generation=2)
    with pytest.raises(TakenOverError):
        late.save(image(2, run.run_id), step=2, generation=1, facts={})
    assert [manifest.facts["step"] for manifest in manifests(tmp_path)] == [1]
    late.release()


def test_a_start_that_waited_sees_what_was_saved_meanwhile(tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / "snapshots"

    def start() -> tuple[Run, Snapshots]:
        run = find_run(out, open_store(str(folder)))
        looking = snapshots(folder, run.run_id)
        looking.newest()
        return run, looking

    run, first = start()
    first.claim(run, out, {})
    later, waiting = start()
    first.save(image(5, run.run_id), step=5, generation=1, facts={})
    first.release()
    for late in ((run, first), (later, waiting)):
        with pytest.raises(ValueError, match="another start of this run was faster"):
            late[1].claim(late[0], out, {})
    later, waiting = start()
    waiting.claim(later, out, {})
    waiting.release()


def test_a_start_that_is_overtaken_while_it_begins_is_told_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = find_run(tmp_path, open_store(str(tmp_path)))
    late = snapshots(tmp_path, run.run_id)
    monkeypatch.setattr(Lease, "_write", lambda self: held(self._store, generation=2))
    with pytest.raises(ValueError, match="taken over by a later start"):
        late.claim(run, tmp_path, {})


def test_the_process_that_has_it_is_named_and_a_killed_one_gives_way(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from mingpt.lease import open_run\n"
        "from mingpt.snapshot import Snapshots, look_around\n"
        "from mingpt.remote import open_store\n"
        "store, out = open_store(sys.argv[1]), Path(sys.argv[1])\n"
        "run = open_run({'': look_around(out, store)})\n"
        "Snapshots(store, run.run_id).claim(run, out, {})\n"
        "print('has it', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert first.stdout is not None and first.stdout.readline() == b"has it\n"
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert f"in use by another start of this run (process {first.pid} on" in second.stderr
    first.kill()
    first.wait()
    third = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert third.stdout is not None and third.stdout.readline() == b"has it\n"
    third.kill()
    third.wait()


def test_a_run_keeps_its_name_and_counts_its_generations(tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / "snapshots"
    store = open_store(str(folder))
    first = find_run(out, store)
    assert first.generation == 1
    record_run(first, out, store, {})
    assert find_run(out, store) == Run(first.run_id, 2)
    save(folder, 5, run_id=first.run_id, generation=7)
    assert find_run(out, store) == Run(first.run_id, 8)
    assert find_run(tmp_path / "elsewhere", store) == Run(first.run_id, 8)
    held(store, generation=11)
    assert find_run(out, store) == Run(first.run_id, 12)
    store.delete("lease.json")
    (folder / "run.json").unlink()
    assert find_run(tmp_path / "elsewhere", store) == Run(first.run_id, 8), "by the manifests alone"
    record_run(Run("other", 1), out, None, {})
    store.put("run.json", [json.dumps({"run_id": first.run_id, "generation": 1}).encode()])
    with pytest.raises(ValueError, match="different runs"):
        find_run(out, store)
    (out / "run.json").write_text("{")
    assert find_run(out, store) == Run(first.run_id, 8), "the other one tells"
    shutil.rmtree(folder)
    for odd in ("5", '{"run_id": 5, "generation": 1}', '{"run_id": "x", "generation": "1"}', '{"run_id": "x"}'):
        (out / "run.json").write_text(odd)
        with pytest.raises(ValueError, match=r"run\.json names no run"):
            find_run(out, store)
    (out / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        find_run(out, store)


def test_a_run_began_when_any_record_of_it_says_so(tmp_path: Path) -> None:
    out, store, before = tmp_path / "out", open_store(str(tmp_path / "snapshots")), time.time()
    assert before <= find_run(out, store).began <= time.time()
    record_run(Run("us", 1, began=100.0), out, None, {})
    record_run(Run("us", 2, began=200.0), tmp_path / "snapshots", None, {})
    assert find_run(out, store).began == 100.0
    shutil.rmtree(out)  # the node of the first start is lost
    assert find_run(out, store).began == 200.0
    store.put("run.json", [json.dumps({"run_id": "us", "generation": 2}).encode()])  # as older versions wrote it
    assert before <= find_run(out, store).began <= time.time()


def test_a_run_that_other_nodes_know_of_is_taken_whatever_little_is_known_here(tmp_path: Path) -> None:
    out, store = tmp_path / "out", open_store(str(tmp_path / "snapshots"))
    out.mkdir()
    (out / "run.json").write_text("{")
    ours = snapshots(tmp_path / "snapshots", "us")
    ours.claim(Run("us", 8), out, {})
    ours.release()
    assert find_run(out, store) == Run("us", 9)
    record_run(Run("them", 1), out, store, {})
    with pytest.raises(ValueError, match="another start of this run was faster"):
        ours.claim(Run("us", 9), out, {})


def test_the_first_save_is_proof_that_there_was_one(tmp_path: Path) -> None:
    out, store = tmp_path / "out", open_store(str(tmp_path / "snapshots"))
    run = find_run(out, store)
    ours = snapshots(tmp_path / "snapshots", run.run_id)
    ours.claim(run, out, {"name": "x"})
    assert find_run(out, store).saved_in == ""
    ours.save(image(1, run.run_id), step=1, generation=1, facts={})
    ours.release()
    shutil.rmtree(tmp_path / "snapshots")
    assert find_run(out, store).saved_in == store.uri
    assert json.loads((out / "run.json").read_text())["name"] == "x"
