// Products in whole numbers, of weights in blocks of 4 or 8 bits: twice as many per instruction as in float32, and the
// stored weights need not be turned into floats. Inputs are rounded to 16 bits, by a scale of their own for each block of
// each row; with 8 bits the instructions would do twice as many again, and what is rounded away would be seen.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "linear.h"
#include "weights.h"

typedef int16_t svec __attribute__((vector_size(LANES * 4)));

// sums + a.low * b.low + a.high * b.high, for the two signed halves of each lane.
inline ivec add_products(ivec sums, ivec a, ivec b) {
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return sums + (ivec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return sums + (ivec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return sums + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// A block of weights whose pairs are already side by side as 16 bits: scales and offsets as stored, then the pairs.
template <typename F>
struct WidenedPairs {
    static constexpr int64_t BYTES = (F::SCALES + F::SIZE / 2 * WIDTH) * 4;

    // use(p, left, right) for each pair p of a block.
    template <typename Use>
    static inline void pairs(const char* block, Use use) {
        const int32_t* from = (const int32_t*)block + F::SCALES;
#pragma GCC unroll 4
        for (int p = 0; p < F::SIZE / 2; p++, from += WIDTH) use(p, load(from), load(from + LANES));
    }
};

// The same, unpacked from what is stored. A word's value i is paired with the one half a word further.
template <int BITS>
struct StoredPairs {
    using F = Blocks<BITS>;
    static constexpr int64_t BYTES = F::bytes(F::SIZE);
    static constexpr int HALF = F::PER_WORD / 2;

    static inline ivec pair(ivec words, int i) {
        if constexpr (BITS == 4) return words >> 4 * i & 0x000f000f;
        return (ivec)((svec)(i == 0 ? words << 8 : words) >> 8);
    }

    template <typename Use>
    static inline void pairs(const char* block, Use use) {
        const int32_t* from = (const int32_t*)block + F::SCALES;
        for (int p = 0; p < F::SIZE / 2; p += HALF, from += WIDTH) {
            const ivec left = load(from), right = load(from + LANES);
#pragma GCC unroll 4
            for (int i = 0; i < HALF; i++) use(p + i, pair(left, i), pair(right, i));
        }
    }
};

template <int BITS>
struct IntegerProduct {
    using F = Blocks<BITS>;
    using Stored = StoredPairs<BITS>;
    using Widened = WidenedPairs<F>;
    static constexpr int PAIRS = F::SIZE / 2;
    static constexpr int WORDS = PAIRS + 2;  // of one row's block: its pairs, their scale, and the sum of its values

    static constexpr int64_t words(int64_t features) { return features / F::SIZE * WORDS; }

    // Rows of x, normed, as [blocks][WORDS][rows].
    static void pack_rows(const Linear& l, const float* x, int64_t rows, float* to) {
        for (int64_t r = 0; r < rows; r++) {
            const float* from = x + r * l.features;
            const float scale = l.norm ? rms_scale(from, l.features, l.eps) : 1.0f;
            for (int64_t k = 0; k < l.features; k += F::SIZE)
                pack_block(from + k, l.norm ? l.norm + k : nullptr, scale, rows, to + words(k) * rows + r);
        }
    }

    static void pack_block(const float* from, const float* norm, float factor, int64_t rows, float* to) {
        constexpr int VECTORS = F::SIZE / LANES;
        constexpr float SHIFT = 3 << 22;  // a float this large has whole numbers, in two's complement, in its low bits
        vec x[VECTORS], top{}, total{};
        for (int i = 0; i < VECTORS; i++) {
            x[i] = load(from + i * LANES);
            if (norm) x[i] = x[i] * factor * load(norm + i * LANES);
            const vec size = x[i] < 0 ? -x[i] : x[i];
            top = size > top ? size : top;
            total += x[i] * 0.0f;
        }
        const float unusable = sum(total);  // NaN if there is inf or NaN: it must show in the end result
        float largest = 0;
        for (int i = 0; i < LANES; i++) largest = top[i] > largest ? top[i] : largest;
        const bool vanishes = largest < 1e-30f || unusable != 0;
        const float inverse = vanishes ? 0.0f : 32767.0f / largest, scale = largest / 32767.0f + unusable;
        uint32_t whole[F::SIZE];
        total = vec{};
        for (int i = 0; i < VECTORS; i++) {
            if (vanishes) x[i] = vec{};
            const vec shifted = x[i] * inverse + SHIFT;
            total += shifted - SHIFT;
            const uvec bits = bits_of<uvec>(shifted) & 0xffff;
            std::memcpy(whole + i * LANES, &bits, sizeof(bits));
        }
        constexpr int HALF = Stored::HALF;
        for (int p = 0; p < PAIRS; p++) {
            const int first = p / HALF * F::PER_WORD + p % HALF;
            to[p * rows] = bits_of<float>(whole[first] | whole[first + HALF] << 16);
        }
        to[PAIRS * rows] = scale;
        to[(PAIRS + 1) * rows] = sum(total) * scale;
    }

    static void widen(const char* piece, int depth, float* to) {
        for (int k = 0; k < depth; k += F::SIZE, piece += Stored::BYTES, to += Widened::BYTES / 4) {
            std::memcpy(to, piece, F::SCALES * sizeof(float));
            Stored::pairs(piece, [&](int p, ivec left, ivec right) {
                std::memcpy(to + F::SCALES + p * WIDTH, &left, sizeof(left));
                std::memcpy(to + F::SCALES + p * WIDTH + LANES, &right, sizeof(right));
            });
        }
    }

    // As that of FloatProduct, for weights W of whole blocks.
    template <int ROWS, typename W>
    static void tile(const float* a, const char* piece, int depth, float* sums, const char* ahead, int step) {
        for (int k = 0; k < depth; k += F::SIZE, piece += W::BYTES, a += WORDS * ROWS) {
            ivec dots[ROWS][2] = {};
            W::pairs(piece, [&](int p, ivec left, ivec right) {
                __builtin_prefetch(ahead + (k + 2 * p) * step);
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; r++) {
                    const ivec x = bits_of<int32_t>(a[p * ROWS + r]) - ivec{};
                    dots[r][0] = add_products(dots[r][0], x, left);
                    dots[r][1] = add_products(dots[r][1], x, right);
                }
            });
            const float *scales = (const float*)piece, *factors = a + PAIRS * ROWS, *totals = factors + ROWS;
            for (int half = 0; half < 2; half++) {
                const vec scale = load(scales + half * LANES);
                for (int r = 0; r < ROWS; r++) {
                    float* at = sums + r * WIDTH + half * LANES;
                    vec s = load(at) + to_float(dots[r][half]) * (scale * factors[r]);
                    if constexpr (BITS == 4) s += load(scales + WIDTH + half * LANES) * totals[r];
                    store(at, s);
                }
            }
        }
    }
};
