"""Element formats: exact against the reference implementation where nothing may be lost, bounded where something is."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np
from weights_helpers import QUANTISED, float_raw, random_raw

from noria.types import LoadError
from noria.weights.quantize import BLOCKS, RawTensor, decode, dequantize, from_bf16, quantize_q4, quantize_q8, to_bf16, values


@pytest.mark.parametrize("raw_type", BLOCKS)
@pytest.mark.parametrize("seed", range(3))
def test_every_type_decodes_to_the_reference_values_exactly(raw_type: str, seed: int) -> None:
    """Red when a nibble order, a high bit, a two-level scale or the rounding of a minimum is wrong for any type."""
    raw = random_raw(raw_type, 24, 512, seed)
    expected = gguf.quants.dequantize(raw.data, gguf.GGMLQuantizationType[raw_type]).reshape(24, 512)
    np.testing.assert_array_equal(dequantize(raw), expected)


@pytest.mark.parametrize("raw_type", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_of_the_reference_quantiser_decode_to_its_values(raw_type: str) -> None:
    """Red when only random bytes work: real quantised weights, quantised by the reference."""
    weights = np.random.default_rng(1).standard_normal((32, 256)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[raw_type]
    data = gguf.quants.quantize(weights, kind)
    decoded = dequantize(RawTensor("w", weights.shape, raw_type, data))
    np.testing.assert_array_equal(decoded, gguf.quants.dequantize(data, kind))
    assert np.abs(decoded - weights).max() < 0.5


@pytest.mark.parametrize("raw_type", QUANTISED)
def test_a_scale_that_is_not_finite_is_refused(raw_type: str) -> None:
    """Red when a damaged block becomes NaN logits instead of an error that names the tensor."""
    raw = random_raw(raw_type, 2, 256)
    block = raw.data.reshape(-1, BLOCKS[raw_type].nbytes)
    offset = 208 if raw_type == "Q6_K" else 0
    block[3 % len(block), offset : offset + 2] = np.array([np.nan], np.float16).view(np.uint8)
    with pytest.raises(LoadError, match=r"'w'.*NaN"):
        decode(raw)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_float_that_is_not_finite_is_refused(bad: float) -> None:
    """Red when NaN weights of a float checkpoint are served."""
    weights = np.ones((2, 4), np.float32)
    weights[1, 2] = bad
    with pytest.raises(LoadError, match=r"'w'.*NaN"):
        dequantize(float_raw(weights))


def test_bf16_rounds_to_nearest_even_and_flushes_denormals() -> None:
    """Red when rounding truncates, ties go up, or denormals survive that the kernels flush."""
    x = np.array([1.0, 1.00390625, 1.01171875, -1.00390625, 1e-40, -1e-40, 3e38, 0.0, -0.0], np.float32)
    expected = np.array([1.0, 1.0, 1.015625, -1.0, 0.0, -0.0, 3e38, 0.0, -0.0], np.float32)
    result = from_bf16(to_bf16(x))
    np.testing.assert_array_equal(np.signbit(result), np.signbit(expected))
    np.testing.assert_allclose(result, expected, rtol=2**-8, atol=0)
    assert result[1] == 1.0
    assert result[2] == 1.015625  # a tie between 1.0078125 and 1.015625, whose last bit is even


groups = st_np.arrays(
    np.float32, (3, 64), elements=st.floats(-50, 50, width=32, allow_nan=False) | st.sampled_from([0.0, 1e-4, -1e-3])
)


@settings(max_examples=60, deadline=None)
@given(groups)
def test_q8_errs_by_at_most_half_a_step(x: np.ndarray) -> None:
    """Red when codes are truncated, clipped early, or scaled by another group's scale."""
    error = np.abs(values(quantize_q8(x)) - x).reshape(3, 2, 32)
    step = np.abs(x).reshape(3, 2, 32).max(axis=2, keepdims=True) / 127
    assert (
        error <= step * 0.5 * 1.08 + 127 * 2.0**-25
    ).all()  # float16 rounds the scale: 2^-11 of 127 steps, or 2^-25 absolute


@settings(max_examples=60, deadline=None)
@given(groups)
def test_q4_is_never_worse_than_plain_rounding_between_the_extremes(x: np.ndarray) -> None:
    """Red when the search returns a candidate that is not the best it saw, or mixes codes of one with scales of another."""
    result = quantize_q4(x)
    error = ((values(result) - x).reshape(3, 2, 32) ** 2).sum(axis=2)
    grouped = x.reshape(3, 2, 32)
    low, high = grouped.min(axis=2), grouped.max(axis=2)
    scale = ((high - low) / np.float32(15)).astype(np.float16).astype(np.float32)[:, :, None]
    minimum = low.astype(np.float16).astype(np.float32)[:, :, None]
    codes = np.clip(np.rint((grouped - minimum) / np.where(scale > 0, scale, 1)), 0, 15)
    plain = ((scale * codes + minimum - grouped) ** 2).sum(axis=2)
    assert (error <= plain * 1.0001 + 1e-9).all()
    assert result.codes.max() <= 15


def test_q4_beats_plain_rounding_on_normal_weights() -> None:
    """Red when the search over ranges is dropped."""
    x = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    error = np.mean((values(quantize_q4(x)) - x) ** 2)
    reference = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q4_1)
    plain = np.mean((gguf.quants.dequantize(reference, gguf.GGMLQuantizationType.Q4_1) - x) ** 2)
    assert error < 0.93 * plain


def test_a_weight_beyond_float16_scales_is_refused() -> None:
    """Red when an infinite scale is stored."""
    x = np.full((1, 32), 1e9, np.float32)
    with pytest.raises(LoadError, match="too large"):
        quantize_q8(x)
    with pytest.raises(LoadError, match="too large"):
        quantize_q4(x)
