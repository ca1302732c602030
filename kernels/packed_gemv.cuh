// One tile of 16 rows times a few vectors, straight from global memory: what a warp does in experts_gemv.cu and
// packed_linear.cu.
//
// A unit is 64 inputs of the tile: 1024 (bf16: 2048, int4 and mxfp4: 512) bytes, 16 bytes of each line to a lane. Lane
// (g, t) reads rows 4q .. 4q + 3 (q = g % 4) of its lines in block g / 4 of the unit's two. As left operands these are
// rows g and g + 8 of two instructions, and as the two blocks meet in one instruction, the right operand has two
// columns for each vector: block 0 and block 1 of its inputs. Of the sums, lanes g < 4 take those of the first, the
// others of the second: four vectors to an instruction, and lane (g, t) ends with rows 4q .. 4q + 3 of vector t over
// its blocks. Codes meet the activations as integers; scales are applied to the sums, in f32.
#pragma once
#include "packed_tile.cuh"

constexpr int UNIT = 64;

template <Format F> struct Unit {
    static constexpr int LOADS = Lines<F>::PER_LANE;
    static constexpr int DEPTH = 8 / LOADS; // of a warp on their way at a time: as many as registers allow
    uint4 lines[LOADS];
    uint2 scales; // of the four rows
    bool there;
};

// This lane's part of unit `u` of a tile. Blocks beyond k are zero.
template <Format F>
__device__ __forceinline__ void load_unit(
    Unit<F>& unit, const uint8_t* tile, int u, int k, int group_shift, uint32_t codes) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, block = 2 * u + g / 4;
    unit.there = block * K_BLOCK < k;
    const uint8_t* from = tile + codes + (size_t)block * (Lines<F>::PER_BLOCK * LINE_BYTES) +
        t * Unit<F>::LOADS * LINE_BYTES + g % 4 * 16;
#pragma unroll
    for (int i = 0; i < Unit<F>::LOADS; i++)
        unit.lines[i] =
            unit.there ? load_streaming(reinterpret_cast<const uint4*>(from + i * LINE_BYTES)) : make_uint4(0, 0, 0, 0);
    if constexpr (F != BF16) {
        const uint8_t* scales = tile + (block * K_BLOCK >> group_shift) * 32 + g % 4 * 8;
        unit.scales = unit.there ? __ldg(reinterpret_cast<const uint2*>(scales)) : make_uint2(0, 0);
    }
}

// This lane's inputs of unit `u`: 8 of vector g / 2 of a set of four, in block g % 2. `x`: that vector, any readable
// one if there is none.
__device__ __forceinline__ uint4 load_inputs(const bf16* x, int u, int k) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, at = u * UNIT + g % 2 * K_BLOCK + t * 8;
    return at < k ? *reinterpret_cast<const uint4*>(x + at) : make_uint4(0, 0, 0, 0);
}

// sum[set][r] += weight * (row 4q + r of the unit) . inputs[set]
template <Format F, int SETS>
__device__ __forceinline__ void multiply_unit(
    const Unit<F>& unit, const uint4 (&inputs)[SETS], float weight, bool f16, float (&sum)[SETS][4]) {
    const bool second_block = threadIdx.x % WARP >= WARP / 2;
    float scale[4] = {weight, weight, weight, weight};
    if constexpr (F != BF16) {
        const float2 first = scales_f32(unit.scales.x, f16), second = scales_f32(unit.scales.y, f16);
        scale[0] *= first.x, scale[1] *= first.y, scale[2] *= second.x, scale[3] *= second.y;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint2 raw[Unit<F>::LOADS];
#pragma unroll
        for (int i = 0; i < Unit<F>::LOADS; i++)
            raw[i] = half ? make_uint2(unit.lines[i].z, unit.lines[i].w) : make_uint2(unit.lines[i].x, unit.lines[i].y);
        uint32_t a[2][4];
        tile_operand<F>(raw, a);
#pragma unroll
        for (int s = 0; s < SETS; s++) {
            const uint32_t first[2] = {inputs[s].x, inputs[s].y}, second[2] = {inputs[s].z, inputs[s].w};
            float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            mma_bf16(c, a[0], first);
            mma_bf16(c, a[1], second);
            sum[s][2 * half] += scale[2 * half] * (second_block ? c[1] : c[0]);
            sum[s][2 * half + 1] += scale[2 * half + 1] * (second_block ? c[3] : c[2]);
        }
    }
}

// A warp's part of sums over units: units first, first + step, ... below `units`, DEPTH of them on their way at a time.
// locate(i) gives .tile, .u, .x(set) and .weight of unit i. ready() is called once, when the first weights are on their
// way and before any x is read.
template <Format F, int SETS, int DEPTH, class Locate, class Ready>
__device__ __forceinline__ void gemv_units(
    int first, int step, int units, int k, int group, bool f16, Locate locate, Ready ready, float (&sum)[SETS][4]) {
    if (first >= units) ready();
    const int group_shift = F == BF16 ? 0 : 31 - __clz(group);
    const uint32_t codes = scale_bytes<F>(k, group);
    for (int i = first; i < units; i += step * DEPTH) {
        Unit<F> unit[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (i + d * step >= units) break;
            const auto at = locate(i + d * step);
            load_unit<F>(unit[d], at.tile, at.u, k, group_shift, codes);
        }
        if (i == first) ready();
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (i + d * step >= units) break;
            const auto at = locate(i + d * step);
            uint4 inputs[SETS];
#pragma unroll
            for (int s = 0; s < SETS; s++) inputs[s] = load_inputs(at.x[s], at.u, k);
            multiply_unit<F, SETS>(unit[d], inputs, at.weight, f16, sum);
        }
    }
    // Both blocks' lanes.
#pragma unroll
    for (int s = 0; s < SETS; s++)
#pragma unroll
        for (int r = 0; r < 4; r++) sum[s][r] += __shfl_xor_sync(ALL_LANES, sum[s][r], 16);
}
