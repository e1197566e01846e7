"""Builds step inputs and small tapes by hand, for the tests of single kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from noria.backends.base import BLOCK_SIZE, Drawn, Draws, StepInputs
from noria.backends.cpu import _native
from noria.backends.cpu.memory import address, anonymous

F32 = npt.NDArray[np.float32]

TIERS = _native.available_tiers()
BEST = TIERS[-1]


def draws(rows: Sequence[dict[str, Any]]) -> Draws:
    """`Draws` from one dictionary a draw; what it does not name has the value that changes nothing."""

    def column(name: str, kind: type[np.generic], default: float) -> npt.NDArray[Any]:
        return np.array([row.get(name, default) for row in rows], kind)

    def offsets(name: str) -> npt.NDArray[np.int64]:
        return np.cumsum([0] + [len(row.get(name, ())) for row in rows], dtype=np.int64)

    def joined(name: str, part: int | None, kind: type[np.generic]) -> npt.NDArray[Any]:
        entries = [e for row in rows for e in row.get(name, ())]
        return np.array(entries if part is None else [e[part] for e in entries], kind)

    return Draws(
        logit_row=column("logit_row", np.int32, 0),
        temperature=column("temperature", np.float32, 0.0),
        top_k=column("top_k", np.int32, 0),
        top_p=column("top_p", np.float32, 1.0),
        min_p=column("min_p", np.float32, 0.0),
        seed=column("seed", np.uint64, 0),
        position=column("position", np.int64, 0),
        stream=column("stream", np.int32, 0),
        target=column("target", np.int32, -1),
        num_top=column("num_top", np.int32, -1),
        repetition=column("repetition", np.float32, 1.0),
        presence=column("presence", np.float32, 0.0),
        frequency=column("frequency", np.float32, 0.0),
        history_offsets=offsets("history"),
        history_tokens=joined("history", 0, np.int32),
        history_counts=joined("history", 1, np.int32),
        bias_offsets=offsets("bias"),
        bias_tokens=joined("bias", 0, np.int32),
        bias_values=joined("bias", 1, np.float32),
        ban_offsets=offsets("bans"),
        ban_tokens=joined("bans", None, np.int32),
    )


@dataclass(frozen=True)
class Row:
    """`count` tokens of one sequence from position `start` on; its blocks stand in row `slot` of the block table."""

    slot: int
    start: int
    count: int


def inputs(
    rows: Sequence[Row],
    tables: Sequence[npt.NDArray[np.int32]],
    logit_rows: Sequence[int] = (),
    drawn: Sequence[dict[str, Any]] = (),
    tokens: npt.NDArray[np.int32] | None = None,
) -> StepInputs:
    total = sum(row.count for row in rows)
    positions = [np.arange(row.start, row.start + row.count, dtype=np.int32) for row in rows]
    return StepInputs(
        tokens=np.zeros(total, np.int32) if tokens is None else tokens,
        positions=np.concatenate([np.zeros(0, np.int32), *positions]),
        row_offsets=np.cumsum([0] + [row.count for row in rows], dtype=np.int32),
        row_slots=np.array([row.slot for row in rows], np.int32),
        block_tables=tuple(tables),
        logit_rows=np.array(logit_rows, np.int32),
        draws=draws(drawn),
    )


def results(count: int, width: int = 0) -> Drawn:
    return Drawn(
        token=np.empty(count, np.int32),
        logprob=np.empty(count, np.float32),
        top_tokens=np.empty((count, width), np.int32),
        top_logprobs=np.empty((count, width), np.float32),
    )


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    window: int = 0
    softcap: float = 0.0
    kv: Literal["bf16", "f32", "int8"] = "bf16"

    @property
    def scale(self) -> float:
        return float(np.float32(self.dim**-0.5))

    @property
    def stride(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim


@dataclass
class AttentionRig:
    """A paged cache of one layer, and a tape that writes K and V and attends. Sequences are numbered by table row."""

    shape: Shape
    tier: str = BEST
    threads: int = 1
    max_len: int = 640
    sequences: int = 1
    seed: int = 0  # of the blocks' order
    poison: int | None = None  # the pattern that the cache's memory holds before it is written
    max_tokens: int = 1024
    forms: tuple[int, int] | None = None  # addresses for the output's quantised and bf16 forms; `finish` is the caller's then
    _kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        s = self.shape
        per_row = -(-self.max_len // BLOCK_SIZE)
        blocks = 1 + per_row * self.sequences
        block_bytes = 2 * s.kv_heads * BLOCK_SIZE * {"bf16": 2 * s.dim, "f32": 4 * s.dim, "int8": s.dim + 4}[s.kv]
        memory = anonymous(-(-blocks // 16) * 16 * block_bytes)  # whole shelves
        if self.poison is not None:
            memory.view(np.uint32)[:] = self.poison
        order = np.random.default_rng(self.seed).permutation(blocks - 1) + 1
        self.table = order.astype(np.int32).reshape(self.sequences, per_row)
        self.qkv = np.zeros((self.max_tokens, s.stride), np.float32)
        self.out = np.zeros((self.max_tokens, s.heads * s.dim), np.float32)
        self.tape = _native.Tape(
            pool=_native.Pool(self.threads),
            tier=self.tier,
            max_tokens=self.max_tokens,
            max_rows=64,
            table_width=per_row,
            num_blocks=blocks,
            max_positions=self.max_len,
            vocab=16,
            windows=[s.window],
        )
        cache: dict[str, Any] = {
            "cache": address(memory),
            "block_bytes": block_bytes,
            "slot": 0,
            "group": 0,
            "kv_heads": s.kv_heads,
            "dim": s.dim,
            "type": s.kv,
        }
        qkv = address(self.qkv)
        self.tape.begin_rows(logits=False)
        self.tape.write_kv(qkv=qkv, stride=s.stride, heads=s.heads, **cache)
        self.tape.attention(
            qkv=qkv,
            stride=s.stride,
            out=address(self.out),
            heads=s.heads,
            scale=s.scale,
            softcap=s.softcap,
            window=s.window,
            quantized=self.forms[0] if self.forms else 0,
            rows=self.max_tokens,
            pairs=self.forms[1] if self.forms else 0,
            **cache,
        )
        if self.forms is None:
            self.tape.finish()
        self._kept.append(memory)

    def step(self, rows: Sequence[Row], qkv: Sequence[F32]) -> list[F32]:
        """One step; qkv and outputs by row."""
        total = sum(row.count for row in rows)
        self.qkv[:total] = np.concatenate(qkv)
        self.tape.run(inputs(rows, [self.table]), results(0), 0)
        return np.split(self.out[:total].copy(), np.cumsum([row.count for row in rows])[:-1])

    def sequence(self, qkv: F32, chunks: Sequence[int], slot: int = 0) -> F32:
        """All outputs of one sequence alone, in chunks of the given sizes (the last one repeats)."""
        parts, start, sizes = [], 0, list(chunks)
        while start < len(qkv):
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            size = min(size, len(qkv) - start)
            parts += self.step([Row(slot, start, size)], [qkv[start : start + size]])
            start += size
        return np.concatenate(parts)


def random_qkv(shape: Shape, length: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal((length, shape.stride)).astype(np.float32)


def same_bits(a: F32, b: F32) -> bool:
    return a.shape == b.shape and bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))
