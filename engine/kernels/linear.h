// A linear layer, as both ways of computing its products see it.
#pragma once

#include <cstdint>

extern "C" {

struct Linear {
    const void* packed;
    const float* bias;  // [columns] or null
    const float* norm;  // [features] or null: RMSNorm of each row of x first
    float eps;
    int32_t gated;  // the weight is [2 * columns, features] and the result silu(first half) * second half
    int64_t features, columns;
};
}

// Memory that is wanted after a product, fetched while it is computed: with more than a few rows arithmetic is what it
// waits for, and memory is idle. Pieces that lie far apart, each thread its part of them, which it should be the one to
// use: caches are not always shared.
struct Ahead {
    static constexpr int64_t LINE = 64;
    const char* const* pieces;
    int64_t count, offset, lines;  // pieces; bytes from their start; cache lines of each
    int64_t from, to;              // thirds of each thread's part

    struct Part {
        const Ahead* ahead;
        int64_t piece, line, left;

        void fetch(int64_t count) {
            count = count < left ? count : left;
            left -= count;
            for (; count > 0; count--) {
                __builtin_prefetch(ahead->pieces[piece] + ahead->offset + line * LINE, 0, 2);
                if (++line == ahead->lines) line = 0, piece++;
            }
        }
    };

    Part part(int64_t thread, int64_t threads) const {
        const int64_t first = count * lines * thread / threads, all = count * lines * (thread + 1) / threads - first;
        const int64_t start = first + all * from / 3;
        return {this, start / lines, start % lines, first + all * to / 3 - start};
    }
};
