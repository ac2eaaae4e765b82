"""Makes input.txt, the well-known tiny-shakespeare: `python data/tinyshakespeare/prepare.py [SOURCE] [--out FILE]`.

It is downloaded, or read from SOURCE, a file or URI that has it, and its sha256 is checked: losses on it compare with
those that others report.
"""

import argparse
import hashlib
import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any directory
from mingpt import storage

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def fetch(source: str) -> bytes:
    """The file at `source`. Raises OSError if it cannot be had, ValueError if it is not that very file."""
    if source.startswith(("http://", "https://")):
        with urllib.request.urlopen(source, timeout=60) as answer:
            content: bytes = answer.read()
    else:
        content = storage.read_bytes(source)
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise ValueError(f"{source} is not tiny-shakespeare: sha256 {found}, expected {SHA256}; give another source")
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", nargs="?", default=URL, help="a file or URI that has it (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "input.txt", help="%(default)s")
    arguments = parser.parse_args()
    try:
        content = fetch(arguments.source)
        storage.replace_file(arguments.out, [content])
    except (OSError, ValueError) as error:
        sys.exit(f"prepare.py: {arguments.source}: {error}; a copy can be given: `python {sys.argv[0]} FILE_OR_URI`")
    print(f"wrote {arguments.out}: {len(content):,} characters, sha256 {SHA256}")


if __name__ == "__main__":
    main()
