"""Anthropic's /v1/messages: chat answers drawn as content blocks, whole or as typed events.

message_start, ping, ( content_block_start, content_block_delta ..., content_block_stop ) ..., message_delta, message_stop
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from noria.server.answer import Delta
from noria.server.anthropic import CountBody, MessagesBody, as_sent, chat_body
from noria.server.calls import Call, chat_ids, prompt_size
from noria.server.context import ServerContext
from noria.server.errors import JSON
from noria.server.intake import Intake, unless_left
from noria.server.openai import OpenAI
from noria.server.sse import EventStream, named_event
from noria.server.tools import tool_use
from noria.text.events import CallArguments, CallStart, Content, Event, Reasoning
from noria.types import FinishReason, RequestError

PING = named_event({"type": "ping"})


class Messages:
    """The handlers."""

    def __init__(self, context: ServerContext, openai: OpenAI, intake: Intake) -> None:
        self._context = context
        self._openai = openai
        self._intake = intake

    async def create(self, request: Request) -> Response | EventStream:
        """POST /v1/messages."""
        arrival = time.monotonic()
        body, unknown = await self._intake.parsed(request, MessagesBody)
        try:
            _, call = await self._openai.call_of(chat_body(body), unknown, arrival)
        except RequestError as error:
            raise as_sent(error, body) from None
        if body.stream:
            return EventStream(_events(call), on_disconnect=call.generation.abort, keepalive=PING, end=b"")
        return JSON(await unless_left(request, call.generation.abort, _collect(call)))

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens: of the prompt as the model would read it."""
        body, _ = await self._intake.parsed(request, CountBody)
        served = self._context.require(body.model)
        chat = chat_body(body)
        try:
            shown = tool_use(chat.tools, chat.tool_choice, chat.parallel_tool_calls).shown
        except RequestError as error:
            raise as_sent(error, body) from None
        ids = await self._intake.off_loop(
            prompt_size(chat),
            lambda: chat_ids(served, chat, chat.reasoning_effort, tools=shown, limit=None),
        )
        return JSON({"input_tokens": len(ids)})


class Blocks:
    """The content blocks of one message as its events come."""

    def __init__(self) -> None:
        self.whole: list[dict[str, Any]] = []
        self._arguments = ""  # of the open tool_use block
        self._open = False

    def push(self, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        """What the stream is told of more events."""
        for event in events:
            match event:
                case Content(text=text) if text:
                    yield from self._started({"type": "text", "text": ""})
                    self.whole[-1]["text"] += text
                    yield self._delta({"type": "text_delta", "text": text})
                case Reasoning(text=text) if text:
                    yield from self._started({"type": "thinking", "thinking": "", "signature": ""})
                    self.whole[-1]["thinking"] += text
                    yield self._delta({"type": "thinking_delta", "thinking": text})
                case CallStart(name=name):
                    yield from self.close()
                    ident = f"toolu_{secrets.token_hex(12)}"
                    yield from self._started({"type": "tool_use", "id": ident, "name": name, "input": {}})
                case CallArguments(text=text) if text:
                    self._arguments += text
                    yield self._delta({"type": "input_json_delta", "partial_json": text})

    def close(self) -> Iterator[dict[str, Any]]:
        """End the open block, if there is one."""
        if not self._open:
            return
        self._open = False
        block = self.whole[-1]
        if block["type"] == "tool_use":
            block["input"], self._arguments = _arguments(self._arguments), ""
        if block["type"] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        yield {"type": "content_block_stop", "index": len(self.whole) - 1}

    def _started(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A block of this type is open: the one that is, or a new one."""
        if self._open and self.whole[-1]["type"] == block["type"]:
            return
        yield from self.close()
        self.whole.append(block)
        self._open = True
        yield {"type": "content_block_start", "index": len(self.whole) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.whole) - 1, "delta": delta}


def _arguments(text: str) -> Any:
    """A call's arguments. An answer cut off within them has none that could be used."""
    try:
        return json.loads(text or "{}")
    except json.JSONDecodeError:
        return {}


async def _collect(call: Call) -> dict[str, Any]:
    blocks = Blocks()
    last: Delta | None = None
    async for deltas in call.generation.steps():
        for _, delta in deltas:
            list(blocks.push(delta.events))
            last = delta
    list(blocks.close())
    return _head(call) | {"content": blocks.whole, **_stop(last), "usage": _usage(call)}


async def _events(call: Call) -> AsyncGenerator[bytes]:
    blocks = Blocks()
    last: Delta | None = None
    began = False
    async for deltas in call.generation.steps():
        events: list[dict[str, Any]] = []
        if not began:
            began = True
            start: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(call)}
            events += [{"type": "message_start", "message": _head(call) | start}, {"type": "ping"}]
        for _, delta in deltas:
            events += blocks.push(delta.events)
            last = delta
        if events:
            yield b"".join(map(named_event, events))
    ends = [*blocks.close(), {"type": "message_delta", "delta": _stop(last), "usage": _usage(call)}, {"type": "message_stop"}]
    yield b"".join(map(named_event, ends))


def _head(call: Call) -> dict[str, Any]:
    ident = f"msg_{secrets.token_hex(12)}"
    return {"id": ident, "type": "message", "role": "assistant", "model": call.body.model}


def _stop(last: Delta | None) -> dict[str, Any]:
    reason, sequence = "end_turn", None
    if last is not None and last.finish_reason is FinishReason.LENGTH:
        reason = "max_tokens"
    elif last is not None and last.calls:
        reason = "tool_use"
    elif last is not None and isinstance(last.stop_reason, str):
        reason, sequence = "stop_sequence", last.stop_reason
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(call: Call) -> dict[str, Any]:
    """As Anthropic counts: cached tokens are not among `input_tokens`. How many are is known at the end."""
    generation = call.generation
    cached = generation.cached_tokens
    return {
        "input_tokens": generation.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generation.completion_tokens,
    }
