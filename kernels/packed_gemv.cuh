// One tile of 16 rows times a few vectors: what a warp does in experts_gemv.cu and packed_linear.cu.
//
// A unit is 64 inputs of the tile: 1024 (bf16: 2048, int4: 512) bytes, 16 bytes of each line to a lane. Lane (g, t) reads rows 4q .. 4q + 3 (q = g % 4) of
// its lines in block g / 4 of the unit's two. As left operands these are rows g and g + 8 of two instructions, and as the two blocks meet in one
// instruction, the right operand has two columns for each vector: block 0 and block 1 of its inputs. Of the sums, lanes g < 4 take those of the
// first, the others of the second: four vectors to an instruction, and lane (g, t) ends with rows 4q .. 4q + 3 of vector t over its blocks.
// Codes meet the activations as integers; scales are applied to the sums, in f32. Units come by asynchronous copies into a ring of the warp, DEPTH of them on
// their way, as registers for so many loads would leave too few warps; but for the scales, a lane reads what it copied.
#pragma once
#include "packed_tile.cuh"

constexpr int UNIT = 64;

template <Format F> struct Unit {
    static constexpr int LOADS = Lines<F>::PER_LANE, BYTES = 2 * Lines<F>::PER_BLOCK * LINE_BYTES;
    uint4 lines[LOADS];
    uint2 scales; // bf16 of the four rows
};

template <Format F> constexpr int RING_SLOT = Unit<F>::BYTES + (F == BF16 ? 0 : 64); // lines, then the scales of both blocks

// Where a unit's parts for this lane are: its lines, the scales it copies for the warp (lanes 0 .. 3), its inputs.
template <int SETS> struct UnitAt {
    const uint8_t *lines, *scales;
    const bf16* x[SETS];
    float weight;
};

template <Format F> __device__ __forceinline__ const uint8_t* lane_lines(const uint8_t* tile, uint32_t codes) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    return tile + codes + (g / 4 * Lines<F>::PER_BLOCK + t * Unit<F>::LOADS) * LINE_BYTES + g % 4 * 16;
}
__device__ __forceinline__ uint32_t lane_scales(int unit, int group_shift) {
    const int lane = threadIdx.x % WARP;
    return (uint32_t)((unit * UNIT + lane / 2 * K_BLOCK) >> group_shift) * 32 + lane % 2 * 16;
}
__device__ __forceinline__ int lane_input() { // lane (g, t) has inputs of vector g / 2 of a set of four
    const int lane = threadIdx.x % WARP;
    return lane / 4 % 2 * K_BLOCK + lane % 4 * 8;
}

// Copies `blocks` blocks of a unit, zeros for the other.
template <Format F> __device__ __forceinline__ void copy_unit(uint8_t* slot, const uint8_t* lines, const uint8_t* scales, int blocks) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < Unit<F>::LOADS; i++) copy_async_16(slot + (i * WARP + lane) * 16, lines + i * LINE_BYTES, lane / 16 < blocks);
    if (F != BF16 && lane < 4) copy_async_16(slot + Unit<F>::BYTES + lane * 16, scales, lane / 2 < blocks);
}
template <Format F> __device__ __forceinline__ void read_unit(Unit<F>& unit, const uint8_t* slot) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < Unit<F>::LOADS; i++) unit.lines[i] = *reinterpret_cast<const uint4*>(slot + (i * WARP + lane) * 16);
    if constexpr (F != BF16) unit.scales = *reinterpret_cast<const uint2*>(slot + Unit<F>::BYTES + lane / 4 * 8);
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

// A warp's part of sums over whole units: first, first + step, ... below `units`. ring: DEPTH slots, empty and with no copies on their way.
template <Format F, int SETS, int DEPTH, class Locate>
__device__ __forceinline__ void add_units(uint8_t* ring, int first, int step, int units, Locate locate, float (&sum)[SETS][4]) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        const int i = first + d * step;
        if (i < units) {
            const UnitAt<SETS> at = locate(i);
            copy_unit<F>(ring + d * RING_SLOT<F>, at.lines, at.scales, 2);
        }
        copy_async_commit();
    }
    uint8_t* slot = ring;
    for (int i = first; i < units; i += step) {
        const UnitAt<SETS> at = locate(i);
        uint4 inputs[SETS];
#pragma unroll
        for (int s = 0; s < SETS; s++) inputs[s] = *reinterpret_cast<const uint4*>(at.x[s]);
        copy_async_wait<DEPTH - 1>();
        __syncwarp();
        Unit<F> unit;
        read_unit<F>(unit, slot);
        multiply_unit<F, SETS>(unit, inputs, at.weight, sum);
        __syncwarp();
        const int next = i + DEPTH * step;
        if (next < units) {
            const UnitAt<SETS> at = locate(next);
            copy_unit<F>(slot, at.lines, at.scales, 2);
        }
        copy_async_commit();
        slot = slot == ring + (DEPTH - 1) * RING_SLOT<F> ? ring : slot + RING_SLOT<F>;
    }
}

// The inputs of a matrix beyond its last whole unit, fewer than 64.
template <Format F, int SETS> __device__ __forceinline__ void add_rest(uint8_t* ring, const UnitAt<SETS>& at, int inputs_left, float (&sum)[SETS][4]) {
    const int blocks = div_ceil(inputs_left, K_BLOCK);
    copy_unit<F>(ring, at.lines, at.scales, blocks);
    copy_async_commit();
    uint4 inputs[SETS];
#pragma unroll
    for (int s = 0; s < SETS; s++) inputs[s] = lane_input() < inputs_left ? *reinterpret_cast<const uint4*>(at.x[s]) : make_uint4(0, 0, 0, 0);
    copy_async_wait<0>();
    __syncwarp();
    Unit<F> unit;
    read_unit<F>(unit, ring);
    multiply_unit<F, SETS>(unit, inputs, at.weight, sum);
    __syncwarp();
}

// One tile: `warp` of WARPS that share its inputs. x: vectors' rows.
template <Format F, int SETS, int DEPTH, int WARPS>
__device__ __forceinline__ void add_tile(uint8_t* ring, const uint8_t* tile, const bf16* const (&x)[SETS], int k, int group, int warp, float (&sum)[SETS][4]) {
    const int group_shift = F == BF16 ? 0 : 31 - __clz(group), units = k / UNIT;
    const uint8_t* lines = lane_lines<F>(tile, scale_bytes<F>(k, group));
    auto locate = [&](int i) {
        UnitAt<SETS> at;
        at.lines = lines + (size_t)i * Unit<F>::BYTES;
        at.scales = tile + lane_scales(i, group_shift);
#pragma unroll
        for (int s = 0; s < SETS; s++) at.x[s] = x[s] + lane_input() + i * UNIT;
        at.weight = 1.0f;
        return at;
    };
    add_units<F, SETS, DEPTH>(ring, warp, WARPS, units, locate, sum);
    if (k % UNIT && units % WARPS == warp) add_rest<F, SETS>(ring, locate(units), k % UNIT, sum);
}

// Both blocks' lanes: then lanes below 16 have sums of rows 4 (lane / 4) .. + 3 of vector lane % 4 of each set.
template <int SETS> __device__ __forceinline__ void add_blocks(float (&sum)[SETS][4]) {
#pragma unroll
    for (int s = 0; s < SETS; s++)
#pragma unroll
        for (int r = 0; r < 4; r++) sum[s][r] += __shfl_xor_sync(ALL_LANES, sum[s][r], 16);
}
