// Routed experts over many tokens on Hopper: the products gate_up and down of experts_gemm.cu, by blocks that stay.
// Only on compute capability 9.0 (in code for other cards these kernels are empty).
//
// A multiprocessor has one block: a warpgroup that copies, and CONSUMERS that multiply 8 tiles of 16 rows of weights
// each by up to TOKENS tokens of an expert. The copies are always some stages ahead, those of the next piece of work
// while the sums of the last one are stored, too: nothing waits for memory between two pieces. There is no list of
// pieces: each block finds its own, every gridDim.x-th of all, from the experts' offsets.
//
//   experts_{gate_up|down}_wgmma_{int4_g64|int4_g32|int8_g64|int8_g32|mxfp4_g32}_t{TOKENS}      grid (blocks)
//
// Blocks: the device's multiprocessors. A kernel beside them would take one, and its block's pieces would come after
// all others. Arguments are those of experts_gemm.cu, with experts_sort's offsets for its tiles; num_experts <=
// MAX_EXPERTS. TOKENS is 96 where experts have up to 80 tokens on average, and otherwise 176: for more, registers would
// not suffice.
#include "epilogue.cuh"
#include "experts.cuh"
#include "packed_gemm.cuh"

constexpr int WARPGROUP = 128, CONSUMERS = 2, PERSISTENT_THREADS = (CONSUMERS + 1) * WARPGROUP;

#ifdef HAS_WGMMA
constexpr int CONSUMER_WARPS = CONSUMERS * WARPGROUP / WARP, BAND_TILES = CONSUMERS * BLOCK_TILES;

// A band of an expert's tiles, and the positions of pair_slot that meet it.
struct Piece {
    int expert, band, first, tokens;
};

// All pieces, in an order in which bands of the same tokens follow one another. An expert's tokens come in runs of up
// to TOKENS; `runs`[e] is the number of those of all experts up to e.
struct Pieces {
    int experts, bands, offsets[MAX_EXPERTS + 1], runs[MAX_EXPERTS];
};

// Where a warp is in its block's pieces: in shared memory, because a consumer has no registers left for it.
struct PiecePlace {
    int next;
    Piece piece;

    // The next one is in `piece`, if there is one.
    template <int TOKENS> __device__ __forceinline__ bool take(const Pieces& all) {
        const int lane = threadIdx.x % WARP, run = next / all.bands;
        int e = 0; // the experts whose last run is before that
        for (int first = 0; first < all.experts; first += WARP)
            e += __popc(__ballot_sync(ALL_LANES, first + lane < all.experts && all.runs[first + lane] <= run));
        if (e == all.experts) return false;
        const int begin = (run - (e ? all.runs[e - 1] : 0)) * TOKENS, first = all.offsets[e] + begin;
        const Piece found{e, next % all.bands, first, min(all.offsets[e + 1] - first, TOKENS)};
        const int then = next + gridDim.x;
        __syncwarp();
        next = then, piece = found;
        __syncwarp();
        return true;
    }
};

template <Format F_, int SPAN_, int TOKENS_, int STAGES_> struct PersistentShape {
    static constexpr Format F = F_;
    static constexpr int SPAN = SPAN_, TOKENS = TOKENS_, STAGES = STAGES_, K = 64, WARP_TILES = 2, COLUMNS = TOKENS / 8;
    static constexpr int FEWER = TOKENS > 96 ? 96 : 48; // columns that suffice for some pieces
    static constexpr bool WGMMA = true, ROWS = false;
    static constexpr int CONSUMER_REGISTERS = TOKENS > 96 ? 232 : 224, COPYING_REGISTERS = TOKENS > 96 ? 40 : 56;
    static constexpr int TILE_BYTES = K / K_BLOCK * Lines<F>::PER_BLOCK * LINE_BYTES, SPANS = K / SPAN;
    // Shared memory: the stages, each with rows, which wgmma wants aligned to 1024 bytes, lines and scales; then the
    // barriers, the pieces, and the warps' places.
    static constexpr int LINES_AT = TOKENS * K * 2, SCALES_AT = LINES_AT + BAND_TILES * TILE_BYTES,
                         STAGE_BYTES = div_ceil(SCALES_AT + BAND_TILES * SPANS * 32, 1024) * 1024;
    static constexpr int BARRIERS_AT = STAGES * STAGE_BYTES, PIECES_AT = BARRIERS_AT + STAGES * 16,
                         PLACES_AT = PIECES_AT + (int)sizeof(Pieces),
                         SHARED_BYTES = PLACES_AT + PERSISTENT_THREADS / WARP * (int)sizeof(PiecePlace);
    static_assert(SHARED_BYTES <= 227 << 10, "what a block may have");

    struct Stage {
        unsigned char *rows, *lines, *scales;
    };
    static __device__ __forceinline__ Stage stage(unsigned char* shared, int slot) {
        unsigned char* at = shared + slot * STAGE_BYTES;
        return {at, at + LINES_AT, at + SCALES_AT};
    }
};

// The stages, one after the other, as a thread sees them: where it is, and the parity of its barriers' phase.
template <class S> struct Ring {
    unsigned char* shared;
    int slot = 0, parity = 0;

    __device__ __forceinline__ explicit Ring(unsigned char* shared) : shared(shared) {}
    __device__ __forceinline__ uint64_t* full(int slot) const {
        return reinterpret_cast<uint64_t*>(shared + S::BARRIERS_AT) + slot;
    }
    __device__ __forceinline__ uint64_t* empty(int slot) const { return full(S::STAGES + slot); }
    __device__ __forceinline__ typename S::Stage stage() const { return S::stage(shared, slot); }
    __device__ __forceinline__ void advance() {
        if (++slot == S::STAGES) slot = 0, parity ^= 1;
    }

    __device__ __forceinline__ void begin() const {
        for (int s = 0; s < S::STAGES; s++) {
            mbarrier_init(full(s), WARPGROUP);
            mbarrier_init(empty(s), CONSUMER_WARPS);
        }
        mbarrier_init_done();
    }
    // By the threads that copy: until the stage may be written; what they copy is all of it.
    __device__ __forceinline__ void wait_empty() const { mbarrier_wait(empty(slot), parity ^ 1); }
    __device__ __forceinline__ void written() const { copy_async_arrive(full(slot)); }
    // By the warps that multiply: until all of the stage is there; they need it no more.
    __device__ __forceinline__ void wait_full() const {
        mbarrier_wait(full(slot), parity);
        shared_to_async();
    }
    __device__ __forceinline__ void read(int slot) const {
        if (threadIdx.x % WARP == 0) mbarrier_arrive(empty(slot));
    }
};

// One of an expert's matrices, and what it is multiplied by: row_of(i) is the row of x for position i of pair_slot.
template <class RowOf> struct Operands {
    const uint64_t* experts;
    int at, tiles, k; // where the matrix begins in an expert
    const bf16* x;
    RowOf row_of;
};

// The copying warpgroup's part. What lies past the tiles and the tokens is multiplied, too, and goes nowhere: there the
// last ones are copied again, so that nothing is asked of each copy.
template <class S, class RowOf>
__device__ __forceinline__ void copy_pieces(
    Ring<S> ring, const Pieces& pieces, PiecePlace& at, const Operands<RowOf>& a, const Packing& packing) {
    const int tid = threadIdx.x % WARPGROUP, k = a.k, group_shift = 31 - __clz(packing.group);
    const TileBytes bytes = tile_bytes_of<S::F>(k, packing);
    // The same chunk of every so many tiles, and of every so many tokens.
    constexpr int TILE_CHUNKS = S::TILE_BYTES / 16, TILE_STEP = WARPGROUP / TILE_CHUNKS, SCALE_CHUNKS = S::SPANS * 2;
    constexpr int ROW_CHUNKS = S::K / 8, ROW_STEP = WARPGROUP / ROW_CHUNKS, ROW_COPIES = div_ceil(S::TOKENS, ROW_STEP);
    static_assert(WARPGROUP % TILE_CHUNKS == 0 && ROW_STEP % 8 == 0, "chunks are dealt out evenly");
    static_assert(S::K == 2 * K_BLOCK, "the last stage has both blocks or one");
    const int tile_chunk = tid % TILE_CHUNKS, first_tile = tid / TILE_CHUNKS;
    const int row_chunk = tid % ROW_CHUNKS, first_row = tid / ROW_CHUNKS;
    const int row_to = first_row * S::K * 2 + swizzle_row<S>(first_row, row_chunk);
    while (at.take<S::TOKENS>(pieces)) {
        const Piece piece = at.piece;
        uint32_t row_from[ROW_COPIES]; // in chunks of 8 inputs
#pragma unroll
        for (int i = 0; i < ROW_COPIES; i++)
            row_from[i] =
                (uint32_t)a.row_of(piece.first + min(first_row + i * ROW_STEP, piece.tokens - 1)) * (uint32_t)(k / 8) +
                row_chunk;
        const uint8_t* matrix = reinterpret_cast<const uint8_t*>(a.experts[piece.expert]) + a.at;
        auto tile = [&](int i) { return matrix + (size_t)min(piece.band * BAND_TILES + i, a.tiles - 1) * bytes.all; };
        uint32_t line_from[BAND_TILES / TILE_STEP];
#pragma unroll
        for (int i = 0; i < BAND_TILES / TILE_STEP; i++)
            line_from[i] = (uint32_t)(tile(first_tile + i * TILE_STEP) - tile(0));
        const uint8_t *lines = tile(0) + bytes.scales + tile_chunk * 16,
                      *scales = tile(tid / SCALE_CHUNKS) + tid % 2 * 16;
        const bf16* x = a.x;
        auto copy_stage = [&](int k0, auto whole) {
            constexpr bool WHOLE = decltype(whole)::value; // or the first half, and zeros
            ring.wait_empty();
            const typename S::Stage to = ring.stage();
#pragma unroll
            for (int i = 0; i < BAND_TILES / TILE_STEP; i++)
                copy_async_16(to.lines + tid * 16 + i * WARPGROUP * 16, lines + line_from[i],
                    WHOLE || tile_chunk < TILE_CHUNKS / 2);
            if (tid < BAND_TILES * SCALE_CHUNKS) {
                const int at = tid / 2 % S::SPANS * S::SPAN;
                copy_async_16(to.scales + tid * 16, scales + (k0 + at >> group_shift) * 32, WHOLE || at == 0);
            }
            auto copy_rows = [&](auto copies) {
#pragma unroll
                for (int i = 0; i < decltype(copies)::value; i++)
                    copy_async_16(to.rows + row_to + i * ROW_STEP * S::K * 2, x + (size_t)row_from[i] * 8,
                        WHOLE || row_chunk < ROW_CHUNKS / 2);
            };
            if (piece.tokens <= S::FEWER)
                copy_rows(Constant<div_ceil(S::FEWER, ROW_STEP)>{});
            else
                copy_rows(Constant<ROW_COPIES>{});
            ring.written();
            ring.advance();
            lines += S::TILE_BYTES, x += S::K;
        };
        int k0 = 0;
#pragma unroll 1
        for (; k0 + S::K <= k; k0 += S::K) copy_stage(k0, Constant<true>{});
        if (k0 < k) copy_stage(k0, Constant<false>{});
    }
}

// Adds a piece's products.
template <class S, int C>
__device__ __forceinline__ void multiply_stages(float (&acc)[2][C][4], Ring<S>& ring, int steps, bool f16) {
    WgmmaWeights<S> weights(f16);
    typename S::Stage stage;
    auto begin_stage = [&] {
        ring.wait_full();
        stage = ring.stage();
        weights.load(stage, 0);
    };
    int before = -1;
    auto before_is_read = [&] {
        if (before >= 0) ring.read(before);
    };
    begin_stage();
#pragma unroll 1
    for (int s = 0; s < steps; s++) {
        multiply_wgmma<S, 8 * C>(acc, weights, stage, before_is_read, [&] {
            before = ring.slot;
            ring.advance();
            if (s + 1 < steps) begin_stage();
        });
    }
    wgmma_wait<0>();
    before_is_read();
    wgmma_landed(acc[0]);
    wgmma_landed(acc[1]);
}

// The first COLUMNS columns of a piece; store(piece, sums) is told of them.
template <class S, int COLUMNS, class Store>
__device__ __forceinline__ void multiply_piece(Ring<S>& ring, const Piece& piece, int steps, bool f16, Store store) {
    float acc[2][COLUMNS / 8][4];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) acc[i][j][c] = 0.0f;
    multiply_stages<S>(acc, ring, steps, f16);
    store(Piece(piece), acc);
}

// A consumer's part.
template <class S, class Store>
__device__ __forceinline__ void multiply_pieces(
    Ring<S> ring, const Pieces& pieces, PiecePlace& at, int k, bool f16, Store store) {
    const int steps = div_ceil(k, S::K);
    while (at.take<S::TOKENS>(pieces)) {
        if (at.piece.tokens <= S::FEWER)
            multiply_piece<S, S::FEWER>(ring, at.piece, steps, f16, store);
        else
            multiply_piece<S, S::TOKENS>(ring, at.piece, steps, f16, store);
    }
}

// The roles of a block's warpgroups.
template <class S, class RowOf, class Store>
__device__ __forceinline__ void persistent(
    const int* offsets, int num_experts, const Operands<RowOf>& a, const Packing& packing, Store store) {
    DYNAMIC_SHARED_ALIGNED(unsigned char, shared, 1024);
    Pieces& pieces = *reinterpret_cast<Pieces*>(shared + S::PIECES_AT);
    PiecePlace& at = reinterpret_cast<PiecePlace*>(shared + S::PLACES_AT)[threadIdx.x / WARP];
    const Ring<S> ring(shared);
    if (threadIdx.x == 0) ring.begin();
    begin_kernel();
    for (int e = threadIdx.x; e <= num_experts; e += PERSISTENT_THREADS) pieces.offsets[e] = offsets[e];
    if (threadIdx.x % WARP == 0) at.next = blockIdx.x;
    if (threadIdx.x == 0) pieces.experts = num_experts, pieces.bands = div_ceil(a.tiles, BAND_TILES);
    __syncthreads();
    if (threadIdx.x < WARP) {
        int before = 0;
        for (int e = threadIdx.x; e - (int)threadIdx.x < num_experts; e += WARP) {
            int runs = e < num_experts ? div_ceil(pieces.offsets[e + 1] - pieces.offsets[e], S::TOKENS) : 0;
#pragma unroll
            for (int d = 1; d < WARP; d *= 2) {
                const int lower = __shfl_up_sync(ALL_LANES, runs, d);
                if (threadIdx.x >= d) runs += lower;
            }
            if (e < num_experts) pieces.runs[e] = before + runs;
            before += __shfl_sync(ALL_LANES, runs, WARP - 1);
        }
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS * WARPGROUP) {
        fewer_registers<S::COPYING_REGISTERS>();
        copy_pieces<S>(ring, pieces, at, a, packing);
    } else {
        more_registers<S::CONSUMER_REGISTERS>();
        multiply_pieces<S>(ring, pieces, at, a.k, packing.f16, store);
    }
}

// What a consuming warp has of a piece: two tiles and, of each, rows 2g (two numbers of a column, tokens 2t and 2t + 1)
// and 2g + 1 (the other two).
template <int COLUMNS> using WarpSums = float[2][COLUMNS][4];

// The first of its two tiles in the matrix.
__device__ __forceinline__ int own_tile(const Piece& piece) { return piece.band * BAND_TILES + threadIdx.x / WARP * 2; }

// Of rows `row` and `row` + 1 of expert `e`.
__device__ __forceinline__ float2 two_biases(const float* all, int e, int row, int rows) {
    return all ? *reinterpret_cast<const float2*>(all + (size_t)e * rows + row) : make_float2(0.0f, 0.0f);
}

// h of a piece's tokens, whose first row it is.
template <int COLUMNS>
__device__ __forceinline__ void store_gate_up(
    const Piece& piece, const WarpSums<COLUMNS>& sums, const Epilogue& epilogue, bf16* h, int intermediate) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    // KINDS of tiles take turns: gate and up, or all are of up. of(row) is the activation of a row and the next one.
    // Its form is asked here and not for each sum: registers cannot be counted through, so all of it is there COLUMNS
    // times.
    auto store = [&](auto kinds, auto of) {
        constexpr int KINDS = decltype(kinds)::value;
#pragma unroll
        for (int i = 0; i < 2; i += KINDS) {
            const int row = (own_tile(piece) + i) / KINDS * TILE_ROWS + 2 * g;
            if (row >= intermediate) continue;
            const auto activation = of(row);
            bf16* to = h + (size_t)(2 * t) * intermediate + row;
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                const float (&gate)[4] = sums[i][j], (&up)[4] = sums[i + KINDS - 1][j];
#pragma unroll
                for (int c = 0; c < 2; c++)
                    if (8 * j + 2 * t + c < piece.tokens)
                        *reinterpret_cast<uint32_t*>(to + c * intermediate) =
                            pack_bf16(activation(0, gate[c], up[c]), activation(1, gate[c + 2], up[c + 2]));
                to += 8 * intermediate;
            }
        }
    };
    const Activation& form = epilogue.activation;
    if (form.form == RELU_SQUARED)
        store(Constant<1>{}, [](int) { return [](int, float, float up) { return relu_squared(up); }; });
    else if (form.form == PLAIN && !epilogue.gate)
        store(Constant<2>{}, [](int) { return [](int, float gate, float up) { return silu(gate) * up; }; });
    else
        store(Constant<2>{}, [&](int row) {
            const float2 of_gate = two_biases(epilogue.gate, piece.expert, row, intermediate),
                         of_up = two_biases(epilogue.up, piece.expert, row, intermediate);
            return [=, &form](int second, float gate, float up) {
                return gated(form, gate + (second ? of_gate.y : of_gate.x), up + (second ? of_up.y : of_up.x));
            };
        });
}

// y of a piece's pairs.
template <int COLUMNS>
__device__ __forceinline__ void store_down(const Piece& piece, const WarpSums<COLUMNS>& sums, const Epilogue& epilogue,
    const int* pair_slot, bf16* y, int hidden) {
    const int lane = threadIdx.x % WARP, t = lane % 4, row_at = own_tile(piece) * TILE_ROWS + lane / 4 * 2;
    // Read at once, and dealt out from lane to lane.
    constexpr int READS = div_ceil(8 * COLUMNS, WARP);
    int pairs[READS];
#pragma unroll
    for (int i = 0; i < READS; i++)
        pairs[i] = i * WARP + lane < piece.tokens ? pair_slot[piece.first + i * WARP + lane] : 0;
    float2 biases[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = row_at + i * TILE_ROWS;
        biases[i] = two_biases(row < hidden ? epilogue.down : nullptr, piece.expert, row, hidden);
    }
#pragma unroll
    for (int j = 0; j < COLUMNS; j++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int pair = __shfl_sync(ALL_LANES, pairs[j * 8 / WARP], j * 8 % WARP + 2 * t + c);
            if (8 * j + 2 * t + c >= piece.tokens) continue;
            bf16* to = y + (size_t)pair * hidden + row_at;
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (row_at + i * TILE_ROWS < hidden)
                    *reinterpret_cast<uint32_t*>(to + i * TILE_ROWS) =
                        pack_bf16(sums[i][j][c] + biases[i].x, sums[i][j][c + 2] + biases[i].y);
        }
}

template <class S>
__device__ __forceinline__ void gate_up(const int* offsets, const int* pair_slot, const uint64_t* experts,
    const bf16* x, bf16* h, int hidden, int intermediate, int top_k, int num_experts, const Packing& packing,
    const Epilogue& epilogue) {
    const int kinds = epilogue.activation.form == RELU_SQUARED ? 1 : 2;
    auto row_of = [&](int i) { return pair_slot[i] / top_k; };
    const Operands<decltype(row_of)> operands{experts, 0, kinds * div_ceil(intermediate, TILE_ROWS), hidden, x, row_of};
    persistent<S>(offsets, num_experts, operands, packing, [&](const Piece& piece, const auto& sums) {
        store_gate_up(piece, sums, epilogue, h + (size_t)piece.first * intermediate, intermediate);
    });
}

template <class S>
__device__ __forceinline__ void down(const int* offsets, const int* pair_slot, const uint64_t* experts, const bf16* h,
    bf16* y, int hidden, int intermediate, int down_at, int num_experts, const Packing& packing,
    const Epilogue& epilogue) {
    auto row_of = [](int i) { return i; };
    const Operands<decltype(row_of)> operands{experts, down_at, div_ceil(hidden, TILE_ROWS), intermediate, h, row_of};
    persistent<S>(offsets, num_experts, operands, packing,
        [&](const Piece& piece, const auto& sums) { store_down(piece, sums, epilogue, pair_slot, y, hidden); });
}
#endif

#define PERSISTENT_ARGUMENTS                                                                                           \
    const int *offsets, const int *pair_slot, const uint64_t *experts, const bf16 *from, bf16 *to, int hidden,         \
        int intermediate, int down_at, int top_k, int num_experts, const __grid_constant__ Packing packing,            \
        const __grid_constant__ Epilogue epilogue
#define PERSISTENT(format, F, SPAN, TOKENS, STAGES, SHARED)                                                            \
    KERNEL_TILE(experts_gate_up_wgmma_##format##_t##TOKENS, TOKENS)                                                    \
    KERNEL_BLOCKS(experts_gate_up_wgmma_##format##_t##TOKENS, PERSISTENT_THREADS, 1, SHARED, PERSISTENT_ARGUMENTS)     \
    WITH_WGMMA(SHARED, (PersistentShape<F, SPAN, TOKENS, STAGES>::SHARED_BYTES),                                       \
        (gate_up<PersistentShape<F, SPAN, TOKENS, STAGES>>(                                                            \
            offsets, pair_slot, experts, from, to, hidden, intermediate, top_k, num_experts, packing, epilogue)))      \
    KERNEL_TILE(experts_down_wgmma_##format##_t##TOKENS, TOKENS)                                                       \
    KERNEL_BLOCKS(experts_down_wgmma_##format##_t##TOKENS, PERSISTENT_THREADS, 1, SHARED, PERSISTENT_ARGUMENTS)        \
    WITH_WGMMA(SHARED, (PersistentShape<F, SPAN, TOKENS, STAGES>::SHARED_BYTES),                                       \
        (down<PersistentShape<F, SPAN, TOKENS, STAGES>>(                                                               \
            offsets, pair_slot, experts, from, to, hidden, intermediate, down_at, num_experts, packing, epilogue)))
PERSISTENT(int4_g64, INT4, 64, 96, 10, 219548)
PERSISTENT(int4_g64, INT4, 64, 176, 7, 226668)
PERSISTENT(int4_g32, INT4, 32, 96, 10, 219548)
PERSISTENT(int4_g32, INT4, 32, 176, 7, 226668)
PERSISTENT(mxfp4_g32, MXFP4, 32, 96, 10, 219548)
PERSISTENT(mxfp4_g32, MXFP4, 32, 176, 7, 226668)
PERSISTENT(int8_g64, INT8, 64, 96, 7, 212332)
PERSISTENT(int8_g64, INT8, 64, 176, 5, 204108)
PERSISTENT(int8_g32, INT8, 32, 96, 7, 212332)
PERSISTENT(int8_g32, INT8, 32, 176, 5, 204108)
