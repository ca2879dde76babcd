// How each weight type lies in a tile, and how a warp turns a tile into matrix fragments.
//
// A tile is 16 rows by 256 columns in BYTES contiguous bytes, made of planes (quants, high bits, scales)
// that a warp reads with 16-byte loads; `repack.py` writes it. Lane 4g + t owns, of each sub-block j of
// 32 columns, columns 8t..8t+7 of rows g and g + 8. With that share of the columns a row of activations is
// read in its natural order: the lane's matrix operand is 16 contiguous bytes.
//
// A quant q stays an integer in the low bits of an f16, which reads as the subnormal q 2^-24; one fma
// with the scale (times 2^exponent) and the offset makes it a weight. The product is exact and the sum is
// rounded once. `exponent` is chosen a tensor so that its largest scale lands just under 2^15; the kernel
// multiplies its sums by `inverse`, a power of two, to undo it.
//
// One row of x alone goes another way where the type has SINGLE: the integers themselves meet it (integers(i, a)), each
// sub-block in a column of its own, and scale and offset are applied to the sums: lane 4g + t to those of sub-blocks
// 2t and 2t + 1 (single(parity, upper): the pair (scale, offset)).
//
// A Packet has: load(tile, lane); prepare(exponent, lane), the scales; fragments(i, lane, a): sub-blocks 2i and
// 2i + 1 as a[parity][step][4], operands of four mma's.
#pragma once
#include "common.cuh"

typedef u32 Fragments[2][2][4];

// x = (s, m): s as pair (s, s).
struct Scale {
    u32 s, m;
};

DEVICE u32 scale_power(u32 x, int exponent) {  // x 2^exponent, beyond what one f16 factor can hold
    const int half = exponent / 2;
    return half2_mul(half2_mul(x, half2_power(half)), half2_power(exponent - half));
}

// Four signed or unsigned bytes as two f16 pairs: (0, 1) and (2, 3), less `bias` (an f16 pair of -(1024 + bias)).
DEVICE void bytes_to_halves(u32 v, u32 minus, u32& low, u32& high) {
    low = half2_add(__byte_perm(v, 0x64646464u, 0x4140), minus);
    high = half2_add(__byte_perm(v, 0x64646464u, 0x4342), minus);
}
constexpr u32 MINUS_1024 = 0xe400e400u, MINUS_1152 = 0xe480e480u;

// ---- quants -------------------------------------------------------------------------------------------
// Nibbles (4 bits), pairs (2 bits) and singles (1 bit) of a quant, put together at the bit where it starts:
// FROM = 0 or, where there are no nibbles, 4. In a word the even sub-block's quant sits there and the odd
// one's 4 bits higher, so that one mask takes each.
template <bool NIBBLES, bool PAIRS, bool SINGLES>
struct Quants {
    static constexpr int NIBBLE_BYTES = NIBBLES ? 2048 : 0, PAIR_BYTES = PAIRS ? 1024 : 0;
    static constexpr int BYTES = NIBBLE_BYTES + PAIR_BYTES + (SINGLES ? 512 : 0);
    static constexpr int SINGLE_BIT = NIBBLES ? (PAIRS ? 6 : 4) : 6;
    uint4 nibbles[NIBBLES ? 4 : 1], pairs[PAIRS ? 2 : 1], singles;

    DEVICE void load(const u8* tile, int lane) {
        const u8* from = tile + lane * 16;  // one address; the rest are constants in the loads
        if (NIBBLES) {
#pragma unroll
            for (int i = 0; i < 4; i++) nibbles[i] = load_stream(from + i * 512);
        }
        if (PAIRS) {
#pragma unroll
            for (int i = 0; i < 2; i++) pairs[i] = load_stream(from + (NIBBLE_BYTES + i * 512));
        }
        if (SINGLES) singles = load_stream(from + (NIBBLE_BYTES + PAIR_BYTES));
    }
    // Columns 4 step + 2 p, + 1 of row g + 8 upper: `even` of sub-block 2i and `odd` (16 times larger) of 2i + 1.
    DEVICE void extract(int i, int upper, int step, int p, u32& even, u32& odd) const {
        even = odd = 0;
        if (NIBBLES) {
            const u32 v = word(nibbles[i], step * 2 + upper) >> (8 * p);
            even = v & 0x000f000fu;
            odd = v & 0x00f000f0u;
        }
        if (PAIRS) {
            const u32 h = word(pairs[i >> 1], upper + 2 * (i & 1));
            const int n = step * 2 + p;
            const u32 v = n == 0 ? h << 4 : n == 1 ? h << 2 : n == 2 ? h >> 4 : h >> 6;
            even |= v & 0x00300030u;
            odd |= v & 0x03000300u;
        }
        if (SINGLES) {
            const u32 h = word(singles, i);
            const int n = upper * 4 + step * 2 + p;
            const int left = n < 4 ? SINGLE_BIT - n : SINGLE_BIT - 4 - n;
            const u32 v = left >= 0 ? h << (left & 31) : h >> (-left & 31);
            even |= v & (0x00010001u << SINGLE_BIT);
            odd |= v & (0x00100010u << SINGLE_BIT);
        }
    }
    DEVICE void integers(int i, Fragments& a) const {
#pragma unroll
        for (int upper = 0; upper < 2; upper++)
#pragma unroll
            for (int step = 0; step < 2; step++)
#pragma unroll
                for (int p = 0; p < 2; p++)
                    extract(i, upper, step, p, a[0][step][2 * p + upper], a[1][step][2 * p + upper]);
    }
    template <class Scales>
    DEVICE void fragments(int i, int lane, const Scales& scales, Fragments& a) const {
#pragma unroll
        for (int upper = 0; upper < 2; upper++) {
            const Scale even_scale = scales.get(i, 0, upper, lane), odd_scale = scales.get(i, 1, upper, lane);
#pragma unroll
            for (int step = 0; step < 2; step++) {
#pragma unroll
                for (int p = 0; p < 2; p++) {
                    u32 even, odd;
                    extract(i, upper, step, p, even, odd);
                    a[0][step][2 * p + upper] = half2_fma(even, even_scale.s, even_scale.m);
                    a[1][step][2 * p + upper] = half2_fma(odd, odd_scale.s, odd_scale.m);
                }
            }
        }
    }
};

// ---- scales -------------------------------------------------------------------------------------------
// Each gives get(i, parity, upper, lane): scale and offset of sub-block 2i + parity in row g + 8 upper, the odd
// one's scale divided by 16 where ODD_SHIFT says that odd quants come 16 times too large.

// w = d (q - ZERO), d an f16 for 32 columns. Plane: [upper][g][8 sub-blocks] f16.
template <int ZERO, bool ODD_SHIFT>
struct BlockScales {
    static constexpr int BYTES = 256;
    static constexpr bool SINGLE = false;
    uint4 d[2];
    DEVICE void load(const u8* p, int lane) {
        const u8* from = p + (lane >> 2) * 16;
        d[0] = load_stream(from);
        d[1] = load_stream(from + 128);
    }
    DEVICE void prepare(int exponent, int) {
        const u32 first = half2_power(exponent / 2);
        const u32 second = half2_mul(half2_power(exponent - exponent / 2), ODD_SHIFT ? 0x2c003c00u : 0x3c003c00u);
#pragma unroll
        for (int upper = 0; upper < 2; upper++) {
            d[upper].x = half2_mul(half2_mul(d[upper].x, first), second);
            d[upper].y = half2_mul(half2_mul(d[upper].y, first), second);
            d[upper].z = half2_mul(half2_mul(d[upper].z, first), second);
            d[upper].w = half2_mul(half2_mul(d[upper].w, first), second);
        }
    }
    DEVICE Scale get(int i, int parity, int upper, int) const {
        const u32 pair = word(d[upper], i), s = parity ? both_high(pair) : both_low(pair);
        // -ZERO 2^-24, and 16 times that where the scale was divided by 16: exact subnormals.
        const u32 minus_zero = 0x80008000u + (u32)(ZERO * (parity && ODD_SHIFT ? 16 : 1)) * 0x00010001u;
        return {s, half2_mul(s, minus_zero)};
    }
};

// w = d q + m, f16 (d, m) for 32 columns. Plane: [half][upper][g][4 sub-blocks] (d, m).
struct BlockScalesOffsets {
    static constexpr int BYTES = 512;
    static constexpr bool SINGLE = false;
    uint4 dm[2][2];
    DEVICE void load(const u8* p, int lane) {
        const u8* from = p + (lane >> 2) * 16;
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int upper = 0; upper < 2; upper++) dm[half][upper] = load_stream(from + (half * 256 + upper * 128));
        }
    }
    u32 even_first, even_second, odd_second;
    DEVICE void prepare(int exponent, int) {
        const int offset = exponent - 24;  // offsets are weights: no 2^-24 of a subnormal to make up for
        even_first = (half2_power(exponent / 2) & 0xffffu) | (half2_power(offset / 2) & 0xffff0000u);
        even_second = (half2_power(exponent - exponent / 2) & 0xffffu) |
                      (half2_power(offset - offset / 2) & 0xffff0000u);
        odd_second = half2_mul(even_second, 0x3c002c00u);
    }
    DEVICE Scale get(int i, int parity, int upper, int) const {
        const u32 raw = word(dm[i >> 1][upper], 2 * (i & 1) + parity);
        const u32 pair = half2_mul(half2_mul(raw, even_first), parity ? odd_second : even_second);
        return {both_low(pair), both_high(pair)};
    }
};

// Q4_K, Q5_K: w = d sc q - dmin m with 6-bit sc and m for 32 columns. A lane unpacks those of sub-blocks 2t, 2t + 1
// of its two rows, and the four lanes of a row hand them to one another.
// Planes: low [lane] u32 (nibbles: sc of the four in the low half, m in the high one); high [lane] u16 (2 bits each);
// d [g] (d, dmin of row g, d, dmin of row g + 8).
struct SuperScalesOffsets {
    static constexpr int BYTES = 256;
    static constexpr bool SINGLE = true;
    u32 low, high, mine[2][2];
    uint2 d;
    DEVICE void load(const u8* p, int lane) {
        low = load_stream1(p + lane * 4);
        high = load_stream_half(p + 128 + lane * 2);
        d = load_stream2(p + 192 + (lane >> 2) * 8);
    }
    DEVICE void prepare(int exponent, int) {
        const u32 bits = __byte_perm(high, 0, 0x4140);  // the byte of sc in the low half, that of m in the high one
        // dmin m is formed 2^8 too large, so that dmin alone stays a normal f16, and brought down at the end.
        const int offset = exponent - 24 + 8;
        const u32 first = (half2_power(exponent / 2) & 0xffffu) | (half2_power(offset / 2) & 0xffff0000u);
        const u32 second = (half2_power(exponent - exponent / 2) & 0xffffu) |
                           (half2_power(offset - offset / 2) & 0xffff0000u);
#pragma unroll
        for (int upper = 0; upper < 2; upper++) {
            const u32 even_d = half2_mul(half2_mul(upper ? d.y : d.x, first), second);
            const u32 odd_d = half2_mul(even_d, 0x3c002c00u);  // (1/16, 1)
#pragma unroll
            for (int parity = 0; parity < 2; parity++) {
                const int k = upper * 2 + parity;
                const u32 q = ((low >> (4 * k)) & 0x000f000fu) |
                              ((k < 2 ? bits << (4 - 2 * k) : bits >> (2 * k - 4)) & 0x00300030u) | 0x64006400u;
                const u32 pair = half2_mul(half2_add(q, MINUS_1024), parity ? odd_d : even_d);
                mine[parity][upper] = half2_mul(pair, 0x9c003c00u);  // (1, -2^-8)
            }
        }
    }
    DEVICE u32 single(int parity, int upper) const { return mine[parity][upper]; }
    DEVICE Scale get(int i, int parity, int upper, int) const {
        const u32 pair = __shfl_sync(FULL_WARP, mine[parity][upper], i, 4);
        return {both_low(pair), both_high(pair)};
    }
};

// w = d sc (q - ZERO), sc a signed byte for 16 columns. Planes: [g][t / 2][upper][8 sub-blocks] i8; d [g] f16 of
// rows g, g + 8.
template <int ZERO>
struct SuperScales {
    static constexpr bool SINGLE = false;
    static constexpr int BYTES = 288;
    uint4 sc;
    u32 d, s[2][4];
    DEVICE void load(const u8* p, int lane) {
        sc = load_stream(p + (lane >> 1) * 16);
        d = load_stream1(p + 256 + (lane >> 2) * 4);
    }
    DEVICE void prepare(int exponent, int) {
        const u32 scaled = scale_power(d, exponent);
#pragma unroll
        for (int upper = 0; upper < 2; upper++) {
            // Odd sub-blocks' quants come 16 times too large.
            const u32 factor = half2_mul(upper ? both_high(scaled) : both_low(scaled), 0x2c003c00u);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                bytes_to_halves(word(sc, upper * 2 + k) ^ 0x80808080u, MINUS_1152, s[upper][2 * k], s[upper][2 * k + 1]);
                s[upper][2 * k] = half2_mul(s[upper][2 * k], factor);
                s[upper][2 * k + 1] = half2_mul(s[upper][2 * k + 1], factor);
            }
        }
    }
    DEVICE Scale get(int i, int parity, int upper, int) const {
        const u32 scale = parity ? both_high(s[upper][i]) : both_low(s[upper][i]);
        return {scale, half2_mul(scale, 0x80008000u + (u32)(ZERO * (parity ? 16 : 1)) * 0x00010001u)};
    }
};

// Q2_K: w = d sc q - dmin m, 4-bit sc (low) and m (high) for 16 columns. Planes: [g][t / 2][upper][8 sub-blocks] u8;
// d [g] (d, dmin of row g, d, dmin of row g + 8).
struct SuperNibbleScales {
    static constexpr bool SINGLE = false;
    static constexpr int BYTES = 320;
    uint4 both;
    uint2 d;
    u32 s[2][4], m[2][4];
    DEVICE void load(const u8* p, int lane) {
        both = load_stream(p + (lane >> 1) * 16);
        d = load_stream2(p + 256 + (lane >> 2) * 8);
    }
    DEVICE void prepare(int exponent, int) {
#pragma unroll
        for (int upper = 0; upper < 2; upper++) {
            const u32 raw = upper ? d.y : d.x;
            const u32 factor = half2_mul(scale_power(both_low(raw), exponent), 0x2c003c00u);
            const u32 offset = scale_power(both_high(raw), exponent - 20);  // quants start at bit 4: 2^-20
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const u32 v = word(both, upper * 2 + k);
                u32 low, high;
                bytes_to_halves(v & 0x0f0f0f0fu, MINUS_1024, low, high);
                s[upper][2 * k] = half2_mul(low, factor);
                s[upper][2 * k + 1] = half2_mul(high, factor);
                bytes_to_halves((v >> 4) & 0x0f0f0f0fu, MINUS_1024, low, high);
                m[upper][2 * k] = half2_mul(low, offset) ^ 0x80008000u;
                m[upper][2 * k + 1] = half2_mul(high, offset) ^ 0x80008000u;
            }
        }
    }
    DEVICE Scale get(int i, int parity, int upper, int) const {
        return parity ? Scale{both_high(s[upper][i]), both_high(m[upper][i])}
                      : Scale{both_low(s[upper][i]), both_low(m[upper][i])};
    }
};

// IQ4_XS: d sc, sc a signed byte for 32 columns. Planes: [g][upper][8 sub-blocks] i8; d [g] f16 of rows g, g + 8.
struct SuperScales32 {
    static constexpr bool SINGLE = false;
    static constexpr int BYTES = 160;
    uint4 sc;
    u32 d, s[2][4];
    DEVICE void load(const u8* p, int lane) {
        sc = load_stream(p + (lane >> 2) * 16);
        d = load_stream1(p + 128 + (lane >> 2) * 4);
    }
    DEVICE void prepare(int exponent, int) {
        const u32 scaled = scale_power(d, exponent);
#pragma unroll
        for (int upper = 0; upper < 2; upper++) {
            const u32 factor = upper ? both_high(scaled) : both_low(scaled);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                bytes_to_halves(word(sc, upper * 2 + k) ^ 0x80808080u, MINUS_1152, s[upper][2 * k], s[upper][2 * k + 1]);
                s[upper][2 * k] = half2_mul(s[upper][2 * k], factor);
                s[upper][2 * k + 1] = half2_mul(s[upper][2 * k + 1], factor);
            }
        }
    }
    DEVICE Scale get(int i, int parity, int upper, int) const {
        const u32 scale = parity ? both_high(s[upper][i]) : both_low(s[upper][i]);
        return {scale, half2_mul(scale, 0x80808080u)};  // -128 2^-24
    }
};

// MXFP4: a power of two for 32 columns, 2^(e - 128) with the table's doubled values. Plane: [g][upper][8 sub-blocks] u8.
struct ExponentScales {
    static constexpr bool SINGLE = false;
    static constexpr int BYTES = 128;
    uint4 e;
    int exponent;
    DEVICE void load(const u8* p, int lane) { e = load_stream(p + (lane >> 2) * 16); }
    DEVICE void prepare(int exponent_, int) { exponent = exponent_; }
    DEVICE Scale get(int i, int parity, int upper, int) const {
        const int j = 2 * i + parity;
        const int raised = (int)((word(e, upper * 2 + (j >> 2)) >> (8 * (j & 3))) & 0xff) - 128 + exponent;
        // Subnormal and zero below 2^-14; the tensor's exponent keeps the top at 2^15.
        const u32 h = raised >= -14 ? (u32)(raised + 15) << 10 : raised >= -24 ? 1u << (raised + 24) : 0u;
        const u32 scale = h * 0x00010001u;
        return {scale, half2_mul(scale, 0x80808080u)};
    }
};

// ---- types --------------------------------------------------------------------------------------------
template <class Q, class S>
struct Composed {
    static constexpr int BYTES = Q::BYTES + S::BYTES;
    static constexpr bool SINGLE = S::SINGLE;
    Q quants;
    S scales;
    DEVICE void load(const u8* tile, int lane) {
        quants.load(tile, lane);
        scales.load(tile + Q::BYTES, lane);
    }
    DEVICE void prepare(int exponent, int lane) { scales.prepare(exponent, lane); }
    DEVICE void fragments(int i, int lane, Fragments& a) const { quants.fragments(i, lane, scales, a); }
};

// Whole bytes, 128 more than they mean. Plane: [sub-block][lane] 16 bytes.
struct Bytes {
    static constexpr int BYTES = 4096;
    uint4 q[8];
    DEVICE void load(const u8* tile, int lane) {
#pragma unroll
        for (int j = 0; j < 8; j++) q[j] = load_stream(tile + lane * 16 + j * 512);
    }
    template <class Scales>
    DEVICE void fragments(int i, int lane, const Scales& scales, Fragments& a) const {
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
#pragma unroll
            for (int upper = 0; upper < 2; upper++) {
                const Scale scale = scales.get(i, parity, upper, lane);
#pragma unroll
                for (int step = 0; step < 2; step++) {
                    const u32 v = word(q[2 * i + parity], step * 2 + upper);
                    a[parity][step][upper] = half2_fma(v & 0x00ff00ffu, scale.s, scale.m);
                    a[parity][step][2 + upper] = half2_fma((v >> 8) & 0x00ff00ffu, scale.s, scale.m);
                }
            }
        }
    }
};

// Nibbles that index a table of 16 bytes (128 more than they mean). A word holds four indices of the even
// sub-block, then four of the odd one.
template <u32 T0, u32 T1, u32 T2, u32 T3>
struct Indices {
    static constexpr int BYTES = 2048;
    uint4 q[4];
    DEVICE void load(const u8* tile, int lane) {
#pragma unroll
        for (int i = 0; i < 4; i++) q[i] = load_stream(tile + lane * 16 + i * 512);
    }
    DEVICE static u32 look_up(u32 four) {
        const u32 low = __byte_perm(T0, T1, four & 0x7777u), high = __byte_perm(T2, T3, four & 0x7777u);
        return __byte_perm(low, high, 0x3210u | ((four & 0x8888u) >> 1));
    }
    template <class Scales>
    DEVICE void fragments(int i, int lane, const Scales& scales, Fragments& a) const {
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
#pragma unroll
            for (int upper = 0; upper < 2; upper++) {
                const Scale scale = scales.get(i, parity, upper, lane);
#pragma unroll
                for (int step = 0; step < 2; step++) {
                    const u32 v = look_up((word(q[i], step * 2 + upper) >> (16 * parity)) & 0xffffu);
                    a[parity][step][upper] = half2_fma(v & 0x00ff00ffu, scale.s, scale.m);
                    a[parity][step][2 + upper] = half2_fma((v >> 8) & 0x00ff00ffu, scale.s, scale.m);
                }
            }
        }
    }
};

// f16 weights (also F32 and BF16 files, rounded to f16 after the tensor's power of two). Plane: [sub-block][upper][lane]
// 16 bytes. Too large to hold in registers whole: loaded as fragments are asked for.
struct F16 {
    static constexpr int BYTES = 8192;
    static constexpr bool SINGLE = false;
    const u8* from;
    DEVICE void load(const u8* tile, int lane) { from = tile + lane * 16; }
    DEVICE void prepare(int, int) {}
    DEVICE void fragments(int i, int, Fragments& a) const {
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
#pragma unroll
            for (int upper = 0; upper < 2; upper++) {
                const uint4 v = load_stream(from + ((2 * i + parity) * 1024 + upper * 512));
                a[parity][0][upper] = v.x;
                a[parity][0][2 + upper] = v.y;
                a[parity][1][upper] = v.z;
                a[parity][1][2 + upper] = v.w;
            }
        }
    }
};

typedef Composed<Quants<true, false, false>, BlockScales<8, true>> Q4_0;
typedef Composed<Quants<true, false, false>, BlockScalesOffsets> Q4_1;
typedef Composed<Quants<true, false, true>, BlockScales<16, true>> Q5_0;
typedef Composed<Quants<true, false, true>, BlockScalesOffsets> Q5_1;
typedef Composed<Bytes, BlockScales<128, false>> Q8_0;
typedef Composed<Quants<false, true, false>, SuperNibbleScales> Q2_K;
typedef Composed<Quants<false, true, true>, SuperScales<64>> Q3_K;  // 4, at bit 4
typedef Composed<Quants<true, false, false>, SuperScalesOffsets> Q4_K;
typedef Composed<Quants<true, false, true>, SuperScalesOffsets> Q5_K;
typedef Composed<Quants<true, true, false>, SuperScales<32>> Q6_K;
// -127 -104 -83 -65 | -49 -35 -22 -10 | 1 13 25 38 | 53 69 89 113, each + 128, the first in the low byte.
typedef Indices<0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u> Iq4Indices;
typedef Composed<Iq4Indices, BlockScales<128, false>> IQ4_NL;
typedef Composed<Iq4Indices, SuperScales32> IQ4_XS;
// 0 1 2 3 | 4 6 8 12 | 0 -1 -2 -3 | -4 -6 -8 -12, each + 128.
typedef Composed<Indices<0x83828180u, 0x8c888684u, 0x7d7e7f80u, 0x74787a7cu>, ExponentScales> MXFP4;
