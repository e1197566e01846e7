// The linear, quantisation and embedding kernels, one by one and tier by tier: noria.backends.cpu._native.linear, for tests.
//
// Each call runs on the calling thread, over freshly allocated results. Shapes are checked here, since the kernels check nothing.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cpu_features.h"
#include "pool.h"

namespace nb = nanobind;

namespace noria {

namespace {

template <class T>
using Rows = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Result = nb::ndarray<nb::numpy, T, nb::ndim<2>>;

// Memory at a multiple of 64 bytes, as the kernels' workspaces are.
struct Aligned {
  explicit Aligned(int64_t bytes) : data(::operator new(static_cast<size_t>(bytes > 0 ? bytes : 1), std::align_val_t{64})) {}
  ~Aligned() { ::operator delete(data, std::align_val_t{64}); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  void* data;
};

// A new numpy array [rows, columns], zeroed or copied from `from`.
template <class T>
Result<T> new_rows(int64_t rows, int64_t columns, const T* from = nullptr) {
  const size_t count = static_cast<size_t>(rows * columns);
  auto data = std::make_unique<T[]>(count);
  if (from != nullptr) std::copy_n(from, count, data.get());
  T* const p = data.release();
  const nb::capsule owner(p, [](void* q) noexcept { delete[] static_cast<T*>(q); });
  return Result<T>(p, {static_cast<size_t>(rows), static_cast<size_t>(columns)}, owner);
}

// A packed matrix, as weights/formats.py describes it.
struct Matrix {
  Vector<uint8_t> data;
  WeightFormat format;
  int64_t outputs, inputs;

  Matrix(Vector<uint8_t> bytes, const std::string& kind, int group, const std::string& scale, bool has_minimum, int64_t outs, int64_t ins)
      : data(bytes), format{parse_kind(kind), static_cast<uint8_t>(group), scale == "f16", has_minimum}, outputs(outs), inputs(ins) {
    if (is_quantized(format) && group != 32 && group != 16) throw std::invalid_argument("group must be 32 or 16");
    if (outputs < 1 || inputs < 1) throw std::invalid_argument("a matrix has at least one output and one input");
    if (static_cast<int64_t>(data.size()) != matrix_bytes(format, outputs, inputs)) throw std::invalid_argument("data has the wrong size");
    if (reinterpret_cast<uintptr_t>(data.data()) % 64 != 0) throw std::invalid_argument("data must be 64-byte aligned");
  }

  static Kind parse_kind(const std::string& name) {
    if (name == "f32") return Kind::f32;
    if (name == "bf16") return Kind::bf16;
    if (name == "q8") return Kind::q8;
    if (name == "q4") return Kind::q4;
    throw std::invalid_argument("unknown kind " + name);
  }
};

// codes, scales, sums, scaled_sums, half_sums, scaled_half_sums: see QuantizedRows
using Quantized = std::tuple<Result<int8_t>, Result<float>, Result<int32_t>, Result<float>, Result<int32_t>, Result<float>>;

Quantized quantize(const std::string& tier, Rows<float> x) {
  const FlushDenormals flush;
  const int64_t rows = static_cast<int64_t>(x.shape(0)), inputs = static_cast<int64_t>(x.shape(1));
  const int64_t k = padded_codes(inputs);
  const Aligned workspace(quantized_bytes(rows, inputs));
  const QuantizedRows q = quantized_view(workspace.data, rows, inputs);
  kernels_of(tier).quantize_rows(x.data(), inputs, inputs, q, 0, rows);
  return {new_rows(rows, k, q.codes),          new_rows(rows, k / 32, q.scales),
          new_rows(rows, k / 32, q.sums),      new_rows(rows, k / 32, q.scaled_sums),
          new_rows(rows, k / 16, q.half_sums), new_rows(rows, k / 16, q.scaled_half_sums)};
}

Result<uint16_t> round_bf16(const std::string& tier, Rows<float> x) {
  const FlushDenormals flush;
  const int64_t rows = static_cast<int64_t>(x.shape(0)), inputs = static_cast<int64_t>(x.shape(1));
  const Result<uint16_t> pairs = new_rows<uint16_t>(rows, padded_pairs(inputs));
  kernels_of(tier).round_rows_bf16(x.data(), inputs, inputs, pairs.data(), 0, rows);
  return pairs;
}

// y = x W^T + bias. panel_run > 0 and row_block > 0 replace the kernel's own cut; `backwards` runs the tiles last to first.
Result<float> linear(const std::string& tier, Rows<float> x, const std::vector<Matrix*>& segments, std::optional<Vector<float>> bias,
                     int threads, int64_t panel_run, int64_t row_block, bool backwards) {
  const FlushDenormals flush;
  const KernelTable& kernels = kernels_of(tier);
  const int64_t rows = static_cast<int64_t>(x.shape(0)), inputs = static_cast<int64_t>(x.shape(1));
  if (segments.empty() || segments.size() > kMaxSegments) throw std::invalid_argument("1 to 8 segments");
  LinearArgs args{};
  args.inputs = inputs;
  args.rows = rows;
  int64_t outputs = 0, panels = 0;
  for (const Matrix* m : segments) {
    if (m->inputs != inputs) throw std::invalid_argument("the segments' inputs differ from x");
    args.segments[args.segment_count++] = {m->data.data(), m->format, static_cast<int32_t>(m->outputs), panel_bytes(m->format, inputs),
                                           outputs};
    outputs += m->outputs;
    panels += panel_count(m->outputs);
  }
  if (bias && static_cast<int64_t>(bias->size()) != outputs) throw std::invalid_argument("bias has the wrong size");

  const Aligned workspace(quantized_bytes(rows, inputs)), pairs(rows * padded_pairs(inputs) * 2);
  args.x = x.data();
  args.x_stride = inputs;
  args.quantized = quantized_view(workspace.data, rows, inputs);
  args.pairs = static_cast<const uint16_t*>(pairs.data);
  kernels.quantize_rows(args.x, inputs, inputs, args.quantized, 0, rows);
  kernels.round_rows_bf16(args.x, inputs, inputs, static_cast<uint16_t*>(pairs.data), 0, rows);

  const Result<float> y = new_rows<float>(rows, outputs);
  args.bias = bias ? bias->data() : nullptr;
  args.y = y.data();
  args.y_stride = outputs;
  int64_t tiles = kernels.linear_tile_count(args, threads);
  if (panel_run > 0 && row_block > 0) {
    args.tiling = {panel_run, row_block, (rows + row_block - 1) / row_block};
    tiles = (panels + panel_run - 1) / panel_run * args.tiling.row_blocks;
  }
  for (int64_t i = 0; i < tiles; ++i) kernels.linear_tile(args, backwards ? tiles - 1 - i : i, nullptr);
  return y;
}

Result<float> dequantize(const std::string& tier, const Matrix& m) {
  const FlushDenormals flush;
  const Result<float> y = new_rows<float>(m.outputs, m.inputs);
  kernels_of(tier).dequantize_rows({m.data.data(), m.format, m.outputs, m.inputs, panel_bytes(m.format, m.inputs), y.data(), m.inputs}, 0,
                                   m.outputs);
  return y;
}

Result<float> embed(const std::string& tier, const Matrix& m, Vector<int32_t> ids, float scale) {
  const FlushDenormals flush;
  const int64_t rows = static_cast<int64_t>(ids.size());
  for (int64_t i = 0; i < rows; ++i)
    if (ids.data()[i] < 0 || ids.data()[i] >= m.outputs) throw std::invalid_argument("an id is outside the matrix");
  const Result<float> y = new_rows<float>(rows, m.inputs);
  kernels_of(tier).embed_rows(
      {m.data.data(), m.format, m.outputs, m.inputs, panel_bytes(m.format, m.inputs), ids.data(), scale, y.data(), m.inputs}, 0, rows);
  return y;
}

}  // namespace

void bind_linear(nb::module_& module) {
  nb::module_ m = module.def_submodule("linear", "The linear, quantisation and embedding kernels of one tier, for tests.");
  nb::class_<Matrix>(m, "Matrix")
      .def(nb::init<Vector<uint8_t>, const std::string&, int, const std::string&, bool, int64_t, int64_t>(), nb::arg("data"),
           nb::arg("kind"), nb::arg("group"), nb::arg("scale"), nb::arg("has_minimum"), nb::arg("outputs"), nb::arg("inputs"));
  m.def("quantize", &quantize, nb::arg("tier"), nb::arg("x"));
  m.def("round_bf16", &round_bf16, nb::arg("tier"), nb::arg("x"));
  m.def("linear", &linear, nb::arg("tier"), nb::arg("x"), nb::arg("segments"), nb::arg("bias").none() = nb::none(), nb::arg("threads") = 1,
        nb::arg("panel_run") = 0, nb::arg("row_block") = 0, nb::arg("backwards") = false);
  m.def("dequantize", &dequantize, nb::arg("tier"), nb::arg("matrix"));
  m.def("embed", &embed, nb::arg("tier"), nb::arg("matrix"), nb::arg("ids"), nb::arg("scale"));
}

}  // namespace noria
