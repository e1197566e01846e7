"""A strict reader of GGUF files, versions 2 and 3.

The format (ggml's docs/gguf.md), little-endian:

    "GGUF" | version u32 | tensors u64 | pairs u64
    pairs    key string | type u32 | value                       string: length u64, bytes; array: type u32, count u64, items
    tensors  name string | dimensions u32 | each u64 | type u32 | offset u64
    padding up to `general.alignment`, then the data; offsets count from there

The file is mapped, and nothing in it is believed: every count, length, dimension and offset is compared with the bytes that
are there before it is used, in Python integers, which do not wrap. Whatever is wrong is one `LoadError` naming the file.
Arrays are views or offsets into the map until someone asks for their values: a vocabulary costs nothing at start.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from noria.types import LoadError
from noria.weights.files import map_file
from noria.weights.quantize import BLOCKS, RawTensor

SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 65535  # of a key, by the specification; tensor names are at most 64 there
MAX_PAIRS, MAX_TENSORS, MAX_STRINGS = 1 << 16, 1 << 18, 1 << 22  # far above any model; they bound time and memory

_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING, _ARRAY = 8, 9

# ggml type ids: those we read, and the names of the others for the error message.
_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    30: "BF16",
}
_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

MIN_PAIR_BYTES = 8 + 1 + 4 + 1  # a key of one byte and a one-byte value
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # a name of one byte and one dimension


class StringArray(Sequence[str]):
    """The strings of a GGUF array, decoded from the map when they are asked for."""

    def __init__(self, key: str, data: mmap.mmap, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> None:
        self._key = key
        self._data = data
        self._starts = starts
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return self._decoded(self._starts[index], self._lengths[index])
        return self._decoded(self._starts[[index]], self._lengths[[index]])[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    def tolist(self) -> list[str]:
        """All strings. LoadError if one is not UTF-8."""
        return self._decoded(self._starts, self._lengths)

    def raw(self, index: int) -> bytes:
        """One string's bytes."""
        start = int(self._starts[index])
        return self._data[start : start + int(self._lengths[index])]

    def _decoded(self, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> list[str]:
        data = self._data
        try:
            return [data[start:end].decode() for start, end in zip(starts.tolist(), (starts + lengths).tolist(), strict=True)]
        except UnicodeDecodeError as error:
            raise LoadError(f"metadata {self._key!r} holds a string that is not UTF-8: {error.object[:40]!r}") from None


Value = str | int | float | bool | npt.NDArray[Any] | StringArray


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` is (outputs, inputs) or (length,): the reverse of the file's order of dimensions."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int  # from the start of the file
    nbytes: int


class GGUFFile:
    """A mapped GGUF file: `metadata` by key, `tensors` by their GGUF names. Raises LoadError if anything in it is wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_file(path)
        cursor = _Cursor(path, self._data)
        num_tensors, num_pairs = _read_counts(cursor)
        self.metadata: dict[str, Value] = {}
        for _ in range(num_pairs):
            key = cursor.name("key")
            if key in self.metadata:
                raise cursor.error(f"key {key!r} appears twice")
            self.metadata[key] = cursor.value(key)
        self.tensors = _read_tensors(cursor, num_tensors, self._alignment())
        self._check_vocabulary()

    def raw(self, name: str) -> RawTensor:
        """A tensor's bytes, without a copy: uint8 [rows, bytes per row]."""
        info = self.tensors[name]
        rows = info.shape[0] if len(info.shape) > 1 else 1
        data = np.frombuffer(self._data, np.uint8, info.nbytes, info.offset).reshape(rows, -1)
        return RawTensor(name, info.shape, info.type, data)

    # Typed access: a default, or None, means that the key may be absent.

    def integer(self, key: str, default: int | None = None, *, minimum: int = 0, maximum: int = 2**31 - 1) -> int:
        value = self.metadata.get(key, default)
        if value is None:
            raise self.error(f"metadata {key!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"metadata {key!r} is {_described(value)}; it must be an integer")
        if not minimum <= value <= maximum:
            raise self.error(f"metadata {key!r} is {value}; it must be in [{minimum}, {maximum}]")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(key, default)
        if value is None:
            raise self.error(f"metadata {key!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"metadata {key!r} is {_described(value)}; it must be a number")
        if not np.isfinite(value):
            raise self.error(f"metadata {key!r} is {value}; it must be finite")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self.metadata.get(key, default)
        if value is None:
            raise self.error(f"metadata {key!r} is missing")
        if not isinstance(value, str):
            raise self.error(f"metadata {key!r} is {_described(value)}; it must be a string")
        return value

    def strings(self, key: str) -> StringArray | None:
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, StringArray):
            raise self.error(f"metadata {key!r} is {_described(value)}; it must be an array of strings")
        return value

    def array(self, key: str, kinds: str) -> npt.NDArray[Any] | None:
        """A numeric array whose numpy dtype kind is one of `kinds` ("iu": integers, "f": floats, "b": booleans)."""
        value = self.metadata.get(key)
        if value is not None and not (isinstance(value, np.ndarray) and value.dtype.kind in kinds):
            wanted = " or ".join({"i": "integers", "f": "floats", "b": "booleans"}[k] for k in kinds if k != "u")
            raise self.error(f"metadata {key!r} is {_described(value)}; it must be an array of {wanted}")
        return value

    def error(self, message: str) -> LoadError:
        return LoadError(f"{self.path}: {message}")

    def _alignment(self) -> int:
        alignment = self.integer("general.alignment", DEFAULT_ALIGNMENT, minimum=1, maximum=1 << 20)
        if alignment & (alignment - 1):
            raise self.error(f"metadata 'general.alignment' is {alignment}; it must be a power of two")
        return alignment

    def _check_vocabulary(self) -> None:
        """The tokenizer's arrays have their types and run beside each other."""
        tokens = self.strings("tokenizer.ggml.tokens")
        self.strings("tokenizer.ggml.merges")
        for key, kinds in (("tokenizer.ggml.scores", "f"), ("tokenizer.ggml.token_type", "iu")):
            values = self.array(key, kinds)
            if values is not None and (tokens is None or len(values) != len(tokens)):
                raise self.error(f"{key!r} has {len(values)} items and there are {0 if tokens is None else len(tokens)} tokens")


# --- reading -----------------------------------------------------------------------------------------------------------


class _Cursor:
    """A position in the map. Every read is checked against the end first."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0

    def error(self, message: str) -> LoadError:
        return LoadError(f"{self.path}: malformed GGUF: {message}")

    def take(self, nbytes: int, what: str) -> int:
        """Move over `nbytes` and return where they start."""
        start = self.position
        if nbytes > self.size - start:
            raise self.error(f"{what} needs {nbytes} bytes at byte {start}, and the file ends after {self.size - start}")
        self.position = start + nbytes
        return start

    def u32(self, what: str) -> int:
        return int(struct.unpack_from("<I", self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack_from("<Q", self.data, self.take(8, what))[0])

    def string(self, what: str) -> str:
        length = self.u64(f"the length of {what}")
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8") from None

    def name(self, what: str) -> str:
        """A key or tensor name: not empty, of sane length, printable (it goes into messages)."""
        name = self.string(f"a {what}")
        if not name:
            raise self.error(f"a {what} is empty")
        if len(name) > MAX_NAME_BYTES or not name.isprintable():
            raise self.error(f"a {what} is too long or not printable: {name[:40]!r}")
        return name

    def value(self, key: str) -> Value:
        type_id = self.u32(f"the type of {key!r}")
        if type_id == _STRING:
            return self.string(f"the value of {key!r}")
        if type_id == _ARRAY:
            return self.array(key)
        dtype = self.scalar_type(type_id, key)
        return self.numbers(dtype, 1, key)[0].item()  # type: ignore[no-any-return]

    def array(self, key: str) -> Value:
        type_id, count = self.u32(f"the item type of {key!r}"), self.u64(f"the length of {key!r}")
        if type_id == _ARRAY:
            raise self.error(f"{key!r} is an array of arrays, which no model uses")
        if type_id == _STRING:
            return self.strings(key, count)
        return self.numbers(self.scalar_type(type_id, key), count, key)

    def scalar_type(self, type_id: int, key: str) -> np.dtype[Any]:
        if type_id not in _SCALARS:
            raise self.error(f"{key!r} has the unknown value type {type_id}")
        return _SCALARS[type_id]

    def numbers(self, dtype: np.dtype[Any], count: int, key: str) -> npt.NDArray[Any]:
        start = self.take(count * dtype.itemsize, f"the value of {key!r}")
        if dtype.kind != "b":
            return np.frombuffer(self.data, dtype, count, start)
        values = np.frombuffer(self.data, np.uint8, count, start)
        if count and values.max() > 1:
            raise self.error(f"{key!r} holds a boolean that is neither 0 nor 1")
        return values.view(np.bool_)

    def strings(self, key: str, count: int) -> StringArray:
        """Find where `count` strings start; their lengths are all that is read."""
        if count > (self.size - self.position) // 8:
            raise self.error(f"{key!r} claims {count} strings, more than the file has room for")
        if count > MAX_STRINGS:
            raise self.error(f"{key!r} has {count} strings; {MAX_STRINGS} are the most that are read")
        starts, lengths = np.empty(count, np.int64), np.empty(count, np.int64)
        done, window = 0, _FIRST_WINDOW
        while done < count:
            found, unbroken = self._short_strings(starts[done:], lengths[done:], window)
            done += found
            if unbroken:
                window = min(2 * window, _LAST_WINDOW)
                continue
            window = _FIRST_WINDOW
            for i in range(done, min(done + _STEPS, count)):  # past the string that broke the chain, one by one
                length = self.u64(f"a length in {key!r}")
                starts[i] = self.take(length, f"a string of {key!r}")
                lengths[i] = length
                done += 1
        return StringArray(key, self.data, starts, lengths)

    def _short_strings(self, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], window: int) -> tuple[int, bool]:
        """Fill in the strings that one look at `window` bytes finds, and move over them: (their number, none was missed).

        A length below 256 is a byte followed by seven zeros. All such places are found by comparing shifted views; those
        that form a chain from here (place + 8 + length = next place) are the strings. A vocabulary of 262,144 tokens takes
        6 ms this way, and 50 ms in a loop.
        """
        window = min(window, self.size - self.position)
        if window < 16:
            return 0, False
        view = np.frombuffer(self.data, np.uint8, window, self.position)
        zero = view == 0
        two = zero[:-1] & zero[1:]
        four = two[:-2] & two[2:]
        seven = four[:-3] & four[3:]  # seven[i]: bytes i .. i + 6 are zero
        places = np.flatnonzero(seven[1:])
        if len(places) < 2 or places[0] != 0:
            return 0, False
        nexts = places[:-1] + 8 + view[places[:-1]]
        broken = np.flatnonzero(nexts != places[1:])
        chain = min(int(broken[0]) if len(broken) else len(nexts), len(starts))
        if chain:
            starts[:chain] = places[:chain] + (self.position + 8)
            lengths[:chain] = view[places[:chain]]
            self.position += int(nexts[chain - 1])
        return chain, chain == min(len(nexts), len(starts))


_FIRST_WINDOW, _LAST_WINDOW = 4096, 4 << 20  # bytes searched for strings at once; the last bounds the memory of a search
_STEPS = 64  # strings read one by one after a long or empty one; keeps the cost of a failed search small


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """The header; returns the numbers of tensors and of pairs, which the file has room for."""
    start = cursor.take(4, "the header")
    magic = cursor.data[start : start + 4]
    if magic != b"GGUF":
        raise LoadError(f"{cursor.path}: not a GGUF file: it starts with {magic!r}")
    version = cursor.u32("the version")
    if version not in SUPPORTED_VERSIONS:
        big = version.to_bytes(4, "little") in (v.to_bytes(4, "big") for v in SUPPORTED_VERSIONS)
        raise cursor.error("it is big-endian; convert it to little-endian" if big else f"version {version}; 2 and 3 are read")
    num_tensors, num_pairs = cursor.u64("the tensor count"), cursor.u64("the pair count")
    room = cursor.size - cursor.position
    if num_pairs > MAX_PAIRS or num_tensors > MAX_TENSORS or num_pairs * MIN_PAIR_BYTES + num_tensors * MIN_TENSOR_BYTES > room:
        raise cursor.error(f"it claims {num_tensors} tensors and {num_pairs} metadata pairs in {room} bytes")
    return num_tensors, num_pairs


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    """The tensor table, in file order. Offsets are checked once the start of the data is known."""
    tensors: dict[str, TensorInfo] = {}
    for _ in range(count):
        info = _read_tensor(cursor)
        if info.name in tensors:
            raise cursor.error(f"tensor {info.name!r} appears twice")
        if info.offset % alignment:
            raise cursor.error(f"tensor {info.name!r} starts at {info.offset}, which is no multiple of {alignment}")
        tensors[info.name] = info
    base = -(-cursor.position // alignment) * alignment
    end = base
    for info in sorted(tensors.values(), key=lambda t: t.offset):
        start = base + info.offset
        if start < end:
            raise cursor.error(f"tensor {info.name!r} overlaps the one before it")
        end = start + info.nbytes
        if end > cursor.size:
            raise cursor.error(
                f"tensor {info.name!r} ends at byte {end}, and the file has {cursor.size}; it was cut short, download it again"
            )
        tensors[info.name] = TensorInfo(info.name, info.shape, info.type, start, info.nbytes)
    return tensors


def _read_tensor(cursor: _Cursor) -> TensorInfo:
    """One entry of the table; its offset is still relative to the data."""
    name = cursor.name("tensor name")
    num_dimensions = cursor.u32(f"the dimensions of {name!r}")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.error(f"tensor {name!r} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible")
    dimensions = [cursor.u64(f"a dimension of {name!r}") for _ in range(num_dimensions)]
    type_id, offset = cursor.u32(f"the type of {name!r}"), cursor.u64(f"the offset of {name!r}")
    if type_id not in _TYPES:
        known = _OTHER_TYPES.get(type_id, f"number {type_id}")
        raise cursor.error(f"tensor {name!r} has type {known}; supported are {', '.join(_TYPES.values())}")
    if 0 in dimensions:
        raise cursor.error(f"tensor {name!r} has a zero dimension")
    block = BLOCKS[_TYPES[type_id]]
    if dimensions[0] % block.elements:
        raise cursor.error(f"tensor {name!r} has rows of {dimensions[0]}, no multiple of {_TYPES[type_id]}'s {block.elements}")
    nbytes = dimensions[0] // block.elements * block.nbytes
    for dimension in dimensions[1:]:
        nbytes *= dimension
    return TensorInfo(name, tuple(reversed(dimensions)), _TYPES[type_id], offset, nbytes)


def _described(value: Value) -> str:
    if isinstance(value, StringArray):
        return f"an array of {len(value)} strings"
    if isinstance(value, np.ndarray):
        return f"an array of {len(value)} {value.dtype}"
    return f"a {type(value).__name__}"
