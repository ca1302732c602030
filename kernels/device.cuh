// The functions of common.cuh that are PTX.
#pragma once
#include <stdint.h>

#define REGISTER_KERNEL(name, threads)
// Dynamic shared memory of a block, aligned to 128 bytes or to more.
#define DYNAMIC_SHARED(type, name) DYNAMIC_SHARED_ALIGNED(type, name, 128)
#define DYNAMIC_SHARED_ALIGNED(type, name, alignment)                                                                  \
    extern __shared__ __align__(alignment)                                                                             \
    unsigned char dynamic_shared_##alignment[];                                                                        \
    type* name = reinterpret_cast<type*>(dynamic_shared_##alignment)

// Two floats rounded to bf16 in a word, the first in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// a * b + c of both bf16 halves, rounded once.
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// A half of a word in both halves, of which instructions on pairs need no copy.
template <int HALF> __device__ __forceinline__ uint32_t twice(uint32_t x) {
    uint32_t d;
    if constexpr (HALF == 0)
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }" : "=r"(d) : "r"(x));
    else
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }" : "=r"(d) : "r"(x));
    return d;
}

// An f16 number, of its bits; subnormal ones, too.
__device__ __forceinline__ float f16_value(uint16_t bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

// 2^x, to about 2 units in the last place.
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// What follows uses x as it is in a register now: compilers would rather make some numbers anew for each use.
__device__ __forceinline__ void keep(int& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void keep(uint32_t& x) { asm volatile("" : "+r"(x)); }
template <class T> __device__ __forceinline__ T* keep_shared(T* p) {
    uint32_t at = shared_address(p);
    asm volatile("" : "+r"(at));
    return static_cast<T*>(__cvta_shared_to_generic(at));
}

// x >> N, by the pipe of products: the one of shifts is the busier one where codes are unpacked.
template <int N> __device__ __forceinline__ uint32_t shift_by_product(uint32_t x) {
    uint32_t d;
    asm("mul.hi.u32 %0, %1, %2;" : "=r"(d) : "r"(x), "n"(1 << (32 - N)));
    return d;
}

// Four (two) 8x8 matrices of 16-bit numbers; lane i gives the address of row i % 8 of matrix i / 8, 16-byte aligned.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
        : "r"(shared_address(row))
        : "memory");
}
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
        : "=r"(r[0]), "=r"(r[1])
        : "r"(shared_address(row))
        : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
        : "r"(shared_address(row))
        : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
        : "=r"(r[0]), "=r"(r[1])
        : "r"(shared_address(row))
        : "memory");
}

// c[16, 8] += a[16, 16] b[16, 8]: bf16 operands, f32 sums, fragments as in the PTX manual under mma.m16n8k16.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Copies 16 bytes from global to shared memory through L1 in the background, or writes zeros where `valid` is false.
__device__ __forceinline__ void copy_async_16_cached(void* shared, const void* global, bool valid) {
    asm volatile(
        "cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(valid ? 16 : 0)
        : "memory");
}
// Copies 16 bytes from global to shared memory in the background, or writes zeros where `valid` is false.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, bool valid = true) {
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(valid ? 16 : 0)
        : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N groups of this thread are under way.
template <int N> __device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Brings bytes on their way to L2, a multiple of 16 of them, aligned to 16: by one of these threads where one
// instruction does it all in the background.
__device__ __forceinline__ void prefetch_l2_bytes(const void* at, uint32_t bytes, int thread, int threads) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (thread == 0 && bytes)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes) : "memory");
#else
    for (uint32_t i = 128 * thread; i < bytes; i += 128 * threads)
        asm volatile("prefetch.global.L2 [%0];" ::"l"((const uint8_t*)at + i));
#endif
}

// A flag or a count for other blocks of this device.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void add_release(uint32_t* p, uint32_t v) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// Flags in memory that the CPU sees, too.
__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* p) {
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_release_system(uint32_t* p, uint32_t v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* p) {
    uint64_t v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_release_system(uint64_t* p, uint64_t v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// A word that is whole whenever it is seen, by whatever device; it says nothing of others.
__device__ __forceinline__ uint64_t load_relaxed_system(const uint64_t* p) {
    uint64_t v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_relaxed_system(uint64_t* p, uint64_t v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// To memory of another device, which sees it after a fence of this thread.
__device__ __forceinline__ void store_peer(uint4* p, const uint4& v) { *p = v; }
// A read of memory that the CPU has written since the kernel began: past all caches.
__device__ __forceinline__ uint4 load_uncached(const uint4* p) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(p)
        : "memory");
    return v;
}
__device__ __forceinline__ void pause_ns(uint32_t ns) { __nanosleep(ns); }

// A kernel that was launched with programmatic stream serialization begins before the one in front of it has ended: it
// waits here for the end and all that was written, and lets the next one begin. Launched otherwise, and before compute
// capability 9.0, both do nothing. Kernels that let others begin must wait.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A barrier for some whole warps of a block: `threads` of them, `id` 1 to 7 (0 is __syncthreads).
__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Reads that will not be read again soon.
__device__ __forceinline__ uint4 load_streaming(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(p));
    return v;
}

// Hopper's own instructions: tensor copies (TMA), barriers in shared memory that count their bytes, products of a
// warpgroup (four warps). They exist in code for compute capability 9.0 alone.

// Registers of the threads of a warpgroup, all of which must call: given up by one, or taken by another once they are.
// Multiples of 8.
template <int N> __device__ __forceinline__ void fewer_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}
template <int N> __device__ __forceinline__ void more_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

// What cuTensorMapEncodeTiled writes.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

// What this thread has written to shared memory, and its asynchronous copies that it has waited for, are there for
// wgmma after a barrier.
__device__ __forceinline__ void shared_to_async() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA
// A barrier's phase ends when `count` threads have arrived and all expected bytes have come.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
// After all mbarrier_init, before the block's __syncthreads: the copy engine sees them, too.
__device__ __forceinline__ void mbarrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
        : "memory");
}
// Waits for the end of a phase: of the first, third, ... with parity 0, of the others with parity 1. The one before the
// first counts as ended.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::
            "r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}
// Arrives when all asynchronous copies that this thread has begun have come.
__device__ __forceinline__ void copy_async_arrive(uint64_t* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Copies a box of a tensor of three dimensions, the innermost coordinate first.
__device__ __forceinline__ void tensor_copy(
    void* shared, const TensorMap* map, uint64_t* barrier, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(shared_address(shared)),
        "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

// An operand of wgmma in shared memory: rows of 64 bf16 numbers, 128 bytes, whose 16-byte chunks are swizzled in a
// pattern of 1024 bytes; `p` is the first row's first number, or 16, 32 or 48 numbers after it.
__device__ __forceinline__ uint64_t wgmma_operand(const void* p) {
    return (uint64_t)(shared_address(p) >> 4 & 0x3fffu) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// The operand so many bytes further on.
__device__ __forceinline__ uint64_t wgmma_further(uint64_t operand, int bytes) {
    return (operand & ~0xffffffffull) | ((uint32_t)operand + (bytes >> 4)); // there is no carry
}
// The same rows, 16 of them, as b of wgmma_columns; the next 64 columns are `step` bytes on.
__device__ __forceinline__ uint64_t wgmma_operand_columns(const void* p, int step) {
    return (uint64_t)(shared_address(p) >> 4 & 0x3fffu) | (uint64_t)(step >> 4) << 16 | 64ull << 32 | 1ull << 62;
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// After the wait: what follows reads the sums of now.
template <int C> __device__ __forceinline__ void wgmma_landed(float (&d)[C][4]) {
#pragma unroll
    for (int j = 0; j < C; j++) asm volatile("" : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])::"memory");
}

// d[64, N] += a[64, 16] b[N, 16]^T in the background; warp i of the four has rows 16 i to 16 i + 15, d[j] being its
// columns 8j to 8j + 7 as mma_bf16 has them. `a` is in shared memory, or each warp brings its rows in registers as for
// mma_bf16, which it may change after the wait; `b` is in shared memory.
#define WGMMA_SUMS_2(j)                                                                                                \
    "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3]), "+f"(d[j + 1][0]), "+f"(d[j + 1][1]),                  \
        "+f"(d[j + 1][2]), "+f"(d[j + 1][3])
#define WGMMA_SUMS_4(j) WGMMA_SUMS_2(j), WGMMA_SUMS_2(j + 2)
#define WGMMA_SUMS_8(j) WGMMA_SUMS_4(j), WGMMA_SUMS_4(j + 4)
#define WGMMA_SUMS_16(j) WGMMA_SUMS_8(j), WGMMA_SUMS_8(j + 8)
#define WGMMA_D16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_D24 WGMMA_D16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_D32 WGMMA_D24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_D48 WGMMA_D32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_D64 WGMMA_D48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_D88                                                                                                      \
    WGMMA_D64 ", %64, %65, %66, %67, %68, %69, %70, %71"                                                               \
              ", %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_D128                                                                                                     \
    WGMMA_D64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                     \
              "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                       \
              "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "           \
              "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA(n, d, a, b, constants)                                                                                   \
    "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" d "}, " a ", " b ", " constants ";"
template <int N, int C> __device__ __forceinline__ void wgmma(float (&d)[C][4], uint64_t a, uint64_t b) {
    static_assert(N <= 8 * C && (N == 64 || N == 128 || N == 256), "columns");
    if constexpr (N == 64)
        asm volatile(WGMMA(64, WGMMA_D32, "%32", "%33", "1, 1, 1, 0, 0") : WGMMA_SUMS_8(0) : "l"(a), "l"(b));
    else if constexpr (N == 128)
        asm volatile(WGMMA(128, WGMMA_D64, "%64", "%65", "1, 1, 1, 0, 0") : WGMMA_SUMS_16(0) : "l"(a), "l"(b));
    else if constexpr (N == 256)
        asm volatile(WGMMA(256, WGMMA_D128, "%128", "%129", "1, 1, 1, 0, 0")
            : WGMMA_SUMS_16(0), WGMMA_SUMS_16(16)
            : "l"(a), "l"(b));
}
template <int C> __device__ __forceinline__ void wgmma(float (&d)[C][4], uint64_t a, uint64_t b) {
    wgmma<8 * C>(d, a, b);
}
// d = a b^T: what was in d does not count.
template <int C> __device__ __forceinline__ void wgmma_set(float (&d)[C][4], uint64_t a, uint64_t b) {
    static_assert(C == 8 || C == 16, "columns: 64 or 128");
    if constexpr (C == 8)
        asm volatile(WGMMA(64, WGMMA_D32, "%32", "%33", "0, 1, 1, 0, 0") : WGMMA_SUMS_8(0) : "l"(a), "l"(b));
    else
        asm volatile(WGMMA(128, WGMMA_D64, "%64", "%65", "0, 1, 1, 0, 0") : WGMMA_SUMS_16(0) : "l"(a), "l"(b));
}
// d += a b, b[16, 8 C]: its rows are of k (wgmma_operand_columns).
template <int C> __device__ __forceinline__ void wgmma_columns(float (&d)[C][4], const uint32_t (&a)[4], uint64_t b) {
    static_assert(C == 8 || C == 16 || C == 32, "columns: 64, 128 or 256");
    if constexpr (C == 8)
        asm volatile(WGMMA(64, WGMMA_D32, "{%32, %33, %34, %35}", "%36", "1, 1, 1, 1")
            : WGMMA_SUMS_8(0)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else if constexpr (C == 32)
        asm volatile(WGMMA(256, WGMMA_D128, "{%128, %129, %130, %131}", "%132", "1, 1, 1, 1")
            : WGMMA_SUMS_16(0), WGMMA_SUMS_16(16)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else
        asm volatile(WGMMA(128, WGMMA_D64, "{%64, %65, %66, %67}", "%68", "1, 1, 1, 1")
            : WGMMA_SUMS_16(0)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <int N, int C> __device__ __forceinline__ void wgmma(float (&d)[C][4], const uint32_t (&a)[4], uint64_t b) {
    static_assert(N <= 8 * C && (N == 32 || N == 48 || N == 64 || N == 96 || N == 128 || N == 176), "columns");
    if constexpr (N == 32)
        asm volatile(WGMMA(32, WGMMA_D16, "{%16, %17, %18, %19}", "%20", "1, 1, 1, 0")
            : WGMMA_SUMS_4(0)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else if constexpr (N == 48)
        asm volatile(WGMMA(48, WGMMA_D24, "{%24, %25, %26, %27}", "%28", "1, 1, 1, 0")
            : WGMMA_SUMS_4(0), WGMMA_SUMS_2(4)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else if constexpr (N == 64)
        asm volatile(WGMMA(64, WGMMA_D32, "{%32, %33, %34, %35}", "%36", "1, 1, 1, 0")
            : WGMMA_SUMS_8(0)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else if constexpr (N == 96)
        asm volatile(WGMMA(96, WGMMA_D48, "{%48, %49, %50, %51}", "%52", "1, 1, 1, 0")
            : WGMMA_SUMS_8(0), WGMMA_SUMS_4(8)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else if constexpr (N == 128)
        asm volatile(WGMMA(128, WGMMA_D64, "{%64, %65, %66, %67}", "%68", "1, 1, 1, 0")
            : WGMMA_SUMS_16(0)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else if constexpr (N == 176)
        asm volatile(WGMMA(176, WGMMA_D88, "{%88, %89, %90, %91}", "%92", "1, 1, 1, 0")
            : WGMMA_SUMS_16(0), WGMMA_SUMS_4(16), WGMMA_SUMS_2(20)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#endif
