"""POST /v1/systemone: typed decisions about one state, from one prefill of it.

All questions go to the engine at once. Their prompts begin with the same state: the first computes it, the others wait for
its blocks (the prefix cache's producer marks) and compute only what differs.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from noria.server.answer import Answer
from noria.server.context import Served, ServerContext
from noria.server.decisions import LabelMaker, Labels, Question, answer_of, options_of, question_text, state_text
from noria.server.dialect import usage
from noria.server.errors import JSON
from noria.server.generation import Generation
from noria.server.intake import Intake, WholeBody, text_size, unless_left
from noria.text.chat import encode_chat
from noria.types import EngineRequest, RequestError, SamplingParams, TokenLogprobs

MAX_QUESTIONS = 64


class DecisionBody(WholeBody, kw_only=True):
    """POST /v1/systemone."""

    state: str | dict[str, Any] | list[Any]
    questions: Annotated[dict[str, Question], Meta(min_length=1, max_length=MAX_QUESTIONS)]


class _Asked:
    """One question on its way."""

    def __init__(self, name: str, question: Question, options: tuple[str, ...], labels: Labels, answer: Answer) -> None:
        self.name = name
        self.question = question
        self.options = options
        self.labels = labels
        self.answer = answer


class SystemOne:
    """The handler."""

    def __init__(self, context: ServerContext, intake: Intake) -> None:
        self._context = context
        self._intake = intake
        self._label_maker: LabelMaker | None = None

    async def decide(self, request: Request) -> Response:
        """POST /v1/systemone."""
        arrival = time.monotonic()
        served, body = await self._intake.read(request, DecisionBody)
        state = state_text(body.state)
        if not state.strip():
            raise RequestError("state is empty", param="state")
        size = text_size([state]) * len(body.questions)
        asked = await self._intake.off_loop(size, lambda: self._ask(served, body, state, arrival))
        generation = Generation(served.client, served.metrics, [question.answer for question in asked])
        entries = await unless_left(request, generation.abort, _first_logprobs(generation))
        answers = {
            question.name: answer_of(question.question, question.options, question.labels, entries[position])
            for position, question in enumerate(asked)
            if position in entries  # none are there if the client has left
        }
        counts = usage(generation.prompt_tokens, generation.completion_tokens, generation.cached_tokens)
        return JSON({"model": body.model, "answers": answers, "usage": counts})

    def _ask(self, served: Served, body: DecisionBody, state: str, arrival: float) -> list[_Asked]:
        maker = self._label_maker = self._label_maker or LabelMaker(served.text.tokenizer)
        asked = []
        for name, question in body.questions.items():
            options = options_of(question)
            labels = maker.labels(question.type, len(options))
            ids = _prompt_ids(served, question_text(state, question, options, labels))
            request = EngineRequest(
                request_id=self._context.next_request_id(),
                prompt=ids,
                params=SamplingParams(max_tokens=1, temperature=0.0, seed=0, logprobs=0, logprob_token_ids=labels.all_tokens),
                cache_salt=body.cache_salt,
                priority=body.priority,
                arrival=arrival,
            )
            asked.append(_Asked(name, question, tuple(options), labels, Answer(served.text.tokenizer, request)))
        return asked


def _prompt_ids(served: Served, text: str) -> tuple[int, ...]:
    """The ids of a question as the model is asked: in its chat template, or as plain text that ends with "Answer:"."""
    limit = served.facts.max_model_len
    template = served.text.template
    if template is None:
        encode = served.text.tokenizer.encode
        ids = encode(text + "\nAnswer:", add_special_tokens=True, parse_special=False, max_tokens=limit)
    else:
        ids = encode_chat(template, [{"role": "user", "content": text}], max_tokens=limit)
    if len(ids) >= limit:
        raise RequestError(
            f"this model's maximum context length is {limit} tokens, and state and question have {len(ids)}: shorten the state",
            param="state",
            code="context_length_exceeded",
        )
    return tuple(ids)


async def _first_logprobs(generation: Generation) -> dict[int, TokenLogprobs]:
    """By position: the log probabilities beside the one token of each request."""
    entries: dict[int, TokenLogprobs] = {}
    async for deltas in generation.steps():
        entries.update((position, entry) for position, delta in deltas for entry in delta.logprobs)
    return entries
