"""The linear, quantisation and embedding kernels, to the last bit, against the order that linear.h promises.

The reference below is numpy with an exact float32 fma, so equality is asked of every format and tier, not closeness.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from contract import fma
from panels import FORMATS, Packed, pack_codes, pack_values, random_matrix, random_rows, to_bf16

from noria.backends.cpu import _native
from noria.weights import pack
from noria.weights.formats import PackedMatrix, WeightFormat

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

TIERS = _native.available_tiers()
BEST = TIERS[-1]
OUTPUTS, INPUTS = 70, 99  # neither a multiple of 32, nor inputs of 2

by_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)


# -- the reference --------------------------------------------------------------------------------------------------------


def quantized(x: F32) -> tuple[I32, F32]:
    """Codes [rows, k] and scales [rows, k / 32] of finite activations, k = inputs padded to 32."""
    rows, inputs = x.shape
    k = -(-inputs // 32) * 32
    groups = np.zeros((rows, k), np.float32)
    groups[:, :inputs] = x
    groups = groups.reshape(rows, k // 32, 32)
    amax = np.abs(groups).max(axis=2)
    usable = amax >= np.float32(2.0**-119)
    safe = np.where(usable, amax, np.float32(1))
    codes = np.where(usable[:, :, None], np.rint(groups * (np.float32(127) / safe)[:, :, None]), 0)
    return codes.astype(np.int32).reshape(rows, k), np.where(usable, safe / np.float32(127), np.float32(0))


def group_order(groups: int, backwards: bool) -> Sequence[int]:
    return range(groups - 1, -1, -1) if backwards else range(groups)


def reference(x: F32, w: Packed, bias: F32 | None = None, backwards: bool = False) -> F32:
    """y = x W^T + bias in the promised order; `backwards` takes the steps of the inner dimension in the opposite order."""
    acc = np.zeros((len(x), w.outputs), np.float32)
    if w.fmt.kind == "f32":
        for i in group_order(w.inputs, backwards):
            acc = fma(x[:, i, None], w.values[None, :, i], acc)
    elif w.fmt.kind == "bf16":
        rounded = to_bf16(x)
        for i in group_order(-(-w.inputs // 2), backwards):
            for j in (2 * i + 1, 2 * i):
                if j < w.inputs:
                    acc = fma(rounded[:, j, None], w.values[None, :, j], acc)
    else:
        acc = reference_quantized(x, w, backwards)
    return acc if bias is None else acc + bias


def reference_quantized(x: F32, w: Packed, backwards: bool) -> F32:
    size = w.fmt.group
    codes, x_scales = quantized(x)
    acc = np.zeros((len(x), w.outputs), np.float32)
    for g in group_order(codes.shape[1] // size, backwards):
        part = codes[:, g * size : (g + 1) * size]
        dot = part @ (w.codes[:, g * size : (g + 1) * size] - w.zero_point).T
        x_scale = x_scales[:, g * size // 32]
        acc = fma(dot.astype(np.float32), w.scales[None, :, g] * x_scale[:, None], acc)
        if w.fmt.has_minimum:
            acc = fma(w.minima[None, :, g], (x_scale * part.sum(axis=1).astype(np.float32))[:, None], acc)
    return acc


def linear(tier: str, x: F32, w: Packed | Sequence[Packed], bias: F32 | None = None, **cut: int | bool) -> F32:
    segments = [w] if isinstance(w, Packed) else w
    y: F32 = _native.linear.linear(tier, x, [s.native for s in segments], bias, **cut)
    return y


def assert_same_bits(a: F32, b: F32) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def test_the_reference_fma_rounds_once() -> None:
    """Red if the reference rounds twice: checked with rational numbers, on sums made to lie next to a float32 tie."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(4000).astype(np.float32) for _ in range(2))
    c = (rng.standard_normal(4000) * 2.0 ** rng.integers(-30, 30, 4000)).astype(np.float32)
    tie = np.float32(1 + 2.0**-12)  # its square, 1 + 2^-11 + 2^-24, is a tie in float32: c decides
    a[:8] = b[:8] = tie
    c[:8] = [0, 1e-10, -1e-10, 1e-20, -1e-20, 2.0**-80, -(2.0**-80), 1]
    for x, y, z, got in zip(a, b, c, fma(a, b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        below = np.nextafter(got, np.float32(-np.inf), dtype=np.float32)
        above = np.nextafter(got, np.float32(np.inf), dtype=np.float32)
        error = abs(exact - Fraction(float(got)))
        assert error <= min(abs(exact - Fraction(float(n))) for n in (below, above))
        if any(error == abs(exact - Fraction(float(n))) for n in (below, above)):
            assert int(got.view(np.uint32)) % 2 == 0


# -- activations ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [99, 352, 576])
def test_quantisation_is_as_defined(inputs: int, tier: str) -> None:
    """Red if a scale is not amax / 127, a code not rounded to nearest even, or a sum leaves a code out.

    Sixteen groups in a row are done together: of 99 inputs there are never so many, of 576 across the rows.
    """
    x = random_rows(5, inputs)
    x[1, :32] = 0
    x[2, 32:64] = 1e-37  # 127 / amax would be infinite
    x[3, 64:96] = np.linspace(-126.5, 127, 32)  # ties
    codes, scales, sums, scaled_sums, half_sums, scaled_half_sums = _native.linear.quantize(tier, x)
    expected_codes, expected_scales = quantized(x)
    np.testing.assert_array_equal(codes, expected_codes)
    assert_same_bits(scales, expected_scales)
    np.testing.assert_array_equal(sums, expected_codes.reshape(5, -1, 32).sum(axis=2))
    np.testing.assert_array_equal(half_sums, expected_codes.reshape(5, -1, 16).sum(axis=2))
    assert_same_bits(scaled_sums, expected_scales * sums.astype(np.float32))
    assert_same_bits(scaled_half_sums, np.repeat(expected_scales, 2, axis=1) * half_sums.astype(np.float32))


def test_a_group_that_is_not_finite_changes_no_other(tier: str) -> None:
    """Red if one group of sixteen that are done together spoils its neighbours, or gets a number for a scale."""
    x = random_rows(4, 512)
    clean = _native.linear.quantize(tier, x)
    x[1, 40] = np.inf
    x[2, 511] = np.nan
    codes, scales, *_ = _native.linear.quantize(tier, x)
    spoilt = np.zeros((4, 16), bool)
    spoilt[1, 1] = spoilt[2, 15] = True
    assert np.isnan(scales[spoilt]).all()
    assert not codes.reshape(4, 16, 32)[spoilt].any()
    assert_same_bits(scales[~spoilt], clean[1][~spoilt])
    np.testing.assert_array_equal(codes.reshape(4, 16, 32)[~spoilt], clean[0].reshape(4, 16, 32)[~spoilt])


@pytest.mark.parametrize("poison", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_poisons_its_own_row(tier: str, poison: float) -> None:
    """Red if NaN or infinity is quantised to a number, crashes, or reaches another row."""
    x, w = random_rows(7, INPUTS), random_matrix(FORMATS[-1], OUTPUTS, INPUTS)
    clean = linear(tier, x, w)
    x[4, 50] = poison
    y = linear(tier, x, w)
    assert np.isnan(y[4]).all()
    others = [0, 1, 2, 3, 5, 6]
    assert_same_bits(y[others], clean[others])


def test_bf16_rounding_is_to_nearest_even(tier: str) -> None:
    """Red if the vector form truncates, keeps denormals, turns NaN into infinity or differs from the scalar remainder."""
    special = np.array([0.0, -0.0, 1e-40, -1e-40, np.inf, -np.inf, 3.4e38], np.float32)
    ties = np.arange(0x3F800000, 0x3F840000, 0x4000).astype(np.uint32).view(np.float32)
    x = np.concatenate([special, ties, random_rows(1, 50)[0]])[None]
    x = np.ascontiguousarray(x[:, : x.shape[1] // 2 * 2 - 1])  # an odd number: one padding value
    pairs = _native.linear.round_bf16(tier, x)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(pairs[:, :-1], to_bf16(x).view(np.uint32) >> 16)
    assert pairs[0, -1] == 0
    bits = np.full((1, 17), 0x7F800001, np.uint32)  # a NaN whose payload is in the bits that are cut off
    assert (_native.linear.round_bf16(tier, bits.view(np.float32))[0, :17] == 0x7FC0).all()


# -- linear ---------------------------------------------------------------------------------------------------------------


@by_format
def test_linear_follows_the_promised_order(tier: str, fmt: WeightFormat) -> None:
    """Red if any kernel adds in another order, rounds elsewhere, loses an integer product or misplaces a padded column."""
    w, x, bias = random_matrix(fmt, OUTPUTS, INPUTS), random_rows(13, INPUTS), random_rows(1, OUTPUTS, seed=2)[0]
    assert_same_bits(linear(tier, x, w), reference(x, w))
    assert_same_bits(linear(tier, x, w, bias), reference(x, w, bias))


@by_format
def test_the_order_matters(fmt: WeightFormat) -> None:
    """The control: summed from the other end, most outputs have other bits, so the tests here would notice."""
    w, x = random_matrix(fmt, OUTPUTS, 256), random_rows(4, 256)
    assert (reference(x, w) != reference(x, w, backwards=True)).mean() > 0.4


@by_format
def test_linear_is_close_to_exact_arithmetic(fmt: WeightFormat) -> None:
    """Red if reference and kernel share a mistake: float64 on the dequantised weights and activations."""
    w, x = random_matrix(fmt, OUTPUTS, 640), random_rows(6, 640)
    seen = x.astype(np.float64)
    if fmt.kind == "bf16":
        seen = to_bf16(x).astype(np.float64)
    elif fmt.kind in ("q8", "q4"):
        codes, scales = quantized(x)
        seen = codes.astype(np.float64) * np.repeat(scales.astype(np.float64), 32, axis=1)
    values = w.exact_values()
    error = np.abs(linear(BEST, x, w) - seen @ values.T)
    assert (error <= 3e-6 * (np.abs(seen) @ np.abs(values).T)).all()


@by_format
def test_rows_alone_equal_rows_together(tier: str, fmt: WeightFormat) -> None:
    """Red if a row's result depends on its batch: every number of rows 1 to 13, and 33, against the rows one by one."""
    w, x = random_matrix(fmt, OUTPUTS, INPUTS), random_rows(33, INPUTS)
    alone = np.concatenate([linear(tier, x[i : i + 1], w) for i in range(33)])
    for rows in [*range(1, 14), 33]:
        assert_same_bits(linear(tier, x[:rows], w), alone[:rows])


@by_format
def test_the_cut_into_tiles_does_not_matter(tier: str, fmt: WeightFormat) -> None:
    """Red if a result depends on which panels and rows share a tile, on the tiles' order or on the number of threads."""
    w, x = random_matrix(fmt, 200, INPUTS), random_rows(33, INPUTS)
    expected = linear(tier, x, w)
    for panel_run, row_block in [(1, 1), (2, 5), (3, 7), (7, 33), (100, 12)]:
        for backwards in (False, True):
            assert_same_bits(linear(tier, x, w, panel_run=panel_run, row_block=row_block, backwards=backwards), expected)
    for threads in (2, 3, 64):
        assert_same_bits(linear(tier, x, w, threads=threads), expected)


def test_more_rows_than_a_block(tier: str) -> None:
    """Red if the last, shorter block of rows is lost or done twice."""
    w, x = random_matrix(FORMATS[-1], OUTPUTS, INPUTS), random_rows(101, INPUTS)
    assert_same_bits(linear(tier, x, w), reference(x, w))


def test_segments_of_mixed_formats_lie_side_by_side(tier: str) -> None:
    """Red if a merged weight (q|k|v) reads a segment with another's format, panel stride, columns or bias."""
    formats = [FORMATS[-1], FORMATS[1], FORMATS[2], FORMATS[0]]
    parts = [random_matrix(f, n, INPUTS, seed=n) for f, n in zip(formats, (64, 32, 96, 41), strict=True)]
    x, bias = random_rows(8, INPUTS), random_rows(1, 233, seed=2)[0]
    expected = np.concatenate([linear(tier, x, p) for p in parts], axis=1) + bias
    for cut in ({}, {"panel_run": 2, "row_block": 3}, {"panel_run": 5, "row_block": 8}):
        assert_same_bits(linear(tier, x, parts, bias, **cut), expected)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.kind in ("q8", "q4")], ids=str)
def test_largest_codes_do_not_saturate(tier: str, fmt: WeightFormat, sign: int) -> None:
    """Red if products are added in 16 bits where they do not fit: the largest codes times +-127 everywhere."""
    k = 128
    codes = np.full((OUTPUTS, k), 255 if fmt.kind == "q8" else 15, np.int32)
    codes[1::2] = 0
    scales = np.full((OUTPUTS, k // fmt.group), 1, np.float32)
    w = pack_codes(fmt, k, codes, scales, np.zeros_like(scales))
    x = np.full((5, k), 127 * sign, np.float32)
    expected = (127 * sign * (codes - w.zero_point)).sum(axis=1)
    np.testing.assert_array_equal(linear(tier, x, w), np.broadcast_to(expected, (5, OUTPUTS)))


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_denormals_are_flushed_on_every_tier(tier: str, kind: str) -> None:
    """Red if a tier keeps a denormal weight or a denormal product: tiny weights times tiny activations are zero."""
    fmt = WeightFormat(kind=kind)  # type: ignore[arg-type]
    weights = np.array([[1e-20, 1e-20], [1e-39, 1e-39], [1e-20, 1.0]], np.float32)
    weights = (weights.view(np.uint32) & 0xFFFF0000).view(np.float32)
    x = np.array([[1e-20, 1e-20], [2.0**20, 2.0**20]], np.float32)
    y = linear(tier, x, pack_values(fmt, weights))
    assert (y[0, :2] == 0).all()
    assert y[1, 1] == 0
    assert y[0, 2] != 0


# -- embedding and dequantisation -----------------------------------------------------------------------------------------


@by_format
def test_dequantised_values(tier: str, fmt: WeightFormat) -> None:
    """Red if a code, scale or minimum is taken from the wrong column or group, or rounded more than once."""
    w = random_matrix(fmt, OUTPUTS, INPUTS)
    if fmt.kind in ("f32", "bf16"):
        expected = w.values
    else:
        scales, minima = (np.repeat(v, fmt.group, axis=1)[:, :INPUTS] for v in (w.scales, w.minima))
        codes = (w.codes[:, :INPUTS] - w.zero_point).astype(np.float32)
        expected = fma(scales, codes, minima) if fmt.has_minimum else scales * codes
    assert_same_bits(_native.linear.dequantize(tier, w.native), expected)


@by_format
def test_embedding_gathers_scaled_rows(tier: str, fmt: WeightFormat) -> None:
    """Red if an id reads another row, or the factor is applied before the value is rounded."""
    w = random_matrix(fmt, OUTPUTS, INPUTS)
    ids = np.array([0, 69, 31, 32, 15, 16, 0], np.int32)
    rows = _native.linear.dequantize(tier, w.native)[ids]
    assert_same_bits(_native.linear.embed(tier, w.native, ids, 1.0), rows)
    assert_same_bits(_native.linear.embed(tier, w.native, ids, 25.3), rows * np.float32(25.3))


@by_format
def test_the_weight_packer_and_the_kernels_mean_the_same_layout(fmt: WeightFormat) -> None:
    """Red if weights/pack.py and the kernels read one packed matrix differently."""
    w = random_matrix(fmt, OUTPUTS, INPUTS)
    unpacked = pack.unpack(PackedMatrix(w.outputs, w.inputs, w.fmt, w.data))
    np.testing.assert_allclose(unpacked, _native.linear.dequantize(BEST, w.native), rtol=2e-7, atol=1e-8)
