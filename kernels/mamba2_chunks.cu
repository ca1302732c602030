// Mamba-2 of mamba2.cuh in chunks of 64 tokens, on tensor cores, for sequences of many tokens.
//
// With g the sum of the logarithms of a chunk's decays up to and with a token, and S what was before the chunk (arXiv
// 2405.21060, section 6; rows are tokens):
//
//   P[i, j] = c_i . b_j exp(g_i - g_j)  for j <= i,             U = diag(d) X
//   y = diag(exp(g)) C S + P U + skip X,                        S = exp(g_64) S + (diag(exp(g_64 - g)) B)^T U
//
// Only differences g_i - g_j with i >= j are ever raised: none overflows. Chunks begin with a sequence's first token in
// the batch. X, B and C are bf16 as the convolution left them; chunks.cuh says how good the rest is.
//
//   mamba2_across    grid (heads, ceil(head_dim / ACROSS_COLUMNS), sequences); y [T, heads * head_dim] bf16
#include "chunks.cuh"
#include "mamba2.cuh"

constexpr int SSM_CHUNK = 64, SSM_PITCH = SSM_CHUNK + 8;

// Shared memory: b of this chunk and the next, c, P in two parts, x (and the warps' results), of each token {d, exp(g),
// exp(g_64 - g)} and g in two parts: differences of large ones must be good as well.
constexpr int SSM_ACROSS_BYTES =
    3 * SSM_CHUNK * KEY_PITCH * 2 + 2 * SSM_CHUNK * SSM_PITCH * 2 + SSM_CHUNK * VALUE_PITCH * 2 + SSM_CHUNK * (16 + 8);

#define SSM_ACROSS_SHARED 81408
KERNEL(mamba2_across, ACROSS_THREADS, SSM_ACROSS_SHARED, const bf16* xbc, const float* dt, Mamba2Weights w,
    float* states, bf16* out, DeltaBatch batch, Mamba2Shape shape) {
    static_assert(SSM_ACROSS_SHARED == SSM_ACROSS_BYTES, "shared memory");
    DYNAMIC_SHARED(unsigned char, shared);
    begin_kernel();
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, head = blockIdx.x, s = blockIdx.z;
    const int first = batch.seq_first[s], end = batch.seq_first[s + 1], rows = shape.state_dim, dim = shape.head_dim,
              column = blockIdx.y * ACROSS_COLUMNS;
    if (end - first < CHUNKED_FROM) return;
    const int inner = shape.heads * dim, channels = inner + 2 * shape.groups * rows,
              at_b = inner + head / (shape.heads / shape.groups) * rows, at_c = at_b + shape.groups * rows;
    bf16 *b_tiles = reinterpret_cast<bf16*>(shared), *c = b_tiles + 2 * SSM_CHUNK * KEY_PITCH,
         *triangle = c + SSM_CHUNK * KEY_PITCH, *values = triangle + 2 * SSM_CHUNK * SSM_PITCH;
    float4* scale = reinterpret_cast<float4*>(values + SSM_CHUNK * VALUE_PITCH);
    float2* sums = reinterpret_cast<float2*>(scale + SSM_CHUNK);

    auto copy_bc = [&](int chunk) {
        const int from = first + chunk * SSM_CHUNK, tokens = end - from;
        const bf16* row = xbc + (size_t)from * channels;
        if (tokens > 0) {
            copy_rows<SSM_CHUNK, MAX_KEY, ACROSS_THREADS>(
                b_tiles + chunk % 2 * SSM_CHUNK * KEY_PITCH, row + at_b, channels, rows, tokens, tid);
            copy_rows<SSM_CHUNK, MAX_KEY, ACROSS_THREADS>(c, row + at_c, channels, rows, tokens, tid);
        }
        copy_async_commit();
    };
    auto copy_x = [&](int chunk) {
        const int from = first + chunk * SSM_CHUNK;
        copy_rows<SSM_CHUNK, ACROSS_COLUMNS, ACROSS_THREADS>(
            values, xbc + (size_t)from * channels + head * dim + column, channels, dim - column, end - from, tid);
        copy_async_commit();
    };
    // The first warp makes a chunk's steps of dt, two tokens to a lane.
    auto dt_of = [&](int chunk, int i) {
        const int t = first + chunk * SSM_CHUNK + 2 * lane + i;
        return warp == 0 && t < end ? dt[(size_t)t * shape.heads + head] : 0.0f;
    };

    const StateColumns columns = {
        states + ((size_t)batch.seq_slots[s] * shape.heads + head) * rows * dim, rows, dim, column + warp * 16};
    const float rate = w.rates[head], bias = w.dt_bias[head], skip = w.skip[head];
    float state[MAX_KEY / 8][4];
    copy_bc(0);
    float2 next = make_float2(dt_of(0, 0), dt_of(0, 1));
    columns.load(state, lane, batch.positions[first] == 0);

#pragma unroll 1
    for (int chunk = 0; first + chunk * SSM_CHUNK < end; chunk++) {
        const int from = first + chunk * SSM_CHUNK, tokens = min(SSM_CHUNK, end - from);
        const bf16* b = b_tiles + chunk % 2 * SSM_CHUNK * KEY_PITCH;
        copy_async_wait<0>();
        __syncthreads();
        copy_x(chunk);
        if (warp == 0) {
            float steps[2], logs[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                steps[i] = 2 * lane + i < tokens ? step_of(i ? next.y : next.x, bias) : 0.0f;
                logs[i] = fmaxf(-rate * steps[i], -1e4f); // nothing is left as well, and differences are numbers
            }
            double sum = (double)logs[0] + logs[1];
#pragma unroll
            for (int d = 1; d < WARP; d *= 2) {
                const double before = __shfl_up_sync(ALL_LANES, sum, d);
                if (lane >= d) sum += before;
            }
            const double last = __shfl_sync(ALL_LANES, sum, WARP - 1);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const double g = i ? sum : sum - logs[1];
                sums[2 * lane + i] = make_float2((float)g, (float)(g - (float)g));
                scale[2 * lane + i] = make_float4(steps[i], __expf((float)g), __expf((float)(last - g)), 0.0f);
            }
            next = make_float2(dt_of(chunk + 1, 0), dt_of(chunk + 1, 1));
        }

        // Of a warp's 16 rows of P, the columns up to the diagonal.
        float p[SSM_CHUNK / 8][4] = {};
#pragma unroll
        for (int k = 0; k < MAX_KEY; k += 16) {
            uint32_t of_c[4];
            load_a(of_c, c + warp * 16 * KEY_PITCH + k, KEY_PITCH, lane);
#pragma unroll
            for (int n = 0; n < SSM_CHUNK / 16; n++) {
                if (n > warp) break;
                uint32_t of_b[4];
                load_b_rows(of_b, b + n * 16 * KEY_PITCH + k, KEY_PITCH, lane);
                mma_pair(p[2 * n], p[2 * n + 1], of_c, of_b);
            }
        }
        __syncthreads();
        auto between = [&](int i, int j) { return __expf((sums[i].x - sums[j].x) + (sums[i].y - sums[j].y)); };
#pragma unroll
        for (int n = 0; n < SSM_CHUNK / 8; n++) {
            if (n / 2 > warp) break;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int i = warp * 16 + lane / 4 + 8 * r, j = n * 8 + lane % 4 * 2;
                const Split parts = split(
                    j <= i ? p[n][2 * r] * between(i, j) : 0.0f, j < i ? p[n][2 * r + 1] * between(i, j + 1) : 0.0f);
                bf16* to = triangle + i * SSM_PITCH + j;
                *reinterpret_cast<uint32_t*>(to) = parts.high;
                *reinterpret_cast<uint32_t*>(to + SSM_CHUNK * SSM_PITCH) = parts.low;
            }
        }
        float y[1][SSM_CHUNK / 8][4] = {};
        read_state<SSM_CHUNK, 1>(y, {c}, state, lane);
        copy_async_wait<0>();
        __syncthreads();
        copy_bc(chunk + 1);

        float u[SSM_CHUNK / 8][4];
        each_value<SSM_CHUNK>(u, values, warp, lane, [&](float& written, float x, int) { written = x; });
#pragma unroll
        for (int n = 0; n < SSM_CHUNK / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float4 of = scale[n * 8 + lane % 4 * 2 + i % 2];
                y[0][n][i] = y[0][n][i] * of.y + skip * u[n][i];
                u[n][i] *= of.x;
            }
        __syncwarp();
        multiply_triangle<SSM_CHUNK>(y[0], u, triangle, lane);
        write_results<SSM_CHUNK>(
            out + (size_t)from * inner + head * dim + column, inner, dim - column, y[0], values, tokens, warp, lane);

        __syncwarp();
        const float decay = scale[SSM_CHUNK - 1].y;
#pragma unroll
        for (int n = 0; n < MAX_KEY / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) state[n][i] *= decay;
#pragma unroll
        for (int n = 0; n < SSM_CHUNK / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) u[n][i] *= scale[n * 8 + lane % 4 * 2 + i % 2].z;
        write_state<SSM_CHUNK, 1>(state, u, b, lane);
    }
    columns.store(state, lane);
}
