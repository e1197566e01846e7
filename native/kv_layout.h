// How one block of the paged cache lies in memory for the kernels.
//
// Sixteen blocks with neighbouring numbers share a *shelf*, [layer slot][kv head][k|v][16 blocks][16 x dim elements]: a sequence whose
// blocks were taken one after the other (a prompt's are) is read in runs of 16 blocks. Single blocks, of 2 to 8 KB a head, would be
// too short for the hardware to prefetch: they are read at a third of the speed.
//
// Inside one head's 16 x dim elements the order serves the loads of attention.h:
//
//   bf16   K [dim / 2][16 keys][2]     one 64-byte load: a pair of dims of 16 keys     (lane = key)
//          V [8 key pairs][dim][2]     one 64-byte load: a pair of keys of 16 dims     (lane = dim)
//   f32    K [dim][16 keys]            one load: one dim of 16 keys
//          V [16 keys][dim]            one load: 16 dims of one key
//   int8   K [dim / 4][16 keys][4]     one 64-byte load: four dims of 16 keys; a code is stored as code + 128
//          V [8 key pairs][dim][2]     one 32-byte load: a pair of keys of 16 dims
//          each followed by its scales, float32 [16 keys]
//
// Memory of a slot that was never written, or was written for another sequence, may hold anything, NaN included.
#pragma once
#include <cstdint>

#include "step.h"

namespace noria {

constexpr int kShelfBlocks = 16;
enum class KVType : int32_t { bf16, f32, int8 };

struct KVLayout {
  uint8_t* base;  // shelf s starts at base + s * kShelfBlocks * block_bytes
  int64_t block_bytes;
  int64_t slot;   // the layer's slot in a block
  int32_t group;  // the layer group, for the block table
  int32_t kv_heads;
  int32_t dim;  // of a head, a multiple of 16
  KVType type;
};

static inline int64_t kv_head_bytes(const KVLayout& kv) {
  const int64_t values = static_cast<int64_t>(kBlockSize) * kv.dim;
  switch (kv.type) {
    case KVType::bf16:
      return values * 2;
    case KVType::f32:
      return values * 4;
    case KVType::int8:
      return values + kBlockSize * 4;
  }
  return 0;
}

static inline uint8_t* head_of_block(const KVLayout& kv, int32_t block, int32_t head, int32_t which) {
  const int64_t run = (kv.slot * kv.kv_heads + head) * 2 + which, place = run * kShelfBlocks + block % kShelfBlocks;
  return kv.base + block / kShelfBlocks * (kShelfBlocks * kv.block_bytes) + place * kv_head_bytes(kv);
}
static inline uint8_t* key_block(const KVLayout& kv, int32_t block, int32_t head) { return head_of_block(kv, block, head, 0); }
static inline uint8_t* value_block(const KVLayout& kv, int32_t block, int32_t head) { return head_of_block(kv, block, head, 1); }

}  // namespace noria
