"""How long a step takes, learned from the steps themselves, and how much prefill fits beside decodes.

A step's time is a sum of five terms, each a count that the plan knows times a price that the machine has:

    start       1 a step                     reading the weights once, waking the threads
    tokens      tokens computed              the linear layers
    pairs       (query, key) pairs           attention: a chunk of c tokens behind s has c * s + c * (c + 1) / 2
    context     positions seen, once a row   reading K and V
    logits      rows whose logits are wanted the head and the draw

Nothing is measured before the engine is ready: the traffic is the measurement. A guess from the model's size, or what an
earlier run kept, stands in for the first step; the second is planned with what the first one taught. And the prices follow a
neighbour that takes half of a core, of which a benchmark at the start would know nothing.

The prices are positive and errors are relative, so the filter works on their logarithms: an extended Kalman filter (Kalman,
1960) whose observation is log(seconds) and whose gradient is each term's share of the predicted time. Its covariance says
what is known already: a step of decodes alone moves `start`, `tokens`, `context` and `logits`, and leaves `pairs` as it is.

No outlier can poison it. A surprise counts for at most two of its standard deviations (Huber, 1964); but a second of the same
sign behind it widens the common uncertainty, so that another regime, or a first guess that was wrong, is believed soon.

A sliding window sees fewer pairs than are counted: the prices are then those of the mix of lengths that is being served.
"""

from __future__ import annotations

from math import exp, inf, isfinite, log, sqrt
from typing import NamedTuple

from noria.core.prices import Prices
from noria.kv.keys import BLOCK_SIZE

LEAST_CHUNK = 16  # tokens of prefill in a step, however little time is left: a prompt always gets on

_NOISE = 0.1**2  # variance of log(seconds) of equal steps
_GUESSED = (1.2, 0.5)  # variance of a guess's logarithm: common to all prices, and of each by itself
_MEASURED = (0.05, 0.02)  # the same of prices that an earlier run has learned
_FORGET = 3e-5  # share of the first variance that comes back with each step
_CLIP = 2.0  # standard deviations that a surprise counts for
_WIDEN = 0.02  # common variance that a second clipped surprise in a row adds
_EXPECTED, _WARM_UP, _THINNED = 0.05, 100, 8  # after so many steps, of so little surprise, one in so many is learned from
_QUANTILE = 0.99  # of steps that take no longer than predicted times the margin
_MARGIN_STEP = 0.02
_MOST_MARGIN = 2.0
_USABLE = 0.9  # of the target; the rest is for what lies between steps: planning, messages, detokenising


class Work(NamedTuple):
    """What a step computes, in the units of `Prices`."""

    tokens: int
    pairs: int
    context: int
    logits: int


class CostModel:
    """Predicts and learns. Equal histories give equal predictions: it reads no clock and draws no numbers."""

    def __init__(self, prices: Prices | None = None) -> None:
        prices = prices or Prices()
        self.steps = 0  # that it has learned from
        self.margin = 1.0  # times the prediction: what `_QUANTILE` of the steps stay under
        self._beyond = 0  # whether the last step took longer (1) or less (-1) than a surprise counts for
        self._kept = prices.measured
        self._logs = [log(p) for p in (prices.start, prices.tokens, prices.pairs, prices.context, prices.logits)]
        self._prices = [exp(x) for x in self._logs]
        common, own = _MEASURED if prices.measured else _GUESSED
        self._first = [[common + own * (i == j) for j in range(5)] for i in range(5)]
        self._covariance = [list(row) for row in self._first]

    @property
    def prices(self) -> Prices:
        """What it believes now."""
        start, tokens, pairs, context, logits = self._prices
        return Prices(
            start=start, tokens=tokens, pairs=pairs, context=context, logits=logits, measured=self._kept or self.steps > 0
        )

    def seconds(self, work: Work) -> float:
        """The expected time of a step."""
        start, tokens, pairs, context, logits = self._prices
        return start + work.tokens * tokens + work.pairs * pairs + work.context * context + work.logits * logits

    def chunk_seconds(self, start: int, count: int) -> float:
        """What a chunk of a prompt adds to a step: `count` tokens from position `start` on, and a row of logits."""
        _, tokens, pairs, context, logits = self._prices
        return count * tokens + (count * start + count * (count + 1) / 2) * pairs + (start + count) * context + logits

    def chunk_within(self, seconds: float, start: int, most: int) -> int:
        """The longest chunk from `start` on, at most `most` tokens, that adds no more than `seconds`; 0 if none does."""
        if self.chunk_seconds(start, most) <= seconds:
            return most
        _, tokens, pairs, context, logits = self._prices
        # pairs / 2 * count**2 + linear * count = left
        linear = tokens + context + (start + 0.5) * pairs
        left = seconds - start * context - logits
        if left <= 0:
            return 0
        count = 2 * left / (linear + sqrt(linear * linear + 2 * pairs * left))
        return min(most, int(count))

    def learn(self, work: Work, seconds: float) -> None:
        """A step of `work` took `seconds`. Times that are no times (0 of a device without a clock) teach nothing."""
        if not (seconds > 0 and isfinite(seconds)):
            return
        self.steps += 1
        predicted = self.seconds(work)
        surprise = log(seconds / predicted)
        if work.tokens > work.logits:  # a step with a part of a prompt: those are what the margin is for
            self._follow_quantile(surprise)
        if abs(surprise) < _EXPECTED and self.steps > _WARM_UP and self.steps % _THINNED:
            return
        shares = [p * x / predicted for p, x in zip(self._prices, (1, *work), strict=True)]
        covariance = self._covariance
        spread = [sum([c * s for c, s in zip(row, shares, strict=True)]) for row in covariance]
        variance = sum([a * s for a, s in zip(spread, shares, strict=True)]) + _NOISE
        most = _CLIP * sqrt(variance)
        clipped = max(-most, min(most, surprise))
        gain = [a / variance for a in spread]
        self._logs = [x + g * clipped for x, g in zip(self._logs, gain, strict=True)]
        self._prices = [exp(x) for x in self._logs]
        beyond = (surprise > most) - (surprise < -most)
        widen = _WIDEN if beyond and beyond == self._beyond else 0.0
        self._beyond = beyond
        self._covariance = [
            [c - g * a + (f - c) * _FORGET + widen for c, a, f in zip(row, spread, first, strict=True)]
            for g, row, first in zip(gain, covariance, self._first, strict=True)
        ]

    def _follow_quantile(self, surprise: float) -> None:
        """Move the margin a little up if a step took longer than it allowed, very little down if not."""
        over = surprise > log(self.margin)
        self.margin *= exp(_MARGIN_STEP * (_QUANTILE if over else _QUANTILE - 1))
        self.margin = min(max(self.margin, 1.0), _MOST_MARGIN)


class Room:
    """What a step has left for prefill: tokens of its budget, and seconds until the target of its decodes."""

    __slots__ = ("_chunks", "_costs", "seconds", "tokens")

    def __init__(self, costs: CostModel, tokens: int, seconds: float = inf) -> None:
        self.tokens = tokens
        self._costs = costs
        self.seconds = seconds
        self._chunks = 0

    @classmethod
    def beside(cls, costs: CostModel, tokens: int, target: float, decodes: Work) -> Room:
        """The room of a step that has `decodes`, and that should take at most `target` seconds, 99 times in 100."""
        return cls(costs, tokens, target * _USABLE / costs.margin - costs.seconds(decodes))

    def chunk(self, start: int, most: int) -> int:
        """How many of the `most` tokens of a prompt from `start` on get a place; 0 if none do.

        The first chunk of a step has LEAST_CHUNK tokens whatever they take, so that prefill goes on beside any decodes.
        A chunk that time cuts short ends between two blocks where it can.
        """
        most = min(most, self.tokens)
        if self.seconds == inf or most <= 0:
            return max(most, 0)
        count = self._costs.chunk_within(self.seconds, start, most)
        if count == most:
            return count
        count = (start + count) // BLOCK_SIZE * BLOCK_SIZE - start
        if count >= LEAST_CHUNK:
            return count
        return 0 if self._chunks else min(most, LEAST_CHUNK)

    def take(self, start: int, count: int) -> None:
        """A chunk got its place."""
        self.tokens -= count
        self._chunks += 1
        if self.seconds != inf:
            self.seconds -= self._costs.chunk_seconds(start, count)
