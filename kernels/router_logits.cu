// The router's product for a few tokens: logits[t, e] = sum_k h[t, k] w[e, k] with f32 weights, f32 sums.
//
// h [tokens, k] bf16, pitch h_pitch; w [experts, k] f32 without gaps; logits [tokens, experts] f32. k a multiple of 8,
// bases aligned to 16 bytes. A block owns an expert and eight tokens; its threads take 8 numbers of k each, in turn.
// Where tokens times experts are more than 8,192, gemm_split3 (gemm.cu) is faster.
//
//   route_logits    grid (experts, div_ceil(tokens, TOKENS))
#include "common.cuh"

constexpr int LOGITS_THREADS = 256, TOKENS = 8;

KERNEL(route_logits, LOGITS_THREADS, 0, const bf16* h, const float* w, float* logits, int h_pitch, int tokens,
    int experts, int k) {
    __shared__ float parts[LOGITS_THREADS / WARP][TOKENS];
    const int tid = threadIdx.x, first = blockIdx.y * TOKENS, count = min(TOKENS, tokens - first);
    const float* row = w + (int64_t)blockIdx.x * k;
    h += (int64_t)first * h_pitch;
    float sum[TOKENS] = {};
    float4 low = {}, high = {};
    auto load = [&](int i) {
        if (i < k) low = *(const float4*)(row + i), high = *(const float4*)(row + i + 4);
    };
    load(8 * tid); // on its way while the kernel in front ends
    begin_kernel();
    for (int i = 8 * tid; i < k; i += 8 * LOGITS_THREADS) {
        uint4 x[TOKENS]; // rows that are not there: the last one again
#pragma unroll
        for (int t = 0; t < TOKENS; t++) x[t] = *(const uint4*)(h + (int64_t)min(t, count - 1) * h_pitch + i);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            sum[t] +=
                low_f32(x[t].x) * low.x + high_f32(x[t].x) * low.y + low_f32(x[t].y) * low.z + high_f32(x[t].y) * low.w;
            sum[t] += low_f32(x[t].z) * high.x + high_f32(x[t].z) * high.y + low_f32(x[t].w) * high.z +
                high_f32(x[t].w) * high.w;
        }
        load(i + 8 * LOGITS_THREADS);
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        sum[t] = warp_sum(sum[t]);
        if (tid % WARP == 0) parts[tid / WARP][t] = sum[t];
    }
    __syncthreads();
    if (tid < count) {
        float all = 0.0f;
#pragma unroll
        for (int i = 0; i < LOGITS_THREADS / WARP; i++) all += parts[i][tid];
        logits[(int64_t)(first + tid) * experts + blockIdx.x] = all;
    }
}
