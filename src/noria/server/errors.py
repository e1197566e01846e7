"""Errors in OpenAI's shape, {"error": {"message", "type", "param", "code"}}, and in Anthropic's under /v1/messages."""

from __future__ import annotations

import math
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Scope

from noria.server.client import Refusal
from noria.server.limits import OverLimit
from noria.types import RequestError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
RETRY_AFTER_S = 1.0  # where the engine gives no estimate


ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_object(error: RequestError) -> dict[str, Any]:
    """The body of an error response, and of an error event in a stream."""
    return {
        "error": {
            "message": str(error),
            "type": TYPES.get(error.status, "server_error"),
            "param": error.param,
            "code": error.code,
        }
    }


def anthropic_error(error: RequestError, request_id: str) -> dict[str, Any]:
    """The same in Anthropic's shape. The field that is wrong has no place of its own there."""
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = f"{error.param}: {error}" if error.param and not str(error).startswith(error.param) else str(error)
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def error_of(error: RequestError, scope: Scope) -> dict[str, Any]:
    """The error object of the dialect that the request's path belongs to."""
    if scope["path"].startswith(ANTHROPIC_PATH):
        return anthropic_error(error, scope.get("noria.request_id", ""))
    return error_object(error)


def error_response(error: RequestError, scope: Scope) -> Response:
    """An error as a response; 429 and 503 say when to try again."""
    headers = {}
    if error.status in (429, 503):
        estimate = error.retry_after if isinstance(error, Refusal | OverLimit) else None
        headers["Retry-After"] = str(math.ceil(RETRY_AFTER_S if estimate is None else estimate))
    return JSON(error_of(error, scope), status=error.status, headers=headers)


class JSON(Response):
    """A JSON response by orjson. NaN cannot appear: orjson writes null for it, and no field of ours is ever NaN."""

    media_type = "application/json"

    def __init__(self, content: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        super().__init__(orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS), status_code=status, headers=headers)
