// Runs row-local stages (rows_args.h) over a range of rows.
#pragma once
#include "embedding.h"
#include "kv_write.h"
#include "norm.h"
#include "quantize.h"
#include "rope.h"
#include "rows_args.h"
#include "step.h"

namespace noria::NORIA_TIER {

inline void run_gather(const GatherStage& s, const StepView& step, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; ++r) {
    const int32_t from = r < step.logit_count ? step.logit_rows[r] : step.hidden_rows[r - step.logit_count];
    std::memcpy(s.y + r * s.width, s.x + from * s.width, static_cast<size_t>(s.width) * sizeof(float));
  }
}

inline void run_hidden(const HiddenStage& s, const StepView& step, int64_t first, int64_t last) {
  if (step.drawn.hidden == nullptr) return;
  for (int64_t r = first < step.logit_count ? step.logit_count : first; r < last; ++r)
    std::memcpy(step.drawn.hidden + (r - step.logit_count) * s.width, s.x + r * s.width, static_cast<size_t>(s.width) * sizeof(float));
}

inline void run_norm(const NormStage& s, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; ++r) {
    const float* x = s.x + r * s.width;
    if (s.residual != nullptr) {
      add_row(s.residual + r * s.width, x, s.width);
      x = s.residual + r * s.width;
    }
    rms_norm_row(x, s.weight, s.eps, s.width, s.normed + r * s.width);
  }
}

template <class Activate>
void gated_row(const float* gate, const float* up, float* y, int64_t width, Activate activate) {
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) store(y + i, activate(load(gate + i)) * load(up + i));
  if (i < width) {
    const int rest = static_cast<int>(width - i);
    store_part(y + i, activate(load_part(gate + i, rest)) * load_part(up + i, rest), rest);
  }
}

inline void run_gated(const GatedStage& s, const float* gate, int64_t width, float* y) {
  if (s.activation == Activation::silu)
    gated_row(gate, gate + s.width, y, width, [](vf16 x) { return silu(x); });
  else
    gated_row(gate, gate + s.width, y, width, [](vf16 x) { return gelu_tanh(x); });
}

// Straight to codes, a piece of a row at a time: the floats never leave the nearest cache.
inline void run_gated_to_codes(const GatedStage& s, int64_t row) {
  constexpr int64_t kPiece = 16 * kActivationGroup;  // what is quantised at once
  alignas(64) float piece[kPiece];
  const float* const gate = s.gate_up + row * 2 * s.width;
  for (int64_t at = 0; at < s.width; at += kPiece) {
    const int64_t width = s.width - at < kPiece ? s.width - at : kPiece;
    run_gated(s, gate + at, width, piece);
    quantize_row(piece, width, part_of(s.quantized, row * padded_codes(s.width) + at), 0);
  }
}

inline void run_gated(const GatedStage& s, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; ++r)
    if (s.y == nullptr)
      run_gated_to_codes(s, r);
    else
      run_gated(s, s.gate_up + r * 2 * s.width, s.width, s.y + r * s.width);
}

inline void run_head_norm(const HeadNormStage& s, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; ++r)
    for (int32_t head = 0; head < s.heads + s.kv_heads; ++head) {  // the key heads follow the query heads
      float* const x = s.qkv + r * s.stride + head * s.dim;
      rms_norm_row(x, head < s.heads ? s.q_weight : s.k_weight, s.eps, s.dim, x);
    }
}

inline void run_rope(const RopeStage& s, const StepView& step, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; ++r) {
    const int64_t at = step.positions[r] * s.half;
    for (int32_t head = 0; head < s.heads + s.kv_heads; ++head)
      rope_head(s.qkv + r * s.stride + head * s.dim, s.cosines + at, s.sines + at, s.half);
  }
}

inline void run_write_kv(const WriteKVStage& s, const StepView& step, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; ++r) {
    const float* const k = s.qkv + r * s.stride + static_cast<int64_t>(s.heads) * s.kv.dim;
    const float* const v = k + static_cast<int64_t>(s.kv.kv_heads) * s.kv.dim;
    write_token(s.kv, block_table(step, s.kv.group, step.token_rows[r]), step.positions[r], k, v);
  }
}

inline void run_softcap(const SoftcapStage& s, int64_t first, int64_t last) {
  float* const end = s.x + last * s.width;
  float* x = s.x + first * s.width;
  for (; x + 16 <= end; x += 16) store(x, soft_capped(load(x), s.cap));
  if (x < end) {
    const int rest = static_cast<int>(end - x);
    store_part(x, soft_capped(load_part(x, rest), s.cap), rest);
  }
}

inline void run_stage(const Stage& stage, const StepView& step, int64_t first, int64_t last) {
  switch (stage.kind) {
    case StageKind::embed: {
      EmbedArgs args = stage.embed.args;
      args.ids = step.tokens;
      return embed_rows(args, first, last);
    }
    case StageKind::gather:
      return run_gather(stage.gather, step, first, last);
    case StageKind::norm:
      return run_norm(stage.norm, first, last);
    case StageKind::add:
      for (int64_t r = first; r < last; ++r) add_row(stage.add.x + r * stage.add.width, stage.add.y + r * stage.add.width, stage.add.width);
      return;
    case StageKind::gated:
      return run_gated(stage.gated, first, last);
    case StageKind::head_norm:
      return run_head_norm(stage.head_norm, first, last);
    case StageKind::rope:
      return run_rope(stage.rope, step, first, last);
    case StageKind::write_kv:
      return run_write_kv(stage.write_kv, step, first, last);
    case StageKind::quantize:
      return quantize_rows(stage.quantize.x, stage.quantize.width, stage.quantize.width, stage.quantize.out, first, last);
    case StageKind::round_bf16:
      return round_rows_bf16(stage.round_bf16.x, stage.round_bf16.width, stage.round_bf16.width, stage.round_bf16.pairs, first, last);
    case StageKind::softcap:
      return run_softcap(stage.softcap, first, last);
    case StageKind::hidden:
      return run_hidden(stage.hidden, step, first, last);
  }
}

inline void run_stages(const Stage* stages, int64_t count, const StepView& step, int64_t first, int64_t last) {
  for (int64_t i = 0; i < count; ++i) run_stage(stages[i], step, first, last);
}

}  // namespace noria::NORIA_TIER
