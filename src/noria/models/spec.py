"""ModelSpec: everything the rest of Noria needs to know about an architecture's shape. A frozen value without tensors."""

from __future__ import annotations

from typing import Literal

import msgspec


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding of one kind of layer. `scaling` is None or one of the kinds that depend on no total length."""

    base: float
    dim: int  # rotated dimensions of a head
    scaling: Literal["linear", "yarn", "llama3"] | None = None
    factor: float = 1.0
    original_context: int = 0
    # yarn
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True  # round the ramp's ends to whole dimensions
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    frequency_factors: tuple[float, ...] = ()  # GGUF `rope_freqs.weight`: divides each frequency, if given


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder layer's attention kind."""

    window: int = 0  # 0: full attention; else a query at p sees keys in (p - window, p]
    rope: int = 0  # index into ModelSpec.ropes


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a decoder-only model."""

    family: str
    name: str = ""
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    context_length: int  # with rope scaling applied
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    activation: Literal["silu", "gelu_tanh"] = "silu"
    attention_scale: float = 0.0  # factor of q.k; 0: head_dim ** -0.5
    attention_softcap: float = 0.0  # 0: none
    logit_softcap: float = 0.0
    embed_scale: float = 1.0
    qk_norm: bool = False
    post_norms: bool = False  # Gemma: norms after attention and after the MLP
    attention_bias: bool = False
    mlp_bias: bool = False
    tied_embeddings: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    @property
    def scale(self) -> float:
        return self.attention_scale or self.head_dim**-0.5


class LayerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share a block table. Every group has the same number of layer slots, so blocks are interchangeable.

    `layers[slot]` is the model layer at that slot of a block; -1 is padding.
    """

    window: int  # 0: full attention
    layers: tuple[int, ...]


def layer_groups(spec: ModelSpec) -> tuple[LayerGroup, ...]:
    """Divide the layers into groups of equal size, each of one kind: full-attention groups first, then window groups.

    The size of a group is the number of layers of the rarest kind (Gemma 3 270M: 3 full and 15 sliding layers give one
    full group and five window groups of 3 layers each). A last group that is short is padded with -1.
    """
    by_window: dict[int, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        by_window.setdefault(layer.window, []).append(index)
    size = min(len(indices) for indices in by_window.values())
    groups = []
    for window in sorted(by_window):  # 0, full attention, comes first
        indices = by_window[window]
        for first in range(0, len(indices), size):
            chunk = indices[first : first + size]
            groups.append(LayerGroup(window=window, layers=tuple(chunk + [-1] * (size - len(chunk)))))
    return tuple(groups)
