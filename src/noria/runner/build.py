"""Building the tensor half: from settings to weights, and from weights to a runner."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec

from noria.backends.base import BLOCK_SIZE, Backend, Executable, Handle, KVCacheSpec, Ops
from noria.config import EngineConfig
from noria.models import rope
from noria.models.registry import Family, family_of
from noria.models.spec import ModelSpec, layer_groups
from noria.runner.draft_model import DraftModel
from noria.runner.ledger import MemoryLedger, available_memory, plan_memory
from noria.runner.rows import Rows
from noria.runner.runner import Runner
from noria.types import ConfigError
from noria.weights.checkpoint import Checkpoint, open_checkpoint
from noria.weights.formats import Weight
from noria.weights.hub import cache_directory, resolve_model
from noria.weights.packed import load_parameters, packed_key

DRAFT_TOKENS = 8192  # of a sequence that a draft model follows: what its rows have memory for
DRAFT_ROWS = 4  # rows that a draft model can follow at once: beside more, drafts seldom pay
NUMERICS_REVISION = 2  # raise it whenever the bits of a logit change: cached KV of another revision is another model's

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
    draft: LoadedModel | None = None  # a smaller model that guesses what this one will say


@dataclass(frozen=True)
class OpenedModel:
    """A model whose files have been found and checked, before its weights are read."""

    name: str
    checkpoint: Checkpoint
    family: Family
    spec: ModelSpec


def open_model(config: EngineConfig, report: Report) -> OpenedModel:
    """Find a model, or fetch it."""

    def pulled(done: int, total: int) -> None:
        report(f"fetching {config.model}: {_share(done, total)}")

    report(f"resolving {config.model}")
    cache = cache_directory(config.cache_dir)
    resolved = resolve_model(config.model, cache, offline=config.offline, progress=pulled)
    checkpoint = open_checkpoint(resolved.path)
    family = family_of(checkpoint.config)
    return OpenedModel(resolved.name, checkpoint, family, family.spec_from_config(checkpoint.config))


def load_model(config: EngineConfig, report: Report) -> LoadedModel:
    """Find, read and pack a model and its draft model, and divide the memory. LoadError or ConfigError say what to do."""
    available = available_memory()
    opened = open_model(config, report)
    draft = load_draft_model(config, opened, report)
    return _load(config, opened, report, available=available, draft=draft)


def _load(
    config: EngineConfig, opened: OpenedModel, report: Report, *, available: int, draft: LoadedModel | None = None
) -> LoadedModel:
    cache = cache_directory(config.cache_dir)
    checkpoint, family, spec = opened.checkpoint, opened.family, opened.spec
    params = family.params(spec)

    def packed(done: int, total: int) -> None:
        report(f"packing weights: {_share(done, total)}")

    report("loading weights")
    weights = load_parameters(checkpoint, params, config.quantization, cache, packed)

    def forward(ops: Ops) -> Handle:
        return family.forward(ops, spec, weights)

    return LoadedModel(
        name=opened.name,
        checkpoint=checkpoint,
        spec=spec,
        weights=weights,
        forward=forward,
        weights_key=packed_key(checkpoint, params, config.quantization, cache),
        ledger=plan_memory(
            config, spec, weights, forward, available=available, draft_model=0 if draft is None else draft.ledger.total
        ),
        draft=draft,
    )


def load_draft_model(config: EngineConfig, target: OpenedModel, report: Report) -> LoadedModel | None:
    """The model that `--speculative-config` names for drafts. ConfigError if its vocabulary is another one.

    It is loaded as its file is, and its few rows have room for a long sequence each, never shared.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.model is None:
        return None
    own = msgspec.structs.replace(
        config,
        model=speculative.model,
        speculative_config=None,
        quantization=None,
        max_model_len=None,
        max_num_seqs=draft_rows(config),
        long_prefill_token_threshold=0,
        async_depth=0,
        kv_cache_memory_bytes=None,
    )
    opened = open_model(own, report)
    spec = opened.spec
    if spec.vocab_size != target.spec.vocab_size:
        raise ConfigError(
            f"--speculative-config: the vocabulary of {opened.name} has {spec.vocab_size} tokens, and that of {target.name} "
            f"{target.spec.vocab_size}: a draft model needs the same vocabulary"
        )
    length = min(
        spec.context_length, config.max_model_len or target.spec.context_length, target.spec.context_length, DRAFT_TOKENS
    )
    own = msgspec.structs.replace(own, max_model_len=length)
    model = _load(own, opened, report, available=available_memory())
    blocks = own.max_num_seqs * len(layer_groups(spec)) * -(-length // BLOCK_SIZE) + 1
    ledger = replace(model.ledger, max_model_len=length, num_blocks=blocks, kv_cache=blocks * model.ledger.block_bytes)
    return replace(model, ledger=ledger)


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
    draft = None if model.draft is None else build_draft_model(config, model.draft)
    return Runner(executable, backend, step_tables(config, model), depth=config.async_depth, draft=draft), backend


def draft_rows(config: EngineConfig) -> int:
    """How many rows a draft model follows at once."""
    return min(DRAFT_ROWS, config.max_num_seqs)


def build_draft_model(config: EngineConfig, model: LoadedModel) -> DraftModel:
    """The draft model with a backend and a cache of its own."""
    own = msgspec.structs.replace(config, max_num_seqs=draft_rows(config))
    executable, backend = build_executable(own, model)
    return DraftModel(executable, backend, step_tables(own, model), max_tokens=own.max_num_batched_tokens)


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
