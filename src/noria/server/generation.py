"""Generation: the requests of one client call in the engine, as deltas, with their accounting.

One call may hold several prompts; each is an EngineRequest of its own, and all are read by one task that wakes once a step.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

import msgspec

from noria.kv.misses import NEVER_SEEN, OTHER_ROOT
from noria.observe.timeline import timeline
from noria.server.answer import Answer, Delta
from noria.server.client import EngineClient, EngineDead
from noria.server.exchange import current_exchange
from noria.types import FinishReason, RequestError, SequenceOutput

Deltas = list[tuple[int, Delta]]  # (position of the prompt in the call, delta), in the order they were made


class Accounts(Protocol):
    """Whom a generation tells what it did: `noria.observe.metrics.Metrics`, or a caller that counts by itself."""

    def prefilled(self, prompt_tokens: int, seconds: float) -> None:
        """A request's first token came."""

    def generated(self, tokens: int, seconds: float | None) -> None:
        """More tokens of a choice came."""

    def finished(self, reason: FinishReason, seconds: float, phases: Sequence[float]) -> None:
        """A request ended."""


class Generation:
    """Runs `answers` to their ends. Iterate over `steps()`; call `abort()` when nobody waits any more."""

    def __init__(self, client: EngineClient, metrics: Accounts, answers: Sequence[Answer]) -> None:
        self.answers = answers
        self._client = client
        self._metrics = metrics
        self._arrival = answers[0].request.arrival
        self._positions = {answer.request.request_id: i for i, answer in enumerate(answers)}
        self._open = set(range(len(answers)))  # answers that are not counted yet
        self._prefilled: set[int] = set()
        self._last_tokens: dict[tuple[int, int], float] = {}  # when each choice had its last tokens
        self._last = answers[-1]  # the answer that the engine finished last
        self._aborted = False
        self._exchange = current_exchange()
        self._admitted = False

    async def steps(self) -> AsyncGenerator[Deltas]:
        """The deltas of each step that had some. Returns when the engine has finished every request.

        Raises RequestError if a request was refused, or failed; what was still open is aborted then.
        """
        try:
            await self.admit()
            if self._aborted:
                return
            stream = self._client.generate(*(answer.request for answer in self.answers))
            async for outputs in stream:
                now = time.monotonic()
                deltas: Deltas = []
                for output in outputs:
                    position = self._positions[output.request_id]
                    delta = self._take(position, output, now)
                    if delta is not None:
                        deltas.append((position, delta))
                if deltas:
                    yield deltas
        except EngineDead as error:
            self._give_up(FinishReason.ERROR)
            raise RequestError(f"{error}; the server is shutting down", status=500, code="engine_dead") from None
        except RequestError:
            self._open.clear()  # refused requests are none that ended
            self._client.abort(*self._positions)
            raise
        finally:
            self._give_up(FinishReason.ABORT)
        self._raise_failure()

    async def admit(self) -> None:
        """Wait until what constrains the output has been judged: `steps` begins with it, if it has not been awaited before.

        Raises RequestError. An endpoint that sends something before the first delta awaits this first.
        """
        if self._admitted:
            return
        for answer in self.answers:
            seconds = await self._client.admit(answer.request.params)
            if seconds and not answer.request.grammar_s:
                answer.request = msgspec.structs.replace(answer.request, grammar_s=seconds)
        self._admitted = True

    def abort(self) -> None:
        """End all requests of the call: `steps` then ends within a step."""
        self._aborted = self._exchange.aborted = True
        self._client.abort(*self._positions)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(answer.request.prompt) for answer in self.answers)

    @property
    def completion_tokens(self) -> int:
        """Tokens returned so far."""
        return sum(answer.completion_tokens for answer in self.answers)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were in the prefix cache, as far as it is known: a request says so at its end."""
        return sum(answer.cached_tokens for answer in self.answers)

    def timing(self) -> dict[str, Any]:
        """Where the time of the call went until now, by the request that ended last: seconds by phase, and its cache use."""
        last = self._last
        parts: dict[str, Any] = dict(timeline(last.phases, time.monotonic() - self._arrival))
        # Clients do not learn what is known under another tenant's salt: that would undo what salts are for.
        miss = NEVER_SEEN if last.cache_miss == OTHER_ROOT else last.cache_miss
        parts["cache"] = {"cached_tokens": last.cached_tokens, "miss": miss or None}
        return parts

    @property
    def phases(self) -> tuple[float, ...]:
        """Seconds by `Phase` of the request that ended last."""
        return self._last.phases

    def _take(self, position: int, output: SequenceOutput, now: float) -> Delta | None:
        """One output: its delta, the choice's abort once its text has ended, and the counts."""
        answer = self.answers[position]
        delta = answer.take(output)
        if position not in self._prefilled and (output.tokens or output.finish_reason is FinishReason.LENGTH):
            self._prefilled.add(position)
            self._metrics.prefilled(len(answer.request.prompt), now - self._arrival)
        if delta is not None and delta.tokens:
            self._exchange.generated(len(delta.tokens), now)
            before = self._last_tokens.get((position, delta.index))
            self._last_tokens[position, delta.index] = now
            self._metrics.generated(len(delta.tokens), None if before is None else now - before)
        if answer.closed:
            self._close(position, answer.failure or answer.reason, now)
        elif delta is not None and delta.finish_reason is not None and output.finish_reason is None:
            self._client.abort_choice(output.request_id, output.index)  # a stop string, which the engine does not know
        return delta

    def _close(self, position: int, reason: FinishReason, now: float) -> None:
        """The engine has finished a request: count it, once."""
        self._open.remove(position)
        self._last = self.answers[position]
        self._metrics.finished(reason, now - self._arrival, self._last.phases)
        self._exchange.finished(self._last.phases, self._last.cached_tokens, self._last.cache_miss)

    def _give_up(self, reason: FinishReason) -> None:
        """Count and abort what is still open, if the reader leaves early or the engine is gone."""
        now = time.monotonic()
        for position in list(self._open):
            self._client.abort(self.answers[position].request.request_id)
            self._close(position, reason, now)

    def _too_late(self) -> RequestError:
        """Past a deadline: the client's own, or the server's."""
        deadline = self._exchange.deadline
        if deadline is not None and time.monotonic() >= deadline:
            return RequestError("the request took longer than its X-Noria-Timeout", status=408, code="timeout")
        return RequestError("the request reached its deadline (--request-timeout-s)", status=503, code="timeout")

    def _raise_failure(self) -> None:
        """The error that a failed request is told as. Nobody is there to hear it after our own abort."""
        for answer in self.answers:
            if answer.failure is FinishReason.TIMEOUT:
                raise self._too_late()
            if answer.failure is FinishReason.ERROR:
                text = answer.failure_text or "unknown"
                raise RequestError(f"the engine could not go on with this request: {text}", status=500)
            if answer.failure is FinishReason.ABORT and not self._aborted:
                raise RequestError("the server is shutting down", status=503, code="draining")
