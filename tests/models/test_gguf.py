"""A GGUF file, written as llama.cpp's converter writes it, gives the logits of the transformers model it was made from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

import tiny
from noria.backends.torch.backend import TorchBackend

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write(model: Any, path: Path) -> None:
    """The model as float32 GGUF: names, metadata and the rope order of q and k as `convert_hf_to_gguf.py` has them."""
    config = model.config
    arch = "llama" if config.model_type == "llama" else "gemma3"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    if arch == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, config.head_dim))
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH.LLAMA if arch == "llama" else gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers
    )
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if arch == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _llama3_factors(rope: dict[str, Any], dim: int) -> npt.NDArray[np.float32]:
    """What each frequency is divided by, as the converter computes it."""
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    smooth = rope["original_max_position_embeddings"] / wavelengths - rope["low_freq_factor"]
    smooth /= rope["high_freq_factor"] - rope["low_freq_factor"]
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = np.where(wavelengths < high, 1.0, np.where(wavelengths > low, rope["factor"], between))
    return factors.astype(np.float32)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        pytest.param(tiny.llama, {}, id="llama"),
        pytest.param(tiny.llama, {"tie_word_embeddings": True}, id="llama-tied"),
        pytest.param(tiny.llama, {"attention_bias": True, "mlp_bias": True}, id="llama-biases"),
        pytest.param(tiny.llama, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, id="llama-linear"),
        pytest.param(tiny.llama, {"rope_scaling": LLAMA3}, id="llama3-factors"),
        pytest.param(tiny.gemma, {"query_pre_attn_scalar": 32}, id="gemma3"),
    ],
)
def test_logits_equal_transformers(family: Callable[..., Any], overrides: dict[str, Any], tmp_path: Path) -> None:
    """Red when the rope order of q and k (or of their biases) is not undone, 1 is added to a norm that has it, or rope_freqs
    and scalings are lost."""
    model = family(**overrides)
    write(model, tmp_path / "model.gguf")
    tokens = np.random.default_rng(6).integers(0, tiny.VOCAB, 120).tolist()
    machine = tiny.Machine(tiny.open_path(tmp_path / "model.gguf"), TorchBackend())
    machine.take(0, tokens)
    reference = tiny.reference_logits(model, tokens)
    np.testing.assert_allclose(
        machine.prefill(0, len(tokens), [50]), reference, rtol=1e-4, atol=1e-4 * np.abs(reference).mean()
    )
