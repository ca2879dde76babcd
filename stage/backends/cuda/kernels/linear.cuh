// What the matrix kernels share: their arguments and what happens to a finished piece of the product.
#pragma once
#include "types.cuh"

enum Epilogue {
    STORE = 0,     // out[n][row] = y + bias
    RESIDUAL = 1,  // out[n][row] += y + bias
    GATED = 2,     // half_out[n][j] = activation(gate) up; tiles hold 8 rows of gate, then the same 8 of up
};

// One or two weights that are multiplied by the same rows, one after the other in the output.
struct LinearArgs {
    const u8* tiles[2];    // [row_tiles][column_tiles][BYTES]
    const float* bias[2];  // f32 [rows] or null
    float inverse[2];      // multiplies the sums
    int exponent[2];       // of the tensor, see types.cuh
    int row_tiles[2];
    int rows[2];        // rows that exist, before padding to 16
    int out_start[2];   // where in a row of the output they go
    int column_tiles;   // ceil(in_features / 256)
    int num_tokens;     // rows of x
    const u16* x;       // f16 [num_tokens][x_stride], zero past in_features; tiled for matmul_warpgroup
    float* out;         // f32 [num_tokens][out_stride]
    u16* half_out;      // f16 [num_tokens][out_stride], or tiled
    int x_stride;
    int out_stride;
    int activation;
    const int* experts;    // null, or which of a stack of weights each token of x meets: int [num_tokens]
    u64 expert_bytes[2];   // from one weight of the stack to the next
    int tokens_per_row;    // with experts: consecutive tokens that share a row of x (their number in x's rows)
    // x as rms_operand leaves it: f16(weight row), not yet divided by the row's norm. The sums are multiplied by
    // norm_inverse / sqrt(sum of squares / norm_size + eps). Null: x is final.
    const float* squares;  // f32 [num_tokens][num_squares]
    int num_squares;
    float norm_size;
    float norm_eps;
    float norm_inverse;
    // RESIDUAL: what rms_operand would make of the rows it completes, for the next norm. Null: nothing.
    float* next_squares;       // f32 [num_tokens][row tiles]
    const float* next_weight;  // f32 [rows]
    u16* next_x;               // f16 [num_tokens][next_stride], or tiled
    int next_stride;
    int tiled;                 // rows of half_out and next_x where they are tiled (operand_index), else 0
    float* partial;        // split sums: f32 [blocks][splits][fragments]
    u32* arrived;          // [blocks], zero before and after
};

// The factor a token's sums still need is formed in two parts: the sum of squares, shared by `threads` threads, ...
DEVICE float squares_share(const LinearArgs& args, int token, int thread, int threads) {
    const float* squares = args.squares + (u64)token * args.num_squares;
    float sum = 0.f;
#pragma unroll 4
    for (int i = thread; i < args.num_squares; i += threads) sum += __ldcg(squares + i);
    return sum;
}
// ... and what it means.
DEVICE float norm_factor(const LinearArgs& args, float squares) {
    return args.norm_inverse * rsqrtf(squares / args.norm_size + args.norm_eps);
}

template <class A, class B>
constexpr bool SAME = false;
template <class A>
constexpr bool SAME<A, A> = true;

// What the end of a product reads from memory, asked for early: of rows g and g + 8 of a tile, and of tokens
// first_token + 2t, + 1.
struct RowValues {
    float bias[2], next_weight[2];
};
struct Before {
    float out[2][2];  // [token][row]
};

template <int EPILOGUE>
DEVICE RowValues row_values(const LinearArgs& args, int which, int tile, int lane) {
    RowValues values = {};
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
        const int row = tile * 16 + 8 * upper + (lane >> 2);
        if (row >= args.rows[which]) continue;
        if (args.bias[which]) values.bias[upper] = args.bias[which][row];
        if (EPILOGUE == RESIDUAL && args.next_x) values.next_weight[upper] = args.next_weight[row];
    }
    return values;
}

template <int EPILOGUE>
DEVICE Before out_before(const LinearArgs& args, int which, int tile, int first_token, int lane, int out_token) {
    Before before = {};
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const int token = first_token + 2 * (lane & 3) + e;
        if (EPILOGUE != RESIDUAL) continue;
        const float* out = args.out + (u64)(out_token + token) * args.out_stride + args.out_start[which];
#pragma unroll
        for (int upper = 0; upper < 2; upper++) {
            const int row = tile * 16 + 8 * upper + (lane >> 2);
            if (token < args.num_tokens && row < args.rows[which]) before.out[e][upper] = out[row];
        }
    }
    return before;
}

// c: a fragment of row tile `tile` against tokens first_token .. + 7, by a whole warp, that go to rows
// out_token + token of the output. factors: one a token from first_token on, or null.
template <int EPILOGUE>
DEVICE void finish(const LinearArgs& args, int which, int tile, int first_token, int num_tokens, int out_token, int lane,
                   const float (&c)[4], const float* factors, const RowValues& rows, const Before& before) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const int token = first_token + 2 * t + e;
        const bool real = token < num_tokens;
        float scale = args.inverse[which];
        if (factors) scale *= factors[2 * t + e];
        const float first = c[e] * scale, second = c[2 + e] * scale;
        const u64 out_row = (u64)(out_token + token);
        if (EPILOGUE == GATED) {
            const int j = tile * 8 + g;
            if (real && j < args.rows[which] / 2)
                args.half_out[operand_index(out_token + token, j, args.out_stride, args.tiled)] =
                    half_saturated(activate(first, args.activation) * second);
            continue;
        }
        float squares = 0.f;
#pragma unroll
        for (int upper = 0; upper < 2; upper++) {
            const int row = tile * 16 + 8 * upper + g;
            if (!real || row >= args.rows[which]) continue;
            const float y = (upper ? second : first) + rows.bias[upper] + before.out[e][upper];
            args.out[out_row * args.out_stride + args.out_start[which] + row] = y;
            if (EPILOGUE == RESIDUAL && args.next_x) {
                squares = __fmaf_rn(y, y, squares);
                args.next_x[operand_index(out_token + token, row, args.next_stride, args.tiled)] =
                    half_saturated(y * rows.next_weight[upper]);
            }
        }
        if (EPILOGUE == RESIDUAL && args.next_x) {
            squares = sum_of_rows(squares);
            if (real && g == 0) args.next_squares[out_row * args.row_tiles[which] + tile] = squares;
        }
    }
}
