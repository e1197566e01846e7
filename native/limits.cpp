// The loops of limits.h over the pool's threads: noria.backends.cpu._native.{peak,read}, for `noria bench kernels`.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <array>
#include <chrono>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "cpu_features.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace noria {

namespace {

constexpr int64_t kPieceBytes = 256 << 10;  // of a read: many pieces, so that a slow thread delays nobody
constexpr int64_t kPiecesAThread = 16;      // of a peak

// One op whose tiles are equal pieces of the work.
class LimitProgram final : public Program {
 public:
  LimitProgram(const KernelTable& kernels, int64_t tiles, int threads) : kernels_(kernels), sinks_(static_cast<size_t>(threads)) {
    make_gates(1, threads);
    passes = 1;
    set_tiles(0, tiles);
    operands_.fill(0x3f);  // 63 as a code, 0.75 as a float of either width: nothing overflows or is denormal
  }

  void run_tile(uint32_t, uint32_t, uint32_t tile, int worker) override {
    unsigned char* const sink = sinks_[static_cast<size_t>(worker)].data();
    if (data != nullptr)
      kernels_.read(data + tile * kPieceBytes, kPieceBytes, sink);
    else
      kernels_.peak(unit, rounds, operands_.data(), sink);
  }

  const unsigned char* data = nullptr;  // reads this, or
  LimitUnit unit = LimitUnit::u8s8;     // computes
  int64_t rounds = 0;

 private:
  struct alignas(64) Sink : std::array<unsigned char, 64> {};

  const KernelTable& kernels_;
  std::vector<Sink> sinks_;
  alignas(64) std::array<unsigned char, kLimitOperandBytes> operands_;
};

double timed(Pool& pool, Program& program, int64_t repeats) {
  const nb::gil_scoped_release release;
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < repeats; ++i) pool.run(program);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  pool.quiesce();
  return seconds;
}

LimitUnit unit_of(const std::string& name) {
  if (name == "u8s8") return LimitUnit::u8s8;
  if (name == "bf16") return LimitUnit::bf16;
  if (name == "f32") return LimitUnit::f32;
  throw std::invalid_argument("unknown unit " + name);
}

std::tuple<int64_t, double> peak(const std::shared_ptr<Pool>& pool, const std::string& tier, const std::string& unit, int64_t rounds) {
  if (rounds < 1) throw std::invalid_argument("a peak needs at least one round");
  const KernelTable& kernels = kernels_of(tier);
  const int64_t tiles = kPiecesAThread * pool->threads();
  LimitProgram program(kernels, tiles, pool->threads());
  program.unit = unit_of(unit);
  program.rounds = rounds;
  const double seconds = timed(*pool, program, 1);
  unsigned char operands[kLimitOperandBytes] = {}, sink[64];
  const int64_t a_round = kernels.peak(program.unit, 1, operands, sink);
  return {a_round * rounds * tiles, seconds};
}

double read(const std::shared_ptr<Pool>& pool, const std::string& tier, uintptr_t data, int64_t bytes, int64_t repeats) {
  if (bytes < kPieceBytes || bytes % kPieceBytes != 0 || repeats < 1)
    throw std::invalid_argument("a read is of whole pieces of 256 KiB, at least once");
  LimitProgram program(kernels_of(tier), bytes / kPieceBytes, pool->threads());
  program.data = reinterpret_cast<const unsigned char*>(data);
  return timed(*pool, program, repeats);
}

}  // namespace

void bind_limits(nb::module_& m) {
  m.def("peak", &peak, "pool"_a, "tier"_a, "unit"_a, "rounds"_a,
        "(operations, seconds) of dot products from registers: unit u8s8, bf16 or f32, `rounds` a piece of work.");
  m.def("read", &read, "pool"_a, "tier"_a, "data"_a, "bytes"_a, "repeats"_a, "Seconds of reading `bytes` at an address `repeats` times.");
}

}  // namespace noria
