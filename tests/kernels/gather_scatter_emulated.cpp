// gather_scatter.cu on the emulated grid, for ctypes.
#include "launch_grid.h"

#include "gather_scatter.cu"

extern "C" bool emulate_gather(const Copy* copy, unsigned int blocks, unsigned int threads) {
    return launch(gather_blocks, blocks, threads, copy);
}

extern "C" bool emulate_scatter(const Copy* copy, unsigned int blocks, unsigned int threads) {
    return launch(scatter_blocks, blocks, threads, copy);
}
