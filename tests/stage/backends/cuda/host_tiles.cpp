// Runs the device code of types.cuh on the host: the same decoding, with the PTX it uses written in C++.
// A warp is 32 packets in a row; a shuffle reads the same member of another one.
#include <cstdint>
#include <cstring>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
#define DEVICE inline
struct uint4 { u32 x, y, z, w; };
struct uint2 { u32 x, y; };
constexpr u32 FULL_WARP = 0xffffffffu;

static _Float16 half_of(u32 v, int high) {
    const u16 bits = high ? v >> 16 : v & 0xffff;
    _Float16 h;
    memcpy(&h, &bits, 2);
    return h;
}
static u32 pack(_Float16 low, _Float16 high) {
    u16 a, b;
    memcpy(&a, &low, 2), memcpy(&b, &high, 2);
    return a | (u32)b << 16;
}
// Through double: a product of two f16 and a sum with a third are exact there, so that one rounding remains.
static u32 half2_fma(u32 a, u32 b, u32 c) {
    const auto one = [&](int i) { return (_Float16)((double)half_of(a, i) * (double)half_of(b, i) + (double)half_of(c, i)); };
    return pack(one(0), one(1));
}
static u32 half2_mul(u32 a, u32 b) { return half2_fma(a, b, 0x80008000u); }
static u32 half2_add(u32 a, u32 b) { return half2_fma(a, 0x3c003c00u, b); }
static u32 __byte_perm(u32 a, u32 b, u32 selector) {
    const u64 all = a | (u64)b << 32;
    u32 out = 0;
    for (int i = 0; i < 4; i++) out |= (u32)((all >> (8 * ((selector >> (4 * i)) & 7))) & 0xff) << (8 * i);
    return out;
}
static u32 both_low(u32 v) { return __byte_perm(v, v, 0x1010); }
static u32 both_high(u32 v) { return __byte_perm(v, v, 0x3232); }
static u32 half2_power(int n) { return (u32)(n + 15) * 0x04000400u; }
template <class T> static T read(const void* p) { T r; memcpy(&r, p, sizeof r); return r; }
static uint4 load_stream(const void* p) { return read<uint4>(p); }
static uint2 load_stream2(const void* p) { return read<uint2>(p); }
static u32 load_stream1(const void* p) { return read<u32>(p); }
static u32 load_stream_half(const void* p) { return read<u16>(p); }
static u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

static int this_lane;
static size_t packet_bytes;
static u32 __shfl_sync(u32, const u32& mine, int from, int width) {
    const int other = this_lane / width * width + from;
    return read<u32>((const char*)&mine + (std::ptrdiff_t)(other - this_lane) * (std::ptrdiff_t)packet_bytes);
}

#include TYPES

template <class Type>
static void decode(const u8* tile, int exponent, float inverse, float* out) {
    Type packets[32];
    packet_bytes = sizeof(Type);
    for (this_lane = 0; this_lane < 32; this_lane++) {
        packets[this_lane].load(tile, this_lane);
        packets[this_lane].prepare(exponent, this_lane);
    }
    for (this_lane = 0; this_lane < 32; this_lane++) {
        const int g = this_lane / 4, t = this_lane % 4;
        for (int i = 0; i < 4; i++) {
            Fragments a;
            packets[this_lane].fragments(i, this_lane, a);
            for (int parity = 0; parity < 2; parity++)
                for (int step = 0; step < 2; step++)
                    for (int r = 0; r < 4; r++)
                        for (int e = 0; e < 2; e++) {
                            const int row = g + 8 * (r & 1), column = 64 * i + 32 * parity + 8 * t + 4 * step + 2 * (r >> 1) + e;
                            out[row * 256 + column] = (float)half_of(a[parity][step][r], e) * inverse;
                        }
        }
    }
}

extern "C" int decode_tile(const char* type, const u8* tile, int exponent, float inverse, float* out) {
#define TYPE(name) if (!strcmp(type, #name)) return decode<name>(tile, exponent, inverse, out), name::BYTES
    TYPE(Q4_0); TYPE(Q4_1); TYPE(Q5_0); TYPE(Q5_1); TYPE(Q8_0); TYPE(Q2_K); TYPE(Q3_K); TYPE(Q4_K); TYPE(Q5_K);
    TYPE(Q6_K); TYPE(IQ4_NL); TYPE(IQ4_XS); TYPE(MXFP4); TYPE(F16);
    return 0;
}
