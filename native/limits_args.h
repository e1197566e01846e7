// What limits.h measures.
#pragma once
#include <cstdint>

namespace noria {

enum class LimitUnit : int32_t {
  u8s8,  // dot products of unsigned with signed bytes, int32 sums
  bf16,  // dot products of bfloat16 pairs, float32 sums
  f32,   // float32 FMA
};

constexpr int64_t kLimitOperandBytes = 64 * 8;

}  // namespace noria
