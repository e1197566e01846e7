"""The gate in front of the application: API keys, request ids, status counts, the access log, and how much is open."""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from noria.server.context import ServerContext
from noria.server.errors import error_response
from noria.server.requests import MAX_ID_CHARACTERS
from noria.types import RequestError

OPEN_PATHS = frozenset({"/health", "/ready"})  # probes carry no key
log = logging.getLogger("noria.access")


class Gate:
    """Wraps the application: request id, API key, status counts, access log. One small object and no task a request."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context
        self._keys = tuple(key.encode() for key in context.config.api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)  # lifespan
        began = time.monotonic()
        scope["noria.request_id"] = "req-" + secrets.token_hex(12)

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                request_id = scope["noria.request_id"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode("latin-1"))]
                self._told(scope, message["status"], time.monotonic() - began)
            await send(message)

        try:
            self._admit(scope)
        except RequestError as error:
            await error_response(error)(scope, receive, tagged)
            return
        work = scope["method"] == "POST"
        self._context.open_requests += work
        try:
            await self._app(scope, receive, tagged)
        finally:
            self._context.open_requests -= work

    def _admit(self, scope: Scope) -> None:
        """Take over the client's request id and check its key. Raises RequestError."""
        key = b""
        for name, value in scope["headers"]:
            if name == b"x-request-id":
                scope["noria.request_id"] = checked_request_id(value.decode("latin-1"))
            elif name == b"authorization" and value[:7].lower() == b"bearer ":
                key = value[7:].strip()
        if self._keys and scope["path"] not in OPEN_PATHS and not _among(key, self._keys):
            message = "wrong API key" if key else "an API key is required: send Authorization: Bearer KEY"
            raise RequestError(message, status=401, code="invalid_api_key")

    def _told(self, scope: Scope, status: int, seconds: float) -> None:
        if self._context.served is not None:
            self._context.served.metrics.responded(status)
        level = logging.DEBUG if scope["path"] in OPEN_PATHS or scope["path"] == "/metrics" else logging.INFO
        if log.isEnabledFor(level):
            client = scope["client"][0] if scope["client"] else "-"
            path = scope["raw_path"].decode("latin-1")  # as it came: decoded, it could hold a line break
            log.log(level, "%s %s %s %d %.3fs %s", client, scope["method"], path, status, seconds, scope["noria.request_id"])


def checked_request_id(value: str) -> str:
    """A client's request id, if it can be echoed in a header. Raises RequestError."""
    if len(value) > MAX_ID_CHARACTERS or not value.isascii() or not value.isprintable():
        message = f"a request id may have at most {MAX_ID_CHARACTERS} printable ASCII characters"
        raise RequestError(message, param="request_id")
    return value


def _among(key: bytes, keys: Iterable[bytes]) -> bool:
    """Constant-time membership: every key is compared, each without leaving early."""
    found = False
    for accepted in keys:
        found |= hmac.compare_digest(key, accepted)
    return found
