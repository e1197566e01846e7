// The thread pool: every worker walks the same list of ops and claims tiles of each.
//
//   worker 0 (the caller)   op 0: tiles 0 1 2 4 | op 1: tiles 0 1 2 5 4 3 | op 2: tile 0 | ...
//   worker 1                op 0: tiles 3 5 ... | (descheduled ........)  | op 2: tile 1 | ...
//
// Each worker has a share of an op's tiles. It takes its own from the front, so that it reads the op's weights as one stream, and
// then those of the others from the back. A tile is claimed by compare-and-swap on its share's word, which holds
// (epoch | next | end). Because the epoch is in the word, a worker that comes late from an old step finds every word of that step
// exhausted or belonging to a newer one, and can claim nothing. So a worker that the system has taken off its core delays the
// others only while it holds a tile, and worker 0 alone can finish a whole step. An op begins when all tiles of the op before it
// are done.
//
// While a worker waits for an op's end it fetches what it will read next, so that the memory does not rest between two ops. Else it
// spins, for at most 50 microseconds, and then sleeps, inside a step and between steps: an idle pool costs nothing.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace noria {

// Flushes float32 denormals (inputs and results) on this thread while it lives: part of the numerics contract.
class FlushDenormals {
 public:
  FlushDenormals();
  ~FlushDenormals();
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned saved_;
};

// What one worker's share of an op has left, alone on a cache line.
struct alignas(64) Share {
  std::atomic<uint64_t> left{0};  // epoch (40 bits) | next unit of the share (12) | its end (12)
};

// How an op's tiles are divided into shares: neighbours together, or dealt out in turn (for tiles in the order of their cost).
enum class Division { runs, dealt };

// The units of one worker's share, numbered from 0, and where they stand among the op's.
//
//   runs    | 0 1 2 3 | 0 1 2 3 | 0 1 2 |         dealt     0 0 0 1 1 1 2 2 2 3 3
//             worker 0  worker 1  worker 2        worker    0 1 2 0 1 2 0 1 2 0 1
struct Part {
  uint32_t first, stride, count;

  Part(Division division, uint32_t units, uint32_t worker, uint32_t workers);
  uint32_t unit(uint32_t place) const { return first + place * stride; }
};

// The tile counts and the completion word of one op, alone on a cache line, and its shares.
struct alignas(64) Gate {
  std::atomic<uint64_t> done{0};        // epoch (40 bits) | units (12) | units done (12)
  std::atomic<uint32_t> tiles{0};       // in every pass but the last
  std::atomic<uint32_t> last_tiles{0};  // in the last pass (and for ops outside the loop)
  Division division = Division::runs;
  std::unique_ptr<Share[]> shares;  // one a worker
};

// A range of memory that will be read.
struct Bytes {
  const uint8_t* begin = nullptr;
  const uint8_t* end = nullptr;
};

// What the pool walks: ops [0, loop_begin) once, then ops [loop_begin, gates.size()) `passes` times.
// Tile counts are set before `Pool::run`; `run_tile` may throw.
class Program {
 public:
  Program() = default;
  virtual ~Program() = default;
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  virtual void run_tile(uint32_t op, uint32_t pass, uint32_t tile, int worker) = 0;
  // What a worker that waits for `op` is going to read next: it fetches that in the meantime. Changes no result.
  virtual Bytes reads_after(uint32_t /*op*/, int /*worker*/) const { return {}; }
  // Called by worker 0 when an op is complete. For profiles.
  virtual void finished(uint32_t /*op*/) {}

  void make_gates(size_t ops, int threads);
  void set_tiles(uint32_t op, int64_t tiles) { set_tiles(op, tiles, tiles); }
  void set_tiles(uint32_t op, int64_t tiles, int64_t last_tiles);

  std::vector<Gate> gates;
  uint32_t loop_begin = 0;
  uint32_t passes = 0;
};

class Pool {
 public:
  explicit Pool(int threads);  // at least 1, the caller included
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Run the program once; the caller is worker 0. One caller at a time (others wait). Rethrows the first exception of a tile,
  // after which the step's other tiles were skipped.
  void run(Program& program);

  // Return when no worker looks at any program: after this a program may be destroyed.
  void quiesce();

 private:
  struct alignas(64) Worker {
    std::thread thread;
    std::atomic<bool> walking{false};
  };

  void work(int index);
  void walk(Program& program, uint64_t epoch, uint32_t passes, int worker);
  uint32_t take_share(Program& program, uint32_t op, uint32_t pass, uint64_t epoch, uint32_t tiles, int owner, int worker);
  void take_tiles(Program& program, uint32_t op, uint32_t pass, uint64_t epoch, uint32_t tiles, int worker);
  void guarded_run(Program& program, uint32_t op, uint32_t pass, uint32_t tile, int worker);
  template <class Ready>
  void wait_until(Ready ready);
  void wake_sleepers();

  std::mutex callers_;
  std::vector<std::unique_ptr<Worker>> workers_;

  // The published step, read by workers like a sequence lock: `sequence_` is odd while the others change.
  alignas(64) std::atomic<uint64_t> sequence_{0};
  std::atomic<Program*> program_{nullptr};
  std::atomic<uint64_t> epoch_{1};  // of the published step's first pass; pass k has epoch_ + k
  std::atomic<uint32_t> passes_{0};

  alignas(64) std::atomic<uint32_t> sleepers_{0};
  std::atomic<uint32_t> event_{0};  // changes when a sleeper should look again
  std::atomic<bool> stopping_{false};

  std::atomic<bool> failed_{false};  // a tile of this step threw
  std::mutex failure_lock_;
  std::exception_ptr failure_;
};

}  // namespace noria
