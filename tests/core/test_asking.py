"""When a draft model is asked, and what becomes of its answers."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import LAPTOP

from fakes import FULL, Asker, ConstantRunner, FakeRunner, Row, make_engine, make_request, run
from noria.config import EngineConfig
from noria.core.asking import Asking, DraftFacts, Wish
from noria.core.costs import CostModel, Work
from noria.core.model_drafts import ModelDrafts
from noria.core.prices import Prices
from noria.core.verification import VerificationCost

SURE = [0.95**i for i in range(1, 9)]
SMALL = {"method": "draft_model", "model": "small"}


def asking(factor: float, prices: Prices = LAPTOP) -> Asking:
    costs = CostModel(prices)
    return Asking(VerificationCost(costs), costs, DraftFacts(factor, 4))


def decodes(rows: int) -> Work:
    return Work(rows, rows * 100, rows * 100, rows)


def test_a_small_model_that_is_right_is_asked_and_one_as_large_as_the_target_is_not() -> None:
    """Red when the price of its passes, or what they bring, does not count."""
    wish = Wish(SURE, 1, 100)
    assert asking(0.02).drafts(decodes(1), [wish]) > 2
    assert asking(1.0).drafts(decodes(1), [wish]) == 0
    assert asking(0.02).drafts(decodes(1), [Wish([0.1, 0.05], 1, 100)]) == 0


def test_the_way_to_a_long_prompt_is_paid_by_the_tokens_that_are_left() -> None:
    """Red when a sequence that is nearly over makes the draft model read its whole prompt."""
    assert asking(0.02).drafts(decodes(1), [Wish(SURE, 4000, 4000)]) > 0
    assert asking(0.02).drafts(decodes(1), [Wish(SURE, 4000, 8)]) == 0


def test_nobody_pays_who_does_not_ask() -> None:
    """Red when a row without a draft waits for the passes of its neighbours."""
    wishes = [Wish(SURE, 1, 100)] * 3
    assert asking(0.02).drafts(decodes(4), wishes) == 0
    assert asking(0.02).drafts(decodes(3), wishes) > 0


@given(
    rows=st.integers(1, 6),
    wishing=st.integers(1, 6),
    odds=st.floats(0.05, 1.0),
    factor=st.floats(0.001, 1.0),
    behind=st.integers(1, 2000),
)
def test_what_is_asked_is_expected_to_pay(rows: int, wishing: int, odds: float, factor: float, behind: int) -> None:
    """Red when some row, or all together, are expected to be slower than without."""
    wishing = min(rows, wishing)
    wish = Wish(list(accumulate([odds] * 8, mul)), behind, 200)
    decider = asking(factor)
    count = decider.drafts(decodes(rows), [wish] * wishing)
    if not count:
        return
    gain = sum(wish.runs[:count])
    cost = VerificationCost(CostModel(LAPTOP))
    tokens = rows + count * wishing
    slower = cost.seconds(Work(tokens, tokens * 100, rows * 100, tokens)) + factor * count * cost.seconds(decodes(wishing))
    plain = cost.seconds(decodes(rows))
    assert (rows + wishing * gain) / rows > slower / plain
    assert slower <= plain * 1.031 * (1 + gain if wishing == rows else 1)


def test_trials_are_rare() -> None:
    """Red when a model that does not pay is asked more often than every hundredth second of work, or never again."""
    decider = asking(1.0)
    work, wish = decodes(1), Wish([0.1, 0.06], 1, 1000)
    asked = [step for step in range(4000) if decider.drafts(work, [wish])]
    assert 4 <= len(asked) <= 20


def test_the_price_of_a_pass_is_measured() -> None:
    """Red when a wrong guess of the price lasts, or one slow pass ends it."""
    decider, wish = asking(1.0), Wish(SURE, 1, 100)
    plain = VerificationCost(CostModel(LAPTOP)).seconds(decodes(1))
    for _ in range(40):
        decider.learn(decodes(1), plain / 50)
    assert decider.drafts(decodes(1), [wish]) > 0
    decider.learn(decodes(1), 100 * plain)
    decider.learn(decodes(1), 0.0)
    assert decider.drafts(decodes(1), [wish]) > 0


def test_answers_are_followed_and_dropped_with_the_first_wrong_one() -> None:
    """Red when a guess is read behind a token that was another one, or by its accidental equality with a later one."""
    drafts = ModelDrafts(3)
    tokens = [1, 2, 3]
    drafts.receive(3, (4, 5, 6))
    tokens.append(4)
    drafts.advance(tokens, 4)
    assert (drafts.guess, drafts.read(9)) == (5, [5, 6])
    tokens += [9, 5]
    drafts.advance(tokens, 6)
    assert drafts.read(9) == []


class Small(ConstantRunner):
    """A draft model that is right, or always wrong."""

    right = True

    def _run_row(self, planned):  # type: ignore[no-untyped-def]
        result = super()._run_row(planned)
        answer = (self.token if self.right else self.token + 1,) * planned.draft_tokens
        return msgspec.structs.replace(result, drafts=answer)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("right", [True, False])
def test_a_model_that_is_right_saves_steps_and_one_that_is_wrong_is_left_alone(right: bool, depth: int) -> None:
    """Red when answers are not verified, when one in flight is planned past, or when wrong ones go on being bought."""
    runner = Small((FULL,), 257, late=depth > 0)
    runner.right = right
    engine, _ = make_engine(
        runner=runner,
        num_blocks=257,
        async_depth=depth,
        speculative_config=SMALL,
        draft_model=DraftFacts(0.01, 4),
        prices=LAPTOP,
    )
    request = make_request(20, max_tokens=200)
    assert run(engine, request).of(request).tokens == (7,) * 200
    asked = sum(row.draft_tokens > 0 for plan in runner.plans for row in plan.rows)
    stats = engine.stats()
    assert (stats.spec_accepted_tokens > 120) == right
    assert (stats.steps < 70) == right
    assert asked > 15 if right else asked < 40


@pytest.mark.parametrize("depth", [0, 1])
def test_forks_stops_and_limits_beside_a_draft_model(depth: int) -> None:
    """Red when drafts are asked for tokens beyond the end, for choices that are not drawn yet, or for rows that have left."""

    def guess(row: Row, tokens: list[int], count: int) -> list[int]:
        assert len(tokens) + count < row.new.prompt_length + 12
        return [tokens[-1]] * count

    runner = FakeRunner((FULL,), 65, late=depth > 0)
    runner.draft_model = guess
    engine, _ = make_engine(
        (FULL,), 65, runner=runner, async_depth=depth, speculative_config=SMALL, draft_model=DraftFacts(0.1, 4)
    )
    Asker(engine, seed=3)
    requests = [make_request(10 + n, max_tokens=12, n=n, temperature=1.0) for n in (1, 3)]
    collector = run(engine, *requests)
    assert all(len(collector.of(r, i).tokens) == 12 for r in requests for i in range(r.params.n))
    assert any(row.draft_tokens for plan in runner.plans for row in plan.rows)


def test_a_draft_model_needs_a_name_and_its_method() -> None:
    """Red when a setting that does nothing is accepted."""
    for wrong in ({"method": "draft_model"}, {"method": "ngram", "model": "small"}):
        with pytest.raises(msgspec.ValidationError, match="draft_model"):
            msgspec.convert({"model": "m", "speculative_config": wrong}, EngineConfig)
