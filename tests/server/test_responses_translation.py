"""Bodies of /v1/responses as chat bodies: what each field and item becomes, and which field a refusal names."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from noria.server.requests import ChatBody, parse_body
from noria.server.responses_body import LOGPROBS, ResponsesBody, chat_body, input_items
from noria.types import RequestError

SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"type": "function", "name": "weather", "parameters": SCHEMA}
HELLO: Any = {"role": "user", "content": "Hello"}


def chat(**fields: Any) -> ChatBody:
    """The chat body of a body as the server reads it; the item "msg_1" is stored."""
    body, _ = parse_body(msgspec.json.encode({"model": "m", "input": "Hello", **fields}), ResponsesBody)
    return chat_body(body, input_items(body, stored))


def stored(ident: str) -> dict[str, Any]:
    if ident != "msg_1":
        raise RequestError("not stored", param="input", status=404)
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "stored"}]}


def call(number: int = 1, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"call_{number}", "name": "weather", "arguments": "{}", **fields}


def output(value: Any, number: int = 1) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"call_{number}", "output": value}


def test_a_whole_body() -> None:
    """Red when a field is lost on the way, or gets another value: all that a chat body holds is compared."""
    made = chat(
        instructions="Be brief.",
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_logprobs=3,
        include=[LOGPROBS, "reasoning.encrypted_content"],
        tools=[{**TOOL, "description": "d", "strict": True}],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}, "verbosity": "low"},
        reasoning={"effort": "low"},
        metadata={"a": "b"},
        store=False,
        cache_salt="s",
    )
    assert made == ChatBody(
        model="m",
        messages=[{"role": "system", "content": "Be brief."}, HELLO],
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        logprobs=True,
        top_logprobs=3,
        tools=[{"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA, "strict": True}}],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        reasoning_effort="low",
        cache_salt="s",
    )


def test_the_least_body() -> None:
    """Red when a default is another than the chat endpoint's."""
    assert chat() == ChatBody(model="m", messages=[HELLO])


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", "input"),
    ({"input": 5}, "input", "input"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input", "input[0].role"),
    ({"input": [HELLO, {"role": "user"}]}, "input", "input[1].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input", "input[0].content[0]"),
    ({"input": [{"role": "user", "content": ["x"]}]}, "input", "input[0].content[0]"),
    ({"input": [{"type": "computer_call"}]}, "input", "input[0] has the type 'computer_call'"),
    ({"input": [call(call_id=None)]}, "input", "input[0].call_id"),
    ({"input": [call(name=5)]}, "input", "input[0].name"),
    ({"input": [call(arguments={})]}, "input", "input[0].arguments"),
    ({"input": [output(5)]}, "input", "input[0].output"),
    ({"input": [{"type": "item_reference"}]}, "input", "input[0].id"),
    ({"tools": [{"type": "web_search"}]}, "tools", "tools[0]"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice", "tool_choice.type"),
    ({"reasoning": {"effort": "very"}}, "reasoning", "reasoning.effort"),
    *[({"text": {"format": wrong}}, "text", "text.format") for wrong in ("json", {}, {"type": "json_schema"})],
    ({"include": ["file_search_call.results"]}, "include", "include"),
    ({"truncation": "auto"}, "truncation", "truncation"),
    ({"top_logprobs": 21}, "top_logprobs", "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
    ({"conversation": "c"}, "conversation", "conversation"),
    ({"prompt": {"id": "p"}}, "prompt", "prompt"),
    ({"max_tool_calls": 1}, "max_tool_calls", "max_tool_calls"),
]


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED)
def test_a_refusal_names_its_field(fields: dict[str, Any], param: str, said: str) -> None:
    """Red when a wrong value is taken, or the client is told of another field, or not where in it."""
    with pytest.raises(RequestError) as told:
        chat(**fields)
    assert (told.value.status, told.value.param) == (400, param)
    assert str(told.value).startswith(said)


def test_an_item_that_is_not_stored_is_the_stores_refusal() -> None:
    """Red when a reference to nothing is left out in silence."""
    with pytest.raises(RequestError) as told:
        chat(input=[{"type": "item_reference", "id": "msg_2"}])
    assert (told.value.status, told.value.param) == (404, "input")
