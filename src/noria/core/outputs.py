"""Drafts from outputs: the engine remembers what it said, and finds it again where it says the same.

Outputs are kept by cache salt, in two generations of suffix automata. The young one grows; when it has half of what may be
kept, it becomes the old one, and what was old is forgotten whole.

    salt a    old ######     young ###            a sequence of salt a looks in both of its own,
    salt b    old ##         young #####          and never in those of salt b: what others said would show in its speed

SuffixDecoding: Oliaro et al., 2024.
"""

from __future__ import annotations

from collections import deque

from noria.core.lookup import NOWHERE
from noria.core.suffix import ROOT, SuffixAutomaton

MOST_TOKENS = 1 << 17  # kept, of all outputs together: some 15 MB
_TAKEN_IN = 128  # tokens a step: half a millisecond at most
_LEAST_MATCH = 2
_RECALLED = 16  # tokens that a new cursor reads again

Generation = dict[str, SuffixAutomaton]  # by cache salt


class Outputs:
    """What one engine has said lately."""

    def __init__(self, most_outputs: int) -> None:
        self._young: Generation = {}
        self._old: Generation = {}
        self._outputs = self._tokens = 0  # of the young generation
        self._most_outputs = most_outputs
        self._waiting: deque[tuple[str, list[int]]] = deque()  # (salt, the rest of an output) that is to be taken in
        self._waiting_tokens = 0

    def of(self, salt: str) -> tuple[SuffixAutomaton | None, SuffixAutomaton | None]:
        """(young, old) of a salt."""
        return self._young.get(salt), self._old.get(salt)

    def add(self, salt: str, output: list[int]) -> None:
        """An output has ended. It is found once later steps have taken it in."""
        if len(output) <= _LEAST_MATCH or not self._most_outputs:
            return
        self._waiting.append((salt, output))
        self._waiting_tokens += len(output)
        while self._waiting_tokens > MOST_TOKENS // 2:
            self._waiting_tokens -= len(self._waiting.popleft()[1])

    def take_in(self) -> None:
        """Take in some of what waits; called once a step."""
        left = _TAKEN_IN
        while self._waiting and left:
            salt, rest = self._waiting.popleft()
            part, rest = rest[:left], rest[left:]
            automaton = self._young.get(salt)
            if automaton is None:
                automaton = self._young[salt] = SuffixAutomaton()
            for token in part:
                automaton.extend(token)
            left -= len(part)
            self._tokens += len(part)
            self._waiting_tokens -= len(part)
            if rest:
                self._waiting.appendleft((salt, rest))
            else:
                automaton.close()
                self._outputs += 1
                self._age()

    def _age(self) -> None:
        if 2 * self._tokens >= MOST_TOKENS or 2 * self._outputs >= self._most_outputs:
            self._old, self._young = self._young, {}
            self._outputs = self._tokens = 0


class SuffixLookup:
    """The longest match in a sequence's own output and in what was said under its salt. See `noria.core.lookup.Source`."""

    name = "suffix"
    __slots__ = ("_cursors", "_earlier", "_end", "_found", "_outputs", "_own", "_place", "_salt", "guess", "match")

    def __init__(self, outputs: Outputs, salt: str, known: int) -> None:
        """The first token to be guessed is behind `known` of the sequence's; its output begins there."""
        self._outputs = outputs
        self._salt = salt
        self._end = known
        self._own = SuffixAutomaton()
        self._earlier: tuple[SuffixAutomaton | None, SuffixAutomaton | None] = (None, None)
        self._cursors = [(ROOT, 0), (ROOT, 0), (ROOT, 0)]  # in its own, and in both of the earlier ones
        self._found = self._own  # where the longest match is, and
        self._place = 0  # the place behind it
        self.guess = NOWHERE
        self.match = 0

    def advance(self, tokens: list[int], end: int) -> None:
        new = tokens[self._end : end]
        self._end = end
        own = self._own
        for token in new[:-1]:
            self._cursors[0] = own.follow(*self._cursors[0], token)
            own.extend(token)
        self.match, self.guess = _LEAST_MATCH - 1, NOWHERE
        self._follow(0, own, new[-1:])
        own.extend(new[-1])
        earlier = self._outputs.of(self._salt)
        if earlier != self._earlier:
            self._earlier, self._cursors[1:] = earlier, [(ROOT, 0), (ROOT, 0)]
            new = tokens[max(0, end - _RECALLED) : end]
        for age, automaton in enumerate(earlier, 1):
            if automaton is not None:
                self._follow(age, automaton, new)

    def read(self, count: int) -> list[int]:
        return [] if self.guess == NOWHERE else self._found.read(self._place, count)

    def _follow(self, age: int, automaton: SuffixAutomaton, new: list[int]) -> None:
        """Move a cursor on by new tokens, and prefer its match if it is longer than those before."""
        state, match = self._cursors[age]
        for token in new:
            state, match = automaton.follow(state, match, token)
        self._cursors[age] = state, match
        if match > self.match:
            place = automaton.place[state]
            self.guess = automaton.text[place] if place < len(automaton.text) else NOWHERE
            self.match, self._found, self._place = match, automaton, place
