"""Rotary tables: equal to the reference's, and the same bits on every machine."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from noria.models import llama, rope
from noria.models.spec import RopeSpec
from noria.types import LoadError

KINDS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "yarn-truncate": {"rope_type": "yarn", "factor": 2.5, "truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn-attention": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.25},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_tables_equal_transformers(kind: str) -> None:
    """Red when a formula or the order of its float32 steps changes: angles near 4,000 show one wrong bit of a frequency."""
    settings = {
        "hidden_size": 256,
        "num_attention_heads": 2,
        "vocab_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "rope_scaling": KINDS[kind],
    }
    ours = rope.tables(llama.spec_from_config(settings).ropes[0], 4096)
    with torch.inference_mode():
        config = LlamaConfig(**settings)
        theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(4096)[None])
    for mine, reference in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, reference[0, :, :64].numpy(), rtol=0, atol=3e-4)
        different = np.abs(mine - reference[0, :, :64].numpy()) > 2e-7
        assert different.mean() < 0.08  # a few frequencies differ by one bit from torch's vectorised power


def test_cosines_are_those_of_float64() -> None:
    """Red when the reduction or a polynomial loses a bit: a million angles, each rounded once from float64."""
    angles = (np.random.default_rng(0).random(1_000_000) * 140_000).astype(np.float32)
    cos, sin = rope.cos_sin(angles)
    exact = angles.astype(np.float64)
    # numpy's own float64 functions are off by a bit of their own, which decides one rounding in many millions
    assert (cos != np.cos(exact).astype(np.float32)).sum() <= 2
    assert (sin != np.sin(exact).astype(np.float32)).sum() <= 2
    corners = np.array([0.0, math.pi / 4, math.pi / 2, math.pi, 3 * math.pi / 2, 2 * math.pi], np.float32)
    cos, sin = rope.cos_sin(corners)
    np.testing.assert_allclose(cos, [math.cos(x) for x in corners], atol=6e-8)
    np.testing.assert_allclose(sin, [math.sin(x) for x in corners], atol=6e-8)


def test_the_bits_are_known() -> None:
    """Red when a table's bits change at all, or differ on another processor: cached KV would not mean the same any more."""
    digest = hashlib.sha256()
    for spec in (
        RopeSpec(base=1e5, dim=64),
        RopeSpec(base=1e4, dim=64, scaling="yarn", factor=4.0, original_context=512),
        RopeSpec(base=5e5, dim=128, scaling="llama3", factor=8.0, original_context=8192),
    ):
        for table in rope.tables(spec, 4096):
            digest.update(table.tobytes())
    assert digest.hexdigest()[:16] == "ddb6f26612db5353"


def test_frequency_factors_divide() -> None:
    """Red when GGUF's rope_freqs are ignored or multiplied."""
    plain = RopeSpec(base=1e4, dim=8)
    divided = RopeSpec(base=1e4, dim=8, frequency_factors=(1.0, 1.0, 2.0, 8.0))
    cos, _ = rope.tables(plain, 64)
    scaled, _ = rope.tables(divided, 64)
    assert np.array_equal(scaled[:, :2], cos[:, :2])
    assert np.array_equal(scaled[::2, 2], cos[:32, 2])
    assert np.array_equal(scaled[::8, 3], cos[:8, 3])
    with pytest.raises(LoadError, match="3 rope frequency factors, expected 4"):
        rope.tables(RopeSpec(base=1e4, dim=8, frequency_factors=(1.0, 1.0, 2.0)), 4)
