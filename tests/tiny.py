"""Tiny random models of every family, made by Hugging Face transformers: the reference that tests compare with.

model = tiny.llama(num_key_value_heads=1)        a transformers model, float32
loaded = tiny.load(model, tmp_path)              the same weights as Noria reads them, from `save_pretrained`'s folder
machine = tiny.Machine(loaded, TorchBackend())   a backend with a paged cache, driven by hand
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from noria.backends.base import BLOCK_SIZE, Backend, KVCacheSpec, KVType
from noria.core.plan import NewRow, PlanRow, StepPlan
from noria.models import rope
from noria.models.registry import family_of
from noria.models.spec import ModelSpec, layer_groups
from noria.runner.inputs import step_inputs
from noria.runner.rows import Rows
from noria.types import SamplingParams
from noria.weights.checkpoint import open_checkpoint
from noria.weights.formats import LinearWeight, PackedMatrix, VectorWeight, Weight, WeightFormat, merged
from noria.weights.pack import pack
from noria.weights.packed import load_parameters
from noria.weights.quantize import BLOCKS, RawTensor, natural_format, to_bf16

transformers.logging.set_verbosity_error()

VOCAB = 259  # no multiple of any tile
Float32 = npt.NDArray[np.float32]


def llama(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A Llama of two layers: four query heads on two key heads of 16 dimensions."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
    }
    return _random(LlamaForCausalLM, LlamaConfig(**settings | overrides), seed)


def gemma(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A Gemma 3 of six layers, one of them full, with a window of 24 positions."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 24,
        "max_position_embeddings": 256,
    }
    return _random(Gemma3ForCausalLM, Gemma3TextConfig(**settings | overrides), seed)


def _random(kind: type[Any], config: Any, seed: int) -> PreTrainedModel:
    """Random weights, norms and biases included, large enough that logits differ by units."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model: PreTrainedModel = kind(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.3 if parameter.ndim == 1 else 0.15)
            if "norm" in name and not name.startswith("gemma") and kind is LlamaForCausalLM:
                parameter.add_(1.0)
    return model


def reference_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Float32:
    """[len(tokens), vocab] from one pass of transformers."""
    with torch.inference_mode():
        logits: Float32 = model(torch.tensor([list(tokens)])).logits[0].float().numpy()
    return logits


@dataclass(frozen=True)
class Loaded:
    spec: ModelSpec
    weights: Mapping[str, Weight]
    forward: Any


def load(model: PreTrainedModel, folder: Path, quantization: str | None = "f32") -> Loaded:
    """Save a model and read it back through the checkpoint reader and the loader."""
    model.save_pretrained(folder)
    return open_path(folder, quantization)


def open_path(path: Path, quantization: str | None = "f32") -> Loaded:
    checkpoint = open_checkpoint(path)
    family = family_of(checkpoint.config)
    spec = family.spec_from_config(checkpoint.config)
    weights = load_parameters(checkpoint, family.params(spec), quantization=quantization)
    return Loaded(spec, weights, family.forward)


class Machine:
    """A backend with a built model and a paged cache whose blocks are handed out in random order."""

    def __init__(
        self,
        loaded: Loaded,
        backend: Backend,
        *,
        kv_dtype: KVType = "f32",
        max_len: int = 256,
        max_rows: int = 4,
        max_tokens: int = 64,
        seed: int = 0,
    ) -> None:
        spec = loaded.spec
        self.spec = spec
        self.backend = backend
        self.groups = layer_groups(spec)
        per_row = -(-max_len // BLOCK_SIZE)
        self.kv = KVCacheSpec(
            groups=self.groups,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=kv_dtype,
            num_blocks=1 + max_rows * per_row * len(self.groups),
            max_blocks_per_row=per_row,
        )
        self.max_tokens = max_tokens
        self.executable = backend.build(
            lambda ops: loaded.forward(ops, spec, loaded.weights),
            ropes=[rope.tables(r, max_len) for r in spec.ropes],
            kv=self.kv,
            max_tokens=max_tokens,
            max_rows=max_rows,
            vocab_size=spec.vocab_size,
        )
        self.rows = Rows(max_rows, max_len, len(self.groups), per_row)
        self._free = (np.random.default_rng(seed).permutation(self.kv.num_blocks - 1) + 1).tolist()
        self._lengths: dict[int, int] = {}

    def take(self, row: int, tokens: Sequence[int], params: SamplingParams | None = None, **fields: Any) -> None:
        """Give a sequence a row and blocks for its tokens and 16 more."""
        blocks = -(-(len(tokens) + BLOCK_SIZE) // BLOCK_SIZE)
        tables = tuple(tuple(self._free.pop() for _ in range(blocks)) for _ in self.groups)
        settings: dict[str, Any] = {"prompt_length": len(tokens), "seed": 0, "stop_ids": ()}
        self.rows.take(
            NewRow(
                row=row,
                tokens=tuple(tokens),
                blocks=tables,
                params=params or SamplingParams(temperature=0.0),
                **settings | fields,
            )
        )

    def logits(self, chunks: Sequence[PlanRow]) -> list[Float32]:
        """One step; the logits of every token of each chunk."""
        inputs, _ = step_inputs(StepPlan(step=0, rows=tuple(chunks)), self.rows)
        everything = np.arange(len(inputs.tokens), dtype=np.int32)
        logits = self.executable.all_logits(dataclasses.replace(inputs, logit_rows=everything))
        return np.split(logits, inputs.row_offsets[1:-1])

    def prefill(self, row: int, length: int, chunk_sizes: Sequence[int]) -> Float32:
        """Run the first `length` tokens of a row in chunks of the given sizes (the last one repeats): [length, vocab]."""
        parts, start, sizes = [], 0, list(chunk_sizes)
        while start < length:
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            size = min(size, length - start)
            parts += self.logits([PlanRow(row=row, start=start, count=size, tokens=())])
            start += size
        return np.concatenate(parts)


# -- weights in any format, without transformers ---------------------------------------------------------------------------


LLAMA_SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GEMMA_SHAPE: dict[str, Any] = LLAMA_SHAPE | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 24,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 8.0,
}
K_SHAPE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}  # K types come in blocks of 256
FORMATS: dict[str, tuple[str, ...]] = {  # name: GGML types, taken in turn by the matrices
    "f32": ("F32",),
    "bf16": ("BF16",),
    "q8": ("Q8_0",),
    "q4-minima": ("Q4_1",),
    "q4-centred": ("Q4_0",),
    "q8-minima": ("Q5_1",),
    "q4-k": ("Q4_K",),
    "q8-group16": ("Q6_K",),
    "mixed": ("Q5_0", "Q6_K", "Q4_K", "Q8_0", "Q5_K", "BF16", "Q4_1"),
}


def random_model(shape: Mapping[str, Any], format_name: str, seed: int = 0) -> Loaded:
    """A model of that shape whose matrices are random blocks of the format's types, packed as a GGUF file's would be."""
    types = FORMATS[format_name]
    settings = dict(shape) | (K_SHAPE if any(t.endswith("_K") for t in types) else {})
    family = family_of(settings)
    spec = family.spec_from_config(settings)
    rng = np.random.default_rng(seed)
    weights: dict[str, Weight] = {}
    matrices = 0
    for param in family.params(spec):
        if param.kind == "vector":
            values = 1 + 0.3 * rng.standard_normal(param.sources[0].shape)
            weights[param.name] = VectorWeight(param.name, values.astype(np.float32))
        elif param.alias_of:
            weights[param.name] = weights[param.alias_of]
        else:
            parts = []
            for source in param.sources:
                raw = _random_raw(source.shape, types[matrices % len(types)], rng)
                natural = WeightFormat(kind="f32") if raw.type == "F32" else natural_format(raw.type)
                parts.append(LinearWeight(param.name, (_aligned(pack([raw], natural)),)))
                matrices += 1
            weights[param.name] = merged(param.name, parts)
    return Loaded(spec, weights, family.forward)


def _aligned(matrix: PackedMatrix) -> PackedMatrix:
    """The same matrix at a multiple of 64 bytes, as kernels want it."""
    room = np.empty(matrix.data.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    room[start : start + matrix.data.nbytes] = matrix.data
    return PackedMatrix(matrix.outputs, matrix.inputs, matrix.format, room[start : start + matrix.data.nbytes])


def _random_raw(shape: tuple[int, ...], raw_type: str, rng: np.random.Generator) -> RawTensor:
    """A tensor of random codes; scales are such that values are about 0.1."""
    outputs, inputs = shape
    if raw_type in ("F32", "BF16"):
        values = (0.1 * rng.standard_normal(shape)).astype(np.float32)
        data = values.view(np.uint8) if raw_type == "F32" else to_bf16(values).view(np.uint8)
        return RawTensor("random", shape, raw_type, data.reshape(outputs, -1))
    block = BLOCKS[raw_type]
    blocks = rng.integers(0, 256, (outputs * inputs // block.elements, block.nbytes), np.uint8)
    scale, others = {  # byte offset and size of the half-precision scale; offset and size of the minimum's
        "Q4_0": ((0, 0.03), None),
        "Q4_1": ((0, 0.03), (2, -0.2)),
        "Q5_0": ((0, 0.015), None),
        "Q5_1": ((0, 0.015), (2, -0.2)),
        "Q8_0": ((0, 0.002), None),
        "Q4_K": ((0, 0.0004), (2, 0.0025)),
        "Q5_K": ((0, 0.0002), (2, 0.0025)),
        "Q6_K": ((208, 0.00004), None),
    }[raw_type]
    for place in (scale, others):
        if place is not None:
            offset, size = place
            halves = (size * (0.5 + rng.random(len(blocks)))).astype(np.float16)
            blocks[:, offset : offset + 2] = halves.view(np.uint8).reshape(-1, 2)
    return RawTensor("random", shape, raw_type, blocks.reshape(outputs, -1))
