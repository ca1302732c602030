// Several residual streams, beside each other in a row of x [T, streams * hidden] f32, and what n-grams add to them (HF
// modeling_qwen4_exp). Norms of streams are rms_norm_f32 and rms_norm_bf16 (rows.cu).
//
//   mixer_gates      low = silu(gates / streams), inject = 2 sigmoid(gates / streams)
//   mix_streams      out = 1 / streams * sum over streams of sigmoid(gate_s) * normed_s
//   inject           x_s += inject_s * y
//   gate_ngrams      key_s = sigmoid(sign(g) sqrt(max(|g|, 1e-6))) * value,  g = norm(key_s) . norm(x_s) / sqrt(hidden)
//   convolve_ngrams  x += gated + silu(sum over taps of tap * normed)
//   keep_ngrams      the last inputs of the convolution, for the sequence's next tokens
//   add_ngrams       x += u, where there is no convolution
//
// and of hyper-connections (HF modeling_glm5_next and modeling_deepseek_v4), of up to MAX_STREAMS streams:
//   streams_product  m = (w rms(x)) scale + base, of `streams` numbers each for pre and post, and streams^2 for C
//   collapse_streams out = sum over streams of pre_s x_s, pre = sigmoid(m) + eps, of these shares or of others; post =
//                    2 sigmoid(m); C balanced
//   connect_streams  x_k = post_k y + sum over j of C_jk x_j
//   mean_streams     out = 1 / streams * sum over streams of x_s
//
// Widths are multiples of 8 unless said.
#include "streams.cuh"

constexpr int STREAM_THREADS = 256, STREAM_NUMBERS = 4 * STREAM_THREADS; // of a block of mix_streams
constexpr int NGRAM_CHANNELS = 2 * STREAM_THREADS, NGRAM_TOKENS = 32;    // of a block of convolve_ngrams

__device__ __forceinline__ float4 four_of(const float* x) { return *reinterpret_cast<const float4*>(x); }
__device__ __forceinline__ float4 four_of(const bf16* x) {
    const uint2 v = *reinterpret_cast<const uint2*>(x);
    return make_float4(low_f32(v.x), high_f32(v.x), low_f32(v.y), high_f32(v.y));
}
__device__ __forceinline__ float2 two_of(const bf16* x) {
    const uint32_t v = *reinterpret_cast<const uint32_t*>(x);
    return make_float2(low_f32(v), high_f32(v));
}
__device__ __forceinline__ float to_sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

// gates [T, width] f32: rank numbers for low, then streams for inject. grid (rows)
KERNEL(mixer_gates, STREAM_THREADS, 0, const float* gates, bf16* low, float* inject, int width, int rank, int streams) {
    begin_kernel();
    const float* row = gates + (size_t)blockIdx.x * width;
    const float share = 1.0f / streams;
    for (int i = threadIdx.x; i < rank + streams; i += STREAM_THREADS) {
        const float gate = row[i] * share;
        if (i < rank)
            low[(size_t)blockIdx.x * rank + i] = to_bf16(gate * to_sigmoid(gate));
        else
            inject[(size_t)blockIdx.x * streams + i - rank] = 2.0f * to_sigmoid(gate);
    }
}

// grid (ceil(hidden / STREAM_NUMBERS), rows)
KERNEL(mix_streams, STREAM_THREADS, 0, const bf16* gate, const bf16* normed, bf16* out, int hidden, int streams) {
    begin_kernel();
    const int i = 4 * (blockIdx.x * STREAM_THREADS + threadIdx.x);
    if (i >= hidden) return;
    const size_t row = (size_t)blockIdx.y * streams * hidden + i;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int s = 0; s < streams; s++) {
        const float4 g = four_of(gate + row + (size_t)s * hidden), n = four_of(normed + row + (size_t)s * hidden);
        sum.x += to_sigmoid(g.x) * n.x;
        sum.y += to_sigmoid(g.y) * n.y;
        sum.z += to_sigmoid(g.z) * n.z;
        sum.w += to_sigmoid(g.w) * n.w;
    }
    const float share = 1.0f / streams;
    *reinterpret_cast<uint2*>(out + (size_t)blockIdx.y * hidden + i) =
        make_uint2(pack_bf16(sum.x * share, sum.y * share), pack_bf16(sum.z * share, sum.w * share));
}

// y [T, hidden], inject [T, streams], x, all f32. grid (ceil(hidden / STREAM_NUMBERS), rows)
KERNEL(inject, STREAM_THREADS, 0, const float* y, const float* inject, float* x, int hidden, int streams) {
    begin_kernel();
    const int i = 4 * (blockIdx.x * STREAM_THREADS + threadIdx.x);
    if (i >= hidden) return;
    const float4 v = four_of(y + (size_t)blockIdx.y * hidden + i);
    for (int s = 0; s < streams; s++) {
        const float share = inject[(size_t)blockIdx.y * streams + s];
        float4* to = reinterpret_cast<float4*>(x + ((size_t)blockIdx.y * streams + s) * hidden + i);
        const float4 r = *to;
        *to = make_float4(r.x + share * v.x, r.y + share * v.y, r.z + share * v.z, r.w + share * v.w);
    }
}

// x [T, streams * hidden] f32, value [T, hidden], key [T, streams * hidden] in place. grid (rows, streams)
KERNEL(gate_ngrams, STREAM_THREADS, 0, const float* x, const bf16* value, bf16* key, const float* of_key,
    const float* of_query, float eps, int hidden) {
    begin_kernel();
    __shared__ float scratch[3][33];
    const size_t at = ((size_t)blockIdx.x * gridDim.y + blockIdx.y) * hidden;
    const float *wk = of_key + (size_t)blockIdx.y * hidden, *wq = of_query + (size_t)blockIdx.y * hidden;
    float keys = 0.0f, queries = 0.0f, dot = 0.0f;
    for (int i = 4 * threadIdx.x; i < hidden; i += STREAM_NUMBERS) {
        const float4 k = four_of(key + at + i), q = four_of(x + at + i), a = four_of(wk + i), b = four_of(wq + i);
        keys += k.x * k.x + k.y * k.y + k.z * k.z + k.w * k.w;
        queries += q.x * q.x + q.y * q.y + q.z * q.z + q.w * q.w;
        dot += k.x * a.x * q.x * b.x + k.y * a.y * q.y * b.y + k.z * a.z * q.z * b.z + k.w * a.w * q.w * b.w;
    }
    const float of_keys = rsqrtf(block_sum(keys, scratch[0]) / hidden + eps);
    const float of_queries = rsqrtf(block_sum(queries, scratch[1]) / hidden + eps);
    const float gate = block_sum(dot, scratch[2]) * of_keys * of_queries * rsqrtf((float)hidden);
    const float root = sqrtf(fmaxf(fabsf(gate), 1e-6f));
    const float share = to_sigmoid(gate > 0.0f ? root : gate < 0.0f ? -root : 0.0f);
    for (int i = 4 * threadIdx.x; i < hidden; i += STREAM_NUMBERS) {
        const float4 v = four_of(value + (size_t)blockIdx.x * hidden + i);
        *reinterpret_cast<uint2*>(key + at + i) =
            make_uint2(pack_bf16(v.x * share, v.y * share), pack_bf16(v.z * share, v.w * share));
    }
}

// gated and normed [T, channels]; kept [slots, (width - 1) * dilation, channels] f32, oldest first; taps [width,
// channels]; x [T, channels] f32.
// grid (ceil(channels / NGRAM_CHANNELS), sequences, ceil(most tokens of a sequence / NGRAM_TOKENS))
KERNEL(convolve_ngrams, STREAM_THREADS, 0, const bf16* gated, const bf16* normed, const float* kept, const float* taps,
    float* x, const int* seq_first, const int* seq_slots, const int* positions, int channels, int width, int dilation) {
    begin_kernel();
    const int c = blockIdx.x * NGRAM_CHANNELS + 2 * threadIdx.x, s = blockIdx.y, first = seq_first[s];
    const int from = first + blockIdx.z * NGRAM_TOKENS, end = min(seq_first[s + 1], from + NGRAM_TOKENS);
    if (c >= channels || from >= end) return;
    const int past = (width - 1) * dilation;
    const float* of_slot = kept + (size_t)seq_slots[s] * past * channels + c;
    const bool fresh = positions[first] == 0;
    for (int t = from; t < end; t++) {
        float2 sum = make_float2(0.0f, 0.0f);
        for (int tap = 0; tap < width; tap++) {
            const int at = t - (width - 1 - tap) * dilation;
            if (at < first && fresh) continue;
            const float2 in = at >= first
                ? two_of(normed + (size_t)at * channels + c)
                : *reinterpret_cast<const float2*>(of_slot + (size_t)(at - first + past) * channels);
            const float2 w = *reinterpret_cast<const float2*>(taps + (size_t)tap * channels + c);
            sum.x += in.x * w.x;
            sum.y += in.y * w.y;
        }
        const float2 u = two_of(gated + (size_t)t * channels + c);
        float2* to = reinterpret_cast<float2*>(x + (size_t)t * channels + c);
        *to = make_float2(to->x + u.x + sum.x * to_sigmoid(sum.x), to->y + u.y + sum.y * to_sigmoid(sum.y));
    }
}

// After convolve_ngrams. grid (ceil(channels / STREAM_THREADS), sequences)
KERNEL(keep_ngrams, STREAM_THREADS, 0, const bf16* normed, float* kept, const int* seq_first, const int* seq_slots,
    const int* positions, int channels, int past) {
    begin_kernel();
    const int c = blockIdx.x * STREAM_THREADS + threadIdx.x, s = blockIdx.y;
    if (c >= channels) return;
    const int first = seq_first[s], end = seq_first[s + 1];
    float* of_slot = kept + (size_t)seq_slots[s] * past * channels + c;
    const bool fresh = positions[first] == 0;
    for (int i = 0; i < past; i++) {
        const int t = end - past + i;
        float v = 0.0f;
        if (t >= first)
            v = to_f32(normed[(size_t)t * channels + c]);
        else if (!fresh)
            v = of_slot[(size_t)(i + end - first) * channels];
        of_slot[(size_t)i * channels] = v;
    }
}

// u [T, cols], x [T, cols] f32. grid (ceil(cols / STREAM_NUMBERS), rows)
KERNEL(add_ngrams, STREAM_THREADS, 0, const bf16* u, float* x, int cols) {
    begin_kernel();
    const int i = 4 * (blockIdx.x * STREAM_THREADS + threadIdx.x);
    if (i >= cols) return;
    const size_t at = (size_t)blockIdx.y * cols + i;
    const float4 a = four_of(x + at), b = four_of(u + at);
    *reinterpret_cast<float4*>(x + at) = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// The product for few tokens (streams_product.cu has it for many): a block has a row for PRODUCT_TOKENS tokens.
// grid (rows, ceil(tokens / PRODUCT_TOKENS))
constexpr int PRODUCT_TOKENS = 4;
KERNEL(streams_product_row, STREAM_THREADS, 0, PRODUCT_ARGUMENTS) {
    __shared__ float2 sums[STREAM_THREADS / WARP][PRODUCT_TOKENS]; // products and squares
    begin_kernel();
    const int row = blockIdx.x, t = blockIdx.y * PRODUCT_TOKENS, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    float2 acc[PRODUCT_TOKENS] = {};
    for (int i = 4 * threadIdx.x; i < width; i += STREAM_NUMBERS) {
        const float4 g = four_of(w + (size_t)row * width + i);
#pragma unroll
        for (int j = 0; j < PRODUCT_TOKENS; j++) {
            const float4 v = four_of(x + (size_t)min(t + j, tokens - 1) * width + i);
            acc[j].x += v.x * g.x + v.y * g.y + v.z * g.z + v.w * g.w;
            acc[j].y += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
    }
#pragma unroll
    for (int j = 0; j < PRODUCT_TOKENS; j++) {
        const float2 sum = make_float2(warp_sum(acc[j].x), warp_sum(acc[j].y));
        if (lane == 0) sums[warp][j] = sum;
    }
    __syncthreads();
    if (const int j = threadIdx.x; j < PRODUCT_TOKENS && t + j < tokens) {
        float2 all = make_float2(0.0f, 0.0f);
        for (int k = 0; k < STREAM_THREADS / WARP; k++) all.x += sums[k][j].x, all.y += sums[k][j].y;
        shares[(size_t)(t + j) * rows + row] =
            all.x * rsqrtf(all.y / width + eps) * scale[min(row / streams, 2)] + base[row];
    }
}

// x [T, streams * hidden], out [T, hidden], f32. Behind `streams` numbers for pre, shares become post and C; where
// there are only those, nothing. `by` has m of pre in rows of `by_numbers`; null: out is the first stream.
// grid (ceil(hidden / STREAM_NUMBERS), rows)
KERNEL(collapse_streams, STREAM_THREADS, 0, const float* x, float* shares, const float* by, float* out, int hidden,
    int streams, int numbers, int by_numbers, int iterations, float eps) {
    begin_kernel();
    float* row = shares + (size_t)blockIdx.y * numbers;
    const int i = 4 * (blockIdx.x * STREAM_THREADS + threadIdx.x), lane = threadIdx.x % WARP;
    if (blockIdx.x == 0 && threadIdx.x < WARP && numbers > streams) {
        float* post = row + streams;
        if (lane < streams) post[lane] = 2.0f / (1.0f + expf(-post[lane]));
        // A lane has element (j, k) of C.
        float* mixed = post + streams;
        const int j = lane / streams, k = lane % streams;
        const bool mine = lane < streams * streams;
        float v = mine ? mixed[lane] : -INFINITY, top = -INFINITY;
        auto of_row = [&](int n) { return __shfl_sync(ALL_LANES, v, min(j * streams + n, WARP - 1)); };
        auto of_column = [&](int n) { return __shfl_sync(ALL_LANES, v, n * streams + k); };
        for (int n = 0; n < streams; n++) top = fmaxf(top, of_row(n));
        v = expf(v - top);
        for (int step = 0; step < iterations; step++) {
            float sum = step == 0 ? 0.0f : eps;
            for (int n = 0; n < streams; n++) sum += of_row(n);
            v = v / sum + (step == 0 ? eps : 0.0f);
            sum = eps;
            for (int n = 0; n < streams; n++) sum += of_column(n);
            v /= sum;
        }
        if (mine) mixed[lane] = v;
    }
    if (i >= hidden) return;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int s = 0; s < (by ? streams : 1); s++) {
        const float pre = by ? 1.0f / (1.0f + expf(-by[(size_t)blockIdx.y * by_numbers + s])) + eps : 1.0f;
        const float4 v = four_of(x + ((size_t)blockIdx.y * streams + s) * hidden + i);
        sum = make_float4(sum.x + pre * v.x, sum.y + pre * v.y, sum.z + pre * v.z, sum.w + pre * v.w);
    }
    *reinterpret_cast<float4*>(out + (size_t)blockIdx.y * hidden + i) = sum;
}

// y [T, hidden], x, f32. grid (ceil(hidden / STREAM_NUMBERS), rows)
KERNEL(connect_streams, STREAM_THREADS, 0, const float* y, const float* shares, float* x, int hidden, int streams) {
    begin_kernel();
    const int i = 4 * (blockIdx.x * STREAM_THREADS + threadIdx.x);
    if (i >= hidden) return;
    const float *post = shares + (size_t)blockIdx.y * streams * (streams + 2) + streams, *mixed = post + streams;
    const float4 v = four_of(y + (size_t)blockIdx.y * hidden + i);
    float* at = x + (size_t)blockIdx.y * streams * hidden + i;
    float4 before[MAX_STREAMS];
#pragma unroll
    for (int j = 0; j < MAX_STREAMS; j++)
        if (j < streams) before[j] = four_of(at + (size_t)j * hidden);
    for (int k = 0; k < streams; k++) {
        float4 sum = make_float4(post[k] * v.x, post[k] * v.y, post[k] * v.z, post[k] * v.w);
#pragma unroll
        for (int j = 0; j < MAX_STREAMS; j++) {
            if (j >= streams) continue;
            const float c = mixed[j * streams + k];
            sum = make_float4(
                sum.x + c * before[j].x, sum.y + c * before[j].y, sum.z + c * before[j].z, sum.w + c * before[j].w);
        }
        *reinterpret_cast<float4*>(at + (size_t)k * hidden) = sum;
    }
}

// x [T, streams * hidden], out [T, hidden], f32. grid (ceil(hidden / STREAM_NUMBERS), rows)
KERNEL(mean_streams, STREAM_THREADS, 0, const float* x, float* out, int hidden, int streams) {
    begin_kernel();
    const int i = 4 * (blockIdx.x * STREAM_THREADS + threadIdx.x);
    if (i >= hidden) return;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int s = 0; s < streams; s++) {
        const float4 v = four_of(x + ((size_t)blockIdx.y * streams + s) * hidden + i);
        sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
    const float share = 1.0f / streams;
    *reinterpret_cast<float4*>(out + (size_t)blockIdx.y * hidden + i) =
        make_float4(sum.x * share, sum.y * share, sum.z * share, sum.w * share);
}
