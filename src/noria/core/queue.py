"""The waiting queue: order of admission, its bound, and when to come back.

`fcfs` serves in order of arrival. `priority` serves the lowest value first, but a request gains one level for every
AGEING_S seconds that it has waited: the order is that of `priority * AGEING_S + arrival`, which never changes, so a request
waits for those of a level l above it only as far as they arrived less than l * AGEING_S seconds after it. `fair` serves the
tenant that had least (`core/tenants.py`), and each tenant's requests in order of arrival. A preempted sequence keeps its place
in the order and is thereby back at the front.

Under every policy, background requests come after all others, in order of arrival. Nothing ages them: they wait for ever if
the others never leave room.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from math import inf
from typing import Literal

from noria.core.sequence import Rank, Sequence
from noria.core.tenants import OUTPUT_WEIGHT, Tenants
from noria.types import EngineRequest, RequestError

AGEING_S = 10.0
BACKGROUND_PRIORITY = 2**62  # beyond every client's

Order = tuple[float, float, Rank]  # order of service at this moment: (inf for background, what the tenant had, rank)
Policy = Literal["fcfs", "priority", "fair"]

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
    """Sequences that wait, in order of service: a line for each tenant under `fair`, one line otherwise."""

    def __init__(self, policy: Policy, limit: int) -> None:
        self.fair = policy == "fair"
        self.tenants = Tenants()  # used under `fair` only
        self._policy = policy
        self._limit = limit
        self._lines: dict[str | None, list[Sequence]] = {}  # by tenant, None for background; none is empty
        self._arrivals = 0
        self._interval = 0.0  # smoothed seconds between requests that finished
        self._finished_at: float | None = None

    # Order

    def rank(self, request: EngineRequest, now: float) -> Rank:
        """The place of a request that arrives now. Each call is a later arrival."""
        self._arrivals += 1
        value = request.priority * AGEING_S + now if self._policy == "priority" else 0.0
        return (inf if request.background else value, self._arrivals, 0)

    def priority(self, request: EngineRequest) -> int:
        """What a request's priority counts when a victim is chosen: nothing but being background, under fcfs and fair."""
        if request.background:
            return BACKGROUND_PRIORITY
        return request.priority if self._policy == "priority" else 0

    def served(self, sequence: Sequence) -> float:
        """What the sequence's tenant had so far; nothing is counted for background, and under other policies than fair."""
        return self.tenants.served(sequence.request.tenant) if self.fair and not sequence.request.background else 0.0

    def order(self, sequence: Sequence) -> Order:
        """Where a sequence, waiting or running, stands at this moment. Smaller is served first."""
        return sequence.rank[0], self.served(sequence), sequence.rank

    def charge_prompt(self, sequence: Sequence, tokens: int) -> None:
        """`tokens` of a prompt are going to be computed for the sequence, which is the first in this order."""
        if self.fair and not sequence.request.background:
            self.tenants.admit(sequence.request.tenant, tokens)

    def charge_output(self, sequence: Sequence, tokens: int) -> None:
        """`tokens` more of an output were made."""
        if self.fair and not sequence.request.background:
            self.tenants.charge(sequence.request.tenant, tokens * OUTPUT_WEIGHT)

    # Bound

    def check_room(self, free_rows: int) -> None:
        """Raise QueueFull if one more request would wait beyond the limit; the next `free_rows` of them hardly wait."""
        if len(self) - free_rows < self._limit:
            return
        waiting = sum(1 for sequence in self if sequence.cached_tokens < 0)  # not those that were in already
        if waiting - free_rows >= self._limit:
            low, high = _RETRY_S
            half = self._interval * waiting / 2  # by then half of the queue is served
            raise QueueFull(waiting, min(max(half, low), high))

    def finished(self, now: float) -> None:
        """A request finished: what the estimate of QueueFull learns from."""
        if self._finished_at is not None:
            self._interval += (now - self._finished_at - self._interval) * _SMOOTHING
        self._finished_at = now

    # Members

    def push(self, sequence: Sequence) -> None:
        """Put a sequence where its rank belongs."""
        name = self._line(sequence)
        line = self._lines.get(name)
        if line is None:
            if name is not None:
                self.tenants.join(name, [tenant for tenant in self._lines if tenant is not None])
            self._lines[name] = [sequence]
        else:
            bisect.insort(line, sequence, key=lambda s: s.rank)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Take sequences out: admitted ones, and ended ones whether or not they wait."""
        gone = set(sequences)
        for name in {self._line(sequence) for sequence in gone}:
            line = [s for s in self._lines.pop(name, ()) if s not in gone]
            if line:
                self._lines[name] = line

    def _line(self, sequence: Sequence) -> str | None:
        if not self.fair:
            return ""
        return None if sequence.request.background else sequence.request.tenant

    def __iter__(self) -> Iterator[Sequence]:
        """In order of service. Under `fair`, what is charged while the iteration goes on decides who is next."""
        if len(self._lines) == 1:
            yield from next(iter(self._lines.values()))
            return
        heads = dict.fromkeys(self._lines, 0)
        while heads:
            name = min(heads, key=lambda name: self.order(self._lines[name][heads[name]]))
            yield self._lines[name][heads[name]]
            heads[name] += 1
            if heads[name] == len(self._lines[name]):
                del heads[name]

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))
