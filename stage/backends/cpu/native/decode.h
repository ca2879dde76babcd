// One input row against weights read in place: decoding. Several weight rows are computed together, so that they
// share the loads of the activations. Included by variant.cpp.
//
// Vector instructions are what limits here, the memory next, so these are few: nibbles are masked where they lie
// (Reader::split), and the factors of all rows go through memory, from where a load spreads them over a vector.

// Weight rows together, and how far ahead of them lines are asked for, where blocks are of 32 and of 256: the more
// rows, the less a processor's own prefetching sees of their order.
constexpr int kDecodeRows32 = 8, kDecodeAhead32 = 16384;
constexpr int kDecodeRows256 = 2, kDecodeAhead256 = 4096;

// Keeps the compiler from turning a store and its loads into shuffles.
#define IN_MEMORY(x) asm("" : "+m"(x))

struct OneRow {
  const int16_t* x;
  const float *scale, *sum32, *sum16;
};

// How far ahead R rows that are read together ask, at least `kAhead`: they follow one another, and so do the lines
// asked for, block after block; the last row's must be asked for before the first of them is read.
template <int R, int kAhead>
INLINE int64_t ahead_of(int64_t row_bytes) {
  int64_t last_row = (R - 1) * row_bytes + 4096;
  return last_row > kAhead ? last_row : kAhead;
}

// Asks for the lines of a block's `kBytes` at p.
template <int kBytes>
INLINE void prefetch(const uint8_t* p) {
#pragma GCC unroll 16
  for (int line = 0; line < kBytes; line += 64) __builtin_prefetch(p + line);
}

// factor[kStride r] = d times the activations' scale of row r's block; the minima's part is added to low.
template <class F, int R>
struct Factors32 {
  enum { kStride = 1 };
  f32x8 low = {};

  INLINE void get(const uint8_t* p, int64_t row_bytes, float scale, float sum, float* factor) {
    float d[R], m[R] = {};
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) F::scale(p + r * row_bytes, d[r], m[r]);
    if constexpr (!F::kSigned) low += load<f32x8>(m) * sum;
    store(factor, load<f32x8>(d) * scale);
  }
  INLINE float minima(int r) const { return low[r]; }
};

#if defined(__AVX2__)
template <class F, int R>
  requires(F::kHalves == 1)
struct Factors32<F, R> {
  enum { kStride = 1 };
  f32x8 low = {};

  INLINE void get(const uint8_t* p, int64_t row_bytes, float scale, float sum, float* factor) {
    __m128i halves = _mm_cvtsi32_si128(load<uint16_t>(p));
    halves = _mm_insert_epi16(halves, load<int16_t>(p + row_bytes), 1);
    halves = _mm_insert_epi16(halves, load<int16_t>(p + 2 * row_bytes), 2);
    halves = _mm_insert_epi16(halves, load<int16_t>(p + 3 * row_bytes), 3);
    p += 4 * row_bytes;
    halves = _mm_insert_epi16(halves, load<int16_t>(p), 4);
    halves = _mm_insert_epi16(halves, load<int16_t>(p + row_bytes), 5);
    halves = _mm_insert_epi16(halves, load<int16_t>(p + 2 * row_bytes), 6);
    halves = _mm_insert_epi16(halves, load<int16_t>(p + 3 * row_bytes), 7);
    f32x8 d = (f32x8)_mm256_cvtph_ps(halves);
    if constexpr (!F::kSigned) low += d * sum;
    store(factor, d * scale);
  }
  INLINE float minima(int r) const { return low[r] * -(float)(int)F::kOffset; }
};

template <class F, int R>
  requires(F::kHalves == 2)
struct Factors32<F, R> {
  enum { kStride = 2 };
  f32x8 low[R / 4] = {};  // odd lanes; the even ones are of no use

  INLINE void get(const uint8_t* p, int64_t row_bytes, float scale, float sum, float* factor) {
    f32x8 pairs = {scale, sum, scale, sum, scale, sum, scale, sum};
#pragma GCC unroll 2
    for (int i = 0; i < R / 4; i++, p += 4 * row_bytes) {
      __m128i halves = _mm_setr_epi32(load<int32_t>(p), load<int32_t>(p + row_bytes),
                                      load<int32_t>(p + 2 * row_bytes), load<int32_t>(p + 3 * row_bytes));
      f32x8 both = (f32x8)_mm256_cvtph_ps(halves) * pairs;
      low[i] += both;
      store(factor + 8 * i, both);
    }
  }
  INLINE float minima(int r) const { return low[r / 4][2 * (r % 4) + 1]; }
};
#endif

template <class F, int R>
INLINE void dot_rows32(const uint8_t* p, int64_t row_bytes, int blocks, const OneRow& a, float* out) {
  Factors32<F, R> factors;
  constexpr int kStride = factors.kStride;
  f32x8 acc[R] = {};
  const uint8_t* next = p + ahead_of<R, kDecodeAhead32>(row_bytes);
  for (int b = 0; b < blocks; b++, p += F::kBytes, next += R * F::kBytes) {
    prefetch<R * F::kBytes>(next);
    float factor[R * kStride];
    factors.get(p, row_bytes, a.scale[b], a.sum32[b], factor);
    IN_MEMORY(factor);
    i16x16 x_even = load<i16x16>(a.x + 32 * b), x_odd = load<i16x16>(a.x + 32 * b + 16);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      i16x16 even, odd;
      F::split(p + r * row_bytes, 0, even, odd);
      acc[r] += CONVERT(madd(madd((i32x8){}, even, x_even), odd, x_odd), f32x8) * factor[kStride * r];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    out[r] = hsum(acc[r] * (1.0f / F::times())) + (F::kSigned ? 0 : factors.minima(r));
  }
}

// Factors of 16 weights each, from scales of 32: v 0, the first eight; 1, the last.
INLINE f32x8 twice(f32x8 s, int v) {
  return v ? SHUFFLE(i32x8, s, s, 4, 4, 5, 5, 6, 6, 7, 7) : SHUFFLE(i32x8, s, s, 0, 0, 1, 1, 2, 2, 3, 3);
}

// [p0 p0 p0 p0 p1 p1 p1 p1]
INLINE f32x8 halves_of(const float* p) {
#if defined(__AVX2__)
  return (f32x8)_mm256_blend_ps(_mm256_broadcast_ss(p), _mm256_broadcast_ss(p + 1), 0xf0);
#else
  return splat_halves(p);
#endif
}

template <class F, int R>
INLINE void dot_rows256(const uint8_t* p, int64_t row_bytes, int blocks, const OneRow& a, float* out) {
  constexpr int kVectors = 32 / F::kGroup;  // of eight groups a block
  f32x8 acc[R] = {}, low[R] = {};
  const uint8_t* next = p + ahead_of<R, kDecodeAhead256>(row_bytes);
  for (int b = 0; b < blocks; b++, p += F::kBytes, next += R * F::kBytes) {
    prefetch<R * F::kBytes>(next);
    f32x8 scale = load<f32x8>(a.scale + 8 * b);
    scale *= 1.0f / F::times();
    float factor[R][8 * kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      f32x8 d[kVectors], m[kVectors];
      scales<F>(p + r * row_bytes, d, m);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++) {
        store(factor[r] + 8 * v, d[v] * (kVectors == 1 ? scale : twice(scale, v)));
        if constexpr (F::kSigned) continue;
        f32x8 sum = load<f32x8>((kVectors == 1 ? a.sum32 : a.sum16) + 8 * (kVectors * b + v));
        low[r] += (F::kOffset != 0 ? d[v] : m[v]) * sum;
      }
    }
    IN_MEMORY(factor);
#pragma GCC unroll 8
    for (int u = 0; u < 8; u++) {
      const int16_t* x = a.x + 256 * b + 32 * u;
      i16x16 x_even = load<i16x16>(x), x_odd = load<i16x16>(x + 16);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        i16x16 even, odd;
        F::split(p + r * row_bytes, u, even, odd);
        f32x8 dot = CONVERT(madd(madd((i32x8){}, even, x_even), odd, x_odd), f32x8);
        acc[r] += dot * (kVectors == 1 ? splat(factor[r][u]) : halves_of(factor[r] + 2 * u));
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
    out[r] = hsum(acc[r] + (F::kOffset != 0 ? low[r] * -(float)(int)F::kOffset : low[r]));
}

template <class F>
INLINE void matvec_one(const WeightRows* w, const Activations* a, int32_t row, float* out) {
  // Whole bytes: the memory limits, and it is fastest read in order.
  if constexpr (F::kBytes > F::kBlock) return matvec_rows<F, 1>(w, a, &row, 0, out, 0);
  constexpr int R = F::kBlock == 32 ? kDecodeRows32 : kDecodeRows256;
  OneRow x{i16_row(a, row), a->i16.scale + row * (a->stride / 32), a->i16.sum32 + row * (a->stride / 32),
           a->i16.sum16 + row * (a->stride / 16)};
  WeightRows rest = *w;
  for (; rest.row_start + R <= w->row_end; rest.row_start += R) {
    const uint8_t* p = w->data + rest.row_start * w->row_bytes;
    float* to = out + rest.row_start;
    if constexpr (F::kBlock == 32)
      dot_rows32<F, R>(p, w->row_bytes, w->cols / 32, x, to);
    else
      dot_rows256<F, R>(p, w->row_bytes, w->cols / 256, x, to);
  }
  matvec_rows<F, 1>(&rest, a, &row, 0, out, 0);
}
