// Choosing experts: logits -> scores -> (groups) -> top k -> weights. All f32; of equal scores the lower id wins.
//
//   l        logit + offset; with a soft cap, cap * tanh(l / cap) of that
//   s        softmax: exp(l - max) / sum; sigmoid: 1 / (1 + exp(-l)); or sqrt(ln(1 + exp(l)))
//   chosen   the largest s + bias, among the experts of the best groups
//   weight   s of the chosen, divided by their sum if `normalize`, times `scaling`, times its `expert_scale`
//
// Sources: DeepSeek-V2 report 2.2.2, V3 report 2.1.2, HF modeling_qwen3_moe. One warp to a token; up to MAX_EXPERTS
// experts, top MAX_TOP_K.
//
//   route_choose: grid (ceil(tokens / TOKENS))
//       From logits [tokens, experts]. by_token, null or [vocab, top_k]: the experts of each token of `ids_of`, in the
//       place of the best.
//   route_few: grid (experts + 1)
//       Up to FEW tokens: h = rmsnorm(x) in bf16; logits = w h in f32, then the same. A block owns an expert, and the
//       last one of these to end chooses; one more writes h. `counter`: one u32, 0 between launches.
//   choose_experts: grid (ceil(n / CHOICES))
//       n choices are replaced by given ones.
#include "common.cuh"

constexpr int MAX_EXPERTS = 512, MAX_TOP_K = 32, MAX_GROUPS = 32, TOKENS = 4, FEW = 8, CHOICES = 256;
static_assert(MAX_TOP_K <= WARP && MAX_GROUPS <= WARP, "a lane for each");

constexpr int SIGMOID = 1, SQRT_SOFTPLUS = 2; // of a RouterShape; 0: softmax

struct RouterShape {
    int experts, top_k, scoring, normalize, groups, group_top_k, group_by_two;
    float scaling, softcap; // softcap 0: none
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

// Of one token, by one warp; s and rank [experts] are scratch in shared memory. offsets, bias, expert_scale: null,
// or [experts]; given: null, or [top_k].
__device__ __forceinline__ void choose(const float* logits, const float* offsets, const float* bias,
    const float* expert_scale, const int* given, const RouterShape& shape, float* s, float* rank, int* ids,
    float* weights) {
    const int lane = threadIdx.x % WARP, experts = shape.experts;
    auto logit = [&](int e) {
        const float l = __ldcg(logits + e) + (offsets ? offsets[e] : 0.0f);
        return shape.softcap == 0.0f ? l : shape.softcap * tanhf(l / shape.softcap);
    };
    if (shape.scoring == SIGMOID) {
        for (int e = lane; e < experts; e += WARP) s[e] = 1.0f / (1.0f + expf(-logit(e)));
    } else if (shape.scoring == SQRT_SOFTPLUS) {
        for (int e = lane; e < experts; e += WARP) {
            const float l = logit(e);
            s[e] = sqrtf(l > 20.0f ? l : log1pf(expf(l)));
        }
    } else {
        float top = -INFINITY, sum = 0.0f;
        for (int e = lane; e < experts; e += WARP) top = fmaxf(top, s[e] = logit(e));
        top = warp_max(top);
        for (int e = lane; e < experts; e += WARP) sum += s[e] = expf(s[e] - top);
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
                if (rank[e] > a)
                    b = a, a = rank[e];
                else
                    b = fmaxf(b, rank[e]);
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
        if (given)
            index = given[i];
        else {
            for (int e = lane; e < experts; e += WARP)
                if (rank[e] > value) value = rank[e], index = e;
            warp_best(value, index);
        }
        if (index == MAX_EXPERTS) break; // NaN: nothing compares
        const float score = s[index];
        __syncwarp();
        if (lane == 0) rank[index] = -INFINITY;
        __syncwarp();
        if (lane == i) mine = score, chosen = index;
        sum += score;
    }
    if (lane < shape.top_k) {
        ids[lane] = chosen;
        const float scale = expert_scale && chosen >= 0 ? expert_scale[chosen] : 1.0f;
        weights[lane] = (shape.normalize ? mine / sum : mine) * shape.scaling * scale;
    }
}

KERNEL(route_choose, TOKENS* WARP, 0, const float* logits, const float* offsets, const float* bias,
    const float* expert_scale, const uint32_t* ids_of, const int* by_token, RouterShape shape, int tokens, int* ids,
    float* weights) {
    __shared__ float scores[TOKENS][MAX_EXPERTS], ranks[TOKENS][MAX_EXPERTS];
    begin_kernel();
    const int warp = threadIdx.x / WARP, token = blockIdx.x * TOKENS + warp;
    if (token >= tokens) return;
    const size_t at = (size_t)token * shape.top_k;
    const int* given = by_token ? by_token + (size_t)ids_of[token] * shape.top_k : nullptr;
    choose(logits + (size_t)token * shape.experts, offsets, bias, expert_scale, given, shape, scores[warp], ranks[warp],
        ids + at, weights + at);
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

struct Eight {
    float4 low, high;
};
__device__ __forceinline__ Eight load_8(const float* p) {
    return {*reinterpret_cast<const float4*>(p), *reinterpret_cast<const float4*>(p + 4)};
}

KERNEL(route_few, FEW* WARP, 0, const __grid_constant__ RouteFew a) {
    __shared__ float squares[FEW][FEW], parts[FEW][FEW]; // [token][warp]
    __shared__ float scores[FEW][MAX_EXPERTS], ranks[FEW][MAX_EXPERTS];
    __shared__ bool last;
    constexpr int STEP = 8 * FEW * WARP;
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, tokens = a.tokens, hidden = a.hidden;
    const bool norms = (int)blockIdx.x == a.shape.experts;
    // No kernel writes weights, so the first are on their way before the kernel in front has ended.
    const float* row = norms ? a.norm : a.w + (size_t)blockIdx.x * hidden;
    Eight w = 8 * tid < hidden ? load_8(row + 8 * tid) : Eight{},
          n = 8 * tid < hidden ? load_8(a.norm + 8 * tid) : Eight{};
    begin_kernel();

    for (int t = 0; t < tokens; t++) {
        float sum = 0.0f;
        for (int i = 8 * tid; i < hidden; i += STEP) {
            const Eight x = load_8(a.x + (size_t)t * hidden + i);
            sum += x.low.x * x.low.x + x.low.y * x.low.y + x.low.z * x.low.z + x.low.w * x.low.w;
            sum += x.high.x * x.high.x + x.high.y * x.high.y + x.high.z * x.high.z + x.high.w * x.high.w;
        }
        sum = warp_sum(sum);
        if (lane == 0) squares[t][warp] = sum;
    }
    __syncthreads();
    for (int t = 0; t < tokens; t++) {
        float sum = 0.0f, dot = 0.0f;
#pragma unroll
        for (int i = 0; i < FEW; i++) sum += squares[t][i];
        const float scale = rsqrtf(sum / (float)hidden + a.eps);
        Eight from = w, by = n;
        for (int i = 8 * tid; i < hidden; i += STEP) {
            if (i >= STEP) from = load_8(row + i), by = load_8(a.norm + i);
            const Eight x = load_8(a.x + (size_t)t * hidden + i);
            // Rounded before it is multiplied, as it is for more tokens: a token's experts do not depend on its batch.
            const uint4 h = make_uint4(pack_bf16(x.low.x * scale * by.low.x, x.low.y * scale * by.low.y),
                pack_bf16(x.low.z * scale * by.low.z, x.low.w * scale * by.low.w),
                pack_bf16(x.high.x * scale * by.high.x, x.high.y * scale * by.high.y),
                pack_bf16(x.high.z * scale * by.high.z, x.high.w * scale * by.high.w));
            if (norms) {
                *reinterpret_cast<uint4*>(a.h + (size_t)t * hidden + i) = h;
                continue;
            }
            dot += low_f32(h.x) * from.low.x + high_f32(h.x) * from.low.y + low_f32(h.y) * from.low.z +
                high_f32(h.y) * from.low.w;
            dot += low_f32(h.z) * from.high.x + high_f32(h.z) * from.high.y + low_f32(h.w) * from.high.z +
                high_f32(h.w) * from.high.w;
        }
        dot = warp_sum(dot);
        if (lane == 0) parts[t][warp] = dot;
    }
    if (norms) return;
    __syncthreads();
    if (tid < tokens) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < FEW; i++) sum += parts[tid][i];
        a.logits[(size_t)tid * a.shape.experts + blockIdx.x] = sum;
        __threadfence();
    }
    __syncthreads();
    if (tid == 0) {
        last = atomicAdd(a.counter, 1u) == (uint32_t)a.shape.experts - 1;
        if (last) *a.counter = 0;
    }
    __syncthreads();
    if (!last || warp >= tokens) return;
    __threadfence();
    const size_t at = (size_t)warp * a.shape.top_k;
    choose(a.logits + (size_t)warp * a.shape.experts, a.offsets, a.bias, a.expert_scale, nullptr, a.shape, scores[warp],
        ranks[warp], a.ids + at, a.weights + at);
}

KERNEL(choose_experts, CHOICES, 0, const int* chosen, int* ids, int n) {
    begin_kernel();
    const int i = blockIdx.x * CHOICES + threadIdx.x;
    if (i < n) ids[i] = chosen[i];
}
