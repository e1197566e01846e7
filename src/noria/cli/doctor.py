"""noria doctor: what was found on this machine, and, for a model, how its memory and its work divide."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from noria.cli.flags import add_flags, settings
from noria.config import EngineConfig
from noria.types import ConfigError, NoriaError

if TYPE_CHECKING:
    from noria.runner.build import LoadedModel

PACKAGES = ("numpy", "msgspec", "pyzmq", "tokenizers", "jinja2", "orjson", "starlette", "uvicorn", "uvloop")
NO_MODEL = "none"
CONTEXT = 1024  # tokens before the one whose cost the op table shows

Row = tuple[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """An optional MODEL, and the engine's settings: they change the ledger."""
    add_flags(parser, EngineConfig)
    parser.add_argument(
        "--startup", action="store_true", help="start a server with these settings and tell where the time goes"
    )


def run(arguments: argparse.Namespace) -> int:
    """0 if a model could be served here, 1 if something that it needs is missing."""
    without_model = arguments.model is None and arguments.config is None
    if without_model:
        arguments.model = NO_MODEL
    (config,) = settings(arguments, EngineConfig)
    assert isinstance(config, EngineConfig)
    if arguments.startup:
        if without_model:
            raise ConfigError("--startup starts a server: name its model")
        return _startup(config)
    code = 0
    for title, rows in (("Noria", _versions()), ("Processor", _processor(config)), ("Storage", _storage(config))):
        try:
            _section(title, list(rows))
        except NoriaError as error:
            _section(title, [("problem", str(error))])
            code = 1
    if not without_model:
        _model(config)
    return code


def _startup(config: EngineConfig) -> int:
    from noria.bench.startup import measure_start, table

    stages = measure_start(config)
    print("Start of a server, seconds since its process was made")
    for line in table(stages).splitlines():
        print(f"  {line}")
    return 0


def _section(title: str, rows: list[Row]) -> None:
    print(title)
    for name, value in rows:
        print(f"  {name:<18}{value}")


def _versions() -> Iterator[Row]:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    from noria.observe.version import version

    yield "version", version()
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {installed(package)}")
        except PackageNotFoundError:
            found.append(f"{package} MISSING")
    yield "packages", ", ".join(found)


def _processor(config: EngineConfig) -> Iterator[Row]:
    from noria.backends.cpu import _native
    from noria.backends.cpu.topology import cpu_name, cpu_quota, usable_threads

    try:
        tier = _native.best_tier(config.cpu_tier)
    except ValueError as error:
        raise NoriaError(str(error)) from None
    yield "name", cpu_name()
    yield "kernels", f"{tier} (this machine can run {', '.join(_native.available_tiers())})"
    quota = cpu_quota()
    limit = "" if quota == float("inf") else f", the control group grants {quota:g} CPUs"
    yield "threads", f"{config.threads or usable_threads()} (physical cores we may use: {usable_threads()}{limit})"


def _storage(config: EngineConfig) -> Iterator[Row]:
    import shutil

    from noria.runner.ledger import available_memory
    from noria.weights.hub import cache_directory, stored_models

    cache = cache_directory(config.cache_dir)
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    yield "memory", f"{available_memory() / 2**30:.2f} GiB available"
    yield "cache", f"{cache} ({shutil.disk_usage(existing).free / 2**30:.1f} GiB free)"
    yield "models", ", ".join(model.name for model in stored_models(cache)) or "none; noria pull fetches one"


def _model(config: EngineConfig) -> None:
    """The model's shape, the memory it would take, and what one token of decoding costs, by op."""
    from noria.runner.build import load_model

    model = load_model(config, lambda stage: print(f"noria: {stage}", file=sys.stderr))
    spec = model.spec
    shape = f"{spec.family}, {len(spec.layers)} layers, width {spec.hidden_size}, context {spec.context_length}"
    _section("Model", [("name", model.name), ("shape", shape), ("vocabulary", str(spec.vocab_size))])
    print("Memory")
    for line in str(model.ledger).splitlines():
        print(f"  {line}")
    print(f"Operations of one token after {min(CONTEXT, model.ledger.max_model_len - 1)} others")
    for line in _op_table(model).splitlines():
        print(f"  {line}")


def _op_table(model: LoadedModel) -> str:
    """The cost of decoding one token, counted by the cost backend over a plan of one row."""
    from noria.backends.base import BLOCK_SIZE, KVCacheSpec
    from noria.backends.cost.backend import CostBackend, op_table
    from noria.core.plan import NewRow, PlanRow, StepPlan
    from noria.models.spec import layer_groups
    from noria.runner.inputs import step_inputs
    from noria.runner.rows import Rows
    from noria.types import SamplingParams

    spec, length = model.spec, min(CONTEXT, model.ledger.max_model_len - 1)
    groups = layer_groups(spec)
    blocks = length // BLOCK_SIZE + 1
    kv = KVCacheSpec(
        groups=groups,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=model.ledger.kv_dtype,
        num_blocks=blocks * len(groups) + 1,
        max_blocks_per_row=blocks,
    )
    executable = CostBackend().build(model.forward, ropes=(), kv=kv, max_tokens=1, max_rows=1, vocab_size=spec.vocab_size)
    rows = Rows(1, length + 1, len(groups), blocks)
    new = NewRow(
        row=0,
        tokens=(0,) * (length + 1),
        prompt_length=length,
        blocks=(tuple(range(1, blocks + 1)),) * len(groups),
        params=SamplingParams(),
        seed=0,
        stop_ids=(),
    )
    planned = PlanRow(row=0, start=length, count=1, tokens=(), samples=1)
    rows.take(new)
    inputs, _ = step_inputs(StepPlan(step=0, new_rows=(new,), rows=(planned,)), rows)
    return op_table(executable.cost(inputs).by_op)
