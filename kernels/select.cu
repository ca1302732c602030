// Choosing the positions that a query attends to (src/backend/select.rs), and bringing them side by side.
//
// The index of a layer: keys [blocks, 64, dim] bf16, in the blocks of the cache (attention.cuh). Where keys are pooled,
// there is one for each `unit` positions: [blocks, 64 / unit, dim].
//
// index_write: grid (T)
//   keys[position of t] = rope(norm(k[t]))   k [T, dim]; the first 2 * half numbers rotate; bias null: an RMS norm
// index_pool: grid (T)
//   The same for pooled keys, of the units that end with the tokens: the mean of k over the unit, normed, rotated as
//   its first position. Of each position there is k in raw [blocks, 64, dim], of each first one the angles in firsts
//   [blocks, 64 / unit, dim].
// index_pool_gates: grid (T)
//   The same for keys that are sums over the unit, weighted in each number by the softmax of a gate and a bias of the
//   place; a LayerNorm comes before, nothing rotates. raw [blocks, 64, 2, dim]: key and gate of each position, bf16.
// index_scores: grid (ceil(keys / (64 * SCORE_PAGES)), n)
//   scores[i, s] = sum_h weights[t, h] relu(q[t, h] . keys[s])   t = first + i, s up to the token's own position, or of
//   pooled keys those of whole units, of which a block has `in_block`; without weights these are ones
//   q [T, heads * dim] bf16, weights [T, heads] f32, scores [n, pitch] f32; heads <= INDEX_HEADS, dim <= INDEX_DIM
//   `apart`: each head has scores of its own, q . key: [n, heads, pitch].
// index_best_parts: grid (n, sets, parts)
//   The `top_k` best units of each of `parts` runs of a token's units, ascending, where that is less than half of them:
//   best_scores, best [n, sets, parts, top_k]
// index_best: grid (n, sets)
//   lists[t, set] [most] = the positions of the `top_k` best units of `unit` positions, ascending, of equals the lower;
//   counts[t] how many, the same for each set
//   A unit's score is the largest of its positions', and the last unit is always taken; units [n, sets, pitch] is room
//   for that, and not used where a unit is a position. `pooled` 1: scores are of whole units, and the positions after
//   the last one are always taken besides. 2: lists [T, set, top_k] have the numbers of units, whole ones alone, and
//   only of tokens that see more than `most` positions. 3: lists as of 2, scores as of 0. Else a token that sees no
//   more than that gets all that it sees.
//   With parts > 1 it chooses of what index_best_parts chose, which gives the same.
// index_limit: grid (ceil(positions / LIMIT_THREADS), n)
//   Takes the scores of units of one position out of the choice that are in none of a token's blocks of `size`, blocks
//   [T, count] ascending, where it sees more than these have.
// select_gather: grid (ceil(most / GATHER_ROWS), n)
//   Entry j of lists[t] becomes position j of row i, in pages that follow each other: to [n, pages, kv_heads, 64, key]
//   positions[i] = counts[t] - 1: with it, and tables that count, the decode kernels read what was gathered.
//   key_bytes: of a head's row, a multiple of 8, `groups` its scales, 0 of bf16; values are gathered alike. KV heads
//   share the sets evenly.
// select_pages: grid (n)
//   The same without copies, where units are whole pages: tables[i, set, j] is the page of entries 64 j.. of its list.
// dim is a multiple of 8.
#include "attention.cuh"

constexpr int INDEX_HEADS = 64, INDEX_DIM = 128, INDEX_PITCH = INDEX_DIM + 8, SCORE_PAGES = 4;

// Number i of a row whose first 2 * half numbers turn by angles: cos [half], then sin [half].
__device__ __forceinline__ float rotated(const float* row, const float* angles, int half, int interleaved, int i) {
    if (i >= 2 * half) return row[i];
    const bool first = interleaved ? i % 2 == 0 : i < half;
    const int pair = interleaved ? i / 2 : i % half, other = interleaved ? i ^ 1 : (i + half) % (2 * half);
    const float* of = angles + pair;
    return first ? row[i] * of[0] - row[other] * of[half] : row[i] * of[0] + row[other] * of[half];
}

KERNEL(index_write, 128, 0, const bf16* k, const float* weight, const float* bias, float eps, const float* angles,
    int half, int interleaved, bf16* keys, const int* positions, const int* token_seq, const int* seq_blocks,
    const uint32_t* block_table, int dim) {
    begin_kernel();
    __shared__ float scratch[WARP + 1], row[INDEX_DIM];
    const int t = blockIdx.x, i = threadIdx.x, position = positions[t];
    if (position < 0) return;
    const float x = i < dim ? to_f32(k[(size_t)t * dim + i]) : 0.0f;
    const float mean = bias ? block_sum(x, scratch) / dim : 0.0f;
    const float apart = i < dim ? x - mean : 0.0f;
    const float variance = block_sum(apart * apart, scratch) / dim;
    if (i < dim) row[i] = apart * rsqrtf(variance + eps) * weight[i] + (bias ? bias[i] : 0.0f);
    __syncthreads();
    if (i >= dim) return;
    const uint32_t block = block_table[seq_blocks[token_seq[t]] + position / PAGE];
    keys[((size_t)block * PAGE + position % PAGE) * dim + i] =
        to_bf16(rotated(row, angles + (size_t)t * 2 * half, half, interleaved, i));
}

KERNEL(index_pool, 128, 0, const bf16* k, const float* weight, float eps, const float* angles, int half,
    int interleaved, bf16* keys, bf16* raw, float* firsts, const int* positions, const int* token_seq,
    const int* seq_first, const int* seq_blocks, const uint32_t* block_table, int dim, int unit) {
    begin_kernel();
    __shared__ float scratch[WARP + 1], row[INDEX_DIM];
    const int t = blockIdx.x, i = threadIdx.x, position = positions[t];
    if (position < 0) return;
    const int sequence = token_seq[t], inside = position % unit;
    const size_t at = (size_t)block_table[seq_blocks[sequence] + position / PAGE] * PAGE + position % PAGE;
    if (i < dim) raw[at * dim + i] = k[(size_t)t * dim + i];
    if (inside == 0 && i < 2 * half) firsts[at / unit * dim + i] = angles[(size_t)t * 2 * half + i];
    if (inside != unit - 1) return;
    // The batch's own positions are not read back: other blocks write them.
    const int before = max(inside - (t - seq_first[sequence]), 0);
    float mean = 0.0f;
    for (int j = 0; j < unit && i < dim; j++)
        mean += to_f32(j < before ? raw[(at - inside + j) * dim + i] : k[(size_t)(t - inside + j) * dim + i]);
    mean /= unit;
    const float variance = block_sum(i < dim ? mean * mean : 0.0f, scratch) / dim;
    if (i < dim) row[i] = mean * rsqrtf(variance + eps) * weight[i];
    __syncthreads();
    if (i >= dim) return;
    const float* of = before ? firsts + at / unit * dim : angles + (size_t)(t - inside) * 2 * half;
    keys[at / unit * dim + i] = to_bf16(rotated(row, of, half, interleaved, i));
}

KERNEL(index_pool_gates, 128, 0, const bf16* k, const bf16* gate, const float* weight, const float* norm_bias,
    float eps, const float* bias, bf16* keys, bf16* raw, const int* positions, const int* token_seq,
    const int* seq_first, const int* seq_blocks, const uint32_t* block_table, int dim, int unit) {
    begin_kernel();
    __shared__ float scratch[WARP + 1];
    const int t = blockIdx.x, i = threadIdx.x, position = positions[t];
    if (position < 0) return;
    const int sequence = token_seq[t], inside = position % unit;
    const size_t at = (size_t)block_table[seq_blocks[sequence] + position / PAGE] * PAGE + position % PAGE;
    // As it is kept, whether it is read back or not.
    auto normed = [&](int row) {
        const float x = i < dim ? to_f32(k[(size_t)row * dim + i]) : 0.0f, mean = block_sum(x, scratch) / dim;
        const float apart = i < dim ? x - mean : 0.0f, variance = block_sum(apart * apart, scratch) / dim;
        return to_bf16(i < dim ? apart * rsqrtf(variance + eps) * weight[i] + norm_bias[i] : 0.0f);
    };
    const bf16 own = normed(t);
    if (i < dim) {
        raw[at * 2 * dim + i] = own;
        raw[(at * 2 + 1) * dim + i] = gate[(size_t)t * dim + i];
    }
    if (inside != unit - 1) return;
    // The batch's own positions are not read back: other blocks write them.
    const int before = max(inside - (t - seq_first[sequence]), 0);
    float largest = -INFINITY, shares = 0.0f, sum = 0.0f;
    for (int j = 0; j < unit; j++) {
        const size_t kept = (at - inside + j) * 2 * dim;
        const bf16 key = j < before ? (i < dim ? raw[kept + i] : own) : normed(t - inside + j);
        if (i >= dim) continue;
        const bf16 score = j < before ? raw[kept + dim + i] : gate[(size_t)(t - inside + j) * dim + i];
        const float s = to_f32(score) + bias[(size_t)j * dim + i], top = fmaxf(largest, s);
        const float earlier = expf(largest - top), share = expf(s - top);
        shares = shares * earlier + share;
        sum = sum * earlier + share * to_f32(key);
        largest = top;
    }
    if (i < dim) keys[at / unit * dim + i] = to_bf16(sum / shares);
}

// Each of the 4 warps has 16 positions of a page and all heads.
constexpr int SCORES_SHARED = (INDEX_HEADS + PAGE) * INDEX_PITCH * 2;
static_assert(SCORES_SHARED == 34816, "shared memory of index_scores");
KERNEL(index_scores, 128, 34816, const bf16* q, const float* weights, const bf16* keys, float* scores,
    const int* positions, const int* token_seq, const int* seq_blocks, const uint32_t* block_table, int first,
    int heads, int dim, int pitch, int in_block, int apart) {
    begin_kernel();
    DYNAMIC_SHARED(unsigned char, shared);
    bf16 *queries = reinterpret_cast<bf16*>(shared), *tile = queries + INDEX_HEADS * INDEX_PITCH;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, t = first + blockIdx.y,
              last = (positions[t] + 1) / (PAGE / in_block) - 1, begin = blockIdx.x * SCORE_PAGES,
              end = min(begin + SCORE_PAGES, last / PAGE + 1);
    if (last < 0 || begin * PAGE > last) return;
    copy_rows<INDEX_HEADS, INDEX_DIM, 128>(queries, q + (size_t)t * heads * dim, dim, dim, heads, threadIdx.x);
    const uint32_t* table = block_table + seq_blocks[token_seq[t]];
    for (int page = begin; page < end; page++) {
        if (in_block == PAGE)
            copy_rows<PAGE, INDEX_DIM, 128>(
                tile, keys + (size_t)table[page] * PAGE * dim, dim, dim, last + 1 - page * PAGE, threadIdx.x);
        else
            for (int i = threadIdx.x; i < PAGE * INDEX_DIM / 8; i += 128) { // of several blocks
                const int row = i / (INDEX_DIM / 8), col = i % (INDEX_DIM / 8) * 8, key = min(page * PAGE + row, last);
                const size_t at = (size_t)table[key / in_block] * in_block + key % in_block;
                copy_async_16(tile + row * INDEX_PITCH + col, keys + at * dim + (col < dim ? col : 0), col < dim);
            }
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();
        // Of this lane's pairs of positions: 8 apart, and neighbours.
        auto position_of = [&](int n) { return page * PAGE + warp * 16 + n / 2 * 8 + lane % 4 * 2 + n % 2; };
        float sums[2][2] = {};
        for (int h = 0; h < heads; h += 16) {
            float s[2][4] = {};
#pragma unroll
            for (int d = 0; d < INDEX_DIM; d += 16) {
                uint32_t a[4], b[4];
                load_a(a, queries + h * INDEX_PITCH + d, INDEX_PITCH, lane);
                load_b_rows(b, tile + warp * 16 * INDEX_PITCH + d, INDEX_PITCH, lane);
                mma_pair(s[0], s[1], a, b);
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int head = h + lane / 4 + 8 * r;
                if (apart) {
                    float* own = scores + ((size_t)blockIdx.y * heads + head) * pitch;
#pragma unroll
                    for (int n = 0; n < 4; n++)
                        if (head < heads && position_of(n) <= last) own[position_of(n)] = s[n / 2][2 * r + n % 2];
                    continue;
                }
                const float weight = head >= heads ? 0.0f : weights ? weights[(size_t)t * heads + head] : 1.0f;
#pragma unroll
                for (int n = 0; n < 4; n++) sums[n / 2][n % 2] += weight * fmaxf(s[n / 2][2 * r + n % 2], 0.0f);
            }
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float sum = sums[n / 2][n % 2];
#pragma unroll
            for (int d = 4; d < WARP; d *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, d);
            if (!apart && lane < 4 && position_of(n) <= last) scores[(size_t)blockIdx.y * pitch + position_of(n)] = sum;
        }
        __syncthreads();
    }
}

// A score as a number whose order is that of the scores.
__device__ __forceinline__ uint32_t order_of(float score) {
    const uint32_t bits = __float_as_uint(score);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Sum over the warps before this one, and over all, of a number that each has; less than 2^24. `of_warp`: shared,
// [warps].
__device__ __forceinline__ int2 warps_before(int mine, float* of_warp) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    __syncthreads();
    if (lane == 0) of_warp[warp] = (float)mine;
    __syncthreads();
    const float x = lane < warps ? of_warp[lane] : 0.0f;
    return make_int2((int)warp_sum(lane < warp ? x : 0.0f), (int)warp_sum(x));
}

constexpr int BEST_THREADS = 1024, DIGITS = 2048;

// Three passes over digits of 11 bits find the smallest of `seen` scores that is taken, and how many of its equals are;
// then each warp hands the `top_k` best of its own run to take(place, i), places in the order of i.
template <class Score, class Take>
__device__ __forceinline__ void best_of(int seen, int top_k, Score score, Take take) {
    __shared__ uint32_t histogram[DIGITS];
    __shared__ float of_warp[BEST_THREADS / WARP];
    __shared__ uint32_t digit;
    __shared__ int left;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    uint32_t least = 0; // the digits that are known
    int need = top_k;   // of those that begin with them
    for (int shift = 21; shift > -11; shift -= 11) {
        const int low = max(shift, 0), known = shift == 21 ? 32 : shift + 11; // bits from `known` on
        for (int i = threadIdx.x; i < DIGITS; i += BEST_THREADS) histogram[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < seen; i += BEST_THREADS) {
            const uint32_t x = order_of(score(i));
            if (known == 32 || x >> known == least >> known)
                atomicAdd(&histogram[(x >> low) & ((1u << (min(known, 32) - low)) - 1)], 1u);
        }
        __syncthreads();
        // Each thread has two digits, the largest first.
        const int top = DIGITS - 1 - 2 * (int)threadIdx.x, a = histogram[top], b = histogram[top - 1];
        int sum = a + b;
#pragma unroll
        for (int d = 1; d < WARP; d *= 2) {
            const int other = __shfl_up_sync(ALL_LANES, sum, d);
            if (lane >= d) sum += other;
        }
        const int before = warps_before(__shfl_sync(ALL_LANES, sum, WARP - 1), of_warp).x + sum - a - b;
        if (before < need && need <= before + a + b) {
            const bool second = need > before + a;
            digit = top - second;
            left = need - before - (second ? a : 0);
        }
        __syncthreads();
        least |= digit << low;
        need = left;
        __syncthreads();
    }
    const int run = div_ceil(seen, BEST_THREADS) * WARP, begin = warp * run, end = min(begin + run, seen);
    int above = 0, equal = 0;
    for (int i = begin; i < end; i += WARP) {
        const uint32_t x = i + lane < end ? order_of(score(i + lane)) : 0;
        above += i + lane < end && x > least;
        equal += i + lane < end && x == least;
    }
    int above_before = warps_before((int)warp_sum((float)above), of_warp).x,
        equal_before = warps_before((int)warp_sum((float)equal), of_warp).x;
    const uint32_t lower = (1u << lane) - 1;
    for (int i = begin; i < end; i += WARP) {
        const uint32_t x = i + lane < end ? order_of(score(i + lane)) : 0;
        const bool is_above = i + lane < end && x > least, is_equal = i + lane < end && x == least;
        const uint32_t all_above = __ballot_sync(ALL_LANES, is_above), all_equal = __ballot_sync(ALL_LANES, is_equal);
        const int equals = equal_before + __popc(all_equal & lower);
        if (is_above || (is_equal && equals < need))
            take(above_before + __popc(all_above & lower) + min(equals, need), i + lane);
        above_before += __popc(all_above);
        equal_before += __popc(all_equal);
    }
}

// What a token's units are chosen from: `all` positions are `seen` units; scores from `at` on.
struct Units {
    int all, seen;
    size_t at;
    __device__ __forceinline__ Units(const int* positions, int t, int unit, int pooled, int pitch)
        : all(positions[t] + 1), seen(pooled == 1 || pooled == 2 ? all / unit : div_ceil(all, unit)),
          at(((size_t)blockIdx.x * gridDim.y + blockIdx.y) * pitch) {}

    // Units of a part, and where `parts` save nothing 0: no more are left out than are chosen again.
    __device__ __forceinline__ int run(int parts, int top_k) const {
        return seen > 2 * parts * top_k ? div_ceil(seen, parts) : 0;
    }

    // Scores of the units from `begin` to `end`, whose own are not those of positions in `units`.
    __device__ __forceinline__ const float* scores(
        const float* of_positions, float* units, int begin, int end, int unit, int pooled) const {
        if (pooled == 1 || pooled == 2 || (unit == 1 && !pooled)) return of_positions + at;
        for (int u = begin + threadIdx.x; u < end; u += BEST_THREADS) {
            float largest = -INFINITY;
            for (int i = u * unit; i < min((u + 1) * unit, all); i++) largest = fmaxf(largest, of_positions[at + i]);
            units[at + u] = u == seen - 1 ? INFINITY : largest;
        }
        __syncthreads();
        return units + at;
    }
};

KERNEL(index_best_parts, BEST_THREADS, 0, const float* scores, float* units, const int* positions, float* best_scores,
    int* best, int first, int top_k, int unit, int most, int pooled, int pitch) {
    begin_kernel();
    const int parts = gridDim.z, part = blockIdx.z;
    const Units of(positions, first + blockIdx.x, unit, pooled, pitch);
    const int run = of.run(parts, top_k), begin = part * run, seen = min(run, of.seen - begin);
    if (of.all <= most || run == 0 || seen <= 0) return;
    const float* mine = of.scores(scores, units, begin, begin + seen, unit, pooled) + begin;
    const size_t to = (((size_t)blockIdx.x * gridDim.y + blockIdx.y) * parts + part) * top_k;
    auto take = [&](int place, int i) {
        best_scores[to + place] = mine[i];
        best[to + place] = begin + i;
    };
    if (seen <= top_k)
        for (int i = threadIdx.x; i < seen; i += BEST_THREADS) take(i, i);
    else
        best_of(seen, top_k, [&](int i) { return mine[i]; }, take);
}

KERNEL(index_best, BEST_THREADS, 0, const float* scores, float* units, const int* positions, const float* best_scores,
    const int* best, int* lists, int* counts, int first, int top_k, int unit, int most, int pooled, int pitch,
    int parts) {
    begin_kernel();
    const int t = first + blockIdx.x, set = blockIdx.y, sets = gridDim.y;
    const Units of(positions, t, unit, pooled, pitch);
    const int all = of.all;
    const bool units_listed = pooled >= 2;
    int* list = lists + ((size_t)t * sets + set) * (units_listed ? top_k : most);
    // Of units that are taken the last may have fewer positions.
    const int count = pooled ? top_k * unit + all % unit : (top_k - 1) * unit + (all - 1) % unit + 1;
    if (threadIdx.x == 0) counts[t] = units_listed ? top_k : all <= most ? all : count;
    if (all <= most) {
        if (units_listed) return;
        for (int i = threadIdx.x; i < all; i += BEST_THREADS) list[i] = i;
        return;
    }
    if (pooled == 1)
        for (int i = of.seen * unit + threadIdx.x; i < all; i += BEST_THREADS) list[count - all + i] = i;
    auto take = [&](int place, int u) {
        if (units_listed)
            list[place] = u;
        else
            for (int j = 0; j < min(unit, all - u * unit); j++) list[place * unit + j] = u * unit + j;
    };
    const int run = parts > 1 ? of.run(parts, top_k) : 0;
    if (run == 0) {
        const float* mine = of.scores(scores, units, 0, of.seen, unit, pooled);
        best_of(of.seen, top_k, [&](int i) { return mine[i]; }, take);
    } else { // of the best of each part, which follow each other: a part has more than are taken, but maybe the last
        const size_t from = ((size_t)blockIdx.x * sets + set) * parts * top_k;
        const int whole = (of.seen - 1) / run, taken = whole * top_k + min(top_k, of.seen - whole * run);
        best_of(
            taken, top_k, [&](int i) { return best_scores[from + i]; },
            [&](int place, int i) { take(place, best[from + i]); });
    }
}

constexpr int LIMIT_THREADS = 256;
KERNEL(index_limit, LIMIT_THREADS, 0, float* scores, const int* blocks, const int* positions, int first, int count,
    int size, int pitch) {
    begin_kernel();
    const int t = first + blockIdx.y, i = blockIdx.x * LIMIT_THREADS + threadIdx.x, seen = positions[t] + 1;
    if (i >= seen || seen <= count * size) return;
    const int *mine = blocks + (size_t)t * count, block = i / size;
    int below = 0, above = count; // the first that is not before the block
    while (below < above) {
        const int middle = (below + above) / 2;
        if (mine[middle] < block)
            below = middle + 1;
        else
            above = middle;
    }
    if (below == count || mine[below] != block) scores[(size_t)blockIdx.y * pitch + i] = -INFINITY;
}

constexpr int GATHER_ROWS = 16;
KERNEL(select_gather, 128, 0, const void* keys, void* to, int* to_positions, const int* lists, const int* counts,
    const int* token_seq, const int* seq_blocks, const uint32_t* block_table, int first, int most, int sets, int pages,
    int kv_heads, int key_bytes, int groups) {
    begin_kernel();
    const int t = first + blockIdx.y, count = counts[t], begin = blockIdx.x * GATHER_ROWS,
              entries = min(GATHER_ROWS, count - begin);
    if (blockIdx.x == 0 && threadIdx.x == 0) to_positions[blockIdx.y] = count - 1;
    const uint32_t* table = block_table + seq_blocks[token_seq[t]];
    const int words = key_bytes / 8, each = words + groups, page_bytes = PAGE * (key_bytes + 2 * groups);
    for (int i = threadIdx.x; i < entries * kv_heads * each; i += 128) {
        const int entry = begin + i / each / kv_heads, head = i / each % kv_heads, word = i % each,
                  position = lists[((size_t)t * sets + head * sets / kv_heads) * most + entry];
        const uint8_t* source =
            static_cast<const uint8_t*>(keys) + ((size_t)table[position / PAGE] * kv_heads + head) * page_bytes;
        uint8_t* target =
            static_cast<uint8_t*>(to) + (((size_t)blockIdx.y * pages + entry / PAGE) * kv_heads + head) * page_bytes;
        const int from_row = position % PAGE, to_row = entry % PAGE;
        if (word < words) {
            reinterpret_cast<uint2*>(target)[to_row * words + word] =
                reinterpret_cast<const uint2*>(source)[from_row * words + word];
        } else {
            const int scales = (PAGE * key_bytes) / 2 + (word - words) * PAGE; // before this group's
            reinterpret_cast<uint16_t*>(target)[scales + to_row] =
                reinterpret_cast<const uint16_t*>(source)[scales + from_row];
        }
    }
}

KERNEL(select_pages, 128, 0, uint32_t* tables, int* to_positions, const int* lists, const int* counts,
    const int* token_seq, const int* seq_blocks, const uint32_t* block_table, int first, int most, int sets) {
    begin_kernel();
    const int t = first + blockIdx.x, count = counts[t], pages = div_ceil(most, PAGE);
    if (threadIdx.x == 0) to_positions[blockIdx.x] = count - 1;
    const uint32_t* table = block_table + seq_blocks[token_seq[t]];
    for (int i = threadIdx.x; i < sets * pages; i += 128) {
        const int set = i / pages, page = i % pages;
        if (page * PAGE < count)
            tables[(size_t)blockIdx.x * sets * pages + i] =
                table[lists[((size_t)t * sets + set) * most + page * PAGE] / PAGE];
    }
}
