// Gated DeltaNet between its projections (arXiv 2412.06464, HF modeling_qwen3_next): the convolution, the delta rule token by token, the gated norm.
//
//   q, k, v = silu(sum over taps of tap * input);   q = q / |q| / sqrt(key_dim), k = k / |k|
//   S = decay S;   S += k (beta (v - S^T k))^T;   out = norm(S^T q) * silu(z)      decay = exp(-rate softplus(a + dt_bias)), beta = sigmoid(b)
//
// A sequence's state is in its slot: inputs [slots, taps - 1, channels] f32, oldest first, and heads [slots, value_heads, key_dim, value_dim] f32; position 0 begins from zeros.
// Channels: queries, then keys [key_heads, key_dim], then values [value_heads, value_dim]. Neighbouring value heads share a query and a key.
// Columns of S depend on no other column, so a head is shared out among blocks; tokens go one by one, which makes chunks exact. What is asked of memory is small: a token of
// a block takes the latency of two dot products.
//
// Launch, in this order:
//   delta_conv    grid (ceil(channels / 128), sequences), 128 threads: qkv [T, channels] bf16 in place
//   delta_rule    grid (value_heads, ceil(value_dim / 32), sequences), 128 threads: out [T, value_heads * value_dim] bf16; key_dim <= 128, a multiple of 4
//   delta_norm    grid (T, ceil(value_heads / 8)), 256 threads: out in place; value_dim even
#include "common.cuh"

struct DeltaBatch {
    const int *seq_first, *seq_slots, *positions;
};

struct DeltaShape {
    int key_heads, value_heads, key_dim, value_dim;
    float eps;
};

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

constexpr int MAX_TAPS = 8, CONV_THREADS = 128;

// Each thread takes a channel through the tokens of a sequence; the inputs that a token still needs are in registers.
KERNEL(delta_conv, CONV_THREADS, bf16* qkv, float* inputs, const float* taps, DeltaBatch batch, int channels, int width) {
    begin_kernel();
    const int c = blockIdx.x * CONV_THREADS + threadIdx.x, s = blockIdx.y, first = batch.seq_first[s], end = batch.seq_first[s + 1];
    if (c >= channels) return;
    float* kept = inputs + (size_t)batch.seq_slots[s] * (width - 1) * channels + c;
    const bool fresh = batch.positions[first] == 0;
    // The last MAX_TAPS - 1 inputs, the newest last, with zero weights for those that are too old.
    float past[MAX_TAPS - 1], tap[MAX_TAPS];
#pragma unroll
    for (int i = 0; i < MAX_TAPS; i++) tap[i] = i >= MAX_TAPS - width ? taps[(size_t)(i - (MAX_TAPS - width)) * channels + c] : 0.0f;
#pragma unroll
    for (int i = 0; i < MAX_TAPS - 1; i++) past[i] = fresh || i < MAX_TAPS - width ? 0.0f : kept[(size_t)(i - (MAX_TAPS - width)) * channels];
#pragma unroll 8
    for (int t = first; t < end; t++) {
        bf16* at = qkv + (size_t)t * channels + c;
        const float x = to_f32(*at);
        float sum = x * tap[MAX_TAPS - 1];
#pragma unroll
        for (int i = 0; i < MAX_TAPS - 1; i++) sum += past[i] * tap[i];
#pragma unroll
        for (int i = 0; i < MAX_TAPS - 2; i++) past[i] = past[i + 1];
        past[MAX_TAPS - 2] = x;
        *at = to_bf16(sum * sigmoid(sum));
    }
#pragma unroll
    for (int i = 0; i < MAX_TAPS - 1; i++)
        if (i >= MAX_TAPS - width) kept[(size_t)(i - (MAX_TAPS - width)) * channels] = past[i];
}

constexpr int RULE_THREADS = 128, COLUMNS = 32, PARTS = RULE_THREADS / COLUMNS, MAX_KEY = 128, STAGED = 16;
constexpr float L2_EPS = 1e-6f; // HF modeling_qwen3_next, l2norm

// A column of the state lies in the registers of four neighbouring threads: part p has inputs 16 i + 4 p and the three behind them.
KERNEL(delta_rule, RULE_THREADS, const bf16* qkv, const float* gates, const float* rates, const float* dt_bias, float* heads, bf16* out, DeltaBatch batch, DeltaShape shape) {
    __shared__ float4 keys[STAGED][MAX_KEY / 4], queries[STAGED][MAX_KEY / 4]; // zeros past key_dim
    __shared__ float values[STAGED][COLUMNS], decays[STAGED], betas[STAGED];
    begin_kernel();
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, column = tid / PARTS, part = tid % PARTS;
    const int head = blockIdx.x, s = blockIdx.z, first = batch.seq_first[s], end = batch.seq_first[s + 1], key_dim = shape.key_dim, value_dim = shape.value_dim;
    const int channels = 2 * shape.key_heads * key_dim + shape.value_heads * value_dim, key_head = head / (shape.value_heads / shape.key_heads);
    const int value = blockIdx.y * COLUMNS + column; // of the head
    float* mine = heads + ((size_t)batch.seq_slots[s] * shape.value_heads + head) * key_dim * value_dim + value;
    const bool fresh = batch.positions[first] == 0, exists = value < value_dim;

    float state[MAX_KEY / PARTS];
#pragma unroll
    for (int i = 0; i < MAX_KEY / PARTS; i++) {
        const int k = i / 4 * 16 + part * 4 + i % 4;
        state[i] = exists && !fresh && k < key_dim ? mine[(size_t)k * value_dim] : 0.0f;
    }
    for (int from = first; from < end; from += STAGED) {
        const int tokens = min(STAGED, end - from);
        __syncthreads();
        // A warp brings and norms the query and the key of every fourth token; a lane has four numbers of each.
        for (int t = warp; t < tokens; t += RULE_THREADS / WARP) {
            const bf16* row = qkv + (size_t)(from + t) * channels + key_head * key_dim;
            float4 q = make_float4(0, 0, 0, 0), k = q;
            if (4 * lane < key_dim) {
                const uint2 a = *reinterpret_cast<const uint2*>(row + 4 * lane), b = *reinterpret_cast<const uint2*>(row + shape.key_heads * key_dim + 4 * lane);
                q = make_float4(low_f32(a.x), high_f32(a.x), low_f32(a.y), high_f32(a.y));
                k = make_float4(low_f32(b.x), high_f32(b.x), low_f32(b.y), high_f32(b.y));
            }
            const float of_q = rsqrtf(warp_sum(q.x * q.x + q.y * q.y + q.z * q.z + q.w * q.w) + L2_EPS) * rsqrtf((float)key_dim);
            const float of_k = rsqrtf(warp_sum(k.x * k.x + k.y * k.y + k.z * k.z + k.w * k.w) + L2_EPS);
            queries[t][lane] = make_float4(q.x * of_q, q.y * of_q, q.z * of_q, q.w * of_q);
            keys[t][lane] = make_float4(k.x * of_k, k.y * of_k, k.z * of_k, k.w * of_k);
            const int v = blockIdx.y * COLUMNS + lane;
            values[t][lane] = v < value_dim ? to_f32(row[(2 * shape.key_heads - key_head) * key_dim + head * value_dim + v]) : 0.0f;
        }
        if (tid < tokens) {
            const float* gate = gates + (size_t)(from + tid) * 2 * shape.value_heads + head;
            const float a = gate[shape.value_heads] + dt_bias[head];
            betas[tid] = sigmoid(gate[0]);
            decays[tid] = expf(-rates[head] * (a > 20.0f ? a : log1pf(expf(a))));
        }
        __syncthreads();
        for (int t = 0; t < tokens; t++) {
            const float decay = decays[t];
            float recalled = 0.0f, read = 0.0f, overlap = 0.0f; // S^T k, S^T q, k . q: what is written now is read through the last
            float4 k[MAX_KEY / 16];
#pragma unroll
            for (int i = 0; i < MAX_KEY / 16; i++) {
                k[i] = keys[t][i * 4 + part];
                const float4 q = queries[t][i * 4 + part];
                float* at = state + 4 * i;
                at[0] *= decay, at[1] *= decay, at[2] *= decay, at[3] *= decay;
                recalled += at[0] * k[i].x + at[1] * k[i].y + at[2] * k[i].z + at[3] * k[i].w;
                read += at[0] * q.x + at[1] * q.y + at[2] * q.z + at[3] * q.w;
                overlap += k[i].x * q.x + k[i].y * q.y + k[i].z * q.z + k[i].w * q.w;
            }
#pragma unroll
            for (int d = 1; d < PARTS; d *= 2) {
                recalled += __shfl_xor_sync(ALL_LANES, recalled, d);
                read += __shfl_xor_sync(ALL_LANES, read, d);
                overlap += __shfl_xor_sync(ALL_LANES, overlap, d);
            }
            const float delta = betas[t] * (values[t][column] - recalled);
#pragma unroll
            for (int i = 0; i < MAX_KEY / 16; i++) {
                float* at = state + 4 * i;
                at[0] += k[i].x * delta, at[1] += k[i].y * delta, at[2] += k[i].z * delta, at[3] += k[i].w * delta;
            }
            if (part == 0 && exists) out[((size_t)(from + t) * shape.value_heads + head) * value_dim + value] = to_bf16(read + delta * overlap);
        }
    }
#pragma unroll
    for (int i = 0; i < MAX_KEY / PARTS; i++) {
        const int k = i / 4 * 16 + part * 4 + i % 4;
        if (exists && k < key_dim) mine[(size_t)k * value_dim] = state[i];
    }
}

// A warp to a head.
KERNEL(delta_norm, 256, bf16* out, const bf16* z, const float* w, DeltaShape shape) {
    begin_kernel();
    const int head = blockIdx.y * 8 + threadIdx.x / WARP, lane = threadIdx.x % WARP, pairs = shape.value_dim / 2;
    if (head >= shape.value_heads) return;
    const size_t first = ((size_t)blockIdx.x * shape.value_heads + head) * shape.value_dim;
    uint32_t* row = reinterpret_cast<uint32_t*>(out + first);
    const uint32_t* gates = reinterpret_cast<const uint32_t*>(z + first);
    float sum = 0.0f;
    for (int i = lane; i < pairs; i += WARP) sum += low_f32(row[i]) * low_f32(row[i]) + high_f32(row[i]) * high_f32(row[i]);
    const float scale = rsqrtf(warp_sum(sum) / shape.value_dim + shape.eps);
    for (int i = lane; i < pairs; i += WARP) {
        const float a = low_f32(gates[i]), b = high_f32(gates[i]);
        row[i] = pack_bf16(low_f32(row[i]) * scale * w[2 * i] * a * sigmoid(a), high_f32(row[i]) * scale * w[2 * i + 1] * b * sigmoid(b));
    }
}
