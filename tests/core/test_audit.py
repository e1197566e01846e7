"""The audit finds what it is there to find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fakes import FULL, make_engine, make_request, window_group
from noria.core.audit import AuditError
from noria.core.engine import Engine
from noria.core.sequence import Sequence, State
from noria.kv.cache import Table


def busy() -> Engine:
    """Two running sequences, one waiting, one waiting for a producer."""
    engine, _ = make_engine((FULL, window_group(20)), 60, max_num_seqs=3, long_prefill_token_threshold=20)
    for prompt in ([1] * 30, list(range(100)), list(range(100)), [2] * 20, [3] * 5):
        engine.add(make_request(prompt, max_tokens=30))
    for _ in range(3):
        engine.step()
    return engine


def first(engine: Engine) -> Sequence:
    return next(iter(engine.scheduler.running))


def leak_a_reference(e: Engine) -> None:
    e.cache.pool.refs[first(e).kv.blocks[0][0]] += 1


def drop_a_block(e: Engine) -> None:
    e.cache.pool.release([first(e).kv.blocks[0].pop()])


def compute_too_much(e: Engine) -> None:
    first(e).computed = len(first(e).tokens) + 1


def share_a_row(e: Engine) -> None:
    e.scheduler.free_rows.append(first(e).kv.row)


def lose_a_sequence(e: Engine) -> None:
    e.scheduler.queue.remove(list(e.scheduler.queue))


def end_without_an_output(e: Engine) -> None:
    first(e).state = State.FINISHED


def mark_for_nobody(e: Engine) -> None:
    e.cache.marks[b"k"] = Table(b"", 2)


def hold_while_waiting(e: Engine) -> None:
    next(iter(e.scheduler.queue)).kv.row = 0


def keep_a_block_behind_the_window(e: Engine) -> None:
    sequence = next(s for s in e.scheduler.running if s.kv.nulls[1])
    (sequence.kv.blocks[1][0],) = e.cache.pool.take(1)


def null_a_visible_block(e: Engine) -> None:
    kv = first(e).kv
    e.cache.pool.release(kv.blocks[1][-1:])
    kv.blocks[1][-1] = 0


def take_blocks_ahead(e: Engine) -> None:
    e.cache.allocate(first(e).kv, first(e).kv.capacity + 20)


def edit_a_freed_table(e: Engine) -> None:
    e.cache.dirty[Table(b"", 2)] = None


def mix_up_the_order(e: Engine) -> None:
    e.scheduler.queue._lines[""].reverse()


def test_a_busy_engine_is_clean() -> None:
    """Red when the audit cries wolf; the other tests start from here."""
    engine = busy()
    engine.audit()
    assert len(engine.scheduler.running) == 3
    assert engine.stats().waiting == 2
    assert engine.cache.marks


@pytest.mark.parametrize(
    "corrupt",
    [
        leak_a_reference,
        drop_a_block,
        compute_too_much,
        share_a_row,
        lose_a_sequence,
        end_without_an_output,
        mark_for_nobody,
        hold_while_waiting,
        keep_a_block_behind_the_window,
        null_a_visible_block,
        take_blocks_ahead,
        edit_a_freed_table,
        mix_up_the_order,
    ],
)
def test_a_fault_is_found_and_the_state_is_shown(corrupt: Callable[[Engine], None]) -> None:
    """Red when the check of that invariant is removed."""
    engine = busy()
    corrupt(engine)
    with pytest.raises(AuditError, match="pool: "):
        engine.audit()
