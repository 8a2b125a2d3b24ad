// A panel times a few rows where CPUs have no AVX-512: half a panel's columns at a time, some steps at a time.
//
// Of 16 registers 12 are sums of six rows and 16 columns, which are made fp32 once for all six; with a whole panel's columns there
// were as many for three rows, and twice the conversions. What all passes read of a block of steps stays in the nearest cache, and
// each brings its share of what comes next meanwhile: unasked, cores and memory waited for each other.
#pragma once

#include "product.h"
#include "workspace.h"

namespace baton {

#if !defined(__AVX512F__)
constexpr int LEAST_ROWS = 4, HALF_ROWS = 6;  // at all, up to ROWS_UNPACKING; of one pass at most
constexpr int BLOCK_STEPS = 128, STEPS_TOGETHER = 4;
constexpr size_t BLOCKS_AHEAD_BYTES = 16384;

// Add to sums [M, PANEL] rows [M, BLOCK_STEPS] times 16 columns, of which `columns` are the first step's. So many lines of what is
// `ahead` are brought nearer with every few steps.
template <class T, int M, class C>
[[gnu::noinline]] void multiply_half(const float *rows, const C *columns, int steps, float *sums, const char *ahead, int lines) {
    __m256 sum[M][2];
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) sum[m][0] = _mm256_load_ps(sums + m * PANEL), sum[m][1] = _mm256_load_ps(sums + m * PANEL + 8);
    auto step = [&](int i) __attribute__((always_inline)) {
        const __m256 first = PanelStep<T, C>::load(columns + i * PANEL, 0), second = PanelStep<T, C>::load(columns + i * PANEL, 1);
        const float *row = again(rows + i);
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
            const __m256 spread = _mm256_broadcast_ss(row + m * BLOCK_STEPS);
            sum[m][0] = _mm256_fmadd_ps(first, spread, sum[m][0]);
            sum[m][1] = _mm256_fmadd_ps(second, spread, sum[m][1]);
        }
    };
    int i = 0;
    for (; i + STEPS_TOGETHER <= steps; i += STEPS_TOGETHER) {
        for (int line = 0; line < lines; line++, ahead += 64) __builtin_prefetch(ahead, 0, 3);
#pragma GCC unroll 4
        for (int j = 0; j < STEPS_TOGETHER; j++) step(i + j);
    }
    for (; i < steps; i++) step(i);
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) _mm256_store_ps(sums + m * PANEL, sum[m][0]), _mm256_store_ps(sums + m * PANEL + 8, sum[m][1]);
}

// x [num_rows, in] times a panel, as sums [num_rows, PANEL]; `rows`: room for [num_rows, BLOCK_STEPS].
template <class T, class C>
void multiply_by_halves(const T *x, int num_rows, int in, const C *columns, float *rows, float *sums) {
    const int passes = ceil_div(num_rows, HALF_ROWS);
    constexpr int LINES = STEPS_TOGETHER * PANEL * sizeof(C) / 64;  // that a few steps' columns take
    const int lines = ceil_div(LINES, 2 * passes);  // of what is ahead, with as many steps of one sweep
    std::fill_n(sums, size_t(num_rows) * PANEL, 0.0f);
    for (int begin = 0; begin < in; begin += BLOCK_STEPS) {
        const int steps = std::min(BLOCK_STEPS, in - begin);
        for (int row = 0; row < num_rows; row++) widen(x + size_t(row) * in + begin, steps, rows + row * BLOCK_STEPS);
        const C *block = columns + size_t(begin) * PANEL;
        const char *ahead = reinterpret_cast<const char *>(block) + BLOCKS_AHEAD_BYTES;
        for (int sweep = 0; sweep < 2 * passes; sweep++) {
            const int pass = sweep / 2, half = sweep % 2 * LANES;
            const int first = num_rows * pass / passes, last = num_rows * (pass + 1) / passes;
            const int due = sweep * lines < LINES ? lines : 0;
            with_constant<HALF_ROWS, LEAST_ROWS - 1>(last - first, [&](auto constant) {
                float *to = sums + first * PANEL + half;
                multiply_half<T, constant()>(rows + first * BLOCK_STEPS, block + half, steps, to, ahead, due);
            });
            ahead += size_t(due) * (steps / STEPS_TOGETHER) * 64;
        }
    }
}
#endif

}  // namespace baton
