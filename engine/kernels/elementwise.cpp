// The small operations between two matrix products that are not fused with them. A is the type of activations. They round
// to it where the reference implementations of the models do, between two operations too: the closest to what the models
// were trained with, and to what others answer.
#include "simd.h"

namespace {

constexpr int64_t PARALLEL_FROM = 1 << 15;  // elements; below, starting the threads costs more than it saves

template <typename A>
void rms_norm(const A* x, int64_t rows, int64_t size, const float* weight, float eps, A* out) {
#pragma omp parallel for if (rows * size >= PARALLEL_FROM)
    for (int64_t r = 0; r < rows; r++) {
        const A* from = x + r * size;
        A* to = out + r * size;
        const int64_t whole = size / LANES * LANES;
        const float scale = rms_scale(from, size, eps);
        for (int64_t i = 0; i < whole; i += LANES) 
            store(to + i, rounded<A>(load(from + i) * scale) * load(weight + i));
        for (int64_t i = whole; i < size; i++) 
            narrow(rounded<A>(widen(from[i]) * scale) * weight[i], to + i);
    }
}

template <typename A>
void silu_and_mul(const A* gate_up, int64_t rows, int64_t size, A* out) {
#pragma omp parallel for if (rows * size >= PARALLEL_FROM)
    for (int64_t r = 0; r < rows; r++) {
        const A *gate = gate_up + 2 * r * size, *up = gate + size;
        A* to = out + r * size;
        const int64_t whole = size / LANES * LANES;
        for (int64_t i = 0; i < whole; i += LANES) 
            store(to + i, rounded<A>(silu(load(gate + i))) * load(up + i));
        for (int64_t i = whole; i < size; i++) {
            const float x = widen(gate[i]);
            narrow(rounded<A>(x / (1.0f + std::exp(-x))) * widen(up[i]), to + i);
        }
    }
}

}  // namespace

#define EXPORT(SUFFIX, A)                                                                                              \
    void rms_norm_##SUFFIX(const A* x, int64_t rows, int64_t size, const float* weight, float eps, A* out) {           \
        rms_norm(x, rows, size, weight, eps, out);                                                                     \
    }                                                                                                                  \
    void silu_and_mul_##SUFFIX(const A* gate_up, int64_t rows, int64_t size, A* out) {                                 \
        silu_and_mul(gate_up, rows, size, out);                                                                        \
    }

extern "C" {
EXPORT(f32, float)
EXPORT(bf16, bf16)
}
