// Hopper's warpgroup products (compiled for sm_90a alone): four warps multiply fragments that are in their registers by a
// matrix in shared memory, and go on while that runs.
#pragma once
#include "common.cuh"

// b[16 x N] as it lies at a shared address: core matrices of 8 rows of N by 16 bytes of K, 128 contiguous bytes each, the
// next along N 128 bytes further, the next along K `k_stride` bytes further. (In a cluster an address has the block's
// rank in its upper bits, which do not belong here.)
DEVICE u64 matrix_at(u32 address, u32 k_stride) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(k_stride >> 4) << 16 | (u64)(128 >> 4) << 32;
}

#define WARPGROUP_FOUR(c) "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
#define WARPGROUP_A(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
// c[64 x N] += a[64 x 16] b[16 x N]: a as four warps' fragments of mma(), `b`: a matrix_at(), plus bytes / 16.
// Fragments must not change before warpgroup_wait().
DEVICE void warpgroup_mma(float (&c)[2][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7},"
        "{%8,%9,%10,%11}, %12, p, 1, 1, 0;\n}"
        : WARPGROUP_FOUR(c[0]), WARPGROUP_FOUR(c[1])
        : WARPGROUP_A(a), "l"(b));
}
DEVICE void warpgroup_mma(float (&c)[4][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},"
        "{%16,%17,%18,%19}, %20, p, 1, 1, 0;\n}"
        : WARPGROUP_FOUR(c[0]), WARPGROUP_FOUR(c[1]), WARPGROUP_FOUR(c[2]), WARPGROUP_FOUR(c[3])
        : WARPGROUP_A(a), "l"(b));
}
DEVICE void warpgroup_mma(float (&c)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
        "{%32,%33,%34,%35}, %36, p, 1, 1, 0;\n}"
        : WARPGROUP_FOUR(c[0]), WARPGROUP_FOUR(c[1]), WARPGROUP_FOUR(c[2]), WARPGROUP_FOUR(c[3]),
          WARPGROUP_FOUR(c[4]), WARPGROUP_FOUR(c[5]), WARPGROUP_FOUR(c[6]), WARPGROUP_FOUR(c[7])
        : WARPGROUP_A(a), "l"(b));
}
DEVICE void warpgroup_mma(float (&c)[12][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47},"
        "{%48,%49,%50,%51}, %52, p, 1, 1, 0;\n}"
        : WARPGROUP_FOUR(c[0]), WARPGROUP_FOUR(c[1]), WARPGROUP_FOUR(c[2]), WARPGROUP_FOUR(c[3]),
          WARPGROUP_FOUR(c[4]), WARPGROUP_FOUR(c[5]), WARPGROUP_FOUR(c[6]), WARPGROUP_FOUR(c[7]),
          WARPGROUP_FOUR(c[8]), WARPGROUP_FOUR(c[9]), WARPGROUP_FOUR(c[10]), WARPGROUP_FOUR(c[11])
        : WARPGROUP_A(a), "l"(b));
}
DEVICE void warpgroup_mma(float (&c)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
        "{%64,%65,%66,%67}, %68, p, 1, 1, 0;\n}"
        : WARPGROUP_FOUR(c[0]), WARPGROUP_FOUR(c[1]), WARPGROUP_FOUR(c[2]), WARPGROUP_FOUR(c[3]),
          WARPGROUP_FOUR(c[4]), WARPGROUP_FOUR(c[5]), WARPGROUP_FOUR(c[6]), WARPGROUP_FOUR(c[7]),
          WARPGROUP_FOUR(c[8]), WARPGROUP_FOUR(c[9]), WARPGROUP_FOUR(c[10]), WARPGROUP_FOUR(c[11]),
          WARPGROUP_FOUR(c[12]), WARPGROUP_FOUR(c[13]), WARPGROUP_FOUR(c[14]), WARPGROUP_FOUR(c[15])
        : WARPGROUP_A(a), "l"(b));
}
DEVICE void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Between this thread's writes to shared memory and, after a barrier, products that read them.
DEVICE void warpgroup_publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barriers in shared memory, of which each wait is for one completion: by arrivals, and by bytes that were expected.
DEVICE void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After the inits, before a barrier of the block.
DEVICE void barrier_publish() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// parity: 0 for the first completion, 1 for the second, ...
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
        ::"r"(barrier), "r"(parity) : "memory");
}
// Contiguous bytes, a multiple of 16, to shared memory, told to a barrier there.
DEVICE void copy_bulk(u32 shared, const void* global, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared), "l"(global), "r"(bytes), "r"(barrier) : "memory");
}
