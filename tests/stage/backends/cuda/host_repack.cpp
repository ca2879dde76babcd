// Runs repack.cu on the host: a block of one thread, whose loops then do everything, block after block.
#include <cstdint>
#include <cstring>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
#define DEVICE inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)
#define __shared__ static
struct alignas(16) uint4 { u32 x, y, z, w; };
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct Index { int x, y, z; };
static Index threadIdx, blockIdx, blockDim{1, 1, 1}, gridDim;
static int min(int a, int b) { return a < b ? a : b; }
static void __syncthreads() {}
static void allow_dependents() {}
static void dependency_wait() {}
static uint4 shared[48 * 1024 / 16];
static float __uint_as_float(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static u32 half2_pack(float low, float high) {
    _Float16 halves[2] = {(_Float16)low, (_Float16)high};
    u32 word;
    memcpy(&word, halves, 4);
    return word;
}

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

extern "C" void run_convert(int bytes, const RepackArgs* args, int x, int y, int z) {
    gridDim = {x, y, z};
    for (blockIdx.z = 0; blockIdx.z < z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < x; blockIdx.x++) bytes == 4 ? convert<4>(*args) : convert<2>(*args);
}
