// y = x W^T + bias over packed weights.
//
// The order of every output element is fixed by its own shape, so that it has the same bits alone or among 500 rows, in any tile, on
// any tier:
//
//   f32      acc = fma(x[k], w[k], acc), k ascending
//   bf16     acc = dot_pairs(acc, x pair, w pair), pairs ascending
//   q8, q4   groups ascending: dot = the exact int32 dot product of the group's codes (with the zero point taken off),
//            acc = fma(float(dot), scale_w * scale_x, acc), and with a minimum then acc = fma(min_w, scale_x * sum_x, acc)
//
// and the bias is added last. The kernel keeps a register tile of R rows by H half panels (16 columns each) over the whole inner
// dimension: a panel is streamed once for up to kRowTile rows, then found again in the cache by the next rows of the block.
#pragma once
#include "linear_args.h"
#include "read_ahead.h"
#include "simd.h"

namespace noria::NORIA_TIER {

// The register tile. AVX-512: 6 rows x 32 columns are 12 integer and 12 float accumulators of 32 registers. AVX2 has 16
// registers of half the width: 4 rows x 16 columns of integer accumulators fit, the float accumulators live in L1. Loops over a
// register tile must be unrolled for it to be in registers; the generic tier's virtual lanes are arrays, and stay loops.
#if defined(__AVX512F__)
constexpr int kRowTile = 6, kHalves = 2;
#define NORIA_UNROLL _Pragma("GCC unroll 8")
#define NORIA_UNROLL_STEPS _Pragma("GCC unroll 4")
#elif defined(__AVX2__)
constexpr int kRowTile = 4, kHalves = 1;
#define NORIA_UNROLL _Pragma("GCC unroll 8")
#define NORIA_UNROLL_STEPS _Pragma("GCC unroll 4")
#else
constexpr int kRowTile = 2, kHalves = 1;
#define NORIA_UNROLL
#define NORIA_UNROLL_STEPS
#endif

// The weights that a kernel asks for while it computes. A panel that only one register tile passes over is read from memory as
// it is used, so the cursor runs a fixed distance ahead. Where more row tiles follow, the panel is in the cache after the first
// one, and each of them fetches its share of the next panel, so that memory works while they compute.
struct Prefetch {
  const uint8_t* at;
  int64_t share;     // a step over n bytes of the panel fetches n / share bytes
  ReadAhead* later;  // what comes behind the linear ops, or null

  void step(int64_t bytes) {
    const uint8_t* end = at + bytes / share;
    for (; at < end; at += 64) __builtin_prefetch(at, 0, 2);  // into L2
  }
};
constexpr int64_t kPrefetchDistance = 4096;  // bytes
constexpr int kFewestRowsAhead = 4;          // of a register tile that fetches for `later`

// -- sums over the inner dimension: acc[r][h] of rows row + r and columns 16 (First + h) .. of one panel ---------------------------

template <int R, int H, int First>
inline void sum_f32(const LinearArgs& args, const uint8_t* panel, Prefetch ahead, int64_t row, vf16 (&acc)[R][H]) {
  const float* x = args.x + row * args.x_stride;
  const float* w = reinterpret_cast<const float*>(panel) + 16 * First;
  NORIA_UNROLL_STEPS
  for (int64_t k = 0; k < args.inputs; ++k, w += kPanel) {
    if constexpr (First == 0) ahead.step(kPanel * 4);
    if constexpr (First == 0 && R >= kFewestRowsAhead)
      if (k % kStepLanes == 0 && ahead.later != nullptr) fetch_some(*ahead.later);
    vf16 weights[H];
    NORIA_UNROLL
    for (int h = 0; h < H; ++h) weights[h] = load(w + 16 * h);
    NORIA_UNROLL
    for (int r = 0; r < R; ++r) {
      const vf16 value = set1(x[r * args.x_stride + k]);
      NORIA_UNROLL
      for (int h = 0; h < H; ++h) acc[r][h] = fma(value, weights[h], acc[r][h]);
    }
  }
}

template <int R, int H, int First>
inline void sum_bf16(const LinearArgs& args, const uint8_t* panel, Prefetch ahead, int64_t row, vf16 (&acc)[R][H]) {
  const int64_t stride = padded_pairs(args.inputs), pairs = stride / 2;
  const uint16_t* x = args.pairs + row * stride;
  const uint16_t* w = reinterpret_cast<const uint16_t*>(panel) + 32 * First;
  NORIA_UNROLL_STEPS
  for (int64_t k = 0; k < pairs; ++k, w += 2 * kPanel) {
    if constexpr (First == 0) ahead.step(kPanel * 4);
    if constexpr (First == 0 && R >= kFewestRowsAhead)
      if (k % kStepLanes == 0 && ahead.later != nullptr) fetch_some(*ahead.later);
    bf16x32 weights[H];
    NORIA_UNROLL
    for (int h = 0; h < H; ++h) weights[h] = load_pairs(w + 32 * h);
    NORIA_UNROLL
    for (int r = 0; r < R; ++r) {
      const bf16x32 pair = set1_pair(load_u32(x + r * stride + 2 * k));
      NORIA_UNROLL
      for (int h = 0; h < H; ++h) acc[r][h] = dot_pairs(acc[r][h], pair, weights[h]);
    }
  }
}

// The exact dot product of one group in sixteen columns, from `start` on.
template <Kind K>
struct GroupDot;
template <>
struct GroupDot<Kind::q8> {
  vi16 sum;
  void begin(vi16 start) { sum = start; }
  void add(vi16 codes, vi16 quad) { sum = dot_u8s8(sum, codes, quad); }
  vi16 end(vi16) const { return sum; }
};
template <>
struct GroupDot<Kind::q4> {
  u4dot sum;
  void begin(vi16 start) { sum = begin_u4s8(start); }
  void add(vi16 codes, vi16 quad) { sum = dot_u4s8(sum, codes, quad); }
  vi16 end(vi16 start) const { return end_u4s8(sum, start); }
};

// The codes of one quad (four inner elements) in the sixteen columns of half `half`.
template <Kind K>
inline vi16 load_codes(const uint8_t* codes, int quad, int half) {
  if constexpr (K == Kind::q8) return load_i32(reinterpret_cast<const int32_t*>(codes + quad * 128 + half * 64));
  const vi16 both = load_i32(reinterpret_cast<const int32_t*>(codes + quad * 64));
  return (half == 0 ? both : shift_right<4>(both)) & set1_i32(0x0f0f0f0f);
}

template <WeightFormat F>
inline vf16 load_scales(const uint8_t* scales, int half) {
  if constexpr (F.half_scales) return load_f16(reinterpret_cast<const uint16_t*>(scales) + 16 * half);
  return load(reinterpret_cast<const float*>(scales) + 16 * half);
}

template <WeightFormat F, int R, int H, int First>
inline void sum_groups(const LinearArgs& args, const uint8_t* panel, Prefetch ahead, int64_t row, vf16 (&acc)[R][H]) {
  constexpr int kGroup = F.group, kQuads = kGroup / 4, kZeroShift = F.kind == Kind::q8 ? 7 : 3;  // zero points 128 and 8
  const QuantizedRows& q = args.quantized;
  const int64_t k = padded_codes(args.inputs), groups = k / kGroup, x_groups = k / 32;
  const int8_t* codes = q.codes + row * k;
  const float* scales = q.scales + row * x_groups;
  const int32_t* sums = (kGroup == 32 ? q.sums : q.half_sums) + row * groups;
  const float* scaled_sums = (kGroup == 32 ? q.scaled_sums : q.scaled_half_sums) + row * groups;

  for (int64_t g = 0; g < groups; ++g, panel += group_bytes(F)) {
    if constexpr (First == 0) ahead.step(group_bytes(F));
    if constexpr (First == 0 && R >= kFewestRowsAhead)
      if (ahead.later != nullptr) fetch_some(*ahead.later);
    vi16 start[R];
    GroupDot<F.kind> dot[R][H];
    NORIA_UNROLL
    for (int r = 0; r < R; ++r) {
      start[r] = set1_i32(0);
      if constexpr (!F.has_minimum) start[r] = start[r] - shift_left<kZeroShift>(set1_i32(sums[r * groups + g]));
      NORIA_UNROLL
      for (int h = 0; h < H; ++h) dot[r][h].begin(start[r]);
    }
    NORIA_UNROLL
    for (int quad = 0; quad < kQuads; ++quad) {
      vi16 weights[H];
      NORIA_UNROLL
      for (int h = 0; h < H; ++h) weights[h] = load_codes<F.kind>(panel, quad, First + h);
      NORIA_UNROLL
      for (int r = 0; r < R; ++r) {
        const vi16 x = set1_i32(static_cast<int32_t>(load_u32(codes + r * k + g * kGroup + quad * 4)));
        NORIA_UNROLL
        for (int h = 0; h < H; ++h) dot[r][h].add(weights[h], x);
      }
    }
    const uint8_t* weight_scales = panel + code_bytes(F);
    const uint8_t* weight_minima = weight_scales + scale_bytes(F);
    NORIA_UNROLL
    for (int h = 0; h < H; ++h) {
      const vf16 scale = load_scales<F>(weight_scales, First + h);
      vf16 minimum = zero();
      if constexpr (F.has_minimum) minimum = load_scales<F>(weight_minima, First + h);
      NORIA_UNROLL
      for (int r = 0; r < R; ++r) {
        const vf16 value = to_float(dot[r][h].end(start[r]));
        acc[r][h] = fma(value, scale * set1(scales[r * x_groups + g * kGroup / 32]), acc[r][h]);
        if constexpr (F.has_minimum) acc[r][h] = fma(minimum, set1(scaled_sums[r * groups + g]), acc[r][h]);
      }
    }
  }
}

// -- one register tile: R rows of one panel ----------------------------------------------------------------------------------

// `columns` of the panel's 32 exist; `column` is the first one's place in y.
struct PanelColumns {
  const uint8_t* data;
  Prefetch ahead;
  int64_t column;
  int columns;
};

template <int R, int H>
inline void write_rows(const LinearArgs& args, const vf16 (&acc)[R][H], int64_t row, int64_t column, int columns) {
  NORIA_UNROLL
  for (int h = 0; h < H; ++h) {
    const int count = columns - 16 * h;
    if (count <= 0) return;
    const int64_t first = column + 16 * h;
    NORIA_UNROLL
    for (int r = 0; r < R; ++r) {
      const vf16 value = acc[r][h];
      float* y = args.y + (row + r) * args.y_stride + first;
      if (count >= 16) {
        store(y, args.bias != nullptr ? value + load(args.bias + first) : value);
      } else {
        store_part(y, args.bias != nullptr ? value + load_part(args.bias + first, count) : value, count);
      }
    }
  }
}

template <WeightFormat F, int R, int First>
inline void half_panels(const LinearArgs& args, const PanelColumns& panel, int64_t row) {
  vf16 acc[R][kHalves];
  NORIA_UNROLL
  for (int r = 0; r < R; ++r) {
    NORIA_UNROLL
    for (int h = 0; h < kHalves; ++h) {
      acc[r][h] = zero();
      __builtin_prefetch(args.y + (row + r) * args.y_stride + panel.column + 16 * (First + h), 1);
    }
  }
  if constexpr (F.kind == Kind::f32) sum_f32<R, kHalves, First>(args, panel.data, panel.ahead, row, acc);
  if constexpr (F.kind == Kind::bf16) sum_bf16<R, kHalves, First>(args, panel.data, panel.ahead, row, acc);
  if constexpr (is_quantized(F)) sum_groups<F, R, kHalves, First>(args, panel.data, panel.ahead, row, acc);
  write_rows<R, kHalves>(args, acc, row, panel.column + 16 * First, panel.columns - 16 * First);
}

template <WeightFormat F, int R>
void panel_rows(const LinearArgs& args, const PanelColumns& panel, int64_t row) {
  half_panels<F, R, 0>(args, panel, row);
  if constexpr (kHalves == 1) half_panels<F, R, 1>(args, panel, row);
}

template <WeightFormat F>
inline void some_rows(const LinearArgs& args, const PanelColumns& panel, int64_t row, int64_t rows) {
  switch (rows) {
    case 1:
      return panel_rows<F, 1>(args, panel, row);
    case 2:
      return panel_rows<F, 2>(args, panel, row);
#if defined(__AVX2__)
    case 3:
      return panel_rows<F, 3>(args, panel, row);
    case 4:
      return panel_rows<F, 4>(args, panel, row);
#endif
#if defined(__AVX512F__)
    case 5:
      return panel_rows<F, 5>(args, panel, row);
    case 6:
      return panel_rows<F, 6>(args, panel, row);
#endif
  }
}

// -- a tile: panels [first_panel, last_panel) of one segment by rows [first_row, last_row) ---------------------------------------

struct TileRange {
  int64_t first_panel, last_panel, first_row, last_row;
};

template <WeightFormat F>
void segment_tile(const LinearArgs& args, const LinearSegment& segment, const TileRange& range, ReadAhead* later) {
  // Register tiles of nearly the same number of rows: 8 rows are 4 + 4, not 6 + 2.
  const int64_t rows = range.last_row - range.first_row, count = (rows + kRowTile - 1) / kRowTile;
  const int64_t share = rows / count, longer = rows % count;
  for (int64_t p = range.first_panel; p < range.last_panel; ++p) {
    const int64_t left = segment.outputs - p * kPanel;
    const uint8_t* data = segment.data + p * segment.panel_stride;
    PanelColumns panel{
        data, {data + kPrefetchDistance, 1, later}, segment.first_column + p * kPanel, left < kPanel ? static_cast<int>(left) : kPanel};
    int64_t row = range.first_row;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t height = share + (i < longer ? 1 : 0);
      if (count > 1) panel.ahead = {data + segment.panel_stride * (count + i) / count, count, later};
      some_rows<F>(args, panel, row, height);
      row += height;
    }
  }
}

template <Kind K, int Group>
inline void quantized_tile(const LinearArgs& args, const LinearSegment& segment, const TileRange& range, ReadAhead* later) {
  const WeightFormat f = segment.format;
  if (f.half_scales && f.has_minimum) return segment_tile<WeightFormat{K, Group, true, true}>(args, segment, range, later);
  if (f.half_scales) return segment_tile<WeightFormat{K, Group, true, false}>(args, segment, range, later);
  if (f.has_minimum) return segment_tile<WeightFormat{K, Group, false, true}>(args, segment, range, later);
  return segment_tile<WeightFormat{K, Group, false, false}>(args, segment, range, later);
}

inline void dispatch_tile(const LinearArgs& args, const LinearSegment& segment, const TileRange& range, ReadAhead* later) {
  const WeightFormat f = segment.format;
  switch (f.kind) {
    case Kind::f32:
      return segment_tile<WeightFormat{Kind::f32, 0, false, false}>(args, segment, range, later);
    case Kind::bf16:
      return segment_tile<WeightFormat{Kind::bf16, 0, false, false}>(args, segment, range, later);
    case Kind::q8:
      return f.group == 32 ? quantized_tile<Kind::q8, 32>(args, segment, range, later)
                           : quantized_tile<Kind::q8, 16>(args, segment, range, later);
    case Kind::q4:
      return f.group == 32 ? quantized_tile<Kind::q4, 32>(args, segment, range, later)
                           : quantized_tile<Kind::q4, 16>(args, segment, range, later);
  }
}

// -- the cut into tiles -----------------------------------------------------------------------------------------------------

// About how long one thread of a recent core works on one panel of `rows` rows, in nanoseconds: the reading of the panel from
// memory or the arithmetic, whichever is longer. It sizes tiles; it need not be right.
inline double panel_nanoseconds(const LinearSegment& segment, int64_t inputs, int64_t rows) {
  const double operations_a_ns = is_quantized(segment.format) ? 250.0 : segment.format.kind == Kind::bf16 ? 150.0 : 75.0;
  const double reading = static_cast<double>(segment.panel_stride) / 15.0;
  const double arithmetic = 2.0 * kPanel * static_cast<double>(inputs * rows) / operations_a_ns;
  return reading > arithmetic ? reading : arithmetic;
}

constexpr int64_t kRowBlock = 8 * kRowTile;                 // rows of activations that stay in the cache while a run of panels passes
constexpr double kLongestTile = 60e3, kShortestTile = 3e3;  // nanoseconds
constexpr int64_t kTilesPerThread = 16;  // enough that the last tiles of an op leave few threads waiting, and cheap to claim

// Chooses args.tiling and returns the number of tiles. The cut depends on the thread count; the results do not depend on the cut.
inline int64_t linear_tile_count(LinearArgs& args, int threads) {
  int64_t panels = 0;
  double nanoseconds = 0.0;
  const int64_t blocks = (args.rows + kRowBlock - 1) / kRowBlock;
  if (blocks == 0) return 0;
  const int64_t row_block = (args.rows + blocks - 1) / blocks;
  for (int s = 0; s < args.segment_count; ++s) {
    const int64_t count = panel_count(args.segments[s].outputs);
    panels += count;
    nanoseconds += static_cast<double>(count) * panel_nanoseconds(args.segments[s], args.inputs, row_block);
  }
  const double each = nanoseconds / static_cast<double>(panels);
  int64_t run = panels * blocks / (kTilesPerThread * threads);
  const int64_t longest = static_cast<int64_t>(kLongestTile / each), shortest = static_cast<int64_t>(kShortestTile / each);
  run = run > longest ? longest : run;
  run = run < shortest ? shortest : run;
  run = run < 1 ? 1 : run > panels ? panels : run;
  args.tiling = {run, row_block, blocks};
  return (panels + run - 1) / run * blocks;
}

// Tile `tile` of the cut in args.tiling. Neighbouring tiles are the row blocks of one run of panels, so that its weights are
// read from memory once.
inline void linear_tile(const LinearArgs& args, int64_t tile, ReadAhead* later) {
  const LinearTiling& t = args.tiling;
  const int64_t first = tile / t.row_blocks * t.panel_run, last = first + t.panel_run;
  const int64_t first_row = tile % t.row_blocks * t.row_block;
  const int64_t last_row = first_row + t.row_block < args.rows ? first_row + t.row_block : args.rows;
  int64_t before = 0;  // panels of the segments before this one
  for (int s = 0; s < args.segment_count && before < last; ++s) {
    const LinearSegment& segment = args.segments[s];
    const int64_t count = panel_count(segment.outputs);
    const int64_t from = first > before ? first - before : 0, to = last - before < count ? last - before : count;
    if (from < to) dispatch_tile(args, segment, {from, to, first_row, last_row}, later);
    before += count;
  }
}

#undef NORIA_UNROLL
#undef NORIA_UNROLL_STEPS
}  // namespace noria::NORIA_TIER
