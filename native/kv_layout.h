// How one block of the paged cache lies in memory for the kernels.
//
// A block holds, for each layer slot, K of all KV heads and then V of all KV heads: [slot][k|v][kv head][16 x dim elements].
// Inside one head's 16 x dim elements the order serves the loads of attention.h:
//
//   bf16   K [dim / 2][16 keys][2]     one 64-byte load: a pair of dims of 16 keys     (lane = key)
//          V [8 key pairs][dim][2]     one 64-byte load: a pair of keys of 16 dims     (lane = dim)
//   f32    K [dim][16 keys]            one load: one dim of 16 keys
//          V [16 keys][dim]            one load: 16 dims of one key
//
// Memory of a slot that was never written, or was written for another sequence, may hold anything, NaN included.
#pragma once
#include <cstdint>

#include "step.h"

namespace noria {

struct KVLayout {
  uint8_t* base;         // block b starts at base + b * block_bytes
  int64_t block_bytes;
  int64_t slot;          // the layer's slot in a block
  int32_t group;         // the layer group, for the block table
  int32_t kv_heads;
  int32_t dim;           // of a head, a multiple of 16
  bool is_f32;           // else bf16
};

static inline int64_t kv_head_bytes(const KVLayout& kv) { return static_cast<int64_t>(kBlockSize) * kv.dim * (kv.is_f32 ? 4 : 2); }

static inline uint8_t* key_block(const KVLayout& kv, int32_t block, int32_t head) {
  return kv.base + block * kv.block_bytes + (kv.slot * 2 * kv.kv_heads + head) * kv_head_bytes(kv);
}
static inline uint8_t* value_block(const KVLayout& kv, int32_t block, int32_t head) {
  return kv.base + block * kv.block_bytes + ((kv.slot * 2 + 1) * kv.kv_heads + head) * kv_head_bytes(kv);
}

}  // namespace noria
