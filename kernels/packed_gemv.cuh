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
#include "packed_rows.cuh"

constexpr int UNIT = 64;

template <Format F, bool ROW = is_row(F)> struct Unit {
    static constexpr int LOADS = Lines<F>::PER_LANE;
    static constexpr int DEPTH = 8 / LOADS; // of a warp on their way at a time: as many as registers allow
    static constexpr int PARTS = 1, GRID_WORDS = 0;
    static constexpr bool OFFSETS = false;
    uint4 lines[LOADS];
    uint2 scales; // of the four rows
};
template <Format F> struct Unit<F, true> : RowUnit {
    using R = RowOf<F>;
    static constexpr int DEPTH = R::LOADS == 1 ? 4 : R::LOADS == 2 ? 3 : 2;
    // Groups of 16 are two of a block: lanes t = 0, 1 and 2, 3 bring their inputs.
    static constexpr int PARTS = R::PARTS, GRID_WORDS = R::GRID_WORDS;
    static constexpr bool OFFSETS = R::ROW.offsets;
};

// This lane's part of unit `u` of a tile. Blocks beyond k are zero.
template <Format F>
__device__ __forceinline__ void load_unit(
    Unit<F>& unit, const uint8_t* tile, int u, int k, int group_shift, uint32_t codes) {
    if constexpr (is_row(F)) {
        load_row_unit<F, Unit<F>::PARTS>(unit, tile, u, k, group_shift, codes);
    } else {
        const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, block = 2 * u + g / 4;
        const bool there = block * K_BLOCK < k;
        const uint8_t* from = tile + codes + (size_t)block * (Lines<F>::PER_BLOCK * LINE_BYTES) + g % 4 * 16;
#pragma unroll
        for (int i = 0; i < Unit<F>::LOADS; i++)
            unit.lines[i] = there
                ? load_streaming(reinterpret_cast<const uint4*>(from + (t * Unit<F>::LOADS + i) * LINE_BYTES))
                : make_uint4(0, 0, 0, 0);
        if constexpr (F != BF16) {
            const uint8_t* scales = tile + (block * K_BLOCK >> group_shift) * 32 + g % 4 * 8;
            unit.scales = there ? __ldg(reinterpret_cast<const uint2*>(scales)) : make_uint2(0, 0);
        }
    }
}

// Rows 4q + 2 half and the next as left operands, not scaled.
template <Format F>
__device__ __forceinline__ void unit_operand(const Unit<F>& unit, int half, const uint32_t* grid, uint32_t (&a)[2][4]) {
    if constexpr (is_row(F)) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            uint32_t four[2];
            row_codes<F>(unit, 2 * half + row, grid, four);
#pragma unroll
            for (int m = 0; m < 2; m++)
                a[m][row] = row_pair<F>(four[m], false), a[m][row + 2] = row_pair<F>(four[m], true);
        }
    } else {
        uint2 raw[Unit<F>::LOADS];
#pragma unroll
        for (int i = 0; i < Unit<F>::LOADS; i++)
            raw[i] = half ? make_uint2(unit.lines[i].z, unit.lines[i].w) : make_uint2(unit.lines[i].x, unit.lines[i].y);
        tile_operand<F>(raw, a);
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
__device__ __forceinline__ void multiply_unit(const Unit<F>& unit, const uint4 (&inputs)[SETS], float weight, bool f16,
    const uint32_t* grid, float (&sum)[SETS][4]) {
    const bool second_block = threadIdx.x % WARP >= WARP / 2;
    constexpr int PARTS = Unit<F>::PARTS;
    constexpr bool OFFSETS = Unit<F>::OFFSETS;
    float scale[PARTS][4];
    [[maybe_unused]] float offset[PARTS][4];
    if constexpr (is_row(F)) {
        float2 of_rows[PARTS][4];
        row_scales<F>(unit, f16, of_rows);
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int r = 0; r < 4; r++)
                scale[part][r] = weight * of_rows[part][r].x, offset[part][r] = weight * of_rows[part][r].y;
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
    [[maybe_unused]] float all[SETS][PARTS]; // sums of the inputs
    if constexpr (OFFSETS) {
        const uint32_t ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
#pragma unroll
        for (int s = 0; s < SETS; s++)
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                uint32_t first[2], second[2];
                of_part(inputs[s], part, first, second);
                float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                mma_bf16(c, ones, first);
                mma_bf16(c, ones, second);
                all[s][part] = second_block ? c[1] : c[0];
            }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t a[2][4];
        unit_operand<F>(unit, half, grid, a);
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
                    sum[s][2 * half] += offset[part][2 * half] * all[s][part];
                    sum[s][2 * half + 1] += offset[part][2 * half + 1] * all[s][part];
                }
            }
    }
}

// A warp's part of sums over units: units first, first + step, ... below `units`, DEPTH of them on their way at a time.
// locate(i) gives .tile, .u, .x(set) and .weight of unit i; all lanes call it, each for an i of its own. ready() is
// called once, when the first weights are on their way and before any x is read. All warps of the block come here.
// `inputs`: of the warp, [DEPTH][EIGHTS] in shared memory, if the four vectors of a set are one; else null.
constexpr int EIGHTS = UNIT / 8;
template <Format F, int SETS, int DEPTH, class Locate, class Ready>
__device__ __forceinline__ void gemv_units(int first, int step, int units, int k, const Packing& packing, Locate locate,
    Ready ready, uint4* inputs, float (&sum)[SETS][4]) {
    constexpr int GRID_WORDS = Unit<F>::GRID_WORDS;
    __shared__ uint32_t grid[GRID_WORDS ? GRID_WORDS : 1];
    copy_grid(grid, packing.grid, GRID_WORDS);
    auto begin = [&] {
        ready();
        if (GRID_WORDS) __syncthreads();
    };
    if (first >= units) begin();
    const int lane = threadIdx.x % WARP, group_shift = packing.group ? 31 - __clz(packing.group) : 0;
    const bool f16 = (is_row(F) || Lines<F>::F16_SCALES) && packing.f16;
    const uint32_t codes = tile_bytes_of<F>(k, packing).scales;
    for (int i = first; i < units; i += step * DEPTH) {
        Unit<F> unit[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (i + d * step >= units) break;
            const auto at = locate(i + d * step);
            load_unit<F>(unit[d], at.tile, at.u, k, group_shift, codes);
        }
        if (i == first) begin();
        if (inputs) {
            // A lane brings what all need: read where they are used, each unit's would wait for those of the one
            // before.
#pragma unroll 1
            for (int eight = lane; eight < div_ceil(DEPTH * EIGHTS, WARP) * WARP; eight += WARP) {
                const auto at = locate(min(i + eight / EIGHTS * step, units - 1));
                const int from = at.u * UNIT + eight % EIGHTS * 8;
                if (eight < DEPTH * EIGHTS) copy_async_16(inputs + eight, at.x[0] + min(from, k - 8), from < k);
            }
            copy_async_commit();
            copy_async_wait<0>();
            __syncwarp();
        }
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (i + d * step >= units) break;
            const auto at = locate(i + d * step);
            uint4 eight[SETS];
#pragma unroll
            for (int s = 0; s < SETS; s++)
                eight[s] = inputs ? inputs[d * EIGHTS + lane / 4 % 2 * 4 + lane % 4] : load_inputs(at.x[s], at.u, k);
            multiply_unit<F, SETS>(unit[d], eight, at.weight, f16, grid, sum);
        }
        __syncwarp();
    }
    // Both blocks' lanes.
#pragma unroll
    for (int s = 0; s < SETS; s++)
#pragma unroll
        for (int r = 0; r < 4; r++) sum[s][r] += __shfl_xor_sync(ALL_LANES, sum[s][r], 16);
}
