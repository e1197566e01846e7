"""Draws: against the plain numpy sampler of the torch backend, and by their distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from steps import BEST, TIERS, Row, draws, inputs, results, same_bits

from noria.backends.base import Drawn
from noria.backends.cpu import _native
from noria.backends.cpu.memory import address
from noria.backends.torch import sampler as reference

F32 = npt.NDArray[np.float32]


def native_draws(logits: F32, rows: list[dict[str, Any]], tier: str = BEST, threads: int = 1) -> Drawn:
    """All draws in one step over logits [L, vocab]."""
    count, vocab = logits.shape
    logits = np.ascontiguousarray(logits)
    tape = _native.Tape(_native.Pool(threads), tier, count, 1, 1 + count // 16, 1000, count + 16, vocab, [0])
    tape.begin_logits(chunk_rows=count)
    tape.draw(address(logits))
    tape.finish()
    table = np.arange(1, 2 + count // 16, dtype=np.int32).reshape(1, -1)
    drawn = results(len(rows), max([0, *(row.get("num_top", -1) for row in rows)]))
    tape.run(inputs([Row(0, 0, count)], [table], range(count), rows), drawn, 0)
    return drawn


def random_logits(rows: int, vocab: int, scale: float = 3.0, seed: int = 0) -> F32:
    return (scale * np.random.default_rng(seed).standard_normal((rows, vocab))).astype(np.float32)


def random_draw(rng: np.random.Generator, rows: int, vocab: int) -> dict[str, Any]:
    """A draw with a random half of all features."""
    row: dict[str, Any] = {
        "logit_row": int(rng.integers(rows)),
        "seed": int(rng.integers(2**63)),
        "position": int(rng.integers(2**40)),
        "stream": int(rng.integers(5)),
        "temperature": float(rng.choice([0.0, 0.3, 1.0, 2.0])),
        "num_top": int(rng.choice([-1, 0, 1, 5, 20])),
    }
    optional: dict[str, Any] = {
        "top_k": int(rng.choice([1, 3, 40, vocab - 1, vocab, 2 * vocab])),
        "top_p": float(rng.choice([0.05, 0.5, 0.9, 0.99])),
        "min_p": float(rng.choice([0.01, 0.2, 1.0])),
        "repetition": float(rng.choice([0.8, 1.3])),
        "presence": float(rng.choice([-0.5, 1.0])),
        "frequency": float(rng.choice([-0.2, 0.7])),
        "history": [(int(t), int(rng.integers(4))) for t in rng.choice(vocab, min(vocab, 12), replace=False)],
        "bias": [(int(t), float(rng.normal() * 5)) for t in rng.choice(vocab, 3, replace=False)],
        "bans": [int(t) for t in rng.choice(vocab, min(vocab // 2, 6), replace=False)],
    }
    return row | {name: value for name, value in optional.items() if rng.random() < 0.5}


@pytest.mark.parametrize("vocab", [12, 64, 259, 5000])
@pytest.mark.parametrize("scale", [0.5, 3.0, 12.0])
def test_draws_equal_the_reference(vocab: int, scale: float) -> None:
    """Red when an adjustment, a filter, its order, or the noise differs from what `Draws` documents."""
    rng = np.random.default_rng(vocab)
    logits = random_logits(7, vocab, scale)
    rows = [random_draw(rng, 7, vocab) for _ in range(150)]
    expected, drawn = reference.draw(logits, draws(rows)), native_draws(logits, rows)
    assert np.array_equal(drawn.token, expected.token)
    assert np.array_equal(drawn.top_tokens, expected.top_tokens)
    assert np.allclose(drawn.logprob, expected.logprob, atol=2e-5, rtol=2e-6)
    assert np.allclose(drawn.top_logprobs, expected.top_logprobs, atol=2e-5, rtol=2e-6)


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_no_stretch_is_passed_over_in_which_a_token_wins(scale: float, tier: str) -> None:
    """Red if the bound by which noise is not made is too low: rarely, another token than the reference's is drawn."""
    logits = random_logits(1, 20_000, scale, seed=3)
    rows = [{"logit_row": 0, "seed": seed, "position": 7, "stream": 0, "temperature": 1.0, "num_top": -1} for seed in range(60)]
    expected = reference.draw(logits, draws(rows))
    np.testing.assert_array_equal(native_draws(logits, rows, tier).token, expected.token)


def test_tiers_and_threads_draw_the_same_bits() -> None:
    """Red when exp, log or a sum of the sampler depends on the tier, or a draw on its neighbours."""
    rng = np.random.default_rng(3)
    logits = random_logits(20, 3001)
    rows = [random_draw(rng, 20, 3001) for _ in range(100)]
    expected = native_draws(logits, rows)
    for tier in TIERS:
        for threads in (1, 3):
            drawn = native_draws(logits, rows, tier, threads)
            assert np.array_equal(drawn.token, expected.token)
            assert np.array_equal(drawn.top_tokens, expected.top_tokens)
            assert same_bits(drawn.logprob, expected.logprob)
            assert same_bits(drawn.top_logprobs, expected.top_logprobs)


def test_greedy_takes_the_lowest_id_on_ties(tier: str) -> None:
    """Red when lanes are searched in another order than ids."""
    logits = np.zeros((4, 1000), np.float32)
    logits[1, [999, 517, 33]] = 5.0
    logits[2, 998:] = 1.0
    logits[3] = -np.inf
    logits[3, [7, 8]] = -1e30
    drawn = native_draws(logits, [{"logit_row": i, "num_top": 3} for i in range(4)], tier)
    assert drawn.token.tolist() == [0, 33, 998, 7]
    assert drawn.top_tokens.tolist() == [[0, 1, 2], [33, 517, 999], [998, 999, 0], [7, 8, -1]]


def test_filters_keep_lower_ids_on_ties(tier: str) -> None:
    """Red when top_k or top_p breaks a tie at its edge towards a higher id."""
    logits = np.full((1, 64), -30.0, np.float32)
    logits[0, [50, 10, 30, 20]] = 2.0  # four equal tokens: 10, 20, 30, 50
    for settings, allowed in (({"top_k": 2}, {10, 20}), ({"top_p": 0.7}, {10, 20, 30}), ({"top_p": 0.5}, {10, 20})):
        rows = [{"temperature": 1.0, "position": i, **settings} for i in range(200)]
        assert set(native_draws(logits, rows, tier).token.tolist()) == allowed, settings


def test_a_tiny_nucleus_still_holds_the_best_token(tier: str) -> None:
    """Red when top_p = 0 or a huge min_p leaves nothing to draw from."""
    logits = random_logits(1, 300)
    best = int(logits.argmax())
    for settings in ({"top_p": 0.0}, {"min_p": 1.0}, {"top_k": 1}, {"temperature": 1e-6}, {"top_p": 1e-6, "min_p": 0.9}):
        rows = [{"temperature": 1.0, "position": i, **settings} for i in range(20)]
        assert set(native_draws(logits, rows, tier).token.tolist()) == {best}


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.0}], ids=str)
def test_odd_logits_give_a_token_and_finite_logprobs(settings: dict[str, Any], tier: str) -> None:
    """Red when NaN or infinity crashes the sampler, gives an id outside the vocabulary, or a logprob that is no number."""
    vocab = 100
    logits = random_logits(6, vocab)
    logits[0] = np.nan
    logits[1, ::2] = np.nan
    logits[2] = -np.inf
    logits[3, 5] = np.inf
    logits[4, [5, 6]] = np.inf
    logits[5, :] = -3e38
    rows = [{"temperature": 1.0, "num_top": 3, "logit_row": r, **settings} for r in range(6)]
    drawn = native_draws(logits, rows, tier)
    assert ((drawn.token >= 0) & (drawn.token < vocab)).all()
    assert drawn.token[1] % 2 == 1
    assert drawn.token[3] == 5
    assert np.isfinite(drawn.logprob).all()
    assert np.isfinite(drawn.top_logprobs).all()


def test_a_banned_token_is_never_drawn(tier: str) -> None:
    """Red when a bias comes after the bans, or a filter is computed before them."""
    logits = random_logits(1, 50, scale=0.1)
    bans = [t for t in range(50) if t != 41]
    rows = [{"temperature": 1.0, "position": i, "bans": bans, "bias": [(3, 100.0)]} for i in range(10)]
    rows += [{"bans": bans}, {"temperature": 1.0, "bans": bans, "top_p": 0.5}]
    assert set(native_draws(logits, rows, tier).token.tolist()) == {41}


def test_a_target_is_scored_not_drawn(tier: str) -> None:
    """Red when a scored token takes the adjusted logits, or the wrong row."""
    logits = random_logits(3, 77)
    drawn = native_draws(logits, [{"logit_row": r, "target": 70 + r, "num_top": 0, "temperature": 1.0} for r in range(3)], tier)
    assert drawn.token.tolist() == [70, 71, 72]
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    assert np.allclose(drawn.logprob, exact[[0, 1, 2], [70, 71, 72]], atol=1e-5)


# -- noise ------------------------------------------------------------------------------------------------------------------


def noise(seed: int, position: int, stream: int, count: int, tier: str) -> F32:
    out = np.empty(count, np.float32)
    _native.noise(tier, seed, position, stream, address(out), count)
    return out


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the known answers of the Random123 distribution, kat_vectors
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_reference_is_philox(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    """Known answers. The native noise is compared with this reference below."""
    c0, c1, c2, c3 = (np.array([c], np.uint64) for c in counter)
    assert tuple(int(w[0]) for w in reference.philox((c0, c1, c2, c3), key)) == words


def test_noise_is_the_gumbel_noise_of_philox(tier: str) -> None:
    """Red when a counter part, the key or the word order is wrong, or the transformation loses precision."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        seed, position, stream = int(rng.integers(2**64, dtype=np.uint64)), int(rng.integers(2**62)), int(rng.integers(100))
        expected = reference.gumbel(seed, position, stream, 1001)
        assert np.allclose(noise(seed, position, stream, 1001, tier), expected, rtol=3e-6, atol=1e-6)


def test_noise_has_the_same_bits_on_every_tier() -> None:
    """Red when a tier rounds the uniform number or its logarithm differently."""
    for tier in TIERS:
        assert same_bits(noise(7, 8, 9, 100_000, tier), noise(7, 8, 9, 100_000, BEST))


def chi_square(tokens: npt.NDArray[np.int32], probabilities: npt.NDArray[np.float64]) -> float:
    """Normalised so that about 1 is expected and 1.6 is out of the question for 50 cells."""
    used = probabilities > 0
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert not counts[~used].any()
    expected = probabilities[used] * len(tokens)
    return float(((counts[used] - expected) ** 2 / expected).sum() / (used.sum() - 1))


@pytest.mark.parametrize("settings", [{}, {"top_k": 30}, {"top_p": 0.8}, {"min_p": 0.2}, {"temperature": 0.6}], ids=str)
def test_tokens_follow_their_probabilities(settings: dict[str, Any]) -> None:
    """Red when noise is correlated between positions or streams, or a filter forgets to renormalise."""
    vocab, count = 50, 40_000
    logits = random_logits(1, vocab, scale=1.0)
    rows = [{"temperature": 1.0, "seed": 1, "position": i // 4, "stream": i % 4, **settings} for i in range(count)]
    scaled = logits[0].astype(np.float64) / settings.get("temperature", 1.0)
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    kept = np.zeros(vocab, bool)
    if "top_k" in settings:
        kept[order[:30]] = True
    elif "top_p" in settings:
        kept[order[: int((np.cumsum(probabilities[order]) - probabilities[order] < 0.8).sum())]] = True
    elif "min_p" in settings:
        kept = probabilities >= 0.2 * probabilities.max()
    else:
        kept[:] = True
    probabilities = np.where(kept, probabilities, 0)
    assert chi_square(native_draws(logits, rows).token, probabilities / probabilities.sum()) < 1.6


def test_a_draw_depends_on_seed_position_and_stream_only() -> None:
    """Red when noise depends on the draw's place in the step."""
    logits = random_logits(1, 500, scale=0.5)
    row = {"temperature": 1.0, "seed": 5, "position": 100, "stream": 2}
    others = [{"temperature": 1.0, "seed": i, "position": i} for i in range(30)]
    alone = native_draws(logits, [row]).token[0]
    assert native_draws(logits, [*others, row, *others]).token[30] == alone
    changed = [row | {name: 77} for name in ("seed", "position", "stream")]
    assert len(set(native_draws(logits, [row, *changed]).token.tolist())) > 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"logit_row": 2}, "logit row"),
        ({"target": 50}, "target"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"bans": [50]}, "vocabulary"),
        ({"bias": [(-1, 1.0)]}, "vocabulary"),
        ({"history": [(99, 1)]}, "vocabulary"),
    ],
)
def test_draws_outside_the_limits_are_refused(row: dict[str, Any], message: str) -> None:
    """Red when a wrong index would be followed into other memory."""
    with pytest.raises(ValueError, match=message):
        native_draws(random_logits(2, 50), [row])
