// The rule of kda.cuh in chunks of 32 tokens, for sequences of many tokens.
//
// With D[i, j] the product of the decays of tokens j + 1 to i, a vector over the numbers of a key, and S what was
// before the chunk, what its tokens write, U, solves (arXiv 2510.26692, section 3; rows are tokens):
//
//   A[i, j] = beta_i sum(k_i D[i, j] k_j)  for j < i,           T = (I + A)^-1 diag(beta)
//   U = T (V - (D[., -1] K) S),                                 P[i, j] = sum(q_i D[i, j] k_j)  for j <= i
//   out = (D[., -1] Q) S + P U,                                 S = diag(D[31, -1]) S + (D[31, .] K)^T U
//
// T and P of all chunks are made at once (kda_within), on f32 units, a key being decayed from token to token: nothing
// is divided by a decay, so none overflows. The state then walks the chunks on tensor cores (kda_across), which makes
// the decayed keys and queries itself: in memory they would be six times what they are made of. Chunks begin with a
// sequence's first token in the batch.
//
// scratch, by head and row of the batch: triangles [heads, T, 4, 32] bf16, a row of T and of P in two parts each; norms
// [heads, T] of what multiplies a key and a query.
//
//   kda_within    grid (heads, ceil(most tokens of a sequence / KDA_CHUNK), sequences)
//   kda_across    grid (heads, ceil(dim / ACROSS_COLUMNS), sequences)
#include "chunks.cuh"
#include "kda.cuh"

constexpr int KDA_CHUNK = 32, KDA_TRIANGLES = 4; // rows of 32 in `triangles`
constexpr int KDA_PITCH = KDA_CHUNK + 8, WITHIN_THREADS = 256, WITHIN_PARTS = WITHIN_THREADS / KDA_CHUNK,
              WITHIN_FOURS = MAX_KEY / WITHIN_PARTS / 4, WITHIN_PITCH = KDA_CHUNK + 4;

KERNEL(kda_within, WITHIN_THREADS, 0, const bf16* qkv, KdaGates gates, bf16* triangles, float2* norms, DeltaBatch batch,
    KdaShape shape, int rows) {
    __shared__ __align__(16) bf16 keys[KDA_CHUNK * KEY_PITCH], queries[KDA_CHUNK * KEY_PITCH];
    __shared__ float4 decays[KDA_CHUNK][MAX_KEY / 4];
    __shared__ __align__(16) float across[KDA_CHUNK * WITHIN_PITCH];
    __shared__ float read[KDA_CHUNK * WITHIN_PITCH], betas[KDA_CHUNK];
    __shared__ float2 scales[KDA_CHUNK];
    static_assert(KDA_CHUNK * WITHIN_PITCH * 4 <= sizeof keys, "T lies there");
    begin_kernel();
    const int tid = threadIdx.x, lane = tid % WARP, head = blockIdx.x, s = blockIdx.z;
    const int first = batch.seq_first[s] + blockIdx.y * KDA_CHUNK, end = batch.seq_first[s + 1],
              tokens = min(KDA_CHUNK, end - first), dim = shape.dim, inner = shape.heads * dim;
    if (end - batch.seq_first[s] < CHUNKED_FROM || tokens <= 0) return;
    const bf16* from = qkv + (size_t)first * 3 * inner + head * dim;
    copy_rows<KDA_CHUNK, MAX_KEY, WITHIN_THREADS>(queries, from, 3 * inner, dim, tokens, tid);
    copy_rows<KDA_CHUNK, MAX_KEY, WITHIN_THREADS>(keys, from + inner, 3 * inner, dim, tokens, tid);
    copy_async_commit();
    const float rate = gates.rates[head];
    for (int t = tid / WARP; t < KDA_CHUNK; t += WITHIN_THREADS / WARP) {
        float4 decay = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
        if (t < tokens && 4 * lane < dim) {
            const float4 f = four_of(gates.f + (size_t)(first + t) * inner + head * dim + 4 * lane);
            const float* bias = gates.dt_bias + head * dim + 4 * lane;
            decay = make_float4(decay_of(shape, rate, f.x, bias[0]), decay_of(shape, rate, f.y, bias[1]),
                decay_of(shape, rate, f.z, bias[2]), decay_of(shape, rate, f.w, bias[3]));
        }
        decays[t][lane] = decay;
    }
    if (tid < KDA_CHUNK)
        betas[tid] = tid < tokens ? sigmoid(gates.b[(size_t)(first + tid) * shape.heads + head]) : 0.0f;
    copy_async_wait<0>();
    __syncthreads();
    if (tid < 2 * KDA_CHUNK) {
        const bf16* row = (tid < KDA_CHUNK ? keys : queries) + tid % KDA_CHUNK * KEY_PITCH;
        float squares = 0.0f;
#pragma unroll
        for (int k = 0; k < MAX_KEY; k += 4) squares += dot(four_of(row + k), four_of(row + k));
        const float scale = rsqrtf(squares + L2_EPS);
        if (tid < KDA_CHUNK)
            scales[tid].x = scale;
        else
            scales[tid - KDA_CHUNK].y = scale * rsqrtf((float)dim);
    }
    __syncthreads();

    // Eight threads take a key through the tokens behind it.
    const int j = tid / WITHIN_PARTS, part = tid % WITHIN_PARTS;
    float4 key[WITHIN_FOURS] = {}; // nothing before its token
    for (int i = tid / WARP * (WARP / WITHIN_PARTS); i < KDA_CHUNK; i++) {
        float of_key = 0.0f, of_query = 0.0f;
#pragma unroll
        for (int n = 0; n < WITHIN_FOURS; n++) {
            const int at = n * WITHIN_PARTS + part;
            const float4 decay = decays[i][at], k = four_of(keys + i * KEY_PITCH + 4 * at);
            key[n].x *= decay.x, key[n].y *= decay.y, key[n].z *= decay.z, key[n].w *= decay.w;
            of_key += dot(k, key[n]);
            if (i == j) key[n] = k;
            of_query += dot(four_of(queries + i * KEY_PITCH + 4 * at), key[n]);
        }
#pragma unroll
        for (int d = 1; d < WITHIN_PARTS; d *= 2) {
            of_key += __shfl_xor_sync(ALL_LANES, of_key, d);
            of_query += __shfl_xor_sync(ALL_LANES, of_query, d);
        }
        if (part == 0) {
            across[i * WITHIN_PITCH + j] = of_key * betas[i] * scales[i].x * scales[j].x;
            read[i * WITHIN_PITCH + j] = of_query * scales[i].y * scales[j].x;
        }
    }
    __syncthreads();

    // (I + A)^-1 by forward substitution, a column to a thread.
    float* inverse = reinterpret_cast<float*>(keys);
    if (tid < KDA_CHUNK) {
        float x[KDA_CHUNK];
#pragma unroll
        for (int i = 0; i < KDA_CHUNK; i++) {
            x[i] = i == tid ? 1.0f : 0.0f;
#pragma unroll
            for (int k = 0; k < i; k++) x[i] -= across[i * WITHIN_PITCH + k] * x[k];
            inverse[i * WITHIN_PITCH + tid] = x[i] * betas[tid];
        }
    }
    __syncthreads();
    triangles += ((size_t)head * rows + first) * KDA_TRIANGLES * KDA_CHUNK;
    for (int at = tid; at < KDA_CHUNK * KDA_CHUNK / 2; at += WITHIN_THREADS) {
        const int i = at / (KDA_CHUNK / 2), k = at % (KDA_CHUNK / 2) * 2;
        if (i >= tokens) break;
        const float *t = inverse + i * WITHIN_PITCH + k, *p = read + i * WITHIN_PITCH + k;
        const Split of_t = split(t[0], t[1]), of_p = split(k <= i ? p[0] : 0.0f, k < i ? p[1] : 0.0f);
        uint32_t* to = reinterpret_cast<uint32_t*>(triangles + (size_t)i * KDA_TRIANGLES * KDA_CHUNK + k);
        to[0] = of_t.high;
        to[KDA_CHUNK / 2] = of_t.low;
        to[KDA_CHUNK] = of_p.high;
        to[KDA_CHUNK * 3 / 2] = of_p.low;
    }
    if (tid < tokens) norms[(size_t)head * rows + first + tid] = scales[tid];
}

// Shared memory: queries, keys and f as they come, what becomes of them in two parts each (keys and queries for S, keys
// to be written), triangles, values (and the warps' results), decays of the chunk's halves, norms.
constexpr int KDA_TILE = KDA_CHUNK * KEY_PITCH;
constexpr int KDA_ACROSS_BYTES = 9 * KDA_TILE * 2 + KDA_TRIANGLES * KDA_CHUNK * KDA_PITCH * 2 +
    KDA_CHUNK * VALUE_PITCH * 2 + 2 * MAX_KEY * 4 + KDA_CHUNK * 8;

#define KDA_ACROSS_SHARED 94464
KERNEL(kda_across, ACROSS_THREADS, KDA_ACROSS_SHARED, const bf16* qkv, KdaGates gates, const bf16* triangles,
    const float2* norms, float* states, bf16* out, DeltaBatch batch, KdaShape shape, int rows) {
    static_assert(KDA_ACROSS_SHARED == KDA_ACROSS_BYTES, "shared memory");
    DYNAMIC_SHARED(unsigned char, shared);
    begin_kernel();
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, head = blockIdx.x, s = blockIdx.z;
    const int first = batch.seq_first[s], end = batch.seq_first[s + 1], dim = shape.dim, inner = shape.heads * dim,
              column = blockIdx.y * ACROSS_COLUMNS;
    if (end - first < CHUNKED_FROM) return;
    bf16 *raw = reinterpret_cast<bf16*>(shared), *made = raw + 3 * KDA_TILE, *triangle_tiles = made + 6 * KDA_TILE,
         *values = triangle_tiles + KDA_TRIANGLES * KDA_CHUNK * KDA_PITCH;
    float* halves = reinterpret_cast<float*>(values + KDA_CHUNK * VALUE_PITCH); // [2, MAX_KEY]
    float2* norm_tile = reinterpret_cast<float2*>(halves + 2 * MAX_KEY);

    auto copy_raw = [&](int chunk) {
        const int from = first + chunk * KDA_CHUNK, tokens = end - from;
        const bf16* row = qkv + (size_t)from * 3 * inner + head * dim;
        if (tokens > 0) {
            copy_rows<KDA_CHUNK, MAX_KEY, ACROSS_THREADS>(raw, row, 3 * inner, dim, tokens, tid);
            copy_rows<KDA_CHUNK, MAX_KEY, ACROSS_THREADS>(raw + KDA_TILE, row + inner, 3 * inner, dim, tokens, tid);
            copy_rows<KDA_CHUNK, MAX_KEY, ACROSS_THREADS>(
                raw + 2 * KDA_TILE, gates.f + (size_t)from * inner + head * dim, inner, dim, tokens, tid);
        }
        copy_async_commit();
    };
    auto copy_rest = [&](int chunk) {
        const int from = first + chunk * KDA_CHUNK, tokens = end - from;
        const bf16* row = triangles + ((size_t)head * rows + from) * KDA_TRIANGLES * KDA_CHUNK;
        for (int at = tid; at < KDA_TRIANGLES * KDA_CHUNK * KDA_CHUNK / 8; at += ACROSS_THREADS) {
            const int t = at / (KDA_TRIANGLES * KDA_CHUNK / 8), i = at / (KDA_CHUNK / 8) % KDA_TRIANGLES,
                      j = at % (KDA_CHUNK / 8) * 8;
            copy_async_16(triangle_tiles + (i * KDA_CHUNK + t) * KDA_PITCH + j,
                row + (min(t, tokens - 1) * KDA_TRIANGLES + i) * KDA_CHUNK + j, t < tokens);
        }
        copy_rows<KDA_CHUNK, ACROSS_COLUMNS, ACROSS_THREADS>(values,
            qkv + (size_t)from * 3 * inner + 2 * inner + head * dim + column, 3 * inner, dim - column, tokens, tid);
        copy_async_commit();
    };
    auto norm_of = [&](int chunk) {
        const int t = first + chunk * KDA_CHUNK + tid;
        return tid < KDA_CHUNK && t < end ? norms[(size_t)head * rows + t] : make_float2(0.0f, 0.0f);
    };

    const StateColumns columns = {
        states + ((size_t)batch.seq_slots[s] * shape.heads + head) * dim * dim, dim, dim, column + warp * 16};
    float state[MAX_KEY / 8][4];
    copy_raw(0);
    float2 norm = norm_of(0);
    columns.load(state, lane, batch.positions[first] == 0);
    // A thread makes two numbers of the keys and queries of half a chunk.
    constexpr int HALF = KDA_CHUNK / 2;
    const int half = tid / (MAX_KEY / 2), mine = tid % (MAX_KEY / 2) * 2;
    const float rate = gates.rates[head];
    const float2 bias =
        mine < dim ? *reinterpret_cast<const float2*>(gates.dt_bias + head * dim + mine) : make_float2(0.0f, 0.0f);

#pragma unroll 1
    for (int chunk = 0; first + chunk * KDA_CHUNK < end; chunk++) {
        const int from = first + chunk * KDA_CHUNK, tokens = min(KDA_CHUNK, end - from);
        copy_async_wait<0>();
        __syncthreads();
        copy_rest(chunk);
        {
            float2 decays[HALF], all = make_float2(1.0f, 1.0f);
#pragma unroll
            for (int i = 0; i < HALF; i++) {
                const int t = half * HALF + i;
                const uint32_t f = *reinterpret_cast<const uint32_t*>(raw + 2 * KDA_TILE + t * KEY_PITCH + mine);
                decays[i] = t < tokens
                    ? make_float2(decay_of(shape, rate, low_f32(f), bias.x), decay_of(shape, rate, high_f32(f), bias.y))
                    : make_float2(1.0f, 1.0f);
                all.x *= decays[i].x, all.y *= decays[i].y;
            }
            *reinterpret_cast<float2*>(halves + half * MAX_KEY + mine) = all;
            if (tid < KDA_CHUNK) norm_tile[tid] = norm;
            norm = norm_of(chunk + 1);
            __syncthreads();
            const float2 other = *reinterpret_cast<const float2*>(halves + (1 - half) * MAX_KEY + mine);
            auto write = [&](int tile, int t, float2 x) {
                const Split parts = split(x.x, x.y);
                bf16* to = made + 2 * tile * KDA_TILE + t * KEY_PITCH + mine;
                *reinterpret_cast<uint32_t*>(to) = parts.high;
                *reinterpret_cast<uint32_t*>(to + KDA_TILE) = parts.low;
            };
            auto row_of = [&](const bf16* tile, int t, float by) {
                const uint32_t x = *reinterpret_cast<const uint32_t*>(tile + t * KEY_PITCH + mine);
                return make_float2(low_f32(x) * by, high_f32(x) * by);
            };
            float2 until = half ? other : make_float2(1.0f, 1.0f);
#pragma unroll
            for (int i = 0; i < HALF; i++) {
                const int t = half * HALF + i;
                const float2 q = row_of(raw, t, norm_tile[t].y), k = row_of(raw + KDA_TILE, t, norm_tile[t].x);
                until.x *= decays[i].x, until.y *= decays[i].y;
                write(0, t, make_float2(k.x * until.x, k.y * until.y));
                write(1, t, make_float2(q.x * until.x, q.y * until.y));
            }
            float2 after = half ? make_float2(1.0f, 1.0f) : other;
#pragma unroll
            for (int i = HALF - 1; i >= 0; i--) {
                const int t = half * HALF + i;
                const float2 k = row_of(raw + KDA_TILE, t, norm_tile[t].x);
                write(2, t, make_float2(k.x * after.x, k.y * after.y));
                after.x *= decays[i].x, after.y *= decays[i].y;
            }
        }
        __syncthreads();
        copy_raw(chunk + 1);

        float sums[2][KDA_CHUNK / 8][4] = {};
        read_state<KDA_CHUNK, 2>(sums, {made, made + 2 * KDA_TILE}, state, lane);
        copy_async_wait<1>();
        __syncthreads();
        auto &u = sums[0], &o = sums[1];
        each_value<KDA_CHUNK>(u, values, warp, lane, [&](float& x, float v, int) { x = v - x; });
        float written[KDA_CHUNK / 8][4] = {};
        multiply_triangle<KDA_CHUNK>(written, u, triangle_tiles, lane);
        multiply_triangle<KDA_CHUNK>(o, written, triangle_tiles + 2 * KDA_CHUNK * KDA_PITCH, lane);
        write_results<KDA_CHUNK>(
            out + (size_t)from * inner + head * dim + column, inner, dim - column, o, values, tokens, warp, lane);
#pragma unroll
        for (int n = 0; n < MAX_KEY / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int k = n * 8 + lane % 4 * 2 + i % 2;
                state[n][i] *= halves[k] * halves[MAX_KEY + k];
            }
        write_state<KDA_CHUNK, 2>(state, written, made + 4 * KDA_TILE, lane);
    }
    columns.store(state, lane);
}
