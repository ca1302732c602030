// What the kernels of Mamba-2 share (arXiv 2405.21060, HF modeling_nemotron_h):
//
//   d = softplus(dt + dt_bias);   S = exp(-rate d) S + b (d x)^T;   y = S^T c + skip x
//   out = norm(y * silu(z)), of each group by itself
//
// A sequence's states are in its slot: states [slots, heads, state_dim, head_dim] f32; position 0 begins from zeros.
// xbc [T, channels] bf16: x [heads, head_dim], then b and c [groups, state_dim] each; neighbouring heads share b and c.
// dt [T, heads] f32. state_dim <= MAX_KEY; state_dim and head_dim are multiples of 8.
#pragma once
#include "delta_net.cuh"

struct Mamba2Shape {
    int heads, head_dim, state_dim, groups;
    float eps;
};

struct Mamba2Weights {
    const float *rates, *dt_bias, *skip; // [heads]
};

// How far a token goes in a head's time.
__device__ __forceinline__ float step_of(float dt, float bias) {
    const float x = dt + bias;
    return x > 20.0f ? x : log1pf(expf(x));
}
