// Attention of single query rows with multi-head latent attention, absorbed: flash-decoding over the paged cache (attention.cuh) of latents, which are keys and values at once.
//
// For i in 0..n, with t = rows[i], head h: out[t, h] = softmax(scale * q[t, h] . keys[0..=positions[t]]) keys[0..=positions[t]][0..value_dim].
//   q [T, heads * key_dim], out [T, heads * value_dim] bf16; key_dim <= 576, value_dim <= 512, multiples of 8. A negative rows[i] is skipped.
// attention_decode_mla_{16|32}_{bf16|e4m3}: 16 or 32 heads to a block (16 if heads <= 16).
//
// A block takes one of `splits` equal shares of a row's units of 32 positions. For every 16 heads there are 4 warps; each multiplies a quarter of the key's dimensions
// (its queries stay in registers), they add up their scores through shared memory, compute the same softmax each, and then own a quarter of the output's columns each.
//   grid (splits, ceil(heads / H), n), H = 16 or 32; 8 * H threads
//   dynamic shared bytes: 74752 + 512 * H for bf16, 74240 + 512 * H for e4m3
//   splits: floor(multiprocessors * 2 / (n * ceil(heads / 16))) for H = 16, floor(multiprocessors / (n * ceil(heads / 32))) for H = 32,
//   within 1..=256, and no more than ceil(max context / 32)
// Workspace and attention_combine as in attention_decode.cu.
#include "decode.cuh"

constexpr int UNIT = 32, LATENT = 576, LATENT_PITCH = LATENT + 8;

template <int THREADS, class Cache> struct Units;

// Two buffers: one is read, the other filled.
template <int THREADS> struct Units<THREADS, bf16> {
    static constexpr int BYTES = 2 * UNIT * LATENT_PITCH * 2;
    bf16* tiles;

    __device__ __forceinline__ Units(unsigned char* shared, int) : tiles(reinterpret_cast<bf16*>(shared)) {}
    template <class Copy> __device__ __forceinline__ void start(Copy copy) { copy(0); }
    __device__ __forceinline__ void copy(int u, const bf16* from, int dim, int rows) {
        copy_rows<UNIT, LATENT, THREADS>(tiles + u % 2 * UNIT * LATENT_PITCH, from, dim, dim, rows, threadIdx.x);
    }
    template <class Copy> __device__ __forceinline__ const bf16* unit(int u, int, int, Copy copy) {
        copy_async_wait<0>();
        __syncthreads();
        copy(u + 1);
        return tiles + u % 2 * UNIT * LATENT_PITCH;
    }
};

template <int THREADS> struct Units<THREADS, e4m3> {
    static constexpr int BYTES = UNIT * (LATENT_PITCH * 2 + LATENT * 2);
    bf16* tile;
    uint8_t* raw;
    uint32_t inverse;

    __device__ __forceinline__ Units(unsigned char* shared, int dim) : tile(reinterpret_cast<bf16*>(shared)), raw(shared + UNIT * LATENT_PITCH * 2), inverse(reciprocal(dim)) {
        clear_shared<THREADS>(tile, UNIT * LATENT_PITCH * 2, threadIdx.x); // columns past the key stay zero
    }
    template <class Copy> __device__ __forceinline__ void start(Copy copy) {
        copy(0);
        copy(1);
    }
    __device__ __forceinline__ void copy(int u, const e4m3* from, int dim, int rows) {
        copy_raw<UNIT, LATENT, THREADS>(raw + u % 2 * UNIT * LATENT, from, dim, min(rows, UNIT), threadIdx.x);
    }
    template <class Copy> __device__ __forceinline__ const bf16* unit(int u, int dim, int rows, Copy copy) {
        copy_async_wait<1>();
        __syncthreads();
        widen_rows<UNIT, LATENT, THREADS, LATENT_PITCH>(tile, raw + u % 2 * UNIT * LATENT, dim, inverse, rows, threadIdx.x);
        copy(u + 2);
        __syncthreads();
        return tile;
    }
};

template <int GROUPS, class Cache>
__device__ __forceinline__ void decode_mla(const bf16* q, const Cache* keys, bf16* out, float* partial, float2* states, const int* rows, const int* positions,
                                           const int* token_seq, const int* seq_blocks, const uint32_t* block_table, int heads, int key_dim, int value_dim, float scale) {
    constexpr int THREADS = 128 * GROUPS;
    using Tiles = Units<THREADS, Cache>;
    DYNAMIC_SHARED(unsigned char, shared);
    const int lane = threadIdx.x % WARP, part = threadIdx.x / WARP % 4, group = threadIdx.x / 128, split = blockIdx.x, splits = gridDim.x, row = rows[blockIdx.z];
    if (row < 0) return;
    const int first_head = (blockIdx.y * GROUPS + group) * 16, num_heads = min(16, heads - first_head); // may be negative
    const int last = positions[row], total = last / UNIT + 1;
    const int begin = share(total, split, splits), count = share(total, split + 1, splits) - begin;
    const size_t state_at = ((size_t)blockIdx.z * heads + first_head) * splits + split; // of the first head; the next one's is `splits` further
    if (count == 0) {
        if ((int)threadIdx.x % 128 < num_heads) states[state_at + (size_t)(threadIdx.x % 128) * splits] = make_float2(-INFINITY, 0.0f);
        return;
    }

    // Steps of 16 dimensions part, part + 4, ...: a short key still keeps all warps busy.
    constexpr int STEPS = LATENT / 16 / 4;
    uint32_t qa[STEPS][4];
    load_queries<STEPS, 4>(qa, q + ((size_t)row * heads + first_head) * key_dim, num_heads, key_dim, part, lane);

    const uint32_t* table = block_table + seq_blocks[token_seq[row]];
    Tiles tiles(shared, key_dim);
    uint32_t next = table[begin * UNIT / PAGE]; // the next copy's page, asked for one copy ahead
    auto rows_of = [&](int u) { return last + 1 - (begin + u) * UNIT; };
    auto copy = [&](int u) {
        if (u < count) {
            const Cache* from = keys + ((size_t)next * PAGE + (begin + u) * UNIT % PAGE) * key_dim;
            next = table[(begin + min(u + 1, count - 1)) * UNIT / PAGE];
            tiles.copy(u, from, key_dim, rows_of(u));
        }
        copy_async_commit();
    };
    tiles.start(copy);

    // Scores of each part: [part][4 tiles of 8 positions][lane][4].
    float4* exchange = reinterpret_cast<float4*>(shared + Tiles::BYTES) + group * 512;
    float o[16][4], max[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < 16; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[n][i] = 0.0f;
    const float scale_log2 = scale * LOG2_E;
    for (int u = 0; u < count; u++) {
        const int valid = rows_of(u);
        const bf16* tile = tiles.unit(u, key_dim, valid, copy);
        float s[4][4] = {};
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const int col = (part + 4 * i) * 16;
            if (col >= key_dim) continue;
#pragma unroll
            for (int n = 0; n < 4; n += 2) {
                uint32_t b[4];
                load_b_rows(b, tile + n * 8 * LATENT_PITCH + col, LATENT_PITCH, lane);
                mma_pair(s[n], s[n + 1], qa[i], b);
            }
        }
#pragma unroll
        for (int n = 0; n < 4; n++) exchange[(part * 4 + n) * WARP + lane] = make_float4(s[n][0], s[n][1], s[n][2], s[n][3]);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float4 x = exchange[n * WARP + lane];
#pragma unroll
            for (int other = 1; other < 4; other++) {
                const float4 y = exchange[(other * 4 + n) * WARP + lane];
                x = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
            }
            s[n][0] = x.x;
            s[n][1] = x.y;
            s[n][2] = x.z;
            s[n][3] = x.w;
        }
        if (valid < UNIT) {
#pragma unroll
            for (int i = 0; i < 16; i++)
                if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= valid) s[i / 4][i % 4] = -INFINITY;
        }
        const float2 correction = online_softmax(s, max, sum, scale_log2);
        uint32_t p[2][4];
        scores_as_a(p[0], s[0], s[1]);
        scores_as_a(p[1], s[2], s[3]);
#pragma unroll
        for (int n = 0; n < 16; n += 2) {
            const int col = part * 128 + n * 8;
            if (col >= value_dim) continue;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                o[n + i][0] *= correction.x;
                o[n + i][1] *= correction.x;
                o[n + i][2] *= correction.y;
                o[n + i][3] *= correction.y;
            }
#pragma unroll
            for (int k = 0; k < 2; k++) {
                uint32_t b[4];
                load_b_cols(b, tile + k * 16 * LATENT_PITCH + col, LATENT_PITCH, lane);
                mma_pair(o[n], o[n + 1], p[k], b);
            }
        }
    }

#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int h = lane / 4 + 8 * r;
        const float total_sum = quad_sum(sum[r]), inverse = 1.0f / total_sum;
        if (h >= num_heads) continue;
        const size_t at = state_at + (size_t)h * splits;
        if (splits > 1 && part == 0 && lane % 4 == 0) states[at] = make_float2(max[r], total_sum);
#pragma unroll
        for (int n = 0; n < 16; n++) {
            const int col = part * 128 + n * 8 + lane % 4 * 2;
            if (col >= value_dim) continue;
            if (splits == 1)
                *reinterpret_cast<uint32_t*>(out + ((size_t)row * heads + first_head + h) * value_dim + col) = pack_bf16(o[n][2 * r] * inverse, o[n][2 * r + 1] * inverse);
            else *reinterpret_cast<float2*>(partial + at * value_dim + col) = make_float2(o[n][2 * r], o[n][2 * r + 1]);
        }
    }
}

#define DECODE_MLA(name, H, Cache)                                                                                                                          \
    KERNEL(name, 8 * H, const bf16* q, const Cache* keys, bf16* out, float* partial, float2* states, const int* rows, const int* positions,                 \
           const int* token_seq, const int* seq_blocks, const uint32_t* block_table, int heads, int key_dim, int value_dim, float scale) {                  \
        decode_mla<H / 16, Cache>(q, keys, out, partial, states, rows, positions, token_seq, seq_blocks, block_table, heads, key_dim, value_dim, scale);    \
    }
DECODE_MLA(attention_decode_mla_16_bf16, 16, bf16)
DECODE_MLA(attention_decode_mla_32_bf16, 32, bf16)
DECODE_MLA(attention_decode_mla_16_e4m3, 16, e4m3)
DECODE_MLA(attention_decode_mla_32_e4m3, 32, e4m3)
