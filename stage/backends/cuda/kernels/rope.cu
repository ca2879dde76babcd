// Between the QKV product and attention of many rows; single rows do this inside attention_decode.
#include "rope.cuh"

// Grid: rows; a warp some of its heads.
__global__ void __launch_bounds__(256) rope(const __grid_constant__ RopeArgs args) {
    __shared__ float heads[8][256];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.x;
    const Angles<256> angles = angles_of<256>(args, args.positions[row], lane);
    dependency_wait();
    float* x = heads[warp];
    for (int head = warp; head < args.num_heads + 2 * args.num_kv_heads; head += 8) {
        turned_head(args, angles, row, head, lane, x);
        if (head < args.num_heads) {
            u16* to = args.q + ((u64)row * args.num_heads + head) * args.head_stride;
            for (int i = lane; i < args.head_stride; i += 32)
                to[i] = i < args.head_dim ? half_saturated(x[i] * args.scale) : 0;
        } else {
            const int kv_head = head - args.num_heads;
            const bool is_v = kv_head >= args.num_kv_heads;
            append(args, row, is_v ? kv_head - args.num_kv_heads : kv_head, is_v, lane, x);
        }
        __syncwarp();
    }
}
