"""Pieces of Lark text in llguidance's dialect: literals, control tokens, and the rules of reasoning before an answer.

The dialect: llguidance's docs/syntax.md. `%json {...}` stands for the texts that a schema allows, `<[7]>` for the control
token 7, which no text can match; a `[lazy]` terminal ends where it first can.
"""

from __future__ import annotations

import json
from typing import Literal

import msgspec

from noria.text.call_formats import ReasoningFormat
from noria.text.tokenizer import Tokenizer

ANY = r"/(.|\n)*/"

# Where a prompt leaves reasoning: inside it, before it (the model may open it), or behind it (the template closed it).
ReasoningState = Literal["open", "possible", "over"]


class Thinking(msgspec.Struct, frozen=True):
    """The reasoning that an answer may begin with: how a rule refers to it, and its rules."""

    reference: str = ""
    rules: tuple[str, ...] = ()


def thinking(tokenizer: Tokenizer, reasoning: ReasoningFormat | None, state: ReasoningState) -> Thinking:
    """Free text up to the end mark, then white space; optional where the model may open it, nothing where it is over."""
    if reasoning is None or state == "over":
        return Thinking()
    opened = state == "open"
    start = "" if opened else literal(tokenizer, reasoning.start)
    after = literal(tokenizer, reasoning.after) or r"/\n{0,2}/"
    token = tokenizer.control_id(reasoning.end)
    if token is None:
        thought, rule = "thought", f"thought[lazy]: {ANY} {quoted(reasoning.end)}"
    else:
        thought, rule = f"THOUGHT <[{token}]>", f"THOUGHT: {ANY}"
    return Thinking("thinking" if opened else "thinking?", (f"thinking: {joined(start, thought, after)}", rule))


def literal(tokenizer: Tokenizer, text: str) -> str:
    """`text` as terminals: control tokens of the vocabulary by their ids."""
    parts = tokenizer.split_control(text) if text else []
    return " ".join(quoted(part) if isinstance(part, str) else f"<[{part}]>" for part in parts)


def quoted(text: str) -> str:
    """A text between quotes."""
    return json.dumps(text, ensure_ascii=False)


def joined(*parts: str) -> str:
    """Parts one after the other; empty ones are left out."""
    return " ".join(part for part in parts if part)
