// Memory that the next attention op reads, fetched while the linear ops before it compute.
//
//              attention l-1 | o   gate|up   down   qkv              | attention l
//   arithmetic .  .  .  .  . | ##################################### | .  .  .  .  .
//   memory     ############# | .  .  .  (weights: little a row)  .   | #############
//                              ^^^^^^^^^^^^^^^^^^ here ^^^^^^^^^^^^^
//
// With many rows a linear op waits for its arithmetic, and attention over their caches for the memory. So each step of a register
// tile fetches some lines of the keys and values that its worker's attention tiles will read, in the order in which they will.
// They pass through L2 and wait in L3. It changes no result.
//
// Everything here is `static inline`, for the reason in formats.h.
#pragma once
#include <cstdint>

#include "formats.h"

namespace noria {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kStepLanes = 16;  // 32-bit lanes of a bf16 or f32 weight that are a step; of a quantised one it is a group

// Steps of a register tile over one panel.
static inline int64_t steps_ahead(WeightFormat f, int64_t inputs) {
  const int64_t k = padded_inputs(f, inputs);
  if (is_quantized(f)) return k / f.group;
  return (k / (f.kind == Kind::bf16 ? 2 : 1) + kStepLanes - 1) / kStepLanes;
}

// Runs of `run_bytes` at base + offset, for each offset of [next, last), `lines` lines a step.
struct ReadAhead {
  const uint8_t* base;
  const int64_t* next;
  const int64_t* last;
  int64_t run_bytes;
  int64_t lines;
  const uint8_t* at = nullptr;  // what is left of the run at hand
  const uint8_t* end = nullptr;
};

static inline void fetch_some(ReadAhead& ahead) {
  if (ahead.at >= ahead.end) {
    if (ahead.next == ahead.last) return;
    ahead.at = ahead.base + *ahead.next++;
    ahead.end = ahead.at + ahead.run_bytes;
  }
  for (int64_t i = 0; i < ahead.lines; ++i) __builtin_prefetch(ahead.at + i * kCacheLine, 0, 2);  // into L2
  ahead.at += ahead.lines * kCacheLine;
}

}  // namespace noria
