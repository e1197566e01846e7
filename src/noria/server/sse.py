"""Server-sent events by hand: one write for all that a step made for a request, and nothing in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from noria.server.errors import error_of, error_response
from noria.types import RequestError

KEEPALIVE_S = 3.0  # something this often, while there are no tokens to send, keeps proxies from cutting the connection
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


def named_event(content: Mapping[str, Any]) -> bytes:
    """One event whose name is its `type`."""
    return f"event: {content['type']}\n".encode() + event(content)


async def watch_disconnect(receive: Receive, on_disconnect: Callable[[], None]) -> None:
    """Call `on_disconnect` when the client has gone; the request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    on_disconnect()


class EventStream:
    """A streamed answer, as a response for Starlette.

    `chunks` yields what is to be written, ready encoded. Nothing is sent before its first item or the first keep-alive, so
    that an engine's refusal is still an ordinary error response; later errors are an `error` event. `keepalive` is sent while
    there is nothing else, before the first token and between tokens; it must mean nothing to the dialect's clients. `end` is
    what closes the stream.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes],
        *,
        on_disconnect: Callable[[], None],
        keepalive: bytes = COMMENT,
        end: bytes = DONE,
    ) -> None:
        self._chunks = chunks
        self._on_disconnect = on_disconnect
        self._keepalive = keepalive
        self._end = end
        self._started = False
        self._wrote = 0.0
        self._writing = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watchers = (
            asyncio.create_task(watch_disconnect(receive, self._on_disconnect)),
            asyncio.create_task(self._keep_alive(send)),
        )
        try:
            await self._stream(scope, receive, send)
        finally:
            for watcher in watchers:
                watcher.cancel()
            await self._chunks.aclose()

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for chunk in self._chunks:
                await self._write(send, chunk)
        except RequestError as error:
            if not self._started:
                await error_response(error, scope)(scope, receive, send)
                return
            await self._write(send, b"event: error\n" + event(error_of(error, scope)))
        await self._write(send, self._end, more=False)

    async def _write(self, send: Send, data: bytes, *, more: bool = True) -> None:
        async with self._writing:
            self._wrote = asyncio.get_running_loop().time()
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _keep_alive(self, send: Send) -> None:
        """One timer a stream, not one a chunk: look again when the last write will have been long ago."""
        clock = asyncio.get_running_loop().time
        self._wrote = max(self._wrote, clock())
        while True:
            quiet = clock() - self._wrote
            if quiet >= KEEPALIVE_S:
                await self._write(send, self._keepalive)
                quiet = 0.0
            await asyncio.sleep(KEEPALIVE_S - quiet)
