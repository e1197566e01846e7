"""uvicorn, held by the hand: our socket, our signals, our error shape for requests that do not even parse."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from noria.server.errors import error_object
from noria.types import RequestError

KEEP_ALIVE_S = 75  # longer than the pools of common clients keep a connection, so that they close first
MAX_HEADER_BYTES = 128 << 10
GRACE_S = 2  # for connections to close


class Protocol(HttpToolsProtocol):
    """HTTP/1.1 with bounded headers and JSON errors."""

    def on_message_begin(self) -> None:
        """A new request on this connection."""
        super().on_message_begin()
        self._header_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header. Raising here makes the parser fail, which answers 400."""
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError("headers too large")
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        """The request is not HTTP that we read."""
        body = orjson.dumps(error_object(RequestError("this is not a valid HTTP/1.1 request")))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class HttpServer:
    """A uvicorn server that leaves signals to its owner."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=2048,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._listener = listener
        self._server = _Server(config)

    async def serve(self) -> None:
        """Accept and answer until `close`."""
        await self._server.serve(sockets=[self._listener])

    async def close(self, serving: asyncio.Task[None]) -> None:
        """Stop accepting, finish what is being written, end `serving`."""
        self._server.should_exit = True
        await serving


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would take SIGTERM as "stop accepting"; draining needs the port open to answer 503."""
        yield
