"""OpenAI's /v1/responses: chat answers drawn as items, whole, as typed events, or in the background; kept to be continued."""

from __future__ import annotations

import secrets
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from noria.server.calls import Call
from noria.server.errors import JSON
from noria.server.exchange import current_exchange
from noria.server.intake import Intake, unless_left
from noria.server.openai import OpenAI
from noria.server.responses_body import ResponsesBody, chat_body, input_items
from noria.server.responses_log import Follower, log_of
from noria.server.responses_run import Run
from noria.server.responses_store import ResponseStore, Stored
from noria.server.sse import EventStream
from noria.types import RequestError


class Responses:
    """The handlers."""

    def __init__(self, openai: OpenAI, intake: Intake) -> None:
        self._openai = openai
        self._intake = intake
        self._store = ResponseStore()

    async def create(self, request: Request) -> Response | EventStream:
        """POST /v1/responses."""
        arrival = time.monotonic()
        body, unknown = await self._intake.parsed(request, ResponsesBody)
        if body.background and not body.store:
            raise RequestError("background needs store: true", param="background")
        tenant = current_exchange().caller.tenant
        before: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            earlier = self._store.get(body.previous_response_id, tenant, "previous_response_id")
            if earlier.response["status"] == "in_progress":
                raise RequestError("the previous response is still in progress", param="previous_response_id")
            before = [*earlier.items, *earlier.response["output"]]
        own = input_items(body, lambda ident: self._store.item(ident, tenant))
        served, call = await self._openai.call_of(chat_body(body, [*before, *own]), unknown, arrival)
        for item in own:
            item.setdefault("id", f"msg_{secrets.token_hex(16)}")
        stored = Stored(_response(body, call), [*before, *own], len(before), tenant)
        run = Run(served, call, stored, top_logprobs=body.top_logprobs or 0, store=self._store if body.store else None)
        if body.background:
            shown = run.in_background()
            return self._followed(stored) if body.stream else JSON(shown)
        if body.stream:
            return EventStream(run.events(), on_disconnect=run.abort, end=b"")
        return JSON(await unless_left(request, run.abort, run.collect()))

    async def retrieve(self, request: Request) -> Response | EventStream:
        """GET /v1/responses/{id}: as it is now, or as its events from the first, or behind the number `starting_after`, on."""
        stored = self._stored(request)
        after = request.query_params.get("starting_after")
        if request.query_params.get("stream", "false").lower() != "true":
            if after is not None:
                raise RequestError("starting_after needs stream=true", param="starting_after")
            return JSON(stored.response)
        if after is not None and not (after.isascii() and after.isdigit()):
            raise RequestError("starting_after must be the sequence_number of an event", param="starting_after")
        return self._followed(stored, -1 if after is None else int(after[:9]))

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

    def _followed(self, stored: Stored, after: int = -1) -> EventStream:
        """The events of a response. Those who read them may leave: it goes on."""
        follower = Follower(log_of(stored.response) if stored.log is None else stored.log, after)
        return EventStream(follower.events(), on_disconnect=follower.leave, end=b"")

    def _stored(self, request: Request) -> Stored:
        return self._store.get(request.path_params["response_id"], current_exchange().caller.tenant)


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
