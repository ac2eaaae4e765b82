"""Continues a prompt with the model of a snapshot: `python -m mingpt.sample SNAPSHOT [--prompt=TEXT]`.

stdout receives text only: the prompt, then token by token what the model adds, then a newline; from the second sample
on a line `--- sample 2 of 3 ---` in front. All else goes to stderr. Exit codes: 0 done, also when the reader of stdout
has enough (`| head -1`); 1 something cannot be read or written; 2 a wrong setting, prompt or path; 130 Ctrl-C.
"""

import argparse
import hashlib
import io
import os
import sys
from collections.abc import Sequence

import torch

from mingpt.snapshot import load_snapshot
from mingpt.tokenizer import CharTokenizer, Tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with `argv` (without the program's name) and returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an ASCII console gets \u2019 for what it cannot show, and no crash
            stream.reconfigure(errors="backslashreplace")
    try:
        sample(parse(argv))
        return 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0
    except (OSError, ValueError) as error:
        print(f"mingpt.sample: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError | FileNotFoundError) else 1
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # the interpreter would try once more at its end, and complain: let it write to nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m mingpt.sample", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("snapshot", help="an image file, a folder of snapshots or a run's folder")
    text = parser.add_mutually_exclusive_group().add_argument
    text("--prompt", default="", metavar="TEXT", help="empty: starts as after a document's or a line's end")
    text("--prompt-file", metavar="F", help="take the prompt, UTF-8, from this file; - is standard input")
    add(
        "--unknown",
        choices=["error", "drop", "replace"],
        default="error",
        help="what to do with characters the model does not know; replace puts what an empty prompt starts after",
    )
    add("--num-samples", type=int, default=1, metavar="N", help="one after the other, each with its own seed")
    add("--max-new-tokens", type=int, default=500, metavar="N", help="tokens to add to the prompt (%(default)s)")
    add(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="1: the model's probabilities, less: safer text, 0: always the likeliest token (%(default)s)",
    )
    add("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens (all)")
    add("--top-p", type=float, metavar="P", help="draw from the fewest tokens that reach probability P (all)")
    add("--seed", type=int, default=1337, metavar="S", help="the same seed gives the same text (%(default)s)")
    add("--device", default="auto", metavar="D", help="cpu, cuda, cuda:1, mps; auto: what this machine has")
    arguments = parser.parse_args(argv)
    if arguments.num_samples < 1:
        parser.error(f"--num-samples={arguments.num_samples}: give 1 or more")
    return arguments


def sample(arguments: argparse.Namespace) -> None:
    device = find_device(arguments.device)
    prompt = read_prompt(arguments)
    model, tokenizer, info = load_snapshot(arguments.snapshot, device)
    loss = "not evaluated" if info.get("val_loss") is None else f"val loss {info['val_loss']:.4f}"
    tell(f"{arguments.snapshot}: step {info['step']}, {loss}, {model.config.num_parameters:,} parameters, on {device}")

    prompt, ids = encode(prompt, tokenizer, arguments.unknown)
    if len(ids) > model.config.block_size:
        tell(f"the prompt has {len(ids)} tokens, the model reads the last {model.config.block_size} of them")
    for number in range(1, arguments.num_samples + 1):
        if number > 1:
            print(f"--- sample {number} of {arguments.num_samples} ---")
        tokens = model.generate(
            torch.tensor([ids], device=device),
            arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            generator=torch.Generator(device).manual_seed(derived_seed(arguments.seed, number)),
        )
        print(prompt, end="", flush=True)
        decoder = tokenizer.decoder()
        for token in tokens:
            print(decoder.decode([int(token)]), end="", flush=True)
        print(decoder.flush(), flush=True)


def tell(line: str) -> None:
    print(line, file=sys.stderr)


def find_device(name: str) -> str:
    """The device to use for `--device`; ValueError where torch has none of this name here."""
    if name == "auto":
        return str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # an AssertionError where torch is built without it
        raise ValueError(f"--device={name} cannot be used: {str(error).splitlines()[0]}") from error
    return name


def read_prompt(arguments: argparse.Namespace) -> str:
    """The prompt as it was given, a final newline too; as in training texts CRLF and CR become LF, a BOM goes."""
    if arguments.prompt_file is None:
        text: str = arguments.prompt
    else:
        with open(0 if arguments.prompt_file == "-" else arguments.prompt_file, "rb") as file:
            data = file.read()
        try:
            text = data.decode("utf-8").removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"--prompt-file={arguments.prompt_file} is not UTF-8: byte {data[error.start]:#04x} at offset "
                f"{error.start}; convert it to UTF-8"
            ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def encode(prompt: str, tokenizer: Tokenizer, unknown: str) -> tuple[str, list[int]]:
    """The prompt in characters that the model knows, and its ids, never none.

    With `unknown="error"` raises ValueError that names the characters it does not know.
    """
    if unknown != "error" and isinstance(tokenizer, CharTokenizer):
        other = "" if unknown == "drop" else tokenizer.decode([tokenizer.start_token])
        prompt = "".join(char if char in tokenizer.chars else other for char in prompt)
    try:
        ids = tokenizer.encode(prompt).tolist()
    except ValueError as error:
        raise ValueError(f"prompt: {error}; --unknown=drop or --unknown=replace does it for you") from error
    return prompt, ids or [tokenizer.start_token]


def derived_seed(seed: int, number: int) -> int:
    """The seed of one sample (64 bits): it does not depend on how many others are asked for."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:8], "little")


if __name__ == "__main__":
    sys.exit(main())
