// Attention within a layer: which keys, queries and threads meet. The arithmetic is the variant's (attention.h).
#include "layer_run.h"

#include <math.h>
#include <string.h>

#include <algorithm>

namespace {

int64_t head_bytes(int32_t kv_type, int32_t padded) {
  return kv_type == KV_Q8_0 ? padded / 32 * 34 : padded * (kv_type == KV_F16 ? 2 : 4);
}

}  // namespace

void LayerRun::rope_head(float* head, const Norm& norm, int32_t row) {
  if (norm.weight) k_.rms_norm(head, &norm, head);
  k_.rope(head, batch_.rope + (int64_t)row * plan_.rope_dim, plan_.rope_dim, plan_.rope_kind);
}

// One head's K (rotated) and V into the cache.
void LayerRun::append(int32_t row, int32_t head) {
  int64_t token_bytes = head_bytes(kv_.type, s_.head_pad);
  int64_t slot = batch_.slots[row], block = slot / kv_.block_size;
  int64_t at = ((block * plan_.num_kv_heads + head) * kv_.block_size + slot % kv_.block_size) * token_bytes;
  const float* k = qkv_ + (int64_t)row * s_.qkv + plan_.q.rows + (int64_t)head * plan_.head_dim;
  float padded[kMaxHeadDim] = {};
  memcpy(padded, k, plan_.head_dim * sizeof(float));
  rope_head(padded, plan_.k_norm, row);
  k_.store_kv(padded, s_.head_pad, kv_.type, kv_.k + at);
  memcpy(padded, k + plan_.k.rows, plan_.head_dim * sizeof(float));
  k_.store_kv(padded, s_.head_pad, kv_.type, kv_.v + at);
}

void LayerRun::prepare_query(int32_t row, int32_t head, float* out) {
  memcpy(out, qkv_ + (int64_t)row * s_.qkv + (int64_t)head * plan_.head_dim, plan_.head_dim * sizeof(float));
  for (int32_t i = plan_.head_dim; i < s_.head_pad; i++) out[i] = 0;
  rope_head(out, plan_.q_norm, row);
}

KvHead LayerRun::kv_head(const SequenceRows& seq, int32_t head) const {
  int64_t token_bytes = head_bytes(kv_.type, s_.head_pad);
  int64_t head_bytes = token_bytes * kv_.block_size;
  return {kv_.k + head * head_bytes, kv_.v + head * head_bytes, head_bytes * plan_.num_kv_heads, token_bytes,
          seq.block_table, kv_.type, kv_.block_size, s_.head_pad};
}

// `count` of the (row, head of the group) pairs of a sequence and KV head, from `first`, row after row.
void LayerRun::attend_unit(Private& own, const SequenceRows& seq, int32_t head, int32_t split, int32_t first,
                           int32_t count) {
  int32_t group = plan_.num_heads / plan_.num_kv_heads;
  const float* queries[kAttentionQueries];
  float* out[kAttentionQueries];
  float maximum[kAttentionQueries], sum[kAttentionQueries];
  int32_t last[kAttentionQueries];
  int32_t first_row = first / group, last_row = (first + count - 1) / group;
  int32_t begin = 0, end = seq.start_position + last_row + 1;
  if (plan_.window > 0) begin = std::max(0, seq.start_position + first_row - plan_.window + 1);
  if (decode_) {
    begin = std::max(begin, split * kSplitKeys);
    // The unit that reads the newest key writes it first. Units that divide a group's heads write the same bytes.
    if (end <= (split + 1) * kSplitKeys) append(seq.row_start, head);
    end = std::min(end, (split + 1) * kSplitKeys);
  }
  begin = begin / kAttentionKeys * kAttentionKeys;
  for (int32_t i = 0; i < count; i++) {
    int32_t row = seq.row_start + (first + i) / group, query_head = head * group + (first + i) % group;
    if (decode_) {
      float* query = own.queries + (int64_t)i * s_.head_pad;
      prepare_query(row, query_head, query);
      queries[i] = query;
    } else {
      queries[i] = queries_ + ((int64_t)row * plan_.num_heads + query_head) * s_.head_pad;
    }
    last[i] = seq.start_position + (first + i) / group;
    out[i] = partial_ + (((int64_t)row * s_.splits + split) * plan_.num_heads + query_head) * s_.head_pad;
  }
  KvHead kv = kv_head(seq, head);
  k_.attention(&kv, queries, last, count, begin, std::max(begin, end), plan_.window, plan_.scale, plan_.softcap, out,
               maximum, sum, own.scratch);
  for (int32_t i = 0; i < count; i++) {
    int32_t row = seq.row_start + (first + i) / group, query_head = head * group + (first + i) % group;
    int64_t at = ((int64_t)row * s_.splits + split) * plan_.num_heads + query_head;
    maximum_[at] = maximum[i];
    sum_[at] = sum[i];
  }
}

void LayerRun::attend(Private& own) {
  int32_t group = plan_.num_heads / plan_.num_kv_heads;
  // With fewer KV heads than threads, a decode step's group is divided; each query's arithmetic stays the same.
  int32_t tile = std::min(group, kAttentionQueries);
  if (decode_ && plan_.num_kv_heads * batch_.num_sequences < s_.threads)
    tile = std::max(1, group * plan_.num_kv_heads * batch_.num_sequences / s_.threads);
  if (!decode_) tile = std::max(1, kAttentionQueries / group) * tile;
  int64_t total = 0;
  for (int32_t i = 0; i < batch_.num_sequences; i++) {
    const SequenceRows& seq = batch_.sequences[i];
    total += (int64_t)((seq.num_rows * group + tile - 1) / tile) * plan_.num_kv_heads * s_.splits;
  }
  engine_.for_units(kAttention, own.thread, total, [&](int64_t unit) {
    const SequenceRows* seq = batch_.sequences;
    int64_t tiles;
    for (;; seq++) {
      tiles = (seq->num_rows * group + tile - 1) / tile;
      if (unit < tiles * plan_.num_kv_heads * s_.splits) break;
      unit -= tiles * plan_.num_kv_heads * s_.splits;
    }
    int32_t first = (int32_t)(tiles - 1 - unit % tiles) * tile;  // the longest first
    int32_t split = (int32_t)(unit / tiles % s_.splits), head = (int32_t)(unit / tiles / s_.splits);
    attend_unit(own, *seq, head, split, first, std::min(tile, seq->num_rows * group - first));
  });
}

// The splits of each head's keys, put together.
void LayerRun::merge_heads(Activations& x, int32_t row, int32_t forms) {
  float* to = x.f32 + row * x.stride;
  for (int32_t head = 0; head < plan_.num_heads; head++, to += plan_.head_dim) {
    int64_t at = (int64_t)row * s_.splits * plan_.num_heads + head;
    float largest = maximum_[at], total = 0;
    for (int32_t i = 1; i < s_.splits; i++) largest = std::max(largest, maximum_[at + i * plan_.num_heads]);
    memset(to, 0, plan_.head_dim * sizeof(float));
    for (int32_t i = 0; i < s_.splits; i++, at += plan_.num_heads) {
      if (sum_[at] == 0) continue;  // no key of this split is in the window
      float weight = s_.splits == 1 ? 1.0f : expf(maximum_[at] - largest);
      total += weight * sum_[at];
      k_.add_scaled(to, partial_ + at * s_.head_pad, weight, plan_.head_dim);
    }
    for (int32_t i = 0; i < plan_.head_dim; i++) to[i] /= total;
  }
  int32_t width = plan_.num_heads * plan_.head_dim;
  k_.quantise(&x, forms, row, 0, width);
}
