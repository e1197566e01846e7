"""The cost model: what it learns, what it does not believe, and how it divides a step's time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from math import inf, log
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.core.costs import LEAST_CHUNK, CostModel, Room, Work
from noria.core.prices import Prices

TRUE = Prices(start=3e-3, tokens=4e-4, pairs=2e-7, context=5e-7, logits=1e-4)
OTHER = Prices(start=90e-3, tokens=1e-3, pairs=1e-6, context=2e-6, logits=5e-3)  # a big model: far from every guess
WRONG = Prices(start=2e-2, tokens=8e-5, pairs=2e-6, context=1e-7, logits=1e-3)


def seconds(prices: Prices, work: Work) -> float:
    return CostModel(prices).seconds(work)


def traffic(random: Random) -> Iterator[Work]:
    """Steps as they are: some decodes, and now and then a chunk of a prompt beside them."""
    while True:
        decodes = random.randint(0, 64)
        context = sum(random.randint(50, 1500) for _ in range(decodes))
        chunk = random.choice([0, 0, 64, 200, 512]) or (0 if decodes else 100)
        start = random.choice([0, 0, 512, 3000])
        pairs = chunk * start + chunk * (chunk + 1) // 2
        yield Work(decodes + chunk, context + pairs, context + (start + chunk if chunk else 0), decodes + bool(chunk))


def taught(prices: Prices, steps: int, *, guess: Prices | None = None, noise: float = 0.05, seed: int = 1) -> CostModel:
    model, random = CostModel(guess), Random(seed)
    for work, _ in zip(traffic(random), range(steps), strict=False):
        model.learn(work, seconds(prices, work) * random.lognormvariate(0, noise))
    return model


def errors(model: CostModel, prices: Prices, seed: int = 99) -> list[float]:
    """|log(predicted / true)| of steps it has not seen, sorted."""
    works = [work for work, _ in zip(traffic(Random(seed)), range(200), strict=False)]
    return sorted(abs(log(model.seconds(work) / seconds(prices, work))) for work in works)


@pytest.mark.parametrize("prices", [TRUE, OTHER])
@pytest.mark.parametrize("guess", [WRONG, Prices()])
def test_it_learns_the_prices_of_mixed_steps(prices: Prices, guess: Prices) -> None:
    """Red when a term of the model or of the filter is wrong: predictions of steps it never saw would be off."""
    before, after = errors(CostModel(guess), prices), errors(taught(prices, 150, guess=guess), prices)
    assert before[100] > 0.1, "the guess is no test"
    assert after[100] < 0.05
    assert after[190] < 0.15


def test_the_first_step_already_sets_the_scale() -> None:
    """Red when the guess counts for as much as a measurement: the first requests would be planned by a fiction."""
    model, work = CostModel(WRONG), Work(512, 512 * 513 // 2, 512, 1)
    model.learn(work, seconds(OTHER, work))
    assert model.seconds(work) == pytest.approx(seconds(OTHER, work), rel=0.1)


def test_an_outlier_hardly_counts() -> None:
    """Red when a step that waited for a page or a neighbour is believed: all chunks after it would be small."""
    model = taught(TRUE, 200)
    work = next(traffic(Random(5)))
    before = model.seconds(work)
    model.learn(work, 30 * before)
    assert model.seconds(work) < 1.06 * before
    model.learn(work, before)
    model.learn(work, before)
    assert model.seconds(work) == pytest.approx(before, rel=0.04)


def test_a_first_step_that_is_an_outlier_is_forgotten() -> None:
    """Red when what came first is trusted for ever: the first step touches all memory for the first time."""
    model, works = CostModel(), traffic(Random(2))
    model.learn(next(works), 5.0)
    for work in (next(works) for _ in range(20)):
        model.learn(work, seconds(TRUE, work))
    assert errors(model, TRUE)[100] < 0.2


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_another_regime_is_believed_within_a_few_steps(factor: float) -> None:
    """Red when surprises are only clipped: a neighbour that comes or goes would be noticed minutes later."""
    model, works = taught(TRUE, 300), traffic(Random(3))
    for work in (next(works) for _ in range(12)):
        model.learn(work, factor * seconds(TRUE, work))
    work = next(works)
    assert model.seconds(work) == pytest.approx(factor * seconds(TRUE, work), rel=0.2)


def test_a_slow_drift_is_followed_for_ever() -> None:
    """Red when certainty only grows: after an hour of steps, a change too small to surprise would never be learned."""
    model, works, random = taught(TRUE, 5000, noise=0.03), traffic(Random(5)), Random(9)
    drifts = []
    for work in (next(works) for _ in range(800)):
        model.learn(work, 1.08 * seconds(TRUE, work) * random.lognormvariate(0, 0.03))
        drifts.append(log(model.seconds(work) / seconds(TRUE, work)))
    assert sum(drifts[400:]) / 400 == pytest.approx(log(1.08), abs=0.02)


def test_what_a_step_says_nothing_about_stays() -> None:
    """Red when decodes alone move the price of attention in prefill."""
    model, random = CostModel(WRONG), Random(4)
    for _ in range(2000):
        rows = random.randint(1, 32)
        work = Work(rows, rows * 20, rows * 20, rows)
        model.learn(work, seconds(TRUE, work) * random.lognormvariate(0, 0.05))
    assert 0.05 < model.prices.pairs / WRONG.pairs < 20
    assert all(p > 0 for p in (model.prices.start, model.prices.tokens, model.prices.context, model.prices.logits))


def test_noise_raises_the_margin_until_steps_stay_below_it() -> None:
    """Red when the mean is planned for: half of the steps would be over the target."""
    model, random = taught(TRUE, 300, noise=0.0), Random(6)
    assert model.margin < 1.05
    works = traffic(random)
    for _ in range(1500):
        work = next(works)
        model.learn(work, seconds(TRUE, work) * random.lognormvariate(0, 0.15))
    over = 0
    for _ in range(1000):
        work = next(works)
        time = seconds(TRUE, work) * random.lognormvariate(0, 0.15)
        over += time > model.margin * model.seconds(work) and work.tokens > work.logits
        model.learn(work, time)
    assert over <= 20


def test_a_device_without_a_clock_teaches_nothing() -> None:
    """Red when a zero or a broken clock enters a logarithm."""
    model = CostModel(TRUE)
    for bad in (0.0, -1.0, inf, float("nan")):
        model.learn(Work(1, 1, 1, 1), bad)
    assert (model.steps, model.prices.measured) == (0, False)
    assert model.seconds(Work(100, 5050, 100, 1)) == pytest.approx(seconds(TRUE, Work(100, 5050, 100, 1)))


def test_equal_histories_predict_the_same_bits() -> None:
    """Red when the model reads a clock, draws a number, or depends on the order of a set: a plan is a function of state."""
    model = taught(TRUE, 50)
    twin = copy.deepcopy(model)
    for work, _ in zip(traffic(Random(8)), range(50), strict=False):
        model.learn(work, seconds(OTHER, work))
        twin.learn(work, seconds(OTHER, work))
        assert model.seconds(work) == twin.seconds(work)
        assert model.margin == twin.margin


@given(
    budget=st.floats(0, 2),
    start=st.integers(0, 100_000),
    most=st.integers(1, 4096),
    prices=st.sampled_from([TRUE, OTHER, WRONG]),
)
def test_a_chunk_is_the_longest_that_fits_the_time(budget: float, start: int, most: int, prices: Prices) -> None:
    """Red when the root of the quadratic is wrong, or is rounded up."""
    model = CostModel(prices)
    count = model.chunk_within(budget, start, most)
    assert 0 <= count <= most
    if count:
        assert model.chunk_seconds(start, count) <= budget * (1 + 1e-9)
    if count < most:
        assert model.chunk_seconds(start, count + 1) > budget * (1 - 1e-9)


def test_room_ends_at_the_target() -> None:
    """Red when the margin, the usable share or an earlier chunk of the step is not counted."""
    model = CostModel(TRUE)
    decodes = Work(10, 3000, 3000, 10)
    room = Room.beside(model, 512, 0.1, decodes)
    first = room.chunk(0, 150)
    assert first == 150
    room.take(0, first)
    second = room.chunk(5, 4000)
    assert second > 0
    assert (5 + second) % 16 == 0, "a chunk that time cuts short ends between blocks"
    room.take(5, second)
    total = model.seconds(decodes) + model.chunk_seconds(0, first) + model.chunk_seconds(5, second)
    assert 0.09 - model.chunk_seconds(5 + second, 16) < total <= 0.09
    assert room.chunk(0, 4000) == 0
    assert room.tokens == 512 - first - second


def test_room_gives_one_least_chunk_however_little_time_is_left() -> None:
    """Red when decodes that take the whole target starve prefill, or every prompt gets a least chunk."""
    room = Room.beside(CostModel(TRUE), 512, 0.01, Work(64, 64_000, 64_000, 64))
    assert room.chunk(100, 7) == 7
    assert room.chunk(100, 4000) == LEAST_CHUNK
    room.take(100, LEAST_CHUNK)
    assert room.chunk(0, 4000) == 0


def test_room_without_decodes_is_the_budget() -> None:
    """Red when prefill is slowed down although nobody waits for a token."""
    room = Room(CostModel(OTHER), 512)
    assert room.chunk(0, 4000) == 512
    room.take(0, 512)
    assert room.chunk(0, 4000) == 0
