// Sixteen virtual lanes, whatever the machine's width.
//
// Every kernel is written once, as a template-free text over `vf16` (16 floats), `vi16` (16 int32) and `m16` (16 booleans).
// This header is compiled once for each tier (see tiers.cmake); NORIA_TIER names the namespace that keeps the copies apart.
//
// The numerics contract rests on this file: an operation here gives the same bits on every tier. So there is no a * b + c
// (the compiler must not contract: -ffp-contract=off), only fma(a, b, c), one rounding; sums across lanes are a fixed tree;
// float32 denormals are flushed on every tier (see FlushDenormals in pool.h).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#ifndef NORIA_TIER
#error "NORIA_TIER must name this translation unit's tier"
#endif

namespace noria::NORIA_TIER {

#if defined(__AVX512F__)

struct m16 {
  __mmask16 v;
};
struct vi16 {
  __m512i v;
};
struct vf16 {
  __m512 v;
};

inline vf16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, vf16 a) { _mm512_storeu_ps(p, a.v); }
inline vf16 set1(float x) { return {_mm512_set1_ps(x)}; }
inline vf16 operator+(vf16 a, vf16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline vf16 operator-(vf16 a, vf16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline vf16 operator*(vf16 a, vf16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline vf16 operator/(vf16 a, vf16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline vf16 fma(vf16 a, vf16 b, vf16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline vf16 sqrt(vf16 a) { return {_mm512_sqrt_ps(a.v)}; }
inline vf16 max(vf16 a, vf16 b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where either is NaN
inline vf16 min(vf16 a, vf16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline m16 less(vf16 a, vf16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline m16 is_nan(vf16 a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
inline vf16 select(m16 m, vf16 yes, vf16 no) { return {_mm512_mask_blend_ps(m.v, no.v, yes.v)}; }
inline m16 mask_bits(uint16_t bits) { return {static_cast<__mmask16>(bits)}; }
inline vf16 bits_to_float(vi16 a) { return {_mm512_castsi512_ps(a.v)}; }
inline vi16 float_to_bits(vf16 a) { return {_mm512_castps_si512(a.v)}; }

inline vi16 load_i32(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_i32(int32_t* p, vi16 a) { _mm512_storeu_si512(p, a.v); }
inline vi16 set1_i32(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline vi16 operator+(vi16 a, vi16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline vi16 operator-(vi16 a, vi16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline vi16 operator&(vi16 a, vi16 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline vi16 operator|(vi16 a, vi16 b) { return {_mm512_or_si512(a.v, b.v)}; }
inline vi16 operator^(vi16 a, vi16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline void multiply_u32(vi16 a, vi16 b, vi16& low, vi16& high) {  // 64-bit products of unsigned lanes
  const __m512i even = _mm512_mul_epu32(a.v, b.v), odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), _mm512_srli_epi64(b.v, 32));
  low.v = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
  high.v = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
}
template <int N>
inline vi16 shift_left(vi16 a) {
  return {_mm512_slli_epi32(a.v, N)};
}
template <int N>
inline vi16 shift_right(vi16 a) {
  return {_mm512_srli_epi32(a.v, N)};
}  // logical
inline vf16 to_float(vi16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline vi16 to_int(vf16 a) { return {_mm512_cvtps_epi32(a.v)}; }  // to nearest, ties to even

inline void store_i8(int8_t* p, vi16 a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a.v)); }
inline vf16 load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline vi16 load_u16(const uint16_t* p) { return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline void store_u16(uint16_t* p, vi16 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v)); }
inline float from_f16(uint16_t h) { return _cvtsh_ss(h); }

inline vi16 max_i32(vi16 a, vi16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline int32_t max_lanes_i32(vi16 a) { return _mm512_reduce_max_epi32(a.v); }
inline int32_t sum_lanes_i32(vi16 a) { return _mm512_reduce_add_epi32(a.v); }

// Lane i of the result is all lanes of v[i], combined by an operation that is exact: halves the vectors and the lanes in turn.
template <class Op>
inline vi16 combine_each(const vi16 (&v)[16], Op op) {
  __m512i eight[8], four[4], two[2];
  for (int i = 0; i < 8; ++i) {
    const __m512i a = v[2 * i].v, b = v[2 * i + 1].v;
    eight[i] = op(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512i a = eight[2 * i], b = eight[2 * i + 1];
    four[i] = op(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }
  const auto fold = [op](__m512i a, __m512i b) { return op(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd)); };
  for (int i = 0; i < 2; ++i) two[i] = fold(four[2 * i], four[2 * i + 1]);
  return {fold(two[0], two[1])};
}
inline vi16 max_of_each(const vi16 (&v)[16]) {
  return combine_each(v, [](__m512i a, __m512i b) { return _mm512_max_epi32(a, b); });
}
inline vi16 sum_of_each(const vi16 (&v)[16]) {
  return combine_each(v, [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); });
}

// a0 b0 a1 b1 ... to p.
inline void store_interleaved(int32_t* p, vi16 a, vi16 b) {
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  _mm512_storeu_si512(p, _mm512_permutex2var_epi32(a.v, first, b.v));
  _mm512_storeu_si512(p + 16, _mm512_permutex2var_epi32(a.v, _mm512_add_epi32(first, _mm512_set1_epi32(8)), b.v));
}

// Sixteen pairs of int16.
struct i16x32 {
  __m512i v;
};
inline i16x32 load_pairs(const int8_t* p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline i16x32 set1_pair_i16(uint32_t pair) { return {_mm512_set1_epi32(static_cast<int>(pair))}; }
#if defined(__AVX512VNNI__)
inline vi16 dot_pairs(vi16 acc, i16x32 a, i16x32 b) { return {_mm512_dpwssd_epi32(acc.v, a.v, b.v)}; }
#else
inline vi16 dot_pairs(vi16 acc, i16x32 a, i16x32 b) { return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(a.v, b.v))}; }
#endif

#if defined(__AVX512VNNI__)
inline vi16 dot_u8s8(vi16 acc, vi16 codes, vi16 quad) { return {_mm512_dpbusd_epi32(acc.v, codes.v, quad.v)}; }

struct u4dot {
  __m512i v;
};
inline u4dot begin_u4s8(vi16 start) { return {start.v}; }
inline u4dot dot_u4s8(u4dot acc, vi16 codes, vi16 quad) { return {_mm512_dpbusd_epi32(acc.v, codes.v, quad.v)}; }
inline vi16 end_u4s8(u4dot acc, vi16) { return {acc.v}; }
#else
inline vi16 dot_u8s8(vi16 acc, vi16 codes, vi16 quad) {
  const __m512i codes_even = _mm512_and_si512(codes.v, _mm512_set1_epi16(255)), codes_odd = _mm512_srli_epi16(codes.v, 8);
  const __m512i quad_even = _mm512_srai_epi16(_mm512_slli_epi16(quad.v, 8), 8), quad_odd = _mm512_srai_epi16(quad.v, 8);
  const __m512i sum = _mm512_add_epi32(_mm512_madd_epi16(codes_even, quad_even), _mm512_madd_epi16(codes_odd, quad_odd));
  return {_mm512_add_epi32(acc.v, sum)};
}

struct u4dot {
  __m512i v;
};
inline u4dot begin_u4s8(vi16) { return {_mm512_setzero_si512()}; }
inline u4dot dot_u4s8(u4dot acc, vi16 codes, vi16 quad) { return {_mm512_add_epi16(acc.v, _mm512_maddubs_epi16(codes.v, quad.v))}; }
inline vi16 end_u4s8(u4dot acc, vi16 start) { return {_mm512_add_epi32(start.v, _mm512_madd_epi16(acc.v, _mm512_set1_epi16(1)))}; }
#endif

#elif defined(__AVX2__)

struct m16 {
  __m256 lo, hi;
};
struct vi16 {
  __m256i lo, hi;
};
struct vf16 {
  __m256 lo, hi;
};

inline vf16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, vf16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline vf16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline vf16 operator+(vf16 a, vf16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline vf16 operator-(vf16 a, vf16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline vf16 operator*(vf16 a, vf16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline vf16 operator/(vf16 a, vf16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline vf16 fma(vf16 a, vf16 b, vf16 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline vf16 sqrt(vf16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
inline vf16 max(vf16 a, vf16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline vf16 min(vf16 a, vf16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline m16 less(vf16 a, vf16 b) { return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)}; }
inline m16 is_nan(vf16 a) { return {_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q)}; }
inline vf16 select(m16 m, vf16 yes, vf16 no) { return {_mm256_blendv_ps(no.lo, yes.lo, m.lo), _mm256_blendv_ps(no.hi, yes.hi, m.hi)}; }
inline m16 mask_bits(uint16_t bits) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i lo = _mm256_and_si256(_mm256_set1_epi32(bits & 255), lane), hi = _mm256_and_si256(_mm256_set1_epi32(bits >> 8), lane);
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(lo, lane)), _mm256_castsi256_ps(_mm256_cmpeq_epi32(hi, lane))};
}
inline vf16 bits_to_float(vi16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline vi16 float_to_bits(vf16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }

inline vi16 load_i32(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline void store_i32(int32_t* p, vi16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.hi);
}
inline vi16 set1_i32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline vi16 operator+(vi16 a, vi16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline vi16 operator-(vi16 a, vi16 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline vi16 operator&(vi16 a, vi16 b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
inline vi16 operator|(vi16 a, vi16 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
inline vi16 operator^(vi16 a, vi16 b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
inline void multiply_u32(__m256i a, __m256i b, __m256i& low, __m256i& high) {
  const __m256i even = _mm256_mul_epu32(a, b), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
inline void multiply_u32(vi16 a, vi16 b, vi16& low, vi16& high) {
  multiply_u32(a.lo, b.lo, low.lo, high.lo);
  multiply_u32(a.hi, b.hi, low.hi, high.hi);
}
template <int N>
inline vi16 shift_left(vi16 a) {
  return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)};
}
template <int N>
inline vi16 shift_right(vi16 a) {
  return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)};
}
inline vf16 to_float(vi16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline vi16 to_int(vf16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }

inline void store_i8(int8_t* p, vi16 a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline vf16 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline vi16 load_u16(const uint16_t* p) {
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline void store_u16(uint16_t* p, vi16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(_mm256_packus_epi32(a.lo, a.hi), 0xd8));
}
inline float from_f16(uint16_t h) { return _cvtsh_ss(h); }

inline vi16 max_i32(vi16 a, vi16 b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
inline int32_t max_lanes_i32(vi16 a) {
  const __m256i eight = _mm256_max_epi32(a.lo, a.hi);
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline int32_t sum_lanes_i32(vi16 a) {
  const __m256i eight = _mm256_add_epi32(a.lo, a.hi);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

struct i16x32 {
  __m256i lo, hi;
};
inline i16x32 load_pairs(const int8_t* p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}
inline i16x32 set1_pair_i16(uint32_t pair) {
  const __m256i x = _mm256_set1_epi32(static_cast<int>(pair));
  return {x, x};
}
inline vi16 dot_pairs(vi16 acc, i16x32 a, i16x32 b) {
  return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(a.lo, b.lo)), _mm256_add_epi32(acc.hi, _mm256_madd_epi16(a.hi, b.hi))};
}

inline __m256i dot_u8s8(__m256i acc, __m256i codes, __m256i quad) {
  const __m256i codes_even = _mm256_and_si256(codes, _mm256_set1_epi16(255)), codes_odd = _mm256_srli_epi16(codes, 8);
  const __m256i quad_even = _mm256_srai_epi16(_mm256_slli_epi16(quad, 8), 8), quad_odd = _mm256_srai_epi16(quad, 8);
  const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(codes_even, quad_even), _mm256_madd_epi16(codes_odd, quad_odd));
  return _mm256_add_epi32(acc, sum);
}
inline vi16 dot_u8s8(vi16 acc, vi16 codes, vi16 quad) { return {dot_u8s8(acc.lo, codes.lo, quad.lo), dot_u8s8(acc.hi, codes.hi, quad.hi)}; }

struct u4dot {
  __m256i lo, hi;
};
inline u4dot begin_u4s8(vi16) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline u4dot dot_u4s8(u4dot acc, vi16 codes, vi16 quad) {
  return {_mm256_add_epi16(acc.lo, _mm256_maddubs_epi16(codes.lo, quad.lo)),
          _mm256_add_epi16(acc.hi, _mm256_maddubs_epi16(codes.hi, quad.hi))};
}
inline vi16 end_u4s8(u4dot acc, vi16 start) {
  const __m256i one = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(start.lo, _mm256_madd_epi16(acc.lo, one)), _mm256_add_epi32(start.hi, _mm256_madd_epi16(acc.hi, one))};
}

#else  // any machine

struct m16 {
  bool v[16];
};
struct vi16 {
  int32_t v[16];
};
struct vf16 {
  float v[16];
};
#define NORIA_EACH for (int i = 0; i < 16; ++i)

inline vf16 load(const float* p) {
  vf16 r;
  std::memcpy(r.v, p, 64);
  return r;
}
inline void store(float* p, vf16 a) { std::memcpy(p, a.v, 64); }
inline vf16 set1(float x) {
  vf16 r;
  NORIA_EACH r.v[i] = x;
  return r;
}
inline vf16 operator+(vf16 a, vf16 b) {
  NORIA_EACH a.v[i] += b.v[i];
  return a;
}
inline vf16 operator-(vf16 a, vf16 b) {
  NORIA_EACH a.v[i] -= b.v[i];
  return a;
}
inline vf16 operator*(vf16 a, vf16 b) {
  NORIA_EACH a.v[i] *= b.v[i];
  return a;
}
inline vf16 operator/(vf16 a, vf16 b) {
  NORIA_EACH a.v[i] /= b.v[i];
  return a;
}
inline vf16 fma(vf16 a, vf16 b, vf16 c) {
  NORIA_EACH c.v[i] = std::fma(a.v[i], b.v[i], c.v[i]);
  return c;
}
inline vf16 sqrt(vf16 a) {
  NORIA_EACH a.v[i] = std::sqrt(a.v[i]);
  return a;
}
inline vf16 max(vf16 a, vf16 b) {
  NORIA_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline vf16 min(vf16 a, vf16 b) {
  NORIA_EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline m16 less(vf16 a, vf16 b) {
  m16 r;
  NORIA_EACH r.v[i] = a.v[i] < b.v[i];
  return r;
}
inline m16 is_nan(vf16 a) {
  m16 r;
  NORIA_EACH r.v[i] = a.v[i] != a.v[i];
  return r;
}
inline vf16 select(m16 m, vf16 yes, vf16 no) {
  NORIA_EACH no.v[i] = m.v[i] ? yes.v[i] : no.v[i];
  return no;
}
inline m16 mask_bits(uint16_t bits) {
  m16 r;
  NORIA_EACH r.v[i] = bits >> i & 1;
  return r;
}
inline vf16 bits_to_float(vi16 a) {
  vf16 r;
  std::memcpy(r.v, a.v, 64);
  return r;
}
inline vi16 float_to_bits(vf16 a) {
  vi16 r;
  std::memcpy(r.v, a.v, 64);
  return r;
}

inline vi16 load_i32(const int32_t* p) {
  vi16 r;
  std::memcpy(r.v, p, 64);
  return r;
}
inline void store_i32(int32_t* p, vi16 a) { std::memcpy(p, a.v, 64); }
inline vi16 set1_i32(int32_t x) {
  vi16 r;
  NORIA_EACH r.v[i] = x;
  return r;
}
inline int32_t wrap_add(int32_t a, int32_t b) { return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b)); }
inline vi16 operator+(vi16 a, vi16 b) {
  NORIA_EACH a.v[i] = wrap_add(a.v[i], b.v[i]);
  return a;
}
inline vi16 operator-(vi16 a, vi16 b) {
  NORIA_EACH a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) - static_cast<uint32_t>(b.v[i]));
  return a;
}
inline vi16 operator&(vi16 a, vi16 b) {
  NORIA_EACH a.v[i] &= b.v[i];
  return a;
}
inline vi16 operator|(vi16 a, vi16 b) {
  NORIA_EACH a.v[i] |= b.v[i];
  return a;
}
inline vi16 operator^(vi16 a, vi16 b) {
  NORIA_EACH a.v[i] ^= b.v[i];
  return a;
}
inline void multiply_u32(vi16 a, vi16 b, vi16& low, vi16& high) {
  NORIA_EACH {
    const uint64_t product = static_cast<uint64_t>(static_cast<uint32_t>(a.v[i])) * static_cast<uint32_t>(b.v[i]);
    low.v[i] = static_cast<int32_t>(static_cast<uint32_t>(product));
    high.v[i] = static_cast<int32_t>(static_cast<uint32_t>(product >> 32));
  }
}
template <int N>
inline vi16 shift_left(vi16 a) {
  NORIA_EACH a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << N);
  return a;
}
template <int N>
inline vi16 shift_right(vi16 a) {
  NORIA_EACH a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) >> N);
  return a;
}
inline vf16 to_float(vi16 a) {
  vf16 r;
  NORIA_EACH r.v[i] = static_cast<float>(a.v[i]);
  return r;
}
inline vi16 to_int(vf16 a) {  // out of range and NaN: INT32_MIN, as the x86 instruction
  vi16 r;
  NORIA_EACH r.v[i] = a.v[i] >= -2147483648.0f && a.v[i] < 2147483648.0f ? static_cast<int32_t>(std::nearbyintf(a.v[i])) : INT32_MIN;
  return r;
}

inline void store_i8(int8_t* p, vi16 a) { NORIA_EACH p[i] = static_cast<int8_t>(a.v[i] > 127 ? 127 : a.v[i] < -128 ? -128 : a.v[i]); }
inline float half_to_float(uint16_t h) {  // exact; a half's denormals are normal float32 numbers
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
  float r;
  if (exponent == 0) {
    r = static_cast<float>(fraction) * 0x1p-24f;
    uint32_t b;
    std::memcpy(&b, &r, 4);
    b |= sign;
    std::memcpy(&r, &b, 4);
    return r;
  }
  const uint32_t b = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
  std::memcpy(&r, &b, 4);
  return r;
}
inline vf16 load_f16(const uint16_t* p) {
  vf16 r;
  NORIA_EACH r.v[i] = half_to_float(p[i]);
  return r;
}
inline vi16 load_u16(const uint16_t* p) {
  vi16 r;
  NORIA_EACH r.v[i] = p[i];
  return r;
}
inline void store_u16(uint16_t* p, vi16 a) { NORIA_EACH p[i] = static_cast<uint16_t>(a.v[i]); }
inline float from_f16(uint16_t h) { return half_to_float(h); }

inline vi16 max_i32(vi16 a, vi16 b) {
  NORIA_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline int32_t max_lanes_i32(vi16 a) {
  int32_t r = a.v[0];
  NORIA_EACH r = r > a.v[i] ? r : a.v[i];
  return r;
}
inline int32_t sum_lanes_i32(vi16 a) {
  int32_t r = 0;
  NORIA_EACH r = wrap_add(r, a.v[i]);
  return r;
}

inline vi16 dot_u8s8(vi16 acc, vi16 codes, vi16 quad) {
  for (int byte = 0; byte < 4; ++byte) NORIA_EACH acc.v[i] += (codes.v[i] >> 8 * byte & 255) * static_cast<int8_t>(quad.v[i] >> 8 * byte);
  return acc;
}

struct i16x32 {
  int16_t v[32];
};
inline i16x32 load_pairs(const int8_t* p) {
  i16x32 r;
  for (int i = 0; i < 32; ++i) r.v[i] = p[i];
  return r;
}
inline i16x32 set1_pair_i16(uint32_t pair) {
  i16x32 r;
  for (int i = 0; i < 32; ++i) r.v[i] = static_cast<int16_t>(i % 2 == 0 ? pair : pair >> 16);
  return r;
}
inline vi16 dot_pairs(vi16 acc, i16x32 a, i16x32 b) {
  NORIA_EACH acc.v[i] += a.v[2 * i] * b.v[2 * i] + a.v[2 * i + 1] * b.v[2 * i + 1];
  return acc;
}

struct u4dot {
  vi16 v;
};
inline u4dot begin_u4s8(vi16 start) { return {start}; }
inline u4dot dot_u4s8(u4dot acc, vi16 codes, vi16 quad) { return {dot_u8s8(acc.v, codes, quad)}; }
inline vi16 end_u4s8(u4dot acc, vi16) { return acc.v; }

#undef NORIA_EACH
#endif

// -- the same text on every tier ------------------------------------------------------------------------------------------

inline vf16 zero() { return set1(0.0f); }
#if !defined(__AVX512F__)
// Lane i of the result is the maximum, or the sum, of the lanes of v[i].
inline vi16 max_of_each(const vi16 (&v)[16]) {
  int32_t x[16];
  for (int i = 0; i < 16; ++i) x[i] = max_lanes_i32(v[i]);
  return load_i32(x);
}
inline vi16 sum_of_each(const vi16 (&v)[16]) {
  int32_t x[16];
  for (int i = 0; i < 16; ++i) x[i] = sum_lanes_i32(v[i]);
  return load_i32(x);
}

// a0 b0 a1 b1 ... to p.
inline void store_interleaved(int32_t* p, vi16 a, vi16 b) {
  int32_t x[16], y[16];
  store_i32(x, a);
  store_i32(y, b);
  for (int i = 0; i < 16; ++i) p[2 * i] = x[i], p[2 * i + 1] = y[i];
}
#endif

inline uint32_t load_u32(const void* p) {
  uint32_t r;
  std::memcpy(&r, p, 4);
  return r;
}

// Sum and maximum of the 16 lanes in a fixed tree: lane i with i + 8, then i + 4, i + 2, i + 1.
#if defined(__AVX2__)
inline __m256 lower_half(vf16 a) {
#if defined(__AVX512F__)
  return _mm512_castps512_ps256(a.v);
#else
  return a.lo;
#endif
}
inline __m256 upper_half(vf16 a) {
#if defined(__AVX512F__)
  return _mm512_extractf32x8_ps(a.v, 1);
#else
  return a.hi;
#endif
}
inline float sum_lanes(vf16 a) {
  const __m256 eight = _mm256_add_ps(lower_half(a), upper_half(a));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float max_lanes(vf16 a) {
  const __m256 eight = _mm256_max_ps(lower_half(a), upper_half(a));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
inline float sum_lanes(vf16 a) {
  float x[16];
  store(x, a);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x[i] += x[i + width];
  return x[0];
}
inline float max_lanes(vf16 a) {
  float x[16];
  store(x, a);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
  return x[0];
}
#endif

// The first `count` lanes of p, the rest `fill`. Never reads past p + count.
inline vf16 load_part(const float* p, int count, float fill = 0.0f) {
  float x[16];
  for (int i = 0; i < 16; ++i) x[i] = i < count ? p[i] : fill;
  return load(x);
}
inline void store_part(float* p, vf16 a, int count) {
  float x[16];
  store(x, a);
  for (int i = 0; i < count; ++i) p[i] = x[i];
}
inline m16 first_lanes(int count) { return mask_bits(count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<uint16_t>((1u << count) - 1)); }

// float32 -> bfloat16 bits, to nearest even; denormals become signed zeros, NaN stays NaN. The result is in the low 16 bits.
inline uint16_t to_bf16(float x) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  if ((b & 0x7f800000u) == 0) return static_cast<uint16_t>((b & 0x80000000u) >> 16);
  if ((b & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(b >> 16 | 0x40);
  return static_cast<uint16_t>((b + 0x7fffu + (b >> 16 & 1)) >> 16);
}
// The same for sixteen values, each in the low half of its lane (store_u16 writes them).
inline vi16 to_bf16(vf16 x) {
  const vi16 bits = float_to_bits(x), sign = set1_i32(INT32_MIN);
  const vi16 rounded = bits + set1_i32(0x7fff) + (shift_right<16>(bits) & set1_i32(1));
  const m16 denormal = less(bits_to_float(bits & set1_i32(INT32_MAX)), set1(0x1p-126f));
  const vf16 number = select(denormal, bits_to_float(bits & sign), bits_to_float(rounded));
  return shift_right<16>(float_to_bits(select(is_nan(x), bits_to_float(bits | set1_i32(0x400000)), number)));
}
inline float from_bf16(uint16_t h) {
  const uint32_t b = static_cast<uint32_t>(h) << 16;
  float r;
  std::memcpy(&r, &b, 4);
  return r;
}

// dot_pairs over i16x32: acc + a_even * b_even + a_odd * b_odd, exact in int32.

// Exact dot products of unsigned weight codes with signed activation codes. A lane holds four inner elements (a quad), one a byte.
//
//   dot_u8s8(acc, codes, quad)     acc + the dot product of each lane's four bytes, int32
//   begin / dot / end_u4s8         the same over at most eight quads, for codes <= 15: begin(start), then dot, then end(acc, start).
//                                  Without VNNI the sum is kept in 16 bits (8 * 2 * 15 * 128 < 2^15), which halves the work.
//
// The saturating multiply-add is used for 4-bit codes only: a pair of 8-bit products does not fit its 16 bits.

// Sixteen pairs of bfloat16 (32 values, lane i holds pair i: even element low, odd element high).
#if defined(__AVX512BF16__)
struct bf16x32 {
  __m512bh v;
};
inline void store_bf16(uint16_t* p, vf16 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a.v)); }
inline bf16x32 load_pairs(const uint16_t* p) {
  const __m512i x = _mm512_loadu_si512(p);
  return {(__m512bh)x};
}
inline bf16x32 set1_pair(uint32_t pair) {
  const __m512i x = _mm512_set1_epi32(static_cast<int>(pair));
  return {(__m512bh)x};
}
// acc + a_odd * b_odd, then + a_even * b_even, each by one FMA with denormals flushed: what vdpbf16ps does.
inline vf16 dot_pairs(vf16 acc, bf16x32 a, bf16x32 b) { return {_mm512_dpbf16_ps(acc.v, a.v, b.v)}; }
#else
struct bf16x32 {
  vi16 v;
};
inline void store_bf16(uint16_t* p, vf16 a) { store_u16(p, to_bf16(a)); }  // sixteen values, rounded as to_bf16 does
inline bf16x32 load_pairs(const uint16_t* p) { return {load_i32(reinterpret_cast<const int32_t*>(p))}; }
inline bf16x32 set1_pair(uint32_t pair) { return {set1_i32(static_cast<int32_t>(pair))}; }
inline vf16 dot_pairs(vf16 acc, bf16x32 a, bf16x32 b) {
  const vi16 high = set1_i32(static_cast<int32_t>(0xffff0000u));
  acc = fma(bits_to_float(a.v & high), bits_to_float(b.v & high), acc);
  return fma(bits_to_float(shift_left<16>(a.v)), bits_to_float(shift_left<16>(b.v)), acc);
}
#endif

}  // namespace noria::NORIA_TIER
