// The product of hyper-connections for many tokens, on tensor cores (streams.cu has it for few):
//
//   shares[t, row] = (w[row] . x[t]) rms(x[t]) scale + base
//
// x [T, width], w [rows, width] f32, rows <= PRODUCT_ROWS. Both are split into two bf16 numbers, the rounded one and
// what rounding left, as they come from shared memory: products are as good as with 16 bits of mantissa. The sum of
// squares is f32.
//
//   streams_product_tile    grid (ceil(T / PRODUCT_TILE))
#include "attention.cuh"
#include "streams.cuh"

constexpr int PRODUCT_TILE = 32, PRODUCT_THREADS = 128; // tokens of a block; two warps to 16, half of a stage each
constexpr int PRODUCT_STEP = 128, PRODUCT_STAGES = 3, STAGE_PITCH = PRODUCT_STEP + 8,
              STAGE_NUMBERS = (PRODUCT_TILE + PRODUCT_ROWS) * STAGE_PITCH;

#define PRODUCT_SHARED 91392
KERNEL(streams_product_tile, PRODUCT_THREADS, PRODUCT_SHARED, PRODUCT_ARGUMENTS) {
    static_assert(PRODUCT_SHARED == PRODUCT_STAGES * STAGE_NUMBERS * 4, "shared memory");
    static_assert(PRODUCT_ROWS % 8 == 0, "tiles of 8 rows");
    constexpr int TILES = PRODUCT_ROWS / 8;
    DYNAMIC_SHARED(float, shared);
    begin_kernel();
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, m = warp % 2, half = warp / 2;
    const int first = blockIdx.x * PRODUCT_TILE, steps = div_ceil(width, PRODUCT_STEP);
    auto copy = [&](int step) {
        float* stage = shared + step % PRODUCT_STAGES * STAGE_NUMBERS;
        if (step < steps) {
            constexpr int FOURS = PRODUCT_STEP / 4;
            for (int at = tid; at < (PRODUCT_TILE + PRODUCT_ROWS) * FOURS; at += PRODUCT_THREADS) {
                const int row = at / FOURS, col = at % FOURS * 4, k = step * PRODUCT_STEP + col,
                          of = row - PRODUCT_TILE;
                const float* from =
                    of < 0 ? x + (size_t)min(first + row, tokens - 1) * width : w + (size_t)min(of, rows - 1) * width;
                copy_async_16(stage + row * STAGE_PITCH + col, from + min(k, width - 4), k < width);
            }
        }
        copy_async_commit();
    };
#pragma unroll
    for (int step = 0; step < PRODUCT_STAGES - 1; step++) copy(step);

    // Of tokens lane / 4 and 8 further, and rows 8 n + 2 (lane % 4) and the next.
    float sums[TILES][4] = {}, squares[2] = {};
    for (int step = 0; step < steps; step++) {
        copy_async_wait<PRODUCT_STAGES - 2>();
        __syncthreads();
        copy(step + PRODUCT_STAGES - 1);
        const float* stage = shared + step % PRODUCT_STAGES * STAGE_NUMBERS + lane / 4 * STAGE_PITCH +
            half * PRODUCT_STEP / 2 + lane % 4 * 2;
#pragma unroll
        for (int k = 0; k < PRODUCT_STEP / 2; k += 16) {
            uint32_t high[4], low[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 v =
                    *reinterpret_cast<const float2*>(stage + (m * 16 + i % 2 * 8) * STAGE_PITCH + k + i / 2 * 8);
                const Split parts = split(v.x, v.y);
                high[i] = parts.high, low[i] = parts.low;
                squares[i % 2] += v.x * v.x + v.y * v.y;
            }
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const float* of = stage + (PRODUCT_TILE + n * 8) * STAGE_PITCH + k;
                const float2 left = *reinterpret_cast<const float2*>(of),
                             right = *reinterpret_cast<const float2*>(of + 8);
                const Split a = split(left.x, left.y), b = split(right.x, right.y);
                const uint32_t of_high[2] = {a.high, b.high}, of_low[2] = {a.low, b.low};
                mma_bf16(sums[n], high, of_high);
                mma_bf16(sums[n], low, of_high);
                mma_bf16(sums[n], high, of_low);
            }
        }
    }
    copy_async_wait<0>();
    __syncthreads();

    // The halves' sums meet in shared memory: [half, tokens, rows and squares].
    constexpr int PITCH = PRODUCT_ROWS + 1;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float* to = shared + (half * PRODUCT_TILE + m * 16 + lane / 4 + 8 * i) * PITCH;
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            to[n * 8 + lane % 4 * 2] = sums[n][2 * i];
            to[n * 8 + lane % 4 * 2 + 1] = sums[n][2 * i + 1];
        }
        const float all = quad_sum(squares[i]);
        if (lane % 4 == 0) to[PRODUCT_ROWS] = all;
    }
    __syncthreads();
    for (int at = tid; at < PRODUCT_TILE * rows; at += PRODUCT_THREADS) {
        const int t = at / rows, row = at % rows;
        if (first + t >= tokens) break;
        const float *a = shared + t * PITCH, *b = a + PRODUCT_TILE * PITCH;
        shares[(size_t)(first + t) * rows + row] = (a[row] + b[row]) *
                rsqrtf((a[PRODUCT_ROWS] + b[PRODUCT_ROWS]) / width + eps) * scale[min(row / streams, 2)] +
            base[row];
    }
}
