// How columns are stored, to be multiplied by rows: by steps of the summed dimension.
//
// A matrix is packed into panels of PANEL columns, `step` after `step` (two numbers a step where the CPU has a dot product of bf16
// pairs, one elsewhere):
//
//     panel p:   step 0: column 0 .. 31   step 1: column 0 .. 31   …
//
// Columns may be stored in fewer bits than rows have (Int8); they are widened, exactly, on their way into registers.
#pragma once

#include <type_traits>

#include "vector.h"

namespace baton {

constexpr int PANEL = 2 * LANES;

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

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Whether a row's numbers are made fp32 some steps at a time, before they are multiplied: else each would be with each panel.
template <class T> constexpr bool IS_WIDENED = Step<T>::WIDTH == 1 && sizeof(T) == 2;
// What columns are where more rows want them than make them so each for itself.
template <class T> using Ready = std::conditional_t<IS_WIDENED<T>, float, T>;

template <class T> constexpr int steps_of(int summed) { return ceil_div(summed, Step<T>::WIDTH); }

// Numbers in one panel.
template <class T> constexpr size_t panel_size(int summed) { return size_t(steps_of<T>(summed)) * Step<T>::WIDTH * PANEL; }

}  // namespace baton
