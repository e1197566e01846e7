"""The loader and the packed files on disk."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from weights_helpers import QUANTISED, gguf_tensors, llama_params, llama_tensors, random_raw, write_folder, write_gguf

from noria.types import LoadError
from noria.weights import packed_store, packing
from noria.weights.checkpoint import Checkpoint, open_checkpoint
from noria.weights.formats import LinearWeight, VectorWeight, Weight
from noria.weights.pack import unpack
from noria.weights.packed import forget, load_parameters, packed_key
from noria.weights.params import Param, Source
from noria.weights.quantize import RawTensor, dequantize


def dense(weight: Weight) -> np.ndarray:
    if isinstance(weight, VectorWeight):
        return weight.data
    return np.concatenate([unpack(s) for s in weight.segments])


def same(a: dict[str, Weight], b: dict[str, Weight]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(dense(a[k]), dense(b[k])) for k in a)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write_gguf(tmp_path / "m.gguf", gguf_tensors("Q4_1")))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def packed_files(cache: Path) -> list[Path]:
    return sorted((cache / "packed").glob("*.noria"))


def converted_by_hugging_face(weights: np.ndarray, heads: int) -> np.ndarray:
    """How convert_hf_to_gguf.py reorders the rows of q and k of a Llama."""
    rows, inputs = weights.shape
    return weights.reshape(heads, 2, rows // heads // 2, inputs).swapaxes(1, 2).reshape(rows, inputs)


# --- values ------------------------------------------------------------------------------------------------------------


def test_float_checkpoint_in_float32_is_exact(tmp_path: Path) -> None:
    """Red when sources are concatenated in another order, or anything is rounded on the way."""
    tensors = llama_tensors()
    weights = load_parameters(open_checkpoint(write_folder(tmp_path, tensors)), llama_params(), "f32")
    for param in llama_params():
        if not param.alias_of:
            expected = np.concatenate([tensors[s.name] for s in param.sources])
            np.testing.assert_array_equal(dense(weights[param.name]), expected)
    assert weights["head"] is weights["embed"]


@pytest.mark.parametrize("raw_type", QUANTISED)
def test_gguf_rows_of_q_and_k_come_back_to_halves(tmp_path: Path, raw_type: str) -> None:
    """Red when the interleaved rope order of GGUF files is not undone, or undone for other matrices as well."""
    tensors = gguf_tensors(raw_type)
    weights = load_parameters(open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors)), llama_params())
    q, k, v = np.split(dense(weights["1.qkv"]), [256, 384])
    for found, name, heads in ((q, "q", 4), (k, "k", 2), (v, "v", 0)):
        kind, shape, data = tensors[f"model.layers.1.self_attn.{name}_proj.weight"]
        stored = dequantize(RawTensor(name, shape, kind, data))
        np.testing.assert_array_equal(converted_by_hugging_face(found, heads) if heads else found, stored)


def test_safetensors_rows_stay_and_norms_may_be_shifted(tmp_path: Path) -> None:
    """Red when the GGUF reordering touches safetensors, or Gemma's 1 + w is added for GGUF files."""
    tensors = llama_tensors()
    params = [
        msgspec.structs.replace(p, sources=tuple(msgspec.structs.replace(s, safetensors_add=1.0) for s in p.sources))
        if p.kind == "vector"
        else p
        for p in llama_params()
    ]
    weights = load_parameters(open_checkpoint(write_folder(tmp_path, tensors)), params, "f32")
    np.testing.assert_array_equal(dense(weights["norm"]), tensors["model.norm.weight"] + np.float32(1))
    in_gguf = gguf_tensors("Q4_1")
    from_gguf = load_parameters(open_checkpoint(write_gguf(tmp_path / "m.gguf", in_gguf)), params)
    np.testing.assert_array_equal(dense(from_gguf["norm"]), in_gguf["model.norm.weight"][2].view(np.float32)[0])


class Memory(Checkpoint):
    """A checkpoint of given tensors, without files."""

    source = "gguf"
    weight_files = ()
    path = Path("memory")
    fingerprint = "0" * 32

    def __init__(self, tensors: dict[str, RawTensor]) -> None:
        self.tensors = tensors

    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def raw(self, name: str) -> RawTensor:
        return self.tensors[name]


@pytest.mark.parametrize(
    ("parts", "formats"),
    [
        ([("Q4_1", 64), ("Q4_1", 33)], ["q4/32/f16/min"]),
        ([("Q5_0", 64), ("Q8_0", 33)], ["q8/32/f16"]),
        ([("Q4_K", 32), ("Q6_K", 32), ("Q6_K", 5)], ["q4/32/f32/min", "q8/16/f32"]),
        ([("Q4_K", 16), ("Q6_K", 32)], ["f32"]),
        ([("Q8_0", 16), ("Q8_0", 17)], ["q8/32/f16"]),
        ([("F32", 16), ("F16", 17)], ["bf16"]),
    ],
)
def test_merged_parameters_fill_their_panels(parts: list[tuple[str, int]], formats: list[str]) -> None:
    """Red when a segment that is not the last leaves a panel half full, or equal formats are not joined."""
    raws = {f"w{i}": random_raw(kind, rows, 256, seed=i) for i, (kind, rows) in enumerate(parts)}
    sources = tuple(Source(name=name, shape=raw.shape) for name, raw in raws.items())
    weight = load_parameters(Memory(raws), [Param(name="p", kind="matrix", sources=sources)])["p"]
    assert isinstance(weight, LinearWeight)
    assert [str(s.format) for s in weight.segments] == formats
    assert all(s.outputs % 32 == 0 for s in weight.segments[:-1])
    expected = np.concatenate([dequantize(r) for r in raws.values()])
    np.testing.assert_allclose(dense(weight), expected, rtol=2**-8 if formats == ["bf16"] else 0)


def test_biases_follow_their_rows(tmp_path: Path) -> None:
    """Red when a bias is dropped, or stays in GGUF's order while its rows are moved."""
    halves = np.arange(16, dtype=np.float32)
    stored = converted_by_hugging_face(halves[:, None], 2)[:, 0]
    tensors = {
        "q.weight": random_raw("F32", 16, 32),
        "q.bias": RawTensor("q.bias", (16,), "F32", stored.view(np.uint8).reshape(1, -1)),
        "v.weight": random_raw("F32", 8, 32),
        "v.bias": RawTensor("v.bias", (8,), "F32", np.ones(8, np.float32).view(np.uint8).reshape(1, -1)),
    }
    param = Param(
        name="qv",
        kind="matrix",
        sources=(Source(name="q.weight", shape=(16, 32), gguf_heads=2), Source(name="v.weight", shape=(8, 32))),
        biases=(Source(name="q.bias", shape=(16,), gguf_heads=2), Source(name="v.bias", shape=(8,))),
    )
    for cache in (None, tmp_path):
        weight = load_parameters(Memory(tensors), [param], "f32", cache)["qv"]
        assert isinstance(weight, LinearWeight)
        assert weight.bias is not None
        np.testing.assert_array_equal(weight.bias, [*halves, *np.ones(8)])


@pytest.mark.parametrize(
    ("quantization", "body", "ends"), [("q8", "q8/32/f16", "q8/32/f16"), ("q4", "q4/32/f16/min", "q8/32/f16")]
)
def test_quantization_of_a_float_checkpoint(tmp_path: Path, quantization: str, body: str, ends: str) -> None:
    """Red when the setting is ignored, or q4 takes the embedding, where it costs the most."""
    tensors = llama_tensors(tied=False)
    weights = load_parameters(open_checkpoint(write_folder(tmp_path, tensors)), llama_params(tied=False), quantization)
    for name, weight in weights.items():
        if isinstance(weight, LinearWeight):
            assert {str(s.format) for s in weight.segments} == {ends if name in ("embed", "head") else body}
    error = dense(weights["0.down"]) - tensors["model.layers.0.mlp.down_proj.weight"]
    assert np.sqrt(np.mean(error**2)) < {"q8": 0.01, "q4": 0.1}[quantization]


def test_weights_are_aligned_and_read_only(checkpoint: Checkpoint, cache: Path) -> None:
    """Red when a kernel would meet an unaligned panel, or anyone could write into the mapped file."""
    for directory in (None, cache):
        for weight in load_parameters(checkpoint, llama_params(), None, directory).values():
            for data in [s.data for s in weight.segments] if isinstance(weight, LinearWeight) else [weight.data]:
                assert data.ctypes.data % 64 == 0
                assert not data.flags.writeable


# --- tensors and parameters --------------------------------------------------------------------------------------------


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """Red when a parameter would keep whatever memory held."""
    tensors = llama_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(LoadError, match=r"model.layers.1.mlp.up_proj.weight' is missing"):
        load_parameters(open_checkpoint(write_folder(tmp_path, tensors)), llama_params())


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    """Red when a transposed or truncated tensor is reshaped to fit."""
    tensors = llama_tensors()
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].T.copy()
    with pytest.raises(LoadError, match=r"up_proj.weight' is \(256, 512\); the configuration needs \(512, 256\)"):
        load_parameters(open_checkpoint(write_folder(tmp_path, tensors)), llama_params())


def test_unexpected_tensors_are_named_and_frequencies_are_not(tmp_path: Path) -> None:
    """Red when weights that the model does not use are dropped in silence, or old checkpoints' rotary buffers are refused."""
    tensors = llama_tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(32, np.float32)}
    load_parameters(open_checkpoint(write_folder(tmp_path / "fine", tensors)), llama_params())
    extra = {f"model.extra.{i}": np.ones(4, np.float32) for i in range(7)}
    with pytest.raises(LoadError, match=r"'model.extra.0'.*'model.extra.4' and 2 more"):
        load_parameters(open_checkpoint(write_folder(tmp_path / "more", tensors | extra)), llama_params())


def test_a_list_of_parameters_that_contradicts_itself_is_a_bug() -> None:
    """Red when a family's mistake (a name or tensor twice, an alias of nothing) goes unnoticed."""
    source = Source(name="w", shape=(2, 32))
    one, two = (Param(name=n, kind="matrix", sources=(source,)) for n in "ab")
    memory = Memory({"w": random_raw("F32", 2, 32)})
    for params in ([one, one], [one, two], [msgspec.structs.replace(one, alias_of="b"), two]):
        with pytest.raises(ValueError, match=r"twice|two parameters"):
            load_parameters(memory, params)


# --- tied heads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", ["safetensors", "gguf"])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_a_tied_head(tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture, container: str, head: str) -> None:
    """Red when a redundant head stops loading, wins over the embedding, or differs without a warning (on every start)."""
    if container == "safetensors":
        tensors = llama_tensors()
        if head != "absent":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * (1 if head == "equal" else 2)
        checkpoint = open_checkpoint(write_folder(tmp_path / "m", tensors))
    else:
        in_gguf = gguf_tensors("Q8_0")
        if head != "absent":
            kind, shape, data = in_gguf["model.embed_tokens.weight"]
            in_gguf["lm_head.weight"] = (kind, shape, data if head == "equal" else data[::-1].copy())
        checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", in_gguf))
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "noria.weights"):
            weights = load_parameters(checkpoint, llama_params(tied=True), "f32", cache)
        assert weights["head"] is weights["embed"]
        np.testing.assert_array_equal(dense(weights["head"]), dequantize(checkpoint.raw("model.embed_tokens.weight")))
        assert ("lm_head.weight" in caplog.text) == (head == "different")


def test_an_untied_head(tmp_path: Path) -> None:
    """Red when an untied head is replaced by the embedding, or its absence is not an error that names it."""
    tensors = llama_tensors(tied=False)
    weights = load_parameters(open_checkpoint(write_folder(tmp_path / "a", tensors)), llama_params(tied=False), "f32")
    np.testing.assert_array_equal(dense(weights["head"]), tensors["lm_head.weight"])
    with pytest.raises(LoadError, match=r"'lm_head.weight' is missing"):
        load_parameters(open_checkpoint(write_folder(tmp_path / "b", llama_tensors())), llama_params(tied=False))


# --- the files ---------------------------------------------------------------------------------------------------------


def refuse_to_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("packed again")

    monkeypatch.setattr(packing, "_filled", fail)


def test_the_second_start_maps_what_the_first_packed(
    checkpoint: Checkpoint, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when packing happens twice, or the file hashes anew on each start, or the file holds other values than memory."""
    calls: list[tuple[int, int]] = []
    first = load_parameters(checkpoint, llama_params(), None, cache, lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1] > 0
    assert same(first, load_parameters(checkpoint, llama_params()))
    refuse_to_pack(monkeypatch)
    again = open_checkpoint(checkpoint.path)
    monkeypatch.setattr(type(again), "fingerprint", property(lambda _: pytest.fail("hashed again")))
    assert same(first, load_parameters(again, llama_params(), None, cache))


def test_a_packed_file_is_found_by_content(
    checkpoint: Checkpoint, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a model that was moved or touched is packed a second time."""
    first = load_parameters(checkpoint, llama_params(), None, cache)
    moved = checkpoint.path.rename(tmp_path / "moved.gguf")
    refuse_to_pack(monkeypatch)
    assert same(first, load_parameters(open_checkpoint(moved), llama_params(), None, cache))


def test_keys_tell_everything_apart_that_determines_the_weights(checkpoint: Checkpoint, cache: Path, tmp_path: Path) -> None:
    """Red when a changed file, setting or parameter list would be served another one's weights."""
    params = llama_params()
    other = open_checkpoint(write_gguf(tmp_path / "o.gguf", gguf_tensors("Q4_0")))
    keys = [
        packed_key(checkpoint, params, None, cache),
        packed_key(checkpoint, params, "q8", cache),
        packed_key(checkpoint, params[:-1], None, cache),
        packed_key(other, params, None, cache),
    ]
    assert len(set(keys)) == 4
    assert keys[0] == packed_key(open_checkpoint(checkpoint.path), params, None, cache) == packed_key(checkpoint, params)
    load_parameters(checkpoint, params, None, cache)
    assert [p.stem for p in packed_files(cache)] == [keys[0]]


def test_a_file_changed_in_place_is_not_mistaken_for_the_old_one(cache: Path, tmp_path: Path) -> None:
    """Red when the memory of a content hash looks at the path alone."""
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors("Q4_1"))
    first = load_parameters(open_checkpoint(path), llama_params(), None, cache)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    second = load_parameters(open_checkpoint(path), llama_params(), None, cache)
    assert not same(first, second)
    assert same(second, load_parameters(open_checkpoint(path), llama_params()))


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[:30],
        lambda content: b"",
        lambda content: b"#" * len(content),
        lambda content: content + b"\0",
        lambda content: content[:-20] + b"!" + content[-19:],
        lambda content: content[:4096] + bytes([content[4096] ^ 1]) + content[4097:],
        lambda content: content[:100_000] + bytes([content[100_000] ^ 128]) + content[100_001:],
        lambda content: content[:8] + b"\xff" * 16 + content[24:],
    ],
)
def test_a_damaged_file_is_packed_again(
    checkpoint: Checkpoint, cache: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    """Red when a truncated, foreign or flipped packed file is trusted, or stops the start."""
    good = load_parameters(checkpoint, llama_params())
    load_parameters(checkpoint, llama_params(), None, cache)
    (file,) = packed_files(cache)
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(damage(content))
    with caplog.at_level(logging.WARNING, "noria.weights"):
        assert same(good, load_parameters(checkpoint, llama_params(), None, cache))
    assert "packing again" in caplog.text
    assert file.read_bytes() == content


def test_a_packed_file_of_another_key_is_not_used(checkpoint: Checkpoint, cache: Path) -> None:
    """Red when the file's name is believed instead of what it says."""
    load_parameters(checkpoint, llama_params(), "q8", cache)
    (wrong,) = packed_files(cache)
    wrong.rename(wrong.with_name(f"{packed_key(checkpoint, llama_params())}.noria"))
    assert same(load_parameters(checkpoint, llama_params()), load_parameters(checkpoint, llama_params(), None, cache))


def test_a_cache_that_cannot_be_written_packs_in_memory(
    checkpoint: Checkpoint, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when an unusable cache folder stops the start, or slows every start without a word."""
    cache.write_text("a file where a folder should be")
    with caplog.at_level(logging.WARNING, "noria.weights"):
        weights = load_parameters(checkpoint, llama_params(), None, cache)
    assert "packing in memory" in caplog.text
    assert same(weights, load_parameters(checkpoint, llama_params()))


def test_a_full_disk_packs_in_memory_and_leaves_nothing(
    checkpoint: Checkpoint, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a disk that fills up while packing ends the start or leaves half a file."""

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    weights = load_parameters(checkpoint, llama_params(), None, cache)
    assert same(weights, load_parameters(checkpoint, llama_params()))
    assert not packed_files(cache)
    assert not list((cache / "packed").glob("*.tmp"))


def test_the_cache_is_bounded_and_what_is_in_use_stays(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when old files pile up, the one just used goes first, or a mapped file is removed."""
    checkpoints = [
        open_checkpoint(write_gguf(tmp_path / f"{t}.gguf", gguf_tensors(t))) for t in ("Q4_0", "Q4_1", "Q5_0", "Q8_0")
    ]
    stems = [packed_key(c, llama_params(), None, cache) for c in checkpoints]
    mapped = load_parameters(checkpoints[0], llama_params(), None, cache)
    expected = dense(mapped["0.down"]).copy()
    for age, checkpoint in ((20, checkpoints[1]), (10, checkpoints[2])):
        load_parameters(checkpoint, llama_params(), None, cache)
        path = cache / "packed" / f"{packed_key(checkpoint, llama_params(), None, cache)}.noria"
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    os.utime(cache / "packed" / f"{stems[0]}.noria", (1, 1))
    (cache / "packed" / "dead.1.tmp").write_bytes(b"of a packer that was killed")
    (cache / "packed" / "live.1.tmp").write_bytes(b"of one that has only begun")
    os.utime(cache / "packed" / "dead.1.tmp", (1, 1))
    monkeypatch.setattr(packed_store, "MAX_CACHE_BYTES", sum(p.stat().st_size for p in packed_files(cache)))
    load_parameters(checkpoints[3], llama_params(), None, cache)
    assert {p.stem for p in packed_files(cache)} == {stems[0], stems[3]}  # the oldest is mapped; the next two made room
    assert [p.name for p in (cache / "packed").glob("*.tmp")] == ["live.1.tmp"]
    np.testing.assert_array_equal(dense(mapped["0.down"]), expected)


def test_a_map_holds_its_file_until_it_is_gone(checkpoint: Checkpoint, cache: Path) -> None:
    """Red when the lock ends with the descriptor that the loader closes, or is never given back."""

    def is_locked() -> bool:
        with packed_files(cache)[0].open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    weights = load_parameters(checkpoint, llama_params(), None, cache)
    view = weights["norm"]
    del weights
    assert is_locked()
    del view
    assert not is_locked()


def test_forget_removes_the_files_made_from_a_folder(checkpoint: Checkpoint, cache: Path, tmp_path: Path) -> None:
    """Red when removing a model leaves its packed weights, or takes those of others."""
    load_parameters(checkpoint, llama_params(), None, cache)
    other = open_checkpoint(write_folder(tmp_path / "other", llama_tensors()))
    load_parameters(other, llama_params(), None, cache)
    forget(cache, tmp_path / "other")
    assert [p.stem for p in packed_files(cache)] == [packed_key(checkpoint, llama_params())]


PACK = """
import json, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from weights_helpers import llama_params
from noria.weights.checkpoint import open_checkpoint
from noria.weights.packed import load_parameters
from noria.weights.pack import unpack
calls = 0
def progress(done, total):
    global calls
    calls += 1
    if sys.argv[4] == "kill" and calls == 5:
        os.kill(os.getpid(), signal.SIGKILL)
weights = load_parameters(open_checkpoint(sys.argv[2]), llama_params(), None, Path(sys.argv[3]), progress)
print(json.dumps([calls, float(unpack(weights["embed"].segments[0]).sum())]))
"""


def packer(checkpoint: Checkpoint, cache: Path, mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PACK, str(Path(__file__).parent), str(checkpoint.path), str(cache), mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_packer_that_is_killed_leaves_no_half_file(checkpoint: Checkpoint, cache: Path) -> None:
    """Red when the file is written in place, or what a killed packer left blocks or fools the next one."""
    process = packer(checkpoint, cache, "kill")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert list((cache / "packed").glob("*.tmp"))
    assert not packed_files(cache)
    assert same(load_parameters(checkpoint, llama_params()), load_parameters(checkpoint, llama_params(), None, cache))
    assert not list((cache / "packed").glob("*.tmp"))


@pytest.mark.slow
def test_two_packers_at_once_pack_once(checkpoint: Checkpoint, cache: Path) -> None:
    """Red when two processes pack the same weights at the same time, or read each other's unfinished file."""
    processes = [packer(checkpoint, cache, "run") for _ in range(3)]
    results = [json.loads(p.communicate(timeout=60)[0]) for p in processes]
    assert sorted(calls > 0 for calls, _ in results) == [False, False, True]
    assert len({total for _, total in results}) == 1
    assert len(packed_files(cache)) == 1
