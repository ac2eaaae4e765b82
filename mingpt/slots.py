"""Images in memory that outlive their process: what a worker that was killed goes on from.

A file `mingpt-<uid>-<run id>-<k>` in a file system in memory, its writer's alone as long as that lives (`flock`):

    3 header pages   of 4096 bytes, one a slot: magic, run id, sequence, generation, step, where the image is, checksums
    2 or 3 slots     an image each, in the layout of image.py

A slot's header is wiped before its first byte is written and comes back after the last, with a checksum of all of them.
So a kill at any moment leaves the image before it valid, and what is torn is no image.
"""

import fcntl
import logging
import mmap
import os
import re
import stat
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import xxhash
from torch import Tensor

from mingpt.image import Image, decode, encode

log = logging.getLogger(__name__)

DEFAULT_FOLDER = Path("/dev/shm")
_PAGE = 4096  # bytes
_HEADERS = 3  # pages at the start of a file
_ROOM = 1 << 16  # bytes; in whole ones, so that a later process has slots of the same size
_FILES = 100  # most that one run may have on one machine
_MAGIC = b"mingptR1"
_LAYOUT = struct.Struct("<8s64s6Q")  # magic, run id, then the numbers of `_Header` in their order
_CHECK = struct.Struct("<Q")


@dataclass(frozen=True, order=True)
class _Header:
    """What a slot holds. Newer ones compare greater."""

    generation: int
    step: int
    sequence: int  # counts what a file's writers wrote
    offset: int  # of the image in the file, in bytes
    size: int  # of the image, in bytes
    digest: int  # xxh3_64 of the image

    def to_bytes(self, run_id: str) -> bytes:
        numbers = (self.generation, self.step, self.sequence, self.offset, self.size, self.digest)
        content = _LAYOUT.pack(_MAGIC, run_id.encode(), *numbers)
        return content + _CHECK.pack(xxhash.xxh3_64_intdigest(content))


_HEADER_BYTES = _LAYOUT.size + _CHECK.size


def _parse(content: bytes, run_id: str, file_size: int) -> _Header | None:
    """A slot's header from its page; None where that is wiped, torn, of another run, or points out of the file."""
    if len(content) < _HEADER_BYTES:
        return None
    (check,) = _CHECK.unpack_from(content, _LAYOUT.size)
    magic, its_run, *numbers = _LAYOUT.unpack_from(content)
    header = _Header(*numbers)
    sound = check == xxhash.xxh3_64_intdigest(content[: _LAYOUT.size]) and (magic, its_run.rstrip(b"\0")) == (
        _MAGIC,
        run_id.encode(),
    )
    return header if sound and header.offset + header.size <= file_size else None


class Slots:
    """Writes images of the state beside the training, each into a slot that holds neither the newest nor a pinned one.

    `begin` before a step's work, `finish` before its update, `pin` and `unpin` around what reads an image for long.
    `shared`: they are in a file that outlives this process; else there is one slot in this process's own memory.
    """

    def __init__(self, run_id: str, capacity: int, file: "_File | None" = None) -> None:
        self.run_id = run_id
        self.shared = file is not None
        self.thread_seconds = 0.0  # CPU time of the copying so far
        self._file = file
        self._thread = ThreadPoolExecutor(1, "ram image")
        self._copying: Future[tuple[Tensor, bool]] | None = None
        self._committing: Future[None] | None = None
        self._stream: Any = None
        self._registered: bool | None = None  # with the device; None: not tried
        headers: list[_Header | None] = [None]
        if file:
            memory = torch.frombuffer(file.memory, dtype=torch.uint8)
            first = _HEADERS * _PAGE
            self._places = [memory[first + i * capacity : first + (i + 1) * capacity] for i in range(file.slots)]
            headers = [_parse(file.page(i), run_id, memory.numel()) for i in range(file.slots)]
        else:
            self._places = [torch.empty(capacity, dtype=torch.uint8)]
        found = [(header, i) for i, header in enumerate(headers) if header]
        newest = max(found, default=None)
        self._newest = newest[1] if newest else None  # the slot
        self._sequence = max((header.sequence for header, _ in found), default=0)
        self._writing: int | None = None
        self._pinned: int | None = None

    @classmethod
    def open(cls, ram_dir: Path | None, run_id: str, size: int) -> Self:
        """Slots for images of about `size` bytes: numbers in them may become longer.

        In the first file of the run in `ram_dir` that no living process writes, whose images stay until newer ones are
        there, or a new one. In memory alone where `ram_dir` is None or, with a warning, has too little space.
        """
        capacity = (size // _ROOM + 2) * _ROOM
        return cls(run_id, capacity, _take_file(ram_dir, run_id, capacity) if ram_dir else None)

    def begin(
        self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], sound: Callable[[], bool] = lambda: True
    ) -> None:
        """Starts to write an image, in a thread; `tensors` must not change until `finish`, nor `metadata` ever.

        metadata: with the whole numbers `generation` and `step`. sound: asked when all is copied; where it is False the
        image is dropped.
        """
        if self._committing:
            self._committing.result()
        slot = self._free()
        if self._file:
            self._file.write_page(slot, bytes(_HEADER_BYTES))
        self._writing = slot
        device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        if device:
            # What the training's stream has still to do for this state comes first.
            self._stream = self._stream or torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._copying = self._thread.submit(self._copy, self._places[slot], dict(tensors), metadata, sound)
        self._committing = self._thread.submit(self._commit, slot, self._copying, metadata)
        if any(tensor.device.type == "mps" for tensor in tensors.values()):
            self._copying.result()  # its one queue is no place for two threads

    def finish(self) -> bool:
        """Waits until the tensors given to `begin` may change; whether the image was sound. Its commit may follow."""
        assert self._copying, "begin() comes first"
        return self._copying.result()[1]

    def pin(self) -> Tensor:
        """The bytes (uint8) of the image that was finished last, which stay as they are until `unpin`."""
        assert self._copying and self._pinned is None, "one image is pinned at a time"
        self._pinned = self._writing
        return self._copying.result()[0]

    def unpin(self) -> None:
        """Gives the pinned slot back; in any thread."""
        self._pinned = None

    def close(self) -> None:
        """Waits for what is being written and gives the file to the next writer; the images in it stay."""
        self._thread.shutdown()
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._whole().data_ptr())
            self._registered = None
        self._copying = self._committing = None
        self._places = []  # the memory goes with the last view of it
        if self._file:
            self._file.unlock()
            self._file = None

    def remove(self) -> None:
        """Closes, and removes every file of the run that no other process writes: the run has ended."""
        ram_dir = self._file.path.parent if self._file else None
        self.close()
        remove_files(ram_dir, self.run_id)

    def _free(self) -> int:
        """The slot to write into. Where only the newest is not pinned, that one: the pinned one is valid meanwhile."""
        free = [slot for slot in range(len(self._places)) if slot != self._pinned]
        assert free, "the only slot is pinned"
        return next((slot for slot in free if slot != self._newest), free[0])

    def _copy(
        self, place: Tensor, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], sound: Callable[[], bool]
    ) -> tuple[Tensor, bool]:
        started = time.thread_time()
        if self._stream:
            with torch.cuda.stream(self._stream):  # which chooses the device, of this thread too
                self._register()
                data = encode(tensors, metadata, place, non_blocking=True)
            self._stream.synchronize()
        else:
            data = encode(tensors, metadata, place)
        assert data.data_ptr() == place.data_ptr(), "an image's size changes by some digits only"
        self.thread_seconds += time.thread_time() - started
        return data, sound()

    def _commit(self, slot: int, copying: Future[tuple[Tensor, bool]], metadata: Mapping[str, Any]) -> None:
        data, sound = copying.result()
        if not sound:
            return
        started = time.thread_time()
        if self._file:
            self._sequence += 1
            digest = xxhash.xxh3_64_intdigest(data.numpy().data)
            offset = _HEADERS * _PAGE + slot * self._places[slot].numel()
            header = _Header(metadata["generation"], metadata["step"], self._sequence, offset, data.numel(), digest)
            self._file.write_page(slot, header.to_bytes(self.run_id))
        self._newest = slot
        self.thread_seconds += time.thread_time() - started

    def _register(self) -> None:
        """Lets the device write into the slots itself, several times as fast; where it cannot, all goes on without."""
        if self._registered is None and self._file:
            whole = self._whole()
            self._registered = int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0)) == 0

    def _whole(self) -> Tensor:
        assert self._file
        return torch.frombuffer(self._file.memory, dtype=torch.uint8)


class _File:
    """A slot file that is ours: mapped, and locked."""

    def __init__(self, path: Path, lock: int, slots: int) -> None:
        self.path = path
        self.slots = slots
        self._lock: int | None = lock
        # Opened again: a mapping keeps its file open, and with it the lock, in every process forked from this one.
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.memory = mmap.mmap(file, 0)
        os.close(file)
        os.register_at_fork(after_in_child=partial(_unlock, weakref.ref(self)))

    def page(self, slot: int) -> bytes:
        return self.memory[slot * _PAGE : slot * _PAGE + _HEADER_BYTES]

    def write_page(self, slot: int, content: bytes) -> None:
        self.memory[slot * _PAGE : slot * _PAGE + len(content)] = content

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _unlock(file: "weakref.ref[_File]") -> None:
    if ours := file():
        ours.unlock()


def folder(ram_image: str, ram_dir: str | None) -> Path | None:
    """Where the slot files are by the settings `elastic.ram_image` and `elastic.ram_dir`; None: nowhere."""
    place = Path(ram_dir).expanduser() if ram_dir else DEFAULT_FOLDER
    if ram_image == "off":
        return None
    usable = place.is_dir() and os.access(place, os.W_OK)
    if ram_dir and not usable:
        log.warning("warning: no RAM images: elastic.ram_dir=%s is no folder here that we may write to", ram_dir)
    return place if usable else None


def newest_image(ram_dir: Path | None, run_id: str) -> tuple[tuple[int, int], Image] | None:
    """The newest valid image of the run in `ram_dir` (a copy of its own) with its (generation, step), or None.

    Passed over with a line in the log is what is torn, damaged, another user's or cannot be read.
    """
    for header, path in sorted(_headers(ram_dir, run_id), reverse=True):
        try:
            with _opened(path) as file:
                file.seek(header.offset)
                data = torch.empty(header.size, dtype=torch.uint8)
                count = file.readinto(data.numpy())  # by a buffered reader: one call of Linux gives 2 GiB at most
            if count != header.size or xxhash.xxh3_64_intdigest(data.numpy().data) != header.digest:
                raise ValueError("its bytes are not those that were written")
            image = decode(data, str(path))
            if (image.metadata.get("generation"), image.metadata.get("step")) != (header.generation, header.step):
                raise ValueError("its header is another image's")
        except (OSError, ValueError) as error:
            log.info("passing over the image of step %d in %s: %s", header.step, path, error)
            continue
        return (header.generation, header.step), image
    return None


def known_generation(ram_dir: Path | None, run_id: str) -> int:
    """The highest generation of any image of the run in `ram_dir`, by the headers alone; 0 where there is none."""
    return max((header.generation for header, _ in _headers(ram_dir, run_id)), default=0)


def remove_files(ram_dir: Path | None, run_id: str) -> None:
    """Removes the run's files in `ram_dir`, but those that a living process writes."""
    for path in _paths(ram_dir, run_id):
        lock = _lock(path, os.O_RDWR)
        if lock is not None:
            path.unlink(missing_ok=True)
            os.close(lock)


def _headers(ram_dir: Path | None, run_id: str) -> Iterator[tuple[_Header, Path]]:
    for path in _paths(ram_dir, run_id):
        try:
            with _opened(path) as file:
                size = os.fstat(file.fileno()).st_size
                pages = [file.read(_PAGE) for _ in range(_HEADERS)]
        except OSError as error:
            log.info("passing over %s: %s", path, error)
            continue
        for page in pages:
            if header := _parse(page, run_id, size):
                yield header, path
            elif any(page):
                log.info("passing over a damaged slot of %s", path)


def _paths(ram_dir: Path | None, run_id: str) -> list[Path]:
    name = re.compile(rf"mingpt-{os.getuid()}-{re.escape(run_id)}-\d+")
    return sorted(path for path in ram_dir.iterdir() if name.fullmatch(path.name)) if ram_dir else []


def _opened(path: Path) -> Any:
    """`path` to be read; OSError where it is another user's, or no file. Without it a pipe could hold us up."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    if not _is_ours(os.fstat(file.fileno())):
        file.close()
        raise PermissionError("it is another user's")
    return file


def _is_ours(facts: os.stat_result) -> bool:
    """Whether a file is this user's: anyone may make one of any name in /dev/shm."""
    return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid()


def _lock(path: Path, flags: int) -> int | None:
    """Opens and locks `path`; None where a living process has it, or it is not ours. The lock ends with the process."""
    file = -1
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        if _is_ours(os.fstat(file)):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), path.stat()):  # else it was removed while we opened it
                return file
    except OSError:  # in use, or not ours
        pass
    if file >= 0:
        os.close(file)
    return None


def _take_file(ram_dir: Path, run_id: str, capacity: int) -> _File | None:
    """The first file of the run that is free or can be made; None, with a warning, where it cannot be that large."""
    for k in range(_FILES):
        path = ram_dir / f"mingpt-{os.getuid()}-{run_id}-{k}"
        lock = _lock(path, os.O_RDWR | os.O_CREAT)
        if lock is None:
            continue
        slots = _allocate(lock, capacity)
        if slots:
            return _File(path, lock, slots)
        path.unlink()
        os.close(lock)
        break
    needed, free = _HEADERS * _PAGE + 2 * capacity, min(_free_bytes(ram_dir), _memory_to_take())
    log.warning(
        "warning: no RAM images: %s has %s bytes free, %s are needed (elastic.ram_dir); a kill costs the steps since "
        "the last snapshot", ram_dir, f"{free:,}", f"{needed:,}",
    )  # fmt: skip
    return None


def _allocate(file: int, capacity: int) -> int:
    """Makes sure of the space for three slots, or two where memory is short; how many there are, 0 where none."""
    for slots in (3, 2):
        if os.fstat(file).st_size == _HEADERS * _PAGE + slots * capacity:
            return slots  # a writer before us
    os.ftruncate(file, 0)
    for slots in (3, 2):
        size = _HEADERS * _PAGE + slots * capacity
        if size > _memory_to_take():
            continue
        # Now, and not by SIGBUS when the first image is written.
        with suppress(OSError):
            if sys.platform == "linux":
                os.posix_fallocate(file, 0, size)
            else:
                os.ftruncate(file, size)
            return slots
        os.ftruncate(file, 0)
    return 0


def _free_bytes(folder: Path) -> int:
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def _memory_to_take() -> int:
    """Half of what this machine can give to processes, in bytes: the training needs some, and others do."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError):
        if found := re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii")):
            available = int(found[1]) * 1024
    return available // 2
