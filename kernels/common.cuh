// What every kernel shares: bf16, fragments of the tensor cores, asynchronous copies, reductions, flags seen by the
// CPU.
//
// All inline PTX of the project stands here or in device.cuh, so that kernels/emulator can give each of these functions
// a meaning on a CPU: the same kernel sources then run, slowly, where there is no GPU. Kernels must use these functions
// instead of asm.
#pragma once

#ifdef EMULATED
#include "emulator/device.h"
#else
#include "device.cuh"
#endif

// The contract of a launch stands here and in the kernel's file, once. contract.rs reads it when Rust is built, without
// a C++ compiler, and Rust has what it read as crate::cuda::kernels:
//
//   KERNEL(name, threads, shared, parameters...)
//       The constant kernels::name, for launch!. A launch has exactly `threads` threads to a block and `shared` bytes
//       of dynamic shared memory. Arguments that are not of the parameters' number and types do not compile.
//   KERNEL_BLOCKS(name, threads, blocks, shared, parameters...)
//       The same, with registers for `blocks` blocks on a multiprocessor.
//   KERNEL_TILE(name, a, b, c)
//       kernels::name.tile: up to three numbers that tell kernels of one family apart; the file says which.
//   constexpr int CONSTANT = ...;
//       kernels::file::CONSTANT, also of the headers that the file includes. What a grid is counted in is such a
//       constant.
//   struct
//       One that a kernel takes is kernels::Struct.
//   #define SOME_ARGUMENTS ...
//       Parameters that several kernels share: kernels::SomeArguments, and all such kernels in kernels::SOME_KERNELS.
//
// Numbers are integers, constants, + - * / << and brackets; macros may make such lines. Shared bytes are written as a
// number, and a static_assert beside it compares that with what the code uses; ON_HOPPER(hopper, other) are two
// numbers. Pointers are Address<T>; of vectors T is their number, of void and uint4 it is u8, and so it is of
// AS_BYTES(T), which makes kernels of several types of numbers take the same.
//
// To add a kernel: write KERNEL here, launch!(cuda, stream, kernels::name, grid; arguments) there, and run
// `cargo test --lib cuda`, which compares all that was read with what compilers made of it.
#define KERNEL(name, threads, shared, ...)                                                                             \
    extern "C" __global__ void __launch_bounds__(threads) name(__VA_ARGS__);                                           \
    REGISTER_KERNEL(name, threads)                                                                                     \
    extern "C" __global__ void __launch_bounds__(threads) name(__VA_ARGS__)
#define KERNEL_BLOCKS(name, threads, blocks, shared, ...)                                                              \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(__VA_ARGS__);                                   \
    REGISTER_KERNEL(name, threads)                                                                                     \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(__VA_ARGS__)

#define KERNEL_TILE(name, ...) static_assert(all_positive(__VA_ARGS__), "the tile of " #name);
template <class... A> constexpr bool all_positive(A... a) { return ((a > 0) && ...); }
#define AS_BYTES(T) T
// WITH_WGMMA: the body of a kernel for Hopper alone, which is empty elsewhere.
#ifdef HAS_WGMMA
#define ON_HOPPER(hopper, other) hopper
#define WITH_WGMMA(SHARED, BYTES, body)                                                                                \
    {                                                                                                                  \
        static_assert(SHARED == BYTES, "shared memory");                                                               \
        body;                                                                                                          \
    }
#else
#define ON_HOPPER(hopper, other) other
#define WITH_WGMMA(SHARED, BYTES, body)                                                                                \
    {}
#endif

// What every kernel does before it reads what others wrote, or writes what they read: it may have been launched before
// the one in front of it has ended.
__device__ __forceinline__ void begin_kernel() {
    wait_for_previous_kernel();
    let_next_kernel_begin();
}

// The same, in kernels that end so soon that the next one could not begin, and have its weights on their way, in
// between: it begins even before they have waited. The next one must write nothing before its wait, and read only what
// was there before the last kernel in front that waited first.
__device__ __forceinline__ void begin_short_kernel() {
    let_next_kernel_begin();
    wait_for_previous_kernel();
}

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

// A bf16 number as it lies in memory.
struct alignas(2) bf16 {
    uint16_t bits;
};

__device__ __forceinline__ float to_f32(bf16 x) { return __uint_as_float((uint32_t)x.bits << 16); }
__device__ __forceinline__ float to_f32(float x) { return x; }

// Two bf16 numbers in a word, the first in the low half.
__device__ __forceinline__ float low_f32(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_f32(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Rounds to nearest, ties to even.
__device__ __forceinline__ bf16 to_bf16(float x) { return bf16{(uint16_t)(pack_bf16(x, 0.0f) & 0xffffu)}; }

template <class T> __device__ __forceinline__ T from_f32(float x);
template <> __device__ __forceinline__ float from_f32<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_f32<bf16>(float x) { return to_bf16(x); }

// Eight numbers, aligned to 16 bytes.
struct Eight {
    float4 low, high;
};
__device__ __forceinline__ Eight load_8(const float* p) {
    return {*reinterpret_cast<const float4*>(p), *reinterpret_cast<const float4*>(p + 4)};
}

// Sum and maximum over the lanes of a warp; every lane gets it.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int d = WARP / 2; d > 0; d /= 2) x += __shfl_xor_sync(ALL_LANES, x, d);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int d = WARP / 2; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, d));
    return x;
}

// Sum over a block of whole warps; every thread gets it. `scratch`: shared, 33 floats.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    x = warp_sum(x);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    if (warp == 0) {
        float sum = warp_sum(lane < warps ? scratch[lane] : 0.0f);
        if (lane == 0) scratch[WARP] = sum;
    }
    __syncthreads();
    return scratch[WARP];
}

template <class A, class B> __host__ __device__ constexpr A div_ceil(A a, B b) { return (a + b - 1) / b; }
