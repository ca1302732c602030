// What driver.cc knows of threads.cc.
#pragma once
#include "device.h"

namespace emulator {

// A grid of a kernel.
struct Launch {
    const Kernel* kernel;
    dim3 grid, threads;
    size_t shared_bytes; // dynamic
    void** parameters;
};

struct BlockEnd {
    bool failed;    // it touched memory outside of every buffer
    unsigned waits; // threads that waited for the previous kernel
};

// Whether the device of the calling stream may access what is there. Of driver.cc.
bool may_access_peer(const void* address);

// Runs one block to its end on the calling thread.
BlockEnd run_block(const Launch& launch, dim3 at);

} // namespace emulator
