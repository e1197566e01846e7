"""What a step costs on this machine, as five prices: guessed from a model's size, or kept by an earlier run."""

from __future__ import annotations

import contextlib
import os
from math import isfinite
from pathlib import Path

import msgspec

from noria.models.spec import ModelSpec

_FLOPS = 200e9  # a small machine's, in its linear layers
_ATTENTION_FLOPS = 50e9
_BYTES = 15e9  # a second, from memory
_STEP = 1e-3  # seconds of a step that are neither
_FILES_KEPT = 64


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds: of a step, and of each token, pair, position and row of logits in it (`core/costs.py`)."""

    start: float = 4e-3
    tokens: float = 5e-4
    pairs: float = 1e-7
    context: float = 1e-7
    logits: float = 1e-4
    measured: bool = False  # learned from steps, not guessed

    @property
    def plausible(self) -> bool:
        """Whether they can be anybody's prices: positive and finite."""
        return all(isfinite(p) and 1e-15 < p < 1e4 for p in (self.start, self.tokens, self.pairs, self.context, self.logits))


def guess_prices(spec: ModelSpec, weight_bytes: int, position_bytes: float) -> Prices:
    """Prices before anything has run; `position_bytes`: K and V of one position, all layers together.

    Off by a factor of several on a machine that is not small: the first steps put that right.
    """
    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer = spec.hidden_size * (2 * heads + 2 * kv_heads + 3 * spec.intermediate_size)
    return Prices(
        start=_STEP + weight_bytes / _BYTES,
        tokens=2 * layer * len(spec.layers) / _FLOPS,
        pairs=4 * heads * len(spec.layers) / _ATTENTION_FLOPS,
        context=position_bytes / _BYTES,
        logits=2 * spec.hidden_size * spec.vocab_size / _FLOPS,
    )


def load_prices(path: Path) -> Prices | None:
    """The prices that an earlier run kept; None if there are none that can be used."""
    try:
        prices = msgspec.json.decode(path.read_bytes(), type=Prices)
    except (OSError, msgspec.DecodeError):
        return None
    return prices if prices.plausible else None


def keep_prices(path: Path, prices: Prices) -> None:
    """Write prices for the next run, whole or not at all. Where that is not possible, it starts with a guess again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}.tmp")
        aside.write_bytes(msgspec.json.encode(prices))
        aside.replace(path)
        by_age = sorted(path.parent.glob("*.json"), key=lambda p: p.stat().st_mtime)
        for old in by_age[:-_FILES_KEPT]:
            old.unlink(missing_ok=True)
