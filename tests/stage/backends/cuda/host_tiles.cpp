// Decodes tiles with the device code of types.cuh, on the host.
#include "host_cuda.h"
#include "types.cuh"

template <class Type>
static void decode(const u8* tile, int exponent, float inverse, float* out) {
    launch({1, 1, 1}, 32, [&] {
        const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
        Type packet;
        packet.load(tile, lane);
        packet.prepare(exponent, lane);
        for (int i = 0; i < 4; i++) {
            Fragments a;
            packet.fragments(i, lane, a);
            for (int parity = 0; parity < 2; parity++)
                for (int step = 0; step < 2; step++)
                    for (int r = 0; r < 4; r++)
                        for (int e = 0; e < 2; e++) {
                            const int row = g + 8 * (r & 1), column = 64 * i + 32 * parity + 8 * t + 4 * step + 2 * (r >> 1) + e;
                            out[row * 256 + column] = (float)half_of(a[parity][step][r], e) * inverse;
                        }
        }
    });
}

extern "C" int decode_tile(const char* type, const u8* tile, int exponent, float inverse, float* out) {
#define TYPE(name) if (!strcmp(type, #name)) return decode<name>(tile, exponent, inverse, out), name::BYTES
    TYPE(Q4_0); TYPE(Q4_1); TYPE(Q5_0); TYPE(Q5_1); TYPE(Q8_0); TYPE(Q2_K); TYPE(Q3_K); TYPE(Q4_K); TYPE(Q5_K);
    TYPE(Q6_K); TYPE(IQ4_NL); TYPE(IQ4_XS); TYPE(MXFP4); TYPE(F16);
    return 0;
}
