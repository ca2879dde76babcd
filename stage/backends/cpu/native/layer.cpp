// A layer's memory, its phases in order, and projections.
#include "layer_run.h"

#include <string.h>

#include <algorithm>

namespace {

template <class T>
T* take(Engine& engine, bool really, size_t& total, size_t count) {
  total += Arena::rounded(count * sizeof(T));
  return really ? static_cast<T*>(engine.arena.take(count * sizeof(T))) : nullptr;
}

Activations take_inputs(Engine& engine, bool really, size_t& total, int64_t rows, int64_t width) {
  total += activations_bytes(rows, width);
  return really ? take_activations(engine.arena, rows, width) : Activations{};
}

}  // namespace

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
    own.thread = t;
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
  s_.qkv = attends_ ? plan_.q.rows + plan_.k.rows + plan_.v.rows : 0;
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
  s_.splits = !attends_ ? 0 : decode_ ? (context + kSplitKeys - 1) / kSplitKeys : 1;
  engine_.reset_counters();
  if (!engine_.arena.reset(layout(false))) return false;
  layout(true);
  return true;
}

void LayerRun::norm_into(const Norm& norm, const float* from, Activations& x, int32_t row, int32_t forms) {
  k_.rms_norm(from, &norm, x.f32 + row * x.stride);
  k_.quantise(&x, forms, row, 0, s_.hidden);
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

// Q, K and V are one range of rows, so that its units are of one size. Within a matrix, units begin at multiples of
// eight rows: kernels compute eight at a time, and the last few otherwise, to the last bit.
void LayerRun::project_qkv(Private& own) {
  const Matrix* matrices[] = {&plan_.q, &plan_.k, &plan_.v};
  for_chunks(own, kQkv, s_.qkv, [&](int32_t start, int32_t end) {
    int32_t first = 0;  // of the matrix
    for (const Matrix* matrix : matrices) {
      auto within = [&](int32_t row) { return std::min((std::max(row - first, 0) + 7) / 8 * 8, matrix->rows); };
      int32_t from = within(start), to = within(end);
      if (from < to)
        multiply(engine_, *matrix, 0, from, to, inputs(own), nullptr, s_.rows, qkv_ + first, s_.qkv, own.scratch);
      first += matrix->rows;
    }
  });
}

// out_ = matrix x, all rows.
void LayerRun::project(Private& own, int phase, const Matrix& matrix, const Activations& x) {
  for_chunks(own, phase, matrix.rows, [&](int32_t start, int32_t end) {
    multiply(engine_, matrix, 0, start, end, x, nullptr, s_.rows, out_, s_.hidden, own.scratch);
  });
  engine_.pool->barrier();
}

// Forms in blocks longer than a unit of what makes the input: once all of it is there.
void LayerRun::quantise_blocks(Private& own, int32_t forms, int32_t rows) {
  if (!(forms & FORM_BLOCK_I8)) return;
  int32_t blocks = s_.ffn / 256;
  engine_.for_units(kHidden, own.thread, (int64_t)rows * blocks, [&](int64_t unit) {
    int32_t start = (int32_t)(unit % blocks) * 256;
    k_.quantise(&h_, FORM_BLOCK_I8, unit / blocks, start, start + 256);
  });
  engine_.pool->barrier();
}

void LayerRun::dense(Private& own) {
  int32_t forms = form_for(engine_, plan_.down, s_.rows);
  for_chunks(own, kGateUp, s_.ffn, [&](int32_t start, int32_t end) {
    const Activations& x = inputs(own);
    multiply(engine_, plan_.gate, 0, start, end, x, nullptr, s_.rows, h_.f32, h_.stride, own.scratch);
    multiply(engine_, plan_.up, 0, start, end, x, nullptr, s_.rows, up_, s_.ffn, own.scratch);
    for (int32_t row = 0; row < s_.rows; row++) {
      k_.gated(h_.f32 + row * h_.stride + start, up_ + (int64_t)row * s_.ffn + start, end - start, plan_.activation);
      k_.quantise(&h_, forms & ~FORM_BLOCK_I8, row, start, end);
    }
  });
  engine_.pool->barrier();
  quantise_blocks(own, forms, s_.rows);
  project(own, kDown, plan_.down, h_);
}

void LayerRun::run(int thread) {
  Private& own = own_[thread];
  if (attends_)
    attention(own);
  else if (single_)
    memcpy(own.residual, hidden_, s_.hidden * sizeof(float));
  feed_forward(own);
}

// Leaves its output in out_.
void LayerRun::attention(Private& own) {
  const int32_t rows = s_.rows;
  int32_t forms = form_for(engine_, plan_.q, rows) | form_for(engine_, plan_.k, rows) |
                  form_for(engine_, plan_.v, rows);
  for_rows(own, kNorm, [&](int32_t row) {
    if (single_) memcpy(own.residual, hidden_, s_.hidden * sizeof(float));
    norm_into(plan_.attn_norm, residual(own, row), inputs(own), row, forms);
  });
  project_qkv(own);
  engine_.pool->barrier();
  if (!decode_) {
    for_rows(own, kRope, [&](int32_t row) {
      for (int32_t head = 0; head < plan_.num_kv_heads; head++) append(row, head);
      for (int32_t head = 0; head < plan_.num_heads; head++)
        prepare_query(row, head, queries_ + ((int64_t)row * plan_.num_heads + head) * s_.head_pad);
    });
  }
  attend(own);
  engine_.pool->barrier();
  forms = form_for(engine_, plan_.output, rows);
  for_rows(own, kMerge, [&](int32_t row) { merge_heads(head_inputs(own), row, forms); });
  project(own, kOutput, plan_.output, head_inputs(own));
}

// Threads write hidden_ only behind a barrier that all of them reach after they have read it.
void LayerRun::feed_forward(Private& own) {
  const int32_t rows = s_.rows;
  int32_t forms = plan_.router.data
                      ? form_for(engine_, plan_.router, 1) | expert_forms(engine_, plan_.gate, rows) |
                            expert_forms(engine_, plan_.up, rows)
                      : form_for(engine_, plan_.gate, rows) | form_for(engine_, plan_.up, rows);
  for_rows(own, kFfnNorm, [&](int32_t row) {
    if (attends_) add_branch(own, plan_.attn_post_norm, row);
    norm_into(plan_.ffn_norm, residual(own, row), inputs(own), row, forms);
    if (plan_.router.data && (!single_ || own.thread == 0)) route(own, row);
  });
  if (plan_.router.data)
    experts(own);
  else
    dense(own);
  if (single_ && own.thread != 0) return;
  for_rows(own, kResidual, [&](int32_t row) {
    if (plan_.router.data) combine(row);
    add_branch(own, plan_.ffn_post_norm, row);
    if (single_) memcpy(hidden_, own.residual, s_.hidden * sizeof(float));
  });
}

namespace {

bool run_on_all_threads(Engine& engine, LayerRun& run) {
  if (!run.prepare()) return false;
  engine.pool->run(engine.threads, [](void* arg, int thread) { static_cast<LayerRun*>(arg)->run(thread); }, &run);
  return true;
}

}  // namespace

bool run_layer_rows(Engine& engine, const LayerPlan& plan, const KvLayer& kv, const BatchRows& batch,
                    float* hidden_states) {
  LayerRun run(engine, plan, kv, batch, hidden_states, true);
  return run_on_all_threads(engine, run);
}

bool run_feed_forward_rows(Engine& engine, const LayerPlan& plan, int32_t rows, float* hidden_states) {
  const KvLayer no_kv{};
  BatchRows batch{};
  batch.rows = rows;
  LayerRun run(engine, plan, no_kv, batch, hidden_states, false);
  return run_on_all_threads(engine, run);
}
