"""The shared pre-norm decoder: what every family runs, written once against the op protocol.

    embed -> [ norm -> q|k|v -> (head norm) -> rope -> attend -> o -> (post norm) -> + residual
               norm -> gate|up -> activation -> down -> (post norm) -> + residual ] x layers -> norm -> logits

A family file gives a `ModelSpec` and the names of its checkpoint tensors; the switches of the spec say the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from noria.backends.base import AttentionSpec, Handle, Ops
from noria.models.spec import ModelSpec, layer_groups
from noria.types import LoadError
from noria.weights.formats import LinearWeight, VectorWeight, Weight
from noria.weights.params import Param, Source


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """How a family's checkpoint differs from Llama's, whose Hugging Face names are the common tongue."""

    mlp_norm: str = "post_attention_layernorm"
    post_attention_norm: str = ""  # read where the spec has `post_norms`
    post_mlp_norm: str = ""
    norm_add: float = 0.0  # safetensors store w of a norm that multiplies by norm_add + w
    interleaved_gguf: bool = False  # GGUF files hold q and k permuted for interleaved rope


def check_shape(spec: ModelSpec) -> ModelSpec:
    """Refuse shapes that no attention layer can have."""
    if spec.num_heads % spec.num_kv_heads:
        raise LoadError(f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} key heads evenly")
    if spec.norm_eps <= 0:
        raise LoadError(f"the norms' epsilon must be positive, not {spec.norm_eps:g}")
    return spec


def params(spec: ModelSpec, names: Names) -> list[Param]:
    """The parameters of a decoder and the checkpoint tensors they are made of."""
    h, f = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

    def matrix(name: str, *sources: Source, bias: bool = False) -> Param:
        return Param(name=name, kind="matrix", sources=sources, biases=tuple(_bias(s) for s in sources) if bias else ())

    def norm(name: str, source: str, length: int = h) -> Param:
        stored = Source(name=f"{source}.weight", shape=(length,), safetensors_add=names.norm_add)
        return Param(name=name, kind="vector", sources=(stored,))

    embed = Source(name="model.embed_tokens.weight", shape=(spec.vocab_size, h))
    result = [matrix("embed", embed)]
    for i in range(len(spec.layers)):
        here, there = f"layers.{i}.", f"model.layers.{i}."

        def source(name: str, outputs: int, inputs: int, heads: int = 0, there: str = there) -> Source:
            return Source(
                name=f"{there}{name}.weight",
                shape=(outputs, inputs),
                gguf_heads=heads if names.interleaved_gguf else 0,
            )

        result += [
            norm(f"{here}attention_norm", f"{there}input_layernorm"),
            matrix(
                f"{here}qkv",
                source("self_attn.q_proj", q, h, heads=spec.num_heads),
                source("self_attn.k_proj", kv, h, heads=spec.num_kv_heads),
                source("self_attn.v_proj", kv, h),
                bias=spec.attention_bias,
            ),
            matrix(f"{here}o", source("self_attn.o_proj", h, q), bias=spec.attention_bias),
            norm(f"{here}mlp_norm", f"{there}{names.mlp_norm}"),
            matrix(
                f"{here}gate_up",
                source("mlp.gate_proj", f, h),
                source("mlp.up_proj", f, h),
                bias=spec.mlp_bias,
            ),
            matrix(f"{here}down", source("mlp.down_proj", h, f), bias=spec.mlp_bias),
        ]
        if spec.qk_norm:
            result.append(norm(f"{here}q_norm", f"{there}self_attn.q_norm", spec.head_dim))
            result.append(norm(f"{here}k_norm", f"{there}self_attn.k_norm", spec.head_dim))
        if spec.post_norms:
            result.append(norm(f"{here}post_attention_norm", f"{there}{names.post_attention_norm}"))
            result.append(norm(f"{here}post_mlp_norm", f"{there}{names.post_mlp_norm}"))
    head = Source(name="lm_head.weight", shape=(spec.vocab_size, h))
    alias = "embed" if spec.tied_embeddings else ""
    return [*result, norm("norm", "model.norm"), Param(name="head", kind="matrix", sources=(head,), alias_of=alias)]


def _bias(source: Source) -> Source:
    """The bias beside a matrix; rows of q and k in GGUF files are permuted in it as well."""
    return msgspec.structs.replace(source, name=source.name.removesuffix("weight") + "bias", shape=source.shape[:1])


def attention_specs(spec: ModelSpec) -> tuple[AttentionSpec, ...]:
    """Each layer's attention, with its place in the layer groups."""
    place = {
        layer: (index, slot)
        for index, group in enumerate(layer_groups(spec))
        for slot, layer in enumerate(group.layers)
        if layer >= 0
    }
    return tuple(
        AttentionSpec(
            layer=i,
            group=place[i][0],
            slot=place[i][1],
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale,
            window=layer.window,
            softcap=spec.attention_softcap,
        )
        for i, layer in enumerate(spec.layers)
    )


def forward(ops: Ops, spec: ModelSpec, weights: Mapping[str, Weight]) -> Handle:
    """Run the decoder once over the step's tokens: the logits of the wanted positions. Hidden states are after the norm."""

    def matrix(name: str) -> LinearWeight:
        weight = weights[name]
        assert isinstance(weight, LinearWeight), name
        return weight

    def vector(name: str) -> VectorWeight:
        weight = weights[name]
        assert isinstance(weight, VectorWeight), name
        return weight

    def norm(x: Handle, name: str, residual: Handle | None = None) -> tuple[Handle, Handle]:
        return ops.rms_norm(x, vector(name), spec.norm_eps, residual)

    attentions = attention_specs(spec)
    x = ops.embed(matrix("embed"), spec.embed_scale)
    residual = None
    for i, attention in enumerate(attentions):
        here = f"layers.{i}."
        normed, residual = norm(x, f"{here}attention_norm", residual)
        qkv = ops.linear(normed, matrix(f"{here}qkv"))
        if spec.qk_norm:
            qkv = ops.head_norm(qkv, vector(f"{here}q_norm"), vector(f"{here}k_norm"), spec.norm_eps, attention)
        qkv = ops.rope(qkv, spec.layers[i].rope, attention)
        x = ops.attend(qkv, attention)
        if i == len(attentions) - 1:
            # After the last attention no token looks at another: the rest is needed only where logits are wanted.
            x, residual = ops.gather_logit_rows(x), ops.gather_logit_rows(residual)
        x = ops.linear(x, matrix(f"{here}o"))
        if spec.post_norms:
            x, _ = norm(x, f"{here}post_attention_norm")
        normed, residual = norm(x, f"{here}mlp_norm", residual)
        x = ops.linear(ops.gated(ops.linear(normed, matrix(f"{here}gate_up")), spec.activation), matrix(f"{here}down"))
        if spec.post_norms:
            x, _ = norm(x, f"{here}post_mlp_norm")
    normed, _ = norm(x, "norm", residual)
    ops.hidden_states(normed)
    return ops.logits(normed, matrix("head"), spec.logit_softcap)
