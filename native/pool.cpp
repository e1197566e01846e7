#include "pool.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <stdexcept>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace noria {

namespace {

constexpr int kFieldBits = 12;
constexpr uint32_t kMaxUnits = (1u << kFieldBits) - 1;
constexpr auto kSpin = std::chrono::microseconds(50);

// An op with more tiles than the word can count is claimed in units of several tiles.
uint32_t units_of(uint32_t tiles) { return std::min(tiles, kMaxUnits); }
uint32_t first_tile(uint32_t unit, uint32_t units, uint32_t tiles) {
  return static_cast<uint32_t>(static_cast<uint64_t>(unit) * tiles / units);
}

uint64_t tagged(uint64_t epoch, uint32_t high, uint32_t low) {
  return epoch << (2 * kFieldBits) | static_cast<uint64_t>(high) << kFieldBits | low;
}
uint64_t epoch_of(uint64_t word) { return word >> (2 * kFieldBits); }
uint32_t high_of(uint64_t word) { return static_cast<uint32_t>(word >> kFieldBits) & kMaxUnits; }
uint32_t low_of(uint64_t word) { return static_cast<uint32_t>(word) & kMaxUnits; }

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Take the first unit that is left of a share, or the last; false if there is none. The first to come opens the word for the
// epoch, even if the share is empty: no late worker shall find it before its own epoch.
bool claim_unit(Share& share, uint64_t epoch, const Part& part, bool from_front, uint32_t& unit) {
  uint64_t word = share.left.load(std::memory_order_acquire);
  for (;;) {
    if (epoch_of(word) > epoch) return false;
    const bool open = epoch_of(word) == epoch;
    uint32_t next = open ? high_of(word) : 0, end = open ? low_of(word) : part.count;
    const bool some = next < end;
    if (open && !some) return false;
    const uint32_t place = from_front ? next : end - 1;
    if (some) (from_front ? next : end) += from_front ? 1 : -1;
    if (share.left.compare_exchange_weak(word, tagged(epoch, next, end), std::memory_order_acq_rel)) {
      if (some) unit = part.unit(place);
      return some;
    }
  }
}

// Mark the op as having nothing to claim in `epoch`. Worker 0 does this for an op without tiles: a late worker that reads the tile
// count of a newer step would otherwise find the shares still before its own epoch, and open them.
void close(Gate& gate, uint64_t epoch, int workers) {
  for (int w = 0; w < workers; ++w) gate.shares[static_cast<size_t>(w)].left.store(tagged(epoch, 0, 0), std::memory_order_release);
  gate.done.store(tagged(epoch, 0, 0), std::memory_order_release);
}

// Count `some` of the op's `units` as done; true if that completed the op.
bool add_done(Gate& gate, uint64_t epoch, uint32_t some, uint32_t units) {
  uint64_t word = gate.done.load(std::memory_order_relaxed);
  for (;;) {
    const uint64_t before = epoch_of(word) == epoch ? word : tagged(epoch, units, 0);
    if (gate.done.compare_exchange_weak(word, before + some, std::memory_order_seq_cst)) return low_of(before) + some == units;
  }
}

// For a worker that found no unit left. How many there are stands in the word: a late worker may have read another step's count.
bool is_done(const Gate& gate, uint64_t epoch) {
  const uint64_t word = gate.done.load(std::memory_order_seq_cst);
  return epoch_of(word) > epoch || (epoch_of(word) == epoch && low_of(word) == high_of(word));
}

// Fetch a range into the cache until the op is done.
void fetch_until_done(const Bytes& range, const Gate& gate, uint64_t epoch) {
  constexpr int kLine = 64, kLinesAtOnce = 8;
  for (const uint8_t* at = range.begin; at < range.end && !is_done(gate, epoch); at += kLinesAtOnce * kLine)
    for (int line = 0; line < kLinesAtOnce; ++line) __builtin_prefetch(at + line * kLine, 0, 2);  // into L2
}

}  // namespace

Part::Part(Division division, uint32_t units, uint32_t worker, uint32_t workers) {
  const auto bound = [=](uint32_t w) { return static_cast<uint32_t>(static_cast<uint64_t>(units) * w / workers); };
  const bool runs = division == Division::runs;
  first = runs ? bound(worker) : worker;
  stride = runs ? 1 : workers;
  count = runs ? bound(worker + 1) - first : (units + workers - 1 - worker) / workers;
}

#if defined(__x86_64__)
FlushDenormals::FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }  // FTZ | DAZ
FlushDenormals::~FlushDenormals() { _mm_setcsr(saved_); }
#else
FlushDenormals::FlushDenormals() : saved_(0) {}
FlushDenormals::~FlushDenormals() = default;
#endif

void Program::make_gates(size_t ops, int threads) {
  gates = std::vector<Gate>(ops);
  for (Gate& gate : gates) gate.shares = std::make_unique<Share[]>(static_cast<size_t>(threads));
}

void Program::set_tiles(uint32_t op, int64_t tiles, int64_t last_tiles) {
  Gate& gate = gates[op];  // a store only where the count changed: the line stays shared between the workers' caches
  const auto a = static_cast<uint32_t>(tiles), b = static_cast<uint32_t>(last_tiles);
  if (gate.tiles.load(std::memory_order_relaxed) != a) gate.tiles.store(a, std::memory_order_relaxed);
  if (gate.last_tiles.load(std::memory_order_relaxed) != b) gate.last_tiles.store(b, std::memory_order_relaxed);
}

Pool::Pool(int threads) {
  if (threads < 1) throw std::invalid_argument("a pool needs at least one thread");
#if defined(__unix__)
  sigset_t all, before;  // signals are for the program's own threads: workers inherit a full mask
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
  for (int i = 1; i < threads; ++i) {
    workers_.push_back(std::make_unique<Worker>());
    workers_.back()->thread = std::thread([this, i] { work(i); });
  }
#if defined(__unix__)
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
}

Pool::~Pool() {
  stopping_.store(true);
  event_.fetch_add(1);
  event_.notify_all();
  for (auto& worker : workers_) worker->thread.join();
}

// Spin for a while, then sleep until `ready()`.
template <class Ready>
void Pool::wait_until(Ready ready) {
  if (ready()) return;
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      pause();
      if (ready()) return;
    }
  } while (std::chrono::steady_clock::now() < deadline);
  sleepers_.fetch_add(1);
  for (;;) {
    const uint32_t seen = event_.load();
    if (ready()) break;
    event_.wait(seen);
  }
  sleepers_.fetch_sub(1);
}

// To be called after the store that makes a sleeper's condition true. Either this sees the sleeper counted, or the sleeper,
// which counts itself before it looks, sees the store: all four accesses are sequentially consistent.
void Pool::wake_sleepers() {
  if (sleepers_.load() == 0) return;
  event_.fetch_add(1);
  event_.notify_all();
}

void Pool::guarded_run(Program& program, uint32_t op, uint32_t pass, uint32_t tile, int worker) {
  try {
    program.run_tile(op, pass, tile, worker);
  } catch (...) {
    const std::lock_guard<std::mutex> lock(failure_lock_);
    if (!failure_) failure_ = std::current_exception();
    failed_.store(true);
  }
}

// Run what is left of the share of `owner`; returns the number of units.
uint32_t Pool::take_share(Program& program, uint32_t op, uint32_t pass, uint64_t epoch, uint32_t tiles, int owner, int worker) {
  Gate& gate = program.gates[op];
  const uint32_t units = units_of(tiles);
  const Part part(gate.division, units, static_cast<uint32_t>(owner), static_cast<uint32_t>(threads()));
  uint32_t unit, taken = 0;
  for (; claim_unit(gate.shares[static_cast<size_t>(owner)], epoch, part, owner == worker, unit); ++taken)
    for (uint32_t tile = first_tile(unit, units, tiles), end = first_tile(unit + 1, units, tiles); tile < end; ++tile)
      if (!failed_.load(std::memory_order_relaxed)) guarded_run(program, op, pass, tile, worker);
  return taken;
}

void Pool::take_tiles(Program& program, uint32_t op, uint32_t pass, uint64_t epoch, uint32_t tiles, int worker) {
  uint32_t taken = 0;
  for (int i = 0; i < threads(); ++i) taken += take_share(program, op, pass, epoch, tiles, (worker + i) % threads(), worker);
  if (taken > 0 && add_done(program.gates[op], epoch, taken, units_of(tiles))) wake_sleepers();
}

void Pool::walk(Program& program, uint64_t epoch, uint32_t passes, int worker) {
  const auto ops = static_cast<uint32_t>(program.gates.size());
  const auto one = [&](uint32_t op, uint32_t pass, const std::atomic<uint32_t>& count) {
    const uint32_t tiles = count.load(std::memory_order_relaxed);
    if (tiles == 0) {
      if (worker == 0) close(program.gates[op], epoch + pass, threads());
      return;
    }
    take_tiles(program, op, pass, epoch + pass, tiles, worker);
    const Gate& gate = program.gates[op];
    if (!is_done(gate, epoch + pass)) fetch_until_done(program.reads_after(op, worker), gate, epoch + pass);
    wait_until([&] { return is_done(gate, epoch + pass); });
    if (worker == 0) program.finished(op);
  };
  for (uint32_t op = 0; op < program.loop_begin; ++op) one(op, 0, program.gates[op].last_tiles);
  for (uint32_t pass = 0; pass < passes; ++pass)
    for (uint32_t op = program.loop_begin; op < ops; ++op)
      one(op, pass, pass + 1 < passes ? program.gates[op].tiles : program.gates[op].last_tiles);
}

void Pool::run(Program& program) {
  const std::lock_guard<std::mutex> lock(callers_);
  const FlushDenormals flush;
  failed_.store(false);
  failure_ = nullptr;
  const uint64_t sequence = sequence_.load(std::memory_order_relaxed);
  const uint64_t epoch = epoch_.load(std::memory_order_relaxed) + std::max(1u, passes_.load(std::memory_order_relaxed));
  sequence_.store(sequence + 1);
  program_.store(&program);
  epoch_.store(epoch);
  passes_.store(program.passes);
  sequence_.store(sequence + 2);
  wake_sleepers();
  walk(program, epoch, program.passes, 0);
  if (failure_) std::rethrow_exception(failure_);
}

void Pool::work(int index) {
  const FlushDenormals flush;
  Worker& self = *workers_[static_cast<size_t>(index) - 1];
  uint64_t seen = 0;
  for (;;) {
    wait_until([&] { return sequence_.load() != seen || stopping_.load(); });
    if (stopping_.load()) return;
    self.walking.store(true);
    const uint64_t sequence = sequence_.load();
    Program* const program = program_.load();
    const uint64_t epoch = epoch_.load();
    const uint32_t passes = passes_.load();
    if (sequence % 2 == 0 && sequence_.load() == sequence) {
      seen = sequence;
      if (program != nullptr) walk(*program, epoch, passes, index);
    }
    self.walking.store(false);
  }
}

void Pool::quiesce() {
  const std::lock_guard<std::mutex> lock(callers_);
  const uint64_t sequence = sequence_.load(std::memory_order_relaxed);
  sequence_.store(sequence + 1);
  program_.store(nullptr);
  sequence_.store(sequence + 2);
  for (auto& worker : workers_)
    while (worker->walking.load()) std::this_thread::yield();
}

}  // namespace noria
