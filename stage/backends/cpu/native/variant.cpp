// The kernels for one instruction set: compiled once for each, with PIPELLM_VARIANT naming the table and the
// compiler's flags choosing the instructions. All of it is in an anonymous namespace, so that the linker can
// never put one variant's code into another.
#include "kernels.h"
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {
#include "vec.h"
#include "formats.h"
#include "narrow.h"
#include "matvec.h"
#include "decode.h"
#include "decode8.h"
#include "matmul.h"
#include "products.h"
#include "rows.h"
#include "attention.h"

static_assert(sizeof(Panel) * kPanels <= kScratchBytes, "matmul's panels fit");
static_assert(sizeof(AttentionScratch) <= kScratchBytes, "attention's tiles fit");
}  // namespace

#define JOIN(a, b) a##b
#define TABLE(name) JOIN(pipellm_kernels_, name)
#define QUOTE(name) #name
#define STRING(name) QUOTE(name)

extern "C" {
extern const Kernels TABLE(PIPELLM_VARIANT);
const Kernels TABLE(PIPELLM_VARIANT) = {
    STRING(PIPELLM_VARIANT), matvec, matmul, fast_form, quantise, dequantise, rms_norm,  gated,
    add,                     add_scaled, softcap, rope, store_kv, attention, sum_bytes,
};
}
