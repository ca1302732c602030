// Attention of single query rows with multi-head latent attention, absorbed: flash-decoding over the paged cache
// (attention.cuh) of latents, which are keys and values at once.
//
// For i in 0..n, with t = rows[i], head h:
//   out[t, h] = softmax(scale * q[t, h] . keys[0..=positions[t]]) keys[0..=positions[t]][0..value_dim]
// q [T, heads * key_dim], out [T, heads * value_dim] bf16; key_dim <= 576, value_dim <= 512, multiples of 8. A negative
// rows[i] is skipped.
//
// attend_latent_decode_{16|32}_{bf16|e4m3}: 16 or 32 heads to a block, its tile (16 if heads <= 16).
//
// A block takes one of `splits` equal shares of a row's units of UNIT positions. For every 16 heads there are 4 warps;
// each multiplies a quarter of the key's dimensions (its queries stay in registers), they add up their scores through
// shared memory, compute the same softmax each, and then own a quarter of the output's columns each. One round works on
// two units, the scores of the next and the values of the last, so that it has one barrier and much to do beside
// waiting:
//
//   wait for unit u + 1
//   barrier
//   copy a later unit
//   S(u + 1), into one exchange buffer
//   softmax of S(u), from the other
//   O += P(u) V(u)
//
//   grid    (splits, ceil(heads / H), n), H = 16 or 32
//   splits  H = 16: floor(multiprocessors * 2 / (n * ceil(heads / 16)))
//           H = 32: floor(multiprocessors / (n * ceil(heads / 32)))
//           at least 1, at most MAX_SPLITS, and at most ceil(max context / UNIT)
// Workspace and attend_combine as in attention_decode.cu.
#include "decode.cuh"

constexpr int UNIT = 16, LATENT = 576;
constexpr int EXCHANGE = 2 * 4 * 2 * WARP; // float4: two buffers of [part][2 tiles of 8 positions][lane]

// A unit into its tile, whose columns past the key become zero (FP8: finite). Eight threads to a row; groups of 128
// threads take turns.
template <int GROUPS, class T> __device__ __forceinline__ void copy_unit(T* tile, const T* from, int dim, int rows) {
    constexpr int CHUNK = 16 / sizeof(T);
    if (sizeof(T) == 1 && dim % 16) {
        if (threadIdx.x < 128) copy_rows<UNIT, LATENT, 128>(tile, from, dim, dim, rows, threadIdx.x);
        return;
    }
    const int row = threadIdx.x % 128 / 8, col = threadIdx.x % 8 * CHUNK;
    tile += row * pitch_of<T>(LATENT) + col;
    from += row * dim + col;
#pragma unroll
    for (int k = 0; k < LATENT; k += 8 * CHUNK) {
        if (k / (8 * CHUNK) % GROUPS == (int)threadIdx.x / 128 && col + k < LATENT)
            copy_async_16(tile + k, from + k, row < rows && col + k < dim);
    }
}

// Bytes of the ring of tiles, and of the scores that the warps of a group of 16 heads exchange.
template <int H, int STAGES, class Cache> constexpr int mla_shared() {
    return STAGES * UNIT * pitch_of<Cache>(LATENT) * (int)sizeof(Cache) + H / 16 * EXCHANGE * 16;
}

template <int GROUPS, int STAGES, class Cache>
__device__ __forceinline__ void decode_mla(const bf16* q, const Cache* keys, bf16* out, float* partial, float2* states,
    const int* rows, const int* positions, const int* token_seq, const int* seq_blocks, const uint32_t* block_table,
    int heads, int key_dim, int value_dim, float scale) {
    constexpr int PITCH = pitch_of<Cache>(LATENT), TILE = UNIT * PITCH;
    DYNAMIC_SHARED(unsigned char, shared);
    const int lane = threadIdx.x % WARP, part = threadIdx.x / WARP % 4, group = threadIdx.x / 128, split = blockIdx.x,
              splits = gridDim.x, row = rows[blockIdx.z];
    if (row < 0) return;
    const int first_head = (blockIdx.y * GROUPS + group) * 16,
              num_heads = min(16, heads - first_head); // may be negative
    const int last = positions[row], total = last / UNIT + 1;
    const int begin = share(total, split, splits), count = share(total, split + 1, splits) - begin;
    const uint32_t state_at =
        (blockIdx.z * heads + first_head) * splits + split; // of the first head; the next one's is `splits` further
    if (count == 0) {
        if ((int)threadIdx.x % 128 < num_heads)
            states[state_at + threadIdx.x % 128 * splits] = make_float2(-INFINITY, 0.0f);
        return;
    }

    // Steps of 16 dimensions part, part + 4, ... What lies past the key's or the value's last dimension is multiplied,
    // too: zeros, or columns that are not stored.
    constexpr int STEPS = LATENT / 16 / 4;
    uint32_t qa[STEPS][4];
    load_queries<Cache, STEPS, 4>(qa, q + ((size_t)row * heads + first_head) * key_dim, num_heads, key_dim, part, lane);

    const uint32_t* table = block_table + seq_blocks[token_seq[row]];
    Cache* tiles = reinterpret_cast<Cache*>(shared); // a ring of STAGES
    uint32_t next = table[begin * UNIT / PAGE];      // the next copy's page, asked for one copy ahead
    const int left = last + 1 - begin * UNIT;
    auto rows_of = [&](int u) { return left - u * UNIT; };
    auto copy = [&](int u) {
        if (u < count) {
            const Cache* from = keys + ((size_t)next * PAGE + (begin + u) * UNIT % PAGE) * key_dim;
            next = table[(begin + min(u + 1, count - 1)) * UNIT / PAGE];
            copy_unit<GROUPS>(tiles + u % STAGES * TILE, from, key_dim, rows_of(u));
        }
        copy_async_commit();
    };
    // Scores of each part.
    float4* exchange = reinterpret_cast<float4*>(shared + STAGES * TILE * sizeof(Cache)) + group * EXCHANGE;
    auto scores = [&](int u) {
        const Cache* tile = tiles + u % STAGES * TILE;
        float s[2][2][4] = {}; // two chains of sums: a product need not wait for the one before
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            uint32_t b[4];
            load_b_rows(b, tile + (part + 4 * i) * 16, PITCH, lane);
            mma_pair(s[i % 2][0], s[i % 2][1], qa[i], b);
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
            exchange[((u % 2 * 4 + part) * 2 + n) * WARP + lane] = make_float4(
                s[0][n][0] + s[1][n][0], s[0][n][1] + s[1][n][1], s[0][n][2] + s[1][n][2], s[0][n][3] + s[1][n][3]);
    };
#pragma unroll
    for (int u = 0; u < STAGES - 1; u++) copy(u);
    copy_async_wait<STAGES - 2>();
    __syncthreads();
    scores(0);

    float o[16][4], max[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < 16; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[n][i] = 0.0f;
    const float scale_log2 = scale * LOG2_E;
    for (int u = 0; u < count; u++) {
        copy_async_wait<STAGES - 3>();
        __syncthreads();
        copy(u + STAGES - 1);
        if (u + 1 < count) scores(u + 1);
        float s[2][4];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float4 x = exchange[(u % 2 * 8 + n) * WARP + lane];
#pragma unroll
            for (int other = 1; other < 4; other++) {
                const float4 y = exchange[(u % 2 * 8 + other * 2 + n) * WARP + lane];
                x = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
            }
            s[n][0] = x.x;
            s[n][1] = x.y;
            s[n][2] = x.z;
            s[n][3] = x.w;
        }
        const int valid = rows_of(u);
        if (valid < UNIT) {
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= valid) s[i / 4][i % 4] = -INFINITY;
        }
        const float2 correction = online_softmax(s, max, sum, scale_log2);
        rescale(o, correction);
        uint32_t p[4];
        scores_as_a(p, s[0], s[1]);
        const Cache* values = tiles + u % STAGES * TILE + part * 128;
#pragma unroll
        for (int n = 0; n < 16; n += 2) {
            uint32_t b[4];
            load_b_cols(b, values + n * 8, PITCH, lane);
            mma_pair(o[n], o[n + 1], p, b);
        }
    }

#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int h = lane / 4 + 8 * r;
        const float total_sum = quad_sum(sum[r]), inverse = 1.0f / total_sum;
        if (h >= num_heads) continue;
        const uint32_t at = state_at + h * splits;
        if (splits > 1 && part == 0 && lane % 4 == 0) states[at] = make_float2(max[r], total_sum);
#pragma unroll
        for (int n = 0; n < 16; n++) {
            const int col = part * 128 + n / 2 * 16 + quad_column<Cache>(lane, n % 2);
            if (col >= value_dim) continue;
            const float2 x = quad_of<Cache>(o[n / 2 * 2], o[n / 2 * 2 + 1], r, n % 2);
            if (splits == 1)
                *reinterpret_cast<uint32_t*>(out + ((size_t)row * heads + first_head + h) * value_dim + col) =
                    pack_bf16(x.x * inverse, x.y * inverse);
            else
                *reinterpret_cast<float2*>(partial + (size_t)at * value_dim + col) = x;
        }
    }
}

#define DECODE_MLA_ARGUMENTS(Cache)                                                                                    \
    const bf16 *q, const AS_BYTES(Cache) * keys, bf16 *out, float *partial, float2 *states, const int *rows,           \
        const int *positions, const int *token_seq, const int *seq_blocks, const uint32_t *block_table, int heads,     \
        int key_dim, int value_dim, float scale
#define DECODE_MLA(name, H, STAGES, Cache, SHARED)                                                                     \
    static_assert(SHARED == mla_shared<H, STAGES, Cache>(), "shared memory of " #name);                                \
    KERNEL_TILE(name, H)                                                                                               \
    KERNEL(name, 8 * H, SHARED, DECODE_MLA_ARGUMENTS(Cache)) {                                                         \
        begin_kernel();                                                                                                \
        decode_mla<H / 16, STAGES, Cache>(q, keys, out, partial, states, rows, positions, token_seq, seq_blocks,       \
            block_table, heads, key_dim, value_dim, scale);                                                            \
    }
DECODE_MLA(attend_latent_decode_16_bf16, 16, 4, bf16, 82944)
DECODE_MLA(attend_latent_decode_32_bf16, 32, 4, bf16, 91136)
DECODE_MLA(attend_latent_decode_16_e4m3, 16, 6, e4m3, 65024)
DECODE_MLA(attend_latent_decode_32_e4m3, 32, 6, e4m3, 73216)
