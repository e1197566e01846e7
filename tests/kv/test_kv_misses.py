"""Why a prefix was not cached: every reason, from an engine that made it true."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fakes import FULL, make_engine, make_request, run, window_group
from noria.core.engine import Engine
from noria.kv.misses import EVICTED, NEVER_SEEN, OFF, OTHER_ROOT, SCORED, SHORT, Misses, diverged

TEXT = list(range(100, 200))


def miss(engine: Engine, prompt: Sequence[int], **kwargs: Any) -> str:
    """The reason that the last output of a request gives."""
    request = make_request(prompt, max_tokens=1, **kwargs)
    return run(engine, request).of(request).cache_miss


def test_a_new_text_was_never_seen() -> None:
    """Red when an empty cache has an excuse, or text with another first token counts as diverged."""
    engine, _ = make_engine()
    assert miss(engine, TEXT) == NEVER_SEEN
    assert miss(engine, [1, *TEXT]) == NEVER_SEEN


def test_a_whole_hit_misses_nothing() -> None:
    """Red when the last block, which no lookup may return, is called a miss."""
    engine, _ = make_engine()
    miss(engine, TEXT)
    assert miss(engine, TEXT) == ""
    assert miss(engine, TEXT[:97]) == ""


def test_a_longer_text_than_was_seen_was_never_seen() -> None:
    """Red when the end of a cached text is called a divergence: nothing else follows it."""
    engine, _ = make_engine()
    miss(engine, TEXT[:33])
    assert miss(engine, TEXT) == NEVER_SEEN


def test_the_token_where_texts_part_is_named() -> None:
    """Red when the position is that of the block, or counts from the block's start."""
    engine, _ = make_engine()
    miss(engine, TEXT)
    for position in (1, 5, 16, 37, 95):
        other = [*TEXT[:position], 7, *TEXT[position + 1 :]]
        assert miss(engine, other) == diverged(position)
        miss(engine, TEXT)  # the last one behind each block again
        engine.reset_prefix_cache()
        miss(engine, TEXT)


def test_another_salt_is_named() -> None:
    """Red when a tenant is told that nobody sent its text, although only the salt differs."""
    engine, _ = make_engine()
    miss(engine, TEXT, salt="a")
    assert miss(engine, TEXT, salt="b") == OTHER_ROOT
    assert miss(engine, TEXT, salt="b") == ""
    assert miss(engine, [9] * 40, salt="c") == NEVER_SEEN


def test_an_evicted_block_is_named_until_it_is_back() -> None:
    """Red when an eviction is not noted, or is remembered after the block was computed again."""
    engine, _ = make_engine(num_blocks=11, max_model_len=150)
    miss(engine, TEXT)
    miss(engine, [5] * 140)
    assert miss(engine, TEXT) == EVICTED
    assert miss(engine, TEXT) == ""


def test_a_window_that_lost_a_block_is_an_eviction() -> None:
    """Red when the index of the full group is taken for that of all: it still has every block of the text."""
    found = []
    for length in range(17, 150, 16):
        engine, _ = make_engine((FULL, window_group(20)), 24, max_model_len=160)
        miss(engine, TEXT[:65])
        full_group = engine.cache.pool._index[0]
        keys = set(full_group)
        miss(engine, [5] * length)
        if keys <= set(full_group):
            found.append(miss(engine, TEXT[:65]))
    assert found[0] == "", "nothing was lost yet"
    assert found[-1] == EVICTED
    assert set(found) == {"", EVICTED}


def test_what_cannot_be_cached_says_why() -> None:
    """Red when a prompt that is too short, is scored, or meets no cache gets the reason of another."""
    engine, _ = make_engine()
    assert miss(engine, TEXT[:16]) == SHORT
    miss(engine, TEXT)
    assert miss(engine, TEXT, prompt_logprobs=0) == SCORED
    assert miss(make_engine(enable_prefix_caching=False)[0], TEXT) == OFF


def test_a_reset_is_a_new_beginning() -> None:
    """Red when the memory of misses survives the cache."""
    engine, _ = make_engine()
    miss(engine, TEXT)
    engine.reset_prefix_cache()
    assert miss(engine, [*TEXT[:50], 3]) == NEVER_SEEN


def test_the_last_evictions_are_those_remembered() -> None:
    """Red when a block that was evicted twice is forgotten as if it had been once, long ago."""
    misses = Misses()
    for key in [b"twice", *(i.to_bytes(16) for i in range(16_000)), b"twice", *(i.to_bytes(16) for i in range(20_000, 21_000))]:
        misses.evicted(key, b"root")
    assert misses.explain(b"twice", b"root", b"", 1) == EVICTED
    assert misses.explain((0).to_bytes(16), b"root", b"", 1) == NEVER_SEEN


def test_the_memory_is_bounded() -> None:
    """Red when evicted keys or first blocks pile up for as long as the server runs."""
    misses = Misses()
    for i in range(40_000):
        key = i.to_bytes(16)
        misses.cached(key, b"root", key * 4, first=True)
        misses.evicted(key, b"root")
    assert len(misses._evicted) == 16_384
    assert len(misses._first) == 1_024
    assert not misses._next
