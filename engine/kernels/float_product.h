// Products in float32, of weights in any format.
#pragma once

#include "linear.h"
#include "weights.h"

template <typename F>
struct FloatProduct {
    using Stored = F;
    using Widened = Plain<float>;

    // 32-bit words that a row's features take when packed.
    static constexpr int64_t words(int64_t features) { return features; }

    // Rows of x, normed, as [features][rows].
    static void pack_rows(const Linear& l, const float* x, int64_t rows, float* to) {
        for (int64_t r = 0; r < rows; r++) {
            const float* from = x + r * l.features;
            if (!l.norm) {
                for (int64_t k = 0; k < l.features; k++) to[k * rows + r] = from[k];
                continue;
            }
            const float scale = rms_scale(from, l.features, l.eps);
            for (int64_t k = 0; k < l.features; k++) to[k * rows + r] = from[k] * scale * l.norm[k];
        }
    }

    static void widen(const char* piece, int depth, float* to) {
        F::each(piece, depth, [&](int k, vec left, vec right) {
            store(to + k * WIDTH, left);
            store(to + k * WIDTH + LANES, right);
        });
    }

    // sums[ROWS][WIDTH] += a[depth][ROWS] * piece[depth][WIDTH], meanwhile fetching from `ahead`, `step` bytes per feature.
    template <int ROWS, typename W>
    static void tile(const float* a, const char* piece, int depth, float* sums, const char* ahead, int step) {
        vec s[ROWS][2];
        for (int r = 0; r < ROWS; r++) {
            s[r][0] = load(sums + r * WIDTH);
            s[r][1] = load(sums + r * WIDTH + LANES);
        }
        W::each(piece, depth, [&](int k, vec left, vec right) {
            __builtin_prefetch(ahead + k * step);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                const vec x = splat(a[k * ROWS + r]);
                s[r][0] += x * left;
                s[r][1] += x * right;
            }
        });
        for (int r = 0; r < ROWS; r++) {
            store(sums + r * WIDTH, s[r][0]);
            store(sums + r * WIDTH + LANES, s[r][1]);
        }
    }
};
