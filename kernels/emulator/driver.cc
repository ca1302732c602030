// The part of the CUDA driver's interface that Moebius uses, over the emulated threads: built as libcuda.so.1.
//
// A stream is a thread and a queue. Capture writes what is enqueued into a list, a graph runs the list in the order of
// its writing.
//
// There are several devices, with memory of their own. Mistakes show: what is enqueued from a thread whose device is
// another one than the stream's, copies to or from memory of a device that may not be accessed, and streams that run
// beside the ones that they wait for.
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <time.h>
#include <vector>

#include "threads.h"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

using namespace emulator;
typedef int Result;
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
};
constexpr int DEVICES = 4;
constexpr size_t MEMORY = 64ull << 30; // of each
constexpr unsigned SHARED = 232448;    // dynamic, of a block

static std::map<std::string, Kernel>& kernels() {
    static auto& all = *new std::map<std::string, Kernel>;
    return all;
}
void emulator::add_kernel(const Kernel& kernel) { kernels()[kernel.name] = kernel; }

using Work = std::function<void()>;
struct Graph {
    static inline std::atomic<uint64_t> graphs = 0;
    std::vector<Work> work;
    bool ended = false;
    uint64_t id = ++graphs; // of its capture
};

struct Event {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t recorded = 0, done = 0;
    double time = 0;
    std::shared_ptr<Graph> capture;
};

// The calling thread's device; -1: none yet.
static thread_local int own_device = -1;
#define NEED_CONTEXT                                                                                                   \
    if (own_device < 0) return INVALID_CONTEXT;

static double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

struct Stream {
    static thread_local Stream* running; // of the thread of a stream
    const int device = own_device;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Work> queue;
    bool busy = false, ending = false;
    std::atomic<Result> error = SUCCESS; // of a kernel: none runs here any more (a real device gives up all streams)
    std::shared_ptr<Graph> capture;
    std::thread thread;

    Stream() : thread([this] { run(); }) {}
    std::shared_ptr<Graph> capturing() {
        if (capture && capture->ended) capture.reset();
        return capture;
    }
    void run() {
        running = this;
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            changed.wait(lock, [this] { return ending || !queue.empty(); });
            if (queue.empty()) return;
            Work work = std::move(queue.front());
            queue.pop_front();
            busy = true;
            lock.unlock();
            work();
            lock.lock();
            busy = false;
            changed.notify_all();
        }
    }
    void add(Work work) {
        std::lock_guard<std::mutex> lock(mutex);
        if (capturing()) return capture->work.push_back(std::move(work));
        queue.push_back(std::move(work));
        changed.notify_all();
    }
    Result wait() {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return queue.empty() && !busy; });
        return error;
    }
    ~Stream() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            ending = true;
            changed.notify_all();
        }
        thread.join();
    }
};

thread_local Stream* Stream::running;

static Stream& default_stream() {
    static Stream* streams[DEVICES];
    static auto& mutex = *new std::mutex;
    std::lock_guard<std::mutex> lock(mutex);
    Stream*& stream = streams[own_device < 0 ? 0 : own_device];
    if (!stream) stream = new Stream;
    return *stream;
}
static Stream& of(Stream* s) { return s ? *s : default_stream(); }

// All that have been made, and not destroyed.
// Never destroyed, here and below: threads may still be at work when the process ends.
static auto& streams_mutex = *new std::mutex;
static auto& streams = *new std::set<Stream*>;

// Device memory ends at a page that cannot be touched.
static auto& memory_mutex = *new std::mutex;
struct Buffer {
    void* pages;
    size_t bytes; // of the pages
    int device;
};
static auto& memory = *new std::map<uint64_t, Buffer>; // by where it begins
static size_t memory_used[DEVICES];
static bool peers[DEVICES][DEVICES]; // the first may access memory of the second

// Whether a device may access what is there: its own memory, that of a peer, or the host's.
static bool may_access(int device, uint64_t address) {
    std::lock_guard<std::mutex> lock(memory_mutex);
    auto after = memory.upper_bound(address);
    if (after == memory.begin()) return true;
    --after;
    const Buffer& buffer = after->second;
    const bool inside = address < (uint64_t)buffer.pages + buffer.bytes;
    return !inside || buffer.device == device || peers[device][buffer.device];
}
// What a copy on a stream must not do.
static Result check_copy(Stream* s, uint64_t to, uint64_t from) {
    NEED_CONTEXT
    if (of(s).device != own_device) return INVALID_CONTEXT;
    return may_access(own_device, to) && may_access(own_device, from) ? SUCCESS : INVALID_VALUE;
}
#define CHECK_COPY(s, to, from)                                                                                        \
    if (Result result = check_copy(s, (uint64_t)(to), (uint64_t)(from))) return result;
bool emulator::may_access_peer(const void* address) { return may_access(Stream::running->device, (uint64_t)address); }

extern "C" {

Result cuInit(unsigned) { return SUCCESS; }
Result cuDriverGetVersion(int* v) { return *v = 13000, SUCCESS; }
Result cuDeviceGetCount(int* n) { return *n = DEVICES, SUCCESS; }
Result cuDeviceGet(int* device, int i) { return *device = i, i >= 0 && i < DEVICES ? SUCCESS : INVALID_DEVICE; }
Result cuDeviceGetName(char* name, int len, int) { return snprintf(name, (size_t)len, "emulated GPU"), SUCCESS; }
Result cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = MEMORY, SUCCESS; }
Result cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
    case 16: *value = 3; break;       // multiprocessors
    case 75: *value = 9; break;       // compute capability, major
    case 76: *value = 0; break;       // minor
    case 97: *value = SHARED; break;  // shared memory a block may ask for
    case 81: *value = 233472; break;  // shared memory of a multiprocessor
    case 38: *value = 1 << 20; break; // L2
    default: *value = 1;
    }
    return SUCCESS;
}
// A context is its device's number and 1.
Result cuDevicePrimaryCtxRetain(void** context, int i) { return *context = (void*)(intptr_t)(i + 1), SUCCESS; }
Result cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
Result cuCtxSetCurrent(void* context) { return own_device = (int)(intptr_t)context - 1, SUCCESS; }
Result cuCtxGetCurrent(void** context) { return *context = (void*)(intptr_t)(own_device + 1), SUCCESS; }
Result cuDeviceCanAccessPeer(int* can, int device, int peer) { return *can = device != peer, SUCCESS; }
Result cuCtxEnablePeerAccess(void* context, unsigned) {
    NEED_CONTEXT
    std::lock_guard<std::mutex> lock(memory_mutex);
    bool& may = peers[own_device][(intptr_t)context - 1];
    if (may) return 704; // already enabled
    return may = true, SUCCESS;
}
Result cuCtxSynchronize() { return SUCCESS; }
Result cuMemGetInfo_v2(size_t* free, size_t* total) {
    NEED_CONTEXT
    std::lock_guard<std::mutex> lock(memory_mutex);
    return *total = MEMORY, *free = MEMORY - memory_used[own_device], SUCCESS;
}
Result cuMemAlloc_v2(uint64_t* pointer, size_t bytes) {
    NEED_CONTEXT
    std::lock_guard<std::mutex> lock(memory_mutex);
    if (bytes == 0) return INVALID_VALUE;
    if (memory_used[own_device] + bytes > MEMORY) return OUT_OF_MEMORY;
    size_t rounded = (bytes + 255) / 256 * 256, pages = (rounded + 4095) / 4096 * 4096;
    unsigned char* p = (unsigned char*)mmap(
        nullptr, pages + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return OUT_OF_MEMORY;
    mprotect(p + pages, 4096, PROT_NONE);
    uint64_t at = (uint64_t)(p + pages - rounded);
    if (bytes < 256u << 20) memset((void*)at, 0xff, bytes);
    memory[at] = {p, pages + 4096, own_device};
    memory_used[own_device] += pages;
    return *pointer = at, SUCCESS;
}
// cuMemFree waits for everything that runs on the device. The driver may block other calls meanwhile, so functions with
// ENTER do.
static auto& giving_back = *new std::mutex;
#define ENTER                                                                                                          \
    { std::lock_guard<std::mutex> entered(giving_back); }
Result cuMemFree_v2(uint64_t pointer) {
    Buffer buffer;
    {
        std::lock_guard<std::mutex> lock(memory_mutex);
        auto found = memory.find(pointer);
        if (found == memory.end()) return INVALID_VALUE;
        buffer = found->second;
    }
    {
        std::lock_guard<std::mutex> alone(giving_back);
        std::lock_guard<std::mutex> lock(streams_mutex);
        for (Stream* stream : streams)
            if (stream->device == buffer.device) stream->wait();
    }
    std::lock_guard<std::mutex> lock(memory_mutex);
    memory_used[buffer.device] -= buffer.bytes - 4096;
    munmap(buffer.pages, buffer.bytes);
    memory.erase(pointer);
    return SUCCESS;
}
// Pinned memory is read and written when the copy runs, other memory when it is asked for.
static auto& pinned = *new std::map<const unsigned char*, size_t>;
static bool is_pinned(const void* p) {
    std::lock_guard<std::mutex> lock(memory_mutex);
    auto after = pinned.upper_bound((const unsigned char*)p);
    if (after == pinned.begin()) return false;
    --after;
    return (const unsigned char*)p < after->first + after->second;
}
static void pin(const void* p, size_t bytes) {
    std::lock_guard<std::mutex> lock(memory_mutex);
    if (bytes)
        pinned[(const unsigned char*)p] = bytes;
    else
        pinned.erase((const unsigned char*)p);
}
Result cuMemHostAlloc(void** p, size_t bytes, unsigned) {
    *p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!*p) return OUT_OF_MEMORY;
    return pin(*p, bytes), SUCCESS;
}
Result cuMemFreeHost(void* p) { return pin(p, 0), free(p), SUCCESS; }
Result cuMemHostRegister_v2(void* p, size_t bytes, unsigned) {
    if (is_pinned(p)) return 712; // already registered
    return pin(p, bytes), SUCCESS;
}
Result cuMemHostUnregister(void* p) { return pin(p, 0), SUCCESS; }
Result cuMemHostGetDevicePointer_v2(uint64_t* device, void* p, unsigned) { return *device = (uint64_t)p, SUCCESS; }

Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    NEED_CONTEXT
    *least = *greatest = 0;
    return SUCCESS;
}
Result cuStreamCreateWithPriority(Stream** s, unsigned, int) {
    NEED_CONTEXT
    std::lock_guard<std::mutex> lock(streams_mutex);
    streams.insert(*s = new Stream);
    return SUCCESS;
}
Result cuStreamDestroy_v2(Stream* s) {
    {
        std::lock_guard<std::mutex> lock(streams_mutex);
        streams.erase(s);
    }
    return s->wait(), delete s, SUCCESS;
}
Result cuStreamSynchronize(Stream* s) { return of(s).wait(); }
Result cuStreamQuery(Stream* s) {
    ENTER
    std::lock_guard<std::mutex> lock(of(s).mutex);
    return of(s).queue.empty() && !of(s).busy ? of(s).error.load() : NOT_READY;
}
Result cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, Stream* s) {
    ENTER
    CHECK_COPY(s, to, from)
    if (is_pinned(from)) return of(s).add([=] { memcpy((void*)to, from, bytes); }), SUCCESS;
    auto* begin = (const unsigned char*)from;
    auto staged = std::make_shared<std::vector<unsigned char>>(begin, begin + bytes);
    return of(s).add([=] { memcpy((void*)to, staged->data(), bytes); }), SUCCESS;
}
Result cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, Stream* s) {
    CHECK_COPY(s, to, from)
    return of(s).add([=] { memcpy(to, (void*)from, bytes); }), SUCCESS;
}
Result cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, Stream* s) {
    CHECK_COPY(s, to, from)
    return of(s).add([=] { memmove((void*)to, (void*)from, bytes); }), SUCCESS;
}
// Of host memory that is not pinned, all is read when it is asked for.
struct Copy2D {
    size_t from_x, from_y;
    int from_type;
    const void* from_host;
    uint64_t from_device;
    void* from_array;
    size_t from_pitch, to_x, to_y;
    int to_type;
    void* to_host;
    uint64_t to_device;
    void* to_array;
    size_t to_pitch, bytes, rows;
};
Result cuMemcpy2DAsync_v2(const Copy2D* copy, Stream* s) {
    ENTER
    const Copy2D c = *copy;
    if (c.from_type != 1 || c.to_type != 2 || c.from_x || c.from_y || c.to_x || c.to_y) return INVALID_VALUE;
    if (c.bytes > c.from_pitch || c.bytes > c.to_pitch) return INVALID_VALUE;
    CHECK_COPY(s, c.to_device, c.from_host)
    auto* from = (const unsigned char*)c.from_host;
    auto staged = std::make_shared<std::vector<unsigned char>>();
    if (!is_pinned(from)) {
        for (size_t row = 0; row < c.rows; row++)
            staged->insert(staged->end(), from + row * c.from_pitch, from + row * c.from_pitch + c.bytes);
    }
    of(s).add([=] {
        for (size_t row = 0; row < c.rows; row++)
            memcpy((unsigned char*)c.to_device + row * c.to_pitch,
                staged->empty() ? from + row * c.from_pitch : staged->data() + row * c.bytes, c.bytes);
    });
    return SUCCESS;
}
Result cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, Stream* s) {
    return of(s).add([=] { memset((void*)to, value, bytes); }), SUCCESS;
}

Result cuLaunchHostFunc(Stream* s, void (*function)(void*), void* data) {
    return of(s).add([=] { function(data); }), SUCCESS;
}

Result cuEventCreate(Event** e, unsigned) {
    NEED_CONTEXT
    return *e = new Event, SUCCESS;
}
Result cuEventDestroy_v2(Event* e) { return delete e, SUCCESS; }
Result cuEventRecord(Event* e, Stream* s) {
    std::shared_ptr<Graph> capture = of(s).capturing();
    std::lock_guard<std::mutex> lock(e->mutex);
    e->capture = capture;
    if (capture) return SUCCESS;
    uint64_t number = ++e->recorded;
    of(s).add([=] {
        std::lock_guard<std::mutex> lock(e->mutex);
        e->done = number;
        e->time = now();
        e->changed.notify_all();
    });
    return SUCCESS;
}
// External: a recorded pass sets it whenever it runs.
Result cuEventRecordWithFlags(Event* e, Stream* s, unsigned flags) {
    if (flags == 0) return cuEventRecord(e, s);
    if (flags != 1 || !of(s).capturing()) return INVALID_VALUE;
    of(s).add([=] {
        std::lock_guard<std::mutex> lock(e->mutex);
        e->time = now();
    });
    return SUCCESS;
}
static void wait_event(Event* e, uint64_t number) {
    std::unique_lock<std::mutex> lock(e->mutex);
    e->changed.wait(lock, [=] { return e->done >= number; });
}
Result cuStreamWaitEvent(Stream* s, Event* e, unsigned) {
    if (e->capture && !e->capture->ended) return of(s).capture = e->capture, SUCCESS;
    uint64_t number = e->recorded;
    return of(s).add([=] { wait_event(e, number); }), SUCCESS;
}
Result cuEventSynchronize(Event* e) { return wait_event(e, e->recorded), SUCCESS; }
Result cuEventQuery(Event* e) {
    std::lock_guard<std::mutex> lock(e->mutex);
    return e->done >= e->recorded ? SUCCESS : NOT_READY;
}
Result cuEventElapsedTime_v2(float* ms, Event* from, Event* to) {
    return *ms = (float)(1e3 * (to->time - from->time)), SUCCESS;
}
Result cuEventElapsedTime(float* ms, Event* from, Event* to) { return cuEventElapsedTime_v2(ms, from, to); }

Result cuModuleLoadData(void** module, const void*) { return *module = (void*)1, SUCCESS; }
Result cuModuleUnload(void*) { return SUCCESS; }
Result cuModuleGetFunction(const Kernel** function, void*, const char* name) {
    auto found = kernels().find(name);
    if (found == kernels().end()) return NOT_FOUND;
    return *function = &found->second, SUCCESS;
}
Result cuFuncSetAttribute(const Kernel*, int, int) { return SUCCESS; }
Result cuFuncGetAttribute(int* value, int attribute, const Kernel* k) {
    return *value = attribute == 0 ? (int)k->threads : 0, SUCCESS; // 0: threads of a block
}
Result cuFuncGetParamInfo(const Kernel* k, size_t i, size_t* offset, size_t* size) {
    if (i >= k->parameter_bytes.size()) return INVALID_VALUE;
    return *offset = 0, *size = k->parameter_bytes[i], SUCCESS; // Moebius does not read offsets
}

static Result launch(const Kernel* k, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
    unsigned shared, Stream* s, void** parameters, bool early) {
    if (own_device < 0 || of(s).device != own_device) return INVALID_CONTEXT;
    if (gx == 0 || gy == 0 || gz == 0 || gy > 65535 || gz > 65535 || shared > SHARED) return INVALID_VALUE;
    const unsigned threads = bx * by * bz;
    // The one kernel whose blocks may be smaller, of whole warps (experts_gemv.cu).
    const bool may_be_smaller = strncmp(k->name, "experts_down_gemv_", 18) == 0;
    if (may_be_smaller ? threads == 0 || threads > k->threads || threads % 32 : threads != k->threads) {
        fprintf(stderr, "kernel %s is for %u threads and was given %u\n", k->name, k->threads, threads);
        return INVALID_VALUE;
    }
    // Parameters are copied now, as a driver does.
    struct Arguments {
        std::vector<std::vector<unsigned char>> bytes;
        std::vector<void*> pointers;
    };
    auto arguments = std::make_shared<Arguments>();
    for (size_t i = 0; i < k->parameter_bytes.size(); i++) {
        auto* from = (const unsigned char*)parameters[i];
        arguments->bytes.emplace_back(from, from + k->parameter_bytes[i]);
    }
    for (auto& bytes : arguments->bytes) arguments->pointers.push_back(bytes.data());
    of(s).add([=] {
        std::atomic<Result>& error = Stream::running->error;
        const Launch launch{k, {gx, gy, gz}, {bx, by, bz}, shared, arguments->pointers.data()};
        for (unsigned z = 0; z < gz; z++)
            for (unsigned y = 0; y < gy; y++)
                for (unsigned x = 0; x < gx && error == SUCCESS; x++) {
                    const BlockEnd end = run_block(launch, dim3{x, y, z});
                    if (end.failed) error = ILLEGAL_ADDRESS;
                    if (end.failed || !early || end.waits == threads) continue;
                    fprintf(stderr,
                        "kernel %s was let begin early, and %u of its %u threads waited for the one in front of it\n",
                        k->name, end.waits, threads);
                    abort();
                }
    });
    return SUCCESS;
}
Result cuLaunchKernel(const Kernel* k, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
    unsigned shared, Stream* s, void** parameters, void**) {
    return launch(k, gx, gy, gz, bx, by, bz, shared, s, parameters, false);
}

struct LaunchAttribute {
    int id, unused;
    union {
        char bytes[64];
        int number;
    };
};
struct LaunchConfig {
    unsigned gx, gy, gz, bx, by, bz, shared;
    Stream* stream;
    const LaunchAttribute* attributes;
    unsigned count;
};
Result cuLaunchKernelEx(const LaunchConfig* c, const Kernel* k, void** parameters, void**) {
    ENTER
    const bool early =
        c->count == 1 && c->attributes[0].id == 6 && c->attributes[0].number == 1; // programmatic stream serialization
    if (c->count > 1 || (c->count && !early)) return INVALID_VALUE;
    return launch(k, c->gx, c->gy, c->gz, c->bx, c->by, c->bz, c->shared, c->stream, parameters, early);
}

// What the kernels use of it: 16-bit numbers, three dimensions, rows of 128 bytes, swizzled.
Result cuTensorMapEncodeTiled(TensorMap* map, int type, unsigned rank, void* base, const uint64_t* dims,
    const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int, int fill) {
    if (type != 9 || rank != 3 || (uint64_t)base % 16 || strides[0] % 16 || strides[1] % 16 || box[0] != 64 ||
        box[1] > 256 || box[2] != 1 || steps[0] != 1 || steps[1] != 1 || steps[2] != 1 || interleave || swizzle != 3 ||
        fill)
        return INVALID_VALUE;
    memset(map, 0, 128); // as large as the real one
    *map = TensorMap{(uint64_t)base, {dims[0], dims[1], dims[2]}, {strides[0], strides[1]}, {box[0], box[1], box[2]}};
    return SUCCESS;
}

Result cuStreamBeginCapture_v2(Stream* s, int) { return of(s).capture = std::make_shared<Graph>(), SUCCESS; }
// A capture forbids nothing here.
Result cuThreadExchangeStreamCaptureMode(int*) { return SUCCESS; }
Result cuStreamGetCaptureInfo_v3(Stream* s, int* status, uint64_t* id, void*, void*, void*, void*) {
    const auto capture = of(s).capturing();
    *status = capture ? 1 : 0;
    if (capture && id) *id = capture->id;
    return SUCCESS;
}
Result cuStreamEndCapture(Stream* s, Graph** graph) {
    *graph = new Graph(*of(s).capture);
    of(s).capture->ended = true;
    return SUCCESS;
}
Result cuGraphInstantiateWithFlags(Graph** exec, Graph* graph, unsigned long long) {
    return *exec = new Graph(*graph), SUCCESS;
}
Result cuGraphDestroy(Graph* graph) { return delete graph, SUCCESS; }
Result cuGraphExecDestroy(Graph* graph) { return delete graph, SUCCESS; }
Result cuGraphUpload(Graph*, Stream*) { return SUCCESS; }
Result cuGraphLaunch(Graph* graph, Stream* s) {
    ENTER
    for (const Work& work : graph->work) of(s).add(work);
    return SUCCESS;
}
Result cuGetErrorName(Result error, const char** name) {
    static thread_local char text[32];
    snprintf(text, sizeof text, "error %d", error);
    return *name = text, SUCCESS;
}
Result cuGetErrorString(Result error, const char** text) { return cuGetErrorName(error, text); }

} // extern "C"
