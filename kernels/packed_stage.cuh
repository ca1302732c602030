// What warps read of a stage in shared memory. A shape S (GemmShape, PersistentShape) says the format, its inputs K, of
// which SPAN share a scale, and where the tiles' lines, their scales and the tokens' rows lie.
#pragma once
#include "packed_table.cuh"

// What codes have too much where they meet inputs as bf16 numbers; 0, or 128 and more.
template <Format F> constexpr int code_bias() {
    if constexpr (is_row_value<F>) return has_table<F> ? 0 : (int)RowOf<F>::NUMBER_BIAS;
    return F == INT4 ? 136 : 0;
}

// What a stage of 64 inputs has of a tile: its lines, of rows the head of its scales, and the records of its spans.
template <Format F, int SPAN, bool ROW = is_row_value<F>> struct TileStage {
    static constexpr int SPANS = 64 / SPAN, LINES = 2 * lines_of_block<F>(), HEAD = 0, RECORD = 32,
                         RECORD_BYTES = SPANS * RECORD;
    // The launch says how many inputs a record is for; 32 inputs may be the last.
    static constexpr bool BY_GROUP = true, HALVES = true;
};
template <Format F, int SPAN> struct TileStage<F, SPAN, true> {
    using R = RowOf<F>;
    // Of lines that belong to a super-block it has one.
    static constexpr int SPANS = 64 / SPAN, LINES = 2 * R::LINES + (R::MORE_LINES > 0), HEAD = R::HEAD,
                         RECORD = R::RECORD;
    static constexpr bool BY_GROUP = R::ROW.group == 0, HALVES = !R::HAS_SUPER_BLOCKS;
    // Copies are of 16 bytes: where records begin in the middle of 16, so many more.
    static constexpr int SKEW = SPANS * RECORD % 16, RECORD_BYTES = SPANS * RECORD + SKEW;
    static_assert(SKEW % 8 == 0 && R::SUPER_BYTES % 16 == 0 && (HALVES || HEAD % 16 == 0), "chunks of a super-block");
};

// Where byte `at` of a stage's lines lies: halves of some lines change places, so that lanes which read lines t, t + 4,
// .. meet in no bank. Lanes that read neighbouring lines meet in none as they lie.
template <class S> __device__ __forceinline__ uint32_t swizzle_line(uint32_t at) {
    const uint32_t line = at / LINE_BYTES;
    if ((S::WGMMA && !S::DEALT) || !(S::BLOCK_LINES == 4 || S::BLOCK_LINES == 5 || S::BLOCK_LINES == 8 || S::F == BF16))
        return at;
    return at ^ (S::BLOCK_LINES < 8 ? (line >> 1 & 1) : S::BLOCK_LINES == 8 ? (line >> 1 & 3) : (line >> 2 & 3)) * 32;
}
// Of 8 inputs of a row, and where they lie in it. For wgmma weights of ANY_ROW and tokens have one order of inputs, in
// which a unit's writes meet in no bank: blocks take turns every other chunk.
template <class S> __device__ __forceinline__ int swizzle_row(int row, int chunk) {
    if (S::WGMMA && S::F == ANY_ROW) chunk = (chunk & 1) | (chunk & 2) << 1 | (chunk & 4) >> 1;
    return (chunk ^ (S::WGMMA ? row & 7 : S::F == Q6_K ? (row & 3) * 2 : (row & 1) * 4)) * 16;
}

// x, its bits `right` places further down, round the end.
__device__ __forceinline__ uint32_t rotated(uint32_t x, int right) { return __funnelshift_r(x, x, right); }

// What codes have too much, less, as an operand of products with the inputs.
template <class S> __device__ __forceinline__ void minus_bias(uint32_t (&operand)[4]) {
#pragma unroll
    for (uint32_t& bias : operand) bias = (0xc300u + S::CODE_BIAS - 128) * 0x10001u, keep(bias);
}

// What lanes have of any stage's inputs for mma. Lane (g, t) has row g of 8 tokens, and inputs 8t .. 8t + 7 of a block
// of 32: two products. Places are kept, because compilers make them anew for each stage otherwise.
template <class S> struct InputPlaces {
    static constexpr int UNIT = K_BLOCK, PRODUCTS = UNIT / 16;
    int inputs[2];
    uint32_t minus[4]; // minus_bias

    __device__ __forceinline__ explicit InputPlaces(int token) {
        const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int b = 0; b < 2; b++) inputs[b] = (token + g) * S::K * 2 + swizzle_row<S>(g, 4 * b + t), keep(inputs[b]);
        if constexpr (S::CODE_BIAS != 0) minus_bias<S>(minus);
    }
    // Of block `b` and the 8 tokens from `token` on.
    __device__ __forceinline__ void load(
        const typename S::Stage& stage, int token, int b, uint32_t (&of)[PRODUCTS][2]) const {
        const uint4 row = in_order_of_codes<S::F>(
            *reinterpret_cast<const uint4*>(stage.rows + token * S::K * 2 + b / 2 * 128 + inputs[b % 2]));
        of[0][0] = row.x, of[0][1] = row.y, of[1][0] = row.z, of[1][1] = row.w;
    }
};

// What lanes have of any stage: rows 2g and 2g + 1 of a tile, and the same inputs. Those of INT4, INT8, MXFP4 and BF16.
template <class S> struct LanePlaces : InputPlaces<S> {
    static constexpr int LINES = Lines<S::F>::PER_LANE;
    int lines[LINES];

    // Tiles and tokens are counted from these.
    __device__ __forceinline__ LanePlaces(int tile, int token) : InputPlaces<S>(token) {
        const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < LINES; i++)
            lines[i] = tile * S::TILE_BYTES + swizzle_line<S>((t * LINES + i) * LINE_BYTES + g * 8), keep(lines[i]);
    }

    // What it has of block `b` of tile `i`, and that as an operand, not scaled; with code_bias more unless EXACT.
    struct Raw {
        uint2 lines[LINES];
    };
    __device__ __forceinline__ Raw raw(const typename S::Stage& stage, int, int i, int b) const {
        Raw raw;
#pragma unroll
        for (int l = 0; l < LINES; l++)
            raw.lines[l] = *reinterpret_cast<const uint2*>(
                stage.lines + i * S::TILE_BYTES + b * S::BLOCK_LINES * LINE_BYTES + lines[l]);
        return raw;
    }
    template <bool EXACT> __device__ __forceinline__ void operand(const Raw& raw, uint32_t (&a)[2][4]) const {
        tile_operand<S::F, EXACT>(raw.lines, a);
    }
};

// Scales of rows 2g and 2g + 1 of tile `i` from the one on at which lane (g, t) has `place`.
template <class S> __device__ __forceinline__ int place_of_scales(int tile) {
    return tile * S::SPANS * 32 + threadIdx.x % WARP / 4 * 4;
}
template <class S>
__device__ __forceinline__ uint32_t two_scales(const typename S::Stage& stage, int place, int i, int span) {
    return *reinterpret_cast<const uint32_t*>(stage.scales + (i * S::SPANS + span) * 32 + place);
}
