"""Who may import whom, and what only some files may do: read from the sources, so that a shortcut cannot hide."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Module -> the siblings it may import, anywhere in its file. A new module enters here first.
IMPORTS: dict[str, set[str]] = {
    "tokenizer": set(),
    "distributed": set(),
    "model": set(),
    "optim": set(),
    "faults": set(),
    "storage": {"faults"},
    "remote": {"faults", "storage"},
    "image": set(),
    "config": {"model"},
    "grid": set(),
    "tokens": {"grid", "tokenizer", "storage"},
    "corpus": {"faults", "tokens", "tokenizer", "storage"},
    "data": {"grid", "tokens"},
    "reduction": {"distributed"},
    "lease": {"storage"},
    "resume": set(),
    "slots": {"image"},
    "snapshot": {"faults", "storage", "remote", "image", "slots", "lease", "model", "tokenizer"},
    "election": {"distributed", "image", "lease", "slots", "snapshot", "storage"},
    "newcomer": {"lease", "resume", "snapshot", "storage"},
    "elastic": set(),
    "launch": {"elastic"},
    "chaos": {"elastic", "metrics", "snapshot", "storage"},
    "dashboard": set(),
    "metrics": {"dashboard"},
    "watch": {"metrics"},
    "keeper": {"distributed", "image", "metrics", "slots", "snapshot", "watch"},
    "history": {"faults", "metrics"},
    "report": {"faults", "history", "metrics", "storage"},
    "trainer": {
        "data", "grid", "tokens", "optim", "distributed", "reduction", "image", "snapshot", "elastic", "metrics",
        "watch", "keeper",
    },
    "bench": {"distributed", "metrics", "model", "trainer"},
    "sample": {"distributed", "faults", "snapshot", "model", "tokenizer"},
    "interop": {"faults", "snapshot", "image", "model", "tokenizer", "storage"},
    "__init__": {"model", "snapshot", "trainer"},  # on first use, for `from mingpt import GPT`
    "documents": {"corpus", "tokens", "tokenizer", "storage"},
    # mingpt/prepare.py, and those in data/, which use it
    "prepare": {"documents", "faults", "corpus", "grid", "tokens", "tokenizer", "storage", "prepare"},
}  # fmt: skip
IMPORTS["train_gpt"] = set(IMPORTS)  # train_gpt.py puts everything together

# They may print.
COMMANDS = {"train_gpt", "bench", "chaos", "launch", "sample", "snapshot", "prepare", "interop", "report"}
ENVIRONMENT = {"distributed", "launch", "chaos"}  # they may read and set environment variables
UNSAFE = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}

SOURCES = [*ROOT.glob("mingpt/**/*.py"), *ROOT.glob("data/*/prepare.py"), ROOT / "train_gpt.py"]


def violations(module: str, source: str) -> Iterator[str]:
    """`line: what is wrong` for every rule that the source of `module` breaks."""
    if module not in IMPORTS:
        yield f"0: {module} is not in the table of imports"
    for node in ast.walk(ast.parse(source)):
        for problem in _problems(module, node):
            yield f"{getattr(node, 'lineno', 0)}: {problem}"


def _problems(module: str, node: ast.AST) -> Iterator[str]:
    for path in _imported(node):
        package, _, name = path.partition(".")
        sibling = name.partition(".")[0]
        if package == "mingpt" and module != "train_gpt" and sibling not in IMPORTS.get(module, set()):
            yield f"imports {path}"
        if module == "config" and sibling == "model" and path != "mingpt.model.PRESETS":
            yield f"imports {path}, not PRESETS alone"
        if package == "importlib" and "metadata" not in path and module != "__init__":
            yield "imports importlib, which imports anything"
        if package in UNSAFE or path in ("torch.load", "torch.save", "torch.serialization"):
            yield f"imports {path}, which can execute what it reads"
        if path.startswith(("os.environ", "os.getenv", "os.putenv")) and module not in ENVIRONMENT:
            yield f"imports {path}"
    match node:
        case ast.Attribute(attr="environ" | "environb" | "getenv" | "putenv" | "unsetenv") if module not in ENVIRONMENT:
            yield f"uses {node.attr}"
        case ast.Attribute(value=ast.Name("torch"), attr="load" | "save" | "serialization"):
            yield f"uses torch.{node.attr}, a pickle"
        case ast.keyword(arg="allow_pickle", value=value) if not (isinstance(value, ast.Constant) and not value.value):
            yield "allows pickle"
        case ast.Name("print") if module not in COMMANDS:
            yield "prints"
        case ast.Name("__import__"):
            yield "uses __import__"
        case ast.ExceptHandler(type=None):
            yield "has a bare except"


def _imported(node: ast.AST) -> Iterator[str]:
    """Dotted paths that an import statement reaches; `from mingpt.grid import Grid` is `mingpt.grid.Grid`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        home = ".".join(filter(None, ["mingpt" if node.level else None, node.module]))
        yield from (f"{home}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_house_rules_hold(path: Path) -> None:
    assert list(violations(path.stem, path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("stranger", "", "0: stranger is not in the table of imports"),
        ("model", "import mingpt.trainer", "1: imports mingpt.trainer"),
        ("model", "import mingpt", "1: imports mingpt"),
        ("model", "from mingpt import trainer", "1: imports mingpt.trainer"),
        ("model", "from mingpt.trainer import Trainer", "1: imports mingpt.trainer.Trainer"),
        ("model", "from .trainer import Trainer", "1: imports mingpt.trainer.Trainer"),
        ("model", "from . import trainer", "1: imports mingpt.trainer"),
        ("model", "def late():\n    from mingpt import trainer", "2: imports mingpt.trainer"),
        ("model", "if TYPE_CHECKING:\n    from mingpt import trainer", "2: imports mingpt.trainer"),
        ("model", "import importlib", "1: imports importlib, which imports anything"),
        ("model", "__import__('mingpt.trainer')", "1: uses __import__"),
        ("prepare", "from mingpt import trainer", "1: imports mingpt.trainer"),
        ("config", "from mingpt.model import GPT", "1: imports mingpt.model.GPT, not PRESETS alone"),
        ("model", "import os\nos.environ['RANK']", "2: uses environ"),
        ("model", "import os as o\no.getenv('RANK')", "2: uses getenv"),
        ("model", "from os import environ", "1: imports os.environ"),
        ("trainer", "print('hello')", "1: prints"),
        ("trainer", "try:\n    pass\nexcept:\n    pass", "3: has a bare except"),
        ("snapshot", "import pickle", "1: imports pickle, which can execute what it reads"),
        ("snapshot", "import torch\ntorch.load('x')", "2: uses torch.load, a pickle"),
        ("snapshot", "from torch import save", "1: imports torch.save, which can execute what it reads"),
        ("snapshot", "np.load('x', allow_pickle=True)", "1: allows pickle"),
    ],
)
def test_a_broken_rule_is_seen(module: str, source: str, expected: str) -> None:
    assert list(violations(module, source)) == [expected]


def test_what_is_allowed_passes() -> None:
    imports = "import torch\nfrom mingpt.data import Grid\nfrom mingpt import distributed\n"
    source = f"{imports}torch.sin(x)\nnp.load('x', allow_pickle=False)"
    assert list(violations("trainer", source)) == []
    assert list(violations("train_gpt", "import mingpt\nfrom mingpt import launch\nprint(mingpt.__version__)")) == []
    assert list(violations("distributed", "import os\nos.environ['RANK']")) == []


def test_the_table_has_no_circle() -> None:
    order: list[str] = []
    while len(order) < len(IMPORTS):
        ready = [module for module in IMPORTS if module not in order and IMPORTS[module] - {module} <= {*order}]
        assert ready, f"these import each other: {IMPORTS.keys() - {*order}}"
        order += ready


def test_importing_the_package_imports_nothing_else() -> None:
    command = "import mingpt, sys; print(sorted({'torch', 'numpy', 'yaml'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_the_package_names_is_there_on_first_use() -> None:
    command = "from mingpt import Trainer, __all__; from mingpt import *; print({*__all__} <= {*dir()}, Trainer)"
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True <class 'mingpt.trainer.Trainer'>"
