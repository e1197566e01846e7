"""Grammars of enforced tool calls, judged by llguidance: they allow what the parser reads, and nothing else."""

from __future__ import annotations

import functools
import json
from typing import Any

import calls_helpers as helpers
import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from noria.text.call_formats import CALL_FORMATS, REASONING_FORMATS, CallFormat, Headed, JsonCalls, ReasoningFormat
from noria.text.call_grammar import MOST_CALLS, CallGrammar, Function, writable
from noria.text.events import CallArguments, CallStart, Content, Reasoning
from noria.text.grammar import HEADER, Vocabulary, grammar_text
from noria.text.lark import ReasoningState, joined, thinking
from noria.text.parsing import ParsePlan
from noria.text.tokenizer import Tokenizer, byte_level_bytes
from noria.types import StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "東京"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTIONS = (Function("weather", SCHEMA), Function("now"))
GOOD = {"city": "東京", "days": 3}
WRITABLE = [f for f in CALL_FORMATS if writable(f)]
THINK = REASONING_FORMATS[-1]
END = 256


@functools.cache
def vocabulary(control: tuple[str, ...] = ()) -> tuple[Tokenizer, LLTokenizer]:
    """Bytes, an end token, and control tokens; as our tokenizer and as llguidance's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: byte_level_bytes(c))
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<end>", *control)])
    tokenizer = Tokenizer(backend, token_bytes=byte_level_bytes, strip_first_space=False, eos_ids=(END,))

    class Words:
        is_tokenizer_wrapper = True
        bos_token_id = None
        eos_token_id = END
        tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]  # noqa: RUF012
        special_token_ids = sorted(tokenizer.control_ids)

        def __call__(self, text: bytes) -> list[int]:
            raise NotImplementedError

    return tokenizer, LLTokenizer(Words(), eos_token=END)  # type: ignore[arg-type]


def allows(grammar: str, ids: list[int], words: LLTokenizer) -> bool:
    """Whether the whole text is one that the grammar allows, its end included."""
    matcher = LLMatcher(words, '%llguidance {"no_forcing": true}\n' + grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def check(grammar: str, text: str, control: tuple[str, ...] = ()) -> bool:
    tokenizer, words = vocabulary(control)
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    return allows(grammar, ids, words)


def written(calls: CallFormat, *made: tuple[str, dict[str, Any]]) -> str:
    """Calls as the format writes them, by its description."""
    first = calls.notations[0]
    bodies = []
    for name, arguments in made:
        text = json.dumps(arguments, ensure_ascii=False)
        if isinstance(first, Headed):
            bodies.append(first.written.replace("NAME", name) + text + first.tail)
        else:
            assert isinstance(first, JsonCalls)
            bodies.append(f'{{"name": "{name}", "{first.arguments}": {text}}}')
    if isinstance(first, JsonCalls) and first.listed:
        middle = calls.begin + "[" + ", ".join(bodies) + "]" + calls.end
    else:
        middle = calls.between.join(calls.begin + body + calls.end for body in bodies)
    return calls.opening + middle + calls.closing


def marks(calls: CallFormat) -> tuple[str, ...]:
    """The format's marks as a vocabulary with control tokens for them would have them."""
    found = [*calls.starts, *calls.hidden, *calls.ignored]
    return tuple(dict.fromkeys(mark for mark in found if mark[0] in "<[" and " " not in mark and mark.count("<") < 2))


@pytest.mark.parametrize("special", [False, True], ids=["text", "control"])
@pytest.mark.parametrize("calls", WRITABLE, ids=lambda f: f.names[0])
def test_required_calls_are_written_as_the_parser_reads_them(calls: CallFormat, special: bool) -> None:
    """Red when a grammar and the parser do not agree on a format, with its marks as text or as control tokens."""
    control = marks(calls) if special else ()
    tokenizer, _ = vocabulary(control)
    grammar = CallGrammar(tokenizer, calls, FUNCTIONS, parallel=True).required()
    one, two = written(calls, ("weather", GOOD)), written(calls, ("weather", GOOD), ("now", {}))
    assert check(grammar, one, control)
    assert check(grammar, two, control) is not calls.single
    for wrong in ({"city": "Paris", "days": 3}, {"city": "Rome"}, {"city": "Rome", "days": "3"}):
        assert not check(grammar, written(calls, ("weather", wrong)), control)
    assert not check(grammar, written(calls, ("other", {})), control)
    assert not check(grammar, "Hello", control)
    assert not check(grammar, one + "!", control)
    tools = {function.name: function.parameters or {} for function in FUNCTIONS}
    events = helpers.parsed(ParsePlan(calls=calls, tools=tools, streams=True), two)
    assert [event.name for event in events if isinstance(event, CallStart)] == ["weather", "now"]
    assert [json.loads(e.text) for e in events if isinstance(e, CallArguments)] == [GOOD, {}]
    assert len(events) == 4


@pytest.mark.parametrize("calls", WRITABLE, ids=lambda f: f.names[0])
def test_exactly_one_call_without_parallel_calls(calls: CallFormat) -> None:
    """Red when parallel_tool_calls: false, or a named function, allows two calls."""
    grammar = CallGrammar(vocabulary()[0], calls, FUNCTIONS, parallel=False).required()
    assert check(grammar, written(calls, ("now", {})))
    assert not check(grammar, written(calls, ("now", {}), ("now", {})))


def test_the_number_of_calls_is_bounded() -> None:
    """Red when a model that repeats itself could call without an end."""
    calls = helpers.call_format_named("hermes")
    grammar = CallGrammar(vocabulary()[0], calls, FUNCTIONS, parallel=True).required()
    assert check(grammar, written(calls, *[("now", {})] * MOST_CALLS))
    assert not check(grammar, written(calls, *[("now", {})] * (MOST_CALLS + 1)))


@pytest.mark.parametrize("special", [False, True], ids=["text", "control"])
@pytest.mark.parametrize(
    ("calls", "reasoning"),
    [("hermes", THINK), ("json", THINK), ("openai", REASONING_FORMATS[0])],
    ids=["hermes", "json", "openai"],
)
def test_reasoning_may_come_first(calls: str, reasoning: ReasoningFormat, special: bool) -> None:
    """Red when a model that reasons is forced to call at once, or may put anything else before its calls."""
    found = helpers.call_format_named(calls)
    control = tuple(dict.fromkeys(m for m in ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<think>", "</think>")))
    control = control if special else ()
    tokenizer, _ = vocabulary(control)
    call = written(found, ("now", {}))
    gap = reasoning.after or "\n\n"
    thought = f"{reasoning.start}I <tool_call>?\n{reasoning.end}{gap}"

    def required(state: ReasoningState) -> str:
        before = thinking(tokenizer, reasoning, state)
        return CallGrammar(tokenizer, found, FUNCTIONS, parallel=True, thinking=before).required()

    closed = required("possible")
    assert check(closed, thought + call, control)
    assert check(closed, call, control)
    assert not check(closed, thought + thought + call, control)
    assert not check(closed, "Well. " + call, control)
    opened = required("open")
    assert check(opened, thought.removeprefix(reasoning.start) + call, control)
    assert not check(opened, call, control)
    over = required("over")
    assert check(over, call, control)
    assert not check(over, thought + call, control)
    events = helpers.parsed(ParsePlan(reasoning, found, {"now": {}}), thought + call)
    assert events == [Reasoning("I <tool_call>?"), CallStart(0, "now"), CallArguments(0, "{}")]


@pytest.mark.parametrize("special", [False, True], ids=["text", "control"])
@pytest.mark.parametrize("name", ["hermes", "mistral", "deepseek_v31", "json", "llama3_json"])
def test_strict_functions_under_auto(name: str, special: bool) -> None:
    """Red when free text is hindered, or a call in it may break a strict schema."""
    calls = helpers.call_format_named(name)
    control = marks(calls) if special else ()
    strict = (Function("weather", SCHEMA, strict=True),)
    grammar = CallGrammar(vocabulary(control)[0], calls, strict, parallel=True).free()
    call = written(calls, ("weather", GOOD)).removeprefix(calls.opening).removesuffix(calls.closing)
    assert check(grammar, "Just <b>text</b>,\n\n- a list [1] of {things}.\n", control)
    assert check(grammar, "", control)
    assert check(grammar, call, control)
    wrong = written(calls, ("weather", {"city": "Paris", "days": 1})).removeprefix(calls.opening).removesuffix(calls.closing)
    assert not check(grammar, wrong, control)
    if not calls.bare:
        assert check(grammar, f"Let me look.\n{call}", control)
        assert not check(grammar, f"Let me look.\n{wrong}", control)


def test_keywords_that_are_not_enforced_matter_only_to_strict_functions() -> None:
    """Red when an ordinary tool with an unusual schema is refused, or a strict one is not held to its word."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    calls = helpers.call_format_named("hermes")
    tokenizer, words = vocabulary()
    for strict in (False, True):
        grammar = CallGrammar(tokenizer, calls, (Function("f", schema, strict=strict),), parallel=True).required()
        assert LLMatcher(words, grammar, log_level=0).is_error() is strict


def test_texts_before_calls_stay_content() -> None:
    """Red when the parser of a strict request under auto loses what the grammar lets through."""
    calls = helpers.call_format_named("hermes")
    events = helpers.parsed(ParsePlan(calls=calls, streams=True), "Hm.\n" + written(calls, ("now", {})))
    assert events == [Content("Hm."), CallStart(0, "now"), CallArguments(0, "{}")]


@pytest.mark.parametrize("reasoning", [None, THINK], ids=["plain", "thinking"])
@pytest.mark.parametrize("special", [False, True], ids=["text", "control"])
@pytest.mark.parametrize("calls", WRITABLE, ids=lambda f: f.names[0])
def test_calls_or_a_text_of_a_schema(calls: CallFormat, special: bool, reasoning: ReasoningFormat | None) -> None:
    """Red when a schema makes calls impossible, the calls break the schema, or the parser does not tell one from the other."""
    control = marks(calls) if special else ()
    tokenizer, _ = vocabulary(control)
    words = Vocabulary(
        tuple(tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)), tuple(tokenizer.control_ids), (END,)
    )
    before = thinking(tokenizer, reasoning, "possible")
    around = CallGrammar(tokenizer, calls, FUNCTIONS, parallel=True, thinking=before).or_content()
    answer = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"], "additionalProperties": False}
    output = StructuredOutput(kind="json_schema", value=json.dumps(answer), around=around)
    grammar = grammar_text(output, words).removeprefix(HEADER)
    call, content = written(calls, ("weather", GOOD)), '{"name":"weather!"}'
    thought = "<think>One\n{2}</think>\n\n" if reasoning else ""
    assert check(grammar, thought + call, control)
    assert check(grammar, thought + content, control)
    assert check(grammar, content, control)
    for wrong in (call + content, "Hello", '{"name":7}', written(calls, ("weather", {"city": "Rome"})), "<think>Hm"):
        assert not check(grammar, wrong, control)
    plan = ParsePlan(reasoning, calls, {"weather": SCHEMA, "now": {}}, streams=not calls.bare)
    thoughts = [Reasoning("One\n{2}")] if reasoning else []
    assert helpers.parsed(plan, thought + content) == [*thoughts, Content(content)]
    assert helpers.parsed(plan, thought + call)[len(thoughts)] == CallStart(0, "weather")


OUTPUTS = [
    (StructuredOutput(kind="json_object"), '{"a":1}', "{1}"),
    (StructuredOutput(kind="json_schema", value='{"type": "integer"}'), "17", "x"),
    (StructuredOutput(kind="regex", value=r"a+\d"), "aa7", "b"),
    (StructuredOutput(kind="choice", value='["yes", "n}o"]'), "n}o", "maybe"),
    (StructuredOutput(kind="grammar", value='start: thinking\nthinking: "x" WORD\nWORD: /[a-z]+/'), "xyz", "y"),
    (StructuredOutput(kind="grammar", value='root ::= "a" [0-9]'), "a7", "b"),
    (
        StructuredOutput(
            kind="structural_tag",
            value='{"structures": [{"begin": "<f>", "schema": true, "end": "</f>"}], "triggers": ["<f>"]}',
        ),
        "Hm <f>1</f>",
        "<f>x</f>",
    ),
]


@pytest.mark.parametrize("special", [False, True], ids=["text", "control"])
@pytest.mark.parametrize(
    ("output", "right", "wrong"), OUTPUTS, ids=lambda value: value.kind if not isinstance(value, str) else ""
)
def test_every_kind_of_format_holds_behind_the_reasoning(
    output: StructuredOutput, right: str, wrong: str, special: bool
) -> None:
    """Red when a format binds the reasoning itself, does not bind what follows, or meets the names of a client's own rules."""
    control = ("<think>", "</think>") if special else ()
    tokenizer, _ = vocabulary(control)
    words = Vocabulary(
        tuple(tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)), tuple(tokenizer.control_ids), (END,)
    )

    def grammar(state: ReasoningState) -> str:
        before = thinking(tokenizer, THINK, state)
        around = "\n".join(("start: " + joined(before.reference, "content"), *before.rules))
        return grammar_text(msgspec.structs.replace(output, around=around), words).removeprefix(HEADER)

    possible, opened = grammar("possible"), grammar("open")
    for before in ("", "\n\n"):
        assert check(possible, f"<think>free {{text}}</think>{before}{right}", control)
        assert check(opened, f"free {{text}}</think>{before}{right}", control)
        assert not check(opened, f"free {{text}}</think>{before}{wrong}", control)
    assert check(possible, right, control)
    assert not check(possible, wrong, control)
    if output.kind != "structural_tag" or special:  # its free text may be anything
        assert not check(opened, right, control)


def test_what_a_format_writes_before_its_content_is_written_and_not_shown() -> None:
    """Red when a format of the text loses the head of the final channel, or a client sees it."""
    reasoning = REASONING_FORMATS[0]
    plan = ParsePlan(reasoning)
    text = f"{reasoning.start}Hm.{reasoning.end}{reasoning.after}{reasoning.content}" + '{"a":1}'
    assert helpers.parsed(plan, text) == [Reasoning("Hm."), Content('{"a":1}')]
    assert helpers.parsed(plan, reasoning.content + "Hi") == [Content("Hi")]
