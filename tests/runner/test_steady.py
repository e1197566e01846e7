"""The inputs of a steady decode are those that would have been built anew."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.core.plan import NewRow, PlanRow, StepPlan
from noria.runner.inputs import step_inputs
from noria.runner.rows import Rows
from noria.runner.steady import Built, SteadyInputs
from noria.types import SamplingParams

PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_p=0.9, logprobs=2),
    SamplingParams(presence_penalty=0.5),
    SamplingParams(min_tokens=3),
)


def _assert_equal(built: Built, expected: Built) -> None:
    for got, want in zip(built, expected, strict=True):
        for field in dataclasses.fields(want):
            value, wanted = getattr(got, field.name), getattr(want, field.name)
            if field.name == "draws":
                _assert_equal((value,), (wanted,))  # type: ignore[arg-type]
            elif isinstance(wanted, np.ndarray):
                assert value.dtype == wanted.dtype, field.name
                np.testing.assert_array_equal(value, wanted, err_msg=field.name)
            elif field.name != "block_tables":
                assert value == wanted, field.name


@settings(deadline=None)
@given(data=st.data())
def test_any_sequence_of_steps(data: st.DataObject) -> None:
    """Red when what changes from step to step - ids, positions, rows, parameters, lists - is taken from before."""
    rows = Rows(max_num_seqs=3, max_model_len=64, num_groups=1, max_blocks_per_row=4)
    steady = SteadyInputs(rows)
    position: dict[int, int] = {}
    for step in range(12):
        for row in range(3):
            if data.draw(st.integers(0, 3)) == 0 or row not in position:
                if row in position:
                    rows.free(row)
                params = PARAMS[data.draw(st.integers(0, len(PARAMS) - 1))]
                rows.take(
                    NewRow(row=row, tokens=(step, 2), prompt_length=2, blocks=((1,),), params=params, seed=step, stop_ids=(5,))
                )
                position[row] = 1
        planned = []
        for row in data.draw(st.permutations(sorted(position)))[: data.draw(st.integers(1, 3))]:
            start, count = position[row], data.draw(st.sampled_from([1, 1, 1, 2]))
            new = PlanRow(row=row, start=start, count=count, tokens=tuple(range(start, start + count)), samples=1)
            rows.append(new)
            planned.append(new)
            position[row] += count
        plan = StepPlan(step=step, rows=tuple(planned))
        _assert_equal(steady.build(plan), step_inputs(plan, rows))
