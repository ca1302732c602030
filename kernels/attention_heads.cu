// What queries, keys and values go through between their products and attention, in one pass: norm of heads, rotation,
// and keys and values into the cache.
//
// A head x [dim]:
//   x[0, norm_width) = rmsnorm, if there is a norm
//   (a, b) = (a cos - b sin, b cos + a sin) for pairs of x[at, at + 2 half)
//
// q [T, q.heads * q.dim] changes in place, without a norm what is rotated; k [T, k.heads * k.dim] and v [T, k.heads *
// v_dim] bf16 (v null: MLA) go to the cache (layout: attention.cuh), at positions[t] of sequence token_seq[t]; a
// negative position is not stored. angles [T, 2 half] f32: cos, then sin. Pairs are (i, i + half) or, interleaved, (2i,
// 2i + 1). In between all is f32. A warp takes a head. Dimensions, `at`, and norm_width are multiples of 8, dim <= 576.
// With `independent`, the kernel in front reads and writes nothing that this one writes, wrote nothing that it reads,
// and has waited before it lets this one begin (begin_kernel): this one does not wait for its end.
//
// prepare_heads_{bf16|int8}: grid (T, ceil((q.heads + k.heads + (v ? k.heads : 0)) / HEADS_WARPS))
#include "attention.cuh"

constexpr int HEADS_WARPS = 8, HEADS_THREADS = HEADS_WARPS * WARP, MAX_DIM = 576,
              FIRST = 4; // of a head's norm to a lane that are read ahead

struct Heads {
    bf16* x;
    const float* norm; // null: none
    int heads, dim, norm_width, at;
    float eps;
};
struct PrepareHeads {
    Heads q, k;
    const bf16* v;
    const float* angles;
    void *keys, *values;
    const int *positions, *token_seq, *seq_blocks;
    const uint32_t* block_table;
    int v_dim, half, interleaved, independent;
};

// A head's numbers to position `at` of its page; or to any row, with a page's beginning and 0.
__device__ __forceinline__ void write_head(const float* row, bf16* page, int at, int dim, int lane) {
    for (int i = 2 * lane; i < dim; i += 2 * WARP)
        *reinterpret_cast<uint32_t*>(page + at * dim + i) = pack_bf16(row[i], row[i + 1]);
}
static_assert(KV_GROUP == 2 * WARP, "a pair to a lane");
__device__ __forceinline__ void write_head(const float* row, int8* page, int at, int dim, int lane) {
    bf16* scales = reinterpret_cast<bf16*>(page + PAGE * dim);
    for (int group = 0; group < groups_of<int8>(dim); group++) {
        const int i = group * KV_GROUP + 2 * lane;
        const float a = i < dim ? row[i] : 0.0f, b = i < dim ? row[i + 1] : 0.0f;
        const Scale scale = scale_for(warp_max(fmaxf(fabsf(a), fabsf(b))));
        if (i < dim)
            *reinterpret_cast<uint16_t*>(page + at * dim + i) = (uint16_t)(code_of(a, scale) | code_of(b, scale) << 8);
        if (lane == 0) scales[group * PAGE + at] = scale.scale;
    }
}

template <class Cache> __device__ __forceinline__ void prepare_heads(const PrepareHeads& a) {
    __shared__ float rows[HEADS_WARPS][MAX_DIM];
    const int t = blockIdx.x, lane = threadIdx.x % WARP;
    int head = blockIdx.y * HEADS_WARPS + threadIdx.x / WARP;
    float* row = rows[threadIdx.x / WARP];
    const bool query = head < a.q.heads;
    if (!query) head -= a.q.heads;
    const bool value = !query && head >= a.k.heads;
    if (value) head -= a.k.heads;
    const bool none = (head >= a.k.heads && !query) || (value && !a.v);

    // What was written before the products in front is read before they have ended.
    const Heads& heads = query ? a.q : a.k;
    const int dim = value ? a.v_dim : heads.dim, position = query ? 0 : __ldcg(a.positions + t);
    const float *cos_row = a.angles + (size_t)t * 2 * a.half, *sin_row = cos_row + a.half;
    const bool turns = !value && lane < a.half, scaled = !value && heads.norm;
    float first_cos = 0.0f, first_sin = 0.0f, norm[FIRST] = {};
    uint32_t block = 0;
    if (!none) {
        if (turns) first_cos = __ldcg(cos_row + lane), first_sin = __ldcg(sin_row + lane);
#pragma unroll
        for (int i = 0; i < FIRST; i++)
            if (scaled && lane + WARP * i < heads.norm_width) norm[i] = heads.norm[lane + WARP * i];
        if (!query && position >= 0)
            block = __ldcg(a.block_table + __ldcg(a.seq_blocks + __ldcg(a.token_seq + t)) + position / PAGE);
    }
    if (a.independent)
        let_next_kernel_begin();
    else
        begin_short_kernel();
    if (none) return;

    // Of a query that has no norm only what is rotated.
    const int begin = query && !heads.norm ? heads.at : 0, end = query && !heads.norm ? heads.at + 2 * a.half : dim;
    const bf16* from = (value ? a.v : heads.x) + ((size_t)t * heads.heads + head) * dim;
    float squares = 0.0f;
    for (int i = begin + 8 * lane; i < end; i += 8 * WARP) {
        const uint4 x = *reinterpret_cast<const uint4*>(from + i);
        const float v[8] = {low_f32(x.x), high_f32(x.x), low_f32(x.y), high_f32(x.y), low_f32(x.z), high_f32(x.z),
            low_f32(x.w), high_f32(x.w)};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            row[i + j] = v[j];
            if (i < heads.norm_width) squares += v[j] * v[j];
        }
    }
    if (!value) {
        __syncwarp();
        if (heads.norm) {
            const float scale = rsqrtf(warp_sum(squares) / heads.norm_width + heads.eps);
#pragma unroll
            for (int i = 0; i < FIRST; i++)
                if (lane + WARP * i < heads.norm_width) row[lane + WARP * i] *= scale * norm[i];
            for (int i = lane + WARP * FIRST; i < heads.norm_width; i += WARP) row[i] *= scale * heads.norm[i];
            __syncwarp();
        }
        for (int i = lane; i < a.half; i += WARP) {
            float *first = row + heads.at + (a.interleaved ? 2 * i : i),
                  *second = a.interleaved ? first + 1 : first + a.half;
            const float u = *first, v = *second, c = i < WARP ? first_cos : cos_row[i],
                        s = i < WARP ? first_sin : sin_row[i];
            *first = u * c - v * s;
            *second = v * c + u * s;
        }
    }
    __syncwarp();
    if (query) {
        write_head(row + begin, a.q.x + ((size_t)t * a.q.heads + head) * dim + begin, 0, end - begin, lane);
        return;
    }
    if (position < 0) return;
    Cache* page = page_of((Cache*)(value ? a.values : a.keys), block, a.k.heads, head, dim);
    write_head(row, page, position % PAGE, dim, lane);
}

#define PREPARE_HEADS(name, Cache)                                                                                     \
    KERNEL(name, HEADS_THREADS, 0, const __grid_constant__ PrepareHeads a) {                                           \
        prepare_heads<Cache>(a);                                                                                       \
        /* A kernel that waits for this one also waits for the one in front of it. */                                  \
        if (a.independent) wait_for_previous_kernel();                                                                 \
    }
PREPARE_HEADS(prepare_heads_bf16, bf16)
PREPARE_HEADS(prepare_heads_int8, int8)
