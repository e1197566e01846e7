// The Python module noria._native. Arrays go by address: whoever calls keeps them alive (backends/cpu does).
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cpu_features.h"
#include "pool_probe.h"
#include "step_inputs.h"
#include "tape.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace noria {

void bind_linear(nb::module_& m);  // linear_bindings.cpp
void bind_limits(nb::module_& m);  // limits.cpp

namespace {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

WeightFormat format_of(const std::string& kind, int group, bool half_scales, bool has_minimum) {
  const Kind k = kind == "f32" ? Kind::f32 : kind == "bf16" ? Kind::bf16 : kind == "q8" ? Kind::q8 : Kind::q4;
  return {k, static_cast<uint8_t>(group), half_scales, has_minimum};
}

KVLayout layout(uintptr_t cache, int64_t block_bytes, int64_t slot, int32_t group, int32_t kv_heads, int32_t dim, const std::string& type) {
  if (type != "bf16" && type != "f32" && type != "int8") throw nb::value_error("a cache of an unknown type");
  const KVType kind = type == "bf16" ? KVType::bf16 : type == "f32" ? KVType::f32 : KVType::int8;
  if (kind == KVType::int8 && dim > 1024) throw nb::value_error("an int8 cache holds heads of at most 1024 dims");
  return {at<uint8_t>(cache), block_bytes, slot, group, kv_heads, dim, kind};
}

// A tape with the limits that inputs are checked against.
class BoundTape {
 public:
  BoundTape(std::shared_ptr<Pool> pool, const std::string& tier, const TapeLimits& limits)
      : table_width_(limits.table_width), tape(std::move(pool), kernels_of(tier), limits) {}

  void run(nb::handle inputs, nb::handle drawn, uintptr_t all_logits) {
    StepArrays arrays;
    arrays.read_inputs(inputs, table_width_);
    if (!drawn.is_none()) arrays.read_drawn(drawn);
    const nb::gil_scoped_release release;
    tape.run(arrays.view, at<float>(all_logits));
  }

 private:
  const int64_t table_width_;

 public:
  Tape tape;
};

void bind_recording(nb::class_<BoundTape>& c) {
  c.def("begin_rows", [](BoundTape& t, bool logits) { t.tape.begin_rows(logits ? Domain::logits : Domain::tokens); }, "logits"_a);
  c.def(
      "embed",
      [](BoundTape& t, uintptr_t data, const std::string& kind, int group, bool half_scales, bool has_minimum, int64_t outputs,
         int64_t inputs, float scale, uintptr_t y) {
        const WeightFormat format = format_of(kind, group, half_scales, has_minimum);
        Stage s{.kind = StageKind::embed, .embed = {}};
        s.embed.args = {at<uint8_t>(data), format, outputs, inputs, panel_bytes(format, inputs), nullptr, scale, at<float>(y), inputs};
        t.tape.add_stage(s);
      },
      "data"_a, "kind"_a, "group"_a, "half_scales"_a, "has_minimum"_a, "outputs"_a, "inputs"_a, "scale"_a, "y"_a);
  c.def(
      "gather",
      [](BoundTape& t, uintptr_t x, uintptr_t y, int64_t width) {
        t.tape.add_stage({.kind = StageKind::gather, .gather = {at<float>(x), at<float>(y), width}});
      },
      "x"_a, "y"_a, "width"_a);
  c.def(
      "norm",
      [](BoundTape& t, uintptr_t x, uintptr_t residual, uintptr_t weight, uintptr_t normed, int64_t width, float eps) {
        t.tape.add_stage(
            {.kind = StageKind::norm, .norm = {at<float>(x), at<float>(residual), at<float>(weight), at<float>(normed), width, eps}});
      },
      "x"_a, "residual"_a, "weight"_a, "normed"_a, "width"_a, "eps"_a);
  c.def(
      "add",
      [](BoundTape& t, uintptr_t x, uintptr_t y, int64_t width) {
        t.tape.add_stage({.kind = StageKind::add, .add = {at<float>(x), at<float>(y), width}});
      },
      "x"_a, "y"_a, "width"_a);
  c.def(
      "gated",
      [](BoundTape& t, uintptr_t gate_up, uintptr_t y, int64_t width, bool gelu, uintptr_t workspace, int64_t rows) {
        const QuantizedRows codes = workspace != 0 ? quantized_view(at<void>(workspace), rows, width) : QuantizedRows{};
        const Activation activation = gelu ? Activation::gelu_tanh : Activation::silu;
        t.tape.add_stage({.kind = StageKind::gated, .gated = {at<float>(gate_up), at<float>(y), width, activation, codes}});
      },
      "gate_up"_a, "y"_a, "width"_a, "gelu"_a, "workspace"_a = 0, "rows"_a = 0);
  c.def(
      "head_norm",
      [](BoundTape& t, uintptr_t qkv, int64_t stride, uintptr_t q_weight, uintptr_t k_weight, int32_t heads, int32_t kv_heads, int32_t dim,
         float eps) {
        t.tape.add_stage({.kind = StageKind::head_norm,
                          .head_norm = {at<float>(qkv), stride, at<float>(q_weight), at<float>(k_weight), heads, kv_heads, dim, eps}});
      },
      "qkv"_a, "stride"_a, "q_weight"_a, "k_weight"_a, "heads"_a, "kv_heads"_a, "dim"_a, "eps"_a);
  c.def(
      "rope",
      [](BoundTape& t, uintptr_t qkv, int64_t stride, uintptr_t cosines, uintptr_t sines, int64_t half, int32_t heads, int32_t kv_heads,
         int32_t dim) {
        t.tape.add_stage(
            {.kind = StageKind::rope, .rope = {at<float>(qkv), stride, at<float>(cosines), at<float>(sines), half, heads, kv_heads, dim}});
      },
      "qkv"_a, "stride"_a, "cosines"_a, "sines"_a, "half"_a, "heads"_a, "kv_heads"_a, "dim"_a);
  c.def(
      "write_kv",
      [](BoundTape& t, uintptr_t qkv, int64_t stride, int32_t heads, uintptr_t cache, int64_t block_bytes, int64_t slot, int32_t group,
         int32_t kv_heads, int32_t dim, const std::string& type) {
        t.tape.add_stage({.kind = StageKind::write_kv,
                          .write_kv = {at<float>(qkv), stride, heads, layout(cache, block_bytes, slot, group, kv_heads, dim, type)}});
      },
      "qkv"_a, "stride"_a, "heads"_a, "cache"_a, "block_bytes"_a, "slot"_a, "group"_a, "kv_heads"_a, "dim"_a, "type"_a);
  c.def(
      "quantize",
      [](BoundTape& t, uintptr_t x, int64_t width, uintptr_t workspace, int64_t rows) {
        t.tape.add_stage(
            {.kind = StageKind::quantize, .quantize = {at<float>(x), width, quantized_view(at<void>(workspace), rows, width)}});
      },
      "x"_a, "width"_a, "workspace"_a, "rows"_a);
  c.def(
      "round_bf16",
      [](BoundTape& t, uintptr_t x, int64_t width, uintptr_t pairs) {
        t.tape.add_stage({.kind = StageKind::round_bf16, .round_bf16 = {at<float>(x), width, at<uint16_t>(pairs)}});
      },
      "x"_a, "width"_a, "pairs"_a);
  c.def(
      "softcap",
      [](BoundTape& t, uintptr_t x, int64_t width, float cap) {
        t.tape.add_stage({.kind = StageKind::softcap, .softcap = {at<float>(x), width, cap}});
      },
      "x"_a, "width"_a, "cap"_a);
  c.def("hidden", [](BoundTape& t, uintptr_t x, int64_t width) { t.tape.add_hidden(at<float>(x), width); }, "x"_a, "width"_a);

  c.def(
      "begin_linear",
      [](BoundTape& t, bool logits, int64_t inputs, uintptr_t x, uintptr_t pairs, uintptr_t quantized, int64_t quantized_rows,
         uintptr_t bias, uintptr_t y, int64_t outputs) {
        t.tape.begin_linear(logits ? Domain::logits : Domain::tokens, inputs,
                            {at<float>(x), at<uint16_t>(pairs), at<void>(quantized), quantized_rows}, at<float>(bias), at<float>(y),
                            outputs);
      },
      "logits"_a, "inputs"_a, "x"_a, "pairs"_a, "quantized"_a, "quantized_rows"_a, "bias"_a, "y"_a, "outputs"_a);
  c.def(
      "segment",
      [](BoundTape& t, uintptr_t data, const std::string& kind, int group, bool half_scales, bool has_minimum, int32_t outputs,
         int64_t inputs, int64_t first_column) {
        const WeightFormat format = format_of(kind, group, half_scales, has_minimum);
        t.tape.add_segment({at<uint8_t>(data), format, outputs, panel_bytes(format, inputs), first_column});
      },
      "data"_a, "kind"_a, "group"_a, "half_scales"_a, "has_minimum"_a, "outputs"_a, "inputs"_a, "first_column"_a);

  c.def(
      "attention",
      [](BoundTape& t, uintptr_t qkv, int64_t stride, uintptr_t out, int32_t heads, float scale, float softcap, int32_t window,
         uintptr_t cache, int64_t block_bytes, int64_t slot, int32_t group, int32_t kv_heads, int32_t dim, const std::string& type,
         uintptr_t quantized, int64_t rows, uintptr_t pairs) {
        AttentionArgs args = {at<float>(qkv),
                              stride,
                              at<float>(out),
                              heads,
                              scale,
                              softcap,
                              window,
                              layout(cache, block_bytes, slot, group, kv_heads, dim, type),
                              {},
                              at<uint16_t>(pairs)};
        if (quantized != 0) args.quantized = quantized_view(at<void>(quantized), rows, static_cast<int64_t>(heads) * dim);
        t.tape.add_attention(args);
      },
      "qkv"_a, "stride"_a, "out"_a, "heads"_a, "scale"_a, "softcap"_a, "window"_a, "cache"_a, "block_bytes"_a, "slot"_a, "group"_a,
      "kv_heads"_a, "dim"_a, "type"_a, "quantized"_a, "rows"_a, "pairs"_a);

  c.def("begin_logits", [](BoundTape& t, int64_t chunk_rows) { t.tape.begin_logits(chunk_rows); }, "chunk_rows"_a);
  c.def("draw", [](BoundTape& t, uintptr_t logits) { t.tape.add_draw(at<float>(logits)); }, "logits"_a);
  c.def("finish", [](BoundTape& t) { t.tape.finish(); });
}

void bind_pool(nb::module_& m) {
  nb::class_<Pool>(m, "Pool", "A thread pool; the thread that calls `run` is its first worker.")
      .def(
          "__init__",
          [](Pool* self, int threads) {
            const nb::gil_scoped_release release;
            new (self) Pool(threads);
          },
          "threads"_a)
      .def_prop_ro("threads", &Pool::threads);
  m.def(
      "probe_pool",
      [](const std::shared_ptr<Pool>& pool, int steps, int ops, int tiles, int passes, int work, int slow_tile, int bad_tile, int gap) {
        ProbeResult r;
        {
          const nb::gil_scoped_release release;
          r = probe_pool(pool, steps, ops, tiles, passes, work, slow_tile, bad_tile, gap);
        }
        return nb::make_tuple(r.tiles_run, r.order_errors, r.seconds);
      },
      "pool"_a, "steps"_a, "ops"_a, "tiles"_a, "passes"_a = 1, "work"_a = 0, "slow_tile"_a = -1, "bad_tile"_a = -1, "gap"_a = -1,
      "(tiles run, order errors, seconds) of `steps` steps of `ops` ops of `tiles` tiles, the last op `passes` times, the op `gap` in even "
      "steps only.");
}

void bind_tape(nb::module_& m) {
  nb::class_<BoundTape> tape(m, "Tape", "A recorded forward pass: ops over fixed addresses, run once a step.");
  tape.def(
      "__init__",
      [](BoundTape* self, const std::shared_ptr<Pool>& pool, const std::string& tier, int64_t max_tokens, int64_t max_rows,
         int64_t table_width, int64_t num_blocks, int64_t max_positions, int64_t vocab, const std::vector<int32_t>& windows) {
        new (self) BoundTape(pool, tier, {max_tokens, max_rows, table_width, num_blocks, max_positions, vocab, windows});
      },
      "pool"_a, "tier"_a, "max_tokens"_a, "max_rows"_a, "table_width"_a, "num_blocks"_a, "max_positions"_a, "vocab"_a, "windows"_a);
  bind_recording(tape);
  tape.def("run", &BoundTape::run, "inputs"_a, "drawn"_a.none(), "all_logits"_a,
           "One step over StepInputs, into Drawn or, if `all_logits` is an address, into float32 [L, vocab] there.");
  tape.def("set_profiling", [](BoundTape& t, bool on) { t.tape.set_profiling(on); }, "on"_a);
  tape.def_prop_ro("highest_block", [](const BoundTape& t) { return t.tape.highest_block(); });
  tape.def(
      "decode_reads", [](const BoundTape& t, int worker) { return t.tape.decode_reads(worker); }, "worker"_a,
      "Offsets of the heads' blocks that a worker fetches ahead of the first attention, in order: for tests.");
  tape.def("labels", [](const BoundTape& t) { return t.tape.labels(); });
  tape.def("seconds", [](const BoundTape& t) { return t.tape.seconds(); });
}

}  // namespace
}  // namespace noria

NB_MODULE(_native, m) {
  m.doc() = "Native kernels of Noria's CPU backend.";
  noria::bind_pool(m);
  noria::bind_tape(m);
  noria::bind_linear(m);
  noria::bind_limits(m);
  m.def("available_tiers", &noria::available_tiers, "Instruction-set tiers of this build that this CPU can run, the best last.");
  m.def(
      "best_tier", [](const std::string& tier) { return std::string(noria::kernels_of(tier).name); }, "tier"_a,
      "The name of a tier, with `auto` resolved. ValueError if the machine cannot run it.");
  m.def("quantized_bytes", &noria::quantized_bytes, "rows"_a, "inputs"_a, "Bytes of a workspace for quantised rows.");
  m.def(
      "map",
      [](const std::string& tier, const std::string& function, uintptr_t x, uintptr_t y, int64_t count) {
        const noria::FlushDenormals flush;
        if (!noria::kernels_of(tier).map(function.c_str(), noria::at<float>(x), noria::at<float>(y), count))
          throw nb::value_error("unknown function");
      },
      "tier"_a, "function"_a, "x"_a, "y"_a, "count"_a, "An elementary function over a float32 array.");
  m.def(
      "noise",
      [](const std::string& tier, uint64_t seed, int64_t position, int32_t stream, uintptr_t noise, int64_t count) {
        const noria::FlushDenormals flush;
        noria::kernels_of(tier).noise(seed, position, stream, noria::at<float>(noise), count);
      },
      "tier"_a, "seed"_a, "position"_a, "stream"_a, "noise"_a, "count"_a, "Gumbel noise of tokens [0, count) of one draw.");
}
