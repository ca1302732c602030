// Sums what several devices have computed: x[i] = x_0[i] + x_1[i] + ..., on every rank, in the order of ranks, so that
// all have the same bits in every run. Devices write into each other's memory, within passes that are recorded.
//
//   all_reduce        few numbers: each rank writes its own, with a stamp in each word, to all others. A word that has
//                     the stamp has come, so there is nothing to wait for but the words themselves
//   all_reduce_many   chunk by chunk: all write a chunk to the rank that owns it, which sums and writes the sum back
//   place_columns     a rank's columns among zeros, so that a sum brings those of all ranks together
//
// An inbox is the memory of a rank that the others write to. A block always uses the same part of it, and its two
// halves in turn: who writes a half again has seen, one launch before, that all others are done with it. `stamps` count
// the launches of each block on this rank; all ranks launch the same ones in the same order.
//
// Where `stop` is not 0, a rank has failed, and nobody waits any longer.
//
//   grid (blocks), unless said
#include "common.cuh"

constexpr int MAX_RANKS = 8, REDUCE_THREADS = 256;
constexpr int FEW_BLOCKS = 256, MANY_BLOCKS = 512, CHUNK = 4096; // numbers of a chunk
constexpr int FEW_NUMBERS = FEW_BLOCKS * REDUCE_THREADS, MANY_NUMBERS = MANY_BLOCKS * CHUNK;
// Where the parts of an inbox begin, in bytes.
constexpr int TERMS_AT = 2 * MAX_RANKS * FEW_NUMBERS * 8;                     // [2, chunks of a rank, ranks, CHUNK]
constexpr int SUMS_AT = TERMS_AT + 2 * (MANY_BLOCKS + MAX_RANKS) * CHUNK * 4; // [2, chunks, CHUNK]
constexpr int FLAGS_AT = SUMS_AT + 2 * MANY_NUMBERS * 4;                      // [2, chunks, FLAGS]
constexpr int FLAGS = 16, OF_SUM = MAX_RANKS; // one for each rank's terms, and the sum's
constexpr int INBOX_BYTES = FLAGS_AT + 2 * MANY_BLOCKS * FLAGS * 4;
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
    begin_kernel();
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

__device__ __forceinline__ void wait_for(const uint32_t* flag, uint32_t stamp, const uint32_t* stop) {
    int spins = 0;
    while (load_acquire_system(flag) != stamp && !stopped(stop, spins)) pause_ns(20);
}

KERNEL(all_reduce_many, REDUCE_THREADS, 0, const __grid_constant__ Peers peers, float* x, int numbers, int rank,
    int ranks, uint32_t* stamps, const uint32_t* stop) {
    begin_kernel();
    const int chunk = blockIdx.x, owner = chunk % ranks, words = min(CHUNK, numbers - chunk * CHUNK) / 4;
    const uint32_t stamp = stamps[FEW_BLOCKS + chunk] + 1, half = stamp & 1;
    uint4* const own = reinterpret_cast<uint4*>(x + (size_t)chunk * CHUNK);
    // Where the chunk's parts are in any inbox: the first rank's terms, the sum, the flags.
    constexpr size_t CHUNK_BYTES = CHUNK * 4;
    const size_t terms = TERMS_AT + ((size_t)half * (MANY_BLOCKS + MAX_RANKS) + chunk / ranks * ranks) * CHUNK_BYTES;
    const size_t sum = SUMS_AT + ((size_t)half * MANY_BLOCKS + chunk) * CHUNK_BYTES;
    const size_t flags = FLAGS_AT + ((size_t)half * MANY_BLOCKS + chunk) * FLAGS * 4;
    char* const inbox = static_cast<char*>(peers.inbox[rank]);
    const uint32_t* const come = reinterpret_cast<const uint32_t*>(inbox + flags);
    const int thread = threadIdx.x;
    if (rank != owner) {
        char* const to = static_cast<char*>(peers.inbox[owner]);
        uint4* const term = reinterpret_cast<uint4*>(to + terms + rank * CHUNK_BYTES);
        for (int i = thread; i < words; i += REDUCE_THREADS) store_peer(term + i, own[i]);
        __threadfence_system();
        __syncthreads();
        if (thread == 0) {
            store_release_system(reinterpret_cast<uint32_t*>(to + flags) + rank, stamp);
            wait_for(come + OF_SUM, stamp, stop);
        }
        __syncthreads();
        const uint4* const from = reinterpret_cast<const uint4*>(inbox + sum);
        for (int i = thread; i < words; i += REDUCE_THREADS) own[i] = load_uncached(from + i);
    } else {
        if (thread < ranks && thread != rank) wait_for(come + thread, stamp, stop);
        __syncthreads();
        for (int i = thread; i < words; i += REDUCE_THREADS) {
            float a = 0.0f, b = 0.0f, c = 0.0f, d = 0.0f;
            for (int r = 0; r < ranks; r++) {
                const uint4* const from = reinterpret_cast<const uint4*>(inbox + terms + r * CHUNK_BYTES);
                const uint4 term = r == rank ? own[i] : load_uncached(from + i);
                a += __uint_as_float(term.x), b += __uint_as_float(term.y), c += __uint_as_float(term.z),
                    d += __uint_as_float(term.w);
            }
            const uint4 word = {__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d)};
            own[i] = word;
            for (int r = 0; r < ranks; r++)
                if (r != rank) store_peer(reinterpret_cast<uint4*>(static_cast<char*>(peers.inbox[r]) + sum) + i, word);
        }
        __threadfence_system();
        __syncthreads();
        if (thread < ranks && thread != rank)
            store_release_system(
                reinterpret_cast<uint32_t*>(static_cast<char*>(peers.inbox[thread]) + flags) + OF_SUM, stamp);
    }
    if (thread == 0) stamps[FEW_BLOCKS + chunk] = stamp;
}

// out = x in columns [first, first + cols) of `all`, and 0 in the others. grid (rows, ceil(all / REDUCE_THREADS))
KERNEL(place_columns, REDUCE_THREADS, 0, const float* x, float* out, int cols, int first, int all) {
    begin_kernel();
    const int column = blockIdx.y * REDUCE_THREADS + threadIdx.x, own = column - first;
    if (column >= all) return;
    const bool is_own = own >= 0 && own < cols;
    out[(size_t)blockIdx.x * all + column] = is_own ? x[(size_t)blockIdx.x * cols + own] : 0.0f;
}
