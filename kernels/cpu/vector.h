// Sixteen fp32 numbers at a time: loads, rounding, exp, sums in a fixed order.
//
// All else is written with these, so that variants of the library (see cpu_build.py) share most lines; intrinsics stand elsewhere
// only where they cannot say it, and whole inner loops where 16 registers of 8 numbers want another one than 32 of 16. Nothing here depends on how many numbers a caller has: a lane's result is the
// same in a full vector and in the tail of a row.
#pragma once

#if defined(__AVX512F__)
#include "vector_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "vector_avx2.h"
#else
#error "neither AVX-512 nor AVX2"
#endif

namespace baton {

// The first n lanes; the others are zero, and memory behind them is not touched.
template <class T> BATON_INLINE Floats load_some(const T *from, int n) {
    if (n >= LANES) return load(from);
    T lanes[LANES] = {};
    std::memcpy(lanes, from, sizeof(T) * n);
    return load(lanes);
}

template <class T> BATON_INLINE void store_some(T *to, Floats x, int n) {
    if (n >= LANES) return store(to, x);
    T lanes[LANES];
    store(lanes, x);
    std::memcpy(to, lanes, sizeof(T) * n);
}

// exp of what is 88 at most, off by less than 2 units in the last place; 0 below -87, a NaN of a NaN. The polynomial is Cephes'
// expf. N at once, step by step: a single one is a long chain, and CPUs do not look far enough ahead to find the next.
template <int N> BATON_INLINE void exponentials_at_once(Floats *x) {
    const Floats magic = all(12582912.0f);  // 1.5 * 2^23: its sum rounds to integers
    Floats y[N], shifted[N], n[N], p[N];
    auto each = [](auto &&step) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) step(i);
    };
    auto multiply_with = [&](float number) __attribute__((always_inline)) {
        each([&](int i) __attribute__((always_inline)) { p[i] = multiply_add(p[i], y[i], all(number)); });
    };
    each([&](int i) __attribute__((always_inline)) { y[i] = at_least(-87.0f, x[i]); });
    each([&](int i) __attribute__((always_inline)) { shifted[i] = multiply_add(y[i], all(1.44269504088896341f), magic); });
    each([&](int i) __attribute__((always_inline)) { n[i] = shifted[i] - magic; });
    each([&](int i) __attribute__((always_inline)) { y[i] = multiply_add(n[i], all(-0.693359375f), y[i]); });
    each([&](int i) __attribute__((always_inline)) { y[i] = multiply_add(n[i], all(2.12194440e-4f), y[i]); });
    each([&](int i) __attribute__((always_inline)) { p[i] = multiply_add(all(1.9875691500e-4f), y[i], all(1.3981999507e-3f)); });
    multiply_with(8.3334519073e-3f), multiply_with(4.1665795894e-2f), multiply_with(1.6666665459e-1f), multiply_with(5.0000001201e-1f);
    each([&](int i) __attribute__((always_inline)) { p[i] = multiply_add(p[i], y[i] * y[i], y[i]) + 1.0f; });
    each([&](int i) __attribute__((always_inline)) {
        const Floats value = p[i] * as_floats(((Bits)shifted[i] - (Bits)magic + 127u) << 23);
        x[i] = as_floats(~(Bits)(x[i] < all(-87.0f)) & (Bits)value);
    });
}
template <int N> BATON_INLINE void exponentials_below(Floats (&x)[N]) {
    constexpr int M = N < EXPONENTIALS ? N : EXPONENTIALS;
    static_assert(N % M == 0);
#pragma GCC unroll 16
    for (int i = 0; i < N; i += M) exponentials_at_once<M>(x + i);
}

// The same as exponentials_below, of anything.
BATON_INLINE Floats exponential(Floats x) {
    Floats one[1] = {at_most(88.0f, x)};
    exponentials_below(one);
    return one[0];
}

}  // namespace baton
