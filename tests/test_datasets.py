"""The data sets that are downloaded, from small stand-ins on a server of our own."""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from mingpt import storage
from mingpt.corpus import open_corpus


class Ranges(SimpleHTTPRequestHandler):
    """Serves parts of files, as the servers of data sets do."""

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        file = Path(self.translate_path(self.path))
        if asked is None or not file.is_file():
            return super().do_GET()
        content = file.read_bytes()
        part = content[int(asked[1]) : int(asked[2] or len(content)) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {asked[1]}-{int(asked[1]) + len(part) - 1}/{len(content)}")
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a server of tmp_path."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_tiny_shakespeare_is_verified(
    tmp_path: Path, server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("tinyshakespeare", ROOT / "data/tinyshakespeare/prepare.py")
    assert spec and spec.loader
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.URL.startswith("https://") and len(script.SHA256) == 64
    (tmp_path / "input.txt").write_bytes(b"First Citizen:\n")
    out = tmp_path / "out.txt"
    monkeypatch.setattr(sys, "argv", ["prepare.py", f"{server}/input.txt", f"--out={out}"])
    with pytest.raises(SystemExit, match=r"is not tiny-shakespeare: sha256 .*; a copy can be given"):
        script.main()
    assert not out.exists()
    monkeypatch.setattr(script, "SHA256", hashlib.sha256(b"First Citizen:\n").hexdigest())
    for source in (f"{server}/input.txt", str(tmp_path / "input.txt")):
        monkeypatch.setattr(sys, "argv", ["prepare.py", source, f"--out={out}"])
        script.main()
        assert out.read_bytes() == b"First Citizen:\n" and "wrote " in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["prepare.py", f"{server}/elsewhere.txt", f"--out={out}"])
    with pytest.raises(SystemExit, match="404"):
        script.main()


def test_what_changes_at_a_server_has_another_identity(tmp_path: Path, server: str) -> None:
    pytest.importorskip("aiohttp")
    (tmp_path / "a.txt").write_bytes(b"some text")
    before = storage.identity(f"{server}/a.txt")
    assert storage.identity(f"{server}/a.txt") == before
    os.utime(tmp_path / "a.txt", (1, 1))
    touched = storage.identity(f"{server}/a.txt")
    (tmp_path / "a.txt").write_bytes(b"other")
    os.utime(tmp_path / "a.txt", (1, 1))
    assert len({before, touched, storage.identity(f"{server}/a.txt")}) == 3


def test_fineweb_is_read_where_it_is(tmp_path: Path, server: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("aiohttp")
    from pyarrow import parquet

    texts = [f"web page {i}, " * 50 for i in range(300)]
    for number in range(2):
        table = pyarrow.table({"text": texts[number::2], "id": range(150)})
        parquet.write_table(table, tmp_path / f"{number:03d}_00000.parquet", row_group_size=50)
    command = [sys.executable, str(ROOT / "data/fineweb/prepare.py"), f"--source={server}", "--files=2", "--workers=1"]
    done = subprocess.run(
        [*command, f"--out={tmp_path / 'out'}"], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "no_proxy": "127.0.0.1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "300 documents" in done.stdout
    corpus = open_corpus(str(tmp_path / "out"), "char")
    assert corpus.tokenizer.vocab_size == 50257
    ids = corpus.tokens[np.arange(len(corpus.tokens))]
    assert np.count_nonzero(ids == 50256) == 300
    assert corpus.tokenizer.decode(ids[: len(ids) // 9]).startswith(texts[0] + "<|endoftext|>" + texts[2])
