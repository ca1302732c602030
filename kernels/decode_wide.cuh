// Attention of single query rows with heads of more than 256 numbers, and with latents: a split of the context walked
// by warps that share out its columns.
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
#pragma once
#include "decode.cuh"

constexpr int UNIT = 16, MOST_VALUE = 512;
constexpr int EXCHANGE = 2 * 4 * 2 * WARP; // float4: two buffers of [part][2 tiles of 8 positions][lane]

// A unit, from position `first` of a page on, into its tile, whose columns past the key become zero (INT8: finite); its
// scales behind the tile. Eight threads to a row; groups of 128 threads take turns.
template <int D, int GROUPS, class T>
__device__ __forceinline__ void copy_unit(T* tile, const T* page, int first, int dim, int rows) {
    constexpr int CHUNK = 16 / sizeof(T);
    copy_scales<UNIT, D>(tile + UNIT * pitch_of<T>(D), page, dim, first, threadIdx.x);
    const T* from = page + first * dim;
    if (sizeof(T) == 1 && dim % 16) {
        if (threadIdx.x < 128) copy_rows<UNIT, D, 128>(tile, from, dim, dim, rows, threadIdx.x);
        return;
    }
    const int row = threadIdx.x % 128 / 8, col = threadIdx.x % 8 * CHUNK;
    tile += row * pitch_of<T>(D) + col;
    from += row * dim + col;
#pragma unroll
    for (int k = 0; k < D; k += 8 * CHUNK) {
        if (k / (8 * CHUNK) % GROUPS == (int)threadIdx.x / 128 && col + k < D)
            copy_async_16(tile + k, from + k, row < rows && col + k < dim);
    }
}

// How a kernel of keys of up to KD numbers lays out its shared memory: a ring of units, then the scores that the warps
// of a group of 16 heads exchange. A unit with OWN_VALUES is keys and behind them values; without, values are the first
// numbers of the keys.
template <int KD, bool OWN_VALUES, int GROUPS, int STAGES, class Cache> struct WideRing {
    static constexpr int KEY_PITCH = pitch_of<Cache>(KD),
                         VALUE_PITCH = OWN_VALUES ? pitch_of<Cache>(MOST_VALUE) : KEY_PITCH,
                         KEYS = UNIT * KEY_PITCH + scales_len<Cache>(KD),
                         TILE = KEYS + (OWN_VALUES ? UNIT * VALUE_PITCH + scales_len<Cache>(MOST_VALUE) : 0),
                         TILES_BYTES = STAGES * TILE * (int)sizeof(Cache), BYTES = TILES_BYTES + GROUPS * EXCHANGE * 16;
};

// Queries, heads without gaps but in two places: the first `most` numbers of each head, and the others, whose heads are
// `rest_pitch` apart.
struct Queries {
    const bf16* first;
    int most;
    const bf16* rest;
    int rest_pitch;
};

// What a row of the batch asks of a cache; MLA has no values and one KV head.
template <class Cache> struct WideDecode {
    Queries q;
    const Cache *keys, *values;
    bf16* out;
    float* partial;
    float2* states;
    const int *rows, *positions, *token_seq, *seq_blocks;
    const uint32_t* block_table;
    int heads, kv_heads, key_dim, value_dim;
    float scale;
    Window window;
    const float* sinks;
    int early;
};

template <int KD, bool OWN_VALUES, int GROUPS, int STAGES, class Cache>
__device__ __forceinline__ void decode_wide(const WideDecode<Cache>& a) {
    using Ring = WideRing<KD, OWN_VALUES, GROUPS, STAGES, Cache>;
    DYNAMIC_SHARED(unsigned char, shared);
    if (!a.early) begin_short_kernel();
    const int lane = threadIdx.x % WARP, part = threadIdx.x / WARP % 4, group = threadIdx.x / 128, split = blockIdx.x,
              splits = gridDim.x, row = __ldcg(a.rows + blockIdx.z), key_dim = a.key_dim, value_dim = a.value_dim;
    const int shared_by = a.heads / a.kv_heads, parts = div_ceil(shared_by, 16 * GROUPS), kv_head = blockIdx.y / parts,
              at_head = (blockIdx.y % parts * GROUPS + group) * 16, first_head = kv_head * shared_by + at_head,
              num_heads = min(16, shared_by - at_head); // may be negative
    const int last = row < 0 ? -1 : __ldcg(a.positions + row), first = first_seen(a.window, last),
              skipped = first / UNIT, total = last / UNIT + 1 - skipped;
    const Share own = share_of(total, split, splits);
    const int begin = skipped + own.begin, count = own.count;
    const uint32_t* table = a.block_table;
    uint32_t page = 0, next = 0; // of the last copy, and of the next one, asked for before
    if (row >= 0 && count > 0) {
        table += __ldcg(a.seq_blocks + __ldcg(a.token_seq + row));
        next = __ldcg(table + begin * UNIT / PAGE);
    }
    if (a.early) begin_short_kernel();
    if (row < 0) return;
    const uint32_t state_at =
        (blockIdx.z * a.heads + first_head) * splits + split; // of the first head; the next one's is `splits` further
    if (count == 0) {
        if ((int)threadIdx.x % 128 < num_heads)
            a.states[state_at + threadIdx.x % 128 * splits] = make_float2(-INFINITY, 0.0f);
        return;
    }

    // Steps of 16 dimensions part, part + 4, ... What lies past the key's or the value's last dimension is multiplied,
    // too: zeros, or columns that are not stored.
    constexpr int STEPS = KD / 16 / 4;
    uint32_t qa[STEPS][4];
    const bf16 *first_of[2], *rest_of[2]; // of this lane's two heads, from number 0 on
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const size_t head = (size_t)row * a.heads + first_head + lane / 4 + 8 * r;
        first_of[r] = a.q.first + head * a.q.most;
        rest_of[r] = a.q.rest + head * a.q.rest_pitch - a.q.most;
    }
    load_queries<Cache, STEPS, 4>(
        qa, [&](int r, int col) { return (col < a.q.most ? first_of[r] : rest_of[r]) + col; }, num_heads, key_dim, part,
        lane);

    Cache* tiles = reinterpret_cast<Cache*>(shared);
    const int left = last + 1 - begin * UNIT, hidden = first - begin * UNIT;
    auto rows_of = [&](int u) { return left - u * UNIT; };
    auto in_page = [&](int u) { return (begin + u) * UNIT % PAGE; };
    // Keys of unit u; of their own, values of the unit before.
    constexpr int AHEAD = OWN_VALUES ? STAGES : STAGES - 1;
    auto copy = [&](int u) {
        const uint32_t before = page;
        page = next;
        if (u < count) {
            next = table[(begin + min(u + 1, count - 1)) * UNIT / PAGE];
            copy_unit<KD, GROUPS>(tiles + u % STAGES * Ring::TILE, page_of(a.keys, page, a.kv_heads, kv_head, key_dim),
                in_page(u), key_dim, rows_of(u));
        }
        if (OWN_VALUES && u > 0 && u <= count)
            copy_unit<MOST_VALUE, GROUPS>(tiles + (u - 1) % STAGES * Ring::TILE + Ring::KEYS,
                page_of(a.values, before, a.kv_heads, kv_head, value_dim), in_page(u - 1), value_dim, rows_of(u - 1));
        copy_async_commit();
    };
    // Scores of each part.
    float4* exchange = reinterpret_cast<float4*>(shared + Ring::TILES_BYTES) + group * EXCHANGE;
    auto scores = [&](int u) {
        const Cache* tile = tiles + u % STAGES * Ring::TILE;
        float s[2][2][4] = {}; // two chains of sums: a product need not wait for the one before
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            uint32_t b[4];
            const int column = (part + 4 * i) * 16;
            load_b_rows(b, tile + column, Ring::KEY_PITCH, lane,
                key_scales<Cache>(tile + UNIT * Ring::KEY_PITCH, column, lane));
            mma_pair(s[i % 2][0], s[i % 2][1], qa[i], b);
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
            exchange[((u % 2 * 4 + part) * 2 + n) * WARP + lane] = make_float4(
                s[0][n][0] + s[1][n][0], s[0][n][1] + s[1][n][1], s[0][n][2] + s[1][n][2], s[0][n][3] + s[1][n][3]);
    };
#pragma unroll
    for (int u = 0; u < AHEAD; u++) copy(u);
    copy_async_wait<AHEAD - 1>();
    __syncthreads();
    scores(0);

    float o[16][4], max[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < 16; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[n][i] = 0.0f;
    const float scale_log2 = a.scale * LOG2_E;
    for (int u = 0; u < count; u++) {
        copy_async_wait<AHEAD - 2>();
        __syncthreads();
        copy(u + AHEAD);
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
        if (u * UNIT < hidden) {
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (i / 4 * 8 + lane % 4 * 2 + i % 2 < hidden - u * UNIT) s[i / 4][i % 4] = -INFINITY;
        }
        const float2 correction = online_softmax(s, max, sum, scale_log2);
        rescale(o, correction);
        uint32_t p[4];
        scores_as_a(p, s[0], s[1]);
        const Cache* values = tiles + u % STAGES * Ring::TILE + (OWN_VALUES ? Ring::KEYS : 0);
        uint2 scale;
#pragma unroll
        for (int n = 0; n < 16; n += 2) {
            const int column = part * 128 + n * 8;
            if (n * 8 % KV_GROUP == 0) scale = value_scales<Cache>(values + UNIT * Ring::VALUE_PITCH, column, lane);
            uint32_t b[4];
            load_b_cols(b, values + column, Ring::VALUE_PITCH, lane, scale);
            mma_pair(o[n], o[n + 1], p, b);
        }
    }

#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int h = lane / 4 + 8 * r;
        const float total_sum = quad_sum(sum[r]);
        if (h >= num_heads) continue;
        const float sink = splits == 1 ? sink_of(a.sinks, first_head + h) : -INFINITY,
                    inverse = 1.0f / (sink == -INFINITY ? total_sum : total_sum + fast_exp2(sink - max[r]));
        const uint32_t at = state_at + h * splits;
        if (splits > 1 && part == 0 && lane % 4 == 0) a.states[at] = make_float2(max[r], total_sum);
#pragma unroll
        for (int n = 0; n < 16; n++) {
            const int col = part * 128 + n / 2 * 16 + quad_column<Cache>(lane, n % 2);
            if (col >= value_dim) continue;
            const float2 x = quad_of<Cache>(o[n / 2 * 2], o[n / 2 * 2 + 1], r, n % 2);
            if (splits == 1)
                *reinterpret_cast<uint32_t*>(a.out + ((size_t)row * a.heads + first_head + h) * value_dim + col) =
                    pack_bf16(x.x * inverse, x.y * inverse);
            else
                *reinterpret_cast<float2*>(a.partial + (size_t)at * value_dim + col) = x;
        }
    }
}
