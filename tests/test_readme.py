"""What README.md and the configs tell people to type does what they say; run in a copy with a small Shakespeare."""

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from conftest import ROOT, free_port, text

from mingpt.image import encode
from mingpt.interop import export_gpt2
from mingpt.model import GPT, PRESETS, GPTConfig
from mingpt.snapshot import model_tensors
from mingpt.tokenizer import CharTokenizer

README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICK = [
    "--train.max_steps=2", "--optim.warmup_steps=1", "--train.eval_sequences=4", "--train.num_threads=1",
    "--train.global_batch_size=8", "--train.micro_batch_size=4", "--model.block_size=32",
]  # fmt: skip
FINETUNE = ["--data.tokenizer=char", "--model.preset=gpt-nano", "--train.max_epochs=null"]
TINY = ["--model.preset=gpt-nano"]


def blocks(language: str) -> list[str]:
    """The fenced blocks of README.md in a language; "" for those without one."""
    return [body for fence, body in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.S | re.M) if fence == language]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("mingpt", "configs", "data"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".mingpt-cache"))
    shutil.copy(ROOT / "train_gpt.py", folder)
    (folder / "data/shakespeare/input.txt").write_text("ROMEO:\n" + text(20000), encoding="utf-8")
    (folder / "my.txt").write_text(text(5000), encoding="utf-8")
    make_gpt2(folder)
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.jsonl").write_text('{"text": "a document"}\n' * 900, encoding="utf-8")
    (folder / "fineweb.txt").write_text(text(50_000), encoding="utf-8")
    run(folder, "python", "-m", "mingpt.prepare", "fineweb.txt", "--out=data/fineweb/prepared", "--tokenizer=gpt2")
    return folder


def make_gpt2(folder: Path) -> None:
    """A small random model for the text: gpt2.safetensors, and gpt2/ as Hugging Face lays it out."""
    tokenizer = CharTokenizer.from_text([(folder / "data/shakespeare/input.txt").read_text(encoding="utf-8")])
    model = GPT(GPTConfig(tokenizer.vocab_size, block_size=32, **PRESETS["gpt-nano"]))
    metadata = {"model": asdict(model.config), "tokenizer": tokenizer.to_dict(), "step": 0}
    image = encode({f"model.{name}": tensor for name, tensor in model_tensors(model).items()}, metadata)
    (folder / "gpt2.safetensors").write_bytes(image.numpy().tobytes())
    export_gpt2(str(folder / "gpt2.safetensors"), str(folder / "gpt2"))


def run(folder: Path, *command: str) -> str:
    programs = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    done = subprocess.run(
        [*programs[command[0]], *command[1:]], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_every_command(checkout: Path) -> None:
    lines = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    commands = [command.strip() for line in lines for command in line.split("&&") if command.strip()]
    made = [command for command in commands if command.startswith("make ")]
    assert made == ["make demo", "make train", "make test"]
    here = f"127.0.0.1:{free_port()}"
    others = [shlex.split(command.replace("HOST:29400", here)) for command in commands if command not in made]
    for command in others:
        if command[0] == "pip":
            assert (ROOT / command[-1]).exists()
            continue
        trains = "train_gpt.py" in command
        if "--nproc_per_node=4" in command:  # each takes seconds to start
            command[command.index("--nproc_per_node=4")] = "--nproc_per_node=2"
            command += ["--name=two"]
        tunes = "configs/finetune_gpt2.yaml" in command
        output = run(checkout, *command, *(QUICK if trains else []), *(FINETUNE if tunes else []))
        assert ("weights_sha256" in output) == trains
        if "mingpt.sample" in command:
            assert output.count("ROMEO:") >= 2
    assert len(others) >= 5


@pytest.mark.parametrize("target", ["train", "test", "check", "gpu-check", "proof", "slurm-check", "clean"])
def test_every_target_exists(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_python_example(checkout: Path) -> None:
    if not (checkout / "runs/shakespeare_char").exists():
        run(checkout, "python", "train_gpt.py", *QUICK)
    examples = blocks("python")
    assert len(examples) == 2
    for example in examples:
        output = run(checkout, "python", "-c", example)
        assert output.strip()
    assert float(output.split()[-1]) < 2.0, "the bigram of the last example learns: ln(28) is 3.3"


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config(checkout: Path, config: Path) -> None:
    tuned = [*QUICK, *FINETUNE, "--snapshot.init_from=gpt2.safetensors"]
    special = {"smoke": [], "gpt2_124m": [*QUICK, *TINY], "finetune_gpt2": tuned}
    overrides = special.get(config.stem, QUICK)
    output = run(checkout, "python", "train_gpt.py", f"configs/{config.name}", f"--name=test-{config.stem}", *overrides)
    assert "weights_sha256" in output
    command = config.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    assert shlex.split(command)[:3] == ["python", "train_gpt.py", f"configs/{config.name}"], "opens with its command"


def test_every_file_is_in_the_tree_and_every_name_there_is_a_file() -> None:
    (tree,) = (block for block in blocks("") if block.startswith("train_gpt.py"))
    named = {Path(name).name for name in re.findall(r"^\s*([\w/]+\.py)", tree, re.M)}
    assert named == {path.name for path in ROOT.glob("mingpt/*.py") if path.stem != "__init__"} | {"train_gpt.py"}
