// Routed experts of more than a few tokens on Hopper: the products gate_up and down of experts_gemm.cu, by blocks that
// stay. Only on compute capability 9.0 (in code for other cards these kernels are empty).
//
// A multiprocessor has one block: a warpgroup that copies, and CONSUMERS that multiply 8 tiles of 16 rows of weights
// each by up to TOKENS tokens of an expert. The copies are always some stages ahead, those of the next piece of work
// while the sums of the last one are stored, too: nothing waits for memory between two pieces. There is no list of
// pieces: each block finds its own, every gridDim.x-th of all, from the experts' offsets.
//
// The warps that multiply unpack the weights, too:
//
//   up to SUM_TOKENS    codes become operands of mma as they are, scales are applied to sums (packed_sums.cuh)
//   more                scaled, into registers, from which wgmma takes them (packed_dealt.cuh)
//
// Unpacking takes longer than the products of few tokens, for which registers suffice for more consumers, so that more
// is unpacked at once.
//
//   experts_{gate_up|down}_persistent_{int4_g64|int4_g32|int8_g64|int8_g32}_t{48|96|176}    grid (blocks)
//   experts_{gate_up|down}_persistent_{mxfp4_g32, rows but tq1_0}_t{16|32|48|96|176}, of groups of 16 not t32
//
// Blocks: the device's multiprocessors, less those of kernels beside them: a block that waits for one has its pieces
// after all others. Arguments are those of experts_gemm.cu, with experts_sort's offsets for its tiles; num_experts <=
// MAX_EXPERTS. Kernels of more than SUM_TOKENS take `from` dealt out (dealt_place); `deal`: h is written so. TOKENS are
// those of a piece, at most; the largest are as many as registers suffice for.
#pragma once
#include "epilogue.cuh"
#include "experts.cuh"
#include "packed_dealt.cuh"

constexpr int WARPGROUP = 128, SUM_TOKENS = 32;

#ifdef HAS_WGMMA
// A band of an expert's tiles, and the positions of pair_slot that meet it.
struct Piece {
    int expert, band, first, tokens;
};

// All pieces, in an order in which bands of the same tokens follow one another. An expert's tokens come in runs of up
// to TOKENS. Experts with many tokens are first in `order`; `runs`[i] is the number of runs of its experts up to i.
struct Pieces {
    int experts, bands, offsets[MAX_EXPERTS + 1], runs[MAX_EXPERTS];
    uint16_t order[MAX_EXPERTS];
};

// Where a warp is in its block's pieces: in shared memory, because a consumer has no registers left for it.
struct PiecePlace {
    int next;
    Piece piece;

    // The next one is in `piece`, if there is one.
    template <int TOKENS> __device__ __forceinline__ bool take(const Pieces& all) {
        const int lane = threadIdx.x % WARP, run = next / all.bands;
        int i = 0; // the experts whose last run is before that
        for (int first = 0; first < all.experts; first += WARP)
            i += __popc(__ballot_sync(ALL_LANES, first + lane < all.experts && all.runs[first + lane] <= run));
        if (i == all.experts) return false;
        const int e = all.order[i], begin = (run - (i ? all.runs[i - 1] : 0)) * TOKENS, first = all.offsets[e] + begin;
        const Piece found{e, next % all.bands, first, min(all.offsets[e + 1] - first, TOKENS)};
        // Backwards from the second piece on: who began with many tokens is the first to have one piece less.
        const int then = next + (next < gridDim.x ? 2 * (gridDim.x - next) - 1 : gridDim.x);
        __syncwarp();
        next = then, piece = found;
        __syncwarp();
        return true;
    }
};

template <Format F_, int SPAN_, int TOKENS_, int CONSUMERS_, int STAGES_> struct PersistentShape {
    static constexpr Format F = F_;
    static constexpr int CONSUMERS = CONSUMERS_, THREADS = (CONSUMERS + 1) * WARPGROUP, WARP_TILES = 2,
                         BAND_TILES = CONSUMERS * 4 * WARP_TILES;
    static constexpr int SPAN = SPAN_, TOKENS = TOKENS_, STAGES = STAGES_, K = 64;
    static constexpr bool SCALE_SUMS = TOKENS <= SUM_TOKENS, WGMMA = !SCALE_SUMS, DEALT = WGMMA, K_TYPE = is_k_type(F);
    // If the launch says so; a loop for each of both wants too many registers with the most columns.
    static constexpr bool F16_SCALES = !is_row(F) && Lines<F>::F16_SCALES, ONE_LOOP = TOKENS > 96;
    // Columns that suffice for some pieces, and steps to more that do.
    static constexpr int FEWEST = SCALE_SUMS ? 8
        : TOKENS > 96                        ? 96
                                             : 48,
                         COLUMNS_STEP = SCALE_SUMS ? 8
        : TOKENS % 48 == 0                         ? 48
                                                   : TOKENS - FEWEST;
    static_assert((TOKENS - FEWEST) % COLUMNS_STEP == 0, "the last step has all");
    static constexpr int MANY = SCALE_SUMS ? TOKENS / 2 : FEWEST; // pieces of more tokens take longer
    static constexpr int REGISTERS = 65536 / THREADS / 8 * 8,     // of each thread, in the beginning
        CONSUMER_REGISTERS = TOKENS > 96 ? 232
        : TOKENS == 16                   ? 104
        : CONSUMERS == 2                 ? 224
                                         : 112,
                         COPYING_REGISTERS = REGISTERS * (CONSUMERS + 1) - CONSUMER_REGISTERS * CONSUMERS;
    using Tile = TileStage<F, SPAN>;
    static constexpr int BLOCK_LINES = lines_of_block<F>(), CODE_BIAS = code_bias<F>(),
                         TILE_BYTES = Tile::LINES * LINE_BYTES, SPANS = Tile::SPANS,
                         SCALE_BYTES = Tile::HEAD + Tile::RECORD_BYTES;
    // What a warp has for the scales of a row that it unpacks.
    static constexpr int unpacked_scales() {
        if constexpr (is_row_value<F>)
            return SPANS * WARP * (1 + (RowOf<F>::ROW.offsets || !SCALE_SUMS)) * 4;
        else
            return 0;
    }
    static constexpr int WARP_SCALES = unpacked_scales();
    // Shared memory: the stages, each with rows, which wgmma wants aligned to 1024 bytes, and lines and scales; then
    // the barriers, the pieces, the warps' places, their scales, and the table.
    static constexpr int LINES_AT = TOKENS * K * 2, SCALES_AT = LINES_AT + BAND_TILES * TILE_BYTES,
                         STAGE_BYTES = div_ceil(SCALES_AT + BAND_TILES * SCALE_BYTES, 1024) * 1024;
    static constexpr int BARRIERS_AT = STAGES * STAGE_BYTES, PIECES_AT = BARRIERS_AT + STAGES * 16,
                         PLACES_AT = PIECES_AT + (int)sizeof(Pieces),
                         WARP_SCALES_AT = div_ceil(PLACES_AT + THREADS / WARP * (int)sizeof(PiecePlace), 16) * 16,
                         TABLE_AT = WARP_SCALES_AT + CONSUMERS * 4 * WARP_SCALES, MOST_BYTES = 227 << 10;
    using Table = TableOf<F, line_within<F>(MOST_BYTES - TABLE_AT)>;
    static constexpr int SHARED_BYTES = TABLE_AT + Table::BYTES;
    static_assert(SHARED_BYTES <= MOST_BYTES, "what a block may have");

    struct Stage {
        unsigned char *rows, *lines, *scales;
    };
    static __device__ __forceinline__ Stage stage(unsigned char* shared, int slot) {
        unsigned char* at = shared + slot * STAGE_BYTES;
        return {at, at + LINES_AT, at + SCALES_AT};
    }
};

// Calls act(Constant<C>) with the fewest columns C that hold so many tokens.
template <class S, int C, class Act> __device__ __forceinline__ void with_columns(int tokens, Act act) {
    if constexpr (C == S::TOKENS)
        act(Constant<C>{});
    else if (tokens <= C)
        act(Constant<C>{});
    else
        with_columns<S, C + S::COLUMNS_STEP>(tokens, act);
}

// The stages, one after the other, as a thread sees them: where it is, and the parity of its barriers' phase.
template <class S> struct Ring {
    unsigned char* shared;
    int slot = 0, parity = 0, lane = threadIdx.x % WARP;

    __device__ __forceinline__ explicit Ring(unsigned char* shared) : shared(shared) { keep(lane); }
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
            mbarrier_init(empty(s), S::CONSUMERS * WARPGROUP / WARP);
        }
        mbarrier_init_done();
    }
    // By the threads that copy: until the stage may be written; what they copy is all of it.
    __device__ __forceinline__ void wait_empty() const { mbarrier_wait(empty(slot), parity ^ 1); }
    __device__ __forceinline__ void written() const { copy_async_arrive(full(slot)); }
    // By the warps that multiply: until all of the stage is there; they need it no more.
    __device__ __forceinline__ void wait_full() const {
        mbarrier_wait(full(slot), parity);
        if (S::WGMMA) shared_to_async();
    }
    __device__ __forceinline__ void read(int slot) const {
        if (lane == 0) mbarrier_arrive(empty(slot));
    }
};

// One of an expert's matrices, and what it is multiplied by: input_row(i) is the row of x for position i of pair_slot.
template <class InputRow> struct Operands {
    const uint64_t* experts;
    int at, tiles, k; // where the matrix begins in an expert
    const Packing& packing;
    const bf16* x;
    InputRow input_row;

    __device__ __forceinline__ const uint8_t* matrix(const Piece& piece) const {
        return reinterpret_cast<const uint8_t*>(experts[piece.expert]) + at;
    }
};

// What a copying thread brings of a piece's tokens: the same chunk of every so many. Past the last token it is copied
// again, so that nothing is asked of each copy; those products go nowhere.
template <class S> struct TokenCopies {
    static constexpr int CHUNKS = S::K / 8, STEP = WARPGROUP / CHUNKS, COPIES = div_ceil(S::TOKENS, STEP);
    static_assert(STEP % 8 == 0, "chunks of one swizzle to a thread");
    uint32_t from[COPIES]; // in chunks of 8 inputs
    const bf16* x;
    int chunk, to, tokens;

    template <class InputRow>
    __device__ __forceinline__ TokenCopies(const Operands<InputRow>& a, const Piece& piece)
        : x(a.x), chunk(threadIdx.x % CHUNKS), tokens(piece.tokens) {
        const int first = threadIdx.x % WARPGROUP / CHUNKS;
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            from[i] =
                (uint32_t)a.input_row(piece.first + min(first + i * STEP, piece.tokens - 1)) * (uint32_t)(a.k / 8) +
                chunk;
        to = first * S::K * 2 + swizzle_row<S>(first, chunk);
    }

    // Stage after stage, a `whole` one, or its first half, and zeros.
    __device__ __forceinline__ void copy(const typename S::Stage& stage, bool whole) {
        with_columns<S, S::FEWEST>(tokens, [&](auto columns) {
#pragma unroll
            for (int i = 0; i < div_ceil(decltype(columns)::value, STEP); i++)
                copy_async_16(
                    stage.rows + to + i * STEP * S::K * 2, x + (size_t)from[i] * 8, whole || chunk < CHUNKS / 2);
        });
        x += S::K;
    }
};

// What a copying thread brings of the weights as they lie: every so many chunks. Past the last tile it is copied again.
template <class S> struct LineCopies {
    using Tile = typename S::Tile;
    static constexpr int CHUNKS = S::TILE_BYTES / 16, ALL = S::BAND_TILES * CHUNKS, COPIES = div_ceil(ALL, WARPGROUP),
                         HEAD_CHUNKS = Tile::HEAD / 16, RECORD_CHUNKS = Tile::RECORD_BYTES / 16,
                         SCALE_CHUNKS = HEAD_CHUNKS + RECORD_CHUNKS, SCALES = S::BAND_TILES * SCALE_CHUNKS,
                         SCALE_COPIES = div_ceil(SCALES, WARPGROUP);
    static constexpr bool HALVES = Tile::HALVES;
    uint32_t from[COPIES];
    const uint8_t *lines, *scales[SCALE_COPIES];
    int group_shift;

    template <class InputRow>
    __device__ __forceinline__ LineCopies(const Operands<InputRow>& a, const Piece& piece)
        : group_shift(31 - __clz(a.packing.group)) {
        const int tid = threadIdx.x % WARPGROUP;
        const TileBytes bytes = tile_bytes_of<S::F>(a.k, a.packing);
        const uint8_t* matrix = a.matrix(piece);
        auto tile = [&](int i) {
            return matrix + (size_t)min(piece.band * S::BAND_TILES + i, a.tiles - 1) * bytes.all;
        };
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int at = tid + i * WARPGROUP;
            from[i] = (uint32_t)(tile(at / CHUNKS) - tile(0)) + at % CHUNKS * 16;
        }
        lines = tile(0) + bytes.scales;
#pragma unroll
        for (int i = 0; i < SCALE_COPIES; i++) scales[i] = tile((tid + i * WARPGROUP) / SCALE_CHUNKS);
    }

    // Where chunk `chunk` of a tile's scales is, from the tile on.
    __device__ __forceinline__ int scales_at(int k0, int chunk) const {
        const int record = chunk - HEAD_CHUNKS;
        if constexpr (is_row_value<S::F>) {
            using R = RowOf<S::F>;
            const int super = R::HAS_SUPER_BLOCKS ? k0 / R::SUPER_BLOCK * R::SUPER_BYTES : 0;
            if (record < 0) return super + chunk * 16;
            if (!Tile::BY_GROUP) {
                const int within = R::HAS_SUPER_BLOCKS ? k0 % R::SUPER_BLOCK : k0;
                return super + R::HEAD + within / S::SPAN * R::RECORD / 16 * 16 + record * 16;
            }
        }
        constexpr int OF_SPAN = Tile::RECORD / 16 ? Tile::RECORD / 16 : 1;
        return (k0 + record / OF_SPAN * S::SPAN >> group_shift) * Tile::RECORD + record % OF_SPAN * 16;
    }

    // Where a stage's lines are from a tile's first one on, and those of its super-block from where they would follow.
    static __device__ __forceinline__ int2 lines_at(int k0) {
        if constexpr (is_row_value<S::F>) {
            using R = RowOf<S::F>;
            const int block = k0 / K_BLOCK;
            return make_int2((block * R::LINES + block / R::BLOCKS * R::MORE_LINES) * LINE_BYTES,
                (line_behind<S::F>(block % R::BLOCKS) - 2 * R::LINES) * LINE_BYTES);
        }
        return make_int2(k0 / K_BLOCK * S::BLOCK_LINES * LINE_BYTES, 0);
    }

    __device__ __forceinline__ void copy(const typename S::Stage& stage, int k0, bool whole) {
        const int tid = threadIdx.x % WARPGROUP;
        const int2 lines_from = lines_at(k0);
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int at = tid + i * WARPGROUP, chunk = at % CHUNKS;
            if (at >= ALL) break;
            const bool of_super_block = Tile::LINES > 2 * S::BLOCK_LINES && chunk >= 2 * S::BLOCK_LINES * 4;
            copy_async_16(stage.lines + swizzle_line<S>(tid * 16) + i * WARPGROUP * 16,
                lines + lines_from.x + (of_super_block ? lines_from.y : 0) + from[i],
                !HALVES || whole || chunk < CHUNKS / 2);
        }
#pragma unroll
        for (int i = 0; i < SCALE_COPIES; i++) {
            const int at = tid + i * WARPGROUP, chunk = at % SCALE_CHUNKS;
            if (at >= SCALES) break;
            copy_async_16(stage.scales + at * 16, scales[i] + scales_at(k0, chunk),
                !HALVES || whole || chunk < HEAD_CHUNKS + RECORD_CHUNKS / 2);
        }
    }
};

// The copying warpgroup's part.
template <class S, class InputRow>
__device__ __forceinline__ void copy_pieces(
    Ring<S> ring, const Pieces& pieces, PiecePlace& at, const Operands<InputRow>& a) {
    static_assert(S::K == 2 * K_BLOCK, "the last stage has both blocks or one");
    while (at.take<S::TOKENS>(pieces)) {
        const Piece piece = at.piece;
        TokenCopies<S> tokens(a, piece);
        LineCopies<S> weights(a, piece);
        auto copy_stage = [&](int k0, bool whole) {
            ring.wait_empty();
            const typename S::Stage to = ring.stage();
            tokens.copy(to, whole);
            weights.copy(to, k0, whole);
            ring.written();
            ring.advance();
        };
        int k0 = 0;
#pragma unroll 1
        for (; k0 + S::K <= a.k; k0 += S::K) copy_stage(k0, true);
        if (k0 < a.k) copy_stage(k0, false);
    }
}

// What a consuming warp has of a piece: two tiles and, of each, rows 2g (two numbers of a column, tokens 2t and 2t + 1)
// and 2g + 1 (the other two). There may be columns that are not asked for.
template <int C> using WarpSums = float[2][C][4];

// The first of its two tiles in the matrix.
template <class S> __device__ __forceinline__ int own_tile(const Piece& piece) {
    return piece.band * S::BAND_TILES + threadIdx.x / WARP * 2;
}

// Adds a piece's products.
template <class S, int C>
__device__ __forceinline__ void multiply_stages_scaling_sums(
    WarpSums<C>& acc, Ring<S>& ring, int steps, const OfScales& of) {
    const auto places = places_of<S>(threadIdx.x / WARP * S::WARP_TILES, typename S::Table(ring.shared + S::TABLE_AT));
    auto scales = scales_of<S>(of);
#pragma unroll 1
    for (int s = 0; s < steps; s++) {
        ring.wait_full();
        multiply_scaling_sums<S>(acc, ring.stage(), s, places, scales);
        __syncwarp();
        ring.read(ring.slot);
        ring.advance();
    }
}
template <bool TWO, class S, int C>
__device__ __forceinline__ void multiply_stages(WarpSums<C>& acc, Ring<S>& ring, int steps, const OfScales& of) {
    DealtWeights<S, TWO> weights(of, typename S::Table(ring.shared + S::TABLE_AT));
    typename S::Stage stage;
    auto begin_stage = [&](int s) {
        ring.wait_full();
        stage = ring.stage();
        weights.load(stage, s, 0);
    };
    int before = -1; // the stage that the products under way read
    auto before_is_read = [&] {
        if (before >= 0) ring.read(before);
    };
    begin_stage(0);
#pragma unroll 1
    for (int s = 0; s < steps; s++) {
        multiply_dealt(acc, weights, stage, s, before_is_read, [&] {
            before = ring.slot;
            ring.advance();
            if (s + 1 < steps) begin_stage(s + 1);
        });
    }
    wgmma_wait<0>();
    before_is_read();
    wgmma_landed(acc[0]);
    wgmma_landed(acc[1]);
}

// A consumer's part. store(piece, sums, columns) is told of the first columns of a piece.
template <class S, class InputRow, class Store>
__device__ __forceinline__ void multiply_pieces(
    Ring<S> ring, const Pieces& pieces, PiecePlace& at, const Operands<InputRow>& a, Store store) {
    auto clear = [](auto& acc) {
#pragma unroll
        for (auto& tile : acc)
#pragma unroll
            for (auto& column : tile)
#pragma unroll
                for (float& sum : column) sum = 0.0f;
    };
    const OfScales of{ring.shared + S::WARP_SCALES_AT + threadIdx.x / WARP * S::WARP_SCALES,
        (is_row(S::F) || S::F16_SCALES) && a.packing.f16};
    while (at.take<S::TOKENS>(pieces))
        with_columns<S, S::FEWEST>(at.piece.tokens, [&](auto columns) {
            WarpSums<decltype(columns)::value / 8> acc;
            clear(acc);
            const int steps = div_ceil(a.k, S::K);
            if constexpr (S::SCALE_SUMS)
                multiply_stages_scaling_sums<S>(acc, ring, steps, of);
            else if (S::F16_SCALES && (S::ONE_LOOP || of.f16))
                multiply_stages<S::F16_SCALES>(acc, ring, steps, of);
            else
                multiply_stages<false>(acc, ring, steps, of);
            store(Piece(at.piece), acc, columns);
        });
}

// The roles of a block's warpgroups.
template <class S, class InputRow, class Store>
__device__ __forceinline__ void persistent(
    const int* offsets, int num_experts, const Operands<InputRow>& a, Store store) {
    DYNAMIC_SHARED_ALIGNED(unsigned char, all_shared, 1024);
    unsigned char* const shared = keep_shared(all_shared);
    Pieces& pieces = *reinterpret_cast<Pieces*>(shared + S::PIECES_AT);
    PiecePlace& at = reinterpret_cast<PiecePlace*>(shared + S::PLACES_AT)[threadIdx.x / WARP];
    const Ring<S> ring(shared);
    if (threadIdx.x == 0) ring.begin();
    S::Table::fill(shared + S::TABLE_AT, a.packing.grid);
    begin_kernel();
    for (int e = threadIdx.x; e <= num_experts; e += S::THREADS) pieces.offsets[e] = offsets[e];
    if (threadIdx.x % WARP == 0) at.next = blockIdx.x;
    if (threadIdx.x == 0) pieces.experts = num_experts, pieces.bands = div_ceil(a.tiles, S::BAND_TILES);
    __syncthreads();
    if (threadIdx.x < WARP) {
        const int lane = threadIdx.x;
        int before = 0, ordered = 0;
        for (int many = S::MANY < S::TOKENS; many >= 0; many--)
            for (int e = lane; e - lane < num_experts; e += WARP) {
                const int tokens = e < num_experts ? pieces.offsets[e + 1] - pieces.offsets[e] : 0;
                const bool here = e < num_experts && (S::MANY == S::TOKENS || (tokens > S::MANY) == many);
                const uint32_t all_here = __ballot_sync(ALL_LANES, here);
                if (!all_here) continue;
                int runs = here ? div_ceil(tokens, S::TOKENS) : 0;
#pragma unroll
                for (int d = 1; d < WARP; d *= 2) {
                    const int lower = __shfl_up_sync(ALL_LANES, runs, d);
                    if (lane >= d) runs += lower;
                }
                const int i = ordered + __popc(all_here & ((1u << lane) - 1));
                if (here) pieces.order[i] = (uint16_t)e, pieces.runs[i] = before + runs;
                ordered += __popc(all_here), before += __shfl_sync(ALL_LANES, runs, WARP - 1);
            }
    }
    __syncthreads();
    if (threadIdx.x >= S::CONSUMERS * WARPGROUP) {
        fewer_registers<S::COPYING_REGISTERS>();
        copy_pieces(ring, pieces, at, a);
    } else {
        more_registers<S::CONSUMER_REGISTERS>();
        multiply_pieces(ring, pieces, at, a, store);
    }
}

// Of rows `row` and `row` + 1 of expert `e`.
__device__ __forceinline__ float2 two_biases(const float* all, int e, int row, int rows) {
    return all ? *reinterpret_cast<const float2*>(all + (size_t)e * rows + row) : make_float2(0.0f, 0.0f);
}

// h of a piece's tokens, whose first row it is.
template <class S, int COLUMNS, int C>
__device__ __forceinline__ void store_gate_up(
    const Piece& piece, const WarpSums<C>& sums, const Epilogue& epilogue, bf16* h, int intermediate, bool deal) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    // KINDS of tiles take turns: gate and up, or all are of up. of(row) is the activation of a row and the next one.
    // Its form is asked here and not for each sum: registers cannot be counted through, so all of it is there COLUMNS
    // times.
    auto store = [&](auto kinds, auto of) {
        constexpr int KINDS = decltype(kinds)::value;
#pragma unroll
        for (int i = 0; i < 2; i += KINDS) {
            const int row = (own_tile<S>(piece) + i) / KINDS * TILE_ROWS + 2 * g;
            if (row >= intermediate) continue;
            const auto activation = of(row);
            bf16* to = h + (size_t)(2 * t) * intermediate + (deal ? dealt_place(row) : row);
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
template <class S, int COLUMNS, int C>
__device__ __forceinline__ void store_down(
    const Piece& piece, const WarpSums<C>& sums, const Epilogue& epilogue, const int* pair_slot, bf16* y, int hidden) {
    const int lane = threadIdx.x % WARP, t = lane % 4, row_at = own_tile<S>(piece) * TILE_ROWS + lane / 4 * 2;
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
    const bf16* x, bf16* h, int hidden, int intermediate, int top_k, int num_experts, bool deal, const Packing& packing,
    const Epilogue& epilogue) {
    const int kinds = epilogue.activation.form == RELU_SQUARED ? 1 : 2;
    auto input_row = [&](int i) { return pair_slot[i] / top_k; };
    const Operands<decltype(input_row)> operands{
        experts, 0, kinds * div_ceil(intermediate, TILE_ROWS), hidden, packing, x, input_row};
    persistent<S>(offsets, num_experts, operands, [&](const Piece& piece, const auto& sums, auto columns) {
        store_gate_up<S, decltype(columns)::value / 8>(
            piece, sums, epilogue, h + (size_t)piece.first * intermediate, intermediate, deal);
    });
}

template <class S>
__device__ __forceinline__ void down(const int* offsets, const int* pair_slot, const uint64_t* experts, const bf16* h,
    bf16* y, int hidden, int intermediate, int down_at, int num_experts, const Packing& packing,
    const Epilogue& epilogue) {
    auto input_row = [](int i) { return i; };
    const Operands<decltype(input_row)> operands{
        experts, down_at, div_ceil(hidden, TILE_ROWS), intermediate, packing, h, input_row};
    persistent<S>(offsets, num_experts, operands, [&](const Piece& piece, const auto& sums, auto columns) {
        store_down<S, decltype(columns)::value / 8>(piece, sums, epilogue, pair_slot, y, hidden);
    });
}
#endif

#define PERSISTENT_ARGUMENTS                                                                                           \
    const int *offsets, const int *pair_slot, const uint64_t *experts, const bf16 *from, bf16 *to, int hidden,         \
        int intermediate, int down_at, int top_k, int num_experts, int deal, const __grid_constant__ Packing packing,  \
        const __grid_constant__ Epilogue epilogue
#define PERSISTENT(format, F, SPAN, TOKENS, CONSUMERS, STAGES, SHARED)                                                 \
    KERNEL_TILE(experts_gate_up_persistent_##format##_t##TOKENS, TOKENS)                                               \
    KERNEL_BLOCKS(                                                                                                     \
        experts_gate_up_persistent_##format##_t##TOKENS, (CONSUMERS + 1) * WARPGROUP, 1, SHARED, PERSISTENT_ARGUMENTS) \
    WITH_WGMMA(SHARED, (PersistentShape<F, SPAN, TOKENS, CONSUMERS, STAGES>::SHARED_BYTES),                            \
        (gate_up<PersistentShape<F, SPAN, TOKENS, CONSUMERS, STAGES>>(offsets, pair_slot, experts, from, to, hidden,   \
            intermediate, top_k, num_experts, deal, packing, epilogue)))                                               \
    KERNEL_TILE(experts_down_persistent_##format##_t##TOKENS, TOKENS)                                                  \
    KERNEL_BLOCKS(                                                                                                     \
        experts_down_persistent_##format##_t##TOKENS, (CONSUMERS + 1) * WARPGROUP, 1, SHARED, PERSISTENT_ARGUMENTS)    \
    WITH_WGMMA(SHARED, (PersistentShape<F, SPAN, TOKENS, CONSUMERS, STAGES>::SHARED_BYTES),                            \
        (down<PersistentShape<F, SPAN, TOKENS, CONSUMERS, STAGES>>(                                                    \
            offsets, pair_slot, experts, from, to, hidden, intermediate, down_at, num_experts, packing, epilogue)))
