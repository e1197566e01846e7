// Activations in the form that the linear kernels read: int8 codes in groups of 32 (q8 and q4 weights), or bfloat16 pairs (bf16).
//
// A row's quantised form is a function of that row alone, the same bits on every tier.
#pragma once
#include "linear_args.h"
#include "simd.h"

namespace noria::NORIA_TIER {

constexpr int kActivationGroup = 32;

// Below this, amax / 127 would be a denormal and 127 / amax infinite: such a group is zero.
constexpr float kSmallestAmax = 0x1p-119f;

// The bits of |x|: compared as integers they have the order of the floats, and a NaN is above infinity.
inline vi16 magnitude_bits(vf16 x) { return float_to_bits(x) & set1_i32(0x7fffffff); }

// How values whose largest magnitude has the bits `amax_bits` become codes.
struct Quantizer {
  bool usable;
  float scale;
  vf16 inverse;

  explicit Quantizer(int32_t amax_bits) {
    float amax;
    std::memcpy(&amax, &amax_bits, 4);
    const bool finite = amax_bits < 0x7f800000;
    usable = finite && amax >= kSmallestAmax;
    scale = usable ? amax / 127.0f : finite ? 0.0f : __builtin_nanf("");
    inverse = set1(usable ? 127.0f / amax : 0.0f);
  }
  vi16 codes(vf16 x) const { return usable ? to_int(x * inverse) : set1_i32(0); }
};

// `count` values (a multiple of 16) with one scale; returns it. The codes' sum goes to `sum`.
inline float quantize_values(const float* x, int64_t count, int8_t* codes, int32_t& sum) {
  vi16 most = set1_i32(0);
  for (int64_t i = 0; i < count; i += 16) most = max_i32(most, magnitude_bits(load(x + i)));
  const Quantizer quantizer(max_lanes_i32(most));
  vi16 sums = set1_i32(0);
  for (int64_t i = 0; i < count; i += 16) {
    const vi16 some = quantizer.codes(load(x + i));
    store_i8(codes + i, some);
    sums = sums + some;
  }
  sum = sum_lanes_i32(sums);
  return quantizer.scale;
}

// One group: 32 values to codes, scale and sums.
inline void quantize_group(vf16 low, vf16 high, const QuantizedRows& out, int64_t group) {
  const Quantizer quantizer(max_lanes_i32(max_i32(magnitude_bits(low), magnitude_bits(high))));
  const float scale = quantizer.scale;
  const vi16 low_codes = quantizer.codes(low), high_codes = quantizer.codes(high);
  store_i8(out.codes + group * 32, low_codes);
  store_i8(out.codes + group * 32 + 16, high_codes);

  const int32_t low_sum = sum_lanes_i32(low_codes), high_sum = sum_lanes_i32(high_codes);
  out.scales[group] = scale;
  out.sums[group] = low_sum + high_sum;
  out.scaled_sums[group] = scale * static_cast<float>(low_sum + high_sum);
  out.half_sums[2 * group] = low_sum;
  out.half_sums[2 * group + 1] = high_sum;
  out.scaled_half_sums[2 * group] = scale * static_cast<float>(low_sum);
  out.scaled_half_sums[2 * group + 1] = scale * static_cast<float>(high_sum);
}

// x [inputs] to row `row` of `out`.
inline void quantize_row(const float* x, int64_t inputs, const QuantizedRows& out, int64_t row) {
  const int64_t whole = inputs / kActivationGroup, rest = inputs % kActivationGroup;
  int64_t group = row * (padded_codes(inputs) / kActivationGroup);
  for (int64_t i = 0; i < whole; ++i, ++group, x += kActivationGroup) quantize_group(load(x), load(x + 16), out, group);
  if (rest > 0) {
    const int low = rest < 16 ? static_cast<int>(rest) : 16, high = static_cast<int>(rest) - low;
    quantize_group(load_part(x, low), load_part(x + low, high), out, group);
  }
}

// Rows [first, last) of x, x_stride elements apart.
inline void quantize_rows(const float* x, int64_t x_stride, int64_t inputs, const QuantizedRows& out, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) quantize_row(x + row * x_stride, inputs, out, row);
}

// x [inputs] to bfloat16, padded with a zero to a whole pair.
inline void round_row_bf16(const float* x, int64_t inputs, uint16_t* pairs) {
  int64_t i = 0;
  for (; i + 16 <= inputs; i += 16) store_u16(pairs + i, to_bf16(load(x + i)));
  for (; i < inputs; ++i) pairs[i] = to_bf16(x[i]);
  if (inputs % 2 != 0) pairs[inputs] = 0;
}

// Rows [first, last) of x, x_stride elements apart, to `pairs` [rows, padded_pairs(inputs)].
inline void round_rows_bf16(const float* x, int64_t x_stride, int64_t inputs, uint16_t* pairs, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) round_row_bf16(x + row * x_stride, inputs, pairs + row * padded_pairs(inputs));
}

}  // namespace noria::NORIA_TIER
