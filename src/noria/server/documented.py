"""The shapes of our answers as types, for the OpenAPI document. Tests hold real answers to them.

Only what every such answer has; extensions that are asked for (`timing`, token ids, prompt logprobs) come on top.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ErrorDetail(msgspec.Struct):
    """What went wrong, and what to change."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    """Every error, of every endpoint in OpenAI's dialect."""

    error: ErrorDetail


class Status(msgspec.Struct):
    """A probe's answer."""

    status: str


class Version(msgspec.Struct):
    """The version of this installation."""

    version: str


class Model(msgspec.Struct):
    """A name that this server answers to."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(msgspec.Struct):
    """All names."""

    object: Literal["list"]
    data: list[Model]


class PromptDetails(msgspec.Struct):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    """Of the answer's tokens."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct):
    """Token counts: the prompt once, all choices' tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class CompletionChoice(msgspec.Struct):
    """One choice of a text completion."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class Completion(msgspec.Struct):
    """A text completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    seed: int


class Message(msgspec.Struct):
    """What the model said. `content` is null where it only calls tools."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None


class ChatChoice(msgspec.Struct):
    """One choice of a chat completion."""

    index: int
    message: Message
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class ChatCompletion(msgspec.Struct):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    seed: int


class Tokens(msgspec.Struct):
    """Ids of a prompt or of rendered messages."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(msgspec.Struct):
    """The text of ids."""

    prompt: str


class PooledUsage(msgspec.Struct):
    """Token counts where nothing is generated."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct):
    """The vector of one input, as numbers or as base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct):
    """Vectors, in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PooledUsage


class Score(msgspec.Struct):
    """How near two texts are."""

    object: Literal["score"]
    index: int
    score: float


class ScoreList(msgspec.Struct):
    """Scores, in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage


class RankedDocument(msgspec.Struct):
    """A document's place among the others."""

    index: int
    relevance_score: float


class Ranking(msgspec.Struct):
    """Documents, the nearest first."""

    id: str
    created: int
    model: str
    results: list[RankedDocument]
    usage: PooledUsage


class Decisions(msgspec.Struct):
    """Answers by the names of the questions."""

    model: str
    answers: dict[str, dict[str, Any]]
    usage: Usage
