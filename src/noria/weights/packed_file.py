"""A file of packed panels that a start only maps, and what it says about itself.

    prefix   4096 bytes: magic | offset of the header u64 | its length u64 | its BLAKE2b-128
    data     regions of 4096-aligned bytes: packed matrices, float32 vectors
    header   JSON: what lies where, the checksum of each region, what the checkpoint's reader should be told

On every start all bytes are summed (20 GB/s where they are in the page cache): a damaged file is unusable.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import msgspec
import numpy as np
import numpy.typing as npt

from noria.weights.formats import WeightFormat

ALIGNMENT = 4096
MAGIC = b"NORIAPK\n"
_PREFIX = struct.Struct("<8sQQ16s")
_MAX_HEADER_BYTES = 64 << 20

Bytes = npt.NDArray[np.uint8]


class Region(msgspec.Struct, frozen=True):
    """An aligned range of the file. `checksum` is the sum of its 64-bit words, padding included, modulo 2^64."""

    offset: int
    nbytes: int
    checksum: int = 0

    @property
    def padded(self) -> int:
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT


class Segment(msgspec.Struct, frozen=True):
    """One packed matrix of a parameter."""

    outputs: int
    inputs: int
    format: WeightFormat
    region: Region


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter: segments and perhaps a bias, or a vector, or the name of the parameter that it shares."""

    name: str
    segments: tuple[Segment, ...] = ()
    bias: Region | None = None
    vector: Region | None = None
    alias_of: str = ""

    @property
    def regions(self) -> Iterator[Region]:
        yield from (s.region for s in self.segments)
        yield from (r for r in (self.bias, self.vector) if r is not None)


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a file holds, and what it was made from."""

    key: str
    files: tuple[str, ...]  # where it was made from, for `forget`
    entries: tuple[Entry, ...]
    warnings: tuple[str, ...]  # repeated on every start


@dataclass(frozen=True)
class Packed:
    """Packed weights that can be read: a header and the bytes that its offsets count in."""

    header: Header
    data: Bytes


class Unusable(Exception):
    """A packed file is not what it should be."""


def write_header(file: IO[bytes], header: Header, end: int) -> None:
    """Complete a file whose data ends at `end`: header, then prefix, on the disk when this returns."""
    content = msgspec.json.encode(header)
    file.seek(end)
    file.write(content)
    file.seek(0)
    file.write(_PREFIX.pack(MAGIC, end, len(content), _digest(content)))
    file.flush()
    os.fsync(file.fileno())


def read_header(file: IO[bytes]) -> Header:
    """The header of an open packed file; Unusable if it is damaged or of another kind."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise Unusable("it is cut short")
    magic, offset, length, digest = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise Unusable("it is no packed file")
    if length > _MAX_HEADER_BYTES or offset + length != size or offset % ALIGNMENT:
        raise Unusable("its length is not what it says")
    file.seek(offset)
    content = file.read(length)
    if _digest(content) != digest:
        raise Unusable("its header is damaged")
    try:
        header = msgspec.json.decode(content, type=Header)
    except msgspec.DecodeError as error:
        raise Unusable(f"its header is of another kind: {error}") from None
    for entry in header.entries:
        for region in entry.regions:
            if region.offset % ALIGNMENT or region.offset < ALIGNMENT or region.offset + region.padded > offset:
                raise Unusable("its header points outside it")
    return header


def map_file(file: IO[bytes], header: Header) -> Packed:
    """Map an open packed file and sum its regions.

    The map keeps its own duplicate of the descriptor, and with it the file's shared lock, for as long as a view of it lives.
    """
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    advise(memory, "MADV_HUGEPAGE")
    advise(memory, "MADV_WILLNEED")
    data = np.frombuffer(memory, np.uint8)
    for entry in header.entries:
        for region in entry.regions:
            if checksum(data[region.offset : region.offset + region.padded]) != region.checksum:
                raise Unusable(f"the data of {entry.name!r} is damaged")
    return Packed(header, data)


def checksum(data: Bytes) -> int:
    """The sum of the 64-bit words; `data` starts at a multiple of 8, and is taken as padded with zeros to another."""
    whole = data.nbytes // 8 * 8
    total = int(np.add.reduce(data[:whole].view(np.uint64), dtype=np.uint64))
    return (total + int.from_bytes(data[whole:].tobytes(), "little")) % 2**64


def _digest(header: bytes) -> bytes:
    return hashlib.blake2b(header, digest_size=16).digest()


def advise(memory: mmap.mmap, name: str) -> None:
    """A hint to the kernel, where both it and Python know it."""
    if name in mmap.__dict__:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.__dict__[name])
