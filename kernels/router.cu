// Choosing experts: logits -> scores -> (groups) -> top k -> weights. All f32; of equal scores the lower id wins.
//
//   l        logit + offset; with a soft cap, cap * tanh(l / cap) of that
//   s        softmax: exp(l - max) / sum; sigmoid: 1 / (1 + exp(-l)); or sqrt(ln(1 + exp(l)))
//   chosen   the largest s + bias, among the experts of the best groups
//   weight   s of the chosen, divided by their sum if `normalize`, times `scaling`, times its `expert_scale`
//
// Sources: DeepSeek-V2 report 2.2.2, V3 report 2.1.2, HF modeling_qwen3_moe. Up to MAX_EXPERTS experts, top MAX_TOP_K.
//
//   route_choose: grid (tokens)
//       From logits [tokens, experts]. by_token, null or [vocab, top_k]: the experts of each token of `ids_of`, in the
//       place of the best.
//   route_few: grid (experts + tokens)
//       Up to FEW tokens: h = rmsnorm(x) in bf16; logits = w h in f32, then the same. A block owns an expert; one
//       more for each token writes its h, waits for all logits, and chooses. `counter`: one u32, 0 between launches.
//   choose_experts: grid (ceil(n / CHOICES))
//       n choices are replaced by given ones.
#include "common.cuh"

constexpr int MAX_EXPERTS = 512, MAX_TOP_K = 32, MAX_GROUPS = 32, CHOOSE_THREADS = 128, FEW = 8, CHOICES = 256;
static_assert(MAX_TOP_K <= WARP && MAX_GROUPS <= WARP, "a lane for each");

constexpr int SIGMOID = 1, SQRT_SOFTPLUS = 2; // of a RouterShape; 0: softmax

struct RouterShape {
    int experts, top_k, scoring, normalize, groups, group_top_k, group_by_two;
    float scaling, softcap; // softcap 0: none
};

// A number's order as an integer's, above 0; 0 if it cannot be chosen: -inf, or NaN, which does not compare.
__device__ __forceinline__ uint32_t order_of(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f); // -0 is 0
    return x > -INFINITY ? bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u) : 0u;
}

struct Choosing {
    float raised[MAX_EXPERTS], s[MAX_EXPERTS]; // of softmax before it is divided
    alignas(16) uint32_t order[MAX_EXPERTS];
    int chosen[MAX_TOP_K];
    float score[MAX_TOP_K];
};

// Of one token, by all threads of a block: an expert's place is the number of those that are better. The code is short,
// as it is run once: what a multiprocessor has not run lately it waits for. offsets, bias, expert_scale: null, or
// [experts]; given: null, or [top_k].
__device__ __forceinline__ void choose(const float* logits, const float* offsets, const float* bias,
    const float* expert_scale, const int* given, const RouterShape& shape, Choosing& at, int* ids, float* weights) {
    const int tid = threadIdx.x, threads = blockDim.x, lane = tid % WARP, experts = shape.experts;
    auto logit = [&](int e) {
        const float l = __ldcg(logits + e) + (offsets ? offsets[e] : 0.0f);
        return shape.softcap == 0.0f ? l : shape.softcap * tanhf(l / shape.softcap);
    };
    const bool softmax = shape.scoring != SIGMOID && shape.scoring != SQRT_SOFTPLUS;
    for (int e = tid; e < experts; e += threads) at.s[e] = logit(e);
    __syncthreads();
    float sum = 1.0f;
    if (softmax) { // each warp by itself
        float top = -INFINITY;
#pragma unroll 4
        for (int e = lane; e < experts; e += WARP) top = fmaxf(top, at.s[e]);
        top = warp_max(top);
        for (int e = tid; e < experts; e += threads) at.raised[e] = expf(at.s[e] - top);
        __syncthreads();
        sum = 0.0f;
#pragma unroll 4
        for (int e = lane; e < experts; e += WARP) sum += at.raised[e];
        sum = warp_sum(sum);
    }
#pragma unroll 1
    for (int e = tid; e < div_ceil(experts, 4) * 4; e += threads) {
        float s = -INFINITY, rank = -INFINITY;
        if (e < experts) {
            const float l = at.s[e];
            s = softmax                    ? at.raised[e] / sum
                : shape.scoring == SIGMOID ? 1.0f / (1.0f + expf(-l))
                                           : sqrtf(l > 20.0f ? l : log1pf(expf(l)));
            rank = s + (bias ? bias[e] : 0.0f);
        }
        at.s[e] = s;
        at.order[e] = order_of(rank);
    }
    if (tid < MAX_TOP_K) at.chosen[tid] = -1, at.score[tid] = 0.0f;
    __syncthreads();

    if (shape.groups > 1) {
        if (tid < WARP) { // a lane to a group
            const int size = experts / shape.groups;
            float score = -INFINITY;
            if (lane < shape.groups) {
                float a = -INFINITY, b = -INFINITY;
#pragma unroll 1
                for (int e = lane * size; e < (lane + 1) * size; e++) {
                    const float rank = at.s[e] + (bias ? bias[e] : 0.0f);
                    if (rank > a)
                        b = a, a = rank;
                    else
                        b = fmaxf(b, rank);
                }
                score = shape.group_by_two ? a + b : a;
            }
            const uint32_t own = order_of(score);
            int better = 0;
#pragma unroll 1
            for (int g = 0; g < shape.groups; g++) {
                const uint32_t other = __shfl_sync(ALL_LANES, own, g);
                better += other > own || (other == own && g < lane);
            }
            if (lane < shape.groups && better >= shape.group_top_k)
                for (int e = lane * size; e < (lane + 1) * size; e++) at.order[e] = 0;
        }
        __syncthreads();
    }

    if (given) {
        if (tid < shape.top_k) at.chosen[tid] = given[tid], at.score[tid] = at.s[given[tid]];
    } else {
#pragma unroll 1
        for (int e = tid; e < experts; e += threads) {
            const uint32_t own = at.order[e];
            if (own == 0) continue;
            int better = 0;
#pragma unroll 8
            for (int other = 0; other < experts; other += 4) {
                const uint4 four = *reinterpret_cast<const uint4*>(at.order + other);
                better += (four.x > own - (other < e)) + (four.y > own - (other + 1 < e)) +
                    (four.z > own - (other + 2 < e)) + (four.w > own - (other + 3 < e));
            }
            if (better < shape.top_k) at.chosen[better] = e, at.score[better] = at.s[e];
        }
    }
    __syncthreads();
    if (tid < shape.top_k) {
        float all = 0.0f;
        for (int i = 0; i < shape.top_k; i++) all += at.score[i];
        const int chosen = at.chosen[tid];
        const float scale = expert_scale && chosen >= 0 ? expert_scale[chosen] : 1.0f;
        ids[tid] = chosen;
        weights[tid] = (shape.normalize ? at.score[tid] / all : at.score[tid]) * shape.scaling * scale;
    }
}

KERNEL(route_choose, CHOOSE_THREADS, 0, const float* logits, const float* offsets, const float* bias,
    const float* expert_scale, const uint32_t* ids_of, const int* by_token, RouterShape shape, int* ids,
    float* weights) {
    __shared__ Choosing choosing;
    begin_kernel();
    const int token = blockIdx.x;
    const size_t at = (size_t)token * shape.top_k;
    const int* given = by_token ? by_token + (size_t)ids_of[token] * shape.top_k : nullptr;
    choose(logits + (size_t)token * shape.experts, offsets, bias, expert_scale, given, shape, choosing, ids + at,
        weights + at);
}

struct RouteFew {
    const float *x, *norm;                          // [tokens, hidden], [hidden]
    bf16* h;                                        // [tokens, hidden]
    const float *w, *offsets, *bias, *expert_scale; // [experts, hidden], [experts] or null
    float* logits;                                  // [tokens, experts]
    uint32_t* counter;
    int* ids;       // [tokens, top_k]
    float* weights; // [tokens, top_k]
    RouterShape shape;
    int tokens, hidden;
    float eps;
};

// rmsnorm's factor of each of tokens first to last - 1. By all threads of a block.
__device__ __forceinline__ void norm_scales(
    const RouteFew& a, int first, int last, float (&squares)[FEW][FEW], float (&scales)[FEW]) {
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP;
    for (int t = first; t < last; t++) {
        float sum = 0.0f;
        for (int i = 8 * tid; i < a.hidden; i += 8 * FEW * WARP) {
            const Eight x = load_8(a.x + (size_t)t * a.hidden + i);
            sum += x.low.x * x.low.x + x.low.y * x.low.y + x.low.z * x.low.z + x.low.w * x.low.w;
            sum += x.high.x * x.high.x + x.high.y * x.high.y + x.high.z * x.high.z + x.high.w * x.high.w;
        }
        sum = warp_sum(sum);
        if (lane == 0) squares[t][warp] = sum;
    }
    __syncthreads();
    if (tid >= first && tid < last) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < FEW; i++) sum += squares[tid][i];
        scales[tid] = rsqrtf(sum / (float)a.hidden + a.eps);
    }
    __syncthreads();
}

// Rounded before it is multiplied, as it is for more tokens: a token's experts do not depend on its batch.
__device__ __forceinline__ uint4 normed(const Eight& x, const Eight& norm, float scale) {
    return make_uint4(pack_bf16(x.low.x * scale * norm.low.x, x.low.y * scale * norm.low.y),
        pack_bf16(x.low.z * scale * norm.low.z, x.low.w * scale * norm.low.w),
        pack_bf16(x.high.x * scale * norm.high.x, x.high.y * scale * norm.high.y),
        pack_bf16(x.high.z * scale * norm.high.z, x.high.w * scale * norm.high.w));
}

KERNEL(route_few, FEW* WARP, 0, const __grid_constant__ RouteFew a) {
    __shared__ float squares[FEW][FEW], parts[FEW][FEW], scales[FEW]; // [token][warp], [token]
    __shared__ Choosing choosing;
    constexpr int STEP = 8 * FEW * WARP;
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, tokens = a.tokens, hidden = a.hidden;
    const int own = (int)blockIdx.x - a.shape.experts; // a token to choose for
    if (own >= 0) {
        begin_kernel();
        norm_scales(a, own, own + 1, squares, scales);
        for (int i = 8 * tid; i < hidden; i += STEP)
            *reinterpret_cast<uint4*>(a.h + (size_t)own * hidden + i) =
                normed(load_8(a.x + (size_t)own * hidden + i), load_8(a.norm + i), scales[own]);
        if (tid == 0) {
            const uint32_t experts = a.shape.experts;
            while (load_acquire(a.counter) < experts) pause_ns(20);
            if (atomicAdd(a.counter, 1u) == experts + tokens - 1) *a.counter = 0;
        }
        __syncthreads();
        const size_t at = (size_t)own * a.shape.top_k;
        choose(a.logits + (size_t)own * a.shape.experts, a.offsets, a.bias, a.expert_scale, nullptr, a.shape, choosing,
            a.ids + at, a.weights + at);
        return;
    }
    // No kernel writes weights, so the first are on their way before the kernel in front has ended.
    const float* row = a.w + (size_t)blockIdx.x * hidden;
    const Eight w = 8 * tid < hidden ? load_8(row + 8 * tid) : Eight{},
                n = 8 * tid < hidden ? load_8(a.norm + 8 * tid) : Eight{};
    begin_kernel();
    norm_scales(a, 0, tokens, squares, scales);
    for (int t = 0; t < tokens; t++) {
        float dot = 0.0f;
        for (int i = 8 * tid; i < hidden; i += STEP) {
            const Eight from = i < STEP ? w : load_8(row + i), by = i < STEP ? n : load_8(a.norm + i);
            const uint4 h = normed(load_8(a.x + (size_t)t * hidden + i), by, scales[t]);
            dot += low_f32(h.x) * from.low.x + high_f32(h.x) * from.low.y + low_f32(h.y) * from.low.z +
                high_f32(h.y) * from.low.w;
            dot += low_f32(h.z) * from.high.x + high_f32(h.z) * from.high.y + low_f32(h.w) * from.high.z +
                high_f32(h.w) * from.high.w;
        }
        dot = warp_sum(dot);
        if (lane == 0) parts[t][warp] = dot;
    }
    __syncthreads();
    if (warp != 0) return;
    if (tid < tokens) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < FEW; i++) sum += parts[tid][i];
        a.logits[(size_t)tid * a.shape.experts + blockIdx.x] = sum;
    }
    __syncwarp();
    if (tid == 0) add_release(a.counter, 1u);
}

KERNEL(choose_experts, CHOICES, 0, const int* chosen, int* ids, int n) {
    begin_kernel();
    const int i = blockIdx.x * CHOICES + threadIdx.x;
    if (i < n) ids[i] = chosen[i];
}
