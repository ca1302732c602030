// Rows whose codes are read in a table: what they stand for, as bf16 numbers in shared memory. Instructions that make
// numbers of bytes bound all kernels that unpack; one lookup stands for many of them.
//
//   IQ2, IQ3                        of an index its 8 or 4 magnitudes; the signs lie beside it
//   IQ4_XS, IQ4_NL, NVFP4, MXFP4    of a byte its two codes
//
// An index has a line of LINE bytes, with its numbers as often as they fit. The lanes of a warp want any lines: those
// of 128 bytes they read without meeting in a bank.
#pragma once
#include "packed_rows.cuh"

template <Format F>
constexpr bool has_table =
    has_signs<F> || (is_row_value<F> && (ROWS[F - Q2_K].codes == OF_IQ4 || ROWS[F - Q2_K].codes == OF_E2M1));

template <Format F, int LINE> struct Table {
    static constexpr Codes CODES = RowOf<F>::ROW.codes;
    // Bytes of an index, which a lane reads at once, and of all.
    static constexpr int RUN = CODES == EIGHT_GRID ? 16
        : CODES == FOUR_GRID                       ? 8
                                                   : 4,
                         INDICES = has_signs<F> ? RowOf<F>::GRID_WORDS : 256, BYTES = INDICES * LINE;
    static_assert(LINE % 16 == 0 && LINE <= 128, "whole runs; fill() makes 16 bytes at a time");
    const unsigned char* own;

    __device__ __forceinline__ explicit Table(const void* shared)
        : own(static_cast<const unsigned char*>(shared) + threadIdx.x * RUN % LINE) {}

    // A pair's codes are no neighbours: a byte has codes i and 4 + i.
    static constexpr bool APART = !has_signs<F>;

    // This lane's 8 codes of row 4q + r, two by two.
    __device__ __forceinline__ void codes(const RowUnit& unit, int r, uint32_t (&pairs)[4]) const {
        if constexpr (CODES == EIGHT_GRID) {
            const uint4 run = at<uint4>(row_index<F>(unit, r, 0));
            pairs[0] = run.x, pairs[1] = run.y, pairs[2] = run.z, pairs[3] = run.w;
        } else if constexpr (CODES == FOUR_GRID) {
            const uint2 first = at<uint2>(row_index<F>(unit, r, 0)), last = at<uint2>(row_index<F>(unit, r, 1));
            pairs[0] = first.x, pairs[1] = first.y, pairs[2] = last.x, pairs[3] = last.y;
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) pairs[i] = at<uint32_t>(__byte_perm(of_row(unit.lines[0], r), 0, 0x4440 + i));
        }
        if constexpr (has_signs<F>) {
            const uint32_t signs = row_signs<F>(unit, r);
#pragma unroll
            for (int p = 0; p < 4; p++) // bits 2p and 2p + 1 come to the halves' upper ends
                pairs[p] ^= signs * ((1u << (15 - 2 * p)) | (1u << (30 - 2 * p))) & 0x80008000u;
        }
    }
    // The same, as neighbours.
    __device__ __forceinline__ void codes_in_order(const RowUnit& unit, int r, uint32_t (&pairs)[4]) const {
        codes(unit, r, pairs);
        if constexpr (APART) {
            const uint32_t p[4] = {pairs[0], pairs[1], pairs[2], pairs[3]};
            pairs[0] = __byte_perm(p[0], p[1], 0x5410), pairs[1] = __byte_perm(p[2], p[3], 0x5410);
            pairs[2] = __byte_perm(p[0], p[1], 0x7632), pairs[3] = __byte_perm(p[2], p[3], 0x7632);
        }
    }

    // By all threads of the block; a barrier must follow.
    static __device__ __forceinline__ void fill(void* shared, const uint32_t* grid) {
        for (int i = threadIdx.x; i < BYTES / 16; i += blockDim.x) {
            const uint32_t index = i / (LINE / 16);
            uint4& to = static_cast<uint4*>(shared)[i];
            if constexpr (has_signs<F>) {
                const uint32_t places = __ldg(grid + index), first = magnitudes_at<F>(places),
                               second = CODES == EIGHT_GRID ? magnitudes_at<F>(places >> 16) : first;
                to = make_uint4(pair(first, 0x4140), pair(first, 0x4342), pair(second, 0x4140), pair(second, 0x4342));
            } else {
                const RowUnit unit{{make_uint4(index, 0, 0, 0)}};
                uint32_t four[2];
                row_codes<F>(unit, 0, nullptr, four);
                const uint32_t two = row_pair<F>(__byte_perm(four[0], four[1], 0x4040), false);
                to = make_uint4(two, two, two, two);
            }
        }
    }

private:
    // Two of four bytes below 128.
    static __device__ __forceinline__ uint32_t pair(uint32_t four, uint32_t which) {
        return fma_bf16x2(__byte_perm(four, 0x43u, which), 0x3f803f80u, 0xc300c300u);
    }
    template <class T> __device__ __forceinline__ T at(uint32_t index) const {
        return *reinterpret_cast<const T*>(own + index * LINE);
    }
};

// 8 inputs in the order of codes().
template <Format F> __device__ __forceinline__ uint4 in_order_of_codes(const uint4& eight) {
    if constexpr (has_table<F>)
        if constexpr (Table<F, 16>::APART)
            return make_uint4(__byte_perm(eight.x, eight.z, 0x5410), __byte_perm(eight.x, eight.z, 0x7632),
                __byte_perm(eight.y, eight.w, 0x5410), __byte_perm(eight.y, eight.w, 0x7632));
    return eight;
}

// What other rows have: of IQ1 its grid as it comes.
template <int WORDS> struct Grid {
    static constexpr int BYTES = WORDS * 4;
    const uint32_t* words;

    __device__ __forceinline__ explicit Grid(const void* shared) : words(static_cast<const uint32_t*>(shared)) {}
    __device__ __forceinline__ uint32_t operator[](uint32_t index) const { return words[index]; }
    static __device__ __forceinline__ void fill(void* shared, const uint32_t* grid) {
        copy_grid(static_cast<uint32_t*>(shared), grid, WORDS);
    }
};

// What there is of a format in shared memory.
template <Format F, int LINE> __device__ __forceinline__ auto table_at(const void* shared) {
    if constexpr (has_table<F>)
        return Table<F, LINE>(shared);
    else if constexpr (is_row_value<F>)
        return Grid<RowOf<F>::GRID_WORDS>(shared);
    else
        return Grid<0>(shared);
}
template <Format F, int LINE> using TableOf = decltype(table_at<F, LINE>(nullptr));
// The longest lines of which all have room.
template <Format F> constexpr int line_within(int room) {
    int line = 128;
    while (line > 16 && TableOf<F, 16>::BYTES / 16 * line > room) line /= 2;
    return line;
}
