// The C interface of the CPU engine: what a layer is, what a batch is, and the calls. Plain structs of
// pointers and numbers, filled in by stage/backends/cpu/abi.py, which mirrors every field.
//
// Nothing here owns memory: weights point into the mapped file, activations into the caller's tensors.
#pragma once
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

#define PIPELLM_ABI_VERSION 5

// y = W x + b. W is [rows, cols] row-major in blocks of `type` (a ggml type number).
typedef struct {
  const uint8_t* data;  // null: absent
  int64_t row_bytes;
  int64_t expert_bytes;  // from one expert's matrix to the next; 0 without experts
  const float* bias;     // [rows] or null
  int32_t type;
  int32_t rows;
  int32_t cols;
} Matrix;

// x / sqrt(mean(x^2) + eps) * weight
typedef struct {
  const float* weight;  // null: absent
  float eps;
  int32_t size;
} Norm;

enum { ROPE_NORM = 0, ROPE_NEOX = 1 };            // pairs (2i, 2i+1); pairs (i, i + dim/2)
enum { ACTIVATION_SILU = 0, ACTIVATION_GELU = 1 };  // GELU in its tanh form
enum { KV_F16 = 0, KV_Q8_0 = 1, KV_F32 = 2 };

typedef struct {
  Norm attn_norm, q_norm, k_norm, attn_post_norm, ffn_norm, ffn_post_norm;
  Matrix q, k, v, output;
  Matrix router, gate, up, down;  // router absent: a dense feed-forward
  float scale;                    // multiplies q k^T
  float softcap;                  // 0: none; else c tanh(score / c)
  int32_t hidden_size;
  int32_t num_heads, num_kv_heads, head_dim;
  int32_t window;  // 0: none; else a row at p sees (p - window, p]
  int32_t rope_kind, rope_dim;
  int32_t activation;
  int32_t num_experts, num_experts_used;
} LayerPlan;

// One layer's cache. K and V are [num_blocks, num_kv_heads, block_size, head bytes] each.
typedef struct {
  uint8_t* k;
  uint8_t* v;
  int32_t type;
  int32_t block_size;
} KvLayer;

typedef struct {
  const int32_t* block_table;
  int32_t row_start, num_rows, start_position;
} SequenceRows;

typedef struct {
  const SequenceRows* sequences;
  const int64_t* slots;  // [rows]
  const float* rope;     // [rows, rope_dim]: rope_dim/2 cosines, then as many sines
  int32_t num_sequences;
  int32_t rows;
} BatchRows;

typedef struct Engine Engine;

int32_t pipellm_abi_version(void);
// Names of the variants this CPU can run, best first, separated by spaces.
const char* pipellm_variants(void);
// The variant's engine with its pool of `threads` threads, kept on the `num_cpus` processors of `cpus` (none:
// anywhere). Engines whose `share` names the same file use fewer while they compute at one time; empty: all, always.
// Null where the variant is unknown or the CPU cannot run it.
Engine* pipellm_create(const char* variant, int32_t threads, const int32_t* cpus, int32_t num_cpus,
                       const char* share, int32_t exact);
void pipellm_destroy(Engine* engine);
// How many threads the last call computed with.
int32_t pipellm_threads_used(const Engine* engine);

// 1 where matrices of this ggml type can be multiplied.
int32_t pipellm_supports(int32_t type);
// hidden_states [rows, hidden_size] is read and overwritten. 0, or -1 when out of memory.
// Layers one after the other, each with its own plan, cache and batch (they differ in the rope's table).
int32_t pipellm_run_layers(Engine*, int32_t num_layers, const LayerPlan* const*, const KvLayer* const*,
                           const BatchRows* const*, float* hidden_states);
// The feed-forward half of a layer, with its norms and onto the residual stream: its attention was computed elsewhere.
// hidden_states [rows, hidden_size] is read and overwritten. 0, or -1 when out of memory.
int32_t pipellm_run_feed_forward(Engine*, const LayerPlan*, float* hidden_states, int32_t rows);
// out[rows, embedding.cols] = scale * embedding[ids]. 0, or -1 when an id is none of its rows.
int32_t pipellm_embed(Engine*, const Matrix* embedding, const int32_t* ids, int32_t rows, float scale, float* out);
// out[rows, output.rows] = softcap(W norm(hidden_states) + b); softcap 0: none
int32_t pipellm_logits(Engine*, const Norm*, const Matrix* output, float softcap, const float* hidden_states,
                       int32_t rows, float* out);
// y[rows, matrix.rows] = W x + b, x [rows, matrix.cols]; for tests and measurements.
int32_t pipellm_matmul(Engine*, const Matrix*, const float* x, int32_t rows, float* y);
// The rope table of a batch: cosines and sines of position * inverse frequency, times magnitude.
void pipellm_rope(const int32_t* positions, int32_t rows, const float* inv_freq, int32_t half, float magnitude,
                  float* out);
// Seconds to read `bytes` at `data` once with all threads: the memory rate decode is held against.
double pipellm_read_seconds(Engine*, const uint8_t* data, int64_t bytes);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
