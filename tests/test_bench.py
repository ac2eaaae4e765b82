"""The benchmark command: every kind of row, and a stranger's model beside ours, in turns."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

BASELINE = ROOT / "tests" / "baseline"


def bench(*options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "mingpt.bench", *options], cwd=ROOT, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options", [["train"], ["sample", "--batch", "2"], ["sample", "--batch=1", "--dtype=bfloat16"]]
)
def test_a_row_and_its_rival(options: list[str]) -> None:
    done = bench(*options, "--rounds=2", "--steps=2", "--threads=1", f"--against={BASELINE}", "--shapes", "tiny")
    assert done.returncode == 0, done.stderr
    ours, theirs = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert [ours["who"], theirs["who"]] == ["mingpt", "nanoGPT"]
    assert ours["mingpt_is_times"] == 1 and theirs["mingpt_is_times"] != 1
    for row in (ours, theirs):
        assert (row["what"], row["shape"], row["threads"]) == (options[0], "tiny", 1)
        assert 0 < row["lowest"] <= row["tokens_per_second"] <= row["highest"]
        assert row["share_of_peak"] > 0
        assert options[0] == "train" or row["dtype"] == ("bfloat16" if "--dtype=bfloat16" in options else "float32")
        assert row["peak_memory"] > 50e6
    table = done.stdout.splitlines()[-4:]
    assert "tokens/s" in table[0] and " mingpt " in table[1] and " nanoGPT " in table[2] and " x" in table[2]


def test_what_cannot_be_measured_is_said_in_one_line(tmp_path: Path) -> None:
    assert "no GPU here" in bench("gpu").stderr
    for options, what in (
        (["train", "--shapes=d"], "--shapes=d: give one of tiny, a, b, c"),
        (["train", "--rounds=0"], "--rounds=0: give 1 or more"),
        (["train", "--against=transformers"], "--against=transformers: train has no such baseline"),
    ):
        done = bench(*options)
        assert done.returncode == 2 and what in done.stderr
    done = bench("train", "--shapes=tiny", "--steps=1", "--rounds=1", f"--against={tmp_path}")
    assert done.returncode == 1 and f"{tmp_path} has ended with code 1" in done.stderr.splitlines()[-1]
