// Entries of several positions, and what tokens attend to of them and of a window (src/backend/compress.rs).
//
// A slot keeps of a sequence the last `window` rows, ring [slots, window, dim] f32, position p at p % window; and open
// entries among its `of_slot` numbers, from `first` on: [1 or 2][largest gate, sum of shares, sum of values][dim] f32.
// x [T, 2 * width] bf16: values, then gates; width is dim, or of entries that overlap 2 * dim, the first half for the
// next entry. Entries [blocks, ceil(64 / ratio), dim] bf16: those that end in a block of positions.
//
// Launch, in this order:
//   compress: grid (most entries that end, sequences)
//     out[t] [dim] = rope(norm(sum_j softmax_j(gate_j + bias_j) value_j)), of the entry that token t ends, rotated at
//     its first position; the last 2 * half numbers turn, in pairs of neighbours; none with half 0
//   rope_entries: grid (T): turns them where that is left to be done, of rows [T, dim] of tokens that end an entry
//   compress_keep: grid (ceil(dim / KEEP_THREADS), sequences): what is open at the end
//   entries_write: grid (T): the rows of tokens that end an entry to their places; of index keys as well
//   entries_gather: grid (ceil(most / ENTRY_ROWS), n)
//     Row i of n, token first + i: the window's rows, then its entries, to pages [n, pages, 64, dim] bf16; positions[i]
//     = rows - 1. With that, and tables that count, the kernels of latents read what was gathered.
//   window_keep: grid (least of window and most tokens of a sequence, sequences), after all of them
// dim is a multiple of 8, at most ENTRY_DIM.
#include "attention.cuh"

constexpr int ENTRY_DIM = 512, ENTRY_ROWS = 16, KEEP_THREADS = 128;

struct Sequences {
    const int *first, *slots, *positions; // positions of tokens
};

struct Compressor {
    const bf16* x;
    float* state;
    const float* bias; // [ratio, width]
    int dim, ratio, overlaps, first, of_slot;
};

// One number of an entry that is not whole.
struct Open {
    float largest, shares, values;

    __device__ __forceinline__ void take(float gate, float value) {
        const float top = fmaxf(largest, gate), before = expf(largest - top), share = expf(gate - top);
        shares = shares * before + share;
        values = values * before + share * value;
        largest = top;
    }
};

// The tokens of sequence s: row of the first, its position, and the position behind the last.
struct Span {
    int row, start, end;
    __device__ __forceinline__ Span(const Sequences& all, int s)
        : row(all.first[s]), start(all.positions[row]), end(start + all.first[s + 1] - row) {}
};

// Number c of entry `entry`, of all that is read of it.
__device__ __forceinline__ Open entry_of(const Compressor& a, const Sequences& all, int s, int c, int entry) {
    const Span span(all, s);
    const int width = a.overlaps ? 2 * a.dim : a.dim, kept = entry - span.start / a.ratio;
    Open open = {-INFINITY, 0.0f, 0.0f};
    if (span.start > 0 && kept <= a.overlaps) {
        const float* at = a.state + (size_t)all.slots[s] * a.of_slot + a.first + (size_t)kept * 3 * a.dim + c;
        open = {at[0], at[a.dim], at[2 * a.dim]};
    }
    auto take = [&](int from, int to, int column) {
        for (int p = max(from, span.start); p < min(to, span.end); p++) {
            const bf16* row = a.x + (size_t)(span.row + p - span.start) * 2 * width + column;
            open.take(to_f32(row[width]) + a.bias[(size_t)(p % a.ratio) * width + column], to_f32(row[0]));
        }
    };
    if (a.overlaps) take((entry - 1) * a.ratio, entry * a.ratio, c);
    take(entry * a.ratio, (entry + 1) * a.ratio, c + width - a.dim);
    return open;
}

// Number `at` of those that turn, beside the other one of its pair, by the angle of `position`, as rope_angles has it.
__device__ __forceinline__ float turned_to(int position, const float* inv_freq, int at, float own, float other) {
    const double angle = (float)position * inv_freq[at / 2];
    const float rest = (float)(angle - rint(angle * 0.15915494309189535) * 6.283185307179586), sine = __sinf(rest);
    return own * __cosf(rest) + (at % 2 ? other * sine : -other * sine);
}

KERNEL(compress, ENTRY_DIM, 0, const __grid_constant__ Compressor a, const __grid_constant__ Sequences all,
    const float* weight, const float* inv_freq, bf16* out, int half, float eps) {
    begin_kernel();
    __shared__ float scratch[WARP + 1], row[ENTRY_DIM];
    const int s = blockIdx.y, c = threadIdx.x;
    const Span span(all, s);
    const int entry = span.start / a.ratio + blockIdx.x, end = (entry + 1) * a.ratio;
    if (end > span.end) return;
    float x = 0.0f;
    if (c < a.dim) {
        const Open open = entry_of(a, all, s, c, entry);
        x = open.values / open.shares;
    }
    const float scale = rsqrtf(block_sum(x * x, scratch) / a.dim + eps);
    if (c < a.dim) row[c] = x * scale * weight[c];
    __syncthreads();
    if (c >= a.dim) return;
    const int at = c - (a.dim - 2 * half);
    const float turned = at < 0 ? row[c] : turned_to(entry * a.ratio, inv_freq, at, row[c], row[c ^ 1]);
    out[(size_t)(span.row + end - 1 - span.start) * a.dim + c] = to_bf16(turned);
}

KERNEL(rope_entries, ENTRY_DIM / 2, 0, bf16* rows, const float* inv_freq, const int* positions, int dim, int half,
    int ratio) {
    begin_kernel();
    const int end = positions[blockIdx.x] + 1, pair = threadIdx.x;
    if (end <= 0 || end % ratio != 0 || pair >= half) return;
    bf16* row = rows + (size_t)blockIdx.x * dim + dim - 2 * half + 2 * pair;
    const float a = to_f32(row[0]), b = to_f32(row[1]);
    row[0] = to_bf16(turned_to(end - ratio, inv_freq, 2 * pair, a, b));
    row[1] = to_bf16(turned_to(end - ratio, inv_freq, 2 * pair + 1, b, a));
}

KERNEL(compress_keep, KEEP_THREADS, 0, const __grid_constant__ Compressor a, const __grid_constant__ Sequences all) {
    begin_kernel();
    const int s = blockIdx.y, c = blockIdx.x * KEEP_THREADS + threadIdx.x;
    if (c >= a.dim) return;
    const int entry = Span(all, s).end / a.ratio;
    // Both are read before either is written.
    const Open own = entry_of(a, all, s, c, entry), next = a.overlaps ? entry_of(a, all, s, c, entry + 1) : own;
    float* at = a.state + (size_t)all.slots[s] * a.of_slot + a.first + c;
    auto keep = [&](const Open& open) {
        at[0] = open.largest;
        at[a.dim] = open.shares;
        at[2 * a.dim] = open.values;
    };
    keep(own);
    at += 3 * a.dim;
    if (a.overlaps) keep(next);
}

// Where an entry of a sequence lies.
__device__ __forceinline__ size_t entry_at(const uint32_t* table, int entry, int ratio, int dim) {
    const int page = ((entry + 1) * ratio - 1) / PAGE, inside = entry - page * PAGE / ratio;
    return ((size_t)table[page] * div_ceil(PAGE, ratio) + inside) * dim;
}

KERNEL(entries_write, 64, 0, const bf16* rows, bf16* entries, const int* positions, const int* token_seq,
    const int* seq_blocks, const uint32_t* block_table, int dim, int ratio) {
    begin_kernel();
    const int t = blockIdx.x, position = positions[t];
    if ((position + 1) % ratio) return;
    const size_t at = entry_at(block_table + seq_blocks[token_seq[t]], position / ratio, ratio, dim);
    for (int i = 8 * threadIdx.x; i < dim; i += 8 * 64)
        *reinterpret_cast<uint4*>(entries + at + i) = *reinterpret_cast<const uint4*>(rows + (size_t)t * dim + i);
}

struct Gather {
    const bf16* kv;      // [T, dim], of the batch
    const float* ring;   // of the slots
    const bf16* entries; // null: none
    bf16* to;
    int* to_positions;
    const int *lists, *token_seq, *seq_blocks; // lists [T, len], null: all that are seen
    const uint32_t* block_table;
    int token, window, dim, ratio, most, len, pages; // a token that sees more than `most` positions has a list
};

KERNEL(entries_gather, 128, 0, const __grid_constant__ Gather a, const __grid_constant__ Sequences all) {
    begin_kernel();
    const int t = a.token + blockIdx.y, s = a.token_seq[t], position = all.positions[t];
    const Span span(all, s);
    const int window = min(a.window, position + 1);
    const bool listed = a.lists && position + 1 > a.most;
    const int rows = window + (!a.entries ? 0 : listed ? a.len : (position + 1) / a.ratio);
    if (blockIdx.x == 0 && threadIdx.x == 0) a.to_positions[blockIdx.y] = rows - 1;
    const uint32_t* table = a.block_table + a.seq_blocks[s];
    const int begin = blockIdx.x * ENTRY_ROWS, eights = a.dim / 8, count = min(ENTRY_ROWS, rows - begin);
    for (int i = threadIdx.x; i < count * eights; i += 128) {
        const int row = begin + i / eights, col = i % eights * 8;
        uint4 v;
        if (row >= window) {
            const int entry = listed ? a.lists[(size_t)t * a.len + row - window] : row - window;
            v = *reinterpret_cast<const uint4*>(a.entries + entry_at(table, entry, a.ratio, a.dim) + col);
        } else if (const int at = position + 1 - window + row; at >= span.start) {
            v = *reinterpret_cast<const uint4*>(a.kv + (size_t)(span.row + at - span.start) * a.dim + col);
        } else {
            const float* from = a.ring + ((size_t)all.slots[s] * a.window + at % a.window) * a.dim + col;
            const float4 x = *reinterpret_cast<const float4*>(from), y = *reinterpret_cast<const float4*>(from + 4);
            v = make_uint4(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w), pack_bf16(y.x, y.y), pack_bf16(y.z, y.w));
        }
        *reinterpret_cast<uint4*>(a.to + ((size_t)blockIdx.y * a.pages * PAGE + row) * a.dim + col) = v;
    }
}

KERNEL(window_keep, 128, 0, const bf16* kv, float* ring, const __grid_constant__ Sequences all, int window, int dim) {
    begin_kernel();
    const int s = blockIdx.y;
    const Span span(all, s);
    const int position = span.end - 1 - (int)blockIdx.x;
    if (position < span.start) return;
    const bf16* row = kv + (size_t)(span.row + position - span.start) * dim;
    float* to = ring + ((size_t)all.slots[s] * window + position % window) * dim;
    for (int i = threadIdx.x; i < dim; i += 128) to[i] = to_f32(row[i]);
}
