// Choosing experts: logits -> scores -> (groups) -> top k -> weights. All f32; of equal scores the lower id wins.
//
//   softmax:  s = exp(l - max) / sum          sigmoid:  s = 1 / (1 + exp(-l))
//   chosen:   the largest s + bias, among the experts of the best groups
//   weight:   s of the chosen, divided by their sum if `normalize`, times `scaling`
//
// Sources: DeepSeek-V2 report 2.2.2, V3 report 2.1.2, HF modeling_qwen3_moe. One warp to a token; up to 512 experts, top 32.
// grid (ceil(tokens / 4)), 128 threads
#include "common.cuh"

constexpr int MAX_EXPERTS = 512, TOKENS = 4;

struct RouterShape {
    int experts, top_k, sigmoid, normalize, groups, group_top_k, group_by_two;
    float scaling;
};

// The lane that holds the largest value, lower index first; every lane gets both.
__device__ __forceinline__ void warp_best(float& value, int& index) {
#pragma unroll
    for (int d = WARP / 2; d > 0; d /= 2) {
        const float v = __shfl_xor_sync(ALL_LANES, value, d);
        const int i = __shfl_xor_sync(ALL_LANES, index, d);
        if (v > value || (v == value && i < index)) value = v, index = i;
    }
}

KERNEL(choose_experts, TOKENS * WARP, const float* logits, const float* bias, RouterShape shape, int tokens, int* ids, float* weights) {
    __shared__ float scores[TOKENS][MAX_EXPERTS], ranks[TOKENS][MAX_EXPERTS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, token = blockIdx.x * TOKENS + warp, experts = shape.experts;
    if (token >= tokens) return;
    float *s = scores[warp], *rank = ranks[warp];
    const float* l = logits + (size_t)token * experts;
    if (shape.sigmoid) {
        for (int e = lane; e < experts; e += WARP) s[e] = 1.0f / (1.0f + expf(-l[e]));
    } else {
        float top = -INFINITY, sum = 0.0f;
        for (int e = lane; e < experts; e += WARP) top = fmaxf(top, l[e]);
        top = warp_max(top);
        for (int e = lane; e < experts; e += WARP) sum += s[e] = expf(l[e] - top);
        sum = warp_sum(sum);
        for (int e = lane; e < experts; e += WARP) s[e] /= sum;
    }
    for (int e = lane; e < experts; e += WARP) rank[e] = s[e] + (bias ? bias[e] : 0.0f);
    __syncwarp();

    if (shape.groups > 1) { // a lane to a group
        const int size = experts / shape.groups;
        float score = -INFINITY;
        if (lane < shape.groups) {
            float a = -INFINITY, b = -INFINITY;
            for (int e = lane * size; e < (lane + 1) * size; e++) {
                if (rank[e] > a) b = a, a = rank[e];
                else b = fmaxf(b, rank[e]);
            }
            score = shape.group_by_two ? a + b : a;
        }
        bool open = false;
        for (int i = 0; i < shape.group_top_k; i++) {
            float value = open ? -INFINITY : score;
            int index = open ? MAX_EXPERTS : lane;
            warp_best(value, index);
            open |= lane == index;
        }
        __syncwarp();
        if (lane < shape.groups && !open)
            for (int e = lane * size; e < (lane + 1) * size; e++) rank[e] = -INFINITY;
        __syncwarp();
    }

    float mine = 0.0f, sum = 0.0f; // lane i keeps the i-th choice
    int chosen = -1;
    for (int i = 0; i < shape.top_k; i++) {
        float value = -INFINITY;
        int index = MAX_EXPERTS;
        for (int e = lane; e < experts; e += WARP)
            if (rank[e] > value) value = rank[e], index = e;
        warp_best(value, index);
        if (index == MAX_EXPERTS) break; // NaN: nothing compares
        const float score = s[index];
        __syncwarp();
        if (lane == 0) rank[index] = -INFINITY;
        __syncwarp();
        if (lane == i) mine = score, chosen = index;
        sum += score;
    }
    if (lane < shape.top_k) {
        ids[(size_t)token * shape.top_k + lane] = chosen;
        weights[(size_t)token * shape.top_k + lane] = (shape.normalize ? mine / sum : mine) * shape.scaling;
    }
}
