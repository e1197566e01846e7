// What this machine can do at most, measured by loops that do nothing else: the denominators of a roofline.
//
//   peak     a register tile of kAcross x kDown accumulators, the shape of a matrix kernel's inner loop without its epilogue:
//
//                    b0   b1   b2
//              a0    +=   +=   +=      operands come from memory that the compiler must reload every round, so that no
//              a1    +=   +=   +=      product can be moved out of the loop
//              ...
//
//   read     64 bytes at a time, folded by exclusive or: nothing but loads
#pragma once
#include "limits_args.h"
#include "simd.h"

namespace noria::NORIA_TIER {

#if defined(__AVX512F__)
constexpr int kDown = 4, kAcross = 3;  // 12 chains of one register: an instruction a cycle of latency 4 to 8
#else
constexpr int kDown = 2, kAcross = 2;  // 4 chains of two registers
#endif

template <class Sum, class Operand, class Load, class Dot>
inline void peak_loop(Sum (&sums)[kDown * kAcross], int64_t rounds, const unsigned char* operands, Load load_operand, Dot dot) {
  for (int64_t round = 0; round < rounds; ++round) {
    asm volatile("" : : "r"(operands) : "memory");
    Operand a[kDown], b[kAcross];
    for (int i = 0; i < kDown; ++i) a[i] = load_operand(operands + 64 * i);
    for (int j = 0; j < kAcross; ++j) b[j] = load_operand(operands + 64 * (kDown + j));
    for (int i = 0; i < kDown; ++i)
      for (int j = 0; j < kAcross; ++j) sums[i * kAcross + j] = dot(sums[i * kAcross + j], a[i], b[j]);
  }
}

// Runs `rounds` rounds over operands [kLimitOperandBytes]; writes something that depends on every sum to `sink` (64 bytes). Returns the
// operations done: a multiplication and its addition are two.
inline int64_t peak(LimitUnit unit, int64_t rounds, const unsigned char* operands, unsigned char* sink) {
  constexpr int kChains = kDown * kAcross;
  if (unit == LimitUnit::u8s8) {
    vi16 sums[kChains];
    for (vi16& s : sums) s = set1_i32(0);
    peak_loop<vi16, vi16>(
        sums, rounds, operands, [](const unsigned char* p) { return load_i32(reinterpret_cast<const int32_t*>(p)); },
        [](vi16 sum, vi16 a, vi16 b) { return dot_u8s8(sum, a, b); });
    vi16 all = sums[0];
    for (int i = 1; i < kChains; ++i) all = all ^ sums[i];
    store_i32(reinterpret_cast<int32_t*>(sink), all);
    return rounds * kChains * 16 * 4 * 2;
  }
  vf16 sums[kChains];
  for (vf16& s : sums) s = zero();
  const bool pairs = unit == LimitUnit::bf16;
  if (pairs)
    peak_loop<vf16, bf16x32>(
        sums, rounds, operands, [](const unsigned char* p) { return load_pairs(reinterpret_cast<const uint16_t*>(p)); },
        [](vf16 sum, bf16x32 a, bf16x32 b) { return dot_pairs(sum, a, b); });
  else
    peak_loop<vf16, vf16>(
        sums, rounds, operands, [](const unsigned char* p) { return load(reinterpret_cast<const float*>(p)); },
        [](vf16 sum, vf16 a, vf16 b) { return fma(a, b, sum); });
  vf16 all = sums[0];
  for (int i = 1; i < kChains; ++i) all = all + sums[i];
  store(reinterpret_cast<float*>(sink), all);
  return rounds * kChains * 16 * 2 * (pairs ? 2 : 1);
}

// Reads `bytes` bytes, a multiple of 256.
inline void read(const unsigned char* data, int64_t bytes, unsigned char* sink) {
  vi16 folds[4] = {set1_i32(0), set1_i32(0), set1_i32(0), set1_i32(0)};
  for (int64_t at = 0; at < bytes; at += 256)
    for (int i = 0; i < 4; ++i) folds[i] = folds[i] ^ load_i32(reinterpret_cast<const int32_t*>(data + at + 64 * i));
  store_i32(reinterpret_cast<int32_t*>(sink), (folds[0] ^ folds[1]) ^ (folds[2] ^ folds[3]));
}

}  // namespace noria::NORIA_TIER
