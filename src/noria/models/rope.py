"""Rotary position embeddings: what a config says about them, and the tables of cosines and sines.

The formulas follow Hugging Face's `modeling_rope_utils` (linear; YaRN, arXiv 2309.00071; Llama 3.1), in the same float32 steps,
so that the angles are equal to the reference's. Kinds whose frequencies depend on the total length of a sequence are refused:
a token's KV must be a function of its own prefix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from noria.models.config import ConfigReader
from noria.models.spec import RopeSpec
from noria.types import LoadError

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

LENGTH_DEPENDENT = ("dynamic", "longrope", "su")
SCALINGS = ("linear", "yarn", "llama3")


def rope_spec(scaling: Mapping[str, Any], *, base: float, dim: int, max_positions: int) -> RopeSpec:
    """The rope of one kind of layer, from its `rope_scaling` / `rope_parameters` table ({} is no scaling).

    `type` and `rope_type` mean the same. `max_positions` is the config's `max_position_embeddings`, the original context
    unless the table gives one.
    """
    read = ConfigReader(scaling)
    kind = read.text("rope_type", read.text("type", "default"))
    if dim % 2 or read.number("partial_rotary_factor", 1.0) != 1.0:
        raise LoadError(f"rotary embeddings must cover whole heads of an even size, not part of {dim} dimensions")
    if kind in ("default", "none"):
        return RopeSpec(base=read.number("rope_theta", base), dim=dim, original_context=max_positions)
    if kind in LENGTH_DEPENDENT:
        raise LoadError(
            f"rope scaling '{kind}' is not supported: its frequencies depend on the total length of a sequence, so equal "
            f"prefixes would give different answers; use one of {', '.join(SCALINGS)}"
        )
    if kind not in SCALINGS:
        raise LoadError(f"unknown rope scaling '{kind}'; supported: {', '.join(SCALINGS)}")

    original = read.positive("original_max_position_embeddings", max_positions)
    implied = max_positions / original if kind == "yarn" and original < max_positions else None
    factor = read.number("factor", implied)
    if not (1.0 <= factor < math.inf):
        raise LoadError(f"the factor of rope scaling '{kind}' must be at least 1, not {factor:g}")
    low, high = read.number("low_freq_factor", 1.0), read.number("high_freq_factor", 4.0)
    if kind == "llama3" and not 0 < low < high:
        raise LoadError(f"rope scaling 'llama3' needs 0 < low_freq_factor < high_freq_factor, not {low:g} and {high:g}")
    attention_factor = scaling.get("attention_factor")
    return RopeSpec(
        base=read.number("rope_theta", base),
        dim=dim,
        scaling=kind,  # type: ignore[arg-type]  # one of SCALINGS, checked above
        factor=factor,
        original_context=original,
        beta_fast=read.number("beta_fast", 32.0) or 32.0,
        beta_slow=read.number("beta_slow", 1.0) or 1.0,
        attention_factor=None if attention_factor is None else read.number("attention_factor"),
        mscale=read.number("mscale", 0.0),
        mscale_all_dim=read.number("mscale_all_dim", 0.0),
        truncate=read.flag("truncate", True),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def scaled_context(rope: RopeSpec, max_positions: int) -> int:
    """The longest sequence: the original context times the factor, or what the config says where that is longer."""
    if rope.scaling is None:
        return max_positions
    return max(max_positions, int(rope.original_context * rope.factor))


def tables(rope: RopeSpec, length: int) -> tuple[Float32, Float32]:
    """(cos, sin), each [length, dim / 2], for positions [0, length), the attention factor multiplied in.

    The bits are the same on every machine: powers are rounded from float64 and the cosines come from `cos_sin` below.
    """
    inverse, attention_factor = _inverse_frequencies(rope)
    if rope.frequency_factors:
        if len(rope.frequency_factors) != rope.dim // 2:
            raise LoadError(f"the file gives {len(rope.frequency_factors)} rope frequency factors, expected {rope.dim // 2}")
        inverse = np.divide(inverse, np.array(rope.frequency_factors, np.float32), dtype=np.float32)
    positions = np.arange(length, dtype=np.float32)
    cos = np.empty((length, rope.dim // 2), np.float32)
    sin = np.empty_like(cos)
    step = max(1, 16384 // (rope.dim // 2))  # temporaries of 128 KiB stay in the cache
    for first in range(0, length, step):
        part = slice(first, first + step)
        cos[part], sin[part] = cos_sin(positions[part, None] * inverse[None, :])
    if attention_factor != 1.0:
        cos *= np.float32(attention_factor)
        sin *= np.float32(attention_factor)
    return cos, sin


def _inverse_frequencies(rope: RopeSpec) -> tuple[Float32, float]:
    """(float32 [dim / 2], attention factor)."""
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    powers = np.array([math.pow(rope.base, float(e)) for e in exponents], np.float64).astype(np.float32)
    inverse = np.float32(1.0) / powers
    if rope.scaling == "linear":
        return inverse / np.float32(rope.factor), 1.0
    if rope.scaling == "llama3":
        return _llama3(rope, inverse), 1.0
    if rope.scaling == "yarn":
        return _yarn(rope, powers), _yarn_attention_factor(rope)
    return inverse, 1.0


def _llama3(rope: RopeSpec, inverse: Float32) -> Float32:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    factor, original = np.float32(rope.factor), np.float32(rope.original_context)
    wavelength = np.float32(2 * math.pi) / inverse
    span = np.float32(rope.high_freq_factor - rope.low_freq_factor)
    smooth = (original / wavelength - np.float32(rope.low_freq_factor)) / span
    between = (np.float32(1) - smooth) * inverse / factor + smooth * inverse
    is_long = wavelength > np.float32(rope.original_context / rope.low_freq_factor)
    is_short = wavelength < np.float32(rope.original_context / rope.high_freq_factor)
    return np.where(is_long, inverse / factor, np.where(is_short, inverse, between)).astype(np.float32)


def _yarn(rope: RopeSpec, powers: Float32) -> Float32:
    """Dimensions that turn often keep their frequency, those that turn rarely are interpolated, with a ramp between."""

    def turning_dim(rotations: float) -> float:
        return rope.dim * math.log(rope.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = turning_dim(rope.beta_fast), turning_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(rope.dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    keep = np.float32(1) - ramp.astype(np.float32)
    interpolated = np.float32(1) / (np.float32(rope.factor) * powers)
    inverse: Float32 = interpolated * (np.float32(1) - keep) + (np.float32(1) / powers) * keep
    return inverse


def _yarn_attention_factor(rope: RopeSpec) -> float:
    """What cosines and sines are multiplied by, so that the softmax keeps its temperature over longer contexts."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


# -- cosines with the same bits everywhere -----------------------------------------------------------------------------
#
# numpy's cos and sin choose an implementation by the processor, and the last bit differs. The polynomials of fdlibm (k_cos.c,
# k_sin.c: below one unit in the last place of float64 on [-pi/4, pi/4]) need only +, - and *, which round alike everywhere.

_PIO2_HIGH = 1.57079632673412561417e00  # the first 33 bits of pi / 2: k * high is exact for k < 2^20
_PIO2_LOW = 6.07710050650619224932e-11
_SIN = (
    -1.66666666666666324348e-01,
    8.33333333332248946124e-03,
    -1.98412698298579493134e-04,
    2.75573137070700676789e-06,
    -2.50507602534068634195e-08,
    1.58969099521155010221e-10,
)
_COS = (
    4.16666666666666019037e-02,
    -1.38888888888741095749e-03,
    2.48015872894767294178e-05,
    -2.75573143513906633035e-07,
    2.08757232129817482790e-09,
    -1.13596475577881948265e-11,
)


def cos_sin(angles: Float32) -> tuple[Float32, Float32]:
    """Cosine and sine of float32 angles in [0, 2^20), rounded from float64."""
    x = angles.astype(np.float64)
    quadrant = np.rint(x * (2 / math.pi))
    r = (x - quadrant * _PIO2_HIGH) - quadrant * _PIO2_LOW
    z = r * r
    sine = r + r * z * _polynomial(z, _SIN)
    cosine = (1.0 - 0.5 * z) + z * z * _polynomial(z, _COS)
    turn = quadrant.astype(np.int64) & 3
    odd = (turn & 1).astype(bool)
    cos = np.where(odd, sine, cosine)
    sin = np.where(odd, cosine, sine)
    np.negative(cos, out=cos, where=(turn == 1) | (turn == 2))
    np.negative(sin, out=sin, where=turn >= 2)
    return cos.astype(np.float32), sin.astype(np.float32)


def _polynomial(z: Float64, coefficients: tuple[float, ...]) -> Float64:
    total = np.full_like(z, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total *= z
        total += coefficient
    return total
