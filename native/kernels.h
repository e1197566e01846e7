// The kernels as one tier offers them. tier.cpp is compiled once for each tier and fills one table.
#pragma once
#include <cstdint>

#include "attention_args.h"
#include "limits_args.h"
#include "linear_args.h"
#include "read_ahead.h"
#include "rows_args.h"
#include "step.h"

namespace noria {

struct KernelTable {
  const char* name;

  // linear.h, quantize.h, embedding.h
  int64_t (*linear_tile_count)(LinearArgs&, int threads);
  void (*linear_tile)(const LinearArgs&, int64_t tile, ReadAhead* later);  // `later` may be null
  void (*quantize_rows)(const float* x, int64_t x_stride, int64_t inputs, const QuantizedRows& out, int64_t first, int64_t last);
  void (*round_rows_bf16)(const float* x, int64_t x_stride, int64_t inputs, uint16_t* pairs, int64_t first, int64_t last);
  void (*embed_rows)(const EmbedArgs&, int64_t first, int64_t last);
  void (*dequantize_rows)(const DequantizeArgs&, int64_t first, int64_t last);

  // rows.h
  void (*run_stages)(const Stage* stages, int64_t count, const StepView&, int64_t first, int64_t last);

  // attention.h
  int64_t (*attention_scratch_bytes)(const AttentionArgs&);
  void (*attention_tile)(const AttentionArgs&, const StepView&, const AttentionPlan&, int64_t tile, int64_t next, void* scratch);

  // sampler.h
  int64_t (*sampler_scratch_bytes)(int64_t vocab);
  void (*draw_tile)(const float* logits, int64_t vocab, const StepView&, int64_t draw, void* scratch);

  // math.h: one elementary function over an array, for tests. False if the name is unknown.
  bool (*map)(const char* function, const float* x, float* y, int64_t count);
  // philox.h: the noise of tokens [0, count)
  void (*noise)(uint64_t seed, int64_t position, int32_t stream, float* noise, int64_t count);

  // limits.h
  int64_t (*peak)(LimitUnit unit, int64_t rounds, const unsigned char* operands, unsigned char* sink);
  void (*read)(const unsigned char* data, int64_t bytes, unsigned char* sink);
};

}  // namespace noria
