"""Whether a start is of use to a run that is being trained: looked at before the ranks meet, lest it disturb them."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mingpt.lease import BEAT_SECONDS, read_holder, read_record
from mingpt.resume import changes_on_resume
from mingpt.snapshot import read_manifests
from mingpt.storage import LocalStore, Store


def check(
    name: str, out_dir: Path, store: Store, description: Mapping[str, Any], resume: str, shared: Mapping[str, Any]
) -> None:
    """Raises ValueError or OSError for a start that cannot go on with the run `name`, or not while it is alive.

    `description`: its settings; `shared`: those that all ranks have in common, and the versions. A run that stands may
    be gone on with by other versions and operational settings, one that is alive may not.
    """
    store.probe()
    if saved := read_manifests(store):
        changes_on_resume(saved[0].facts["config"], description, resume)
    different = _differences(out_dir, store, shared)
    if different and _is_alive(store):
        raise ValueError(f"the run {name} is being trained, and this start is not like it: {'; '.join(different)}")


def is_as_recorded(out_dir: Path, store: Store, shared: Mapping[str, Any]) -> bool:
    """Whether the run.json of this node or of the snapshots tells of a start like this one."""
    return _differences(out_dir, store, shared) == []


def _differences(out_dir: Path, store: Store, shared: Mapping[str, Any]) -> list[str] | None:
    """In what this start is not as the run was when it was started last; None where there is no run yet."""
    for place in (LocalStore(out_dir), store):
        try:
            record = read_record(place)
        except ValueError:  # a damaged one is told of where it is needed
            continue
        if record and "config" in record:
            theirs = {**record["config"], **record.get("versions", {})}
            return [
                f"{key} is {theirs.get(key)} there and {value} here"
                for key, value in shared.items()
                if theirs.get(key) != value
            ]
    return None


def _is_alive(store: Store) -> bool:
    """Whether the run's lease is being renewed."""
    first = read_holder(store)
    for _ in range(round(2 * BEAT_SECONDS / 0.25)):
        now = read_holder(store)
        if now is None or now.is_gone():
            return False
        if now != first:
            return True
        time.sleep(0.25)
    return False
