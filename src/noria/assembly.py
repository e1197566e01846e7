"""`build_engine(config)`: joins the decision half and the tensor half into an engine that is ready to serve."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from noria.backends.base import BLOCK_SIZE, Backend
from noria.config import EngineConfig
from noria.core.asking import DraftFacts
from noria.core.engine import Engine
from noria.core.prices import Prices, guess_prices, keep_prices, load_prices
from noria.models.spec import ModelSpec, layer_groups
from noria.runner.build import LoadedModel, build_runner, draft_rows, load_model, model_tag
from noria.runner.ledger import MemoryLedger
from noria.weights.checkpoint import Checkpoint
from noria.weights.hub import cache_directory


@dataclass(frozen=True)
class BuiltEngine:
    """An engine, and what its shell has to know about it. `engine.max_model_len` is the longest prompt + output."""

    engine: Engine
    name: str  # how clients call the model by default
    spec: ModelSpec
    checkpoint: Checkpoint  # tokenizer, chat template and generation defaults
    ledger: MemoryLedger
    backend: Backend
    model_tag: bytes  # names weights, shape, KV type, backend and numerics revision

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a turn or a text: the configuration's and the generation configuration's."""
        declared = self.checkpoint.generation_config["eos_token_id"]
        return tuple(dict.fromkeys((*self.spec.eos_ids, *declared)))


def build_engine(config: EngineConfig, *, progress: Callable[[str], None] | None = None) -> BuiltEngine:
    """Find, load and build the model of `config`. `progress` is told each stage of the start, for a person.

    LoadError where the model cannot be loaded, ConfigError where a setting cannot be honoured.
    """
    report = progress or (lambda stage: None)
    model = load_model(config, report)
    report("building the model")
    runner, backend = build_runner(config, model)
    tag = model_tag(model, backend.name)
    known = _prices_file(config, tag)
    engine = Engine(
        config,
        max_model_len=model.ledger.max_model_len,
        groups=layer_groups(model.spec),
        num_blocks=model.ledger.num_blocks,
        model_tag=tag,
        runner=runner,
        prices=load_prices(known) or _guess(model),
        draft_model=_facts(config, model),
        keep_prices=lambda prices: keep_prices(known, prices),
    )
    return BuiltEngine(engine, model.name, model.spec, model.checkpoint, model.ledger, backend, tag)


def _prices_file(config: EngineConfig, tag: bytes) -> Path:
    """Where the prices of this model's steps are kept, beside the packed weights, for equal settings of the kernels."""
    kernels = f"{config.threads} {config.cpu_tier}".encode()
    name = hashlib.blake2b(tag + kernels, digest_size=16).hexdigest()
    return cache_directory(config.cache_dir) / "prices" / f"{name}.json"


def _facts(config: EngineConfig, model: LoadedModel) -> DraftFacts | None:
    if model.draft is None:
        return None
    return DraftFacts(model.draft.ledger.weights / model.ledger.weights, draft_rows(config))


def _guess(model: LoadedModel) -> Prices:
    position_bytes = model.ledger.block_bytes * len(layer_groups(model.spec)) / BLOCK_SIZE
    return guess_prices(model.spec, model.ledger.weights, position_bytes)
