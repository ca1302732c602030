// Pairs (token, slot) of routed experts brought into the order of their experts, and cut into tiles of the grouped
// products.
//
// A pair is p = token * top_k + slot. It is skipped if its id is not in 0..num_experts or experts[id] (the address of
// the packed expert) is 0. The others:
//   pair_slot[offsets[e] .. offsets[e + 1]]   pairs of expert e, increasing       [pairs], i32
//   offsets                                   [num_experts + 1], i32
//   tiles                                     [pairs / tile_tokens + num_experts] of (expert, first, last + 1, 0):
//                                             up to tile_tokens positions of pair_slot
// Tiles of e begin at offsets[e] / tile_tokens + e, which leaves each expert room without knowing the others' counts;
// entries not needed have first = last. With tile_tokens 0 there are none.
//
// One block for an expert: every block reads all ids, counts those of lower and of its own experts, then writes its
// own. Reading them again and again from L2 costs less than the two more launches of a counting sort (pairs <= 131072,
// num_experts <= 512).
//
//   experts_sort    grid (num_experts); ids [pairs] aligned to 16 bytes, experts [num_experts], used [num_experts] or
//                   null: counts pairs of each expert that is here
#include "common.cuh"
#include "experts.cuh"

constexpr int SORT_THREADS = 1024, SORT_WARPS = SORT_THREADS / WARP, STEP = 4 * WARP;

// Four ids from i on; -1 beyond the end.
__device__ __forceinline__ int4 four_ids(const int* ids, int i, int pairs) {
    if (i + 4 <= pairs) return *reinterpret_cast<const int4*>(ids + i);
    return make_int4(i < pairs ? ids[i] : -1, i + 1 < pairs ? ids[i + 1] : -1, i + 2 < pairs ? ids[i + 2] : -1, -1);
}

KERNEL(experts_sort, SORT_THREADS, 0, const int* ids, const uint64_t* experts, int* pair_slot, int* offsets,
    int4* tiles, int pairs, int num_experts, int tile_tokens, uint32_t* used) {
    begin_kernel();
    __shared__ uint32_t here[MAX_EXPERTS / WARP];
    __shared__ int lower_of[SORT_WARPS], own_of[SORT_WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, expert = blockIdx.x;
    if (warp < MAX_EXPERTS / WARP) {
        const int e = threadIdx.x;
        const uint32_t bits = __ballot_sync(ALL_LANES, e < num_experts && experts[e] != 0);
        if (lane == 0) here[warp] = bits;
    }
    __syncthreads();
    const bool mine = here[expert / WARP] >> (expert % WARP) & 1;
    // A warp has ids that follow one another.
    const int share = div_ceil(div_ceil(pairs, SORT_WARPS), STEP) * STEP, begin = min(warp * share, pairs),
              end = min(begin + share, pairs);

    int lower = 0, own = 0;
    auto count = [&](int id) {
        if (id >= 0 && id < expert) lower += here[id / WARP] >> (id % WARP) & 1;
        own += id == expert;
    };
#pragma unroll 4
    for (int i = begin; i < end; i += STEP) {
        const int4 four = four_ids(ids, i + 4 * lane, end);
        count(four.x), count(four.y), count(four.z), count(four.w);
    }
#pragma unroll
    for (int d = WARP / 2; d > 0; d /= 2) {
        lower += __shfl_xor_sync(ALL_LANES, lower, d);
        own += __shfl_xor_sync(ALL_LANES, own, d);
    }
    if (lane == 0) lower_of[warp] = lower, own_of[warp] = mine ? own : 0;
    __syncthreads();
    int first = 0, before = 0, total = 0;
#pragma unroll 8
    for (int w = 0; w < SORT_WARPS; w++) {
        first += lower_of[w];
        before += w < warp ? own_of[w] : 0;
        total += own_of[w];
    }

    if (threadIdx.x == 0) {
        offsets[expert] = first;
        if (used) used[expert] += (uint32_t)total;
        if (expert == num_experts - 1) offsets[num_experts] = first + total;
    }
    if (tile_tokens) {
        const int tile = first / tile_tokens + expert;
        const int next =
            expert == num_experts - 1 ? pairs / tile_tokens + num_experts : (first + total) / tile_tokens + expert + 1;
        for (int i = threadIdx.x; i < next - tile; i += SORT_THREADS) {
            const int from = first + min(i * tile_tokens, total), to = first + min((i + 1) * tile_tokens, total);
            tiles[tile + i] = make_int4(expert, from, to, 0);
        }
    }

    if (own_of[warp] == 0) return;
    int at = first + before;
    const uint32_t below = (1u << lane) - 1;
    for (int i = begin; i < end; i += STEP) {
        const int pair = i + 4 * lane;
        const int4 four = four_ids(ids, pair, end);
        const uint32_t x = __ballot_sync(ALL_LANES, four.x == expert), y = __ballot_sync(ALL_LANES, four.y == expert);
        const uint32_t z = __ballot_sync(ALL_LANES, four.z == expert), w = __ballot_sync(ALL_LANES, four.w == expert);
        int to = at + __popc(x & below) + __popc(y & below) + __popc(z & below) + __popc(w & below);
        if (four.x == expert) pair_slot[to++] = pair;
        if (four.y == expert) pair_slot[to++] = pair + 1;
        if (four.z == expert) pair_slot[to++] = pair + 2;
        if (four.w == expert) pair_slot[to++] = pair + 3;
        at += __popc(x) + __popc(y) + __popc(z) + __popc(w);
    }
}
