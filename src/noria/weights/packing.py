"""Carries out a plan: from the checkpoint's tensors to packed bytes, in memory or in a file.

checkpoint's rows ── order of heads ── packed_runs ──► the regions of the plan, one after the other
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import IO

import msgspec
import numpy as np
import numpy.typing as npt

from noria.weights.checkpoint import Checkpoint
from noria.weights.pack import packed_runs
from noria.weights.packed_file import Bytes, Header, Packed, Region, advise, checksum, write_header
from noria.weights.packing_plan import Plan, Work
from noria.weights.params import Source
from noria.weights.quantize import Float32, RawTensor, dequantize

Progress = Callable[[int, int], None]  # bytes packed so far, bytes in all


def pack_in_memory(plan: Plan, progress: Progress | None) -> Packed:
    memory = mmap.mmap(-1, plan.end)  # page-aligned, unlike a numpy allocation
    advise(memory, "MADV_HUGEPAGE")
    data = np.frombuffer(memory, np.uint8)
    for region, start, run in _filled(plan, progress):
        data[region.offset + start : region.offset + start + run.nbytes] = run
    data.flags.writeable = False
    header = Header(key="", files=(), entries=plan.entries, warnings=tuple(plan.warnings))
    return Packed(header, data)


def pack_to_file(plan: Plan, key: str, file: IO[bytes], progress: Progress | None) -> None:
    checksums: dict[int, int] = {}
    for region, start, run in _filled(plan, progress):
        file.seek(region.offset + start)  # what is skipped is padding, and reads as zeros
        file.write(run.data)
        checksums[region.offset] = (checksums.get(region.offset, 0) + checksum(run)) % 2**64
    write_header(file, _header(plan, key, checksums), plan.end)


def _filled(plan: Plan, progress: Progress | None) -> Iterator[tuple[Region, int, Bytes]]:
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


def _contents(checkpoint: Checkpoint, work: Work) -> Iterator[Bytes]:
    if work.format is None:
        yield np.concatenate([_vector_values(checkpoint, s) for s in work.sources]).view(np.uint8)
    else:
        yield from packed_runs([_matrix_rows(checkpoint, s) for s in work.sources], work.format)


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


def _header(plan: Plan, key: str, checksums: dict[int, int]) -> Header:
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
