"""The runner: executes StepPlans on a backend."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from noria.backends.base import Backend, Drawn, Executable, StepInputs
from noria.core.plan import RowResult, StepPlan, StepResult
from noria.runner.draft_model import DraftModel, asks_of
from noria.runner.draws import StepDraws, row_results
from noria.runner.masks import Fill, MaskThread, step_masks
from noria.runner.rows import Rows
from noria.runner.steady import SteadyInputs


class Ticket:
    """A launched step. `Runner.wait` turns it into its result, once."""

    def __init__(self, plan: StepPlan, draws: StepDraws | None, work: Callable[[], tuple[Drawn, float]] | None) -> None:
        self.plan = plan
        self.draws = draws
        self.work = work


class Runner:
    """Runs plans one after the other, in the order of a plan's fields.

    With `depth` 0 the step runs inside `wait`, on the caller's thread. With `depth` 1 it runs on a thread of the runner from
    `launch` on, so that the caller can plan the next step meanwhile; the tables change only in `launch`, when no step runs.
    """

    def __init__(
        self, executable: Executable, backend: Backend, rows: Rows, *, depth: int = 0, draft: DraftModel | None = None
    ) -> None:
        self._draft = draft
        self._executable = executable
        self._backend = backend
        self._rows = rows
        self._inputs = SteadyInputs(rows)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="noria-step") if depth else None
        self._running: Future[tuple[Drawn, float]] | None = None
        self._masks = MaskThread()

    def launch(self, plan: StepPlan) -> Ticket:
        """Apply the plan to the tables and start its step."""
        assert self._running is None or self._running.done(), "a step was launched while another was running"
        rows = self._rows
        for row in plan.freed_rows:
            rows.free(row)
            if self._draft is not None:
                self._draft.free(row)
        for new in plan.new_rows:
            rows.take(new)
            if self._draft is not None:
                self._draft.take(new)
        for row, group, blocks in plan.released:
            rows.release(row, group, blocks)
        for row, group, index, block in plan.replaced:
            rows.replace(row, group, index, block)
        if plan.copies:
            self._backend.copy_blocks(plan.copies)
        for planned in plan.rows:
            rows.append(planned)
        if not plan.rows:
            return Ticket(plan, None, None)
        inputs, draws = self._inputs.build(plan)
        inputs.draws.masks = step_masks(plan.rows, draws.rows, len(inputs.draws), rows.vocab_size)
        self._masks.expect(inputs.draws.masks)
        if self._thread is None:
            return Ticket(plan, draws, lambda: self._run(inputs))
        self._running = self._thread.submit(self._run, inputs)
        return Ticket(plan, draws, self._running.result)

    def mask(self, fill: Fill) -> None:
        """Fill the masks of the step launched last, on a thread of the runner. Before `wait`, if its plan has masked rows."""
        self._masks.fill(fill)

    def _run(self, inputs: StepInputs) -> tuple[Drawn, float]:
        begin = time.perf_counter()
        drawn = self._executable.run(inputs)
        return drawn, time.perf_counter() - begin

    def wait(self, ticket: Ticket) -> StepResult:
        """The result of a launched step, when it is there."""
        if ticket.work is None or ticket.draws is None:
            return StepResult(step=ticket.plan.step, rows=())
        drawn, seconds = ticket.work()
        self._masks.finished()
        rows = row_results(ticket.plan, ticket.draws, drawn, self._rows)
        rows, draft_seconds = self._drafted(ticket.plan, rows)
        return StepResult(step=ticket.plan.step, rows=rows, seconds=seconds, draft_seconds=draft_seconds)

    def _drafted(self, plan: StepPlan, results: tuple[RowResult, ...]) -> tuple[tuple[RowResult, ...], float]:
        """The results with what the draft model says to the rows that ask, and the seconds of a pass of it."""
        if self._draft is None or not any(planned.draft_tokens for planned in plan.rows):
            return results, 0.0
        drafts = self._draft.propose(asks_of(plan, results, self._rows))
        answers = iter(drafts.tokens)
        return tuple(
            msgspec.structs.replace(result, drafts=next(answers)) if planned.draft_tokens else result
            for planned, result in zip(plan.rows, results, strict=True)
        ), drafts.pass_seconds

    def close(self) -> None:
        """Wait for a running step and free the backend."""
        self._masks.close()
        if self._thread is not None:
            self._thread.shutdown()
        self._backend.close()
        if self._draft is not None:
            self._draft.close()
