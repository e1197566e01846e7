"""The paged KV cache's memory, and its blocks in the interchange form.

Inside, 16 blocks stand on a shelf, [layer slot][kv head][k|v][16 blocks], and each head's 16 x dim elements are packed for the
kernels (native/kv_layout.h); outside, a block is [layer slot][k|v][kv head][16][dim].
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from noria.backends.base import BLOCK_SIZE, KVCacheSpec
from noria.backends.cpu.memory import anonymous

Bytes = npt.NDArray[np.uint8]

SHELF_BLOCKS = 16
ELEMENT_BYTES = {"bf16": 2, "f32": 4, "int8": 1}
KEY_SIGN = 0x80  # keys of an int8 cache are kept with 128 added


def cache_bytes(spec: KVCacheSpec) -> int:
    """Whole shelves; what is never written costs nothing."""
    return -(-spec.num_blocks // SHELF_BLOCKS) * SHELF_BLOCKS * spec.block_bytes


class KVCache:
    def __init__(self, spec: KVCacheSpec) -> None:
        self.spec = spec
        self.memory = anonymous(cache_bytes(spec))
        slots = len(spec.groups[0].layers)
        shelves = self.memory.reshape(-1, slots, spec.num_kv_heads, 2, SHELF_BLOCKS, spec.head_bytes)
        self._shelves = shelves.transpose(0, 4, 1, 3, 2, 5)  # [shelf][block][slot][k|v][kv head][bytes]

    def copy(self, source: int, destination: int) -> None:
        self._block(destination)[:] = self._block(source)

    def read(self, block: int) -> Bytes:
        return self._converted(self._block(block), outward=True).reshape(-1)

    def write(self, block: int, data: Bytes) -> None:
        if data.dtype != np.uint8 or data.size != self.spec.block_bytes:
            raise ValueError(f"a block is {self.spec.block_bytes} bytes of uint8, not {data.size} of {data.dtype}")
        inside = self._block(block)
        inside[:] = self._converted(np.ascontiguousarray(data).reshape(inside.shape), outward=False)

    def _converted(self, block: Bytes, *, outward: bool) -> Bytes:
        """[layer slot][k|v][kv head][bytes] with the elements in the other order; scales, where there are any, stay."""
        element = ELEMENT_BYTES[self.spec.dtype]
        values = BLOCK_SIZE * self.spec.head_dim * element
        lane = 4 // element  # elements of a 32-bit lane: dims of a key
        keys_of_lane = 2 if self.spec.dtype == "int8" else lane  # of a value
        result = block.copy()
        keys, places = result[:, 0, :, :values], result[:, 1, :, :values]
        if self.spec.dtype == "int8":
            keys ^= KEY_SIGN
        #         inside                                  outside
        # keys    [dim / lane][16 keys][lane]             [16 keys][dim / lane][lane]
        # values  [16 / keys_of_lane][dim][keys_of_lane]  [16 / keys_of_lane][keys_of_lane][dim]
        lanes, dim = self.spec.head_dim // lane, self.spec.head_dim
        for_keys = (lanes, BLOCK_SIZE) if outward else (BLOCK_SIZE, lanes)
        for_values = (dim, keys_of_lane) if outward else (keys_of_lane, dim)
        keys[:] = _swapped(keys, *for_keys, lane * element)
        pairs = places.reshape(*places.shape[:-1], BLOCK_SIZE // keys_of_lane, -1)
        places[:] = _swapped(pairs, *for_values, element).reshape(places.shape)
        return result

    def _block(self, block: int) -> Bytes:
        """[layer slot][k|v][kv head][bytes of one head], a view"""
        if not 0 <= block < self.spec.num_blocks:
            raise ValueError(f"block {block} is not one of the cache's {self.spec.num_blocks}")
        view: Bytes = self._shelves[block // SHELF_BLOCKS, block % SHELF_BLOCKS]
        return view


def _swapped(data: Bytes, rows: int, columns: int, item: int) -> Bytes:
    """[..., rows, columns] of items of so many bytes -> [..., columns, rows]; the last axis is flat before and after."""
    swapped: Bytes = np.swapaxes(data.reshape(*data.shape[:-1], rows, columns, item), -3, -2).reshape(data.shape)
    return swapped
