"""`Backend` in plain torch: each op runs at once, in float32, over dequantised weights. Slow, and easy to believe.

Activations are not quantised here: this is the exact result for the packed weights, which the native kernels approximate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from noria.backends.base import BLOCK_SIZE, AttentionSpec, Drawn, Handle, KVCacheSpec, Ops, StepInputs
from noria.backends.torch import sampler
from noria.backends.torch.kv import KVCache
from noria.weights.formats import LinearWeight, VectorWeight
from noria.weights.pack import unpack

Rope = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]


class TorchBackend:
    """The float32 reference on the CPU. `threads` 0 leaves torch's own choice."""

    name = "torch"

    def __init__(self, *, threads: int = 0) -> None:
        if threads:
            torch.set_num_threads(threads)
        self._cache = KVCache()

    def build(
        self,
        forward: Callable[[Ops], Handle],
        *,
        ropes: Sequence[Rope],
        kv: KVCacheSpec,
        max_tokens: int,
        max_rows: int,
        vocab_size: int,
    ) -> TorchExecutable:
        """Allocate the cache. `max_tokens` and `max_rows` bound nothing here: every step allocates what it needs."""
        self._cache = KVCache(kv)
        return TorchExecutable(forward, self._cache, ropes)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            self._cache.copy(source, destination)

    def read_block(self, block: int) -> npt.NDArray[np.uint8]:
        return self._cache.read(block)

    def write_block(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        self._cache.write(block, data)

    def close(self) -> None:
        self._cache = KVCache()


class TorchExecutable:
    """Runs the forward pass anew each step."""

    def __init__(self, forward: Callable[[Ops], Handle], cache: KVCache, ropes: Sequence[Rope]) -> None:
        self._forward = forward
        self._cache = cache
        self._ropes = [(torch.from_numpy(cos), torch.from_numpy(sin)) for cos, sin in ropes]
        self._weights: dict[str, Tensor] = {}

    def run(self, inputs: StepInputs) -> Drawn:
        ops, logits = self._run(inputs)
        drawn = sampler.draw(logits, inputs.draws)
        drawn.hidden = ops.hidden.numpy()
        return drawn

    def all_logits(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        return self._run(inputs)[1]

    def _run(self, inputs: StepInputs) -> tuple[TorchOps, npt.NDArray[np.float32]]:
        ops = TorchOps(inputs, self._cache, self._ropes, self._weights)
        with torch.inference_mode():
            logits = _tensor(self._forward(ops))
        return ops, logits.numpy()


def _tensor(handle: Handle) -> Tensor:
    assert isinstance(handle, Tensor)
    return handle


class TorchOps:
    """The ops of one step. A handle is the activation itself."""

    def __init__(
        self, inputs: StepInputs, cache: KVCache, ropes: list[tuple[Tensor, Tensor]], weights: dict[str, Tensor]
    ) -> None:
        self._inputs = inputs
        self._cache = cache
        self._ropes = ropes
        self._weights = weights
        self._tokens = torch.from_numpy(inputs.tokens.astype(np.int64))
        self._positions = torch.from_numpy(inputs.positions.astype(np.int64))
        self._slots = _slot_indices(inputs)
        self.hidden = torch.zeros(0, 0)

    def _matrix(self, weight: LinearWeight) -> Tensor:
        """[outputs, inputs], dequantised once and kept."""
        if weight.name not in self._weights:
            parts = [torch.from_numpy(unpack(segment)) for segment in weight.segments]
            self._weights[weight.name] = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._weights[weight.name]

    def embed(self, weight: LinearWeight, scale: float) -> Handle:
        return Handle(self._matrix(weight)[self._tokens] * scale)

    def linear(self, x: Handle, weight: LinearWeight) -> Handle:
        bias = None if weight.bias is None else torch.tensor(weight.bias)
        return Handle(torch.nn.functional.linear(_tensor(x), self._matrix(weight), bias))

    def rms_norm(self, x: Handle, weight: VectorWeight, eps: float, residual: Handle | None = None) -> tuple[Handle, Handle]:
        total = _tensor(x) if residual is None else _tensor(residual) + _tensor(x)
        return Handle(_rms_norm(total, weight, eps)), Handle(total)

    def head_norm(
        self, qkv: Handle, q_weight: VectorWeight, k_weight: VectorWeight, eps: float, attention: AttentionSpec
    ) -> Handle:
        q, k, v = _heads(_tensor(qkv), attention)
        return _joined(_rms_norm(q, q_weight, eps), _rms_norm(k, k_weight, eps), v)

    def rope(self, qkv: Handle, rope: int, attention: AttentionSpec) -> Handle:
        cos, sin = (table[self._positions].unsqueeze(1) for table in self._ropes[rope])
        q, k, v = _heads(_tensor(qkv), attention)
        return _joined(_rotate(q, cos, sin), _rotate(k, cos, sin), v)

    def attend(self, qkv: Handle, attention: AttentionSpec) -> Handle:
        q, k, v = _heads(_tensor(qkv), attention)
        blocks, offsets = self._slots[attention.group]
        for which, values in enumerate((k, v)):
            self._cache.put(blocks, attention.slot, which, offsets, values)
        out = torch.empty_like(q)
        bounds = self._inputs.row_offsets
        for row, (first, last) in enumerate(pairwise(bounds)):
            if last > first:
                out[first:last] = self._attend_row(q[first:last], row, attention)
        return Handle(out.reshape(len(q), -1))

    def _attend_row(self, q: Tensor, row: int, attention: AttentionSpec) -> Tensor:
        """The chunk's queries [count, heads, dim] over the keys their windows can reach, all read from the cache."""
        inputs = self._inputs
        start = int(inputs.positions[inputs.row_offsets[row]])
        end = start + len(q)
        first = max(0, start - attention.window + 1) if attention.window else 0
        positions = np.arange(first, end)
        table = inputs.block_tables[attention.group][inputs.row_slots[row]]
        blocks = torch.from_numpy(table[positions // BLOCK_SIZE].astype(np.int64))
        cached = self._cache.get(blocks, attention.slot, torch.from_numpy(positions % BLOCK_SIZE))
        shared = attention.num_heads // attention.num_kv_heads
        k, v = cached.repeat_interleave(shared, dim=2).unbind(1)  # [keys, heads, dim] each
        scores = torch.einsum("qhd,khd->hqk", q, k) * attention.scale
        if attention.softcap:
            scores = attention.softcap * torch.tanh(scores / attention.softcap)
        distance = torch.arange(start, end)[:, None] - torch.from_numpy(positions)[None, :]
        hidden = distance < 0
        if attention.window:
            hidden |= distance >= attention.window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

    def gated(self, gate_up: Handle, activation: Literal["silu", "gelu_tanh"]) -> Handle:
        gate, up = _tensor(gate_up).chunk(2, dim=-1)
        if activation == "silu":
            return Handle(torch.nn.functional.silu(gate) * up)
        return Handle(torch.nn.functional.gelu(gate, approximate="tanh") * up)

    def add(self, x: Handle, y: Handle) -> Handle:
        return Handle(_tensor(x) + _tensor(y))

    def gather_logit_rows(self, x: Handle) -> Handle:
        gathered = np.concatenate((self._inputs.logit_rows, self._inputs.hidden_rows)).astype(np.int64)
        return Handle(_tensor(x)[torch.from_numpy(gathered)])

    def hidden_states(self, x: Handle) -> None:
        self.hidden = _tensor(x)[len(self._inputs.logit_rows) :].contiguous()

    def logits(self, x: Handle, weight: LinearWeight, softcap: float) -> Handle:
        logits = _tensor(self.linear(Handle(_tensor(x)[: len(self._inputs.logit_rows)]), weight))
        return Handle(softcap * torch.tanh(logits / softcap) if softcap else logits)


def _slot_indices(inputs: StepInputs) -> list[tuple[Tensor, Tensor]]:
    """By layer group: (block, place in the block) of each of the step's tokens."""
    rows = np.repeat(inputs.row_slots, np.diff(inputs.row_offsets))
    place = torch.from_numpy((inputs.positions % BLOCK_SIZE).astype(np.int64))
    tables = (table[rows, inputs.positions // BLOCK_SIZE].astype(np.int64) for table in inputs.block_tables)
    return [(torch.from_numpy(blocks), place) for blocks in tables]


def _heads(qkv: Tensor, attention: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """q|k|v as [tokens, heads, dim] each."""
    counts = [attention.num_heads, attention.num_kv_heads, attention.num_kv_heads]
    q, k, v = torch.split(qkv.reshape(len(qkv), -1, attention.head_dim), counts, dim=1)
    return q, k, v


def _joined(q: Tensor, k: Tensor, v: Tensor) -> Handle:
    return Handle(torch.cat((q, k, v), dim=1).reshape(len(q), -1))


def _rms_norm(x: Tensor, weight: VectorWeight, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * torch.tensor(weight.data)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] dimensions of each head, halves against each other."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
