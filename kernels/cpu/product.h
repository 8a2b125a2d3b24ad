// Rows times packed columns: the inner loop that linears and attention share, and with it one order of summation.
//
// Each sum is one chain over the steps in order, in one lane of one register, however many rows and panels share the loop:
// that is why a row's bits cannot depend on its neighbours.
#pragma once

#include "panels.h"

namespace baton {

#if defined(__AVX512F__)  // what fits into 32 registers of 16 numbers: 24 sums, the columns of a step, a spare
constexpr int MAX_ROWS = 12;  // of one pass over one panel
constexpr int MAX_PANELS = 2;  // of one pass, over half as many rows
constexpr int ROWS_UNPACKING = MAX_ROWS;  // up to so many rows' passes unpack columns each for itself, if they need it
#else  // 16 registers of 8: 12 sums
constexpr int MAX_ROWS = 3;
constexpr int MAX_PANELS = 1;
constexpr int ROWS_UNPACKING = 64;
#endif
constexpr int max_rows(int panels) { return MAX_ROWS / panels; }

// Call f with num (LEAST .. M) as a compile-time constant.
template <int M, int LEAST = 1, class F> BATON_INLINE void with_constant(int num, F &&f) {
    if constexpr (M > LEAST)
        if (num < M) return with_constant<M - 1, LEAST>(num, f);
    f(std::integral_constant<int, M>{});
}

// Which memory a pass brings nearer while it computes: hardware prefetchers stop at each page and at each panel's end.
struct Ahead {
    size_t distance = 0;         // bytes ahead of the panels being read; 0: no
    const char *next = nullptr;  // or a stretch elsewhere, `bytes_a_step` of it with each step
    size_t bytes_a_step = 0;
};

template <int M, int VECTORS> BATON_INLINE void clear(Floats (&sums)[M][VECTORS]) {
#pragma GCC unroll 12
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[m][v] = Floats{};
}

// Bring nearer what is `ahead` of some steps.
template <size_t BYTES, int PANELS> BATON_INLINE void bring_ahead(const char *at, size_t panel_bytes, int steps, Ahead &ahead) {
    if (ahead.distance) {
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
            for (size_t byte = 0; byte < BYTES; byte += 64) __builtin_prefetch(at + p * panel_bytes + ahead.distance + byte, 0, 2);
    } else if (ahead.next) {
        for (size_t byte = 0; byte < steps * ahead.bytes_a_step; byte += 64) __builtin_prefetch(ahead.next + byte, 0, 2);
        ahead.next += steps * ahead.bytes_a_step;
    }
}

#if !defined(__AVX512F__)
// The first `count` numbers of a row as fp32; `to` begins at a multiple of 32 bytes.
template <class T> BATON_INLINE void widen(const T *row, int count, float *to) {
    int i = 0;
    for (; i + 8 <= count; i += 8) _mm256_store_ps(to + i, load_eight(row + i));
    for (; i < count; i++) to[i] = number_of(row[i]);
}

// The same address, and the compiler does not know it: what is read there is read again, where it would be kept in a register and a
// sum in memory.
BATON_INLINE const float *again(const float *at) {
    asm volatile("" : "+r"(at));
    return at;
}

// Add to sums[m][v] row m times 16 columns of PANELS adjacent panels. Of 16 registers the sums take up to 12; rows are widened
// before, some steps at a time, so that a number of theirs is one load that spreads it.
template <class T, int M, int PANELS, class C>
BATON_INLINE void multiply_on(const T *const *rows, const C *columns, size_t panel, int steps, Floats (&sums)[M][2 * PANELS],
                              Ahead ahead = {}) {
    constexpr int EIGHTS = 4 * PANELS, WIDENED = 128, TOGETHER = 4;
    alignas(64) float wide[M][WIDENED];
    for (int begin = 0; begin < steps; begin += WIDENED) {
        const int count = steps - begin < WIDENED ? steps - begin : WIDENED;
        constexpr bool is_wide = std::is_same_v<T, float> && std::is_same_v<C, float>;
        const float *numbers[M];
        for (int m = 0; m < M; m++) {
            if constexpr (is_wide) numbers[m] = rows[m] + begin;
            else widen(rows[m] + begin, count, wide[m]), numbers[m] = wide[m];
        }
        __m256 sum[M][EIGHTS];
#pragma GCC unroll 12
        for (int m = 0; m < M; m++)
#pragma GCC unroll 8
            for (int v = 0; v < EIGHTS; v += 2) sum[m][v] = sums[m][v / 2].low, sum[m][v + 1] = sums[m][v / 2].high;
        auto step = [&](int i) __attribute__((always_inline)) {
            const C *at = columns + size_t(begin + i) * PANEL;
            auto column = [&](int v) __attribute__((always_inline)) { return PanelStep<T, C>::load(at + v / 4 * panel, v % 4); };
            if constexpr (std::is_same_v<C, float>) {
                __m256 spread[M];
#pragma GCC unroll 12
                for (int m = 0; m < M; m++) spread[m] = _mm256_broadcast_ss(numbers[m] + i);
#pragma GCC unroll 8
                for (int v = 0; v < EIGHTS; v++) {
                    const __m256 own = column(v);
#pragma GCC unroll 12
                    for (int m = 0; m < M; m++) sum[m][v] = _mm256_fmadd_ps(own, spread[m], sum[m][v]);
                }
            } else {  // two columns take the registers of two rows' numbers
#pragma GCC unroll 4
                for (int v = 0; v < EIGHTS; v += 2) {
                    const __m256 first = column(v), second = column(v + 1);
                    const float *row = again(wide[0] + i);
#pragma GCC unroll 12
                    for (int m = 0; m < M; m++) {
                        const __m256 spread = _mm256_broadcast_ss(row + m * WIDENED);
                        sum[m][v] = _mm256_fmadd_ps(first, spread, sum[m][v]);
                        sum[m][v + 1] = _mm256_fmadd_ps(second, spread, sum[m][v + 1]);
                    }
                }
            }
        };
        int i = 0;
        for (; i + TOGETHER <= count; i += TOGETHER) {
            const C *at = columns + size_t(begin + i) * PANEL;
            bring_ahead<TOGETHER * PANEL * sizeof(C), PANELS>(reinterpret_cast<const char *>(at), panel * sizeof(C), TOGETHER, ahead);
#pragma GCC unroll 4
            for (int j = 0; j < TOGETHER; j++) step(i + j);
        }
        for (; i < count; i++) step(i);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++)
#pragma GCC unroll 8
            for (int v = 0; v < EIGHTS; v += 2) sums[m][v / 2] = {sum[m][v], sum[m][v + 1]};
    }
}
#else
// Sixteen cells of 4 bytes: pairs of bf16, or numbers widened.
template <class T> BATON_INLINE Floats cells_of(const T *row) {
    if constexpr (IS_WIDENED<T>) return load(row);
    else return (Floats)_mm512_loadu_si512(row);
}

// The first `count` numbers of a row as fp32.
template <class T> BATON_INLINE void widen(const T *row, int count, float *to) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, load(row + i));
    for (; i < count; i++) to[i] = number_of(row[i]);
}

// Add one step to the sums. `at`: the step's columns in the first panel; `offset`: where the step is in a row.
template <class T, class C, int M, int VECTORS>
BATON_INLINE void multiply_step(const T *const (&row)[M], size_t offset, const C *at, size_t panel, Floats (&sums)[M][VECTORS]) {
    Floats column[VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v += 2) PanelStep<T, C>::load_both(at + (v / 2) * panel, column[v], column[v + 1]);
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) {
        Floats spread = Step<T>::spread(row[m] + offset);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[m][v] = Step<T>::add(sums[m][v], column[v], spread);
    }
}

// Add to sums[m][v] row m times 16 columns of PANELS adjacent panels.
template <class T, int M, int PANELS, class C>
BATON_INLINE void multiply_on(const T *const *rows, const C *columns, size_t panel, int steps, Floats (&sums)[M][2 * PANELS],
                              Ahead ahead = {}) {
    constexpr int W = Step<T>::WIDTH;
    if constexpr (IS_WIDENED<T>) {
        constexpr int STEPS = 128;
        alignas(64) float wide[M][STEPS];
        const float *row[M];
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) row[m] = wide[m];
        for (int begin = 0; begin < steps; begin += STEPS) {
            const int count = steps - begin < STEPS ? steps - begin : STEPS;
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) widen(rows[m] + begin, count, wide[m]);
            for (int i = 0; i < count; i++) {
                const C *at = columns + size_t(begin + i) * PANEL;
                bring_ahead<PANEL * sizeof(C), PANELS>(reinterpret_cast<const char *>(at), panel * sizeof(C), 1, ahead);
                multiply_step(row, i, at, panel, sums);
            }
        }
        return;
    }
    const T *row[M];
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) row[m] = rows[m];
    for (size_t step = 0; step < size_t(steps); step++) {
        const C *at = columns + step * (W * PANEL);
        bring_ahead<W * PANEL * sizeof(C), PANELS>(reinterpret_cast<const char *>(at), panel * sizeof(C), 1, ahead);
        multiply_step(row, step * W, at, panel, sums);
    }
}
#endif

// The same from zero.
template <class T, int M, int PANELS, class C>
BATON_INLINE void multiply(const T *const *rows, const C *columns, size_t panel, int steps, Floats (&sums)[M][2 * PANELS],
                           Ahead ahead = {}) {
    clear(sums);
    multiply_on<T, M, PANELS>(rows, columns, panel, steps, sums, ahead);
}

}  // namespace baton
