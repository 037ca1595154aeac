// Attention over the paged KV cache: storing, gathering, and decoding one token per sequence.
//
// A is the type of activations, C that of the cache. Arithmetic is float32 throughout.
#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.h"

extern "C" {

// Arena: [blocks][layers][2 (K, V)][kv_heads][block_size][head_dim]
struct Cache {
    void* arena;
    int64_t layers, kv_heads, block_size, head_dim;
};
}

namespace {

constexpr int PART = 256;  // tokens of context per task: a long context is shared out over the threads
constexpr int TILE = 64;   // tokens whose scores are kept at a time
constexpr int GROUP = 3;   // query heads handled together, each key and value being loaded once for all of them

struct Strides {
    int64_t head, value, layer, block;
    explicit Strides(const Cache& c)
        : head(c.block_size * c.head_dim), value(c.kv_heads * head), layer(2 * value), block(c.layers * layer) {}
};

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
    float *max, *denominator, *values;
    Partial(float* at, int64_t row, int64_t dim) : max(at + row * (dim + 2)), denominator(max + 1), values(max + 2) {}
};

// Scores of N heads for four keys: twelve sums at most, so that they stay in registers. scores: rows of TILE.
template <int N, typename C>
void score_four(const float* q, const C* keys, int64_t dim, float* scores) {
    vec dots[N][4] = {};
    for (int64_t d = 0; d < dim; d += LANES) {
        vec queries[N];
        for (int g = 0; g < N; g++) queries[g] = load(q + g * dim + d);
#pragma GCC unroll 4
        for (int t = 0; t < 4; t++) {
            const vec k = load(keys + t * dim + d);
            for (int g = 0; g < N; g++) dots[g][t] += queries[g] * k;
        }
    }
    for (int g = 0; g < N; g++) {
        const quad four = sums(dots[g][0], dots[g][1], dots[g][2], dots[g][3]);
        std::memcpy(scores + g * TILE, &four, sizeof(four));
    }
}

// Add the weighted values of `count` tokens to PIECES vectors of N heads.
template <int N, int PIECES, typename C>
void add_values(const C* values, int count, int64_t dim, const float (*weights)[TILE], const float* kept, float* partials,
                int64_t d) {
    vec totals[N][PIECES];
    for (int g = 0; g < N; g++)
        for (int i = 0; i < PIECES; i++) totals[g][i] = load(Partial(partials, g, dim).values + d + i * LANES) * kept[g];
    for (int t = 0; t < count; t++) {
        vec v[PIECES];
        for (int i = 0; i < PIECES; i++) v[i] = in_register(load(values + t * dim + d + i * LANES));
        for (int g = 0; g < N; g++)
            for (int i = 0; i < PIECES; i++) totals[g][i] += weights[g][t] * v[i];
    }
    for (int g = 0; g < N; g++)
        for (int i = 0; i < PIECES; i++) store(Partial(partials, g, dim).values + d + i * LANES, totals[g][i]);
}

// The keys of one tile and its values; `next_keys` and `next_values` are fetched meanwhile. Blocks lie far apart, so the
// processor does not guess the next one by itself.
template <typename C>
struct Tile {
    const C *keys, *values, *next_keys, *next_values;
    int count;
};

template <typename C>
void prefetch(const C* from, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / sizeof(C)) __builtin_prefetch(from + i, 0, 2);
}

// Add a tile's tokens to the partials of N query heads that share a key head.
template <int N, typename C>
void attend(const float* q, const Tile<C>& tile, int64_t dim, float* partials) {
    const C *keys = tile.keys, *values = tile.values;
    const int count = tile.count;
    alignas(64) float scores[N][TILE];
    int done = 0;
    for (; done + 4 <= count; done += 4) {
        prefetch(tile.next_keys + done * dim, 4 * dim);
        prefetch(tile.next_values + done * dim, 4 * dim);
        score_four<N>(q, keys + done * dim, dim, &scores[0][done]);
    }
    for (; done < count; done++)
        for (int g = 0; g < N; g++) {
            vec dot{};
            for (int64_t d = 0; d < dim; d += LANES) dot += load(q + g * dim + d) * load(keys + done * dim + d);
            scores[g][done] = sum(dot);
        }
    float kept[N];  // factor on what was added before, under the old maximum
    for (int g = 0; g < N; g++) {
        const Partial partial(partials, g, dim);
        const float top = std::max(*partial.max, *std::max_element(scores[g], scores[g] + count));
        for (int t = count; t % LANES; t++) scores[g][t] = -INFINITY;
        vec total{};
        for (int t = 0; t < count; t += LANES) {
            const vec weight = exp(load(scores[g] + t) - top);
            store(scores[g] + t, weight);
            total += weight;
        }
        kept[g] = std::exp(*partial.max - top);
        *partial.max = top;
        *partial.denominator = *partial.denominator * kept[g] + sum(total);
    }
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) add_values<N, 4>(values, count, dim, scores, kept, partials, d);
    for (; d < dim; d += LANES) add_values<N, 1>(values, count, dim, scores, kept, partials, d);
}

template <typename C>
void attend_group(int n, const float* q, const Tile<C>& tile, int64_t dim, float* partials) {
    switch (n) {
        case 1: return attend<1>(q, tile, dim, partials);
        case 2: return attend<2>(q, tile, dim, partials);
        default: return attend<GROUP>(q, tile, dim, partials);
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
    static thread_local std::vector<float> scratch;

    const Strides strides(cache);
    const int64_t dim = cache.head_dim, size = cache.block_size, kv_heads = cache.kv_heads, group = heads / kv_heads;
    const int64_t part = std::max<int64_t>(1, PART / size) * size, row = dim + 2;
    const float scale = 1.0f / std::sqrt(float(dim));
    tasks.clear();
    first_task.clear();
    for (int64_t s = 0; s < sequences; s++) {
        first_task.push_back(int64_t(tasks.size()));
        for (int64_t start = 0; start < context_lens[s]; start += part)
            tasks.push_back({s, start, std::min<int64_t>(start + part, context_lens[s])});
    }
    first_task.push_back(int64_t(tasks.size()));
    const size_t needed = tasks.size() * heads * (row + dim);
    if (scratch.size() < needed) scratch.resize(needed);
    float* const partials = scratch.data();
    float* const queries = partials + tasks.size() * heads * row;
    const Task* const all_tasks = tasks.data();
    const int64_t* const firsts = first_task.data();
    const int64_t num_tasks = int64_t(tasks.size());

#pragma omp parallel
    {
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t i = 0; i < num_tasks; i++)
            for (int64_t h = 0; h < kv_heads; h++) {
                const Task task = all_tasks[i];
                const A* from = qkv + task.sequence * (heads + 2 * kv_heads) * dim + h * group * dim;
                float* q = queries + (i * heads + h * group) * dim;
                float* mine = partials + (i * heads + h * group) * row;
                for (int64_t d = 0; d < group * dim; d++) q[d] = widen(from[d]) * scale;
                for (int64_t g = 0; g < group; g++) {
                    const Partial partial(mine, g, dim);
                    *partial.max = -INFINITY;
                    std::fill(partial.denominator, partial.values + dim, 0.0f);
                }
                const int32_t* blocks = table + task.sequence * table_width;
                auto keys_at = [&](int64_t t) {
                    return (const C*)cache.arena + blocks[t / size] * strides.block + layer * strides.layer +
                           h * strides.head + t % size * dim;
                };
                for (int64_t t = task.start; t < task.stop;) {
                    const int count = int(std::min<int64_t>({size - t % size, task.stop - t, TILE}));
                    const C *keys = keys_at(t), *next = t + count < task.stop ? keys_at(t + count) : keys;
                    const Tile<C> tile{keys, keys + strides.value, next, next + strides.value, count};
                    for (int64_t g = 0, pieces = (group + GROUP - 1) / GROUP; pieces > 0; pieces--) {
                        const int64_t n = (group - g + pieces - 1) / pieces;  // 4 heads are 2 + 2, not 3 + 1
                        attend_group(int(n), q + g * dim, tile, dim, mine + g * row);
                        g += n;
                    }
                    t += count;
                }
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
