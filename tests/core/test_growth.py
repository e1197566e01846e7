"""The watermark: what running sequences are expected to need."""

from __future__ import annotations

import pytest

from fakes import FULL, make_request
from noria.core.growth import Growth
from noria.core.sequence import Sequence
from noria.kv.cache import KVCache


def running(cache: KVCache, prompt: int, output: int, max_tokens: int = 1000) -> Sequence:
    sequence = Sequence(
        make_request(prompt, max_tokens=max_tokens),
        cache.table(""),
        rank=(0.0, 0, 0),
        priority=0,
        max_len=2000,
        start=0.0,
    )
    sequence.tokens += [1] * output
    cache.allocate(sequence.kv, prompt + output)
    return sequence


@pytest.fixture
def cache() -> KVCache:
    return KVCache((FULL,), 2000, b"", prefix_caching=True, max_chunk=16)


def test_sequences_that_start_together_need_all_their_growth_at_once(cache: KVCache) -> None:
    """Red when the peak is a mean over time, or counts what nobody frees before it."""
    growth = Growth(1, 2000)
    growth.mean = 160.0
    assert growth.peak([running(cache, 32, 0) for _ in range(5)]) == 5 * 10


def test_sequences_that_end_soon_make_room_for_those_that_go_on(cache: KVCache) -> None:
    """Red when the growth of all is summed as if nobody ever ended."""
    growth = Growth(1, 2000)
    growth.mean = 160.0
    ending = [running(cache, 320, 0, max_tokens=16) for _ in range(4)]
    assert growth.peak([running(cache, 16, 0), *ending]) == 5  # one block each until they end, then 84 come back
    assert growth.peak([running(cache, 16, 0)]) == 10


def test_shared_blocks_do_not_come_back_with_one_of_their_holders(cache: KVCache) -> None:
    """Red when a fork's end is expected to free the prompt that the others hold."""
    growth = Growth(1, 2000)
    growth.mean = 160.0
    ending, going = running(cache, 320, 0, max_tokens=16), running(cache, 320, 0)
    alone = growth.peak([ending, going])
    ending.kv.borrowed = going.kv.borrowed = 20
    assert growth.peak([ending, going]) > alone


def test_the_estimate_follows_what_is_observed_and_rises_when_memory_ran_out() -> None:
    """Red when the watermark does not adapt."""
    growth = Growth(1, 2000)
    for _ in range(100):
        growth.finished(400)
    assert growth.mean == pytest.approx(400, rel=0.01)
    growth.preempted()
    assert growth.mean > 450
    for _ in range(100):
        growth.finished(3)
    assert growth.mean < 5


def test_nobody_is_expected_to_exceed_its_own_limit(cache: KVCache) -> None:
    """Red when max_tokens is ignored: short requests would wait for memory that nobody needs."""
    growth = Growth(1, 2000)
    growth.mean = 1000.0
    assert growth.peak([running(cache, 16, 0, max_tokens=16)]) == 1


def test_the_bound_is_a_bound(cache: KVCache) -> None:
    """Red when the cheap test admits what the exact one would not."""
    growth = Growth(2, 2000)
    for mean in (1.0, 17.0, 300.0):
        growth.mean = mean
        sequences = [running(cache, 10 * i + 1, 7 * i) for i in range(12)]
        assert growth.peak(sequences) <= growth.bound(len(sequences))
