// What the kernels of hyper-connections share, whose products have a row of w for each number of a token.
#pragma once
#include "common.cuh"

constexpr int MAX_STREAMS = 4, PRODUCT_ROWS = MAX_STREAMS * (MAX_STREAMS + 2);

#define PRODUCT_ARGUMENTS                                                                                              \
    const float *x, const float *w, const float *base, const float *scale, float *shares, int width, int rows,         \
        int streams, int tokens, float eps
