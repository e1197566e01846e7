"""From recorded ops to a native tape.

    recorded   linear  rope  attend      linear  norm         linear  gated        linear  ...  logits
    tape       linear  rows: attention   linear  rows:        linear  rows:        linear  ...  ( linear  draw ) x tiles
                       rope                      norm                 gated
                       write k v                 to codes             to codes

Row-local ops that follow each other become one op of the tape (native/rows_args.h): fewer barriers, and rows stay in the cache.
An activation is converted once, by its producer, to each form that the linears after it read: int8 groups or bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from noria.backends.base import AttentionSpec
from noria.backends.cpu import _native
from noria.backends.cpu.arena import Arena, Buffer
from noria.backends.cpu.kv import KVCache
from noria.backends.cpu.memory import address
from noria.backends.cpu.recorder import (
    Add,
    Attend,
    Embed,
    Gated,
    Gather,
    HeadNorm,
    Hidden,
    Linear,
    Logits,
    Norm,
    Op,
    Rope,
    Rotate,
    Value,
)
from noria.weights.formats import LinearWeight, PackedMatrix, VectorWeight, matrix_bytes

Form = Literal["f32", "bf16", "quantized"]
FORM_OF: dict[str, Form] = {"f32": "f32", "bf16": "bf16", "q8": "quantized", "q4": "quantized"}

Emit = Callable[[_native.Tape], None]
NOWHERE = Buffer(0, 0, 0)  # stands for an operand that is not there: address 0

LOGITS_BYTES = 16 << 20  # of a tile of logit rows
LEAST_LOGIT_ROWS = 8


def logit_rows_a_tile(vocab_size: int, max_tokens: int) -> int:
    return min(max(LOGITS_BYTES // (4 * vocab_size), LEAST_LOGIT_ROWS), max_tokens)


class Compiler:
    """Two passes: the first notes what to emit and which buffers each tape op uses, the second emits with their addresses."""

    def __init__(self, ops: Sequence[Op], ropes: Sequence[Rope], cache: KVCache, max_tokens: int) -> None:
        self.kept: list[npt.NDArray[Any]] = [cache.memory]  # arrays whose addresses are in the tape
        self.arena = Arena()
        self._cache = cache
        self._max_tokens = max_tokens
        self._ropes = [(self._keep(cos), self._keep(sin)) for cos, sin in ropes]
        self._forms = _forms_read(ops)
        self._operands = _operands(ops)
        self._emits: list[Emit] = []
        self._tape_op = -1  # index of the tape op that is being noted
        self._open_rows: bool | None = None  # its domain, if it is a rows op that more stages may join
        self._storage: dict[int, Buffer] = {}
        self._converted: dict[tuple[int, Form], Buffer] = {}
        for op in ops:
            self._note(op)
        self.arena.allocate()

    def emit(self, tape: _native.Tape) -> None:
        for emit in self._emits:
            emit(tape)
        tape.finish()

    # -- tape ops, buffers, forms ------------------------------------------------------------------------------------

    def _begin(self, emit: Emit) -> None:
        """A tape op of its own."""
        self._open_rows = None
        self._tape_op += 1
        self._emits.append(emit)

    def _rows(self, logits: bool) -> None:
        """Go on with the rows op at hand, or begin one: what is noted next are its stages."""
        if self._open_rows != logits:
            self._begin(lambda tape: tape.begin_rows(logits))
            self._open_rows = logits

    def _make(self, value: Value) -> Buffer:
        """Storage for a value that the tape op at hand writes."""
        buffer = self._storage[value.storage] = self.arena.buffer(4 * value.width * self._max_tokens, self._tape_op)
        return buffer

    def _at(self, value: Value) -> Buffer:
        """The storage of a value that the tape op at hand uses."""
        buffer = self._storage[value.storage]
        buffer.last = self._tape_op
        return buffer

    def _make_form(self, value: Value, form: Form) -> Buffer:
        if form == "quantized":
            nbytes = _native.quantized_bytes(self._max_tokens, value.width)
        else:
            nbytes = 2 * self._max_tokens * (value.width + value.width % 2)
        buffer = self._converted[value.id, form] = self.arena.buffer(nbytes, self._tape_op)
        return buffer

    def _form_at(self, value: Value, form: Form) -> Buffer:
        """A form that the tape op at hand reads: made by now, or not wanted by any linear (then its address stays 0)."""
        buffer = self._converted.get((value.id, form))
        if buffer is None:
            return NOWHERE
        buffer.last = self._tape_op
        return buffer

    def _convert(self, value: Value) -> None:
        """Stages that bring a value to the forms that linears read, as far as its producer has not done it."""
        for form in sorted(self._forms.get(value.id, set()) - {"f32"}):
            if (value.id, form) not in self._converted:
                self._rows(value.logits)
                stage = _quantize if form == "quantized" else _round
                self._emits.append(stage(self._at(value), value.width, self._make_form(value, form), self._max_tokens))

    def _keep(self, array: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        kept = np.ascontiguousarray(array, np.float32)
        self.kept.append(kept)
        return kept

    def _vector(self, weight: VectorWeight) -> int:
        return address(self._keep(weight.data))

    # -- one recorded op ---------------------------------------------------------------------------------------------

    def _note(self, op: Op) -> None:
        match op:
            case Embed():
                self._note_embed(op)
            case Linear():
                self._begin_linear(op.x, op.weight, self._max_tokens, op.out)
                self._convert(op.out)
            case Norm():
                self._note_norm(op)
            case HeadNorm():
                self._note_head_norm(op)
            case Rotate():
                self._note_rope(op)
            case Attend():
                self._note_attend(op)
            case Gated():
                self._note_gated(op)
            case Add():
                self._note_add(op)
            case Gather():
                self._note_gather(op)
            case Hidden():
                self._note_hidden(op)
            case Logits():
                self._note_logits(op)

    def _note_embed(self, op: Embed) -> None:
        self._rows(False)
        matrix, out = self._matrix(op.weight.name, op.weight.segments[0]), self._make(op.out)
        self._emits.append(lambda tape: tape.embed(**matrix, scale=op.scale, y=out.address))
        self._convert(op.out)

    def _begin_linear(self, x: Value, weight: LinearWeight, rows: int, out: Value) -> None:
        """A linear op whose output has room for `rows` rows."""
        segments = [self._matrix(weight.name, segment) for segment in weight.segments]
        columns = np.cumsum([0, *(segment.outputs for segment in weight.segments)]).tolist()
        bias = 0 if weight.bias is None else address(self._keep(weight.bias))
        room = self._max_tokens

        def emit(tape: _native.Tape) -> None:
            tape.begin_linear(
                logits=x.logits,
                inputs=x.width,
                x=f32.address,
                pairs=pairs.address,
                quantized=quantized.address,
                quantized_rows=room,
                bias=bias,
                y=y.address,
                outputs=out.width,
            )
            for segment, column in zip(segments, columns[:-1], strict=True):
                tape.segment(**segment, first_column=column)

        self._begin(emit)
        f32 = self._at(x) if "f32" in self._forms[x.id] else NOWHERE
        pairs, quantized = self._form_at(x, "bf16"), self._form_at(x, "quantized")
        y = self._storage[out.storage] = self.arena.buffer(4 * out.width * rows, self._tape_op)

    def _note_norm(self, op: Norm) -> None:
        self._rows(op.out.logits)
        x = self._at(op.x)
        residual = NOWHERE if op.residual is None else self._at(op.total)
        weight, out = self._vector(op.weight), self._make(op.out)
        self._emits.append(
            lambda tape: tape.norm(
                x=x.address,
                residual=residual.address,
                weight=weight,
                normed=out.address,
                width=op.out.width,
                eps=op.eps,
            )
        )
        self._convert(op.out)
        self._convert(op.total)

    def _note_head_norm(self, op: HeadNorm) -> None:
        self._rows(False)
        qkv, q_weight, k_weight = self._at(op.out), self._vector(op.q_weight), self._vector(op.k_weight)
        self._emits.append(
            lambda tape: tape.head_norm(
                qkv=qkv.address,
                stride=op.out.width,
                q_weight=q_weight,
                k_weight=k_weight,
                eps=op.eps,
                **_heads(op.attention),
            )
        )

    def _note_rope(self, op: Rotate) -> None:
        self._rows(False)
        qkv, (cosines, sines) = self._at(op.out), self._ropes[op.rope]
        self._emits.append(
            lambda tape: tape.rope(
                qkv=qkv.address,
                stride=op.out.width,
                cosines=address(cosines),
                sines=address(sines),
                half=cosines.shape[1],
                **_heads(op.attention),
            )
        )

    def _note_attend(self, op: Attend) -> None:
        a, stride = op.attention, op.qkv.width
        cache = self._cache_of(a)
        self._rows(False)
        qkv = self._at(op.qkv)
        self._emits.append(lambda tape: tape.write_kv(qkv=qkv.address, stride=stride, heads=a.num_heads, **cache))

        def emit(tape: _native.Tape) -> None:
            tape.attention(
                qkv=qkv.address,
                stride=stride,
                out=out.address,
                heads=a.num_heads,
                scale=a.scale,
                softcap=a.softcap,
                window=a.window,
                quantized=quantized.address,
                rows=self._max_tokens,
                pairs=pairs.address,
                **cache,
            )

        self._begin(emit)
        self._at(op.qkv)
        out = self._make(op.out)
        wanted = self._forms.get(op.out.id, set())
        whole_groups = a.num_heads // a.num_kv_heads * a.head_dim % 32 == 0  # a tile's output: the heads of one KV head
        quantized = self._make_form(op.out, "quantized") if "quantized" in wanted and whole_groups else NOWHERE
        pairs = self._make_form(op.out, "bf16") if "bf16" in wanted else NOWHERE
        self._convert(op.out)

    def _note_gated(self, op: Gated) -> None:
        self._rows(op.out.logits)
        x = self._at(op.x)
        only_codes = self._forms.get(op.out.id) == {"quantized"} and op.out.storage not in self._operands
        out = NOWHERE if only_codes else self._make(op.out)
        codes = self._make_form(op.out, "quantized") if only_codes else NOWHERE
        gelu, room = op.activation == "gelu_tanh", self._max_tokens
        self._emits.append(
            lambda tape: tape.gated(
                gate_up=x.address, y=out.address, width=op.out.width, gelu=gelu, workspace=codes.address, rows=room
            )
        )
        self._convert(op.out)

    def _note_add(self, op: Add) -> None:
        self._rows(op.out.logits)
        x, y = self._at(op.out), self._at(op.y)
        self._emits.append(lambda tape: tape.add(x=x.address, y=y.address, width=op.out.width))
        self._convert(op.out)

    def _note_gather(self, op: Gather) -> None:
        self._rows(True)
        x, out = self._at(op.x), self._make(op.out)
        self._emits.append(lambda tape: tape.gather(x=x.address, y=out.address, width=op.out.width))
        self._convert(op.out)

    def _note_hidden(self, op: Hidden) -> None:
        self._rows(True)
        x = self._at(op.x)
        self._emits.append(lambda tape: tape.hidden(x=x.address, width=op.x.width))

    def _note_logits(self, op: Logits) -> None:
        rows = logit_rows_a_tile(op.out.width, self._max_tokens)
        self._emits.append(lambda tape: tape.begin_logits(rows))
        self._begin_linear(op.x, op.weight, rows, op.out)
        if op.softcap > 0.0:
            self._rows(True)
            capped = self._at(op.out)
            self._emits.append(lambda tape: tape.softcap(x=capped.address, width=op.out.width, cap=op.softcap))
        self._begin(lambda tape: tape.draw(logits.address))
        logits = self._at(op.out)

    # -- weights and cache -------------------------------------------------------------------------------------------

    def _matrix(self, name: str, matrix: PackedMatrix) -> dict[str, Any]:
        expected = matrix_bytes(matrix.format, matrix.outputs, matrix.inputs)
        data = matrix.data
        if data.dtype != np.uint8 or data.size != expected or not data.flags.c_contiguous or address(data) % 64:
            raise ValueError(f"{name}: packed data must be {expected} contiguous bytes, 64-byte aligned")
        self.kept.append(data)
        return {
            "data": address(data),
            "kind": matrix.format.kind,
            "group": matrix.format.group,
            "half_scales": matrix.format.scale == "f16",
            "has_minimum": matrix.format.has_minimum,
            "outputs": matrix.outputs,
            "inputs": matrix.inputs,
        }

    def _cache_of(self, a: AttentionSpec) -> dict[str, Any]:
        spec = self._cache.spec
        return {
            "cache": address(self._cache.memory),
            "block_bytes": spec.block_bytes,
            "slot": a.slot,
            "group": a.group,
            "kv_heads": a.num_kv_heads,
            "dim": a.head_dim,
            "type": spec.dtype,
        }


def _heads(a: AttentionSpec) -> dict[str, int]:
    return {"heads": a.num_heads, "kv_heads": a.num_kv_heads, "dim": a.head_dim}


def _quantize(x: Buffer, width: int, out: Buffer, rows: int) -> Emit:
    return lambda tape: tape.quantize(x=x.address, width=width, workspace=out.address, rows=rows)


def _round(x: Buffer, width: int, out: Buffer, rows: int) -> Emit:
    return lambda tape: tape.round_bf16(x=x.address, width=width, pairs=out.address)


def _operands(ops: Sequence[Op]) -> set[int]:
    """The storages that ops other than linears read: those have to be there as floats."""
    storages: set[int] = set()
    for op in ops:
        if not isinstance(op, Linear | Logits):
            values = (getattr(op, name, None) for name in ("x", "y", "residual", "total", "qkv"))
            storages.update(value.storage for value in values if isinstance(value, Value))
            if isinstance(op, Add | Rotate | HeadNorm):  # in place
                storages.add(op.out.storage)
    return storages


def _forms_read(ops: Sequence[Op]) -> dict[int, set[Form]]:
    """By value: the forms that the linears over it read."""
    forms: dict[int, set[Form]] = {}
    for op in ops:
        if isinstance(op, Linear | Logits):
            forms.setdefault(op.x.id, set()).update(FORM_OF[s.format.kind] for s in op.weight.segments)
    return forms
