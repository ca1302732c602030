// What the kernels of Kimi delta attention share (arXiv 2510.26692, HF modeling_kimi_linear):
//
//   q = q / |q| / sqrt(dim), k = k / |k|;   S = diag(decay) S;   S += k (beta (v - S^T k))^T;   out = S^T q
//   decay = exp(-rate softplus(f + dt_bias)), or exp(lower sigmoid(rate (f + dt_bias)));   beta = sigmoid(b)
//
// Gated DeltaNet's rule (delta_net.cuh), but each number of a key has a decay of its own. A sequence's states are in
// its slot: states [slots, heads, dim, dim] f32; position 0 begins from zeros. qkv [T, 3, heads, dim] and f [T, heads,
// dim] bf16, b [T, heads] f32. dim <= MAX_KEY, a multiple of 8.
#pragma once
#include "delta_net.cuh"

struct KdaShape {
    int heads, dim, bounded;
    float lower; // of the logarithm of a decay, where it is bounded
};

struct KdaGates {
    const bf16* f;
    const float *b, *rates, *dt_bias; // [heads], [heads, dim]
};

// What is left of a number of the state.
__device__ __forceinline__ float decay_of(const KdaShape& shape, float rate, float f, float bias) {
    const float x = f + bias;
    if (shape.bounded) return expf(shape.lower * sigmoid(rate * x));
    return expf(-rate * (x > 20.0f ? x : log1pf(expf(x))));
}
