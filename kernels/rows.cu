// Ops on single rows: embedding, RMS norm, RoPE, SiLU, gates, gathering, steering.
//
//   rms_norm      out[c] = x[c] / sqrt(mean(x^2) + eps) * w[c]
//   rope          (a, b) -> (a cos - b sin, b cos + a sin) for pairs (i, i + half) or (2i, 2i + 1); `back`: by -angle
//   activate      out = activation(gate, up) (activation.cuh)
//   gate          x *= 1 / (1 + exp(-gate)), or ln(1 + exp(gate))
//   gate_rows     x[t] = x[t] / (1 + exp(-(w . h[t])))
//
// Activations are bf16, the residual stream f32; sums are f32. Widths are multiples of 8 unless said.
//
// grid (rows), unless said.
#include "activation.cuh"

constexpr int ROW_THREADS = 256, ANGLE_THREADS = 64;
constexpr int ROW_NUMBERS = 4 * ROW_THREADS; // of a block of activate, gate, scale, softcap and clear

// out[t] = table[tokens[t]], a block for each time that a row of out holds it. grid (rows, times)
KERNEL(embed, ROW_THREADS, 0, const bf16* table, const uint32_t* tokens, float* out, int cols) {
    begin_kernel();
    const uint4* from = reinterpret_cast<const uint4*>(table + (size_t)tokens[blockIdx.x] * cols);
    float4* to = reinterpret_cast<float4*>(out + ((size_t)blockIdx.x * gridDim.y + blockIdx.y) * cols);
    for (int i = threadIdx.x; i < cols / 8; i += ROW_THREADS) {
        const uint4 v = from[i];
        to[2 * i] = make_float4(low_f32(v.x), high_f32(v.x), low_f32(v.y), high_f32(v.y));
        to[2 * i + 1] = make_float4(low_f32(v.z), high_f32(v.z), low_f32(v.w), high_f32(v.w));
    }
}

template <class T> __device__ __forceinline__ float4 load4(const T* x);
template <> __device__ __forceinline__ float4 load4(const float* x) { return *reinterpret_cast<const float4*>(x); }
template <> __device__ __forceinline__ float4 load4(const bf16* x) {
    const uint2 v = *reinterpret_cast<const uint2*>(x);
    return make_float4(low_f32(v.x), high_f32(v.x), low_f32(v.y), high_f32(v.y));
}
__device__ __forceinline__ void store4(bf16* x, float a, float b, float c, float d) {
    *reinterpret_cast<uint2*>(x) = make_uint2(pack_bf16(a, b), pack_bf16(c, d));
}

template <class T>
__device__ __forceinline__ void norm_row(const T* x, const float* w, float eps, bf16* out, int cols) {
    __shared__ float scratch[33];
    float sum = 0.0f;
    for (int i = 4 * threadIdx.x; i < cols; i += 4 * ROW_THREADS) {
        const float4 v = load4(x + i);
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    const float scale = rsqrtf(block_sum(sum, scratch) / cols + eps);
    for (int i = 4 * threadIdx.x; i < cols; i += 4 * ROW_THREADS) {
        const float4 v = load4(x + i), g = load4(w + i);
        store4(out + i, v.x * scale * g.x, v.y * scale * g.y, v.z * scale * g.z, v.w * scale * g.w);
    }
}

// Of a row, or of each run of `cols` numbers of a row by itself, whose weights follow each other. grid (rows, runs)
template <class T>
__device__ __forceinline__ void norm_run(const T* x, const float* w, float eps, bf16* out, int cols) {
    begin_kernel();
    const size_t at = ((size_t)blockIdx.x * gridDim.y + blockIdx.y) * cols;
    norm_row(x + at, w + (size_t)blockIdx.y * cols, eps, out + at, cols);
}
KERNEL(rms_norm_f32, ROW_THREADS, 0, const float* x, const float* w, float eps, bf16* out, int cols) {
    norm_run(x, w, eps, out, cols);
}
KERNEL(rms_norm_bf16, ROW_THREADS, 0, const bf16* x, const float* w, float eps, bf16* out, int cols) {
    norm_run(x, w, eps, out, cols);
}

// In place, every run of `width` numbers from column `first` on: a warp each. Any even width.
// grid (rows, ceil(runs / RUNS))
constexpr int RUNS = ROW_THREADS / WARP;
KERNEL(rms_norm_heads, ROW_THREADS, 0, bf16* x, const float* w, float eps, int pitch, int first, int width, int runs) {
    begin_kernel();
    const int run = blockIdx.y * RUNS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (run >= runs) return;
    uint32_t* row = reinterpret_cast<uint32_t*>(x + (size_t)blockIdx.x * pitch + first + (size_t)run * width);
    float sum = 0.0f;
    for (int i = lane; i < width / 2; i += WARP) {
        const uint32_t v = row[i];
        sum += low_f32(v) * low_f32(v) + high_f32(v) * high_f32(v);
    }
    const float scale = rsqrtf(warp_sum(sum) / width + eps);
    for (int i = lane; i < width / 2; i += WARP) {
        const uint32_t v = row[i];
        row[i] = pack_bf16(low_f32(v) * scale * w[2 * i], high_f32(v) * scale * w[2 * i + 1]);
    }
}

// out[t] = cos, then sin, of positions[t] * inv_freq, times `factor`. Positions may be 10^5: the angle is reduced in
// f64, after which the fast functions are right to 2^-21. grid (rows)
KERNEL(rope_angles, ANGLE_THREADS, 0, const uint32_t* positions, const float* inv_freq, float factor, float* out,
    int half) {
    begin_kernel();
    for (int i = threadIdx.x; i < half; i += ANGLE_THREADS) {
        const double angle = (float)positions[blockIdx.x] * inv_freq[i];
        const float rest = (float)(angle - rint(angle * 0.15915494309189535) * 6.283185307179586);
        out[(size_t)blockIdx.x * 2 * half + i] = __cosf(rest) * factor;
        out[(size_t)blockIdx.x * 2 * half + half + i] = __sinf(rest) * factor;
    }
}

// Columns [at, at + 2 half) of each of `heads` heads, in place.
KERNEL(rope, ROW_THREADS, 0, bf16* x, const float* angles, int heads, int head_dim, int at, int half, int interleaved,
    int back) {
    begin_kernel();
    const float* cos_row = angles + (size_t)blockIdx.x * 2 * half;
    const float* sin_row = cos_row + half;
    for (int i = threadIdx.x; i < heads * half; i += ROW_THREADS) {
        const int head = i / half, pair = i % half;
        bf16* part = x + ((size_t)blockIdx.x * heads + head) * head_dim + at;
        bf16 *a = part + (interleaved ? 2 * pair : pair), *b = part + (interleaved ? 2 * pair + 1 : pair + half);
        const float u = to_f32(*a), v = to_f32(*b), c = cos_row[pair], s = back ? -sin_row[pair] : sin_row[pair];
        *a = to_bf16(u * c - v * s);
        *b = to_bf16(v * c + u * s);
    }
}

// The first of the four numbers that a thread has in a grid of ceil(numbers / ROW_NUMBERS).
__device__ __forceinline__ long long four() { return 4 * ((long long)blockIdx.x * (ROW_NUMBERS / 4) + threadIdx.x); }

// grid (ceil(numbers / ROW_NUMBERS)); numbers a multiple of 4
KERNEL(
    activate, ROW_THREADS, 0, Activation activation, const bf16* gate, const bf16* up, bf16* out, long long numbers) {
    begin_kernel();
    const long long i = four();
    if (i >= numbers) return;
    const float4 g = load4(gate + i), u = load4(up + i);
    auto one = [&](float g, float u) {
        return activation.form == RELU_SQUARED ? relu_squared(u) : activated(activation, g, u);
    };
    store4(out + i, one(g.x, u.x), one(g.y, u.y), one(g.z, u.z), one(g.w, u.w));
}

// Each number of gate is for `each` of x. Grid as for activate; each 1 or a multiple of 4.
KERNEL(gate, ROW_THREADS, 0, const bf16* gate, bf16* x, int softplus, int each, long long numbers) {
    begin_kernel();
    const long long i = four();
    if (i >= numbers) return;
    const float4 v = load4(x + i);
    float4 g;
    if (each == 1)
        g = load4(gate + i);
    else
        g.x = g.y = g.z = g.w = to_f32(gate[i / each]);
    auto one = [&](float g, float v) {
        if (softplus) return v * (g > 20.0f ? g : log1pf(__expf(g)));
        return v / (1.0f + __expf(-g));
    };
    store4(x + i, one(g.x, v.x), one(g.y, v.y), one(g.z, v.z), one(g.w, v.w));
}

__device__ __forceinline__ void store4(float* x, float a, float b, float c, float d) {
    *reinterpret_cast<float4*>(x) = make_float4(a, b, c, d);
}
template <class T> __device__ __forceinline__ void scale_four(T* x, float factor, long long numbers) {
    begin_kernel();
    const long long i = four();
    if (i >= numbers) return;
    const float4 v = load4(x + i);
    store4(x + i, v.x * factor, v.y * factor, v.z * factor, v.w * factor);
}

// x *= factor. Grid and numbers as for activate.
KERNEL(scale_f32, ROW_THREADS, 0, float* x, float factor, long long numbers) { scale_four(x, factor, numbers); }
KERNEL(scale_bf16, ROW_THREADS, 0, bf16* x, float factor, long long numbers) { scale_four(x, factor, numbers); }

// x = cap * tanh(x / cap). Grid and numbers as for activate.
KERNEL(softcap, ROW_THREADS, 0, float* x, float cap, long long numbers) {
    begin_kernel();
    const long long i = four();
    if (i >= numbers) return;
    const float4 v = load4(x + i);
    auto one = [&](float v) { return cap * tanhf(v / cap); };
    store4(x + i, one(v.x), one(v.y), one(v.z), one(v.w));
}

// out = x. Grid and numbers as for activate.
KERNEL(rounded, ROW_THREADS, 0, const float* x, bf16* out, long long numbers) {
    begin_kernel();
    const long long i = four();
    if (i >= numbers) return;
    const float4 v = load4(x + i);
    store4(out + i, v.x, v.y, v.z, v.w);
}

// x = 0. Grid and numbers as for activate.
KERNEL(clear, ROW_THREADS, 0, float* x, long long numbers) {
    begin_kernel();
    const long long i = four();
    if (i < numbers) store4(x + i, 0.0f, 0.0f, 0.0f, 0.0f);
}

// x[t] *= 1 + beta * ln(1 + floor((position + offset) / length))
KERNEL(scale_by_position, ROW_THREADS, 0, bf16* x, const int* positions, float beta, float length, float offset,
    int cols) {
    begin_kernel();
    const float factor = 1.0f + beta * log1pf(floorf(((float)positions[blockIdx.x] + offset) / length));
    bf16* row = x + (size_t)blockIdx.x * cols;
    for (int i = 4 * threadIdx.x; i < cols; i += 4 * ROW_THREADS) {
        const float4 v = load4(row + i);
        store4(row + i, v.x * factor, v.y * factor, v.z * factor, v.w * factor);
    }
}

// x[t] = (x[t] + norm(y[t])) * scale, f32
KERNEL(norm_add, ROW_THREADS, 0, const float* y, const float* w, float eps, float scale, float* x, int cols) {
    begin_kernel();
    __shared__ float scratch[33];
    const float* from = y + (size_t)blockIdx.x * cols;
    float* to = x + (size_t)blockIdx.x * cols;
    float sum = 0.0f;
    for (int i = 4 * threadIdx.x; i < cols; i += 4 * ROW_THREADS) {
        const float4 v = load4(from + i);
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    const float n = rsqrtf(block_sum(sum, scratch) / cols + eps);
    for (int i = 4 * threadIdx.x; i < cols; i += 4 * ROW_THREADS) {
        const float4 v = load4(from + i), g = load4(w + i), r = load4(to + i);
        store4(to + i, (r.x + v.x * n * g.x) * scale, (r.y + v.y * n * g.y) * scale, (r.z + v.z * n * g.z) * scale,
            (r.w + v.w * n * g.w) * scale);
    }
}

// out[t] = norm(x[t] - mean(x[t]))
KERNEL(layer_norm, ROW_THREADS, 0, const float* x, const float* w, float eps, bf16* out, int cols) {
    begin_kernel();
    __shared__ float scratch[33];
    const float* row = x + (size_t)blockIdx.x * cols;
    float sum = 0.0f, squares = 0.0f;
    for (int i = 4 * threadIdx.x; i < cols; i += 4 * ROW_THREADS) {
        const float4 v = load4(row + i);
        sum += v.x + v.y + v.z + v.w;
    }
    const float mean = block_sum(sum, scratch) / cols;
    __syncthreads();
    for (int i = 4 * threadIdx.x; i < cols; i += 4 * ROW_THREADS) {
        const float4 v = load4(row + i);
        const float a = v.x - mean, b = v.y - mean, c = v.z - mean, d = v.w - mean;
        squares += a * a + b * b + c * c + d * d;
    }
    const float n = rsqrtf(block_sum(squares, scratch) / cols + eps);
    bf16* to = out + (size_t)blockIdx.x * cols;
    for (int i = 4 * threadIdx.x; i < cols; i += 4 * ROW_THREADS) {
        const float4 v = load4(row + i), g = load4(w + i);
        store4(to + i, (v.x - mean) * n * g.x, (v.y - mean) * n * g.y, (v.z - mean) * n * g.z, (v.w - mean) * n * g.w);
    }
}

// out[t] = weights[t] * h[t], and weights[t] = 1: of a token's only expert.
KERNEL(weigh_input, ROW_THREADS, 0, float* weights, const bf16* h, bf16* out, int cols) {
    begin_kernel();
    const float weight = weights[blockIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) weights[blockIdx.x] = 1.0f;
    for (int i = 4 * threadIdx.x; i < cols; i += 4 * ROW_THREADS) {
        const float4 v = load4(h + (size_t)blockIdx.x * cols + i);
        store4(out + (size_t)blockIdx.x * cols + i, v.x * weight, v.y * weight, v.z * weight, v.w * weight);
    }
}

KERNEL(gate_rows, ROW_THREADS, 0, const float* w, const bf16* h, bf16* x, int hidden, int cols) {
    begin_kernel();
    __shared__ float scratch[33];
    float dot = 0.0f;
    for (int i = 4 * threadIdx.x; i < hidden; i += 4 * ROW_THREADS) {
        const float4 v = load4(h + (size_t)blockIdx.x * hidden + i), g = load4(w + i);
        dot += v.x * g.x + v.y * g.y + v.z * g.z + v.w * g.w;
    }
    const float share = 1.0f / (1.0f + __expf(-block_sum(dot, scratch)));
    bf16* row = x + (size_t)blockIdx.x * cols;
    for (int i = 4 * threadIdx.x; i < cols; i += 4 * ROW_THREADS) {
        const float4 v = load4(row + i);
        store4(row + i, v.x * share, v.y * share, v.z * share, v.w * share);
    }
}

// out[i] = x[rows[i] - first], f32
KERNEL(gather, ROW_THREADS, 0, const float* x, const uint32_t* rows, int first, float* out, int cols) {
    begin_kernel();
    const float* from = x + (size_t)(rows[blockIdx.x] - first) * cols;
    for (int i = 4 * threadIdx.x; i < cols; i += 4 * ROW_THREADS)
        *reinterpret_cast<float4*>(out + (size_t)blockIdx.x * cols + i) = load4(from + i);
}

// A multiple of a vector, for the rows [from, to) of the batch, at every run of its length.
struct Addition {
    const float* vector;
    float coefficient;
    int from, to, length;
};

// x[t] += coefficient * vector for the additions [range[0], range[1]), in their order, f32, rounded twice as the CPU
// does it. Row 0 of x is row `first` of the batch.
KERNEL(add_vectors, ROW_THREADS, 0, const uint32_t* range, const Addition* additions, int first, float* x, int cols) {
    begin_kernel();
    const int t = first + blockIdx.x;
    float* row = x + (size_t)blockIdx.x * cols;
    for (uint32_t n = range[0]; n < range[1]; n++) {
        const Addition a = additions[n];
        if (t < a.from || t >= a.to) continue;
        for (int i = threadIdx.x; i < cols; i += ROW_THREADS)
            row[i] = __fadd_rn(row[i], __fmul_rn(a.coefficient, a.vector[i % a.length]));
    }
}
