// Attention over the paged cache.
//
// Contract, for one query vector at position p that sees keys start .. p, start = max(0, p - window + 1):
//
//   keys         0 ........ 255 | 256 ....... 511 | 512 ...      splits of 256 absolute positions, in ascending order
//                     ^ start                          ^ p
//
//   score        dims ascending in pairs (f32: one by one), then * (scale * log2 e); with a soft cap * scale, the cap, * log2 e
//   split        m_s = max of its visible scores; e = 2^(score - m_s); lane (key mod 16) adds its e in ascending order, l_s =
//                sum_lanes; acc_s = visible key pairs ascending (f32: keys), e rounded to the type of the cache
//   merge        m' = max(m, m_s); acc = fma(acc, 2^(m - m'), acc_s * 2^(m_s - m')), and l in the same way; out = acc / l
//
// An int8 cache holds K and V as codes with one scale for each token and head. The query becomes codes in the same way, and scores are
// exact integer dot products: score = dot * (scale_k * scale_q). For the values, w = e * scale_v, W = the largest w of the split, each w is
// rounded to an integer of 15 bits, round(w * (32767 / W)), and acc_s = (exact integer sum) * (W / 32767): there is no order to fix.
//
// Else queries are rounded to the type of the cache. Invisible keys are never part of a sum: their scores are selected away, and in the
// one or two pairs of which the query sees one key only, the other key's value is replaced by +0. So the bits of a query depend
// on nothing but its own prefix - not on how many queries a tile holds, nor on which thread computes which split.
//
// A tile computes up to 24 vectors (queries x heads that share the KV head), so that what is loaded of K and V serves all. Its queries are
// neighbours in one row, or of rows that share their first blocks (a common prefix): those are together in the splits that they share.
//
//            blocks of the split   b0   b1   b2   b3   b4
//   query 0                        .xx  xxx  xxx  x..            . invisible
//   query 1                        ..x  xxx  xxx  xx.
//   query 2                             xxx  xxx  xxx  x..
//                                 `each'`-- joint --'`-- each query by itself
//
// A tile of few vectors (decode) computes faster than the memory answers. With the scores of a block it fetches that block's values, and
// with the values the keys that its worker reads next: of the next split, or of the tile that it will be dealt next.
#pragma once
#include "attention_args.h"
#include "math.h"
#include "quantize.h"
#include "step.h"

namespace noria::NORIA_TIER {

// -- the types of cache ------------------------------------------------------------------------------------------------------------
//
// All loads of K, of queries and of weights (what the values are multiplied by) are of 32-bit lanes, whatever is in a lane.

struct Bf16Cache {
  static constexpr int kKeyDims = 2, kValueKeys = 2;  // in a lane
  static constexpr int kQueryBytes = 2, kWeightBytes = 2, kValueBytes = 2;
  static constexpr bool kScales = false;
  using Lanes = bf16x32;
  using ValueLanes = bf16x32;
  using Sum = vf16;
  static Sum none() { return zero(); }
  static Lanes lanes(const uint8_t* p) { return load_pairs(reinterpret_cast<const uint16_t*>(p)); }
  static Lanes broadcast(const uint8_t* p) { return set1_pair(load_u32(p)); }
  static ValueLanes value_lanes(const uint8_t* p) { return lanes(p); }
  static ValueLanes broadcast_weight(const uint8_t* p) { return broadcast(p); }
  static Sum multiply_add(Lanes a, Lanes b, Sum acc) { return dot_pairs(acc, a, b); }
  static Sum load_sum(const float* p) { return load(p); }
  static void store_sum(float* p, Sum x) { store(p, x); }
  static void put(uint8_t* p, vf16 x) { store_bf16(reinterpret_cast<uint16_t*>(p), x); }
};

struct F32Cache {
  static constexpr int kKeyDims = 1, kValueKeys = 1;
  static constexpr int kQueryBytes = 4, kWeightBytes = 4, kValueBytes = 4;
  static constexpr bool kScales = false;
  using Lanes = vf16;
  using ValueLanes = vf16;
  using Sum = vf16;
  static Sum none() { return zero(); }
  static Lanes lanes(const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
  static Lanes broadcast(const uint8_t* p) { return set1(*reinterpret_cast<const float*>(p)); }
  static ValueLanes value_lanes(const uint8_t* p) { return lanes(p); }
  static ValueLanes broadcast_weight(const uint8_t* p) { return broadcast(p); }
  static Sum multiply_add(Lanes a, Lanes b, Sum acc) { return fma(a, b, acc); }
  static Sum load_sum(const float* p) { return load(p); }
  static void store_sum(float* p, Sum x) { store(p, x); }
  static void put(uint8_t* p, vf16 x) { store(reinterpret_cast<float*>(p), x); }
};

struct Int8Cache {
  static constexpr int kKeyDims = 4, kValueKeys = 2;
  static constexpr int kQueryBytes = 1, kWeightBytes = 2, kValueBytes = 1;
  static constexpr bool kScales = true;
  using Lanes = vi16;  // four codes: of a query, or of a key with 128 added
  using ValueLanes = i16x32;
  using Sum = vi16;
  static Sum none() { return set1_i32(0); }
  static Lanes lanes(const uint8_t* p) { return load_i32(reinterpret_cast<const int32_t*>(p)); }
  static Lanes broadcast(const uint8_t* p) { return set1_i32(static_cast<int32_t>(load_u32(p))); }
  static ValueLanes value_lanes(const uint8_t* p) { return load_pairs(reinterpret_cast<const int8_t*>(p)); }
  static ValueLanes broadcast_weight(const uint8_t* p) { return set1_pair_i16(load_u32(p)); }
  static Sum multiply_add(Lanes query, Lanes keys, Sum acc) { return dot_u8s8(acc, keys, query); }
  static Sum multiply_add(ValueLanes weight, ValueLanes values, Sum acc) { return dot_pairs(acc, weight, values); }
  static Sum load_sum(const float* p) { return load_i32(reinterpret_cast<const int32_t*>(p)); }
  static void store_sum(float* p, Sum x) { store_i32(reinterpret_cast<int32_t*>(p), x); }
  static void put(uint8_t* p, vf16 x) { store_u16(reinterpret_cast<uint16_t*>(p), to_int(x)); }
};

// The scales of a head's 16 keys or values, behind their codes.
inline vf16 block_scales(const uint8_t* block, int64_t dim) { return load(reinterpret_cast<const float*>(block + 16 * dim)); }

// Query vectors in the form that the products read. `scales` and `sums` only where the cache has scales.
struct Queries {
  const uint8_t* data;  // [vectors][dim]
  const float* scales;  // [vectors]
  const int32_t* sums;  // [vectors] of codes
};

// -- register tiles ----------------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int kMostVectors = 8;
constexpr int blocks_beside(int vectors) { return vectors >= 8 ? 2 : vectors >= 4 ? 3 : 4; }
constexpr int chunks_beside(int vectors) { return vectors >= 8 ? 2 : 4; }
#else
constexpr int kMostVectors = 4;
constexpr int blocks_beside(int vectors) { return vectors >= 3 ? 1 : 2; }
constexpr int chunks_beside(int vectors) { return vectors >= 3 ? 1 : 2; }
#endif

template <class C>
constexpr int rows_a_block = kBlockSize / C::kValueKeys;

// Scores of M vectors from `first` on with the 16 keys of each of B blocks: scores [M][256] from the first block's first key on.
// While it computes it fetches as much of the blocks `ahead`, if it is to. Inlined by force: both forms are to be unrolled into registers.
template <class C, int M, int B, bool Fetch>
[[gnu::always_inline]] inline void score_tile(const Queries& q, int first, const uint8_t* const* blocks, const uint8_t* const* ahead,
                                              int64_t dim, float* scores) {
  typename C::Sum acc[M][B];
  for (int m = 0; m < M; ++m)
    for (int b = 0; b < B; ++b) acc[m][b] = C::none();
  const uint8_t* const queries = q.data + first * dim * C::kQueryBytes;
  for (int64_t lane = 0; lane < dim / C::kKeyDims; ++lane) {
    typename C::Lanes keys[B];
    for (int b = 0; b < B; ++b) keys[b] = C::lanes(blocks[b] + lane * 64);
    if constexpr (Fetch)
      for (int b = 0; b < B; ++b) __builtin_prefetch(ahead[b * rows_a_block<C>] + lane * 64);
    for (int m = 0; m < M; ++m) {
      const typename C::Lanes query = C::broadcast(queries + m * dim * C::kQueryBytes + lane * 4);
      for (int b = 0; b < B; ++b) acc[m][b] = C::multiply_add(query, keys[b], acc[m][b]);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int b = 0; b < B; ++b) {
      float* const to = scores + m * kSplitKeys + b * 16;
      if constexpr (C::kScales) {
        const vf16 dot = to_float(acc[m][b] - set1_i32(128 * q.sums[first + m]));
        store(to, dot * (block_scales(blocks[b], dim) * set1(q.scales[first + m])));
      } else {
        store(to, acc[m][b]);
      }
    }
}

template <class C, int M, bool Fetch>
[[gnu::noinline]] void score_vectors(const Queries& q, int first, const uint8_t* const* blocks, const uint8_t* const* ahead, int count,
                                     int64_t dim, float* scores) {
  constexpr int kBeside = blocks_beside(M);
  int b = 0;
  for (; b + kBeside <= count; b += kBeside)
    score_tile<C, M, kBeside, Fetch>(q, first, blocks + b, ahead + b * rows_a_block<C>, dim, scores + b * 16);
  for (; b < count; ++b) score_tile<C, M, 1, Fetch>(q, first, blocks + b, ahead + b * rows_a_block<C>, dim, scores + b * 16);
}

// acc [M][dim] += the value rows [first, last) times the weights [M][256], over 16 D dims. `ahead` as above.
template <class C, int M, int D, bool Fetch>
[[gnu::always_inline]] inline void value_tile(const uint8_t* weights, const uint8_t* const* rows, const uint8_t* const* ahead, int first,
                                              int last, int64_t dim, int64_t at, float* acc) {
  typename C::Sum sum[M][D];
  for (int m = 0; m < M; ++m)
    for (int d = 0; d < D; ++d) sum[m][d] = C::load_sum(acc + m * dim + at + d * 16);
  for (int row = first; row < last; ++row) {
    typename C::ValueLanes values[D];
    for (int d = 0; d < D; ++d) values[d] = C::value_lanes(rows[row] + (at + d * 16) * C::kValueKeys * C::kValueBytes);
    if constexpr (Fetch)
      for (int d = 0; d < D; ++d)
        __builtin_prefetch(ahead[row / rows_a_block<C>] + (row % rows_a_block<C> * dim + at + d * 16) * C::kValueKeys * C::kValueBytes);
    for (int m = 0; m < M; ++m) {
      const typename C::ValueLanes weight = C::broadcast_weight(weights + m * kSplitKeys * C::kWeightBytes + row * 4);
      for (int d = 0; d < D; ++d) sum[m][d] = C::multiply_add(weight, values[d], sum[m][d]);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int d = 0; d < D; ++d) C::store_sum(acc + m * dim + at + d * 16, sum[m][d]);
}

template <class C, int M, bool Fetch>
[[gnu::noinline]] void value_vectors(const uint8_t* weights, const uint8_t* const* rows, const uint8_t* const* ahead, int first, int last,
                                     int64_t dim, float* acc) {
  constexpr int kBeside = chunks_beside(M);
  int64_t at = 0;
  for (; at + 16 * kBeside <= dim; at += 16 * kBeside) value_tile<C, M, kBeside, Fetch>(weights, rows, ahead, first, last, dim, at, acc);
  for (; at < dim; at += 16) value_tile<C, M, 1, Fetch>(weights, rows, ahead, first, last, dim, at, acc);
}

// Calls f.template operator()<M>(first vector) for register tiles that cover `count` vectors.
template <class F>
inline void in_register_tiles(int count, F f) {
  int v = 0;
  for (; count - v >= kMostVectors; v += kMostVectors) f.template operator()<kMostVectors>(v);
  if (kMostVectors > 4 && count - v >= 4) f.template operator()<4>(v), v += 4;
  if (count - v == 3) return f.template operator()<3>(v);
  if (count - v == 2) return f.template operator()<2>(v);
  if (count - v == 1) return f.template operator()<1>(v);
}

// -- one tile ------------------------------------------------------------------------------------------------------------------

// A worker's memory for a tile of at most `vectors` vectors.
struct AttentionScratch {
  uint8_t* q;            // [vectors][dim] in the form of Queries
  float* query_scales;   // [vectors]
  int32_t* query_sums;   // [vectors]
  float* scores;         // [vectors][256]
  uint8_t* weights;      // [vectors][256]
  float* weight_scales;  // [vectors]
  float* split_acc;      // [vectors][dim]
  float* split_max;      // [vectors]
  float* split_sum;      // [vectors]
  float* acc;            // [vectors][dim]: the merged splits
  float* max;            // [vectors]
  float* sum;            // [vectors]
  uint16_t* masked;      // [2][dim][2]: copies of a query's first and last pair with one key's value zeroed
};

inline int64_t attention_vectors(const AttentionArgs& args) {
  const int32_t group = args.heads / args.kv.kv_heads;
  return static_cast<int64_t>(queries_a_tile(group)) * group;
}

inline int64_t attention_scratch_bytes(const AttentionArgs& args) {
  const int64_t vectors = attention_vectors(args), dim = args.kv.dim;
  return vectors * (3 * dim + 2 * kSplitKeys + 64) * 4 + dim * 8 + 4096;
}

inline AttentionScratch attention_scratch(const AttentionArgs& args, void* memory) {
  const int64_t vectors = attention_vectors(args), dim = args.kv.dim;
  auto* at = static_cast<uint8_t*>(memory);
  const auto take = [&at](int64_t bytes) {
    uint8_t* const p = at;
    at += (bytes + 63) / 64 * 64;
    return p;
  };
  const auto floats = [&](int64_t count) { return reinterpret_cast<float*>(take(count * 4)); };
  AttentionScratch s;
  s.q = take(vectors * dim * 4);
  s.query_scales = floats(vectors);
  s.query_sums = reinterpret_cast<int32_t*>(take(vectors * 4));
  s.scores = floats(vectors * kSplitKeys);
  s.weights = take(vectors * kSplitKeys * 4);
  s.weight_scales = floats(vectors);
  s.split_acc = floats(vectors * dim);
  s.split_max = floats(vectors);
  s.split_sum = floats(vectors);
  s.acc = floats(vectors * dim);
  s.max = floats(vectors);
  s.sum = floats(vectors);
  s.masked = reinterpret_cast<uint16_t*>(take(4 * dim * 2));
  return s;
}

// The keys that one query sees of one split: [first, last], nothing if last < first.
struct KeyRange {
  int32_t first, last;
};
inline KeyRange visible_keys(int32_t position, int32_t window, int32_t split) {
  const int32_t start = window > 0 && position >= window ? position - window + 1 : 0;
  const int32_t low = split * kSplitKeys, high = low + kSplitKeys - 1;
  return {start > low ? start : low, position < high ? position : high};
}

template <class C>
class AttentionTile {
 public:
  AttentionTile(const AttentionArgs& args, const StepView& step, const AttentionPlan& plan, const AttentionWork& work, int32_t kv_head,
                const AttentionWork& next, int32_t next_head, void* memory)
      : args_(args),
        plan_(plan),
        work_(work),
        next_(next),
        step_(step),
        queries_(plan.queries + work.first_query),
        kv_head_(kv_head),
        next_head_(next_head),
        group_(args.heads / args.kv.kv_heads),
        dim_(args.kv.dim),
        fetches_(work.queries * group_ <= kMostVectors),
        s_(attention_scratch(args, memory)) {}

  void run() {
    pack_queries();
    for (int32_t split = work_.first_split; split < work_.last_split; ++split) {
      const Visitors visitors = visitors_of(split);
      if (split < work_.joint_splits)
        visit(split, visitors);
      else
        for (int q = visitors.first; q < visitors.last; ++q)
          if (sees(q, split)) visit(split, {q, q + 1});
    }
    if (work_.partials >= 0) {
      if (!last_to_arrive()) return;
      merge_partials();
    }
    write_out();
  }

 private:
  // The queries [first, last) of the tile that see a key of a split.
  struct Visitors {
    int first, last;
  };

  int64_t token_of(int q) const { return queries_[q].token; }
  int32_t position_of(int q) const { return step_.positions[queries_[q].token]; }
  const int32_t* table_of(int q) const { return block_table(step_, args_.kv.group, queries_[q].row); }
  KeyRange keys_of(int q, int32_t split) const { return visible_keys(position_of(q), args_.window, split); }

  int32_t first_split_of(int q) const {
    const int32_t position = position_of(q);
    return args_.window > 0 && position >= args_.window ? (position - args_.window + 1) / kSplitKeys : 0;
  }

  bool sees(int q, int32_t split) const {
    const KeyRange keys = keys_of(q, split);
    return keys.first <= keys.last;
  }

  Visitors visitors_of(int32_t split) const {
    Visitors v{0, work_.queries};
    while (v.first < v.last && !sees(v.first, split)) ++v.first;
    while (v.first < v.last && !sees(v.last - 1, split)) --v.last;
    return v;
  }

  void visit(int32_t split, Visitors visitors) {
    attend_split(split, visitors);
    for (int q = visitors.first, end; q < visitors.last; q = end) {
      const bool first = split == first_split_of(q);
      for (end = q + 1; end < visitors.last && (split == first_split_of(end)) == first;) ++end;
      const int v = q * group_, vectors = (end - q) * group_;
      if (work_.partials >= 0)
        for (int i = v; i < v + vectors; ++i) save_partial(i, split);
      else
        merge(v, vectors, first, s_.split_acc + v * dim_, dim_, s_.split_max + v, s_.split_sum + v);
    }
  }

  void pack_queries() {
    for (int q = 0; q < work_.queries; ++q) {
      const float* const heads = args_.qkv + token_of(q) * args_.qkv_stride + static_cast<int64_t>(kv_head_) * group_ * dim_;
      for (int h = 0; h < group_; ++h) pack_query(heads + h * dim_, q * group_ + h);
    }
  }

  void pack_query(const float* from, int v) {
    uint8_t* const to = s_.q + v * dim_ * C::kQueryBytes;
    if constexpr (C::kScales)
      s_.query_scales[v] = quantize_values(from, dim_, reinterpret_cast<int8_t*>(to), s_.query_sums[v]);
    else
      for (int64_t i = 0; i < dim_; i += 16) C::put(to + i * C::kQueryBytes, load(from + i));
  }

  void attend_split(int32_t split, Visitors visitors) {
    const int vector = visitors.first * group_, vectors = (visitors.last - visitors.first) * group_;
    if (vectors == 0) return;
    const int32_t base = split * kSplitBlocks;  // the split's first block
    const int first_block = keys_of(visitors.first, split).first / kBlockSize - base;
    const int last_block = keys_of(visitors.last - 1, split).last / kBlockSize - base;

    const int32_t* const table = table_of(visitors.first) + base;
    const uint8_t* key_blocks[kSplitBlocks];
    for (int b = first_block; b <= last_block; ++b) {
      key_blocks[b] = key_block(args_.kv, table[b], kv_head_);
      const uint8_t* const values = value_block(args_.kv, table[b], kv_head_);
      for (int r = 0; r < kRows; ++r) rows_[b * kRows + r] = values + r * dim_ * C::kValueKeys * C::kValueBytes;
    }
    const Queries queries{s_.q, s_.query_scales, s_.query_sums};
    in_register_tiles(vectors, [&]<int M>(int v) {
      float* const scores = s_.scores + (vector + v) * kSplitKeys + first_block * kBlockSize;
      const int count = last_block - first_block + 1;
      if (fetches_)
        score_vectors<C, M, true>(queries, vector + v, key_blocks + first_block, rows_ + first_block * kRows, count, dim_, scores);
      else
        score_vectors<C, M, false>(queries, vector + v, key_blocks + first_block, nullptr, count, dim_, scores);
    });
    for (int q = visitors.first; q < visitors.last; ++q) {
      const KeyRange keys = keys_of(q, split);
      const int first = keys.first - split * kSplitKeys, last = keys.last - split * kSplitKeys;
      for (int v = q * group_; v < (q + 1) * group_; ++v) scale_scores(v, first, last);  // all maxima first: each is a long way
      for (int v = q * group_; v < (q + 1) * group_; ++v) soften(v, first, last);
    }
    std::memset(s_.split_acc + vector * dim_, 0, static_cast<size_t>(vectors * dim_) * sizeof(float));
    add_values(split, visitors);
    if constexpr (C::kScales)
      for (int v = vector; v < vector + vectors; ++v)
        for (float* acc = s_.split_acc + v * dim_; acc < s_.split_acc + (v + 1) * dim_; acc += 16)
          store(acc, to_float(C::load_sum(acc)) * set1(s_.weight_scales[v]));
  }

  // The lanes of block b that are keys of [first, last].
  static m16 visible(int b, int first, int last) {
    const unsigned from = b == first / kBlockSize ? 0xffffu << first % kBlockSize : 0xffffu;
    const unsigned to = b == last / kBlockSize ? 0xffffu >> (kBlockSize - 1 - last % kBlockSize) : 0xffffu;
    return mask_bits(static_cast<uint16_t>(from & to));
  }

  // Dot products to scores for the keys [first, last] of the split, and their maximum: s_.scores, split_max. Invisible lanes of the
  // first and last block become -infinity.
  void scale_scores(int v, int first, int last) {
    float* const scores = s_.scores + v * kSplitKeys;
    const int first_block = first / kBlockSize, last_block = last / kBlockSize;
    if (args_.softcap > 0.0f)
      for (int b = first_block; b <= last_block; ++b)
        store(scores + b * 16, soft_capped(load(scores + b * 16) * set1(args_.scale), args_.softcap) * set1(kLog2E));
    const vf16 factor = set1(args_.softcap > 0.0f ? 1.0f : args_.scale * kLog2E);
    vf16 highest = set1(-kInfinity);
    const auto keep = [&](int b, vf16 score) {
      store(scores + b * 16, score);
      highest = NORIA_TIER::max(score, highest);  // a NaN is passed over here and arrives by its exponential
    };
    const auto scaled = [&](int b) { return load(scores + b * 16) * factor; };
    const auto keep_visible = [&](int b) { keep(b, select(visible(b, first, last), scaled(b), set1(-kInfinity))); };
    keep_visible(first_block);
    for (int b = first_block + 1; b < last_block; ++b) keep(b, scaled(b));
    if (last_block > first_block) keep_visible(last_block);
    s_.split_max[v] = max_lanes(highest);
  }

  // Scores to weights: s_.weights, split_sum.
  void soften(int v, int first, int last) {
    float* const scores = s_.scores + v * kSplitKeys;
    uint8_t* const weights = s_.weights + v * kSplitKeys * C::kWeightBytes;
    const int first_block = first / kBlockSize, last_block = last / kBlockSize;
    const vf16 most = set1(s_.split_max[v]);
    vf16 sum = zero();
    const auto exponential = [&](int b) { return exp2_not_positive(load(scores + b * 16) - most); };
    const auto add = [&](int b, vf16 value) {
      if constexpr (C::kScales)
        store(scores + b * 16, value);
      else
        C::put(weights + b * 16 * C::kWeightBytes, value);
      sum = sum + value;
    };
    const auto add_visible = [&](int b) { add(b, select(visible(b, first, last), exponential(b), zero())); };
    add_visible(first_block);
    for (int b = first_block + 1; b < last_block; ++b) add(b, exponential(b));
    if (last_block > first_block) add_visible(last_block);
    s_.split_sum[v] = sum_lanes(sum);
    if constexpr (C::kScales) {
      vf16 most_weight = zero(), broken = zero();
      for (int b = first_block; b <= last_block; ++b) {
        const vf16 weight = select(visible(b, first, last), load(scores + b * 16) * block_scales(rows_[b * kRows], dim_), zero());
        store(scores + b * 16, weight);
        most_weight = NORIA_TIER::max(weight, most_weight);
        broken = broken + (weight - weight);  // NaN where a value was not finite, else zero
      }
      const float most_of_split = max_lanes(most_weight);
      const vf16 inverse = set1(most_of_split > 0.0f ? 32767.0f / most_of_split : 0.0f);
      for (int b = first_block; b <= last_block; ++b) C::put(weights + b * 16 * C::kWeightBytes, load(scores + b * 16) * inverse);
      s_.weight_scales[v] = most_of_split / 32767.0f + sum_lanes(broken);
    }
  }

  // split_acc += values times weights: each query's own first blocks, the blocks that all see in full, its own last blocks.
  void add_values(int32_t split, Visitors visitors) {
    const int32_t low = split * kSplitKeys;
    const int latest_first = keys_of(visitors.last - 1, split).first - low, earliest_last = keys_of(visitors.first, split).last - low;
    const int joint_first = (latest_first + kBlockSize - 1) / kBlockSize * kBlockSize / C::kValueKeys;
    const int joint_last = (earliest_last + 1) / kBlockSize * kBlockSize / C::kValueKeys;
    if (fetches_) find_keys_ahead(split);
    const bool joint = visitors.last - visitors.first > 1 && joint_first < joint_last;
    const auto own = [&](int q, bool before, bool after) {
      const KeyRange keys = keys_of(q, split);
      const int first = keys.first - low, last = keys.last - low;
      const int from = before ? first / C::kValueKeys : joint_last, to = after ? last / C::kValueKeys + 1 : joint_first;
      if (from < to) add_own_values(q, first, last, from, to);
    };
    for (int q = visitors.first; q < visitors.last; ++q) own(q, true, !joint);
    if (!joint) return;
    add_rows(visitors.first * group_, (visitors.last - visitors.first) * group_, joint_first, joint_last);
    for (int q = visitors.first; q < visitors.last; ++q) own(q, false, true);
  }

  // The keys that this worker reads next: of the tile's next split, or of its next tile.
  void find_keys_ahead(int32_t split) {
    const bool here = split + 1 < work_.last_split;
    const AttentionWork& work = here ? work_ : next_;
    const int32_t base = (here ? split + 1 : work.first_split) * kSplitBlocks;
    const int32_t* const table = block_table(step_, args_.kv.group, plan_.queries[work.first_query].row) + base;
    const int32_t head = here ? kv_head_ : next_head_;
    const int32_t last = step_.positions[plan_.queries[work.first_query].token] / kBlockSize - base;
    for (int b = 0; b < kSplitBlocks; ++b) keys_ahead_[b] = key_block(args_.kv, table[b <= last ? b : 0], head);
  }

  // One query's value rows [from, to), where it sees the keys [first, last] of the split.
  void add_own_values(int q, int first, int last, int from, int to) {
    const uint8_t* const kept_first = rows_[from];
    const uint8_t* const kept_last = rows_[to - 1];
    if constexpr (C::kValueKeys == 2 && !C::kScales) {  // a code is finite whatever it is, and its weight is zero
      if (from == first / 2 && first % 2 == 1) rows_[from] = without_key(rows_[from], 0, s_.masked);
      if (to - 1 == last / 2 && last % 2 == 0) rows_[to - 1] = without_key(rows_[to - 1], 1, s_.masked + 2 * dim_);
    }
    add_rows(q * group_, group_, from, to);
    rows_[from] = kept_first;
    rows_[to - 1] = kept_last;
  }

  // A copy of a pair's row [dim][2] with +0 for one of the two keys.
  const uint8_t* without_key(const uint8_t* row, int key, uint16_t* copy) const {
    std::memcpy(copy, row, static_cast<size_t>(dim_) * 4);
    for (int64_t d = 0; d < dim_; ++d) copy[2 * d + key] = 0;
    return reinterpret_cast<const uint8_t*>(copy);
  }

  void add_rows(int vector, int vectors, int from, int to) {
    in_register_tiles(vectors, [&]<int M>(int v) {
      const uint8_t* const weights = s_.weights + (vector + v) * kSplitKeys * C::kWeightBytes;
      float* const acc = s_.split_acc + (vector + v) * dim_;
      if (fetches_)
        value_vectors<C, M, true>(weights, rows_, keys_ahead_, from, to, dim_, acc);
      else
        value_vectors<C, M, false>(weights, rows_, nullptr, from, to, dim_, acc);
    });
  }

  // Merge a split into the vectors [v, v + count): its acc rows `stride` apart, its maxima and sums, of which 16 can be read.
  void merge(int v, int count, bool first, const float* split_acc, int64_t stride, const float* split_max, const float* split_sum) {
    if (first) {
      for (int i = 0; i < count; ++i)
        std::memcpy(s_.acc + (v + i) * dim_, split_acc + i * stride, static_cast<size_t>(dim_) * sizeof(float));
      std::memcpy(s_.max + v, split_max, static_cast<size_t>(count) * sizeof(float));
      std::memcpy(s_.sum + v, split_sum, static_cast<size_t>(count) * sizeof(float));
      return;
    }
    for (int lane = 0; lane < count; ++lane) {
      const int at = lane % 16;
      if (at == 0) merge_sums(v + lane, count - lane, split_max + lane, split_sum + lane);
      float* const acc = s_.acc + (v + lane) * dim_;
      const float* const more = split_acc + lane * stride;
      const vf16 before = set1(before_[at]), now = set1(now_[at]);
      for (int64_t d = 0; d < dim_; d += 16) store(acc + d, fma(load(acc + d), before, load(more + d) * now));
    }
  }

  // Maxima and sums of up to 16 vectors, and what their accumulators are multiplied by.
  void merge_sums(int v, int count, const float* split_max, const float* split_sum) {
    const vf16 max = load(s_.max + v), more = load(split_max), most = NORIA_TIER::max(max, more);
    const vf16 before = exp2_not_positive(max - most), now = exp2_not_positive(more - most);
    store(before_, before);
    store(now_, now);
    store_part(s_.sum + v, fma(load(s_.sum + v), before, load(split_sum) * now), count < 16 ? count : 16);
    store_part(s_.max + v, most, count < 16 ? count : 16);
  }

  float* partial(int v, int32_t split) const {
    const int64_t index = (static_cast<int64_t>(kv_head_) * work_.splits + split - work_.base_split) * work_.queries * group_ + v;
    return plan_.partials + work_.partials + index * partial_width(args_.kv.dim);
  }
  void save_partial(int v, int32_t split) const {
    float* const to = partial(v, split);
    std::memcpy(to, s_.split_acc + v * dim_, static_cast<size_t>(dim_) * sizeof(float));
    to[dim_] = s_.split_max[v];
    to[dim_ + 1] = s_.split_sum[v];
  }
  // Whoever computes the last of the splits merges them all.
  bool last_to_arrive() const {
    uint32_t* const counter = &plan_.counters[work_.counter + kv_head_];
    if (__atomic_add_fetch(counter, 1, __ATOMIC_ACQ_REL) < static_cast<uint32_t>(work_.splits)) return false;
    __atomic_store_n(counter, 0, __ATOMIC_RELAXED);  // for the next layer
    return true;
  }
  void merge_partials() {
    for (int32_t split = work_.base_split; split < work_.base_split + work_.splits; ++split) {
      const Visitors visitors = visitors_of(split);
      for (int q = visitors.first; q < visitors.last; ++q)
        for (int v = q * group_; v < (q + 1) * group_; ++v) {
          const float* const from = partial(v, split);
          const float most[16] = {from[dim_]}, sum[16] = {from[dim_ + 1]};
          merge(v, 1, split == first_split_of(q), from, dim_, most, sum);
        }
    }
  }

  void write_out() const {
    const int64_t width = static_cast<int64_t>(args_.heads) * dim_, columns = static_cast<int64_t>(group_) * dim_;
    const int64_t column = static_cast<int64_t>(kv_head_) * columns;
    for (int q = 0; q < work_.queries; ++q) {
      const int64_t token = token_of(q);
      float* const out = args_.out + token * width + column;
      for (int h = 0; h < group_; ++h) {
        const int v = q * group_ + h;
        for (int64_t d = 0; d < dim_; d += 16) store(out + h * dim_ + d, load(s_.acc + v * dim_ + d) / set1(s_.sum[v]));
      }
      if (args_.pairs != nullptr) round_row_bf16(out, columns, args_.pairs + token * padded_pairs(width) + column);
      if (args_.quantized.codes != nullptr) quantize_row(out, columns, part_of(args_.quantized, token * width + column), 0);
    }
  }

  const AttentionArgs& args_;
  const AttentionPlan& plan_;
  const AttentionWork& work_;
  const AttentionWork& next_;  // what the worker will probably do then
  const StepView& step_;
  const AttentionQuery* const queries_;  // positions ascend: of one row, or in the order of their positions
  const int32_t kv_head_, next_head_;
  const int group_;
  const int64_t dim_;
  const bool fetches_;  // one register tile computes faster than the memory answers
  const AttentionScratch s_;
  static constexpr int kRows = rows_a_block<C>;
  const uint8_t* rows_[kSplitBlocks * kRows];  // value rows of the split at hand
  const uint8_t* keys_ahead_[kSplitBlocks];
  alignas(64) float before_[16], now_[16];  // of merge_sums
};

// Tile `tile` of plan.work_count * kv_heads. `next` is the tile that the worker will probably compute then.
inline void attention_tile(const AttentionArgs& args, const StepView& step, const AttentionPlan& plan, int64_t tile, int64_t next,
                           void* memory) {
  const AttentionWork& work = plan.work[tile / args.kv.kv_heads];
  const AttentionWork& next_work = plan.work[next / args.kv.kv_heads];
  const auto head = static_cast<int32_t>(tile % args.kv.kv_heads), next_head = static_cast<int32_t>(next % args.kv.kv_heads);
  switch (args.kv.type) {
    case KVType::bf16:
      return AttentionTile<Bf16Cache>(args, step, plan, work, head, next_work, next_head, memory).run();
    case KVType::f32:
      return AttentionTile<F32Cache>(args, step, plan, work, head, next_work, next_head, memory).run();
    case KVType::int8:
      return AttentionTile<Int8Cache>(args, step, plan, work, head, next_work, next_head, memory).run();
  }
}

}  // namespace noria::NORIA_TIER
