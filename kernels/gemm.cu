// Dense products of many tokens, BF16 on tensor cores: y[t, i] = (add ? y[t, i] : 0) + sum_k x[t, k] w[i, k] + bias[i]
// for up to three matrices with the same x (query, key and value; gate and up).
//
// x [tokens, k] bf16 rows of pitch x_pitch; w [n, k] bf16 rows without gaps; y [tokens, n] bf16 or f32, pitch y_pitch;
// bias [n] f32 or null. A batch (grid z) multiplies x + z x_batch by w + z w_batch into y + z y_batch (all in
// elements); the bias is the same for all. tokens >= 1 of any number, n and k multiples of 8, pitches and batch steps
// multiples of 8, bases aligned to 16 bytes.
//
// A block of four warps owns BM tokens times BN outputs and walks k in steps of 64 through STAGES buffers of shared
// memory, filled by asynchronous copies. With `splits` > 1 (grid y) that many blocks share a tile, each with a part of
// k. They leave f32 sums in `partial`. The last block to arrive adds them in the order of k, so that the result has the
// same bits every time, and writes y. Counters begin as zero and are zero again afterwards. Launches that may run at
// the same time need separate workspaces.
//
// gemm_{bf16_set|f32_set|f32_add}_m{BM}n{BN}: its tile is (BM, BN).
//   grid       (div_ceil(tokens, BM) * sum over jobs of div_ceil(n, BN), splits, batch)
//   workspace  for splits > 1: counters [tiles] u32, partial [splits][tiles][BM BN] f32; tiles = grid x times grid z
//
// Which:
//   tokens up to 32     m32n128
//   tokens up to 256    m64n64
//   more                m128n128 where that gives 132 tiles, else m64n128
//   splits              max(1, min(div_ceil(264, tiles), k / 512, 8)); for up to 64 tokens no more than let all blocks
//                       run at once
// On compute capability 9.0 from 128 tokens on gemm_wgmma.cu is faster.
//
// gemm_split3_m64n64 multiplies with f32 weights (the router's), w [3][n, k], and sets y in f32. split_f32 has cut each
// weight into three bf16 numbers, 24 bits together, whose products with bf16 are exact in f32. There is one job, and
// w_batch has no meaning.
//   split_f32: grid div_ceil(count, SPLIT_THREADS)
#include "gemm.cuh"

struct Gemm {
    ProductJob job[3];
    const bf16* x;
    float* partial;     // splits > 1
    uint32_t* counters; // splits > 1
    int64_t x_batch;
    int x_pitch, tokens, k;
};

constexpr int GEMM_THREADS = 128;

// WM x WN: the tile of one warp. PARTS: bf16 numbers that make up a weight.
template <class Out, bool ADD, int BM, int BN, int WM, int WN, int STAGES, int PARTS>
__device__ __forceinline__ void gemm(const Gemm& a) {
    constexpr int WARPS_N = BN / WN, I = WM / 16, J = WN / 8,
                  ROWS_A_COPY = GEMM_THREADS / CHUNK; // 8 chunks make a row of BK
    static_assert((BM / WM) * WARPS_N * WARP == GEMM_THREADS && WN % 32 == 0, "four warps");
    constexpr int X_SIZE = BM * BK, W_SIZE = BN * BK, STAGE = X_SIZE + PARTS * W_SIZE;
    DYNAMIC_SHARED(bf16, shared);
    begin_kernel();
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP;
    const int tiles_m = div_ceil(a.tokens, BM), tiles_n = tiles_of_jobs<BN>(a.job);
    const TilePlace place = tile_place<BN>(blockIdx.x, tiles_m, tiles_n, a.job);
    const int m0 = place.m * BM, n0 = place.n * BN;
    const ProductJob& job = a.job[place.job];

    // Copies: this thread brings chunk tid % 8 of rows tid / 8 + 16 i. Chunks of a row are permuted by its number, so
    // that eight rows which ldmatrix reads together lie in different banks; for w these are not neighbours (see below),
    // hence another permutation.
    const int copy_row = tid / CHUNK, copy_chunk = tid % CHUNK;
    const bf16* x = a.x + blockIdx.z * a.x_batch + (int64_t)(m0 + copy_row) * a.x_pitch + copy_chunk * CHUNK;
    const bf16* w = job.w + blockIdx.z * job.w_batch + (int64_t)(n0 + copy_row) * a.k + copy_chunk * CHUNK;
    const int x_rows = a.tokens - m0 - copy_row, w_rows = job.n - n0 - copy_row; // row i is there if 16 i is less
    const int x_to = copy_row * BK + (copy_chunk ^ (copy_row & 7)) * CHUNK;
    const int w_to = copy_row * BK + (copy_chunk ^ ((copy_row & 1) | (copy_row >> 3 & 1) << 1)) * CHUNK;
    auto copy = [&](int step) {
        bf16* to = shared + step % STAGES * STAGE;
        const int k = step * BK;
        const bool inside = k + copy_chunk * CHUNK < a.k;
#pragma unroll
        for (int i = 0; i < BM / ROWS_A_COPY; i++) {
            const bool valid = inside && ROWS_A_COPY * i < x_rows;
            copy_async_16(
                to + x_to + ROWS_A_COPY * i * BK, valid ? x + k + (int64_t)ROWS_A_COPY * i * a.x_pitch : a.x, valid);
        }
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int i = 0; i < BN / ROWS_A_COPY; i++) {
                const bool valid = inside && ROWS_A_COPY * i < w_rows;
                copy_async_16(to + X_SIZE + p * W_SIZE + (w_to ^ i % 2 * 4 * CHUNK) + ROWS_A_COPY * i * BK,
                    valid ? w + k + (int64_t)ROWS_A_COPY * i * a.k + (int64_t)p * job.n * a.k : a.x, valid);
            }
    };

    // Fragments. The rows of w may be the columns of an mma in any order. With this one a thread ends up with 8
    // neighbouring outputs: column c of the j-th 8 columns is
    //   row 8 (c / 2) + c % 2 + 2 (j % 4) of its 32
    const int warp_m = warp / WARPS_N * WM, warp_n = warp % WARPS_N * WN;
    const int matrix = lane / 8, c = lane % 8;
    const int a_at = (warp_m + lane % 16) * BK, a_chunk = lane / 16;
    const int b_at = X_SIZE + (warp_n + 8 * (c / 2) + c % 2 + matrix / 2 * 2) * BK, b_chunk = matrix % 2;
    float sum[I][J][4] = {}, total[PARTS > 1 ? I : 1][PARTS > 1 ? J : 1][4] = {};
    auto multiply = [&](const bf16* from) {
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int kk = 0; kk < BK / 16; kk++) {
                uint32_t fa[I][4], fb[J / 2][4];
#pragma unroll
                for (int i = 0; i < I; i++)
                    ldmatrix_x4(fa[i], from + a_at + 16 * i * BK + ((2 * kk + a_chunk) ^ c) * CHUNK);
#pragma unroll
                for (int j = 0; j < J / 2; j++)
                    ldmatrix_x4(fb[j],
                        from + p * W_SIZE + b_at + (j / 2 * 32 + j % 2 * 4) * BK + ((2 * kk + b_chunk) ^ c) * CHUNK);
#pragma unroll
                for (int i = 0; i < I; i++)
#pragma unroll
                    for (int j = 0; j < J; j++) {
                        const uint32_t b[2] = {fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]};
                        mma_bf16(sum[i][j], fa[i], b);
                    }
            }
    };

    const int splits = gridDim.y, steps = div_ceil(a.k, BK);
    const int begin = (int)((int64_t)steps * blockIdx.y / splits),
              end = (int)((int64_t)steps * (blockIdx.y + 1) / splits);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (begin + s < end) copy(begin + s);
        copy_async_commit();
    }
    for (int step = begin; step < end; step++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads(); // all have waited, and all are done with the buffer that is filled next
        if (step + STAGES - 1 < end) copy(step + STAGES - 1);
        copy_async_commit();
        multiply(shared + step % STAGES * STAGE);
        if constexpr (PARTS > 1) { // tensor cores cut sums off where f32 rounds: keep theirs short
#pragma unroll
            for (int i = 0; i < I; i++)
#pragma unroll
                for (int j = 0; j < J; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) total[i][j][e] += sum[i][j][e], sum[i][j][e] = 0.0f;
        }
    }
    if constexpr (PARTS > 1) memcpy(sum, total, sizeof sum);

    if (splits > 1) {
        const int64_t tile = (int64_t)blockIdx.z * gridDim.x + blockIdx.x, tiles = (int64_t)gridDim.x * gridDim.z;
        if (!sum_splits<I * J * 4, GEMM_THREADS>(&sum[0][0][0], a.partial, a.counters, tile, tiles)) return;
    }

    Out* y = (Out*)job.y + blockIdx.z * job.y_batch;
#pragma unroll
    for (int q = 0; q < J / 4; q++) {
        const int col = n0 + warp_n + 32 * q + lane % 4 * 8;
        if (col >= job.n) continue;
#pragma unroll
        for (int i = 0; i < 2 * I; i++) {
            const int row = m0 + warp_m + 8 * i + lane / 4;
            float v[8];
#pragma unroll
            for (int e = 0; e < 8; e++) v[e] = sum[i / 2][4 * q + e / 2][i % 2 * 2 + e % 2];
            if (row >= a.tokens) continue;
            if (job.bias) add_8(v, job.bias + col);
            store_8<ADD>(y + (int64_t)row * job.y_pitch + col, v);
        }
    }
}

#define GEMM(name, Out, ADD, BM, BN, WM, WN, STAGES, PARTS, SHARED)                                                    \
    static_assert(SHARED == STAGES * (BM + PARTS * BN) * BK * 2, "shared memory of " #name);                           \
    KERNEL_TILE(name, BM, BN)                                                                                          \
    KERNEL(name, GEMM_THREADS, SHARED, const __grid_constant__ Gemm a) {                                               \
        gemm<Out, ADD, BM, BN, WM, WN, STAGES, PARTS>(a);                                                              \
    }
#define GEMM_TILES(out, Out, ADD)                                                                                      \
    GEMM(gemm_##out##_m32n128, Out, ADD, 32, 128, 32, 32, 4, 1, 81920)                                                 \
    GEMM(gemm_##out##_m64n64, Out, ADD, 64, 64, 32, 32, 4, 1, 65536)                                                   \
    GEMM(gemm_##out##_m64n128, Out, ADD, 64, 128, 32, 64, 4, 1, 98304)                                                 \
    GEMM(gemm_##out##_m128n128, Out, ADD, 128, 128, 64, 64, 3, 1, 98304)
GEMM_TILES(bf16_set, bf16, false)
GEMM_TILES(f32_set, float, false)
GEMM_TILES(f32_add, float, true)
GEMM(gemm_split3_m64n64, float, false, 64, 64, 32, 32, 3, 3, 98304)

constexpr int SPLIT_THREADS = 256;

// parts [3][count] bf16: the smallest first, as sums begin with it; w [count] f32 is the sum of the three.
KERNEL(split_f32, SPLIT_THREADS, 0, const float* w, bf16* parts, int count) {
    begin_kernel();
    const int i = blockIdx.x * SPLIT_THREADS + threadIdx.x;
    if (i >= count) return;
    float rest = w[i];
#pragma unroll
    for (int p = 2; p >= 0; p--) {
        const bf16 part = to_bf16(rest);
        parts[(int64_t)p * count + i] = part;
        rest -= to_f32(part);
    }
}
