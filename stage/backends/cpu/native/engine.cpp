#include "engine.h"

#include <stdlib.h>

#include <algorithm>

namespace {

constexpr int32_t kTypeF32 = 0, kTypeF16 = 1, kTypeBf16 = 30;

}  // namespace

Arena::~Arena() { free(base_); }

bool Arena::reset(size_t bytes) {
  used_ = 0;
  if (bytes <= size_) return true;
  free(base_);
  size_ = rounded(bytes);
  base_ = static_cast<unsigned char*>(aligned_alloc(64, size_));
  if (!base_) size_ = 0;
  return base_ != nullptr;
}

void* Arena::take(size_t bytes) {
  unsigned char* p = base_ + used_;
  used_ += rounded(bytes);
  return p;
}

bool float_type(int32_t type) { return type == kTypeF32 || type == kTypeF16 || type == kTypeBf16; }

Form form_for(const Engine& engine, const Matrix& matrix, int32_t n) {
  if (float_type(matrix.type)) return FORM_F32;
  return engine.exact ? FORM_I16 : engine.kernels->fast_form(matrix.type, n);
}

void multiply(const Engine& engine, const Matrix& matrix, int64_t expert, int32_t start, int32_t end,
              const Activations& x, const int32_t* index, int32_t n, float* out, int64_t out_stride, void* scratch) {
  WeightRows weights{matrix.data + expert * matrix.expert_bytes, matrix.row_bytes, matrix.type, matrix.cols, start,
                     end};
  Form form = form_for(engine, matrix, n);
  if (form == FORM_I8 || (form == FORM_F32 && n >= kFloatPanelMinRows))
    engine.kernels->matmul(&weights, &x, index, n, out, out_stride, scratch);
  else
    engine.kernels->matvec(&weights, &x, form, index, n, out, out_stride);
  if (matrix.bias)
    for (int32_t i = 0; i < n; i++)
      engine.kernels->add(out + i * out_stride + start, matrix.bias + start, end - start);
}

namespace {

int64_t padded(int64_t width) { return (width + 255) / 256 * 256; }

}  // namespace

size_t activations_bytes(int64_t rows, int64_t width) {
  size_t elements = static_cast<size_t>(rows * padded(width));
  size_t scales = Arena::rounded(elements / 32 * 4) * 2 + Arena::rounded(elements / 16 * 4);
  size_t block_i8 = Arena::rounded(elements) + Arena::rounded(elements / 256 * 4) + Arena::rounded(elements / 16 * 2);
  return Arena::rounded(elements * 4) + Arena::rounded(elements * 2) + Arena::rounded(elements) + 2 * scales + block_i8;
}

Activations take_activations(Arena& arena, int64_t rows, int64_t width) {
  Activations x;
  x.stride = padded(width);
  size_t elements = static_cast<size_t>(rows * x.stride);
  x.f32 = static_cast<float*>(arena.take(elements * 4));
  Quantised* forms[] = {&x.i16, &x.i8};
  size_t bytes[] = {2, 1};
  for (int i = 0; i < 2; i++) {
    forms[i]->q = arena.take(elements * bytes[i]);
    forms[i]->scale = static_cast<float*>(arena.take(elements / 32 * 4));
    forms[i]->sum32 = static_cast<float*>(arena.take(elements / 32 * 4));
    forms[i]->sum16 = static_cast<float*>(arena.take(elements / 16 * 4));
  }
  x.block_i8.q = static_cast<int8_t*>(arena.take(elements));
  x.block_i8.scale = static_cast<float*>(arena.take(elements / 256 * 4));
  x.block_i8.sum16 = static_cast<int16_t*>(arena.take(elements / 16 * 2));
  return x;
}

int32_t chunk_rows(int32_t rows, int32_t threads, int32_t n) {
  if (n >= kFloatPanelMinRows) return std::clamp((rows / (threads * 8) + 31) / 32 * 32, 32, 64);
  // Several chunks a thread, so that a slow one costs little; few enough that drawing them costs nothing; of those
  // the number that leaves the threads most nearly the same.
  int32_t best = 32, least = INT32_MAX;
  for (int32_t chunks = 4; chunks <= 8; chunks++) {
    int32_t chunk = std::clamp((rows / (threads * chunks) + 31) / 32 * 32, 32, 512);
    int32_t units = (rows + chunk - 1) / chunk, busiest = (units + threads - 1) / threads * chunk;
    if (busiest < least) {
      best = chunk;
      least = busiest;
    }
  }
  return best;
}
