// Causal attention of many tokens with Hopper's own instructions: what attention_prefill.cu does over bf16 caches with
// keys and values of up to 256 numbers, and attention_prefill_mla.cu with keys of 128 + 64 and values of
// 128, or 192 + 64 and 256. Only on compute capability 9.0 (in code for other cards these kernels are empty).
//
// A block owns 128 queries of a head, and walks their context in steps of 128 positions, of wide heads in steps of 64.
// One thread of a warpgroup brings keys and values by tensor copies into two buffers; two more warpgroups, to which it
// leaves its registers, have 64 queries each. The tensor cores add the values of a step while the softmax of the next
// one is computed:
//
//     S = Q K(0)^T;  P = softmax(S)
//     for j = 1 ..:  S = Q K(j)^T and O += P V(j - 1) begin;  S done: softmax(S);  O done: rescale O;  P = S
//     O += P V
//
// Tensor maps as in gemm_wgmma.cu, boxes of 64 by 64:  q {key_dim, T, heads}, pitches {heads key_dim, key_dim};
//   keys {key_dim, 64, blocks kv_heads} and values {value_dim, 64, blocks kv_heads} without gaps;
//   expanded {wide, positions, heads}, pitches {heads wide, wide}, of unrotated key and value;
//   rotated {64, positions, 1}, pitch 64.
// Columns past a head come as zeros, which is how smaller heads are served. tiles, seq_first, positions, seq_blocks,
// block_table: attention_prefill.cu; the others: attention_prefill_mla.cu.
//
// A kernel's tile is (largest key, largest value, QUERIES). Grids:
//   attend_prefill_wgmma_{KD}_{VD}      (heads, tiles)
//   attend_latent_prefill_wgmma_{KD}_{VD}  (heads, ceil((row_end - row_first) / QUERIES))
#include "flash_tile.cuh"

struct AttentionWgmma {
    TensorMap q, keys, values;
    bf16* out;
    const int2* tiles;
    const int *seq_first, *positions, *seq_blocks;
    const uint32_t* block_table;
    int heads, kv_heads, value_dim;
    float scale;
    const float* sinks;
};

struct LatentWgmma {
    TensorMap q, expanded, rotated;
    bf16* out;
    float *max, *sum, *acc;
    const int* positions;
    int row_first, row_end, from, to, first, last, heads;
    float scale;
};

constexpr int WARPGROUP = 128, CONSUMERS = 2, THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr int QUERIES = 128; // of a block

#ifdef HAS_WGMMA
constexpr int STAGES = 2, CONSUMER_WARPS = CONSUMERS * 4, BOX_BYTES = 64 * 128,
              QUERY_COLUMNS_BYTES = 2 * BOX_BYTES; // 64 columns of 128 rows

// Positions of a step, for heads of so many boxes of columns; of 128, keys and values of 256 have no room.
template <int KEY_BOXES, int VALUE_BOXES> struct Steps {
    static constexpr int STEP = KEY_BOXES + VALUE_BOXES > 5 ? 64 : 128, HALVES = STEP / 64,
                         COLUMNS_BYTES = HALVES * BOX_BYTES; // 64 columns of keys or values
};

// Pages of the cache. A page's bytes after the last position are stale.
template <int KEY_BOXES, int VALUE_BOXES> struct Pages {
    using S = Steps<KEY_BOXES, VALUE_BOXES>;
    static constexpr bool ENDS_IN_OTHERS = true;
    const TensorMap *key_map, *value_map;
    const uint32_t* table;
    int kv_heads, kv_head, count;

    __device__ __forceinline__ int page(int step, int half) const {
        return (int)table[min(S::HALVES * step + half, (count - 1) / PAGE)] * kv_heads + kv_head;
    }
    __device__ __forceinline__ void keys(unsigned char* to, uint64_t* full, int step) const {
        copy<KEY_BOXES>(to, key_map, full, step);
    }
    __device__ __forceinline__ void values(unsigned char* to, uint64_t* full, int step) const {
        copy<VALUE_BOXES>(to, value_map, full, step);
    }
    template <int BOXES>
    __device__ __forceinline__ void copy(unsigned char* to, const TensorMap* map, uint64_t* full, int step) const {
#pragma unroll
        for (int half = 0; half < S::HALVES; half++) {
            const int which = page(step, half);
#pragma unroll
            for (int b = 0; b < BOXES; b++)
                tensor_copy(to + b * S::COLUMNS_BYTES + half * BOX_BYTES, map, full, 64 * b, 0, which);
        }
    }
};

// Keys and values that lie together, the rotated part of the keys, a box wide, elsewhere; zeros come from after the
// last position.
template <int KEY_BOXES, int VALUE_BOXES> struct Expanded {
    using S = Steps<KEY_BOXES, VALUE_BOXES>;
    static constexpr bool ENDS_IN_OTHERS = false;
    const TensorMap *expanded, *rotated;
    int head;

    __device__ __forceinline__ void keys(unsigned char* to, uint64_t* full, int step) const {
#pragma unroll
        for (int half = 0; half < S::HALVES; half++) {
            const int row = S::STEP * step + 64 * half;
            unsigned char* at = to + half * BOX_BYTES;
#pragma unroll
            for (int b = 0; b < KEY_BOXES - 1; b++)
                tensor_copy(at + b * S::COLUMNS_BYTES, expanded, full, 64 * b, row, head);
            tensor_copy(at + (KEY_BOXES - 1) * S::COLUMNS_BYTES, rotated, full, 0, row, 0);
        }
    }
    __device__ __forceinline__ void values(unsigned char* to, uint64_t* full, int step) const {
#pragma unroll
        for (int half = 0; half < S::HALVES; half++)
#pragma unroll
            for (int b = 0; b < VALUE_BOXES; b++)
                tensor_copy(to + b * S::COLUMNS_BYTES + half * BOX_BYTES, expanded, full, 64 * (KEY_BOXES - 1 + b),
                    S::STEP * step + 64 * half, head);
    }
};

template <int KEY_BOXES, int VALUE_BOXES> struct Shared {
    using Steps = ::Steps<KEY_BOXES, VALUE_BOXES>;
    static constexpr int QUERY_BYTES = KEY_BOXES * QUERY_COLUMNS_BYTES, KEY_BYTES = KEY_BOXES * Steps::COLUMNS_BYTES,
                         VALUE_BYTES = VALUE_BOXES * Steps::COLUMNS_BYTES, STAGE_BYTES = KEY_BYTES + VALUE_BYTES;
    // With what the swizzle's pattern may ask for in front, and 128 for the barriers.
    static constexpr int BYTES = 1024 + QUERY_BYTES + STAGES * STAGE_BYTES + 128;
    unsigned char *queries, *stages;
    uint64_t *queries_full, *keys_full, *values_full, *keys_empty, *values_empty;

    __device__ __forceinline__ Shared(unsigned char* dynamic) {
        queries = dynamic + (1024 - (uintptr_t)dynamic % 1024) % 1024; // the swizzle's pattern
        stages = queries + QUERY_BYTES;
        queries_full = (uint64_t*)(stages + STAGES * STAGE_BYTES);
        keys_full = queries_full + 1;
        values_full = keys_full + STAGES;
        keys_empty = values_full + STAGES;
        values_empty = keys_empty + STAGES;
    }
    __device__ __forceinline__ unsigned char* keys(int stage) const { return stages + stage * STAGE_BYTES; }
    __device__ __forceinline__ unsigned char* values(int stage) const { return keys(stage) + KEY_BYTES; }

    __device__ __forceinline__ void begin() const {
        if (threadIdx.x == 0) {
            mbarrier_init(queries_full, 1);
            for (int s = 0; s < STAGES; s++) {
                mbarrier_init(keys_full + s, 1);
                mbarrier_init(values_full + s, 1);
                mbarrier_init(keys_empty + s, CONSUMER_WARPS);
                mbarrier_init(values_empty + s, CONSUMER_WARPS);
            }
            mbarrier_init_done();
        }
        __syncthreads();
    }
};

// The copying warpgroup's part, one thread of it: queries from row `first` on, then all steps.
template <int KEY_BOXES, int VALUE_BOXES, class Source>
__device__ __forceinline__ void bring(const Shared<KEY_BOXES, VALUE_BOXES>& shared, const Source& source,
    const TensorMap* q, int first, int head, int steps) {
    using S = Shared<KEY_BOXES, VALUE_BOXES>;
    fewer_registers<24>();
    if (threadIdx.x != CONSUMERS * WARPGROUP) return;
    if (steps == 0) return;
    mbarrier_arrive_expect(shared.queries_full, S::QUERY_BYTES);
#pragma unroll
    for (int b = 0; b < KEY_BOXES; b++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            tensor_copy(shared.queries + b * QUERY_COLUMNS_BYTES + half * BOX_BYTES, q, shared.queries_full, 64 * b,
                first + 64 * half, head);
    for (int step = 0; step < steps; step++) {
        const int stage = step % STAGES, empty = step / STAGES % 2 ^ 1;
        mbarrier_wait(shared.keys_empty + stage, empty);
        mbarrier_arrive_expect(shared.keys_full + stage, S::KEY_BYTES);
        source.keys(shared.keys(stage), shared.keys_full + stage, step);
        mbarrier_wait(shared.values_empty + stage, empty);
        mbarrier_arrive_expect(shared.values_full + stage, S::VALUE_BYTES);
        source.values(shared.values(stage), shared.values_full + stage, step);
    }
}

// A warpgroup's part: FlashTile::run with other instructions.
template <class Source, int KEY_BOXES, int VALUE_BOXES, class Tile>
__device__ __forceinline__ void attend(
    Tile& work, const Shared<KEY_BOXES, VALUE_BOXES>& shared, int count, int steps, float scale_log2) {
    using S = Steps<KEY_BOXES, VALUE_BOXES>;
    constexpr int STEP = S::STEP, COLUMNS_BYTES = S::COLUMNS_BYTES;
    if (steps == 0) return;
    const int warp_row = threadIdx.x / WARP * 16, lane = threadIdx.x % WARP, warpgroup = threadIdx.x / WARPGROUP;
    const unsigned char* queries = shared.queries + warpgroup * BOX_BYTES;
    float s[1][STEP / 8][4] = {};
    uint32_t p[STEP / 16][4];

    auto multiply_keys = [&](int step) {
        const int stage = step % STAGES;
        mbarrier_wait(shared.keys_full + stage, step / STAGES % 2);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4 * KEY_BOXES; k++) {
            const uint64_t q = wgmma_operand(queries + k / 4 * QUERY_COLUMNS_BYTES + k % 4 * 32),
                           keys = wgmma_operand(shared.keys(stage) + k / 4 * COLUMNS_BYTES + k % 4 * 32);
            if (k == 0)
                wgmma_set(s[0], q, keys);
            else
                wgmma(s[0], q, keys);
        }
        wgmma_commit();
    };
    auto multiply_values = [&](int step) {
        const int stage = step % STAGES;
        unsigned char* values = shared.values(stage);
        mbarrier_wait(shared.values_full + stage, step / STAGES % 2);
        if (Source::ENDS_IN_OTHERS && STEP * (step + 1) > count) {
            // Zero times what may not even be a number. Both warpgroups write the same.
            for (int i = (count - STEP * step) * 8 + threadIdx.x % WARPGROUP; i < STEP * 8; i += WARPGROUP)
#pragma unroll
                for (int b = 0; b < VALUE_BOXES; b++)
                    *(uint4*)(values + b * COLUMNS_BYTES + 16 * i) = make_uint4(0, 0, 0, 0);
            shared_to_async();
            barrier_sync(1 + warpgroup, WARPGROUP);
        }
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < STEP / 16; k++)
            wgmma_columns(work.o[0], p[k], wgmma_operand_columns(values + k * 16 * 128, COLUMNS_BYTES));
        wgmma_commit();
    };
    auto soften = [&](int step) {
        if (STEP * step + STEP - 1 > work.seen_by(warp_row)) work.mask(s, STEP * step);
        return online_softmax(s[0], work.max[0], work.sum[0], scale_log2);
    };
    auto probabilities = [&] {
#pragma unroll
        for (int k = 0; k < STEP / 16; k++) scores_as_a(p[k], s[0][2 * k], s[0][2 * k + 1]);
    };

    mbarrier_wait(shared.queries_full, 0);
    multiply_keys(0);
    wgmma_wait<0>();
    wgmma_landed(s[0]);
    if (lane == 0) mbarrier_arrive(shared.keys_empty);
    work.rescale(0, soften(0));
    probabilities();
#pragma unroll 1
    for (int step = 1; step < steps; step++) {
        multiply_keys(step);
        multiply_values(step - 1);
        wgmma_wait<1>();
        wgmma_landed(s[0]);
        if (lane == 0) mbarrier_arrive(shared.keys_empty + step % STAGES);
        const float2 correction = soften(step);
        wgmma_wait<0>();
        wgmma_landed(work.o[0]);
        if (lane == 0) mbarrier_arrive(shared.values_empty + (step - 1) % STAGES);
        work.rescale(0, correction);
        probabilities();
    }
    multiply_values(steps - 1);
    wgmma_wait<0>();
    wgmma_landed(work.o[0]);
}

template <int KEY_BOXES, int VALUE_BOXES> __device__ __forceinline__ void attention_wgmma(const AttentionWgmma& a) {
    using Tile = FlashTile<64 * KEY_BOXES, 64 * VALUE_BOXES, 1>;
    using Source = Pages<KEY_BOXES, VALUE_BOXES>;
    DYNAMIC_SHARED(unsigned char, dynamic);
    const Shared<KEY_BOXES, VALUE_BOXES> shared(dynamic);
    begin_kernel();
    const int2 tile = a.tiles[blockIdx.y];
    if (tile.x < 0) return;
    shared.begin();
    const int head = blockIdx.x, first = tile.y, rows = min(QUERIES, a.seq_first[tile.x + 1] - first);
    const int seen = a.positions[first], count = seen + rows,
              steps = div_ceil(count, Steps<KEY_BOXES, VALUE_BOXES>::STEP);
    if (threadIdx.x >= CONSUMERS * WARPGROUP) {
        const Source pages{
            &a.keys, &a.values, a.block_table + a.seq_blocks[tile.x], a.kv_heads, head / (a.heads / a.kv_heads), count};
        return bring(shared, pages, &a.q, first, head, steps);
    }
    more_registers<240>();
    Tile work;
    work.begin(seen, count - 1);
    attend<Source>(work, shared, count, steps, a.scale * LOG2_E);
    work.finish(a.out + ((size_t)first * a.heads + head) * a.value_dim, (size_t)a.heads * a.value_dim, a.value_dim,
        rows, sink_of(a.sinks, head));
}

template <int KEY_BOXES, int VALUE_BOXES> __device__ __forceinline__ void latent_wgmma(const LatentWgmma& a) {
    using Tile = FlashTile<64 * KEY_BOXES, 64 * VALUE_BOXES, 1>;
    using Source = Expanded<KEY_BOXES, VALUE_BOXES>;
    constexpr int VALUE = 64 * VALUE_BOXES;
    DYNAMIC_SHARED(unsigned char, dynamic);
    const Shared<KEY_BOXES, VALUE_BOXES> shared(dynamic);
    begin_kernel();
    // The last rows see most: they begin.
    const int head = blockIdx.x, offset = (gridDim.y - 1 - blockIdx.y) * QUERIES, first = a.row_first + offset,
              rows = min(QUERIES, a.row_end - first);
    const int seen = a.positions[first] - a.from, count = min(a.to - a.from, seen + rows),
              steps = max(div_ceil(count, Source::S::STEP), 0);
    if (count <= 0 && !a.first && !a.last) return;
    shared.begin();
    if (threadIdx.x >= CONSUMERS * WARPGROUP)
        return bring(shared, Source{&a.expanded, &a.rotated, head}, &a.q, first, head, steps);
    more_registers<240>();
    Tile work;
    work.begin(seen, count - 1);
    const size_t at = (size_t)offset * a.heads + head;
    if (!a.first) flash_state<true>(work, a.max + at, a.sum + at, a.acc + at * VALUE, a.heads, VALUE, rows);
    attend<Source>(work, shared, count, steps, a.scale * LOG2_E);
    if (a.last)
        work.finish(a.out + ((size_t)first * a.heads + head) * VALUE, (size_t)a.heads * VALUE, VALUE, rows);
    else
        flash_state<false>(work, a.max + at, a.sum + at, a.acc + at * VALUE, a.heads, VALUE, rows);
}
#endif

#define PREFILL_WGMMA(name, KD, VD, SHARED)                                                                            \
    KERNEL_TILE(name, KD, VD, QUERIES)                                                                                 \
    KERNEL_BLOCKS(name, THREADS, 1, SHARED, const __grid_constant__ AttentionWgmma a)                                  \
    WITH_WGMMA(SHARED, (Shared<KD / 64, VD / 64>::BYTES), (attention_wgmma<KD / 64, VD / 64>(a)))
PREFILL_WGMMA(attend_prefill_wgmma_64_64, 64, 64, 83072)
PREFILL_WGMMA(attend_prefill_wgmma_128_128, 128, 128, 164992)
PREFILL_WGMMA(attend_prefill_wgmma_192_128, 192, 128, 214144)
PREFILL_WGMMA(attend_prefill_wgmma_256_256, 256, 256, 197760)

#define LATENT_WGMMA(name, KD, VD, SHARED)                                                                             \
    KERNEL_TILE(name, KD, VD, QUERIES)                                                                                 \
    KERNEL_BLOCKS(name, THREADS, 1, SHARED, const __grid_constant__ LatentWgmma a)                                     \
    WITH_WGMMA(SHARED, (Shared<KD / 64, VD / 64>::BYTES), (latent_wgmma<KD / 64, VD / 64>(a)))
LATENT_WGMMA(attend_latent_prefill_wgmma_192_128, 192, 128, 214144)
LATENT_WGMMA(attend_latent_prefill_wgmma_256_256, 256, 256, 197760)
