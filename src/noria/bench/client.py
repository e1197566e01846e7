"""A load generator: sends sessions when they are due, to an OpenAI-compatible server or to an engine process of our own.

With a request rate the loop is *open*: a session is sent when it is due whatever the server is doing, and latency counts from
that time, also where a request had to wait for `max_concurrency`. At an infinite rate the loop is *closed*: with a bound on
concurrency the next request is due when an earlier one has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import orjson

from noria.bench.http import HttpClient, HttpError
from noria.bench.report import RequestTimes
from noria.bench.workload import Prompt, Session, Turn
from noria.server.answer import engine_request
from noria.server.client import EngineClient
from noria.server.wire import EngineFacts
from noria.types import FinishReason, NoriaError, SamplingParams

Said = list[tuple[Prompt, Prompt]]  # the (prompt, answer) pairs of a session so far
Progress = Callable[[int], None]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Target(Protocol):
    """Where the load goes."""

    async def send(self, turn: Turn, said: Said, times: RequestTimes) -> None:
        """One request, greedily, its times noted as its tokens come. Raises NoriaError."""


async def drive(
    target: Target,
    sessions: Sequence[Session],
    *,
    open_loop: bool,
    max_concurrency: int | None = None,
    progress: Progress = lambda count: None,
) -> tuple[list[RequestTimes], float]:
    """Send every session; returns the requests' times, sessions in order, and the wall time in seconds.

    A request that fails is noted in `error`; it ends its session, and the others go on.
    """
    limit = asyncio.Semaphore(max_concurrency or sum(len(s.turns) for s in sessions) or 1)
    began, done = time.perf_counter(), 0

    async def run(session: Session) -> list[RequestTimes]:
        nonlocal done
        requests: list[RequestTimes] = []
        said: Said = []
        due = began + session.arrival
        await asyncio.sleep(due - time.perf_counter())
        for turn in session.turns:
            async with limit:
                times = await _one(target, turn, said, due if open_loop else time.perf_counter())
            requests.append(times)
            done += 1
            progress(done)
            if times.error is not None:
                break
            said.append((turn.prompt, times.answer))
            due = time.perf_counter()
        return requests

    parts = await asyncio.gather(*(run(session) for session in sessions))
    return [times for part in parts for times in part], time.perf_counter() - began


async def _one(target: Target, turn: Turn, said: Said, due: float) -> RequestTimes:
    times = RequestTimes(scheduled=due, sent=time.perf_counter(), input_tokens=0)
    try:
        await target.send(turn, said, times)
        if not times.token_times:
            raise HttpError("the answer had no tokens")
    except NoriaError as error:
        times.error = str(error)
    times.ended = time.perf_counter()
    return times


class ServerTarget:
    """An OpenAI-compatible server: `/v1/completions` with token ids or text, or `/v1/chat/completions` with text."""

    def __init__(self, client: HttpClient, *, model: str, endpoint: str, ignore_eos: bool) -> None:
        self._client = client
        self._model = model
        self._chat = endpoint.endswith("/chat/completions")
        self._endpoint = endpoint
        self._ignore_eos = ignore_eos

    async def send(self, turn: Turn, said: Said, times: RequestTimes) -> None:
        answer = _StreamedAnswer(times)
        await self._client.post(self._endpoint, orjson.dumps(self._body(turn, said)), answer.take_line)
        if not answer.done:
            raise HttpError("the stream ended before [DONE]")
        times.answer = "".join(answer.text)
        times.output_tokens = times.output_tokens or len(times.token_times)

    def _body(self, turn: Turn, said: Said) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": turn.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:
            body["ignore_eos"] = True
        if self._chat:
            pairs = [({"role": "user", "content": q}, {"role": "assistant", "content": a}) for q, a in said]
            body["messages"] = [*(m for pair in pairs for m in pair), {"role": "user", "content": turn.prompt}]
        else:
            body["prompt"] = turn.prompt
        return body


class _StreamedAnswer:
    """Server-sent events of one answer, read line by line."""

    def __init__(self, times: RequestTimes) -> None:
        self.text: list[str] = []
        self.done = False
        self._times = times

    def take_line(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.done = True
            return
        now = time.perf_counter()
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise HttpError(f"an event is not JSON: {data[:100]!r}") from None
        if event.get("error"):
            raise HttpError(str(event["error"])[:300])
        self._take_usage(event.get("usage"))
        for choice in event.get("choices") or ():
            delta = choice.get("delta")
            text = choice.get("text") if delta is None else delta.get("content") or delta.get("reasoning_content")
            if text:
                self.text.append(text)
            if text or (delta is None and not choice.get("finish_reason")):
                self._times.token_times.append(now)  # a completion's event without text: tokens that end inside a character

    def _take_usage(self, usage: Any) -> None:
        if isinstance(usage, dict):
            self._times.output_tokens = int(usage.get("completion_tokens") or 0)
            self._times.input_tokens = int(usage.get("prompt_tokens") or 0)
            details = usage.get("prompt_tokens_details") or {}
            self._times.cached_tokens = int(details.get("cached_tokens") or 0)


class EngineTarget:
    """An engine process of this program, as the HTTP server drives it, without HTTP and text."""

    def __init__(self, client: EngineClient, facts: EngineFacts, *, ignore_eos: bool) -> None:
        self._client = client
        self._facts = facts
        self._ignore_eos = ignore_eos
        self._next_id = 0

    async def send(self, turn: Turn, said: Said, times: RequestTimes) -> None:
        prompt = tuple(token for part in (*(p for pair in said for p in pair), turn.prompt) for token in part)
        times.input_tokens = len(prompt)
        self._next_id += 1
        request = engine_request(
            self._next_id,
            prompt,  # type: ignore[arg-type]  # an engine's prompts are ids
            SamplingParams(max_tokens=turn.max_tokens, temperature=0.0, ignore_eos=self._ignore_eos, seed=0),
            eos_ids=self._facts.eos_ids,
            max_model_len=self._facts.max_model_len,
            arrival=time.monotonic(),
        )
        tokens: list[int] = []
        async for outputs in self._client.generate(request):
            now = time.perf_counter()
            for output in outputs:
                tokens += output.tokens
                times.token_times += [now] * len(output.tokens)
                if output.finish_reason is not None:
                    times.cached_tokens = output.cached_tokens
                if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT, FinishReason.TIMEOUT):
                    raise NoriaError(f"ended with {output.finish_reason}: {output.error or ''}")
        times.output_tokens, times.answer = len(tokens), tuple(tokens)
