"""Gemma 3, text only: sliding-window layers between full ones, normed queries and keys, two rope bases, four norms a layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from noria.models import decoder, rope
from noria.models.config import ConfigReader
from noria.models.spec import LayerSpec, ModelSpec
from noria.types import LoadError
from noria.weights.params import Param

FULL, LOCAL = 0, 1  # indices into ModelSpec.ropes


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Read a Hugging Face `Gemma3TextConfig`, with its rope bases in either the old or the new place."""
    if "text_config" in config:
        raise LoadError("this is Gemma 3 with an image encoder; only its text-only form (model_type gemma3_text) is supported")
    read = ConfigReader(config)
    if read.flag("use_bidirectional_attention", False):
        raise LoadError("'use_bidirectional_attention' is for embedding models; only causal Gemma 3 is supported")
    head_dim = read.positive("head_dim", 256)
    positions = read.positive("max_position_embeddings", 131072)
    # Gemma's max_position_embeddings already counts the scaling of the full layers.
    parameters = read.table("rope_parameters")
    full = parameters.get("full_attention") or read.table("rope_scaling")
    local = parameters.get("sliding_attention") or {}
    ropes = (
        rope.rope_spec(full, base=read.number("rope_theta", 1e6), dim=head_dim, max_positions=positions),
        rope.rope_spec(local, base=read.number("rope_local_base_freq", 1e4), dim=head_dim, max_positions=positions),
    )
    activation = "hidden_activation" if config.get("hidden_activation") is not None else "hidden_act"
    return decoder.check_shape(
        ModelSpec(
            family="gemma3",
            vocab_size=read.positive("vocab_size", 262208),
            hidden_size=read.positive("hidden_size"),
            num_heads=read.positive("num_attention_heads"),
            num_kv_heads=read.positive("num_key_value_heads"),
            head_dim=head_dim,
            intermediate_size=read.positive("intermediate_size"),
            norm_eps=read.number("rms_norm_eps", 1e-6),
            context_length=positions,
            layers=_layers(config, read.positive("num_hidden_layers")),
            ropes=ropes,
            activation=read.require(activation, {"gelu_pytorch_tanh": "gelu_tanh"}, "gelu_pytorch_tanh"),
            attention_scale=read.number("query_pre_attn_scalar", 256.0) ** -0.5,
            attention_softcap=read.number("attn_logit_softcapping", 0.0),
            logit_softcap=read.number("final_logit_softcapping", 0.0),
            embed_scale=math.sqrt(read.positive("hidden_size")),
            qk_norm=True,
            post_norms=True,
            attention_bias=read.flag("attention_bias", False),
            tied_embeddings=read.flag("tie_word_embeddings", True),
            eos_ids=read.token_ids("eos_token_id"),
            bos_id=next(iter(read.token_ids("bos_token_id")), None),
        )
    )


def _layers(config: Mapping[str, Any], count: int) -> tuple[LayerSpec, ...]:
    """Which layers slide: `layer_types`, or every layer but each `sliding_window_pattern`-th."""
    read = ConfigReader(config)
    window = read.positive("sliding_window", 4096)
    kinds = {"full_attention": LayerSpec(rope=FULL), "sliding_attention": LayerSpec(window=window, rope=LOCAL)}
    types = config.get("layer_types")
    if types is None:
        pattern = read.positive("sliding_window_pattern", 6)
        types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(count)]
    unknown = sorted(set(types) - set(kinds))
    if unknown or len(types) != count:
        raise LoadError(f"'layer_types' must name {count} layers of the kinds {', '.join(kinds)}; found {len(types)} {unknown}")
    return tuple(kinds[t] for t in types)


def params(spec: ModelSpec) -> list[Param]:
    names = decoder.Names(
        mlp_norm="pre_feedforward_layernorm",
        post_attention_norm="post_attention_layernorm",
        post_mlp_norm="post_feedforward_layernorm",
        norm_add=1.0,
    )
    return decoder.params(spec, names)
