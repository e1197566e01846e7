#include "pool_probe.h"

#include <chrono>
#include <stdexcept>

namespace noria {

namespace {

class Probe final : public Program {
 public:
  Probe(int ops, int threads, int tiles, int passes, int work, int slow_tile, int bad_tile, int gap)
      : done_(static_cast<size_t>(ops)),
        tiles_(static_cast<uint32_t>(tiles)),
        work_(work),
        slow_tile_(slow_tile),
        bad_tile_(bad_tile),
        gap_(gap) {
    make_gates(static_cast<size_t>(ops), threads);
    loop_begin = static_cast<uint32_t>(ops - 1);
    this->passes = static_cast<uint32_t>(passes);
    for (uint32_t op = 0; op < gates.size(); ++op) set_tiles(op, tiles);
  }

  // In odd steps the op `gap` has no tiles.
  void begin_step(int step) {
    for (auto& count : done_) count.store(0);
    if (gap_ < 0) return;
    const bool skip = step % 2 == 1;
    set_tiles(static_cast<uint32_t>(gap_), skip ? 0 : tiles_);
    if (skip) done_[static_cast<size_t>(gap_)].store(tiles_);
  }

  void run_tile(uint32_t op, uint32_t pass, uint32_t tile, int) override {
    const uint32_t before = op == 0 ? tiles_ : done_[op - 1].load();
    const bool in_order = before == tiles_ && (op + 1 < done_.size() || done_[op].load() >= pass * tiles_);
    if (!in_order) order_errors.fetch_add(1, std::memory_order_relaxed);
    if (op == 0 && static_cast<int>(tile) == bad_tile_) throw std::runtime_error("the probe's bad tile");
    if (op == 0 && static_cast<int>(tile) == slow_tile_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    for (int i = 0; i < work_; ++i) std::atomic_signal_fence(std::memory_order_seq_cst);
    tiles_run.fetch_add(1, std::memory_order_relaxed);
    done_[op].fetch_add(1);
  }

  std::atomic<uint64_t> tiles_run{0}, order_errors{0};

 private:
  std::vector<std::atomic<uint32_t>> done_;
  const uint32_t tiles_;
  const int work_, slow_tile_, bad_tile_, gap_;
};

}  // namespace

ProbeResult probe_pool(const std::shared_ptr<Pool>& pool, int steps, int ops, int tiles, int passes, int work, int slow_tile, int bad_tile,
                       int gap) {
  if (steps < 1 || ops < 1 || tiles < 1 || passes < 1) throw std::invalid_argument("a probe needs at least one step, op, tile and pass");
  if (gap >= ops - 1) throw std::invalid_argument("the gap must come before the op in the loop");
  Probe probe(ops, pool->threads(), tiles, passes, work, slow_tile, bad_tile, gap);
  const auto start = std::chrono::steady_clock::now();
  try {
    for (int i = 0; i < steps; ++i) {
      probe.begin_step(i);
      pool->run(probe);
    }
  } catch (...) {
    pool->quiesce();
    throw;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  pool->quiesce();
  return {probe.tiles_run.load(), probe.order_errors.load(), seconds};
}

}  // namespace noria
