"""Sampling from a true image: what reaches stdout, what is refused, and how the command ends."""

import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import snapshots

from mingpt import sample
from mingpt.image import encode
from mingpt.model import GPT, GPTConfig
from mingpt.snapshot import load_snapshot, model_tensors
from mingpt.tokenizer import BPETokenizer, CharTokenizer, Tokenizer

ROOT = Path(__file__).parent.parent
CHARS = "\t\n !?abcdefé"  # a newline that is not the first
BLOCK = 16


CHAR = CharTokenizer(CHARS)
BPE = BPETokenizer("bpe", (*(bytes([byte]) for byte in range(256)), b"th", b"the", b"\n\n"))


def make_image(tokenizer: Tokenizer = CHAR, damage: float = 0.0, val_loss: float | None = 1.25) -> torch.Tensor:
    config = GPTConfig(tokenizer.vocab_size, block_size=BLOCK, n_layer=1, n_head=2, n_embd=16)
    torch.manual_seed(3)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        model.transformer.ln_f.bias[0] += damage
    tensors = {f"model.{name}": tensor for name, tensor in model_tensors(model).items()}
    return encode(tensors, {
        "model": asdict(config), "tokenizer": tokenizer.to_dict(), "step": 70, "run_id": "r", "val_loss": val_loss,
    })  # fmt: skip


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sample") / "image.safetensors"
    path.write_bytes(make_image().numpy().tobytes())
    return path


Outcome = tuple[int, str, str]


@pytest.fixture
def run(image: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs the command on the image: exit code, stdout, stderr."""

    def call(*options: str, snapshot: Path = image) -> Outcome:
        try:
            code = sample.main([str(snapshot), "--device=cpu", *options])
        except SystemExit as leaving:  # argparse
            code = int(leaving.code or 0)
        return code, *capsys.readouterr()

    return call


# what is written


def test_stdout_is_prompt_and_continuation_and_stderr_tells_the_rest(run: Callable[..., Outcome], image: Path) -> None:
    code, out, err = run("--prompt=abé", "--max-new-tokens=60")
    assert code == 0
    assert out.startswith("abé") and out.endswith("\n") and len(out) == 3 + 60 + 1
    assert set(out) <= set(CHARS)
    assert err == f"{image}: step 70, val loss 1.2500, 3,760 parameters, on cpu, in float32\n"


def test_a_seed_is_a_text_and_sample_k_does_not_depend_on_their_number(run: Callable[..., Outcome]) -> None:
    ask = ("--prompt=ab", "--max-new-tokens=40", "--seed=7")
    _, one, _ = run(*ask)
    _, three, _ = run(*ask, "--num-samples=3")
    first, rest = three.split("--- sample 2 of 3 ---\n")
    second, third = rest.split("--- sample 3 of 3 ---\n")
    assert one == first
    assert len({first, second, third}) == 3 and all(text.startswith("ab") for text in (first, second, third))
    assert run(*ask, "--num-samples=3")[1] == three
    assert run(*ask[:2], "--seed=8")[1] != one
    assert run(*ask[:2], f"--seed={-(10**30)}")[0] == 0


def test_seeds_are_pinned() -> None:
    assert sample.derived_seed(1337, 1) == 8590846840486349296


def test_tokens_are_shown_as_they_are_made(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[bytes] = []
    screen = io.BytesIO()

    def watched(self: GPT, *args: Any, **settings: Any) -> Iterator[torch.Tensor]:
        for token in range(2, 5):
            shown.append(screen.getvalue())
            yield torch.tensor([token])

    monkeypatch.setattr(GPT, "generate", watched)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, encoding="utf-8"))  # keeps what is not flushed
    assert sample.main([str(image), "--prompt=ab", "--device=cpu"]) == 0
    assert [*shown, screen.getvalue()] == [b"ab", b"ab ", b"ab !", b"ab !?\n"]


def test_the_settings_reach_the_model(run: Callable[..., Outcome]) -> None:
    ask = ("--prompt=ab", "--max-new-tokens=40")
    _, greedy, _ = run(*ask, "--temperature=0")
    for option in ("--temperature=1e-9", "--top-k=1", "--top-p=1e-9"):
        assert run(*ask, option, "--seed=3")[1] == greedy
    assert run(*ask, "--top-k=1000", "--seed=3")[1] == run(*ask, "--seed=3")[1] != greedy
    assert run(*ask[:1], "--max-new-tokens=0")[1] == "ab\n"


def test_the_dtype_is_that_of_the_weights(run: Callable[..., Outcome], image: Path) -> None:
    model, tokenizer, _ = load_snapshot(str(image))
    idx = torch.tensor([tokenizer.encode("ab").tolist()])
    made = model.bfloat16().generate(idx, 40, temperature=0.0)
    text = "ab" + tokenizer.decode([int(token) for token in made]) + "\n"
    code, out, err = run("--prompt=ab", "--max-new-tokens=40", "--temperature=0", "--dtype=bfloat16")
    assert (code, out) == (0, text) and err.endswith(", in bfloat16\n")


# prompts


def test_an_empty_prompt_starts_after_a_newline_or_the_first_token(run: Callable[..., Outcome], tmp_path: Path) -> None:
    ask = ("--max-new-tokens=30", "--temperature=0")
    code, out, _ = run(*ask)
    assert code == 0 and "\n" + out == run(*ask, "--prompt=\n")[1]
    empty = tmp_path / "empty"
    empty.touch()
    assert run(*ask, f"--prompt-file={empty}")[1] == out

    without = tmp_path / "without.safetensors"
    without.write_bytes(make_image(CharTokenizer("xyz")).numpy().tobytes())
    assert "x" + run(*ask, snapshot=without)[1] == run(*ask, "--prompt=x", snapshot=without)[1]


@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1, 10 * BLOCK])
def test_of_a_long_prompt_the_last_block_counts(run: Callable[..., Outcome], length: int) -> None:
    prompt = ("abcdef é!" * length)[:length]
    code, out, err = run(f"--prompt={prompt}", "--max-new-tokens=40", "--num-samples=2")
    assert code == 0 and out.startswith(prompt)
    assert err.count("the model reads the last 16 of them") == (length > BLOCK)
    _, short, _ = run(f"--prompt={prompt[-BLOCK:]}", "--max-new-tokens=40", "--num-samples=2")
    assert out.replace(prompt, "") == short.replace(prompt[-BLOCK:], "")


@pytest.mark.parametrize(
    ("data", "prompt"),
    [(b"ab\n", "ab\n"), (b"a\r\nb\rc", "a\nb\nc"), (b"\xef\xbb\xbfab", "ab"), ("é".encode(), "é"), (b" a  ", " a  ")],
)
def test_a_prompt_file_is_kept_as_it_is(run: Callable[..., Outcome], tmp_path: Path, data: bytes, prompt: str) -> None:
    file = tmp_path / "prompt"
    file.write_bytes(data)
    code, out, _ = run(f"--prompt-file={file}", "--max-new-tokens=20")
    assert code == 0 and out == run(f"--prompt={prompt}", "--max-new-tokens=20")[1]
    assert out.startswith(prompt)


def test_a_prompt_file_that_is_not_utf8_is_refused(run: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("abé".encode("latin-1"))
    code, out, err = run(f"--prompt-file={tmp_path / 'latin'}")
    assert (code, out) == (2, "") and "byte 0xe9 at offset 2" in err and err.count("\n") == 1


def test_unknown_characters_are_named_or_left_out_or_replaced(run: Callable[..., Outcome]) -> None:
    code, out, err = run("--prompt=abX日")
    assert (code, out) == (2, "") and err.count("\n") == 2  # the first says what was loaded
    assert "'X' at position 2, '日' at position 3" in err and "--unknown=drop" in err
    ask = ("--max-new-tokens=20", "--prompt=aXb日")
    assert run(*ask, "--unknown=drop")[1] == run(ask[0], "--prompt=ab")[1]
    assert run(*ask, "--unknown=replace")[1] == run(ask[0], "--prompt=a\nb\n")[1]
    assert run(ask[0], "--prompt=X", "--unknown=drop")[1] == run(ask[0])[1]
    assert run("--prompt=a\udcffb")[0] == 2  # a byte of the command line that is not UTF-8


# many prompts


def test_each_text_is_what_it_is_alone(run: Callable[..., Outcome], tmp_path: Path) -> None:
    prompts = ["ab", "", "c" * (BLOCK + 4), "é\n", "ab"]
    ask = ("--max-new-tokens=50", "--top-k=9")
    alone = [
        run(f"--prompt={prompt}", *ask, "--num-samples=2")[1].split("--- sample 2 of 2 ---\n") for prompt in prompts
    ]
    code, out, err = run(*(f"--prompt={prompt}" for prompt in prompts), *ask)
    expected = alone[0][0] + "".join(f"--- prompt {i} of 5 ---\n{alone[i - 1][0]}" for i in range(2, 6))
    assert (code, out) == (0, expected) and "\nprompt 3 has 20 tokens, the model reads the last 16" in err
    assert err.count("the model reads") == 1

    files = [tmp_path / str(i) for i in range(len(prompts))]
    for file, prompt in zip(files, prompts, strict=True):
        file.write_text(prompt, encoding="utf-8")
    _, out, _ = run(*(f"--prompt-file={file}" for file in files), *ask, "--num-samples=2")  # more than one batch
    parts = [f"--- prompt {i} of 5, sample {k} of 2 ---\n{alone[i - 1][k - 1]}" for i in range(1, 6) for k in (1, 2)]
    assert out == "".join(parts).removeprefix("--- prompt 1 of 5, sample 1 of 2 ---\n")


# where a text ends


def added(tokens: list[int], tokenizer: Tokenizer, *stops: str) -> tuple[list[str], bool]:
    """What a reply shows after each of the tokens and at its end, and whether it had ended before."""
    reply = sample.Reply(tokenizer, stops)
    shown = []
    for token in tokens:
        reply.add(token)
        shown.append(reply.take())
    done = reply.done
    reply.close()
    return [*shown, reply.take()], done


@pytest.mark.parametrize(
    ("text", "stops", "shown", "done"),
    [
        ("abcab", (), ["a", "b", "c", "a", "b", ""], False),
        ("abcab", ("ca",), ["a", "b", "", "", "", ""], True),
        ("abcab", ("cx", "bcaa"), ["a", "", "", "", "bca", "b"], False),
        ("ccca", ("cca",), ["", "", "c", "", ""], True),
        ("abc", ("bcd",), ["a", "", "", "bc"], False),  # what might have become a stop string is shown at the end
        ("abc", ("bc", "b"), ["a", "", "", ""], True),
        ("abc", ("a",), ["", "", "", ""], True),
    ],
)
def test_text_is_shown_up_to_a_stop_string(text: str, stops: tuple[str, ...], shown: list[str], done: bool) -> None:
    tokenizer = CharTokenizer("abcdx")
    assert added(tokenizer.encode(text).tolist(), tokenizer, *stops) == (shown, done)


def test_stop_strings_cross_the_borders_of_tokens_and_characters() -> None:
    def ids(text: str) -> list[int]:
        return [int(token) for token in BPE.encode(text)]

    assert added([*ids("é"), *ids("the"), 256], BPE, "het") == (["", "é", "t", "", ""], True)  # "the" + "th"
    assert added([*ids("x"), 258, *ids("y")], BPE, "\n") == (["x", "", "", ""], True)  # a part of a token
    assert added(list("日x".encode()), BPE, "x") == (["", "", "日", "", ""], True)
    assert added([0xE6, 0x97], BPE) == (["", "", "\ufffd"], False)  # a character that never ends
    assert added([*ids("a"), BPE.end_of_text, *ids("b")], BPE, "ab") == (["", "a", "", ""], True)
    assert added([*ids("a"), 300], BPE) == (["a", "\ufffd", ""], False)


def test_stop_strings_of_the_command_line(run: Callable[..., Outcome]) -> None:
    ask = ("--prompt=ab", "--max-new-tokens=60", "--num-samples=3")
    whole = run(*ask)[1].replace("ab", "", 1).split("\n--- sample", 1)[0]
    stop = whole[20:23]
    cut = run(*ask, f"--stop={stop}", "--stop=never")[1]
    assert cut.startswith(f"ab{whole[: whole.index(stop)]}\n--- sample 2 of 3 ---\nab") and cut.count("---") == 4
    code, out, err = run(*ask, "--stop=")
    assert (code, out) == (2, "") and "--stop" in err


def test_a_text_ends_with_its_document(tmp_path: Path, run: Callable[..., Outcome]) -> None:
    image = tmp_path / "bpe.safetensors"
    image.write_bytes(make_image(BPE).numpy().tobytes())
    ask = ("--prompt=<|endoftext|>the", "--max-new-tokens=3000", "--temperature=9", f"--logprobs={tmp_path / 'p'}")
    code, out, _ = run(*ask, snapshot=image)
    tokens = [json.loads(line)["token"] for line in (tmp_path / "p").read_text(encoding="utf-8").splitlines()]
    assert code == 0 and tokens.index(BPE.end_of_text) == len(tokens) - 1 < 2999
    assert out == f"<|endoftext|>the{BPE.decode(tokens[:-1])}\n"


def test_logprobs_of_what_was_written(run: Callable[..., Outcome], tmp_path: Path, image: Path) -> None:
    file = tmp_path / "logprobs"
    ask = ("--prompt=ab", "--prompt=c", "--num-samples=2", "--max-new-tokens=10", f"--logprobs={file}")
    stop = run(*ask)[1][6]  # in the middle of the first text
    _, out, _ = run(*ask, f"--stop={stop}")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    model, tokenizer, _ = sample.load_snapshot(str(image))
    texts = [text.split("---\n")[-1] for text in out.split("\n--- prompt ")]
    for prompt, number in ((1, 1), (1, 2), (2, 1), (2, 2)):
        mine = [row for row in rows if (row["prompt"], row["sample"]) == (prompt, number)]
        start = "ab" if prompt == 1 else "c"
        written = "".join(row["text"] for row in mine)
        assert len(mine) <= (5 if number == prompt == 1 else 10)
        assert (start + written.removesuffix(stop)).split() == texts[2 * prompt + number - 3].split()
        idx = torch.tensor([tokenizer.encode(start + written).tolist()])
        expected = model(idx)[0].log_softmax(-1)[0, len(start) - 1 : -1].gather(1, idx[0, len(start) :, None])
        assert [row["logprob"] for row in mine] == pytest.approx(expected.flatten().tolist(), abs=1e-4)
        assert all(math.isfinite(row["logprob"]) for row in mine)
    assert run(*ask[:1], f"--logprobs={tmp_path / 'no' / 'folder'}")[0] == 2


# refusals


@pytest.mark.parametrize(
    "option",
    ["--temperature=-1", "--temperature=nan", "--temperature=hot", "--top-k=0", "--top-k=-1", "--top-p=0",
     "--max-new-tokens=-1", "--num-samples=0", "--unknown=guess", "--stop=", "--device=cuda:99", "--device=abacus",
     "--device=meta", "--device=cpu:7", "--dtype=int8", "--temp=1", "--prompt=\u0436"],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(run: Callable[..., Outcome], tmp_path: Path, option: str) -> None:
    kept = tmp_path / "logprobs"
    kept.write_text("of an earlier run")
    code, out, err = run("--prompt=ab", f"--logprobs={kept}", option)
    assert (code, out) == (2, "")
    assert kept.read_text() == "of an earlier run"
    assert option.split("=")[0].removeprefix("--") in err.splitlines()[-1].replace("_", "-")


def test_the_device_is_what_the_machine_has() -> None:
    assert torch.empty(0, device=sample.find_device("auto")).device.type == sample.find_device("auto").split(":")[0]
    assert sample.find_device("cpu") == "cpu"


@pytest.mark.parametrize(
    "options",
    [("--prompt=a", "--prompt-file=b"), ("--prompt-file=-", "--prompt-file=-"), ("--interactive", "--prompt-file=-"),
     ("--interactive", "--prompt=a", "--prompt=b"), ("--interactive", "--num-samples=2")],
)  # fmt: skip
def test_what_cannot_go_together_is_refused(run: Callable[..., Outcome], options: tuple[str, ...]) -> None:
    code, out, err = run(*options)
    assert (code, out) == (2, "") and options[0].split("=")[0] in err


def test_what_is_no_snapshot_is_told_in_one_line(run: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no image", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    for name, expected in {"missing": 2, "text": 2, "folder": 2}.items():
        code, out, err = run(snapshot=tmp_path / name)
        assert (code, out) == (expected, "") and err.count("\n") == 1 and str(tmp_path / name) in err
    assert run(f"--prompt-file={tmp_path / 'missing'}")[0] == 2


def test_damaged_weights_are_told_in_one_line(run: Callable[..., Outcome], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(make_image(damage=float("nan"), val_loss=None).numpy().tobytes())
    code, _, err = run(snapshot=damaged)
    assert code == 2 and "not evaluated" in err and "not finite" in err.splitlines()[-1]


# how it ends


def test_a_console_gets_codes_for_what_it_cannot_show(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    assert sample.main([str(image), "--prompt=é", "--max-new-tokens=0"]) == 0
    assert written.getvalue() == b"\\xe9\n"


def test_a_full_disk_is_told(image: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    full = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    assert sample.main([str(image)]) == 1
    assert "No space left on device: 'standard output'" in capsys.readouterr().err
    full.close()  # as the interpreter does at its end; would raise, were anything left to write
    monkeypatch.undo()
    assert sample.main([str(image), "--logprobs=/dev/full"]) == 1
    assert "No space left on device: '/dev/full'" in capsys.readouterr().err


def test_each_failed_read_or_write_is_named(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OSError, match="^only a text$"), sample.naming("place"):
        raise OSError("only a text")
    with open(tmp_path / "written", "w", encoding="utf-8") as unreadable:
        monkeypatch.setattr(sys, "stdin", open(os.dup(unreadable.fileno()), encoding="utf-8"))  # noqa: SIM115
        assert sample.main([str(image), "--interactive", f"--logprobs={tmp_path / 'records'}"]) == 1
    assert "Bad file descriptor: 'standard input'" in capsys.readouterr().err


def test_a_reader_of_records_who_leaves_is_told(image: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "records")
    process = start(image, "--max-new-tokens=100000", f"--logprobs={tmp_path / 'records'}")
    with open(tmp_path / "records", encoding="utf-8") as records:
        assert json.loads(records.readline())["sample"] == 1
    _, err = process.communicate()
    assert process.returncode == 1
    assert b"Broken pipe" in err and b"records" in err and b"Traceback" not in err


@pytest.mark.parametrize("closed", [">&-", "<&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_crash(closed: str, image: Path) -> None:
    command = [sys.executable, "-m", "mingpt.sample", str(image), "--device=cpu", "--prompt=a", "--max-new-tokens=0"]
    command += ["--interactive"] * (closed == "<&-")
    ended = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *command], cwd=ROOT, capture_output=True, check=False)
    assert ended.returncode == 0 and b"Traceback" not in ended.stderr
    shown = {"<&-": b"a", "2>&-": b"a\n"}.get(closed, b"")
    assert ended.stdout == shown  # and nothing that is meant for stderr


def start(image: Path, *options: str, **environment: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "mingpt.sample", str(image), "--device=cpu", *options],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_run_folder_and_a_prompt_from_standard_input(tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir()
    snapshots(tmp_path / "snapshots", "r").save(make_image(), step=70, generation=1, facts={})
    process = start(tmp_path, "--prompt-file=-", "--max-new-tokens=30", PYTHONIOENCODING="ascii", LC_ALL="C")
    out, err = process.communicate("aé\n".encode())
    assert process.returncode == 0, err
    assert out.startswith(b"a\\xe9\n") and out.isascii() and b"step 70" in err


def test_a_reader_that_has_enough_is_no_failure(image: Path) -> None:
    process = start(image, "--max-new-tokens=1000000")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait() == 0
    assert process.stderr.read().count(b"\n") == 1  # what was loaded


def test_ctrl_c_ends_quietly(image: Path) -> None:
    process = start(image, "--max-new-tokens=1000000")
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130 and err.count(b"\n") == 1


# the chat


def test_a_chat_answers_line_by_line_with_all_that_was_said(image: Path) -> None:
    ask = ("--temperature=0", "--max-new-tokens=6")
    process = start(image, "--interactive", "--prompt=ab", *ask)
    out, err = process.communicate(b"c\nX\nd\n")
    assert process.returncode == 0
    assert b"'X' at position 0" in err and err.count(b"\n") == 2

    model, tokenizer, _ = sample.load_snapshot(str(image))
    text, shown = "ab", "ab"
    for line in "cd":
        text += f"{line}\n"
        idx = torch.tensor([tokenizer.encode(text).tolist()])
        made = tokenizer.decode(int(token) for token in model.generate(idx, 6, temperature=0.0))
        text, shown = text + made + "\n" * (not made.endswith("\n")), f"{shown}{made}\n"
    assert out.decode() == shown


def test_ctrl_c_keeps_back_nothing_that_was_written(
    image: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(session: sample.Session, ids: Any, generators: Any, replies: Any, places: Any) -> Iterator[Any]:
        replies[0].add(CHARS.index("a"))
        yield [CHARS.index("a")]
        raise KeyboardInterrupt

    said = iter(["b"])
    monkeypatch.setattr("builtins.input", lambda question: next(said))
    monkeypatch.setattr(sample.Session, "steps", interrupted)
    model, tokenizer, _ = sample.load_snapshot(str(image))
    asked = sample.parse([str(image), "--interactive", "--stop=abc"])
    with pytest.raises(StopIteration):
        sample.Session(model, tokenizer, "cpu", asked, None).chat("", [0])
    assert capsys.readouterr().out == "a\n"


def test_ctrl_c_ends_a_reply_and_not_the_chat(image: Path) -> None:
    process = start(image, "--interactive", "--max-new-tokens=1000000")
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stderr.readline()
    for _ in range(2):
        process.stdin.write(b"ab\n")
        process.stdin.flush()
        process.stdout.read(5)
        process.send_signal(signal.SIGINT)
    out, err = process.communicate()  # the end of the input: Ctrl-D
    assert process.returncode == 0 and out.endswith(b"\n") and err == b""
