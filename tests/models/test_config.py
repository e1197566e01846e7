"""What a model's configuration means: rope scalings and the context they give, layer kinds, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from noria.models import gemma, llama
from noria.models.registry import family_of
from noria.models.spec import LayerSpec, layer_groups
from noria.types import LoadError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": [2, 7],
    "bos_token_id": 1,
}
GEMMA: dict[str, Any] = LLAMA | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 12,
    "head_dim": 32,
    "sliding_window": 512,
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_both_spellings_and_both_places_mean_the_same(kind: str, place: str, key: str) -> None:
    """Red when the older key, or the newer place, is ignored or leaves the limit at the original context."""
    spec = llama.spec_from_config(LLAMA | {place: {key: kind, "factor": 4.0} | (LLAMA3 if kind == "llama3" else {})})
    assert (spec.ropes[0].scaling, spec.ropes[0].factor, spec.context_length) == (kind, 4.0, 1024)


@pytest.mark.parametrize(
    ("positions", "scaling", "context"),
    [
        (131072, {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192} | LLAMA3, 131072),
        (32768, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (1024, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        (1024, {"type": "yarn", "original_max_position_embeddings": 256}, 1024),
        (256, {"rope_type": "default"}, 256),
        (256, None, 256),
    ],
)
def test_the_context_counts_the_scaling_once(positions: int, scaling: dict[str, Any] | None, context: int) -> None:
    """Red when a config whose limit is scaled already is scaled again, or the scaling is forgotten."""
    config = LLAMA | {"max_position_embeddings": positions, "rope_scaling": scaling}
    assert llama.spec_from_config(config).context_length == context


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, "depend on the total length"),
        ({"type": "dynamic", "factor": 4.0}, "depend on the total length"),
        ({"type": "longrope", "factor": 4.0}, "depend on the total length"),
        ({"type": "sideways", "factor": 4.0}, "unknown rope scaling 'sideways'"),
        ({"type": "linear", "factor": 0}, "must be at least 1"),
        ({"type": "linear", "factor": 0.5}, "must be at least 1"),
        ({"type": "linear", "factor": float("nan")}, "must be at least 1"),
        ({"type": "linear", "factor": "4"}, "must be a number"),
        ({"type": "linear"}, "no 'factor'"),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "low_freq_factor < high"),
        ({"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "whole heads"),
    ],
)
def test_a_scaling_that_cannot_be_honoured_is_refused(scaling: dict[str, Any], message: str) -> None:
    """Red when a scaling is ignored, or a wrong one is applied."""
    with pytest.raises(LoadError, match=message):
        llama.spec_from_config(LLAMA | {"rope_scaling": scaling})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"hidden_size": 0}, "must be a positive integer"),
        ({"hidden_size": "64"}, "must be a positive integer"),
        ({"vocab_size": True}, "must be a positive integer"),
        ({"hidden_act": "gelu"}, "'hidden_act' of 'gelu'"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"eos_token_id": [-1]}, "'eos_token_id'"),
        ({"partial_rotary_factor": 0.5}, "whole heads"),
        ({"rms_norm_eps": 0.0}, "epsilon"),
        ({"tie_word_embeddings": 1}, "must be true or false"),
    ],
)
def test_a_malformed_llama_config_is_one_clear_error(change: dict[str, Any], message: str) -> None:
    """Red when a bad value becomes a stack trace or a default."""
    with pytest.raises(LoadError, match=message):
        llama.spec_from_config(LLAMA | change)


def test_ids_of_both_forms() -> None:
    """Red when the second end-of-turn id is dropped, or a single id is not accepted."""
    assert llama.spec_from_config(LLAMA).eos_ids == (2, 7)
    assert llama.spec_from_config(LLAMA | {"eos_token_id": 5, "bos_token_id": None}).eos_ids == (5,)
    assert llama.spec_from_config(LLAMA | {"bos_token_id": None}).bos_id is None


def test_gemma_reads_old_and_new_places_of_its_two_ropes() -> None:
    """Red when the bases of full and sliding layers are mixed up, or the linear factor reaches the sliding ones."""
    linear = {"rope_type": "linear", "factor": 8.0}
    old = GEMMA | {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": linear}
    new = GEMMA | {
        "rope_parameters": {
            "full_attention": linear | {"rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        }
    }
    for config in (old, new):
        spec = gemma.spec_from_config(config)
        assert [(r.base, r.scaling, r.factor) for r in spec.ropes] == [(5e5, "linear", 8.0), (2e4, None, 1.0)]
        assert spec.context_length == 256
    assert [r.base for r in gemma.spec_from_config(GEMMA).ropes] == [1e6, 1e4]


def test_gemma_layers_slide_by_pattern_or_by_list() -> None:
    """Red when the sixth layer slides, or `layer_types` is ignored."""
    sliding, full = LayerSpec(window=512, rope=gemma.LOCAL), LayerSpec(rope=gemma.FULL)
    assert gemma.spec_from_config(GEMMA).layers == (*([sliding] * 5), full) * 2
    listed = GEMMA | {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
    assert gemma.spec_from_config(listed).layers == (full, sliding)
    groups = layer_groups(gemma.spec_from_config(GEMMA))
    assert [(g.window, len(g.layers)) for g in groups] == [(0, 2)] + [(512, 2)] * 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": {}}, "image encoder"),
        ({"use_bidirectional_attention": True}, "embedding models"),
        ({"layer_types": ["full_attention"]}, "must name 12 layers"),
        ({"layer_types": ["chunked_attention"] * 12}, "chunked_attention"),
        ({"hidden_activation": "silu"}, "'hidden_activation' of 'silu'"),
    ],
)
def test_a_gemma_config_that_cannot_be_honoured_is_refused(change: dict[str, Any], message: str) -> None:
    """Red when an unsupported variant is served as if it were the plain one."""
    with pytest.raises(LoadError, match=message):
        gemma.spec_from_config(GEMMA | change)


def test_the_registry_names_what_it_knows() -> None:
    """Red when an unknown model type is a KeyError, or a known one is not found."""
    assert family_of(LLAMA).spec_from_config is llama.spec_from_config
    assert family_of(GEMMA).params is gemma.params
    with pytest.raises(LoadError, match="'bert' is not supported; supported: llama"):
        family_of({"model_type": "bert"})
    with pytest.raises(LoadError, match="no 'model_type'"):
        family_of({})


def test_parameters_use_each_tensor_once() -> None:
    """Red when a tensor feeds two parameters, or a tied head claims the embedding's tensor."""
    for spec in (llama.spec_from_config(LLAMA | {"attention_bias": True}), gemma.spec_from_config(GEMMA)):
        listed = family_of({"model_type": "llama" if spec.family == "llama" else "gemma3"}).params(spec)
        names = [s.name for p in listed for s in (*p.sources, *p.biases)]
        assert len(names) == len(set(names))
        assert len({p.name for p in listed}) == len(listed)
        assert [p.alias_of for p in listed if p.name == "head"] == ["embed" if spec.tied_embeddings else ""]
