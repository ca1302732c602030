// What the kernels of gated DeltaNet share (arXiv 2412.06464, HF modeling_qwen3_next):
//
//   q, k, v = silu(sum over taps of tap * input);   q = q / |q| / sqrt(key_dim), k = k / |k|
//   S = decay S;   S += k (beta (v - S^T k))^T;   out = norm(S^T q) * silu(z), or * sigmoid(z)
//   decay = exp(-rate softplus(a + dt_bias)),   beta = sigmoid(b)
//
// A sequence's state is in its slot: inputs [slots, taps - 1, channels] f32, oldest first, and heads [slots,
// value_heads, key_dim, value_dim] f32; position 0 begins from zeros. Channels: queries, then keys [key_heads,
// key_dim], then values [value_heads, value_dim]. Neighbouring value heads share a query and a key. key_dim <= MAX_KEY;
// key_dim and value_dim are multiples of 8.
#pragma once
#include "common.cuh"

constexpr int MAX_KEY = 128;
// Tokens of a sequence from which on the rule goes in chunks (delta_net_chunks.cu), below one by one (delta_net.cu).
constexpr int CHUNKED_FROM = 32;
constexpr float L2_EPS = 1e-6f; // HF modeling_qwen3_next, l2norm

struct DeltaBatch {
    const int *seq_first, *seq_slots, *positions;
};

struct DeltaShape {
    int key_heads, value_heads, key_dim, value_dim, taps;
    float eps;
    int sigmoid; // of the output gate; 0: SiLU
};

// What the rule is made of beside queries, keys and values.
struct DeltaGates {
    const float *gates, *rates, *dt_bias; // [T, b and a, value_heads], [value_heads], [value_heads]
};

__device__ __forceinline__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// Four neighbours of an address of 8 bytes.
__device__ __forceinline__ float4 four_of(const bf16* x) {
    const uint2 v = *reinterpret_cast<const uint2*>(x);
    return make_float4(low_f32(v.x), high_f32(v.x), low_f32(v.y), high_f32(v.y));
}

// What a token's rule is made of beside its query and key: of this column, and of the head.
struct TokenOfRule {
    float value, beta, overlap; // overlap: k . q
};

// A token writes to a column of a decayed state, and reads it. Eight neighbouring threads have the column: part p has
// inputs 32 i + 4 p and the three behind them; `keys` and `queries` are rows of fours of all inputs.
template <int FOURS>
__device__ __forceinline__ float step_of_rule(
    float4 (&state)[FOURS], const float4* keys, const float4* queries, int part, TokenOfRule token) {
    constexpr int PARTS = MAX_KEY / 4 / FOURS;
    float recalled = 0.0f, read = 0.0f; // S^T k and S^T q of what was; what is written now is read through k . q
    float4 k[FOURS];
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        k[i] = keys[i * PARTS + part];
        recalled += dot(state[i], k[i]);
        read += dot(state[i], queries[i * PARTS + part]);
    }
#pragma unroll
    for (int d = 1; d < PARTS; d *= 2) {
        recalled += __shfl_xor_sync(ALL_LANES, recalled, d);
        read += __shfl_xor_sync(ALL_LANES, read, d);
    }
    const float delta = token.beta * (token.value - recalled);
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        state[i].x += k[i].x * delta, state[i].y += k[i].y * delta, state[i].z += k[i].z * delta,
            state[i].w += k[i].w * delta;
    }
    return read + delta * token.overlap;
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// The logarithm of a token's decay in a head, and its beta.
__device__ __forceinline__ float2 log_decay_and_beta(const DeltaGates& g, int t, int head, int heads) {
    const float* gate = g.gates + (size_t)t * 2 * heads + head;
    const float a = gate[heads] + g.dt_bias[head];
    return make_float2(-g.rates[head] * (a > 20.0f ? a : log1pf(expf(a))), sigmoid(gate[0]));
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
