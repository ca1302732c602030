// Inputs of routed experts in the order in which some kernels of experts_persistent.cuh take them (packed_dealt.cuh).
//
//   experts_deal    grid (div_ceil(chunks, DEAL_THREADS)); to[dealt_place(i)] = x[i] of each row; chunks: of 8 inputs,
//                   whose rows have whole blocks of 32
#include "common.cuh"
#include "experts.cuh"

constexpr int DEAL_THREADS = 256;

KERNEL(experts_deal, DEAL_THREADS, 0, const bf16* x, bf16* to, int chunks) {
    begin_kernel();
    const int chunk = blockIdx.x * DEAL_THREADS + threadIdx.x, p = chunk % 4;
    if (chunk >= chunks) return;
    static_assert(dealt_place(2) == 8 && dealt_place(8) == 2 && dealt_place(24 + 6) == 24 + 6 && dealt_place(33) == 33);
    const uint32_t* from = reinterpret_cast<const uint32_t*>(x) + (size_t)(chunk - p) * 4 + p;
    reinterpret_cast<uint4*>(to)[chunk] = make_uint4(from[0], from[4], from[8], from[12]);
}
