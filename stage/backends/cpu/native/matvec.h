// Few input rows against weights read in place: the decode path. Included by variant.cpp.
//
// Weights of 32 become bytes, then two vectors of 16-bit values (even and odd elements) that are multiplied
// by 16-bit activations: within 1/65534 of a block's largest activation, at the memory's rate.

INLINE const int16_t* i16_row(const Activations* a, int64_t row) { return (const int16_t*)a->i16.q + row * a->stride; }

// Products of 32 weights with one row's 32 activations.
template <class F>
INLINE void split16(u8x32 v, i16x16& even, i16x16& odd) {
  if constexpr (F::kSigned) {
    even = ((i16x16)v << 8) >> 8;
    odd = (i16x16)v >> 8;
  } else {
    even = (i16x16)v & 0xff;
    odd = (i16x16)((u16x16)v >> 8);
  }
}

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
    split16<F>(F::quants(p, 0), even, odd);
    for (int i = 0; i < N; i++) {
      acc[i] += CONVERT(dot32(even, odd, x[i] + 32 * b), f32x8) * (d * scale[i][b]);
      if constexpr (!F::kSigned) low[i] += m * sum[i][b];
    }
  }
  for (int i = 0; i < N; i++) out[i] = hsum(acc[i]) + low[i];
}

#if defined(__AVX2__)
// The factors of four neighbouring blocks of a row, converted together: d times the activations' scale in lane
// kLane i, and the minima's part added to `low`.
template <class F>
INLINE __m256 four_factors(const uint8_t* p, const float* scale, const float* sum, __m256& low) {
  __m128 scales = _mm_loadu_ps(scale), sums = _mm_loadu_ps(sum);
  if constexpr (F::kHalves == 2) {
    __m128i words = _mm_setr_epi32(load<int32_t>(p), load<int32_t>(p + F::kBytes), load<int32_t>(p + 2 * F::kBytes),
                                   load<int32_t>(p + 3 * F::kBytes));
    __m256 pairs = _mm256_set_m128(_mm_unpackhi_ps(scales, sums), _mm_unpacklo_ps(scales, sums));
    __m256 factors = _mm256_mul_ps(_mm256_cvtph_ps(words), pairs);
    low = _mm256_add_ps(low, factors);  // the odd lanes count
    return factors;
  } else {
    __m128i halves = _mm_cvtsi32_si128(load<uint16_t>(p));
    halves = _mm_insert_epi16(halves, load<int16_t>(p + F::kBytes), 1);
    halves = _mm_insert_epi16(halves, load<int16_t>(p + 2 * F::kBytes), 2);
    halves = _mm_insert_epi16(halves, load<int16_t>(p + 3 * F::kBytes), 3);
    __m128 d = _mm_cvtph_ps(halves);
    if constexpr (!F::kSigned) low = _mm256_fmadd_ps(_mm256_castps128_ps256(d), _mm256_castps128_ps256(sums), low);
    return _mm256_castps128_ps256(_mm_mul_ps(d, scales));
  }
}

// One weight row against one activation row; blocks of 32 whose scales are halves.
template <class F>
INLINE float dot_four_blocks(const uint8_t* p, int blocks, const int16_t* x, const float* scale, const float* sum) {
  constexpr int kLane = F::kHalves;
  __m256 low = _mm256_setzero_ps();
  f32x8 acc[2] = {};
  int b = 0;
  for (; b + 4 <= blocks; b += 4, p += 4 * F::kBytes) {
    __builtin_prefetch(p + kPrefetchBytes);
    __builtin_prefetch(p + kPrefetchBytes + 64);
    __m256 factors = four_factors<F>(p, scale + b, sum + b, low);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      i16x16 even, odd;
      split16<F>(F::quants(p + i * F::kBytes, 0), even, odd);
      f32x8 factor = (f32x8)_mm256_permutevar8x32_ps(factors, _mm256_set1_epi32(kLane * i));
      acc[i & 1] += CONVERT(dot32(even, odd, x + 32 * (b + i)), f32x8) * factor;
    }
  }
  // What was gathered for the minima, without the lanes that hold d, or the upper half that holds nothing.
  f32x8 lows = (f32x8)low;
  float below = 0;
  for (int i = 0; i < 4; i++) below += F::kHalves == 2 ? lows[2 * i + 1] : lows[i];
  float rest = 0;
  if (b < blocks) {
    const int16_t* at[1] = {x + 32 * b};
    const float *scales[1] = {scale + b}, *sums[1] = {sum + b};
    dot_blocks32<F, 1>(p, blocks - b, at, scales, sums, &rest);
  }
  return hsum(acc[0] + acc[1]) + below * (float)(int)F::kMinimum + rest;
}

template <class F>
INLINE void matvec_four_blocks(const WeightRows* w, const Activations* a, int64_t row, float* out) {
  const int16_t* x = i16_row(a, row);
  const float *scale = a->i16.scale + row * (a->stride / 32), *sum = a->i16.sum32 + row * (a->stride / 32);
  for (int32_t r = w->row_start; r < w->row_end; r++)
    out[r] = dot_four_blocks<F>(w->data + r * w->row_bytes, w->cols / 32, x, scale, sum);
}

template <class F>
constexpr bool has_four_blocks() {
  if constexpr (F::kBlock == 32) return F::kHalves > 0 && F::kBits < 8;
  return false;
}
#endif

// One weight row against N activation rows; blocks of 256 weights.
template <class F, int N>
INLINE void dot_blocks256(const uint8_t* p, int blocks, const int16_t* const* x, const float* const* scale,
                          const float* const* sum, float* out) {
  constexpr int kVectors = 32 / F::kGroup;  // of eight groups a block
  f32x8 acc[N] = {}, low[N] = {};
  for (int b = 0; b < blocks; b++, p += F::kBytes) {
    for (int line = 0; line < F::kBytes; line += 64) __builtin_prefetch(p + kPrefetchBytes + line);
    f32x8 d[kVectors], m[kVectors];
    F::scales(p, d, m);
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
      split16<F>(F::quants(p, u), even, odd);
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

// Unquantised weights: float32 throughout.
template <class F>
INLINE float dot_float(const uint8_t* p, const float* x, int32_t cols) {
  f32x8 acc[4] = {};
  int32_t k = 0;
  for (; k + 32 <= cols; k += 32) {
    __builtin_prefetch(p + k * F::kBytes + kPrefetchBytes);
    for (int j = 0; j < 4; j++) acc[j] += F::load8(p + (k + 8 * j) * F::kBytes) * load<f32x8>(x + k + 8 * j);
  }
  for (; k + 8 <= cols; k += 8) acc[0] += F::load8(p + k * F::kBytes) * load<f32x8>(x + k);
  float sum = hsum((acc[0] + acc[1]) + (acc[2] + acc[3]));
  for (; k < cols; k++) sum += F::load1(p + k * F::kBytes) * x[k];
  return sum;
}

bool high_low(int32_t type) {
  bool yes = false;
#if SUPERBLOCKS
  with_format(type, [&](auto format) { yes = has_superblocks<decltype(format)>(); });
#endif
  (void)type;
  return yes;
}

void matvec(const WeightRows* w, Form form, const Activations* a, const int32_t* index, int32_t n, float* out,
            int64_t out_stride) {
  (void)form;
  bool quantised = with_format(w->type, [&](auto format) __attribute__((always_inline)) {
    using F = decltype(format);
#if SUPERBLOCKS
    if constexpr (has_superblocks<F>())
      if (form == FORM_HIGH_LOW)
        return matvec_superblocks<F>(w, a->high_low + (index ? index[0] : 0) * (a->stride / 256), out);
#endif
#if defined(__AVX2__)
    if constexpr (has_four_blocks<F>())
      if (n == 1) return matvec_four_blocks<F>(w, a, index ? index[0] : 0, out);
#endif
    int32_t i = 0;
    for (; i + 4 <= n; i += 4) matvec_rows<F, 4>(w, a, index, i, out, out_stride);
    if (n - i >= 2) {
      matvec_rows<F, 2>(w, a, index, i, out, out_stride);
      i += 2;
    }
    if (n - i >= 1) matvec_rows<F, 1>(w, a, index, i, out, out_stride);
  });
  if (quantised) return;
  with_float_format(w->type, [&](auto format) __attribute__((always_inline)) {
    using F = decltype(format);
    for (int32_t r = w->row_start; r < w->row_end; r++)
      for (int32_t i = 0; i < n; i++)
        out[i * out_stride + r] = dot_float<F>(w->data + r * w->row_bytes,
                                               a->f32 + (index ? index[i] : i) * a->stride, w->cols);
  });
}
