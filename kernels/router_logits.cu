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
    begin_kernel();
    __shared__ float parts[LOGITS_THREADS / WARP][TOKENS];
    const int tid = threadIdx.x, first = blockIdx.y * TOKENS, count = min(TOKENS, tokens - first);
    const float* row = w + (int64_t)blockIdx.x * k;
    h += (int64_t)first * h_pitch;
    float sum[TOKENS] = {};
    for (int i = 8 * tid; i < k; i += 8 * LOGITS_THREADS) {
        const float4 low = *(const float4*)(row + i), high = *(const float4*)(row + i + 4);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            if (t >= count) break;
            const uint4 x = *(const uint4*)(h + (int64_t)t * h_pitch + i);
            sum[t] += low_f32(x.x) * low.x + high_f32(x.x) * low.y + low_f32(x.y) * low.z + high_f32(x.y) * low.w;
            sum[t] += low_f32(x.z) * high.x + high_f32(x.z) * high.y + low_f32(x.w) * high.z + high_f32(x.w) * high.w;
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        if (t >= count) break;
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
