// Gated short convolution between its projections.
//
//   u[t] = b[t] x[t];   out[t] = c[t] (sum over taps of tap u)
//
// bcx [T, 3 channels] bf16: b, c, x; taps [width, channels], the last one for the token itself; inputs [slots, width -
// 1, channels] f32: the last u of each sequence, the oldest first. A sequence at position 0 begins from zeros.
//
// Launch, in this order:
//   short_conv: grid (ceil(channels / SHORT_CONV_THREADS), sequences, ceil(most tokens of a sequence /
//       SHORT_CONV_TOKENS)); out [T, channels] bf16
//   short_conv_keep: grid (ceil(channels / SHORT_CONV_THREADS), sequences); inputs become those that come next
#include "delta_net.cuh"

constexpr int SHORT_CONV_THREADS = 128, SHORT_CONV_TOKENS = 64;

// What a sequence has read, by row of the batch; rows before its first are those that were kept.
struct Inputs {
    const bf16* bcx;
    const float* kept; // of the channel, null: none
    int first, channels, width, c;

    __device__ __forceinline__ float operator()(int t) const {
        if (t < first) return kept ? kept[(size_t)(t - first + width - 1) * channels] : 0.0f;
        const bf16* row = bcx + (size_t)t * 3 * channels + c;
        return to_f32(row[0]) * to_f32(row[2 * channels]);
    }
};

__device__ __forceinline__ Inputs inputs_of(
    const bf16* bcx, const float* inputs, const DeltaBatch& batch, int channels, int width, int c) {
    const int first = batch.seq_first[blockIdx.y];
    const float* kept = inputs + (size_t)batch.seq_slots[blockIdx.y] * (width - 1) * channels + c;
    return {bcx, batch.positions[first] == 0 ? nullptr : kept, first, channels, width, c};
}

KERNEL(short_conv, SHORT_CONV_THREADS, 0, const bf16* bcx, const float* inputs, const float* taps, bf16* out,
    DeltaBatch batch, int channels, int width) {
    begin_kernel();
    const int c = blockIdx.x * SHORT_CONV_THREADS + threadIdx.x, first = batch.seq_first[blockIdx.y];
    const int from = first + blockIdx.z * SHORT_CONV_TOKENS;
    const int end = min(batch.seq_first[blockIdx.y + 1], from + SHORT_CONV_TOKENS);
    if (c >= channels) return;
    const Inputs u = inputs_of(bcx, inputs, batch, channels, width, c);
    for (int t = from; t < end; t++) {
        float sum = taps[(size_t)(width - 1) * channels + c] * u(t);
        for (int i = width - 2; i >= 0; i--) sum += taps[(size_t)i * channels + c] * u(t - (width - 1) + i);
        out[(size_t)t * channels + c] = to_bf16(to_f32(bcx[((size_t)t * 3 + 1) * channels + c]) * sum);
    }
}

KERNEL(
    short_conv_keep, SHORT_CONV_THREADS, 0, const bf16* bcx, float* inputs, DeltaBatch batch, int channels, int width) {
    begin_kernel();
    const int c = blockIdx.x * SHORT_CONV_THREADS + threadIdx.x, end = batch.seq_first[blockIdx.y + 1];
    if (c >= channels) return;
    const Inputs u = inputs_of(bcx, inputs, batch, channels, width, c);
    float* kept = inputs + (size_t)batch.seq_slots[blockIdx.y] * (width - 1) * channels + c;
    // Inputs that were kept lie at least one row further on than where they go, so none is overwritten unread.
    for (int i = 0; i < width - 1; i++) kept[(size_t)i * channels] = u(end - (width - 1) + i);
}
