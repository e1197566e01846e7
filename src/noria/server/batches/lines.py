"""The input file of a batch, checked line by line before anything of it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from noria.server.batches.objects import BatchError
from noria.server.batches.rows import Line
from noria.server.requests import parse_json
from noria.types import RequestError

MAX_LINES = 50_000  # as OpenAI
MAX_ERRORS = 100  # told of one file
MAX_CUSTOM_ID = 512  # characters


class Checked:
    """The lines of a file, or what is wrong with it; and the model they ask for."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.errors: list[BatchError] = []
        self.model: str | None = None


def check_lines(path: Path, endpoint: str, models: tuple[str, ...], max_line: int) -> Checked:
    """Read the whole file. `max_line` is the largest line in bytes, `models` the names that a line may ask for."""
    checked = Checked()
    seen: set[str] = set()
    with path.open("rb") as file:
        for number, start, line in _numbered(file, max_line):
            try:
                if len(checked.lines) == MAX_LINES:
                    raise RequestError(f"a batch may have at most {MAX_LINES} requests", code="too_many_requests")
                custom_id, model = _check_line(line, endpoint, models, max_line, seen)
            except RequestError as error:
                code = error.code or "invalid_line"
                checked.errors.append(BatchError(code=code, message=str(error), line=number, param=error.param))
                if len(checked.errors) == MAX_ERRORS or code == "too_many_requests":
                    break
                continue
            checked.model = checked.model or model
            checked.lines.append(Line(number, custom_id, start, len(line)))
    if not checked.lines and not checked.errors:
        checked.errors.append(BatchError(code="empty_file", message="the input file has no requests"))
    return checked


def _numbered(file: BinaryIO, max_line: int) -> Iterator[tuple[int, int, bytes]]:
    """(number, offset, line) of every line that is not blank; a line over the limit ends it, one byte too long."""
    start = number = 0
    while line := file.readline(max_line + 2):
        number += 1
        if line.strip():
            yield number, start, line
        if len(line) > max_line and not line.endswith(b"\n"):
            return
        start += len(line)


def _check_line(line: bytes, endpoint: str, models: tuple[str, ...], max_line: int, seen: set[str]) -> tuple[str, str]:
    """(custom_id, model) of one line. Raises RequestError."""
    if len(line.rstrip(b"\r\n")) > max_line:
        raise RequestError(f"a line may have at most {max_line} bytes", code="line_too_long")
    item = parse_json(line)
    if not isinstance(item, dict):
        raise RequestError("a line must be an object with custom_id, method, url and body", code="invalid_json_line")
    custom_id = item.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        raise RequestError(f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters", param="custom_id")
    if custom_id in seen:
        raise RequestError("custom_id must be different in every line", param="custom_id", code="duplicate_custom_id")
    seen.add(custom_id)
    if item.get("method") != "POST":
        raise RequestError("method must be POST", param="method", code="invalid_method")
    if item.get("url") != endpoint:
        raise RequestError(f"url must be the batch's endpoint, {endpoint}", param="url", code="invalid_url")
    return custom_id, _check_body(item.get("body"), models)


def _check_body(body: Any, models: tuple[str, ...]) -> str:
    """The model. What else is wrong in a body is that line's error when it runs, as over HTTP."""
    if not isinstance(body, dict):
        raise RequestError("body must be an object", param="body")
    model = body.get("model")
    if model not in models:
        raise RequestError(f"body.model must be one of {', '.join(models)}", param="body.model", code="model_not_found")
    if body.get("stream"):
        raise RequestError("a batch cannot stream; leave stream out", param="body.stream")
    return str(model)
