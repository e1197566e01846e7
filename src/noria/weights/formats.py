"""Packed weights: how a matrix lies in memory for the kernels, and what a backend receives.

A linear layer is y = x W^T with W [outputs, inputs]. W is cut into *panels* of 32 outputs; the last panel is padded with
zero weights. Inside a panel the inner dimension runs slowest, in groups, so that a kernel streams a panel from start to end:

    f32    [inputs][32]                                               float32
    bf16   [inputs / 2][32][2]                                        bfloat16 pairs along the inner dimension
    q8     per group: codes [group / 4][32][4] uint8, scales [32], minima [32] if has_minimum
    q4     per group: codes [group / 4][16][4] uint8, scales [32], minima [32] if has_minimum
                      the low nibble of [quad][c][i] is column c, the high nibble column c + 16; both at inner index 4 quad + i

    value = scale * code + minimum      with a minimum (Q4_1, Q4_K, Q5_1, Q5_K)
    value = scale * (code - 8)          q4 without (Q4_0);   scale * (code - 128)   q8 without (Q8_0, Q5_0, Q6_K)

Scales and minima are float16 as in the file, or float32 where two-level scales do not fit float16 exactly (Q4_K, Q5_K, Q6_K).
`inputs` is padded up to a multiple of 32 (q8, q4) or 2 (bf16) with zero weights.
Padding columns have scale, minimum and codes 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

PANEL = 32

Kind = Literal["f32", "bf16", "q8", "q4"]


class WeightFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The element format of one packed matrix."""

    kind: Kind
    group: int = 0  # q8, q4: 32 or 16
    scale: Literal["", "f16", "f32"] = ""
    has_minimum: bool = False

    def __str__(self) -> str:
        if self.kind in ("f32", "bf16"):
            return self.kind
        return f"{self.kind}/{self.group}/{self.scale}{'/min' if self.has_minimum else ''}"


def padded_inputs(fmt: WeightFormat, inputs: int) -> int:
    """The inner dimension as stored."""
    multiple = {"f32": 1, "bf16": 2, "q8": 32, "q4": 32}[fmt.kind]
    return -(-inputs // multiple) * multiple


def group_bytes(fmt: WeightFormat) -> int:
    """Bytes of one group of one panel (q8, q4)."""
    codes = fmt.group * PANEL if fmt.kind == "q8" else fmt.group * PANEL // 2
    scales = PANEL * (2 if fmt.scale == "f16" else 4)
    return codes + scales * (2 if fmt.has_minimum else 1)


def panel_bytes(fmt: WeightFormat, inputs: int) -> int:
    """Bytes of one panel; panels follow each other without gaps, each a multiple of 64 bytes."""
    k = padded_inputs(fmt, inputs)
    if fmt.kind == "f32":
        return k * PANEL * 4
    if fmt.kind == "bf16":
        return k * PANEL * 2
    return k // fmt.group * group_bytes(fmt)


def matrix_bytes(fmt: WeightFormat, outputs: int, inputs: int) -> int:
    return -(-outputs // PANEL) * panel_bytes(fmt, inputs)


@dataclass(frozen=True)
class PackedMatrix:
    """One packed matrix. `data` is a flat uint8 array, 64-byte aligned, `matrix_bytes` long, often a view of a mapped file."""

    outputs: int
    inputs: int
    format: WeightFormat
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class LinearWeight:
    """One or more matrices over the same input whose outputs are concatenated (q|k|v, gate|up): merged without copying.

    Every segment but the last has a multiple of 32 outputs. `bias` is float32 [outputs] or None.
    """

    name: str
    segments: tuple[PackedMatrix, ...]
    bias: npt.NDArray[np.float32] | None = None

    @property
    def outputs(self) -> int:
        return sum(s.outputs for s in self.segments)

    @property
    def inputs(self) -> int:
        return self.segments[0].inputs

    @property
    def nbytes(self) -> int:
        return sum(s.data.nbytes for s in self.segments)


@dataclass(frozen=True)
class VectorWeight:
    """A float32 vector: a norm's weight."""

    name: str
    data: npt.NDArray[np.float32]


Weight = LinearWeight | VectorWeight


def merged(name: str, parts: Sequence[LinearWeight]) -> LinearWeight:
    """Concatenate linear weights over the same input."""
    biases = [p.bias for p in parts if p.bias is not None]
    if biases and len(biases) != len(parts):
        raise ValueError(f"{name}: some merged parts have a bias and some have none")
    segments = tuple(s for p in parts for s in p.segments)
    return LinearWeight(name, segments, np.concatenate(biases) if biases else None)
