"""A suffix automaton of texts: where the longest end of a growing sequence has occurred, in constant time a token.

A state stands for all strings that occur at the same places; a transition adds a token; a state's link is that of its longest
ending which occurs elsewhere too. A cursor that cannot take the next token drops to the link until it can, so the match is
always the longest (Blumer et al., 1985; extended to several texts, one after the other).

    texts     a b c d e END a b x END        `place` of the state of  a b  is behind its latest occurrence: at x
    cursor    ... a b |                      it reads  x  from there

Most states have one transition: that is in two arrays. A dictionary has those of the others.
"""

from __future__ import annotations

from array import array

END = -1  # behind each text
ROOT = 0  # the empty string: no transition leads to it
_CLIMB = 8  # endings of a new string whose place is brought up to date, the longest first


class SuffixAutomaton:
    """Grows by tokens; a text is closed by `close`. About 100 bytes a token."""

    def __init__(self) -> None:
        self.text = array("i")
        self.place = array("i", (0,))  # by state: behind its latest occurrence, as an index of `text`
        self._length = array("i", (0,))  # of its longest string
        self._link = array("i", (-1,))
        self._token = array("i", (END,))  # of its first transition, and
        self._target = array("i", (ROOT,))  # where that leads
        self._others: dict[int, dict[int, int]] = {}  # its further transitions
        self._last = ROOT  # the state of the whole text so far

    def extend(self, token: int) -> None:
        """The text goes on with `token`, which is not negative."""
        self.text.append(token)
        target = self._step(self._last, token)
        self._last = self._shortened(self._last, token, target) if target else self._appended(self._last, token)
        state, place = self._last, len(self.text)
        for _ in range(_CLIMB):
            if state == ROOT:
                break
            self.place[state] = place
            state = self._link[state]

    def close(self) -> None:
        """The text ends; what comes next is another one."""
        self.text.append(END)
        self._last = ROOT

    def follow(self, state: int, match: int, token: int) -> tuple[int, int]:
        """(state, length of the match) of a cursor behind one more token."""
        while not (target := self._step(state, token)):
            if state == ROOT:
                return ROOT, 0
            state = self._link[state]
            match = self._length[state]
        return target, match + 1

    def read(self, place: int, count: int) -> list[int]:
        """At most `count` tokens from a place on, to the end of the text that it is in."""
        read = self.text[place : place + count].tolist()
        return read[: read.index(END)] if END in read else read

    def _step(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._target[state]
        others = self._others.get(state)
        return others.get(token, ROOT) if others else ROOT

    def _lead(self, state: int, token: int, target: int) -> None:
        if self._token[state] in (END, token):
            self._token[state], self._target[state] = token, target
        else:
            self._others.setdefault(state, {})[token] = target

    def _appended(self, state: int, token: int) -> int:
        """A new state for the string of `state` and a token that never followed it."""
        new = self._new(self._length[state] + 1, END, ROOT, len(self.text))
        while state >= 0 and not (target := self._step(state, token)):
            self._lead(state, token, new)
            state = self._link[state]
        self._link[new] = self._shortened(state, token, target) if state >= 0 else ROOT
        return new

    def _shortened(self, state: int, token: int, target: int) -> int:
        """The state for the longest string of `state` and a token that leads to `target`, which may have longer ones too."""
        length = self._length[state] + 1
        if self._length[target] == length:
            return target
        clone = self._new(length, self._token[target], self._target[target], self.place[target])
        if target in self._others:
            self._others[clone] = dict(self._others[target])
        self._link[clone] = self._link[target]
        self._link[target] = clone
        while state >= 0 and self._step(state, token) == target:
            self._lead(state, token, clone)
            state = self._link[state]
        return clone

    def _new(self, length: int, token: int, target: int, place: int) -> int:
        self._length.append(length)
        self._link.append(ROOT)
        self._token.append(token)
        self._target.append(target)
        self.place.append(place)
        return len(self._length) - 1
