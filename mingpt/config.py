"""The run's description: sections of typed settings, a YAML file over the defaults, the command line over both.

Everything that is wrong is told at once, one line each, before anything starts: a typo should cost one try, not five.
jsonargparse decides whether a value has its setting's type. The comments beside the fields are the `--help` as well.
"""

import difflib
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from mingpt.model import PRESETS

log = logging.getLogger(__name__)

Value = bool | int | float | str | None

Count = Annotated[int, "from 0 to 2**31 - 1"]
Size = Annotated[int, "from 1 to 2**31 - 1"]
Amount = Annotated[float, "from 0 to 1e9"]
Positive = Annotated[float, "above 0, at most 1e9"]
Fraction = Annotated[float, "at least 0 and below 1"]
Text = Annotated[str, "not empty"]
Folder = Annotated[str, "a local folder's path"]
_LIMITS: dict[str, Callable[[Any], bool]] = {  # NaN and infinity pass none of them; a product of two fits in 64 bits
    "from 0 to 2**31 - 1": lambda value: 0 <= value < 2**31,
    "from 1 to 2**31 - 1": lambda value: 1 <= value < 2**31,
    "from 257 to 2**31 - 1": lambda value: 257 <= value < 2**31,
    "from 0 to 1e9": lambda value: 0 <= value <= 1e9,
    "above 0, at most 1e9": lambda value: 0 < value <= 1e9,
    "at least 0 and below 1": lambda value: 0 <= value < 1,
    "from 0 to 1": lambda value: 0 <= value <= 1,
    "from 0 to 2**63 - 1": lambda value: 0 <= value < 2**63,
    "not empty": lambda value: value != "",
    "a local folder's path": lambda value: value != "" and "://" not in value,
    "auto, cpu, cuda, cuda:N or mps": lambda value: bool(re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", value)),
    "a folder's name, a path goes to out_dir": lambda value: bool(re.fullmatch(r"(?!\.\.?$)[^/\\\x00-\x1f]+", value)),
}


@dataclass(frozen=True)
class ModelSection:
    """Shape of the network."""

    preset: Text | None = "gpt-mini"  # shape by name: gpt-nano, -micro, -mini, gpt2, gpt2-medium, -large, -xl; or null
    n_layer: Size | None = None  # transformer blocks; null = the preset's
    n_head: Size | None = None  # attention heads in a block, a divisor of n_embd; null = the preset's
    n_embd: Size | None = None  # channels of the residual stream; null = the preset's
    block_size: Size = 128  # longest context, and length of a training sequence, in tokens
    dropout: Fraction = 0.0  # share of activations dropped in training
    bias: bool = True  # biases in linear layers and layer norms, as GPT-2 has them
    activation_checkpointing: bool = False  # recompute blocks in the backward: less memory, about a third more work

    @property
    def shape(self) -> dict[str, int]:
        """n_layer, n_head and n_embd as built: the preset's where no value replaces them."""
        own = {"n_layer": self.n_layer, "n_head": self.n_head, "n_embd": self.n_embd}
        return PRESETS.get(self.preset or "", {}) | {name: value for name, value in own.items() if value is not None}


@dataclass(frozen=True)
class DataSection:
    """The text."""

    path: Text = "data/shakespeare"  # text or prepared folder, or its URI; token file; folder with a prepare.py
    tokenizer: Literal["char", "gpt2", "bpe"] = "char"  # of a text: by character, GPT-2's, or learned from the text
    vocab_size: Annotated[int, "from 257 to 2**31 - 1"] = 4096  # tokens that bpe learns, <|endoftext|> too; bpe only
    val_fraction: Fraction = 0.1  # last share of the tokens, for validation; 0 = none; a prepared folder brings its own
    cache_gb: Positive = 100.0  # most disk space for folders downloaded from URIs, older ones make room, in GB


@dataclass(frozen=True)
class OptimSection:
    """AdamW and its learning rate."""

    learning_rate: Positive = 1e-3  # the peak, reached when the warm-up ends
    min_lr: Amount = 1e-4  # learning rate at the last step; the constant schedule never gets there
    warmup_steps: Count = 100  # optimizer steps of linear rise to learning_rate; 0 = none
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"  # after warm-up; wsd = constant, then falling
    decay_fraction: Annotated[float, "from 0 to 1"] = 0.2  # last share of the steps, in which wsd falls; wsd only
    weight_decay: Amount = 0.1  # AdamW's, on matrices and embeddings only
    beta1: Fraction = 0.9  # decay per step of the gradient's running mean
    beta2: Fraction = 0.99  # decay per step of the squared gradient's running mean
    grad_clip: Amount = 1.0  # largest norm of the whole gradient, longer ones are scaled down; 0 = off


@dataclass(frozen=True)
class TrainSection:
    """Length and batches of the run."""

    max_steps: Size | None = None  # optimizer steps in all; null = max_epochs decides, or 2000 where both are null
    max_epochs: Positive | None = None  # length in passes over the training text; null = max_steps decides
    global_batch_size: Size = 32  # sequences per optimizer step over all workers, however many there are
    micro_batch_size: Size = 8  # sequences per forward, a divisor of global_batch_size; smaller = less memory
    reduction: Literal["fast", "exact"] = "fast"  # exact = the same bits with any number of workers, a little slower
    on_nonfinite: Literal["stop", "skip"] = "stop"  # gradient nan or inf: stop = end; skip = pass over, 20 in a row end
    eval_interval: Count = 250  # optimizer steps between validations; 0 = only at the end
    eval_sequences: Count = 0  # sequences read in a validation, the first ones; 0 = the whole split
    sample_interval: Count = 0  # optimizer steps between printed samples; 0 = only at the end
    num_threads: Count = 0  # CPU threads per worker; 0 = cores / local workers, in exact mode 1 (they change bits)


@dataclass(frozen=True)
class SnapshotSection:
    """What is kept, where, and how a run goes on."""

    uri: Text | None = None  # folder of the snapshots: a path, or a URI as s3://bucket/run; null = <out_dir>/snapshots
    save_interval: Count = 250  # optimizer steps between snapshots; 0 = only at the end
    save_interval_seconds: Amount = 0.0  # seconds between snapshots, beside save_interval; 0 = off
    keep_last: Size = 2  # newest snapshots kept, older ones are deleted
    keep_interval: Count = 0  # snapshots at multiples of so many optimizer steps are never deleted; 0 = none
    resume: Literal["auto", "must"] = "auto"  # auto = go on if there is a snapshot; must = and accept changed settings
    on_error: Literal["warn", "stop"] = "warn"  # where a save fails: warn = train on, try again; stop = end the run
    init_from: Text | None = None  # snapshot or run folder with the first weights of a new run; null = random weights


@dataclass(frozen=True)
class ElasticSection:
    """Workers that come and go."""

    ram_image: Literal["auto", "off"] = "auto"  # auto = the state in memory as often as it costs little; off = never
    ram_dir: Text | None = None  # folder of the images in memory; null = /dev/shm, where there is one
    timeout_seconds: Positive = 60.0  # longest time without a sign of life of another worker, in seconds
    grace_seconds: Positive = 20.0  # longest time for the step in flight after a signal to stop, in seconds


@dataclass(frozen=True)
class LogSection:
    """What the run says."""

    interval: Size = 10  # optimizer steps between log lines
    wandb: Literal["disabled", "auto", "online", "offline"] = "disabled"  # auto = online where there is a key
    wandb_project: Text = "mingpt"  # the project on wandb that the run belongs to; your own entity
    stall_seconds: Amount = 300.0  # a step that takes longer: every worker's stacks go into its log file; 0 = never
    all_ranks: bool = False  # every worker's log in a file of its own, <out_dir>/logs/rank-<rank>.log


@dataclass(frozen=True)
class Config:
    """The run as a whole."""

    name: Annotated[str, "a folder's name, a path goes to out_dir"] = "gpt"  # name of the run and of its folder
    seed: Annotated[int, "from 0 to 2**63 - 1"] = 1337  # source of all random numbers: weights, data order, dropout
    device: Annotated[str, "auto, cpu, cuda, cuda:N or mps"] = "auto"  # auto = cuda, else mps, else cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matrix products; auto = the device's best
    compile: bool = False  # compile the model: up to minutes at the start, then faster steps, on GPUs above all
    out_dir: Folder | None = None  # folder of run.json, config.yaml, metrics.jsonl, snapshots, logs; null = runs/<name>
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    optim: OptimSection = field(default_factory=OptimSection)
    train: TrainSection = field(default_factory=TrainSection)
    snapshot: SnapshotSection = field(default_factory=SnapshotSection)
    elastic: ElasticSection = field(default_factory=ElasticSection)
    log: LogSection = field(default_factory=LogSection)

    @property
    def run_dir(self) -> Path:
        """out_dir, `~` expanded, or runs/<name> where it is null."""
        return Path(self.out_dir or f"runs/{self.name}").expanduser()

    @property
    def snapshot_uri(self) -> str:
        """snapshot.uri, or <run_dir>/snapshots where it is null."""
        return self.snapshot.uri or str(self.run_dir / "snapshots")


class ConfigError(ValueError):
    """All that is wrong with a description; `problems` holds one line each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = [" ".join(problem.split()) for problem in problems]
        super().__init__("\n".join(self.problems))


_SECTIONS: dict[str, Any] = {name: hint for name, hint in get_type_hints(Config).items() if is_dataclass(hint)}
_HINTS: dict[str, Any] = {  # dotted name -> type, with its limits
    f"{section}{name}": hint
    for section, cls in [("", Config), *((f"{name}.", cls) for name, cls in _SECTIONS.items())]
    for name, hint in get_type_hints(cls, include_extras=True).items()
    if hint not in _SECTIONS.values()
}
_REPLACED = {  # what an earlier layer says of the same thing in other words, which would else outlive its replacement
    "model.preset": ("model.n_layer", "model.n_head", "model.n_embd"),
    "train.max_steps": ("train.max_epochs",),
    "train.max_epochs": ("train.max_steps",),
}
_LAYERS = ("", "on_cuda.", "on_cpu.", "on_mps.", "--")  # the YAML file, its blocks for a device type, the command line


def load_config(argv: Sequence[str], default_file: Path, device_type: Callable[[str], str]) -> Config:
    """Defaults < YAML file < the file's block for this device type < command line.

    argv: `[CONFIG.yaml] [--section.field=value ...]`; without a file `default_file` is read.
    device_type: which of cuda, cpu, mps a `device` ("auto", "cuda:1") is on this machine.
    Raises ConfigError with every problem found; SystemExit(0) after `--help` or `--print_config`, whose text is logged:
    of several ranks only the one that speaks at INFO shows it.
    """
    if {"-h", "--help"} & set(argv):
        log.info(_help().format_help().rstrip())
        raise SystemExit(0)
    problems: list[str] = []
    path, overrides = _split(argv, problems)
    file = default_file if path is None else Path(path)
    tree = _read_yaml(file, default_file.parent, problems)

    layers: dict[str, dict[str, Value]] = {layer: {} for layer in _LAYERS}
    doubtful: set[str] = set()  # settings without a usable value: how they go with others cannot be said
    for layer, name, raw in [*_leaves(tree or {}), *(("--", name, text) for name, text in overrides)]:
        try:
            if name in layers[layer]:
                raise ValueError(f"already set to {_show(layers[layer][name])}")
            if name == "device" and layer.startswith("on_"):
                raise ValueError("the device chooses the block, so it is set outside of it")
            layers[layer][name] = _convert(name, raw, from_text=layer == "--")
        except ValueError as error:
            problems.append(f"{'' if layer == '--' else f'{file}: '}{layer}{name}={_show(raw)}: {error}")
            doubtful.add(name)

    values = flatten(Config()) | layers[""]
    kind = device_type(str((values | layers["--"])["device"]))
    for later in (layers.get(f"on_{kind}.", {}), layers["--"]):
        for name in later.keys() & _REPLACED.keys():
            values |= dict.fromkeys(_REPLACED[name])
        values |= later
    if tree is None:
        doubtful |= values.keys() - layers["--"].keys()
    if values["train.max_steps"] is None and values["train.max_epochs"] is None:
        values["train.max_steps"] = 2000

    sections: dict[str, Any] = {section: {} for section in ("", *_SECTIONS)}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        sections[section][key] = value
    config = Config(**sections[""], **{name: cls(**sections[name]) for name, cls in _SECTIONS.items()})
    for names, wrong, advice in _contradictions(config, kind):
        if wrong and not doubtful & set(names.split()):
            shown = ", ".join(f"{name}={_show(values[name])}" for name in names.split())
            problems.append(f"{shown}: {advice}")
    if problems:
        raise ConfigError(problems)
    if "--print_config" in argv:
        log.info(to_yaml(config).rstrip())
        raise SystemExit(0)
    return config


def flatten(config: Config) -> dict[str, Value]:
    """Every setting by its dotted name, in the order of the sections."""
    return {name: value for _, name, value in _leaves(asdict(config))}


def to_yaml(config: Config) -> str:
    """The whole description as YAML, from which `load_config` makes an equal Config."""
    return yaml.dump(asdict(config), Dumper=_Dumper, sort_keys=False)


def warnings(config: Config) -> list[str]:
    """One line for each setting that was given and has no effect beside the others, or not the one it is there for."""
    optim, model, no_validation = config.optim, config.model, config.data.val_fraction == 0
    shape_given = None not in (model.n_layer, model.n_head, model.n_embd)
    idle = [
        ("model.preset", shape_given and bool(model.preset), "n_layer, n_head and n_embd are all given"),
        ("data.vocab_size", config.data.tokenizer != "bpe", f"data.tokenizer={config.data.tokenizer} has its own"),
        ("optim.decay_fraction", optim.schedule != "wsd", f"optim.schedule={optim.schedule} has no last decay"),
        ("optim.min_lr", optim.schedule == "constant", "optim.schedule=constant stays at the peak"),
        ("train.eval_interval", no_validation, "data.val_fraction=0 leaves nothing to validate on"),
        ("train.eval_sequences", no_validation, "data.val_fraction=0 leaves nothing to validate on"),
        ("snapshot.init_from", config.snapshot.resume == "must", "snapshot.resume=must has weights to go on with"),
    ]
    given, default = flatten(config), flatten(Config())
    lines = [f"{n}={_show(given[n])} has no effect: {why}" for n, off, why in idle if off and given[n] != default[n]]
    if config.train.max_steps is not None and config.train.max_steps < optim.warmup_steps:
        lines.append(
            f"train.max_steps={config.train.max_steps} ends inside the {optim.warmup_steps} of optim.warmup_steps"
        )
    return lines


def _contradictions(config: Config, kind: str) -> list[tuple[str, bool, str]]:
    """(settings that may contradict each other, whether they do on a device of this kind, the way out)."""
    model, optim, train, exact = config.model, config.optim, config.train, config.train.reduction == "exact"
    micro, whole, steps = train.micro_batch_size, train.global_batch_size, train.max_steps
    heads = model.shape.get("n_head", 1)
    width = model.shape.get("n_embd", heads)
    unknown = model.preset is not None and model.preset not in PRESETS
    lacking = [] if unknown else [f"model.{key}" for key in ("n_layer", "n_head", "n_embd") if key not in model.shape]
    too_high = optim.schedule != "constant" and optim.min_lr > optim.learning_rate
    return [
        ("model.preset", unknown, f"expected null or one of {', '.join(PRESETS)}"),
        (f"model.preset {' '.join(lacking)}", bool(lacking), "without a preset all three of the shape are needed"),
        ("model.preset model.n_head model.n_embd", width % heads > 0, _not_a_divisor(heads, width)),
        ("train.micro_batch_size train.global_batch_size", whole % micro > 0, _not_a_divisor(micro, whole)),
        ("train.max_steps train.max_epochs", None not in (steps, train.max_epochs), "set one of the two to null"),
        ("optim.min_lr optim.learning_rate", too_high, "the floor is above the peak; usual is a tenth of it"),
        (
            "train.reduction dtype",
            exact and config.dtype == "float16",
            "exact reduction does not support float16; take bfloat16",
        ),
        ("train.reduction device", exact and kind == "mps", "exact reduction does not support mps; take device=cpu"),
    ]


def _not_a_divisor(number: int, whole: int) -> str:
    candidates = range(1, min(whole, 10_000) + 1)  # a mistyped 10**9 must not take minutes
    nearest = min((it for it in candidates if whole % it == 0), key=lambda it: abs(it - number))
    return f"{number} does not divide {whole}, but {nearest} does"


def _split(argv: Sequence[str], problems: list[str]) -> tuple[str | None, list[tuple[str, str]]]:
    """argv -> (the YAML file where one is given, [(dotted name, text of the value)])."""
    file: str | None = None
    overrides: list[tuple[str, str]] = []
    rest = [token for token in argv if token != "--print_config"]
    while rest:
        token = rest.pop(0)
        name, given, text = token.removeprefix("--").partition("=")
        if not token.startswith("--"):
            if file is None and name not in _HINTS and not token.startswith("-"):
                file = token
            else:
                problems.append(f"{token}: not understood; write [CONFIG.yaml] [--section.field=value ...]")
            continue
        if not given and rest and not rest[0].startswith("--"):
            given, text = " ", rest.pop(0)
        if name == "config":
            problems.append(f"--config: the YAML file stands alone, first: {text or 'CONFIG.yaml'}")
        elif name in _HINTS and not given:
            problems.append(f"--{name}: a value is missing: --{name}=VALUE")
        elif name not in ("local-rank", "local_rank"):  # old launchers add it; the environment says the same
            overrides.append((name, text))
    return file, overrides


def _read_yaml(file: Path, default_folder: Path, problems: list[str]) -> dict[Any, Any] | None:
    """The file's settings; None, and a problem, where there are none to be had."""
    try:
        tree = yaml.load(file.read_text(encoding="utf-8"), _Loader)
        if isinstance(tree, dict):
            return tree
        problem = ": expected lines of `name: value`" + (", {} for the defaults alone" if tree is None else "")
    except FileNotFoundError:
        known = {other.stem: other for folder in (default_folder, file.parent) for other in folder.glob("*.yaml")}
        near = difflib.get_close_matches(file.stem, known, n=1, cutoff=0.4)
        problem = ": no such file" + "".join(f"; nearest: {known[stem]}" for stem in near)
    except OSError as error:
        problem = f": cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        problem = f": byte {error.start} is not UTF-8"
    except yaml.MarkedYAMLError as error:
        problem = f", line {error.problem_mark.line + 1 if error.problem_mark else '?'}: {error.problem}"
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = f": not YAML: {error}"
    problems.append(f"{file}{problem}")
    return None


class _Loader(yaml.SafeLoader):
    """Takes 1e-3 for a number, and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        for i, (key, _) in enumerate(node.value):
            if any(key.value == other.value for other, _ in node.value[:i]):
                raise yaml.MarkedYAMLError(problem=f"{key.value} is set twice", problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that `_Loader` would take for numbers."""


for _class in (_Loader, _Dumper):  # PyYAML alone wants a dot and a sign in such a number
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z"), list("-+.0123456789")
    )


def _leaves(tree: dict[Any, Any], layer: str = "") -> Iterator[tuple[str, str, Any]]:
    """(layer, dotted name, value) of all settings; what is nested wrongly comes out as a setting of that name."""
    for key, value in tree.items():
        if f"{key}." in _LAYERS and not layer and isinstance(value, dict):
            yield from _leaves(value, f"{key}.")
        elif key in _SECTIONS and isinstance(value, dict):
            yield from ((layer, f"{key}.{name}", inner) for name, inner in value.items())
        elif value is not None or (key not in _SECTIONS and f"{key}." not in _LAYERS):  # null: all lines commented out
            yield layer, str(key), value


def _convert(name: str, raw: Any, from_text: bool) -> Value:
    """`raw` in its setting's type. Raises ValueError that says what is expected."""
    if name not in _HINTS:
        raise ValueError(_unknown(name))
    parts = _parts(_HINTS[name])
    try:
        if isinstance(raw, str) and str in parts and not (from_text and raw == "null"):
            value: Value = raw  # as it is: jsonargparse would take "~" and "#" for YAML's null
        else:
            parser = ArgumentParser(exit_on_error=False)  # of one setting: one of all checks all, ten times slower
            parser.add_argument(f"--{name}", type=_HINTS[name])
            value = (parser.parse_args([f"--{name}={raw}"]) if from_text else parser.parse_object({name: raw}))[name]
        # jsonargparse lets null pass for any type, and a file's text for a number.
        kept = from_text or isinstance(value, str) == isinstance(raw, str)
        limits = [_LIMITS[part] for part in parts if part in _LIMITS]
        if kept and (NoneType in parts if value is None else all(limit(value) for limit in limits)):
            return value
    except (ArgumentError, TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"expected {_expected(_HINTS[name])}")


def _parts(hint: Any) -> list[Any]:
    """The types in a type, and their limits."""
    return [part for inner in get_args(hint) for part in _parts(inner)] or [hint]


def _expected(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    if get_origin(hint) is Annotated:
        return f"{words[hint.__origin__]} ({hint.__metadata__[0]})"
    return words[hint] if hint in words else " or ".join(_expected(kind) for kind in get_args(hint))


def _unknown(name: str) -> str:
    if name in _SECTIONS or f"{name}." in _LAYERS:
        return "it holds settings and has no value of its own"
    ending = name.rpartition(".")[2]
    by_ending = {known.rpartition(".")[2]: known for known in _HINTS}
    by_initials = {"".join(word[0] for word in key.split("_")): known for key, known in by_ending.items()}
    near = [by_initials[ending]] if ending in by_initials else []  # lr, wd
    near += difflib.get_close_matches(name, [*_HINTS, *_SECTIONS], n=1)
    near += [by_ending[key] for key in difflib.get_close_matches(ending, by_ending, n=1)]
    return f"no such setting; {f'nearest: {near[0]}' if near else '--help lists all'}"


def _show(value: Any) -> str:
    """A value on one line: null, true and false as YAML has them, texts in quotes, long ones cut."""
    text = {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))
    return text if len(text) <= 200 else f"{text[:200]}..."


def _help() -> ArgumentParser:
    parser = ArgumentParser(
        usage="train_gpt.py [CONFIG.yaml] [--section.field=value ...]",
        description="Defaults < CONFIG.yaml < its on_cuda, on_cpu or on_mps block (by device) < command line.",
    )
    parser.add_argument("--print_config", action="store_true", help="print all settings as YAML and leave")
    defaults = flatten(Config())
    for section, cls in {"": Config, **_SECTIONS}.items():
        group = parser.add_argument_group(f"{section} - {cls.__doc__}".lstrip("- ").rstrip("."))
        comments = dict(re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(cls), re.MULTILINE))
        for key in comments:
            name = f"{section}.{key}".lstrip(".")
            group.add_argument(f"--{name}", type=get_type_hints(cls)[key], default=defaults[name], help=comments[key])
    return parser
