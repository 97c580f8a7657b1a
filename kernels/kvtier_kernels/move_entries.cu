// A fold's compaction: entries of the paged pool move to other slots, in all layers at once.
//
// A part is one pool's rows, a row per slot: K or V or the biases of one layer. A thread block
// moves one slice of one part: the same bytes of every row that moves. It reads all of them into
// shared memory before it writes the first, and no other block touches that slice, so sources and
// targets may overlap in any way.
//
// Launch: grid (slices of the longest row, parts), any number of threads; at most 1,024 entries, so
// that a slice is no less than one 32-byte sector of memory. Bytes move 16 at a time where rows
// allow it, else 4, else 1.

constexpr int STAGE_BYTES = 32768;

// One pool: where its first slot lies, and the bytes of a slot. Both fields are 8 bytes (see
// plans.py).
struct Part {
    unsigned char* rows;
    long long row_bytes;
};

struct Slice {
    unsigned char* rows;
    long long row_bytes;
    long long bytes;  // of each row
};

__device__ long long checked(long long slot, long long pool_slots) {
    if (slot < 0 || slot >= pool_slots) {
        __trap();  // never another pool's bytes under this one's name
    }
    return slot;
}

template <typename Word>
__device__ void move_slice(const Slice& slice, const long long* sources, const long long* targets,
                           long long entries, long long pool_slots, void* stage) {
    const long long words = slice.bytes / static_cast<long long>(sizeof(Word));
    Word* staged = static_cast<Word*>(stage);
    for (long long i = threadIdx.x; i < entries * words; i += blockDim.x) {
        const long long slot = checked(sources[i / words], pool_slots);
        staged[i] = reinterpret_cast<const Word*>(slice.rows + slot * slice.row_bytes)[i % words];
    }
    __syncthreads();
    for (long long i = threadIdx.x; i < entries * words; i += blockDim.x) {
        const long long slot = checked(targets[i / words], pool_slots);
        reinterpret_cast<Word*>(slice.rows + slot * slice.row_bytes)[i % words] = staged[i];
    }
}

extern "C" __global__ void move_entries(const Part* parts, const long long* sources,
                                        const long long* targets, long long entries,
                                        long long pool_slots, long long slice_bytes) {
    __shared__ int4 stage[STAGE_BYTES / sizeof(int4)];
    const Part part = parts[blockIdx.y];
    const long long first = blockIdx.x * slice_bytes;
    if (first >= part.row_bytes) {
        return;  // this part's rows are shorter than the longest
    }
    const long long rest = part.row_bytes - first;
    const Slice slice = {part.rows + first, part.row_bytes,
                         rest < slice_bytes ? rest : slice_bytes};
    const unsigned long long alignment = reinterpret_cast<unsigned long long>(part.rows) |
                                         static_cast<unsigned long long>(part.row_bytes);
    if (alignment % sizeof(int4) == 0) {
        move_slice<int4>(slice, sources, targets, entries, pool_slots, stage);
    } else if (alignment % sizeof(unsigned int) == 0) {
        move_slice<unsigned int>(slice, sources, targets, entries, pool_slots, stage);
    } else {
        move_slice<unsigned char>(slice, sources, targets, entries, pool_slots, stage);
    }
}
