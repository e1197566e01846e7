"""Who gives its place back when memory runs out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection

from noria.core.queue import Order, WaitingQueue
from noria.core.sequence import Rank, Sequence
from noria.kv.cache import KVCache, Table
from noria.kv.keys import BLOCK_SIZE


def choose_victim(running: Collection[Sequence], queue: WaitingQueue, cache: KVCache) -> Sequence:
    """The running sequence of lowest priority; among those, one of the tenant that had most; then the least loss.

    The one of the best rank is spared while another runs. Ranks never change, so some sequence always ends.
    """
    spared = min(running, key=lambda s: s.rank)
    others = [s for s in running if s is not spared]
    return worst(others, queue, cache) if others else spared


def worst(candidates: Collection[Sequence], queue: WaitingQueue, cache: KVCache) -> Sequence:
    """The first victim among `candidates`."""
    wanted = inherited(queue, cache)

    def badness(sequence: Sequence) -> tuple[int, float, int, Rank]:
        priority = sequence.priority
        if sequence.kv in wanted:
            priority = min(priority, wanted[sequence.kv][0])
        return priority, queue.served(sequence), -loss(sequence, cache), sequence.rank

    return max(candidates, key=badness)


def loss(sequence: Sequence, cache: KVCache) -> int:
    """Computed tokens that a preemption puts at risk: all but those in blocks that others hold as well."""
    if not cache.prefix_caching or not cache.full_groups:
        return sequence.computed
    table, refs = sequence.kv.blocks[cache.full_groups[0]], cache.pool.refs
    shared = bisect_left(range(sequence.kv.committed), True, key=lambda i: refs[table[i]] == 1)
    return sequence.computed - shared * BLOCK_SIZE


def inherited(queue: WaitingQueue, cache: KVCache) -> dict[Table, tuple[int, Order]]:
    """The best priority and order of those who wait for a block that a running sequence is computing."""
    best: dict[Table, tuple[int, Order]] = {}
    if not cache.marks:
        return best
    for waiter in queue:
        producer = cache.marks.get(waiter.blocked_on) if waiter.blocked_on is not None else None
        if producer is not None:
            priority, order = best.get(producer, (waiter.priority, queue.order(waiter)))
            best[producer] = (min(priority, waiter.priority), min(order, queue.order(waiter)))
    return best
