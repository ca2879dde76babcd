// Many input rows: weights are unpacked, a panel of eight rows at a time, into a form the inner loop can
// stream, and used for all input rows before the next panel. Nothing is kept: the mapped file stays the only
// copy of the weights, and unpacking costs a few percent from some tens of rows on. Included by variant.cpp.
//
// A panel holds 32-bit words: word j of eight weight rows side by side (four bytes, two 16-bit values or one
// float of consecutive, or for 16-bit even or odd, elements), so that one broadcast word of an input row
// meets eight rows, and sums need no horizontal step. Scales lie in vectors of eight rows as well.

struct Panel {
  alignas(64) uint8_t words[kPanelRows * kPanelCols * 4];
  float d[kPanelCols / 16 * kPanelRows];
  float m[kPanelCols / 16 * kPanelRows];
};

// How many maddubs results of this many bits may be added in 16 bits: n * 2 * (2^bits - 1) * 127 < 32768.
constexpr int adds_in_16_bits(int bits) { return bits <= 4 ? 8 : bits == 5 ? 4 : 2; }

template <class F, int kForm>
constexpr bool panel_has_minimum() {
  return !F::kSigned || (kForm == FORM_I8 && !DOT4_SIGNED);
}

// Columns [k, k + width) of eight rows.
template <class F, int kForm>
INLINE void unpack(const uint8_t* const rows[kPanelRows], int32_t k, int32_t width, Panel* panel) {
  constexpr int kGroupVectors = F::kBlock / F::kGroup;  // vectors of eight rows' scales a block
  constexpr bool kOffset = F::kSigned && kForm == FORM_I8 && !DOT4_SIGNED;  // signed weights + 128
  uint8_t* words = panel->words;
  float *d = panel->d, *m = panel->m;
  for (int32_t b = k / F::kBlock; b < (k + width) / F::kBlock; b++) {
    if constexpr (F::kBlock == 32) {
      float ds[8], ms[8];
      for (int i = 0; i < 8; i++) F::scale(rows[i] + (int64_t)b * F::kBytes, ds[i], ms[i]);
      store(d, load<f32x8>(ds));
      if constexpr (kOffset)
        store(m, load<f32x8>(ds) * -128.0f);
      else if constexpr (!F::kSigned)
        store(m, load<f32x8>(ms));
    } else {
      f32x8 ds[8][2], ms[8][2];
      for (int i = 0; i < 8; i++) F::scales(rows[i] + (int64_t)b * F::kBytes, ds[i], ms[i]);
      for (int v = 0; v < kGroupVectors / 8; v++) {
        i32x8 t[8];
        for (int i = 0; i < 8; i++) t[i] = (i32x8)ds[i][v];
        transpose8(t);
        for (int i = 0; i < 8; i++) store(d + 8 * (8 * v + i), t[i]);
        if constexpr (kOffset) {
          for (int i = 0; i < 8; i++) store(m + 8 * (8 * v + i), (f32x8)t[i] * -128.0f);
        } else if constexpr (!F::kSigned) {
          for (int i = 0; i < 8; i++) t[i] = (i32x8)ms[i][v];
          transpose8(t);
          for (int i = 0; i < 8; i++) store(m + 8 * (8 * v + i), t[i]);
        }
      }
    }
    d += 8 * kGroupVectors;
    m += 8 * kGroupVectors;
#pragma GCC unroll 8
    for (int u = 0; u < F::kBlock / 32; u++) {
      i32x8 low[8], high[8];
      for (int i = 0; i < 8; i++) {
        u8x32 v = F::quants(rows[i] + (int64_t)b * F::kBytes, u);
        if constexpr (kOffset) v ^= 0x80;
        if constexpr (kForm == FORM_I8) {
          low[i] = (i32x8)v;
        } else {
          i16x16 even, odd;
          split16<F>(v, even, odd);
          low[i] = (i32x8)even;
          high[i] = (i32x8)odd;
        }
      }
      transpose8(low);
      if constexpr (kForm == FORM_I8) {
        for (int i = 0; i < 8; i++) store(words + 32 * i, low[i]);
        words += 32 * 8;
      } else {
        transpose8(high);
        for (int half = 0; half < 2; half++)
          for (int i = 0; i < 4; i++) {
            store(words + 32 * (8 * half + i), low[4 * half + i]);
            store(words + 32 * (8 * half + 4 + i), high[4 * half + i]);
          }
        words += 32 * 16;
      }
    }
  }
}

// Eight words of 8-bit weights and their inputs, from word `first` of a block.
template <class F, int N, int kWords>
INLINE void dot_words8(const uint8_t* words, const int8_t* const* x, i32x8* dot) {
#if DOT4_NATIVE
  for (int j = 0; j < kWords; j++) {
    u8x32 w = load<u8x32>(words + 32 * j);
    for (int i = 0; i < N; i++) dot[i] = dot4(dot[i], w, (i8x32)splat_i32(load<int32_t>(x[i] + 4 * j)));
  }
#else
  constexpr int kAdds = adds_in_16_bits(F::kBits) < kWords ? adds_in_16_bits(F::kBits) : kWords;
  for (int j0 = 0; j0 < kWords; j0 += kAdds) {
    i16x16 pairs[N];
    for (int j = j0; j < j0 + kAdds; j++) {
      __m256i w = load<__m256i>(words + 32 * j);
      for (int i = 0; i < N; i++) {
        i16x16 p = (i16x16)_mm256_maddubs_epi16(w, (__m256i)splat_i32(load<int32_t>(x[i] + 4 * j)));
        pairs[i] = j == j0 ? p : pairs[i] + p;
      }
    }
    for (int i = 0; i < N; i++) dot[i] = madd(dot[i], pairs[i], (i16x16)splat_i32(0x00010001));
  }
#endif
}

// acc[i] += panel . x[i] over `width` columns; x, scale and sum point at the panel's first column.
template <class F, int kForm, int N>
INLINE void panel_dot(const Panel* panel, int32_t width, const void* const* x, const float* const* scale,
                      const float* const* sum, f32x8* acc) {
  constexpr int kGroups = 32 / F::kGroup;  // groups in 32 columns: 1 or 2
  const uint8_t* words = panel->words;
  for (int32_t u = 0; u < width / 32; u++) {
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; g++) {
      i32x8 dot[N] = {};
      if constexpr (kForm == FORM_I8) {
        const int8_t* at[N];
        for (int i = 0; i < N; i++) at[i] = (const int8_t*)x[i] + 32 * u + 16 * g;
        dot_words8<F, N, 8 / kGroups>(words, at, dot);
        words += 32 * 8 / kGroups;
      } else {
        // words 0-3 of the block's even elements with 0-3 of the odd ones make its first half
#pragma GCC unroll 16
        for (int j = 0; j < 16 / kGroups; j++) {
          int word = 16 / kGroups * g + j, half = word / 8;
          int from = word % 8 < 4 ? 4 * half + word % 8 : 8 + 4 * half + word % 4;
          i16x16 w = load<i16x16>(words + 32 * j);
          for (int i = 0; i < N; i++)
            dot[i] = madd(dot[i], w, (i16x16)splat_i32(load<int32_t>((const int16_t*)x[i] + 32 * u + 2 * from)));
        }
        words += 32 * 16 / kGroups;
      }
      f32x8 d = load<f32x8>(panel->d + 8 * (kGroups * u + g));
      for (int i = 0; i < N; i++) acc[i] += CONVERT(dot[i], f32x8) * (d * scale[i][u]);
      if constexpr (panel_has_minimum<F, kForm>()) {
        f32x8 m = load<f32x8>(panel->m + 8 * (kGroups * u + g));
        for (int i = 0; i < N; i++) acc[i] += m * sum[i][kGroups * u + g];
      }
    }
  }
}

struct FloatForm {
  enum { kSigned = 1, kGroup = 32 };
};

template <class F>
INLINE void unpack_float(const uint8_t* const rows[kPanelRows], int32_t k, int32_t width, Panel* panel) {
  int32_t j = 0;
  for (; j + 8 <= width; j += 8) {
    i32x8 t[8];
    for (int i = 0; i < 8; i++) t[i] = (i32x8)F::load8(rows[i] + (int64_t)(k + j) * F::kBytes);
    transpose8(t);
    for (int i = 0; i < 8; i++) store(panel->words + 32 * (j + i), t[i]);
  }
  for (; j < width; j++)
    for (int i = 0; i < 8; i++) {
      float w = F::load1(rows[i] + (int64_t)(k + j) * F::kBytes);
      store(panel->words + 32 * j + 4 * i, w);
    }
}

template <int N>
INLINE void panel_dot_float(const Panel* panel, int32_t width, const void* const* x, f32x8* acc) {
  for (int32_t k = 0; k < width; k++) {
    f32x8 w = load<f32x8>(panel->words + 32 * k);
    for (int i = 0; i < N; i++) acc[i] += w * ((const float*)x[i])[k];
  }
}

template <class F, int kForm, int N>
INLINE void panel_rows(const Panel* panels, int32_t num_panels, int32_t k, int32_t width, const WeightRows* w,
                       const Activations* a, const int32_t* index, int32_t first, int32_t row, float* out,
                       int64_t out_stride) {
  const void* x[N];
  const float *scale[N], *sum[N];
  const Quantised& q = kForm == FORM_I8 ? a->i8 : a->i16;
  for (int i = 0; i < N; i++) {
    int64_t from = index ? index[first + i] : first + i;
    if constexpr (kForm == FORM_F32) {
      x[i] = a->f32 + from * a->stride + k;
    } else {
      x[i] = (const char*)q.q + (from * a->stride + k) * (kForm == FORM_I8 ? 1 : 2);
      scale[i] = q.scale + (from * a->stride + k) / 32;
      sum[i] = (F::kGroup == 32 ? q.sum32 : q.sum16) + (from * a->stride + k) / F::kGroup;
    }
  }
  for (int32_t p = 0; p < num_panels; p++) {
    int32_t r = row + p * kPanelRows, rows = w->row_end - r < kPanelRows ? w->row_end - r : kPanelRows;
    f32x8 acc[N] = {};
    if (k > 0)
      for (int i = 0; i < N; i++) __builtin_memcpy(&acc[i], out + (first + i) * out_stride + r, rows * sizeof(float));
    if constexpr (kForm == FORM_F32)
      panel_dot_float<N>(panels + p, width, x, acc);
    else
      panel_dot<F, kForm, N>(panels + p, width, x, scale, sum, acc);
    for (int i = 0; i < N; i++) {
      float* y = out + (first + i) * out_stride + r;
      if (rows == kPanelRows)
        store(y, acc[i]);
      else
        __builtin_memcpy(y, &acc[i], rows * sizeof(float));
    }
  }
}

template <class F, int kForm, class Unpack>
INLINE void matmul_panels(const WeightRows* w, const Activations* a, const int32_t* index, int32_t n, float* out,
                          int64_t out_stride, Panel* panels, Unpack unpack_panel) {
  for (int32_t row = w->row_start; row < w->row_end; row += kPanelRows * kPanels) {
    int32_t left = w->row_end - row;
    int32_t num_panels = left < kPanelRows * kPanels ? (left + kPanelRows - 1) / kPanelRows : kPanels;
    for (int32_t k = 0; k < w->cols; k += kPanelCols) {
      int32_t width = w->cols - k < kPanelCols ? w->cols - k : kPanelCols;
      for (int32_t p = 0; p < num_panels; p++) {
        const uint8_t* rows[kPanelRows];
        for (int i = 0; i < kPanelRows; i++) {
          int32_t r = row + p * kPanelRows + i;  // past the end: the last row again, not stored
          rows[i] = w->data + (r < w->row_end ? r : w->row_end - 1) * w->row_bytes;
        }
        unpack_panel(rows, k, width, panels + p);
      }
      int32_t i = 0;
      for (; i + 4 <= n; i += 4)
        panel_rows<F, kForm, 4>(panels, num_panels, k, width, w, a, index, i, row, out, out_stride);
      for (; i < n; i++)
        panel_rows<F, kForm, 1>(panels, num_panels, k, width, w, a, index, i, row, out, out_stride);
    }
  }
}

template <class F>
constexpr bool has_fast_i8() {
  return DOT4_NATIVE || !F::kSigned;
}

bool fast_i8(int32_t type) {
  bool fast = false;
  with_format(type, [&](auto format) { fast = has_fast_i8<decltype(format)>(); });
  return fast;
}

void matmul(const WeightRows* w, Form form, const Activations* a, const int32_t* index, int32_t n, float* out,
            int64_t out_stride, void* scratch) {
  Panel* panels = (Panel*)scratch;
  bool quantised = with_format(w->type, [&](auto format) {
    using F = decltype(format);
    if (form == FORM_I8) {
      if constexpr (has_fast_i8<F>())
        matmul_panels<F, FORM_I8>(w, a, index, n, out, out_stride, panels, unpack<F, FORM_I8>);
    } else {
      matmul_panels<F, FORM_I16>(w, a, index, n, out, out_stride, panels, unpack<F, FORM_I16>);
    }
  });
  if (quantised) return;
  with_float_format(w->type, [&](auto format) {
    matmul_panels<FloatForm, FORM_F32>(w, a, index, n, out, out_stride, panels, unpack_float<decltype(format)>);
  });
}
