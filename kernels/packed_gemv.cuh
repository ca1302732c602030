// One tile of 16 rows times a few vectors, straight from global memory: what a warp does in experts_gemv.cu and
// packed_linear.cu.
//
// A unit is 64 inputs of the tile: 16 bytes of each line to a lane. Lane
// (g, t) reads rows 4q .. 4q + 3 (q = g % 4) of its lines in block g / 4 of the unit's two. As left operands these are
// rows g and g + 8 of two instructions, and as the two blocks meet in one instruction, the right operand has two
// columns for each vector: block 0 and block 1 of its inputs. Of the sums, lanes g < 4 take those of the first, the
// others of the second: four vectors to an instruction, and lane (g, t) ends with rows 4q .. 4q + 3 of vector t over
// its blocks. Codes meet the activations as integers; scales are applied to the sums, in f32, and offsets to the sums
// of the inputs. Units of INT4 and INT8 that lie in one group of scales are a span, and summed before they are scaled.
#pragma once
#include "packed_table.cuh"

constexpr int UNIT = 64, EIGHTS = UNIT / 8;

// Calls act(Constant<units of a span>).
template <Format F, class Act> __device__ __forceinline__ void with_span(const Packing& packing, Act act) {
    if constexpr (F == INT4 || F == INT8) {
        if (packing.group >= 2 * UNIT) return act(Constant<2>{});
    }
    act(Constant<1>{});
}

// Vectors to an instruction, and which of them a lane reads the inputs of and ends with the sums of.
constexpr int VECTORS = 4;
__device__ __forceinline__ int vector_of_input() { return threadIdx.x % WARP / EIGHTS; }
__device__ __forceinline__ int vector_of_sum() { return threadIdx.x % VECTORS; }

template <Format F, bool ROW = is_row(F)> struct Unit {
    static constexpr int LOADS = Lines<F>::PER_LANE;
    static constexpr int DEPTH = 8 / LOADS; // of a warp on their way at a time: as many as registers allow
    static constexpr int PARTS = 1;
    static constexpr bool OFFSETS = false, IS_LARGE = false;
    static constexpr int LINES_OF_256 = 256 / K_BLOCK * Lines<F>::PER_BLOCK * LINE_BYTES; // bytes for as many inputs
    uint4 lines[LOADS];
    uint2 scales; // of the four rows
};
template <Format F> struct Unit<F, true> : RowUnit {
    using R = RowOf<F>;
    static constexpr int DEPTH = R::LOADS == 1 ? 4 : R::LOADS == 2 ? 3 : 2;
    // Groups of 16 are two of a block: lanes t = 0, 1 and 2, 3 bring their inputs.
    static constexpr int PARTS = R::PARTS;
    static constexpr bool OFFSETS = R::ROW.offsets;
    static constexpr int LINES_OF_256 = (R::BLOCKS * R::LINES + R::MORE_LINES) * LINE_BYTES;
    // What is made of it takes many registers. Q6_K does as well, but is faster with fewer.
    static constexpr bool IS_LARGE =
        F != Q6_K && (PARTS == 2 || R::LOADS == 3 || (R::ROW.scales == COUNTED && R::LOADS == 2));
};

// Where a lane reads a unit: of what is no row.
template <Format F> struct LinePlace {
    const uint8_t *lines, *scales;

    __device__ __forceinline__ void go_on(uint32_t lines_on, uint32_t scales_on) {
        lines += lines_on, scales += scales_on;
    }
};
// Of unit `u` of a tile, whose codes begin at `codes`. Beyond k the last block stands in: its inputs are zero.
template <Format F>
__device__ __forceinline__ auto unit_place(const uint8_t* tile, int u, int k, int shift, uint32_t codes) {
    if constexpr (is_row(F)) {
        return row_place<F, Unit<F>::PARTS>(tile, u, k, shift, codes);
    } else {
        const uint32_t lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4,
                       block = min(2 * u + g / 4, (uint32_t)(k - 1) / K_BLOCK);
        const uint32_t lines =
            block * (Lines<F>::PER_BLOCK * LINE_BYTES) + (codes + g % 4 * 16 + t * (Unit<F>::LOADS * LINE_BYTES));
        return LinePlace<F>{tile + lines, tile + ((block * K_BLOCK >> shift) * 32 + g % 4 * 8)};
    }
}
// What lies so many bytes of lines and of scales behind a place; the scales of what is no row only if it `has_scales`.
template <Format F, class Place>
__device__ __forceinline__ void load_unit(
    Unit<F>& unit, const Place& at, uint32_t lines_on = 0, uint32_t scales_on = 0, bool has_scales = true) {
    if constexpr (is_row(F)) {
        load_row_unit<F, Unit<F>::PARTS>(unit, at, lines_on, scales_on);
    } else {
#pragma unroll
        for (int i = 0; i < Unit<F>::LOADS; i++)
            unit.lines[i] = load_streaming(reinterpret_cast<const uint4*>(at.lines + lines_on + i * LINE_BYTES));
        if (F != BF16 && has_scales) unit.scales = __ldg(reinterpret_cast<const uint2*>(at.scales + scales_on));
    }
}

// Rows 4q + 2 half and the next as left operands, not scaled; codes of INT4 have 136 too much, those of rows with
// offsets NUMBER_BIAS.
template <Format F, class T>
__device__ __forceinline__ void unit_operand(const Unit<F>& unit, int half, const T& table, uint32_t (&a)[2][4]) {
    if constexpr (has_table<F>) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            uint32_t pairs[4];
            table.codes(unit, 2 * half + row, pairs);
#pragma unroll
            for (int p = 0; p < 4; p++) a[p / 2][row + p % 2 * 2] = pairs[p];
        }
    } else if constexpr (is_row(F)) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            uint32_t four[2];
            row_codes<F>(unit, 2 * half + row, table, four);
#pragma unroll
            for (int m = 0; m < 2; m++)
                a[m][row] = row_pair<F, !Unit<F>::OFFSETS>(four[m], false),
                a[m][row + 2] = row_pair<F, !Unit<F>::OFFSETS>(four[m], true);
        }
    } else {
        uint2 raw[Unit<F>::LOADS];
#pragma unroll
        for (int i = 0; i < Unit<F>::LOADS; i++)
            raw[i] = half ? make_uint2(unit.lines[i].z, unit.lines[i].w) : make_uint2(unit.lines[i].x, unit.lines[i].y);
        tile_operand<F, false>(raw, a);
    }
}

// What a lane adds up for its rows 4q .. 4q + 3: products with the inputs of both blocks. Its own count; they are
// chosen once, at the end.
using UnitSums = float[4][2];

// sum[set][r][b] += (row 4q + r of a span's units) . inputs[unit][set] of their block b
template <Format F, int SETS, int SPAN, class T>
__device__ __forceinline__ void multiply_span(
    const Unit<F>* units, const uint4 (&inputs)[SPAN][SETS], bool f16, const T& table, UnitSums (&sum)[SETS]) {
    const Unit<F>& unit = units[0];
    constexpr int PARTS = Unit<F>::PARTS;
    constexpr bool OFFSETS = Unit<F>::OFFSETS;
    float2 scale[PARTS][4]; // and offset
    if constexpr (is_row(F)) {
        row_scales<F>(unit, f16, scale);
    } else if constexpr (F != BF16) {
        const float2 first = scales_f32(unit.scales.x, f16), second = scales_f32(unit.scales.y, f16);
        scale[0][0].x = first.x, scale[0][1].x = first.y, scale[0][2].x = second.x, scale[0][3].x = second.y;
    } else {
#pragma unroll
        for (int r = 0; r < 4; r++) scale[0][r].x = 1.0f;
    }
    // Of a part alone: the inputs of the other are zero.
    auto of_part = [&](const uint4& eight, int part, uint32_t (&first)[2], uint32_t (&second)[2]) {
        const uint4 inputs = in_order_of_codes<F>(eight);
        const bool own = PARTS == 1 || (int)(threadIdx.x % 4) / 2 == part;
        first[0] = own ? inputs.x : 0, first[1] = own ? inputs.y : 0;
        second[0] = own ? inputs.z : 0, second[1] = own ? inputs.w : 0;
    };
    // Sums of the inputs: for offsets, and for what codes have too much.
    [[maybe_unused]] float all[SETS][PARTS][4];
    if constexpr (OFFSETS || F == INT4) {
        const uint32_t ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
#pragma unroll
        for (int s = 0; s < SETS; s++)
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
#pragma unroll
                for (int c = 0; c < 4; c++) all[s][part][c] = 0.0f;
#pragma unroll
                for (int u = 0; u < SPAN; u++) {
                    uint32_t first[2], second[2];
                    of_part(inputs[u][s], part, first, second);
                    mma_bf16(all[s][part], ones, first);
                    mma_bf16(all[s][part], ones, second);
                }
            }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t a[SPAN][2][4];
#pragma unroll
        for (int u = 0; u < SPAN; u++) unit_operand<F>(units[u], half, table, a[u]);
#pragma unroll
        for (int s = 0; s < SETS; s++)
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                if constexpr (F == INT4) c[0] = c[2] = -136.0f * all[s][0][0], c[1] = c[3] = -136.0f * all[s][0][1];
#pragma unroll
                for (int u = 0; u < SPAN; u++) {
                    uint32_t first[2], second[2];
                    of_part(inputs[u][s], part, first, second);
                    mma_bf16(c, a[u][0], first);
                    mma_bf16(c, a[u][1], second);
                }
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float2 by = scale[part][2 * half + i / 2];
                    if constexpr (OFFSETS) by = for_numbers<F>(by);
                    float& to = sum[s][2 * half + i / 2][i % 2];
                    to += by.x * c[i];
                    if constexpr (OFFSETS) to += by.y * all[s][part][i % 2];
                }
            }
    }
}

// A vector, or null for none, and the number of a unit in it.
struct Input {
    const bf16* x;
    int u;
};
// This lane's eight of it, zero beyond k.
__device__ __forceinline__ uint4 load_input(const Input& of, int k) {
    const int at = of.u * UNIT + threadIdx.x % EIGHTS * 8;
    return of.x && at < k ? *reinterpret_cast<const uint4*>(of.x + at) : make_uint4(0, 0, 0, 0);
}

// Of `units`, or spans, those that warp `first` of `step` has.
__device__ __forceinline__ int units_of(int units, int first, int step) {
    return max(0, (units - first + step - 1) / step);
}

// What a warp reads, DEPTH units at a time: load(unit, d) brings the d-th of them, in their order, next() goes on to
// those behind. `count`: units in which a lane has a block; inputs of the others are zero.
//
// Here they are every STEP-th span of a tile from `first` on. A lane goes on by as many bytes each time: a step of rows
// is of whole groups and super-blocks.
template <Format F, int STEP, int DEPTH, int SPAN> struct TileUnits {
    static constexpr int INPUTS = STEP * SPAN * UNIT;
    static_assert(!is_row(F) || INPUTS % 256 == 0, "super-blocks have 256 inputs, groups up to 128");
    static_assert(DEPTH % SPAN == 0, "whole spans are on their way");
    static constexpr int LINES_OF_UNIT = Unit<F>::LINES_OF_256 / (256 / UNIT),
                         LINES_STEP = INPUTS / UNIT * LINES_OF_UNIT;
    decltype(unit_place<F>(nullptr, 0, 0, 0, 0)) at;
    uint32_t scales_step = 0;
    int count;

    __device__ __forceinline__ TileUnits(const uint8_t* tile, int first, int k, const Packing& packing)
        : at(unit_place<F>(tile, SPAN * first, k, shift_of_group(packing), tile_bytes_of<F>(k, packing).scales)) {
        if constexpr (is_row(F)) {
            using R = RowOf<F>;
            if constexpr (R::HAS_SUPER_BLOCKS)
                scales_step = INPUTS / R::SUPER_BLOCK * R::SUPER_BYTES;
            else if constexpr (R::ROW.group != 0)
                scales_step = INPUTS / R::ROW.group * R::RECORD;
            else
                scales_step = (INPUTS >> shift_of_group(packing)) * R::RECORD;
        } else if (F != BF16) {
            scales_step = (INPUTS >> shift_of_group(packing)) * 32;
        }
        // A span is whole, but a unit may lack its second block.
        const int blocks = div_ceil(k, K_BLOCK), of_second = SPAN == 1 ? threadIdx.x % WARP / (WARP / 2) : 0;
        count = SPAN * units_of((blocks + 2 * SPAN - 1 - of_second) / (2 * SPAN), first, STEP);
    }
    __device__ __forceinline__ void load(Unit<F>& unit, int d) {
        load_unit<F>(
            unit, at, d / SPAN * LINES_STEP + d % SPAN * LINES_OF_UNIT, is_row(F) ? d * scales_step : 0, d % SPAN == 0);
        // A step that is not known when this is compiled: sums cost less than products.
        if (!is_row(F) && d % SPAN == SPAN - 1) at.go_on(0, scales_step);
    }
    __device__ __forceinline__ void next() { at.go_on(DEPTH / SPAN * LINES_STEP, is_row(F) ? DEPTH * scales_step : 0); }
};

// Rows 4q .. 4q + 3 of the vectors, to where those of the warp are.
__device__ __forceinline__ void put_sums(const UnitSums& sums, float (&part)[VECTORS][TILE_ROWS]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const float own = lane < WARP / 2 ? sums[r][0] : sums[r][1];
        const float sum = own + __shfl_xor_sync(ALL_LANES, own, WARP / 2);
        if (lane < WARP / 2) part[vector_of_sum()][lane / 4 * 4 + r] = sum;
    }
}

// The sums of a warp over `count` units, DEPTH of them on their way at a time. x_of(n, set): of the n-th one this
// lane's vector of a set of VECTORS. Unless there are `several` vectors, all lanes have the same. ready() is called
// once, when the first weights are on their way and before any x is read. All warps of the block come here. SHARED:
// inputs go through `inputs` of the warp, [SETS][DEPTH][WARP] in shared memory; else L1 has them soon, as many blocks
// read the same. LINE: of a table.
template <Format F, int SETS, int SPAN, int DEPTH, int LINE, bool SHARED, class Units, class X, class Ready>
__device__ __forceinline__ void gemv_units(Units units, int count, int k, const Packing& packing, X x_of, Ready ready,
    uint4* inputs, bool several, UnitSums (&sums)[SETS]) {
    using Table = TableOf<F, LINE>;
    __shared__ __align__(16) unsigned char table[Table::BYTES ? Table::BYTES : 1];
    const int lane = threadIdx.x % WARP;
    const bool f16 = (is_row(F) || Lines<F>::F16_SCALES) && packing.f16;
    Unit<F> unit[DEPTH] = {};
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
        if (d < units.count) units.load(unit[d], d);
    units.next();
    Table::fill(table, packing.grid);
    ready();
    if (Table::BYTES) __syncthreads();

    // Inputs go through shared memory: read where they are used, each unit's would wait for those of the one before. Of
    // several vectors a lane brings what it needs itself, of one what all need: then there is room for more units.
    constexpr int RUNS = WARP / EIGHTS; // of DEPTH units of one vector
    const int stride = several ? WARP : EIGHTS, room = several ? DEPTH : RUNS * DEPTH, own = lane % stride;
    const uint4* here = inputs;
#pragma unroll 1
    for (int n = 0, run = 0; n < count; n += DEPTH) {
        if (SHARED && run == 0) {
            __syncwarp();
#pragma unroll 1
            for (int i = lane / stride; i < room && n + i < count; i += WARP / stride)
#pragma unroll
                for (int s = 0; s < SETS; s++) {
                    const Input of = x_of(n + i, s);
                    const int at = of.u * UNIT + lane % EIGHTS * 8;
                    const bool there = of.x && at < k;
                    copy_async_16(inputs + s * DEPTH * WARP + i * stride + own, there ? of.x + at : nullptr, there);
                }
            copy_async_commit();
            copy_async_wait<0>();
            __syncwarp();
            here = inputs + own;
        }
        run = several || run + 1 == RUNS ? 0 : run + 1;
        const int left = count - n, behind = units.count - n - DEPTH;
#pragma unroll
        for (int d = 0; d < DEPTH; d += SPAN) {
            if (d >= left) break;
            uint4 eight[SPAN][SETS];
#pragma unroll
            for (int u = 0; u < SPAN; u++)
#pragma unroll
                for (int s = 0; s < SETS; s++)
                    eight[u][s] =
                        SHARED ? here[s * DEPTH * WARP + (d + u) * stride] : load_input(x_of(n + d + u, s), k);
            multiply_span<F, SETS, SPAN>(unit + d, eight, f16, Table(table), sums);
#pragma unroll
            for (int u = 0; u < SPAN; u++)
                if (d + u < behind) units.load(unit[d + u], d + u);
        }
        here += DEPTH * stride;
        units.next();
    }
}

// The same over every STEP-th span of a tile from `first` on; row_of(set) is this lane's vector.
template <Format F, int SETS, int STEP, int DEPTH, int LINE, bool SHARED, class X, class Ready>
__device__ __forceinline__ void gemv_tile(const uint8_t* tile, int first, int k, const Packing& packing, X row_of,
    Ready ready, uint4* inputs, bool several, UnitSums (&sums)[SETS]) {
    with_span<F>(packing, [&](auto span) {
        constexpr int SPAN = decltype(span)::value;
        gemv_units<F, SETS, SPAN, DEPTH, LINE, SHARED>(
            TileUnits<F, STEP, DEPTH, SPAN>(tile, first, k, packing),
            SPAN * units_of(div_ceil(k, SPAN * UNIT), first, STEP), k, packing,
            [&](int n, int set) { return Input{row_of(set), SPAN * (first + n / SPAN * STEP) + n % SPAN}; }, ready,
            inputs, several, sums);
    });
}

// The same over a run of spans of several tiles, one behind the other: `count` from `first` on. tile_of(c) is the c-th
// tile and row_of(c) this lane's vector for it, or null. Here inputs stay in registers. What has spans is no row.
template <Format F, int SPAN, int DEPTH, class Tile, class Row, class Ready>
__device__ __forceinline__ void gemv_run(
    Tile tile_of, Row row_of, int first, int count, int k, const Packing& packing, Ready ready, UnitSums (&sums)[1]) {
    const bool f16 = Lines<F>::F16_SCALES && packing.f16;
    const int spans = div_ceil(k, SPAN * UNIT);
    using Units = TileUnits<F, 1, DEPTH, SPAN>;
    // Weights are a round ahead, which may be of the next tile: what is left of the run, and of the tile.
    int c = first / spans, start = first % spans, to_load = count, behind, rounds;
    auto units_here = [&] {
        const int here = min(spans - start, to_load);
        to_load -= here;
        Units units(tile_of(c), start, k, packing);
        behind = min(units.count, SPAN * here), rounds = div_ceil(SPAN * here, DEPTH);
        return units;
    };
    Units units = units_here();
    auto next = [&] {
        units.next();
        behind -= DEPTH;
        if (--rounds > 0) return;
        behind = 0, start = 0, c++;
        if (to_load > 0) units = units_here();
    };
    Unit<F> unit[DEPTH] = {};
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
        if (d < behind) units.load(unit[d], d);
    next();
    ready();
    int of_input = first / spans, from = first % spans, to_go = count;
    Input input{count ? row_of(of_input) : nullptr, SPAN * from};
    uint4 eight[SPAN][1];
    auto bring = [&] {
#pragma unroll
        for (int u = 0; u < SPAN; u++) eight[u][0] = load_input(Input{input.x, input.u + u}, k);
    };
    bring();
#pragma unroll 1
    for (; to_go > 0; from = 0) {
        const int here = min(spans - from, to_go);
        to_go -= here;
#pragma unroll 1
        for (int left = SPAN * here; left > 0; left -= DEPTH) {
#pragma unroll
            for (int d = 0; d < DEPTH; d += SPAN) {
                if (d < left) {
                    uint4 own[SPAN][1];
#pragma unroll
                    for (int u = 0; u < SPAN; u++) own[u][0] = eight[u][0];
                    input.u += SPAN;
                    if (d + SPAN == left && to_go > 0) input = Input{row_of(++of_input), 0};
                    bring();
                    multiply_span<F, 1, SPAN>(unit + d, own, f16, nullptr, sums);
                }
#pragma unroll
                for (int u = 0; u < SPAN; u++)
                    if (d + u < behind) units.load(unit[d + u], d + u);
            }
            next();
        }
    }
}
