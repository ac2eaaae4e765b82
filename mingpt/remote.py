"""A store anywhere: on a disk, or behind fsspec at `s3://`, `gs://`, `az://`, `memory://` and what else it knows."""

import copy
import io
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from mingpt.faults import DRIVERS, cure, redact, refuse_secrets, told, within
from mingpt.storage import PIECE, Bytes, LocalStore, Store, checked, is_remote, local_path

log = logging.getLogger(__name__)

T = TypeVar("T")

PIECE_SECONDS = 60  # for a piece, after which the server is taken to be hung: s3fs would wait for ever
# What bounds the drivers' own tries in a store: its patience goes on from there.
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3fs": {"config_kwargs": {"connect_timeout": 5, "read_timeout": 15, "retries": {"total_max_attempts": 1}}},
    "gcsfs": {"requests_timeout": 60},
    "adlfs": {"connection_timeout": 5, "read_timeout": 30},
}


def open_store(uri: str, patience: float = 60.0) -> Store:
    """The folder at `uri`: a path, `file://`, or whatever fsspec knows. Nothing is looked at yet: see `Store.probe`.

    A passing fault of a remote store (no connection, no answer, a server's own fault) is tried again for `patience`
    seconds from its first time on. Raises ValueError where the URI is wrong, or no driver is known or installed for it.
    """
    return RemoteStore(uri, patience) if is_remote(uri) else LocalStore(local_path(uri))


class RemoteStore(Store):
    """A folder in whatever fsspec reaches: the names of a bucket that begin alike, in most."""

    clock = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    def __init__(self, uri: str, patience: float) -> None:
        refuse_secrets(uri)
        shown = redact(uri)
        self.uri = shown if shown.endswith("://") else shown.rstrip("/")
        self._patience = patience
        self._torn: list[Any] = []  # uploads that ended early, and whose parts the server may still keep
        self._scheme = uri.partition("://")[0]
        self._uri, driver = uri, DRIVERS.get(self._scheme)
        with told(uri):
            import fsspec  # type: ignore[import-untyped]  # 0.1 s that a local run need not pay

            self._folder = str(fsspec.get_filesystem_class(self._scheme)._strip_protocol(uri)).rstrip("/")
        if driver and self._folder[:1] in ("", "/"):
            raise ValueError(f"{self.uri} names no bucket: {self._scheme}://BUCKET/FOLDER is wanted")

    @cached_property
    def _filesystem(self) -> Any:
        """The driver, made when it is first asked: to look for credentials can take some ten seconds."""
        import fsspec

        driver = DRIVERS.get(self._scheme, "")
        for name in (driver, "azure.identity") if driver else ():
            logging.getLogger(name).setLevel(logging.CRITICAL)  # they log the whole trace of what they raise as well
        filesystem, _ = fsspec.url_to_fs(self._uri, **_OPTIONS.get(driver, {}))
        if driver == "s3fs":
            filesystem.retries = 1
        return filesystem

    def put(self, name: str, chunks: Iterable[Bytes]) -> None:
        path, place = self._path(name), self._place(name)
        once = iter(chunks) is chunks  # to go through it again would find nothing, and publish that
        if self._scheme in DRIVERS:  # these show an object only once it is whole
            self._again(lambda: self._upload(path, chunks, place), once)
            return

        def work() -> None:
            # Another each time: a try that was given up may still be writing into its own.
            temporary = self._path(f".{name}.{secrets.token_hex(4)}.tmp")
            try:
                with told(place):
                    self._filesystem.makedirs(self._folder, exist_ok=True)
                self._upload(temporary, chunks, place)
                with told(place):
                    self._filesystem.mv(temporary, path)
            except BaseException:
                with suppress(Exception):
                    self._filesystem.rm_file(temporary)
                raise

        self._again(work, once)

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
        checked(name)
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
        piece = self._ask(name, lambda: bytes(self._filesystem.cat_file(path, start=start, end=end)))
        return piece if len(piece) <= end - start else piece[start:end]  # some web servers send all of it each time

    def _upload(self, path: str, chunks: Iterable[Bytes], place: str) -> None:
        def ask(work: Callable[[], T]) -> T:  # each call for itself: what `chunks` raises is the caller's
            with told(place):
                return within(PIECE_SECONDS, work)

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
            if self._scheme in DRIVERS:  # no name begins so; or there is no bucket, and that is for the user to know
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
        return f"{self._folder}/{checked(name)}"

    def _late(self) -> str:
        driver = self.__dict__.get("_filesystem")
        for attribute in ("_s3.meta.endpoint_url", "_location", "service_client.url"):  # s3fs, gcsfs, adlfs
            with suppress(AttributeError):
                address = redact(str(attrgetter(attribute)(driver)))
                return f"no answer from {address}: see whether it is up and can be reached"
        return f"the driver is still looking for credentials: {cure(self._scheme)}"

    def _place(self, name: str) -> str:
        return self.uri if name[:1] in ("", ".") else f"{self.uri}/{name}"

    def _ask(self, name: str, work: Callable[[], T]) -> T:
        """What `work`, which asks the driver about `name`, returns at last."""

        def asked() -> T:
            with told(self._place(name)):
                return work()

        return self._again(asked)

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
