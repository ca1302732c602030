// What the two decode kernels share.
#pragma once
#include "attention.cuh"

__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }

// Where the split-th of `splits` equal shares of `total` begins.
__device__ __forceinline__ int share(int total, int split, int splits) { return (int)((long long)total * split / splits); }

// Fragments of A from global memory: up to 16 rows of `dim` numbers, one after the other; columns 16 * (first + i * STEP) and on for i < N. Zeros outside.
template <int N, int STEP> __device__ __forceinline__ void load_queries(uint32_t (&a)[N][4], const bf16* q, int rows, int dim, int first, int lane) {
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const int row = lane / 4 + w % 2 * 8, col = (first + i * STEP) * 16 + w / 2 * 8 + lane % 4 * 2;
            a[i][w] = row < rows && col < dim ? *reinterpret_cast<const uint32_t*>(q + (size_t)row * dim + col) : 0;
        }
}
