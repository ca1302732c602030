// Products of few tokens: codes meet the inputs as they are, and scales are applied to the sums of a span. A warp has
// WARP_TILES tiles and all tokens.
#pragma once
#include "packed_stage.cuh"

// What a lane's sums are multiplied by, those of rows 2g and 2g + 1 of a tile, and so many times the sums they began
// with are added.
struct SumScales {
    float2 scale, offset;
};

// Scales as they lie in a stage.
template <class S> struct StageScales {
    static constexpr bool OFFSETS = false;
    bool f16;

    __device__ __forceinline__ void unpack(const typename S::Stage&) {}
    __device__ __forceinline__ SumScales of(
        const typename S::Stage& stage, const LanePlaces<S>& places, int i, int span) const {
        return {scales_f32(places.two_scales(stage, i, span), f16), {}};
    }
};

// Those of K types, which the lanes of a warp unpack for one another: lane l has row l % 16 of tile l / 16. They come
// to `shared`, the warp's own BYTES, as sums take them, or for_numbers of weights; all but the latter's offsets is
// exact.
template <class S> struct CountedScales {
    using R = RowOf<S::F>;
    static constexpr Row ROW = R::ROW;
    static constexpr bool OFFSETS = ROW.offsets;
    static constexpr bool TWO = OFFSETS || !S::SCALE_SUMS;
    static constexpr int NUMBERS = TWO ? 2 : 1, BYTES = S::SPANS * WARP * NUMBERS * 4;
    static_assert(S::WARP_TILES * TILE_ROWS == WARP && (ROW.count_bits == 8 || (ROW.count_bits == 6 && OFFSETS)),
        "a lane to a row, counts of Q4_K, Q5_K or Q6_K");
    static constexpr float ABOVE = 0x1p23f; // 0x4b000000 + a number below 2^23
    int head, low, high, upper_bits, to, from, above;
    float of_upper_bits;
    unsigned char* shared;

    __device__ __forceinline__ explicit CountedScales(unsigned char* shared) : shared(shared) {
        const int lane = threadIdx.x % WARP, tile = threadIdx.x / WARP * S::WARP_TILES + lane / TILE_ROWS,
                  row = lane % TILE_ROWS, first = tile * S::SCALE_BYTES;
        head = first + 2 * row, low = first + R::HEAD + row, high = first + R::HEAD + TILE_ROWS + row % 8;
        upper_bits = row < 8 ? 0x0f : 0xf0, of_upper_bits = row < 8 ? 4.0f : 0.25f;
        above = 0x4b000000, to = lane * NUMBERS * 4, from = lane / 4 * 2 * NUMBERS * 4;
        keep(head), keep(low), keep(high), keep(upper_bits), keep(to), keep(from), keep(above);
    }

    __device__ __forceinline__ void unpack(const typename S::Stage& stage) {
        auto two = [&](int at) { return f16_value(*reinterpret_cast<const uint16_t*>(stage.scales + at + head)); };
        // Bits of a byte as a number.
        auto number = [&](uint32_t byte, uint32_t bits) { return __uint_as_float((byte & bits) | (uint32_t)above); };
        const float d = two(0), above_d = -ABOVE * d;
        const float by = OFFSETS ? two(2 * TILE_ROWS) * (S::SCALE_SUMS ? 1.0f / S::CODE_BIAS : -1.0f) : 0.0f,
                    by_upper = by * of_upper_bits, by_lower = by * 0x1p-6f, above_lower = -ABOVE * by_lower;
        float scale[S::SPANS], offset[S::SPANS] = {};
#pragma unroll
        for (int n = 0; n < S::SPANS; n++) {
            const uint32_t count = stage.scales[n * R::RECORD + low];
            scale[n] = ROW.count_bits == 8 ? (number(count, 0xff) - (ABOVE + ROW.count_zero)) * d
                                           : fmaf(number(count, 0x3f), d, above_d); // exact
            if constexpr (OFFSETS) {
                const uint32_t upper = stage.scales[n * R::RECORD + high];
                offset[n] =
                    fmaf(number(upper, upper_bits) - ABOVE, by_upper, fmaf(number(count, 0xc0), by_lower, above_lower));
            }
            if (!S::SCALE_SUMS) offset[n] -= R::NUMBER_BIAS * scale[n];
        }
        __syncwarp(); // what was there is read
#pragma unroll
        for (int n = 0; n < S::SPANS; n++) {
            unsigned char* place = shared + n * WARP * NUMBERS * 4 + to;
            if constexpr (TWO)
                *reinterpret_cast<float2*>(place) = make_float2(scale[n], offset[n]);
            else
                *reinterpret_cast<float*>(place) = scale[n];
        }
        __syncwarp();
    }

    __device__ __forceinline__ SumScales of(const typename S::Stage&, const LanePlaces<S>&, int i, int span) const {
        return of(i, span);
    }
    __device__ __forceinline__ SumScales of(int i, int span) const {
        const unsigned char* place = shared + (span * WARP + i * TILE_ROWS) * NUMBERS * 4 + from;
        if constexpr (TWO) {
            const float4 all = *reinterpret_cast<const float4*>(place);
            return {make_float2(all.x, all.z), make_float2(all.y, all.w)};
        } else {
            return {*reinterpret_cast<const float2*>(place), {}};
        }
    }
};

// `of` what is known of them: the warp's own part of shared memory, or whether they are f16.
template <class S, class Of> __device__ __forceinline__ auto scales_of(Of of) {
    if constexpr (S::K_TYPE)
        return CountedScales<S>(of);
    else
        return StageScales<S>{of};
}

// Adds the products of a stage with the first 8 C tokens.
template <class S, int C, class Scales>
__device__ __forceinline__ void multiply_scaling_sums(
    float (&acc)[S::WARP_TILES][C][4], const typename S::Stage& stage, const LanePlaces<S>& places, Scales& scales) {
    constexpr int BIAS = S::CODE_BIAS, PRODUCTS = S::SPAN / 16;
    static_assert(BIAS < 256 && (!Scales::OFFSETS || BIAS == 128), "bf16 and offsets are exact");
    scales.unpack(stage);
#pragma unroll
    for (int span = 0; span < S::SPANS; span++) {
        uint32_t inputs[C][PRODUCTS][2];
        float begin[C][4] = {};
#pragma unroll
        for (int j = 0; j < C; j++) {
            if constexpr (S::SPAN == 16) {
                const uint2 four = places.group_inputs(stage, j * 8, span);
                inputs[j][0][0] = four.x, inputs[j][0][1] = four.y;
            } else {
#pragma unroll
                for (int b = 0; b < PRODUCTS / 2; b++) {
                    const uint4 row = places.block_inputs(stage, j * 8, span * (PRODUCTS / 2) + b);
                    inputs[j][2 * b][0] = row.x, inputs[j][2 * b][1] = row.y;
                    inputs[j][2 * b + 1][0] = row.z, inputs[j][2 * b + 1][1] = row.w;
                }
            }
            if constexpr (BIAS != 0) {
#pragma unroll
                for (int p = 0; p < PRODUCTS; p++) mma_bf16(begin[j], places.minus, inputs[j][p]);
            }
        }
#pragma unroll
        for (int i = 0; i < S::WARP_TILES; i++) {
            uint32_t weights[PRODUCTS][4];
            if constexpr (S::SPAN == 16) {
                places.group_weights(stage, i, span, weights[0]);
            } else {
#pragma unroll
                for (int b = 0; b < PRODUCTS / 2; b++) {
                    uint32_t of_block[2][4];
                    places.template weights<false>(stage, i, span * (PRODUCTS / 2) + b, of_block);
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        weights[2 * b][c] = of_block[0][c], weights[2 * b + 1][c] = of_block[1][c];
                }
            }
            const SumScales by = scales.of(stage, places, i, span);
#pragma unroll
            for (int j = 0; j < C; j++) {
                float sum[4];
#pragma unroll
                for (int c = 0; c < 4; c++) sum[c] = begin[j][c];
#pragma unroll
                for (int p = 0; p < PRODUCTS; p++) mma_bf16(sum, weights[p], inputs[j][p]);
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    acc[i][j][c] += (c < 2 ? by.scale.x : by.scale.y) * sum[c];
                    if (Scales::OFFSETS) acc[i][j][c] += (c < 2 ? by.offset.x : by.offset.y) * begin[j][c];
                }
            }
        }
    }
}
