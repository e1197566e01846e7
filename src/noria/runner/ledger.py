"""The memory ledger: what an engine will hold, decided once at start, so that memory never runs out later.

    available = weights + workspace + tables + KV cache + rest

The rest is left to the operating system, the tokenizer and other programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from noria.backends.base import BLOCK_SIZE, Handle, KVCacheSpec, KVType, Ops
from noria.backends.cost.backend import CostBackend
from noria.config import EngineConfig
from noria.models.spec import LayerGroup, ModelSpec, layer_groups
from noria.types import ConfigError
from noria.weights.formats import LinearWeight, Weight

WORKSPACE_MARGIN = 1.5  # an activation may have a quantised form beside it, and a backend scratch memory of its own
KV_SHARE = 0.4  # of the memory left after weights and workspace; the page cache and other programs keep the larger part


@dataclass(frozen=True)
class MemoryLedger:
    """Bytes by purpose, and the sizes that follow from them."""

    available: int
    weights: int
    workspace: int
    tables: int
    kv_cache: int
    block_bytes: int
    num_blocks: int  # the null block included
    max_model_len: int
    kv_dtype: KVType
    kv_tokens: int  # tokens of one sequence that the blocks hold
    draft_model: int = 0  # all that a draft model holds

    @property
    def total(self) -> int:
        """Bytes of all purposes."""
        return self.weights + self.workspace + self.tables + self.kv_cache + self.draft_model

    def __str__(self) -> str:
        """A table for people."""
        rows = [
            ("weights", self.weights, ""),
            ("workspace", self.workspace, ""),
            ("rope and token tables", self.tables, ""),
            ("KV cache", self.kv_cache, f"{self.num_blocks} blocks of {_size(self.block_bytes)}, {self.kv_dtype}"),
            *([("draft model", self.draft_model, "weights, workspace, tables and KV cache")] if self.draft_model else []),
            ("total", self.total, f"of {_size(self.available)} available"),
        ]
        lines = [f"{name:<22}{_size(size):>12}  {note}".rstrip() for name, size, note in rows]
        held = f"one sequence of {self.kv_tokens} tokens; max_model_len is {self.max_model_len}"
        return "\n".join([*lines, f"{'':<22}{'':>12}  the KV cache holds {held}"])


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process may still use: what the kernel calls available, less where a control group sets a lower limit."""
    found = [_meminfo(root / "proc/meminfo")]
    groups = root / "sys/fs/cgroup"
    for directory in _own_cgroups(root, groups):
        limit = _number(directory / "memory.max")
        used = _number(directory / "memory.current")
        if limit is not None and used is not None:
            found.append(limit - used + _reclaimable(directory / "memory.stat", "inactive_file"))
    limit, used = _number(groups / "memory/memory.limit_in_bytes"), _number(groups / "memory/memory.usage_in_bytes")
    if limit is not None and used is not None:  # version 1
        found.append(limit - used + _reclaimable(groups / "memory/memory.stat", "total_inactive_file"))
    return max(0, min(found))


def _own_cgroups(root: Path, groups: Path) -> list[Path]:
    """The version 2 group of this process and its ancestors: each may set a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        if line.startswith("0::"):
            own = groups / line.removeprefix("0::").strip().lstrip("/")
            return [d for d in (own, *own.parents) if d.is_relative_to(groups)]
    return []


def _meminfo(path: Path) -> int:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    raise ConfigError("cannot tell how much memory is free on this system: set --kv-cache-memory-bytes")


def _number(path: Path) -> int | None:
    """The integer in a file; None where there is no file or no limit ("max")."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(path: Path, key: str) -> int:
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get(key, 0))


# -- blocks ------------------------------------------------------------------------------------------------------------


def blocks_for(groups: tuple[LayerGroup, ...], length: int, max_chunk: int) -> int:
    """Blocks that one sequence of `length` tokens holds at most, all groups together, as `kv.cache` hands them out.

    A window group holds the keys in reach of the next query and the chunk in flight: consecutive positions, which may begin
    inside a block and end inside another.
    """
    whole = -(-length // BLOCK_SIZE)
    total = 0
    for group in groups:
        touched = (group.window - 1 + max_chunk - 2) // BLOCK_SIZE + 2
        total += min(whole, touched) if group.window else whole
    return total


def longest_sequence(groups: tuple[LayerGroup, ...], num_blocks: int, limit: int, max_chunk: int) -> int:
    """The most tokens, up to `limit`, of one sequence whose blocks are at most `num_blocks`. 0 if not even one fits."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_for(groups, middle, max_chunk) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


# -- the decision ------------------------------------------------------------------------------------------------------


def plan_memory(
    config: EngineConfig,
    spec: ModelSpec,
    weights: Mapping[str, Weight],
    forward: Callable[[Ops], Handle],
    *,
    available: int,
    draft_model: int = 0,
) -> MemoryLedger:
    """Divide `available` bytes (measured before the weights are touched), of which a draft model holds `draft_model`.

    ConfigError where the settings cannot be met.
    """
    groups = layer_groups(spec)
    dtype: KVType = "bf16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    length = min(config.max_model_len or spec.context_length, spec.context_length)
    if config.max_model_len and config.max_model_len > spec.context_length:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the model's context of {spec.context_length} tokens; "
            "lower --max-model-len"
        )
    chunk = min(config.max_num_batched_tokens, config.long_prefill_token_threshold or config.max_num_batched_tokens)
    max_chunk = chunk * (1 + config.async_depth)  # tokens of one sequence in flight
    shape = KVCacheSpec(
        groups=groups,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        num_blocks=0,
        max_blocks_per_row=-(-length // BLOCK_SIZE),
    )
    weight_bytes = _weight_bytes(weights)
    workspace = _workspace_bytes(config, spec, forward, shape)
    tables = length * sum(4 * rope.dim for rope in spec.ropes) + config.max_num_seqs * length * 5
    left = available - weight_bytes - workspace - tables - draft_model
    wanted = config.max_num_seqs * blocks_for(groups, length, max_chunk) + 1
    if config.kv_cache_memory_bytes is not None:
        budget = config.kv_cache_memory_bytes
        if budget > left:
            raise ConfigError(
                f"kv_cache_memory_bytes {_size(budget)} is more than the {_size(max(left, 0))} left beside the weights "
                f"({_size(weight_bytes)}) and workspace ({_size(workspace)}); lower --kv-cache-memory-bytes"
            )
    else:
        budget = int(max(left, 0) * KV_SHARE)
    num_blocks = min(budget // shape.block_bytes, wanted)
    fits = longest_sequence(groups, num_blocks - 1, length, max_chunk)
    if fits < min(length, BLOCK_SIZE) or (config.max_model_len and fits < length):
        need = (blocks_for(groups, length, max_chunk) + 1) * shape.block_bytes
        remedy = f"set --max-model-len to at most {fits}, or raise" if fits else "raise"
        raise ConfigError(
            f"a sequence of {length} tokens needs {_size(need)} of KV cache and there are {_size(budget)}: "
            f"{remedy} --kv-cache-memory-bytes"
        )
    return MemoryLedger(
        available=available,
        weights=weight_bytes,
        workspace=workspace,
        tables=tables,
        kv_cache=num_blocks * shape.block_bytes,
        block_bytes=shape.block_bytes,
        num_blocks=num_blocks,
        max_model_len=fits,
        kv_dtype=dtype,
        kv_tokens=longest_sequence(groups, num_blocks - 1, 1 << 40, max_chunk),
        draft_model=draft_model,
    )


def _weight_bytes(weights: Mapping[str, Weight]) -> int:
    """Each weight once, however many names it has."""
    distinct = {id(weight): weight for weight in weights.values()}.values()
    return sum(w.nbytes if isinstance(w, LinearWeight) else w.data.nbytes for w in distinct)


def _workspace_bytes(config: EngineConfig, spec: ModelSpec, forward: Callable[[Ops], Handle], kv: KVCacheSpec) -> int:
    executable = CostBackend().build(
        forward,
        ropes=(),
        kv=kv,
        max_tokens=config.max_num_batched_tokens,
        max_rows=config.max_num_seqs,
        vocab_size=spec.vocab_size,
    )
    return int(WORKSPACE_MARGIN * executable.workspace_bytes(config.max_num_batched_tokens))
