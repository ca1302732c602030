// Experts on their way into VRAM while a decode step waits for the CPU (src/experts/gpu/admissions.rs): blocks of the
// kernel that waits copy what the host has shown. The memory of the GPU is idle then. Beside kernels that read it as
// fast as they can, a load over the link takes up to 100 us instead of 2, and what else crosses waits behind it (H200).
//
// The ring has an entry for each piece of an expert: some runs of bytes at equal distances. It has 4 words of 64 bits:
// where the first run goes, where it lies; bytes of a run and how many, distances here and there, of 32 bits each. All
// are multiples of 16 but the number. Block b copies every ADMIT_BLOCKS-th piece, from the b-th on.
#pragma once
#include "common.cuh"

// Each has a piece on the way: together they fill the link.
constexpr int ADMIT_BLOCKS = 2, PIECE_BYTES = 65536, RING_PIECES = 1024;

// Runs of bytes at equal distances, as in an entry of the ring.
struct RunsToCopy {
    uint64_t to, from;
    uint32_t bytes, count, from_pitch, to_pitch;
};
static_assert(sizeof(RunsToCopy) == 2 * sizeof(uint4), "an entry of the ring");

// What comes, in memory of the host.
struct AdmissionRing {
    const uint4* entries; // [RING_PIECES]; null: nothing comes
    const uint32_t* sent; // pieces that may be copied
    uint32_t* come;       // [ADMIT_BLOCKS]: pieces that each block has copied
};

// Where word `at` of some runs of `row` words is, which begin `pitch` words apart.
__device__ __forceinline__ size_t word_of_runs(int at, int row, int runs, int pitch) {
    return runs == 1 ? at : (size_t)(at / row) * pitch + at % row;
}

// By `threads` threads; each has AT_ONCE words on the way.
template <int AT_ONCE> __device__ __forceinline__ void copy(const RunsToCopy& runs, int thread, int threads) {
    uint4* out = reinterpret_cast<uint4*>(runs.to);
    const uint4* in = reinterpret_cast<const uint4*>(runs.from);
    const int row = runs.bytes / 16, count = runs.count, words = row * count, in_pitch = runs.from_pitch / 16,
              out_pitch = runs.to_pitch / 16;
    for (int i = thread; i < words; i += AT_ONCE * threads) {
        uint4 v[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (const int at = i + j * threads; at < words)
                v[j] = load_uncached(in + word_of_runs(at, row, count, in_pitch));
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (const int at = i + j * threads; at < words) out[word_of_runs(at, row, count, out_pitch)] = v[j];
    }
}

// Blocks at the begin of a grid that copy.
__device__ __forceinline__ int blocks_that_admit(const AdmissionRing& ring) { return ring.entries ? ADMIT_BLOCKS : 0; }

// Copies one block's share of what may be copied by now. By all THREADS threads of the block.
template <int THREADS> __device__ void admit_pieces(const AdmissionRing& ring, int block) {
    constexpr int WORDS = sizeof(RunsToCopy) / sizeof(uint4), BATCH = 64;
    // Reads of one word of the host's memory come one after the other: each entry is read once.
    __shared__ uint4 entries[BATCH * WORDS];
    __shared__ uint32_t counts[2];
    if (threadIdx.x < 2) counts[threadIdx.x] = load_acquire_system(threadIdx.x == 0 ? ring.come + block : ring.sent);
    __syncthreads();
    const uint32_t begin = counts[0], sent = counts[1];
    const int pieces = (int)(sent - begin * ADMIT_BLOCKS - block + ADMIT_BLOCKS - 1) / ADMIT_BLOCKS;
    if (pieces <= 0) return;
    for (int first = 0; first < pieces; first += BATCH) {
        const int batch = min(pieces - first, BATCH);
        __syncthreads();
        if (threadIdx.x < batch * WORDS) {
            const uint32_t piece = (begin + first + threadIdx.x / WORDS) * ADMIT_BLOCKS + block;
            entries[threadIdx.x] =
                load_uncached(ring.entries + (size_t)(piece % RING_PIECES) * WORDS + threadIdx.x % WORDS);
        }
        __syncthreads();
        for (int i = 0; i < batch; i++)
            copy<PIECE_BYTES / 16 / THREADS>(reinterpret_cast<const RunsToCopy*>(entries)[i], threadIdx.x, THREADS);
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    __threadfence_system();
    store_release_system(ring.come + block, begin + pieces);
}
