// Causal attention of prompts over the paged KV cache, block by block with a running softmax (FlashAttention, Dao et al.
// 2022; FlashAttention-2, 2023), so that scores never leave the caches and nothing ahead of a token is computed.
//
// Queries lie across a vector, WIDTH of them to a tile: the heads that share a key head, of as many tokens as fit. Keys
// and values are then what is broadcast, and are read from the cache as they lie there. What a query adds up, and in which
// order, depends on its place in its sequence alone: not on how a prompt was cut, nor on what is computed beside it.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "cache.h"
#include "simd.h"

extern "C" {

struct Prefill {
    int64_t index, start, tokens, context;  // row of the block table; first row of qkv, rows; length with these tokens
};
}

namespace {

constexpr int WIDTH = 2 * LANES;           // queries of a tile
constexpr int ROWS = LANES == 16 ? 8 : 4;  // keys, or numbers of a value, at a time: their sums fit the registers
constexpr int PART = 64;                   // keys between two looks at the softmax: their scores stay in the caches
constexpr int MOST_TILES = 4;              // that look at a part together
constexpr int TASKS_PER_THREAD = 4;

// to[r][WIDTH] = the sum of keys[r][d] * queries[d][WIDTH], for N keys.
template <int N>
inline void score(const float* const* keys, int64_t dim, const float* queries, float* to) {
    vec s[N][2] = {};
    const float* key[N];
    for (int r = 0; r < N; r++) key[r] = keys[r];
    for (int64_t d = 0; d < dim; d++) {
        const vec left = load(queries + d * WIDTH), right = load(queries + d * WIDTH + LANES);
#pragma GCC unroll 8
        for (int r = 0; r < N; r++) {
            const vec x = splat(key[r][d]);
            s[r][0] += x * left;
            s[r][1] += x * right;
        }
    }
    for (int r = 0; r < N; r++) {
        store(to + r * WIDTH, s[r][0]);
        store(to + r * WIDTH + LANES, s[r][1]);
    }
}

void scores(const float* const* keys, int count, int64_t dim, const float* queries, float* to) {
    int t = 0;
    for (; t + ROWS <= count; t += ROWS) score<ROWS>(keys + t, dim, queries, to + t * WIDTH);
    for (; t < count; t++) score<1>(keys + t, dim, queries, to + t * WIDTH);
}

// totals[dim][WIDTH] = totals * factor + the sum of weights[t][WIDTH] * values[t][dim].
void add_values(const float* const* values, int count, int64_t dim, const float* weights, const vec factor[2],
                float* totals) {
    for (int64_t d = 0; d < dim; d += ROWS) {
        vec s[ROWS][2];
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < 2; i++) s[r][i] = load(totals + (d + r) * WIDTH + i * LANES) * factor[i];
        for (int t = 0; t < count; t++) {
            const vec left = load(weights + t * WIDTH), right = load(weights + t * WIDTH + LANES);
            const float* value = values[t] + d;
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const vec x = splat(value[r]);
                s[r][0] += x * left;
                s[r][1] += x * right;
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < 2; i++) store(totals + (d + r) * WIDTH + i * LANES, s[r][i]);
    }
}

// Some queries of those of one sequence that share a key head, counted token by token, and what they have added up.
struct Tile {
    int64_t first;
    int count;
    float *queries, *totals;  // [dim][WIDTH]
    ivec place[2];            // of each query in its sequence
    vec top[2], sum[2];       // of the scores so far: the largest, and the sum of their weights
};

// What one thread computes with.
struct Room {
    std::vector<vec> memory;
    Tile tiles[MOST_TILES];
    float *weights, *wide;

    Room(int64_t dim, bool widens)
        : memory((2 * MOST_TILES * dim * WIDTH + PART * WIDTH + (widens ? 2 * PART * dim : 0)) / LANES) {
        float* at = (float*)memory.data();
        for (Tile& tile : tiles) {
            tile.queries = at;
            tile.totals = at + dim * WIDTH;
            at += 2 * dim * WIDTH;
        }
        weights = at;
        wide = weights + PART * WIDTH;
    }
};

// Keys and values of a part of the context, as floats.
struct Keys {
    int64_t start;
    int count;
    const float *keys[PART], *values[PART];
};

// Let a tile's queries see a part of the context.
void look(Tile& tile, const Keys& part, int64_t dim, int64_t seen_by_all, float* weights) {
    scores(part.keys, part.count, dim, tile.queries, weights);
    const bool masked = part.start + part.count - 1 > seen_by_all;
    vec factor[2];
    for (int i = 0; i < 2; i++) {
        float* const column = weights + i * LANES;
        vec top = tile.top[i], sum{};
        for (int t = 0; t < part.count; t++) {
            vec score = load(column + t * WIDTH);
            if (masked) {
                score = tile.place[i] < int32_t(part.start + t) ? splat(-INFINITY) : score;
                store(column + t * WIDTH, score);
            }
            top = score > top ? score : top;
        }
        factor[i] = exp(tile.top[i] - top);
        tile.top[i] = top;
        for (int t = 0; t < part.count; t++) {
            const vec weight = exp(load(column + t * WIDTH) - top);
            store(column + t * WIDTH, weight);
            sum += weight;
        }
        tile.sum[i] = tile.sum[i] * factor[i] + sum;
    }
    add_values(part.values, part.count, dim, weights, factor, tile.totals);
}

// Queries of one sequence that share key head h, from the `first` on, of which there are `count`.
template <typename C>
void attend(const Cache& cache, int64_t layer, const float* qkv, int64_t heads, const int32_t* blocks,
            const Prefill& prefill, int64_t h, int64_t first, int64_t count, float* out, Room& room) {
    const Strides strides(cache);
    const int64_t dim = cache.head_dim, size = cache.block_size, group = heads / cache.kv_heads;
    const int64_t width = (heads + 2 * cache.kv_heads) * dim, before = prefill.context - prefill.tokens;
    const C* const base = (const C*)cache.arena + layer * strides.layer + h * strides.head;
    const float scale = 1.0f / std::sqrt(float(dim));
    const int num_tiles = int((count + WIDTH - 1) / WIDTH);
    for (int n = 0; n < num_tiles; n++) {
        Tile& tile = room.tiles[n];
        tile.first = first + n * WIDTH;
        tile.count = int(std::min<int64_t>(WIDTH, first + count - tile.first));
        for (int i = 0; i < WIDTH; i++) {
            const int64_t query = tile.first + std::min(i, tile.count - 1);  // those beyond the last are dropped
            const int64_t token = query / group, head = h * group + query % group;
            const float* q = qkv + (prefill.start + token) * width + head * dim;
            for (int64_t d = 0; d < dim; d++) tile.queries[d * WIDTH + i] = q[d] * scale;
            tile.place[i / LANES][i % LANES] = int32_t(before + token);
        }
        std::fill(tile.totals, tile.totals + dim * WIDTH, 0.0f);
        // Not -inf: a part may have no other scores, and inf - inf is no number.
        for (int i = 0; i < 2; i++) tile.top[i] = splat(std::numeric_limits<float>::lowest()), tile.sum[i] = vec{};
    }
    const int64_t end = before + (first + count - 1) / group + 1;
    for (int64_t start = 0; start < end; start += PART) {
        Keys part{start, int(std::min<int64_t>(PART, end - start)), {}, {}};
        for (int t = 0; t < part.count; t++) {
            const int64_t at = start + t;
            const C* from = base + blocks[at / size] * strides.block + at % size * dim;
            if constexpr (std::is_same_v<C, float>) {
                part.keys[t] = from;
                part.values[t] = from + strides.value;
            } else {
                float *key = room.wide + t * dim, *value = key + PART * dim;
                for (int64_t d = 0; d < dim; d += LANES) {
                    store(key + d, load(from + d));
                    store(value + d, load(from + strides.value + d));
                }
                part.keys[t] = key;
                part.values[t] = value;
            }
        }
        for (int n = 0; n < num_tiles; n++) {
            Tile& tile = room.tiles[n];
            if (before + (tile.first + tile.count - 1) / group >= start)
                look(tile, part, dim, before + tile.first / group, room.weights);
        }
    }
    for (int n = 0; n < num_tiles; n++)
        for (int i = 0; i < room.tiles[n].count; i++) {
            const Tile& tile = room.tiles[n];
            const int64_t query = tile.first + i, token = query / group, head = h * group + query % group;
            const float sum = tile.sum[i / LANES][i % LANES];
            float* to = out + ((prefill.start + token) * heads + head) * dim;
            for (int64_t d = 0; d < dim; d++) to[d] = tile.totals[d * WIDTH + i] / sum;
        }
}

template <typename C>
void prefill(const Cache& cache, int64_t layer, const float* qkv, int64_t heads, const int32_t* table,
             int64_t table_width, const Prefill* prefills, int64_t count, float* out) {
    struct Task {
        const Prefill* prefill;
        int64_t first, count;
    };
    static thread_local std::vector<Task> tasks;
    const int64_t group = heads / cache.kv_heads;
    int64_t queries = 0;
    for (const Prefill* p = prefills; p < prefills + count; p++) queries += p->tokens * heads;
    // Many tiles, so that keys are fetched once for all of them; few, so that there are several tasks for each thread.
    const int64_t share = queries / (WIDTH * TASKS_PER_THREAD * omp_get_max_threads());
    const int64_t most = WIDTH * std::max<int64_t>(1, std::min<int64_t>(MOST_TILES, share));
    tasks.clear();
    for (const Prefill* p = prefills; p < prefills + count; p++)
        for (int64_t end = p->tokens * group; end > 0; end -= std::min(end, most)) {
            const int64_t first = std::max<int64_t>(end - most, 0);
            tasks.push_back({p, first, end - first});
        }
    // Those that see most first, so that no thread is left with a long one in the end.
    std::stable_sort(tasks.begin(), tasks.end(), [&](const Task& a, const Task& b) {
        auto seen = [&](const Task& t) { return t.prefill->context - t.prefill->tokens + t.first / group; };
        return seen(a) > seen(b);
    });
    const Task* const all = tasks.data();
    const int64_t num_tasks = int64_t(tasks.size());
#pragma omp parallel
    {
        Room room(cache.head_dim, !std::is_same_v<C, float>);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t i = 0; i < num_tasks; i++)
            for (int64_t h = 0; h < cache.kv_heads; h++) {
                const Task& task = all[i];
                attend<C>(cache, layer, qkv, heads, table + task.prefill->index * table_width, *task.prefill, h,
                          task.first, task.count, out, room);
            }
    }
}

}  // namespace

// qkv: [tokens, heads + 2 * kv_heads, head_dim], rotated; its keys and values are in the cache by now. out: [tokens,
// heads, head_dim], of which the rows of `prefills` are written.
#define EXPORT(SUFFIX, C)                                                                                              \
    void paged_prefill_##SUFFIX(const Cache* cache, int64_t layer, const float* qkv, int64_t heads,                    \
                                const int32_t* table, int64_t table_width, const Prefill* prefills, int64_t count,     \
                                float* out) {                                                                          \
        prefill<C>(*cache, layer, qkv, heads, table, table_width, prefills, count, out);                               \
    }

extern "C" {
EXPORT(f32_f32, float)
EXPORT(f32_bf16, bf16)
}
