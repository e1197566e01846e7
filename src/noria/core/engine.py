"""The engine: requests in, outputs out, one step at a time.

    depth 0   plan n ── launch n ── wait n ── commit n                      outputs of n
    depth 1   plan n+1 ── wait n ── bind n+1 to n ── launch n+1 ── commit n    outputs of n; the device runs n+1 meanwhile

`step()` is synchronous and in-process; a thread, a process, an HTTP server and the simulator are shells around it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from functools import partial
from typing import Any, Protocol

from noria.config import EngineConfig
from noria.core.asking import DraftFacts
from noria.core.audit import audit, dump
from noria.core.commit import Committer
from noria.core.constraint import Constraint, Constraints, fill_masks, is_constrained
from noria.core.costs import CostModel
from noria.core.plan import StepPlan, StepResult
from noria.core.prices import Prices
from noria.core.queue import WaitingQueue
from noria.core.requests import OpenRequests, RequestRecord
from noria.core.scheduler import Scheduler
from noria.core.sequence import Sequence, State
from noria.core.speculate import Speculator
from noria.core.step import Step, bind
from noria.kv.cache import KVCache
from noria.models.spec import LayerGroup
from noria.types import (
    EngineRequest,
    EngineStats,
    FinishReason,
    NoriaError,
    RequestError,
    SequenceOutput,
)

_ENOUGH_STEPS = 100  # that have taught something worth keeping
GRAMMAR_POLL_S = 0.005  # how long a step without other work waits for a grammar, before the shell may look at its messages


class Runner(Protocol):
    """The tensor half, as the engine sees it. Plans run in the order in which they are launched."""

    def launch(self, plan: StepPlan) -> Any:
        """Start a step; returns a ticket. The plan before it has been waited for."""

    def mask(self, fill: Callable[[int, int], None]) -> None:
        """Fill the masks of the step launched last, beside it: `fill(address, bytes of a mask)` on another thread.

        Called once for a plan with masked rows, after `launch` and before `wait`.
        """

    def wait(self, ticket: Any) -> StepResult:
        """Block until the step is done."""

    def close(self) -> None:
        """Stop the device's threads and free its memory."""


class EngineDead(NoriaError):
    """The runner failed, or an invariant is broken: no request can go on.

    `outputs` end all open choices with FinishReason.ERROR; `dump` is the engine's state for the log.
    """

    def __init__(self, cause: str, outputs: list[SequenceOutput], dump: str) -> None:
        super().__init__(f"the engine stopped: {cause}")
        self.outputs = outputs
        self.dump = dump


class Engine:
    """One engine. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_model_len: int,
        groups: tuple[LayerGroup, ...],
        num_blocks: int,
        model_tag: bytes,
        runner: Runner,
        prices: Prices | None = None,
        draft_model: DraftFacts | None = None,
        keep_prices: Callable[[Prices], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_blocks` counts the null block; `model_tag` names all that determines KV bits besides tokens and salt;
        `prices` are what is known of the machine's speed, and at the end `keep_prices` gets what was learned about it;
        `draft_model` tells of the runner's; None: it has none.

        `self.max_model_len` is the longest prompt + output that is served: at most `max_model_len`, and no more than
        one sequence alone can hold in the pool. NoriaError if not even one block of tokens fits.
        """
        budget = config.max_num_batched_tokens
        chunk = min(budget, config.long_prefill_token_threshold or budget)
        self.cache = KVCache(
            groups,
            num_blocks,
            model_tag,
            prefix_caching=config.enable_prefix_caching,
            max_chunk=chunk * (1 + config.async_depth),
        )
        self.max_model_len = self.cache.longest(max_model_len)
        if not self.max_model_len:
            raise NoriaError(
                f"{num_blocks - 1} KV blocks hold no sequence: raise --kv-cache-memory-bytes or lower --max-num-batched-tokens"
            )
        costs = CostModel(prices)
        self.speculator = Speculator(config.speculative_config, costs, draft_model)
        self.queue = WaitingQueue(config.scheduling_policy, config.max_num_queued_reqs)
        self.scheduler = Scheduler(
            self.cache,
            self.queue,
            max_rows=min(config.max_num_seqs, budget),  # each row that decodes needs a token of the budget
            max_tokens=budget,
            max_chunk=chunk,
            max_len=self.max_model_len,
            costs=costs,
            itl_target=config.itl_target_ms / 1000,
            speculator=self.speculator,
        )
        self.requests = OpenRequests(self.scheduler, self.queue, self.speculator)
        self._committer = Committer(self.cache, self.scheduler, self.queue, self.speculator, self.requests)
        self.constraints: Constraints | None = None  # the shell's; without it constrained requests are refused
        self.draining = False
        self._depth = config.async_depth
        self._timeout = config.request_timeout_s
        self._runner = runner
        self._keep_prices = keep_prices
        self._clock = clock
        self._flight: tuple[Step, Any] | None = None  # the step in flight and its ticket
        self._compiling: dict[Sequence, Future[Constraint]] = {}  # sequences in WAITING_GRAMMAR
        self._outputs: list[SequenceOutput] = []  # of the step that is being made
        self._dead: str | None = None
        self._steps = 0

    # What a shell calls

    def add(self, request: EngineRequest) -> None:
        """Queue a request. RequestError if it can never be served, QueueFull if too many wait, 503 while draining."""
        if self._dead:
            raise EngineDead(self._dead, [], "")
        if self.draining:
            raise RequestError("the server is shutting down: send the request to another one", code="draining", status=503)
        if request.request_id in self.records or request.params.seed is None:
            raise ValueError("a request needs an id that is not in use and a seed: both are the shell's to choose")
        if request.pooling is not None and request.params.max_tokens != 0:
            raise ValueError("a request with pooling generates nothing: its max_tokens is 0")
        self._check_prompt(request)
        self.queue.check_room(len(self.scheduler.free_rows))
        constraint = self._constraint_of(request)
        now = self._clock()
        start = min(request.arrival or now, now)
        sequence = Sequence(
            request,
            self.cache.table(request.cache_salt),
            rank=self.queue.rank(request, now),
            priority=self.queue.priority(request),
            max_len=self.max_model_len,
            start=start,
        )
        self.queue.push(sequence)
        if constraint is not None:
            sequence.wait_for_grammar(now)
            self._compiling[sequence] = constraint
        deadlines = [] if request.deadline is None else [request.deadline]
        if self._timeout is not None:
            deadlines.append(start + self._timeout)
        self.requests.add(request, sequence, min(deadlines, default=None))

    def abort(self, request_id: int, index: int | None = None) -> list[SequenceOutput]:
        """End a request now, or one choice of it, whatever it is doing: the last outputs of the choices that this ended.

        [] if it has ended already, and for a choice that is not a sequence of its own yet: before the fork nothing is wasted.
        """
        if index is not None:
            record = self.records.get(request_id)
            if record is None or index not in record.open or index not in record.sequences:
                return []
        return self.requests.end(request_id, FinishReason.ABORT, self._clock(), index)

    def step(self) -> list[SequenceOutput]:
        """Plan, run and commit one step: what it made. EngineDead if the runner fails."""
        if self._dead:
            raise EngineDead(self._dead, [], "")
        try:
            if self._depth:
                self._step_overlapped()
            else:
                self._step_in_turn()
        except Exception as error:
            raise self._die(error) from error
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def records(self) -> dict[int, RequestRecord]:
        """The open requests by id."""
        return self.requests.records

    @property
    def has_work(self) -> bool:
        """Whether requests are open or a step is in flight."""
        return bool(self.records) or self._flight is not None

    def stats(self) -> EngineStats:
        """Gauges and counters now."""
        pool, scheduler = self.cache.pool, self.scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(self.queue),
            kv_usage=pool.referenced / pool.size,
            kv_blocks=pool.size,
            steps=self._steps,
            step_tokens=self._committer.step_tokens,
            iterations=tuple(self._committer.iterations),
            prompt_tokens=self._committer.prompt_tokens,
            generated_tokens=self._committer.generated_tokens,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.preemptions,
            spec_drafts=self.speculator.drafts,
            spec_draft_tokens=self.speculator.draft_tokens,
            spec_accepted_tokens=self.speculator.accepted_tokens,
            finished=dict(self.requests.finished),
        )

    def drain(self) -> None:
        """Take no more requests; those inside go on. `has_work` tells when they have ended."""
        self.draining = True

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.cache.reset(sequence.kv for sequence in (*self.scheduler.running, *self.scheduler.leaving))

    def audit(self) -> None:
        """Check every invariant; AuditError with a dump if one is broken. Takes time proportional to the pool."""
        audit(self.records, self.scheduler)

    def close(self) -> None:
        """Stop the runner, and keep what was learned about its speed."""
        self._runner.close()
        costs = self.scheduler.costs
        if self._keep_prices is not None and costs.steps >= _ENOUGH_STEPS:
            self._keep_prices(costs.prices)

    # One step

    def _step_in_turn(self) -> None:
        now = self._clock()
        self._outputs += self.requests.expire(now)
        self._take_constraints(now)
        step = self.scheduler.schedule(now)
        if step is not None:
            self._steps += 1
            ticket = self._runner.launch(step.plan)
            self._mask(step, step.plan)
            self._commit(step, self._runner.wait(ticket))
        elif self.records:
            self._await_constraint()

    def _step_overlapped(self) -> None:
        now = self._clock()
        self._outputs += self.requests.expire(now)
        self._take_constraints(now)
        flight, step = self._flight, self.scheduler.schedule(now)
        self._flight = None
        if flight is None and step is None and self.records:
            self._await_constraint()
        result = None if flight is None else self._runner.wait(flight[1])
        if step is not None:
            self._steps += 1
            plan = bind(step.plan, step.late, result.rows) if result is not None and step.late else step.plan
            self._flight = (step, self._runner.launch(plan))
        if flight is not None and result is not None:
            self._commit(flight[0], result)
        if step is not None:
            self._mask(step, plan)  # after the commit, which tells the constraints what was drawn

    def _commit(self, step: Step, result: StepResult) -> None:
        self._committer.commit(step, result, self._clock(), self._outputs)

    # Constraints

    def _constraint_of(self, request: EngineRequest) -> Future[Constraint] | None:
        if not is_constrained(request):
            return None
        if self.constraints is None:
            raise RequestError(
                "this engine cannot constrain its output: it was not given a vocabulary", param="structured_output"
            )
        return self.constraints.prepare(request)

    def _take_constraints(self, now: float) -> None:
        """Let the sequences go on whose constraint is ready, and end those of which it could not be made."""
        for sequence, future in list(self._compiling.items()):
            if sequence.state is State.FINISHED:
                del self._compiling[sequence]
            elif future.done():
                del self._compiling[sequence]
                error = future.exception()
                if error is None:
                    sequence.grammar_ready(future.result(), now)
                elif isinstance(error, RequestError):
                    self._outputs += self.requests.end(sequence.request.request_id, FinishReason.ERROR, now, error=str(error))
                else:
                    raise error

    def _await_constraint(self) -> None:
        """Nothing can be computed: some request waits for its grammar, or an invariant is broken."""
        if not self._compiling:
            raise RuntimeError("requests are open, and none of them can go on")
        wait_for(self._compiling.values(), GRAMMAR_POLL_S, FIRST_COMPLETED)

    def _mask(self, step: Step, plan: StepPlan) -> None:
        """Have the masks of a launched step filled, if it has masked rows."""
        parts: list[tuple[Constraint, tuple[int, ...]]] = []
        for entry, row in zip(step.entries, plan.rows, strict=True):
            if row.masked:
                assert entry.sequence.constraint is not None
                parts.append(
                    (entry.sequence.constraint, row.tokens[len(row.tokens) - row.samples + 1 :] if row.samples > 1 else ())
                )
        if parts:
            self._runner.mask(partial(fill_masks, parts))

    def _check_prompt(self, request: EngineRequest) -> None:
        length, most = len(request.prompt), self.max_model_len
        if not length:
            raise RequestError("the prompt is empty: give it at least one token", param="prompt")
        if min(request.prompt) < 0 or max(request.prompt) >= 2**31:
            raise RequestError("a token id of the prompt is not in the vocabulary", param="prompt")
        if length + (request.params.max_tokens != 0) > most:
            raise RequestError(
                f"the prompt has {length} tokens, and at most {most} of prompt and output are served: shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )

    def _die(self, error: Exception) -> EngineDead:
        """End everything: the exception for the shell. Touches no invariant, since one may be broken."""
        self._dead = f"{type(error).__name__}: {error}".splitlines()[0]
        ended = [
            SequenceOutput(request_id=request_id, index=index, finish_reason=FinishReason.ERROR, error=self._dead)
            for request_id, record in self.records.items()
            for index in sorted(record.open)
        ]
        self.records.clear()
        self._flight = None
        return EngineDead(self._dead, self._outputs + ended, dump(self.scheduler))
