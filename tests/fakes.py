"""Fakes of the tensor half, for tests of the decision half.

`FakeRunner` is a tiny "model" whose every sampled token is a hash of what it reads from simulated KV memory, through the
block tables that the plans built:

    for each position p of a chunk, for each layer group in turn:
        write    memory[table[p // 16]][p % 16] = hash(state, group)
        read     all slots that p can see (the window, or everything) through the table
        state    = hash(state, what was read)
    token = hash(state, seed, position, stream) % vocab

So a wrong table, a stale or shared block that was written, a missed copy, a bad prefix hit, or a block given back too early
changes the tokens from there on, and a request's output can be compared with the output of the same request alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import msgspec

from noria.config import EngineConfig
from noria.core.asking import DraftFacts
from noria.core.engine import Engine
from noria.core.plan import NULL_BLOCK, NewRow, PlanRow, RowResult, StepPlan, StepResult
from noria.core.prices import Prices
from noria.models.spec import LayerGroup
from noria.types import EngineRequest, FinishReason, Phase, SamplingParams, SequenceOutput, TokenLogprobs

BLOCK = 16
FULL = LayerGroup(window=0, layers=(0,))


def window_group(window: int) -> LayerGroup:
    return LayerGroup(window=window, layers=(0,))


class FakeClock:
    """Moves by `tick` each time it is read; dyadic values keep sums of differences exact."""

    def __init__(self, tick: float = 1 / 1024) -> None:
        self.now = 1.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class Row:
    """What the fake remembers of a row."""

    def __init__(self, new: NewRow) -> None:
        self.new = new
        self.tokens = list(new.tokens)
        self.tables = [list(blocks) for blocks in new.blocks]
        self.pooled: list[int] = []


@dataclass
class FakeTicket:
    """A launched plan; its result is there at once, or made by `wait` where the fake is late."""

    plan: StepPlan
    result: StepResult | None


class FakeRunner:
    """Runs plans on the toy model, and checks that each plan is one that a runner can execute.

    `late=True` computes in `wait`, as a device does whose host goes on after `launch`. `failures` maps a step id to the
    exception that it raises. All plans are kept in `plans`. `draft_model(row, tokens, count)` answers rows that ask for drafts.
    """

    draft_model: Callable[[Row, list[int], int], Sequence[int]] | None = None

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        num_blocks: int,
        *,
        vocab: int = 50,
        late: bool = False,
        failures: Mapping[int, Exception] | None = None,
    ) -> None:
        self.windows = [group.window for group in groups]
        self.memory: list[list[int]] = [[-1] * BLOCK for _ in range(num_blocks)]
        self.vocab = vocab
        self.late = late
        self.failures = dict(failures or {})
        self.rows: dict[int, Row] = {}
        self.plans: list[StepPlan] = []
        self.computed_tokens = 0
        self.closed = False
        self._outstanding: FakeTicket | None = None

    def launch(self, plan: StepPlan) -> FakeTicket:
        plan = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)  # a plan is a value
        assert self._outstanding is None, "launched while another step runs"
        assert plan.rows, "an empty plan"
        assert not self.plans or plan.step == self.plans[-1].step + 1
        assert len({row.row for row in plan.rows}) == len(plan.rows)
        self.plans.append(plan)
        self._edit_tables(plan)
        ticket = FakeTicket(plan, None if self.late else self._run(plan))
        self._outstanding = ticket
        return ticket

    def mask(self, fill: Callable[[int, int], None]) -> None:
        """What it draws needs no masks."""

    def wait(self, ticket: FakeTicket) -> StepResult:
        assert self._outstanding is ticket
        self._outstanding = None
        return ticket.result or self._run(ticket.plan)

    def close(self) -> None:
        self.closed = True

    def _edit_tables(self, plan: StepPlan) -> None:
        for freed in plan.freed_rows:
            del self.rows[freed]
        for new in plan.new_rows:
            assert new.row not in self.rows, "a row was taken twice"
            self.rows[new.row] = Row(new)
        for place, group, count in plan.released:
            assert self.windows[group], "a full-attention group gives nothing back"
            self.rows[place].tables[group][:count] = [NULL_BLOCK] * count
        for place, group, index, block in plan.replaced:
            assert self.rows[place].tables[group][index] != NULL_BLOCK
            self.rows[place].tables[group][index] = block
        for planned in plan.rows:
            row = self.rows[planned.row]
            for group, blocks in enumerate(planned.new_blocks):
                row.tables[group] += blocks
            if planned.tokens:
                row.tokens[planned.start + planned.count - len(planned.tokens) :] = planned.tokens
            assert planned.start + planned.count <= len(row.tokens), "the chunk has tokens that the runner does not know"
            assert planned.samples <= 1 or (planned.count == planned.samples and not planned.streams), "drafts beside a prompt"

    def _run(self, plan: StepPlan) -> StepResult:
        if plan.step in self.failures:
            raise self.failures[plan.step]
        for source, destination in plan.copies:
            assert NULL_BLOCK not in (source, destination)
            self.memory[destination] = list(self.memory[source])
        # Backwards, so that a row that counts on what another row of the same step writes is caught.
        results = [self._run_row(planned) for planned in reversed(plan.rows)]
        return StepResult(step=plan.step, rows=tuple(reversed(results)))

    def _run_row(self, planned: PlanRow) -> RowResult:
        row = self.rows[planned.row]
        end = planned.start + planned.count
        self.computed_tokens += planned.count
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        prompt_logprobs: list[TokenLogprobs] = []
        refuted = False  # a draft: nothing that is drawn behind it counts, but its KV is written
        for position in range(planned.start, end):
            state = self._forward(row, position)
            first_scored = planned.prompt_logprobs_from
            if first_scored is not None and position >= first_scored and position + 1 < row.new.prompt_length:
                prompt_logprobs.append(_logprob(state, row.tokens[position + 1]))
            if planned.hidden_from is not None and position >= planned.hidden_from:
                row.pooled.append(state)
            if position >= end - planned.samples and not refuted:
                tokens.append(self._sample(row, state, position + 1, row.new.stream))
                logprobs.append(_logprob(state, tokens[-1]))
                refuted = position + 1 < end and row.tokens[position + 1] != tokens[-1]
        for stream in planned.streams:
            tokens.append(self._sample(row, state, end, stream))
            logprobs.append(_logprob(state, tokens[-1]))
        if row.new.params.logprobs is None:
            logprobs = []
        pooled = planned.hidden_from is not None and end == row.new.prompt_length
        return RowResult(
            row=planned.row,
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            prompt_logprobs=tuple(prompt_logprobs),
            drafts=self._drafts(row, planned, tokens),
            embedding=repr(row.pooled).encode() if pooled else b"",
        )

    def _drafts(self, row: Row, planned: PlanRow, drawn: list[int]) -> tuple[int, ...]:
        if not planned.draft_tokens:
            return ()
        assert self.draft_model is not None, "drafts are asked for, and there is no draft model"
        assert planned.samples > 0
        assert not planned.streams
        known = row.tokens[: planned.start + planned.count - planned.samples + 1] + drawn
        return tuple(self.draft_model(row, known, planned.draft_tokens))

    def _forward(self, row: Row, position: int) -> int:
        """Write the position's KV, group by group, and read what it sees; its last state."""
        state = hash((row.tokens[position], position))
        for group, (table, window) in enumerate(zip(row.tables, self.windows, strict=True)):
            block, slot = table[position // BLOCK], position % BLOCK
            assert block != NULL_BLOCK, "KV is written to the null block"
            self.memory[block][slot] = hash((state, group))
            first = max(0, position - window + 1) if window else 0
            visible = table[first // BLOCK : position // BLOCK + 1]
            assert NULL_BLOCK not in visible, "a query sees a block that was given back"
            slots = list(itertools.chain.from_iterable(self.memory[b] for b in visible))
            seen = slots[first % BLOCK : first % BLOCK + position - first + 1]
            state = hash((state, tuple(seen)))
        return state

    def _sample(self, row: Row, state: int, position: int, stream: int) -> int:
        new = row.new
        noise = 0 if new.params.temperature == 0 else hash((new.seed, position, stream))
        banned = new.stop_ids if position - new.prompt_length < new.params.min_tokens else ()
        token = hash((state, noise)) % self.vocab
        while token in banned:
            token = (token + 1) % self.vocab
        return token


def _logprob(state: int, token: int) -> TokenLogprobs:
    return TokenLogprobs(token=token, logprob=-(hash((state, token)) % 1000) / 128)


class ConstantRunner(FakeRunner):
    """Samples the same token for ever and computes nothing: for tests of policy, and measurements of the engine."""

    token = 7

    def _edit_tables(self, plan: StepPlan) -> None:
        pass

    def _run_row(self, planned: PlanRow) -> RowResult:
        self.computed_tokens += planned.count
        drafts = planned.tokens[len(planned.tokens) - planned.samples + 1 :] if planned.samples > 1 else ()
        right = next((place for place, draft in enumerate(drafts) if draft != self.token), len(drafts))
        return RowResult(row=planned.row, tokens=(self.token,) * (min(planned.samples, right + 1) + len(planned.streams)))


class Adversary:
    """Makes an engine draft in every step, whatever it costs: what a request will say, with wrong tokens now and then.

    `outcome` gives all tokens of a sequence, prompt and output, of which as many as there are serve as drafts; `error` is the
    share of them that is replaced.
    """

    def __init__(self, engine: Engine, outcome: Callable[[Any], Sequence[int]], error: float, seed: int) -> None:
        self._outcome = outcome
        self._error = error
        self._random = Random(seed)
        engine.speculator.active = True
        engine.speculator.drafts_for = self  # type: ignore[method-assign, assignment]
        engine.speculator.waits = lambda sequence: self._random.random() < 0.5  # type: ignore[method-assign]

    def __call__(self, rows: list[tuple[Any, int]], bargain: object) -> list[tuple[int, ...]]:
        return [self._drafts(sequence, most) for sequence, most in rows]

    def _drafts(self, sequence: Any, most: int) -> tuple[int, ...]:
        known = len(sequence.tokens)
        right = self._outcome(sequence)[known : known + self._random.randint(0, most)]
        return tuple([abs(token - 1) if self._random.random() < self._error else token for token in right])  # in the vocabulary


class Asker:
    """Makes an engine ask its draft model as often as not, and believe all that it says, whatever it costs."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._speculator = engine.speculator
        self._random = Random(seed)
        engine.speculator.asks_for = self._asks  # type: ignore[method-assign]
        engine.speculator.drafts_for = self._drafts  # type: ignore[method-assign]

    def _asks(self, rows: list[tuple[Any, int]], decodes: object) -> list[int]:
        return [self._random.randint(0, min(most, 6)) for _, most in rows]

    def _drafts(self, rows: list[tuple[Any, int]], bargain: object) -> list[tuple[int, ...]]:
        drafters = [(self._speculator.drafter(sequence), most) for sequence, most in rows]
        return [() if d is None or d.model is None else tuple(d.model.read(most)) for d, most in drafters]


def make_engine(
    groups: Sequence[LayerGroup] = (FULL,),
    num_blocks: int = 65,
    *,
    runner: FakeRunner | None = None,
    max_model_len: int = 512,
    clock: FakeClock | None = None,
    model_tag: bytes = b"model",
    prices: Prices | None = None,
    draft_model: DraftFacts | None = None,
    **settings: Any,
) -> tuple[Engine, FakeRunner]:
    """An engine on a fake runner (which is late where the engine is asynchronous). `settings` are EngineConfig's."""
    settings.setdefault("max_num_batched_tokens", 64)
    config = msgspec.convert({"model": "fake", **settings}, EngineConfig)
    runner = runner or FakeRunner(groups, num_blocks, late=config.async_depth > 0)
    engine = Engine(
        config,
        max_model_len=max_model_len,
        groups=tuple(groups),
        num_blocks=num_blocks,
        model_tag=model_tag,
        runner=runner,
        prices=prices,
        draft_model=draft_model,
        clock=clock or FakeClock(),
    )
    return engine, runner


_ids = itertools.count(1)


def make_request(
    prompt: Sequence[int] | int,
    *,
    stop_ids: tuple[int, ...] = (),
    salt: str = "",
    priority: int = 0,
    tenant: str = "",
    background: bool = False,
    arrival: float = 0.0,
    prediction: tuple[int, ...] = (),
    deadline: float | None = None,
    pooling: Literal["mean", "last"] | None = None,
    **params: Any,
) -> EngineRequest:
    """A request with a new id. `prompt` may be a length; `params` are SamplingParams' (seed 1, greedy)."""
    tokens = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else tuple(prompt)
    params = {"seed": 1, "temperature": 0.0, **params}
    return EngineRequest(
        request_id=next(_ids),
        prompt=tokens,
        params=msgspec.convert(params, SamplingParams),
        stop_ids=stop_ids,
        cache_salt=salt,
        priority=priority,
        tenant=tenant,
        background=background,
        arrival=arrival,
        prediction=prediction,
        deadline=deadline,
        pooling=pooling,
    )


@dataclass
class Choice:
    """Everything that came out for one choice."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    embedding: bytes = b""
    cached_tokens: int = 0
    cache_miss: str = ""
    phases: tuple[float, ...] = ()
    preemptions: int = 0
    predicted_tokens: int = 0

    @property
    def content(self) -> tuple[object, ...]:
        """What must not depend on anything but the request."""
        return self.tokens, self.logprobs, self.prompt_logprobs, self.finish_reason, self.stop_token, self.embedding


class Collector:
    """Joins outputs by choice, and checks that each choice ends once and says nothing after its end."""

    def __init__(self) -> None:
        self.choices: dict[tuple[int, int], Choice] = {}

    def take(self, outputs: Sequence[SequenceOutput]) -> None:
        for output in outputs:
            choice = self.choices.setdefault((output.request_id, output.index), Choice())
            assert choice.finish_reason is None, "an output after the last one"
            choice.tokens += output.tokens
            choice.logprobs += output.logprobs
            if output.prompt_logprobs is not None:
                assert choice.prompt_logprobs is None, "prompt logprobs came twice"
                choice.prompt_logprobs = output.prompt_logprobs
            if output.finish_reason is not None:
                choice.finish_reason, choice.stop_token = output.finish_reason, output.stop_token
                choice.cached_tokens, choice.preemptions = output.cached_tokens, output.preemptions
                choice.predicted_tokens = output.predicted_tokens
                choice.phases, choice.cache_miss, choice.embedding = output.phases, output.cache_miss, output.embedding
                assert not output.phases or len(output.phases) == len(Phase)

    def of(self, request: EngineRequest, index: int = 0) -> Choice:
        return self.choices[request.request_id, index]


def run(engine: Engine, *requests: EngineRequest, max_steps: int = 5000) -> Collector:
    """Add the requests, step until nothing is left, with an audit after each step."""
    collector = Collector()
    for request in requests:
        engine.add(request)
    for _ in range(max_steps):
        if not engine.has_work:
            return collector
        collector.take(engine.step())
        engine.audit()
    raise AssertionError(f"work is left after {max_steps} steps: {engine.stats()}")


def alone(request: EngineRequest, groups: Sequence[LayerGroup], max_model_len: int) -> list[Choice]:
    """The choices of a request that has an engine of its own: ample memory, whole prompts, no cache, depth 0."""
    num_blocks = 1 + (request.params.n + 1) * len(groups) * (-(-max_model_len // BLOCK) + 1)
    engine, _ = make_engine(
        groups,
        num_blocks,
        max_model_len=max_model_len,
        max_num_batched_tokens=max(16, max_model_len),
        enable_prefix_caching=False,
    )
    collector = run(engine, request)
    return [collector.of(request, index) for index in range(request.params.n)]
