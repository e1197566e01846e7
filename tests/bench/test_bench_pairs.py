"""Interleaved pairs and the interval of their median."""

from __future__ import annotations

import math
import random

import pytest

from noria.bench.pairs import interleave, interval_rank, median_ratio


def coverage(count: int, rank: int) -> float:
    """The chance that [x(rank), x(count + 1 - rank)] holds the median."""
    missed = sum(math.comb(count, k) for k in range(rank))
    return 1 - 2 * missed / 2**count


@pytest.mark.parametrize("count", [20, 21, 25, 40, 101])
def test_the_interval_is_the_narrowest_that_keeps_its_promise(count: int) -> None:
    """Red if the interval promises less than 95 %, or is wider than it must be."""
    rank = interval_rank(count)
    assert coverage(count, rank) >= 0.95
    assert coverage(count, rank + 1) < 0.95


def test_the_known_rank_of_twenty() -> None:
    """Red if ranks are off by one: the tables say the 6th and the 15th of 20."""
    assert interval_rank(20) == 6


def test_the_interval_holds_the_true_median() -> None:
    """Red if the interval is built from the wrong values: over many experiments it must hold 1 about as often as it says."""
    rng = random.Random(3)
    held = 0
    for _ in range(400):
        ratio = median_ratio([(rng.lognormvariate(0, 0.2), rng.lognormvariate(0, 0.2)) for _ in range(20)])
        assert ratio.low <= ratio.median <= ratio.high
        held += not ratio.differs
    assert held >= 0.93 * 400


def test_a_true_difference_is_seen() -> None:
    """Red if a ratio is turned over or its interval always holds 1."""
    rng = random.Random(4)
    ratio = median_ratio([(0.9 * (1 + 0.02 * rng.random()), 1 + 0.02 * rng.random()) for _ in range(20)])
    assert ratio.median == pytest.approx(0.9, abs=0.02)
    assert ratio.differs


def test_the_order_alternates() -> None:
    """Red if one side always comes first: then a cache it warms, or a clock that slows down, counts for it."""
    calls: list[str] = []

    def side(name: str, value: float):  # type: ignore[no-untyped-def]
        return lambda index: (calls.append(f"{name}{index}"), value)[1]

    assert interleave(side("a", 1.0), side("b", 2.0), 20) == [(1.0, 2.0)] * 20
    assert calls[:4] == ["a0", "b0", "b1", "a1"]


def test_few_pairs_are_refused() -> None:
    """Red if a claim can be made from a handful of runs."""
    with pytest.raises(ValueError, match="at least 20"):
        interleave(lambda index: 1.0, lambda index: 1.0, 19)
