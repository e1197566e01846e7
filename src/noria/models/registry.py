"""The model families. A new family is one file and one line here (docs/adding-a-model.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from noria.backends.base import Handle, Ops
from noria.models import decoder, gemma, llama
from noria.models.spec import ModelSpec
from noria.types import LoadError
from noria.weights.formats import Weight
from noria.weights.params import Param


@dataclass(frozen=True)
class Family:
    """One architecture. `spec_from_config` takes the keys of a Hugging Face config.json, to which GGUF is translated."""

    model_types: tuple[str, ...]  # `model_type` of config.json
    spec_from_config: Callable[[Mapping[str, Any]], ModelSpec]
    params: Callable[[ModelSpec], list[Param]]
    forward: Callable[[Ops, ModelSpec, Mapping[str, Weight]], Handle] = decoder.forward


FAMILIES = (
    Family(("llama",), llama.spec_from_config, llama.params),
    Family(("gemma3_text", "gemma3"), gemma.spec_from_config, gemma.params),
)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that a config names; `LoadError` where there is none."""
    model_type = config.get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(t for family in FAMILIES for t in family.model_types)
    if model_type is None:
        raise LoadError(f"the model's config has no 'model_type'; supported: {known}")
    raise LoadError(f"model type '{model_type}' is not supported; supported: {known}")
