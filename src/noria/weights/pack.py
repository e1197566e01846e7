"""Packed panels: the layout of `formats`, written and read back with numpy.

A matrix is packed a run of panels at a time: panels follow each other without gaps, so that the runs, written one after the
other, are the matrix, and no more than one run is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from noria.types import LoadError
from noria.weights.formats import PANEL, PackedMatrix, WeightFormat, group_bytes, padded_inputs
from noria.weights.quantize import (
    Array,
    Float32,
    Quantized,
    RawTensor,
    decode,
    dequantize,
    from_bf16,
    natural_format,
    quantize_q4,
    quantize_q8,
    to_bf16,
    values,
)

RUN_ELEMENTS = 1 << 20  # weights handled at once: 4 MB in float32, so that the passes over a run stay in the cache

_Q8 = WeightFormat(kind="q8", group=32, scale="f16")
_Q4 = WeightFormat(kind="q4", group=32, scale="f16", has_minimum=True)


def target_format(raw_type: str, quantization: str | None, inputs: int, *, sensitive: bool = False) -> WeightFormat:
    """The packed format of a matrix of type `raw_type` under the setting `quantization`.

    None keeps quantised types as they are and turns floats to bf16. "f32" and "bf16" hold anything. "q8" and "q4" quantise
    again, through float32, whatever is not in such a format already; under "q4" a matrix that is `sensitive` (embedding and
    head) and one whose inputs are no multiple of 32 become q8: padding must weigh exactly zero, which a minimum cannot say.
    """
    natural = natural_format(raw_type)
    if quantization is None or quantization == natural.kind:
        return natural
    if quantization in ("f32", "bf16"):
        return WeightFormat(kind="f32" if quantization == "f32" else "bf16")
    if quantization == "q8" or sensitive or inputs % 32:
        return _Q8
    return _Q4


def packed_runs(raws: Sequence[RawTensor], fmt: WeightFormat) -> Iterator[npt.NDArray[np.uint8]]:
    """The packed form of `raws`, concatenated along the outputs, as flat uint8 runs of whole panels in order."""
    inputs = raws[0].shape[1]
    rows_a_run = max(PANEL, RUN_ELEMENTS // inputs // PANEL * PANEL)
    for pieces in _row_runs(raws, rows_a_run):
        yield _pack_rows(pieces, fmt, inputs).reshape(-1)


def pack(raws: Sequence[RawTensor], fmt: WeightFormat) -> PackedMatrix:
    """The whole matrix at once, in memory."""
    data = np.concatenate(list(packed_runs(raws, fmt)))
    return PackedMatrix(sum(r.shape[0] for r in raws), raws[0].shape[1], fmt, data)


def unpack(matrix: PackedMatrix) -> Float32:
    """float32 [outputs, inputs]: exactly the values that the packed form stands for."""
    fmt, k = matrix.format, padded_inputs(matrix.format, matrix.inputs)
    rows: Float32  # [panel][32][k] in one shape or another
    if fmt.kind == "f32":
        rows = matrix.data.view(np.float32).reshape(-1, k, PANEL).transpose(0, 2, 1)
    elif fmt.kind == "bf16":
        rows = from_bf16(matrix.data.view(np.uint16)).reshape(-1, k // 2, PANEL, 2).transpose(0, 2, 1, 3)
    else:
        rows = values(_read_groups(matrix.data, fmt, k))
    return np.ascontiguousarray(rows.reshape(-1, k)[: matrix.outputs, : matrix.inputs])


# --- runs of rows ------------------------------------------------------------------------------------------------------


def _row_runs(raws: Sequence[RawTensor], rows_a_run: int) -> Iterator[list[RawTensor]]:
    """Cut the concatenated rows into runs of `rows_a_run`; a run across a border has a piece of each tensor."""
    pieces: list[RawTensor] = []
    room = rows_a_run
    for raw in raws:
        start = 0
        while start < raw.shape[0]:
            stop = min(raw.shape[0], start + room)
            pieces.append(RawTensor(raw.name, (stop - start, raw.shape[1]), raw.type, raw.data[start:stop]))
            room -= stop - start
            start = stop
            if room == 0:
                yield pieces
                pieces, room = [], rows_a_run
    if pieces:
        yield pieces


def _pack_rows(pieces: Sequence[RawTensor], fmt: WeightFormat, inputs: int) -> npt.NDArray[np.uint8]:
    """One run: at most `rows_a_run` rows, the last panel padded."""
    rows = sum(p.shape[0] for p in pieces)
    padded_rows, k = -(-rows // PANEL) * PANEL, padded_inputs(fmt, inputs)
    if fmt.kind in ("q8", "q4"):
        quantized = [_quantized(p, fmt, k) for p in pieces]
        return _write_groups(quantized, fmt, padded_rows, k)
    dense = np.zeros((padded_rows, k), np.float32)
    np.concatenate([dequantize(p) for p in pieces], out=dense[:rows, :inputs])
    if fmt.kind == "f32":
        return np.ascontiguousarray(dense.reshape(-1, PANEL, k).transpose(0, 2, 1)).view(np.uint8)
    return np.ascontiguousarray(to_bf16(dense).reshape(-1, PANEL, k // 2, 2).transpose(0, 2, 1, 3)).view(np.uint8)


def _quantized(piece: RawTensor, fmt: WeightFormat, k: int) -> Quantized:
    if natural_format(piece.type) == fmt:
        return decode(piece)
    dense = dequantize(piece)
    padded = np.zeros((len(dense), k), np.float32)
    padded[:, : dense.shape[1]] = dense
    try:
        return quantize_q4(padded) if fmt == _Q4 else quantize_q8(padded)
    except LoadError as error:
        raise LoadError(f"tensor {piece.name!r}: {error}") from None


# --- groups of codes ---------------------------------------------------------------------------------------------------


def _write_groups(parts: Sequence[Quantized], fmt: WeightFormat, padded_rows: int, k: int) -> npt.NDArray[np.uint8]:
    """[panels, groups, group_bytes]: of each group of each panel its codes, its 32 scales, its 32 minima."""
    panels, groups = padded_rows // PANEL, k // fmt.group
    codes = _padded([p.codes for p in parts], padded_rows)
    quads = codes.reshape(panels, PANEL, groups, fmt.group // 4, 4).transpose(0, 2, 3, 1, 4)  # [panel][group][quad][c][i]
    if fmt.kind == "q4":
        quads = quads[:, :, :, :16] | quads[:, :, :, 16:] << 4
    code_bytes = fmt.group // 4 * quads.shape[3] * 4
    scale_bytes = PANEL * (2 if fmt.scale == "f16" else 4)
    out = np.empty((panels, groups, group_bytes(fmt)), np.uint8)
    out[:, :, :code_bytes] = quads.reshape(panels, groups, code_bytes)
    out[:, :, code_bytes : code_bytes + scale_bytes] = _by_group([p.scales for p in parts], padded_rows)
    if fmt.has_minimum:
        minima = [p.minima for p in parts if p.minima is not None]
        out[:, :, code_bytes + scale_bytes :] = _by_group(minima, padded_rows)
    return out


def _read_groups(data: npt.NDArray[np.uint8], fmt: WeightFormat, k: int) -> Quantized:
    """The inverse of `_write_groups`, padding rows included."""
    groups = k // fmt.group
    blocks = data.reshape(-1, groups, group_bytes(fmt))
    columns = PANEL if fmt.kind == "q8" else PANEL // 2
    code_bytes = fmt.group * columns
    quads = blocks[:, :, :code_bytes].reshape(-1, groups, fmt.group // 4, columns, 4)
    if fmt.kind == "q4":
        quads = np.concatenate([quads & np.uint8(15), quads >> np.uint8(4)], axis=3)
    codes = quads.transpose(0, 3, 1, 2, 4).reshape(-1, k)
    dtype = np.dtype(np.float16 if fmt.scale == "f16" else np.float32)
    scale_bytes = PANEL * dtype.itemsize

    def rows(start: int) -> Array:  # [panel][group][32] -> [rows, groups]
        part = np.ascontiguousarray(blocks[:, :, start : start + scale_bytes]).view(dtype)
        return part.transpose(0, 2, 1).reshape(-1, groups)

    return Quantized(fmt, codes, rows(code_bytes), rows(code_bytes + scale_bytes) if fmt.has_minimum else None)


def _padded(parts: Sequence[Array], rows: int) -> Array:
    """Concatenate along the rows and pad with zeros to `rows`: a scale and a minimum of zero make any code weigh nothing."""
    missing = rows - sum(len(p) for p in parts)
    if missing:
        parts = [*parts, np.zeros((missing, parts[0].shape[1]), parts[0].dtype)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _by_group(parts: Sequence[Array], rows: int) -> npt.NDArray[np.uint8]:
    """[rows, groups] -> bytes [panels, groups, 32 * itemsize]."""
    values_ = _padded(parts, rows)
    groups = values_.shape[1]
    return np.ascontiguousarray(values_.reshape(-1, PANEL, groups).transpose(0, 2, 1)).view(np.uint8)
