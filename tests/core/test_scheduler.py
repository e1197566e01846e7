"""The scheduler's rules, each seen in the plans that it makes."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import FULL, Collector, FakeRunner, make_engine, make_request, run, window_group
from noria.core.engine import Engine
from noria.core.plan import StepPlan
from noria.core.sequence import Sequence
from noria.core.victims import choose_victim, inherited, loss
from noria.types import EngineRequest, FinishReason, Phase


def without_watermark(engine: Engine) -> None:
    """Admit whatever fits now, so that memory runs out later."""
    engine.scheduler.growth.peak = lambda running: 0  # type: ignore[method-assign]


def steps(engine: Engine, count: int, collector: Collector | None = None) -> None:
    for _ in range(count):
        outputs = engine.step()
        engine.audit()
        if collector:
            collector.take(outputs)


def admitted(plans: list[StepPlan]) -> list[int]:
    """Prompt lengths in order of admission."""
    return [new.prompt_length for plan in plans for new in plan.new_rows]


# Budget


def test_decodes_come_before_prefills_and_the_budget_holds() -> None:
    """Red when a long prompt delays a running decode, or a step exceeds its tokens."""
    engine, runner = make_engine(max_num_batched_tokens=16, max_model_len=300)
    for _ in range(3):
        engine.add(make_request(4, max_tokens=30))
    steps(engine, 2)
    engine.add(make_request(200, max_tokens=2))
    steps(engine, 10)
    for plan in runner.plans[3:]:
        assert [row.count for row in plan.rows] == [1, 1, 1, 13]
        assert plan.num_tokens == 16


def test_a_long_prompt_takes_at_most_the_threshold_of_a_step() -> None:
    """Red when the threshold is ignored: the short prompt behind would wait for the long one."""
    engine, runner = make_engine(max_num_batched_tokens=64, long_prefill_token_threshold=20)
    engine.add(make_request(200, max_tokens=1))
    engine.add(make_request(range(100, 130), max_tokens=1))
    steps(engine, 1)
    assert [row.count for row in runner.plans[0].rows] == [20, 20]


def test_inner_chunks_sample_nothing_and_the_last_one_samples_once() -> None:
    """Red when a chunk boundary asks for logits, or chunks do not tile the prompt."""
    engine, runner = make_engine(max_num_batched_tokens=23)
    run(engine, make_request(60, max_tokens=1))
    assert [(r.start, r.count, r.samples) for p in runner.plans for r in p.rows] == [
        (0, 23, 0),
        (23, 23, 0),
        (46, 14, 1),
    ]


def test_rows_are_no_more_than_the_budget_can_serve() -> None:
    """Red when more sequences run than tokens fit a step: a decode would get nothing."""
    engine, runner = make_engine(max_num_batched_tokens=16, max_num_seqs=64)
    run(engine, *(make_request([i], max_tokens=3) for i in range(40)))
    assert max(len(plan.rows) for plan in runner.plans) == 16


# Admission


def test_a_prompt_is_admitted_only_when_all_of_it_fits() -> None:
    """Red when admission looks at the first chunk only."""
    engine, runner = make_engine(num_blocks=11, max_num_batched_tokens=16, enable_prefix_caching=False)
    without_watermark(engine)
    engine.add(make_request(80, max_tokens=20))
    engine.add(make_request(range(50, 146), max_tokens=1))  # 6 blocks; 5 are left
    steps(engine, 10)
    assert admitted(runner.plans) == [80]
    run(engine)
    assert admitted(runner.plans) == [80, 96]


def test_what_running_prompts_still_need_is_not_promised_twice() -> None:
    """Red when free blocks are counted without those that admitted prompts have yet to take."""
    engine, _ = make_engine(num_blocks=11, long_prefill_token_threshold=8, enable_prefix_caching=False)
    without_watermark(engine)
    collector = run(engine, *(make_request(range(i, i + 90), max_tokens=1) for i in range(4)))
    assert engine.stats().preemptions == 0
    assert all(choice.finish_reason is FinishReason.LENGTH for choice in collector.choices.values())


def test_blocks_that_others_hold_anyway_need_no_room() -> None:
    """Red when admission counts a shared prefix as new memory."""
    engine, _ = make_engine(num_blocks=11, max_num_batched_tokens=128)
    without_watermark(engine)
    engine.add(make_request(100, max_tokens=10))
    steps(engine, 1)
    engine.add(make_request([*range(1, 97), 0, 0], max_tokens=10))
    steps(engine, 1)
    assert engine.stats().running == 2
    run(engine)


def test_the_watermark_keeps_room_for_growth() -> None:
    """Red when the watermark is not part of admission: four sequences of 5 blocks would enter 12 blocks."""
    engine, _ = make_engine(num_blocks=13, enable_prefix_caching=False)
    run(engine, *(make_request([i] * 16, max_tokens=64) for i in range(4)))
    assert engine.stats().preemptions == 0


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    """Red when freed memory goes to a newcomer at once: here the urgent one would fit as soon as the victim is out."""
    engine, runner = make_engine(
        num_blocks=9, max_num_batched_tokens=128, enable_prefix_caching=False, scheduling_policy="priority"
    )
    without_watermark(engine)
    engine.add(make_request([1] * 30, max_tokens=30))
    engine.add(make_request([2] * 90, max_tokens=5, priority=1))
    steps(engine, 1)
    engine.add(make_request([3] * 10, max_tokens=5))
    while not engine.stats().preemptions:
        steps(engine, 1)
    assert not runner.plans[-1].new_rows
    steps(engine, 1)
    assert admitted(runner.plans[-1:]) == [10]
    run(engine)


def test_a_big_request_neither_starves_nor_blocks_for_ever() -> None:
    """Red when small requests overtake one that waits for memory, or it holds the rest back after it ran."""
    engine, runner = make_engine(num_blocks=17, max_num_seqs=4, enable_prefix_caching=False)
    collector = Collector()
    for i in range(3):
        engine.add(make_request([i] * 20, max_tokens=10))
    steps(engine, 1, collector)
    big = make_request([9] * 200, max_tokens=5)
    engine.add(big)
    later = [make_request([i] * 21, max_tokens=10) for i in range(10, 20)]
    for request in later:
        engine.add(request)
    limit = len(runner.plans) + 40
    while (big.request_id, 0) not in collector.choices:
        steps(engine, 1, collector)
        assert len(runner.plans) < limit
    assert admitted(runner.plans)[:4] == [20, 20, 20, 200]
    while engine.has_work:
        steps(engine, 1, collector)
        assert len(runner.plans) < limit + 60
    assert all((request.request_id, 0) in collector.choices for request in later)


def test_a_waiting_sequence_holds_nothing() -> None:
    """Red when blocks are taken at arrival."""
    engine, _ = make_engine(max_num_seqs=1)
    engine.add(make_request(20, max_tokens=9))
    engine.add(make_request(20, max_tokens=9))
    steps(engine, 1)
    assert engine.stats().waiting == 1
    assert engine.cache.pool.referenced == 2


# Preemption


def victims(engine: Engine, sequences: list[Sequence]) -> list[Sequence]:
    """The running sequences in the order in which they were preempted."""
    order: list[Sequence] = []
    while engine.has_work:
        engine.step()
        engine.audit()
        order += [s for s in sequences if s.preemptions and s not in order]
    return order


def start(engine: Engine, *prompts: list[int], priorities: tuple[int, ...] = (0, 0, 0), **params: Any) -> list[Sequence]:
    for prompt, priority in zip(prompts, priorities, strict=False):
        engine.add(make_request(prompt, priority=priority, **params))
    while engine.stats().running < len(prompts):
        engine.step()
    return list(engine.scheduler.running)


def test_the_victim_loses_the_fewest_computed_tokens() -> None:
    """Red when the newest, or the largest, is the victim."""
    engine, _ = make_engine(num_blocks=11, enable_prefix_caching=False)
    without_watermark(engine)
    first, small, large = start(engine, [1] * 30, [2] * 20, [3] * 60, max_tokens=40)
    assert victims(engine, [first, small, large])[0] is small


def test_the_victim_is_of_the_lowest_priority() -> None:
    """Red when priority does not come before the loss."""
    engine, _ = make_engine(num_blocks=11, enable_prefix_caching=False, scheduling_policy="priority")
    without_watermark(engine)
    prompts = ([1] * 30, [2] * 20, [3] * 60)
    first, small, large = start(engine, *prompts, priorities=(0, 0, 1), max_tokens=40)
    assert victims(engine, [first, small, large])[0] is large


def test_the_first_in_order_is_never_the_victim() -> None:
    """Red when the head can lose its place again and again: waiting would have no bound."""
    engine, _ = make_engine(num_blocks=9, enable_prefix_caching=False)
    without_watermark(engine)
    first, second, third = start(engine, [1] * 4, [2] * 40, [3] * 40, max_tokens=60)
    assert victims(engine, [first, second, third])[0] is not first
    assert first.preemptions == 0


def test_shared_blocks_are_not_lost_by_a_preemption() -> None:
    """Red when the loss counts what other sequences keep in the cache anyway."""
    engine, _ = make_engine(num_blocks=60)
    shared = list(range(64))
    run(engine, make_request(shared, max_tokens=1))
    first, sharer, alone = start(engine, [*shared, 1], [*shared, 2], [3] * 40, max_tokens=40)
    assert loss(sharer, engine.cache) < loss(alone, engine.cache)
    assert choose_victim(engine.scheduler.running, engine.queue, engine.cache) is sharer
    assert first.computed > alone.computed


def test_a_preempted_sequence_goes_on_where_its_blocks_are_still_cached() -> None:
    """Red when a resume computes everything again though the cache has it."""
    engine, runner = make_engine(num_blocks=60)
    engine.add(make_request(100, max_tokens=30))
    steps(engine, 5)
    (sequence,) = engine.scheduler.running
    computed = sequence.computed
    engine.scheduler._preempt(sequence, engine._clock())
    engine.audit()
    steps(engine, 1)
    row = runner.plans[-1].rows[0]
    assert row.start == computed // 16 * 16
    assert runner.plans[-1].new_rows[0].tokens == tuple(sequence.tokens[: row.start + row.count])


def test_depth_one_skips_a_row_whose_blocks_are_only_in_flight() -> None:
    """Red when a second sequence is preempted for blocks that come back with the step in flight."""
    engine, _ = make_engine(num_blocks=9, enable_prefix_caching=False, async_depth=1)
    without_watermark(engine)
    for i in range(4):
        engine.add(make_request([i] * (10 + 2 * i), max_tokens=60))
    most = skipped = 0
    while engine.has_work:
        before = engine.stats().preemptions
        engine.step()
        engine.audit()
        most = max(most, engine.stats().preemptions - before)
        planned = {entry.sequence for entry in engine._flight[0].entries} if engine._flight else set()
        skipped += bool(planned) and not engine.scheduler.running.keys() <= planned
    assert engine.stats().preemptions
    assert most == 1
    assert skipped


# Producer marks


def identical(count: int, length: int = 100, **params: Any) -> list[EngineRequest]:
    return [make_request(length, **params) for _ in range(count)]


def test_identical_prompts_compute_their_common_prefix_once() -> None:
    """Red when a request does not wait for the block that another is computing."""
    engine, runner = make_engine(num_blocks=600, max_num_batched_tokens=256, max_num_seqs=64)
    requests = identical(64, max_tokens=2)
    collector = run(engine, *requests)
    assert runner.computed_tokens == 100 + 63 * (100 - 96) + 64
    assert [collector.of(r).cached_tokens for r in requests] == [0] + [96] * 63
    assert collector.of(requests[1]).phases[Phase.KV] > 0


def test_waiting_for_a_producer_is_off_without_prefix_caching() -> None:
    """Red when marks are made though nothing will be shared."""
    engine, runner = make_engine(num_blocks=600, max_num_batched_tokens=256, enable_prefix_caching=False)
    run(engine, *identical(4, max_tokens=1))
    assert runner.computed_tokens == 400
    assert len(runner.plans[0].rows) == 3


@pytest.mark.parametrize("depth", [0, 1])
def test_when_a_producer_is_aborted_the_first_waiter_goes_on_behind_it(depth: int) -> None:
    """Red when waiters wait for a dead producer, or start from nothing, or all at once."""
    engine, runner = make_engine(num_blocks=100, max_num_batched_tokens=32, async_depth=depth)
    first, second, third = identical(3, max_tokens=1)
    for request in (first, second, third):
        engine.add(request)
    steps(engine, 2)
    assert engine.stats().waiting == 2
    engine.abort(first.request_id)
    run(engine)
    assert runner.computed_tokens == 100 + 4
    resumed = next(plan for plan in runner.plans if plan.new_rows and plan.step > 1)
    assert len(resumed.new_rows) == 1
    assert resumed.rows[0].start == 64


def test_a_waiter_keeps_its_place_while_others_pass() -> None:
    """Red when a request that waits for a block also stops those behind it."""
    engine, runner = make_engine(num_blocks=100, max_num_batched_tokens=32, long_prefill_token_threshold=16)
    first, second = identical(2, max_tokens=1)
    engine.add(first)
    engine.add(second)
    engine.add(make_request([7] * 10, max_tokens=1))
    steps(engine, 1)
    assert admitted(runner.plans) == [100, 10]
    assert [s.request for s in engine.queue] == [second]
    run(engine)


def test_a_producer_inherits_the_priority_of_its_waiters() -> None:
    """Red when an urgent request waits for a block whose producer is preempted as the least urgent."""
    engine, _ = make_engine(
        num_blocks=100, max_num_batched_tokens=32, long_prefill_token_threshold=16, scheduling_policy="priority"
    )
    engine.add(make_request([9] * 4, max_tokens=50, priority=-3))
    steps(engine, 2)
    engine.add(make_request(100, max_tokens=1, priority=5))
    engine.add(make_request([8] * 40, max_tokens=1, priority=3))
    steps(engine, 1)
    producer = next(s for s in engine.scheduler.running if s.request.priority == 5)
    other = next(s for s in engine.scheduler.running if s.request.priority == -3)
    assert choose_victim(engine.scheduler.running, engine.queue, engine.cache) is producer
    engine.add(make_request(100, max_tokens=1, priority=-4))
    steps(engine, 1)
    assert inherited(engine.queue, engine.cache)[producer.kv][0] == -4
    candidates = [s for s in engine.scheduler.running if s not in (producer, other)]
    assert choose_victim(engine.scheduler.running, engine.queue, engine.cache) in candidates


# Windows and plans


def test_a_window_group_gives_memory_back_while_a_prompt_is_computed() -> None:
    """Red when blocks behind the window are kept until the end."""
    engine, runner = make_engine((window_group(32),), 9, max_num_batched_tokens=16, max_model_len=400)
    assert engine.max_model_len == 400
    collector = run(engine, make_request(300, max_tokens=40))
    assert len(next(iter(collector.choices.values())).tokens) == 40
    assert any(plan.released for plan in runner.plans)


def test_equal_traffic_makes_equal_plans() -> None:
    """Red when a plan depends on object identities, hash seeds or set order."""

    def plans() -> list[StepPlan]:
        engine, runner = make_engine((FULL, window_group(20)), 60, max_num_batched_tokens=40, async_depth=1)
        run(engine, *(make_request([i % 3] * (20 + i), max_tokens=9, n=1 + i % 3) for i in range(12)))
        return runner.plans

    assert plans() == plans()


def test_a_plan_names_only_tokens_that_the_runner_has_not_seen() -> None:
    """Red when a plan grows with the sequence."""
    engine, runner = make_engine()
    run(engine, make_request(40, max_tokens=5))
    assert [len(row.tokens) for plan in runner.plans for row in plan.rows] == [0, 1, 1, 1, 1]


def test_depth_one_binds_ids_that_were_planned_before_they_were_known() -> None:
    """Red when the plan in flight is launched with the wrong ids: the fake would miss a token."""
    engine, runner = make_engine(async_depth=1)
    request = make_request(40, max_tokens=5)
    collector = run(engine, request)
    bound = [row.tokens for plan in runner.plans[1:] for row in plan.rows]
    assert bound == [(token,) for token in collector.of(request).tokens[:4]]
    assert isinstance(runner, FakeRunner)
    assert runner.late
