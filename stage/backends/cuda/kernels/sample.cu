// The end of a step: a token for each row of logits, fed back as the next step's input.
//
// `greedy` serves rows that only want the largest logit. `sample` is the whole chain of stage/sampler.py, in its
// order and with its meaning: logit bias, penalties, top-k, typical-p, top-p, min-p, temperature, draw. A draw
// depends on logits, earlier tokens, options, seed and position alone, so that steps may be issued ahead.
#include "common.cuh"

constexpr int MAX_TOP = 20;              // most likely tokens told beside the drawn one
constexpr int RECORD = 2 + 2 * MAX_TOP;  // token, its logprob, ids of the top, their logprobs
constexpr int THREADS = 1024;
constexpr int CAPACITY = 2048;  // candidates that are sorted
constexpr int BINS = 2048;
constexpr u32 OWNED = 0x80000000u;

DEVICE float infinity() { return __int_as_float(0x7f800000); }

struct GreedyArgs {
    float* logits;    // f32 [rows][vocabulary]
    int* tokens;      // int [rows]: receives the token
    int* positions;   // int [rows]: advanced by one
    int* records;     // int [steps][rows][RECORD]: the token goes into word 0
    int* step;        // int [rows]: the record to write next; advanced
    float2* partial;  // [rows][chunks]: (largest, its index's bits)
    u32* arrived;     // [rows], zero before and after
    int vocabulary;
};

DEVICE void larger(float& value, int& index, float other, int other_index) {
    // NaN and infinity win, so that broken logits surface as an index outside the vocabulary.
    if (other > value || (other == value && other_index < index) || !(other < infinity())) {
        value = other;
        index = other_index;
    }
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
    const int step = args.step[row];
    const int token = value < infinity() ? index : args.vocabulary;
    args.arrived[row] = 0;
    args.tokens[row] = token;
    args.positions[row] += 1;
    args.records[((u64)step * gridDim.y + row) * RECORD] = token;
    args.step[row] = step + 1;
}

// One row's options; in double, as the host computes with them.
struct SampleRow {
    double temperature;
    double top_p;
    double typical_p;
    double log_min_p;  // natural log of min-p, -infinity where it is off
    u64 seed;
    const int* bias_ids;
    const float* bias_values;  // -infinity bans
    float repeat_penalty;
    float presence_penalty;
    float frequency_penalty;
    int num_biases;
    int num_kept;      // top-k; the vocabulary's size where it is off
    int window;        // earlier tokens that penalties count
    int num_top;       // most likely tokens to tell; -1: no logprobs at all
};

struct SampleArgs {
    float* logits;            // f32 [rows][vocabulary]; logit biases stay in them
    const SampleRow* rows;    // [rows]
    int* tokens;              // int [rows]: receives the token
    int* positions;           // int [rows]: of the row that was computed, advanced by one
    int* recent;              // int [rows][recent_stride]: tokens by position, those in the window; the drawn one is added
    u32* counts;              // [rows][vocabulary], zero before and after
    float* saved;             // f32 [rows][vocabulary]: logits before penalties, where counted
    int* records;             // int [steps][rows][RECORD]
    int* step;                // int [rows]: the record to write next; advanced
    const float* sorted;      // f32 [rows][vocabulary], descending: where some row keeps too many to sort here
    const long long* sorted_ids;
    int vocabulary;
    int recent_stride;
};

struct Workspace {
    u64 keys[CAPACITY];  // candidates: (logit, lower id first), descending
    u32 bins[BINS];
    double sums[THREADS / 32];
    float largest[THREADS / 32], least[THREADS / 32];
    u32 counts[THREADS / 32];
    int broken;
    int found;
    u32 before;  // elements in bins before `found`
    int taken;
    int range[2];
};

DEVICE u32 ordered(float v) {
    const u32 bits = __float_as_uint(v + 0.f);  // one zero
    return bits ^ ((int)bits < 0 ? 0xffffffffu : 0x80000000u);
}
DEVICE u64 sort_key(float v, int id) { return (u64)ordered(v) << 32 | (u32)~id; }
DEVICE float key_value(u64 key) {
    const u32 k = (u32)(key >> 32);
    return __uint_as_float(k ^ ((int)k < 0 ? 0x80000000u : 0xffffffffu));
}
DEVICE int key_id(u64 key) { return (int)~(u32)key; }

template <class T>
DEVICE T warp_scan(T x) {
    for (int offset = 1; offset < 32; offset <<= 1) {
        const T y = __shfl_up_sync(FULL_WARP, x, offset);
        if (threadIdx.x % 32 >= offset) x += y;
    }
    return x;
}

// Inclusive sum over the block's threads, and the whole block's; in a fixed order.
template <class T>
DEVICE T block_scan(T x, T* scratch, T& total) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    x = warp_scan(x);
    if (lane == 31) scratch[warp] = x;
    __syncthreads();
    if (warp == 0) scratch[lane] = warp_scan(scratch[lane]);
    __syncthreads();
    if (warp) x += scratch[warp - 1];
    total = scratch[THREADS / 32 - 1];
    __syncthreads();
    return x;
}

// The sum of f(i) over [begin, end).
template <class F>
DEVICE double sum_over(int begin, int end, Workspace& w, F f) {
    double mine = 0, total;
    for (int i = begin + threadIdx.x; i < end; i += THREADS) mine += f(i);
    block_scan(mine, w.sums, total);
    return total;
}

// The first i of [begin, end) where the running sum of f reaches `target` (or goes beyond it); `end` if none does.
template <bool BEYOND, class F>
DEVICE int crossing(int begin, int end, double target, Workspace& w, F f) {
    double carried = 0;
    for (int start = begin; start < end; start += THREADS) {
        const int i = start + threadIdx.x;
        if (threadIdx.x == 0) w.found = end;
        double total;
        const double sum = carried + block_scan(i < end ? f(i) : 0.0, w.sums, total);
        if (i < end && (BEYOND ? sum > target : sum >= target)) atomicMin(&w.found, i);
        __syncthreads();
        const int found = w.found;
        __syncthreads();
        if (found < end) return found;
        carried += total;
    }
    return end;
}

// Adds biases, then lowers what the window holds already; what that changes is put by in `saved`.
DEVICE void adjust_row(const SampleArgs& args, const SampleRow& row, float* logits, u32* counts, float* saved) {
    for (int i = threadIdx.x; i < row.num_biases; i += THREADS) atomicAdd(logits + row.bias_ids[i], row.bias_values[i]);
    const int drawn_at = args.positions[blockIdx.x] + 1;
    const int window = min(row.window, drawn_at);
    const int* recent = args.recent + (u64)blockIdx.x * args.recent_stride + drawn_at - window;
    for (int i = threadIdx.x; i < window; i += THREADS) atomicAdd(counts + recent[i], 1u);
    __syncthreads();
    for (int i = threadIdx.x; i < window; i += THREADS) {
        const int id = recent[i];
        const u32 count = atomicOr(counts + id, OWNED);
        if (count & OWNED) continue;
        float v = saved[id] = logits[id];
        v = v > 0.f ? __fdiv_rn(v, row.repeat_penalty) : __fmul_rn(v, row.repeat_penalty);
        logits[id] = v - __fadd_rn(__fmul_rn((float)count, row.frequency_penalty), row.presence_penalty);
    }
    __syncthreads();
}

// Takes the penalties back, for what the full softmax says.
DEVICE void restore_row(const SampleArgs& args, const SampleRow& row, float* logits, u32* counts, const float* saved) {
    const int drawn_at = args.positions[blockIdx.x] + 1;
    const int window = min(row.window, drawn_at);
    const int* recent = args.recent + (u64)blockIdx.x * args.recent_stride + drawn_at - window;
    for (int i = threadIdx.x; i < window; i += THREADS)
        if (atomicExch(counts + recent[i], 0u)) logits[recent[i]] = saved[recent[i]];
    __syncthreads();
}

struct Extent {
    float largest, least;  // finite logits
    bool broken;           // NaN or +infinity among them
};

DEVICE Extent extent_of(const float* logits, int vocabulary, Workspace& w) {
    Extent e = {-infinity(), infinity(), false};
#pragma unroll 8
    for (int i = threadIdx.x; i < vocabulary; i += THREADS) {
        const float v = logits[i];
        e.broken |= !(v < infinity());
        e.largest = fmaxf(e.largest, v);
        if (v > -infinity()) e.least = fminf(e.least, v);
    }
    for (int offset = 16; offset > 0; offset >>= 1) {
        e.largest = fmaxf(e.largest, __shfl_xor_sync(FULL_WARP, e.largest, offset));
        e.least = fminf(e.least, __shfl_xor_sync(FULL_WARP, e.least, offset));
    }
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) w.broken = 0;
    if (threadIdx.x % 32 == 0) w.largest[warp] = e.largest, w.least[warp] = e.least;
    __syncthreads();
    if (e.broken) w.broken = 1;
    for (int i = 0; i < THREADS / 32; i++) {
        e.largest = fmaxf(e.largest, w.largest[i]);
        e.least = fminf(e.least, w.least[i]);
    }
    __syncthreads();
    e.broken = w.broken;
    __syncthreads();
    return e;
}

// The bin up to which at least `wanted` elements lie, and how many lie before it; the last bin if all are too few.
DEVICE void find_bin(u32 wanted, Workspace& w) {
    constexpr int EACH = BINS / THREADS;
    u32 mine = 0, total;
    for (int i = 0; i < EACH; i++) mine += w.bins[threadIdx.x * EACH + i];
    u32 before = block_scan(mine, w.counts, total) - mine;
    if (threadIdx.x == THREADS - 1) w.found = BINS - 1, w.before = total - w.bins[BINS - 1];
    __syncthreads();
    for (int i = 0; i < EACH; i++) {
        const u32 inside = w.bins[threadIdx.x * EACH + i];
        if (before < wanted && before + inside >= wanted) w.found = threadIdx.x * EACH + i, w.before = before;
        before += inside;
    }
    __syncthreads();
}

// Sorts the k largest logits into w.keys; returns how many there are: k, or all finite ones if they are fewer.
// k <= CAPACITY / 2. They are found by a histogram over the distance from the largest, then one over its bin.
DEVICE int collect_top(const float* logits, int vocabulary, int k, const Extent& extent, Workspace& w) {
    const float span = extent.largest - extent.least;
    const float scale = span > 0.f ? exp2f(floorf(log2f((float)BINS / span)) - 1.f) : 1.f;  // so that span * scale < BINS
    const auto distance = [&](float v) { return fminf((extent.largest - v) * scale, (float)BINS - 0.5f); };
    const auto clear = [&]() {
        for (int i = threadIdx.x; i < BINS; i += THREADS) w.bins[i] = 0;
        if (threadIdx.x == 0) w.taken = 0;
        __syncthreads();
    };
    clear();
#pragma unroll 8
    for (int i = threadIdx.x; i < vocabulary; i += THREADS) {
        const float v = logits[i];
        if (v > -infinity()) atomicAdd(w.bins + (int)distance(v), 1u);
    }
    __syncthreads();
    find_bin(k, w);
    const int bin = w.found;
    const u32 before = w.before, inside = w.bins[bin];
    __syncthreads();
    int fine_bin = BINS;  // of the bin, all
    if (before + inside > CAPACITY) {
        clear();
        for (int i = threadIdx.x; i < vocabulary; i += THREADS) {
            const float v = logits[i], d = distance(v);
            if (v > -infinity() && (int)d == bin) atomicAdd(w.bins + (int)((d - bin) * BINS), 1u);
        }
        __syncthreads();
        find_bin(k - before, w);
        fine_bin = w.found;
        const bool too_many = before + w.before + w.bins[fine_bin] > CAPACITY;
        __syncthreads();
        if (too_many) fine_bin -= 1;  // what lies in it is all but equal, and comes by id
    }
    const auto chosen = [&](float v, float d) {
        return v > -infinity() && ((int)d < bin || ((int)d == bin && (int)((d - bin) * BINS) <= fine_bin));
    };
    for (int i = threadIdx.x; i < CAPACITY; i += THREADS) w.keys[i] = 0;
    __syncthreads();
#pragma unroll 8
    for (int i = threadIdx.x; i < vocabulary; i += THREADS) {
        const float v = logits[i];
        if (chosen(v, distance(v))) w.keys[atomicAdd(&w.taken, 1)] = sort_key(v, i);
    }
    __syncthreads();
    int count = w.taken;
    if (fine_bin < BINS && count < k) {
        for (int start = 0; start < vocabulary && count < k; start += THREADS) {
            const int i = start + threadIdx.x;
            const float v = i < vocabulary ? logits[i] : -infinity(), d = distance(v);
            const bool in = v > -infinity() && (int)d == bin && (int)((d - bin) * BINS) == fine_bin + 1;
            u32 total;
            const int place = count + block_scan<u32>(in, w.counts, total) - 1;
            if (in && place < k) w.keys[place] = sort_key(v, i);
            count = min(k, count + (int)total);
        }
        __syncthreads();
    }
    int size = 32;
    while (size < count) size *= 2;
    for (int run = 2; run <= size; run *= 2)
        for (int gap = run / 2; gap > 0; gap /= 2) {
            for (int i = threadIdx.x; i < size / 2; i += THREADS) {
                const int low = (i / gap) * 2 * gap + i % gap, high = low + gap;
                const bool descending = (low & run) == 0;
                const u64 a = w.keys[low], b = w.keys[high];
                if ((a < b) == descending) w.keys[low] = b, w.keys[high] = a;
            }
            __syncthreads();
        }
    return min(k, count);
}

// SplitMix64's finaliser over seed and position (stage/sampler.py, uniform).
DEVICE u64 mix(u64 z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
DEVICE double uniform(u64 seed, u64 position) {
    const u64 state = mix(seed + 0x9E3779B97F4A7C15ull) + position * 0x9E3779B97F4A7C15ull;
    return (double)(mix(state) >> 11) * 1.1102230246251565e-16;  // 2^-53
}

// Locally typical tokens. `value` descends, so surprise ascends, and those nearest the entropy are a range.
template <class Value>
DEVICE void typical_range(int n, double typical_p, Workspace& w, Value value) {
    const double best = value(0);
    const double total = sum_over(0, n, w, [&](int i) { return exp(value(i) - best); });
    const double log_total = log(total);
    const auto surprise = [&](int i) { return log_total - (value(i) - best); };
    const double entropy = sum_over(0, n, w, [&](int i) {
        const double p = exp(value(i) - best) / total;
        return p > 0 ? p * surprise(i) : 0.0;
    });
    if (threadIdx.x == 0) {
        int low = 0, high = n;  // the first whose surprise reaches the entropy
        while (low < high) {
            const int middle = (low + high) / 2;
            if (surprise(middle) < entropy) low = middle + 1;
            else high = middle;
        }
        int begin = low, end = low;
        for (double mass = 0; mass <= typical_p && (begin > 0 || end < n);) {
            const bool down = end == n || (begin > 0 && entropy - surprise(begin - 1) <= surprise(end) - entropy);
            mass += exp(value(down ? begin - 1 : end) - best) / total;
            if (down) begin--;
            else end++;
        }
        w.range[0] = begin, w.range[1] = end;
    }
    __syncthreads();
}

// The place of the drawn token among n candidates, most likely first.
template <class Value>
DEVICE int draw(const SampleRow& row, int n, int position, Workspace& w, Value value) {
    int begin = 0, end = n;
    if (row.typical_p < 1.0) {
        typical_range(n, row.typical_p, w, value);
        begin = w.range[0], end = w.range[1];
        __syncthreads();
    }
    const double best = value(begin);
    const auto mass = [&](int i) { return exp(value(i) - best); };
    if (row.top_p < 1.0) {
        const double total = sum_over(begin, end, w, mass);
        end = min(end, crossing<false>(begin, end, row.top_p * total, w, mass) + 1);
    }
    const double least = best + row.log_min_p;
    if (least > -1e300) {
        // Values descend: the first below the bar ends it.
        const int below = crossing<true>(begin, end, 0.0, w, [&](int i) { return value(i) < least ? 1.0 : 0.0; });
        end = max(begin + 1, below);
    }
    const auto heated = [&](int i) { return exp((value(i) - best) / row.temperature); };
    const double total = sum_over(begin, end, w, heated);
    return min(end - 1, crossing<true>(begin, end, uniform(row.seed, position) * total, w, heated));
}

// Puts biases and penalties on the logits, where `sample<true>` follows a sort. Grid: rows.
__global__ void __launch_bounds__(THREADS) adjust(const __grid_constant__ SampleArgs args) {
    dependency_wait();
    const u64 at = (u64)blockIdx.x * args.vocabulary;
    const SampleRow row = args.rows[blockIdx.x];
    adjust_row(args, row, args.logits + at, args.counts + at, args.saved + at);
}

// Grid: rows. SORTED: logits were adjusted, and sorted as a whole; else no row keeps more than CAPACITY / 2.
template <bool SORTED>
__global__ void __launch_bounds__(THREADS) sample(const __grid_constant__ SampleArgs args) {
    __shared__ Workspace w;
    allow_dependents();
    dependency_wait();
    const int n = args.vocabulary;
    const u64 at = (u64)blockIdx.x * n;
    const SampleRow row = args.rows[blockIdx.x];
    const int position = args.positions[blockIdx.x] + 1;  // of the token to draw
    float* logits = args.logits + at;
    if (!SORTED) adjust_row(args, row, logits, args.counts + at, args.saved + at);
    const Extent extent = extent_of(logits, n, w);
    const bool is_greedy = row.temperature <= 0;
    int token = n;
    if (!extent.broken) {
        const int kept = is_greedy ? 1 : min(row.num_kept, n);
        if (SORTED) {
            const float* sorted = args.sorted + at;
            const int place = is_greedy ? 0 : draw(row, kept, position, w, [&](int i) { return (double)sorted[i]; });
            token = (int)args.sorted_ids[at + place];
        } else {
            const int count = collect_top(logits, n, kept, extent, w);
            const int place =
                is_greedy ? 0 : draw(row, count, position, w, [&](int i) { return (double)key_value(w.keys[i]); });
            token = key_id(w.keys[place]);
        }
    }
    __syncthreads();
    restore_row(args, row, logits, args.counts + at, args.saved + at);
    const int step = args.step[blockIdx.x];
    int* record = args.records + ((u64)step * gridDim.x + blockIdx.x) * RECORD;
    if (row.num_top >= 0 && token < n) {
        const Extent whole = extent_of(logits, n, w);
        const double total = sum_over(0, n, w, [&](int i) { return (double)expf(logits[i] - whole.largest); });
        const double log_total = log(total) + whole.largest;
        if (threadIdx.x == 0) record[1] = __float_as_int((float)(logits[token] - log_total));
        if (row.num_top > 0) {
            const int count = collect_top(logits, n, row.num_top, whole, w);
            if (threadIdx.x < row.num_top) {
                const bool there = threadIdx.x < count;
                record[2 + threadIdx.x] = there ? key_id(w.keys[threadIdx.x]) : -1;
                const double logprob = there ? key_value(w.keys[threadIdx.x]) - log_total : 0;
                record[2 + MAX_TOP + threadIdx.x] = __float_as_int((float)logprob);
            }
        }
    }
    if (threadIdx.x) return;
    record[0] = token;
    args.tokens[blockIdx.x] = token;
    args.positions[blockIdx.x] = position;
    args.step[blockIdx.x] = step + 1;
    // Steps issued ahead go on after broken logits: what they count must lie in the row (embed clamps likewise).
    const int counted = min(max(token, 0), n - 1);
    if (row.window && position < args.recent_stride) args.recent[(u64)blockIdx.x * args.recent_stride + position] = counted;
}
