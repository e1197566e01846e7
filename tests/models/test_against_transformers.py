"""Every architecture against Hugging Face transformers: logits from a paged cache with shuffled blocks, in uneven chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from noria.backends.base import Backend
from noria.backends.cpu.backend import CpuBackend
from noria.backends.torch.backend import TorchBackend
from noria.core.plan import PlanRow

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any], int]] = {  # name: (family, config, prompt length)
    "llama": (tiny.llama, {"num_key_value_heads": 4}, 40),
    "llama-gqa": (tiny.llama, {}, 40),
    "llama-mqa-wide-heads": (tiny.llama, {"num_key_value_heads": 1, "head_dim": 48}, 40),
    "llama-tied": (tiny.llama, {"tie_word_embeddings": True}, 40),
    "llama-biases": (tiny.llama, {"attention_bias": True, "mlp_bias": True}, 40),
    "llama-linear": (tiny.llama, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "max_position_embeddings": 64}, 200),
    "llama-yarn": (tiny.llama, {"rope_scaling": YARN}, 200),
    "llama-yarn-mscale": (tiny.llama, {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False}}, 200),
    "llama-llama3": (tiny.llama, {"rope_scaling": LLAMA3}, 200),
    "gemma3": (tiny.gemma, {}, 100),
    "gemma3-logit-softcap": (tiny.gemma, {"final_logit_softcapping": 2.0}, 40),
    "gemma3-linear": (tiny.gemma, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 100),
    "gemma3-layer-types": (
        tiny.gemma,
        {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        100,
    ),
}


BACKENDS = [pytest.param(TorchBackend, id="torch"), pytest.param(lambda: CpuBackend(threads=2), id="cpu")]


@pytest.mark.parametrize("make_backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, make_backend: Callable[[], Backend], tmp_path: Path) -> None:
    """Red when a family reads a config key wrongly, maps a tensor to the wrong place, or leaves out a part of a layer."""
    family, overrides, length = MODELS[name]
    model = family(**overrides)
    tokens = np.random.default_rng(1).integers(0, tiny.VOCAB, length + 4).tolist()
    machine = tiny.Machine(tiny.load(model, tmp_path), make_backend())
    machine.take(0, tokens)
    ours = [machine.prefill(0, length, [13, 1, 29, 32])]
    ours += [machine.logits([PlanRow(row=0, start=p, count=1, tokens=())])[0] for p in range(length, length + 4)]
    theirs = tiny.reference_logits(model, tokens)
    np.testing.assert_allclose(np.concatenate(ours), theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).mean())
    machine.backend.close()


@pytest.mark.parametrize("make_backend", BACKENDS)
@pytest.mark.parametrize("family", [tiny.llama, tiny.gemma])
def test_rows_of_a_batch_do_not_see_each_other(
    family: Callable[..., Any], make_backend: Callable[[], Backend], tmp_path: Path
) -> None:
    """Red when rows share a slot, a position or a block table: three sequences, prefill and decode mixed in one step."""
    model = family()
    rng = np.random.default_rng(2)
    sequences = [rng.integers(0, tiny.VOCAB, n).tolist() for n in (50, 7, 33)]
    machine = tiny.Machine(tiny.load(model, tmp_path), make_backend())
    for row, tokens in enumerate(sequences):
        machine.take(row, tokens)
    machine.prefill(0, 49, [20])
    machine.prefill(2, 10, [10])
    chunks = [
        PlanRow(row=2, start=10, count=23, tokens=()),
        PlanRow(row=0, start=49, count=1, tokens=()),
        PlanRow(row=1, start=0, count=7, tokens=()),
    ]
    got = machine.logits(chunks)
    for chunk, logits in zip(chunks, got, strict=True):
        theirs = tiny.reference_logits(model, sequences[chunk.row])[chunk.start : chunk.start + chunk.count]
        np.testing.assert_allclose(logits, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).mean())
    machine.backend.close()
