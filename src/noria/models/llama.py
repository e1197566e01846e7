"""Llama 1 to 3 and models of the same shape (SmolLM2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from noria.models import decoder, rope
from noria.models.config import ConfigReader
from noria.models.spec import LayerSpec, ModelSpec
from noria.weights.params import Param


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Read a Hugging Face `LlamaConfig`. `rope_frequency_factors`: divisors that GGUF files store for Llama 3.1 and later."""
    read = ConfigReader(config)
    heads = read.positive("num_attention_heads")
    hidden = read.positive("hidden_size")
    head_dim = read.positive("head_dim", max(hidden // heads, 1))
    positions = read.positive("max_position_embeddings", 2048)
    scaling = read.table("rope_scaling") or read.table("rope_parameters")
    scaling.setdefault("partial_rotary_factor", read.number("partial_rotary_factor", 1.0))
    rotary = rope.rope_spec(scaling, base=read.number("rope_theta", 10000.0), dim=head_dim, max_positions=positions)
    return decoder.check_shape(
        ModelSpec(
            family="llama",
            vocab_size=read.positive("vocab_size"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=read.positive("num_key_value_heads", heads),
            head_dim=head_dim,
            intermediate_size=read.positive("intermediate_size"),
            norm_eps=read.number("rms_norm_eps", 1e-6),
            context_length=rope.scaled_context(rotary, positions),
            layers=(LayerSpec(),) * read.positive("num_hidden_layers"),
            ropes=(msgspec.structs.replace(rotary, frequency_factors=read.numbers("rope_frequency_factors")),),
            activation=read.require("hidden_act", {"silu": "silu"}, "silu"),
            attention_bias=read.flag("attention_bias", False),
            mlp_bias=read.flag("mlp_bias", False),
            tied_embeddings=read.flag("tie_word_embeddings", False),
            eos_ids=read.token_ids("eos_token_id"),
            bos_id=next(iter(read.token_ids("bos_token_id")), None),
        )
    )


def params(spec: ModelSpec) -> list[Param]:
    return decoder.params(spec, decoder.Names(interleaved_gguf=True))
