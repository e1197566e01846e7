"""What is to be packed: parameters matched with the checkpoint's tensors, and the place of everything in the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from noria.types import LoadError
from noria.weights.checkpoint import Checkpoint
from noria.weights.files import listed
from noria.weights.formats import PANEL, WeightFormat, matrix_bytes
from noria.weights.gguf_names import ROPE_FREQUENCIES
from noria.weights.pack import target_format
from noria.weights.packed_file import ALIGNMENT, Entry, Region, Segment
from noria.weights.params import Param, Source
from noria.weights.quantize import RawTensor, dequantize

SENSITIVE = ("model.embed_tokens.weight", "lm_head.weight")  # stay at 8 bits under "q4": each error there meets every token


@dataclass(frozen=True)
class Work:
    """A region to fill: a matrix's rows, or one vector."""

    region: Region
    sources: tuple[Source, ...]
    format: WeightFormat | None  # None: a float32 vector


class Plan:
    """Parameters matched with the checkpoint's tensors, and the place of everything in the file. Checks before it reads."""

    def __init__(self, checkpoint: Checkpoint, params: Sequence[Param], quantization: str | None) -> None:
        self.checkpoint = checkpoint
        self.work: list[Work] = []
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
            self.work.append(Work(region, tuple(sources), fmt))
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
        self.work.append(Work(region, tuple(sources), None))
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
