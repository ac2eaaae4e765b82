"""An image is a safetensors file that comes back as it was, and anything else is refused in one line."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mingpt.image import decode, encode, restore_rng, rng_tensors, sha256s


def state() -> dict[str, Tensor]:
    return {
        "model.w": torch.randn(3, 5),
        "model.half": torch.randn(7).to(torch.bfloat16),
        "model.flag": torch.tensor([True, False, True]),
        "optimizer.w.step": torch.tensor(3.0),
        "rng.torch": torch.randint(0, 255, (13,), dtype=torch.uint8),
        "rng.python": torch.tensor([2**40, -1]),
        "model.empty": torch.empty(0, 4),
    }


def test_round_trip() -> None:
    tensors, metadata = state(), {"step": 7, "text": "é“”\n", "loss": 0.1 + 0.2, "none": None}
    image = decode(encode(tensors, metadata), "x")
    assert image.metadata == {"format_version": 1, **metadata}
    assert image.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert image.tensors[name].dtype == tensor.dtype
        assert torch.equal(image.tensors[name], tensor), name


def test_any_safetensors_reader_opens_it(tmp_path: Path) -> None:
    tensors = state()
    (tmp_path / "x.safetensors").write_bytes(encode(tensors, {}).numpy().tobytes())
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_the_buffer_is_used_again_and_holds_its_own_copy() -> None:
    tensors = state()
    first = encode(tensors, {"step": 1})
    second = encode(tensors, {"step": 2}, first)
    assert second.data_ptr() == first.data_ptr()
    before = tensors["model.w"].clone()
    tensors["model.w"].add_(1)
    assert torch.equal(decode(second, "x").tensors["model.w"], before)


def damage(header: dict[str, Any], raw: bytearray, kind: str) -> bytes:
    length = int.from_bytes(raw[:8], "little")
    body = bytes(raw[8 + length :])
    if kind == "length":
        return (2**60).to_bytes(8, "little") + bytes(raw[8:])
    if kind == "cut":
        return bytes(raw[:-1])
    if kind == "longer":
        return bytes(raw) + b"x"
    if kind == "short":
        return b"abc"
    if kind == "no json":
        return bytes(raw[:8]) + b"\xff" * length + body
    if kind == "shape":
        header["model.w"]["shape"] = [3, -5]
    elif kind == "huge":
        header["model.w"]["shape"] = [2**40, 2**40]
    elif kind == "offsets":
        header["model.w"]["data_offsets"] = [0, 2**50]
    elif kind == "overflow":
        header["model.empty"]["shape"] = [0, 2**62, 2**62]
    elif kind == "metadata":
        header["__metadata__"] = 5
    elif kind == "dtype":
        header["model.w"]["dtype"] = "PICKLE"
    elif kind == "entry":
        header["model.w"] = 5
    elif kind == "foreign":
        header["__metadata__"] = {"format": "pt"}
    elif kind == "newer":
        header["__metadata__"] = {"mingpt": json.dumps({"format_version": 99})}
    elif kind == "long":
        header["__metadata__"] = {"mingpt": json.dumps({"format_version": "\n" * 2000})}
    elif kind == "long entry":
        header["model.w"]["shape"] = [3] * 2000
    elif kind == "overflow of int64":  # of which torch's error has two lines
        header["model.empty"]["shape"] = [0, 2**63]
    elif kind == "long name":
        header["model\n" * 2000] = header.pop("model.w") | {"dtype": "x" * 2000}
    elif kind == "long metadata":
        header["__metadata__"] = {"mingpt": "\n" * 2000}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


KINDS = "length cut longer short shape huge offsets overflow metadata dtype entry foreign newer long".split()
KINDS += ["no json", "long entry", "long name", "long metadata", "overflow of int64"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_whole_image_is_refused_in_one_line(kind: str) -> None:
    raw = bytearray(encode(state(), {"config": "x" * 1000}).numpy().tobytes())
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    bad = torch.frombuffer(bytearray(damage(header, raw, kind)), dtype=torch.uint8)
    with pytest.raises(ValueError, match="the-file") as error:
        decode(bad, "the-file")
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_unknown_dtypes_are_told_before_anything_is_written() -> None:
    with pytest.raises(TypeError, match=r"model\.c.*complex"):
        encode({"model.c": torch.zeros(2, dtype=torch.complex64)}, {})


def test_sums_cover_every_bit_name_and_shape_and_not_the_order() -> None:
    tensors = state()
    weights, whole = sha256s(tensors)
    assert sha256s(dict(reversed(tensors.items()))) == (weights, whole)
    assert sha256s(tensors | {"rng.torch": torch.zeros(1)}) == (weights, whole)
    moved = tensors | {"optimizer.w.step": torch.tensor(4.0)}
    assert sha256s(moved)[0] == weights
    assert sha256s(moved)[1] != whole
    for changed in ({"model.w": tensors["model.w"].view(5, 3)}, {"model.v": tensors["model.w"]}):
        assert sha256s(tensors | changed)[0] != weights
    bits = tensors["model.w"].clone()
    bits.view(torch.int32)[0, 0] ^= 1
    assert sha256s(tensors | {"model.w": bits})[0] != weights


def test_generators_go_on_where_they_were() -> None:
    device = torch.device("cpu")
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    random.gauss(0, 1)  # both keep a second normal number back
    np.random.randn()
    image = decode(encode(rng_tensors(device), {}), "x")

    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), *np.random.randn(3), *torch.rand(3).tolist()]

    expected = draw()
    draw()
    restore_rng(image.tensors, device)
    assert draw() == expected
