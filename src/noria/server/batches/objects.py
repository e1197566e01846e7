"""The objects of OpenAI's files and batches APIs, and the record of a batch from which its object is made."""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from noria.types import RequestError

DAY_S = 86_400
FILE_LIFE_S = 30 * DAY_S  # of uploads and results, where the client does not say
MIN_LIFE_S = 3600  # as OpenAI
MAX_WINDOW_S = 7 * DAY_S
WINDOW_UNITS = {"s": 1, "m": 60, "h": 3600, "d": DAY_S}

BatchStatus = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
OPEN_STATUSES: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing", "cancelling")


class FileObject(msgspec.Struct, kw_only=True):
    """An uploaded file, or a batch's results."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int  # Unix seconds, as all times here
    expires_at: int | None = None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileDeleted(msgspec.Struct, kw_only=True):
    """The answer to a deletion."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchError(msgspec.Struct, kw_only=True):
    """A fault of the input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    """What was wrong with a batch that failed."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, kw_only=True):
    """Lines of a batch. `failed` has every line with an error, also those that a cancel or the window's end left undone."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class InputDetails(msgspec.Struct, kw_only=True):
    """Of the input tokens."""

    cached_tokens: int = 0


class OutputDetails(msgspec.Struct, kw_only=True):
    """Of the output tokens."""

    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, kw_only=True):
    """Tokens of all lines."""

    input_tokens: int = 0
    input_tokens_details: InputDetails = msgspec.field(default_factory=InputDetails)
    output_tokens: int = 0
    output_tokens_details: OutputDetails = msgspec.field(default_factory=OutputDetails)
    total_tokens: int = 0


class Batch(msgspec.Struct, kw_only=True):
    """A batch as clients see it."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None = None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    usage: BatchUsage = msgspec.field(default_factory=BatchUsage)
    metadata: dict[str, str] | None = None


class FileList(msgspec.Struct, kw_only=True):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class BatchList(msgspec.Struct, kw_only=True):
    """A page of batches."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class ExpiresAfter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How long a file is kept."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=MIN_LIFE_S, le=FILE_LIFE_S)]


Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]


class BatchBody(msgspec.Struct, kw_only=True):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Meta(max_length=128)]
    endpoint: Annotated[str, Meta(max_length=128)]
    completion_window: Annotated[str, Meta(max_length=16)]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


def file_id() -> str:
    """A new file's name. It is also its name on disk, so that nothing a client says ever becomes a path."""
    return f"file-{secrets.token_hex(12)}"


def batch_id() -> str:
    """A new batch's name."""
    return f"batch_{secrets.token_hex(16)}"


def window_seconds(window: str) -> int:
    """The length of a completion window: "24h" as OpenAI; other whole numbers of s, m, h or d too. Raises RequestError."""
    match = re.fullmatch(r"([0-9]{1,6})([smhd])", window)
    seconds = int(match[1]) * WINDOW_UNITS[match[2]] if match else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise RequestError("completion_window must be like 24h, and at most 7d", param="completion_window")
    return seconds


def result_line(ident: str, custom_id: str, response: Any, error: Any) -> bytes:
    """A line of an output or error file, without its end. `response` may be `msgspec.Raw`."""
    return msgspec.json.encode({"id": ident, "custom_id": custom_id, "response": response, "error": error})
