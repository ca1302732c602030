// Attention of single query rows over the paged cache (attention.cuh), the context split among blocks: flash-decoding
// for grouped queries. attention_decode_mla.cu serves MLA.
//
// For i in 0..n, with t = rows[i], head h, group = heads / kv_heads:
//   out[t, h] = softmax(scale * q[t, h] . keys[0..=positions[t], h / group]) values[...]
// A row sees those of these positions that are in its `window`. `sinks` [heads] or null: scores that take part in each
// head's softmax and bring no value.
//   q [T, heads * key_dim], out [T, heads * value_dim] bf16. A negative rows[i] is skipped.
//   KV head h finds its pages `table_stride` * h entries behind the first one's; 0: all heads have the same.
//   `early`: rows, positions and tables were there before the last kernel that waits first (common.cuh), and are read
//   before the kernel in front has ended.
//
// attend_decode_{KD}_{VD}_{bf16|int8} serves key_dim <= KD and value_dim <= VD, multiples of 8; its tile is (KD,
// VD). Choose the first that holds both.
//
// A block takes one of `splits` equal shares of the pages that a row sees, for up to HEADS heads of a group: they are
// the 16 rows of the products, so that keys and values are read once. Each of the 4 warps streams its own quarter of
// every page through its own buffers and keeps its own softmax, so no warp waits for another before the end. Heads of
// more than 256 numbers do not fit into a warp's registers: decode_wide.cuh.
//   grid    (splits, kv_heads * ceil(group / HEADS), n)
//   splits  floor(multiprocessors * 2 / (n * kv_heads * ceil(group / HEADS))), at least 1, at most 128, and at most
//           ceil(max context / 64)
//
// With splits == 1 the block writes `out` and leaves the workspace alone. Otherwise the shares go to
//   partial f32 [n, heads, splits, value_dim]
//   states {maximum, sum} f32 [n, heads, splits, 2]; an empty share has maximum -inf and no partial
// and attend_combine must follow: grid (n * heads, ceil(value_dim / COMBINE_COLUMNS)), splits <= MAX_SPLITS.
#include "decode_wide.cuh"

// Numbers of 16 keys or values and their scales.
template <class Cache> __host__ __device__ constexpr int tile_len(int d) {
    return 16 * pitch_of<Cache>(d) + scales_len<Cache>(d);
}
// Bytes of the warps' pages, which lie where their results lie afterwards: [4][16][VD + 8] f32.
template <int KD, int VD, int STAGES, class Cache> __host__ __device__ constexpr int pages_bytes() {
    return max_of(
        4 * STAGES * (tile_len<Cache>(KD) + tile_len<Cache>(VD)) * (int)sizeof(Cache), 4 * HEADS * (VD + 8) * 4);
}
constexpr int STATES_BYTES = 4 * HEADS * 8; // {max, sum} of each warp

template <int KD, int VD, int STAGES, class Cache>
__device__ __forceinline__ void decode(const bf16* q, const Cache* keys, const Cache* values, bf16* out, float* partial,
    float2* states, const int* rows, const int* positions, const int* token_seq, const int* seq_blocks,
    const uint32_t* block_table, int heads, int kv_heads, int key_dim, int value_dim, float scale, Window window,
    const float* sinks, int table_stride, int early) {
    constexpr int KEY_PITCH = pitch_of<Cache>(KD), VALUE_PITCH = pitch_of<Cache>(VD), KEYS = tile_len<Cache>(KD),
                  STAGE = KEYS + tile_len<Cache>(VD);
    DYNAMIC_SHARED(unsigned char, shared);
    if (!early) begin_short_kernel();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, split = blockIdx.x, splits = gridDim.x,
              row = __ldcg(rows + blockIdx.z);
    const int group = heads / kv_heads, parts = div_ceil(group, 16), kv_head = blockIdx.y / parts,
              part = blockIdx.y % parts;
    const int first_head = kv_head * group + part * 16, num_heads = min(16, group - part * 16);
    const int last = row < 0 ? -1 : __ldcg(positions + row), first = first_seen(window, last), skipped = first / PAGE,
              total = last / PAGE + 1 - skipped;
    const Share own = share_of(total, split, splits);
    const int begin = skipped + own.begin, count = own.count;
    // Each lane keeps the id of one of 32 pages.
    const uint32_t* table = block_table + kv_head * table_stride + begin;
    uint32_t ids = 0;
    if (row >= 0 && count > 0) {
        table += __ldcg(seq_blocks + __ldcg(token_seq + row));
        ids = __ldcg(table + min(lane, count - 1));
    }
    if (early) begin_short_kernel();
    if (row < 0) return;
    const uint32_t state_at =
        (blockIdx.z * heads + first_head) * splits + split; // of the first head; the next one's is `splits` further
    if (count == 0) {
        if ((int)threadIdx.x < num_heads) states[state_at + threadIdx.x * splits] = make_float2(-INFINITY, 0.0f);
        return;
    }

    uint32_t qa[KD / 16][4];
    const bf16* query = q + ((size_t)row * heads + first_head + lane / 4) * key_dim;
    load_queries<Cache, KD / 16, 1>(
        qa, [&](int r, int col) { return query + r * 8 * key_dim + col; }, num_heads, key_dim, 0, lane);

    // Copies run STAGES pages ahead.
    Cache* tiles = reinterpret_cast<Cache*>(shared) + warp * STAGES * STAGE; // for each stage 16 keys, then 16 values
    const int left = last + 1 - begin * PAGE - warp * 16, hidden = first - begin * PAGE - warp * 16;
    auto rows_of = [&](int j) { return left - j * PAGE; };
    auto copy_keys = [&](int j, int stage) {
        if (j > 0 && j % WARP == 0) ids = table[min(j + lane, count - 1)];
        const uint32_t id = __shfl_sync(ALL_LANES, ids, j % WARP);
        if (j < count) {
            const Cache* page = page_of(keys, id, kv_heads, kv_head, key_dim);
            Cache* tile = tiles + stage * STAGE;
            copy_rows<16, KD, WARP>(tile, page + warp * 16 * key_dim, key_dim, key_dim, rows_of(j), lane);
            copy_scales<16, KD>(tile + 16 * KEY_PITCH, page, key_dim, warp * 16, lane);
        }
        copy_async_commit();
    };
    auto copy_values = [&](int j, int stage) {
        const uint32_t id = __shfl_sync(ALL_LANES, ids, j % WARP);
        if (j < count) {
            const Cache* page = page_of(values, id, kv_heads, kv_head, value_dim);
            Cache* tile = tiles + stage * STAGE + KEYS;
            copy_rows<16, VD, WARP>(tile, page + warp * 16 * value_dim, value_dim, value_dim, rows_of(j), lane);
            copy_scales<16, VD>(tile + 16 * VALUE_PITCH, page, value_dim, warp * 16, lane);
        }
        copy_async_commit();
    };
#pragma unroll
    for (int j = 0; j < STAGES; j++) {
        copy_keys(j, j);
        copy_values(j, j);
    }

    float o[VD / 8][4], max[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < VD / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[n][i] = 0.0f;
    const float scale_log2 = scale * LOG2_E;
    int stage = 0;
    for (int j = 0; j < count; j++) {
        const int valid = rows_of(j); // of the 16
        float s[2][4] = {};
        copy_async_wait<2 * STAGES - 1>();
        __syncwarp();
        const Cache* k = tiles + stage * STAGE;
        uint2 scale;
#pragma unroll
        for (int i = 0; i < KD / 16; i++) {
            if (i * 16 % KV_GROUP == 0) scale = key_scales<Cache>(k + 16 * KEY_PITCH, i * 16, lane);
            uint32_t b[4];
            load_b_rows(b, k + i * 16, KEY_PITCH, lane, scale);
            mma_pair(s[0], s[1], qa[i], b);
        }
        __syncwarp();
        copy_keys(j + STAGES, stage);
        if (valid < 16) {
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= valid) s[i / 4][i % 4] = -INFINITY;
        }
        if (j * PAGE < hidden) {
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (i / 4 * 8 + lane % 4 * 2 + i % 2 < hidden - j * PAGE) s[i / 4][i % 4] = -INFINITY;
        }
        const float2 correction = online_softmax(s, max, sum, scale_log2);
        uint32_t p[4];
        scores_as_a(p, s[0], s[1]);
        rescale(o, correction);
        copy_async_wait<2 * STAGES - 1>();
        __syncwarp();
        const Cache* v = k + KEYS;
#pragma unroll
        for (int n = 0; n < VD / 8; n += 2) {
            if (n * 8 % KV_GROUP == 0) scale = value_scales<Cache>(v + 16 * VALUE_PITCH, n * 8, lane);
            uint32_t b[4];
            load_b_cols(b, v + n * 8, VALUE_PITCH, lane, scale);
            mma_pair(o[n], o[n + 1], p, b);
        }
        __syncwarp();
        copy_values(j + STAGES, stage);
        if (++stage == STAGES) stage = 0;
    }
    copy_async_wait<0>();
    __syncthreads();

    // The warps' results, side by side where the pages were: [4][16][VD + 8] and {max, sum} [4][16].
    constexpr int PITCH = VD + 8;
    float* all = reinterpret_cast<float*>(shared);
    float2* all_states = reinterpret_cast<float2*>(shared + pages_bytes<KD, VD, STAGES, Cache>());
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int h = lane / 4 + 8 * r;
        const float s = quad_sum(sum[r]);
        if (lane % 4 == 0) all_states[warp * 16 + h] = make_float2(max[r], s);
#pragma unroll
        for (int n = 0; n < VD / 8; n++)
            *reinterpret_cast<float2*>(all + (warp * 16 + h) * PITCH + n / 2 * 16 + quad_column<Cache>(lane, n % 2)) =
                quad_of<Cache>(o[n / 2 * 2], o[n / 2 * 2 + 1], r, n % 2);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_heads * value_dim / 4; i += 128) {
        const int h = i / (value_dim / 4), col = i % (value_dim / 4) * 4;
        const float sink = splits == 1 ? sink_of(sinks, first_head + h) : -INFINITY;
        float top = sink;
#pragma unroll
        for (int w = 0; w < 4; w++) top = fmaxf(top, all_states[w * 16 + h].x);
        float s = fast_exp2(sink - top);
        float4 x = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const float2 state = all_states[w * 16 + h];
            const float weight = fast_exp2(state.x - top);
            const float4 y = *reinterpret_cast<const float4*>(all + (w * 16 + h) * PITCH + col);
            s += weight * state.y;
            x = make_float4(x.x + weight * y.x, x.y + weight * y.y, x.z + weight * y.z, x.w + weight * y.w);
        }
        if (splits == 1) {
            const float inverse = 1.0f / s;
            *reinterpret_cast<uint2*>(out + ((size_t)row * heads + first_head + h) * value_dim + col) =
                make_uint2(pack_bf16(x.x * inverse, x.y * inverse), pack_bf16(x.z * inverse, x.w * inverse));
        } else {
            const uint32_t at = state_at + h * splits;
            *reinterpret_cast<float4*>(partial + (size_t)at * value_dim + col) = x;
            if (col == 0) states[at] = make_float2(top, s);
        }
    }
}

#define DECODE_ARGUMENTS(Cache)                                                                                        \
    const bf16 *q, const AS_BYTES(Cache) * keys, const AS_BYTES(Cache) * values, bf16 *out, float *partial,            \
        float2 *states, const int *rows, const int *positions, const int *token_seq, const int *seq_blocks,            \
        const uint32_t *block_table, int heads, int kv_heads, int key_dim, int value_dim, float scale, Window window,  \
        const float *sinks, int table_stride, int early
#define DECODE(name, KD, VD, STAGES, Cache, SHARED)                                                                    \
    static_assert(SHARED == pages_bytes<KD, VD, STAGES, Cache>() + STATES_BYTES, "shared memory of " #name);           \
    KERNEL_TILE(name, KD, VD)                                                                                          \
    KERNEL(name, 128, SHARED, DECODE_ARGUMENTS(Cache)) {                                                               \
        decode<KD, VD, STAGES, Cache>(q, keys, values, out, partial, states, rows, positions, token_seq, seq_blocks,   \
            block_table, heads, kv_heads, key_dim, value_dim, scale, window, sinks, table_stride, early);              \
    }
DECODE(attend_decode_64_64_bf16, 64, 64, 3, bf16, 55808)
DECODE(attend_decode_96_96_bf16, 96, 96, 2, bf16, 53760)
DECODE(attend_decode_128_128_bf16, 128, 128, 2, bf16, 70144)
DECODE(attend_decode_192_128_bf16, 192, 128, 2, bf16, 86528)
DECODE(attend_decode_256_256_bf16, 256, 256, 1, bf16, 68096)
DECODE(attend_decode_64_64_int8, 64, 64, 4, int8, 42496)
DECODE(attend_decode_96_96_int8, 96, 96, 4, int8, 59904)
DECODE(attend_decode_128_128_int8, 128, 128, 4, int8, 76288)
DECODE(attend_decode_192_128_int8, 192, 128, 3, int8, 70016)
DECODE(attend_decode_256_256_int8, 256, 256, 2, int8, 72192)

#define DECODE_WIDE(name, D, STAGES, Cache, SHARED)                                                                    \
    static_assert(D == MOST_VALUE && SHARED == WideRing<D, true, 1, STAGES, Cache>::BYTES, "shared memory of " #name); \
    KERNEL_TILE(name, D, D)                                                                                            \
    KERNEL(name, 128, SHARED, DECODE_ARGUMENTS(Cache)) {                                                               \
        decode_wide<D, true, 1, STAGES, Cache>(                                                                        \
            {{q, key_dim, nullptr, 0}, keys, values, out, partial, states, rows, positions, token_seq, seq_blocks,     \
                block_table, heads, kv_heads, key_dim, value_dim, scale, window, sinks, early});                       \
    }
DECODE_WIDE(attend_decode_512_512_bf16, 512, 2, bf16, 74752)
DECODE_WIDE(attend_decode_512_512_int8, 512, 4, int8, 77824)

// Adds up the shares of a row's head, COMBINE_COLUMNS columns to a block. Shares behind the last one that has something
// are not looked at: in a short context that is nearly all.
constexpr int COMBINE_COLUMNS = 64;
KERNEL(attend_combine, 128, 0, const float* partial, const float2* states, bf16* out, const int* rows, int splits,
    int heads, int value_dim, const float* sinks) {
    begin_short_kernel();
    __shared__ float weights[MAX_SPLITS], maxima[4], sums[4];
    __shared__ int ends[4];
    __shared__ float4 columns[8][16];
    const int item = blockIdx.x, row = rows[item / heads], lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (row < 0) return;
    const float2* mine = states + (size_t)item * splits;
    float2 state[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        state[i] = (int)threadIdx.x + 128 * i < splits ? mine[threadIdx.x + 128 * i] : make_float2(-INFINITY, 0.0f);
    const float top = warp_max(fmaxf(state[0].x, state[1].x));
    if (lane == 0) maxima[warp] = top;
    __syncthreads();
    const float sink = sink_of(sinks, item % heads),
                max = fmaxf(fmaxf(fmaxf(maxima[0], maxima[1]), fmaxf(maxima[2], maxima[3])), sink);
    float sum = 0.0f;
    int end = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float weight = fast_exp2(state[i].x - max);
        weights[threadIdx.x + 128 * i] = weight;
        sum += weight * state[i].y;
        if (weight > 0.0f) end = threadIdx.x + 128 * i + 1;
    }
    sum = warp_sum(sum);
    end = (int)warp_max((float)end);
    if (lane == 0) sums[warp] = sum, ends[warp] = end;
    __syncthreads();
    end = max_of(max_of(ends[0], ends[1]), max_of(ends[2], ends[3]));

    const int part = threadIdx.x / 16, col = blockIdx.y * COMBINE_COLUMNS + threadIdx.x % 16 * 4;
    float4 x = make_float4(0, 0, 0, 0);
    if (col < value_dim) {
        const float* from = partial + (size_t)item * splits * value_dim + col;
        for (int first = part; first < end; first += 64)
#pragma unroll
            for (int s = first; s < first + 64; s += 8) {
                const float weight = weights[s];
                float4 y = make_float4(0, 0, 0, 0);
                if (weight > 0.0f)
                    y = *reinterpret_cast<const float4*>(
                        from + (size_t)s * value_dim); // otherwise nothing may be there
                x = make_float4(x.x + weight * y.x, x.y + weight * y.y, x.z + weight * y.z, x.w + weight * y.w);
            }
    }
    columns[part][threadIdx.x % 16] = x;
    __syncthreads();
    if (part != 0 || col >= value_dim) return;
    for (int i = 1; i < 8; i++) {
        const float4 y = columns[i][threadIdx.x];
        x = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
    }
    const float inverse = 1.0f / (sums[0] + sums[1] + sums[2] + sums[3] + fast_exp2(sink - max));
    *reinterpret_cast<uint2*>(out + ((size_t)row * heads + item % heads) * value_dim + col) =
        make_uint2(pack_bf16(x.x * inverse, x.y * inverse), pack_bf16(x.z * inverse, x.w * inverse));
}
