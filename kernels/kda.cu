// Kimi delta attention after its convolution (arXiv 2510.26692, HF modeling_kimi_linear), token by token.
//
//   q = q / |q| / sqrt(dim), k = k / |k|;   S = diag(decay) S;   S += k (beta (v - S^T k))^T;   out = S^T q
//   decay = exp(-rate softplus(f + dt_bias)), or exp(lower sigmoid(rate (f + dt_bias)));   beta = sigmoid(b)
//
// As delta_net_rule (delta_net.cu), but each number of a key has a decay of its own. A sequence's states are in its
// slot: states [slots, heads, dim, dim] f32; position 0 begins from zeros. qkv [T, 3, heads, dim] and f [T, heads, dim]
// bf16, b [T, heads] f32. dim <= MAX_KEY, a multiple of 8.
//
// Launch, in this order:
//   convolve_keep (delta_net.cu) and what comes before it
//   kda_rule: grid (heads, ceil(dim / KDA_COLUMNS), sequences); out [T, heads * dim] bf16
//   delta_net_norm (delta_net.cu): out in place
#include "delta_net.cuh"

struct KdaShape {
    int heads, dim, bounded;
    float lower; // of the logarithm of a decay, where it is bounded
};

struct KdaGates {
    const bf16* f;
    const float *b, *rates, *dt_bias; // [heads], [heads, dim]
};

constexpr int KDA_THREADS = 256, KDA_COLUMNS = 32, KDA_PARTS = KDA_THREADS / KDA_COLUMNS,
              KDA_FOURS = MAX_KEY / KDA_PARTS / 4, KDA_STAGED = 16;

__device__ __forceinline__ float kda_dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// A column of the state lies in the registers of eight neighbouring threads: part p has inputs 32 i + 4 p and the three
// behind them.
KERNEL_BLOCKS(kda_rule, KDA_THREADS, 2, 0, const bf16* qkv, KdaGates gates, float* states, bf16* out, DeltaBatch batch,
    KdaShape shape) {
    __shared__ float4 keys[KDA_STAGED][MAX_KEY / 4], queries[KDA_STAGED][MAX_KEY / 4],
        decays[KDA_STAGED][MAX_KEY / 4]; // zeros past dim
    __shared__ float values[KDA_STAGED][KDA_COLUMNS], betas[KDA_STAGED], overlaps[KDA_STAGED];
    begin_kernel();
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, column = tid / KDA_PARTS, part = tid % KDA_PARTS,
              head = blockIdx.x, s = blockIdx.z;
    const int first = batch.seq_first[s], end = batch.seq_first[s + 1], dim = shape.dim, inner = shape.heads * dim,
              value = blockIdx.y * KDA_COLUMNS + column; // of the head
    float* mine = states + ((size_t)batch.seq_slots[s] * shape.heads + head) * dim * dim + value;
    const bool fresh = batch.positions[first] == 0, exists = value < dim;
    const float rate = gates.rates[head];

    float4 state[KDA_FOURS];
#pragma unroll
    for (int i = 0; i < KDA_FOURS; i++) {
        const int k = (i * KDA_PARTS + part) * 4;
        const float* at = mine + (size_t)k * dim;
        const bool there = exists && !fresh && k < dim;
        state[i] = there ? make_float4(at[0], at[dim], at[2 * dim], at[3 * dim]) : make_float4(0, 0, 0, 0);
    }
    auto decay_of = [&](float f, float bias) {
        const float x = f + bias;
        if (shape.bounded) return expf(shape.lower * sigmoid(rate * x));
        return expf(-rate * (x > 20.0f ? x : log1pf(expf(x))));
    };
    for (int from = first; from < end; from += KDA_STAGED) {
        const int tokens = min(KDA_STAGED, end - from);
        __syncthreads();
        // A warp brings and norms the query and the key of some tokens; a lane has four numbers of each.
        for (int t = warp; t < tokens; t += KDA_THREADS / WARP) {
            const bf16* row = qkv + (size_t)(from + t) * 3 * inner + head * dim;
            float4 q = make_float4(0, 0, 0, 0), k = q, decay = q;
            if (4 * lane < dim) {
                const uint2 a = *reinterpret_cast<const uint2*>(row + 4 * lane),
                            b = *reinterpret_cast<const uint2*>(row + inner + 4 * lane),
                            f = *reinterpret_cast<const uint2*>(
                                gates.f + (size_t)(from + t) * inner + head * dim + 4 * lane);
                const float* bias = gates.dt_bias + head * dim + 4 * lane;
                q = make_float4(low_f32(a.x), high_f32(a.x), low_f32(a.y), high_f32(a.y));
                k = make_float4(low_f32(b.x), high_f32(b.x), low_f32(b.y), high_f32(b.y));
                decay = make_float4(decay_of(low_f32(f.x), bias[0]), decay_of(high_f32(f.x), bias[1]),
                    decay_of(low_f32(f.y), bias[2]), decay_of(high_f32(f.y), bias[3]));
            }
            const float of_q = rsqrtf(warp_sum(kda_dot(q, q)) + L2_EPS) * rsqrtf((float)dim),
                        of_k = rsqrtf(warp_sum(kda_dot(k, k)) + L2_EPS);
            q = make_float4(q.x * of_q, q.y * of_q, q.z * of_q, q.w * of_q);
            k = make_float4(k.x * of_k, k.y * of_k, k.z * of_k, k.w * of_k);
            const float overlap = warp_sum(kda_dot(q, k));
            if (lane == 0) {
                overlaps[t] = overlap;
                betas[t] = sigmoid(gates.b[(size_t)(from + t) * shape.heads + head]);
            }
            queries[t][lane] = q;
            keys[t][lane] = k;
            decays[t][lane] = decay;
            const int v = blockIdx.y * KDA_COLUMNS + lane;
            values[t][lane] = v < dim ? to_f32(row[2 * inner + v]) : 0.0f;
        }
        __syncthreads();
        for (int t = 0; t < tokens; t++) {
            float recalled = 0.0f,
                  read = 0.0f; // S^T k and S^T q of what was; what is written now is read through k . q
            float4 k[KDA_FOURS];
#pragma unroll
            for (int i = 0; i < KDA_FOURS; i++) {
                k[i] = keys[t][i * KDA_PARTS + part];
                const float4 q = queries[t][i * KDA_PARTS + part], decay = decays[t][i * KDA_PARTS + part];
                state[i].x *= decay.x, state[i].y *= decay.y, state[i].z *= decay.z, state[i].w *= decay.w;
                recalled += kda_dot(state[i], k[i]);
                read += kda_dot(state[i], q);
            }
#pragma unroll
            for (int d = 1; d < KDA_PARTS; d *= 2) {
                recalled += __shfl_xor_sync(ALL_LANES, recalled, d);
                read += __shfl_xor_sync(ALL_LANES, read, d);
            }
            const float delta = betas[t] * (values[t][column] - recalled);
#pragma unroll
            for (int i = 0; i < KDA_FOURS; i++) {
                state[i].x += k[i].x * delta, state[i].y += k[i].y * delta, state[i].z += k[i].z * delta,
                    state[i].w += k[i].w * delta;
            }
            if (part == 0 && exists)
                out[(size_t)(from + t) * inner + head * dim + value] = to_bf16(read + delta * overlaps[t]);
        }
    }
#pragma unroll
    for (int i = 0; i < KDA_FOURS; i++) {
        const int k = (i * KDA_PARTS + part) * 4;
        float* at = mine + (size_t)k * dim;
        if (exists && k < dim)
            at[0] = state[i].x, at[dim] = state[i].y, at[2 * dim] = state[i].z, at[3 * dim] = state[i].w;
    }
}
