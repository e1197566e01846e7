"""Responses that can be asked for again, or continued: in memory, bounded, the least recently used forgotten first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from noria.server.responses_log import EventLog
from noria.types import RequestError

MAX_RESPONSES = 4096
MAX_BYTES = 64 << 20


@dataclass
class Stored:
    """A response, the items that it answered (those of earlier responses first), and who may see it."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    own_from: int  # items before this one are of earlier responses
    tenant: str
    size: int = 0
    log: EventLog | None = None  # the events of one that is or was streamed, or runs in the background
    abort: Callable[[], None] | None = None  # of one that runs in the background
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class ResponseStore:
    """By id. What another tenant stored does not exist."""

    def __init__(self, most: int = MAX_RESPONSES, most_bytes: int = MAX_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def put(self, stored: Stored) -> None:
        """Keep a response, or its later state. One that is too large for the store is not kept."""
        ident = stored.response["id"]
        self._drop(ident)
        stored.size = len(orjson.dumps([stored.response, stored.items])) + (stored.log.size if stored.log else 0)
        self._stored[ident] = stored
        self._bytes += stored.size
        while len(self._stored) > self._most or self._bytes > self._most_bytes:
            self._drop(next(iter(self._stored)))

    def resize(self, stored: Stored) -> None:
        """A stored response has grown. One that was deleted meanwhile stays so."""
        if self._stored.get(stored.response["id"]) is stored:
            self.put(stored)

    def get(self, ident: str, tenant: str, param: str | None = None) -> Stored:
        """RequestError 404 if there is none, or none any more."""
        stored = self._stored.get(ident)
        if stored is None or stored.tenant != tenant:
            message = "there is no stored response of that id (the oldest are forgotten)"
            raise RequestError(message, param=param, code="not_found", status=404)
        self._stored.move_to_end(ident)
        return stored

    def item(self, ident: str, tenant: str) -> dict[str, Any]:
        """An item of some stored response. RequestError 404."""
        for stored in reversed(self._stored.values()):
            if stored.tenant == tenant:
                for item in (*stored.response["output"], *stored.items):
                    if item.get("id") == ident:
                        return dict(item)
        raise RequestError("there is no stored item of that id", param="input", code="not_found", status=404)

    def delete(self, ident: str, tenant: str) -> None:
        """RequestError 404."""
        self.get(ident, tenant)
        self._drop(ident)

    def _drop(self, ident: str) -> None:
        dropped = self._stored.pop(ident, None)
        if dropped is not None:
            self._bytes -= dropped.size
