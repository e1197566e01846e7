"""FreeBlocks: a set, and the neighbourhood of what it hands out."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from noria.kv.free import SHELF, FreeBlocks
from noria.kv.pool import BlockPool


@given(size=st.integers(2, 70), actions=st.lists(st.tuples(st.booleans(), st.integers(0, 69)), max_size=200))
def test_it_is_a_set_of_blocks(size: int, actions: list[tuple[bool, int]]) -> None:
    """Red when a block is handed out twice, is lost, or a shelf's count or list goes wrong."""
    free, held = FreeBlocks(size), set[int]()
    for give, after in actions:
        if give and held:
            free.add(held.pop())
        elif not give and len(free):
            block = free.take(after % size)
            assert 0 < block < size
            assert block not in held
            held.add(block)
        assert len(free) + len(held) == size - 1
        assert set(free) | held == set(range(1, size))
        assert free.check() == []


def test_a_table_gets_neighbours_although_others_grow_beside_it() -> None:
    """Red when blocks are handed out in turn: two tables would share their shelves."""
    free = FreeBlocks(10 * SHELF)
    tables = [[free.take(0)] for _ in range(4)]
    for _ in range(SHELF - 1):
        for table in tables:
            table.append(free.take(table[-1]))
    for table in tables:
        assert table == list(range(table[0], table[0] + SHELF))
        assert table[0] % SHELF == 0


def test_behind_a_taken_neighbour_comes_the_next_of_the_shelf() -> None:
    """Red when a run that meets one taken block leaves its shelf."""
    free = FreeBlocks(4 * SHELF)
    first = free.take(0)
    assert free.take(first) == first + 1
    assert free.take(first) == first + 2


def test_a_run_begins_where_most_is_free() -> None:
    """Red when a table begins in a shelf that another is filling, while a better one is there."""
    free = FreeBlocks(3 * SHELF)
    blocks = [free.take(0)]
    while len(free):
        blocks.append(free.take(blocks[-1]))
    for block in (17, 18, 19, 33, 40, 41, 44):
        free.add(block)
    assert free.take(0) == 33


def test_a_full_cache_keeps_giving_neighbours() -> None:
    """Red when eviction waits until nothing is free: with a full cache every table would soon be scattered."""
    random, pool = Random(1), BlockPool(1200, 1)
    tables: list[list[int]] = []
    wanted: list[int] = []
    key = 0
    near = pairs = 0
    for step in range(30_000):
        while len(tables) < 8:
            tables.append([])
            wanted.append(random.randint(20, 100))
        place = random.randrange(8)
        table = tables[place]
        count = random.randint(8, 20) if len(table) < wanted[place] // 2 else 1  # a prompt, then one block after the other
        table += pool.take(count, table[-1] if table else 0)
        if len(table) < wanted[place]:
            continue
        if step > 5_000:
            pairs += len(table) - 1
            near += sum(b == a + 1 for a, b in pairwise(table))
        for block in table:
            key += 1
            pool.register(block, 0, b"%d" % key, b"", b"tokens")
        pool.release(reversed(table))
        del tables[place], wanted[place]
    assert pool.check([]) == []
    assert near / pairs > 0.85
