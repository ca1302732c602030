// Mamba-2 after its convolution (mamba2.cuh), token by token.
//
// Columns of S depend on no other column, so a head is shared out among blocks.
//
// Launch, in this order:
//   convolve_keep (delta_net.cu) and what comes before it
//   mamba2_scan: grid (heads, ceil(head_dim / SSM_COLUMNS), sequences)
//       y [T, heads * head_dim] bf16, of sequences of few tokens
//   mamba2_across (mamba2_chunks.cu): the same of sequences of many tokens
//   mamba2_norm: grid (T, groups); y in place
#include "mamba2.cuh"

constexpr int SSM_THREADS = 256, SSM_COLUMNS = 32, SSM_PARTS = SSM_THREADS / SSM_COLUMNS,
              SSM_FOURS = MAX_KEY / SSM_PARTS / 4, SSM_STAGED = 32;

// A column of the state lies in the registers of eight neighbouring threads: part p has rows 32 i + 4 p and the three
// behind them.
KERNEL_BLOCKS(mamba2_scan, SSM_THREADS, 2, 0, const bf16* xbc, const float* dt, Mamba2Weights w, float* states,
    bf16* out, DeltaBatch batch, Mamba2Shape shape) {
    __shared__ float4 bs[SSM_STAGED][MAX_KEY / 4], cs[SSM_STAGED][MAX_KEY / 4]; // zeros past state_dim
    __shared__ float values[SSM_STAGED][SSM_COLUMNS], decays[SSM_STAGED], steps[SSM_STAGED];
    begin_kernel();
    const int tid = threadIdx.x, column = tid / SSM_PARTS, part = tid % SSM_PARTS, head = blockIdx.x, s = blockIdx.z;
    const int first = batch.seq_first[s], end = batch.seq_first[s + 1], rows = shape.state_dim, dim = shape.head_dim;
    if (end - first >= CHUNKED_FROM) return;
    const int inner = shape.heads * dim, channels = inner + 2 * shape.groups * rows,
              at_b = inner + head / (shape.heads / shape.groups) * rows, at_c = at_b + shape.groups * rows,
              value = blockIdx.y * SSM_COLUMNS + column; // of the head
    float* mine = states + ((size_t)batch.seq_slots[s] * shape.heads + head) * rows * dim + value;
    const bool fresh = batch.positions[first] == 0, exists = value < dim;
    const float rate = w.rates[head], bias = w.dt_bias[head], skip = w.skip[head];

    float4 state[SSM_FOURS];
#pragma unroll
    for (int i = 0; i < SSM_FOURS; i++) {
        const int k = (i * SSM_PARTS + part) * 4;
        const float* at = mine + (size_t)k * dim;
        const bool there = exists && !fresh && k < rows;
        state[i] = there ? make_float4(at[0], at[dim], at[2 * dim], at[3 * dim]) : make_float4(0, 0, 0, 0);
    }
    for (int from = first; from < end; from += SSM_STAGED) {
        const int tokens = min(SSM_STAGED, end - from);
        __syncthreads();
        for (int i = tid; i < tokens * (MAX_KEY / 4); i += SSM_THREADS) {
            const int t = i / (MAX_KEY / 4), k = i % (MAX_KEY / 4);
            const bf16* row = xbc + (size_t)(from + t) * channels;
            bs[t][k] = 4 * k < rows ? four_of(row + at_b + 4 * k) : make_float4(0, 0, 0, 0);
            cs[t][k] = 4 * k < rows ? four_of(row + at_c + 4 * k) : make_float4(0, 0, 0, 0);
        }
        for (int i = tid; i < tokens * SSM_COLUMNS; i += SSM_THREADS) {
            const int t = i / SSM_COLUMNS, v = blockIdx.y * SSM_COLUMNS + i % SSM_COLUMNS;
            values[t][i % SSM_COLUMNS] = v < dim ? to_f32(xbc[(size_t)(from + t) * channels + head * dim + v]) : 0.0f;
        }
        if (tid < tokens) {
            const float d = step_of(dt[(size_t)(from + tid) * shape.heads + head], bias);
            steps[tid] = d;
            decays[tid] = expf(-rate * d);
        }
        __syncthreads();
        for (int t = 0; t < tokens; t++) {
            const float decay = decays[t], x = values[t][column], written = steps[t] * x;
            float y = 0.0f;
#pragma unroll
            for (int i = 0; i < SSM_FOURS; i++) {
                const float4 b = bs[t][i * SSM_PARTS + part], c = cs[t][i * SSM_PARTS + part];
                float4& of = state[i];
                of.x = of.x * decay + b.x * written, of.y = of.y * decay + b.y * written;
                of.z = of.z * decay + b.z * written, of.w = of.w * decay + b.w * written;
                y += of.x * c.x + of.y * c.y + of.z * c.z + of.w * c.w;
            }
#pragma unroll
            for (int d = 1; d < SSM_PARTS; d *= 2) y += __shfl_xor_sync(ALL_LANES, y, d);
            if (part == 0 && exists) out[(size_t)(from + t) * inner + head * dim + value] = to_bf16(y + skip * x);
        }
    }
#pragma unroll
    for (int i = 0; i < SSM_FOURS; i++) {
        const int k = (i * SSM_PARTS + part) * 4;
        float* at = mine + (size_t)k * dim;
        if (exists && k < rows)
            at[0] = state[i].x, at[dim] = state[i].y, at[2 * dim] = state[i].z, at[3 * dim] = state[i].w;
    }
}

constexpr int SSM_NORM_THREADS = 256;
KERNEL(mamba2_norm, SSM_NORM_THREADS, 0, bf16* y, const bf16* z, const float* w, Mamba2Shape shape) {
    __shared__ float scratch[WARP + 1];
    begin_kernel();
    const int inner = shape.heads * shape.head_dim, dim = inner / shape.groups, from = blockIdx.y * dim;
    bf16* row = y + (size_t)blockIdx.x * inner + from;
    const bf16* gate = z + (size_t)blockIdx.x * inner + from;
    auto gated = [&](int i) {
        const float4 a = four_of(row + i), g = four_of(gate + i);
        return make_float4(
            a.x * g.x * sigmoid(g.x), a.y * g.y * sigmoid(g.y), a.z * g.z * sigmoid(g.z), a.w * g.w * sigmoid(g.w));
    };
    float sum = 0.0f;
    for (int i = 4 * threadIdx.x; i < dim; i += 4 * SSM_NORM_THREADS) {
        const float4 x = gated(i);
        sum += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
    }
    const float scale = rsqrtf(block_sum(sum, scratch) / dim + shape.eps);
    for (int i = 4 * threadIdx.x; i < dim; i += 4 * SSM_NORM_THREADS) {
        const float4 x = gated(i);
        const float* weight = w + from + i;
        *reinterpret_cast<uint2*>(row + i) = make_uint2(pack_bf16(x.x * scale * weight[0], x.y * scale * weight[1]),
            pack_bf16(x.z * scale * weight[2], x.w * scale * weight[3]));
    }
}
