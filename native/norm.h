// Root mean square norms.
//
// Contract: lane i of 16 accumulates the squares of elements i, i + 16, i + 32 ... by FMA in that order, the lanes are summed
// by sum_lanes, and y = (x * (1 / sqrt(sum / width + eps))) * weight with IEEE square root and divisions.
#pragma once
#include "math.h"

namespace noria::NORIA_TIER {

inline float inverse_rms(const float* x, int64_t width, float eps) {
  vf16 squares = zero();
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) {
    const vf16 v = load(x + i);
    squares = fma(v, v, squares);
  }
  if (i < width) {
    const vf16 v = load_part(x + i, static_cast<int>(width - i));
    squares = fma(v, v, squares);
  }
  const float mean = sum_lanes(squares) / static_cast<float>(width);
  float lanes[16];
  store(lanes, set1(1.0f) / sqrt(set1(mean + eps)));
  return lanes[0];
}

// y may be x.
inline void rms_norm_row(const float* x, const float* weight, float eps, int64_t width, float* y) {
  const vf16 scale = set1(inverse_rms(x, width, eps));
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) store(y + i, load(x + i) * scale * load(weight + i));
  if (i < width) {
    const int rest = static_cast<int>(width - i);
    store_part(y + i, load_part(x + i, rest) * scale * load_part(weight + i, rest), rest);
  }
}

// x += y.
inline void add_row(float* x, const float* y, int64_t width) {
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) store(x + i, load(x + i) + load(y + i));
  for (; i < width; ++i) x[i] = x[i] + y[i];
}

}  // namespace noria::NORIA_TIER
