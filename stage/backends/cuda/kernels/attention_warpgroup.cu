// Attention of prefill chunks with Hopper's warpgroup products. A warpgroup takes 64 rows, which are (token, head) pairs
// as in attention.cu; all of a block walk the same keys, 64 at a time, from shared memory.
#include "attention.cuh"
#include "warpgroup.cuh"

constexpr int KEYS = 64, STAGES = 2;

// A stage: K as [chunk of 8 dimensions][key] 16 bytes, V as [chunk of 8 keys][dimension] 16 bytes. The padding lets the
// copies' writes fall on different banks.
template <int HEAD>
struct Layout {
    static constexpr int K_CHUNK = KEYS * 16 + 16, V_CHUNK = HEAD * 16 + 16;
    static constexpr int V_START = HEAD / 8 * K_CHUNK, BYTES = V_START + KEYS / 8 * V_CHUNK;
};

template <int HEAD, int THREADS>
DEVICE void stage(u32 shared, const AttentionArgs& args, const int* table, int kv_head, int key_base) {
    const int mask = (1 << args.block_shift) - 1;
    for (int i = threadIdx.x; i < KEYS * HEAD / 8; i += THREADS) {
        const int key = i / (HEAD / 8), chunk = i % (HEAD / 8), position = key_base + key;
        const u64 block = (u64)table[position >> args.block_shift] * args.num_kv_heads + kv_head;
        const u16* from = args.keys + ((block << args.block_shift) + (position & mask)) * HEAD + chunk * 8;
        copy_async(shared + chunk * Layout<HEAD>::K_CHUNK + key * 16, from);
    }
    for (int i = threadIdx.x; i < HEAD * KEYS / 8; i += THREADS) {
        const int chunk = i % 4 + i / (4 * HEAD) * 4, dim = i / 4 % HEAD, position = key_base + chunk * 8;
        const u64 block = (u64)table[position >> args.block_shift] * args.num_kv_heads + kv_head;
        const u16* from = args.values + ((block * HEAD + dim) << args.block_shift) + (position & mask);
        copy_async(shared + Layout<HEAD>::V_START + chunk * Layout<HEAD>::V_CHUNK + dim * 16, from);
    }
}

// Grid: (tiles of (64 GROUPS >> group_shift) tokens, kv heads). Later tiles see more keys: they come first.
template <int HEAD, int GROUPS>
__global__ void __launch_bounds__(GROUPS * 128, 1) attention_warpgroup(const __grid_constant__ AttentionArgs args) {
    extern __shared__ __align__(128) u8 shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    const int kv_head = blockIdx.y;
    const u32 base = (u32)__cvta_generic_to_shared(shared);
    dependency_wait();
    const int4 tile = args.tiles[gridDim.x - 1 - blockIdx.x];
    const int* table = args.block_tables + (u64)tile.z * args.table_stride;
    const int first_position = args.positions[tile.x], last_position = first_position + tile.y - 1;
    const int from = args.window ? max(first_position + 1 - args.window, 0) / KEYS : 0, to = last_position / KEYS + 1;
    stage<HEAD, GROUPS * 128>(base, args, table, kv_head, from * KEYS);
    copy_commit();

    // Rows g and g + 8 of this warp's 16.
    int lasts[2], rows[2];
    u32 q[HEAD / 16][4];
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
        const int r = warp * 16 + 8 * upper + g, token = r >> args.group_shift, head = r & ((1 << args.group_shift) - 1);
        const bool real = token < tile.y && head < args.group;
        lasts[upper] = real ? first_position + token : -1;
        rows[upper] = real ? (tile.x + token) * args.num_heads + kv_head * args.group + head : -1;
        const u32* at = (const u32*)(args.q + (u64)max(rows[upper], 0) * HEAD) + t;
#pragma unroll
        for (int j = 0; j < HEAD / 16; j++) q[j][upper] = at[j * 8], q[j][2 + upper] = at[j * 8 + 4];
    }
    // The keys that every row of this warp sees, and those that one of them does.
    const int warp_first = first_position + (warp * 16 >> args.group_shift);
    const int group_last = first_position + ((warp / 4 * 64 + 63) >> args.group_shift);
    float o[HEAD / 8][4] = {}, top[2] = {NONE, NONE}, total[2] = {};
    for (int i = from; i < to; i++) {
        const u32 here = base + (i - from) % STAGES * Layout<HEAD>::BYTES;
        copy_wait<0>();
        warpgroup_publish();
        __syncthreads();
        if (i + 1 < to)
            stage<HEAD, GROUPS * 128>(base + (i + 1 - from) % STAGES * Layout<HEAD>::BYTES, args, table, kv_head,
                                      (i + 1) * KEYS);
        copy_commit();
        const int key_base = i * KEYS;
        if (key_base > group_last) continue;
        float scores[KEYS / 8][4] = {};
        const u64 k = matrix_at(here, Layout<HEAD>::K_CHUNK);
        warpgroup_fence();
#pragma unroll
        for (int j = 0; j < HEAD / 16; j++) warpgroup_mma(scores, q[j], k + (j * 2 * Layout<HEAD>::K_CHUNK >> 4));
        warpgroup_commit();
        warpgroup_wait<0>();

        if (args.softcap != 0.f) cap(scores, args.softcap);
        if (key_base + KEYS - 1 > warp_first || args.window) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const int key = key_base + n * 8 + 2 * t + (c & 1), last = lasts[c >> 1];
                    if (key > last || (args.window && key <= last - args.window)) scores[n][c] = NONE;
                }
            }
        }
        float largest[2] = {top[0], top[1]};
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (int c = 0; c < 4; c++) largest[c >> 1] = fmaxf(largest[c >> 1], scores[n][c]);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            largest[r] = fmaxf(largest[r], __shfl_xor_sync(FULL_WARP, largest[r], 1));
            largest[r] = fmaxf(largest[r], __shfl_xor_sync(FULL_WARP, largest[r], 2));
            const float keep = power_of_two((top[r] - largest[r]) * LOG2E);
            top[r] = largest[r];
            total[r] *= keep;
#pragma unroll
            for (int n = 0; n < HEAD / 8; n++) o[n][2 * r] *= keep, o[n][2 * r + 1] *= keep;
        }
        // What a row does not see is not counted, also while it has seen nothing.
        const float bottom[2] = {top[0] == NONE ? 0.f : top[0] * LOG2E, top[1] == NONE ? 0.f : top[1] * LOG2E};
        u32 p[KEYS / 16][4];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float x = power_of_two(__fmaf_rn(scores[n][2 * r], LOG2E, -bottom[r]));
                const float y = power_of_two(__fmaf_rn(scores[n][2 * r + 1], LOG2E, -bottom[r]));
                const u32 pair = half2_pack(x, y);
                total[r] += half2_low(pair) + half2_high(pair);
                p[n >> 1][2 * (n & 1) + r] = pair;
            }
        }
        const u64 v = matrix_at(here + Layout<HEAD>::V_START, Layout<HEAD>::V_CHUNK);
        warpgroup_fence();
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++) warpgroup_mma(o, p[j], v + (j * 2 * Layout<HEAD>::V_CHUNK >> 4));
        warpgroup_commit();
        warpgroup_wait<0>();
    }
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
        float sum = total[upper];
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        if (rows[upper] < 0) continue;
        const int row = rows[upper] / args.num_heads, first = rows[upper] % args.num_heads * args.head_dim;
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++) {
            const int dim = n * 8 + 2 * t;
            if (dim < args.head_dim)
                *(u32*)(args.out + operand_index(row, first + dim, args.out_stride, args.tiled)) =
                    half2_saturated(o[n][2 * upper] / sum, o[n][2 * upper + 1] / sum);
        }
    }
}
