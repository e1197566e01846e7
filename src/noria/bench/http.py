"""Just enough HTTP/1.1 to drive a server: POST, a streamed answer, connections that are used again.

A load generator shares the machine with what it measures, so this is a protocol on the event loop's callbacks: no streams,
no buffers but the line at hand, parsed by httptools' C parser.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools

from noria.types import ConfigError, NoriaError

MAX_ERROR_BYTES = 4000  # kept of the body of an answer that is an error


class HttpError(NoriaError):
    """The server answered with another status than 200, or the connection broke."""


class Connection(asyncio.Protocol):
    """One connection: one request at a time. `on_line` gets each line of the body of a 200 answer, as it comes."""

    def __init__(self) -> None:
        self.reusable = False
        self._transport: asyncio.Transport | None = None
        self._on_line: Callable[[bytes], None] = lambda line: None
        self._answered: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it

    async def post(self, head: bytes, body: bytes, on_line: Callable[[bytes], None]) -> None:
        """Send a request and wait for the whole answer. Raises HttpError."""
        assert self._transport is not None
        self._on_line = on_line
        self._parser = httptools.HttpResponseParser(self)
        self._line = b""
        self._error = b""
        self._status = 0
        self.reusable = False
        self.started = False  # whether any byte of the answer has come
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(head + body)
        await self._answered
        if self._status != 200:
            raise HttpError(f"HTTP {self._status}: {self._error.decode(errors='replace').strip()[:300]}")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # asyncio's callbacks

    def data_received(self, data: bytes) -> None:
        self.started = True
        if self._answered is None or self._answered.done():
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:  # a line's reader refused it
            self._fail(str(error.__context__))
        except httptools.HttpParserError as error:
            self._fail(f"the answer is not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._fail(f"the connection broke: {exc}" if exc else "the server closed the connection before the end of the answer")

    def _fail(self, message: str) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(HttpError(message))

    # httptools' callbacks

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._status != 200:
            self._error = (self._error + body)[:MAX_ERROR_BYTES]
            return
        *lines, self._line = (self._line + body).split(b"\n")
        for line in lines:
            self._on_line(line)

    def on_message_complete(self) -> None:
        if self._line:
            self._on_line(self._line)
        self.reusable = self._parser.should_keep_alive()
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)


class HttpClient:
    """Connections to one server. ConfigError for a URL that is none."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"--base-url {base_url}: write http://HOST:PORT or https://HOST")
        self._host, self._port = url.hostname, url.port or (443 if url.scheme == "https" else 80)
        self._prefix = url.path.rstrip("/").removesuffix("/v1")
        self._ssl = ssl.create_default_context() if url.scheme == "https" else None
        fields = [f"Host: {url.netloc.rpartition('@')[2]}", "Content-Type: application/json", "Accept: text/event-stream"]
        if api_key:
            fields.append(f"Authorization: Bearer {api_key}")
        self._fields = "\r\n".join(fields)
        self._idle: list[Connection] = []

    async def post(self, path: str, body: bytes, on_line: Callable[[bytes], None], method: str = "POST") -> None:
        """One request; `on_line` gets the lines of the answer's body. Raises HttpError."""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._fields}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        while self._idle:
            connection = self._idle.pop()
            if not connection.reusable:
                continue
            try:
                return await self._send(connection, head, body, on_line)
            except HttpError:
                if connection.started:
                    raise
                # The server closed it while it was idle and saw nothing of the request: a new one is needed.
        await self._send(await self._connect(), head, body, on_line)

    async def get(self, path: str) -> bytes:
        """The body of a GET."""
        lines: list[bytes] = []
        await self.post(path, b"", lines.append, "GET")
        return b"\n".join(lines)

    async def _send(self, connection: Connection, head: bytes, body: bytes, on_line: Callable[[bytes], None]) -> None:
        try:
            await connection.post(head, body, on_line)
        finally:
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._ssl)
        except OSError as error:
            raise HttpError(f"cannot connect to {self._host} port {self._port}: {error.strerror or error}") from None
        return connection

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
