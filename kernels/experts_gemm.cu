// Routed experts over many tokens: the grouped products of the tiles that experts_sort.cu has cut, and their sum.
//
//   gate_up   h[i, intermediate] = silu(gate_e x[token]) * (up_e x[token])
//             for the pair at position i of pair_slot; or what `epilogue` says (epilogue.cuh)
//
//   down      y[pair, hidden] = down_e h[i] + bias_e
//             rows of pairs not computed here are left alone
//
//   combine   out[token] += sum_slot weight[token, slot] * y[pair]
//             in order of slots, those whose expert is here
//
// h [pairs, intermediate] and y [pairs, hidden] are bf16, sums f32. TOKENS is one of 16, 32, 64, 128, the tile_tokens
// given to experts_sort; choose it by the pairs of an expert on average, tokens * top_k / num_experts: 16 up to 12, 32
// up to 40, 64 up to 160, else 128; on Hopper 16 up to 14, 32 up to 24, 64 up to 112, else 128. Any of them is correct
// for any number. FORMAT is bf16, int8_g32, int8_g64, int4_g32, int4_g64; g64 serves groups of 64 and 128 (`group`; 0
// for bf16). hidden and intermediate: multiples of 32 and of the group, for bf16 of 8. Weights are read as they lie in
// the cache file (packed_tile.cuh); experts[e] is the 64-byte aligned address of an expert.
//
//   experts_gate_up_FORMAT_tTOKENS   grid (ceil(ceil(intermediate / 16) / 4), pairs / TOKENS + num_experts), block 128
//       (tiles: *const int4, pair_slot: *const i32, experts: *const u64, x: *const bf16 [tokens, hidden], h: *mut bf16,
//       hidden: i32, intermediate: i32,
//        group: i32, f16: i32 (scales are, not bf16), top_k: i32, epilogue: Epilogue)
//   experts_down_FORMAT_tTOKENS      grid (ceil(ceil(hidden / 16) / 8), pairs / TOKENS + num_experts), block 128
//       (tiles, pair_slot, experts, h: *const bf16, y: *mut bf16, hidden: i32, intermediate: i32, group: i32, f16: i32,
//       top_k: i32, epilogue: Epilogue)
//   Dynamic shared bytes of both (GemmShape::SHARED; above 48 KB the function's limit must be raised first):
//       TOKENS         16      32      64     128     on Hopper      64     128
//       int4_g64    51200   67584   50176   82944                 75264  103680
//       int4_g32    53248   69632   51200   83968                 76800  104960
//       mxfp4       the same as int4_g32
//       int8_g64    83968   75264   49920   74496                 the same
//       int8_g32    86016   76800   50688   75264                 the same
//       bf16        73728   61440   73728   98304                 the same
//   experts_combine   grid (tokens, ceil(hidden / 2048)), block 256, no dynamic shared memory
//       (ids: *const i32 [tokens, top_k], weights: *const f32 [tokens, top_k], experts: *const u64, y: *const bf16,
//       out: *mut f32 [tokens, hidden],
//        hidden: i32, num_experts: i32, top_k: i32), top_k <= 32, hidden a multiple of 8
#include "epilogue.cuh"
#include "packed_gemm.cuh"

template <class S>
__device__ __forceinline__ void gate_up(const int4* tiles, const int* pair_slot, const uint64_t* experts, const bf16* x,
    bf16* h, int hidden, int intermediate, int group, bool f16, int top_k, const Epilogue& epilogue) {
    begin_kernel();
    const int4 tile = tiles[blockIdx.y];
    const int tokens = tile.z - tile.y;
    if (tokens == 0) return;
    const int first_tile = blockIdx.x * BLOCK_TILES, count = 2 * div_ceil(intermediate, TILE_ROWS) - first_tile;
    const uint8_t* weights =
        reinterpret_cast<const uint8_t*>(experts[tile.x]) + (size_t)first_tile * tile_bytes<S::F>(hidden, group);
    auto row_of = [&](int i) { return i < tokens ? pair_slot[tile.y + i] / top_k : -1; };
    // Tiles of gate and up take turns, so a lane has both of its rows.
    auto finish = [&](float (&acc)[S::WARP_TILES][S::COLUMNS][4], int tile_at, int token_at, int row_at) {
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
    packed_gemm<S>(weights, count, hidden, group, f16, x, hidden, tokens, row_of, finish);
}

template <class S>
__device__ __forceinline__ void down(const int4* tiles, const int* pair_slot, const uint64_t* experts, const bf16* h,
    bf16* y, int hidden, int intermediate, int group, bool f16, const Epilogue& epilogue) {
    begin_kernel();
    const int4 tile = tiles[blockIdx.y];
    const int tokens = tile.z - tile.y;
    if (tokens == 0) return;
    const int first_tile = blockIdx.x * BLOCK_TILES, count = div_ceil(hidden, TILE_ROWS) - first_tile;
    const uint8_t* weights = reinterpret_cast<const uint8_t*>(experts[tile.x]) +
        (size_t)(2 * div_ceil(intermediate, TILE_ROWS)) * tile_bytes<S::F>(hidden, group) +
        (size_t)first_tile * tile_bytes<S::F>(intermediate, group);
    auto row_of = [&](int i) { return i < tokens ? tile.y + i : -1; };
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
    packed_gemm<S>(weights, count, intermediate, group, f16, h, intermediate, tokens, row_of, finish);
}

#define GROUPED(format, F, SPAN, TOKENS)                                                                               \
    KERNEL_BLOCKS(experts_gate_up_##format##_t##TOKENS, GEMM_THREADS, gemm_blocks(TOKENS), const int4* tiles,          \
        const int* pair_slot, const uint64_t* experts, const bf16* x, bf16* h, int hidden, int intermediate,           \
        int group, int f16, int top_k, const __grid_constant__ Epilogue epilogue) {                                    \
        gate_up<GemmShape<F, SPAN, TOKENS>>(                                                                           \
            tiles, pair_slot, experts, x, h, hidden, intermediate, group, F != MXFP4 && f16, top_k, epilogue);         \
    }                                                                                                                  \
    KERNEL_BLOCKS(experts_down_##format##_t##TOKENS, GEMM_THREADS, gemm_blocks(TOKENS), const int4* tiles,             \
        const int* pair_slot, const uint64_t* experts, const bf16* h, bf16* y, int hidden, int intermediate,           \
        int group, int f16, int, const __grid_constant__ Epilogue epilogue) {                                          \
        down<GemmShape<F, SPAN, TOKENS>>(                                                                              \
            tiles, pair_slot, experts, h, y, hidden, intermediate, group, F != MXFP4 && f16, epilogue);                \
    }
#define GROUPED_ALL(format, F, SPAN)                                                                                   \
    GROUPED(format, F, SPAN, 16) GROUPED(format, F, SPAN, 32) GROUPED(format, F, SPAN, 64) GROUPED(format, F, SPAN, 128)
GROUPED_ALL(int4_g64, INT4, 64)
GROUPED_ALL(int4_g32, INT4, 32)
GROUPED_ALL(mxfp4, MXFP4, 32)
GROUPED_ALL(int8_g64, INT8, 64)
GROUPED_ALL(int8_g32, INT8, 32)
GROUPED_ALL(bf16, BF16, 64)

constexpr int COMBINE_THREADS = 256, MAX_TOP_K = 32;

KERNEL(experts_combine, COMBINE_THREADS, const int* ids, const float* weights, const uint64_t* experts, const bf16* y,
    float* out, int hidden, int num_experts, int top_k) {
    begin_kernel();
    __shared__ int here[MAX_TOP_K];
    const int token = blockIdx.x;
    if (threadIdx.x < top_k) {
        const int e = ids[(size_t)token * top_k + threadIdx.x];
        here[threadIdx.x] = e >= 0 && e < num_experts && experts[e] != 0;
    }
    __syncthreads();
    const int row = (blockIdx.y * COMBINE_THREADS + threadIdx.x) * 8;
    if (row >= hidden) return;
    float4* to = reinterpret_cast<float4*>(out + (size_t)token * hidden + row);
    float4 a = to[0], b = to[1];
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
