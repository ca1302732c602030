// Hands a layer's tokens to the CPU's experts and fetches what they return, on another engine's stream
// (src/experts/stream_port.rs). Kernels alone do this, so that the other engine can record them.
//
//   publish_rows  writes the tokens' hidden states as they are, and their routing, into mapped pinned memory, counts
//                 the slot up, and takes the next place in a ring of records that the CPU reads in order. What experts
//                 in VRAM need stays on the device (`HeldRows`): their ids reach the host as ~id, those of no expert
//                 as num_ids. Where `ring` is null, nothing reaches the host
//   fetch_rows    waits for the host to bring `up` to the slot's count, then copies what it wrote, after adding `here`
//                 to it if that is not null: then all is bf16 and `here` f32. Where `host_y` is null, the host was
//                 given nothing. Its first blocks copy experts into VRAM meanwhile (admissions.cuh)
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
//   7  1 if experts in VRAM have a part in it, else 0
// The host does not write `head`, `count` and `arrived`; `arrived` is 0 between launches.
//
//   grid (blocks)
#include "admissions.cuh"

constexpr int STREAM_THREADS = 1024;
constexpr int RECORD_WORDS = 8;

// What a batch leaves on the device for the experts that are there.
struct HeldRows {
    const uint64_t* table; // [experts]: where each is, 0 in RAM alone; null: nothing stays
    const int* experts;    // [num_ids]: the expert that an id stands for, -1 for none
    uint4* x;              // [x_words]
    int* ids;              // [choices]: experts
    float* weights;        // [choices]
    uint4* sum;            // [2 * x_words]: zeros, f32
    int num_ids;
};

// Ids of one or two words, the low word first: what does not fit in one is no expert.
__device__ __forceinline__ int id_at(const int* ids, int i, int id_words) {
    return id_words == 2 && ids[(size_t)i * 2 + 1] != 0 ? -1 : ids[(size_t)i * id_words];
}

KERNEL(publish_rows, STREAM_THREADS, 0, const uint4* x, const int* ids, const float* weights, int x_words, int choices,
    int id_words, uint4* host_x, int* host_ids, float* host_weights, uint32_t* arrived, uint32_t* count, uint32_t* head,
    uint32_t* ring, int ring_records, int slot, int layer, int tokens, int top_k, int type,
    const __grid_constant__ HeldRows held) {
    begin_kernel();
    const int first = blockIdx.x * STREAM_THREADS + threadIdx.x, step = gridDim.x * STREAM_THREADS;
    for (int i = first; i < x_words; i += step) {
        const uint4 row = x[i];
        if (ring) host_x[i] = row;
        if (held.table) held.x[i] = row, held.sum[2 * i] = held.sum[2 * i + 1] = make_uint4(0, 0, 0, 0);
    }
    for (int i = first; i < choices; i += step) {
        int id = id_at(ids, i, id_words);
        if (held.table) {
            const int expert = id >= 0 && id < held.num_ids ? held.experts[id] : -1;
            held.ids[i] = expert;
            held.weights[i] = weights[i];
            id = expert < 0 ? held.num_ids : held.table[expert] ? ~id : id;
        }
        if (ring) host_ids[i] = id, host_weights[i] = weights[i];
    }
    if (!ring) return;
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
    record[7] = held.table != nullptr;
    __threadfence_system();
    store_release_system(record, place + 1);
}

// Two sums of two numbers each, rounded.
__device__ __forceinline__ uint32_t add_bf16(uint32_t pair, float low, float high) {
    return pack_bf16(low_f32(pair) + low, high_f32(pair) + high);
}

KERNEL(fetch_rows, STREAM_THREADS, 0, const uint32_t* count, const uint32_t* up, const uint4* host_y,
    const float4* here, uint4* out, int words, const __grid_constant__ AdmissionRing ring) {
    begin_kernel();
    const int admit = blocks_that_admit(ring), block = (int)blockIdx.x - admit, blocks = (int)gridDim.x - admit;
    if (block < 0) return admit_pieces<STREAM_THREADS>(ring, blockIdx.x);
    if (threadIdx.x == 0 && host_y)
        while ((int)(load_acquire_system(up) - *count) < 0) pause_ns(40);
    __syncthreads();
    for (int i = block * STREAM_THREADS + threadIdx.x; i < words; i += blocks * STREAM_THREADS) {
        uint4 y = host_y ? load_uncached(host_y + i) : make_uint4(0, 0, 0, 0);
        if (here) {
            const float4 a = here[2 * i], b = here[2 * i + 1];
            y = make_uint4(
                add_bf16(y.x, a.x, a.y), add_bf16(y.y, a.z, a.w), add_bf16(y.z, b.x, b.y), add_bf16(y.w, b.z, b.w));
        }
        out[i] = y;
    }
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
