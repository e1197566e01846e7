"""OpenAI's endpoints: completions, chat completions, models, and vLLM's tokenize and detokenize.

A generation endpoint reads and checks the body, turns it into a `Call` (see `noria.server.calls`) and answers it, whole or
as a stream. `prepare` and `collect` need no HTTP: `noria run` answers the lines of a file with them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from noria.server.answer import Delta, merge
from noria.server.beam_generation import BeamGeneration
from noria.server.calls import INLINE_CHARACTERS, Call, chat_call, chat_ids, completion_call, prompt_size
from noria.server.context import Served, ServerContext
from noria.server.dialect import head, model_object, usage
from noria.server.errors import JSON
from noria.server.generation import Generation
from noria.server.intake import Intake, name_request, note_ignored, unless_left
from noria.server.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from noria.server.sse import EventStream, event
from noria.server.structured import FIELDS, structured_output
from noria.server.tools import tool_use
from noria.server.validate import check_token
from noria.types import RequestError, SamplingParams

GENERATION_BODIES: dict[str, type[CompletionBody] | type[ChatBody]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
}


class OpenAI:
    """The handlers. One instance a server."""

    def __init__(self, context: ServerContext, intake: Intake) -> None:
        self._context = context
        self._intake = intake

    # Endpoints

    async def completions(self, request: Request) -> Response | EventStream:
        """POST /v1/completions."""
        return await self._respond(request, CompletionBody)

    async def chat(self, request: Request) -> Response | EventStream:
        """POST /v1/chat/completions."""
        return await self._respond(request, ChatBody)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        served = self._context.require(None)
        return JSON({"object": "list", "data": [self._model(served, name) for name in served.names]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{model}."""
        name = request.path_params["model"]
        return JSON(self._model(self._context.require(name), name))

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: the ids of a prompt, or of rendered messages."""
        body, _ = await self._intake.parsed(request, TokenizeBody)
        served = self._context.require(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("send either prompt or messages", param="prompt")
        size = len(body.prompt or "") or INLINE_CHARACTERS + 1
        tokens = await self._intake.off_loop(size, lambda: _tokenize(served, body))
        strings = [served.text.tokenizer.token_text(t) for t in tokens] if body.return_token_strs else None
        limit = served.facts.max_model_len
        return JSON({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of ids, control tokens included."""
        body, _ = await self._intake.parsed(request, DetokenizeBody)
        served = self._context.require(body.model)
        for token in (min(body.tokens, default=0), max(body.tokens, default=0)):
            check_token("tokens", token, served.facts.vocab_size)
        decode = served.text.tokenizer.decode
        text = await self._intake.off_loop(len(body.tokens), lambda: decode(body.tokens, skip_special_tokens=False))
        return JSON({"prompt": text})

    # Generation without HTTP

    @property
    def default_model(self) -> str:
        """The first name of the served model."""
        return self._context.require(None).names[0]

    async def prepare(self, data: bytes, kind: type[CompletionBody] | type[ChatBody]) -> tuple[Served, Call]:
        """A request body as a call that is ready to run. Raises RequestError."""
        arrival = time.monotonic()
        body, unknown = await self._intake.decoded(data, kind)
        return await self.call_of(body, unknown, arrival)

    async def call_of(self, body: ChatBody | CompletionBody, unknown: Sequence[str], arrival: float) -> tuple[Served, Call]:
        """A checked body as a call that is ready to run; `unknown` are the fields that were ignored. Raises RequestError."""
        served = self._context.require(body.model)
        note_ignored(served, unknown)

        def make() -> Call:
            if isinstance(body, ChatBody):
                return chat_call(self._context, served, body, arrival)
            return completion_call(self._context, served, body, arrival)

        call = await self._intake.off_loop(prompt_size(body), make)
        await _admit(served, call)
        return served, call

    async def collect(self, served: Served, call: Call) -> dict[str, Any]:
        """Run a call to its end: the whole response object. Raises RequestError."""
        n = call.answers[0].request.params.n
        made: dict[int, list[Delta]] = {}
        generation = call.generation
        async for deltas in generation.steps():
            for position, delta in deltas:
                made.setdefault(position * n + delta.index, []).append(delta)
        body = call.body
        out = _head(served, call, call.shape.kind)
        out["choices"] = [call.shape.choice(index, call.answers[index // n], merge(made[index])) for index in sorted(made)]
        out["usage"] = _usage(generation)
        out["seed"] = call.seed
        if body.timing:
            out["timing"] = generation.timing()
        return out

    # One request

    async def _respond(self, request: Request, kind: type[CompletionBody] | type[ChatBody]) -> Response | EventStream:
        served, call = await self.prepare(await self._intake.data(request), kind)
        name_request(request, call.body.request_id)
        if request.headers.get("x-noria-timing", "0").lower() not in ("0", "false", ""):
            call.body.timing = True
        abort = call.generation.abort
        if call.body.stream:
            return EventStream(_chunks(served, call), on_disconnect=abort)
        return JSON(await unless_left(request, abort, self.collect(served, call)))

    def _model(self, served: Served, name: str) -> dict[str, Any]:
        return model_object(name, served.created, served.facts.max_model_len, served.facts.model)


async def _admit(served: Served, call: Call) -> None:
    """Wait for the verdict on what constrains the output. Raises RequestError that names the field it came in."""
    params = call.answers[0].request.params
    try:
        seconds = await served.client.admit(params)
    except RequestError as error:
        if error.param != "structured_output":
            raise
        param = await _blamed(served, call)
        raise RequestError(str(error), param=param, code=error.code, status=error.status) from None
    for answer in call.answers:
        answer.request = msgspec.structs.replace(answer.request, grammar_s=seconds)


async def _blamed(served: Served, call: Call) -> str | None:
    """The field of a refused grammar: the one of the text's format, unless that alone is no reason to refuse it."""
    asked = structured_output({name: getattr(call.body, name) for name in FIELDS})
    tools = "tools" if isinstance(call.body, ChatBody) and call.body.tools else None
    if asked is None or tools is None:
        return tools if asked is None else asked[0]
    try:
        await served.client.admit(SamplingParams(structured_output=asked[1]))
    except RequestError:
        return asked[0]
    return tools


async def _chunks(served: Served, call: Call) -> AsyncGenerator[bytes]:
    """The events of a stream, all of a step's in one piece."""
    generation = call.generation
    n = call.answers[0].request.params.n
    options = call.body.stream_options
    with_usage = options is not None and options.include_usage
    running_usage = options is not None and options.continuous_usage_stats
    out = _head(served, call, call.shape.chunk_kind)
    started: set[int] = set()
    async for deltas in generation.steps():
        events = []
        for position, delta in deltas:
            index = position * n + delta.index
            first = index not in started
            if not first and call.shape.silent(delta):
                continue
            chunk = out | {"choices": [call.shape.chunk(index, call.answers[position], delta, first=first)]}
            if running_usage:
                chunk["usage"] = _usage(generation)
            elif with_usage:
                chunk["usage"] = None
            if not started:
                chunk["seed"] = call.seed
            started.add(index)
            events.append(event(chunk))
        if events:
            yield b"".join(events)
    if with_usage or call.body.timing:
        chunk = out | {"choices": []}
        if with_usage:
            chunk["usage"] = _usage(generation)
        if call.body.timing:
            chunk["timing"] = generation.timing()
        yield event(chunk)


def _usage(generation: Generation | BeamGeneration) -> dict[str, Any]:
    return usage(
        generation.prompt_tokens,
        generation.completion_tokens,
        generation.cached_tokens,
        reasoning=sum(answer.reasoning_tokens for answer in generation.answers),
        predicted=sum(answer.predicted_tokens for answer in generation.answers),
        unused_prediction=sum(answer.unused_prediction_tokens for answer in generation.answers),
    )


def _head(served: Served, call: Call, kind: str) -> dict[str, Any]:
    ident = call.shape.id_prefix + secrets.token_hex(12)
    return head(kind, ident, int(time.time()), call.body.model, served.facts.fingerprint)


def _tokenize(served: Served, body: TokenizeBody) -> list[int]:
    if body.prompt is None:
        return list(chat_ids(served, body, None, tools=tool_use(body.tools, None).shown, limit=None))
    add = True if body.add_special_tokens is None else body.add_special_tokens
    return served.text.tokenizer.encode(body.prompt, add_special_tokens=add, parse_special=True)
