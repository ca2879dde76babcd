// Runs repack.cu on the host: a block of one thread, whose loops then do everything, block after block.
#include <cstdint>
#include <cstring>

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;
#define DEVICE inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)
#define __shared__ static
struct alignas(16) uint4 { u32 x, y, z, w; };
struct Index { int x, y, z; };
static Index threadIdx, blockIdx, blockDim{1, 1, 1}, gridDim;
static int min(int a, int b) { return a < b ? a : b; }
static void __syncthreads() {}
static void allow_dependents() {}
static void dependency_wait() {}
static uint4 shared[48 * 1024 / 16];

#include KERNEL

extern "C" void run(int field, const RepackArgs* args, int x, int y, int z) {
    gridDim = {x, y, z};
    for (blockIdx.z = 0; blockIdx.z < z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < x; blockIdx.x++) {
                memset(shared, 0xee, sizeof shared);
                if (field == 8) repack<8>(*args);
                if (field == 4) repack<4>(*args);
                if (field == 2) repack<2>(*args);
                if (field == 1) repack<1>(*args);
            }
}
