"""How a world forms, without processes."""

import platform
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mingpt.distributed import World, _formation


def world(rank: int) -> World:
    return World(rank, rank, 2, 2, torch.device("cpu"))


def test_a_formation_is_not_misled_by_what_an_older_one_left() -> None:
    store, soon = dist.HashStore(), timedelta(seconds=30)  # type: ignore[attr-defined]
    store.set("mingpt/arrived/0", "dead0")
    store.set("mingpt/arrived/1", "dead1")
    store.set("mingpt/word/dead1", "dead0")
    store.set("mingpt/dead0/met/dead1", "")
    words: list[str] = []
    main = threading.Thread(target=lambda: words.append(_formation(world(0), store, soon)))
    main.start()
    while store.get("mingpt/word/dead1") == b"dead0":  # until rank 0 took the dead one for its peer
        time.sleep(0.01)
    words.append(_formation(world(1), store, soon))
    main.join(30)
    assert words[0] == words[1] != "mingpt/dead0"


def test_a_rank_that_never_comes_is_told_in_time() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("mingpt/arrived/1", "dead1")
    with pytest.raises(dist.DistStoreError, match="not all ranks arrived in time"):
        _formation(world(0), store, timedelta(seconds=0.05))


ENDS = """
import gc
from pathlib import Path
from mingpt.distributed import World, leave
from mingpt.reduction import FastReduction
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
reduction = FastReduction(torch.nn.Linear(2, 2), World(0, 0, 2, 2, torch.device("cpu")), cells=2)
reduction.module(torch.ones(1, 2)).sum().backward()
print(*(task.read_text() for task in Path("/proc/self/task").glob("*/comm")))
del reduction
gc.collect()
leave()
print("left")
print(*(task.read_text() for task in Path("/proc/self/task").glob("*/comm")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_thread_of_the_process_group_outlives_it() -> None:
    # In an interpreter of its own: what was imported before the group was made is what matters.
    done = subprocess.run(
        [sys.executable, "-c", ENDS], cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True
    )
    before, after = done.stdout.split("left")
    assert "gloo" in before and "gloo" not in after


FREES = """
from mingpt import distributed
import resource
import torch

distributed.keep_freed_memory()

def step():
    held = [torch.ones(2**18) for _ in range(100)]  # of 1 MB each

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of glibc")
def test_memory_that_a_step_frees_is_there_for_the_next_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FREES], cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 5000  # pages of 4 kB; all of them would be 25,600
