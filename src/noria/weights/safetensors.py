"""A strict reader of safetensors files, single and sharded, and of the JSON files beside them.

The format: header length u64 (little-endian) | header, JSON | data. The header maps each tensor to its dtype, its shape and its
range of bytes in the data; the ranges cover the data without holes or overlaps. A sharded checkpoint has an index,
`model.safetensors.index.json`, whose `weight_map` names the file of each tensor.

Everything is compared before a weight is read: each file of the index is there, holds exactly the tensors that the index says,
and is as long as its header says. Whatever is wrong is one `LoadError` that names the file. The data is mapped, not copied.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from noria.types import LoadError
from noria.weights.files import listed, map_file, parse_object, read_json
from noria.weights.quantize import FLOAT_TYPES, RawTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

# Bytes of an element. Only F32, F16 and BF16 can be weights; the others may stand in a file beside them.
_DTYPES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor's place: `start` counts from the beginning of the file."""

    shape: tuple[int, ...]
    dtype: str
    start: int
    nbytes: int


class SafetensorsFile:
    """One mapped file and its checked header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_file(path)
        self.tensors = _read_header(path, self._data)

    def raw(self, name: str) -> RawTensor:
        """A tensor's bytes, without a copy: uint8 [rows, bytes per row]. LoadError if it is no float tensor."""
        entry = self.tensors[name]
        if entry.dtype not in FLOAT_TYPES:
            raise LoadError(f"{self.path}: tensor {name!r} is {entry.dtype}; weights must be {', '.join(FLOAT_TYPES)}")
        rows = entry.shape[0] if len(entry.shape) > 1 else 1
        data = np.frombuffer(self._data, np.uint8, entry.nbytes, entry.start)
        return RawTensor(name, entry.shape, entry.dtype, data.reshape(rows, -1))


def open_folder(folder: Path) -> tuple[SafetensorsFile, ...]:
    """The checkpoint's files, checked against each other. `model.safetensors` goes before an index, as in transformers."""
    if (folder / SINGLE).exists():
        return (SafetensorsFile(folder / SINGLE),)
    if (folder / INDEX).exists():
        return _open_shards(folder)
    raise LoadError(_why_no_weights(folder))


def _open_shards(folder: Path) -> tuple[SafetensorsFile, ...]:
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{index}: has no 'weight_map'; download it again")
    expected: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\\" in file:
            raise LoadError(f"{index}: tensor {tensor!r} is said to be in {file!r}, which is no file name")
        expected.setdefault(file, set()).add(tensor)
    missing = [name for name in sorted(expected) if not (folder / name).is_file()]
    if missing:
        raise LoadError(
            f"{folder}: {listed(missing)} of the index {'are' if len(missing) > 1 else 'is'} missing; download again"
        )
    files = tuple(SafetensorsFile(folder / name) for name in sorted(expected))
    for file in files:
        wanted, found = expected[file.path.name], file.tensors.keys()
        if wanted - found:
            raise LoadError(f"{file.path}: lacks {listed(sorted(wanted - found))}, which {INDEX} says it holds")
        if found - wanted:
            raise LoadError(f"{file.path}: holds {listed(sorted(found - wanted))}, which {INDEX} does not place there")
    return files


def _why_no_weights(folder: Path) -> str:
    shards = sorted(p.name for p in folder.glob("*.safetensors"))
    if shards:
        return f"{folder}: has {listed(shards)} but neither {SINGLE} nor {INDEX}; download the index"
    pickles = sorted(p.name for pattern in PICKLED for p in folder.glob(pattern))
    if pickles:
        return (
            f"{folder}: has only pickled weights ({listed(pickles)}), which can run code and are never opened; "
            "convert them to safetensors"
        )
    if any(folder.glob("*.gguf")):
        return f"{folder}: has no safetensors; to load a GGUF file name the file itself"
    return f"{folder}: has no {SINGLE} and no {INDEX}"


def _read_header(path: Path, data: mmap.mmap) -> dict[str, Entry]:
    if len(data) < 8:
        raise LoadError(f"{path}: is cut short; download it again")
    length = int.from_bytes(data[:8], "little")
    room = len(data) - 8
    if length > min(room, MAX_HEADER_BYTES):
        raise LoadError(f"{path}: its header claims {length} bytes and the file has {room}; it is damaged, download it again")
    header = parse_object(path, data[8 : 8 + length])
    header.pop("__metadata__", None)
    if not header:
        raise LoadError(f"{path}: holds no tensors")
    base = 8 + length
    entries = {name: _read_entry(path, name, value, base) for name, value in header.items()}
    end = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != end:
            raise LoadError(
                f"{path}: tensor {name!r} {'overlaps' if entry.start < end else 'leaves a hole after'} the one before"
            )
        end = entry.start + entry.nbytes
    if end != len(data):
        what = "it was cut short" if end > len(data) else "it has bytes that belong to no tensor"
        raise LoadError(f"{path}: is {len(data)} bytes long and its header says {end}: {what}, download it again")
    return entries


def _read_entry(path: Path, name: str, value: object, base: int) -> Entry:
    def wrong(what: str) -> LoadError:
        return LoadError(f"{path}: tensor {name!r} {what}")

    if not isinstance(value, dict):
        raise wrong("has no description")
    dtype: Any = value.get("dtype")
    shape: Any = value.get("shape")
    offsets: Any = value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise wrong(f"has the unknown dtype {dtype!r}")
    if not _is_naturals(shape):
        raise wrong(f"has the shape {shape!r}")
    if not (_is_naturals(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]):
        raise wrong(f"has the data_offsets {offsets!r}")
    nbytes = math.prod(shape) * _DTYPES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise wrong(f"of shape {shape} and dtype {dtype} needs {nbytes} bytes and has {offsets[1] - offsets[0]}")
    return Entry(tuple(shape), dtype, base + offsets[0], nbytes)


def _is_naturals(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 8 and all(type(v) is int and 0 <= v < 2**48 for v in value)
