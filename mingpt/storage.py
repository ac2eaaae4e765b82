"""Bytes at a URI: a name holds the old bytes or the new, never half. And locks, so that one process writes.

Local files are read and written here; whatever else fsspec knows (`memory://`, `https://`, `s3://` ...) can be read.
"""

import fcntl
import glob
import logging
import math
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

log = logging.getLogger(__name__)

Bytes = bytes | bytearray | memoryview


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
    return cast(BinaryIO, filesystem.open(path, "rb"))


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
    try:
        return bool(filesystem.isdir(path))
    except PermissionError:  # what may be read and not listed
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
        raise FileNotFoundError(f"{uri}: no such file, or no file in this folder or of this pattern")
    return [filesystem.unstrip_protocol(name) if is_remote(uri) else name for name in sorted(names)]


def size(uri: str) -> int:
    """Bytes at `uri`, 0 where a remote store does not tell; raises as `open_read` does."""
    if not is_remote(uri):
        return local_path(uri).stat().st_size
    filesystem, path = _filesystem(uri)
    return int(filesystem.size(path) or 0)


def replace_file(path: Path, chunks: Iterable[Bytes]) -> None:
    """Gives the name `path` the bytes of `chunks`, or leaves what was there; durable when it returns.

    The folder must exist. Raises OSError (disk full, no right) and whatever `chunks` raises; the temporary file is
    removed then. A kill leaves at most a file `.<name>.<random>.tmp`, which no reader looks at.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb", buffering=0) as file:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                while view:  # an unbuffered write may take a part only (2 GiB at most on Linux)
                    view = view[file.write(view) :]
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
    """Removes the temporary files that a killed `replace_file` left in `folder`; the caller is its only writer."""
    for name in os.listdir(folder):
        if re.fullmatch(r"\..+\.[0-9a-f]{8}\.tmp", name):
            (folder / name).unlink(missing_ok=True)


def _filesystem(uri: str) -> tuple[Any, str]:
    import fsspec  # type: ignore[import-untyped]  # 0.1 s that a local run need not pay

    try:
        return cast(tuple[Any, str], fsspec.url_to_fs(uri))
    except ImportError as error:
        raise ValueError(f"cannot read {uri}: {error}; install that, or copy the file to this machine") from error
