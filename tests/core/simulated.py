"""An engine on a device of known speed and virtual time: `Device` charges each plan its price, and may be noisy."""

from __future__ import annotations

from random import Random
from typing import Any

from fakes import FULL, ConstantRunner, FakeClock, make_engine
from noria.core.engine import Engine
from noria.core.plan import StepPlan, StepResult
from noria.core.prices import Prices
from noria.types import EngineRequest, SequenceOutput

LAPTOP = Prices(start=3.3e-3, tokens=4.2e-4, pairs=2.2e-7, context=5e-7, logits=1e-4)
"""SmolLM2-135M in 4 bits on two cores: a decode alone takes 4 ms, a chunk of 512 tokens 0.25 s."""


class Device(ConstantRunner):
    """Takes the time that `prices` say, by its own count of the plan's rows, and moves the clock by it.

    `noise` is the standard deviation of a step's logarithm; one step in `outliers` takes ten times as long.
    """

    def __init__(
        self, prices: Prices, clock: FakeClock, num_blocks: int, *, noise: float = 0.0, outliers: int = 0, seed: int = 1
    ) -> None:
        super().__init__((FULL,), num_blocks)
        self.prices = prices
        self.clock = clock
        self.noise = noise
        self.outliers = outliers
        self.random = Random(seed)
        self.steps: list[tuple[bool, float]] = []  # (whether decodes were in it, seconds)

    def _run(self, plan: StepPlan) -> StepResult:
        rows = plan.rows
        p = self.prices
        seconds = (
            p.start
            + p.tokens * sum(r.count for r in rows)
            + p.pairs * sum(sum(range(r.start + 1, r.start + r.count + 1)) for r in rows)
            + p.context * sum(r.start + r.count for r in rows)
            + p.logits * sum(r.samples for r in rows)
        )
        seconds *= 2.718281828 ** self.random.gauss(0, self.noise) if self.noise else 1
        if self.outliers and self.random.randrange(self.outliers) == 0:
            seconds *= 10
        self.clock.now += seconds
        self.steps.append((any(r.count == 1 for r in rows), seconds))
        return StepResult(step=plan.step, rows=tuple(map(self._run_row, rows)), seconds=seconds)


class Simulation:
    """Requests at given times; when each made its tokens."""

    def __init__(self, prices: Prices = LAPTOP, *, num_blocks: int = 4096, **settings: Any) -> None:
        noise, outliers = settings.pop("noise", 0.0), settings.pop("outliers", 0)
        self.clock = FakeClock(tick=0)
        self.device = Device(prices, self.clock, num_blocks, noise=noise, outliers=outliers)
        settings = {"max_num_batched_tokens": 512, "max_model_len": 8192, "enable_prefix_caching": False, **settings}
        self.engine: Engine = make_engine((FULL,), num_blocks, runner=self.device, clock=self.clock, **settings)[0]
        self.arrivals: dict[int, float] = {}
        self.times: dict[int, list[float]] = {}  # of each request's tokens

    def run(self, traffic: list[tuple[float, EngineRequest]], until: float = float("inf")) -> None:
        """Serve (seconds from now, request) pairs, to the end or until some time from now."""
        begin = self.clock.now
        waiting = sorted(((begin + at, request) for at, request in traffic), key=lambda pair: pair[0])
        while (waiting or self.engine.has_work) and self.clock.now < begin + until:
            if not self.engine.has_work:
                self.clock.now = max(self.clock.now, waiting[0][0])
            while waiting and waiting[0][0] <= self.clock.now:
                at, request = waiting.pop(0)
                self.arrivals[request.request_id] = at
                self.engine.add(request)
            self._note(self.engine.step())

    def _note(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            self.times.setdefault(output.request_id, []).extend([self.clock.now] * len(output.tokens))

    def gaps(self, *requests: EngineRequest) -> list[float]:
        """Inter-token latencies, all requests together, sorted."""
        chosen = [r.request_id for r in requests] or list(self.times)
        return sorted(b - a for r in chosen for a, b in zip(self.times[r], self.times[r][1:], strict=False))

    def first_tokens(self) -> list[float]:
        """Times to first token, sorted."""
        return sorted(times[0] - self.arrivals[request] for request, times in self.times.items() if times)


def percentile(ordered: list[float], share: float) -> float:
    """The value that `share` of a sorted list stay at or under."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
