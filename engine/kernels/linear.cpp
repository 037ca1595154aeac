// x @ weight.T for weights packed once: at the speed of memory for a few rows, of the arithmetic units for many.
//
// Packed: panels of WIDTH output columns; within a panel, for each input feature, its WIDTH weights side by side. The
// same panels serve every number of rows. Weights may be bfloat16, widened as they are loaded: half the memory traffic
// and the full float32 arithmetic, which is what a machine without bfloat16 instructions wants.
#include <algorithm>
#include <memory>

#include "simd.h"

namespace {

constexpr int WIDTH = 2 * LANES;
constexpr int MAX_ROWS = LANES == 16 ? 12 : 6;  // rows of one tile: its accumulators just fit the registers
constexpr int DEPTH = 256;                      // input features per pass: a panel's piece stays in the first-level cache
constexpr int CHUNK = 96;                       // rows per pass over the weights: their inputs stay in the second-level cache

// acc[ROWS][WIDTH] += a[depth][ROWS] * b[depth][WIDTH]
template <int ROWS, typename W>
void tile(const float* a, const W* b, int depth, float* acc) {
    vec sums[ROWS][2];
    for (int r = 0; r < ROWS; r++) {
        sums[r][0] = load(acc + r * WIDTH);
        sums[r][1] = load(acc + r * WIDTH + LANES);
    }
    for (int k = 0; k < depth; k++) {
        __builtin_prefetch(b + (k + 16) * WIDTH);
        vec b0 = load(b + k * WIDTH), b1 = load(b + k * WIDTH + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            vec x = splat(a[k * ROWS + r]);
            sums[r][0] += x * b0;
            sums[r][1] += x * b1;
        }
    }
    for (int r = 0; r < ROWS; r++) {
        store(acc + r * WIDTH, sums[r][0]);
        store(acc + r * WIDTH + LANES, sums[r][1]);
    }
}

template <int ROWS = MAX_ROWS, typename W>
void run_tile(int rows, const float* a, const W* b, int depth, float* acc) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) return tile<ROWS>(a, b, depth, acc);
        run_tile<ROWS - 1>(rows, a, b, depth, acc);
    }
}

// Rows divided into tiles as evenly as can be: 8 rows are 4 + 4, not 6 + 2, whose second tile would wait on latencies.
struct Tiles {
    int64_t rows, count;
    explicit Tiles(int64_t rows) : rows(rows), count((rows + MAX_ROWS - 1) / MAX_ROWS) {}
    int64_t start(int64_t i) const { return i * (rows / count) + std::min(i, rows % count); }
};

template <typename W>
void linear(const float* x, int64_t rows, int64_t features, const W* packed, const float* bias, int64_t columns,
            float* out) {
    const int64_t panels = (columns + WIDTH - 1) / WIDTH;
    static thread_local std::unique_ptr<float[]> buffer;
    static thread_local int64_t buffer_size = 0;
    if (buffer_size < rows * features) {
        buffer_size = rows * features;
        buffer.reset(new float[buffer_size]);
    }
    float* a = buffer.get();  // each tile transposed: [features][rows of the tile]
    const Tiles tiles(rows);
#pragma omp parallel
    {
#pragma omp for
        for (int64_t t = 0; t < tiles.count; t++) {
            const int64_t first = tiles.start(t), n = tiles.start(t + 1) - first;
            float* to = a + first * features;
            for (int64_t r = 0; r < n; r++) {
                const float* from = x + (first + r) * features;
                for (int64_t k = 0; k < features; k++) to[k * n + r] = from[k];
            }
        }
        alignas(64) float acc[CHUNK * WIDTH], wide[DEPTH * WIDTH];
        const int64_t tiles_per_chunk = CHUNK / MAX_ROWS;
        for (int64_t chunk = 0; chunk < tiles.count; chunk += tiles_per_chunk) {
            const int64_t end = std::min(chunk + tiles_per_chunk, tiles.count);
            const int64_t first = tiles.start(chunk);
#pragma omp for nowait schedule(dynamic)
            for (int64_t panel = 0; panel < panels; panel++) {
                const W* b = packed + panel * features * WIDTH;
                std::fill(acc, acc + (tiles.start(end) - first) * WIDTH, 0.0f);
                for (int64_t k = 0; k < features; k += DEPTH) {
                    const int depth = int(std::min<int64_t>(DEPTH, features - k));
                    auto run_tiles = [&](const auto* piece) {
                        for (int64_t t = chunk; t < end; t++) {
                            const int64_t row = tiles.start(t), n = tiles.start(t + 1) - row;
                            run_tile(int(n), a + row * features + k * n, piece, depth, acc + (row - first) * WIDTH);
                        }
                    };
                    if (sizeof(W) == sizeof(float) || end - chunk < 3) {
                        run_tiles(b + k * WIDTH);
                    } else {  // many tiles: widen once for all of them
                        for (int i = 0; i < depth * WIDTH; i += LANES) store(wide + i, load(b + k * WIDTH + i));
                        run_tiles(wide);
                    }
                }
                const int64_t column = panel * WIDTH;
                const int width = int(std::min<int64_t>(WIDTH, columns - column));
                for (int64_t row = first; row < tiles.start(end); row++) {
                    const float* from = acc + (row - first) * WIDTH;
                    float* to = out + row * columns + column;
                    for (int c = 0; c < width; c++) to[c] = bias ? from[c] + bias[column + c] : from[c];
                }
            }
        }
    }
}

template <typename W>
void pack(const W* weight, int64_t columns, int64_t features, W* packed) {
    const int64_t panels = (columns + WIDTH - 1) / WIDTH;
#pragma omp parallel for
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t k = 0; k < features; k++)
            for (int64_t c = 0; c < WIDTH; c++) {
                const int64_t column = panel * WIDTH + c;
                packed[(panel * features + k) * WIDTH + c] = column < columns ? weight[column * features + k] : W{};
            }
}

}  // namespace

extern "C" {

// Columns are padded to a multiple of this in packed weights.
int linear_width() { return WIDTH; }

int simd_lanes() { return LANES; }

void linear_pack_f32(const float* weight, int64_t columns, int64_t features, float* packed) {
    pack(weight, columns, features, packed);
}
void linear_pack_bf16(const bf16* weight, int64_t columns, int64_t features, bf16* packed) {
    pack(weight, columns, features, packed);
}
void linear_f32(const float* x, int64_t rows, int64_t features, const float* packed, const float* bias, int64_t columns,
                float* out) {
    linear(x, rows, features, packed, bias, columns, out);
}
void linear_bf16(const float* x, int64_t rows, int64_t features, const bf16* packed, const float* bias,
                 int64_t columns, float* out) {
    linear(x, rows, features, packed, bias, columns, out);
}
}
