// Routed experts of a few tokens (`FEW_TOKENS` in src/experts/gpu.rs): two kernels, no sorting, each weight read once
// for up to VECTORS tokens that chose its expert.
//
//   gate_up   h[pair, intermediate] = weight[pair] * silu(gate_e x[token]) * (up_e x[token]), or what `epilogue` says
//             (epilogue.cuh), of experts without a gate from the tiles of up alone;
//             pair = token * top_k + slot; pairs not computed here are left alone
//   down      out[token, hidden] += sum_slot down_e h[pair] + weight[pair] * bias_e, f32, one writer; what stands in
//             `out` does not count if this is `over` it. Where `ranks` are several, `out` is their sum (rank_sum.cuh):
//             tokens * hidden <= FEW_NUMBERS. Its blocks have MIN_DOWN_WARPS to DOWN_WARPS
//
// A pair is computed here if its id is in 0..num_experts and experts[id] is not 0. ids and weights [tokens, top_k]; x,
// h bf16; out f32; top_k <= MAX_TOP_K. The products of a tile run on the tensor cores (packed_gemv.cuh).
// `experts`, and what `down` reads of the routing, is read before the kernel in front has ended: that one must not
// write `experts`, and gate_up must stand between `down` and the kernel that wrote ids and weights. `down_at`: where
// down begins in an expert, in bytes. tokens <= VECTORS. hidden and intermediate: multiples of 32 and of the group or
// super-block, for bf16 of 8.
//
// Of each format, a row of DENSE_FORMATS or EXPERT_FORMATS:
//
//   experts_gate_up_gemv_{format}   grid (ceil(rows of gate / TILE_ROWS), tokens * top_k)
//   experts_down_gemv_{format}      grid (ceil(hidden / TILE_ROWS))
#include "epilogue.cuh"
#include "packed_gemv.cuh"
#include "rank_sum.cuh"

constexpr int GATE_UP_THREADS = 256, GATE_UP_WARPS = GATE_UP_THREADS / WARP, DOWN_WARPS = 16, MIN_DOWN_WARPS = 4,
              MAX_EXPERTS = 512, MAX_TOP_K = 32, MAX_PAIRS = VECTORS * MAX_TOP_K;
static_assert(MIN_DOWN_WARPS * WARP >= MAX_PAIRS && MIN_DOWN_WARPS * WARP >= VECTORS * TILE_ROWS,
    "a thread for each pair, and for each number that is written");
// As many threads of `down` have all registers of a multiprocessor, of formats that may have spans more than a block
// may have: that bounds registers, and lets several small blocks share them.
constexpr int DOWN_THREADS = 512, DOWN_THREADS_OF_SPANS = 768;

constexpr int least(int a, int b) { return a < b ? a : b; }

// Units of a warp that are on their way to registers at a time, and blocks of gate_up to a multiprocessor: warps that
// unpack hide what others wait for, as far as registers suffice. Measured on an H200; elsewhere rows spilled with
// three.
template <Format F> struct Occupancy {
    static constexpr int GATE_UP_BLOCKS = Unit<F>::IS_LARGE || (is_row(F) && !ON_HOPPER(true, false)) ? 2 : 3;
    static constexpr int GATE_UP_DEPTH = !is_row(F) ? Unit<F>::DEPTH * 4 / 8
        : Unit<F>::IS_LARGE                         ? least(Unit<F>::DEPTH, 3)
                                                    : 2;
    // Bytes of a table's line: lanes meet in fewer banks of longer ones, which take longer to fill and leave less room
    // for inputs.
    static constexpr bool SHORT_TABLE = has_table<F> && TableOf<F, 16>::BYTES == 256 * 16;
    static constexpr int TABLE_LINE = SHORT_TABLE ? 64 : 16;
    static constexpr int DOWN_DEPTH = !is_row(F) ? Unit<F>::DEPTH * 4 / 8
        : SHORT_TABLE                            ? (F == IQ2_XXS ? 2 : 3)
        : Unit<F>::IS_LARGE                      ? least(Unit<F>::DEPTH + 1, 4)
                                                 : Unit<F>::DEPTH + 1;
};

// The pairs of one expert that a block computes: the first VECTORS of them from `pair` on, none if that is not the
// first of VECTORS. A lane knows the one whose input it reads and the one whose sums it ends with, or -1.
struct Pairs {
    int count, of_input, of_sum;
};
__device__ __forceinline__ Pairs pairs_of(int e, const int* ids, int pair, int pairs) {
    const int lane = threadIdx.x % WARP;
    Pairs found{0, -1, -1};
    int before = 0;
    for (int base = 0; base < pairs && found.count < VECTORS; base += WARP) {
        uint32_t same = __ballot_sync(ALL_LANES, base + lane < pairs && ids[min(base + lane, pairs - 1)] == e);
        const uint32_t earlier = pair >= base + WARP ? ALL_LANES : pair <= base ? 0 : (1u << (pair - base)) - 1;
        before += __popc(same & earlier);
        for (same &= ~earlier; same && found.count < VECTORS; same &= same - 1, found.count++) {
            const int p = base + __ffs((int)same) - 1;
            if (vector_of_input() == found.count) found.of_input = p;
            if (vector_of_sum() == found.count) found.of_sum = p;
        }
    }
    if (before % VECTORS) found.count = 0;
    if (found.count == 1) found.of_input = found.of_sum = pair; // of one vector all lanes read a part
    return found;
}

template <Format F, int DEPTH>
__device__ __forceinline__ void gate_up(const int* ids, const float* weights, const uint64_t* experts, const bf16* x,
    bf16* h, int hidden, int intermediate, const Packing& packing, int num_experts, int top_k,
    const Epilogue& epilogue) {
    __shared__ float part[GATE_UP_WARPS][VECTORS][TILE_ROWS];
    __shared__ uint4 inputs[GATE_UP_WARPS][DEPTH * WARP];
    __shared__ int pair_of[VECTORS];
    __shared__ float weight_of[VECTORS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, pairs = gridDim.y;
    // Addresses were there before the kernel that wrote ids began: one wait less behind it.
    __shared__ uint64_t addresses[MAX_EXPERTS];
    for (int e = threadIdx.x; e < num_experts; e += GATE_UP_THREADS) addresses[e] = __ldcg(experts + e);
    begin_kernel();
    const int e = ids[blockIdx.y];
    __syncthreads();
    if (e < 0 || e >= num_experts) return;
    const uint8_t* expert = reinterpret_cast<const uint8_t*>(addresses[e]);
    if (!expert) return;
    Pairs own{1, (int)blockIdx.y, (int)blockIdx.y};
    if (pairs > top_k) own = pairs_of(e, ids, blockIdx.y, pairs);
    if (own.count == 0) return;
    if (warp == 0 && lane < own.count) pair_of[lane] = own.of_sum, weight_of[lane] = weights[own.of_sum];
    // Even warps have gate, odd ones up. Both are on their way at once, whatever registers hold.
    const uint32_t tile_bytes = tile_bytes_of<F>(hidden, packing).all;
    const uint8_t *tiles = expert + (size_t)2 * blockIdx.x * tile_bytes, *tile = tiles + warp % 2 * tile_bytes;
    const bf16* row = own.of_input < 0 ? nullptr : x + (size_t)(own.of_input / top_k) * hidden;
    UnitSums sums[1] = {};
    gemv_tile<F, 1, GATE_UP_WARPS / 2, DEPTH, Occupancy<F>::TABLE_LINE, true>(
        tile, warp / 2, hidden, packing, [&](int) { return row; }, [] {}, inputs[warp], own.count > 1, sums);
    put_sums(sums[0], part[warp]);
    __syncthreads();
    const int at = threadIdx.x % TILE_ROWS, tile_of = threadIdx.x / TILE_ROWS;
    if (epilogue.activation.form == RELU_SQUARED) { // both tiles are of up, one behind the other
        const int v = tile_of / 2, to = (blockIdx.x * 2 + tile_of % 2) * TILE_ROWS + at;
        if (v >= own.count || to >= intermediate) return;
        float up = 0.0f;
#pragma unroll
        for (int w = 0; w < GATE_UP_WARPS; w += 2) up += part[w + tile_of % 2][v][at];
        h[(size_t)pair_of[v] * intermediate + to] = to_bf16(weight_of[v] * relu_squared(up));
        return;
    }
    const int v = tile_of, to = blockIdx.x * TILE_ROWS + at;
    if (v >= own.count || to >= intermediate) return;
    float gate = 0.0f, up = 0.0f;
#pragma unroll
    for (int w = 0; w < GATE_UP_WARPS; w += 2) gate += part[w][v][at], up += part[w + 1][v][at];
    h[(size_t)pair_of[v] * intermediate + to] =
        to_bf16(weight_of[v] * activate(epilogue, e, to, intermediate, gate, up));
}

// The experts that are here and up to VECTORS tokens chose, each once, in the order of the pairs.
struct Chosen {
    static constexpr uint8_t NOBODY = 255;
    uint64_t expert[MAX_PAIRS + 1];   // its address; one behind is read for nothing
    uint8_t pair[MAX_PAIRS][VECTORS]; // that of each token, or NOBODY
    int id[MAX_PAIRS];                // of each pair, -1 if it is not here
    uint32_t firsts[MAX_PAIRS / WARP];
};

// By all threads of a block; ids are those of its tokens. Returns how many they are. What a token has twice
// stands there twice.
__device__ __forceinline__ int choose(
    Chosen& chosen, const int* ids, const uint64_t* experts, int pairs, int top_k, int num_experts) {
    const int p = threadIdx.x, warp = p / WARP, lane = p % WARP;
    uint64_t expert = 0;
    int e = -1, first = -1;
    if (p < pairs) {
        // What the router wrote was there before gate_up began: no need to wait for its end.
        e = __ldcg(ids + p);
        if (e >= 0 && e < num_experts) expert = __ldcg(experts + e);
        chosen.id[p] = e = expert ? e : -1;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) chosen.pair[p][v] = Chosen::NOBODY;
    }
    __syncthreads();
    if (e >= 0) {
        first = p;
        const int own = p / top_k * top_k;
#pragma unroll 1
        for (int q = own - 1; q >= 0; q--)
            if (chosen.id[q] == e) first = q;
#pragma unroll 1
        for (int q = own; q < p; q++)
            if (chosen.id[q] == e) first = p;
    }
    if (p < MAX_PAIRS) {
        const uint32_t firsts = __ballot_sync(ALL_LANES, first == p);
        if (lane == 0) chosen.firsts[warp] = firsts;
    }
    __syncthreads();
    auto place = [&](int p) {
        int before = __popc(chosen.firsts[p / WARP] & ((1u << p % WARP) - 1));
        for (int w = 0; w < p / WARP; w++) before += __popc(chosen.firsts[w]);
        return before;
    };
    if (first >= 0) {
        const int i = place(first);
        chosen.pair[i][p / top_k] = (uint8_t)p;
        if (first == p) chosen.expert[i] = expert;
    }
    __syncthreads();
    return place(MAX_PAIRS - 1) + (int)(chosen.firsts[MAX_PAIRS / WARP - 1] >> (WARP - 1));
}

// Of the units of a tile of all chosen experts, one behind the other, a warp has `count` from `first` on.
template <Format F> struct ExpertUnits {
    const uint64_t* expert;
    size_t tile_at;
    int units, k, shift, count;
    uint32_t codes;
    int u;
    const uint8_t* tile;

    __device__ __forceinline__ ExpertUnits(
        const Chosen& chosen, size_t tile_at, int first, int count, int k, const Packing& packing)
        : tile_at(tile_at), units(div_ceil(k, UNIT)), k(k), shift(shift_of_group(packing)), count(count),
          codes(tile_bytes_of<F>(k, packing).scales) {
        expert = chosen.expert + first / units, u = first % units;
        look();
    }
    __device__ __forceinline__ void load(Unit<F>& unit, int) {
        load_unit<F>(unit, unit_place<F>(tile, u, k, shift, codes));
        if (++u < units) return;
        u = 0, expert++;
        look();
    }
    __device__ __forceinline__ void look() { tile = reinterpret_cast<const uint8_t*>(*expert + tile_at); }
    __device__ __forceinline__ void next() {}
};

template <Format F>
__device__ __forceinline__ void down(const int* ids, const float* weights, const uint64_t* experts, const bf16* h,
    float* out, int tokens, int hidden, int intermediate, const Packing& packing, int down_at, int num_experts,
    int top_k, const Epilogue& epilogue, int over, const RankSum& ranks) {
    __shared__ float part[DOWN_WARPS][VECTORS][TILE_ROWS];
    __shared__ Chosen chosen;
    // The same in all lanes, as the compiler sees, so that branches are the warp's.
    const int warp = __shfl_sync(ALL_LANES, (int)threadIdx.x / WARP, 0), warps = blockDim.x / WARP;
    const int count = __shfl_sync(ALL_LANES, choose(chosen, ids, experts, tokens * top_k, top_k, num_experts), 0);
    if (count == 0 && !over && ranks.ranks <= 1) {
        begin_kernel();
        return;
    }
    const size_t tile_at = down_at + (size_t)blockIdx.x * tile_bytes_of<F>(intermediate, packing).all;
    auto row_of = [&](int c, int v) {
        const uint8_t pair = chosen.pair[c][v];
        return pair == Chosen::NOBODY ? nullptr : h + (size_t)pair * intermediate;
    };
    constexpr int DEPTH = Occupancy<F>::DOWN_DEPTH;
    UnitSums sums[1] = {};
    with_span<F>(packing, [&](auto span) {
        constexpr int SPAN = decltype(span)::value;
        const int spans = div_ceil(intermediate, SPAN * UNIT), all = count * spans;
        const int first = all * warp / warps, own = all * (warp + 1) / warps - first;
        if constexpr (SPAN == 1) {
            __shared__ uint4 inputs[DOWN_WARPS][DEPTH * WARP];
            const bool several = tokens > 1;
            const float per_unit = 1.0f / spans;
            auto x_of = [&](int n, int) {
                // By the middle of the unit: far from the next expert, whatever is rounded.
                const int i = first + n, c = (int)((i + 0.5f) * per_unit);
                return Input{row_of(c, several ? vector_of_input() : 0), i - c * spans};
            };
            gemv_units<F, 1, SPAN, DEPTH, Occupancy<F>::TABLE_LINE, true>(
                ExpertUnits<F>(chosen, tile_at, first, own, intermediate, packing), own, intermediate, packing, x_of,
                begin_kernel, inputs[warp], several, sums);
        } else {
            gemv_run<F, SPAN, DEPTH>(
                [&](int c) { return reinterpret_cast<const uint8_t*>(chosen.expert[c] + tile_at); },
                [&](int c) { return row_of(c, vector_of_input()); }, first, own, intermediate, packing, begin_kernel,
                sums);
        }
    });
    put_sums(sums[0], part[warp]);
    __syncthreads();
    const int v = threadIdx.x / TILE_ROWS, at = threadIdx.x % TILE_ROWS, to = blockIdx.x * TILE_ROWS + at;
    const bool writes = v < tokens && to < hidden;
    const size_t number = (size_t)v * hidden + to;
    float total = 0.0f;
    if (writes) {
        if (epilogue.down)
            for (int p = v * top_k; p < (v + 1) * top_k; p++)
                if (chosen.id[p] >= 0) total += weights[p] * epilogue.down[(size_t)chosen.id[p] * hidden + to];
#pragma unroll 4
        for (int w = 0; w < warps; w++) total += part[w][v][at];
        if (!over) total += out[number];
    }
    total = sum_of_ranks(ranks, (int)number, total, writes);
    if (writes) out[number] = total;
}

#define EXPERTS_GATE_UP_ARGUMENTS                                                                                      \
    const int *ids, const float *weights, const uint64_t *experts, const bf16 *x, bf16 *h, int hidden,                 \
        int intermediate, int num_experts, int top_k, const __grid_constant__ Packing packing,                         \
        const __grid_constant__ Epilogue epilogue
#define EXPERTS_DOWN_ARGUMENTS                                                                                         \
    const int *ids, const float *weights, const uint64_t *experts, const bf16 *h, float *out, int tokens, int hidden,  \
        int intermediate, int down_at, int num_experts, int top_k, const __grid_constant__ Packing packing,            \
        const __grid_constant__ Epilogue epilogue, int over, const __grid_constant__ RankSum ranks
#define GEMV(format, F, THREADS)                                                                                       \
    KERNEL_BLOCKS(                                                                                                     \
        experts_gate_up_gemv_##format, GATE_UP_THREADS, Occupancy<F>::GATE_UP_BLOCKS, 0, EXPERTS_GATE_UP_ARGUMENTS) {  \
        gate_up<F, Occupancy<F>::GATE_UP_DEPTH>(                                                                       \
            ids, weights, experts, x, h, hidden, intermediate, packing, num_experts, top_k, epilogue);                 \
    }                                                                                                                  \
    KERNEL(experts_down_gemv_##format, THREADS, 0, EXPERTS_DOWN_ARGUMENTS) {                                           \
        down<F>(ids, weights, experts, h, out, tokens, hidden, intermediate, packing, down_at, num_experts, top_k,     \
            epilogue, over, ranks);                                                                                    \
    }
#define SPAN_GEMV(format, F) GEMV(format, F, DOWN_THREADS_OF_SPANS)
#define UNIT_GEMV(format, F) GEMV(format, F, DOWN_THREADS)
DENSE_FORMATS(SPAN_GEMV)
EXPERT_FORMATS(UNIT_GEMV)
