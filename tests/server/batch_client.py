"""What tests of files and batches send: forms, input files, and waiting for a batch's end."""

from __future__ import annotations

import json
import secrets
from typing import Any

from harness import RunningServer, until

ENDED = ("completed", "failed", "expired", "cancelled")


def form(fields: dict[str, str], files: dict[str, tuple[str, bytes]]) -> tuple[bytes, str]:
    """(body, content type) of a multipart form."""
    boundary = secrets.token_hex(8)
    parts = [f'--{boundary}\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'.encode() for k, v in fields.items()]
    for name, (filename, data) in files.items():
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"; filename="{filename}"\r\n'
        parts.append(head.encode() + b"Content-Type: application/octet-stream\r\n\r\n" + data + b"\r\n")
    return b"".join(parts) + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def upload(server: RunningServer, data: bytes, headers: dict[str, str] | None = None, **fields: str) -> tuple[int, Any]:
    """POST /v1/files."""
    body, kind = form({"purpose": "batch", **fields}, {"file": ("in.jsonl", data)})
    return server.call("/v1/files", raw=body, headers={"Content-Type": kind, **(headers or {})})


def lines(server: RunningServer, count: int, **fields: Any) -> list[dict[str, Any]]:
    """Completion requests with different prompts."""
    return [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": server.completion(f"line {i}", **fields)}
        for i in range(count)
    ]


def jsonl(items: list[Any]) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in items)


def start(server: RunningServer, items: list[Any], headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    """Upload the lines and create a batch."""
    status, file = upload(server, jsonl(items), headers)
    assert status == 200, file
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h", **fields}
    batch: dict[str, Any] = server.ok("/v1/batches", body, headers=headers)
    return batch


def wait(server: RunningServer, ident: str, seconds: float = 30, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """The batch at its end."""
    found: dict[str, Any] = {}

    def ended() -> bool:
        nonlocal found
        status, found = server.call(f"/v1/batches/{ident}", headers=headers)
        assert status == 200, found
        return found["status"] in ENDED

    until(ended, seconds)
    return found


def results(server: RunningServer, ident: str | None) -> list[dict[str, Any]]:
    """The lines of a result file; none if there is no file."""
    if ident is None:
        return []
    with server.open(f"/v1/files/{ident}/content") as response:
        assert response.status == 200
        return [json.loads(line) for line in response.read().splitlines()]
