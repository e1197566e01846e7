// One step's inputs as plain pointers: what every kernel may look at. Filled by Tape::prepare, constant during the step.
#pragma once
#include <cstdint>

namespace noria {

constexpr int kBlockSize = 16;   // tokens of a KV block
constexpr int kSplitKeys = 256;  // keys of an attention split: a fact of the numerics contract, see attention.h
constexpr int kSplitBlocks = kSplitKeys / kBlockSize;
constexpr int kMaxGroups = 32;  // layer groups

// Draws in compressed form: see noria.backends.base.Draws.
struct DrawsView {
  int64_t count;
  const int32_t* logit_row;
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const uint64_t* seed;
  const int64_t* position;
  const int32_t* stream;
  const int32_t* target;
  const int32_t* num_top;
  const float* repetition;
  const float* presence;
  const float* frequency;
  const int64_t* history_offsets;
  const int32_t* history_tokens;
  const int32_t* history_counts;
  const int64_t* bias_offsets;
  const int32_t* bias_tokens;
  const float* bias_values;
  const int64_t* ban_offsets;
  const int32_t* ban_tokens;
  const int32_t* mask;    // [count] a row of `masks`, -1: none; null: no draw has one
  const uint32_t* masks;  // [mask_count, mask_words] bit `token % 32` of word `token / 32`: the token may be drawn
  int64_t mask_count;
  int64_t mask_words;
  const int32_t* masks_ready;  // another thread stores 1 when `masks` is filled, which may be after the step has begun
};

struct DrawnView {
  int32_t* token;       // [count]
  float* logprob;       // [count]
  int32_t* top_tokens;  // [count, width]
  float* top_logprobs;  // [count, width]
  int64_t width;
  float* hidden;  // [hidden_count, hidden_width]; null: nobody wants them
  int64_t hidden_width;
};

struct StepView {
  int64_t token_count;
  int64_t row_count;
  int64_t logit_count;
  int64_t hidden_count;
  const int32_t* tokens;                    // [T]
  const int32_t* positions;                 // [T]
  const int32_t* row_offsets;               // [R + 1]
  const int32_t* row_slots;                 // [R]
  const int32_t* token_rows;                // [T] the row of each token
  const int32_t* logit_rows;                // [L]
  const int32_t* hidden_rows;               // [H] gathered behind the logit rows
  const int32_t* block_tables[kMaxGroups];  // [table_rows, table_width] each
  int64_t group_count;
  int64_t table_rows;
  int64_t table_width;
  DrawsView draws;
  DrawnView drawn;
};

// The block table of row r in a group.
static inline const int32_t* block_table(const StepView& step, int group, int64_t row) {
  return step.block_tables[group] + step.row_slots[row] * step.table_width;
}

}  // namespace noria
