"""Intake: how handlers read bodies and do their plain computation, on the event loop or beside it."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import ClientDisconnect, Request

from noria.server.calls import INLINE_CHARACTERS
from noria.server.context import Served, ServerContext
from noria.server.gate import checked_request_id
from noria.server.requests import MAX_ID_CHARACTERS, MAX_SALT_CHARACTERS, PRIORITY_BOUND, parse_body
from noria.server.sse import watch_disconnect
from noria.types import RequestError

log = logging.getLogger("noria")
T = TypeVar("T")

BODY_IDLE_S = 30.0  # longest pause within a request body


class WholeBody(msgspec.Struct, kw_only=True):
    """The fields of a body whose answer comes whole, without a stream."""

    model: str
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARACTERS)] = ""
    priority: Annotated[int, Meta(ge=-PRIORITY_BOUND, lt=PRIORITY_BOUND)] = 0
    request_id: Annotated[str, Meta(max_length=MAX_ID_CHARACTERS)] | None = None


B = TypeVar("B", bound=WholeBody)
S = TypeVar("S", bound=msgspec.Struct)


class Intake:
    """Shared by the handlers of one server."""

    def __init__(self, context: ServerContext) -> None:
        self.context = context
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="intake")

    async def data(self, request: Request) -> bytes:
        """The body as it came. Raises RequestError."""
        return await read_body(request, self.context.config.max_body_bytes)

    async def decoded(self, data: bytes, kind: type[S]) -> tuple[S, list[str]]:
        """(the checked body, the names of fields that were ignored). Raises RequestError."""
        return await self.off_loop(len(data), lambda: parse_body(data, kind))

    async def parsed(self, request: Request, kind: type[S]) -> tuple[S, list[str]]:
        """`decoded` of a request's `data`."""
        return await self.decoded(await self.data(request), kind)

    async def read(self, request: Request, kind: type[B]) -> tuple[Served, B]:
        """The served model that the body asks for, and the body. Raises RequestError."""
        body, unknown = await self.parsed(request, kind)
        served = self.context.require(body.model)
        note_ignored(served, unknown)
        if body.priority and self.context.engine_config.scheduling_policy != "priority":
            raise RequestError("priority needs a server with --scheduling-policy priority", param="priority")
        name_request(request, body.request_id)
        return served, body

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Do `work` over `size` characters here if that is short, else in a thread: other streams go on meanwhile."""
        if size <= INLINE_CHARACTERS:
            return work()
        run = contextvars.copy_context().run  # the thread works for the same exchange
        return await asyncio.get_running_loop().run_in_executor(self._threads, run, work)


def note_ignored(served: Served, unknown: Sequence[str]) -> None:
    """Count and log the fields of a body that nobody knows."""
    if unknown:
        served.metrics.ignored_fields(len(unknown))
        log.debug("ignored unknown fields: %s", [name[:64] for name in unknown])


def name_request(request: Request, ident: str | None) -> None:
    """Take the id that a body gives its request; the header's goes first. Raises RequestError."""
    if ident is not None and b"x-request-id" not in dict(request.scope["headers"]):
        request.scope["noria.request_id"] = checked_request_id(ident)


async def read_body(request: Request, most: int) -> bytes:
    """The request's body. Raises RequestError 413 as soon as it is known to be longer than `most` bytes."""
    too_large = RequestError(f"the request body may have at most {most} bytes", status=413, code="body_too_large")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > most:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in body_parts(request):
        size += len(part)
        if size > most:
            raise too_large
        parts.append(part)
    return b"".join(parts)


async def body_parts(request: Request) -> AsyncGenerator[bytes]:
    """The body as it comes. Raises RequestError 408 if nothing comes for a while: nobody holds a connection for ever."""
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(BODY_IDLE_S):
                part = await anext(stream)
        except StopAsyncIteration:
            return
        except ClientDisconnect:
            raise RequestError("the connection was closed within the request body") from None
        except TimeoutError:
            message = f"nothing of the request body came for {BODY_IDLE_S:g} s"
            raise RequestError(message, status=408, code="body_timeout") from None
        yield part


async def unless_left(request: Request, abort: Callable[[], None], work: Awaitable[T]) -> T:
    """The result of `work`; `abort` is called when the client has gone meanwhile. The request's body must have been read."""
    watcher = asyncio.create_task(watch_disconnect(request.receive, abort))
    try:
        return await work
    finally:
        watcher.cancel()


def text_size(texts: Any) -> int:
    """Characters (or ids) in a text, in ids, or in a list of either: what decides between the event loop and a thread."""
    if isinstance(texts, list):
        return sum(len(item) if isinstance(item, str | list) else 1 for item in texts)
    return len(texts) if isinstance(texts, str) else 0
