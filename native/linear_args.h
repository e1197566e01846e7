// What the linear and embedding kernels are given: plain structs that mean the same on every tier.
//
// The functions that take them live in namespace noria::NORIA_TIER, one copy a tier:
//
//   quantize.h    void quantize_row(const float* x, int64_t inputs, const QuantizedRows& out, int64_t row);
//                 void quantize_rows(const float* x, int64_t x_stride, int64_t inputs, const QuantizedRows& out, int64_t first, int64_t
//                 last); void round_row_bf16(const float* x, int64_t inputs, uint16_t* pairs);             // padded_pairs(inputs) values
//                 void round_rows_bf16(const float* x, int64_t x_stride, int64_t inputs, uint16_t* pairs, int64_t first, int64_t last);
//   linear.h      int64_t linear_tile_count(LinearArgs& args, int threads);   // also chooses args.tiling
//                 void linear_tile(const LinearArgs& args, int64_t tile);      // tiles are independent, in any order, on any thread
//   embedding.h   void embed_rows(const EmbedArgs& args, int64_t first, int64_t last);
//                 void dequantize_rows(const DequantizeArgs& args, int64_t first, int64_t last);
//
// Callers set FTZ and DAZ in MXCSR on every thread that runs a kernel. No kernel allocates, throws or knows a thread.
#pragma once
#include <cstddef>
#include <cstdint>

#include "formats.h"

namespace noria {

// Activations quantised by groups of 32 along the inner dimension, for q8 and q4 weights. Row r, k = padded to 32 with zeros:
//
//   codes             [rows][k]       int8, code = round(x * 127 / amax)
//   scales            [rows][k / 32]  amax / 127
//   sums              [rows][k / 32]  the sum of a group's 32 codes    (weights without a minimum: the zero point's part)
//   scaled_sums       [rows][k / 32]  scale * sum                      (weights with a minimum)
//   half_sums         [rows][k / 16]  the same two for 16 codes        (weights in groups of 16)
//   scaled_half_sums  [rows][k / 16]
//
// A group that holds a NaN or an infinity gets scale NaN and zero codes, so that every output of the row is NaN.
struct QuantizedRows {
  int8_t* codes;
  float* scales;
  int32_t* sums;
  float* scaled_sums;
  int32_t* half_sums;
  float* scaled_half_sums;
};

static inline constexpr int64_t padded_codes(int64_t inputs) { return round_up(inputs, 32); }
static inline constexpr int64_t padded_pairs(int64_t inputs) { return round_up(inputs, 2); }

// Bytes of a workspace that holds `rows` quantised rows, and the six arrays inside it (the workspace is 64-byte aligned).
static inline constexpr int64_t quantized_bytes(int64_t rows, int64_t inputs) {
  const int64_t k = padded_codes(inputs), groups = rows * (k / 32);
  return round_up(rows * k, 64) + 3 * round_up(groups * 4, 64) + 2 * round_up(groups * 8, 64);
}
static inline QuantizedRows quantized_view(void* workspace, int64_t rows, int64_t inputs) {
  const int64_t k = padded_codes(inputs), groups = rows * (k / 32);
  unsigned char* at = static_cast<unsigned char*>(workspace);
  QuantizedRows q;
  q.codes = reinterpret_cast<int8_t*>(at);
  at += round_up(rows * k, 64);
  q.scales = reinterpret_cast<float*>(at);
  at += round_up(groups * 4, 64);
  q.sums = reinterpret_cast<int32_t*>(at);
  at += round_up(groups * 4, 64);
  q.scaled_sums = reinterpret_cast<float*>(at);
  at += round_up(groups * 4, 64);
  q.half_sums = reinterpret_cast<int32_t*>(at);
  at += round_up(groups * 8, 64);
  q.scaled_half_sums = reinterpret_cast<float*>(at);
  return q;
}

// The part of quantised rows that begins at code `at`, a multiple of 32.
static inline QuantizedRows part_of(const QuantizedRows& q, int64_t at) {
  return {q.codes + at, q.scales + at / 32, q.sums + at / 32, q.scaled_sums + at / 32, q.half_sums + at / 16, q.scaled_half_sums + at / 16};
}

// One packed matrix of a merged weight. Its outputs are columns [first_column, first_column + outputs) of y.
struct LinearSegment {
  const uint8_t* data;  // 64-byte aligned
  WeightFormat format;
  int32_t outputs;
  int64_t panel_stride;  // bytes: panel_bytes(format, inputs)
  int64_t first_column;
};

constexpr int kMaxSegments = 8;

// How a linear op is cut into tiles: `panel_run` neighbouring panels (numbered through all segments) by `row_block` rows.
struct LinearTiling {
  int64_t panel_run;
  int64_t row_block;
  int64_t row_blocks;
};

// y = x W^T + bias. Only those inputs need to be set that the segments' kinds read.
struct LinearArgs {
  LinearSegment segments[kMaxSegments];
  int32_t segment_count;
  int64_t inputs;
  int64_t rows;
  const float* x;  // f32 segments: [rows, inputs], rows x_stride elements apart
  int64_t x_stride;
  const uint16_t* pairs;    // bf16 segments: [rows, padded_pairs(inputs)] bfloat16, from round_rows_bf16
  QuantizedRows quantized;  // q8 and q4 segments: from quantize_rows
  const float* bias;        // [outputs of all segments] or null
  float* y;                 // [rows, outputs of all segments], rows y_stride elements apart
  int64_t y_stride;
  LinearTiling tiling;  // written by linear_tile_count
};

// Row ids[r] of a packed matrix [outputs, inputs], dequantised, times `scale`, to y[r]. Ids must be in [0, outputs).
struct EmbedArgs {
  const uint8_t* data;
  WeightFormat format;
  int64_t outputs;
  int64_t inputs;
  int64_t panel_stride;
  const int32_t* ids;
  float scale;
  float* y;  // rows y_stride elements apart
  int64_t y_stride;
};

// Outputs [first, last) of a packed matrix as float32 rows y[o], y_stride elements apart.
struct DequantizeArgs {
  const uint8_t* data;
  WeightFormat format;
  int64_t outputs;
  int64_t inputs;
  int64_t panel_stride;
  float* y;
  int64_t y_stride;
};

}  // namespace noria
