"""audit(): every invariant of the decision half, checked after each step in tests and written out when an engine dies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Protocol

from noria.core.plan import NULL_BLOCK
from noria.core.scheduler import Scheduler
from noria.core.sequence import Sequence, State
from noria.kv.cache import KVCache
from noria.kv.keys import BLOCK_SIZE
from noria.types import EngineRequest


class AuditError(AssertionError):
    """A broken invariant: the faults, then the engine's state."""


class Record(Protocol):
    """A request with open choices, as the engine keeps it."""

    request: EngineRequest
    sequences: dict[int, Sequence]
    open: set[int]


def audit(records: Mapping[int, Record], scheduler: Scheduler) -> None:
    """Raise AuditError if anything is inconsistent between steps."""
    faults = [
        *scheduler.cache.pool.check(scheduler.cache.full_groups),
        *_check_references(scheduler),
        *_check_membership(scheduler),
        *_check_rows(scheduler),
        *_check_marks(scheduler),
        *_check_records(records, scheduler),
    ]
    for sequence in _holders(scheduler):
        faults += [f"{sequence}: {fault}" for fault in _check_sequence(sequence, scheduler.cache)]
    if faults:
        raise AuditError("\n".join([*faults, "", dump(scheduler)]))


def dump(scheduler: Scheduler) -> str:
    """The state of the decision half, one line a sequence."""
    pool = scheduler.cache.pool
    lines = [
        f"pool: {pool.size} blocks, {pool.referenced} referenced, {len(pool.cached)} cached; "
        f"{len(scheduler.cache.marks)} marks; expected output {scheduler.growth.mean:.0f} tokens"
    ]
    for name, sequences in (("running", scheduler.running), ("leaving", scheduler.leaving), ("waiting", scheduler.queue)):
        for sequence in sequences:
            lines.append(f"{name}: {sequence}")
            lines += [f"    group {g}: {blocks}" for g, blocks in enumerate(sequence.kv.blocks) if blocks]
    return "\n".join(lines)


def _holders(scheduler: Scheduler) -> list[Sequence]:
    return [*scheduler.running, *scheduler.leaving]


def _check_references(scheduler: Scheduler) -> Iterator[str]:
    """A block has one reference for each table it is in, and one for each copy that is still to be made from it."""
    expected: Counter[int] = Counter()
    for sequence in _holders(scheduler):
        for blocks in sequence.kv.blocks:
            expected.update(blocks)
        expected.update(source for source, _ in sequence.kv.copies)
    del expected[NULL_BLOCK]
    for block, refs in enumerate(scheduler.cache.pool.refs):
        if refs != expected[block]:
            yield f"block {block} counts {refs} references, {expected[block]} are there"


def _check_membership(scheduler: Scheduler) -> Iterator[str]:
    for sequence in scheduler.running:
        if sequence.state is not State.RUNNING:
            yield f"{sequence} is among the running"
    for sequence in scheduler.leaving:
        if sequence.state not in (State.LEAVING, State.FINISHED) or not sequence.in_flight:
            yield f"{sequence} is among the leaving"
    if scheduler.background.keys() != {s for s in scheduler.running if s.request.background}:
        yield "the background sequences that run are not those that are said to"
    order = [scheduler.queue.order(sequence) for sequence in scheduler.queue]
    if order != sorted(order):
        yield "the queue is out of order"
    for sequence in scheduler.queue:
        waits = sequence.state in (State.WAITING, State.WAITING_GRAMMAR)
        if not waits or sequence.kv.held or sequence.kv.row >= 0 or sequence.computed:
            yield f"{sequence} waits, but holds something"
    holders = set(_holders(scheduler))
    if not scheduler.writer.fresh.keys() <= scheduler.running.keys():
        yield "a sequence that does not run is to be announced to the runner"
    if not scheduler.cache.dirty.keys() <= {sequence.kv for sequence in holders}:
        yield "a table that nobody holds has edits"


def _check_rows(scheduler: Scheduler) -> Iterator[str]:
    rows = [sequence.kv.row for sequence in _holders(scheduler)] + scheduler.free_rows
    if sorted(rows) != list(range(len(rows))):
        yield f"rows are lost or shared: {sorted(rows)}"


def _check_marks(scheduler: Scheduler) -> Iterator[str]:
    announced = {
        sequence.kv: set(sequence.kv.keys[sequence.kv.committed : len(sequence.tokens) // BLOCK_SIZE])
        for sequence in _holders(scheduler)
        if sequence.kv.keyed
    }
    for key, table in scheduler.cache.marks.items():
        if key not in announced.get(table, ()):
            yield f"block {key.hex()} is marked, and nobody is about to compute it"


def _check_records(records: Mapping[int, Record], scheduler: Scheduler) -> Iterator[str]:
    live = {s for s in (*_holders(scheduler), *scheduler.queue) if s.state is not State.FINISHED}
    known = set()
    for record in records.values():
        for index, sequence in record.sequences.items():
            if (index in record.open) == (sequence.state is State.FINISHED):
                yield f"{sequence} of a request with open choices {sorted(record.open)}"
            known.add(sequence)
        undrawn = record.open - record.sequences.keys()
        if undrawn and record.sequences[0].state is State.FINISHED:
            yield f"choices {sorted(undrawn)} of {record.sequences[0]} are open, but nobody will draw them"
    if not live <= known:
        yield f"sequences without a request: {live - known}"
    if lost := {s for s in known - live if s.state is not State.FINISHED}:
        yield f"sequences that are neither queued nor running: {lost}"


def _check_sequence(sequence: Sequence, cache: KVCache) -> Iterator[str]:
    """The progress and the tables of a sequence that holds blocks."""
    kv, computed, known = sequence.kv, sequence.computed, len(sequence.tokens)
    if not 0 <= computed <= known or computed + sequence.in_flight > known + sequence.pending:
        yield "its progress is impossible"
    if known > sequence.limit:
        yield f"it is longer than its limit {sequence.limit}"
    if kv.capacity < computed + sequence.in_flight or any(len(b) * BLOCK_SIZE != kv.capacity for b in kv.blocks):
        yield f"its tables do not cover what is computed and in flight, or are of unequal length: {kv.blocks}"
    for group, (blocks, nulls) in enumerate(zip(kv.blocks, kv.nulls, strict=True)):
        window = cache.windows[group]
        reach = max(0, computed - window + 1) // BLOCK_SIZE if window else 0
        if nulls > reach or any(blocks[:nulls]) or not all(blocks[nulls:]):
            yield f"group {group} lacks a block that a query can see, or has one that none can: {blocks}"
    for group, waste in enumerate(cache.waste(kv, computed, max(sequence.in_flight, sequence.furthest - computed))):
        if not 0 <= waste < BLOCK_SIZE * (2 if cache.windows[group] else 1):
            yield f"group {group} wastes {waste} places"
