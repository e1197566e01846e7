"""Structured logs, one JSON object a line: every request (`--access-log`), and slow ones with where their time went.

No line holds a prompt, an answer, a key or a query string: ids, names, counts and seconds only.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import orjson

from noria.server.exchange import Exchange
from noria.types import ConfigError

STDERR = "-"
MAX_PATH = 512  # characters of a path in a line

slow_log = logging.getLogger("noria.slow")


class AccessLog:
    """`target`: a file, "-" for stderr, None for no access log. `slow_s`: requests that took longer are told, None for none."""

    def __init__(self, target: str | None = None, slow_s: float | None = None) -> None:
        self._slow_s = slow_s
        self._handler = None if target is None else _handler(target)

    def ended(self, exchange: Exchange, method: str, path: str, client: str) -> None:
        """A request's response has been sent, or its client has gone."""
        seconds = exchange.seconds()
        slow = self._slow_s is not None and seconds >= self._slow_s
        if self._handler is None and not slow:
            return
        record = _record(exchange, method, path[:MAX_PATH], client, seconds)
        if self._handler is not None:
            self._handler.emit(_line("noria.access", record))
        if slow:
            record |= {"cache_miss": exchange.cache_miss or None, "parts": _rounded(exchange.parts())}
            slow_log.warning("slow request: %s", orjson.dumps(record).decode())

    def close(self) -> None:
        """Close the file."""
        if self._handler is not None:
            self._handler.close()


def _record(exchange: Exchange, method: str, path: str, client: str, seconds: float) -> dict[str, Any]:
    first = exchange.first_token_seconds()
    return {
        "time": round(time.time(), 3),
        "request_id": exchange.request_id,
        "key": exchange.caller.name,
        "tenant": exchange.caller.tenant,
        "client": client,
        "method": method,
        "path": path,
        "status": exchange.status,
        "aborted": exchange.aborted,
        "seconds": round(seconds, 6),
        "first_token_seconds": None if first is None else round(first, 6),
        "prompt_tokens": exchange.prompt_tokens,
        "completion_tokens": exchange.completion_tokens,
        "cached_tokens": exchange.cached_tokens,
    }


def _rounded(parts: dict[str, float]) -> dict[str, float]:
    return {name: round(seconds, 6) for name, seconds in parts.items()}


def _line(name: str, record: dict[str, Any]) -> logging.LogRecord:
    return logging.LogRecord(name, logging.INFO, "", 0, orjson.dumps(record).decode(), None, None)


def _handler(target: str) -> logging.Handler:
    """Appends lines; a file that a rotation has moved away is opened anew."""
    if target == STDERR:
        return logging.StreamHandler(sys.stderr)
    from logging.handlers import WatchedFileHandler  # loads sockets and queues, which few servers need

    try:
        return WatchedFileHandler(target)
    except OSError as error:
        raise ConfigError(f"--access-log {target}: {error.strerror}") from None
