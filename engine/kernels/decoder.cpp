// All decoder layers in one call, for a step of one token per sequence: called from Python one by one, the small
// operations cost as much as attention does, on one thread while the others wait.
#include <cstdint>

extern "C" {

struct Product {
    void (*run)(const void* linear, const float* x, int64_t rows, const float* residual, float* out);
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
};

// hidden: [rows, hidden_size], in and out. scratch: rows * (2 * columns of qkv + columns of gate_up).
void decode_layers(const Decoder* d, float* hidden, int64_t rows, const float* cos, const float* sin,
                   const int64_t* slots, const int32_t* table, int64_t table_width, const int32_t* context_lens,
                   float* scratch) {
    for (int64_t i = 0; i < d->num_layers; i++) {
        const Layer& l = d->layers[i];
        float *qkv = scratch, *attended = qkv + rows * l.qkv.columns, *inner = attended + rows * l.qkv.columns;
        l.qkv.run(l.qkv.linear, hidden, rows, nullptr, qkv);
        d->rope_store(d->cache, i, qkv, rows, d->heads, cos, sin, slots);
        d->attend(d->cache, i, qkv, rows, d->heads, table, table_width, context_lens, attended);
        l.o.run(l.o.linear, attended, rows, hidden, hidden);
        l.gate_up.run(l.gate_up.linear, hidden, rows, nullptr, inner);
        l.down.run(l.down.linear, inner, rows, hidden, hidden);
    }
}
}
