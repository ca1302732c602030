// Gated DeltaNet between its projections (arXiv 2412.06464, HF modeling_qwen3_next): the convolution, the delta rule
// token by token, the gated norm.
//
//   q, k, v = silu(sum over taps of tap * input);   q = q / |q| / sqrt(key_dim), k = k / |k|
//   S = decay S;   S += k (beta (v - S^T k))^T;   out = norm(S^T q) * silu(z)
//   decay = exp(-rate softplus(a + dt_bias)),   beta = sigmoid(b)
//
// A sequence's state is in its slot: inputs [slots, taps - 1, channels] f32, oldest first, and heads [slots,
// value_heads, key_dim, value_dim] f32; position 0 begins from zeros. Channels: queries, then keys [key_heads,
// key_dim], then values [value_heads, value_dim]. Neighbouring value heads share a query and a key. Columns of S depend
// on no other column, so a head is shared out among blocks; tokens go one by one, which makes chunks exact. What is
// asked of memory is small: a token of a block takes the latency of two dot products.
//
// Launch, in this order:
//   delta_net_conv: grid (ceil(channels / CONV_THREADS), sequences, ceil(most tokens of a sequence / CONV_TOKENS))
//       mixed [T, channels] of qkv, both bf16; taps <= MAX_TAPS
//   delta_net_rule: grid (value_heads, ceil(value_dim / COLUMNS), sequences)
//       out [T, value_heads * value_dim] bf16, and the inputs that are kept; key_dim <= MAX_KEY, a multiple of 4
//   delta_net_norm: grid (T, ceil(value_heads / NORM_HEADS))
//       out in place; value_dim even
#include "common.cuh"

struct DeltaBatch {
    const int *seq_first, *seq_slots, *positions;
};

struct DeltaShape {
    int key_heads, value_heads, key_dim, value_dim, taps;
    float eps;
};

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

constexpr int MAX_TAPS = 8, CONV_THREADS = 128, CONV_TOKENS = 64;

// Each thread takes a channel through some tokens of a sequence; the inputs that a token still needs are in registers.
KERNEL(delta_net_conv, CONV_THREADS, 0, const bf16* qkv, const float* inputs, const float* taps, bf16* mixed,
    DeltaBatch batch, int channels, int width) {
    begin_kernel();
    const int c = blockIdx.x * CONV_THREADS + threadIdx.x, s = blockIdx.y, first = batch.seq_first[s];
    const int from = first + blockIdx.z * CONV_TOKENS, end = min(batch.seq_first[s + 1], from + CONV_TOKENS);
    if (c >= channels || from >= end) return;
    const float* kept = inputs + (size_t)batch.seq_slots[s] * (width - 1) * channels + c;
    const bool fresh = batch.positions[first] == 0;
    // The last MAX_TAPS - 1 inputs, the newest last; taps of those that are too old are zero.
    float past[MAX_TAPS - 1], tap[MAX_TAPS];
#pragma unroll
    for (int i = 0; i < MAX_TAPS; i++)
        tap[i] = i >= MAX_TAPS - width ? taps[(size_t)(i - (MAX_TAPS - width)) * channels + c] : 0.0f;
#pragma unroll
    for (int i = 0; i < MAX_TAPS - 1; i++) {
        const int t = from - (MAX_TAPS - 1) + i;
        past[i] = 0.0f;
        if (i < MAX_TAPS - width) continue;
        if (t >= first)
            past[i] = to_f32(qkv[(size_t)t * channels + c]);
        else if (!fresh)
            past[i] = kept[(size_t)(t - first + width - 1) * channels];
    }
#pragma unroll 8
    for (int t = from; t < end; t++) {
        const size_t at = (size_t)t * channels + c;
        const float x = to_f32(qkv[at]);
        float sum = x * tap[MAX_TAPS - 1];
#pragma unroll
        for (int i = 0; i < MAX_TAPS - 1; i++) sum += past[i] * tap[i];
#pragma unroll
        for (int i = 0; i < MAX_TAPS - 2; i++) past[i] = past[i + 1];
        past[MAX_TAPS - 2] = x;
        mixed[at] = to_bf16(sum * sigmoid(sum));
    }
}

// Keeps the last inputs of a channel for the sequence's next tokens.
__device__ __forceinline__ void keep_inputs(
    const bf16* qkv, float* kept, int c, int channels, int width, int first, int end, bool fresh) {
    for (int i = 0; i < width - 1; i++) {
        const int t = end - (width - 1) + i;
        float x = 0.0f;
        if (t >= first)
            x = to_f32(qkv[(size_t)t * channels + c]);
        else if (!fresh)
            x = kept[(size_t)(i + end - first) * channels + c];
        kept[(size_t)i * channels + c] = x;
    }
}

constexpr int RULE_THREADS = 256, COLUMNS = 32, PARTS = RULE_THREADS / COLUMNS, MAX_KEY = 128,
              FOURS = MAX_KEY / PARTS / 4, STAGED = 32;
constexpr float L2_EPS = 1e-6f; // HF modeling_qwen3_next, l2norm

__device__ __forceinline__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// A column of the state lies in the registers of eight neighbouring threads: part p has inputs 32 i + 4 p and the three
// behind them.
KERNEL(delta_net_rule, RULE_THREADS, 0, const bf16* qkv, const bf16* mixed, const float* gates, const float* rates,
    const float* dt_bias, float* inputs, float* heads, bf16* out, DeltaBatch batch, DeltaShape shape) {
    __shared__ float4 keys[STAGED][MAX_KEY / 4], queries[STAGED][MAX_KEY / 4]; // zeros past key_dim
    __shared__ float values[STAGED][COLUMNS], decays[STAGED], betas[STAGED], overlaps[STAGED];
    begin_kernel();
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, column = tid / PARTS, part = tid % PARTS;
    const int head = blockIdx.x, s = blockIdx.z, first = batch.seq_first[s], end = batch.seq_first[s + 1],
              key_dim = shape.key_dim, value_dim = shape.value_dim;
    const int keys_dim = shape.key_heads * key_dim, channels = 2 * keys_dim + shape.value_heads * value_dim;
    const int group = shape.value_heads / shape.key_heads, key_head = head / group,
              value = blockIdx.y * COLUMNS + column; // of the head
    float* mine = heads + ((size_t)batch.seq_slots[s] * shape.value_heads + head) * key_dim * value_dim + value;
    const bool fresh = batch.positions[first] == 0, exists = value < value_dim;

    float4 state[FOURS];
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        const int k = (i * PARTS + part) * 4; // key_dim is a multiple of 4
        const float* at = mine + (size_t)k * value_dim;
        const bool there = exists && !fresh && k < key_dim;
        state[i] =
            there ? make_float4(at[0], at[value_dim], at[2 * value_dim], at[3 * value_dim]) : make_float4(0, 0, 0, 0);
    }
    for (int from = first; from < end; from += STAGED) {
        const int tokens = min(STAGED, end - from);
        __syncthreads();
        // A warp brings and norms the query and the key of some tokens; a lane has four numbers of each.
        for (int t = warp; t < tokens; t += RULE_THREADS / WARP) {
            const bf16* row = mixed + (size_t)(from + t) * channels + key_head * key_dim;
            float4 q = make_float4(0, 0, 0, 0), k = q;
            if (4 * lane < key_dim) {
                const uint2 a = *reinterpret_cast<const uint2*>(row + 4 * lane),
                            b = *reinterpret_cast<const uint2*>(row + keys_dim + 4 * lane);
                q = make_float4(low_f32(a.x), high_f32(a.x), low_f32(a.y), high_f32(a.y));
                k = make_float4(low_f32(b.x), high_f32(b.x), low_f32(b.y), high_f32(b.y));
            }
            const float of_q = rsqrtf(warp_sum(dot(q, q)) + L2_EPS) * rsqrtf((float)key_dim),
                        of_k = rsqrtf(warp_sum(dot(k, k)) + L2_EPS);
            q = make_float4(q.x * of_q, q.y * of_q, q.z * of_q, q.w * of_q);
            k = make_float4(k.x * of_k, k.y * of_k, k.z * of_k, k.w * of_k);
            const float overlap = warp_sum(dot(q, k));
            if (lane == 0) overlaps[t] = overlap;
            queries[t][lane] = q;
            keys[t][lane] = k;
            const int v = blockIdx.y * COLUMNS + lane;
            values[t][lane] =
                v < value_dim ? to_f32(row[2 * keys_dim - key_head * key_dim + head * value_dim + v]) : 0.0f;
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
            float recalled = 0.0f,
                  read = 0.0f; // S^T k and S^T q of what was; what is written now is read through k . q
            float4 k[FOURS];
#pragma unroll
            for (int i = 0; i < FOURS; i++) {
                k[i] = keys[t][i * PARTS + part];
                const float4 q = queries[t][i * PARTS + part];
                state[i].x *= decay, state[i].y *= decay, state[i].z *= decay, state[i].w *= decay;
                recalled += dot(state[i], k[i]);
                read += dot(state[i], q);
            }
#pragma unroll
            for (int d = 1; d < PARTS; d *= 2) {
                recalled += __shfl_xor_sync(ALL_LANES, recalled, d);
                read += __shfl_xor_sync(ALL_LANES, read, d);
            }
            const float delta = betas[t] * (values[t][column] - recalled);
#pragma unroll
            for (int i = 0; i < FOURS; i++) {
                state[i].x += k[i].x * delta, state[i].y += k[i].y * delta, state[i].z += k[i].z * delta,
                    state[i].w += k[i].w * delta;
            }
            if (part == 0 && exists)
                out[((size_t)(from + t) * shape.value_heads + head) * value_dim + value] =
                    to_bf16(read + delta * overlaps[t]);
        }
    }
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        const int k = (i * PARTS + part) * 4;
        float* at = mine + (size_t)k * value_dim;
        if (exists && k < key_dim)
            at[0] = state[i].x, at[value_dim] = state[i].y, at[2 * value_dim] = state[i].z,
            at[3 * value_dim] = state[i].w;
    }
    // This kernel does not read what it keeps, so the order of blocks does not matter: each block writes the channels
    // of its values, and one block of each group writes those of query and key.
    float* kept = inputs + (size_t)batch.seq_slots[s] * (shape.taps - 1) * channels;
    auto keep = [&](int c) { keep_inputs(qkv, kept, c, channels, shape.taps, first, end, fresh); };
    if (part == 0 && exists) keep(2 * keys_dim + head * value_dim + value);
    if (blockIdx.y == 0 && head % group == 0 && tid < 2 * key_dim)
        keep(tid / key_dim * keys_dim + key_head * key_dim + tid % key_dim);
}

// A warp to a head.
constexpr int NORM_HEADS = 8;
KERNEL(delta_net_norm, NORM_HEADS* WARP, 0, bf16* out, const bf16* z, const float* w, DeltaShape shape) {
    begin_kernel();
    const int head = blockIdx.y * NORM_HEADS + threadIdx.x / WARP, lane = threadIdx.x % WARP,
              pairs = shape.value_dim / 2;
    if (head >= shape.value_heads) return;
    const size_t first = ((size_t)blockIdx.x * shape.value_heads + head) * shape.value_dim;
    uint32_t* row = reinterpret_cast<uint32_t*>(out + first);
    const uint32_t* gates = reinterpret_cast<const uint32_t*>(z + first);
    float sum = 0.0f;
    for (int i = lane; i < pairs; i += WARP)
        sum += low_f32(row[i]) * low_f32(row[i]) + high_f32(row[i]) * high_f32(row[i]);
    const float scale = rsqrtf(warp_sum(sum) / shape.value_dim + shape.eps);
    for (int i = lane; i < pairs; i += WARP) {
        const float a = low_f32(gates[i]), b = high_f32(gates[i]);
        row[i] = pack_bf16(low_f32(row[i]) * scale * w[2 * i] * a * sigmoid(a),
            high_f32(row[i]) * scale * w[2 * i + 1] * b * sigmoid(b));
    }
}
