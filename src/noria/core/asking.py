"""When to ask the draft model, and for how many drafts.

Other sources guess for nothing; the draft model has to compute. What it is asked for in one step is verified in the next:

    step n      target: T(R)        draft model: k passes over the rows that ask
    step n + 1  target: T(R + k A)  verifies

With R rows that decode, A of them asking, and E the tokens that the drafts of a row are expected to bring, that is worth it if

    (R + sum E) / (T(R + k A) + D)     is higher than R / T(R) by `_LEAST_GAIN`,

and if no row's own rate falls by more than `_MOST_HARM`. D is the price of k passes, and what a row costs that the draft model
has not followed so far, spread over the tokens that it has left. As in `bargain`, a row that does not ask must not pay.

A pass has the price of a target step over the same rows, times a factor that is measured. Odds are only known of drafts that
were made: where nothing is asked, a trial is made now and then, so that trials take no more than `_TRIALS` of the time.
"""

from __future__ import annotations

from math import exp, isfinite, log
from typing import NamedTuple

from noria.core.costs import CostModel, Work
from noria.core.verification import VerificationCost

_LEAST_GAIN = 1.03
_MOST_HARM = 1.03
_SMOOTHING = 1 / 8
_CLIP = 0.5  # of log(factor): what one pass counts for at most
_TRIALS = 0.01  # share of the time
_TRIAL_DRAFTS = 2


class DraftFacts(NamedTuple):
    """What the engine has to know of its runner's draft model."""

    cost: float  # a first guess of what a pass costs, in steps of the target
    rows: int  # that it can follow at once


class Wish(NamedTuple):
    """A row that could ask."""

    runs: list[float]  # how likely the first draft, the first two, ... would come true
    behind: int  # tokens that the draft model has not seen
    left: int  # tokens that the row may still have


class Asking:
    """Decides for one engine. Reads no clock."""

    def __init__(self, cost: VerificationCost, costs: CostModel, facts: DraftFacts) -> None:
        self.most_rows = facts.rows
        self._cost = cost
        self._costs = costs
        self._factor = log(facts.cost)
        self._seen = 0
        self._saved = 0.0  # seconds of steps that asked for nothing, since the last trial

    def learn(self, rows: Work, seconds: float) -> None:
        """A pass over as many rows as a target step of `rows` has took so long."""
        if not (seconds > 0 and isfinite(seconds)):
            return
        self._seen += 1
        surprise = log(seconds / self._cost.seconds(rows)) - self._factor
        self._factor += max(1 / self._seen, _SMOOTHING) * max(-_CLIP, min(_CLIP, surprise))

    def drafts(self, decodes: Work, wishes: list[Wish]) -> int:
        """How many drafts each of the wishes is to be asked for: 0 or more, the same for all."""
        if not wishes:
            return 0
        plain = self._cost.seconds(decodes)
        best, rate = 0, _LEAST_GAIN * decodes.tokens / plain
        for count in range(1, max(len(wish.runs) for wish in wishes) + 1):
            gains = [sum(wish.runs[:count]) for wish in wishes]
            seconds = self._verified(decodes, count * len(wishes)) + self._price(decodes, wishes, count, gains)
            least = min(gains) if len(wishes) == decodes.tokens else 0.0
            made = decodes.tokens + sum(gains)
            if made > rate * seconds and seconds <= plain * (1 + least) * _MOST_HARM:
                best, rate = count, made / seconds
        return best or self._trial(decodes, wishes, plain)

    def _trial(self, decodes: Work, wishes: list[Wish], plain: float) -> int:
        """A few drafts though they do not seem to be worth it, where that costs next to nothing."""
        self._saved += plain
        price = self._price(decodes, [wish._replace(left=0) for wish in wishes], _TRIAL_DRAFTS, [0.0] * len(wishes))
        price += self._verified(decodes, _TRIAL_DRAFTS * len(wishes)) - plain
        if price > _TRIALS * self._saved:
            return 0
        self._saved = 0.0
        return _TRIAL_DRAFTS

    def _verified(self, decodes: Work, drafts: int) -> float:
        """Seconds of the target's step with so many drafts."""
        tokens, pairs, context, logits = decodes
        return self._cost.seconds(
            Work(tokens + drafts, pairs + drafts * (context // tokens), context + drafts, logits + drafts)
        )

    def _price(self, decodes: Work, wishes: list[Wish], count: int, gains: list[float]) -> float:
        """Seconds of the draft model: `count` passes, and its way to rows that it does not know."""
        context = len(wishes) * (decodes.context // decodes.tokens)
        seconds = count * self._cost.seconds(Work(len(wishes), context, context, len(wishes)))
        for wish, gain in zip(wishes, gains, strict=True):
            if wish.behind > count + 1:
                seconds += self._costs.chunk_seconds(0, wish.behind) / max(1.0, wish.left / (1 + gain))
        return seconds * exp(self._factor)
