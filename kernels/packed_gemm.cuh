// The product of a band of packed tiles and up to TOKENS rows of activations: what a block of 128 threads does in experts_gemm.cu and packed_linear.cu.
//
// Weights (rows) are the left operand, tokens the columns. Each stage of K inputs comes through shared memory by asynchronous copies, STAGES deep: the lines
// of 8 tiles as they lie, their scales, and the activations' rows. Warps are laid out WARPS_M x WARPS_N; one has WARP_TILES tiles x WARP_TOKENS tokens.
// Chunks of 16 bytes are stored so that neither the lines (8-byte reads: two rows of lines t, t + 4, ...) nor the rows (16-byte reads: 8 inputs) meet in a bank.
#pragma once
#include "packed_tile.cuh"

#ifndef WARPS_N_128
#define WARPS_N_128 2
#endif
#ifndef WARPS_N_64
#define WARPS_N_64 1
#endif
#ifndef STAGES_128
#define STAGES_128 4
#endif
#ifndef STAGES_64
#define STAGES_64 4
#endif
#ifndef LATE_TO
#define LATE_TO 16
#endif
#ifndef PARTIAL_FROM
#define PARTIAL_FROM 32
#endif
#ifndef WGMMA_DRAIN
#define WGMMA_DRAIN 0
#endif
#ifndef WGMMA_FROM
#define WGMMA_FROM 1000 // tokens
#endif
#ifdef HAS_WGMMA
#undef WARPS_N_128
#define WARPS_N_128 (WGMMA_FROM <= 128 ? 1 : 2)
#endif

constexpr int GEMM_THREADS = 128, BLOCK_TILES = 8;

// Blocks to a multiprocessor that registers shall suffice for.
constexpr int gemm_blocks(int tokens) { return tokens <= 32 ? 4 : tokens <= 64 ? 3 : 2; }

// SPAN: inputs that share a scale for certain, 32 for groups of 32 and 64 for groups of 64 and 128.
template <Format F_, int SPAN_, int TOKENS_, int K_, int STAGES_, int WARPS_N_> struct GemmShape {
    static constexpr Format F = F_;
    static constexpr int SPAN = SPAN_, TOKENS = TOKENS_, K = K_, STAGES = STAGES_, WARPS_N = WARPS_N_;
    static constexpr int WARPS_M = 4 / WARPS_N, WARP_TILES = BLOCK_TILES / WARPS_M, WARP_TOKENS = TOKENS / WARPS_N, COLUMNS = WARP_TOKENS / 8;
    static constexpr int LINES = K / K_BLOCK * Lines<F>::PER_BLOCK, TILE_BYTES = LINES * LINE_BYTES;
    static constexpr int SPANS = F == BF16 ? 0 : K / SPAN;
    // Shared memory: the rows of all stages, then the lines, then the scales.
    static constexpr int ROWS_BYTES = TOKENS * K * 2, LINES_BYTES = BLOCK_TILES * TILE_BYTES, SCALES_BYTES = BLOCK_TILES * SPANS * 32;
    static constexpr int LINES_AT = STAGES * ROWS_BYTES, SCALES_AT = LINES_AT + STAGES * LINES_BYTES, SHARED = SCALES_AT + STAGES * SCALES_BYTES;
    // Few tokens: scales are applied to the sums of a span, many: to the weights.
    static constexpr bool LATE = F != BF16 && SPAN == 64 && TOKENS <= LATE_TO;
#ifdef HAS_WGMMA
    static constexpr bool WGMMA = WGMMA_FROM <= TOKENS; // products of the warpgroup: each warp has 2 tiles and all tokens
    static_assert(!WGMMA || (K == 64 && WARPS_N == 1), "what wgmma_rows describes");
#else
    static constexpr bool WGMMA = false;
#endif
};

// Where byte `at` of a tile's lines lies in shared memory: its 16-byte chunk moves within 128 bytes.
template <Format F> __device__ __forceinline__ uint32_t swizzle_line(uint32_t at) {
    const uint32_t line = at / LINE_BYTES;
    return at ^ (F == INT4 ? (line >> 1 & 1) : F == INT8 ? (line >> 1 & 3) : (line >> 2 & 3)) * 32;
}

// `weights`: the first tile of the band, of which `tiles` exist. `row_of(i)`: row of x for token i, or -1. Calls finish(acc, tile, token) in every warp with
// its sums (fragments of tiles x columns; rows 2g and 2g + 1 of a tile where the instruction says g and g + 8) and where they begin in the block.
template <class S, class RowOf, class Finish>
__device__ __forceinline__ void packed_gemm(const uint8_t* weights, int tiles, int k, int group, const bf16* x, int x_pitch, int tokens, RowOf row_of,
                                            Finish finish) {
    DYNAMIC_SHARED(unsigned char, shared);
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, g = lane / 4, t = lane % 4;
    const int warp_m = warp / S::WARPS_N, warp_n = warp % S::WARPS_N;
    const uint32_t tile_stride = tile_bytes<S::F>(k, group), codes = scale_bytes<S::F>(k, group);
    const int group_shift = S::F == BF16 ? 0 : 31 - __clz(group);

    // What this thread copies of each stage.
    constexpr int TILE_CHUNKS = S::TILE_BYTES / 16, TILE_STEP = GEMM_THREADS / TILE_CHUNKS, TILE_COPIES = BLOCK_TILES / TILE_STEP;
    static_assert(GEMM_THREADS % TILE_CHUNKS == 0, "a thread copies the same chunk of every so many tiles");
    const int chunk = tid % TILE_CHUNKS, chunk_tile = tid / TILE_CHUNKS, chunk_k = chunk / (Lines<S::F>::PER_BLOCK * 4) * K_BLOCK;
    const uint8_t* chunk_from = weights + (size_t)chunk_tile * tile_stride + codes + chunk * 16;
    const uint32_t chunk_to = chunk_tile * S::TILE_BYTES + swizzle_line<S::F>(chunk * 16);

    constexpr int ROW_CHUNKS = S::K / 8, ROW_STEP = GEMM_THREADS / ROW_CHUNKS, ROW_COPIES = S::TOKENS / ROW_STEP;
    static_assert(ROW_COPIES * ROW_STEP == S::TOKENS && ROW_STEP % 2 == 0, "rows are dealt out evenly, of one parity to a thread");
    const int row_chunk = tid % ROW_CHUNKS, first_row = tid / ROW_CHUNKS;
    uint32_t row_from[ROW_COPIES]; // in chunks of 8 inputs
#pragma unroll
    for (int i = 0; i < ROW_COPIES; i++) {
        const int row = row_of(first_row + i * ROW_STEP);
        row_from[i] = row < 0 ? ~0u : (uint32_t)row * (uint32_t)(x_pitch / 8) + row_chunk;
    }
    static_assert(!S::WGMMA || ROW_STEP % 8 == 0, "the rows of a thread are of one kind");
    const uint32_t row_to = first_row * S::K * 2 + (row_chunk ^ (S::WGMMA ? first_row & 7 : (first_row & 1) * 4)) * 16;

    auto copy_stage = [&](int k0, int slot) {
        unsigned char* const rows_to = shared + slot * S::ROWS_BYTES;
        unsigned char* const lines_to = shared + S::LINES_AT + slot * S::LINES_BYTES;
        unsigned char* const scales_to = shared + S::SCALES_AT + slot * S::SCALES_BYTES;
        const bool lines_there = k0 + chunk_k < k;
        const uint8_t* from = chunk_from + (size_t)(k0 / K_BLOCK) * (Lines<S::F>::PER_BLOCK * LINE_BYTES);
#pragma unroll
        for (int i = 0; i < TILE_COPIES; i++) {
            const bool there = lines_there && chunk_tile + i * TILE_STEP < tiles;
            copy_async_16(lines_to + chunk_to + i * TILE_STEP * S::TILE_BYTES, there ? from + (size_t)(i * TILE_STEP) * tile_stride : weights, there);
        }
        if (S::SPANS && tid < BLOCK_TILES * S::SPANS * 2) {
            constexpr int SPANS = S::SPANS ? S::SPANS : 1;
            const int tile = tid / (SPANS * 2), at = k0 + tid / 2 % SPANS * S::SPAN;
            const bool there = at < k && tile < tiles;
            copy_async_16(scales_to + tid * 16, there ? weights + (size_t)tile * tile_stride + (at >> group_shift) * 32 + tid % 2 * 16 : weights, there);
        }
        const bool inputs_there = k0 + row_chunk * 8 < k;
#pragma unroll
        for (int i = 0; i < ROW_COPIES; i++) {
            const bool there = inputs_there && row_from[i] != ~0u;
            copy_async_16(rows_to + row_to + i * ROW_STEP * S::K * 2, there ? x + ((size_t)row_from[i] + k0 / 8) * 8 : x, there);
        }
    };

    float acc[S::WARP_TILES][S::COLUMNS][4];
#pragma unroll
    for (int i = 0; i < S::WARP_TILES; i++)
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) acc[i][j][c] = 0.0f;

    const int columns = min(div_ceil(max(tokens - warp_n * S::WARP_TOKENS, 0), 8), S::COLUMNS); // that have tokens
    const uint32_t line_from = warp_m * S::WARP_TILES * S::TILE_BYTES, rows_from = (warp_n * S::WARP_TOKENS + g) * S::K * 2;

    // A block of 32 inputs of this warp's tile i, and of its column j, of a stage.
    auto load_operand = [&](const unsigned char* lines, int i, int b, auto exact, uint32_t (&a)[2][4]) {
        uint2 raw[Lines<S::F>::PER_LANE];
#pragma unroll
        for (int l = 0; l < Lines<S::F>::PER_LANE; l++) {
            const uint32_t at = (b * Lines<S::F>::PER_BLOCK + t * Lines<S::F>::PER_LANE + l) * LINE_BYTES + g * 8;
            raw[l] = *reinterpret_cast<const uint2*>(lines + line_from + i * S::TILE_BYTES + swizzle_line<S::F>(at));
        }
        tile_operand<S::F, decltype(exact)::value>(raw, a);
    };
    auto load_inputs = [&](const unsigned char* rows, int j, int b) {
        return *reinterpret_cast<const uint4*>(rows + rows_from + j * 8 * S::K * 2 + ((4 * b + t) ^ (g & 1) * 4) * 16);
    };

    auto multiply_stage = [&](int slot, auto all_columns) {
        const unsigned char *rows = shared + slot * S::ROWS_BYTES, *lines = shared + S::LINES_AT + slot * S::LINES_BYTES;
        [[maybe_unused]] const unsigned char* scales = shared + S::SCALES_AT + slot * S::SCALES_BYTES;
        if constexpr (S::LATE) {
            constexpr int BLOCKS = S::SPAN / K_BLOCK;
#pragma unroll
            for (int p = 0; p < S::SPANS; p++) {
                uint4 row[BLOCKS][S::COLUMNS];
                float begin[S::COLUMNS][4] = {};
#pragma unroll
                for (int b = 0; b < BLOCKS; b++)
#pragma unroll
                    for (int j = 0; j < S::COLUMNS; j++) {
                        row[b][j] = load_inputs(rows, j, p * BLOCKS + b);
                        begin_sums<S::F>(begin[j], row[b][j]);
                    }
#pragma unroll
                for (int i = 0; i < S::WARP_TILES; i++) {
                    float sum[S::COLUMNS][4];
#pragma unroll
                    for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
                        for (int c = 0; c < 4; c++) sum[j][c] = begin[j][c];
#pragma unroll
                    for (int b = 0; b < BLOCKS; b++) {
                        uint32_t a[2][4];
                        load_operand(lines, i, p * BLOCKS + b, Constant<false>{}, a);
#pragma unroll
                        for (int j = 0; j < S::COLUMNS; j++) {
                            const uint32_t first[2] = {row[b][j].x, row[b][j].y}, second[2] = {row[b][j].z, row[b][j].w};
                            mma_bf16(sum[j], a[0], first);
                            mma_bf16(sum[j], a[1], second);
                        }
                    }
                    const uint32_t scale = *reinterpret_cast<const uint32_t*>(scales + ((warp_m * S::WARP_TILES + i) * S::SPANS + p) * 32 + g * 4);
#pragma unroll
                    for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
                        for (int c = 0; c < 4; c++) acc[i][j][c] += (c < 2 ? low_f32(scale) : high_f32(scale)) * sum[j][c];
                }
            }
        } else {
#pragma unroll
            for (int b = 0; b < S::K / K_BLOCK; b++) {
                uint32_t a[S::WARP_TILES][2][4];
#pragma unroll
                for (int i = 0; i < S::WARP_TILES; i++) {
                    load_operand(lines, i, b, Constant<true>{}, a[i]);
                    if constexpr (S::F != BF16) {
                        const int tile = warp_m * S::WARP_TILES + i;
                        scale_operand(a[i], *reinterpret_cast<const uint32_t*>(scales + (tile * S::SPANS + b * K_BLOCK / S::SPAN) * 32 + g * 4));
                    }
                }
#pragma unroll
                for (int j = 0; j < S::COLUMNS; j++) {
                    if (!decltype(all_columns)::value && j >= columns) break;
                    const uint4 row = load_inputs(rows, j, b);
                    const uint32_t first[2] = {row.x, row.y}, second[2] = {row.z, row.w};
#pragma unroll
                    for (int i = 0; i < S::WARP_TILES; i++) mma_bf16(acc[i][j], a[i][0], first);
#pragma unroll
                    for (int i = 0; i < S::WARP_TILES; i++) mma_bf16(acc[i][j], a[i][1], second);
                }
            }
        }
    };

    const int steps = div_ceil(k, S::K);
#ifdef HAS_WGMMA
    if constexpr (S::WGMMA) {
        // The left operand of 16 inputs of stage `slot`: lane (g, t) has inputs 2t, 2t + 1 and 2t + 8, 2t + 9, as the rows in shared memory do not bend to it.
        struct Raw { uint2 first[2], second[2]; };
        auto load = [&](int slot, int q) {
            const unsigned char* lines = shared + S::LINES_AT + slot * S::LINES_BYTES + line_from;
            Raw raw;
            constexpr int HALF = Lines<S::F>::PER_BLOCK / 4; // lines of 8 inputs
            const uint32_t at = (2 * q * HALF + (S::F == INT4 ? 0 : S::F == INT8 ? t / 2 : t)) * LINE_BYTES + g * 8;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                raw.first[i] = *reinterpret_cast<const uint2*>(lines + i * S::TILE_BYTES + swizzle_line<S::F>(at));
                raw.second[i] = *reinterpret_cast<const uint2*>(lines + i * S::TILE_BYTES + swizzle_line<S::F>(at + HALF * LINE_BYTES));
            }
            return raw;
        };
        auto pair = [&](uint32_t word) { return packed_pair<S::F>(word, t); };
        auto stage = [&](int slot, auto width) {
            constexpr int N = decltype(width)::value;
            [[maybe_unused]] const unsigned char* scales = shared + S::SCALES_AT + slot * S::SCALES_BYTES;
            const uint64_t rows = wgmma_rows(shared + slot * S::ROWS_BYTES);
            Raw raw = load(slot, 0);
            [[maybe_unused]] uint32_t scale[2] = {};
#pragma unroll
            for (int q = 0; q < 4; q++) {
                uint32_t a[2][4];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    a[i][0] = pair(raw.first[i].x), a[i][1] = pair(raw.first[i].y), a[i][2] = pair(raw.second[i].x), a[i][3] = pair(raw.second[i].y);
                    if constexpr (S::F != BF16) {
                        if (q * 16 % S::SPAN == 0)
                            scale[i] = *reinterpret_cast<const uint32_t*>(scales + ((2 * warp + i) * S::SPANS + q * 16 / S::SPAN) * 32 + g * 4);
                        const uint32_t even = __byte_perm(scale[i], 0, 0x1010), odd = __byte_perm(scale[i], 0, 0x3232);
#pragma unroll
                        for (int c = 0; c < 4; c++) a[i][c] = fma_bf16x2(a[i][c], c % 2 ? odd : even, 0x80008000u);
                    }
                }
                if (q < 3) raw = load(slot, q + 1);
                wgmma_fence();
                wgmma_bf16<N>(acc[0], a[0], rows + 2 * q);
                wgmma_bf16<N>(acc[1], a[1], rows + 2 * q);
                wgmma_commit();
                wgmma_wait<1>();
            }
        };
        auto all = [&](auto width) {
            // A stage's rows may still be read while the next one is multiplied, so one stage less is on its way.
            constexpr int AHEAD = S::STAGES - (WGMMA_DRAIN ? 1 : 2);
#pragma unroll
            for (int s = 0; s < AHEAD; s++) {
                if (s < steps) copy_stage(s * S::K, s);
                copy_async_commit();
            }
            int read = 0, write = AHEAD;
            for (int s = 0; s < steps; s++) {
                copy_async_wait<AHEAD - 1>();
                if (WGMMA_DRAIN) wgmma_wait<0>();
                wgmma_publish();
                __syncthreads();
                if (s + AHEAD < steps) copy_stage((s + AHEAD) * S::K, write);
                copy_async_commit();
                stage(read, width);
                read = read + 1 == S::STAGES ? 0 : read + 1;
                write = write + 1 == S::STAGES ? 0 : write + 1;
            }
            wgmma_wait<0>();
            wgmma_landed(acc[0]);
            wgmma_landed(acc[1]);
        };
        if (tokens > S::TOKENS / 4 * 3) all(Constant<S::TOKENS>{});
        else if (tokens > S::TOKENS / 2) all(Constant<S::TOKENS / 4 * 3>{});
        else all(Constant<S::TOKENS / 2>{});
    } else
#endif
    {
#pragma unroll
        for (int s = 0; s < S::STAGES - 1; s++) {
            if (s < steps) copy_stage(s * S::K, s);
            copy_async_commit();
        }
        int read = 0, write = S::STAGES - 1;
        for (int s = 0; s < steps; s++) {
            copy_async_wait<S::STAGES - 2>();
            __syncthreads();
            if (s + S::STAGES - 1 < steps) copy_stage((s + S::STAGES - 1) * S::K, write);
            copy_async_commit();
            if (S::TOKENS < PARTIAL_FROM || columns == S::COLUMNS) multiply_stage(read, Constant<true>{});
            else multiply_stage(read, Constant<false>{});
            read = read + 1 == S::STAGES ? 0 : read + 1;
            write = write + 1 == S::STAGES ? 0 : write + 1;
        }
    }
    finish(acc, warp_m * S::WARP_TILES, warp_n * S::WARP_TOKENS + 2 * t, 2 * g);
}

// Shapes by the number of tokens of a tile: many tokens for the tensor cores, few for the memory.
template <Format F, int SPAN, int TOKENS> struct ShapeFor;
template <Format F, int SPAN> struct ShapeFor<F, SPAN, 16> { using Shape = GemmShape<F, SPAN, 16, F == BF16 ? 64 : 128, 4, 1>; };
template <Format F, int SPAN> struct ShapeFor<F, SPAN, 32> { using Shape = GemmShape<F, SPAN, 32, F == BF16 ? 64 : 128, F == INT4 ? 4 : 3, 1>; };
template <Format F, int SPAN> struct ShapeFor<F, SPAN, 64> { using Shape = GemmShape<F, SPAN, 64, 64, F == INT4 ? STAGES_64 : 3, WARPS_N_64>; };
template <Format F, int SPAN> struct ShapeFor<F, SPAN, 128> { using Shape = GemmShape<F, SPAN, 128, 64, F == INT4 ? STAGES_128 : 3, WARPS_N_128>; };
