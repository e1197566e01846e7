// Row-local work as data: a list of stages that each read and write only their own row.
//
// Neighbouring row-local operations of a model (residual add, norm, conversion for the next linear, rope, cache write ...) are
// one op of the tape: a tile is a few rows, taken through all the stages while they are in the cache.
#pragma once
#include <cstdint>

#include "kv_layout.h"
#include "linear_args.h"

namespace noria {

enum class StageKind : int32_t { embed, gather, norm, add, gated, head_norm, rope, write_kv, quantize, round_bf16, softcap, hidden };
enum class Activation : int32_t { silu, gelu_tanh };

struct EmbedStage {
  EmbedArgs args;  // ids are the step's tokens
};
struct GatherStage {  // y = the rows of x that logit_rows name, then those that hidden_rows name
  const float* x;
  float* y;
  int64_t width;
};
struct NormStage {  // residual += x (where there is one); normed = rms_norm(residual or x)
  const float* x;
  float* residual;  // null: none
  const float* weight;
  float* normed;
  int64_t width;
  float eps;
};
struct AddStage {  // x += y
  float* x;
  const float* y;
  int64_t width;
};
struct GatedStage {      // y = activation(gate) * up
  const float* gate_up;  // [rows, 2 width]
  float* y;              // null where only linears over codes read it: then `quantized` has them
  int64_t width;
  Activation activation;
  QuantizedRows quantized;
};
struct HeadNormStage {  // norm of every query head and every key head, in place
  float* qkv;           // [rows, stride]
  int64_t stride;
  const float* q_weight;
  const float* k_weight;
  int32_t heads, kv_heads, dim;
  float eps;
};
struct RopeStage {  // rotate every query head and every key head, in place
  float* qkv;
  int64_t stride;
  const float* cosines;  // [positions, half]
  const float* sines;
  int64_t half;
  int32_t heads, kv_heads, dim;
};
struct WriteKVStage {  // K and V of the token into the cache
  const float* qkv;
  int64_t stride;
  int32_t heads;
  KVLayout kv;
};
struct QuantizeStage {
  const float* x;
  int64_t width;
  QuantizedRows out;
};
struct RoundStage {
  const float* x;
  int64_t width;
  uint16_t* pairs;
};
struct SoftcapStage {  // x = cap * tanh(x / cap)
  float* x;
  int64_t width;
  float cap;
};

struct HiddenStage {  // the rows behind the logit rows, to where the step's caller wants them
  const float* x;
  int64_t width;
};

struct Stage {
  StageKind kind;
  union {
    EmbedStage embed;
    GatherStage gather;
    NormStage norm;
    AddStage add;
    GatedStage gated;
    HeadNormStage head_norm;
    RopeStage rope;
    WriteKVStage write_kv;
    QuantizeStage quantize;
    RoundStage round_bf16;
    SoftcapStage softcap;
    HiddenStage hidden;
  };
};

}  // namespace noria
