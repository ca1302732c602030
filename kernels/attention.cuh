// What the attention kernels share: the cache's pages, tiles in shared memory, the fragments of the two products.
//
// The cache of a layer: keys [blocks, kv_heads, 64, key_dim], values [blocks, kv_heads, 64, value_dim], bf16 or INT8.
// So the 64 positions of a page are contiguous for each head. Multi-head latent attention (MLA) has one head and no
// values: they are the first numbers of the keys.
//
// INT8: behind the codes of a head's page are its scales, bf16 [ceil(dim / KV_GROUP)][64], one for each KV_GROUP
// numbers of a position. A number is its code times its scale, rounded to bf16.
//
// A tile in shared memory: rows of bf16, one for each position (or query), 8 numbers longer than the head. With that
// pitch the 8 rows that ldmatrix reads lie in 8 different groups of banks for every head size, and all offsets in a
// loop over the tile are constants. INT8: decode keeps INT8 tiles (rows 16 bytes longer than the head, too), the scales
// of 16 positions [groups][16] behind them, and widens fragments; prefill, where each fragment is read by many warps,
// lets pages arrive as they lie in the cache ("raw") and widens them into a bf16 tile.
#pragma once
#include "common.cuh"

constexpr int PAGE = 64;
constexpr float LOG2_E = 1.4426950408889634f;

// What a row sees of the positions before its own: the last `len` with its own, or those of its own chunk, of which the
// context has one for each `len` positions.
struct Window {
    int len, chunks;
};

// The length of a window that hides nothing.
constexpr int NO_WINDOW = 1 << 30;

// The first position that a row at `position` sees.
__device__ __forceinline__ int first_seen(const Window& window, int position) {
    return window.chunks ? position / window.len * window.len : max(position - window.len + 1, 0);
}

// The score that takes part in the softmax of `head` and brings no value, as a power of two; without `sinks` none does.
__device__ __forceinline__ float sink_of(const float* sinks, int head) {
    return sinks ? sinks[head] * LOG2_E : -INFINITY;
}

struct int8 {
    int8_t code;
};

constexpr int KV_GROUP = 64; // numbers of a position that have one scale

// A bf16 number in both halves.
__device__ __forceinline__ uint32_t twice(uint16_t x) { return x * 0x10001u; }

// Codes in the low bytes of both halves, times `scale` each, rounded to bf16. A code is low + (high bit ? -128 : 0);
// bf16 has 128 + low as low behind the bits of 128, and 256 differs from 128 by that high bit.
__device__ __forceinline__ uint32_t widen_low_bytes(uint32_t halves, uint32_t scale) {
    const uint32_t codes =
        fma_bf16x2((halves & 0x00800080u) | 0x43004300u, 0xbf80bf80u, (halves & 0x007f007fu) | 0x43004300u);
    return fma_bf16x2(codes, scale, 0x80008000u);
}
// Four of them.
__device__ __forceinline__ uint2 widen_int8(uint32_t four, uint32_t scale) {
    return make_uint2(
        widen_low_bytes(__byte_perm(four, 0, 0x4140), scale), widen_low_bytes(__byte_perm(four, 0, 0x4342), scale));
}

// What numbers of a group are stored with.
struct Scale {
    bf16 scale;
    float inverse; // codes are numbers times this
};
// For numbers of at most `largest`.
__device__ __forceinline__ Scale scale_for(float largest) {
    const bf16 scale = to_bf16(fminf(largest, 3e38f) / 127.0f);
    const float x = to_f32(scale);
    return {scale, x < 1e-30f ? 0.0f : 1.0f / x};
}
__device__ __forceinline__ uint32_t code_of(float x, const Scale& scale) {
    return (uint32_t)(int)fminf(fmaxf(rintf(x * scale.inverse), -127.0f), 127.0f) & 0xffu;
}

// Scales of a position of `dim` numbers; bf16 has none.
template <class T> __host__ __device__ constexpr int groups_of(int dim) {
    return sizeof(T) == 1 ? (dim + KV_GROUP - 1) / KV_GROUP : 0;
}
// Numbers that a head's page takes, its scales among them.
template <class T> __host__ __device__ constexpr int page_len(int dim) {
    return PAGE * (dim + groups_of<T>(dim) * 2 / (int)sizeof(T));
}
// The same, of the scales of 16 positions in shared memory.
template <class T> __host__ __device__ constexpr int scales_len(int d) {
    return 16 * groups_of<T>(d) * 2 / (int)sizeof(T);
}
// A head's page: `data` [blocks, kv_heads, page].
template <class T> __device__ __forceinline__ T* page_of(T* data, uint32_t block, int kv_heads, int kv_head, int dim) {
    return data + ((size_t)block * kv_heads + kv_head) * page_len<T>(dim);
}
// Its scales, [groups][64].
__device__ __forceinline__ const uint16_t* scales_of(const int8* page, int dim) {
    return reinterpret_cast<const uint16_t*>(page + PAGE * dim);
}

// Numbers from one row of a tile to the next.
template <class T> __host__ __device__ constexpr int pitch_of(int d) { return d + 16 / (int)sizeof(T); }

// Copies `rows` rows of `dim` numbers to the first ROWS rows of a tile of width D; the rest of them becomes zero (INT8:
// anything). `thread` of THREADS copies its part: eight threads to a row, so that a thread needs few addresses.
template <int ROWS, int D, int THREADS, class T>
__device__ __forceinline__ void copy_rows(T* tile, const T* from, size_t pitch, int dim, int rows, int thread) {
    constexpr int STEP = THREADS / 8, CHUNK = 16 / sizeof(T), WIDE = 8 * CHUNK, PITCH = pitch_of<T>(D);
    static_assert(ROWS % STEP == 0, "");
    if (sizeof(T) == 1 && dim % 16) { // rows are not aligned; no model has that
        for (int i = thread; i < min(rows, ROWS) * (dim / 8); i += THREADS) {
            const int row = i / (dim / 8), col = i % (dim / 8) * 8;
            *reinterpret_cast<uint2*>(tile + row * PITCH + col) =
                *reinterpret_cast<const uint2*>(from + row * pitch + col);
        }
        return;
    }
    const int col = thread % 8 * CHUNK;
    tile += thread / 8 * PITCH + col;
    from += thread / 8 * pitch + col;
    rows -= thread / 8;
#pragma unroll
    for (int row = 0; row < ROWS; row += STEP, from += STEP * pitch) {
#pragma unroll
        for (int k = 0; k < D; k += WIDE) {
            if (k + WIDE <= D || col < D - k)
                copy_async_16(tile + row * PITCH + k, from + k, row < rows && col + k < dim);
        }
    }
}

// The scales of ROWS positions of a page from `first` on, to [groups of D][ROWS]; those of groups past the head become
// zero.
template <int ROWS, int D, class T>
__device__ __forceinline__ void copy_scales(void* to, const T* page, int dim, int first, int thread) {
    if constexpr (sizeof(T) == 1) {
        constexpr int CHUNKS = ROWS / 8;
        if (thread >= CHUNKS * groups_of<T>(D)) return;
        const int group = thread / CHUNKS, at = thread % CHUNKS * 8;
        copy_async_16(static_cast<uint16_t*>(to) + group * ROWS + at, scales_of(page, dim) + group * PAGE + first + at,
            group < groups_of<T>(dim));
    }
}

// INT8 to a bf16 tile, in two steps. `raw` gets the bytes of the rows as they lie, which is why heads whose size is an
// odd multiple of 8 are no special case.
template <int ROWS, int D, int THREADS>
__device__ __forceinline__ void copy_raw(uint8_t* raw, const int8* from, int dim, int rows, int thread) {
#pragma unroll
    for (int i = 0; i < div_ceil(ROWS * D / 16, THREADS); i++) {
        const int at = 16 * (i * THREADS + thread);
        if (at < rows * dim) copy_async_16(raw + at, from + at);
    }
}
// 1 / (dim / 8) for row_of.
__device__ __forceinline__ uint32_t reciprocal(int dim) { return ((1u << 20) + dim / 8 - 1) / (dim / 8); }
// The row of the n-th group of 8 numbers; exact up to 64 rows of 576.
__device__ __forceinline__ int row_of(int n, uint32_t inverse) { return (int)(n * inverse >> 20); }
// Columns from `dim` on are left alone. Scales are [groups][ROWS].
template <int ROWS, int D, int THREADS, int PITCH>
__device__ __forceinline__ void widen_rows(
    bf16* tile, const uint8_t* raw, const uint16_t* scales, int dim, uint32_t inverse, int rows, int thread) {
#pragma unroll 2 // registers are scarce
    for (int i = 0; i < div_ceil(ROWS * D / 16, THREADS); i++) {
        const int at = 16 * (i * THREADS + thread);
        if (at >= ROWS * dim) break;
        const uint4 bytes = *reinterpret_cast<const uint4*>(raw + at);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int n = at / 8 + half, row = row_of(n, inverse), col = 8 * n - row * dim;
            const uint32_t scale = twice(scales[col / KV_GROUP * ROWS + row]);
            const uint2 a = widen_int8(half ? bytes.z : bytes.x, scale),
                        b = widen_int8(half ? bytes.w : bytes.y, scale);
            *reinterpret_cast<uint4*>(tile + row * PITCH + col) =
                row < rows ? make_uint4(a.x, a.y, b.x, b.y) : make_uint4(0, 0, 0, 0);
        }
    }
}
template <int THREADS> __device__ __forceinline__ void clear_shared(void* at, int bytes, int thread) {
    for (int i = thread; i < bytes / 16; i += THREADS) reinterpret_cast<uint4*>(at)[i] = make_uint4(0, 0, 0, 0);
}

// Fragments (PTX manual, mma.m16n8k16). A: 16 x 16 elements from a tile whose rows are A's rows.
__device__ __forceinline__ void load_a(uint32_t (&a)[4], const bf16* tile, int pitch, int lane) {
    ldmatrix_x4(a, tile + lane % 16 * pitch + lane / 16 * 8);
}
// B for 16 columns, k = 16, from a tile whose rows are B's columns (keys). The first two words are for columns 0 to 7,
// the others for 8 to 15.
__device__ __forceinline__ void load_b_rows(uint32_t (&b)[4], const bf16* tile, int pitch, int lane, uint2 = {}) {
    ldmatrix_x4(b, tile + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8);
}
// the same from a tile whose rows are B's rows (values).
__device__ __forceinline__ void load_b_cols(uint32_t (&b)[4], const bf16* tile, int pitch, int lane, uint2 = {}) {
    ldmatrix_x4_trans(b, tile + lane % 16 * pitch + lane / 16 * 8);
}
// B from INT8 tiles. A word of a matrix is four numbers of a row here, not two.
// Keys: lane i gets dimensions 4 (i % 4) to 4 (i % 4) + 3 where bf16 has 2 (i % 4), 2 (i % 4) + 1 and the two 8 further
// on. A sum has no order: the queries follow (load_queries).
__device__ __forceinline__ void load_b_rows(uint32_t (&b)[4], const int8* tile, int pitch, int lane, uint2 scale) {
    uint32_t raw[2];
    ldmatrix_x2(raw, tile + lane % 16 * pitch);
    const uint2 left = widen_int8(raw[0], scale.x), right = widen_int8(raw[1], scale.y);
    b[0] = left.x;
    b[1] = left.y;
    b[2] = right.x;
    b[3] = right.y;
}
// Values: two positions by two columns. The even ones of the 16 columns are the first 8 of B, the odd ones the others
// (quad_of puts them right).
__device__ __forceinline__ void load_b_cols(uint32_t (&b)[4], const int8* tile, int pitch, int lane, uint2 scale) {
    uint32_t raw[2];
    ldmatrix_x2_trans(raw, tile + lane % 16 * pitch);
    b[0] = widen_low_bytes(raw[0], scale.x);
    b[1] = widen_low_bytes(raw[1], scale.y);
    b[2] = widen_low_bytes(raw[0] >> 8, scale.x);
    b[3] = widen_low_bytes(raw[1] >> 8, scale.y);
}
// The scales of a fragment, from the column's group of 16 positions' scales: of keys two positions', of values two
// pairs'. Nothing for bf16.
template <class T> __device__ __forceinline__ uint2 key_scales(const void* scales, int column, int lane) {
    if constexpr (sizeof(T) == 1) {
        const uint16_t* of = static_cast<const uint16_t*>(scales) + column / KV_GROUP * 16 + lane / 4;
        return make_uint2(twice(of[0]), twice(of[8]));
    } else {
        return make_uint2(0, 0);
    }
}
template <class T> __device__ __forceinline__ uint2 value_scales(const void* scales, int column, int lane) {
    if constexpr (sizeof(T) == 1) {
        const uint32_t* of = static_cast<const uint32_t*>(scales) + column / KV_GROUP * 8 + lane % 4;
        return make_uint2(of[0], of[4]);
    } else {
        return make_uint2(0, 0);
    }
}
__device__ __forceinline__ void mma_pair(
    float (&left)[4], float (&right)[4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
    const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
    mma_bf16(left, a, first);
    mma_bf16(right, a, second);
}

// Two bf16 numbers to a value: the rounded one, and what is left.
struct Split {
    uint32_t high, low;
};
__device__ __forceinline__ Split split(float a, float b) {
    const uint32_t high = pack_bf16(a, b);
    return {high, pack_bf16(a - low_f32(high), b - high_f32(high))};
}
// Sum and maximum over the four lanes that share the rows of an accumulator.
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

// The running softmax of 16 rows over the columns of N 8-wide score tiles; a lane has rows lane / 4 and lane / 4 + 8.
// Maxima are of score * scale_log2; `sum` is this lane's share. Turns scores into exp2(score * scale_log2 - max);
// returns what former sums and outputs must be multiplied by. A row that has seen nothing yet has maximum -inf.
template <int N>
__device__ __forceinline__ float2 online_softmax(float (&s)[N][4], float (&max)[2], float (&sum)[2], float scale_log2) {
    float correction[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < N; n++) top = fmaxf(top, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        top = fmaxf(max[r], quad_max(top) * scale_log2);
        const float base = top == -INFINITY ? 0.0f : top;
        correction[r] = fast_exp2(max[r] - base);
        max[r] = top;
        float added = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++) {
            s[n][2 * r] = fast_exp2(fmaf(s[n][2 * r], scale_log2, -base));
            s[n][2 * r + 1] = fast_exp2(fmaf(s[n][2 * r + 1], scale_log2, -base));
            added += s[n][2 * r] + s[n][2 * r + 1];
        }
        sum[r] = sum[r] * correction[r] + added;
    }
    return make_float2(correction[0], correction[1]);
}

// Two neighbouring score tiles as A of the second product.
__device__ __forceinline__ void scores_as_a(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack_bf16(left[0], left[1]);
    a[1] = pack_bf16(left[2], left[3]);
    a[2] = pack_bf16(right[0], right[1]);
    a[3] = pack_bf16(right[2], right[3]);
}
