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
        """How many drafts of each proposal to take."""
        if not proposals:
            return []
        least = self._least([(proposal, len(proposal.runs)) for proposal in proposals])
        while True:
            fair = self._plain * (1 + least) * _MOST_HARM
            counts, seconds = self._take(proposals, min(fair, self._plain + self._left))
            got = self._least(list(zip(proposals, counts, strict=True)))
            if seconds <= self._plain * (1 + got) * _MOST_HARM:
                return counts
            least = got if got < least / 2 else 0.0

    def _least(self, chosen: list[tuple[Proposal, int]]) -> float:
        """What the row gains on average that gains least."""
        if len(chosen) < max(self._decodes.tokens, 1):
            return 0.0
        return min([sum(proposal.runs[:count]) for proposal, count in chosen])

    def _take(self, proposals: list[Proposal], latest: float) -> tuple[list[int], float]:
        """(drafts of each proposal, seconds of the step) with the highest rate in that time, the likeliest rows first."""
        counts = [0] * len(proposals)
        work, made, spent = self._decodes, float(self._decodes.tokens), self._plain
        for place in sorted(range(len(proposals)), key=lambda place: -proposals[place].runs[0]):
            context, _, runs = proposals[place]
            base, base_made, best = work, made, _LEAST_GAIN * made / spent
            pairs = base.pairs
            for count, run in enumerate(runs, 1):
                base_made += run
                pairs += context + count
                more = Work(base.tokens + count, pairs, base.context + count, base.logits + count)
                seconds = self._cost.seconds(more)
                if seconds > latest:
                    break
                if base_made > best * seconds:
                    counts[place], best, work, made, spent = count, base_made / seconds, more, base_made, seconds
        return counts, spent
