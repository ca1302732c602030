// One tile of 16 rows times a few vectors, straight from global memory: what a warp does in experts_gemv.cu and
// packed_linear.cu.
//
// A unit is 64 inputs of the tile: 16 bytes of each line to a lane. Lane
// (g, t) reads rows 4q .. 4q + 3 (q = g % 4) of its lines in block g / 4 of the unit's two. As left operands these are
// rows g and g + 8 of two instructions, and as the two blocks meet in one instruction, the right operand has two
// columns for each vector: block 0 and block 1 of its inputs. Of the sums, lanes g < 4 take those of the first, the
// others of the second: four vectors to an instruction, and lane (g, t) ends with rows 4q .. 4q + 3 of vector t over
// its blocks. Codes meet the activations as integers; scales are applied to the sums, in f32, and offsets to the sums
// of the inputs.
#pragma once
#include "packed_tile.cuh"

constexpr int UNIT = 64;

template <Format F> struct Unit {
    static constexpr int LOADS = Lines<F>::PER_LANE;
    static constexpr int DEPTH =
        Lines<F>::COUNTED ? 4 : 8 / LOADS; // of a warp on their way at a time: as many as registers allow
    // Groups of 16 are two of a block: lanes t = 0, 1 and 2, 3 bring their inputs.
    static constexpr int PARTS = F == Q6_K ? 2 : 1;
    uint4 lines[LOADS];
    uint2 scales; // of the four rows; counted: d
    uint2 dmin;
    uint32_t counts[PARTS], offsets[PARTS];
    bool there;
};

// This lane's part of unit `u` of a tile. Blocks beyond k are zero.
template <Format F>
__device__ __forceinline__ void load_unit(
    Unit<F>& unit, const uint8_t* tile, int u, int k, int group_shift, uint32_t codes) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, block = 2 * u + g / 4;
    unit.there = block * K_BLOCK < k;
    const uint8_t* from = tile + codes + (size_t)block * (Lines<F>::PER_BLOCK * LINE_BYTES) + g % 4 * 16;
#pragma unroll
    for (int i = 0; i < Unit<F>::LOADS; i++)
        unit.lines[i] = unit.there
            ? load_streaming(reinterpret_cast<const uint4*>(from + lane_line<F>(t, i) * LINE_BYTES))
            : make_uint4(0, 0, 0, 0);
    if constexpr (Lines<F>::COUNTED) {
        using C = Counts<F>;
        const uint8_t* head = tile + (size_t)(block * K_BLOCK / C::SUPER_BLOCK) * C::BYTES;
        const uint8_t* record = head + C::HEAD + block * K_BLOCK % C::SUPER_BLOCK / C::GROUP * C::RECORD;
        const int rows = g % 4 * 4;
        unit.scales = unit.there ? __ldg(reinterpret_cast<const uint2*>(head + 2 * rows)) : make_uint2(0, 0);
        unit.dmin =
            C::OFFSETS && unit.there ? __ldg(reinterpret_cast<const uint2*>(head + 32 + 2 * rows)) : make_uint2(0, 0);
#pragma unroll
        for (int part = 0; part < Unit<F>::PARTS; part++) {
            auto at = [&](uint32_t, int i) {
                return unit.there ? __ldg(reinterpret_cast<const uint32_t*>(record + part * C::RECORD + i)) : 0u;
            };
            counts<F, uint32_t>(rows, at, unit.counts[part], unit.offsets[part]);
        }
    } else if constexpr (F != BF16) {
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
    constexpr int PARTS = Unit<F>::PARTS;
    constexpr bool OFFSETS = Lines<F>::OFFSETS;
    float scale[PARTS][4];
    [[maybe_unused]] float offset[4];
    if constexpr (Lines<F>::COUNTED) {
        const float2 d[2] = {scales_f32(unit.scales.x, true), scales_f32(unit.scales.y, true)};
        const float2 dmin[2] = {scales_f32(unit.dmin.x, true), scales_f32(unit.dmin.y, true)};
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const float2 s = counted_scale<F>(r % 2 ? d[r / 2].y : d[r / 2].x,
                    r % 2 ? dmin[r / 2].y : dmin[r / 2].x, unit.counts[part], unit.offsets[part], r);
                scale[part][r] = weight * s.x;
                if constexpr (OFFSETS) offset[r] = weight * s.y;
            }
    } else {
#pragma unroll
        for (int r = 0; r < 4; r++) scale[0][r] = weight;
        if constexpr (F != BF16) {
            const float2 first = scales_f32(unit.scales.x, f16), second = scales_f32(unit.scales.y, f16);
            scale[0][0] *= first.x, scale[0][1] *= first.y, scale[0][2] *= second.x, scale[0][3] *= second.y;
        }
    }
    // Of a part alone: the inputs of the other are zero.
    auto of_part = [&](const uint4& inputs, int part, uint32_t (&first)[2], uint32_t (&second)[2]) {
        const bool own = PARTS == 1 || (int)(threadIdx.x % 4) / 2 == part;
        first[0] = own ? inputs.x : 0, first[1] = own ? inputs.y : 0;
        second[0] = own ? inputs.z : 0, second[1] = own ? inputs.w : 0;
    };
    [[maybe_unused]] float all[SETS]; // sums of the inputs
    if constexpr (OFFSETS) {
        static_assert(PARTS == 1, "offsets are of whole blocks");
        const uint32_t ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
#pragma unroll
        for (int s = 0; s < SETS; s++) {
            uint32_t first[2], second[2];
            of_part(inputs[s], 0, first, second);
            float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            mma_bf16(c, ones, first);
            mma_bf16(c, ones, second);
            all[s] = second_block ? c[1] : c[0];
        }
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
        for (int s = 0; s < SETS; s++)
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                uint32_t first[2], second[2];
                of_part(inputs[s], part, first, second);
                float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                mma_bf16(c, a[0], first);
                mma_bf16(c, a[1], second);
                sum[s][2 * half] += scale[part][2 * half] * (second_block ? c[1] : c[0]);
                sum[s][2 * half + 1] += scale[part][2 * half + 1] * (second_block ? c[3] : c[2]);
                if constexpr (OFFSETS) {
                    sum[s][2 * half] += offset[2 * half] * all[s];
                    sum[s][2 * half + 1] += offset[2 * half + 1] * all[s];
                }
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
    const int group_shift = F == BF16 || Lines<F>::COUNTED ? 0 : 31 - __clz(group);
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
