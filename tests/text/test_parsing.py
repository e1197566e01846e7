"""The parser of answers: golden transcripts, independence of cuts, nothing lost, nothing shown too early."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import calls_helpers as helpers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.text.call_formats import CALL_FORMATS, REASONING_FORMATS, call_format
from noria.text.events import CallArguments, CallStart, Content, Event, Reasoning
from noria.text.parsing import ParsePlan, Parser
from noria.types import ConfigError

HERMES = helpers.call_format_named("hermes")
THINK = REASONING_FORMATS[-1]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def texts(events: list[Event], kind: type[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def content(text: str, plan: ParsePlan) -> str:
    """The content of a text that must be nothing but content."""
    events = helpers.parsed(plan, [text])
    assert all(isinstance(event, Content) for event in events), events
    return texts(events, Content)


@pytest.mark.parametrize("path", helpers.GOLDEN, ids=lambda path: path.stem)
def test_golden_transcripts(path: Path) -> None:
    """Red when a format's entry no longer reads what its models write; whole, by characters, and with calls shown early."""
    case = helpers.golden(path)
    want = helpers.expected(case)
    assert helpers.parsed(helpers.plan_of(case), [case["text"]]) == want
    assert helpers.parsed(helpers.plan_of(case), case["text"]) == want
    assert helpers.parsed(helpers.plan_of(case, streams=True), case["text"]) == want


def test_every_format_has_a_golden_transcript() -> None:
    """Red when a format is added without one."""
    covered = {name for path in helpers.GOLDEN for name in (helpers.golden(path)["calls"], helpers.golden(path)["reasoning"])}
    assert [f.names for f in (*CALL_FORMATS, *REASONING_FORMATS) if not covered & set(f.names)] == []


def test_ten_thousand_random_transcripts_cut_at_random_parse_as_whole() -> None:
    """Red when an event depends on how the text was cut, or when a complete call's arguments are not JSON."""
    rng = random.Random(7)
    cases = [helpers.golden(path) for path in helpers.GOLDEN]
    for number in range(10_000):
        case = cases[number % len(cases)]
        plan = helpers.plan_of(case, opened=bool(case["reasoning"]) and number % 3 == 0)
        text = helpers.random_transcript(case, rng)
        whole = helpers.parsed(plan, [text])
        assert helpers.parsed(plan, helpers.cut(text, rng)) == whole, text
        for event in whole:
            if isinstance(event, CallArguments):
                assert isinstance(json.loads(event.text), dict), text


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(CALL_FORMATS),
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", "<", '{"name": "', 'f"', ", ", '"arguments": ', "{}", "}", "[", "a"])
    )
    | st.lists(st.text(max_size=5)),
)
def test_text_without_calls_is_content_to_the_last_character(calls: Any, parts: list[str]) -> None:
    """Red when content is lost or changed: what is no call comes out as it went in, but for marks that are never text."""
    text = "".join(parts)
    events = helpers.parsed(ParsePlan(calls=calls), list(text))
    if not any(isinstance(event, CallStart) for event in events) and not any(mark in text for mark in calls.hidden):
        assert texts(events, Content) == text


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>",
        "<tool_call>\n",
        "<tool_call>nonsense</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": 1',
        '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call> and more',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "name": "g"}</tool_call>',
        '<tool_call>{"name": 7}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 80 + "1" + "}" * 80 + "}</tool_call>",
        "<tool_call>[]</tool_call>",
    ],
)
def test_a_malformed_call_is_content(broken: str) -> None:
    """Red when half a call is reported as one, or its text is swallowed."""
    text = f"Look: {broken}\n"
    assert content(text, ParsePlan(calls=HERMES)) == text


def test_a_call_after_a_malformed_one_is_found() -> None:
    """Red when a broken call takes the next one with it."""
    events = helpers.parsed(ParsePlan(calls=HERMES), ["<tool_call>oops ", CALL])
    assert events[0] == Content("<tool_call>oops")
    assert events[1:] == [CallStart(0, "f"), CallArguments(0, '{"a": 1}')]


def test_arguments_are_shown_while_they_are_written_under_a_grammar_and_else_when_complete() -> None:
    """Red when an enforced call is held back, or an unenforced one is shown before it is sure to be one."""
    begun = CALL[: CALL.index("1}")]
    early = Parser(ParsePlan(calls=HERMES, streams=True))
    assert list(early.push(begun)) == [CallStart(0, "f"), CallArguments(0, '{"a": ')]
    late = Parser(ParsePlan(calls=HERMES))
    assert late.push(begun) == ()
    assert late.calls == 0
    assert list(late.push(CALL[len(begun) :])) == [CallStart(0, "f"), CallArguments(0, '{"a": 1}')]
    assert late.calls == 1


def test_a_call_cut_short_under_a_grammar_is_incomplete() -> None:
    """Red when a truncated call counts as complete (a client would run it)."""
    parser = Parser(ParsePlan(calls=HERMES, streams=True))
    parser.push(CALL[:-20])
    parser.finish()
    assert parser.calls == 0


def test_nothing_is_shown_that_may_become_a_mark() -> None:
    """Red when part of a mark, or white space before a call, is shown and would have to be taken back."""
    parser = Parser(ParsePlan(calls=HERMES))
    assert parser.push("Yes.\n <tool_ca") == (Content("Yes."),)
    assert parser.push("r") == (Content("\n <tool_car"),)
    assert parser.push(" ") == ()
    assert parser.finish() == (Content(" "),)


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_with_and_without_its_mark_in_the_prompt(opened: bool) -> None:
    """Red when a mark that the template wrote is waited for in the answer, or white space beside the marks is shown."""
    plan = ParsePlan(THINK, HERMES, opened=opened)
    text = "\nFirst <tool_call>.\n\n</think>\n\nThen.\n"
    events = helpers.parsed(plan, text if opened else "<think>" + text)
    assert events == [Reasoning("First <tool_call>."), Content("Then.\n")]


def test_reasoning_without_an_end_is_reasoning() -> None:
    """Red when an answer cut short inside reasoning comes out as content."""
    assert helpers.parsed(ParsePlan(THINK, opened=True), "so far ") == [Reasoning("so far ")]


def test_the_mark_of_reasoning_inside_content_is_text() -> None:
    """Red when an answer about <think> loses what comes after it."""
    assert content("Models write <think> first.", ParsePlan(THINK)) == "Models write <think> first."


@pytest.mark.parametrize("name", ["json", "llama3_json", "pythonic"])
def test_bare_calls_are_calls_of_known_functions_only(name: str) -> None:
    """Red when an ordinary JSON or list answer is taken for a call, or waits for its end before it is shown."""
    plan = ParsePlan(calls=helpers.call_format_named(name), tools={"f": {}})
    for text in ('{"name": "g", "arguments": {}}', '{"city": "Rome"}', "[g(a=1)]", "[1, 2]", "{}", "[f]", '{"name": "f"'):
        assert content(text, plan) == text
    parser = Parser(plan)
    assert helpers.joined(list(parser.push('{"city": "Ro'))) == [Content('{"city": "Ro')]


def test_the_answer_ends_with_the_last_allowed_call() -> None:
    """Red when parallel_tool_calls: false lets a second call through."""
    parser = Parser(ParsePlan(calls=HERMES, most_calls=1))
    events = parser.push(CALL + CALL)
    assert [event for event in events if isinstance(event, CallStart)] == [CallStart(0, "f")]
    assert parser.ended
    assert parser.push("more") == parser.finish() == ()


def test_only_allowed_functions_are_calls_where_some_are_not() -> None:
    """Red when allowed_tools under auto does not hold."""
    assert content(CALL, ParsePlan(calls=HERMES, tools={"g": {}}, known_only=True)) == CALL


def test_control_characters_in_strings_are_escaped() -> None:
    """Red when a raw line break, which models write and JSON forbids, makes arguments that no client can parse."""
    events = helpers.parsed(ParsePlan(calls=HERMES), [CALL.replace("1", '"x\ny\t"')])
    assert json.loads(texts(events, CallArguments)) == {"a": "x\ny\t"}


@pytest.mark.parametrize("written", ['"{\\"a\\": 1}"', "null", "{}", ' {"a": 1} '])
def test_arguments_as_a_string_and_as_null(written: str) -> None:
    """Red when arguments that a model encoded twice, or left out, are not an object in the end."""
    text = f'<tool_call>{{"arguments": {written}, "name": "f"}}</tool_call>'
    events = helpers.parsed(ParsePlan(calls=HERMES), [text])
    assert events[0] == CallStart(0, "f")
    assert json.loads(texts(events, CallArguments)) in ({"a": 1}, {})


@pytest.mark.parametrize(
    "call", ["f(1)", "f(a=g())", "f(**x)", "f(a=1, a=2)", "f(a=b'')", "f(a={1: 2})", "f(a=(", "f(a=1e999)"]
)
def test_python_that_is_no_call_is_content(call: str) -> None:
    """Red when Python that JSON cannot say is turned into something else (or evaluated)."""
    plan = ParsePlan(calls=helpers.call_format_named("pythonic"), tools={"f": {}})
    assert content(f"[{call}]", plan) == f"[{call}]"


def test_values_of_tagged_arguments_follow_the_schema() -> None:
    """Red when a string that looks like a number becomes one, or a number stays a string."""
    case = helpers.golden(next(path for path in helpers.GOLDEN if path.stem == "qwen3_coder"))
    events = helpers.parsed(helpers.plan_of(case), [case["text"]])
    assert json.loads(texts(events, CallArguments)) == {"city": "12", "days": 3}


def test_formats_are_chosen_by_name_and_by_template() -> None:
    """Red when a template's own marks do not choose its format, or a wrong name is taken in silence."""
    for template, name in [
        ("... <tool_call>\n<function=example ...", "qwen3_coder"),
        ("... <tool_call></tool_call> ...", "hermes"),
        ('... <|python_tag|> ... "parameters": ', "llama3_json"),
        ("... [TOOL_CALLS] ...", "mistral"),
        ("... <|start|>assistant<|channel|> ...", "openai"),
        ("nothing", "json"),
    ]:
        found = call_format("auto", template)
        assert found is not None
        assert found.names[0] == name
    assert call_format("none", "<tool_call>") is None
    with pytest.raises(ConfigError, match="--tool-call-parser qwen9"):
        call_format("qwen9", "")
