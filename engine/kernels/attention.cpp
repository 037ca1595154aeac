// Attention over the paged KV cache: storing, gathering, and decoding one token per sequence.
//
// A is the type of activations, C that of the cache. Arithmetic is float32 throughout.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "cache.h"
#include "simd.h"

namespace {

constexpr int PART = 256;  // tokens of context per task: a long context is shared out over the threads
constexpr int GROUP = 3;   // query heads handled together, each key and value being loaded once for all of them

// The pair x, y turned, rounded as the reference implementations do: the angle's cosine and sine, each product, the sum.
template <typename A, typename To>
inline void rotate(float x, float y, float cos, float sin, To* first, To* second) {
    const float c = rounded<A>(cos), s = rounded<A>(sin);
    narrow(rounded<A>(x * c) - rounded<A>(y * s), first);
    narrow(rounded<A>(y * c) + rounded<A>(x * s), second);
}

template <typename A, typename C>
void rope_store(const Cache& cache, int64_t layer, A* qkv, int64_t tokens, int64_t heads, const float* cos,
                const float* sin, const int64_t* slots) {
    const Strides strides(cache);
    const int64_t dim = cache.head_dim, half = dim / 2, width = (heads + 2 * cache.kv_heads) * dim;
#pragma omp parallel for if (tokens > 8)
    for (int64_t t = 0; t < tokens; t++) {
        A* q = qkv + t * width;
        const A* k = q + heads * dim;
        const A* v = k + cache.kv_heads * dim;
        const float *c = cos + t * half, *s = sin + t * half;
        C* place = (C*)cache.arena + slots[t] / cache.block_size * strides.block + layer * strides.layer +
                   slots[t] % cache.block_size * dim;
        for (int64_t h = 0; h < heads; h++, q += dim)
            for (int64_t i = 0; i < half; i++) rotate<A>(widen(q[i]), widen(q[i + half]), c[i], s[i], q + i, q + i + half);
        for (int64_t h = 0; h < cache.kv_heads; h++, k += dim, v += dim, place += strides.head) {
            for (int64_t i = 0; i < half; i++)
                rotate<A>(widen(k[i]), widen(k[i + half]), c[i], s[i], place + i, place + i + half);
            for (int64_t i = 0; i < dim; i++) narrow(widen(v[i]), place + strides.value + i);
        }
    }
}

template <typename A, typename C>
void gather(const Cache& cache, int64_t layer, const int32_t* blocks, int64_t context, A* out) {
    const Strides strides(cache);
    const int64_t dim = cache.head_dim, size = cache.block_size, num_blocks = (context + size - 1) / size;
#pragma omp parallel for collapse(2)
    for (int64_t h = 0; h < 2 * cache.kv_heads; h++)
        for (int64_t b = 0; b < num_blocks; b++) {
            const C* from = (const C*)cache.arena + blocks[b] * strides.block + layer * strides.layer + h * strides.head;
            A* to = out + (h * context + b * size) * dim;
            const int64_t count = std::min(size, context - b * size) * dim;
            for (int64_t i = 0; i < count; i++) narrow(widen(from[i]), to + i);
        }
}

// What a part of a context contributes to one query head: softmax numerator, its maximum exponent, its denominator.
struct Partial {
    float *values, *max, *denominator;
    Partial(float* at, int64_t row, int64_t dim)
        : values(at + row * (dim + LANES)), max(values + dim), denominator(max + 1) {}
};

// Keys or values that lie side by side, `count` from the `first` of a part on. Those of `next` are fetched meanwhile:
// blocks lie far apart, so the processor does not guess the next one by itself.
template <typename C>
struct Run {
    const C *data, *next;
    int first, count;
};

template <typename C>
void prefetch(const C* from, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / sizeof(C)) __builtin_prefetch(from + i, 0, 2);
}

// Scores of N heads for a run of keys, as rows of PART: for four keys at a time, twelve sums at most, so that they stay
// in registers.
template <int N, typename C>
void score(const float* q, const Run<C>& keys, int64_t dim, float* scores) {
    int done = 0;
    for (; done + 4 <= keys.count; done += 4) {
        prefetch(keys.next + done * dim, 4 * dim);
        vec dots[N][4] = {};
        for (int64_t d = 0; d < dim; d += LANES) {
            vec queries[N];
            for (int g = 0; g < N; g++) queries[g] = load(q + g * dim + d);
#pragma GCC unroll 4
            for (int t = 0; t < 4; t++) {
                const vec k = load(keys.data + (done + t) * dim + d);
                for (int g = 0; g < N; g++) dots[g][t] += queries[g] * k;
            }
        }
        for (int g = 0; g < N; g++) {
            const quad four = sums(dots[g][0], dots[g][1], dots[g][2], dots[g][3]);
            std::memcpy(scores + g * PART + keys.first + done, &four, sizeof(four));
        }
    }
    for (; done < keys.count; done++)
        for (int g = 0; g < N; g++) {
            vec dot{};
            for (int64_t d = 0; d < dim; d += LANES) dot += load(q + g * dim + d) * load(keys.data + done * dim + d);
            scores[g * PART + keys.first + done] = sum(dot);
        }
}

// A part's scores to weights, of which `partial` notes the maximum exponent and the sum.
void to_weights(float* scores, int count, const Partial& partial) {
    for (int t = count; t % LANES; t++) scores[t] = -INFINITY;
    vec tops = load(scores), total{};
    for (int t = LANES; t < count; t += LANES) {
        const vec next = load(scores + t);
        tops = next > tops ? next : tops;
    }
    float top = tops[0];
    for (int i = 1; i < LANES; i++) top = std::max(top, tops[i]);
    for (int t = 0; t < count; t += LANES) {
        const vec weight = exp(load(scores + t) - top);
        store(scores + t, weight);
        total += weight;
    }
    *partial.max = top;
    *partial.denominator = sum(total);
}

// Add a run's weighted values to PIECES vectors of N heads.
template <int N, int PIECES, typename C>
void add_values(const Run<C>& values, int64_t dim, const float* weights, float* partials, int64_t d) {
    vec totals[N][PIECES];
    for (int g = 0; g < N; g++)
        for (int i = 0; i < PIECES; i++) totals[g][i] = load(Partial(partials, g, dim).values + d + i * LANES);
    for (int t = 0; t < values.count; t++) {
        prefetch(values.next + t * dim + d, PIECES * LANES);
        vec v[PIECES];
        for (int i = 0; i < PIECES; i++) v[i] = in_register(load(values.data + t * dim + d + i * LANES));
        for (int g = 0; g < N; g++)
            for (int i = 0; i < PIECES; i++) totals[g][i] += weights[g * PART + values.first + t] * v[i];
    }
    for (int g = 0; g < N; g++)
        for (int i = 0; i < PIECES; i++) store(Partial(partials, g, dim).values + d + i * LANES, totals[g][i]);
}

template <int N, typename C>
void add_values(const Run<C>& values, int64_t dim, const float* weights, float* partials) {
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) add_values<N, 4>(values, dim, weights, partials, d);
    for (; d < dim; d += LANES) add_values<N, 1>(values, dim, weights, partials, d);
}

// use(N, g) for N heads from the g-th on, until all have been used: 4 heads are 2 + 2, not 3 + 1.
template <typename Use>
void each_group(int64_t heads, Use use) {
    for (int64_t g = 0, pieces = (heads + GROUP - 1) / GROUP; pieces > 0; pieces--) {
        const int64_t n = (heads - g + pieces - 1) / pieces;
        switch (n) {
            case 1: use(std::integral_constant<int, 1>{}, g); break;
            case 2: use(std::integral_constant<int, 2>{}, g); break;
            default: use(std::integral_constant<int, GROUP>{}, g);
        }
        g += n;
    }
}

template <typename A, typename C>
void decode(const Cache& cache, int64_t layer, const A* qkv, int64_t sequences, int64_t heads, const int32_t* table,
            int64_t table_width, const int32_t* context_lens, A* out) {
    struct Task {
        int64_t sequence, start, stop;
    };
    static thread_local std::vector<Task> tasks;
    static thread_local std::vector<int64_t> first_task;
    static thread_local std::vector<vec> scratch;

    const Strides strides(cache);
    const int64_t dim = cache.head_dim, size = cache.block_size, kv_heads = cache.kv_heads, group = heads / kv_heads;
    const int64_t row = dim + LANES, own = group * (dim + PART);  // of a head of a task; of a thread
    const float scale = 1.0f / std::sqrt(float(dim));
    tasks.clear();
    first_task.clear();
    for (int64_t s = 0; s < sequences; s++) {
        first_task.push_back(int64_t(tasks.size()));
        for (int64_t start = 0; start < context_lens[s]; start += PART)
            tasks.push_back({s, start, std::min<int64_t>(start + PART, context_lens[s])});
    }
    first_task.push_back(int64_t(tasks.size()));
    const size_t needed = (tasks.size() * heads * row + omp_get_max_threads() * own) / LANES;
    if (scratch.size() < needed) scratch.resize(needed);
    float* const partials = (float*)scratch.data();
    float* const queries = partials + tasks.size() * heads * row;
    const Task* const all_tasks = tasks.data();
    const int64_t* const firsts = first_task.data();
    const int64_t num_tasks = int64_t(tasks.size());

#pragma omp parallel
    {
        float* const q = queries + omp_get_thread_num() * own;
        float* const scores = q + group * dim;
// Static: each thread its part in order, which it has fetched while products were computed. See Ahead.
#pragma omp for collapse(2) schedule(static)
        for (int64_t i = 0; i < num_tasks; i++)
            for (int64_t h = 0; h < kv_heads; h++) {
                const Task task = all_tasks[i];
                const A* from = qkv + task.sequence * (heads + 2 * kv_heads) * dim + h * group * dim;
                float* mine = partials + (i * heads + h * group) * row;
                for (int64_t d = 0; d < group * dim; d++) q[d] = widen(from[d]) * scale;
                const int32_t* blocks = table + task.sequence * table_width;
                const C* base = (const C*)cache.arena + layer * strides.layer + h * strides.head;
                auto keys_at = [&](int64_t t) { return base + blocks[t / size] * strides.block + t % size * dim; };
                // use(run) for all keys, `offset` 0, or all values; `last` is what to fetch while the last run is used.
                auto each_run = [&](int64_t offset, const C* last, auto use) {
                    for (int64_t t = task.start; t < task.stop;) {
                        const int64_t end = std::min(t - t % size + size, task.stop);
                        const C* next = end < task.stop ? keys_at(end) + offset : last;
                        use(Run<C>{keys_at(t) + offset, next, int(t - task.start), int(end - t)});
                        t = end;
                    }
                };
                each_run(0, keys_at(task.start) + strides.value, [&](const Run<C>& keys) {
                    each_group(group, [&](auto n, int64_t g) { score<n>(q + g * dim, keys, dim, scores + g * PART); });
                });
                for (int64_t g = 0; g < group; g++) {
                    const Partial partial(mine, g, dim);
                    to_weights(scores + g * PART, int(task.stop - task.start), partial);
                    std::fill(partial.values, partial.values + dim, 0.0f);
                }
                each_run(strides.value, keys_at(task.start) + strides.value, [&](const Run<C>& values) {
                    each_group(group, [&](auto n, int64_t g) {
                        add_values<n>(values, dim, scores + g * PART, mine + g * row);
                    });
                });
            }
#pragma omp for collapse(2)
        for (int64_t s = 0; s < sequences; s++)
            for (int64_t h = 0; h < heads; h++) {
                float top = -INFINITY, denominator = 0;
                for (int64_t i = firsts[s]; i < firsts[s + 1]; i++)
                    top = std::max(top, *Partial(partials, i * heads + h, dim).max);
                for (int64_t i = firsts[s]; i < firsts[s + 1]; i++) {
                    const Partial partial(partials, i * heads + h, dim);
                    *partial.max = std::exp(*partial.max - top);
                    denominator += *partial.max * *partial.denominator;
                }
                A* to = out + (s * heads + h) * dim;
                for (int64_t d = 0; d < dim; d += LANES) {
                    vec total{};
                    for (int64_t i = firsts[s]; i < firsts[s + 1]; i++) {
                        const Partial partial(partials, i * heads + h, dim);
                        total += load(partial.values + d) * *partial.max;
                    }
                    store(to + d, total / denominator);
                }
            }
    }
}

}  // namespace

#define EXPORT(SUFFIX, A, C)                                                                                           \
    void rope_store_##SUFFIX(const Cache* cache, int64_t layer, A* qkv, int64_t tokens, int64_t heads,                 \
                             const float* cos, const float* sin, const int64_t* slots) {                               \
        rope_store<A, C>(*cache, layer, qkv, tokens, heads, cos, sin, slots);                                          \
    }                                                                                                                  \
    void gather_##SUFFIX(const Cache* cache, int64_t layer, const int32_t* blocks, int64_t context, A* out) {          \
        gather<A, C>(*cache, layer, blocks, context, out);                                                             \
    }                                                                                                                  \
    void paged_decode_##SUFFIX(const Cache* cache, int64_t layer, const A* qkv, int64_t sequences, int64_t heads,      \
                               const int32_t* table, int64_t table_width, const int32_t* context_lens, A* out) {       \
        decode<A, C>(*cache, layer, qkv, sequences, heads, table, table_width, context_lens, out);                     \
    }

extern "C" {
EXPORT(f32_f32, float, float)
EXPORT(f32_bf16, float, bf16)
EXPORT(bf16_bf16, bf16, bf16)
}
