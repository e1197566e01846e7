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

// Word w of the output for sixteen counters that end in `quads`, to words[w].
inline void philox16(const NoiseKey& key, vi16 quads, vi16 (&words)[4]) {
  const auto lanes = [](uint64_t x) { return set1_i32(static_cast<int32_t>(static_cast<uint32_t>(x))); };
  const vi16 first = lanes(0xD2511F53u), second = lanes(0xCD9E8D57u);
  const auto position = static_cast<uint64_t>(key.position);
  vi16 c0 = lanes(position), c1 = lanes(position >> 32), c2 = set1_i32(key.stream), c3 = quads;
  auto k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    vi16 low0, high0, low1, high1;
    multiply_u32(c0, first, low0, high0);
    multiply_u32(c2, second, low1, high1);
    c0 = high1 ^ c1 ^ lanes(k0);
    c1 = low1;
    c2 = high0 ^ c3 ^ lanes(k1);
    c3 = low0;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// -log(-log u) with u = (word + 1/2) / 2^32. Near u = 1, where float32 has no digits for it, -log u is a series in v = 1 - u.
inline vf16 gumbel(vi16 word) {
  const vi16 inverted = word ^ set1_i32(-1);
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

// The words of tokens 64 g .. 64 g + 63: word w of lane i is that of token 64 g + 4 i + w.
inline void words64(const NoiseKey& key, int64_t g, vi16 (&words)[4]) {
  alignas(64) int32_t quads[16];
  for (int i = 0; i < 16; ++i) quads[i] = static_cast<int32_t>(16 * g + i);
  philox16(key, load_i32(quads), words);
}
inline void noise64(const vi16 (&words)[4], float* noise) {
  for (int w = 0; w < 4; ++w) {
    float of_word[16];
    store(of_word, gumbel(words[w]));
    for (int i = 0; i < 16; ++i) noise[4 * i + w] = of_word[i];
  }
}

inline uint32_t largest_word(const vi16 (&words)[4]) {
  const vi16 sign = set1_i32(INT32_MIN);  // turns the order of unsigned words into that of signed ones
  const vi16 most = max_i32(max_i32(words[0] ^ sign, words[1] ^ sign), max_i32(words[2] ^ sign, words[3] ^ sign));
  return static_cast<uint32_t>(max_lanes_i32(most)) ^ 0x80000000u;
}

// No smaller word has so much noise. -log(-log u) >= x says 1 - u <= -log u <= e^-x; 0.01 is more than all roundings.
inline uint32_t least_word(float noise) {
  if (noise < 0.02f) return 0;
  float share[16];
  store(share, exp(set1(0.01f - noise)));
  return static_cast<uint32_t>((1.0 - static_cast<double>(share[0])) * 0x1p32);
}

// Noise of any 16 tokens.
inline void noise16(const NoiseKey& key, const int32_t* tokens, float* noise) {
  vi16 words[4];
  philox16(key, shift_right<2>(load_i32(tokens)), words);
  int32_t of_word[4][16], own[16];
  for (int w = 0; w < 4; ++w) store_i32(of_word[w], words[w]);
  for (int i = 0; i < 16; ++i) own[i] = of_word[tokens[i] % 4][i];
  store(noise, gumbel(load_i32(own)));
}

}  // namespace noria::NORIA_TIER
