// What gemm.cu and gemm_wgmma.cu share: the order of tiles, parts of k that blocks share, stores.
#pragma once
#include "product.cuh"

constexpr int BK = 64, CHUNK = 8; // k of one step; a chunk: 16 bytes, what a copy and a row of ldmatrix take
constexpr int TILES_IN_GROUP = 8; // of tokens: neighbouring blocks share weights and tokens in L2

// Tiles of BN outputs of all jobs: those of a job stand behind those of the one before.
template <int BN> __device__ __forceinline__ int tiles_of_jobs(const ProductJob (&job)[3]) {
    return div_ceil(job[0].n, BN) + div_ceil(job[1].n, BN) + div_ceil(job[2].n, BN);
}

// Which of the grid's x is which tile: groups of a few tiles of tokens walk all outputs of all jobs.
struct TilePlace {
    int m, n, job; // n: of the job's own tiles
};
template <int BN>
__device__ __forceinline__ TilePlace tile_place(int tile, int tiles_m, int tiles_n, const ProductJob (&job)[3]) {
    const int group = tile / (TILES_IN_GROUP * tiles_n), first = group * TILES_IN_GROUP;
    const int rows = min(TILES_IN_GROUP, tiles_m - first), within = tile - group * TILES_IN_GROUP * tiles_n;
    TilePlace place = {first + within % rows, within / rows, 0};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int tiles = div_ceil(job[i].n, BN);
        if (place.job == i && place.n >= tiles) place.n -= tiles, place.job++;
    }
    return place;
}

// Eight neighbouring outputs.
__device__ __forceinline__ void add_8(float (&v)[8], const float* bias) {
    const float4 low = __ldg((const float4*)bias), high = __ldg((const float4*)bias + 1);
    v[0] += low.x, v[1] += low.y, v[2] += low.z, v[3] += low.w;
    v[4] += high.x, v[5] += high.y, v[6] += high.z, v[7] += high.w;
}
template <bool ADD> __device__ __forceinline__ void store_8(float* y, float (&v)[8]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float4 out = make_float4(v[4 * h], v[4 * h + 1], v[4 * h + 2], v[4 * h + 3]);
        if (ADD) {
            const float4 old = ((const float4*)y)[h];
            out.x += old.x, out.y += old.y, out.z += old.z, out.w += old.w;
        }
        ((float4*)y)[h] = out;
    }
}
template <bool ADD> __device__ __forceinline__ void store_8(bf16* y, float (&v)[8]) {
    static_assert(!ADD, "sums are kept in f32");
    *(uint4*)y = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}

// The sums of a tile over all parts of k, if this block is the last of its tile to come; false otherwise. Called by
// THREADS threads of the block, 0 to THREADS - 1.
template <int COUNT, int THREADS>
__device__ __forceinline__ bool sum_splits(
    float* sum, float* partial, uint32_t* counters, int64_t tile, int64_t tiles) {
    __shared__ bool last;
    const int splits = gridDim.y;
    const int64_t next_split = tiles * (COUNT / 4 * THREADS);
    float4* mine = (float4*)partial + tile * (COUNT / 4 * THREADS) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < COUNT / 4; i++)
        mine[blockIdx.y * next_split + i * THREADS] =
            make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
    __threadfence();
    barrier_sync(1, THREADS);
    if (threadIdx.x == 0) {
        last = atomicAdd(counters + tile, 1u) == (uint32_t)splits - 1;
        if (last) counters[tile] = 0;
    }
    barrier_sync(1, THREADS);
    if (!last) return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < COUNT; i++) sum[i] = 0.0f;
#pragma unroll 1
    for (int s = 0; s < splits; s++)
#pragma unroll
        for (int i = 0; i < COUNT / 4; i++) {
            const float4 part = __ldcg(mine + s * next_split + i * THREADS);
            sum[4 * i] += part.x, sum[4 * i + 1] += part.y, sum[4 * i + 2] += part.z, sum[4 * i + 3] += part.w;
        }
    return true;
}
