// Gated DeltaNet between its projections (delta_net.cuh): the convolution, the delta rule token by token, the gated
// norm.
//
// Columns of S depend on no other column, so a head is shared out among blocks. What is asked of memory is small: a
// token of a block takes the latency of two dot products.
//
// Launch, in this order:
//   delta_net_conv: grid (ceil(channels / CONV_CHANNELS), sequences, ceil(most tokens of a sequence / CONV_TOKENS))
//       mixed [T, channels] of qkv, both bf16; taps <= MAX_TAPS; bias [channels], or null
//   convolve_keep: grid (ceil(channels / CONV_THREADS), sequences)
//       inputs become those that come next, where no kernel below keeps them
//   delta_net_rule: grid (value_heads, ceil(value_dim / COLUMNS), sequences)
//       out [T, value_heads * value_dim] bf16, and the inputs that are kept, of sequences of few tokens
//   delta_net_within and delta_net_across (delta_net_chunks.cu): the same of sequences of many tokens
//   delta_net_norm: grid (T, ceil(value_heads / NORM_HEADS))
//       out in place
#include "delta_net.cuh"

constexpr int MAX_TAPS = 8, CONV_THREADS = 128, CONV_CHANNELS = 2 * CONV_THREADS, CONV_TOKENS = 64;

// Each thread takes two channels through some tokens of a sequence; the inputs that a token still needs are in
// registers. TAPS: at least `width`; taps of inputs that are too old are zero.
template <int TAPS>
__device__ __forceinline__ void convolve(const bf16* qkv, const float* inputs, const float* taps, const float* bias,
    bf16* mixed, const DeltaBatch& batch, int channels, int width) {
    const int c = blockIdx.x * CONV_CHANNELS + 2 * threadIdx.x, s = blockIdx.y, first = batch.seq_first[s];
    const int from = first + blockIdx.z * CONV_TOKENS, end = min(batch.seq_first[s + 1], from + CONV_TOKENS);
    if (c >= channels || from >= end) return;
    const float* kept = inputs + (size_t)batch.seq_slots[s] * (width - 1) * channels + c;
    const bool fresh = batch.positions[first] == 0;
    auto input = [&](int t) {
        const uint32_t two = *reinterpret_cast<const uint32_t*>(qkv + (size_t)t * channels + c);
        return make_float2(low_f32(two), high_f32(two));
    };
    const float2 added = bias ? *reinterpret_cast<const float2*>(bias + c) : make_float2(0.0f, 0.0f);
    // The last TAPS - 1 inputs, the newest last.
    float2 past[TAPS - 1], tap[TAPS];
#pragma unroll
    for (int i = 0; i < TAPS; i++)
        tap[i] = i >= TAPS - width
            ? *reinterpret_cast<const float2*>(taps + (size_t)(i - (TAPS - width)) * channels + c)
            : make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < TAPS - 1; i++) {
        const int t = from - (TAPS - 1) + i;
        past[i] = make_float2(0.0f, 0.0f);
        if (i < TAPS - width) continue;
        if (t >= first)
            past[i] = input(t);
        else if (!fresh)
            past[i] = *reinterpret_cast<const float2*>(kept + (size_t)(t - first + width - 1) * channels);
    }
#pragma unroll 8
    for (int t = from; t < end; t++) {
        const float2 x = input(t);
        float2 sum = make_float2(x.x * tap[TAPS - 1].x, x.y * tap[TAPS - 1].y);
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++) {
            sum.x += past[i].x * tap[i].x;
            sum.y += past[i].y * tap[i].y;
        }
#pragma unroll
        for (int i = 0; i < TAPS - 2; i++) past[i] = past[i + 1];
        past[TAPS - 2] = x;
        sum.x += added.x, sum.y += added.y;
        *reinterpret_cast<uint32_t*>(mixed + (size_t)t * channels + c) =
            pack_bf16(sum.x * sigmoid(sum.x), sum.y * sigmoid(sum.y));
    }
}

KERNEL(delta_net_conv, CONV_THREADS, 0, const bf16* qkv, const float* inputs, const float* taps, const float* bias,
    bf16* mixed, DeltaBatch batch, int channels, int width) {
    begin_kernel();
    if (width <= 4) // which published models have
        convolve<4>(qkv, inputs, taps, bias, mixed, batch, channels, width);
    else
        convolve<MAX_TAPS>(qkv, inputs, taps, bias, mixed, batch, channels, width);
}

KERNEL(convolve_keep, CONV_THREADS, 0, const bf16* x, float* inputs, DeltaBatch batch, int channels, int width) {
    begin_kernel();
    const int c = blockIdx.x * CONV_THREADS + threadIdx.x, s = blockIdx.y, first = batch.seq_first[s];
    if (c >= channels) return;
    float* kept = inputs + (size_t)batch.seq_slots[s] * (width - 1) * channels;
    keep_inputs(x, kept, c, channels, width, first, batch.seq_first[s + 1], batch.positions[first] == 0);
}

constexpr int RULE_THREADS = 256, COLUMNS = 32, PARTS = RULE_THREADS / COLUMNS, FOURS = MAX_KEY / PARTS / 4,
              STAGED = 32;

KERNEL_BLOCKS(delta_net_rule, RULE_THREADS, 2, 0, const bf16* qkv, const bf16* mixed, DeltaGates gates, float* inputs,
    float* heads, bf16* out, DeltaBatch batch, DeltaShape shape) {
    __shared__ float4 keys[STAGED][MAX_KEY / 4], queries[STAGED][MAX_KEY / 4]; // zeros past key_dim
    __shared__ float values[STAGED][COLUMNS], decays[STAGED], betas[STAGED], overlaps[STAGED];
    begin_kernel();
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, column = tid / PARTS, part = tid % PARTS;
    const int head = blockIdx.x, s = blockIdx.z, first = batch.seq_first[s], end = batch.seq_first[s + 1],
              key_dim = shape.key_dim, value_dim = shape.value_dim;
    if (end - first >= CHUNKED_FROM) return;
    const int keys_dim = shape.key_heads * key_dim, channels = 2 * keys_dim + shape.value_heads * value_dim;
    const int group = shape.value_heads / shape.key_heads, key_head = head / group,
              value = blockIdx.y * COLUMNS + column; // of the head
    float* mine = heads + ((size_t)batch.seq_slots[s] * shape.value_heads + head) * key_dim * value_dim + value;
    const bool fresh = batch.positions[first] == 0, exists = value < value_dim;

    float4 state[FOURS];
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        const int k = (i * PARTS + part) * 4; // key_dim is a multiple of 4
        const float* at = mine + (size_t)k * value_dim;
        const bool there = exists && !fresh && k < key_dim;
        state[i] =
            there ? make_float4(at[0], at[value_dim], at[2 * value_dim], at[3 * value_dim]) : make_float4(0, 0, 0, 0);
    }
    for (int from = first; from < end; from += STAGED) {
        const int tokens = min(STAGED, end - from);
        __syncthreads();
        // A warp brings and norms the query and the key of some tokens; a lane has four numbers of each.
        for (int t = warp; t < tokens; t += RULE_THREADS / WARP) {
            const bf16* row = mixed + (size_t)(from + t) * channels + key_head * key_dim;
            float4 q = make_float4(0, 0, 0, 0), k = q;
            if (4 * lane < key_dim) {
                q = four_of(row + 4 * lane);
                k = four_of(row + keys_dim + 4 * lane);
            }
            const float of_q = rsqrtf(warp_sum(dot(q, q)) + L2_EPS) * rsqrtf((float)key_dim),
                        of_k = rsqrtf(warp_sum(dot(k, k)) + L2_EPS);
            q = make_float4(q.x * of_q, q.y * of_q, q.z * of_q, q.w * of_q);
            k = make_float4(k.x * of_k, k.y * of_k, k.z * of_k, k.w * of_k);
            const float overlap = warp_sum(dot(q, k));
            if (lane == 0) overlaps[t] = overlap;
            queries[t][lane] = q;
            keys[t][lane] = k;
            const int v = blockIdx.y * COLUMNS + lane;
            values[t][lane] =
                v < value_dim ? to_f32(row[2 * keys_dim - key_head * key_dim + head * value_dim + v]) : 0.0f;
        }
        if (tid < tokens) {
            const float2 gate = log_decay_and_beta(gates, from + tid, head, shape.value_heads);
            decays[tid] = expf(gate.x);
            betas[tid] = gate.y;
        }
        __syncthreads();
        for (int t = 0; t < tokens; t++) {
            const float decay = decays[t];
#pragma unroll
            for (int i = 0; i < FOURS; i++)
                state[i].x *= decay, state[i].y *= decay, state[i].z *= decay, state[i].w *= decay;
            const float read =
                step_of_rule(state, keys[t], queries[t], part, {values[t][column], betas[t], overlaps[t]});
            if (part == 0 && exists)
                out[((size_t)(from + t) * shape.value_heads + head) * value_dim + value] = to_bf16(read);
        }
    }
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        const int k = (i * PARTS + part) * 4;
        float* at = mine + (size_t)k * value_dim;
        if (exists && k < key_dim)
            at[0] = state[i].x, at[value_dim] = state[i].y, at[2 * value_dim] = state[i].z,
            at[3 * value_dim] = state[i].w;
    }
    // This kernel does not read what it keeps, so the order of blocks does not matter: each block writes the channels
    // of its values, and one block of each group writes those of query and key.
    float* kept = inputs + (size_t)batch.seq_slots[s] * (shape.taps - 1) * channels;
    auto keep = [&](int c) { keep_inputs(qkv, kept, c, channels, shape.taps, first, end, fresh); };
    if (part == 0 && exists) keep(2 * keys_dim + head * value_dim + value);
    if (blockIdx.y == 0 && head % group == 0 && tid < 2 * key_dim)
        keep(tid / key_dim * keys_dim + key_head * key_dim + tid % key_dim);
}

// A warp to a head, four numbers of it to a lane.
constexpr int NORM_HEADS = 8;
KERNEL(delta_net_norm, NORM_HEADS* WARP, 0, bf16* out, const bf16* z, const float* w, DeltaShape shape) {
    begin_kernel();
    const int head = blockIdx.y * NORM_HEADS + threadIdx.x / WARP, lane = threadIdx.x % WARP,
              fours = shape.value_dim / 4;
    if (head >= shape.value_heads) return;
    const size_t first = ((size_t)blockIdx.x * shape.value_heads + head) * shape.value_dim;
    uint2* row = reinterpret_cast<uint2*>(out + first);
    const uint2* gates = reinterpret_cast<const uint2*>(z + first);
    float sum = 0.0f;
    for (int i = lane; i < fours; i += WARP) {
        const uint2 x = row[i];
        sum += low_f32(x.x) * low_f32(x.x) + high_f32(x.x) * high_f32(x.x);
        sum += low_f32(x.y) * low_f32(x.y) + high_f32(x.y) * high_f32(x.y);
    }
    const float scale = rsqrtf(warp_sum(sum) / shape.value_dim + shape.eps);
    auto gated = [&](float x, float weight, float gate) {
        return x * scale * weight * sigmoid(gate) * (shape.sigmoid ? 1.0f : gate);
    };
    for (int i = lane; i < fours; i += WARP) {
        const uint2 x = row[i], gate = gates[i];
        const float4 weight = reinterpret_cast<const float4*>(w)[i];
        row[i] = make_uint2(
            pack_bf16(gated(low_f32(x.x), weight.x, low_f32(gate.x)), gated(high_f32(x.x), weight.y, high_f32(gate.x))),
            pack_bf16(
                gated(low_f32(x.y), weight.z, low_f32(gate.y)), gated(high_f32(x.y), weight.w, high_f32(gate.y))));
    }
}
