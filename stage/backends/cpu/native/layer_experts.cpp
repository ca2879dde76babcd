// A layer's experts: each row's choice, rows gathered by expert, and their results weighed.
#include "layer_run.h"

#include <math.h>
#include <string.h>

#include <algorithm>

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

int32_t expert_forms(const Engine& engine, const Matrix& matrix, int32_t rows) {
  return form_for(engine, matrix, 1) | form_for(engine, matrix, 2) | form_for(engine, matrix, rows);
}

void LayerRun::experts(Private& own) {
  if (own.thread == 0) place_slots();
  engine_.pool->barrier();
  int32_t forms = expert_forms(engine_, plan_.down, s_.rows);
  int32_t chunk = 32 * std::max(1, s_.ffn / 32 / (2 * s_.threads));
  int32_t chunks = (s_.ffn + chunk - 1) / chunk;
  const Activations& x = inputs(own);
  engine_.for_units(kGateUp, own.thread, (int64_t)plan_.num_experts * chunks, [&](int64_t unit) {
    int32_t expert = (int32_t)(unit / chunks), start = (int32_t)(unit % chunks) * chunk;
    int32_t end = std::min(start + chunk, s_.ffn);
    int32_t slot = routing_.expert_start[expert], n = routing_.expert_start[expert + 1] - slot;
    if (n == 0) return;
    const int32_t* rows = routing_.slot_row + slot;
    multiply(engine_, plan_.gate, expert, start, end, x, rows, n, h_.f32 + slot * h_.stride, h_.stride, own.scratch);
    multiply(engine_, plan_.up, expert, start, end, x, rows, n, up_ + (int64_t)slot * s_.ffn, s_.ffn, own.scratch);
    for (int32_t i = slot; i < slot + n; i++) {
      k_.gated(h_.f32 + i * h_.stride + start, up_ + (int64_t)i * s_.ffn + start, end - start, plan_.activation);
      k_.quantise(&h_, forms & ~FORM_BLOCK_I8, i, start, end);
    }
  });
  engine_.pool->barrier();
  quantise_blocks(own, forms, s_.slots);
  int32_t down_chunk = 32 * std::max(1, s_.hidden / 32 / (2 * s_.threads));
  int32_t down_chunks = (s_.hidden + down_chunk - 1) / down_chunk;
  engine_.for_units(kDown, own.thread, (int64_t)plan_.num_experts * down_chunks, [&](int64_t unit) {
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
