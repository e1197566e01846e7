"""/v1/responses by the official client against a live server. Red if an event is missing, out of order or of another shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from harness import RunningServer

pytestmark = pytest.mark.slow

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 6}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
SCHEMA: Any = {
    "type": "json_schema",
    "name": "x",
    "schema": {
        "type": "object",
        "properties": {"a": {"enum": ["é", "日本"]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_whole_and_streamed_are_the_same_text(client: openai.OpenAI) -> None:
    options: Any = {"model": "m", "input": "Say hello.", "instructions": "Be brief.", "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(**options)
    assert whole.status in ("completed", "incomplete")
    assert whole.usage is not None
    assert whole.usage.output_tokens > 0
    with client.responses.stream(**options) as stream:
        events = list(stream)
    last: Any = events[-1]
    assert last.response.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    ends = ["response.output_text.done", "response.content_part.done", "response.output_item.done", f"response.{whole.status}"]
    assert kinds[-4:] == ends
    assert set(kinds[4:-4]) == {"response.output_text.delta"}


def test_the_limit_leaves_it_incomplete(client: openai.OpenAI) -> None:
    made = client.responses.create(model="m", input="Count: 1 2 3", max_output_tokens=1, temperature=0)
    assert made.status == "incomplete"
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"


def test_stored_continued_and_forgotten(client: openai.OpenAI) -> None:
    first = client.responses.create(model="m", input="My name is Ada.", max_output_tokens=8, temperature=0, metadata={"a": "b"})
    assert client.responses.retrieve(first.id).output_text == first.output_text
    assert client.responses.retrieve(first.id).metadata == {"a": "b"}
    second = client.responses.create(model="m", input="And?", previous_response_id=first.id, max_output_tokens=8, temperature=0)
    by_hand = client.responses.create(
        model="m",
        input=[
            {"role": "user", "content": "My name is Ada."},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And?"},
        ],
        max_output_tokens=8,
        temperature=0,
        store=False,
    )
    assert second.output_text == by_hand.output_text
    assert [item.type for item in client.responses.input_items.list(second.id)] == ["message"]
    client.responses.delete(first.id)
    for gone in (first.id, by_hand.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="m", input="x", previous_response_id=first.id)


def test_a_required_call_and_its_result(client: openai.OpenAI) -> None:
    options: Any = {"model": "m", "tools": [TOOL], "max_output_tokens": 80, "temperature": 0, "parallel_tool_calls": False}
    with client.responses.stream(input="Weather in Paris?", tool_choice="required", **options) as stream:
        events = list(stream)
        made = stream.get_final_response()
    calls = [item for item in made.output if item.type == "function_call"]
    assert calls
    assert calls[0].name == "get_weather"
    assert isinstance(json.loads(calls[0].arguments)["city"], str)
    deltas = [e for e in events if e.type == "response.function_call_arguments.delta" and e.item_id == calls[0].id]
    assert "".join(e.delta for e in deltas) == calls[0].arguments
    after = client.responses.create(
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls],
        previous_response_id=made.id,
        tool_choice="none",
        **options,
    )
    assert after.output_text or after.status == "incomplete"


def test_a_schema_is_enforced(client: openai.OpenAI) -> None:
    made = client.responses.create(model="m", input="x", text={"format": SCHEMA}, max_output_tokens=60, temperature=1.5)
    assert json.loads(made.output_text)["a"] in ("é", "日本")


def test_logprobs(client: openai.OpenAI) -> None:
    made: Any = client.responses.create(
        model="m", input="x", max_output_tokens=4, temperature=0, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    entries = made.output[0].content[0].logprobs
    assert entries
    assert len(entries[0].top_logprobs) == 2


def test_in_the_background(client: openai.OpenAI) -> None:
    made = client.responses.create(model="m", input="Tell a long story.", background=True, max_output_tokens=400)
    cancelled = client.responses.cancel(made.id)
    assert cancelled.status in ("cancelled", "completed", "incomplete")
    quick = client.responses.create(model="m", input="x", background=True, max_output_tokens=2)
    for _ in range(200):
        if client.responses.retrieve(quick.id).status != "in_progress":
            break
    assert client.responses.retrieve(quick.id).status in ("completed", "incomplete")


def streamed_again(client: openai.OpenAI, ident: str, **options: Any) -> list[Any]:
    with client.responses.retrieve(ident, stream=True, **options) as stream:
        return list(stream)


def test_a_stream_is_read_again_from_any_event(client: openai.OpenAI) -> None:
    """Red when a stored stream is not replayed event by event, or `starting_after` cuts it at another place."""
    options: Any = {"model": "m", "input": "Say hello.", "max_output_tokens": 12, "temperature": 0}
    with client.responses.stream(**options) as stream:
        first = [event.to_dict() for event in stream._raw_stream]  # type: ignore[attr-defined]
    ident = first[0]["response"]["id"]
    assert [event.to_dict() for event in streamed_again(client, ident)] == first
    assert [event.to_dict() for event in streamed_again(client, ident, starting_after=3)] == first[4:]
    assert streamed_again(client, ident, starting_after=len(first)) == []


def test_a_whole_answer_is_told_as_events(client: openai.OpenAI) -> None:
    """Red when a response that was not streamed cannot be, or its events do not make up the response."""
    made = client.responses.create(model="m", input="Weather?", tools=[TOOL], tool_choice="required", max_output_tokens=80)
    events = streamed_again(client, made.id)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events][:2] == ["response.created", "response.in_progress"]
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []
    assert [e.item.to_dict() for e in events if e.type == "response.output_item.done"] == [i.to_dict() for i in made.output]
    assert events[-1].type == f"response.{made.status}"
    assert events[-1].response.to_dict() == made.to_dict()


def test_in_the_background_and_followed(client: openai.OpenAI) -> None:
    """Red when a response in the background cannot be streamed, ends with its reader, or cannot be joined while it runs."""
    options: Any = {"model": "m", "input": "Tell a story.", "background": True, "temperature": 0, "max_output_tokens": 40}
    with client.responses.create(stream=True, **options) as stream:
        first: Any = next(iter(stream))
    ident = first.response.id
    joined = streamed_again(client, ident)
    assert [event.sequence_number for event in joined] == list(range(len(joined)))
    last = joined[-1].response
    assert last.status in ("completed", "incomplete")
    text = "".join(event.delta for event in joined if event.type == "response.output_text.delta")
    assert last.output_text == text == client.responses.retrieve(ident).output_text


def test_what_is_cancelled_or_deleted_stays_so(client: openai.OpenAI) -> None:
    """Red when a cancelled response is told as completed, its followers wait for ever, or a deleted one comes back."""
    long = {"type": "string", "minLength": 1500}
    schema = {"type": "object", "properties": {"a": long}, "required": ["a"], "additionalProperties": False}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    options: Any = {"model": "m", "input": "Tell a story.", "background": True, "max_output_tokens": 1800, "text": text}
    made = client.responses.create(**options)
    with client.responses.retrieve(made.id, stream=True) as stream:
        following = iter(stream)
        next(following)
        with pytest.raises(openai.BadRequestError) as told:
            client.responses.create(model="m", input="x", previous_response_id=made.id)
        assert told.value.param == "previous_response_id"
        assert client.responses.cancel(made.id).status == "cancelled"
        end: Any = list(following)[-1]
    assert (end.type, end.response.status) == ("response.incomplete", "cancelled")
    assert client.responses.retrieve(made.id).status == "cancelled"
    gone = client.responses.create(**options)
    client.responses.delete(gone.id)
    client.responses.create(model="m", input="x", max_output_tokens=16)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(gone.id)


@pytest.mark.parametrize("query", [{"starting_after": 1}, {"stream": "true", "starting_after": "x"}])
def test_starting_after_needs_a_stream_and_a_number(client: openai.OpenAI, query: dict[str, Any]) -> None:
    """Red when `starting_after` is passed over."""
    made = client.responses.create(model="m", input="x", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError) as told:
        client.responses.retrieve(made.id, extra_query=query)
    assert told.value.param == "starting_after"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": [{"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": []}, "input"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True, "store": False}, "background"),
        ({"reasoning": {"effort": "huge"}}, "reasoning"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "chat_template_kwargs"),
        ({"extra_body": {"chat_template": "x"}}, "chat_template"),
    ],
)
def test_what_is_not_done_is_refused_by_name(client: openai.OpenAI, fields: Any, param: str) -> None:
    """Red if a field that asks for something is passed over."""
    with pytest.raises(openai.BadRequestError) as told:
        client.responses.create(**{"model": "m", "input": "x", **fields})
    assert told.value.param == param
