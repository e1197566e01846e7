// One layer's paged attention, and how a step's queries are cut into tiles.
#pragma once
#include <cstdint>

#include "kv_layout.h"
#include "linear_args.h"

namespace noria {

struct AttentionArgs {
  const float* qkv;  // [tokens, qkv_stride]: query heads, then key and value heads (those are in the cache by now)
  int64_t qkv_stride;
  float* out;  // [tokens, heads * dim]
  int32_t heads;
  float scale;
  float softcap;   // 0: none
  int32_t window;  // 0: full
  KVLayout kv;
  QuantizedRows quantized;  // the output in the forms that the next linears read; null pointers: not wanted.
  uint16_t* pairs;          // With `quantized`, heads / kv_heads * dim is a multiple of 32.
};

// Query vectors that are computed together: some queries by the heads that share a KV head.
constexpr int32_t kVectors = 24;
static inline int32_t queries_a_tile(int32_t group_heads) { return group_heads >= kVectors ? 1 : kVectors / group_heads; }

struct AttentionQuery {
  int32_t row, token;
};

// Queries of one work, in the splits [first_split, last_split) of their `splits` splits from `base_split` on. They are neighbours in one
// row, or of several rows that share their first blocks: then they see the same keys in the splits before `joint_splits`, each of them
// all of these keys, and in the later splits each query is by itself.
struct AttentionWork {
  int32_t first_query, queries;  // in AttentionPlan::queries
  int32_t joint_splits;
  int32_t first_split, last_split;
  int32_t base_split, splits;
  int32_t counter;   // index into AttentionPlan::counters, one a KV head
  int64_t partials;  // offset into AttentionPlan::partials; -1: this work is all the splits, nothing is shared
};

// All work of a step for the layers of one (group, window). A tile is (work, KV head).
struct AttentionPlan {
  const AttentionWork* work;
  int64_t work_count;
  const AttentionQuery* queries;
  float* partials;     // [work's KV head][split][vector][partial_width(dim)]
  uint32_t* counters;  // partial results that are ready; zero at the step's begin
};

// The unnormalised output of one split, then its maximum and its sum.
static inline int64_t partial_width(int32_t dim) { return dim + 16; }

}  // namespace noria
