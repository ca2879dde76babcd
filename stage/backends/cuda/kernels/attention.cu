// Attention of new rows over the paged cache, for decode and for prefill; layouts in rope.cuh.
//
// The matrix units take 16 query rows against 32 keys: a row is a (token, head) pair of one KV head's group, so
// that the heads of a group share every load of K and V. Sums and the softmax are float32; P is f16.
// Rows: tile row r is token r / group_size of the tile, head r % group_size (group rounded up to a power of two).
#include "attention.cuh"

template <int HEAD>
struct State {
    float o[HEAD / 8][4];     // lane 4g + t: rows g (0, 1) and g + 8 (2, 3), dimensions 8n + 2t, + 1
    float top[2], total[2];  // of rows g and g + 8, in powers of two; total: this lane's share
};

// Keys key_base .. + 31 of a sequence, as a warp holds them: K, then V.
template <int HEAD>
struct Keys {
    uint4 k[HEAD / 8], v[HEAD / 8];
};

// Where this lane reads K (keys 8 (g / 2) + g % 2 + 2i of the 32) and V (keys 8t .. + 7) of a group.
template <int HEAD>
DEVICE const u16* key_address(const AttentionArgs& args, const int* table, int kv_head, int key_base, int lane) {
    const int g = lane >> 2, t = lane & 3, key = key_base + 8 * (g >> 1);
    const u64 block = (u64)table[key >> args.block_shift] * args.num_kv_heads + kv_head;
    const int offset = key & ((1 << args.block_shift) - 1);
    return args.keys + ((block << args.block_shift) + offset + (g & 1)) * HEAD + 8 * t;
}
template <int HEAD>
DEVICE const u16* value_address(const AttentionArgs& args, const int* table, int kv_head, int key_base, int lane) {
    const int g = lane >> 2, t = lane & 3, key = key_base + 8 * t;
    const u64 block = (u64)table[key >> args.block_shift] * args.num_kv_heads + kv_head;
    return args.values + ((block * HEAD + g) << args.block_shift) + (key & ((1 << args.block_shift) - 1));
}
template <int HEAD>
DEVICE void load_keys(Keys<HEAD>& keys, const u16* from) {
#pragma unroll
    for (int j = 0; j < HEAD / 32; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) keys.k[4 * j + i] = load_cached(from + 2 * i * HEAD + j * 32);
}
template <int HEAD>
DEVICE void load_values(Keys<HEAD>& keys, const u16* from, int block_shift) {
#pragma unroll
    for (int n = 0; n < HEAD / 8; n++) keys.v[n] = load_cached(from + ((u64)n * 8 << block_shift));
}

// Key `offset` of the 32 becomes the one whose K and V are in shared memory (f16 [HEAD] each).
template <int HEAD>
DEVICE void replace_key(Keys<HEAD>& keys, int offset, const u16* new_k, const u16* new_v, int lane) {
    const int g = lane >> 2, t = lane & 3;
    if (g == 2 * (offset >> 3) + (offset & 1)) {
#pragma unroll
        for (int j = 0; j < HEAD / 32; j++) {
            const uint4 k = *(const uint4*)(new_k + j * 32 + 8 * t);
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (i == ((offset >> 1) & 3)) keys.k[4 * j + i] = k;
        }
    }
    if (t == offset >> 3) {
        u32 mask[4];
#pragma unroll
        for (int i = 0; i < 4; i++) mask[i] = i == ((offset >> 1) & 3) ? offset & 1 ? 0xffff0000u : 0xffffu : 0u;
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++) {
            const u32 v = new_v[n * 8 + g] * 0x00010001u;
            uint4& at = keys.v[n];
            at.x = (at.x & ~mask[0]) | (v & mask[0]), at.y = (at.y & ~mask[1]) | (v & mask[1]);
            at.z = (at.z & ~mask[2]) | (v & mask[2]), at.w = (at.w & ~mask[3]) | (v & mask[3]);
        }
    }
}

// Scores of the keys key_base .. + 31 become P, f16, and the state is brought to their largest.
template <int HEAD>
DEVICE void soften(const AttentionArgs& args, float (&scores)[4][4], int key_base, int last_low, int last_high, int lane,
                   State<HEAD>& s, u32 (&p)[2][4]) {
    const int t = lane & 3;
    float top[2] = {s.top[0], s.top[1]};
    if (args.softcap != 0.f) cap(scores, args.softcap);
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int key = key_base + 8 * t + 2 * i + (c & 1), last = c < 2 ? last_low : last_high;
            const bool seen = key <= last && (args.window == 0 || key > last - args.window);
            scores[i][c] = seen ? scores[i][c] * LOG2E : NONE;
            top[c >> 1] = fmaxf(top[c >> 1], scores[i][c]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        top[r] = fmaxf(top[r], __shfl_xor_sync(FULL_WARP, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(FULL_WARP, top[r], 2));
        const float keep = power_of_two(s.top[r] - top[r]);
        s.top[r] = top[r];
        s.total[r] *= keep;
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++) s.o[n][2 * r] *= keep, s.o[n][2 * r + 1] *= keep;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float x = scores[i][2 * r] == NONE ? 0.f : power_of_two(scores[i][2 * r] - top[r]);
            const float y = scores[i][2 * r + 1] == NONE ? 0.f : power_of_two(scores[i][2 * r + 1] - top[r]);
            const u32 pair = half2_pack(x, y);
            s.total[r] += half2_low(pair) + half2_high(pair);
            p[i >> 1][2 * (i & 1) + r] = pair;
        }
    }
}

// Attends to the keys key_base .. + 31, read as they are needed.
template <int HEAD>
DEVICE void attend(const AttentionArgs& args, const u16* q_low, const u16* q_high, const u32 (&q)[HEAD / 32][2][4],
                   const int* table, int kv_head, int key_base, int last_low, int last_high, int lane, State<HEAD>& s) {
    constexpr bool KEEP_Q = HEAD <= 128;  // else read again from L1: it would not fit in registers
    const int t = lane & 3;
    const u16* k = key_address<HEAD>(args, table, kv_head, key_base, lane);
    const u16* v = value_address<HEAD>(args, table, kv_head, key_base, lane);
    float scores[4][4] = {};
#pragma unroll
    for (int j = 0; j < HEAD / 32; j++) {
        u32 a[2][4];
        if (KEEP_Q) {
#pragma unroll
            for (int step = 0; step < 2; step++)
#pragma unroll
                for (int r = 0; r < 4; r++) a[step][r] = q[j][step][r];
        } else {
            const uint4 low = load_again(q_low + j * 32 + 8 * t);
            const uint4 high = load_again(q_high + j * 32 + 8 * t);
            a[0][0] = low.x, a[0][1] = high.x, a[0][2] = low.y, a[0][3] = high.y;
            a[1][0] = low.z, a[1][1] = high.z, a[1][2] = low.w, a[1][3] = high.w;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 b = load_cached(k + 2 * i * HEAD + j * 32);
            mma(scores[i], a[0], b.x, b.y);
            mma(scores[i], a[1], b.z, b.w);
        }
    }
    u32 p[2][4];
    soften<HEAD>(args, scores, key_base, last_low, last_high, lane, s, p);
#pragma unroll
    for (int n = 0; n < HEAD / 8; n++) {
        const uint4 b = load_cached(v + ((u64)n * 8 << args.block_shift));
        mma(s.o[n], p[0], b.x, b.y);
        mma(s.o[n], p[1], b.z, b.w);
    }
}

// Attends to keys that are in registers, which take those of key base `next` meanwhile (where it is not negative).
template <int HEAD>
DEVICE void attend_ahead(const AttentionArgs& args, const u32 (&q)[HEAD / 32][2][4], const int* table, int kv_head,
                         int key_base, int next, int last_low, int last_high, int lane, Keys<HEAD>& keys, State<HEAD>& s) {
    float scores[4][4] = {};
#pragma unroll
    for (int j = 0; j < HEAD / 32; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 b = keys.k[4 * j + i];
            mma(scores[i], q[j][0], b.x, b.y);
            mma(scores[i], q[j][1], b.z, b.w);
        }
    }
    if (next >= 0) load_keys<HEAD>(keys, key_address<HEAD>(args, table, kv_head, next, lane));
    u32 p[2][4];
    soften<HEAD>(args, scores, key_base, last_low, last_high, lane, s, p);
#pragma unroll
    for (int n = 0; n < HEAD / 8; n++) {
        const uint4 b = keys.v[n];
        mma(s.o[n], p[0], b.x, b.y);
        mma(s.o[n], p[1], b.z, b.w);
    }
    if (next >= 0) load_values<HEAD>(keys, value_address<HEAD>(args, table, kv_head, next, lane), args.block_shift);
}

template <int HEAD>
DEVICE void load_query(const AttentionArgs& args, int first_head, int heads, int shift, int first_row, int tokens,
                       int lane, const u16*& low,
                       const u16*& high, u32 (&q)[HEAD / 32][2][4], int& last_low, int& last_high) {
    const int g = lane >> 2, t = lane & 3;
    const u16* rows[2];
    int lasts[2];
    bool real[2];
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
        const int r = g + 8 * upper, token = r >> shift, head = r & ((1 << shift) - 1);
        real[upper] = token < tokens && head < heads;
        const int row = first_row + (real[upper] ? token : 0);
        rows[upper] = args.q + ((u64)row * args.num_heads + first_head + (real[upper] ? head : 0)) * HEAD;
        lasts[upper] = real[upper] ? args.positions[row] : -1;
    }
    low = rows[0], high = rows[1], last_low = lasts[0], last_high = lasts[1];
    if (HEAD > 128) return;
#pragma unroll
    for (int j = 0; j < HEAD / 32; j++) {
        const uint4 a = load4(low + j * 32 + 8 * t), b = load4(high + j * 32 + 8 * t);
        q[j][0][0] = a.x, q[j][0][1] = b.x, q[j][0][2] = a.y, q[j][0][3] = b.y;
        q[j][1][0] = a.z, q[j][1][1] = b.z, q[j][1][2] = a.w, q[j][1][3] = b.w;
    }
}

template <int HEAD>
DEVICE void begin(State<HEAD>& s) {
#pragma unroll
    for (int n = 0; n < HEAD / 8; n++) s.o[n][0] = s.o[n][1] = s.o[n][2] = s.o[n][3] = 0.f;
    s.top[0] = s.top[1] = NONE, s.total[0] = s.total[1] = 0.f;
}

// Grid: (ceil(tiles / 4), kv heads). A warp a tile; the four of a block walk the same keys, mostly from L1.
template <int HEAD>
__global__ void __launch_bounds__(128) attention_prefill(const __grid_constant__ AttentionArgs args) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    const int index = blockIdx.x * 4 + warp, kv_head = blockIdx.y;
    dependency_wait();
    if (index >= args.num_tiles) return;
    const int4 tile = args.tiles[index];
    const u16 *low, *high;
    u32 q[HEAD / 32][2][4];
    int last_low, last_high;
    load_query<HEAD>(args, kv_head * args.group, args.group, args.group_shift, tile.x, tile.y, lane, low, high, q, last_low, last_high);
    State<HEAD> s;
    begin(s);
    const int* table = args.block_tables + (u64)tile.z * args.table_stride;
    const int first_position = args.positions[tile.x], last_position = args.positions[tile.x + tile.y - 1];
    const int from = args.window ? max(first_position + 1 - args.window, 0) / 32 : 0;
    for (int i = from; i <= last_position / 32; i++)
        attend<HEAD>(args, low, high, q, table, kv_head, i * 32, last_low, last_high, lane, s);
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
        float total = s.total[upper];
        total += __shfl_xor_sync(FULL_WARP, total, 1);
        total += __shfl_xor_sync(FULL_WARP, total, 2);
        const int r = g + 8 * upper, token = r >> args.group_shift, head = r & ((1 << args.group_shift) - 1);
        if (token >= tile.y || head >= args.group) continue;
        const int first = (kv_head * args.group + head) * args.head_dim;
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++) {
            const int i = n * 8 + 2 * t;
            if (i < args.head_dim)
                *(u32*)(args.out + operand_index(tile.x + token, first + i, args.out_stride, args.tiled)) =
                    half2_saturated(s.o[n][2 * upper] / total, s.o[n][2 * upper + 1] / total);
        }
    }
}

// Grid: (kv heads x pieces of up to 8 heads of their group, rows, splits). Includes what rope.cu does for other rows:
// the block that holds the row's own position appends its K and V. A short context is one block's work, whatever the
// grid; in a longer one the block that arrives last merges.
// Shared memory: WARPS x 8 heads x (HEAD + 4) floats, which begin as the warps' heads and q.
// WARPS: 8 where few blocks have the chip to themselves, 4 where there are many.
template <int HEAD, int WARPS>
__global__ void __launch_bounds__(WARPS * 32) attention_decode(const __grid_constant__ AttentionArgs args,
                                                        const __grid_constant__ RopeArgs rope) {
    extern __shared__ __align__(16) float shared[];
    __shared__ float weights[8][64];
    __shared__ bool last_to_arrive;
    __shared__ __align__(16) u16 fresh[2][HEAD];  // this step's K and V
    constexpr int STRIDE = HEAD + 4;  // the sums, the largest score and the total; by 16 bytes
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    constexpr bool AHEAD = HEAD <= 128;  // K and V of a group fit in registers
    const int split = blockIdx.z;
    const int pieces = (args.group + 7) / 8, kv_head = blockIdx.x / pieces, piece = blockIdx.x % pieces;
    const int first_head = kv_head * args.group + piece * 8, heads = min(8, args.group - piece * 8);
    // All but this step's own q, K and V was there before the kernel before this one.
    const int row = args.tiles ? args.tiles[blockIdx.y].x : blockIdx.y;
    const int* table = args.block_tables + (u64)(args.tiles ? args.tiles[blockIdx.y].z : row) * args.table_stride;
    const int position = args.positions[row];
    const int from = args.window ? max(position + 1 - args.window, 0) / 32 : 0, to = position / 32 + 1;
    const int share = max(WARPS, (to - from + (int)gridDim.z - 1) / (int)gridDim.z);
    const int splits = (to - from + share - 1) / share;  // those that have work
    if (split >= splits) return;
    const int begin_group = from + split * share, end_group = min(to, begin_group + share);

    float* scratch = shared + warp * HEAD;
    u16* queries = (u16*)(shared + WARPS * HEAD);  // [8][HEAD]
    const bool holds_position = end_group == to;
    // The first keys and values come while q is made.
    const int first_group = begin_group + warp;
    Keys<AHEAD ? HEAD : 8> keys;
    if constexpr (AHEAD) {
        if (first_group < end_group) {
            load_keys<HEAD>(keys, key_address<HEAD>(args, table, kv_head, first_group * 32, lane));
            load_values<HEAD>(keys, value_address<HEAD>(args, table, kv_head, first_group * 32, lane), args.block_shift);
        }
    } else if (first_group < end_group) {
        const int key = first_group * 32 + lane, mask = (1 << args.block_shift) - 1;
        const u64 block = (u64)table[key >> args.block_shift] * args.num_kv_heads + kv_head;
        const u16* k = args.keys + ((block << args.block_shift) + (key & mask)) * HEAD;
        for (int i = 0; i < HEAD; i += 64) prefetch_l2(k + i);
        const u64 first = (u64)__shfl_sync(FULL_WARP, block, 0) * HEAD;
        for (int i = lane; i < HEAD; i += 32) prefetch_l2(args.values + ((first + i) << args.block_shift));
    }
    const Angles<HEAD> angles = angles_of<HEAD>(rope, position, lane);
    for (int i = heads * HEAD + threadIdx.x; i < 8 * HEAD; i += WARPS * 32) queries[i] = 0;
    dependency_wait();
    for (int task = warp; task < heads + (holds_position ? 2 : 0); task += WARPS) {
        const bool is_v = task == heads + 1;
        const int kv = args.num_heads + kv_head + (is_v ? args.num_kv_heads : 0);
        turned_head<HEAD>(rope, angles, row, task < heads ? first_head + task : kv, lane, scratch);
        if (task < heads) {
            for (int i = lane; i < HEAD; i += 32)
                queries[task * HEAD + i] = i < args.head_dim ? half_saturated(scratch[i] * rope.scale) : 0;
        } else {
            append(rope, row, kv_head, is_v, lane, scratch);
            for (int i = lane; i < HEAD; i += 32) fresh[is_v][i] = i < args.head_dim ? half_saturated(scratch[i]) : 0;
        }
        __syncwarp();
    }
    __syncthreads();
    u32 q[HEAD / 32][2][4];
    const u16* mine = queries + g * HEAD;
    if (HEAD <= 128) {
#pragma unroll
        for (int j = 0; j < HEAD / 32; j++) {
            const uint4 a = *(const uint4*)(mine + j * 32 + 8 * t);
            q[j][0][0] = a.x, q[j][0][2] = a.y, q[j][1][0] = a.z, q[j][1][2] = a.w;
            q[j][0][1] = q[j][0][3] = q[j][1][1] = q[j][1][3] = 0;
        }
    }
    State<HEAD> s;
    begin(s);
    const int last = g < heads ? position : -1;
    if constexpr (AHEAD) {
        // Its group was loaded before it was there.
        if (first_group == to - 1) replace_key<HEAD>(keys, position & 31, fresh[0], fresh[1], lane);
        for (int i = first_group; i < end_group; i += WARPS)
            attend_ahead<HEAD>(args, q, table, kv_head, i * 32, i + WARPS < end_group ? (i + WARPS) * 32 : -1, last, -1,
                               lane, keys, s);
    } else {
        for (int i = first_group; i < end_group; i += WARPS)
            attend<HEAD>(args, mine, mine, q, table, kv_head, i * 32, last, -1, lane, s);
    }
    float total = s.total[0];
    total += __shfl_xor_sync(FULL_WARP, total, 1);
    total += __shfl_xor_sync(FULL_WARP, total, 2);
    __syncthreads();
    float* part = shared + (warp * 8 + g) * STRIDE;
    if (t == 0) part[HEAD] = s.top[0], part[HEAD + 1] = total;
#pragma unroll
    for (int n = 0; n < HEAD / 8; n++) *(float2*)(part + n * 8 + 2 * t) = make_float2(s.o[n][0], s.o[n][1]);
    __syncthreads();

    // Adds up `count` parts of [8][STRIDE], in shared memory or, past L1, in global memory; `scaled`: to the end.
    const auto merge = [&](const float* parts, int count, bool global, bool final, float* to_partial) {
        const auto read = [&](const float* p) { return global ? __ldcg(p) : *p; };
        for (int head = warp; head < heads; head += WARPS) {
            const float* at = parts + head * STRIDE + HEAD;
            const float a = lane < count ? read(at + lane * 8 * STRIDE) : NONE;
            const float b = lane + 32 < count ? read(at + (lane + 32) * 8 * STRIDE) : NONE;
            float top = fmaxf(a, b);
            for (int offset = 16; offset > 0; offset >>= 1) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, offset));
            const float wa = power_of_two(a - top), wb = power_of_two(b - top);
            const float all = warp_sum((lane < count ? wa * read(at + lane * 8 * STRIDE + 1) : 0.f) +
                                       (lane + 32 < count ? wb * read(at + (lane + 32) * 8 * STRIDE + 1) : 0.f));
            const float factor = final ? 1.f / all : 1.f;
            weights[head][lane] = wa * factor, weights[head][lane + 32] = wb * factor;
            if (!final && lane == 0) to_partial[head * STRIDE + HEAD] = top, to_partial[head * STRIDE + HEAD + 1] = all;
        }
        __syncthreads();
        for (int i = threadIdx.x * 4; i < heads * HEAD; i += WARPS * 32 * 4) {
            const int head = i / HEAD, dim = i % HEAD;
            const float* at = parts + head * STRIDE + dim;
            float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 16
            for (int p = 0; p < count; p++) {
                const float4* from = (const float4*)(at + p * 8 * STRIDE);
                const float4 part = global ? __ldcg(from) : *from;
                const float weight = weights[head][p];
                sum.x += weight * part.x, sum.y += weight * part.y;
                sum.z += weight * part.z, sum.w += weight * part.w;
            }
            if (!final) {
                *(float4*)(to_partial + head * STRIDE + dim) = sum;
            } else if (dim < args.head_dim) {  // a multiple of 8
                const u32 low = half2_saturated(sum.x, sum.y), high = half2_saturated(sum.z, sum.w);
                const int column = (first_head + head) * args.head_dim + dim;
                u16* out = args.out + operand_index(row, column, args.out_stride, args.tiled);
                *(u32*)out = low;
                *(u32*)(out + (args.tiled ? args.tiled * 8 : 2)) = high;  // the next chunk of the same row, or beside it
            }
        }
    };
    const int warps = min(WARPS, end_group - begin_group);
    if (splits == 1) {
        merge(shared, warps, false, true, nullptr);
        return;
    }
    float* partial = args.partial + ((u64)blockIdx.y * gridDim.x + blockIdx.x) * gridDim.z * 8 * STRIDE;
    merge(shared, warps, false, false, partial + split * 8 * STRIDE);
    __threadfence();
    __syncthreads();
    u32* arrived = args.arrived + blockIdx.y * gridDim.x + blockIdx.x;
    if (threadIdx.x == 0) last_to_arrive = atomicAdd(arrived, 1) == splits - 1;
    __syncthreads();
    if (!last_to_arrive) return;
    __threadfence();
    if (threadIdx.x == 0) *arrived = 0;
    merge(partial, splits, true, true, nullptr);
}
