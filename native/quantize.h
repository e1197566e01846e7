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

// Sixteen groups that lie one behind the other: the same, a lane a group.
inline void quantize_16_groups(const float* x, const QuantizedRows& out, int64_t group) {
  vi16 low[16], high[16];
  for (int i = 0; i < 16; ++i) low[i] = max_i32(magnitude_bits(load(x + 32 * i)), magnitude_bits(load(x + 32 * i + 16)));
  const vi16 amax_bits = max_of_each(low);
  if (max_lanes_i32(amax_bits) >= 0x7f800000) {  // some group is not finite
    for (int i = 0; i < 16; ++i) quantize_group(load(x + 32 * i), load(x + 32 * i + 16), out, group + i);
    return;
  }
  const vf16 amax = bits_to_float(amax_bits);
  const m16 tiny = less(amax, set1(kSmallestAmax));
  const vf16 scale = select(tiny, zero(), amax / set1(127.0f));
  float inverse[16];
  store(inverse, select(tiny, zero(), set1(127.0f) / amax));
  for (int i = 0; i < 16; ++i) {
    low[i] = to_int(load(x + 32 * i) * set1(inverse[i]));
    high[i] = to_int(load(x + 32 * i + 16) * set1(inverse[i]));
    store_i8(out.codes + (group + i) * 32, low[i]);
    store_i8(out.codes + (group + i) * 32 + 16, high[i]);
  }
  const vi16 low_sums = sum_of_each(low), high_sums = sum_of_each(high), sums = low_sums + high_sums;
  store(out.scales + group, scale);
  store_i32(out.sums + group, sums);
  store(out.scaled_sums + group, scale * to_float(sums));
  store_interleaved(out.half_sums + 2 * group, low_sums, high_sums);
  store_interleaved(reinterpret_cast<int32_t*>(out.scaled_half_sums + 2 * group), float_to_bits(scale * to_float(low_sums)),
                    float_to_bits(scale * to_float(high_sums)));
}

// Groups [group, group + count) from values that lie one behind the other.
inline void quantize_groups(const float* x, int64_t count, const QuantizedRows& out, int64_t group) {
  for (; count >= 16; count -= 16, group += 16, x += 16 * kActivationGroup) quantize_16_groups(x, out, group);
  for (; count > 0; --count, ++group, x += kActivationGroup) quantize_group(load(x), load(x + 16), out, group);
}

// x [inputs] to row `row` of `out`.
inline void quantize_row(const float* x, int64_t inputs, const QuantizedRows& out, int64_t row) {
  const int64_t whole = inputs / kActivationGroup, rest = inputs % kActivationGroup;
  int64_t group = row * (padded_codes(inputs) / kActivationGroup);
  quantize_groups(x, whole, out, group);
  if (rest > 0) {
    group += whole;
    x += whole * kActivationGroup;
    const int low = rest < 16 ? static_cast<int>(rest) : 16, high = static_cast<int>(rest) - low;
    quantize_group(load_part(x, low), load_part(x + low, high), out, group);
  }
}

// Rows [first, last) of x, x_stride elements apart.
inline void quantize_rows(const float* x, int64_t x_stride, int64_t inputs, const QuantizedRows& out, int64_t first, int64_t last) {
  if (x_stride == inputs && inputs % kActivationGroup == 0) {  // the groups of all rows lie one behind the other
    const int64_t groups = inputs / kActivationGroup;
    return quantize_groups(x + first * inputs, (last - first) * groups, out, first * groups);
  }
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
