"""The counts of the cost backend, against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from noria.backends.base import Draws, StepInputs
from noria.backends.cost.backend import CostBackend, CostExecutable, op_table
from noria.core.plan import PlanRow, StepPlan
from noria.models.spec import ModelSpec
from noria.runner.inputs import step_inputs
from noria.weights.formats import LinearWeight, matrix_bytes


def costed(loaded: tiny.Loaded, **settings: Any) -> tuple[tiny.Machine, CostExecutable]:
    machine = tiny.Machine(loaded, CostBackend(), **settings)
    assert isinstance(machine.executable, CostExecutable)
    return machine, machine.executable


def inputs(machine: tiny.Machine, *chunks: PlanRow) -> StepInputs:
    return step_inputs(StepPlan(step=0, rows=chunks), machine.rows)[0]


@pytest.fixture
def loaded(tmp_path: Path) -> tiny.Loaded:
    return tiny.load(tiny.llama(), tmp_path, "q8")


def linear_flops(spec: ModelSpec, tokens: int, logit_rows: int) -> int:
    """Twice the weights that each token, or each logit row, meets: the last layer's o and MLP see logit rows only."""
    h, f, q = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
    qkv = h * (q + 2 * spec.num_kv_heads * spec.head_dim)
    rest = q * h + 3 * h * f
    layers = len(spec.layers)
    return 2 * (tokens * (layers * qkv + (layers - 1) * rest) + logit_rows * rest)


def test_matrix_products_are_counted_by_rows(loaded: tiny.Loaded) -> None:
    """Red when a linear is counted for the wrong number of rows, or the logits for all tokens."""
    machine, executable = costed(loaded)
    machine.take(0, list(range(40)))
    cost = executable.cost(inputs(machine, PlanRow(row=0, start=0, count=40, tokens=(), samples=1)))
    spec = loaded.spec
    assert cost.by_op["linear"][0] == linear_flops(spec, 40, 1)
    assert cost.by_op["logits"][0] == 2 * spec.vocab_size * spec.hidden_size
    assert cost.flops == sum(flops for flops, _ in cost.by_op.values())
    assert cost.bytes == sum(moved for _, moved in cost.by_op.values())
    assert op_table(cost.by_op).count("\n") == len(cost.by_op)


def test_weights_are_read_once_a_step(loaded: tiny.Loaded) -> None:
    """Red when weight bytes grow with the batch, or come from another format than the packed one."""
    machine, executable = costed(loaded)
    machine.take(0, list(range(10)))
    machine.take(1, list(range(10)))
    one = executable.cost(inputs(machine, PlanRow(row=0, start=9, count=1, tokens=(), samples=1)))
    two = executable.cost(inputs(machine, *(PlanRow(row=r, start=9, count=1, tokens=(), samples=1) for r in (0, 1))))
    weights = [w for n, w in loaded.weights.items() if isinstance(w, LinearWeight) and n not in ("embed", "head")]
    packed = sum(matrix_bytes(s.format, s.outputs, s.inputs) for w in weights for s in w.segments)
    activations = two.by_op["linear"][1] - one.by_op["linear"][1]
    assert one.by_op["linear"][1] == packed + activations
    assert one.by_op["linear"][1] < 1.2 * sum(w.nbytes for w in weights)


def test_hidden_states_cost_no_logits(loaded: tiny.Loaded) -> None:
    """Red when a prompt that is embedded is charged for the head, or not for the layers behind the last attention."""
    machine, executable = costed(loaded)
    machine.take(0, list(range(10)))
    embedded = inputs(machine, PlanRow(row=0, start=0, count=10, tokens=(), hidden_from=0))
    scored = inputs(machine, PlanRow(row=0, start=0, count=10, tokens=(), prompt_logprobs_from=0, samples=1))
    cost, other = executable.cost(embedded), executable.cost(scored)
    assert cost.by_op["logits"] == (0, 0)
    assert cost.by_op["linear"] == other.by_op["linear"]
    assert cost.by_op["hidden"] == (0, 10 * 2 * 4 * loaded.spec.hidden_size)
    assert other.by_op["hidden"] == (0, 0)
    assert executable.run(embedded).hidden.shape == (10, loaded.spec.hidden_size)


def test_attention_counts_keys_in_reach(tmp_path: Path) -> None:
    """Red when the window is ignored, or a chunk's queries are each charged for reading the keys."""
    machine, executable = costed(tiny.load(tiny.gemma(), tmp_path))
    spec = machine.spec
    machine.take(0, list(range(100)))
    window = 24
    cost = executable.cost(inputs(machine, PlanRow(row=0, start=90, count=10, tokens=(), samples=1)))
    full_pairs = sum(p + 1 for p in range(90, 100))
    pairs = full_pairs + 5 * 10 * window
    assert cost.by_op["attend"][0] == 4 * pairs * spec.num_heads * spec.head_dim
    keys = 100 + 5 * (window + 9)
    qkv_and_out = 10 * 4 * spec.head_dim * (spec.num_heads + 2 + spec.num_heads) * 6
    assert cost.by_op["attend"][1] == qkv_and_out + keys * 2 * spec.head_dim * 4


def test_workspace_is_the_peak_not_the_sum(loaded: tiny.Loaded) -> None:
    """Red when dead activations are counted, or live ones are not: the worst op of this model is the gate|up product."""
    _, executable = costed(loaded, max_tokens=32)
    spec = loaded.spec
    residual, normed, gate_up = spec.hidden_size, spec.hidden_size, 2 * spec.intermediate_size
    gated = spec.intermediate_size
    peak = max(residual + normed + gate_up, residual + gate_up + gated)
    assert executable.workspace_bytes(1) == 32 * 4 * peak
    assert executable.workspace_bytes(32) >= executable.workspace_bytes(1)


def test_it_draws_without_weights(loaded: tiny.Loaded) -> None:
    """Red when an engine cannot be driven by the counting backend."""
    machine, executable = costed(loaded)
    machine.take(0, [1, 2, 3])
    drawn = executable.run(inputs(machine, PlanRow(row=0, start=0, count=3, tokens=(), samples=1)))
    assert drawn.token.tolist() == [0]
    assert isinstance(inputs(machine, PlanRow(row=0, start=0, count=3, tokens=())).draws, Draws)
    assert executable.cost(inputs(machine)).flops == 0
    assert np.all(drawn.logprob == 0)
