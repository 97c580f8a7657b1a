// A small emulation of CUDA's launch grid, so that a kernel's source runs on the CPU as it stands.
//
// Thread blocks and threads run one after another in index order; kernels that need threads to wait
// for each other are out of its reach. A trap ends the launch, as it does on a GPU.
#pragma once

struct dim3 {
    unsigned int x = 1, y = 1, z = 1;
};

struct alignas(16) int4 {
    int x, y, z, w;
};

struct Trap {};

static dim3 gridDim, blockDim, blockIdx, threadIdx;

[[noreturn]] static void __trap() { throw Trap(); }

#define __global__
#define __device__

// Runs a kernel over a one-dimensional grid; true unless it trapped.
template <typename Kernel, typename... Arguments>
static bool launch(Kernel kernel, unsigned int blocks, unsigned int threads,
                   Arguments... arguments) {
    gridDim.x = blocks;
    blockDim.x = threads;
    try {
        for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
            for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {
                kernel(arguments...);
            }
        }
    } catch (const Trap&) {
        return false;
    }
    return true;
}
