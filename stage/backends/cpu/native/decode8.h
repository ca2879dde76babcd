// Few input rows of 8-bit activations against blocks of 256 read in place: decoding with `fast`, where 16-bit
// activations would hold up the memory. Included by variant.cpp.
//
// A block is whole numbers throughout: its activations share one scale, products are added in pairs in 16 bits
// (|w| < 128, |x| <= 127), and a group's scale multiplies those sums. Numbers become floats once a block.

#if defined(__AVX2__)
template <class F>
constexpr bool decodes_in_i8() {
  return F::kBlock == 256;
}

// The bytes of a block's groups as 16-bit numbers: lane u is the first half's of weights 32u to 32u + 31, 8 + u the
// second half's.
template <class F>
INLINE i16x16 by_halves(const uint64_t* bytes) {
  __m128i natural = _mm_set_epi64x((long long)bytes[F::kGroup == 16], (long long)bytes[0]);
  if constexpr (F::kGroup == 32) return (i16x16)_mm256_broadcastsi128_si256(_mm_cvtepi8_epi16(natural));
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  return (i16x16)_mm256_cvtepi8_epi16(_mm_shuffle_epi8(natural, order));
}

// Lanes u and 8 + u of `halves`, each in its whole half.
INLINE i16x16 of_word(i16x16 halves, int u) {
  return (i16x16)_mm256_shuffle_epi8((__m256i)halves, _mm256_set1_epi16((int16_t)(0x0202 * u + 0x0100)));
}

// Sums of neighbouring products.
template <class F>
INLINE i16x16 pairs(u8x32 w, i8x32 x) {
  if constexpr (F::kSigned)
    return (i16x16)_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), _mm256_sign_epi8((__m256i)x, (__m256i)w));
  return (i16x16)_mm256_maddubs_epi16((__m256i)w, (__m256i)x);
}

struct RowI8 {
  const int8_t* x;
  const float* scale;
  const int16_t* sums;
};

// One weight row against N input rows.
template <class F, int N>
INLINE void dot_i8(const uint8_t* p, int blocks, const RowI8* a, float* out) {
  f32x8 acc[N] = {};
  for (int b = 0; b < blocks; b++, p += F::kBytes) {
    prefetch<F::kBytes>(p + kDecodeAhead256);
    uint64_t bytes[2], minima[2];
    F::packed(p, bytes, minima);
    f32x4 factors = F::factors(p);
    i16x16 scales = by_halves<F>(bytes);
    i32x8 sum[N] = {};
#pragma GCC unroll 8
    for (int u = 0; u < 8; u++) {
      u8x32 w = F::quants(p, u);
      i16x16 scale = of_word(scales, u);
#pragma GCC unroll 4
      for (int i = 0; i < N; i++)
        sum[i] = madd(sum[i], pairs<F>(w, load<i8x32>(a[i].x + 256 * b + 32 * u)), scale);
    }
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      if constexpr (!F::kSigned) {
        i16x16 low = F::kOffset != 0 ? scales : by_halves<F>(minima);
        i32x8 sums = madd((i32x8){}, low, load<i16x16>(a[i].sums + 16 * b));
        if constexpr (F::kOffset != 0)
          sum[i] -= sums * (int)F::kOffset;
        else
          acc[i] -= CONVERT(sums, f32x8) * (factors[1] * a[i].scale[b]);
      }
      acc[i] += CONVERT(sum[i], f32x8) * (factors[0] * a[i].scale[b]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) out[i] = hsum(acc[i]);
}

template <class F, int N>
INLINE void rows_i8(const WeightRows* w, const Activations* a, const int32_t* index, int32_t first, float* out,
                    int64_t out_stride) {
  RowI8 x[N];
  for (int i = 0; i < N; i++) {
    int64_t at = (index ? index[first + i] : first + i) * a->stride;
    x[i] = {a->block_i8.q + at, a->block_i8.scale + at / 256, a->block_i8.sum16 + at / 16};
  }
  for (int32_t row = w->row_start; row < w->row_end; row++) {
    float y[N];
    dot_i8<F, N>(w->data + row * w->row_bytes, w->cols / 256, x, y);
    for (int i = 0; i < N; i++) out[(first + i) * out_stride + row] = y[i];
  }
}

template <class F>
INLINE void matvec_i8(const WeightRows* w, const Activations* a, const int32_t* index, int32_t n, float* out,
                      int64_t out_stride) {
  int32_t i = 0;
  for (; i + 4 <= n; i += 4) rows_i8<F, 4>(w, a, index, i, out, out_stride);
  for (; i + 2 <= n; i += 2) rows_i8<F, 2>(w, a, index, i, out, out_stride);
  if (i < n) rows_i8<F, 1>(w, a, index, i, out, out_stride);
}
#else
template <class F>
constexpr bool decodes_in_i8() {
  return false;
}
#endif
