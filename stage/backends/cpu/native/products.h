// Which kernel multiplies what, and in which form it wants its input. Included by variant.cpp.

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

// From this many rows on panels of 8 bits are faster than rows read in place.
template <class F>
constexpr int32_t panel_min_rows() {
  return F::kBlock == 32 ? 4 : 9;
}

Form fast_form(int32_t type, int32_t n) {
  Form form = FORM_I16;
  with_format(type, [&](auto format) {
    using F = decltype(format);
    if (has_fast_i8<F>() && n >= panel_min_rows<F>())
      form = FORM_I8;
    else if (decodes_in_i8<F>())
      form = FORM_BLOCK_I8;
  });
  return form;
}

void matvec(const WeightRows* w, const Activations* a, Form form, const int32_t* index, int32_t n, float* out,
            int64_t out_stride) {
  bool quantised = with_format(w->type, [&](auto format) __attribute__((always_inline)) {
    using F = decltype(format);
    if constexpr (decodes_in_i8<F>())
      if (form == FORM_BLOCK_I8) return matvec_i8<F>(w, a, index, n, out, out_stride);
    if (n == 1) return matvec_one<F>(w, a, index ? index[0] : 0, out);
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
