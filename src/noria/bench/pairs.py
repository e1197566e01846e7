"""Interleaved pairs: how a claim of a few per cent is made on a machine that is not quiet.

    pair    1      2      3      4     ...
    order   A B    B A    A B    B A          what drifts slowly meets both alike; what favours the first or second cancels

The figure is the median of the ratios A / B, with the interval that order statistics give the median of any distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LEAST_PAIRS = 20
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """The median of A / B, and an interval that holds the true median with at least `confidence`."""

    median: float
    low: float
    high: float
    pairs: int
    confidence: float

    def __str__(self) -> str:
        return f"{self.median:.4f} [{self.low:.4f}, {self.high:.4f}] ({self.confidence:.0%}, {self.pairs} pairs)"

    @property
    def differs(self) -> bool:
        """Whether 1 lies outside the interval."""
        return not self.low <= 1.0 <= self.high


def interleave(
    a: Callable[[int], float],
    b: Callable[[int], float],
    pairs: int,
    progress: Callable[[int], None] = lambda done: None,
) -> list[tuple[float, float]]:
    """Call both `pairs` times, in alternating order, each with the pair's number; returns what they return, as (a, b).

    ValueError for fewer than 20 pairs: the interval would be wide enough to hold any claim.
    """
    if pairs < LEAST_PAIRS:
        raise ValueError(f"{pairs} pairs are too few: take at least {LEAST_PAIRS}")
    measured = []
    for index in range(pairs):
        if index % 2 == 0:
            first = a(index)
            measured.append((first, b(index)))
        else:
            second = b(index)
            measured.append((a(index), second))
        progress(index + 1)
    return measured


def median_ratio(measured: Sequence[tuple[float, float]], confidence: float = CONFIDENCE) -> Ratio:
    """The median of a / b over the pairs, with its interval."""
    ratios = sorted(a / b for a, b in measured)
    count = len(ratios)
    rank = interval_rank(count, confidence)
    middle = count // 2
    median = ratios[middle] if count % 2 else (ratios[middle - 1] + ratios[middle]) / 2
    return Ratio(median, ratios[rank - 1], ratios[count - rank], count, confidence)


def interval_rank(count: int, confidence: float = CONFIDENCE) -> int:
    """The largest k such that [x(k), x(count + 1 - k)] of ordered values holds the true median with at least `confidence`.

    The number of values below the median is binomial(count, 1/2), whatever the distribution; the interval misses the median if
    fewer than k are below it, or fewer than k above. 1 where even the extremes promise less.
    """
    rank, tail = 1, 1.0  # tail: the number of ways to have fewer than `rank` values below
    while 2 * (tail + math.comb(count, rank)) <= (1 - confidence) * 2.0**count and 2 * (rank + 1) <= count:
        tail += math.comb(count, rank)
        rank += 1
    return rank
