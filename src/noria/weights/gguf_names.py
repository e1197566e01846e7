"""GGUF metadata and tensor names as Hugging Face has them, so that a family reads one kind of configuration.

A new architecture is one entry of `ARCHITECTURES`. The keys are those of ggml's docs/gguf.md and of llama.cpp's converter.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from noria.end_tokens import end_tokens
from noria.weights.gguf import GGUFFile


@dataclass(frozen=True)
class Architecture:
    """How one `general.architecture` maps to a Hugging Face model type. A new one is one entry here."""

    model_type: str
    layer_names: dict[str, str]  # "attn_q" of "blk.3.attn_q.weight" -> "self_attn.q_proj"
    activation: str


_COMMON = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_rot_embd": "self_attn.rotary_emb",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ARCHITECTURES = {
    "llama": Architecture("llama", _COMMON | {"ffn_norm": "post_attention_layernorm"}, "silu"),
    "gemma3": Architecture(
        "gemma3_text",
        _COMMON
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        "gelu_pytorch_tanh",
    ),
}
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSOR = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")

ROPE_FREQUENCIES = "rope_freqs.weight"  # no Hugging Face counterpart: it keeps its name

_CONTROL = 3  # the token type of control tokens


def architecture(file: GGUFFile) -> Architecture:
    name = file.text("general.architecture")
    if name not in ARCHITECTURES:
        raise file.error(f"architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
    if file.integer("split.count", 1) > 1:
        raise file.error("it is one part of a split model; join the parts with `llama-gguf-split --merge` first")
    return ARCHITECTURES[name]


def hugging_face_names(file: GGUFFile) -> dict[str, str]:
    """GGUF tensor name by Hugging Face name. A name that we do not know stays as it is: the loader will refuse it."""
    names = architecture(file).layer_names
    translated: dict[str, str] = {}
    for name in file.tensors:
        stem, _, suffix = name.rpartition(".")
        layer = _LAYER_TENSOR.fullmatch(name)
        if layer and layer[2] in names:
            translated[f"model.layers.{int(layer[1])}.{names[layer[2]]}.{layer[3]}"] = name
        elif stem in _OUTER_NAMES:
            translated[f"{_OUTER_NAMES[stem]}.{suffix}"] = name
        else:
            translated[name] = name
    return translated


def hugging_face_config(file: GGUFFile) -> dict[str, Any]:
    """The file's metadata as the `config.json` that Hugging Face would have for this model."""
    arch = architecture(file)
    prefix = file.text("general.architecture")
    num_layers = _num_layers(file, prefix)
    hidden = file.integer(f"{prefix}.embedding_length", minimum=1)
    heads = file.integer(f"{prefix}.attention.head_count", minimum=1)
    if hidden % heads and f"{prefix}.attention.key_length" not in file.metadata:
        raise file.error(f"embedding_length {hidden} is no multiple of the {heads} heads")
    head_dim = file.integer(f"{prefix}.attention.key_length", hidden // heads, minimum=1)
    if file.integer(f"{prefix}.attention.value_length", head_dim) != head_dim:
        raise file.error("keys and values of different length are not supported")
    config: dict[str, Any] = {
        "model_type": arch.model_type,
        "_name_or_path": file.text("general.name", ""),
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "intermediate_size": file.integer(f"{prefix}.feed_forward_length", minimum=1),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": file.integer(f"{prefix}.attention.head_count_kv", heads, minimum=1),
        "head_dim": head_dim,
        "hidden_act": arch.activation,
        "rms_norm_eps": _shortest(file.number(f"{prefix}.attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": file.integer(f"{prefix}.context_length", minimum=1),
        "rope_theta": _shortest(file.number(f"{prefix}.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file, prefix),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": _token_id(file, "bos"),
        "eos_token_id": end_token_ids(file),
    }
    rotated = file.integer(f"{prefix}.rope.dimension_count", head_dim, minimum=1)
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    if ROPE_FREQUENCIES in file.tensors:
        config["rope_frequency_factors"] = _frequency_factors(file)
    if file.integer(f"{prefix}.expert_count", 0):
        raise file.error("mixture-of-experts models are not supported")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if f"{prefix}.{name}" in file.metadata:
            config[name] = file.number(f"{prefix}.{name}")
    if arch.model_type == "gemma3_text":
        config |= _gemma3_config(file, prefix, num_layers, hidden, heads, head_dim)
    return config


def hugging_face_generation_config(file: GGUFFile) -> dict[str, Any]:
    """The end ids and, where the file has them (`general.sampling.*`), its sampling defaults."""
    generation: dict[str, Any] = {"eos_token_id": end_token_ids(file), "bos_token_id": _token_id(file, "bos")}
    for key, name in (
        ("temp", "temperature"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("penalty_repeat", "repetition_penalty"),
    ):
        if f"general.sampling.{key}" in file.metadata:
            generation[name] = _shortest(file.number(f"general.sampling.{key}"))
    if "general.sampling.top_k" in file.metadata:
        generation["top_k"] = file.integer("general.sampling.top_k", minimum=-1)
    return generation


def end_token_ids(file: GGUFFile) -> list[int]:
    """Ids that end a turn or a text: the declared ones first, then control tokens with a well-known name."""
    ids = [i for i in (_token_id(file, "eos"), _token_id(file, "eot"), _token_id(file, "eom")) if i is not None]
    tokens, types = file.strings("tokenizer.ggml.tokens"), file.array("tokenizer.ggml.token_type", "iu")
    if tokens is not None and types is not None:
        control = {int(i): tokens.raw(int(i)).decode("utf-8", "replace") for i in np.flatnonzero(types == _CONTROL)}
        ids += end_tokens(control)
    return list(dict.fromkeys(ids))


def _token_id(file: GGUFFile, role: str) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    if key not in file.metadata:
        return None
    tokens = file.strings("tokenizer.ggml.tokens")
    return file.integer(key, maximum=2**31 - 1 if tokens is None else len(tokens) - 1)


def _num_layers(file: GGUFFile, prefix: str) -> int:
    """The layer count, which must be that of the tensors present: a wrong one must not cost memory."""
    count = file.integer(f"{prefix}.block_count", minimum=1)
    present = {int(match[1]) for match in map(_LAYER_TENSOR.fullmatch, file.tensors) if match}
    if len(present) != count or max(present) != count - 1:
        raise file.error(f"metadata says {count} layers, and the file has tensors of {len(present)}")
    return count


def _vocab_size(file: GGUFFile) -> int:
    """Rows of the embedding: what an id may index. The tokenizer may know fewer tokens, not more."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise file.error("tensor 'token_embd.weight' is missing or no matrix")
    tokens = file.strings("tokenizer.ggml.tokens")
    if tokens is not None and len(tokens) > embedding.shape[0]:
        raise file.error(f"the tokenizer has {len(tokens)} tokens and the embedding {embedding.shape[0]} rows")
    return embedding.shape[0]


def _rope_scaling(file: GGUFFile, prefix: str) -> dict[str, Any] | None:
    kind = file.text(f"{prefix}.rope.scaling.type", "none")
    if kind == "none":
        if f"{prefix}.rope.scale_linear" not in file.metadata:  # the older key
            return None
        return {"rope_type": "linear", "factor": file.number(f"{prefix}.rope.scale_linear")}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": file.number(f"{prefix}.rope.scaling.factor", 1.0)}
    for theirs, ours in (
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if f"{prefix}.rope.scaling.{theirs}" in file.metadata:
            scaling[ours] = _shortest(file.number(f"{prefix}.rope.scaling.{theirs}"))
    attention = f"{prefix}.rope.scaling.attn_factor"
    if (
        attention in file.metadata
    ):  # there it multiplies YaRN's own factor, in Hugging Face's configuration it stands for the product
        scaling["attention_factor"] = _shortest(file.number(attention)) * (1.0 + 0.1 * math.log(max(scaling["factor"], 1.0)))
    if f"{prefix}.rope.scaling.original_context_length" in file.metadata:
        scaling["original_max_position_embeddings"] = file.integer(f"{prefix}.rope.scaling.original_context_length", minimum=1)
    return scaling


def _frequency_factors(file: GGUFFile) -> list[float]:
    """The divisors of the rotary frequencies that a converter stored for llama3 scaling, one a pair of dimensions."""
    raw = file.raw(ROPE_FREQUENCIES)
    if raw.type != "F32" or len(raw.shape) != 1:
        raise file.error(f"tensor {ROPE_FREQUENCIES!r} is no float32 vector")
    factors = raw.data.reshape(-1).view("<f4")
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise file.error(f"tensor {ROPE_FREQUENCIES!r} holds a factor that is not above zero")
    return [float(f) for f in factors]


def _gemma3_config(file: GGUFFile, prefix: str, num_layers: int, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
    """What Gemma 3 has beside Llama: two kinds of layers, and the scale of attention.

    Files carry no sliding pattern: five of six layers slide. The 27B model (62 layers) scales queries by hidden_size / heads
    where all others use head_dim.
    """
    pattern = file.integer(f"{prefix}.attention.sliding_window_pattern", 6, minimum=1)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": _shortest(file.number(f"{prefix}.rope.freq_base_swa", 10000.0)),
        "sliding_window": file.integer(f"{prefix}.attention.sliding_window", minimum=1),
        "sliding_window_pattern": pattern,
        "layer_types": ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(num_layers)],
        "query_pre_attn_scalar": hidden // heads if num_layers == 62 else head_dim,
    }


def _shortest(value: float) -> float:
    """The decimal that a float32 of the file was written from: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
