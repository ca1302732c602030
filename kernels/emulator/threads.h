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

// Runs one block to its end on the calling thread.
BlockEnd run_block(const Launch& launch, dim3 at);

} // namespace emulator
