"""The order of summation that native/attention.h promises, written out in numpy with an exact float32 fma."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from steps import BEST, Shape

from noria.backends.cpu import _native
from noria.backends.cpu.memory import address

F32 = npt.NDArray[np.float32]
LOG2_E = np.float32(1.44269504)


def fma(a: F32, b: F32, c: F32) -> F32:
    """Exact a * b + c, rounded once to float32, for normal results.

    The product of two float32 is exact in float64. The sum is rounded to odd there, which makes the second rounding, to
    float32, come out as if it were the only one (Boldo and Melquiond, 2008).
    """
    product, addend = np.broadcast_arrays(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    even = (total.view(np.int64) & 1) == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    return np.where((error != 0) & even, np.nextafter(total, toward), total).astype(np.float32)


def elementary(function: str, x: F32, tier: str = BEST) -> F32:
    """exp, tanh ... of the kernels."""
    x = np.ascontiguousarray(x, np.float32)
    y = np.empty_like(x)
    _native.map(tier, function, address(x), address(y), x.size)
    return y


def to_bf16(x: F32) -> F32:
    """Rounded to bfloat16, to nearest even; normal finite numbers."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def sum_lanes(x: F32) -> np.float32:
    for width in (8, 4, 2, 1):
        x = x[:width] + x[width:]
    return x[0]


def pair_order(length: int, f32: bool) -> list[int]:
    """Of each pair the odd element comes first, then the even one; float32 has no pairs."""
    return list(range(length)) if f32 else [i for even in range(0, length, 2) for i in (even + 1, even)]


def attend(query: F32, keys: F32, values: F32, position: int, shape: Shape, split_keys: int = 256) -> F32:
    """One head's output [dim] for the query [dim] at `position`, over keys and values [positions, dim]."""
    if shape.kv == "bf16":
        query, keys, values = to_bf16(query), to_bf16(keys), to_bf16(values)
    start = max(0, position - shape.window + 1) if shape.window else 0
    merged: tuple[np.float32, np.float32, F32] | None = None
    for split in range(start // split_keys, position // split_keys + 1):
        first, last = max(start, split * split_keys), min(position, split * split_keys + split_keys - 1)
        attend_split = _attend_codes if shape.kv == "int8" else _attend_split
        part = attend_split(query, keys[first : last + 1], values[first : last + 1], first, shape)
        merged = part if merged is None else _merge(merged, part)
    assert merged is not None
    return merged[2] / merged[1]


def _attend_split(query: F32, keys: F32, values: F32, first: int, shape: Shape) -> tuple[np.float32, np.float32, F32]:
    scores = np.zeros(len(keys), np.float32)
    for d in pair_order(len(query), shape.kv == "f32"):
        scores = fma(query[d : d + 1], keys[:, d], scores)
    most, total, weights = _soften(scores, first, shape)
    acc = np.zeros(values.shape[1], np.float32)
    rounded = weights if shape.kv == "f32" else to_bf16(weights)
    last = first + len(keys) - 1
    for key in pair_order(last + 2, shape.kv == "f32"):
        if first <= key <= last:
            acc = fma(rounded[key - first : key - first + 1], values[key - first], acc)
    return most, total, acc


def _attend_codes(query: F32, keys: F32, values: F32, first: int, shape: Shape) -> tuple[np.float32, np.float32, F32]:
    """Over a cache of int8 codes: integer products, so that no order is left to fix."""
    query_codes, query_scale = quantized(query)
    key_codes, key_scales = quantized(keys)
    value_codes, value_scales = quantized(values)
    dots = (key_codes @ query_codes).astype(np.float32)
    most, total, exponentials = _soften(dots * (key_scales * query_scale), first, shape)
    weights = exponentials * value_scales
    largest = weights.max()
    inverse = np.float32(32767) / largest if largest > 0 else np.float32(0)
    sums = np.rint(weights * inverse).astype(np.int64) @ value_codes
    return most, total, sums.astype(np.float32) * (largest / np.float32(32767))


def quantized(x: F32) -> tuple[npt.NDArray[np.int64], F32]:
    """(codes, scales) along the last axis, for finite values that are not all tiny."""
    amax = np.abs(x).max(axis=-1).astype(np.float32)
    codes = np.rint(x * (np.float32(127) / amax)[..., None]).astype(np.int64)
    return codes, amax / np.float32(127)


def _soften(scores: F32, first: int, shape: Shape) -> tuple[np.float32, np.float32, F32]:
    """(largest score, sum of the exponentials, the exponentials) of neighbouring keys from `first` on."""
    if shape.softcap:
        cap = np.float32(shape.softcap)
        scores = cap * elementary("tanh", scores * np.float32(shape.scale) / cap) * LOG2_E
    else:
        scores = scores * (np.float32(shape.scale) * LOG2_E)
    most = scores.max()
    weights = elementary("exp2_not_positive", scores - most)
    lanes = np.zeros(16, np.float32)
    for i, weight in enumerate(weights):
        lanes[(first + i) % 16] += weight
    return most, sum_lanes(lanes), weights


def _merge(
    before: tuple[np.float32, np.float32, F32], now: tuple[np.float32, np.float32, F32]
) -> tuple[np.float32, np.float32, F32]:
    most = max(before[0], now[0])
    a, b = elementary("exp2_not_positive", np.array([before[0] - most, now[0] - most], np.float32))
    total = fma(np.array([before[1]]), np.array([a]), np.array([now[1] * b]))[0]
    return most, total, fma(before[2], np.array([a]), now[2] * b)
