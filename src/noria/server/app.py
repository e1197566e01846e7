"""The ASGI application: routes, probes and error shapes, behind the gate."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from noria.observe import metrics
from noria.observe.version import version
from noria.server.context import ServerContext
from noria.server.embeddings import Embeddings
from noria.server.errors import JSON, error_response
from noria.server.gate import Gate
from noria.server.openai import OpenAI
from noria.server.systemone import SystemOne
from noria.types import RequestError


def make_app(context: ServerContext) -> ASGIApp:
    """The whole server as one ASGI application."""
    openai = OpenAI(context)
    embeddings = Embeddings(context)
    systemone = SystemOne(context)
    probes = Probes(context)
    routes = [
        Route("/health", probes.health, methods=["GET"]),
        Route("/ready", probes.ready, methods=["GET"]),
        Route("/metrics", probes.metrics, methods=["GET"]),
        Route("/version", probes.version, methods=["GET"]),
        Route("/v1/models", openai.models, methods=["GET"]),
        Route("/v1/models/{model:path}", openai.model, methods=["GET"]),
        Route("/v1/completions", openai.completions, methods=["POST"]),
        Route("/v1/chat/completions", openai.chat, methods=["POST"]),
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
    return Gate(app, context)


class Probes:
    """Endpoints for machines that watch the server."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

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


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, wrong method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        text = f"{request.method} is not allowed here"
    else:
        text = "there is no such endpoint" if error.status_code == 404 else str(error.detail)
    response = error_response(RequestError(text, status=error.status_code))
    response.headers.update(error.headers or {})
    return response


async def _on_fault(request: Request, error: Exception) -> Response:
    """A bug of ours: Starlette logs its trace, the client learns nothing of our insides."""
    return error_response(RequestError("internal error; the server's log has the details", status=500))
