"""Packed panels against the drawing in formats.py, read one element at a time."""

from __future__ import annotations

import numpy as np
import pytest
from weights_helpers import QUANTISED, float_raw, random_raw

from noria.types import LoadError
from noria.weights import pack as pack_module
from noria.weights.formats import PackedMatrix, WeightFormat, group_bytes, matrix_bytes, padded_inputs, panel_bytes
from noria.weights.pack import pack, target_format, unpack
from noria.weights.quantize import dequantize, from_bf16, natural_format, to_bf16

F32, BF16 = WeightFormat(kind="f32"), WeightFormat(kind="bf16")
Q8 = WeightFormat(kind="q8", group=32, scale="f16")
Q4 = WeightFormat(kind="q4", group=32, scale="f16", has_minimum=True)


def element(matrix: PackedMatrix, row: int, column: int) -> float:
    """W[row, column] by the layout's description alone; also defined for padding."""
    fmt, panel, c = matrix.format, row // 32, row % 32
    data = matrix.data[panel * panel_bytes(fmt, matrix.inputs) :]
    if fmt.kind == "f32":
        return float(data[(column * 32 + c) * 4 :][:4].view(np.float32)[0])
    if fmt.kind == "bf16":
        place = (column // 2 * 32 + c) * 2 + column % 2
        return float(from_bf16(data[place * 2 :][:2].view(np.uint16))[0])
    data = data[column // fmt.group * group_bytes(fmt) :]
    quad, i = column % fmt.group // 4, column % 4
    if fmt.kind == "q8":
        code = int(data[(quad * 32 + c) * 4 + i])
        data = data[fmt.group * 32 :]
    else:
        byte = int(data[(quad * 16 + c % 16) * 4 + i])
        code = byte >> 4 if c >= 16 else byte & 15
        data = data[fmt.group * 16 :]
    dtype = np.dtype(np.float16 if fmt.scale == "f16" else np.float32)
    scales = data[: 64 * dtype.itemsize].view(dtype).astype(np.float32)
    if fmt.has_minimum:
        return float(scales[c] * np.float32(code) + scales[32 + c])
    return float(scales[c] * np.float32(code - (8 if fmt.kind == "q4" else 128)))


@pytest.mark.parametrize("raw_type", ["F32", "F16", "BF16", *QUANTISED])
def test_every_element_lies_where_the_layout_says(raw_type: str) -> None:
    """Red when panels, groups, quads, nibbles, scales or minima are written in another order than the kernels read."""
    raw = random_raw(raw_type, 70, 512)
    fmt = F32 if raw_type == "F32" else natural_format(raw_type)
    matrix = pack([raw], fmt)
    expected = dequantize(raw)
    if fmt == BF16:
        expected = from_bf16(to_bf16(expected))
    assert matrix.data.nbytes == matrix_bytes(fmt, 70, 512)
    np.testing.assert_array_equal(unpack(matrix), expected)
    rng = np.random.default_rng(0)
    for row, column in zip(rng.integers(0, 70, 300), rng.integers(0, 512, 300), strict=True):
        assert element(matrix, int(row), int(column)) == expected[row, column]


@pytest.mark.parametrize("fmt", [F32, BF16, Q8])
@pytest.mark.parametrize("inputs", [1, 31, 33, 50])
def test_padding_weighs_exactly_zero(fmt: WeightFormat, inputs: int) -> None:
    """Red when padding rows or columns hold anything that a kernel would add."""
    values = np.random.default_rng(0).standard_normal((5, inputs)).astype(np.float32)
    matrix = pack([float_raw(values)], fmt)
    for row in range(32):
        for column in range(padded_inputs(fmt, inputs)):
            if row >= 5 or column >= inputs:
                assert element(matrix, row, column) == 0.0
    assert unpack(matrix).shape == (5, inputs)


def test_runs_joined_are_the_matrix_whatever_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a run's border inside a tensor, between tensors or at the last panel loses or repeats rows."""
    parts = [random_raw("Q4_1", rows, 64, seed=rows) for rows in (64, 33, 1, 95)]
    whole = pack(parts, Q4)
    monkeypatch.setattr(pack_module, "RUN_ELEMENTS", 64 * 40)
    small = pack(parts, Q4)
    assert np.array_equal(whole.data, small.data)
    np.testing.assert_array_equal(unpack(small), np.concatenate([dequantize(p) for p in parts]))


def test_target_formats() -> None:
    """Red when a setting is ignored, a quantised file is changed without being asked, or q4 meets padding it cannot express."""
    assert target_format("F16", None, 64) == BF16
    assert target_format("F16", "f32", 64) == F32
    assert target_format("F32", "q8", 50) == Q8
    assert target_format("F32", "q4", 64) == Q4
    assert target_format("F32", "q4", 50) == Q8
    assert target_format("F32", "q4", 64, sensitive=True) == Q8
    assert target_format("Q6_K", None, 256) == natural_format("Q6_K")
    assert target_format("Q6_K", "q8", 256) == natural_format("Q6_K")
    assert target_format("Q6_K", "q4", 256) == Q4
    assert target_format("Q4_K", "f32", 256) == F32


@pytest.mark.parametrize("raw_type", ["F32", "Q6_K", "Q8_0"])
@pytest.mark.parametrize(("fmt", "bound"), [(Q8, 0.003), (Q4, 0.045)])
def test_quantising_again_stays_close(raw_type: str, fmt: WeightFormat, bound: float) -> None:
    """Red when re-quantisation reads codes of one format as another's."""
    raw = random_raw("F32", 40, 256) if raw_type == "F32" else random_raw(raw_type, 40, 256)
    expected = dequantize(raw)
    spread = np.abs(expected.reshape(40, -1, 32)).max(axis=2).repeat(32, axis=1)
    error = (unpack(pack([raw], fmt)) - expected) / (spread + np.float32(1e-3))
    assert np.sqrt(np.mean(error**2)) < bound


def test_a_weight_too_large_to_quantise_is_named() -> None:
    """Red when the error does not say which tensor."""
    with pytest.raises(LoadError, match="'big'"):
        pack([float_raw(np.full((1, 32), 1e9, np.float32), "big")], Q8)
