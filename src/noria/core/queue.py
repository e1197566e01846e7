"""The waiting queue: order of admission, its bound, and when to come back.

`fcfs` serves in order of arrival. `priority` serves the lowest value first, but a request gains one level for every
AGEING_S seconds that it has waited: the order is that of `priority * AGEING_S + arrival`, which never changes, so a request
waits for those of a level l above it only as far as they arrived less than l * AGEING_S seconds after it. A preempted
sequence keeps its place in the order and is thereby back at the front.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from typing import Literal

from noria.core.sequence import Rank, Sequence
from noria.types import RequestError

AGEING_S = 10.0

_SMOOTHING = 1 / 16
_RETRY_S = (1.0, 60.0)  # bounds of Retry-After


class QueueFull(RequestError):
    """Too many requests wait: HTTP 429. `retry_after` is an estimate in seconds, for the header of that name."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(
            f"{waiting} requests are waiting already: retry in about {retry_after:.0f} s, or raise --max-num-queued-reqs",
            code="queue_full",
            status=429,
        )
        self.retry_after = retry_after


class WaitingQueue:
    """Sequences that wait, in order of service."""

    def __init__(self, policy: Literal["fcfs", "priority"], limit: int) -> None:
        self._policy = policy
        self._limit = limit
        self._order: list[Sequence] = []
        self._arrivals = 0
        self._interval = 0.0  # smoothed seconds between requests that finished
        self._finished_at: float | None = None

    def rank(self, priority: int, now: float) -> Rank:
        """The place of a request that arrives now. Each call is a later arrival."""
        self._arrivals += 1
        return (priority * AGEING_S + now if self._policy == "priority" else 0.0, self._arrivals, 0)

    def priority(self, priority: int) -> int:
        """What a request's priority counts when a victim is chosen: nothing under fcfs."""
        return priority if self._policy == "priority" else 0

    def check_room(self, free_rows: int) -> None:
        """Raise QueueFull if one more request would wait beyond the limit; the next `free_rows` of them hardly wait."""
        if len(self._order) - free_rows < self._limit:
            return
        waiting = sum(1 for sequence in self._order if sequence.cached_tokens < 0)  # not those that were in already
        if waiting - free_rows >= self._limit:
            low, high = _RETRY_S
            half = self._interval * waiting / 2  # by then half of the queue is served
            raise QueueFull(waiting, min(max(half, low), high))

    def finished(self, now: float) -> None:
        """A request finished: what the estimate of QueueFull learns from."""
        if self._finished_at is not None:
            self._interval += (now - self._finished_at - self._interval) * _SMOOTHING
        self._finished_at = now

    def push(self, sequence: Sequence) -> None:
        """Put a sequence where its rank belongs."""
        bisect.insort(self._order, sequence, key=lambda s: s.rank)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Take sequences out: admitted or ended ones."""
        gone = set(sequences)
        if gone:
            self._order = [s for s in self._order if s not in gone]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)
