// Reads memory and does nothing with it: the rate that all other kernels are measured against.
#include "common.cuh"

struct ReadArgs {
    const uint4* data;  // [count]
    u32* out;           // one word, written only where the data's words all cancel out
    u64 count;
};

// Grid: any. Eight 16-byte loads of a thread are under way at once.
__global__ void __launch_bounds__(512) read_memory(const __grid_constant__ ReadArgs args) {
    dependency_wait();
    const u64 threads = (u64)gridDim.x * blockDim.x;
    u32 sum = 0x9e3779b9u;
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 7 * threads < args.count; i += 8 * threads) {
        uint4 v[8];
#pragma unroll
        for (int k = 0; k < 8; k++)
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v[k].x), "=r"(v[k].y), "=r"(v[k].z), "=r"(v[k].w)
                         : "l"(args.data + i + k * threads));
#pragma unroll
        for (int k = 0; k < 8; k++) sum ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    for (; i < args.count; i += threads) {
        const uint4 v = args.data[i];
        sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0) *args.out = sum;
}
