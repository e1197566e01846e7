"""How many drafts a step is worth, by measured odds and measured costs.

A step of R decodes takes T seconds; with k drafts of one more sequence it takes T(k), and makes s1 + s1 s2 + ... more tokens on
average, where s is how often guesses like these came true:

    tokens a second    (R + E + s1 + s1 s2 + ...) / T(k)      is to be highest, and higher than without by `_LEAST_GAIN`

That is the rate of all rows together. But a longer step is longer for everybody: a row without good guesses would pay for the
drafts of its neighbours, and a batch ends with its slowest row. So no row's own rate may fall below what it is without drafts,
by more than `_MOST_HARM`:

    T(k) <= (1 + g) T * _MOST_HARM      for the row whose drafts bring least, g; 0 if it has none

Alone, a row drafts as far as it pays. Among others it does if they all do, or where drafts are nearly free.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from noria.core.costs import Work
from noria.core.verification import VerificationCost

_LEAST_GAIN = 1.02  # of the rate; less would be lost in what is not predicted
_MOST_HARM = 1.03  # of a step's time, for a row that gains nothing


class Proposal(NamedTuple):
    """Drafts that a row could have."""

    context: int  # tokens before them
    drafts: list[int]
    runs: list[float]  # how likely the first, the first two, ... come true


class Bargain:
    """Chooses the drafts of one step by what they are expected to bring, and to cost."""

    def __init__(self, cost: VerificationCost, decodes: Work, seconds: float) -> None:
        """`decodes`: the tokens of the step that are no prompt's, one a row; `seconds`: that drafts may add to it."""
        self.rows = decodes.tokens
        self._cost = cost
        self._decodes = decodes
        self._left = seconds

    def is_off(self, proposal: Proposal | None) -> bool:
        """Whether no row can have drafts as this one gains too little: nearly always, where decodes fill the machine."""
        return self._needs_all and (proposal is None or sum(proposal.runs) < self._needed)

    @cached_property
    def _plain(self) -> float:
        """Seconds of the step without drafts."""
        return self._cost.seconds(self._decodes)

    @cached_property
    def _needed(self) -> float:
        """What every row has to gain if each has a draft."""
        return max(0.0, self._seconds(self._decodes.tokens) / (self._plain * _MOST_HARM) - 1)

    @cached_property
    def _needs_all(self) -> bool:
        """Whether drafts that harm no row do not pay, even if they are sure to come true: then all rows must have some."""
        rows = self._decodes.tokens
        drafts = 1
        while (seconds := self._seconds(drafts)) <= self._plain * _MOST_HARM:
            if (rows + drafts) * self._plain >= _LEAST_GAIN * rows * seconds:
                return False
            drafts += 1
        return True

    def _seconds(self, drafts: int) -> float:
        """Of the step with so many drafts of average rows."""
        tokens, pairs, context, logits = self._decodes
        behind = context // max(tokens, 1)
        return self._cost.seconds(Work(tokens + drafts, pairs + drafts * behind, context + drafts, logits + drafts))

    def choose(self, proposals: list[Proposal]) -> list[int]:
        """How many drafts of each proposal to take: of all drafts, the likeliest so many."""
        if not proposals:
            return []
        tokens, pairs, context, logits = self._decodes
        counts, gains = [0] * len(proposals), [0.0] * len(proposals)
        chosen = list(counts)
        made, rate = float(tokens), _LEAST_GAIN * tokens / self._plain
        offers = sorted([(-run, place) for place, proposal in enumerate(proposals) for run in proposal.runs])
        for taken, (run, place) in enumerate(offers, 1):
            counts[place] += 1
            gains[place] -= run
            made -= run
            pairs += proposals[place].context + counts[place]
            seconds = self._cost.seconds(Work(tokens + taken, pairs, context + taken, logits + taken))
            if seconds > self._plain + self._left:
                break
            if made > rate * seconds:
                least = min(gains) if len(gains) == tokens else 0.0
                if seconds <= self._plain * (1 + least) * _MOST_HARM:
                    rate, chosen = made / seconds, list(counts)
        return chosen
