// The file's rows to tiles, on the GPU: each field of a tile is fetched from where the map says (tile_map.py); what has
// no map, F32 and BF16, becomes f16.
#include "common.cuh"

struct RepackArgs {
    const u8* sources[3];  // matrices one above the other, or (interleaved) two that take turns by 8 rows
    u64 expert_bytes[3];   // from one expert's matrix to the next
    int row_ends[3];       // rows up to each source's last
    int interleaved;
    int rows;              // of all sources, an expert
    int row_bytes;         // as stored: what is missing to whole tiles is zero
    int unit;              // 16, 4 or 1: bytes read at once, which divides addresses and row_bytes
    int tile_row_bytes;    // of a row's 256 columns as stored
    int chunk_tiles;       // columns of tiles a block repacks
    int column_tiles;
    int tile_words;
    float factor;          // of `convert`: a power of two that values are multiplied by
    const u32* fields;     // [tile_words][32 / FIELD]: bit in the chunk's 16 rows, one behind the other
    const u32* flips;      // [tile_words]
    u8* tiles;             // [experts][row tiles][column_tiles][tile_words * 4]
};

DEVICE const u8* source_row(const RepackArgs& args, int row, u64 expert) {
    int source = 0, first = 0;
    if (args.interleaved) {
        source = row / 8 % 2;
        row = row / 16 * 8 + row % 8;
    } else {
        while (row >= args.row_ends[source]) first = args.row_ends[source++];
    }
    return args.sources[source] + expert * args.expert_bytes[source] + (u64)(row - first) * args.row_bytes;
}

template <class Unit>
DEVICE void load_chunk(const RepackArgs& args, u8* chunk) {
    const int chunk_row_bytes = args.chunk_tiles * args.tile_row_bytes, first = blockIdx.x * chunk_row_bytes;
    const int units = chunk_row_bytes / (int)sizeof(Unit), stored = (args.row_bytes - first) / (int)sizeof(Unit);
    for (int i = threadIdx.x; i < 16 * units; i += blockDim.x) {
        const int row = blockIdx.y * 16 + i / units, at = i % units;
        Unit value = {};
        if (row < args.rows && at < stored)
            value = ((const Unit*)(source_row(args, row, blockIdx.z) + first))[at];
        ((Unit*)chunk)[i] = value;
    }
}

// Grid: (chunks of columns, row tiles, experts). Shared memory: 16 rows of a chunk.
template <int FIELD>
__global__ void __launch_bounds__(256) repack(const __grid_constant__ RepackArgs args) {
    extern __shared__ uint4 shared[];
    u8* chunk = (u8*)shared;
    allow_dependents();
    dependency_wait();
    if (args.unit == 16)
        load_chunk<uint4>(args, chunk);
    else if (args.unit == 4)
        load_chunk<u32>(args, chunk);
    else
        load_chunk<u8>(args, chunk);
    __syncthreads();
    const int first = blockIdx.x * args.chunk_tiles, tiles = min(args.chunk_tiles, args.column_tiles - first);
    const u64 tile = ((u64)blockIdx.z * gridDim.y + blockIdx.y) * args.column_tiles + first;
    u32* out = (u32*)args.tiles + tile * args.tile_words;
    for (int w = threadIdx.x; w < args.tile_words; w += blockDim.x) {
        u32 fields[32 / FIELD];
#pragma unroll
        for (int k = 0; k < 32 / FIELD; k++) fields[k] = args.fields[w * (32 / FIELD) + k];
        const u32 flip = args.flips[w];
        for (int t = 0; t < tiles; t++) {
            const u8* raw = chunk + t * args.tile_row_bytes;
            u32 packed = flip;
#pragma unroll
            for (int k = 0; k < 32 / FIELD; k++)
                packed ^= ((u32)raw[fields[k] >> 3] >> (fields[k] & 7) & ((1u << FIELD) - 1)) << k * FIELD;
            out[t * args.tile_words + w] = packed;
        }
    }
}

// Words of a row from `from` on, of which `stored` bytes exist: what is missing is zero.
template <class Unit, int WORDS>
DEVICE void load_words(const u8* from, int stored, u32 (&words)[WORDS]) {
#pragma unroll
    for (int i = 0; i < WORDS * 4 / (int)sizeof(Unit); i++) {
        Unit value = {};
        if (i * (int)sizeof(Unit) < stored) value = ((const Unit*)from)[i];
        ((Unit*)words)[i] = value;
    }
}

// Grid: (column tiles, row tiles, experts). BYTES: of an element, 4 for F32, 2 for BF16. Each thread makes 16 bytes of a
// tile, [32 columns][upper][g][t]: 8 neighbouring values of a row, rounded once.
template <int BYTES>
__global__ void __launch_bounds__(256) convert(const __grid_constant__ RepackArgs args) {
    dependency_wait();
    allow_dependents();
    const u64 tile = ((u64)blockIdx.z * gridDim.y + blockIdx.y) * args.column_tiles + blockIdx.x;
    uint4* out = (uint4*)args.tiles + tile * 512;
    for (int i = threadIdx.x; i < 512; i += blockDim.x) {
        const int row = blockIdx.y * 16 + i / 4 % 16, at = (blockIdx.x * 256 + i / 64 * 32 + i % 4 * 8) * BYTES;
        alignas(16) u32 words[2 * BYTES] = {};
        if (row < args.rows && at < args.row_bytes) {
            const u8* from = source_row(args, row, blockIdx.z) + at;
            const int stored = args.row_bytes - at;
            if (args.unit == 16)
                load_words<uint4>(from, stored, words);
            else if (args.unit == 4)
                load_words<u32>(from, stored, words);
            else
                load_words<u8>(from, stored, words);
        }
        u32 packed[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const u32 low = BYTES == 4 ? words[2 * k % (2 * BYTES)] : words[k] << 16;
            const u32 high = BYTES == 4 ? words[(2 * k + 1) % (2 * BYTES)] : words[k] & 0xffff0000u;
            packed[k] = half2_pack(__uint_as_float(low) * args.factor, __uint_as_float(high) * args.factor);
        }
        out[i] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
}
