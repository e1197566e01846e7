"""Grammars: masks equal brute force over small languages, every kind takes what it should, and errors are the client's."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from grammar_helpers import accepts, constraint, masks, vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.text.grammar import CACHED_GRAMMARS, MAX_CHARACTERS, Compiler, Vocabulary, vocabulary_of
from noria.types import RequestError, StructuredOutput

WORDS = vocabulary("ab", "ba", "aab", "b仓", "仓库", "库".encode()[:2], "ab", '{"', '":', "true", "12", "<tool>")
TEXTS = st.text(alphabet="ab仓库é🧭", max_size=5)


def check_against_brute_force(words: Vocabulary, kind: str, value: str, language: set[bytes]) -> None:
    """Walk every token sequence that stays inside the language: the mask must hold what some sentence goes on with."""
    end = words.ends[0]
    seen: set[bytes] = set()
    stack = [(constraint(words, kind, value), b"")]
    while stack:
        here, prefix = stack.pop()
        if prefix in seen:
            continue
        seen.add(prefix)
        rest = [sentence[len(prefix) :] for sentence in language if sentence.startswith(prefix)]
        wanted = {t for t, data in enumerate(words.tokens) if t != end and any(left.startswith(data) for left in rest)}
        if here.ended:
            assert rest == [b""]
            continue
        assert masks(here, len(words.tokens))[0] == wanted | ({end} if b"" in rest else set()), prefix
        for token in wanted:
            following = here.fork()
            following.accept(token)
            assert following.failure is None
            stack.append((following, prefix + words.tokens[token]))
    assert language <= seen


@settings(max_examples=40, deadline=None)
@given(st.sets(TEXTS, min_size=1, max_size=6).filter(lambda texts: texts != {""}))
def test_masks_of_choices_equal_brute_force(texts: set[str]) -> None:
    """Red if a token is allowed that no sentence goes on with, one is missing (a part of a character, a second token of the
    same text, an unusual way to cut a text), or the end is allowed at another place than at a sentence's end."""
    check_against_brute_force(WORDS, "choice", json.dumps(sorted(texts)), {text.encode() for text in texts})


@pytest.mark.parametrize("expression", ["(ab|b仓)?a{1,2}", "[ab]{3}", "a(b|仓库)*b?", "(a|aa|aab)(b|)", "^ba?$", r"a|\x62"])
def test_masks_of_expressions_equal_brute_force(expression: str) -> None:
    """As above; the language is cut at six characters, and so is the walk's reach where it matters."""
    bounded = expression.replace("*", "{0,2}")
    pieces = ["a", "b", "仓", "库"]
    texts = ("".join(p) for n in range(8) for p in itertools.product(pieces, repeat=n))
    language = {text.encode() for text in texts if re.fullmatch(bounded, text)}
    check_against_brute_force(WORDS, "regex", bounded, language)


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"enum": ["仓库", 'a"b', 12, None, [True, {"a": 1}]]}, ["仓库", 'a"b', 12, None, [True, {"a": 1}]]),
        ({"type": "integer", "minimum": 7, "maximum": 12}, [7, 8, 9, 10, 11, 12]),
        (
            {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
            [[x, *y] for x in (True, False) for y in ([], [True], [False])],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"const": 1}, "b": {"type": "null"}},
                "required": ["b"],
                "additionalProperties": False,
            },
            [{"b": None}, {"a": 1, "b": None}],
        ),
        ({"anyOf": [{"const": "ab"}, {"type": "boolean"}]}, ["ab", True, False]),
    ],
)
def test_masks_of_schemas_equal_brute_force(schema: object, values: list[object]) -> None:
    """Red if white space comes between JSON's tokens, or a value is spelled in another way than compact JSON."""
    language = {json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() for value in values}
    check_against_brute_force(WORDS, "json_schema", json.dumps(schema, ensure_ascii=False), language)


@pytest.mark.parametrize(
    ("kind", "value", "good", "bad"),
    [
        (
            "json_object",
            "",
            ["{}", '{"a":[1,-2.5e3,null]}', '{"":{"b":"é\\n\\u0001"}}'],
            ["[]", "1", '{"a": 1}', "{} ", "{'a':1}"],
        ),
        ("json_schema", "true", ["1", '"x"', "[]"], ["", "x"]),
        ("regex", r"\d{2}/\w+", ["12/ab_9"], ["12/é", "٣٤/a", "1/a", "12/"]),
        ("regex", "a\nb|\\.|仓", ["a\nb", ".", "仓"], ["ab", "a\\nb", "x"]),
        ("choice", '["yes","no, (not) /x/ \\\\ \\u0001\\n"]', ["yes", "no, (not) /x/ \\ \x01\n"], ["no", "yesno", "YES"]),
        ("choice", '["","a"]', ["", "a"], ["b"]),
        ("grammar", 'start: "a" NUMBER\nNUMBER: /[0-9]+/', ["a1", "a12"], ["a", "1"]),
        ("grammar", '%llguidance {}\nstart: "a"+', ["a", "aa"], ["b"]),
        ("grammar", 'root ::= "x" item{2}\nitem ::= [a-c]', ["xab"], ["xa", "xad"]),
    ],
)
def test_every_kind_takes_its_texts_and_no_others(kind: str, value: str, good: list[str], bad: list[str]) -> None:
    """Red if an expression is searched for instead of matched, an escape is read twice, or classes become Unicode's."""
    assert [text for text in good if not accepts(WORDS, kind, value, text)] == []
    assert [text for text in bad if accepts(WORDS, kind, value, text)] == []


def test_a_structural_tag_leaves_text_free_until_its_trigger() -> None:
    """Red if free text is constrained, a tag's content is not, or a trigger that is a control token is spelled as text."""
    structure = {"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}
    value = json.dumps({"structures": [structure], "triggers": ["<f"]})
    for text in ("", "free text", "a <f>12</f> b <f>3</f>", "<g>"):
        assert accepts(WORDS, "structural_tag", value, text), text
    for text in ("<f>x", "<f>12", "<fx"):
        assert not accepts(WORDS, "structural_tag", value, text), text
    tool = WORDS.tokens.index(b"<tool>")
    words = Vocabulary(WORDS.tokens, (tool, *WORDS.control), WORDS.ends)
    value = json.dumps({"structures": [{**structure, "begin": "<tool>", "end": ""}], "triggers": ["<tool>"]})
    one = constraint(words, "structural_tag", value)
    assert tool in masks(one, len(words.tokens))[0]
    one.accept(tool)
    assert masks(one, len(words.tokens))[0] <= {*b"-0123456789", words.tokens.index(b"12")}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *[
            ("regex", expression)
            for expression in ("(", "[z-a]", "*a", "a{3,1}", "(?<=x)+", "(?P<x>a)(?P=x)", r"a\b", "a$b", "[")
        ],
        *[
            ("grammar", text)
            for text in ('start: "a', "start: missing", 'x: "a"', '%llguidance {"no_forcing":false}\nstart: "a"')
        ],
        *[("choice", text) for text in ("[]", "[1]", '"a"', "{", '[""]')],
        *[
            ("json_schema", text)
            for text in ("{", "5", '{"enum":[]}', '{"type":"file"}', '{"format":"idn-email"}', '{"x-guidance":{}}')
        ],
        *[
            ("structural_tag", text)
            for text in ("{}", '{"structures":[],"triggers":["a"]}', '{"type":"structural_tag","format":{}}')
        ],
        ("structural_tag", '{"structures":[{"begin":"x","schema":{},"end":""}],"triggers":["a"]}'),
        ("regex", "a" * (MAX_CHARACTERS + 1)),
        ("grammar", "root ::= " + "(" * 20000 + '"a"' + ")" * 20000),
    ],
)
def test_what_cannot_be_compiled_is_a_request_error_in_one_line(kind: str, value: str) -> None:
    """Red if a wrong grammar raises something else, or its message has several lines."""
    with pytest.raises((RequestError, RecursionError)) as caught:
        constraint(WORDS, kind, value)
    if isinstance(caught.value, RequestError):
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 700


def test_compiled_grammars_are_kept_by_content_and_bounded() -> None:
    """Red if a matcher in use is handed out again, equal grammars are compiled twice, or the cache grows without a bound."""
    compiler = Compiler(WORDS)
    first = StructuredOutput(kind="choice", value='["a"]')
    assert compiler.cached(first) is None
    used = compiler.compile(first)
    assert used.consume_token(ord("a"))
    again = compiler.cached(StructuredOutput(kind="choice", value='["a"]'))
    assert again is not None
    assert again.consume_token(ord("a"))
    for i in range(CACHED_GRAMMARS):
        compiler.compile(StructuredOutput(kind="choice", value=f'["x{i}"]'))
    assert compiler.cached(first) is None


def test_a_vocabulary_has_as_many_tokens_as_the_model_has_logits() -> None:
    """Red if padding rows of a model could be drawn, or a model without an end token gets grammars that cannot end."""

    class Short:
        control_ids = frozenset({2})

        def token_bytes(self, token: int) -> bytes:
            return b"ab\0"[token : token + 1]

    words = vocabulary_of(Short(), 5, [1])  # type: ignore[arg-type]
    assert words == Vocabulary((b"a", b"b", b"\0", b"", b""), (1, 2), (1,))
    assert masks(constraint(words, "regex", "a"), 5) == [{0}]
    with pytest.raises(RequestError, match="end token"):
        vocabulary_of(Short(), 5, [])  # type: ignore[arg-type]
