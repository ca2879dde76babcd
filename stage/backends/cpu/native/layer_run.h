// One layer over one batch: the same code runs on every thread, phase by phase, with a barrier where a phase
// reads what others wrote. With a single row, what is done to whole rows (norms, residuals, quantising) is
// done by every thread for itself: that is cheaper than a barrier.
//
// layer.cpp holds the order of phases and the dense parts, layer_attention.cpp attention, layer_experts.cpp
// experts.
#pragma once
#include <algorithm>

#include "engine.h"

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

// Forms that products with an expert's matrix may want: they depend on how many of `rows` chose the expert.
int32_t expert_forms(const Engine&, const Matrix&, int32_t rows);

class LayerRun {
 public:
  // `attends`: false leaves attention out; the feed-forward of the rows is all that is computed.
  LayerRun(Engine& engine, const LayerPlan& plan, const KvLayer& kv, const BatchRows& batch, float* hidden,
           bool attends)
      : engine_(engine), k_(*engine.kernels), plan_(plan), kv_(kv), batch_(batch), hidden_(hidden), attends_(attends) {}

  bool prepare();
  void run(int thread);

 private:
  struct Private {
    int thread;
    void* scratch;
    float* queries;   // [kAttentionQueries, head_pad]
    float* residual;  // [hidden], single row only
    Activations x, heads;
  };

  size_t layout(bool take);
  // A single row: every thread. Several: each is some thread's, and all are done when this returns.
  template <class Fn>
  void for_rows(Private& own, int phase, Fn fn) {
    if (single_) return fn(0);
    engine_.for_units(phase, own.thread, s_.rows, [&](int64_t row) { fn((int32_t)row); });
    engine_.pool->barrier();
  }

  // A matrix's rows [start, end) for fn, in chunks that threads take in turn.
  template <class Fn>
  void for_chunks(Private& own, int phase, int32_t rows, Fn fn) {
    int32_t chunk = chunk_rows(rows, s_.threads, s_.rows);
    engine_.for_units(phase, own.thread, (rows + chunk - 1) / chunk, [&](int64_t unit) {
      int32_t start = (int32_t)unit * chunk;
      fn(start, std::min(start + chunk, rows));
    });
  }

  float* residual(Private& own, int32_t row) { return single_ ? own.residual : hidden_ + (int64_t)row * s_.hidden; }
  Activations& inputs(Private& own) { return single_ ? own.x : x_; }
  Activations& head_inputs(Private& own) { return single_ ? own.heads : heads_; }

  void norm_into(const Norm& norm, const float* from, Activations& x, int32_t row, int32_t forms);
  void add_branch(Private& own, const Norm& post_norm, int32_t row);
  void attention(Private& own);
  void feed_forward(Private& own);
  void project_qkv(Private& own);
  void rope_head(float* head, const Norm& norm, int32_t row);
  void append(int32_t row, int32_t kv_head);
  void prepare_query(int32_t row, int32_t head, float* out);
  void attend(Private& own);
  void attend_unit(Private& own, const SequenceRows& seq, int32_t kv_head, int32_t split, int32_t first,
                   int32_t count);
  void merge_heads(Activations& x, int32_t row, int32_t forms);
  void project(Private& own, int phase, const Matrix& matrix, const Activations& x);
  void quantise_blocks(Private& own, int32_t forms, int32_t rows);
  void dense(Private& own);
  void route(Private& own, int32_t row);
  void place_slots();
  void experts(Private& own);
  void combine(int32_t row);
  KvHead kv_head(const SequenceRows& seq, int32_t head) const;

  Engine& engine_;
  const Kernels& k_;
  const LayerPlan& plan_;
  const KvLayer& kv_;
  const BatchRows& batch_;
  float* hidden_;
  bool attends_;
  Sizes s_{};
  bool single_ = false, decode_ = false;
  Activations x_{}, heads_{}, h_{};
  float *qkv_ = nullptr, *queries_ = nullptr, *partial_ = nullptr, *maximum_ = nullptr, *sum_ = nullptr;
  float *out_ = nullptr, *up_ = nullptr, *expert_out_ = nullptr;
  Routing routing_{};
  Private* own_ = nullptr;
};
