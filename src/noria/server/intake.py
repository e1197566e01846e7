"""Intake: how a handler reads a body and does its plain computation, on the event loop or beside it."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request

from noria.server.calls import INLINE_CHARACTERS
from noria.server.context import Served, ServerContext
from noria.server.gate import checked_request_id
from noria.server.openai import read_body
from noria.server.requests import MAX_ID_CHARACTERS, MAX_SALT_CHARACTERS, PRIORITY_BOUND, parse_body
from noria.server.sse import watch_disconnect
from noria.types import RequestError

log = logging.getLogger("noria")
T = TypeVar("T")


class WholeBody(msgspec.Struct, kw_only=True):
    """The fields that every body has which is read here."""

    model: str
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARACTERS)] = ""
    priority: Annotated[int, Meta(ge=-PRIORITY_BOUND, lt=PRIORITY_BOUND)] = 0
    request_id: Annotated[str, Meta(max_length=MAX_ID_CHARACTERS)] | None = None


B = TypeVar("B", bound=WholeBody)


class Intake:
    """Shared by the handlers of one server that answer whole, without a stream."""

    def __init__(self, context: ServerContext) -> None:
        self.context = context
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="intake")

    async def read(self, request: Request, kind: type[B]) -> tuple[Served, B]:
        """The served model that the body asks for, and the body. Raises RequestError."""
        data = await read_body(request, self.context.config.max_body_bytes)
        body, unknown = await self.off_loop(len(data), lambda: parse_body(data, kind))
        served = self.context.require(body.model)
        if unknown:
            served.metrics.ignored_fields(len(unknown))
            log.debug("ignored unknown fields: %s", [name[:64] for name in unknown])
        if body.priority and self.context.engine_config.scheduling_policy != "priority":
            raise RequestError("priority needs a server with --scheduling-policy priority", param="priority")
        if body.request_id is not None and b"x-request-id" not in dict(request.scope["headers"]):
            request.scope["noria.request_id"] = checked_request_id(body.request_id)
        return served, body

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Do `work` over `size` characters here if that is short, else in a thread: other streams go on meanwhile."""
        if size <= INLINE_CHARACTERS:
            return work()
        run = contextvars.copy_context().run  # the thread works for the same exchange
        return await asyncio.get_running_loop().run_in_executor(self._threads, run, work)


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
