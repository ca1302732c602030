// Attention of single query rows with multi-head latent attention, absorbed: flash-decoding over the paged cache
// (attention.cuh) of latents, which are keys and values at once.
//
// For i in 0..n, with t = rows[i], head h:
//   out[t, h] = softmax(scale * q[t, h] . keys[0..=positions[t]]) keys[0..=positions[t]][0..value_dim]
// out [T, heads * value_dim] bf16; key_dim <= 576, value_dim <= 512, multiples of 8. A negative rows[i] is skipped.
// q [T, heads * q_most] bf16 are the first numbers of each head; the others, which no product has moved into the
// latents' space, are key_dim - q_most numbers at q_rest, whose heads are rest_pitch apart. q_most may be key_dim.
//
// sinks [heads] or null: scores that take part in the softmax and bring no value. `early` as in attention_decode.cu.
//
// attend_latent_decode_{16|32}_{bf16|int8}: 16 or 32 heads to a block, its tile (16 if heads <= 16).
//
// How a block works: decode_wide.cuh.
//   grid    (splits, ceil(heads / H), n), H = 16 or 32
//   splits  H = 16: floor(multiprocessors * 2 / (n * ceil(heads / 16)))
//           H = 32: floor(multiprocessors / (n * ceil(heads / 32)))
//           at least 1, at most MAX_SPLITS, and at most ceil(max context / UNIT)
// Workspace and attend_combine as in attention_decode.cu.
#include "decode_wide.cuh"

constexpr int LATENT = 576;

#define DECODE_MLA_ARGUMENTS(Cache)                                                                                    \
    const bf16 *q, int q_most, const bf16 *q_rest, int rest_pitch, const AS_BYTES(Cache) * keys, bf16 *out,            \
        float *partial, float2 *states, const int *rows, const int *positions, const int *token_seq,                   \
        const int *seq_blocks, const uint32_t *block_table, int heads, int key_dim, int value_dim, float scale,        \
        const float *sinks, int early
#define DECODE_MLA(name, H, STAGES, Cache, SHARED)                                                                     \
    static_assert(SHARED == (WideRing<LATENT, false, H / 16, STAGES, Cache>::BYTES), "shared memory of " #name);       \
    KERNEL_TILE(name, H)                                                                                               \
    KERNEL(name, 8 * H, SHARED, DECODE_MLA_ARGUMENTS(Cache)) {                                                         \
        decode_wide<LATENT, false, H / 16, STAGES, Cache>(                                                             \
            {{q, q_most, q_rest, rest_pitch}, keys, nullptr, out, partial, states, rows, positions, token_seq,         \
                seq_blocks, block_table, heads, 1, key_dim, value_dim, scale, {NO_WINDOW, 0}, sinks, early});          \
    }
DECODE_MLA(attend_latent_decode_16_bf16, 16, 4, bf16, 82944)
DECODE_MLA(attend_latent_decode_32_bf16, 32, 4, bf16, 91136)
DECODE_MLA(attend_latent_decode_16_int8, 16, 6, int8, 66752)
DECODE_MLA(attend_latent_decode_32_int8, 32, 6, int8, 74944)
