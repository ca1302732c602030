// Kimi delta attention after its convolution (kda.cuh), token by token.
//
// Launch, in this order:
//   convolve_keep (delta_net.cu) and what comes before it
//   kda_rule: grid (heads, ceil(dim / KDA_COLUMNS), sequences)
//       out [T, heads * dim] bf16, of sequences of few tokens
//   kda_within and kda_across (kda_chunks.cu): the same of sequences of many tokens
//   delta_net_norm (delta_net.cu): out in place
#include "kda.cuh"

constexpr int KDA_THREADS = 256, KDA_COLUMNS = 32, KDA_PARTS = KDA_THREADS / KDA_COLUMNS,
              KDA_FOURS = MAX_KEY / KDA_PARTS / 4, KDA_STAGED = 16;

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
    if (end - first >= CHUNKED_FROM) return;
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
    for (int from = first; from < end; from += KDA_STAGED) {
        const int tokens = min(KDA_STAGED, end - from);
        __syncthreads();
        // A warp brings and norms the query and the key of some tokens; a lane has four numbers of each.
        for (int t = warp; t < tokens; t += KDA_THREADS / WARP) {
            const bf16* row = qkv + (size_t)(from + t) * 3 * inner + head * dim;
            float4 q = make_float4(0, 0, 0, 0), k = q, decay = q;
            if (4 * lane < dim) {
                const float4 f = four_of(gates.f + (size_t)(from + t) * inner + head * dim + 4 * lane);
                const float* bias = gates.dt_bias + head * dim + 4 * lane;
                q = four_of(row + 4 * lane);
                k = four_of(row + inner + 4 * lane);
                decay = make_float4(decay_of(shape, rate, f.x, bias[0]), decay_of(shape, rate, f.y, bias[1]),
                    decay_of(shape, rate, f.z, bias[2]), decay_of(shape, rate, f.w, bias[3]));
            }
            const float of_q = rsqrtf(warp_sum(dot(q, q)) + L2_EPS) * rsqrtf((float)dim),
                        of_k = rsqrtf(warp_sum(dot(k, k)) + L2_EPS);
            q = make_float4(q.x * of_q, q.y * of_q, q.z * of_q, q.w * of_q);
            k = make_float4(k.x * of_k, k.y * of_k, k.z * of_k, k.w * of_k);
            const float overlap = warp_sum(dot(q, k));
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
#pragma unroll
            for (int i = 0; i < KDA_FOURS; i++) {
                const float4 decay = decays[t][i * KDA_PARTS + part];
                state[i].x *= decay.x, state[i].y *= decay.y, state[i].z *= decay.z, state[i].w *= decay.w;
            }
            const float read =
                step_of_rule(state, keys[t], queries[t], part, {values[t][column], betas[t], overlaps[t]});
            if (part == 0 && exists) out[(size_t)(from + t) * inner + head * dim + value] = to_bf16(read);
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
