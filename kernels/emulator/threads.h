// What driver.cc knows of threads.cc.
#pragma once
#include "device.h"

namespace emulator {

// Runs one block of a kernel to its end on the calling thread. Returns how many of its threads waited for the previous
// kernel.
unsigned run_block(const Kernel& kernel, dim3 at, dim3 grid, dim3 threads, void** parameters);

} // namespace emulator
