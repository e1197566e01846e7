"""The ASGI application: routes, probes and error shapes, behind the gate."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from noria.observe import metrics
from noria.observe.version import version
from noria.server.batches.endpoints import Batches, Files
from noria.server.batches.service import BatchService
from noria.server.context import ServerContext
from noria.server.cors import cross_origin
from noria.server.embeddings import Embeddings
from noria.server.errors import JSON, error_response
from noria.server.gate import Gate
from noria.server.intake import Intake
from noria.server.messages import Messages
from noria.server.openai import OpenAI
from noria.server.responses import Responses
from noria.server.systemone import SystemOne
from noria.types import RequestError


def make_app(context: ServerContext) -> ASGIApp:
    """The whole server as one ASGI application."""
    intake = Intake(context)
    openai = OpenAI(context, intake)
    embeddings, systemone = Embeddings(context, intake), SystemOne(context, intake)
    responses, messages = Responses(openai, intake), Messages(context, openai, intake)
    probes = Probes(context)
    service = context.batches = BatchService(context)
    files, batches = Files(context, service), Batches(context, service)
    routes = [
        Route("/openapi.json", probes.openapi, methods=["GET"]),
        Route("/health", probes.health, methods=["GET"]),
        Route("/ready", probes.ready, methods=["GET"]),
        Route("/metrics", probes.metrics, methods=["GET"]),
        Route("/version", probes.version, methods=["GET"]),
        Route("/v1/models", openai.models, methods=["GET"]),
        Route("/v1/models/{model:path}", openai.model, methods=["GET"]),
        Route("/v1/completions", openai.completions, methods=["POST"]),
        Route("/v1/chat/completions", openai.chat, methods=["POST"]),
        Route("/v1/responses", responses.create, methods=["POST"]),
        Route("/v1/responses/{response_id}", responses.retrieve, methods=["GET"]),
        Route("/v1/responses/{response_id}", responses.delete, methods=["DELETE"]),
        Route("/v1/responses/{response_id}/input_items", responses.items, methods=["GET"]),
        Route("/v1/responses/{response_id}/cancel", responses.cancel, methods=["POST"]),
        Route("/v1/messages", messages.create, methods=["POST"]),
        Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
        Route("/v1/files", files.create, methods=["POST"]),
        Route("/v1/files", files.index, methods=["GET"]),
        Route("/v1/files/{file_id}", files.retrieve, methods=["GET"]),
        Route("/v1/files/{file_id}", files.delete, methods=["DELETE"]),
        Route("/v1/files/{file_id}/content", files.content, methods=["GET"]),
        Route("/v1/batches", batches.create, methods=["POST"]),
        Route("/v1/batches", batches.index, methods=["GET"]),
        Route("/v1/batches/{batch_id}", batches.retrieve, methods=["GET"]),
        Route("/v1/batches/{batch_id}/cancel", batches.cancel, methods=["POST"]),
        Route("/v1/embeddings", embeddings.embeddings, methods=["POST"]),
        Route("/v1/score", embeddings.score, methods=["POST"]),
        Route("/v1/rerank", embeddings.rerank, methods=["POST"]),
        Route("/v1/systemone", systemone.decide, methods=["POST"]),
        Route("/tokenize", openai.tokenize, methods=["POST"]),
        Route("/detokenize", openai.detokenize, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={RequestError: _on_request_error, HTTPException: _on_http_error, 500: _on_fault},
    )
    app.router.redirect_slashes = False  # a path is right or unknown; clients do not repeat a POST after a redirect
    batches.paths = frozenset(route.path for route in routes)
    service.app = app
    return cross_origin(Gate(app, context), context.config.allowed_origins)


class Probes:
    """Endpoints for machines that watch the server."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._document: dict[str, Any] | None = None

    async def health(self, request: Request) -> Response:
        """200 only while the engine answers a round trip."""
        await self._context.check_engine()
        return JSON({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 while new requests are welcome: healthy, and not draining."""
        self._context.require(None)
        await self._context.check_engine()
        return JSON({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        """Prometheus exposition."""
        served = self._context.served
        if served is None:
            raise RequestError("the model is still loading", status=503, code="loading")
        return Response(served.metrics.exposition(), media_type=metrics.CONTENT_TYPE)

    async def version(self, request: Request) -> Response:
        """The version of this installation."""
        return JSON({"version": version()})

    async def openapi(self, request: Request) -> Response:
        """The OpenAPI document."""
        from noria.server.openapi import document

        served = self._context.served
        if served is None:
            return JSON(document(keys=bool(self._context.keys)))
        if self._document is None:
            self._document = document(served.names, keys=bool(self._context.keys))
        return JSON(self._document)


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error, request.scope)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, wrong method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        text = f"{request.method} is not allowed here"
    else:
        text = "there is no such endpoint" if error.status_code == 404 else str(error.detail)
    response = error_response(RequestError(text, status=error.status_code), request.scope)
    response.headers.update(error.headers or {})
    if error.status_code == 405:
        response.headers["Allow"] = ", ".join(_allowed(request))
    return response


def _allowed(request: Request) -> list[str]:
    """The methods of all routes of a path: Starlette names those of the first only."""
    matching = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in matching for method in route.methods or ()})


async def _on_fault(request: Request, error: Exception) -> Response:
    """A bug of ours: Starlette logs its trace, the client learns nothing of our insides."""
    return error_response(RequestError("internal error; the server's log has the details", status=500), request.scope)
