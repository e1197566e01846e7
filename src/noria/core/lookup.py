"""Where drafts are copied from: the sequence's own text, and a prediction that came with the request.

A source keeps a cursor into a text: the token there is its guess of the sequence's next one. While guesses come true the cursor
moves along, and nothing is searched. After a wrong one the source searches the text for what the sequence ends with.

    text        ... a b c | d e f g ...           the longest match, then the one the source prefers
    sequence    ... x a b c | ?                   match = 3, cursor at d: the drafts are d e f g ...

The search is the one of LZ77 compressors (Deutsch, RFC 1951): a table of the last place of each hashed pair of tokens, and of
each place the one before it. Eight bytes a token, no object for any of them.

Prompt lookup decoding: Saxena, 2023.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Protocol

NOWHERE = -1
_MOST_CANDIDATES = 8  # places that a search looks at
_LONGEST_MATCH = 16  # beyond it no match is better than another
_FIRST_BITS = 8


class Source(Protocol):
    """Guesses how a sequence goes on."""

    name: str  # sources of one name are as often right, as far as is known before they begin
    match: int  # tokens before the cursor that are the sequence's last ones

    @property
    def guess(self) -> int:
        """The next token; NOWHERE if it has no idea."""

    def advance(self, tokens: list[int], end: int) -> None:
        """`tokens[:end]` are known. More than one is new only if the first of them was not the guess."""

    def read(self, count: int) -> list[int]:
        """The next tokens, at most `count`. The first is `guess`."""


class PairIndex:
    """Finds where a pair of tokens occurs in a growing text."""

    def __init__(self, text: list[int]) -> None:
        self._text = text
        self._indexed = 1  # places in [2, indexed] are in the tables
        self._resize(_FIRST_BITS)

    def extend(self, end: int) -> None:
        """Know the pairs that end at a place up to `end`, which is the place behind their second token."""
        if end > len(self._last):
            self._resize(end.bit_length())
            self._indexed = 1
        text, last, before, mask = self._text, self._last, self._before, self._mask
        for place in range(self._indexed + 1, end + 1):
            slot = (text[place - 2] * 0x9E3779B1 ^ text[place - 1] * 0x85EBCA6B) & mask
            before[place] = last[slot]
            last[slot] = place
        self._indexed = max(self._indexed, end)

    def places(self, first: int, second: int) -> Iterator[int]:
        """The places behind occurrences of a pair, the last one first; a few of another pair's may be among them."""
        place = self._last[(first * 0x9E3779B1 ^ second * 0x85EBCA6B) & self._mask]
        for _ in range(_MOST_CANDIDATES):
            if not place:
                return
            yield place
            place = self._before[place]

    def _resize(self, bits: int) -> None:
        self._mask = (1 << bits) - 1
        self._last = array("i", bytes(4 << bits))
        self._before = array("i", bytes(4 * ((1 << bits) + 1)))


def match_length(text: list[int], place: int, tokens: list[int], end: int) -> int:
    """How many tokens before `place` of a text are those before `end` of another; no more than `_LONGEST_MATCH` are counted."""
    most = min(place, end, _LONGEST_MATCH)
    length = 0
    while length < most and text[place - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length


class OwnText:
    """The sequence itself, prompt and output: the longest match, then the last one."""

    name = "ngram"
    __slots__ = ("_cursor", "_end", "_index", "_tokens", "match")

    def __init__(self, tokens: list[int], known: int) -> None:
        """`tokens` is the sequence's own list, which grows; the first token to be guessed is behind `known` of them."""
        self._tokens = tokens
        self._index = PairIndex(tokens)
        self._cursor = NOWHERE
        self._end = known
        self.match = 0
        self._search(known)

    @property
    def guess(self) -> int:
        return NOWHERE if self._cursor < 0 else self._tokens[self._cursor]

    def advance(self, tokens: list[int], end: int) -> None:
        if self._end + 1 == end and self.guess == tokens[end - 1]:
            self._cursor += 1
            self._end = end
            self.match += 1
        else:
            self._search(end)

    def _search(self, end: int) -> None:
        tokens = self._tokens
        self._end, self._cursor, self.match = end, NOWHERE, 0
        if end < 2:
            return
        self._index.extend(end - 1)
        for place in self._index.places(tokens[end - 2], tokens[end - 1]):
            length = match_length(tokens, place, tokens, end)
            if length > max(self.match, 1):
                self._cursor, self.match = place, length
                if length == _LONGEST_MATCH:
                    return

    def read(self, count: int) -> list[int]:
        """Past the end of the text it goes on with what it has read: a loop is foreseen for ever."""
        if self._cursor < 0:
            return []
        read = self._tokens[self._cursor : min(self._cursor + count, self._end)]
        for place in range(count - len(read)):
            read.append(read[place])
        return read


class Prediction:
    """What the client expects the output to be: followed from its beginning, found again behind an edit.

    Where it was left, a token may stand for another one (a name that is changed): without a match the cursor moves on by one.
    """

    name = "prediction"
    __slots__ = ("_cursor", "_end", "_index", "_lost", "_text", "foreseen", "match")

    def __init__(self, text: tuple[int, ...], known: int) -> None:
        """The first token to be guessed is behind `known` of the sequence's."""
        self._text = list(text)
        self._end = known
        self._index = PairIndex(self._text)
        self._index.extend(len(text))
        self._cursor = 0
        self._lost = 0  # tokens since a guess was right
        self.match = 0
        self.foreseen = 0  # tokens of the output that were guessed

    @property
    def guess(self) -> int:
        return self._text[self._cursor] if self._cursor < len(self._text) else NOWHERE

    def advance(self, tokens: list[int], end: int) -> None:
        for last in range(self._end + 1, end + 1):
            self._advance_one(tokens, last)
        self._end = end

    def _advance_one(self, tokens: list[int], end: int) -> None:
        if self.guess == tokens[end - 1]:
            self._cursor += 1
            self._lost = 0
            self.match += 1
            self.foreseen += 1
            return
        self._lost += 1
        place, self.match = self._find(tokens, end)
        self._cursor = place if self.match else self._cursor + 1

    def _find(self, tokens: list[int], end: int) -> tuple[int, int]:
        """(place, match) of the longest match, then of the nearest one; (_, 0) if there is none."""
        text, cursor = self._text, self._cursor
        best = (0, 0, 0)  # (match, -distance, place)
        if end > 1:
            for place in self._index.places(tokens[end - 2], tokens[end - 1]):
                length = match_length(text, place, tokens, end)
                if length > 1:
                    best = max(best, (length, -abs(place - cursor), place))
        if not best[0] and self._lost <= _MOST_CANDIDATES:
            near = text[cursor : cursor + _MOST_CANDIDATES]  # a single token is a match only near the place that was left
            if tokens[end - 1] in near:
                return cursor + near.index(tokens[end - 1]) + 1, 1
        return best[2], best[0]

    def read(self, count: int) -> list[int]:
        return self._text[self._cursor : self._cursor + count]
