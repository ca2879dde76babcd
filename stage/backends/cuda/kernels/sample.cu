// The end of a decode step: the most likely token of each row, fed back as the next step's input.
#include "common.cuh"

struct GreedyArgs {
    float* logits;       // f32 [rows][vocabulary]
    int* tokens;         // int [rows]: receives the token
    int* positions;      // int [rows]: advanced by one, or null
    int* history;        // int [steps][rows] ring of drawn tokens, or null
    int* step;           // int [rows]: the row of `history` to write next; advanced
    float2* partial;     // [rows][chunks]: (largest, its index's bits)
    u32* arrived;        // [rows], zero before and after
    int vocabulary;
    int history_steps;   // power of two
};

DEVICE void larger(float& value, int& index, float other, int other_index) {
    // NaN wins, so that broken logits surface as an index outside the vocabulary.
    if (other > value || (other == value && other_index < index) || other != other) value = other, index = other_index;
}

// Grid: (chunks, rows). Ties go to the lowest id.
__global__ void __launch_bounds__(256) greedy(const __grid_constant__ GreedyArgs args) {
    __shared__ float2 shared[8];
    __shared__ bool last_to_arrive;
    allow_dependents();
    dependency_wait();
    const int row = blockIdx.y, chunks = gridDim.x, lane = threadIdx.x % 32;
    const float* logits = args.logits + (u64)row * args.vocabulary;
    const int share = (args.vocabulary + chunks - 1) / chunks, end = min(args.vocabulary, (int)(blockIdx.x + 1) * share);
    float value = -3.4e38f;
    int index = args.vocabulary;
    const auto reduce = [&]() {
        for (int offset = 16; offset > 0; offset >>= 1) {
            const float v = __shfl_xor_sync(FULL_WARP, value, offset);
            const int i = __shfl_xor_sync(FULL_WARP, index, offset);
            larger(value, index, v, i);
        }
    };
    for (int i = blockIdx.x * share + threadIdx.x; i < end; i += 256) larger(value, index, logits[i], i);
    reduce();
    if (lane == 0) shared[threadIdx.x / 32] = make_float2(value, __int_as_float(index));
    __syncthreads();
    if (threadIdx.x < 32) {
        value = lane < 8 ? shared[lane].x : -3.4e38f;
        index = lane < 8 ? __float_as_int(shared[lane].y) : args.vocabulary;
        reduce();
        if (lane == 0) {
            args.partial[row * chunks + blockIdx.x] = make_float2(value, __int_as_float(index));
            __threadfence();
            last_to_arrive = atomicAdd(args.arrived + row, 1) == chunks - 1;
        }
    }
    __syncthreads();
    if (!last_to_arrive || threadIdx.x >= 32) return;
    __threadfence();
    value = -3.4e38f, index = args.vocabulary;
    for (int i = lane; i < chunks; i += 32) {
        const float2 part = __ldcg(args.partial + row * chunks + i);
        larger(value, index, part.x, __float_as_int(part.y));
    }
    reduce();
    if (lane) return;
    args.arrived[row] = 0;
    const int token = value != value ? args.vocabulary : index;
    args.tokens[row] = token;
    if (args.positions) args.positions[row] += 1;
    if (args.history) {
        const int step = __ldcg(args.step + row);
        args.history[(u64)(step & (args.history_steps - 1)) * gridDim.y + row] = token;
        args.step[row] = step + 1;
    }
}
