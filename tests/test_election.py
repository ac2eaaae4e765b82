"""Whose state all ranks go on from: the election alone, worlds whose nodes hold different images, and whole runs."""

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Runs, free_port, in_world
from hypothesis import given
from hypothesis import strategies as st
from test_trainer import trainer

from mingpt import distributed, election, slots
from mingpt.election import Holding, left_behind, newest_first
from mingpt.image import encode, sha256s, xxh3
from mingpt.lease import Run, open_run, record_run
from mingpt.remote import open_store
from mingpt.snapshot import Snapshots, find_image

# The election, without processes


def held(generation: int, step: int, rank: int = 0, uri: str = "") -> Holding:
    return Holding(generation, step, rank, "host", uri)


@pytest.mark.parametrize(
    ("winner", "losers"),
    [
        (held(1, 9), [held(1, 8, 1)]),
        (held(2, 3, 2), [held(1, 8, 0), held(1, 8, 1)]),  # a later formation went on from less
        (held(1, 9, 1), [held(1, 9, 0, "disk")]),  # memory costs no reading
        (held(1, 9, 1, "disk"), [held(1, 9, 2, "disk")]),  # one disk for all: one reader
        (held(1, 9, 1, "disk"), [held(1, 8, 0)]),
    ],
)
def test_the_newest_goes_first(winner: Holding, losers: list[Holding]) -> None:
    for order in ([winner, *losers], [*losers, winner]):
        assert newest_first(order)[0] == winner
    assert newest_first([]) == []


holdings = st.builds(
    Holding, st.integers(1, 3), st.integers(0, 5), st.integers(0, 4), st.just("host"), st.sampled_from(["", "a", "b"])
)


@given(st.sets(holdings), st.sets(holdings), st.randoms())
def test_the_newest_valid_one_wins_in_whatever_order_they_come(
    valid: set[Holding], damaged: set[Holding], chance: random.Random
) -> None:
    everything = [*valid | damaged]
    chance.shuffle(everything)
    winner = next((holding for holding in newest_first(everything) if holding in valid - damaged), None)
    newest = max(((it.generation, it.step) for it in valid - damaged), default=None)
    assert (winner and (winner.generation, winner.step)) == newest
    assert newest_first(everything) == newest_first(valid | damaged), "every rank comes to the same order"


def test_who_got_further_in_an_older_formation_is_named_once() -> None:
    winner = held(2, 5)
    behind = [held(1, 9, 1), held(1, 7, 2, "disk")]
    others = [held(1, 8, 1, "disk"), held(1, 5, 3), held(3, 9, 4), held(2, 4, 1), winner]
    assert left_behind(winner, [*others, *behind]) == behind


def node(*records: tuple[str, int], **more: Any) -> dict[str, Any]:
    rest = {"uri": "runs/x", "saved_in": "", "began": 9.0}
    told = [{"run_id": run_id, "generation": g, **rest} for run_id, g in records]
    return {"records": told, "damaged": [], "saved": [], "store": "store", "held": 0} | more


def test_the_run_is_what_any_node_knows_of() -> None:
    empty = node()
    assert open_run({"a": empty, "b": node(("us", 3))}) == Run("us", 4)
    assert open_run({"a": empty, "b": node(saved=[("us", 6)]), "c": node(held=8)}) == Run("us", 9)
    assert open_run({"a": node(damaged=["a is damaged"]), "b": node(("us", 3))}) == Run("us", 4)
    assert open_run({"a": node(("us", 3)), "b": node(saved=[("other", 9)])}) == Run("us", 4), "a record names it"
    assert open_run({"a": empty}).generation == 1 and open_run({"a": empty}).run_id != open_run({"a": empty}).run_id
    with pytest.raises(ValueError, match="b: it is damaged"):
        open_run({"a": empty, "b": node(damaged=["it is damaged"])})
    nodes = {f"node {number}": node(("us", 3)) for number in range(9)} | {"newcomer": node(("them", 1))}
    with pytest.raises(ValueError, match="different runs: run them in runs/x of newcomer; run us in .* and others;"):
        open_run(nodes)


def test_where_a_run_was_saved_is_known_by_any_of_its_records_or_snapshots() -> None:
    told = node(("us", 3))
    told["records"][0]["saved_in"] = "s3://there"
    assert open_run({"a": node(("us", 3)), "b": told}).saved_in == "s3://there"
    assert open_run({"a": node(saved=[("us", 3)])}).saved_in == "store"
    assert open_run({"a": node(("us", 3), saved=[("them", 3)])}).saved_in == ""


# Worlds of three nodes, each with folders of its own

CASES: dict[str, dict[str, Any]] = {
    # what each node has among its snapshots and in memory, as (generation, step, what is wrong with it)
    "one disk has it": {"disk": [[], [(1, 10, "")], []], "winner": (1, 10, 1)},
    "different disks": {"disk": [[(1, 5, "")], [(1, 10, "")], [(2, 5, "")]], "winner": (2, 5, 2)},
    "an empty first rank": {"disk": [[], [(1, 5, "")], [(1, 5, ""), (1, 10, "")]], "winner": (1, 10, 2)},
    "the newest is damaged": {"disk": [[(1, 5, "")], [(1, 10, "damaged")], [(1, 10, "gone")]], "winner": (1, 5, 0)},
    "the same is sound elsewhere": {"disk": [[(1, 10, "damaged")], [(1, 10, "")], []], "winner": (1, 10, 1)},
    "another run's": {"disk": [[(1, 5, "")], [(3, 10, "foreign")], []], "winner": (1, 5, 0)},
    "memory is newer": {"disk": [[(1, 5, "")], [], []], "memory": [None, None, (1, 10)], "winner": (1, 10, 2)},
    "memory is stale": {"disk": [[(2, 5, "")], [], []], "memory": [None, (1, 10), None], "winner": (2, 5, 0)},
    "memory comes first": {"disk": [[(1, 10, "")], [], []], "memory": [None, (1, 10), None], "winner": (1, 10, 1)},
    "memory alone is sound": {
        "disk": [[(1, 10, "damaged")], [], []], "memory": [None, (1, 5), None], "winner": (1, 5, 1),
    },
    "nothing anywhere": {"disk": [[], [], []], "winner": None},
}  # fmt: skip
ERRORS: dict[str, dict[str, Any]] = {
    "nothing is valid": {
        "disk": [[], [(1, 10, "damaged")], []],
        "error": r"ValueError: there are snapshots in .* of rank 1 \(.*\), but none is a valid one",
    },
    "a foreign node": {
        "disk": [[(1, 5, "")], [], []],
        "record": {2: "them"},
        "error": r"ValueError: .* different runs: run us in .*node0 of rank 0 .*; run them in .*node2 of rank 2 ",
    },
    "a disk that cannot be read": {
        "disk": [[(1, 5, "")], [], []],
        "unreadable": 1,
        "error": r"(PermissionError: no right to look|OSError: rank 1 \(.*\): no right to look)",
    },
    "wrong bytes on the wire": {
        "disk": [[(1, 5, "")], [], []],
        "corrupted": 2,
        "error": r"ConnectionError: not all ranks have the state that rank 0 \(.*\) sent, step 5, state \w+: "
        r"rank 2 \(.*\) step 5, state \w+;",
    },
}


@pytest.fixture(scope="module")
def states() -> dict[int, Any]:
    trained = {}
    for step in (5, 10):
        trained[step] = trainer(description={"run_id": "us"})
        trained[step].max_steps = step
        trained[step].fit()
    return trained


def furnish(folder: Path, case: dict[str, Any], states: dict[int, Any]) -> None:
    for rank, disk in enumerate(case["disk"]):
        out = folder / f"node{rank}"
        for generation, step, fault in disk:
            data = encode(states[step]._tensors(), states[step]._metadata() | {"generation": generation})
            store = open_store(str(out / "snapshots"))
            ours = Snapshots(store, "them" if fault == "foreign" else "us", keep_last=9)
            saved = ours.save(data, step=step, generation=generation, facts={})
            path = store.path(saved.image_name)
            assert path is not None
            if fault == "damaged":
                content = bytearray(path.read_bytes())
                content[-1] ^= 1
                path.write_bytes(content)
            if fault == "gone":
                path.unlink()
        run_id = case.get("record", {}).get(rank, "us" if disk else None)
        if run_id:
            record_run(Run(run_id, 1), out, None, {})
    if "memory" in case:
        for number, order in enumerate(case["memory"]):
            if order:
                state = states[order[1]]
                data = encode(state._tensors(), state._metadata() | {"generation": order[0]})
                (folder / f"memory{number}.safetensors").write_bytes(data.numpy().tobytes())


@contextmanager
def faults(case: dict[str, Any], folder: Path, rank: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        order = case.get("memory", [None] * 3)[rank]
        if order:
            image = find_image(str(folder / f"memory{rank}.safetensors"))[1]
            patch.setattr(slots, "newest_image", lambda ram_dir, run_id: (order, image))
            patch.setattr(slots, "known_generation", lambda ram_dir, run_id: 6)
        if case.get("unreadable") == rank:

            def refuse(*_: object) -> None:
                raise PermissionError("no right to look")

            patch.setattr(election, "look_around", refuse)
        if case.get("corrupted") == rank:
            whole = distributed.broadcast

            def corrupt(tensor: torch.Tensor, *place: Any) -> None:
                whole(tensor, *place)
                if tensor.dim() == 2:
                    tensor[0, 0] += 1

            patch.setattr(distributed, "broadcast", corrupt)
        yield


def formations(folder: Path) -> list[Any]:
    """In one world, one case after the other: (run, who gave its state, step, sums of the state), or the error."""
    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    world = distributed.locate()
    distributed.connect(world, {}, 60)
    results: list[Any] = []
    for name, case in (CASES | ERRORS).items():
        out = folder / name / f"node{rank}"
        store = open_store(str(out / "snapshots"))
        newcomer = trainer(world=world)
        torch.nn.init.normal_(newcomer.model.transformer.wte.weight)  # type: ignore[union-attr]
        try:
            with faults(case, folder / name, rank):
                run = election.agree_on_run(world, out, store, None)
                found = election.find_newest(world, Snapshots(store, run.run_id), None)
                newcomer.restore(found.image if found else None, owner=found.holding.rank if found else 0)
            winner = found and (found.holding.generation, found.holding.step, found.holding.rank)
            tensors = newcomer._tensors()
            results.append([run.run_id, run.generation, winner, newcomer.step, sha256s(tensors)[1], xxh3(tensors)])
        except (ValueError, OSError) as error:
            results.append(f"{type(error).__name__}: {error}")
        newcomer.close()
    distributed.leave()
    return results


@pytest.fixture(scope="module")
def formed(tmp_path_factory: pytest.TempPathFactory, states: dict[int, Any]) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("worlds")
    for name, case in (CASES | ERRORS).items():
        furnish(folder / name, case, states)
    ranks = in_world(3, formations, folder, timeout=240)
    return {name: list(results) for name, *results in zip(CASES | ERRORS, *ranks, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_end_at_the_newest_valid_image_wherever_it_lies(name: str, formed: Any, states: Any) -> None:
    case, results = CASES[name], formed[name]
    assert all(result == results[0] for result in results), results
    run_id, generation, winner, step, state, _ = results[0]
    assert winner == case["winner"]
    if winner:
        assert run_id == "us"
        assert step == winner[1]
        assert state == sha256s(states[step]._tensors())[1]
    highest = max([6 if "memory" in case else 0, *(g for d in case["disk"] for g, _, f in d if f != "foreign")])
    assert generation == 1 + highest, "one more than any node knows of"


@pytest.mark.parametrize("name", ERRORS)
def test_all_ranks_are_told_what_is_wrong_and_where(name: str, formed: Any) -> None:
    for result in formed[name]:
        assert isinstance(result, str), result
        assert re.match(ERRORS[name]["error"], result), result


def everything(world_size: int) -> list[Any]:
    world = distributed.locate()
    distributed.connect(world, {}, 60)
    tensor = torch.full((3,), float(world.rank))
    distributed.broadcast(tensor, world, source=1)
    texts = distributed.gather_json(world, {"rank": world.rank, "text": "é" * world.rank * 1000})
    told = distributed.broadcast_json([world.rank, None], world, source=world_size - 1)
    answer = distributed.decide(world, lambda: world.rank * 10, source=1)
    distributed.leave()
    return [tensor.tolist(), texts, told, answer]


def test_every_rank_can_speak_to_all() -> None:
    texts = [{"rank": rank, "text": "é" * rank * 1000} for rank in range(3)]
    assert in_world(3, everything, 3) == [[[1.0] * 3, texts, [2, None], 10]] * 3


# Whole runs


def nodes(runs: list[Path], *overrides: str) -> list[str]:
    """One torchrun in each of the folders, as on nodes without a common disk; what they said."""
    command = Runs.command(Runs.__new__(Runs), *overrides)[1:]
    port = free_port()
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(runs)}", "--nproc_per_node=1",
             f"--node_rank={rank}", "--master_addr=127.0.0.1", f"--master_port={port}", *command],
            cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank, folder in enumerate(runs)
    ]  # fmt: skip
    try:
        outputs = [agent.communicate(timeout=240)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0] * len(runs), outputs
    return outputs


def test_an_empty_newcomer_as_first_rank_goes_on_where_the_others_are(tmp_path: Path) -> None:
    old, new, calm = (tmp_path / name for name in ("old", "new", "calm"))
    for folder in (old, new, calm):
        folder.mkdir()
    exact = "--train.reduction=exact"
    before = Runs(old)
    before(exact, "--train.max_steps=10")
    alone = Runs(calm)
    alone(exact, "--train.max_steps=10")
    alone(exact, "--train.max_steps=20")
    first = Runs(new)
    said, _ = nodes([new, old], exact, "--train.max_steps=20")
    assert re.search(r"going on from runs/small/snapshots/step-000000010-g1-\w+\.safetensors of rank 1 \(", said)
    assert "going on at step 10 of 20" in said
    records = [json.loads((folder / "runs/small/run.json").read_text()) for folder in (old, new)]
    assert records[0]["run_id"] == records[1]["run_id"] == before.rows()[0]["run_id"]
    assert [record["generation"] for record in records] == [2, 2]
    assert first.manifest()["step"] == 20
    assert first.manifest()["state_sha256"] == alone.manifest()["state_sha256"]
    assert min(first.losses()) == 11, "no step was done again"

    # Finished on a node that is not the first: its state is kept there as well, and nothing is trained.
    said, _ = nodes([old, new], exact, "--train.max_steps=20")
    assert before.manifest()["step"] == 20
    assert before.manifest()["state_sha256"] == alone.manifest()["state_sha256"]
    assert max(before.losses()) == 10
