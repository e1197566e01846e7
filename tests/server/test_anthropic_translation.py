"""Anthropic's bodies as chat bodies: what each field and block becomes, and which field a refusal names."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from noria.server.anthropic import CountBody, MessagesBody, as_sent, chat_body
from noria.server.requests import ChatBody, parse_body
from noria.server.tools import tool_use
from noria.text.stops import check_stops
from noria.types import RequestError

HELLO: Any = {"role": "user", "content": "Hello"}
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"name": "weather", "input_schema": SCHEMA}
CALL: Any = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Łódź"}}


def body_of(**fields: Any) -> MessagesBody:
    """The body as the server reads it."""
    sent = {"model": "m", "max_tokens": 5, "messages": [HELLO], **fields}
    return parse_body(msgspec.json.encode(sent), MessagesBody)[0]


def chat(**fields: Any) -> ChatBody:
    return chat_body(body_of(**fields))


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def result(content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **fields}


def tool_message(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "toolu_1", "content": content}


def test_a_whole_body() -> None:
    """Red when a field is lost on the way, or gets another value: all that a chat body holds is compared."""
    made = chat(
        system=[text("Be brief.", cache_control={"type": "ephemeral"}), text("Be kind.")],
        messages=[HELLO],
        tools=[TOOL],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        stream=True,
        cache_salt="s",
        metadata={"user_id": "u"},
        service_tier="standard_only",
    )
    assert made == ChatBody(
        model="m",
        messages=[{"role": "system", "content": "Be brief.\nBe kind."}, HELLO],
        max_tokens=5,
        stop=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        tools=[{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning_effort="high",
        cache_salt="s",
    )


def test_the_least_body() -> None:
    """Red when a default is another than the chat endpoint's."""
    assert chat() == ChatBody(model="m", messages=[HELLO], max_tokens=5)


def test_a_body_to_count_has_the_prompt_alone() -> None:
    """Red when what is counted is another prompt than what is answered."""
    fields = {"model": "m", "messages": [HELLO], "system": "Be brief.", "tools": [TOOL], "thinking": {"type": "disabled"}}
    counted = chat_body(msgspec.convert(fields, CountBody))
    answered = chat(system="Be brief.", tools=[TOOL], thinking={"type": "disabled"})
    assert msgspec.structs.replace(answered, max_tokens=None) == counted


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        (user(text("a"), text("b")), [{"role": "user", "content": "a\nb"}]),
        (user(result("sunny")), [tool_message("sunny")]),
        (user(result([text("sunny"), text("warm")])), [tool_message("sunny\nwarm")]),
        (user(result(None)), [tool_message("")]),
        (user({"type": "tool_result", "tool_use_id": "toolu_1"}), [tool_message("")]),
        (user(result("no such city", is_error=True)), [tool_message("Error: no such city")]),
        (user(result("sunny", is_error=False)), [tool_message("sunny")]),
        (user(text("And now?"), result("sunny")), [tool_message("sunny"), {"role": "user", "content": "And now?"}]),
        (user(result("1"), result("2")), [tool_message("1"), tool_message("2")]),
    ],
)
def test_blocks_of_the_user(sent: Any, wanted: Any) -> None:
    """Red when a result stands behind the user's text, an error looks like a result, or a text is lost."""
    assert chat(messages=[sent]).messages == wanted


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        ({"role": "assistant", "content": "Hi"}, {"content": "Hi"}),
        (assistant(text("a"), text("b")), {"content": "a\nb"}),
        (assistant(), {"content": ""}),
        (
            assistant({"type": "thinking", "thinking": "Hm.", "signature": "x"}, text("Hi")),
            {"content": "Hi", "reasoning_content": "Hm."},
        ),
    ],
)
def test_blocks_of_the_assistant(sent: Any, wanted: Any) -> None:
    """Red when thinking becomes part of the text, or is lost."""
    assert chat(messages=[HELLO, sent, HELLO]).messages[1] == {"role": "assistant", **wanted}


def test_calls_and_their_results() -> None:
    """Red when a call loses its id, its arguments are not JSON, or content beside calls is "" where it must be null."""
    no_input = {"type": "tool_use", "id": "toolu_2", "name": "now"}
    made = chat(messages=[HELLO, assistant(CALL, no_input), user(result("sunny"))]).messages
    calls = made[1].pop("tool_calls")
    assert made == [HELLO, {"role": "assistant", "content": None}, tool_message("sunny")]
    assert [(call["id"], call["type"], call["function"]["name"]) for call in calls] == [
        ("toolu_1", "function", "weather"),
        ("toolu_2", "function", "now"),
    ]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "Łódź"}, {}]
    spoken = chat(messages=[HELLO, assistant(text("Let me see."), CALL), user(result("sunny"))]).messages[1]
    assert spoken["content"] == "Let me see."


@pytest.mark.parametrize("last", [{"role": "assistant", "content": "{"}, assistant(text("{"))])
def test_an_answer_that_has_begun_is_continued(last: Any) -> None:
    """Red when a last message of the assistant is closed, and answered by another of its own."""
    made = chat(messages=[HELLO, last])
    assert made.messages[-1] == {"role": "assistant", "content": "{"}
    assert (made.continue_final_message, made.add_generation_prompt) == (True, False)
    ended = chat(messages=[HELLO, last, HELLO])
    assert (ended.continue_final_message, ended.add_generation_prompt) == (False, True)


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        (TOOL, {"name": "weather", "parameters": SCHEMA}),
        ({**TOOL, "type": "custom", "description": "d"}, {"name": "weather", "parameters": SCHEMA, "description": "d"}),
        ({**TOOL, "strict": True, "cache_control": {}}, {"name": "weather", "parameters": SCHEMA, "strict": True}),
    ],
)
def test_tools(sent: Any, wanted: Any) -> None:
    """Red when a tool is another function than the client has, or its strictness is lost."""
    assert chat(tools=[sent]).tools == [{"type": "function", "function": wanted}]


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        (None, (None, True)),
        ({"type": "auto"}, ("auto", True)),
        ({"type": "any"}, ("required", True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "none"}, ("none", True)),
        ({"type": "tool", "name": "weather"}, ({"type": "function", "function": {"name": "weather"}}, True)),
    ],
)
def test_tool_choice(sent: Any, wanted: Any) -> None:
    """Red when a choice becomes a weaker or a stronger one."""
    made = chat(tools=[TOOL], tool_choice=sent)
    assert (made.tool_choice, made.parallel_tool_calls) == wanted


@pytest.mark.parametrize(
    ("thinking", "effort", "wanted"),
    [
        (None, None, None),
        ({"type": "disabled"}, None, "none"),
        ({"type": "disabled"}, "high", "none"),
        ({"type": "adaptive"}, None, None),
        ({"type": "adaptive", "display": "summarized"}, "low", "low"),
        ({"type": "enabled", "budget_tokens": 1}, None, "high"),
        ({"type": "enabled"}, "medium", "medium"),
        (None, "max", "xhigh"),
    ],
)
def test_thinking_and_effort(thinking: Any, effort: Any, wanted: Any) -> None:
    """Red when one of the two is passed over."""
    made = chat(thinking=thinking, **({} if effort is None else {"output_config": {"effort": effort}}))
    assert made.reasoning_effort == wanted


@pytest.mark.parametrize(
    "fields",
    [
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_config": {"effort": "low"}, "output_format": {"type": "json_schema", "schema": SCHEMA}},
        {"output_config": {"format": None}, "output_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
)
def test_the_format(fields: Any) -> None:
    """Red when a schema is asked for and the text stays free."""
    assert chat(**fields).response_format == {"type": "json_schema", "json_schema": {"name": "output", "schema": SCHEMA}}


IMAGE: Any = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages", "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages", "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages", "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages", "messages[0].content"),
    ({"messages": [HELLO, user()]}, "messages", "messages[1].content"),
    ({"messages": [user(IMAGE)]}, "messages", "messages[0].content[0] has the type 'image'"),
    ({"messages": [user({})]}, "messages", "messages[0].content[0] has the type 'None'"),
    ({"messages": [user({"type": "text"})]}, "messages", "messages[0].content[0].text"),
    ({"messages": [user(CALL)]}, "messages", "messages[0].content[0] has the type 'tool_use'"),
    ({"messages": [user({"type": "tool_result"})]}, "messages", "messages[0].content[0].tool_use_id"),
    *[
        ({"messages": [user(result(wrong))]}, "messages", "messages[0].content[0].content must be")
        for wrong in (0, False, {}, 5)
    ],
    ({"messages": [user(result([IMAGE]))]}, "messages", "messages[0].content[0].content[0] has the type 'image'"),
    ({"messages": [user(result("x", is_error="yes"))]}, "messages", "messages[0].content[0].is_error"),
    ({"messages": [HELLO, assistant({**CALL, "input": "{}"})]}, "messages", "messages[1].content[0].input"),
    ({"messages": [HELLO, assistant({**CALL, "id": None})]}, "messages", "messages[1].content[0].id"),
    ({"messages": [HELLO, assistant({**CALL, "name": 5})]}, "messages", "messages[1].content[0].name"),
    ({"messages": [HELLO, assistant({"type": "thinking"})]}, "messages", "messages[1].content[0].thinking"),
    ({"messages": [HELLO, assistant(result("x"))]}, "messages", "messages[1].content[0] has the type 'tool_result'"),
    ({"messages": [HELLO, assistant(CALL)]}, "messages", "messages[1].content ends in a tool_use"),
    ({"system": 5}, "system", "system"),
    ({"system": [{"type": "text"}]}, "system", "system[0].text"),
    ({"system": [text("x"), IMAGE]}, "system", "system[1] has the type 'image'"),
    ({"system": ["x"]}, "system", "system: expected"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools", "tools[0]: tools of the type 'web_search"),
    ({"tools": [TOOL, {"name": "f"}]}, "tools", "tools[1].input_schema"),
    ({"tools": [{**TOOL, "input_schema": []}]}, "tools", "tools[0].input_schema"),
    ({"tools": [{"input_schema": SCHEMA}]}, "tools", "tools[0].name"),
    *[({"tool_choice": wrong}, "tool_choice", "tool_choice.type") for wrong in ({}, {"type": "sometimes"}, {"type": "tool"})],
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice", "tool_choice.disable_parallel_tool_use"),
    *[({"thinking": wrong}, "thinking", "thinking.type") for wrong in ({}, {"type": "some"})],
    *[
        ({"thinking": {"type": "enabled", "budget_tokens": wrong}}, "thinking", "thinking.budget_tokens")
        for wrong in (0, "1", True, 1.5)
    ],
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking", "thinking.display"),
    *[({"output_config": {"effort": wrong}}, "output_config", "output_config.effort") for wrong in ("none", 5, ["low"])],
    ({"output_config": {"tone": "warm"}}, "output_config", "output_config.tone"),
    *[
        ({"output_config": {"format": wrong}}, "output_config", "output_config")
        for wrong in ({}, "json", {"type": "json_schema"})
    ],
    ({"output_format": {"type": "json_object"}}, "output_format", "output_format"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens"),
    ({"max_tokens": None}, "max_tokens", "max_tokens"),
    ({"temperature": 1.5}, "temperature", "temperature"),
    ({"top_p": -1}, "top_p", "top_p"),
    ({"top_k": -1}, "top_k", "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences", "stop_sequences"),
    ({"stop_sequences": "x"}, "stop_sequences", "stop_sequences"),
    ({"service_tier": "flex"}, "service_tier", "service_tier"),
    ({"mcp_servers": [{"url": "http://127.0.0.1"}]}, "mcp_servers", "mcp_servers"),
    ({"container": "c"}, "container", "container"),
]


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED)
def test_a_refusal_names_its_field(fields: dict[str, Any], param: str, said: str) -> None:
    """Red when a wrong value is taken, or the client is told of another field, or not where in it."""
    with pytest.raises(RequestError) as told:
        chat(**fields)
    assert (told.value.status, told.value.param) == (400, param)
    assert str(told.value).startswith(said)


def test_faults_of_the_chat_body_are_told_of_the_fields_that_were_sent() -> None:
    """Red when a client of this API is told of `stop`, `function.parameters` or `response_format`, which it never sent."""
    body = body_of(stop_sequences=["x"] * 40)
    with pytest.raises(RequestError) as told:
        check_stops(chat_body(body).stop)
    named = as_sent(told.value, body)
    assert (named.param, str(named)) == ("stop_sequences", "stop_sequences has 40 strings; at most 32 are allowed")

    body = body_of(tools=[{**TOOL, "input_schema": {"type": "array"}}])
    with pytest.raises(RequestError) as told:
        tool_use(chat_body(body).tools, None)
    named = as_sent(told.value, body)
    assert (named.param, str(named)) == ("tools", "tools[0].input_schema must be the JSON schema of an object")

    wrong = RequestError("response_format: the schema must be an object", param="response_format", code="c")
    for fields in ({"output_format": {"type": "json_schema", "schema": 5}}, {"output_config": {"format": {}}}):
        named = as_sent(wrong, body_of(**fields))
        (field,) = fields
        assert (named.param, str(named), named.code) == (field, f"{field}: the schema must be an object", "c")

    other = RequestError("there is no such model", param="model", status=404)
    assert as_sent(other, body) is other
