// One dense matrix [n, k] in packed INT8 or INT4 tiles (packed_tile.cuh) with scales in bf16: y[token, n] = w x[token]
// + bias, or added to y.
//
// `y` is f32 or bf16, `bias` f32 [n] or null. flags: Y_IS_BF16, ADD. k is a multiple of 32 and of the group (32, 64,
// 128), n of 2; pitches are in elements, x_pitch a multiple of 8, y_pitch of 2. `weights` is 64-byte aligned.
//
// A kernel's tile is (tokens). Its name says the row of the lists in packed_tile.cuh.
//   packed_linear_gemv_{row of DENSE_FORMATS}_t{4|8}: up to so many tokens
//       grid (ceil(n / TILE_ROWS))
//   packed_linear_{row of DENSE_SPANS}_t{16|32|64|128}: tiles of so many tokens
//       grid (ceil(ceil(n / TILE_ROWS) / BLOCK_TILES), ceil(tokens / tile))
#include "packed_gemm.cuh"
#include "packed_gemv.cuh"

constexpr int Y_IS_BF16 = 1, ADD = 2;

template <class S>
__device__ __forceinline__ void packed_linear(const uint8_t* weights, const bf16* x, void* y, const float* bias,
    int tokens, int n, int k, int group, int x_pitch, int y_pitch, int flags) {
    begin_kernel();
    const int first_tile = blockIdx.x * BLOCK_TILES, first_token = blockIdx.y * S::TOKENS,
              count = min(tokens - first_token, S::TOKENS);
    auto input_row = [&](int i) { return i < count ? first_token + i : -1; };
    auto finish = [&](float (&acc)[S::WARP_TILES][S::COLUMNS][4], int tile_at, int token_at, int row_at) {
#pragma unroll
        for (int i = 0; i < S::WARP_TILES; i++) {
            const int row = (first_tile + tile_at + i) * TILE_ROWS + row_at;
            if (row >= n) continue;
            const float first_bias = bias ? bias[row] : 0.0f, second_bias = bias ? bias[row + 1] : 0.0f;
#pragma unroll
            for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const int token = token_at + 8 * j + c;
                    if (token >= count) continue;
                    const size_t at = (size_t)(first_token + token) * y_pitch + row;
                    float first = acc[i][j][c] + first_bias, second = acc[i][j][c + 2] + second_bias;
                    if (flags & Y_IS_BF16) {
                        uint32_t* to = reinterpret_cast<uint32_t*>(static_cast<bf16*>(y) + at);
                        if (flags & ADD) first += low_f32(*to), second += high_f32(*to);
                        *to = pack_bf16(first, second);
                    } else {
                        float2* to = reinterpret_cast<float2*>(static_cast<float*>(y) + at);
                        if (flags & ADD) first += to->x, second += to->y;
                        *to = make_float2(first, second);
                    }
                }
        }
    };
    packed_gemm<S>(weights + (size_t)first_tile * tile_bytes<S::F>(k, group), div_ceil(n, TILE_ROWS) - first_tile, k,
        Packing{nullptr, S::F, group, 0}, x, x_pitch, count, input_row, finish);
}

constexpr int GEMV_THREADS = 256, GEMV_WARPS = GEMV_THREADS / WARP;

template <Format F, int SETS, int DEPTH>
__device__ __forceinline__ void packed_linear_gemv(const uint8_t* weights, const bf16* x, void* y, const float* bias,
    int tokens, int n, int k, int group, int x_pitch, int y_pitch, int flags) {
    __shared__ float part[GEMV_WARPS][SETS][VECTORS][TILE_ROWS];
    const int warp = threadIdx.x / WARP;
    const uint8_t* tile = weights + (size_t)blockIdx.x * tile_bytes<F>(k, group);
    auto row_of = [&](int s) {
        const int token = VECTORS * s + vector_of_input();
        return token < tokens ? x + (size_t)token * x_pitch : nullptr;
    };
    UnitSums sums[SETS] = {};
    gemv_tile<F, SETS, GEMV_WARPS, DEPTH, 0, false>(
        tile, warp, k, Packing{nullptr, F, group, 0}, row_of, begin_kernel, nullptr, true, sums);
#pragma unroll
    for (int s = 0; s < SETS; s++) put_sums(sums[s], part[warp][s]);
    __syncthreads();
    const int row = blockIdx.x * TILE_ROWS + threadIdx.x % TILE_ROWS, token = threadIdx.x / TILE_ROWS;
    if (token >= tokens || token >= VECTORS * SETS || row >= n) return;
    float total = bias ? bias[row] : 0.0f;
#pragma unroll
    for (int w = 0; w < GEMV_WARPS; w++) total += part[w][token / VECTORS][token % VECTORS][threadIdx.x % TILE_ROWS];
    const size_t to = (size_t)token * y_pitch + row;
    if (flags & Y_IS_BF16) {
        bf16* out = static_cast<bf16*>(y) + to;
        *out = to_bf16(flags & ADD ? to_f32(*out) + total : total);
    } else {
        float* out = static_cast<float*>(y) + to;
        *out = flags & ADD ? *out + total : total;
    }
}

#define LINEAR_ARGUMENTS                                                                                               \
    const uint8_t *weights, const bf16 *x, void *y, const float *bias, int tokens, int n, int k, int group,            \
        int x_pitch, int y_pitch, int flags
#define LINEAR(name, F, SPAN, TOKENS, SHARED)                                                                          \
    static_assert(SHARED == GemmShape<F, SPAN, TOKENS>::SHARED_BYTES, "shared memory of " #name);                      \
    KERNEL_TILE(name, TOKENS)                                                                                          \
    KERNEL_BLOCKS(name, GEMM_THREADS, gemm_blocks(F, TOKENS), SHARED, LINEAR_ARGUMENTS) {                              \
        packed_linear<GemmShape<F, SPAN, TOKENS>>(weights, x, y, bias, tokens, n, k, group, x_pitch, y_pitch, flags);  \
    }
#define LINEAR_TILES(format, F, SPAN, SHARED_8, SHARED_16, SHARED_32, SHARED_64, SHARED_128)                           \
    LINEAR(packed_linear_##format##_t16, F, SPAN, 16, SHARED_16)                                                       \
    LINEAR(packed_linear_##format##_t32, F, SPAN, 32, SHARED_32)                                                       \
    LINEAR(packed_linear_##format##_t64, F, SPAN, 64, SHARED_64)                                                       \
    LINEAR(packed_linear_##format##_t128, F, SPAN, 128, SHARED_128)
DENSE_SPANS(LINEAR_TILES)

#define LINEAR_GEMV(name, F, SETS)                                                                                     \
    KERNEL_TILE(name, VECTORS* SETS)                                                                                   \
    KERNEL(name, GEMV_THREADS, 0, LINEAR_ARGUMENTS) {                                                                  \
        packed_linear_gemv<F, SETS, Unit<F>::DEPTH>(                                                                   \
            weights, x, y, bias, tokens, n, k, group, x_pitch, y_pitch, flags);                                        \
    }
#define LINEAR_GEMVS(format, F)                                                                                        \
    LINEAR_GEMV(packed_linear_gemv_##format##_t4, F, 1)                                                                \
    LINEAR_GEMV(packed_linear_gemv_##format##_t8, F, 2)
DENSE_FORMATS(LINEAR_GEMVS)
