// One draw: a row of logits to a token and its log probabilities, as noria.backends.base.Draws documents it.
//
//   logits --- raw: log sum exp, most likely tokens --------------------------------------------► logprob, top tokens
//      `-- copy: penalties, bias, bans, mask --► (x - max) / temperature --► top_k, top_p, min_p --► arg max of value + noise ► token
//
// No sort of the vocabulary: the k best are collected behind a rising threshold, the nucleus is found by a weighted quick select
// among the tokens that are likely enough to be in it, and noise is made only where it can still win.
//
// A logit that is NaN counts as -inf, +inf as 3e38. So every result is a token of the vocabulary and a finite number.
#pragma once
#include "philox.h"
#include "step.h"

namespace noria::NORIA_TIER {

constexpr float kLargestLogit = 3.0e38f;
constexpr float kLowestLogprob = -1e9f;

inline vf16 sanitised(vf16 x) { return min(select(less(set1(-kInfinity), x), x, set1(-kInfinity)), set1(kLargestLogit)); }
inline float sanitised(float x) { return x > -kInfinity ? (x < kLargestLogit ? x : kLargestLogit) : -kInfinity; }

// Calls f(i, the 16 values from i on, sanitised); what lies behind the end is -inf.
template <class F>
inline void for_each_lane_group(const float* x, int64_t count, F f) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) f(i, sanitised(load(x + i)));
  if (i < count) f(i, sanitised(load_part(x + i, static_cast<int>(count - i), -kInfinity)));
}

struct Candidate {
  float value;
  int32_t token;
  float weight;  // exp(value), where a step needs it
};
inline bool before(Candidate a, Candidate b) { return a.value > b.value || (a.value == b.value && a.token < b.token); }

// -- scans ------------------------------------------------------------------------------------------------------------------

// The largest value and its lowest id. {-inf, 0} if there is nothing above -inf.
inline Candidate arg_max(const float* x, int64_t count) {
  vf16 best = set1(-kInfinity);
  vf16 where = bits_to_float(set1_i32(0));
  alignas(64) int32_t first[16];
  for (int i = 0; i < 16; ++i) first[i] = i;
  vi16 index = load_i32(first);
  for_each_lane_group(x, count, [&](int64_t, vf16 value) {
    const m16 better = less(best, value);
    best = select(better, value, best);
    where = select(better, bits_to_float(index), where);
    index = index + set1_i32(16);
  });
  float values[16];
  int32_t tokens[16];
  store(values, best);
  store_i32(tokens, float_to_bits(where));
  Candidate result{-kInfinity, 0, 0.0f};
  for (int i = 0; i < 16; ++i) {
    const Candidate c{values[i], tokens[i], 0.0f};
    if (c.value > -kInfinity && (result.value == -kInfinity || before(c, result))) result = c;
  }
  return result;
}

// Sum of exp(x - shift): 16 lanes in ascending order, then sum_lanes.
inline float sum_exp(const float* x, int64_t count, float shift) {
  vf16 sum = zero();
  for_each_lane_group(x, count, [&](int64_t, vf16 value) { sum = sum + exp(value - set1(shift)); });
  return sum_lanes(sum);
}

// Calls f(token, value) in ascending order for values above a threshold that f may raise; whole stretches below it are skipped.
template <class F>
inline void scan_above(const float* x, int64_t count, const float& threshold, F f) {
  constexpr int64_t kStretch = 64;
  for (int64_t at = 0; at < count; at += kStretch) {
    const int64_t size = count - at < kStretch ? count - at : kStretch;
    vf16 highest = set1(-kInfinity);
    for_each_lane_group(x + at, size, [&](int64_t, vf16 value) { highest = max(highest, value); });
    if (!(max_lanes(highest) > threshold)) continue;
    for (int64_t i = at; i < at + size; ++i) {
      const float value = sanitised(x[i]);
      if (value > threshold) f(static_cast<int32_t>(i), value);
    }
  }
}

// -- selection --------------------------------------------------------------------------------------------------------------

inline void swap(Candidate& a, Candidate& b) {
  const Candidate kept = a;
  a = b;
  b = kept;
}

// Reorders [first, last) (not empty) so that all before the returned place come before the candidate there, all others after.
inline int64_t partition(Candidate* c, int64_t first, int64_t last) {
  const int64_t middle = first + (last - first) / 2;
  if (before(c[middle], c[first])) swap(c[middle], c[first]);
  if (before(c[last - 1], c[first])) swap(c[last - 1], c[first]);
  if (before(c[last - 1], c[middle])) swap(c[last - 1], c[middle]);
  swap(c[middle], c[last - 1]);
  const Candidate pivot = c[last - 1];
  int64_t place = first;
  for (int64_t i = first; i < last - 1; ++i)
    if (before(c[i], pivot)) swap(c[i], c[place++]);
  swap(c[place], c[last - 1]);
  return place;
}

// Puts the k best of `count` first, in no order.
inline void select_best(Candidate* c, int64_t count, int64_t k) {
  int64_t first = 0, last = count;
  while (first < last && k > first && k < last) {
    const int64_t place = partition(c, first, last);
    if (place < k)
      first = place + 1;
    else
      last = place;
  }
}

// Heap sort, best first: no recursion, no worst case.
inline void sort_best_first(Candidate* c, int64_t count) {
  const auto sift = [c](int64_t root, int64_t size) {
    for (int64_t child; (child = 2 * root + 1) < size; root = child) {
      if (child + 1 < size && before(c[child], c[child + 1])) ++child;
      if (!before(c[root], c[child])) return;
      swap(c[root], c[child]);
    }
  };
  for (int64_t i = count / 2; i-- > 0;) sift(i, count);
  for (int64_t i = count; i-- > 1;) {
    swap(c[0], c[i]);
    sift(0, i);
  }
}

// The k best values of x, in no order; c has room for `candidate_room(k, count)`. Returns how many there are.
inline int64_t candidate_room(int64_t k, int64_t count) { return k + 1024 < count ? k + 1024 : count; }
inline int64_t collect_best(const float* x, int64_t count, int64_t k, Candidate* c) {
  const int64_t room = candidate_room(k, count);
  int64_t size = 0;
  float threshold = -kInfinity;
  scan_above(x, count, threshold, [&](int32_t token, float value) {
    if (size == room) {
      select_best(c, size, k);
      size = k;
      threshold = c[0].value;
      for (int64_t i = 1; i < k; ++i) threshold = c[i].value < threshold ? c[i].value : threshold;
      if (!(value > threshold)) return;  // a later token of equal value loses the tie
    }
    c[size++] = {value, token, 0.0f};
  });
  if (size <= k) return size;
  select_best(c, size, k);
  return k;
}

inline void weigh(Candidate* c, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) {
    float lanes[16];
    for (int64_t j = 0; j < 16; ++j) lanes[j] = i + j < count ? c[i + j].value : -kInfinity;
    store(lanes, exp(load(lanes)));
    for (int64_t j = 0; j < 16 && i + j < count; ++j) c[i + j].weight = lanes[j];
  }
}

// Puts the smallest set of best candidates whose weights reach `mass` first, in no order, and returns its size.
inline int64_t select_mass(Candidate* c, int64_t count, double mass) {
  int64_t first = 0, last = count;
  double reached = 0.0;  // by [0, first): all of it is in the set
  while (first < last) {
    const int64_t place = partition(c, first, last);
    double better = reached;
    for (int64_t i = first; i < place; ++i) better += static_cast<double>(c[i].weight);
    if (better >= mass) {
      last = place;
    } else {
      reached = better + static_cast<double>(c[place].weight);
      first = place + 1;
      if (reached >= mass) return first;
    }
  }
  return first;
}

// Keeps the candidates that hold(c) is true for, in their order.
template <class F>
inline int64_t keep_where(Candidate* c, int64_t count, F hold) {
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i)
    if (hold(c[i])) c[kept++] = c[i];
  return kept;
}

// -- one draw ---------------------------------------------------------------------------------------------------------------

// A worker's memory: an adjusted copy of the row, and candidates.
struct SamplerScratch {
  float* row;             // [vocab]
  Candidate* candidates;  // [vocab]
};
inline int64_t sampler_scratch_bytes(int64_t vocab) { return (vocab + 64) * static_cast<int64_t>(sizeof(float) + sizeof(Candidate)); }
inline SamplerScratch sampler_scratch(int64_t vocab, void* memory) {
  auto* row = static_cast<float*>(memory);
  return {row, reinterpret_cast<Candidate*>(row + (vocab + 15) / 16 * 16)};
}

class Draw {
 public:
  Draw(const float* logits, int64_t vocab, const DrawsView& draws, int64_t d, const SamplerScratch& scratch)
      : logits_(logits), vocab_(vocab), draws_(draws), d_(d), s_(scratch) {}

  void run(const DrawnView& out) {
    const Candidate top = arg_max(logits_, vocab_);
    const int32_t token = draws_.target[d_] >= 0 ? draws_.target[d_] : choose(top);
    out.token[d_] = token;
    out.logprob[d_] = 0.0f;
    for (int64_t i = 0; i < out.width; ++i) {
      out.top_tokens[d_ * out.width + i] = -1;
      out.top_logprobs[d_ * out.width + i] = 0.0f;
    }
    if (draws_.num_top[d_] >= 0) report(top, token, out);
  }

 private:
  void report(Candidate top, int32_t token, const DrawnView& out) {
    const float log_sum = log_scalar(sum_exp(logits_, vocab_, top.value));
    const auto logprob = [&](float logit) {
      const float x = sanitised(logit) - top.value - log_sum;
      return x > kLowestLogprob ? x : kLowestLogprob;
    };
    out.logprob[d_] = logprob(logits_[token]);
    const int64_t wanted = draws_.num_top[d_];
    const int64_t found = wanted > 0 ? collect_best(logits_, vocab_, wanted, s_.candidates) : 0;
    sort_best_first(s_.candidates, found);
    for (int64_t i = 0; i < found; ++i) {
      out.top_tokens[d_ * out.width + i] = s_.candidates[i].token;
      out.top_logprobs[d_ * out.width + i] = logprob(s_.candidates[i].value);
    }
  }

  int32_t choose(Candidate top) {
    const bool adjusted = adjust();
    const float* const row = adjusted ? s_.row : logits_;
    if (adjusted) top = arg_max(row, vocab_);
    const float temperature = draws_.temperature[d_];
    if (temperature == 0.0f || top.value == -kInfinity) return top.token;
    const auto scaled = [&](vf16 x) { return (x - set1(top.value)) / set1(temperature); };
    for_each_lane_group(row, vocab_, [&](int64_t i, vf16 x) {
      if (i + 16 <= vocab_)
        store(s_.row + i, scaled(x));
      else
        store_part(s_.row + i, scaled(x), static_cast<int>(vocab_ - i));
    });
    const NoiseKey key{draws_.seed[d_], draws_.position[d_], draws_.stream[d_]};
    const int64_t candidates = filter();
    return candidates < 0 ? noisiest_of_all(key, top.token) : noisiest_candidate(key, candidates);
  }

  // A copy of the row with penalties, bias, bans and mask in s_.row; false if there are none.
  bool adjust() {
    const int64_t h = draws_.history_offsets[d_], h_end = draws_.history_offsets[d_ + 1];
    const int64_t b = draws_.bias_offsets[d_], b_end = draws_.bias_offsets[d_ + 1];
    const int64_t n = draws_.ban_offsets[d_], n_end = draws_.ban_offsets[d_ + 1];
    const float repetition = draws_.repetition[d_], presence = draws_.presence[d_], frequency = draws_.frequency[d_];
    const bool penalties = h < h_end && (repetition != 1.0f || presence != 0.0f || frequency != 0.0f);
    const bool masked = draws_.mask != nullptr && draws_.mask[d_] >= 0;
    if (!penalties && b == b_end && n == n_end && !masked) return false;
    std::memcpy(s_.row, logits_, static_cast<size_t>(vocab_) * sizeof(float));
    for (int64_t i = h; penalties && i < h_end; ++i) {
      float& x = s_.row[draws_.history_tokens[i]];
      const auto count = static_cast<float>(draws_.history_counts[i]);
      x = x > 0.0f ? x / repetition : x * repetition;
      if (count > 0.0f) x -= presence;
      x -= frequency * count;
    }
    for (int64_t i = b; i < b_end; ++i) s_.row[draws_.bias_tokens[i]] += draws_.bias_values[i];
    for (int64_t i = n; i < n_end; ++i) s_.row[draws_.ban_tokens[i]] = -kInfinity;
    if (masked) apply_mask(draws_.masks + draws_.mask[d_] * draws_.mask_words);
    return true;
  }

  // Tokens whose bit is 0 cannot be drawn. Most words of a mask are all zeros or all ones.
  void apply_mask(const uint32_t* mask) {
    for (int64_t at = 0; at < vocab_; at += 32) {
      const uint32_t word = mask[at / 32];
      if (word == UINT32_MAX) continue;
      const int64_t size = vocab_ - at < 32 ? vocab_ - at : 32;
      for (int64_t i = 0; i < size; ++i) s_.row[at + i] = (word >> i & 1) != 0 ? s_.row[at + i] : -kInfinity;
    }
  }

  // The candidates that top_k, top_p and min_p leave of s_.row (scaled: the largest is 0); -1 if there is no filter.
  int64_t filter() {
    const int64_t top_k = draws_.top_k[d_];
    const float top_p = draws_.top_p[d_], min_p = draws_.min_p[d_];
    const bool limits_count = top_k > 0 && top_k < vocab_, limits_mass = top_p < 1.0f;
    if (!limits_count && !limits_mass && !(min_p > 0.0f)) return -1;
    Candidate* const c = s_.candidates;
    int64_t count;
    double total = 0.0;
    if (limits_count) {
      count = collect_best(s_.row, vocab_, top_k, c);
      sort_best_first(c, count);  // so that the sum below has one order
      weigh(c, count);
      for (int64_t i = 0; i < count; ++i) total += static_cast<double>(c[i].weight);
    } else {
      if (limits_mass) total = static_cast<double>(sum_exp(s_.row, vocab_, 0.0f));
      count = collect_likely(total, top_p, min_p);
      weigh(c, count);
    }
    if (limits_mass) {
      const int64_t kept = select_mass(c, count, static_cast<double>(top_p) * total);
      count = kept > 0 ? kept : 1;
    }
    return min_p > 0.0f ? keep_where(c, count, [min_p](Candidate x) { return x.weight >= min_p; }) : count;
  }

  // Tokens that can be in the nucleus and above min_p. What comes after a token of the nucleus and that token itself hold more
  // than (1 - top_p) of the mass, each of those at most vocab tokens no more than it: so its weight is above (1 - top_p) total / vocab.
  int64_t collect_likely(double total, float top_p, float min_p) {
    const float by_mass =
        top_p < 1.0f ? static_cast<float>((1.0 - static_cast<double>(top_p)) * total / static_cast<double>(vocab_)) : 0.0f;
    const float lowest = by_mass > min_p ? by_mass : min_p;
    const float threshold = lowest < 1.0f ? log_scalar(lowest) - 0.01f : -0.01f;  // 0.01: no loss by rounding
    int64_t count = 0;
    scan_above(s_.row, vocab_, threshold, [&](int32_t token, float value) { s_.candidates[count++] = {value, token, 0.0f}; });
    return count;
  }

  // Arg max of value + noise over the whole row. Of most stretches of 64 tokens the best value, or the largest of their random words,
  // shows that none of them can win: their noise is not made.
  int32_t noisiest_of_all(const NoiseKey& key, int32_t likeliest) {
    int32_t tokens[16] = {likeliest};
    alignas(64) float noise[64];
    noise16(key, tokens, noise);
    Candidate best{s_.row[likeliest] + noise[0], likeliest, 0.0f};
    for (int64_t at = 0; at < vocab_; at += 64) {
      const int64_t size = vocab_ - at < 64 ? vocab_ - at : 64;
      vf16 highest = set1(-kInfinity);
      for_each_lane_group(s_.row + at, size, [&](int64_t, vf16 value) { highest = max(highest, value); });
      const float needed = best.value - max_lanes(highest);
      if (needed > kMostNoise) continue;
      vi16 words[4];
      words64(key, at / 64, words);
      if (largest_word(words) < least_word(needed)) continue;
      noise64(words, noise);
      for (int64_t i = 0; i < size; ++i) {
        const Candidate c{s_.row[at + i] + noise[i], static_cast<int32_t>(at + i), 0.0f};
        if (before(c, best)) best = c;
      }
    }
    return best.token;
  }

  int32_t noisiest_candidate(const NoiseKey& key, int64_t count) {
    Candidate best{-kInfinity, s_.candidates[0].token, 0.0f};
    for (int64_t i = 0; i < count; i += 16) {
      const int64_t size = count - i < 16 ? count - i : 16;
      int32_t tokens[16] = {};
      float noise[16];
      for (int64_t j = 0; j < size; ++j) tokens[j] = s_.candidates[i + j].token;
      noise16(key, tokens, noise);
      for (int64_t j = 0; j < size; ++j) {
        const Candidate c{s_.candidates[i + j].value + noise[j], tokens[j], 0.0f};
        if (before(c, best)) best = c;
      }
    }
    return best.token;
  }

  const float* const logits_;
  const int64_t vocab_;
  const DrawsView& draws_;
  const int64_t d_;
  const SamplerScratch s_;
};

inline void draw_tile(const float* logits, int64_t vocab, const StepView& step, int64_t d, void* memory) {
  Draw(logits, vocab, step.draws, d, sampler_scratch(vocab, memory)).run(step.drawn);
}

}  // namespace noria::NORIA_TIER
