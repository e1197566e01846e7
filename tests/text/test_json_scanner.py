"""The JSON machine agrees with Python's parser on what JSON is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.text.json_scanner import JsonScanner, Malformed

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def scan(text: str) -> tuple[str, bool]:
    """(what was passed on, whether the value is complete)."""
    scanner = JsonScanner()
    out = []
    for c in text:
        if scanner.done:
            raise Malformed
        out.append(scanner.feed(c))
    return "".join(out), scanner.done


@given(st.dictionaries(st.text(), VALUES), st.sampled_from([None, 2]), st.booleans())
def test_json_is_passed_on_as_it_is(value: dict[str, object], indent: int | None, ascii_only: bool) -> None:
    """Red when valid JSON is refused, changed, or its end is missed."""
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    passed, done = scan(text)
    assert done
    assert json.loads(passed) == value
    assert passed == text


@given(st.dictionaries(st.text(max_size=3), VALUES, min_size=1), st.data())
def test_what_is_taken_whole_is_json(value: dict[str, object], data: st.DataObject) -> None:
    """Red when broken JSON passes for JSON: one character of a valid text is dropped or replaced."""
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text) - 1))
    broken = text[:at] + data.draw(st.sampled_from(["", "}", '"', ",", "0", "\\", "x", "]", ":"])) + text[at + 1 :]
    try:
        passed, done = scan(broken)
    except Malformed:
        return
    if done:
        json.loads(passed)


@pytest.mark.parametrize(
    "text", ['{"a": 1.}', '{"a": .5}', '{"a": -}', '{"a": tru}', '{"a": "\\x"}', '{"a" 1}', "{,}", '{"a": +1}']
)
def test_broken_values(text: str) -> None:
    """Red when a number, a word or an escape is checked less strictly than RFC 8259 has it."""
    with pytest.raises(Malformed):
        scan(text)
