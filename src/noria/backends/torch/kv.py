"""The reference's paged cache: [block][layer slot][k|v][kv head][16][dim], as the interchange form of a block has it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from noria.backends.base import BLOCK_SIZE, KVCacheSpec

ELEMENT = {"bf16": torch.bfloat16, "f32": torch.float32, "int8": torch.int8}
SMALLEST_AMAX = 2.0**-119  # as native/quantize.h: below it the scale would be a denormal


class KVCache:
    """K and V as the cache's type holds them: put in and taken out as float32."""

    def __init__(self, spec: KVCacheSpec | None = None) -> None:
        """Of no blocks without a spec."""
        shape = (0, 1, 2, 1, BLOCK_SIZE, 1)
        if spec is not None:
            shape = (spec.num_blocks, len(spec.groups[0].layers), 2, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
        self._values = torch.zeros(shape, dtype=torch.float32 if spec is None else ELEMENT[spec.dtype])
        self._scales = torch.zeros(shape[:-1]) if spec is not None and spec.dtype == "int8" else None

    def put(self, blocks: Tensor, slot: int, which: int, offsets: Tensor, values: Tensor) -> None:
        """Store `values` [tokens, kv heads, dim] at places (blocks[i], offsets[i])."""
        if self._scales is None:
            self._values[blocks, slot, which, :, offsets] = values.to(self._values.dtype)
            return
        amax = values.abs().amax(dim=-1)
        usable = amax.isfinite() & (amax >= SMALLEST_AMAX)
        inverse = torch.where(usable, 127.0 / amax, 0.0)
        self._values[blocks, slot, which, :, offsets] = (
            torch.where(usable.unsqueeze(-1), values * inverse.unsqueeze(-1), 0.0).round().to(torch.int8)
        )
        scales = torch.where(usable, amax / 127.0, torch.where(amax.isfinite(), 0.0, torch.nan))
        self._scales[blocks, slot, which, :, offsets] = scales

    def get(self, blocks: Tensor, slot: int, offsets: Tensor) -> Tensor:
        """[tokens, k|v, kv heads, dim]"""
        values = self._values[blocks, slot, :, :, offsets].float()
        if self._scales is None:
            return values
        return values * self._scales[blocks, slot, :, :, offsets].unsqueeze(-1)

    def copy(self, source: int, destination: int) -> None:
        self._values[destination] = self._values[source]
        if self._scales is not None:
            self._scales[destination] = self._scales[source]

    def read(self, block: int) -> npt.NDArray[np.uint8]:
        values = _bytes_by_head(self._values[block])
        if self._scales is not None:
            values = torch.cat((values, _bytes_by_head(self._scales[block])), dim=-1)
        return values.reshape(-1).numpy().copy()

    def write(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        values = self._values[block]
        heads = torch.from_numpy(data).reshape(*values.shape[:3], -1)
        size = _bytes_by_head(values).shape[-1]
        self._values[block] = heads[..., :size].contiguous().view(values.dtype).reshape(values.shape)
        if self._scales is not None:
            self._scales[block] = heads[..., size:].contiguous().view(torch.float32)


def _bytes_by_head(values: Tensor) -> Tensor:
    """[layer slot][k|v][kv head][bytes]"""
    return values.contiguous().view(torch.uint8).reshape(*values.shape[:3], -1)
