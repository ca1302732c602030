// The product of a band of packed tiles and up to TOKENS rows of activations: what a block of 128 threads does in
// experts_gemm.cu and packed_linear.cu.
//
// Weights (rows) are the left operand, tokens the columns. Each stage of K inputs comes through shared memory by
// asynchronous copies, STAGES deep: the lines of 8 tiles as they lie, their scales, and the activations' rows. A stage
// is multiplied in one of three ways:
//
//   few tokens     a warp has 2 tiles and brings both operands; codes meet activations as they are, scales are applied
//                  to the sums of a span
//   more           warps are laid out WARPS_M x WARPS_N, one has WARP_TILES tiles x WARP_TOKENS tokens; scales are
//                  applied to the weights
//   many, Hopper   a warp brings 2 tiles, scaled; the tensor cores read the tokens of the four from shared memory
//                  (wgmma)
//
// Weights of ANY_ROW come through registers: each warp reads a unit of 2 tiles (packed_rows.cuh) while the stage before
// is multiplied, and writes the weights, scaled, as rows of bf16 to shared memory. There they are what the tokens are,
// so that no product depends on a format, and wgmma reads both.
//
// Chunks of 16 bytes are stored so that neither the lines (8-byte reads: two rows of lines t, t + 4, ...) nor the rows
// (16-byte reads: 8 inputs) meet in a bank.
#pragma once
#include "packed_sums.cuh"

constexpr int GEMM_THREADS = 128, BLOCK_TILES = 8;

// Blocks to a multiprocessor that registers shall suffice for.
constexpr int gemm_blocks(Format format, int tokens) {
    const int blocks = tokens <= 8 && format != ANY_ROW ? 5 : tokens <= 32 ? 4 : tokens <= 64 ? 3 : 2;
    return format == ANY_ROW && tokens <= 64 ? blocks - 1 : blocks;
}

// Faster than mma from here on, for all formats.
#ifdef HAS_WGMMA
constexpr bool use_wgmma(int tokens) { return tokens >= 64; }
#else
constexpr bool use_wgmma(int) { return false; }
#endif

// With more, fewer blocks have room; on cards other than Hopper a block has 99 KB at most.
constexpr int gemm_stages(Format format, int tokens) {
    if (format == ANY_ROW) return tokens > 64 && !use_wgmma(tokens) ? 3 : 4;
    if (has_4_bits(format)) return !use_wgmma(tokens) ? 4 : tokens == 64 ? 6 : 5;
    return tokens <= 16 ? 4 : 3;
}

// SPAN: inputs that share a scale for certain, 32 for groups of 32 and 64 for groups of 64 and 128.
template <Format F_, int SPAN_, int TOKENS_> struct GemmShape {
    static constexpr Format F = F_;
    static constexpr int SPAN = SPAN_, TOKENS = TOKENS_, STAGES = gemm_stages(F, TOKENS),
                         K = F == BF16 || F == ANY_ROW || TOKENS >= 64 ? 64 : 128;
    static constexpr bool ROWS = F == ANY_ROW, WGMMA = use_wgmma(TOKENS), DEALT = false,
                          SCALE_SUMS = F != BF16 && !ROWS && SPAN == 64 && TOKENS <= 16;
    static constexpr int WARPS_N = TOKENS == 128 && !WGMMA ? 2 : 1, WARPS_M = 4 / WARPS_N;
    static constexpr int WARP_TILES = BLOCK_TILES / WARPS_M, WARP_TOKENS = TOKENS / WARPS_N, COLUMNS = WARP_TOKENS / 8;
    static constexpr int TOKENS_STEP = TOKENS > 64 ? 32 : 16; // between sizes of a wgmma
    static constexpr int BLOCK_LINES = Lines<F>::PER_BLOCK, LINES = K / K_BLOCK * BLOCK_LINES,
                         CODE_BIAS = code_bias<F>(), TILE_BYTES = ROWS ? TILE_ROWS * K * 2 : LINES * LINE_BYTES;
    static constexpr int SPANS = F == BF16 || ROWS ? 0 : K / SPAN;
    // Shared memory: the rows of all stages, which wgmma wants aligned to 1024 bytes, then the lines, of ANY_ROW the
    // weights of two stages, then the scales or the grid.
    static constexpr int ROWS_BYTES = TOKENS * K * 2, LINES_BYTES = BLOCK_TILES * TILE_BYTES,
                         SCALES_BYTES = BLOCK_TILES * SPANS * 32;
    static constexpr int LINES_AT = STAGES * ROWS_BYTES, SCALES_AT = LINES_AT + (ROWS ? 2 : STAGES) * LINES_BYTES,
                         SHARED_BYTES = SCALES_AT + (ROWS ? GRID_BYTES : STAGES * SCALES_BYTES);
    static_assert(SHARED_BYTES <= 99 << 10 || WGMMA, "what every card has");

    struct Stage {
        unsigned char *rows, *lines, *scales;
    };
    static __device__ __forceinline__ Stage stage(unsigned char* shared, int slot) {
        return {shared + slot * ROWS_BYTES, shared + LINES_AT + slot * LINES_BYTES,
            shared + SCALES_AT + slot * SCALES_BYTES};
    }
};
template <class S> using Sums = float[S::WARP_TILES][S::COLUMNS][4];

// Where 8 weights of ANY_ROW lie: row r of a tile is row r / 2 + r % 2 * 8 here, as the instructions count. For mma,
// the places of chunks make reads of a row's chunks and writes of a unit meet in no bank. For wgmma, the first tiles of
// a warpgroup's four warps lie in front of the second ones: 64 rows to a product.
template <class S> __device__ __forceinline__ int swizzle_weights(int tile, int row, int chunk) {
    if (S::WGMMA) {
        const int place = tile % 2 * (BLOCK_TILES / 2) + tile / 2;
        return place * S::TILE_BYTES + row * 128 + swizzle_row<S>(row, chunk);
    }
    const int moved = ((row ^ row >> 1) & 1) * 4 | (row & 2) | (row >> 2 & 1);
    return tile * S::TILE_BYTES + row * 128 + (chunk ^ moved) * 16;
}

// The tiles of ANY_ROW that a block multiplies.
struct RowBand {
    const uint8_t* weights;
    TileBytes bytes;
    int tiles, k, group_shift;
};

// A warp's two units of a stage; past the last tile it stands in.
__device__ __forceinline__ void load_units(RowUnit (&units)[2], const RowBand& band, int stage, int format) {
    const int tile = threadIdx.x / WARP * 2;
    with_row(format, [&](auto f) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            constexpr Format F = decltype(f)::value;
            const uint8_t* from = band.weights + (size_t)min(tile + i, band.tiles - 1) * band.bytes.all;
            load_row_unit<F, 1>(units[i], row_place<F, 1>(from, stage, band.k, band.group_shift, band.bytes.scales));
        }
    });
}

// The weights of a lane in a unit, scaled and rounded once: of rows 4q .. 4q + 3 its 8 inputs.
template <Format F>
__device__ __forceinline__ void unpack_unit(uint4 (&weights)[4], const RowUnit& unit, const uint32_t* grid, bool f16) {
    float2 scales[1][4];
    row_scales<F>(unit, f16, scales);
#pragma unroll
    for (int r = 0; r < 4; r++) {
        uint32_t four[2], pairs[4];
        row_codes<F>(unit, r, grid, four);
        const float2 by = for_numbers<F>(scales[0][r]);
#pragma unroll
        for (int p = 0; p < 4; p++)
            pairs[p] =
                pack_bf16(row_number<F>(four, 2 * p) * by.x + by.y, row_number<F>(four, 2 * p + 1) * by.x + by.y);
        weights[r] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}
template <class S>
__device__ __forceinline__ void store_weights(unsigned char* to, int tile, const uint4 (&weights)[4]) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const int row = g % 4 * 2 + r / 2 + r % 2 * 8; // 4q + r
        *reinterpret_cast<uint4*>(to + swizzle_weights<S>(tile, row, g / 4 * 4 + t)) = weights[r];
    }
}

// A warp's two units of a stage, to shared memory.
template <class S>
__device__ __forceinline__ void store_units(
    unsigned char* to, const RowUnit (&units)[2], const uint32_t* grid, const Packing& packing) {
    const int tile = threadIdx.x / WARP * 2;
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
        const RowUnit unit = i ? units[1] : units[0];
        uint4 weights[4];
        with_row(packing.format, [&](auto f) { unpack_unit<decltype(f)::value>(weights, unit, grid, packing.f16); });
        store_weights<S>(to, tile + i, weights);
    }
}

// Columns past `columns` have no tokens.
template <class S>
__device__ __forceinline__ void multiply(Sums<S>& acc, const typename S::Stage& stage, const LanePlaces<S>& places,
    const StageScales<S>& scales, int columns) {
    const int tile = threadIdx.x / WARP / S::WARPS_N * S::WARP_TILES;
#pragma unroll
    for (int b = 0; b < S::K / K_BLOCK; b++) {
        uint32_t a[S::WARP_TILES][2][4];
#pragma unroll
        for (int i = 0; i < S::WARP_TILES; i++) {
            if constexpr (S::ROWS) {
                const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const uint4 row = *reinterpret_cast<const uint4*>(
                        stage.lines + swizzle_weights<S>(tile + i, g + 8 * half, 4 * b + t));
                    a[i][0][half] = row.x, a[i][0][half + 2] = row.y;
                    a[i][1][half] = row.z, a[i][1][half + 2] = row.w;
                }
            } else {
                places.template operand<true>(places.raw(stage, 0, i, b), a[i]);
                if constexpr (S::F != BF16)
                    scale_operand(a[i], two_scales<S>(stage, scales.place, i, b * K_BLOCK / S::SPAN), scales.f16);
            }
        }
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j++) {
            if (j >= columns) break;
            uint32_t inputs[2][2];
            places.load(stage, j * 8, b, inputs);
#pragma unroll
            for (int i = 0; i < S::WARP_TILES; i++) mma_bf16(acc[i][j], a[i][0], inputs[0]);
#pragma unroll
            for (int i = 0; i < S::WARP_TILES; i++) mma_bf16(acc[i][j], a[i][1], inputs[1]);
        }
    }
}

#ifdef HAS_WGMMA
// All tokens with weights of ANY_ROW, from `lines` on. When it returns, the products are
// under way and still read the stage.
template <class S, int C>
__device__ __forceinline__ void multiply_rows_wgmma(
    float (&acc)[2][C][4], const unsigned char* lines, const unsigned char* rows) {
    const uint64_t a = wgmma_operand(lines), b = wgmma_operand(rows);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < S::K / 16; step++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            wgmma<S::TOKENS>(acc[i], wgmma_further(a, i * (BLOCK_TILES / 2 * S::TILE_BYTES) + step * 32),
                wgmma_further(b, step * 32));
    wgmma_commit();
}

// What a lane reads of two tiles' lines for 16 inputs: rows 2g and 2g + 1 of each tile, in both halves of the inputs.
// Lane (g, t) brings inputs 2t, 2t + 1, 2t + 8, 2t + 9: rows in shared memory are read in the instruction's own order.
template <class S>
__device__ __forceinline__ void load_lines(uint2 (&raw)[2][2], const typename S::Stage& stage, int tile, int step) {
    constexpr int HALF = Lines<S::F>::PER_BLOCK / 4; // lines of 8 inputs
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    const uint32_t own = (Lines<S::F>::FOUR_BITS ? 0 : S::F == INT8 ? t / 2 : t) * LINE_BYTES + g * 8;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            raw[i][half] = *reinterpret_cast<const uint2*>(
                stage.lines + (tile + i) * S::TILE_BYTES + (2 * step + half) * HALF * LINE_BYTES + own);
}

// What a lane brings of a warp's two tiles: rows 2g and 2g + 1 of each, the left operand of products of 16 inputs.
template <class S> struct WgmmaWeights {
    static_assert(S::K == 64 && S::WARP_TILES == 2, "rows of 128 bytes; 64 rows of weights to a product");
    static constexpr int STEPS = S::K / 16;
    uint2 raw[2][2];
    uint32_t read[2] = {};
    RowScales scales[2];
    bool f16;

    __device__ __forceinline__ explicit WgmmaWeights(bool f16) : f16(f16) {}

    __device__ __forceinline__ void load(const typename S::Stage& stage, int step) {
        const int tile = threadIdx.x / WARP * 2;
        load_lines<S>(raw, stage, tile, step);
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (S::F != BF16 && step * 16 % S::SPAN == 0)
                read[i] = two_scales<S>(stage, place_of_scales<S>(0), tile + i, step * 16 / S::SPAN);
    }

    // Of the step that was loaded, scaled.
    __device__ __forceinline__ void operands(int step, uint32_t (&a)[2][4]) {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (S::F != BF16 && step * 16 % S::SPAN == 0) scales[i] = {read[i], Lines<S::F>::F16_SCALES && f16};
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const uint2 from = raw[i][c / 2];
                a[i][c] = packed_pair<S::F>(c % 2 ? from.y : from.x, t);
            }
            if constexpr (S::F != BF16) scales[i].scale(a[i], Lines<S::F>::F16_SCALES); // no branch
        }
    }
};

// Products of the first N tokens with a stage. Weights of a step are made while the one before is multiplied.
template <class S, int N, int C>
__device__ __forceinline__ void multiply_wgmma(float (&acc)[2][C][4], const typename S::Stage& stage, bool f16) {
    constexpr int STEPS = WgmmaWeights<S>::STEPS;
    WgmmaWeights<S> weights(f16);
    weights.load(stage, 0);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        uint32_t a[2][4];
        weights.operands(step, a);
        if (step + 1 < STEPS) weights.load(stage, step + 1);
        const uint64_t rows = wgmma_operand(stage.rows + step * 32);
        wgmma_fence();
        wgmma<N>(acc[0], a[0], rows);
        wgmma<N>(acc[1], a[1], rows);
        wgmma_commit();
        wgmma_wait<1>();
    }
}
#endif

// `weights`: the first tile of the band, of which `tiles` exist. `input_row(i)`: row of x for token i, or -1. Calls
// finish(acc, tile, token, row) in every warp with its sums: fragments of tiles x columns, from `tile` and `token` of
// the block on; of a tile, a lane has `row` and `row` + 1 where the instruction says g and g + 8.
template <class S, class InputRow, class Finish>
__device__ __forceinline__ void packed_gemm(const uint8_t* weights, int tiles, int k, const Packing& packing,
    const bf16* x, int x_pitch, int tokens, InputRow input_row, Finish finish) {
    DYNAMIC_SHARED_ALIGNED(unsigned char, shared, 1024);
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, g = lane / 4, t = lane % 4;
    const TileBytes bytes = tile_bytes_of<S::F>(k, packing);
    const uint32_t tile_stride = bytes.all, codes = bytes.scales;
    [[maybe_unused]] const int group_shift = shift_of_group(packing);
    const bool f16 = Lines<S::F>::F16_SCALES && packing.f16;

    // What this thread copies of each stage: the same chunk of every so many tiles, where that goes evenly.
    constexpr int TILE_CHUNKS = S::TILE_BYTES / 16, TILE_STEP = GEMM_THREADS / TILE_CHUNKS,
                  TILE_COPIES = BLOCK_TILES / TILE_STEP;
    static_assert(GEMM_THREADS % TILE_CHUNKS == 0, "chunks are dealt out evenly");
    const int chunk = tid % TILE_CHUNKS, chunk_tile = tid / TILE_CHUNKS,
              chunk_k = chunk / (Lines<S::F>::PER_BLOCK * 4) * K_BLOCK;
    [[maybe_unused]] const uint8_t* chunk_from = weights + (size_t)chunk_tile * tile_stride + codes + chunk * 16;
    [[maybe_unused]] const uint32_t chunk_to = chunk_tile * S::TILE_BYTES + swizzle_line<S>(chunk * 16);

    constexpr int ROW_CHUNKS = S::K / 8, ROW_STEP = GEMM_THREADS / ROW_CHUNKS,
                  ROW_COPIES = div_ceil(S::TOKENS, ROW_STEP);
    static_assert((ROW_COPIES * ROW_STEP == S::TOKENS || ROW_COPIES == 1) && ROW_STEP % (S::WGMMA ? 8 : 2) == 0,
        "rows are dealt out evenly, of one kind to a thread");
    const int row_chunk = tid % ROW_CHUNKS, first_row = tid / ROW_CHUNKS;
    uint32_t row_from[ROW_COPIES]; // in chunks of 8 inputs
#pragma unroll
    for (int i = 0; i < ROW_COPIES; i++) {
        const int row = input_row(first_row + i * ROW_STEP);
        row_from[i] = row < 0 ? ~0u : (uint32_t)row * (uint32_t)(x_pitch / 8) + row_chunk;
    }
    const uint32_t row_to = first_row * S::K * 2 + swizzle_row<S>(first_row, row_chunk);

    auto copy_stage = [&](int k0, int slot) {
        const typename S::Stage to = S::stage(shared, slot);
        if constexpr (!S::ROWS) {
            const bool lines_there = k0 + chunk_k < k;
            const uint8_t* from = chunk_from + (size_t)(k0 / K_BLOCK) * (Lines<S::F>::PER_BLOCK * LINE_BYTES);
#pragma unroll
            for (int i = 0; i < TILE_COPIES; i++) {
                const bool there = lines_there && chunk_tile + i * TILE_STEP < tiles;
                copy_async_16(to.lines + chunk_to + i * TILE_STEP * S::TILE_BYTES,
                    there ? from + (size_t)(i * TILE_STEP) * tile_stride : weights, there);
            }
        }
        if (S::SPANS && tid < BLOCK_TILES * S::SPANS * 2) {
            constexpr int SPANS = S::SPANS ? S::SPANS : 1;
            const int tile = tid / (SPANS * 2), at = k0 + tid / 2 % SPANS * S::SPAN;
            const bool there = at < k && tile < tiles;
            copy_async_16(to.scales + tid * 16,
                there ? weights + (size_t)tile * tile_stride + (at >> group_shift) * 32 + tid % 2 * 16 : weights,
                there);
        }
        const bool inputs_there = k0 + row_chunk * 8 < k;
        if (S::TOKENS < ROW_STEP && first_row >= S::TOKENS) return;
#pragma unroll
        for (int i = 0; i < ROW_COPIES; i++) {
            const bool there = inputs_there && row_from[i] != ~0u;
            copy_async_16(
                to.rows + row_to + i * ROW_STEP * S::K * 2, there ? x + ((size_t)row_from[i] + k0 / 8) * 8 : x, there);
        }
    };

    [[maybe_unused]] uint32_t* grid = reinterpret_cast<uint32_t*>(shared + S::SCALES_AT);
    Sums<S> acc;
#pragma unroll
    for (int i = 0; i < S::WARP_TILES; i++)
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) acc[i][j][c] = 0.0f;

    auto each_stage = [&](auto multiply_stage) {
        // wgmma may still read the rows of the stage before, so one stage less is on its way; ANY_ROW waits for it.
        constexpr int AHEAD = S::STAGES - (S::WGMMA && !S::ROWS ? 2 : 1);
        const int steps = div_ceil(k, S::K);
#pragma unroll
        for (int s = 0; s < AHEAD; s++) {
            if (s < steps) copy_stage(s * S::K, s);
            copy_async_commit();
        }
        int read = 0, write = AHEAD;
        [[maybe_unused]] RowUnit units[2];
        auto load = [&](int s) {
            if constexpr (S::ROWS) load_units(units, RowBand{weights, bytes, tiles, k, group_shift}, s, packing.format);
        };
        load(0);
        if constexpr (S::ROWS) {
            copy_grid(grid, packing.grid, grid_words(packing.format));
            __syncthreads();
        }
        for (int s = 0; s < steps; s++) {
            if constexpr (S::ROWS) {
                // The stage before the last one had this place: all have read it.
                store_units<S>(shared + S::LINES_AT + s % 2 * S::LINES_BYTES, units, grid, packing);
                if (s + 1 < steps) load(s + 1);
            }
            copy_async_wait<AHEAD - 1>();
            if (S::WGMMA) shared_to_async();
#ifdef HAS_WGMMA
            if (S::WGMMA && S::ROWS) wgmma_wait<0>();
#endif
            __syncthreads();
            if (s + AHEAD < steps) copy_stage((s + AHEAD) * S::K, write);
            copy_async_commit();
            typename S::Stage stage = S::stage(shared, read);
            if constexpr (S::ROWS) stage.lines = shared + S::LINES_AT + s % 2 * S::LINES_BYTES;
            multiply_stage(stage);
            read = read + 1 == S::STAGES ? 0 : read + 1;
            write = write + 1 == S::STAGES ? 0 : write + 1;
        }
    };
    const int warp_m = warp / S::WARPS_N, warp_n = warp % S::WARPS_N;
#ifdef HAS_WGMMA
    if constexpr (S::WGMMA) {
        auto all = [&](auto n) {
            each_stage([&](const typename S::Stage& stage) {
                if constexpr (S::ROWS)
                    multiply_rows_wgmma<S>(acc, stage.lines, stage.rows);
                else
                    multiply_wgmma<S, decltype(n)::value>(acc, stage, f16);
            });
            wgmma_wait<0>(); // here: where sizes meet, sums may move to other registers
            wgmma_landed(acc[0]);
            wgmma_landed(acc[1]);
        };
        // The fewest columns that hold the tokens; below half of a tile nothing is saved.
        auto fewest = [&](auto n, auto& next) {
            constexpr int N = decltype(n)::value;
            if (N == S::TOKENS || tokens <= N)
                all(n);
            else if constexpr (N < S::TOKENS)
                next(Constant<N + S::TOKENS_STEP>{}, next);
        };
        // One size of ANY_ROW: its decoders are long.
        fewest(Constant<S::ROWS ? S::TOKENS : S::TOKENS / 2>{}, fewest);
    } else
#endif
        if constexpr (S::SCALE_SUMS) {
        const LanePlaces<S> places(warp * S::WARP_TILES, 0);
        StageScales<S> scales(warp * S::WARP_TILES, f16);
        each_stage([&](const typename S::Stage& stage) { multiply_scaling_sums<S>(acc, stage, 0, places, scales); });
    } else {
        const LanePlaces<S> places(warp_m * S::WARP_TILES, warp_n * S::WARP_TOKENS);
        const StageScales<S> scales(warp_m * S::WARP_TILES, f16);
        const int columns = min(div_ceil(max(tokens - warp_n * S::WARP_TOKENS, 0), 8), S::COLUMNS); // that have tokens
        each_stage([&](const typename S::Stage& stage) {
            if (S::TOKENS <= 16 || columns == S::COLUMNS)
                multiply<S>(acc, stage, places, scales, S::COLUMNS);
            else
                multiply<S>(acc, stage, places, scales, columns);
        });
    }
    finish(acc, warp_m * S::WARP_TILES, warp_n * S::WARP_TOKENS + 2 * t, 2 * g);
}
