"""The requests that are open, and how their choices end: each has exactly one terminal output."""

from __future__ import annotations

import heapq

from noria.core.queue import WaitingQueue
from noria.core.scheduler import Scheduler
from noria.core.sequence import Sequence, State
from noria.core.speculate import Speculator
from noria.types import EngineRequest, FinishReason, SequenceOutput, TokenLogprobs


class RequestRecord:
    """A request with open choices. A choice that is not drawn yet has no sequence of its own: choice 0 stands for it."""

    __slots__ = ("open", "request", "sequences")

    def __init__(self, request: EngineRequest, first: Sequence) -> None:
        self.request = request
        self.sequences = {0: first}
        self.open = set(range(request.params.n))


class OpenRequests:
    """The records of one engine, and their deadlines."""

    def __init__(self, scheduler: Scheduler, queue: WaitingQueue, speculator: Speculator) -> None:
        self.records: dict[int, RequestRecord] = {}
        self.finished: dict[str, int] = {}  # requests by the reason of their last choice
        self._scheduler = scheduler
        self._queue = queue
        self._speculator = speculator
        self._deadlines: list[tuple[float, int]] = []  # a heap of (time, request id); ended requests stay until then

    def add(self, request: EngineRequest, first: Sequence, deadline: float | None) -> None:
        """A request with its first sequence, to be ended at `deadline`."""
        self.records[request.request_id] = RequestRecord(request, first)
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, request.request_id))

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        *,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None,
        stop_token: int | None = None,
        error: str | None = None,
    ) -> SequenceOutput:
        """End a choice that has a sequence: its terminal output."""
        self._scheduler.finish(sequence, now)
        record = self.records[sequence.request.request_id]
        self._close_choice(record, sequence.index, reason, now)
        return SequenceOutput(
            request_id=sequence.request.request_id,
            index=sequence.index,
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_token=stop_token,
            error=error,
            cached_tokens=max(sequence.cached_tokens, 0),
            cache_miss=sequence.cache_miss,
            phases=tuple(sequence.parts),
            preemptions=sequence.preemptions,
            predicted_tokens=self._speculator.foreseen(sequence),
        )

    def end(
        self, request_id: int, reason: FinishReason, now: float, only: int | None = None, *, error: str | None = None
    ) -> list[SequenceOutput]:
        """End all open choices of a request, or only one: their terminal outputs."""
        record = self.records.get(request_id)
        if record is None:
            return []
        outputs = []
        for index in sorted(record.open) if only is None else (only,):
            sequence = record.sequences.get(index, record.sequences[0])
            if sequence.state is not State.FINISHED:
                self._scheduler.finish(sequence, now)
            self._close_choice(record, index, reason, now)
            outputs.append(
                SequenceOutput(
                    request_id=request_id,
                    index=index,
                    finish_reason=reason,
                    error=error,
                    cached_tokens=max(sequence.cached_tokens, 0),
                    cache_miss=sequence.cache_miss,
                    phases=tuple(sequence.parts),
                    preemptions=sequence.preemptions,
                    predicted_tokens=self._speculator.foreseen(sequence) if sequence.index == index else 0,
                )
            )
        return outputs

    def expire(self, now: float) -> list[SequenceOutput]:
        """End the requests whose deadline has passed."""
        outputs: list[SequenceOutput] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            outputs += self.end(request_id, FinishReason.TIMEOUT, now)
        return outputs

    def _close_choice(self, record: RequestRecord, index: int, reason: FinishReason, now: float) -> None:
        """Count off a choice; with the last one the request is over."""
        record.open.remove(index)
        if not record.open:
            del self.records[record.request.request_id]
            self.finished[reason.value] = self.finished.get(reason.value, 0) + 1
            self._queue.finished(now)
