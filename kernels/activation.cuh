// What is between the products of an MLP or an expert.
//
//   silu             silu(gate) * up
//   gelu             gelu(gate) * up, GELU by its approximation with tanh
//   clamped_silu     min(silu(gate), limit) * clamp(up)                        HF modeling_step3p5
//   clamped_swiglu   g / (1 + exp(-alpha g)) * (clamp(up) + 1), g = min(gate, limit)   HF modeling_gpt_oss
//
// clamp(up) is up within `limit` of 0.
#pragma once
#include "common.cuh"

constexpr int SILU = 0, GELU = 1, CLAMPED_SILU = 2, CLAMPED_SWIGLU = 3;
struct Activation {
    int kind; // one of these
    float limit, alpha;
};

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

__device__ __forceinline__ float activated(const Activation& a, float gate, float up) {
    if (a.kind == SILU) return silu(gate) * up;
    // (1 + tanh(x)) / 2 = 1 / (1 + exp(-2x)); twice the square root of 2 / pi.
    if (a.kind == GELU)
        return __fdividef(gate, 1.0f + __expf(-1.5957691f * (gate + 0.044715f * gate * gate * gate))) * up;
    up = fminf(fmaxf(up, -a.limit), a.limit);
    if (a.kind == CLAMPED_SILU) return fminf(silu(gate), a.limit) * up;
    gate = fminf(gate, a.limit);
    return __fdividef(gate, 1.0f + __expf(-a.alpha * gate)) * (up + 1.0f);
}
