"""JSON read one character at a time: checked strictly, and passed on as it was written."""

from __future__ import annotations

import re

MAX_DEPTH = 64  # of objects and lists: deeper arguments are nobody's
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_CHARACTERS = frozenset("0123456789+-.eE")
_SPACE = frozenset(" \t\n\r")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_ESCAPED = {c: f"\\u{ord(c):04x}" for c in map(chr, range(0x20))} | {"\n": "\\n", "\r": "\\r", "\t": "\\t"}

# What may come next, outside of strings and words.
_VALUE, _VALUE_OR_END, _KEY, _KEY_OR_END, _COLON, _NEXT = range(6)


class Malformed(Exception):
    """The text is not what it has to be from here on."""


class JsonScanner:
    """One JSON value (RFC 8259), as a machine that takes a character and gives the text to pass on.

    What is passed on is what came in, but for control characters in strings, which models write and JSON forbids: they are
    escaped. `done` turns true with the character that completes the value; a number at the top is complete only when another
    character follows, which is then `unread` and not part of it.
    """

    __slots__ = ("_escape", "_expect", "_in_string", "_is_key", "_rest", "_stack", "_word", "done", "unread")

    def __init__(self) -> None:
        self.done = False
        self.unread = False
        self._expect = _VALUE
        self._stack: list[str] = []  # of open brackets, the characters that close them
        self._in_string = False
        self._is_key = False
        self._escape = 0  # hexadecimal digits still to come; -1: a backslash came
        self._word = ""  # the number being read
        self._rest = ""  # of true, false or null

    def feed(self, c: str) -> str:
        """The text to pass on for the character `c`. Raises Malformed if no JSON value can go on with it."""
        if self._in_string:
            return self._string(c)
        if self._word:
            if c in _NUMBER_CHARACTERS:
                self._word += c
                return c
            self._end_number()
            if self.done:
                self.unread = True
                return ""
        elif self._rest:
            if c != self._rest[0]:
                raise Malformed
            self._rest = self._rest[1:]
            if not self._rest:
                self._end_value()
            return c
        if c not in _SPACE:
            self._structure(c)
        return c

    def _string(self, c: str) -> str:
        if self._escape:
            self._escaped(c)
        elif c == "\\":
            self._escape = -1
        elif c == '"':
            self._in_string = False
            if self._is_key:
                self._expect = _COLON
            else:
                self._end_value()
        elif c in _ESCAPED:
            return _ESCAPED[c]
        return c

    def _escaped(self, c: str) -> None:
        """The character after a backslash (-1), or one of four hexadecimal digits."""
        if self._escape == -1:
            if c not in '"\\/bfnrtu':
                raise Malformed
            self._escape = 4 if c == "u" else 0
        else:
            if c not in "0123456789abcdefABCDEF":
                raise Malformed
            self._escape -= 1

    def _structure(self, c: str) -> None:
        """A character between values."""
        expect = self._expect
        if self._stack and c == self._stack[-1] and expect in (_NEXT, _KEY_OR_END, _VALUE_OR_END):
            self._stack.pop()
            self._end_value()
        elif expect == _NEXT and c == ",":
            self._expect = _KEY if self._stack[-1] == "}" else _VALUE
        elif expect == _COLON and c == ":":
            self._expect = _VALUE
        elif expect in (_KEY, _KEY_OR_END) and c == '"':
            self._in_string = self._is_key = True
        elif expect in (_VALUE, _VALUE_OR_END):
            self._begin_value(c)
        else:
            raise Malformed

    def _begin_value(self, c: str) -> None:
        if c == '"':
            self._in_string, self._is_key = True, False
        elif c in "{[":
            if len(self._stack) == MAX_DEPTH:
                raise Malformed
            self._stack.append("}" if c == "{" else "]")
            self._expect = _KEY_OR_END if c == "{" else _VALUE_OR_END
        elif c in _LITERALS:
            self._rest = _LITERALS[c][1:]
        elif c in "-0123456789":
            self._word = c
        else:
            raise Malformed

    def _end_number(self) -> None:
        if not _NUMBER.fullmatch(self._word):
            raise Malformed
        self._word = ""
        self._end_value()

    def _end_value(self) -> None:
        self._expect = _NEXT
        self.done = not self._stack
