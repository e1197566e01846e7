"""Write a Llama with random weights as a GGUF file: shapes to measure speed on, where no real model is at hand.

    python tools/random_gguf.py OUT.gguf --shape 1.2b --type q4_0 --tokenizer-from smollm2.gguf

The tokenizer, the chat template and with them the vocabulary's size are copied from another GGUF file. What such a model says
means nothing; its speed is that of any model of its shape and types. Needs the `gguf` package (in the `test` extra).

    shape   layers  width  heads  key heads  feed-forward    weights with a vocabulary of 49,152
    1.2b    18      2048   32     8          8192            1.19 billion
    3b      28      3072   24     8          8192            2.97 billion
    tiny    2       64     4      2          96              for tests
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from noria.bench.micro import random_raw
from noria.weights.quantize import BLOCKS, RawTensor

CONTEXT = 8192
ROPE_BASE = 500000.0
EPSILON = 1e-5
TYPES = ("q4_0", "q4_1", "q8_0", "bf16")


class Shape(NamedTuple):
    """Of a Llama."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SHAPES = {
    "1.2b": Shape(18, 2048, 32, 8, 8192),
    "3b": Shape(28, 3072, 24, 8, 8192),
    "tiny": Shape(2, 64, 4, 2, 96),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a Llama with random weights as a GGUF file.")
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--shape", choices=SHAPES, default="1.2b")
    parser.add_argument(
        "--type", choices=TYPES, default="q4_0", help="of the matrices; the embedding is Q8_0, or BF16 with bf16"
    )
    parser.add_argument("--tokenizer-from", type=Path, required=True, help="a GGUF file to copy the tokenizer from")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    write(arguments.out, SHAPES[arguments.shape], arguments.type.upper(), arguments.tokenizer_from, arguments.seed)
    print(f"{arguments.out}: {arguments.out.stat().st_size / 2**20:.0f} MiB", file=sys.stderr)
    return 0


def write(out: Path, shape: Shape, kind: str, tokenizer_from: Path, seed: int = 0) -> None:
    """Tensor by tensor: no more than one is in memory."""
    writer = gguf.GGUFWriter(out, "llama")
    vocab = copy_tokenizer(gguf.GGUFReader(tokenizer_from), writer)
    writer.add_name(f"random {out.stem}")
    writer.add_block_count(shape.layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_vocab_size(vocab)
    listed = list(tensors(shape, kind, vocab))
    for name, dimensions, raw_type in listed:
        row_bytes = dimensions[-1] // BLOCKS[raw_type].elements * BLOCKS[raw_type].nbytes
        if raw_type == "F32":
            writer.add_tensor_info(name, dimensions, np.dtype(np.float32), 4 * dimensions[0])
        else:
            stored = (dimensions[0], row_bytes)
            quantization = gguf.GGMLQuantizationType[raw_type]
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), dimensions[0] * row_bytes, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    for _, dimensions, raw_type in listed:
        writer.write_tensor_data(_data(dimensions, raw_type, rng))
    writer.close()


def copy_tokenizer(source: gguf.GGUFReader, writer: gguf.GGUFWriter) -> int:
    """Every `tokenizer.` field; returns the vocabulary's size."""
    vocab = 0
    for field in source.fields.values():
        if not field.name.startswith("tokenizer."):
            continue
        contents: Any = field.contents()
        if field.name == "tokenizer.ggml.tokens":
            vocab = len(contents)
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, contents, kind, sub_type=inner)
    if not vocab:
        raise SystemExit("the file has no tokenizer to copy")
    return vocab


def tensors(shape: Shape, kind: str, vocab: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape, type) of every tensor; the head is tied to the embedding."""
    h, f, kv = shape.hidden, shape.feed_forward, shape.kv_heads * shape.head_dim
    yield "token_embd.weight", (vocab, h), "BF16" if kind == "BF16" else "Q8_0"
    for layer in range(shape.layers):
        for name, dimensions in (
            ("attn_norm", (h,)),
            ("attn_q", (h, h)),
            ("attn_k", (kv, h)),
            ("attn_v", (kv, h)),
            ("attn_output", (h, h)),
            ("ffn_norm", (h,)),
            ("ffn_gate", (f, h)),
            ("ffn_up", (f, h)),
            ("ffn_down", (h, f)),
        ):
            yield f"blk.{layer}.{name}.weight", dimensions, kind if len(dimensions) == 2 else "F32"
    yield "output_norm.weight", (h,), "F32"


def _data(dimensions: tuple[int, ...], raw_type: str, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    if len(dimensions) == 1:
        return np.ones(dimensions, np.float32)
    raw: RawTensor = random_raw(*dimensions, raw_type, rng)
    return raw.data


if __name__ == "__main__":
    sys.exit(main())
