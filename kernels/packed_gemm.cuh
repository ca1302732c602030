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
// Chunks of 16 bytes are stored so that neither the lines (8-byte reads: two rows of lines t, t + 4, ...) nor the rows
// (16-byte reads: 8 inputs) meet in a bank.
#pragma once
#include "packed_tile.cuh"

constexpr int GEMM_THREADS = 128, BLOCK_TILES = 8;

// Blocks to a multiprocessor that registers shall suffice for.
constexpr int gemm_blocks(Format format, int tokens) {
    const int blocks = tokens <= 32 ? 4 : tokens <= 64 ? 3 : 2;
    return is_counted(format) && (tokens == 32 || tokens == 64) ? blocks - 1 : blocks;
}

// Faster than mma from here on, for all formats.
#ifdef HAS_WGMMA
constexpr bool use_wgmma(int tokens) { return tokens >= 64; }
#else
constexpr bool use_wgmma(int) { return false; }
#endif

// With more, fewer blocks have room; on cards other than Hopper a block has 99 KB at most.
constexpr int gemm_stages(Format format, int span, int tokens) {
    if (is_counted(format)) return 4;
    if (tokens > 128) return format == INT4 && span == 64 ? 4 : 3;
    if (has_4_bits(format)) return !use_wgmma(tokens) ? 4 : tokens == 64 ? 6 : 5;
    return tokens == 16 ? 4 : 3;
}

template <Format F> constexpr int scales_of_stage(int k, int span) {
    if constexpr (Lines<F>::COUNTED) return Counts<F>::HEAD + k / Counts<F>::GROUP * Counts<F>::RECORD;
    return k / span * 32;
}

// SPAN: inputs that share a scale for certain, 32 for groups of 32 and 64 for groups of 64 and 128.
template <Format F_, int SPAN_, int TOKENS_> struct GemmShape {
    static constexpr Format F = F_;
    static constexpr int SPAN = SPAN_, TOKENS = TOKENS_, STAGES = gemm_stages(F, SPAN, TOKENS),
                         K = F == BF16 || TOKENS >= 64 ? 64 : 128;
    static constexpr bool WGMMA = use_wgmma(TOKENS), SCALE_SUMS = F != BF16 && SPAN == 64 && TOKENS == 16;
    // A stage's scales of a tile: of spans; counted: the super-block's head, then records.
    static constexpr int SCALES = F == BF16 ? 0 : scales_of_stage<F>(K, SPAN);
    static constexpr int WARPS_N = TOKENS == 128 && !WGMMA ? 2 : 1, WARPS_M = 4 / WARPS_N;
    static constexpr int WARP_TILES = BLOCK_TILES / WARPS_M, WARP_TOKENS = TOKENS / WARPS_N, COLUMNS = WARP_TOKENS / 8;
    static constexpr int TOKENS_STEP = TOKENS > 64 ? 32 : 16; // between sizes of a wgmma
    static constexpr int LINES = K / K_BLOCK * Lines<F>::PER_BLOCK, TILE_BYTES = LINES * LINE_BYTES;
    static constexpr int SPANS = F == BF16 ? 0 : K / SPAN;
    static_assert(SCALES % 16 == 0, "copies of 16 bytes");
    // Shared memory: the rows of all stages, which wgmma wants aligned to 1024 bytes, then the lines, then the scales.
    static constexpr int ROWS_BYTES = TOKENS * K * 2, LINES_BYTES = BLOCK_TILES * TILE_BYTES,
                         SCALES_BYTES = BLOCK_TILES * SCALES;
    static constexpr int LINES_AT = STAGES * ROWS_BYTES, SCALES_AT = LINES_AT + STAGES * LINES_BYTES,
                         SHARED_BYTES = SCALES_AT + STAGES * SCALES_BYTES;
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

// Where byte `at` of a tile's lines lies in shared memory: its 16-byte chunk moves within 128 bytes.
template <Format F> __device__ __forceinline__ uint32_t swizzle_line(uint32_t at) {
    const uint32_t line = at / LINE_BYTES;
    return at ^ (Lines<F>::FOUR_BITS ? (line >> 1 & 1) : F == INT8 ? (line >> 1 & 3) : (line >> 2 & 3)) * 32;
}
// Of 8 inputs of a row, and where they lie in it.
template <class S> __device__ __forceinline__ int swizzle_row(int row, int chunk) {
    return (chunk ^ (S::WGMMA ? row & 7 : (row & 1) * 4)) * 16;
}

// Block `b` of 32 inputs of a stage: what this lane has of a tile, not scaled, and of 8 tokens from `row` on.
template <class S, bool EXACT>
__device__ __forceinline__ void stage_weights(const typename S::Stage& stage, int tile, int b, uint32_t (&a)[2][4]) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    uint2 raw[Lines<S::F>::PER_LANE];
#pragma unroll
    for (int l = 0; l < Lines<S::F>::PER_LANE; l++) {
        const uint32_t at = (b * Lines<S::F>::PER_BLOCK + lane_line<S::F>(t, l)) * LINE_BYTES + g * 8;
        raw[l] = *reinterpret_cast<const uint2*>(stage.lines + tile * S::TILE_BYTES + swizzle_line<S::F>(at));
    }
    tile_operand<S::F, EXACT>(raw, a);
}
template <class S> __device__ __forceinline__ uint4 stage_inputs(const typename S::Stage& stage, int row, int b) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    return *reinterpret_cast<const uint4*>(stage.rows + (row + g) * S::K * 2 + swizzle_row<S>(g, 4 * b + t));
}
// Scales of rows 2g and 2g + 1 of a tile.
// Of counted formats those of a group.
template <class S>
__device__ __forceinline__ RowScales stage_counted(const typename S::Stage& stage, int tile, int group) {
    constexpr Format F = S::F;
    const int g = threadIdx.x % WARP / 4;
    const unsigned char* head = stage.scales + tile * S::SCALES;
    auto at = [&](uint16_t, int i) -> uint32_t {
        return *reinterpret_cast<const uint16_t*>(head + Counts<F>::HEAD + group * Counts<F>::RECORD + i);
    };
    uint32_t scale, offset;
    counts<F, uint16_t>(2 * g, at, scale, offset);
    const float2 d = scales_f32(*reinterpret_cast<const uint32_t*>(head + 4 * g), true);
    const float2 dmin = Counts<F>::OFFSETS ? scales_f32(*reinterpret_cast<const uint32_t*>(head + 32 + 4 * g), true)
                                           : make_float2(0.0f, 0.0f);
    return {counted_scale<F>(d.x, dmin.x, scale, offset, 0), counted_scale<F>(d.y, dmin.y, scale, offset, 1)};
}
template <class S>
__device__ __forceinline__ uint32_t stage_scales(const typename S::Stage& stage, int tile, int span) {
    return *reinterpret_cast<const uint32_t*>(
        stage.scales + (tile * S::SPANS + span) * 32 + threadIdx.x % WARP / 4 * 4);
}

// Columns past `columns` have no tokens.
template <class S>
__device__ __forceinline__ void multiply(Sums<S>& acc, const typename S::Stage& stage, int columns, bool f16) {
    const int warp_m = threadIdx.x / WARP / S::WARPS_N, warp_n = threadIdx.x / WARP % S::WARPS_N,
              tile = warp_m * S::WARP_TILES;
#pragma unroll
    for (int b = 0; b < S::K / K_BLOCK; b++) {
        uint32_t a[S::WARP_TILES][2][4];
#pragma unroll
        for (int i = 0; i < S::WARP_TILES; i++) {
            stage_weights<S, true>(stage, tile + i, b, a[i]);
            if constexpr (Lines<S::F>::COUNTED) {
                // Of groups of 16, a lane's inputs are of one.
                const int group = b * K_BLOCK / S::SPAN + (S::SPAN == 16 ? threadIdx.x % 4 / 2 : 0);
                const RowScales scales = stage_counted<S>(stage, tile + i, group);
                scale_counted<Counts<S::F>::OFFSETS>(a[i][0], scales);
                scale_counted<Counts<S::F>::OFFSETS>(a[i][1], scales);
            } else if constexpr (S::F != BF16) {
                scale_operand(a[i], stage_scales<S>(stage, tile + i, b * K_BLOCK / S::SPAN), f16);
            }
        }
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j++) {
            if (j >= columns) break;
            const uint4 row = stage_inputs<S>(stage, warp_n * S::WARP_TOKENS + j * 8, b);
            const uint32_t first[2] = {row.x, row.y}, second[2] = {row.z, row.w};
#pragma unroll
            for (int i = 0; i < S::WARP_TILES; i++) mma_bf16(acc[i][j], a[i][0], first);
#pragma unroll
            for (int i = 0; i < S::WARP_TILES; i++) mma_bf16(acc[i][j], a[i][1], second);
        }
    }
}

template <class S>
__device__ __forceinline__ void multiply_scaling_sums(Sums<S>& acc, const typename S::Stage& stage, bool f16) {
    constexpr int BLOCKS = S::SPAN / K_BLOCK;
    const int tile = threadIdx.x / WARP * S::WARP_TILES;
#pragma unroll
    for (int span = 0; span < S::SPANS; span++) {
        uint4 row[BLOCKS][S::COLUMNS];
        float begin[S::COLUMNS][4] = {};
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
#pragma unroll
            for (int j = 0; j < S::COLUMNS; j++) {
                row[b][j] = stage_inputs<S>(stage, j * 8, span * BLOCKS + b);
                if constexpr (S::F == INT4) {
                    // Codes have 136 too much: sums begin with -136 times that of the inputs.
                    const uint32_t minus[4] = {0xc308c308u, 0xc308c308u, 0xc308c308u, 0xc308c308u};
                    const uint32_t first[2] = {row[b][j].x, row[b][j].y}, second[2] = {row[b][j].z, row[b][j].w};
                    mma_bf16(begin[j], minus, first);
                    mma_bf16(begin[j], minus, second);
                }
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
                stage_weights<S, false>(stage, tile + i, span * BLOCKS + b, a);
#pragma unroll
                for (int j = 0; j < S::COLUMNS; j++) {
                    const uint32_t first[2] = {row[b][j].x, row[b][j].y}, second[2] = {row[b][j].z, row[b][j].w};
                    mma_bf16(sum[j], a[0], first);
                    mma_bf16(sum[j], a[1], second);
                }
            }
            const float2 scales = scales_f32(stage_scales<S>(stage, tile + i, span), f16);
#pragma unroll
            for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
                for (int c = 0; c < 4; c++) acc[i][j][c] += (c < 2 ? scales.x : scales.y) * sum[j][c];
        }
    }
}

#ifdef HAS_WGMMA
// The first N tokens. When it returns, the last product is under way and still reads the stage's rows.
template <class S, int N>
__device__ __forceinline__ void multiply_wgmma(Sums<S>& acc, const typename S::Stage& stage, bool f16) {
    static_assert(S::K == 64 && S::WARP_TILES == 2, "rows of 128 bytes; 64 rows of weights to a product");
    constexpr int HALF = Lines<S::F>::PER_BLOCK / 4, STEPS = S::K / 16; // lines of 8 inputs; products of 16
    constexpr int BLOCK = Lines<S::F>::PER_BLOCK;
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4, tile = threadIdx.x / WARP * 2;
    // Lane (g, t) brings inputs 2t, 2t + 1, 2t + 8, 2t + 9 of a product: rows in shared memory are read in the
    // instruction's own order.
    const unsigned char* lines = stage.lines + tile * S::TILE_BYTES;
    const uint32_t own = (Lines<S::F>::FOUR_BITS || Lines<S::F>::COUNTED ? 0
                                 : S::F == INT8                          ? t / 2
                                                                         : t) *
            LINE_BYTES +
        g * 8;
    uint2 raw[2][2]; // of the tiles: rows 2g and 2g + 1, in both halves of the inputs
    [[maybe_unused]] uint2 upper[2];
    auto load = [&](int step) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            auto line = [&](int line) {
                const uint32_t at = line * LINE_BYTES + own;
                return *reinterpret_cast<const uint2*>(lines + i * S::TILE_BYTES + swizzle_line<S::F>(at));
            };
#pragma unroll
            for (int half = 0; half < 2; half++)
                raw[i][half] = line(S::F == Q6_K ? step * 3 + half
                        : S::F == Q5_K           ? step / 2 * BLOCK + step % 2 * 2 + half
                                                 : (2 * step + half) * HALF);
            if constexpr (S::F == Q5_K || S::F == Q6_K)
                upper[i] = line(S::F == Q6_K ? step * 3 + 2 : step / 2 * BLOCK + 4);
        }
    };
    load(0);
    [[maybe_unused]] uint32_t scales[2] = {};
    [[maybe_unused]] RowScales counted[2];
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        uint32_t a[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if constexpr (Lines<S::F>::COUNTED) {
                    // Of the block; of half of it with Q6_K, whose upper bits are of 16 inputs.
                    const int run = (S::F == Q5_K ? step % 2 * 4 : 0) + half * 2 + t / 2;
                    a[i][2 * half] = pair_of<S::F>(raw[i][half].x, upper[i].x, run, t);
                    a[i][2 * half + 1] = pair_of<S::F>(raw[i][half].y, upper[i].y, run, t);
                } else {
                    a[i][2 * half] = packed_pair<S::F>(raw[i][half].x, t);
                    a[i][2 * half + 1] = packed_pair<S::F>(raw[i][half].y, t);
                }
            }
            if constexpr (Lines<S::F>::COUNTED) {
                if (step * 16 % S::SPAN == 0) counted[i] = stage_counted<S>(stage, tile + i, step * 16 / S::SPAN);
                scale_counted<Counts<S::F>::OFFSETS>(a[i], counted[i]);
            } else if constexpr (S::F != BF16) {
                if (step * 16 % S::SPAN == 0) scales[i] = stage_scales<S>(stage, tile + i, step * 16 / S::SPAN);
                scale_rows(a[i], scales[i], f16);
            }
        }
        if (step + 1 < STEPS) load(step + 1);
        const uint64_t rows = wgmma_operand(stage.rows + step * 32);
        wgmma_fence();
        wgmma<N>(acc[0], a[0], rows);
        wgmma<N>(acc[1], a[1], rows);
        wgmma_commit();
        wgmma_wait<1>(); // weights of the next step are made while this one is multiplied
    }
}
#endif

// `weights`: the first tile of the band, of which `tiles` exist. `row_of(i)`: row of x for token i, or -1. Calls
// finish(acc, tile, token, row) in every warp with its sums: fragments of tiles x columns, from `tile` and `token` of
// the block on; of a tile, a lane has `row` and `row` + 1 where the instruction says g and g + 8.
template <class S, class RowOf, class Finish>
__device__ __forceinline__ void packed_gemm(const uint8_t* weights, int tiles, int k, int group, bool f16,
    const bf16* x, int x_pitch, int tokens, RowOf row_of, Finish finish) {
    DYNAMIC_SHARED_ALIGNED(unsigned char, shared, 1024);
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, g = lane / 4, t = lane % 4;
    const uint32_t tile_stride = tile_bytes<S::F>(k, group), codes = scale_bytes<S::F>(k, group);
    [[maybe_unused]] const int group_shift = S::F == BF16 || Lines<S::F>::COUNTED ? 0 : 31 - __clz(group);

    // What this thread copies of each stage: the same chunk of every so many tiles, where that goes evenly.
    constexpr int TILE_CHUNKS = S::TILE_BYTES / 16, TILE_STEP = GEMM_THREADS / TILE_CHUNKS,
                  TILE_COPIES = TILE_STEP ? BLOCK_TILES / TILE_STEP : 0;
    constexpr bool EVEN = GEMM_THREADS % TILE_CHUNKS == 0;
    const int chunk = tid % TILE_CHUNKS, chunk_tile = tid / TILE_CHUNKS,
              chunk_k = chunk / (Lines<S::F>::PER_BLOCK * 4) * K_BLOCK;
    const uint8_t* chunk_from = weights + (size_t)chunk_tile * tile_stride + codes + chunk * 16;
    const uint32_t chunk_to = chunk_tile * S::TILE_BYTES + swizzle_line<S::F>(chunk * 16);

    constexpr int ROW_CHUNKS = S::K / 8, ROW_STEP = GEMM_THREADS / ROW_CHUNKS, ROW_COPIES = S::TOKENS / ROW_STEP;
    static_assert(ROW_COPIES * ROW_STEP == S::TOKENS && ROW_STEP % (S::WGMMA ? 8 : 2) == 0,
        "rows are dealt out evenly, of one kind to a thread");
    const int row_chunk = tid % ROW_CHUNKS, first_row = tid / ROW_CHUNKS;
    uint32_t row_from[ROW_COPIES]; // in chunks of 8 inputs
#pragma unroll
    for (int i = 0; i < ROW_COPIES; i++) {
        const int row = row_of(first_row + i * ROW_STEP);
        row_from[i] = row < 0 ? ~0u : (uint32_t)row * (uint32_t)(x_pitch / 8) + row_chunk;
    }
    const uint32_t row_to = first_row * S::K * 2 + swizzle_row<S>(first_row, row_chunk);

    auto copy_stage = [&](int k0, int slot) {
        const typename S::Stage to = S::stage(shared, slot);
        if constexpr (EVEN) {
            const bool lines_there = k0 + chunk_k < k;
            const uint8_t* from = chunk_from + (size_t)(k0 / K_BLOCK) * (Lines<S::F>::PER_BLOCK * LINE_BYTES);
#pragma unroll
            for (int i = 0; i < TILE_COPIES; i++) {
                const bool there = lines_there && chunk_tile + i * TILE_STEP < tiles;
                copy_async_16(to.lines + chunk_to + i * TILE_STEP * S::TILE_BYTES,
                    there ? from + (size_t)(i * TILE_STEP) * tile_stride : weights, there);
            }
        } else {
            const uint8_t* from = weights + codes + (size_t)(k0 / K_BLOCK) * (Lines<S::F>::PER_BLOCK * LINE_BYTES);
#pragma unroll
            for (int i = tid; i < BLOCK_TILES * TILE_CHUNKS; i += GEMM_THREADS) {
                const int tile = i / TILE_CHUNKS, at = i % TILE_CHUNKS;
                const bool there = tile < tiles && k0 + at / (Lines<S::F>::PER_BLOCK * 4) * K_BLOCK < k;
                copy_async_16(to.lines + tile * S::TILE_BYTES + swizzle_line<S::F>(at * 16),
                    there ? from + (size_t)tile * tile_stride + at * 16 : weights, there);
            }
        }
        if constexpr (Lines<S::F>::COUNTED) {
            using C = Counts<S::F>;
            constexpr int CHUNKS = S::SCALES / 16;
            // A stage is of one super-block, and whole: k is a multiple of 256.
            const uint8_t* from = weights + (size_t)(k0 / C::SUPER_BLOCK) * C::BYTES;
            const int records = k0 % C::SUPER_BLOCK / C::GROUP * C::RECORD;
            for (int i = tid; i < BLOCK_TILES * CHUNKS; i += GEMM_THREADS) {
                const int tile = i / CHUNKS, at = i % CHUNKS * 16;
                const bool there = tile < tiles && k0 < k;
                copy_async_16(to.scales + tile * S::SCALES + at,
                    there ? from + (size_t)tile * tile_stride + at + (at < C::HEAD ? 0 : records) : weights, there);
            }
        } else if (S::SPANS && tid < BLOCK_TILES * S::SPANS * 2) {
            constexpr int SPANS = S::SPANS ? S::SPANS : 1;
            const int tile = tid / (SPANS * 2), at = k0 + tid / 2 % SPANS * S::SPAN;
            const bool there = at < k && tile < tiles;
            copy_async_16(to.scales + tid * 16,
                there ? weights + (size_t)tile * tile_stride + (at >> group_shift) * 32 + tid % 2 * 16 : weights,
                there);
        }
        const bool inputs_there = k0 + row_chunk * 8 < k;
#pragma unroll
        for (int i = 0; i < ROW_COPIES; i++) {
            const bool there = inputs_there && row_from[i] != ~0u;
            copy_async_16(
                to.rows + row_to + i * ROW_STEP * S::K * 2, there ? x + ((size_t)row_from[i] + k0 / 8) * 8 : x, there);
        }
    };

    Sums<S> acc;
#pragma unroll
    for (int i = 0; i < S::WARP_TILES; i++)
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) acc[i][j][c] = 0.0f;

    auto each_stage = [&](auto multiply_stage) {
        // wgmma may still read the rows of the stage before, so one stage less is on its way.
        constexpr int AHEAD = S::STAGES - (S::WGMMA ? 2 : 1);
        const int steps = div_ceil(k, S::K);
#pragma unroll
        for (int s = 0; s < AHEAD; s++) {
            if (s < steps) copy_stage(s * S::K, s);
            copy_async_commit();
        }
        int read = 0, write = AHEAD;
        for (int s = 0; s < steps; s++) {
            copy_async_wait<AHEAD - 1>();
            if (S::WGMMA) shared_to_async();
            __syncthreads();
            if (s + AHEAD < steps) copy_stage((s + AHEAD) * S::K, write);
            copy_async_commit();
            multiply_stage(S::stage(shared, read));
            read = read + 1 == S::STAGES ? 0 : read + 1;
            write = write + 1 == S::STAGES ? 0 : write + 1;
        }
    };
    const int warp_m = warp / S::WARPS_N, warp_n = warp % S::WARPS_N;
#ifdef HAS_WGMMA
    if constexpr (S::WGMMA) {
        auto all = [&](auto n) {
            each_stage([&](const typename S::Stage& stage) { multiply_wgmma<S, decltype(n)::value>(acc, stage, f16); });
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
        fewest(Constant<S::TOKENS / 2>{}, fewest);
    } else
#endif
        if constexpr (S::SCALE_SUMS) {
        each_stage([&](const typename S::Stage& stage) { multiply_scaling_sums<S>(acc, stage, f16); });
    } else {
        const int columns = min(div_ceil(max(tokens - warp_n * S::WARP_TOKENS, 0), 8), S::COLUMNS); // that have tokens
        each_stage([&](const typename S::Stage& stage) {
            if (S::TOKENS == 16 || columns == S::COLUMNS)
                multiply<S>(acc, stage, S::COLUMNS, f16);
            else
                multiply<S>(acc, stage, columns, f16);
        });
    }
    finish(acc, warp_m * S::WARP_TILES, warp_n * S::WARP_TOKENS + 2 * t, 2 * g);
}
