"""Grammars that make a model write tool calls in its own format: Lark text in llguidance's dialect.

    required, named     reasoning?  calls                    nothing but calls, at least one
    strict under auto   reasoning?  text (start  call)*      free text; what begins like a call is one

The dialect: llguidance's docs/syntax.md. `%json {...}` stands for the texts that a schema allows, `<[7]>` for the control
token 7, which no text can match; a `[lazy]` terminal ends where it first can.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from noria.text.call_formats import CallFormat, Headed, JsonCalls, ReasoningFormat
from noria.text.call_values import Schema
from noria.text.tokenizer import Tokenizer

_ANY = r"/(.|\n)*/"
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
    """Writes the grammars of one request. `reasoning` may come first: it is `opened` already, or the model may open it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        calls: CallFormat,
        functions: Sequence[Function],
        *,
        parallel: bool,
        reasoning: ReasoningFormat | None = None,
        opened: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._calls = calls
        self._functions = functions
        self._most = MOST_CALLS if parallel and not calls.single else 1
        self._reasoning = reasoning
        self._opened = opened

    def required(self) -> str:
        """At least one call, and nothing else but reasoning before it."""
        rules = [f"start: {self._thinking_reference()}calls", f"calls: {self._all_calls()}"]
        return self._text(rules)

    def free(self) -> str:
        """Text and calls, where each call that the text begins is one of the functions'."""
        calls = self._calls
        if calls.bare:
            lines = rf"LINES: /{_LINE}(\n{_LINE})*/"
            return self._text([f"start: {self._thinking_reference()}(calls | LINES)", lines, f"calls: {self._all_calls()}"])
        start = calls.starts[0]
        one = _joined(self._literal(calls.begin.removeprefix(start)), self._run(), self._literal(calls.end))
        rules = [f"start: {self._thinking_reference()}{self._repeated('text_call')} TEXT", f"TEXT: {_ANY}"]
        token = self._tokenizer.control_id(start)
        if token is None:
            rules += [f"call_start[lazy]: TEXT {_quoted(start)}", f"text_call: call_start {one}"]
        else:
            rules += [f"text_call: TEXT <[{token}]> {one}"]
        return self._text(rules)

    # --- parts -----------------------------------------------------------------------------------------------------------

    def _text(self, rules: list[str]) -> str:
        if self._reasoning is not None:
            rules += self._thinking(self._reasoning)
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(self._functions))))
        rules += [f"call_{i}: {self._one(function)}" for i, function in enumerate(self._functions)]
        return "\n".join(rules) + "\n"

    def _thinking_reference(self) -> str:
        if self._reasoning is None:
            return ""
        return "thinking " if self._opened else "thinking? "

    def _thinking(self, reasoning: ReasoningFormat) -> list[str]:
        """Rules of reasoning: what it is until its end mark, then white space."""
        start = "" if self._opened else self._literal(reasoning.start)
        after = self._literal(reasoning.after) or r"/\n{0,2}/"
        token = self._tokenizer.control_id(reasoning.end)
        if token is None:
            thought, rule = "thought", f"thought[lazy]: {_ANY} {_quoted(reasoning.end)}"
        else:
            thought, rule = f"THOUGHT <[{token}]>", f"THOUGHT: {_ANY}"
        return [f"thinking: {_joined(start, thought, after)}", rule]

    def _all_calls(self) -> str:
        calls = self._calls
        if self._listed:
            return _joined(self._literal(calls.opening + calls.begin), self._run(), self._literal(calls.end + calls.closing))
        one = f"{self._literal(calls.begin)} call {self._literal(calls.end)}".strip()
        more = f"({self._literal(calls.between)} {one}){{0,{self._most - 1}}}" if self._most > 1 else ""
        return _joined(self._literal(calls.opening), one, more, self._literal(calls.closing))

    @property
    def _listed(self) -> bool:
        first = self._calls.notations[0]
        return isinstance(first, JsonCalls) and first.listed

    def _run(self) -> str:
        """What stands between `begin` and `end`: a call, or a list of calls."""
        if not self._listed:
            return "call"
        return _joined('"["', "call", f'(", " call){{0,{self._most - 1}}}' if self._most > 1 else "", '"]"')

    def _repeated(self, rule: str) -> str:
        return f"{rule}{{0,{self._most}}}" if not self._listed else f"{rule}?"

    def _one(self, function: Function) -> str:
        """One call, its name included."""
        notation = self._calls.notations[0]
        arguments = "%json " + json.dumps(_enforced(function), ensure_ascii=True)
        if isinstance(notation, JsonCalls):
            head = f'{{"name": {json.dumps(function.name)}, "{notation.arguments}": '
            return _joined(self._literal(head), arguments, self._literal("}"))
        assert isinstance(notation, Headed)
        return _joined(self._literal(notation.written.replace("NAME", function.name)), arguments, self._literal(notation.tail))

    def _literal(self, text: str) -> str:
        """`text` as terminals: control tokens of the vocabulary by their ids."""
        parts = self._tokenizer.split_control(text) if text else []
        return " ".join(_quoted(part) if isinstance(part, str) else f"<[{part}]>" for part in parts)


def _enforced(function: Function) -> dict[str, Any]:
    """The schema of a function's arguments. Keywords that llguidance does not know count only for strict ones."""
    schema = dict(_NO_ARGUMENTS if function.parameters is None else function.parameters)
    return {"type": "object", **schema, "x-guidance": {**_SPACING, "lenient": not function.strict}}


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
