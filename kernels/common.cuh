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

// Defines a kernel that is launched by its name with exactly `threads` threads to a block.
#define KERNEL(name, threads, ...)                                                                                     \
    extern "C" __global__ void __launch_bounds__(threads) name(__VA_ARGS__);                                           \
    REGISTER_KERNEL(name, threads)                                                                                     \
    extern "C" __global__ void __launch_bounds__(threads) name(__VA_ARGS__)

// The same, with registers for `blocks` of them on a multiprocessor.
#define KERNEL_BLOCKS(name, threads, blocks, ...)                                                                      \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(__VA_ARGS__);                                   \
    REGISTER_KERNEL(name, threads)                                                                                     \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(__VA_ARGS__)

// What every kernel does before it reads what others wrote, or writes what they read: it may have been launched before
// the one in front of it has ended.
__device__ __forceinline__ void begin_kernel() {
    wait_for_previous_kernel();
    let_next_kernel_begin();
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
