// Many input rows: weights are unpacked, a panel of eight rows at a time, into a form the inner loop can
// stream, and used for all input rows before the next panel. Nothing is kept: the mapped file stays the only
// copy of the weights, and unpacking costs a few percent from some tens of rows on. Included by variant.cpp.
//
// A panel holds 32-bit words: word j of eight weight rows side by side (four bytes or one float of consecutive
// elements), so that one broadcast word of an input row meets eight rows, and sums need no horizontal step.
// Scales lie in vectors of eight rows as well.

struct Panel {
  alignas(64) uint8_t words[kPanelRows * kPanelCols * 4];
  float d[kPanelCols / 16 * kPanelRows];
  float m[kPanelCols / 16 * kPanelRows];
};

// How many maddubs results of this many bits may be added in 16 bits: n * 2 * (2^bits - 1) * 127 < 32768.
constexpr int adds_in_16_bits(int bits) { return bits <= 4 ? 8 : bits == 5 ? 4 : 2; }

// Sums are made where they stand: without this the compiler makes all products first, and spills them.
#define IN_REGISTER(v) asm("" : "+x"(v))

// Signed weights become unsigned ones, 128 more.
template <class F>
constexpr bool panel_is_offset() {
  return F::kSigned && !DOT4_SIGNED;
}

template <class F>
constexpr bool panel_has_minimum() {
  return !F::kSigned || panel_is_offset<F>();
}

// Columns [k, k + width) of eight rows.
template <class F>
INLINE void unpack(const uint8_t* const rows[kPanelRows], int32_t k, int32_t width, Panel* panel) {
  constexpr int kGroupVectors = F::kBlock / F::kGroup;  // vectors of eight rows' scales a block
  constexpr bool kOffset = panel_is_offset<F>();
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
      for (int i = 0; i < 8; i++) scales<F>(rows[i] + (int64_t)b * F::kBytes, ds[i], ms[i]);
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
      i32x8 t[8];
      for (int i = 0; i < 8; i++) {
        u8x32 v = F::quants(rows[i] + (int64_t)b * F::kBytes, u);
        if constexpr (kOffset) v ^= 0x80;
        t[i] = (i32x8)v;
      }
      transpose8(t);
      for (int i = 0; i < 8; i++) store(words + 32 * i, t[i]);
      words += 32 * 8;
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
#pragma GCC unroll 4
  for (int j0 = 0; j0 < kWords; j0 += kAdds) {
    i16x16 pairs[N];
#pragma GCC unroll 8
    for (int j = j0; j < j0 + kAdds; j++) {
      __m256i w = load<__m256i>(words + 32 * j);
#pragma GCC unroll 4
      for (int i = 0; i < N; i++) {
        i16x16 p = (i16x16)_mm256_maddubs_epi16(w, (__m256i)splat_i32(load<int32_t>(x[i] + 4 * j)));
        pairs[i] = j == j0 ? p : pairs[i] + p;
        IN_REGISTER(pairs[i]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) dot[i] = madd(dot[i], pairs[i], (i16x16)splat_i32(0x00010001));
  }
#endif
}

// acc[i] += panel . x[i] over `width` columns; x, scale and sum point at the panel's first column.
template <class F, int N>
INLINE void panel_dot(const Panel* panel, int32_t width, const int8_t* const* x, const float* const* scale,
                      const float* const* sum, f32x8* acc) {
  constexpr int kGroups = 32 / F::kGroup;  // groups in 32 columns: 1 or 2
  const uint8_t* words = panel->words;
  for (int32_t u = 0; u < width / 32; u++) {
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; g++) {
      i32x8 dot[N] = {};
      const int8_t* at[N];
#pragma GCC unroll 4
      for (int i = 0; i < N; i++) at[i] = x[i] + 32 * u + 16 * g;
      dot_words8<F, N, 8 / kGroups>(words, at, dot);
      words += 32 * 8 / kGroups;
      f32x8 d = load<f32x8>(panel->d + 8 * (kGroups * u + g));
#pragma GCC unroll 4
      for (int i = 0; i < N; i++) acc[i] += CONVERT(dot[i], f32x8) * (d * scale[i][u]);
      if constexpr (panel_has_minimum<F>()) {
        f32x8 m = load<f32x8>(panel->m + 8 * (kGroups * u + g));
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) acc[i] += m * sum[i][kGroups * u + g];
      }
    }
  }
}

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
INLINE void panel_dot_float(const Panel* panel, int32_t width, const float* const* x, f32x8* acc) {
  for (int32_t k = 0; k < width; k++) {
    f32x8 w = load<f32x8>(panel->words + 32 * k);
    for (int i = 0; i < N; i++) acc[i] += w * x[i][k];
  }
}

// What panels multiply: 8-bit inputs of a quantised format.
template <class F, int N>
struct IntegerInputs {
  const int8_t* x[N];
  const float *scale[N], *sum[N];

  IntegerInputs(const Activations* a, const int32_t* index, int32_t first, int32_t k) {
    for (int i = 0; i < N; i++) {
      int64_t at = (index ? index[first + i] : first + i) * a->stride + k;
      x[i] = (const int8_t*)a->i8.q + at;
      scale[i] = a->i8.scale + at / 32;
      sum[i] = (F::kGroup == 32 ? a->i8.sum32 : a->i8.sum16) + at / F::kGroup;
    }
  }
  INLINE void dot(const Panel* panel, int32_t width, f32x8* acc) const {
    panel_dot<F, N>(panel, width, x, scale, sum, acc);
  }
};

// Or float ones of an unquantised format.
template <class F, int N>
struct FloatInputs {
  const float* x[N];

  FloatInputs(const Activations* a, const int32_t* index, int32_t first, int32_t k) {
    for (int i = 0; i < N; i++) x[i] = a->f32 + (index ? index[first + i] : first + i) * a->stride + k;
  }
  INLINE void dot(const Panel* panel, int32_t width, f32x8* acc) const { panel_dot_float<N>(panel, width, x, acc); }
};

// out (+)= panels . inputs for N inputs from `first`: from column 0 on set, later added to.
template <int N, class Inputs>
INLINE void panel_rows(const Panel* panels, int32_t num_panels, int32_t width, const Inputs& inputs, bool accumulate,
                       int32_t rows_left, float* out, int64_t out_stride) {
  for (int32_t p = 0; p < num_panels; p++, rows_left -= kPanelRows, out += kPanelRows) {
    size_t bytes = (rows_left < kPanelRows ? rows_left : kPanelRows) * sizeof(float);
    f32x8 acc[N] = {};
    if (accumulate)
#pragma GCC unroll 4
      for (int i = 0; i < N; i++) __builtin_memcpy(&acc[i], out + i * out_stride, bytes);
    inputs.dot(panels + p, width, acc);
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      if (rows_left >= kPanelRows)
        store(out + i * out_stride, acc[i]);
      else
        __builtin_memcpy(out + i * out_stride, &acc[i], bytes);
    }
  }
}

template <class F, template <class, int> class Inputs, class Unpack>
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
        panel_rows<4>(panels, num_panels, width, Inputs<F, 4>(a, index, i, k), k > 0, left,
                      out + i * out_stride + row, out_stride);
      for (; i < n; i++)
        panel_rows<1>(panels, num_panels, width, Inputs<F, 1>(a, index, i, k), k > 0, left,
                      out + i * out_stride + row, out_stride);
    }
  }
}

// On plain AVX2 8-bit weights would overflow maddubs: these types keep 16-bit activations.
template <class F>
constexpr bool has_fast_i8() {
  return DOT4_NATIVE || !F::kSigned;
}

void matmul(const WeightRows* w, const Activations* a, const int32_t* index, int32_t n, float* out,
            int64_t out_stride, void* scratch) {
  Panel* panels = (Panel*)scratch;
  bool quantised = with_format(w->type, [&](auto format) {
    using F = decltype(format);
    if constexpr (has_fast_i8<F>())
      matmul_panels<F, IntegerInputs>(w, a, index, n, out, out_stride, panels, unpack<F>);
  });
  if (quantised) return;
  with_float_format(w->type, [&](auto format) {
    using F = decltype(format);
    matmul_panels<F, FloatInputs>(w, a, index, n, out, out_stride, panels, unpack_float<F>);
  });
}
