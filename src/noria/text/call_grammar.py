"""Grammars that make a model write tool calls in its own format: Lark text in llguidance's dialect.

    required, named              reasoning?  calls                  nothing but calls, at least one
    strict under auto            reasoning?  text (start  call)*    free text; what begins like a call is one
    auto and a format of text    reasoning?  (calls | content)      `content` is a rule that `noria.text.grammar` adds

The dialect is explained in `noria.text.lark`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from noria.text.call_formats import CallFormat, Headed, JsonCalls
from noria.text.call_values import Schema
from noria.text.lark import ANY, Thinking, joined, literal, quoted
from noria.text.tokenizer import Tokenizer

_LINE = r"[ \t]*([^\s{\[][^\n]*)?"  # a line of text that begins with nothing that the parser takes for a bare call

MOST_CALLS = 16  # of one enforced answer: a model without an end in sight comes to one

# Written as Python's and JavaScript's models write JSON, without room for endless white space.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Function:
    """A function that may be called. `strict`: a schema that cannot be enforced to the letter is an error."""

    name: str
    parameters: Schema | None = None
    strict: bool = False


def writable(calls: CallFormat) -> bool:
    """Whether calls of this format can be enforced: their arguments are JSON."""
    first = calls.notations[0]
    return isinstance(first, JsonCalls) or (isinstance(first, Headed) and bool(first.written))


class CallGrammar:
    """Writes the grammars of one request. `thinking` comes first, where there is any."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        calls: CallFormat,
        functions: Sequence[Function],
        *,
        parallel: bool,
        thinking: Thinking | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._calls = calls
        self._functions = functions
        self._most = MOST_CALLS if parallel and not calls.single else 1
        self._thinking = thinking or Thinking()

    def required(self) -> str:
        """At least one call, and nothing else but reasoning before it."""
        return self._text([self._start("calls"), f"calls: {self._all_calls()}"])

    def or_content(self, head: str = "") -> str:
        """Calls, or else what the rule `content` stands for, which is to be added; `head` is written before that."""
        content = joined(self._literal(head), "content")
        rules = [self._start(f"(calls | {content})"), f"calls: {self._all_calls()}"]
        return self._text(rules, self._one_like_json if self._calls.bare else self._one)

    def free(self) -> str:
        """Text and calls, where each call that the text begins is one of the functions'."""
        calls = self._calls
        if calls.bare:
            lines = rf"LINES: /{_LINE}(\n{_LINE})*/"
            return self._text([self._start("(calls | LINES)"), lines, f"calls: {self._all_calls()}"])
        start = calls.starts[0]
        one = joined(self._literal(calls.begin.removeprefix(start)), self._run(), self._literal(calls.end))
        rules = [self._start(f"{self._repeated('text_call')} TEXT"), f"TEXT: {ANY}"]
        token = self._tokenizer.control_id(start)
        if token is None:
            rules += [f"call_start[lazy]: TEXT {quoted(start)}", f"text_call: call_start {one}"]
        else:
            rules += [f"text_call: TEXT <[{token}]> {one}"]
        return self._text(rules)

    # --- parts -----------------------------------------------------------------------------------------------------------

    def _start(self, rest: str) -> str:
        return f"start: {joined(self._thinking.reference, rest)}"

    def _text(self, rules: list[str], one: Callable[[Function], str] | None = None) -> str:
        one = one or self._one
        rules += self._thinking.rules
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(self._functions))))
        rules += [f"call_{i}: {one(function)}" for i, function in enumerate(self._functions)]
        return "\n".join(rules) + "\n"

    def _all_calls(self) -> str:
        calls = self._calls
        if self._listed:
            return joined(self._literal(calls.opening + calls.begin), self._run(), self._literal(calls.end + calls.closing))
        one = f"{self._literal(calls.begin)} call {self._literal(calls.end)}".strip()
        more = f"({self._literal(calls.between)} {one}){{0,{self._most - 1}}}" if self._most > 1 else ""
        return joined(self._literal(calls.opening), one, more, self._literal(calls.closing))

    @property
    def _listed(self) -> bool:
        first = self._calls.notations[0]
        return isinstance(first, JsonCalls) and first.listed

    def _run(self) -> str:
        """What stands between `begin` and `end`: a call, or a list of calls."""
        if not self._listed:
            return "call"
        return joined('"["', "call", f'(", " call){{0,{self._most - 1}}}' if self._most > 1 else "", '"]"')

    def _repeated(self, rule: str) -> str:
        return f"{rule}{{0,{self._most}}}" if not self._listed else f"{rule}?"

    def _one(self, function: Function) -> str:
        """One call, its name included."""
        notation = self._calls.notations[0]
        arguments = _arguments(function)
        if isinstance(notation, JsonCalls):
            head = f'{{"name": {json.dumps(function.name)}, "{notation.arguments}": '
            return joined(self._literal(head), arguments, self._literal("}"))
        assert isinstance(notation, Headed)
        return joined(self._literal(notation.written.replace("NAME", function.name)), arguments, self._literal(notation.tail))

    def _one_like_json(self, function: Function) -> str:
        """A bare call, of the terminals that JSON beside it has: a longer one that begins like those would hide them."""
        notation = self._calls.notations[0]
        assert isinstance(notation, JsonCalls)
        name, arguments = json.dumps(function.name), json.dumps(notation.arguments)
        head = ("{", '"name"', ": ", name, ", ", arguments, ": ")
        return joined(*map(quoted, head), _arguments(function), quoted("}"))

    def _literal(self, text: str) -> str:
        return literal(self._tokenizer, text)


def _arguments(function: Function) -> str:
    """JSON of a function's schema. Keywords that llguidance does not know count only for strict functions."""
    schema = dict(_NO_ARGUMENTS if function.parameters is None else function.parameters)
    style = {**_SPACING, "lenient": not function.strict}
    return "%json " + json.dumps({"type": "object", **schema, "x-guidance": style}, ensure_ascii=True)
