// Attention over the paged cache with an online softmax: keys come in tiles of 32, unpacked to float32 once
// for all query rows of the call (the heads of a group, and the rows of a prefill tile). Included by
// variant.cpp.

struct AttentionScratch {
  alignas(64) float keys[kAttentionKeys * kMaxHeadDim];    // transposed: [dim, 32]
  float values[kAttentionKeys * kMaxHeadDim];              // [32, dim]
  float rows[8 * kMaxHeadDim];                             // eight keys on their way
  float scores[kAttentionQueries * kAttentionKeys];        // [query, 32]
};

// One token's K or V of one head to float32.
INLINE void load_kv(const uint8_t* p, int32_t type, int32_t dim, float* out) {
  if (type == KV_F32) return (void)__builtin_memcpy(out, p, dim * sizeof(float));
  if (type == KV_F16) {
    for (int32_t k = 0; k < dim; k += 8) store(out + k, load_f16(p + 2 * k));
    return;
  }
  for (int32_t k = 0; k < dim; k += 32, p += 34) {
    float scale = f16_to_f32(p);
    for (int i = 0; i < 4; i++) store(out + k + 8 * i, signed_bytes_to_f32(load<uint64_t>(p + 2 + 8 * i)) * scale);
  }
}

INLINE int64_t kv_offset(const KvHead* kv, int32_t token) {
  return kv->block_table[token / kv->block_size] * kv->block_bytes + token % kv->block_size * kv->token_bytes;
}

// C[M, 8 V] (+)= A[M, depth] B[depth, 8 V]
template <int M, int V>
INLINE void tile_product(const float* const* a, const float* b, int64_t b_stride, int32_t depth, float* const* c,
                         bool accumulate) {
  f32x8 acc[M][V];
  for (int i = 0; i < M; i++)
    for (int v = 0; v < V; v++) acc[i][v] = accumulate ? load<f32x8>(c[i] + 8 * v) : splat(0);
  for (int32_t k = 0; k < depth; k++) {
    f32x8 row[V];
    for (int v = 0; v < V; v++) row[v] = load<f32x8>(b + k * b_stride + 8 * v);
    for (int i = 0; i < M; i++)
      for (int v = 0; v < V; v++) acc[i][v] += row[v] * a[i][k];
  }
  for (int i = 0; i < M; i++)
    for (int v = 0; v < V; v++) store(c[i] + 8 * v, acc[i][v]);
}

template <int M>
INLINE void product(const float* const* a, const float* b, int64_t b_stride, int32_t depth, float* const* c,
                    int32_t width, bool accumulate) {
  int32_t j = 0;
  for (; j + 16 <= width; j += 16) {
    float* at[M];
    for (int i = 0; i < M; i++) at[i] = c[i] + j;
    tile_product<M, 2>(a, b + j, b_stride, depth, at, accumulate);
  }
  if (j < width) {
    float* at[M];
    for (int i = 0; i < M; i++) at[i] = c[i] + j;
    tile_product<M, 1>(a, b + j, b_stride, depth, at, accumulate);
  }
}

INLINE void products(const float* const* a, const float* b, int64_t b_stride, int32_t depth, float* const* c,
                     int32_t rows, int32_t width, bool accumulate) {
  int32_t i = 0;
  for (; i + 4 <= rows; i += 4) product<4>(a + i, b, b_stride, depth, c + i, width, accumulate);
  for (; i < rows; i++) product<1>(a + i, b, b_stride, depth, c + i, width, accumulate);
}

INLINE void load_tile(const KvHead* kv, int32_t begin, int32_t count, AttentionScratch* s) {
  int32_t dim = kv->head_dim;
  for (int32_t t = 0; t < kAttentionKeys; t += 8) {
    for (int i = 0; i < 8; i++) {
      float* value = s->values + (t + i) * dim;
      if (t + i < count) {
        int64_t offset = kv_offset(kv, begin + t + i);
        load_kv(kv->k + offset, kv->type, dim, s->rows + i * dim);
        load_kv(kv->v + offset, kv->type, dim, value);
      } else {
        __builtin_memset(s->rows + i * dim, 0, dim * sizeof(float));
        __builtin_memset(value, 0, dim * sizeof(float));
      }
    }
    for (int32_t k = 0; k < dim; k += 8) {
      i32x8 block[8];
      for (int i = 0; i < 8; i++) block[i] = load<i32x8>(s->rows + i * dim + k);
      transpose8(block);
      for (int i = 0; i < 8; i++) store(s->keys + (k + i) * kAttentionKeys + t, block[i]);
    }
  }
}

// Scores to probabilities relative to the running maximum; rescales what the row has summed so far.
INLINE void soften(float* scores, int32_t low, int32_t high, float scale, float cap, float* out, int32_t dim,
                   float* maximum, float* sum) {
  constexpr int kVectors = kAttentionKeys / 8;
  const i32x8 lane = {0, 1, 2, 3, 4, 5, 6, 7};
  f32x8 s[kVectors], largest = splat(*maximum);
  i32x8 seen[kVectors];
  for (int v = 0; v < kVectors; v++) {
    s[v] = load<f32x8>(scores + 8 * v) * scale;
    if (cap > 0) s[v] = soft_cap(s[v], cap);
    seen[v] = (lane + 8 * v >= low) & (lane + 8 * v < high);
    largest = seen[v] ? vmax(s[v], largest) : largest;
  }
  float now = hmax(largest);
  f32x8 total = splat(0);
  for (int v = 0; v < kVectors; v++) {
    f32x8 p = seen[v] ? vexp(s[v] - now) : splat(0);
    store(scores + 8 * v, p);
    total += p;
  }
  if (now > *maximum) {
    float shrink = vexp(splat(*maximum - now))[0];
    *sum *= shrink;
    for (int32_t k = 0; k < dim; k += 8) store(out + k, load<f32x8>(out + k) * shrink);
    *maximum = now;
  }
  *sum += hsum(total);
}

void attention(const KvHead* kv, const float* const* queries, const int32_t* last, int32_t n, int32_t begin,
               int32_t end, int32_t window, float scale, float cap, float* const* out, float* maximum, float* sum,
               void* scratch) {
  AttentionScratch* s = (AttentionScratch*)scratch;
  int32_t dim = kv->head_dim;
  float* scores[kAttentionQueries];
  for (int32_t i = 0; i < n; i++) {
    scores[i] = s->scores + i * kAttentionKeys;
    maximum[i] = -3e38f;
    sum[i] = 0;
    __builtin_memset(out[i], 0, dim * sizeof(float));
  }
  for (int32_t t = begin; t < end; t += kAttentionKeys) {
    int32_t count = end - t < kAttentionKeys ? end - t : kAttentionKeys;
    load_tile(kv, t, count, s);
    products(queries, s->keys, kAttentionKeys, dim, scores, n, kAttentionKeys, false);
    for (int32_t i = 0; i < n; i++) {
      int32_t low = window > 0 && last[i] - window + 1 > t ? last[i] - window + 1 - t : 0;
      int32_t high = last[i] + 1 - t < count ? last[i] + 1 - t : count;
      soften(scores[i], low, high, scale, cap, out[i], dim, maximum + i, sum + i);
    }
    products(scores, s->values, dim, count, out, n, dim, true);
  }
}
