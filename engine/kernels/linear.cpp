// norm(x) @ weight.T and what follows it, for weights packed once: at the speed of memory for a few rows, of the
// arithmetic units for many. The same panels of weights serve every number of rows, and each row's sums are added in the
// same order whatever the number of rows and the format of the weights.
//
// Norm, activation and residual are done while a row is packed and while a tile is still in the cache, not because they
// cost much by themselves: weights streaming through the caches make every further call from Python a cold one.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>

#include "float_product.h"
#include "integer_product.h"

namespace {

constexpr int MAX_ROWS = LANES == 16 ? 12 : 6;  // rows of one tile: its sums just fit the registers
constexpr int DEPTH = 192;                      // features per pass: a panel's piece stays in the first-level cache
constexpr int CHUNK = 96;                       // rows per pass over the weights: their inputs stay in the second-level cache

int64_t panel_count(const Linear& l) {
    const int64_t width = l.gated ? LANES : WIDTH;
    return (l.columns + width - 1) / width;
}

// A tile of `rows` rows by the product P, of weights W.
template <typename P, typename W, int ROWS = MAX_ROWS>
void run_tile(int rows, const float* a, const char* piece, int depth, float* sums, const char* ahead, int step) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) return P::template tile<ROWS, W>(a, piece, depth, sums, ahead, step);
        run_tile<P, W, ROWS - 1>(rows, a, piece, depth, sums, ahead, step);
    }
}

// Rows divided into tiles as evenly as can be: 8 rows are 4 + 4, not 6 + 2, whose second tile would wait on latencies.
struct Tiles {
    int64_t rows, count;
    explicit Tiles(int64_t rows) : rows(rows), count((rows + MAX_ROWS - 1) / MAX_ROWS) {}
    int64_t start(int64_t i) const { return i * (rows / count) + std::min(i, rows % count); }
};

// One row of a panel's sums to its place in the result.
void finish(const Linear& l, int64_t panel, const float* sums, const float* residual, float* out) {
    float result[WIDTH];
    int64_t column = panel * WIDTH;
    int width = WIDTH;
    if (l.gated) {
        column = panel * LANES;
        width = LANES;
        store(result, silu(load(sums)) * load(sums + LANES));
    } else {
        std::copy(sums, sums + WIDTH, result);
    }
    width = int(std::min<int64_t>(width, l.columns - column));
    for (int c = 0; c < width; c++) {
        if (l.bias) result[c] += l.bias[column + c];
        if (residual) result[c] += residual[column + c];
        out[column + c] = result[c];
    }
}

// F: the format of the weights; P: how products are computed.
template <typename F, typename P>
void linear(const Linear& l, const float* x, int64_t rows, const float* residual, float* out, const Ahead* wanted) {
    static thread_local std::unique_ptr<float[]> buffer;
    static thread_local int64_t buffer_size = 0;
    if (buffer_size < rows * P::words(l.features)) {
        buffer_size = rows * P::words(l.features);
        buffer.reset(new float[buffer_size]);
    }
    float* const a = buffer.get();
    const int64_t features = l.features, panels = panel_count(l);
    const Tiles tiles(rows);
    const int64_t tiles_per_chunk = CHUNK / MAX_ROWS, passes = (features + DEPTH - 1) / DEPTH;
#pragma omp parallel
    {
#pragma omp for
        for (int64_t t = 0; t < tiles.count; t++) {
            const int64_t first = tiles.start(t);
            P::pack_rows(l, x + first * features, tiles.start(t + 1) - first, a + first * P::words(features));
        }
        alignas(64) float sums[CHUNK * WIDTH], wide[DEPTH * WIDTH];
        const int threads = omp_get_num_threads();
        Ahead::Part part = wanted ? wanted->part(omp_get_thread_num(), threads) : Ahead::Part{};
        const int64_t share = part.left * threads / (panels * passes) + 1;
        // A few rows: long runs of neighbouring panels, so that what is fetched ahead is what comes next.
        const int64_t grain = tiles.count > 4 ? 1 : std::max<int64_t>(1, panels / (2 * threads));
        for (int64_t chunk = 0; chunk < tiles.count; chunk += tiles_per_chunk) {
            const int64_t end = std::min(chunk + tiles_per_chunk, tiles.count), count = end - chunk;
            const int64_t first = tiles.start(chunk), last = tiles.start(end);
            // While a piece is in use for the second time and later, memory would be idle: each tile fetches its share of
            // the next piece. With one tile there is no such time.
            const int step = count == 1 ? 0 : int(F::bytes(DEPTH) / DEPTH / count);
#pragma omp for nowait schedule(dynamic, grain)
            for (int64_t panel = 0; panel < panels; panel++) {
                const char* weights = (const char*)l.packed + panel * F::bytes(features);
                std::fill(sums, sums + (last - first) * WIDTH, 0.0f);
                for (int64_t k = 0; k < features; k += DEPTH) {
                    const int depth = int(std::min<int64_t>(DEPTH, features - k));
                    const char *piece = weights + F::bytes(k), *next = piece + F::bytes(DEPTH);
                    part.fetch(share);
                    auto run_tiles = [&](auto weights_as, const char* from) {
                        for (int64_t t = chunk; t < end; t++) {
                            const int64_t row = tiles.start(t), n = tiles.start(t + 1) - row;
                            run_tile<P, decltype(weights_as)>(int(n), a + row * P::words(features) + P::words(k) * n, from,
                                                              depth, sums + (row - first) * WIDTH,
                                                              next + (t - chunk) * depth * step, step);
                        }
                    };
                    if (std::is_same_v<F, Plain<float>> || count < F::WIDEN_FROM) {
                        run_tiles(typename P::Stored{}, piece);
                    } else {
                        P::widen(piece, depth, wide);
                        run_tiles(typename P::Widened{}, (const char*)wide);
                    }
                }
                for (int64_t row = first; row < last; row++)
                    finish(l, panel, sums + (row - first) * WIDTH, residual ? residual + row * l.columns : nullptr,
                           out + row * l.columns);
            }
        }
    }
}

// The row of the weight that is column c of a panel, or -1 for the padding of the last panel. Gated: as many columns of
// the second half beside those of the first.
int64_t source_row(const Linear& l, int64_t panel, int64_t c) {
    const int64_t column = l.gated ? panel * LANES + c % LANES : panel * WIDTH + c;
    if (column >= l.columns) return -1;
    return column + (l.gated && c >= LANES ? l.columns : 0);
}

template <typename T>
void pack(const Linear& l, const T* weight, T* packed) {
    const int64_t panels = panel_count(l);
#pragma omp parallel for
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t c = 0; c < WIDTH; c++) {
            const int64_t row = source_row(l, panel, c);
            T* to = packed + panel * l.features * WIDTH + c;
            for (int64_t k = 0; k < l.features; k++) to[k * WIDTH] = row < 0 ? T{} : weight[row * l.features + k];
        }
}

// scales, offsets: [rows, features / 32]; stored: [rows, features / 32, 32 values], of 4 bits the low halves of a block's
// 16 bytes being its first 16 values.
template <int BITS>
void pack_blocks(const Linear& l, const float* scales, const float* offsets, const uint8_t* stored, char* packed) {
    using F = Blocks<BITS>;
    constexpr int STORED = F::SIZE * BITS / 8;
    const int64_t panels = panel_count(l), blocks = l.features / F::SIZE;
    std::memset(packed, 0, panels * F::bytes(l.features));
#pragma omp parallel for
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t c = 0; c < WIDTH; c++) {
            const int64_t row = source_row(l, panel, c);
            if (row < 0) continue;
            for (int64_t b = 0; b < blocks; b++) {
                char* to = packed + (panel * blocks + b) * F::bytes(F::SIZE);
                ((float*)to)[c] = scales[row * blocks + b];
                if (BITS == 4) ((float*)to)[WIDTH + c] = offsets[row * blocks + b];
                uint32_t* words = (uint32_t*)((float*)to + F::SCALES) + c;
                const uint8_t* from = stored + (row * blocks + b) * STORED;
                for (int k = 0; k < F::SIZE; k++) {
                    const uint32_t value = BITS == 8 ? from[k] : k < 16 ? from[k] & 15 : from[k - 16] >> 4;
                    words[k / F::PER_WORD * WIDTH] |= value << (k % F::PER_WORD * BITS);
                }
            }
        }
}

}  // namespace

// packed_bytes: of the weights in `packed`, the padding of the last panel included.
// linear: x is [rows, features]; residual [rows, columns] or null, added to the result; out [rows, columns];
// wanted: or null.
#define EXPORT(SUFFIX, FORMAT)                                                                                         \
    int64_t linear_packed_bytes_##SUFFIX(const Linear* l) { return panel_count(*l) * FORMAT::bytes(l->features); }     \
    void linear_##SUFFIX(const Linear* l, const float* x, int64_t rows, const float* residual, float* out,             \
                         const Ahead* wanted) {                                                                        \
        linear<FORMAT, FloatProduct<FORMAT>>(*l, x, rows, residual, out, wanted);                                      \
    }

extern "C" {

int simd_lanes() { return LANES; }

EXPORT(f32, Plain<float>)
EXPORT(bf16, Plain<bf16>)
EXPORT(q4, Blocks<4>)
EXPORT(q8, Blocks<8>)

void linear_integer_q4(const Linear* l, const float* x, int64_t rows, const float* residual, float* out,
                        const Ahead* wanted) {
    linear<Blocks<4>, IntegerProduct<4>>(*l, x, rows, residual, out, wanted);
}
void linear_integer_q8(const Linear* l, const float* x, int64_t rows, const float* residual, float* out,
                        const Ahead* wanted) {
    linear<Blocks<8>, IntegerProduct<8>>(*l, x, rows, residual, out, wanted);
}

void linear_pack_f32(const Linear* l, const float* weight, float* packed) { pack(*l, weight, packed); }
void linear_pack_bf16(const Linear* l, const bf16* weight, bf16* packed) { pack(*l, weight, packed); }
void linear_pack_q4(const Linear* l, const float* scales, const float* offsets, const uint8_t* stored, char* packed) {
    pack_blocks<4>(*l, scales, offsets, stored, packed);
}
void linear_pack_q8(const Linear* l, const float* scales, const float* offsets, const uint8_t* stored, char* packed) {
    pack_blocks<8>(*l, scales, offsets, stored, packed);
}
}
