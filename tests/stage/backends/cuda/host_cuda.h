// Runs device code on the host: a block's threads are coroutines that change at barriers and shuffles. A warp runs as
// far as it can before another one does, so that a barrier that is missing shows; where nobody can go on, it aborts.
// The PTX of common.cuh is written in C++.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include <setjmp.h>
#include <ucontext.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;
#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__ static
#define __align__(n)
#define __launch_bounds__(...)
#define __grid_constant__
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using std::max;
using std::min;

// ---- a block of threads --------------------------------------------------------------------------------
static struct { unsigned x, y, z; } threadIdx, blockIdx, gridDim, blockDim;
alignas(16) static float dynamic_shared[32 << 10];

struct Barrier {
    int arrived, generation, live;
};
struct Thread {
    std::vector<char> stack;
    jmp_buf state;  // where it goes on
    bool done;
};
static std::vector<Thread> threads;  // they wait for the next block when one has ended
static jmp_buf scheduler;
static std::vector<Barrier> barriers;  // a warp's each, then the block's
static u64 slots[32][32];
static bool moved;  // a barrier has opened or a thread has ended
static std::function<void()> body;

static void take_turns() {
    if (!_setjmp(threads[threadIdx.x].state)) _longjmp(scheduler, 1);
}
static void open_if_complete(Barrier& barrier) {
    if (barrier.arrived < barrier.live || !barrier.live) return;
    barrier.arrived = 0, barrier.generation++, moved = true;
}
static void wait_at(Barrier& barrier) {
    const int generation = barrier.generation;
    barrier.arrived++;
    open_if_complete(barrier);
    while (barrier.generation == generation) take_turns();
}
static void thread_main() {
    for (;;) {
        take_turns();
        body();
        threads[threadIdx.x].done = moved = true;
        for (Barrier* barrier : {&barriers[threadIdx.x / 32], &barriers.back()}) {
            barrier->live--;
            open_if_complete(*barrier);
        }
    }
}
static void resume(unsigned thread) {
    threadIdx = {thread, 0, 0};
    if (!_setjmp(scheduler)) _longjmp(threads[thread].state, 1);
}
static void make_threads(unsigned count) {
    static ucontext_t here, first;
    threads.reserve(1024);
    while (threads.size() < count) {
        threadIdx = {(unsigned)threads.size(), 0, 0};
        threads.push_back({std::vector<char>(64 << 10)});
        getcontext(&first);
        first.uc_stack.ss_sp = threads.back().stack.data(), first.uc_stack.ss_size = threads.back().stack.size();
        makecontext(&first, thread_main, 0);
        if (!_setjmp(scheduler)) swapcontext(&here, &first);
    }
}
// One block after the other, the last first.
static void launch(const int (&grid)[3], int num_threads, const std::function<void()>& kernel) {
    gridDim = {(unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2]};
    blockDim = {(unsigned)num_threads, 1, 1};
    make_threads(num_threads);
    body = kernel;
    u32 random = 1;
    for (int block = grid[0] * grid[1] * grid[2] - 1; block >= 0; block--) {
        blockIdx = {(unsigned)(block % grid[0]), (unsigned)(block / grid[0] % grid[1]), (unsigned)(block / grid[0] / grid[1])};
        memset(dynamic_shared, 0xff, sizeof dynamic_shared);  // not numbers
        barriers.assign(num_threads / 32, {0, 0, 32});
        barriers.push_back({0, 0, num_threads});
        for (int i = 0; i < num_threads; i++) threads[i].done = false;
        while (barriers.back().live) {
            random = random * 1664525u + 1013904223u;
            const int warps = num_threads / 32, first_warp = (random >> 8) % warps, first_lane = random >> 27;
            bool any = false;
            for (int w = 0; w < warps; w++) {
                do {
                    moved = false;
                    for (int i = 0; i < 32; i++) {
                        const unsigned at = (first_warp + w) % warps * 32 + (first_lane + i) % 32;
                        if (threads[at].done) continue;
                        resume(at);
                    }
                    any |= moved;
                } while (moved);
            }
            if (!any) fprintf(stderr, "threads wait for one another for ever\n"), abort();
        }
    }
}

inline void __syncthreads() { wait_at(barriers.back()); }
inline void __syncwarp() { wait_at(barriers[threadIdx.x / 32]); }
inline void __threadfence() {}
template <class T>
T __shfl_sync(u32, T value, int source, int width = 32) {
    static_assert(sizeof(T) <= 8);
    u64* warp = slots[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    memcpy(&warp[lane], &value, sizeof value);
    __syncwarp();
    memcpy(&value, &warp[lane / width * width + source % width], sizeof value);
    __syncwarp();
    return value;
}
template <class T>
T __shfl_xor_sync(u32 mask, T value, int bits) { return __shfl_sync(mask, value, (threadIdx.x % 32) ^ bits); }
template <class T>
T __ldcg(const T* p) { return *p; }
inline u32 atomicAdd(u32* p, u32 x) { const u32 before = *p; *p += x; return before; }

// ---- arithmetic and memory -----------------------------------------------------------------------------
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return (float)((double)a * b + c); }
inline _Float16 half_of(u32 v, int high) {
    const u16 bits = high ? v >> 16 : v & 0xffff;
    _Float16 h;
    memcpy(&h, &bits, 2);
    return h;
}
inline u32 pack_halves(_Float16 low, _Float16 high) {
    u16 a, b;
    memcpy(&a, &low, 2), memcpy(&b, &high, 2);
    return a | (u32)b << 16;
}
// Through double: a product of two f16 and a sum with a third are exact there, so that one rounding remains.
inline u32 half2_fma(u32 a, u32 b, u32 c) {
    const auto one = [&](int i) { return (_Float16)((double)half_of(a, i) * (double)half_of(b, i) + (double)half_of(c, i)); };
    return pack_halves(one(0), one(1));
}
inline u32 half2_mul(u32 a, u32 b) { return half2_fma(a, b, 0x80008000u); }
inline u32 half2_add(u32 a, u32 b) { return half2_fma(a, 0x3c003c00u, b); }
inline u32 half2_pack(float low, float high) { return pack_halves((_Float16)low, (_Float16)high); }
inline u16 half_from_float(float x) { return (u16)half2_pack(x, 0.f); }
inline float float_from_half(u16 h) { return (float)half_of(h, 0); }
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
    const u64 all = a | (u64)b << 32;
    u32 out = 0;
    for (int i = 0; i < 4; i++) out |= (u32)((all >> (8 * ((selector >> (4 * i)) & 7))) & 0xff) << (8 * i);
    return out;
}
template <class T>
T read_as(const void* p) { T r; memcpy(&r, p, sizeof r); return r; }
inline uint4 load_stream(const void* p) { return read_as<uint4>(p); }
inline uint2 load_stream2(const void* p) { return read_as<uint2>(p); }
inline u32 load_stream1(const void* p) { return read_as<u32>(p); }
inline u32 load_stream_half(const void* p) { return read_as<u16>(p); }
inline uint4 load4(const void* p) { return read_as<uint4>(p); }
inline uint4 load_cached(const void* p) { return read_as<uint4>(p); }
inline void allow_dependents() {}
inline void dependency_wait() {}
