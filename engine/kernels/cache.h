// The paged KV cache, as the attention kernels see it.
#pragma once

#include <cstdint>

extern "C" {

// Arena: [blocks][layers][2 (K, V)][kv_heads][block_size][head_dim]
struct Cache {
    void* arena;
    int64_t layers, kv_heads, block_size, head_dim;
};
}

struct Strides {
    int64_t head, value, layer, block;
    explicit Strides(const Cache& c)
        : head(c.block_size * c.head_dim), value(c.kv_heads * head), layer(2 * value), block(c.layers * layer) {}
};
