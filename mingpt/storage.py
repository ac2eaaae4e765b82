"""Bytes at a URI: a name holds the old bytes or the new, never half. And locks, so that one process writes.

A `Store` is a folder, here one on a disk (others: mingpt/remote.py). Below it are the functions for single files: texts
that are read from anywhere, and local ones that are written.
"""

import errno
import fcntl
import glob
import io
import logging
import math
import os
import re
import secrets
import shutil
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from mingpt.faults import LateError, redact, refuse_secrets, told, within

log = logging.getLogger(__name__)

Bytes = bytes | bytearray | memoryview
T = TypeVar("T")

PIECE = 16 << 20  # bytes that go to a remote store, or come from it, at once; S3 takes 10,000 pieces for one name
PROBE_SECONDS = 13  # with importing a driver no more than 15


class Store(ABC):
    """A folder of named bytes. A name is no path: it has no slash, and one that begins with a dot is not listed.

    Whatever goes wrong is an OSError (FileNotFoundError, PermissionError, ConnectionError, TimeoutError ...) or, for
    what no other try can heal, a ValueError; its one line names the URI without secrets.
    """

    uri: str  # for people: without password, query and trailing slash

    @abstractmethod
    def put(self, name: str, chunks: Iterable[Bytes]) -> None:
        """Gives `name` the bytes of `chunks`, or leaves what was there; durable when it returns.

        Streams: no second copy of the whole is made. After a passing fault of a remote store `chunks` is gone through
        again, which only one that starts anew each time (a list, no generator) can be. After a TimeoutError the new
        bytes may still appear, whole.
        """

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """The bytes of `name`, seekable and buffered; in a remote store of a name that is not put again meanwhile."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes of `name`."""

    @abstractmethod
    def names(self) -> list[str]:
        """What is in the folder now, sorted; nothing where there is no folder yet. Folders in it are left out."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Removes `name`, if it is there. Raises PermissionError where it still is afterwards."""

    @abstractmethod
    def remove_leftovers(self) -> None:
        """Removes what a killed `put` left, where it leaves anything; the caller is the folder's only writer."""

    @abstractmethod
    def free(self) -> int | None:
        """Bytes that still fit, where the store knows."""

    @abstractmethod
    def path(self, name: str) -> Path | None:
        """Where `name` lies on this machine, so that it can be memory-mapped; None in a remote store."""

    @abstractmethod
    def _late(self) -> str:
        """Why `probe` may have taken too long, and what to do."""

    def probe(self) -> None:
        """Makes the folder; writes, lists, reads and removes a small object there, so that a run fails at its start.

        Takes 15 seconds at most. Raises OSError, ValueError: what is wrong and what to do, in one line.
        """
        name, content = f".probe-{secrets.token_hex(4)}", b"mingpt"

        def work() -> None:
            self.names()  # first: there are servers that make a missing bucket when they are written to
            self.put(name, [content])
            try:
                if self.read(name) != content:
                    raise OSError(f"{self.uri} gives back other bytes than were written: check the disk or the server")
            except OSError:
                with suppress(OSError):
                    self.delete(name)
                raise
            self.delete(name)

        try:
            within(PROBE_SECONDS, work)
        except LateError:
            raise TimeoutError(f"{self.uri}: after {PROBE_SECONDS} s {self._late()}") from None

    @abstractmethod
    def read(self, name: str) -> bytes:
        """All bytes of `name`, as one `put` left them."""


class LocalStore(Store):
    """A folder on a disk of this machine; made by the first `put`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uri = str(folder)

    def put(self, name: str, chunks: Iterable[Bytes]) -> None:
        path = self.path(name)
        _make_folder(self.folder)
        replace_file(path, chunks)

    def read(self, name: str) -> bytes:
        return self.path(name).read_bytes()

    def open(self, name: str) -> BinaryIO:
        return open(self.path(name), "rb")

    def size(self, name: str) -> int:
        return self.path(name).stat().st_size

    def names(self) -> list[str]:
        # Not glob: it takes a folder that cannot be read for an empty one.
        try:
            with os.scandir(self.folder) as entries:
                return sorted(entry.name for entry in entries if entry.name[0] != "." and not entry.is_dir())
        except FileNotFoundError:
            return []

    def delete(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)

    def remove_leftovers(self) -> None:
        remove_leftovers(self.folder)

    def free(self) -> int | None:
        there = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        return shutil.disk_usage(there).free

    def path(self, name: str) -> Path:
        return self.folder / checked(name)

    def probe(self) -> None:
        try:
            super().probe()
        except OSError as error:
            if error.errno is None:
                raise
            in_the_way, right = "remove the file that is in the way, or ", "get the right to write there, or "
            cure = {errno.EEXIST: in_the_way, errno.ENOTDIR: in_the_way, errno.EACCES: right, errno.EPERM: right}
            cure |= dict.fromkeys([errno.ENOSPC, errno.EDQUOT], "make room, or ")
            text = f"{self.uri}: {error.strerror}: {cure.get(error.errno, '')}name another folder"
            raise type(error)(text) from error

    def _late(self) -> str:
        return "the disk gives no answer: see whether its server is up, or name another folder"


def checked(name: str) -> str:
    if name in ("", ".", "..") or re.search(r"[/\\\x00-\x1f]", name):
        raise ValueError(
            f"{name!r} is no name in a folder: it must not be empty, a path, or contain control characters"
        )
    return name


def is_remote(uri: str) -> bool:
    """Whether `uri` has a scheme other than `file://`. A Windows drive (`C:\\x`) is no scheme."""
    return "://" in uri and not uri.startswith("file://")


def local_path(uri: str) -> Path:
    """The path that a local URI or path names, `~` expanded."""
    return Path(uri.removeprefix("file://")).expanduser()


def open_read(uri: str) -> BinaryIO:
    """Opens the bytes at `uri`, buffered.

    Raises FileNotFoundError where nothing is there, another OSError where it cannot be read, ValueError where no
    driver for the scheme is known or installed.
    """
    if not is_remote(uri):
        return open(local_path(uri), "rb")
    filesystem, path = _filesystem(uri)
    with told(uri):
        return cast(BinaryIO, io.BufferedReader(_Told(filesystem.open(path, "rb"), uri)))


class _Told(io.RawIOBase):
    """The bytes of a driver's open file: what goes wrong later on is told as well."""

    def __init__(self, file: Any, uri: str) -> None:
        self._file, self._uri = file, uri

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        with told(self._uri):
            piece = self._file.read(len(view))
        view[: len(piece)] = piece
        return len(piece)

    def readall(self) -> bytes:
        with told(self._uri):
            return bytes(self._file.read())

    def close(self) -> None:
        self._file.close()
        super().close()


def read_bytes(uri: str) -> bytes:
    """All bytes at `uri`; raises as `open_read` does."""
    with open_read(uri) as file:
        return file.read()


def identity(uri: str) -> str:
    """A string that changes when the content at `uri` does (size and time of change); raises as `open_read` does."""
    if not is_remote(uri):
        stat = local_path(uri).stat()
        return f"{stat.st_size}-{stat.st_mtime_ns}"
    filesystem, path = _filesystem(uri)
    with told(uri):
        if uri.startswith(("http://", "https://")):  # the driver's own is of the address alone
            info = filesystem.info(path)
            return str([info.get(name) for name in ("size", "ETag", "Content-MD5", "Last-Modified")])
        return str(filesystem.ukey(path))


def is_folder(uri: str) -> bool:
    """Whether `uri` is a folder. An HTTP server does not tell: there it is what ends in a slash."""
    if not is_remote(uri):
        return local_path(uri).is_dir()
    if uri.startswith(("http://", "https://")):
        return uri.endswith("/")
    filesystem, path = _filesystem(uri)
    with suppress(PermissionError), told(uri):  # what may be read and not listed
        return bool(filesystem.isdir(path))
    return False


def find_files(uri: str) -> list[str]:
    """The files that `uri` names, sorted: itself, those in the folder and below, or those that the pattern matches.

    Of a folder names that begin with a dot are left out. Raises FileNotFoundError where there is no file.
    """
    filesystem, path = _filesystem(uri if is_remote(uri) else str(local_path(uri).absolute()))
    if folder := is_folder(uri):
        names = [f"{root}/{name}" for root, _, files in filesystem.walk(path) for name in files]
    elif glob.has_magic(path) and not filesystem.exists(path):
        names = [name for name in filesystem.glob(path) if not filesystem.isdir(name)]
    else:
        names = [path] if filesystem.exists(path) else []
    if folder:
        names = [name for name in names if "/." not in name[len(path) - 1 :]]
    if not names:
        raise FileNotFoundError(f"{redact(uri)}: no such file, or no file in this folder or of this pattern")
    return [filesystem.unstrip_protocol(name) if is_remote(uri) else name for name in sorted(names)]


def size(uri: str) -> int:
    """Bytes at `uri`, 0 where a remote store does not tell; raises as `open_read` does."""
    if not is_remote(uri):
        return local_path(uri).stat().st_size
    filesystem, path = _filesystem(uri)
    with told(uri):
        return int(filesystem.size(path) or 0)


def replace_file(path: Path, chunks: Iterable[Bytes]) -> None:
    """Gives the name `path` the bytes of `chunks`, as `replacing` does; raises whatever `chunks` raises too."""
    with replacing(path) as file:
        for chunk in chunks:
            if hasattr(os, "posix_fallocate"):  # a fifth of the time that writing page by page takes (1.5 GB, ext4)
                with suppress(OSError):  # where it cannot, writing tells why, if it cannot either
                    os.posix_fallocate(file.fileno(), file.tell(), memoryview(chunk).nbytes)
            write_all(file, chunk)


def write_all(file: BinaryIO, data: Bytes) -> None:
    """Writes `data` to a file without a buffer, of which one call may take a part only (2 GiB at most on Linux)."""
    view = memoryview(data)
    view = view.cast("B") if view.nbytes else view  # what is empty has no shape to cast
    while view.nbytes:
        view = view[file.write(view) :]


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file, without a buffer, that gets the name `path` at the end, durable then; else what was there stays.

    The folder must exist. A link stays one. What is no file, as a device or a pipe, is written to as it is. Raises
    OSError (disk full, no right); the temporary file is removed then. A kill leaves at most a file
    `.<name>.<random>.tmp`, which no reader looks at.
    """
    special = path.exists() and not path.is_file()
    path = path if special else Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        if special:  # root would replace /dev/null for the whole machine
            with open(path, "wb", buffering=0) as file:
                yield cast(BinaryIO, file)
            return
        with open(temporary, "xb", buffering=0) as file:
            yield cast(BinaryIO, file)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno:
            error.filename = str(path)  # a full disk names no file, and the temporary one means nothing to a user
        raise
    sync_folder(path.parent)


@contextmanager
def lock(path: Path, patience: float = math.inf) -> Iterator[BinaryIO]:
    """Holds the lock file `path`, which the kernel gives back when its holder ends, however it ends.

    A child that inherits the file holds it too.

    Raises BlockingIOError, whose text is who has it, where that takes more than `patience` seconds; a file system
    without locks is warned about.
    """
    deadline = time.monotonic() + patience
    with open(path, "a+b", buffering=0) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    raise BlockingIOError(file.read(200).decode(errors="replace") or "unknown process") from None
                time.sleep(0.05)
            except OSError as error:
                log.warning("%s cannot be locked (%s): one process at a time, please", path, error.strerror)
                break
        with suppress(OSError):  # a full disk: the name is a courtesy
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield file


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable: without it a power cut can take back a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Removes the temporary files that a killed `replacing` left in `folder`; the caller is its only writer."""
    for name in os.listdir(folder):
        if re.fullmatch(r"\..+\.[0-9a-f]{8}\.tmp", name):
            (folder / name).unlink(missing_ok=True)


def _filesystem(uri: str) -> tuple[Any, str]:
    refuse_secrets(uri)
    with told(uri):
        import fsspec  # type: ignore[import-untyped]  # 0.1 s that a local run need not pay

        filesystem, path = fsspec.url_to_fs(uri)
        return filesystem, str(path)


def _make_folder(folder: Path) -> None:
    """Makes `folder` and those above it, durably."""
    if not folder.is_dir():
        if folder.parent != folder:
            _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        with suppress(PermissionError):  # what may be passed through and not read cannot be synced
            sync_folder(folder.parent)
