"""The paged KV cache's memory, and its blocks in the interchange form.

Inside, each head's 16 x dim elements are packed for the kernels (native/kv_layout.h); outside, a block is
[layer slot][k|v][kv head][16][dim].
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from noria.backends.base import BLOCK_SIZE, KVCacheSpec
from noria.backends.cpu.memory import anonymous

Elements = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class KVCache:
    def __init__(self, spec: KVCacheSpec) -> None:
        self.spec = spec
        self.memory = anonymous(spec.num_blocks * spec.block_bytes)
        self._element = np.dtype(np.uint16 if spec.dtype == "bf16" else np.uint32)

    def copy(self, source: int, destination: int) -> None:
        self._check(source)
        self._check(destination)
        self._bytes(destination)[:] = self._bytes(source)

    def read(self, block: int) -> npt.NDArray[np.uint8]:
        self._check(block)
        inside = self._bytes(block).view(self._element).reshape(self._heads)
        outside = np.empty((*self._heads[:3], BLOCK_SIZE, self.spec.head_dim), self._element)
        outside[:, 0] = _keys_outside(inside[:, 0], self.spec.head_dim)
        outside[:, 1] = _values_outside(inside[:, 1], self.spec.head_dim)
        return outside.reshape(-1).view(np.uint8)

    def write(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        self._check(block)
        if data.dtype != np.uint8 or data.size != self.spec.block_bytes:
            raise ValueError(f"a block is {self.spec.block_bytes} bytes of uint8, not {data.size} of {data.dtype}")
        outside = np.ascontiguousarray(data).reshape(-1).view(self._element)
        outside = outside.reshape(*self._heads[:3], BLOCK_SIZE, self.spec.head_dim)
        inside = self._bytes(block).view(self._element).reshape(self._heads)
        inside[:, 0] = _keys_inside(outside[:, 0])
        inside[:, 1] = _values_inside(outside[:, 1])

    @property
    def _heads(self) -> tuple[int, int, int, int]:
        """[layer slot][k|v][kv head][elements of one head]"""
        spec = self.spec
        return len(spec.groups[0].layers), 2, spec.num_kv_heads, BLOCK_SIZE * spec.head_dim

    def _bytes(self, block: int) -> npt.NDArray[np.uint8]:
        size = self.spec.block_bytes
        return self.memory[block * size : (block + 1) * size]

    def _check(self, block: int) -> None:
        if not 0 <= block < self.spec.num_blocks:
            raise ValueError(f"block {block} is not one of the cache's {self.spec.num_blocks}")


def _keys_outside(inside: Elements, dim: int) -> Elements:
    """[..., dim / width][16 keys][width] -> [..., 16, dim]"""
    width = _width(inside)
    pairs = inside.reshape(*inside.shape[:-1], dim // width, BLOCK_SIZE, width)
    return np.swapaxes(pairs, -3, -2).reshape(*inside.shape[:-1], BLOCK_SIZE, dim)


def _keys_inside(outside: Elements) -> Elements:
    width, dim = _width(outside), outside.shape[-1]
    pairs = outside.reshape(*outside.shape[:-1], dim // width, width)
    return np.swapaxes(pairs, -3, -2).reshape(*outside.shape[:-2], -1)


def _values_outside(inside: Elements, dim: int) -> Elements:
    """[..., 16 / width key pairs][dim][width] -> [..., 16, dim]"""
    width = _width(inside)
    pairs = inside.reshape(*inside.shape[:-1], BLOCK_SIZE // width, dim, width)
    return np.swapaxes(pairs, -2, -1).reshape(*inside.shape[:-1], BLOCK_SIZE, dim)


def _values_inside(outside: Elements) -> Elements:
    width, dim = _width(outside), outside.shape[-1]
    pairs = outside.reshape(*outside.shape[:-2], BLOCK_SIZE // width, width, dim)
    return np.swapaxes(pairs, -2, -1).reshape(*outside.shape[:-2], -1)


def _width(elements: Elements) -> int:
    """Elements in a 32-bit lane."""
    return 4 // elements.dtype.itemsize
