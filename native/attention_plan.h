// How a step's queries are cut into the works of attention_args.h, for all layers of one shape.
//
//   a chunk of one row         neighbouring queries, kVectors / group a work
//   decoding rows              one query a work; those that share their first blocks for at least one split are put together
//   few works, long contexts   a work of its own for each split, merged by whoever ends last
#pragma once
#include <memory>
#include <vector>

#include "attention_args.h"

namespace noria {

class AttentionPlanner {
 public:
  // `table_width`: blocks a row; it bounds the memory for partial results.
  AttentionPlanner(const AttentionArgs& shape, int threads, int64_t table_width);

  bool serves(const AttentionArgs& args) const;  // whether these layers are cut in the same way
  void plan(const StepView& step);
  const AttentionPlan& view() const { return view_; }

  // Where the keys and values lie that each worker's tiles of decodes read, in the order in which it will: offsets of one head's
  // blocks, from the base of a layer in slot 0; so many at most a worker. Of the step planned last.
  void find_reads(const StepView& step, size_t most);
  const std::vector<int64_t>& reads(int worker) const { return reads_[static_cast<size_t>(worker)]; }

 private:
  void add_chunk(const StepView& step, int32_t row);
  void add_decodes(const StepView& step);
  void add_work(const StepView& step, int32_t first_query, int32_t queries, int32_t joint_splits);
  int64_t shared_splits(const StepView& step, const AttentionQuery& a, const AttentionQuery& b) const;
  void divide_splits();
  void add_reads(const StepView& step, const AttentionQuery& query, int32_t head, int32_t first_split, int32_t last_split,
                 std::vector<int64_t>& reads) const;

  const AttentionArgs shape_;
  const int64_t threads_;
  std::vector<AttentionWork> work_;
  std::vector<AttentionQuery> queries_, decodes_;
  std::vector<uint32_t> counters_;
  std::vector<std::vector<int64_t>> reads_;
  std::unique_ptr<float[]> partials_;  // not touched before a step needs it
  int64_t capacity_;                   // of partials, in floats
  AttentionPlan view_ = {};
};

}  // namespace noria
