"""The forward passes of `noria bench kernels`, one a kernel, and their points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from noria.backends.base import BLOCK_SIZE, AttentionSpec, Handle, KVCacheSpec, Ops
from noria.bench.kernels import Point
from noria.bench.limits import UNIT_OF_KIND
from noria.bench.micro import (
    COLD_BYTES,
    MOST_COPIES,
    SMALL_VOCAB,
    Measured,
    Rig,
    aligned,
    linear,
    no_cache,
    random_matrix,
    vector,
)
from noria.config import EngineConfig
from noria.models import rope
from noria.models.decoder import attention_specs
from noria.models.spec import LayerGroup, ModelSpec
from noria.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
NARROW = 16  # width of what only feeds the op under test
CHAIN = 16  # row-local ops that run one after the other
MOST_KV_BYTES = 256 << 20


@dataclass(frozen=True)
class Machine:
    """What the kernels run on."""

    threads: int
    tier: str


def _head(ops: Ops, x: Handle, width: int, rng: np.random.Generator) -> Handle:
    """What every forward pass has to end with; no logit row is asked for, so it costs nothing."""
    return ops.logits(ops.gather_logit_rows(x), linear("head", random_matrix(SMALL_VOCAB, width, "f32", rng)), 0.0)


def _point(kernel: str, unit: str, m: Measured, copies: int, *, cached: bool = False) -> Point:
    return Point(kernel, unit, cached, m.seconds / copies, m.operations / copies, m.nbytes / copies)


def linear_points(machine: Machine, name: str, outputs: int, inputs: int, kind: str, rows: Sequence[int]) -> Iterator[Point]:
    """y = x W^T at each number of rows, over copies of W that no cache holds together."""
    if kind in ("q4", "q8") and inputs % 32:
        return  # such a matrix has no blocks: the loader gives it another format
    rng = np.random.default_rng(0)
    first = random_matrix(outputs, inputs, kind, rng)
    copies = min(MOST_COPIES, -(-COLD_BYTES // first.data.nbytes))
    weights = [linear(f"w{i}", first if i == 0 else aligned(first)) for i in range(copies)]
    embedding, head = random_matrix(SMALL_VOCAB, inputs, "f32", rng), random_matrix(SMALL_VOCAB, inputs, "f32", rng)

    def forward(ops: Ops) -> Handle:
        x = ops.embed(linear("embed", embedding), 1.0)
        for weight in weights:
            ops.linear(x, weight)
        return ops.logits(ops.gather_logit_rows(x), linear("head", head), 0.0)

    most = max(rows)
    rig = Rig(
        forward,
        threads=machine.threads,
        tier=machine.tier,
        kv=no_cache(1, most),
        max_rows=1,
        max_tokens=most,
    )
    try:
        rig.fill(1, most, GREEDY)
        for count in rows:
            found = rig.measure(rig.inputs([(0, 0, count)]), "linear", "linear")
            yield _point(f"linear {name} {outputs}x{inputs} {kind} x{count}", UNIT_OF_KIND[kind], found, copies)
    finally:
        rig.close()


def attention_points(
    machine: Machine, spec: ModelSpec, config: EngineConfig, rows: Sequence[int], context: int
) -> Iterator[Point]:
    """Decode: a query of each sequence over `context` keys, its own or shared. Prefill: chunks at 0 and behind `context`."""
    kinds = {layer.window: layer for layer in reversed(attention_specs(spec))}
    for window, attention in sorted(kinds.items()):
        name = f"attention {'window ' + str(window) if window else 'full'}"
        for count in [r for r in rows if r <= 64]:
            decode = [(row, context - 1, 1) for row in range(count)]
            yield from _attention(machine, name, attention, config, count, context, decode)
            if count > 1:
                yield from _attention(machine, f"{name} shared", attention, config, count, context, decode, shared=True)
        for count in [r for r in rows if r > 64]:
            yield from _attention(machine, f"{name} prefill at 0", attention, config, count, count, [(0, 0, count)])
            last = context + count
            yield from _attention(
                machine, f"{name} prefill at {context}", attention, config, count, last, [(0, context, count)]
            )


def _attention(
    machine: Machine,
    name: str,
    attention: AttentionSpec,
    config: EngineConfig,
    count: int,
    length: int,
    chunks: list[tuple[int, int, int]],
    *,
    shared: bool = False,
) -> Iterator[Point]:
    """One point. `shared`: the rows' keys are the same blocks, but for the last; they count as read once."""
    sequences, per_row = len(chunks), -(-length // BLOCK_SIZE)
    block_bytes = 4 * attention.num_kv_heads * BLOCK_SIZE * attention.head_dim
    cold = -(-COLD_BYTES // (sequences * per_row * block_bytes))
    layers = max(1, min(MOST_COPIES, cold, MOST_KV_BYTES // (sequences * per_row * block_bytes)))
    kv = KVCacheSpec(
        groups=(LayerGroup(window=attention.window, layers=tuple(range(layers))),),
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        dtype="bf16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        num_blocks=sequences * per_row + 1,
        max_blocks_per_row=per_row,
    )
    rng = np.random.default_rng(0)
    width = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    embedding = linear("embed", random_matrix(SMALL_VOCAB, NARROW, "f32", rng))
    project = linear("qkv", random_matrix(width, NARROW, "f32", rng))
    own = [_at(attention, slot) for slot in range(layers)]

    def forward(ops: Ops) -> Handle:
        x = ops.embed(embedding, 1.0)
        for layer in own:
            ops.attend(ops.linear(x, project), layer)
        return _head(ops, x, NARROW, rng)

    tokens = sum(c for _, _, c in chunks)
    rig = Rig(
        forward,
        threads=machine.threads,
        tier=machine.tier,
        kv=kv,
        max_rows=sequences,
        max_tokens=max(tokens, BLOCK_SIZE),
    )
    try:
        rig.fill(sequences, length, GREEDY, shared=shared)
        rig.executable.run(rig.inputs([(0, 0, min(BLOCK_SIZE, length))]))  # real keys and values in one block, and so in all
        rig.backend.copy_blocks([(1, block) for block in range(2, kv.num_blocks)])
        unit = {"bf16": "bf16", "f32": "f32", "int8": "u8s8"}[kv.dtype]
        found = rig.measure(rig.inputs(chunks), "attention", "attend")
        if shared:
            found = replace(found, nbytes=found.nbytes / sequences)
        yield _point(f"{name} x{count}", unit, found, layers)
    finally:
        rig.close()


def _at(attention: AttentionSpec, slot: int) -> AttentionSpec:
    """The same attention in another slot of the one group."""
    return AttentionSpec(
        layer=slot,
        group=0,
        slot=slot,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        scale=attention.scale,
        window=attention.window,
        softcap=attention.softcap,
    )


def row_points(machine: Machine, spec: ModelSpec, rows: Sequence[int]) -> Iterator[Point]:
    """Norm with residual, rope, and the gated activation: chains of each, which the backend runs as one op over rows."""
    rng = np.random.default_rng(0)
    hidden, attention = spec.hidden_size, _at(attention_specs(spec)[0], 0)
    width = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim

    def norms(ops: Ops) -> Handle:
        x = ops.embed(linear("embed", wide), 1.0)
        normed, residual = ops.rms_norm(x, vector(hidden), 1e-5)
        for _ in range(CHAIN):
            normed, residual = ops.rms_norm(normed, vector(hidden), 1e-5, residual)
        return _head(ops, normed, hidden, rng)

    def ropes(ops: Ops) -> Handle:
        x = ops.embed(linear("embed", heads), 1.0)
        for _ in range(CHAIN):
            x = ops.rope(x, 0, attention)
        return _head(ops, x, width, rng)

    def gates(ops: Ops) -> Handle:
        x = ops.embed(linear("embed", gate_up), 1.0)
        outs = [ops.gated(x, spec.activation) for _ in range(CHAIN)]
        return _head(ops, outs[-1], spec.intermediate_size, rng)

    wide, heads, gate_up = (random_matrix(SMALL_VOCAB, w, "f32", rng) for w in (hidden, width, 2 * spec.intermediate_size))
    most = max(rows)
    kv = KVCacheSpec(
        groups=(LayerGroup(window=attention.window, layers=(0,)),),
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        dtype="bf16",
        num_blocks=-(-most // BLOCK_SIZE) + 1,
        max_blocks_per_row=-(-most // BLOCK_SIZE),
    )
    tables = [rope.tables(r, -(-most // BLOCK_SIZE) * BLOCK_SIZE) for r in spec.ropes]
    for name, forward, cost in (("rms_norm", norms, "rms_norm"), ("rope", ropes, "rope"), ("gated", gates, "gated")):
        rig = Rig(forward, threads=machine.threads, tier=machine.tier, kv=kv, max_rows=1, max_tokens=most, ropes=tables)
        try:
            rig.fill(1, most, GREEDY)
            for count in rows:
                found = rig.measure(rig.inputs([(0, 0, count)]), "rows", cost)
                yield _point(f"{name} x{count}", "f32", found, CHAIN, cached=True)
        finally:
            rig.close()


def sampling_points(machine: Machine, spec: ModelSpec, rows: Sequence[int]) -> Iterator[Point]:
    """Draws from the vocabulary's logits: greedy, by temperature, and with top-k and top-p."""
    rng = np.random.default_rng(0)
    vocab = spec.vocab_size
    embedding, head = random_matrix(vocab, NARROW, "f32", rng), random_matrix(vocab, NARROW, "f32", rng)

    def forward(ops: Ops) -> Handle:
        x = ops.embed(linear("embed", embedding), 1.0)
        return ops.logits(ops.gather_logit_rows(x), linear("head", head), 0.0)

    kinds = {
        "greedy": GREEDY,
        "temperature": SamplingParams(temperature=1.0),
        "top-k and top-p": SamplingParams(temperature=1.0, top_k=50, top_p=0.9),
    }
    most = max(rows)
    for name, params in kinds.items():
        rig = Rig(
            forward,
            threads=machine.threads,
            tier=machine.tier,
            kv=no_cache(most, 1),
            max_rows=most,
            max_tokens=most,
            vocab_size=vocab,
        )
        try:
            rig.fill(most, 1, params)
            for count in rows:
                found = rig.measure(rig.inputs([(row, 0, 1) for row in range(count)], samples=True), "draw", "", last=True)
                read = Measured(found.seconds, 0.0, 4.0 * vocab * count)
                yield _point(f"draw {name} x{count}", "f32", read, 1, cached=True)
        finally:
            rig.close()
