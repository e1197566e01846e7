"""StepPlan -> StepInputs, by array operations over the runner's tables."""

from __future__ import annotations

import numpy as np

from noria.backends.base import StepInputs
from noria.core.plan import StepPlan
from noria.runner.draws import StepDraws, step_draws
from noria.runner.rows import Rows


def step_inputs(plan: StepPlan, rows: Rows) -> tuple[StepInputs, StepDraws]:
    """The inputs of a plan whose ids and blocks are in the tables already. The block tables are shared, not copied."""
    slots = np.array([r.row for r in plan.rows], np.int32)
    starts = np.array([r.start for r in plan.rows], np.int64)
    counts = np.array([r.count for r in plan.rows], np.int64)
    offsets = np.zeros(len(plan.rows) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    total = int(offsets[-1])
    positions = np.arange(total) + np.repeat(starts - offsets[:-1], counts)
    draws = step_draws(plan, rows, offsets)
    inputs = StepInputs(
        tokens=rows.tokens[np.repeat(slots, counts), positions],
        positions=positions.astype(np.int32),
        row_offsets=offsets,
        row_slots=slots,
        block_tables=rows.block_tables,
        logit_rows=draws.logit_rows,
        draws=draws.draws,
        hidden_rows=draws.hidden_rows,
    )
    return inputs, draws
