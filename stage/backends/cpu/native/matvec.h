// A few input rows (sequences that decode together) against weights read in place. Included by variant.cpp.
//
// Weights of 32 become bytes, then two vectors of 16-bit values (even and odd elements) that are multiplied
// by 16-bit activations: within 1/32766 of a block's largest activation, at the memory's rate.

// How far ahead of the row being read the next cache lines are asked for.
constexpr int kPrefetchBytes = 2048;

INLINE const int16_t* i16_row(const Activations* a, int64_t row) { return (const int16_t*)a->i16.q + row * a->stride; }

// Products of 32 weights with one row's 32 activations.
INLINE i32x8 dot32(i16x16 even, i16x16 odd, const int16_t* x) {
  return madd(madd((i32x8){}, even, load<i16x16>(x)), odd, load<i16x16>(x + 16));
}

// [lo lo lo lo hi hi hi hi] of two neighbouring scales
INLINE f32x8 splat_halves(const float* p) { return (f32x8){p[0], p[0], p[0], p[0], p[1], p[1], p[1], p[1]}; }

// One weight row against N activation rows; blocks of 32 weights.
template <class F, int N>
INLINE void dot_blocks32(const uint8_t* p, int blocks, const int16_t* const* x, const float* const* scale,
                         const float* const* sum, float* out) {
  f32x8 acc[N] = {};
  float low[N] = {};
  for (int b = 0; b < blocks; b++, p += F::kBytes) {
    __builtin_prefetch(p + kPrefetchBytes);
    float d, m = 0;
    F::scale(p, d, m);
    i16x16 even, odd;
    split_bytes(F::kSigned, F::quants(p, 0), even, odd);
    for (int i = 0; i < N; i++) {
      acc[i] += CONVERT(dot32(even, odd, x[i] + 32 * b), f32x8) * (d * scale[i][b]);
      if constexpr (!F::kSigned) low[i] += m * sum[i][b];
    }
  }
  for (int i = 0; i < N; i++) out[i] = hsum(acc[i]) + low[i];
}

// One weight row against N activation rows; blocks of 256 weights.
template <class F, int N>
INLINE void dot_blocks256(const uint8_t* p, int blocks, const int16_t* const* x, const float* const* scale,
                          const float* const* sum, float* out) {
  constexpr int kVectors = 32 / F::kGroup;  // of eight groups a block
  f32x8 acc[N] = {}, low[N] = {};
  for (int b = 0; b < blocks; b++, p += F::kBytes) {
    for (int line = 0; line < F::kBytes; line += 64) __builtin_prefetch(p + kPrefetchBytes + line);
    f32x8 d[kVectors], m[kVectors];
    scales<F>(p, d, m);
    float ds[N][8 * kVectors];
    for (int i = 0; i < N; i++) {
      if constexpr (kVectors == 1) {
        store(ds[i], d[0] * load<f32x8>(scale[i] + 8 * b));
      } else {
        store(ds[i], d[0]);
        store(ds[i] + 8, d[1]);
      }
      if constexpr (!F::kSigned)
        for (int v = 0; v < kVectors; v++) low[i] += m[v] * load<f32x8>(sum[i] + 8 * (kVectors * b + v));
    }
#pragma GCC unroll 8
    for (int u = 0; u < 8; u++) {
      i16x16 even, odd;
      split_bytes(F::kSigned, F::quants(p, u), even, odd);
      for (int i = 0; i < N; i++) {
        f32x8 dot = CONVERT(dot32(even, odd, x[i] + 256 * b + 32 * u), f32x8);
        if constexpr (kVectors == 1)
          acc[i] += dot * ds[i][u];
        else
          acc[i] += dot * (splat_halves(ds[i] + 2 * u) * scale[i][8 * b + u]);
      }
    }
  }
  for (int i = 0; i < N; i++) out[i] = hsum(acc[i] + low[i]);
}

template <class F, int N>
INLINE void matvec_rows(const WeightRows* w, const Activations* a, const int32_t* index, int32_t first, float* out,
                        int64_t out_stride) {
  const int16_t* x[N];
  const float *scale[N], *sum[N];
  constexpr int kSums = F::kGroup;
  for (int i = 0; i < N; i++) {
    int64_t row = index ? index[first + i] : first + i;
    x[i] = i16_row(a, row);
    scale[i] = a->i16.scale + row * (a->stride / 32);
    sum[i] = (kSums == 32 ? a->i16.sum32 : a->i16.sum16) + row * (a->stride / kSums);
  }
  for (int32_t r = w->row_start; r < w->row_end; r++) {
    const uint8_t* p = w->data + r * w->row_bytes;
    float y[N];
    if constexpr (F::kBlock == 32)
      dot_blocks32<F, N>(p, w->cols / 32, x, scale, sum, y);
    else
      dot_blocks256<F, N>(p, w->cols / 256, x, scale, sum, y);
    for (int i = 0; i < N; i++) out[(first + i) * out_stride + r] = y[i];
  }
}
