// What the kernels without matrix units share.
#pragma once
#include "common.cuh"

// Eight sums over the four t of lanes 4g + t, as the matrix units would leave them: lane 4g + t gets those of numbers
// 2t and 2t + 1. Each step hands half of what is left to the lane that keeps it.
DEVICE void fold(const float (&x)[8], int lane, float& first, float& second) {
    const bool upper_half = lane & 2, upper_pair = lane & 1;
    float half[4], pair[2];
#pragma unroll
    for (int k = 0; k < 4; k++)
        half[k] = (upper_half ? x[k + 4] : x[k]) + __shfl_xor_sync(FULL_WARP, upper_half ? x[k] : x[k + 4], 2);
#pragma unroll
    for (int k = 0; k < 2; k++)
        pair[k] = (upper_pair ? half[k + 2] : half[k]) + __shfl_xor_sync(FULL_WARP, upper_pair ? half[k] : half[k + 2], 1);
    first = pair[0], second = pair[1];
}

// Eight f16, in the order they lie in.
DEVICE void widen(const uint4& v, float (&x)[8]) {
#pragma unroll
    for (int k = 0; k < 4; k++) x[2 * k] = half2_low(word(v, k)), x[2 * k + 1] = half2_high(word(v, k));
}
