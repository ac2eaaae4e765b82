"""Bytes at a URI: a name holds the old bytes or the new, never half. And locks, so that one process writes.

A `Store` is a folder, on a disk or wherever fsspec reaches (`s3://`, `gs://`, `az://`, `memory://` ...). Below it are
the functions for single files: texts that are read from anywhere, and local ones that are written.
"""

import copy
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
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

log = logging.getLogger(__name__)

Bytes = bytes | bytearray | memoryview
T = TypeVar("T")

PIECE = 16 << 20  # bytes that go to a remote store, or come from it, at once; S3 takes 10,000 pieces for one name
PIECE_SECONDS = 60  # for one of them, after which the server is taken to be hung: s3fs would wait for ever
PROBE_SECONDS = 13  # with importing a driver no more than 15


def open_store(uri: str, patience: float = 60.0) -> "Store":
    """The folder at `uri`: a path, `file://`, or whatever fsspec knows. Nothing is looked at yet: see `Store.probe`.

    A passing fault of a remote store (no connection, no answer, a server's own fault) is tried again for `patience`
    seconds from its first time on. Raises ValueError where the URI is wrong, or no driver is known or installed for it.
    """
    return RemoteStore(uri, patience) if is_remote(uri) else LocalStore(local_path(uri))


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
            _within(PROBE_SECONDS, work)
        except _LateError:
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
        return self.folder / _checked(name)

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


class RemoteStore(Store):
    """A folder in whatever fsspec reaches: the names of a bucket that begin alike, in most."""

    clock = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    def __init__(self, uri: str, patience: float) -> None:
        shown = redact(uri)
        self.uri = shown if shown.endswith("://") else shown.rstrip("/")
        self._patience = patience
        self._torn: list[Any] = []  # uploads that ended early, and whose parts the server may still keep
        self._scheme = uri.partition("://")[0]
        self._uri, driver = uri, _DRIVERS.get(self._scheme)
        with _told(uri):
            import fsspec  # type: ignore[import-untyped]  # 0.1 s that a local run need not pay

            self._folder = str(fsspec.get_filesystem_class(self._scheme)._strip_protocol(uri)).rstrip("/")
        if driver and self._folder[:1] in ("", "/"):
            raise ValueError(f"{self.uri} names no bucket: {self._scheme}://BUCKET/FOLDER is wanted")

    @cached_property
    def _filesystem(self) -> Any:
        """The driver, made when it is first asked: to look for credentials can take some ten seconds."""
        import fsspec

        driver = _DRIVERS.get(self._scheme, "")
        for name in (driver, "azure.identity") if driver else ():
            logging.getLogger(name).setLevel(logging.CRITICAL)  # they log the whole trace of what they raise as well
        filesystem, _ = fsspec.url_to_fs(self._uri, **_OPTIONS.get(driver, {}))
        if driver == "s3fs":
            filesystem.retries = 1
        return filesystem

    def put(self, name: str, chunks: Iterable[Bytes]) -> None:
        path, place = self._path(name), self._place(name)
        once = iter(chunks) is chunks  # to go through it again would find nothing, and publish that
        if self._scheme in _DRIVERS:  # these show an object only once it is whole
            self._again(lambda: self._upload(path, chunks, place), once)
            return
        temporary = self._path(f".{name}.{secrets.token_hex(4)}.tmp")

        def work() -> None:
            with _told(place):
                self._filesystem.makedirs(self._folder, exist_ok=True)
            self._upload(temporary, chunks, place)
            with _told(place):
                self._filesystem.mv(temporary, path)

        try:
            self._again(work, once)
        except BaseException:
            with suppress(Exception):
                self._filesystem.rm_file(temporary)
            raise

    def read(self, name: str) -> bytes:
        path = self._path(name)
        return self._ask(name, lambda: bytes(self._filesystem.cat_file(path)))

    def open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_Reader(self, name), PIECE))

    def size(self, name: str) -> int:
        path = self._path(name)
        return self._ask(name, lambda: int(self._info(path)["size"]))

    def names(self) -> list[str]:
        return self._ask("", self._list)

    def delete(self, name: str) -> None:
        path = self._path(name)

        def work() -> None:
            with suppress(FileNotFoundError):
                self._filesystem.rm_file(path)
            with suppress(FileNotFoundError):  # a server may say yes and do nothing: look again
                self._info(path)
                raise PermissionError("it was told to go and is still there")

        self._ask(name, work)

    def remove_leftovers(self) -> None:
        pass

    def free(self) -> int | None:
        return None

    def path(self, name: str) -> Path | None:
        _checked(name)
        return None

    def probe(self) -> None:
        quick = copy.copy(self)
        quick._patience = 5  # leaves the driver's own tries some of the 15 seconds
        try:
            Store.probe(quick)
        finally:
            quick._patience = 0  # for the thread that may be left behind

    def fetch(self, name: str, start: int, end: int) -> bytes:
        """The bytes [start, end) of `name`."""
        path = self._path(name)
        return self._ask(name, lambda: bytes(self._filesystem.cat_file(path, start=start, end=end)))

    def _upload(self, path: str, chunks: Iterable[Bytes], place: str) -> None:
        def ask(work: Callable[[], T]) -> T:  # each call for itself: what `chunks` raises is the caller's
            with _told(place):
                return _within(PIECE_SECONDS, work)

        file = ask(lambda: self._filesystem.open(path, "wb", block_size=PIECE))
        try:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                for start in range(0, len(view), PIECE):  # the file buffers what it is given: a piece, not the whole
                    ask(partial(file.write, view[start : start + PIECE]))
            ask(file.close)
            self._discard_torn()
        except BaseException:
            # Closing it, as leaving a `with` or forgetting it does, would publish what was written so far.
            with suppress(AttributeError):  # a memory file's cannot be set, nor does closing one do harm
                file.closed = True
            self._torn.append(file)
            self._discard_torn()
            raise

    def _discard_torn(self) -> None:
        for file in list(self._torn):
            with suppress(Exception):  # again after the next upload, when the server may be back
                if hasattr(file, "discard"):
                    file.discard()
                self._torn.remove(file)

    def _list(self) -> list[str]:
        self._filesystem.invalidate_cache()
        try:
            found = self._filesystem.ls(self._folder, detail=True)
        except FileNotFoundError:
            if self._scheme in _DRIVERS:  # no name begins so; or there is no bucket, and that is for the user to know
                bucket = self._folder.partition("/")[0]
                try:
                    self._filesystem.info(bucket)
                except FileNotFoundError:
                    raise FileNotFoundError("there is no such bucket: make it, or correct the name") from None
                except PermissionError:
                    pass  # to list in it is not to ask about it
            return []
        paths = [entry["name"] for entry in found if entry["type"] != "directory"]
        names = [path.rsplit("/", 1)[1] for path in paths if path.startswith(self._folder + "/")]
        return sorted(name for name in names if name and name[0] != ".")

    def _info(self, path: str) -> dict[str, Any]:
        self._filesystem.invalidate_cache()
        info = self._filesystem.info(path)
        if info["type"] == "directory":
            raise FileNotFoundError(path)
        return cast(dict[str, Any], info)

    def _path(self, name: str) -> str:
        return f"{self._folder}/{_checked(name)}"

    def _late(self) -> str:
        driver = self.__dict__.get("_filesystem")
        for attribute in ("_s3.meta.endpoint_url", "_location", "service_client.url"):  # s3fs, gcsfs, adlfs
            with suppress(AttributeError):
                address = redact(str(attrgetter(attribute)(driver)))
                return f"no answer from {address}: see whether it is up and can be reached"
        return f"the driver is still looking for credentials: {_cure(self._scheme)}"

    def _place(self, name: str) -> str:
        return self.uri if name[:1] in ("", ".") else f"{self.uri}/{name}"

    def _ask(self, name: str, work: Callable[[], T]) -> T:
        """What `work`, which asks the driver about `name`, returns at last."""

        def told() -> T:
            with _told(self._place(name)):
                return work()

        return self._again(told)

    def _again(self, work: Callable[[], T], once: bool = False) -> T:
        """What `work` returns, which is done again after passing faults until `patience` is at its end, or `once`."""
        deadline, pause = math.inf, 0.25
        while True:
            try:
                return work()
            except (ConnectionError, TimeoutError) as error:
                first, deadline = deadline == math.inf, min(deadline, self.clock() + self._patience)
                if once or self.clock() + pause > deadline:
                    raise
                if first:
                    log.warning("%s; trying again for %g s", error, self._patience)
                self.sleep(pause)
                pause = min(2 * pause, 8)


class _Reader(io.RawIOBase):
    """The bytes of a name in a remote store, fetched in ranges: a fault costs one range again, not all."""

    def __init__(self, store: RemoteStore, name: str) -> None:
        self._store, self._name, self._size, self._at = store, name, store.size(name), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        piece = self._take(len(view))
        view[: len(piece)] = piece
        return len(piece)

    def readall(self) -> bytes:
        return b"".join(iter(lambda: self._take(PIECE), b""))  # its own would ask for a few KiB at a time

    def _take(self, count: int) -> bytes:
        end = min(self._at + min(count, PIECE), self._size)
        piece = self._store.fetch(self._name, self._at, end) if self._at < end else b""
        self._at += len(piece)
        return piece


def redact(text: str) -> str:
    """`text` (a URI, or a message with some in it) without passwords, keys, tokens and the queries of URLs."""
    text = re.sub(r"(://)[^/@\s]*:(?!\d+/)(?:[^/\s]*@|[^@\s]*@)", r"\1", text)
    text = re.sub(r"(\bhttps?://)[^/@\s]+@", r"\1", text)
    text = re.sub(r"(://[^\s?]*)\?[^\s\"'<>)]*", r"\1", text)
    return _SECRET.sub(r"\1...", text)


_SECRET = re.compile(
    r"(?i)(\b[\w-]*(?:signature|credential|token|secret|passw(?:or)?d|key(?:_?id)?|sig)[\"']?\s*[=:]\s*[\"']?"
    r"|\b(?:bearer|basic|sharedkey)\s+|\b(?=(?:AKIA|ASIA)[0-9A-Z]{16}\b))[^\s&,;)\"']+"
)


@contextmanager
def _told(uri: str) -> Iterator[None]:
    """Turns whatever a driver raises into an OSError or a ValueError of one line: `uri`, what is wrong, the cure."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # drivers have their own kinds, and to name them is to import them
        raise _translated(error, redact(uri)) from None  # their chains quote keys and signed queries


def _translated(error: Exception, uri: str) -> OSError | ValueError:
    chain: list[Any] = [error]
    while link := chain[-1].__cause__ or (None if chain[-1].__suppress_context__ else chain[-1].__context__):
        chain.append(link)
    kinds = {kind.__name__ for link in chain for kind in type(link).__mro__}
    replies = [link.response for link in chain if isinstance(getattr(link, "response", None), dict)]  # botocore's
    said = {str(getattr(link, key, None)) for link in chain for key in ("status", "status_code", "code", "error_code")}
    said |= {str(reply.get("Error", {}).get("Code")) for reply in replies}
    said |= {str(reply.get("ResponseMetadata", {}).get("HTTPStatusCode")) for reply in replies}
    text = " ".join(redact(str(error)).partition("RequestId:")[0].split()) or type(error).__name__
    text = text if len(text) <= 300 else text[:300] + "..."
    scheme = uri.partition("://")[0]
    if kinds & _NO_CREDENTIALS:
        return PermissionError(f"{uri}: no credentials were found ({text}): {_cure(scheme)}")
    if "NoSuchUpload" in said:
        return ConnectionError(f"{uri}: the server has forgotten the parts that it was sent ({text})")
    if said & {"401", "403"} or "PermissionError" in kinds or text.startswith("Forbidden"):
        return PermissionError(f"{uri}: no right, or a wrong key ({text}): get the right there, or {_cure(scheme)}")
    if kinds & _TIMEOUTS:
        return TimeoutError(f"{uri}: no answer in time ({text}): see whether the server is up, and the way to it")
    if kinds & _CONNECTIONS or any(re.fullmatch(r"5\d\d|429|408", status) for status in said):
        return ConnectionError(
            f"{uri}: the server cannot serve this now ({text}): see whether it is up and can be reached"
        )
    # After those: a driver may look on, and fail, when one look found nothing. That is no proof of absence.
    if said & {"NoSuchBucket", "ContainerNotFound"}:
        return FileNotFoundError(f"{uri}: there is no such bucket: make it, or correct the name")
    if "404" in said or "FileNotFoundError" in kinds:
        return FileNotFoundError(f"{uri}: {text}" if "bucket:" in text else f"{uri} does not exist")
    if "ImportError" in kinds:
        driver = _DRIVERS.get(scheme)
        return ValueError(f"{uri}: {text}" + f": python -m pip install {driver}" * bool(driver))
    if "NotImplementedError" in kinds:
        return ValueError(f"{uri}: this kind of store cannot do that ({text}): name another")
    if kinds & {"ValueError", "TypeError", "ParamValidationError"} or "InvalidBucketName" in said:
        return ValueError(f"{uri}: {text}" + f": {_cure(scheme)}" * ("unable to connect" in text))  # adlfs
    return OSError(f"{uri}: {text}")


def _cure(scheme: str) -> str:
    return _CURES.get(_DRIVERS.get(scheme, ""), "see what its driver's documentation says of credentials")


# How to give a driver credentials.
_CURES = {
    "s3fs": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (AWS_ENDPOINT_URL if not at Amazon)",
    "gcsfs": "set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run `gcloud auth application-default login`",
    "adlfs": "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
# Names of exceptions (of any in the chain, or a base) in botocore, aiohttp, requests, google.auth and azure.
_NO_CREDENTIALS = {
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound", "SSOError",
    "GoogleAuthError", "ClientAuthenticationError",
}  # fmt: skip
_TIMEOUTS = {"TimeoutError", "ConnectTimeoutError", "ReadTimeoutError", "Timeout"}
_CONNECTIONS = {
    "ConnectionError", "EndpointConnectionError", "ConnectionClosedError", "HTTPClientError", "ClientConnectionError",
    "ClientPayloadError", "ServiceRequestError", "ServiceResponseError", "IncompleteReadError", "gaierror",
}  # fmt: skip


class _LateError(TimeoutError):
    """What `_within` waited for did not happen in time."""


def _within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns or raises; done in a thread, which is left behind with _LateError when it takes longer."""
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001  # raised below
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    if not results:
        raise _LateError(f"nothing came in {seconds} s")
    return results[0]


def _checked(name: str) -> str:
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
    with _told(uri):
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
    with _told(uri):
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
    with suppress(PermissionError), _told(uri):  # what may be read and not listed
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
        raise FileNotFoundError(f"{uri}: no such file, or no file in this folder or of this pattern")
    return [filesystem.unstrip_protocol(name) if is_remote(uri) else name for name in sorted(names)]


def size(uri: str) -> int:
    """Bytes at `uri`, 0 where a remote store does not tell; raises as `open_read` does."""
    if not is_remote(uri):
        return local_path(uri).stat().st_size
    filesystem, path = _filesystem(uri)
    with _told(uri):
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


# What bounds the drivers' own tries in a store: its patience goes on from there.
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3fs": {"config_kwargs": {"connect_timeout": 5, "read_timeout": 15, "retries": {"total_max_attempts": 1}}},
    "gcsfs": {"requests_timeout": 60},
    "adlfs": {"connection_timeout": 5, "read_timeout": 30},
}
_DRIVERS = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}


def _filesystem(uri: str) -> tuple[Any, str]:
    with _told(uri):
        import fsspec

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
