"""Random traffic against the engine: whatever happens around it, a request gets what it gets alone."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from random import Random
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import noria.kv.cache
from fakes import FULL, Adversary, Asker, Choice, Collector, FakeClock, Row, alone, make_engine, make_request, window_group
from noria.core.asking import DraftFacts
from noria.core.sequence import Sequence
from noria.kv.keys import block_key
from noria.models.spec import LayerGroup
from noria.types import EngineRequest, FinishReason, RequestError

GROUPS = {
    "full": (FULL,),
    "full and window": (FULL, window_group(20)),
    "window": (window_group(24),),
    "full and two windows": (FULL, window_group(16), window_group(33)),
}
TREE = [[(7 * branch + i * i) % 50 for i in range(96)] for branch in range(2)]  # what prompts share


@functools.lru_cache(maxsize=5000)
def expected(key: bytes, kind: str, max_model_len: int) -> list[Choice]:
    return alone(msgspec.msgpack.decode(key, type=EngineRequest), GROUPS[kind], max_model_len)


SPECULATION: dict[str, Any] = {
    "off": {},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}},
    "both": {"speculative_config": {"method": ["ngram", "suffix"], "num_speculative_tokens": 5}},
    "draft model": {
        "speculative_config": {"method": ["ngram", "draft_model"], "model": "small", "num_speculative_tokens": 5},
        "draft_model": DraftFacts(0.1, 4),
    },
    "right": {},
    "wrong": {},
    "mixed": {},
}
ERRORS = {"right": 0.0, "wrong": 1.0, "mixed": 0.3}
ALONE = {"prediction": (), "priority": 0, "tenant": "", "background": False, "arrival": 0.0, "deadline": None, "request_id": 0}


def reference(request: EngineRequest, kind: str, max_model_len: int) -> list[Choice]:
    plain = msgspec.structs.replace(request, cache_salt="", **ALONE)
    return expected(msgspec.msgpack.encode(plain), kind, max_model_len)


class Traffic(RuleBasedStateMachine):
    """Red when a table, a copy, a hit, a window, an order of freeing or a count of tokens is wrong anywhere."""

    weak_keys = False

    def __init__(self) -> None:
        super().__init__()
        self.patches = ExitStack()

    @initialize(
        kind=st.sampled_from(sorted(GROUPS)),
        blocks=st.integers(8, 40),
        budget=st.sampled_from([16, 23, 40, 100]),
        threshold=st.sampled_from([0, 5, 16, 33]),
        rows=st.integers(1, 6),
        depth=st.integers(0, 1),
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        caching=st.sampled_from([True, True, True, False]),
        careful=st.sampled_from([True, False, False]),
        itl_target_ms=st.sampled_from([0, 1, 20, 100]),
        speculation=st.sampled_from(["off", "ngram", "both", "right", "wrong", "mixed", "mixed", "draft model", "draft model"]),
    )
    def start(
        self,
        kind: str,
        blocks: int,
        budget: int,
        threshold: int,
        rows: int,
        depth: int,
        policy: str,
        caching: bool,
        careful: bool,
        itl_target_ms: int,
        speculation: str,
    ) -> None:
        if self.weak_keys:
            kind, caching = "full", True
            self.patches.enter_context(
                patch.object(noria.kv.cache, "block_key", lambda parent, packed: block_key(parent, packed)[:1])
            )
        self.kind = kind
        self.clock = FakeClock()
        groups: tuple[LayerGroup, ...] = GROUPS[kind]
        self.engine, self.runner = make_engine(
            groups,
            1 + blocks * len(groups),
            max_model_len=150,
            clock=self.clock,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold,
            max_num_seqs=rows,
            async_depth=depth,
            scheduling_policy=policy,
            enable_prefix_caching=caching,
            max_num_queued_reqs=8,
            itl_target_ms=itl_target_ms,
            **SPECULATION[speculation],
        )
        if speculation in ERRORS:
            Adversary(self.engine, self._outcome, ERRORS[speculation], seed=blocks)
        if speculation == "draft model":
            Asker(self.engine, seed=blocks)
            self.runner.draft_model = self._guess
        if not careful:  # no watermark: admit what fits now, so that memory runs out and sequences are preempted
            self.engine.scheduler.growth.peak = lambda running: 0  # type: ignore[method-assign]
        self.budget = budget
        self.requests: dict[int, EngineRequest] = {}
        self.collector = Collector()

    def _outcome(self, sequence: Sequence) -> tuple[int, ...]:
        whole = reference(sequence.request, self.kind, self.engine.max_model_len)
        return sequence.request.prompt + whole[sequence.index].tokens

    def _guess(self, row: Row, tokens: list[int], count: int) -> list[int]:
        """What a sequence of this prompt will say, as far as it is known; now and then something else."""
        prompt = row.new.tokens[: row.new.prompt_length]
        request = next(r for r in self.requests.values() if r.prompt == prompt and r.params == row.new.params)
        whole = reference(request, self.kind, self.engine.max_model_len)[row.new.stream]
        right = [*prompt, *whole.tokens][len(tokens) : len(tokens) + count]
        return [(token + 1) % 50 if (token + len(tokens)) % 5 == 0 else token for token in right]

    @rule(
        branch=st.integers(0, 1),
        shared=st.integers(0, 96),
        tail=st.lists(st.integers(0, 49), max_size=40),
        max_tokens=st.sampled_from([0, 1, 2, 9, 30, 70, None]),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        stops=st.sets(st.integers(0, 49), max_size=2),
        min_tokens=st.sampled_from([0, 0, 3]),
        temperature=st.sampled_from([0.0, 1.0]),
        logprobs=st.sampled_from([None, 0]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        salt=st.sampled_from(["", "", "tenant"]),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from("ab"),
        background=st.sampled_from([False, False, False, True]),
        timeout=st.sampled_from([None] * 7 + [0.02]),
        prediction=st.sampled_from([(), (), tuple(TREE[0]), tuple(range(50)) * 2]),
    )
    def add(
        self,
        branch: int,
        shared: int,
        tail: list[int],
        salt: str,
        priority: int,
        tenant: str,
        background: bool,
        stops: set[int],
        timeout: float | None,
        prediction: tuple[int, ...],
        **params: Any,
    ) -> None:
        request = make_request(
            [*TREE[branch][:shared], *tail],
            salt=salt,
            priority=priority,
            tenant=tenant,
            background=background,
            stop_ids=tuple(sorted(stops)),
            deadline=None if timeout is None else self.clock.now + timeout,
            seed=3,
            prediction=prediction,
            **params,
        )
        try:
            self.engine.add(request)
        except RequestError as error:
            length = len(request.prompt)
            if error.status == 429:
                assert len(self.engine.queue) >= 8
            else:
                assert length == 0 or length + (request.params.max_tokens != 0) > self.engine.max_model_len
            return
        self.requests[request.request_id] = request

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self.engine.has_work:
                self.collector.take(self.engine.step())
                self.engine.audit()

    @precondition(lambda self: self.engine.records)
    @rule(data=st.data(), really=st.sampled_from([False, False, True]))
    def abort(self, data: st.DataObject, really: bool) -> None:
        if not really:
            return
        request_id = data.draw(st.sampled_from(sorted(self.engine.records)))
        self.collector.take(self.engine.abort(request_id))
        assert self.engine.abort(request_id) == []

    @rule()
    def reset(self) -> None:
        self.engine.reset_prefix_cache()

    @invariant()
    def consistent(self) -> None:
        self.engine.audit()
        if self.runner.plans:
            assert self.runner.plans[-1].num_tokens <= self.budget

    def teardown(self) -> None:
        with self.patches:
            if hasattr(self, "engine"):
                self._finish()

    def _finish(self) -> None:
        work = sum((len(r.prompt) + 150) * r.params.n for r in self.requests.values())
        for _ in range(2 * work + 10):  # every step computes something; recomputing is bounded
            if not self.engine.has_work:
                break
            self.collector.take(self.engine.step())
            self.engine.audit()
        assert not self.engine.has_work, "somebody waits for ever"
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
        assert not self.engine.cache.marks
        assert sum(stats.finished.values()) == len(self.requests)
        for request in self.requests.values():
            whole = reference(request, self.kind, self.engine.max_model_len)
            for index in range(request.params.n):
                self._compare(self.collector.of(request, index), whole[index])

    def _compare(self, choice: Choice, whole: Choice) -> None:
        if choice.finish_reason in (FinishReason.ABORT, FinishReason.TIMEOUT):
            assert choice.tokens == whole.tokens[: len(choice.tokens)]
            assert choice.logprobs == whole.logprobs[: len(choice.logprobs)]
        else:
            assert choice.content == whole.content


class WeakKeys(Traffic):
    """Red when a lookup or a commit trusts a key without comparing tokens: here a key has 8 bits."""

    weak_keys = True


SETTINGS = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
Traffic.TestCase.settings = SETTINGS
WeakKeys.TestCase.settings = SETTINGS
TestTraffic = pytest.mark.slow(Traffic.TestCase)
TestWeakKeys = pytest.mark.slow(WeakKeys.TestCase)


@pytest.mark.parametrize("kind", sorted(GROUPS))
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_crowded_engine(kind: str, depth: int, policy: str) -> None:
    """Red for the same faults as `Traffic`, and when memory that runs out all the time starves or leaks anything."""
    random = Random(f"{kind} {depth} {policy}")
    preemptions = forks = 0
    for _ in range(2):
        groups = GROUPS[kind]
        engine, runner = make_engine(
            groups,
            1 + len(groups) * random.randint(10, 20),
            max_model_len=120,
            max_num_batched_tokens=random.choice([16, 33, 64]),
            long_prefill_token_threshold=random.choice([0, 7, 16]),
            max_num_seqs=8,
            async_depth=depth,
            scheduling_policy=policy,
        )
        engine.scheduler.growth.peak = lambda running: 0  # type: ignore[method-assign]
        requests: list[EngineRequest] = []
        collector = Collector()
        while len(requests) < 40 or engine.has_work:
            if len(requests) < 40 and len(engine.queue) < 12:
                prompt = TREE[random.randrange(2)][: random.randrange(70)] + [random.randrange(50)] * random.randint(1, 9)
                pooling = random.choice([None, None, None, None, None, "mean", "last"])
                request = make_request(
                    prompt,
                    pooling=pooling,
                    max_tokens=0 if pooling else random.randint(1, 60),
                    n=random.choice([1, 1, 1, 3]),
                    temperature=1.0,
                    priority=random.randint(0, 2),
                    tenant=random.choice("abc"),
                    background=random.random() < 0.2,
                    logprobs=random.choice([None, 0]),
                    prompt_logprobs=random.choice([None, None, None, 0]),
                )
                if len(prompt) < engine.max_model_len:
                    engine.add(request)
                    requests.append(request)
            collector.take(engine.step())
            engine.audit()
            assert engine.stats().steps < 20_000, "somebody waits for ever"
        preemptions += engine.stats().preemptions
        forks += sum(len(plan.copies) for plan in runner.plans)
        for request in requests:
            whole = reference(request, kind, engine.max_model_len)
            for index in range(request.params.n):
                assert collector.of(request, index).content == whole[index].content
    assert forks
    assert preemptions or kind == "window"
