"""The paged KV cache's memory, and its blocks in the interchange form.

Inside, 16 blocks stand on a shelf, [layer slot][kv head][k|v][16 blocks], and each head's 16 x dim elements are packed for the
kernels (native/kv_layout.h); outside, a block is [layer slot][k|v][kv head][16][dim].
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from noria.backends.base import BLOCK_SIZE, KVCacheSpec
from noria.backends.cpu.memory import anonymous

Elements = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


SHELF_BLOCKS = 16


def cache_bytes(spec: KVCacheSpec) -> int:
    """Whole shelves; what is never written costs nothing."""
    return -(-spec.num_blocks // SHELF_BLOCKS) * SHELF_BLOCKS * spec.block_bytes


class KVCache:
    def __init__(self, spec: KVCacheSpec) -> None:
        self.spec = spec
        self.memory = anonymous(cache_bytes(spec))
        element = np.dtype(np.uint16 if spec.dtype == "bf16" else np.uint32)
        slots, size = len(spec.groups[0].layers), BLOCK_SIZE * spec.head_dim
        shelves = self.memory.view(element).reshape(-1, slots, spec.num_kv_heads, 2, SHELF_BLOCKS, size)
        self._shelves: Elements = shelves.transpose(0, 4, 1, 3, 2, 5)  # [shelf][block][slot][k|v][kv head][elements]

    def copy(self, source: int, destination: int) -> None:
        self._block(destination)[:] = self._block(source)

    def read(self, block: int) -> npt.NDArray[np.uint8]:
        inside = self._block(block)
        outside = np.empty((*inside.shape[:3], BLOCK_SIZE, self.spec.head_dim), inside.dtype)
        outside[:, 0] = _keys_outside(inside[:, 0], self.spec.head_dim)
        outside[:, 1] = _values_outside(inside[:, 1], self.spec.head_dim)
        return outside.reshape(-1).view(np.uint8)

    def write(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        if data.dtype != np.uint8 or data.size != self.spec.block_bytes:
            raise ValueError(f"a block is {self.spec.block_bytes} bytes of uint8, not {data.size} of {data.dtype}")
        inside = self._block(block)
        outside = np.ascontiguousarray(data).reshape(-1).view(inside.dtype)
        outside = outside.reshape(*inside.shape[:3], BLOCK_SIZE, self.spec.head_dim)
        inside[:, 0] = _keys_inside(outside[:, 0])
        inside[:, 1] = _values_inside(outside[:, 1])

    def _block(self, block: int) -> Elements:
        """[layer slot][k|v][kv head][elements of one head], a view"""
        if not 0 <= block < self.spec.num_blocks:
            raise ValueError(f"block {block} is not one of the cache's {self.spec.num_blocks}")
        view: Elements = self._shelves[block // SHELF_BLOCKS, block % SHELF_BLOCKS]
        return view


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
