// The sum of a few numbers over several devices, within a kernel that has made this one's: all_reduce.cu, gemv.cu and
// experts_gemv.cu.
//
// Each rank writes its own number, with a stamp in the same word, to all others. A word that has the stamp has come, so
// there is nothing to wait for but the words themselves. Stamps count the sums of each number, and all ranks do the
// same sums in the same order. A number uses two words of an inbox in turn: who writes one of them again has seen, one
// sum before, that all others are done with it, because kernels of a stream end one after the other.
//
// Where `stop` is not 0, a rank has failed, and nobody waits any longer.
#pragma once
#include "common.cuh"

constexpr int MAX_RANKS = 8, FEW_NUMBERS = 1 << 17;

// What a rank knows of all. An inbox is the memory of a rank that the others write to.
struct RankSum {
    void* inbox[MAX_RANKS]; // as this device sees them; [2, ranks, FEW_NUMBERS] words at first
    uint32_t* stamps;       // [FEW_NUMBERS] at first
    const uint32_t* stop;
    int rank, ranks; // up to one rank: nothing is summed
};

// A look at `stop` crosses PCIe: every 64 spins, a sum of 64 MB took 6,300 us instead of 300 (two H200).
constexpr int STOP_SPINS = 1 << 14;
__device__ __forceinline__ bool stopped(const uint32_t* stop, int& spins) {
    return ++spins % STOP_SPINS == 0 && load_acquire_system(stop) != 0;
}

// Calls use(rank, number) with all ranks' number i < FEW_NUMBERS, in the order of ranks. All threads of a block call
// it, those without a number with `has` false.
template <class Use>
__device__ __forceinline__ void numbers_of_ranks(const RankSum& s, int i, float own, bool has, Use use) {
    uint32_t stamp = 0;
    size_t half = 0;
    if (has) {
        stamp = s.stamps[i] + 1;
        half = (size_t)(stamp & 1) * MAX_RANKS * FEW_NUMBERS;
        const uint64_t word = (uint64_t)stamp << 32 | __float_as_uint(own);
        for (int r = 0; r < s.ranks; r++)
            if (r != s.rank)
                store_relaxed_system(
                    static_cast<uint64_t*>(s.inbox[r]) + half + (size_t)s.rank * FEW_NUMBERS + i, word);
    }
    __syncthreads(); // a block sends everything before it waits for anything
    if (!has) return;
    const uint64_t* inbox = static_cast<const uint64_t*>(s.inbox[s.rank]) + half + i;
    int spins = 0;
    for (int r = 0; r < s.ranks; r++) {
        float number = own;
        if (r != s.rank) {
            uint64_t come;
            do come = load_relaxed_system(inbox + (size_t)r * FEW_NUMBERS);
            while ((uint32_t)(come >> 32) != stamp && !stopped(s.stop, spins));
            number = __uint_as_float((uint32_t)come);
        }
        use(r, number);
    }
    s.stamps[i] = stamp;
}

// Their sum, in that order, so that all ranks have the same bits in every run.
__device__ __forceinline__ float sum_of_ranks(const RankSum& s, int i, float own, bool has) {
    if (s.ranks <= 1) return own;
    float sum = 0.0f;
    numbers_of_ranks(s, i, own, has, [&](int, float number) { sum += number; });
    return sum;
}
