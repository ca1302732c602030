// Attention of a tile of queries over steps of 64 positions, a page: the core of the prefill kernels.
//
//     for each step:  S = Q K^T;  mask at the diagonal;  online softmax;  O += P V
//
// 4 warps, each with 16 * MT rows and all columns: softmax needs no other warp, and P goes from the accumulator into
// the second product without leaving the registers. With MT = 2 a fragment of K or V read from shared memory serves two
// products; with MT = 1 a product waits for shared memory. O takes MT * VD / 2 registers. `Source` brings pages into
// shared memory, step by step: keys(j) and values(j) wait for them, meet the other warps, and start the next copy into
// the room that has become free. Heads whose pages are too large for shared memory take smaller steps.
#pragma once
#include "attention.cuh"

constexpr int TILE_THREADS = 128;

// With WINDOWS a row sees those of its positions that are in its window, otherwise all.
template <int KD, int VD, int MT, bool WINDOWS = false, int STEP = PAGE> struct FlashTile {
    static constexpr int SCORES = STEP / 8; // tiles of 8 columns
    static constexpr int ROWS = 64 * MT, QUERY_PITCH = KD + 8, QUERY_BYTES = ROWS * QUERY_PITCH * 2;

    float o[MT][VD / 8][4], max[MT][2], sum[MT][2];
    int seen, last; // row i of the tile sees the source's positions up to min(seen + i, last), which may be negative
    Window window;

    // Row of the tile of this lane's r-th row of part m.
    static __device__ __forceinline__ int row(int m, int r) {
        return (threadIdx.x / WARP * MT + m) * 16 + threadIdx.x % WARP / 4 + 8 * r;
    }

    __device__ __forceinline__ int seen_by(int i) const { return min(seen + i, last); }

    __device__ __forceinline__ int first_seen_by(int i) const { return first_seen(window, seen + i); }

    // The step that the first row begins with.
    __device__ __forceinline__ int first_step() const { return WINDOWS ? first_seen_by(0) / STEP : 0; }

    __device__ __forceinline__ void begin(int first_seen, int last_position, Window width = {NO_WINDOW, 0}) {
        seen = first_seen;
        last = last_position;
        window = width;
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                max[m][r] = -INFINITY;
                sum[m][r] = 0.0f;
            }
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < VD / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[m][n][i] = 0.0f;
    }

    __device__ __forceinline__ void scores(
        float (&s)[MT][SCORES][4], const bf16* queries, const bf16* keys, int pitch) const {
        const int lane = threadIdx.x % WARP;
        const bf16* mine = queries + threadIdx.x / WARP * 16 * MT * QUERY_PITCH;
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < SCORES; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[m][n][i] = 0.0f;
#pragma unroll
        for (int k = 0; k < KD; k += 16) {
            uint32_t a[MT][4];
#pragma unroll
            for (int m = 0; m < MT; m++) load_a(a[m], mine + m * 16 * QUERY_PITCH + k, QUERY_PITCH, lane);
#pragma unroll
            for (int n = 0; n < SCORES; n += 2) {
                uint32_t b[4];
                load_b_rows(b, keys + n * 8 * pitch + k, pitch, lane);
#pragma unroll
                for (int m = 0; m < MT; m++) mma_pair(s[m][n], s[m][n + 1], a[m], b);
            }
        }
    }

    template <int N> __device__ __forceinline__ void mask(float (&s)[MT][N][4], int first) const {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int position = first + n * 8 + (int)(threadIdx.x % 4) * 2 + i % 2;
                    if (position > seen_by(row(m, i / 2)) || (WINDOWS && position < first_seen_by(row(m, i / 2))))
                        s[m][n][i] = -INFINITY;
                }
    }

    __device__ __forceinline__ void rescale(int m, float2 correction) {
        // Mostly the maxima stay as they are.
        if (!__any_sync(ALL_LANES, correction.x != 1.0f || correction.y != 1.0f)) return;
#pragma unroll
        for (int n = 0; n < VD / 8; n++) {
            o[m][n][0] *= correction.x;
            o[m][n][1] *= correction.x;
            o[m][n][2] *= correction.y;
            o[m][n][3] *= correction.y;
        }
    }

    __device__ __forceinline__ void add_values(const uint32_t (&p)[SCORES / 2][MT][4], const bf16* values, int pitch) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int k = 0; k < SCORES / 2; k++) {
#pragma unroll
            for (int n = 0; n < VD / 8; n += 2) {
                uint32_t b[4];
                load_b_cols(b, values + k * 16 * pitch + n * 8, pitch, lane);
#pragma unroll
                for (int m = 0; m < MT; m++) mma_pair(o[m][n], o[m][n + 1], p[k][m], b);
            }
        }
    }

    // O has the values' columns from `column` on.
    template <class Source>
    __device__ __forceinline__ void run(Source& source, const bf16* queries, float scale_log2, int column = 0) {
        for (int j = first_step(); STEP * j <= last; j++) {
            const int warp_row = threadIdx.x / WARP * 16 * MT, last_row = warp_row + 16 * MT - 1;
            const bool sees = STEP * j <= seen_by(last_row) &&
                (!WINDOWS || STEP * j + STEP > first_seen_by(warp_row)); // the same for the warp
            uint32_t p[SCORES / 2][MT][4];
            const bf16* keys = source.keys(j);
            if (sees) {
                float s[MT][SCORES][4];
                scores(s, queries, keys, Source::KEY_PITCH);
                if (STEP * j + STEP - 1 > seen_by(warp_row) || (WINDOWS && STEP * j < first_seen_by(last_row)))
                    mask(s, STEP * j);
#pragma unroll
                for (int m = 0; m < MT; m++) rescale(m, online_softmax(s[m], max[m], sum[m], scale_log2));
#pragma unroll
                for (int k = 0; k < SCORES / 2; k++)
#pragma unroll
                    for (int m = 0; m < MT; m++) scores_as_a(p[k][m], s[m][2 * k], s[m][2 * k + 1]);
            }
            const bf16* values = source.values(j);
            if (sees) add_values(p, values + column, Source::VALUE_PITCH);
        }
    }

    // out[row of the tile, `pitch` apart][dim], divided by the sums, in which `sink` takes part (sink_of).
    __device__ __forceinline__ void finish(bf16* out, size_t pitch, int dim, int rows, float sink = -INFINITY) const {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float total = quad_sum(sum[m][r]);
                if (sink != -INFINITY)
                    total += fast_exp2(
                        sink - max[m][r]); // of a sink so large that this is infinite nothing is left for others
                const float inverse = 1.0f / total;
                if (row(m, r) >= rows) continue;
                bf16* to = out + row(m, r) * pitch + threadIdx.x % 4 * 2;
#pragma unroll
                for (int n = 0; n < VD / 8; n++) {
                    if (n * 8 < dim)
                        *reinterpret_cast<uint32_t*>(to + n * 8) =
                            pack_bf16(o[m][n][2 * r] * inverse, o[m][n][2 * r + 1] * inverse);
                }
            }
    }
};

// Reads or writes the state of a tile between two segments of its context: max and sum [rows, heads], acc [rows, heads,
// dim]; sums are kept whole, not in shares.
template <bool LOAD, class Tile>
__device__ __forceinline__ void flash_state(
    Tile& work, float* max, float* sum, float* acc, int heads, int dim, int rows) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < (int)(sizeof work.max / sizeof work.max[0]); m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float total = LOAD ? 0.0f : quad_sum(work.sum[m][r]);
            const int row = Tile::row(m, r);
            if (row >= rows) continue;
            const size_t at = (size_t)row * heads;
            if (LOAD) {
                work.max[m][r] = max[at];
                work.sum[m][r] = t == 0 ? sum[at] : 0.0f;
            } else if (t == 0) {
                max[at] = work.max[m][r];
                sum[at] = total;
            }
#pragma unroll
            for (int n = 0; n < (int)(sizeof work.o[0] / sizeof work.o[0][0]); n++) {
                if (n * 8 >= dim) continue;
                float2* two = reinterpret_cast<float2*>(acc + at * dim + n * 8 + t * 2);
                if (LOAD) {
                    const float2 x = *two;
                    work.o[m][n][2 * r] = x.x;
                    work.o[m][n][2 * r + 1] = x.y;
                } else {
                    *two = make_float2(work.o[m][n][2 * r], work.o[m][n][2 * r + 1]);
                }
            }
        }
}
