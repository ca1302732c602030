// Hands a layer's tokens to the CPU's experts and adds what they return, within a pass that is already enqueued.
// Kernels alone do this, because they are faster: 7 us a layer for 14 KB each way, against 24 us with copy nodes and
// 44 us with host function nodes (measured elsewhere).
//
//   publish  writes the tokens' hidden states (bf16) and routing into mapped pinned memory, then counts `down` up
//            and counts what was chosen in used [experts]
//   fetch    waits for the host to bring `up` to the same count, then adds what it wrote (f32): x[t] += y[t]. Its first
//            blocks copy experts into VRAM meanwhile (admissions.cuh)
//
//   take     on a GPU that holds experts for this one: waits for what was published, copies it, and clears y
//   give     writes the sum of its experts (f32) back, then brings `up` to the same count, for a fetch
//
//   foretell writes a guess of a later layer's `choices` experts there, but for those in VRAM. Nobody waits for it, and
//            nothing but time depends on it
//
// A few tokens need one block. An expert in VRAM (`resident[id]` is an address) is published as ~id, one that this GPU
// reads over its link as id + BY_LINK: the CPU skips both.
//
// Between two GPUs both wait. Where `stop`, if there is one, is not 0, one has failed: nobody waits any longer.
//
// Each side counts up by one with every pass, so nothing has to be cleared while a pass may still run:
//   count    the device's count of passes
//   arrived  the blocks that are done; 0 between launches
//   words    (and rows_words) units of 16 bytes
//
//   grid (blocks)
#include "admissions.cuh"

constexpr int HANDOFF_THREADS = 1024;

// Each look at `stop` crosses PCIe.
constexpr int STOP_SPINS = 1 << 10;

constexpr int BY_LINK = 1 << 16, CHOICES_OVER_LINK = 128;

// A number of experts that is not whole is rounded up where 6 of 8 are over.
constexpr int EIGHTHS = 8, ROUND_UP = 2;

// What this GPU reads over its link of the experts in RAM that a few tokens want: so many of eight. It takes those that
// the tokens ranked last, because the CPU foresees the others best. At most CHOICES_OVER_LINK choices.
struct OverLink {
    const uint64_t* reach;   // [experts]: where it reads them; 0: it does not
    const uint32_t* eighths; // of eight
    int* own;                // [choices]: the ids that it computes, wherever they are, and -1; null: nothing
    int tokens;
};

// Whether this GPU reads what the thread's choice wants over its link. By all threads of a block.
__device__ bool is_by_link(
    const OverLink& over_link, const int* ids, const uint64_t* resident, int choices, int experts) {
    __shared__ int in_ram[CHOICES_OVER_LINK], is_first[CHOICES_OVER_LINK]; // best choices of all tokens first
    const int choice = threadIdx.x, top_k = choices / over_link.tokens;
    const int at = choice % top_k * over_link.tokens + choice / top_k;
    int id = -1, first = choices;
    if (choice < choices) {
        id = ids[choice];
        if (id < 0 || id >= experts || resident[id] || !over_link.reach[id]) id = -1;
        in_ram[at] = id;
    }
    const uint32_t eighths = __ldcg(over_link.eighths);
    __syncthreads();
    if (id >= 0)
        for (first = 0; in_ram[first] != id;) first++;
    if (choice < choices) is_first[at] = first == at;
    __syncthreads();
    if (id < 0) return false;
    int before = 0, all = 0;
    for (int i = 0; i < choices; i++) all += is_first[i], before += i < first ? is_first[i] : 0;
    return before >= all - (all * (int)eighths + ROUND_UP) / EIGHTHS;
}

__device__ __forceinline__ void wait_until(const uint32_t* counter, uint32_t count, const uint32_t* stop) {
    for (int spins = 1; (int)(load_acquire_system(counter) - count) < 0; spins++) {
        pause_ns(40);
        if (stop && spins % STOP_SPINS == 0 && load_acquire_system(stop) != 0) return;
    }
}

KERNEL(publish, HANDOFF_THREADS, 0, const bf16* h, const int* ids, const float* weights, const uint64_t* resident,
    int rows_words, int choices, int experts, uint4* host_h, int* host_ids, float* host_weights, uint32_t* used,
    uint32_t* arrived, uint32_t* count, uint32_t* down, const __grid_constant__ OverLink over_link) {
    begin_kernel();
    const int first = blockIdx.x * HANDOFF_THREADS + threadIdx.x, step = gridDim.x * HANDOFF_THREADS;
    const uint4* from = reinterpret_cast<const uint4*>(h);
    for (int i = first; i < rows_words; i += step) host_h[i] = from[i];
    const bool by_link = over_link.own && blockIdx.x == 0 && is_by_link(over_link, ids, resident, choices, experts);
    for (int i = first; i < choices; i += step) {
        const int id = ids[i];
        const bool valid = id >= 0 && id < experts, here = valid && resident && resident[id];
        if (valid && used) atomicAdd(used + id, 1u);
        host_ids[i] = here ? ~id : by_link ? id + BY_LINK : id;
        host_weights[i] = weights[i];
        if (over_link.own) over_link.own[i] = here || by_link ? id : -1;
    }
    __threadfence_system();
    __syncthreads();
    // The last block to come says that all is there.
    if (threadIdx.x > 0 || atomicAdd(arrived, 1u) != gridDim.x - 1) return;
    __threadfence_system();
    *arrived = 0;
    store_release_system(down, ++*count);
}

KERNEL(take, HANDOFF_THREADS, 0, const uint4* host_h, const int* host_ids, const float* host_weights, uint4* h,
    int* ids, float* weights, uint4* y, int rows_words, int choices, uint32_t* arrived, uint32_t* count,
    const uint32_t* down, const uint32_t* stop) {
    begin_kernel();
    const int first = blockIdx.x * HANDOFF_THREADS + threadIdx.x, step = gridDim.x * HANDOFF_THREADS;
    const uint32_t expected = *count + 1;
    for (int i = first; i < 2 * rows_words; i += step) y[i] = {0, 0, 0, 0};
    if (threadIdx.x == 0) wait_until(down, expected, stop);
    __syncthreads();
    for (int i = first; i < rows_words; i += step) h[i] = load_uncached(host_h + i);
    for (int i = first; i < choices; i += step) {
        ids[i] = (int)load_acquire_system(reinterpret_cast<const uint32_t*>(host_ids) + i);
        weights[i] = __uint_as_float(load_acquire_system(reinterpret_cast<const uint32_t*>(host_weights) + i));
    }
    __syncthreads();
    if (threadIdx.x > 0 || atomicAdd(arrived, 1u) != gridDim.x - 1) return;
    *arrived = 0;
    *count = expected;
}

KERNEL(give, HANDOFF_THREADS, 0, const uint4* y, uint4* host_y, int words, uint32_t* arrived, const uint32_t* count,
    uint32_t* up) {
    begin_kernel();
    for (int i = blockIdx.x * HANDOFF_THREADS + threadIdx.x; i < words; i += gridDim.x * HANDOFF_THREADS)
        host_y[i] = y[i];
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x > 0 || atomicAdd(arrived, 1u) != gridDim.x - 1) return;
    __threadfence_system();
    *arrived = 0;
    store_release_system(up, *count);
}

KERNEL(foretell, WARP, 0, const int* ids, const uint64_t* resident, int choices, int experts, uint32_t* host_ids) {
    begin_kernel();
    for (int i = threadIdx.x; i < choices; i += WARP) {
        const int id = ids[i];
        const bool in_ram = id >= 0 && id < experts && !(resident && resident[id]);
        host_ids[i] = in_ram ? (uint32_t)id : ~0u;
    }
}

KERNEL(fetch, HANDOFF_THREADS, 0, const uint32_t* count, const uint32_t* up, const uint4* host_y, float* x, int words,
    const uint32_t* stop, const __grid_constant__ AdmissionRing ring) {
    begin_kernel();
    const int admit = blocks_that_admit(ring), block = (int)blockIdx.x - admit, blocks = (int)gridDim.x - admit;
    if (block < 0) return admit_pieces<HANDOFF_THREADS>(ring, blockIdx.x);
    if (threadIdx.x == 0) wait_until(up, *count, stop);
    __syncthreads();
    float4* to = reinterpret_cast<float4*>(x);
    for (int i = block * HANDOFF_THREADS + threadIdx.x; i < words; i += blocks * HANDOFF_THREADS) {
        const uint4 y = load_uncached(host_y + i);
        float4 v = to[i];
        v.x += __uint_as_float(y.x), v.y += __uint_as_float(y.y), v.z += __uint_as_float(y.z),
            v.w += __uint_as_float(y.w);
        to[i] = v;
    }
}
