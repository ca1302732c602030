// Routed experts over many tokens: the grouped products of the tiles that experts_sort.cu has cut, and their sum.
//
//   gate_up   h[i, intermediate] = silu(gate_e x[token]) * (up_e x[token]), or what `epilogue` says (epilogue.cuh), for
//             the pair at position i of pair_slot
//   down      y[pair, hidden] = down_e h[i] + bias_e; rows of pairs not computed here are left alone
//   combine   out[token] += sum_slot weight[token, slot] * y[pair] in order of slots, those whose expert is here
//
// x [tokens, hidden], h [pairs, intermediate] and y [pairs, hidden] are bf16, out [tokens, hidden] and sums f32. hidden
// and intermediate: multiples of 32 and of the group or super-block, for bf16 of 8. Weights are read as they lie in the
// cache file (packed_tile.cuh); experts[e] is the 64-byte aligned address of an expert, in which down begins `down_at`
// bytes on.
//
// Grouped kernels are named by the row of PACKED_SPANS (packed_tile.cuh) and the tile: int4_g64_t{8|16|32|64|128}.
// The tile is the tile_tokens given to experts_sort. Any is correct for any number of tokens; choose it by the pairs of
// an expert on average, tokens * top_k / num_experts:
//   tile         8        16       32       64       128
//   on Hopper    to 7     to 14    to 24    to 112   more      or experts_persistent.cuh (packed.rs says when)
//   otherwise    to 5     to 12    to 40    to 160   more
//
//   experts_gate_up_{...}   grid (ceil(ceil(rows of gate / TILE_ROWS) / (BLOCK_TILES / 2)), pairs / tile + num_experts)
//                           from x, to h
//   experts_down_{...}      grid (ceil(ceil(hidden / TILE_ROWS) / BLOCK_TILES), pairs / tile + num_experts)
//                           from h, to y
//   experts_combine         grid (tokens, ceil(hidden / COMBINED))
//                           what stands in `out` does not count if this is `over` it
//                           ids and weights [tokens, top_k], top_k <= MAX_TOP_K, hidden a multiple of 8
#include "epilogue.cuh"
#include "packed_gemm.cuh"

template <class S>
__device__ __forceinline__ void gate_up(const int4* tiles, const int* pair_slot, const uint64_t* experts, const bf16* x,
    bf16* h, int hidden, int intermediate, const Packing& packing, int top_k, const Epilogue& epilogue) {
    begin_kernel();
    const int4 tile = tiles[blockIdx.y];
    const int tokens = tile.z - tile.y;
    if (tokens == 0) return;
    const bool ungated = epilogue.activation.form == RELU_SQUARED; // all tiles are of up
    const int first_tile = blockIdx.x * BLOCK_TILES,
              count = (ungated ? 1 : 2) * div_ceil(intermediate, TILE_ROWS) - first_tile;
    const uint8_t* weights = reinterpret_cast<const uint8_t*>(experts[tile.x]) +
        (size_t)first_tile * tile_bytes_of<S::F>(hidden, packing).all;
    auto input_row = [&](int i) { return i < tokens ? pair_slot[tile.y + i] / top_k : -1; };
    // Tiles of gate and up take turns, so a lane has both of its rows.
    auto finish = [&](float (&acc)[S::WARP_TILES][S::COLUMNS][4], int tile_at, int token_at, int row_at) {
        if (ungated) {
#pragma unroll
            for (int i = 0; i < S::WARP_TILES; i++) {
                const int row = (first_tile + tile_at + i) * TILE_ROWS + row_at;
                if (row >= intermediate) continue;
#pragma unroll
                for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
                    for (int c = 0; c < 2; c++)
                        if (token_at + 8 * j + c < tokens)
                            *reinterpret_cast<uint32_t*>(h + (size_t)(tile.y + token_at + 8 * j + c) * intermediate +
                                row) = pack_bf16(relu_squared(acc[i][j][c]), relu_squared(acc[i][j][c + 2]));
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < S::WARP_TILES; i += 2) {
            const int row = (first_tile + tile_at + i) / 2 * TILE_ROWS + row_at;
            if (row >= intermediate) continue;
#pragma unroll
            for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const int token = token_at + 8 * j + c;
                    const float first = activate(epilogue, tile.x, row, intermediate, acc[i][j][c], acc[i + 1][j][c]);
                    const float second =
                        activate(epilogue, tile.x, row + 1, intermediate, acc[i][j][c + 2], acc[i + 1][j][c + 2]);
                    if (token < tokens)
                        *reinterpret_cast<uint32_t*>(h + (size_t)(tile.y + token) * intermediate + row) =
                            pack_bf16(first, second);
                }
        }
    };
    packed_gemm<S>(weights, count, hidden, packing, x, hidden, tokens, input_row, finish);
}

template <class S>
__device__ __forceinline__ void down(const int4* tiles, const int* pair_slot, const uint64_t* experts, const bf16* h,
    bf16* y, int hidden, int intermediate, const Packing& packing, int down_at, const Epilogue& epilogue) {
    begin_kernel();
    const int4 tile = tiles[blockIdx.y];
    const int tokens = tile.z - tile.y;
    if (tokens == 0) return;
    const int first_tile = blockIdx.x * BLOCK_TILES, count = div_ceil(hidden, TILE_ROWS) - first_tile;
    const uint8_t* weights = reinterpret_cast<const uint8_t*>(experts[tile.x]) + down_at +
        (size_t)first_tile * tile_bytes_of<S::F>(intermediate, packing).all;
    auto input_row = [&](int i) { return i < tokens ? tile.y + i : -1; };
    auto finish = [&](float (&acc)[S::WARP_TILES][S::COLUMNS][4], int tile_at, int token_at, int row_at) {
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int token = token_at + 8 * j + c;
                if (token >= tokens) continue;
                bf16* to = y + (size_t)pair_slot[tile.y + token] * hidden;
#pragma unroll
                for (int i = 0; i < S::WARP_TILES; i++) {
                    const int row = (first_tile + tile_at + i) * TILE_ROWS + row_at;
                    if (row >= hidden) continue;
                    const float first = acc[i][j][c] + down_bias(epilogue, tile.x, row, hidden),
                                second = acc[i][j][c + 2] + down_bias(epilogue, tile.x, row + 1, hidden);
                    *reinterpret_cast<uint32_t*>(to + row) = pack_bf16(first, second);
                }
            }
    };
    packed_gemm<S>(weights, count, intermediate, packing, h, intermediate, tokens, input_row, finish);
}

#define GROUPED_ARGUMENTS                                                                                              \
    const int4 *tiles, const int *pair_slot, const uint64_t *experts, const bf16 *from, bf16 *to, int hidden,          \
        int intermediate, int down_at, int top_k, const __grid_constant__ Packing packing,                             \
        const __grid_constant__ Epilogue epilogue
#define GROUPED(format, F, SPAN, TOKENS, SHARED)                                                                       \
    static_assert(SHARED == GemmShape<F, SPAN, TOKENS>::SHARED_BYTES, "shared memory of " #format);                    \
    KERNEL_TILE(experts_gate_up_##format, TOKENS)                                                                      \
    KERNEL_BLOCKS(experts_gate_up_##format, GEMM_THREADS, gemm_blocks(F, TOKENS), SHARED, GROUPED_ARGUMENTS) {         \
        gate_up<GemmShape<F, SPAN, TOKENS>>(                                                                           \
            tiles, pair_slot, experts, from, to, hidden, intermediate, packing, top_k, epilogue);                      \
    }                                                                                                                  \
    KERNEL_TILE(experts_down_##format, TOKENS)                                                                         \
    KERNEL_BLOCKS(experts_down_##format, GEMM_THREADS, gemm_blocks(F, TOKENS), SHARED, GROUPED_ARGUMENTS) {            \
        down<GemmShape<F, SPAN, TOKENS>>(                                                                              \
            tiles, pair_slot, experts, from, to, hidden, intermediate, packing, down_at, epilogue);                    \
    }
#define GROUPED_TILES(format, F, SPAN, SHARED_8, SHARED_16, SHARED_32, SHARED_64, SHARED_128)                          \
    GROUPED(format##_t8, F, SPAN, 8, SHARED_8)                                                                         \
    GROUPED(format##_t16, F, SPAN, 16, SHARED_16)                                                                      \
    GROUPED(format##_t32, F, SPAN, 32, SHARED_32)                                                                      \
    GROUPED(format##_t64, F, SPAN, 64, SHARED_64)                                                                      \
    GROUPED(format##_t128, F, SPAN, 128, SHARED_128)
PACKED_SPANS(GROUPED_TILES)

constexpr int COMBINE_THREADS = 256, COMBINED = 8 * COMBINE_THREADS, MAX_TOP_K = 32;

KERNEL(experts_combine, COMBINE_THREADS, 0, const int* ids, const float* weights, const uint64_t* experts,
    const bf16* y, float* out, int hidden, int num_experts, int top_k, int over) {
    begin_kernel();
    __shared__ int here[MAX_TOP_K];
    const int token = blockIdx.x;
    if (threadIdx.x < top_k) {
        const int e = ids[(size_t)token * top_k + threadIdx.x];
        here[threadIdx.x] = e >= 0 && e < num_experts && experts[e] != 0;
    }
    __syncthreads();
    const int row = (blockIdx.y * (COMBINED / 8) + threadIdx.x) * 8;
    if (row >= hidden) return;
    float4* to = reinterpret_cast<float4*>(out + (size_t)token * hidden + row);
    float4 a{}, b{};
    if (!over) a = to[0], b = to[1];
#pragma unroll 4
    for (int j = 0; j < top_k; j++) {
        if (!here[j]) continue;
        const size_t pair = (size_t)token * top_k + j;
        const float w = weights[pair];
        const uint4 v = load_streaming(reinterpret_cast<const uint4*>(y + pair * hidden + row));
        a.x += w * low_f32(v.x), a.y += w * high_f32(v.x), a.z += w * low_f32(v.y), a.w += w * high_f32(v.y);
        b.x += w * low_f32(v.z), b.y += w * high_f32(v.z), b.z += w * low_f32(v.w), b.w += w * high_f32(v.w);
    }
    to[0] = a, to[1] = b;
}
