"""--itl-target-ms, seen from the requests: virtual time, on a device whose prices the engine does not know."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from simulated import LAPTOP, Simulation, percentile

from fakes import make_engine, make_request
from noria.core.prices import Prices
from noria.types import EngineRequest

Traffic = list[tuple[float, EngineRequest]]


def prompt(random: Random, length: int) -> list[int]:
    return [random.randrange(1000, 40000) for _ in range(length)]


def flood(prompts: int = 8) -> tuple[list[EngineRequest], Traffic]:
    """Four answers that are being written, and a prompt of 4,000 tokens every two seconds."""
    random = Random(1)
    streams = [make_request(prompt(random, 100), max_tokens=4000) for _ in range(4)]
    return streams, [(1.0 + 2 * i, make_request(prompt(random, 4000), max_tokens=20)) for i in range(prompts)]


def chats(rate: float, seconds: float) -> Traffic:
    """Poisson arrivals, 64 to 512 tokens in, 32 to 256 out."""
    random, at, traffic = Random(77), 0.0, []
    while (at := at + random.expovariate(rate)) <= seconds:
        traffic.append((at, make_request(prompt(random, random.randint(64, 512)), max_tokens=random.randint(32, 256))))
    return traffic


def burst() -> Traffic:
    """64 requests at once, lengths as `chats`."""
    random = Random(42)
    return [(0.0, make_request(prompt(random, random.randint(64, 512)), max_tokens=random.randint(32, 256))) for _ in range(64)]


@pytest.mark.parametrize("noise", [{}, {"noise": 0.1}, {"noise": 0.1, "outliers": 200}])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_flood_of_long_prompts_leaves_the_target(noise: dict[str, Any], depth: int) -> None:
    """Red when chunks are not bounded by time, or by a time that noise makes too short; control: without a target."""
    streams, prompts = flood()
    simulation = Simulation(itl_target_ms=100, async_depth=depth, **noise)
    simulation.run([*((0.0, s) for s in streams), *prompts], until=40)
    gaps = simulation.gaps(*streams)
    assert percentile(gaps, 0.99) <= 0.1
    assert gaps[-1] <= 0.13 or "outliers" in noise
    answered = [r for _, r in prompts if simulation.times.get(r.request_id)]
    assert len(answered) == len(prompts), "prefill starves"
    if not noise:
        control = Simulation(itl_target_ms=0, async_depth=depth)
        control.run([*((0.0, s) for s in streams), *prompts], until=40)
        assert percentile(control.gaps(*streams), 0.99) > 0.4
        last = prompts[-1][1].request_id
        assert simulation.times[last][0] < 1.25 * control.times[last][0], "a target costs prompts more than it must"


def test_prefill_goes_on_beside_decodes_that_take_the_whole_target() -> None:
    """Red when a prompt waits until decodes leave time: here they never do."""
    streams, prompts = flood(1)
    simulation = Simulation(itl_target_ms=1)
    simulation.run([*((0.0, s) for s in streams), *prompts])
    first = simulation.times[prompts[0][1].request_id][0]
    assert first < simulation.times[streams[0].request_id][-1]
    assert {r.count for plan in simulation.device.plans[200:300] for r in plan.rows} == {1, 16}


@pytest.mark.slow
@pytest.mark.parametrize("noise", [{}, {"noise": 0.1}])
def test_an_open_loop_meets_both_targets(noise: dict[str, Any]) -> None:
    """Red when the target makes prompts wait: at one chat a second both are to be met, with a target or by itself."""
    simulation = Simulation(**noise)
    simulation.run(chats(1.0, 300))
    assert percentile(simulation.gaps(), 0.99) <= 0.1
    assert percentile(simulation.first_tokens(), 0.99) <= 0.5


@pytest.mark.parametrize("noise", [{}, {"noise": 0.1}])
def test_a_burst_loses_little_by_the_default_target(noise: dict[str, Any]) -> None:
    """Red when the default costs throughput: 5 % is the limit."""
    seconds = []
    for settings in ({}, {"itl_target_ms": 0}):
        simulation = Simulation(**settings, **noise)
        simulation.run(burst())
        seconds.append(simulation.clock.now - 1)
    assert seconds[0] / seconds[1] < 1.05


def test_nobody_is_slowed_down_where_no_token_is_waited_for() -> None:
    """Red when a prompt alone, or beside background decodes, is cut into pieces."""
    simulation = Simulation(Prices(start=0.5, tokens=0.01, pairs=1e-6, context=1e-6, logits=1e-3), itl_target_ms=20)
    simulation.run([(0.0, make_request(1000, max_tokens=1))])
    assert [r.count for plan in simulation.device.plans for r in plan.rows] == [512, 488]
    simulation = Simulation(itl_target_ms=5)
    batch = make_request(10, max_tokens=100, background=True)
    simulation.run([(0.0, batch), (0.1, make_request(1000, max_tokens=1))])
    assert max(r.count for plan in simulation.device.plans for r in plan.rows) == 511


def test_the_threshold_is_a_cap_on_what_the_target_allows() -> None:
    """Red when one of the two settings replaces the other."""
    streams, prompts = flood(1)
    simulation = Simulation(itl_target_ms=100, long_prefill_token_threshold=48)
    simulation.run([*((0.0, s) for s in streams), *prompts], until=5)
    assert max(r.count for plan in simulation.device.plans[5:] for r in plan.rows) == 48
    simulation = Simulation(itl_target_ms=30, long_prefill_token_threshold=400)
    simulation.run([*((0.0, s) for s in streams), *prompts], until=5)
    assert max(r.count for plan in simulation.device.plans[9:] for r in plan.rows) < 80


def test_what_was_learned_is_kept_if_it_was_enough() -> None:
    """Red when prices are not handed out at the end, or those of a few steps replace a long run's."""
    kept: list[Prices] = []
    for tokens, times in ((10, 0), (300, 1)):
        simulation = Simulation()
        simulation.engine._keep_prices = kept.append
        simulation.run([(0.0, make_request(300, max_tokens=tokens))])
        simulation.engine.close()
        assert len(kept) == times
    assert kept[0].measured
    assert kept[0].start + kept[0].tokens == pytest.approx(LAPTOP.start + LAPTOP.tokens, rel=0.1)
    assert make_engine(prices=kept[0])[0].scheduler.costs.prices.start == pytest.approx(kept[0].start)
