"""From a checked body to a `Call`: prompts tokenised, parameters checked, answers ready to run.

Everything here is plain computation, and may run in a thread: a long prompt takes milliseconds to tokenise.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from noria.server.answer import Answer, engine_request
from noria.server.beam_generation import BeamGeneration
from noria.server.beams import check_beams
from noria.server.context import Served, ServerContext
from noria.server.generation import Generation
from noria.server.requests import (
    COMPLETION_MAX_TOKENS,
    Body,
    ChatBody,
    CompletionBody,
    PredictedContent,
    TokenizeBody,
    prompts_of,
    sampling_params,
)
from noria.server.shapes import ChatShape, CompletionShape, Shape
from noria.server.tools import bind, tool_use
from noria.server.validate import SEED_BITS, check_params, check_token
from noria.text.chat import encode_chat
from noria.types import EngineRequest, RequestError, SamplingParams

INLINE_CHARACTERS = 4096  # tokenised on the event loop (about a millisecond); longer prompts go to a thread


class Call:
    """One client call: its answers, and how to show them."""

    def __init__(
        self, body: Body, answers: Sequence[Answer], shape: Shape, seed: int, generation: Generation | BeamGeneration
    ) -> None:
        self.body = body
        self.generation = generation
        self.answers = answers
        self.shape = shape
        self.seed = seed


def completion_call(context: ServerContext, served: Served, body: CompletionBody, arrival: float) -> Call:
    """The call of a /v1/completions body. Raises RequestError."""
    limit = body.token_limit()
    limit = COMPLETION_MAX_TOKENS if limit is None else limit
    if limit == 0 and not body.echo:
        raise RequestError("max_tokens must be at least 1, unless echo is set", param="max_tokens")
    prompts = prompts_of(body)
    params, seed = _params(context, served, body, logprobs=body.logprobs, limit=limit)
    scored = body.logprobs if body.echo else None
    if scored is not None:
        params = msgspec.structs.replace(params, prompt_logprobs=max(scored, params.prompt_logprobs or 0))
    answers = []
    for prompt in prompts:
        ids = _prompt_ids(served, body, prompt)
        answers.append(
            Answer(
                served.text.tokenizer,
                _engine_request(context, served, body, ids, params, arrival),
                text=prompt if isinstance(prompt, str) and body.truncate_prompt_tokens is None else None,
                echo=body.echo,
                offsets=body.logprobs is not None,
            )
        )
    shape = CompletionShape(
        served.text.tokenizer,
        top=body.logprobs,
        token_ids=body.return_token_ids,
        prompt_logprobs=body.prompt_logprobs is not None,
    )
    return Call(body, answers, shape, seed, _generation(context, served, body, answers))


def chat_call(context: ServerContext, served: Served, body: ChatBody, arrival: float) -> Call:
    """The call of a /v1/chat/completions body. Raises RequestError."""
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    limit = body.token_limit()
    if limit == 0:
        raise RequestError("max_tokens must be at least 1", param="max_tokens")
    top = (body.top_logprobs or 0) if body.logprobs else None
    params, seed = _params(context, served, body, logprobs=top, limit=limit)
    use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    ids = _truncated(body, chat_ids(served, body, body.reasoning_effort, tools=use.shown, limit=_longest(served, body)), served)
    params, parse = bind(served.text, use, ids, params, vocab_size=served.facts.vocab_size)
    request = _engine_request(context, served, body, ids, params, arrival)
    if body.prediction is not None:
        request = msgspec.structs.replace(request, prediction=_predicted_ids(served, body.prediction))
    answer = Answer(served.text.tokenizer, request, plan=parse)
    shape = ChatShape(
        served.text.tokenizer,
        top=top,
        token_ids=body.return_token_ids,
        prompt_logprobs=body.prompt_logprobs is not None,
        named=use.named,
    )
    return Call(body, [answer], shape, seed, _generation(context, served, body, [answer]))


def _generation(context: ServerContext, served: Served, body: Body, answers: Sequence[Answer]) -> Generation | BeamGeneration:
    """How the answers are made. Raises RequestError for what beam search cannot do."""
    if not body.use_beam_search:
        if body.length_penalty != 1.0:
            raise RequestError("length_penalty needs use_beam_search: true", param="length_penalty")
        return Generation(served.client, served.metrics, answers)
    if isinstance(body, ChatBody) and body.prediction is not None:
        raise RequestError("prediction cannot be used with use_beam_search; leave one of them out", param="prediction")
    check_beams(answers[0].request.params, answers[0].request.stop_ids, body.length_penalty)
    return BeamGeneration(
        served.client,
        served.metrics,
        served.text.tokenizer,
        answers,
        next_request_id=context.next_request_id,
        max_model_len=served.facts.max_model_len,
        length_penalty=body.length_penalty,
        timeout_s=context.engine_config.request_timeout_s,
    )


def _predicted_ids(served: Served, prediction: PredictedContent) -> tuple[int, ...]:
    """The ids of a predicted text, as far as an answer could have them. No text of it stands for a control token."""
    ids = served.text.tokenizer.encode(prediction.text(), add_special_tokens=False, parse_special=False)
    return tuple(ids[: served.facts.max_model_len])


def prompt_size(body: Body) -> int:
    """Characters that have to be tokenised, roughly: what decides between the event loop and a thread."""
    if isinstance(body, CompletionBody):
        return _text_size(body.prompt)
    assert isinstance(body, ChatBody)
    predicted = 0 if body.prediction is None else len(body.prediction.text())
    tools = INLINE_CHARACTERS + 1 if body.tools else 0  # to be checked, rendered and made a grammar of
    return predicted + tools + sum(_text_size(message.get("content")) for message in body.messages)


def _text_size(value: Any) -> int:
    if not isinstance(value, list):
        return len(value) if isinstance(value, str) else 0
    if value and isinstance(value[0], int):
        return len(value)
    return sum(len(item) if isinstance(item, str | list) else _part_size(item) for item in value)


def _part_size(part: Any) -> int:
    return len(str(part.get("text", ""))) if isinstance(part, dict) else 1


def _params(
    context: ServerContext, served: Served, body: ChatBody | CompletionBody, *, logprobs: int | None, limit: int | None
) -> tuple[SamplingParams, int]:
    """(checked parameters with a seed, the seed as the client is told it)."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    if body.priority and context.engine_config.scheduling_policy != "priority":
        raise RequestError("priority needs a server with --scheduling-policy priority", param="priority")
    defaults = {} if body.use_beam_search else served.sampling_defaults
    params = sampling_params(body, defaults, logprobs=logprobs, max_tokens=limit)
    check_params(params, served.facts.vocab_size, control_ids=served.text.tokenizer.control_ids)
    seed = secrets.randbits(SEED_BITS) if params.seed is None else params.seed
    return msgspec.structs.replace(params, seed=seed % 2**SEED_BITS), seed


def _engine_request(
    context: ServerContext,
    served: Served,
    body: Body,
    ids: tuple[int, ...],
    params: SamplingParams,
    arrival: float,
) -> EngineRequest:
    return engine_request(
        context.next_request_id(),
        ids,
        params,
        eos_ids=served.eos_ids,
        max_model_len=served.facts.max_model_len,
        arrival=arrival,
        cache_salt=body.cache_salt,
        priority=body.priority,
    )


def _prompt_ids(served: Served, body: CompletionBody, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
    """The ids of one completions prompt. Text may spell control tokens: it may be a rendered chat template."""
    if isinstance(prompt, str):
        ids = tuple(
            served.text.tokenizer.encode(
                prompt,
                add_special_tokens=body.add_special_tokens,
                parse_special=True,
                max_tokens=_longest(served, body),
            )
        )
    else:
        ids = prompt
        for token in (min(ids), max(ids)):
            check_token("prompt", token, served.facts.vocab_size)
    return _truncated(body, ids, served)


def _longest(served: Served, body: Body) -> int | None:
    """Tokens beyond which a prompt need not be encoded to be refused; None if it is going to be truncated."""
    return served.facts.max_model_len if body.truncate_prompt_tokens is None else None


def _truncated(body: Body, ids: tuple[int, ...], served: Served) -> tuple[int, ...]:
    """The last `truncate_prompt_tokens` ids; -1 stands for the whole context, less one token of output."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return ids
    keep = served.facts.max_model_len - 1 if keep == -1 else keep
    return ids[max(0, len(ids) - keep) :]


def chat_ids(
    served: Served,
    body: ChatBody | TokenizeBody,
    reasoning_effort: str | None,
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    limit: int | None,
) -> tuple[int, ...]:
    """The ids of rendered messages. Raises RequestError if the model has no chat template, or it refuses the messages.

    `reasoning_effort` reaches the template under its own name, and as the switches by which templates turn reasoning on and
    off; the request's own `chat_template_kwargs` win.
    """
    variables = dict(body.chat_template_kwargs)
    if reasoning_effort is not None:
        variables.setdefault("reasoning_effort", reasoning_effort)
        for switch in ("enable_thinking", "thinking"):
            variables.setdefault(switch, reasoning_effort != "none")
    ids = encode_chat(
        served.text.template,
        body.messages or [],
        tools=tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=variables,
        max_tokens=limit,
    )
    return tuple(ids)
