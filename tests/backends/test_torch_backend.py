"""The reference backend itself: its draws by published vectors and by statistics, its cache by the documented layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from noria.backends.base import BLOCK_SIZE, Draws
from noria.backends.torch import sampler
from noria.backends.torch.backend import TorchBackend
from noria.core.plan import PlanRow

VOCAB = 50


def one_draw(count: int = 1, **changes: Any) -> Draws:
    """`count` draws from logit row 0, greedy unless changed; a changed scalar is repeated."""
    scalars: dict[str, tuple[type, Any]] = {
        "logit_row": (np.int32, 0),
        "temperature": (np.float32, 0.0),
        "top_k": (np.int32, 0),
        "top_p": (np.float32, 1.0),
        "min_p": (np.float32, 0.0),
        "seed": (np.uint64, 1),
        "position": (np.int64, 0),
        "stream": (np.int32, 0),
        "target": (np.int32, -1),
        "num_top": (np.int32, -1),
        "repetition": (np.float32, 1.0),
        "presence": (np.float32, 0.0),
        "frequency": (np.float32, 0.0),
    }
    arrays = {n: np.broadcast_to(np.asarray(changes.pop(n, default), dtype), count) for n, (dtype, default) in scalars.items()}
    lists: dict[str, Any] = {}
    for name, parts in {"history": ("tokens", "counts"), "bias": ("tokens", "values"), "ban": ("tokens",)}.items():
        values = changes.pop(name, {part: [] for part in parts})
        length = len(values["tokens"])
        lists[f"{name}_offsets"] = np.arange(count + 1, dtype=np.int64) * length
        for part in parts:
            lists[f"{name}_{part}"] = np.tile(np.asarray(values[part], np.float32 if part == "values" else np.int32), count)
    assert not changes
    return Draws(**arrays, **lists)


def draw_tokens(row: Any, count: int = 1, **changes: Any) -> list[int]:
    return sampler.draw(np.asarray([row], np.float32), one_draw(count, **changes)).token.tolist()


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    """Red when a round, a multiplier or a word's place is wrong (vectors of the Random123 library)."""
    arrays = tuple(np.array([c], np.uint64) for c in counter)
    assert tuple(int(w[0]) for w in sampler.philox(arrays, key)) == words  # type: ignore[arg-type]


def test_the_noise_of_a_token_depends_on_all_four_and_nothing_else() -> None:
    """Red when a counter word is dropped, or the noise of a token depends on the vocabulary's size."""
    noise = sampler.gumbel(7, 3, 2, 101)
    assert np.array_equal(noise[:50], sampler.gumbel(7, 3, 2, 50))
    for other in ((8, 3, 2), (7, 4, 2), (7, 3, 1), (7 + (1 << 32), 3, 2), (7, 3 + (1 << 32), 2)):
        assert not np.any(sampler.gumbel(*other, 101) == noise)
    many = sampler.gumbel(1, 1, 0, 200_000)
    assert abs(many.mean() - 0.5772) < 0.01  # Euler's constant
    assert abs(many.var() - np.pi**2 / 6) < 0.02


def test_samples_follow_the_distribution() -> None:
    """Red when the noise is not Gumbel's, or temperature multiplies instead of divides."""
    row = np.log(np.array([0.5, 0.25, 0.15, 0.07, 0.03]))
    count = 20_000
    for temperature in (1.0, 0.5):
        tokens = draw_tokens(row, count, temperature=temperature, position=np.arange(count))
        expected = np.exp(row / temperature) / np.exp(row / temperature).sum()
        assert np.abs(np.bincount(tokens, minlength=5) / count - expected).max() < 0.015


@pytest.mark.parametrize(
    ("settings", "possible"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.7}, {0, 1}),  # 0.5 alone is not enough
        ({"top_p": 0.5}, {0}),
        ({"top_p": 1e-6}, {0}),
        ({"min_p": 0.4}, {0, 1}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),  # top_p of what top_k left: 0.5 / 0.9, 0.25 / 0.9
        ({"ban": {"tokens": [0, 4]}}, {1, 2, 3}),
        ({"bias": {"tokens": [4], "values": [100.0]}}, {4}),
        ({"top_k": 1, "temperature": 5.0}, {0}),
    ],
)
def test_filters_leave_exactly_the_tokens_they_should(settings: dict[str, Any], possible: set[int]) -> None:
    """Red when a filter keeps one token too many or too few, or filters run in another order."""
    row = np.log(np.array([0.5, 0.25, 0.15, 0.07, 0.03]))
    tokens = draw_tokens(row, 3000, position=np.arange(3000), **{"temperature": 1.0} | settings)
    assert set(tokens) == possible


def test_ties_go_to_the_lower_id() -> None:
    """Red when greedy, top_k or the report of likely tokens orders equal logits differently."""
    row = [1.0, 2.0, 2.0, 0.0, 2.0]
    assert draw_tokens(row) == [1]
    assert set(draw_tokens(row, 500, temperature=1.0, top_k=2, position=np.arange(500))) == {1, 2}
    drawn = sampler.draw(np.asarray([row], np.float32), one_draw(num_top=4))
    assert drawn.top_tokens.tolist() == [[1, 2, 4, 0]]


def test_penalties() -> None:
    """Red when a penalty reaches tokens it should not: presence and frequency count the output only, repetition both."""
    row = np.array([1.0, -1.0, 2.0, 0.5], np.float32)
    history = {"tokens": [0, 1, 2], "counts": [0, 2, 1]}
    adjusted = sampler._adjusted(row, one_draw(repetition=2.0, presence=0.25, frequency=0.5, history=history), 0)
    np.testing.assert_allclose(adjusted, [0.5, -2.0 - 0.25 - 1.0, 1.0 - 0.25 - 0.5, 0.5])
    assert row.tolist() == [1.0, -1.0, 2.0, 0.5]


def test_logprobs_are_of_the_raw_distribution() -> None:
    """Red when temperature, filters or bans change reported logprobs, or -inf escapes."""
    row = np.array([0.0, 1.0, 2.0, -np.inf], np.float32)
    drawn = sampler.draw(row[None], one_draw(temperature=0.1, top_k=1, ban={"tokens": [2]}, num_top=6))
    expected = row - np.log(np.exp(row[:3]).sum())
    assert drawn.token.tolist() == [1]
    np.testing.assert_allclose(drawn.logprob, expected[1], rtol=1e-6)
    assert drawn.top_tokens.tolist() == [[2, 1, 0, 3, -1, -1]]
    assert drawn.top_logprobs[0, 3] == -1e9
    scored = sampler.draw(row[None], one_draw(target=0, num_top=0))
    assert scored.token.tolist() == [0]
    np.testing.assert_allclose(scored.logprob, expected[0], rtol=1e-6)


# -- the cache -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_blocks_have_the_interchange_form(dtype: Any, tmp_path: Path) -> None:
    """Red when a block is not [slot][k|v][head][16][dim], or copying and writing lose a bit."""
    machine = tiny.Machine(tiny.load(tiny.gemma(num_key_value_heads=2), tmp_path), TorchBackend(), kv_dtype=dtype)
    machine.take(0, list(range(20)))
    machine.prefill(0, 20, [20])
    backend, kv = machine.backend, machine.kv
    block = int(machine.rows.block_tables[0][0, 0])
    data = backend.read_block(block)
    assert data.nbytes == kv.block_bytes
    shaped = data.view(np.float32 if dtype == "f32" else np.uint16).reshape(1, 2, 2, BLOCK_SIZE, kv.head_dim)
    assert (shaped != 0).mean() > 0.99
    second = int(machine.rows.block_tables[0][0, 1])
    partly = backend.read_block(second).view(shaped.dtype).reshape(shaped.shape)
    assert (partly[:, :, :, 4:] == 0).all()  # tokens 20 to 31 do not exist
    backend.copy_blocks([(block, second)])
    assert np.array_equal(backend.read_block(second), data)
    backend.write_block(second, np.roll(data, 4))
    assert np.array_equal(backend.read_block(second), np.roll(data, 4))
    assert np.array_equal(backend.read_block(block), data)
    with pytest.raises(RuntimeError):
        backend.write_block(second, data[:-1])


def test_released_blocks_are_never_read(tmp_path: Path) -> None:
    """Red when a window layer reads below its window: the null block and all released blocks hold NaN here."""
    model = tiny.gemma()
    tokens = np.random.default_rng(3).integers(0, tiny.VOCAB, 100).tolist()
    machine = tiny.Machine(tiny.load(model, tmp_path), TorchBackend())
    machine.take(0, tokens)
    machine.prefill(0, 99, [33])
    poison = np.full(machine.kv.block_bytes // 4, np.nan, np.float32).view(np.uint8)
    machine.backend.write_block(0, poison)
    for group, spec in enumerate(machine.groups):
        if spec.window:
            gone = (99 - spec.window + 1) // BLOCK_SIZE
            for block in machine.rows.block_tables[group][0, :gone]:
                machine.backend.write_block(int(block), poison)
            machine.rows.release(0, group, gone)
    logits = machine.logits([PlanRow(row=0, start=99, count=1, tokens=())])[0]
    reference = tiny.reference_logits(model, tokens)[99:]
    np.testing.assert_allclose(logits, reference, rtol=1e-4, atol=1e-4 * np.abs(reference).mean())


def test_bf16_cache_rounds_keys_and_values_and_nothing_else(tmp_path: Path) -> None:
    """Red when the bf16 cache is not used, or more than the cache is rounded: the logits move a little."""
    loaded = tiny.load(tiny.llama(), tmp_path)
    tokens = np.random.default_rng(4).integers(0, tiny.VOCAB, 60).tolist()
    results = []
    for dtype in ("f32", "bf16"):
        machine = tiny.Machine(loaded, TorchBackend(), kv_dtype=dtype)  # type: ignore[arg-type]
        machine.take(0, tokens)
        results.append(machine.prefill(0, 60, [60]))
    difference = np.abs(results[0] - results[1])
    assert 1e-6 < difference.mean() < 2e-2 * np.abs(results[0]).mean()


def test_attention_softcap(tmp_path: Path) -> None:
    """Red when the cap is applied after the mask or not at all: one layer, computed by hand in float64."""
    loaded = tiny.load(tiny.llama(num_hidden_layers=1), tmp_path)
    capped = dataclasses.replace(loaded, spec=_with_softcap(loaded.spec, 0.5))
    tokens = np.random.default_rng(5).integers(0, tiny.VOCAB, 30).tolist()
    results = []
    for variant in (loaded, capped):
        machine = tiny.Machine(variant, TorchBackend())
        machine.take(0, tokens)
        results.append(machine.prefill(0, 30, [11]))
    expected = _by_hand(loaded, tokens, softcap=0.5)
    assert np.abs(results[0] - results[1]).mean() > 1e-3
    np.testing.assert_allclose(results[1], expected, rtol=1e-4, atol=1e-4 * np.abs(expected).mean())


def _with_softcap(spec: Any, softcap: float) -> Any:
    import msgspec

    return msgspec.structs.replace(spec, attention_softcap=softcap)


def _by_hand(loaded: tiny.Loaded, tokens: list[int], softcap: float) -> Any:
    """A one-layer Llama in numpy float64."""
    from noria.models import rope
    from noria.weights.formats import LinearWeight, VectorWeight
    from noria.weights.pack import unpack

    spec = loaded.spec

    def matrix(name: str) -> Any:
        weight = loaded.weights[name]
        assert isinstance(weight, LinearWeight)
        return np.concatenate([unpack(s) for s in weight.segments]).astype(np.float64)

    def norm(x: Any, name: str) -> Any:
        weight = loaded.weights[name]
        assert isinstance(weight, VectorWeight)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.norm_eps) * weight.data

    x = matrix("embed")[tokens]
    heads = (norm(x, "layers.0.attention_norm") @ matrix("layers.0.qkv").T).reshape(len(tokens), -1, spec.head_dim)
    cos, sin = (t[:, None].astype(np.float64) for t in rope.tables(spec.ropes[0], len(tokens)))
    half = spec.head_dim // 2
    low, high = heads[..., :half], heads[..., half:]
    turned = np.concatenate((low * cos - high * sin, high * cos + low * sin), -1)
    q, k, v = turned[:, :4], turned[:, 4:6].repeat(2, axis=1), heads[:, 6:].repeat(2, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) * spec.scale
    scores = softcap * np.tanh(scores / softcap) + np.triu(np.full((len(tokens),) * 2, -np.inf), 1)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    x = x + np.einsum("hqk,khd->qhd", p, v).reshape(len(tokens), -1) @ matrix("layers.0.o").T
    gate, up = np.split(norm(x, "layers.0.mlp_norm") @ matrix("layers.0.gate_up").T, 2, axis=-1)
    x = x + (gate / (1 + np.exp(-gate)) * up) @ matrix("layers.0.down").T
    return norm(x, "norm") @ matrix("head").T
