"""What /v1/messages says of an answer: its events in order, and the same as a whole. The answer is made by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import Request

from noria.server.answer import Delta
from noria.server.anthropic import MessagesBody
from noria.server.calls import Call
from noria.server.messages import Blocks, Messages
from noria.text.events import CallArguments, CallStart, Content, Event, Reasoning
from noria.types import FinishReason, RequestError

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def delta(*events: Event, end: FinishReason | None = None, stop: str | None = None, calls: int = 0) -> Delta:
    told = {"finish_reason": end, "stop_reason": stop, "events": events, "calls": calls}
    return Delta(index=0, text="", tokens=(1,), logprobs=(), offsets=(), **told)


class Made:
    """In the place of a generation: one delta a step."""

    prompt_tokens, cached_tokens, completion_tokens = 20, 16, 7

    def __init__(self, deltas: tuple[Delta, ...], error: RequestError | None = None) -> None:
        self._deltas = deltas
        self._error = error

    async def steps(self) -> AsyncGenerator[list[tuple[int, Delta]]]:
        for one in self._deltas:
            yield [(0, one)]
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        pass


class Calls:
    """In the place of the intake and the OpenAI handlers: every body is answered by `made`."""

    def __init__(self, made: Any, *, stream: bool) -> None:
        self._made = made
        self._body = MessagesBody(model="m", messages=[{"role": "user", "content": "Hi"}], max_tokens=9, stream=stream)

    async def parsed(self, request: Any, kind: Any) -> Any:
        return self._body, []

    async def call_of(self, chat: Any, unknown: Any, arrival: float) -> Any:
        return None, Call(chat, [], None, 0, self._made)  # type: ignore[arg-type]


def sent(made: Made, *, stream: bool) -> bytes:
    """The body of the response."""
    parts: list[bytes] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))

    async def answer() -> None:
        scope: Any = {"type": "http", "method": "POST", "path": "/v1/messages", "headers": []}
        calls: Any = Calls(made, stream=stream)
        context: Any = None
        response = await Messages(context, calls, calls).create(Request(scope, receive))
        await response(scope, receive, send)

    asyncio.run(answer())
    return b"".join(parts)


def streamed(*deltas: Delta, error: RequestError | None = None) -> list[Any]:
    """The events, each of which must be named by its type."""
    events = []
    for written in sent(Made(deltas, error), stream=True).decode().split("\n\n")[:-1]:
        name, data = written.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def whole(*deltas: Delta) -> Any:
    return json.loads(sent(Made(deltas), stream=False))


def kinds(events: list[Any]) -> list[str]:
    """Types in order; a block's with its index, and what is in it."""
    said = []
    for event in events:
        inner = event.get("content_block") or event.get("delta") or {}
        place = f" {event['index']}" if "index" in event else ""
        said.append(f"{event['type']}{place}" + (f" {inner['type']}" if "type" in inner else ""))
    return said


EVERYTHING = (
    delta(Reasoning("Let me ")),
    delta(Reasoning("see.")),
    delta(Content("I ask.")),
    delta(CallStart(0, "weather"), CallArguments(0, '{"city":')),
    delta(CallArguments(0, ' "Łódź"}'), CallStart(1, "now"), end=STOP, calls=2),
)


def test_events_in_order() -> None:
    """Red when a block begins before the other ends, a delta stands outside its block, or an event is not told."""
    events = streamed(*EVERYTHING)
    assert kinds(events) == [
        "message_start",
        "ping",
        "content_block_start 0 thinking",
        "content_block_delta 0 thinking_delta",
        "content_block_delta 0 thinking_delta",
        "content_block_delta 0 signature_delta",
        "content_block_stop 0",
        "content_block_start 1 text",
        "content_block_delta 1 text_delta",
        "content_block_stop 1",
        "content_block_start 2 tool_use",
        "content_block_delta 2 input_json_delta",
        "content_block_delta 2 input_json_delta",
        "content_block_stop 2",
        "content_block_start 3 tool_use",
        "content_block_stop 3",
        "message_delta",
        "message_stop",
    ]
    start, end = events[0]["message"], events[-2]
    assert (start["type"], start["role"], start["model"], start["content"]) == ("message", "assistant", "m", [])
    assert (start["stop_reason"], start["stop_sequence"]) == (None, None)
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16,
        "output_tokens": 7,
    }


def test_blocks_begin_empty() -> None:
    """Red when a start carries what its deltas say again: a client that adds them up would have it twice."""
    starts = [event["content_block"] for event in streamed(*EVERYTHING) if event["type"] == "content_block_start"]
    assert starts[:2] == [{"type": "thinking", "thinking": "", "signature": ""}, {"type": "text", "text": ""}]
    assert [(start["name"], start["input"]) for start in starts[2:]] == [("weather", {}), ("now", {})]
    assert len({start["id"] for start in starts[2:]}) == 2


def test_the_whole_message_is_what_the_events_add_up_to() -> None:
    """Red when the two ways to ask for an answer give different ones."""
    message = whole(*EVERYTHING)
    blocks: list[Any] = []
    parts = ""
    for event in streamed(*EVERYTHING):
        match event["type"]:
            case "content_block_start":
                blocks.append(event["content_block"])
                parts = ""
            case "content_block_delta":
                told = dict(event["delta"])
                match told.pop("type"):
                    case "input_json_delta":
                        parts += told["partial_json"]
                    case _:
                        ((name, more),) = told.items()
                        blocks[-1][name] += more
            case "content_block_stop" if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(parts or "{}")
    for block in [*blocks, *message["content"]]:
        block.pop("id", None)
    assert message["content"] == blocks
    assert blocks[2]["input"] == {"city": "Łódź"}
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("tool_use", 7)


@pytest.mark.parametrize(
    ("last", "wanted"),
    [
        (delta(Content("a"), end=STOP), ("end_turn", None)),
        (delta(Content("a"), end=LENGTH), ("max_tokens", None)),
        (delta(Content("a"), end=STOP, stop="END"), ("stop_sequence", "END")),
        (delta(CallStart(0, "f"), end=STOP, calls=1), ("tool_use", None)),
        (delta(CallStart(0, "f"), end=LENGTH, calls=1), ("max_tokens", None)),
    ],
)
def test_why_an_answer_ended(last: Delta, wanted: Any) -> None:
    """Red when a client takes a cut answer for a whole one, or does not learn which stop sequence it was."""
    message, end = whole(last), streamed(last)[-2]["delta"]
    assert (message["stop_reason"], message["stop_sequence"]) == wanted
    assert (end["stop_reason"], end["stop_sequence"]) == wanted


def test_an_answer_without_text() -> None:
    """Red when an answer that ends at once has a block, or has no beginning."""
    assert whole(delta(end=STOP))["content"] == []
    assert kinds(streamed(delta(end=STOP))) == ["message_start", "ping", "message_delta", "message_stop"]


def test_empty_events_say_nothing() -> None:
    """Red when a block is opened by nothing."""
    blocks = Blocks()
    assert list(blocks.push([Content(""), Reasoning("")])) == []
    assert (blocks.whole, list(blocks.close())) == ([], [])


def test_a_call_that_is_cut_has_no_input() -> None:
    """Red when half of the arguments are passed on as if they were all."""
    cut = delta(CallStart(0, "f"), CallArguments(0, '{"a": 1, "b'), end=LENGTH)
    assert whole(cut)["content"][0]["input"] == {}


def test_text_goes_on_behind_a_call_in_a_block_of_its_own() -> None:
    """Red when text is added to the block before the call."""
    made = [Content("a"), CallStart(0, "f"), CallArguments(0, "{}"), Content("b"), Content("c")]
    blocks = Blocks()
    list(blocks.push(made))
    assert [block.get("text", block["type"]) for block in blocks.whole] == ["a", "tool_use", "bc"]


def test_an_error_behind_the_beginning_is_an_event() -> None:
    """Red when a broken stream ends like a whole one, or the error has OpenAI's shape."""
    events = streamed(delta(Content("a")), error=RequestError("the engine broke", status=500))
    assert kinds(events)[-2:] == ["content_block_delta 0 text_delta", "error"]
    assert events[-1]["error"] == {"type": "api_error", "message": "the engine broke"}


def test_a_fault_of_the_chat_body_is_told_of_what_was_sent() -> None:
    """Red when a client of this API is told of a field that it has not."""

    class Refusing(Calls):
        async def call_of(self, chat: Any, unknown: Any, arrival: float) -> Any:
            raise RequestError("stop has 40 strings", param="stop")

    refusing: Any = Refusing(None, stream=True)
    context: Any = None
    with pytest.raises(RequestError, match="stop_sequences has 40 strings") as told:
        asyncio.run(Messages(context, refusing, refusing).create(Request({"type": "http", "method": "POST", "headers": []})))
    assert told.value.param == "stop_sequences"
