// How a packed matrix lies in memory: the C++ side of src/noria/weights/formats.py, whose docstring draws the layout.
//
// Independent of the tier. Everything here is `static inline`: this header is compiled into every tier, and a weak symbol that
// the AVX-512 copy emits could be the one that the linker keeps for the baseline code.
#pragma once
#include <cstdint>

namespace noria {

constexpr int kPanel = 32;  // outputs in a panel

enum class Kind : uint8_t { f32, bf16, q8, q4 };

// The element format of one packed matrix. `group`, `half_scales` and `has_minimum` matter for q8 and q4 only.
struct WeightFormat {
  Kind kind;
  uint8_t group;     // inner elements that share a scale: 32 or 16
  bool half_scales;  // scales and minima are float16, else float32
  bool has_minimum;
};

static inline constexpr bool is_quantized(WeightFormat f) { return f.kind == Kind::q8 || f.kind == Kind::q4; }

static inline constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// The inner dimension as stored.
static inline constexpr int64_t padded_inputs(WeightFormat f, int64_t inputs) {
  return round_up(inputs, f.kind == Kind::f32 ? 1 : f.kind == Kind::bf16 ? 2 : 32);
}

// Bytes of one group of one panel (q8, q4): codes, scales, minima.
static inline constexpr int64_t code_bytes(WeightFormat f) { return f.kind == Kind::q8 ? f.group * kPanel : f.group * kPanel / 2; }
static inline constexpr int64_t scale_bytes(WeightFormat f) { return kPanel * (f.half_scales ? 2 : 4); }
static inline constexpr int64_t group_bytes(WeightFormat f) { return code_bytes(f) + scale_bytes(f) * (f.has_minimum ? 2 : 1); }

static inline constexpr int64_t panel_bytes(WeightFormat f, int64_t inputs) {
  const int64_t k = padded_inputs(f, inputs);
  if (f.kind == Kind::f32) return k * kPanel * 4;
  if (f.kind == Kind::bf16) return k * kPanel * 2;
  return k / f.group * group_bytes(f);
}

static inline constexpr int64_t panel_count(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }
static inline constexpr int64_t matrix_bytes(WeightFormat f, int64_t outputs, int64_t inputs) {
  return panel_count(outputs) * panel_bytes(f, inputs);
}

}  // namespace noria
