// One input row against super-blocks of 256 (the K-quants), in integers up to the super-block's scale: the
// decode path of AVX2 and better. Included by variant.cpp.
//
// An activation is 256 h + l, two signed bytes, with one scale for 256. Unsigned weight bytes meet each with
// maddubs, whose 16-bit results (63 * 127 * 2 at most: no saturation) are multiplied by the group's integer
// scale and added up; floating point comes once in 256 weights, and 16-bit copies of the weights never.

// How far ahead of the row being read the next cache lines are asked for.
constexpr int kPrefetchBytes = 2048;

#if defined(__AVX2__)
#define SUPERBLOCKS 1

// The integer scales of a super-block as 16-bit values: eight, in both halves; or sixteen, the even ones in
// the low half. So the same shuffle spreads unit u's scale, or its two halves' scales.
INLINE __m256i spread_scale(__m256i scales, int u) {
  const __m256i first = _mm256_set1_epi16(0x0100);
  return _mm256_shuffle_epi8(scales, _mm256_add_epi8(first, _mm256_set1_epi8((char)(2 * u))));
}

INLINE __m256i both_halves(uint64_t bytes) {
  return _mm256_broadcastsi128_si256(_mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)bytes)));
}

INLINE __m256i even_odd(__m128i bytes) {
  return _mm256_set_m128i(_mm_srai_epi16(bytes, 8), _mm_srai_epi16(_mm_slli_epi16(bytes, 8), 8));
}

// Scales and, where minima have scales of their own, those.
INLINE void integer_scales(Q4_K, const uint8_t* p, __m256i* scale, __m256i* minimum) {
  uint32_t a = load_u32(p + 4), b = load_u32(p + 8), c = load_u32(p + 12);
  *scale = both_halves((a & 0x3f3f3f3f) | (uint64_t)((c & 0x0f0f0f0f) | (a >> 2 & 0x30303030)) << 32);
  *minimum = both_halves((b & 0x3f3f3f3f) | (uint64_t)((c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)) << 32);
}

INLINE void integer_scales(Q5_K, const uint8_t* p, __m256i* scale, __m256i* minimum) {
  integer_scales(Q4_K{}, p, scale, minimum);
}

INLINE void integer_scales(Q2_K, const uint8_t* p, __m256i* scale, __m256i* minimum) {
  __m128i packed = _mm_loadu_si128((const __m128i*)p), low = _mm_set1_epi8(15);
  *scale = even_odd(_mm_and_si128(packed, low));
  *minimum = even_odd(_mm_and_si128(_mm_srli_epi16(packed, 4), low));
}

INLINE void integer_scales(Q3_K, const uint8_t* p, __m256i* scale, __m256i*) {
  uint64_t low = load<uint64_t>(p + 96), high = load_u32(p + 104);
  high |= high << 30;
  uint64_t first = (low & 0x0f0f0f0f0f0f0f0f) | (high & 0x0303030303030303) << 4;
  uint64_t second = (low >> 4 & 0x0f0f0f0f0f0f0f0f) | (high >> 4 & 0x0303030303030303) << 4;
  *scale = even_odd(_mm_sub_epi8(_mm_set_epi64x((long long)second, (long long)first), _mm_set1_epi8(32)));
}

INLINE void integer_scales(Q6_K, const uint8_t* p, __m256i* scale, __m256i*) {
  *scale = even_odd(_mm_loadu_si128((const __m128i*)(p + 192)));
}

template <class F>
struct SuperScale;  // where d (and dmin) lie, and how far below zero the quants start
template <>
struct SuperScale<Q2_K> { enum { kD = 80, kMin = 82, kOffset = 0 }; };
template <>
struct SuperScale<Q3_K> { enum { kD = 108, kMin = -1, kOffset = 4 }; };
template <>
struct SuperScale<Q4_K> { enum { kD = 0, kMin = 2, kOffset = 0 }; };
template <>
struct SuperScale<Q5_K> { enum { kD = 0, kMin = 2, kOffset = 0 }; };
template <>
struct SuperScale<Q6_K> { enum { kD = 208, kMin = -1, kOffset = 32 }; };

template <class F>
constexpr bool has_superblocks() {
  return F::kBlock == 256 && !F::kSigned;
}

// 256 h + l, in float: the integers of Q6_K would not fit.
INLINE f32x8 both_terms(i32x8 high, i32x8 low) { return CONVERT(high, f32x8) * 256.0f + CONVERT(low, f32x8); }

template <class F>
INLINE float dot_superblocks(const uint8_t* p, int blocks, const HighLow* x) {
  using S = SuperScale<F>;
  f32x8 acc = {}, below = {};
  for (int b = 0; b < blocks; b++, p += F::kBytes, x++) {
    for (int line = 0; line < F::kBytes; line += 64) __builtin_prefetch(p + kPrefetchBytes + line);
    __m256i scale, minimum;
    integer_scales(F{}, p, &scale, &minimum);
    i32x8 high = {}, low = {};
#pragma GCC unroll 8
    for (int u = 0; u < 8; u++) {
      __m256i q = (__m256i)F::quants(p, u);
      i16x16 spread = (i16x16)spread_scale(scale, u);
      high = madd(high, (i16x16)_mm256_maddubs_epi16(q, load<__m256i>(x->high + 32 * u)), spread);
      low = madd(low, (i16x16)_mm256_maddubs_epi16(q, load<__m256i>(x->low + 32 * u)), spread);
    }
    const int16_t* high_sums = F::kGroup == 16 ? x->high_sums16 : x->high_sums32;
    const int16_t* low_sums = F::kGroup == 16 ? x->low_sums16 : x->low_sums32;
    if constexpr (S::kOffset != 0) {
      high -= madd((i32x8){}, (i16x16)scale, load<i16x16>(high_sums)) * (int)S::kOffset;
      low -= madd((i32x8){}, (i16x16)scale, load<i16x16>(low_sums)) * (int)S::kOffset;
    } else {
      i32x8 sums = (madd((i32x8){}, (i16x16)minimum, load<i16x16>(high_sums)) << 8) +
                   madd((i32x8){}, (i16x16)minimum, load<i16x16>(low_sums));
      below += CONVERT(sums, f32x8) * (f16_to_f32(p + S::kMin) * x->scale);
    }
    acc += both_terms(high, low) * (f16_to_f32(p + S::kD) * x->scale);
  }
  return hsum(acc - below);
}

template <class F>
INLINE void matvec_superblocks(const WeightRows* w, const HighLow* x, float* out) {
  for (int32_t r = w->row_start; r < w->row_end; r++)
    out[r] = dot_superblocks<F>(w->data + r * w->row_bytes, w->cols / 256, x);
}

INLINE void quantise_superblock(const float* x, HighLow* out) {
  f32x8 largest = splat(0), nothing = splat(0);
  for (int k = 0; k < 256; k += 8) {
    f32x8 v = load<f32x8>(x + k);
    largest = vmax(vabs(v), largest);
    nothing += v - v;  // NaN from infinity on
  }
  float top = hmax(largest);
  f32x8 inverse = splat(top > 0 ? 32512.0f / top : 0);
  out->scale = top / 32512.0f + hsum(nothing);
  for (int u = 0; u < 8; u++) {
    i32x8 q[4], high[4], low[4];
    for (int i = 0; i < 4; i++) {
      q[i] = round_to_int(load<f32x8>(x + 32 * u + 8 * i) * inverse);
      high[i] = (q[i] + 128) >> 8;
      low[i] = q[i] - (high[i] << 8);
    }
    store(out->high + 32 * u, narrow8(narrow16(high[0], high[1]), narrow16(high[2], high[3])));
    store(out->low + 32 * u, narrow8(narrow16(low[0], low[1]), narrow16(low[2], low[3])));
    int32_t sums[4] = {hsum_i32(high[0] + high[1]), hsum_i32(high[2] + high[3]), hsum_i32(low[0] + low[1]),
                       hsum_i32(low[2] + low[3])};
    // sixteen: even groups first, as even_odd lays scales; eight: the second half stays zero
    out->high_sums16[u] = (int16_t)sums[0];
    out->high_sums16[8 + u] = (int16_t)sums[1];
    out->low_sums16[u] = (int16_t)sums[2];
    out->low_sums16[8 + u] = (int16_t)sums[3];
    out->high_sums32[u] = (int16_t)(sums[0] + sums[1]);
    out->low_sums32[u] = (int16_t)(sums[2] + sums[3]);
    out->high_sums32[8 + u] = out->low_sums32[8 + u] = 0;
  }
}

#else
#define SUPERBLOCKS 0
#endif
