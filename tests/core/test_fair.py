"""The fair policy: what tenants get while they wait, whatever they ask for."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes import FULL, ConstantRunner, make_engine, make_request
from noria.core.engine import Engine
from noria.core.tenants import OUTPUT_WEIGHT, Tenants
from noria.core.victims import choose_victim

LONGEST_PROMPT, MOST_OUTPUT = 60, 30


class Watched:
    """An engine, and after each step what every tenant had so far and whether it had a request waiting."""

    def __init__(self, policy: str, *, rows: int, blocks: int, budget: int = 64, depth: int = 0) -> None:
        self.rows = rows
        self.engine, self.runner = make_engine(
            (FULL,),
            1 + blocks,
            runner=ConstantRunner((FULL,), 1 + blocks),
            max_model_len=128,
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            scheduling_policy=policy,
            async_depth=depth,
        )
        self.engine.scheduler.growth.peak = lambda running: 0  # type: ignore[method-assign]  # memory runs out
        self.tenant: dict[int, str] = {}
        self.prompts: dict[int, int] = {}
        self.started: set[int] = set()
        self.had: dict[str, float] = defaultdict(float)
        self.history: list[tuple[dict[str, float], set[str]]] = []
        self.salt = 0

    def ask(self, tenant: str, prompt: int, output: int) -> None:
        self.salt += 1  # nobody shares a prefix
        request = make_request(prompt, max_tokens=output, tenant=tenant, salt=str(self.salt))
        self.tenant[request.request_id], self.prompts[request.request_id] = tenant, prompt
        self.engine.add(request)

    def step(self) -> None:
        if not self.engine.has_work:
            return
        waiting = {s.request.tenant for s in self.engine.queue}
        outputs = self.engine.step()
        self.engine.audit()
        for sequence in self.engine.scheduler.running:
            self._start(sequence.request.request_id)
        for output in outputs:
            self._start(output.request_id)
            self.had[self.tenant[output.request_id]] += OUTPUT_WEIGHT * len(output.tokens)
        waiting &= {s.request.tenant for s in self.engine.queue}
        self.history.append((dict(self.had), waiting))

    def _start(self, request_id: int) -> None:
        if request_id not in self.started:
            self.started.add(request_id)
            self.had[self.tenant[request_id]] += self.prompts[request_id]

    def largest_gap(self, one: str, other: str) -> float:
        """The most by which the two had unequal amounts in any interval in which both had requests waiting all the time."""
        largest, low, high = 0.0, float("inf"), float("-inf")
        for had, waiting in self.history:
            if one not in waiting or other not in waiting:
                low, high = float("inf"), float("-inf")
                continue
            ahead = had.get(one, 0.0) - had.get(other, 0.0)
            low, high = min(low, ahead), max(high, ahead)
            largest = max(largest, high - low)
        return largest

    @property
    def bound(self) -> float:
        """Twice the longest prompt and what all running sequences can still make. Knows no time."""
        return 2 * (LONGEST_PROMPT + OUTPUT_WEIGHT * self.rows * MOST_OUTPUT)


ASKS = st.tuples(
    st.sampled_from("abc"), st.integers(1, LONGEST_PROMPT), st.integers(1, MOST_OUTPUT), st.sampled_from([0, 0, 0, 1, 5, 40])
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    asks=st.lists(ASKS, min_size=10, max_size=80),
    rows=st.integers(1, 5),
    blocks=st.integers(8, 24),
    depth=st.integers(0, 1),
)
def test_no_waiting_tenant_falls_behind_another(
    asks: list[tuple[str, int, int, int]], rows: int, blocks: int, depth: int
) -> None:
    """Red when a counter misses a token, a tenant comes back with credit, or admission asks for anything but the counters."""
    watched = Watched("fair", rows=rows, blocks=blocks, depth=depth)
    for tenant, prompt, output, pause in asks:
        watched.ask(tenant, prompt, output)
        for _ in range(pause):
            watched.step()
    while watched.engine.has_work:
        watched.step()
        assert len(watched.history) < 20_000, "somebody waits for ever"
    for one, other in combinations("abc", 2):
        assert watched.largest_gap(one, other) <= watched.bound


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_a_greedy_tenant_takes_its_share_and_no_more(policy: str) -> None:
    """Red when the gap grows with the number of requests; under fcfs, the control, it does."""
    watched = Watched(policy, rows=2, blocks=24)
    for _ in range(4):
        for _ in range(40):
            watched.ask("greedy", 50, 20)
        for _ in range(10):
            watched.ask("modest", 5, 5)
    for _ in range(800):
        watched.step()
    gap = watched.largest_gap("greedy", "modest")
    assert gap <= watched.bound if policy == "fair" else gap > 4 * watched.bound


def test_writers_and_readers_get_the_same() -> None:
    """Red when only prompts are counted: short prompts with long answers would run beside nobody."""
    watched = Watched("fair", rows=2, blocks=24)
    for _ in range(60):
        watched.ask("reader", 60, 1)
        watched.ask("writer", 2, 30)
    while {"reader", "writer"} <= {s.request.tenant for s in watched.engine.queue} or not watched.history:
        watched.step()
    assert min(watched.had.values()) > 1500
    assert watched.largest_gap("reader", "writer") <= watched.bound


def test_who_was_away_comes_back_without_credit() -> None:
    """Red when a tenant that asked for nothing may shut the others out until it has caught up."""
    watched = Watched("fair", rows=2, blocks=24)
    watched.ask("new", 4, 1)  # its counter stays near 0
    for _ in range(80):
        watched.ask("old", 50, 10)
    for _ in range(300):
        watched.step()
    assert watched.had["old"] > 2000
    before = dict(watched.had)
    for _ in range(80):
        watched.ask("new", 50, 10)
    for _ in range(200):
        watched.step()
    gained = {tenant: watched.had[tenant] - before[tenant] for tenant in ("old", "new")}
    assert abs(gained["old"] - gained["new"]) <= watched.bound < min(gained.values())


def test_a_tenant_that_runs_little_cannot_lower_the_start_of_others() -> None:
    """Red when the minimum is taken over tenants that have nothing waiting: the newcomer would be let in alone."""
    watched = Watched("fair", rows=3, blocks=60)
    watched.ask("quiet", 4, MOST_OUTPUT)
    for _ in range(200):
        watched.ask("old", 50, 2)
    for _ in range(25):
        watched.step()
    assert any(s.request.tenant == "quiet" for s in watched.engine.scheduler.running)
    watched.ask("new", 5, 5)
    tenants = watched.engine.queue.tenants
    assert tenants.served("new") == tenants.served("old") > 2 * tenants.served("quiet")


def test_counters_join_at_the_minimum_and_remember_what_is_ahead() -> None:
    """Red when a tenant that ran ahead and left starts at the minimum: one big request at a time would be free."""
    tenants = Tenants()
    for tenant in ("a", "b"):
        tenants.join(tenant, [])
    tenants.admit("a", 100)
    tenants.admit("b", 30)
    tenants.join("c", ["a", "b"])
    assert tenants.served("c") == 30
    tenants.join("a", ["b", "c"])
    assert tenants.served("a") == 100
    tenants.admit("b", 500)
    tenants.join("d", [])
    assert tenants.served("d") == 530, "what the last admitted one has"


def test_counters_of_those_who_left_do_not_pile_up() -> None:
    """Red when every name ever heard is kept."""
    tenants = Tenants()
    for i in range(5000):
        tenants.join(f"t{i}", [])
        tenants.admit(f"t{i}", 10)
    assert len(tenants._served) <= 1025
    assert tenants.served("t4999") == 50_000, "each came when nobody waited, behind the last one"


def running(engine: Engine) -> list[str]:
    return [s.request.tenant for s in engine.scheduler.running]


def test_admission_takes_turns_as_the_counters_say() -> None:
    """Red when the queue's order is fixed before the step: all of the first tenant's requests would enter at once."""
    engine, _ = make_engine(max_num_seqs=4, scheduling_policy="fair", max_num_batched_tokens=256)
    for i in range(6):
        engine.add(make_request([i] * 20, max_tokens=5, tenant="a"))
    for i in range(6):
        engine.add(make_request([50 + i] * 20, max_tokens=5, tenant="b"))
    engine.step()
    engine.audit()
    assert running(engine) == ["a", "b", "a", "b"]


def test_the_tenant_that_had_most_gives_its_place_back_first() -> None:
    """Red when a victim is chosen without the counters: here the modest tenant would lose fewer tokens."""
    engine, _ = make_engine(num_blocks=100, scheduling_policy="fair", max_num_batched_tokens=256)
    first = make_request([1] * 40, max_tokens=50, tenant="modest")
    for request in (
        first,
        make_request([2] * 40, max_tokens=50, tenant="greedy"),
        make_request([3] * 40, max_tokens=50, tenant="greedy"),
        make_request([4] * 20, max_tokens=50, tenant="modest"),
    ):
        engine.add(request)
    for _ in range(3):
        engine.step()
    victim = choose_victim(engine.scheduler.running, engine.queue, engine.cache)
    assert victim.request.tenant == "greedy"
    assert victim.request.prompt[0] == 3
