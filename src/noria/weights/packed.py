"""From a checkpoint to the weights a backend receives, by way of a file of packed panels that the next start only maps.

    prefix   4096 bytes: magic | offset of the header u64 | its length u64 | its BLAKE2b-128
    data     regions of 4096-aligned bytes: packed matrices, float32 vectors
    header   JSON: what lies where, the checksum of each region, what the checkpoint's reader should be told

A packed file is named by what determines it: this layout's version, the content of the checkpoint, the parameters, the
quantization. The content is hashed once; later it is known by the files' paths, sizes and times. A file is written aside and
renamed, under a lock, so that it is there whole or not at all; readers hold a shared lock while they map it, and what is locked
is not evicted. On every start all bytes are summed (20 GB/s where they are in the page cache); a file that is not what it
should be is packed again, never trusted. Where the cache cannot be written, weights are packed in memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import numpy.typing as npt

from noria.types import LoadError
from noria.weights.checkpoint import Checkpoint
from noria.weights.files import listed
from noria.weights.formats import PANEL, LinearWeight, PackedMatrix, VectorWeight, Weight, WeightFormat, matrix_bytes
from noria.weights.gguf_names import ROPE_FREQUENCIES
from noria.weights.pack import packed_runs, target_format
from noria.weights.params import Param, Source
from noria.weights.quantize import Float32, RawTensor, dequantize

PACKER_VERSION = 1  # raise it when the layout or the packed values change
MAX_CACHE_BYTES = 20 << 30
ALIGNMENT = 4096
MAGIC = b"NORIAPK\n"
SENSITIVE = ("model.embed_tokens.weight", "lm_head.weight")  # stay at 8 bits under "q4": each error there meets every token
_PREFIX = struct.Struct("<8sQQ16s")
_MAX_HEADER_BYTES = 64 << 20
_MAX_KNOWN_CONTENTS = 256
_LOCKS = 16
_STALE_SECONDS = 3600  # an unlocked temporary file of this age belongs to no packer, not even to one about to lock it

log = logging.getLogger("noria.weights")

Bytes = npt.NDArray[np.uint8]
Progress = Callable[[int, int], None]  # bytes packed so far, bytes in all


def load_parameters(
    checkpoint: Checkpoint,
    params: Sequence[Param],
    quantization: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Weight]:
    """The weights of `params` by name, mapped from the packed file, which is made first where there is none.

    `quantization` is None (as the checkpoint is, floats as bf16), "q8", "q4", "bf16" or "f32". Without `cache_dir`, or where
    it cannot be written, weights are packed in memory. `progress` is called while packing. The arrays are read-only.
    LoadError if a tensor is missing, has another shape, or is there and belongs to no parameter.
    """
    if cache_dir is not None:
        store = _Store(cache_dir / "packed")
        try:
            return _loaded(store.load_or_pack(checkpoint, params, quantization, progress))
        except OSError as error:
            log.warning("%s: packed weights cannot be kept (%s); packing in memory", store.folder, error.strerror or error)
    plan = _Plan(checkpoint, params, quantization)
    return _loaded(_pack_in_memory(plan, progress))


def packed_key(
    checkpoint: Checkpoint, params: Sequence[Param], quantization: str | None = None, cache_dir: Path | None = None
) -> str:
    """What determines the packed weights, as 32 hex digits: equal keys are equal weights, on any machine."""
    content = _Store(cache_dir / "packed").content(checkpoint) if cache_dir is not None else checkpoint.fingerprint
    return _key(content, params, quantization)


def forget(cache_dir: Path, folder: Path) -> None:
    """Remove the packed files made of checkpoints in `folder`, except those that are in use."""
    for path in (cache_dir / "packed").glob("*.noria"):
        with contextlib.suppress(OSError, _Unusable), path.open("rb") as file:
            if any(Path(f).is_relative_to(folder) for f in _read_header(file).files):
                _remove_unused(path)


def _key(content: str, params: Sequence[Param], quantization: str | None) -> str:
    determined_by = msgspec.json.encode([PACKER_VERSION, content, quantization, list(params)])
    return hashlib.blake2b(determined_by, digest_size=16).hexdigest()


# --- what a packed file says about itself ------------------------------------------------------------------------------


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
    key: str
    files: tuple[str, ...]  # where it was made from, for `forget`
    entries: tuple[Entry, ...]
    warnings: tuple[str, ...]  # repeated on every start


@dataclass(frozen=True)
class _Packed:
    """Packed weights that can be read: a header and the bytes that its offsets count in."""

    header: Header
    data: Bytes


class _Unusable(Exception):
    """A packed file is not what it should be."""


def _loaded(packed: _Packed) -> dict[str, Weight]:
    """Views of the packed bytes, as the backends take them."""
    for warning in packed.header.warnings:
        log.warning("%s", warning)

    def view(region: Region) -> Bytes:
        return packed.data[region.offset : region.offset + region.nbytes]

    weights: dict[str, Weight] = {}
    for entry in packed.header.entries:
        if entry.alias_of:
            weights[entry.name] = weights[entry.alias_of]
        elif entry.vector is not None:
            weights[entry.name] = VectorWeight(entry.name, view(entry.vector).view(np.float32))
        else:
            matrices = tuple(PackedMatrix(s.outputs, s.inputs, s.format, view(s.region)) for s in entry.segments)
            bias = None if entry.bias is None else view(entry.bias).view(np.float32)
            weights[entry.name] = LinearWeight(entry.name, matrices, bias)
    return weights


# --- what is to be packed ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
    """A region to fill: a matrix's rows, or one vector."""

    region: Region
    sources: tuple[Source, ...]
    format: WeightFormat | None  # None: a float32 vector


class _Plan:
    """Parameters matched with the checkpoint's tensors, and the place of everything in the file. Checks before it reads."""

    def __init__(self, checkpoint: Checkpoint, params: Sequence[Param], quantization: str | None) -> None:
        self.checkpoint = checkpoint
        self.work: list[_Work] = []
        self.warnings: list[str] = []
        self.end = ALIGNMENT
        _check_names(checkpoint, params)
        by_name = {p.name: p for p in params}
        entries = []
        for param in params:
            if param.alias_of:
                self._check_copies(param, by_name[param.alias_of])
                entries.append(Entry(name=param.name, alias_of=param.alias_of))
            elif param.kind == "vector":
                entries.append(Entry(name=param.name, vector=self._vector(param.sources)))
            else:
                entries.append(self._matrix(param, quantization))
        self.entries = tuple(entries)

    @property
    def total(self) -> int:
        """Bytes of data."""
        return self.end - ALIGNMENT

    def _matrix(self, param: Param, quantization: str | None) -> Entry:
        segments = []
        for fmt, sources in self._segments(param, quantization):
            outputs, inputs = sum(s.shape[0] for s in sources), sources[0].shape[1]
            region = self._reserve(matrix_bytes(fmt, outputs, inputs))
            self.work.append(_Work(region, tuple(sources), fmt))
            segments.append(Segment(outputs, inputs, fmt, region))
        return Entry(name=param.name, segments=tuple(segments), bias=self._vector(param.biases) if param.biases else None)

    def _segments(self, param: Param, quantization: str | None) -> list[tuple[WeightFormat, list[Source]]]:
        """Neighbours of the same format become one segment. Every segment but the last must fill its panels; where formats
        change inside a panel, the whole parameter is float32, which holds any of them exactly."""
        runs: list[tuple[WeightFormat, list[Source]]] = []
        for source in param.sources:
            raw_type = self.checkpoint.raw(source.name).type
            fmt = target_format(raw_type, quantization, source.shape[1], sensitive=source.name in SENSITIVE)
            if runs and runs[-1][0] == fmt:
                runs[-1][1].append(source)
            else:
                runs.append((fmt, [source]))
        if any(sum(s.shape[0] for s in sources) % PANEL for _, sources in runs[:-1]):
            return [(WeightFormat(kind="f32"), list(param.sources))]
        return runs

    def _vector(self, sources: Sequence[Source]) -> Region:
        region = self._reserve(4 * sum(s.shape[0] for s in sources))
        self.work.append(_Work(region, tuple(sources), None))
        return region

    def _reserve(self, nbytes: int) -> Region:
        region = Region(self.end, nbytes)
        self.end += region.padded
        return region

    def _check_copies(self, param: Param, original: Param) -> None:
        """A tied parameter's own tensors, where the checkpoint has them, should equal what it is tied to."""
        names = set(self.checkpoint.names())
        for copy, source in zip(param.sources, original.sources, strict=True):
            if copy.name in names and not _equal(self.checkpoint.raw(copy.name), self.checkpoint.raw(source.name)):
                self.warnings.append(
                    f"{self.checkpoint.path}: the configuration ties {copy.name!r} to {source.name!r}, and the file has "
                    f"a different {copy.name!r}; it is ignored"
                )


def _check_names(checkpoint: Checkpoint, params: Sequence[Param]) -> None:
    """Every parameter once, every source there in its shape, every tensor used.

    ValueError for a list of parameters that contradicts itself; LoadError for a checkpoint that does not fit it.
    """
    seen: set[str] = set()
    used: set[str] = set()
    present = set(checkpoint.names())
    for param in params:
        sources = (*param.sources, *param.biases)
        if param.name in seen or (param.alias_of and param.alias_of not in seen):
            raise ValueError(f"parameter {param.name!r} appears twice, or before the one it shares")
        seen.add(param.name)
        for source in sources:
            if source.name in used:
                raise ValueError(f"tensor {source.name!r} belongs to two parameters")
            if param.kind == "matrix" and source.safetensors_add:
                raise ValueError(f"{source.name!r}: safetensors_add is for vectors")
            used.add(source.name)
            if source.name in present:
                if checkpoint.shape(source.name) != source.shape:
                    found = checkpoint.shape(source.name)
                    raise LoadError(
                        f"{checkpoint.path}: tensor {source.name!r} is {found}; the configuration needs {source.shape}"
                    )
            elif not param.alias_of:
                raise LoadError(f"{checkpoint.path}: tensor {source.name!r} is missing")
    unexpected = sorted(n for n in present - used if not _ignorable(n))
    if unexpected:
        raise LoadError(f"{checkpoint.path}: tensors that this model does not have: {listed(unexpected)}")


def _ignorable(name: str) -> bool:
    """Tensors that carry no weights: rotary frequencies follow from the configuration (which has a GGUF file's factors)."""
    return name == ROPE_FREQUENCIES or name.endswith("rotary_emb.inv_freq")


def _equal(a: RawTensor, b: RawTensor) -> bool:
    if a.shape != b.shape:
        return False
    if a.type == b.type:
        return np.array_equal(a.data, b.data)
    return np.array_equal(dequantize(a), dequantize(b))


def _matrix_rows(checkpoint: Checkpoint, source: Source) -> RawTensor:
    """A matrix as it lies in the file, its rows in Hugging Face's order."""
    raw = checkpoint.raw(source.name)
    if checkpoint.source != "gguf" or not source.gguf_heads:
        return raw
    return RawTensor(raw.name, raw.shape, raw.type, raw.data[_half_order(raw.shape[0], source.gguf_heads)])


def _vector_values(checkpoint: Checkpoint, source: Source) -> Float32:
    values = dequantize(checkpoint.raw(source.name))
    if checkpoint.source == "safetensors":
        return values + np.float32(source.safetensors_add) if source.safetensors_add else values
    return values[_half_order(len(values), source.gguf_heads)] if source.gguf_heads else values


def _half_order(rows: int, heads: int) -> npt.NDArray[np.int64]:
    """Where each row of q or k lies in a GGUF file, where rows i and i + dim / 2 of a head are neighbours: 2 i and 2 i + 1."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


# --- packing -----------------------------------------------------------------------------------------------------------


def _filled(plan: _Plan, progress: Progress | None) -> Iterator[tuple[Region, int, Bytes]]:
    """The contents of all regions in file order: (region, place in it, bytes)."""
    done = 0
    for work in plan.work:
        start = 0
        for run in _contents(plan.checkpoint, work):
            yield work.region, start, run
            start += run.nbytes
            if progress is not None:
                progress(done + start, plan.total)
        done += work.region.padded
    if progress is not None:
        progress(plan.total, plan.total)


def _contents(checkpoint: Checkpoint, work: _Work) -> Iterator[Bytes]:
    if work.format is None:
        yield np.concatenate([_vector_values(checkpoint, s) for s in work.sources]).view(np.uint8)
    else:
        yield from packed_runs([_matrix_rows(checkpoint, s) for s in work.sources], work.format)


def _checksum(data: Bytes) -> int:
    """The sum of the 64-bit words; `data` starts at a multiple of 8, and is taken as padded with zeros to another."""
    whole = data.nbytes // 8 * 8
    total = int(np.add.reduce(data[:whole].view(np.uint64), dtype=np.uint64))
    return (total + int.from_bytes(data[whole:].tobytes(), "little")) % 2**64


def _header(plan: _Plan, key: str, checksums: dict[int, int]) -> Header:
    """`checksums` by region offset."""

    def summed(region: Region) -> Region:
        return msgspec.structs.replace(region, checksum=checksums[region.offset])

    entries = tuple(
        msgspec.structs.replace(
            entry,
            segments=tuple(msgspec.structs.replace(s, region=summed(s.region)) for s in entry.segments),
            bias=None if entry.bias is None else summed(entry.bias),
            vector=None if entry.vector is None else summed(entry.vector),
        )
        for entry in plan.entries
    )
    files = tuple(str(f) for f in plan.checkpoint.weight_files)
    return Header(key=key, files=files, entries=entries, warnings=tuple(plan.warnings))


def _pack_in_memory(plan: _Plan, progress: Progress | None) -> _Packed:
    memory = mmap.mmap(-1, plan.end)  # page-aligned, unlike a numpy allocation
    _advise(memory, "MADV_HUGEPAGE")
    data = np.frombuffer(memory, np.uint8)
    for region, start, run in _filled(plan, progress):
        data[region.offset + start : region.offset + start + run.nbytes] = run
    data.flags.writeable = False
    header = Header(key="", files=(), entries=plan.entries, warnings=tuple(plan.warnings))
    return _Packed(header, data)


def _pack_to_file(plan: _Plan, key: str, file: IO[bytes], progress: Progress | None) -> None:
    checksums: dict[int, int] = {}
    for region, start, run in _filled(plan, progress):
        file.seek(region.offset + start)  # what is skipped is padding, and reads as zeros
        file.write(run.data)
        checksums[region.offset] = (checksums.get(region.offset, 0) + _checksum(run)) % 2**64
    header = msgspec.json.encode(_header(plan, key, checksums))
    file.seek(plan.end)
    file.write(header)
    file.seek(0)
    file.write(_PREFIX.pack(MAGIC, plan.end, len(header), _digest(header)))
    file.flush()
    os.fsync(file.fileno())


def _digest(header: bytes) -> bytes:
    return hashlib.blake2b(header, digest_size=16).digest()


# --- reading back ------------------------------------------------------------------------------------------------------


def _read_header(file: IO[bytes]) -> Header:
    """The header of an open packed file; _Unusable if it is damaged or of another kind."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise _Unusable("it is cut short")
    magic, offset, length, digest = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise _Unusable("it is no packed file")
    if length > _MAX_HEADER_BYTES or offset + length != size or offset % ALIGNMENT:
        raise _Unusable("its length is not what it says")
    file.seek(offset)
    content = file.read(length)
    if _digest(content) != digest:
        raise _Unusable("its header is damaged")
    try:
        header = msgspec.json.decode(content, type=Header)
    except msgspec.DecodeError as error:
        raise _Unusable(f"its header is of another kind: {error}") from None
    for entry in header.entries:
        for region in entry.regions:
            if region.offset % ALIGNMENT or region.offset < ALIGNMENT or region.offset + region.padded > offset:
                raise _Unusable("its header points outside it")
    return header


def _map(file: IO[bytes], header: Header) -> _Packed:
    """Map an open packed file and sum its regions.

    The map keeps its own duplicate of the descriptor, and with it the file's shared lock, for as long as a view of it lives.
    """
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    _advise(memory, "MADV_HUGEPAGE")
    _advise(memory, "MADV_WILLNEED")
    data = np.frombuffer(memory, np.uint8)
    for entry in header.entries:
        for region in entry.regions:
            if _checksum(data[region.offset : region.offset + region.padded]) != region.checksum:
                raise _Unusable(f"the data of {entry.name!r} is damaged")
    return _Packed(header, data)


def _advise(memory: mmap.mmap, name: str) -> None:
    """A hint to the kernel, where both it and Python know it."""
    if name in mmap.__dict__:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.__dict__[name])


# --- the files on disk -------------------------------------------------------------------------------------------------


class _Store:
    """The folder of packed files: `KEY.noria`, `KEY.*.tmp` while one is written, `lock-?`, and `contents/`, known hashes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load_or_pack(
        self, checkpoint: Checkpoint, params: Sequence[Param], quantization: str | None, progress: Progress | None
    ) -> _Packed:
        """OSError if the folder cannot be used."""
        self.folder.mkdir(parents=True, exist_ok=True)
        key = _key(self.content(checkpoint), params, quantization)
        path = self.folder / f"{key}.noria"
        packed = self._open(path, key)
        if packed is not None:
            return packed
        with self._packer_lock(key):
            packed = self._open(path, key)  # another process may have packed it meanwhile
            if packed is not None:
                return packed
            self._pack(_Plan(checkpoint, params, quantization), key, path, progress)
            packed = self._open(path, key)
        if packed is None:
            raise OSError(errno.EIO, "a file just written does not read back")
        self._evict()
        return packed

    def content(self, checkpoint: Checkpoint) -> str:
        """The checkpoint's fingerprint: remembered for files with these paths, sizes and times, or computed."""
        before = _identity(checkpoint.weight_files)
        known = self.folder / "contents" / before
        with contextlib.suppress(OSError, UnicodeDecodeError):
            content = known.read_text()
            if re.fullmatch(r"[0-9a-f]{32}", content):
                os.utime(known)
                return content
        content = checkpoint.fingerprint
        with contextlib.suppress(OSError):
            if _identity(checkpoint.weight_files) == before:
                known.parent.mkdir(parents=True, exist_ok=True)
                _write_atomically(known, content.encode())
        return content

    def _open(self, path: Path, key: str) -> _Packed | None:
        """Map a packed file, or say in the log why it is not used."""
        try:
            with path.open("rb") as file:
                _lock(file, fcntl.LOCK_SH)
                header = _read_header(file)
                if header.key != key:
                    raise _Unusable("it was made for something else")
                packed = _map(file, header)
        except FileNotFoundError:
            return None
        except _Unusable as error:
            log.warning("%s: %s; packing again", path, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # eviction goes by last use
        return packed

    def _pack(self, plan: _Plan, key: str, path: Path, progress: Progress | None) -> None:
        for stale in self.folder.glob(f"{key}.*.tmp"):  # of a packer that was killed: we hold its lock
            stale.unlink(missing_ok=True)
        if shutil.disk_usage(self.folder).free < plan.end:
            raise OSError(errno.ENOSPC, f"{plan.end >> 20} MB are needed and the disk is full")
        temporary = self.folder / f"{key}.{os.getpid()}.tmp"
        try:
            with temporary.open("xb") as file:
                _lock(file, fcntl.LOCK_SH)
                _pack_to_file(plan, key, file, progress)
                temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(self.folder)

    @contextlib.contextmanager
    def _packer_lock(self, key: str) -> Iterator[None]:
        """One packer a key. The few lock files are shared by all keys and stay: removing one would race with its next user."""
        with (self.folder / f"lock-{int(key[:8], 16) % _LOCKS:x}").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("waiting for another process that is packing weights")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _evict(self) -> None:
        """Bring the folder under its limit: least recently used first, never what is in use (as what was just packed is)."""
        with contextlib.suppress(OSError):
            for path in self.folder.glob("*.tmp"):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    _remove_unused(path)
            ages = sorted((s.st_mtime_ns, s.st_size, p) for p in self.folder.glob("*.noria") for s in [p.stat()])
            excess = sum(size for _, size, _ in ages) - MAX_CACHE_BYTES
            for _, size, path in ages:
                if excess > 0 and _remove_unused(path):
                    excess -= size
            known = sorted((self.folder / "contents").iterdir(), key=lambda p: p.stat().st_mtime_ns)
            for path in known[: max(0, len(known) - _MAX_KNOWN_CONTENTS)]:
                path.unlink(missing_ok=True)


def _identity(files: Sequence[Path]) -> str:
    """The files' paths, sizes and times, as 32 hex digits."""
    stats = [(str(f), s.st_size, s.st_mtime_ns) for f in files for s in [f.stat()]]
    return hashlib.blake2b(msgspec.json.encode(stats), digest_size=16).hexdigest()


def _lock(file: IO[bytes], operation: int) -> None:
    """Mark a file as in use. Where the file system has no locks, renaming alone still keeps files whole."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, operation)


def _remove_unused(path: Path) -> bool:
    """Remove a file that no process holds a lock on."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        return True
    except OSError:
        return False


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    temporary.write_bytes(content)
    temporary.rename(path)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
