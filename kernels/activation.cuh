// What is between the products of an MLP or an expert, all of one form:
//
//   g = min(gate, gate_max);   s = min(g / (1 + exp(-(linear g + cubic g^3))), silu_max)
//   s * (up within up_max of 0, + up_shift)
//
//   silu(gate) * up: plain, for which most kernels read nothing else
//   gelu by its approximation with tanh: (1 + tanh(x)) / 2 = 1 / (1 + exp(-2x))
//   clamped SiLU: silu_max and up_max are the limit (HF modeling_step3p5)
//   SiLU of what is clamped: gate_max and up_max are the limit (HF modeling_glm5_next)
//   squared ReLU: max(up, 0)^2, without a gate; nothing else is read
//   clamped SwiGLU: gate_max and up_max are the limit, linear is alpha, up_shift 1 (HF modeling_gpt_oss)
#pragma once
#include "common.cuh"

constexpr int GENERAL = 0, PLAIN = 1, RELU_SQUARED = 2;

struct Activation {
    int form;
    float gate_max, linear, cubic, silu_max, up_max, up_shift;
};

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// Of all forms that have a gate, the plain one too.
__device__ __forceinline__ float gated(const Activation& a, float gate, float up) {
    gate = fminf(gate, a.gate_max);
    const float s = __fdividef(gate, 1.0f + __expf(-gate * (a.linear + a.cubic * gate * gate)));
    return fminf(s, a.silu_max) * (fminf(fmaxf(up, -a.up_max), a.up_max) + a.up_shift);
}

// One form for all but the plain one: a branch for each costs the experts' products a fifth of their time.
__device__ __forceinline__ float activated(const Activation& a, float gate, float up) {
    return a.form == PLAIN ? silu(gate) * up : gated(a, gate, up);
}

__device__ __forceinline__ float relu_squared(float up) {
    const float x = fmaxf(up, 0.0f);
    return x * x;
}
