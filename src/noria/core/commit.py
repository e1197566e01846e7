"""What a step computed becomes tokens of sequences, committed blocks, and outputs.

row's result ── drafts verified ── KV committed ── tokens accepted ──► output; stop, length, constraint or fork
"""

from __future__ import annotations

import msgspec

from noria.core.costs import Work
from noria.core.plan import RowResult, StepResult
from noria.core.queue import WaitingQueue
from noria.core.requests import OpenRequests
from noria.core.scheduler import Scheduler
from noria.core.sequence import Sequence, State
from noria.core.speculate import Speculator
from noria.core.step import Entry, Step
from noria.kv.cache import KVCache
from noria.types import FinishReason, Phase, SequenceOutput, TokenLogprobs


class Committer:
    """Takes in results, in the order of their steps, and counts."""

    def __init__(
        self, cache: KVCache, scheduler: Scheduler, queue: WaitingQueue, speculator: Speculator, requests: OpenRequests
    ) -> None:
        self.step_tokens = self.prompt_tokens = self.generated_tokens = 0
        self.iterations = [0] * 17  # steps by their tokens: at most 1, 2, 4, ... 65536
        self._cache = cache
        self._scheduler = scheduler
        self._queue = queue
        self._speculator = speculator
        self._requests = requests

    def commit(self, step: Step, result: StepResult, now: float, outputs: list[SequenceOutput]) -> None:
        """Take in what a step computed and sampled, and add to `outputs`, which are valid even if this raises.

        Samples of a sequence that has ended meanwhile are dropped.
        """
        if result.step != step.plan.step:
            raise RuntimeError(f"the runner answered step {result.step} when asked for step {step.plan.step}")
        scheduler, commit = self._scheduler, self._cache.commit
        self._speculator.cost.learn(step.work, result.seconds)
        scheduler.costs.learn(step.work, result.seconds)
        if result.draft_seconds:
            self._learn_pass(step, result.draft_seconds)
        self.step_tokens += step.work.tokens
        self.iterations[(step.work.tokens - 1).bit_length()] += 1
        for entry, row in zip(step.entries, result.rows, strict=True):
            sequence = entry.sequence
            sequence.in_flight -= entry.count
            sequence.computed = entry.end
            sequence.pending -= entry.samples
            if entry.samples > 1:
                self._verify(entry, row)
            elif entry.end >= sequence.kv.due:
                commit(sequence.kv, sequence.tokens, entry.end)
            if row.prompt_logprobs:
                sequence.prompt_logprobs += row.prompt_logprobs
                sequence.unscored = len(sequence.prompt_logprobs) < sequence.prompt_length - 1
            if sequence.state is not State.FINISHED:
                if entry.streams:
                    outputs += self._draw_choices(entry, row, now)
                elif entry.samples > 1:
                    outputs.append(self._accept_run(sequence, row, now))
                elif entry.samples:
                    outputs.append(self._accept(sequence, row.tokens[0], row.logprobs, now))
                elif entry.end == sequence.limit:  # max_tokens is 0: a prompt to be scored, not continued
                    outputs += self._finish_scored(sequence, row.embedding, now)
            if entry.asks:
                sequence.asked = False
                if sequence.state is State.RUNNING:
                    self._speculator.receive(sequence, row.drafts)
            if sequence.state is not State.RUNNING:
                scheduler.settle(sequence)

    def _learn_pass(self, step: Step, seconds: float) -> None:
        ends = [entry.end for entry in step.entries if entry.asks]
        self._speculator.learn_pass(Work(len(ends), sum(ends), sum(ends), len(ends)), seconds)

    def _verify(self, entry: Entry, row: RowResult) -> None:
        """Commit the KV of accepted drafts; that of the others lies beyond what is computed, and will be written again."""
        sequence, accepted = entry.sequence, len(row.tokens) - 1
        self._speculator.verified(entry.samples - 1, accepted)
        sequence.computed -= entry.samples - 1 - accepted
        sequence.sent += accepted
        if sequence.computed >= sequence.kv.due:
            self._cache.commit(sequence.kv, [*sequence.tokens, *row.tokens[:accepted]], sequence.computed)

    def _accept_run(self, sequence: Sequence, row: RowResult, now: float) -> SequenceOutput:
        """Accepted drafts and the token behind them, one after the other, until one of them ends the choice."""
        made = []
        for place, token in enumerate(row.tokens):
            made.append(self._accept(sequence, token, row.logprobs[place : place + 1], now))
            if sequence.state is State.FINISHED:
                break
        return msgspec.structs.replace(
            made[-1],
            tokens=tuple([token for output in made for token in output.tokens]),
            logprobs=tuple([entry for output in made for entry in output.logprobs]),
            prompt_logprobs=made[0].prompt_logprobs,
        )

    def _accept(self, sequence: Sequence, token: int, logprobs: tuple[TokenLogprobs, ...], now: float) -> SequenceOutput:
        """One more token of a choice, and its end if that is it."""
        tokens = sequence.tokens
        first = len(tokens) == sequence.prompt_length
        tokens.append(token)
        self.generated_tokens += 1
        if self._queue.fair:
            self._queue.charge_output(sequence, 1)
        if sequence.phase is Phase.PREFILL:
            sequence.stamp(Phase.DECODE, now)
        prompt_logprobs = None
        if first and sequence.index == 0:
            self.prompt_tokens += sequence.prompt_length
            prompt_logprobs = _scores(sequence)
        output_tokens = len(tokens) - sequence.prompt_length
        request = sequence.request
        stopped = token in request.stop_ids and output_tokens > sequence.params.min_tokens
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH if len(tokens) >= sequence.limit else None
        constraint = sequence.constraint
        if constraint is not None:
            if not stopped:
                constraint.accept(token)
            reason = FinishReason.ERROR if constraint.failure else FinishReason.STOP if constraint.ended else reason
        if reason is not None:
            self._scheduler.growth.finished(output_tokens)
            return self._requests.finish(
                sequence,
                reason,
                now,
                tokens=(token,),
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                stop_token=token if stopped else None,
                error=None if constraint is None else constraint.failure,
            )
        return SequenceOutput(
            request_id=request.request_id,
            index=sequence.index,
            tokens=(token,),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _draw_choices(self, entry: Entry, row: RowResult, now: float) -> list[SequenceOutput]:
        """The first tokens of all choices. Those that go on are forked before choice 0 might end and free its blocks."""
        parent = entry.sequence
        record = self._requests.records[parent.request.request_id]
        forks = []
        for place, index in enumerate(entry.streams, 1):
            child = parent.choice(index, self._cache.table(parent.request.cache_salt))
            record.sequences[index] = child
            forks.append(self._accept(child, row.tokens[place], row.logprobs[place : place + 1], now))
            if child.state is not State.FINISHED:
                self._scheduler.fork(parent, child, now)
        return [self._accept(parent, row.tokens[0], row.logprobs[:1], now), *forks]

    def _finish_scored(self, sequence: Sequence, embedding: bytes, now: float) -> list[SequenceOutput]:
        """End all choices of a request with max_tokens 0: they differ in nothing."""
        self.prompt_tokens += sequence.prompt_length
        first, *others = self._requests.end(sequence.request.request_id, FinishReason.LENGTH, now)
        first = msgspec.structs.replace(first, prompt_logprobs=_scores(sequence), embedding=embedding)
        return [first, *others]


def _scores(sequence: Sequence) -> tuple[TokenLogprobs, ...] | None:
    """The logprobs of prompt[1:], if they were asked for."""
    return None if sequence.params.prompt_logprobs is None else tuple(sequence.prompt_logprobs)
