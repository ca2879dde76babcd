// y = W x for 9 to 64 rows of x: a block takes 8 row tiles (one a warp) and a share of the columns; its warps read the
// rows of x from shared memory, where they arrive one column tile ahead.
//
// Shares of the columns are added up by the block that arrives last, always in the same order.
#include "linear.cuh"

constexpr int WARPS = 8, ROW_BYTES = 512 + 64;  // 64: a warp's 8 rows fall on different banks

template <int N>
DEVICE void stage(u8* shared, const LinearArgs& args, int column_tile) {
    for (int i = threadIdx.x; i < N * 8 * 32; i += WARPS * 32) {
        const int token = i / 32, part = i % 32;
        const u16* from = args.x + (u64)min(token, args.num_tokens - 1) * args.x_stride + column_tile * 256 + part * 8;
        copy_async((u32)__cvta_generic_to_shared(shared) + token * ROW_BYTES + part * 16, from);
    }
    copy_commit();
}

template <class Type, int N>
DEVICE void accumulate(u8* shared, const LinearArgs& args, int which, int tile, int first, int last, int lane,
                       float (&c)[N][4]) {
    const u8* tiles = args.tiles[which] + (u64)tile * args.column_tiles * Type::BYTES;
    const bool real = tile < args.row_tiles[which];
    Type next;
    if (real) next.load(tiles + (u64)first * Type::BYTES, lane);
    dependency_wait();
    stage<N>(shared, args, first);
    for (int column_tile = first; column_tile < last; column_tile++) {
        u8* here = shared + ((column_tile - first) & 1) * N * 8 * ROW_BYTES;
        u8* ahead = shared + ((column_tile - first + 1) & 1) * N * 8 * ROW_BYTES;
        Type packet = next;
        if (column_tile + 1 < last) {
            if (real) next.load(tiles + (u64)(column_tile + 1) * Type::BYTES, lane);
            stage<N>(ahead, args, column_tile + 1);
            copy_wait<1>();
        } else {
            copy_wait<0>();
        }
        __syncthreads();
        if (real) {
            const u8* mine = here + (lane >> 2) * ROW_BYTES + (lane & 3) * 16;
            packet.prepare(args.exponent[which], lane);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                Fragments a;
                packet.fragments(i, lane, a);
#pragma unroll
                for (int parity = 0; parity < 2; parity++) {
#pragma unroll
                    for (int n = 0; n < N; n += 2) {  // in pairs: a sum waits for its last product
                        const u8* at = mine + n * 8 * ROW_BYTES + (2 * i + parity) * 64;
                        const uint4 b = *(const uint4*)at, d = *(const uint4*)(at + 8 * ROW_BYTES);
                        mma(c[n], a[parity][0], b.x, b.y);
                        mma(c[n + 1], a[parity][0], d.x, d.y);
                        mma(c[n], a[parity][1], b.z, b.w);
                        mma(c[n + 1], a[parity][1], d.z, d.w);
                    }
                }
            }
        }
        __syncthreads();
    }
}

// Grid: (ceil(row tiles / 8) of the first weight, then of the second; splits). N: tokens / 8, rounded up.
template <class A, class B, int N, int EPILOGUE>
__global__ void __launch_bounds__(WARPS * 32, 2) matmul(const __grid_constant__ LinearArgs args) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ bool last_to_arrive;
    __shared__ float factors[N * 8];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int blocks = (args.row_tiles[0] + WARPS - 1) / WARPS;
    const int which = blockIdx.x >= blocks ? 1 : 0;
    const int tile = (blockIdx.x - which * blocks) * WARPS + warp;
    const int splits = gridDim.y, split = blockIdx.y;
    const int first = args.column_tiles * split / splits, last = args.column_tiles * (split + 1) / splits;
    float c[N][4] = {};
    if (which == 0)
        accumulate<A, N>(shared, args, 0, tile, first, last, lane, c);
    else
        accumulate<B, N>(shared, args, 1, tile, first, last, lane, c);
    if (splits > 1) {
        float4* mine = (float4*)args.partial + ((u64)blockIdx.x * splits * WARPS + warp) * N * 32 + lane;
        const int step = WARPS * N * 32;
#pragma unroll
        for (int n = 0; n < N; n++) mine[(u64)split * step + n * 32] = make_float4(c[n][0], c[n][1], c[n][2], c[n][3]);
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) last_to_arrive = atomicAdd(args.arrived + blockIdx.x, 1) == splits - 1;
        __syncthreads();
        if (!last_to_arrive) return;
        __threadfence();
        if (threadIdx.x == 0) args.arrived[blockIdx.x] = 0;
#pragma unroll
        for (int n = 0; n < N; n++) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.f;
        for (int s = 0; s < splits; s++) {
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float4 part = __ldcg(mine + (u64)s * step + n * 32);
                c[n][0] += part.x, c[n][1] += part.y, c[n][2] += part.z, c[n][3] += part.w;
            }
        }
    }
    if (args.squares) {
        for (int token = warp; token < args.num_tokens; token += WARPS) {
            const float factor = norm_factor(args, warp_sum(squares_share(args, token, lane, 32)));
            if (lane == 0) factors[token] = factor;
        }
        __syncthreads();
    }
    if (tile >= args.row_tiles[which]) return;
    const RowValues rows = row_values<EPILOGUE>(args, which, tile, lane);
    Before before[N];
#pragma unroll
    for (int n = 0; n < N; n++) before[n] = out_before<EPILOGUE>(args, which, tile, n * 8, lane, 0);
#pragma unroll
    for (int n = 0; n < N; n++)
        finish<EPILOGUE>(args, which, tile, n * 8, args.num_tokens, 0, lane, c[n],
                         args.squares ? factors + n * 8 : nullptr, rows, before[n]);
}
