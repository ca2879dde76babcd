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
    const u8* from = tiles + (u64)warp * Type::BYTES;
    Type next;
    if (warp < column_tiles) next.load(from, lane);
    dependency_wait();
    ready();
    const u16* mine = x + (u64)min(g, num_tokens - 1) * x_stride + warp * 256 + 8 * t;
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
                const uint4 b = load4(mine + (2 * i + parity) * 32);
                mma(sums[0], a[parity][0], b.x, b.y);
                mma(sums[1], a[parity][1], b.z, b.w);
            }
        }
        mine += WARPS * 256;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) c[k] = sums[0][k] + sums[1][k];
}

// A packet against one row of x, b: this lane's columns of sub-block g. Column n of a product with sub-block j is of use
// where n = j alone: there lanes 4g + j / 2 hold it. Adds to the sums of rows g and g + 8.
template <class Type>
DEVICE void multiply_single(Type& packet, const uint4& b, int exponent, int lane, float& lower_sum, float& upper_sum) {
    constexpr u32 ONES[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
    float kept[4] = {}, all[4] = {};
    packet.prepare(exponent, lane);
    mma(all, ONES, b.x, b.y);
    mma(all, ONES, b.z, b.w);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        Fragments a;
        packet.quants.integers(i, a);
        float even[4] = {}, odd[4] = {};
        mma(even, a[0][0], b.x, b.y);
        mma(odd, a[1][0], b.x, b.y);
        mma(even, a[0][1], b.z, b.w);
        mma(odd, a[1][1], b.z, b.w);
        const bool mine = (lane & 3) == i;
        kept[0] = mine ? even[0] : kept[0], kept[1] = mine ? odd[1] : kept[1];
        kept[2] = mine ? even[2] : kept[2], kept[3] = mine ? odd[3] : kept[3];
    }
#pragma unroll
    for (int parity = 0; parity < 2; parity++) {
        const u32 lower = packet.scales.single(parity, 0), upper = packet.scales.single(parity, 1);
        lower_sum += half2_low(lower) * kept[parity] + half2_high(lower) * all[parity];
        upper_sum += half2_low(upper) * kept[2 + parity] + half2_high(upper) * all[parity];
    }
}

// One row of x: each sub-block's product in a column of its own, scaled at the end. Two packets in flight.
template <class Type, int WARPS, class Ready>
DEVICE void accumulate_single(const u8* tiles, int column_tiles, int exponent, const u16* x, int warp, int lane,
                              float (&c)[4], const Ready& ready) {
    const u16* mine = x + warp * 256 + (lane >> 2) * 32 + (lane & 3) * 8;
    const u8* from = tiles + (u64)warp * Type::BYTES;
    float lower_sum = 0.f, upper_sum = 0.f;
    Type packets[2];
    uint4 b[2];
#pragma unroll
    for (int k = 0; k < 2; k++)
        if (warp + k * WARPS < column_tiles) packets[k].load(from + k * WARPS * Type::BYTES, lane);
    dependency_wait();
#pragma unroll
    for (int k = 0; k < 2; k++)
        if (warp + k * WARPS < column_tiles) b[k] = load4(mine + k * WARPS * 256);
    ready();
    for (int tile = warp; tile < column_tiles; tile += 2 * WARPS) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            if (tile + k * WARPS >= column_tiles) break;
            multiply_single(packets[k], b[k], exponent, lane, lower_sum, upper_sum);
            if (tile + (k + 2) * WARPS >= column_tiles) continue;
            packets[k].load(from + (k + 2) * WARPS * Type::BYTES, lane);
            b[k] = load4(mine + (k + 2) * WARPS * 256);
        }
        from += 2 * WARPS * Type::BYTES;
        mine += 2 * WARPS * 256;
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

// Grid: (row tiles of both weights, 1), or (row tiles, tokens) with experts, each token by itself.
// SINGLE: for one token (or experts). WARPS: at most 16.
template <class A, class B, int EPILOGUE, bool SINGLE, int WARPS>
__global__ void __launch_bounds__(WARPS * 32, 16 / WARPS) matvec(const __grid_constant__ LinearArgs args) {
    __shared__ float4 shared[WARPS][32];
    __shared__ float factors[WARPS > 8 ? WARPS : 8];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
                shares[k] = SINGLE ? squares_share(args, 0, threadIdx.x, WARPS * 32)
                            : warp + k * WARPS < num_tokens ? squares_share(args, warp + k * WARPS, lane, 32) : 0.f;
        }
        if (warp == 0) {
            rows = row_values<EPILOGUE>(args, which, tile, lane);
            before = out_before<EPILOGUE>(args, which, tile, 0, lane, out_token);
        }
    };
    float c[4];
    if (SAME<A, B> || which == 0)
        product<A, WARPS, SINGLE>(args, which, tiles, tile, x, num_tokens, warp, lane, c, ready);
    else
        product<B, WARPS, SINGLE>(args, 1, tiles, tile, x, num_tokens, warp, lane, c, ready);
    shared[warp][lane] = make_float4(c[0], c[1], c[2], c[3]);
    if (args.squares) {
#pragma unroll
        for (int k = 0; k < TOKENS_A_WARP; k++) {
            const float sum = warp_sum(shares[k]);
            if (lane == 0 && (SINGLE || warp + k * WARPS < 8)) factors[warp + k * WARPS] = SINGLE ? sum : norm_factor(args, sum);
        }
    }
    __syncthreads();
    if (warp) return;
    if (SINGLE && args.squares) {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += factors[w];
        __syncwarp();
        if (lane == 0) factors[0] = norm_factor(args, sum);
        __syncwarp();
    }
#pragma unroll
    for (int w = 1; w < WARPS; w++) {
        const float4 other = shared[w][lane];
        c[0] += other.x, c[1] += other.y, c[2] += other.z, c[3] += other.w;
    }
    finish<EPILOGUE>(args, which, tile, 0, num_tokens, out_token, lane, c, args.squares ? factors : nullptr, rows, before);
}
