#include "tape.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>

namespace noria {

namespace {

constexpr int64_t kTilesPerThread = 4;
constexpr int64_t kMostFetched = 128 << 10;  // bytes of the next op's weights: they stay in L2 beside what the present op needs
constexpr int64_t kFewestRowsAhead = 12;     // with fewer, a linear op waits for the memory itself
constexpr int64_t kMostLinesAhead = 4;       // as many as the memory answers in a step
constexpr size_t kMostRunsAhead = 4096;      // a worker: some megabytes, that the cache keeps until they are read
constexpr int64_t kRowsAStep = 6;            // of a register tile
constexpr int kMaskSpins = 2000;             // some ten microseconds
constexpr auto kMaskNap = std::chrono::microseconds(20);

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument("step inputs: " + message); }

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

Tape::Tape(std::shared_ptr<Pool> pool, const KernelTable& kernels, TapeLimits limits)
    : pool_(std::move(pool)), kernels_(kernels), limits_(std::move(limits)) {
  token_rows_.resize(static_cast<size_t>(limits_.max_tokens));
}

Tape::~Tape() { pool_->quiesce(); }

// -- recording ------------------------------------------------------------------------------------------------------------------

Tape::Op& Tape::op_of(OpKind kind) {
  if (ops_.empty() || ops_.back().kind != kind) throw std::logic_error("tape: this belongs to another kind of op than the one begun last");
  return ops_.back();
}

void Tape::begin_rows(Domain domain) { ops_.push_back({.kind = OpKind::rows, .domain = domain, .in_loop = recording_loop_}); }

void Tape::add_stage(const Stage& stage) { op_of(OpKind::rows).stages.push_back(stage); }

void Tape::add_hidden(const float* x, int64_t width) {
  hidden_width_ = width;
  add_stage({.kind = StageKind::hidden, .hidden = {x, width}});
}

void Tape::begin_linear(Domain domain, int64_t inputs, const LinearInput& input, const float* bias, float* y, int64_t outputs) {
  LinearArgs args = {};
  args.inputs = inputs;
  args.x = input.x;
  args.x_stride = inputs;
  args.pairs = input.pairs;
  if (input.quantized != nullptr) args.quantized = quantized_view(input.quantized, input.quantized_rows, inputs);
  args.bias = bias;
  args.y = y;
  args.y_stride = outputs;
  Op op{.kind = OpKind::linear, .domain = domain, .in_loop = recording_loop_};
  op.linear[0] = op.linear[1] = args;
  ops_.push_back(std::move(op));
}

void Tape::add_segment(const LinearSegment& segment) {
  for (LinearArgs& args : op_of(OpKind::linear).linear) {
    if (args.segment_count == kMaxSegments)
      throw std::invalid_argument("a linear weight of more than " + std::to_string(kMaxSegments) + " segments");
    args.segments[args.segment_count++] = segment;
  }
}

void Tape::add_attention(const AttentionArgs& args) {
  Op op{.kind = OpKind::attention, .domain = Domain::tokens, .in_loop = false};
  op.attention = args;
  while (op.plan < planners_.size() && !planners_[op.plan].serves(args)) ++op.plan;
  if (op.plan == planners_.size()) planners_.emplace_back(args, pool_->threads(), limits_.table_width);
  ops_.push_back(std::move(op));
}

void Tape::begin_logits(int64_t chunk_rows) {
  recording_loop_ = true;
  chunk_rows_ = chunk_rows;
  loop_begin = static_cast<uint32_t>(ops_.size());
}

void Tape::add_draw(float* logits) {
  logits_ = logits;
  ops_.push_back({.kind = OpKind::draw, .domain = Domain::logits, .in_loop = true});
}

void Tape::finish() {
  if (!recording_loop_) loop_begin = static_cast<uint32_t>(ops_.size());
  make_gates(ops_.size(), pool_->threads());
  int64_t bytes = kernels_.sampler_scratch_bytes(limits_.vocab);
  for (size_t i = 0; i < ops_.size(); ++i)
    if (ops_[i].kind == OpKind::attention) {
      bytes = std::max(bytes, kernels_.attention_scratch_bytes(ops_[i].attention));
      gates[i].division = Division::dealt;  // the planner puts the longest first
    }
  ahead_.resize(static_cast<size_t>(pool_->threads()));
  for (size_t i = loop_begin, attention = 0; i-- > 0;) {
    if (ops_[i].kind == OpKind::attention) attention = i;
    ops_[i].attention_after = static_cast<uint32_t>(attention);
  }
  for (int i = 0; i < pool_->threads(); ++i) {
    scratch_.push_back(std::unique_ptr<std::byte[]>(new std::byte[static_cast<size_t>(bytes) + 64]));
    const auto address = reinterpret_cast<uintptr_t>(scratch_.back().get());
    scratch_start_.push_back(scratch_.back().get() + (64 - address % 64) % 64);
  }
}

// -- the step's inputs -----------------------------------------------------------------------------------------------------------

void Tape::check(const StepView& step) {
  if (step.token_count > limits_.max_tokens) refuse("more tokens than the executable was built for");
  if (step.row_count > limits_.max_rows) refuse("more rows than the executable was built for");
  if (step.logit_count + step.hidden_count > limits_.max_tokens) refuse("more logit rows and hidden rows than tokens");
  if (step.hidden_count > 0 && hidden_width_ == 0) refuse("hidden_rows are wanted of a forward pass that reports no hidden states");
  if (step.drawn.hidden != nullptr && step.drawn.hidden_width != hidden_width_) refuse("room for hidden states of another width");
  if (step.group_count != static_cast<int64_t>(limits_.windows.size())) refuse("another number of block tables than layer groups");
  for (int64_t t = 0; t < step.token_count; ++t)
    if (step.tokens[t] < 0 || step.tokens[t] >= limits_.vocab)
      refuse("token id " + std::to_string(step.tokens[t]) + " is not in the vocabulary");
  for (int64_t i = 0; i < step.logit_count; ++i)
    if (step.logit_rows[i] < 0 || step.logit_rows[i] >= step.token_count) refuse("logit_rows names a token that the step has not");
  for (int64_t i = 0; i < step.hidden_count; ++i)
    if (step.hidden_rows[i] < 0 || step.hidden_rows[i] >= step.token_count) refuse("hidden_rows names a token that the step has not");
  check_rows(step);
}

// Rows tile the tokens, positions ascend by one, and every block that a query may see is one of the cache's, not the null block.
void Tape::check_rows(const StepView& step) {
  if (step.row_offsets[0] != 0 || step.row_offsets[step.row_count] != step.token_count) refuse("row_offsets do not cover the tokens");
  for (int64_t r = 0; r < step.row_count; ++r) {
    const int32_t first = step.row_offsets[r], last = step.row_offsets[r + 1];
    if (last < first) refuse("row_offsets descend");
    if (first == last) continue;
    if (step.row_slots[r] < 0 || step.row_slots[r] >= step.table_rows) refuse("row_slots names a row without a block table");
    const int64_t start = step.positions[first], end = start + last - first;
    if (start < 0 || end > std::min(limits_.max_positions, limits_.table_width * kBlockSize))
      refuse("a position beyond the longest sequence");
    for (int32_t t = first; t < last; ++t)
      if (step.positions[t] != start + t - first) refuse("positions of a row do not ascend by one");
    for (size_t g = 0; g < limits_.windows.size(); ++g) {
      const int32_t* table = block_table(step, static_cast<int>(g), r);
      const int64_t window = limits_.windows[g];
      const int64_t from = window > 0 && start >= window ? (start - window + 1) / kBlockSize : 0;
      int32_t least = INT32_MAX, most = 0;
      for (int64_t b = from; b < ceil_divide(end, kBlockSize); ++b) least = std::min(least, table[b]), most = std::max(most, table[b]);
      if (least < 1 || most >= limits_.num_blocks) refuse("a block table names no block of the cache for a position that a query sees");
      highest_block_ = std::max(highest_block_, most);
    }
  }
}

void Tape::check_draws(const StepView& step) const {
  const DrawsView& d = step.draws;
  const auto in_vocabulary = [this](int32_t token) { return token >= 0 && token < limits_.vocab; };
  const auto check_list = [&](const int64_t* offsets, const int32_t* tokens) {
    for (int64_t i = offsets[0]; i < offsets[d.count]; ++i)
      if (!in_vocabulary(tokens[i])) refuse("a draw's list names a token outside the vocabulary");
  };
  for (int64_t i = 0; i < d.count; ++i) {
    if (d.logit_row[i] < 0 || d.logit_row[i] >= step.logit_count) refuse("a draw reads a logit row that the step has not");
    if (d.target[i] >= limits_.vocab) refuse("a draw's target is outside the vocabulary");
    if (d.num_top[i] > step.drawn.width) refuse("a draw wants more top tokens than the result has room for");
    if (!(d.temperature[i] >= 0.0f)) refuse("a draw's temperature is negative or not a number");
    if (d.mask != nullptr && (d.mask[i] < -1 || d.mask[i] >= d.mask_count)) refuse("a draw names a mask that the step has not");
  }
  if (d.mask != nullptr && d.mask_words != ceil_divide(limits_.vocab, 32)) refuse("a mask has another length than the vocabulary");
  check_list(d.history_offsets, d.history_tokens);
  check_list(d.bias_offsets, d.bias_tokens);
  check_list(d.ban_offsets, d.ban_tokens);
}

void Tape::find_token_rows(StepView& step) {
  for (int64_t r = 0; r < step.row_count; ++r)
    std::fill(token_rows_.begin() + step.row_offsets[r], token_rows_.begin() + step.row_offsets[r + 1], static_cast<int32_t>(r));
  step.token_rows = token_rows_.data();
}

// Draws by logit row, so that a tile of the draw op is one row of logits.
void Tape::order_draws(const StepView& step) {
  const DrawsView& d = step.draws;
  row_draws_.assign(static_cast<size_t>(step.logit_count) + 1, 0);
  draw_order_.resize(static_cast<size_t>(d.count));
  for (int64_t i = 0; i < d.count; ++i) ++row_draws_[static_cast<size_t>(d.logit_row[i])];
  int32_t before = 0;
  for (int32_t& count : row_draws_) before += std::exchange(count, before);
  std::vector<int32_t> next(row_draws_);
  for (int64_t i = 0; i < d.count; ++i)
    draw_order_[static_cast<size_t>(next[static_cast<size_t>(d.logit_row[i])]++)] = static_cast<int32_t>(i);
}

// -- sizes -------------------------------------------------------------------------------------------------------------------------

int64_t Tape::count_linear(LinearArgs& args, int64_t rows) const {
  args.rows = rows;
  return kernels_.linear_tile_count(args, pool_->threads());
}

int64_t Tape::rows_of(Domain domain) const { return domain == Domain::tokens ? step_.token_count : step_.logit_count + step_.hidden_count; }

void Tape::set_sizes() {
  passes = static_cast<uint32_t>(ceil_divide(step_.logit_count, chunk_rows_));
  const int64_t last_chunk = passes == 0 ? 0 : step_.logit_count - (passes - 1) * chunk_rows_;
  for (uint32_t i = 0; i < ops_.size(); ++i) {
    Op& op = ops_[i];
    const int64_t rows = op.in_loop ? last_chunk : rows_of(op.domain);
    const int64_t full = op.in_loop ? chunk_rows_ : rows;
    switch (op.kind) {
      case OpKind::rows:
        op.rows_a_tile = std::clamp<int64_t>(full / (kTilesPerThread * pool_->threads()), 1, 16);
        set_tiles(i, ceil_divide(full, op.rows_a_tile), ceil_divide(rows, op.rows_a_tile));
        break;
      case OpKind::linear:
        set_tiles(i, op.in_loop ? count_linear(op.linear[0], full) : 0, count_linear(op.linear[1], rows));
        break;
      case OpKind::attention:
        set_tiles(i, planners_[op.plan].view().work_count * op.attention.kv.kv_heads);
        break;
      case OpKind::draw:
        set_tiles(i, full, rows);
        break;
    }
  }
}

// How many lines each step of the linears before an attention op fetches for it.
void Tape::set_lines_ahead() {
  for (Ahead& ahead : ahead_) ahead.op = 0;
  const bool many = step_.token_count >= kFewestRowsAhead;
  if (many)
    for (AttentionPlanner& planner : planners_) planner.find_reads(step_, kMostRunsAhead);
  int64_t steps = 0;
  for (Op& op : ops_) {
    if (op.kind == OpKind::linear) {
      const LinearArgs& args = op.linear[1];
      for (int s = 0; s < args.segment_count; ++s) {
        const LinearSegment& segment = args.segments[s];
        steps += panel_count(segment.outputs) * ceil_divide(args.rows, kRowsAStep) * steps_ahead(segment.format, args.inputs);
      }
    }
    if (op.kind != OpKind::attention) continue;
    size_t runs = 0;
    for (int worker = 0; worker < pool_->threads() && many; ++worker) runs = std::max(runs, planners_[op.plan].reads(worker).size());
    const int64_t lines = static_cast<int64_t>(runs) * ceil_divide(kv_head_bytes(op.attention.kv), kCacheLine) * pool_->threads();
    op.lines_ahead = steps == 0 ? 0 : std::min(kMostLinesAhead, ceil_divide(lines, steps));
    steps = 0;
  }
}

// What a worker fetches while it computes a linear op; null: nothing.
ReadAhead* Tape::read_ahead(uint32_t index, int worker) {
  const uint32_t attention = ops_[index].attention_after;
  const Op& op = ops_[attention];
  if (attention == 0 || op.lines_ahead == 0) return nullptr;
  Ahead& ahead = ahead_[static_cast<size_t>(worker)];
  if (ahead.op != attention) {
    const KVLayout& kv = op.attention.kv;
    const std::vector<int64_t>& reads = planners_[op.plan].reads(worker);
    const int64_t head_bytes = kv_head_bytes(kv), layer = kv.slot * kv.kv_heads * 2 * kShelfBlocks * head_bytes;
    ahead = {attention, {kv.base + layer, reads.data(), reads.data() + reads.size(), head_bytes, op.lines_ahead}};
  }
  return &ahead.reads;
}

// -- running -----------------------------------------------------------------------------------------------------------------------

void Tape::run(StepView& step, float* all_logits) {
  check(step);
  if (all_logits == nullptr) check_draws(step);
  find_token_rows(step);
  if (all_logits == nullptr) order_draws(step);
  step_ = step;
  all_logits_ = all_logits;
  for (AttentionPlanner& planner : planners_) planner.plan(step_);
  set_sizes();
  set_lines_ahead();
  if (profiling_) last_time_ = now();
  pool_->run(*this);
}

// The linear before the draws reads rows `pass * chunk_rows` on of its input; its output is the same tile of rows each time.
void Tape::run_linear(const Op& op, uint32_t pass, uint32_t tile, ReadAhead* later) const {
  const LinearArgs& args = op.linear[op.in_loop && pass + 1 < passes ? 0 : 1];
  if (pass == 0) return kernels_.linear_tile(args, tile, later);
  LinearArgs moved = args;
  const int64_t rows = pass * chunk_rows_, codes = rows * padded_codes(args.inputs);
  if (args.x != nullptr) moved.x += rows * args.x_stride;
  if (args.pairs != nullptr) moved.pairs += rows * padded_pairs(args.inputs);
  if (args.quantized.codes != nullptr) moved.quantized = part_of(args.quantized, codes);
  kernels_.linear_tile(moved, tile, later);
}

// Until the thread that fills the masks has stored that it is done. It works beside the forward pass and is nearly always first.
void Tape::await_masks() const {
  const auto ready = [flag = step_.draws.masks_ready] { return __atomic_load_n(flag, __ATOMIC_ACQUIRE) != 0; };
  for (int spins = 0; spins < kMaskSpins; ++spins)
    if (ready()) return;
  while (!ready()) std::this_thread::sleep_for(kMaskNap);
}

// All draws of one row of logits.
void Tape::run_draws(uint32_t pass, uint32_t tile, void* scratch) const {
  const int64_t row = pass * chunk_rows_ + tile;
  const float* const logits = logits_ + tile * limits_.vocab;
  if (all_logits_ != nullptr) {
    std::copy(logits, logits + limits_.vocab, all_logits_ + row * limits_.vocab);
    return;
  }
  for (int32_t i = row_draws_[static_cast<size_t>(row)]; i < row_draws_[static_cast<size_t>(row) + 1]; ++i) {
    const int32_t draw = draw_order_[static_cast<size_t>(i)];
    if (step_.draws.mask != nullptr && step_.draws.mask[draw] >= 0) await_masks();
    kernels_.draw_tile(logits, limits_.vocab, step_, draw, scratch);
  }
}

// The tile that a worker will probably take behind one of an op that is dealt out.
int64_t Tape::tile_after(uint32_t op, uint32_t tile) const {
  const uint32_t next = tile + static_cast<uint32_t>(pool_->threads());
  return next < gates[op].last_tiles.load(std::memory_order_relaxed) ? next : tile;
}

void Tape::run_tile(uint32_t index, uint32_t pass, uint32_t tile, int worker) {
  const Op& op = ops_[index];
  std::byte* const scratch = scratch_start_[static_cast<size_t>(worker)];
  switch (op.kind) {
    case OpKind::rows: {
      const int64_t in_pass = pass + 1 < passes ? chunk_rows_ : step_.logit_count - (passes - 1) * chunk_rows_;
      const int64_t rows = op.in_loop ? in_pass : rows_of(op.domain);
      const int64_t first = tile * op.rows_a_tile;
      return kernels_.run_stages(op.stages.data(), static_cast<int64_t>(op.stages.size()), step_, first,
                                 std::min(first + op.rows_a_tile, rows));
    }
    case OpKind::linear:
      return run_linear(op, pass, tile, read_ahead(index, worker));
    case OpKind::attention:
      return kernels_.attention_tile(op.attention, step_, planners_[op.plan].view(), tile, tile_after(index, tile), scratch);
    case OpKind::draw:
      return run_draws(pass, tile, scratch);
  }
}

// The beginning of the worker's share of the next linear op's weights. A share of row blocks begins where its run of panels does.
Bytes Tape::reads_after(uint32_t op, int worker) const {
  do
    if (++op == ops_.size()) return {};
  while (ops_[op].kind != OpKind::linear);
  const LinearArgs& args = ops_[op].linear[1];
  const auto tiles = static_cast<uint64_t>(gates[op].last_tiles.load(std::memory_order_relaxed));
  if (tiles == 0) return {};
  const auto first = static_cast<int64_t>(tiles * static_cast<uint64_t>(worker) / static_cast<uint64_t>(pool_->threads()));
  int64_t panel = first / args.tiling.row_blocks * args.tiling.panel_run;
  for (int s = 0; s < args.segment_count; ++s) {
    const LinearSegment& segment = args.segments[s];
    const int64_t count = panel_count(segment.outputs);
    if (panel < count) {
      const uint8_t* const begin = segment.data + panel * segment.panel_stride;
      const int64_t bytes = (count - panel) * segment.panel_stride;
      return {begin, begin + std::min(bytes, kMostFetched)};
    }
    panel -= count;
  }
  return {};
}

// -- profile -----------------------------------------------------------------------------------------------------------------------

void Tape::set_profiling(bool on) {
  profiling_ = on;
  seconds_.assign(ops_.size(), 0.0);
}

void Tape::finished(uint32_t op) {
  if (!profiling_) return;
  const double time = now();
  seconds_[op] += time - last_time_;
  last_time_ = time;
}

namespace {

const char* name_of(StageKind kind) {
  switch (kind) {
    case StageKind::embed:
      return "embed";
    case StageKind::gather:
      return "gather";
    case StageKind::hidden:
      return "hidden";
    case StageKind::norm:
      return "norm";
    case StageKind::add:
      return "add";
    case StageKind::gated:
      return "gated";
    case StageKind::head_norm:
      return "head_norm";
    case StageKind::rope:
      return "rope";
    case StageKind::write_kv:
      return "write_kv";
    case StageKind::quantize:
      return "quantize";
    case StageKind::round_bf16:
      return "bf16";
    case StageKind::softcap:
      return "softcap";
  }
  return "?";
}

// "norm+quantize"; a run of one kind is named once.
std::string stage_names(const std::vector<Stage>& stages) {
  std::string names;
  for (size_t i = 0; i < stages.size(); ++i) {
    if (i > 0 && stages[i].kind == stages[i - 1].kind) continue;
    if (i > 0) names += '+';
    names += name_of(stages[i].kind);
  }
  return names;
}

}  // namespace

std::vector<std::string> Tape::labels() const {
  std::vector<std::string> labels;
  for (const Op& op : ops_) {
    switch (op.kind) {
      case OpKind::rows:
        labels.push_back("rows " + stage_names(op.stages));
        break;
      case OpKind::linear:
        labels.push_back("linear " + std::to_string(op.linear[1].inputs) + " > " + std::to_string(op.linear[1].y_stride));
        break;
      case OpKind::attention:
        labels.push_back(op.attention.window > 0 ? "attention window" : "attention");
        break;
      case OpKind::draw:
        labels.push_back("draw");
        break;
    }
  }
  return labels;
}

}  // namespace noria
