// Copies experts from pinned RAM into VRAM by kernels, which read there as they read anywhere: in a decode step
// (src/experts/pool.rs), and where what a rank has of an expert is not in one piece (src/experts/gpu/parts.rs).
//
//   admit        copies what the host has shown (admissions.cuh), where no kernel waits for the CPU
//   copy_runs    copies the runs that it is given
//   take_table   begins a pass: makes a table of addresses of the host's places of experts, if `version` says that
//                these are others than were taken last, and says in `taken` which. The host does not write them until
//                they have been taken. Of several ranks the first one says to the others from which pass on all take
//                them
//
//   grid (blocks)
#include "admissions.cuh"

constexpr int ADMIT_THREADS = 1024, COPY_THREADS = 256, AT_ONCE = 8, RUNS_OF_LAUNCH = 96;

KERNEL(admit, ADMIT_THREADS, 0, const __grid_constant__ AdmissionRing ring) {
    begin_kernel();
    admit_pieces<ADMIT_THREADS>(ring, blockIdx.x);
}

struct RunList {
    RunsToCopy runs[RUNS_OF_LAUNCH];
    int count;
};

KERNEL(copy_runs, COPY_THREADS, 0, const __grid_constant__ RunList list) {
    begin_kernel();
    const int thread = blockIdx.x * COPY_THREADS + threadIdx.x, threads = gridDim.x * COPY_THREADS;
    for (int i = 0; i < list.count; i++) copy<AT_ONCE>(list.runs[i], thread, threads);
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
