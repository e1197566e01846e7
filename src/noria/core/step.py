"""A step: what was planned becomes a `StepPlan` for the runner, and entries for the engine to remember it by.

planned     (sequence, first position, tokens, new blocks) ...        and drafts, choices, asks of the sequences
plan        rows, with all that the runner has yet to learn           freed and new rows, edits of tables, copies, ids
entries     what the results are for
"""

from __future__ import annotations

from collections.abc import Iterable

from noria.core.costs import Work
from noria.core.plan import NewRow, PlanRow, RowResult, StepPlan
from noria.core.sequence import Sequence, State
from noria.kv.cache import Blocks, KVCache

Planned = tuple[Sequence, int, int, Blocks]  # sequence, first position, tokens, new blocks


class Entry:
    """What the engine remembers of one PlanRow until its result is back."""

    __slots__ = ("asks", "count", "end", "samples", "sequence", "streams")

    def __init__(self, sequence: Sequence, count: int, end: int, samples: int, streams: tuple[int, ...], asks: int) -> None:
        self.sequence = sequence
        self.count = count
        self.end = end
        self.samples = samples
        self.streams = streams
        self.asks = asks


class Step:
    """A plan with its entries. `late` rows compute a token that the step before samples: (row, row of the step before)."""

    __slots__ = ("entries", "late", "plan", "work")

    def __init__(self, plan: StepPlan, entries: list[Entry], late: list[tuple[int, int]], work: Work) -> None:
        self.plan = plan
        self.entries = entries
        self.late = late
        self.work = work  # what it costs, for the cost model


def bind(plan: StepPlan, late: Iterable[tuple[int, int]], before: tuple[RowResult, ...]) -> StepPlan:
    """The plan with the ids that were not known when it was made: the first token sampled by a row of the step before."""
    rows = list(plan.rows)
    for place, source in late:
        row = rows[place]
        rows[place] = PlanRow(
            row=row.row,
            start=row.start,
            count=row.count,
            tokens=before[source].tokens[:1],
            new_blocks=row.new_blocks,
            samples=row.samples,
            masked=row.masked,
            draft_tokens=row.draft_tokens,
        )
    return StepPlan(
        step=plan.step,
        freed_rows=plan.freed_rows,
        new_rows=plan.new_rows,
        released=plan.released,
        replaced=plan.replaced,
        copies=plan.copies,
        rows=tuple(rows),
    )


class StepWriter:
    """Writes the plans of one engine, and knows what its runner has yet to learn."""

    def __init__(self, cache: KVCache) -> None:
        self.fresh: dict[Sequence, None] = {}  # running, and the runner does not know yet
        self.freed_rows: list[int] = []  # that the runner does not know yet
        self._cache = cache
        self._steps = 0

    def write(self, planned: list[Planned]) -> Step | None:
        """The plan of what is still running, and everything the runner has yet to learn."""
        rows: list[PlanRow] = []
        entries: list[Entry] = []
        late: list[tuple[int, int]] = []
        work_tokens = work_pairs = work_context = work_logits = 0
        fresh = self.fresh
        for sequence, start, count, blocks in planned:
            if sequence.state is not State.RUNNING:
                continue  # planned, then the victim of one behind it
            end = start + count
            known = len(sequence.tokens)
            if sequence in fresh:
                sequence.sent, blocks = known, ()  # its NewRow has them
            total = known + sequence.pending
            drafts = sequence.drafts
            samples = 1 + len(drafts) if end - len(drafts) == total and total < sequence.limit else 0
            tokens: tuple[int, ...] = ()
            if drafts:
                tokens = (*sequence.tokens[sequence.sent :], *drafts)
                sequence.sent, sequence.drafts = known, ()
            elif end > known:
                late.append((len(rows), sequence.slot))
                sequence.sent = end
            elif end > sequence.sent:
                tokens = tuple(sequence.tokens[sequence.sent : end])
                sequence.sent = end
            streams: tuple[int, ...] = ()
            if samples and sequence.streams:
                streams, sequence.streams = sequence.streams, ()
            work_tokens += count
            work_pairs += count * (start + end + 1) // 2
            work_context += end
            work_logits += samples
            asks, sequence.asks = sequence.asks if samples else 0, 0
            sequence.asked |= asks > 0
            sequence.slot = len(rows)
            sequence.in_flight += count
            sequence.furthest = max(sequence.furthest, end)
            sequence.pending += samples
            rows.append(
                PlanRow(
                    row=sequence.kv.row,
                    start=start,
                    count=count,
                    tokens=tokens,
                    new_blocks=blocks,
                    samples=samples,
                    masked=samples > 0 and sequence.constraint is not None,
                    streams=streams,
                    draft_tokens=asks,
                    prompt_logprobs_from=_prompt_logprobs_from(sequence, start, end) if sequence.unscored else None,
                    hidden_from=_hidden_from(sequence, start, end) if sequence.request.pooling else None,
                )
            )
            entries.append(Entry(sequence, count, end, samples, streams, asks))
        if not rows:
            return None
        work = Work(work_tokens, work_pairs, work_context, work_logits)
        return Step(self._plan(tuple(rows)), entries, late, work)

    def _plan(self, rows: tuple[PlanRow, ...]) -> StepPlan:
        self._steps += 1
        released: list[tuple[int, int, int]] = []
        replaced: list[tuple[int, int, int, int]] = []
        for table in self._cache.dirty:
            released += [
                (table.row, group, nulls)
                for group, (nulls, told) in enumerate(zip(table.nulls, table.told, strict=True))
                if nulls > told
            ]
            replaced += [(table.row, *edit) for edit in table.replaced if edit[1] >= table.nulls[edit[0]]]
            table.told = list(table.nulls)
            table.replaced.clear()
        self._cache.dirty.clear()
        copies = [copy for sequence in self.fresh for copy in self._cache.drop_copies(sequence.kv)]
        new_rows = tuple(map(_new_row, self.fresh))
        self.fresh.clear()
        freed, self.freed_rows = tuple(self.freed_rows), []
        return StepPlan(
            step=self._steps,
            freed_rows=freed,
            new_rows=new_rows,
            released=tuple(released),
            replaced=tuple(replaced),
            copies=tuple(copies),
            rows=rows,
        )


def _new_row(sequence: Sequence) -> NewRow:
    table, params = sequence.kv, sequence.params
    assert params.seed is not None
    table.told = list(table.nulls)
    sequence.sent = len(sequence.tokens)
    return NewRow(
        row=table.row,
        tokens=tuple(sequence.tokens),
        prompt_length=sequence.prompt_length,
        blocks=tuple(map(tuple, table.blocks)),
        params=params,
        seed=params.seed,
        stop_ids=sequence.request.stop_ids,
        stream=sequence.index,
    )


def _prompt_logprobs_from(sequence: Sequence, start: int, end: int) -> int | None:
    """The first position of the chunk whose next prompt token is still to be scored; None: there is none."""
    first = max(start, len(sequence.prompt_logprobs))
    return first if first < min(end, sequence.prompt_length - 1) else None


def _hidden_from(sequence: Sequence, start: int, end: int) -> int | None:
    """The first position of the chunk whose hidden state is pooled; None: there is none."""
    if sequence.unpooled:
        return start
    return end - 1 if end == sequence.prompt_length else None
