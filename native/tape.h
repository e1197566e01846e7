// A recorded forward pass: a list of ops over fixed buffers, run by the pool once a step with that step's sizes.
//
//   rows | linear | rows | attention | linear | ... | rows |( linear | rows | draw ) repeated for tiles of logit rows
//
// Everything that is known when the model is loaded (pointers, widths, formats) is in the ops; everything that changes from step
// to step is in the StepView.
#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "attention_plan.h"
#include "kernels.h"
#include "pool.h"

namespace noria {

enum class Domain { tokens, logits };

// What step inputs are checked against, once a step, before a kernel follows an index.
struct TapeLimits {
  int64_t max_tokens;
  int64_t max_rows;
  int64_t table_width;  // blocks a row
  int64_t num_blocks;
  int64_t max_positions;  // length of the rope tables
  int64_t vocab;
  std::vector<int32_t> windows;  // of each layer group; 0: full attention
};

// A linear op's input, in the forms that its segments' formats need.
struct LinearInput {
  const float* x;
  const uint16_t* pairs;
  void* quantized;  // workspace of quantized_bytes(rows of the buffer, inputs)
  int64_t quantized_rows;
};

class Tape final : public Program {
 public:
  Tape(std::shared_ptr<Pool> pool, const KernelTable& kernels, TapeLimits limits);
  ~Tape() override;

  // -- recording, in order -----------------------------------------------------------------------------------------------------
  void begin_rows(Domain domain);                  // stages follow
  void add_stage(const Stage& stage);              // to the rows op begun last
  void add_hidden(const float* x, int64_t width);  // a stage: reports the gathered rows behind the logit rows
  void begin_linear(Domain domain, int64_t inputs, const LinearInput& input, const float* bias, float* y, int64_t outputs);
  void add_segment(const LinearSegment& segment);  // to the linear op begun last
  void add_attention(const AttentionArgs& args);
  void begin_logits(int64_t chunk_rows);  // what follows runs over tiles of `chunk_rows` logit rows
  void add_draw(float* logits);           // [chunk_rows, vocab], written by the linear before
  void finish();

  // -- running -----------------------------------------------------------------------------------------------------------------
  // `all_logits` [L, vocab], if not null, receives the logits, and nothing is drawn. `step.token_rows` is filled here. Throws
  // std::invalid_argument for inputs outside the limits.
  void run(StepView& step, float* all_logits);

  void run_tile(uint32_t op, uint32_t pass, uint32_t tile, int worker) override;
  Bytes reads_after(uint32_t op, int worker) const override;
  void finished(uint32_t op) override;

  const std::vector<int64_t>& decode_reads(int worker) const { return planners_.front().reads(worker); }  // of the first attention's shape
  int32_t highest_block() const { return highest_block_; }                                                // that any step has named

  // -- profile -----------------------------------------------------------------------------------------------------------------
  void set_profiling(bool on);
  std::vector<std::string> labels() const;
  const std::vector<double>& seconds() const { return seconds_; }  // by op, summed over the steps since profiling was set

 private:
  enum class OpKind { rows, linear, attention, draw };

  struct Op {
    OpKind kind;
    Domain domain = Domain::tokens;
    bool in_loop = false;
    std::vector<Stage> stages = {};
    int64_t rows_a_tile = 1;
    LinearArgs linear[2] = {};  // of full passes, and of the last pass (outside the loop only the last is used)
    AttentionArgs attention = {};
    size_t plan = 0;               // of planners_
    uint32_t attention_after = 0;  // of a linear: the attention op behind it, itself no attention: none
    int64_t lines_ahead = 0;       // of an attention: lines that a step of the linears before it fetches
  };

  void check(const StepView& step);
  void check_rows(const StepView& step);
  void check_draws(const StepView& step) const;
  void find_token_rows(StepView& step);
  void order_draws(const StepView& step);
  void set_sizes();
  int64_t rows_of(Domain domain) const;
  int64_t count_linear(LinearArgs& args, int64_t rows) const;
  void run_linear(const Op& op, uint32_t pass, uint32_t tile, ReadAhead* later) const;
  int64_t tile_after(uint32_t op, uint32_t tile) const;
  void set_lines_ahead();
  ReadAhead* read_ahead(uint32_t op, int worker);
  void await_masks() const;
  void run_draws(uint32_t pass, uint32_t tile, void* scratch) const;
  Op& op_of(OpKind kind);

  std::shared_ptr<Pool> pool_;
  const KernelTable& kernels_;
  const TapeLimits limits_;
  std::vector<Op> ops_;
  std::vector<AttentionPlanner> planners_;  // one a shape of attention
  int64_t chunk_rows_ = 1;
  const float* logits_ = nullptr;
  int64_t hidden_width_ = 0;  // 0: the forward pass reports no hidden states
  bool recording_loop_ = false;

  StepView step_ = {};  // of the step that runs
  int32_t highest_block_ = 0;
  float* all_logits_ = nullptr;
  std::vector<int32_t> token_rows_;
  std::vector<int32_t> row_draws_;  // draws of logit row r: draw_order_[row_draws_[r]] up to row_draws_[r + 1]
  std::vector<int32_t> draw_order_;
  std::vector<std::unique_ptr<std::byte[]>> scratch_;  // one a worker, not touched before it is needed
  std::vector<std::byte*> scratch_start_;              // the same, aligned

  // What each worker fetches now, and for which attention op.
  struct alignas(64) Ahead {
    uint32_t op = 0;
    ReadAhead reads = {};
  };
  std::vector<Ahead> ahead_;

  bool profiling_ = false;
  std::vector<double> seconds_;
  double last_time_ = 0.0;
};

}  // namespace noria
