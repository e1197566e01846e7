"""Streams that wait and bodies that do not come, with a clock that is quicker than a person."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import Request

from noria.server import intake, sse
from noria.server.intake import read_body
from noria.server.sse import DONE, EventStream
from noria.types import RequestError


def sent(chunks: AsyncGenerator[bytes], **options: Any) -> list[dict[str, Any]]:
    """The messages that a stream sends."""
    messages: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    asyncio.run(
        EventStream(chunks, on_disconnect=lambda: None, **options)({"type": "http", "path": "/v1/completions"}, receive, send)
    )
    return messages


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEPALIVE_S", 0.05)
    monkeypatch.setattr(intake, "BODY_IDLE_S", 0.05)


async def paced(*pauses: float, error: RequestError | None = None) -> AsyncGenerator[bytes]:
    for number, pause in enumerate(pauses):
        await asyncio.sleep(pause)
        yield b"%d" % number
    if error is not None:
        raise error


@pytest.mark.usefixtures("quick")
def test_keepalives_only_where_there_is_silence() -> None:
    """Red if a pause between tokens is silent, a busy stream gets comments, or a dialect's own bytes are not used."""
    bodies = [message.get("body") for message in sent(paced(0.0, 0.0, 0.12, 0.0), keepalive=b"ping")]
    assert bodies == [None, b"0", b"1", b"ping", b"ping", b"2", b"3", DONE]


@pytest.mark.usefixtures("quick")
def test_an_error_before_anything_was_sent_is_a_response() -> None:
    """Red if the keep-alive's task turns an early refusal into a stream."""
    messages = sent(paced(error=RequestError("full", status=429)))
    assert [message.get("status") for message in messages] == [429, None]
    late = sent(paced(0.08, error=RequestError("broken", status=500)))
    assert late[0]["status"] == 200
    assert b"event: error" in late[-2]["body"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("come", [0, 3])
def test_a_body_that_stops_coming_is_408(come: int) -> None:
    """Red if a client that sends nothing more holds its connection and its place for ever."""
    left = come

    async def receive() -> Any:
        nonlocal left
        if left:
            left -= 1
            await asyncio.sleep(0.03)  # slow, but it comes
            return {"type": "http.request", "body": b"x", "more_body": True}
        await asyncio.Event().wait()

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(RequestError) as raised:
        asyncio.run(read_body(request, 1000))
    assert raised.value.status == 408
