// The delta rule of delta_net.cuh in chunks of 64 tokens, on tensor cores, for sequences of many tokens.
//
// With g the sum of the logarithms of a chunk's decays up to and with a token, and S what was before the chunk, what
// its tokens write, U, solves (arXiv 2412.06464, section 3.3; rows are tokens):
//
//   A[i, j] = beta_i k_i . k_j exp(g_i - g_j)  for j < i,       T = (I + A)^-1 diag(beta)
//   U = T (V - diag(exp(g)) K S),                               P[i, j] = q_i . k_j exp(g_i - g_j)  for j <= i
//   out = diag(exp(g)) Q S + P U,                               S = exp(g_64) S + (diag(exp(g_64 - g)) K)^T U
//
// T and P of all chunks are made at once (delta_net_within); the state then walks the chunks (delta_net_across). Only
// differences g_i - g_j with i >= j are ever raised: none overflows. Chunks begin with a sequence's first token in the
// batch.
//
// K, Q and V are bf16 as the convolution left them, and what norms them is multiplied later. chunks.cuh says how good
// the rest is.
//
// scratch, by head and row of the batch: triangles [value_heads, T, 4, 64] bf16, a row of T and of P in two parts each;
// scales [value_heads, T] of {decay of the chunk; what multiplies k . S, q . S, and k when it is written}.
//
//   delta_net_within    grid (value_heads, ceil(most tokens of a sequence / CHUNK), sequences)
//   delta_net_across    grid (value_heads, ceil(value_dim / ACROSS_COLUMNS), sequences)
#include "chunks.cuh"

constexpr int CHUNK = 64, CHUNK_THREADS = 128, TRIANGLES = 4; // rows of 64 in `triangles`
constexpr int CHUNK_PITCH = CHUNK + 8;

// A's transposed, f32, four neighbours at an address of 16 bytes; T by rows.
constexpr int A_PITCH = CHUNK + 4, T_PITCH = CHUNK + 1;

KERNEL(delta_net_within, CHUNK_THREADS, 0, const bf16* mixed, DeltaGates gates, bf16* triangles, float4* scales,
    DeltaBatch batch, DeltaShape shape, int rows) {
    __shared__ __align__(16) bf16 keys[CHUNK * KEY_PITCH], queries[CHUNK * KEY_PITCH];
    __shared__ float logs[CHUNK], betas[CHUNK], norms[2][CHUNK];
    __shared__ float2 sums[CHUNK]; // g in two parts: differences of large ones must be good as well
    static_assert(CHUNK * A_PITCH * 4 <= sizeof keys && CHUNK * T_PITCH * 4 <= sizeof queries, "A and T lie there");
    begin_kernel();
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, head = blockIdx.x, s = blockIdx.z;
    const int first = batch.seq_first[s] + blockIdx.y * CHUNK, end = batch.seq_first[s + 1],
              tokens = min(CHUNK, end - first), key_dim = shape.key_dim;
    if (end - batch.seq_first[s] < CHUNKED_FROM || tokens <= 0) return;
    const int keys_dim = shape.key_heads * key_dim, channels = 2 * keys_dim + shape.value_heads * shape.value_dim;
    const bf16* from = mixed + (size_t)first * channels + head / (shape.value_heads / shape.key_heads) * key_dim;
    copy_rows<CHUNK, MAX_KEY, CHUNK_THREADS>(queries, from, channels, key_dim, tokens, tid);
    copy_rows<CHUNK, MAX_KEY, CHUNK_THREADS>(keys, from + keys_dim, channels, key_dim, tokens, tid);
    copy_async_commit();
    if (tid < CHUNK) {
        const float2 gate =
            tid < tokens ? log_decay_and_beta(gates, first + tid, head, shape.value_heads) : make_float2(0.0f, 0.0f);
        logs[tid] = fmaxf(gate.x, -1e4f); // nothing is left as well, and differences are numbers
        betas[tid] = gate.y;
    }
    copy_async_wait<0>();
    __syncthreads();
    if (tid < CHUNK) {
        double sum = 0.0;
        for (int j = 0; j <= tid; j++) sum += logs[j];
        sums[tid] = make_float2((float)sum, (float)(sum - (float)sum));
    }
    {
        const bf16* row = (tid < CHUNK ? queries : keys) + tid % CHUNK * KEY_PITCH;
        float squares = 0.0f;
#pragma unroll
        for (int k = 0; k < MAX_KEY; k += 8) {
            const uint4 x = *reinterpret_cast<const uint4*>(row + k);
            squares += low_f32(x.x) * low_f32(x.x) + high_f32(x.x) * high_f32(x.x) + low_f32(x.y) * low_f32(x.y) +
                high_f32(x.y) * high_f32(x.y) + low_f32(x.z) * low_f32(x.z) + high_f32(x.z) * high_f32(x.z) +
                low_f32(x.w) * low_f32(x.w) + high_f32(x.w) * high_f32(x.w);
        }
        norms[tid / CHUNK][tid % CHUNK] = rsqrtf(squares + L2_EPS) * (tid < CHUNK ? rsqrtf((float)key_dim) : 1.0f);
    }

    // Of a warp's 16 rows, the columns up to the diagonal.
    float of_keys[CHUNK / 8][4] = {}, of_queries[CHUNK / 8][4] = {};
#pragma unroll
    for (int k = 0; k < MAX_KEY; k += 16) {
        uint32_t a[4], q[4];
        load_a(a, keys + warp * 16 * KEY_PITCH + k, KEY_PITCH, lane);
        load_a(q, queries + warp * 16 * KEY_PITCH + k, KEY_PITCH, lane);
#pragma unroll
        for (int n = 0; n < CHUNK / 16; n++) {
            if (n > warp) break;
            uint32_t b[4];
            load_b_rows(b, keys + n * 16 * KEY_PITCH + k, KEY_PITCH, lane);
            mma_pair(of_keys[2 * n], of_keys[2 * n + 1], a, b);
            mma_pair(of_queries[2 * n], of_queries[2 * n + 1], q, b);
        }
    }
    __syncthreads();
    float *across = reinterpret_cast<float*>(keys), *inverse = reinterpret_cast<float*>(queries);
    triangles += ((size_t)head * rows + first) * TRIANGLES * CHUNK;
    auto between = [&](int i, int j) { return __expf((sums[i].x - sums[j].x) + (sums[i].y - sums[j].y)); };
#pragma unroll
    for (int n = 0; n < CHUNK / 8; n++) {
        if (n / 2 > warp) break;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int i = warp * 16 + lane / 4 + 8 * r, j = n * 8 + lane % 4 * 2;
            float p[2];
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const float scale = j + c <= i ? between(i, j + c) * norms[1][j + c] : 0.0f;
                p[c] = of_queries[n][2 * r + c] * scale * norms[0][i];
                across[(j + c) * A_PITCH + i] =
                    j + c < i ? of_keys[n][2 * r + c] * scale * norms[1][i] * betas[i] : 0.0f;
            }
            if (i >= tokens) continue;
            const Split parts = split(p[0], p[1]);
            uint32_t* to = reinterpret_cast<uint32_t*>(triangles + (size_t)i * TRIANGLES * CHUNK + j);
            to[CHUNK] = parts.high; // of 32 bits: behind T's two rows
            to[CHUNK + CHUNK / 2] = parts.low;
        }
    }
    if (tid < tokens) {
        const float2 g = sums[tid];
        const float until = __expf(g.x + g.y), after = between(CHUNK - 1, tid);
        scales[(size_t)head * rows + first + tid] =
            make_float4(__expf(sums[CHUNK - 1].x), until * norms[1][tid], until * norms[0][tid], after * norms[1][tid]);
    }
    __syncthreads();

    // (I + A)^-1 by forward substitution, a column to a thread, 16 rows at a time.
    if (tid < CHUNK) {
        const int zeros = tid / WARP * WARP; // rows above the warp's columns
        for (int i = 0; i < zeros; i++) inverse[i * T_PITCH + tid] = 0.0f;
#pragma unroll 1
        for (int block = zeros; block < CHUNK; block += 16) {
            float x[16];
#pragma unroll
            for (int i = 0; i < 16; i++) x[i] = block + i == tid ? 1.0f : 0.0f;
#pragma unroll 2
            for (int j = zeros; j < block; j++) {
                const float above = inverse[j * T_PITCH + tid];
#pragma unroll
                for (int i = 0; i < 16; i += 4) {
                    const float4 a = *reinterpret_cast<const float4*>(across + j * A_PITCH + block + i);
                    x[i] -= a.x * above, x[i + 1] -= a.y * above, x[i + 2] -= a.z * above, x[i + 3] -= a.w * above;
                }
            }
#pragma unroll
            for (int j = 0; j < 16; j++) {
                inverse[(block + j) * T_PITCH + tid] = x[j];
#pragma unroll
                for (int i = j + 1; i < 16; i++) x[i] -= across[(block + j) * A_PITCH + block + i] * x[j];
            }
        }
    }
    __syncthreads();
    for (int at = tid; at < CHUNK * CHUNK / 2; at += CHUNK_THREADS) {
        const int i = at / (CHUNK / 2), j = at % (CHUNK / 2) * 2;
        if (i >= tokens) break;
        const Split parts = split(inverse[i * T_PITCH + j] * betas[j], inverse[i * T_PITCH + j + 1] * betas[j + 1]);
        uint32_t* to = reinterpret_cast<uint32_t*>(triangles + (size_t)i * TRIANGLES * CHUNK + j);
        to[0] = parts.high;
        to[CHUNK / 2] = parts.low;
    }
}

// Shared memory: keys of this chunk and the next, queries, triangles, values (and the warps' results), scales of this
// chunk and the next.
constexpr int ACROSS_BYTES = CHUNK * (3 * KEY_PITCH * 2 + TRIANGLES * CHUNK_PITCH * 2 + VALUE_PITCH * 2 + 2 * 16);

// A warp meets others only to copy.
#define ACROSS_SHARED 100352
KERNEL(delta_net_across, ACROSS_THREADS, ACROSS_SHARED, const bf16* qkv, const bf16* mixed, const bf16* triangles,
    const float4* scales, float* inputs, float* heads, bf16* out, DeltaBatch batch, DeltaShape shape, int rows) {
    static_assert(ACROSS_SHARED == ACROSS_BYTES, "shared memory");
    DYNAMIC_SHARED(unsigned char, shared);
    begin_kernel();
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, head = blockIdx.x, s = blockIdx.z;
    const int first = batch.seq_first[s], end = batch.seq_first[s + 1], key_dim = shape.key_dim,
              value_dim = shape.value_dim, column = blockIdx.y * ACROSS_COLUMNS;
    if (end - first < CHUNKED_FROM) return;
    const int keys_dim = shape.key_heads * key_dim, channels = 2 * keys_dim + shape.value_heads * value_dim,
              group = shape.value_heads / shape.key_heads, key_head = head / group;
    bf16 *key_tiles = reinterpret_cast<bf16*>(shared), *queries = key_tiles + 2 * CHUNK * KEY_PITCH,
         *triangle_tiles = queries + CHUNK * KEY_PITCH, *values = triangle_tiles + TRIANGLES * CHUNK * CHUNK_PITCH;
    float4* scale_tiles = reinterpret_cast<float4*>(values + CHUNK * VALUE_PITCH);

    // Two groups of copies to a chunk: what multiplies S, then the rest.
    auto copy_keys = [&](int chunk) {
        const int from = first + chunk * CHUNK, tokens = end - from;
        const bf16* row = mixed + (size_t)from * channels + key_head * key_dim;
        if (tokens > 0) {
            copy_rows<CHUNK, MAX_KEY, ACROSS_THREADS>(queries, row, channels, key_dim, tokens, tid);
            copy_rows<CHUNK, MAX_KEY, ACROSS_THREADS>(
                key_tiles + chunk % 2 * CHUNK * KEY_PITCH, row + keys_dim, channels, key_dim, tokens, tid);
            if (tid < CHUNK)
                copy_async_16(scale_tiles + chunk % 2 * CHUNK + tid,
                    scales + (size_t)head * rows + from + min(tid, tokens - 1), tid < tokens);
        }
        copy_async_commit();
    };
    auto copy_rest = [&](int chunk) {
        const int from = first + chunk * CHUNK, tokens = end - from;
        const bf16* row = triangles + ((size_t)head * rows + from) * TRIANGLES * CHUNK;
#pragma unroll
        for (int i = 0; i < TRIANGLES; i++)
            copy_rows<CHUNK, CHUNK, ACROSS_THREADS>(
                triangle_tiles + i * CHUNK * CHUNK_PITCH, row + i * CHUNK, TRIANGLES * CHUNK, CHUNK, tokens, tid);
        copy_rows<CHUNK, ACROSS_COLUMNS, ACROSS_THREADS>(values,
            mixed + (size_t)from * channels + 2 * keys_dim + head * value_dim + column, channels, value_dim - column,
            tokens, tid);
        copy_async_commit();
    };

    const StateColumns columns = {heads + ((size_t)batch.seq_slots[s] * shape.value_heads + head) * key_dim * value_dim,
        key_dim, value_dim, column + warp * 16};
    const bool fresh = batch.positions[first] == 0;
    float state[MAX_KEY / 8][4];
    copy_keys(0);
    columns.load(state, lane, fresh);

#pragma unroll 1
    for (int chunk = 0; first + chunk * CHUNK < end; chunk++) {
        const int from = first + chunk * CHUNK, tokens = min(CHUNK, end - from);
        const bf16* keys = key_tiles + chunk % 2 * CHUNK * KEY_PITCH;
        const float4* scale = scale_tiles + chunk % 2 * CHUNK;
        copy_async_wait<0>();
        __syncthreads();
        copy_rest(chunk);

        float sums[2][CHUNK / 8][4] = {};
        read_state<CHUNK, 1>(sums, {keys, queries}, state, lane);
        copy_async_wait<0>();
        __syncthreads();
        copy_keys(chunk + 1);

        // V - exp(g) K S.
        auto &u = sums[0], &o = sums[1];
        each_value<CHUNK>(u, values, warp, lane, [&](float& x, float v, int t) { x = v - scale[t].y * x; });
        float written[CHUNK / 8][4] = {};
        multiply_triangle<CHUNK>(written, u, triangle_tiles, lane);
#pragma unroll
        for (int n = 0; n < CHUNK / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[n][i] *= scale[n * 8 + lane % 4 * 2 + i % 2].z;
        multiply_triangle<CHUNK>(o, written, triangle_tiles + 2 * CHUNK * CHUNK_PITCH, lane);
        write_results<CHUNK>(out + ((size_t)from * shape.value_heads + head) * value_dim + column,
            (size_t)shape.value_heads * value_dim, value_dim - column, o, values, tokens, warp, lane);

        // S = exp(g_64) S + what is written.
        const float decay = scale[0].x;
#pragma unroll
        for (int n = 0; n < MAX_KEY / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) state[n][i] *= decay;
#pragma unroll
        for (int n = 0; n < CHUNK / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) written[n][i] *= scale[n * 8 + lane % 4 * 2 + i % 2].w;
        write_state<CHUNK, 1>(state, written, keys, lane);
    }
    columns.store(state, lane);

    // Nobody reads what is kept in this kernel: each block writes its values' channels, one of each group those of
    // query and key.
    float* kept = inputs + (size_t)batch.seq_slots[s] * (shape.taps - 1) * channels;
    auto keep = [&](int c) { keep_inputs(qkv, kept, c, channels, shape.taps, first, end, fresh); };
    if (tid < ACROSS_COLUMNS && column + tid < value_dim) keep(2 * keys_dim + head * value_dim + column + tid);
    if (blockIdx.y == 0 && head % group == 0)
        for (int i = tid; i < 2 * key_dim; i += ACROSS_THREADS)
            keep(i / key_dim * keys_dim + key_head * key_dim + i % key_dim);
}
