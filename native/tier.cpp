// One tier's kernels: this file is compiled once for each tier, with NORIA_TIER and the instruction set's flags (tiers.cmake).
//
// Nothing here may instantiate a template or an inline function of the standard library over types that the tiers share: the
// linker would keep one copy for all, perhaps the one with AVX-512 instructions.
#include "kernels.h"

#include "attention.h"
#include "embedding.h"
#include "limits.h"
#include "linear.h"
#include "math.h"
#include "norm.h"
#include "quantize.h"
#include "rows.h"
#include "sampler.h"

#define NORIA_STRING(x) #x
#define NORIA_NAME(x) NORIA_STRING(x)

namespace noria::NORIA_TIER {

namespace {

template <class F>
void map_values(const float* x, float* y, int64_t count, F f) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) store(y + i, f(load(x + i)));
  const int rest = static_cast<int>(count - i);
  if (rest > 0) store_part(y + i, f(load_part(x + i, rest)), rest);
}

bool map(const char* function, const float* x, float* y, int64_t count) {
  const auto is = [function](const char* name) { return std::strcmp(function, name) == 0; };
  if (is("exp")) return map_values(x, y, count, [](vf16 v) { return exp(v); }), true;
  if (is("exp2_not_positive")) return map_values(x, y, count, [](vf16 v) { return exp2_not_positive(v); }), true;
  if (is("log")) return map_values(x, y, count, [](vf16 v) { return log(v); }), true;
  if (is("tanh")) return map_values(x, y, count, [](vf16 v) { return tanh(v); }), true;
  if (is("sigmoid")) return map_values(x, y, count, [](vf16 v) { return sigmoid(v); }), true;
  if (is("silu")) return map_values(x, y, count, [](vf16 v) { return silu(v); }), true;
  if (is("gelu_tanh")) return map_values(x, y, count, [](vf16 v) { return gelu_tanh(v); }), true;
  return false;
}

void noise(uint64_t seed, int64_t position, int32_t stream, float* out, int64_t count) {
  alignas(64) float stretch[64];
  for (int64_t at = 0; at < count; at += 64) {
    vi16 words[4];
    words64({seed, position, stream}, at / 64, words);
    noise64(words, stretch);
    std::memcpy(out + at, stretch, sizeof(float) * static_cast<size_t>(count - at < 64 ? count - at : 64));
  }
}

}  // namespace

extern const KernelTable kTable;
const KernelTable kTable = {
    NORIA_NAME(NORIA_TIER),
    linear_tile_count,
    linear_tile,
    quantize_rows,
    round_rows_bf16,
    embed_rows,
    dequantize_rows,
    run_stages,
    attention_scratch_bytes,
    attention_tile,
    sampler_scratch_bytes,
    draw_tile,
    map,
    noise,
    peak,
    read,
};

}  // namespace noria::NORIA_TIER
