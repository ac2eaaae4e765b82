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
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from statistics import median
from subprocess import PIPE, Popen
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mingpt.distributed import World
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
Answer = Callable[[], None]  # ends a round, and waits for the next one to begin


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with `argv` (without the program's name) and returns its exit code."""
    asked = parse(argv)
    if asked.who:
        work(asked)
    if distributed.device_type(asked.device) == "cpu" and asked.what == "gpu" and asked.device != "cpu":
        print("mingpt.bench: there is no GPU here; nothing was measured", file=sys.stderr)
        return 0
    batches = {shape: asked.batch if asked.what == "sample" else [SHAPES[shape][1]] for shape in asked.shapes}
    try:
        show([row for shape in batches for batch in batches[shape] for row in compare(asked, shape, batch)])
    except ChildProcessError as error:
        print(f"mingpt.bench: {error}", file=sys.stderr)
        return 1
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m mingpt.bench", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("what", choices=DEFAULTS)
    add("--shapes", nargs="+", default=[], metavar="S", help=f"of {', '.join(SHAPES)}; if none, those that suit")
    add("--against", metavar="PATH", help="a checkout of nanoGPT, or, for sample, transformers")
    add("--rounds", type=int, default=5, metavar="N", help="measured, after one that is not (%(default)s)")
    add("--steps", type=int, metavar="N", help="optimizer steps a round; sample: tokens (train 10, sample 500)")
    add("--batch", type=int, nargs="+", default=[1, 8], metavar="B", help="sequences at once, of sample (1 8)")
    add(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16"],
        help="of matrix products; sample: of weights",
    )
    add("--device", default="auto", metavar="D", help="as in a config")
    add("--threads", type=int, default=0, metavar="N", help="on CPUs; 0 = the cores")
    add("--who", help=argparse.SUPPRESS)  # of the contestants this process is
    asked = parser.parse_args(argv)
    if unknown := [shape for shape in asked.shapes if shape not in SHAPES]:
        parser.error(f"--shapes={unknown[0]}: give one of {', '.join(SHAPES)}")
    if asked.against == "transformers" and asked.what != "sample":
        parser.error(f"--against=transformers: {asked.what} has no such baseline; give a checkout of nanoGPT")
    for name in ("rounds", "steps"):
        if (value := getattr(asked, name)) is not None and value < 1:
            parser.error(f"--{name}={value}: give 1 or more")
    asked.steps = asked.steps or (500 if asked.what == "sample" else 10)
    asked.shapes = asked.shapes or DEFAULTS[asked.what]
    return asked


def compare(asked: argparse.Namespace, shape: str, batch: int) -> list[dict[str, Any]]:
    """A row for us and one for our rival: each in a process, which does a round when it is its turn."""
    command = [sys.executable, "-m", "mingpt.bench", asked.what, f"--shapes={shape}", f"--batch={batch}"]
    command += [*(f"--{name}={getattr(asked, name)}" for name in ("steps", "dtype", "device", "threads")), "--who"]
    processes: dict[str, Any] = {}
    for name in filter(None, ["mingpt", asked.against]):
        environment = None if name == "mingpt" else distributed.environment_of_others()
        processes[name] = Popen([*command, name], stdin=PIPE, stdout=PIPE, text=True, env=environment)
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in processes}
    try:
        for name, process in [*processes.items()] * (asked.rounds + 1):
            print("go", file=process.stdin, flush=True)
            answers[name].append(json.loads(process.stdout.readline()))
    except (BrokenPipeError, json.JSONDecodeError) as error:
        raise ChildProcessError(f"{name} has ended with code {process.wait()}; what it said stands above") from error
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    rows = []
    for answer in answers.values():
        rates = sorted(round["tokens_per_second"] for round in answer[1:])
        facts = {**answer[-1], "tokens_per_second": median(rates), "lowest": rates[0], "highest": rates[-1]}
        facts["share_of_peak"] = facts.pop("cost") * facts["tokens_per_second"] / facts.pop("peak")
        both = zip(answers["mingpt"][1:], answer[1:], strict=True)
        facts["mingpt_is_times"] = median(a["tokens_per_second"] / b["tokens_per_second"] for a, b in both)
        rows.append({"what": asked.what, "shape": shape, "batch": batch, **facts})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{rows[0]['device']}, {rows[0]['threads']} thread(s)")
    print("        shape        batch who           dtype        tokens/s  spread  of peak    memory  mingpt is")
    for row in rows:
        spread = (row["highest"] - row["lowest"]) / row["tokens_per_second"]
        times = "" if row["who"] == "mingpt" else f"{row['mingpt_is_times']:.2f} x"
        print(
            f"{row['what']:8}{row['shape']:13}{row['batch']:5} {row['who']:14}{row['dtype']:10}"
            f"{row['tokens_per_second']:11,.0f}{spread:8.0%}{row['share_of_peak']:9.0%}"
            f"{row['peak_memory'] / 1e6:7,.0f} MB{times:>11}"
        )
    print("peak: of large matrix products (sample: reads of memory); spread: highest less lowest round, of the median")


def work(asked: argparse.Namespace) -> None:
    """A contestant's process: a round for each line on stdin, answered with what it took; the first has the set-up."""
    sys.stdin.readline()
    world = distributed.locate(asked.device)
    device, threads, batch = world.device, distributed.set_threads(asked.threads, world), asked.batch[0]
    default = "float32" if asked.what == "sample" else "auto"
    dtype = distributed.pick_dtype(default if asked.dtype == "auto" else asked.dtype, device)
    config = GPTConfig(**SHAPES[asked.shapes[0]][0])
    tokens = batch * asked.steps * (1 if asked.what == "sample" else config.block_size)
    if asked.what == "sample":
        config = replace(config, block_size=max(config.block_size, PROMPT + asked.steps))  # the window never slides
        cost = (config.num_parameters - config.block_size * config.n_embd) / batch  # of the positions a row is read
        cost += 2 * config.n_layer * config.n_embd * (PROMPT + asked.steps / 2)  # keys and values, on average
        cost *= dtype.itemsize
    else:
        with torch.device("meta"):
            cost = GPT(config).flops_per_token()
    facts: dict[str, Any] = {
        "who": asked.who if asked.who in ("mingpt", "transformers") else "nanoGPT",
        "device": distributed.hardware(device), "threads": threads, "dtype": str(dtype).removeprefix("torch."),
        "cost": cost,  # of a token; operations, or bytes where it is sampled
    }  # fmt: skip
    torch.manual_seed(1)
    model = GPT(config) if asked.who == "mingpt" else theirs(asked.who, config)
    model = model.to(device, dtype if asked.what == "sample" else None)
    began = time.perf_counter()

    def answer() -> None:
        nonlocal began
        rate = tokens / (time.perf_counter() - began)
        if "peak" not in facts:  # in the first round: what is measured here takes memory too
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            facts["peak_memory"] = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else memory
            facts["peak"] = peak(asked.what, device, dtype)
        print(json.dumps({**facts, "tokens_per_second": rate}), flush=True)
        if not sys.stdin.readline():  # nobody asks any more
            sys.exit()
        began = time.perf_counter()

    if asked.what == "sample":
        sample(asked, model.eval(), torch.randint(config.vocab_size, (batch, PROMPT), device=device), answer)
    train(asked, world, model, config, dtype, answer)


def train(
    asked: argparse.Namespace, world: World, model: Any, config: GPTConfig, dtype: torch.dtype, answer: Answer
) -> None:
    T, batch, device, compile = config.block_size, asked.batch[0], world.device, asked.what == "gpu"
    tokens = np.random.default_rng(1).integers(config.vocab_size, size=200_000).astype(np.uint16)

    class Rounds(Metrics):
        def row(self, step: int, values: dict[str, float]) -> None:
            answer()  # with the loss here, all is done

    if asked.who == "mingpt":
        Trainer(
            model, tokens, block_size=T, max_steps=10**6, global_batch_size=batch, micro_batch_size=batch,
            dtype=dtype, compile=compile, save_interval=0, log_interval=asked.steps, metrics=Rounds(), world=world,
        ).fit()  # fmt: skip
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), device.type)
    forward = torch.compile(model) if compile else model
    while True:
        for _ in range(asked.steps):
            starts = np.random.randint(len(tokens) - T, size=(batch, 1))
            rows = torch.from_numpy(tokens[starts + np.arange(T + 1)].astype(np.int64))
            rows = (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                _, loss = forward(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss.item()
        answer()


def sample(asked: argparse.Namespace, model: Any, idx: Tensor, answer: Answer) -> None:
    while True:
        if asked.who == "mingpt":
            for ids in model.generate(idx, asked.steps):
                ids.tolist()  # as who shows them does
        elif asked.who == "transformers":
            model.generate(
                idx, max_new_tokens=asked.steps, do_sample=True, top_k=0, attention_mask=torch.ones_like(idx)
            )
        else:
            model.generate(idx, asked.steps)
        answer()


def theirs(who: str, config: GPTConfig) -> Any:
    """A model of the same shape, by nanoGPT's `model.py` in the folder `who`, or by transformers."""
    shape: dict[str, Any] = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    with redirect_stdout(sys.stderr):  # nanoGPT prints; stdout is for the answers
        if who == "transformers":
            from transformers import GPT2Config, GPT2LMHeadModel

            shape |= {"n_positions": config.block_size, "bos_token_id": None, "eos_token_id": None}
            return GPT2LMHeadModel(GPT2Config(**shape))
        sys.path.insert(0, who)
        import model as nanogpt  # type: ignore[import-not-found]

        return nanogpt.GPT(nanogpt.GPTConfig(block_size=config.block_size, dropout=0.0, bias=True, **shape))


def peak(what: str, device: torch.device, dtype: torch.dtype) -> float:
    """The best of some, in a second: operations of a product of large matrices, or bytes read that no cache holds."""
    size = 8192 if what == "sample" or device.type != "cpu" else 2048
    dtype = torch.float32 if what == "sample" else dtype  # in which a sum waits for the memory alone
    a = torch.randn(size, size, device=device, dtype=dtype)

    def seconds() -> float:
        began = time.perf_counter()
        (a.sum() if what == "sample" else (a @ a)[0, 0]).item()  # which waits for the device
        return time.perf_counter() - began

    amount = a.numel() * a.element_size() if what == "sample" else 2 * size**3
    return amount / min(seconds() for _ in range(7))


if __name__ == "__main__":
    sys.exit(main())
