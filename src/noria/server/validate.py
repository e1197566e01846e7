"""Ranges of the sampling parameters, and room in the context: one place for HTTP, `LLM` and `AsyncEngine`.

Types are checked where a value enters (msgspec for JSON); here the numbers are. Every fault is a RequestError that names
the field and what it may be.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from noria.text.stops import check_stops
from noria.types import RequestError, SamplingParams

MAX_CHOICES = 128  # n, as OpenAI
MAX_TOP_LOGPROBS = 20  # as OpenAI's chat endpoint
MAX_STOP_IDS = 256
MAX_LOGPROB_IDS = 256
MAX_BIAS = 100.0
SEED_BITS = 64

# field: (least, most, whether the least itself is allowed)
RANGES: dict[str, tuple[float, float, bool]] = {
    "n": (1, MAX_CHOICES, True),
    "temperature": (0.0, 2.0, True),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, True),
    "top_k": (-1, math.inf, True),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (0.0, 100.0, False),
    "min_tokens": (0, math.inf, True),
    "max_tokens": (0, math.inf, True),
    "logprobs": (0, MAX_TOP_LOGPROBS, True),
    "prompt_logprobs": (0, MAX_TOP_LOGPROBS, True),
    "seed": (-(2 ** (SEED_BITS - 1)), 2**SEED_BITS - 1, True),
}


def check_params(params: SamplingParams, vocab_size: int, *, control_ids: Collection[int] = ()) -> None:
    """Raise RequestError for the first value that is out of its range, or contradicts another."""
    for name, (least, most, inclusive) in RANGES.items():
        value = getattr(params, name)
        if value is not None:
            check_number(name, value, least, most, inclusive=inclusive)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(f"min_tokens is {params.min_tokens}, more than max_tokens ({params.max_tokens})", param="min_tokens")
    check_stops(params.stop)
    if len(params.stop_token_ids) > MAX_STOP_IDS:
        raise RequestError(f"stop_token_ids may hold at most {MAX_STOP_IDS} ids", param="stop_token_ids")
    for token in params.stop_token_ids:
        check_token("stop_token_ids", token, vocab_size)
    for token in params.logprob_token_ids:
        check_token("logprob_token_ids", token, vocab_size)
    if params.logprob_token_ids and (params.logprobs is None or len(params.logprob_token_ids) > MAX_LOGPROB_IDS):
        raise RequestError(f"logprob_token_ids needs logprobs, and at most {MAX_LOGPROB_IDS} ids", param="logprob_token_ids")
    for token, bias in params.logit_bias.items():
        check_token("logit_bias", token, vocab_size)
        check_number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
    for token in params.allowed_token_ids:
        check_token("allowed_token_ids", token, vocab_size)
    _check_constraints(params, control_ids)


def _check_constraints(params: SamplingParams, control_ids: Collection[int]) -> None:
    """A grammar says what the output is and where it ends: what says otherwise beside it cannot be honoured."""
    if params.structured_output is None:
        return
    contradictions = {
        "allowed_token_ids": bool(params.allowed_token_ids),
        "ignore_eos": params.ignore_eos,
        "min_tokens": params.min_tokens > 0,
        "stop_token_ids": any(token not in control_ids for token in params.stop_token_ids),
    }
    for name, contradicts in contradictions.items():
        if contradicts:
            hint = "other tokens than control tokens cannot end it" if name == "stop_token_ids" else "leave it out"
            raise RequestError(f"{name} contradicts structured output, whose grammar says where it may end: {hint}", param=name)


def check_number(name: str, value: float, least: float, most: float, *, inclusive: bool = True) -> None:
    """Raise RequestError unless the value is finite and in [least, most] (or (least, most])."""
    above = value >= least if inclusive else value > least
    if above and value <= most and (isinstance(value, int) or math.isfinite(value)):
        return
    bound = f"at least {least}" if inclusive else f"more than {least}"
    if most < math.inf:
        bound += f" and at most {most}"
    raise RequestError(f"{name} must be {bound}", param=name)


def check_token(name: str, token: int, vocab_size: int) -> None:
    """Raise RequestError unless `token` is an id of the model's vocabulary."""
    if not 0 <= token < vocab_size:
        raise RequestError(f"{name}: token ids of this model are 0 to {vocab_size - 1}", param=name)


def check_room(prompt: int, max_tokens: int | None, context: int) -> None:
    """Raise RequestError unless `prompt` tokens and as many as are asked for fit in the context."""
    if not prompt:
        raise RequestError("the prompt is empty", param="prompt")
    wanted = 1 if max_tokens is None else max_tokens
    if prompt + wanted <= context:
        return
    raise RequestError(
        f"this model's maximum context length is {context} tokens, but {prompt + wanted} were requested "
        f"({prompt} in the prompt, {wanted} in the completion): shorten the prompt or lower max_tokens",
        param="messages" if max_tokens is None else "max_tokens",
        code="context_length_exceeded",
    )
