// Dense products of one to eight tokens: as fast as the weights can be read.
//
// y[t, i] = (add ? y[t, i] : 0) + sum_k x[t, k] w[i, k] + bias[i] for up to three matrices with the same x (query, key
// and value; gate and up) and, over grid y, for a batch: x + z x_batch by w + z w_batch into y + z y_batch (in
// elements; the bias is the same for all). x [tokens, k] bf16, pitch x_pitch; w [n, k] bf16 without gaps; y bf16 or
// f32, pitch y_pitch; bias [n] f32 or null. tokens 1 to 8, n >= 1, k a multiple of 8, w_batch, x_batch and x_pitch
// multiples of 8, x and w aligned to 16 bytes.
//
// Tensor cores multiply 16 rows of weights by 8 tokens straight from registers: as k may be permuted, if only in the
// same way on both sides, 16 bytes of a row that a thread reads are its share of two mma, and nothing is converted or
// shared. The cost is the same for all of 1 to 8 tokens. A block's eight warps take `k_warps` parts of k (1, 2, 4 or 8)
// of 8 / k_warps times 16 rows. Sums of the parts are added in the order of k.
//
// Variants of x:
//   gemv_*       x bf16
//   gemv_norm_*  x = rmsnorm(residual): residual f32 [tokens, k] with pitch x_pitch, norm weights f32 [k], eps;
//                residual times weights is rounded to bf16, and the sums are divided by the root mean square, which
//                each block finds on the way
// and of what is done with two products:
//   gemv_silu: y = silu(gate x) (up x) in bf16; job[0] is gate with y, job[1] is up (only its w, w_batch and bias are
//   read), equal n.
//
// Launch: grid (sum over jobs of div_ceil(n, GEMV_WARPS * ROWS / k_warps), batch); for silu only job[0] counts. Jobs
// that are not there have n = 0 and stand last.
//
// Which: k_warps 8, or 4 for k <= 256.
// The kernel in front must not write weights: they are read before it has ended. With `independent`, x is, too.
//
//   gemv_bf16_set, gemv_f32_set, gemv_f32_add, gemv_silu, gemv_norm_bf16_set
#include "common.cuh"

struct GemvJob {
    const bf16* w;
    const float* bias;
    void* y;
    int64_t w_batch, y_batch;
    int n, y_pitch;
};
struct Gemv {
    GemvJob job[3];
    const void* x;
    const float* norm;
    int64_t x_batch;
    int x_pitch, tokens, k, k_warps;
    float eps;
    int independent; // nothing here is read or written by the kernel in front, or was written by it
};

constexpr int GEMV_WARPS = 8, GEMV_THREADS = GEMV_WARPS * WARP, MAX_TOKENS = 8, ROWS = 16;
// A thread's share of two mma for each of DEPTH x MATRICES: 16 bytes of row g and of row g + 8.
template <int MATRICES, int DEPTH> struct Weights {
    uint4 low[MATRICES][DEPTH], high[MATRICES][DEPTH];
};

template <class Out, bool ADD, bool NORM, bool SILU> __device__ __forceinline__ void gemv(const Gemv& a) {
    constexpr int MATRICES = SILU ? 2 : 1, DEPTH = (NORM ? 2 : 4) / MATRICES,
                  STEP = 32 * DEPTH; // numbers of k that a warp takes at once
    __shared__ float parts[GEMV_WARPS][MATRICES][MAX_TOKENS * ROWS];
    [[maybe_unused]] __shared__ float squares_of[GEMV_WARPS][MAX_TOKENS];
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, g = lane / 4, quarter = lane % 4;
    const int row_groups = GEMV_WARPS / a.k_warps, k_warp = warp % a.k_warps;

    GemvJob job = a.job[0];
    int block = blockIdx.x;
    if (!SILU) {
        const int blocks_0 = div_ceil(a.job[0].n, ROWS * row_groups),
                  blocks_1 = div_ceil(a.job[1].n, ROWS * row_groups);
        if (block >= blocks_0 + blocks_1) {
            job = a.job[2];
            block -= blocks_0 + blocks_1;
        } else if (block >= blocks_0) {
            job = a.job[1];
            block -= blocks_0;
        }
    }
    const int first_row = (block * row_groups + warp / a.k_warps) * ROWS;
    // Rows past the end read the last one again.
    const int64_t low_row = (int64_t)min(first_row + g, job.n - 1) * a.k,
                  high_row = (int64_t)min(first_row + g + 8, job.n - 1) * a.k;
    const bf16* w[MATRICES];
    w[0] = job.w + blockIdx.y * job.w_batch;
    if (SILU) w[MATRICES - 1] = a.job[1].w + blockIdx.y * a.job[1].w_batch;

    using Step = Weights<MATRICES, DEPTH>;
    auto read = [&](int k0) {
        Step s;
#pragma unroll
        for (int m = 0; m < MATRICES; m++)
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                const int k = k0 + 32 * d + 8 * quarter;
                const bool inside = k < a.k;
                s.low[m][d] = inside ? load_streaming((const uint4*)(w[m] + low_row + k)) : make_uint4(0, 0, 0, 0);
                s.high[m][d] = inside ? load_streaming((const uint4*)(w[m] + high_row + k)) : make_uint4(0, 0, 0, 0);
            }
        return s;
    };

    // The first weights are on their way before x is looked at, and even before the kernel that makes x has ended.
    int k0 = k_warp * STEP;
    Step now = read(k0);
    for (int k = k0 + a.k_warps * STEP; k < a.k; k += a.k_warps * STEP) {
        // A lane has 128 bytes of a row.
        const int row = min(first_row + lane % ROWS, job.n - 1), at = MATRICES == 2 ? k : k + 64 * (lane / ROWS);
        if (at < a.k && (lane < ROWS || MATRICES == 2 || STEP > 64))
            prefetch_l2((SILU && lane >= ROWS ? w[MATRICES - 1] : w[0]) + (int64_t)row * a.k + at);
    }
    if (a.independent)
        let_next_kernel_begin();
    else
        begin_kernel();
    const bf16* x = (const bf16*)a.x + blockIdx.y * a.x_batch + g * a.x_pitch;
    const float* residual = (const float*)a.x + g * a.x_pitch;
    float squares = 0.0f;
    // Eight numbers of token g for a thread of its quarter.
    auto inputs = [&](int k) {
        if (k >= a.k || g >= a.tokens) return make_uint4(0, 0, 0, 0);
        if constexpr (!NORM) {
            return *(const uint4*)(x + k);
        } else {
            const float4 v = *(const float4*)(residual + k), u = *(const float4*)(residual + k + 4);
            const float4 n = *(const float4*)(a.norm + k), m = *(const float4*)(a.norm + k + 4);
            squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w + u.x * u.x + u.y * u.y + u.z * u.z + u.w * u.w;
            return make_uint4(pack_bf16(v.x * n.x, v.y * n.y), pack_bf16(v.z * n.z, v.w * n.w),
                pack_bf16(u.x * m.x, u.y * m.y), pack_bf16(u.z * m.z, u.w * m.w));
        }
    };

    float sum[MATRICES][4] = {};
    while (k0 < a.k) {
        const int next_k0 = k0 + a.k_warps * STEP;
        Step next = read(next_k0);
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const uint4 b = inputs(k0 + 32 * d + 8 * quarter);
#pragma unroll
            for (int m = 0; m < MATRICES; m++) {
                const uint4 low = now.low[m][d], high = now.high[m][d];
                mma_bf16(sum[m], {low.x, high.x, low.y, high.y}, {b.x, b.y});
                mma_bf16(sum[m], {low.z, high.z, low.w, high.w}, {b.z, b.w});
            }
        }
        now = next;
        k0 = next_k0;
    }

#pragma unroll
    for (int m = 0; m < MATRICES; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) parts[warp][m][(2 * quarter + e % 2) * ROWS + g + e / 2 * 8] = sum[m][e];
    if (NORM) {
        squares += __shfl_xor_sync(ALL_LANES, squares, 1);
        squares += __shfl_xor_sync(ALL_LANES, squares, 2);
        if (quarter == 0) squares_of[warp][g] = squares;
    }
    __syncthreads();
    for (int i = tid; i < row_groups * MAX_TOKENS * ROWS; i += GEMV_WARPS * WARP) {
        const int group = i / (MAX_TOKENS * ROWS), at = i % (MAX_TOKENS * ROWS), t = at / ROWS;
        const int row = (block * row_groups + group) * ROWS + at % ROWS;
        if (t >= a.tokens || row >= job.n) continue;
        float v[MATRICES];
#pragma unroll
        for (int m = 0; m < MATRICES; m++) {
            const float* bias = m == 0 ? job.bias : a.job[1].bias;
            v[m] = 0.0f;
            for (int p = 0; p < a.k_warps; p++) v[m] += parts[group * a.k_warps + p][m][at];
            if (NORM) {
                float all = 0.0f;
                for (int p = 0; p < a.k_warps; p++) all += squares_of[group * a.k_warps + p][t];
                v[m] *= rsqrtf(all / (float)a.k + a.eps);
            }
            if (bias) v[m] += bias[row];
        }
        Out* y = (Out*)job.y + blockIdx.y * job.y_batch + (int64_t)t * job.y_pitch + row;
        float out = v[0];
        if (SILU) out = v[0] / (1.0f + __expf(-v[0])) * v[MATRICES - 1];
        if (ADD) out += to_f32(*y);
        *y = from_f32<Out>(out);
    }
    // A kernel that waits for this one also waits for the one in front of it.
    if (a.independent) wait_for_previous_kernel();
}

#define GEMV(name, Out, ADD, NORM, SILU)                                                                               \
    KERNEL_BLOCKS(name, GEMV_THREADS, 3, 0, const __grid_constant__ Gemv a) { gemv<Out, ADD, NORM, SILU>(a); }

GEMV(gemv_bf16_set, bf16, false, false, false)
GEMV(gemv_f32_set, float, false, false, false)
GEMV(gemv_f32_add, float, true, false, false)
GEMV(gemv_silu, bf16, false, false, true)
GEMV(gemv_norm_bf16_set, bf16, false, true, false)
