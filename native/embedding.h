// Rows of a packed matrix as float32: the embedding, and whole matrices for tests and the reference backend.
//
//   value = scale * (code - zero point)   or   fma(scale, code, minimum),   then times the caller's factor
#pragma once
#include "linear_args.h"
#include "simd.h"

namespace noria::NORIA_TIER {

inline float read_scale(WeightFormat format, const uint8_t* scales, int column) {
  if (format.half_scales) return from_f16(reinterpret_cast<const uint16_t*>(scales)[column]);
  return reinterpret_cast<const float*>(scales)[column];
}

// Column `column` of a q8 or q4 panel.
inline void unpack_groups(const uint8_t* panel, WeightFormat format, int column, int64_t inputs, float factor, float* y) {
  const bool wide = format.kind == Kind::q8;
  const int quad_bytes = wide ? 128 : 64, shift = !wide && column >= 16 ? 4 : 0, mask = wide ? 255 : 15;
  const int zero_point = format.has_minimum ? 0 : wide ? 128 : 8;
  const uint8_t* codes = panel + 4 * (wide ? column : column % 16);
  const uint8_t* scales = panel + code_bytes(format);
  for (int64_t first = 0; first < inputs; first += format.group, codes += group_bytes(format), scales += group_bytes(format)) {
    const float scale = read_scale(format, scales, column);
    const float minimum = format.has_minimum ? read_scale(format, scales + scale_bytes(format), column) : 0.0f;
    const int count = inputs - first < format.group ? static_cast<int>(inputs - first) : format.group;
    for (int i = 0; i < count; ++i) {
      const float code = static_cast<float>((codes[i / 4 * quad_bytes + i % 4] >> shift & mask) - zero_point);
      y[first + i] = (format.has_minimum ? std::fma(scale, code, minimum) : scale * code) * factor;
    }
  }
}

// Output `output` of the matrix, times `factor`, to y [inputs].
inline void unpack_output(const uint8_t* data, WeightFormat format, int64_t panel_stride, int64_t output, int64_t inputs, float factor,
                          float* y) {
  const uint8_t* panel = data + output / kPanel * panel_stride;
  const int column = static_cast<int>(output % kPanel);
  if (format.kind == Kind::f32) {
    const float* w = reinterpret_cast<const float*>(panel) + column;
    for (int64_t k = 0; k < inputs; ++k) y[k] = w[k * kPanel] * factor;
  } else if (format.kind == Kind::bf16) {
    const uint16_t* w = reinterpret_cast<const uint16_t*>(panel) + 2 * column;
    for (int64_t k = 0; k < inputs; ++k) y[k] = from_bf16(w[k / 2 * 2 * kPanel + k % 2]) * factor;
  } else {
    unpack_groups(panel, format, column, inputs, factor, y);
  }
}

inline void embed_rows(const EmbedArgs& args, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row)
    unpack_output(args.data, args.format, args.panel_stride, args.ids[row], args.inputs, args.scale, args.y + row * args.y_stride);
}

inline void dequantize_rows(const DequantizeArgs& args, int64_t first, int64_t last) {
  for (int64_t output = first; output < last; ++output)
    unpack_output(args.data, args.format, args.panel_stride, output, args.inputs, 1.0f, args.y + output * args.y_stride);
}

}  // namespace noria::NORIA_TIER
