"""Prices: the guess, and the file between two runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from noria.core.prices import Prices, guess_prices, keep_prices, load_prices
from noria.models.spec import LayerSpec, ModelSpec, RopeSpec

LEARNED = Prices(start=1e-3, tokens=2e-4, pairs=3e-8, context=4e-8, logits=5e-5, measured=True)


def test_prices_survive_a_restart(tmp_path: Path) -> None:
    """Red when what was learned is lost or altered on the way to the disk."""
    path = tmp_path / "prices" / "a.json"
    assert load_prices(path) is None
    keep_prices(path, LEARNED)
    assert load_prices(path) == LEARNED
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"start": 0}', b'{"tokens": -1.0}', b'{"start": 1e300}', b'{"unknown": 1}', b"\xff"]
)
def test_a_broken_file_is_no_prices(tmp_path: Path, content: bytes) -> None:
    """Red when a torn or foreign file stops the start, or a price of 0 enters a logarithm."""
    path = tmp_path / "a.json"
    path.write_bytes(content)
    assert load_prices(path) is None


def test_prices_that_cannot_be_kept_hurt_nobody(tmp_path: Path) -> None:
    """Red when a full or read-only disk breaks the end of an engine."""
    (tmp_path / "file").touch()
    keep_prices(tmp_path / "file" / "a.json", LEARNED)


def test_the_folder_is_bounded(tmp_path: Path) -> None:
    """Red when every model ever served leaves a file for ever."""
    for i in range(70):
        keep_prices(tmp_path / f"{i}.json", LEARNED)
        os.utime(tmp_path / f"{i}.json", (i, i))
    assert len(list(tmp_path.iterdir())) <= 65
    assert (tmp_path / "69.json").exists()


def test_the_guess_grows_with_the_model() -> None:
    """Red when a size enters no price, or the wrong one."""

    def guess(hidden: int, vocab: int, layers: int) -> Prices:
        spec = ModelSpec(
            family="llama",
            vocab_size=vocab,
            hidden_size=hidden,
            num_heads=hidden // 64,
            num_kv_heads=1,
            head_dim=64,
            intermediate_size=4 * hidden,
            norm_eps=1e-5,
            context_length=1000,
            layers=(LayerSpec(),) * layers,
            ropes=(RopeSpec(base=1e4, dim=64),),
        )
        return guess_prices(spec, hidden * hidden * layers, 1000.0 * layers)

    small, wide, deep, wordy = guess(512, 1000, 4), guess(1024, 1000, 4), guess(512, 1000, 8), guess(512, 4000, 4)
    assert all(p.plausible and not p.measured for p in (small, wide, deep, wordy))
    assert 3 < wide.tokens / small.tokens < 4.5
    assert (deep.tokens, deep.pairs, deep.context) == (2 * small.tokens, 2 * small.pairs, 2 * small.context)
    assert wordy.logits == 4 * small.logits
    assert wordy.tokens == small.tokens
