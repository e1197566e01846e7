"""Bodies of Anthropic's and the Responses API as chat bodies, and events in their shapes: golden inputs and outputs.

Red when a translation loses, moves or invents something: the clients' end-to-end tests would only see what a model makes of it.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from noria.server import anthropic, responses_body
from noria.server.anthropic import MessagesBody
from noria.server.messages import Blocks
from noria.server.requests import ChatBody
from noria.server.responses_body import ResponsesBody, input_items
from noria.server.responses_items import Items, retold
from noria.server.responses_log import EventLog, Follower, log_of
from noria.text.events import CallArguments, CallStart, Content, Event, Reasoning
from noria.types import RequestError

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
EVENTS: list[list[Event]] = [
    [Reasoning("Hm")],
    [Reasoning("."), Content("Let me ")],
    [Content("look.")],
    [CallStart(0, "f"), CallArguments(0, '{"city": ')],
    [CallArguments(0, '"Rome"}'), CallStart(1, "g")],
]


def asked(chat: ChatBody) -> dict[str, Any]:
    """The fields of a chat body that are not at their defaults."""
    blank = msgspec.structs.asdict(ChatBody(model="m", messages=[]))
    return {key: value for key, value in msgspec.structs.asdict(chat).items() if value != blank[key]}


def from_anthropic(**fields: Any) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], **fields}
    return asked(anthropic.chat_body(msgspec.convert(body, MessagesBody)))


def from_responses(**fields: Any) -> dict[str, Any]:
    body = msgspec.convert({"model": "m", "input": "Hi", **fields}, ResponsesBody)
    stored = {"type": "message", "role": "user", "content": "earlier"}
    return asked(responses_body.chat_body(body, input_items(body, lambda ident: stored)))


HI = [{"role": "user", "content": "Hi"}]
CALL = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"messages": HI, "max_tokens": 9}),
        ({"system": "Be brief."}, {"messages": [{"role": "system", "content": "Be brief."}, *HI]}),
        (
            {"system": [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}]},
            {"messages": [{"role": "system", "content": "a\nb"}, *HI]},
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "Hm", "signature": ""},
                            {"type": "text", "text": "Look:"},
                            {"type": "tool_use", "id": "t1", "name": "f", "input": {"city": "Rome"}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "So?"},
                            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "7"}]},
                            {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
                        ],
                    },
                ]
            },
            {
                "messages": [
                    {"role": "assistant", "content": "Look:", "reasoning_content": "Hm", "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "t1", "content": "7"},
                    {"role": "tool", "tool_call_id": "t2", "content": "Error: no"},
                    {"role": "user", "content": "So?"},
                ]
            },
        ),
        (
            {
                "tools": [{"name": "f", "description": "d", "input_schema": PARAMETERS}],
                "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            },
            {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tool_choice": {"type": "tool", "name": "f"}},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"reasoning_effort": "high"}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": {}}}},
        ),
        (
            {"stop_sequences": ["x"], "temperature": 0.5, "top_p": 0.9, "top_k": 4, "cache_salt": "s"},
            {"stop": ["x"], "temperature": 0.5, "top_p": 0.9, "top_k": 4, "cache_salt": "s"},
        ),
    ],
)
def test_anthropics_bodies(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """Red when a field of Anthropic's reaches the engine as something else."""
    assert from_anthropic(**fields) == {"messages": HI, "max_tokens": 9} | expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "messages"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"thinking": {"type": "much"}}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking"),
        ({"output_config": {"color": "red"}}, "output_config"),
        ({"output_format": {"type": "xml"}}, "output_format"),
    ],
)
def test_what_is_wrong_in_anthropics_bodies_is_named(fields: dict[str, Any], param: str) -> None:
    """Red when a field that cannot be honoured is passed over, or another one is blamed."""
    with pytest.raises(RequestError) as told:
        from_anthropic(**fields)
    assert told.value.param == param


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"messages": HI}),
        ({"instructions": "Be brief."}, {"messages": [{"role": "system", "content": "Be brief."}, *HI]}),
        (
            {
                "input": [
                    {"role": "developer", "content": "d"},
                    {"type": "item_reference", "id": "msg_1"},
                    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}], "summary": []},
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look:"}]},
                    {"type": "function_call", "call_id": "t1", "name": "f", "arguments": '{"city": "Rome"}'},
                    {"type": "function_call_output", "call_id": "t1", "output": "7"},
                ]
            },
            {
                "messages": [
                    {"role": "developer", "content": "d"},
                    {"role": "user", "content": "earlier"},
                    {"role": "assistant", "content": "Look:", "reasoning_content": "Hm", "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "t1", "content": "7"},
                ]
            },
        ),
        (
            {
                "input": [
                    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]},
                    {"type": "function_call", "call_id": "t1", "name": "f", "arguments": '{"city": "Rome"}'},
                ]
            },
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm"}]},
        ),
        (
            {
                "tools": [{"type": "function", "name": "f", "description": "d", "parameters": PARAMETERS}],
                "tool_choice": {"type": "function", "name": "f"},
                "parallel_tool_calls": False,
            },
            {
                "tools": TOOLS,
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "parallel_tool_calls": False,
            },
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}},
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
                }
            },
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}},
        ),
        ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True, "top_logprobs": 0}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"max_output_tokens": 5, "temperature": 0.5, "top_p": 0.9}, {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9}),
    ],
)
def test_responses_bodies(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """Red when a field of the Responses API reaches the engine as something else."""
    assert from_responses(**fields) == {"messages": HI} | expected


@pytest.mark.parametrize("cuts", [EVENTS, [[event for step in EVENTS for event in step]]], ids=["steps", "at once"])
def test_events_as_anthropics_blocks(cuts: list[list[Event]]) -> None:
    """Red when a block begins before the last one has ended, or the deltas do not make up the whole."""
    blocks = Blocks()
    told = [one for events in cuts for one in blocks.push(events)] + list(blocks.close())
    kinds = [(one["type"].removeprefix("content_block_"), one["index"]) for one in told]
    assert [kind for kind in kinds if kind[0] != "delta"] == [(k, i) for i in range(4) for k in ("start", "stop")]
    deltas = [(one["index"], one["delta"]) for one in told if one["type"] == "content_block_delta"]
    assert "".join(d["thinking"] for i, d in deltas if d["type"] == "thinking_delta") == "Hm."
    assert "".join(d["text"] for i, d in deltas if i == 1) == "Let me look."
    assert json.loads("".join(d["partial_json"] for i, d in deltas if i == 2)) == {"city": "Rome"}
    assert [block["type"] for block in blocks.whole] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block["input"] for block in blocks.whole[2:]] == [{"city": "Rome"}, {}]
    assert [(block["name"], block["id"][:6]) for block in blocks.whole[2:]] == [("f", "toolu_"), ("g", "toolu_")]
    starts = [one["content_block"] for one in told if one["type"] == "content_block_start"]
    assert starts[2]["input"] == {}


def test_a_call_that_is_cut_off_has_no_input() -> None:
    """Red when half a JSON object is passed on, or brings the stream down."""
    blocks = Blocks()
    told = [*blocks.push([CallStart(0, "f"), CallArguments(0, '{"ci')]), *blocks.close()]
    assert blocks.whole[0]["input"] == {}
    assert told[-1] == {"type": "content_block_stop", "index": 0}


def shape(told: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(one["type"].removeprefix("response."), one["output_index"]) for one in told]


TEXT = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
CALLED = ["function_call_arguments.delta", "function_call_arguments.done"]


def item_shape(index: int, kind: str) -> list[tuple[str, int]]:
    inner = CALLED if kind == "function_call" else [name.format(kind) for name in TEXT]
    return [(name, index) for name in ("output_item.added", *inner, "output_item.done")]


def test_events_as_response_items() -> None:
    """Red when an event of an item is missing or out of order, or its deltas do not make up the item."""
    items = Items()
    told = [one for events in EVENTS for one in items.push(events)] + list(items.close())
    once = [one for i, one in enumerate(shape(told)) if i == 0 or one != shape(told)[i - 1]]
    last = [("output_item.added", 3), ("function_call_arguments.done", 3), ("output_item.done", 3)]
    kinds = ("reasoning_text", "output_text", "function_call")
    assert once == [one for i, kind in enumerate(kinds) for one in item_shape(i, kind)] + last
    assert [item["type"] for item in items.whole] == ["reasoning", "message", "function_call", "function_call"]
    for index, item in enumerate(items.whole):
        deltas = "".join(one["delta"] for one in told if one["type"].endswith("delta") and one["output_index"] == index)
        whole = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert deltas == whole
        assert item["status"] == "completed"
        assert {one["item_id"] for one in told if "item_id" in one and one["output_index"] == index} == {item["id"]}


def test_whole_items_are_told_as_streamed_ones() -> None:
    """Red when a replay of an item has other events than its stream, or another item at its end."""
    items = Items()
    list(items.push(EVENTS[0] + EVENTS[2] + EVENTS[3] + EVENTS[4][:1]))
    list(items.close())
    for index, (item, kind) in enumerate(zip(items.whole, ("reasoning_text", "output_text", "function_call"), strict=True)):
        told = list(retold(index, item))
        assert shape(told) == item_shape(index, kind)
        assert told[-1]["item"] == item
        assert told[0]["item"]["status"] == "in_progress"


def numbers(sent: bytes) -> list[int]:
    return [json.loads(line[6:])["sequence_number"] for line in sent.splitlines() if line.startswith(b"data: ")]


def test_a_log_is_followed_from_anywhere_to_its_end() -> None:
    """Red when a follower misses an event, sees one twice, waits after the end, or cannot leave."""

    async def run() -> tuple[list[int], list[int], list[int]]:
        log = EventLog()
        log.add({"type": f"t{i}"} for i in range(3))
        first, later, leaving = Follower(log), Follower(log, 1), Follower(log)

        async def read(follower: Follower) -> list[int]:
            return [number async for sent in follower.events() for number in numbers(sent)]

        tasks = [asyncio.create_task(read(follower)) for follower in (first, later, leaving)]
        await asyncio.sleep(0)
        log.add([{"type": "t3"}])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        leaving.leave()
        left = await tasks[2]
        log.add([{"type": "t4"}])
        log.end()
        return await tasks[0], await tasks[1], left

    assert asyncio.run(run()) == ([0, 1, 2, 3, 4], [2, 3, 4], [0, 1, 2, 3])


def test_a_log_of_a_response_that_was_not_streamed() -> None:
    """Red when a replay does not begin in progress and end with the response as it is."""
    items = Items()
    list(items.push([Content("Hi")]))
    list(items.close())
    response = {"id": "r", "status": "completed", "output": items.whole, "usage": {}, "completed_at": 1}

    async def run() -> bytes:
        return b"".join([sent async for sent in Follower(log_of(response)).events()])

    told = [json.loads(line[6:]) for line in asyncio.run(run()).splitlines() if line.startswith(b"data: ")]
    assert [one["type"] for one in (*told[:2], told[-1])] == [f"response.{k}" for k in ("created", "in_progress", "completed")]
    assert (told[0]["response"]["status"], told[0]["response"]["output"]) == ("in_progress", [])
    assert told[-1]["response"] == response
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
