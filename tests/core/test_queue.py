"""The waiting queue: order, ageing, bound and estimate."""

from __future__ import annotations

import pytest

from fakes import FULL, make_request
from noria.core.queue import AGEING_S, QueueFull, WaitingQueue
from noria.core.sequence import Sequence
from noria.kv.cache import KVCache

CACHE = KVCache((FULL,), 10, b"", prefix_caching=True, max_chunk=16)


def push(queue: WaitingQueue, priority: int = 0, now: float = 0.0) -> Sequence:
    request = make_request(3, priority=priority)
    sequence = Sequence(
        request,
        CACHE.table(""),
        rank=queue.rank(request, now),
        priority=queue.priority(request),
        max_len=50,
        start=now,
    )
    queue.push(sequence)
    return sequence


def test_fcfs_is_the_order_of_arrival_whatever_the_priority() -> None:
    """Red when fcfs looks at priorities or clocks."""
    queue = WaitingQueue("fcfs", 10)
    sequences = [push(queue, priority, now) for priority, now in ((5, 3.0), (-5, 2.0), (0, 1.0))]
    assert list(queue) == sequences
    assert [s.priority for s in sequences] == [0, 0, 0]


def test_priority_serves_the_lowest_value_first_then_the_earliest() -> None:
    """Red when the order of priorities is reversed, or ties are not by arrival."""
    queue = WaitingQueue("priority", 10)
    low, first, second, urgent = (push(queue, p, 1.0) for p in (1, 0, 0, -1))
    assert list(queue) == [urgent, first, second, low]


def test_a_level_of_priority_is_worth_a_stated_time_of_waiting() -> None:
    """Red when a low priority can wait for ever behind new arrivals of a higher one."""
    queue = WaitingQueue("priority", 10)
    low = push(queue, 1, 0.0)
    early, late = push(queue, 0, AGEING_S - 1), push(queue, 0, AGEING_S + 1)
    assert list(queue) == [early, low, late]


def test_a_sequence_that_comes_back_is_where_it_was() -> None:
    """Red when a preempted sequence goes to the end."""
    queue = WaitingQueue("fcfs", 10)
    first, second = push(queue), push(queue)
    queue.remove([first])
    assert list(queue) == [second]
    queue.push(first)
    assert list(queue) == [first, second]


def test_a_full_queue_says_429_and_when_to_come_back() -> None:
    """Red when the queue grows without bound, or rows that are free count as waiting."""
    queue = WaitingQueue("fcfs", 4)
    for now in (0.0, 8.0, 16.0):
        queue.finished(now)
    for _ in range(4):
        push(queue)
    queue.check_room(free_rows=1)
    push(queue).cached_tokens = 0  # it ran, and lost its place
    queue.check_room(free_rows=1)
    with pytest.raises(QueueFull) as info:
        queue.check_room(free_rows=0)
    assert (info.value.status, info.value.code) == (429, "queue_full")
    assert 1 <= info.value.retry_after <= 60
    for now in range(24, 2000, 8):
        queue.finished(float(now))
    with pytest.raises(QueueFull) as info:
        queue.check_room(free_rows=0)
    assert info.value.retry_after == pytest.approx(16, rel=0.1)  # half of four, at one in eight seconds
