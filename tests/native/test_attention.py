"""Paged attention: its bits are those of the order written in attention.h, whatever the circumstances."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from contract import attend
from steps import TIERS, AttentionRig, Row, Shape, random_qkv, same_bits

from noria.backends.cpu import _native
from noria.backends.cpu.memory import address, anonymous

F32 = npt.NDArray[np.float32]

SHAPES = {
    "bf16": Shape(),
    "bf16-window": Shape(window=37),
    "bf16-odd-window": Shape(heads=3, kv_heads=1, window=300),
    "bf16-softcap": Shape(softcap=2.0),
    "f32": Shape(kv="f32"),
    "f32-window": Shape(kv="f32", window=37),
    "int8": Shape(kv="int8"),
    "int8-odd-window": Shape(heads=3, kv_heads=1, window=301, softcap=2.0, kv="int8"),
    "int8-smollm2": Shape(heads=9, kv_heads=3, dim=64, kv="int8"),
    "int8-gemma3": Shape(heads=4, kv_heads=1, dim=256, window=512, kv="int8"),
    "wide-group": Shape(heads=26, kv_heads=1, dim=16),
    "one-head": Shape(heads=1, kv_heads=1, dim=80),
    "smollm2": Shape(heads=9, kv_heads=3, dim=64),
    "gemma3": Shape(heads=4, kv_heads=1, dim=256, window=512),
}
by_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
LENGTH = 613  # three splits, the last not full
POISONS = {
    "nan": 0x7FC07FC0,
    "infinity": 0x7F807F80,
    "minus-infinity": 0xFF80FF80,
    "garbage": 0xDEADBEEF,
    "f32-nan": 0x7FC00001,
}


def exact(qkv: F32, shape: Shape) -> F32:
    """float64 attention [length, heads * dim] without any rounding of the cache."""
    length = len(qkv)
    heads = qkv.astype(np.float64).reshape(length, -1, shape.dim)
    q, k, v = np.split(heads, [shape.heads, shape.heads + shape.kv_heads], axis=1)
    group = shape.heads // shape.kv_heads
    scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, group, axis=1)) * shape.scale
    if shape.softcap:
        scores = shape.softcap * np.tanh(scores / shape.softcap)
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    visible = (distance >= 0) & ((distance < shape.window) if shape.window else True)
    weights = np.exp(np.where(visible, scores, -np.inf))
    weights /= weights.sum(axis=2, keepdims=True)
    result: F32 = np.einsum("hqk,khd->qhd", weights, np.repeat(v, group, axis=1)).reshape(length, -1).astype(np.float32)
    return result


@by_shape
def test_it_is_attention(shape: Shape, tier: str) -> None:
    """Red when a head reads another KV head, a mask is off by one, or scale, cap or window is not applied."""
    qkv = random_qkv(shape, LENGTH)
    out = AttentionRig(shape, tier=tier).sequence(qkv, [LENGTH])
    tolerance = {"f32": 2e-6, "bf16": 2e-2, "int8": 4e-2}[shape.kv]
    assert np.abs(out - exact(qkv, shape)).max() < tolerance


@by_shape
def test_the_bits_are_those_of_the_contract(shape: Shape) -> None:
    """Red when a kernel sums in another order than attention.h says: other splits, dims descending, even before odd."""
    qkv = random_qkv(shape, LENGTH)
    out = AttentionRig(shape).sequence(qkv, [LENGTH]).reshape(LENGTH, shape.heads, shape.dim)
    heads = qkv.reshape(LENGTH, -1, shape.dim)
    for position, head in ((0, 0), (1, shape.heads - 1), (17, 0), (254, 0), (257, shape.heads - 1), (511, 0), (612, 0)):
        kv = shape.heads + head // (shape.heads // shape.kv_heads)
        expected = attend(heads[position, head], heads[:, kv], heads[:, kv + shape.kv_heads], position, shape)
        assert same_bits(out[position, head], expected), (position, head)


def test_control_another_order_gives_other_bits() -> None:
    """The comparison above can fail: with splits of 128 keys the same reference has other bits."""
    shape = Shape()
    heads = random_qkv(shape, LENGTH).reshape(LENGTH, -1, shape.dim)
    args = heads[612, 0], heads[:, shape.heads], heads[:, shape.heads + shape.kv_heads], 612, shape
    assert not same_bits(attend(*args, split_keys=128), attend(*args))


@by_shape
def test_tiers_and_threads_give_the_same_bits(shape: Shape) -> None:
    """Red when a tier has its own arithmetic or a thread count changes the order."""
    qkv = random_qkv(shape, LENGTH)
    reference = AttentionRig(shape).sequence(qkv, [LENGTH])
    for tier in TIERS:
        for threads in (1, 2, 3):
            assert same_bits(AttentionRig(shape, tier=tier, threads=threads).sequence(qkv, [LENGTH]), reference), (
                tier,
                threads,
            )


@by_shape
@pytest.mark.parametrize("chunks", [[1], [7], [16], [33], [255, 1, 300]], ids=str)
def test_chunks_give_the_same_bits(shape: Shape, chunks: list[int]) -> None:
    """Red when a query's bits depend on the other queries of its tile, or on what of its row comes later."""
    qkv = random_qkv(shape, LENGTH)
    reference = AttentionRig(shape).sequence(qkv, [LENGTH])
    assert same_bits(AttentionRig(shape, threads=2).sequence(qkv, chunks), reference)


@pytest.mark.parametrize(
    "shape", [SHAPES[n] for n in ("bf16", "bf16-odd-window", "f32-window", "smollm2", "int8", "int8-odd-window")], ids=str
)
@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
def test_unwritten_memory_never_matters(shape: Shape, poison: int) -> None:
    """Red when a stale or unwritten slot is multiplied by zero instead of selected away: NaN would spread."""
    qkv = random_qkv(shape, LENGTH)
    clean = AttentionRig(shape).sequence(qkv, [LENGTH])
    for chunks in ([LENGTH], [1, 1, 1, 33]):
        assert same_bits(AttentionRig(shape, poison=poison, threads=2).sequence(qkv, chunks), clean)


@by_shape
def test_block_placement_does_not_matter(shape: Shape) -> None:
    """Red when a key is found by its block's address instead of the block table."""
    qkv = random_qkv(shape, LENGTH)
    outs = [AttentionRig(shape, seed=seed).sequence(qkv, [LENGTH]) for seed in (1, 2)]
    assert same_bits(*outs)


def test_a_sequence_alone_and_in_a_batch(tier: str) -> None:
    """Red when batch mates, their order or the sharing of splits among threads change a sequence's bits."""
    shape = Shape(heads=6, kv_heads=2, window=0)
    lengths = [613, 40, 300, 1, 517]
    sequences = [random_qkv(shape, n, seed=i) for i, n in enumerate(lengths)]
    alone = [AttentionRig(shape, tier=tier).sequence(s, [len(s)]) for s in sequences]
    rng = np.random.default_rng(5)
    for threads in (1, 3):
        rig = AttentionRig(shape, tier=tier, threads=threads, sequences=len(lengths), poison=POISONS["nan"], seed=threads)
        done, outs = [0] * len(lengths), [[] for _ in lengths]
        while any(d < n for d, n in zip(done, lengths, strict=True)):
            picked = [i for i in rng.permutation(len(lengths)) if done[i] < lengths[i] and rng.random() < 0.7]
            counts = [min(int(rng.choice([1, 1, 2, 30, 90])), lengths[i] - done[i]) for i in picked]
            rows = [Row(int(i), done[i], count) for i, count in zip(picked, counts, strict=True)]
            if not rows:
                continue
            chunks = [sequences[r.slot][r.start : r.start + r.count] for r in rows]
            for i, row, out in zip(picked, rows, rig.step(rows, chunks), strict=True):
                outs[i].append(out)
                done[i] += row.count
        for out, expected in zip(outs, alone, strict=True):
            assert same_bits(np.concatenate(out), expected)


def test_a_long_row_shares_its_splits(tier: str) -> None:
    """Decode over many splits with several threads: partial results are merged in order, step after step."""
    shape = Shape(heads=2, kv_heads=1)
    qkv = random_qkv(shape, 2100)
    reference = AttentionRig(shape, tier=tier, max_len=2112, max_tokens=2112).sequence(qkv, [2100])
    rig = AttentionRig(shape, tier=tier, threads=3, max_len=2112, max_tokens=2112)
    assert same_bits(rig.sequence(qkv, [2080, 1])[2080:], reference[2080:])


@pytest.mark.parametrize("kv", ["bf16", "f32", "int8"])
@pytest.mark.parametrize("only_value", [False, True])
def test_a_nan_stays_in_its_own_sequence(kv: Literal["bf16", "f32", "int8"], only_value: bool) -> None:
    """Red when a row's NaN reaches a batch mate; and its own later tokens must show it."""
    shape = Shape(kv=kv)
    bad, good = random_qkv(shape, 50, seed=1), random_qkv(shape, 50, seed=2)
    bad[20, (shape.heads + shape.kv_heads) * shape.dim if only_value else 0 :] = np.nan
    rig = AttentionRig(shape, sequences=2)
    out_bad, out_good = rig.step([Row(0, 0, 50), Row(1, 0, 50)], [bad, good])
    assert same_bits(out_good, AttentionRig(shape).sequence(good, [50]))
    assert np.isfinite(out_bad[:20]).all()
    assert np.isnan(out_bad[20:]).all()


@pytest.mark.parametrize("name", ["bf16", "f32", "int8", "smollm2", "bf16-softcap", "bf16-window"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_with_a_common_prefix(name: str, threads: int, tier: str) -> None:
    """Red when a query's bits depend on who shares its blocks: how many, how far, and how much longer they are."""
    shape, common, rows = SHAPES[name], 528, 9
    prefix = random_qkv(shape, common)
    tails = [random_qkv(shape, n, seed=9 + n) for n in (1, 2, 3, 17, 40, 90, 100, 5, 6)]
    rig = AttentionRig(shape, tier=tier, threads=threads, sequences=rows, poison=POISONS["nan"])
    rig.table[:, : common // 16] = rig.table[0, : common // 16]
    rig.table[4, 20:] = rig.table[5, 20:]  # two rows leave the others after the first split
    rig.sequence(prefix, [common])
    rig.step([Row(4, 320, common - 320)], [prefix[320:]])
    for row, tail in enumerate(tails):
        if len(tail) > 1 and row != 5:
            rig.step([Row(row, common, len(tail) - 1)], [tail[:-1]])
    decoding = [3, 0, 8, 1, 2, 4, 6, 7]
    outs = rig.step([Row(r, common + len(tails[r]) - 1, 1) for r in decoding], [tails[r][-1:] for r in decoding])
    for row, out in zip(decoding, outs, strict=True):
        whole = np.concatenate([prefix, tails[row]])
        assert same_bits(out, AttentionRig(shape).sequence(whole, [len(whole)])[-1:]), row


def test_inputs_that_break_the_contract_are_refused() -> None:
    """Red when a bad table, position or row would be followed instead of refused."""
    shape = Shape()
    rig = AttentionRig(shape, sequences=2)
    qkv = random_qkv(shape, 4)
    rig.table[1, 0] = 10_000
    for row, message in (
        (Row(1, 0, 4), "block table"),
        (Row(5, 0, 4), "row_slots"),
        (Row(0, 638, 4), "beyond"),
    ):
        with pytest.raises(ValueError, match=message):
            rig.step([row], [qkv])
    rig.table[1, 0] = 0
    with pytest.raises(ValueError, match="block table"):
        rig.step([Row(1, 0, 4)], [qkv])
    assert same_bits(rig.step([Row(0, 0, 4)], [qkv])[0], AttentionRig(shape).sequence(qkv, [4]))


def test_a_window_reads_nothing_that_was_given_back() -> None:
    """Red when a window layer visits blocks below its window: their table entries are the null block by then."""
    shape = Shape(window=24)
    qkv = random_qkv(shape, 300)
    reference = AttentionRig(shape).sequence(qkv, [300])
    rig = AttentionRig(shape)
    rig.sequence(qkv[:290], [290])
    rig.table[0, : (290 - 24 + 1) // 16] = 0
    assert same_bits(rig.step([Row(0, 290, 10)], [qkv[290:]])[0], reference[290:])


@pytest.mark.parametrize("shape", [Shape(heads=4, kv_heads=2, dim=32), Shape(heads=9, kv_heads=3, dim=64)], ids=str)
def test_the_output_comes_in_the_forms_that_linears_read(shape: Shape, tier: str) -> None:
    """Red when a tile writes its part of the codes, scales or sums at the wrong place: unlike a conversion of the whole row."""
    width, rows = shape.heads * shape.dim, 64
    fused, apart = ([anonymous(_native.quantized_bytes(rows, width)), anonymous(2 * rows * width)] for _ in range(2))
    rig = AttentionRig(shape, tier=tier, max_tokens=rows, forms=(address(fused[0]), address(fused[1])))
    rig.tape.begin_rows(logits=False)
    rig.tape.quantize(x=address(rig.out), width=width, workspace=address(apart[0]), rows=rows)
    rig.tape.round_bf16(x=address(rig.out), width=width, pairs=address(apart[1]))
    rig.tape.finish()
    rig.sequence(random_qkv(shape, rows), [rows])
    assert apart[0].any()
    assert np.array_equal(fused[0], apart[0])
    assert np.array_equal(fused[1], apart[1])


def block_offsets(shape: Shape, blocks: set[int]) -> set[int]:
    """Where the heads of some blocks begin, keys and values, after the drawing in kv_layout.h."""
    head_bytes = 16 * {"bf16": 2 * shape.dim, "f32": 4 * shape.dim, "int8": shape.dim + 4}[shape.kv]
    runs = range(2 * shape.kv_heads)
    return {((block // 16 * 2 * shape.kv_heads + run) * 16 + block % 16) * head_bytes for block in blocks for run in runs}


@pytest.mark.parametrize("name", ["bf16", "int8", "smollm2", "bf16-window"])
@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_fetched_ahead_is_what_decodes_will_read(name: str, threads: int) -> None:
    """Red when a worker fetches blocks of another's tiles, of chunks or beyond what a query sees."""
    shape, rows = SHAPES[name], 14
    rig = AttentionRig(shape, threads=threads, sequences=rows)
    lengths = [1 + 43 * r for r in range(rows)]
    decodes = [Row(r, lengths[r] - 1, 1) for r in range(rows - 1)]
    chunk = Row(rows - 1, 0, 30)
    rig.step([*decodes, chunk], [random_qkv(shape, 1)] * len(decodes) + [random_qkv(shape, 30)])
    reads = [rig.tape.decode_reads(worker) for worker in range(threads)]
    seen: set[int] = set()
    for row in decodes:
        first = max(0, row.start + 1 - shape.window) // 16 if shape.window else 0
        seen |= set(rig.table[row.slot, first : row.start // 16 + 1].tolist())
    together = [offset for part in reads for offset in part]
    assert len(together) == len(set(together))
    assert set(together) == block_offsets(shape, seen)
    assert all(reads)


def test_a_common_prefix_is_fetched_once_for_rows_that_are_computed_together() -> None:
    """Red when each row of a joint tile fetches the blocks that it shares."""
    shape, rows = SHAPES["smollm2"], 16
    rig = AttentionRig(shape, sequences=rows)
    rig.table[:, :32] = rig.table[0, :32]
    rig.step([Row(r, 512 + r, 1) for r in range(rows)], [random_qkv(shape, 1)] * rows)
    shared = block_offsets(shape, set(rig.table[0, :32].tolist()))
    fetched = [offset for offset in rig.tape.decode_reads(0) if offset in shared]
    assert set(fetched) == shared
    assert len(fetched) < rows / 2 * len(shared)
