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
// shared. The cost is the same for all of 1 to 8 tokens. A block's eight warps take `k_warps` parts of k (4 or 8) of
// 8 / k_warps times 16 rows. Sums of the parts are added in the order of k.
//
// Variants of x:
//   gemv_*       x bf16
//   gemv_norm_*  x = rmsnorm(residual): residual f32 [tokens, k] with pitch x_pitch, norm weights f32 [k], eps;
//                residual times weights is rounded to bf16, and the sums are divided by the root mean square, which
//                each block finds on the way
// of what is done with two products:
//   gemv_silu: y = silu(gate x) (up x) in bf16; job[0] is gate with y, job[1] is up (only its w, w_batch and bias are
//   read), equal n.
// and of where weights wait for x:
//   gemv_held_*  in shared memory, all of a block's: for k <= MAX_HELD, no more blocks than multiprocessors, and
//                devices that give a block HELD_BYTES
//   others       those of two steps in registers, the rest on their way to L2
//
// Sums of ranks (rank_sum.cuh), where `sum` has several: of one job without a batch, whose y is f32 [tokens, n] without
// gaps, tokens * n <= FEW_NUMBERS: y is what all ranks' products give together, of which a rank adds to y but for
// those that are `over` it.
//
// Launch: grid (sum over jobs of div_ceil(n, GEMV_WARPS * ROWS / k_warps), batch); for silu only job[0] counts. Jobs
// that are not there have n = 0 and stand last.
//
// Which: k_warps 8, or 4 for k <= 256.
// The kernel in front must not write weights: they are read before it has ended. With `independent`, x is, too, and the
// kernel in front must have waited before it let this one begin (begin_kernel).
//
//   gemv_bf16_set, gemv_f32_set, gemv_f32_add, gemv_held_f32_add, gemv_silu, gemv_norm_bf16_set
#include "product.cuh"
#include "rank_sum.cuh"

struct Gemv {
    ProductJob job[3];
    const void* x;
    const float* norm;
    int64_t x_batch;
    int x_pitch, tokens, k, k_warps;
    float eps;
    int independent; // nothing here is read or written by the kernel in front, or was written by it
    int over;        // what stands in y is not added to
    RankSum sum;
};

constexpr int GEMV_WARPS = 8, GEMV_THREADS = GEMV_WARPS * WARP, MAX_TOKENS = 8, ROWS = 16, MAX_HELD = 4096,
              HELD_WEIGHTS = ROWS * MAX_HELD * 2, HELD_BYTES = HELD_WEIGHTS + 24576, MOST_AHEAD = 32 << 20;
// A thread's share of two mma for each of DEPTH x MATRICES: 16 bytes of row g and of row g + 8.
template <int MATRICES, int DEPTH> struct Weights {
    uint4 low[MATRICES][DEPTH], high[MATRICES][DEPTH];
};

template <class Out, bool ADD, bool NORM, bool SILU, bool HELD = false>
__device__ __forceinline__ void gemv(const Gemv& a) {
    constexpr int MATRICES = SILU ? 2 : 1, DEPTH = 2 / MATRICES,
                  STEP = 32 * DEPTH; // numbers of k that a warp takes at once
    __shared__ float parts[GEMV_WARPS][MATRICES][MAX_TOKENS * ROWS];
    [[maybe_unused]] __shared__ float squares_of[GEMV_WARPS][MAX_TOKENS];
    constexpr int RING = NORM ? 1 : HELD ? 2 : 4; // portions of inputs that are here or on their way
    __shared__ uint4 inputs[GEMV_WARPS][RING][WARP * DEPTH];
    [[maybe_unused]] __shared__ float4 residual[GEMV_WARPS][2][WARP * DEPTH], norms[GEMV_WARPS][2][WARP * DEPTH];
    static_assert(sizeof(parts) + sizeof(inputs) <= HELD_BYTES - HELD_WEIGHTS || !HELD, "shared memory beside weights");
    const int tid = threadIdx.x, lane = tid % WARP, warp = tid / WARP, g = lane / 4, quarter = lane % 4;
    const int row_groups = GEMV_WARPS / a.k_warps, k_warp = warp % a.k_warps;

    ProductJob job = a.job[0];
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
    [[maybe_unused]] Step now, next;
    // Held: all of a block's weights are in shared memory before x is; what a lane will need is in places of its own.
    DYNAMIC_SHARED(uint4, held);
    uint4* own = held + warp * (MAX_HELD / GEMV_WARPS / 8 * ROWS) + lane;
    if constexpr (HELD) {
        uint4* to = own;
        for (int k = k0; k < a.k; k += a.k_warps * STEP)
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                const int at = k + 32 * d + 8 * quarter;
                copy_async_16(to, w[0] + low_row + min(at, a.k - 8), at < a.k);
                copy_async_16(to + WARP, w[0] + high_row + min(at, a.k - 8), at < a.k);
                to += 2 * WARP;
            }
        copy_async_commit();
    } else {
        now = read(k0), next = read(k0 + a.k_warps * STEP);
    }
    // Weights of a launch that L2 holds are on their way to it.
    const int first = block * row_groups * ROWS;
    const uint32_t bytes = (uint32_t)(min(row_groups * ROWS, job.n - first) * a.k) * sizeof(bf16);
    if (!HELD && (uint64_t)bytes * MATRICES * gridDim.x * gridDim.y <= MOST_AHEAD)
#pragma unroll
        for (int m = 0; m < MATRICES; m++) prefetch_l2_bytes(w[m] + (int64_t)first * a.k, bytes, tid, GEMV_THREADS);
    // Inputs go through shared memory: what a lane brings, eight numbers of a token at a time, others need, too. A
    // portion is DEPTH eights of each lane: a step of the warp for 8 tokens, eight steps for one.
    const int shift = a.tokens > 4 ? 3 : a.tokens > 2 ? 2 : a.tokens - 1, steps = MAX_TOKENS >> shift;
    const int token = min(lane & (1 << shift) - 1, a.tokens - 1);
    auto k_of = [&](int portion, int d) {
        const int i = (lane + WARP * d) >> shift; // of a token's eights
        return (k_warp + (portion * steps + i / (4 * DEPTH)) * a.k_warps) * STEP + i % (4 * DEPTH) * 8;
    };
    auto bring_norm = [&](int portion) {
#pragma unroll 1
        for (int d = 0; d < DEPTH; d++) {
            const int k = k_of(portion, d);
            const float* from = a.norm + min(k, a.k - 8);
            copy_async_16_cached(norms[warp][0] + lane + WARP * d, from, k < a.k);
            copy_async_16_cached(norms[warp][1] + lane + WARP * d, from + 4, k < a.k);
        }
    };
    auto bring = [&](int portion) {
#pragma unroll 1
        for (int d = 0; d < DEPTH; d++) {
            const int k = k_of(portion, d), at = token * a.x_pitch + min(k, a.k - 8);
            if constexpr (NORM) {
                const float* from = (const float*)a.x + at;
                copy_async_16_cached(residual[warp][0] + lane + WARP * d, from, k < a.k);
                copy_async_16_cached(residual[warp][1] + lane + WARP * d, from + 4, k < a.k);
            } else {
                const bf16* from = (const bf16*)a.x + blockIdx.y * a.x_batch + at;
                copy_async_16_cached(inputs[warp][portion % RING] + lane + WARP * d, from, k < a.k);
            }
        }
        copy_async_commit();
    };
    if constexpr (NORM) bring_norm(0);
    if (a.independent)
        let_next_kernel_begin();
    else
        begin_kernel();
    // What this thread writes in the end.
    const int group = tid / (MAX_TOKENS * ROWS), at = tid % (MAX_TOKENS * ROWS),
              row = (block * row_groups + group) * ROWS + at % ROWS;
    const bool writes = group < row_groups && at / ROWS < a.tokens && row < job.n;
    auto y = [&] { return (Out*)job.y + blockIdx.y * job.y_batch + (int64_t)(at / ROWS) * job.y_pitch + row; };
    const float before = ADD && writes && !a.over ? to_f32(*y()) : 0.0f;

    float sum[MATRICES][4] = {}, squares = 0.0f;
    // A step's products with the inputs that `input(d)` says, and on to the next.
    auto multiply = [&](auto input) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const uint4 b = input(d);
#pragma unroll
            for (int m = 0; m < MATRICES; m++) {
                const uint4 low = HELD ? own[0] : now.low[m][d], high = HELD ? own[WARP] : now.high[m][d];
                if (HELD) own += 2 * WARP;
                mma_bf16(sum[m], {low.x, high.x, low.y, high.y}, {b.x, b.y});
                mma_bf16(sum[m], {low.z, high.z, low.w, high.w}, {b.z, b.w});
            }
        }
        k0 += a.k_warps * STEP;
        if (!HELD) now = next, next = read(k0 + a.k_warps * STEP);
    };
    if (!NORM && shift == 3) {
        // No lane needs what another one does.
        const bf16* x = (const bf16*)a.x + blockIdx.y * a.x_batch + min(g, a.tokens - 1) * a.x_pitch;
        copy_async_wait<0>();
        while (k0 < a.k) multiply([&](int d) { return *(const uint4*)(x + min(k0 + 32 * d + 8 * quarter, a.k - 8)); });
    } else {
#pragma unroll
        for (int i = 0; i < max(RING - 1, 1); i++) bring(i);
        for (int portion = 0; k0 < a.k; portion++) {
            copy_async_wait<(RING > 1 ? RING - 2 : 0)>();
            __syncwarp();
            uint4* here = inputs[warp][portion % RING];
            if constexpr (NORM) {
#pragma unroll 1
                for (int i = lane; i < WARP * DEPTH; i += WARP) {
                    const float4 v = residual[warp][0][i], u = residual[warp][1][i], n = norms[warp][0][i],
                                 m = norms[warp][1][i];
                    squares +=
                        v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w + u.x * u.x + u.y * u.y + u.z * u.z + u.w * u.w;
                    here[i] = make_uint4(pack_bf16(v.x * n.x, v.y * n.y), pack_bf16(v.z * n.z, v.w * n.w),
                        pack_bf16(u.x * m.x, u.y * m.y), pack_bf16(u.z * m.z, u.w * m.w));
                }
                bring_norm(portion + 1);
            }
            bring(portion + max(RING - 1, 1));
            if (NORM) __syncwarp();
            const uint4* from = here + (quarter << shift | g & (1 << shift) - 1);
            for (int step = 0; step < steps && k0 < a.k; step++)
                multiply([&](int d) { return from[(step * DEPTH + d) * 4 << shift]; });
            if (NORM) __syncwarp();
        }
        copy_async_wait<0>();
    }

#pragma unroll
    for (int m = 0; m < MATRICES; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) parts[warp][m][(2 * quarter + e % 2) * ROWS + g + e / 2 * 8] = sum[m][e];
    if (NORM) {
        for (int d = 1 << shift; d < WARP; d *= 2) squares += __shfl_xor_sync(ALL_LANES, squares, d);
        if (lane < 1 << shift) squares_of[warp][lane] = squares;
    }
    __syncthreads();
    float out = 0.0f;
    if (writes) {
        float v[MATRICES];
#pragma unroll
        for (int m = 0; m < MATRICES; m++) {
            const float* bias = m == 0 ? job.bias : a.job[1].bias;
            v[m] = 0.0f;
#pragma unroll
            for (int p = 0; p < GEMV_WARPS; p++)
                if (p < a.k_warps) v[m] += parts[group * a.k_warps + p][m][at];
            if (NORM) {
                float all = 0.0f;
#pragma unroll
                for (int p = 0; p < GEMV_WARPS; p++)
                    if (p < a.k_warps) all += squares_of[group * a.k_warps + p][at / ROWS];
                v[m] *= rsqrtf(all / (float)a.k + a.eps);
            }
            if (bias) v[m] += bias[row];
        }
        out = v[0];
        if (SILU) out = v[0] / (1.0f + __expf(-v[0])) * v[MATRICES - 1];
        if (ADD) out += before;
    }
    if constexpr (ADD) out = sum_of_ranks(a.sum, at / ROWS * job.n + row, out, writes);
    if (writes) *y() = from_f32<Out>(out);
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
KERNEL_BLOCKS(gemv_held_f32_add, GEMV_THREADS, 1, HELD_WEIGHTS, const __grid_constant__ Gemv a) {
    gemv<float, true, false, false, true>(a);
}
