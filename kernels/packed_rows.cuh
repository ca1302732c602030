// Every format that is codes x scales x groups in a row of ROWS: one decoder, of which compilers make what a format
// needs. cache/src/pack/precision.rs and grid.rs have the same facts for the CPU, cache/FORMAT.md the order of bytes.
//
// A warp reads a unit of a tile: 64 inputs of 16 rows. Lane (g, t) has rows 4q .. 4q + 3 (q = g % 4), in block g / 4 of
// the unit's two, inputs 8t .. 8t + 7: 16 bytes of each line that it needs.
#pragma once
#include "packed_tile.cuh"

enum Codes {
    INTEGERS,
    OF_E2M1,    // four bits that stand for twice their value
    OF_IQ4,     // four bits of llama.cpp's kvalues_iq4nl
    OF_E4M3,    // floats
    EIGHT_GRID, // an index of eight magnitudes (IQ2), and their signs
    FOUR_GRID,  // of four (IQ3)
    ONES_GRID,  // of eight times -1, 0 or 1 (IQ1), with a bit that says whether they are 1 less or more
    DIGITS      // -1, 0 or 1: digits to the base of three, five to a byte
};
enum Scales {
    SINGLE,      // [16] of two bytes
    WIDE,        // [16] f32
    OF_ROW,      // head [16] f32, of the row; [16] E4M3, so many of it
    WITH_OFFSET, // [16] f16, offsets [16] f16
    ZEROS,       // [16] of two bytes, [16] u8: the code that stands for 0
    COUNTED,     // head d [16] f16, of the super-block, and dmin where there are offsets; counts
    ODD          // head d [16] f16; (2 count + 1) d, halved
};

struct Row {
    Codes codes;
    int bits; // of a code; of a grid's index above its byte
    int zero; // what is stored for 0; of a grid whether each weight has a bit for its sign
    Scales scales;
    int group;      // inputs that share a scale; 0: the launch says
    int count_bits; // 0 of ODD: counts lie among the codes, or are 0
    int count_zero; // what is stored for a count of 0; of ODD how often the scale is halved
    bool offsets;
};
constexpr Row ROWS[] = {
    {INTEGERS, 2, 0, COUNTED, 16, 4, 0, true},     // Q2_K
    {INTEGERS, 3, 4, COUNTED, 16, 6, 32, false},   // Q3_K
    {INTEGERS, 4, 0, COUNTED, 32, 6, 0, true},     // Q4_K
    {INTEGERS, 5, 0, COUNTED, 32, 6, 0, true},     // Q5_K
    {INTEGERS, 6, 32, COUNTED, 16, 8, 128, false}, // Q6_K
    {OF_IQ4, 4, 0, COUNTED, 32, 6, 32, false},     // IQ4_XS
    {OF_IQ4, 4, 0, SINGLE, 0, 0, 0, false},        // IQ4_NL
    {INTEGERS, 4, 0, WITH_OFFSET, 32, 0, 0, true}, // Q4_1
    {INTEGERS, 5, 0, WITH_OFFSET, 32, 0, 0, true}, // Q5_1
    {INTEGERS, 5, 16, SINGLE, 32, 0, 0, false},    // Q5_0
    {OF_E2M1, 4, 0, OF_ROW, 16, 0, 0, false},      // NVFP4
    {EIGHT_GRID, 0, 0, ODD, 32, 0, 3, false},      // IQ2_XXS
    {EIGHT_GRID, 1, 0, ODD, 16, 4, 3, false},      // IQ2_XS
    {EIGHT_GRID, 2, 1, ODD, 16, 4, 3, false},      // IQ2_S
    {FOUR_GRID, 0, 0, ODD, 32, 0, 2, false},       // IQ3_XXS
    {FOUR_GRID, 1, 1, ODD, 32, 4, 0, false},       // IQ3_S
    {INTEGERS, 4, 0, ZEROS, 0, 0, 0, true},        // UINT4
    {ONES_GRID, 3, 0, ODD, 32, 0, 3, false},       // IQ1_S
    {ONES_GRID, 3, 0, ODD, 16, 3, 3, false},       // IQ1_M
    {DIGITS, 0, 0, ODD, 128, 0, 0, false},         // TQ1_0
    {INTEGERS, 2, 1, ODD, 128, 0, 0, false},       // TQ2_0
    {OF_E4M3, 8, 0, SINGLE, 0, 0, 0, false},       // FP8
    {OF_E4M3, 8, 0, WIDE, 0, 0, 0, false},         // FP8_F32
    {OF_E2M1, 4, 0, SINGLE, 0, 0, 0, false},       // MXFP4_ROW
};

static_assert(sizeof(ROWS) / sizeof(Row) == ANY_ROW - Q2_K, "a row for each");

template <Format F> struct RowOf {
    static constexpr Row ROW = ROWS[F - Q2_K];
    static constexpr int SUPER_BLOCK = 256, BLOCKS = SUPER_BLOCK / K_BLOCK;
    static constexpr bool GRID = ROW.codes == EIGHT_GRID || ROW.codes == FOUR_GRID || ROW.codes == ONES_GRID,
                          HAS_SUPER_BLOCKS = ROW.scales == COUNTED || ROW.scales == ODD;
    // Lines of a block, and those of a super-block behind them: upper bits of indices, or digits.
    static constexpr int LINES = ROW.codes == EIGHT_GRID ? 2
        : ROW.codes == FOUR_GRID                         ? 3
        : ROW.codes == ONES_GRID                         ? 1
                                                         : ROW.bits;
    static constexpr int MORE_LINES = ROW.codes == DIGITS ? 13 : ROW.codes == ONES_GRID ? 4 : GRID && ROW.zero ? 2 : 0;
    static constexpr int LOADS = GRID ? 2 + ROW.zero : ROW.bits == 2 || ROW.bits == 4 ? 1 : 2; // lines of a lane
    static constexpr int LOAD_BEHIND = ROW.codes == ONES_GRID ? 1
        : GRID                                                ? 2
                                                              : 3; // of a super-block's line, if it has some
    static constexpr int GRID_WORDS = !GRID ? 0 : 256 << ROW.bits;
    static constexpr int HEAD = ROW.scales == OF_ROW ? 64 : HAS_SUPER_BLOCKS ? 32 * (1 + ROW.offsets) : 0;
    static constexpr int RECORD = ROW.scales == SINGLE    ? 32
        : ROW.scales == WIDE || ROW.scales == WITH_OFFSET ? 64
        : ROW.scales == ZEROS                             ? 48
        : ROW.scales == OF_ROW                            ? 16
                                                          : 2 * ROW.count_bits * (1 + ROW.offsets);
    static constexpr int GROUPS = ROW.group ? SUPER_BLOCK / ROW.group : 1, // of a super-block
        SUPER_BYTES = HEAD + GROUPS * RECORD;
    static constexpr int PARTS = ROW.group == 16 ? 2 : 1; // groups of a block
    // What row_codes adds, so that codes are bytes without a sign; less than 128 but of IQ4.
    static constexpr int BIAS = ROW.codes == OF_IQ4 ? 128 : ROW.codes == INTEGERS ? ROW.zero : 64;
    // What row_number adds, and row_pair unless EXACT.
    static constexpr float NUMBER_BIAS = ROW.codes == OF_E4M3 || ROW.codes == OF_IQ4 ? 0.0f : 128.0f + BIAS;
};

// llama.cpp's K types from four bits on: integers whose groups count in parts of their super-block's scale.
constexpr bool is_k_type(Format f) {
    return is_row(f) && f != ANY_ROW && ROWS[f - Q2_K].codes == INTEGERS && ROWS[f - Q2_K].scales == COUNTED &&
        ROWS[f - Q2_K].bits >= 4;
}
// A format of its own with a row.
template <Format F> constexpr bool is_row_value = is_row(F) && F != ANY_ROW;
// Those whose codes are magnitudes in a grid and signs beside them.
template <Format F>
constexpr bool has_signs = is_row_value<F> && (ROWS[F - Q2_K].codes == EIGHT_GRID || ROWS[F - Q2_K].codes == FOUR_GRID);
// Lines of a block of 32 inputs.
template <Format F> constexpr int lines_of_block() {
    if constexpr (is_row_value<F>)
        return RowOf<F>::LINES;
    else
        return Lines<F>::PER_BLOCK;
}

template <Format F> __device__ __forceinline__ uint32_t row_scale_bytes(int k, int group) {
    using R = RowOf<F>;
    const int bytes = R::HAS_SUPER_BLOCKS ? k / R::SUPER_BLOCK * R::SUPER_BYTES
                                          : R::HEAD + k / (R::ROW.group ? R::ROW.group : group) * R::RECORD;
    return (uint32_t)(bytes + 63) / 64u * 64u;
}
template <Format F> __device__ __forceinline__ uint32_t row_tile_bytes(int k, int group) {
    using R = RowOf<F>;
    return row_scale_bytes<F>(k, group) +
        (uint32_t)(k / K_BLOCK * R::LINES + k / R::SUPER_BLOCK * R::MORE_LINES) * LINE_BYTES;
}

// The most of a grid in shared memory.
constexpr int GRID_BYTES = 8192;

// Where run `run` of four digits of a block is: line (x), digit (y).
__device__ __forceinline__ int2 digit_at(int block, int run) {
    if (block < 5) return make_int2(run, block);
    const int digit = 2 * (block - 5) + run / 4;
    return digit == 5 ? make_int2(12, run % 4) : make_int2(8 + run % 4, digit);
}

// What a lane has read of a unit, `parts` groups of its block; what a format does not need is not there.
struct RowUnit {
    uint4 lines[3]; // of rows 4q .. 4q + 3
    uint4 head;
    uint32_t record[2][2];
    int within; // the super-block: its block
};

__device__ __forceinline__ uint32_t of_row(const uint4& of, int r) {
    return r == 0 ? of.x : r == 1 ? of.y : r == 2 ? of.z : of.w;
}

// Where a lane reads a unit.
template <Format F> struct RowPlace {
    using R = RowOf<F>;
    const uint8_t *lines[R::LOADS], *head, *record;
    int within;

    // Whole super-blocks, if there are any.
    __device__ __forceinline__ void go_on(uint32_t lines_on, uint32_t scales_on) {
#pragma unroll
        for (const uint8_t*& at : lines) at += lines_on;
        record += scales_on;
        if (R::HAS_SUPER_BLOCKS) head += scales_on;
    }
};

// The line of a super-block that block `within` needs, from that block's first one on; other rows have none.
template <Format F> __device__ __forceinline__ int line_behind(int within) {
    using R = RowOf<F>;
    return (R::BLOCKS - within) * R::LINES + within / (R::ROW.codes == ONES_GRID ? 2 : 4); // so many share one
}
// Which line of a block is number `load` of those that lane (g, t) reads, where the super-block's is line `behind`.
template <Format F> __device__ __forceinline__ int line_of_load(int load, int t, int behind) {
    constexpr Row ROW = RowOf<F>::ROW;
    if (load == RowOf<F>::LOAD_BEHIND) return behind;
    if (ROW.codes == ONES_GRID) return 0;
    if (ROW.codes == EIGHT_GRID) return load;
    if (ROW.codes == FOUR_GRID) return load == 0 ? t / 2 : 2;
    if (ROW.bits == 8) return 2 * t + load;
    if (ROW.bits == 6) return t / 2 * 3 + (load == 0 ? t % 2 : 2);
    return load == 0 ? t / (ROW.bits < 4 ? 2 : 1) : RowOf<F>::LINES - 1; // the last of an odd number is of one bit
}

// Of unit `u` of a tile, whose codes begin at `codes`. Beyond k the last block stands in: its inputs are zero. Of
// groups of 16 those of PARTS = 1 are the lane's own.
template <Format F, int PARTS>
__device__ __forceinline__ RowPlace<F> row_place(const uint8_t* tile, int u, int k, int group_shift, uint32_t codes) {
    using R = RowOf<F>;
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, q = g % 4;
    const uint32_t block = min((uint32_t)(2 * u + g / 4), (uint32_t)k / K_BLOCK - 1);
    RowPlace<F> at;
    const uint32_t super = block / R::BLOCKS, within = block % R::BLOCKS;
    at.within = within;
    const uint8_t* lines = tile + codes + (size_t)(block * R::LINES + super * R::MORE_LINES) * LINE_BYTES + q * 16;
#pragma unroll
    for (int i = 0; i < R::LOADS; i++) {
        const int line =
            R::ROW.codes == DIGITS ? digit_at(within, 2 * t + i).x : line_of_load<F>(i, t, line_behind<F>(within));
        at.lines[i] = lines + line * LINE_BYTES;
    }
    const uint32_t group = R::ROW.group == 16 ? 2 * block : R::ROW.group == 32 ? block : block * K_BLOCK >> group_shift;
    at.head = tile, at.record = tile + R::HEAD + group * R::RECORD;
    if constexpr (R::HAS_SUPER_BLOCKS) {
        at.head += (size_t)super * R::SUPER_BYTES;
        at.record = at.head + R::HEAD + group % (uint32_t)R::GROUPS * R::RECORD;
    }
    if (PARTS < R::PARTS) at.record += t / 2 * R::RECORD;
    return at;
}

// What lies so many bytes of lines and of scales behind a place, whole super-blocks if there are any.
template <Format F, int PARTS>
__device__ __forceinline__ void load_row_unit(
    RowUnit& unit, const RowPlace<F>& at, uint32_t lines_on = 0, uint32_t scales_on = 0) {
    using R = RowOf<F>;
    const int q = threadIdx.x % WARP / 4 % 4;
    auto word = [](const uint8_t* from) { return __ldg(reinterpret_cast<const uint32_t*>(from)); };
    auto words2 = [](const uint8_t* from) { return __ldg(reinterpret_cast<const uint2*>(from)); };
    auto words4 = [](const uint8_t* from) { return __ldg(reinterpret_cast<const uint4*>(from)); };
    unit.within = at.within;
#pragma unroll
    for (int i = 0; i < R::LOADS; i++)
        unit.lines[i] = load_streaming(reinterpret_cast<const uint4*>(at.lines[i] + lines_on));
    const uint8_t *head = at.head + (R::HAS_SUPER_BLOCKS ? scales_on : 0), *record = at.record + scales_on;
    uint2 low = make_uint2(0, 0), high = make_uint2(0, 0);
    if constexpr (R::HAS_SUPER_BLOCKS) {
        low = words2(head + q * 8);
        if (R::ROW.offsets) high = words2(head + 32 + q * 8);
    } else if constexpr (R::ROW.scales == SINGLE || R::ROW.scales == WITH_OFFSET || R::ROW.scales == ZEROS) {
        low = words2(record + q * 8);
        if (R::ROW.scales == WITH_OFFSET) high = words2(record + 32 + q * 8);
        if (R::ROW.scales == ZEROS) high.x = word(record + 32 + q * 4);
    }
    unit.head = R::ROW.scales == WIDE ? words4(record + q * 16)
        : R::ROW.scales == OF_ROW     ? words4(head + q * 16)
                                      : make_uint4(low.x, low.y, high.x, high.y);
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const uint8_t* from = record + part * R::RECORD;
        uint32_t first = 0, second = 0;
        if constexpr (R::ROW.scales == OF_ROW) {
            first = word(from + q * 4);
        } else if constexpr (R::ROW.scales == ODD && R::ROW.count_bits == 3) {
            auto half = [&](int i) { // a bit of each row
                return (uint32_t)__ldg(reinterpret_cast<const uint16_t*>(from) + i);
            };
            first = half(0) | half(1) << 16, second = half(2);
        } else if constexpr (R::ROW.scales == ODD) {
            if (R::ROW.count_bits) first = word(from + q % 2 * 4);
        } else if constexpr (R::ROW.scales == COUNTED) {
            if constexpr (R::ROW.count_bits == 6 && !R::ROW.offsets) {
                first = word(from + q % 2 * 4);
                second = word(from + 8);
            } else {
                first = word(from + q * 4);
                if (R::ROW.count_bits == 6) second = word(from + 16 + q % 2 * 4);
            }
        }
        unit.record[part][0] = first, unit.record[part][1] = second;
    }
}

// An E4M3 number whose byte is the highest of `x`; NaN is 480.
__device__ __forceinline__ float e4m3_above(uint32_t x) {
    return __uint_as_float((x & 0x80000000u) | (x >> 4 & 0x07f00000u)) * 0x1p120f;
}

// ABOVE + byte `i` of `bytes`, exact; 128 is above bytes below 128.
template <int ABOVE> __device__ __forceinline__ float byte_above(uint32_t bytes, int i) {
    if (ABOVE == 1 << 23) return __uint_as_float(__byte_perm(bytes, 0x4b00u, 0x5440 + i));
    return __uint_as_float(__byte_perm(bytes, 0x4300u, 0x5044 + i * 0x100)); // the byte between 0x43 and zeros
}

// What rows count in a group, and what is taken from them: a byte for each row.
struct Counts {
    uint32_t scale, offset;
};
// Of rows 4q .., whose bytes of the record are `low` and, of 6 bits, `high`.
template <Format F> __device__ __forceinline__ Counts counts_of(uint32_t low, uint32_t high, int q) {
    constexpr Row ROW = RowOf<F>::ROW;
    const int eight = q / 2 * 4; // half a byte for each of rows r and r + 8
    if constexpr (ROW.count_bits == 4) return {low & 0x0f0f0f0fu, low >> 4 & 0x0f0f0f0fu};
    if constexpr (ROW.count_bits == 6 && ROW.offsets)
        return {low & 0x3f3f3f3fu, (low >> 6 & 0x03030303u) | (high >> eight & 0x0f0f0f0fu) << 2};
    if constexpr (ROW.count_bits == 6) return {(low >> eight & 0x0f0f0f0fu) | (high >> 2 * q & 0x03030303u) << 4, 0};
    return {low, 0};
}
// Scale and offset of the row whose byte is number `r`, exact; d and dmin are its super-block's.
template <Format F> __device__ __forceinline__ float2 counted_scale(float d, float dmin, Counts counts, int r) {
    constexpr Row ROW = RowOf<F>::ROW;
    const float scale = d * (byte_above<1 << 23>(counts.scale, r) - (0x1p23f + ROW.count_zero));
    return make_float2(scale, ROW.offsets ? -(dmin * (byte_above<1 << 23>(counts.offset, r) - 0x1p23f)) : 0.0f);
}

// Scale and offset of row 4q + r in group `part` of those that were loaded, exact.
template <Format F> __device__ __forceinline__ float2 row_scale(const RowUnit& unit, int part, int r, bool f16) {
    using R = RowOf<F>;
    constexpr Row ROW = R::ROW;
    [[maybe_unused]] const uint32_t first = unit.record[part][0] >> 8 * r, second = unit.record[part][1] >> 8 * r;
    [[maybe_unused]] auto number = [&](uint32_t low, uint32_t high, bool f16) {
        const float2 pair = scales_f32(r < 2 ? low : high, f16);
        return r % 2 ? pair.y : pair.x;
    };
    [[maybe_unused]] const int q = threadIdx.x % WARP / 4 % 4,
                               eight = q / 2 * 4; // half a byte for each of rows r and r + 8
    // Q5_0 and all that have heads: f16. IQ4_NL, UINT4 and FP8: the launch says.
    [[maybe_unused]] const float d = number(unit.head.x, unit.head.y, ROW.group != 0 || f16);
    [[maybe_unused]] const float more = ROW.offsets ? number(unit.head.z, unit.head.w, true) : 0.0f;
    float scale, offset = 0.0f;
    if constexpr (ROW.scales == WIDE) {
        scale = __uint_as_float(of_row(unit.head, r));
    } else if constexpr (ROW.scales == OF_ROW) {
        scale = e4m3_above(first << 24) * __uint_as_float(of_row(unit.head, r));
    } else if constexpr (ROW.scales == SINGLE) {
        scale = d;
    } else if constexpr (ROW.scales == WITH_OFFSET) {
        scale = d, offset = more;
    } else if constexpr (ROW.scales == ZEROS) {
        scale = d, offset = -(d * (float)(unit.head.z >> 8 * r & 0xffu));
    } else if constexpr (ROW.scales == ODD) {
        uint32_t count = 0;
        if constexpr (ROW.count_bits == 4) {
            count = first >> eight & 15u;
        } else if constexpr (ROW.count_bits == 3) {
            const int row = 4 * q + r;
            count = (unit.record[part][0] >> row & 1u) | (unit.record[part][0] >> (16 + row) & 1u) << 1 |
                (unit.record[part][1] >> row & 1u) << 2;
        } else if constexpr (ROW.codes == ONES_GRID) {
            count = of_row(unit.lines[1], r) >> (unit.within % 2 * 16 + 12) & 7u;
        } else if constexpr (R::GRID) {
            count = of_row(unit.lines[1], r) >> 28;
        }
        scale = d * ((float)(2 * count + 1) / (float)(1 << ROW.count_zero));
    } else {
        const float2 counted =
            counted_scale<F>(d, more, counts_of<F>(unit.record[part][0], unit.record[part][1], q), r);
        scale = counted.x, offset = counted.y;
    }
    return make_float2(scale, offset);
}

// Those of rows 4q .. 4q + 3 in all groups that were loaded. Four lanes make the same ones: dealing them out is slower.
template <Format F, int PARTS>
__device__ __forceinline__ void row_scales(const RowUnit& unit, bool f16, float2 (&scale)[PARTS][4]) {
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int r = 0; r < 4; r++) scale[part][r] = row_scale<F>(unit, part, r, f16);
}

// The bytes of a table of 16 whose places are the nibbles of `word`: in `four[0]` those of lower nibbles.
__device__ __forceinline__ void of_table(
    uint32_t word, uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t (&four)[2]) {
    auto of_half = [&](uint32_t half) {
        const uint32_t low = __byte_perm(a, b, half & 0x7777u), high = __byte_perm(c, d, half & 0x7777u);
        return __byte_perm(low, high, (half >> 1 & 0x4444u) | 0x3210u);
    };
    const uint32_t first = of_half(word & 0xffffu), second = of_half(word >> 16);
    four[0] = __byte_perm(first, second, 0x6420), four[1] = __byte_perm(first, second, 0x7531);
}

// Four magnitudes with their signs, which are bits of `signs`; 64 more.
__device__ __forceinline__ uint32_t with_signs(uint32_t magnitudes, uint32_t signs) {
    const uint32_t negative = ((signs & 15u) * 0x00204081u & 0x01010101u) * 0xffu;
    return 0x40404040u + magnitudes - ((magnitudes & negative) << 1);
}

// Digit number `digit` of four bytes.
__device__ __forceinline__ uint32_t digits_of(uint32_t bytes, int digit) {
    const uint32_t power = digit == 0 ? 1 : digit == 1 ? 3 : digit == 2 ? 9 : digit == 3 ? 27 : 81;
    auto of_two = [&](uint32_t two) { return (two * power & 0x00ff00ffu) * 3 >> 8 & 0x00ff00ffu; };
    return of_two(bytes & 0x00ff00ffu) | of_two(bytes >> 8 & 0x00ff00ffu) << 8;
}

// IQ2 and IQ3, of this lane's 8 inputs of row 4q + r: the signs, a bit each.
template <Format F> __device__ __forceinline__ uint32_t row_signs(const RowUnit& unit, int r) {
    constexpr Row ROW = RowOf<F>::ROW;
    const int t = threadIdx.x % 4;
    const uint32_t second = of_row(unit.lines[1], r);
    if (ROW.zero) return __byte_perm(second, 0, 0x4440u + t);
    const uint32_t signs = second >> 7 * t & 0x7fu;
    return signs | (__popc(signs) & 1u) << 7; // an even number of them
}
// Which of the grid are their magnitudes: IQ2's, or the first (m = 0) or last ones of IQ3.
template <Format F> __device__ __forceinline__ uint32_t row_index(const RowUnit& unit, int r, int m) {
    constexpr Row ROW = RowOf<F>::ROW;
    constexpr bool EIGHT = ROW.codes == EIGHT_GRID;
    const int t = threadIdx.x % 4;
    uint32_t index = __byte_perm(of_row(unit.lines[0], r), 0, 0x4440u + (EIGHT ? t : t % 2 * 2 + m));
    if (ROW.zero) {
        const uint32_t upper = of_row(unit.lines[2], r) >> 8 * (unit.within % 4);
        index |= (EIGHT ? upper >> 2 * t & 3u : upper >> (2 * t + m) & 1u) << 8;
    } else if (ROW.bits == 1) {
        index |= (of_row(unit.lines[1], r) >> (28 + t) & 1u) << 8;
    }
    return index;
}
// The four magnitudes whose places are the lower nibbles of `places`.
template <Format F> __device__ __forceinline__ uint32_t magnitudes_at(uint32_t places) {
    constexpr Row ROW = RowOf<F>::ROW;
    return ROW.codes == EIGHT_GRID ? __byte_perm(0x002b1908u, 0, places & 0xffffu)
        : ROW.zero                 ? __byte_perm(0x07050301u, 0x0f0d0b09u, places)
                                   : __byte_perm(0x1c140c04u, 0x3e342c24u, places);
}

// The codes of this lane's 8 inputs of row 4q + r, bytes with BIAS more; of E4M3 its bytes. `grid`: of each index the
// places of its magnitudes among those there are, a nibble each.
template <Format F, class G>
__device__ __forceinline__ void row_codes(const RowUnit& unit, int r, const G& grid, uint32_t (&four)[2]) {
    using R = RowOf<F>;
    constexpr Row ROW = R::ROW;
    const int t = threadIdx.x % 4;
    const uint32_t word = of_row(unit.lines[0], r);
    [[maybe_unused]] const uint32_t second = R::LOADS > 1 ? of_row(unit.lines[1], r) : 0;
    if constexpr (ROW.codes == OF_E4M3) {
        four[0] = word, four[1] = second;
    } else if constexpr (ROW.codes == OF_E2M1) {
        of_table(word, 0x43424140u, 0x4c484644u, 0x3d3e3f40u, 0x34383a3cu, four);
    } else if constexpr (ROW.codes == OF_IQ4) {
        of_table(word, 0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u, four);
    } else if constexpr (ROW.codes == DIGITS) {
        const int within = unit.within;
        four[0] = digits_of(word, digit_at(within, 2 * t).y) + 0x3f3f3f3fu;
        four[1] = digits_of(second, digit_at(within, 2 * t + 1).y) + 0x3f3f3f3fu;
    } else if constexpr (ROW.codes == ONES_GRID) {
        const uint32_t upper = second >> unit.within % 2 * 16;
        const uint32_t places = grid[(word >> 8 * t & 0xffu) | (upper >> 3 * t & 7u) << 8];
        const uint32_t beside = upper >> (ROW.count_bits ? 12 + t : 15) & 1u ? 0xfefefeffu : 0x01010101u;
        four[0] = __byte_perm(0x00484038u, 0, places & 0xffffu) + beside;
        four[1] = __byte_perm(0x00484038u, 0, places >> 16) + beside;
    } else if constexpr (has_signs<F>) {
        const uint32_t signs = row_signs<F>(unit, r);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const uint32_t places =
                ROW.codes == EIGHT_GRID ? grid[row_index<F>(unit, r, 0)] >> 16 * m : grid[row_index<F>(unit, r, m)];
            four[m] = with_signs(magnitudes_at<F>(places), signs >> 4 * m);
        }
    } else {
#pragma unroll
        for (int m = 0; m < 2; m++) {
            uint32_t codes = ROW.bits < 4 ? word >> (t % 2 * 4 + 2 * m) & 0x03030303u : word >> 4 * m & 0x0f0f0f0fu;
            if (ROW.bits % 2) codes |= (second >> (2 * t + m) & 0x01010101u) << (ROW.bits - 1);
            if (ROW.bits == 6) codes |= (second >> (t % 2 * 4 + 2 * m) & 0x03030303u) << 4;
            four[m] = codes;
        }
    }
}

// Two codes of row_codes as bf16 numbers: the first or the last ones of four. All but E4M3 and IQ4 have NUMBER_BIAS
// more unless EXACT.
template <Format F, bool EXACT = true> __device__ __forceinline__ uint32_t row_pair(uint32_t four, bool last) {
    constexpr Codes CODES = RowOf<F>::ROW.codes;
    static_assert(EXACT || (CODES != OF_E4M3 && CODES != OF_IQ4), "bytes below 128");
    if constexpr (CODES == OF_E4M3) {
        const uint32_t above = __byte_perm(four, 0, last ? 0x3424 : 0x1404); // each the upper byte of its half
        return fma_bf16x2((above & 0x80008000u) | (above >> 4 & 0x07f007f0u), 0x7b807b80u, 0x80008000u);
    } else if constexpr (CODES == OF_IQ4) {
        return int8_pair(four, last);
    } else {
        const uint32_t above = __byte_perm(four, 0x43u, last ? 0x4342 : 0x4140);
        constexpr uint32_t MINUS_BIAS = 0xc300 + RowOf<F>::BIAS; // and 128
        return EXACT ? fma_bf16x2(above, 0x3f803f80u, MINUS_BIAS * 0x10001) : above;
    }
}

// Number i of row_codes, exact; with NUMBER_BIAS more, which costs less.
template <Format F> __device__ __forceinline__ float row_number(const uint32_t (&four)[2], int i) {
    constexpr Codes CODES = RowOf<F>::ROW.codes;
    const uint32_t of = four[i / 4];
    if constexpr (CODES == OF_E4M3) {
        const uint32_t pair = row_pair<F>(of, i % 4 / 2);
        return i % 2 ? high_f32(pair) : low_f32(pair);
    } else if constexpr (CODES == OF_IQ4) { // 2^23 + the byte
        return byte_above<1 << 23>(of, i % 4) - (0x1p23f + RowOf<F>::BIAS);
    } else {
        return byte_above<128>(of, i % 4);
    }
}

// A scale, and an offset that takes back NUMBER_BIAS.
template <Format F> __device__ __forceinline__ float2 for_numbers(float2 scale) {
    return make_float2(scale.x, scale.y - RowOf<F>::NUMBER_BIAS * scale.x);
}

// Calls act(Constant<F>) of the format of a launch.
template <class Act> __device__ __forceinline__ void with_row(int format, Act act) {
    switch (format) {
#define PACKED_ROW_CASE(name, F)                                                                                       \
    case F: act(Constant<F>{}); break;
        PACKED_ROWS(PACKED_ROW_CASE)
    default: break;
    }
}

// Bytes of a tile's scales, and of a tile.
struct TileBytes {
    uint32_t scales, all;
};
template <Format F> __device__ __forceinline__ TileBytes tile_bytes_of(int k, const Packing& packing) {
    TileBytes bytes{0, 0};
    if constexpr (F == ANY_ROW)
        with_row(packing.format, [&](auto f) {
            constexpr Format ROW = decltype(f)::value;
            bytes = {row_scale_bytes<ROW>(k, packing.group), row_tile_bytes<ROW>(k, packing.group)};
        });
    else if constexpr (is_row(F))
        bytes = {row_scale_bytes<F>(k, packing.group), row_tile_bytes<F>(k, packing.group)};
    else
        bytes = {scale_bytes<F>(k, packing.group), tile_bytes<F>(k, packing.group)};
    return bytes;
}

// How many words a format's grid has.
__device__ __forceinline__ int grid_words(int format) {
    int words = 0;
    with_row(format, [&](auto f) { words = RowOf<decltype(f)::value>::GRID_WORDS; });
    return words;
}
// Copies the grid of a format to shared memory, by all threads of the block; a barrier must follow.
__device__ __forceinline__ void copy_grid(uint32_t* to, const uint32_t* grid, int words) {
    for (int i = threadIdx.x; i < words; i += blockDim.x) to[i] = __ldg(grid + i);
}
