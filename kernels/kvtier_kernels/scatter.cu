// The copy of a swap-in: contiguous block records to pages of an engine's paged pools.
//
// A record holds, for each layer, K then V of one page; the pools' addresses stand in that order
// (K and V of layer 0, K and V of layer 1, ...). A page's K or V lies in the pool as outer x inner
// runs of bytes, and in the record as the same runs without gaps. A segment is one page's K or V;
// the grid strides over segments, so that any number of thread blocks (a few, to leave the other
// multiprocessors to decoding) does the whole copy, and a block's threads share one segment.
//
// Bytes are copied 16 at a time where source and destination allow it, else 4, else 1.

// What to copy; every field is 8 bytes and the pools' addresses follow the last one, so that one
// small array of integers describes a launch (see geometry.py).
struct Copy {
    const long long* pages;
    const unsigned char* records;
    long long parts;  // layers x 2
    long long record_count;
    long long record_stride_bytes;
    long long pool_pages;
    long long page_stride_bytes;
    long long outer_runs;
    long long outer_stride_bytes;
    long long inner_runs;
    long long inner_stride_bytes;
    long long run_bytes;
};

template <typename Word>
__device__ void copy_words(unsigned char* to, const unsigned char* from, long long bytes) {
    const long long words = bytes / static_cast<long long>(sizeof(Word));
    Word* to_words = reinterpret_cast<Word*>(to);
    const Word* from_words = reinterpret_cast<const Word*>(from);
    for (long long i = threadIdx.x; i < words; i += blockDim.x) {
        to_words[i] = from_words[i];
    }
    for (long long i = words * sizeof(Word) + threadIdx.x; i < bytes; i += blockDim.x) {
        to[i] = from[i];
    }
}

__device__ void copy_run(unsigned char* to, const unsigned char* from, long long bytes) {
    const unsigned long long addresses =
        reinterpret_cast<unsigned long long>(to) | reinterpret_cast<unsigned long long>(from);
    if (addresses % sizeof(int4) == 0) {
        copy_words<int4>(to, from, bytes);
    } else if (addresses % sizeof(unsigned int) == 0) {
        copy_words<unsigned int>(to, from, bytes);
    } else {
        copy_words<unsigned char>(to, from, bytes);
    }
}

__device__ void copy_segment(const Copy& copy, const unsigned long long* pools, long long segment) {
    const long long record = segment / copy.parts;
    const long long part = segment % copy.parts;
    const long long page = copy.pages[record];
    if (page < 0 || page >= copy.pool_pages) {
        __trap();  // never another page's bytes under this one's name
    }
    unsigned char* pool =
        reinterpret_cast<unsigned char*>(pools[part]) + page * copy.page_stride_bytes;
    const unsigned char* packed = copy.records + record * copy.record_stride_bytes +
                            part * copy.outer_runs * copy.inner_runs * copy.run_bytes;
    for (long long outer = 0; outer < copy.outer_runs; ++outer) {
        for (long long inner = 0; inner < copy.inner_runs; ++inner) {
            unsigned char* paged =
                pool + outer * copy.outer_stride_bytes + inner * copy.inner_stride_bytes;
            copy_run(paged, packed, copy.run_bytes);
            packed += copy.run_bytes;
        }
    }
}

extern "C" __global__ void scatter_blocks(const Copy* launch) {
    const Copy copy = *launch;
    const unsigned long long* pools = reinterpret_cast<const unsigned long long*>(launch + 1);
    const long long segments = copy.record_count * copy.parts;
    for (long long segment = blockIdx.x; segment < segments; segment += gridDim.x) {
        copy_segment(copy, pools, segment);
    }
}
