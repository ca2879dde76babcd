// RMS norms over rows: into the f16 operand of a matrix product, or onto the residual stream.
#include "common.cuh"

struct NormArgs {
    const float* x;       // f32 [rows][size]
    const float* weight;  // f32 [size]
    u16* half_out;        // f16 [rows][out_stride], or null
    float* residual;      // f32 [rows][size]: += the normed row, or null
    int size;
    int out_stride;
    float eps;
};

// Grid: rows. A thread keeps up to 4 x 4 elements in registers (size up to 16 blockDim.x), and re-reads beyond.
__global__ void __launch_bounds__(1024) rms_norm(const __grid_constant__ NormArgs args) {
    __shared__ float scratch[32];
    dependency_wait();
    const float* x = args.x + (u64)blockIdx.x * args.size;
    float squares = 0.f;
    for (int i = threadIdx.x * 4; i < args.size; i += blockDim.x * 4) {
        const float4 v = *(const float4*)(x + i);
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    const float scale = rsqrtf(block_sum(squares, scratch) / (float)args.size + args.eps);
    for (int i = threadIdx.x * 4; i < args.size; i += blockDim.x * 4) {
        const float4 v = *(const float4*)(x + i), w = *(const float4*)(args.weight + i);
        const float y0 = v.x * scale * w.x, y1 = v.y * scale * w.y, y2 = v.z * scale * w.z, y3 = v.w * scale * w.w;
        if (args.residual) {
            float4* at = (float4*)(args.residual + (u64)blockIdx.x * args.size + i);
            const float4 r = *at;
            *at = make_float4(r.x + y0, r.y + y1, r.z + y2, r.w + y3);
        } else {
            u16* at = args.half_out + (u64)blockIdx.x * args.out_stride + i;
            at[0] = half_saturated(y0), at[1] = half_saturated(y1), at[2] = half_saturated(y2), at[3] = half_saturated(y3);
        }
    }
}

struct OperandArgs {
    const float* x;       // f32 [rows][size]
    const float* weight;  // f32 [size], scaled down so that the product stays in f16's range
    u16* out;             // f16 [rows][out_stride], or tiled: x weight
    float* squares;       // f32 [rows][ceil(size / 16)]: sums of squares of 16 elements of x
    int size;
    int out_stride;
    int tiled;  // operand_index
};

// The operand of a product whose epilogue divides by the norm (linear.cuh): bit for bit what the epilogue of the
// product before leaves. Grid: (rows, ceil(size / 512)); a warp 64 elements.
__global__ void __launch_bounds__(256) rms_operand(const __grid_constant__ OperandArgs args) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    dependency_wait();
    const int tile = (blockIdx.y * 8 + warp) * 4 + t;
    const float* x = args.x + (u64)blockIdx.x * args.size;
    float squares = 0.f;
    for (int upper = 0; upper < 2; upper++) {
        const int i = tile * 16 + 8 * upper + g;
        if (i >= args.size) continue;
        const float y = x[i];
        squares = __fmaf_rn(y, y, squares);
        args.out[operand_index(blockIdx.x, i, args.out_stride, args.tiled)] = half_saturated(y * args.weight[i]);
    }
    squares = sum_of_rows(squares);
    const int tiles = (args.size + 15) / 16;
    if (g == 0 && tile < tiles) args.squares[(u64)blockIdx.x * tiles + tile] = squares;
}

struct GatedArgs {
    const void* x;  // f32 or f16 [rows][2 x size]: interleaved by 8 as the tiles are, or gate then up
    u16* out;       // f16 [rows][out_stride], or tiled
    int size;
    int x_stride;
    int out_stride;
    int tiled;  // operand_index
    int activation;
    int up_start;  // where up begins; 0: interleaved
    float factor;  // of x
};

DEVICE float element(const float* x) { return *x; }
DEVICE float element(const u16* x) { return float_from_half(*x); }
DEVICE void elements(const float* x, float (&v)[8]) {
    const float4 a = *(const float4*)x, b = *(const float4*)(x + 4);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
DEVICE void elements(const u16* x, float (&v)[8]) {
    const uint4 a = *(const uint4*)x;
#pragma unroll
    for (int k = 0; k < 4; k++) v[2 * k] = half2_low(word(a, k)), v[2 * k + 1] = half2_high(word(a, k));
}

// Grid: (rows, ceil(size / (8 blockDim.x))); a thread 8 elements, which lie side by side where interleaved.
template <class T>
__global__ void __launch_bounds__(256) gated(const __grid_constant__ GatedArgs args) {
    dependency_wait();
    const int j = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (j >= args.size) return;
    const T* x = (const T*)args.x + (u64)blockIdx.x * args.x_stride;
    if (args.up_start) {
        for (int k = j; k < min(j + 8, args.size); k++)
            args.out[operand_index(blockIdx.x, k, args.out_stride, args.tiled)] =
                half_saturated(activate(element(x + k) * args.factor, args.activation) *
                               element(x + args.up_start + k) * args.factor);
        return;
    }
    float gate[8], up[8];
    elements(x + 2 * j, gate);
    elements(x + 2 * j + 8, up);
    u32 y[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
        y[k] = half2_saturated(activate(gate[2 * k] * args.factor, args.activation) * up[2 * k] * args.factor,
                               activate(gate[2 * k + 1] * args.factor, args.activation) * up[2 * k + 1] * args.factor);
    *(uint4*)(args.out + (u64)blockIdx.x * args.out_stride + j) = make_uint4(y[0], y[1], y[2], y[3]);
}
