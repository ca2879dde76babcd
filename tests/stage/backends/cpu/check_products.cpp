// Runs products of a case file on one variant of the native library, for processors that have no Python at hand:
//   check_products VARIANT CASES
// A case: int32 type, rows, cols, n, exact, weight bytes; the weights; x [n, cols]; the expected y [n, rows]; and
// a float, the largest error allowed in units of y's root mean square. Prints the worst error; 1 if too large.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <vector>

#include "plan.h"

template <class T>
static bool get(FILE* file, std::vector<T>& to, size_t count) {
  to.resize(count);
  return fread(to.data(), sizeof(T), count, file) == count;
}

int main(int, char** arguments) {
  FILE* file = fopen(arguments[2], "rb");
  if (!file) return 2;
  Engine* engines[2];
  for (int exact = 0; exact < 2; exact++) {
    engines[exact] = pipellm_create(arguments[1], 2, nullptr, 0, "", exact);
    if (!engines[exact]) {
      printf("this processor runs %s, not %s\n", pipellm_variants(), arguments[1]);
      return 3;
    }
  }
  std::vector<int32_t> head;
  std::vector<uint8_t> weights;
  std::vector<float> x, expected, allowed;
  int cases = 0, failed = 0;
  while (get(file, head, 6)) {
    int32_t type = head[0], rows = head[1], cols = head[2], n = head[3], exact = head[4];
    if (!get(file, weights, (size_t)head[5]) || !get(file, x, (size_t)n * cols) ||
        !get(file, expected, (size_t)n * rows) || !get(file, allowed, 1))
      return 2;
    std::vector<float> y((size_t)n * rows, NAN);
    Matrix matrix{weights.data(), head[5] / rows, 0, nullptr, type, rows, cols};
    pipellm_matmul(engines[exact], &matrix, x.data(), n, y.data());
    double square = 0, worst = 0;
    for (size_t i = 0; i < y.size(); i++) {
      square += (double)expected[i] * expected[i];
      double error = fabs((double)y[i] - expected[i]);
      if (!(error <= worst)) worst = error;  // NaN counts as the worst
    }
    double relative = worst / sqrt(square / (double)y.size());
    cases++;
    if (!(relative < allowed[0])) {
      failed++;
      printf("type %d, %d x %d, %d rows, exact %d: error %g\n", type, rows, cols, n, exact, relative);
    }
  }
  printf("%s: %d cases, %d failed\n", arguments[1], cases, failed);
  for (Engine* engine : engines) pipellm_destroy(engine);
  return failed != 0 || cases == 0;
}
