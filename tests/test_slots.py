"""An image in memory is the newest whole one at any moment, whatever its writer, its file or another user does."""

import fcntl
import io
import logging
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mingpt import slots
from mingpt.image import encode, encoded_size
from mingpt.slots import Slots, folder, known_generation, newest_image, remove_files

PAGE = 4096


def state(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model.w": torch.randn(300, 50, generator=generator),
        "model.half": torch.randn(7, generator=generator).to(torch.bfloat16),
        "optimizer.w.step": torch.tensor(float(step)),
    }


def facts(step: int, generation: int = 1) -> dict[str, Any]:
    return {"step": step, "generation": generation}


def opened(ram_dir: Path | None, run_id: str = "us") -> Slots:
    return Slots.open(ram_dir, run_id, encoded_size(state(0), facts(0)))


def write(ours: Slots, *steps: int, generation: int = 1) -> None:
    for step in steps:
        ours.begin(state(step), facts(step, generation))
        assert ours.finish()
    committed(ours)


def committed(ours: Slots) -> None:
    assert ours._committing
    ours._committing.result()


def found(ram_dir: Path, run_id: str = "us") -> tuple[int, int] | None:
    """(generation, step) of the newest image, after a look at each of its bits."""
    newest = newest_image(ram_dir, run_id)
    if newest is None:
        return None
    expected = state(newest[0][1])
    assert newest[1].tensors.keys() == expected.keys()
    assert all(torch.equal(newest[1].tensors[name], tensor) for name, tensor in expected.items())
    return newest[0]


def file_of(ram_dir: Path, k: int = 0, run_id: str = "us") -> Path:
    return ram_dir / f"mingpt-{os.getuid()}-{run_id}-{k}"


def test_an_image_outlives_its_writer_and_is_what_encode_makes(tmp_path: Path) -> None:
    ours = opened(tmp_path)
    assert newest_image(tmp_path, "us") is None
    write(ours, 3, 4)
    assert torch.equal(ours.pin(), encode(state(4), facts(4)))
    ours.close()
    assert found(tmp_path) == (1, 4)
    assert file_of(tmp_path).stat().st_mode & 0o777 == 0o600
    again = opened(tmp_path)  # the next process of the run
    assert os.listdir(tmp_path) == [file_of(tmp_path).name]
    for step in (5, 6, 7, 8):
        write(again, step, generation=2)
        assert found(tmp_path) == (2, step)
    assert known_generation(tmp_path, "us") == 2
    again.remove()
    assert os.listdir(tmp_path) == []
    assert known_generation(tmp_path, "us") == 0


def test_a_later_generation_is_newer_than_a_higher_step(tmp_path: Path) -> None:
    ours = opened(tmp_path)
    write(ours, 90)
    write(ours, 7, generation=2)
    assert found(tmp_path) == (2, 7)
    ours.close()


class Killed(Exception):
    pass


@pytest.mark.parametrize("point", range(8))
def test_a_kill_at_any_point_leaves_the_image_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: int
) -> None:
    """Points: before the slot is wiped, then 0 to 4 of 5 pieces of the image, before the commit, amid the commit."""
    ours = opened(tmp_path)
    write(ours, 1, 2, 3, 4)
    file, whole = ours._file, slots.encode
    assert file
    put = file.write_page

    def write_page(slot: int, content: bytes) -> None:
        wiping = not any(content)
        if wiping and point == 0 or not wiping and point == 6:
            raise Killed
        if not wiping and point == 7:
            put(slot, content[: len(content) // 2])
            raise Killed
        put(slot, content)

    def torn(tensors: Any, metadata: Any, buffer: Tensor, **options: Any) -> Tensor:
        if not 1 <= point <= 5:
            return whole(tensors, metadata, buffer, **options)
        data = encode(tensors, metadata)
        done = data.numel() * (point - 1) // 5
        buffer[:done] = data[:done]
        raise Killed

    monkeypatch.setattr(file, "write_page", write_page)
    monkeypatch.setattr(slots, "encode", torn)
    with pytest.raises(Killed):
        write(ours, 5)
    assert found(tmp_path) == (1, 4)
    headers = sorted(header.step for header, _ in slots._headers(tmp_path, "us"))
    assert headers == ([4] if point else [3, 4]), "nothing points to what is written over"
    ours.close()
    monkeypatch.undo()
    again = opened(tmp_path)
    write(again, 5)
    assert found(tmp_path) == (1, 5)
    again.close()


def flip(path: Path, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("place", ["magic", "run id", "step", "size", "digest", "check", "data", "last byte"])
def test_a_flipped_bit_is_seen_and_the_image_before_taken(tmp_path: Path, place: str) -> None:
    ours = opened(tmp_path)
    write(ours, 1, 2)
    slot, size = ours._newest, encoded_size(state(2), facts(2))
    assert slot is not None
    capacity = ours._places[0].numel()
    ours.close()
    in_header = {"magic": 0, "run id": 9, "step": 80, "size": 104, "digest": 112, "check": 120}
    in_data = {"data": size // 2, "last byte": size - 1}
    at = slot * PAGE + in_header[place] if place in in_header else 3 * PAGE + slot * capacity + in_data[place]
    flip(file_of(tmp_path), at)
    assert found(tmp_path) == (1, 1)


@pytest.mark.parametrize("size", [0, 1, PAGE, 2 * PAGE + 100, 3 * PAGE, 3 * PAGE + 5000])
def test_a_cut_file_holds_no_image_and_is_used_again(tmp_path: Path, size: int) -> None:
    ours = opened(tmp_path)
    write(ours, 1)
    ours.close()
    os.truncate(file_of(tmp_path), size)
    assert found(tmp_path) is None
    again = opened(tmp_path)
    write(again, 2)
    assert found(tmp_path) == (1, 2)
    again.close()


@pytest.mark.parametrize("size", [2**62, 2**64 - 1, 10**9])
def test_a_huge_size_takes_no_memory(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    header = slots._Header(generation=9, step=9, sequence=9, offset=3 * PAGE, size=size, digest=0)
    file_of(tmp_path).write_bytes(header.to_bytes("us").ljust(4 * PAGE, b"\0"))
    monkeypatch.setattr(slots.torch, "empty", lambda *_, **__: pytest.fail("memory was taken"))
    assert newest_image(tmp_path, "us") is None
    assert known_generation(tmp_path, "us") == 0


class Piecemeal(io.FileIO):
    """As Linux, which gives 2 GiB at most at once, but a smaller most."""

    def readinto(self, buffer: Any) -> int | None:
        return super().readinto(memoryview(buffer)[:20_000])


def test_an_image_that_no_single_read_gives_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = opened(tmp_path)
    write(ours, 1)
    ours.close()

    def opening(file: int, mode: str, buffering: int = -1) -> Any:
        return io.BufferedReader(Piecemeal(file)) if buffering else Piecemeal(file)

    monkeypatch.setattr(slots.os, "fdopen", opening)
    assert found(tmp_path) == (1, 1)


def test_another_run_is_another_file_and_never_touched(tmp_path: Path) -> None:
    theirs = opened(tmp_path, "them")
    write(theirs, 8)
    theirs.close()
    ours = opened(tmp_path)
    assert found(tmp_path) is None
    ours.remove()
    assert found(tmp_path, "them") == (1, 8)
    os.rename(file_of(tmp_path, run_id="them"), file_of(tmp_path))  # by its name ours, by its headers not
    assert found(tmp_path) is None
    assert known_generation(tmp_path, "us") == 0


def test_what_another_user_put_there_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = opened(tmp_path)
    write(theirs, 50)
    theirs.close()
    foreign = file_of(tmp_path).stat().st_ino
    monkeypatch.setattr(slots, "_is_ours", lambda facts: facts.st_ino != foreign)
    assert newest_image(tmp_path, "us") is None
    assert known_generation(tmp_path, "us") == 0
    ours = opened(tmp_path)
    write(ours, 1)
    assert found(tmp_path) == (1, 1)
    ours.remove()
    assert os.listdir(tmp_path) == [file_of(tmp_path).name]


def test_links_pipes_and_folders_of_its_name_are_no_files_of_ours(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"x" * 10)
    file_of(tmp_path, 0).symlink_to(target)
    os.mkfifo(file_of(tmp_path, 1))
    file_of(tmp_path, 2).mkdir()
    assert newest_image(tmp_path, "us") is None
    ours = opened(tmp_path)
    write(ours, 1)
    assert found(tmp_path) == (1, 1)
    assert file_of(tmp_path, 3).exists()
    ours.remove()
    assert target.read_bytes() == b"x" * 10


def test_of_two_writers_each_has_its_file_and_the_newest_image_is_found(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    write(first, 5)
    write(second, 6)
    assert found(tmp_path) == (1, 6)
    write(first, 7)
    assert found(tmp_path) == (1, 7)
    first.remove()
    assert found(tmp_path) == (1, 6), "the other lives"
    second.close()
    third = opened(tmp_path)
    write(third, 8)
    assert len(os.listdir(tmp_path)) == 2, "the first free name, though the file of step 6 is still needed"
    third.remove()
    assert os.listdir(tmp_path) == []


def test_the_lock_ends_with_its_process_though_a_forked_one_lives(tmp_path: Path) -> None:
    ours = opened(tmp_path)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)  # until the parent's end is closed
        os._exit(0)
    os.close(reading)
    assert ours._file and ours._file._lock is not None
    os.close(ours._file._lock)  # as the kernel does when we die
    ours._file._lock = None
    try:
        for _ in range(1000):  # the child may not have come to let go yet
            with open(file_of(tmp_path), "rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    os.sched_yield()
        else:
            pytest.fail("the forked process holds the lock")
    finally:
        os.close(writing)
        os.waitpid(child, 0)
    ours.close()


def test_a_reader_beside_a_writer_never_gets_a_mixture(tmp_path: Path) -> None:
    ours, end = opened(tmp_path), threading.Event()
    write(ours, 1)

    def write_on() -> None:
        step = 1
        while not end.is_set():
            step += 1
            write(ours, step)

    writer = threading.Thread(target=write_on)
    writer.start()
    try:
        steps = [newest[1] for _ in range(100) if (newest := found(tmp_path))]
    finally:
        end.set()
        writer.join()
    assert len(steps) > 10, "one that is overwritten while it is read is passed over"
    ours.close()


def test_a_pinned_image_stays_while_others_are_written(tmp_path: Path) -> None:
    for count in (3, 2):
        place = tmp_path / str(count)
        place.mkdir()
        ours = opened(place)
        if count == 2:  # as where memory is short
            ours._places.pop()
        write(ours, 1)
        pinned = ours.pin()
        for step in (2, 3, 4):
            write(ours, step)
            assert torch.equal(pinned, encode(state(1), facts(1)))
            assert found(place) == (1, step)
        ours.unpin()
        write(ours, 5, 6)
        assert not torch.equal(pinned, encode(state(1), facts(1)))
        ours.close()


def test_an_image_that_is_not_sound_is_none(tmp_path: Path) -> None:
    ours = opened(tmp_path)
    write(ours, 1)
    ours.begin(state(2), facts(2), sound=lambda: False)
    assert not ours.finish()
    committed(ours)
    assert found(tmp_path) == (1, 1)
    write(ours, 3)
    assert found(tmp_path) == (1, 3)
    ours.close()


def no_space(file: int, offset: int, size: int) -> None:
    raise OSError(28, "No space left on device")


def limited(file: int, offset: int, size: int) -> None:
    """A limit on the size of files, which the kernel keeps."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        _allocate(file, offset, size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


_allocate = os.posix_fallocate


@pytest.mark.parametrize("failure", [no_space, limited])
def test_too_little_space_is_told_once_with_both_numbers_and_saving_goes_on(
    tmp_path: Path,
    failure: Callable[[int, int, int], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(slots.os, "posix_fallocate", failure)
    ours = opened(tmp_path)
    (record,) = caplog.records
    assert "no RAM images" in record.message
    needed = 3 * PAGE + 2 * ours._places[0].numel()
    assert f"{needed:,} are needed" in record.message
    assert "bytes free" in record.message
    assert not ours.shared
    assert os.listdir(tmp_path) == []
    write(ours, 1)
    assert torch.equal(ours.pin(), encode(state(1), facts(1)))
    ours.remove()


def test_two_slots_do_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capacity = opened(None)._places[0].numel()

    def short(file: int, offset: int, size: int) -> None:
        if size > 3 * capacity:
            no_space(file, offset, size)
        _allocate(file, offset, size)

    monkeypatch.setattr(slots.os, "posix_fallocate", short)
    ours = opened(tmp_path)
    assert ours.shared
    write(ours, 1, 2, 3)
    assert found(tmp_path) == (1, 3)
    ours.close()
    again = opened(tmp_path)
    assert found(tmp_path) == (1, 3), "its two slots are used again"
    again.close()


def test_the_folder_is_the_settings_or_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert folder("auto", str(tmp_path)) == tmp_path
    assert folder("off", str(tmp_path)) is None
    monkeypatch.setattr(slots, "DEFAULT_FOLDER", tmp_path / "missing")
    assert folder("auto", None) is None
    assert caplog.records == []
    assert folder("auto", str(tmp_path / "missing")) is None
    assert "elastic.ram_dir" in caplog.text
    assert newest_image(None, "us") is None
    assert known_generation(None, "us") == 0
    remove_files(None, "us")


def test_what_is_passed_over_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = opened(tmp_path)
    write(ours, 1)
    ours.close()
    flip(file_of(tmp_path), 3 * PAGE + 50)
    with caplog.at_level(logging.INFO):
        assert newest_image(tmp_path, "us") is None
    assert "passing over the image of step 1" in caplog.text
