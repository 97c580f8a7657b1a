// A small emulation of CUDA's launch grid, so that a kernel's source runs on the CPU as it stands.
//
// Thread blocks run one after another. A block's threads are contexts of their own that take turns,
// each until it has to wait for others: at __syncthreads for the block, at a shuffle for its warp.
// Turns go forwards or backwards, and a kernel that forgets a barrier reads what has not been
// written yet in one of the two. Threads that wait where others have ended, or for different
// things, are told as a deadlock. A trap ends the launch, as it does on a GPU.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

struct dim3 {
    unsigned int x = 1, y = 1, z = 1;
};

struct alignas(16) int4 {
    int x, y, z, w;
};

struct alignas(16) float4 {
    float x, y, z, w;
};

static dim3 gridDim, blockDim, blockIdx, threadIdx;

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)

enum class Outcome { done, trapped, deadlocked };

namespace emulation {

constexpr unsigned int WARP = 32;
constexpr size_t STACK_BYTES = 128 * 1024;

enum class Wait { none, block, warp, ended };

struct Trap {};

struct Thread {
    ucontext_t context;
    std::vector<char> stack;
    Wait wait = Wait::none;
    float given[2] = {};       // to the last two shuffles: a fast neighbour may be one ahead
    unsigned int shuffles = 0;
};

static std::vector<Thread> threads;
static ucontext_t scheduler;
static bool trapped;
static void (*body)(const void*);
static const void* bound;

static void wait_for(Wait wait) {
    Thread& self = threads[threadIdx.x];
    self.wait = wait;
    swapcontext(&self.context, &scheduler);
}

static void run_thread() {
    try {
        body(bound);
    } catch (const Trap&) {
        trapped = true;
    }
    threads[threadIdx.x].wait = Wait::ended;
}

// Lets threads from..to go on if all of them wait for `wait`.
static bool release(size_t from, size_t to, Wait wait) {
    for (size_t i = from; i < to; ++i) {
        if (threads[i].wait != wait) {
            return false;
        }
    }
    for (size_t i = from; i < to; ++i) {
        threads[i].wait = Wait::none;
    }
    return true;
}

static bool release_waiting() {
    bool any = release(0, threads.size(), Wait::block);
    for (size_t from = 0; from < threads.size(); from += WARP) {
        const size_t to = std::min<size_t>(from + WARP, threads.size());
        any |= release(from, to, Wait::warp);
    }
    return any;
}

static Outcome run_block(bool backwards) {
    const unsigned int count = threads.size();
    for (Thread& thread : threads) {
        thread.wait = Wait::none;
        thread.shuffles = 0;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = thread.stack.size();
        thread.context.uc_link = &scheduler;
        makecontext(&thread.context, run_thread, 0);
    }
    do {
        for (unsigned int turn = 0; turn < count && !trapped; ++turn) {
            threadIdx.x = backwards ? count - 1 - turn : turn;
            if (threads[threadIdx.x].wait == Wait::none) {
                swapcontext(&scheduler, &threads[threadIdx.x].context);
            }
        }
    } while (!trapped && release_waiting());
    if (trapped) {
        return Outcome::trapped;
    }
    return release(0, count, Wait::ended) ? Outcome::done : Outcome::deadlocked;
}

// Runs a kernel over a grid.
template <typename Kernel>
static Outcome launch(dim3 grid, unsigned int thread_count, bool backwards, const Kernel& kernel) {
    gridDim = grid;
    blockDim.x = thread_count;
    threads.resize(thread_count);
    for (Thread& thread : threads) {
        thread.stack.resize(STACK_BYTES);
    }
    body = [](const void* bound_kernel) { (*static_cast<const Kernel*>(bound_kernel))(); };
    bound = &kernel;
    trapped = false;
    for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z) {
        for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
            for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
                const Outcome outcome = run_block(backwards);
                if (outcome != Outcome::done) {
                    return outcome;
                }
            }
        }
    }
    return Outcome::done;
}

}  // namespace emulation

[[noreturn]] static void __trap() { throw emulation::Trap(); }

[[maybe_unused]] static void __syncthreads() { emulation::wait_for(emulation::Wait::block); }

[[maybe_unused]] static float __shfl_xor_sync(unsigned int, float value, unsigned int lanes) {
    emulation::Thread& self = emulation::threads[threadIdx.x];
    const unsigned int shuffle = self.shuffles++ % 2;
    self.given[shuffle] = value;
    emulation::wait_for(emulation::Wait::warp);
    return emulation::threads[threadIdx.x ^ lanes].given[shuffle];
}

[[maybe_unused]] static int __float_as_int(float value) {
    int bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

[[maybe_unused]] static float __int_as_float(int bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

[[maybe_unused]] static int atomicMax(int* address, int value) {
    const int before = *address;
    *address = std::max(before, value);
    return before;
}
