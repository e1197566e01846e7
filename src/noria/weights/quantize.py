"""Element formats: GGUF's blocks as codes with scales, float32 to codes, and back to float32.

Every quantised type that is read is the same thing: unsigned codes [n, k] and, for each group of a row, a scale and perhaps a
minimum, with value = scale * code + minimum, or value = scale * (code - centre) where there is no minimum. The block layouts
are ggml's (ggml-common.h). The mapping to codes loses nothing: a product of scale and code is exact in float32 for each of
these types, so a kernel that computes scale * code + minimum gets the very value that ggml defines.

    type      block              codes          scales, minima as kept
    Q4_0      32, 18 bytes       q4, centre 8   float16, as in the file
    Q4_1      32, 20 bytes       q4             float16, as in the file
    Q5_0      32, 22 bytes       q8 (16 -> 128) float16, as in the file
    Q5_1      32, 24 bytes       q8             float16, as in the file
    Q8_0      32, 34 bytes       q8 (0 -> 128)  float16, as in the file
    Q4_K      256, 144 bytes     q4             float32: d * 6-bit scale, -dmin * 6-bit minimum
    Q5_K      256, 176 bytes     q8             float32: likewise
    Q6_K      256, 210 bytes     q8 (32 -> 128) float32: d * 8-bit scale, in groups of 16
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from noria.types import LoadError
from noria.weights.formats import WeightFormat

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]

Q4_GROUP = Q8_GROUP = 32


class Block(NamedTuple):
    """The unit of a type's storage along a row."""

    elements: int
    nbytes: int


BLOCKS = {
    "F32": Block(1, 4),
    "F16": Block(1, 2),
    "BF16": Block(1, 2),
    "Q4_0": Block(32, 18),
    "Q4_1": Block(32, 20),
    "Q5_0": Block(32, 22),
    "Q5_1": Block(32, 24),
    "Q8_0": Block(32, 34),
    "Q4_K": Block(256, 144),
    "Q5_K": Block(256, 176),
    "Q6_K": Block(256, 210),
}
FLOAT_TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class RawTensor:
    """A checkpoint tensor as it lies in the file. `data` is uint8 [rows, bytes per row]; a vector is one row."""

    name: str
    shape: tuple[int, ...]  # (outputs, inputs) or (length,)
    type: str  # a key of BLOCKS
    data: npt.NDArray[np.uint8]

    @property
    def is_float(self) -> bool:
        return self.type in FLOAT_TYPES


@dataclass(frozen=True)
class Quantized:
    """Rows of codes: value[r, i] = scales[r, i // group] * codes[r, i] + minima[r, i // group], see `WeightFormat`."""

    format: WeightFormat
    codes: Codes  # [rows, k]
    scales: Array  # [rows, k / group], float16 or float32
    minima: Array | None


def centre(fmt: WeightFormat) -> int:
    """The code of zero in a format without minima."""
    return 8 if fmt.kind == "q4" else 128


def values(quantized: Quantized) -> Float32:
    """float32 [rows, k]: the product is exact, the minimum is added with one rounding."""
    rows, k = quantized.codes.shape
    fmt = quantized.format
    scales = quantized.scales.astype(np.float32)[:, :, None]
    codes = quantized.codes.reshape(rows, -1, fmt.group).astype(np.float32)
    if quantized.minima is None:
        codes -= np.float32(centre(fmt))
    codes *= scales
    if quantized.minima is not None:
        codes += quantized.minima.astype(np.float32)[:, :, None]
    return codes.reshape(rows, k)


def dequantize(raw: RawTensor) -> Float32:
    """The tensor in float32, in its shape. LoadError if it holds NaN or infinity."""
    if raw.is_float:
        return _floats(raw).reshape(raw.shape)
    return values(decode(raw)).reshape(raw.shape)


# --- GGUF blocks -> codes ----------------------------------------------------------------------------------------------


def natural_format(raw_type: str) -> WeightFormat:
    """The packed format that holds a type without loss; bf16 for the float types, which is the default for matrices."""
    return _DECODERS[raw_type].format if raw_type in _DECODERS else WeightFormat(kind="bf16")


def decode(raw: RawTensor) -> Quantized:
    """Codes, scales and minima of a quantised tensor. LoadError if a scale is NaN or infinite."""
    decoder = _DECODERS[raw.type]
    rows = raw.data.shape[0]
    codes, scales, minima = decoder.function(raw.data.reshape(-1, BLOCKS[raw.type].nbytes))
    for part in (scales, minima):
        if part is not None and not np.isfinite(part).all():
            raise LoadError(f"tensor {raw.name!r} has a scale that is NaN or infinite; the file is damaged")
    return Quantized(
        decoder.format,
        codes.reshape(rows, -1),
        scales.reshape(rows, -1),
        None if minima is None else minima.reshape(rows, -1),
    )


Parts = tuple[Codes, Array, Array | None]


def _half(blocks: Codes, start: int) -> npt.NDArray[np.float16]:
    """The float16 at byte `start` of each block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2")


def _nibbles(packed: Codes) -> Codes:
    """[..., n] bytes -> [..., 2 n]: all low nibbles, then all high ones."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)


def _fifth_bits(blocks: Codes, start: int) -> Codes:
    """The 32 high bits of a Q5_0 or Q5_1 block, each as 0 or 16."""
    return np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") * np.uint8(16)


def _q4_0(blocks: Codes) -> Parts:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0), None


def _q4_1(blocks: Codes) -> Parts:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Codes) -> Parts:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return codes + np.uint8(128 - 16), _half(blocks, 0), None


def _q5_1(blocks: Codes) -> Parts:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Codes) -> Parts:
    return blocks[:, 2:] ^ np.uint8(128), _half(blocks, 0), None  # int8 + 128


def _two_level_scales(blocks: Codes) -> tuple[Float32, Float32]:
    """Scales and minima of the 8 groups of a Q4_K or Q5_K block, [blocks, 8] each.

    Twelve bytes hold 8 scales and 8 minima of 6 bits: bytes 0-3 and 4-7 the first four of each, their top two bits on loan to
    the last four, whose low four bits are the nibbles of bytes 8-11.
    """
    first, second, third = (blocks[:, i : i + 4] for i in (4, 8, 12))
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    d, dmin = _half(blocks, 0).astype(np.float32), _half(blocks, 2).astype(np.float32)
    return d * scales, -(dmin * minima)


def _q4_k(blocks: Codes) -> Parts:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))  # four runs of 32 bytes: 64 elements each
    return codes, *_two_level_scales(blocks)


def _q5_k(blocks: Codes) -> Parts:
    """As Q4_K, with the fifth bit of element i of group g in bit g of byte i of `high`."""
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None] & np.uint8(1)
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | high * np.uint8(16)
    return codes, *_two_level_scales(blocks)


def _q6_k(blocks: Codes) -> Parts:
    """Two halves of 128 elements: 64 bytes of low nibbles, 32 bytes with four pairs of high bits; then 16 int8 scales, d."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[None, None, :, None] & np.uint8(3)
    scales = blocks[:, 192:208].view(np.int8) * _half(blocks, 208).astype(np.float32)
    return (low | high * np.uint8(16)) + np.uint8(128 - 32), scales, None


class _Decoder(NamedTuple):
    format: WeightFormat
    function: Callable[[Codes], Parts]


_DECODERS = {
    "Q4_0": _Decoder(WeightFormat(kind="q4", group=32, scale="f16"), _q4_0),
    "Q4_1": _Decoder(WeightFormat(kind="q4", group=32, scale="f16", has_minimum=True), _q4_1),
    "Q5_0": _Decoder(WeightFormat(kind="q8", group=32, scale="f16"), _q5_0),
    "Q5_1": _Decoder(WeightFormat(kind="q8", group=32, scale="f16", has_minimum=True), _q5_1),
    "Q8_0": _Decoder(WeightFormat(kind="q8", group=32, scale="f16"), _q8_0),
    "Q4_K": _Decoder(WeightFormat(kind="q4", group=32, scale="f32", has_minimum=True), _q4_k),
    "Q5_K": _Decoder(WeightFormat(kind="q8", group=32, scale="f32", has_minimum=True), _q5_k),
    "Q6_K": _Decoder(WeightFormat(kind="q8", group=16, scale="f32"), _q6_k),
}


# --- floats ------------------------------------------------------------------------------------------------------------


def _floats(raw: RawTensor) -> Float32:
    if raw.type == "BF16":
        result = from_bf16(raw.data.view("<u2"))
    else:
        result = raw.data.view("<f4" if raw.type == "F32" else "<f2").astype(np.float32)
    if not np.isfinite(result).all():
        raise LoadError(f"tensor {raw.name!r} holds NaN or infinity; the file is damaged")
    return result


def to_bf16(x: Float32) -> npt.NDArray[np.uint16]:
    """Finite float32 -> bfloat16 bits, to nearest even; denormals become signed zeros, as in the kernels."""
    bits = x.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16
    denormal = (bits & np.uint32(0x7F800000)) == 0
    return np.where(denormal, bits >> 16 & 0x8000, rounded).astype(np.uint16)


def from_bf16(bits: npt.NDArray[np.uint16]) -> Float32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


# --- float32 -> codes --------------------------------------------------------------------------------------------------


def quantize_q8(x: Float32) -> Quantized:
    """[rows, k], k a multiple of 32 -> codes 128 + [-127, 127] with a float16 scale a group: largest magnitude / 127."""
    groups = x.reshape(len(x), -1, Q8_GROUP)
    scales = _to_half(np.abs(groups).max(axis=2) / np.float32(127))
    codes = np.rint(groups * _inverse(scales)[:, :, None])
    codes = np.clip(codes, -127, 127) + np.float32(128)
    fmt = WeightFormat(kind="q8", group=Q8_GROUP, scale="f16")
    return Quantized(fmt, codes.astype(np.uint8).reshape(x.shape), scales, None)


def quantize_q4(x: Float32) -> Quantized:
    """[rows, k], k a multiple of 32 -> codes [0, 15] with a float16 scale and minimum a group, of small squared error.

    Rounding between a group's smallest and largest value spends the codes on two outliers. So narrower ranges are tried as
    well; for the codes of each, the best scale and minimum follow by least squares; the pair with the least error, measured
    after rounding to float16, is kept.
    """
    groups = x.reshape(len(x), -1, Q4_GROUP)
    low, high = groups.min(axis=2), groups.max(axis=2)
    best = _q4_candidate(groups, (high - low) / np.float32(15), low)
    for narrower in _Q4_RANGES:
        margin = (high - low) * np.float32((1 - narrower) / 2)
        scale, minimum = _fit(groups, _codes(groups, (high - low - 2 * margin) / np.float32(15), low + margin))
        candidate = _q4_candidate(groups, scale, minimum)
        better = candidate.error < best.error
        best = _Q4Candidate(
            np.where(better[:, :, None], candidate.codes, best.codes),
            np.where(better, candidate.scales, best.scales),
            np.where(better, candidate.minima, best.minima),
            np.where(better, candidate.error, best.error),
        )
    fmt = WeightFormat(kind="q4", group=Q4_GROUP, scale="f16", has_minimum=True)
    return Quantized(fmt, best.codes.astype(np.uint8).reshape(x.shape), best.scales, best.minima)


_Q4_RANGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)  # tried, as shares of a group's full range


class _Q4Candidate(NamedTuple):
    codes: Float32  # [rows, groups, 32]
    scales: npt.NDArray[np.float16]  # [rows, groups]
    minima: npt.NDArray[np.float16]
    error: Float32  # sum of squares over the group


def _q4_candidate(groups: Float32, scale: Float32, minimum: Float32) -> _Q4Candidate:
    scales, minima = _to_half(scale), _to_half(minimum)
    codes = _codes(groups, scales.astype(np.float32), minima.astype(np.float32))
    difference = codes * scales[:, :, None].astype(np.float32) + minima[:, :, None].astype(np.float32) - groups
    return _Q4Candidate(codes, scales, minima, np.einsum("rgi,rgi->rg", difference, difference))


def _codes(groups: Float32, scale: Float32, minimum: Float32) -> Float32:
    codes: Float32 = np.rint((groups - minimum[:, :, None]) * _inverse(scale)[:, :, None])
    return np.clip(codes, 0, 15, out=codes)


def _fit(groups: Float32, codes: Float32) -> tuple[Float32, Float32]:
    """The scale and minimum that bring scale * codes + minimum closest to the group, by least squares."""
    mean_code, mean = codes.mean(axis=2, keepdims=True), groups.mean(axis=2, keepdims=True)
    centred = codes - mean_code
    variance = np.einsum("rgi,rgi->rg", centred, centred)
    covariance = np.einsum("rgi,rgi->rg", centred, groups - mean)
    scale = np.divide(covariance, variance, out=np.zeros_like(variance), where=variance > 0)
    return scale, mean[:, :, 0] - scale * mean_code[:, :, 0]


def _to_half(x: Float32) -> npt.NDArray[np.float16]:
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    if not np.isfinite(half).all():
        raise LoadError("a weight is too large for a float16 scale; use --quantization bf16")
    return half


def _inverse(scales: Array) -> Float32:
    """1 / scale, and 0 for 0: a group without range has the code 0 everywhere."""
    scales = scales.astype(np.float32)
    with np.errstate(over="ignore", divide="ignore"):
        return np.where(scales > np.float32(1e-37), np.float32(1) / scales, np.float32(0))
