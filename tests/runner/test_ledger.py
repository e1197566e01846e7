"""The memory ledger: what is available, what is divided, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
from noria.backends.cpu.backend import CpuBackend, CpuExecutable
from noria.config import EngineConfig
from noria.kv.cache import KVCache
from noria.models import gemma, llama
from noria.models.spec import LayerGroup, layer_groups
from noria.runner.ledger import MemoryLedger, available_memory, blocks_for, longest_sequence, plan_memory
from noria.types import ConfigError

GIB = 1 << 30


@pytest.fixture(scope="module")
def loaded() -> tiny.Loaded:
    return tiny.random_model(tiny.GEMMA_SHAPE, "q8")


def ledger(loaded: tiny.Loaded, available: int = GIB, **settings: Any) -> MemoryLedger:
    config = EngineConfig(model="tiny", **{"max_num_seqs": 4, "max_num_batched_tokens": 32} | settings)
    return plan_memory(
        config, loaded.spec, loaded.weights, lambda ops: loaded.forward(ops, loaded.spec, loaded.weights), available=available
    )


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_control_group_limits_what_is_available(tmp_path: Path) -> None:
    """Red when a container's limit, its parent's limit, or the reclaimable page cache inside it is not counted."""
    write(tmp_path, proc__meminfo=f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    assert available_memory(tmp_path) == 8 * GIB
    write(tmp_path, proc__self__cgroup="0::/pod/app\n")
    group = "sys__fs__cgroup__pod__app__memory"
    write(tmp_path, **{f"{group}.max": "max", f"{group}.current": "1000"})
    assert available_memory(tmp_path) == 8 * GIB
    write(tmp_path, **{f"{group}.max": f"{2 * GIB}", f"{group}.stat": "anon 5\ninactive_file 300\n"})
    assert available_memory(tmp_path) == 2 * GIB - 1000 + 300
    parent = "sys__fs__cgroup__pod__memory"
    write(tmp_path, **{f"{parent}.max": f"{GIB}", f"{parent}.current": f"{GIB + 5}"})
    assert available_memory(tmp_path) == 0


def test_version_1_control_groups(tmp_path: Path) -> None:
    """Red when an older container's limit is ignored."""
    write(tmp_path, proc__meminfo=f"MemAvailable: {8 * GIB // 1024} kB\n")
    group = "sys__fs__cgroup__memory__memory"
    write(tmp_path, **{f"{group}.limit_in_bytes": f"{GIB}", f"{group}.usage_in_bytes": "24"})
    assert available_memory(tmp_path) == GIB - 24


def test_without_a_way_to_tell_the_setting_is_asked_for(tmp_path: Path) -> None:
    """Red when an unknown system is given a made-up number."""
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        available_memory(tmp_path)


@pytest.mark.parametrize("chunk", [1, 16, 17, 100])
def test_block_needs_agree_with_the_cache_that_hands_them_out(chunk: int) -> None:
    """Red when the ledger promises a length that the block pool cannot hold, or the reverse."""
    spec = gemma.spec_from_config(tiny.GEMMA_SHAPE)
    for groups in (layer_groups(spec), (LayerGroup(window=0, layers=(0,)),), (LayerGroup(window=1, layers=(0,)),)):
        for blocks in (2, 7, 30):
            cache = KVCache(groups, blocks, b"", prefix_caching=False, max_chunk=chunk)
            assert cache.longest(999) == longest_sequence(groups, blocks - 1, 999, chunk)
            for length in (1, 16, 17, 300):
                assert cache.peak_blocks(length) == blocks_for(groups, length, chunk)


def test_the_default_is_a_share_of_what_is_left_and_no_more_than_can_be_used(loaded: tiny.Loaded) -> None:
    """Red when a small model takes memory that its rows can never fill, or a large one takes all there is."""
    plenty = ledger(loaded)
    assert plenty.max_model_len == 256
    assert plenty.num_blocks == 4 * blocks_for(layer_groups(loaded.spec), 256, 32) + 1
    scarce = ledger(loaded, available=plenty.weights + plenty.workspace + plenty.tables + 100_000)
    assert scarce.kv_cache <= 40_000
    assert scarce.max_model_len < 256


def test_parts_add_up(loaded: tiny.Loaded) -> None:
    """Red when a tied weight is counted twice, a block has another size than the backend's, or the table hides a part."""
    whole = ledger(loaded)
    distinct = {id(w): w for w in loaded.weights.values()}
    assert whole.weights == sum(w.nbytes if hasattr(w, "nbytes") else w.data.nbytes for w in distinct.values())
    assert whole.block_bytes == 1 * 2 * 1 * 16 * 32 * 2
    assert whole.kv_cache == whole.num_blocks * whole.block_bytes
    assert whole.workspace > 32 * 4 * (64 + 64 + 192)
    text = str(whole)
    for part in ("weights", "workspace", "KV cache", "total", "bf16", "max_model_len is 256"):
        assert part in text


def test_an_explicit_size_is_kept(loaded: tiny.Loaded) -> None:
    """Red when kv_cache_memory_bytes is exceeded, or f32 blocks are counted as bf16."""
    half = ledger(loaded, kv_cache_memory_bytes=200_000)
    assert 200_000 - half.block_bytes < half.kv_cache <= 200_000
    wide = ledger(loaded, kv_cache_memory_bytes=200_000, kv_cache_dtype="f32")
    assert wide.block_bytes == 2 * half.block_bytes
    assert (wide.kv_dtype, half.kv_dtype) == ("f32", "bf16")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 257}, "more than the model's context of 256"),
        ({"max_model_len": 256, "kv_cache_memory_bytes": 40_000}, "set --max-model-len to at most 128, or raise"),
        ({"kv_cache_memory_bytes": 2000}, "raise --kv-cache-memory-bytes"),
        ({"kv_cache_memory_bytes": 2 * GIB}, "lower --kv-cache-memory-bytes"),
    ],
)
def test_what_cannot_be_held_is_refused(loaded: tiny.Loaded, settings: dict[str, Any], message: str) -> None:
    """Red when an engine starts that will run out of memory, or serves less than it was asked for without saying so."""
    with pytest.raises(ConfigError, match=message):
        ledger(loaded, **settings)


def test_workspace_of_a_large_vocabulary_is_bounded() -> None:
    """Red when the logits of a whole step are counted at once: 512 rows of 262,144 would be half a gigabyte."""
    spec = llama.spec_from_config(tiny.LLAMA_SHAPE)
    assert spec.vocab_size == tiny.VOCAB
    small = ledger(tiny.random_model(tiny.LLAMA_SHAPE, "q8"), max_num_batched_tokens=512)
    large = ledger(tiny.random_model(tiny.LLAMA_SHAPE | {"vocab_size": 64_000}, "q8"), max_num_batched_tokens=512)
    assert large.workspace - small.workspace < 1.5 * (17 << 20)


@pytest.mark.parametrize("budget", [16, 64, 512])
@pytest.mark.parametrize("shape", [tiny.LLAMA_SHAPE, tiny.GEMMA_SHAPE, tiny.LLAMA_SHAPE | {"vocab_size": 64_000}])
def test_the_native_backend_stays_within_the_workspace(shape: dict[str, Any], budget: int) -> None:
    """Red when the kernels' arena outgrows what the ledger says: memory would run out later."""
    model = tiny.random_model(shape, "q8")
    planned = ledger(model, max_num_batched_tokens=budget)
    machine = tiny.Machine(model, CpuBackend(threads=2), max_tokens=budget)
    assert isinstance(machine.executable, CpuExecutable)
    assert machine.executable.workspace_bytes <= planned.workspace
    machine.backend.close()
