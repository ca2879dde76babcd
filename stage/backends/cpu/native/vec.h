// Vectors of 32 bytes over GCC/Clang vector extensions, and the few operations that need an instruction of
// their own. Included by variant.cpp, once an instruction set, inside an anonymous namespace: nothing here
// may be shared between variants.

#define INLINE inline __attribute__((always_inline))

typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef int8_t i8x32 __attribute__((vector_size(32)));
typedef uint8_t u8x32 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x8 __attribute__((vector_size(8)));
typedef int8_t i8x8 __attribute__((vector_size(8)));

#if defined(__clang__)
#define SHUFFLE(V, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(V, a, b, ...) __builtin_shuffle(a, b, (V){__VA_ARGS__})
#endif
#define CONVERT(v, V) __builtin_convertvector(v, V)

template <class V>
INLINE V load(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
INLINE void store(void* p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}

INLINE f32x8 splat(float x) { return (f32x8){x, x, x, x, x, x, x, x}; }
INLINE i32x8 splat_i32(int32_t x) { return (i32x8){x, x, x, x, x, x, x, x}; }
INLINE f32x8 vmax(f32x8 a, f32x8 b) { return a > b ? a : b; }  // b where a is NaN
INLINE f32x8 vmin(f32x8 a, f32x8 b) { return a < b ? a : b; }

INLINE float hsum(f32x8 v) {
  f32x8 a = v + SHUFFLE(i32x8, v, v, 4, 5, 6, 7, 0, 1, 2, 3);
  f32x8 b = a + SHUFFLE(i32x8, a, a, 2, 3, 0, 1, 6, 7, 4, 5);
  return b[0] + b[1];
}

INLINE float hmax(f32x8 v) {
  f32x8 a = vmax(v, SHUFFLE(i32x8, v, v, 4, 5, 6, 7, 0, 1, 2, 3));
  f32x8 b = vmax(a, SHUFFLE(i32x8, a, a, 2, 3, 0, 1, 6, 7, 4, 5));
  return b[0] > b[1] ? b[0] : b[1];
}

// [lo | hi]
INLINE u8x32 join(u8x16 lo, u8x16 hi) {
  u8x32 v;
  __builtin_memcpy(&v, &lo, 16);
  __builtin_memcpy((char*)&v + 16, &hi, 16);
  return v;
}

// The low and high nibbles of 16 bytes: low ones first.
INLINE u8x32 nibbles(const uint8_t* p) {
#if defined(__AVX2__)
  __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
  return (u8x32)_mm256_srlv_epi64(twice, _mm256_setr_epi64x(0, 0, 4, 4)) & 0x0f;
#else
  u8x16 v = load<u8x16>(p);
  return join(v & 0x0f, v >> 4);
#endif
}

// 32 bits as 32 bytes: `bit` where set, else 0.
INLINE u8x32 spread_bits(uint32_t bits, uint8_t bit) {
#if defined(__AVX2__)
  __m256i v = _mm256_shuffle_epi8(_mm256_set1_epi32((int)bits),
                                  _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202,
                                                     0x0303030303030303));
  __m256i select = _mm256_set1_epi64x((long long)0x8040201008040201ULL);
  __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(v, select), select);
  return (u8x32)set & bit;
#else
  u8x32 v;
  for (int i = 0; i < 32; i++) v[i] = (bits >> i & 1) ? bit : 0;
  return v;
#endif
}

// table[index], index < 16
INLINE u8x32 lookup16(const int8_t* table, u8x32 index) {
#if defined(__AVX2__)
  __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return (u8x32)_mm256_shuffle_epi8(t, (__m256i)index);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  uint8x16_t t = vreinterpretq_u8_s8(vld1q_s8(table));
  uint8x16_t lo, hi;
  __builtin_memcpy(&lo, &index, 16);
  __builtin_memcpy(&hi, (const char*)&index + 16, 16);
  return join((u8x16)vqtbl1q_u8(t, lo), (u8x16)vqtbl1q_u8(t, hi));
#else
  u8x32 v;
  for (int i = 0; i < 32; i++) v[i] = (uint8_t)table[index[i]];
  return v;
#endif
}

// acc + products of 16-bit pairs; which products share a 32-bit lane is the instruction set's choice within
// each half of 16 bytes.
INLINE i32x8 madd(i32x8 acc, i16x16 a, i16x16 b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return (i32x8)_mm256_dpwssd_epi32((__m256i)acc, (__m256i)a, (__m256i)b);
#elif defined(__AVXVNNI__)
  return (i32x8)_mm256_dpwssd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__)
  return acc + (i32x8)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  // even and odd 16-bit elements of each 32-bit lane, sign-extended in place
  i32x8 a0 = ((i32x8)a << 16) >> 16, b0 = ((i32x8)b << 16) >> 16;
  i32x8 a1 = (i32x8)a >> 16, b1 = (i32x8)b >> 16;
  return acc + a0 * b0 + a1 * b1;
#endif
}

// The same with lane i holding exactly elements 2i and 2i+1 (what the panels need).
INLINE i32x8 madd_pairs(i32x8 acc, i16x16 a, i16x16 b) { return madd(acc, a, b); }

// Whether dot4 takes signed weights (else unsigned ones).
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__AVX2__)
#define DOT4_SIGNED 0
#else
#define DOT4_SIGNED 1
#endif

// lane i: acc + the four products of bytes 4i to 4i+3; w unsigned unless DOT4_SIGNED, x signed.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define DOT4_NATIVE 1
INLINE i32x8 dot4(i32x8 acc, u8x32 w, i8x32 x) {
  return (i32x8)_mm256_dpbusd_epi32((__m256i)acc, (__m256i)w, (__m256i)x);
}
#elif defined(__AVXVNNI__)
#define DOT4_NATIVE 1
INLINE i32x8 dot4(i32x8 acc, u8x32 w, i8x32 x) {
  return (i32x8)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)x);
}
#elif defined(__AVX2__)
#define DOT4_NATIVE 0  // maddubs saturates at 16 bits: see the panels
#elif defined(__ARM_FEATURE_DOTPROD)
#define DOT4_NATIVE 1
INLINE i32x8 dot4(i32x8 acc, u8x32 w, i8x32 x) {
  int32x4_t a[2];
  int8x16_t v[2], y[2];
  __builtin_memcpy(a, &acc, 32);
  __builtin_memcpy(v, &w, 32);
  __builtin_memcpy(y, &x, 32);
  a[0] = vdotq_s32(a[0], v[0], y[0]);
  a[1] = vdotq_s32(a[1], v[1], y[1]);
  __builtin_memcpy(&acc, a, 32);
  return acc;
}
#else
#define DOT4_NATIVE 1
INLINE i32x8 dot4(i32x8 acc, u8x32 w, i8x32 x) {
  for (int byte = 0; byte < 4; byte++) {
    int left = 24 - 8 * byte;
    acc += (((i32x8)w << left) >> 24) * (((i32x8)x << left) >> 24);
  }
  return acc;
}
#endif

INLINE float f16_to_f32(const uint8_t* p) {
  uint16_t h;
  __builtin_memcpy(&h, p, 2);
#if defined(__F16C__)
  return _cvtsh_ss(h);
#elif defined(__aarch64__)
  __fp16 f;
  __builtin_memcpy(&f, &h, 2);
  return (float)f;
#else
  // The exponent is moved by a multiplication, which also handles denormals; 31 becomes infinity or NaN.
  uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
  float f;
  __builtin_memcpy(&f, &magnitude, 4);
  f *= 0x1p112f;
  if ((h & 0x7c00) == 0x7c00) {
    uint32_t bits = magnitude | 0x7f800000;
    __builtin_memcpy(&f, &bits, 4);
  }
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  bits |= sign;
  __builtin_memcpy(&f, &bits, 4);
  return f;
#endif
}

// Two neighbouring halves, in the first two lanes.
INLINE f32x4 load_f16_pair(const uint8_t* p) {
#if defined(__F16C__)
  return (f32x4)_mm_cvtph_ps(_mm_cvtsi32_si128(load<int32_t>(p)));
#else
  return (f32x4){f16_to_f32(p), f16_to_f32(p + 2), 0, 0};
#endif
}

INLINE f32x8 load_f16(const uint8_t* p) {
#if defined(__F16C__)
  return (f32x8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
  float16x8_t h = vreinterpretq_f16_u16(vld1q_u16((const uint16_t*)p));
  float32x4_t f[2] = {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
  f32x8 v;
  __builtin_memcpy(&v, f, 32);
  return v;
#else
  f32x8 v;
  for (int i = 0; i < 8; i++) v[i] = f16_to_f32(p + 2 * i);
  return v;
#endif
}

INLINE f32x8 load_bf16(const uint8_t* p) { return (f32x8)(CONVERT(load<u16x8>(p), u32x8) << 16); }

// Round to nearest even, as the hardware does.
INLINE void store_f16(uint8_t* p, f32x8 v) {
#if defined(__F16C__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  float32x4_t f[2];
  __builtin_memcpy(f, &v, 32);
  vst1q_u16((uint16_t*)p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(f[0]), f[1])));
#else
  for (int i = 0; i < 8; i++) {
    float f = v[i];
    uint32_t bits;
    __builtin_memcpy(&bits, &f, 4);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    uint16_t h;
    if (magnitude >= 0x7f800000) {
      h = (uint16_t)(sign | 0x7c00 | (magnitude > 0x7f800000 ? 0x200 : 0));
    } else if (magnitude >= 0x477ff000) {  // rounds past 65504
      h = (uint16_t)(sign | 0x7c00);
    } else if (magnitude < 0x38800000) {  // denormal: adding 0.5 lets the float unit round at 2^-24
      float a;
      __builtin_memcpy(&a, &magnitude, 4);
      a += 0.5f;
      uint32_t r;
      __builtin_memcpy(&r, &a, 4);
      h = (uint16_t)(sign | (r - 0x3f000000));
    } else {
      uint32_t r = magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000;
      h = (uint16_t)(sign | r >> 13);
    }
    __builtin_memcpy(p + 2 * i, &h, 2);
  }
#endif
}

INLINE i32x8 round_to_int(f32x8 v) {
#if defined(__AVX2__)
  return (i32x8)_mm256_cvtps_epi32((__m256)v);
#elif defined(__aarch64__)
  float32x4_t f[2];
  __builtin_memcpy(f, &v, 32);
  int32x4_t r[2] = {vcvtnq_s32_f32(f[0]), vcvtnq_s32_f32(f[1])};
  i32x8 out;
  __builtin_memcpy(&out, r, 32);
  return out;
#else
  // |v| < 2^22: adding 1.5 * 2^23 leaves the rounded integer in the low bits
  return (i32x8)(v + 12582912.0f) - 0x4b400000;
#endif
}

// e^x within 2 units in the last place for x in [-87, 88]; clamped outside; NaN stays NaN.
INLINE f32x8 vexp(f32x8 x) {
  f32x8 low = splat(-87.3f), high = splat(88.3f);
  x = x < low ? low : x;
  x = x > high ? high : x;
  f32x8 shifted = x * 1.44269504f + 12582912.0f;
  f32x8 n = shifted - 12582912.0f;
  f32x8 r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  // Taylor's series to r^7; |r| <= ln(2)/2
  f32x8 p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  i32x8 exponent = ((i32x8)shifted - 0x4b400000 + 127) << 23;
  return p * (f32x8)exponent;
}

// Eight rows of eight 32-bit elements, transposed in place.
INLINE void transpose8(i32x8 r[8]) {
  i32x8 t[8], s[8];
  for (int i = 0; i < 4; i++) {
    t[2 * i] = SHUFFLE(i32x8, r[2 * i], r[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    t[2 * i + 1] = SHUFFLE(i32x8, r[2 * i], r[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 2; i++) {
    s[4 * i] = SHUFFLE(i32x8, t[4 * i], t[4 * i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    s[4 * i + 1] = SHUFFLE(i32x8, t[4 * i], t[4 * i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    s[4 * i + 2] = SHUFFLE(i32x8, t[4 * i + 1], t[4 * i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
    s[4 * i + 3] = SHUFFLE(i32x8, t[4 * i + 1], t[4 * i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = SHUFFLE(i32x8, s[i], s[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    r[i + 4] = SHUFFLE(i32x8, s[i], s[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}
