"""What a model wants from a checkpoint: the contract between a family file and the weight loader."""

from __future__ import annotations

from typing import Literal

import msgspec


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint tensor, by its Hugging Face name (the GGUF reader translates names).

    A matrix has shape (outputs, inputs), a vector (length,).
    """

    name: str
    shape: tuple[int, ...]
    gguf_heads: int = 0  # GGUF stores the rows of q and k of this many heads for interleaved rope: bring them back to halves
    safetensors_add: float = 0.0  # added to a vector read from safetensors (Gemma's norms are 1 + w there, w in GGUF)


class Param(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter of the model, made of one or more sources concatenated along the outputs."""

    name: str  # unique in the model: "layers.3.qkv", "embed", "norm"
    kind: Literal["matrix", "vector"]
    sources: tuple[Source, ...]
    biases: tuple[Source, ...] = ()  # beside `sources`, or none
    alias_of: str = ""  # the same weight as that parameter (tied head); then `sources` are redundant copies, used only to
    #                     check that they are equal where the checkpoint carries them
