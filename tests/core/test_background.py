"""Background requests: they run on what the others leave, under every policy."""

from __future__ import annotations

import pytest

from fakes import Collector, make_engine, make_request, run
from noria.core.engine import Engine
from noria.types import EngineRequest, FinishReason

POLICIES = ["fcfs", "priority", "fair"]


def steps(engine: Engine, count: int, collector: Collector | None = None) -> None:
    for _ in range(count):
        outputs = engine.step()
        engine.audit()
        if collector:
            collector.take(outputs)


def running(engine: Engine) -> set[int]:
    return {s.request.request_id for s in engine.scheduler.running}


def batch(count: int, prompt: int = 20, tokens: int = 40, *, first: int = 0) -> list[EngineRequest]:
    return [make_request([first + i] * prompt, max_tokens=tokens, background=True, tenant="batch") for i in range(count)]


@pytest.mark.parametrize("policy", POLICIES)
def test_others_are_admitted_first(policy: str) -> None:
    """Red when background keeps its place in the order of arrival, or is worth a priority that ages."""
    engine, runner = make_engine(max_num_seqs=1, scheduling_policy=policy)
    for request in batch(2):
        engine.add(request)
    for i in range(3):
        engine.add(make_request([90 + i] * 10, max_tokens=2, priority=1000))
    run(engine)
    assert [new.tokens[0] for plan in runner.plans for new in plan.new_rows] == [90, 91, 92, 0, 1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_row_is_made_free_for_another(policy: str, depth: int) -> None:
    """Red when a chat waits until an answer of a batch has ended; the batch's answers stay as they were."""
    engine, _ = make_engine(max_num_seqs=3, num_blocks=100, scheduling_policy=policy, async_depth=depth)
    offline = batch(4)
    collector = Collector()
    for request in offline:
        engine.add(request)
    steps(engine, 5, collector)
    assert len(running(engine)) == 3
    chats = [make_request([80 + i] * 30, max_tokens=5) for i in range(2)]
    for chat in chats:
        engine.add(chat)
    steps(engine, 4, collector)
    assert {c.request_id for c in chats} <= running(engine)
    assert engine.stats().preemptions == 2
    while engine.has_work:
        steps(engine, 1, collector)
    alone = make_engine(max_num_seqs=4, num_blocks=100)[0]
    expected = run(alone, *offline)
    for request in offline:
        assert collector.of(request).content == expected.of(request).content


def test_memory_is_made_free_for_another() -> None:
    """Red when only rows are taken from background: here they are plenty, and blocks are short."""
    engine, _ = make_engine(num_blocks=17, max_num_batched_tokens=256)
    engine.scheduler.growth.peak = lambda running: 0  # type: ignore[method-assign]
    for request in batch(4, prompt=50, tokens=10):
        engine.add(request)
    steps(engine, 2)
    assert engine.stats().running == 4
    chat = make_request([80] * 100, max_tokens=5)
    engine.add(chat)
    steps(engine, 1)
    assert chat.request_id in running(engine)
    assert engine.stats().preemptions == 2, "as many as it takes: 4 blocks each, for 7"
    run(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_background_is_the_first_victim(policy: str) -> None:
    """Red when memory that runs out is taken from a chat while background has some."""
    engine, _ = make_engine(num_blocks=13, max_num_batched_tokens=256, scheduling_policy=policy)
    engine.scheduler.growth.peak = lambda running: 0  # type: ignore[method-assign]
    (offline,) = batch(1, prompt=80, tokens=60)
    engine.add(offline)
    chats = [make_request([80 + i] * 30, max_tokens=40, priority=9) for i in range(2)]
    steps(engine, 1)
    for chat in chats:
        engine.add(chat)
    collector = run(engine)
    assert [collector.of(chat).preemptions for chat in chats] == [0, 0]
    assert collector.of(offline).preemptions > 0
    assert collector.of(offline).finish_reason is FinishReason.LENGTH


def test_background_does_not_preempt_background() -> None:
    """Red when a batch that waits takes the places of one that runs: they would take turns for ever."""
    engine, _ = make_engine(max_num_seqs=2)
    for request in batch(6):
        engine.add(request)
    run(engine)
    assert engine.stats().preemptions == 0


def test_what_another_waits_for_is_not_background() -> None:
    """Red when a chat that waits for a prefix loses it, because who computes it is background."""
    engine, _ = make_engine(num_blocks=100, max_num_seqs=2, max_num_batched_tokens=32)
    prefix = list(range(100, 196))
    engine.add(make_request([*prefix, 1], max_tokens=2, background=True))
    engine.add(make_request([7] * 20, max_tokens=30, background=True))
    steps(engine, 2)
    chat = make_request([*prefix, 2], max_tokens=2)
    engine.add(chat)
    collector = run(engine)
    assert collector.of(chat).cached_tokens == 96
