"""The state of a run at a moment as one block of bytes, in the safetensors layout.

    8 bytes   length of the header, little-endian
    header    JSON: {"__metadata__": {"mingpt": <JSON text>}, <name>: {"dtype", "shape", "data_offsets"}, ...}, padded
    tensors   raw little-endian bytes, one after the other without gaps, the widest dtypes first so that all are aligned

Any safetensors reader opens it, and nothing in it can execute. The bytes are written in place into one buffer and read
as views of one, so neither way needs a second copy of the state.
"""

import hashlib
import json
import math
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import numpy as np
import torch
import xxhash
from torch import Tensor

FORMAT_VERSION = 1
_DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "U8": torch.uint8,
    "I8": torch.int8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PAGE = 4096  # bytes; where the tensors start: a header of a few more digits leaves an old buffer large enough
_HEADER_LIMIT = 100 << 20  # bytes; safetensors' own limit


@dataclass(frozen=True)
class Image:
    """A decoded image: `metadata` as it was given to `encode`, `tensors` as views of the buffer."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def encode(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, object],
    buffer: Tensor | None = None,
    non_blocking: bool = False,
) -> Tensor:
    """Writes an image and returns its bytes (uint8), inside `buffer` (uint8, on the CPU) where that is large enough.

    With `non_blocking` what comes from a CUDA device is there once its current stream is done.
    Raises TypeError for a dtype that the layout has no name for.
    """
    return pack(tensors, _as_text(metadata), buffer, non_blocking)


def encoded_size(tensors: Mapping[str, Tensor], metadata: Mapping[str, object]) -> int:
    """How many bytes `encode` would write."""
    return _plan(tensors, _as_text(metadata))[2]


def _as_text(metadata: Mapping[str, object]) -> dict[str, str]:
    return {"mingpt": json.dumps({"format_version": FORMAT_VERSION, **metadata})}


def pack(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    buffer: Tensor | None = None,
    non_blocking: bool = False,
) -> Tensor:
    """As `encode`, with any metadata: a safetensors file. This one pass is the only copy of the tensors."""
    header, ordered, total = _plan(tensors, metadata)
    if buffer is None or buffer.numel() < total:
        buffer = torch.empty(total, dtype=torch.uint8)
    buffer = buffer[:total]
    first = len(header)
    buffer[:first] = torch.frombuffer(header, dtype=torch.uint8)
    for name in ordered:
        tensor = tensors[name].detach()
        size = tensor.numel() * tensor.element_size()
        if size:
            place = buffer[first : first + size].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor, non_blocking=non_blocking)
        first += size
    return buffer


def _plan(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytearray, list[str], int]:
    """The bytes before the tensors, the names of these in their order, and the bytes of all."""
    assert sys.byteorder == "little", "the layout is little-endian"
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(f"an image cannot hold {name}: {tensor.dtype}")
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name in ordered:
        start, end = end, end + tensors[name].numel() * tensors[name].element_size()
        header[name] = {
            "dtype": _NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _PAGE)
    return bytearray(len(text).to_bytes(8, "little") + text), ordered, 8 + len(text) + end


def decode(data: Tensor, source: str) -> Image:
    """Reads an image from its bytes (uint8); `source` names them in errors.

    Raises ValueError, one line, for anything that is not a whole image of ours.
    """
    texts, tensors = unpack(data, source)
    return Image(_metadata(texts, source), tensors)


def read_metadata(file: BinaryIO, size: int, source: str) -> dict[str, Any]:
    """The metadata of the image of `size` bytes that `file` begins with; no more than its header is read.

    Raises ValueError as `decode` does.
    """
    length = _header_length(file.read(8), size, source)
    return _metadata(_header(file.read(length), source)[0], source)


def _metadata(texts: Mapping[str, Any], source: str) -> dict[str, Any]:
    if "mingpt" not in texts:
        raise ValueError(f"{source} is no snapshot image of mingpt; GPT-2's weights: python -m mingpt.interop import")
    try:
        metadata = json.loads(texts["mingpt"])
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{source} is no snapshot image of mingpt: its header cannot be read ({brief(error)})"
        ) from error
    version = metadata.get("format_version") if isinstance(metadata, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{source} has image format {version!r:.50}, this mingpt reads {FORMAT_VERSION}: update the older one"
        )
    return cast(dict[str, Any], metadata)


def unpack(data: Tensor, source: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata and the tensors, views of `data` (uint8), of any safetensors file.

    Every size and offset is checked before it is used. Raises ValueError, one line, where it is not whole.
    """
    length = _header_length(data[:8].numpy().tobytes(), data.numel(), source)
    metadata, entries = _header(data[8 : 8 + length].numpy().tobytes(), source)
    body = data[8 + length :]
    tensors = {name: _view(body, name, entry, source) for name, entry in entries.items()}
    expected = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if expected != body.numel():
        raise ValueError(f"{source} is damaged: its tensors take {expected} bytes, but {body.numel()} are there")
    return metadata, tensors


def _header_length(first: bytes, total: int, source: str) -> int:
    length = int.from_bytes(first, "little")
    if total < 8 or length > min(total - 8, _HEADER_LIMIT):
        raise ValueError(f"{source} is no safetensors file, or cut short (header length {length}, file {total} bytes)")
    return length


def _header(text: bytes, source: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata, and what is said of the tensors."""
    try:
        entries = json.loads(text)
        return dict(entries.pop("__metadata__", {})), entries
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{source} is no safetensors file: its header cannot be read ({brief(error)})") from error


def brief(error: Exception) -> str:
    """A parser's error without the text that it could not read: a header can have megabytes."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


def _view(body: Tensor, name: str, entry: object, source: str) -> Tensor:
    try:
        fields = cast(dict[str, Any], entry)
        dtype, shape, (start, end) = _DTYPES[fields["dtype"]], fields["shape"], fields["data_offsets"]
        valid = (
            all(type(number) is int and number >= 0 for number in (*shape, start, end))
            and end - start == math.prod(shape) * dtype.itemsize
            and end <= body.numel()
        )
        if valid and start == end:
            return torch.empty(shape, dtype=dtype)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{source} is damaged: its entry for {name!r:.200} cannot be read ({brief(error)})") from error
    if not valid:
        raise ValueError(f"{source} is damaged: its entry for {name!r:.200} does not fit ({entry!r:.200})")
    piece = body[start:end]
    if piece.storage_offset() % dtype.itemsize:  # others do not align: a view is not possible, a copy is
        piece = piece.clone()
    return piece.view(dtype).view(shape)


def rng_tensors(device: torch.device) -> dict[str, Tensor]:
    """The states of the generators of python, numpy, torch and `device`, as tensors on the CPU."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states = {
        "rng.python": torch.tensor(words),
        "rng.python_gauss": torch.tensor([math.nan if gauss is None else gauss], dtype=torch.float64),
        "rng.numpy": torch.tensor([*map(int, keys), position, has_gauss]),
        "rng.numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "rng.torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["rng.cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_rng(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Sets the generators to what `rng_tensors` gave; a device that the state does not know keeps its own."""
    gauss = float(states["rng.python_gauss"])
    random.setstate((3, tuple(states["rng.python"].tolist()), None if math.isnan(gauss) else gauss))
    *keys, position, has_gauss = states["rng.numpy"].tolist()
    cached = float(states["rng.numpy_gauss"])
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["rng.torch"].clone())
    if device.type == "cuda" and "rng.cuda" in states:
        torch.cuda.set_rng_state(states["rng.cuda"].clone(), device)


def sha256s(tensors: Mapping[str, Tensor]) -> tuple[str, str]:
    """`weights_sha256` and `state_sha256` of an image's tensors: equal bits, equal sums.

    The first covers `model.*` sorted by name, the second `optimizer.*` after them; of each tensor the name, the dtype,
    the shape and the little-endian bytes.
    """
    digest = hashlib.sha256()
    sums = []
    for prefix in ("model.", "optimizer."):
        _feed(digest, {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)})
        sums.append(digest.copy().hexdigest())
    return sums[0], sums[1]


def xxh3(tensors: Mapping[str, Tensor]) -> str:
    """A fast sum of all `tensors`, for the eyes of ranks: by name, as in `sha256s`."""
    digest = xxhash.xxh3_64()
    _feed(digest, tensors)
    return digest.hexdigest()


def _feed(digest: Any, tensors: Mapping[str, Tensor]) -> None:
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {_NAMES[tensor.dtype]} {list(tensor.shape)}\n".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
