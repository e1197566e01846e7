"""Elementary functions and row-local stages: close to float64, the same bits on every tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from contract import elementary, fma, sum_lanes
from steps import BEST, TIERS, Row, inputs, results, same_bits

from noria.backends.cpu import _native
from noria.backends.cpu.memory import address, anonymous

F32 = npt.NDArray[np.float32]


def ulps(y: F32, exact: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Distance in units of the last place of the exact result."""
    spacing = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    return np.abs(y.astype(np.float64) - exact) / np.maximum(spacing, 2.0**-149)


def gelu(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


FUNCTIONS: dict[str, tuple[Callable[[Any], Any], float, float, float]] = {  # the function, its range, its error in ulp
    "exp": (np.exp, -86.0, 88.7, 1.6),
    "exp2_not_positive": (np.exp2, -125.0, 0.0, 2.1),
    "log": (np.log, 1e-30, 1e30, 1.6),
    "tanh": (np.tanh, -12.0, 12.0, 2.5),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), -60.0, 60.0, 3.0),
    "silu": (lambda x: x / (1 + np.exp(-x)), -60.0, 60.0, 4.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementary_functions_are_accurate(name: str, tier: str) -> None:
    """Red when a coefficient is wrong in its last digits, or a range reduction loses bits."""
    function, low, high, bound = FUNCTIONS[name]
    x = np.random.default_rng(0).uniform(low, high, 200_003).astype(np.float32)
    x[:1000] = np.linspace(low if name == "log" else -1, 1, 1000)
    assert ulps(elementary(name, x, tier), function(x.astype(np.float64))).max() <= bound


def test_gelu_is_accurate(tier: str) -> None:
    """In absolute terms: far below zero the tanh form itself cancels. Red when a constant of the approximation is wrong."""
    x = np.random.default_rng(0).uniform(-12, 12, 100_003).astype(np.float32)
    assert np.abs(elementary("gelu_tanh", x, tier) - gelu(x.astype(np.float64))).max() < 1e-6


def test_elementary_functions_at_the_edges(tier: str) -> None:
    """Red when exp(-inf) is not 0, an overflow wraps round, or a NaN becomes a number."""
    inf, nan = np.inf, np.nan
    cases: list[tuple[str, float, float]] = [
        ("exp", -inf, 0.0),
        ("exp", -1e30, 0.0),
        ("exp", 0.0, 1.0),
        ("exp", 89.0, inf),
        ("exp", inf, inf),
        ("exp", nan, nan),
        ("exp2_not_positive", -inf, 2.0**-125),
        ("exp2_not_positive", 0.0, 1.0),
        ("exp2_not_positive", nan, nan),
        ("log", 0.0, -inf),
        ("log", 1.0, 0.0),
        ("log", -1.0, nan),
        ("log", inf, inf),
        ("log", nan, nan),
        ("tanh", -inf, -1.0),
        ("tanh", 50.0, 1.0),
        ("tanh", 0.0, 0.0),
        ("tanh", nan, nan),
        ("sigmoid", -inf, 0.0),
        ("sigmoid", inf, 1.0),
        ("silu", nan, nan),
        ("gelu_tanh", nan, nan),
    ]
    for name, x, expected in cases:
        result = elementary(name, np.array([x], np.float32), tier)[0]
        assert result == expected or (np.isnan(expected) and np.isnan(result)), (name, x, result)


@pytest.mark.parametrize("name", [*FUNCTIONS, "gelu_tanh"])
def test_elementary_functions_have_the_same_bits_on_every_tier(name: str) -> None:
    """Red when the compiler fuses a multiplication and an addition on one tier only."""
    bits = np.random.default_rng(1).integers(0, 2**32, 100_003, dtype=np.uint32)
    x = bits.view(np.float32).copy()
    x[np.isnan(x)] = np.nan
    reference = elementary(name, x)
    for tier in TIERS:
        y = elementary(name, x, tier)
        number = ~np.isnan(reference)
        assert np.array_equal(np.isnan(y), ~number)
        assert np.array_equal(y[number].view(np.uint32), reference[number].view(np.uint32))


# -- stages -----------------------------------------------------------------------------------------------------------------


class Stages:
    """A tape of one rows op over `rows` tokens; arrays given to it stay alive."""

    def __init__(self, rows: int, tier: str = BEST, threads: int = 1, start: int = 0, vocab: int = 64) -> None:
        self.rows, self.start = rows, start
        self.kept: list[npt.NDArray[Any]] = []
        self.tape = _native.Tape(_native.Pool(threads), tier, rows, rows, 64, 65, 1024, vocab, [0])
        self.table = np.arange(1, 65, dtype=np.int32).reshape(1, 64)

    def at(self, array: npt.NDArray[Any]) -> int:
        self.kept.append(array)
        return address(array)

    def run(self, logit_rows: tuple[int, ...] = ()) -> None:
        self.tape.finish()
        step = inputs([Row(0, self.start, self.rows)], [self.table], logit_rows)
        self.tape.run(step, results(0), 0)


def random(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run_norm(x: F32, residual: F32 | None, weight: F32, eps: float, tier: str = BEST, threads: int = 1) -> tuple[F32, F32]:
    s = Stages(len(x), tier, threads)
    total, normed = x.copy() if residual is None else residual.copy(), np.empty_like(x)
    s.tape.begin_rows(logits=False)
    s.tape.norm(
        x=s.at(x),
        residual=0 if residual is None else s.at(total),
        weight=s.at(weight),
        normed=s.at(normed),
        width=x.shape[1],
        eps=eps,
    )
    s.run()
    return normed, total


@pytest.mark.parametrize("width", [16, 64, 576, 100, 7])
def test_rms_norm(width: int, tier: str) -> None:
    """Red when the mean, eps, the residual add or the tail of a width that 16 does not divide is wrong."""
    x, residual, weight = random(33, width), random(33, width, seed=1), random(width, seed=2)
    normed, total = run_norm(x, residual, weight, 1e-5, tier)
    exact = x.astype(np.float64) + residual
    assert same_bits(total, x + residual)
    expected = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    assert np.allclose(normed, expected, rtol=2e-6, atol=1e-6)
    assert same_bits(run_norm(x, residual, weight, 1e-5, BEST, threads=3)[0], normed)


def test_rms_norm_sums_in_the_order_of_its_contract() -> None:
    """Red when lanes are not elements i, i + 16, ... or the lanes are added in another order."""
    x, weight = random(5, 100), random(100, seed=2)
    normed, _ = run_norm(x, None, weight, 1e-6)
    for row, result in zip(x, normed, strict=True):
        lanes = np.zeros(16, np.float32)
        for i in range(0, 100, 16):
            part = np.zeros(16, np.float32)
            part[: min(16, 100 - i)] = row[i : i + 16]
            lanes = fma(part, part, lanes)
        mean = sum_lanes(lanes) / np.float32(100)
        scale = np.float32(1) / np.sqrt(mean + np.float32(1e-6))
        assert same_bits(result, row * scale * weight)


@pytest.mark.parametrize("rotated", [64, 48, 24, 10])
def test_rope_turns_halves(rotated: int, tier: str) -> None:
    """Red when pairs are neighbours instead of halves, the value heads turn, or the dims past the rotated ones change."""
    heads, kv_heads, dim, rows, start = 3, 1, 64, 20, 5
    qkv = random(rows, (heads + 2 * kv_heads) * dim)
    angles = np.arange(64)[:, None] * 10000.0 ** (-np.arange(rotated // 2) / (rotated // 2))
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    s = Stages(rows, tier, start=start)
    turned = qkv.copy()
    s.tape.begin_rows(logits=False)
    s.tape.rope(
        qkv=s.at(turned),
        stride=qkv.shape[1],
        cosines=s.at(cosines),
        sines=s.at(sines),
        half=rotated // 2,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
    )
    s.run()
    x = qkv.reshape(rows, -1, dim)
    half = rotated // 2
    cosine, sine = (t[start : start + rows, None] for t in (cosines, sines))
    low, high = x[..., :half], x[..., half:rotated]
    expected = x.copy()
    expected[..., :half] = fma(low, cosine, -(high * sine))
    expected[..., half:rotated] = fma(high, cosine, low * sine)
    expected[:, heads + kv_heads :] = x[:, heads + kv_heads :]
    assert same_bits(turned, expected.reshape(rows, -1))


@pytest.mark.parametrize("gelu_activation", [False, True])
@pytest.mark.parametrize("width", [96, 50])
def test_gated(gelu_activation: bool, width: int, tier: str) -> None:
    """Red when gate and up are exchanged or the tail is lost."""
    x = random(17, 2 * width)
    s, y = Stages(17, tier), np.empty((17, width), np.float32)
    s.tape.begin_rows(logits=False)
    s.tape.gated(gate_up=s.at(x), y=s.at(y), width=width, gelu=gelu_activation)
    s.run()
    function = elementary("gelu_tanh" if gelu_activation else "silu", x[:, :width])
    assert same_bits(y, function * x[:, width:])


def test_add_gather_and_softcap(tier: str) -> None:
    """Red when a gathered row is another one, or stages of one op do not run in order."""
    x, y, z = random(9, 37), random(9, 37, seed=1), np.empty((3, 37), np.float32)
    s, total = Stages(9, tier), x.copy()
    s.tape.begin_rows(logits=False)
    s.tape.add(x=s.at(total), y=s.at(y), width=37)
    s.tape.begin_rows(logits=True)
    s.tape.gather(x=s.at(total), y=s.at(z), width=37)
    s.tape.softcap(x=s.at(z), width=37, cap=1.5)
    s.run(logit_rows=(0, 4, 8))
    assert same_bits(total, x + y)
    cap = np.float32(1.5)
    assert same_bits(z, cap * elementary("tanh", (x + y)[[0, 4, 8]] / cap))


def test_head_norm_leaves_values_alone(tier: str) -> None:
    """Red when a query head gets the keys' weight, or a value head is normed."""
    heads, kv_heads, dim = 4, 2, 32
    qkv, q_weight, k_weight = random(6, (heads + 2 * kv_heads) * dim), random(dim, seed=1), random(dim, seed=2)
    s, y = Stages(6, tier), qkv.copy()
    s.tape.begin_rows(logits=False)
    s.tape.head_norm(
        qkv=s.at(y),
        stride=qkv.shape[1],
        q_weight=s.at(q_weight),
        k_weight=s.at(k_weight),
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        eps=1e-6,
    )
    s.run()
    x = qkv.reshape(6, -1, dim)
    q = run_norm(x[:, :heads].reshape(-1, dim), None, q_weight, 1e-6)[0].reshape(6, heads, dim)
    k = run_norm(x[:, heads:-kv_heads].reshape(-1, dim), None, k_weight, 1e-6)[0].reshape(6, kv_heads, dim)
    assert same_bits(y.reshape(6, -1, dim), np.concatenate([q, k, x[:, -kv_heads:]], axis=1))


@pytest.mark.parametrize("width", [96, 544, 1536, 50])
def test_gated_straight_to_codes_is_as_gated_and_then_quantised(width: int, tier: str) -> None:
    """Red when a piece of a row is quantised to another place, or the tail of a row is lost."""
    x, y, rows = random(5, 2 * width), np.empty((5, width), np.float32), 5
    apart, straight = (anonymous(_native.quantized_bytes(rows, width)) for _ in range(2))
    s = Stages(rows, tier)
    s.tape.begin_rows(logits=False)
    s.tape.gated(gate_up=s.at(x), y=s.at(y), width=width, gelu=False)
    s.tape.quantize(x=s.at(y), width=width, workspace=address(apart), rows=rows)
    s.tape.gated(gate_up=s.at(x), y=0, width=width, gelu=False, workspace=address(straight), rows=rows)
    s.run()
    assert apart.any()
    assert np.array_equal(apart, straight)
