// What warps read of a stage in shared memory. A shape S (GemmShape, PersistentShape) says the format, its inputs K, of
// which SPAN share a scale, and where the tiles' lines, their scales and the tokens' rows lie.
#pragma once
#include "packed_rows.cuh"

// What codes have too much where they meet inputs as bf16 numbers; 0, or 128 and more.
template <Format F> constexpr int code_bias() {
    if constexpr (is_k_type(F)) return (int)RowOf<F>::NUMBER_BIAS;
    return F == INT4 ? 136 : 0;
}

// Where byte `at` of a stage's lines lies: halves of some lines change places, so that lanes which read lines t, t + 4,
// .. meet in no bank. Lanes that read neighbouring lines meet in none as they lie.
template <class S> __device__ __forceinline__ uint32_t swizzle_line(uint32_t at) {
    const uint32_t line = at / LINE_BYTES;
    if (S::WGMMA || S::SPAN == 16) return at;
    return at ^ (S::BLOCK_LINES < 8 ? (line >> 1 & 1) : S::BLOCK_LINES == 8 ? (line >> 1 & 3) : (line >> 2 & 3)) * 32;
}
// Of 8 inputs of a row, and where they lie in it. For wgmma weights of ANY_ROW and tokens have one order of inputs, in
// which a unit's writes meet in no bank: blocks take turns every other chunk.
template <class S> __device__ __forceinline__ int swizzle_row(int row, int chunk) {
    if (S::WGMMA && S::ROWS) chunk = (chunk & 1) | (chunk & 2) << 1 | (chunk & 4) >> 1;
    return (chunk ^ (S::WGMMA ? row & 7 : S::SPAN == 16 ? (row & 3) * 2 : (row & 1) * 4)) * 16;
}

// x, its bits `right` places further down, round the end.
__device__ __forceinline__ uint32_t rotated(uint32_t x, int right) { return __funnelshift_r(x, x, right); }

// Where a lane reads its operands of mma in any stage. Kept, because compilers make it anew for each stage otherwise.
// Lane (g, t) has rows 2g and 2g + 1 of a tile and inputs 8t .. 8t + 7 of a block of 32, of Q6_K 4t .. 4t + 3 of a
// group of 16; of 8 tokens row g.
template <class S> struct LanePlaces {
    static constexpr Format F = S::F;
    static constexpr bool GROUPS_OF_16 = S::SPAN == 16;
    static constexpr int LINES = S::K_TYPE ? 1 : Lines<F>::PER_LANE;
    int inputs[GROUPS_OF_16 ? 4 : 2], lines[S::K_TYPE ? 4 : LINES], scales;
    uint32_t minus[4];           // code_bias, as an operand
    int upper[2] = {}, turns[2]; // of K types: lines that all lanes read, and where in their words this one's bits are

    // Tiles and tokens are counted from these.
    __device__ __forceinline__ LanePlaces(int tile, int token) {
        const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, row = (token + g) * S::K * 2,
                  first = tile * S::TILE_BYTES;
#pragma unroll
        for (int i = 0; i < (GROUPS_OF_16 ? 4 : 2); i++)
            inputs[i] =
                row + (GROUPS_OF_16 ? swizzle_row<S>(g, 2 * i + t / 2) + t % 2 * 8 : swizzle_row<S>(g, 4 * i + t)),
            keep(inputs[i]);
        if constexpr (GROUPS_OF_16) {
            lines[0] = first + t / 2 * LINE_BYTES + g * 8, upper[0] = first + g * 8;
            turns[0] = t % 2 * 4, turns[1] = 2 * t - 4;
            keep(lines[0]), keep(upper[0]), keep(turns[0]), keep(turns[1]);
        } else if constexpr (S::K_TYPE) {
#pragma unroll
            for (int i = 0; i < 4; i++) // in blocks whose first line is i, i + 4, ..
                lines[i] = first + t * LINE_BYTES + (g * 8 ^ (t + i & 2) * 16), keep(lines[i]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                upper[i] = first + (g * 8 ^ i * 32), keep(upper[i]);
                turns[i] = 2 * t + i - 4, keep(turns[i]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < LINES; i++)
                lines[i] = first + swizzle_line<S>((t * LINES + i) * LINE_BYTES + g * 8), keep(lines[i]);
            scales = tile * S::SPANS * 32 + g * 4, keep(scales);
        }
        if constexpr (S::CODE_BIAS != 0)
#pragma unroll
            for (uint32_t& bias : minus) bias = (0xc300u + S::CODE_BIAS - 128) * 0x10001u, keep(bias);
    }

    // Of block `b` what it has of tile `i`, not scaled; with code_bias more unless EXACT.
    template <bool EXACT>
    __device__ __forceinline__ void weights(const typename S::Stage& stage, int i, int b, uint32_t (&a)[2][4]) const {
        const int first = i * S::TILE_BYTES / LINE_BYTES + b * S::BLOCK_LINES; // a constant
        auto line = [&](int n, int place) {
            return *reinterpret_cast<const uint2*>(stage.lines + n * LINE_BYTES + place);
        };
        if constexpr (S::K_TYPE) {
            constexpr int BITS = RowOf<F>::ROW.bits;
            static_assert(!EXACT && (BITS == 4 || BITS == 5), "as lines are read here");
            const uint2 own = line(first, lines[first % 4]);
            const uint2 above = BITS == 5 ? line(first + 4, upper[first / 2 % 2]) : own;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const uint32_t word = r ? own.y : own.x, bits = r ? above.y : above.x;
                uint32_t four[2] = {word & 0x0f0f0f0fu, shift_by_product<4>(word) & 0x0f0f0f0fu};
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    if (BITS == 5) four[m] |= rotated(bits, turns[m]) & 0x10101010u;
                    a[m][r] = row_pair<F, false>(four[m], false), a[m][r + 2] = row_pair<F, false>(four[m], true);
                }
            }
        } else {
            uint2 raw[LINES];
#pragma unroll
            for (int l = 0; l < LINES; l++) raw[l] = line(first, lines[l]);
            tile_operand<F, EXACT>(raw, a);
        }
    }
    // Of block `b` what it has of the 8 tokens from `token` on.
    __device__ __forceinline__ uint4 block_inputs(const typename S::Stage& stage, int token, int b) const {
        return *reinterpret_cast<const uint4*>(stage.rows + token * S::K * 2 + b / 2 * 128 + inputs[b % 2]);
    }

    // The same of group `n` of 16 inputs of Q6_K: one product.
    __device__ __forceinline__ void group_weights(
        const typename S::Stage& stage, int i, int n, uint32_t (&a)[4]) const {
        static_assert(!GROUPS_OF_16 || F == Q6_K, "lines of three: lower halves of 8 inputs, twice, and upper bits");
        auto line = [&](int n, int place) {
            return *reinterpret_cast<const uint2*>(stage.lines + i * S::TILE_BYTES + n * LINE_BYTES + place);
        };
        const uint2 own = line(3 * n, lines[0]), above = line(3 * n + 2, upper[0]);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint32_t four = (rotated(r ? own.y : own.x, turns[0]) & 0x0f0f0f0fu) |
                (rotated(r ? above.y : above.x, turns[1]) & 0x30303030u);
            a[r] = row_pair<F, false>(four, false), a[r + 2] = row_pair<F, false>(four, true);
        }
    }
    __device__ __forceinline__ uint2 group_inputs(const typename S::Stage& stage, int token, int n) const {
        return *reinterpret_cast<const uint2*>(stage.rows + token * S::K * 2 + inputs[n]);
    }

    // Scales of rows 2g and 2g + 1 of tile `i`.
    __device__ __forceinline__ uint32_t two_scales(const typename S::Stage& stage, int i, int span) const {
        return *reinterpret_cast<const uint32_t*>(stage.scales + (i * S::SPANS + span) * 32 + scales);
    }
};
