"""/v1/messages by Anthropic's own client, live. Red if a response does not parse or an error's class changes."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from harness import RunningServer

pytestmark = pytest.mark.slow

TOOL: Any = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 6}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
HELLO: Any = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def test_whole_and_streamed_are_the_same_text(client: anthropic.Anthropic) -> None:
    options: Any = {"model": "m", "max_tokens": 12, "extra_body": {"temperature": 0}, "system": "Be brief.", "messages": HELLO}
    whole = client.messages.create(**options)
    assert whole.stop_reason in ("end_turn", "max_tokens")
    with client.messages.stream(**options) as stream:
        kinds = [event.type for event in stream if event.type not in ("text", "ping")]
        final = stream.get_final_message()
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_cached_tokens_are_counted_apart(client: anthropic.Anthropic) -> None:
    long: Any = [{"role": "user", "content": [{"type": "text", "text": "word " * 60, "cache_control": {"type": "ephemeral"}}]}]
    counted = client.messages.count_tokens(model="m", messages=long).input_tokens
    for _ in range(2):
        usage = client.messages.create(model="m", max_tokens=1, messages=long).usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
    assert usage.cache_read_input_tokens


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    options: Any = {"model": "m", "max_tokens": 12, "extra_body": {"temperature": 0}, "messages": HELLO}
    block: Any = client.messages.create(**options).content[0]
    stop = next(c for c in block.text if not c.isspace())
    made = client.messages.create(**options, stop_sequences=[stop])
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", stop)


def test_a_forced_tool_and_its_result(client: anthropic.Anthropic) -> None:
    options: Any = {"model": "m", "max_tokens": 80, "extra_body": {"temperature": 0}, "tools": [TOOL]}
    choice: Any = {"type": "tool", "name": "get_weather"}
    with client.messages.stream(messages=HELLO, tool_choice=choice, **options) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        made = stream.get_final_message()
    call: Any = made.content[-1]
    assert (made.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
    assert json.loads("".join(parts)) == call.input
    assert isinstance(call.input["city"], str)
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    turns: Any = [*HELLO, {"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(messages=turns, tool_choice={"type": "none"}, **options)
    assert after.stop_reason in ("end_turn", "max_tokens")


def test_an_answer_that_has_begun_goes_on(client: anthropic.Anthropic, server: RunningServer) -> None:
    """Red if a last message of the assistant is closed and answered, or comes back as part of the answer."""
    turns: Any = [*HELLO, {"role": "assistant", "content": "Hello, my"}]
    made: Any = client.messages.create(model="m", max_tokens=8, messages=turns, extra_body={"temperature": 0}).content
    body = {"model": "m", "max_tokens": 8, "temperature": 0, "messages": turns}
    wanted = server.ok("/v1/chat/completions", {**body, "add_generation_prompt": False, "continue_final_message": True})
    assert "".join(block.text for block in made) == wanted["choices"][0]["message"]["content"]


def test_errors_have_the_clients_classes(client: anthropic.Anthropic, server: RunningServer) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nobody", max_tokens=1, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError) as told:
        client.messages.create(model="m", max_tokens=1, messages=HELLO, extra_body={"temperature": 1.5})
    assert told.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    request = urllib.request.Request(f"{server.url}/v1/messages", method="GET")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 405
    body = json.load(refused.value)
    assert body["type"] == "error"
    assert body["request_id"].startswith("req-")


IMAGE: Any = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "image"),
        ({"messages": [{"role": "system", "content": "x"}]}, "role"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        ({"tool_choice": {"type": "sometimes"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": ["x"] * 40}, "stop_sequences"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "input_schema"),
        ({"mcp_servers": [{"url": "http://127.0.0.1"}]}, "mcp_servers"),
    ],
)
def test_what_is_not_done_is_refused_by_name(server: RunningServer, fields: Any, said: str) -> None:
    """Red if a field that asks for something is passed over."""
    body = {"model": "m", "max_tokens": 1, "messages": HELLO, **fields}
    request = urllib.request.Request(f"{server.url}/v1/messages", json.dumps(body).encode())
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 400
    assert said in json.load(refused.value)["error"]["message"]


def test_what_cannot_be_counted_is_refused_by_name_too(server: RunningServer) -> None:
    """Red when counting tells of a field of the chat endpoint, which was not sent."""
    tool = {"name": "f", "input_schema": {"type": "array"}}
    status, told = server.call("/v1/messages/count_tokens", {"model": "m", "messages": HELLO, "tools": [tool]})
    assert status == 400
    assert "tools[0].input_schema" in told["error"]["message"]
