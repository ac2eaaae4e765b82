"""How fast this machine trains and samples: `python -m mingpt.bench train|sample|gpu [--shapes a b]`.

A line of JSON for each row, then a table. `train` drives the Trainer itself, data, clipping and all; `gpu` is the same
for CUDA, compiled, at GPT-2's sizes; `sample` makes tokens. With --against a checkout of nanoGPT (`sample` also:
--against=transformers) does the same beside it, in turns, round by round, so that the machine's other load meets both.
Every contestant is a process of its own, for its peak memory. Exit codes: 0 done; 1 a contestant failed; 2 wrong use.
"""

from mingpt import distributed  # first: it does what cannot wait until torch is loaded

# isort: split
import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch

from mingpt.metrics import Metrics
from mingpt.model import GPT, PRESETS, GPTConfig
from mingpt.trainer import Trainer

# Name -> the model and the sequences of a step.
SHAPES: dict[str, tuple[dict[str, Any], int]] = {
    "tiny": ({"vocab_size": 65, "block_size": 16, **PRESETS["gpt-nano"]}, 2),
    "a": ({"vocab_size": 65, "block_size": 64, "n_layer": 4, "n_head": 4, "n_embd": 128}, 12),
    "b": ({"vocab_size": 65, "block_size": 256, "n_layer": 6, "n_head": 6, "n_embd": 384}, 16),  # 10.7M parameters
    "c": ({"vocab_size": 50257, "block_size": 256, **PRESETS["gpt2"]}, 2),
    "gpt2": ({"vocab_size": 50257, "block_size": 1024, **PRESETS["gpt2"]}, 16),
    "gpt2-medium": ({"vocab_size": 50257, "block_size": 1024, **PRESETS["gpt2-medium"]}, 16),
    "gpt2-xl": ({"vocab_size": 50257, "block_size": 1024, **PRESETS["gpt2-xl"], "activation_checkpointing": True}, 8),
}
DEFAULTS = {"train": ["a", "b", "c"], "sample": ["b", "gpt2"], "gpu": ["gpt2", "gpt2-medium", "gpt2-xl"]}
PROMPT = 8  # tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with `argv` (without the program's name) and returns its exit code."""
    asked = parse(argv)
    if asked.worker:
        return work(asked)
    if distributed.device_type(asked.device) == "cpu" and asked.what == "gpu" and asked.device != "cpu":
        print("mingpt.bench: there is no GPU here; nothing was measured", file=sys.stderr)
        return 0
    rows = []
    for shape in asked.shapes or DEFAULTS[asked.what]:
        for batch in asked.batch if asked.what == "sample" else [SHAPES[shape][1]]:
            try:
                rows += compare(asked, shape, batch)
            except ChildProcessError as error:
                print(f"mingpt.bench: {error}", file=sys.stderr)
                return 1
    show(rows)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m mingpt.bench", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("what", choices=DEFAULTS)
    add(
        "--shapes",
        nargs="+",
        default=[],
        metavar="S",
        help=f"of {', '.join(SHAPES)}; where none is given, those that suit",
    )
    add("--against", metavar="PATH", help="a checkout of nanoGPT, or, for sample, transformers")
    add("--rounds", type=int, default=5, metavar="N", help="measured, after one that is not (%(default)s)")
    add("--steps", type=int, metavar="N", help="optimizer steps a round; sample: tokens (train 10, sample 500)")
    add("--batch", type=int, nargs="+", default=[1, 8], metavar="B", help="sequences at once, of sample (1 8)")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="of matrix products, in training")
    add("--device", default="auto", metavar="D", help="as in a config")
    add("--threads", type=int, default=0, metavar="N", help="on CPUs; 0 = the cores")
    add("--worker", nargs=2, help=argparse.SUPPRESS)  # whose turn it is, and the batch
    asked = parser.parse_args(argv)
    if unknown := [shape for shape in asked.shapes if shape not in SHAPES]:
        parser.error(f"--shapes={unknown[0]}: give one of {', '.join(SHAPES)}")
    if asked.against == "transformers" and asked.what != "sample":
        parser.error(f"--against=transformers: {asked.what} has no such baseline; give a checkout of nanoGPT")
    for name in ("rounds", "steps"):
        if (value := getattr(asked, name)) is not None and value < 1:
            parser.error(f"--{name}={value}: give 1 or more")
    asked.steps = asked.steps or (500 if asked.what == "sample" else 10)
    return asked


def compare(asked: argparse.Namespace, shape: str, batch: int) -> list[dict[str, Any]]:
    """A row for us and one for our rival: each in a process, which does a round when it is its turn."""
    command = [sys.executable, "-m", "mingpt.bench", asked.what, f"--shapes={shape}"]
    command += [f"--{name}={getattr(asked, name)}" for name in ("steps", "dtype", "device", "threads")]
    names = ["mingpt", *([asked.against] if asked.against else [])]
    processes = [
        subprocess.Popen(
            [*command, "--worker", name, str(batch)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for name in names
    ]  # fmt: skip
    try:
        answers: list[list[dict[str, Any]]] = [[] for _ in names]
        for _ in range(asked.rounds + 1):
            for name, process, answer in zip(names, processes, answers, strict=True):
                answer.append(turn(name, process))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    rows = []
    for answer in answers:
        rates = sorted(round["tokens_per_second"] for round in answer[1:])
        facts = {**answer[-1], "tokens_per_second": median(rates), "lowest": rates[0], "highest": rates[-1]}
        facts["share_of_peak"] = facts.pop("cost") * facts["tokens_per_second"] / facts.pop("peak")
        both = zip(answers[0][1:], answer[1:], strict=True)
        facts["mingpt_is_times"] = median(a["tokens_per_second"] / b["tokens_per_second"] for a, b in both)
        rows.append({"what": asked.what, "shape": shape, "batch": batch, **facts})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def turn(name: str, process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdin and process.stdout
    try:
        process.stdin.write("go\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline())
    except (BrokenPipeError, json.JSONDecodeError) as error:
        raise ChildProcessError(f"{name} has ended with code {process.wait()}; what it said stands above") from error
    return answer


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{rows[0]['device']}, {rows[0]['threads']} thread(s), torch {torch.__version__}")
    print("        shape        batch who           dtype        tokens/s  spread  of peak    memory  mingpt is")
    for row in rows:
        spread = (row["highest"] - row["lowest"]) / row["tokens_per_second"]
        times = "" if row["who"] == "mingpt" else f"{row['mingpt_is_times']:.2f} x"
        print(
            f"{row['what']:8}{row['shape']:13}{row['batch']:5} {row['who']:14}{row['dtype']:10}"
            f"{row['tokens_per_second']:11,.0f}{spread:8.0%}{row['share_of_peak']:9.0%}"
            f"{row['peak_memory'] / 1e6:7,.0f} MB{times:>11}"
        )
    of = "the bytes that a read of memory brings" if rows[0]["what"] == "sample" else "what large matrix products do"
    print(f"peak: {of} in a second here; spread: highest less lowest round, of the median")


# In a contestant's process


@dataclass(frozen=True)
class Contest:
    """Who does what; `answer` ends a round, with its tokens and seconds, and waits for the next one to begin."""

    who: str
    config: GPTConfig
    batch: int
    steps: int
    compile: bool
    device: torch.device
    dtype: torch.dtype
    answer: Callable[[int, float], None]


def work(asked: argparse.Namespace) -> int:
    """Does a round for each line on stdin, and answers with what it took."""
    who, batch = asked.worker[0], int(asked.worker[1])
    world = distributed.locate(asked.device)
    device = world.device
    threads = distributed.set_threads(asked.threads, world)
    dtype = torch.float32 if asked.what == "sample" else distributed.pick_dtype(asked.dtype, device)
    config = GPTConfig(**SHAPES[asked.shapes[0]][0])
    torch.manual_seed(1)
    facts = {
        "who": who if who in ("mingpt", "transformers") else "nanoGPT",
        "device": distributed.hardware(device).partition(", ")[2],
        "threads": threads,
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if asked.what == "sample":
        config = replace(config, block_size=max(config.block_size, PROMPT + asked.steps))  # the window never slides
        weights = 4 * (config.num_parameters - config.block_size * config.n_embd)  # of the positions one row is read
        keys_and_values = 8 * config.n_layer * config.n_embd * (PROMPT + asked.steps / 2)  # on average
        facts |= {"cost": weights / batch + keys_and_values, "peak": bytes_per_second(device)}
    else:
        with torch.device("meta"):
            flops = GPT(config).flops_per_token()
        facts |= {"cost": flops, "peak": flops_per_second(device, dtype)}

    def answer(tokens: int, seconds: float) -> None:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(device)
        print(json.dumps({**facts, "tokens_per_second": tokens / seconds, "peak_memory": memory}), flush=True)
        if not sys.stdin.readline():  # nobody asks any more
            sys.exit()

    sys.stdin.readline()
    contest = Contest(who, config, batch, asked.steps, asked.what == "gpu", device, dtype, answer)
    sample(contest) if asked.what == "sample" else train(contest)
    return 0


def train(contest: Contest) -> None:
    config, batch, steps, T = contest.config, contest.batch, contest.steps, contest.config.block_size
    tokens = np.random.default_rng(1).integers(config.vocab_size, size=200_000).astype(np.uint16)

    class Rounds(Metrics):
        began = time.perf_counter()

        def row(self, step: int, values: Mapping[str, Any]) -> None:
            contest.answer(steps * batch * T, time.perf_counter() - self.began)  # with the loss here, all is done
            self.began = time.perf_counter()

    if contest.who == "mingpt":
        trainer = Trainer(
            GPT(config), tokens, block_size=T, max_steps=10**6, global_batch_size=batch, micro_batch_size=batch,
            dtype=contest.dtype, compile=contest.compile, save_interval=0, log_interval=steps, metrics=Rounds(),
        )  # fmt: skip
        trainer.fit()
        return
    model = theirs(contest)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), contest.device.type)
    forward = torch.compile(model) if contest.compile else model
    while True:
        began = time.perf_counter()
        for _ in range(steps):
            starts = np.random.randint(len(tokens) - T, size=(batch, 1))
            rows = torch.from_numpy(tokens[starts + np.arange(T + 1)].astype(np.int64))
            rows = (rows.pin_memory() if contest.device.type == "cuda" else rows).to(contest.device, non_blocking=True)
            with torch.autocast(contest.device.type, contest.dtype, enabled=contest.dtype != torch.float32):
                _, loss = forward(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss.item()
        contest.answer(steps * batch * T, time.perf_counter() - began)


def sample(contest: Contest) -> None:
    model: Any = GPT(contest.config).eval().to(contest.device) if contest.who == "mingpt" else theirs(contest)
    idx = torch.randint(contest.config.vocab_size, (contest.batch, PROMPT), device=contest.device)
    while True:
        began = time.perf_counter()
        if contest.who == "mingpt":
            for ids in model.generate(idx, contest.steps):
                ids.tolist()  # as who shows them does
        elif contest.who == "transformers":
            model.generate(
                idx, max_new_tokens=contest.steps, do_sample=True, top_k=0, attention_mask=torch.ones_like(idx)
            )
        else:
            model.generate(idx, contest.steps)
        contest.answer(contest.batch * contest.steps, time.perf_counter() - began)


def theirs(contest: Contest) -> Any:
    """A model of the same shape, by nanoGPT's `model.py` in the folder `who`, or by transformers."""
    c = contest.config
    shape: dict[str, Any] = {"n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd, "vocab_size": c.vocab_size}
    with redirect_stdout(sys.stderr):  # nanoGPT prints; stdout is for the answers
        if contest.who == "transformers":
            from transformers import GPT2Config, GPT2LMHeadModel

            none: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
            rival: Any = GPT2LMHeadModel(GPT2Config(n_positions=c.block_size, **shape, **none))
            return rival.eval().to(contest.device)
        sys.path.insert(0, contest.who)
        import model as nanogpt  # type: ignore[import-not-found]

        other = nanogpt.GPT(nanogpt.GPTConfig(block_size=c.block_size, dropout=0.0, bias=True, **shape))
        return other.to(contest.device)


def flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Of the best of some products of large matrices."""
    a, b = torch.randn(2, 2048 if device.type == "cpu" else 8192, 2048, device=device, dtype=dtype).unbind()
    return 2 * len(a) ** 2 * 2048 / fastest(lambda: a @ b.t(), device)


def bytes_per_second(device: torch.device) -> float:
    """Of the best of some reads of more memory than a cache holds."""
    x, row = torch.randn(2, 32 * 2**20 // 1024, 1024, device=device), torch.randn(2, 1024, 1, device=device)
    return x.numel() * 4 / fastest(lambda: torch.bmm(x, row), device)


def fastest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds."""
    times = []
    for _ in range(7):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    sys.exit(main())
