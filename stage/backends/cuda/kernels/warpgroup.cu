// y = W x for 9 to 64 rows of x with Hopper's warpgroup products: each warp decodes its row tile into registers, a
// warpgroup multiplies its four tiles by all rows of x at once, which lie in shared memory for the whole block.
//
// A block takes 4 GROUPS row tiles and a share of the columns; the blocks that share a row of tiles are a cluster and
// add up one another's sums through distributed shared memory, always in the same order.
#include "linear.cuh"
#include "warpgroup.cuh"

constexpr int STAGES = 3;  // column tiles of x in shared memory, as operand_index lays them out

// What the warps of a block wait for: a stage is full, a stage has been read by all of them.
struct Pipeline {
    u32 shared, full, empty;  // the first stage; barriers, 8 bytes a stage
};

DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// What lies at `address` in the shared memory of a block of the cluster.
DEVICE float4 load_cluster(u32 address, int rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(there) : "memory");
    return v;
}

// Column tile `column_tile` of x comes by itself; of one thread.
template <int N>
DEVICE void fetch(const LinearArgs& args, const Pipeline& pipeline, int stage, int column_tile) {
    constexpr int BYTES = N * 512;
    barrier_expect(pipeline.full + stage * 8, BYTES);
    copy_bulk(pipeline.shared + stage * BYTES, args.x + (u64)column_tile * N * 256, BYTES, pipeline.full + stage * 8);
}

// `ready` is called once the kernels before are done and the first loads are on their way.
template <class Type, int N, class Ready>
DEVICE void accumulate(const Pipeline& pipeline, const LinearArgs& args, int which, int tile, int first, int last, int lane,
                       float (&c)[N / 8][4], const Ready& ready) {
    constexpr int CHUNK = N * 16;
    // Rows beyond the last tile are the last tile's, and are dropped: a warpgroup works as one.
    const u8* tiles = args.tiles[which] + (u64)min(tile, args.row_tiles[which] - 1) * args.column_tiles * Type::BYTES;
    Type next;
    next.load(tiles + (u64)first * Type::BYTES, lane);
    dependency_wait();
    if (threadIdx.x == 0) {
        for (int k = 0; k < min(STAGES, last - first); k++) fetch<N>(args, pipeline, k, first + k);
    }
    __syncwarp();
    ready();
    int stage = 0;
    u32 round = 0;  // the parity of this use of the stage
    for (int column_tile = first; column_tile < last; column_tile++) {
        Type packet = next;
        if (column_tile + 1 < last) next.load(tiles + (u64)(column_tile + 1) * Type::BYTES, lane);
        packet.prepare(args.exponent[which], lane);
        barrier_wait(pipeline.full + stage * 8, round);
        __syncwarp();
        // (From one lane, so that the compiler sees that it is the same in all.)
        const u64 b = matrix_at(__shfl_sync(FULL_WARP, pipeline.shared + stage * 32 * CHUNK, 0), CHUNK);
        Fragments a[2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            packet.fragments(i, lane, a[i & 1]);
            warpgroup_fence();
#pragma unroll
            for (int parity = 0; parity < 2; parity++)
#pragma unroll
                for (int step = 0; step < 2; step++)
                    warpgroup_mma(c, a[i & 1][parity][step], b + (((2 * i + parity) * 2 + step) * 2 * CHUNK >> 4));
            warpgroup_commit();
            if (i < 3) warpgroup_wait<1>();
            // The stage before this one is refilled once all have read it.
            if (i == 1 && threadIdx.x == 0 && column_tile > first && column_tile + STAGES - 1 < last) {
                const int before = stage == 0 ? STAGES - 1 : stage - 1;
                barrier_wait(pipeline.empty + before * 8, stage == 0 ? round ^ 1 : round);
                fetch<N>(args, pipeline, before, column_tile + STAGES - 1);
            }
            if (i == 1) __syncwarp();
        }
        warpgroup_wait<0>();
        if (lane == 0) barrier_arrive(pipeline.empty + stage * 8);
        __syncwarp();
        stage++;
        if (stage == STAGES) stage = 0, round ^= 1;
    }
}

// Sums of squares of the rows of COUNT tokens, first, first + STEP, ..., in every lane.
template <int COUNT, int STEP>
DEVICE void row_squares(const LinearArgs& args, int first, int lane, float (&sums)[COUNT]) {
    const float* squares = args.squares + (u64)first * args.num_squares;
#pragma unroll
    for (int k = 0; k < COUNT; k++) sums[k] = 0.f;
    if (args.num_squares % 4 == 0) {
        for (int i = lane * 4; i < args.num_squares; i += 128) {
#pragma unroll
            for (int k = 0; k < COUNT; k++) {
                if (first + k * STEP >= args.num_tokens) break;
                const float4 v = __ldcg((const float4*)(squares + k * STEP * args.num_squares + i));
                sums[k] += (v.x + v.y) + (v.z + v.w);
            }
        }
    } else {
        for (int i = lane; i < args.num_squares; i += 32)
            for (int k = 0; k < COUNT; k++)
                if (first + k * STEP < args.num_tokens) sums[k] += __ldcg(squares + k * STEP * args.num_squares + i);
    }
#pragma unroll
    for (int k = 0; k < COUNT; k++) sums[k] = warp_sum(sums[k]);
}

// Grid: (ceil(row tiles / 4 GROUPS) of the first weight, then of the second; SPLITS: 1, 2, 4 or 8).
// N: rows of x, rounded up to 16, 32 or 64.
template <class A, class B, int N, int EPILOGUE, int GROUPS, int SPLITS>
__global__ void __launch_bounds__(GROUPS * 128, 4 / GROUPS) __cluster_dims__(1, SPLITS, 1)
    matmul_warpgroup(const __grid_constant__ LinearArgs args) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ float factors[N];
    __shared__ u64 barriers[2 * STAGES];
    constexpr int WARPS = GROUPS * 4, SHARE = N / 8 * WARPS / SPLITS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 base = (u32)__cvta_generic_to_shared(shared), full = (u32)__cvta_generic_to_shared(barriers);
    const Pipeline pipeline = {base, full, full + STAGES * 8};
    if (threadIdx.x == 0) {
        for (int k = 0; k < STAGES; k++) barrier_init(full + k * 8, 1), barrier_init(full + (STAGES + k) * 8, WARPS);
        barrier_publish();
    }
    __syncthreads();
    const int blocks = (args.row_tiles[0] + WARPS - 1) / WARPS;
    const int which = blockIdx.x >= blocks ? 1 : 0;
    const int first_tile = (blockIdx.x - which * blocks) * WARPS;
    const int split = blockIdx.y;
    const int first = args.column_tiles * split / SPLITS, last = args.column_tiles * (split + 1) / SPLITS;
    // Of the fragments (eight tokens against a row tile) this split completes SHARE.
    const int first_fragment = split * SHARE;
    const auto ready = [&]() {
        if (!args.squares) return;
        constexpr int TOKENS = (SHARE + WARPS - 1) / WARPS * 8, COUNT = (TOKENS + WARPS - 1) / WARPS;
        const int token = first_fragment / WARPS * 8 + warp;
        float sums[COUNT];
        row_squares<COUNT, WARPS>(args, token, lane, sums);
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            if (lane == k && token + k * WARPS < N) factors[token + k * WARPS] = norm_factor(args, sums[k]);
    };
    float c[N / 8][4] = {};
    if (SAME<A, B> || which == 0)
        accumulate<A, N>(pipeline, args, which, first_tile + warp, first, last, lane, c, ready);
    else
        accumulate<B, N>(pipeline, args, 1, first_tile + warp, first, last, lane, c, ready);
    const float* scale = args.squares ? factors : nullptr;
    if (SPLITS == 1) {
        const int tile = first_tile + warp;
        __syncthreads();
        if (tile >= args.row_tiles[which]) return;
        const RowValues rows = row_values<EPILOGUE>(args, which, tile, lane);
#pragma unroll
        for (int n = 0; n < N / 8; n++) {
            const Before before = out_before<EPILOGUE>(args, which, tile, n * 8, lane, 0);
            finish<EPILOGUE>(args, which, tile, n * 8, args.num_tokens, 0, lane, c[n], scale ? scale + n * 8 : nullptr,
                             rows, before);
        }
        return;
    }
    __syncthreads();  // x is read no more
#pragma unroll
    for (int n = 0; n < N / 8; n++)
        *(float4*)(shared + (n * WARPS * 32 + threadIdx.x) * 16) = make_float4(c[n][0], c[n][1], c[n][2], c[n][3]);
    cluster_arrive();
    cluster_wait();
    for (int i = warp; i < SHARE; i += WARPS) {
        const int n = (first_fragment + i) / WARPS, own = (first_fragment + i) % WARPS, tile = first_tile + own;
        if (tile >= args.row_tiles[which]) continue;
        const RowValues rows = row_values<EPILOGUE>(args, which, tile, lane);
        const Before before = out_before<EPILOGUE>(args, which, tile, n * 8, lane, 0);
        const u32 at = base + ((n * WARPS + own) * 32 + lane) * 16;
        float sum[4] = {};
#pragma unroll
        for (int s = 0; s < SPLITS; s++) {
            const float4 part = load_cluster(at, s);
            sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
        }
        finish<EPILOGUE>(args, which, tile, n * 8, args.num_tokens, 0, lane, sum, scale ? scale + n * 8 : nullptr, rows,
                         before);
    }
    __syncwarp();
    cluster_arrive();  // no block ends while others read its sums
    cluster_wait();
}
