"""Records a model's forward pass: `Ops` whose methods compute nothing, check that shapes fit, and note what was called.

A handle is a `Value`: one result of one op. Ops that work in place give a new value in the same storage; the old one is then
overwritten, and using it again is an error here, not a wrong answer later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from noria.backends.base import AttentionSpec, Handle, KVCacheSpec, Ops
from noria.weights.formats import LinearWeight, VectorWeight

Rope = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
Activation = Literal["silu", "gelu_tanh"]

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Value:
    """float32 [rows, width]; rows are the step's tokens or its logit rows."""

    id: int
    storage: int
    width: int
    logits: bool  # of the LOGITS domain


@dataclass(frozen=True)
class Embed:
    weight: LinearWeight
    scale: float
    out: Value


@dataclass(frozen=True)
class Linear:
    x: Value
    weight: LinearWeight
    out: Value


@dataclass(frozen=True)
class Norm:
    x: Value
    residual: Value | None
    weight: VectorWeight
    eps: float
    out: Value
    total: Value  # x, or in place on the residual


@dataclass(frozen=True)
class HeadNorm:
    q_weight: VectorWeight
    k_weight: VectorWeight
    eps: float
    attention: AttentionSpec
    out: Value  # in place


@dataclass(frozen=True)
class Rotate:
    rope: int
    attention: AttentionSpec
    out: Value  # in place


@dataclass(frozen=True)
class Attend:
    qkv: Value
    attention: AttentionSpec
    out: Value


@dataclass(frozen=True)
class Gated:
    x: Value
    activation: Activation
    out: Value


@dataclass(frozen=True)
class Add:
    y: Value
    out: Value  # in place on the first operand


@dataclass(frozen=True)
class Gather:
    x: Value
    out: Value


@dataclass(frozen=True)
class Hidden:
    x: Value
    out: Value  # x


@dataclass(frozen=True)
class Logits:
    x: Value
    weight: LinearWeight
    softcap: float
    out: Value


Op = Embed | Linear | Norm | HeadNorm | Rotate | Attend | Gated | Add | Gather | Hidden | Logits


def record(forward: Callable[[Ops], Handle], ropes: Sequence[Rope], kv: KVCacheSpec, vocab_size: int) -> tuple[Op, ...]:
    """The ops of `forward`, in order. ValueError where shapes do not fit or the pass does not end with `logits`."""
    recorder = Recorder(ropes, kv, vocab_size)
    result: object = forward(recorder)
    last = recorder.ops[-1] if recorder.ops else None
    if not isinstance(last, Logits) or result is not last.out:
        raise ValueError("forward must return what `logits` returned, as its last op")
    return tuple(recorder.ops)


class Recorder:
    """Implements `backends.base.Ops`."""

    def __init__(self, ropes: Sequence[Rope], kv: KVCacheSpec, vocab_size: int) -> None:
        self.ops: list[Op] = []
        self._ropes = ropes
        self._kv = kv
        self._vocab_size = vocab_size
        self._values = 0
        self._current: dict[int, Value] = {}  # by storage
        self._overwritten_by: dict[int, str] = {}  # by value

    # -- ops -------------------------------------------------------------------------------------------------------

    def embed(self, weight: LinearWeight, scale: float) -> Handle:
        if len(weight.segments) != 1:
            raise ValueError(f"{weight.name}: an embedding is one matrix, this has {len(weight.segments)} segments")
        if weight.outputs < self._vocab_size:
            raise ValueError(f"{weight.name}: {weight.outputs} rows for a vocabulary of {self._vocab_size}")
        return self._add(Embed(weight, scale, self._new(weight.inputs, logits=False)))

    def linear(self, x: Handle, weight: LinearWeight) -> Handle:
        value = self._use(x, f"linear {weight.name}")
        self._check_weight(value, weight)
        return self._add(Linear(value, weight, self._new(weight.outputs, value.logits)))

    def rms_norm(self, x: Handle, weight: VectorWeight, eps: float, residual: Handle | None = None) -> tuple[Handle, Handle]:
        name = f"rms_norm {weight.name}"
        value = self._use(x, name)
        _check_width(value.width, len(weight.data), name)
        if residual is None:
            before, total = None, value
        else:
            before = self._use(residual, name)
            self._check_alike(value, before, name)
            total = self._in_place(before, name)
        out = self._new(value.width, value.logits)
        self._add(Norm(value, before, weight, eps, out, total))
        return Handle(out), Handle(total)

    def head_norm(
        self, qkv: Handle, q_weight: VectorWeight, k_weight: VectorWeight, eps: float, attention: AttentionSpec
    ) -> Handle:
        name = f"head_norm {q_weight.name}"
        value = self._use_qkv(qkv, attention, name)
        for weight in (q_weight, k_weight):
            _check_width(attention.head_dim, len(weight.data), f"head_norm {weight.name}")
        return self._add(HeadNorm(q_weight, k_weight, eps, attention, self._in_place(value, name)))

    def rope(self, qkv: Handle, rope: int, attention: AttentionSpec) -> Handle:
        name = f"rope of layer {attention.layer}"
        value = self._use_qkv(qkv, attention, name)
        if not 0 <= rope < len(self._ropes):
            raise ValueError(f"{name}: there is no rope table {rope}")
        if 2 * self._ropes[rope][0].shape[1] > attention.head_dim:
            raise ValueError(f"{name}: rope table {rope} rotates more than the head's {attention.head_dim} dimensions")
        return self._add(Rotate(rope, attention, self._in_place(value, name)))

    def attend(self, qkv: Handle, attention: AttentionSpec) -> Handle:
        value = self._use_qkv(qkv, attention, f"attend of layer {attention.layer}")
        out = self._new(attention.num_heads * attention.head_dim, logits=False)
        return self._add(Attend(value, attention, out))

    def gated(self, gate_up: Handle, activation: Activation) -> Handle:
        value = self._use(gate_up, "gated")
        if value.width % 2:
            raise ValueError(f"gated: gate and up together are {value.width} wide, an odd number")
        if activation not in ("silu", "gelu_tanh"):
            raise ValueError(f"gated: unknown activation {activation!r}")
        return self._add(Gated(value, activation, self._new(value.width // 2, value.logits)))

    def add(self, x: Handle, y: Handle) -> Handle:
        first, second = self._use(x, "add"), self._use(y, "add")
        self._check_alike(first, second, "add")
        return self._add(Add(second, self._in_place(first, "add")))

    def gather_logit_rows(self, x: Handle) -> Handle:
        value = self._use(x, "gather_logit_rows")
        if value.logits:
            raise ValueError("gather_logit_rows: the rows were gathered already")
        return self._add(Gather(value, self._new(value.width, logits=True)))

    def hidden_states(self, x: Handle) -> None:
        value = self._use(x, "hidden_states")
        if not value.logits:
            raise ValueError("hidden_states: gather_logit_rows must come first")
        if any(isinstance(op, Hidden) for op in self.ops):
            raise ValueError("hidden_states: they are reported already")
        self._add(Hidden(value, value))

    def logits(self, x: Handle, weight: LinearWeight, softcap: float) -> Handle:
        value = self._use(x, "logits")
        if not value.logits:
            raise ValueError("logits: gather_logit_rows must come first")
        self._check_weight(value, weight)
        _check_width(weight.outputs, self._vocab_size, f"logits {weight.name}")
        return self._add(Logits(value, weight, softcap, self._new(weight.outputs, logits=True)))

    # -- values ----------------------------------------------------------------------------------------------------

    def _add(self, op: Op) -> Handle:
        if self.ops and isinstance(self.ops[-1], Logits):
            raise ValueError("logits must be the last op of a forward pass")
        self.ops.append(op)
        return Handle(op.out)

    def _new(self, width: int, logits: bool) -> Value:
        return self._own(Value(self._values, self._values, width, logits))

    def _in_place(self, old: Value, by: str) -> Value:
        self._overwritten_by[old.id] = by
        return self._own(Value(self._values, old.storage, old.width, old.logits))

    def _own(self, value: Value) -> Value:
        self._values += 1
        self._current[value.storage] = value
        return value

    def _use(self, handle: Handle, name: str) -> Value:
        if not isinstance(handle, Value) or handle.storage not in self._current:
            raise ValueError(f"{name}: {handle!r} is not a handle of this forward pass")
        if handle.id in self._overwritten_by:
            raise ValueError(f"{name}: this activation was overwritten in place by {self._overwritten_by[handle.id]}")
        return handle

    # -- checks ----------------------------------------------------------------------------------------------------

    def _use_qkv(self, handle: Handle, attention: AttentionSpec, name: str) -> Value:
        value = self._use(handle, name)
        if value.logits:
            raise ValueError(f"{name}: attention is over all tokens, not over gathered rows")
        self._check_attention(attention, name)
        _check_width(value.width, (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim, name)
        return value

    def _check_attention(self, a: AttentionSpec, name: str) -> None:
        kv = self._kv
        if a.head_dim % 16 or not 16 <= a.head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"{name}: head_dim {a.head_dim} is not a multiple of 16 up to {MAX_HEAD_DIM}")
        if (a.num_kv_heads, a.head_dim) != (kv.num_kv_heads, kv.head_dim):
            raise ValueError(f"{name}: {a.num_kv_heads} KV heads of {a.head_dim}, the cache has another shape")
        if a.num_heads % a.num_kv_heads:
            raise ValueError(f"{name}: {a.num_heads} heads are not a multiple of {a.num_kv_heads} KV heads")
        if not 0 <= a.group < len(kv.groups) or not 0 <= a.slot < len(kv.groups[a.group].layers):
            raise ValueError(f"{name}: the cache has no group {a.group} with slot {a.slot}")
        if kv.groups[a.group].window != a.window:
            raise ValueError(f"{name}: window {a.window} in a group of window {kv.groups[a.group].window}")

    def _check_weight(self, value: Value, weight: LinearWeight) -> None:
        _check_width(value.width, weight.inputs, f"linear {weight.name}")
        if weight.bias is not None:
            _check_width(len(weight.bias), weight.outputs, f"bias of {weight.name}")
        if any(segment.inputs != weight.inputs for segment in weight.segments):
            raise ValueError(f"linear {weight.name}: its segments have different inputs")
        if any(segment.outputs % 32 for segment in weight.segments[:-1]):
            raise ValueError(f"linear {weight.name}: a segment before the last has a number of outputs that 32 does not divide")

    def _check_alike(self, x: Value, y: Value, name: str) -> None:
        _check_width(x.width, y.width, name)
        if x.logits != y.logits:
            raise ValueError(f"{name}: one operand has the step's tokens as rows, the other its logit rows")


def _check_width(width: int, expected: int, name: str) -> None:
    if width != expected:
        raise ValueError(f"{name}: {width} values where {expected} are expected")
