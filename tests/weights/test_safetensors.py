"""The safetensors reader and the folder around it."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from weights_helpers import CONFIG, llama_tensors, write_folder

from noria.types import LoadError
from noria.weights.checkpoint import SafetensorsCheckpoint, open_checkpoint
from noria.weights.quantize import dequantize
from noria.weights.safetensors import INDEX, SafetensorsFile

SHARD = "model-00003-of-00003.safetensors"


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_are_read_as_they_were_written(tmp_path: Path, shards: int) -> None:
    """Red when offsets, shapes or the shard of a tensor are wrong."""
    tensors = llama_tensors()
    checkpoint = open_checkpoint(write_folder(tmp_path, tensors, shards))
    assert checkpoint.source == "safetensors"
    assert set(checkpoint.names()) == set(tensors)
    for name, values in tensors.items():
        assert checkpoint.shape(name) == values.shape
        np.testing.assert_array_equal(dequantize(checkpoint.raw(name)), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float_types_are_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    """Red when half precision or bfloat16 is read as another type."""
    weights = torch.randn(5, 7).to(dtype)
    save_file({"w": weights, "v": weights[0].clone()}, tmp_path / "m.safetensors")
    file = SafetensorsFile(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(dequantize(file.raw("w")), weights.float().numpy())
    np.testing.assert_array_equal(dequantize(file.raw("v")), weights[0].float().numpy())


def test_an_integer_tensor_is_no_weight(tmp_path: Path) -> None:
    """Red when integers are reinterpreted as floats."""
    save_file({"w": torch.arange(4)}, tmp_path / "m.safetensors")
    with pytest.raises(LoadError, match="'w' is I64"):
        SafetensorsFile(tmp_path / "m.safetensors").raw("w")


def spoil(folder: Path, kind: str) -> None:
    file = folder / SHARD
    content = file.read_bytes()
    index = json.loads((folder / INDEX).read_text())
    last = [n for n, f in index["weight_map"].items() if f == SHARD][-1]
    if kind == "missing":
        file.unlink()
    elif kind == "index names a tensor nobody holds":
        index["weight_map"]["model.ghost.weight"] = SHARD
    elif kind == "shard holds a tensor the index lacks":
        del index["weight_map"][last]
    elif kind == "index leaves the folder":
        index["weight_map"][last] = f"../{folder.name}/{SHARD}"
    else:
        changed = {
            "short": content[:-100],
            "long": content + b"\0" * 8,
            "empty": b"",
            "stub": b"\1\2\3",
            "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "header length": struct.pack("<Q", 2**60) + content[8:],
            "header cut": content[:60],
            "header not JSON": content[:8] + b"#" + content[9:],
        }
        file.write_bytes(changed[kind])
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "kind",
    [
        *("missing", "short", "long", "empty", "stub", "pointer", "header length", "header cut", "header not JSON"),
        *("index names a tensor nobody holds", "shard holds a tensor the index lacks", "index leaves the folder"),
    ],
)
def test_a_spoilt_shard_is_an_error_that_names_it(tmp_path: Path, kind: str) -> None:
    """Red when files are found by pattern, compared with the index in one direction, or opened lazily."""
    folder = write_folder(tmp_path / "model", llama_tensors(), shards=3)
    open_checkpoint(folder)
    spoil(folder, kind)
    with pytest.raises(LoadError, match=SHARD) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


def header_file(path: Path, header: Any, data: bytes = b"\0" * 16) -> Path:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + data)
    return path


def entry(start: int, end: int, dtype: Any = "F32", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({}, "no tensors"),
        ([], "no JSON object"),
        ({"w": 3}, "no description"),
        ({"w": entry(0, 16, dtype="F31")}, "unknown dtype"),
        ({"w": entry(0, 16, dtype=["F32"])}, "unknown dtype"),
        ({"w": entry(0, 16, shape=[-4])}, "shape"),
        ({"w": entry(0, 16, shape=[4.0])}, "shape"),
        ({"w": entry(0, 16, shape=[True, 4])}, "shape"),
        ({"w": entry(0, 16, shape="4")}, "shape"),
        ({"w": entry(0, 16, shape=[1] * 1000)}, "shape"),
        ({"w": entry(0, 16, shape=[2**33, 2**33])}, "needs"),
        ({"w": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}, "data_offsets"),
        ({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0]}}, "data_offsets"),
        ({"w": entry(0, 16), "v": entry(8, 16)}, "overlaps"),
        ({"w": entry(0, 4), "v": entry(8, 16)}, "hole"),
        ({"w": entry(0, 8)}, "belong to no tensor"),
        ({"w": entry(0, 32)}, "cut short"),
        (b'{"w":' + json.dumps(entry(0, 16)).encode() + b',"w":' + json.dumps(entry(0, 16)).encode() + b"}", "twice"),
        (b"[" * 100_000, "JSON"),
        (b'{"w":' * 50_000, "JSON"),
        (b"\xff\xfe{}", "JSON"),
    ],
)
def test_malformed_headers_are_load_errors(tmp_path: Path, header: Any, message: str) -> None:
    """Red when a header is believed before it is compared with the file."""
    with pytest.raises(LoadError, match=message):
        SafetensorsFile(header_file(tmp_path / "m.safetensors", header))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 400), st.binary(min_size=1, max_size=8), st.integers(0, 600))
def test_mutated_files_never_raise_anything_else(tmp_path: Path, at: int, patch: bytes, cut: int) -> None:
    """Red when a corruption escapes as another exception, or passes and then reads outside the file."""
    header = {"__metadata__": {"format": "pt"}, "w": entry(0, 16), "v": entry(16, 64, shape=[3, 4]), "u": entry(64, 128)}
    path = header_file(tmp_path / "m.safetensors", header, b"\1" * 128)
    content = bytearray(path.read_bytes())
    content[at : at + len(patch)] = patch
    path.write_bytes(content[: max(0, len(content) - max(0, cut - 300))])
    try:
        file = SafetensorsFile(path)
        for name in file.tensors:
            file.raw(name)
    except LoadError:
        pass


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused(tmp_path: Path, name: str) -> None:
    """Red when a pickle is opened, or ignored without a word."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_bytes(b"\x80\x02.")
    with pytest.raises(LoadError, match=f"{name}.*never opened"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no config.json"),
        ({"config.json": "{}"}, "no model.safetensors"),
        ({"config.json": "{"}, "not valid JSON"),
        ({"config.json": "[]"}, "no JSON object"),
        ({"config.json": "version https://git-lfs.github.com/spec/v1\n"}, "git lfs pull"),
        ({"config.json": "{}", "a.gguf": ""}, "name the file itself"),
        ({"config.json": "{}", "model-00001-of-00002.safetensors": ""}, "download the index"),
        ({"config.json": "{}", INDEX: "{}"}, "weight_map"),
        ({"config.json": '{"quantization_config": {"quant_method": "gptq"}}'}, "'gptq' are not supported"),
        ({"config.json": '{"eos_token_id": "x"}'}, "eos_token_id"),
        ({"config.json": "{}", "generation_config.json": '{"eos_token_id": [1, -2]}'}, "generation_config.json: eos_token_id"),
    ],
)
def test_a_folder_that_is_no_checkpoint_says_why(tmp_path: Path, files: dict[str, str], message: str) -> None:
    """Red when an incomplete folder ends in a traceback or a message that does not help."""
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(LoadError, match=message):
        open_checkpoint(tmp_path)


def test_all_end_ids_of_both_configs_count(tmp_path: Path) -> None:
    """Red when only the first end id, or only one of the two files, is used."""
    write_folder(tmp_path, llama_tensors())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7], "temperature": 0.6}))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config["eos_token_id"] == checkpoint.generation_config["eos_token_id"] == [5, 7, 2]
    assert checkpoint.generation_config["temperature"] == 0.6


def test_tokenizer_files_are_located(tmp_path: Path) -> None:
    """Red when a tokenizer file in the folder is overlooked."""
    write_folder(tmp_path, llama_tensors())
    (tmp_path / "tokenizer.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    assert checkpoint.tokenizer_files == {"tokenizer.json": tmp_path / "tokenizer.json"}


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    """Red when a copy has another identity, or a changed weight the same."""
    write_folder(tmp_path / "a", llama_tensors())
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    write_folder(tmp_path / "c", llama_tensors(seed=1))
    a, b, c = (open_checkpoint(tmp_path / name).fingerprint for name in "abc")
    assert a == b != c
