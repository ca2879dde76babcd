// y = W x for 1 to 8 rows of x: a block a tile of 16 weight rows, its warps share the columns.
//
// Bound by the weights' bytes, and where a product is small by latency: packets are in flight while others are worked
// on, the first are asked for before the rows of x are known to be there, and what the end needs is asked for in between.
#include "linear.cuh"

// `ready` is called once the kernels before are done.
template <class Type, int WARPS, class Ready>
DEVICE void accumulate(const u8* tiles, int column_tiles, int exponent, const u16* x, int x_stride, int num_tokens,
                       int warp, int lane, float (&c)[4], const Ready& ready) {
    float sums[2][4] = {};
    const int g = lane >> 2, t = lane & 3;
    Type next;
    int tile = warp;
    if (tile < column_tiles) next.load(tiles + (u64)tile * Type::BYTES, lane);
    dependency_wait();
    ready();
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

// A packet against one row of x, b: this lane's columns of sub-block g. Adds to the sums of rows g and g + 8.
template <class Type>
DEVICE void multiply_single(Type& packet, const uint4& b, int exponent, int lane, float& lower_sum, float& upper_sum) {
    constexpr u32 ONES[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
    const int g = lane >> 2;
    float sums[2][4] = {}, all[4] = {};
    packet.prepare(exponent, lane);
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

// One row of x: each sub-block's product in a column of its own, scaled at the end. Two packets in flight.
template <class Type, int WARPS, class Ready>
DEVICE void accumulate_single(const u8* tiles, int column_tiles, int exponent, const u16* x, int warp, int lane,
                              float (&c)[4], const Ready& ready) {
    const u16* mine = x + (lane >> 2) * 32 + (lane & 3) * 8;
    float lower_sum = 0.f, upper_sum = 0.f;
    Type packets[2];
    uint4 b[2];
#pragma unroll
    for (int k = 0; k < 2; k++)
        if (warp + k * WARPS < column_tiles) packets[k].load(tiles + (u64)(warp + k * WARPS) * Type::BYTES, lane);
    dependency_wait();
#pragma unroll
    for (int k = 0; k < 2; k++)
        if (warp + k * WARPS < column_tiles) b[k] = load4(mine + (warp + k * WARPS) * 256);
    ready();
    for (int tile = warp; tile < column_tiles; tile += 2 * WARPS) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int here = tile + k * WARPS, ahead = here + 2 * WARPS;
            if (here >= column_tiles) break;
            multiply_single(packets[k], b[k], exponent, lane, lower_sum, upper_sum);
            if (ahead >= column_tiles) continue;
            packets[k].load(tiles + (u64)ahead * Type::BYTES, lane);
            b[k] = load4(mine + ahead * 256);
        }
    }
    for (int offset = 1; offset < 4; offset <<= 1) {
        lower_sum += __shfl_xor_sync(FULL_WARP, lower_sum, offset);
        upper_sum += __shfl_xor_sync(FULL_WARP, upper_sum, offset);
    }
    c[0] = lower_sum, c[2] = upper_sum, c[1] = c[3] = 0.f;  // of token 0; the other columns are not read
}

template <class Type, int WARPS, bool SINGLE, class Ready>
DEVICE void product(const LinearArgs& args, int which, const u8* tiles, int tile, const u16* x, int num_tokens, int warp,
                    int lane, float (&c)[4], const Ready& ready) {
    const u8* row = tiles + (u64)tile * args.column_tiles * Type::BYTES;
    if constexpr (Type::SINGLE && SINGLE)
        accumulate_single<Type, WARPS>(row, args.column_tiles, args.exponent[which], x, warp, lane, c, ready);
    else
        accumulate<Type, WARPS>(row, args.column_tiles, args.exponent[which], x, args.x_stride, num_tokens, warp, lane,
                                c, ready);
}

// Registers a thread may take: what lets enough warps of light packets run beside one another.
template <class A, class B, int EPILOGUE, bool SINGLE>
constexpr int REGISTERS = SINGLE && A::SINGLE && B::SINGLE ? (EPILOGUE == RESIDUAL ? 96 : 80) : 128;

// Grid: (row tiles of both weights, 1), or (row tiles, tokens) with experts, each token by itself.
// SINGLE: for one token (or experts). WARPS: at most 16.
template <class A, class B, int EPILOGUE, bool SINGLE, int WARPS>
__global__ void __launch_bounds__(WARPS * 32, 65536 / (WARPS * 32 * REGISTERS<A, B, EPILOGUE, SINGLE>))
    matvec(const __grid_constant__ LinearArgs args) {
    __shared__ float4 shared[WARPS][32];
    __shared__ float factors[8];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    allow_dependents();
    int tile = blockIdx.x, which = 0;
    if (tile >= args.row_tiles[0]) tile -= args.row_tiles[0], which = 1;
    const u8* tiles = args.tiles[which];
    const u16* x = args.x;
    int num_tokens = args.num_tokens, out_token = 0;
    if (args.experts) {
        dependency_wait();
        tiles += args.experts[blockIdx.y] * args.expert_bytes[which];
        x += (u64)(blockIdx.y / args.tokens_per_row) * args.x_stride;
        num_tokens = 1, out_token = blockIdx.y;
    }
    constexpr int TOKENS_A_WARP = SINGLE ? 1 : (8 + WARPS - 1) / WARPS;
    float shares[TOKENS_A_WARP];
    RowValues rows;
    Before before;
    const auto ready = [&]() {
        if (args.squares) {
#pragma unroll
            for (int k = 0; k < TOKENS_A_WARP; k++)
                if (warp + k * WARPS < num_tokens) shares[k] = squares_share(args, warp + k * WARPS, lane);
        }
        if (warp == 0) {
            rows = row_values<EPILOGUE>(args, which, tile, lane);
            before = out_before<EPILOGUE>(args, which, tile, 0, lane, out_token);
        }
    };
    float c[4];
    if (which == 0)
        product<A, WARPS, SINGLE>(args, 0, tiles, tile, x, num_tokens, warp, lane, c, ready);
    else
        product<B, WARPS, SINGLE>(args, 1, tiles, tile, x, num_tokens, warp, lane, c, ready);
    shared[warp][lane] = make_float4(c[0], c[1], c[2], c[3]);
    if (args.squares) {
#pragma unroll
        for (int k = 0; k < TOKENS_A_WARP; k++) {
            if (warp + k * WARPS >= num_tokens) continue;
            const float factor = norm_factor(args, shares[k]);
            if (lane == 0) factors[warp + k * WARPS] = factor;
        }
    }
    __syncthreads();
    if (warp) return;
#pragma unroll
    for (int w = 1; w < WARPS; w++) {
        const float4 other = shared[w][lane];
        c[0] += other.x, c[1] += other.y, c[2] += other.z, c[3] += other.w;
    }
    finish<EPILOGUE>(args, which, tile, 0, num_tokens, out_token, lane, c, args.squares ? factors : nullptr, rows, before);
}
