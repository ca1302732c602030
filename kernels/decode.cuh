// What the two decode kernels share.
#pragma once
#include "attention.cuh"

constexpr int HEADS = 16;       // query heads that are the rows of a product
constexpr int MAX_SPLITS = 256; // shares of a context

__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }

// What the split-th of `splits` takes of `total`: equal shares; of less than `splits` one each, the last ones nothing.
struct Share {
    int begin, count;
};
__device__ __forceinline__ Share share_of(int total, int split, int splits) {
    splits = min(splits, total);
    if (split >= splits) return {0, 0};
    auto begin = [&](int split) { return (int)((long long)total * split / splits); };
    return {begin(split), begin(split + 1) - begin(split)};
}

// Fragments of A from global memory: up to 16 rows of `dim` elements, zeros outside. at(r, column) are two neighbours
// of this lane's row lane / 4 + 8 * r. Fragment i < N has
//   columns 16 * (first + i * STEP) to 16 * (first + i * STEP) + 15
// in the order that load_b_rows has for a cache of type Cache.
template <class Cache, int N, int STEP, class At>
__device__ __forceinline__ void load_queries(uint32_t (&a)[N][4], At at, int rows, int dim, int first, int lane) {
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const int row = lane / 4 + w % 2 * 8,
                      of_16 = sizeof(Cache) == 1 ? lane % 4 * 4 + w / 2 * 2 : lane % 4 * 2 + w / 2 * 8,
                      col = (first + i * STEP) * 16 + of_16;
            a[i][w] = row < rows && col < dim ? *reinterpret_cast<const uint32_t*>(at(w % 2, col)) : 0;
        }
}

// This lane's four outputs of row lane / 4 + 8 * r in a pair of output tiles: two neighbours in columns
// quad_column(lane, 0), two in quad_column(lane, 1).
template <class Cache> __device__ __forceinline__ int quad_column(int lane, int half) {
    return sizeof(Cache) == 1 ? lane % 4 * 4 + half * 2 : lane % 4 * 2 + half * 8;
}
template <class Cache>
__device__ __forceinline__ float2 quad_of(const float (&left)[4], const float (&right)[4], int r, int half) {
    if (sizeof(Cache) == 1) return make_float2(left[2 * r + half], right[2 * r + half]);
    return half ? make_float2(right[2 * r], right[2 * r + 1]) : make_float2(left[2 * r], left[2 * r + 1]);
}

// The output of tiles of 8 columns times the correction of online_softmax; mostly the maxima stay as they are.
template <int N> __device__ __forceinline__ void rescale(float (&o)[N][4], float2 correction) {
    if (!__any_sync(ALL_LANES, correction.x != 1.0f || correction.y != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < N; n++) {
        o[n][0] *= correction.x;
        o[n][1] *= correction.x;
        o[n][2] *= correction.y;
        o[n][3] *= correction.y;
    }
}
