"""OpenAI's /v1/files and /v1/batches. A tenant sees its own objects only."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from noria.server.batches.objects import (
    FILE_LIFE_S,
    Batch,
    BatchBody,
    BatchList,
    FileDeleted,
    FileList,
    batch_id,
    window_seconds,
)
from noria.server.batches.service import BatchService
from noria.server.batches.store import Store
from noria.server.batches.upload import receive_file
from noria.server.context import ServerContext
from noria.server.errors import JSON
from noria.server.exchange import current_exchange
from noria.server.intake import body_parts, read_body
from noria.server.limits import OverLimit
from noria.server.requests import parse_body
from noria.types import RequestError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_OPEN_BATCHES = 100
OPEN_RETRY_S = 60.0
MAX_BODY_BYTES = 1 << 20
MAX_FILES_PAGE = 10_000  # as OpenAI
MAX_BATCHES_PAGE = 100  # as OpenAI
BATCHES_PAGE = 20


class Files:
    """The handlers of /v1/files."""

    def __init__(self, context: ServerContext, service: BatchService) -> None:
        self._context = context
        self._service = service

    async def create(self, request: Request) -> Response:
        """POST /v1/files."""
        self._context.require(None)
        store = await self._service.store(create=True)
        assert store is not None
        file = await receive_file(store, request.headers.get("content-type", ""), body_parts(request))
        await store.run(store.add_file, file, _tenant())
        return _json(file)

    async def index(self, request: Request) -> Response:
        """GET /v1/files."""
        query = _Page(request, MAX_FILES_PAGE, MAX_FILES_PAGE)
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError("order must be asc or desc", param="order")
        store = await self._service.store()
        if store is None:
            return _json(FileList(data=[]))
        page, more = await store.run(
            store.files,
            _tenant(),
            purpose=request.query_params.get("purpose"),
            after=query.after,
            limit=query.limit,
            ascending=order == "asc",
        )
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return _json(FileList(data=page, first_id=first, last_id=last, has_more=more))

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/files/{file_id}."""
        store = _found(await self._service.store(), "file")
        return _json(await store.run(store.file, request.path_params["file_id"], _tenant()))

    async def content(self, request: Request) -> Response:
        """GET /v1/files/{file_id}/content."""
        store = _found(await self._service.store(), "file")
        file = await store.run(store.file, request.path_params["file_id"], _tenant())
        headers = {"X-Content-Type-Options": "nosniff"}
        return FileResponse(
            store.content(file.id), media_type="application/octet-stream", filename=file.filename, headers=headers
        )

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/files/{file_id}."""
        store = _found(await self._service.store(), "file")
        ident = request.path_params["file_id"]
        await store.run(store.delete_file, ident, _tenant())
        return _json(FileDeleted(id=ident))


class Batches:
    """The handlers of /v1/batches. `paths` are those of all routes: an endpoint of a batch must be one."""

    def __init__(self, context: ServerContext, service: BatchService) -> None:
        self._context = context
        self._service = service
        self.paths: frozenset[str] = frozenset()

    async def create(self, request: Request) -> Response:
        """POST /v1/batches."""
        body, _ = parse_body(await read_body(request, MAX_BODY_BYTES), BatchBody)
        served = self._context.require(None)
        endpoints = [path for path in ENDPOINTS if path in self.paths]
        if body.endpoint not in endpoints:
            raise RequestError(f"endpoint must be one of {', '.join(endpoints)}", param="endpoint")
        window = window_seconds(body.completion_window)
        caller = current_exchange().caller
        store = _found(await self._service.store(), "file")
        await store.run(store.file, body.input_file_id, caller.tenant)
        if self._service.running >= MAX_OPEN_BATCHES:
            raise OverLimit(f"{MAX_OPEN_BATCHES} batches are open already", OPEN_RETRY_S)
        now = int(time.time())
        batch = Batch(
            id=batch_id(),
            endpoint=body.endpoint,
            model=served.names[0],
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + window,
            metadata=body.metadata,
        )
        life = body.output_expires_after.seconds if body.output_expires_after is not None else FILE_LIFE_S
        stored = await store.run(store.add_batch, batch, caller.tenant, caller.name, life)
        answer = _json(batch)
        self._service.run(store, stored, caller)
        return answer

    async def index(self, request: Request) -> Response:
        """GET /v1/batches."""
        query = _Page(request, BATCHES_PAGE, MAX_BATCHES_PAGE)
        store = await self._service.store()
        if store is None:
            return _json(BatchList(data=[]))
        page, more = await store.run(store.batches, _tenant(), after=query.after, limit=query.limit)
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return _json(BatchList(data=page, first_id=first, last_id=last, has_more=more))

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/batches/{batch_id}."""
        return _json(await self._batch(request))

    async def cancel(self, request: Request) -> Response:
        """POST /v1/batches/{batch_id}/cancel."""
        store = _found(await self._service.store(), "batch")
        batch = await self._batch(request)
        if batch.status not in ("validating", "in_progress"):
            raise RequestError(f"the batch is {batch.status}: there is nothing to cancel", param="batch_id", status=409)
        await self._service.cancel(store, batch.id)
        return _json(await self._batch(request))

    async def _batch(self, request: Request) -> Batch:
        store = _found(await self._service.store(), "batch")
        stored = await store.run(store.batch, request.path_params["batch_id"], _tenant())
        return stored.batch


class _Page:
    """`after` and `limit` of a list. Raises RequestError."""

    def __init__(self, request: Request, usual: int, most: int) -> None:
        self.after = request.query_params.get("after")
        text = request.query_params.get("limit", str(usual))
        if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= most):
            raise RequestError(f"limit must be 1 to {most}", param="limit")
        self.limit = int(text)


def _tenant() -> str:
    return current_exchange().caller.tenant


def _found(store: Store | None, kind: str) -> Store:
    """Where nothing was ever kept, there is no such object."""
    if store is None:
        raise RequestError(f"there is no such {kind}", param=f"{kind}_id", code=f"{kind}_not_found", status=404)
    return store


def _json(value: Any) -> Response:
    return JSON(msgspec.to_builtins(value))
