"""Small checkpoints for the tests of noria.weights: random blocks of every GGUF type, and tiny Llamas in both containers."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.numpy import save_file

from noria.weights.params import Param, Source
from noria.weights.quantize import BLOCKS, RawTensor

QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_HALF_OFFSETS = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_bytes(raw_type: str, rows: int, inputs: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Random blocks, [rows, bytes per row]: every code pattern, with float16 scales of both signs and many magnitudes."""
    rng = np.random.default_rng(seed)
    if raw_type in ("F32", "F16", "BF16"):
        values = rng.standard_normal((rows, inputs)).astype(np.float32)
        if raw_type == "BF16":
            return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
        return values.astype(np.float32 if raw_type == "F32" else np.float16).view(np.uint8)
    block = BLOCKS[raw_type]
    data = rng.integers(0, 256, (rows * inputs // block.elements, block.nbytes), np.uint8)
    for offset in _HALF_OFFSETS.get(raw_type, (0,)):
        scales = (rng.standard_normal(len(data)) * 10.0 ** rng.integers(-7, 1, len(data))).astype(np.float16)
        data[:, offset : offset + 2] = scales[:, None].view(np.uint8)
    return data.reshape(rows, -1)


def random_raw(raw_type: str, rows: int, inputs: int, seed: int = 0) -> RawTensor:
    return RawTensor("w", (rows, inputs), raw_type, random_bytes(raw_type, rows, inputs, seed))


def float_raw(values: npt.NDArray[np.float32], name: str = "w") -> RawTensor:
    rows = len(values) if values.ndim > 1 else 1
    return RawTensor(name, values.shape, "F32", np.ascontiguousarray(values).view(np.uint8).reshape(rows, -1))


CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 70,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


def llama_params(config: Mapping[str, Any] = CONFIG, tied: bool = True) -> list[Param]:
    """The parameters of a Llama, written out for the tests."""
    h, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]

    def source(name: str, *shape: int, heads: int = 0) -> Source:
        return Source(name=name + ".weight", shape=shape, gguf_heads=heads)

    def matrix(name: str, *sources: Source) -> Param:
        return Param(name=name, kind="matrix", sources=sources)

    def vector(name: str, source_name: str) -> Param:
        return Param(name=name, kind="vector", sources=(source(source_name, h),))

    params = [matrix("embed", source("model.embed_tokens", v, h))]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        params += [
            vector(f"{i}.norm", at + "input_layernorm"),
            matrix(
                f"{i}.qkv",
                source(at + "self_attn.q_proj", heads * dim, h, heads=heads),
                source(at + "self_attn.k_proj", kv_heads * dim, h, heads=kv_heads),
                source(at + "self_attn.v_proj", kv_heads * dim, h),
            ),
            matrix(f"{i}.o", source(at + "self_attn.o_proj", h, heads * dim)),
            vector(f"{i}.mlp_norm", at + "post_attention_layernorm"),
            matrix(f"{i}.gate_up", source(at + "mlp.gate_proj", f, h), source(at + "mlp.up_proj", f, h)),
            matrix(f"{i}.down", source(at + "mlp.down_proj", h, f)),
        ]
    head = Param(name="head", kind="matrix", sources=(source("lm_head", v, h),), alias_of="embed" if tied else "")
    return [*params, vector("norm", "model.norm"), head]


def llama_tensors(tied: bool = True, seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Random float32 tensors of the tiny Llama, by Hugging Face name."""
    rng = np.random.default_rng(seed)
    shapes = {s.name: s.shape for p in llama_params(tied=tied) if not p.alias_of for s in p.sources}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_folder(
    folder: Path, tensors: Mapping[str, npt.NDArray[Any]], shards: int = 1, config: Mapping[str, Any] = CONFIG
) -> Path:
    """A Hugging Face folder, sharded if `shards` is above 1."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[i::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in outer:
        return f"{outer[stem]}.{suffix}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[inner]}.{suffix}"


PLAIN_TOKENS = tuple(f"t{i}" for i in range(70))


def write_gguf(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...], npt.NDArray[np.uint8]]],
    tokens: Sequence[str] = PLAIN_TOKENS,
    extra: Mapping[str, Any] = {},
) -> Path:
    """A GGUF file of the tiny Llama, written by the reference writer. `tensors`: Hugging Face name -> (type, shape, bytes)."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(tokens))
    writer.add_token_types([3 if t.startswith("<") else 1 for t in tokens])
    writer.add_eos_token_id(2)
    for key, value in extra.items():
        add: dict[type, Any] = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name, (raw_type, _, data) in tensors.items():
        writer.add_tensor(
            gguf_name(name) if "." in name and "rope" not in name else name,
            data if len(data) > 1 else data[0],
            raw_dtype=GGMLQuantizationType[raw_type],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(matrix_type: str = "Q4_1", tied: bool = True) -> dict[str, tuple[str, tuple[int, ...], npt.NDArray[np.uint8]]]:
    """The tiny Llama with matrices of random blocks."""
    tensors = {}
    for i, source in enumerate(s for p in llama_params(tied=tied) if not p.alias_of for s in p.sources):
        raw_type = matrix_type if len(source.shape) == 2 else "F32"
        rows, inputs = source.shape if len(source.shape) == 2 else (1, source.shape[0])
        tensors[source.name] = (raw_type, source.shape, random_bytes(raw_type, rows, inputs, seed=i))
    return tensors


# GGUF headers by hand, for files that no writer would make.


def gguf_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf_bytes(tensors: int = 0, pairs: int = 0, body: bytes = b"", version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, pairs) + body


def gguf_tensor(dims: Sequence[int], type_id: int = 0, offset: int = 0, name: bytes = b"w") -> bytes:
    sizes = b"".join(struct.pack("<Q", d) for d in dims)
    return gguf_string(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", type_id, offset)


def gguf_u32(key: bytes, value: int) -> bytes:
    return gguf_string(key) + struct.pack("<II", 4, value)


def gguf_text(key: bytes, value: bytes) -> bytes:
    return gguf_string(key) + struct.pack("<I", 8) + gguf_string(value)


def gguf_array(key: bytes, item_type: int, count: int, items: bytes = b"") -> bytes:
    return gguf_string(key) + struct.pack("<IIQ", 9, item_type, count) + items
