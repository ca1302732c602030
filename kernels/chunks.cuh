// What kernels share that take a state from chunk to chunk of a sequence's tokens, on tensor cores.
//
// A warp has 16 columns of a state [keys, columns] in registers, transposed as everything it makes is: columns are the
// rows of its products, and sums become operands where they lie. Tile n of a warp's sums has tokens 8 n to 8 n + 7, of
// its state keys 8 n to 8 n + 7; its lanes have columns lane / 4 and 8 further, tokens or keys 2 (lane % 4) and the
// next.
//
// Operands that are not bf16 by nature are split into two bf16 numbers, the rounded one and what rounding left, so
// products are as good as with 16 bits of mantissa, and the state is f32: parts of a prompt give the same numbers to
// about 2^-16.
#pragma once
#include "attention.cuh"
#include "delta_net.cuh"

// A block's threads, the columns that it takes, and rows of its tiles.
constexpr int ACROSS_THREADS = 128, ACROSS_COLUMNS = ACROSS_THREADS / WARP * 16;
constexpr int KEY_PITCH = MAX_KEY + 8, VALUE_PITCH = ACROSS_COLUMNS + 8;

// Two neighbouring tiles of sums as A of a product.
__device__ __forceinline__ void split_as_a(
    uint32_t (&high)[4], uint32_t (&low)[4], const float (&left)[4], const float (&right)[4]) {
    const Split parts[4] = {
        split(left[0], left[1]), split(left[2], left[3]), split(right[0], right[1]), split(right[2], right[3])};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        high[i] = parts[i].high;
        low[i] = parts[i].low;
    }
}

// Columns `column` to `column` + 15 of a state [key_dim, value_dim] in memory.
struct StateColumns {
    float* slot;
    int key_dim, value_dim, column;

    // Calls visit(number, address) for all of this lane's; the address is null past the ends.
    template <class Visit>
    __device__ __forceinline__ void each(float (&state)[MAX_KEY / 8][4], int lane, Visit visit) const {
#pragma unroll
        for (int n = 0; n < MAX_KEY / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int k = n * 8 + lane % 4 * 2 + i % 2, v = column + lane / 4 + i / 2 * 8;
                visit(state[n][i], k < key_dim && v < value_dim ? slot + (size_t)k * value_dim + v : nullptr);
            }
    }
    __device__ __forceinline__ void load(float (&state)[MAX_KEY / 8][4], int lane, bool fresh) const {
        each(state, lane, [&](float& x, const float* at) { x = at && !fresh ? *at : 0.0f; });
    }
    __device__ __forceinline__ void store(float (&state)[MAX_KEY / 8][4], int lane) const {
        each(state, lane, [&](float x, float* at) {
            if (at) *at = x;
        });
    }
};

// to[i] += S rows[i]^T for tiles of CHUNK rows [keys], which have PARTS parts, one behind the other.
template <int CHUNK, int PARTS, int TILES>
__device__ __forceinline__ void read_state(float (&to)[TILES][CHUNK / 8][4], const bf16* const (&rows)[TILES],
    const float (&state)[MAX_KEY / 8][4], int lane) {
#pragma unroll
    for (int k = 0; k < MAX_KEY / 16; k++) {
        uint32_t high[4], low[4];
        split_as_a(high, low, state[2 * k], state[2 * k + 1]);
#pragma unroll
        for (int n = 0; n < CHUNK / 8; n += 2) {
            uint32_t b[TILES][4];
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                load_b_rows(b[i], rows[i] + n * 8 * KEY_PITCH + k * 16, KEY_PITCH, lane);
                mma_pair(to[i][n], to[i][n + 1], high, b[i]);
            }
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                mma_pair(to[i][n], to[i][n + 1], low, b[i]);
                if constexpr (PARTS == 2) {
                    uint32_t rest[4];
                    load_b_rows(rest, rows[i] + (CHUNK + n * 8) * KEY_PITCH + k * 16, KEY_PITCH, lane);
                    mma_pair(to[i][n], to[i][n + 1], high, rest);
                }
            }
        }
    }
}

// S += x rows for a tile of CHUNK rows [keys], which has PARTS parts.
template <int CHUNK, int PARTS>
__device__ __forceinline__ void write_state(
    float (&state)[MAX_KEY / 8][4], const float (&x)[CHUNK / 8][4], const bf16* rows, int lane) {
#pragma unroll
    for (int j = 0; j < CHUNK / 16; j++) {
        uint32_t high[4], low[4];
        split_as_a(high, low, x[2 * j], x[2 * j + 1]);
#pragma unroll
        for (int n = 0; n < MAX_KEY / 8; n += 2) {
            uint32_t b[4];
            load_b_cols(b, rows + j * 16 * KEY_PITCH + n * 8, KEY_PITCH, lane);
            mma_pair(state[n], state[n + 1], high, b);
            mma_pair(state[n], state[n + 1], low, b);
            if constexpr (PARTS == 2) {
                load_b_cols(b, rows + (CHUNK + j * 16) * KEY_PITCH + n * 8, KEY_PITCH, lane);
                mma_pair(state[n], state[n + 1], high, b);
            }
        }
    }
}

// to += x M^T of a triangle M in two parts [2, CHUNK, CHUNK + 8]: 16 tokens depend on earlier ones and their own.
template <int CHUNK>
__device__ __forceinline__ void multiply_triangle(
    float (&to)[CHUNK / 8][4], const float (&x)[CHUNK / 8][4], const bf16* triangle, int lane) {
    constexpr int PITCH = CHUNK + 8;
#pragma unroll
    for (int j = 0; j < CHUNK / 16; j++) {
        uint32_t high[4], low[4];
        split_as_a(high, low, x[2 * j], x[2 * j + 1]);
#pragma unroll
        for (int i = j; i < CHUNK / 16; i++) {
            uint32_t b[4], c[4];
            load_b_rows(b, triangle + i * 16 * PITCH + j * 16, PITCH, lane);
            load_b_rows(c, triangle + (CHUNK + i * 16) * PITCH + j * 16, PITCH, lane);
            mma_pair(to[2 * i], to[2 * i + 1], high, b);
            mma_pair(to[2 * i], to[2 * i + 1], low, b);
            mma_pair(to[2 * i], to[2 * i + 1], high, c);
        }
    }
}

// Calls visit(number, value, token) with the warp's columns of a tile of values [CHUNK, VALUE_PITCH].
template <int CHUNK, class Visit>
__device__ __forceinline__ void each_value(
    float (&x)[CHUNK / 8][4], const bf16* values, int warp, int lane, Visit visit) {
#pragma unroll
    for (int n = 0; n < CHUNK / 8; n += 2) {
        uint32_t v[4];
        load_b_cols(v, values + n * 8 * VALUE_PITCH + warp * 16, VALUE_PITCH, lane);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float (&of)[4] = x[n + i % 2];
            const int t = (n + i % 2) * 8 + lane % 4 * 2;
            visit(of[i / 2 * 2], low_f32(v[i]), t);
            visit(of[i / 2 * 2 + 1], high_f32(v[i]), t + 1);
        }
    }
}

// Writes sums as rows of `pitch` numbers, of which there are `columns` past the block's first, through the warp's own
// columns of the tile of values.
template <int CHUNK>
__device__ __forceinline__ void write_results(bf16* out, size_t pitch, int columns, const float (&x)[CHUNK / 8][4],
    bf16* values, int tokens, int warp, int lane) {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < CHUNK / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            values[(n * 8 + lane % 4 * 2 + i % 2) * VALUE_PITCH + warp * 16 + lane / 4 + i / 2 * 8] = to_bf16(x[n][i]);
    __syncwarp();
#pragma unroll
    for (int at = lane; at < CHUNK * 2; at += WARP) {
        const int t = at / 2, v = warp * 16 + at % 2 * 8;
        if (t < tokens && v < columns)
            *reinterpret_cast<uint4*>(out + t * pitch + v) =
                *reinterpret_cast<const uint4*>(values + t * VALUE_PITCH + v);
    }
}
