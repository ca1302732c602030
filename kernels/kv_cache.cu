// Writes new keys and values to the cache (layout: attention.cuh), and gathers MLA's latents from it.
//
// kv_write_{bf16|int8}: grid (T)
//   key    [T, kv_heads * key_dim] bf16
//   value  [T, kv_heads * value_dim] bf16, or null (MLA)
// Row t goes to position positions[t] of sequence token_seq[t]. A row with a negative position is skipped.
//
// attend_latent_gather_{bf16|int8}: grid (ceil((to - from) * (rank + rope) / GATHERED)), GATHERED numbers to a block
//   keys     [blocks, 1, 64, rank + rope], the sequence's at block_table[seq_blocks[seq]...]
//   latents  [to - from, rank] bf16, of positions from..to
//   rotated  [to - from, rope] bf16, of the same positions
//
// Dimensions are multiples of 8.
#include "attention.cuh"

__device__ __forceinline__ uint4 load_8(const bf16* from) { return *reinterpret_cast<const uint4*>(from); }

// Numbers col to col + 7 of a position of a page.
__device__ __forceinline__ uint4 read_8(const bf16* page, int at, int dim, int col) {
    return load_8(page + at * dim + col);
}
__device__ __forceinline__ uint4 read_8(const int8* page, int at, int dim, int col) {
    const uint2 codes = *reinterpret_cast<const uint2*>(page + at * dim + col);
    const uint32_t scale = twice(scales_of(page, dim)[col / KV_GROUP * PAGE + at]);
    const uint2 a = widen_int8(codes.x, scale), b = widen_int8(codes.y, scale);
    return make_uint4(a.x, a.y, b.x, b.y);
}

__device__ __forceinline__ void write_row(const bf16* row, bf16* cache, uint32_t block, int at, int kv_heads, int dim) {
    for (int i = threadIdx.x; i < kv_heads * dim / 8; i += 128) {
        const int head = i / (dim / 8), col = i % (dim / 8) * 8;
        *reinterpret_cast<uint4*>(page_of(cache, block, kv_heads, head, dim) + at * dim + col) = load_8(row + 8 * i);
    }
}
// Eight threads to a group, eight numbers each.
__device__ __forceinline__ void write_row(const bf16* row, int8* cache, uint32_t block, int at, int kv_heads, int dim) {
    const int groups = groups_of<int8>(dim), lane = threadIdx.x % 8;
    for (int first = 0; first < kv_heads * groups; first += 128 / 8) {
        const int i = first + threadIdx.x / 8, head = i / groups, group = i % groups, col = group * KV_GROUP + 8 * lane;
        const bool there = head < kv_heads && col < dim;
        const uint4 x = there ? load_8(row + head * dim + col) : make_uint4(0, 0, 0, 0);
        const float v[8] = {low_f32(x.x), high_f32(x.x), low_f32(x.y), high_f32(x.y), low_f32(x.z), high_f32(x.z),
            low_f32(x.w), high_f32(x.w)};
        float largest = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) largest = fmaxf(largest, fabsf(v[j]));
#pragma unroll
        for (int d = 4; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, d));
        if (!there) continue;
        const Scale scale = scale_for(largest);
        uint2 codes = make_uint2(0, 0);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            codes.x |= code_of(v[j], scale) << 8 * j;
            codes.y |= code_of(v[4 + j], scale) << 8 * j;
        }
        int8* page = page_of(cache, block, kv_heads, head, dim);
        *reinterpret_cast<uint2*>(page + at * dim + col) = codes;
        if (lane == 0) reinterpret_cast<bf16*>(page + PAGE * dim)[group * PAGE + at] = scale.scale;
    }
}

#define KV_WRITE(name, Cache)                                                                                          \
    KERNEL(name, 128, 0, const bf16* key, const bf16* value, AS_BYTES(Cache) * keys, AS_BYTES(Cache) * values,         \
        const int* positions, const int* token_seq, const int* seq_blocks, const uint32_t* block_table, int tokens,    \
        int kv_heads, int key_dim, int value_dim) {                                                                    \
        begin_kernel();                                                                                                \
        const int t = blockIdx.x, position = t < tokens ? positions[t] : -1;                                           \
        if (position < 0) return;                                                                                      \
        const uint32_t block = block_table[seq_blocks[token_seq[t]] + position / PAGE];                                \
        write_row(key + (size_t)t * kv_heads * key_dim, keys, block, position % PAGE, kv_heads, key_dim);              \
        if (value)                                                                                                     \
            write_row(value + (size_t)t * kv_heads * value_dim, values, block, position % PAGE, kv_heads, value_dim);  \
    }
KV_WRITE(kv_write_bf16, bf16)
KV_WRITE(kv_write_int8, int8)

constexpr int GATHER_THREADS = 256, GATHERED = 8 * GATHER_THREADS;

#define GATHER_LATENTS(name, Cache)                                                                                    \
    KERNEL(name, GATHER_THREADS, 0, const AS_BYTES(Cache) * keys, bf16 * latents, bf16 * rotated,                      \
        const int* seq_blocks, const uint32_t* block_table, int seq, int from, int to, int rank, int rope) {           \
        begin_kernel();                                                                                                \
        const int chunks = (rank + rope) / 8, i = blockIdx.x * (GATHERED / 8) + threadIdx.x, row = i / chunks,         \
                  col = i % chunks * 8, position = from + row;                                                         \
        if (position >= to) return;                                                                                    \
        const uint32_t block = block_table[seq_blocks[seq] + position / PAGE];                                         \
        const int dim = rank + rope;                                                                                   \
        const uint4 x = read_8(page_of(keys, block, 1, 0, dim), position % PAGE, dim, col);                            \
        bf16* out = col < rank ? latents + (size_t)row * rank + col : rotated + (size_t)row * rope + col - rank;       \
        *reinterpret_cast<uint4*>(out) = x;                                                                            \
    }
GATHER_LATENTS(attend_latent_gather_bf16, bf16)
GATHER_LATENTS(attend_latent_gather_int8, int8)
