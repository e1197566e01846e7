"""What it costs to verify drafts: the time of a step without prompts, by the number of its tokens.

The prices of `core/costs.py` are of steps of every size, and linear. Verification lives where that is least true: a few tokens
more may be free, as the weights are read anyway, or cost a whole further tile of a kernel. So the prices are corrected, by a
factor for each number of tokens, learned from the steps themselves:

    tokens    1   2   3  ...  32 | 33..48 | 49..64 | ...
    factor   f1  f2  f3       f32   f33      f34             a number that was never seen has the factor of the nearest one
"""

from __future__ import annotations

from math import exp, isfinite, log

from noria.core.costs import CostModel, Work

_EXACT = 32  # numbers of tokens that have a factor of their own
_WIDTH = 16  # of the ranges beyond
_RANGES = 64
_SMOOTHING = 1 / 8
_CLIP = 0.25  # of log(seconds) a single step counts for at most: one outlier moves a factor by 3 %


class VerificationCost:
    """Predicts and learns; reads no clock."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._logs = [0.0] * (_EXACT + 1 + _RANGES)
        self._factors = [1.0] * len(self._logs)
        self._seen = [0] * len(self._logs)  # steps of each

    def seconds(self, work: Work) -> float:
        """The expected time of a step that computes no part of a prompt."""
        return self._costs.seconds(work) * self._factors[_bucket(work.tokens)]

    def learn(self, work: Work, seconds: float) -> None:
        """A step took `seconds`. Steps with parts of a prompt, and times that are none, teach nothing."""
        if work.tokens != work.logits or not (seconds > 0 and isfinite(seconds)):
            return
        bucket = _bucket(work.tokens)
        seen = self._seen[bucket] = self._seen[bucket] + 1
        surprise = log(seconds / self._costs.seconds(work)) - self._logs[bucket]
        gain = max(1 / (seen + 1), _SMOOTHING)
        self._logs[bucket] += gain * max(-_CLIP, min(_CLIP, surprise))
        self._factors[bucket] = exp(self._logs[bucket])
        if seen == 1 or not seen % _WIDTH:
            self._spread()

    def _spread(self) -> None:
        """Give each unseen number of tokens the factor of the nearest one that was seen."""
        known = [bucket for bucket, seen in enumerate(self._seen) if seen]
        for bucket, seen in enumerate(self._seen):
            if not seen:
                nearest = min(known, key=lambda k: abs(k - bucket))
                self._logs[bucket], self._factors[bucket] = self._logs[nearest], self._factors[nearest]


def _bucket(tokens: int) -> int:
    if tokens <= _EXACT:
        return tokens
    return _EXACT + min((tokens - _EXACT + _WIDTH - 1) // _WIDTH, _RANGES)
