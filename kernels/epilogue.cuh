// The epilogue of an expert's products: biases, and the activation between them.
#pragma once
#include "activation.cuh"

struct Epilogue {
    const float *gate, *up, *down; // biases of a layer, [experts, rows] each, or null
    Activation activation;
};

// Of a row of expert `e`.
__device__ __forceinline__ float activate(const Epilogue& epilogue, int e, int row, int rows, float gate, float up) {
    if (epilogue.gate) {
        gate += epilogue.gate[(size_t)e * rows + row];
        up += epilogue.up[(size_t)e * rows + row];
    }
    return activated(epilogue.activation, gate, up);
}

__device__ __forceinline__ float down_bias(const Epilogue& epilogue, int e, int row, int rows) {
    return epilogue.down ? epilogue.down[(size_t)e * rows + row] : 0.0f;
}
