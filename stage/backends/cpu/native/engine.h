// An engine: one variant's kernels, a pool, and the memory that layers compute in.
#pragma once
#include <stddef.h>

#include <atomic>
#include <memory>

#include "core_share.h"
#include "kernels.h"
#include "pool.h"

// Memory that grows to the largest layer seen and is kept; carved up anew for every call.
class Arena {
 public:
  ~Arena();
  // Makes `bytes` available and forgets what was taken. False when out of memory.
  bool reset(size_t bytes);
  // 64-byte aligned.
  void* take(size_t bytes);
  static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

 private:
  unsigned char* base_ = nullptr;
  size_t size_ = 0, used_ = 0;
};

struct Engine {
  const Kernels* kernels;
  bool exact;
  int max_threads;
  int threads;  // of the call under way
  std::vector<int32_t> cpus;
  std::unique_ptr<Pool> pool;
  std::unique_ptr<CoreShare> share;
  unsigned fork_generation;
  Arena arena;
  // Numbered units of work that threads draw from.
  static constexpr int kPhases = 16;
  struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
  };
  std::unique_ptr<Counter[]> counters;  // [kPhases, max_threads], those of `threads` used

  void reset_counters() {
    for (int i = 0; i < kPhases * threads; i++) counters[i].next.store(0, std::memory_order_relaxed);
  }

  // Calls fn for each unit of a phase on some thread. A thread begins with its own share, in order, so that it reads
  // weights from one end to the other; then it helps the others.
  template <class Fn>
  void for_units(int phase, int thread, int64_t units, Fn fn) {
    for (int i = 0; i < threads; i++) {
      int64_t owner = (thread + i) % threads, first = units * owner / threads;
      int64_t count = units * (owner + 1) / threads - first;
      std::atomic<int64_t>& next = counters[phase * threads + owner].next;
      auto draw = [&] { return next.fetch_add(1, std::memory_order_relaxed); };
      for (int64_t unit = draw(); unit < count; unit = draw()) fn(first + unit);
    }
  }
};

// A pass's rows at most; longer batches go through a layer in several passes.
constexpr int32_t kMaxRows = 512;
// From this many rows on, panels multiply weights of unquantised types.
constexpr int32_t kFloatPanelMinRows = 9;

bool float_type(int32_t type);
// The form a product of n rows with this matrix wants its input in.
Form form_for(const Engine&, const Matrix&, int32_t n);
// out[i, r] for r in [start, end), bias included.
void multiply(const Engine&, const Matrix&, int64_t expert, int32_t start, int32_t end, const Activations&,
              const int32_t* index, int32_t n, float* out, int64_t out_stride, void* scratch);

// Space for the forms of [rows, width] inputs. `base` null: only counts.
size_t activations_bytes(int64_t rows, int64_t width);
Activations take_activations(Arena&, int64_t rows, int64_t width);

// Weight rows a thread takes at a time of a product's `rows`, for n input rows: a multiple of 32.
int32_t chunk_rows(int32_t rows, int32_t threads, int32_t n);

bool run_layer_rows(Engine&, const LayerPlan&, const KvLayer&, const BatchRows&, float* hidden_states);
// The same without attention.
bool run_feed_forward_rows(Engine&, const LayerPlan&, int32_t rows, float* hidden_states);
