"""Layers, types and contradictions of a run's description, and that what is wrong is told whole, in single lines."""

import dataclasses
import inspect
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mingpt import config as module
from mingpt.config import Config, ConfigError, ModelSection, flatten, load_config, to_yaml, warnings
from mingpt.model import PRESETS

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
Load = Callable[..., Config]
Problems = Callable[..., list[str]]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """load("--seed=1", text="name: x", kind="cpu"): the text is the default file, kind what `auto` comes to."""

    def load(*argv: str, text: str | bytes = "{}", kind: str = "cpu") -> Config:
        default = tmp_path / "default.yaml"
        default.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_config(argv, default, lambda device: kind if device == "auto" else device.split(":")[0])

    return load


@pytest.fixture
def problems(load: Load, tmp_path: Path) -> Problems:
    """Like load, for what is wrong: its problems, without the folder's name."""

    def problems(*argv: str, text: str | bytes = "{}", kind: str = "cpu") -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(*argv, text=text, kind=kind)
        assert str(caught.value) == "\n".join(caught.value.problems)
        assert all(line == " ".join(line.split()) for line in caught.value.problems)
        return [line.replace(f"{tmp_path}/", "") for line in caught.value.problems]

    return problems


def changed(config: Config) -> dict[str, Any]:
    defaults = flatten(Config()) | {"train.max_steps": 2000}
    return {name: value for name, value in flatten(config).items() if value != defaults[name]}


# Layers


def test_later_layers_win(load: Load) -> None:
    text = "seed: 1\nname: a\nmodel: {n_layer: 1, dropout: 0.1}\non_cpu: {seed: 2, model: {n_layer: 2}}"
    assert changed(load()) == {}
    assert changed(load(text=text, kind="cuda")) == {"seed": 1, "name": "a", "model.n_layer": 1, "model.dropout": 0.1}
    assert changed(load(text=text)) == {"seed": 2, "name": "a", "model.n_layer": 2, "model.dropout": 0.1}
    assert changed(load("--seed=3", "--name=b", text=text)) == {
        "seed": 3,
        "name": "b",
        "model.n_layer": 2,
        "model.dropout": 0.1,
    }


def test_the_block_follows_the_device_that_the_command_line_asks_for(load: Load) -> None:
    text = "device: cpu\non_cuda: {seed: 2}\non_mps: {seed: 3}"
    assert load(text=text, kind="cuda").seed == 1337
    assert load("--device=cuda:1", text=text).seed == 2
    assert load("--device=mps", text=text).seed == 3


def test_a_file_given_stands_in_for_the_default_one(load: Load, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("seed: 5", encoding="utf-8")
    assert changed(load(f"{tmp_path}/own.yaml", "--name=x", text="seed: 6\ncompile: true")) == {"seed": 5, "name": "x"}
    assert load("--name=x", f"{tmp_path}/own.yaml").seed == 5


@pytest.mark.parametrize("argv", [["--train.max_steps=300"], ["--train.max_steps", "300"]])
def test_both_forms_of_an_override(load: Load, argv: list[str]) -> None:
    assert load(*argv).train.max_steps == 300


@pytest.mark.parametrize("argv", [["--local-rank=3"], ["--local_rank", "3"], ["--local_rank=0"]])
def test_the_rank_from_old_launchers_is_ignored(load: Load, argv: list[str]) -> None:
    assert load(*argv, "--seed=4").seed == 4


def test_the_length_is_steps_or_epochs(load: Load) -> None:
    assert load().train.max_steps == 2000
    train = load("--train.max_epochs=1.5").train
    assert (train.max_steps, train.max_epochs) == (None, 1.5)
    assert load("--train.max_steps=null", "--train.max_epochs=2", text="train: {max_steps: 9}").train.max_epochs == 2


def test_a_value_replaces_the_presets(load: Load) -> None:
    assert load("--model.preset=gpt2").model.shape == PRESETS["gpt2"]
    assert load("--model.preset=gpt2", "--model.n_layer=2").model.shape == PRESETS["gpt2"] | {"n_layer": 2}
    given = load("--model.preset=null", "--model.n_layer=1", "--model.n_head=2", "--model.n_embd=4").model
    assert given.shape == {"n_layer": 1, "n_head": 2, "n_embd": 4}


def test_a_later_layer_replaces_what_an_earlier_one_says_in_other_words(load: Load) -> None:
    shape = "model: {preset: null, n_layer: 9, n_head: 9, n_embd: 9}\ntrain: {max_steps: 9}"
    assert load("--model.preset=gpt2", text=shape).model.shape == PRESETS["gpt2"]
    assert load("--model.preset=gpt2", "--model.n_layer=2", text=shape).model.shape == PRESETS["gpt2"] | {"n_layer": 2}
    assert load("--model.n_layer=2", text=shape).model.shape == {"n_layer": 2, "n_head": 9, "n_embd": 9}
    assert load("--train.max_epochs=2", text=shape).train.max_steps is None


def test_places_follow_the_name(load: Load) -> None:
    assert load("--name=x").run_dir == Path("runs/x")
    assert load("--name=x").snapshot_uri == "runs/x/snapshots"
    assert load("--out_dir=o").snapshot_uri == "o/snapshots"
    assert load("--snapshot.uri=file:///b/x", "--out_dir=o").snapshot_uri == "file:///b/x"


def test_the_home_folder_is_expanded(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = load("--out_dir=~/o")
    assert (config.out_dir, config.run_dir) == ("~/o", Path("/home/me/o"))
    assert config.snapshot_uri == "/home/me/o/snapshots"


# Types


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("optim.learning_rate", "1e-3", 1e-3),
        ("optim.learning_rate", "1E-3", 1e-3),
        ("optim.learning_rate", ".5", 0.5),
        ("optim.learning_rate", "1", 1.0),
        ("train.max_epochs", "3", 3.0),
        ("train.max_epochs", "null", None),
        ("seed", "0", 0),
        ("seed", str(2**63 - 1), 2**63 - 1),
        ("compile", "true", True),
        ("compile", "false", False),
        ("snapshot.uri", "null", None),
        ("snapshot.uri", "file:///bucket/a b", "file:///bucket/a b"),
        ("dtype", "bfloat16", "bfloat16"),
    ],
)
def test_values_have_their_settings_types(load: Load, name: str, text: str, value: Any) -> None:
    section, _, key = name.rpartition(".")
    in_file = f"{section}: {{{key}: {text}}}" if section else f"{key}: {text}"
    for config in (load(f"--{name}={text}"), load(text=in_file)):
        assert flatten(config)[name] == value
        assert type(flatten(config)[name]) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("train.max_steps", "abc", "an integer (from 1 to 2**31 - 1) or null"),
        ("train.max_steps", "1.5", "an integer (from 1 to 2**31 - 1) or null"),
        ("train.max_steps", "0", "an integer (from 1 to 2**31 - 1) or null"),
        ("train.max_steps", "true", "an integer (from 1 to 2**31 - 1) or null"),
        ("train.eval_interval", "-1", "an integer (from 0 to 2**31 - 1)"),
        ("train.max_epochs", "0", "a number (above 0, at most 1e9) or null"),
        ("seed", "null", "an integer (from 0 to 2**63 - 1)"),
        ("seed", str(2**63), "an integer (from 0 to 2**63 - 1)"),
        ("seed", "[1]", "an integer (from 0 to 2**63 - 1)"),
        ("compile", "1", "true or false"),
        ("compile", "maybe", "true or false"),
        ("model.dropout", "1.0", "a number (at least 0 and below 1)"),
        ("data.val_fraction", "1", "a number (at least 0 and below 1)"),
        ("optim.min_lr", "-1e-3", "a number (from 0 to 1e9)"),
        ("optim.learning_rate", ".nan", "a number (above 0, at most 1e9)"),
        ("optim.learning_rate", "true", "a number (above 0, at most 1e9)"),
        ("optim.decay_fraction", "1.1", "a number (from 0 to 1)"),
        ("elastic.timeout_seconds", ".inf", "a number (above 0, at most 1e9)"),
        ("optim.schedule", "cosin", "one of cosine, linear, constant, wsd"),
        ("device", "gpu", "text (auto, cpu, cuda, cuda:N or mps)"),
        ("name", "a/b", "text (a folder's name, a path goes to out_dir)"),
        ("name", "..", "text (a folder's name, a path goes to out_dir)"),
        ("out_dir", "''", "text (a local folder's path) or null"),
        ("out_dir", "s3://bucket/x", "text (a local folder's path) or null"),
        ("out_dir", "file:///x", "text (a local folder's path) or null"),
        ("snapshot.uri", "''", "text (not empty) or null"),
    ],
)
def test_other_types_and_ranges_are_refused(problems: Problems, name: str, text: str, expected: str) -> None:
    section, _, key = name.rpartition(".")
    (line,) = problems(text=f"{section}: {{{key}: {text}}}" if section else f"{key}: {text}")
    assert re.fullmatch(re.escape(f"default.yaml: {name}=") + ".+" + re.escape(f": expected {expected}"), line)
    raw = "" if text == "''" else text
    assert problems(f"--{name}={raw}") == [f"--{name}={raw!r}: expected {expected}"]


@pytest.mark.parametrize("text", ["seed: '10'", "compile: 'true'", "name: 10", "name: 1e-3", "compile: '~'"])
def test_text_in_a_file_is_no_number_and_a_number_no_text(problems: Problems, text: str) -> None:
    (line,) = problems(text=text)
    assert "expected" in line


@pytest.mark.parametrize("text", ["~", "#", "- 1", "{a: 1}", "1e-3", "true", "'", "=", "--seed=3"])
def test_text_is_taken_as_it_is(load: Load, text: str) -> None:
    assert load(f"--snapshot.uri={text}", f"--name={text}").snapshot.uri == text
    assert load(f"--name={text}").name == text


def test_null_in_quotes_is_text(load: Load) -> None:
    assert load(text="snapshot: {uri: 'null'}").snapshot.uri == "null"


# What is no setting


@pytest.mark.parametrize(
    ("argument", "nearest"),
    [
        ("train.max_step", "train.max_steps"),
        ("train.max", "train.max_steps"),  # never taken for it
        ("blocksize", "model.block_size"),
        ("modle.n_layer", "model.n_layer"),
        ("lr", "optim.learning_rate"),
        ("optim.lr", "optim.learning_rate"),
    ],
)
def test_an_unknown_name_brings_the_nearest(problems: Problems, argument: str, nearest: str) -> None:
    assert problems(f"--{argument}=3") == [f"--{argument}='3': no such setting; nearest: {nearest}"]
    for block in ("", "on_cuda."):  # told on a CPU as well
        keys = f"{block}{argument}".split(".")
        text = ": {".join(keys) + ": 3" + "}" * (len(keys) - 1)
        (line,) = problems(text=text)
        assert line.endswith(f"nearest: {nearest}" if argument != "modle.n_layer" else "nearest: model")


def test_a_name_like_no_other(problems: Problems) -> None:
    assert problems("--xyzzy=3") == ["--xyzzy='3': no such setting; --help lists all"]


@pytest.mark.parametrize("text", ["model: 3", "on_cpu: 3", "model: [n_layer]"])
def test_a_section_has_no_value(problems: Problems, text: str) -> None:
    (line,) = problems(text=text)
    assert line.endswith("it holds settings and has no value of its own")


def test_a_section_may_be_empty(load: Load) -> None:
    assert changed(load(text="model:\non_cpu:\n")) == {}


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--train.max_steps"], "--train.max_steps: a value is missing: --train.max_steps=VALUE"),
        (["--train.max_steps", "--seed=3"], "--train.max_steps: a value is missing: --train.max_steps=VALUE"),
        (["--config=a.yaml"], "--config: the YAML file stands alone, first: a.yaml"),
        (["--config", "a.yaml"], "--config: the YAML file stands alone, first: a.yaml"),
        (["seed=3"], "seed=3: not understood; write [CONFIG.yaml] [--section.field=value ...]"),
        (["-x"], "-x: not understood; write [CONFIG.yaml] [--section.field=value ...]"),
        (["--seed=3", "--seed=4"], "--seed='4': already set to 3"),
        (["--on_cpu.seed=3"], "--on_cpu.seed='3': no such setting; nearest: seed"),
    ],
)
def test_a_command_line_that_is_not_understood(problems: Problems, argv: list[str], line: str) -> None:
    assert problems(*argv) == [line]


def test_a_second_file_is_refused(problems: Problems, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("seed: 5", encoding="utf-8")
    for stray in ("other.yaml", "3"):
        (line,) = problems(f"{tmp_path}/own.yaml", stray)
        assert line == f"{stray}: not understood; write [CONFIG.yaml] [--section.field=value ...]"


# Files


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "default.yaml: expected lines of `name: value`, {} for the defaults alone"),
        ("# seed: 3\n", "default.yaml: expected lines of `name: value`, {} for the defaults alone"),
        ("- seed\n", "default.yaml: expected lines of `name: value`"),
        ("seed", "default.yaml: expected lines of `name: value`"),
        ("seed: 3\nname: [a\n", "default.yaml, line 3: expected ',' or ']', but got '<stream end>'"),
        ("seed: 3\nmodel:\n\tdropout: 1", "default.yaml, line 3: found character '\\t' that cannot start any token"),
        ("seed: 3\nseed: 3\n", "default.yaml, line 2: seed is set twice"),
        ("model: {n_layer: 3, n_layer: 4}", "default.yaml, line 1: n_layer is set twice"),
        ("model: {n_layer: 3}\nmodel.n_layer: 4", "default.yaml: model.n_layer=4: already set to 3"),
        (b"name: caf\xe9", "default.yaml: byte 9 is not UTF-8"),
        ("seed: 1\n---\nseed: 2", "default.yaml, line 2: but found another document"),
        (
            "on_cpu: {device: cuda}",
            "default.yaml: on_cpu.device='cuda': the device chooses the block, so it is set outside of it",
        ),
    ],
)
def test_a_file_that_is_no_description(problems: Problems, text: str | bytes, line: str) -> None:
    assert problems(text=text) == [line]


@pytest.mark.parametrize("text", ["seed: !!python/object/apply:os.getcwd []", "seed: \x01", f"seed: {'9' * 5000}"])
def test_a_strange_file_is_told_in_one_line(problems: Problems, text: str) -> None:
    (line,) = problems(text=text)
    assert line.startswith("default.yaml")


def test_a_byte_order_mark_is_no_part_of_a_name(load: Load) -> None:
    assert load(text=b"\xef\xbb\xbfseed: 3").seed == 3


def test_a_missing_file_brings_the_nearest(problems: Problems, tmp_path: Path) -> None:
    assert problems("defualt") == ["defualt: no such file; nearest: default.yaml"]
    assert problems(f"{tmp_path}/defalt.yaml") == ["defalt.yaml: no such file; nearest: default.yaml"]
    assert problems(f"{tmp_path}/xyz") == ["xyz: no such file"]
    assert problems(f"{tmp_path}") == [f"{tmp_path}: cannot be read: Is a directory"]


# Everything at once


def test_all_problems_are_told_at_once(problems: Problems) -> None:
    text = "sed: 3\nmodel: {n_layer: many}\non_cpu: {compile: 7}\non_mps: {nmae: x}"
    lines = problems("--optim.lr=1", "--train.micro_batch_size=12", "--data.tokenizer=words", "seed=1", "-y", text=text)
    assert [re.split(r"[=:]", line.removeprefix("default.yaml: "))[0] for line in lines] == [
        "seed",
        "-y",
        "sed",
        "model.n_layer",
        "on_cpu.compile",
        "on_mps.nmae",
        "--optim.lr",
        "--data.tokenizer",
        "train.micro_batch_size",
    ]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["--train.micro_batch_size=12"],
            "train.micro_batch_size=12, train.global_batch_size=32: 12 does not divide 32, but 8 does",
        ),
        (
            ["--model.n_head=5"],
            "model.preset='gpt-mini', model.n_head=5, model.n_embd=null: 5 does not divide 192, but 4 does",
        ),
        (
            ["--train.reduction=exact", "--dtype=float16"],
            "train.reduction='exact', dtype='float16': exact reduction does not support float16; take bfloat16",
        ),
        (
            ["--train.reduction=exact", "--device=mps"],
            "train.reduction='exact', device='mps': exact reduction does not support mps; take device=cpu",
        ),
        (
            ["--optim.min_lr=1"],
            "optim.min_lr=1.0, optim.learning_rate=0.001: the floor is above the peak; usual is a tenth of it",
        ),
        (
            ["--train.max_steps=500", "--train.max_epochs=1"],
            "train.max_steps=500, train.max_epochs=1.0: set one of the two to null",
        ),
        (
            ["--model.preset=null", "--model.n_head=4"],
            "model.preset=null, model.n_layer=null, model.n_embd=null: "
            "without a preset all three of the shape are needed",
        ),
        (["--model.preset=gpt3"], f"model.preset='gpt3': expected null or one of {', '.join(PRESETS)}"),
    ],
)
def test_contradictions_are_refused(problems: Problems, argv: list[str], line: str) -> None:
    assert problems(*argv) == [line]


@pytest.mark.parametrize(
    "argv",
    [
        ["--train.reduction=exact", "--dtype=bfloat16"],
        ["--train.max_steps=9"],
        ["--train.max_epochs=0.01"],
        ["--optim.schedule=constant", "--optim.learning_rate=1e-5"],
        ["--train.global_batch_size=12", "--train.micro_batch_size=12"],
    ],
)
def test_what_only_looks_like_a_contradiction_passes(load: Load, argv: list[str]) -> None:
    load(*argv)


def test_a_wrong_value_is_not_said_to_contradict_others(problems: Problems) -> None:
    (line,) = problems("--train.micro_batch_size=twelve", "--train.global_batch_size=12")
    assert line.startswith("--train.micro_batch_size='twelve'")
    assert problems("nowhere/x", "--train.global_batch_size=12") == ["nowhere/x: no such file"]  # it may say micro: 6


def test_an_immense_number_is_told_at_once(problems: Problems) -> None:
    (line,) = problems(f"--train.global_batch_size={2**31 - 1}")
    assert line.endswith("does not divide 2147483647, but 1 does")


# Help, printing, and back


def test_help_names_every_setting_and_its_meaning(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mingpt")
    with pytest.raises(SystemExit) as left:
        load("--seed=wrong", "--help")
    text = " ".join(caplog.messages[0].split())
    assert left.value.code == 0
    for name, comment in comments().items():
        assert f"--{name} " in text
        assert comment in text


def test_print_config_prints_what_loads_back(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mingpt")
    argv = ["--seed=3", "--model.preset=null", "--model.n_layer=1", "--model.n_head=1", "--model.n_embd=8"]
    with pytest.raises(SystemExit) as left:
        load(*argv, "--print_config")
    assert left.value.code == 0
    assert load(text=caplog.messages[0]) == load(*argv)


@pytest.mark.parametrize("argument", ["--help", "--print_config"])
def test_of_several_ranks_one_prints(argument: str) -> None:
    def printed(rank: int) -> str:
        command = [sys.executable, "train_gpt.py", argument]
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2"}
        return subprocess.run(
            command, cwd=CONFIGS.parent, env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert "max_steps" in printed(0)
    assert printed(1) == ""


names = st.text(min_size=1).filter(module._LIMITS["a folder's name, a path goes to out_dir"])


@settings(max_examples=20, deadline=None, phases=[Phase.generate])  # shrinking would load a thousand times
@given(
    name=names | st.sampled_from(["1e-3", "1E5", "null", "true", "3", "2024-01-01", "a: b", "# a", "naïve"]),
    seed=st.integers(0, 2**63 - 1),
    learning_rate=st.floats(1e-300, 1e9),
    uri=st.none() | st.sampled_from(["~", "#", "null"]) | st.text(min_size=1).filter(lambda uri: "://" not in uri),
)
def test_every_description_loads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, name: str, seed: int, learning_rate: float, uri: str | None
) -> None:
    default = Config()
    config = dataclasses.replace(
        default,
        name=name,
        seed=seed,
        optim=dataclasses.replace(default.optim, learning_rate=learning_rate, min_lr=0.0),
        train=dataclasses.replace(default.train, max_steps=100),
        snapshot=dataclasses.replace(default.snapshot, uri=uri),
    )
    file = tmp_path_factory.getbasetemp() / "back.yaml"
    file.write_bytes(to_yaml(config).encode())
    assert load_config([], file, lambda device: "cpu") == config


def test_flatten_has_every_setting_by_its_dotted_name() -> None:
    flat = flatten(Config())
    assert flat["seed"] == 1337
    assert flat["model.n_layer"] is None
    assert list(flat) == list(comments())


# Warnings


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["--optim.decay_fraction=0.3"], "optim.decay_fraction=0.3"),
        (["--optim.schedule=constant", "--optim.min_lr=1e-5"], "optim.min_lr=1e-05"),
        (["--data.vocab_size=300"], "data.vocab_size=300"),
        (["--data.val_fraction=0", "--train.eval_interval=7"], "train.eval_interval=7"),
        (["--data.val_fraction=0", "--train.eval_sequences=7"], "train.eval_sequences=7"),
        (["--snapshot.resume=must", "--snapshot.init_from=x"], "snapshot.init_from='x'"),
        (["--model.preset=gpt2", "--model.n_layer=1", "--model.n_head=1", "--model.n_embd=8"], "model.preset='gpt2'"),
    ],
)
def test_settings_without_effect_are_warned_about(load: Load, argv: list[str], name: str) -> None:
    (line,) = warnings(load(*argv))
    assert line.startswith(f"{name} has no effect: ")


def test_a_run_that_ends_in_its_warm_up_is_warned_about(load: Load) -> None:
    assert warnings(load("--train.max_steps=99")) == ["train.max_steps=99 ends inside the 100 of optim.warmup_steps"]
    assert warnings(load("--train.max_steps=100")) == []


@pytest.mark.parametrize(
    "argv", [[], ["--optim.schedule=wsd", "--optim.decay_fraction=0.3"], ["--snapshot.resume=must"]]
)
def test_settings_with_effect_are_not(load: Load, argv: list[str]) -> None:
    assert warnings(load(*argv)) == []


# The files beside the program


def comments() -> dict[str, str]:
    """Dotted name -> the comment beside the field, which every field must have."""
    found = {}
    for name in flatten(Config()):
        section, _, key = name.rpartition(".")
        cls = {"": Config, **module._SECTIONS}[section]
        comment = re.search(rf"^    {key}: .*?  # (.+)$", inspect.getsource(cls), re.MULTILINE)
        assert comment, f"{name} has no comment"
        found[name] = comment[1]
    return found


def test_the_reference_lists_every_setting_with_default_and_comment() -> None:
    text = (CONFIGS / "reference.yaml").read_text(encoding="utf-8")
    assert list(yaml.safe_load(text).items()) == list(dataclasses.asdict(Config()).items())
    found = [found[1] for found in re.finditer(r"^ *\w+: \S+  # (.+)$", text, re.MULTILINE)]
    expected = comments()
    for name in expected:
        section, _, key = name.rpartition(".")
        hint = get_type_hints({"": Config, **module._SECTIONS}[section])[key]
        if get_origin(hint) is Literal and len(get_args(hint)) > 1:
            expected[name] = f"{', '.join(get_args(hint))}; {expected[name]}"
    assert found == list(expected.values())


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.name)
def test_every_shipped_file_loads_without_a_warning(file: Path, kind: str) -> None:
    config = load_config([str(file)], file, lambda device: kind)
    assert warnings(config) == []
    assert file.stem in ("reference", config.name)


def test_shakespeare_is_smaller_on_a_cpu() -> None:
    file = CONFIGS / "shakespeare_char.yaml"
    cuda, cpu = load_config([], file, lambda device: "cuda"), load_config([], file, lambda device: "cpu")
    assert cuda.model == ModelSection(preset=None, n_layer=6, n_head=6, n_embd=384, block_size=256, dropout=0.2)
    assert cpu.model.block_size < cuda.model.block_size
