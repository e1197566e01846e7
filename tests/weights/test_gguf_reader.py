"""The GGUF reader: what it reads, what it refuses, and the translation to Hugging Face."""

from __future__ import annotations

import math
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weights_helpers import (
    gguf_array,
    gguf_bytes,
    gguf_string,
    gguf_tensor,
    gguf_tensors,
    gguf_text,
    gguf_u32,
    llama_params,
    random_bytes,
    write_gguf,
)

from noria.types import LoadError
from noria.weights.checkpoint import GGUFCheckpoint, open_checkpoint
from noria.weights.gguf import GGUFFile, StringArray
from noria.weights.quantize import BLOCKS

TOKENS = (
    "<a>",
    "<|im_end|>",
    "<b>",
    "<|eot_id|>",
    "<|endoftext|>",
    "",
    "\0",
    "x" * 300,
    "naïve",
    *(f"t{i}" for i in range(61)),
)

ARCHITECTURE = gguf_text(b"general.architecture", b"llama")

MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "magic": (gguf_bytes(magic=b"GGUX"), "not a GGUF file"),
    "lfs-pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    "version": (gguf_bytes(version=99), "version 99"),
    "version-1": (gguf_bytes(version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "cut": (gguf_bytes(3)[:10], "the file ends"),
    "many-tensors": (gguf_bytes(2**60), "claims"),
    "many-pairs": (gguf_bytes(0, 2**60), "claims"),
    "wrapping-counts": (gguf_bytes(2**63, 2**63), "claims"),
    "zero-dim": (gguf_bytes(1, body=gguf_tensor([0, 4])), "zero dimension"),
    "empty-key": (gguf_bytes(0, 1, gguf_u32(b"", 1)), "empty"),
    "empty-tensor-name": (gguf_bytes(1, body=gguf_tensor([4], name=b"") + b"\0" * 99), "empty"),
    "unprintable-key": (gguf_bytes(0, 1, gguf_u32(b"a\nb", 1)), "printable"),
    "key-not-utf8": (gguf_bytes(0, 1, gguf_u32(b"\xff\xfe", 1)), "UTF-8"),
    "wrap": (gguf_bytes(1, body=gguf_tensor([2**42 + 1, 2**22])), "cut short"),
    "wrap-to-zero": (gguf_bytes(1, body=gguf_tensor([2**32, 2**32])), "cut short"),
    "neg": (gguf_bytes(1, body=gguf_tensor([2**63])), "cut short"),
    "str": (gguf_bytes(0, 1, struct.pack("<Q", 2**63) + b"x" * 40), "needs 9223372036854775808 bytes"),
    "dims": (gguf_bytes(1, body=gguf_tensor([1] * 9)), "9 dimensions"),
    "dims-many": (gguf_bytes(1, body=gguf_string(b"w") + struct.pack("<I", 2**32 - 1) + b"\0" * 40), "dimensions"),
    "no-dims": (gguf_bytes(1, body=gguf_tensor([]) + b"\0" * 40), "0 dimensions"),
    "type": (gguf_bytes(1, body=gguf_tensor([4], type_id=250)), "type number 250"),
    "type-unsupported": (gguf_bytes(1, body=gguf_tensor([256], type_id=10)), "type Q2_K"),
    "offset": (gguf_bytes(1, body=gguf_tensor([4], offset=2**40)), "cut short"),
    "offset-huge": (gguf_bytes(1, body=gguf_tensor([4], offset=2**64 - 32)), "cut short"),
    "offset-unaligned": (gguf_bytes(1, body=gguf_tensor([4], offset=3)), "no multiple of 32"),
    "block-split": (gguf_bytes(1, body=gguf_tensor([31], type_id=2)), "no multiple of Q4_0's 32"),
    "duplicate-tensor": (gguf_bytes(2, body=gguf_tensor([4]) + gguf_tensor([4], offset=32) + b"\0" * 99), "twice"),
    "overlap": (gguf_bytes(2, body=gguf_tensor([64]) + gguf_tensor([64], offset=32, name=b"v") + b"\0" * 999), "overlaps"),
    "duplicate-key": (gguf_bytes(0, 2, gguf_u32(b"a", 1) * 2), "twice"),
    "align": (gguf_bytes(0, 1, gguf_u32(b"general.alignment", 0)), "alignment"),
    "align-odd": (gguf_bytes(0, 1, gguf_u32(b"general.alignment", 24)), "power of two"),
    "align-huge": (gguf_bytes(0, 1, gguf_u32(b"general.alignment", 2**31)), "alignment"),
    "align-text": (gguf_bytes(0, 1, gguf_text(b"general.alignment", b"32")), "must be an integer"),
    "blocks": (gguf_bytes(0, 2, ARCHITECTURE + gguf_u32(b"llama.block_count", 100000)), "100000 layers"),
    "no-architecture": (gguf_bytes(0, 1, gguf_u32(b"a", 1)), "'general.architecture' is missing"),
    "architecture-number": (gguf_bytes(0, 1, gguf_u32(b"general.architecture", 1)), "must be a string"),
    "architecture-unknown": (gguf_bytes(0, 1, gguf_text(b"general.architecture", b"rwkv")), "'rwkv' is not supported"),
    "arr": (gguf_bytes(0, 1, gguf_array(b"tokenizer.ggml.scores", 0, 4, b"\1\2\3\4")), "must be an array of floats"),
    "arr-huge": (gguf_bytes(0, 1, gguf_array(b"a", 6, 2**61)), "needs 9223372036854775808 bytes"),
    "arr-strings-huge": (gguf_bytes(0, 1, gguf_array(b"a", 8, 2**61)), "strings"),
    "arr-strings-many": (gguf_bytes(0, 1, gguf_array(b"a", 8, 1 << 22, b"\0" * 800)), "more than the file has room for"),
    "arr-strings-cut": (gguf_bytes(0, 1, gguf_array(b"a", 8, 3, gguf_string(b"x") * 2 + b"\xff" * 8)), "the file ends"),
    "arr-type": (gguf_bytes(0, 1, gguf_array(b"a", 77, 1, b"\0" * 8)), "value type 77"),
    "nested": (gguf_bytes(0, 1, gguf_string(b"a") + struct.pack("<IIQ", 9, 9, 1) * 50), "array of arrays"),
    "bool": (gguf_bytes(0, 1, gguf_array(b"a", 7, 4, b"\0\1\2\1")), "neither 0 nor 1"),
    "scores-without-tokens": (gguf_bytes(0, 1, gguf_array(b"tokenizer.ggml.scores", 6, 1, b"\0" * 4)), "0 tokens"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_headers_are_load_errors(case: str, tmp_path: Path) -> None:
    """Red when a hostile count, length, dimension, offset or type is used before it is checked (other error, slow, hungry)."""
    blob, message = MALFORMED[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(blob)
    tracemalloc.start()
    start = time.perf_counter()
    try:
        with pytest.raises(LoadError) as caught:
            open_checkpoint(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.perf_counter() - start < 1
    assert peak < 20 << 20


def test_paths_that_are_no_files_are_load_errors(tmp_path: Path) -> None:
    """Red when a missing or special file leaks an OSError or blocks."""
    with pytest.raises(LoadError, match="no such file"):
        open_checkpoint(tmp_path / "none.gguf")
    with pytest.raises(LoadError, match="regular file"):
        GGUFFile(Path("/dev/zero"))


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    extra = {
        "llama.rope.freq_base": 1e4,
        "general.tags": ["a", "b"],
        "x.flags": [True, False],
        "tokenizer.ggml.scores": [0.5] * 70,
    }
    return write_gguf(path, gguf_tensors("Q8_0"), TOKENS, extra)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_headers_never_raise_anything_else(tiny_file: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Red when any corruption of a real header escapes as another exception, or passes and then reads outside the file."""
    header = 6000
    blob = bytearray(tiny_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header))
        value = data.draw(st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1))
        width = data.draw(st.sampled_from([1, 4, 8]))
        blob[at : at + width] = value.to_bytes(8, "little")[:width]
    if data.draw(st.booleans()):
        del blob[data.draw(st.integers(0, len(blob))) :]
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(blob)
    try:
        checkpoint = open_checkpoint(path)
    except LoadError:
        return
    for name in checkpoint.names():
        raw = checkpoint.raw(name)
        assert raw.data.nbytes == np.prod(raw.shape, dtype=object) // BLOCKS[raw.type].elements * BLOCKS[raw.type].nbytes


@pytest.mark.parametrize("raw_type", BLOCKS)
def test_tensors_of_every_type_are_read_as_the_reference_wrote_them(raw_type: str, tmp_path: Path) -> None:
    """Red when shapes are not reversed, offsets are off, or a type's block size is wrong."""
    tensors = gguf_tensors(raw_type)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))
    assert set(checkpoint.names()) == set(tensors)
    for name, (kind, shape, data) in tensors.items():
        raw = checkpoint.raw(name)
        assert (raw.type, raw.shape, checkpoint.shape(name)) == (kind, shape, shape)
        np.testing.assert_array_equal(raw.data, data)


def test_metadata_agrees_with_the_reference_reader(tiny_file: Path) -> None:
    """Red when a value type is misread: strings of all lengths, empty ones, NULs, floats, booleans, arrays."""
    file = GGUFFile(tiny_file)
    fields = gguf.GGUFReader(tiny_file).fields
    expected = {k: f.contents() for k, f in fields.items() if not k.startswith("GGUF.")}
    assert list(file.metadata) == list(expected)
    for key, value in file.metadata.items():
        assert (value.tolist() if isinstance(value, np.ndarray | StringArray) else value) == expected[key]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=12) | st.sampled_from([b"", b"\0" * 9, b"y" * 255, b"z" * 256, b"w" * 5000]), max_size=400))
def test_strings_are_found_whatever_they_hold(tmp_path: Path, strings: list[bytes]) -> None:
    """Red when the search by zero bytes is fooled by empty strings, NULs, long strings, or a window's end."""
    path = tmp_path / "s.gguf"
    body = gguf_array(b"a", 8, len(strings), b"".join(map(gguf_string, strings))) + gguf_u32(b"after", 7)
    path.write_bytes(gguf_bytes(0, 2, body))
    file = GGUFFile(path)
    array = file.strings("a")
    assert array is not None
    assert [array.raw(i) for i in range(len(array))] == strings
    assert file.integer("after") == 7


def test_a_large_vocabulary_is_found_in_milliseconds(tmp_path: Path) -> None:
    """Red when strings are stepped over one by one, which takes ten times as long."""
    strings = b"".join(gguf_string(b"token%d" % i) for i in range(200_000))
    path = tmp_path / "s.gguf"
    path.write_bytes(gguf_bytes(0, 1, gguf_array(b"a", 8, 200_000, strings)))

    def seconds() -> float:
        start = time.perf_counter()
        GGUFFile(path)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.03
    array = GGUFFile(path).strings("a")
    assert array is not None
    assert array[199_999] == "token199999"
    assert array[-2:] == ["token199998", "token199999"]


def test_an_array_that_defeats_the_search_is_still_read_in_linear_time(tmp_path: Path) -> None:
    """Red when every long string between short ones costs a search of the whole window."""
    strings = (gguf_string(b"z" * 256) + gguf_string(b"a") * 2) * 60_000
    path = tmp_path / "s.gguf"
    path.write_bytes(gguf_bytes(0, 1, gguf_array(b"a", 8, 180_000, strings)))
    start = time.perf_counter()
    assert len(GGUFFile(path).metadata["a"]) == 180_000  # type: ignore[arg-type]
    assert time.perf_counter() - start < 2


def test_a_token_that_is_not_utf8_is_a_load_error(tmp_path: Path) -> None:
    """Red when decoding a vocabulary raises UnicodeDecodeError."""
    path = tmp_path / "s.gguf"
    path.write_bytes(gguf_bytes(0, 1, gguf_array(b"a", 8, 1, gguf_string(b"\xff"))))
    array = GGUFFile(path).strings("a")
    assert array is not None
    with pytest.raises(LoadError, match="UTF-8"):
        array.tolist()


def checkpoint_with(
    tmp_path: Path, extra: dict[str, Any], tied: bool = True, tokens: tuple[str, ...] = TOKENS
) -> GGUFCheckpoint:
    return GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", gguf_tensors("Q8_0", tied), tokens, extra))


def test_config_of_a_llama(tmp_path: Path) -> None:
    """Red when a key of config.json is missing, in another unit, or loses its decimal form."""
    extra = {"llama.rope.freq_base": 1e5, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eot_token_id": 8}
    checkpoint = checkpoint_with(tmp_path, extra)
    assert checkpoint.source == "gguf"
    assert checkpoint.config == {
        "model_type": "llama",
        "_name_or_path": "",
        "vocab_size": 70,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "rope_theta": 1e5,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": [2, 8, 1, 3, 4],  # declared, then the control tokens with well-known names
    }
    assert checkpoint.generation_config["eos_token_id"] == [2, 8, 1, 3, 4]


def test_an_output_matrix_unties_the_head(tmp_path: Path) -> None:
    """Red when a GGUF file's own head is ignored."""
    assert checkpoint_with(tmp_path, {}, tied=False).config["tie_word_embeddings"] is False


def test_rope_scaling(tmp_path: Path) -> None:
    """Red when a scaling is dropped, or the older key of linear scaling is not known."""
    linear = checkpoint_with(tmp_path, {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert linear.config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    older = checkpoint_with(tmp_path, {"llama.rope.scale_linear": 2.0})
    assert older.config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    extra = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
        "llama.rope.scaling.yarn_beta_fast": 16.0,
    }
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0}
    assert checkpoint_with(tmp_path, extra).config["rope_scaling"] == yarn
    scaled = checkpoint_with(tmp_path, extra | {"llama.rope.scaling.attn_factor": 0.5}).config["rope_scaling"]
    assert scaled["attention_factor"] == pytest.approx(0.5 * (1 + 0.1 * math.log(4.0)))  # GGUF's multiplies YaRN's own


def test_rope_frequency_factors_reach_the_config(tmp_path: Path) -> None:
    """Red when the llama3 scaling that a converter stored as a tensor is lost."""
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    tensors = gguf_tensors("Q8_0") | {"rope_freqs.weight": ("F32", (32,), factors.view(np.uint8).reshape(1, -1))}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))
    assert checkpoint.config["rope_frequency_factors"] == factors.tolist()
    assert "rope_freqs.weight" in checkpoint.names()


def test_sampling_defaults_of_the_file(tmp_path: Path) -> None:
    """Red when a file's recommended sampling is dropped."""
    generation = checkpoint_with(tmp_path, {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}).generation_config
    assert (generation["temperature"], generation["top_k"]) == (0.6, 20)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.attention.value_length": 32}, "different length"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"split.count": 2}, "llama-gguf-split"),
        ({"tokenizer.ggml.bos_token_id": 70}, r"must be in \[0, 69\]"),
        ({"llama.rope.freq_base": float("inf")}, "must be finite"),
        ({"llama.rope.freq_base": "x"}, "must be a number"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    """Red when a setting of the file that changes the answers is read over."""
    with pytest.raises(LoadError, match=message):
        checkpoint_with(tmp_path, extra)


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    """Red when a token id may index past the embedding."""
    with pytest.raises(LoadError, match="71 tokens"):
        checkpoint_with(tmp_path, {}, tokens=(*TOKENS, "one more"))


def test_a_layer_more_or_less_than_declared_is_refused(tmp_path: Path) -> None:
    """Red when block_count is believed."""
    tensors = {n: t for n, t in gguf_tensors("Q8_0").items() if ".1." not in n}
    with pytest.raises(LoadError, match="2 layers, and the file has tensors of 1"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))


def test_gemma3(tmp_path: Path) -> None:
    """Red when Gemma's norms get Llama's names, or its layer pattern and second rope base are wrong."""
    tensors = {}
    for layer in range(7):
        for name in ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = random_bytes("F32", 1, 64)
    writer = gguf.GGUFWriter(tmp_path / "g.gguf", "gemma3")
    for add, value in (
        (writer.add_block_count, 7),
        (writer.add_context_length, 1024),
        (writer.add_embedding_length, 64),
        (writer.add_feed_forward_length, 128),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, 1),
        (writer.add_key_length, 32),
        (writer.add_value_length, 32),
        (writer.add_sliding_window, 48),
    ):
        add(value)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_tensor("token_embd.weight", np.zeros((8, 64), np.float32))
    for name, data in tensors.items():
        writer.add_tensor(name, data.view(np.float32)[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(tmp_path / "g.gguf")
    assert {n.removeprefix("model.layers.3.") for n in checkpoint.names() if ".3." in n} == {
        "input_layernorm.weight",
        "pre_feedforward_layernorm.weight",
        "post_attention_layernorm.weight",
        "post_feedforward_layernorm.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
    }
    config = checkpoint.config
    assert config["model_type"] == "gemma3_text"
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert (config["rope_theta"], config["rope_local_base_freq"], config["sliding_window"]) == (1e6, 1e4, 48)
    assert (config["query_pre_attn_scalar"], config["head_dim"], config["hidden_activation"]) == (32, 32, "gelu_pytorch_tanh")


def test_names_cover_the_parameters_of_a_llama(tmp_path: Path) -> None:
    """Red when a tensor name is not translated."""
    names = set(checkpoint_with(tmp_path, {}).names())
    assert names == {s.name for p in llama_params() if not p.alias_of for s in p.sources}
