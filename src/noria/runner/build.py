"""Building the tensor half: from settings to weights, and from weights to a runner."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from noria.backends.base import BLOCK_SIZE, Backend, Executable, Handle, KVCacheSpec, Ops
from noria.config import EngineConfig
from noria.models import rope
from noria.models.registry import family_of
from noria.models.spec import ModelSpec, layer_groups
from noria.runner.ledger import MemoryLedger, available_memory, plan_memory
from noria.runner.rows import Rows
from noria.runner.runner import Runner
from noria.types import ConfigError
from noria.weights.checkpoint import Checkpoint, open_checkpoint
from noria.weights.formats import Weight
from noria.weights.hub import cache_directory, resolve_model
from noria.weights.packed import load_parameters, packed_key

NUMERICS_REVISION = 1  # raise it whenever the bits of a logit change: cached KV of another revision is another model's

Report = Callable[[str], None]  # a stage of the start, for a person


@dataclass(frozen=True)
class LoadedModel:
    """A model whose weights are packed and mapped, and the memory that its engine will use."""

    name: str  # how clients call it by default
    checkpoint: Checkpoint
    spec: ModelSpec
    weights: Mapping[str, Weight]
    forward: Callable[[Ops], Handle]
    weights_key: str  # names the packed weights by content
    ledger: MemoryLedger


def load_model(config: EngineConfig, report: Report) -> LoadedModel:
    """Find, read and pack a model, and divide the memory. LoadError or ConfigError say what to do."""
    cache = cache_directory(config.cache_dir)
    available = available_memory()

    def pulled(done: int, total: int) -> None:
        report(f"fetching {config.model}: {_share(done, total)}")

    def packed(done: int, total: int) -> None:
        report(f"packing weights: {_share(done, total)}")

    report(f"resolving {config.model}")
    resolved = resolve_model(config.model, cache, offline=config.offline, progress=pulled)
    checkpoint = open_checkpoint(resolved.path)
    family = family_of(checkpoint.config)
    spec = family.spec_from_config(checkpoint.config)
    params = family.params(spec)
    report("loading weights")
    weights = load_parameters(checkpoint, params, config.quantization, cache, packed)

    def forward(ops: Ops) -> Handle:
        return family.forward(ops, spec, weights)

    return LoadedModel(
        name=resolved.name,
        checkpoint=checkpoint,
        spec=spec,
        weights=weights,
        forward=forward,
        weights_key=packed_key(checkpoint, params, config.quantization, cache),
        ledger=plan_memory(config, spec, weights, forward, available=available),
    )


def _share(done: int, total: int) -> str:
    return f"{100 * done // max(total, 1)} % of {total / 2**20:.0f} MiB"


def model_tag(model: LoadedModel, backend: str) -> bytes:
    """What every block key of this engine starts from: all that determines the KV of a token, and nothing else.

    Not among it: threads, instruction-set tier, batch sizes. By the numerics contract they change no bit.
    """
    parts = [NUMERICS_REVISION, model.weights_key, model.spec, model.ledger.kv_dtype, backend]
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).digest()


def build_runner(config: EngineConfig, model: LoadedModel) -> tuple[Runner, Backend]:
    """Allocate the KV cache and record the forward pass on the backend that the settings name."""
    executable, backend = build_executable(config, model)
    return Runner(executable, backend, step_tables(config, model), depth=config.async_depth), backend


def build_executable(config: EngineConfig, model: LoadedModel) -> tuple[Executable, Backend]:
    """The recorded forward pass with its cache, without a runner: what measurements drive step by step."""
    spec, ledger = model.spec, model.ledger
    backend = make_backend(config)
    executable = backend.build(
        model.forward,
        ropes=[rope.tables(r, ledger.max_model_len) for r in spec.ropes],
        kv=KVCacheSpec(
            groups=layer_groups(spec),
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=ledger.kv_dtype,
            num_blocks=ledger.num_blocks,
            max_blocks_per_row=_blocks_per_row(ledger),
        ),
        max_tokens=config.max_num_batched_tokens,
        max_rows=config.max_num_seqs,
        vocab_size=spec.vocab_size,
    )
    return executable, backend


def step_tables(config: EngineConfig, model: LoadedModel) -> Rows:
    """The empty tables of the rows that such an executable may run at once."""
    ledger = model.ledger
    groups = len(layer_groups(model.spec))
    width = _blocks_per_row(ledger)
    return Rows(config.max_num_seqs, ledger.max_model_len, groups, width, vocab_size=model.spec.vocab_size)


def _blocks_per_row(ledger: MemoryLedger) -> int:
    return -(-ledger.max_model_len // BLOCK_SIZE)


def make_backend(config: EngineConfig) -> Backend:
    """The backend object, without a model yet. Its library is imported here, not before."""
    if config.backend == "cpu":
        cpu = importlib.import_module("noria.backends.cpu.backend")
        backend: Backend = cpu.CpuBackend(threads=config.threads, tier=config.cpu_tier)
        return backend
    if config.cpu_tier != "auto":
        raise ConfigError("--cpu-tier chooses kernels of the cpu backend; leave it out with --backend torch")
    try:
        reference = importlib.import_module("noria.backends.torch.backend")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError("--backend torch needs torch, a test extra: pip install 'noria[test]'") from None
    backend = reference.TorchBackend(threads=config.threads)
    return backend
