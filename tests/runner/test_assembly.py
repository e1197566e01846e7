"""`build_engine`: from settings to an engine that generates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from noria.assembly import BuiltEngine, build_engine
from noria.config import EngineConfig
from noria.types import ConfigError, EngineRequest, FinishReason, LoadError, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-gemma"
    tiny.gemma(eos_token_id=[1, 7]).save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 9]}))
    return path


def config(folder: Path, **settings: Any) -> EngineConfig:
    defaults = {"cache_dir": str(folder.parent / "cache"), "threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return EngineConfig(model=str(folder), **defaults | settings)


def generate(built: BuiltEngine, **params: Any) -> tuple[list[int], FinishReason | None]:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "seed": 0} | params)
    built.engine.add(EngineRequest(request_id=1, prompt=tuple(range(40, 70)), params=sampling))
    tokens: list[int] = []
    reason = None
    while built.engine.has_work:
        for output in built.engine.step():
            tokens += output.tokens
            reason = output.finish_reason
    built.engine.close()
    return tokens, reason


def test_it_generates_and_says_what_it_built(folder: Path) -> None:
    """Red when a part of the start is left out: stages, ledger, end ids of both files, name, the length that is served."""
    stages: list[str] = []
    built = build_engine(config(folder, quantization="f32"), progress=stages.append)
    assert built.name == "tiny-gemma"
    assert set(built.eos_ids) == {1, 7, 9}
    assert built.engine.max_model_len == built.ledger.max_model_len == 256
    assert built.backend.name == "cpu"
    assert [s for s in stages if "%" not in s] == [f"resolving {folder}", "loading weights", "building the model"]
    assert built.checkpoint.path == folder
    tokens, reason = generate(built)
    assert (len(tokens), reason) == (20, FinishReason.LENGTH)


def test_backends_and_depths_agree(folder: Path) -> None:
    """Red when a setting that must not change the answer does: the reference, the kernels, a step planned ahead."""
    variants = ({"backend": "torch"}, {}, {"async_depth": 1}, {"max_num_batched_tokens": 16, "threads": 2})
    answers = [generate(build_engine(config(folder, quantization="f32", kv_cache_dtype="f32", **v))) for v in variants]
    assert all(answer == answers[0] for answer in answers)


def test_the_model_tag_names_what_determines_kv(folder: Path) -> None:
    """Red when cached blocks of other weights or types would be taken for ours, or a mere setting empties the cache."""

    def tag(**settings: Any) -> bytes:
        built = build_engine(config(folder, **settings))
        built.engine.close()
        return built.model_tag

    base = tag()
    assert tag(threads=2, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=100, async_depth=1) == base
    assert tag(cpu_tier="generic") == base
    different = [tag(quantization="q8"), tag(quantization="f32"), tag(kv_cache_dtype="f32"), tag(backend="torch")]
    assert len({base, *different}) == 5


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"backend": "torch", "cpu_tier": "avx2"}, ConfigError, "--cpu-tier"),
        ({"max_model_len": 300}, ConfigError, "context of 256"),
        ({"kv_cache_memory_bytes": 100}, ConfigError, "--kv-cache-memory-bytes"),
        ({"model": "/no/such/model"}, LoadError, "no such file"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    folder: Path, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Red when an option is silently ignored."""
    changed = dict(settings)
    model = Path(changed.pop("model", folder))
    with pytest.raises(error, match=message):
        build_engine(EngineConfig(model=str(model), cache_dir=str(folder.parent / "cache"), **changed))


def test_the_length_shrinks_to_what_the_memory_holds(folder: Path) -> None:
    """Red when a default length is promised that one sequence cannot reach, or the longest one does not finish."""
    built = build_engine(config(folder, kv_cache_memory_bytes=26 * 2 * 16 * 32 * 2, max_num_batched_tokens=16))
    longest = built.engine.max_model_len
    assert 64 <= longest < 256
    assert longest == built.ledger.max_model_len
    tokens, reason = generate(built, max_tokens=None)
    assert (len(tokens), reason) == (longest - 30, FinishReason.LENGTH)


@pytest.mark.parametrize(("scaling", "limit"), [("linear", 256), ("yarn", 256)])
def test_a_scaled_rope_raises_the_limit(scaling: str, limit: int, tmp_path: Path) -> None:
    """Red when a model of 64 positions scaled by 4 is served with 64."""
    tiny.llama(max_position_embeddings=64, rope_scaling={"rope_type": scaling, "factor": 4.0}).save_pretrained(tmp_path)
    built = build_engine(EngineConfig(model=str(tmp_path), cache_dir=str(tmp_path / "cache"), threads=1, max_num_seqs=2))
    assert built.engine.max_model_len == limit
    built.engine.close()


def test_the_next_run_starts_with_what_this_one_learned(folder: Path) -> None:
    """Red when prices are kept under a name that another model or other kernels use too, or are not read again."""
    first = build_engine(config(folder))
    guess = first.engine.scheduler.costs.prices
    assert not guess.measured
    generate(first, max_tokens=150, stop_token_ids=())
    learned = first.engine.scheduler.costs.prices
    again = build_engine(config(folder)).engine.scheduler.costs.prices
    assert again.measured
    assert again.tokens == pytest.approx(learned.tokens)
    assert build_engine(config(folder, threads=2)).engine.scheduler.costs.prices.tokens == guess.tokens
