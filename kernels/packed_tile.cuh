// Tiles of 16 rows of weights as they lie in the cache file (cache/FORMAT.md, "A layer"), read as the left operand of
// the tensor cores.
//
// A tile is the scales of its groups, [k / group][16] bf16 or f16 padded to 64 bytes, then lines of 64 bytes that hold
// the same few inputs of all 16 rows: 8 inputs of INT4 and MXFP4, 4 of INT8, 2 of BF16. Products take blocks of 32
// inputs as two instructions of 16. Lane (g, t) = (lane / 4, lane % 4) brings inputs 8t .. 8t + 3 of a block to the
// first and 8t + 4 .. 8t + 7 to the second, for weights and activations alike, so that the activations of both are one
// 16-byte load: the instruction's own order of k means nothing as long as both sides agree.
#pragma once
#include "common.cuh"

template <auto V> struct Constant {
    static constexpr auto value = V;
};

// In the order of Rust's Row::ALL (cache/src/pack/precision.rs), after BF16. Those from Q2_K on are read as
// packed_rows.cuh says.
enum Format {
    BF16,
    MXFP4,
    INT4,
    INT8,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_XS,
    IQ4_NL,
    Q4_1,
    Q5_1,
    Q5_0,
    NVFP4,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    UINT4,
    IQ1_S,
    IQ1_M,
    TQ1_0,
    TQ2_0,
    FP8,
    FP8_F32,
    MXFP4_ROW, // MXFP4 for kernels that read it as a row, in a table (packed_table.cuh); behind all of Rust's
    ANY_ROW    // one of them that the launch says
};
constexpr bool has_4_bits(Format f) { return f == INT4 || f == MXFP4; }
__host__ __device__ constexpr bool is_row(Format f) { return f >= Q2_K; }

// What a launch says of a matrix.
struct Packing {
    const uint32_t* grid; // of codes that are places in one: what they stand for (packed_rows.cuh)
    int format;           // a Format
    int group;            // inputs that share a scale; 0 for bf16
    int f16;              // scales are, not bf16
};

// From inputs to groups; 0 where there are none of one size.
__device__ __forceinline__ int shift_of_group(const Packing& packing) {
    return packing.group ? 31 - __clz(packing.group) : 0;
}

// Every format that kernels are made for; Rust finds them by these names (src/backend/cuda/packed.rs). Rows of
// DENSE_FORMATS, and of EXPERT_FORMATS, which experts alone have, make the products of few tokens:
//
//   ROW(name, Format)
//
// A row of PACKED_SPANS makes those of many, for groups of 32 (span 32), or of 64 and 128 (span 64):
//
//   ROW(name, Format, span, shared memory of tiles of 8, 16, 32, 64 and 128 tokens)
//
// One row of it, any_row, is for all formats from Q2_K on.
//
// Rows of DENSE_... make kernels for dense weights too. bf16 has none: gemm.cu multiplies them.
#define DENSE_FORMATS(ROW)                                                                                             \
    ROW(int4, INT4)                                                                                                    \
    ROW(int8, INT8)
#define PACKED_ROWS(ROW)                                                                                               \
    ROW(q2_k, Q2_K)                                                                                                    \
    ROW(q3_k, Q3_K)                                                                                                    \
    ROW(q4_k, Q4_K)                                                                                                    \
    ROW(q5_k, Q5_K)                                                                                                    \
    ROW(q6_k, Q6_K)                                                                                                    \
    ROW(iq4_xs, IQ4_XS)                                                                                                \
    ROW(iq4_nl, IQ4_NL)                                                                                                \
    ROW(q4_1, Q4_1)                                                                                                    \
    ROW(q5_1, Q5_1)                                                                                                    \
    ROW(q5_0, Q5_0)                                                                                                    \
    ROW(nvfp4, NVFP4)                                                                                                  \
    ROW(iq2_xxs, IQ2_XXS)                                                                                              \
    ROW(iq2_xs, IQ2_XS)                                                                                                \
    ROW(iq2_s, IQ2_S)                                                                                                  \
    ROW(iq3_xxs, IQ3_XXS)                                                                                              \
    ROW(iq3_s, IQ3_S)                                                                                                  \
    ROW(uint4, UINT4)                                                                                                  \
    ROW(iq1_s, IQ1_S)                                                                                                  \
    ROW(iq1_m, IQ1_M)                                                                                                  \
    ROW(tq1_0, TQ1_0)                                                                                                  \
    ROW(tq2_0, TQ2_0)                                                                                                  \
    ROW(fp8, FP8)                                                                                                      \
    ROW(fp8_f32, FP8_F32)
#define EXPERT_FORMATS(ROW)                                                                                            \
    ROW(mxfp4, MXFP4)                                                                                                  \
    ROW(bf16, BF16)                                                                                                    \
    PACKED_ROWS(ROW)
#define DENSE_SPANS(ROW)                                                                                               \
    ROW(int4_g64, INT4, 64, 43008, 51200, 67584, ON_HOPPER(75264, 50176), ON_HOPPER(103680, 82944))                    \
    ROW(int4_g32, INT4, 32, 45056, 53248, 69632, ON_HOPPER(76800, 51200), ON_HOPPER(104960, 83968))                    \
    ROW(int8_g64, INT8, 64, 75776, 83968, 75264, 49920, 74496)                                                         \
    ROW(int8_g32, INT8, 32, 77824, 86016, 76800, 50688, 75264)
#define PACKED_SPANS(ROW)                                                                                              \
    DENSE_SPANS(ROW)                                                                                                   \
    ROW(mxfp4_g32, MXFP4, 32, 45056, 53248, 69632, ON_HOPPER(76800, 51200), ON_HOPPER(104960, 83968))                  \
    ROW(any_row, ANY_ROW, 64, 45056, 49152, 57344, 73728, ON_HOPPER(106496, 90112))                                    \
    ROW(bf16, BF16, 64, 69632, 73728, 61440, 73728, 98304)

constexpr int TILE_ROWS = 16, LINE_BYTES = 64, K_BLOCK = 32;

template <Format F> struct Lines {
    static constexpr bool FOUR_BITS = has_4_bits(F);
    static constexpr bool F16_SCALES = F == INT8 || F == INT4;           // if the launch says so
    static constexpr int PER_BLOCK = FOUR_BITS ? 4 : F == INT8 ? 8 : 16; // lines of a block of 32 inputs
    static constexpr int PER_LANE = PER_BLOCK / 4;                       // of which a lane reads these: its 8 inputs
};

template <Format F> __device__ __forceinline__ uint32_t scale_bytes(int k, int group) {
    return F == BF16 ? 0u : (uint32_t)(k / group * 32 + 63) / 64u * 64u;
}
template <Format F> __device__ __forceinline__ uint32_t tile_bytes(int k, int group) {
    return scale_bytes<F>(k, group) + (uint32_t)div_ceil(k, K_BLOCK) * (Lines<F>::PER_BLOCK * LINE_BYTES);
}

// Two codes, each from a byte below 0x43, which makes a bf16 number: 128 + the byte's lower 7 bits. INT4 is stored with
// 8 added.
__device__ __forceinline__ uint32_t int4_pair(uint32_t bytes) { return fma_bf16x2(bytes, 0x3f803f80u, 0xc308c308u); }
// The first or the last two of four codes of INT8, which is stored with 128 added, as h * 128 + l: (128 + l) -
// (h ? 128 : 256), all of it exact in bf16.
__device__ __forceinline__ uint32_t int8_pair(uint32_t four, bool last) {
    const uint32_t places = last ? 0x4342 : 0x4140;
    return fma_bf16x2(
        __byte_perm(four & 0x7f7f7f7fu, 0x43u, places), 0x3f803f80u, __byte_perm(~four & 0x80808080u, 0xc3u, places));
}

// Twice the E2M1 numbers in the lower halves of two bytes, one in each half of a word: sign, exponent and mantissa go
// to their places of a bf16 number, which then is 2^-127 of that, subnormal ones included.
__device__ __forceinline__ uint32_t e2m1_pair(uint32_t bytes) {
    return fma_bf16x2((bytes << 12 & 0x80008000u) | (bytes << 6 & 0x01c001c0u), 0x7f007f00u, 0x80008000u);
}

// The codes of 8 INT4 or MXFP4 inputs of a row as pairs of bf16 integers; those of INT4 136 too much unless EXACT.
template <Format F, bool EXACT> __device__ __forceinline__ void nibble_pairs(uint32_t word, uint32_t (&pair)[4]) {
    static_assert(!is_row(F), "packed_rows.cuh decodes rows");
    const uint32_t low = word & 0x0f0f0f0fu, high = shift_by_product<4>(word) & 0x0f0f0f0fu;
    pair[0] = __byte_perm(low, 0x43u, 0x4140);
    pair[1] = __byte_perm(low, 0x43u, 0x4342);
    pair[2] = __byte_perm(high, 0x43u, 0x4140);
    pair[3] = __byte_perm(high, 0x43u, 0x4342);
    if constexpr (F == MXFP4 || EXACT) {
#pragma unroll
        for (int i = 0; i < 4; i++) pair[i] = F == MXFP4 ? e2m1_pair(pair[i]) : int4_pair(pair[i]);
    }
}

// Elements 2t and 2t + 1 of 8 inputs of a row, not scaled. `word` is
//   of 4 bits  the line's
//   of INT8    line t / 2's
//   of BF16    line t's
template <Format F> __device__ __forceinline__ uint32_t packed_pair(uint32_t word, int t) {
    static_assert(!is_row(F), "packed_rows.cuh decodes rows");
    if constexpr (F == BF16) {
        return word;
    } else if constexpr (F == INT8) {
        return int8_pair(word, t % 2);
    } else {
        const uint32_t bytes = __byte_perm(word >> t / 2 * 4, 0x43u, t % 2 ? 0x4342 : 0x4140);
        return F == INT4 ? int4_pair(bytes & 0xff0fff0fu) : e2m1_pair(bytes);
    }
}

// What a lane has read of two rows in a block, raw[i] = (row r, row r + 1) of its line i, as left operands: rows r and
// r + 1 become the rows g and g + 8 of the instruction. Codes are not scaled; INT4 has 136 too much unless EXACT.
template <Format F, bool EXACT = true>
__device__ __forceinline__ void tile_operand(const uint2 (&raw)[Lines<F>::PER_LANE], uint32_t (&a)[2][4]) {
    if constexpr (Lines<F>::FOUR_BITS) {
        uint32_t p[4];
        nibble_pairs<F, EXACT>(raw[0].x, p);
        a[0][0] = p[0], a[0][2] = p[1], a[1][0] = p[2], a[1][2] = p[3];
        nibble_pairs<F, EXACT>(raw[0].y, p);
        a[0][1] = p[0], a[0][3] = p[1], a[1][1] = p[2], a[1][3] = p[3];
    } else if constexpr (F == INT8) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
            a[m][0] = int8_pair(raw[m].x, false), a[m][2] = int8_pair(raw[m].x, true);
            a[m][1] = int8_pair(raw[m].y, false), a[m][3] = int8_pair(raw[m].y, true);
        }
    } else {
#pragma unroll
        for (int m = 0; m < 2; m++) {
            a[m][0] = raw[2 * m].x, a[m][1] = raw[2 * m].y;
            a[m][2] = raw[2 * m + 1].x, a[m][3] = raw[2 * m + 1].y;
        }
    }
}

// Two scales as f32. `f16`: they are, not bf16, the same for all of a launch.
__device__ __forceinline__ float2 scales_f32(uint32_t scales, bool f16) {
    return f16 ? make_float2(f16_value((uint16_t)scales), f16_value((uint16_t)(scales >> 16)))
               : make_float2(low_f32(scales), high_f32(scales));
}

// A number as the sum of two bf16 numbers, each in both halves of a word: 16 bits of it or more, which is all of a bf16
// or f16 number.
__device__ __forceinline__ uint2 two_bf16(float x) {
    const uint32_t high = pack_bf16(x, x);
    const float rest = x - low_f32(high);
    return make_uint2(high, pack_bf16(rest, rest));
}

// Scales of two rows, by which a lane's bf16 weights of them are multiplied, as two_bf16 has them: here as well only
// the product is rounded.
struct TwoScales {
    uint32_t high[2], low[2];

    // What a lane has of a tile for a product. `both`: the second number is asked, which it must be if it is not 0.
    __device__ __forceinline__ void scale(uint32_t (&a)[4], bool both = true) const {
        constexpr uint32_t MINUS_0 = 0x80008000u;
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] = fma_bf16x2(a[i], high[i % 2], both ? fma_bf16x2(a[i], low[i % 2], MINUS_0) : MINUS_0);
    }
};

// Two scales of bf16 or f16, of which the second numbers of the former are 0.
struct RowScales {
    uint32_t high = 0, low = 0;

    RowScales() = default;
    __device__ __forceinline__ RowScales(uint32_t scales, bool f16) : high(scales) {
        if (!f16) return;
        const float2 exact = scales_f32(scales, true);
        high = pack_bf16(exact.x, exact.y);
        low = pack_bf16(exact.x - low_f32(high), exact.y - high_f32(high));
    }
    __device__ __forceinline__ void scale(uint32_t (&a)[4], bool both) const {
        TwoScales{{twice<0>(high), twice<1>(high)}, {twice<0>(low), twice<1>(low)}}.scale(a, both);
    }
};
__device__ __forceinline__ void scale_operand(uint32_t (&a)[2][4], uint32_t scales, bool f16) {
    const RowScales by(scales, f16);
    by.scale(a[0], f16), by.scale(a[1], f16);
}
