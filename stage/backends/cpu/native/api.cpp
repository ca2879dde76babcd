// The exported calls: choosing a variant, and everything that is not a layer.
#include "plan.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>
#include <string>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "engine.h"

namespace {

// Counts forks this process has come out of as the child: the threads of an older pool are not there.
std::atomic<unsigned> fork_generation{0};

const bool fork_watched = [] {
  pthread_atfork(nullptr, nullptr, [] { fork_generation.fetch_add(1); });
  return true;
}();

struct Variant {
  const Kernels* kernels;
  bool runs;
};

// Best first.
const Variant* variants(int* count) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                           __builtin_cpu_supports("f16c");
  static const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                             __builtin_cpu_supports("avx512vnni");
  unsigned a = 0, b = 0, c = 0, d = 0;
  static const bool vnni = avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1 << 4);  // AVX-VNNI
  static const Variant all[] = {
      {&pipellm_kernels_avx512, avx512},
      {&pipellm_kernels_avx2_vnni, vnni},
      {&pipellm_kernels_avx2, avx2},
      {&pipellm_kernels_plain, true},
  };
#elif defined(__aarch64__)
#if defined(__linux__)
  static const bool dot_product = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  static const bool dot_product = true;  // every Apple processor
#endif
  static const Variant all[] = {{&pipellm_kernels_neon, dot_product}, {&pipellm_kernels_plain, true}};
#else
  static const Variant all[] = {{&pipellm_kernels_plain, true}};
#endif
  *count = (int)(sizeof all / sizeof *all);
  return all;
}

// The caller's hold on the engine's threads, as many as are its part of the cores now; a forked child gets threads of
// its own first.
class Turn {
 public:
  explicit Turn(Engine* engine) : engine_(engine) {
    unsigned now = fork_generation.load();
    if (engine->fork_generation != now) {
      (void)engine->pool.release();  // its threads, and perhaps its lock, are the parent's
      engine->pool.reset(new Pool(engine->max_threads, engine->cpus));
      engine->fork_generation = now;
    }
    lock_ = std::unique_lock<std::mutex>(engine->pool->mutex());
    engine->threads = engine->share->begin(engine->max_threads);
  }
  ~Turn() { engine_->share->end(); }

 private:
  Engine* engine_;
  std::unique_lock<std::mutex> lock_;
};

template <class Fn>
void on_all_threads(Engine* engine, Fn fn) {
  engine->pool->run(engine->threads, [](void* arg, int thread) { (*static_cast<Fn*>(arg))(thread); }, &fn);
}

// y = W norm(x) + b for up to kMaxRows rows; norm null: of x itself.
bool product(Engine* engine, const Norm* norm, const Matrix* matrix, float softcap, const float* x, int32_t rows,
             float* y) {
  size_t bytes = activations_bytes(rows, matrix->cols) + (size_t)engine->threads * Arena::rounded(kScratchBytes);
  if (!engine->arena.reset(bytes)) return false;
  Activations in = take_activations(engine->arena, rows, matrix->cols);
  char* scratch = static_cast<char*>(engine->arena.take((size_t)engine->threads * Arena::rounded(kScratchBytes)));
  engine->reset_counters();
  Form form = form_for(*engine, *matrix, rows);
  int32_t chunk = chunk_rows(matrix->rows, engine->threads, rows);
  const Kernels& k = *engine->kernels;
  on_all_threads(engine, [&](int thread) {
    engine->for_units(0, thread, rows, [&](int64_t row) {
      float* to = in.f32 + row * in.stride;
      if (norm)
        k.rms_norm(x + row * matrix->cols, norm, to);
      else
        memcpy(to, x + row * matrix->cols, matrix->cols * sizeof(float));
      k.quantise(&in, form, row, 0, matrix->cols);
    });
    engine->pool->barrier();
    engine->for_units(1, thread, (matrix->rows + chunk - 1) / chunk, [&](int64_t unit) {
      int32_t start = (int32_t)unit * chunk, end = std::min(start + chunk, matrix->rows);
      multiply(*engine, *matrix, 0, start, end, in, nullptr, rows, y, matrix->rows,
               scratch + thread * Arena::rounded(kScratchBytes));
      if (softcap > 0)
        for (int32_t row = 0; row < rows; row++)
          k.softcap(y + (int64_t)row * matrix->rows + start, softcap, end - start);
    });
  });
  return true;
}

// A layer over any number of rows, in pieces that scratch memory is made for. False: no memory.
bool run_layer(Engine& engine, const LayerPlan& plan, const KvLayer& kv, const BatchRows& batch, float* hidden_states) {
  if (batch.rows <= kMaxRows) return run_layer_rows(engine, plan, kv, batch, hidden_states);
  std::vector<SequenceRows> pieces;
  for (int32_t start = 0; start < batch.rows; start += kMaxRows) {
    int32_t end = std::min(start + kMaxRows, batch.rows);
    pieces.clear();
    for (int32_t i = 0; i < batch.num_sequences; i++) {
      const SequenceRows& seq = batch.sequences[i];
      int32_t first = std::max(seq.row_start, start), last = std::min(seq.row_start + seq.num_rows, end);
      if (first < last)
        pieces.push_back({seq.block_table, first - start, last - first, seq.start_position + first - seq.row_start});
    }
    BatchRows part{pieces.data(), batch.slots + start, batch.rope + (int64_t)start * plan.rope_dim,
                   (int32_t)pieces.size(), end - start};
    if (!run_layer_rows(engine, plan, kv, part, hidden_states + (int64_t)start * plan.hidden_size)) return false;
  }
  return true;
}

}  // namespace

extern "C" {

int32_t pipellm_abi_version(void) { return PIPELLM_ABI_VERSION; }

const char* pipellm_variants(void) {
  static const std::string names = [] {
    std::string s;
    int count;
    const Variant* all = variants(&count);
    for (int i = 0; i < count; i++)
      if (all[i].runs) s += (s.empty() ? "" : " ") + std::string(all[i].kernels->name);
    return s;
  }();
  return names.c_str();
}

Engine* pipellm_create(const char* variant, int32_t threads, const int32_t* cpus, int32_t num_cpus,
                       const char* share, int32_t exact) {
  int count;
  const Variant* all = variants(&count);
  for (int i = 0; i < count; i++) {
    if (!all[i].runs || strcmp(all[i].kernels->name, variant) != 0) continue;
    Engine* engine = new Engine();
    engine->kernels = all[i].kernels;
    engine->exact = exact != 0;
    engine->max_threads = engine->threads = threads;
    engine->share.reset(new CoreShare(share));
    engine->counters.reset(new Engine::Counter[Engine::kPhases * threads]);
    engine->cpus.assign(cpus, cpus + num_cpus);
    engine->pool.reset(new Pool(threads, engine->cpus));
    engine->fork_generation = fork_generation.load();
    return engine;
  }
  return nullptr;
}

void pipellm_destroy(Engine* engine) {
  if (engine && engine->fork_generation != fork_generation.load()) (void)engine->pool.release();
  delete engine;
}

int32_t pipellm_threads_used(const Engine* engine) { return engine->threads; }

int32_t pipellm_supports(int32_t type) {
  static constexpr int32_t types[] = {0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 30, 39};
  return std::find(std::begin(types), std::end(types), type) != std::end(types);
}

int32_t pipellm_run_layers(Engine* engine, int32_t num_layers, const LayerPlan* const* plans, const KvLayer* const* kv,
                           const BatchRows* const* batches, float* hidden_states) {
  Turn turn(engine);
  for (int32_t i = 0; i < num_layers; i++)
    if (!run_layer(*engine, *plans[i], *kv[i], *batches[i], hidden_states)) return -1;
  return 0;
}

int32_t pipellm_run_feed_forward(Engine* engine, const LayerPlan* plan, float* hidden_states, int32_t rows) {
  Turn turn(engine);
  for (int32_t start = 0; start < rows; start += kMaxRows) {
    float* from = hidden_states + (int64_t)start * plan->hidden_size;
    if (!run_feed_forward_rows(*engine, *plan, std::min(kMaxRows, rows - start), from)) return -1;
  }
  return 0;
}

int32_t pipellm_embed(Engine* engine, const Matrix* embedding, const int32_t* ids, int32_t rows, float scale,
                      float* out) {
  for (int32_t i = 0; i < rows; i++) {
    if (ids[i] < 0 || ids[i] >= embedding->rows) return -1;
    engine->kernels->dequantise(embedding->data + ids[i] * embedding->row_bytes, embedding->type, embedding->cols,
                                scale, out + (int64_t)i * embedding->cols);
  }
  return 0;
}

int32_t pipellm_logits(Engine* engine, const Norm* norm, const Matrix* output, float softcap,
                       const float* hidden_states, int32_t rows, float* out) {
  Turn turn(engine);
  for (int32_t start = 0; start < rows; start += kMaxRows) {
    int32_t n = std::min(kMaxRows, rows - start);
    if (!product(engine, norm, output, softcap, hidden_states + (int64_t)start * output->cols, n,
                 out + (int64_t)start * output->rows))
      return -1;
  }
  return 0;
}

int32_t pipellm_matmul(Engine* engine, const Matrix* matrix, const float* x, int32_t rows, float* y) {
  return pipellm_logits(engine, nullptr, matrix, 0, x, rows, y);
}

void pipellm_rope(const int32_t* positions, int32_t rows, const float* inv_freq, int32_t half, float magnitude,
                  float* out) {
  for (int32_t row = 0; row < rows; row++, out += 2 * half)
    for (int32_t i = 0; i < half; i++) {
      float angle = (float)positions[row] * inv_freq[i];
      out[i] = cosf(angle) * magnitude;
      out[half + i] = sinf(angle) * magnitude;
    }
}

double pipellm_read_seconds(Engine* engine, const uint8_t* data, int64_t bytes) {
  Turn turn(engine);
  constexpr int64_t kPiece = 1 << 20;
  engine->reset_counters();
  std::atomic<int64_t> sink{0};
  auto start = std::chrono::steady_clock::now();
  on_all_threads(engine, [&](int thread) {
    int64_t sum = 0;
    engine->for_units(0, thread, (bytes + kPiece - 1) / kPiece, [&](int64_t piece) {
      sum += engine->kernels->sum_bytes(data + piece * kPiece, std::min(kPiece, bytes - piece * kPiece));
    });
    sink.fetch_add(sum, std::memory_order_relaxed);
  });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // extern "C"
