// y = W x for 1 to 8 rows of x: a block a tile of 16 weight rows, its warps share the columns.
//
// Bound by the weights' bytes: each warp keeps one packet in flight while it works on another. The first is asked
// for before the rows of x are known to be there (dependency_wait).
#include "linear.cuh"

template <class Type, int WARPS>
DEVICE void accumulate(const u8* tiles, int column_tiles, int exponent, const u16* x, int x_stride, int num_tokens,
                       int warp, int lane, float (&c)[4]) {
    float sums[2][4] = {};
    const int g = lane >> 2, t = lane & 3;
    Type next;
    int tile = warp;
    if (tile < column_tiles) next.load(tiles + (u64)tile * Type::BYTES, lane);
    dependency_wait();
    const u16* mine = x + (u64)min(g, num_tokens - 1) * x_stride + 8 * t;
    for (; tile < column_tiles; tile += WARPS) {
        Type packet = next;
        if (tile + WARPS < column_tiles) next.load(tiles + (u64)(tile + WARPS) * Type::BYTES, lane);
        packet.prepare(exponent, lane);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            Fragments a;
            packet.fragments(i, lane, a);
#pragma unroll
            for (int parity = 0; parity < 2; parity++) {
                const uint4 b = load4(mine + tile * 256 + (2 * i + parity) * 32);
                mma(sums[0], a[parity][0], b.x, b.y);
                mma(sums[1], a[parity][1], b.z, b.w);
            }
        }
    }
#pragma unroll
    for (int k = 0; k < 4; k++) c[k] = sums[0][k] + sums[1][k];
}

// One row of x: each sub-block's product in a column of its own, scaled at the end.
template <class Type, int WARPS>
DEVICE void accumulate_single(const u8* tiles, int column_tiles, int exponent, const u16* x, int warp, int lane,
                              float (&c)[4]) {
    const int g = lane >> 2, t = lane & 3;
    constexpr u32 ONES[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
    float upper_sum = 0.f, lower_sum = 0.f;
    Type next;
    int tile = warp;
    if (tile < column_tiles) next.load(tiles + (u64)tile * Type::BYTES, lane);
    dependency_wait();
    for (; tile < column_tiles; tile += WARPS) {
        Type packet = next;
        const uint4 b = load4(x + tile * 256 + g * 32 + 8 * t);
        if (tile + WARPS < column_tiles) next.load(tiles + (u64)(tile + WARPS) * Type::BYTES, lane);
        packet.prepare(exponent, lane);
        float sums[2][4] = {}, all[4] = {};
        mma(all, ONES, b.x, b.y);
        mma(all, ONES, b.z, b.w);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            Fragments a;
            packet.quants.integers(i, a);
#pragma unroll
            for (int parity = 0; parity < 2; parity++) {
                const bool mine = g == 2 * i + parity;
                mma(sums[0], a[parity][0], mine ? b.x : 0u, mine ? b.y : 0u);
                mma(sums[1], a[parity][1], mine ? b.z : 0u, mine ? b.w : 0u);
            }
        }
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
            const u32 lower = packet.scales.single(parity, 0), upper = packet.scales.single(parity, 1);
            lower_sum += half2_low(lower) * (sums[0][parity] + sums[1][parity]) + half2_high(lower) * all[parity];
            upper_sum += half2_low(upper) * (sums[0][2 + parity] + sums[1][2 + parity]) + half2_high(upper) * all[parity];
        }
    }
    for (int offset = 1; offset < 4; offset <<= 1) {
        lower_sum += __shfl_xor_sync(FULL_WARP, lower_sum, offset);
        upper_sum += __shfl_xor_sync(FULL_WARP, upper_sum, offset);
    }
    c[0] = lower_sum, c[2] = upper_sum, c[1] = c[3] = 0.f;  // of token 0; the other columns are not read
}

template <class Type, int WARPS, bool SINGLE>
DEVICE void product(const LinearArgs& args, int which, const u8* tiles, int tile, const u16* x, int num_tokens, int warp,
                    int lane, float (&c)[4]) {
    const u8* row = tiles + (u64)tile * args.column_tiles * Type::BYTES;
    if constexpr (Type::SINGLE && SINGLE)
        accumulate_single<Type, WARPS>(row, args.column_tiles, args.exponent[which], x, warp, lane, c);
    else
        accumulate<Type, WARPS>(row, args.column_tiles, args.exponent[which], x, args.x_stride, num_tokens, warp, lane, c);
}

// Grid: (row tiles of both weights, 1), or (row tiles, tokens) with experts, each token by itself.
// SINGLE: for one token (or experts). WARPS: at most 16.
template <class A, class B, int EPILOGUE, bool SINGLE, int WARPS>
__global__ void __launch_bounds__(WARPS * 32) matvec(const __grid_constant__ LinearArgs args) {
    __shared__ float4 shared[WARPS][32];
    __shared__ float factors[8];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    allow_dependents();
    int tile = blockIdx.x, which = 0;
    if (tile >= args.row_tiles[0]) tile -= args.row_tiles[0], which = 1;
    const u8* tiles = args.tiles[which];
    const u16* x = args.x;
    int num_tokens = args.num_tokens;
    if (args.experts) {
        dependency_wait();
        tiles += args.experts[blockIdx.y] * args.expert_bytes[which];
        x += (u64)(blockIdx.y / args.tokens_per_row) * args.x_stride;
        num_tokens = 1;
    }
    float c[4];
    if (which == 0)
        product<A, WARPS, SINGLE>(args, 0, tiles, tile, x, num_tokens, warp, lane, c);
    else
        product<B, WARPS, SINGLE>(args, 1, tiles, tile, x, num_tokens, warp, lane, c);
    shared[warp][lane] = make_float4(c[0], c[1], c[2], c[3]);
    if (args.squares) {
        for (int token = warp; token < num_tokens; token += WARPS) {
            const float factor = norm_factor(args, token, lane);
            if (lane == 0) factors[token] = factor;
        }
    }
    __syncthreads();
    if (warp) return;
#pragma unroll
    for (int w = 1; w < WARPS; w++) {
        const float4 other = shared[w][lane];
        c[0] += other.x, c[1] += other.y, c[2] += other.z, c[3] += other.w;
    }
    if (args.experts) {
        LinearArgs moved = args;
        moved.out += (u64)blockIdx.y * args.out_stride;
        moved.half_out += (u64)blockIdx.y * args.out_stride;
        moved.num_tokens = 1;
        finish<EPILOGUE>(moved, which, tile, 0, lane, c, nullptr);
    } else {
        finish<EPILOGUE>(args, which, tile, 0, lane, c, args.squares ? factors : nullptr);
    }
}
