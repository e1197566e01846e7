"""Packed matrices for the kernel tests: a second packer, written from the docstring of weights/formats.py alone.

`noria.weights.pack` is the first one; that the two agree is a test. Here a matrix is made from its codes, scales and minima, so
that a test knows the packed bytes and the exact values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from noria.backends.cpu import _native
from noria.weights.formats import PANEL, WeightFormat, matrix_bytes, padded_inputs

FORMATS = [WeightFormat(kind="f32"), WeightFormat(kind="bf16")] + [
    WeightFormat(kind=kind, group=group, scale=scale, has_minimum=minimum)
    for kind in ("q8", "q4")
    for group in (32, 16)
    for scale in ("f16", "f32")
    for minimum in (True, False)
]


def aligned(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A copy of flat bytes at a multiple of 64."""
    room = np.empty(data.size + 64, np.uint8)
    start = -room.ctypes.data % 64
    room[start : start + data.size] = data
    return room[start : start + data.size]


@dataclass(frozen=True)
class Packed:
    """A matrix in both forms. Quantised kinds: codes [outputs, padded inputs], scales and minima [outputs, groups] float32."""

    fmt: WeightFormat
    outputs: int
    inputs: int
    data: npt.NDArray[np.uint8]
    values: npt.NDArray[np.float32]  # [outputs, inputs]: the unquantised kinds; empty for q8 and q4
    codes: npt.NDArray[np.int32]
    scales: npt.NDArray[np.float32]
    minima: npt.NDArray[np.float32]

    @property
    def zero_point(self) -> int:
        return 0 if self.fmt.has_minimum else {"q8": 128, "q4": 8}[self.fmt.kind]

    @property
    def native(self) -> _native.linear.Matrix:
        f = self.fmt
        return _native.linear.Matrix(self.data, f.kind, f.group, f.scale, f.has_minimum, self.outputs, self.inputs)

    def exact_values(self) -> npt.NDArray[np.float64]:
        """[outputs, inputs], not rounded."""
        if self.fmt.kind in ("f32", "bf16"):
            return self.values.astype(np.float64)
        scales = np.repeat(self.scales.astype(np.float64), self.fmt.group, axis=1)
        minima = np.repeat(self.minima.astype(np.float64), self.fmt.group, axis=1)
        return (scales * (self.codes - self.zero_point) + minima)[:, : self.inputs]


def pack_values(fmt: WeightFormat, values: npt.NDArray[np.float32]) -> Packed:
    """f32 or bf16; bf16 values must be bfloat16 numbers already."""
    outputs, inputs = values.shape
    padded = np.zeros((-(-outputs // PANEL) * PANEL, padded_inputs(fmt, inputs)), np.float32)
    padded[:outputs, :inputs] = values
    panels = padded.reshape(-1, PANEL, padded.shape[1])
    if fmt.kind == "f32":
        data = panels.transpose(0, 2, 1)
    else:
        bits = (panels.view(np.uint32) >> 16).astype(np.uint16)
        data = bits.reshape(*bits.shape[:2], -1, 2).transpose(0, 2, 1, 3)
    empty = np.empty((0, 0), np.float32)
    packed = aligned(np.ascontiguousarray(data).view(np.uint8).reshape(-1))
    return Packed(fmt, outputs, inputs, packed, values, np.empty((0, 0), np.int32), empty, empty)


def pack_codes(
    fmt: WeightFormat,
    inputs: int,
    codes: npt.NDArray[np.int32],
    scales: npt.NDArray[np.float32],
    minima: npt.NDArray[np.float32],
) -> Packed:
    """q8 or q4 from codes [outputs, padded inputs], scales and minima [outputs, groups] that fit the scale type exactly."""
    outputs, k = codes.shape
    rows = -(-outputs // PANEL) * PANEL

    def panels(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        padded = np.zeros((rows, values.shape[1]), values.dtype)
        padded[:outputs] = values
        return padded.reshape(rows // PANEL, PANEL, values.shape[1])

    # [panel][column][group][quad][4] -> [panel][group][quad][column][4]
    quads = (
        panels(codes.astype(np.uint8))
        .view(np.uint8)
        .reshape(-1, PANEL, k // fmt.group, fmt.group // 4, 4)
        .transpose(0, 2, 3, 1, 4)
    )
    if fmt.kind == "q4":
        quads = quads[:, :, :, :16] | quads[:, :, :, 16:] << np.uint8(4)
    parts = [quads.reshape(rows // PANEL, k // fmt.group, -1)]
    scale_type = np.dtype("<f2" if fmt.scale == "f16" else "<f4")
    for vector in (scales, minima) if fmt.has_minimum else (scales,):
        by_group = np.ascontiguousarray(panels(vector.astype(scale_type)).transpose(0, 2, 1))
        parts.append(by_group.view(np.uint8))
    data = aligned(np.concatenate(parts, axis=2).reshape(-1))
    assert data.size == matrix_bytes(fmt, outputs, inputs)
    return Packed(fmt, outputs, inputs, data, np.empty((0, 0), np.float32), codes, scales, minima)


def to_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Round to bfloat16, to nearest even; denormals become signed zeros. No NaN, no infinity."""
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    denormal = (bits & 0x7F800000) == 0
    return np.where(denormal, bits & 0x80000000, rounded).astype(np.uint32).view(np.float32)


def random_matrix(fmt: WeightFormat, outputs: int, inputs: int, seed: int = 0) -> Packed:
    """Gaussian values, or every code with scales and minima over two orders of magnitude."""
    rng = np.random.default_rng(seed)
    if fmt.kind in ("f32", "bf16"):
        values = rng.standard_normal((outputs, inputs)).astype(np.float32)
        return pack_values(fmt, to_bf16(values) if fmt.kind == "bf16" else values)
    k = padded_inputs(fmt, inputs)
    codes = rng.integers(0, 256 if fmt.kind == "q8" else 16, (outputs, k), np.int32)
    half = np.float16 if fmt.scale == "f16" else np.float32

    def scales() -> npt.NDArray[np.float32]:
        magnitude = 10.0 ** rng.uniform(-3, -1, (outputs, k // fmt.group))
        return (magnitude * rng.standard_normal(magnitude.shape)).astype(half).astype(np.float32)

    first = scales()
    minima = scales() if fmt.has_minimum else np.zeros_like(first)
    return pack_codes(fmt, inputs, codes, first, minima)


def random_rows(rows: int, inputs: int, seed: int = 1) -> npt.NDArray[np.float32]:
    """Activations whose rows differ in magnitude."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, inputs)) * 10.0 ** rng.uniform(-2, 2, (rows, 1))).astype(np.float32)
