"""Tool calls from real engines: a random model and a small one write them because a grammar makes them.

Red if a call is not what its schema says, if stream and whole differ, or if finish reason and calls contradict each other.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import RunningServer

pytest.importorskip("noria.text.grammar", reason="calls are enforced by grammars")
pytestmark = pytest.mark.slow

ROWS = {
    "type": "array",
    "minItems": 1,
    "maxItems": 2,
    "items": {
        "type": "object",
        "properties": {"note": {"enum": ['a "b" {c}', "[d]\n", "é漢🙂"]}, "open": {"type": "boolean"}},
        "required": ["note", "open"],
        "additionalProperties": False,
    },
}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


BOOK = tool("book", rows=ROWS, unit={"enum": ["x", "y"]})
STOCK = tool("stock", item={"enum": ["bolts", "nuts"]})


def body(server: RunningServer, choice: Any, *tools: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return server.chat("Book two rows.", tools=list(tools), tool_choice=choice, **{"max_tokens": 900, **fields})


def streamed(server: RunningServer, asked: dict[str, Any]) -> tuple[list[tuple[str, str]], str, str]:
    """(calls by index as (name, arguments), content, finish reason) of a stream whose pieces are in order."""
    status, events, done = server.stream("/v1/chat/completions", asked)
    assert status == 200
    assert done
    calls: list[list[str]] = []
    ids, content, reasons = set(), "", []
    for choice in (choice for event in events for choice in event["choices"]):
        content += choice["delta"].get("content") or ""
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        for piece in choice["delta"].get("tool_calls", []):
            if "id" in piece:
                assert piece["index"] == len(calls)
                assert piece["type"] == "function"
                ids.add(piece["id"])
                calls.append([piece["function"]["name"], ""])
            calls[piece["index"]][1] += piece["function"]["arguments"]
    assert len(reasons) == 1
    assert len(ids) == len(calls)
    return [(name, arguments) for name, arguments in calls], content, reasons[0]


def check_book(arguments: str) -> None:
    value = json.loads(arguments)
    assert set(value) == {"rows", "unit"}
    assert 1 <= len(value["rows"]) <= 2
    assert all(set(row) == {"note", "open"} and isinstance(row["open"], bool) for row in value["rows"])


def test_a_named_call_fits_its_schema_streamed_and_not(server: RunningServer) -> None:
    asked = body(server, {"type": "function", "function": {"name": "book"}}, BOOK, STOCK)
    choice = server.ok("/v1/chat/completions", asked)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] is None
    [call] = choice["message"]["tool_calls"]
    check_book(call["function"]["arguments"])
    calls, content, reason = streamed(server, asked)
    assert (calls, content, reason) == ([("book", call["function"]["arguments"])], "", "stop")


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_required_calls(server: RunningServer, temperature: float) -> None:
    asked = body(server, "required", STOCK, tool("now"), temperature=temperature, seed=5)
    choice = server.ok("/v1/chat/completions", asked)["choices"][0]
    whole = [(c["function"]["name"], c["function"]["arguments"]) for c in choice["message"]["tool_calls"]]
    assert choice["finish_reason"] == "tool_calls"
    assert streamed(server, asked) == (whole, "", "tool_calls")
    allowed = [("stock", {"item": "bolts"}), ("stock", {"item": "nuts"}), ("now", {})]
    assert all((name, json.loads(arguments)) in allowed for name, arguments in whole)
    one = server.ok("/v1/chat/completions", {**asked, "parallel_tool_calls": False})["choices"][0]
    assert len(one["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "book"}}])
def test_a_call_cut_short_is_not_complete(server: RunningServer, choice: Any) -> None:
    out = server.ok("/v1/chat/completions", body(server, choice, BOOK, max_tokens=2))
    assert out["choices"][0]["finish_reason"] == "length"


def test_a_history_of_calls_is_the_same_prompt_however_no_content_is_spelled(server: RunningServer) -> None:
    calls = [{"id": "call_1", "type": "function", "function": {"name": "stock", "arguments": '{"item": "nuts"}'}}]

    def tokens(**content: Any) -> int:
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "tool_calls": calls, **content},
            {"role": "tool", "tool_call_id": "call_1", "content": "7"},
        ]
        asked = {"model": "m", "messages": messages, "tools": [STOCK], "max_tokens": 1}
        return int(server.ok("/v1/chat/completions", asked)["usage"]["prompt_tokens"])

    assert tokens() == tokens(content=None) == tokens(content="")


@pytest.mark.parametrize("seed", range(4))
def test_calls_or_a_text_of_the_format(server: RunningServer, seed: int) -> None:
    """Red when a format of the text under auto is not held, shuts calls out, or stream and whole differ."""
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["stock", "é"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "count"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    options = {"response_format": wanted, "temperature": 1.0, "seed": seed, "parallel_tool_calls": False}
    asked = body(server, "auto", STOCK, BOOK, **options)
    whole = server.ok("/v1/chat/completions", asked)["choices"][0]
    message = whole["message"]
    calls, content, reason = streamed(server, asked)
    assert reason == whole["finish_reason"]
    assert content == (message["content"] or "")
    assert calls == [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
    if calls:
        assert reason == "tool_calls"
        assert not content
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    else:
        assert reason == "stop"
        made = json.loads(content)
        assert list(made) == ["name", "count"]
        assert made["name"] in ("stock", "é")
        assert 0 <= made["count"] < 100
