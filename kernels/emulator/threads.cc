// Blocks of fibers: see device.h.
#include "device.h"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim
#include "threads.h"

#include <map>
#include <mutex>
#include <signal.h>
#include <sys/mman.h>
#include <utility>
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
    pop %rcx
    jmp *%rcx
)");

constexpr size_t MOST_SHARED = 256 << 10; // what a launch may ask for is less
constexpr size_t STAGGER = 832;
constexpr unsigned MAX_THREADS = 1024;

struct Block;
struct alignas(64) Fiber : Place {
    Block* owner;
    void* sp;
    std::vector<Copy> copies;
    std::vector<PeerStore> stores;                            // that no other device can see yet
    int group;                                                // of copies: the open one
    std::vector<std::vector<std::function<void()>>> products; // of warpgroups, by group
};
static_assert(sizeof(Fiber) == FIBER);

struct Barrier {
    unsigned arrived, needed;
    std::vector<Fiber*> waiting;
};

struct Block {
    unsigned char *stacks, *shared_end; // as many bytes behind it as in front of it cannot be touched
    void* main_sp;
    unsigned char* shared;          // null: the kernel has not asked for it
    const Launch* launch = nullptr; // that runs now
    bool failed;
    unsigned made = 0; // fibers
    unsigned threads, live;
    Fiber* ready[MAX_THREADS]; // a ring
    unsigned first, count;
    std::vector<std::vector<Meeting>> meetings = std::vector<std::vector<Meeting>>(MAX_THREADS / 32);
    Barrier barriers[16];
    unsigned launches = 0;

    Block() {
        stacks = (unsigned char*)mmap(nullptr, STACK * (MAX_THREADS + 1), PROT_READ | PROT_WRITE,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        auto* shared =
            (unsigned char*)mmap(nullptr, 2 * MOST_SHARED, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (stacks == MAP_FAILED || shared == MAP_FAILED) abort();
        stacks += STACK - (uintptr_t)stacks % STACK;
        shared_end = shared + MOST_SHARED;
        mprotect(shared_end, MOST_SHARED, PROT_NONE);
    }
    const char* name() const { return launch->kernel->name; }
    Fiber& fiber(unsigned i) { return *(Fiber*)fiber_of((uintptr_t)stacks + STACK * i); }
    void push(Fiber* fiber) { ready[(first + count++) % MAX_THREADS] = fiber; }
    Fiber& pop() {
        Fiber& next = *ready[first];
        first = (first + 1) % MAX_THREADS;
        count--;
        if (count) __builtin_prefetch(ready[first]->sp); // the one after it
        return next;
    }
};

static thread_local Block* block;

static Fiber& self() { return (Fiber&)place(); }

// It ends at `shared_end`, or as near as its alignment allows.
void* dynamic_shared(size_t alignment) {
    Block& b = *self().owner;
    return b.shared = b.shared_end - (b.launch->shared_bytes + alignment - 1) / alignment * alignment;
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
    const Place& at = place();
    fprintf(stderr, "kernel %s: thread %u of block (%u, %u, %u) touched %p, ", block->name(), at.thread.x, at.block.x,
        at.block.y, at.block.z, info->si_addr);
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
    const Fiber& f = self();
    fprintf(stderr, "kernel %s: %u threads of block (%u, %u, %u) wait for others that never come\n", f.owner->name(),
        f.owner->live, f.block.x, f.block.y, f.block.z);
    abort();
}

// Runs other fibers; returns when this fiber is ready again.
static void wait(Fiber& self) {
    Block& b = *self.owner;
    if (b.count == 0) stuck();
    Fiber& next = b.pop();
    if (&next != &self) emulator_switch(&self.sp, next.sp);
}

static void release(Block& block, Barrier& barrier) {
    for (Fiber* fiber : barrier.waiting) block.push(fiber);
    barrier.waiting.clear();
    barrier.arrived = 0;
}

void block_barrier(int id, unsigned threads) {
    Fiber& f = self();
    Barrier& barrier = f.owner->barriers[id];
    barrier.needed = threads;
    barrier.arrived++;
    if (barrier.arrived == (threads ? threads : f.owner->live)) return release(*f.owner, barrier);
    barrier.waiting.push_back(&f);
    wait(f);
}

// The first time that lanes meet under this mask.
static Meeting& new_meeting(std::vector<Meeting>& meetings, unsigned mask) {
    constexpr size_t MOST = 64;
    meetings.reserve(MOST); // they stay where they are
    if (meetings.size() == MOST) {
        fprintf(stderr, "kernel %s: too many masks\n", self().owner->name());
        abort();
    }
    meetings.push_back({});
    meetings.back().mask = mask;
    return meetings.back();
}

Meeting& meeting(unsigned mask) {
    const Fiber& f = self();
    if (!(mask >> f.lane & 1)) {
        fprintf(stderr, "kernel %s: lane %u is not in its own mask %08x\n", f.owner->name(), f.lane, mask);
        abort();
    }
    auto& meetings = f.owner->meetings[f.warp];
    for (Meeting& m : meetings)
        if (m.mask == mask) return m;
    return new_meeting(meetings, mask);
}

void arrive(Meeting& m, Combine* combine) {
    Fiber& f = self();
    m.arrived |= 1u << f.lane;
    if (m.arrived != m.mask) {
        m.waiting[m.num_waiting++] = &f;
        return wait(f);
    }
    if (combine) combine(m.mail[m.phase]);
    for (unsigned i = 0; i < m.num_waiting; i++) f.owner->push(m.waiting[i]);
    m.num_waiting = m.arrived = 0;
    m.phase ^= 1;
}

typedef float Columns __attribute__((vector_size(32)));
void mma(Mail* all) {
    float a[16][16];
    union {
        float at[16][8];
        Columns row[16];
    } b, c;
    for (int lane = 0; lane < 32; lane++) {
        const MmaMail* m = (const MmaMail*)all[lane].bytes;
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) {
            int row = g + 8 * (i & 1), col = 2 * t + 8 * (i >> 1);
            a[row][col] = bf16_value(m->a[i] & 0xffff);
            a[row][col + 1] = bf16_value(m->a[i] >> 16);
            c.at[row][2 * t] = m->c[2 * (i & 1)];
            c.at[row][2 * t + 1] = m->c[2 * (i & 1) + 1];
        }
        for (int i = 0; i < 2; i++) {
            b.at[2 * t + 8 * i][g] = bf16_value(m->b[i] & 0xffff);
            b.at[2 * t + 8 * i + 1][g] = bf16_value(m->b[i] >> 16);
        }
    }
    for (int i = 0; i < 16; i += 4) { // four sums at once: each waits for its last product
        Columns s0 = c.row[i], s1 = c.row[i + 1], s2 = c.row[i + 2], s3 = c.row[i + 3];
        for (int k = 0; k < 16; k++) {
            s0 += a[i][k] * b.row[k];
            s1 += a[i + 1][k] * b.row[k];
            s2 += a[i + 2][k] * b.row[k];
            s3 += a[i + 3][k] * b.row[k];
        }
        c.row[i] = s0, c.row[i + 1] = s1, c.row[i + 2] = s2, c.row[i + 3] = s3;
    }
    for (int lane = 0; lane < 32; lane++) {
        MmaMail* m = (MmaMail*)all[lane].bytes;
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) m->c[i] = c.at[g + 8 * (i >> 1)][2 * t + (i & 1)];
    }
}

void add_copy(const Copy& copy) {
    Fiber& f = self();
    f.copies.push_back(copy);
    f.copies.back().group = f.group;
}
void commit_copies() { self().group++; }
static void land(const Copy& copy) {
    if (copy.from)
        memcpy(copy.to, copy.from, 16);
    else
        memset(copy.to, 0, 16);
}
void wait_copies(int under_way) {
    Fiber& f = self();
    size_t kept = 0;
    for (Copy& copy : f.copies) {
        if (copy.group < f.group - under_way)
            land(copy);
        else
            f.copies[kept++] = copy;
    }
    f.copies.resize(kept);
}

void add_peer_store(void* to, const uint4& value) {
    if (!may_access_peer(to)) {
        fprintf(stderr, "kernel %s stores to memory of a device that it may not access\n", self().owner->name());
        abort();
    }
    self().stores.push_back({to, value});
}
static void land_stores(Fiber& fiber) {
    // The last first: their order says nothing.
    for (; !fiber.stores.empty(); fiber.stores.pop_back())
        memcpy(fiber.stores.back().to, &fiber.stores.back().value, sizeof(uint4));
    __sync_synchronize();
}
void land_peer_stores() { land_stores(self()); }

void add_product(std::function<void()> product) { self().products.back().push_back(std::move(product)); }
void commit_products() { self().products.emplace_back(); }
void wait_products(int under_way) {
    auto& groups = self().products; // the last one is open
    while ((int)groups.size() - 1 > under_way) {
        for (auto& product : groups.front()) product();
        groups.erase(groups.begin());
    }
}

void yield() {
    Fiber& f = self();
    f.owner->push(&f);
    wait(f);
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
static void land_boxes(Mbarrier* barrier) {
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

// Copies of threads that arrive at a barrier when these have landed.
struct Arrivals {
    std::vector<Copy> copies;
    int threads = 0;
};
static thread_local std::map<Mbarrier*, Arrivals> arrivals;

void arrive_with_copies(Mbarrier* barrier) {
    std::vector<Copy>& own = self().copies;
    Arrivals& a = arrivals[barrier];
    a.copies.insert(a.copies.end(), own.begin(), own.end());
    a.threads++;
    own.clear();
    barrier->copies = 1;
}

// When a thread waits for them, and no sooner.
void land_copies(Mbarrier* barrier) {
    if (!barrier->copies) return;
    barrier->copies = 0;
    Arrivals& a = arrivals[barrier];
    for (const Copy& copy : a.copies) land(copy);
    a.copies.clear();
    arrive(barrier, std::exchange(a.threads, 0));
    land_boxes(barrier);
}

static void fiber_main() {
    Block& b = *self().owner;
    b.launch->kernel->invoke(b.launch->parameters);
    b.live--;
    // Those that wait for all that live may have waited for this one.
    for (Barrier& barrier : b.barriers)
        if (barrier.arrived && !barrier.needed && barrier.arrived == b.live) release(b, barrier);
    void* gone;
    if (b.live == 0) emulator_switch(&gone, b.main_sp);
    if (b.count == 0) stuck();
    emulator_switch(&gone, b.pop().sp);
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
    arrivals.clear();
    b.launch = &launch;
    b.shared = nullptr;
    const size_t cleared = (launch.shared_bytes + 1023) / 1024 * 1024; // the largest alignment
    memset(b.shared_end - cleared, 0xff, cleared);
    for (auto& m : b.meetings) m.clear();
    for (auto& barrier : b.barriers) {
        barrier.arrived = 0;
        barrier.waiting.clear();
    }
    for (; b.made < b.threads; b.made++) (new (&b.fiber(b.made)) Fiber)->owner = &b;
    // Warps start in one order, then in the other: a result must not depend on it.
    bool backwards = b.launches++ % 2;
    unsigned warps = (b.threads + 31) / 32;
    for (unsigned w = 0; w < warps; w++) {
        unsigned warp = backwards ? warps - 1 - w : w;
        for (unsigned i = 32 * warp; i < 32 * warp + 32 && i < b.threads; i++) {
            Fiber& f = b.fiber(i);
            f.thread.x = i % threads.x;
            f.thread.y = i / threads.x % threads.y;
            f.thread.z = i / threads.x / threads.y;
            f.block = at;
            f.block_dim = threads;
            f.grid_dim = launch.grid;
            f.lane = i % 32;
            f.warp = i / 32;
            f.copies.clear();
            f.group = 0;
            f.products.assign(1, {});
            // As if called: 8 bytes off 16. Neighbours' stacks begin at other places of a page, as fibers do.
            void** sp = (void**)(b.stacks + STACK * (i + 1) - i % 64 * STAGGER) - 2;
            *sp = (void*)fiber_main;
            f.sp = sp - 6;
            b.push(&f);
        }
    }
    emulator_switch(&b.main_sp, b.pop().sp);
    for (unsigned i = 0; i < b.threads; i++) land_stores(b.fiber(i));
    if (!b.failed && wrote_past_shared()) {
        fprintf(stderr, "kernel %s wrote past the end of its %zu bytes of dynamic shared memory\n", b.name(),
            launch.shared_bytes);
        b.failed = true;
    }
    b.launch = nullptr;
    return {b.failed, waits};
}

} // namespace emulator
