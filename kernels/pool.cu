// Copies experts that are on their way from pinned RAM into VRAM, beside a decode step (src/experts/pool.rs).
//
//   admit   copies the runs of a ring from the last one that was copied up to the `limit`-th, then says so in `done`
//
// A run of the ring has 4 words of 64 bits: where it goes, where it lies, its bytes (a multiple of 16), and one unused.
// The host writes runs and counts them; `fetch` (handoff.cu) brings that count to `limit` in front of every admit.
// `head`: runs that were copied, as the device counts; `arrived`: 0 between launches.
//
//   grid (blocks)
#include "common.cuh"

constexpr int ADMIT_THREADS = 256, RING_RUNS = 256, AT_ONCE = 8;

KERNEL(admit, ADMIT_THREADS, 0, const uint4* ring, uint32_t* head, const uint32_t* limit, uint32_t* arrived,
    uint32_t* done) {
    begin_kernel();
    const uint32_t from = __ldcg(head), to = __ldcg(limit);
    if (from == to) return;
    const int first = blockIdx.x * ADMIT_THREADS + threadIdx.x, step = gridDim.x * ADMIT_THREADS;
    for (uint32_t run = from; run != to; run++) {
        const uint4* entry = ring + 2 * (size_t)(run % RING_RUNS);
        const uint4 where = load_uncached(entry), size = load_uncached(entry + 1);
        uint4* out = reinterpret_cast<uint4*>((uint64_t)where.y << 32 | where.x);
        const uint4* in = reinterpret_cast<const uint4*>((uint64_t)where.w << 32 | where.z);
        const int words = (int)(((uint64_t)size.y << 32 | size.x) / 16);
        for (int i = first; i < words; i += AT_ONCE * step) {
            uint4 v[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                if (i + j * step < words) v[j] = load_uncached(in + i + j * step);
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                if (i + j * step < words) out[i + j * step] = v[j];
        }
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
