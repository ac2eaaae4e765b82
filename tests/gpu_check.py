"""What only a GPU can show, in some ten minutes: `make gpu-check`. Ends with a table; exit code 1 if a row failed.

`python tests/gpu_check.py speed launch` makes the rows of these groups alone (then: gpt2, small), where time is short.
Trains, kills, resumes and samples a small model and one of GPT-2's size on CUDA in bfloat16, compiled and not, and runs
exact reduction twice for one hash; on two GPUs, where there are two, over NCCL. Without CUDA it says that it skipped.
"""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

try:
    import torch
except ImportError as error:
    print(f"gpu-check: SKIPPED, {sys.executable} has no torch ({error}); nothing was checked")
    sys.exit(0)

ROOT = Path(__file__).parent.parent
LIMIT = 120  # seconds for one run; what takes longer hangs

DEVICE = "cuda"
BENCH = "gpu"
BASELINE = f"--against={ROOT / 'tests' / 'baseline'}"
GPT2_LOG_INTERVAL = 10

SMALL = ["configs/smoke.yaml", "--data.path={text}", "--train.max_steps=150", "--snapshot.save_interval=20"]
GPT2 = [
    "configs/smoke.yaml", "--data.path={text}", "--model.preset=gpt2", "--model.block_size=1024",
    "--train.global_batch_size=16", "--train.micro_batch_size=8", "--train.max_steps=100", "--train.eval_interval=0",
    "--train.eval_sequences=16", "--snapshot.save_interval=50", f"--log.interval={GPT2_LOG_INTERVAL}",
    "--optim.learning_rate=3e-4",
]  # fmt: skip


def run(folder: Path, name: str, *overrides: str, kill_at: int = 0, gpus: int = 1) -> str:
    """One run of train_gpt.py on CUDA; killed with SIGKILL once step `kill_at` is logged, where given."""
    options = [option.format(text=folder / "text.txt") for option in overrides]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"] if gpus > 1 else []
    command = [sys.executable, *launcher, "train_gpt.py", *options]
    started, said = time.monotonic(), []
    process = subprocess.Popen(
        [*command, f"--device={DEVICE}", f"--out_dir={folder / name}", f"--name={name}"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    # torchrun is asked: it then ends its workers, after 30 s by force, and killed it could leave some behind.
    hung = threading.Timer(LIMIT, process.terminate if launcher else process.kill)
    hung.start()
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        step = re.match(r"step +(\d+)/", line)
        if kill_at and step and int(step[1]) >= kill_at:
            process.kill()
    code = process.wait()
    hung.cancel()
    output = "".join(said)
    assert time.monotonic() - started < LIMIT, f"{name} was ended after {LIMIT} s:\n{output[-3000:]}"
    assert code == (-9 if kill_at else 0), f"{name} ended with {code}:\n{output[-3000:]}"
    return output


def sums(output: str) -> list[str]:
    return re.findall(r"_sha256 +([0-9a-f]{64})", output)


def rows(folder: Path, name: str) -> list[dict[str, float]]:
    """What a run logged of its updates."""
    lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "train/loss" in row]


def median_rate(folder: Path, name: str) -> float:
    """Tokens/s of the rows after the first two."""
    return statistics.median(row["perf/tokens_per_second"] for row in rows(folder, name)[2:])


def told(rate: float, shape: str) -> str:
    """Tokens/s, and the share of the device's peak in bfloat16 that a model of `mingpt.bench` makes of it."""
    from mingpt.bench import SHAPES
    from mingpt.distributed import peak_flops
    from mingpt.model import GPT, GPTConfig

    with torch.device("meta"):
        flops = GPT(GPTConfig(**SHAPES[shape][0])).flops_per_token()
    peak = peak_flops(torch.device(DEVICE), torch.bfloat16)
    return f"{rate:,.0f} tokens/s, MFU {f'{rate * flops / peak:.1%}' if peak else 'unknown'}"


def exact_cost(folder: Path) -> str:
    """The speed of exact reduction, and how it compares with fast, neither of them compiled."""
    exact, fast = median_rate(folder, "gpt2-calm"), median_rate(folder, "fast")
    return f"{exact:,.0f} tokens/s, {exact / fast:.2f} of fast"


def killed_and_resumed(folder: Path, name: str, settings: list[str], kill_at: int) -> str:
    """A killed and resumed run beside an undisturbed one, in exact mode: one hash."""
    exact = [*settings, "--train.reduction=exact", "--dtype=bfloat16"]
    calm = sums(run(folder, f"{name}-calm", *exact))
    run(folder, f"{name}-killed", *exact, kill_at=kill_at)
    resumed = run(folder, f"{name}-killed", *exact)
    went_on = re.search(r"going on at step (\d+)", resumed)
    assert went_on and int(went_on[1]) > 0, "it started over"
    assert sums(resumed) == calm, f"{sums(resumed)} is not {calm}"
    return f"went on at step {went_on[1]}, one hash: {calm[0][:16]}"


def launched(folder: Path, *settings: str) -> str:
    """Under mingpt.launch: the worker is killed with SIGKILL, the world forms anew, the hash is the calm run's."""
    from mingpt.chaos import children

    exact = [*SMALL, "--train.reduction=exact", "--dtype=bfloat16", *settings]
    name = f"launched{len(settings)}"
    calm = sums(run(folder, f"{name}-calm", *exact))
    options = [option.format(text=folder / "text.txt") for option in exact]
    process = subprocess.Popen(
        [sys.executable, "-m", "mingpt.launch", "--nnodes=1", "--nproc-per-node=1", "train_gpt.py", *options,
         f"--device={DEVICE}", f"--out_dir={folder / name}", f"--name={name}"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    hung = threading.Timer(LIMIT, process.kill)
    hung.start()
    said, killed = [], 0.0
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if not killed and re.match(r"step +33/", line):
            (agent,) = children(process.pid)
            os.kill(children(agent)[0], signal.SIGKILL)
            killed = time.monotonic()
        elif killed and "recovered" in line:
            killed -= time.monotonic()
    code = process.wait()
    hung.cancel()
    output = "".join(said)
    assert code == 0 and killed < 0, f"{name} ended with {code}:\n{output[-3000:]}"
    assert sums(output) == calm, f"{sums(output)} is not {calm}"
    return f"going on after {-killed:.1f} s, one hash: {calm[0][:16]}"


def image_cost(folder: Path, name: str) -> str:
    """What the images in memory kept the training, as a share of it."""
    timed = rows(folder, name)[2:]
    assert timed[-1]["elastic/ram_image_interval"], "there were none: is /dev/shm large enough for three of 1.5 GB?"
    kept = sum(row["perf/ram_image_seconds"] for row in timed)
    steps = GPT2_LOG_INTERVAL * sum(row["perf/step_seconds"] for row in timed)
    return f"{kept / steps:.2%} of the training, an image every {timed[-1]['elastic/ram_image_interval']} step(s)"


def sampled(folder: Path, name: str) -> str:
    command = [sys.executable, "-m", "mingpt.sample", str(folder / name), "--max-new-tokens=200", f"--device={DEVICE}"]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=LIMIT)
    return f"{len(done.stdout)} characters in {time.monotonic() - started:.1f} s, start included"


def trained(folder: Path, name: str, *settings: str) -> str:
    output = run(folder, name, *settings, "--dtype=bfloat16")
    assert "does not work here" not in output, output[-2000:]
    said = f"{median_rate(folder, name):,.0f} tokens/s"
    shares = [row["perf/mfu"] for row in rows(folder, name)[2:] if "perf/mfu" in row]  # of a small vocabulary
    return said if "small" in name or not shares else f"{said}, MFU {statistics.median(shares):.1%}"


def benchmarked(shape: str, *rivals: str) -> str:
    """`mingpt.bench gpu` at this shape; with a rival, the plain GPT in tests/baseline, in turns with it."""
    options = [f"--shapes={shape}", f"--device={DEVICE}", "--dtype=bfloat16", "--rounds=3", *rivals]
    command = [sys.executable, "-m", "mingpt.bench", BENCH, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3 * LIMIT, check=False)
    assert done.returncode == 0 and "does not work here" not in done.stderr, done.stderr[-3000:]
    said = []
    for row in (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")):
        said.append(f"{row['who']} {told(row['tokens_per_second'], shape)}, {row['peak_memory'] / 1e9:.1f} GB")
        said += [f"{row['mingpt_is_times']:.2f} times"] if row["who"] != "mingpt" else []
    return "; ".join(said)


def on_two_gpus(folder: Path) -> str:
    """Over NCCL: fast reduction (DDP) to the same losses within tolerance, exact reduction to the same hash."""
    if torch.cuda.device_count() < 2:
        return "skipped: one GPU"
    run(folder, "small-ddp", *SMALL, "--dtype=float32", gpus=2)
    run(folder, "small-alone", *SMALL, "--dtype=float32")
    pairs = zip(rows(folder, "small-ddp"), rows(folder, "small-alone"), strict=True)
    apart = max(abs(two["train/loss"] / one["train/loss"] - 1) for two, one in pairs)
    assert apart < 1e-3, f"the losses differ by {apart:.1e}"
    exact = [*SMALL, "--train.reduction=exact", "--dtype=bfloat16"]
    assert sums(run(folder, "small-two", *exact, gpus=2)) == sums(run(folder, "small-one", *exact)), "the hashes differ"
    return f"losses differ by {apart:.1e} at most, exact hashes do not"


def main(groups: Sequence[str]) -> int:
    """Makes the checks of these groups, what a name begins with, or all where none is given."""
    if not torch.cuda.is_available():
        print("gpu-check: SKIPPED, there is no CUDA device; nothing was checked")
        return 0
    print(f"gpu-check on {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    failed = 0
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        line = "Now is the winter of our discontent made glorious summer by this sun of York;\n"
        (folder / "text.txt").write_text("".join(line[i % 70 :] for i in range(20000)), encoding="utf-8")
        checks = {
            "speed: gpt2 beside a plain GPT": lambda: benchmarked("gpt2", BASELINE),
            "speed: gpt2-medium, the same": lambda: benchmarked("gpt2-medium", BASELINE),
            "speed: gpt2-xl, recomputing": lambda: benchmarked("gpt2-xl"),
            "launch: kill -9": lambda: launched(folder),
            "launch: the same, compiled": lambda: launched(folder, "--compile=true"),
            "gpt2: exact, kill -9, resume": lambda: killed_and_resumed(folder, "gpt2", GPT2, 70),
            "gpt2: sample": lambda: sampled(folder, "gpt2-killed"),
            "gpt2: fast": lambda: trained(folder, "fast", *GPT2),
            "gpt2: fast, compiled": lambda: trained(folder, "compiled", *GPT2, "--compile=true"),
            "gpt2: exact": lambda: exact_cost(folder),
            "gpt2: images in memory": lambda: image_cost(folder, "compiled"),
            "small: exact, kill -9, resume": lambda: killed_and_resumed(folder, "small", SMALL, 33),
            "small: fast": lambda: trained(folder, "small-fast", *SMALL),
            "small: fast, compiled": lambda: trained(folder, "small-compiled", *SMALL, "--compile=true"),
            "small: two GPUs, NCCL": lambda: on_two_gpus(folder),
            "small: sample": lambda: sampled(folder, "small-killed"),
        }
        checks = {name: check for name, check in checks.items() if not groups or name.partition(":")[0] in groups}
        if not checks:
            print(f"gpu-check: {' '.join(groups)}: give some of speed, launch, gpt2, small", file=sys.stderr)
            return 2
        for name, check in checks.items():
            started = time.monotonic()
            try:
                result = check()
            except (AssertionError, subprocess.SubprocessError) as error:
                result, failed = f"FAILED: {error}", failed + 1
            print(f"{name:32} {time.monotonic() - started:6.1f} s  {result}", flush=True)
    print(f"gpu-check: {len(checks) - failed} passed or skipped, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
