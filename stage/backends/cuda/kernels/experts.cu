// Mixture of experts: which experts a row meets and with what share, and the weighted sum of what they say.
#include "common.cuh"

struct RouterArgs {
    const float* x;            // f32 [rows][size], the residual stream
    const float* norm_weight;  // f32 [size]
    const float* weight;       // f32 [num_experts][size]
    const float* bias;         // f32 [num_experts] or null
    int* chosen;               // int [rows][num_used], the largest first; ties go to the lower number
    float* shares;             // f32 [rows][num_used], softmax over the chosen ones: sum one
    int size;
    int num_experts;           // at most 512
    int num_used;              // at most 64
    float eps;
};

// Grid: rows. Shared memory: size floats.
__global__ void __launch_bounds__(512) router(const __grid_constant__ RouterArgs args) {
    extern __shared__ float normed[];
    __shared__ float scratch[32], logits[512];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    dependency_wait();
    const float* x = args.x + (u64)blockIdx.x * args.size;
    float squares = 0.f;
    for (int i = threadIdx.x; i < args.size; i += blockDim.x) squares += x[i] * x[i];
    const float scale = rsqrtf(block_sum(squares, scratch) / (float)args.size + args.eps);
    for (int i = threadIdx.x; i < args.size; i += blockDim.x) normed[i] = x[i] * scale * args.norm_weight[i];
    __syncthreads();
    for (int e = warp; e < args.num_experts; e += blockDim.x / 32) {
        const float* weight = args.weight + (u64)e * args.size;
        float sum = 0.f;
        for (int i = lane; i < args.size; i += 32) sum += normed[i] * weight[i];
        sum = warp_sum(sum);
        if (lane == 0) logits[e] = sum + (args.bias ? args.bias[e] : 0.f);
    }
    __syncthreads();
    if (warp) return;
    float top = 0.f, total = 0.f;
    for (int k = 0; k < args.num_used; k++) {
        float best = -3.4e38f;
        int index = args.num_experts;
        for (int e = lane; e < args.num_experts; e += 32)
            if (logits[e] > best) best = logits[e], index = e;
        for (int offset = 16; offset > 0; offset >>= 1) {
            const float other = __shfl_xor_sync(FULL_WARP, best, offset);
            const int other_index = __shfl_xor_sync(FULL_WARP, index, offset);
            if (other > best || (other == best && other_index < index)) best = other, index = other_index;
        }
        index = min(index, args.num_experts - 1);
        if (k == 0) top = best;
        const float share = expf(best - top);
        total += share;
        if (lane == 0) {
            logits[index] = -3.4e38f;
            args.chosen[blockIdx.x * args.num_used + k] = index;
            args.shares[blockIdx.x * args.num_used + k] = share;
        }
        __syncwarp();
    }
    for (int k = lane; k < args.num_used; k += 32) args.shares[blockIdx.x * args.num_used + k] /= total;
}

struct CombineArgs {
    const float* y;       // f32 [rows][num_used][size]
    const float* shares;  // f32 [rows][num_used]
    float* out;           // f32 [rows][size]
    int size;
    int num_used;
    int add;              // onto what out holds
};

// Grid: (rows, ceil(size / 256)).
__global__ void __launch_bounds__(256) combine(const __grid_constant__ CombineArgs args) {
    dependency_wait();
    const int i = blockIdx.y * 256 + threadIdx.x, row = blockIdx.x;
    if (i >= args.size) return;
    float sum = 0.f;
    for (int k = 0; k < args.num_used; k++)
        sum += args.shares[row * args.num_used + k] * args.y[((u64)row * args.num_used + k) * args.size + i];
    float* out = args.out + (u64)row * args.size + i;
    *out = args.add ? *out + sum : sum;
}
