"""Draws: which logits a step needs, and what to do with each of them.

A PlanRow asks for runs of consecutive positions: prompt positions to score, then positions to sample, then further streams
at the last position. Each run becomes one `Segment`; the segments are expanded by array operations.

    chunk     start ................................ end
    scored      [from ........ prompt_length - 1)           target: the next prompt token
    sampled                             [end - samples, end) one token each
    streams                                      [end - 1]   one token for each further stream
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from noria.backends.base import Drawn, Draws
from noria.core.plan import PlanRow, RowResult, StepPlan
from noria.runner.rows import History, Rows
from noria.types import TokenLogprobs

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Number = TypeVar("Number", np.int32, np.float32)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of draws of one row from consecutive logit rows."""

    row: int
    count: int
    logit_row: int  # of the first draw
    position: int  # of the first drawn token
    stream: int
    num_top: int
    scored: bool


@dataclass(frozen=True, slots=True)
class RowDraws:
    """Where one PlanRow's draws are: [first, first + scored) are prompt logprobs, then `sampled` tokens."""

    first: int
    scored: int
    sampled: int


@dataclass(frozen=True)
class StepDraws:
    """A step's draws, and the way back from them to the plan's rows."""

    draws: Draws
    logit_rows: Int32
    rows: tuple[RowDraws, ...]


def step_draws(plan: StepPlan, rows: Rows, row_offsets: Int32) -> StepDraws:
    """The draws of a plan whose rows' tokens begin at `row_offsets` in the step. The rows' tables are up to date."""
    segments: list[Segment] = []
    places: list[RowDraws] = []
    wanted: list[tuple[int, int]] = []  # (first, count) runs of token indices
    logit_row = draw = 0
    for planned, offset in zip(plan.rows, row_offsets[:-1].tolist(), strict=True):
        scored, sampled = _scored_positions(planned, rows), planned.samples
        first = draw
        if scored:
            begin = scored.start
            top = rows.of(planned.row).prompt_logprobs
            segments.append(Segment(planned.row, len(scored), logit_row, begin + 1, 0, top, True))
            wanted.append((offset + begin - planned.start, len(scored)))
            logit_row += len(scored)
        if sampled:
            begin = planned.start + planned.count - sampled
            stream, top = int(rows.stream[planned.row]), int(rows.num_top[planned.row])
            segments.append(Segment(planned.row, sampled, logit_row, begin + 1, stream, top, False))
            wanted.append((offset + planned.count - sampled, sampled))
            logit_row += sampled
            last = planned.start + planned.count
            segments += [Segment(planned.row, 1, logit_row - 1, last, s, top, False) for s in planned.streams]
        draw += len(scored) + sampled + len(planned.streams)
        places.append(RowDraws(first, len(scored), sampled + len(planned.streams)))
    return StepDraws(_expand(segments, rows), _runs(wanted), tuple(places))


def _scored_positions(planned: PlanRow, rows: Rows) -> range:
    """Positions of the chunk whose next prompt token is to be scored."""
    if planned.prompt_logprobs_from is None:
        return range(0)
    first = max(planned.start, planned.prompt_logprobs_from)
    end = min(planned.start + planned.count, int(rows.prompt_length[planned.row]) - 1)
    return range(first, max(first, end))


def _runs(runs: Sequence[tuple[int, int]]) -> Int32:
    """Concatenate the integers of (first, count) runs."""
    if not runs:
        return np.zeros(0, np.int32)
    firsts, counts = np.array(runs, np.int32).T
    return np.repeat(firsts, counts) + _ramp(counts).astype(np.int32)


def _ramp(counts: npt.NDArray[np.integer]) -> Int64:
    """0, 1, ... count - 1 for each count."""
    ends = np.cumsum(counts)
    ramp: Int64 = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
    return ramp


def _expand(segments: Sequence[Segment], rows: Rows) -> Draws:
    counts = np.array([s.count for s in segments], np.int64)
    ramp = _ramp(counts)

    def each(values: Sequence[int], dtype: type = np.int64) -> npt.NDArray[np.int64]:
        return np.repeat(np.array(values, dtype), counts)

    row = each([s.row for s in segments])
    position = each([s.position for s in segments]) + ramp
    scored = each([s.scored for s in segments], np.bool_)
    target = np.full(len(row), -1, np.int32)
    target[scored] = rows.tokens[row[scored], position[scored]]
    history, bias, bans = _sparse_lists(segments, rows)
    return Draws(
        logit_row=(each([s.logit_row for s in segments]) + ramp).astype(np.int32),
        temperature=rows.temperature[row],
        top_k=rows.top_k[row],
        top_p=rows.top_p[row],
        min_p=rows.min_p[row],
        seed=rows.seed[row],
        position=position,
        stream=each([s.stream for s in segments]).astype(np.int32),
        target=target,
        num_top=each([s.num_top for s in segments]).astype(np.int32),
        repetition=rows.repetition[row],
        presence=rows.presence[row],
        frequency=rows.frequency[row],
        history_offsets=history.offsets(),
        history_tokens=history.tokens(),
        history_counts=history.values(),
        bias_offsets=bias.offsets(),
        bias_tokens=bias.tokens(),
        bias_values=bias.values(),
        ban_offsets=bans.offsets(),
        ban_tokens=bans.tokens(),
    )


class _CompressedRows(Generic[Number]):
    """Collects the sparse list of each draw."""

    def __init__(self, dtype: type[Number]) -> None:
        self._dtype: type[Number] = dtype
        self._lengths: list[int] = []
        self._tokens: list[Int32] = []
        self._values: list[npt.NDArray[Number]] = []

    def empty(self, draws: int) -> None:
        self._lengths += [0] * draws

    def append(self, tokens: Int32, values: npt.NDArray[Number] | None = None) -> None:
        self._lengths.append(len(tokens))
        self._tokens.append(tokens)
        if values is not None:
            self._values.append(values)

    def offsets(self) -> Int64:
        result = np.zeros(len(self._lengths) + 1, np.int64)
        np.cumsum(self._lengths, out=result[1:])
        return result

    def tokens(self) -> Int32:
        return np.concatenate(self._tokens) if self._tokens else np.zeros(0, np.int32)

    def values(self) -> npt.NDArray[Number]:
        return np.concatenate(self._values) if self._values else np.zeros(0, self._dtype)


def _sparse_lists(
    segments: Sequence[Segment], rows: Rows
) -> tuple[_CompressedRows[np.int32], _CompressedRows[np.float32], _CompressedRows[np.int32]]:
    """(history, bias, bans) of every draw. Scored tokens have none: logprobs are of the raw distribution."""
    history, bias, bans = _CompressedRows(np.int32), _CompressedRows(np.float32), _CompressedRows(np.int32)
    for s in segments:
        lists = rows.of(s.row)
        if s.scored or lists.history is None:
            history.empty(s.count)
        else:
            _append_histories(history, s, rows, lists.history)
        if s.scored or not len(lists.bias_tokens):
            bias.empty(s.count)
        else:
            for _ in range(s.count):
                bias.append(lists.bias_tokens, lists.bias_values)
        if s.scored:
            bans.empty(s.count)
            continue
        first_free = int(rows.prompt_length[s.row] + rows.min_tokens[s.row])  # from this position on nothing is banned
        banned = min(max(first_free - s.position, 0), s.count)
        for _ in range(banned):
            bans.append(lists.stop_ids)
        bans.empty(s.count - banned)
    return history, bias, bans


def _append_histories(out: _CompressedRows[np.int32], segment: Segment, rows: Rows, history: History) -> None:
    """The tokens before each drawn one. Those after the first drawn position are drafts, which the row must not remember."""
    history.extend(rows.tokens[segment.row], segment.position)
    out.append(*history.arrays())
    if segment.count > 1:
        drafted = history.copy()
        for position in range(segment.position + 1, segment.position + segment.count):
            drafted.extend(rows.tokens[segment.row], position)
            out.append(*drafted.arrays())


def row_results(plan: StepPlan, places: Sequence[RowDraws], drawn: Drawn, rows: Rows) -> tuple[RowResult, ...]:
    """Sort what was drawn back to the plan's rows."""
    tokens = drawn.token.tolist()
    results = []
    for planned, place in zip(plan.rows, places, strict=True):
        middle = place.first + place.scored
        end = middle + place.sampled
        results.append(
            RowResult(
                row=planned.row,
                tokens=tuple(tokens[middle:end]),
                logprobs=_logprobs(drawn, middle, end, int(rows.num_top[planned.row])),
                prompt_logprobs=_logprobs(drawn, place.first, middle, rows.of(planned.row).prompt_logprobs),
            )
        )
    return tuple(results)


def _logprobs(drawn: Drawn, first: int, end: int, num_top: int) -> tuple[TokenLogprobs, ...]:
    """The logprobs of draws [first, end), which asked for the `num_top` most likely; () where none were asked for."""
    if num_top < 0 or first == end:
        return ()
    width = min(num_top, drawn.top_tokens.shape[1])
    tops = drawn.top_tokens[first:end, :width].tolist(), drawn.top_logprobs[first:end, :width].tolist()
    return tuple(
        TokenLogprobs(token, logprob, *_known(top_tokens, top_logprobs))
        for token, logprob, top_tokens, top_logprobs in zip(
            drawn.token[first:end].tolist(), drawn.logprob[first:end].tolist(), *tops, strict=True
        )
    )


def _known(tokens: list[int], logprobs: list[float]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Without the padding of a vocabulary smaller than what was asked for."""
    count = tokens.index(-1) if -1 in tokens else len(tokens)
    return tuple(tokens[:count]), tuple(logprobs[:count])
