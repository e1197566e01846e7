"""Arguments that are not JSON, complete ones: from the model's notation to JSON text."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from noria.text.json_scanner import MAX_DEPTH, Malformed

Schema = Mapping[str, Any]

_WORDS = {"true": True, "false": False, "null": None}
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")


def to_json(value: Any) -> str:
    """JSON text of a plain value. Raises Malformed for one that JSON cannot write."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise Malformed from None


# --- Python ----------------------------------------------------------------------------------------------------------------


def python_arguments(call: str) -> str:
    """The keyword arguments of a Python call, `f(a=1, b=[True])`, as a JSON object. Also reads JSON's true, false and null."""
    try:
        tree = ast.parse(call.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Malformed from None
    if not isinstance(tree, ast.Call) or tree.args:
        raise Malformed  # positional arguments have no names to go by
    arguments: dict[str, Any] = {}
    for keyword in tree.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise Malformed
        arguments[keyword.arg] = _literal(keyword.value, MAX_DEPTH)
    return to_json(arguments)


def _literal(node: ast.expr, depth: int) -> Any:
    if depth == 0:
        raise Malformed
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item, depth - 1) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [_literal(key, depth - 1) if key is not None else None for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise Malformed
            return dict(zip(names, (_literal(value, depth - 1) for value in values), strict=True))
    raise Malformed


# --- tagged texts ----------------------------------------------------------------------------------------------------------


def tagged_arguments(text: str, pair: str, schema: Schema) -> str:
    """Pairs of tagged texts as a JSON object; between them is white space only. Raises Malformed.

    A value is a string if its schema says so, else JSON if it reads as JSON, else a string.
    """
    arguments: dict[str, Any] = {}
    end = 0
    properties = schema.get("properties")
    for match in re.finditer(pair, text, re.DOTALL):
        key = match["key"].strip()
        if text[end : match.start()].strip() or key in arguments:
            raise Malformed
        arguments[key] = _typed(match["value"], properties.get(key) if isinstance(properties, Mapping) else None)
        end = match.end()
    if text[end:].strip():
        raise Malformed
    return to_json(arguments)


def _typed(text: str, schema: Any) -> Any:
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        words = {"True": True, "False": False, "None": None}
        return words.get(text.strip(), text)


def _refused(name: str) -> Any:
    raise ValueError(name)


# --- Gemma's braces ----------------------------------------------------------------------------------------------------------


def brace_arguments(text: str, quote: str) -> str:
    """`{city:<escape>Paris<escape>,days:[1,2]}` as a JSON object: keys are bare, strings stand between two `quote`s."""
    reader = _Braces(text, quote)
    value = reader.value(MAX_DEPTH)
    if reader.at != len(text) or not isinstance(value, dict):
        raise Malformed
    return to_json(value)


class _Braces:
    """Recursive descent over a complete text."""

    def __init__(self, text: str, quote: str) -> None:
        self.text = text
        self.quote = quote
        self.at = 0

    def value(self, depth: int) -> Any:
        self._space()
        if depth == 0 or self.at == len(self.text):
            raise Malformed
        if self.text.startswith(self.quote, self.at):
            return self._quoted(self.quote)
        c = self.text[self.at]
        if c == '"':
            return self._quoted('"')
        if c == "{":
            return dict(self._items("}", lambda: (self._key(), self.value(depth - 1))))
        if c == "[":
            return self._items("]", lambda: self.value(depth - 1))
        return self._word()

    def _items(self, end: str, item: Any) -> list[Any]:
        self.at += 1
        items: list[Any] = []
        self._space()
        while not self._take(end):
            if items:
                self._need(",")
            items.append(item())
            self._space()
        return items

    def _key(self) -> str:
        self._space()
        if self.text.startswith(self.quote, self.at):
            key = self._quoted(self.quote)
        elif self.text.startswith('"', self.at):
            key = self._quoted('"')
        else:
            end = self.text.find(":", self.at)
            key = self.text[self.at : max(end, self.at)].strip()
            self.at = end if end >= 0 else len(self.text)
        self._space()
        self._need(":")
        if not key:
            raise Malformed
        return key

    def _quoted(self, quote: str) -> str:
        start = self.at + len(quote)
        end = self.text.find(quote, start)
        if end < 0:
            raise Malformed
        self.at = end + len(quote)
        return self.text[start:end]

    def _word(self) -> Any:
        """true, false, null, a number, or a bare text up to the next comma or bracket."""
        match = re.compile(r"[^,\]}]+").match(self.text, self.at)
        if match is None:
            raise Malformed
        self.at = match.end()
        word = match[0].strip()
        if word in _WORDS:
            return _WORDS[word]
        return json.loads(word) if _is_json_number(word) else word

    def _space(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def _take(self, c: str) -> bool:
        found = self.text.startswith(c, self.at)
        self.at += found
        return found

    def _need(self, c: str) -> None:
        if not self._take(c):
            raise Malformed


def _is_json_number(word: str) -> bool:
    return _NUMBER.fullmatch(word) is not None and not re.match(r"-?0\d", word) and len(word) < 300
