// Causal attention of one sequence's new tokens over a segment of its context, with MLA's keys and values expanded (not
// absorbed): flash_tile.cuh.
//
// A context is walked in segments [from, to): attend_latent_gather, a product with kv_b_proj into `expanded`, then this
// kernel; the softmax's state rests in between.
//   expanded [to - from, heads, nope + value_dim]: a position's key without rotation, then its value
//   rotated [to - from, rope]: the rotated part of the key, for all heads
//   q [T, heads * (nope + rope)], out [T, heads * value_dim] bf16
//   queries are rows row_first..row_end of the batch, all of one sequence, their positions consecutive
//   state f32, by row - row_first: max, sum [rows, heads], acc [rows, heads, value_dim]
//   `first` != 0: the kernel reads no state; `last` != 0: it writes out, not the state
//
// attend_latent_prefill_{KD}_{VD} serves nope + rope <= KD and value_dim <= VD (multiples of 8); its tile is (KD, VD,
// ROWS), ROWS query rows to a block.
//   grid (heads, ceil((row_end - row_first) / ROWS))
#include "flash_tile.cuh"

template <int KD, int VD> struct Segment {
    static constexpr int KEY_PITCH = KD + 8, VALUE_PITCH = VD + 8, BYTES = PAGE * (KEY_PITCH + VALUE_PITCH) * 2;
    bf16 *key_tile, *value_tile;
    const bf16 *expanded, *rotated; // of the head
    uint32_t pitch;
    int nope, rope, value_dim, count;

    __device__ __forceinline__ void copy_keys(int j) {
        constexpr int STEP = TILE_THREADS / 8;
        const int col = threadIdx.x % 8 * 8, first = PAGE * j + threadIdx.x / 8;
        bf16* tile = key_tile + threadIdx.x / 8 * KEY_PITCH + col;
#pragma unroll 1 // registers are scarce
        for (int k = 0; k < KD; k += 64) {
            const bool plain = col + k < nope, valid = col + k < nope + rope;
            const uint32_t step = plain ? pitch : rope;
            const bf16* from = (plain ? expanded : rotated - nope) + (size_t)first * step + col + k;
#pragma unroll 2
            for (int row = 0; row < PAGE; row += STEP, from += (size_t)STEP * step)
                copy_async_16(tile + row * KEY_PITCH + k, from, first + row < count && valid);
        }
        copy_async_commit();
    }
    __device__ __forceinline__ const bf16* keys(int j) {
        copy_async_wait<0>();
        __syncthreads();
        copy_rows<PAGE, VD, TILE_THREADS>(
            value_tile, expanded + (size_t)PAGE * j * pitch + nope, pitch, value_dim, count - PAGE * j, threadIdx.x);
        copy_async_commit();
        return key_tile;
    }
    __device__ __forceinline__ const bf16* values(int j) {
        copy_async_wait<0>();
        __syncthreads();
        if (PAGE * (j + 1) < count) copy_keys(j + 1);
        return value_tile;
    }
};

template <int KD, int VD, int MT>
__device__ __forceinline__ void prefill_mla(const bf16* q, const bf16* expanded, const bf16* rotated, bf16* out,
    float* max, float* sum, float* acc, const int* positions, int row_first, int row_end, int from, int to,
    int is_first, int is_last, int heads, int nope, int rope, int value_dim, float scale) {
    using Tile = FlashTile<KD, VD, MT>;
    DYNAMIC_SHARED(unsigned char, shared);
    // The last rows see most: they begin.
    const int head = blockIdx.x, offset = (gridDim.y - 1 - blockIdx.y) * Tile::ROWS, first = row_first + offset;
    const int rows = min(Tile::ROWS, row_end - first), key_dim = nope + rope,
              count = min(to, positions[first + rows - 1] + 1) - from;
    if (count <= 0 && !is_first && !is_last) return;

    bf16* queries = reinterpret_cast<bf16*>(shared);
    copy_rows<Tile::ROWS, KD, TILE_THREADS>(
        queries, q + ((size_t)first * heads + head) * key_dim, heads * key_dim, key_dim, rows, threadIdx.x);
    Segment<KD, VD> source;
    source.key_tile = queries + Tile::ROWS * Tile::QUERY_PITCH;
    source.value_tile = source.key_tile + PAGE * (KD + 8);
    source.expanded = expanded + (size_t)head * (nope + value_dim);
    source.rotated = rotated;
    source.pitch = heads * (nope + value_dim);
    source.nope = nope;
    source.rope = rope;
    source.value_dim = value_dim;
    source.count = count;
    source.copy_keys(0);

    Tile work;
    work.begin(positions[first] - from, count - 1);
    const size_t at = (size_t)((gridDim.y - 1 - blockIdx.y) * Tile::ROWS) * heads + blockIdx.x;
    if (!is_first) flash_state<true>(work, max + at, sum + at, acc + at * value_dim, heads, value_dim, rows);
    work.run(source, queries, scale * LOG2_E);
    if (is_last)
        work.finish(out + ((size_t)first * heads + head) * value_dim, (size_t)heads * value_dim, value_dim, rows);
    else
        flash_state<false>(work, max + at, sum + at, acc + at * value_dim, heads, value_dim, rows);
}

#define PREFILL_MLA_ARGUMENTS                                                                                          \
    const bf16 *q, const bf16 *expanded, const bf16 *rotated, bf16 *out, float *max, float *sum, float *acc,           \
        const int *positions, int row_first, int row_end, int from, int to, int first, int last, int heads, int nope,  \
        int rope, int value_dim, float scale
#define PREFILL_MLA(name, KD, VD, ROWS, SHARED)                                                                        \
    static_assert(                                                                                                     \
        SHARED == FlashTile<KD, VD, ROWS / 64>::QUERY_BYTES + Segment<KD, VD>::BYTES, "shared memory of " #name);      \
    KERNEL_TILE(name, KD, VD, ROWS)                                                                                    \
    KERNEL(name, TILE_THREADS, SHARED, PREFILL_MLA_ARGUMENTS) {                                                        \
        begin_kernel();                                                                                                \
        prefill_mla<KD, VD, ROWS / 64>(q, expanded, rotated, out, max, sum, acc, positions, row_first, row_end, from,  \
            to, first, last, heads, nope, rope, value_dim, scale);                                                     \
    }
PREFILL_MLA(attend_latent_prefill_64_64, 64, 64, 128, 36864)
PREFILL_MLA(attend_latent_prefill_192_128, 192, 128, 128, 94208)
PREFILL_MLA(attend_latent_prefill_256_256, 256, 256, 64, 101376)
