"""What a body asks of its output: OpenAI's `response_format`, vLLM's `structured_outputs`, and the older names of both kinds.

    field                                   kind
    response_format {type: json_object}     json_object      OpenAI
    response_format {type: json_schema}     json_schema      OpenAI; enforced with and without `strict`
    response_format {type: structural_tag}  structural_tag   vLLM
    structured_outputs {one of: json, json_object, regex, choice, grammar, structural_tag}      vLLM
    guided_json, guided_regex, guided_choice, guided_grammar, guided_json_object                vLLM until 0.11
    json_schema, regex, grammar                                                                 SGLang, llama.cpp

One at most. Whether the grammar itself can be used is for `noria.server.judge` to say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from noria.types import RequestError, StructuredOutput

Reader = Callable[[str, Any], StructuredOutput | None]


def structured_output(fields: Mapping[str, Any]) -> tuple[str, StructuredOutput] | None:
    """(the field that asks for it, what it asks for) of a body's `FIELDS`; None if its text is free. Raises RequestError."""
    found = [(name, made) for name in FIELDS if (made := _read(name, fields.get(name))) is not None]
    if len(found) > 1:
        raise RequestError(f"{found[0][0]} and {found[1][0]} both constrain the output: send one of them", param=found[1][0])
    return found[0] if found else None


def _read(name: str, value: Any) -> StructuredOutput | None:
    return None if value is None else FIELDS[name](name, value)


def _response_format(name: str, value: Any) -> StructuredOutput | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput(kind="json_object")
    if kind == "json_schema":
        inner = value.get("json_schema")
        if not isinstance(inner, dict) or "schema" not in inner:
            raise RequestError("response_format.json_schema must be an object with a schema", param=name)
        return _schema(name, inner["schema"])
    if kind == "structural_tag":
        return _tag(name, value)
    raise RequestError("response_format.type must be text, json_object, json_schema or structural_tag", param=name)


def _structured_outputs(name: str, value: Any) -> StructuredOutput | None:
    """vLLM's object, in which exactly one kind is set. What else it may hold, at a value that says nothing, is ignored."""
    if not isinstance(value, dict):
        raise RequestError("structured_outputs must be an object", param=name)
    given = {key: inner for key, inner in value.items() if inner is not None and inner is not False}
    if unknown := given.keys() - _KINDS.keys():
        raise RequestError(
            f"structured_outputs.{min(unknown)[:64]} is not supported; use one of {', '.join(_KINDS)}", param=name
        )
    if len(given) != 1:
        raise RequestError(f"structured_outputs must have exactly one of {', '.join(_KINDS)}", param=name)
    key, inner = given.popitem()
    return _KINDS[key](name, inner)


def _schema(name: str, value: Any) -> StructuredOutput:
    """A schema, as an object or as JSON in a string."""
    if isinstance(value, str):
        return StructuredOutput(kind="json_schema", value=value)
    if not isinstance(value, dict | bool):
        raise RequestError(f"{name}: the schema must be an object", param=name)
    return StructuredOutput(kind="json_schema", value=json.dumps(value, ensure_ascii=False))


def _any_json(name: str, value: Any) -> StructuredOutput | None:
    if not isinstance(value, bool):
        raise RequestError(f"{name}: json_object must be true or false", param=name)
    return StructuredOutput(kind="json_object") if value else None


def _regex(name: str, value: Any) -> StructuredOutput:
    return StructuredOutput(kind="regex", value=_text(name, value))


def _grammar(name: str, value: Any) -> StructuredOutput:
    return StructuredOutput(kind="grammar", value=_text(name, value))


def _choice(name: str, value: Any) -> StructuredOutput:
    if not isinstance(value, list) or not value or not all(isinstance(choice, str) for choice in value):
        raise RequestError(f"{name}: the choices must be a list of strings that is not empty", param=name)
    return StructuredOutput(kind="choice", value=json.dumps(value, ensure_ascii=False))


def _tag(name: str, value: Any) -> StructuredOutput:
    if not isinstance(value, str | dict):
        raise RequestError(f"{name}: the structural tag must be an object, or one as JSON in a string", param=name)
    return StructuredOutput(
        kind="structural_tag", value=value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    )


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} must be a string that is not empty", param=name)
    return value


_KINDS: Mapping[str, Reader] = {
    "json": _schema,
    "json_object": _any_json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _tag,
}
FIELDS: Mapping[str, Reader] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_json_object": _any_json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _schema,
    "regex": _regex,
    "grammar": _grammar,
}
