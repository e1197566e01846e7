"""The thread pool: every tile once, ops in order, late workers harmless, no deadlock, nothing used when idle."""

from __future__ import annotations

import threading
import time

import pytest

from noria.backends.cpu import _native

by_threads = pytest.mark.parametrize("threads", [1, 2, 3, 8])


@by_threads
def test_every_tile_runs_once_and_ops_in_order(threads: int) -> None:
    """1000 steps, with more threads than cores too. Red when a tile is lost or run twice, or an op starts too early."""
    pool = _native.Pool(threads)
    tiles_run, order_errors, _ = _native.probe_pool(pool, steps=1000, ops=6, tiles=5, passes=3)
    assert (tiles_run, order_errors) == (1000 * (5 + 3) * 5, 0)


@by_threads
def test_more_tiles_than_a_word_counts(threads: int) -> None:
    """Red when tiles past 4095 are not gathered into larger units."""
    tiles_run, order_errors, _ = _native.probe_pool(_native.Pool(threads), steps=3, ops=3, tiles=10_007)
    assert (tiles_run, order_errors) == (3 * 3 * 10_007, 0)


def test_late_workers_do_no_harm() -> None:
    """A worker sleeps inside a tile while the others finish, and many workers share few cores: each is late all the time.

    Red when a worker of an old step can claim a tile of a new one: counts and order would be wrong.
    """
    pool = _native.Pool(6)
    for _ in range(20):
        tiles_run, order_errors, _ = _native.probe_pool(pool, steps=20, ops=9, tiles=4, passes=2, work=50, slow_tile=2)
        assert (tiles_run, order_errors) == (20 * (8 + 2) * 4, 0)


def test_late_workers_claim_nothing_of_an_op_that_their_step_skips() -> None:
    """An op without tiles in every other step, as those of the logits are while a prompt is prefilled in chunks.

    Red when such an op's gate is not closed for the step: a late worker then finds the next step's tiles behind it.
    """
    pool = _native.Pool(6)
    for _ in range(20):
        tiles_run, order_errors, _ = _native.probe_pool(pool, steps=400, ops=9, tiles=4, work=20, gap=4)
        assert (tiles_run, order_errors) == (400 * 8 * 4 + 200 * 4, 0)


@by_threads
def test_an_exception_in_a_tile_ends_the_step(threads: int) -> None:
    """Red when a throwing tile deadlocks the pool, is swallowed, or spoils the next step."""
    pool = _native.Pool(threads)
    for _ in range(50):
        with pytest.raises(RuntimeError, match="bad tile"):
            _native.probe_pool(pool, steps=1, ops=4, tiles=7, bad_tile=3)
        tiles_run, order_errors, _ = _native.probe_pool(pool, steps=2, ops=4, tiles=7)
        assert (tiles_run, order_errors) == (2 * 4 * 7, 0)


def test_callers_take_turns() -> None:
    """Red when two threads that run programs at once mix their tiles."""
    pool = _native.Pool(3)
    outcomes: list[tuple[int, int]] = []

    def call() -> None:
        tiles_run, order_errors, _ = _native.probe_pool(pool, steps=200, ops=4, tiles=3)
        outcomes.append((tiles_run, order_errors))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert outcomes == [(200 * 4 * 3, 0)] * 3


def test_an_idle_pool_costs_nothing() -> None:
    """Red when workers spin for ever between steps."""
    pool = _native.Pool(4)
    _native.probe_pool(pool, steps=10, ops=3, tiles=8)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.02


def test_the_interpreter_lock_is_released() -> None:
    """Red when a step holds the lock: the counter would stand still."""
    ticks = 0
    done = threading.Event()

    def count() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0.001)

    counter = threading.Thread(target=count)
    counter.start()
    try:
        _native.probe_pool(_native.Pool(1), steps=100, ops=1, tiles=2, slow_tile=0)
    finally:
        done.set()
        counter.join()
    assert ticks > 20
