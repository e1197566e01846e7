"""OpenAI's /v1/embeddings, and vLLM's /v1/score and Jina's /v1/rerank over it.

A causal model is no cross-encoder: the score of two texts is the cosine of their embeddings, as vLLM computes it for
embedding models.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from noria.server.context import Served, ServerContext
from noria.server.embedder import Embedder, Pooling, check_length, cosine, unit_vector
from noria.server.errors import JSON
from noria.server.intake import Intake, WholeBody, text_size, unless_left
from noria.server.requests import MAX_PROMPTS, listed_prompts
from noria.server.validate import check_token
from noria.types import RequestError

Texts = str | list[str]


class PooledBody(WholeBody, kw_only=True):
    """What the three endpoints have in common."""

    pooling: Pooling = "mean"
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    add_special_tokens: bool = True


class EmbeddingBody(PooledBody, kw_only=True):
    """POST /v1/embeddings."""

    input: Any  # str, [str], [int] or [[int]]: see `listed_prompts`
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None


class ScoreBody(PooledBody, kw_only=True):
    """POST /v1/score: one text with each of several, or pairs of equal place."""

    text_1: Texts
    text_2: Texts


class RerankBody(PooledBody, kw_only=True):
    """POST /v1/rerank."""

    query: str
    documents: Annotated[list[str], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=0)] | None = None  # absent or 0: all
    return_documents: bool = True


class Embeddings:
    """The handlers."""

    def __init__(self, context: ServerContext, intake: Intake) -> None:
        self._context = context
        self._intake = intake

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        arrival = time.monotonic()
        served, body = await self._intake.read(request, EmbeddingBody)
        size = served.facts.hidden_size
        if body.dimensions is not None and body.dimensions > size:
            raise RequestError(f"dimensions may be at most {size}, the model's hidden size", param="dimensions")
        prompts = listed_prompts(body.input, "input")
        vectors, tokens = await self._vectors(request, served, body, {"input": prompts}, arrival, body.dimensions)
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        return JSON({"object": "list", "data": data, "model": body.model, "usage": _usage(tokens)})

    async def score(self, request: Request) -> Response:
        """POST /v1/score: cosines, in the order of the pairs."""
        arrival = time.monotonic()
        served, body = await self._intake.read(request, ScoreBody)
        first, second = _texts(body.text_1, "text_1"), _texts(body.text_2, "text_2")
        if len(first) not in (1, len(second)):
            raise RequestError("text_1 must be one text, or as many as text_2", param="text_1")
        vectors, tokens = await self._vectors(request, served, body, {"text_1": first, "text_2": second}, arrival)
        ones, others = vectors[: len(first)], vectors[len(first) :]
        pairs = zip(ones * len(others) if len(ones) == 1 else ones, others, strict=True)
        data = [{"index": i, "object": "score", "score": cosine(one, other)} for i, (one, other) in enumerate(pairs)]
        return JSON(_head("score-", body.model) | {"object": "list", "data": data, "usage": _usage(tokens)})

    async def rerank(self, request: Request) -> Response:
        """POST /v1/rerank: documents by falling cosine with the query; equal ones by their index."""
        arrival = time.monotonic()
        served, body = await self._intake.read(request, RerankBody)
        texts = {"query": [body.query], "documents": _texts(body.documents, "documents")}
        vectors, tokens = await self._vectors(request, served, body, texts, arrival)
        query, *documents = vectors or [b""]
        scores = [cosine(query, document) for document in documents]
        ranked = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: body.top_n or None]
        results = []
        for index in ranked:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if body.return_documents:
                result["document"] = {"text": body.documents[index]}
            results.append(result)
        return JSON(_head("rerank-", body.model) | {"results": results, "usage": _usage(tokens)})

    async def _vectors(
        self,
        request: Request,
        served: Served,
        body: PooledBody,
        prompts: Mapping[str, Sequence[str | tuple[int, ...]]],
        arrival: float,
        dimensions: int | None = None,
    ) -> tuple[list[bytes], int]:
        """(unit vectors of all prompts, one field after the other; tokens in them). Raises RequestError."""
        if not served.facts.hidden_size:
            raise RequestError("this engine gives no embeddings", param="model")

        def encode() -> list[tuple[int, ...]]:
            return [_ids(served, body, prompt, field) for field, values in prompts.items() for prompt in values]

        ids = await self._intake.off_loop(sum(text_size(list(values)) for values in prompts.values()), encode)
        embedder = Embedder(self._context, served, arrival, cache_salt=body.cache_salt, priority=body.priority)
        pooled = await unless_left(request, embedder.abort, embedder.embed(ids, body.pooling))
        return [unit_vector(vector, dimensions) for vector in pooled], sum(map(len, ids))


def _ids(served: Served, body: PooledBody, prompt: str | tuple[int, ...], field: str) -> tuple[int, ...]:
    """The ids of one text. Text that spells a control token is plain text."""
    longest, keep = served.facts.max_model_len, body.truncate_prompt_tokens
    if isinstance(prompt, str):
        encode = served.text.tokenizer.encode
        limit = longest if keep is None else None
        prompt = tuple(encode(prompt, add_special_tokens=body.add_special_tokens, parse_special=False, max_tokens=limit))
    elif prompt:
        for token in (min(prompt), max(prompt)):
            check_token(field, token, served.facts.vocab_size)
    if keep is not None:
        prompt = prompt[: longest if keep == -1 else keep]
    check_length(prompt, longest, field)
    return prompt


def _texts(value: Texts, param: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not texts or len(texts) > MAX_PROMPTS:
        raise RequestError(f"{param} must be 1 to {MAX_PROMPTS} texts", param=param)
    return texts


def _encoded(vector: bytes, encoding: str) -> str | list[float]:
    if encoding == "base64":
        return base64.b64encode(vector).decode()
    import numpy as np

    numbers: list[float] = np.frombuffer(vector, "<f4").tolist()
    return numbers


def _head(prefix: str, model: str) -> dict[str, Any]:
    return {"id": prefix + secrets.token_hex(12), "created": int(time.time()), "model": model}


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
