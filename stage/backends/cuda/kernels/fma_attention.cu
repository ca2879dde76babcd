// Attention without matrix units, for GPUs that lack those of m16n8k16 (below 8.0): the same cache, in float32.
//
// A warp takes ROWS (token, head) pairs of one KV head's group against 32 keys at a time. For the scores lane 4g + t
// reads key 8i + g, every fourth 8 dimensions of it; for the values each lane has dimensions of its own, and the
// softmax passes from one to the other through shared memory.
#include "attention.cuh"
#include "fma.cuh"

constexpr int WARPS = 4, ROWS = 8;

template <int HEAD>
struct State {
    float o[HEAD / 32][ROWS];  // dimensions lane, lane + 32, ...
    float top[2], total[2];    // of rows 2t and 2t + 1, in powers of two; total: this lane's share
};

struct Exchange {
    float4 p[32][ROWS / 4];  // [key][rows]
    float4 keep[ROWS / 4];   // what the sums so far are multiplied by
};

template <int HEAD>
DEVICE void begin(State<HEAD>& s) {
#pragma unroll
    for (int d = 0; d < HEAD / 32; d++)
#pragma unroll
        for (int r = 0; r < ROWS; r++) s.o[d][r] = 0.f;
    s.top[0] = s.top[1] = NONE, s.total[0] = s.total[1] = 0.f;
}

// Attends to the keys key_base .. + 31 of a sequence. q: f32 [ROWS][HEAD]; last: the last key that rows 2t and 2t + 1
// see.
template <int HEAD>
DEVICE void attend(const AttentionArgs& args, const float* q, const int* table, int kv_head, int key_base,
                   const int (&last)[2], int lane, Exchange& exchange, State<HEAD>& s) {
    const int g = lane >> 2, t = lane & 3;
    u64 blocks[4];  // of keys key_base + 8i: a block holds at least eight
    int offsets[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int key = key_base + 8 * i;
        blocks[i] = (u64)table[key >> args.block_shift] * args.num_kv_heads + kv_head;
        offsets[i] = key & ((1 << args.block_shift) - 1);
    }
    float scores[4][ROWS] = {};
#pragma unroll
    for (int j = 0; j < HEAD / 32; j++) {
        float k[4][8];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u16* from = args.keys + ((blocks[i] << args.block_shift) + offsets[i] + g) * HEAD + j * 32 + 8 * t;
            widen(load_cached(from), k[i]);
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float4* at = (const float4*)(q + r * HEAD + j * 32 + 8 * t);
            const float4 a = at[0], b = at[1];
            const float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int e = 0; e < 8; e++) scores[i][r] = __fmaf_rn(x[e], k[i][e], scores[i][r]);
        }
    }
    float p[4][2], top[2] = {s.top[0], s.top[1]}, keep[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        fold(scores[i], lane, p[i][0], p[i][1]);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int key = key_base + 8 * i + g;
            float x = p[i][e];
            if (args.softcap != 0.f) x = args.softcap * tanhf(x / args.softcap);
            const bool seen = key <= last[e] && (args.window == 0 || key > last[e] - args.window);
            p[i][e] = seen ? x * LOG2E : NONE;
            top[e] = fmaxf(top[e], p[i][e]);
        }
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
        for (int offset = 4; offset < 32; offset <<= 1)
            top[e] = fmaxf(top[e], __shfl_xor_sync(FULL_WARP, top[e], offset));
        keep[e] = exp2f(s.top[e] - top[e]);
        s.top[e] = top[e];
        s.total[e] *= keep[e];
    }
    __syncwarp();  // the values before have been weighed
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            p[i][e] = p[i][e] == NONE ? 0.f : exp2f(p[i][e] - top[e]);
            s.total[e] += p[i][e];
        }
        ((float2*)exchange.p)[(8 * i + g) * (ROWS / 2) + t] = make_float2(p[i][0], p[i][1]);
    }
    if (g == 0) ((float2*)exchange.keep)[t] = make_float2(keep[0], keep[1]);
    __syncwarp();
    const float4 low = exchange.keep[0], high = exchange.keep[1];
    const float kept[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int d = 0; d < HEAD / 32; d++)
#pragma unroll
        for (int r = 0; r < ROWS; r++) s.o[d][r] *= kept[r];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float v[HEAD / 32][8];
#pragma unroll
        for (int d = 0; d < HEAD / 32; d++) {
            const u16* from = args.values + ((blocks[i] * HEAD + lane + 32 * d) << args.block_shift) + offsets[i];
            widen(load_cached(from), v[d]);
        }
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const float4 a = exchange.p[8 * i + e][0], b = exchange.p[8 * i + e][1];
            const float weights[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int d = 0; d < HEAD / 32; d++)
#pragma unroll
                for (int r = 0; r < ROWS; r++) s.o[d][r] = __fmaf_rn(weights[r], v[d][e], s.o[d][r]);
        }
    }
}

// The sums of rows 2t and 2t + 1, which the g hold shares of.
template <int HEAD>
DEVICE void complete(State<HEAD>& s) {
    s.total[0] = sum_of_rows(s.total[0]), s.total[1] = sum_of_rows(s.total[1]);
}

// Which heads of its KV head's group a block takes: up to ROWS.
struct Piece {
    int kv_head, first_head, heads;
    DEVICE Piece(const AttentionArgs& args, int block) {
        const int pieces = (args.group + ROWS - 1) / ROWS, piece = block % pieces;
        kv_head = block / pieces;
        first_head = kv_head * args.group + piece * ROWS;
        heads = min(ROWS, args.group - piece * ROWS);
    }
};

// Grid: (ceil(tiles / WARPS), pieces of groups). A warp a tile: row r is token r >> group_shift of it, and head
// r % 2^group_shift of the piece. Shared memory: WARPS x ROWS x HEAD floats.
template <int HEAD>
__global__ void __launch_bounds__(WARPS * 32) fma_attention_prefill(const __grid_constant__ AttentionArgs args) {
    extern __shared__ __align__(16) float shared[];
    __shared__ Exchange exchanges[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane & 3;
    const int index = blockIdx.x * WARPS + warp;
    const Piece piece(args, blockIdx.y);
    dependency_wait();
    if (index >= args.num_tiles) return;
    const int4 tile = args.tiles[index];
    const auto token_of = [&](int r) { return r >> args.group_shift; };
    const auto head_of = [&](int r) { return r & ((1 << args.group_shift) - 1); };
    const auto real = [&](int r) { return token_of(r) < tile.y && head_of(r) < piece.heads; };
    float* q = shared + warp * ROWS * HEAD;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const u64 at = ((u64)(tile.x + token_of(r)) * args.num_heads + piece.first_head + head_of(r)) * HEAD;
#pragma unroll
        for (int i = lane; i < HEAD; i += 32) q[r * HEAD + i] = real(r) ? float_from_half(args.q[at + i]) : 0.f;
    }
    __syncwarp();
    int last[2];
#pragma unroll
    for (int e = 0; e < 2; e++) last[e] = real(2 * t + e) ? args.positions[tile.x + token_of(2 * t + e)] : -1;
    State<HEAD> s;
    begin(s);
    const int* table = args.block_tables + (u64)tile.z * args.table_stride;
    const int first_position = args.positions[tile.x], last_position = args.positions[tile.x + tile.y - 1];
    const int from = args.window ? max(first_position + 1 - args.window, 0) / 32 : 0;
    for (int i = from; i <= last_position / 32; i++)
        attend<HEAD>(args, q, table, piece.kv_head, i * 32, last, lane, exchanges[warp], s);
    complete(s);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float total = __shfl_sync(FULL_WARP, s.total[r & 1], r >> 1);
        if (!real(r)) continue;
        u16* out = args.out + (u64)(tile.x + token_of(r)) * args.out_stride + (piece.first_head + head_of(r)) * args.head_dim;
#pragma unroll
        for (int d = 0; d < HEAD / 32; d++)
            if (lane + 32 * d < args.head_dim) out[lane + 32 * d] = half_saturated(s.o[d][r] / total);
    }
}

// Parts of a row of attention, f32 [count][ROWS][HEAD + 4] (sums, the largest score, the total), added up by a warp:
// lane has dimensions lane, lane + 32, ...
template <int HEAD, bool GLOBAL>
DEVICE void merge(const float* parts, int count, int row, int lane, float (&sums)[HEAD / 32], float& top, float& total) {
    constexpr int STRIDE = HEAD + 4;
    const auto read = [&](int part, int i) {  // past L1 where other blocks have written
        const float* at = parts + ((u64)part * ROWS + row) * STRIDE + i;
        return GLOBAL ? __ldcg(at) : *at;
    };
    top = NONE;
    for (int part = 0; part < count; part++) top = fmaxf(top, read(part, HEAD));
    total = 0.f;
#pragma unroll
    for (int d = 0; d < HEAD / 32; d++) sums[d] = 0.f;
    for (int part = 0; part < count; part++) {
        const float weight = exp2f(read(part, HEAD) - top);
        total += weight * read(part, HEAD + 1);
#pragma unroll
        for (int d = 0; d < HEAD / 32; d++) sums[d] += weight * read(part, lane + 32 * d);
    }
}

// Grid: (pieces of groups, rows, splits). Includes what rope.cu does for other rows: the block that holds the row's own
// position appends its K and V. A short context is one block's work, whatever the grid; in a longer one the block that
// arrives last merges.
// Shared memory: WARPS x ROWS x (HEAD + 4) floats for the warps' parts, which begin as the queries and the heads that
// the warps turn.
template <int HEAD>
__global__ void __launch_bounds__(WARPS * 32) fma_attention_decode(const __grid_constant__ AttentionArgs args,
                                                            const __grid_constant__ RopeArgs rope) {
    extern __shared__ __align__(16) float shared[];
    __shared__ Exchange exchanges[WARPS];
    __shared__ bool last_to_arrive;
    constexpr int STRIDE = HEAD + 4;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    const Piece piece(args, blockIdx.x);
    dependency_wait();
    const int row = args.tiles ? args.tiles[blockIdx.y].x : blockIdx.y;
    const int* table = args.block_tables + (u64)(args.tiles ? args.tiles[blockIdx.y].z : row) * args.table_stride;
    const int position = args.positions[row];
    const int from = args.window ? max(position + 1 - args.window, 0) / 32 : 0, to = position / 32 + 1;
    const int share = max(WARPS, (to - from + (int)gridDim.z - 1) / (int)gridDim.z);
    const int splits = (to - from + share - 1) / share, split = blockIdx.z;  // those that have work
    if (split >= splits) return;
    const int begin_group = from + split * share, end_group = min(to, begin_group + share);

    float* queries = shared;  // [ROWS][HEAD]
    float* scratch = shared + (ROWS + warp) * HEAD;
    const Angles<HEAD> angles = angles_of<HEAD>(rope, position, lane);
    for (int i = piece.heads * HEAD + threadIdx.x; i < ROWS * HEAD; i += WARPS * 32) queries[i] = 0.f;
    for (int task = warp; task < piece.heads + (end_group == to ? 2 : 0); task += WARPS) {
        const bool is_v = task == piece.heads + 1;
        const int kv = args.num_heads + piece.kv_head + (is_v ? args.num_kv_heads : 0);
        turned_head<HEAD>(rope, angles, row, task < piece.heads ? piece.first_head + task : kv, lane, scratch);
        if (task < piece.heads) {
            for (int i = lane; i < HEAD; i += 32)
                queries[task * HEAD + i] = i < args.head_dim ? scratch[i] * rope.scale : 0.f;
        } else {
            append(rope, row, piece.kv_head, is_v, lane, scratch);
        }
        __syncwarp();
    }
    __syncthreads();
    State<HEAD> s;
    begin(s);
    const int last[2] = {2 * t < piece.heads ? position : -1, 2 * t + 1 < piece.heads ? position : -1};
    for (int i = begin_group + warp; i < end_group; i += WARPS)
        attend<HEAD>(args, queries, table, piece.kv_head, i * 32, last, lane, exchanges[warp], s);
    complete(s);
    __syncthreads();  // the queries are read
    float* part = shared + warp * ROWS * STRIDE;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int d = 0; d < HEAD / 32; d++) part[r * STRIDE + lane + 32 * d] = s.o[d][r];
    if (g == 0) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            part[(2 * t + e) * STRIDE + HEAD] = s.top[e];
            part[(2 * t + e) * STRIDE + HEAD + 1] = s.total[e];
        }
    }
    __syncthreads();

    const auto write = [&](int head, const float (&sums)[HEAD / 32], float total) {
        u16* out = args.out + (u64)row * args.out_stride + (piece.first_head + head) * args.head_dim;
#pragma unroll
        for (int d = 0; d < HEAD / 32; d++)
            if (lane + 32 * d < args.head_dim) out[lane + 32 * d] = half_saturated(sums[d] / total);
    };
    const u64 place = (u64)blockIdx.y * gridDim.x + blockIdx.x;
    float* partial = args.partial + place * gridDim.z * ROWS * STRIDE;
    for (int head = warp; head < piece.heads; head += WARPS) {
        float sums[HEAD / 32], top, total;
        merge<HEAD, false>(shared, min(WARPS, end_group - begin_group), head, lane, sums, top, total);
        if (splits == 1) {
            write(head, sums, total);
            continue;
        }
        float* mine = partial + (split * ROWS + head) * STRIDE;
#pragma unroll
        for (int d = 0; d < HEAD / 32; d++) mine[lane + 32 * d] = sums[d];
        if (lane == 0) mine[HEAD] = top, mine[HEAD + 1] = total;
    }
    if (splits == 1) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last_to_arrive = atomicAdd(args.arrived + place, 1) == splits - 1;
    __syncthreads();
    if (!last_to_arrive) return;
    __threadfence();
    if (threadIdx.x == 0) args.arrived[place] = 0;
    for (int head = warp; head < piece.heads; head += WARPS) {
        float sums[HEAD / 32], top, total;
        merge<HEAD, true>(partial, splits, head, lane, sums, top, total);
        write(head, sums, total);
    }
}
