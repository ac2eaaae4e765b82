"""Images made durable: the manifest that makes one valid, retention, and the newest valid one.

A snapshot is `step-<9 digits>-g<generation>-<8 hex>.safetensors`, an image, and `.json` beside it, its manifest, which
is written last: no manifest, no snapshot. `python -m mingpt.snapshot ls|verify|prune URI` looks after them.
"""

import argparse
import hashlib
import json
import logging
import math
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from mingpt.faults import redact
from mingpt.image import Image, decode, read_metadata, sha256s
from mingpt.lease import (
    Lease,
    Run,
    TakenOverError,
    last_generation,
    look_for_runs,
    read_record,
    record_run,
)
from mingpt.model import GPT, GPTConfig
from mingpt.remote import open_store
from mingpt.slots import Slots
from mingpt.storage import PIECE, Store, is_remote, local_path
from mingpt.tokenizer import Tokenizer, tokenizer_from_dict

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{9,})-g(\d+)-[0-9a-f]{8}")
_NICE = 10  # priority of saving: beside training on every core it takes a third of the speed, else nearly half
_IMAGE, _MANIFEST = ".safetensors", ".json"


@dataclass(frozen=True)
class Manifest:
    """What is known of a snapshot without opening its image: `facts` is the JSON of `stem`.json in the store."""

    store: Store = field(compare=False)
    stem: str
    facts: dict[str, Any] = field(hash=False)

    @property
    def image_name(self) -> str:
        # Derived from the manifest's own name, not read from it: no content can point out of the folder.
        return self.stem + _IMAGE

    @property
    def image_uri(self) -> str:
        return f"{self.store.uri}/{self.image_name}"

    @property
    def order(self) -> tuple[int, int]:
        """Newer snapshots compare greater: a later formation of the world wins over a higher step."""
        return self.facts["generation"], self.facts["step"]


class Snapshots:
    """The snapshots of one run in one store; one process, which holds it by `claim`, writes, any may read.

    Kept are the newest `keep_last`, every one whose step is a multiple of `keep_interval` (0: none more), and the best
    by validation loss.
    """

    def __init__(self, store: Store, run_id: str, keep_last: int = 2, keep_interval: int = 0) -> None:
        self.store = store
        self.run_id = run_id
        self._keep_last = keep_last
        self._keep_interval = keep_interval
        self._found: list[Manifest] | None = None  # what `look` saw
        self._lease: Lease | None = None
        self._record: Callable[[str], None] | None = None  # writes into run.json where the run was saved

    def claim(self, run: Run, out_dir: Path, facts: Mapping[str, object]) -> None:
        """Makes this process the run's one writer until `release`, and writes `run.json`.

        Raises ValueError where another start of the run is alive, or was since `open_run` and `look`; OSError where it
        may not write.
        """
        lease = Lease(self.store, run.generation)
        lease.wait()
        now = look_around(out_dir, self.store)
        # Less is no sign of it: other nodes may know of later formations than is written here.
        overtaken = last_generation(run.run_id, now) >= run.generation
        replaced = any(record["run_id"] != run.run_id for record in now["records"])
        if overtaken or replaced or self._found not in (None, self.all()):
            raise ValueError(f"another start of this run was faster in {self.store.uri}: start again to go on")
        try:
            lease.take()
        except TakenOverError as error:  # before there was anything to lose
            raise ValueError(str(error)) from error
        self._lease = lease
        self.store.remove_leftovers()
        record_run(run, out_dir, self.store, facts)
        if run.saved_in != self.store.uri:
            self._record = lambda uri: record_run(replace(run, saved_in=uri), out_dir, self.store, facts)

    def release(self) -> None:
        """Lets the next start have the run at once."""
        if self._lease:
            self._lease.release()

    def save(self, data: Tensor, *, step: int, generation: int, facts: Mapping[str, object]) -> Manifest:
        """Writes the image `data` (uint8), verifies it, writes its manifest, and removes what need not be kept.

        Raises OSError where the store is full, out of reach or gives back other bytes, TakenOverError where the run
        belongs to a later start by now; what was there stays valid.
        """
        self._check()
        stem = f"step-{step:09d}-g{generation}-{secrets.token_hex(4)}"
        weights_sha256, state_sha256 = sha256s(decode(data, stem).tensors)
        given = {
            "run_id": self.run_id,
            "step": step,
            "generation": generation,
            "time": time.time(),
            "size": data.numel(),
            "sha256": hashlib.sha256(data.numpy().data).hexdigest(),
            "weights_sha256": weights_sha256,
            "state_sha256": state_sha256,
            **facts,
        }
        content = json.loads(json.dumps(given))  # as it will be read: JSON turns a key that is a number into a text
        manifest = Manifest(self.store, stem, content)
        free = self.store.free()
        if free is not None and free < data.numel():  # before a disk is filled in vain
            sizes = f"a snapshot takes {data.numel() / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free"
            raise OSError(f"{self.store.uri}: {sizes}: make room")
        self.store.put(manifest.image_name, [data.numpy().data])
        if not _holds(self.store, manifest.image_name, data):
            self.store.delete(manifest.image_name)
            raise OSError(f"{manifest.image_uri} does not give back the bytes that were written: check the disk")
        self._check()  # the upload may have taken long
        self.store.put(stem + _MANIFEST, [json.dumps(content | {"check": _check_of(content)}, indent=1).encode()])
        try:
            self.prune(manifest)
        except (OSError, ValueError) as error:
            log.warning("older snapshots are not removed: %s", error)
        if self._record:
            try:
                self._record(self.store.uri)
                self._record = None
            except OSError as error:
                log.warning("run.json does not tell yet that the run was saved: %s", error)
        return manifest

    def _check(self) -> None:
        """Raises TakenOverError, or OSError where another run's folder has taken the place of this one's."""
        if not self._lease:
            return
        self._lease.check()
        if (there := _run_in(self.store)) not in (None, self.run_id):
            raise OSError(
                f"{self.store.uri} is the folder of another run by now ({there}, this is {self.run_id}): move it away, "
                "and bring this run's back"
            )

    def raise_if_taken_over(self) -> None:
        """Raises TakenOverError where a later start was seen to have the run."""
        if self._lease:
            self._lease.raise_if_lost()

    def all(self) -> list[Manifest]:
        """This run's manifests, newest first."""
        return [manifest for manifest in read_manifests(self.store) if manifest.facts["run_id"] == self.run_id]

    def look(self) -> list[Manifest]:
        """As `all`, noted for `claim`; images without a manifest are told of."""
        orphans = self._orphans()
        if orphans:
            log.warning(
                "%d IMAGE(S) WITHOUT A MANIFEST NOT USED, the newest is %s/%s: their saves were cut off, or the "
                "manifests were lost; then stop and bring them back, or start another run from it by --name=NEW "
                "--snapshot.init_from=IMAGE", len(orphans), self.store.uri, max(orphans, key=_order) + _IMAGE,
            )  # fmt: skip
        self._found = self.all()
        return self._found

    def newest(self) -> tuple[Manifest, Image] | None:
        """The newest snapshot whose bytes verify, or None where there is none at all; see `newest_valid`."""
        return newest_valid(self.look(), self.store)

    def _orphans(self) -> list[str]:
        """The stems of images without a manifest."""
        return sorted(set(_stems(self.store, _IMAGE)) - set(_stems(self.store, _MANIFEST)))

    def prune(self, saved: Manifest) -> None:
        """Removes what need not be kept now that `saved` is durable; nothing newer, which is a later start's."""
        older = [manifest for manifest in self.all() if manifest.order < saved.order]
        manifests = [saved, *older]
        for stem in self._orphans():
            # Of a save that was cut off. One older than every manifest may have lost its own, which is the user's.
            if manifests[-1].order < _order(stem) < saved.order and self._is_ours(stem):
                log.info("removing %s, which has no manifest, now that a newer snapshot is there", stem + _IMAGE)
                self.store.delete(stem + _IMAGE)
        keep = [*manifests[: self._keep_last], min(manifests, key=_loss)]
        if self._keep_interval:
            keep += [manifest for manifest in older if manifest.facts["step"] % self._keep_interval == 0]
        for manifest in older:
            if manifest not in keep:
                # The manifest first: an image without one is no snapshot.
                self.store.delete(manifest.stem + _MANIFEST)
                self.store.delete(manifest.image_name)

    def _is_ours(self, stem: str) -> bool:
        name = stem + _IMAGE
        try:
            with self.store.open(name) as file:
                return read_metadata(file, self.store.size(name), name).get("run_id") == self.run_id
        except ValueError:
            return False


def look_around(out_dir: Path, store: Store | None) -> dict[str, Any]:
    """What `out_dir` and `store`, its snapshots too, tell of runs; see `look_for_runs`."""
    manifests = read_manifests(store) if store else []
    return look_for_runs(out_dir, store, [(m.facts["run_id"], m.facts["generation"]) for m in manifests])


class Saver:
    """Saves beside the training: a thread uploads a pinned slot, into which nothing is written meanwhile.

    At most one save is on its way; `collect` brings what became of it.
    """

    def __init__(self, snapshots: Snapshots, slots: Slots) -> None:
        self._snapshots = snapshots
        self._slots = slots
        self._thread = ThreadPoolExecutor(1, "snapshots", initializer=_give_way)
        self._saving: Future[Manifest] | None = None

    def start(self, *, step: int, generation: int, facts: Mapping[str, object]) -> None:
        """Begins to save the image that `slots` finished last. Only when not `busy`."""
        assert not self.busy, "one save at a time: one slot is pinned"
        self._saving = self._thread.submit(self._save, self._slots.pin(), step=step, generation=generation, facts=facts)

    def _save(self, data: Tensor, **what: Any) -> Manifest:
        try:
            return self._snapshots.save(data, **what)
        finally:
            self._slots.unpin()

    @property
    def busy(self) -> bool:
        return self._saving is not None

    def collect(self, wait: bool = False) -> Manifest | None:
        """The snapshot that is on its way once it is durable, else None.

        Raises what `Snapshots.save` raised, and TakenOverError as soon as it is known.
        """
        self._snapshots.raise_if_taken_over()
        saving = self._saving
        if saving is None or not (wait or saving.done()):
            return None
        self._saving = None
        return saving.result()

    def close(self, wait: bool = True) -> None:
        """Ends the thread, after the save that is on its way where that is to `wait` for."""
        self._thread.shutdown(wait)


def _give_way() -> None:
    """Lets the calling thread compute where the training leaves a core. On Linux, where priorities are per thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def read_manifests(store: Store) -> list[Manifest]:
    """The manifests in `store`, newest first; one that cannot be understood is told of and left alone.

    Raises OSError where the store or a manifest cannot be read: that is not "there is none".
    """
    manifests = [manifest for stem in _stems(store, _MANIFEST) if (manifest := _read_manifest(store, stem))]
    return sorted(manifests, key=lambda manifest: manifest.order, reverse=True)


def _read_manifest(store: Store, stem: str) -> Manifest | None:
    """The manifest of that name; None where there is none (it may be pruned since it was listed), or a damaged one."""
    try:
        content = store.read(stem + _MANIFEST)
    except FileNotFoundError:
        return None
    try:
        facts = json.loads(content)
        wanted = {"run_id": str, "step": int, "generation": int, "size": int, "sha256": str}
        if not all(isinstance(facts[key], kind) for key, kind in wanted.items()):
            raise TypeError("a field has the wrong type")
        if facts.pop("check") != _check_of(facts):
            raise ValueError("its check differs")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        log.warning("ignoring the snapshot %s/%s: its manifest is damaged (%r)", store.uri, stem, error)
        return None
    return Manifest(store, stem, facts)


def _check_of(facts: Mapping[str, object]) -> str:
    """sha256 (hex) of a manifest's facts, so that no flipped bit in it goes unnoticed."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _stems(store: Store, suffix: str) -> list[str]:
    stems = [name.removesuffix(suffix) for name in store.names() if name.endswith(suffix)]
    return [stem for stem in stems if _NAME.fullmatch(stem)]


def _order(stem: str) -> tuple[int, int]:
    """`Manifest.order`, told by a name alone."""
    step, generation = cast(re.Match[str], _NAME.fullmatch(stem)).groups()
    return int(generation), int(step)


def _loss(manifest: Manifest) -> float:
    """Its validation loss, infinite where there is none, or no number."""
    loss = manifest.facts.get("val_loss")
    return float(loss) if loss is not None and math.isfinite(loss) else math.inf


def newest_valid(manifests: Sequence[Manifest], store: Store) -> tuple[Manifest, Image] | None:
    """The first of `manifests` (newest first) whose image verifies; None where the store holds no snapshot at all.

    Falls back to an older one with a loud line. Raises ValueError where there are some but none is valid, and OSError
    where one cannot be read: an older one in its place would lose work that may be sound.
    """
    for manifest in manifests:
        if image := read_if_valid(manifest):
            return manifest, image
    if has_manifests(store):
        raise ValueError(
            f"there are snapshots in {store.uri}, but none is a valid one of this run: repair or restore one, or move "
            "the folder away to start over"
        )
    return None


def has_manifests(store: Store) -> bool:
    """Whether there are any, of whatever run and in whatever state."""
    return bool(_stems(store, _MANIFEST))


def read_if_valid(manifest: Manifest) -> Image | None:
    """As `read_verified`, but None, and a loud line, where the image is not valid; OSError where it cannot be read."""
    try:
        return read_verified(manifest)
    except (FileNotFoundError, ValueError) as error:
        log.warning("SNAPSHOT OF STEP %d NOT USED: %s", manifest.facts["step"], error)
        return None


def read_verified(manifest: Manifest) -> Image:
    """The image of a snapshot, all bytes of which are those that were written, else ValueError."""
    store, name, facts = manifest.store, manifest.image_name, manifest.facts
    size = store.size(name)
    if size != facts["size"]:
        raise ValueError(f"{manifest.image_uri} has {size} bytes instead of {facts['size']}")
    digest = hashlib.sha256()
    image = _read_image(store, name, digest)
    if digest.hexdigest() != facts["sha256"]:
        raise ValueError(f"the bytes of {manifest.image_uri} are not those that were written (sha256 differs)")
    return image


def _holds(store: Store, name: str, data: Tensor) -> bool:
    """Whether the store gives `data` (uint8) back under that name; read piece by piece, so that it costs no memory."""
    with store.open(name) as file:
        for start in range(0, data.numel(), PIECE):
            piece = file.read(PIECE)
            if not np.array_equal(np.frombuffer(piece, np.uint8), data[start : start + PIECE].numpy()):
                return False
        return not file.read(1)


def _read_image(store: Store, name: str, digest: Any = None) -> Image:
    """An image, memory-mapped where it is a local file; `digest` is fed with its bytes before they are understood."""
    path, uri, size = store.path(name), f"{store.uri}/{name}", store.size(name)
    if not size:
        raise ValueError(f"{uri} is empty")
    with store.open(name) as file:
        if path is None:
            read_metadata(file, size, uri)  # before memory is taken for what is no image
            file.seek(0)
            data = torch.empty(size, dtype=torch.uint8)
            target = memoryview(data.numpy().data)
            for start in range(0, size, PIECE):
                if file.readinto(target[start : start + PIECE]) != min(PIECE, size - start):  # type: ignore[attr-defined]
                    raise ValueError(f"{uri} ends early")
            if digest:
                digest.update(target)
        elif digest:
            for chunk in iter(lambda: file.read(PIECE), b""):
                digest.update(chunk)
    if path:
        # Copy-on-write, so that torch takes it for memory like any other; nobody writes into it.
        data = torch.from_numpy(np.memmap(path, np.uint8, mode="c"))
    return decode(data, uri)


# For everyone who only reads


def find_image(uri: str) -> tuple[str, Image]:
    """The image at `uri`: an image file, a snapshot folder, or a run's folder, local or not; and where it lies.

    In a folder the newest valid one. Raises FileNotFoundError, OSError, ValueError.
    """
    folder, _, name = uri.rstrip("/").rpartition("/")
    if name.endswith(_MANIFEST) and _NAME.fullmatch(name.removesuffix(_MANIFEST)):
        name = name.removesuffix(_MANIFEST) + _IMAGE
    if name.endswith(_IMAGE) or not is_remote(uri) and local_path(uri).is_file():
        store = open_store(folder or ("/" if uri.startswith("/") else "."))
        stem = name.removesuffix(_IMAGE)
        try:  # not by a list of names, which a web server does not give
            beside = _read_manifest(store, stem) if _NAME.fullmatch(stem) else None
            image = read_verified(beside) if beside else _read_image(store, name)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"there is no snapshot {redact(uri)}: name a run's folder, a snapshot folder or a file"
            ) from error
        if not beside:
            log.info("the bytes of %s/%s are not verified: its manifest (.json) is not beside it", store.uri, name)
        return f"{store.uri}/{name}", image
    for place in (f"{uri.rstrip('/')}/snapshots", uri):
        store = open_store(place)
        manifests, owner = read_manifests(store), _run_in(store)
        ours = [manifest for manifest in manifests if manifest.facts["run_id"] == owner]
        if found := newest_valid(ours or manifests, store):
            return found[0].image_uri, found[1]
    raise FileNotFoundError(f"no snapshot is in {redact(uri)}: name a run's folder, a snapshot folder or a file")


def load_snapshot(uri: str, device: str = "cpu") -> tuple[GPT, Tokenizer, dict[str, Any]]:
    """A GPT in evaluation mode on `device`, its tokenizer, and the image's metadata (step, val_loss, config ...).

    Needs nothing but the image. Raises as `find_image` does, and ValueError where the model is not a GPT of ours.
    """
    source, image = find_image(uri)
    if image.metadata.get("model") is None or image.metadata.get("tokenizer") is None:
        raise ValueError(f"{source} holds the user's own model: load its tensors with any safetensors reader")
    try:
        config = GPTConfig(**image.metadata["model"])
    except TypeError as error:
        raise ValueError(f"{source} is damaged: its model cannot be read ({error})") from error
    if config.num_parameters > sum(tensor.numel() for tensor in image.tensors.values()):  # before memory is taken
        raise ValueError(f"{source} is damaged: it has fewer weights than its model of {config.num_parameters:,}")
    model = GPT(config)
    load_weights(model, image, source)
    return model.to(device).eval(), tokenizer_from_dict(image.metadata["tokenizer"]), image.metadata


def load_weights(model: torch.nn.Module, image: Image, source: str) -> None:
    """Copies the image's weights into `model`; ValueError names what is missing, left over or of another shape."""
    live = model_tensors(model)
    saved = {name.removeprefix("model."): t for name, t in image.tensors.items() if name.startswith("model.")}
    differing = sorted(
        f"{name} {list(saved[name].shape) if name in saved else 'missing'} instead of "
        f"{list(live[name].shape) if name in live else 'nothing'}"
        for name in {**live, **saved}
        if name not in live or name not in saved or live[name].shape != saved[name].shape
    )
    if differing:
        shown = "; ".join(differing[:3]) + (f"; and {len(differing) - 3} more" if len(differing) > 3 else "")
        raise ValueError(f"the weights of {source} do not fit this model: {shown}")
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(saved[name])


def model_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """The model's live parameters and persistent buffers by name, a tied one once, under its first name."""
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    names = [name for name in model.state_dict() if name in parameters or name in buffers]
    return {name: parameters[name] if name in parameters else buffers[name] for name in names}


def _run_in(store: Store) -> str | None:
    """The id of the run whose folder it is; None where nothing says so."""
    try:
        record = read_record(store)
    except ValueError:  # damaged: its manifests tell
        return None
    return record["run_id"] if record else None


# The command


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m mingpt.snapshot`: what is in a store, whether it is valid, and what need not be kept."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser("python -m mingpt.snapshot", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("command", choices=["ls", "verify", "prune"], help="list; read every byte; remove older ones")
    parser.add_argument("uri", help="a run's folder or a folder of snapshots, local or not")
    parser.add_argument("--keep-last", type=int, default=2, metavar="N", help="for prune (%(default)s)")
    parser.add_argument(
        "--keep-interval", type=int, default=0, metavar="N", help="for prune: multiples of N steps stay"
    )
    arguments = parser.parse_args(argv)
    if arguments.keep_last < 1 or arguments.keep_interval < 0:
        parser.error("--keep-last: give 1 or more; --keep-interval: give 0 or more")
    try:
        store, manifests = _manifests_at(arguments.uri)
        if arguments.command == "prune":
            _prune_by_hand(store, manifests, arguments.keep_last, arguments.keep_interval)
            manifests = read_manifests(store)
        invalid = _show(store, manifests, arguments.command == "verify")
        sys.stdout.flush()
        return 1 if invalid else 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head`; what Python would still flush goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, ValueError) as error:
        print(f"mingpt.snapshot: {redact(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ValueError | FileNotFoundError) else 1


def _manifests_at(uri: str) -> tuple[Store, list[Manifest]]:
    """What `uri` or its folder `snapshots` holds; raises FileNotFoundError where that is nothing."""
    for place in (f"{uri.rstrip('/')}/snapshots", uri):
        store = open_store(place)
        manifests = read_manifests(store)
        if manifests or _stems(store, _IMAGE) or _stems(store, _MANIFEST):
            return store, manifests
    raise FileNotFoundError(f"no snapshot is in {redact(uri)}: name a run's folder or a snapshot folder")


def _show(store: Store, manifests: Sequence[Manifest], thoroughly: bool) -> int:
    """Prints a table; how many are not valid, by their size or, `thoroughly`, by all their bytes."""
    print(f"{'step':>9} {'generation':>10} {'age':>8} {'MB':>10} {'val loss':>8} {'workers':>7}  valid")
    written, known = _stems(store, _MANIFEST), {manifest.stem for manifest in manifests}
    damaged = sorted(set(written) - known)
    orphans = sorted(set(_stems(store, _IMAGE)) - set(written))  # not counted: one may be on its way
    for stem in (*damaged, *orphans):
        generation, step = _order(stem)
        why = "its manifest is damaged" if stem in damaged else "it has no manifest: its save goes on, or was cut off"
        print(f"{step:>9} {generation:>10} {'-':>8} {'-':>10} {'-':>8} {'-':>7}  no: {why}  {stem}")
    invalid = len(damaged)
    for manifest in manifests:
        facts, why = manifest.facts, ""
        try:
            size = manifest.store.size(manifest.image_name)
            if thoroughly:
                read_verified(manifest)
            elif size != facts["size"]:
                raise ValueError(f"it has {size} bytes instead of {facts['size']}")
        except (OSError, ValueError) as error:
            why = f"no: {error}"
            invalid += 1
        hours = (time.time() - facts.get("time", math.nan)) / 3600
        loss = "-" if facts.get("val_loss") is None else f"{facts['val_loss']:.4f}"
        print(
            f"{facts['step']:>9} {facts['generation']:>10} {hours:>7.1f}h {facts['size'] / 1e6:>10,.1f} {loss:>8} "
            f"{facts.get('world_size', '-'):>7}  {why or ('yes' if thoroughly else 'by its size')}  {manifest.stem}"
        )
    return invalid


def _prune_by_hand(store: Store, manifests: Sequence[Manifest], keep_last: int, keep_interval: int) -> None:
    Lease(store, generation=0).wait()  # a writer that is alive prunes for itself
    for run_id in {manifest.facts["run_id"] for manifest in manifests}:
        newest = newest_valid([m for m in manifests if m.facts["run_id"] == run_id], store)
        if newest:
            Snapshots(store, run_id, keep_last, keep_interval).prune(newest[0])


if __name__ == "__main__":
    sys.exit(main())
