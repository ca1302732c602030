// Writes new keys and values to the cache (layout: attention.cuh), and gathers MLA's latents from it.
//
// kv_write_{bf16|e4m3}: grid (T)
//   key    [T, kv_heads * key_dim] bf16
//   value  [T, kv_heads * value_dim] bf16, or null (MLA)
// Row t goes to position positions[t] of sequence token_seq[t]. A row with a negative position is skipped. E4M3 rounds
// to nearest and cuts at 448.
//
// attend_latent_gather_{bf16|e4m3}: grid (ceil((to - from) * (rank + rope) / GATHERED)), GATHERED numbers to a block
//   keys     [blocks, 1, 64, rank + rope], the sequence's at block_table[seq_blocks[seq]...]
//   latents  [to - from, rank] bf16, of positions from..to
//   rotated  [to - from, rope] bf16, of the same positions
//
// Dimensions are multiples of 8.
#include "attention.cuh"

__device__ __forceinline__ void store_8(bf16* to, uint4 x) { *reinterpret_cast<uint4*>(to) = x; }
__device__ __forceinline__ void store_8(e4m3* to, uint4 x) {
    auto narrow = [](uint32_t pair) { return (uint32_t)pack_e4m3(low_f32(pair), high_f32(pair)); };
    *reinterpret_cast<uint2*>(to) = make_uint2(narrow(x.x) | narrow(x.y) << 16, narrow(x.z) | narrow(x.w) << 16);
}
__device__ __forceinline__ uint4 load_8(const bf16* from) { return *reinterpret_cast<const uint4*>(from); }
__device__ __forceinline__ uint4 load_8(const e4m3* from) {
    const uint2 bytes = *reinterpret_cast<const uint2*>(from);
    const uint2 a = widen_e4m3(bytes.x), b = widen_e4m3(bytes.y);
    return make_uint4(a.x, a.y, b.x, b.y);
}

template <class Cache>
__device__ __forceinline__ void write_row(
    const bf16* row, Cache* cache, uint32_t block, int at, int kv_heads, int dim) {
    for (int i = threadIdx.x; i < kv_heads * dim / 8; i += 128) {
        const int head = i / (dim / 8), col = i % (dim / 8) * 8;
        store_8(cache + (((size_t)block * kv_heads + head) * PAGE + at) * dim + col, load_8(row + 8 * i));
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
KV_WRITE(kv_write_e4m3, e4m3)

constexpr int GATHER_THREADS = 256, GATHERED = 8 * GATHER_THREADS;

#define GATHER_LATENTS(name, Cache)                                                                                    \
    KERNEL(name, GATHER_THREADS, 0, const AS_BYTES(Cache) * keys, bf16 * latents, bf16 * rotated,                      \
        const int* seq_blocks, const uint32_t* block_table, int seq, int from, int to, int rank, int rope) {           \
        begin_kernel();                                                                                                \
        const int chunks = (rank + rope) / 8, i = blockIdx.x * (GATHERED / 8) + threadIdx.x, row = i / chunks,         \
                  col = i % chunks * 8, position = from + row;                                                         \
        if (position >= to) return;                                                                                    \
        const uint32_t block = block_table[seq_blocks[seq] + position / PAGE];                                         \
        const uint4 x = load_8(keys + ((size_t)block * PAGE + position % PAGE) * (rank + rope) + col);                 \
        store_8(col < rank ? latents + (size_t)row * rank + col : rotated + (size_t)row * rope + col - rank, x);       \
    }
GATHER_LATENTS(attend_latent_gather_bf16, bf16)
GATHER_LATENTS(attend_latent_gather_e4m3, e4m3)
