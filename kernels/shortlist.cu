// The largest numbers of each row, in order: what a sampler needs of logits. NaN counts as -infinity, of equals the
// lower index is larger.
//
// A block sorts PART numbers of a row (bitonic, in shared memory) and keeps KEPT of them, so a few launches, each over
// what the last one kept, leave KEPT of a row:
//   n_0 = n, n_{i+1} = KEPT ceil(n_i / PART), until one block is enough.
// The first launch also leaves of each block its largest number m and sum exp((x - m) inverse_temperature), for the
// weight of the whole row.
//
//   shortlist   grid (ceil(n / PART), rows)
//       values               [rows, pitch]
//       ids                  [rows, pitch], or null: their indices
//       best, best_ids       [rows, KEPT * blocks]
//       inverse_temperature  [rows]
//       sums                 [rows, blocks, 2], or null
#include "common.cuh"

constexpr int SORT_THREADS = 512, PART = 1024, KEPT = 64;

// Larger keys for larger numbers, and for lower ids.
__device__ __forceinline__ uint64_t key_of(float x, int id) {
    const uint32_t bits = __float_as_uint(x), ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)ordered << 32 | (uint32_t)~id;
}
__device__ __forceinline__ float number_of(uint64_t key) {
    const uint32_t ordered = (uint32_t)(key >> 32);
    return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

KERNEL(shortlist, SORT_THREADS, 0, const float* values, const int* ids, float* best, int* best_ids,
    const float* inverse_temperature, float* sums, int n, int pitch) {
    __shared__ uint64_t keys[PART];
    __shared__ float scratch[33];
    begin_kernel();
    const int tid = threadIdx.x, row = blockIdx.y, first = blockIdx.x * PART;
    values += (size_t)row * pitch;
    for (int i = tid; i < PART; i += SORT_THREADS) {
        const int at = first + i;
        float x = at < n ? values[at] : -INFINITY;
        if (!(x == x)) x = -INFINITY;
        // What is beyond the end comes after all that is not.
        keys[i] = key_of(x, at < n ? (ids ? ids[(size_t)row * pitch + at] : at) : 0x7fffffff);
    }
    __syncthreads();
    for (int size = 2; size <= PART; size *= 2)
        for (int step = size / 2; step > 0; step /= 2) {
            const int i = 2 * tid - (tid & (step - 1)), j = i + step; // a pair for each thread
            const bool down = (i & size) == 0;
            const uint64_t a = keys[i], b = keys[j];
            if ((a < b) == down) keys[i] = b, keys[j] = a;
            __syncthreads();
        }
    if (tid < KEPT) {
        const size_t to = ((size_t)row * gridDim.x + blockIdx.x) * KEPT + tid;
        best[to] = number_of(keys[tid]);
        best_ids[to] = (int)~(uint32_t)keys[tid];
    }
    if (!sums) return;
    const float top = number_of(keys[0]), inverse = inverse_temperature[row];
    float sum = 0.0f;
    for (int i = tid; i < PART; i += SORT_THREADS) {
        const float x = number_of(keys[i]);
        if (x > -INFINITY) sum += expf((x - top) * inverse);
    }
    sum = block_sum(sum, scratch);
    if (tid == 0) *reinterpret_cast<float2*>(sums + 2 * ((size_t)row * gridDim.x + blockIdx.x)) = make_float2(top, sum);
}
