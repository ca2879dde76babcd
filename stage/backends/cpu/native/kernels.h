// The table of kernels that each variant (an instruction set) fills in, and the activations they read.
#pragma once
#include "plan.h"

// The forms a product's input can take. Integer forms have x ~ scale * q, one scale for a block of 32 or 256 elements.
enum Form {
  FORM_F32 = 1,       // for unquantised weights
  FORM_I16 = 2,       // exact: |q| <= 16383
  FORM_I8 = 4,        // fast, many rows: |q| <= 127
  FORM_BLOCK_I8 = 8,  // fast, few rows, for weights in blocks of 256: |q| <= 127, one scale for 256
};

// The integer form of `rows` inputs. I16 blocks hold the even elements, then the odd ones.
struct Quantised {
  void* q;       // int16 or int8 [rows, stride]
  float* scale;  // [rows, stride / 32]
  float* sum32;  // [rows, stride / 32]: scale times the sum of the block's q
  float* sum16;  // [rows, stride / 16]: the same for each half
};

struct BlockQuantised {
  int8_t* q;       // [rows, stride]
  float* scale;    // [rows, stride / 256]
  int16_t* sum16;  // [rows, stride / 16]: sums of 16 q; a block's first halves of 32 before its second halves
};

struct Activations {
  float* f32;  // [rows, stride]
  Quantised i16, i8;
  BlockQuantised block_i8;
  int64_t stride;     // elements; a multiple of 256
};

// Rows [row_start, row_end) of one expert's (or the only) matrix.
struct WeightRows {
  const uint8_t* data;
  int64_t row_bytes;
  int32_t type, cols;
  int32_t row_start, row_end;
};

// Paged keys and values of one KV head, as attention reads them.
struct KvHead {
  const uint8_t* k;  // [num_blocks, num_kv_heads, block_size, head bytes], offset to the head
  const uint8_t* v;
  int64_t block_bytes;  // from one block to the next
  int64_t token_bytes;
  const int32_t* block_table;
  int32_t type, block_size, head_dim;
};

struct Kernels {
  const char* name;
  // out[i, r] = W[r] . x[index[i]], i < n, r in the rows; index null: x[i]. Inputs in `form`, any but FORM_I8.
  void (*matvec)(const WeightRows*, const Activations*, Form form, const int32_t* index, int32_t n, float* out,
                 int64_t out_stride);
  // the same through panels of unpacked weights, with inputs in FORM_I8, or FORM_F32 for unquantised types
  void (*matmul)(const WeightRows*, const Activations*, const int32_t* index, int32_t n, float* out,
                 int64_t out_stride, void* scratch);
  // the form in which this variant multiplies n rows with this type fastest
  Form (*fast_form)(int32_t type, int32_t n);
  // x[row, start : end) into the integer forms of `forms`; start and end multiples of 32, of 256 for FORM_BLOCK_I8
  void (*quantise)(const Activations*, int32_t forms, int64_t row, int32_t start, int32_t end);
  void (*dequantise)(const uint8_t* row, int32_t type, int32_t cols, float scale, float* out);
  void (*rms_norm)(const float* x, const Norm*, float* out);
  void (*gated)(float* gate, const float* up, int32_t n, int32_t activation);  // gate = act(gate) * up
  void (*add)(float* x, const float* y, int32_t n);
  void (*add_scaled)(float* x, const float* y, float scale, int32_t n);
  void (*softcap)(float* x, float cap, int32_t n);
  void (*rope)(float* head, const float* table, int32_t dim, int32_t kind);
  void (*store_kv)(const float* x, int32_t head_dim, int32_t type, uint8_t* out);
  // Keys [begin, end) of one KV head for `n` query rows of its heads: out[i] = sum p v, its maximum and sum
  // of exponentials. Row i sees keys (last[i] - window, last[i]].
  void (*attention)(const KvHead*, const float* const* queries, const int32_t* last, int32_t n, int32_t begin,
                    int32_t end, int32_t window, float scale, float softcap, float* const* out, float* maximum,
                    float* sum, void* scratch);
  // reads whole vectors of 256 bytes as fast as it can; the result only keeps the reading alive
  int64_t (*sum_bytes)(const uint8_t*, int64_t bytes);
};

constexpr int32_t kPanelRows = 8;        // weight rows side by side in a panel
constexpr int32_t kPanels = 8;           // panels a matmul call unpacks at a time
constexpr int32_t kPanelCols = 512;      // columns unpacked at a time
constexpr int32_t kAttentionKeys = 32;   // keys unpacked at a time
constexpr int32_t kAttentionQueries = 64;  // query rows at most in a call of attention
constexpr int32_t kMaxHeadDim = 512;
// matmul: byte or float panels and two floats a group of 16; attention: K and V tiles and the scores
constexpr int64_t kScratchBytes =
    kPanelRows * kPanels * kPanelCols * (4 + 2 * 4 / 16 + 1) +
    kAttentionKeys * kMaxHeadDim * 2 * 4 + kAttentionQueries * (kAttentionKeys + kMaxHeadDim) * 4;

extern "C" {
extern const Kernels pipellm_kernels_plain;
extern const Kernels pipellm_kernels_neon;
extern const Kernels pipellm_kernels_avx2;
extern const Kernels pipellm_kernels_avx2_vnni;
extern const Kernels pipellm_kernels_avx512;
}
