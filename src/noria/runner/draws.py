"""Draws: which logits a step needs, and what to do with each of them.

A PlanRow asks for runs of consecutive positions: prompt positions to score, then positions to sample, then further streams
at the last position. Each run becomes one `Segment`; the segments are expanded by array operations. A request that names
tokens (`logprob_token_ids`) has each of them scored from every logit row that it samples from.

    chunk     start ................................ end
    scored      [from ........ prompt_length - 1)           target: the next prompt token
    sampled                             [end - samples, end) one token each
    streams                                      [end - 1]   one token for each further stream
    named                               [end - samples, end) target: each of the named tokens, position by position
    hidden       [hidden_from ................. end)          no draw: the hidden state joins the row's mean
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from noria.backends.base import Drawn, Draws
from noria.core.plan import PlanRow, RowResult, StepPlan
from noria.runner.rows import History, Rows
from noria.types import TokenLogprobs

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Number = TypeVar("Number", np.int32, np.float32)


class Segment(NamedTuple):
    """A run of draws of one row from consecutive logit rows."""

    row: int
    length: int
    logit_row: int  # of the first draw
    position: int  # of the first drawn token
    stream: int  # OWN_STREAM: the row's
    scored: int  # 1: the tokens are known, and scored
    target: int = -1  # a token that is scored, whatever the row's tokens are


OWN_STREAM = -1


class RowDraws(NamedTuple):
    """Where one PlanRow's draws are: [first, first + scored) are prompt logprobs, then `sampled` tokens, then `named` ones.

    `hidden` of the step's hidden states are this row's, behind those of the rows before it.
    """

    first: int
    scored: int
    sampled: int
    named: int
    hidden: int


@dataclass(frozen=True)
class StepDraws:
    """A step's draws, and the way back from them to the plan's rows."""

    draws: Draws
    logit_rows: Int32
    hidden_rows: Int32
    rows: list[RowDraws]
    bare: bool  # every row draws one token and nothing else: no logprobs


def step_draws(plan: StepPlan, rows: Rows, row_offsets: Int32) -> StepDraws:
    """The draws of a plan whose rows' tokens begin at `row_offsets` in the step. The rows' tables are up to date."""
    segments: list[Segment] = []
    places: list[RowDraws] = []
    wanted: list[tuple[int, int]] = []  # (first, count) runs of token indices
    pooled: list[tuple[int, int]] = []
    logit_row = draw = 0
    for planned, offset in zip(plan.rows, row_offsets.tolist(), strict=False):
        row, start, end, sampled = planned.row, planned.start, planned.start + planned.count, planned.samples
        first, scored, named, hidden = draw, 0, 0, 0
        if planned.prompt_logprobs_from is not None:
            begin, scored = _scored_positions(planned, rows)
        if scored:
            segments.append(Segment(row, scored, logit_row, begin + 1, OWN_STREAM, 1))
            wanted.append((offset + begin - start, scored))
            logit_row += scored
        if sampled:
            segments.append(Segment(row, sampled, logit_row, end - sampled + 1, OWN_STREAM, 0))
            wanted.append((offset + planned.count - sampled, sampled))
            logit_row += sampled
            for stream in planned.streams:
                segments.append(Segment(row, 1, logit_row - 1, end, stream, 0))
            for back in range(sampled if rows.named[row] else 0, 0, -1):
                segments += [Segment(row, 1, logit_row - back, end - back + 1, OWN_STREAM, 1, t) for t in rows.named[row]]
            named = sampled * len(rows.named[row])
            sampled += len(planned.streams)
        if planned.hidden_from is not None:
            hidden = end - planned.hidden_from
            pooled.append((offset + planned.hidden_from - start, hidden))
        draw += scored + sampled + named
        places.append(RowDraws(first, scored, sampled, named, hidden))
    draws = _expand(segments, rows)
    bare = all(_is_bare(place) for place in places) and not (draws.num_top >= 0).any()
    return StepDraws(draws, _runs(wanted), _runs(pooled), places, bare)


def _is_bare(place: RowDraws) -> bool:
    return place.sampled == 1 and not (place.scored or place.named or place.hidden)


def _scored_positions(planned: PlanRow, rows: Rows) -> tuple[int, int]:
    """(first, count) of the chunk's positions whose next prompt token is to be scored."""
    assert planned.prompt_logprobs_from is not None
    first = max(planned.start, planned.prompt_logprobs_from)
    end = min(planned.start + planned.count, int(rows.prompt_length[planned.row]) - 1)
    return first, max(end - first, 0)


def _runs(runs: Sequence[tuple[int, int]]) -> Int32:
    """Concatenate the integers of (first, count) runs."""
    firsts, counts = np.array(runs, np.int32).reshape(-1, 2).T
    return np.repeat(firsts, counts) + _ramp(counts).astype(np.int32)


def _ramp(counts: npt.NDArray[np.integer]) -> Int64:
    """0, 1, ... count - 1 for each count."""
    ends = np.cumsum(counts)
    ramp: Int64 = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
    return ramp


def _expand(segments: Sequence[Segment], rows: Rows) -> Draws:
    table = np.array(segments, np.int64).reshape(-1, len(Segment._fields))
    counts = table[:, 1]
    ramp = _ramp(counts)
    row, _, logit_row, position, stream, scored, named = np.repeat(table, counts, axis=0).T
    logit_row, position = logit_row + ramp, position + ramp
    known = scored.astype(bool) & (named < 0)
    target = named.astype(np.int32)
    target[known] = rows.tokens[row[known], position[known]]
    history, bias, bans = _sparse_lists(segments, rows)
    return Draws(
        logit_row=logit_row.astype(np.int32),
        temperature=rows.temperature[row],
        top_k=rows.top_k[row],
        top_p=rows.top_p[row],
        min_p=rows.min_p[row],
        seed=rows.seed[row],
        position=position,
        stream=np.where(stream == OWN_STREAM, rows.stream[row], stream).astype(np.int32),
        target=target,
        num_top=np.where(known, rows.num_prompt_top[row], np.where(named >= 0, 0, rows.num_top[row])),
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
        lists = None if s.scored else rows.lists[s.row]
        if lists is None:
            for part in (history, bias, bans):
                part.empty(s.length)
            continue
        if lists.history is None:
            history.empty(s.length)
        else:
            _append_histories(history, s, rows, lists.history)
        for _ in range(s.length):
            bias.append(lists.bias_tokens, lists.bias_values)
        banned = min(max(lists.first_free - s.position, 0), s.length)
        for _ in range(banned):
            bans.append(lists.stop_ids)
        bans.empty(s.length - banned)
    return history, bias, bans


def _append_histories(out: _CompressedRows[np.int32], segment: Segment, rows: Rows, history: History) -> None:
    """The tokens before each drawn one. Those after the first drawn position are drafts, which the row must not remember."""
    history.extend(rows.tokens[segment.row], segment.position)
    out.append(*history.arrays())
    if segment.length > 1:
        drafted = history.copy()
        for position in range(segment.position + 1, segment.position + segment.length):
            drafted.extend(rows.tokens[segment.row], position)
            out.append(*drafted.arrays())


def row_results(plan: StepPlan, draws: StepDraws, drawn: Drawn, rows: Rows) -> tuple[RowResult, ...]:
    """Sort what was drawn back to the plan's rows."""
    tokens = drawn.token.tolist()
    if draws.bare:
        return tuple([RowResult(row=planned.row, tokens=(token,)) for planned, token in zip(plan.rows, tokens, strict=True)])
    slots = [planned.row for planned in plan.rows]
    tops, prompt_tops = rows.num_top[slots].tolist(), rows.num_prompt_top[slots].tolist()
    results = []
    seen = 0  # hidden states of the rows before
    for planned, place, top, prompt_top in zip(plan.rows, draws.rows, tops, prompt_tops, strict=True):
        row, middle = planned.row, place.first + place.scored
        behind = end = middle + place.sampled
        if planned.samples > 1:
            end = middle + _verified(planned, tokens[middle:behind], rows)
        logprobs = _logprobs(drawn, middle, end, top)
        if place.named:
            logprobs = _with_named(logprobs, drawn, behind, place.named // len(rows.named[row]), rows.named[row])
        embedding = b""
        if place.hidden:
            embedding = rows.pool(row, drawn.hidden[seen : seen + place.hidden], planned.start + planned.count)
            seen += place.hidden
        results.append(
            RowResult(
                row=row,
                tokens=tuple(tokens[middle:end]),
                logprobs=logprobs,
                prompt_logprobs=_logprobs(drawn, place.first, middle, prompt_top),
                embedding=embedding,
            )
        )
    return tuple(results)


def _verified(planned: PlanRow, drawn: list[int], rows: Rows) -> int:
    """How many of a row's drawn tokens count: those equal to their drafts, and the first that is not, or has no draft."""
    end = planned.start + planned.count
    drafts = rows.tokens[planned.row, end - planned.samples + 1 : end].tolist()
    pairs = zip(drawn, drafts, strict=False)
    return next((place for place, (token, draft) in enumerate(pairs, 1) if token != draft), planned.samples)


def _with_named(
    logprobs: tuple[TokenLogprobs, ...], drawn: Drawn, first: int, positions: int, named: tuple[int, ...]
) -> tuple[TokenLogprobs, ...]:
    """`logprobs` of sampled tokens with those of the named tokens, drawn from `first` on, instead of the most likely ones.

    Further streams are drawn from the last position.
    """
    values = drawn.logprob[first : first + positions * len(named)].reshape(positions, -1).tolist()
    return tuple(
        TokenLogprobs(entry.token, entry.logprob, named, tuple(values[min(i, positions - 1)]))
        for i, entry in enumerate(logprobs)
    )


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
