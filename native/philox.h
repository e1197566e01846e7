// Noise without state: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), sixteen counters at once.
//
//   key      (seed low, seed high)
//   counter  (position low, position high, stream, token / 4)     word token % 4 of the output is the token's
#pragma once
#include "math.h"

namespace noria::NORIA_TIER {

struct NoiseKey {
  uint64_t seed;
  int64_t position;
  int32_t stream;
};

// words[w][i]: word w of the counter whose last part is quads[i]. Plain loops over 16: every compiler makes vectors of them.
inline void philox16(const NoiseKey& key, const uint32_t* quads, uint32_t (&words)[4][16]) {
  constexpr uint64_t kFirst = 0xD2511F53u, kSecond = 0xCD9E8D57u;
  auto& [c0, c1, c2, c3] = words;
  const auto position = static_cast<uint64_t>(key.position);
  for (int i = 0; i < 16; ++i) {
    c0[i] = static_cast<uint32_t>(position);
    c1[i] = static_cast<uint32_t>(position >> 32);
    c2[i] = static_cast<uint32_t>(key.stream);
    c3[i] = quads[i];
  }
  auto k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
    for (int i = 0; i < 16; ++i) {
      const uint64_t a = kFirst * c0[i], b = kSecond * c2[i];
      const uint32_t n0 = static_cast<uint32_t>(b >> 32) ^ c1[i] ^ k0, n2 = static_cast<uint32_t>(a >> 32) ^ c3[i] ^ k1;
      c0[i] = n0;
      c1[i] = static_cast<uint32_t>(b);
      c2[i] = n2;
      c3[i] = static_cast<uint32_t>(a);
    }
}

// -log(-log u) with u = (word + 1/2) / 2^32. Near u = 1, where float32 has no digits for it, -log u is a series in v = 1 - u.
inline vf16 gumbel(vi16 word) {
  const vi16 inverted = set1_i32(-1) - word;  // all bits flipped
  const auto fraction = [](vi16 w) {  // (w + 1/2) / 2^32 for unsigned w, rounded twice at most
    const vf16 number = fma(to_float(shift_right<16>(w)), set1(65536.0f), to_float(w & set1_i32(0xffff)));
    return fma(number, set1(0x1p-32f), set1(0x1p-33f));
  };
  const vf16 u = fraction(word), v = fraction(inverted);
  vf16 series = fma(v, set1(0.25f), set1(0.333333333f));
  series = fma(series, v, set1(0.5f));
  series = fma(series * v, v, v);
  return zero() - log(select(less(v, set1(0x1p-6f)), series, zero() - log(u)));
}

constexpr float kMostNoise = 22.9f;  // above -log(2^-33)

// Noise of tokens 64 g .. 64 g + 63.
inline void noise64(const NoiseKey& key, int64_t g, float* noise) {
  uint32_t quads[16], words[4][16], in_order[64];
  for (int i = 0; i < 16; ++i) quads[i] = static_cast<uint32_t>(16 * g + i);
  philox16(key, quads, words);
  for (int i = 0; i < 16; ++i)
    for (int w = 0; w < 4; ++w) in_order[4 * i + w] = words[w][i];
  for (int i = 0; i < 64; i += 16) store(noise + i, gumbel(load_i32(reinterpret_cast<const int32_t*>(in_order) + i)));
}

// Noise of any 16 tokens.
inline void noise16(const NoiseKey& key, const int32_t* tokens, float* noise) {
  uint32_t quads[16], words[4][16];
  int32_t own[16];
  for (int i = 0; i < 16; ++i) quads[i] = static_cast<uint32_t>(tokens[i]) / 4;
  philox16(key, quads, words);
  for (int i = 0; i < 16; ++i) own[i] = static_cast<int32_t>(words[tokens[i] % 4][i]);
  store(noise, gumbel(load_i32(own)));
}

}  // namespace noria::NORIA_TIER
