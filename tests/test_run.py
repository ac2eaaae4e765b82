"""Whole runs of train_gpt.py: started, killed, resized, resumed, refused."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, Runs, free_port, read_until_step, text

import train_gpt
from mingpt.distributed import World
from mingpt.grid import Grid
from mingpt.model import GPTConfig
from mingpt.slots import newest_image


def sums(output: str) -> tuple[str, str]:
    return tuple(re.findall(r"_sha256 +([0-9a-f]{64})", output))  # type: ignore[return-value]


def test_a_run_ends_by_naming_everything_and_running_it_again_says_so(runs: Runs) -> None:
    output = runs()
    manifest = runs.manifest()
    assert manifest["step"] == 40
    assert sums(output) == (manifest["weights_sha256"], manifest["state_sha256"])
    losses = runs.losses()
    assert list(losses) == list(range(1, 41))
    assert losses[40] < losses[1]
    for needed in ("tokens/s", "left 0:00", "--- sample at step 40", "metrics.jsonl", "mingpt.sample runs/small"):
        assert needed in output
    assert [row["step"] for row in runs.rows() if "val/loss" in row] == [0, 20, 40]
    rows = [row for row in runs.rows() if row["step"] == 20 and "event" not in row]
    assert len(rows) == 1, "the last row of a step wins: one holds all"
    assert {"run.json", "config.yaml", "metrics.jsonl", "snapshots"} == set(os.listdir(runs.folder / "runs/small"))

    again = runs()
    assert "finished already: 40 of 40" in again
    assert sums(again) == sums(output)

    longer = runs("--train.max_steps=50")
    assert "going on at step 40 of 50" in longer
    assert runs.manifest()["step"] == 50

    refused = runs("--train.max_steps=60", "--optim.learning_rate=0.002", expect=2)
    assert "optim.learning_rate was 0.001 in this run and is 0.002 now" in refused
    assert len(refused.strip().splitlines()) == 1
    changed = runs("--train.max_steps=60", "--optim.learning_rate=0.002", "--snapshot.resume=must")
    assert "changed since the last start: optim.learning_rate was 0.001, is 0.002 now" in changed
    never = runs("--train.max_steps=70", "--seed=2", "--snapshot.resume=must", expect=2)
    assert "seed was 1337 in this run and is 2 now: this cannot change" in never


def kill_at(process: "subprocess.Popen[str]", step: int) -> str:
    """Kills the run with SIGKILL when it has logged `step`; what it said."""
    said = read_until_step(process, step)
    process.kill()
    assert process.stdout is not None
    said += process.stdout.read()
    process.wait()
    return said


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_kill_9_costs_the_steps_since_the_last_snapshot_and_no_bit(runs: Runs, reduction: str) -> None:
    settings = (f"--train.reduction={reduction}", "--log.interval=1")
    runs("--name=calm", *settings)
    executed = []
    for step in (13, 25, 38):
        said = kill_at(runs.start("--name=killed", *settings), step)
        executed += [int(s) for s in re.findall(r"^step +(\d+)/40 +loss", said, re.M)]
    output = runs("--name=killed", *settings)
    assert "going on at step 30 of 40" in output
    executed += [int(s) for s in re.findall(r"^step +(\d+)/40 +loss", output, re.M)]
    assert len(executed) <= 40 + 3 * 10, "at most the steps since the last snapshot are done again"
    assert sorted(set(executed)) == list(range(1, 41))
    assert runs.manifest("killed")["state_sha256"] == runs.manifest("calm")["state_sha256"]
    assert runs.losses("killed") == runs.losses("calm"), "the replayed steps too"
    assert [row["generation"] for row in runs.rows("killed") if row.get("event") == "start"] == [1, 2, 3, 4]


def test_exact_mode_is_one_run_through_changing_world_sizes(runs: Runs) -> None:
    exact = "--train.reduction=exact"
    runs("--name=calm", exact)
    process = runs.start("--name=resized", exact, ranks=3, launcher="torchrun")
    kill_at(process, 12)
    output = runs("--name=resized", exact, ranks=2, launcher="torchrun")
    assert "going on at step" in output
    assert runs.manifest("resized")["state_sha256"] == runs.manifest("calm")["state_sha256"]
    assert runs.losses("resized") == runs.losses("calm")


def test_torchrun_in_fast_mode_is_the_single_process_within_tolerance(runs: Runs) -> None:
    runs("--name=one")
    output = runs("--name=three", ranks=3, launcher="torchrun")
    assert "3 ranks, 3 of them on this host" in output
    one, three = runs.losses("one"), runs.losses("three")
    np.testing.assert_allclose(list(three.values()), list(one.values()), rtol=1e-5)
    assert output.count("step 40/40") == 1, "rank 0 alone speaks"


def test_ranks_without_cells_are_told_how_to_be_of_use(runs: Runs) -> None:
    output = runs("--train.micro_batch_size=6", "--train.max_steps=12", ranks=3, launcher="torchrun")
    assert output.count("1 of 3 ranks have nothing to do; train.micro_batch_size=4 makes 3 cells for them") == 1


def test_kill_9_leaves_an_image_in_memory_of_a_second_or_a_step_ago(runs: Runs) -> None:
    process = runs.start("--train.max_steps=100000", "--train.eval_interval=0")
    kill_at(process, 60)
    run_id = json.loads((runs.folder / "runs/small/run.json").read_text(encoding="utf-8"))["run_id"]
    newest = newest_image(runs.folder / "ram", run_id)
    assert newest is not None
    (generation, step), image = newest
    assert generation == 1
    assert image.metadata["config"]["name"] == "small"
    times = {row["step"]: row["time"] for row in runs.rows() if "train/loss" in row}
    assert step >= max(times) - 1 or times[max(times)] - times[step] < 1.2
    runs("--train.max_steps=100", "--snapshot.resume=must")
    assert os.listdir(runs.folder / "ram") == [], "the run has ended"


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_sigterm_keeps_everything(runs: Runs, launcher: str) -> None:
    settings = ("--train.max_steps=100000", "--snapshot.save_interval=0", "--train.eval_interval=0")
    process = runs.start(*settings, ranks=2, launcher=launcher)
    output = read_until_step(process, 20)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    output += process.stdout.read()
    stopped = re.search(r"stopped on request at step (\d+)", output)
    assert stopped, output
    assert process.wait() == (75 if launcher == "python" else 1), "torchrun itself turns 75 into 1"
    assert runs.manifest()["step"] == int(stopped[1])


def test_workers_die_with_their_agent(runs: Runs) -> None:
    process = runs.start("--train.max_steps=1000000", "--log.interval=1", ranks=2, launcher="torchrun")
    kill_at(process, 5)  # returns when the last holder of the pipe is gone
    deadline = time.monotonic() + 5
    while workers_in(runs.folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not workers_in(runs.folder)


def test_a_second_start_of_the_same_run_is_refused(runs: Runs) -> None:
    first = runs.start("--train.max_steps=1000000", "--snapshot.save_interval=5")
    read_until_step(first, 6)
    assert f"in use by another start of this run (process {first.pid} on" in refused(runs, "--train.max_steps=1000000")
    read_until_step(first, 12)  # which goes on
    first.kill()
    first.communicate()
    again = runs.start("--train.max_steps=1000000")
    assert "going on at step" in read_until_step(again, 12), "the kernel gave the lock back"


def test_agents_restart_a_killed_worker_at_their_own_pace(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's store still holds the addresses of the dead, and here rank 0 looks long before rank 1 arrives."""
    (runs.folder / "sitecustomize.py").write_text(
        "import os, time\n"
        "if os.environ.get('RANK') == '1' and os.environ.get('TORCHELASTIC_RESTART_COUNT') == '1': time.sleep(4)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(runs.folder))
    command = runs.command("--train.max_steps=400", ranks=2, launcher="torchrun")
    command.insert(command.index("--standalone"), "--max-restarts=1")
    process = subprocess.Popen(command, cwd=runs.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    runs.started.append(process)
    said = read_until_step(process, 15)
    worker = next(number for number in workers_in(runs.folder) if int(number) != process.pid)
    os.kill(int(worker), signal.SIGKILL)
    output = said + process.communicate()[0]
    assert process.returncode == 0, output
    assert re.search("generation 2: 2 ranks, 2 of them on this host, restart 1", output)
    assert runs.manifest()["step"] == 400


def workers_in(folder: Path) -> list[str]:
    """Processes whose working directory is `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve() == folder.resolve() and (process / "stat").read_text().split()[2] != "Z":
                found.append(process.name)
        except OSError:
            continue
    return found


def refused(runs: Runs, *overrides: str, code: int = 2) -> str:
    """The one line in which the command is refused."""
    output = runs(*overrides, expect=code)
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert output.endswith(line + "\n"), "and nothing after it, no traceback"
    assert "Traceback" not in output
    return line


def test_byte_pairs_train_sample_and_refuse_another_tokenizer(runs: Runs) -> None:
    said = runs("--data.tokenizer=bpe", "--data.vocab_size=280", "--train.max_steps=10")
    assert "vocabulary 280" in said and "--- sample at step 10 ---" in said
    line = refused(runs, "--train.max_steps=20")
    assert "another tokenizer (bpe, 280 tokens)" in line and "--name=NEW" in line


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "no text"),
        (b"ab\xff\xfecd" * 100, "not UTF-8 at byte 2"),
        (b"abc\n" * 4, "training split has 15 tokens"),
    ],
)
def test_texts_that_cannot_be_trained_on(runs: Runs, content: bytes, expected: str) -> None:
    (runs.folder / "text.txt").write_bytes(content)
    assert expected in refused(runs)
    assert not (runs.folder / "runs").exists()


def test_missing_text_and_wrong_device(runs: Runs) -> None:
    assert "data.path=elsewhere.txt does not exist" in refused(runs, "--data.path=elsewhere.txt")
    assert "has 0 CUDA devices; set device=auto or device=cpu" in refused(runs, "--device=cuda")
    assert "a model of 54,0" in refused(runs, "--model.n_embd=3000000", "--model.n_layer=500", "--model.n_head=1")


@pytest.mark.parametrize(
    ("shape", "grid", "max_steps", "message"),
    [
        ({"n_layer": 10**8}, {}, 1, "a model of .* parameters .*make it smaller"),
        ({}, {"global_batch_size": 2**31 - 1, "block_size": 9}, 1, "global_batch_size=2147483647 needs"),
        ({}, {}, 2**31, "max_epochs comes to 2147483648 steps"),
        ({}, {}, 2**31 - 1, ""),
    ],
)
def test_sizes_that_no_machine_holds(shape: dict[str, int], grid: dict[str, int], max_steps: int, message: str) -> None:
    model = GPTConfig(vocab_size=9, **{"n_layer": 1, "n_head": 1, "n_embd": 8, **shape})
    cells = Grid(**{"n_tokens": 99, "block_size": 9, "global_batch_size": 2, "micro_batch_size": 1, "seed": 0, **grid})
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        train_gpt.check_size(model, cells, max_steps, World(0, 0, 1, 1, torch.device("cpu")))


def test_all_config_problems_at_once_by_rank_0_alone(runs: Runs) -> None:
    output = runs("--train.max_stps=3", "--optim.learning_rate=fast", expect=1, ranks=2, launcher="torchrun")
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2, output
    assert "train.max_steps" in output


def test_ranks_that_differ_are_told_which_setting_differs(runs: Runs) -> None:
    script = (
        f"import os, sys, runpy; sys.path.insert(0, {str(ROOT)!r}); beta1 = '0.' + os.environ['RANK'] + '9';"
        "sys.argv = ['train_gpt.py', 'small.yaml', '--optim.beta1=' + beta1];"
        f"runpy.run_path({str(ROOT / 'train_gpt.py')!r}, run_name='__main__')"
    )
    (runs.folder / "differ.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "differ.py"],
        cwd=runs.folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "the ranks do not describe the same run: optim.beta1 is 0.19 on rank 1" in done.stderr
    assert done.returncode == 1


def test_a_snapshot_of_another_text_is_refused(runs: Runs) -> None:
    runs("--train.max_steps=12")
    (runs.folder / "text.txt").write_text(text(7000), encoding="utf-8")
    assert "data.fingerprint was" in refused(runs, "--train.max_steps=20")
    (runs.folder / "text.txt").write_text(text(7000).replace("q", "é"), encoding="utf-8")
    assert "'q' are missing here, '\\xe9' are new" in refused(runs, "--train.max_steps=20")
    assert "'q' are missing here" in refused(runs, "--name=tuned", "--snapshot.init_from=runs/small")


def test_fine_tuning_starts_from_the_weights_alone(runs: Runs) -> None:
    runs("--train.max_steps=20")
    base = runs.manifest()
    runs("--name=tuned", "--snapshot.init_from=runs/small", "--optim.learning_rate=1e-9", "--optim.min_lr=0",
         "--train.max_steps=10")  # fmt: skip
    tuned = [row["val/loss"] for row in runs.rows("tuned") if "val/loss" in row]
    assert tuned[0] == pytest.approx(base["val_loss"], rel=1e-6)
    assert "no snapshot" in refused(runs, "--name=other", "--snapshot.init_from=runs/nothing")


def test_unreadable_snapshots_are_not_a_fresh_start(runs: Runs) -> None:
    runs("--train.max_steps=12")
    folder = runs.folder / "runs/small/snapshots"
    for path in folder.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    output = runs("--train.max_steps=20", expect=2)
    assert "none is a valid one" in output
    assert "NOT USED" in output
    shutil.rmtree(folder)
    lost = refused(runs, "--train.max_steps=20")
    assert "was saved in runs/small/snapshots, but no image of it is in runs/small/snapshots" in lost
    assert "--name=NEW" in lost
    shutil.rmtree(runs.folder / "runs/small")
    assert "starting at step 0" in runs("--train.max_steps=12")


def test_a_run_that_was_killed_before_its_first_snapshot_starts_over(runs: Runs) -> None:
    settings = ["--snapshot.save_interval=0", "--train.eval_interval=0", "--elastic.ram_image=off"]
    kill_at(runs.start(*settings), 3)
    output = runs(*settings, "--train.max_steps=12")
    assert "nothing tells that this run was ever saved: starting over at step 0" in output
    assert "generation 2" in output


def test_a_run_that_was_killed_goes_on_from_memory_where_nothing_else_is(runs: Runs) -> None:
    settings = ["--snapshot.save_interval=0", "--train.eval_interval=0", "--train.max_steps=1000"]
    said = kill_at(runs.start(*settings), 30)
    done = int(re.findall(r"^step +(\d+)/", said, re.M)[-1])
    second = sum(row["time"] > runs.rows()[-1]["time"] - 1 for row in runs.rows() if "train/loss" in row)
    output = read_until_step(runs.start(*settings), 1)
    assert "going on from the image in memory of rank 0" in output
    (start,) = re.findall(r"going on at step (\d+) of 1000", output)
    assert done - max(1, second) <= int(start) <= done + 1


def test_snapshots_elsewhere_are_named_where_they_are(runs: Runs) -> None:
    output = runs("--snapshot.uri=my snapshots", "--train.max_steps=6", "--train.eval_interval=0")
    assert "python -m mingpt.sample 'my snapshots'" in output
    assert list((runs.folder / "my snapshots").glob("*.safetensors"))
    refusal = refused(runs, "--name=other", "--snapshot.uri=my snapshots", "--seed=2")
    assert "--name=NEW (and another out_dir or snapshot.uri, where they are set)" in refusal


def test_ranks_started_by_hand_and_the_old_local_rank_option(runs: Runs) -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            runs.command("--train.max_steps=6", f"--local-rank={rank}"), cwd=runs.folder, text=True,
            env=os.environ | place | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "2 ranks, 2 of them on" in outputs[0]
    assert outputs[1] == ""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "3"}, "RANK=3 is outside 0 .. WORLD_SIZE-1=0"),
        ({"RANK": "x"}, "RANK='x', which is no number"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 needs RANK, MASTER_ADDR, MASTER_PORT in the environment too"),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"},
            "rank 0 of 2 did not meet the others at 127.0.0.1:",
        ),
    ],
)
def test_worlds_that_cannot_be(runs: Runs, environment: dict[str, str], expected: str) -> None:
    if len(environment) == 3:
        environment = environment | {"MASTER_PORT": str(free_port())}
    done = subprocess.run(
        runs.command("--elastic.timeout_seconds=0.2"), cwd=runs.folder, env=os.environ | environment,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert expected in line
    assert done.returncode == (1 if "meet" in expected else 2)
    assert "Traceback" not in done.stderr


def test_compiling_that_fails_falls_back_on_every_rank(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(runs.folder / "cache"))
    output = runs("--compile=true", "--train.max_steps=6", ranks=2, launcher="torchrun")
    assert output.count("compile=true does not work here") == 2, "each rank says why"
    assert output.count("going on without compiling, on every rank") == 1
    assert runs.manifest()["step"] == 6
