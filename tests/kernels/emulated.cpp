// Every kernel on the emulated grid, by name and with its arguments as words, for ctypes.
#include "launch_grid.h"

#include <string>
#include <type_traits>
#include <utility>

#include "attention.cu"
#include "move_entries.cu"
#include "scatter.cu"

namespace {

using emulation::launch;
using Word = unsigned long long;

template <typename Argument>
Argument from_word(Word word) {
    if constexpr (std::is_pointer_v<Argument>) {
        return reinterpret_cast<Argument>(word);
    } else {
        return static_cast<Argument>(word);
    }
}

struct Request {
    std::string kernel;
    dim3 grid;
    unsigned int threads;
    bool backwards;
    const Word* words;
};

template <typename... Arguments, size_t... places>
Outcome run(const Request& request, void (*kernel)(Arguments...), std::index_sequence<places...>) {
    return launch(request.grid, request.threads, request.backwards,
                  [&] { kernel(from_word<Arguments>(request.words[places])...); });
}

template <typename... Arguments>
bool is_it(const Request& request, const char* name, void (*kernel)(Arguments...), int* outcome) {
    if (request.kernel != name) {
        return false;
    }
    *outcome = static_cast<int>(run(request, kernel, std::index_sequence_for<Arguments...>()));
    return true;
}

#define IS(kernel) is_it(request, #kernel, kernel, &outcome)
#define IS_FOR(D) IS(attend_chunks_##D) || IS(find_masses_##D) || IS(score_chunks_##D)

}  // namespace

extern "C" int emulate(const char* kernel, unsigned int x, unsigned int y, unsigned int z,
                       unsigned int threads, bool backwards, const Word* words) {
    const Request request = {kernel, {x, y, z}, threads, backwards, words};
    int outcome = -1;
    const bool known = IS(scatter_blocks) || IS(move_entries) || IS(merge_chunks) ||
                       IS(measure_groups) || IS_FOR(32) || IS_FOR(64) || IS_FOR(128);
    return known ? outcome : -1;
}

extern "C" long long constant(const char* name) {
    const std::pair<const char*, long long> constants[] = {
        {"THREADS", THREADS},
        {"CHUNK_KEYS", KEYS},
        {"SCORE_QUERIES", SCORE_QUERIES},
        {"GROUP_MAX", GROUP_MAX},
        {"MOVE_STAGE_BYTES", STAGE_BYTES},
    };
    for (const auto& [known, value] : constants) {
        if (std::string(known) == name) {
            return value;
        }
    }
    return -1;
}
