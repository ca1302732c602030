// Sums what several devices have computed: x[i] = x_0[i] + x_1[i] + ..., on every rank, in the order of ranks, so that
// all have the same bits in every run. Devices write into each other's memory, within passes that are recorded.
//
//   all_reduce        few numbers, up to FEW_NUMBERS: rank_sum.cuh; products of few tokens do the same as they end
//   all_reduce_many   many: each rank sums its part of x, which it reads where the others have it, and writes the sums
//                     there. Ranks tell each other where x is, which says that it is there to be read, and when they
//                     are done with it
//   add_terms         what copy engines have brought of the others is added to a rank's part of x (src/cuda/beside.rs)
//   gather_columns    the ranks' columns of a row side by side, up to FEW_NUMBERS of each: rank_sum.cuh
//   place_columns     more: a rank's columns among zeros, so that a sum brings those of all ranks together
//
// x is in memory that all ranks reach. A block of all_reduce_many waits for those of its own number alone, and ends
// only when the others are done; its stamps count its launches on this rank; all ranks launch the same ones in the same
// order.
//
//   grid (blocks), unless said
#include "rank_sum.cuh"

constexpr int REDUCE_THREADS = 256, MANY_THREADS = 512, MANY_BLOCKS = 256;
// Where the parts of an inbox begin, in bytes.
constexpr int PLACES_AT = 2 * MAX_RANKS * FEW_NUMBERS * 8;       // [MANY_BLOCKS, ranks], of 8 bytes
constexpr int DONE_AT = PLACES_AT + MANY_BLOCKS * MAX_RANKS * 8; // [MANY_BLOCKS, ranks], of 4 bytes
constexpr int INBOX_BYTES = DONE_AT + MANY_BLOCKS * MAX_RANKS * 4;
constexpr int STAMPS = FEW_NUMBERS + MANY_BLOCKS;
static_assert(INBOX_BYTES < 64 << 20 && STAMPS % 4 == 0, "what a rank takes of VRAM for its sums");

KERNEL(all_reduce, REDUCE_THREADS, 0, const __grid_constant__ RankSum sum, float* x, int numbers) {
    begin_short_kernel();
    const int i = blockIdx.x * REDUCE_THREADS + threadIdx.x;
    const bool has = i < numbers;
    const float all = sum_of_ranks(sum, i, has ? x[i] : 0.0f, has);
    if (has) x[i] = all;
}

// Where each rank's columns begin, and the last one's end.
struct Columns {
    int first[MAX_RANKS + 1];
};

// x [columns of this rank], out [all columns]; no rank has more than `most`. grid (ceil(most / REDUCE_THREADS))
KERNEL(gather_columns, REDUCE_THREADS, 0, const __grid_constant__ RankSum s, const __grid_constant__ Columns columns,
    const float* x, float* out, int most) {
    begin_short_kernel();
    const int i = blockIdx.x * REDUCE_THREADS + threadIdx.x;
    const bool is_own = i < columns.first[s.rank + 1] - columns.first[s.rank];
    numbers_of_ranks(s, i, is_own ? x[i] : 0.0f, i < most, [&](int rank, float number) {
        const int at = columns.first[rank] + i;
        if (at < columns.first[rank + 1]) out[at] = number;
    });
}

// Numbers that a thread reads of a rank before it adds them, so that many are under way.
constexpr int MANY_READS = 4;
// The lower part of a word is where x is, the upper one a stamp.
constexpr int ADDRESS_BITS = 48;

// grid (min(MANY_BLOCKS, 16-byte words of a rank's part / MANY_THREADS)); numbers: a multiple of 4
KERNEL(all_reduce_many, MANY_THREADS, 0, const __grid_constant__ RankSum s, float* x, int numbers) {
    begin_kernel();
    const int rank = s.rank, ranks = s.ranks;
    __shared__ uint4* of_rank[MAX_RANKS];
    const int thread = threadIdx.x, block = blockIdx.x, peer = thread;
    const bool has_peer = peer < ranks && peer != rank;
    const uint32_t stamp = s.stamps[FEW_NUMBERS + block] + 1;
    auto place = [&](int to, int from) {
        char* const places = static_cast<char*>(s.inbox[to]) + PLACES_AT;
        return reinterpret_cast<uint64_t*>(places) + block * MAX_RANKS + from;
    };
    auto done = [&](int to, int from) {
        char* const flags = static_cast<char*>(s.inbox[to]) + DONE_AT;
        return reinterpret_cast<uint32_t*>(flags) + block * MAX_RANKS + from;
    };
    int spins = 0;
    if (peer == rank) of_rank[rank] = reinterpret_cast<uint4*>(x);
    if (has_peer) {
        const uint64_t tag = (uint64_t)stamp << ADDRESS_BITS;
        store_release_system(place(peer, rank), tag | reinterpret_cast<uintptr_t>(x));
        uint64_t come;
        while (((come = load_acquire_system(place(rank, peer))) ^ tag) >> ADDRESS_BITS != 0 && !stopped(s.stop, spins))
            pause_ns(20);
        const bool has_come = (come ^ tag) >> ADDRESS_BITS == 0;
        of_rank[peer] = has_come ? reinterpret_cast<uint4*>(come & (((uint64_t)1 << ADDRESS_BITS) - 1)) : nullptr;
    }
    __syncthreads();
    bool all_here = true; // or a rank has failed
    for (int r = 0; r < ranks; r++) all_here &= of_rank[r] != nullptr;
    if (all_here) {
        const int words = numbers / 4, part = div_ceil(words, ranks), last = min((rank + 1) * part, words);
        const int step = gridDim.x * MANY_THREADS;
        for (int first = rank * part + block * MANY_THREADS + thread; first < last; first += MANY_READS * step) {
            float4 sum[MANY_READS] = {};
            for (int r = 0; r < ranks; r++) {
                uint4 term[MANY_READS] = {};
#pragma unroll
                for (int k = 0; k < MANY_READS; k++)
                    if (first + k * step < last) term[k] = load_uncached(of_rank[r] + first + k * step);
#pragma unroll
                for (int k = 0; k < MANY_READS; k++)
                    sum[k].x += __uint_as_float(term[k].x), sum[k].y += __uint_as_float(term[k].y),
                        sum[k].z += __uint_as_float(term[k].z), sum[k].w += __uint_as_float(term[k].w);
            }
            for (int r = 0; r < ranks; r++)
#pragma unroll
                for (int k = 0; k < MANY_READS; k++)
                    if (first + k * step < last)
                        store_peer(of_rank[r] + first + k * step,
                            make_uint4(__float_as_uint(sum[k].x), __float_as_uint(sum[k].y), __float_as_uint(sum[k].z),
                                __float_as_uint(sum[k].w)));
        }
        __threadfence_system();
    }
    __syncthreads();
    if (has_peer) {
        store_release_system(done(peer, rank), stamp);
        while (load_acquire_system(done(rank, peer)) != stamp && !stopped(s.stop, spins)) pause_ns(20);
    }
    if (thread == 0) s.stamps[FEW_NUMBERS + block] = stamp;
}

// 16-byte words that a block of add_terms adds.
constexpr int ADD_THREADS = 256, ADDS = 4, ADDED = ADDS * ADD_THREADS;
// x = terms of lower ranks + x + terms of higher ranks, [words]; terms [ranks - 1, pitch]. grid (ceil(words / ADDED))
KERNEL(add_terms, ADD_THREADS, 0, float4* x, const float4* terms, int pitch, int words, int rank, int ranks) {
    begin_kernel();
    const int first = blockIdx.x * ADDED + threadIdx.x;
    float4 sum[ADDS] = {}, own[ADDS];
#pragma unroll
    for (int k = 0; k < ADDS; k++) own[k] = x[min(first + k * ADD_THREADS, words - 1)];
    for (int r = 0; r < ranks; r++) {
        const float4* from = terms + (size_t)(r - (r > rank)) * pitch;
#pragma unroll
        for (int k = 0; k < ADDS; k++) {
            const float4 term = r == rank ? own[k] : from[min(first + k * ADD_THREADS, words - 1)];
            sum[k].x += term.x, sum[k].y += term.y, sum[k].z += term.z, sum[k].w += term.w;
        }
    }
#pragma unroll
    for (int k = 0; k < ADDS; k++)
        if (first + k * ADD_THREADS < words) x[first + k * ADD_THREADS] = sum[k];
}

// out = x in columns [first, first + cols) of `all`, and 0 in the others. grid (rows, ceil(all / REDUCE_THREADS))
KERNEL(place_columns, REDUCE_THREADS, 0, const float* x, float* out, int cols, int first, int all) {
    begin_kernel();
    const int column = blockIdx.y * REDUCE_THREADS + threadIdx.x, own = column - first;
    if (column >= all) return;
    const bool is_own = own >= 0 && own < cols;
    out[(size_t)blockIdx.x * all + column] = is_own ? x[(size_t)blockIdx.x * cols + own] : 0.0f;
}
