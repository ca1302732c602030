// What the kernels of routed experts share.
#pragma once

constexpr int MAX_EXPERTS = 512;

// Where input i of a row lies once the row was dealt out: pair 4t + p of 32 inputs as pair t of the p-th 8.
__host__ __device__ constexpr int dealt_place(int i) {
    return (i & ~31) | (i >> 1 & 3) << 3 | (i >> 3 & 3) << 1 | (i & 1);
}
