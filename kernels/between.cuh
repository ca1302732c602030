// What stands between an expert's products: biases, and the activation.
#pragma once
#include "common.cuh"

struct Between {
    const float *gate, *up, *down; // biases of a layer, [experts, rows] each, or null
    float limit, alpha;            // of gpt-oss's activation; limit 0: SiLU
};

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// Of a row of expert `e`:  silu(gate) * up,  or with both held to the limit  gate / (1 + exp(-alpha gate)) * (up + 1).
// Source: HF modeling_gpt_oss.
__device__ __forceinline__ float activate(const Between& between, int e, int row, int rows, float gate, float up) {
    if (between.gate) {
        gate += between.gate[(size_t)e * rows + row];
        up += between.up[(size_t)e * rows + row];
    }
    if (between.limit == 0.0f) return silu(gate) * up;
    gate = fminf(gate, between.limit);
    up = fminf(fmaxf(up, -between.limit), between.limit);
    return __fdividef(gate, 1.0f + __expf(-between.alpha * gate)) * (up + 1.0f);
}

__device__ __forceinline__ float down_bias(const Between& between, int e, int row, int rows) {
    return between.down ? between.down[(size_t)e * rows + row] : 0.0f;
}
