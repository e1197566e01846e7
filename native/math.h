// Elementary functions over 16 lanes: the same bits on every tier, because they are polynomials of our own in FMA.
//
// Polynomials and reductions after Cephes (S. Moshier, single precision), but for 2^x, which is a minimax fit. NaN in, NaN out.
#pragma once
#include "simd.h"

namespace noria::NORIA_TIER {

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.44269504f;

inline vf16 absolute(vf16 x) { return bits_to_float(float_to_bits(x) & set1_i32(0x7fffffff)); }
inline vf16 with_sign_of(vf16 magnitude, vf16 x) {
  return bits_to_float(float_to_bits(magnitude) | (float_to_bits(x) & set1_i32(INT32_MIN)));
}

// e^x, about 1 ulp. Below -86.6 the result is +0 (it would be denormal or nearly so), above 88.72 infinity.
//
//   x = n ln 2 + r,  |r| <= ln 2 / 2,   e^x = 2^n e^r;   2^n is applied as 2 * 2^(n - 1), so that n = 128 does not overflow
inline vf16 exp(vf16 x) {
  const vf16 lowest = set1(-86.6f), highest = set1(88.72283f);
  const vf16 bounded = min(highest, max(lowest, x));  // NaN stays NaN: min and max return their second operand
  const vi16 n = to_int(bounded * set1(kLog2E));
  const vf16 half_scale = bits_to_float(shift_left<23>(n + set1_i32(126)));
  const vf16 r = fma(to_float(n), set1(2.12194440e-4f), fma(to_float(n), set1(-0.693359375f), bounded));
  vf16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  const vf16 y = (fma(p, r * r, r) + set1(1.0f)) * half_scale * set1(2.0f);
  return select(less(x, lowest), zero(), select(less(highest, x), set1(kInfinity), y));
}

// 2^x for x <= 0, about 2 ulp: what softmax needs. Below -125 it is 2^-125, which no sum of weights beside a weight of 1 can see.
//
//   x = n + r,  |r| <= 1/2,   2^x = 2^n 2^r;   2^r is near 1, so that n is added to its exponent
inline vf16 exp2_not_positive(vf16 x) {
  const vf16 bounded = max(set1(-125.0f), x);  // NaN stays NaN
  const vi16 n = to_int(bounded);
  const vf16 r = bounded - to_float(n);
  vf16 p = set1(1.3264727313e-3f);
  p = fma(p, r, set1(9.6715129912e-3f));
  p = fma(p, r, set1(5.5507335812e-2f));
  p = fma(p, r, set1(2.4022242427e-1f));
  p = fma(p, r, set1(6.9314700365e-1f));
  p = fma(p, r, set1(1.0f));
  return bits_to_float(float_to_bits(p) + shift_left<23>(n));
}

// Natural logarithm, about 1 ulp. log(0) = -inf (denormals count as 0), log(inf) = inf, negative: NaN.
inline vf16 log(vf16 x) {
  const vi16 bits = float_to_bits(x);
  const vf16 fraction = bits_to_float((bits & set1_i32(0x007fffff)) | set1_i32(0x3f000000));  // in [1/2, 1)
  const vf16 exponent = to_float(shift_right<23>(bits) - set1_i32(126));
  const m16 small = less(fraction, set1(0.707106781f));
  const vf16 e = exponent - select(small, set1(1.0f), zero());
  const vf16 m = select(small, fraction + fraction, fraction) - set1(1.0f);
  const vf16 z = m * m;
  vf16 p = set1(7.0376836292e-2f);
  p = fma(p, m, set1(-1.1514610310e-1f));
  p = fma(p, m, set1(1.1676998740e-1f));
  p = fma(p, m, set1(-1.2420140846e-1f));
  p = fma(p, m, set1(1.4249322787e-1f));
  p = fma(p, m, set1(-1.6668057665e-1f));
  p = fma(p, m, set1(2.0000714765e-1f));
  p = fma(p, m, set1(-2.4999993993e-1f));
  p = fma(p, m, set1(3.3333331174e-1f));
  vf16 y = p * (m * z);
  y = fma(e, set1(-2.12194440e-4f), y);
  y = fma(z, set1(-0.5f), y);
  y = fma(e, set1(0.693359375f), m + y);
  y = select(less(x, set1(1.17549435e-38f)), select(less(x, zero()), set1(__builtin_nanf("")), set1(-kInfinity)), y);
  y = select(less(set1(3.40282347e38f), x), set1(kInfinity), y);
  return select(less(x, set1(kInfinity)), y, select(less(set1(3.40282347e38f), x), set1(kInfinity), x));
}

inline float log_scalar(float x) {
  float lanes[16];
  store(lanes, log(set1(x)));
  return lanes[0];
}

// tanh: a polynomial below 0.625, where 1 - 2 / (e^2x + 1) would lose its relative precision.
inline vf16 tanh(vf16 x) {
  const vf16 a = absolute(x), z = x * x;
  vf16 p = set1(-5.70498872745e-3f);
  p = fma(p, z, set1(2.06390887954e-2f));
  p = fma(p, z, set1(-5.37397155531e-2f));
  p = fma(p, z, set1(1.33314422036e-1f));
  p = fma(p, z, set1(-3.33332819422e-1f));
  const vf16 near = fma(p * z, x, x);
  const vf16 far = set1(1.0f) - set1(2.0f) / (exp(a + a) + set1(1.0f));
  return select(less(a, set1(0.625f)), near, with_sign_of(far, x));
}

inline vf16 sigmoid(vf16 x) { return set1(1.0f) / (set1(1.0f) + exp(zero() - x)); }
inline vf16 silu(vf16 x) { return x * sigmoid(x); }

// GELU by its tanh approximation: x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
inline vf16 gelu_tanh(vf16 x) {
  const vf16 inner = set1(0.7978845608f) * fma(set1(0.044715f) * x, x * x, x);
  return set1(0.5f) * x * (set1(1.0f) + tanh(inner));
}

// cap * tanh(x / cap): a soft limit of |x| at `cap`.
inline vf16 soft_capped(vf16 x, float cap) { return set1(cap) * tanh(x / set1(cap)); }

}  // namespace noria::NORIA_TIER
