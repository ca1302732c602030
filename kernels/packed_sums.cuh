// Products of few tokens: codes meet the inputs as they are, and scales are applied to the sums of a span. A warp has
// WARP_TILES tiles and all tokens.
#pragma once
#include "packed_stage.cuh"

// What a lane's sums are multiplied by, those of rows 2g and 2g + 1 of a tile, and so many times the sums they began
// with are added. (Of weights that are scaled: their scale and offset.)
struct SumScales {
    float2 scale, offset;
};

// What is known of scales beside a stage: a warp's own part of shared memory, where it needs some, and
// whether they are f16, where the launch says.
struct OfScales {
    unsigned char* shared;
    bool f16;
};

// Scales as they lie in a stage.
template <class S> struct StageScales {
    static constexpr bool OFFSETS = false;
    int place;
    bool f16;

    // Tiles are counted from this one.
    __device__ __forceinline__ StageScales(int tile, bool f16) : place(place_of_scales<S>(tile)), f16(f16) {
        keep(place);
    }
    __device__ __forceinline__ void unpack(const typename S::Stage&, int) {}
    __device__ __forceinline__ SumScales of(const typename S::Stage& stage, int i, int span) const {
        return {scales_f32(two_scales<S>(stage, place, i, span), f16), {}};
    }
};

// Scales of rows, which the lanes of a warp unpack for one another: lane l has row l % 16 of tile l / 16. A warp's part
// of shared memory has for each span and row
//
//   sums                      the scale, and what SumScales calls offset if there is one
//   weights with offsets      scale and offset, for row_number
//   weights without           the scale as a sum of two bf16 numbers, each twice (TwoScales)
template <class S> struct WarpScales {
    using R = RowOf<S::F>;
    static constexpr Row ROW = R::ROW;
    static constexpr bool OFFSETS = ROW.offsets;
    static constexpr int NUMBERS = OFFSETS || !S::SCALE_SUMS ? 2 : 1;
    static_assert(
        S::WARP_TILES * TILE_ROWS == WARP && S::WARP_SCALES == S::SPANS * WARP * NUMBERS * 4, "a lane to a row");
    int row, first, to, from; // first: the tile's scales
    unsigned char* shared;

    __device__ __forceinline__ explicit WarpScales(const OfScales& of) : shared(of.shared) {
        const int lane = threadIdx.x % WARP;
        row = lane % TILE_ROWS;
        first = (threadIdx.x / WARP * S::WARP_TILES + lane / TILE_ROWS) * S::SCALE_BYTES;
        to = lane * NUMBERS * 4, from = lane / 4 * 2 * NUMBERS * 4;
        // Of groups of 16 a lane's weights are in one of a block's two.
        if (!S::SCALE_SUMS && S::SPAN == 16) from += lane % 4 / 2 * WARP * NUMBERS * 4;
        keep(row), keep(first), keep(to), keep(from);
    }
    // In between two __syncwarp. `offset`: what SumScales says of sums, else the weight of code 0.
    __device__ __forceinline__ void put(int span, float scale, float offset) {
        unsigned char* place = shared + span * WARP * NUMBERS * 4 + to;
        if constexpr (!S::SCALE_SUMS && !OFFSETS)
            *reinterpret_cast<uint2*>(place) = two_bf16(scale);
        else if constexpr (NUMBERS == 2)
            *reinterpret_cast<float2*>(place) =
                S::SCALE_SUMS ? make_float2(scale, offset) : for_numbers<S::F>(make_float2(scale, offset));
        else
            *reinterpret_cast<float*>(place) = scale;
    }
    __device__ __forceinline__ SumScales of(const typename S::Stage&, int i, int span) const {
        const unsigned char* place = at(i, span);
        if constexpr (NUMBERS == 2) {
            const float4 all = *reinterpret_cast<const float4*>(place);
            return {make_float2(all.x, all.z), make_float2(all.y, all.w)};
        } else {
            return {*reinterpret_cast<const float2*>(place), {}};
        }
    }
    __device__ __forceinline__ TwoScales two_of(int i, int span) const {
        const uint4 all = *reinterpret_cast<const uint4*>(at(i, span));
        return {{all.x, all.z}, {all.y, all.w}};
    }

private:
    __device__ __forceinline__ const unsigned char* at(int i, int span) const {
        return shared + (span * WARP + i * TILE_ROWS) * NUMBERS * 4 + from;
    }
};

// Those of Q4_K, Q5_K and Q6_K; of sums they are exact.
template <class S> struct CountedScales : WarpScales<S> {
    using All = WarpScales<S>;
    using R = RowOf<S::F>;
    static constexpr Row ROW = R::ROW;
    static constexpr bool OFFSETS = ROW.offsets;
    static_assert(ROW.count_bits == 8 || (ROW.count_bits == 6 && OFFSETS), "as counts are read here");
    static constexpr float ABOVE = 0x1p23f; // 0x4b000000 + a number below 2^23
    int head, low, high, upper_bits, above;
    float of_upper_bits;

    __device__ __forceinline__ explicit CountedScales(const OfScales& of) : All(of) {
        const int row = All::row;
        head = All::first + 2 * row, low = All::first + R::HEAD + row;
        high = All::first + R::HEAD + TILE_ROWS + row % 8;
        upper_bits = row < 8 ? 0x0f : 0xf0, of_upper_bits = row < 8 ? 4.0f : 0.25f, above = 0x4b000000;
        keep(head), keep(low), keep(high), keep(upper_bits), keep(above);
    }

    __device__ __forceinline__ void unpack(const typename S::Stage& stage, int) {
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
                                           : fmaf(number(count, 0x3f), d, above_d);
            if constexpr (OFFSETS) {
                const uint32_t upper = stage.scales[n * R::RECORD + high];
                offset[n] =
                    fmaf(number(upper, upper_bits) - ABOVE, by_upper, fmaf(number(count, 0xc0), by_lower, above_lower));
            }
        }
        __syncwarp(); // what was there is read
#pragma unroll
        for (int n = 0; n < S::SPANS; n++) All::put(n, scale[n], offset[n]);
        __syncwarp();
    }
};

// Those of all other rows; of sums they are exact but NVFP4's, which are rounded to f32.
template <class S> struct UnpackedScales : WarpScales<S> {
    using All = WarpScales<S>;
    using R = RowOf<S::F>;
    static constexpr Row ROW = R::ROW;
    static_assert(S::K == 64, "s counts stages of two blocks");
    bool f16;

    __device__ __forceinline__ explicit UnpackedScales(const OfScales& of) : All(of), f16(ROW.group != 0 || of.f16) {}

    __device__ __forceinline__ void unpack(const typename S::Stage& stage, int s) {
        const int row = All::row;
        const unsigned char *head = stage.scales + All::first, *records = head + R::HEAD;
        if (S::Tile::SKEW) records += s % 2 * S::Tile::SKEW;
        auto two = [&](const unsigned char* from, bool f16) {
            const uint16_t bits = *reinterpret_cast<const uint16_t*>(from + 2 * row);
            return f16 ? f16_value(bits) : __uint_as_float((uint32_t)bits << 16);
        };
        auto four = [&](const unsigned char* from) { return *reinterpret_cast<const float*>(from + 4 * row); };
        float d = 0.0f, dmin = 0.0f;
        if constexpr (ROW.scales == OF_ROW) d = four(head);
        if constexpr (R::HAS_SUPER_BLOCKS) d = two(head, true);
        if constexpr (R::HAS_SUPER_BLOCKS && ROW.offsets) dmin = two(head + 2 * TILE_ROWS, true);
        float scale[S::SPANS], offset[S::SPANS] = {};
#pragma unroll
        for (int n = 0; n < S::SPANS; n++) {
            const unsigned char* record = records + n * R::RECORD;
            // Bits of rows r, r + ROWS, ..
            auto part = [&](int at, int rows, int bits) {
                return (uint32_t)record[at + row % rows] >> row / rows * bits & ((1u << bits) - 1);
            };
            if constexpr (ROW.scales == SINGLE) {
                scale[n] = two(record, f16);
            } else if constexpr (ROW.scales == WIDE) {
                scale[n] = four(record);
            } else if constexpr (ROW.scales == OF_ROW) {
                scale[n] = e4m3_above((uint32_t)record[row] << 24) * d;
            } else if constexpr (ROW.scales == WITH_OFFSET) {
                scale[n] = two(record, true), offset[n] = two(record + 2 * TILE_ROWS, true);
            } else if constexpr (ROW.scales == ZEROS) {
                scale[n] = two(record, f16), offset[n] = -(scale[n] * (float)record[2 * TILE_ROWS + row]);
            } else if constexpr (ROW.scales == COUNTED && ROW.count_bits == 4) {
                scale[n] = d * (float)(record[row] & 15u), offset[n] = -(dmin * (float)(record[row] >> 4));
            } else if constexpr (ROW.scales == COUNTED) {
                static_assert(ROW.count_bits == 6 && !ROW.offsets, "the others are CountedScales");
                scale[n] = d * ((float)(part(0, 8, 4) | part(8, 4, 2) << 4) - ROW.count_zero);
            } else {
                uint32_t count = 0;
                if constexpr (ROW.count_bits == 4) {
                    count = part(0, 8, 4);
                } else if constexpr (ROW.count_bits == 3) {
                    auto bit = [&](int i) { return reinterpret_cast<const uint16_t*>(record)[i] >> row & 1u; };
                    count = bit(0) | bit(1) << 1 | bit(2) << 2;
                } else if constexpr (R::GRID) { // among the codes
                    const unsigned char* tile = stage.lines + All::first / S::SCALE_BYTES * S::TILE_BYTES + 4 * row;
                    auto word = [&](int line) { return *reinterpret_cast<const uint32_t*>(tile + line * LINE_BYTES); };
                    count = ROW.codes == ONES_GRID ? word(2 * R::LINES) >> (n % 2 * 16 + 12) & 7u
                        : ROW.codes == EIGHT_GRID  ? word(n * R::LINES + 1) >> 28
                                                   : word(n * R::LINES + 2) >> 28;
                }
                scale[n] = d * ((float)(2 * count + 1) / (float)(1 << ROW.count_zero));
            }
        }
        __syncwarp(); // what was there is read
#pragma unroll
        for (int n = 0; n < S::SPANS; n++)
            All::put(n, scale[n], S::SCALE_SUMS && ROW.offsets ? offset[n] * (-1.0f / S::CODE_BIAS) : offset[n]);
        __syncwarp();
    }
};

// What a lane has read of two rows in a block, as an operand that is not scaled; with NUMBER_BIAS more unless EXACT.
template <bool EXACT, class Places>
__device__ __forceinline__ void row_operand(
    const Places& places, const typename Places::Raw& raw, uint32_t (&a)[2][4]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t four[2];
        places.codes(raw, r, four);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            a[m][r] = row_pair<Places::F, EXACT>(four[m], false);
            a[m][r + 2] = row_pair<Places::F, EXACT>(four[m], true);
        }
    }
}

// Lines of integers of four and five bits.
template <class S> struct IntegerPlaces : InputPlaces<S> {
    static constexpr Format F = S::F;
    static constexpr int BITS = RowOf<F>::ROW.bits;
    static_assert((BITS == 4 || BITS == 5) && 2 * S::TILE_BYTES % (4 * LINE_BYTES) == 0, "as lines are read here");
    int lines[4], upper[2], turns[2]; // in blocks whose first line is i, i + 4, ..; where in words this lane's bits are

    __device__ __forceinline__ explicit IntegerPlaces(int tile) : InputPlaces<S>(0) {
        const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4, first = tile * S::TILE_BYTES;
#pragma unroll
        for (int i = 0; i < 4; i++)
            lines[i] = first + (int)swizzle_line<S>((i + t) * LINE_BYTES + g * 8) - i * LINE_BYTES, keep(lines[i]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            upper[i] = first + (int)swizzle_line<S>(2 * i * LINE_BYTES + g * 8) - 2 * i * LINE_BYTES, keep(upper[i]);
            turns[i] = 2 * t + i - 4, keep(turns[i]);
        }
    }
    // What it reads of block `b` of tile `i`, and codes of row 2g + r of that.
    struct Raw {
        uint2 own, above;
    };
    __device__ __forceinline__ Raw raw(const typename S::Stage& stage, int, int i, int b) const {
        const int first = i * S::TILE_BYTES / LINE_BYTES + b * S::BLOCK_LINES; // a constant
        auto line = [&](int n, int place) {
            return *reinterpret_cast<const uint2*>(stage.lines + n * LINE_BYTES + place);
        };
        const uint2 own = line(first, lines[first % 4]);
        return {own, BITS == 5 ? line(first + 4, upper[first / 2 % 2]) : own}; // 4 more: of the same swizzle
    }
    __device__ __forceinline__ void codes(const Raw& raw, int r, uint32_t (&four)[2]) const {
        const uint32_t word = r ? raw.own.y : raw.own.x, bits = r ? raw.above.y : raw.above.x;
        four[0] = word & 0x0f0f0f0fu, four[1] = shift_by_product<4>(word) & 0x0f0f0f0fu;
        if (BITS == 5)
#pragma unroll
            for (int m = 0; m < 2; m++) four[m] |= rotated(bits, turns[m]) & 0x10101010u;
    }
    template <bool EXACT> __device__ __forceinline__ void operand(const Raw& raw, uint32_t (&a)[2][4]) const {
        row_operand<EXACT>(*this, raw, a);
    }
};

// Lines and inputs of Q6_K, a group of 16 at a time, of which lane (g, t) has inputs 4t .. 4t + 3: one product. A group
// has lower halves of 8 inputs, twice, and upper bits.
template <class S> struct SixBitPlaces {
    static constexpr Format F = S::F;
    static constexpr int UNIT = 16, PRODUCTS = 1;
    static_assert(RowOf<F>::ROW.bits == 6 && S::SPAN == UNIT, "as lines are read here");
    int inputs[4], lines, upper, turns[2];
    uint32_t minus[4];

    __device__ __forceinline__ explicit SixBitPlaces(int tile) {
        const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4, first = tile * S::TILE_BYTES;
#pragma unroll
        for (int n = 0; n < 4; n++)
            inputs[n] = g * S::K * 2 + swizzle_row<S>(g, 2 * n + t / 2) + t % 2 * 8, keep(inputs[n]);
        lines = first + t / 2 * LINE_BYTES + g * 8, upper = first + 2 * LINE_BYTES + g * 8;
        turns[0] = t % 2 * 4, turns[1] = 2 * t - 4;
        keep(lines), keep(upper), keep(turns[0]), keep(turns[1]);
        minus_bias<S>(minus);
    }
    __device__ __forceinline__ void load(
        const typename S::Stage& stage, int token, int n, uint32_t (&of)[PRODUCTS][2]) const {
        const uint2 four = *reinterpret_cast<const uint2*>(stage.rows + token * S::K * 2 + inputs[n]);
        of[0][0] = four.x, of[0][1] = four.y;
    }
    struct Raw {
        uint2 own, above;
    };
    __device__ __forceinline__ Raw raw(const typename S::Stage& stage, int, int i, int n) const {
        const unsigned char* group = stage.lines + i * S::TILE_BYTES + 3 * n * LINE_BYTES;
        return {*reinterpret_cast<const uint2*>(group + lines), *reinterpret_cast<const uint2*>(group + upper)};
    }
    template <bool EXACT> __device__ __forceinline__ void operand(const Raw& raw, uint32_t (&a)[1][4]) const {
        static_assert(!EXACT, "with their bias");
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint32_t four = (rotated(r ? raw.own.y : raw.own.x, turns[0]) & 0x0f0f0f0fu) |
                (rotated(r ? raw.above.y : raw.above.x, turns[1]) & 0x30303030u);
            a[0][r] = row_pair<F, false>(four, false), a[0][r + 2] = row_pair<F, false>(four, true);
        }
    }
};

// Lines of all other rows but DIGITS.
template <class S> struct RowPlaces : InputPlaces<S> {
    static constexpr Format F = S::F;
    using R = RowOf<F>;
    static constexpr Codes CODES = R::ROW.codes;
    static_assert(CODES != DIGITS && S::K == 64, "as lines are read here");
    static_assert(!has_table<F> || S::SCALE_SUMS || S::DEALT, "inputs are permuted as they are loaded, or dealt out");
    int lines[R::LOADS];
    typename S::Table table;

    __device__ __forceinline__ RowPlaces(int tile, typename S::Table table) : InputPlaces<S>(0), table(table) {
        const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int l = 0; l < R::LOADS; l++)
            lines[l] = tile * S::TILE_BYTES + swizzle_line<S>(line_of_load<F>(l, t, 2 * R::LINES) * LINE_BYTES + g * 8),
            keep(lines[l]);
    }
    using Raw = RowUnit;
    __device__ __forceinline__ Raw raw(const typename S::Stage& stage, int s, int i, int b) const {
        const unsigned char* tile = stage.lines + i * S::TILE_BYTES;
        Raw unit;
        unit.within = 2 * (s % 4) + b;
#pragma unroll
        for (int l = 0; l < R::LOADS; l++) {
            const uint2 two = *reinterpret_cast<const uint2*>(
                tile + (l == R::LOAD_BEHIND ? 0 : b * R::LINES * LINE_BYTES) + lines[l]);
            unit.lines[l].x = two.x, unit.lines[l].y = two.y;
        }
        return unit;
    }
    __device__ __forceinline__ void codes(const Raw& unit, int r, uint32_t (&four)[2]) const {
        row_codes<F>(unit, r, table, four);
    }
    template <bool EXACT> __device__ __forceinline__ void operand(const Raw& unit, uint32_t (&a)[2][4]) const {
        if constexpr (!has_table<F>)
            row_operand<EXACT>(*this, unit, a);
        else
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint32_t pairs[4];
                if constexpr (S::SCALE_SUMS)
                    table.codes(unit, r, pairs);
                else
                    table.codes_in_order(unit, r, pairs);
#pragma unroll
                for (int p = 0; p < 4; p++) a[p / 2][r + p % 2 * 2] = pairs[p];
            }
    }
};

// A warp's, by what is known of scales and where the table is.
template <class S> __device__ __forceinline__ auto scales_of(const OfScales& of) {
    if constexpr (S::K_TYPE)
        return CountedScales<S>(of);
    else if constexpr (is_row_value<S::F>)
        return UnpackedScales<S>(of);
    else
        return StageScales<S>(threadIdx.x / WARP * S::WARP_TILES, of.f16);
}
template <class S> __device__ __forceinline__ auto places_of(int tile, typename S::Table table) {
    if constexpr (S::F == Q6_K && S::SCALE_SUMS) {
        return SixBitPlaces<S>(tile);
    } else if constexpr (is_row_value<S::F>) {
        constexpr Row ROW = RowOf<S::F>::ROW;
        if constexpr (ROW.codes == INTEGERS && (ROW.bits == 4 || ROW.bits == 5))
            return IntegerPlaces<S>(tile);
        else
            return RowPlaces<S>(tile, table);
    } else {
        return LanePlaces<S>(tile, 0);
    }
}

// Adds the products of stage number `s` with the first 8 C tokens. Inputs beyond 2^120 may make NaN of them, because
// sums begin with so many of them.
template <class S, int C, class Places, class Scales>
__device__ __forceinline__ void multiply_scaling_sums(
    float (&acc)[S::WARP_TILES][C][4], const typename S::Stage& stage, int s, const Places& places, Scales& scales) {
    // A step has whole units; one of 32 inputs may have two spans, to each of which half of the lanes bring something.
    constexpr int BIAS = S::CODE_BIAS, UNIT = Places::UNIT, STEP = S::SPAN < UNIT ? UNIT : S::SPAN,
                  PARTS = STEP / S::SPAN, UNITS = STEP / UNIT, PRODUCTS = Places::PRODUCTS;
    static_assert(BIAS < 256 && (!Scales::OFFSETS || BIAS == 128), "bf16 and offsets are exact");
    scales.unpack(stage, s);
#pragma unroll
    for (int step = 0; step < S::K / STEP; step++) {
        uint32_t inputs[C][UNITS][PRODUCTS][2];
        float begin[PARTS][C][4] = {};
        auto each_product = [&](float (&sum)[4], const uint32_t (*weights)[PRODUCTS][4], int j, int part) {
#pragma unroll
            for (int u = 0; u < UNITS; u++)
#pragma unroll
                for (int p = 0; p < PRODUCTS; p++) {
                    uint32_t of_part[2] = {inputs[j][u][p][0], inputs[j][u][p][1]};
                    if (PARTS == 2)
                        for (uint32_t& x : of_part) x = (int)threadIdx.x % 4 / 2 == part ? x : 0;
                    mma_bf16(sum, weights ? weights[u][p] : places.minus, of_part);
                }
        };
#pragma unroll
        for (int j = 0; j < C; j++) {
#pragma unroll
            for (int u = 0; u < UNITS; u++) places.load(stage, j * 8, step * UNITS + u, inputs[j][u]);
            if constexpr (BIAS != 0)
#pragma unroll
                for (int part = 0; part < PARTS; part++) each_product(begin[part][j], nullptr, j, part);
        }
#pragma unroll
        for (int i = 0; i < S::WARP_TILES; i++) {
            uint32_t weights[UNITS][PRODUCTS][4];
#pragma unroll
            for (int u = 0; u < UNITS; u++)
                places.template operand<BIAS == 0>(places.raw(stage, s, i, step * UNITS + u), weights[u]);
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                const SumScales by = scales.of(stage, i, step * PARTS + part);
#pragma unroll
                for (int j = 0; j < C; j++) {
                    float sum[4];
#pragma unroll
                    for (int c = 0; c < 4; c++) sum[c] = begin[part][j][c];
                    each_product(sum, weights, j, part);
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        acc[i][j][c] += (c < 2 ? by.scale.x : by.scale.y) * sum[c];
                        if (Scales::OFFSETS) acc[i][j][c] += (c < 2 ? by.offset.x : by.offset.y) * begin[part][j][c];
                    }
                }
            }
        }
    }
}
