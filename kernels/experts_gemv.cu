// Routed experts of a few tokens (`FEW_TOKENS` in src/experts/gpu.rs): two kernels, no sorting, each weight read once
// for each token that chose its expert (L2 sees the second).
//
//   gate_up   h[pair, intermediate] = silu(gate_e x[token]) * (up_e x[token]), or what `epilogue` says (epilogue.cuh),
//             of experts without a gate from the tiles of up alone;
//             pair = token * top_k + slot; pairs not computed here are left alone
//   down      out[token, hidden] += sum_slot weight[token, slot] * (down_e h[pair] + bias_e), f32, one writer
//
// A pair is computed here if its id is in 0..num_experts and experts[id] is not 0. ids and weights [tokens, top_k]; x,
// h bf16; out f32; top_k <= 32. The products of a tile with one vector run on the tensor cores (packed_gemv.cuh).
// `down` reads routing and weights before the kernel in front of it has ended: gate_up must stand between it and the
// kernel that wrote ids, weights and experts. `down_at`: where down begins in an expert, in bytes. hidden and
// intermediate: multiples of 32 and of the group or super-block, for bf16 of 8.
//
//   experts_gate_up_gemv_{row of PACKED_FORMATS}   grid (ceil(rows of gate / TILE_ROWS), tokens * top_k)
//   experts_down_gemv_{row of PACKED_FORMATS}      grid (ceil(hidden / TILE_ROWS), tokens)
#include "epilogue.cuh"
#include "packed_gemv.cuh"

constexpr int GATE_UP_THREADS = 256, GATE_UP_WARPS = GATE_UP_THREADS / WARP, DOWN_THREADS = 512,
              DOWN_WARPS = DOWN_THREADS / WARP;

struct At {
    const uint8_t* tile;
    int u;
    const bf16* x[1];
    float weight;
};

// Units of a warp that are on their way to registers at a time: few, so that the kernels behind fit beside these.
template <Format F> struct Depth {
    static constexpr int GATE_UP = is_row(F) ? Unit<F>::DEPTH : Unit<F>::DEPTH * 4 / 8,
                         DOWN = is_row(F) ? Unit<F>::DEPTH + 1 : Unit<F>::DEPTH * 6 / 8;
};

template <Format F, int DEPTH>
__device__ __forceinline__ void gate_up(const int* ids, const uint64_t* experts, const bf16* x, bf16* h, int hidden,
    int intermediate, const Packing& packing, int num_experts, int top_k, const Epilogue& epilogue) {
    __shared__ float part[GATE_UP_WARPS][TILE_ROWS];
    __shared__ uint4 inputs[GATE_UP_WARPS][DEPTH * EIGHTS];
    const int pair = blockIdx.y, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    begin_kernel();
    const int e = ids[pair];
    if (e < 0 || e >= num_experts) return;
    const uint8_t* expert = reinterpret_cast<const uint8_t*>(experts[e]);
    if (!expert) return;
    // Even warps have gate, odd ones up. Both are on their way at once, whatever registers hold.
    const uint32_t tile_bytes = tile_bytes_of<F>(hidden, packing).all;
    const uint8_t *tiles = expert + (size_t)2 * blockIdx.x * tile_bytes, *tile = tiles + warp % 2 * tile_bytes;
    prefetch_l2_bytes(tiles, 2 * tile_bytes, threadIdx.x, GATE_UP_THREADS);
    const bf16* row = x + (size_t)(pair / top_k) * hidden;
    float sum[1][4] = {};
    gemv_units<F, 1, DEPTH>(
        warp / 2, GATE_UP_WARPS / 2, div_ceil(hidden, UNIT), hidden, packing,
        [&](int i) { return At{tile, i, {row}, 1.0f}; }, [] {}, inputs[warp], sum);
    if (lane < 16 && lane % 4 == 0) {
#pragma unroll
        for (int r = 0; r < 4; r++) part[warp][lane + r] = sum[0][r];
    }
    __syncthreads();
    if (epilogue.activation.form == RELU_SQUARED) { // both tiles are of up, one behind the other
        const int tile_of = threadIdx.x / TILE_ROWS, row = blockIdx.x * 2 * TILE_ROWS + threadIdx.x;
        if (threadIdx.x >= 2 * TILE_ROWS || row >= intermediate) return;
        float up = 0.0f;
#pragma unroll
        for (int w = 0; w < GATE_UP_WARPS; w += 2) up += part[w + tile_of][threadIdx.x % TILE_ROWS];
        h[(size_t)pair * intermediate + row] = to_bf16(relu_squared(up));
        return;
    }
    const int to = blockIdx.x * TILE_ROWS + threadIdx.x;
    if (threadIdx.x >= TILE_ROWS || to >= intermediate) return;
    float gate = 0.0f, up = 0.0f;
#pragma unroll
    for (int w = 0; w < GATE_UP_WARPS; w += 2) gate += part[w][threadIdx.x], up += part[w + 1][threadIdx.x];
    h[(size_t)pair * intermediate + to] = to_bf16(activate(epilogue, e, to, intermediate, gate, up));
}

template <Format F, int DEPTH>
__device__ __forceinline__ void down(const int* ids, const float* weights, const uint64_t* experts, const bf16* h,
    float* out, int hidden, int intermediate, const Packing& packing, int down_at, int num_experts, int top_k,
    const Epilogue& epilogue) {
    __shared__ float part[DOWN_WARPS][TILE_ROWS];
    __shared__ uint4 inputs[DOWN_WARPS][DEPTH * EIGHTS];
    const int token = blockIdx.y, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    // Lane j knows slot j; those that are here, in order, share out the units.
    uint64_t expert = 0;
    float weight = 0.0f;
    int e = -1;
    if (lane < top_k) {
        // What the router wrote was there before gate_up began: no need to wait for its end.
        e = __ldcg(ids + token * top_k + lane);
        weight = __ldcg(weights + token * top_k + lane);
        if (e >= 0 && e < num_experts) expert = __ldcg(experts + e);
    }
    uint32_t here = __ballot_sync(ALL_LANES, expert != 0);
    if (here == 0) { // as all warps know
        begin_kernel();
        return;
    }
    const int slots = __popc(here), units = div_ceil(intermediate, UNIT);
    int slot = 0; // lane i: the i-th slot that is here
    for (int i = 0; i < slots; i++, here &= here - 1)
        if (lane == i) slot = __ffs((int)here) - 1;
    expert = __shfl_sync(ALL_LANES, expert, slot);
    weight = __shfl_sync(ALL_LANES, weight, slot);
    e = __shfl_sync(ALL_LANES, e, slot);
    const size_t tile_at = down_at + (size_t)blockIdx.x * tile_bytes_of<F>(intermediate, packing).all;
    const bf16* rows = h + (size_t)token * top_k * intermediate;
    float sum[1][4] = {};
    auto locate = [&](int i) {
        const int s = i / units;
        const uint64_t from = __shfl_sync(ALL_LANES, expert, s) + tile_at;
        const int row = __shfl_sync(ALL_LANES, slot, s);
        return At{reinterpret_cast<const uint8_t*>(from), i - s * units, {rows + (size_t)row * intermediate},
            __shfl_sync(ALL_LANES, weight, s)};
    };
    gemv_units<F, 1, DEPTH>(
        warp, DOWN_WARPS, slots * units, intermediate, packing, locate, begin_kernel, inputs[warp], sum);
    if (lane < 16 && lane % 4 == 0) {
#pragma unroll
        for (int r = 0; r < 4; r++) part[warp][lane + r] = sum[0][r];
    }
    __syncthreads();
    if (warp != 0) return;
    const int to = blockIdx.x * TILE_ROWS + lane;
    const bool exists = lane < TILE_ROWS && to < hidden;
    float total = 0.0f;
    if (epilogue.down) {
        for (int s = 0; s < slots; s++) {
            const int from = __shfl_sync(ALL_LANES, e, s);
            const float share = __shfl_sync(ALL_LANES, weight, s);
            if (exists) total += share * epilogue.down[(size_t)from * hidden + to];
        }
    }
    if (!exists) return;
#pragma unroll
    for (int w = 0; w < DOWN_WARPS; w++) total += part[w][lane];
    out[(size_t)token * hidden + to] += total;
}

#define EXPERTS_GATE_UP_ARGUMENTS                                                                                      \
    const int *ids, const uint64_t *experts, const bf16 *x, bf16 *h, int hidden, int intermediate, int num_experts,    \
        int top_k, const __grid_constant__ Packing packing, const __grid_constant__ Epilogue epilogue
#define EXPERTS_DOWN_ARGUMENTS                                                                                         \
    const int *ids, const float *weights, const uint64_t *experts, const bf16 *h, float *out, int hidden,              \
        int intermediate, int down_at, int num_experts, int top_k, const __grid_constant__ Packing packing,            \
        const __grid_constant__ Epilogue epilogue
#define GEMV(format, F)                                                                                                \
    KERNEL(experts_gate_up_gemv_##format, GATE_UP_THREADS, 0, EXPERTS_GATE_UP_ARGUMENTS) {                             \
        gate_up<F, Depth<F>::GATE_UP>(                                                                                 \
            ids, experts, x, h, hidden, intermediate, packing, num_experts, top_k, epilogue);                          \
    }                                                                                                                  \
    KERNEL(experts_down_gemv_##format, DOWN_THREADS, 0, EXPERTS_DOWN_ARGUMENTS) {                                      \
        down<F, Depth<F>::DOWN>(                                                                                       \
            ids, weights, experts, h, out, hidden, intermediate, packing, down_at, num_experts, top_k, epilogue);      \
    }
PACKED_FORMATS(GEMV)
