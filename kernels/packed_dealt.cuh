// Products of more tokens on Hopper: a warp unpacks weights into registers, scaled, and wgmma takes them from there and
// the tokens' inputs from shared memory.
//
// Such an instruction multiplies 16 inputs, of which lane t of four has numbers 2t, 2t + 1, 2t + 8 and 2t + 9, while a
// lane reads 8t .. 8t + 7 of a block of 32 as they lie. So rows of inputs are dealt out before (experts_deal.cu, and h
// by the kernel that makes it): then all that a lane unpacks is its own.
#pragma once
#include "packed_sums.cuh"

#ifdef HAS_WGMMA
// The weights of a lane in one block of one of the warp's tiles: rows 2g and 2g + 1. TWO: scales as they lie may be
// f16, which are two numbers, and an instruction more for two weights.
template <class S, bool TWO> struct DealtWeights {
    static constexpr Format F = S::F;
    static constexpr bool ROW = is_row_value<F>;
    static_assert(S::K == 64 && S::WARP_TILES == 2, "rows of 128 bytes; 64 rows of weights to a product");
    static constexpr int STEPS = S::K / K_BLOCK * S::WARP_TILES; // tiles take turns
    static constexpr bool WITH_OFFSETS = decltype(scales_of<S>(OfScales{}))::OFFSETS;

    decltype(places_of<S>(0, typename S::Table(nullptr))) places;
    decltype(scales_of<S>(OfScales{})) scales;
    typename decltype(places)::Raw raw;
    SumScales with_offset;
    TwoScales scale;
    RowScales of_tile[S::WARP_TILES];

    __device__ __forceinline__ DealtWeights(const OfScales& of, typename S::Table table)
        : places(places_of<S>(threadIdx.x / WARP * S::WARP_TILES, table)), scales(scales_of<S>(of)) {}

    // Of stage number `s`.
    __device__ __forceinline__ void load(const typename S::Stage& stage, int s, int step) {
        const int i = step % S::WARP_TILES, b = step / S::WARP_TILES, span = b * K_BLOCK / S::SPAN;
        if (step == 0) scales.unpack(stage, s);
        raw = places.raw(stage, s, i, b);
        if constexpr (WITH_OFFSETS)
            with_offset = scales.of(stage, i, span);
        else if constexpr (ROW)
            scale = scales.two_of(i, span);
        else if (b * K_BLOCK % S::SPAN == 0)
            of_tile[i] = {two_scales<S>(stage, scales.place, i, span), TWO && scales.f16};
    }

    // Of the step that was loaded, left operands of two products.
    __device__ __forceinline__ void operands(int step, uint32_t (&a)[2][4]) const {
        if constexpr (WITH_OFFSETS) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint32_t four[2];
                places.codes(raw, r, four);
                const float by = r ? with_offset.scale.y : with_offset.scale.x,
                            offset = r ? with_offset.offset.y : with_offset.offset.x;
                auto weight = [&](int i) { return row_number<F>(four, i) * by + offset; };
#pragma unroll
                for (int p = 0; p < 4; p++) a[p / 2][r + p % 2 * 2] = pack_bf16(weight(2 * p), weight(2 * p + 1));
            }
        } else {
            places.template operand<true>(raw, a);
            if constexpr (ROW) {
                constexpr bool BOTH = F != MXFP4_ROW; // its scales are bf16
                scale.scale(a[0], BOTH), scale.scale(a[1], BOTH);
            } else {
#pragma unroll
                for (auto& of : a) of_tile[step % S::WARP_TILES].scale(of, TWO);
            }
        }
    }
};

// Products of the first 8 C tokens with stage number `s`, whose first step was loaded. Weights of a step are made while
// the one before is multiplied. The last product of the stage before is done when it calls before_is_read; next() is
// called when the last of this one is under way, and may load what follows.
template <class S, bool TWO, int C, class Read, class Next>
__device__ __forceinline__ void multiply_dealt(float (&acc)[2][C][4], DealtWeights<S, TWO>& weights,
    const typename S::Stage& stage, int s, Read before_is_read, Next next) {
    constexpr int STEPS = DealtWeights<S, TWO>::STEPS;
    // From one lane, so that compilers know it to be the same in all: descriptors come from registers of the warp.
    const uint32_t first = __shfl_sync(ALL_LANES, (uint32_t)wgmma_operand(stage.rows), 0);
    const uint64_t rows = (wgmma_operand(stage.rows) & ~0xffffffffull) | first;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const int i = step % S::WARP_TILES, b = step / S::WARP_TILES;
        uint32_t a[2][4];
        weights.operands(step, a);
        if (step + 1 < STEPS) weights.load(stage, s, step + 1);
        wgmma_fence();
        wgmma<8 * C>(acc[i], a[0], wgmma_further(rows, b * K_BLOCK * 2));
        wgmma<8 * C>(acc[i], a[1], wgmma_further(rows, (b * K_BLOCK + 16) * 2));
        wgmma_commit();
        if (step + 1 == STEPS) next();
        wgmma_wait<1>();
        if (step == 0) before_is_read();
    }
}
#endif
