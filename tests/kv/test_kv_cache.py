"""KVCache: hits over layer groups, re-pointing, forks, windows, marks and waste."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import noria.kv.cache
from fakes import FULL, window_group
from noria.kv.cache import KVCache, Table
from noria.models.spec import LayerGroup

TOKENS = [i * 7 % 50 for i in range(400)]


def make_cache(
    *groups: LayerGroup, blocks: int = 100, prefix_caching: bool = True, max_chunk: int = 64, tag: bytes = b"m"
) -> KVCache:
    return KVCache(groups or (FULL,), blocks + 1, tag, prefix_caching=prefix_caching, max_chunk=max_chunk)


def compute(cache: KVCache, tokens: list[int], salt: str = "", chunk: int = 64) -> Table:
    """A table whose sequence has computed all of `tokens`, in chunks, from the hit on."""
    table = cache.table(salt)
    hit = cache.lookup(table, tokens, (len(tokens) - 1) // 16)
    cache.acquire(table, hit)
    computed = hit.blocks * 16
    while computed < len(tokens):
        computed = min(computed + chunk, len(tokens))
        assert cache.allocate(table, computed) is not None
        cache.commit(table, tokens, computed)
    return table


def hit_blocks(cache: KVCache, tokens: list[int], salt: str = "") -> int:
    return cache.lookup(cache.table(salt), tokens, len(tokens) // 16).blocks


# Lookup


def test_a_prefix_is_found_in_whole_blocks_and_up_to_the_limit() -> None:
    """Red when a partial block is found, or the limit is ignored."""
    cache = make_cache()
    compute(cache, TOKENS[:60])
    assert hit_blocks(cache, TOKENS[:100]) == 3
    assert hit_blocks(cache, TOKENS[:40]) == 2
    assert cache.lookup(cache.table(""), TOKENS, 1).blocks == 1
    assert hit_blocks(cache, [*TOKENS[:20], 49, *TOKENS[21:60]]) == 1


def test_tenants_and_models_share_nothing() -> None:
    """Red when salt or model tag are not in the root."""
    cache = make_cache()
    compute(cache, TOKENS[:64], salt="a")
    assert hit_blocks(cache, TOKENS[:64], salt="a") == 4
    assert hit_blocks(cache, TOKENS[:64], salt="b") == 0
    assert cache.table("a").root != make_cache(tag=b"n").table("a").root


def test_nothing_is_found_or_kept_without_prefix_caching() -> None:
    """Red when the setting is ignored."""
    cache = make_cache(prefix_caching=False)
    cache.free(compute(cache, TOKENS[:64]))
    assert hit_blocks(cache, TOKENS[:64]) == 0
    assert not cache.pool.cached


def test_a_hit_takes_null_blocks_before_the_window() -> None:
    """Red when a window group's table begins with blocks that no query can see."""
    cache = make_cache(FULL, window_group(20))
    cache.free(compute(cache, TOKENS[:96]))
    table = cache.table("")
    hit = cache.lookup(table, TOKENS[:96], 5)
    cache.acquire(table, hit)
    full, window = table.blocks
    assert len(full) == len(window) == 5
    assert 0 not in full
    assert [bool(b) for b in window] == [False, False, False, True, True]  # position 80 sees 61..80: blocks 3 and 4
    assert table.nulls == [0, 3]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), windows=st.lists(st.sampled_from([0, 0, 5, 16, 17, 33, 50]), min_size=1, max_size=3))
def test_a_hit_is_the_longest_prefix_that_every_group_can_continue(data: st.DataObject, windows: list[int]) -> None:
    """Red when the window rule is off by a block, or a shorter hit is returned: compared with the definition."""
    groups = [window_group(w) for w in windows]
    count = 9
    cache = make_cache(*groups, blocks=count * len(groups))
    table = cache.table("")
    cache._extend_keys(table, TOKENS, count)
    present = {}
    for group in range(len(groups)):
        for i in range(count):
            present[group, i] = data.draw(st.integers(0, 4)) > 0
            if present[group, i]:
                (block,) = cache.pool.take(1)
                parent = table.keys[i - 1] if i else table.root
                cache.pool.register(block, group, table.keys[i], parent, table.packed[i])

    def continues(blocks: int) -> bool:
        return all(
            present[group, i]
            for group, window in enumerate(windows)
            for i in range(blocks)
            if not window or 16 * i + 15 >= 16 * blocks - window + 1
        )

    limit = data.draw(st.integers(0, count))
    hit = cache.lookup(table, TOKENS, limit)
    assert hit.blocks == max(b for b in range(limit + 1) if continues(b))
    assert all(len(blocks) == hit.blocks for blocks in hit.tables)
    for group, window in enumerate(windows):
        for i, block in enumerate(hit.tables[group]):
            seen = not window or 16 * i + 15 >= 16 * hit.blocks - window + 1
            assert bool(block) == seen


def test_a_hit_tells_how_much_of_it_costs_no_memory() -> None:
    """Red when cached blocks, which were available to others, count as free of charge."""
    cache = make_cache()
    compute(cache, TOKENS[:32])
    cache.free(compute(cache, TOKENS[:64]))
    assert cache.lookup(cache.table(""), TOKENS[:64], 4)[::2] == (4, 2)


# Eviction


def test_a_full_attention_prefix_is_lost_from_its_end() -> None:
    """Red when a table is released head first: the rest would be unreachable."""
    cache = make_cache(blocks=6)
    cache.free(compute(cache, TOKENS[:96]))
    for lost in range(1, 4):
        cache.pool.take(1)
        assert hit_blocks(cache, TOKENS[:96]) == 6 - lost


def test_a_window_group_is_lost_from_its_oldest_position() -> None:
    """Red when a window table is released like a full one: what the next query needs first would go first."""
    cache = make_cache(window_group(40), blocks=6)
    cache.free(compute(cache, TOKENS[:96]))
    for left in (5, 4, 3):
        cache.pool.take(1)
        table = cache.table("")
        cache._extend_keys(table, TOKENS, 6)
        assert [cache._find(table, 0, i) > 0 for i in range(6)] == [i >= 6 - left for i in range(6)]
    assert hit_blocks(cache, TOKENS[:96]) == 6


# Commit


def test_a_block_that_exists_is_shared_and_the_own_one_is_freed() -> None:
    """Red when equal prefixes that were computed side by side stay two copies."""
    cache = make_cache()
    first, second = cache.table(""), cache.table("")
    second.row = 3
    for table in (first, second):
        cache.allocate(table, 40)
    own = list(second.blocks[0])
    cache.commit(first, TOKENS, 40)
    cache.commit(second, TOKENS, 40)
    assert second.blocks[0][:2] == first.blocks[0][:2]
    assert second.blocks[0][2] == own[2]
    assert second.replaced == [(0, 0, first.blocks[0][0]), (0, 1, first.blocks[0][1])]
    assert cache.dirty == {second: None}
    assert cache.pool.referenced == 4


def test_a_colliding_key_shares_nothing_from_there_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when tokens are not compared, or when a chain goes on being keyed behind a collision."""
    monkeypatch.setattr(noria.kv.cache, "block_key", lambda parent, packed: b"same")
    cache = make_cache()
    one = compute(cache, TOKENS[:48])
    assert not one.keyed  # its second block has the first one's key
    other = compute(cache, [9, *TOKENS[1:48]])
    assert not set(one.blocks[0]) & set(other.blocks[0])
    assert hit_blocks(cache, [9, *TOKENS[1:48]]) == 0
    assert hit_blocks(cache, TOKENS[:48]) == 1


def test_a_window_gives_back_what_it_has_left_and_not_a_position_more() -> None:
    """Red when the bound of the window is off by one."""
    cache = make_cache(window_group(20))
    table = cache.table("")
    table.row = 0
    held = []
    for computed in range(1, 100):
        cache.allocate(table, computed)
        if computed >= table.due:
            cache.commit(table, TOKENS, computed)
        first_seen = max(0, computed - 20 + 1)
        assert table.nulls[0] == first_seen // 16
        assert cache.waste(table, computed, 0)[0] < 32
        held.append(table.held)
    assert max(held) <= 3


@pytest.mark.parametrize("window", [0, 1, 16, 20, 33])
def test_waste_is_less_than_a_partial_block_a_group_or_two_of_a_window(window: int) -> None:
    """Red when blocks are taken ahead of the tokens, or kept behind the window."""
    cache = make_cache(window_group(window))
    for chunk in (1, 5, 16, 23):
        table, computed = cache.table(""), 0
        while computed < 200:
            cache.allocate(table, computed + chunk)
            assert 0 <= cache.waste(table, computed, chunk)[0] < (32 if window else 16)
            computed += chunk
            cache.commit(table, TOKENS, computed)
            assert 0 <= cache.waste(table, computed, 0)[0] < (32 if window else 16)
        cache.free(table)


def test_allocate_takes_all_or_nothing() -> None:
    """Red when a group is served and the next one is short."""
    cache = make_cache(FULL, FULL, blocks=5)
    table = cache.table("")
    assert cache.allocate(table, 48) is None
    assert cache.pool.available == 5
    assert cache.room(table) == 32
    assert cache.allocate(table, 32) is not None
    assert cache.allocate(table, 20) == ()


# Fork


@pytest.mark.parametrize(("computed", "copied"), [(32, 0), (40, 1)])
def test_a_fork_shares_full_blocks_and_copies_the_partial_one(computed: int, copied: int) -> None:
    """Red when the partial block is shared (two writers) or a full one is copied."""
    cache = make_cache(FULL, window_group(20))
    parent, child = compute(cache, TOKENS[:computed]), cache.table("")
    before = cache.pool.referenced
    assert cache.fork(parent, child, computed)
    assert cache.pool.referenced == before + 2 * copied
    full = computed // 16
    for mine, its in zip(child.blocks, parent.blocks, strict=True):
        assert mine[:full] == its[:full]
        assert not set(mine[full:]) & set(its)
    assert child.copies == [(p[full], c[full]) for p, c in zip(parent.blocks, child.blocks, strict=True) if copied]


def test_the_source_of_a_copy_is_not_reused_before_the_copy_is_in_a_plan() -> None:
    """Red when the parent's end frees a block that a child has yet to copy."""
    cache = make_cache(blocks=4)
    parent, child = compute(cache, TOKENS[:40]), cache.table("")
    assert cache.fork(parent, child, 40)
    cache.free(parent)
    assert cache.pool.available == 0
    assert cache.drop_copies(child)
    assert cache.pool.available == 1


def test_a_fork_without_room_changes_nothing() -> None:
    """Red when a failed fork leaks references."""
    cache = make_cache(blocks=3)
    parent, child = compute(cache, TOKENS[:40]), cache.table("")
    refs = list(cache.pool.refs)
    assert not cache.fork(parent, child, 40)
    assert cache.pool.refs == refs
    assert child.held == 0


# Marks


def test_a_marked_block_is_waited_for_until_it_is_computed_or_given_up() -> None:
    """Red when a mark is not removed by the commit, or by the end of its producer."""
    cache = make_cache()
    producer, waiter = cache.table(""), cache.table("")
    cache.mark(producer, TOKENS[:64])
    cache.lookup(waiter, TOKENS[:56], 3)
    assert cache.producing(waiter, 0, 3) == producer.keys[2]
    cache.allocate(producer, 20)
    cache.commit(producer, TOKENS[:64], 20)
    assert cache.producing(waiter, 1, 3) == producer.keys[2]
    cache.free(producer)
    assert cache.producing(waiter, 1, 3) is None
    assert not cache.marks


def test_reset_forgets_everything_and_nothing_stale_comes_back() -> None:
    """Red when a running sequence goes on publishing under a chain whose beginning was forgotten."""
    cache = make_cache()
    table = compute(cache, TOKENS[:40])
    cache.mark(table, TOKENS[:80])
    cache.reset([table])
    assert not cache.marks
    cache.allocate(table, 80)
    cache.commit(table, TOKENS, 80)
    assert hit_blocks(cache, TOKENS[:80]) == 0
    cache.free(table)
    assert cache.pool.available == cache.pool.size
    compute(cache, TOKENS[:80])
    assert hit_blocks(cache, TOKENS[:80]) == 5


# Sizes


@pytest.mark.parametrize("windows", [(0,), (20,), (0, 33), (0, 0, 16, 16)])
@pytest.mark.parametrize("max_chunk", [1, 16, 40])
def test_a_sequence_never_holds_more_than_its_peak(windows: tuple[int, ...], max_chunk: int) -> None:
    """Red when admission believes that a sequence needs less than it can come to hold."""
    for length in (1, 15, 16, 17, 70, 200):
        cache = make_cache(*map(window_group, windows), max_chunk=max_chunk)
        for chunk in {1, 7, max_chunk} & set(range(max_chunk + 1)):
            table, computed, most = cache.table(""), 0, 0
            while computed < length:
                step = min(chunk, length - computed)
                assert cache.allocate(table, computed + step) is not None
                most = max(most, table.held)
                computed += step
                if computed >= table.due:
                    cache.commit(table, TOKENS, computed)
            assert most <= cache.peak_blocks(length)
            cache.free(table)


def test_longest_is_the_last_length_that_fits_the_pool() -> None:
    """Red when the search is off by a block, or the limit is exceeded."""
    for blocks in range(30):
        cache = make_cache(FULL, window_group(20), blocks=blocks, max_chunk=16)
        longest = cache.longest(300)
        assert longest == max((n for n in range(301) if cache.peak_blocks(n) <= blocks), default=0)
