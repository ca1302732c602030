// Sums what several devices have computed: x[i] = x_0[i] + x_1[i] + ..., on every rank, in the order of ranks, so that
// all have the same bits in every run. Devices write into each other's memory, within passes that are recorded.
//
//   all_reduce        few numbers: each rank writes its own, with a stamp in each word, to all others. A word that has
//                     the stamp has come, so there is nothing to wait for but the words themselves
//   all_reduce_many   many: each rank sums its part of x, which it reads where the others have it, and writes the sums
//                     there. Ranks tell each other where x is, which says that it is there to be read, and when they
//                     are done with it
//   place_columns     a rank's columns among zeros, so that a sum brings those of all ranks together
//
// An inbox is the memory of a rank that the others write to; x is in memory that they reach. A block waits for those of
// its own number alone. `stamps` count the launches of each block on this rank; all ranks launch the same ones in the
// same order. A block of all_reduce uses two halves of its part of the inbox in turn: who writes a half again has seen,
// one launch before, that all others are done with it. One of all_reduce_many ends only when the others are done.
//
// Where `stop` is not 0, a rank has failed, and nobody waits any longer.
//
//   grid (blocks), unless said
#include "common.cuh"

constexpr int MAX_RANKS = 8, REDUCE_THREADS = 256, MANY_THREADS = 512;
constexpr int FEW_BLOCKS = 512, MANY_BLOCKS = 256;
constexpr int FEW_NUMBERS = FEW_BLOCKS * REDUCE_THREADS;
// Where the parts of an inbox begin, in bytes.
constexpr int PLACES_AT = 2 * MAX_RANKS * FEW_NUMBERS * 8;       // [MANY_BLOCKS, ranks], of 8 bytes
constexpr int DONE_AT = PLACES_AT + MANY_BLOCKS * MAX_RANKS * 8; // [MANY_BLOCKS, ranks], of 4 bytes
constexpr int INBOX_BYTES = DONE_AT + MANY_BLOCKS * MAX_RANKS * 4;
constexpr int STAMPS = FEW_BLOCKS + MANY_BLOCKS;
static_assert(INBOX_BYTES < 64 << 20 && STAMPS % 4 == 0, "what a rank takes of VRAM for its sums");

// Where each rank's inbox is, as this device sees it.
struct Peers {
    void* inbox[MAX_RANKS];
};

// A look at `stop` crosses PCIe: every 64 spins, a sum of 64 MB took 6,300 us instead of 300 (two H200).
constexpr int STOP_SPINS = 1 << 14;
__device__ __forceinline__ bool stopped(const uint32_t* stop, int& spins) {
    return ++spins % STOP_SPINS == 0 && load_acquire_system(stop) != 0;
}

KERNEL(all_reduce, REDUCE_THREADS, 0, const __grid_constant__ Peers peers, float* x, int numbers, int rank, int ranks,
    uint32_t* stamps, const uint32_t* stop) {
    begin_short_kernel();
    const uint32_t stamp = stamps[blockIdx.x] + 1;
    const int i = blockIdx.x * REDUCE_THREADS + threadIdx.x;
    const size_t half = (size_t)(stamp & 1) * MAX_RANKS * FEW_NUMBERS;
    const float own = i < numbers ? x[i] : 0.0f;
    const uint64_t word = (uint64_t)stamp << 32 | __float_as_uint(own);
    for (int r = 0; r < ranks; r++)
        if (r != rank && i < numbers)
            store_relaxed_system(
                reinterpret_cast<uint64_t*>(peers.inbox[r]) + half + (size_t)rank * FEW_NUMBERS + i, word);
    __syncthreads(); // a block sends everything before it waits for anything
    const uint64_t* inbox = reinterpret_cast<const uint64_t*>(peers.inbox[rank]) + half + i;
    float sum = 0.0f;
    int spins = 0;
    for (int r = 0; r < ranks && i < numbers; r++) {
        float term = own;
        if (r != rank) {
            uint64_t come;
            do come = load_relaxed_system(inbox + (size_t)r * FEW_NUMBERS);
            while ((uint32_t)(come >> 32) != stamp && !stopped(stop, spins));
            term = __uint_as_float((uint32_t)come);
        }
        sum += term;
    }
    if (i < numbers) x[i] = sum;
    __syncthreads();
    if (threadIdx.x == 0) stamps[blockIdx.x] = stamp;
}

// Numbers that a thread reads of a rank before it adds them, so that many are under way.
constexpr int MANY_READS = 4;
// The lower part of a word is where x is, the upper one a stamp.
constexpr int ADDRESS_BITS = 48;

// grid (min(MANY_BLOCKS, 16-byte words of a rank's part / MANY_THREADS)); numbers: a multiple of 4
KERNEL(all_reduce_many, MANY_THREADS, 0, const __grid_constant__ Peers peers, float* x, int numbers, int rank,
    int ranks, uint32_t* stamps, const uint32_t* stop) {
    begin_kernel();
    __shared__ uint4* of_rank[MAX_RANKS];
    const int thread = threadIdx.x, block = blockIdx.x, peer = thread;
    const bool has_peer = peer < ranks && peer != rank;
    const uint32_t stamp = stamps[FEW_BLOCKS + block] + 1;
    auto place = [&](int to, int from) {
        char* const places = static_cast<char*>(peers.inbox[to]) + PLACES_AT;
        return reinterpret_cast<uint64_t*>(places) + block * MAX_RANKS + from;
    };
    auto done = [&](int to, int from) {
        char* const flags = static_cast<char*>(peers.inbox[to]) + DONE_AT;
        return reinterpret_cast<uint32_t*>(flags) + block * MAX_RANKS + from;
    };
    int spins = 0;
    if (peer == rank) of_rank[rank] = reinterpret_cast<uint4*>(x);
    if (has_peer) {
        const uint64_t tag = (uint64_t)stamp << ADDRESS_BITS;
        store_release_system(place(peer, rank), tag | reinterpret_cast<uintptr_t>(x));
        uint64_t come;
        while (((come = load_acquire_system(place(rank, peer))) ^ tag) >> ADDRESS_BITS != 0 && !stopped(stop, spins))
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
        while (load_acquire_system(done(rank, peer)) != stamp && !stopped(stop, spins)) pause_ns(20);
    }
    if (thread == 0) stamps[FEW_BLOCKS + block] = stamp;
}

// out = x in columns [first, first + cols) of `all`, and 0 in the others. grid (rows, ceil(all / REDUCE_THREADS))
KERNEL(place_columns, REDUCE_THREADS, 0, const float* x, float* out, int cols, int first, int all) {
    begin_kernel();
    const int column = blockIdx.y * REDUCE_THREADS + threadIdx.x, own = column - first;
    if (column >= all) return;
    const bool is_own = own >= 0 && own < cols;
    out[(size_t)blockIdx.x * all + column] = is_own ? x[(size_t)blockIdx.x * cols + own] : 0.0f;
}
