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

// Head `head` of a row (q heads, then k, then v), normed and turned, in `x` (f32 [head_dim], shared memory of this warp).
DEVICE void turned_head(const RopeArgs& args, int row, int head, int lane, float* x) {
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
    const float position = (float)args.positions[row];
    for (int i = lane; i < half; i += 32) {
        float s, c;
        sincosf(position * args.inverse_frequencies[i], &s, &c);
        s *= args.magnitude, c *= args.magnitude;
        const int first = args.neox ? i : 2 * i, second = args.neox ? i + half : 2 * i + 1;
        const float a = x[first], b = x[second];
        x[first] = a * c - b * s;
        x[second] = b * c + a * s;
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
