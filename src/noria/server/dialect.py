"""What OpenAI's objects look like: pure functions from what happened to JSON-ready values. No I/O and no state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from noria.text.tokenizer import Tokenizer
from noria.types import TokenLogprobs

LEAST_LOGPROB = -9999.0  # JSON has no infinity; what OpenAI's clients expect in its place


def finite(logprob: float) -> float:
    """A logprob that JSON can hold."""
    return max(logprob, LEAST_LOGPROB) if not math.isnan(logprob) else LEAST_LOGPROB


def token_string(tokenizer: Tokenizer, token: int) -> str:
    """A token as a string that tells tokens apart: part of a character is `bytes:\\xe2\\x80`, as OpenAI writes it."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], top: int) -> dict[str, Any]:
    """`logprobs` of a chat choice: {content: [{token, logprob, bytes, top_logprobs}]}."""
    return {
        "content": [
            {
                **_chat_entry(tokenizer, entry.token, entry.logprob),
                "top_logprobs": [
                    _chat_entry(tokenizer, token, logprob)
                    for token, logprob in list(zip(entry.top_tokens, entry.top_logprobs, strict=True))[:top]
                ],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _chat_entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token)),
    }


def completion_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None], tokens: Sequence[int], offsets: Sequence[int], top: int
) -> dict[str, Any]:
    """The legacy shape. `entries[i]` is of `tokens[i]`, None for a first token, which has no distribution.

    `top_logprobs` holds the `top` most likely tokens and the token itself, by their strings.
    """
    return {
        "tokens": [token_string(tokenizer, token) for token in tokens],
        "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
        "top_logprobs": [None if entry is None else _legacy_top(tokenizer, entry, top) for entry in entries],
        "text_offset": list(offsets),
    }


def _legacy_top(tokenizer: Tokenizer, entry: TokenLogprobs, top: int) -> dict[str, float]:
    tokens, logprobs = entry.top_tokens[:top], entry.top_logprobs[:top]
    best: dict[str, float] = {}
    for token, logprob in zip((*tokens, entry.token), (*logprobs, entry.logprob), strict=True):
        best.setdefault(token_string(tokenizer, token), finite(logprob))
    return best


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """vLLM's extension: for each prompt token {id: {logprob, rank, decoded_token}}, null for the first.

    `rank` is null where the token is not among the most likely ones that were asked for.
    """
    positions: list[dict[str, Any] | None] = [None]
    for entry in entries:
        ranked: dict[int, dict[str, Any]] = {
            token: {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token)}
            for rank, (token, logprob) in enumerate(zip(entry.top_tokens, entry.top_logprobs, strict=True), 1)
        }
        own = {"logprob": finite(entry.logprob), "rank": None, "decoded_token": tokenizer.token_text(entry.token)}
        ranked.setdefault(entry.token, own)
        positions.append({str(token): value for token, value in ranked.items()})
    return positions


def usage(
    prompt: int, completion: int, cached: int, *, reasoning: int = 0, predicted: int = 0, unused_prediction: int = 0
) -> dict[str, Any]:
    """Token counts of a request: the prompt once, all choices' tokens, those that are reasoning, those a prediction foresaw."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "accepted_prediction_tokens": predicted,
            "rejected_prediction_tokens": unused_prediction,
        },
    }


def model_object(name: str, created: int, max_model_len: int, root: str) -> dict[str, Any]:
    """An entry of /v1/models."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "noria",
        "root": root,
        "max_model_len": max_model_len,
    }


def head(
    kind: str, ident: str, created: int, model: str, fingerprint: str, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The fields that a response and every chunk of a stream begin with."""
    return {
        "id": ident,
        "object": kind,
        "created": created,
        "model": model,
        "system_fingerprint": fingerprint,
        **(extra or {}),
    }
