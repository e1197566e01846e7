"""BeamGeneration: a client call with beam search, for those who read a `Generation`.

Round by round, all live beams of all prompts run in the engine at once; the choices come in one piece at the end. The metrics
count what the client asked for, not the requests of the rounds.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from noria.observe.metrics import Metrics
from noria.observe.timeline import timeline
from noria.server.answer import Answer
from noria.server.beams import BeamSearch
from noria.server.client import EngineClient
from noria.server.exchange import current_exchange
from noria.server.generation import Deltas, Generation
from noria.text.tokenizer import Tokenizer
from noria.types import FinishReason, RequestError, SamplingParams, TokenLogprobs


class Uncounted:
    """Takes a generation's counts and forgets them."""

    def prefilled(self, prompt_tokens: int, seconds: float) -> None:
        """As `Metrics`."""

    def generated(self, tokens: int, seconds: float | None) -> None:
        """As `Metrics`."""

    def finished(self, reason: FinishReason, seconds: float, phases: Sequence[float]) -> None:
        """As `Metrics`."""


class _Prompt:
    """One prompt of the call: its search, and what its first round told."""

    def __init__(self, answer: Answer, search: BeamSearch) -> None:
        self.answer = answer
        self.search = search
        self.cached_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self.counted = False


class BeamGeneration:
    """Has the interface of `Generation`. `timeout_s` is the engine's deadline, here for the call as a whole."""

    def __init__(
        self,
        client: EngineClient,
        metrics: Metrics,
        tokenizer: Tokenizer,
        answers: Sequence[Answer],
        *,
        next_request_id: Callable[[], int],
        max_model_len: int,
        length_penalty: float,
        timeout_s: float | None,
    ) -> None:
        self.answers = answers
        self._client = client
        self._metrics = metrics
        self._tokenizer = tokenizer
        self._exchange = current_exchange()
        self._next_request_id = next_request_id
        self._arrival = answers[0].request.arrival
        self._deadline = None if timeout_s is None else self._arrival + timeout_s
        self._prompts = [
            _Prompt(answer, BeamSearch(answer.request, max_model_len=max_model_len, length_penalty=length_penalty))
            for answer in answers
        ]
        self._phases: tuple[float, ...] = ()  # summed over the rounds
        self._round: Generation | None = None
        self._aborted = False

    async def steps(self) -> AsyncGenerator[Deltas]:
        """All deltas at once, at the end. Raises RequestError as `Generation` does."""
        try:
            first = True
            while not self._aborted and (open_prompts := [p for p in self._prompts if not p.search.done]):
                await self._run_round(open_prompts, first=first)
                first, self._exchange.prompts_counted = False, True
            if not self._aborted:
                yield [delta for position, prompt in enumerate(self._prompts) for delta in self._show(position, prompt)]
        except RequestError as error:
            self._count_all(FinishReason.TIMEOUT if error.code == "timeout" else FinishReason.ERROR)
            raise
        finally:
            self._count_all(FinishReason.ABORT)

    def abort(self) -> None:
        """End the round that runs, and start no other."""
        self._aborted = True
        if self._round is not None:
            self._round.abort()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(answer.request.prompt) for answer in self.answers)

    @property
    def completion_tokens(self) -> int:
        """Tokens of the beams that are returned."""
        return sum(answer.completion_tokens for answer in self.answers)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were in the prefix cache before the search began."""
        return sum(prompt.cached_tokens for prompt in self._prompts)

    def timing(self) -> dict[str, float]:
        """Where the time of the call went until now; what lies between the rounds is delivery."""
        return timeline(self._phases, time.monotonic() - self._arrival)

    async def _run_round(self, prompts: Sequence[_Prompt], *, first: bool) -> None:
        """One token for every live beam of the prompts."""
        began = time.monotonic()
        rounds = [[self._answer(p, *asked, began) for asked in p.search.requests()] for p in prompts]
        self._round = Generation(self._client, Uncounted(), [answer for answers in rounds for answer in answers])
        entries: dict[int, TokenLogprobs] = {}
        async for deltas in self._round.steps():
            entries.update((position, entry) for position, delta in deltas for entry in delta.logprobs)
        if self._aborted:
            return
        phases = self._round.phases
        self._phases = tuple(map(sum, zip(self._phases, phases, strict=True))) if self._phases else phases
        position = 0
        for prompt, answers in zip(prompts, rounds, strict=True):
            prompt.search.advance([entries[position + i] for i in range(len(answers))])
            position += len(answers)
            if first:
                prompt.cached_tokens, prompt.prompt_logprobs = answers[0].cached_tokens, answers[0].prompt_logprobs
                self._metrics.prefilled(len(prompt.answer.request.prompt), time.monotonic() - self._arrival)

    def _answer(self, prompt: _Prompt, ids: tuple[int, ...], params: SamplingParams, now: float) -> Answer:
        request = msgspec.structs.replace(
            prompt.answer.request,
            request_id=self._next_request_id(),
            prompt=ids,
            params=params,
            stop_ids=(),
            arrival=now,
            deadline=self._deadline,
        )
        return Answer(self._tokenizer, request)

    def _show(self, position: int, prompt: _Prompt) -> Deltas:
        """The choices of one prompt, as if the engine had made each in one step."""
        answer = prompt.answer
        outputs = prompt.search.outputs(prompt.prompt_logprobs, prompt.cached_tokens, self._phases)
        deltas = [(position, delta) for output in outputs if (delta := answer.take(output)) is not None]
        self._metrics.generated(answer.completion_tokens, None)
        self._count(prompt, answer.reason)
        return deltas

    def _count(self, prompt: _Prompt, reason: FinishReason) -> None:
        """Count how a prompt ended, once."""
        if not prompt.counted:
            prompt.counted = True
            self._metrics.finished(reason, time.monotonic() - self._arrival, self._phases)

    def _count_all(self, reason: FinishReason) -> None:
        for prompt in self._prompts:
            self._count(prompt, reason)
