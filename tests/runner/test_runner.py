"""The runner: plans in, results out, in the documented order, with and without a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tiny
from noria.backends.base import Drawn, StepInputs
from noria.backends.cost.backend import CostBackend
from noria.core.plan import NewRow, PlanRow, StepPlan
from noria.runner.rows import Rows
from noria.runner.runner import Runner
from noria.types import SamplingParams


class Recorder(CostBackend):
    """An executable and a backend in one: notes what it is asked, draws the first token of each row plus 1."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()
        self.thread: int | None = None

    def run(self, inputs: StepInputs) -> Drawn:
        assert self.gate.wait(10)
        self.thread = threading.get_ident()
        tables = [t[inputs.row_slots].tolist() for t in inputs.block_tables]
        self.log.append(("run", inputs.tokens.tolist(), tables))
        count = len(inputs.draws)
        empty: npt.NDArray[Any] = np.zeros((count, 0))
        tokens = inputs.tokens[inputs.logit_rows[inputs.draws.logit_row]] + 1
        return Drawn(tokens, np.zeros(count, np.float32), empty.astype(np.int32), empty.astype(np.float32))

    def all_logits(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        raise NotImplementedError

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.log.append(("copy", list(pairs)))

    def close(self) -> None:
        self.log.append("closed")


def make(depth: int = 0) -> tuple[Runner, Recorder]:
    recorder = Recorder()
    return Runner(recorder, recorder, Rows(2, 64, 2, 4), depth=depth), recorder


def new(row: int, tokens: tuple[int, ...]) -> NewRow:
    return NewRow(
        row=row,
        tokens=tokens,
        prompt_length=len(tokens),
        blocks=((1, 2), (3, 4)),
        params=SamplingParams(),
        seed=1,
        stop_ids=(),
    )


def test_a_plan_is_executed_in_the_order_of_its_fields() -> None:
    """Red when a row is taken before it is freed, a table is edited before the row is taken, or copies follow the forward."""
    runner, recorder = make()
    prefill = StepPlan(step=1, new_rows=(new(0, (10, 11)),), rows=(PlanRow(row=0, start=0, count=2, tokens=(), samples=1),))
    assert runner.wait(runner.launch(prefill)).rows[0].tokens == (12,)
    everything = StepPlan(
        step=2,
        freed_rows=(0,),
        new_rows=(new(0, (20, 21, 22)),),
        released=((0, 1, 1),),
        replaced=((0, 0, 0, 9),),
        copies=((7, 8),),
        rows=(PlanRow(row=0, start=2, count=2, tokens=(30,), new_blocks=((5,), ()), samples=1),),
    )
    result = runner.wait(runner.launch(everything))
    assert (result.step, result.rows[0].tokens) == (2, (31,))
    assert recorder.log[1:] == [("copy", [(7, 8)]), ("run", [22, 30], [[[9, 2, 5, 0]], [[0, 4, 0, 0]]])]
    runner.close()
    assert recorder.log[-1] == "closed"


def test_an_empty_plan_still_edits_tables() -> None:
    """Red when a plan without rows is skipped: its row would be taken twice later."""
    runner, recorder = make()
    runner.wait(runner.launch(StepPlan(step=1, new_rows=(new(0, (1,)),))))
    result = runner.wait(runner.launch(StepPlan(step=2, freed_rows=(0,), new_rows=(new(0, (2,)),), copies=((1, 2),))))
    assert (result.step, result.rows, recorder.log) == (2, (), [("copy", [(1, 2)])])


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(step=1, freed_rows=(0,)),
        StepPlan(step=1, new_rows=(new(0, (1,)), new(0, (2,)))),
        StepPlan(step=1, rows=(PlanRow(row=0, start=0, count=1, tokens=(), samples=1),)),
    ],
)
def test_a_plan_that_contradicts_the_tables_crashes(plan: StepPlan) -> None:
    """Red when the two halves may drift apart unnoticed."""
    runner, _ = make()
    with pytest.raises(AssertionError):
        runner.launch(plan)


def test_depth_0_runs_on_the_callers_thread_and_depth_1_beside_it() -> None:
    """Red when launch blocks at depth 1, or the engine's thread is not the worker at depth 0."""
    plan = StepPlan(step=1, new_rows=(new(0, (5,)),), rows=(PlanRow(row=0, start=0, count=1, tokens=(), samples=1),))
    runner, recorder = make()
    runner.wait(runner.launch(plan))
    assert recorder.thread == threading.get_ident()

    runner, recorder = make(depth=1)
    recorder.gate.clear()
    ticket = runner.launch(plan)
    assert not recorder.log
    with pytest.raises(AssertionError, match="while another was running"):
        runner.launch(StepPlan(step=2))
    recorder.gate.set()
    assert runner.wait(ticket).rows[0].tokens == (6,)
    assert recorder.thread != threading.get_ident()
    runner.close()


def test_a_failing_step_raises_in_wait() -> None:
    """Red when a device's error is swallowed at depth 1."""
    runner, recorder = make(depth=1)
    recorder.run = lambda inputs: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    plan = StepPlan(step=1, new_rows=(new(0, (5,)),), rows=(PlanRow(row=0, start=0, count=1, tokens=(), samples=1),))
    ticket = runner.launch(plan)
    with pytest.raises(ZeroDivisionError):
        runner.wait(ticket)
    runner.close()


def test_generation_equals_transformers(tmp_path: Path) -> None:
    """Red when a decode step reads a wrong token, position or block: 40 greedy tokens, two rows, blocks added on the way."""
    import torch

    from noria.backends.torch.backend import TorchBackend

    model = tiny.llama()
    machine = tiny.Machine(tiny.load(model, tmp_path), TorchBackend())
    runner = Runner(machine.executable, machine.backend, machine.rows)
    prompts = {0: [5, 6, 7, 8, 9], 1: [100] * 20}
    params = SamplingParams(temperature=0.0)
    free = iter(range(1, 60))
    blocks = {row: (tuple(next(free) for _ in range(2)),) for row in prompts}
    news = tuple(
        NewRow(row=r, tokens=tuple(p), prompt_length=len(p), blocks=blocks[r], params=params, seed=0, stop_ids=())
        for r, p in prompts.items()
    )
    rows = tuple(PlanRow(row=r, start=0, count=len(p), tokens=(), samples=1) for r, p in prompts.items())
    outputs: dict[int, list[int]] = {0: [], 1: []}
    result = runner.wait(runner.launch(StepPlan(step=0, new_rows=news, rows=rows)))
    for step in range(1, 41):
        for row in result.rows:
            outputs[row.row].append(row.tokens[0])
        rows = tuple(
            PlanRow(
                row=r,
                start=len(p) + step - 1,
                count=1,
                tokens=(outputs[r][-1],),
                new_blocks=((next(free),),) if len(p) + step - 1 >= 32 and (len(p) + step - 1) % 16 == 0 else (),
                samples=1,
            )
            for r, p in prompts.items()
        )
        result = runner.wait(runner.launch(StepPlan(step=step, rows=rows)))
    for row, tokens in prompts.items():
        ids = torch.tensor([tokens])
        reference = model.generate(  # type: ignore[operator]
            ids, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0, attention_mask=torch.ones_like(ids)
        )
        assert outputs[row] == reference[0, len(tokens) :].tolist()
