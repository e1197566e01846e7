"""The one parser of answers: text in, events out - content, reasoning, tool calls - for every format of `call_formats`.

The parser takes one character after the other, whatever the pieces they come in, so the events do not depend on how a text
was cut. Text is shown as soon as no mark can begin in it.

    content   "Let me look.\\n<tool_call>\\n{"name": "f", ...}\\n</tool_call>"
               shown       held           a call, or content after all     ignored

White space beside reasoning and calls is theirs and not shown; everywhere else the text is kept as it is. What begins like a
call and is none is content: all that was read up to the character that made it impossible, and the parser goes on with that
character.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from noria.text.call_formats import CallFormat, Headed, ReasoningFormat
from noria.text.call_values import Schema
from noria.text.events import CallArguments, CallStart, Content, Event, Reasoning
from noria.text.json_scanner import Malformed
from noria.text.notations import Reader, Steps, accepts, read_calls

_BARE = "\0bare"  # in the place of a start: a line that may begin a call without one
_END = "\0end"
_NO_CALL = -1
_Piece = tuple[type[Content] | type[Reasoning] | type[CallStart] | type[CallArguments], int, str]


@dataclass(frozen=True)
class ParsePlan:
    """What is looked for in the answers of one request. Made once, shared by its choices.

    `tools` are the parameters of the request's functions by name; with `known_only`, other names are no calls. `most_calls`:
    the answer ends with this many. `opened`: the prompt ends inside reasoning. `streams`: a grammar makes sure that calls are
    well-formed, so their arguments may be shown while they are written; without it a call is shown when it is complete, for
    until then it may turn out to be content.
    """

    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None
    tools: Mapping[str, Schema] = field(default_factory=dict)
    known_only: bool = False
    most_calls: int | None = None
    opened: bool = False
    streams: bool = False

    @cached_property
    def texts(self) -> str:
        """All texts that the parser has to see, also where they are control tokens of the vocabulary."""
        found: list[str] = []
        if self.reasoning is not None:
            found += (self.reasoning.start, self.reasoning.end, self.reasoning.after, self.reasoning.content)
        if self.calls is not None:
            found += (*self.calls.starts, *self.calls.hidden, *self.calls.ignored)
            for notation in self.calls.notations:
                if isinstance(notation, Headed):
                    found += (notation.head.replace("\\", ""), notation.quote)
        return "\0".join(found)

    @cached_property
    def content_marks(self) -> _Marks:
        opening: tuple[str, ...] = ()
        hidden: tuple[str, ...] = ()
        if self.reasoning is not None:
            opening = (self.reasoning.start,)
            hidden = tuple(mark for mark in (self.reasoning.after, self.reasoning.content) if mark)
        if self.calls is None:
            return _Marks(opening, hidden)
        return _Marks((*self.calls.starts, *opening), (*self.calls.hidden, *hidden), self.calls.ignored)

    @cached_property
    def reasoning_marks(self) -> _Marks:
        assert self.reasoning is not None
        return _Marks((self.reasoning.end,))


class _Marks:
    """Texts that are looked for, and a pattern of what none of them can begin in."""

    def __init__(self, stops: Iterable[str], hidden: Iterable[str] = (), ignored: Iterable[str] = ()) -> None:
        self.hidden = frozenset(hidden)
        self.ignored = frozenset(ignored)
        self.all = tuple(dict.fromkeys((*stops, *hidden, *ignored)))
        firsts = "".join(sorted({re.escape(mark[0]) for mark in self.all}))
        self.plain = re.compile(rf"[^\s{firsts}]+")

    def grows(self, held: str) -> bool:
        """Whether `held` may become a longer mark."""
        return any(len(mark) > len(held) and mark.startswith(held) for mark in self.all)

    def longest(self, held: str) -> str:
        """The longest mark that `held` begins with, or nothing."""
        return max((mark for mark in self.all if held.startswith(mark)), key=len, default="")


class _Enough(Exception):
    """The answer has as many calls as it may have."""


class Parser:
    """One choice's parser. `push` its text as it comes, then `finish`."""

    def __init__(self, plan: ParsePlan) -> None:
        self._plan = plan
        self._reader = Reader()
        self._calls = _Calls(self)
        self._out: list[_Piece] = []
        self._space = ""  # white space and ignored marks: shown before the next text, if it is not a mark
        self._drop_space = False  # behind reasoning or a call
        self._any_content = False
        self._line_start = True  # only white space on this line so far
        self._plain: re.Pattern[str] | None = None  # set while what it matches can be shown at once
        self.reasoning = False  # whether the text is reasoning now
        self.ended = False  # the answer has as many calls as it may have: what follows is dropped
        self._steps = self._run()
        next(self._steps)

    @property
    def calls(self) -> int:
        """Complete calls so far."""
        return self._calls.complete_calls

    def push(self, text: str) -> tuple[Event, ...]:
        """The events of more text."""
        at, end = 0, len(text)
        while at < end and not self.ended:
            if self._plain is not None and (match := self._plain.match(text, at)):
                self._show(match[0])
                at = match.end()
            else:
                self._send(text[at])
                at += 1
        return self._events()

    def finish(self) -> tuple[Event, ...]:
        """The events of what was held back: the text has ended."""
        if not self.ended:
            self._send("")
        return self._events()

    def _send(self, c: str) -> None:
        try:
            self._steps.send(c)
        except (StopIteration, _Enough):
            self.ended = True
            self._plain = None

    # --- what the text is ------------------------------------------------------------------------------------------------

    def _run(self) -> Steps[None]:
        plan = self._plan
        if plan.opened:
            yield from self._reason()
        while (mark := (yield from self._text(plan.content_marks))) != _END:
            if plan.reasoning is None or mark != plan.reasoning.start:
                yield from self._attempt(mark)
            elif self._any_content and not plan.reasoning.anywhere:
                self._show(mark)
            else:
                yield from self._reason()

    def _reason(self) -> Steps[None]:
        self.reasoning, self._space, self._drop_space = True, "", True
        mark = yield from self._text(self._plan.reasoning_marks)
        self.reasoning = False
        if mark != _END:
            self._space, self._drop_space, self._line_start = "", True, True

    def _attempt(self, mark: str) -> Steps[None]:
        """Read calls, or make content of what was read."""
        reader, calls = self._reader, self._calls
        reader.raw = [] if mark == _BARE else [mark]
        calls.needs_known_name = self._plan.known_only or self._has_bare
        try:
            c = yield from reader.skip_space()
            reader.unread(c)
            assert self._plan.calls is not None
            notation = next((n for n in self._plan.calls.notations if accepts(n, c)), None)
            if notation is None:
                yield from reader.read()
                raise Malformed
            yield from read_calls(notation, reader, calls)
        except Malformed:
            self._give_up()

    def _give_up(self) -> None:
        raw, reader = "".join(self._reader.raw), self._reader
        if self._calls.abandon():  # all but the last character was shown as arguments
            reader.unread(raw[-1:])
            return
        if len(raw) > 1:
            reader.raw = [raw[-1]]
            reader.unread(raw[-1])
            raw = raw[:-1]
        if raw:
            self._show(raw)

    @property
    def _has_bare(self) -> bool:
        return self._plan.calls is not None and self._plan.calls.bare

    # --- plain text ------------------------------------------------------------------------------------------------------

    def _text(self, marks: _Marks) -> Steps[str]:
        """Show text up to a mark, and return it; _BARE where a line may begin a call, _END at the end of the answer."""
        reader = self._reader
        held = ""
        while True:
            self._plain = marks.plain if not held and not (self._bare_here and self._line_start) else None
            reader.raw.clear()
            c = yield from reader.read()
            self._plain = None
            held += c
            if c and marks.grows(held):
                continue
            while held:
                mark = marks.longest(held)
                if mark:
                    reader.raw = list(held)
                    reader.unread(held[len(mark) :])
                    held = ""
                    if mark in marks.ignored:
                        self._take_space(mark)
                    elif mark not in marks.hidden:
                        return mark
                elif self._bare_here and self._line_start and self._may_begin_call(held[0]):
                    reader.raw = list(held)
                    reader.unread(held)
                    return _BARE
                else:
                    self._take(held[0])
                    held = held[1:]
                    if held and c and marks.grows(held):
                        break
            if not c:
                self._flush_space()
                return _END

    @property
    def _bare_here(self) -> bool:
        return self._has_bare and not self.reasoning

    def _may_begin_call(self, c: str) -> bool:
        return c in ("{", "[")

    def _take(self, c: str) -> None:
        if c.isspace():
            self._take_space(c)
            self._line_start = self._line_start or c == "\n"
        else:
            self._show(c)

    def _take_space(self, text: str) -> None:
        if not self._drop_space:
            self._space += text

    def _flush_space(self) -> None:
        if self._space:
            self._show("")

    # --- events ----------------------------------------------------------------------------------------------------------

    def _show(self, text: str) -> None:
        """Text that is shown, after the white space before it."""
        if self._space:
            text, self._space = self._space + text, ""
        self._drop_space = self._line_start = False
        if not self.reasoning:
            self._any_content = True
        self._out.append((Reasoning if self.reasoning else Content, _NO_CALL, text))

    def take_call(self, pieces: list[_Piece]) -> None:
        """Events of a call: what is sure of it. White space beside it is not content."""
        self._space, self._drop_space, self._line_start = "", True, True
        self._reader.raw.clear()
        self._out += pieces

    def _events(self) -> tuple[Event, ...]:
        """What was found since the last time, neighbours of one kind as one."""
        if not self._out:
            return ()
        events: list[Event] = []
        kind, index, texts = self._out[0][0], self._out[0][1], [self._out[0][2]]
        for piece in self._out[1:]:
            if piece[0] is kind and piece[1] == index and kind is not CallStart:
                texts.append(piece[2])
            else:
                events.append(_event(kind, index, "".join(texts)))
                kind, index, texts = piece[0], piece[1], [piece[2]]
        events.append(_event(kind, index, "".join(texts)))
        self._out = []
        return tuple(events)


def _event(kind: type[Event], index: int, text: str) -> Event:
    if kind is CallStart or kind is CallArguments:
        return kind(index, text)
    assert kind is Content or kind is Reasoning
    return kind(text)


class _Calls:
    """The sink of the call readers (`notations.Sink`): holds a call until it is complete, or shows it as it comes."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._held: list[_Piece] = []
        self._index = 0
        self._open = False
        self.complete_calls = 0
        self.needs_known_name = False

    def begin(self, name: str) -> None:
        plan = self._parser._plan
        if not name or (self.needs_known_name and name not in plan.tools):
            raise Malformed
        self._open = True
        self._add((CallStart, self._index, name))

    def arguments(self, text: str) -> None:
        if text:
            self._add((CallArguments, self._index, text))

    def complete(self) -> None:
        self._parser.take_call(self._held)
        self._held = []
        self._index += 1
        self.complete_calls += 1
        self._open = False
        if self.complete_calls == self._parser._plan.most_calls:
            raise _Enough

    def schema(self, name: str) -> Schema:
        return self._parser._plan.tools.get(name, {})

    def abandon(self) -> bool:
        """The open call is none. Whether some of it was shown already, which is then an incomplete call."""
        shown = self._open and self._parser._plan.streams
        self._index += shown
        self._held, self._open = [], False
        return shown

    def _add(self, piece: _Piece) -> None:
        if self._parser._plan.streams:
            self._parser.take_call([piece])
        else:
            self._held.append(piece)
