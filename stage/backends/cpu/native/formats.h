// How each quantised block is read: 32 weights at a time as bytes, and the affine scale of each group, so
// that w = d * q + m. Everything else (products, panels, look-ups) is written once over these readers.
// Layouts as ggml defines them (ggml-common.h, ggml-quants.c of the GGUF project; gguf-py's quants.py).
//
// A reader has kBlock weights in kBytes, kGroup weights a scale, q unsigned below 2^kBits or kSigned, and
//   quants(p, u)              weights 32u to 32u + 31 of the block at p
//   split(p, u, even, odd)    the same as 16-bit values, elements 0, 2, ... and 1, 3, ..., left where masks find them:
//                             `times` as large. times() has a factor for each lane of their products (kBlock 32) or
//                             for each u (kBlock 256)
//   scale(p, d, m)            kBlock 32: the block's d and m
//   packed(p, d, m)           kBlock 256: d and m of its groups as signed bytes, eight a word, in units of factors(p):
//                             those of d and of -m
// m is left alone where kSigned: it is zero; it is -kOffset d where kOffset is not 0. Blocks of 32 that begin with
// halves have kHalves of them: 1, d; or 2, d and m.

enum {
  TYPE_F32 = 0, TYPE_F16 = 1, TYPE_Q4_0 = 2, TYPE_Q4_1 = 3, TYPE_Q5_0 = 6, TYPE_Q5_1 = 7, TYPE_Q8_0 = 8,
  TYPE_Q2_K = 10, TYPE_Q3_K = 11, TYPE_Q4_K = 12, TYPE_Q5_K = 13, TYPE_Q6_K = 14, TYPE_IQ4_NL = 20,
  TYPE_IQ4_XS = 23, TYPE_BF16 = 30, TYPE_MXFP4 = 39,
};

INLINE uint32_t load_u32(const uint8_t* p) { return load<uint32_t>(p); }

INLINE f32x8 signed_bytes_to_f32(uint64_t bytes) {
#if defined(__AVX2__)
  return (f32x8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)bytes)));
#else
  return CONVERT(load<i8x8>(&bytes), f32x8);
#endif
}

INLINE void split_bytes(bool is_signed, u8x32 v, i16x16& even, i16x16& odd) {
  even = is_signed ? ((i16x16)v << 8) >> 8 : (i16x16)v & 0xff;
  odd = is_signed ? (i16x16)v >> 8 : (i16x16)((u16x16)v >> 8);
}

// split from the bytes of quants, in the fewest instructions.
template <class F>
struct SplitBytes {
  static INLINE void split(const uint8_t* p, int u, i16x16& even, i16x16& odd) {
    u8x32 v = F::quants(p, u);
    if constexpr (F::kSigned) {
      even = (i16x16)v << 8;
      odd = (i16x16)((u16x16)v & 0xff00);
    } else {
      split_bytes(false, v, even, odd);
    }
  }
  static INLINE f32x8 times() { return splat(F::kSigned ? 256 : 1); }
};

// Sixteen bytes whose low nibbles are the first sixteen elements.
INLINE void split_nibbles(const uint8_t* p, i16x16& even, i16x16& odd) {
#if defined(__AVX2__)
  u16x16 v = (u16x16)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
#else
  u8x16 once = load<u8x16>(p);
  u16x16 v = (u16x16)join(once, once);
#endif
  const u16x16 mask = {15, 15, 15, 15, 15, 15, 15, 15, 240, 240, 240, 240, 240, 240, 240, 240};
  even = (i16x16)(v & mask);
  odd = (i16x16)(v >> 8 & mask);
}

INLINE f32x8 nibble_times() { return (f32x8){1, 1, 1, 1, 16, 16, 16, 16}; }

struct Q4_0 {
  enum { kBlock = 32, kBytes = 18, kGroup = 32, kSigned = 0, kBits = 4, kHalves = 1, kOffset = 8 };
  static INLINE u8x32 quants(const uint8_t* p, int) { return nibbles(p + 2); }
  static INLINE void split(const uint8_t* p, int, i16x16& even, i16x16& odd) { split_nibbles(p + 2, even, odd); }
  static INLINE f32x8 times() { return nibble_times(); }
  static INLINE void scale(const uint8_t* p, float& d, float& m) {
    d = f16_to_f32(p);
    m = -8 * d;
  }
};

struct Q4_1 {
  enum { kBlock = 32, kBytes = 20, kGroup = 32, kSigned = 0, kBits = 4, kHalves = 2, kOffset = 0 };
  static INLINE u8x32 quants(const uint8_t* p, int) { return nibbles(p + 4); }
  static INLINE void split(const uint8_t* p, int, i16x16& even, i16x16& odd) { split_nibbles(p + 4, even, odd); }
  static INLINE f32x8 times() { return nibble_times(); }
  static INLINE void scale(const uint8_t* p, float& d, float& m) {
    d = f16_to_f32(p);
    m = f16_to_f32(p + 2);
  }
};

struct Q5_0 : SplitBytes<Q5_0> {
  enum { kBlock = 32, kBytes = 22, kGroup = 32, kSigned = 0, kBits = 5, kHalves = 1, kOffset = 16 };
  static INLINE u8x32 quants(const uint8_t* p, int) { return nibbles(p + 6) | spread_bits(load_u32(p + 2), 16); }
  static INLINE void scale(const uint8_t* p, float& d, float& m) {
    d = f16_to_f32(p);
    m = -16 * d;
  }
};

struct Q5_1 : SplitBytes<Q5_1> {
  enum { kBlock = 32, kBytes = 24, kGroup = 32, kSigned = 0, kBits = 5, kHalves = 2, kOffset = 0 };
  static INLINE u8x32 quants(const uint8_t* p, int) { return nibbles(p + 8) | spread_bits(load_u32(p + 4), 16); }
  static INLINE void scale(const uint8_t* p, float& d, float& m) {
    d = f16_to_f32(p);
    m = f16_to_f32(p + 2);
  }
};

struct Q8_0 : SplitBytes<Q8_0> {
  enum { kBlock = 32, kBytes = 34, kGroup = 32, kSigned = 1, kBits = 8, kHalves = 1, kOffset = 0 };
  static INLINE u8x32 quants(const uint8_t* p, int) { return load<u8x32>(p + 2); }
  static INLINE void scale(const uint8_t* p, float& d, float&) { d = f16_to_f32(p); }
};

static const int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t kMxfp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // twice E2M1

struct IQ4_NL : SplitBytes<IQ4_NL> {
  enum { kBlock = 32, kBytes = 18, kGroup = 32, kSigned = 1, kBits = 8, kHalves = 1, kOffset = 0 };
  static INLINE u8x32 quants(const uint8_t* p, int) { return lookup16(kIq4Values, nibbles(p + 2)); }
  static INLINE void scale(const uint8_t* p, float& d, float&) { d = f16_to_f32(p); }
};

struct MXFP4 : SplitBytes<MXFP4> {
  enum { kBlock = 32, kBytes = 17, kGroup = 32, kSigned = 1, kBits = 8, kHalves = 0, kOffset = 0 };
  static INLINE u8x32 quants(const uint8_t* p, int) { return lookup16(kMxfp4Values, nibbles(p + 1)); }
  static INLINE void scale(const uint8_t* p, float& d, float&) {
    // 2^(e - 128): half of the block's power of two, the table holding twice the values
    uint32_t bits = p[0] < 2 ? 0x00200000u << p[0] : (uint32_t)(p[0] - 1) << 23;
    __builtin_memcpy(&d, &bits, 4);
  }
};

// Eight bytes below 64, each less 32: no byte borrows from its neighbour.
INLINE uint64_t minus_32(uint64_t bytes) {
  return ((bytes | 0x8080808080808080) - 0x2020202020202020) ^ 0x8080808080808080;
}

struct Q2_K {
  enum { kBlock = 256, kBytes = 84, kGroup = 16, kSigned = 0, kBits = 2, kOffset = 0 };
  static INLINE u8x32 quants(const uint8_t* p, int u) {
    return (u8x32)(load<u16x16>(p + 16 + 32 * (u / 4)) >> (2 * (u % 4))) & 3;
  }
  static INLINE void split(const uint8_t* p, int u, i16x16& even, i16x16& odd) {
    u16x16 v = load<u16x16>(p + 16 + 32 * (u / 4));
    uint16_t mask = (uint16_t)(3 << 2 * (u % 4));
    even = (i16x16)(v & mask);
    odd = (i16x16)(v >> 8 & mask);
  }
  static INLINE f32x8 times() { return (f32x8){1, 4, 16, 64, 1, 4, 16, 64}; }
  static INLINE f32x4 factors(const uint8_t* p) { return load_f16_pair(p + 80); }
  static INLINE void packed(const uint8_t* p, uint64_t* d, uint64_t* m) {
    for (int i = 0; i < 2; i++) {
      uint64_t both = load<uint64_t>(p + 8 * i);
      d[i] = both & 0x0f0f0f0f0f0f0f0f;
      m[i] = both >> 4 & 0x0f0f0f0f0f0f0f0f;
    }
  }
};

struct Q3_K : SplitBytes<Q3_K> {
  enum { kBlock = 256, kBytes = 110, kGroup = 16, kSigned = 0, kBits = 3, kOffset = 4 };
  static INLINE u8x32 quants(const uint8_t* p, int u) {
    u8x32 low = (u8x32)(load<u16x16>(p + 32 + 32 * (u / 4)) >> (2 * (u % 4))) & 3;
    u16x16 high = load<u16x16>(p);
    return low | ((u8x32)(u < 2 ? high << (2 - u) : high >> (u - 2)) & 4);
  }
  static INLINE f32x4 factors(const uint8_t* p) { return (f32x4){f16_to_f32(p + 108)}; }
  static INLINE void packed(const uint8_t* p, uint64_t* d, uint64_t*) {
    uint64_t low = load<uint64_t>(p + 96);
    uint64_t high = load_u32(p + 104);  // two bits of scales i, i + 4, i + 8, i + 12 in byte i
    high |= high << 30;                 // now scales 0-3 (and 4-7) at bits 0-1 of bytes 0-3 (and 4-7)
    for (int i = 0; i < 2; i++)
      d[i] = minus_32((low >> 4 * i & 0x0f0f0f0f0f0f0f0f) | (high >> 4 * i & 0x0303030303030303) << 4);
  }
};

// The eight 6-bit scales and minima of Q4_K and Q5_K, from 12 bytes.
INLINE void packed_k4(const uint8_t* p, uint64_t* d, uint64_t* m) {
  uint32_t a = load_u32(p + 4), b = load_u32(p + 8), c = load_u32(p + 12);
  *d = (a & 0x3f3f3f3f) | (uint64_t)((c & 0x0f0f0f0f) | (a >> 2 & 0x30303030)) << 32;
  *m = (b & 0x3f3f3f3f) | (uint64_t)((c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)) << 32;
}

struct Q4_K {
  enum { kBlock = 256, kBytes = 144, kGroup = 32, kSigned = 0, kBits = 4, kOffset = 0 };
  static INLINE u8x32 quants(const uint8_t* p, int u) {
    u16x16 v = load<u16x16>(p + 16 + 32 * (u / 2));
    return (u8x32)(u & 1 ? v >> 4 : v) & 0x0f;
  }
  static INLINE void split(const uint8_t* p, int u, i16x16& even, i16x16& odd) {
    u16x16 v = load<u16x16>(p + 16 + 32 * (u / 2));
    uint16_t mask = u & 1 ? 0xf0 : 0x0f;
    even = (i16x16)(v & mask);
    odd = (i16x16)(v >> 8 & mask);
  }
  static INLINE f32x8 times() { return (f32x8){1, 16, 1, 16, 1, 16, 1, 16}; }
  static INLINE f32x4 factors(const uint8_t* p) { return load_f16_pair(p); }
  static INLINE void packed(const uint8_t* p, uint64_t* d, uint64_t* m) { packed_k4(p, d, m); }
};

struct Q5_K : SplitBytes<Q5_K> {
  enum { kBlock = 256, kBytes = 176, kGroup = 32, kSigned = 0, kBits = 5, kOffset = 0 };
  static INLINE u8x32 quants(const uint8_t* p, int u) {
    u16x16 v = load<u16x16>(p + 48 + 32 * (u / 2));
    u16x16 high = load<u16x16>(p + 16);
    high = u < 4 ? high << (4 - u) : high >> (u - 4);
    return ((u8x32)(u & 1 ? v >> 4 : v) & 0x0f) | ((u8x32)high & 16);
  }
  static INLINE f32x4 factors(const uint8_t* p) { return load_f16_pair(p); }
  static INLINE void packed(const uint8_t* p, uint64_t* d, uint64_t* m) { packed_k4(p, d, m); }
};

struct Q6_K : SplitBytes<Q6_K> {
  enum { kBlock = 256, kBytes = 210, kGroup = 16, kSigned = 0, kBits = 6, kOffset = 32 };
  static INLINE u8x32 quants(const uint8_t* p, int u) {
    int half = u / 4, quarter = u % 4;
    u16x16 v = load<u16x16>(p + 64 * half + 32 * (quarter & 1));
    u16x16 high = load<u16x16>(p + 128 + 32 * half);
    high = quarter == 0 ? high << 4 : quarter == 1 ? high << 2 : quarter == 2 ? high : high >> 2;
    return ((u8x32)(quarter & 2 ? v >> 4 : v) & 0x0f) | ((u8x32)high & 0x30);
  }
  static INLINE f32x4 factors(const uint8_t* p) { return (f32x4){f16_to_f32(p + 208)}; }
  static INLINE void packed(const uint8_t* p, uint64_t* d, uint64_t*) { __builtin_memcpy(d, p + 192, 16); }
};

struct IQ4_XS : SplitBytes<IQ4_XS> {
  enum { kBlock = 256, kBytes = 136, kGroup = 32, kSigned = 1, kBits = 8, kOffset = 0 };
  static INLINE u8x32 quants(const uint8_t* p, int u) { return lookup16(kIq4Values, nibbles(p + 8 + 16 * u)); }
  static INLINE f32x4 factors(const uint8_t* p) { return (f32x4){f16_to_f32(p)}; }
  static INLINE void packed(const uint8_t* p, uint64_t* d, uint64_t*) {
    uint64_t low = load_u32(p + 4), high = load<uint16_t>(p + 2);  // 4 and 2 bits of each, spread to bytes
    low = (low | low << 16) & 0x0000ffff0000ffff;
    low = (low | low << 8) & 0x00ff00ff00ff00ff;
    low = (low | low << 4) & 0x0f0f0f0f0f0f0f0f;
    high = (high | high << 24) & 0x000000ff000000ff;
    high = (high | high << 12) & 0x000f000f000f000f;
    high = (high | high << 6) & 0x0303030303030303;
    *d = minus_32(low | high << 4);
  }
};

// d and m of a block of 256's groups, eight a vector.
template <class F>
INLINE void scales(const uint8_t* p, f32x8* d, f32x8* m) {
  uint64_t packed_d[2], packed_m[2];
  F::packed(p, packed_d, packed_m);
  f32x4 factors = F::factors(p);
  for (int i = 0; i < 32 / F::kGroup; i++) {
    d[i] = signed_bytes_to_f32(packed_d[i]) * factors[0];
    if constexpr (F::kOffset != 0)
      m[i] = d[i] * -(float)(int)F::kOffset;
    else if constexpr (!F::kSigned)
      m[i] = signed_bytes_to_f32(packed_m[i]) * -factors[1];
  }
}

// Unquantised types, eight weights at a time.
struct F32 {
  enum { kBytes = 4 };
  static INLINE f32x8 load8(const uint8_t* p) { return load<f32x8>(p); }
  static INLINE float load1(const uint8_t* p) { return load<float>(p); }
};

struct F16 {
  enum { kBytes = 2 };
  static INLINE f32x8 load8(const uint8_t* p) { return load_f16(p); }
  static INLINE float load1(const uint8_t* p) { return f16_to_f32(p); }
};

struct BF16 {
  enum { kBytes = 2 };
  static INLINE f32x8 load8(const uint8_t* p) { return load_bf16(p); }
  static INLINE float load1(const uint8_t* p) {
    uint32_t bits = (uint32_t)load<uint16_t>(p) << 16;
    float f;
    __builtin_memcpy(&f, &bits, 4);
    return f;
  }
};

// Calls f(Reader{}) for the reader of a quantised type; false for another type.
template <class Fn>
INLINE bool with_format(int32_t type, Fn&& f) {
  switch (type) {
    case TYPE_Q4_0: f(Q4_0{}); return true;
    case TYPE_Q4_1: f(Q4_1{}); return true;
    case TYPE_Q5_0: f(Q5_0{}); return true;
    case TYPE_Q5_1: f(Q5_1{}); return true;
    case TYPE_Q8_0: f(Q8_0{}); return true;
    case TYPE_Q2_K: f(Q2_K{}); return true;
    case TYPE_Q3_K: f(Q3_K{}); return true;
    case TYPE_Q4_K: f(Q4_K{}); return true;
    case TYPE_Q5_K: f(Q5_K{}); return true;
    case TYPE_Q6_K: f(Q6_K{}); return true;
    case TYPE_IQ4_NL: f(IQ4_NL{}); return true;
    case TYPE_IQ4_XS: f(IQ4_XS{}); return true;
    case TYPE_MXFP4: f(MXFP4{}); return true;
    default: return false;
  }
}

template <class Fn>
INLINE bool with_float_format(int32_t type, Fn&& f) {
  switch (type) {
    case TYPE_F32: f(F32{}); return true;
    case TYPE_F16: f(F16{}); return true;
    case TYPE_BF16: f(BF16{}); return true;
    default: return false;
  }
}
