"""Prepares FineWeb-Edu's sample of 10 billion tokens for GPT-2: `python data/fineweb/prepare.py [--files=N]`.

The files are read where they are, no more of them at a time than is in work, and nothing but the tokens is kept.
Started again it goes on. All else is as `python -m mingpt.prepare` has it.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any directory
from mingpt import prepare

SOURCE = "https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu/resolve/main/sample/10BT"
FILES = 14  # of 2 GB each


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add(
        "--files",
        type=int,
        default=FILES,
        choices=range(1, FILES + 1),
        metavar="N",
        help="the first ones (%(default)s)",
    )
    add("--source", default=SOURCE, metavar="URI", help="the folder that has them (%(default)s)")
    add("--out", default=str(Path(__file__).resolve().parent / "prepared"), metavar="DIR", help="%(default)s")
    add("--workers", default=str(os.cpu_count()), metavar="N", help="processes (%(default)s)")
    arguments = parser.parse_args()
    sources = [f"{arguments.source}/{number:03d}_00000.parquet" for number in range(arguments.files)]
    settings = ["--tokenizer=gpt2", "--val-by=document", "--val-fraction=0.005"]
    return prepare.main([*sources, *settings, f"--out={arguments.out}", f"--workers={arguments.workers}"])


if __name__ == "__main__":
    sys.exit(main())
