"""How many drafts are worth it, and what an engine does with them."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import LAPTOP, Simulation

from fakes import FULL, Adversary, ConstantRunner, FakeRunner, Row, make_engine, make_request, run
from noria.config import EngineConfig
from noria.core.bargain import Bargain, Proposal
from noria.core.costs import CostModel, Work
from noria.core.drafter import Drafter
from noria.core.lookup import OwnText
from noria.core.prices import Prices
from noria.core.verification import VerificationCost

NEARLY_FREE = Prices(start=1e-2, tokens=1e-6, pairs=1e-9, context=1e-9, logits=1e-6)
NGRAM = {"method": "ngram", "num_speculative_tokens": 8}


def bargain(prices: Prices, running: int, seconds: float = 1.0) -> Bargain:
    return Bargain(VerificationCost(CostModel(prices)), Work(running, running * 100, running * 100, running), seconds)


def test_drafts_are_taken_where_tokens_are_nearly_free() -> None:
    """Red when a run of likely drafts is cut though each further one raises the rate."""
    assert bargain(LAPTOP, 1).choose([Proposal(100, [1] * 8, [0.9**i for i in range(1, 9)])]) == [8]


def test_no_drafts_where_the_step_is_bound_by_its_tokens() -> None:
    """Red when drafts that come true half of the time displace work that always counts."""
    dear = Prices(start=1e-4, tokens=1e-3, pairs=1e-9, context=1e-9, logits=1e-5)
    assert bargain(dear, 32).choose([Proposal(100, [1] * 8, [0.5, 0.25])]) == [0]


def test_unlikely_drafts_are_not_worth_a_token() -> None:
    """Red when the odds do not count."""
    assert bargain(LAPTOP, 1).choose([Proposal(100, [1] * 8, [0.05, 0.0025])]) == [0]


def test_drafts_keep_to_the_time_that_is_left() -> None:
    """Red when drafts push a step beyond the target of its decodes."""
    assert bargain(LAPTOP, 1, seconds=0.0).choose([Proposal(100, [1] * 8, [0.9, 0.8])]) == [0]


def test_no_row_pays_for_the_drafts_of_its_neighbours() -> None:
    """Red when the rate of all together is all that counts: a row without guesses would wait for those with good ones."""
    sure = Proposal(100, [1] * 8, [0.95**i for i in range(1, 9)])
    assert bargain(LAPTOP, 4).choose([sure] * 3) == [0, 0, 0]
    assert min(bargain(LAPTOP, 4).choose([sure] * 4)) > 0
    assert bargain(NEARLY_FREE, 4).choose([sure]) == [8]


@given(
    odds=st.lists(st.lists(st.floats(0.06, 1.0), min_size=1, max_size=8), max_size=6),
    others=st.integers(0, 3),
    token=st.floats(1e-6, 1e-2),
)
def test_rates_with_drafts_are_not_lower_than_without(odds: list[list[float]], others: int, token: float) -> None:
    """Red when some row, or all together, are expected to be slower by more than the harm that is allowed; and when a step is
    ruled out by a row though drafts would be chosen."""
    proposals = [Proposal(100, [1] * len(row), list(accumulate(row, mul))) for row in odds]
    rows = len(proposals) + others
    cost = VerificationCost(CostModel(Prices(start=3e-3, tokens=token, pairs=1e-9, context=1e-9, logits=1e-5)))
    work = Work(rows, rows * 101, rows * 101, rows)
    bargained = Bargain(cost, work, 1.0)
    counts = bargained.choose(proposals)
    drafts = sum(counts)
    slower = cost.seconds(Work(rows + drafts, rows * 101 + drafts * 109, rows * 101 + drafts, rows + drafts)) / cost.seconds(
        work
    )
    gains = [sum(proposal.runs[:count]) for proposal, count in zip(proposals, counts, strict=True)] + [0.0] * others
    if drafts:
        assert slower <= (1 + min(gains)) * 1.031
        assert (rows + sum(gains)) / rows > slower
        assert not any(bargained.is_off(proposal) for proposal in [*proposals, *[None] * others])


def test_speculation_rests_where_it_is_not_worth_it_but_not_for_one_stream() -> None:
    """Red when guesses cost time in every step of a full machine, or a lone stream begins to copy late."""
    for count, rested in ((1, False), (6, True)):
        engine, _ = make_engine(runner=ConstantRunner((FULL,), 257), num_blocks=257, speculative_config=NGRAM)
        considered: list[bool] = []
        considers = engine.speculator.considers
        engine.speculator.considers = lambda s, f=considers, c=considered: c.append(f(s)) or c[-1]  # type: ignore[method-assign, misc]
        engine.speculator.drafter = lambda sequence: None  # type: ignore[method-assign]
        run(engine, *[make_request(range(9 * n, 9 * n + 8), max_tokens=40) for n in range(count)])
        assert (considered.count(False) > len(considered) // 2) == rested
        assert all(considered) != rested


class OneLoops(FakeRunner):
    """Says 7 for ever behind a prompt that begins with it, and never the same twice behind others."""

    def _sample(self, row: Row, state: int, position: int, stream: int) -> int:
        return 7 if row.new.tokens[0] == 7 else 1000 * row.new.tokens[0] + position


def test_waiting_for_drafts_that_are_not_given_costs_next_to_nothing() -> None:
    """Red when a sequence leaves out every other step in vain, beside others that rule its drafts out."""
    steps = []
    for config in ({}, {"speculative_config": NGRAM}):
        runner = OneLoops((FULL,), 257, late=True)
        engine, _ = make_engine((FULL,), 257, runner=runner, async_depth=1, prices=LAPTOP, **config)
        requests = [make_request([n] * 8, max_tokens=300 if n == 7 else 400) for n in range(3, 9)]
        for request in requests:
            engine.add(request)
        ended: dict[int, int] = {}
        while engine.has_work:
            ended |= {o.request_id: len(runner.plans) for o in engine.step() if o.finish_reason}
        steps.append(ended[requests[4].request_id])
    assert steps[1] < 1.06 * steps[0]


def test_a_sequence_stops_and_begins_again() -> None:
    """Red when wrong guesses do not lower the odds, or when only drafted guesses are judged: then odds never recover."""
    tokens = [1, 2, 3, 4] * 8
    drafter = Drafter([OwnText(tokens, len(tokens))], {}, len(tokens))
    before = drafter.propose(2)[1][0]

    def say(*said: int) -> None:
        for token in said:
            tokens.append(token)
            drafter.follow(tokens)

    for other in range(30):
        say(1, 2, 50 + other)
    say(1, 2)
    low = drafter.propose(2)[1]
    assert not low or low[0] < before / 2
    say(*[3, 4, 1, 2] * 12)
    assert drafter.propose(2)[1][0] > before * 0.9


def test_a_measured_cost_is_believed_and_an_outlier_is_not() -> None:
    """Red when a tile's step in the cost stays unknown, or a single slow step ends speculation."""
    cost = VerificationCost(CostModel(LAPTOP))
    work = Work(7, 700, 700, 7)
    expected = cost.seconds(work)
    for _ in range(60):
        cost.learn(work, 2 * expected)
    assert cost.seconds(work) == pytest.approx(2 * expected, rel=0.05)
    cost.learn(work, 1000 * expected)
    assert cost.seconds(work) < 2.2 * expected
    cost.learn(Work(64, 700, 700, 1), 1e3)  # a part of a prompt teaches nothing
    assert cost.seconds(Work(64, 700, 700, 64)) == pytest.approx(2 * CostModel(LAPTOP).seconds(Work(64, 700, 700, 64)), rel=0.2)


def test_a_looping_stream_is_several_times_as_fast_and_equal() -> None:
    """Red when drafts are not made, not accepted, or cost more steps than they save."""
    times = []
    for config in (None, NGRAM):
        simulation = Simulation(LAPTOP, **({} if config is None else {"speculative_config": config}))
        request = make_request(8, max_tokens=200)
        simulation.run([(0.0, request)])
        assert len(simulation.times[request.request_id]) == 200
        times.append(simulation.times[request.request_id][-1] - simulation.arrivals[request.request_id])
    assert times[0] > 3 * times[1]


def test_counters_and_a_limit_inside_a_run() -> None:
    """Red when accepted drafts run over max_tokens, or are not counted."""
    engine, _ = make_engine(runner=ConstantRunner((FULL,), 65), speculative_config=NGRAM)
    request = make_request([7] * 20, max_tokens=30)
    collector = run(engine, request)
    assert collector.of(request).tokens == (7,) * 30
    stats = engine.stats()
    assert 0 < stats.spec_accepted_tokens <= stats.spec_draft_tokens
    assert stats.steps + stats.spec_accepted_tokens == 30
    assert stats.generated_tokens == 30


def test_a_stop_id_inside_accepted_drafts_ends_the_choice() -> None:
    """Red when tokens behind a stop are handed out."""
    engine, _ = make_engine(runner=ConstantRunner((FULL,), 65), speculative_config=NGRAM)
    request = make_request([7] * 20, max_tokens=30, min_tokens=5, stop_ids=(7,))
    choice = run(engine, request).of(request)
    assert (choice.tokens, choice.stop_token) == ((7,) * 6, 7)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prediction_is_used_without_any_setting(depth: int) -> None:
    """Red when predictions need a setting, never draft while steps overlap, or are counted by load."""
    engine, _ = make_engine(runner=ConstantRunner((FULL,), 65), async_depth=depth)
    request = make_request(20, max_tokens=40, prediction=(7,) * 35)
    choice = run(engine, request).of(request)
    assert choice.tokens == (7,) * 40
    assert choice.predicted_tokens == 35
    assert engine.stats().spec_accepted_tokens > 10


def test_drafts_take_nothing_from_a_prompt() -> None:
    """Red when drafts are given tokens of the budget before prefill is."""
    for drafting in (False, True):
        engine, runner = make_engine(max_num_batched_tokens=20, num_blocks=200)
        if drafting:
            Adversary(engine, lambda sequence: [7] * 500, 1.0, seed=1)
        first, second = make_request(4, max_tokens=40), make_request(range(200), max_tokens=2)
        engine.add(first)
        engine.step()
        engine.step()
        engine.add(second)
        engine.step()
        prompt_row = next(row for row in runner.plans[-1].rows if row.start == 0)
        assert prompt_row.count == 19


def test_unknown_keys_are_refused() -> None:
    """Red when a key is ignored."""
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"model": "m", "speculative_config": {"method": "ngram", "tokens": 3}}, EngineConfig)
