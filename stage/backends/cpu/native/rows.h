// What is done to single rows of activations: quantising, norms, the gate, rotary embedding, writing keys and
// values. Included by variant.cpp.

// Four products of 16-bit activations and of weights up to 2^15 fit in 32 bits.
constexpr float kI16Largest = 16383;

INLINE void block_sums(const Quantised& q, int64_t block, float scale, i32x8 first, i32x8 second) {
  float low = (float)hsum_i32(first) * scale, high = (float)hsum_i32(second) * scale;
  q.scale[block] = scale;
  q.sum16[2 * block] = low;
  q.sum16[2 * block + 1] = high;
  q.sum32[block] = low + high;
}

// Magnitudes as bits, which order as the numbers do, with NaN above all.
INLINE i32x8 magnitudes(f32x8 v) { return (i32x8)v & 0x7fffffff; }
INLINE i32x8 larger(i32x8 a, i32x8 b) { return a > b ? a : b; }

// The largest of eight; NaN where one is infinite or NaN, so that products become NaN too.
INLINE float largest_of(i32x8 bits) {
  bits = larger(bits, SHUFFLE(i32x8, bits, bits, 4, 5, 6, 7, 0, 1, 2, 3));
  bits = larger(bits, SHUFFLE(i32x8, bits, bits, 2, 3, 0, 1, 6, 7, 4, 5));
  bits = larger(bits, SHUFFLE(i32x8, bits, bits, 1, 0, 3, 2, 5, 4, 7, 6));
  float largest = ((f32x8)bits)[0];
  return largest < 3e38f ? largest : __builtin_nanf("");
}

INLINE float largest_of(const f32x8 (&v)[4]) {
  return largest_of(larger(larger(magnitudes(v[0]), magnitudes(v[1])), larger(magnitudes(v[2]), magnitudes(v[3]))));
}

// One block of 256 from x[at] on.
INLINE void quantise_block(const Activations* a, int64_t at) {
  const float* x = a->f32 + at;
  i32x8 top = {};
  for (int i = 0; i < 32; i++) top = larger(top, magnitudes(load<f32x8>(x + 8 * i)));
  float largest = largest_of(top);
  f32x8 inverse = splat(largest > 0 ? 127.0f / largest : 0);
  int8_t* q = a->block_i8.q + at;
  int16_t* sum = a->block_i8.sum16 + at / 16;
  for (int u = 0; u < 8; u++) {
    i32x8 r[4];
    for (int i = 0; i < 4; i++) r[i] = round_to_int(load<f32x8>(x + 32 * u + 8 * i) * inverse);
    store(q + 32 * u, narrow8(narrow16(r[0], r[1]), narrow16(r[2], r[3])));
    sum[u] = (int16_t)hsum_i32(r[0] + r[1]);
    sum[8 + u] = (int16_t)hsum_i32(r[2] + r[3]);
  }
  a->block_i8.scale[at / 256] = largest / 127.0f;
}

void quantise(const Activations* a, int32_t forms, int64_t row, int32_t start, int32_t end) {
  for (int32_t k = start; k < end && forms & FORM_BLOCK_I8; k += 256) quantise_block(a, row * a->stride + k);
  for (int32_t k = start; k < end && forms & (FORM_I16 | FORM_I8); k += 32) {
    const float* x = a->f32 + row * a->stride + k;
    int64_t block = (row * a->stride + k) / 32;
    f32x8 v[4];
    for (int i = 0; i < 4; i++) v[i] = load<f32x8>(x + 8 * i);
    float largest = largest_of(v);
    if (forms & FORM_I16) {
      f32x8 inverse = splat(largest > 0 ? kI16Largest / largest : 0);
      i32x8 even[2], odd[2];
      for (int i = 0; i < 2; i++) {
        even[i] = round_to_int(SHUFFLE(i32x8, v[2 * i], v[2 * i + 1], 0, 2, 4, 6, 8, 10, 12, 14) * inverse);
        odd[i] = round_to_int(SHUFFLE(i32x8, v[2 * i], v[2 * i + 1], 1, 3, 5, 7, 9, 11, 13, 15) * inverse);
      }
      int16_t* q = (int16_t*)a->i16.q + row * a->stride + k;
      store(q, narrow16(even[0], even[1]));
      store(q + 16, narrow16(odd[0], odd[1]));
      block_sums(a->i16, block, largest / kI16Largest, even[0] + odd[0], even[1] + odd[1]);
    }
    if (forms & FORM_I8) {
      f32x8 inverse = splat(largest > 0 ? 127.0f / largest : 0);
      i32x8 r[4];
      for (int i = 0; i < 4; i++) r[i] = round_to_int(v[i] * inverse);
      int8_t* q = (int8_t*)a->i8.q + row * a->stride + k;
      store(q, narrow8(narrow16(r[0], r[1]), narrow16(r[2], r[3])));
      block_sums(a->i8, block, largest / 127.0f, r[0] + r[1], r[2] + r[3]);
    }
  }
}

void dequantise(const uint8_t* row, int32_t type, int32_t cols, float scale, float* out) {
  bool quantised = with_format(type, [&](auto format) {
    using F = decltype(format);
    for (int32_t b = 0; b < cols / F::kBlock; b++, row += F::kBytes, out += F::kBlock) {
      float d[16], m[16] = {};
      if constexpr (F::kBlock == 32) {
        F::scale(row, d[0], m[0]);
      } else {
        f32x8 ds[2], ms[2] = {};
        scales<F>(row, ds, ms);
        for (int i = 0; i < 32 / F::kGroup; i++) {
          store(d + 8 * i, ds[i]);
          store(m + 8 * i, ms[i]);
        }
      }
      for (int u = 0; u < F::kBlock / 32; u++) {
        u8x32 q = F::quants(row, u);
        for (int i = 0; i < 32; i++) {
          int group = (32 * u + i) / F::kGroup;
          float w = F::kSigned ? (float)(int8_t)q[i] : (float)q[i];
          out[32 * u + i] = (d[group] * w + m[group]) * scale;
        }
      }
    }
  });
  if (quantised) return;
  with_float_format(type, [&](auto format) {
    using F = decltype(format);
    for (int32_t k = 0; k < cols; k++) out[k] = F::load1(row + (int64_t)k * F::kBytes) * scale;
  });
}

void rms_norm(const float* x, const Norm* norm, float* out) {
  int32_t n = norm->size, k = 0;
  f32x8 acc[4] = {};
  for (; k + 32 <= n; k += 32)
    for (int j = 0; j < 4; j++) {
      f32x8 v = load<f32x8>(x + k + 8 * j);
      acc[j] += v * v;
    }
  float sum = hsum((acc[0] + acc[1]) + (acc[2] + acc[3]));
  for (; k < n; k++) sum += x[k] * x[k];
  float scale = 1.0f / __builtin_sqrtf(sum / (float)n + norm->eps);
  for (k = 0; k + 8 <= n; k += 8)
    store(out + k, load<f32x8>(x + k) * scale * load<f32x8>(norm->weight + k));
  for (; k < n; k++) out[k] = x[k] * scale * norm->weight[k];
}

INLINE f32x8 activate(f32x8 x, int32_t activation) {
  // GELU's 0.5 (1 + tanh z) is the logistic function of 2 z
  f32x8 z = activation == ACTIVATION_GELU ? x * (x * x * 0.044715f + 1.0f) * 1.5957691216057308f : x;
  return x / (vexp(-z) + 1.0f);
}

void gated(float* gate, const float* up, int32_t n, int32_t activation) {
  int32_t k = 0;
  for (; k + 8 <= n; k += 8) store(gate + k, activate(load<f32x8>(gate + k), activation) * load<f32x8>(up + k));
  for (; k < n; k++) gate[k] = activate(splat(gate[k]), activation)[0] * up[k];
}

void add(float* x, const float* y, int32_t n) {
  int32_t k = 0;
  for (; k + 8 <= n; k += 8) store(x + k, load<f32x8>(x + k) + load<f32x8>(y + k));
  for (; k < n; k++) x[k] += y[k];
}

void add_scaled(float* x, const float* y, float scale, int32_t n) {
  int32_t k = 0;
  for (; k + 8 <= n; k += 8) store(x + k, load<f32x8>(x + k) + load<f32x8>(y + k) * scale);
  for (; k < n; k++) x[k] += y[k] * scale;
}

INLINE f32x8 soft_cap(f32x8 x, float cap) {
  return (1.0f - 2.0f / (vexp(x * (2.0f / cap)) + 1.0f)) * cap;  // cap tanh(x / cap)
}

void softcap(float* x, float cap, int32_t n) {
  int32_t k = 0;
  for (; k + 8 <= n; k += 8) store(x + k, soft_cap(load<f32x8>(x + k), cap));
  for (; k < n; k++) x[k] = soft_cap(splat(x[k]), cap)[0];
}

// Rotates the first `dim` elements of a head by the angles of its position.
void rope(float* head, const float* table, int32_t dim, int32_t kind) {
  int32_t half = dim / 2, i = 0;
  const float *cosine = table, *sine = table + half;
  if (kind == ROPE_NEOX) {
    for (; i + 8 <= half; i += 8) {
      f32x8 x = load<f32x8>(head + i), y = load<f32x8>(head + half + i);
      f32x8 c = load<f32x8>(cosine + i), s = load<f32x8>(sine + i);
      store(head + i, x * c - y * s);
      store(head + half + i, x * s + y * c);
    }
    for (; i < half; i++) {
      float x = head[i], y = head[half + i];
      head[i] = x * cosine[i] - y * sine[i];
      head[half + i] = x * sine[i] + y * cosine[i];
    }
    return;
  }
  for (; i < half; i++) {
    float x = head[2 * i], y = head[2 * i + 1];
    head[2 * i] = x * cosine[i] - y * sine[i];
    head[2 * i + 1] = x * sine[i] + y * cosine[i];
  }
}

// `dim` is padded: a multiple of 32 for q8_0, else of 8 (q8_0 takes 34 bytes a block of 32: f16 scale, 32 signed bytes).
void store_kv(const float* x, int32_t dim, int32_t type, uint8_t* out) {
  if (type == KV_F32) return (void)__builtin_memcpy(out, x, dim * sizeof(float));
  if (type == KV_F16) {
    for (int32_t k = 0; k < dim; k += 8) store_f16(out + 2 * k, load<f32x8>(x + k));
    return;
  }
  for (int32_t k = 0; k < dim; k += 32, out += 34) {
    f32x8 v[4];
    for (int i = 0; i < 4; i++) v[i] = load<f32x8>(x + k + 8 * i);
    float largest = largest_of(v);
    f32x8 inverse = splat(largest > 0 ? 127.0f / largest : 0);
    uint8_t scale[16];
    store_f16(scale, splat(largest / 127.0f));
    __builtin_memcpy(out, scale, 2);
    i32x8 r[4];
    for (int i = 0; i < 4; i++) r[i] = round_to_int(v[i] * inverse);
    store(out + 2, narrow8(narrow16(r[0], r[1]), narrow16(r[2], r[3])));
  }
}

int64_t sum_bytes(const uint8_t* p, int64_t bytes) {
  i32x8 sum[8] = {};
  for (const uint8_t* end = p + bytes / 256 * 256; p < end; p += 256) {
    for (int line = 0; line < 256; line += 64) __builtin_prefetch(p + line + kDecodeAhead256);
    for (int i = 0; i < 8; i++) sum[i] += load<i32x8>(p + 32 * i);
  }
  for (int i = 1; i < 8; i++) sum[0] += sum[i];
  return hsum_i32(sum[0]);
}
