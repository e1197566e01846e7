"""Server-sent events by hand: one write for all that a step made for a request, and nothing in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from noria.server.errors import error_object, error_response
from noria.types import RequestError

KEEPALIVE_S = 3.0  # a comment this often while a stream waits for its first token keeps proxies from cutting it
COMMENT = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


def event(content: Any) -> bytes:
    """One `data:` event."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


async def watch_disconnect(receive: Receive, on_disconnect: Callable[[], None]) -> None:
    """Call `on_disconnect` when the client has gone; the request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    on_disconnect()


class EventStream:
    """A streamed answer, as a response for Starlette.

    `chunks` yields what is to be written, ready encoded. Nothing is sent before its first item or the first keep-alive
    comment, so that an engine's refusal is still an ordinary error response; later errors are an `error` event.
    """

    def __init__(self, chunks: AsyncGenerator[bytes], *, on_disconnect: Callable[[], None]) -> None:
        self._chunks = chunks
        self._on_disconnect = on_disconnect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(watch_disconnect(receive, self._on_disconnect))
        try:
            await self._stream(scope, receive, send)
        finally:
            watcher.cancel()
            await self._chunks.aclose()

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def write(data: bytes, *, more: bool = True) -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            first = asyncio.ensure_future(anext(self._chunks))
            while not (await asyncio.wait((first,), timeout=KEEPALIVE_S))[0]:
                await write(COMMENT)
            await write(first.result())
            async for chunk in self._chunks:
                await write(chunk)
        except RequestError as error:
            if not started:
                await error_response(error)(scope, receive, send)
                return
            await write(b"event: error\n" + event(error_object(error)))
        await write(DONE, more=False)
