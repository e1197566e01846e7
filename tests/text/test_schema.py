"""Which schemas are taken: every keyword is enforced or refused by name, and there is a finite instance."""

from __future__ import annotations

from typing import Any

import pytest

from noria.text.schema import ANNOTATIONS, ENFORCED, MAX_DEPTH, MAX_SCHEMAS, checked_schema
from noria.types import RequestError

INTEGER = {"type": "integer"}
NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["next"]}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}


@pytest.mark.parametrize("place", ["{}", "properties", "items", "anyOf", "additionalProperties", "$defs", "prefixItems"])
@pytest.mark.parametrize(
    "keyword", ["not", "if", "contains", "uniqueItems", "propertyNames", "dependentRequired", "nullable", "x"]
)
def test_a_keyword_that_is_not_enforced_is_named(keyword: str, place: str) -> None:
    """Red if an unknown keyword is passed over, at the top or inside any other."""
    inner: dict[str, Any] = {keyword: {}}
    outer: dict[str, Any] = {
        "{}": inner,
        "properties": {"properties": {"a": inner}},
        "items": {"items": inner},
        "anyOf": {"anyOf": [INTEGER, inner]},
        "additionalProperties": {"additionalProperties": inner},
        "$defs": {"$defs": {"a": inner}},
        "prefixItems": {"prefixItems": [inner]},
    }[place]
    with pytest.raises(RequestError, match=f"'{keyword}'"):
        checked_schema(outer)


def test_names_of_properties_and_values_are_no_keywords() -> None:
    """Red if the walk takes a property's name, a constant or a default for a keyword."""
    schema = {
        "properties": {"not": INTEGER, "oneOf": {"enum": [{"not": 1}]}, "$ref": {"const": {"if": 2}}},
        "default": {"contains": 3},
        "title": "t",
    }
    assert checked_schema(schema) == schema
    assert not ENFORCED & ANNOTATIONS


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}},
        {"type": "object", "properties": {"child": {"$ref": "#"}}},
        {"$ref": "#node", "$defs": {"node": {"$anchor": "node", **INTEGER}}},
        {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": INTEGER}},
        {"$ref": "#/anyOf/1", "anyOf": [INTEGER, {"type": "string"}]},
        {"properties": {"x": {"$ref": "#"}}, "required": ["x"]},  # a number is an instance: nothing says object
        {"type": ["object", "null"], "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
        True,
    ],
)
def test_recursion_with_a_base_is_taken(schema: Any) -> None:
    """Red if recursion is refused as such, or a reference is not found."""
    checked_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [INTEGER, {"$ref": "#"}], "minItems": 2},
        {"allOf": [INTEGER, {"$ref": "#"}]},
        {"anyOf": [{"$ref": "#"}, {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["x"]}]},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        False,
    ],
)
def test_a_schema_without_a_finite_instance_is_refused(schema: Any) -> None:
    """Red if a model could be sent on a way that never ends."""
    with pytest.raises(RequestError, match=r"without an end|allows nothing"):
        checked_schema(schema)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "#/$defs/missing"}, "points to nothing"),
        ({"$ref": "#missing"}, "points to nothing"),
        ({"$ref": "https://example.com/s.json"}, "leads outside"),
        ({"$ref": "#/title", "title": "t"}, "no schema"),
        ({"$ref": 5}, "must be a string"),
        ({"required": "a"}, "list of strings"),
        ({"type": {"a": 1}}, "a string or a list"),
        ({"properties": []}, "must be an object"),
        ({"anyOf": {}}, "must be a list"),
        ({"items": 5}, "must be an object"),
        ({"minItems": -1}, "number of items"),
        ({"minProperties": 3, "required": ["a", "b"]}, "minProperties 3"),
        ([], "must be an object"),
    ],
)
def test_what_is_wrong_is_said(schema: Any, message: str) -> None:
    """Red if a malformed schema raises something else than a RequestError."""
    with pytest.raises(RequestError, match=message):
        checked_schema(schema)


def test_size_and_depth_are_bounded() -> None:
    """Red if the walk recurses as deep, or goes on as long, as a client wants."""
    deep: dict[str, Any] = {}
    for _ in range(MAX_DEPTH + 1):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="nested"):
        checked_schema(deep)
    with pytest.raises(RequestError, match="more than"):
        checked_schema({"anyOf": [{}] * MAX_SCHEMAS})
    chain = {f"n{i}": {"$ref": f"#/$defs/n{i + 1}"} for i in range(5000)}
    with pytest.raises(RequestError, match="too deep"):
        checked_schema({"$ref": "#/$defs/n0", "$defs": {**chain, "n5000": INTEGER}})


def test_one_of_is_any_of_where_a_constant_tells_the_options_apart() -> None:
    """Red if a discriminated union of references is refused, or a oneOf whose options overlap becomes an anyOf."""
    options = [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]
    schema = {"oneOf": options, "discriminator": {"propertyName": "kind"}, "$defs": {"cat": CAT, "dog": DOG}}
    assert checked_schema(schema) == {"anyOf" if k == "oneOf" else k: v for k, v in schema.items()}
    optional = {**schema, "$defs": {"cat": CAT, "dog": {**DOG, "required": []}}}
    overlapping = {**schema, "$defs": {"cat": CAT, "dog": CAT}}
    for other in (optional, overlapping):
        assert checked_schema(other) == other
