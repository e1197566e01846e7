"""From a plan to draws, and from drawn tokens back to the plan's rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from noria.backends.base import Drawn
from noria.core.plan import NewRow, PlanRow, StepPlan
from noria.runner.draws import row_results
from noria.runner.inputs import step_inputs
from noria.runner.rows import Rows
from noria.types import SamplingParams, TokenLogprobs


def make_rows(*news: NewRow) -> Rows:
    rows = Rows(max_num_seqs=8, max_model_len=64, num_groups=2, max_blocks_per_row=4)
    for new in news:
        rows.take(new)
    return rows


def new_row(row: int, tokens: tuple[int, ...] = (10, 11, 12, 13), prompt: int | None = None, **params: Any) -> NewRow:
    fields = {name: params.pop(name) for name in ("seed", "stop_ids", "stream") if name in params}
    return NewRow(
        row=row,
        tokens=tokens,
        prompt_length=len(tokens) if prompt is None else prompt,
        blocks=((1, 2), (3,)),
        params=SamplingParams(**params),
        **{"seed": 5, "stop_ids": (2, 3)} | fields,
    )


def build(rows: Rows, *chunks: PlanRow) -> Any:
    return step_inputs(StepPlan(step=0, rows=chunks), rows)


def test_flat_arrays_follow_the_chunks() -> None:
    """Red when tokens, positions or offsets are taken from another place of the row."""
    rows = make_rows(new_row(3, tuple(range(100, 120))), new_row(1, (7, 8, 9)))
    inputs, _ = build(
        rows,
        PlanRow(row=3, start=5, count=4, tokens=()),
        PlanRow(row=1, start=2, count=1, tokens=(), samples=1),
    )
    assert inputs.tokens.tolist() == [105, 106, 107, 108, 9]
    assert inputs.positions.tolist() == [5, 6, 7, 8, 2]
    assert inputs.row_offsets.tolist() == [0, 4, 5]
    assert inputs.row_slots.tolist() == [3, 1]
    assert inputs.logit_rows.tolist() == [4]
    assert [a.dtype for a in (inputs.tokens, inputs.positions, inputs.row_offsets, inputs.logit_rows)] == [np.int32] * 4
    for name, array in vars(inputs.draws).items():
        assert name == "masks" or array.flags.c_contiguous


def test_a_row_draws_its_token_at_the_next_position_with_its_parameters() -> None:
    """Red when a parameter of one row reaches another, or the noise's position is off by one."""
    rows = make_rows(
        new_row(0, temperature=0.5, top_p=0.9, seed=11, logprobs=3),
        new_row(1, temperature=2.0, top_k=-1, min_p=0.1, seed=2**64 - 1, stream=4),
    )
    inputs, _ = build(rows, *(PlanRow(row=r, start=0, count=4, tokens=(), samples=1) for r in (1, 0)))
    draws = inputs.draws
    assert draws.temperature.tolist() == [2.0, 0.5]
    assert draws.position.tolist() == [4, 4]
    assert draws.seed.tolist() == [2**64 - 1, 11]
    assert draws.stream.tolist() == [4, 0]
    assert draws.top_k.tolist() == [0, 0]
    np.testing.assert_allclose(draws.top_p, [1.0, 0.9])
    np.testing.assert_allclose(draws.min_p, [0.1, 0.0])
    assert draws.num_top.tolist() == [-1, 3]
    assert draws.logit_row.tolist() == [0, 1]
    assert draws.target.tolist() == [-1, -1]


def test_drafts_are_sampled_at_consecutive_positions_and_streams_at_the_last() -> None:
    """Red when the k-th token is drawn with another position's noise, or a stream reads another row of logits."""
    rows = make_rows(new_row(0, tuple(range(10))), new_row(1))
    inputs, draws = build(
        rows,
        PlanRow(row=0, start=6, count=4, tokens=(), samples=3),
        PlanRow(row=1, start=0, count=4, tokens=(), samples=1, streams=(1, 2)),
    )
    assert inputs.logit_rows.tolist() == [1, 2, 3, 7]
    assert inputs.draws.logit_row.tolist() == [0, 1, 2, 3, 3, 3]
    assert inputs.draws.position.tolist() == [8, 9, 10, 4, 4, 4]
    assert inputs.draws.stream.tolist() == [0, 0, 0, 0, 1, 2]
    assert [(d.first, d.scored, d.sampled) for d in draws.rows] == [(0, 0, 3), (3, 0, 3)]


def test_prompt_tokens_are_scored_up_to_the_last_one() -> None:
    """Red when a prompt token is scored twice over two chunks, or a generated token is scored as prompt."""
    tokens = (20, 21, 22, 23, 24, 25, 26, 27)
    rows = make_rows(new_row(0, tokens, prompt=6, prompt_logprobs=2, temperature=0.7))
    first, _ = build(rows, PlanRow(row=0, start=0, count=3, tokens=(), prompt_logprobs_from=1))
    assert first.logit_rows.tolist() == [1, 2]
    assert first.draws.target.tolist() == [22, 23]
    assert first.draws.num_top.tolist() == [2, 2]
    second, draws = build(rows, PlanRow(row=0, start=3, count=5, tokens=(), samples=1, prompt_logprobs_from=0))
    assert second.logit_rows.tolist() == [0, 1, 4]
    assert second.draws.target.tolist() == [24, 25, -1]
    assert second.draws.position.tolist() == [4, 5, 8]
    assert [(d.first, d.scored, d.sampled) for d in draws.rows] == [(0, 2, 1)]


def test_named_tokens_are_scored_beside_each_sampled_one() -> None:
    """Red when a named token is scored from another position's logits, is penalised, or reaches another row's answer."""
    plain = new_row(1, logprobs=1)
    rows = make_rows(new_row(0, logprobs=0, logprob_token_ids=(30, 40), repetition_penalty=2.0), plain)
    plan = (
        PlanRow(row=0, start=2, count=2, tokens=(), samples=2),
        PlanRow(row=1, start=0, count=4, tokens=(), samples=1, streams=(1,)),
    )
    inputs, draws = build(rows, *plan)
    assert inputs.draws.target.tolist() == [-1, -1, 30, 40, 30, 40, -1, -1]
    assert inputs.draws.logit_row.tolist() == [0, 1, 0, 0, 1, 1, 2, 2]
    assert inputs.draws.num_top.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert [lists_of(inputs.draws, "history", "tokens", d) for d in (2, 5)] == [[], []]
    draft = int(rows.tokens[0, 3])
    drawn = Drawn(
        token=np.array([draft, 8, 30, 40, 30, 40, 9, 6], np.int32),
        logprob=-np.arange(8, dtype=np.float32),
        top_tokens=np.full((8, 1), 9, np.int32),
        top_logprobs=np.full((8, 1), -6.0, np.float32),
    )
    named, other = row_results(StepPlan(step=0, rows=plan), draws, drawn, rows)
    assert named.tokens == (draft, 8)
    assert named.logprobs == (TokenLogprobs(draft, 0.0, (30, 40), (-2.0, -3.0)), TokenLogprobs(8, -1.0, (30, 40), (-4.0, -5.0)))
    assert other.logprobs == (TokenLogprobs(9, -6.0, (9,), (-6.0,)), TokenLogprobs(6, -7.0, (9,), (-6.0,)))


def test_hidden_states_are_averaged_over_chunks() -> None:
    """Red when a row takes another row's hidden states, the mean depends on the chunks, or a row's last owner is in it."""
    states = np.random.default_rng(0).standard_normal((10, 5)).astype(np.float32)
    other = np.full((1, 5), 9.0, np.float32)

    def pooled(sizes: list[int]) -> bytes:
        rows = make_rows(new_row(0, tuple(range(10))), new_row(1))
        rows.pool(0, states[:3], 3)
        rows.free(0)
        rows.take(new_row(0, tuple(range(10))))
        start = 0
        for size in sizes:
            plan = StepPlan(
                step=0,
                rows=(
                    PlanRow(row=1, start=3, count=1, tokens=(), hidden_from=3),
                    PlanRow(row=0, start=start, count=size, tokens=(), hidden_from=start),
                ),
            )
            inputs, draws = step_inputs(plan, rows)
            assert inputs.hidden_rows.tolist() == [0, *range(1, size + 1)]
            assert inputs.logit_rows.tolist() == []
            empty = np.zeros(0, np.float32)
            hidden = np.concatenate([other, states[start : start + size]])
            drawn = Drawn(empty.astype(np.int32), empty, np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32), hidden)
            results = row_results(plan, draws, drawn, rows)
            assert results[0].embedding == other.astype("<f4").tobytes()
            start += size
            assert (results[1].embedding != b"") == (start == 10)
        return results[1].embedding

    whole = pooled([10])
    assert pooled([1] * 10) == pooled([3, 4, 3]) == whole
    np.testing.assert_allclose(np.frombuffer(whole, "<f4"), states.mean(axis=0), rtol=1e-5)


def lists_of(draws: Any, name: str, part: str, d: int) -> list[Any]:
    offsets = getattr(draws, f"{name}_offsets")
    values: list[Any] = getattr(draws, f"{name}_{part}")[offsets[d] : offsets[d + 1]].tolist()
    return values


def test_end_tokens_are_banned_until_min_tokens_are_out() -> None:
    """Red when min_tokens is off by one: with 2, the first two drawn tokens cannot be an end token, the third can."""
    rows = make_rows(new_row(0, (10, 11, 12, 13, 14, 15), prompt=4, min_tokens=2))
    inputs, _ = build(rows, PlanRow(row=0, start=2, count=4, tokens=(), samples=3))
    assert [lists_of(inputs.draws, "ban", "tokens", d) for d in range(3)] == [[2, 3], [2, 3], []]


def test_bias_goes_with_each_draw_but_not_with_scores() -> None:
    """Red when logit_bias reaches another row or a prompt logprob."""
    rows = make_rows(new_row(0, prompt_logprobs=0, logit_bias={9: 1.5, 4: -2.0}), new_row(1))
    chunks = (
        PlanRow(row=1, start=3, count=1, tokens=(), samples=1),
        PlanRow(row=0, start=2, count=2, tokens=(), samples=1, streams=(1,), prompt_logprobs_from=0),
    )
    draws = build(rows, *chunks)[0].draws
    assert [lists_of(draws, "bias", "tokens", d) for d in range(4)] == [[], [], [4, 9], [4, 9]]
    assert lists_of(draws, "bias", "values", 2) == [-2.0, 1.5]


def test_history_counts_the_output_and_forgets_drafts() -> None:
    """Red when a rejected draft stays in the penalties, a prompt token counts as output, or the row's own history is stale."""
    rows = make_rows(new_row(0, (10, 11, 10, 12), prompt=3, frequency_penalty=0.5), new_row(1))
    drafted = PlanRow(row=0, start=3, count=3, tokens=(13, 12), samples=3)
    rows.append(drafted)
    draws = build(rows, drafted, PlanRow(row=1, start=3, count=1, tokens=(), samples=1))[0].draws

    def counts(d: int, draws: Any = draws) -> dict[int, int]:
        return dict(zip(lists_of(draws, "history", "tokens", d), lists_of(draws, "history", "counts", d), strict=True))

    assert counts(0) == {10: 0, 11: 0, 12: 1}
    assert counts(1) == {10: 0, 11: 0, 12: 1, 13: 1}
    assert counts(2) == {10: 0, 11: 0, 12: 2, 13: 1}
    assert counts(3) == {}
    corrected = PlanRow(row=0, start=4, count=1, tokens=(11,), samples=1)  # both drafts were refused
    rows.append(corrected)
    assert counts(0, build(rows, corrected)[0].draws) == {10: 0, 11: 1, 12: 1}


def test_a_long_history_grows() -> None:
    """Red when more than 64 distinct tokens overflow the history's arrays."""
    rows = Rows(1, 400, 1, 25)
    tokens = tuple(range(300))
    params = SamplingParams(repetition_penalty=1.1)
    rows.take(NewRow(row=0, tokens=tokens, prompt_length=100, blocks=((),), params=params, seed=0, stop_ids=()))
    draws = build(rows, PlanRow(row=0, start=299, count=1, tokens=(), samples=1))[0].draws
    assert draws.history_tokens.tolist() == list(tokens)
    assert draws.history_counts.sum() == 200


def test_results_go_back_to_their_rows() -> None:
    """Red when tokens or logprobs are attributed to another row, or padding is reported as a token."""
    rows = make_rows(new_row(0, logprobs=2, prompt_logprobs=0), new_row(1), new_row(2, logprobs=4))
    plan = StepPlan(
        step=9,
        rows=(
            PlanRow(row=1, start=0, count=2, tokens=()),
            PlanRow(row=0, start=2, count=2, tokens=(), samples=1, prompt_logprobs_from=0),
            PlanRow(row=1, start=2, count=2, tokens=(), samples=1, streams=(1,)),
            PlanRow(row=2, start=0, count=4, tokens=(), samples=1),
        ),
    )
    _, draws = step_inputs(plan, rows)
    drawn = Drawn(
        token=np.array([13, 40, 41, 42, 43], np.int32),
        logprob=np.array([-1.0, -2.0, 0.0, 0.0, -3.0], np.float32),
        top_tokens=np.array([[-1] * 4, [5, 6, -1, -1], [-1] * 4, [-1] * 4, [7, 8, 9, -1]], np.int32),
        top_logprobs=np.array([[0] * 4, [-0.5, -1.5, 0, 0], [0] * 4, [0] * 4, [-1, -2, -3, 0]], np.float32),
    )
    inner, scored, plain, last = row_results(plan, draws, drawn, rows)
    assert (inner.tokens, inner.logprobs, inner.prompt_logprobs) == ((), (), ())
    assert scored.tokens == (40,)
    assert scored.logprobs == (TokenLogprobs(40, -2.0, (5, 6), (-0.5, -1.5)),)
    assert scored.prompt_logprobs == (TokenLogprobs(13, -1.0),)
    assert (plain.row, plain.tokens, plain.logprobs) == (1, (41, 42), ())
    assert last.logprobs == (TokenLogprobs(43, -3.0, (7, 8, 9), (-1.0, -2.0, -3.0)),)


def test_the_tables_follow_the_plan() -> None:
    """Red when blocks are appended at the wrong place, a freed row keeps old ones, or an edit hits another group."""
    rows = make_rows(new_row(0))
    assert [t[0].tolist() for t in rows.block_tables] == [[1, 2, 0, 0], [3, 0, 0, 0]]
    rows.append(PlanRow(row=0, start=4, count=1, tokens=(77,), new_blocks=((4,), (5, 6))))
    assert [t[0].tolist() for t in rows.block_tables] == [[1, 2, 4, 0], [3, 5, 6, 0]]
    assert rows.tokens[0, :6].tolist() == [10, 11, 12, 13, 77, 0]
    rows.release(0, 1, 2)
    rows.replace(0, 0, 1, 9)
    rows.append(PlanRow(row=0, start=5, count=1, tokens=(), new_blocks=((), (7,))))
    assert [t[0].tolist() for t in rows.block_tables] == [[1, 9, 4, 0], [0, 0, 6, 7]]
    rows.free(0)
    rows.take(new_row(0))
    assert [t[0].tolist() for t in rows.block_tables] == [[1, 2, 0, 0], [3, 0, 0, 0]]


def test_a_wrong_draft_ends_what_counts() -> None:
    """Red when tokens behind a refuted draft are returned, or the token that refutes it is not."""
    rows = make_rows(new_row(0))
    first, second = int(rows.tokens[0, 2]), int(rows.tokens[0, 3])
    plan = (PlanRow(row=0, start=1, count=3, tokens=(), samples=3),)
    _, draws = build(rows, *plan)
    for tokens, count in (((first, second, 9), 3), ((first, second + 1, 9), 2), ((first + 1, second, 9), 1)):
        drawn = Drawn(
            token=np.array(tokens, np.int32),
            logprob=np.zeros(3, np.float32),
            top_tokens=np.zeros((3, 0), np.int32),
            top_logprobs=np.zeros((3, 0), np.float32),
        )
        (result,) = row_results(StepPlan(step=0, rows=plan), draws, drawn, rows)
        assert result.tokens == tokens[:count]
