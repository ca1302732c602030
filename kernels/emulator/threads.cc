// Blocks of fibers: see device.h.
#include "device.h"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim
#include "threads.h"

#include <mutex>
#include <signal.h>
#include <sys/mman.h>
#include <vector>

namespace emulator {

extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");

constexpr size_t STACK = 256 << 10, MOST_SHARED = 256 << 10; // what a launch may ask for is less
constexpr unsigned MAX_THREADS = 1024;

struct Fiber {
    void* sp;
    Place place;
    std::vector<Copy> copies;
    std::vector<PeerStore> stores;                            // that no other device can see yet
    int group, landed;                                        // copy groups: the open one, and how many have landed
    std::vector<std::vector<std::function<void()>>> products; // of warpgroups, by group
};

// Lanes of a warp that meet under one mask.
struct Meeting {
    unsigned mask, arrived;
    int phase;
    Mail mail[2][32];
    unsigned waiting[32], num_waiting;
};

struct Barrier {
    unsigned arrived, needed;
    std::vector<unsigned> waiting;
};

struct Block {
    std::vector<Fiber> fibers = std::vector<Fiber>(MAX_THREADS);
    unsigned char *stacks, *shared_end; // as many bytes behind it as in front of it cannot be touched
    void* main_sp;
    unsigned char* shared;          // null: the kernel has not asked for it
    const Launch* launch = nullptr; // that runs now
    bool failed;
    unsigned threads, live;
    std::vector<unsigned> ready; // a ring
    unsigned first, count;
    std::vector<std::vector<Meeting>> meetings = std::vector<std::vector<Meeting>>(MAX_THREADS / 32);
    Barrier barriers[16];
    unsigned launches = 0;

    Block() : ready(MAX_THREADS) {
        stacks = (unsigned char*)mmap(
            nullptr, STACK * MAX_THREADS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        auto* shared =
            (unsigned char*)mmap(nullptr, 2 * MOST_SHARED, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (stacks == MAP_FAILED || shared == MAP_FAILED) abort();
        shared_end = shared + MOST_SHARED;
        mprotect(shared_end, MOST_SHARED, PROT_NONE);
    }
    const char* name() const { return launch->kernel->name; }
    void push(unsigned fiber) { ready[(first + count++) % MAX_THREADS] = fiber; }
};

thread_local Block* block;
thread_local Fiber* current;

const Place& place() { return current->place; }

// It ends at `shared_end`, or as near as its alignment allows.
void* dynamic_shared(size_t alignment) {
    const size_t bytes = block->launch->shared_bytes;
    return block->shared = block->shared_end - (bytes + alignment - 1) / alignment * alignment;
}
// What lies in between is NaN, and must stay it.
static bool wrote_past_shared() {
    if (!block->shared) return false;
    for (unsigned char* p = block->shared + block->launch->shared_bytes; p < block->shared_end; p++)
        if (*p != 0xff) return true;
    return false;
}

static struct sigaction handler_before;

// A kernel's fiber has touched what it may not: its block ends here.
static void end_block(int, siginfo_t* info, void*) {
    if (!block || !block->launch) { // not a kernel's: the previous handler runs when it happens again
        sigaction(SIGSEGV, &handler_before, nullptr);
        return;
    }
    const Place& place = current->place;
    fprintf(stderr, "kernel %s: thread %u of block (%u, %u, %u) touched %p, ", block->name(), place.thread.x,
        place.block.x, place.block.y, place.block.z, info->si_addr);
    const ptrdiff_t past = (unsigned char*)info->si_addr - block->shared_end;
    if (past >= 0 && past < (ptrdiff_t)MOST_SHARED)
        fprintf(stderr, "past the end of its %zu bytes of dynamic shared memory\n", block->launch->shared_bytes);
    else
        fprintf(stderr, "which is no buffer's\n");
    block->failed = true;
    void* gone;
    emulator_switch(&gone, block->main_sp);
}
static void catch_faults() {
    struct sigaction action = {};
    action.sa_sigaction = end_block;
    action.sa_flags = SA_SIGINFO | SA_NODEFER; // the handler does not return
    sigaction(SIGSEGV, &action, &handler_before);
}

static void stuck() {
    fprintf(stderr, "kernel %s: %u threads of block (%u, %u, %u) wait for others that never come\n", block->name(),
        block->live, current->place.block.x, current->place.block.y, current->place.block.z);
    abort();
}

// Runs other fibers; returns when this fiber is ready again.
static void wait() {
    Block& b = *block;
    if (b.count == 0) stuck();
    Fiber* self = current;
    unsigned next = b.ready[b.first];
    b.first = (b.first + 1) % MAX_THREADS;
    b.count--;
    current = &b.fibers[next];
    if (current != self) emulator_switch(&self->sp, current->sp);
}

static void release(Barrier& barrier) {
    for (unsigned fiber : barrier.waiting) block->push(fiber);
    barrier.waiting.clear();
    barrier.arrived = 0;
}

void block_barrier(int id, unsigned threads) {
    Barrier& barrier = block->barriers[id];
    barrier.needed = threads;
    barrier.arrived++;
    if (barrier.arrived == (threads ? threads : block->live)) return release(barrier);
    barrier.waiting.push_back((unsigned)(current - block->fibers.data()));
    wait();
}

Mail* meet(unsigned mask, const void* mine, int size, void (*combine)(Mail* all)) {
    unsigned self = (unsigned)(current - block->fibers.data()), lane = current->place.lane;
    if (!(mask >> lane & 1)) {
        fprintf(stderr, "kernel %s: lane %u is not in its own mask %08x\n", block->name(), lane, mask);
        abort();
    }
    auto& meetings = block->meetings[self / 32];
    Meeting* m = nullptr;
    for (Meeting& candidate : meetings)
        if (candidate.mask == mask) m = &candidate;
    if (!m) {
        if (meetings.capacity() < 64) meetings.reserve(64);
        if (meetings.size() == 64) {
            fprintf(stderr, "kernel %s: too many masks\n", block->name());
            abort();
        }
        meetings.push_back({});
        m = &meetings.back();
        m->mask = mask;
    }
    Mail* all = m->mail[m->phase];
    memcpy(all[lane].bytes, mine, (size_t)size);
    m->arrived |= 1u << lane;
    if (m->arrived == mask) {
        if (combine) combine(all);
        for (unsigned i = 0; i < m->num_waiting; i++) block->push(m->waiting[i]);
        m->num_waiting = m->arrived = 0;
        m->phase ^= 1;
    } else {
        m->waiting[m->num_waiting++] = self;
        wait();
    }
    return all;
}

void mma(Mail* all) {
    static thread_local float a[16][16], b[16][8], c[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const MmaMail* m = (const MmaMail*)all[lane].bytes;
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) {
            int row = g + 8 * (i & 1), col = 2 * t + 8 * (i >> 1);
            a[row][col] = bf16_value(m->a[i] & 0xffff);
            a[row][col + 1] = bf16_value(m->a[i] >> 16);
            c[row][2 * t] = m->c[2 * (i & 1)];
            c[row][2 * t + 1] = m->c[2 * (i & 1) + 1];
        }
        for (int i = 0; i < 2; i++) {
            b[2 * t + 8 * i][g] = bf16_value(m->b[i] & 0xffff);
            b[2 * t + 8 * i + 1][g] = bf16_value(m->b[i] >> 16);
        }
    }
    for (int k = 0; k < 16; k++)
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 8; j++) c[i][j] += a[i][k] * b[k][j];
    for (int lane = 0; lane < 32; lane++) {
        MmaMail* m = (MmaMail*)all[lane].bytes;
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) m->c[i] = c[g + 8 * (i >> 1)][2 * t + (i & 1)];
    }
}

void add_copy(const Copy& copy) {
    current->copies.push_back(copy);
    current->copies.back().group = current->group;
}
void commit_copies() { current->group++; }
void wait_copies(int under_way) {
    Fiber& f = *current;
    size_t kept = 0;
    for (Copy& copy : f.copies) {
        if (copy.group < f.group - under_way) {
            if (copy.from)
                memcpy(copy.to, copy.from, 16);
            else
                memset(copy.to, 0, 16);
        } else {
            f.copies[kept++] = copy;
        }
    }
    f.copies.resize(kept);
}

void add_peer_store(void* to, const uint4& value) {
    if (!may_access_peer(to)) {
        fprintf(stderr, "kernel %s stores to memory of a device that it may not access\n", block->name());
        abort();
    }
    current->stores.push_back({to, value});
}
static void land_stores(Fiber& fiber) {
    // The last first: their order says nothing.
    for (; !fiber.stores.empty(); fiber.stores.pop_back())
        memcpy(fiber.stores.back().to, &fiber.stores.back().value, sizeof(uint4));
    __sync_synchronize();
}
void land_peer_stores() { land_stores(*current); }

void add_product(std::function<void()> product) { current->products.back().push_back(std::move(product)); }
void commit_products() { current->products.emplace_back(); }
void wait_products(int under_way) {
    auto& groups = current->products; // the last one is open
    while ((int)groups.size() - 1 > under_way) {
        for (auto& product : groups.front()) product();
        groups.erase(groups.begin());
    }
}

void yield() {
    block->push((unsigned)(current - block->fibers.data()));
    wait();
}

struct Box {
    Mbarrier* barrier;
    unsigned char* shared;
    TensorMap map;
    int at[3];
};
static thread_local std::vector<Box> boxes;

void add_box(Mbarrier* barrier, void* shared, const TensorMap& map, int c0, int c1, int c2) {
    boxes.push_back({barrier, (unsigned char*)shared, map, {c0, c1, c2}});
    barrier->copies = 1;
}

// Boxes of 128 bytes to a row of 16-bit numbers, swizzled; zeros outside of the tensor.
void land_boxes(Mbarrier* barrier) {
    if (!barrier->copies) return;
    barrier->copies = 0;
    size_t kept = 0;
    for (Box& box : boxes) {
        if (box.barrier != barrier) {
            boxes[kept++] = box;
            continue;
        }
        const TensorMap& m = box.map;
        for (unsigned row = 0; row < m.box[1]; row++)
            for (unsigned i = 0; i < m.box[0]; i++) {
                uint64_t c0 = (uint64_t)box.at[0] + i, c1 = (uint64_t)box.at[1] + row, c2 = (uint64_t)box.at[2];
                uint64_t to = (uint64_t)box.shared + 128 * row + 2 * i;
                to ^= (to >> 7 & 7) << 4;
                bool inside = c0 < m.dims[0] && c1 < m.dims[1] && c2 < m.dims[2];
                if (inside)
                    memcpy((void*)to, (const void*)(m.base + 2 * c0 + m.strides[0] * c1 + m.strides[1] * c2), 2);
                else
                    memset((void*)to, 0, 2);
            }
        barrier->bytes -= (int32_t)(2 * m.box[0] * m.box[1]);
    }
    boxes.resize(kept);
    end_phase(barrier);
}

static void fiber_main() {
    block->launch->kernel->invoke(block->launch->parameters);
    Block& b = *block;
    b.live--;
    // Those that wait for all that live may have waited for this one.
    for (Barrier& barrier : b.barriers)
        if (barrier.arrived && !barrier.needed && barrier.arrived == b.live) release(barrier);
    void* gone;
    if (b.live == 0) emulator_switch(&gone, b.main_sp);
    if (b.count == 0) stuck();
    unsigned next = b.ready[b.first];
    b.first = (b.first + 1) % MAX_THREADS;
    b.count--;
    current = &b.fibers[next];
    emulator_switch(&gone, current->sp);
    abort();
}

static thread_local unsigned waits;
void waited() { waits++; }

BlockEnd run_block(const Launch& launch, dim3 at) {
    static std::once_flag once;
    std::call_once(once, catch_faults);
    if (!block) block = new Block;
    Block& b = *block;
    const dim3 threads = launch.threads;
    b.failed = false;
    b.threads = b.live = threads.x * threads.y * threads.z;
    b.first = b.count = 0;
    waits = 0;
    boxes.clear();
    b.launch = &launch;
    b.shared = nullptr;
    const size_t cleared = (launch.shared_bytes + 1023) / 1024 * 1024; // the largest alignment
    memset(b.shared_end - cleared, 0xff, cleared);
    for (auto& m : b.meetings) m.clear();
    for (auto& barrier : b.barriers) {
        barrier.arrived = 0;
        barrier.waiting.clear();
    }
    // Warps start in one order, then in the other: a result must not depend on it.
    bool backwards = b.launches++ % 2;
    unsigned warps = (b.threads + 31) / 32;
    for (unsigned w = 0; w < warps; w++) {
        unsigned warp = backwards ? warps - 1 - w : w;
        for (unsigned i = 32 * warp; i < 32 * warp + 32 && i < b.threads; i++) {
            Fiber& f = b.fibers[i];
            f.place.thread.x = i % threads.x;
            f.place.thread.y = i / threads.x % threads.y;
            f.place.thread.z = i / threads.x / threads.y;
            f.place.block = at;
            f.place.block_dim = threads;
            f.place.grid_dim = launch.grid;
            f.place.lane = i % 32;
            f.copies.clear();
            f.group = 0;
            f.products.assign(1, {});
            void** sp = (void**)(b.stacks + STACK * (i + 1)) - 2; // as if called: 8 bytes off 16
            *sp = (void*)fiber_main;
            f.sp = sp - 6;
            b.push(i);
        }
    }
    current = &b.fibers[b.ready[0]];
    b.first = 1;
    b.count--;
    emulator_switch(&b.main_sp, current->sp);
    for (unsigned i = 0; i < b.threads; i++) land_stores(b.fibers[i]);
    if (!b.failed && wrote_past_shared()) {
        fprintf(stderr, "kernel %s wrote past the end of its %zu bytes of dynamic shared memory\n", b.name(),
            launch.shared_bytes);
        b.failed = true;
    }
    b.launch = nullptr;
    return {b.failed, waits};
}

} // namespace emulator
