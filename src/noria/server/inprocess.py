"""A request to our own application without a socket: the same routes, handlers and errors as over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message

from noria.server.exchange import Exchange, enter


class Answered:
    """A response: its status, headers (lower case) and whole body."""

    def __init__(self, status: int, headers: dict[bytes, bytes], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body


async def call(app: ASGIApp, path: str, body: bytes, exchange: Exchange) -> Answered:
    """POST a JSON body. Cancelling the task is what a closed connection is. Call in a task of its own: it enters `exchange`."""
    enter(exchange)
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # the client never leaves
        raise AssertionError

    status = 0
    headers: dict[bytes, bytes] = {}
    parts: list[bytes] = []

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update(message["headers"])
        else:
            parts.append(message.get("body", b""))

    await app(_scope(path, len(body), exchange.request_id), receive, send)
    return Answered(status, headers, b"".join(parts))


def _scope(path: str, length: int, request_id: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(length).encode())],
        "client": None,
        "server": None,
        "noria.request_id": request_id,
    }
