"""The CPU backend as a whole: recording, compilation, a forward pass, the cache's blocks, threads."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from noria.backends.base import AttentionSpec, Draws, Handle, KVCacheSpec, KVType, Ops, StepInputs
from noria.backends.cpu import _native, topology
from noria.backends.cpu.arena import Arena
from noria.backends.cpu.backend import CpuBackend, CpuExecutable
from noria.backends.cpu.compiler import logit_rows_a_tile
from noria.models.spec import LayerGroup
from noria.types import ConfigError
from noria.weights.formats import LinearWeight, PackedMatrix, VectorWeight, WeightFormat, matrix_bytes

F32 = npt.NDArray[np.float32]

VOCAB, WIDTH, HEADS, KV_HEADS, DIM, INNER, LAYERS, MAX_LEN = 100, 64, 4, 2, 16, 96, 2, 128
EPS = 1e-5
POSITIONS = np.arange(MAX_LEN)[:, None] * 10000.0 ** (-np.arange(DIM // 2) / (DIM // 2))
ROPE = (np.cos(POSITIONS).astype(np.float32), np.sin(POSITIONS).astype(np.float32))


def f32_matrix(values: F32) -> PackedMatrix:
    """Packed panels [inputs][32] of float32, as weights/formats.py draws them."""
    outputs, inputs = values.shape
    fmt = WeightFormat(kind="f32")
    panels = -(-outputs // 32)
    padded = np.zeros((panels * 32, inputs), np.float32)
    padded[:outputs] = values
    room = np.zeros(matrix_bytes(fmt, outputs, inputs) + 64, np.uint8)
    start = -room.ctypes.data % 64
    data = room[start : start + matrix_bytes(fmt, outputs, inputs)]
    data.view(np.float32)[:] = padded.reshape(panels, 32, inputs).transpose(0, 2, 1).reshape(-1)
    return PackedMatrix(outputs, inputs, fmt, data)


class Weights:
    """A random Llama of two layers, as plain arrays and as packed weights."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        shapes = {"embed": (VOCAB, WIDTH), "head": (VOCAB, WIDTH)}
        vectors = {"norm": WIDTH}
        for i in range(LAYERS):
            shapes |= {
                f"{i}.q": (HEADS * DIM, WIDTH),
                f"{i}.k": (KV_HEADS * DIM, WIDTH),
                f"{i}.v": (KV_HEADS * DIM, WIDTH),
                f"{i}.o": (WIDTH, HEADS * DIM),
                f"{i}.gate": (INNER, WIDTH),
                f"{i}.up": (INNER, WIDTH),
                f"{i}.down": (WIDTH, INNER),
            }
            vectors |= {f"{i}.norm1": WIDTH, f"{i}.norm2": WIDTH}
        self.arrays: dict[str, F32] = {
            **{n: (rng.standard_normal(s) * s[1] ** -0.5).astype(np.float32) for n, s in shapes.items()},
            **{n: (1 + 0.1 * rng.standard_normal(s)).astype(np.float32) for n, s in vectors.items()},
            "0.bias": rng.standard_normal((HEADS + 2 * KV_HEADS) * DIM).astype(np.float32),
        }

    def linear(self, *names: str, bias: str | None = None) -> LinearWeight:
        segments = tuple(f32_matrix(self.arrays[name]) for name in names)
        return LinearWeight("|".join(names), segments, self.arrays[bias] if bias else None)

    def vector(self, name: str) -> VectorWeight:
        return VectorWeight(name, self.arrays[name])


def attention_of(layer: int) -> AttentionSpec:
    return AttentionSpec(
        layer=layer, group=0, slot=layer, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, scale=DIM**-0.5
    )


def forward_of(w: Weights) -> Callable[[Ops], Handle]:
    def forward(ops: Ops) -> Handle:
        hidden = ops.embed(w.linear("embed"), 1.0)
        x, residual = ops.rms_norm(hidden, w.vector("0.norm1"), EPS)
        for i in range(LAYERS):
            if i > 0:
                x, residual = ops.rms_norm(x, w.vector(f"{i}.norm1"), EPS, residual)
            qkv = ops.linear(x, w.linear(f"{i}.q", f"{i}.k", f"{i}.v", bias="0.bias" if i == 0 else None))
            x = ops.linear(ops.attend(ops.rope(qkv, 0, attention_of(i)), attention_of(i)), w.linear(f"{i}.o"))
            x, residual = ops.rms_norm(x, w.vector(f"{i}.norm2"), EPS, residual)
            x = ops.linear(ops.gated(ops.linear(x, w.linear(f"{i}.gate", f"{i}.up")), "silu"), w.linear(f"{i}.down"))
        total = ops.add(residual, x)
        x, _ = ops.rms_norm(ops.gather_logit_rows(total), w.vector("norm"), EPS)
        return ops.logits(x, w.linear("head"), 30.0)

    return forward


def numpy_logits(w: Weights, tokens: npt.NDArray[np.int32]) -> F32:
    """The same model in plain numpy, without a cache."""
    a, length = w.arrays, len(tokens)

    def norm(x: F32, weight: F32) -> F32:
        normed: F32 = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(EPS)) * weight
        return normed

    def turn(x: F32) -> F32:
        cos, sin = (t[:length, None] for t in ROPE)
        low, high = np.split(x, 2, axis=-1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    hidden = a["embed"][tokens]
    for i in range(LAYERS):
        x = norm(hidden, a[f"{i}.norm1"])
        qkv = x @ np.concatenate([a[f"{i}.q"], a[f"{i}.k"], a[f"{i}.v"]]).T + (a["0.bias"] if i == 0 else 0)
        q, k, v = np.split(qkv.reshape(length, -1, DIM), [HEADS, HEADS + KV_HEADS], axis=1)
        q, k = turn(q), np.repeat(turn(k), HEADS // KV_HEADS, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) * np.float32(DIM**-0.5)
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", weights, np.repeat(v, HEADS // KV_HEADS, axis=1)).reshape(length, -1)
        hidden = hidden + out @ a[f"{i}.o"].T
        x = norm(hidden, a[f"{i}.norm2"])
        gate, up = x @ a[f"{i}.gate"].T, x @ a[f"{i}.up"].T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ a[f"{i}.down"].T
    logits: F32 = (30 * np.tanh(norm(hidden, a["norm"]) @ a["head"].T / 30)).astype(np.float32)
    return logits


def kv_spec(dtype: KVType = "f32", **fields: Any) -> KVCacheSpec:
    settings: dict[str, Any] = {
        "groups": (LayerGroup(window=0, layers=(0, 1)),),
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "dtype": dtype,
        "num_blocks": 1 + 4 * MAX_LEN // 16,
        "max_blocks_per_row": MAX_LEN // 16,
    }
    return KVCacheSpec(**settings | fields)


def build(backend: CpuBackend, forward: Callable[[Ops], Handle], **kv: Any) -> CpuExecutable:
    return backend.build(forward, ropes=[ROPE], kv=kv_spec(**kv), max_tokens=MAX_LEN, max_rows=4, vocab_size=VOCAB)


def greedy(rows: int) -> Draws:
    zero, one = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    no_tokens, offsets = np.zeros(0, np.int32), np.zeros(rows + 1, np.int64)
    return Draws(
        logit_row=np.arange(rows, dtype=np.int32),
        temperature=zero,
        top_k=np.zeros(rows, np.int32),
        top_p=one,
        min_p=zero,
        seed=np.zeros(rows, np.uint64),
        position=np.zeros(rows, np.int64),
        stream=np.zeros(rows, np.int32),
        target=np.full(rows, -1, np.int32),
        num_top=np.full(rows, 2, np.int32),
        repetition=one,
        presence=zero,
        frequency=zero,
        history_offsets=offsets,
        history_tokens=no_tokens,
        history_counts=no_tokens,
        bias_offsets=offsets,
        bias_tokens=no_tokens,
        bias_values=np.zeros(0, np.float32),
        ban_offsets=offsets,
        ban_tokens=no_tokens,
    )


def step(tokens: npt.NDArray[np.int32], start: int, count: int, slot: int = 0, shift: int = 0) -> StepInputs:
    """Tokens [start, start + count) of a sequence whose blocks begin at 1 + 8 slot + shift; all its logits are wanted."""
    table = (np.arange(4 * 8, dtype=np.int32).reshape(4, 8) + shift) % 32 + 1
    return StepInputs(
        tokens=tokens[start : start + count],
        positions=np.arange(start, start + count, dtype=np.int32),
        row_offsets=np.array([0, count], np.int32),
        row_slots=np.array([slot], np.int32),
        block_tables=(table,),
        logit_rows=np.arange(count, dtype=np.int32),
        draws=greedy(count),
    )


TOKENS = np.random.default_rng(1).integers(0, VOCAB, MAX_LEN).astype(np.int32)


def test_a_forward_pass_equals_numpy() -> None:
    """Red when an op, a peephole or the sharing of buffers changes what a model computes."""
    w = Weights()
    logits = build(CpuBackend(threads=2), forward_of(w)).all_logits(step(TOKENS, 0, 100))
    assert np.allclose(logits, numpy_logits(w, TOKENS[:100]), atol=2e-5)


@pytest.mark.parametrize("dtype", ["bf16", "f32", "int8"])
def test_chunks_give_the_same_bits(dtype: KVType) -> None:
    """Red when an op's rows depend on how many there are: the whole prompt at once and in chunks are equal to the last bit."""
    w = Weights()
    whole = build(CpuBackend(threads=1), forward_of(w), dtype=dtype).all_logits(step(TOKENS, 0, 100))
    for tier in _native.available_tiers():
        for threads, sizes in ((1, [1]), (2, [7]), (3, [33])):
            executable = build(CpuBackend(threads=threads, tier=tier), forward_of(w), dtype=dtype)
            starts = range(0, 100, sizes[0])
            parts = [executable.all_logits(step(TOKENS, s, min(sizes[0], 100 - s), slot=2, shift=5)) for s in starts]
            assert np.array_equal(np.concatenate(parts).view(np.uint32), whole.view(np.uint32)), (tier, threads)


def test_run_draws_from_the_logits() -> None:
    """Red when `run` and `all_logits` see different logits (a soft cap on one side only, a tile off by one)."""
    executable = build(CpuBackend(threads=2), forward_of(Weights()))
    logits = executable.all_logits(step(TOKENS, 0, 90))
    drawn = executable.run(step(TOKENS, 0, 90))
    assert drawn.token.tolist() == logits.argmax(axis=1).tolist()
    assert drawn.top_tokens.shape == (90, 2)
    exact = logits.max(axis=1) - np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    assert np.allclose(drawn.logprob, exact, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "f32", "int8"])
def test_blocks_move_in_the_interchange_form(dtype: KVType) -> None:
    """Red when read_block does not undo the kernels' layout, write_block does not redo it, or copy_blocks misses a part."""
    w = Weights()
    backend = CpuBackend(threads=1)
    executable = build(backend, forward_of(w), dtype=dtype)
    expected = executable.all_logits(step(TOKENS, 0, 64))[48:]
    blocks = [backend.read_block(b) for b in (1, 2, 3)]
    assert blocks[0].nbytes == kv_spec(dtype=dtype).block_bytes

    keys = w.arrays["0.k"] @ _normed_embedding(w)[:16].T + w.arrays["0.bias"][HEADS * DIM : (HEADS + KV_HEADS) * DIM, None]
    low, high = np.split(keys.T.reshape(16, KV_HEADS, DIM), 2, axis=-1)
    cos, sin = (t[:16, None] for t in ROPE)
    turned = np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    heads = blocks[0].reshape(LAYERS, 2, KV_HEADS, -1)[0, 0]
    if dtype == "int8":
        codes, scales = heads[:, : 16 * DIM].view(np.int8), np.ascontiguousarray(heads[:, 16 * DIM :]).view(np.float32)
        values = codes.reshape(KV_HEADS, 16, DIM) * scales[..., None]
    else:
        found = heads.view(np.uint16 if dtype == "bf16" else np.uint32).reshape(KV_HEADS, 16, DIM)
        values = (found.astype(np.uint32) << (16 if dtype == "bf16" else 0)).view(np.float32)
    assert np.allclose(values, turned.transpose(1, 0, 2), atol={"bf16": 3e-2, "f32": 1e-5, "int8": 5e-2}[dtype])

    other = CpuBackend(threads=1)
    resumed = build(other, forward_of(w), dtype=dtype)
    for target, block in zip((10, 11, 12), blocks, strict=True):
        other.write_block(target, block)
        assert np.array_equal(other.read_block(target), block)
    other.copy_blocks([(10, 9), (11, 10), (12, 11)])
    result = resumed.all_logits(step(TOKENS, 48, 16, slot=1))
    assert np.array_equal(result.view(np.uint32), expected.view(np.uint32))
    for wrong in (-1, 1 + 4 * MAX_LEN // 16):
        with pytest.raises(ValueError, match="block"):
            backend.read_block(wrong)


def _normed_embedding(w: Weights) -> F32:
    x = w.arrays["embed"][TOKENS]
    result: F32 = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(EPS)) * w.arrays["0.norm1"]
    return result


def test_max_tokens_and_max_rows_are_limits() -> None:
    """Red when a larger step than the workspace was made for would write past it."""
    executable = CpuBackend(threads=1).build(
        forward_of(Weights()), ropes=[ROPE], kv=kv_spec(), max_tokens=32, max_rows=1, vocab_size=VOCAB
    )
    with pytest.raises(ValueError, match="more tokens"):
        executable.all_logits(step(TOKENS, 0, 33))
    assert executable.all_logits(step(TOKENS, 0, 32)).shape == (32, VOCAB)
    two = dataclasses.replace(
        step(TOKENS, 0, 2), row_offsets=np.array([0, 1, 2], np.int32), row_slots=np.array([0, 1], np.int32)
    )
    with pytest.raises(ValueError, match="more rows"):
        executable.all_logits(two)


def test_close_frees_and_ends() -> None:
    """Red when a closed backend keeps its cache or its executables."""
    backend = CpuBackend(threads=2)
    executable = build(backend, forward_of(Weights()))
    cache = weakref.ref(backend._kv)
    backend.close()
    backend.close()
    gc.collect()
    assert cache() is None
    with pytest.raises(ValueError, match="closed"):
        executable.all_logits(step(TOKENS, 0, 1))
    with pytest.raises(ValueError, match="closed"):
        build(backend, forward_of(Weights()))
    with pytest.raises(ValueError, match="no cache"):
        backend.read_block(1)


def test_an_unknown_tier_or_thread_count_is_a_config_error() -> None:
    """Red when a setting that cannot be honoured is replaced silently."""
    with pytest.raises(ConfigError, match=r"sse9.*generic"):
        CpuBackend(tier="sse9")
    with pytest.raises(ConfigError, match="threads"):
        CpuBackend(threads=-1)
    assert CpuBackend(threads=3, tier="generic").threads == 3


# -- recording --------------------------------------------------------------------------------------------------------------


def _reuse(ops: Ops, w: Weights) -> Handle:
    hidden = ops.embed(w.linear("embed"), 1.0)
    ops.add(hidden, hidden)
    return hidden


def _finish(ops: Ops, w: Weights, x: Handle) -> Handle:
    return ops.logits(ops.gather_logit_rows(x), w.linear("head"), 0.0)


BROKEN: dict[str, tuple[Callable[[Ops, Weights], Handle], str]] = {
    "overwritten": (lambda o, w: _finish(o, w, _reuse(o, w)), "overwritten in place by add"),
    "width": (lambda o, w: o.linear(o.embed(w.linear("embed"), 1.0), w.linear("0.down")), "64 values where 96"),
    "norm": (lambda o, w: o.rms_norm(o.embed(w.linear("embed"), 1.0), w.vector("0.bias"), EPS)[0], "64 values where 128"),
    "no-logits": (lambda o, w: o.embed(w.linear("embed"), 1.0), "must return what `logits` returned"),
    "not-gathered": (lambda o, w: o.logits(o.embed(w.linear("embed"), 1.0), w.linear("head"), 0.0), "gather_logit_rows"),
    "hidden-not-gathered": (
        lambda o, w: _finish(o, w, o.hidden_states(o.embed(w.linear("embed"), 1.0)) or o.embed(w.linear("embed"), 1.0)),
        "hidden_states: gather_logit_rows",
    ),
    "vocabulary": (
        lambda o, w: o.logits(o.gather_logit_rows(o.embed(w.linear("embed"), 1.0)), w.linear("0.q"), 0.0),
        "64 values where 100",
    ),
    "domains": (
        lambda o, w: o.add(o.gather_logit_rows(o.embed(w.linear("embed"), 1.0)), o.embed(w.linear("embed"), 1.0)),
        "logit rows",
    ),
    "rope-table": (
        lambda o, w: o.rope(o.linear(o.embed(w.linear("embed"), 1.0), w.linear("0.q", "0.k", "0.v")), 1, attention_of(0)),
        "no rope table 1",
    ),
    "slot": (
        lambda o, w: o.attend(o.linear(o.embed(w.linear("embed"), 1.0), w.linear("0.q", "0.k", "0.v")), attention_of(2)),
        "no group 0 with slot 2",
    ),
    "window": (
        lambda o, w: o.attend(
            o.linear(o.embed(w.linear("embed"), 1.0), w.linear("0.q", "0.k", "0.v")),
            dataclasses.replace(attention_of(0), window=5),
        ),
        "window 5",
    ),
    "foreign": (lambda o, w: o.gated(Handle("x"), "silu"), "not a handle"),
    "after-logits": (
        lambda o, w: (_finish(o, w, o.embed(w.linear("embed"), 1.0)), o.embed(w.linear("embed"), 1.0))[0],
        "last op",
    ),
    "segments": (lambda o, w: o.linear(o.embed(w.linear("embed"), 1.0), w.linear("head", "0.q")), "32 does not divide"),
}


@pytest.mark.parametrize(("forward", "message"), BROKEN.values(), ids=BROKEN)
def test_a_pass_whose_shapes_do_not_fit_is_refused(forward: Callable[[Ops, Weights], Handle], message: str) -> None:
    """Red when a model's mistake is found by a crash instead of by name when it is recorded."""
    w = Weights()
    with pytest.raises(ValueError, match=message):
        build(CpuBackend(threads=1), lambda ops: forward(ops, w))


@pytest.mark.parametrize("dim", [8, 24, 272])
def test_a_head_size_that_the_kernels_do_not_have_is_refused(dim: int) -> None:
    """Red when an unsupported head_dim would be computed wrongly."""
    a = dataclasses.replace(attention_of(0), head_dim=dim)
    qkv = VectorWeight("qkv", np.ones((HEADS + 2 * KV_HEADS) * dim, np.float32))
    values = np.zeros((VOCAB, len(qkv.data)), np.float32)

    def forward(ops: Ops) -> Handle:
        return ops.attend(ops.embed(LinearWeight("embed", (f32_matrix(values),)), 1.0), a)

    with pytest.raises(ValueError, match="multiple of 16"):
        build(CpuBackend(threads=1), forward, head_dim=dim)


def test_buffers_that_live_together_do_not_overlap() -> None:
    """Red when the arena gives one place to two buffers that an op uses at once; and it must share otherwise."""
    rng = np.random.default_rng(0)
    arena = Arena()
    buffers = []
    for op in range(60):
        buffer = arena.buffer(int(rng.integers(1, 5000)), op)
        buffer.last = op + int(rng.integers(0, 6))
        buffers.append(buffer)
    arena.allocate()
    for i, a in enumerate(buffers):
        assert a.address % 64 == 0
        for b in buffers[:i]:
            if a.first <= b.last and b.first <= a.last:
                assert a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
    assert arena.nbytes < sum(b.nbytes for b in buffers) / 3


def test_logits_exist_in_tiles_only() -> None:
    """Red when a large vocabulary times many rows would be allocated at once."""
    assert logit_rows_a_tile(49_152, 512) * 49_152 * 4 <= 16 << 20
    assert logit_rows_a_tile(262_144, 512) == 16
    assert logit_rows_a_tile(4_000_000, 512) == 8
    assert logit_rows_a_tile(100, 3) == 3


# -- threads ----------------------------------------------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_hyperthreads_share_a_core(tmp_path: Path) -> None:
    """Red when logical CPUs are counted instead of physical cores, or CPUs outside the affinity are."""
    for cpu in range(8):
        write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", str(cpu // 4 % 2))
        write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/core_id", str(cpu // 2))
    assert topology.physical_cores(range(8), tmp_path) == 4
    assert topology.physical_cores([0, 1], tmp_path) == 1
    assert topology.physical_cores([0, 2, 99], tmp_path) == 3


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000", "a/cpu.max": "150000 100000"}, 0.5),
        ("0::/\n", {"cpu.max": "400000 100000"}, 4.0),
        (
            "3:cpu,cpuacct:/x\n2:memory:/y\n",
            {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"},
            float("inf"),
        ),
        ("3:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "300000", "cpu/x/cpu.cfs_period_us": "100000"}, 3.0),
        ("0::/gone\n", {}, float("inf")),
    ],
)
def test_the_control_group_limits(cgroup: str, files: dict[str, str], expected: float, tmp_path: Path) -> None:
    """Red when a parent's limit, or one of the two versions of control groups, is not read."""
    write(tmp_path / "proc/self/cgroup", cgroup)
    for name, text in files.items():
        write(tmp_path / "sys/fs/cgroup" / name, text)
    assert topology.cpu_quota(tmp_path) == expected
    assert topology.usable_threads(tmp_path) >= 1
