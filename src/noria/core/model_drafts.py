"""Drafts of a second, smaller model: what came with the last result. See `noria.core.lookup.Source`.

    step n     asks for 3 drafts                   ->  result: token t, drafts d1 d2 d3
    step n+1   verifies d1 d2 d3, asks again       ->  result: tokens d1 d2 x, drafts e1 e2 e3

The draft model draws with the noise of the position that it guesses, so that it says what the target would say wherever the two
agree about a distribution, at any temperature.
"""

from __future__ import annotations

from noria.core.lookup import NOWHERE

_CONFIDENCE = 4  # a model's guess counts as if so many tokens had matched


class ModelDrafts:
    """What the draft model said of one sequence."""

    name = "draft_model"
    __slots__ = ("_drafts", "_end", "_place", "followed", "match")

    def __init__(self, known: int) -> None:
        """The first token to be guessed is behind `known` of the sequence's."""
        self.match = _CONFIDENCE  # and the guesses in a row that came true
        self.followed = 0  # tokens of the sequence that the draft model has seen
        self._end = known
        self._drafts: tuple[int, ...] = ()
        self._place = 0

    def receive(self, known: int, drafts: tuple[int, ...]) -> None:
        """The guesses of the tokens behind the `known` ones."""
        self._drafts, self._place, self._end, self.followed = drafts, 0, known, known

    @property
    def guess(self) -> int:
        return self._drafts[self._place] if self._place < len(self._drafts) else NOWHERE

    def advance(self, tokens: list[int], end: int) -> None:
        guess = self.guess
        if end == self._end + 1 and guess == tokens[end - 1]:
            self._place += 1
            self.match += 1
        else:
            if guess != NOWHERE:
                self.match = _CONFIDENCE
            self._drafts = ()
        self._end = end

    def read(self, count: int) -> list[int]:
        return list(self._drafts[self._place : self._place + count])
