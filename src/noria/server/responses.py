"""OpenAI's /v1/responses: chat answers drawn as items, whole, as typed events, or in the background; kept to be continued."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from noria.server.answer import Delta
from noria.server.calls import Call
from noria.server.context import Served, ServerContext
from noria.server.dialect import chat_logprobs
from noria.server.errors import JSON, error_object
from noria.server.exchange import current_exchange
from noria.server.intake import unless_left
from noria.server.openai import OpenAI
from noria.server.responses_body import ResponsesBody, chat_body, input_items
from noria.server.responses_items import Items, Told
from noria.server.responses_store import ResponseStore, Stored
from noria.server.sse import EventStream, named_event
from noria.types import FinishReason, RequestError


class Responses:
    """The handlers."""

    def __init__(self, context: ServerContext, openai: OpenAI) -> None:
        self._context = context
        self._openai = openai
        self._store = ResponseStore()

    async def create(self, request: Request) -> Response | EventStream:
        """POST /v1/responses."""
        arrival = time.monotonic()
        body, unknown = await self._openai.read(request, ResponsesBody)
        if body.background and (body.stream or not body.store):
            raise RequestError("background needs store: true and no stream", param="background")
        tenant = current_exchange().caller.tenant
        before: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            earlier = self._store.get(body.previous_response_id, tenant, "previous_response_id")
            before = [*earlier.items, *earlier.response["output"]]
        own = input_items(body, lambda ident: self._store.item(ident, tenant))
        served, call = await self._openai.call_of(chat_body(body, [*before, *own]), unknown, arrival)
        for item in own:
            item.setdefault("id", f"msg_{secrets.token_hex(16)}")
        stored = Stored(_response(body, call), [*before, *own], len(before), tenant)
        run = _Run(served, body, call, stored, self._store if body.store else None)
        if body.background:
            return JSON(self._in_background(run))
        if body.stream:
            return EventStream(run.events(), on_disconnect=call.generation.abort, end=b"")
        return JSON(await unless_left(request, call.generation.abort, run.collect()))

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/responses/{id}."""
        if request.query_params.get("stream", "false").lower() == "true":
            raise RequestError("a stored response is not streamed again: leave stream out", param="stream")
        return JSON(self._stored(request).response)

    async def items(self, request: Request) -> Response:
        """GET /v1/responses/{id}/input_items: what the request gave, the newest first unless `order` is asc."""
        stored = self._stored(request)
        data = stored.items[stored.own_from :]
        if request.query_params.get("order", "desc") != "asc":
            data = data[::-1]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return JSON({"object": "list", "data": data, "has_more": False, **ends})

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/{id}/cancel: of one that runs in the background; one that has ended stays as it is."""
        stored = self._stored(request)
        if not stored.response["background"]:
            raise RequestError("only a response with background: true can be cancelled", param="response_id")
        if stored.abort is not None:
            stored.response["status"] = "cancelled"
            stored.abort()
        return JSON(stored.response)

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/responses/{id}."""
        stored = self._stored(request)
        if stored.abort is not None:
            stored.abort()
        ident = stored.response["id"]
        self._store.delete(ident, stored.tenant)
        return JSON({"id": ident, "object": "response", "deleted": True})

    def _stored(self, request: Request) -> Stored:
        return self._store.get(request.path_params["response_id"], current_exchange().caller.tenant)

    def _in_background(self, run: _Run) -> dict[str, Any]:
        stored = run.stored
        stored.abort = run.call.generation.abort
        self._store.put(stored)
        shown = dict(stored.response)

        async def work() -> None:
            try:
                await run.collect()
            except RequestError as error:
                run.failed(error)
            finally:
                stored.abort = stored.task = None

        stored.task = asyncio.create_task(work())
        return shown


class _Run:
    """One response on its way."""

    def __init__(self, served: Served, body: ResponsesBody, call: Call, stored: Stored, store: ResponseStore | None) -> None:
        self.call = call
        self.stored = stored
        self._served = served
        self._top = body.top_logprobs or 0
        self._store = store
        self._items = Items()
        self._last: Delta | None = None
        self._number = 0

    async def collect(self) -> dict[str, Any]:
        """Run to the end: the response object."""
        async for deltas in self.call.generation.steps():
            for _, delta in deltas:
                self._push(delta)
        self._end()
        return self.stored.response

    async def events(self) -> AsyncGenerator[bytes]:
        """The same, told as it happens."""
        began = False
        try:
            async for deltas in self.call.generation.steps():
                told: list[Told] = []
                if not began:
                    began = True
                    told += [
                        {"type": f"response.{kind}", "response": self.stored.response} for kind in ("created", "in_progress")
                    ]
                for _, delta in deltas:
                    told += self._push(delta)
                if told:
                    yield self._written(told)
        except RequestError as error:
            if not began:
                raise
            self.failed(error)
            yield self._written([{"type": "response.failed", "response": self.stored.response}])
            return
        yield self._written(self._end())

    def failed(self, error: RequestError) -> None:
        """It ended by an error, which the response tells."""
        list(self._items.close(complete=False))
        if self.stored.response["status"] != "cancelled":
            inner = error_object(error)["error"]
            self._finish("failed", error={"code": inner["code"] or "server_error", "message": inner["message"]})

    def _push(self, delta: Delta) -> list[Told]:
        self._last = delta
        logprobs: list[dict[str, Any]] = []
        if delta.logprobs:
            logprobs = chat_logprobs(self._served.text.tokenizer, delta.logprobs, self._top)["content"]
        return list(self._items.push(delta.events, logprobs))

    def _end(self) -> list[Told]:
        cut = self._last is not None and self._last.finish_reason is FinishReason.LENGTH
        told = list(self._items.close(complete=not cut))
        if self.stored.response["status"] == "cancelled":
            return told
        if cut:
            self._finish("incomplete", incomplete_details={"reason": "max_output_tokens"})
        else:
            self._finish("completed")
        kind = self.stored.response["status"]
        return [*told, {"type": f"response.{kind}", "response": self.stored.response}]

    def _finish(self, status: str, **fields: Any) -> None:
        response = self.stored.response
        response |= {"status": status, "output": self._items.whole, "usage": _usage(self.call), **fields}
        if status == "completed":
            response["completed_at"] = int(time.time())
        if self._store is not None:
            self._store.put(self.stored)

    def _written(self, told: Sequence[Told]) -> bytes:
        parts = []
        for one in told:
            parts.append(named_event({**one, "sequence_number": self._number}))
            self._number += 1
        return b"".join(parts)


def _response(body: ResponsesBody, call: Call) -> dict[str, Any]:
    """The response object before anything was made."""
    params = call.answers[0].request.params
    return {
        "id": f"resp_{secrets.token_hex(24)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": body.background,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
        "service_tier": "default",
        "store": body.store,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, **(body.text or {})},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation,
        "usage": None,
    }


def _usage(call: Call) -> dict[str, Any]:
    generation = call.generation
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": generation.cached_tokens},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": sum(answer.reasoning_tokens for answer in call.answers)},
        "total_tokens": prompt + completion,
    }
