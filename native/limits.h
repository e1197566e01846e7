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

// The sums are a local array that full unrolling turns into registers.
template <class Sum, class Operand, class Load, class Dot, class Add>
inline Sum peak_loop(Sum start, int64_t rounds, const unsigned char* operands, Load load_operand, Dot dot, Add add) {
  Sum sums[kDown * kAcross];
#pragma GCC unroll 16
  for (int i = 0; i < kDown * kAcross; ++i) sums[i] = start;
  for (int64_t round = 0; round < rounds; ++round) {
    asm volatile("" : : "r"(operands) : "memory");
    Operand a[kDown], b[kAcross];
#pragma GCC unroll 16
    for (int i = 0; i < kDown; ++i) a[i] = load_operand(operands + 64 * i);
#pragma GCC unroll 16
    for (int j = 0; j < kAcross; ++j) b[j] = load_operand(operands + 64 * (kDown + j));
    asm volatile("" : : "r"(operands) : "memory");  // loaded once, by now: not again as an operand of each instruction
#pragma GCC unroll 16
    for (int i = 0; i < kDown * kAcross; ++i) sums[i] = dot(sums[i], a[i / kAcross], b[i % kAcross]);
  }
  Sum all = sums[0];
#pragma GCC unroll 16
  for (int i = 1; i < kDown * kAcross; ++i) all = add(all, sums[i]);
  return all;
}

// Runs `rounds` rounds over operands [kLimitOperandBytes]; writes something that depends on every sum to `sink` (64 bytes). Returns the
// operations done: a multiplication and its addition are two.
inline int64_t peak(LimitUnit unit, int64_t rounds, const unsigned char* operands, unsigned char* sink) {
  const int64_t lanes = rounds * kDown * kAcross * 16;
  if (unit == LimitUnit::u8s8) {
    const auto load_codes = [](const unsigned char* p) { return load_i32(reinterpret_cast<const int32_t*>(p)); };
    const vi16 sum = peak_loop<vi16, vi16>(
        set1_i32(0), rounds, operands, load_codes, [](vi16 s, vi16 a, vi16 b) { return dot_u8s8(s, a, b); },
        [](vi16 x, vi16 y) { return x ^ y; });
    store_i32(reinterpret_cast<int32_t*>(sink), sum);
    return lanes * 4 * 2;
  }
  const auto add = [](vf16 x, vf16 y) { return x + y; };
  if (unit == LimitUnit::bf16) {
    const auto load_bf16 = [](const unsigned char* p) { return load_pairs(reinterpret_cast<const uint16_t*>(p)); };
    const vf16 sum =
        peak_loop<vf16, bf16x32>(zero(), rounds, operands, load_bf16, [](vf16 s, bf16x32 a, bf16x32 b) { return dot_pairs(s, a, b); }, add);
    store(reinterpret_cast<float*>(sink), sum);
    return lanes * 2 * 2;
  }
  const auto load_f32 = [](const unsigned char* p) { return load(reinterpret_cast<const float*>(p)); };
  const vf16 sum = peak_loop<vf16, vf16>(zero(), rounds, operands, load_f32, [](vf16 s, vf16 a, vf16 b) { return fma(a, b, s); }, add);
  store(reinterpret_cast<float*>(sink), sum);
  return lanes * 2;
}

// Reads `bytes` bytes, a multiple of 256.
inline void read(const unsigned char* data, int64_t bytes, unsigned char* sink) {
  vi16 folds[4] = {set1_i32(0), set1_i32(0), set1_i32(0), set1_i32(0)};
  for (int64_t at = 0; at < bytes; at += 256)
    for (int i = 0; i < 4; ++i) folds[i] = folds[i] ^ load_i32(reinterpret_cast<const int32_t*>(data + at + 64 * i));
  store_i32(reinterpret_cast<int32_t*>(sink), (folds[0] ^ folds[1]) ^ (folds[2] ^ folds[3]));
}

}  // namespace noria::NORIA_TIER
