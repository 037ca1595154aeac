// All decoder layers in one call, for a step of one token per sequence: called from Python one by one, the small
// operations cost as much as attention does, on one thread while the others wait.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "linear.h"

extern "C" {

struct Product {
    void (*run)(const void* linear, const float* x, int64_t rows, const float* residual, float* out,
                const Ahead* wanted);
    const void* linear;
    int64_t columns;
};

struct Layer {
    Product qkv, o, gate_up, down;
};

struct Decoder {
    const Layer* layers;
    int64_t num_layers, heads;
    const void* cache;
    void (*rope_store)(const void* cache, int64_t layer, float* qkv, int64_t tokens, int64_t heads, const float* cos,
                       const float* sin, const int64_t* slots);
    void (*attend)(const void* cache, int64_t layer, const float* qkv, int64_t sequences, int64_t heads,
                   const int32_t* table, int64_t table_width, const int32_t* context_lens, float* out);
    const char* arena;
    int64_t block_size, block_bytes;
};

constexpr int64_t FETCHED = 8 << 20;  // bytes of a layer's KV at most that are fetched ahead: more would not stay cached

// hidden: [rows, hidden_size], in and out. scratch: rows * (2 * columns of qkv + columns of gate_up).
void decode_layers(const Decoder* d, float* hidden, int64_t rows, const float* cos, const float* sin,
                   const int64_t* slots, const int32_t* table, int64_t table_width, const int32_t* context_lens,
                   float* scratch) {
    static thread_local std::vector<const char*> blocks;
    const int64_t layer_bytes = d->block_bytes / d->num_layers, lines = std::max<int64_t>(1, layer_bytes / Ahead::LINE);
    blocks.clear();
    for (int64_t s = 0; s < rows; s++)
        for (int64_t b = 0; b < context_lens[s] / d->block_size; b++)
            blocks.push_back(d->arena + table[s * table_width + b] * d->block_bytes);
    const int64_t count = int64_t(blocks.size()) * layer_bytes <= FETCHED ? int64_t(blocks.size()) : 0;
    for (int64_t i = 0; i < d->num_layers; i++) {
        const Layer& l = d->layers[i];
        float *qkv = scratch, *attended = qkv + rows * l.qkv.columns, *inner = attended + rows * l.qkv.columns;
        l.qkv.run(l.qkv.linear, hidden, rows, nullptr, qkv, nullptr);
        d->rope_store(d->cache, i, qkv, rows, d->heads, cos, sin, slots);
        d->attend(d->cache, i, qkv, rows, d->heads, table, table_width, context_lens, attended);
        l.o.run(l.o.linear, attended, rows, hidden, hidden, nullptr);
        // The next layer's KV, in the order in which attention shares it out.
        const int64_t next = i + 1 < d->num_layers ? count : 0;
        const Ahead first{blocks.data(), next, (i + 1) * layer_bytes, lines, 0, 2};
        const Ahead second{blocks.data(), next, (i + 1) * layer_bytes, lines, 2, 3};
        l.gate_up.run(l.gate_up.linear, hidden, rows, nullptr, inner, &first);
        l.down.run(l.down.linear, inner, rows, hidden, hidden, &second);
    }
}
}
