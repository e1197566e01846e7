"""The gate in front of the application: keys and their limits, request ids, status counts, logs, and how much is open.

Everything but the probes needs a key, whether a route exists or not: nothing that is added later can be forgotten here.
"""

from __future__ import annotations

import logging
import math
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from noria.server.context import ServerContext
from noria.server.errors import error_response
from noria.server.exchange import Exchange, enter
from noria.server.keys import anonymous
from noria.server.requests import MAX_ID_CHARACTERS
from noria.types import RequestError

OPEN_PATHS = frozenset({"/health", "/ready"})  # probes carry no key
QUIET_PATHS = OPEN_PATHS | {"/metrics"}
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, 86_400.0
log = logging.getLogger("noria.access")


class Gate:
    """Wraps the application. One small object and no task a request."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self.app = app
        self._context = context
        self._anonymous = anonymous()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)  # lifespan
        scope["noria.request_id"] = "req-" + secrets.token_hex(12)
        exchange = Exchange(self._anonymous, "")

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message["headers"], *self._headers(scope, exchange)]
                self._told(scope, exchange)
            await send(message)

        work = scope["method"] == "POST"
        try:
            self._admit(scope, exchange, work=work)
        except RequestError as error:
            await error_response(error, scope)(scope, receive, tagged)
            self._done(scope, exchange)
            return
        enter(exchange)
        self._context.open_requests += work
        try:
            await self.app(scope, receive, tagged)
        finally:
            self._context.open_requests -= work
            if work:
                exchange.caller.limits.leave()
            self._done(scope, exchange)

    def _admit(self, scope: Scope, exchange: Exchange, *, work: bool) -> None:
        """Take over the client's request id and deadline, check its key and the key's limits. Raises RequestError."""
        bearer, plain = b"", b""
        for name, value in scope["headers"]:
            if name == b"x-request-id":
                scope["noria.request_id"] = checked_request_id(value.decode("latin-1"))
            elif name == b"x-noria-timeout":
                exchange.deadline = exchange.began + checked_timeout(value.decode("latin-1"))
            elif name == b"authorization" and value[:7].lower() == b"bearer ":
                bearer = value[7:].strip()
            elif name == b"x-api-key":
                plain = value.strip()
        key = bearer or plain
        keys = self._context.keys
        if keys and scope["path"] not in OPEN_PATHS:
            caller = keys.find(key)
            if caller is None:
                message = "wrong API key" if key else "an API key is required: send Authorization: Bearer KEY"
                raise RequestError(message, status=401, code="invalid_api_key")
            exchange.caller = caller
        if work:
            exchange.caller.limits.admit(exchange.began)

    def _headers(self, scope: Scope, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        return [(b"x-request-id", scope["noria.request_id"].encode("latin-1")), *exchange.caller.limits.headers(exchange.began)]

    def _told(self, scope: Scope, exchange: Exchange) -> None:
        """A response begins: count it, and write the log line for people."""
        if self._context.served is not None:
            self._context.served.metrics.responded(exchange.status)
        level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
        if log.isEnabledFor(level):
            line = "%s %s %s %d %.3fs %s"
            ident, seconds = scope["noria.request_id"], exchange.seconds()
            log.log(level, line, _client(scope), scope["method"], _path(scope), exchange.status, seconds, ident)

    def _done(self, scope: Scope, exchange: Exchange) -> None:
        """A response has ended: the structured logs."""
        exchange.request_id = scope["noria.request_id"]
        self._context.access_log.ended(exchange, scope["method"], _path(scope), _client(scope))


def _client(scope: Scope) -> str:
    return str(scope["client"][0]) if scope["client"] else "-"


def _path(scope: Scope) -> str:
    """As it came, without its query: decoded, it could hold a line break."""
    path: bytes = scope["raw_path"]
    return path.decode("latin-1")


def checked_request_id(value: str) -> str:
    """A client's request id, if it can be echoed in a header. Raises RequestError."""
    if len(value) > MAX_ID_CHARACTERS or not value.isascii() or not value.isprintable():
        message = f"a request id may have at most {MAX_ID_CHARACTERS} printable ASCII characters"
        raise RequestError(message, param="request_id")
    return value


def checked_timeout(value: str) -> float:
    """Seconds that a client is willing to wait. Raises RequestError."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not MIN_TIMEOUT_S <= seconds <= MAX_TIMEOUT_S:  # NaN is no number of seconds either
        message = f"X-Noria-Timeout must be {MIN_TIMEOUT_S} to {MAX_TIMEOUT_S:g} seconds"
        raise RequestError(message, param="X-Noria-Timeout")
    return seconds
