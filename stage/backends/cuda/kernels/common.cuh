// Words every kernel speaks: half-precision pairs as 32-bit words, matrix instructions, streaming loads.
// PTX is written out here so that the run-time compiler needs no CUDA headers on the machine.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

constexpr u32 FULL_WARP = 0xffffffffu;

// Two f16 in a word, the low half first in memory.
DEVICE u32 half2_fma(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
DEVICE u32 half2_mul(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
DEVICE u32 half2_add(u32 a, u32 b) {
    u32 d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
DEVICE u16 half_from_float(float x) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}
DEVICE u32 half2_pack(float low, float high) {
#if __CUDA_ARCH__ >= 800
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
#else
    return (u32)half_from_float(low) | (u32)half_from_float(high) << 16;
#endif
}
DEVICE float float_from_half(u16 h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}
DEVICE float half2_low(u32 v) { return float_from_half((u16)(v & 0xffff)); }
DEVICE float half2_high(u32 v) { return float_from_half((u16)(v >> 16)); }
DEVICE u32 both_low(u32 v) { return __byte_perm(v, v, 0x1010); }
DEVICE u32 both_high(u32 v) { return __byte_perm(v, v, 0x3232); }

// An activation on its way to f16: beyond the format's range it saturates instead of becoming infinite.
DEVICE u16 half_saturated(float x) { return half_from_float(fminf(fmaxf(x, -65504.f), 65504.f)); }

DEVICE u32 half2_saturated(float low, float high) {
    return (u32)half_saturated(low) | (u32)half_saturated(high) << 16;
}

// 2^n as an f16 pair, -14 <= n <= 15.
DEVICE u32 half2_power(int n) { return (u32)(n + 15) * 0x04000400u; }

// c[16x8] += a[16x16] b[16x8], f16 operands, f32 sums. Lane 4g + t holds rows g, g + 8 of a and c, column g of b.
DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Weights are read once a step: they pass L1 by.
DEVICE uint4 load_stream(const void* p) {
    uint4 r;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
    return r;
}
DEVICE uint2 load_stream2(const void* p) {
    uint2 r;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(p));
    return r;
}
DEVICE u32 load_stream1(const void* p) {
    u32 r;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(r) : "l"(p));
    return r;
}
DEVICE u32 load_stream_half(const void* p) {
    u16 r;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(r) : "l"(p));
    return r;
}

// Activations and KV: written by kernels before, so read through the coherent path, after dependency_wait().
DEVICE uint4 load4(const void* p) {
    uint4 r;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p) : "memory");
    return r;
}

// The same where nothing but barriers orders it with the kernel's own writes: other code may move across.
DEVICE uint4 load_cached(const void* p) {
    uint4 r;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
    return r;
}
// A load that stays where it is written, from any address space: to spare registers.
DEVICE uint4 load_again(const void* p) {
    uint4 r;
    asm volatile("ld.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
    return r;
}

// Copies into shared memory that run by themselves, in groups.
DEVICE void copy_async(u32 shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

DEVICE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

DEVICE u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Where column `column` of a product's f16 operand lies. Plain: row after row. Tiled, for matmul_warpgroup of `tiled` rows:
// [column tile][sub-block of 32][chunk][row] 16 bytes, a chunk the columns that lanes t hold in one register of a
// fragment (types.cuh): 8t + 2 chunk, + 1. Columns 2i and 2i + 1 stay neighbours.
DEVICE u64 operand_index(int row, int column, int stride, int tiled) {
    if (!tiled) return (u64)row * stride + column;
    const int chunk = column / 32 * 4 + column / 2 % 4;
    return ((u64)chunk * tiled + row) * 8 + column / 8 % 4 * 2 + column % 2;
}

// Programmatic dependent launch: a kernel's blocks start while the kernel before drains, and touch what that one writes
// only after dependency_wait(). They let the next kernel start after that, not before: so what kernels before the
// last wrote may be read from the beginning. All does nothing where the launch or the GPU is plain.
DEVICE void allow_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    allow_dependents();
}

// 2^x; what is too small becomes zero.
DEVICE float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float warp_sum(float x) {
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(FULL_WARP, x, offset);
    return x;
}

// The sum over the eight g of lanes 4g + t.
DEVICE float sum_of_rows(float x) {
    for (int offset = 4; offset < 32; offset <<= 1) x += __shfl_xor_sync(FULL_WARP, x, offset);
    return x;
}

// The sum over a block, in every thread; `scratch`: one float a warp. Threads add in a fixed order.
DEVICE float block_sum(float x, float* scratch) {
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) scratch[warp] = x;
    __syncthreads();
    float total = 0.f;
    for (int i = 0; i < warps; i++) total += scratch[i];
    __syncthreads();
    return total;
}

enum Activation { SILU = 0, GELU_TANH = 1 };

DEVICE float activate(float x, int activation) {
    if (activation == SILU) return x / (1.f + expf(-x));
    const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.f + tanhf(inner));
}
