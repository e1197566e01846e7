"""The drafter of one sequence: its sources of guesses, and how often they came true.

Guesses are judged whether they are drafted or not: one that was not worth a draft is still compared with the token that came.
So a sequence stops drafting after a few wrong guesses, goes on guessing for nothing, and begins again when guesses come true.
"""

from __future__ import annotations

from noria.core.lookup import NOWHERE, Prediction, Source
from noria.core.model_drafts import ModelDrafts

_FIRST_ODDS = (
    0.1,
    0.2,
    0.35,
    0.55,
    0.75,
    0.85,
)  # by class of match length, before anything is known: 0, 1, 2-3, 4-7, 8-15, 16+
_FIRST_WEIGHT = 4.0  # guesses that those count for
_SHARED_WEIGHT = 4.0  # guesses that all other sequences count for beside a sequence's own
_MEMORY = 32.0  # guesses of its own that a sequence remembers, and
_SHARED_MEMORY = 1024.0  # of all sequences
_LEAST_ODDS = 0.05  # of a whole run of drafts
_EAGER = 0.6  # of two guesses in a row


class Tally:
    """How often guesses came true, by class of match length."""

    __slots__ = ("_memory", "hits", "trials")

    def __init__(self, memory: float) -> None:
        self.hits = [0.0] * len(_FIRST_ODDS)
        self.trials = [0.0] * len(_FIRST_ODDS)
        self._memory = memory

    def count(self, kind: int, hit: bool) -> None:
        """One more guess was judged."""
        self.hits[kind] += hit
        self.trials[kind] += 1
        if self.trials[kind] > self._memory:
            self.hits[kind] /= 2
            self.trials[kind] /= 2


def _class(match: int) -> int:
    return min(match.bit_length(), len(_FIRST_ODDS) - 1)


class Drafter:
    """The sources of one sequence, and what is known of them."""

    __slots__ = ("_known", "_own", "_shared", "_sources", "model", "prediction")

    def __init__(
        self,
        sources: list[Source],
        shared: dict[str, Tally],
        known: int,
        prediction: Prediction | None = None,
        model: ModelDrafts | None = None,
    ) -> None:
        """The sources know the first `known` tokens; `shared` has a tally for each name of a source, of all sequences.

        `prediction` and `model` are the sources of these kinds, if there are.
        """
        self._sources = sources
        self._own = [Tally(_MEMORY) for _ in sources]
        self._shared = [shared.setdefault(source.name, Tally(_SHARED_MEMORY)) for source in sources]
        self._known = known
        self.prediction = prediction
        self.model = model

    def follow(self, tokens: list[int]) -> None:
        """Judge the guesses by the tokens that have come since, up to the first that was wrong, and guess again."""
        known = len(tokens)
        for source, own, shared in zip(self._sources, self._own, self._shared, strict=True):
            end = self._known
            while end < known:
                end += 1
                guess = source.guess
                hit = guess == tokens[end - 1]
                if guess != NOWHERE:
                    kind = _class(source.match)
                    own.count(kind, hit)
                    shared.count(kind, hit)
                if not hit:
                    end = known
                source.advance(tokens, end)
        self._known = known

    def odds(self, place: int, match: int) -> float:
        """How often a guess of a source comes true behind a match of such a length."""
        kind = _class(match)
        own, shared = self._own[place], self._shared[place]
        prior = (shared.hits[kind] + _FIRST_WEIGHT * _FIRST_ODDS[kind]) / (shared.trials[kind] + _FIRST_WEIGHT)
        return (own.hits[kind] + _SHARED_WEIGHT * prior) / (own.trials[kind] + _SHARED_WEIGHT)

    def propose(self, most: int) -> tuple[list[int], list[float]]:
        """Drafts of the source that is most often right, and how likely each run of them comes true."""
        best, best_odds = NOWHERE, 0.0
        for place, source in enumerate(self._sources):
            if source.guess != NOWHERE and (odds := self.odds(place, source.match)) > best_odds:
                best, best_odds = place, odds
        if best == NOWHERE:
            return [], []
        drafts = self._sources[best].read(most)
        runs = self._runs(best, len(drafts))
        return drafts[: len(runs)], runs

    def prospects(self, most: int) -> list[float]:
        """How likely runs of drafts would come true that the draft model is still to be asked for; [] if others know better."""
        if self.model is None:
            return []
        place = next(place for place, source in enumerate(self._sources) if source is self.model)
        rivals = [self.odds(i, s.match) for i, s in enumerate(self._sources) if i != place and s.guess != NOWHERE]
        return [] if max(rivals, default=0.0) >= self.odds(place, self.model.match) else self._runs(place, most)

    def _runs(self, place: int, most: int) -> list[float]:
        """How likely the first, the first two, ... guesses of a source come true, as far as that is likely at all."""
        match = self._sources[place].match
        runs: list[float] = []
        run, odds, kind = 1.0, self.odds(place, match), _class(match)
        for further in range(match, match + most):
            if _class(further) != kind:
                odds, kind = self.odds(place, further), _class(further)
            run *= odds
            if run < _LEAST_ODDS:
                break
            runs.append(run)
        return runs

    @property
    def eager(self) -> bool:
        """Whether it is worth waiting for a token in flight, to go on with drafts behind it."""
        return bool((runs := self.propose(2)[1]) and runs[-1] > _EAGER)
