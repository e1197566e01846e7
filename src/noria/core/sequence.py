"""Sequence: one choice of one request, its progress, and where its time went.

    0                computed       computed + in_flight        known (+ pending)
    |-- KV committed --|-- planned, not back --|-- to be planned --|

`known` is the number of tokens it has. `pending` tokens were asked for by steps in flight: their ids are not known yet, but a
next step may already be planned behind them. 0 <= computed <= known; blocks and row are freed only when in_flight is 0.
"""

from __future__ import annotations

from enum import Enum

from noria.core.constraint import Constraint
from noria.core.drafter import Drafter
from noria.kv.cache import Table
from noria.kv.keys import BLOCK_SIZE
from noria.types import EngineRequest, Phase, TokenLogprobs

Rank = tuple[float, int, int]  # order of service, smallest first: (policy's value, arrival number, choice)


class State(Enum):
    """WAITING holds nothing, nor does WAITING_GRAMMAR, whose constraint is being made; both have a place in the queue.

    LEAVING is preempted with a step in flight: it becomes WAITING when that is back.
    """

    WAITING_GRAMMAR = "waiting for its grammar"
    WAITING = "waiting"
    RUNNING = "running"
    LEAVING = "leaving"
    FINISHED = "finished"


class Sequence:
    """The engine's record of one choice. Mutable, owned by the engine; the scheduler and the engine write to it."""

    __slots__ = (
        "asked",
        "asks",
        "blocked_on",
        "cache_miss",
        "cached_tokens",
        "computed",
        "constraint",
        "drafter",
        "drafts",
        "furthest",
        "in_flight",
        "index",
        "kv",
        "limit",
        "params",
        "parts",
        "pending",
        "phase",
        "preemptions",
        "priority",
        "prompt_length",
        "prompt_logprobs",
        "rank",
        "request",
        "sent",
        "since",
        "slot",
        "state",
        "streams",
        "tokens",
        "unpooled",
        "unscored",
    )

    def __init__(self, request: EngineRequest, kv: Table, *, rank: Rank, priority: int, max_len: int, start: float) -> None:
        """A waiting sequence; `start` begins its time, `priority` is 0 where the policy knows none."""
        params = request.params
        self.request = request
        self.params = params
        self.index = 0  # the choice
        self.tokens = list(request.prompt)
        self.prompt_length = len(self.tokens)
        wanted = max_len if params.max_tokens is None else self.prompt_length + params.max_tokens
        self.limit = min(max_len, wanted)  # known tokens at which it has its length
        self.computed = 0
        self.in_flight = 0
        self.pending = 0
        self.sent = 0  # tokens that the runner has, or will have when the plans in flight are bound
        self.slot = 0  # its place in the rows of the last plan
        self.drafter: Drafter | None = None  # made when it first decodes, if it has sources of drafts
        self.drafts: tuple[int, ...] = ()  # of the step that is being planned
        self.asks = 0  # drafts that the step which is being planned asks the draft model for
        self.asked = False  # a step in flight has asked: what it says will be known with the result
        self.furthest = 0  # end of the positions that were ever in flight since it runs: its blocks go so far
        self.streams = tuple(range(1, params.n))  # choices still to be drawn from the last prompt position
        self.kv = kv
        self.state = State.WAITING
        self.rank = rank
        self.priority = priority
        self.blocked_on: bytes | None = None  # the key of a block that a running sequence is computing for us too
        self.prompt_logprobs: list[TokenLogprobs] = []  # of prompt[1:], as far as they are back
        self.unscored = params.prompt_logprobs is not None and self.prompt_length > 1  # prompt tokens are to be scored
        self.unpooled = request.pooling == "mean"  # every position's hidden state is still to be seen
        self.constraint: Constraint | None = None  # what its tokens must obey
        self.cached_tokens = -1  # prompt tokens found at first admission; -1: not admitted yet
        self.cache_miss = ""  # why no more were found
        self.preemptions = 0
        self.phase = Phase.QUEUE
        self.since = start
        self.parts = [0.0] * len(Phase)

    def choice(self, index: int, kv: Table) -> Sequence:
        """Another choice of this request, behind the prompt. It shares this one's time until now."""
        rank = (self.rank[0], self.rank[1], index)
        child = Sequence(self.request, kv, rank=rank, priority=self.priority, max_len=self.limit, start=self.since)
        child.index = index
        child.streams = ()
        child.unscored = False
        child.phase = self.phase
        child.parts = list(self.parts)
        child.cached_tokens = self.cached_tokens
        child.cache_miss = self.cache_miss
        child.preemptions = self.preemptions
        child.constraint = None if self.constraint is None else self.constraint.fork()
        return child

    def wait_for_grammar(self, now: float) -> None:
        """Its constraint is being made: it may not be admitted. What the shell waited for it until now counts as well."""
        before = min(self.request.grammar_s, now - self.since)
        self.stamp(Phase.GRAMMAR, now - before)
        self.state = State.WAITING_GRAMMAR

    def grammar_ready(self, constraint: Constraint, now: float) -> None:
        """It may be admitted from now on."""
        self.constraint = constraint
        self.state = State.WAITING
        self.stamp(Phase.QUEUE, now)

    def stamp(self, phase: Phase, now: float) -> None:
        """The time since the last stamp belongs to the phase that ends; `phase` begins."""
        self.parts[self.phase] += now - self.since
        self.phase, self.since = phase, now

    @property
    def hit_limit(self) -> int:
        """The most blocks it may find cached: the last known token is computed, and so is all whose logits are wanted."""
        most = len(self.tokens) - 1
        if self.unscored:
            most = min(most, len(self.prompt_logprobs))
        if self.unpooled:
            most = 0  # a sum that a preemption cut short begins again
        return most // BLOCK_SIZE

    def __repr__(self) -> str:
        return (
            f"<{self.request.request_id}.{self.index} {self.state.value} row {self.kv.row} known {len(self.tokens)} "
            f"computed {self.computed} in flight {self.in_flight} held {self.kv.held} rank {self.rank}>"
        )
