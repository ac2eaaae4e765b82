"""Images made durable: whose they are, the manifest that makes one valid, retention, and what may change on resume.

A snapshot is `step-<9 digits>-g<generation>-<8 hex>.safetensors`, an image, and `.json` beside it, its manifest, which
is written last: no manifest, no snapshot. `run.json`, in the run's folder and beside its snapshots, names the run.
"""

import hashlib
import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from mingpt import storage
from mingpt.image import Image, decode, encode, sha256s
from mingpt.model import GPT, GPTConfig
from mingpt.tokenizer import Tokenizer, tokenizer_from_dict

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{9,})-g(\d+)-[0-9a-f]{8}")


@dataclass(frozen=True)
class Manifest:
    """What is known of a snapshot without opening its image. `facts` is the JSON of the file."""

    path: Path
    facts: dict[str, Any] = field(hash=False)

    @property
    def image_path(self) -> Path:
        # Derived from the manifest's own name, not read from it: no content can point out of the folder.
        return self.path.with_suffix(".safetensors")

    @property
    def order(self) -> tuple[int, int]:
        """Newer snapshots compare greater: a later formation of the world wins over a higher step."""
        return self.facts["generation"], self.facts["step"]


class TakenOverError(RuntimeError):
    """This writer is no longer the run's: a later start is."""


@dataclass(frozen=True)
class Run:
    """A run's identity and the number of this formation of the world."""

    run_id: str
    generation: int


class Snapshots:
    """The snapshots of one run in one folder; one process, which holds it by `claim`, writes, any may read.

    Kept are the newest `keep_last`, every one whose step is a multiple of `keep_interval` (0: none more), and the best
    by validation loss.
    """

    def __init__(self, folder: Path, run_id: str, keep_last: int = 2, keep_interval: int = 0) -> None:
        self.folder = folder
        self.run_id = run_id
        self._keep_last = keep_last
        self._keep_interval = keep_interval
        self._found: list[Manifest] | None = None  # what `newest` chose from
        self._locks = ExitStack()  # held until the process ends

    def claim(self, run: Run, out_dir: Path, facts: Mapping[str, object], patience: float = 3.0) -> None:
        """Makes this process the run's one writer until it ends, writes `run.json`, and clears what a killed one left.

        Raises ValueError where another start of the run is alive for more than `patience` seconds (so long one that
        was killed may take to be gone), or was since `open_run` and `newest`; OSError where it may not write.
        """
        with ExitStack() as locks:
            for folder in (self.folder, out_dir):
                folder.mkdir(parents=True, exist_ok=True)
            for folder in {folder.resolve(): folder for folder in (self.folder, out_dir)}.values():
                try:
                    locks.enter_context(storage.lock(folder / ".lock", patience))
                except BlockingIOError as error:
                    raise ValueError(
                        f"{folder} is in use by another start of this run ({error}): stop it, or start another run: "
                        f"{_CURE}"
                    ) from error
            # A new run's id is not written anywhere yet, so the generation tells; the manifests what was saved since.
            same = open_run(out_dir, self.folder).generation == run.generation
            if not same or self._found not in (None, self.all()):
                raise ValueError(f"another start of this run was faster in {self.folder}: start again to go on")
            record_run(run, [self.folder, out_dir], facts)
            storage.remove_leftovers(self.folder)
            storage.remove_leftovers(out_dir)
            self._locks = locks.pop_all()

    def save(self, data: Tensor, *, step: int, generation: int, facts: Mapping[str, object]) -> Manifest:
        """Writes the image `data` (uint8), verifies it, writes its manifest, and removes what need not be kept.

        Raises OSError where the disk is full or gives back other bytes, TakenOverError where the folder belongs to a
        later start of the run by now; what was there stays valid.
        """
        try:
            record = _read_record(self.folder / "run.json")
        except ValueError as error:
            raise OSError(str(error)) from error
        if record and (record["run_id"] != self.run_id or record["generation"] > generation):
            raise TakenOverError(
                f"{self.folder} was taken over by a later start (run {record['run_id']}, generation "
                f"{record['generation']}; this is {self.run_id}, {generation}): the training stops here"
            )
        self.folder.mkdir(parents=True, exist_ok=True)  # someone may have removed it since
        path = self.folder / f"step-{step:09d}-g{generation}-{secrets.token_hex(4)}.json"
        weights_sha256, state_sha256 = sha256s(decode(data, str(path)).tensors)
        content = {
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
        manifest = Manifest(path, content)
        storage.replace_file(manifest.image_path, [data.numpy().data])
        try:
            _read_verified(manifest)
        except ValueError as error:
            manifest.image_path.unlink()
            raise OSError(f"{error}: check the disk") from error
        storage.replace_file(path, [json.dumps(content, indent=1).encode()])
        try:
            self._prune(manifest)
        except OSError as error:
            log.warning("older snapshots are not removed: %s", error)
        return manifest

    def all(self) -> list[Manifest]:
        """This run's manifests, newest first."""
        return [manifest for manifest in read_manifests(self.folder) if manifest.facts["run_id"] == self.run_id]

    def newest(self) -> tuple[Manifest, Image] | None:
        """The newest snapshot whose bytes verify, or None where there is none at all; see `newest_valid`."""
        orphans = self._orphans()
        if orphans:
            log.warning(
                "%d IMAGE(S) WITHOUT A MANIFEST NOT USED, the newest is %s: their saves were cut off, or the manifests "
                "were lost; then stop and bring them back, or start another run from it by --name=NEW "
                "--snapshot.init_from=IMAGE", len(orphans), max(orphans, key=_order),
            )  # fmt: skip
        self._found = self.all()
        return newest_valid(self._found, self.folder)

    def _orphans(self) -> list[Path]:
        """Images of this run without a manifest."""
        images = _listed(self.folder, ".safetensors")
        return [path for path in images if not path.with_suffix(".json").exists() and _is_image_of(path, self.run_id)]

    def _prune(self, saved: Manifest) -> None:
        manifests = self.all()
        for path in self._orphans():
            # Of a save that was cut off. One older than every manifest may have lost its own, which is the user's.
            if manifests[-1].order < _order(path) < saved.order:
                log.info("removing %s, which has no manifest, now that a newer snapshot is there", path)
                path.unlink(missing_ok=True)
        keep = [*manifests[: self._keep_last], saved]
        if self._keep_interval:
            keep += [m for m in manifests if m.facts["step"] % self._keep_interval == 0]
        losses = [(float(m.facts["val_loss"]), m) for m in manifests if m.facts.get("val_loss") is not None]
        keep += [
            m for _, m in sorted((pair for pair in losses if math.isfinite(pair[0])), key=lambda pair: pair[0])[:1]
        ]
        for manifest in manifests:
            if manifest.path not in [kept.path for kept in keep]:
                # The manifest first: an image without one is no snapshot.
                manifest.path.unlink(missing_ok=True)
                manifest.image_path.unlink(missing_ok=True)


class Saver:
    """Saves beside the training: the caller pays one copy of the state into a buffer of ours, a thread does the rest.

    At most one save is on its way; `collect` brings what became of it.
    """

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._thread = ThreadPoolExecutor(1, "snapshots")
        self._buffer: Tensor | None = None
        self._saving: Future[Manifest] | None = None

    def reserve(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, object]) -> None:
        """Takes the memory that saving such a state needs, or the first save would wait until the kernel cleared it."""
        self._buffer = encode(tensors, metadata, self._buffer)

    def start(
        self,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, object],
        *,
        step: int,
        generation: int,
        facts: Mapping[str, object],
    ) -> None:
        """Copies the state and begins to save it. Only when not `busy`."""
        assert not self.busy, "one save at a time: its bytes are in the buffer"
        self._buffer = encode(tensors, metadata, self._buffer)
        self._saving = self._thread.submit(
            self._snapshots.save, self._buffer, step=step, generation=generation, facts=facts
        )

    @property
    def busy(self) -> bool:
        return self._saving is not None

    def collect(self, wait: bool = False) -> Manifest | None:
        """The snapshot that is on its way once it is durable, else None. Raises what `Snapshots.save` raised."""
        saving = self._saving
        if saving is None or not (wait or saving.done()):
            return None
        self._saving = None
        return saving.result()

    def close(self) -> None:
        """Waits for the save that is on its way."""
        self._thread.shutdown()


def read_manifests(folder: Path) -> list[Manifest]:
    """The manifests in `folder`, newest first; one that cannot be understood is told of and left alone.

    Raises OSError where the folder or a manifest cannot be read: that is not "there is none".
    """
    manifests = []
    for path in _listed(folder, ".json"):
        try:
            facts = json.loads(path.read_bytes())
            wanted = {"run_id": str, "step": int, "generation": int, "size": int, "sha256": str}
            if not all(isinstance(facts[key], kind) for key, kind in wanted.items()):
                raise TypeError("a field has the wrong type")
        except FileNotFoundError:
            continue  # pruned since it was listed
        except (ValueError, TypeError, KeyError, IsADirectoryError) as error:
            log.warning("ignoring the snapshot %s: its manifest is damaged (%r)", path, error)
            continue
        manifests.append(Manifest(path, facts))
    return sorted(manifests, key=lambda manifest: manifest.order, reverse=True)


def _listed(folder: Path, suffix: str) -> list[Path]:
    # Not glob: it takes a folder that cannot be read for an empty one.
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [folder / name for name in names if name.endswith(suffix) and _NAME.fullmatch(name.removesuffix(suffix))]


def newest_valid(manifests: Sequence[Manifest], folder: Path) -> tuple[Manifest, Image] | None:
    """The first of `manifests` (newest first) whose image verifies; None where the folder holds no snapshot at all.

    Falls back to an older one with a loud line. Raises ValueError where there are some but none is valid, and OSError
    where one cannot be read: an older one in its place would lose work that may be sound.
    """
    for manifest in manifests:
        try:
            return manifest, _read_verified(manifest)
        except (FileNotFoundError, ValueError) as error:
            log.warning("SNAPSHOT OF STEP %d NOT USED, trying an older one: %s", manifest.facts["step"], error)
    if _listed(folder, ".json"):
        raise ValueError(
            f"there are snapshots in {folder}, but none is a valid one of this run: repair or restore one, or move the "
            "folder away to start over"
        )
    return None


def read_image(path: Path) -> Image:
    """The image in a local file, memory-mapped: its tensors are views of the file. Raises OSError, ValueError."""
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty")
    # Copy-on-write, so that torch takes it for memory like any other; nobody writes into it.
    return decode(torch.from_numpy(np.memmap(path, np.uint8, mode="c")), str(path))


def _read_verified(manifest: Manifest) -> Image:
    path = manifest.image_path
    size = path.stat().st_size
    if size != manifest.facts["size"]:
        raise ValueError(f"{path} has {size} bytes instead of {manifest.facts['size']}")
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != manifest.facts["sha256"]:
            raise ValueError(f"the bytes of {path} are not those that were written (sha256 differs)")
    return read_image(path)


def _order(path: Path) -> tuple[int, int]:
    """`Manifest.order`, told by a name alone."""
    step, generation = cast(re.Match[str], _NAME.fullmatch(path.stem)).groups()
    return int(generation), int(step)


def _is_image_of(path: Path, run_id: str) -> bool:
    try:
        return read_image(path).metadata.get("run_id") == run_id
    except ValueError:
        return False


# Whose run this is


def open_run(out_dir: Path, folder: Path) -> Run:
    """Finds which run lives in `out_dir` and `folder` (its snapshots), or mints a new one; the next generation.

    Writes nothing. Raises ValueError where the two belong to different runs, OSError where they cannot be read.
    """
    records, damaged = [], []
    for path in (out_dir / "run.json", folder / "run.json"):
        try:
            records += [record] if (record := _read_record(path)) else []
        except ValueError as error:
            damaged.append(error)
    manifests = read_manifests(folder)
    ids = {record["run_id"] for record in records} or {manifest.facts["run_id"] for manifest in manifests}
    if damaged and not ids:
        raise damaged[0]
    for damage in damaged:
        log.warning("going by what else tells of the run: %s", damage)
    if len(ids) > 1:
        raise ValueError(
            f"{out_dir} and {folder} hold different runs ({', '.join(sorted(ids))}): give another --name, out_dir or "
            "snapshot.uri"
        )
    run_id = ids.pop() if ids else secrets.token_hex(8)
    known = [record["generation"] for record in records]
    known += [manifest.facts["generation"] for manifest in manifests if manifest.facts["run_id"] == run_id]
    return Run(run_id, 1 + max(known, default=0))


def record_run(run: Run, folders: Sequence[Path], facts: Mapping[str, object]) -> None:
    """Writes `run.json` into each of `folders`, which are made."""
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        content = {"run_id": run.run_id, "generation": run.generation, **facts}
        storage.replace_file(folder / "run.json", [json.dumps(content, indent=1).encode()])


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): restore it, or move the folder away to start over") from error
    if (
        not isinstance(record, dict)
        or not isinstance(record.get("run_id"), str)
        or type(record.get("generation")) is not int
    ):
        raise ValueError(f"{path} names no run: restore it, or move the folder away to start over")
    return record


# What may change on resume

# Who, where, how often and how fast: never what is computed.
_OPERATIONAL = (
    "name",
    "out_dir",
    "device",
    "compile",
    "model.preset",  # the shape it stands for is compared
    "model.activation_checkpointing",
    "data.path",  # the fingerprint of what it holds is compared, here and below
    "data.vocab_size",
    "data.cache_gb",
    "train.eval_interval",
    "train.eval_sequences",
    "train.sample_interval",
    "train.num_threads",
    "train.max_epochs",  # the steps that it comes to are compared
    "snapshot.",
    "elastic.",
    "log.",
)
# The position counts in these, or the state has their shape, or the samples are cut from them.
_FIXED = (
    "seed",
    "train.global_batch_size",
    "model.n_layer",
    "model.n_head",
    "model.n_embd",
    "model.block_size",
    "model.bias",
    "data.tokenizer",
    "data.fingerprint",
)
# With exact reduction the bits depend on these too.
_FIXED_IF_EXACT = ("train.micro_batch_size", "train.num_threads", "dtype", "compile")


_CURE = "--name=NEW (and another out_dir or snapshot.uri, where they are set)"


def changes_on_resume(saved: Mapping[str, Any], now: Mapping[str, Any], resume: str) -> dict[str, tuple[Any, Any]]:
    """The settings (flat, by dotted name) that differ from the run's, each as (then, now), if all may differ.

    Raises ValueError, one line for all of them, for settings that never may change under a run, and for settings of the
    training unless `resume` is `must`.
    """
    changed = {key: (saved.get(key), now.get(key)) for key in {**saved, **now} if saved.get(key) != now.get(key)}
    exact = "exact" in (saved.get("train.reduction"), now.get("train.reduction"))
    fixed = _FIXED + _FIXED_IF_EXACT * exact
    never = {key: values for key, values in changed.items() if key in fixed}
    if never:
        raise ValueError(
            f"{_told(never)}: this cannot change under a run; go back to the old value, or start another run: {_CURE}"
        )
    training = {}
    for key, (then, value) in changed.items():
        longer = key == "train.max_steps" and int(value or 0) > int(then or 0)
        if not longer and not key.startswith(_OPERATIONAL):
            training[key] = (then, value)
    if training and resume != "must":
        raise ValueError(
            f"{_told(training)}: go on with the change by --snapshot.resume=must, or start another run: {_CURE}"
        )
    return {key: values for key, values in changed.items() if key in training or key == "train.max_steps"}


def _some(things: Sequence[str]) -> str:
    return "; ".join(things[:3]) + (f"; and {len(things) - 3} more" if len(things) > 3 else "")


def _told(changes: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{key} was {then} in this run and is {now} now" for key, (then, now) in sorted(changes.items()))


# For everyone who only reads


def find_image(uri: str) -> tuple[str, Image]:
    """The image at `uri`: an image file (local or remote), a snapshot folder, or a run's folder; and where it lies.

    In a folder the newest valid one. Raises FileNotFoundError, OSError, ValueError.
    """
    if storage.is_remote(uri):
        return uri, decode(torch.frombuffer(bytearray(storage.read_bytes(uri)), dtype=torch.uint8), uri)
    path = storage.local_path(uri)
    if path.is_dir():
        folder = path / "snapshots" if (path / "snapshots").is_dir() else path
        found = newest_valid(read_manifests(folder), folder)
        if found is None:
            raise FileNotFoundError(f"no snapshot is in {folder}: name a run's folder, a snapshot folder or a file")
        return str(found[0].image_path), found[1]
    if path.suffix == ".json" and _NAME.fullmatch(path.stem):
        path = path.with_suffix(".safetensors")
    if not path.exists():
        raise FileNotFoundError(f"there is no snapshot {path}: name a run's folder, a snapshot folder or a file")
    beside = [manifest for manifest in read_manifests(path.parent) if manifest.image_path == path]
    return str(path), _read_verified(beside[0]) if beside else read_image(path)


def load_snapshot(uri: str, device: str = "cpu") -> tuple[GPT, Tokenizer, dict[str, Any]]:
    """A GPT in evaluation mode on `device`, its tokenizer, and the image's metadata (step, val_loss, config ...).

    Needs nothing but the image. Raises as `find_image` does, and ValueError where the model is not a GPT of ours.
    """
    source, image = find_image(uri)
    if image.metadata.get("model") is None or image.metadata.get("tokenizer") is None:
        raise ValueError(f"{source} holds the user's own model: load its tensors with any safetensors reader")
    model = GPT(GPTConfig(**image.metadata["model"]))
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
        raise ValueError(f"the weights of {source} do not fit this model: {_some(differing)}")
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(saved[name])


def model_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """The model's live parameters and persistent buffers by name, a tied one once, under its first name."""
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    names = [name for name in model.state_dict() if name in parameters or name in buffers]
    return {name: parameters[name] if name in parameters else buffers[name] for name in names}
