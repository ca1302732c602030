// Routed experts in decode, 1 to 8 tokens: two kernels, no sorting, each weight read once for each token that asks for it (L2 sees the second).
//
//   gate_up   h[pair, intermediate] = silu(gate_e x[token]) * (up_e x[token])          pair = token * top_k + slot; pairs not computed here are left alone
//   down      out[token, hidden] += sum_slot weight[token, slot] * down_e h[pair]       f32, one writer
//
// A pair is computed here if its id is in 0..num_experts and experts[id] is not 0. x, h bf16; out f32; top_k <= 32. The products of a tile with one vector run on
// the tensor cores (packed_gemv.cuh), each warp with its loads far ahead of their use.
// FORMAT is bf16, int8, int4; `group` 32, 64 or 128 (0 for bf16). hidden and intermediate: multiples of 32 and of the group, for bf16 of 8.
//
//   experts_gate_up_gemv_FORMAT   grid (ceil(intermediate / 16), tokens * top_k), block 256, dynamic shared bytes int4 36864, int8 34816, bf16 32768
//       (ids: *const i32 [tokens, top_k], experts: *const u64, x: *const bf16, h: *mut bf16, hidden: i32, intermediate: i32, group: i32, num_experts: i32, top_k: i32)
//   experts_down_gemv_FORMAT      grid (ceil(hidden / 16), tokens), block 512, dynamic shared bytes int4 73728, int8 69632, bf16 65536
//       (ids, weights: *const f32 [tokens, top_k], experts, h: *const bf16, out: *mut f32, hidden: i32, intermediate: i32, group: i32, num_experts: i32, top_k: i32)
//   Dynamic shared bytes: warps * depth * RING_SLOT, above 48 KB the function's limit must be raised first.
#include "packed_gemv.cuh"

#ifndef GU_THREADS
#define GU_THREADS 256
#define GU_BLOCKS 4
#define INT4_DEPTH 8
#endif
#ifndef DN_THREADS
#define DN_THREADS 512
#define DN_BLOCKS 2
#define INT4_DOWN_DEPTH 8
#endif
constexpr int GATE_UP_THREADS = GU_THREADS, GATE_UP_WARPS = GATE_UP_THREADS / WARP, DOWN_THREADS = DN_THREADS, DOWN_WARPS = DOWN_THREADS / WARP, MAX_TOP_K = WARP;

template <Format F, int DEPTH>
__device__ __forceinline__ void gate_up(const int* ids, const uint64_t* experts, const bf16* x, bf16* h, int hidden, int intermediate, int group,
                                        int num_experts, int top_k) {
    __shared__ float part[GATE_UP_WARPS][TILE_ROWS];
    DYNAMIC_SHARED(uint8_t, rings);
    const int pair = blockIdx.y, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int e = ids[pair];
    if (e < 0 || e >= num_experts) return;
    const uint8_t* expert = reinterpret_cast<const uint8_t*>(experts[e]);
    if (!expert) return;
    // Even warps have gate, odd ones up.
    const uint8_t* tile = expert + (size_t)(2 * blockIdx.x + warp % 2) * tile_bytes<F>(hidden, group);
    const bf16* row[1] = {x + (size_t)(pair / top_k) * hidden};
    float sum[1][4] = {};
    add_tile<F, 1, DEPTH, GATE_UP_WARPS / 2>(rings + warp * (DEPTH * RING_SLOT<F>), tile, row, hidden, group, warp / 2, sum);
    add_blocks(sum);
    if (lane < 16 && lane % 4 == 0) {
#pragma unroll
        for (int r = 0; r < 4; r++) part[warp][lane + r] = sum[0][r];
    }
    __syncthreads();
    const int to = blockIdx.x * TILE_ROWS + threadIdx.x;
    if (threadIdx.x >= TILE_ROWS || to >= intermediate) return;
    float gate = 0.0f, up = 0.0f;
#pragma unroll
    for (int w = 0; w < GATE_UP_WARPS; w += 2) gate += part[w][threadIdx.x], up += part[w + 1][threadIdx.x];
    h[(size_t)pair * intermediate + to] = to_bf16(silu(gate) * up);
}

template <Format F, int DEPTH>
__device__ __forceinline__ void down(const int* ids, const float* weights, const uint64_t* experts, const bf16* h, float* out, int hidden,
                                     int intermediate, int group, int num_experts, int top_k) {
    __shared__ float part[DOWN_WARPS][TILE_ROWS], weight_of[MAX_TOP_K];
    __shared__ const uint8_t* tile_of[MAX_TOP_K]; // of the slots that are here, in order
    __shared__ int row_of[MAX_TOP_K];
    DYNAMIC_SHARED(uint8_t, rings);
    const int token = blockIdx.y, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    uint64_t expert = 0;
    if (lane < top_k) {
        const int e = ids[token * top_k + lane];
        if (e >= 0 && e < num_experts) expert = experts[e];
    }
    const uint32_t here = __ballot_sync(ALL_LANES, expert != 0);
    if (here == 0) return;
    if (warp == 0 && expert) {
        const int i = __popc(here & ((1u << lane) - 1));
        tile_of[i] = reinterpret_cast<const uint8_t*>(expert) + (size_t)(2 * div_ceil(intermediate, TILE_ROWS)) * tile_bytes<F>(hidden, group) +
                     (size_t)blockIdx.x * tile_bytes<F>(intermediate, group);
        row_of[i] = token * top_k + lane;
        weight_of[i] = weights[token * top_k + lane];
    }
    __syncthreads();
    const int slots = __popc(here), units = intermediate / UNIT, group_shift = F == BF16 ? 0 : 31 - __clz(group);
    const uint32_t codes = scale_bytes<F>(intermediate, group);
    const float per_unit = 1.0f / (float)max(units, 1);
    auto at_unit = [&](int slot, int unit) {
        const uint8_t* tile = tile_of[slot];
        return UnitAt<1>{lane_lines<F>(tile, codes) + (size_t)unit * Unit<F>::BYTES, tile + lane_scales(unit, group_shift),
                         {h + (size_t)row_of[slot] * intermediate + unit * UNIT + lane_input()}, weight_of[slot]};
    };
    auto locate = [&](int i) {
        const int slot = (int)(((float)i + 0.5f) * per_unit); // exact below 2^20 units
        return at_unit(slot, i - slot * units);
    };
    uint8_t* ring = rings + warp * (DEPTH * RING_SLOT<F>);
    float sum[1][4] = {};
    add_units<F, 1, DEPTH>(ring, warp, DOWN_WARPS, slots * units, locate, sum);
    if (intermediate % UNIT)
        for (int slot = warp; slot < slots; slot += DOWN_WARPS) add_rest<F, 1>(ring, at_unit(slot, units), intermediate % UNIT, sum);
    add_blocks(sum);
    if (lane < 16 && lane % 4 == 0) {
#pragma unroll
        for (int r = 0; r < 4; r++) part[warp][lane + r] = sum[0][r];
    }
    __syncthreads();
    const int to = blockIdx.x * TILE_ROWS + threadIdx.x;
    if (threadIdx.x >= TILE_ROWS || to >= hidden) return;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < DOWN_WARPS; w++) total += part[w][threadIdx.x];
    out[(size_t)token * hidden + to] += total;
}

#define GEMV(format, F, DEPTH, DOWN_DEPTH)                                                                                                         \
    KERNEL_RESIDENT(experts_gate_up_gemv_##format, GATE_UP_THREADS, GU_BLOCKS, const int* ids, const uint64_t* experts, const bf16* x, bf16* h, int hidden,             \
           int intermediate, int group, int num_experts, int top_k) {                                                                               \
        gate_up<F, DEPTH>(ids, experts, x, h, hidden, intermediate, group, num_experts, top_k);                                                     \
    }                                                                                                                                               \
    KERNEL_RESIDENT(experts_down_gemv_##format, DOWN_THREADS, DN_BLOCKS, const int* ids, const float* weights, const uint64_t* experts, const bf16* h, float* out,      \
           int hidden, int intermediate, int group, int num_experts, int top_k) {                                                                   \
        down<F, DOWN_DEPTH>(ids, weights, experts, h, out, hidden, intermediate, group, num_experts, top_k);                                        \
    }
GEMV(int4, INT4, INT4_DEPTH, INT4_DOWN_DEPTH)
GEMV(int8, INT8, INT4_DEPTH / 2, INT4_DOWN_DEPTH / 2)
GEMV(bf16, BF16, INT4_DEPTH / 4, INT4_DOWN_DEPTH / 4)
