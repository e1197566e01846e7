// Exercises the pool by itself: what tests and `noria doctor` measure of it.
#pragma once
#include <cstdint>
#include <memory>

#include "pool.h"

namespace noria {

struct ProbeResult {
  uint64_t tiles_run;     // counted by the tiles themselves
  uint64_t order_errors;  // tiles that began before all tiles of the op before them were done
  double seconds;
};

// Runs `steps` steps of `ops` ops of `tiles` tiles, the last op as a loop of `passes`. Each tile spins for `work` rounds; tile
// `slow_tile` of the first op sleeps for a millisecond, tile `bad_tile` of the first op throws (-1: none).
ProbeResult probe_pool(const std::shared_ptr<Pool>& pool, int steps, int ops, int tiles, int passes, int work, int slow_tile, int bad_tile,
                       int gap);

}  // namespace noria
