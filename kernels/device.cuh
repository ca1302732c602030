// The functions of common.cuh that are PTX.
#pragma once
#include <stdint.h>

#define REGISTER_KERNEL(name, threads)
// Dynamic shared memory of a block, aligned to 128 bytes.
#define DYNAMIC_SHARED(type, name)                                  \
    extern __shared__ __align__(128) unsigned char dynamic_shared[]; \
    type* name = reinterpret_cast<type*>(dynamic_shared)

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

// Loads after it are not moved before it.
__device__ __forceinline__ void keep_order() { asm volatile("" ::: "memory"); }

// 2^x, to about 2 units in the last place.
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// Four (two) 8x8 matrices of 16-bit numbers; lane i gives the address of row i % 8 of matrix i / 8, 16-byte aligned.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(row)) : "memory");
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
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Copies 16 bytes from global to shared memory in the background, or writes zeros where `valid` is false.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N groups of this thread are under way.
template <int N> __device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Flags in memory that the CPU sees, too.
__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* p) {
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_release_system(uint32_t* p, uint32_t v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// A read of memory that the CPU has written since the kernel began: past all caches.
__device__ __forceinline__ uint4 load_uncached(const uint4* p) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void pause_ns(uint32_t ns) { __nanosleep(ns); }

// Reads that will not be read again soon.
__device__ __forceinline__ uint4 load_streaming(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// Two floats as FP8 E4M3, rounded to nearest, cut at 448; the first in the low byte. And back.
__device__ __forceinline__ uint16_t pack_e4m3(float low, float high);
__device__ __forceinline__ float2 unpack_e4m3(uint16_t pair);

// In software, for cards before compute capability 8.9 and for the emulator.
__device__ __forceinline__ uint8_t e4m3_from_f32(float x) {
    const uint32_t sign = (__float_as_uint(x) >> 24) & 0x80u;
    const float a = fminf(fabsf(x), 448.0f);
    if (!(a >= 0.0f)) return 0x7f;
    if (a < 0x1p-6f) return (uint8_t)(sign | (uint32_t)rintf(a * 512.0f));
    uint32_t bits = __float_as_uint(a);
    bits += 0x7ffffu + ((bits >> 20) & 1u); // ties to even
    return (uint8_t)(sign | (((bits >> 20) - (120u << 3)) & 0x7fu));
}
__device__ __forceinline__ float e4m3_to_f32(uint8_t x) {
    const uint32_t sign = (uint32_t)(x & 0x80u) << 24, body = x & 0x7fu;
    const float a = body < 8u ? (float)body * 0x1p-9f : __uint_as_float((body + (120u << 3)) << 20);
    return __uint_as_float(__float_as_uint(a) | sign);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
__device__ __forceinline__ uint16_t pack_e4m3(float low, float high) {
    uint16_t d;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
    return d;
}
__device__ __forceinline__ float2 unpack_e4m3(uint16_t pair) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    float2 out;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(out.x), "=f"(out.y) : "r"(halves));
    return out;
}
#else
__device__ __forceinline__ uint16_t pack_e4m3(float low, float high) { return (uint16_t)(e4m3_from_f32(low) | e4m3_from_f32(high) << 8); }
__device__ __forceinline__ float2 unpack_e4m3(uint16_t pair) { return make_float2(e4m3_to_f32(pair & 0xff), e4m3_to_f32(pair >> 8)); }
#endif

// Products of a warpgroup (compute capability 9.0 only): c[64, N] += a[64, 16] b[16, N] in the background. A warp brings 16 rows of a in registers, fragments as
// those of mma_bf16, and c[j] are its sums of columns 8j .. 8j + 7. b: N rows of 64 inputs in shared memory, 128 bytes each, 16-byte chunk i of row r at i ^ r % 8,
// aligned to 1024 bytes. Neither a nor c may be touched before the wait; a wait names the sums that are read after it.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA 1
__device__ __forceinline__ uint64_t wgmma_rows(const void* rows) {
    return (uint64_t)(shared_address(rows) >> 4 & 0x3fffu) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
template <int C> __device__ __forceinline__ void wgmma_landed(float (&c)[C][4]) {
#pragma unroll
    for (int j = 0; j < C; j++) asm volatile("" : "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])::"memory");
}
// What this thread has written to shared memory can be read by such products.
__device__ __forceinline__ void wgmma_publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#define WGMMA_SUMS(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
template <int C> __device__ __forceinline__ void wgmma_n32(float (&c)[C][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
        : WGMMA_SUMS(0), WGMMA_SUMS(1), WGMMA_SUMS(2), WGMMA_SUMS(3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <int C> __device__ __forceinline__ void wgmma_n48(float (&c)[C][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23}, "
        "{%24, %25, %26, %27}, %28, 1, 1, 1, 0;"
        : WGMMA_SUMS(0), WGMMA_SUMS(1), WGMMA_SUMS(2), WGMMA_SUMS(3), WGMMA_SUMS(4), WGMMA_SUMS(5)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <int C> __device__ __forceinline__ void wgmma_n64(float (&c)[C][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
        : WGMMA_SUMS(0), WGMMA_SUMS(1), WGMMA_SUMS(2), WGMMA_SUMS(3), WGMMA_SUMS(4), WGMMA_SUMS(5),
          WGMMA_SUMS(6), WGMMA_SUMS(7)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <int C> __device__ __forceinline__ void wgmma_n96(float (&c)[C][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
        "{%48, %49, %50, %51}, %52, 1, 1, 1, 0;"
        : WGMMA_SUMS(0), WGMMA_SUMS(1), WGMMA_SUMS(2), WGMMA_SUMS(3), WGMMA_SUMS(4), WGMMA_SUMS(5),
          WGMMA_SUMS(6), WGMMA_SUMS(7), WGMMA_SUMS(8), WGMMA_SUMS(9), WGMMA_SUMS(10), WGMMA_SUMS(11)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <int C> __device__ __forceinline__ void wgmma_n128(float (&c)[C][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
        : WGMMA_SUMS(0), WGMMA_SUMS(1), WGMMA_SUMS(2), WGMMA_SUMS(3), WGMMA_SUMS(4), WGMMA_SUMS(5),
          WGMMA_SUMS(6), WGMMA_SUMS(7), WGMMA_SUMS(8), WGMMA_SUMS(9), WGMMA_SUMS(10), WGMMA_SUMS(11),
          WGMMA_SUMS(12), WGMMA_SUMS(13), WGMMA_SUMS(14), WGMMA_SUMS(15)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef WGMMA_SUMS
template <int N, int C> __device__ __forceinline__ void wgmma_bf16(float (&c)[C][4], const uint32_t (&a)[4], uint64_t b) {
    if constexpr (N == 32) wgmma_n32(c, a, b);
    else if constexpr (N == 48) wgmma_n48(c, a, b);
    else if constexpr (N == 64) wgmma_n64(c, a, b);
    else if constexpr (N == 96) wgmma_n96(c, a, b);
    else wgmma_n128(c, a, b);
}
#endif
