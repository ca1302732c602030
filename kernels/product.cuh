// One of up to three products of the same x that share a launch (query, key and value; gate and up): gemv.cu, gemm.cu
// and gemm_wgmma.cu.
#pragma once
#include "common.cuh"

// w [n, k] bf16 without gaps; bias [n] f32 or null; y [tokens, n], pitch y_pitch. Steps of a batch are in elements. A
// job that is not there has n = 0 and stands last.
struct ProductJob {
    const bf16* w;
    const float* bias;
    void* y;
    int64_t w_batch, y_batch;
    int n, y_pitch;
};
