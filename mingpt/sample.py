"""Continues prompts with the model of a snapshot: `python -m mingpt.sample SNAPSHOT [--prompt=TEXT]`.

stdout receives text only: the prompt, then token by token what the model adds, then a newline; from the second text
on a line `--- sample 2 of 3 ---` (or `prompt`, or both) in front. All else goes to stderr. A text ends after
--max-new-tokens, at a --stop string or at the end of a document; neither of the two is shown. Exit codes: 0 done, also
when the reader of stdout has enough (`| head -1`); 1 something cannot be read or written; 2 a wrong setting, prompt or
path; 130 Ctrl-C.
"""

from mingpt import distributed  # first: it has OpenMP's threads spin less

# isort: split
import argparse
import hashlib
import io
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TextIO

import torch
from torch import Tensor

from mingpt.faults import redact
from mingpt.model import GPT, check_settings
from mingpt.snapshot import load_snapshot
from mingpt.tokenizer import CharTokenizer, Tokenizer, normalize

OUTPUT = "standard output"  # as errors name it
BATCH = 8  # texts made at once: each more costs memory, and saves less and less time


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with `argv` (without the program's name) and returns its exit code."""
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):  # an ASCII console gets \u2019 for what it cannot show, and no crash
            stream.reconfigure(errors=errors)
    try:
        sample(parse(argv))
        return 0
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError) and error.filename == OUTPUT:
            return 0
        print(f"mingpt.sample: {redact(str(error))}", file=sys.stderr)
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
    text(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="empty: starts as after a document's or a line's end; given several times: several texts, made together",
    )
    text(
        "--prompt-file",
        action="append",
        default=[],
        metavar="F",
        help="take a prompt, UTF-8, from this file; - is standard input",
    )
    add("--interactive", action="store_true", help="chat line by line: Ctrl-C ends a reply, Ctrl-D leaves")
    add(
        "--unknown",
        choices=["error", "drop", "replace"],
        default="error",
        help="what to do with characters the model does not know; replace puts what an empty prompt starts after",
    )
    add("--num-samples", type=int, default=1, metavar="N", help="texts for each prompt, each with its own seed")
    add("--max-new-tokens", type=int, default=500, metavar="N", help="tokens to add to the prompt (%(default)s)")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text, for a newline $'\\n'; may be given several times",
    )
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
    add("--logprobs", metavar="F", help="write each token's log-probability into this file, a JSON object a line")
    add("--device", default="auto", metavar="D", help="cpu, cuda, cuda:1, mps; auto: what this machine has")
    add(
        "--dtype",
        choices=["auto", "float32", "bfloat16"],
        default="float32",
        help="of the weights; bfloat16: half the bytes read for a token, faster where there are units for it",
    )
    arguments = parser.parse_args(argv)
    if arguments.num_samples < 1:
        parser.error(f"--num-samples={arguments.num_samples}: give 1 or more")
    if "" in arguments.stop:
        parser.error("--stop= is empty: give the text to stop at")
    if arguments.prompt_file.count("-") + arguments.interactive > 1 and "-" in arguments.prompt_file:
        parser.error("--prompt-file=-: standard input can be read only once")
    if arguments.interactive and (len(arguments.prompt + arguments.prompt_file) > 1 or arguments.num_samples > 1):
        parser.error("--interactive: one chat at a time; give at most one prompt and no --num-samples")
    return arguments


def sample(arguments: argparse.Namespace) -> None:
    device = find_device(arguments.device)
    # This and the prompts are looked at before a file is opened for writing, and anything is shown.
    check_settings(arguments.max_new_tokens, arguments.temperature, arguments.top_k, arguments.top_p)
    prompts = [
        "".join(normalize([text])) for text in [*map(read_prompt, arguments.prompt_file), *arguments.prompt] or [""]
    ]
    dtype = distributed.pick_dtype(arguments.dtype, torch.device(device))
    model, tokenizer, info = load_snapshot(arguments.snapshot, device)
    model = model.to(dtype)
    loss = "not evaluated" if info.get("val_loss") is None else f"val loss {info['val_loss']:.4f}"
    tell(
        f"{arguments.snapshot}: step {info['step']}, {loss}, {model.config.num_parameters:,} parameters, on {device}, "
        f"in {str(dtype).removeprefix('torch.')}"
    )
    encoded = [encode(prompt, tokenizer, arguments.unknown) for prompt in prompts]
    with (
        naming(arguments.logprobs),
        open(arguments.logprobs, "w", encoding="utf-8") if arguments.logprobs else nullcontext() as records,
    ):
        session = Session(model, tokenizer, device, arguments, records)
        if arguments.interactive:
            session.chat(*encoded[0])
        else:
            session.write(encoded)


class Reply:
    """What one text has become: whole characters, up to the end of the document or the first stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.done = False
        self._decoder, self._end_of_text, self._stops = tokenizer.decoder(), tokenizer.end_of_text, stops
        self._text = ""  # not yet taken
        self._held = ""  # may be the beginning of a stop string

    def add(self, token: int) -> None:
        if token == self._end_of_text:
            self.close()
        elif not self.done:
            self._append(self._decoder.decode([token]))

    def close(self) -> None:
        """No token comes any more."""
        if not self.done:
            self._append(self._decoder.flush())
            self._text, self._held, self.done = self._text + self._held, "", True

    def take(self) -> str:
        """What has come since the last time and can be shown."""
        text, self._text = self._text, ""
        return text

    def _append(self, text: str) -> None:
        text = self._held + text
        end = min((place for stop in self._stops if (place := text.find(stop)) >= 0), default=None)
        self.done = end is not None
        if end is None:  # a stop string may have begun anywhere in the last characters, and may not be one after all
            beginnings = (i for i in range(len(text)) if any(stop.startswith(text[i:]) for stop in self._stops))
            end = next(beginnings, len(text))
        self._text, self._held = self._text + text[:end], "" if self.done else text[end:]


@dataclass(frozen=True)
class Session:
    """A model and how it is asked to write."""

    model: GPT
    tokenizer: Tokenizer
    device: str
    arguments: argparse.Namespace
    records: TextIO | None  # receives log-probabilities

    def write(self, encoded: Sequence[tuple[str, list[int]]]) -> None:
        """Every sample of every prompt to stdout, in this order; of those made together the first one as it comes."""
        asked, block_size = self.arguments, self.model.config.block_size
        for number, (_, ids) in enumerate(encoded, 1):
            if len(ids) > block_size:
                which = f"prompt {number}" if len(encoded) > 1 else "the prompt"
                tell(f"{which} has {len(ids)} tokens, the model reads the last {block_size} of them")
        samples = range(1, asked.num_samples + 1)
        texts = [(prompt, number) for prompt in range(1, len(encoded) + 1) for number in samples]
        for first in range(0, len(texts), BATCH):
            batch = texts[first : first + BATCH]
            replies = [Reply(self.tokenizer, asked.stop) for _ in batch]
            generators = [self.generator(number) for _, number in batch]
            steps = self.steps([encoded[prompt - 1][1] for prompt, _ in batch], generators, replies, batch)
            for (prompt, number), reply in zip(batch, replies, strict=True):
                which = f"prompt {prompt} of {len(encoded)}, " * (len(encoded) > 1)
                which += f"sample {number} of {asked.num_samples}" * (asked.num_samples > 1)
                if (prompt, number) != (1, 1):
                    show(f"--- {which.removesuffix(', ')} ---\n")
                show(encoded[prompt - 1][0])
                while not reply.done:
                    next(steps, None)
                    show(reply.take())
                show(reply.take() + "\n")

    def chat(self, text: str, ids: list[int]) -> None:
        """Answers each line of stdin, with all that was said before it in mind, as far as the block reaches."""
        with suppress(ImportError):
            import readline  # noqa: F401  arrow keys in input()
        show(text)
        generator = self.generator(1)
        question = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
        for turn in itertools.count(1):
            try:
                with naming("standard input"):
                    line = input(question)
                _, said = encode("".join(normalize([line, "\n"])), self.tokenizer, self.arguments.unknown)
            except EOFError:
                return
            except KeyboardInterrupt:
                tell("\nCtrl-D leaves")
                continue
            except ValueError as error:  # a character that the model does not know
                tell(str(error))
                continue
            ids += said
            reply = Reply(self.tokenizer, self.arguments.stop)
            with suppress(KeyboardInterrupt):
                for (token,) in self.steps([ids], [generator], [reply], [(turn, 1)]):
                    if token != self.tokenizer.end_of_text:
                        ids.append(token)
                    show(reply.take())
            reply.close()  # a Ctrl-C leaves it open
            show(reply.take() + "\n")
            if not self.tokenizer.decode(ids[-1:]).endswith("\n"):
                ids += encode("\n", self.tokenizer, "drop")[1]

    def steps(
        self,
        contexts: Sequence[Sequence[int]],
        generators: Sequence[torch.Generator],
        replies: Sequence[Reply],
        places: Sequence[tuple[int, int]],
    ) -> Iterator[list[int]]:
        """Adds to the replies token by token, until all are done; yields what it added."""
        logprobs: list[Tensor] = []
        made = self.model.generate(
            [torch.tensor(ids, device=self.device) for ids in contexts],
            self.arguments.max_new_tokens,
            temperature=self.arguments.temperature,
            top_k=self.arguments.top_k,
            top_p=self.arguments.top_p,
            generator=generators,
            logprobs=logprobs if self.records else None,
        )
        for tokens in made:
            ids: list[int] = tokens.tolist()
            for i, (reply, token) in enumerate(zip(replies, ids, strict=True)):
                if self.records and not reply.done:
                    prompt, number = places[i]
                    place = {"prompt": prompt, "sample": number, "token": token}
                    told = {"text": self.tokenizer.decode([token]), "logprob": float(logprobs[-1][i])}
                    self.records.write(json.dumps(place | told) + "\n")
                reply.add(token)
            logprobs.clear()
            yield ids
            if all(reply.done for reply in replies):
                return
        for reply in replies:
            reply.close()

    def generator(self, number: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(derived_seed(self.arguments.seed, number))


def show(text: str) -> None:
    with naming(OUTPUT):
        print(text, end="", flush=True)


@contextmanager
def naming(place: str | None) -> Iterator[None]:
    """Within it, the error of a read or a write says where: Python's own says so only where an open failed."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = place
        raise


def tell(line: str) -> None:
    print(redact(line), file=sys.stderr)


def find_device(name: str) -> str:
    """The device to use for `--device`; ValueError where torch has none of this name here."""
    if name.startswith("cpu:"):
        raise ValueError(f"--device={name}: CPUs have no number; give cpu")
    if name == "auto":
        return str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    try:
        torch.empty(0, device=name)
        torch.Generator(name)  # meta has none
    except (RuntimeError, AssertionError) as error:  # an AssertionError where torch is built without it
        raise ValueError(f"--device={name} cannot be used: {str(error).splitlines()[0].partition('. ')[0]}") from error
    return name


def read_prompt(file_name: str) -> str:
    """The prompt in a file (`-`: standard input), a final newline too, without a BOM."""
    with open(0 if file_name == "-" else file_name, "rb") as file:
        data = file.read()
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--prompt-file={file_name} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}; "
            "convert it to UTF-8"
        ) from error


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
        raise ValueError(
            f"prompt {prompt[:30]!r}: {error}; --unknown=drop or --unknown=replace does it for you"
        ) from error
    return prompt, ids or [tokenizer.start_token]


def derived_seed(seed: int, number: int) -> int:
    """The seed of one sample (64 bits): it does not depend on how many others are asked for."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:8], "little")


if __name__ == "__main__":
    sys.exit(main())
