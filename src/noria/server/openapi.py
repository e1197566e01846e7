"""GET /openapi.json: the document, made from the body structs and the table of routes below.

A new route is one line in `ROUTES`; a test fails if a route of the application has none.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from noria.observe.version import version
from noria.server import documented as doc
from noria.server.anthropic import CountBody, MessagesBody
from noria.server.batches.objects import Batch, BatchBody, BatchList, FileDeleted, FileList, FileObject
from noria.server.embeddings import EmbeddingBody, RerankBody, ScoreBody
from noria.server.errors import ANTHROPIC_PATH
from noria.server.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from noria.server.responses_body import ResponsesBody
from noria.server.systemone import DecisionBody
from noria.server.validate import RANGES

REF = "#/components/schemas/{name}"
EVENTS = "text/event-stream"
METRICS = "text/plain"
BYTES = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A query parameter."""

    name: str
    schema: dict[str, Any]
    description: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One method of one path. `answer` is a struct, or the media type of what is not JSON; `stream`: events if asked for."""

    method: str
    path: str
    summary: str
    answer: type[msgspec.Struct] | str
    body: type[msgspec.Struct] | None = None
    upload: bool = False
    stream: bool = False
    query: tuple[Parameter, ...] = ()
    open: bool = False  # needs no key


AFTER = Parameter("after", {"type": "string"}, "the id after which the page begins")
FILES_LIMIT = Parameter("limit", {"type": "integer", "minimum": 1, "maximum": 10_000, "default": 10_000}, "objects of a page")
BATCHES_LIMIT = Parameter("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}, "objects of a page")
ORDER = Parameter("order", {"type": "string", "enum": ["asc", "desc"], "default": "desc"}, "by time of creation")
PURPOSE = Parameter("purpose", {"type": "string"}, "files of that purpose only")

RESTREAM = (
    Parameter("stream", {"type": "boolean"}, "its events, those to come included"),
    Parameter("starting_after", {"type": "integer"}, "with stream: only events behind this sequence_number"),
)

ROUTES = (
    Entry("GET", "/health", "200 while the engine answers", doc.Status, open=True),
    Entry("GET", "/ready", "200 while new requests are welcome", doc.Status, open=True),
    Entry("GET", "/metrics", "Prometheus metrics", METRICS),
    Entry("GET", "/version", "The version of this installation", doc.Version),
    Entry("GET", "/openapi.json", "This document", "application/json"),
    Entry("GET", "/v1/models", "The served model's names", doc.ModelList),
    Entry("GET", "/v1/models/{model}", "One of them", doc.Model),
    Entry("POST", "/v1/completions", "Complete a prompt", doc.Completion, CompletionBody, stream=True),
    Entry("POST", "/v1/chat/completions", "Answer messages", doc.ChatCompletion, ChatBody, stream=True),
    Entry("POST", "/v1/responses", "Answer items", doc.ResponseObject, ResponsesBody, stream=True),
    Entry("GET", "/v1/responses/{response_id}", "A stored response", doc.ResponseObject, query=RESTREAM, stream=True),
    Entry("DELETE", "/v1/responses/{response_id}", "Forget a response", doc.ResponseDeleted),
    Entry("GET", "/v1/responses/{response_id}/input_items", "What a response answered", doc.ItemList, query=(ORDER,)),
    Entry("POST", "/v1/responses/{response_id}/cancel", "End a response in the background", doc.ResponseObject),
    Entry("POST", "/v1/messages", "Answer messages, as Anthropic", doc.AnthropicMessage, MessagesBody, stream=True),
    Entry("POST", "/v1/messages/count_tokens", "Size of a prompt, as Anthropic", doc.InputTokens, CountBody),
    Entry("POST", "/v1/embeddings", "Vectors of texts", doc.EmbeddingList, EmbeddingBody),
    Entry("POST", "/v1/score", "Similarity of texts", doc.ScoreList, ScoreBody),
    Entry("POST", "/v1/rerank", "Documents by similarity to a query", doc.Ranking, RerankBody),
    Entry("POST", "/v1/systemone", "Typed decisions about a state", doc.Decisions, DecisionBody),
    Entry("POST", "/tokenize", "Ids of a prompt or of messages", doc.Tokens, TokenizeBody),
    Entry("POST", "/detokenize", "Text of ids", doc.Text, DetokenizeBody),
    Entry("POST", "/v1/files", "Upload a batch's input", FileObject, upload=True),
    Entry("GET", "/v1/files", "Files", FileList, query=(AFTER, FILES_LIMIT, ORDER, PURPOSE)),
    Entry("GET", "/v1/files/{file_id}", "A file", FileObject),
    Entry("DELETE", "/v1/files/{file_id}", "Delete a file", FileDeleted),
    Entry("GET", "/v1/files/{file_id}/content", "The contents of a file", BYTES),
    Entry("POST", "/v1/batches", "Start a batch", Batch, BatchBody),
    Entry("GET", "/v1/batches", "Batches", BatchList, query=(AFTER, BATCHES_LIMIT)),
    Entry("GET", "/v1/batches/{batch_id}", "A batch and its progress", Batch),
    Entry("POST", "/v1/batches/{batch_id}/cancel", "End a batch early", Batch),
)

ERRORS = {
    "400": "something in the request is wrong; `param` names it",
    "401": "no key, or a wrong one",
    "404": "no such model or object",
    "408": "the body stopped coming, or X-Noria-Timeout has passed",
    "409": "the object is in a state in which this cannot be done",
    "413": "the body is too large",
    "429": "the queue or a limit of the key is full; Retry-After says when to come back",
    "500": "a fault of the server",
    "503": "loading, draining, or past the server's deadline for requests",
    "507": "the data folder is full",
}
HEADERS = (
    ("X-Request-Id", {"type": "string", "maxLength": 256}, "echoed, and written to the logs"),
    ("X-Noria-Timing", {"type": "string"}, "1: add where the time of the request went"),
    ("X-Noria-Timeout", {"type": "number", "minimum": 0.001, "maximum": 86400}, "seconds after which nobody waits"),
)
UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
    },
    "additionalProperties": False,
}


def document(models: tuple[str, ...] = (), *, keys: bool = True) -> dict[str, Any]:
    """The whole document, OpenAPI 3.1. `models`: the served names, if they are known yet; `keys`: whether one is needed."""
    structs = {kind for entry in ROUTES for kind in (entry.answer, entry.body) if isinstance(kind, type)}
    kinds = sorted(structs | {doc.Error, doc.AnthropicError}, key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(kinds, ref_template=REF)
    for kind in structs:
        properties = schemas[kind.__name__]["properties"]
        _add_ranges(kind, properties)
        if models and properties.get("model") == {"type": "string"}:
            properties["model"] = {"type": "string", "enum": list(models)}
    paths: dict[str, dict[str, Any]] = {}
    for entry in ROUTES:
        paths.setdefault(entry.path, {})[entry.method.lower()] = _operation(entry)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Noria", "version": version(), "description": "An engine that serves large language models."},
        "paths": paths,
        "security": [{"bearer": []}, {"apiKey": []}] if keys else [],
        "components": {
            "schemas": schemas,
            "responses": {
                _response_name(status, kind): _error(text, status, kind)
                for kind in (doc.Error, doc.AnthropicError)
                for status, text in ERRORS.items()
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(entry: Entry) -> dict[str, Any]:
    """An operation object."""
    name = re.sub(r"\W+", "_", f"{entry.method.lower()}{entry.path}").strip("_")
    operation: dict[str, Any] = {"operationId": name, "summary": entry.summary, "parameters": _parameters(entry)}
    if entry.body is not None:
        schema = {"$ref": REF.format(name=entry.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    elif entry.upload:
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": UPLOAD}}}
    kind = doc.AnthropicError if entry.path.startswith(ANTHROPIC_PATH) else doc.Error
    errors = {status: {"$ref": f"#/components/responses/{_response_name(status, kind)}"} for status in ERRORS}
    operation["responses"] = {"200": {"description": "done", "content": _content(entry)}, **errors}
    if entry.open:
        operation["security"] = []
    return operation


def _parameters(entry: Entry) -> list[dict[str, Any]]:
    """Those of the path, of the query, and the headers that requests with a body may carry."""
    names = re.findall(r"{(\w+)}", entry.path)
    found: list[dict[str, Any]] = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
    found += [{"name": p.name, "in": "query", "schema": p.schema, "description": p.description} for p in entry.query]
    if entry.body is not None:
        found += [{"name": name, "in": "header", "schema": schema, "description": text} for name, schema, text in HEADERS]
    return found


def _content(entry: Entry) -> dict[str, Any]:
    """The media types of a success."""
    if isinstance(entry.answer, str):
        return {entry.answer: {"schema": {} if "json" in entry.answer else {"type": "string"}}}
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": REF.format(name=entry.answer.__name__)}}}
    if entry.stream:
        content[EVENTS] = {"schema": {}}
    return content


def _response_name(status: str, kind: type[msgspec.Struct]) -> str:
    return status if kind is doc.Error else f"{kind.__name__}{status}"


def _error(text: str, status: str, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """A response object in the error shape of a dialect."""
    response: dict[str, Any] = {
        "description": text,
        "content": {"application/json": {"schema": {"$ref": REF.format(name=kind.__name__)}}},
    }
    if status in ("429", "503"):
        response["headers"] = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}
    return response


def _add_ranges(kind: type[msgspec.Struct], properties: dict[str, Any]) -> None:
    """Ranges of sampling parameters, which are checked after the types are (`noria.server.validate`)."""
    if "temperature" not in kind.__struct_fields__:
        return
    for name, (least, most, inclusive) in RANGES.items():
        for schema in properties.get(name, {}).get("anyOf", ()):
            if schema.get("type") in ("number", "integer"):
                schema["minimum" if inclusive else "exclusiveMinimum"] = least
                if most < math.inf:
                    schema.setdefault("maximum", most)
