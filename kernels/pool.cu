// Copies experts from pinned RAM into VRAM by kernels, which read there as they read anywhere: beside a decode step
// (src/experts/pool.rs), and where what a rank has of an expert is not in one piece (src/experts/gpu/parts.rs).
//
//   admit        copies the runs of a ring from the last one that was copied up to the `limit`-th, then says so in
//                `done`
//   admit_limit  brings the host's count of runs to `limit`
//   copy_runs    copies the runs that it is given
//   take_table   begins a pass: makes a table of addresses of the host's places of experts, if `version` says that
//                these are others than were taken last, and says in `taken` which. The host does not write them until
//                they have been taken. Of several ranks the first one says to the others from which pass on all take
//                them
//
// An entry of the ring is some runs of bytes at equal distances. It has 4 words of 64 bits: where the first goes, where
// it lies; bytes of a run and how many, distances here and there, of 32 bits each. All are multiples of 16 but the
// number. The host writes entries and counts them; in front of every admit `fetch` (handoff.cu), or where there is none
// admit_limit, brings that count to `limit`. `head`: entries that were copied, as the device counts; `arrived`: 0
// between launches.
//
//   grid (blocks)
#include "common.cuh"

constexpr int ADMIT_THREADS = 256, RING_RUNS = 256, AT_ONCE = 8, RUNS_OF_LAUNCH = 96;

// Where word `at` of some runs of `row` words is, which begin `pitch` words apart.
__device__ __forceinline__ size_t word_of_runs(int at, int row, int runs, int pitch) {
    return runs == 1 ? at : (size_t)(at / row) * pitch + at % row;
}

// Runs of bytes at equal distances, as in an entry of the ring.
struct RunsToCopy {
    uint64_t to, from;
    uint32_t bytes, count, from_pitch, to_pitch;
};
static_assert(sizeof(RunsToCopy) == 2 * sizeof(uint4), "an entry of the ring");

// By all threads of a grid.
__device__ __forceinline__ void copy(const RunsToCopy& runs) {
    const int first = blockIdx.x * ADMIT_THREADS + threadIdx.x, step = gridDim.x * ADMIT_THREADS;
    uint4* out = reinterpret_cast<uint4*>(runs.to);
    const uint4* in = reinterpret_cast<const uint4*>(runs.from);
    const int row = runs.bytes / 16, count = runs.count, words = row * count, in_pitch = runs.from_pitch / 16,
              out_pitch = runs.to_pitch / 16;
    for (int i = first; i < words; i += AT_ONCE * step) {
        uint4 v[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (const int at = i + j * step; at < words)
                v[j] = load_uncached(in + word_of_runs(at, row, count, in_pitch));
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (const int at = i + j * step; at < words) out[word_of_runs(at, row, count, out_pitch)] = v[j];
    }
}

KERNEL(admit, ADMIT_THREADS, 0, const uint4* ring, uint32_t* head, const uint32_t* limit, uint32_t* arrived,
    uint32_t* done) {
    begin_kernel();
    const uint32_t from = __ldcg(head), to = __ldcg(limit);
    if (from == to) return;
    for (uint32_t run = from; run != to; run++) {
        const uint4* entry = ring + 2 * (size_t)(run % RING_RUNS);
        const uint4 where = load_uncached(entry), shape = load_uncached(entry + 1);
        copy(
            {(uint64_t)where.y << 32 | where.x, (uint64_t)where.w << 32 | where.z, shape.x, shape.y, shape.z, shape.w});
    }
    __threadfence_system();
    __syncthreads();
    // The last block to come says that all is there.
    if (threadIdx.x > 0 || atomicAdd(arrived, 1u) != gridDim.x - 1) return;
    __threadfence_system();
    *arrived = 0;
    *head = to;
    store_release_system(done, to);
}

KERNEL(admit_limit, 32, 0, const uint32_t* sent, uint32_t* limit) {
    begin_kernel();
    if (threadIdx.x == 0) *limit = load_acquire_system(sent);
}

struct RunList {
    RunsToCopy runs[RUNS_OF_LAUNCH];
    int count;
};

KERNEL(copy_runs, ADMIT_THREADS, 0, const __grid_constant__ RunList list) {
    begin_kernel();
    for (int i = 0; i < list.count; i++) copy(list.runs[i]);
}

constexpr int TABLE_THREADS = 1024;

// What ranks agree on, in memory that all map.
struct Agreed {
    uint32_t* version; // of the places that all take
    uint32_t* from;    // the pass from which on
    uint32_t* begun;   // passes that the first rank has begun; null: there is one rank
    int is_first;
};

// What to take in a pass. The first rank writes `from` before the version that it is of, and no other version until all
// have taken that one: who finds it early waits for its pass.
__device__ uint32_t version_of_pass(const Agreed& agreed, const uint32_t* version, uint32_t own, uint32_t pass) {
    if (!agreed.begun) return load_acquire_system(version);
    if (agreed.is_first) {
        const uint32_t newest = load_acquire_system(version);
        if (newest != own) {
            store_release_system(agreed.from, pass);
            store_release_system(agreed.version, newest);
        }
        store_release_system(agreed.begun, pass);
        return newest;
    }
    while ((int)(load_acquire_system(agreed.begun) - pass) < 0) pause_ns(40);
    const uint32_t newest = load_acquire_system(agreed.version);
    return newest != own && (int)(load_acquire_system(agreed.from) - pass) > 0 ? own : newest;
}

// places, table [entries]: the slot of each expert and 1, and its address; 0: in RAM. slots: where each begins.
// own [2]: what was taken last, and passes, as the device counts.
KERNEL(take_table, TABLE_THREADS, 0, const uint64_t* places, const uint64_t* slots, uint64_t* table, int entries,
    const uint32_t* version, uint32_t* own, uint32_t* taken, const __grid_constant__ Agreed agreed) {
    begin_kernel();
    __shared__ uint32_t newest;
    if (threadIdx.x == 0) newest = version_of_pass(agreed, version, own[0], ++own[1]);
    __syncthreads();
    if (newest == own[0]) return;
#pragma unroll 8
    for (int i = threadIdx.x; i < entries; i += TABLE_THREADS) {
        const uint64_t place = load_relaxed_system(places + i);
        table[i] = place ? slots[place - 1] : 0;
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    __threadfence_system();
    own[0] = newest;
    store_release_system(taken, newest);
}
