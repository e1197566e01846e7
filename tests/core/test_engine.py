"""The engine: how requests end, forks, logprobs, time, failure and draining."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from fakes import FULL, Collector, ConstantRunner, FakeClock, FakeRunner, alone, make_engine, make_request, run, window_group
from noria.core.engine import Engine, EngineDead
from noria.core.queue import QueueFull
from noria.core.sequence import State
from noria.models.spec import LayerGroup
from noria.types import FinishReason, NoriaError, Phase, RequestError, SequenceOutput

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def constant(**settings: Any) -> tuple[Engine, FakeRunner]:
    """An engine that samples token 7 for ever."""
    return make_engine(runner=ConstantRunner((FULL,), 65), **settings)


# Ends


@DEPTHS
def test_max_tokens_ends_with_length(depth: int) -> None:
    """Red when a token too many or too few comes out, or overshoot is delivered."""
    engine, runner = make_engine(async_depth=depth)
    request = make_request(20, max_tokens=5)
    choice = run(engine, request).of(request)
    assert (len(choice.tokens), choice.finish_reason) == (5, FinishReason.LENGTH)
    assert runner.computed_tokens == 24  # the last token's KV is not needed


@DEPTHS
def test_a_stop_id_ends_with_stop_and_is_among_the_tokens(depth: int) -> None:
    """Red when the id is dropped, not named, or tokens sampled behind it are delivered."""
    engine, _ = make_engine(async_depth=depth)
    whole = make_request(20, max_tokens=30)
    tokens = run(engine, whole).of(whole).tokens
    stop = tokens[9]
    first = tokens.index(stop)
    request = make_request(20, max_tokens=30, stop_ids=(stop,))
    choice = run(engine, request).of(request)
    assert choice.tokens == tokens[: first + 1]
    assert (choice.finish_reason, choice.stop_token) == (FinishReason.STOP, stop)


def test_a_stop_id_that_is_also_the_last_token_counts_as_stop() -> None:
    """Red when length is looked at before stop."""
    engine, _ = constant()
    request = make_request(4, max_tokens=1, stop_ids=(7,))
    assert run(engine, request).of(request).finish_reason is FinishReason.STOP


def test_nothing_stops_before_min_tokens() -> None:
    """Red when the engine ends a choice at a stop id while fewer than min_tokens tokens are out."""
    engine, _ = constant()
    request = make_request(4, max_tokens=9, min_tokens=3, stop_ids=(7,))
    choice = run(engine, request).of(request)
    assert (len(choice.tokens), choice.finish_reason) == (4, FinishReason.STOP)


@pytest.mark.parametrize("max_tokens", [None, 500])
def test_the_context_ends_with_length(max_tokens: int | None) -> None:
    """Red when a sequence grows beyond max_model_len, where the runner has no place."""
    engine, _ = make_engine(max_model_len=50)
    request = make_request(20, max_tokens=max_tokens)
    choice = run(engine, request).of(request)
    assert (len(choice.tokens), choice.finish_reason) == (30, FinishReason.LENGTH)


def test_a_pool_smaller_than_the_context_is_the_limit() -> None:
    """Red when a sequence may outgrow all memory there is: it would preempt itself for ever."""
    engine, _ = make_engine(num_blocks=5, max_model_len=500)
    assert engine.max_model_len == 64
    request = make_request(20, max_tokens=None)
    assert len(run(engine, request).of(request).tokens) == 44


@DEPTHS
@pytest.mark.parametrize("n", [1, 3])
def test_max_tokens_zero_scores_the_prompt_and_samples_nothing(depth: int, n: int) -> None:
    """Red when echo scoring samples, or a choice gets no end or two."""
    engine, runner = make_engine(async_depth=depth)
    request = make_request(100, max_tokens=0, prompt_logprobs=0, n=n)
    collector = run(engine, request)
    assert all(row.samples == 0 for plan in runner.plans for row in plan.rows)
    for index in range(n):
        choice = collector.of(request, index)
        assert (choice.tokens, choice.finish_reason) == ((), FinishReason.LENGTH)
    scores = collector.of(request).prompt_logprobs
    assert scores is not None
    assert [score.token for score in scores] == list(request.prompt[1:])
    assert engine.stats().prompt_tokens == 100


@DEPTHS
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_an_embedding_is_of_the_prompt_alone(depth: int, pooling: Literal["mean", "last"]) -> None:
    """Red when a chunk, a cache hit or a preemption drops or repeats a position, or a prompt that is embedded samples."""
    engine, _ = make_engine((FULL,), 20, async_depth=depth, max_num_batched_tokens=24, max_model_len=160)
    first, again = (make_request([3] * 100, pooling=pooling, max_tokens=0) for _ in range(2))
    longer = make_request([3] * 75 + [4] * 20, pooling=pooling, max_tokens=0)
    others = [make_request([i] * 20, max_tokens=60) for i in range(3)]
    collector = run(engine, *others, first, again, longer)
    for request in (first, again, longer):
        choice = collector.of(request)
        assert choice.content == alone(request, (FULL,), engine.max_model_len)[0].content
        assert (choice.tokens, choice.finish_reason) == ((), FinishReason.LENGTH)
        assert choice.embedding
    assert sum(collector.of(r).cached_tokens for r in (again, longer)) == (0 if pooling == "mean" else 96 + 64)
    assert engine.stats().kv_usage == 0


@DEPTHS
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_an_embedding_survives_a_preemption(depth: int, pooling: Literal["mean", "last"]) -> None:
    """Red when a sum that was cut short goes on behind the blocks that stayed cached."""
    engine, _ = make_engine(async_depth=depth, max_num_batched_tokens=20)
    request = make_request([3] * 100, pooling=pooling, max_tokens=0)
    engine.add(request)
    for _ in range(3):
        engine.step()
    (sequence,) = engine.scheduler.running
    engine.scheduler._preempt(sequence, engine._clock())
    collector = Collector()
    while engine.has_work:
        collector.take(engine.step())
        engine.audit()
    choice = collector.of(request)
    assert choice.preemptions == 1
    assert choice.content == alone(request, (FULL,), engine.max_model_len)[0].content


def test_a_prompt_that_is_embedded_generates_nothing() -> None:
    """Red when a shell's mistake would make an engine sample behind an embedding."""
    with pytest.raises(ValueError, match="pooling"):
        make_engine()[0].add(make_request(5, pooling="mean", max_tokens=3))


@DEPTHS
def test_a_deadline_ends_waiting_and_running_requests(depth: int) -> None:
    """Red when a deadline is not looked at, or only of those who run."""
    clock = FakeClock()
    engine, _ = make_engine(clock=clock, max_num_seqs=1, async_depth=depth, request_timeout_s=1000.0)
    running = make_request(20, max_tokens=400, deadline=clock.now + 0.05)
    waiting = make_request(20, max_tokens=400, deadline=clock.now + 0.06)
    patient = make_request(20, max_tokens=3)
    collector = run(engine, running, waiting, patient)
    assert collector.of(running).finish_reason is FinishReason.TIMEOUT
    assert 0 < len(collector.of(running).tokens) < 400
    assert collector.of(waiting).finish_reason is FinishReason.TIMEOUT
    assert collector.of(waiting).tokens == () or len(collector.of(waiting).tokens) < 400
    assert collector.of(patient).finish_reason is FinishReason.LENGTH


def test_the_configured_timeout_counts_from_arrival() -> None:
    """Red when request_timeout_s is ignored, or counted from admission."""
    clock = FakeClock()
    clock.now = 100.0
    engine, _ = make_engine(clock=clock, request_timeout_s=10.0)
    late, early = make_request(5, max_tokens=2, arrival=91.0), make_request(5, max_tokens=2, arrival=89.0)
    collector = run(engine, late, early)
    assert collector.of(late).finish_reason is FinishReason.LENGTH
    assert collector.of(early).finish_reason is FinishReason.TIMEOUT


# Abort


@DEPTHS
@pytest.mark.parametrize("after", [0, 1, 2, 3, 5])
def test_abort_at_any_moment_ends_every_choice_once_and_leaks_nothing(depth: int, after: int) -> None:
    """Red when a moment is missed: waiting, in prefill, before or behind the fork."""
    engine, _ = make_engine(async_depth=depth, max_num_batched_tokens=40)
    request, other = make_request(100, max_tokens=50, n=3, temperature=1.0), make_request([5] * 30, max_tokens=9)
    collector = Collector()
    engine.add(request)
    engine.add(other)
    for _ in range(after):
        collector.take(engine.step())
    ended = engine.abort(request.request_id)
    assert [(o.index, o.finish_reason) for o in ended] == [(i, FinishReason.ABORT) for i in range(3)]
    assert engine.abort(request.request_id) == []
    engine.audit()
    collector.take(ended)
    while engine.has_work:
        collector.take(engine.step())
        engine.audit()
    assert collector.of(other).content == alone(other, (FULL,), engine.max_model_len)[0].content
    assert engine.stats().kv_usage == 0
    assert engine.stats().finished == {"abort": 1, "length": 1}


@DEPTHS
def test_one_choice_can_end_while_the_others_go_on(depth: int) -> None:
    """Red when a choice that a stop string has ended is decoded to its limit, or takes its siblings with it."""
    engine, _ = make_engine(async_depth=depth)
    request = make_request(20, max_tokens=50, n=3, temperature=1.0)
    collector = Collector()
    engine.add(request)
    assert engine.abort(request.request_id, 1) == []  # before the fork there is nothing to end
    for _ in range(8):
        collector.take(engine.step())
    ended = engine.abort(request.request_id, 1)
    assert [(o.index, o.finish_reason) for o in ended] == [(1, FinishReason.ABORT)]
    assert engine.abort(request.request_id, 1) == []
    collector.take(ended)
    assert engine.stats().running == 2
    while engine.has_work:
        collector.take(engine.step())
        engine.audit()
    expected = alone(request, (FULL,), engine.max_model_len)
    for index in (0, 2):
        assert collector.of(request, index).content == expected[index].content
    assert engine.stats().kv_usage == 0


def test_blocks_in_flight_are_freed_only_when_the_step_is_back() -> None:
    """Red when abort frees what the device still writes to."""
    engine, _ = make_engine(async_depth=1)
    request = make_request(20, max_tokens=50)
    engine.add(request)
    engine.step()
    (sequence,) = engine.scheduler.running
    engine.abort(request.request_id)
    assert sequence.state is State.FINISHED
    assert sequence.kv.held == 2
    assert engine.has_work
    engine.step()
    assert sequence.kv.held == 0
    assert not engine.has_work


# Choices


@DEPTHS
@pytest.mark.parametrize("groups", [(FULL,), (FULL, window_group(20))], ids=["full", "window"])
@pytest.mark.parametrize("length", [32, 40])
@pytest.mark.parametrize("caching", [True, False])
def test_choices_share_one_prefill_and_diverge(depth: int, groups: tuple[LayerGroup, ...], length: int, caching: bool) -> None:
    """Red when the prompt is computed for each choice, or the partial block is shared."""
    engine, runner = make_engine(groups, 100, async_depth=depth, enable_prefix_caching=caching)
    request = make_request(length, max_tokens=20, n=4, temperature=1.0, logprobs=0)
    collector = run(engine, request)
    whole = alone(request, groups, engine.max_model_len)
    assert [collector.of(request, i).content for i in range(4)] == [choice.content for choice in whole]
    assert len({choice.tokens for choice in whole}) == 4
    assert runner.computed_tokens == length + 4 * 19
    assert sum(len(plan.copies) for plan in runner.plans) == (3 * len(groups) if length % 16 else 0)
    assert engine.stats().prompt_tokens == length


def test_choices_without_rows_wait_and_go_on_from_the_cache() -> None:
    """Red when a choice that cannot be forked is lost, or computes the prompt again."""
    engine, runner = make_engine(max_num_seqs=2)
    request = make_request(40, max_tokens=6, n=5, temperature=1.0)
    collector = run(engine, request)
    whole = alone(request, (FULL,), engine.max_model_len)
    assert [collector.of(request, i).content for i in range(5)] == [choice.content for choice in whole]
    assert runner.computed_tokens == 40 + 5 * 5 + 3 * 8
    assert engine.stats().preemptions == 0


def test_choices_may_end_at_their_first_token() -> None:
    """Red when an ended choice is forked, or choice 0 ends before the others have its blocks."""
    engine, _ = make_engine()
    draws = make_request(40, max_tokens=1, n=6, temperature=1.0)
    firsts = [run(engine, draws).of(draws, 0).tokens[0]]
    request = make_request(40, max_tokens=5, n=6, temperature=1.0, stop_ids=(firsts[0],))
    collector = run(engine, request)
    assert collector.of(request, 0).finish_reason is FinishReason.STOP
    whole = alone(request, (FULL,), engine.max_model_len)
    assert [collector.of(request, i).content for i in range(6)] == [choice.content for choice in whole]


# Prompt logprobs


def test_prompt_logprobs_come_once_and_whole_whatever_the_chunks_and_the_cache() -> None:
    """Red when a cached prefix is skipped though its logits are wanted, or a chunk's scores are lost or doubled."""
    engine, _ = make_engine(max_num_batched_tokens=23)
    run(engine, make_request(100, max_tokens=1))
    request = make_request(100, max_tokens=3, prompt_logprobs=0, n=2)
    collector = run(engine, request)
    assert collector.of(request).cached_tokens == 0
    assert collector.of(request).content == alone(request, (FULL,), engine.max_model_len)[0].content
    assert len(collector.of(request).prompt_logprobs or ()) == 99
    assert collector.of(request, 1).prompt_logprobs is None


@DEPTHS
def test_a_resumed_scoring_request_asks_only_for_what_is_missing(depth: int) -> None:
    """Red when a preemption repeats scores or skips them."""
    engine, runner = make_engine(max_num_batched_tokens=30, async_depth=depth)
    request = make_request(100, max_tokens=1, prompt_logprobs=0)
    engine.add(request)
    engine.step()
    engine.step()
    (sequence,) = engine.scheduler.running
    engine.scheduler._preempt(sequence, engine._clock())
    collector = run(engine)
    assert collector.of(request).content == alone(request, (FULL,), engine.max_model_len)[0].content
    resumed = next(plan for plan in runner.plans[1:] if plan.new_rows)
    assert (resumed.rows[0].start, resumed.rows[0].prompt_logprobs_from) == (48, 60)


# Time and counters


@DEPTHS
def test_the_parts_of_a_requests_time_sum_to_its_lifetime(depth: int) -> None:
    """Red when a state change is not stamped, or time is counted twice. The clock is dyadic: equality is exact."""
    clock = FakeClock()
    engine, _ = make_engine(num_blocks=13, clock=clock, max_num_seqs=3, async_depth=depth)
    engine.scheduler.growth.peak = lambda running: 0  # type: ignore[method-assign]
    requests = [make_request([i % 2] * (20 + i), max_tokens=60, n=1 + i % 2, temperature=1.0) for i in range(8)]
    ended: list[tuple[SequenceOutput, float]] = []
    arrivals = {}
    for request in requests:
        engine.add(request)
        arrivals[request.request_id] = clock.now
    while engine.has_work:
        outputs = engine.step()
        ended += [(output, clock.now) for output in outputs if output.finish_reason]
    assert engine.stats().preemptions
    total = [0.0] * len(Phase)
    for output, now in ended:
        assert sum(output.phases) == now - arrivals[output.request_id]
        total = [a + b for a, b in zip(total, output.phases, strict=True)]
    assert all(total[phase] > 0 for phase in (Phase.QUEUE, Phase.PREFILL, Phase.DECODE, Phase.PREEMPTED))
    assert total[Phase.DELIVERY] == total[Phase.GRAMMAR] == 0


def test_time_begins_at_arrival() -> None:
    """Red when the time on the way to the engine is lost."""
    clock = FakeClock()
    clock.now = 50.0
    engine, _ = make_engine(clock=clock)
    request = make_request(5, max_tokens=1, arrival=48.0)
    assert run(engine, request).of(request).phases[Phase.QUEUE] >= 2.0


def test_counters() -> None:
    """Red when a counter is of sequences instead of requests, or leaves out cached tokens."""
    engine, _ = make_engine()
    request = make_request(40, max_tokens=3)
    run(engine, request, make_request(40, max_tokens=2, n=2), make_request([1] * 8, max_tokens=1))
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_usage, stats.kv_blocks) == (0, 0, 0.0, 64)
    assert stats.prompt_tokens == 88
    assert stats.generated_tokens == 3 + 4 + 1
    assert (stats.prefix_queries, stats.prefix_hits) == (88, 32)
    assert stats.finished == {"length": 3}


# Refusals, draining, failure


def test_a_prompt_that_can_never_be_served_is_refused() -> None:
    """Red when it is queued: it would wait for ever at the head."""
    engine, _ = make_engine(num_blocks=5, max_model_len=500)
    with pytest.raises(RequestError, match="64") as info:
        engine.add(make_request(64, max_tokens=1))
    assert info.value.code == "context_length_exceeded"
    engine.add(make_request(64, max_tokens=0))
    with pytest.raises(RequestError, match="empty"):
        engine.add(make_request([]))
    for token in (-1, 2**31):
        with pytest.raises(RequestError, match="vocabulary"):
            engine.add(make_request([1, token]))


def test_an_engine_without_room_for_a_block_is_refused() -> None:
    """Red when it starts and refuses every request."""
    with pytest.raises(NoriaError, match="kv-cache-memory-bytes"):
        make_engine((FULL, window_group(16)), 2)


def test_seeds_and_ids_are_the_shells_to_choose() -> None:
    """Red when a request without a seed runs: two equal plans would differ."""
    engine, _ = make_engine()
    with pytest.raises(ValueError, match="seed"):
        engine.add(make_request(4, seed=None))
    request = make_request(4)
    engine.add(request)
    with pytest.raises(ValueError, match="id"):
        engine.add(request)


def test_a_full_queue_refuses_and_recovers() -> None:
    """Red when the bound is not enforced, or preempted and ended requests keep their places."""
    engine, _ = make_engine(max_num_seqs=1, max_num_queued_reqs=2)
    for _ in range(3):
        engine.add(make_request(4, max_tokens=1))
    with pytest.raises(QueueFull):
        engine.add(make_request(4))
    run(engine)
    engine.add(make_request(4))


def test_a_draining_engine_finishes_what_it_has() -> None:
    """Red when draining drops requests or takes new ones."""
    engine, _ = make_engine(max_num_seqs=1)
    first, second = make_request(4, max_tokens=3), make_request(4, max_tokens=3)
    engine.add(first)
    engine.add(second)
    engine.drain()
    assert engine.draining
    with pytest.raises(RequestError) as info:
        engine.add(make_request(4))
    assert info.value.status == 503
    collector = run(engine)
    assert len(collector.of(second).tokens) == 3


@DEPTHS
def test_a_failing_runner_ends_all_requests_loudly(depth: int) -> None:
    """Red when a failure loses a request, or the engine goes on."""
    runner = FakeRunner((FULL,), 65, late=depth > 0, failures={3: RuntimeError("device lost")})
    engine, _ = make_engine(runner=runner, async_depth=depth, max_num_seqs=2)
    requests = [make_request([i] * 20, max_tokens=9, n=2) for i in range(3)]
    collector = Collector()
    for request in requests:
        engine.add(request)
    for _ in range(2 + depth):  # step 3 is launched by the third call, and waited for by the fourth at depth 1
        collector.take(engine.step())
    with pytest.raises(EngineDead, match="device lost") as info:
        engine.step()
    assert "running:" in info.value.dump
    collector.take(info.value.outputs)
    for request in requests:
        for index in range(2):
            assert collector.of(request, index).finish_reason is FinishReason.ERROR
    assert not engine.has_work
    with pytest.raises(EngineDead):
        engine.step()
    with pytest.raises(EngineDead):
        engine.add(make_request(4))


def test_a_failing_step_still_delivers_the_ends_before_it() -> None:
    """Red when the outputs of a step that fails are lost: a request would never end."""
    clock = FakeClock()
    runner = FakeRunner((FULL,), 65, failures={2: RuntimeError("device lost")})
    engine, _ = make_engine(runner=runner, clock=clock)
    expiring, other = make_request(4, deadline=clock.now + 0.5), make_request(4)
    engine.add(expiring)
    engine.add(other)
    engine.step()
    clock.now += 1
    with pytest.raises(EngineDead) as info:
        engine.step()
    reasons = {o.request_id: o.finish_reason for o in info.value.outputs}
    assert reasons == {expiring.request_id: FinishReason.TIMEOUT, other.request_id: FinishReason.ERROR}


def test_a_result_of_another_step_is_not_believed() -> None:
    """Red when late results are matched by order alone."""
    engine, runner = make_engine()
    wait = runner.wait
    runner.wait = lambda ticket: wait(ticket).__class__(step=99, rows=())  # type: ignore[method-assign]
    engine.add(make_request(4))
    with pytest.raises(EngineDead, match="step 99"):
        engine.step()


def test_reset_prefix_cache_forgets() -> None:
    """Red when weights change and old KV is still found."""
    engine, _ = make_engine()
    run(engine, make_request(40, max_tokens=1))
    engine.reset_prefix_cache()
    request = make_request(40, max_tokens=1)
    assert run(engine, request).of(request).cached_tokens == 0


def test_close_closes_the_runner() -> None:
    """Red when threads of the device outlive the engine."""
    engine, runner = make_engine()
    engine.close()
    assert runner.closed


def test_steps_are_counted_by_their_tokens() -> None:
    """Red when a step falls into the bucket beside its own: at most 1, 2, 4, 8 ... tokens."""
    engine, runner = make_engine(max_num_batched_tokens=32)
    run(engine, make_request(65, max_tokens=4))
    assert [plan.num_tokens for plan in runner.plans] == [32, 32, 1, 1, 1, 1]
    stats = engine.stats()
    assert stats.step_tokens == 68
    assert stats.iterations[:7] == (4, 0, 0, 0, 0, 2, 0)
    assert sum(stats.iterations) == stats.steps == 6
