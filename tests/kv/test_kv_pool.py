"""BlockPool: ownership, eviction order, verification, and a check that finds faults."""

from __future__ import annotations

import pytest

from noria.kv.pool import ABSENT, COLLISION, BlockPool


def cached_chain(pool: BlockPool, length: int, name: bytes = b"k", group: int = 0) -> list[int]:
    """A chain of keyed blocks without references, released leaves first."""
    blocks = pool.take(length)
    for i, block in enumerate(blocks):
        pool.register(block, group, name + b"%d" % i, name + b"%d" % (i - 1), b"tokens")
    pool.release(reversed(blocks))
    return blocks


def test_the_null_block_is_never_handed_out() -> None:
    """Red when block 0 is on the free list."""
    pool = BlockPool(5, 1)
    assert sorted(pool.take(pool.available)) == [1, 2, 3, 4]
    assert pool.available == 0


def test_a_block_is_free_again_only_after_its_last_reference() -> None:
    """Red when release ignores the count."""
    pool = BlockPool(3, 1)
    (block,) = pool.take(1)
    pool.acquire([block])
    pool.release([block])
    assert pool.available == 1
    pool.release([block])
    assert pool.available == 2


def test_null_blocks_in_a_table_are_passed_over() -> None:
    """Red when releasing a window table counts the null block."""
    pool = BlockPool(3, 1)
    blocks = pool.take(1)
    pool.acquire([0, *blocks])
    pool.release([0, *blocks])
    assert pool.refs == [0, 1, 0]


def test_eviction_takes_leaves_before_their_parents_and_old_chains_before_new_ones() -> None:
    """Red when eviction is in order of age alone, or newest first."""
    pool = BlockPool(7, 1)
    old, new = cached_chain(pool, 3, b"old"), cached_chain(pool, 3, b"new")
    assert [pool.take(1)[0] for _ in range(4)] == [old[2], old[1], old[0], new[2]]


def test_using_a_chain_again_makes_it_the_last_to_go() -> None:
    """Red when a released block returns to its old place in the order."""
    pool = BlockPool(7, 1)
    old, new = cached_chain(pool, 3, b"old"), cached_chain(pool, 3, b"new")
    pool.acquire(old)
    pool.release(reversed(old))
    assert [pool.take(1)[0] for _ in range(3)] == [new[2], new[1], new[0]]


def test_free_blocks_are_used_before_cached_ones() -> None:
    """Red when something cached is evicted while memory is free."""
    pool = BlockPool(7, 1)
    cached = cached_chain(pool, 3)
    assert not set(pool.take(3)) & set(cached)


def test_an_evicted_block_is_not_found() -> None:
    """Red when the index keeps the key of a block that has a new owner."""
    pool = BlockPool(2, 1)
    cached_chain(pool, 1)
    assert pool.find(0, b"k0", b"k-1", b"tokens") == 1
    pool.take(1)
    assert pool.find(0, b"k0", b"k-1", b"tokens") == ABSENT


def test_find_compares_tokens_parent_and_group() -> None:
    """Red when a key alone is believed."""
    pool = BlockPool(3, 2)
    cached_chain(pool, 1)
    assert pool.find(0, b"k0", b"k-1", b"others") == COLLISION
    assert pool.find(0, b"k0", b"parent", b"tokens") == COLLISION
    assert pool.find(1, b"k0", b"k-1", b"tokens") == ABSENT


def test_usage_counts_referenced_blocks_only() -> None:
    """Red when cached blocks count as used."""
    pool = BlockPool(7, 1)
    cached_chain(pool, 3)
    assert pool.referenced == 0
    pool.take(2)
    assert pool.referenced == 2


def test_forgetting_all_frees_what_is_cached_and_unkeys_what_is_held() -> None:
    """Red when a held block can still be found after a reset, or a cached one is lost."""
    pool = BlockPool(7, 1)
    chain = cached_chain(pool, 3)
    pool.acquire(chain[:1])
    pool.forget_all()
    assert pool.available == 5
    assert pool.find(0, b"k0", b"k-1", b"tokens") == ABSENT
    pool.release(chain[:1])
    assert pool.available == 6
    assert pool.check([0]) == []


@pytest.mark.parametrize("fault", ["counts", "lost", "free and cached", "order", "orphan reference"])
def test_check_finds_a_fault(fault: str) -> None:
    """Red when a line of `check` is removed."""
    pool = BlockPool(7, 1)
    chain = cached_chain(pool, 3)
    assert pool.check([0]) == []
    match fault:
        case "counts":
            pool._free.add(next(iter(pool._free)))
        case "lost":
            pool._free.take(0)
        case "free and cached":
            pool._free.add(chain[0])
        case "order":
            pool.cached.move_to_end(chain[0], last=False)
        case "orphan reference":
            pool.acquire(chain[2:])
    assert pool.check([0])
