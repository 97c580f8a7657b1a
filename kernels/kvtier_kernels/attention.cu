// What queries see of entries in the paged pool: decode attention with a bias on the logit of each
// (entry, kv head), and the score pass of a fold, which asks how much attention each entry gets.
//
// A pool holds [slots, kv_heads, D] floats, contiguous. A thread block works on chunks of KEYS
// entries of one kv head: it copies their keys to shared memory, coalesced and 16 bytes at a time,
// and each thread multiplies QUERIES_EACH queries by KEYS_EACH keys. Rows in shared memory are an
// odd number of float4 apart, so that neighbours' reads meet no bank twice.
//
// Every sum has an order of its own that depends on one row's, or one (layer, kv head)'s, entries
// alone: the same input gives the same bits, whatever else is in the launch. Maxima are exact in
// any order.
//
// Launches have THREADS threads; D is 32, 64 or 128; a kv head has at most GROUP_MAX query heads.
// All scalars are 8 bytes (see plans.py).

constexpr int THREADS = 128;
constexpr int WARP = 32;
constexpr int KEYS = 64;
constexpr int KEY_LANES = 16;
constexpr int KEYS_EACH = KEYS / KEY_LANES;
constexpr int QUERY_LANES = THREADS / KEY_LANES;
constexpr int GROUP_MAX = QUERY_LANES;
constexpr int SCORE_QUERIES = 2 * QUERY_LANES;
constexpr int SCORE_ROW = KEYS + KEY_LANES;  // two query lanes of a warp write to other banks

template <int D>
constexpr int ROW = D / 4 | 1;  // float4s from one row of a tile to the next

// What a chunk of decode attention keeps in one place: first its keys, then the sums of its slices.
template <int D>
constexpr int SCRATCH = KEYS * ROW<D> > THREADS * GROUP_MAX ? KEYS * ROW<D> : THREADS * GROUP_MAX;

__device__ float no_score() { return __int_as_float(static_cast<int>(0xff800000)); }  // -infinity

__device__ float dot(const float4& a, const float4& b, float sum) {
    return sum + a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}

// Sum or maximum over the `lanes` threads side by side; every one of them gets the same bits.
template <int lanes>
__device__ float sum_over(float value) {
    for (int step = lanes / 2; step > 0; step /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, step);
    }
    return value;
}

template <int lanes>
__device__ float largest_of(float value) {
    for (int step = lanes / 2; step > 0; step /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
    }
    return value;
}

// The first slots of a chunk; `count` of them, at most KEYS.
__device__ void load_places(long long* places, const long long* slots, int count,
                            long long pool_slots) {
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const long long slot = slots[i];
        if (slot < 0 || slot >= pool_slots) {
            __trap();  // never another sequence's entries under this one's name
        }
        places[i] = slot;
    }
}

// One kv head's keys at these places; rows from `count` on are left as they are.
template <int D>
__device__ void load_keys(float4* tile, const float* pool, const long long* places, int count,
                          int kv_heads, int head) {
    constexpr int COLUMNS = D / 4;
#pragma unroll 4
    for (int i = threadIdx.x; i < KEYS * COLUMNS; i += THREADS) {
        const int key = i / COLUMNS, column = i % COLUMNS;
        if (key < count) {
            const float* row = pool + (places[key] * kv_heads + head) * D;
            tile[key * ROW<D> + column] = reinterpret_cast<const float4*>(row)[column];
        }
    }
}

// `count` queries of one kv head, scaled. They are numbered row by row, `group` in each: query i is
// head i % group of row i / group.
template <int D>
__device__ void load_queries(float4* tile, const float* queries, long long row_stride, int group,
                             int first, int count) {
    constexpr int COLUMNS = D / 4;
    const float scale = 1.0f / sqrtf(static_cast<float>(D));
    for (int i = threadIdx.x; i < count * COLUMNS; i += THREADS) {
        const int query = first + i / COLUMNS, column = i % COLUMNS;
        const float* row = queries + query / group * row_stride + query % group * D;
        float4 part = reinterpret_cast<const float4*>(row)[column];
        part.x *= scale, part.y *= scale, part.z *= scale, part.w *= scale;
        tile[i / COLUMNS * ROW<D> + column] = part;
    }
}

// The logits of a thread's queries (its lane, and every QUERY_LANES-th from there) and its keys
// (its lane, and every KEY_LANES-th).
template <int D, int QUERIES_EACH>
__device__ void multiply(float (&scores)[QUERIES_EACH][KEYS_EACH], const float4* queries,
                         const float4* keys) {
    const float4* my_queries = queries + threadIdx.x / KEY_LANES * ROW<D>;
    const float4* my_keys = keys + threadIdx.x % KEY_LANES * ROW<D>;
    for (int i = 0; i < QUERIES_EACH; ++i) {
        for (int j = 0; j < KEYS_EACH; ++j) {
            scores[i][j] = 0.0f;
        }
    }
#pragma unroll 4
    for (int column = 0; column < D / 4; ++column) {
        float4 key[KEYS_EACH];
#pragma unroll
        for (int j = 0; j < KEYS_EACH; ++j) {
            key[j] = my_keys[j * KEY_LANES * ROW<D> + column];
        }
#pragma unroll
        for (int i = 0; i < QUERIES_EACH; ++i) {
            const float4 query = my_queries[i * QUERY_LANES * ROW<D> + column];
#pragma unroll
            for (int j = 0; j < KEYS_EACH; ++j) {
                scores[i][j] = dot(query, key[j], scores[i][j]);
            }
        }
    }
}

// ------------------------------------------------------------------------------ decode attention

// One chunk of one row's entries, seen by one kv head's queries; blocks are (chunk, kv head, row).
// `biases` may be null; `weights`, if it is not, gets exp(logit - the chunk's maximum) of every
// entry.
struct Attention {
    const float* queries;
    long long query_stride;
    const float* keys;
    const float* values;
    const float* biases;
    const long long* entries;
    const long long* starts;
    long long pool_slots;
    long long group;
    float4* sums;     // [rows, heads, chunks, D]: the values, weighted
    float* tops;      // [rows, heads, chunks]: the logits' maximum
    float* masses;    // [rows, heads, chunks]: the weights' sum
    float* weights;   // [rows, heads, chunks, KEYS]
};

// A chunk's logits become weights; a warp takes a head at a time.
__device__ void weigh(float (*scores)[SCORE_ROW], const Attention& a, long long first_lane) {
    const int lane = threadIdx.x % WARP;
    for (int head = threadIdx.x / WARP; head < a.group; head += THREADS / WARP) {
        float* row = scores[head];
        const float top = largest_of<WARP>(fmaxf(row[lane], row[lane + WARP]));
        const float near = expf(row[lane] - top), far = expf(row[lane + WARP] - top);
        const float mass = sum_over<WARP>(near + far);
        row[lane] = near;
        row[lane + WARP] = far;
        const long long at = (first_lane + head) * gridDim.x + blockIdx.x;
        if (lane == 0) {
            a.tops[at] = top;
            a.masses[at] = mass;
        }
        if (a.weights != nullptr) {
            a.weights[at * KEYS + lane] = near;
            a.weights[at * KEYS + lane + WARP] = far;
        }
    }
}

// The values of a chunk, weighted, for each query head. A thread sums up one column of every
// SLICES-th entry; the slices are then added in their order.
template <int D>
__device__ void sum_values(float4* slices, const float (*weights)[SCORE_ROW], const Attention& a,
                           const long long* places, int count, long long first_lane) {
    constexpr int COLUMNS = D / 4, SLICES = THREADS / COLUMNS;
    const int column = threadIdx.x % COLUMNS, slice = threadIdx.x / COLUMNS;
    const int group = static_cast<int>(a.group);
    float4 sums[GROUP_MAX] = {};
#pragma unroll 4
    for (int entry = slice; entry < count; entry += SLICES) {
        const float* row = a.values + (places[entry] * gridDim.y + blockIdx.y) * D;
        const float4 value = reinterpret_cast<const float4*>(row)[column];
#pragma unroll
        for (int head = 0; head < GROUP_MAX; ++head) {
            if (head < group) {
                const float weight = weights[head][entry];
                sums[head].x += weight * value.x;
                sums[head].y += weight * value.y;
                sums[head].z += weight * value.z;
                sums[head].w += weight * value.w;
            }
        }
    }
#pragma unroll
    for (int head = 0; head < GROUP_MAX; ++head) {
        if (head < group) {
            slices[(slice * group + head) * COLUMNS + column] = sums[head];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < group * COLUMNS; i += THREADS) {
        float4 total = slices[i];
        for (int other = 1; other < SLICES; ++other) {
            const float4 more = slices[other * group * COLUMNS + i];
            total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
        }
        const long long lane = first_lane + i / COLUMNS;
        a.sums[(lane * gridDim.x + blockIdx.x) * COLUMNS + i % COLUMNS] = total;
    }
}

template <int D>
__device__ void attend_chunk(const Attention& a) {
    __shared__ float4 scratch[SCRATCH<D>];
    __shared__ float4 queries[GROUP_MAX * ROW<D>];
    __shared__ float scores[GROUP_MAX][SCORE_ROW];
    __shared__ long long places[KEYS];
    const long long row = blockIdx.z, first = a.starts[row] + blockIdx.x * KEYS;
    const long long left = a.starts[row + 1] - first;
    if (left <= 0) {
        return;  // the row is shorter than the longest
    }
    const int count = left < KEYS ? static_cast<int>(left) : KEYS;
    const int group = static_cast<int>(a.group), kv_heads = gridDim.y, head = blockIdx.y;
    load_places(places, a.entries + first, count, a.pool_slots);
    load_queries<D>(queries, a.queries + row * a.query_stride + head * group * D, 0, group, 0,
                    group);
    __syncthreads();
    load_keys<D>(scratch, a.keys, places, count, kv_heads, head);
    __syncthreads();
    const int query = threadIdx.x / KEY_LANES;
    if (query < group) {
        float logits[1][KEYS_EACH];
        multiply<D, 1>(logits, queries, scratch);
        for (int j = 0; j < KEYS_EACH; ++j) {
            const int key = threadIdx.x % KEY_LANES + j * KEY_LANES;
            float logit = no_score();
            if (key < count) {
                logit = logits[0][j];
                if (a.biases != nullptr) {
                    logit += a.biases[places[key] * kv_heads + head];
                }
            }
            scores[query][key] = logit;
        }
    }
    __syncthreads();
    const long long first_lane = (row * kv_heads + head) * group;
    weigh(scores, a, first_lane);
    __syncthreads();
    sum_values<D>(scratch, scores, a, places, count, first_lane);
}

// The chunks of one row and head, put together from the front; a block has a thread per dimension
// and blocks are (head, row). `scales`, if it is not null, gets what turns a chunk's weights into
// shares. A row without entries gives zeros.
extern "C" __global__ void merge_chunks(const float* sums, const float* tops, const float* masses,
                                        const long long* starts, float* result, float* scales,
                                        long long chunks) {
    const long long row = blockIdx.y, lane = row * gridDim.x + blockIdx.x;
    const long long count = (starts[row + 1] - starts[row] + KEYS - 1) / KEYS;
    if (count > chunks) {
        __trap();  // the row is longer than the longest
    }
    float top = no_score(), mass = 0.0f, sum = 0.0f;
    for (long long chunk = lane * chunks; chunk < lane * chunks + count; ++chunk) {
        top = fmaxf(top, tops[chunk]);
    }
    for (long long chunk = lane * chunks; chunk < lane * chunks + count; ++chunk) {
        const float scale = expf(tops[chunk] - top);
        mass += scale * masses[chunk];
        sum += scale * sums[chunk * blockDim.x + threadIdx.x];
    }
    result[lane * blockDim.x + threadIdx.x] = count > 0 ? sum / mass : 0.0f;
    if (scales != nullptr) {
        for (long long i = threadIdx.x; i < count; i += blockDim.x) {
            scales[lane * chunks + i] = expf(tops[lane * chunks + i] - top) / mass;
        }
    }
}

// Raises each group's mass to the share of attention that one head of one row gives to its entries,
// if that is more; blocks are (head, row), and a warp sums up a group at a time. Shares are not
// negative, and such floats are ordered as their bits are.
extern "C" __global__ void measure_groups(const float* weights, const float* scales,
                                          const long long* groups, const long long* starts,
                                          int* masses, long long group_count, long long chunks) {
    const long long row = blockIdx.y, first = starts[row], length = starts[row + 1] - first;
    const long long lane = row * gridDim.x + blockIdx.x;
    for (long long group = threadIdx.x / WARP; group < group_count; group += THREADS / WARP) {
        float share = 0.0f;
        for (long long i = threadIdx.x % WARP; i < length; i += WARP) {
            if (groups[first + i] == group) {
                share += weights[lane * chunks * KEYS + i] * scales[lane * chunks + i / KEYS];
            }
        }
        share = sum_over<WARP>(share);
        if (threadIdx.x % WARP == 0) {
            atomicMax(masses + row * group_count + group, __float_as_int(share));
        }
    }
}

// ------------------------------------------------------------------------------------ score pass

// A step's entries and the queries that stand for those to come. Lanes are (layer, kv head); each
// has rows x group queries.
struct Scoring {
    const float* const* keys;  // a pool for each layer
    const long long* slots;
    const float* queries;  // [layers, rows, heads, D]
    float* tops;           // [lanes, queries]: the logits' maximum
    float* masses;         // [lanes, queries]: the sum of exp(logit - maximum)
    float* importance;     // [lanes, entries]
    long long entries;
    long long rows;
    long long group;
    long long pool_slots;
    long long squared;
};

// The queries of this block's lane: where the first one lies, and how many there are.
template <int D>
__device__ const float* lane_queries(const Scoring& s) {
    const long long heads = gridDim.y * s.group;
    return s.queries + (blockIdx.z * s.rows * heads + blockIdx.y * s.group) * D;
}

__device__ int at_most(long long left, int most) {
    return left < most ? static_cast<int>(left) : most;
}

// How SCORE_QUERIES queries' attention is normalised: blocks are (queries, kv head, layer). A
// half-warp has a query's scores and follows the maximum chunk by chunk.
template <int D>
__device__ void find_masses(const Scoring& s) {
    __shared__ float4 keys[KEYS * ROW<D>];
    __shared__ float4 queries[SCORE_QUERIES * ROW<D>];
    __shared__ long long places[KEYS];
    constexpr int EACH = SCORE_QUERIES / QUERY_LANES;
    const int group = static_cast<int>(s.group), first_query = blockIdx.x * SCORE_QUERIES;
    const int query_count = at_most(s.rows * s.group - first_query, SCORE_QUERIES);
    load_queries<D>(queries, lane_queries<D>(s), gridDim.y * s.group * D, group, first_query,
                    query_count);
    float tops[EACH], masses[EACH] = {};
    for (int i = 0; i < EACH; ++i) {
        tops[i] = no_score();
    }
    for (long long first = 0; first < s.entries; first += KEYS) {
        const int count = at_most(s.entries - first, KEYS);
        __syncthreads();  // the last chunk has been read
        load_places(places, s.slots + first, count, s.pool_slots);
        __syncthreads();
        load_keys<D>(keys, s.keys[blockIdx.z], places, count, gridDim.y, blockIdx.y);
        __syncthreads();
        float scores[EACH][KEYS_EACH];
        multiply<D, EACH>(scores, queries, keys);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            float top = tops[i], mass = 0.0f;
            for (int j = 0; j < KEYS_EACH; ++j) {
                const int key = threadIdx.x % KEY_LANES + j * KEY_LANES;
                scores[i][j] = key < count ? scores[i][j] : no_score();
                top = fmaxf(top, scores[i][j]);
            }
            top = largest_of<KEY_LANES>(top);
            for (int j = 0; j < KEYS_EACH; ++j) {
                mass += expf(scores[i][j] - top);
            }
            masses[i] = masses[i] * expf(tops[i] - top) + sum_over<KEY_LANES>(mass);
            tops[i] = top;
        }
    }
    const long long lane = blockIdx.z * gridDim.y + blockIdx.y;
    for (int i = 0; i < EACH; ++i) {
        const int query = threadIdx.x / KEY_LANES + i * QUERY_LANES;
        if (threadIdx.x % KEY_LANES == 0 && query < query_count) {
            s.tops[lane * s.rows * s.group + first_query + query] = tops[i];
            s.masses[lane * s.rows * s.group + first_query + query] = masses[i];
        }
    }
}

// How much attention KEYS entries get from all queries: the mean of their shares, or the root of
// the mean of the squares. Blocks are (chunk, kv head, layer); `find_masses` has run.
template <int D>
__device__ void score_chunk(const Scoring& s) {
    __shared__ float4 keys[KEYS * ROW<D>];
    __shared__ float4 queries[SCORE_QUERIES * ROW<D>];
    __shared__ long long places[KEYS];
    __shared__ float parts[QUERY_LANES][SCORE_ROW];
    constexpr int EACH = SCORE_QUERIES / QUERY_LANES;
    const int group = static_cast<int>(s.group), all = static_cast<int>(s.rows) * group;
    const long long first = blockIdx.x * KEYS, lane = blockIdx.z * gridDim.y + blockIdx.y;
    const int count = at_most(s.entries - first, KEYS);
    load_places(places, s.slots + first, count, s.pool_slots);
    __syncthreads();
    load_keys<D>(keys, s.keys[blockIdx.z], places, count, gridDim.y, blockIdx.y);
    float sums[KEYS_EACH] = {};
    for (int first_query = 0; first_query < all; first_query += SCORE_QUERIES) {
        const int query_count = at_most(all - first_query, SCORE_QUERIES);
        __syncthreads();  // the last queries have been read
        load_queries<D>(queries, lane_queries<D>(s), gridDim.y * s.group * D, group, first_query,
                        query_count);
        __syncthreads();
        float scores[EACH][KEYS_EACH];
        multiply<D, EACH>(scores, queries, keys);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int query = threadIdx.x / KEY_LANES + i * QUERY_LANES;
            if (query < query_count) {
                const float top = s.tops[lane * all + first_query + query];
                const float mass = s.masses[lane * all + first_query + query];
                for (int j = 0; j < KEYS_EACH; ++j) {
                    const float share = expf(scores[i][j] - top) / mass;
                    sums[j] += s.squared ? share * share : share;
                }
            }
        }
    }
    for (int j = 0; j < KEYS_EACH; ++j) {
        parts[threadIdx.x / KEY_LANES][threadIdx.x % KEY_LANES + j * KEY_LANES] = sums[j];
    }
    __syncthreads();
    for (int key = threadIdx.x; key < count; key += THREADS) {
        float sum = 0.0f;
        for (int part = 0; part < QUERY_LANES; ++part) {
            sum += parts[part][key];
        }
        const float mean = sum / static_cast<float>(all);
        s.importance[lane * s.entries + first + key] = s.squared ? sqrtf(mean) : mean;
    }
}

#define KERNELS_FOR(D)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) attend_chunks_##D(                    \
        const float* queries, long long query_stride, const float* keys, const float* values,   \
        const float* biases, const long long* entries, const long long* starts,                 \
        long long pool_slots, long long group, float4* sums, float* tops, float* masses,        \
        float* weights) {                                                                       \
        attend_chunk<D>({queries, query_stride, keys, values, biases, entries, starts,          \
                         pool_slots, group, sums, tops, masses, weights});                      \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) find_masses_##D(                      \
        const float* const* keys, const long long* slots, const float* queries, float* tops,    \
        float* masses, float* importance, long long entries, long long rows, long long group,   \
        long long pool_slots, long long squared) {                                              \
        find_masses<D>({keys, slots, queries, tops, masses, importance, entries, rows, group,   \
                        pool_slots, squared});                                                  \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) score_chunks_##D(                     \
        const float* const* keys, const long long* slots, const float* queries, float* tops,    \
        float* masses, float* importance, long long entries, long long rows, long long group,   \
        long long pool_slots, long long squared) {                                              \
        score_chunk<D>({keys, slots, queries, tops, masses, importance, entries, rows, group,   \
                        pool_slots, squared});                                                  \
    }

KERNELS_FOR(32)
KERNELS_FOR(64)
KERNELS_FOR(128)
