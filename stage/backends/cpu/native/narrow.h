// Sums and narrowing of integer vectors, for quantising. Included by variant.cpp.

INLINE int32_t hsum_i32(i32x8 v) {
  i32x8 a = v + SHUFFLE(i32x8, v, v, 4, 5, 6, 7, 0, 1, 2, 3);
  i32x8 b = a + SHUFFLE(i32x8, a, a, 2, 3, 0, 1, 6, 7, 4, 5);
  return b[0] + b[1];
}

// [a | b], saturating
INLINE i16x16 narrow16(i32x8 a, i32x8 b) {
#if defined(__AVX2__)
  return (i16x16)_mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)a, (__m256i)b), 0xd8);
#else
  i16x16 v;
  for (int i = 0; i < 8; i++) {
    v[i] = (int16_t)a[i];
    v[8 + i] = (int16_t)b[i];
  }
  return v;
#endif
}

INLINE i8x32 narrow8(i16x16 a, i16x16 b) {
#if defined(__AVX2__)
  return (i8x32)_mm256_permute4x64_epi64(_mm256_packs_epi16((__m256i)a, (__m256i)b), 0xd8);
#else
  i8x32 v;
  for (int i = 0; i < 16; i++) {
    v[i] = (int8_t)a[i];
    v[16 + i] = (int8_t)b[i];
  }
  return v;
#endif
}
