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
    __slots__ = ("_cursors", "_earlier", "_found", "_outputs", "_own", "_salt", "guess", "match")

    def __init__(self, outputs: Outputs, salt: str) -> None:
        """The sequence has no output yet."""
        self._outputs = outputs
        self._salt = salt
        self._own = SuffixAutomaton()
        self._earlier: tuple[SuffixAutomaton | None, SuffixAutomaton | None] = (None, None)
        self._cursors = [(ROOT, 0), (ROOT, 0), (ROOT, 0)]  # in its own, and in both of the earlier ones
        self._found: tuple[SuffixAutomaton, int] | None = None  # the longest match, and the place behind it
        self.guess = NOWHERE
        self.match = 0

    def advance(self, tokens: list[int], end: int) -> None:
        self.match, self._found = 0, None
        self._follow(0, self._own, tokens[end - 1 : end])
        self._own.extend(tokens[end - 1])
        earlier = self._outputs.of(self._salt)
        new = tokens[end - 1 : end]
        if earlier != self._earlier:
            self._earlier, self._cursors[1:] = earlier, [(ROOT, 0), (ROOT, 0)]
            new = tokens[max(0, end - _RECALLED) : end]
        for age, automaton in enumerate(earlier, 1):
            if automaton is not None:
                self._follow(age, automaton, new)
        self.guess = next(iter(self.read(1)), NOWHERE)

    def read(self, count: int) -> list[int]:
        return [] if self._found is None else self._found[0].read(self._found[1], count)

    def _follow(self, age: int, automaton: SuffixAutomaton, new: list[int]) -> None:
        """Move a cursor on by new tokens, and prefer its match if it is longer than those before."""
        state, match = self._cursors[age]
        for token in new:
            state, match = automaton.follow(state, match, token)
        self._cursors[age] = state, match
        if match > max(self.match, _LEAST_MATCH - 1):
            self.match, self._found = match, (automaton, automaton.place[state])
