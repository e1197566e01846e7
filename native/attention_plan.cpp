#include "attention_plan.h"

#include <algorithm>
#include <limits>

namespace noria {

namespace {

constexpr int64_t kMostPartials = 16 << 20;  // floats: 64 MB of address space
constexpr int64_t kTilesPerThread = 4;       // enough that the last tiles of an op leave few threads waiting
constexpr int32_t kAllSplits = std::numeric_limits<int32_t>::max();

int32_t position_of(const StepView& step, const AttentionQuery& query) { return step.positions[query.token]; }

}  // namespace

AttentionPlanner::AttentionPlanner(const AttentionArgs& shape, int threads, int64_t table_width) : shape_(shape), threads_(threads) {
  const int32_t group = shape.heads / shape.kv.kv_heads;
  const int64_t splits = (table_width + kSplitBlocks - 1) / kSplitBlocks, vectors = static_cast<int64_t>(queries_a_tile(group)) * group;
  capacity_ = std::min(kMostPartials, kTilesPerThread * threads_ * splits * vectors * partial_width(shape.kv.dim));
  reads_.resize(static_cast<size_t>(threads));
  partials_.reset(new float[static_cast<size_t>(capacity_)]);
}

bool AttentionPlanner::serves(const AttentionArgs& args) const {
  return shape_.heads == args.heads && shape_.window == args.window && shape_.kv.group == args.kv.group &&
         shape_.kv.kv_heads == args.kv.kv_heads && shape_.kv.dim == args.kv.dim;
}

void AttentionPlanner::plan(const StepView& step) {
  work_.clear();
  queries_.clear();
  decodes_.clear();
  for (int32_t r = 0; r < step.row_count; ++r) {
    const int32_t first = step.row_offsets[r], tokens = step.row_offsets[r + 1] - first;
    if (tokens == 1)
      decodes_.push_back({r, first});
    else if (tokens > 1)
      add_chunk(step, r);
  }
  add_decodes(step);
  divide_splits();
  const auto cost = [](const AttentionWork& w) { return static_cast<int64_t>(w.queries) * (w.last_split - w.first_split); };
  std::stable_sort(work_.begin(), work_.end(), [&](const auto& a, const auto& b) { return cost(a) > cost(b); });
  view_ = {work_.data(), static_cast<int64_t>(work_.size()), queries_.data(), partials_.get(), counters_.data()};
}

void AttentionPlanner::add_chunk(const StepView& step, int32_t row) {
  const int32_t most = queries_a_tile(shape_.heads / shape_.kv.kv_heads), end = step.row_offsets[row + 1];
  for (int32_t t = step.row_offsets[row]; t < end; t += most) {
    const auto first = static_cast<int32_t>(queries_.size()), count = std::min(most, end - t);
    for (int32_t i = 0; i < count; ++i) queries_.push_back({row, t + i});
    add_work(step, first, count, kAllSplits);
  }
}

// Rows whose tables begin alike become neighbours, and share a work as long as there are works enough for the threads.
void AttentionPlanner::add_decodes(const StepView& step) {
  const auto table_order = [&](const AttentionQuery& a, const AttentionQuery& b) {
    const int32_t* const x = block_table(step, shape_.kv.group, a.row);
    const int32_t* const y = block_table(step, shape_.kv.group, b.row);
    const int64_t end = std::min(position_of(step, a), position_of(step, b)) / kBlockSize;
    for (int64_t i = 0; i < end; ++i)
      if (x[i] != y[i]) return x[i] < y[i];
    return position_of(step, a) < position_of(step, b);
  };
  if (shape_.window == 0) std::stable_sort(decodes_.begin(), decodes_.end(), table_order);
  const int64_t rows_a_thread = static_cast<int64_t>(decodes_.size()) * shape_.kv.kv_heads / (kTilesPerThread * threads_);
  const int64_t most = std::clamp<int64_t>(rows_a_thread, 1, queries_a_tile(shape_.heads / shape_.kv.kv_heads));
  for (size_t i = 0; i < decodes_.size();) {
    size_t end = i + 1;
    int64_t joint = kAllSplits;
    for (; end < decodes_.size() && static_cast<int64_t>(end - i) < most; ++end) {
      const int64_t shared = shared_splits(step, decodes_[i], decodes_[end]);
      if (shared == 0 || (end > i + 1 && shared < joint)) break;  // one with less in common begins the next work
      joint = shared;
    }
    std::sort(decodes_.begin() + static_cast<std::ptrdiff_t>(i), decodes_.begin() + static_cast<std::ptrdiff_t>(end),
              [&](const auto& a, const auto& b) { return position_of(step, a) < position_of(step, b); });
    const auto first = static_cast<int32_t>(queries_.size());
    for (; i < end; ++i) queries_.push_back(decodes_[i]);
    add_work(step, first, static_cast<int32_t>(queries_.size()) - first, static_cast<int32_t>(joint));
  }
}

void AttentionPlanner::add_work(const StepView& step, int32_t first_query, int32_t queries, int32_t joint_splits) {
  const int32_t window = shape_.window, first = position_of(step, queries_[static_cast<size_t>(first_query)]);
  const int32_t last = position_of(step, queries_.back());
  const int32_t start = window > 0 && first >= window ? first - window + 1 : 0;
  const int32_t base = start / kSplitKeys, end = last / kSplitKeys + 1;
  work_.push_back({first_query, queries, joint_splits, base, end, base, end - base, 0, -1});
}

// Splits from 0 on in which two queries see all keys, and the same blocks.
int64_t AttentionPlanner::shared_splits(const StepView& step, const AttentionQuery& a, const AttentionQuery& b) const {
  if (shape_.window > 0) return 0;
  const int32_t* const x = block_table(step, shape_.kv.group, a.row);
  const int32_t* const y = block_table(step, shape_.kv.group, b.row);
  const int64_t most = (std::min(position_of(step, a), position_of(step, b)) + 1) / kSplitKeys;
  return (std::mismatch(x, x + most * kSplitBlocks, y).first - x) / kSplitBlocks;
}

// Where there are too few tiles for the threads, each split of a long row becomes a tile of its own.
void AttentionPlanner::divide_splits() {
  const int32_t kv_heads = shape_.kv.kv_heads, group = shape_.heads / kv_heads;
  if (threads_ == 1 || static_cast<int64_t>(work_.size()) * kv_heads >= kTilesPerThread * threads_) return;
  std::vector<AttentionWork> divided;
  int64_t floats = 0;
  int32_t counters = 0;
  for (AttentionWork work : work_) {
    const bool divisible = work.splits > 1 && work.joint_splits == kAllSplits;
    if (divisible) {
      work.partials = floats;
      work.counter = counters;
      floats += static_cast<int64_t>(kv_heads) * work.splits * work.queries * group * partial_width(shape_.kv.dim);
      counters += kv_heads;
    }
    for (int32_t s = 0; s < (divisible ? work.splits : 1); ++s) {
      if (divisible) work.first_split = work.base_split + s, work.last_split = work.first_split + 1;
      divided.push_back(work);
    }
  }
  if (floats > capacity_) return;
  work_ = std::move(divided);
  counters_.assign(static_cast<size_t>(counters), 0);
}

// Chunks of prompts are left out: their attention is arithmetic.
void AttentionPlanner::find_reads(const StepView& step, size_t most) {
  for (auto& reads : reads_) reads.clear();
  if (decodes_.empty()) return;
  int64_t tile = 0;
  for (const AttentionWork& work : work_)
    for (int32_t head = 0; head < shape_.kv.kv_heads; ++head, ++tile) {
      std::vector<int64_t>& reads = reads_[static_cast<size_t>(tile % threads_)];  // tiles are dealt out
      const AttentionQuery* const queries = &queries_[static_cast<size_t>(work.first_query)];
      const bool chunk = work.queries > 1 && queries[0].row == queries[1].row;
      if (chunk || reads.size() >= most) continue;
      const int32_t joint = std::clamp(work.joint_splits, work.first_split, work.last_split);
      add_reads(step, queries[0], head, work.first_split, joint, reads);
      for (int32_t q = 0; q < work.queries; ++q) add_reads(step, queries[q], head, joint, work.last_split, reads);
    }
}

void AttentionPlanner::add_reads(const StepView& step, const AttentionQuery& query, int32_t head, int32_t first_split, int32_t last_split,
                                 std::vector<int64_t>& reads) const {
  KVLayout kv = shape_.kv;
  kv.slot = 0;
  const int32_t position = position_of(step, query), start = std::max(0, shape_.window > 0 ? position - shape_.window + 1 : 0);
  const int32_t* const table = block_table(step, kv.group, query.row);
  const int32_t end = std::min(position / kBlockSize + 1, last_split * kSplitBlocks);
  for (int32_t b = std::max(start / kBlockSize, first_split * kSplitBlocks); b < end; ++b) {
    reads.push_back(key_block(kv, table[b], head) - kv.base);
    reads.push_back(value_block(kv, table[b], head) - kv.base);
  }
}

}  // namespace noria
