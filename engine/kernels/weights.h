// The ways a linear layer's weights may be stored, each read as two vectors of float32 per input feature.
//
// Panels of WIDTH output columns; within a panel, for each input feature, its WIDTH weights side by side.
#pragma once

#include "simd.h"

constexpr int WIDTH = 2 * LANES;

// Floats as they are. bfloat16 is widened as it is loaded: half the memory traffic and the full float32 arithmetic, which
// is what a machine without bfloat16 instructions wants.
template <typename T>
struct Plain {
    static constexpr int WIDEN_FROM = 3;  // tiles of rows from which on widening to float32 once for all of them pays

    static constexpr int64_t bytes(int64_t features) { return features * WIDTH * int64_t(sizeof(T)); }

    // use(k, left, right) for each feature k of a piece.
    template <typename Use>
    static inline void each(const char* piece, int features, Use use) {
        const T* from = (const T*)piece;
        for (int k = 0; k < features; k++) 
            use(k, in_register(load(from + k * WIDTH)), in_register(load(from + k * WIDTH + LANES)));
    }
};

// Blocks of 32 features of 4 or 8 bits with their own scale, those of 4 bits with an offset too, as GGML quantises. The
// product of a scale (11 bits) and a stored value is exact in float32, so the weights are those of any other order of
// computing them, bit for bit; at a sixth or a quarter of the memory traffic.
template <int BITS>
struct Blocks {
    static_assert(BITS == 4 || BITS == 8);
    static constexpr int SIZE = 32;
    static constexpr int PER_WORD = 32 / BITS;  // neighbouring features of a column that share a word, the first one lowest
    static constexpr int WIDEN_FROM = 2;
    static constexpr int SCALES = BITS == 4 ? 2 * WIDTH : WIDTH;  // floats before the words: scales, offsets

    static constexpr int64_t bytes(int64_t features) {
        return features / SIZE * (SCALES * int64_t(sizeof(float)) + SIZE * WIDTH * BITS / 8);
    }

    template <typename Use>
    static inline void each(const char* piece, int features, Use use) {
        for (int k = 0; k < features; k += SIZE, piece += bytes(SIZE)) {
            const float* scales = (const float*)piece;
            const int32_t* from = (const int32_t*)(scales + SCALES);
            const vec left = load(scales), right = load(scales + LANES);
            if constexpr (BITS == 8) {
                for (int i = 0; i < SIZE; i += 4, from += WIDTH) {
                    const ivec l = load(from), r = load(from + LANES);
#pragma GCC unroll 4
                    for (int j = 0; j < 4; j++)
                        use(k + i + j, to_float(l << (24 - 8 * j) >> 24) * left,
                            to_float(r << (24 - 8 * j) >> 24) * right);
                }
            } else {
                const vec left_offset = load(scales + WIDTH), right_offset = load(scales + WIDTH + LANES);
                for (int i = 0; i < SIZE; i += 8, from += WIDTH) {
                    const ivec l = load(from), r = load(from + LANES);
#pragma GCC unroll 8
                    for (int j = 0; j < 8; j++)
                        use(k + i + j, to_float(l >> 4 * j & 15) * left + left_offset,
                            to_float(r >> 4 * j & 15) * right + right_offset);
                }
            }
        }
    }
};
