"""The longer proofs: `make proof`. They repeat what the quick tests show once until chance has no part in it."""

import itertools
import random
import re
import shutil
import signal
import time

import pytest
from conftest import Runs, read_until_step

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1200)
def test_thirty_clean_exits_in_a_row(runs: Runs) -> None:
    for attempt in range(30):
        output = runs(
            f"--name=exit{attempt}", "--train.max_steps=3", "--train.eval_interval=0", ranks=2, launcher="torchrun"
        )
        assert "weights_sha256" in output
        assert not re.search("abort|terminate|SIG|Error", output), output


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_twenty_kills_at_any_moment(runs: Runs, reduction: str) -> None:
    settings = [f"--train.reduction={reduction}", "--train.max_steps=1000", "--train.eval_interval=100"]
    runs("--name=calm", *settings)
    chance = random.Random(0)
    for _ in range(20):
        ranks = 1 if reduction == "fast" else chance.choice([1, 2, 3])
        process = runs.start("--name=killed", *settings, ranks=ranks, launcher="python" if ranks == 1 else "torchrun")
        first = int(re.findall(r"^step +(\d+)/", read_until_step(process, 0), re.M)[-1])
        read_until_step(process, first + chance.randrange(1, 35))
        time.sleep(chance.uniform(0, 0.02))  # some steps long: in the middle of one, or of a save
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    runs("--name=killed", *settings)

    executed: dict[int, list[int]] = {}  # by start
    for row in runs.rows("killed"):
        if "train/loss" in row:
            executed.setdefault(row["generation"], []).append(row["step"])
    assert list(executed) == list(range(1, 22)), "each kill landed in a start that had made steps"
    for before, after in itertools.pairwise(executed.values()):
        assert 0 <= before[-1] + 1 - after[0] <= 10, "at most the steps since the last snapshot are done again"
    assert runs.manifest("killed")["state_sha256"] == runs.manifest("calm")["state_sha256"]
    assert runs.losses("killed") == runs.losses("calm"), "of every step"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_hash_at_any_number_of_ranks_under_torchrun(runs: Runs, dtype: str) -> None:
    hashes = {}
    for reduction in ("exact", "fast"):
        for ranks in (1, 2, 3, 5, 7):
            name = f"{reduction}{ranks}"
            runs(f"--name={name}", f"--train.reduction={reduction}", f"--dtype={dtype}", "--train.max_steps=100",
                 ranks=ranks, launcher="torchrun", timeout=400)  # fmt: skip
            hashes[name] = runs.manifest(name)["state_sha256"]
    assert len({hashes[f"exact{ranks}"] for ranks in (1, 2, 3, 5, 7)}) == 1
    assert len(set(hashes.values())) > 2, "the control: float sums differ"


@pytest.mark.timeout(600)
def test_an_image_of_four_ranks_goes_on_with_any_number(runs: Runs) -> None:
    constant = "--optim.schedule=constant"
    runs("--name=calm", "--train.max_steps=30", constant)
    runs("--name=four", "--train.max_steps=20", constant, ranks=4, launcher="torchrun")
    for ranks in (1, 3, 5):
        shutil.copytree(runs.folder / "runs/four", runs.folder / f"runs/{ranks}")
        output = runs(f"--name={ranks}", "--train.max_steps=30", constant, ranks=ranks, launcher="torchrun")
        assert "going on at step 20 of 30" in output
        assert runs.losses(str(ranks)) == pytest.approx(runs.losses("calm"), rel=1e-4)


def test_compiled_training_is_the_same_within_tolerance(runs: Runs) -> None:
    settings = ["--train.max_steps=12", "--model.dropout=0", "--train.eval_interval=0"]
    runs("--name=eager", *settings)
    output = runs("--name=compiled", *settings, "--compile=true", timeout=280)
    assert "does not work" not in output
    eager, compiled = runs.losses("eager"), runs.losses("compiled")
    assert list(compiled.values()) == pytest.approx(list(eager.values()), rel=1e-4)
    two = runs("--name=two", *settings, "--compile=true", ranks=2, launcher="torchrun", timeout=280)
    assert "does not work" not in two
    assert list(runs.losses("two").values()) == pytest.approx(list(eager.values()), rel=1e-4)


def test_a_resume_from_eager_to_compiled_and_from_three_ranks_to_one(runs: Runs) -> None:
    runs("--train.max_steps=10", ranks=3, launcher="torchrun")
    output = runs("--train.max_steps=20", "--compile=true", timeout=280)
    assert "going on at step 10" in output
    assert "compiling the model" in output and "does not work" not in output
    assert list(runs.losses()) == list(range(1, 21))
