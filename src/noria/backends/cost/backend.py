"""`Backend` without arithmetic: counts floating-point operations and bytes moved, op by op, and the workspace they need.

    per row of the op's domain      activations read and written, multiply-adds
    per step                        the weights, read once whatever the batch
    per query and key               attention, from the positions of the step's rows

It feeds the memory ledger, and drives an engine without weights (every draw is token 0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import numpy as np
import numpy.typing as npt

from noria.backends.base import AttentionSpec, Drawn, Handle, KVCacheSpec, Ops, StepInputs
from noria.weights.formats import LinearWeight, VectorWeight, matrix_bytes

FLOAT = 4  # bytes of an activation's element


LOGIT_TILE_BYTES = 16 << 20  # of logits that exist at once: the draws reduce them tile by tile


class Domain(Enum):
    """What an op is repeated over."""

    TOKENS = "tokens"
    LOGITS = "logits"  # and hidden states: what `gather_logit_rows` makes
    LOGIT_TILE = "logit tile"  # the logits themselves
    HIDDEN = "hidden"  # hidden states that are reported


@dataclass(eq=False)
class Activation:
    """The shape of an activation [rows of `domain`, width], and the ops between which it is alive."""

    domain: Domain
    width: int
    born: int
    last_use: int

    @property
    def row_bytes(self) -> int:
        return self.width * FLOAT


@dataclass(frozen=True)
class OpCost:
    """One recorded op: what it costs for each row of its domain, and once a step."""

    name: str
    domain: Domain
    row_flops: int = 0
    row_bytes: int = 0
    step_bytes: int = 0
    attention: AttentionSpec | None = None


@dataclass
class StepCost:
    """What one step costs. `by_op` divides the totals: name -> (flops, bytes)."""

    flops: int = 0
    bytes: int = 0
    by_op: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, name: str, flops: int, moved: int) -> None:
        self.flops += flops
        self.bytes += moved
        before = self.by_op.get(name, (0, 0))
        self.by_op[name] = (before[0] + flops, before[1] + moved)


class CostBackend:
    """Builds `CostExecutable`s. Allocates nothing, so blocks cannot be read or written."""

    name = "cost"

    def build(
        self,
        forward: Callable[[Ops], Handle],
        *,
        ropes: Sequence[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]],
        kv: KVCacheSpec,
        max_tokens: int,
        max_rows: int,
        vocab_size: int,
    ) -> CostExecutable:
        ops = CostOps()
        forward(ops)
        return CostExecutable(ops.costs, ops.activations, kv, max_tokens, ops.hidden_size)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """There is nothing to copy."""

    def read_block(self, block: int) -> npt.NDArray[np.uint8]:
        raise NotImplementedError("the cost backend holds no KV")

    def write_block(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        raise NotImplementedError("the cost backend holds no KV")

    def close(self) -> None:
        """There is nothing to free."""


class CostExecutable:
    """A recorded forward pass that can be asked what a step would cost."""

    def __init__(
        self, costs: Sequence[OpCost], activations: Sequence[Activation], kv: KVCacheSpec, max_tokens: int, hidden_size: int
    ) -> None:
        self.costs = tuple(costs)
        self._hidden_size = hidden_size
        self._activations = activations
        self._kv = kv
        self._max_tokens = max_tokens

    def run(self, inputs: StepInputs) -> Drawn:
        """Draw token 0 everywhere, with logprob 0; hidden states are 0."""
        count = len(inputs.draws)
        widest = int(max(inputs.draws.num_top.max(initial=0), 0))
        return Drawn(
            token=np.zeros(count, np.int32),
            logprob=np.zeros(count, np.float32),
            top_tokens=np.full((count, widest), -1, np.int32),
            top_logprobs=np.zeros((count, widest), np.float32),
            hidden=np.zeros((len(inputs.hidden_rows), self._hidden_size), np.float32),
        )

    def all_logits(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        raise NotImplementedError("the cost backend computes no logits")

    def cost(self, inputs: StepInputs) -> StepCost:
        """Operations and bytes of one step with these inputs."""
        wanted, hidden = len(inputs.logit_rows), len(inputs.hidden_rows)
        rows = {
            Domain.TOKENS: len(inputs.tokens),
            Domain.LOGITS: wanted + hidden,
            Domain.LOGIT_TILE: wanted,
            Domain.HIDDEN: hidden,
        }
        total = StepCost()
        for op in self.costs:
            count = rows[op.domain]
            flops, moved = count * op.row_flops, count * op.row_bytes + (op.step_bytes if count else 0)
            if op.attention is not None:
                pairs, keys = _keys_visited(inputs, op.attention.window)
                flops += 4 * pairs * op.attention.num_heads * op.attention.head_dim  # q.k and p.v, multiply and add
                moved += keys * _token_kv_bytes(self._kv)
            total.add(op.name, flops, moved)
        return total

    def workspace_bytes(self, max_logit_rows: int) -> int:
        """Bytes of the activations alive at once, at the worst op of a step of `max_tokens` tokens."""
        rows = {Domain.TOKENS: self._max_tokens, Domain.LOGITS: max_logit_rows}
        changes = np.zeros(len(self.costs) + 1, np.int64)
        for activation in self._activations:
            if activation.domain is Domain.LOGIT_TILE:
                tile = max(1, LOGIT_TILE_BYTES // activation.row_bytes)
                size = min(max_logit_rows, tile) * activation.row_bytes
            else:
                size = rows[activation.domain] * activation.row_bytes
            changes[activation.born] += size
            changes[activation.last_use + 1] -= size
        return int(np.cumsum(changes).max(initial=0))


def _keys_visited(inputs: StepInputs, window: int) -> tuple[int, int]:
    """(query-key pairs, keys read: each row reads its keys once for all its queries)."""
    seen = inputs.positions.astype(np.int64) + 1
    if window:
        seen = np.minimum(seen, window)
    counts = np.diff(inputs.row_offsets)
    filled = inputs.row_offsets[:-1][counts > 0]
    keys = seen[filled] + counts[counts > 0] - 1
    return int(seen.sum()), int(keys.sum())


def _token_kv_bytes(kv: KVCacheSpec) -> int:
    """Bytes of one token's K and V in one layer."""
    return 2 * kv.num_kv_heads * kv.token_bytes


class CostOps:
    """Records the costs of a forward pass."""

    def __init__(self) -> None:
        self.costs: list[OpCost] = []
        self.activations: list[Activation] = []
        self.hidden_size = 0

    def _record(self, cost: OpCost, *reads: Handle) -> None:
        for handle in reads:
            _shape(handle).last_use = len(self.costs)
        self.costs.append(cost)

    def _new(self, domain: Domain, width: int) -> Handle:
        """The result of the op recorded last."""
        here = len(self.costs) - 1
        activation = Activation(domain, width, here, here)
        self.activations.append(activation)
        return Handle(activation)

    def _elementwise(self, name: str, flops: int, moved: int, *reads: Handle) -> None:
        """An op that passes once over its operands: `flops` and `moved` are multiples of the first one's width."""
        first = _shape(reads[0])
        cost = OpCost(name, first.domain, row_flops=flops * first.width, row_bytes=moved * first.row_bytes)
        self._record(cost, *reads)

    def embed(self, weight: LinearWeight, scale: float) -> Handle:
        row = _packed_bytes(weight) // weight.outputs
        width = weight.inputs
        self._record(OpCost("embed", Domain.TOKENS, row_flops=width, row_bytes=row + width * FLOAT))
        return self._new(Domain.TOKENS, width)

    def linear(self, x: Handle, weight: LinearWeight) -> Handle:
        self._matmul("linear", _shape(x).domain, x, weight)
        return self._new(_shape(x).domain, weight.outputs)

    def _matmul(self, name: str, domain: Domain, x: Handle, weight: LinearWeight) -> None:
        cost = OpCost(
            name,
            domain,
            row_flops=2 * weight.inputs * weight.outputs,
            row_bytes=(weight.inputs + weight.outputs) * FLOAT,
            step_bytes=_packed_bytes(weight),
        )
        self._record(cost, x)

    def rms_norm(self, x: Handle, weight: VectorWeight, eps: float, residual: Handle | None = None) -> tuple[Handle, Handle]:
        shape = _shape(x)
        if residual is None:
            self._elementwise("rms_norm", 4, 2, x)
            return self._new(shape.domain, shape.width), x
        self._elementwise("rms_norm", 5, 4, x, residual)
        return self._new(shape.domain, shape.width), residual

    def head_norm(
        self, qkv: Handle, q_weight: VectorWeight, k_weight: VectorWeight, eps: float, attention: AttentionSpec
    ) -> Handle:
        self._elementwise("head_norm", 4, 2, qkv)
        return qkv

    def rope(self, qkv: Handle, rope: int, attention: AttentionSpec) -> Handle:
        self._elementwise("rope", 3, 2, qkv)
        return qkv

    def attend(self, qkv: Handle, attention: AttentionSpec) -> Handle:
        width = attention.num_heads * attention.head_dim
        cost = OpCost("attend", Domain.TOKENS, row_bytes=_shape(qkv).row_bytes + width * FLOAT, attention=attention)
        self._record(cost, qkv)
        return self._new(Domain.TOKENS, width)

    def gated(self, gate_up: Handle, activation: Literal["silu", "gelu_tanh"]) -> Handle:
        shape = _shape(gate_up)
        half = shape.width // 2
        self._record(OpCost("gated", shape.domain, row_flops=6 * half, row_bytes=3 * half * FLOAT), gate_up)
        return self._new(shape.domain, half)

    def add(self, x: Handle, y: Handle) -> Handle:
        self._elementwise("add", 1, 3, x, y)
        return x

    def gather_logit_rows(self, x: Handle) -> Handle:
        shape = _shape(x)
        self._record(OpCost("gather", Domain.LOGITS, row_bytes=2 * shape.row_bytes), x)
        return self._new(Domain.LOGITS, shape.width)

    def hidden_states(self, x: Handle) -> None:
        shape = _shape(x)
        self.hidden_size = shape.width
        self._record(OpCost("hidden", Domain.HIDDEN, row_bytes=2 * shape.row_bytes), x)

    def logits(self, x: Handle, weight: LinearWeight, softcap: float) -> Handle:
        self._matmul("logits", Domain.LOGIT_TILE, x, weight)
        return self._new(Domain.LOGIT_TILE, weight.outputs)


def _shape(handle: Handle) -> Activation:
    assert isinstance(handle, Activation)
    return handle


def _packed_bytes(weight: LinearWeight) -> int:
    """Bytes of the packed matrices, from their shapes: the data itself need not be there."""
    return sum(matrix_bytes(s.format, s.outputs, s.inputs) for s in weight.segments)


def op_table(costs: Mapping[str, tuple[int, int]]) -> str:
    """`StepCost.by_op` for people: GFLOP, MB and flops a byte of each op."""
    lines = [f"{'op':<12}{'GFLOP':>10}{'MB':>10}{'FLOP/B':>10}"]
    for name, (flops, moved) in costs.items():
        lines.append(f"{name:<12}{flops / 1e9:>10.3f}{moved / 1e6:>10.2f}{flops / max(moved, 1):>10.1f}")
    return "\n".join(lines)
