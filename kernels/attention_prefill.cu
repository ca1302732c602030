// Causal attention of many tokens over the paged cache (flash_tile.cuh), for grouped queries.
//
// q [T, heads * key_dim], out [T, heads * value_dim] bf16; cache: attention.cuh. The positions of a sequence's tokens
// are consecutive. Token t of sequence s sees positions 0..=positions[t] of s, all of them in the cache already:
//   out[t, h] = softmax(scale * q[t, h] . keys[0..=positions[t], h / (heads / kv_heads)]) values[...]
// It sees those of these positions that are in its `window`. `sinks` [heads] or null: scores that take part in each
// head's softmax and bring no value.
//
// attend_prefill_{KD}_{VD}_{bf16|int8} serves key_dim <= KD and value_dim <= VD, both multiples of 8; its tile is
// (KD, VD, ROWS), ROWS query rows to a block. Choose the first that holds both.
// tiles[n]: {sequence, first row in the batch}; a tile ends after ROWS rows or at seq_first[sequence + 1]. Best order:
// tiles with the most positions first (9% faster than last at 8192 tokens). A tile with a negative sequence is skipped.
//   grid (heads, n, ceil(value_dim / COLUMNS)); blocks that share out a head compute the same scores
// Two blocks fit into a multiprocessor with 228 KB.
#include "flash_tile.cuh"

constexpr int COLUMNS = 256;

// STEP positions at a time, of one page.
template <class Cache, int STEP> struct Paged {
    const Cache *keys, *values;        // the head's page of block 0
    uint32_t key_stride, value_stride; // between blocks
    const uint32_t* table;
    int key_dim, value_dim, count; // positions that may be read
    uint32_t id, next;

    __device__ __forceinline__ uint32_t block(int j) const { return STEP * j < count ? table[STEP * j / PAGE] : 0; }
    __device__ __forceinline__ void begin(int j) {
        id = block(j);
        next = block(j + 1);
    }
    // To the next step's page id, asked for long before.
    __device__ __forceinline__ void advance(int j) {
        id = next;
        next = block(j + 2);
    }
    __device__ __forceinline__ int positions(int j) const { return count - STEP * j; }
    __device__ __forceinline__ const Cache* key_page() const { return keys + (size_t)id * key_stride; }
    __device__ __forceinline__ const Cache* value_page() const { return values + (size_t)id * value_stride; }
    __device__ __forceinline__ const Cache* keys_of(int j) const { return key_page() + STEP * j % PAGE * key_dim; }
    __device__ __forceinline__ const Cache* values_of(int j) const {
        return value_page() + STEP * j % PAGE * value_dim;
    }
};

template <int KD, int VD, int STEP, class Cache> struct PagedTiles;

// Keys have one tile, values another; each is refilled while the other is in use.
template <int KD, int VD, int STEP> struct PagedTiles<KD, VD, STEP, bf16> {
    static constexpr int KEY_PITCH = KD + 8, VALUE_PITCH = VD + 8, BYTES = STEP * (KEY_PITCH + VALUE_PITCH) * 2;
    Paged<bf16, STEP> cache;
    bf16 *key_tile, *value_tile;

    __device__ __forceinline__ PagedTiles(const Paged<bf16, STEP>& from, int first, unsigned char* shared)
        : cache(from), key_tile(reinterpret_cast<bf16*>(shared)), value_tile(key_tile + STEP * KEY_PITCH) {
        cache.begin(first);
        copy_keys(first);
    }
    __device__ __forceinline__ void copy_keys(int j) {
        if (STEP * j < cache.count)
            copy_rows<STEP, KD, TILE_THREADS>(
                key_tile, cache.keys_of(j), cache.key_dim, cache.key_dim, cache.positions(j), threadIdx.x);
        copy_async_commit();
    }
    __device__ __forceinline__ const bf16* keys(int j) {
        copy_async_wait<0>();
        __syncthreads();
        copy_rows<STEP, VD, TILE_THREADS>(
            value_tile, cache.values_of(j), cache.value_dim, cache.value_dim, cache.positions(j), threadIdx.x);
        copy_async_commit();
        return key_tile;
    }
    __device__ __forceinline__ const bf16* values(int j) {
        copy_async_wait<0>();
        __syncthreads();
        cache.advance(j);
        copy_keys(j + 1);
        return value_tile;
    }
};

// Raw pages of both, and one tile that holds keys and values by turns. Each thread widens its own copies, but with
// scales that others have copied.
template <int KD, int VD, int STEP> struct PagedTiles<KD, VD, STEP, int8> {
    static constexpr int KEY_PITCH = (KD > VD ? KD : VD) + 8, VALUE_PITCH = KEY_PITCH,
                         KEY_SCALES = STEP * groups_of<int8>(KD), VALUE_SCALES = STEP * groups_of<int8>(VD),
                         BYTES = STEP * KEY_PITCH * 2 + STEP * (KD + VD) + 2 * (KEY_SCALES + VALUE_SCALES);
    Paged<int8, STEP> cache;
    bf16* tile;
    uint32_t key_inverse, value_inverse;

    // All at known distances from the tile: registers are scarce.
    __device__ __forceinline__ uint8_t* raw_keys() const { return reinterpret_cast<uint8_t*>(tile + STEP * KEY_PITCH); }
    __device__ __forceinline__ uint8_t* raw_values() const { return raw_keys() + STEP * KD; }
    __device__ __forceinline__ uint16_t* key_scales() const {
        return reinterpret_cast<uint16_t*>(raw_values() + STEP * VD);
    }
    __device__ __forceinline__ uint16_t* value_scales() const { return key_scales() + KEY_SCALES; }

    __device__ __forceinline__ PagedTiles(const Paged<int8, STEP>& from, int first, unsigned char* shared)
        : cache(from), tile(reinterpret_cast<bf16*>(shared)) {
        key_inverse = reciprocal(cache.key_dim);
        value_inverse = reciprocal(cache.value_dim);
        clear_shared<TILE_THREADS>(
            tile, STEP * KEY_PITCH * 2, threadIdx.x); // columns past the head stay zero, or at least finite
        cache.begin(first);
        copy_keys(first);
        copy_values(first);
    }
    __device__ __forceinline__ void copy_keys(int j) {
        if (STEP * j < cache.count) {
            copy_raw<STEP, KD, TILE_THREADS>(
                raw_keys(), cache.keys_of(j), cache.key_dim, min(STEP, cache.positions(j)), threadIdx.x);
            copy_scales<STEP, KD>(key_scales(), cache.key_page(), cache.key_dim, STEP * j % PAGE, threadIdx.x);
        }
        copy_async_commit();
    }
    __device__ __forceinline__ void copy_values(int j) {
        if (STEP * j < cache.count) {
            copy_raw<STEP, VD, TILE_THREADS>(
                raw_values(), cache.values_of(j), cache.value_dim, min(STEP, cache.positions(j)), threadIdx.x);
            copy_scales<STEP, VD>(value_scales(), cache.value_page(), cache.value_dim, STEP * j % PAGE, threadIdx.x);
        }
        copy_async_commit();
    }
    __device__ __forceinline__ const bf16* keys(int j) {
        copy_async_wait<1>();
        __syncthreads();
        widen_rows<STEP, KD, TILE_THREADS, KEY_PITCH>(
            tile, raw_keys(), key_scales(), cache.key_dim, key_inverse, cache.positions(j), threadIdx.x);
        cache.advance(j);
        __syncthreads();
        copy_keys(j + 1);
        return tile;
    }
    __device__ __forceinline__ const bf16* values(int j) {
        copy_async_wait<1>();
        __syncthreads();
        widen_rows<STEP, VD, TILE_THREADS, VALUE_PITCH>(
            tile, raw_values(), value_scales(), cache.value_dim, value_inverse, cache.positions(j), threadIdx.x);
        __syncthreads();
        copy_values(j + 1);
        return tile;
    }
};

template <int KD, int VD, int MT, int STEP, class Cache>
__device__ __forceinline__ void prefill(const bf16* q, const Cache* keys, const Cache* values, bf16* out, int2 tile,
    const int* seq_first, const int* positions, const int* seq_blocks, const uint32_t* block_table, int heads,
    int kv_heads, int key_dim, int value_dim, float scale, Window window, const float* sinks) {
    using Tile = FlashTile<KD, (VD < COLUMNS ? VD : COLUMNS), MT, true, STEP>;
    DYNAMIC_SHARED(unsigned char, shared);
    if (tile.x < 0) return;
    const int head = blockIdx.x, kv_head = head / (heads / kv_heads), first = tile.y, column = blockIdx.z * COLUMNS;
    const int rows = min(Tile::ROWS, seq_first[tile.x + 1] - first), count = positions[first + rows - 1] + 1;

    bf16* queries = reinterpret_cast<bf16*>(shared);
    copy_rows<Tile::ROWS, KD, TILE_THREADS>(
        queries, q + ((size_t)first * heads + head) * key_dim, heads * key_dim, key_dim, rows, threadIdx.x);

    Paged<Cache, STEP> cache;
    cache.keys = page_of(keys, 0, kv_heads, kv_head, key_dim);
    cache.values = page_of(values, 0, kv_heads, kv_head, value_dim);
    cache.key_stride = kv_heads * page_len<Cache>(key_dim);
    cache.value_stride = kv_heads * page_len<Cache>(value_dim);
    cache.table = block_table + seq_blocks[tile.x];
    cache.key_dim = key_dim;
    cache.value_dim = value_dim;
    cache.count = count;
    Tile work;
    work.begin(positions[first], count - 1, window);
    PagedTiles<KD, VD, STEP, Cache> source(cache, work.first_step(), shared + Tile::QUERY_BYTES);
    work.run(source, queries, scale * LOG2_E, column);
    work.finish(out + ((size_t)first * heads + head) * value_dim + column, (size_t)heads * value_dim,
        value_dim - column, rows, sink_of(sinks, head));
}

#define PREFILL_ARGUMENTS(Cache)                                                                                       \
    const bf16 *q, const AS_BYTES(Cache) * keys, const AS_BYTES(Cache) * values, bf16 *out, const int2 *tiles,         \
        const int *seq_first, const int *positions, const int *seq_blocks, const uint32_t *block_table, int heads,     \
        int kv_heads, int key_dim, int value_dim, float scale, Window window, const float *sinks
#define PREFILL(name, KD, VD, ROWS, STEP, Cache, SHARED)                                                               \
    static_assert(SHARED == FlashTile<KD, VD, ROWS / 64>::QUERY_BYTES + PagedTiles<KD, VD, STEP, Cache>::BYTES,        \
        "shared memory of " #name);                                                                                    \
    KERNEL_TILE(name, KD, VD, ROWS)                                                                                    \
    KERNEL(name, TILE_THREADS, SHARED, PREFILL_ARGUMENTS(Cache)) {                                                     \
        begin_kernel();                                                                                                \
        prefill<KD, VD, ROWS / 64, STEP, Cache>(q, keys, values, out, tiles[blockIdx.y], seq_first, positions,         \
            seq_blocks, block_table, heads, kv_heads, key_dim, value_dim, scale, window, sinks);                       \
    }
PREFILL(attend_prefill_64_64_bf16, 64, 64, 128, PAGE, bf16, 36864)
PREFILL(attend_prefill_96_96_bf16, 96, 96, 128, PAGE, bf16, 53248)
PREFILL(attend_prefill_128_128_bf16, 128, 128, 128, PAGE, bf16, 69632)
PREFILL(attend_prefill_192_128_bf16, 192, 128, 128, PAGE, bf16, 94208)
PREFILL(attend_prefill_256_256_bf16, 256, 256, 64, PAGE, bf16, 101376)
PREFILL(attend_prefill_512_512_bf16, 512, 512, 64, 16, bf16, 99840)
PREFILL(attend_prefill_64_64_int8, 64, 64, 128, PAGE, int8, 36096)
PREFILL(attend_prefill_96_96_int8, 96, 96, 128, PAGE, int8, 52736)
PREFILL(attend_prefill_128_128_int8, 128, 128, 128, PAGE, int8, 69120)
PREFILL(attend_prefill_192_128_int8, 192, 128, 128, PAGE, int8, 97920)
PREFILL(attend_prefill_256_256_int8, 256, 256, 64, PAGE, int8, 101376)
PREFILL(attend_prefill_512_512_int8, 512, 512, 64, 16, int8, 100096)
