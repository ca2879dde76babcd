// One layer over one batch: the same code runs on every thread, phase by phase, with a barrier where a phase
// reads what others wrote. With a single row, what is done to whole rows (norms, residuals, quantising) is
// done by every thread for itself: that is cheaper than a barrier.
#include <math.h>
#include <string.h>

#include <algorithm>

#include "engine.h"

namespace {

// Keys an attention unit of a decode step covers; fixed, so that results do not depend on the thread count.
constexpr int32_t kSplitKeys = 512;

enum Phase { kNorm, kQkv, kRope, kAttention, kMerge, kOutput, kFfnNorm, kRoute, kGateUp, kHidden, kDown, kResidual };

// Experts' work: rows that chose an expert, next to one another ("slots"), expert after expert.
struct Routing {
  int32_t* expert_start;  // [num_experts + 1] first slot of each
  int32_t* slot_row;      // [slots] the row that a slot computes
  int32_t* row_slot;      // [rows, used] where a row's results are
  int32_t* slot;          // [slots] their numbers
  int32_t* chosen;        // [rows, used]
  float* weight;          // [rows, used]
  float* logits;          // [rows, num_experts]
};

struct Sizes {
  int32_t rows, hidden, qkv, head_pad, splits, ffn, slots, threads;
};

class LayerRun {
 public:
  LayerRun(Engine& engine, const LayerPlan& plan, const KvLayer& kv, const BatchRows& batch, float* hidden)
      : engine_(engine), k_(*engine.kernels), plan_(plan), kv_(kv), batch_(batch), hidden_(hidden) {}

  bool prepare();
  void run(int thread);

 private:
  struct Private {
    void* scratch;
    float* queries;   // [kAttentionQueries, head_pad]
    float* residual;  // [hidden], single row only
    Activations x, heads;
  };

  size_t layout(bool take);
  template <class Fn>
  void for_rows(int phase, Fn fn);
  template <class Fn>
  void for_units(int phase, int64_t units, Fn fn);

  float* residual(Private& own, int32_t row) { return single_ ? own.residual : hidden_ + (int64_t)row * s_.hidden; }
  Activations& inputs(Private& own) { return single_ ? own.x : x_; }
  Activations& head_inputs(Private& own) { return single_ ? own.heads : heads_; }

  void norm_into(const Norm& norm, const float* from, Activations& x, int32_t row, int32_t forms);
  void add_branch(Private& own, const Norm& post_norm, int32_t row);
  void project_qkv(Private& own);
  void rope_head(float* head, const Norm& norm, int32_t row);
  void append(int32_t row, int32_t kv_head);
  void prepare_query(int32_t row, int32_t head, float* out);
  void attend(Private& own);
  void attend_unit(Private& own, const SequenceRows& seq, int32_t kv_head, int32_t split, int32_t first,
                   int32_t count);
  void merge_heads(Activations& x, int32_t row, int32_t forms);
  void project(Private& own, int phase, const Matrix& matrix, const Activations& x);
  void dense(Private& own);
  void route(Private& own, int32_t row);
  void place_slots();
  void experts(Private& own, int thread);
  void combine(int32_t row);
  KvHead kv_head(const SequenceRows& seq, int32_t head) const;

  Engine& engine_;
  const Kernels& k_;
  const LayerPlan& plan_;
  const KvLayer& kv_;
  const BatchRows& batch_;
  float* hidden_;
  Sizes s_{};
  bool single_ = false, decode_ = false;
  Activations x_{}, heads_{}, h_{};
  float *qkv_ = nullptr, *queries_ = nullptr, *partial_ = nullptr, *maximum_ = nullptr, *sum_ = nullptr;
  float *out_ = nullptr, *up_ = nullptr, *expert_out_ = nullptr;
  Routing routing_{};
  Private* own_ = nullptr;
};

int64_t head_bytes(int32_t kv_type, int32_t padded) {
  return kv_type == KV_Q8_0 ? padded / 32 * 34 : padded * (kv_type == KV_F16 ? 2 : 4);
}

template <class T>
T* take(Engine& engine, bool really, size_t& total, size_t count) {
  total += Arena::rounded(count * sizeof(T));
  return really ? static_cast<T*>(engine.arena.take(count * sizeof(T))) : nullptr;
}

Activations take_inputs(Engine& engine, bool really, size_t& total, int64_t rows, int64_t width) {
  total += activations_bytes(rows, width);
  return really ? take_activations(engine.arena, rows, width) : Activations{};
}

size_t LayerRun::layout(bool really) {
  size_t total = 0;
  const Sizes& s = s_;
  const size_t rows = s.rows, heads = plan_.num_heads;
  const int64_t head_width = (int64_t)heads * plan_.head_dim;
  const int64_t input_rows = std::max(s.rows, s.slots);
  auto floats = [&](size_t count) { return take<float>(engine_, really, total, count); };
  auto ints = [&](size_t count) { return take<int32_t>(engine_, really, total, count); };
  if (!single_) {
    x_ = take_inputs(engine_, really, total, rows, s.hidden);
    heads_ = take_inputs(engine_, really, total, rows, head_width);
  }
  h_ = take_inputs(engine_, really, total, input_rows, s.ffn);
  qkv_ = floats(rows * s.qkv);
  queries_ = floats(decode_ ? 0 : rows * heads * s.head_pad);
  partial_ = floats(rows * s.splits * heads * s.head_pad);
  maximum_ = floats(rows * s.splits * heads);
  sum_ = floats(rows * s.splits * heads);
  out_ = floats(rows * s.hidden);
  up_ = floats((size_t)input_rows * s.ffn);
  if (plan_.router.data) {
    const size_t used = rows * plan_.num_experts_used;
    routing_.expert_start = ints(plan_.num_experts + 1);
    routing_.slot_row = ints(used);
    routing_.row_slot = ints(used);
    routing_.slot = ints(used);
    expert_out_ = floats(used * s.hidden);
    routing_.chosen = ints(used);
    routing_.weight = floats(used);
    routing_.logits = floats(rows * plan_.num_experts);
  }
  own_ = take<Private>(engine_, really, total, s.threads);
  for (int32_t t = 0; t < s.threads; t++) {
    Private own{};
    own.scratch = take<uint8_t>(engine_, really, total, kScratchBytes);
    own.queries = floats((size_t)kAttentionQueries * s.head_pad);
    if (single_) {
      own.residual = floats(s.hidden);
      own.x = take_inputs(engine_, really, total, 1, s.hidden);
      own.heads = take_inputs(engine_, really, total, 1, head_width);
    }
    if (really) own_[t] = own;
  }
  return total;
}

bool LayerRun::prepare() {
  s_.rows = batch_.rows;
  s_.hidden = plan_.hidden_size;
  s_.qkv = plan_.q.rows + plan_.k.rows + plan_.v.rows;
  int32_t pad = kv_.type == KV_Q8_0 ? 32 : 8;
  s_.head_pad = (plan_.head_dim + pad - 1) / pad * pad;
  s_.ffn = plan_.gate.rows;
  s_.slots = plan_.router.data ? s_.rows * plan_.num_experts_used : 0;
  s_.threads = engine_.threads;
  single_ = s_.rows == 1;
  decode_ = true;
  int32_t context = 0;
  for (int32_t i = 0; i < batch_.num_sequences; i++) {
    const SequenceRows& seq = batch_.sequences[i];
    decode_ = decode_ && seq.num_rows == 1;
    context = std::max(context, seq.start_position + seq.num_rows);
  }
  s_.splits = decode_ ? (context + kSplitKeys - 1) / kSplitKeys : 1;
  engine_.reset_counters();
  if (!engine_.arena.reset(layout(false))) return false;
  layout(true);
  return true;
}

template <class Fn>
void LayerRun::for_units(int phase, int64_t units, Fn fn) {
  for (int64_t i = engine_.draw(phase); i < units; i = engine_.draw(phase)) fn(i);
}

// A single row: every thread. Several: each is some thread's, and all are done when this returns.
template <class Fn>
void LayerRun::for_rows(int phase, Fn fn) {
  if (single_) return fn(0);
  for_units(phase, s_.rows, [&](int64_t row) { fn((int32_t)row); });
  engine_.pool->barrier();
}

void LayerRun::norm_into(const Norm& norm, const float* from, Activations& x, int32_t row, int32_t forms) {
  k_.rms_norm(from, &norm, x.f32 + row * x.stride);
  if (forms & ~FORM_F32) k_.quantise(&x, forms, row, 0, s_.hidden);
}

// Adds a branch's output, through its post norm where there is one, to the residual stream.
void LayerRun::add_branch(Private& own, const Norm& post_norm, int32_t row) {
  float* branch = out_ + (int64_t)row * s_.hidden;
  if (post_norm.weight) {
    float* normed = static_cast<float*>(own.scratch);
    k_.rms_norm(branch, &post_norm, normed);
    branch = normed;
  }
  k_.add(residual(own, row), branch, s_.hidden);
}

void LayerRun::project_qkv(Private& own) {
  const Matrix* matrices[] = {&plan_.q, &plan_.k, &plan_.v};
  int32_t chunk = chunk_rows(s_.qkv, s_.threads, s_.rows);
  int64_t units[3], total = 0;
  for (int i = 0; i < 3; i++) total += units[i] = (matrices[i]->rows + chunk - 1) / chunk;
  for_units(kQkv, total, [&](int64_t unit) {
    int which = 0;
    float* out = qkv_;
    while (unit >= units[which]) {
      unit -= units[which];
      out += matrices[which++]->rows;
    }
    int32_t start = (int32_t)unit * chunk, end = std::min(start + chunk, matrices[which]->rows);
    multiply(engine_, *matrices[which], 0, start, end, inputs(own), nullptr, s_.rows, out, s_.qkv, own.scratch);
  });
}

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
  for_units(kAttention, total, [&](int64_t unit) {
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
  if (forms & ~FORM_F32) k_.quantise(&x, forms, row, 0, width);
}

// out_ = matrix x, all rows.
void LayerRun::project(Private& own, int phase, const Matrix& matrix, const Activations& x) {
  int32_t chunk = chunk_rows(matrix.rows, s_.threads, s_.rows);
  for_units(phase, (matrix.rows + chunk - 1) / chunk, [&](int64_t unit) {
    int32_t start = (int32_t)unit * chunk, end = std::min(start + chunk, matrix.rows);
    multiply(engine_, matrix, 0, start, end, x, nullptr, s_.rows, out_, s_.hidden, own.scratch);
  });
  engine_.pool->barrier();
}

void LayerRun::dense(Private& own) {
  int32_t chunk = chunk_rows(s_.ffn, s_.threads, s_.rows);
  int32_t forms = form_for(engine_, plan_.down, s_.rows);
  for_units(kGateUp, (s_.ffn + chunk - 1) / chunk, [&](int64_t unit) {
    int32_t start = (int32_t)unit * chunk, end = std::min(start + chunk, s_.ffn);
    const Activations& x = inputs(own);
    multiply(engine_, plan_.gate, 0, start, end, x, nullptr, s_.rows, h_.f32, h_.stride, own.scratch);
    multiply(engine_, plan_.up, 0, start, end, x, nullptr, s_.rows, up_, s_.ffn, own.scratch);
    for (int32_t row = 0; row < s_.rows; row++) {
      k_.gated(h_.f32 + row * h_.stride + start, up_ + (int64_t)row * s_.ffn + start, end - start, plan_.activation);
      if (forms & ~FORM_F32) k_.quantise(&h_, forms, row, start, end);
    }
  });
  engine_.pool->barrier();
  project(own, kDown, plan_.down, h_);
}

// Softmax over the router's logits, the largest few, their weights made to sum to one.
void LayerRun::route(Private& own, int32_t row) {
  int32_t experts = plan_.num_experts, used = plan_.num_experts_used;
  float* logits = routing_.logits + (int64_t)row * experts;
  multiply(engine_, plan_.router, 0, 0, experts, inputs(own), &row, 1, logits, 0, own.scratch);
  int32_t* chosen = routing_.chosen + (int64_t)row * used;
  float* weight = routing_.weight + (int64_t)row * used;
  float total = 0;
  for (int32_t i = 0; i < used; i++) {
    int32_t best = -1;
    for (int32_t e = 0; e < experts; e++)
      if (std::find(chosen, chosen + i, e) == chosen + i && (best < 0 || logits[e] > logits[best])) best = e;
    chosen[i] = best;
    weight[i] = expf(logits[best] - logits[chosen[0]]);
    total += weight[i];
  }
  for (int32_t i = 0; i < used; i++) weight[i] /= total;
}

void LayerRun::place_slots() {
  int32_t used = plan_.num_experts_used, slot = 0;
  for (int32_t e = 0; e < plan_.num_experts; e++) {
    routing_.expert_start[e] = slot;
    for (int32_t i = 0; i < s_.rows * used; i++) {
      if (routing_.chosen[i] != e) continue;
      routing_.slot_row[slot] = i / used;
      routing_.slot[slot] = slot;
      routing_.row_slot[i] = slot++;
    }
  }
  routing_.expert_start[plan_.num_experts] = slot;
}

// Experts' forms depend on how many rows chose them; all that may be wanted are made.
int32_t expert_forms(const Engine& engine, const Matrix& matrix, int32_t rows) {
  return form_for(engine, matrix, 1) | form_for(engine, matrix, 2) | form_for(engine, matrix, rows);
}

void LayerRun::experts(Private& own, int thread) {
  if (thread == 0) place_slots();
  engine_.pool->barrier();
  int32_t forms = expert_forms(engine_, plan_.down, s_.rows);
  int32_t chunk = 32 * std::max(1, s_.ffn / 32 / (2 * s_.threads));
  int32_t chunks = (s_.ffn + chunk - 1) / chunk;
  const Activations& x = inputs(own);
  for_units(kGateUp, (int64_t)plan_.num_experts * chunks, [&](int64_t unit) {
    int32_t expert = (int32_t)(unit / chunks), start = (int32_t)(unit % chunks) * chunk;
    int32_t end = std::min(start + chunk, s_.ffn);
    int32_t slot = routing_.expert_start[expert], n = routing_.expert_start[expert + 1] - slot;
    if (n == 0) return;
    const int32_t* rows = routing_.slot_row + slot;
    multiply(engine_, plan_.gate, expert, start, end, x, rows, n, h_.f32 + slot * h_.stride, h_.stride, own.scratch);
    multiply(engine_, plan_.up, expert, start, end, x, rows, n, up_ + (int64_t)slot * s_.ffn, s_.ffn, own.scratch);
    for (int32_t i = slot; i < slot + n; i++) {
      k_.gated(h_.f32 + i * h_.stride + start, up_ + (int64_t)i * s_.ffn + start, end - start, plan_.activation);
      if (forms & ~FORM_F32) k_.quantise(&h_, forms, i, start, end);
    }
  });
  engine_.pool->barrier();
  int32_t down_chunk = 32 * std::max(1, s_.hidden / 32 / (2 * s_.threads));
  int32_t down_chunks = (s_.hidden + down_chunk - 1) / down_chunk;
  for_units(kDown, (int64_t)plan_.num_experts * down_chunks, [&](int64_t unit) {
    int32_t expert = (int32_t)(unit / down_chunks), start = (int32_t)(unit % down_chunks) * down_chunk;
    int32_t end = std::min(start + down_chunk, s_.hidden);
    int32_t slot = routing_.expert_start[expert], n = routing_.expert_start[expert + 1] - slot;
    if (n == 0) return;
    multiply(engine_, plan_.down, expert, start, end, h_, routing_.slot + slot, n,
             expert_out_ + (int64_t)slot * s_.hidden, s_.hidden, own.scratch);
  });
  engine_.pool->barrier();
}

// out_ = the row's experts, weighed.
void LayerRun::combine(int32_t row) {
  int32_t used = plan_.num_experts_used;
  float* out = out_ + (int64_t)row * s_.hidden;
  memset(out, 0, s_.hidden * sizeof(float));
  for (int32_t i = row * used; i < (row + 1) * used; i++)
    k_.add_scaled(out, expert_out_ + (int64_t)routing_.row_slot[i] * s_.hidden, routing_.weight[i], s_.hidden);
}

void LayerRun::run(int thread) {
  Private& own = own_[thread];
  const int32_t rows = s_.rows;
  int32_t forms = form_for(engine_, plan_.q, rows) | form_for(engine_, plan_.k, rows) |
                  form_for(engine_, plan_.v, rows);
  for_rows(kNorm, [&](int32_t row) {
    if (single_) memcpy(own.residual, hidden_, s_.hidden * sizeof(float));
    norm_into(plan_.attn_norm, residual(own, row), inputs(own), row, forms);
  });
  project_qkv(own);
  engine_.pool->barrier();
  if (!decode_) {
    for_rows(kRope, [&](int32_t row) {
      for (int32_t head = 0; head < plan_.num_kv_heads; head++) append(row, head);
      for (int32_t head = 0; head < plan_.num_heads; head++)
        prepare_query(row, head, queries_ + ((int64_t)row * plan_.num_heads + head) * s_.head_pad);
    });
  }
  attend(own);
  engine_.pool->barrier();
  forms = form_for(engine_, plan_.output, rows);
  for_rows(kMerge, [&](int32_t row) { merge_heads(head_inputs(own), row, forms); });
  project(own, kOutput, plan_.output, head_inputs(own));

  forms = plan_.router.data
              ? form_for(engine_, plan_.router, 1) | expert_forms(engine_, plan_.gate, rows) |
                    expert_forms(engine_, plan_.up, rows)
              : form_for(engine_, plan_.gate, rows) | form_for(engine_, plan_.up, rows);
  for_rows(kFfnNorm, [&](int32_t row) {
    add_branch(own, plan_.attn_post_norm, row);
    norm_into(plan_.ffn_norm, residual(own, row), inputs(own), row, forms);
    if (plan_.router.data && (!single_ || thread == 0)) route(own, row);
  });
  if (plan_.router.data)
    experts(own, thread);
  else
    dense(own);
  if (single_ && thread != 0) return;
  for_rows(kResidual, [&](int32_t row) {
    if (plan_.router.data) combine(row);
    add_branch(own, plan_.ffn_post_norm, row);
    if (single_) memcpy(hidden_, own.residual, s_.hidden * sizeof(float));
  });
}

}  // namespace

bool run_layer_rows(Engine& engine, const LayerPlan& plan, const KvLayer& kv, const BatchRows& batch,
                    float* hidden_states) {
  LayerRun run(engine, plan, kv, batch, hidden_states);
  if (!run.prepare()) return false;
  engine.pool->run([](void* arg, int thread) { static_cast<LayerRun*>(arg)->run(thread); }, &run);
  return true;
}
