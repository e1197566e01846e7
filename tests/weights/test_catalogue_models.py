"""Both catalogue models, pulled with Noria's own pull: every tensor against the reference implementation."""

from __future__ import annotations

import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from weights_helpers import gguf_name, llama_params

from noria.types import LoadError
from noria.weights.catalogue import CATALOGUE
from noria.weights.checkpoint import GGUFCheckpoint, open_checkpoint
from noria.weights.formats import LinearWeight
from noria.weights.hub import cache_directory, resolve_model
from noria.weights.pack import unpack
from noria.weights.packed import load_parameters
from noria.weights.params import Param, Source
from noria.weights.quantize import dequantize

pytestmark = pytest.mark.slow


def pulled(name: str) -> GGUFCheckpoint:
    try:
        checkpoint = open_checkpoint(resolve_model(name, cache_directory()).path)
    except LoadError as error:
        pytest.skip(str(error))
    assert isinstance(checkpoint, GGUFCheckpoint)
    return checkpoint


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_tensor_decodes_to_the_reference_values(name: str) -> None:
    """Red when any of the types in the two files is decoded otherwise than by the reference, or a tensor is overlooked."""
    checkpoint = pulled(name)
    reader = gguf.GGUFReader(checkpoint.path)
    raws = {raw.name: raw for raw in map(checkpoint.raw, checkpoint.names())}
    assert set(raws) == {t.name for t in reader.tensors}
    for tensor in reader.tensors:
        rows = slice(0, 4096)  # of the 262,144 rows of Gemma's embedding; all rows of everything else
        expected = gguf.quants.dequantize(tensor.data[rows], tensor.tensor_type)
        raw = raws[tensor.name]
        part = raw.data[rows]
        shape = (len(part), *raw.shape[1:]) if len(raw.shape) > 1 else raw.shape
        np.testing.assert_array_equal(dequantize(type(raw)(raw.name, shape, raw.type, part)), expected)


@pytest.mark.parametrize("name", CATALOGUE)
def test_metadata_is_read_in_time(name: str) -> None:
    """Red when a vocabulary costs start-up time before anyone asks for it."""
    path = pulled(name).path

    def seconds() -> float:
        start = time.perf_counter()
        open_checkpoint(path)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.06


def test_smollm2_is_packed_exactly_and_mapped_in_time(tmp_path: Path) -> None:
    """Red when packing changes a value, misplaces a row of q or k, or the second start reads more than it must."""
    checkpoint = pulled("smollm2-135m")
    assert checkpoint.config["eos_token_id"] == [2, 0]
    params = llama_params(checkpoint.config)
    weights = load_parameters(checkpoint, params, None, tmp_path)

    def seconds() -> float:
        start = time.perf_counter()
        load_parameters(open_checkpoint(checkpoint.path), params, None, tmp_path)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.05
    reference = {t.name: t for t in gguf.GGUFReader(checkpoint.path).tensors}
    for param in params:
        if param.kind == "vector" or param.alias_of:
            continue
        weight = weights[param.name]
        assert isinstance(weight, LinearWeight)
        found = np.concatenate([unpack(s) for s in weight.segments])
        start = 0
        for source in param.sources:
            tensor = reference[gguf_name(source.name)]
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if source.gguf_heads:  # undo what the converter did
                rows, inputs = expected.shape
                pairs = expected.reshape(source.gguf_heads, rows // source.gguf_heads // 2, 2, inputs)
                expected = pairs.swapaxes(1, 2).reshape(rows, inputs)
            np.testing.assert_array_equal(found[start : start + len(expected)], expected)
            start += len(expected)


def test_gemma3_packs_every_matrix_without_loss(tmp_path: Path) -> None:
    """Red when a mix of types in one parameter (q, k: Q5_0, v: Q8_0) loses precision or rows."""
    checkpoint = pulled("gemma3-270m")
    assert checkpoint.config["eos_token_id"] == [1, 106]
    matrices = [n for n in checkpoint.names() if len(checkpoint.shape(n)) == 2 and ".0." in n]
    qkv = [n for part in "qkv" for n in matrices if f"{part}_proj" in n and "self_attn" in n]
    groups = [qkv] + [[n] for n in matrices if n not in qkv]
    params = [
        Param(name=names[0], kind="matrix", sources=tuple(Source(name=n, shape=checkpoint.shape(n)) for n in names))
        for names in groups
    ]
    others = [
        Param(
            name=n,
            kind="matrix" if len(checkpoint.shape(n)) == 2 else "vector",
            sources=(Source(name=n, shape=checkpoint.shape(n)),),
        )
        for n in checkpoint.names()
        if n not in matrices
    ]
    weights = load_parameters(checkpoint, params + others, None, tmp_path)
    for names in groups:
        weight = weights[names[0]]
        assert isinstance(weight, LinearWeight)
        expected = np.concatenate([dequantize(checkpoint.raw(n)) for n in names])
        np.testing.assert_array_equal(np.concatenate([unpack(s) for s in weight.segments]), expected)
