"""The longer proofs: `make proof`. They repeat what the quick tests show once until chance has no part in it."""

import random
import re
import subprocess
import sys
import time

import pytest
from conftest import ROOT, Runs

pytestmark = pytest.mark.slow


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
    settings = [
        f"--train.reduction={reduction}",
        "--train.max_steps=400",
        "--train.eval_interval=100",
        "--log.interval=1",
    ]
    runs("--name=calm", *settings)
    moments = random.Random(0)
    landed = 0
    while landed < 20:
        ranks = 1 if reduction == "fast" else moments.choice([1, 2, 3])
        process = runs.start("--name=killed", *settings, ranks=ranks, launcher="python" if ranks == 1 else "torchrun")
        try:
            output, _ = process.communicate(timeout=moments.uniform(2, 9))
            assert process.returncode == 0, output
            break  # it came to its end before all twenty
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            landed += 1
    output = runs("--name=killed", *settings)
    assert landed >= 5, "too few kills to prove anything"
    executed = [row["step"] for row in runs.rows("killed") if "train/loss" in row]
    assert sorted(set(executed)) == list(range(1, 401))
    assert len(executed) <= 400 + 10 * landed, "at most the steps since the last snapshot are done again"
    assert runs.manifest("killed")["state_sha256"] == runs.manifest("calm")["state_sha256"]
    assert runs.losses("killed") == runs.losses("calm")


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


def test_start_costs_little_beyond_torch() -> None:
    def seconds(code: str) -> float:
        times = []
        for _ in range(3):
            started = time.monotonic()
            subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
            times.append(time.monotonic() - started)
        return min(times)

    assert seconds("import torch, mingpt") - seconds("import torch") < 0.5
