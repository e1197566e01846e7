// Rotary position embedding, in halves: dims i and i + half of a head turn together; dims from 2 half on are left alone.
//
// Contract:  x[i]        = fma(x[i], cos, -(x[i + half] * sin))
//            x[i + half] = fma(x[i + half], cos, x[i] * sin)
#pragma once
#include "simd.h"

namespace noria::NORIA_TIER {

inline void rotate(vf16& low, vf16& high, vf16 cosine, vf16 sine) {
  const vf16 turned_low = fma(low, cosine, zero() - high * sine);
  high = fma(high, cosine, low * sine);
  low = turned_low;
}

// cos and sin: the position's row of the rope table, `half` values each.
inline void rope_head(float* x, const float* cosines, const float* sines, int64_t half) {
  int64_t i = 0;
  for (; i + 16 <= half; i += 16) {
    vf16 low = load(x + i), high = load(x + half + i);
    rotate(low, high, load(cosines + i), load(sines + i));
    store(x + i, low);
    store(x + half + i, high);
  }
  if (i < half) {
    const int rest = static_cast<int>(half - i);
    vf16 low = load_part(x + i, rest), high = load_part(x + half + i, rest);
    rotate(low, high, load_part(cosines + i, rest), load_part(sines + i, rest));
    store_part(x + i, low, rest);
    store_part(x + half + i, high, rest);
  }
}

}  // namespace noria::NORIA_TIER
