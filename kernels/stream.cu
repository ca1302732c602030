// Hands a layer's tokens to the CPU's experts and fetches what they return, on another engine's stream
// (src/experts/stream_port.rs). Kernels alone do this, so that the other engine can record them.
//
//   publish_rows  writes the tokens' hidden states as they are, and their routing, into mapped pinned memory, counts
//                 the slot up, and takes the next place in a ring of records that the CPU reads in order
//   fetch_rows    waits for the host to bring `up` to the slot's count, then copies what it wrote
//   take_choices  writes for experts on the device which expert each id means, -1 for none, and the weights
//
// A record has RECORD_WORDS words:
//   0  its number in the ring, from 1 on; written last
//   1  the slot
//   2  the slot's count
//   3  layer
//   4  tokens
//   5  top_k
//   6  type
//   7  unused
// The host does not write `head`, `count` and `arrived`; `arrived` is 0 between launches.
//
//   grid (blocks)
#include "common.cuh"

constexpr int STREAM_THREADS = 1024;
constexpr int RECORD_WORDS = 8;

// Ids of one or two words, the low word first: what does not fit in one is no expert.
__device__ __forceinline__ int id_at(const int* ids, int i, int id_words) {
    return id_words == 2 && ids[(size_t)i * 2 + 1] != 0 ? -1 : ids[(size_t)i * id_words];
}

KERNEL(publish_rows, STREAM_THREADS, 0, const uint4* x, const int* ids, const float* weights, int x_words, int choices,
    int id_words, uint4* host_x, int* host_ids, float* host_weights, uint32_t* arrived, uint32_t* count, uint32_t* head,
    uint32_t* ring, int ring_records, int slot, int layer, int tokens, int top_k, int type) {
    begin_kernel();
    const int first = blockIdx.x * STREAM_THREADS + threadIdx.x, step = gridDim.x * STREAM_THREADS;
    for (int i = first; i < x_words; i += step) host_x[i] = x[i];
    for (int i = first; i < choices; i += step) {
        host_ids[i] = id_at(ids, i, id_words);
        host_weights[i] = weights[i];
    }
    __threadfence_system();
    __syncthreads();
    // The last block to come says that all is there.
    if (threadIdx.x > 0 || atomicAdd(arrived, 1u) != gridDim.x - 1) return;
    __threadfence_system();
    *arrived = 0;
    const uint32_t place = atomicAdd(head, 1u);
    uint32_t* record = ring + (size_t)(place % (uint32_t)ring_records) * RECORD_WORDS;
    record[1] = (uint32_t)slot;
    record[2] = ++*count;
    record[3] = (uint32_t)layer;
    record[4] = (uint32_t)tokens;
    record[5] = (uint32_t)top_k;
    record[6] = (uint32_t)type;
    __threadfence_system();
    store_release_system(record, place + 1);
}

KERNEL(fetch_rows, STREAM_THREADS, 0, const uint32_t* count, const uint32_t* up, const uint4* host_y, uint4* out,
    int words) {
    begin_kernel();
    if (threadIdx.x == 0)
        while ((int)(load_acquire_system(up) - *count) < 0) pause_ns(40);
    __syncthreads();
    for (int i = blockIdx.x * STREAM_THREADS + threadIdx.x; i < words; i += gridDim.x * STREAM_THREADS)
        out[i] = load_uncached(host_y + i);
}

// experts [num_ids]: the expert that an id stands for.
KERNEL(take_choices, STREAM_THREADS, 0, const int* ids, const float* weights, const int* experts, int* own_ids,
    float* own_weights, int choices, int id_words, int num_ids) {
    begin_kernel();
    for (int i = blockIdx.x * STREAM_THREADS + threadIdx.x; i < choices; i += gridDim.x * STREAM_THREADS) {
        const int id = id_at(ids, i, id_words);
        own_ids[i] = id >= 0 && id < num_ids ? experts[id] : -1;
        own_weights[i] = weights[i];
    }
}
