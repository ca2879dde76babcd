// Tiles back to plain matrices: f16 for the prefill's library products, f32 rows for the embedding.
#include "types.cuh"

struct DequantizeArgs {
    const u8* tiles;
    u16* out;  // f16 [rows][stride]
    int exponent;
    int power;  // of two, of the tensor's inverse
    int column_tiles;
    int rows;
    int stride;  // in_features, rounded up to 8
};

// Grid: row tiles; the warps share the columns.
template <class Type>
__global__ void __launch_bounds__(256) dequantize(const __grid_constant__ DequantizeArgs args) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    const u32 first = half2_power(args.power / 2), second = half2_power(args.power - args.power / 2);
    for (int tile = warp; tile < args.column_tiles; tile += blockDim.x / 32) {
        Type packet;
        packet.load(args.tiles + ((u64)blockIdx.x * args.column_tiles + tile) * Type::BYTES, lane);
        packet.prepare(args.exponent, lane);
        if (tile == warp) dependency_wait();  // until then another product may read what lies in `out`
#pragma unroll
        for (int i = 0; i < 4; i++) {
            Fragments a;
            packet.fragments(i, lane, a);
#pragma unroll
            for (int parity = 0; parity < 2; parity++) {
#pragma unroll
                for (int upper = 0; upper < 2; upper++) {
                    const int row = blockIdx.x * 16 + upper * 8 + g;
                    const int column = tile * 256 + (2 * i + parity) * 32 + 8 * t;
                    if (row >= args.rows || column >= args.stride) continue;
                    u32 v[4] = {a[parity][0][upper], a[parity][0][2 + upper], a[parity][1][upper], a[parity][1][2 + upper]};
#pragma unroll
                    for (int k = 0; k < 4; k++) v[k] = half2_mul(half2_mul(v[k], first), second);
                    *(uint4*)(args.out + (u64)row * args.stride + column) = make_uint4(v[0], v[1], v[2], v[3]);
                }
            }
        }
    }
}

struct EmbedArgs {
    const u8* tiles;
    const int* tokens;  // int [rows]
    float* out;         // f32 [rows][columns]
    int exponent;
    float scale;  // the tensor's inverse times the model's embedding scale
    int column_tiles;
    int columns;
    int vocabulary;
};

// Grid: rows.
template <class Type>
__global__ void __launch_bounds__(256) embed(const __grid_constant__ EmbedArgs args) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    dependency_wait();
    const int token = min(max(args.tokens[blockIdx.x], 0), args.vocabulary - 1);
    for (int tile = warp; tile < args.column_tiles; tile += blockDim.x / 32) {
        Type packet;
        packet.load(args.tiles + ((u64)(token / 16) * args.column_tiles + tile) * Type::BYTES, lane);
        packet.prepare(args.exponent, lane);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            Fragments a;
            packet.fragments(i, lane, a);
            if (g != token % 8) continue;
#pragma unroll
            for (int parity = 0; parity < 2; parity++) {
#pragma unroll
                for (int upper = 0; upper < 2; upper++) {
                    const int column = tile * 256 + (2 * i + parity) * 32 + 8 * t;
                    if (upper != token / 8 % 2 || column >= args.columns) continue;
                    float* out = args.out + (u64)blockIdx.x * args.columns + column;
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        if (column + 2 * k >= args.columns) continue;
                        const u32 v = a[parity][k / 2][2 * (k % 2) + upper];
                        out[2 * k] = half2_low(v) * args.scale;
                        out[2 * k + 1] = half2_high(v) * args.scale;
                    }
                }
            }
        }
    }
}
