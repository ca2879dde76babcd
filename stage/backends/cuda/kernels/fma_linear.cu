// y = W x for 1 to 64 rows of x without matrix units, for GPUs that lack those of m16n8k16 (below 8.0): the same tiles,
// decoded to f16 weights and multiplied as float32.
//
// A block takes a tile of 16 weight rows and up to N rows of x; its warps share the columns. A row of x is added up in
// the same order whatever N is, so that its result does not depend on what else is in the batch.
#include "fma.cuh"
#include "linear.cuh"

// What lane 4g + t adds up: rows g and g + 8 of the tile, over the columns that are its own.
template <int N>
struct Sums {
    float low[N], high[N];
};

// Columns 8t .. + 7 of sub-block 2i + parity against one row of x, which lies in b.
DEVICE void multiply(const u32 (&a)[2][4], const uint4& b, float& low, float& high) {
    float x[8];
    widen(b, x);
#pragma unroll
    for (int k = 0; k < 4; k++) {  // a pair of columns
        const u32 first = a[k >> 1][2 * (k & 1)], second = a[k >> 1][2 * (k & 1) + 1];
        low = __fmaf_rn(half2_low(first), x[2 * k], low);
        low = __fmaf_rn(half2_high(first), x[2 * k + 1], low);
        high = __fmaf_rn(half2_low(second), x[2 * k], high);
        high = __fmaf_rn(half2_high(second), x[2 * k + 1], high);
    }
}

// `x`: the first of `num_tokens` rows; what is asked for past them is the last one again.
template <class Type, int N, int WARPS>
DEVICE Sums<N> accumulate(const u8* tiles, int column_tiles, int exponent, const u16* x, int x_stride, int num_tokens,
                          int warp, int lane) {
    Sums<N> sums = {};
    int rows[N];
#pragma unroll
    for (int n = 0; n < N; n++) rows[n] = min(n, num_tokens - 1) * x_stride;
    const u8* from = tiles + (u64)warp * Type::BYTES;
    const u16* mine = x + warp * 256 + 8 * (lane & 3);
    Type next;
    if (warp < column_tiles) next.load(from, lane);
    dependency_wait();
    for (int tile = warp; tile < column_tiles; tile += WARPS) {
        Type packet = next;
        from += WARPS * Type::BYTES;
        if (tile + WARPS < column_tiles) next.load(from, lane);
        packet.prepare(exponent, lane);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            Fragments a;
            packet.fragments(i, lane, a);
#pragma unroll
            for (int parity = 0; parity < 2; parity++) {
#pragma unroll
                for (int n = 0; n < N; n++)
                    multiply(a[parity], load4(mine + rows[n] + (2 * i + parity) * 32), sums.low[n], sums.high[n]);
            }
        }
        mine += WARPS * 256;
    }
    return sums;
}

// Grid: (groups of N rows of x, or with experts its tokens, each by itself; row tiles of both weights).
template <class A, class B, int N, int EPILOGUE, int WARPS>
__global__ void __launch_bounds__(WARPS * 32, (N > 4 ? 8 : 16) / WARPS) fma_linear(const __grid_constant__ LinearArgs args) {
    constexpr int PIECES = (N + 7) / 8;  // of eight rows
    __shared__ float4 shared[PIECES][WARPS][32];
    __shared__ float factors[N];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int tile = blockIdx.y, which = 0;
    if (tile >= args.row_tiles[0]) tile -= args.row_tiles[0], which = 1;
    const u8* tiles = args.tiles[which];
    const u16* x = args.x;
    int first_token = blockIdx.x * N, num_tokens = args.num_tokens, out_token = 0;
    if (args.experts) {
        dependency_wait();
        out_token = blockIdx.x;
        tiles += args.experts[out_token] * args.expert_bytes[which];
        x += (u64)(out_token / args.tokens_per_row) * args.x_stride;
        first_token = 0, num_tokens = 1;
    }
    x += (u64)first_token * args.x_stride;
    const int here = min(N, num_tokens - first_token), exponent = args.exponent[which];
    Sums<N> sums;
    if (SAME<A, B> || which == 0) {
        const u8* row = tiles + (u64)tile * args.column_tiles * A::BYTES;
        sums = accumulate<A, N, WARPS>(row, args.column_tiles, exponent, x, args.x_stride, here, warp, lane);
    } else {
        const u8* row = tiles + (u64)tile * args.column_tiles * B::BYTES;
        sums = accumulate<B, N, WARPS>(row, args.column_tiles, exponent, x, args.x_stride, here, warp, lane);
    }
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
        float low[8], high[8];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const bool exists = piece * 8 + k < N;
            low[k] = exists ? sums.low[exists ? piece * 8 + k : 0] : 0.f;
            high[k] = exists ? sums.high[exists ? piece * 8 + k : 0] : 0.f;
        }
        float4 c;
        fold(low, lane, c.x, c.y);
        fold(high, lane, c.z, c.w);
        shared[piece][warp][lane] = c;
    }
    if (args.squares) {
        for (int n = warp; n < here; n += WARPS) {
            const float factor = norm_factor(args, warp_sum(squares_share(args, first_token + n, lane, 32)));
            if (lane == 0) factors[n] = factor;
        }
    }
    __syncthreads();
    if (warp >= PIECES) return;
    const int first = first_token + warp * 8;
    const RowValues rows = row_values<EPILOGUE>(args, which, tile, lane);
    const Before before = out_before<EPILOGUE>(args, which, tile, first, lane, out_token);
    float c[4] = {};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const float4 part = shared[warp][w][lane];
        c[0] += part.x, c[1] += part.y, c[2] += part.z, c[3] += part.w;
    }
    const float* mine = args.squares ? factors + warp * 8 : nullptr;
    finish<EPILOGUE>(args, which, tile, first, num_tokens, out_token, lane, c, mine, rows, before);
}
