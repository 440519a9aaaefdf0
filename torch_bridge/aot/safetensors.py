"""The safetensors format: 8 bytes with the header's length, the header as JSON, then the tensors. In a file of its own or inside another."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from typing import IO, Any, BinaryIO, NamedTuple

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """A tensor in a file: `nbytes` bytes from `start` on, counted from the file's beginning."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


def header(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """What stands before tensors (name, dtype, shape) that follow in this order. Raises KeyError for a dtype that the format does not have."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        described[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def entries(file: BinaryIO, start: int, size: int) -> dict[str, Entry]:
    """What the `size` bytes from `start` on hold. Raises ValueError, saying what is wrong, for bytes that are not in this format."""
    file.seek(start)
    length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else size
    if length > size - 8:
        raise ValueError(f"{size} bytes cannot hold a header of {length}")
    try:
        described = json.loads(file.read(length))
        found = {name: _entry(start + 8 + length, d) for name, d in described.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header cannot be read ({error!r})") from error
    for name, e in found.items():
        if e.start + e.nbytes > start + size or e.nbytes != e.dtype.itemsize * math.prod(e.shape):
            raise ValueError(f"{size} bytes do not hold {name} as its header says")
    return found


def _entry(base: int, described: Mapping[str, Any]) -> Entry:
    start, end = described["data_offsets"]
    return Entry(DTYPES[described["dtype"]], tuple(described["shape"]), base + start, end - start)


def raw(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's bytes, in order."""
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def write(file: IO[bytes], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors, those of a device one after the other. Raises KeyError for a dtype that the format does not have."""
    file.write(header((name, t.dtype, tuple(t.shape)) for name, t in tensors.items()))
    for t in tensors.values():
        if t.numel():
            file.write(raw(t.detach().cpu()))


def tensor(memory: Any, entry: Entry) -> torch.Tensor:
    """A tensor in mapped memory (an array of the file's bytes)."""
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=entry.dtype)
    found = torch.from_numpy(memory[entry.start : entry.start + entry.nbytes])
    found = found.clone() if entry.start % entry.dtype.itemsize else found
    return found.view(entry.dtype).reshape(entry.shape)
