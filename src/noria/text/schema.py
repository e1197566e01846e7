"""Which JSON schemas are taken: those of which every keyword is enforced, and that have an instance of finite length.

llguidance compiles a schema to a grammar and reports most of what it cannot do. This walk comes first, and refuses what it
would pass over in silence: keywords that neither it nor the specification knows, and recursion that never ends. JSON Schema's
draft 2020-12 is meant where drafts differ (https://json-schema.org/draft/2020-12).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from noria.types import RequestError

MAX_SCHEMAS = 20_000  # subschemas of one schema
MAX_DEPTH = 128
MAX_LOOKS = 100_000  # at a subschema, to find out whether recursion ends: a tenth of a second

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
_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {  # of the keywords that are looked at here
    "$ref": (lambda value: isinstance(value, str), "a string"),
    "type": (lambda value: isinstance(value, str) or _are_strings(value), "a string or a list of strings"),
    "required": (lambda value: _are_strings(value), "a list of strings"),
    "minItems": (lambda value: type(value) is int and value >= 0, "a number of items"),
    "minProperties": (lambda value: type(value) is int and value >= 0, "a number of properties"),
}
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
    same: Schema = _with_any_of(schema, schema)
    return same


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


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
    for name, (fits, form) in _FORMS.items():
        if name in schema and not fits(schema[name]):
            raise _refusal(f"{name} (at {path[:200]}) must be {form}")
    least = schema.get("minProperties", 0)
    if least > max(1, len(set(schema.get("required", ())))):
        # The names of further properties are not kept apart, so that their number is no number of different properties.
        raise _refusal(
            f"minProperties {least} (at {path[:200]}) is not enforced beyond the required properties: list them there"
        )


def _with_any_of(schema: Any, root: Schema) -> Any:
    """The schema with `anyOf` for `oneOf` where a required constant tells the options apart: there they mean the same.

    llguidance finds that out itself where the options are written in place, not where they are references.
    """
    if not isinstance(schema, dict):
        return schema
    result: Schema = {}
    for name, value in schema.items():
        if name in _MAPS:
            result[name] = {key: _with_any_of(inner, root) for key, inner in value.items()}
        elif name in _LISTS or (name == "items" and isinstance(value, list)):
            same = name == "oneOf" and "anyOf" not in schema and _told_apart(value, root)
            result["anyOf" if same else name] = [_with_any_of(inner, root) for inner in value]
        else:
            result[name] = _with_any_of(value, root) if name in _SCHEMA or name == "items" else value
    return result


def _told_apart(options: list[Any], root: Schema) -> bool:
    """Whether all options are objects, and some required property has other constants in each of them."""
    objects: list[Schema] = []
    for option in options:
        target = resolve(option["$ref"], root) if isinstance(option, dict) and option.keys() == {"$ref"} else option
        if not isinstance(target, dict) or target.get("type") != "object":
            return False
        objects.append(target)
    for name in objects[0].get("required", ()) if objects else ():
        values = [
            _constants(target.get("properties", {}).get(name)) for target in objects if name in target.get("required", ())
        ]
        if len(values) == len(objects) and all(values) and len(set().union(*values)) == sum(map(len, values)):
            return True
    return False


def _constants(schema: object) -> set[str]:
    """The strings that a schema names as its only values; none for another schema."""
    if not isinstance(schema, dict):
        return set()
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return set(values) if isinstance(values, list) and all(isinstance(value, str) for value in values) else set()


class _Finite:
    """Whether a schema has an instance of finite length: the least fixed point over the schemas that are referred to."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._looks = 0
        self._known: dict[str, bool] = {}  # by reference: whether it is known to have one

    def holds(self) -> bool:
        while True:
            before = dict(self._known)
            holds = self._of(self._root)
            for reference in list(self._known):
                self._known[reference] = self._of(resolve(reference, self._root))
            if self._known == before:
                return holds

    def _of(self, schema: object) -> bool:
        self._looks += 1
        if self._looks > MAX_LOOKS:
            raise _refusal("its references are too many, or too deep")
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
        if isinstance(items, list):
            first, items = items, schema.get("additionalItems", True)
        return all(map(self._of, first[:least])) and (least <= len(first) or self._of(items))

    def _of_reference(self, reference: str) -> bool:
        if not reference.startswith("#"):
            raise _refusal(
                f"$ref {reference[:200]!r} leads outside of the schema: only references that begin with # are followed"
            )
        return self._known.setdefault(reference, False)


def resolve(reference: str, root: Schema) -> object:
    """What a reference inside of a schema points to: a JSON pointer (RFC 6901), or an anchor's schema."""
    pointer = unquote(reference[1:])
    if pointer and not pointer.startswith("/"):
        anchored = [part for _, part in _subschemas(root, "#", 0) if part.get("$anchor") == pointer]
        if anchored:
            return anchored[0]
        raise _refusal(f"$ref {reference[:200]!r} points to nothing")
    target: Any = root
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
