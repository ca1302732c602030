// CUDA C++ for g++: what the kernels use of the language, and the functions of ../device.cuh, on the CPU.
//
// A thread is a fiber. A fiber runs until it meets others (a barrier, a shuffle, a tensor core instruction); one
// operating system thread runs all fibers of a block, block after block.
//
// Mistakes show:
//   - Asynchronous copies happen when the kernel waits for them, and no sooner.
//   - What is stored to another device is seen there when the thread that stored it passes a fence, and no sooner.
//   - Device memory and dynamic shared memory begin as NaN.
//   - A buffer ends at a page that no kernel may touch. So does dynamic shared memory, where the launch said.
//   - A kernel that touches such a page ends there, and its stream reports error 700, an illegal address.
#pragma once
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __constant__ static const
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {

struct Copy {
    void* to;
    const void* from; // null: zeros
    int group;
};

struct PeerStore {
    void* to;
    uint4 value;
};

void waited();

// Where a thread stands.
struct Place {
    dim3 thread, block, block_dim, grid_dim;
    unsigned lane, warp;
};

// A fiber's stack begins at a multiple of STACK bytes, with what is known of the fiber. That lies in other cache lines
// than the neighbours': a cache has room for few lines from equal places of pages.
constexpr size_t STACK = 256 << 10, FIBER = 192;
inline unsigned char* fiber_of(uintptr_t stack) {
    return (unsigned char*)(stack / STACK * STACK + stack / STACK % 64 * FIBER);
}
inline const Place& place() {
    uintptr_t stack;
    asm("mov %%rsp, %0" : "=r"(stack)); // not volatile: it stays the same for a thread
    return *(const Place*)fiber_of(stack);
}

// All lanes of `mask` bring a value; the last to come calls `combine` on all 32 of them; each takes back what then is
// its own. Returns the array of all lanes' bytes, good until the next meeting.
constexpr int MAIL = 64;
struct alignas(16) Mail {
    unsigned char bytes[MAIL];
};
typedef void Combine(Mail* all);
struct Fiber;
// Lanes of a warp that meet under one mask.
struct Meeting {
    unsigned mask, arrived, num_waiting;
    int phase;
    Fiber* waiting[32];
    Mail mail[2][32];
};
Meeting& meeting(unsigned mask); // of the calling thread's warp
void arrive(Meeting& meeting, Combine* combine);
template <class T> inline Mail* meet(unsigned mask, const T& mine, Combine* combine = nullptr) {
    static_assert(sizeof(T) <= MAIL);
    Meeting& m = meeting(mask);
    Mail* all = m.mail[m.phase];
    memcpy(all[place().lane].bytes, &mine, sizeof(T));
    arrive(m, combine);
    return all;
}

void block_barrier(int id, unsigned threads); // threads == 0: all that live
void add_copy(const Copy& copy);
void commit_copies();
void wait_copies(int under_way);
void add_peer_store(void* to, const uint4& value);
void land_peer_stores();
void* dynamic_shared(size_t alignment);

struct Kernel {
    const char* name;
    unsigned threads;
    void (*invoke)(void** parameters);
    std::vector<size_t> parameter_bytes;
};
void add_kernel(const Kernel& kernel);

template <auto F> struct Invoker;
template <class... A, void (*F)(A...)> struct Invoker<F> {
    static Kernel describe(const char* name, unsigned threads) { return {name, threads, invoke, {sizeof(A)...}}; }
    struct Arguments {
        void** next;
        template <class T> T take() {
            T argument; // copied: the driver's bytes may be less aligned
            memcpy((void*)&argument, *next++, sizeof(T));
            return argument;
        }
    };
    struct Call {
        Call(A... args) { F(args...); }
    };
    static void invoke(void** parameters) {
        [[maybe_unused]] Arguments arguments{parameters};
        [[maybe_unused]] Call call{arguments.template take<A>()...}; // braces: from left to right
    }
};

template <class T> inline T shuffle(unsigned mask, T x, unsigned from) {
    Mail* all = meet(mask, x);
    T y;
    memcpy(&y, all[from % 32].bytes, sizeof(T));
    return y;
}

} // namespace emulator

#define REGISTER_KERNEL(name, threads)                                                                                 \
    static const int registered_##name = (emulator::add_kernel(emulator::Invoker<&name>::describe(#name, threads)), 0);
#define DYNAMIC_SHARED(type, name) DYNAMIC_SHARED_ALIGNED(type, name, 128)
#define DYNAMIC_SHARED_ALIGNED(type, name, alignment)                                                                  \
    type* name = reinterpret_cast<type*>(emulator::dynamic_shared(alignment))

#define threadIdx (emulator::place().thread)
#define blockIdx (emulator::place().block)
#define blockDim (emulator::place().block_dim)
#define gridDim (emulator::place().grid_dim)

inline void __syncthreads() { emulator::block_barrier(0, 0); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulator::arrive(emulator::meeting(mask), nullptr); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() { emulator::land_peer_stores(); }
template <class T> inline T __shfl_sync(unsigned mask, T x, int from, int width = 32) {
    unsigned lane = emulator::place().lane;
    return emulator::shuffle(mask, x, (lane / width) * width + (unsigned)from % width);
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T x, int with, int = 32) {
    return emulator::shuffle(mask, x, emulator::place().lane ^ with);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T x, unsigned by, int width = 32) {
    unsigned lane = emulator::place().lane;
    return emulator::shuffle(mask, x, lane % width + by < (unsigned)width ? lane + by : lane);
}
template <class T> inline T __shfl_up_sync(unsigned mask, T x, unsigned by, int width = 32) {
    unsigned lane = emulator::place().lane;
    return emulator::shuffle(mask, x, lane % width >= by ? lane - by : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    predicate = predicate != 0;
    emulator::Mail* all = emulator::meet(mask, predicate);
    unsigned votes = 0;
    for (int i = 0; i < 32; i++) {
        int vote;
        memcpy(&vote, all[i].bytes, sizeof vote);
        if (mask >> i & 1 && vote) votes |= 1u << i;
    }
    return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }

inline float __uint_as_float(uint32_t x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
inline uint32_t __float_as_uint(float x) {
    uint32_t y;
    memcpy(&y, &x, 4);
    return y;
}
inline int __float_as_int(float x) { return (int)__float_as_uint(x); }
inline float __int_as_float(int x) { return __uint_as_float((uint32_t)x); }
inline float __expf(float x) { return expf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __fdividef(float a, float b) { return a / b; }
// volatile: compilers make one rounding of a product and a sum.
inline float __fmul_rn(float a, float b) {
    volatile float product = a * b;
    return product;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    uint64_t both = (uint64_t)b << 32 | a;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) out |= (uint32_t)(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t by) {
    return (uint32_t)(((uint64_t)high << 32 | low) >> (by & 31));
}
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline void __stcs(T* p, T x) { *p = x; }
template <class T> inline T atomicAdd(T* p, T x) { return __sync_fetch_and_add(p, x); }
template <class T> inline T atomicMax(T* p, T x) {
    T old = *p;
    if (x > old) *p = x;
    return old;
}
template <class T> inline T atomicExch(T* p, T x) { return __sync_lock_test_and_set(p, x); }
template <class T> inline T atomicCAS(T* p, T old, T x) { return __sync_val_compare_and_swap(p, old, x); }
template <class A, class B> inline auto min(A a, B b) -> decltype(a + b) { return a < b ? a : b; }
template <class A, class B> inline auto max(A a, B b) -> decltype(a + b) { return a > b ? a : b; }

inline uint16_t bf16_bits(float x) {
    uint32_t b = __float_as_uint(x);
    if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (uint16_t)((b + 0x7fffu + (b >> 16 & 1)) >> 16);
}
inline float bf16_value(uint32_t bits) { return __uint_as_float(bits << 16); }
inline uint32_t pack_bf16(float low, float high) { return (uint32_t)bf16_bits(high) << 16 | bf16_bits(low); }
inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    auto one = [](uint32_t a, uint32_t b, uint32_t c) {
        return (float)((double)bf16_value(a) * bf16_value(b) + bf16_value(c));
    };
    return pack_bf16(one(a & 0xffff, b & 0xffff, c & 0xffff), one(a >> 16, b >> 16, c >> 16));
}
template <int HALF> inline uint32_t twice(uint32_t x) { return (x >> 16 * HALF & 0xffffu) * 0x10001u; }
inline float f16_value(uint16_t bits) {
    const int exponent = bits >> 10 & 31, rest = bits & 0x3ff;
    const float size = exponent == 31 ? (rest ? NAN : INFINITY)
                                      : ldexpf((float)(exponent ? rest + 1024 : rest), (exponent ? exponent : 1) - 25);
    return bits >> 15 ? -size : size;
}
inline float fast_exp2(float x) { return exp2f(x); }

template <int N, bool TRANS> inline void ldmatrix(uint32_t* r, const void* row) {
    emulator::Mail* all = emulator::meet(0xffffffffu, row);
    unsigned lane = emulator::place().lane;
    for (int m = 0; m < N; m++) {
        auto address = [&](unsigned i) {
            const unsigned char* p;
            memcpy(&p, all[8 * m + i].bytes, sizeof p);
            if ((uintptr_t)p % 16) {
                fprintf(stderr, "ldmatrix: a row at %p is not aligned to 16 bytes\n", (const void*)p);
                abort();
            }
            return p;
        };
        if (!TRANS) {
            memcpy(&r[m], address(lane / 4) + 4 * (lane % 4), 4);
        } else {
            uint16_t a, b;
            memcpy(&a, address(2 * (lane % 4)) + 2 * (lane / 4), 2);
            memcpy(&b, address(2 * (lane % 4) + 1) + 2 * (lane / 4), 2);
            r[m] = (uint32_t)b << 16 | a;
        }
    }
}
inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) { ldmatrix<4, false>(r, row); }
inline void ldmatrix_x2(uint32_t (&r)[2], const void* row) { ldmatrix<2, false>(r, row); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) { ldmatrix<4, true>(r, row); }
inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) { ldmatrix<2, true>(r, row); }

namespace emulator {
struct MmaMail {
    uint32_t a[4], b[2];
    float c[4];
};
void mma(Mail* all);
} // namespace emulator
inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    emulator::MmaMail mail;
    memcpy(mail.a, a, sizeof a);
    memcpy(mail.b, b, sizeof b);
    memcpy(mail.c, c, sizeof c);
    emulator::Mail* all = emulator::meet(0xffffffffu, mail, emulator::mma);
    memcpy(c, ((emulator::MmaMail*)all[emulator::place().lane].bytes)->c, sizeof c);
}

inline void copy_async_16(void* shared, const void* global, bool valid = true) {
    if ((uintptr_t)shared % 16 || (valid && (uintptr_t)global % 16)) {
        fprintf(stderr, "copy_async_16: not aligned to 16 bytes\n");
        abort();
    }
    emulator::add_copy({shared, valid ? global : nullptr, 0});
}
inline void copy_async_16_cached(void* shared, const void* global, bool valid) { copy_async_16(shared, global, valid); }
inline void copy_async_commit() { emulator::commit_copies(); }
template <int N> inline void copy_async_wait() { emulator::wait_copies(N); }

inline uint32_t load_acquire(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void add_release(uint32_t* p, uint32_t v) { __atomic_fetch_add(p, v, __ATOMIC_RELEASE); }
inline uint32_t load_acquire_system(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void store_release_system(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline uint64_t load_acquire_system(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void store_release_system(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
// Only who waits for another device looks at a word again and again: it leaves its core to that one, soon and for long,
// because there are more devices than cores.
inline uint64_t load_relaxed_system(const uint64_t* p) {
    static thread_local const uint64_t* last = nullptr;
    static thread_local unsigned looks = 0;
    looks = p == last ? looks + 1 : 0;
    last = p;
    if (looks % 1024 == 1023) usleep(20);
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline void store_relaxed_system(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline void store_peer(uint4* p, const uint4& v) { emulator::add_peer_store(p, v); }
inline uint4 load_uncached(const uint4* p) {
    __sync_synchronize();
    return *p;
}
inline uint4 load_streaming(const uint4* p) { return *p; }
inline void barrier_sync(int id, int threads) { emulator::block_barrier(id, (unsigned)threads); }
inline void wait_for_previous_kernel() { emulator::waited(); }
inline void let_next_kernel_begin() {}
inline void keep(int&) {}
inline void keep(uint32_t&) {}
template <int N> inline uint32_t shift_by_product(uint32_t x) { return x >> N; }
template <class T> inline T* keep_shared(T* p) { return p; }
inline void prefetch_l2_bytes(const void*, uint32_t, int, int) {}
inline void pause_ns(uint32_t) { sched_yield(); }

#define HAS_WGMMA
// Hopper: a copy of a box lands when a thread waits for its barrier, a product is done when a thread waits for it.
struct alignas(64) TensorMap {
    uint64_t base, dims[3], strides[2]; // strides in bytes, of dimensions 1 and 2
    uint32_t box[3];
    uint32_t unused[17];
};
static_assert(sizeof(TensorMap) == 128, "as large as the real one");
namespace emulator {
struct Mbarrier {                                             // in the 8 bytes of shared memory
    uint32_t arrived : 15, count : 15, phase : 1, copies : 1; // copies: there are some under way
    int32_t bytes;
};
void yield();
void add_box(Mbarrier* barrier, void* shared, const TensorMap& map, int c0, int c1, int c2);
void arrive_with_copies(Mbarrier* barrier);
void land_copies(Mbarrier* barrier);
void add_product(std::function<void()> product);
void commit_products();
void wait_products(int under_way);
inline void end_phase(Mbarrier* b) {
    if (b->arrived == b->count && b->bytes == 0) b->phase ^= 1, b->arrived = 0;
}
inline void arrive(Mbarrier* b, int threads) {
    if (b->arrived + threads > b->count) {
        fprintf(stderr, "mbarrier: more arrivals than it counts\n");
        abort();
    }
    b->arrived += threads;
    end_phase(b);
}
} // namespace emulator
inline void mbarrier_init(uint64_t* barrier, int count) {
    emulator::Mbarrier b{};
    b.count = count;
    memcpy(barrier, &b, sizeof b);
}
inline void mbarrier_init_done() {}
inline void mbarrier_arrive_expect(uint64_t* barrier, int bytes) {
    auto* b = (emulator::Mbarrier*)barrier;
    b->bytes += bytes;
    emulator::arrive(b, 1);
}
inline void mbarrier_arrive(uint64_t* barrier) { mbarrier_arrive_expect(barrier, 0); }
inline void copy_async_arrive(uint64_t* barrier) { emulator::arrive_with_copies((emulator::Mbarrier*)barrier); }
inline void mbarrier_wait(uint64_t* barrier, int parity) {
    auto* b = (emulator::Mbarrier*)barrier;
    for (long i = 0; b->phase == parity; i++) {
        emulator::land_copies(b);
        if (b->phase != parity) return;
        if (i == 1 << 22) {
            fprintf(stderr, "mbarrier: waited for in vain\n");
            abort();
        }
        emulator::yield();
    }
}
inline void tensor_copy(void* shared, const TensorMap* map, uint64_t* barrier, int c0, int c1, int c2) {
    if ((uintptr_t)shared % 1024) {
        fprintf(stderr, "tensor_copy: not aligned to 1024 bytes\n");
        abort();
    }
    emulator::add_box((emulator::Mbarrier*)barrier, shared, *map, c0, c1, c2);
}
inline uint64_t wgmma_operand(const void* p) {
    if ((uintptr_t)p % 16) {
        fprintf(stderr, "wgmma_operand: not aligned to 16 bytes\n");
        abort();
    }
    return (uint64_t)p;
}
inline uint64_t wgmma_further(uint64_t operand, int bytes) { return operand + bytes; }
inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::commit_products(); }
template <int N> inline void wgmma_wait() {
    emulator::wait_products(N);
    __syncwarp();
}
template <int C> inline void wgmma_landed(float (&)[C][4]) {}
inline void shared_to_async() {}
namespace emulator {
// Where number k of a row is: 16 bytes lie together.
inline const void* wgmma_number(uint64_t operand, int row, int k) {
    const uint64_t at = operand + 128 * (uint64_t)row + 2 * (uint64_t)k;
    return (const void*)(at ^ (at >> 7 & 7) << 4);
}
struct WgmmaRow {
    float x[16];
};
inline WgmmaRow wgmma_row(uint64_t operand, int row) {
    WgmmaRow out;
    for (int k = 0; k < 16; k += 8) {
        uint16_t bits[8];
        memcpy(bits, wgmma_number(operand, row, k), sizeof bits);
        for (int i = 0; i < 8; i++) out.x[k + i] = bf16_value(bits[i]);
    }
    return out;
}
// The two rows of a that this lane has to do with, out of the registers of the four lanes that have them.
struct WgmmaRows {
    WgmmaRow half[2];
};
inline WgmmaRows wgmma_rows(const uint32_t (&a)[4]) {
    const Mail* all = meet(0xffffffffu, a);
    WgmmaRows out;
    for (int t = 0; t < 4; t++) {
        uint32_t word[4];
        memcpy(word, all[threadIdx.x % 32 / 4 * 4 + t].bytes, sizeof word);
        for (int i = 0; i < 8; i++) // two halves of two words of two numbers
            out.half[i & 1].x[(i & 2) * 4 + 2 * t + (i >> 2)] = bf16_value(word[i & 3] >> (i >> 2) * 16 & 0xffff);
    }
    return out;
}
// `rows()`: of a, this lane's.
template <int COLUMNS, class Rows> inline void add_wgmma(float (*d)[4], Rows rows, uint64_t b) {
    const int lane = (int)threadIdx.x % 32;
    add_product([=] {
        const WgmmaRows a = rows();
        for (int j = 0; j < COLUMNS; j++)
            for (int e = 0; e < 2; e++) {
                const WgmmaRow y = wgmma_row(b, 8 * j + lane % 4 * 2 + e);
                float sums[2] = {d[j][e], d[j][2 + e]};
                for (int k = 0; k < 16; k++)
                    for (int half = 0; half < 2; half++) sums[half] += a.half[half].x[k] * y.x[k];
                for (int half = 0; half < 2; half++) d[j][2 * half + e] = sums[half];
            }
    });
}
} // namespace emulator
template <int N, int C> inline void wgmma(float (&d)[C][4], uint64_t a, uint64_t b) {
    const int first = (int)threadIdx.x / 32 % 4 * 16 + (int)threadIdx.x % 32 / 4;
    emulator::add_wgmma<N / 8>(
        d, [=] { return emulator::WgmmaRows{{emulator::wgmma_row(a, first), emulator::wgmma_row(a, first + 8)}}; }, b);
}
template <int C> inline void wgmma(float (&d)[C][4], uint64_t a, uint64_t b) { wgmma<8 * C>(d, a, b); }
template <int N, int C> inline void wgmma(float (&d)[C][4], const uint32_t (&a)[4], uint64_t b) {
    const emulator::WgmmaRows rows = emulator::wgmma_rows(a);
    emulator::add_wgmma<N / 8>(d, [=] { return rows; }, b);
}
template <int C> inline void wgmma_set(float (&d)[C][4], uint64_t a, uint64_t b) {
    float (*sums)[4] = d;
    emulator::add_product([=] {
        for (int j = 0; j < C; j++)
            for (int e = 0; e < 4; e++) sums[j][e] = 0.0f;
    });
    wgmma(d, a, b);
}
// Where it is and, in the upper bits, how far the next 64 columns are.
inline uint64_t wgmma_operand_columns(const void* p, int step) { return (uint64_t)p | (uint64_t)(step >> 4) << 48; }
template <int C> inline void wgmma_columns(float (&d)[C][4], const uint32_t (&a)[4], uint64_t b) {
    const emulator::WgmmaRows rows = emulator::wgmma_rows(a);
    const int lane = (int)threadIdx.x % 32;
    const uint64_t base = b << 16 >> 16, step = b >> 48 << 4;
    float (*sums)[4] = d;
    emulator::add_product([=] {
        for (int j = 0; j < C; j++) {
            const int column = 8 * j + lane % 4 * 2; // and the next
            for (int k = 0; k < 16; k++) {
                // Of row k of the 64 columns they are in.
                uint32_t two;
                memcpy(&two, emulator::wgmma_number(base + column / 64 * step, k, column % 64), sizeof two);
                for (int e = 0; e < 2; e++)
                    for (int half = 0; half < 2; half++)
                        sums[j][2 * half + e] += rows.half[half].x[k] * bf16_value(two >> 16 * e & 0xffff);
            }
        }
    });
}
template <int N> inline void fewer_registers() {}
template <int N> inline void more_registers() {}
