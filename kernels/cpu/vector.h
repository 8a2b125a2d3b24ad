// Sixteen fp32 numbers at a time: loads, rounding, exp, sums in a fixed order.
//
// Written with the compiler's vector types, so that every variant of the library (see build.py) comes from the same lines;
// intrinsics stand only where those types cannot say it. Nothing here depends on how many numbers a caller has: a lane's
// result is the same in a full vector and in the tail of a row.
//
// Without AVX-512 a vector is two registers of 8. Compilers add and multiply those well, and do all else (conversions, choices,
// narrowing) number by number; so these are written out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include <immintrin.h>

#define BATON_INLINE inline __attribute__((always_inline))

namespace baton {

constexpr int LANES = 16;
using Floats = float __attribute__((vector_size(64)));
using Bits = uint32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(32)));

struct Bf16 {
    uint16_t bits;
};

struct Fp16 {
    uint16_t bits;
};

BATON_INLINE Floats all(float x) { return x - Floats{}; }

BATON_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    std::memcpy(x, &a, sizeof x), std::memcpy(y, &b, sizeof y), std::memcpy(z, &c, sizeof z);
    for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
    std::memcpy(&c, z, sizeof z);
    return c;
#else
    Floats sum;
    for (int i = 0; i < LANES; i++) sum[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return sum;
#endif
}

BATON_INLINE Floats load(const float *from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

#if !defined(__AVX512F__) && defined(__AVX2__)
// Do this to both registers, first to the first.
template <class F> BATON_INLINE Floats of_both(F &&half) {
    const __m256 halves[2] = {half(0), half(1)};
    Floats x;
    std::memcpy(&x, halves, sizeof x);
    return x;
}

BATON_INLINE __m256 half_of(Floats x, int i) {
    __m256 halves[2];
    std::memcpy(halves, &x, sizeof halves);
    return halves[i];
}

// Eight numbers as they are stored.
BATON_INLINE __m256 load_eight(const float *from) { return _mm256_loadu_ps(from); }
BATON_INLINE __m256 load_eight(const Bf16 *from) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
BATON_INLINE __m256 load_eight(const Fp16 *from) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from))); }

BATON_INLINE Floats load(const Bf16 *from) {
    return of_both([&](int i) __attribute__((always_inline)) { return load_eight(from + 8 * i); });
}

// Round to nearest even; a NaN stays one.
BATON_INLINE __m256i to_bf16_bits(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
    const __m256i up = _mm256_add_epi32(_mm256_set1_epi32(0x7FFF), _mm256_and_si256(_mm256_srli_epi32(bits, 16), one));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, up), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), is_nan);
}
BATON_INLINE Halves to_bf16(Floats x) {
    const __m256i packed = _mm256_packus_epi32(to_bf16_bits(half_of(x, 0)), to_bf16_bits(half_of(x, 1)));
    return (Halves)_mm256_permute4x64_epi64(packed, 0xD8);
}
#else
BATON_INLINE Floats load(const Bf16 *from) {
    Halves x;
    std::memcpy(&x, from, sizeof x);
    return (Floats)(__builtin_convertvector(x, Bits) << 16);
}

// Round to nearest even; a NaN stays one.
BATON_INLINE Halves to_bf16(Floats x) {
    Bits bits = (Bits)x;
    Bits rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const Bits is_nan = (Bits)(x != x);
    rounded = (is_nan & 0x7FC0u) | (~is_nan & rounded);
    return __builtin_convertvector(rounded, Halves);
}
#endif

#if defined(__AVX512F__)
BATON_INLINE Floats from_fp16(Halves x) { return (Floats)_mm512_cvtph_ps((__m256i)x); }
BATON_INLINE Halves to_fp16(Floats x) { return (Halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT); }
#else
BATON_INLINE Floats from_fp16(Halves x) {
    __m128i halves[2];
    __m256 wide[2];
    std::memcpy(halves, &x, sizeof halves);
    for (int i = 0; i < 2; i++) wide[i] = _mm256_cvtph_ps(halves[i]);
    Floats y;
    std::memcpy(&y, wide, sizeof y);
    return y;
}
BATON_INLINE Halves to_fp16(Floats x) {
    __m256 wide[2];
    __m128i halves[2];
    std::memcpy(wide, &x, sizeof wide);
    for (int i = 0; i < 2; i++) halves[i] = _mm256_cvtps_ph(wide[i], _MM_FROUND_TO_NEAREST_INT);
    Halves y;
    std::memcpy(&y, halves, sizeof y);
    return y;
}
#endif

BATON_INLINE Floats load(const Fp16 *from) {
    Halves x;
    std::memcpy(&x, from, sizeof x);
    return from_fp16(x);
}

BATON_INLINE void store(Fp16 *to, Floats x) {
    Halves rounded = to_fp16(x);
    std::memcpy(to, &rounded, sizeof rounded);
}

BATON_INLINE void store(float *to, Floats x) { std::memcpy(to, &x, sizeof x); }

BATON_INLINE void store(Bf16 *to, Floats x) {
    Halves rounded = to_bf16(x);
    std::memcpy(to, &rounded, sizeof rounded);
}

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

// What is left of x after a store and a load.
template <class T> BATON_INLINE Floats rounded(Floats x);
template <> BATON_INLINE Floats rounded<float>(Floats x) { return x; }
#if !defined(__AVX512F__) && defined(__AVX2__)
template <> BATON_INLINE Floats rounded<Bf16>(Floats x) {
    return of_both([&](int i) __attribute__((always_inline)) { return (__m256)_mm256_slli_epi32(to_bf16_bits(half_of(x, i)), 16); });
}
#else
template <> BATON_INLINE Floats rounded<Bf16>(Floats x) {
    return (Floats)(__builtin_convertvector(to_bf16(x), Bits) << 16);
}
#endif

template <> BATON_INLINE Floats rounded<Fp16>(Floats x) { return from_fp16(to_fp16(x)); }

// Lane i of the result is lane i + 8, 4, 2 or 1 of x.
template <int BY> BATON_INLINE Floats shifted(Floats x) {
    return __builtin_shufflevector(x, x, BY, BY + 1, BY + 2, BY + 3, BY + 4, BY + 5, BY + 6, BY + 7, 15, 15, 15, 15, 15, 15, 15, 15);
}

// Lane 4 i is what `both`, taken of halves again and again as sum_of takes them, makes of the i-th.
template <class F> BATON_INLINE Floats reduce_four(Floats a, Floats b, Floats c, Floats d, F &&both) {
    auto halves = [&](Floats x, Floats y) {
        return both(__builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                    __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
    };
    const Floats ab = halves(a, b), cd = halves(c, d);
    Floats x = both(__builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                    __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
    x = both(x, __builtin_shufflevector(x, x, 2, 3, 2, 3, 6, 7, 6, 7, 10, 11, 10, 11, 14, 15, 14, 15));
    return both(x, __builtin_shufflevector(x, x, 1, 1, 1, 1, 5, 5, 5, 5, 9, 9, 9, 9, 13, 13, 13, 13));
}

BATON_INLINE float sum_of(Floats x) {
    x += shifted<8>(x);
    x += shifted<4>(x);
    x += shifted<2>(x);
    x += shifted<1>(x);
    return x[0];
}

#if defined(__AVX512F__)
BATON_INLINE Floats at_least(float bound, Floats x) { return (Floats)_mm512_max_ps((__m512)all(bound), (__m512)x); }  // a NaN stays one
BATON_INLINE Floats at_most(float bound, Floats x) { return (Floats)_mm512_min_ps((__m512)all(bound), (__m512)x); }
#elif defined(__AVX2__)
BATON_INLINE Floats at_least(float bound, Floats x) {
    return of_both([&](int i) __attribute__((always_inline)) { return _mm256_max_ps(_mm256_set1_ps(bound), half_of(x, i)); });
}
BATON_INLINE Floats at_most(float bound, Floats x) {
    return of_both([&](int i) __attribute__((always_inline)) { return _mm256_min_ps(_mm256_set1_ps(bound), half_of(x, i)); });
}
#else
BATON_INLINE Floats at_least(float bound, Floats x) { return x < all(bound) ? all(bound) : x; }
BATON_INLINE Floats at_most(float bound, Floats x) { return x > all(bound) ? all(bound) : x; }
#endif

// exp of what is 88 at most, off by less than 2 units in the last place; 0 below -87, a NaN of a NaN. The polynomial is Cephes'
// expf. N at once, step by step: a single one is a long chain, and CPUs do not look far enough ahead to find the next.
template <int N> BATON_INLINE void exponentials_below(Floats (&x)[N]) {
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
        const Floats value = p[i] * (Floats)(((Bits)shifted[i] - (Bits)magic + 127u) << 23);
        x[i] = (Floats)(~(Bits)(x[i] < all(-87.0f)) & (Bits)value);
    });
}

// The same of anything.
BATON_INLINE Floats exponential(Floats x) {
    Floats one[1] = {at_most(88.0f, x)};
    exponentials_below(one);
    return one[0];
}

}  // namespace baton
