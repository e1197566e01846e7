"""Tool fields of a chat request: what is refused, what follows from a choice, and how calls look to a client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_text import write_tokenizer

from noria.server.answer import Answer, Delta, merge
from noria.server.shapes import ChatShape
from noria.server.tools import ToolUse, call_plan, reasoning_state, tool_use
from noria.text.call_formats import CALL_FORMATS, REASONING_FORMATS, CallFormat
from noria.text.loader import TextModel, load_text_model
from noria.types import EngineRequest, FinishReason, RequestError, SamplingParams, SequenceOutput, StructuredOutput

THINK = REASONING_FORMATS[-1]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def tool(name: Any = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: Any, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def format_named(name: str) -> CallFormat:
    return next(f for f in CALL_FORMATS if name in f.names)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    loaded = load_text_model(write_tokenizer(tmp_path_factory.mktemp("tools")))
    return TextModel(loaded.tokenizer, loaded.template, format_named("hermes"), THINK)


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([{"type": "retrieval"}], None, "tools"),
        ([{"type": "function"}], None, "tools"),
        ([tool("has space")], None, "tools"),
        ([tool("x" * 65)], None, "tools"),
        ([tool("")], None, "tools"),
        ([tool(7)], None, "tools"),
        ([tool("f\n")], None, "tools"),
        ([tool(), tool()], None, "tools"),
        ([tool(parameters={"type": "array"})], None, "tools"),
        ([tool(parameters=[])], None, "tools"),
        ([tool(description=1)], None, "tools"),
        ([tool(strict="yes")], None, "tools"),
        ([tool(f"f{i}") for i in range(600)], None, "tools"),
        ([], "required", "tool_choice"),
        ([], named("f"), "tool_choice"),
        ([tool()], "sometimes", "tool_choice"),
        ([tool()], {"type": "function"}, "tool_choice"),
        ([tool()], named("g"), "tool_choice"),
        ([tool()], {"type": "custom"}, "tool_choice"),
        ([tool()], allowed("auto"), "tool_choice"),
        ([tool()], allowed("never", "f"), "tool_choice"),
        ([tool()], allowed("auto", "g"), "tool_choice"),
        ([tool()], {"type": "allowed_tools"}, "tool_choice"),
    ],
)
def test_wrong_tool_fields_are_refused_by_name(tools: list[Any], choice: Any, param: str) -> None:
    """Red when a tool that cannot be called, or a choice that cannot be made, is taken in silence."""
    with pytest.raises(RequestError) as caught:
        tool_use(tools, choice)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("choice", "mode", "names", "is_named"),
    [
        (None, "auto", ["f", "g"], False),
        ("auto", "auto", ["f", "g"], False),
        ("required", "required", ["f", "g"], False),
        (named("g"), "required", ["g"], True),
        (allowed("auto", "g"), "auto", ["g"], False),
        (allowed("required", "g", "f", "g"), "required", ["g", "f"], False),
    ],
)
def test_choices(choice: Any, mode: str, names: list[str], is_named: bool) -> None:
    """Red when a choice allows another set of functions than it says."""
    use = tool_use([tool("f"), tool("g")], choice)
    assert (use.mode, [function.name for function in use.callable], use.named) == (mode, names, is_named)
    assert use.shown is not None
    assert len(use.shown) == 2  # the prompt tells of all tools, whatever may be called: it can be cached


@pytest.mark.parametrize(("tools", "choice"), [([tool()], "none"), ([], "none"), ([], "auto"), ([], None)])
def test_nothing_is_called_without_tools_and_with_none(tools: list[Any], choice: Any) -> None:
    """Red when tool_choice none still shows the tools, or is refused without them as some SDKs send it."""
    use = tool_use(tools, choice)
    assert not use.active
    assert use.shown is None


def test_what_a_choice_means_for_grammar_and_parser(text: TextModel) -> None:
    """Red when an enforced choice gets no grammar, a free one gets one, or a named one may call twice."""
    tools = [tool("f", parameters={"type": "object", "properties": {"a": {"type": "integer"}}}), tool("g")]
    auto = call_plan(text, tool_use(tools, None), reasoning="possible")
    assert auto.grammar is None
    assert auto.parse is not None
    assert (auto.parse.streams, auto.parse.most_calls, auto.parse.known_only) == (False, None, False)
    required = call_plan(text, tool_use(tools, "required"), reasoning="possible")
    assert required.grammar is not None
    assert required.parse is not None
    assert (required.parse.streams, required.parse.most_calls) == (True, None)
    one = call_plan(text, tool_use(tools, named("g")), reasoning="possible")
    assert one.grammar is not None
    assert one.parse is not None
    assert one.parse.most_calls == 1
    assert '"name\\": \\"f' not in one.grammar.value
    strict = call_plan(text, tool_use([tool("f", strict=True)], None), reasoning="possible")
    assert strict.grammar is not None
    some = call_plan(text, tool_use(tools, allowed("auto", "g")), reasoning="possible")
    assert some.parse is not None
    assert some.parse.known_only
    nothing = call_plan(text, ToolUse(), reasoning="open")
    assert nothing.parse is not None
    assert (nothing.parse.reasoning, nothing.parse.calls, nothing.parse.opened) == (THINK, None, True)


def test_a_format_that_is_not_json_is_enforced_as_plain_json(text: TextModel) -> None:
    """Red when a required call of a Python-like format goes unenforced, or its grammar writes what the parser does not read."""
    pythonic = TextModel(text.tokenizer, text.template, format_named("pythonic"))
    plan = call_plan(pythonic, tool_use([tool()], "required"), reasoning="possible")
    assert plan.grammar is not None
    assert plan.parse is not None
    assert plan.parse.calls is not None
    assert plan.parse.calls.names == ("json",)
    free = call_plan(pythonic, tool_use([tool()], "auto"), reasoning="possible")
    assert free.parse is not None
    assert free.parse.calls is not None
    assert free.parse.calls.names[0] == "pythonic"


def test_the_operator_may_leave_calls_in_the_text(text: TextModel) -> None:
    """Red when --tool-call-parser none still parses calls under auto, or cannot enforce one."""
    plain = TextModel(text.tokenizer, text.template)
    assert call_plan(plain, tool_use([tool()], "auto"), reasoning="possible").parse is None
    assert call_plan(plain, tool_use([tool()], "required"), reasoning="possible").grammar is not None


@pytest.mark.parametrize(
    ("prompt", "state"),
    [("<think>\n", "open"), ("<think>", "open"), ("<think>\n\n</think>\n\n", "over"), ("assistant\n", "possible")],
)
def test_where_the_prompt_leaves_reasoning(text: TextModel, prompt: str, state: str) -> None:
    """Red when a template's own <think> is waited for in the answer, or an empty thought counts as open."""
    ids = text.tokenizer.encode("<|im_start|>" + prompt, add_special_tokens=False, parse_special=True)
    assert reasoning_state(text, ids) == state


# --- what a client sees ------------------------------------------------------------------------------------------------------


def run(text: TextModel, written: str, use: ToolUse, *, step: int = 1, reason: FinishReason = FinishReason.STOP) -> Any:
    """(deltas, answer, shape) of a choice that writes `written`, `step` tokens at a time."""
    plan = call_plan(text, use, reasoning="possible")
    ids = text.tokenizer.encode(written, add_special_tokens=False, parse_special=False)
    request = EngineRequest(request_id=1, prompt=(1,), params=SamplingParams())
    answer = Answer(text.tokenizer, request, plan=plan.parse)
    deltas: list[Delta] = []
    for at in range(0, len(ids), step):
        last = at + step >= len(ids)
        output = SequenceOutput(
            request_id=1, index=0, tokens=tuple(ids[at : at + step]), finish_reason=reason if last else None
        )
        delta = answer.take(output)
        if delta is not None:
            deltas.append(delta)
    shape = ChatShape(text.tokenizer, top=None, token_ids=False, prompt_logprobs=False, named=use.named)
    return deltas, answer, shape


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_streamed_and_whole_answers_agree(text: TextModel, step: int, choice: str) -> None:
    """Red when a stream's pieces do not join to the whole response, an index or id repeats, or a role comes twice."""
    use = tool_use([tool("f"), tool("g")], choice)
    written = f"<think>Hm.</think>{CALL}\n{CALL}"
    deltas, answer, shape = run(text, written, use, step=step)
    whole = shape.choice(0, answer, merge(deltas))
    assert whole["finish_reason"] == "tool_calls"
    message = whole["message"]
    assert message["content"] is None
    assert message["reasoning"] == message["reasoning_content"] == "Hm."
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"a": 1}] * 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert all(set(call) == {"id", "type", "function"} for call in message["tool_calls"])

    chunks = [shape.chunk(0, answer, delta, first=i == 0) for i, delta in enumerate(deltas)]
    assert [chunk["delta"].get("role") for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert [chunk["finish_reason"] for chunk in chunks][-1] == "tool_calls"
    pieces = [piece for chunk in chunks for piece in chunk["delta"].get("tool_calls", [])]
    assert [piece["index"] for piece in pieces if "id" in piece] == [0, 1]
    for index in (0, 1):
        arguments = "".join(p["function"]["arguments"] for p in pieces if p["index"] == index)
        assert arguments == message["tool_calls"][index]["function"]["arguments"]


def test_arguments_are_streamed_when_a_call_is_enforced(text: TextModel) -> None:
    """Red when an enforced call comes in one piece at its end."""
    deltas, answer, shape = run(text, CALL, tool_use([tool("f")], "required"))
    pieces = [p for d in deltas for p in shape.chunk(0, answer, d, first=False)["delta"].get("tool_calls", [])]
    assert [p["function"]["arguments"] for p in pieces if p["function"]["arguments"]] == list('{"a": 1}')


def test_finish_reasons(text: TextModel) -> None:
    """Red when a named call ends with tool_calls, or a call that was cut short does."""
    deltas, answer, shape = run(text, CALL, tool_use([tool("f")], named("f")))
    assert shape.choice(0, answer, merge(deltas))["finish_reason"] == "stop"
    for choice in ("auto", "required"):
        deltas, answer, shape = run(text, CALL[:-20], tool_use([tool("f")], choice), reason=FinishReason.LENGTH)
        assert shape.choice(0, answer, merge(deltas))["finish_reason"] == "length"
    deltas, answer, shape = run(text, "Hello.", tool_use([tool("f")], "auto"))
    assert shape.choice(0, answer, merge(deltas))["finish_reason"] == "stop"
    assert shape.choice(0, answer, merge(deltas))["message"]["content"] == "Hello."


def test_without_parallel_calls_the_choice_ends_with_the_first(text: TextModel) -> None:
    """Red when a second call is returned, or the engine goes on for nobody."""
    deltas, answer, shape = run(text, CALL + CALL, tool_use([tool("f")], "auto", parallel=False))
    assert answer.ended
    whole = shape.choice(0, answer, merge(deltas))
    assert len(whole["message"]["tool_calls"]) == 1
    assert whole["finish_reason"] == "tool_calls"
    assert answer.completion_tokens == CALL.index("}}") + 2


@pytest.mark.parametrize("step", [1, 4, 1000])
def test_reasoning_tokens_are_counted_one_by_one(text: TextModel, step: int) -> None:
    """Red when the tokens of a step in which reasoning ends are all counted as reasoning, or as none."""
    _, answer, _ = run(text, "<think>Hm.</think>Yes.", ToolUse(), step=step)
    # The tokens are bytes. Those of the opening mark are reasoning only from its last one on: until then it may be content.
    assert answer.reasoning_tokens == len(">Hm.</think>")


def test_a_mark_that_is_a_control_token_is_seen_by_the_parser_and_not_by_the_client(tmp_path: Path) -> None:
    """Red when skip_special_tokens hides the start of a call from the parser."""
    loaded = load_text_model(write_tokenizer(tmp_path / "t"))
    calls = CallFormat(names=("x",), starts=("<|pad|>",), notations=format_named("hermes").notations)
    model = TextModel(loaded.tokenizer, loaded.template, calls)
    tokenizer = model.tokenizer
    ids = tokenizer.encode('<|pad|>{"name": "f"}', add_special_tokens=False, parse_special=True)
    plan = call_plan(model, tool_use([tool("f")], "auto"), reasoning="possible")
    answer = Answer(tokenizer, EngineRequest(request_id=1, prompt=(1,), params=SamplingParams()), plan=plan.parse)
    delta = answer.take(SequenceOutput(request_id=1, index=0, tokens=tuple(ids), finish_reason=FinishReason.STOP))
    assert delta is not None
    assert delta.calls == 1


JSON = StructuredOutput(kind="json_object")


def test_a_format_of_the_text_leaves_room_for_calls_and_reasoning(text: TextModel) -> None:
    """Red when a response_format makes calls or reasoning impossible, or lets a prompt reason twice."""
    both = call_plan(text, tool_use([tool("f")], "auto"), reasoning="possible", constrained=JSON)
    assert both.grammar is not None
    assert (both.grammar.kind, both.grammar.around.splitlines()[0]) == ("json_object", "start: thinking? (calls | content)")
    assert both.parse is not None
    assert both.parse.streams
    alone = call_plan(text, tool_use([tool("f")], "none"), reasoning="open", constrained=JSON)
    assert alone.grammar is not None
    assert alone.grammar.around.splitlines()[0] == "start: thinking content"
    assert alone.parse is not None
    assert alone.parse.opened
    over = call_plan(text, ToolUse(), reasoning="over", constrained=JSON)
    assert (over.grammar, over.parse) == (JSON, None)
    required = call_plan(text, tool_use([tool("f")], "required"), reasoning="possible", constrained=JSON)
    assert required.grammar is not None
    assert required.grammar.kind == "grammar"


def test_bare_calls_beside_a_format_are_held_until_they_are_complete(text: TextModel) -> None:
    """Red when JSON of the format that begins like a call is shown as the beginning of one."""
    bare = TextModel(text.tokenizer, text.template, format_named("pythonic"))  # written as plain JSON
    plan = call_plan(bare, tool_use([tool("f")], "auto"), reasoning="possible", constrained=JSON)
    assert plan.parse is not None
    assert plan.parse.calls is not None
    assert plan.parse.calls.names == ("json",)
    assert not plan.parse.streams


def test_calls_that_are_left_in_the_text_cannot_share_it_with_a_format(text: TextModel) -> None:
    """Red when --tool-call-parser none lets a format make calls impossible in silence."""
    plain = TextModel(text.tokenizer, text.template)
    with pytest.raises(RequestError) as caught:
        call_plan(plain, tool_use([tool("f")], "auto"), reasoning="possible", constrained=JSON)
    assert caught.value.param == "tool_choice"
