"""Beginning together: a world that forms agrees on the run, and on the newest image of it, wherever that lies."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mingpt import distributed, slots
from mingpt.distributed import World
from mingpt.image import Image
from mingpt.lease import Run, open_run
from mingpt.snapshot import Manifest, Snapshots, has_manifests, look_around, read_if_valid
from mingpt.storage import LocalStore, Store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holding:
    """An image that `rank` could give to all: the snapshot at `uri`, or the one in memory where that is empty."""

    generation: int
    step: int
    rank: int
    host: str
    uri: str = ""

    @property
    def order(self) -> tuple[int, int, bool, int, str]:
        """The newest is the greatest; of equals one in memory, which costs no reading, then the lowest rank's."""
        return self.generation, self.step, not self.uri, -self.rank, self.uri

    def __str__(self) -> str:
        place = f" of rank {self.rank} ({self.host})"
        return (self.uri or "the image in memory") + ("" if self.uri and not self.rank else place)


@dataclass(frozen=True)
class Found:
    """The image that all go on from: `metadata` on every rank, the rest of it on its holder alone."""

    holding: Holding
    metadata: dict[str, Any]
    image: Image | None
    manifest: Manifest | None

    @property
    def is_kept(self) -> bool:
        """Whether it is durable in the store that this world writes into, rank 0's."""
        return self.holding.rank == 0 and bool(self.holding.uri)


def newest_first(holdings: Iterable[Holding]) -> list[Holding]:
    """In the order in which they are tried: the first one that is valid wins."""
    return sorted(holdings, key=lambda holding: holding.order, reverse=True)


def left_behind(winner: Holding, holdings: Iterable[Holding]) -> list[Holding]:
    """The furthest one of each rank that got further than the winner, but in an older formation of the world."""
    further = [it for it in holdings if it.step > winner.step and it.generation < winner.generation]
    furthest = {it.rank: it for it in sorted(further, key=lambda it: it.step)}
    return [furthest[rank] for rank in sorted(furthest)]


def agree_on_run(world: World, out_dir: Path, store: Store, ram_dir: Path | None) -> Run:
    """The run that all nodes know of, each by its `out_dir` and what else it has, or a new one; its next generation.

    Raises ValueError or OSError, on every rank, where nodes know of different runs or one cannot look.
    """

    def look() -> dict[str, Any] | None:
        return look_around(out_dir, store if _sees(world, store) else None) if world.heads_node else None

    nodes = {
        f"rank {rank} ({host})" if world.world_size > 1 else "": node
        for rank, (host, node) in enumerate(zip(distributed.hosts(world), distributed.gather(world, look), strict=True))
        if node
    }
    run = Run(**distributed.decide(world, lambda: asdict(open_run(nodes))))
    known = slots.known_generation(ram_dir, run.run_id) if world.heads_node else 0
    return replace(run, generation=max(run.generation, 1 + max(distributed.gather_json(world, known))))


def find_newest(world: World, snapshots: Snapshots, ram_dir: Path | None) -> Found | None:
    """The newest valid image that any node has; None where there is none at all.

    One rank reads it; where that one finds it damaged, the next newest is tried. Raises, on every rank, ValueError
    where there are snapshots but nothing is valid, OSError where one cannot be read: an older one in its place would
    lose work that may be sound.
    """
    sources: dict[str, Callable[[], Image | None]] = {}  # of this rank's, by URI
    manifests: dict[str, Manifest] = {}

    def look() -> dict[str, Any]:
        held: list[tuple[int, int, str]] = []
        if world.heads_node and (newest := slots.newest_image(ram_dir, snapshots.run_id)):
            order, image = newest
            held.append((*order, ""))
            sources[""] = lambda: image
        if sees := _sees(world, snapshots.store):
            for manifest in snapshots.look():
                held.append((*manifest.order, manifest.image_uri))
                manifests[manifest.image_uri] = manifest
                sources[manifest.image_uri] = partial(read_if_valid, manifest)
        return {"held": held, "snapshots": sees and has_manifests(snapshots.store)}

    hosts, reports = distributed.hosts(world), distributed.gather(world, look)
    holdings = [
        Holding(generation, step, rank, hosts[rank], uri)
        for rank, report in enumerate(reports)
        for generation, step, uri in report["held"]
    ]
    for holding in newest_first(holdings):
        opened: list[Image] = []
        read = partial(_open, sources.get(holding.uri), opened)
        if metadata := distributed.decide(world, read, holding.rank):
            for other in left_behind(holding, holdings) if world.is_main else ():
                log.warning(
                    "NOT USED: %s, of step %d but of generation %d: generation %d went on without it, to step %d",
                    other, other.step, other.generation, holding.generation, holding.step,
                )  # fmt: skip
            if not opened:  # another rank's, though a file of the same name may be here
                return Found(holding, metadata, None, None)
            return Found(holding, metadata, opened[0], manifests.get(holding.uri))
    there = [f"rank {rank} ({hosts[rank]})" for rank, report in enumerate(reports) if report["snapshots"]]
    if there:
        raise ValueError(
            f"there are snapshots in {snapshots.store.uri} of {', '.join(there)}, but none is a valid one of this run, "
            "and no node has it in memory: repair or restore one, or start another run by --name=NEW"
        )
    return None


def _sees(world: World, store: Store) -> bool:
    """Whether this rank looks into `store`: a folder may be each node's own, any other store is one for all."""
    return world.is_main or world.heads_node and isinstance(store, LocalStore)


def _open(source: Callable[[], Image | None] | None, opened: list[Image]) -> dict[str, Any] | None:
    assert source is not None, "only its holder reads an image"
    if image := source():
        opened.append(image)
        return image.metadata
    return None
