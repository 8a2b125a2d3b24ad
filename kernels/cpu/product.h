// Rows times packed columns: the one inner loop that linears and attention share, and with it one order of summation.
//
// A matrix is packed into panels of PANEL columns, `step` after `step` of the summed dimension (two numbers a step where
// the CPU has a dot product of bf16 pairs, one elsewhere):
//
//     panel p:   step 0: column 0 .. 31   step 1: column 0 .. 31   …
//
// Each sum is one chain over the steps in order, in one lane of one register, however many rows and panels share the loop:
// that is why a row's bits cannot depend on its neighbours.
#pragma once

#include "vector.h"

namespace baton {

constexpr int PANEL = 2 * LANES;
#if defined(__AVX512F__)  // what fits into 32 registers of 16 numbers: 24 sums, the columns of a step, a spare
constexpr int MAX_ROWS_OF_PAIR = 6;  // of one pass over two panels
constexpr int MAX_ROWS = 12;         // of one pass over one panel
#else  // 16 registers of 8
constexpr int MAX_ROWS_OF_PAIR = 1;
constexpr int MAX_ROWS = 3;
#endif

// How one step is stored and added up.
template <class T> struct Step {
    static constexpr int WIDTH = 1;
    static BATON_INLINE Floats columns(const T *from) { return load(from); }
    static BATON_INLINE Floats spread(const T *from) { return all(*from); }
    static BATON_INLINE Floats add(Floats sum, Floats columns, Floats row) { return multiply_add(columns, row, sum); }
};

template <> struct Step<Fp16> {
    static constexpr int WIDTH = 1;
    static BATON_INLINE Floats columns(const Fp16 *from) { return load(from); }
    static BATON_INLINE Floats spread(const Fp16 *from) { return all(_cvtsh_ss(from->bits)); }
    static BATON_INLINE Floats add(Floats sum, Floats columns, Floats row) { return multiply_add(columns, row, sum); }
};

template <> struct Step<Bf16> {
#if defined(__AVX512BF16__)
    static constexpr int WIDTH = 2;
    static BATON_INLINE Floats columns(const Bf16 *from) { return (Floats)_mm512_loadu_si512(from); }
    static BATON_INLINE Floats spread(const Bf16 *from) {
        int32_t pair;
        std::memcpy(&pair, from, sizeof pair);
        return (Floats)_mm512_set1_epi32(pair);
    }
    static BATON_INLINE Floats add(Floats sum, Floats columns, Floats row) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)columns, (__m512bh)row);
    }
#else
    static constexpr int WIDTH = 1;
    static BATON_INLINE Floats columns(const Bf16 *from) { return load(from); }
    static BATON_INLINE Floats spread(const Bf16 *from) {
        uint32_t bits = uint32_t(from->bits) << 16;
        float x;
        std::memcpy(&x, &bits, sizeof x);
        return all(x);
    }
    static BATON_INLINE Floats add(Floats sum, Floats columns, Floats row) { return multiply_add(columns, row, sum); }
#endif
};

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <class T> constexpr int steps_of(int summed) { return ceil_div(summed, Step<T>::WIDTH); }

// Numbers in one panel.
template <class T> constexpr size_t panel_size(int summed) { return size_t(steps_of<T>(summed)) * Step<T>::WIDTH * PANEL; }

constexpr size_t CHUNK = 512;  // bytes that are brought nearer at a time

BATON_INLINE void bring(const char *chunk) {
#pragma GCC unroll 8
    for (size_t byte = 0; byte < CHUNK; byte += 64) __builtin_prefetch(chunk + byte, 0, 3);
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

// Add one step to the sums. `at`: the step's columns in the first panel; `offset`: where the step is in a row.
template <class T, int M, int VECTORS>
BATON_INLINE void multiply_step(const T *const (&row)[M], size_t offset, const T *at, size_t panel, Floats (&sums)[M][VECTORS]) {
    Floats column[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) column[v] = Step<T>::columns(at + (v / 2) * panel + (v % 2) * (Step<T>::WIDTH * LANES));
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) {
        Floats spread = Step<T>::spread(row[m] + offset);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[m][v] = Step<T>::add(sums[m][v], column[v], spread);
    }
}

// sums[m][v] = row m times 16 columns of PANELS adjacent panels.
template <class T, int M, int PANELS>
BATON_INLINE void multiply(const T *const *rows, const T *columns, size_t panel, int steps, Floats (&sums)[M][2 * PANELS],
                           Ahead ahead = {}) {
    constexpr int W = Step<T>::WIDTH;
    clear(sums);
    const T *row[M];
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) row[m] = rows[m];
    for (size_t step = 0; step < size_t(steps); step++) {
        const T *at = columns + step * (W * PANEL);
        if (ahead.distance) {
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
                for (size_t byte = 0; byte < W * PANEL * sizeof(T); byte += 64)
                    __builtin_prefetch(reinterpret_cast<const char *>(at + p * panel) + ahead.distance + byte, 0, 2);
        } else if (ahead.next) {
            for (size_t byte = 0; byte < ahead.bytes_a_step; byte += 64) __builtin_prefetch(ahead.next + byte, 0, 2);
            ahead.next += ahead.bytes_a_step;
        }
        multiply_step(row, step * W, at, panel, sums);
    }
}

}  // namespace baton
