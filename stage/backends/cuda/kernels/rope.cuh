// Norm of a head, rotary embedding and the append to the paged cache, one head a warp.
//
// Cache layouts, f16: keys [block][kv_head][token][head_stride]; values [block][kv_head][head_stride][token], so that
// the matrix units read both along their contiguous dimension. head_stride is head_dim rounded up to 32 (or more);
// what lies past head_dim is zero.
#pragma once
#include "common.cuh"

struct RopeArgs {
    const float* qkv;        // f32 [rows][qkv_stride]: q heads, then k heads, then v heads
    const int* positions;    // int [rows]
    const long long* slots;  // [rows]: block * block_size + offset; null: row i's place in block table i
    const int* block_tables;  // int [rows][table_stride]
    int table_stride;
    const float* inverse_frequencies;  // f32 [rope_dim / 2]
    const float* q_norm;     // f32 [head_dim] or null
    const float* k_norm;
    u16* q;                  // f16 [rows][num_heads][head_stride], times scale
    u16* keys;
    u16* values;
    int qkv_stride;
    int num_heads;
    int num_kv_heads;
    int head_dim;
    int head_stride;
    int rope_dim;
    int neox;           // pairs (i, i + rope_dim / 2), else (2i, 2i + 1)
    float magnitude;    // of cos and sin
    float scale;        // of q
    float norm_eps;
    int block_shift;    // log2(block_size)
};

// cos and sin of a position's angles, times the magnitude: lane i those of pairs i, i + 32, ... of a head.
template <int STRIDE>
struct Angles {
    static constexpr int COUNT = (STRIDE / 2 + 31) / 32;
    float cosine[COUNT], sine[COUNT];
};
template <int STRIDE>
DEVICE Angles<STRIDE> angles_of(const RopeArgs& args, int position, int lane) {
    Angles<STRIDE> angles;
#pragma unroll
    for (int k = 0; k < Angles<STRIDE>::COUNT; k++) {
        const int i = lane + 32 * k;
        float s = 0.f, c = 0.f;
        if (i < args.rope_dim / 2) sincosf((float)position * args.inverse_frequencies[i], &s, &c);
        angles.sine[k] = s * args.magnitude, angles.cosine[k] = c * args.magnitude;
    }
    return angles;
}

// Head `head` of a row (q heads, then k, then v), normed and turned, in `x` (f32 [head_dim], shared memory of this warp).
template <int STRIDE>
DEVICE void turned_head(const RopeArgs& args, const Angles<STRIDE>& angles, int row, int head, int lane, float* x) {
    const float* from = args.qkv + (u64)row * args.qkv_stride + head * args.head_dim;
    const bool is_q = head < args.num_heads, is_v = head >= args.num_heads + args.num_kv_heads;
    float squares = 0.f;
    for (int i = lane; i < args.head_dim; i += 32) {
        const float value = from[i];
        x[i] = value;
        squares += value * value;
    }
    __syncwarp();
    if (is_v) return;
    const float* weight = is_q ? args.q_norm : args.k_norm;
    if (weight) {
        const float factor = rsqrtf(warp_sum(squares) / (float)args.head_dim + args.norm_eps);
        for (int i = lane; i < args.head_dim; i += 32) x[i] = x[i] * factor * weight[i];
        __syncwarp();
    }
    const int half = args.rope_dim / 2;
#pragma unroll
    for (int k = 0; k < Angles<STRIDE>::COUNT; k++) {
        const int i = lane + 32 * k;
        if (i >= half) break;
        const int first = args.neox ? i : 2 * i, second = args.neox ? i + half : 2 * i + 1;
        const float a = x[first], b = x[second];
        x[first] = a * angles.cosine[k] - b * angles.sine[k];
        x[second] = b * angles.cosine[k] + a * angles.sine[k];
    }
    __syncwarp();
}

// K or V of a row, in `x`, to its place in the cache.
DEVICE void append(const RopeArgs& args, int row, int kv_head, bool is_v, int lane, const float* x) {
    const long long slot = args.slots ? args.slots[row] : args.positions[row];
    const int offset = (int)(slot & ((1 << args.block_shift) - 1));
    long long block = slot >> args.block_shift;
    if (!args.slots) block = args.block_tables[(u64)row * args.table_stride + block];
    const u64 base = ((u64)block * args.num_kv_heads + kv_head) * args.head_stride << args.block_shift;
    for (int i = lane; i < args.head_dim; i += 32) {
        const u16 h = half_saturated(x[i]);
        if (is_v)
            args.values[base + ((u64)i << args.block_shift) + offset] = h;
        else
            args.keys[base + (u64)offset * args.head_stride + i] = h;
    }
}
