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


def called(number: int = 1) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


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


@pytest.mark.parametrize(
    ("items", "wanted"),
    [
        ([HELLO], [HELLO]),
        ([{"type": "message", **HELLO}], [HELLO]),
        ([{"role": "developer", "content": [{"type": "input_text", "text": "x"}]}], [{"role": "developer", "content": "x"}]),
        (
            [{"role": "assistant", "content": [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]}],
            [{"role": "assistant", "content": "a\nb"}],
        ),
        ([{"type": "item_reference", "id": "msg_1"}, HELLO], [{"role": "assistant", "content": "stored"}, HELLO]),
        (
            [HELLO, call(1), call(2), output("x", 1), output([{"type": "input_text", "text": "y"}], 2)],
            [
                HELLO,
                {"role": "assistant", "content": None, "tool_calls": [called(1), called(2)]},
                {"role": "tool", "tool_call_id": "call_1", "content": "x"},
                {"role": "tool", "tool_call_id": "call_2", "content": "y"},
            ],
        ),
        (
            [{"role": "assistant", "content": "I ask."}, call()],
            [{"role": "assistant", "content": "I ask.", "tool_calls": [called()]}],
        ),
        (
            [thought("a"), thought("b"), {"role": "assistant", "content": "Hi"}],
            [{"role": "assistant", "content": "Hi", "reasoning_content": "a\nb"}],
        ),
        (
            [thought("a"), call()],
            [{"role": "assistant", "content": None, "tool_calls": [called()], "reasoning_content": "a"}],
        ),
    ],
)
def test_items(items: Any, wanted: Any) -> None:
    """Red when an item becomes another message, or calls that stand together become several."""
    assert chat(input=items).messages == wanted


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, (False, None)),
        ({"include": [LOGPROBS]}, (True, 0)),
        ({"top_logprobs": 2}, (True, 2)),
        ({"top_logprobs": 0}, (False, None)),
    ],
)
def test_logprobs(fields: Any, wanted: Any) -> None:
    """Red when logprobs that are asked for in either way do not come."""
    made = chat(**fields)
    assert (made.logprobs, made.top_logprobs) == wanted


ALLOWED: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        ("required", "required"),
        ("none", "none"),
        (
            ALLOWED,
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]},
            },
        ),
    ],
)
def test_tool_choice(sent: Any, wanted: Any) -> None:
    """Red when a choice becomes a weaker or a stronger one."""
    assert chat(tools=[TOOL], tool_choice=sent).tool_choice == wanted


@pytest.mark.parametrize("kind", ["text", "json_object"])
def test_formats_without_a_schema(kind: str) -> None:
    """Red when they need one."""
    assert chat(text={"format": {"type": kind}}).response_format == {"type": kind}


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
