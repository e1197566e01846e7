"""Which JSON schemas are taken: those of which every keyword is enforced, and that have an instance of finite length.

llguidance compiles a schema to a grammar and reports most of what it cannot do. This walk comes first, and refuses what it
would pass over in silence: keywords that neither it nor the specification knows, and recursion that never ends. JSON Schema's
draft 2020-12 is meant where drafts differ (https://json-schema.org/draft/2020-12).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from noria.types import RequestError

MAX_SCHEMAS = 20_000  # subschemas of one schema
MAX_DEPTH = 128

Schema = dict[str, Any]

ENFORCED = {
    *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"),
    *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    *("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
    *("minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
# They say nothing about what is valid. `discriminator` is OpenAPI's: a hint beside a oneOf that does the work.
ANNOTATIONS = {
    *("$schema", "$id", "id", "$anchor", "$comment", "$defs", "definitions"),
    *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
    *("contentEncoding", "contentMediaType", "discriminator"),
}
_SCHEMA = ("additionalProperties", "additionalItems")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})


def checked_schema(schema: object) -> Schema:
    """The schema, `{}` for `true`. RequestError that names what is wrong with it, or not enforced."""
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise _refusal("it must be an object" if schema is not False else "false allows nothing")
    for count, (path, part) in enumerate(_subschemas(schema, "#", 0), 1):
        if count > MAX_SCHEMAS:
            raise _refusal(f"it has more than {MAX_SCHEMAS} subschemas")
        _check_keywords(path, part)
    if not _Finite(schema).holds():
        raise _refusal("it refers to itself without an end: no finite value can satisfy it")
    return schema


def _refusal(reason: str) -> RequestError:
    return RequestError(f"the JSON schema cannot be used: {reason}", param="structured_output", code="invalid_json_schema")


def _subschemas(schema: object, path: str, depth: int) -> Iterator[tuple[str, Schema]]:
    """(place, schema) of this schema and all inside it; `true` and `false` have nothing to look at."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise _refusal(f"{path[:200]} must be an object, true or false")
    if depth > MAX_DEPTH:
        raise _refusal(f"it is nested more than {MAX_DEPTH} levels deep")
    yield path, schema
    for name, value in schema.items():
        for key, inner in _inside(name, value):
            yield from _subschemas(inner, f"{path}/{name}{key}", depth + 1)


def _inside(name: str, value: object) -> list[tuple[str, object]]:
    """The schemas that a keyword holds, with what to add to the path."""
    if name in _SCHEMA or (name == "items" and not isinstance(value, list)):
        return [("", value)]
    if name in _LISTS or name == "items":
        if not isinstance(value, list):
            raise _refusal(f"{name} must be a list")
        return [(f"/{i}", inner) for i, inner in enumerate(value)]
    if name in _MAPS:
        if not isinstance(value, dict):
            raise _refusal(f"{name} must be an object")
        return [(f"/{key}", inner) for key, inner in value.items()]
    return []


def _check_keywords(path: str, schema: Schema) -> None:
    for name in schema:
        if name not in ENFORCED and name not in ANNOTATIONS:
            raise _refusal(f"the keyword {name[:64]!r} (at {path[:200]}) is not enforced by this server: leave it out")
    least = schema.get("minProperties", 0)
    if isinstance(least, int) and least > max(1, len(set(map(str, schema.get("required", ()))))):
        # The names of further properties are not kept apart, so that their number is no number of different properties.
        raise _refusal(
            f"minProperties {least} (at {path[:200]}) is not enforced beyond the required properties: list them there"
        )


class _Finite:
    """Whether a schema has an instance of finite length: the least fixed point over the schemas that are referred to."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._known: dict[str, bool] = {}  # by reference: whether it is known to have one

    def holds(self) -> bool:
        while True:
            before = dict(self._known)
            holds = self._of(self._root)
            for reference in list(self._known):
                self._known[reference] = self._of(self._target(reference))
            if self._known == before:
                return holds

    def _of(self, schema: object) -> bool:
        if not isinstance(schema, dict):
            return schema is True
        if "$ref" in schema and not self._of_reference(schema["$ref"]):
            return False
        if not all(map(self._of, schema.get("allOf", ()))):
            return False
        if not all(any(map(self._of, schema[name])) for name in ("anyOf", "oneOf") if name in schema):
            return False
        types = schema.get("type")
        named = set(types) if isinstance(types, list) else {types} if isinstance(types, str) else {"any"}
        if "const" in schema or "enum" in schema or "any" in named or named & _SCALARS:
            return True
        return ("object" in named and self._of_object(schema)) or ("array" in named and self._of_array(schema))

    def _of_object(self, schema: Schema) -> bool:
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        required = schema.get("required", ())
        patterns = schema.get("patternProperties")
        return patterns is not None or all(self._of(properties.get(name, others)) for name in required)

    def _of_array(self, schema: Schema) -> bool:
        least = schema.get("minItems", 0)
        first = schema.get("prefixItems", ())
        items = schema.get("items", True)
        if not isinstance(least, int) or isinstance(items, list):
            return True
        return all(map(self._of, first[:least])) and (least <= len(first) or self._of(items))

    def _of_reference(self, reference: object) -> bool:
        if not isinstance(reference, str):
            raise _refusal("$ref must be a string")
        if not reference.startswith("#"):
            raise _refusal(
                f"$ref {reference[:200]!r} leads outside of the schema: only references that begin with # are followed"
            )
        return self._known.setdefault(reference, False)

    def _target(self, reference: str) -> object:
        """What a reference points to (RFC 6901), or an anchor's schema."""
        pointer = unquote(reference[1:])
        if pointer and not pointer.startswith("/"):
            anchored = [part for _, part in _subschemas(self._root, "#", 0) if part.get("$anchor") == pointer]
            if anchored:
                return anchored[0]
            raise _refusal(f"$ref {reference[:200]!r} points to nothing")
        target: Any = self._root
        for key in pointer.split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and re.fullmatch(r"\d{1,6}", key) and int(key) < len(target):
                target = target[int(key)]
            else:
                raise _refusal(f"$ref {reference[:200]!r} points to nothing")
        if not isinstance(target, dict | bool):
            raise _refusal(f"$ref {reference[:200]!r} points to something that is no schema")
        return target
