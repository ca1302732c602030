// The dense products of gemm.cu with Hopper's own instructions, for 128 tokens and more: y = (add ? y : 0) + x w^T +
// bias. Only on compute capability 9.0 (in code for other cards these kernels are empty).
//
// A block owns 128 tokens times BN outputs and walks k in steps of 64. One warp brings x and w by tensor copies into
// STAGES buffers, two warpgroups multiply 64 tokens each. The grid's x may be smaller than the number of tiles: a block
// then takes every so many-th tile, and the copies for its next one begin while the last one's sums are stored. Batch
// (grid z) and splits (grid y) as in gemm.cu.
//
// There are up to three jobs, as in gemm.cu, with a map of w each; maps of jobs that are not there are not read.
// x and w come as tensor maps: cuTensorMapEncodeTiled(BFLOAT16, rank 3, base, dims {k, rows, batch}, strides in bytes
// {2 pitch, 2 batch step}, box {64, 64, 1}, element strides 1, INTERLEAVE_NONE, SWIZZLE_128B, L2_PROMOTION_256B,
// FLOAT_OOB_FILL_NONE). Rows of x: tokens, or as many as its buffer has, so that a map can be kept: rows past the
// tokens change nothing. For a batch of one its step may be anything allowed (a multiple of 16 bytes).
//
// gemm_wgmma_{bf16_set|f32_set|f32_add}_n{BN}: its tile is (BM, BN). Two blocks fit on a multiprocessor, one of n256.
//   grid       (1 to tiles = div_ceil(tokens, BM) (sum over jobs of div_ceil(n, BN)), splits, batch)
//   workspace  for splits > 1, which n64 alone may have: counters [tiles batch] u32, partial f32
//              [splits][tiles batch][BM BN]
//
// Which, n being the outputs of all jobs:
//   n64     while tiles batch <= 264; splits = max(1, min(div_ceil(132, tiles batch), k / 512, 8))
//   n128    else, where n < 1024
//   n256    else
//   grid x  min(tiles, max(1, 132 blocks_on_a_multiprocessor / (splits batch)))
#include "gemm.cuh"

struct GemmTma {
    TensorMap x, w[3];
    ProductJob job[3];  // w and w_batch have no meaning here
    float* partial;     // splits > 1
    uint32_t* counters; // splits > 1
    int tokens, k;
};

constexpr int WARPGROUP = 128, CONSUMERS = 2, WGMMA_THREADS = CONSUMERS * WARPGROUP + WARP;
constexpr int BM = CONSUMERS * 64;

#ifdef HAS_WGMMA
constexpr int CONSUMER_WARPS = CONSUMERS * 4;
constexpr int BOX_ROWS = 64, ROW_BYTES = 2 * BK, BOX_BYTES = BOX_ROWS * ROW_BYTES;

// Lane t of four neighbours gets what all of them have in pair t: afterwards pair i is what lane i had.
__device__ __forceinline__ void transpose_pairs(float (&v)[8]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & bit) continue;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &low = v[2 * i + e], &high = v[2 * (i + bit) + e];
                const float got = __shfl_xor_sync(ALL_LANES, lane & bit ? low : high, bit);
                if (lane & bit)
                    low = got;
                else
                    high = got;
            }
        }
}

// With what the swizzle's pattern may ask for in front, and 128 for the barriers.
template <int BN, int STAGES> constexpr int gemm_wgmma_shared() { return 1024 + STAGES * (BM + BN) * ROW_BYTES + 128; }

template <class Out, bool ADD, int BN, int STAGES> __device__ __forceinline__ void gemm_wgmma(const GemmTma& a) {
    constexpr int X_BYTES = BM * ROW_BYTES, STAGE_BYTES = X_BYTES + BN * ROW_BYTES;
    DYNAMIC_SHARED(unsigned char, dynamic);
    unsigned char* shared = dynamic + (1024 - (uintptr_t)dynamic % 1024) % 1024; // the swizzle's pattern
    uint64_t *full = (uint64_t*)(shared + STAGES * STAGE_BYTES), *empty = full + STAGES;
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, warpgroup = tid / WARPGROUP;
    const int tiles_m = div_ceil(a.tokens, BM), tiles_n = tiles_of_jobs<BN>(a.job), tiles = tiles_m * tiles_n;
    const int splits = BN == 64 ? gridDim.y : 1, split = BN == 64 ? blockIdx.y : 0, steps = div_ceil(a.k, BK);
    const int begin = (int)((int64_t)steps * split / splits), end = (int)((int64_t)steps * (split + 1) / splits);

    if (tid == 0) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(full + s, 1);
            mbarrier_init(empty + s, CONSUMER_WARPS);
        }
        mbarrier_init_done();
    }
    begin_kernel();
    __syncthreads();

    int stage = 0, parity = 0; // of the buffer used next; parity changes each time round
    auto advance = [&] {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    };
    if (warp == CONSUMER_WARPS) {
        if (lane != 0) return;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const TilePlace place = tile_place<BN>(tile, tiles_m, tiles_n, a.job);
            for (int step = begin; step < end; step++) {
                unsigned char* to = shared + stage * STAGE_BYTES;
                mbarrier_wait(empty + stage, parity ^ 1);
                mbarrier_arrive_expect(full + stage, STAGE_BYTES);
#pragma unroll
                for (int i = 0; i < BM / BOX_ROWS; i++)
                    tensor_copy(
                        to + i * BOX_BYTES, &a.x, full + stage, step * BK, place.m * BM + i * BOX_ROWS, blockIdx.z);
#pragma unroll
                for (int i = 0; i < BN / BOX_ROWS; i++)
                    tensor_copy(to + X_BYTES + i * BOX_BYTES, &a.w[place.job], full + stage, step * BK,
                        place.n * BN + i * BOX_ROWS, blockIdx.z);
                advance();
            }
        }
        return;
    }

    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float sum[BN / 8][4];
#pragma unroll
        for (int i = 0; i < BN / 2; i++) sum[i / 4][i % 4] = 0.0f;
        int before = -1; // the buffer of the step before
        for (int step = begin; step < end; step++) {
            const unsigned char *x = shared + stage * STAGE_BYTES + warpgroup * BOX_BYTES,
                                *w = shared + stage * STAGE_BYTES + X_BYTES;
            mbarrier_wait(full + stage, parity);
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < BK / 16; kk++) wgmma(sum, wgmma_operand(x + 32 * kk), wgmma_operand(w + 32 * kk));
            wgmma_commit();
            wgmma_wait<1>(); // the step before has been multiplied
            if (before >= 0 && lane == 0) mbarrier_arrive(empty + before);
            before = stage;
            advance();
        }
        wgmma_wait<0>();
        if (before >= 0 && lane == 0) mbarrier_arrive(empty + before);

        if (splits > 1) {
            const int64_t at = (int64_t)blockIdx.z * tiles + tile;
            if (!sum_splits<BN / 2, CONSUMERS * WARPGROUP>(
                    &sum[0][0], a.partial, a.counters, at, (int64_t)tiles * gridDim.z))
                continue;
        }

        const TilePlace place = tile_place<BN>(tile, tiles_m, tiles_n, a.job);
        const ProductJob job = a.job[place.job];
        const int row = place.m * BM + warp * 16 + lane / 4, col = place.n * BN + lane % 4 * 8;
        Out* y = (Out*)job.y + blockIdx.z * job.y_batch + col;
        const float* bias = job.bias ? job.bias + col : nullptr;
        const int cols = job.n - col; // from this thread's first on
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int q = 0; q < BN / 32; q++) {
                float v[8];
#pragma unroll
                for (int e = 0; e < 8; e++) v[e] = sum[4 * q + e / 2][2 * half + e % 2];
                transpose_pairs(v);
                if (32 * q >= cols || row + 8 * half >= a.tokens) continue;
                if (bias) add_8(v, bias + 32 * q);
                store_8<ADD>(y + (int64_t)(row + 8 * half) * job.y_pitch + 32 * q, v);
            }
        }
    }
}

#define GEMM_WGMMA(name, Out, ADD, BN, STAGES, SHARED)                                                                 \
    static_assert(SHARED == gemm_wgmma_shared<BN, STAGES>(), "shared memory of " #name);                               \
    GEMM_WGMMA_KERNEL(name, BN, SHARED) { gemm_wgmma<Out, ADD, BN, STAGES>(a); }
#else
#define GEMM_WGMMA(name, Out, ADD, BN, STAGES, SHARED)                                                                 \
    GEMM_WGMMA_KERNEL(name, BN, SHARED) {}
#endif
#define GEMM_WGMMA_KERNEL(name, BN, SHARED)                                                                            \
    KERNEL_TILE(name, BM, BN)                                                                                          \
    KERNEL_BLOCKS(name, WGMMA_THREADS, BN == 256 ? 1 : 2, SHARED, const __grid_constant__ GemmTma a)
#define GEMM_WGMMA_TILES(out, Out, ADD)                                                                                \
    GEMM_WGMMA(gemm_wgmma_##out##_n64, Out, ADD, 64, 4, 99456)                                                         \
    GEMM_WGMMA(gemm_wgmma_##out##_n128, Out, ADD, 128, 3, 99456)                                                       \
    GEMM_WGMMA(gemm_wgmma_##out##_n256, Out, ADD, 256, 4, 197760)
GEMM_WGMMA_TILES(bf16_set, bf16, false)
GEMM_WGMMA_TILES(f32_set, float, false)
GEMM_WGMMA_TILES(f32_add, float, true)
