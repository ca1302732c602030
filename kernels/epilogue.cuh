// The epilogue of an expert's products: biases, and the activation.
#pragma once
#include "common.cuh"

struct Epilogue {
    const float *gate, *up, *down; // biases of a layer, [experts, rows] each, or null
    float limit, alpha;            // of gpt-oss's activation; limit 0: SiLU
};

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// Of a row of expert `e`:  silu(gate) * up,  or with both held to the limit  gate / (1 + exp(-alpha gate)) * (up + 1).
// Source: HF modeling_gpt_oss.
__device__ __forceinline__ float activate(const Epilogue& epilogue, int e, int row, int rows, float gate, float up) {
    if (epilogue.gate) {
        gate += epilogue.gate[(size_t)e * rows + row];
        up += epilogue.up[(size_t)e * rows + row];
    }
    if (epilogue.limit == 0.0f) return silu(gate) * up;
    gate = fminf(gate, epilogue.limit);
    up = fminf(fmaxf(up, -epilogue.limit), epilogue.limit);
    return __fdividef(gate, 1.0f + __expf(-epilogue.alpha * gate)) * (up + 1.0f);
}

__device__ __forceinline__ float down_bias(const Epilogue& epilogue, int e, int row, int rows) {
    return epilogue.down ? epilogue.down[(size_t)e * rows + row] : 0.0f;
}
