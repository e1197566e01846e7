"""Reading one run of tool calls, character by character, in each notation of `noria.text.call_formats`.

The readers are generators: they wait at a bare `yield` for the next character, which is "" once the answer has ended. What they
find goes to a `Sink`. Where a text is no call they raise Malformed, and the sink's owner makes content of what was read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Protocol, TypeVar

from noria.text.call_formats import Headed, JsonCalls, Notation, PythonCalls
from noria.text.call_values import Schema, brace_arguments, python_arguments, tagged_arguments
from noria.text.json_scanner import JsonScanner, Malformed

T = TypeVar("T")
Steps = Generator[None, str, T]  # takes characters, gives a result in the end

MAX_HEAD = 256  # characters of a head, a key or a name
NAME_KEYS = frozenset({"name", "tool_name"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
OTHER_KEYS = frozenset({"id", "type", "tool_call_id"})  # are read over
_SEPARATORS = ",;"


class Sink(Protocol):
    """What is done with calls."""

    def begin(self, name: str) -> None:
        """A call of `name` begins. Raises Malformed if there is no such function here."""

    def arguments(self, text: str) -> None:
        """More of its arguments."""

    def complete(self) -> None:
        """It is complete."""

    def schema(self, name: str) -> Schema:
        """The parameters of a function."""


class Reader:
    """The characters of an answer, one by one. `raw` are those read since it was last cleared."""

    __slots__ = ("_back", "_ended", "raw")

    def __init__(self) -> None:
        self.raw: list[str] = []
        self._back = ""
        self._ended = False

    def read(self) -> Steps[str]:
        """The next character; "" at the end of the answer, and ever after."""
        if self._back:
            c, self._back = self._back[0], self._back[1:]
        elif self._ended:
            return ""
        else:
            c = yield
            self._ended = not c
        if c:
            self.raw.append(c)
        return c

    def unread(self, text: str) -> None:
        """Give back what was read last."""
        if text:
            self._back = text + self._back
            del self.raw[-len(text) :]

    def skip_space(self) -> Steps[str]:
        """The next character that is no white space."""
        while (c := (yield from self.read())) and c.isspace():
            pass
        return c


def accepts(notation: Notation, c: str) -> bool:
    """Whether calls in this notation may begin with `c`."""
    match notation:
        case JsonCalls():
            return c in ("{", "[")
        case PythonCalls():
            return c == "[" or c.isidentifier()
        case Headed():
            return c not in ("", "{", "[")


def read_calls(notation: Notation, reader: Reader, sink: Sink) -> Steps[None]:
    """Read calls up to the end of their run. Raises Malformed."""
    match notation:
        case JsonCalls():
            yield from _json_calls(reader, sink)
        case PythonCalls():
            yield from _run_of(reader, lambda c: _python_call(reader, sink, c), lambda c: c.isidentifier())
        case Headed():
            yield from _headed_call(notation, reader, sink)


def _run_of(reader: Reader, call: Callable[[str], Steps[None]], begins: Callable[[str], bool]) -> Steps[None]:
    """A list of calls, or one after the other with or without a separator between them."""
    c = yield from reader.skip_space()
    listed = c == "["
    if listed:
        c = yield from reader.skip_space()
    while True:
        if not (c and begins(c)):
            raise Malformed
        yield from call(c)
        c = yield from reader.skip_space()
        if listed and c == "]":
            return
        separator = c if c and c in _SEPARATORS else ""
        if separator:
            c = yield from reader.skip_space()
        if not listed and not (c and begins(c)):
            reader.unread(separator + c)
            return
        if listed and not separator:
            raise Malformed


# --- JSON ------------------------------------------------------------------------------------------------------------------


def _json_calls(reader: Reader, sink: Sink) -> Steps[None]:
    yield from _run_of(reader, lambda c: _json_call(reader, sink), lambda c: c == "{")


def _json_call(reader: Reader, sink: Sink) -> Steps[None]:
    """An object with a name and arguments, in any order, whose brace has been read."""
    name: str | None = None
    early = ""  # arguments that came before the name
    begun = False
    first = True
    while (key := (yield from _next_key(reader, first=first))) is not None:
        first = False
        if key in NAME_KEYS and name is None:
            name = yield from _string(reader)
            if early:
                _whole(sink, name, early)
        elif key in ARGUMENT_KEYS and not begun:
            begun = True
            if name is None:
                early = yield from _arguments_text(reader)
            else:
                sink.begin(name)
                yield from _stream_arguments(reader, sink)
        elif key in OTHER_KEYS:
            yield from _json_value(reader, lambda text: None)
        else:
            raise Malformed
    if name is None:
        raise Malformed
    if not begun:
        _whole(sink, name, "{}")
    sink.complete()


def _whole(sink: Sink, name: str, arguments: str) -> None:
    sink.begin(name)
    sink.arguments(arguments)


def _next_key(reader: Reader, *, first: bool) -> Steps[str | None]:
    """The next key of an object, read up to its colon; None at the closing brace."""
    c = yield from reader.skip_space()
    if c == "}":
        return None
    if not first:
        if c != ",":
            raise Malformed
        c = yield from reader.skip_space()
    if c != '"':
        raise Malformed
    reader.unread(c)
    key = yield from _string(reader)
    if (yield from reader.skip_space()) != ":":
        raise Malformed
    return key


def _string(reader: Reader) -> Steps[str]:
    """A short JSON string without escapes: a key or a name."""
    if (yield from reader.skip_space()) != '"':
        raise Malformed
    text = ""
    while (c := (yield from reader.read())) != '"':
        if not c or c == "\\" or not c.isprintable() or len(text) == MAX_HEAD:
            raise Malformed
        text += c
    return text


def _json_value(reader: Reader, out: Callable[[str], None]) -> Steps[None]:
    """One JSON value, passed on as it comes."""
    scanner = JsonScanner()
    while not scanner.done:
        c = yield from reader.read()
        if not c:
            raise Malformed
        text = scanner.feed(c)
        if scanner.unread:
            reader.unread(c)
        out(text)


def _stream_arguments(reader: Reader, sink: Sink) -> Steps[None]:
    """Arguments: an object, passed on as it comes; or a string that holds one, or null for none."""
    c = yield from reader.skip_space()
    reader.unread(c)
    if c == "{":
        yield from _json_value(reader, sink.arguments)
    else:
        sink.arguments((yield from _arguments_text(reader)))


def _arguments_text(reader: Reader) -> Steps[str]:
    parts: list[str] = []
    yield from _json_value(reader, parts.append)
    return _object_text("".join(parts).strip())


def _object_text(text: str) -> str:
    """The JSON object that `text` is, or that the JSON string `text` holds."""
    if text == "null":
        return "{}"
    if text.startswith('"'):
        text = _unquoted(text).strip()
        scanner = JsonScanner()
        inner = []
        for c in text:
            if scanner.done:
                raise Malformed
            inner.append(scanner.feed(c))
        if not scanner.done:
            raise Malformed
        text = "".join(inner)
    if not text.startswith("{"):
        raise Malformed
    return text


def _unquoted(text: str) -> str:
    value = json.loads(text)
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise Malformed  # half of a surrogate pair, which no text can hold
    return str(value)


# --- Python ------------------------------------------------------------------------------------------------------------------


def _python_call(reader: Reader, sink: Sink, first: str) -> Steps[None]:
    """`name(key=value, ...)`, whose first character has been read."""
    name = first
    while (c := (yield from reader.read())) != "(":
        if not (c == "." or c.isalnum() or c == "_") or not c or len(name) == MAX_HEAD:
            raise Malformed
        name += c
    sink.begin(name)
    body = yield from _balanced(reader, "(", ("'", '"'), escapes=True)
    sink.arguments(python_arguments("f" + body))
    sink.complete()


def _balanced(reader: Reader, first: str, quotes: tuple[str, ...], *, escapes: bool) -> Steps[str]:
    """The text from an opening bracket, which has been read, to the one that closes it; brackets in strings do not count."""
    text = first
    stack = [_CLOSING[first]]
    quote = ""
    start = 0  # of the string, behind its quote
    while stack:
        c = yield from reader.read()
        if not c:
            raise Malformed
        text += c
        if escapes and c == "\\" and quote:
            text += yield from reader.read()
        elif quote:
            if text.endswith(quote, start):
                quote = ""
        elif found := next((q for q in quotes if text.endswith(q)), ""):
            quote, start = found, len(text)
        elif c in _CLOSING:
            stack.append(_CLOSING[c])
        elif c in ")]}" and c != stack.pop():
            raise Malformed
    return text


_CLOSING = {"(": ")", "[": "]", "{": "}"}


# --- a head, then arguments --------------------------------------------------------------------------------------------------


def _headed_call(notation: Headed, reader: Reader, sink: Sink) -> Steps[None]:
    head = ""
    while ((c := (yield from reader.read())) and c not in notation.until) or not head:
        if not c or len(head) == MAX_HEAD:
            raise Malformed
        head += c
    match = re.fullmatch(notation.head, head)
    if match is None or not c:
        raise Malformed
    name = match["name"]
    sink.begin(name)
    if notation.arguments == "json":
        reader.unread(c)
        yield from _json_value(reader, sink.arguments)
    elif notation.arguments == "braces":
        quotes = (notation.quote,) if '"' in notation.quote else (notation.quote, '"')
        text = yield from _balanced(reader, c, quotes, escapes=False)
        sink.arguments(brace_arguments(text, notation.quote))
    else:
        assert notation.tags is not None
        if c == "<":
            reader.unread(c)
        text = yield from _until(reader, notation.tags.end)
        sink.arguments(tagged_arguments(text, notation.tags.pair, sink.schema(name)))
    sink.complete()


def _until(reader: Reader, end: str) -> Steps[str]:
    """The text before `end`, which is read too."""
    parts: list[str] = []
    tail = ""
    while tail != end:
        c = yield from reader.read()
        if not c:
            raise Malformed
        parts.append(c)
        tail = (tail + c)[-len(end) :]
    return "".join(parts)[: -len(end)]
