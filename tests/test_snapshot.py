"""A snapshot is whole or not there; the newest valid one is found; only what may change changes on resume."""

import functools
import hashlib
import http.server
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import find_run, image_file, manifest_file, manifests, snapshots

from mingpt import storage
from mingpt.image import encode
from mingpt.lease import Run, record_run
from mingpt.model import GPT, GPTConfig
from mingpt.remote import open_store
from mingpt.resume import changes_on_resume
from mingpt.snapshot import Snapshots, _check_of, find_image, load_snapshot, load_weights, main, model_tensors
from mingpt.tokenizer import CharTokenizer

CONFIG = GPTConfig(vocab_size=3, block_size=8, n_layer=1, n_head=1, n_embd=8)


def image(step: int, run_id: str = "us", seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed + step)
    tensors = {f"model.{name}": tensor for name, tensor in model_tensors(GPT(CONFIG)).items()}
    tokenizer = CharTokenizer("\nab").to_dict()
    return encode(tensors, {"step": step, "run_id": run_id, "model": vars(CONFIG), "tokenizer": tokenizer})


def save(folder: Path, *steps: int, run_id: str = "us", generation: int = 1, keep_last: int = 9) -> None:
    for step in steps:
        snapshots(folder, run_id, keep_last).save(image(step, run_id), step=step, generation=generation, facts={})


def kept(folder: Path) -> list[int]:
    return sorted(manifest.facts["step"] for manifest in manifests(folder))


def test_a_later_generation_is_newer_than_a_higher_step(tmp_path: Path) -> None:
    save(tmp_path, 10, 50)
    save(tmp_path, 20, generation=2)
    found = snapshots(tmp_path, "us").newest()
    assert found is not None
    assert found[0].facts["step"] == found[1].metadata["step"] == 20


def test_the_manifest_names_the_bytes_and_is_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    replace = storage.replace_file
    monkeypatch.setattr(storage, "replace_file", lambda path, data: (order.append(path.suffix), replace(path, data)))
    save(tmp_path, 3)
    assert order == [".safetensors", ".json"]
    (manifest,) = manifests(tmp_path)
    content = image_file(manifest).read_bytes()
    assert manifest.facts["sha256"] == hashlib.sha256(content).hexdigest()
    assert manifest.facts["size"] == len(content)


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "manifest"])
def test_a_damaged_one_is_told_of_and_the_next_older_used(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, 2)
    newest = manifests(tmp_path)[0]
    content = bytearray(image_file(newest).read_bytes())
    if damage == "flip":
        content[-1] ^= 1
        image_file(newest).write_bytes(content)
    elif damage == "cut":
        image_file(newest).write_bytes(content[:-10])
    elif damage == "gone":
        image_file(newest).unlink()
    else:
        manifest_file(newest).write_text("{")
    with caplog.at_level(logging.WARNING):
        found = snapshots(tmp_path, "us").newest()
    assert found is not None
    assert found[0].facts["step"] == 1
    assert manifest_file(newest).stem in caplog.text


def test_a_manifest_without_an_end_is_a_damaged_one(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    manifest_file(manifests(tmp_path)[0]).write_text('{"a":' + "[" * 100_000)
    found = snapshots(tmp_path, "us").newest()
    assert found is not None and found[0].facts["step"] == 1


def test_a_folder_that_another_run_took_the_place_of_gets_nothing(tmp_path: Path) -> None:
    ours, store = snapshots(tmp_path / "store", "us"), tmp_path / "store"
    store.mkdir()
    ours.claim(Run("us", 1), tmp_path / "out", {})
    data = image(1)
    ours.save(data, step=1, generation=1, facts={})
    store.rename(tmp_path / "moved")
    snapshots(store, "other").store.put("run.json", [b'{"run_id": "other", "generation": 5}'])
    before = sorted(os.listdir(store))
    with pytest.raises(OSError, match=r"is the folder of another run by now \(other, this is us\)"):
        ours.save(data, step=2, generation=1, facts={})
    assert {*os.listdir(store)} - {"lease.json"} == {*before} - {"lease.json"}
    shutil.rmtree(store)
    (tmp_path / "moved").rename(store)
    ours.save(data, step=3, generation=1, facts={})
    ours.release()


def test_a_disk_without_room_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingpt.storage.shutil.disk_usage", lambda _: SimpleNamespace(free=image(1).numel() - 1))
    with pytest.raises(OSError, match="a snapshot takes 0.00 GB, and 0.00 GB are free: make room"):
        save(tmp_path, 1)
    assert os.listdir(tmp_path) == []


def test_a_folder_shows_its_own_run(tmp_path: Path) -> None:
    save(tmp_path, 1, run_id="us")
    save(tmp_path, 9, run_id="other")
    assert find_image(str(tmp_path))[1].metadata["step"] == 9, "nothing says whose it is"
    snapshots(tmp_path).store.put("run.json", [b'{"run_id": "us", "generation": 1}'])
    assert find_image(str(tmp_path))[1].metadata["step"] == 1


def test_verify_counts_what_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1, 2, 3)
    assert main(["verify", str(tmp_path)]) == 0
    newest, older, _ = manifests(tmp_path)
    manifest_file(older).unlink()
    assert main(["verify", str(tmp_path)]) == 0, "it may be on its way"
    assert "no: it has no manifest" in capsys.readouterr().out
    manifest_file(newest).write_text("null")
    for command in ("ls", "verify"):
        assert main([command, str(tmp_path)]) == 1
        assert f"no: its manifest is damaged  {newest.stem}" in capsys.readouterr().out


def test_none_valid_is_not_none_there(tmp_path: Path) -> None:
    assert snapshots(tmp_path, "us").newest() is None
    save(tmp_path, 1)
    image_file(manifests(tmp_path)[0]).write_bytes(b"")
    with pytest.raises(ValueError, match="none is a valid one"):
        snapshots(tmp_path, "us").newest()
    manifest_file(manifests(tmp_path)[0]).write_text("[]")
    with pytest.raises(ValueError, match="none is a valid one"):
        snapshots(tmp_path, "us").newest()


def test_what_cannot_be_read_is_not_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, 2)
    reader = "mingpt.snapshot.read_verified"
    with monkeypatch.context() as patch:
        patch.setattr(reader, lambda manifest: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(OSError, match="Input/output"):  # and not the older one in its place
            snapshots(tmp_path, "us").newest()

    ours = snapshots(tmp_path, "us")
    monkeypatch.setattr(ours.store, "read", lambda name: (_ for _ in ()).throw(ValueError("no JSON came")))
    with pytest.raises(ValueError, match="no JSON came"):  # of a driver, which says nothing of the manifest
        ours.newest()

    def refuse(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("mingpt.storage.os.scandir", refuse)
    for look in (
        lambda: snapshots(tmp_path, "us").newest(),
        lambda: find_run(tmp_path / "out", open_store(str(tmp_path))),
    ):
        with pytest.raises(PermissionError):
            look()


def test_a_disk_that_gives_back_other_bytes_is_an_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(path: Path, chunks: list[memoryview]) -> None:
        path.write_bytes(b"".join(chunks)[:-1] + b"?")

    monkeypatch.setattr(storage, "replace_file", damage)
    with pytest.raises(OSError, match="does not give back the bytes that were written"):
        save(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_removed_does_not_undo_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    save(tmp_path, 2, keep_last=1)
    assert "not removed" in caplog.text
    assert kept(tmp_path) == [1, 2]


def test_a_loss_that_is_no_number_is_never_the_best(tmp_path: Path) -> None:
    ours = snapshots(tmp_path, "us", keep_last=1)
    for step, loss in [(1, float("nan")), (2, 1.0), (3, 2.0), (4, 3.0)]:
        ours.save(image(step), step=step, generation=1, facts={"val_loss": loss})
    assert kept(tmp_path) == [2, 4]


def test_retention_keeps_the_last_the_pinned_and_the_best_of_this_run_only(tmp_path: Path) -> None:
    save(tmp_path, 1000, run_id="them")
    ours = snapshots(tmp_path, "us", keep_last=2, keep_interval=4)
    for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0), (6, 2.0), (7, 2.0)]:
        ours.save(image(step), step=step, generation=1, facts={"val_loss": loss})
    assert kept(tmp_path) == [2, 4, 6, 7, 1000]
    assert len(list(tmp_path.glob("*.safetensors"))) == 5


def test_one_that_wakes_late_removes_nothing_of_a_later_start(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (late,) = manifests(tmp_path)
    save(tmp_path, 2, 3, 4, generation=2)
    snapshots(tmp_path, "us", keep_last=1).prune(late)
    assert kept(tmp_path) == [1, 2, 3, 4]


def test_a_snapshot_that_someone_removed_meanwhile_does_not_end_the_run(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (saved,) = manifests(tmp_path)
    manifest_file(saved).unlink()
    snapshots(tmp_path, "us").prune(saved)
    assert image_file(saved).exists()


def test_nothing_is_deleted_before_the_newer_one_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, keep_last=1)
    replace = storage.replace_file

    def full(path: Path, chunks: list[memoryview]) -> None:
        replace(path, [chunk[: len(chunk) // 2] for chunk in chunks])

    monkeypatch.setattr(storage, "replace_file", full)
    with pytest.raises((OSError, ValueError)):
        save(tmp_path, 2, keep_last=1)
    assert kept(tmp_path) == [1]


def test_what_a_killed_save_left_goes_when_there_is_a_newer_snapshot_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    orphan = tmp_path / "step-000000002-g1-00000000.safetensors"
    orphan.write_bytes(image(2).numpy().tobytes())
    foreign = tmp_path / "step-000000003-g1-00000000.safetensors"
    foreign.write_bytes(image(3, run_id="them").numpy().tobytes())
    out = tmp_path / "out"
    out.mkdir()
    leftovers = [tmp_path / f".{orphan.name}.abcd1234.tmp", tmp_path / ".run.json.abcd1234.tmp"]
    for leftover in leftovers:
        leftover.write_bytes(b"half")
    (tmp_path / ".mail.tmp").write_bytes(b"someone's")
    older = tmp_path / "step-000000005-g0-00000000.safetensors"
    older.write_bytes(image(5).numpy().tobytes())
    ours = snapshots(tmp_path, "us")
    assert ours.newest() is not None
    assert f"3 IMAGE(S) WITHOUT A MANIFEST NOT USED, the newest is {foreign}" in caplog.text
    record_run(Run("us", 1), out, ours.store, {})
    ours.claim(Run("us", 2), out, {})
    assert orphan.exists(), "its manifest may have been lost"
    ours.save(image(2), step=2, generation=2, facts={})
    assert older.exists(), "it may have lost its manifest"
    assert not orphan.exists()
    assert not any(leftover.exists() for leftover in leftovers)
    assert (tmp_path / ".mail.tmp").exists()
    assert foreign.exists()
    assert kept(tmp_path) == [1, 2]


def test_images_without_any_manifest_are_told_of_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1, 2)
    for manifest in manifests(tmp_path):
        manifest_file(manifest).unlink()
    record_run(Run("us", 1), tmp_path, None, {})
    assert snapshots(tmp_path, "us").newest() is None
    assert "2 IMAGE(S) WITHOUT A MANIFEST NOT USED" in caplog.text
    run = find_run(tmp_path, open_store(str(tmp_path)))
    again = snapshots(tmp_path, run.run_id)
    again.claim(run, tmp_path, {})
    again.save(image(1, run.run_id), step=1, generation=run.generation, facts={})
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_whatever_is_noted_in_a_manifest_it_is_read_again(tmp_path: Path) -> None:
    noted = {"config": {10: 1, 9: 2, "x": None}, "val_loss": float("nan")}
    saved = snapshots(tmp_path, "us").save(image(1), step=1, generation=1, facts=noted)
    assert manifests(tmp_path) == [saved]


def test_any_folder_name_will_do(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9 \xf0\x9f\x90\x8c")
    folder.mkdir()
    save(folder, 1)
    found = snapshots(folder, "us").newest()
    assert found is not None
    assert found[1].metadata["step"] == 1


def test_a_folder_in_a_manifests_place_is_ignored(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-000000009-g1-00000000.json").mkdir()
    assert kept(tmp_path) == [1]


def test_replace_file_leaves_the_old_bytes_when_the_new_ones_fail(tmp_path: Path) -> None:
    path = tmp_path / "x"
    storage.replace_file(path, [b"old"])

    def failing():  # type: ignore[no-untyped-def]
        yield b"ne"
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        storage.replace_file(path, failing())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


BASE = {
    "name": "a", "optim.learning_rate": 1e-3, "train.max_steps": 100, "train.global_batch_size": 12, "seed": 1,
    "train.micro_batch_size": 2, "train.reduction": "fast", "dtype": "float32", "snapshot.keep_last": 2,
    "train.num_threads": 1, "model.n_layer": 2, "data.fingerprint": "f", "data.path": "x",
}  # fmt: skip


def test_operational_settings_and_more_steps_may_change_on_resume() -> None:
    now = BASE | {"name": "b", "snapshot.keep_last": 5, "data.path": "y", "train.num_threads": 2}
    assert changes_on_resume(BASE, now, "auto") == {}
    assert changes_on_resume(BASE, BASE | {"train.max_steps": 200}, "auto") == {"train.max_steps": (100, 200)}
    assert changes_on_resume(BASE | {"train.max_epochs": 1.0}, BASE | {"train.max_epochs": None}, "auto") == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optim.learning_rate", 1e-4),
        ("train.max_steps", 50),
        ("train.micro_batch_size", 4),
        ("train.reduction", "exact"),
    ],
)
def test_training_settings_change_only_when_it_is_said(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{key} was {BASE[key]} .* and is {value} now: .*resume=must.*--name="):
        changes_on_resume(BASE, BASE | {key: value}, "auto")
    assert changes_on_resume(BASE, BASE | {key: value}, "must") == {key: (BASE[key], value)}


@pytest.mark.parametrize("key", ["seed", "train.global_batch_size", "model.n_layer", "data.fingerprint"])
def test_what_the_position_counts_in_never_changes(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} was .* cannot change"):
        changes_on_resume(BASE, BASE | {key: "other"}, "must")


@pytest.mark.parametrize("key", ["train.micro_batch_size", "train.num_threads", "dtype", "compile"])
def test_exact_mode_fixes_what_its_bits_depend_on(key: str) -> None:
    exact = BASE | {"train.reduction": "exact"}
    with pytest.raises(ValueError, match=f"{key} was .* cannot change"):
        changes_on_resume(exact, exact | {key: "other"}, "must")


def test_loading_needs_nothing_but_the_image(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run" / "snapshots").mkdir(parents=True)
    save(tmp_path / "run" / "snapshots", 1, 2)
    newest = manifests(tmp_path / "run" / "snapshots")[0]
    alone = tmp_path / "copied.safetensors"
    alone.write_bytes(image_file(newest).read_bytes())
    torch.manual_seed(2)
    expected = GPT(CONFIG)
    caplog.set_level("INFO", "mingpt")
    for place in (alone, image_file(newest), manifest_file(newest), tmp_path / "run", tmp_path / "run" / "snapshots"):
        model, tokenizer, metadata = load_snapshot(str(place))
        assert metadata["step"] == 2
        assert not model.training
        assert tokenizer.decode([1, 2]) == "ab"
        assert torch.equal(model.transformer.wte.weight, expected.transformer.wte.weight)
    assert caplog.text.count("are not verified") == 1 and f"{alone} are not verified" in caplog.text


@pytest.mark.skipif(importlib.util.find_spec("aiohttp") is None, reason="pip install aiohttp")
def test_an_image_at_a_web_address_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "copied.safetensors").write_bytes(image(3).numpy().tobytes())
    for module in ("snapshot", "remote"):
        monkeypatch.setattr(f"mingpt.{module}.PIECE", 1000)  # several pieces, of a server that knows no ranges
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert load_snapshot(f"{address}/copied.safetensors")[2]["step"] == 3
        with pytest.raises(FileNotFoundError, match=f"there is no snapshot {address}/missing"):
            load_snapshot(f"{address}/missing.safetensors")
        server.shutdown()


def test_what_cannot_be_loaded_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no snapshot"):
        find_image(str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match="no snapshot is in"):
        find_image(str(tmp_path))
    (tmp_path / "x.safetensors").write_bytes(b"not one")
    with pytest.raises(ValueError, match="no safetensors file"):
        find_image(str(tmp_path / "x.safetensors"))
    save(tmp_path, 1)
    manifest = manifests(tmp_path)[0]
    content = bytearray(image_file(manifest).read_bytes())
    content[-1] ^= 1
    image_file(manifest).write_bytes(content)
    with pytest.raises(ValueError, match="sha256 differs"):
        find_image(str(image_file(manifest)))


@pytest.mark.parametrize("model", [{"n_layer": 10**7}, {"n_embd": 10**8, "n_head": 1}, {"unknown": 1}, {"n_embd": ""}])
def test_a_model_that_its_image_cannot_hold_takes_no_memory(tmp_path: Path, model: dict[str, object]) -> None:
    tokenizer = CharTokenizer("\nab").to_dict()
    data = encode({"model.x": torch.zeros(9)}, {"model": {"vocab_size": 3, **model}, "tokenizer": tokenizer})
    (tmp_path / "x.safetensors").write_bytes(data.numpy().tobytes())
    with pytest.raises(ValueError, match=r"x\.safetensors is damaged: it"):
        load_snapshot(str(tmp_path / "x.safetensors"))


def test_what_is_no_image_takes_no_memory_and_an_orphan_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"memory://{tmp_path}")
    store.put("x.safetensors", [b"<html>" * 100])
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "size", lambda store, name: 10**15)
        with pytest.raises(ValueError, match="no safetensors file"):
            find_image(f"memory://{tmp_path}/x.safetensors")
    ours = Snapshots(store, "us")
    ours.save(image(1), step=1, generation=1, facts={})
    store.put("step-000000002-g1-00000000.safetensors", [image(2).numpy().data])
    monkeypatch.setattr("mingpt.snapshot._read_image", lambda *_: pytest.fail("it was read whole"))
    ours.save(image(3), step=3, generation=1, facts={})
    assert "step-000000002-g1-00000000.safetensors" not in store.names()


def test_weights_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, 1)
    source, found = find_image(str(tmp_path))
    with pytest.raises(ValueError, match=r"transformer\.h\.1"):
        load_weights(GPT(GPTConfig(vocab_size=3, block_size=8, n_layer=2, n_head=1, n_embd=8)), found, source)


def test_tied_weights_and_wrappers_leave_no_trace_in_the_names() -> None:
    model = GPT(CONFIG)
    model.compile()
    names = set(model_tensors(model))
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names
    assert not any("_orig_mod" in name or "module." in name for name in names)


def test_the_command_lists_verifies_and_prunes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "snapshots", 1, 2, 3, 4)
    flipped = image_file(manifests(tmp_path / "snapshots")[0])
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    assert main(["ls", str(tmp_path)]) == 0, "its size is right"
    assert main(["verify", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert said.count("by its size") == 4 and said.count("  yes  ") == 3 and "no: the bytes of" in said
    assert main(["prune", "--keep-last=1", "--keep-interval=2", str(tmp_path / "snapshots")]) == 0
    assert kept(tmp_path / "snapshots") == [2, 3, 4], "the newest valid one; what is not is the user's"
    listing = [sys.executable, "-m", "mingpt.snapshot", "ls", str(tmp_path)]
    reading, writing = os.pipe()
    os.close(reading)  # as `| head` does when it has enough
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    ended = subprocess.run(listing, stdout=writing, stderr=subprocess.PIPE, env=buffered, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert main(["ls", "memory://me:planted@host/none"]) == 2
    assert "planted" not in capsys.readouterr().err


def test_content_cannot_point_out_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    save(folder, 1)
    manifest = manifests(folder)[0]
    facts = manifest.facts | {"image": "../../etc/passwd", "name": "/etc/passwd"}
    manifest_file(manifest).write_text(json.dumps(facts | {"check": _check_of(facts)}))
    assert image_file(manifests(folder)[0]).parent == folder
