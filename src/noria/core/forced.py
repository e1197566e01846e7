"""Drafts from a sequence's grammar: text that it leaves no choice about, such as the keys of a JSON schema (jump-forward).

The constraint says what the model is likely to draw there; the verify path says what it does draw, so nothing is ever written
that was not drawn. It needs no setting, and a sequence without a grammar has none of this.
"""

from __future__ import annotations

from noria.core.constraint import Constraint
from noria.core.lookup import NOWHERE


class Forced:
    """Follows what a constraint forces. See `noria.core.lookup.Source`."""

    name = "grammar"
    match = 16  # guesses of all lengths are as good: as those behind the longest match elsewhere
    __slots__ = ("_at", "_constraint", "_end", "_run")

    def __init__(self, constraint: Constraint, known: int) -> None:
        """It begins to guess behind the token that comes after `known` of the sequence's."""
        self._constraint = constraint
        self._end = known
        self._run: tuple[int, ...] = ()
        self._at = 0

    @property
    def guess(self) -> int:
        return self._run[self._at] if self._at < len(self._run) else NOWHERE

    def advance(self, tokens: list[int], end: int) -> None:
        """The constraint knows all of `tokens`: only behind the last of them is its guess of use."""
        if self._end + 1 == end and self.guess == tokens[end - 1]:
            self._at += 1
        else:
            self._run, self._at = (), 0
        self._end = end
        if end == len(tokens) and self._at == len(self._run):
            self._run, self._at = self._constraint.forced, 0

    def read(self, count: int) -> list[int]:
        return list(self._run[self._at : self._at + count])
