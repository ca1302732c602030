// One tile of 16 rows times a few vectors, straight from global memory: what a warp does in experts_gemv.cu and packed_linear.cu.
//
// A unit is 64 inputs of the tile: 1024 (bf16: 2048, int4: 512) bytes, 16 bytes of each line to a lane. Lane (g, t) reads rows 4q .. 4q + 3 (q = g % 4) of
// its lines in block g / 4 of the unit's two. As left operands these are rows g and g + 8 of two instructions, and as the two blocks meet in one
// instruction, the right operand has two columns for each vector: block 0 and block 1 of its inputs. Of the sums, lanes g < 4 take those of the
// first, the others of the second: four vectors to an instruction, and lane (g, t) ends with rows 4q .. 4q + 3 of vector t over its blocks.
// Codes meet the activations as integers; scales are applied to the sums, in f32.
#pragma once
#include "packed_tile.cuh"

constexpr int UNIT = 64;

template <Format F> struct Unit {
    static constexpr int LOADS = Lines<F>::PER_LANE, BYTES = 2 * Lines<F>::PER_BLOCK * LINE_BYTES;
    uint4 lines[LOADS];
    uint2 scales; // bf16 of the four rows
};

// What a lane reads of a unit, and what it multiplies it with.
template <int SETS> struct UnitAt {
    const uint8_t *lines, *scales;
    const bf16* x[SETS];
    float weight;
};

// Where this lane's part of a tile begins, of the scales of input `at` of its block, and of a vector. Of its set of four, lane (g, t) loads inputs of vector g / 2.
template <Format F> __device__ __forceinline__ const uint8_t* lane_lines(const uint8_t* tile, uint32_t codes) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    return tile + codes + (g / 4 * Lines<F>::PER_BLOCK + t * Unit<F>::LOADS) * LINE_BYTES + g % 4 * 16;
}
__device__ __forceinline__ uint32_t lane_scales(int unit, int group_shift) {
    const int g = threadIdx.x % WARP / 4;
    return (uint32_t)(unit * UNIT + g / 4 * K_BLOCK >> group_shift) * 32 + g % 4 * 8;
}
__device__ __forceinline__ int lane_input() {
    const int lane = threadIdx.x % WARP;
    return lane / 4 % 2 * K_BLOCK + lane % 4 * 8;
}

// `blocks`: of this unit's two, those there are. The others are zero.
template <Format F> __device__ __forceinline__ void load_unit(Unit<F>& unit, const uint8_t* lines, const uint8_t* scales, int blocks = 2) {
    const bool there = blocks == 2 || threadIdx.x % WARP < WARP / 2;
#pragma unroll
    for (int i = 0; i < Unit<F>::LOADS; i++)
        unit.lines[i] = there ? load_streaming(reinterpret_cast<const uint4*>(lines + i * LINE_BYTES)) : make_uint4(0, 0, 0, 0);
    if constexpr (F != BF16) unit.scales = there ? __ldg(reinterpret_cast<const uint2*>(scales)) : make_uint2(0, 0);
}

// sum[set][r] += weight * (row 4q + r of the unit) . inputs[set]
template <Format F, int SETS>
__device__ __forceinline__ void multiply_unit(const Unit<F>& unit, const uint4 (&inputs)[SETS], float weight, float (&sum)[SETS][4]) {
    const bool second_block = threadIdx.x % WARP >= WARP / 2;
    float scale[4] = {weight, weight, weight, weight};
    if constexpr (F != BF16) {
        scale[0] *= low_f32(unit.scales.x), scale[1] *= high_f32(unit.scales.x);
        scale[2] *= low_f32(unit.scales.y), scale[3] *= high_f32(unit.scales.y);
    }
    float begin[SETS][4] = {};
#pragma unroll
    for (int s = 0; s < SETS; s++) begin_sums<F>(begin[s], inputs[s]);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint2 raw[Unit<F>::LOADS];
#pragma unroll
        for (int i = 0; i < Unit<F>::LOADS; i++) raw[i] = half ? make_uint2(unit.lines[i].z, unit.lines[i].w) : make_uint2(unit.lines[i].x, unit.lines[i].y);
        uint32_t a[2][4];
        tile_operand<F, false>(raw, a);
#pragma unroll
        for (int s = 0; s < SETS; s++) {
            const uint32_t first[2] = {inputs[s].x, inputs[s].y}, second[2] = {inputs[s].z, inputs[s].w};
            float c[4] = {begin[s][0], begin[s][1], begin[s][2], begin[s][3]};
            mma_bf16(c, a[0], first);
            mma_bf16(c, a[1], second);
            sum[s][2 * half] += scale[2 * half] * (second_block ? c[1] : c[0]);
            sum[s][2 * half + 1] += scale[2 * half + 1] * (second_block ? c[3] : c[2]);
        }
    }
}

// A warp's part of sums over whole units: first, first + STEP, ... below `units`, DEPTH of them on their way at a time. locate(i, d): where unit i + d * STEP is.
template <Format F, int SETS, int DEPTH, int STEP, class Locate>
__device__ __forceinline__ void add_units(int first, int units, Locate locate, float (&sum)[SETS][4]) {
    // No branches between the units of a batch: their latencies overlap only within a basic block.
    auto batch = [&](int i, auto size) {
        constexpr int SIZE = decltype(size)::value;
        Unit<F> unit[SIZE];
#pragma unroll
        for (int d = 0; d < SIZE; d++) {
            const UnitAt<SETS> at = locate(i, d);
            load_unit<F>(unit[d], at.lines, at.scales);
        }
#pragma unroll
        for (int d = 0; d < SIZE; d++) {
            const UnitAt<SETS> at = locate(i, d);
            uint4 inputs[SETS];
#pragma unroll
            for (int s = 0; s < SETS; s++) inputs[s] = *reinterpret_cast<const uint4*>(at.x[s]);
            multiply_unit<F, SETS>(unit[d], inputs, at.weight, sum);
        }
    };
    int i = first;
    for (; i + (DEPTH - 1) * STEP < units; i += DEPTH * STEP) batch(i, Constant<DEPTH>{});
    if constexpr (DEPTH > 4) {
        if (i + 3 * STEP < units) batch(i, Constant<4>{}), i += 4 * STEP;
    }
    if constexpr (DEPTH > 2) {
        if (i + STEP < units) batch(i, Constant<2>{}), i += 2 * STEP;
    }
    if constexpr (DEPTH > 1) {
        if (i < units) batch(i, Constant<1>{});
    }
}

// The inputs of a matrix beyond its last whole unit, fewer than 64.
template <Format F, int SETS> __device__ __forceinline__ void add_rest(const UnitAt<SETS>& at, int inputs_left, float (&sum)[SETS][4]) {
    Unit<F> unit;
    load_unit<F>(unit, at.lines, at.scales, div_ceil(inputs_left, K_BLOCK));
    uint4 inputs[SETS];
#pragma unroll
    for (int s = 0; s < SETS; s++) inputs[s] = lane_input() < inputs_left ? *reinterpret_cast<const uint4*>(at.x[s]) : make_uint4(0, 0, 0, 0);
    multiply_unit<F, SETS>(unit, inputs, at.weight, sum);
}

// One tile: `warp` of WARPS that share its inputs. x: vectors' rows.
template <Format F, int SETS, int DEPTH, int WARPS>
__device__ __forceinline__ void add_tile(const uint8_t* tile, const bf16* const (&x)[SETS], int k, int group, int warp, float (&sum)[SETS][4]) {
    const int group_shift = F == BF16 ? 0 : 31 - __clz(group), units = k / UNIT;
    const uint8_t* lines = lane_lines<F>(tile, scale_bytes<F>(k, group));
    auto locate = [&](int i, int d) {
        UnitAt<SETS> at;
        at.lines = lines + (size_t)i * Unit<F>::BYTES + d * WARPS * Unit<F>::BYTES;
        at.scales = tile + lane_scales(i + d * WARPS, group_shift);
#pragma unroll
        for (int s = 0; s < SETS; s++) at.x[s] = x[s] + lane_input() + i * UNIT + d * WARPS * UNIT;
        at.weight = 1.0f;
        return at;
    };
    add_units<F, SETS, DEPTH, WARPS>(warp, units, locate, sum);
    if (k % UNIT && units % WARPS == warp) add_rest<F, SETS>(locate(units, 0), k % UNIT, sum);
}

// Both blocks' lanes: then lanes below 16 have sums of rows 4 (lane / 4) .. + 3 of vector lane % 4 of each set.
template <int SETS> __device__ __forceinline__ void add_blocks(float (&sum)[SETS][4]) {
#pragma unroll
    for (int s = 0; s < SETS; s++)
#pragma unroll
        for (int r = 0; r < 4; r++) sum[s][r] += __shfl_xor_sync(ALL_LANES, sum[s][r], 16);
}
