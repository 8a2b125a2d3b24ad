// Rows times packed columns: the inner loop that linears and attention share, and with it one order of summation.
//
// A matrix is packed into panels of PANEL columns, `step` after `step` of the summed dimension (two numbers a step where
// the CPU has a dot product of bf16 pairs, one elsewhere):
//
//     panel p:   step 0: column 0 .. 31   step 1: column 0 .. 31   …
//
// Columns may be stored in fewer bits than rows have (Int8); they are widened, exactly, on their way into registers.
//
// Each sum is one chain over the steps in order, in one lane of one register, however many rows and panels share the loop:
// that is why a row's bits cannot depend on its neighbours.
#pragma once

#include <type_traits>

#include "vector.h"

namespace baton {

constexpr int PANEL = 2 * LANES;
#if defined(__AVX512F__)  // what fits into 32 registers of 16 numbers: 24 sums, the columns of a step, a spare
constexpr int MAX_ROWS = 12;  // of one pass over one panel
constexpr int MAX_PANELS = 2;  // of one pass, over half as many rows
constexpr int PASSES_UNPACKING = 1;  // so few unpack columns each for itself, if they need it
template <class T> using Unpacked = T;  // what columns are for more passes
#else  // 16 registers of 8: 12 sums
constexpr int MAX_ROWS = 3;
constexpr int MAX_PANELS = 1;
constexpr int PASSES_UNPACKING = 8;
template <class T> using Unpacked = float;
#endif
constexpr int max_rows(int panels) { return MAX_ROWS / panels; }

// How one step is stored (`put`: as `columns` finds it) and added up.
template <class T> struct Step {
    static constexpr int WIDTH = 1;
    static BATON_INLINE Floats columns(const T *from) { return load(from); }
    static BATON_INLINE void put(T *to, Floats columns) { store(to, columns); }
    static BATON_INLINE Floats spread(const T *from) { return all(number_of(*from)); }
    static BATON_INLINE Floats add(Floats sum, Floats columns, Floats row) { return multiply_add(columns, row, sum); }
};

#if defined(__AVX512BF16__)
template <> struct Step<Bf16> {
    static constexpr int WIDTH = 2;
    static BATON_INLINE Floats columns(const Bf16 *from) { return (Floats)_mm512_loadu_si512(from); }
    static BATON_INLINE void put(Bf16 *to, Floats columns) { _mm512_storeu_si512(to, (__m512i)columns); }
    static BATON_INLINE Floats spread(const Bf16 *from) {
        int32_t pair;
        std::memcpy(&pair, from, sizeof pair);
        return (Floats)_mm512_set1_epi32(pair);
    }
    static BATON_INLINE Floats add(Floats sum, Floats columns, Floats row) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)columns, (__m512bh)row);
    }
};
#endif

// A weight of 8 bits, a whole number of -127 .. 127, which each dtype of rows holds exactly: products and their order are those
// of weights that are stored wide.
struct Int8 {
    uint8_t bits;
};

#if defined(__AVX512F__)
// How a panel's step comes into registers: 32 columns of C, to be multiplied by rows of T. place: where in the step a column's
// number of position w is.
template <class T, class C> struct PanelStep {
    static int place(int column, int w) { return column * Step<T>::WIDTH + w; }
    static BATON_INLINE void load_both(const C *from, Floats &first, Floats &second) {
        first = Step<C>::columns(from), second = Step<C>::columns(from + Step<T>::WIDTH * LANES);
    }
};

template <class T> struct PanelStep<T, Int8> {
    static_assert(Step<T>::WIDTH == 1);
    static int place(int column, int) { return column; }
    static uint8_t code(int8_t number) { return uint8_t(number); }
    static BATON_INLINE void load_both(const Int8 *from, Floats &first, Floats &second) {
        const int8_t *numbers = reinterpret_cast<const int8_t *>(from);
        first = load(numbers), second = load(numbers + LANES);
    }
};
#else
// How a panel's step comes into registers: eighth is 0 .. 3, for columns 8 * eighth on. place: where in the step a column is.
template <class T, class C> struct PanelStep {
    static int place(int column, int) { return column; }
    static BATON_INLINE __m256 load(const C *from, int eighth) { return load_eight(from + 8 * eighth); }
};

template <class T> struct PanelStep<T, Int8> {
    static int place(int column, int) { return column; }
    static uint8_t code(int8_t number) { return uint8_t(number); }
    static BATON_INLINE __m256 load(const Int8 *from, int eighth) {
        return load_eight(reinterpret_cast<const int8_t *>(from) + 8 * eighth);
    }
};

// Columns that are 8 apart are a pair: numbers side by side would have to be drawn apart before they could be widened.
template <class T> struct PanelStep<T, Bf16> {
    static int place(int column, int) { return column / 16 * 16 + column % 8 * 2 + column / 8 % 2; }
    static BATON_INLINE __m256 load(const Bf16 *from, int eighth) {
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from + eighth / 2 * 16));
        return eighth % 2 ? second_of_pairs(pairs) : first_of_pairs(pairs);
    }
};
#endif

#if defined(__AVX512BF16__)
// The bf16 of 0 .. 127, byte by byte.
struct Bf16Bytes {
    uint8_t low[128], high[128];
    constexpr Bf16Bytes() : low(), high() {
        for (int number = 1; number < 128; number++) {
            int exponent = 0;
            while (number >> (exponent + 1)) exponent++;
            const int bits = (exponent + 127) << 7 | ((number << (7 - exponent)) & 0x7F);
            low[number] = uint8_t(bits & 0xFF), high[number] = uint8_t(bits >> 8);
        }
    }
};
alignas(64) inline constexpr Bf16Bytes BF16_BYTES;

// Pairs of bf16 from sign and magnitude: two look-ups by the magnitude's 7 bits give the bytes of 64 numbers. Bytes lie so
// that unpacking them, which works within quarters of a register, leaves the first 16 columns in one and the others in another.
template <> struct PanelStep<Bf16, Int8> {
    static int place(int column, int w) {
        const int within = (column % LANES) * 2 + w;
        return within / 8 * 16 + column / LANES * 8 + within % 8;
    }
    static uint8_t code(int8_t number) { return uint8_t(number < 0 ? 0x80 | -number : number); }
    static BATON_INLINE void load_both(const Int8 *from, Floats &first, Floats &second) {
        const __m512i codes = _mm512_loadu_si512(from), *low_bytes = reinterpret_cast<const __m512i *>(BF16_BYTES.low),
                      *high_bytes = reinterpret_cast<const __m512i *>(BF16_BYTES.high);
        const __m512i low = _mm512_permutex2var_epi8(low_bytes[0], codes, low_bytes[1]);
        __m512i high = _mm512_permutex2var_epi8(high_bytes[0], codes, high_bytes[1]);
        high = _mm512_ternarylogic_epi64(high, codes, _mm512_set1_epi8(char(0x80)), 0xF8);  // high | (codes & 0x80)
        first = (Floats)_mm512_unpacklo_epi8(low, high), second = (Floats)_mm512_unpackhi_epi8(low, high);
    }
};
#endif

// Call f with num (1 .. M) as a compile-time constant.
template <int M, class F> BATON_INLINE void with_constant(int num, F &&f) {
    if constexpr (M > 1)
        if (num < M) return with_constant<M - 1>(num, f);
    f(std::integral_constant<int, M>{});
}

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Whether a row's numbers are made fp32 some steps at a time, before they are multiplied: else each would be with each panel.
template <class T> constexpr bool IS_WIDENED = Step<T>::WIDTH == 1 && sizeof(T) == 2;
// What a linear's columns are where more rows want them than make them so each for itself.
template <class T> using Ready = std::conditional_t<IS_WIDENED<T>, float, T>;

template <class T> constexpr int steps_of(int summed) { return ceil_div(summed, Step<T>::WIDTH); }

// Numbers in one panel.
template <class T> constexpr size_t panel_size(int summed) { return size_t(steps_of<T>(summed)) * Step<T>::WIDTH * PANEL; }

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
