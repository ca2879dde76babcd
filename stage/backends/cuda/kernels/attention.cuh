// Arguments of attention; layouts of the cache in rope.cuh.
#pragma once
#include "rope.cuh"

struct AttentionArgs {
    const u16* q;              // f16 [rows][num_heads][head_stride]
    const u16* keys;
    const u16* values;
    const int* positions;      // int [rows]
    const int* block_tables;   // int [tables][table_stride]; entries past a sequence's blocks name any valid block
    const int4* tiles;         // (first row, tokens, table, -) a tile; null: tile i is row i, table i
    u16* out;                  // f16 [rows][out_stride], or tiled: heads side by side
    float* partial;            // decode with splits: f32 [rows][pieces][splits][8][head_stride + 4]
    u32* arrived;              // [rows][pieces], zero before and after
    int num_tiles;
    int table_stride;
    int num_heads;
    int num_kv_heads;
    int group;        // heads a KV head serves
    int group_shift;  // log2 of group rounded up
    int head_dim;
    int out_stride;
    int tiled;  // operand_index
    int block_shift;
    int window;       // 0: none; a row at p sees (p - window, p]
    float softcap;    // 0: none
};

constexpr float LOG2E = 1.4426950408889634f, NONE = -1e30f;

template <int N>
DEVICE void cap(float (&scores)[N][4], float softcap) {
    const float inverse = 1.f / softcap;
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int c = 0; c < 4; c++) scores[n][c] = softcap * tanhf(scores[n][c] * inverse);
    }
}
