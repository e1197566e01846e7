"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math
from typing import Any

import orjson
from starlette.responses import Response

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


def error_response(error: RequestError) -> Response:
    """An error as a response; 429 and 503 say when to try again."""
    headers = {}
    if error.status in (429, 503):
        estimate = error.retry_after if isinstance(error, Refusal | OverLimit) else None
        headers["Retry-After"] = str(math.ceil(RETRY_AFTER_S if estimate is None else estimate))
    return JSON(error_object(error), status=error.status, headers=headers)


class JSON(Response):
    """A JSON response by orjson. NaN cannot appear: orjson writes null for it, and no field of ours is ever NaN."""

    media_type = "application/json"

    def __init__(self, content: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        super().__init__(orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS), status_code=status, headers=headers)
