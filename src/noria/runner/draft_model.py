"""The draft model: a second, smaller executable that says how rows might go on.

It has a few rows of its own, each with blocks for its longest sequence, that nobody shares:

    target row 5   [ 17 4 99 4 23 | 8 ]      newest token: 8
    own row 0      [ 17 4 99 4 60 ..        lent to row 5 when it last asked; 60 was a guess that did not come true
                     `-- equal --' `-- computed again: 23 8, then one pass a draft

A row that asks gets the own row that was lent to it before, else the one that was asked for least lately. What is computed
there is kept as far as its ids are the sequence's: so nothing has to be told of rejected drafts, of preemptions, or of rows
that other sequences took. Each draft is drawn with the sequence's own parameters and noise, but for penalties.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from noria.backends.base import Backend, Executable
from noria.core.plan import NewRow, PlanRow, RowResult, StepPlan
from noria.runner.rows import Rows
from noria.runner.steady import SteadyInputs

Int32 = npt.NDArray[np.int32]

_NO_ROW = -1


class Ask(NamedTuple):
    """A row that wants drafts."""

    row: int  # of the target
    tokens: Int32  # all that is known of its sequence
    drafts: int  # at most


class Drafts(NamedTuple):
    """Drafts of each ask, and the seconds of a pass of one token a row; 0 where there was none to be measured."""

    tokens: list[tuple[int, ...]]
    pass_seconds: float


class DraftModel:
    """Not thread-safe: asked when no step of the target runs."""

    def __init__(self, executable: Executable, backend: Backend, rows: Rows, *, max_tokens: int) -> None:
        """`rows` are the empty tables of the executable; `max_tokens` is what it may compute in a pass."""
        self._executable = executable
        self._backend = backend
        self._rows = rows
        self._inputs = SteadyInputs(rows)
        self._max_tokens = max_tokens
        self._targets: dict[int, NewRow] = {}  # what is known of the target's rows
        count = len(rows.tokens)
        self._lent = [_NO_ROW] * count  # to which target row each own row is lent
        self._computed = [0] * count  # positions of each own row whose KV is that of `rows.tokens`
        self._order = list(range(count))  # own rows, the one asked for least lately first
        width = rows.block_tables[0].shape[1]
        groups = len(rows.block_tables)
        self._blocks = [
            tuple(tuple(range(1 + (row * groups + g) * width, 1 + (row * groups + g + 1) * width)) for g in range(groups))
            for row in range(count)
        ]

    def take(self, new: NewRow) -> None:
        """A sequence has taken a row of the target."""
        self.free(new.row)
        params = msgspec.structs.replace(
            new.params,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            logprobs=None,
            prompt_logprobs=None,
            logprob_token_ids=(),
        )
        self._targets[new.row] = msgspec.structs.replace(new, params=params)

    def free(self, row: int) -> None:
        """A row of the target is free. What was computed for it stays, in case that its sequence comes back."""
        self._targets.pop(row, None)
        if row in self._lent:
            own = self._lent.index(row)
            self._lent[own] = _NO_ROW
            self._rows.free(own)

    def propose(self, asks: Sequence[Ask]) -> Drafts:
        """Up to `drafts` drafts for each ask; () for one whose sequence is too long, or that still has to be caught up with."""
        made: list[list[int]] = [[] for _ in asks]
        placed = self._place(asks)
        going = self._catch_up(asks, placed, made)
        seconds: list[float] = []
        while going := [place for place in going if len(made[place]) < asks[place].drafts]:
            begin = time.perf_counter()
            plans = [self._next(placed[place], asks[place], made[place]) for place in going]
            for place, token in zip(going, self._run(plans), strict=True):
                made[place].append(token)
            seconds.append(time.perf_counter() - begin)
        for ask, own, drafts in zip(asks, placed, made, strict=True):
            if drafts:
                self._computed[own] = len(ask.tokens) + len(drafts) - 1
        return Drafts([tuple(drafts) for drafts in made], float(np.median(seconds)) if seconds else 0.0)

    def close(self) -> None:
        """Free the backend."""
        self._backend.close()

    def _place(self, asks: Sequence[Ask]) -> list[int]:
        """An own row for each ask, with its tokens; `_NO_ROW` if none is left, or the sequence is too long."""
        wanted = {ask.row for ask in asks}
        placed = []
        for ask in asks:
            own = _NO_ROW
            if len(ask.tokens) + ask.drafts <= self._rows.tokens.shape[1]:
                own = self._lend(ask, wanted)
            placed.append(own)
        return placed

    def _lend(self, ask: Ask, wanted: set[int]) -> int:
        if ask.row in self._lent:
            own = self._lent.index(ask.row)
        else:
            own = next((o for o in self._order if self._lent[o] not in wanted), _NO_ROW)
            if own == _NO_ROW:
                return own
        known = ask.tokens
        before = self._rows.tokens[own, : min(self._computed[own], len(known) - 1)]
        differs = np.flatnonzero(before != known[: len(before)])
        self._computed[own] = int(differs[0]) if len(differs) else len(before)
        if self._lent[own] != ask.row:
            if self._lent[own] != _NO_ROW:
                self._rows.free(own)
            self._lent[own] = ask.row
            new = self._targets[ask.row]
            self._rows.take(msgspec.structs.replace(new, row=own, tokens=tuple(known.tolist()), blocks=self._blocks[own]))
        self._rows.tokens[own, : len(known)] = known
        self._order.remove(own)
        self._order.append(own)
        return own

    def _catch_up(self, asks: Sequence[Ask], placed: Sequence[int], made: list[list[int]]) -> list[int]:
        """Compute what is known, in one pass; the asks that have their first draft by then."""
        left = self._max_tokens
        plans, going = [], []
        for place, (ask, own) in enumerate(zip(asks, placed, strict=True)):
            if own == _NO_ROW or not left:
                continue
            start = self._computed[own]
            count = min(len(ask.tokens) - start, left)
            left -= count
            self._computed[own] = start + count
            whole = start + count == len(ask.tokens)
            plans.append(PlanRow(row=own, start=start, count=count, tokens=(), samples=int(whole)))
            if whole:
                going.append(place)
        if plans:
            for place, token in zip(going, self._run(plans), strict=True):
                made[place].append(token)
        return going

    def _next(self, own: int, ask: Ask, made: list[int]) -> PlanRow:
        """The pass over the last draft, which becomes known to the row."""
        position = len(ask.tokens) + len(made) - 1
        self._rows.tokens[own, position] = made[-1]
        return PlanRow(row=own, start=position, count=1, tokens=(), samples=1)

    def _run(self, plans: Sequence[PlanRow]) -> list[int]:
        inputs, _ = self._inputs.build(StepPlan(step=0, rows=tuple(plans)))
        tokens: list[int] = self._executable.run(inputs).token.tolist()
        return tokens


def asks_of(plan: StepPlan, results: Sequence[RowResult], rows: Rows) -> list[Ask]:
    """What a step's rows ask, now that its result is known: `rows` holds all but the tokens that it drew."""
    asks = []
    for planned, result in zip(plan.rows, results, strict=True):
        if planned.draft_tokens:
            known = rows.tokens[planned.row, : planned.start + planned.count - planned.samples + 1]
            asks.append(Ask(planned.row, np.append(known, np.array(result.tokens, np.int32)), planned.draft_tokens))
    return asks
