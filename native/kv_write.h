// Writes one token's K and V of one head into its place in a block (layout: kv_layout.h).
#pragma once
#include "kv_layout.h"
#include "quantize.h"

namespace noria::NORIA_TIER {

constexpr int64_t kMostDims = 1024;  // of a head whose K and V are int8

// bf16: keys go out as pairs of dims, values one by one between those of the neighbouring token.
inline void write_token_bf16(const float* k, const float* v, int offset, int64_t dim, uint16_t* key_block, uint16_t* value_block) {
  uint16_t* const key_lane = key_block + offset * 2;
  uint16_t* const value_lane = value_block + (offset / 2) * dim * 2 + offset % 2;
  for (int64_t d = 0; d < dim; d += 16) {
    uint16_t rounded[16];
    store_bf16(rounded, load(k + d));
    for (int i = 0; i < 16; i += 2) std::memcpy(key_lane + (d + i) / 2 * 32, rounded + i, 4);
    store_bf16(rounded, load(v + d));
    for (int i = 0; i < 16; ++i) value_lane[(d + i) * 2] = rounded[i];
  }
}

inline void write_token_f32(const float* k, const float* v, int offset, int64_t dim, float* key_block, float* value_block) {
  for (int64_t d = 0; d < dim; ++d) key_block[d * 16 + offset] = k[d];
  for (int64_t d = 0; d < dim; d += 16) store(value_block + offset * dim + d, load(v + d));
}

// One of the two, K or V, as codes and a scale. A key's codes go out in quads of dims, a value's one by one.
inline void write_key_int8(const float* k, int offset, int64_t dim, uint8_t* block) {
  int8_t codes[kMostDims];
  int32_t sum;
  const float scale = quantize_values(k, dim, codes, sum);
  for (int64_t d = 0; d < dim; d += 4) {
    const uint32_t quad = load_u32(codes + d) ^ 0x80808080u;  // code + 128
    std::memcpy(block + d * 16 + offset * 4, &quad, 4);
  }
  std::memcpy(block + 16 * dim + offset * 4, &scale, 4);
}
inline void write_value_int8(const float* v, int offset, int64_t dim, uint8_t* block) {
  int8_t codes[kMostDims];
  int32_t sum;
  const float scale = quantize_values(v, dim, codes, sum);
  uint8_t* const lane = block + (offset / 2) * dim * 2 + offset % 2;
  for (int64_t d = 0; d < dim; ++d) lane[2 * d] = static_cast<uint8_t>(codes[d]);
  std::memcpy(block + 16 * dim + offset * 4, &scale, 4);
}

// k and v: all KV heads of one token, [kv_heads, dim] each.
inline void write_token(const KVLayout& kv, const int32_t* table, int32_t position, const float* k, const float* v) {
  const int32_t block = table[position / kBlockSize];
  const int offset = position % kBlockSize;
  for (int32_t head = 0; head < kv.kv_heads; ++head) {
    uint8_t* const keys = key_block(kv, block, head);
    uint8_t* const values = value_block(kv, block, head);
    const float* const kh = k + head * kv.dim;
    const float* const vh = v + head * kv.dim;
    switch (kv.type) {
      case KVType::bf16:
        write_token_bf16(kh, vh, offset, kv.dim, reinterpret_cast<uint16_t*>(keys), reinterpret_cast<uint16_t*>(values));
        break;
      case KVType::f32:
        write_token_f32(kh, vh, offset, kv.dim, reinterpret_cast<float*>(keys), reinterpret_cast<float*>(values));
        break;
      case KVType::int8:
        write_key_int8(kh, offset, kv.dim, keys);
        write_value_int8(vh, offset, kv.dim, values);
        break;
    }
  }
}

}  // namespace noria::NORIA_TIER
