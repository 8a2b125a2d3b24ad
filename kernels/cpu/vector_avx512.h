// Sixteen fp32 numbers in one register: what vector.h is made of where CPUs have AVX-512.
#pragma once

#include "numbers.h"

namespace baton {

using Floats = float __attribute__((vector_size(64)));
using Bits = uint32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(32)));

BATON_INLINE Floats all(float x) { return x - Floats{}; }
BATON_INLINE Floats counting() { return Floats{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

BATON_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
BATON_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }  // b where either is a NaN
BATON_INLINE Floats at_least(float bound, Floats x) { return (Floats)_mm512_max_ps((__m512)all(bound), (__m512)x); }  // a NaN stays one
BATON_INLINE Floats at_most(float bound, Floats x) { return (Floats)_mm512_min_ps((__m512)all(bound), (__m512)x); }

// Comparisons give masks: all bits of a lane, or none.
template <class Mask> BATON_INLINE Floats choose(Mask mask, Floats a, Floats b) { return mask ? a : b; }
BATON_INLINE bool any_at_most(Floats a, Floats b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LE_OQ); }

BATON_INLINE Floats as_floats(Bits x) { return (Floats)x; }

// Numbers as signed integers, and back.
BATON_INLINE Bits to_integers(Floats x) { return (Bits)_mm512_cvttps_epi32((__m512)x); }
BATON_INLINE Floats from_integers(Bits x) { return (Floats)_mm512_cvtepi32_ps((__m512i)x); }

// Round to nearest even; a NaN stays one.
BATON_INLINE Halves to_bf16(Floats x) {
#if defined(__AVX512BF16__)  // what is less than a normal number is zero then, as the CPU's products of bf16 take it for
    return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
    Bits bits = (Bits)x;
    Bits rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const Bits is_nan = (Bits)(x != x);
    rounded = (is_nan & 0x7FC0u) | (~is_nan & rounded);
    return (Halves)_mm512_cvtepi32_epi16((__m512i)rounded);
#endif
}
// Not __builtin_convertvector, of which GCC 12 makes four shuffles.
BATON_INLINE Floats from_bf16(Halves x) { return (Floats)((Bits)_mm512_cvtepu16_epi32((__m256i)x) << 16); }
BATON_INLINE Halves to_fp16(Floats x) { return (Halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT); }
BATON_INLINE Floats from_fp16(Halves x) { return (Floats)_mm512_cvtph_ps((__m256i)x); }

BATON_INLINE Floats load(const float *from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
BATON_INLINE Floats load(const int8_t *from) {
    return from_integers((Bits)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from))));
}
BATON_INLINE Halves load_halves(const void *from) {
    Halves x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
BATON_INLINE Floats load(const Bf16 *from) { return from_bf16(load_halves(from)); }
BATON_INLINE Floats load(const Fp16 *from) { return from_fp16(load_halves(from)); }

BATON_INLINE void store(float *to, Floats x) { std::memcpy(to, &x, sizeof x); }
BATON_INLINE void store_halves(void *to, Halves x) { std::memcpy(to, &x, sizeof x); }
BATON_INLINE void store(Bf16 *to, Floats x) { store_halves(to, to_bf16(x)); }
BATON_INLINE void store(Fp16 *to, Floats x) { store_halves(to, to_fp16(x)); }

// What is left of x after a store and a load.
template <class T> BATON_INLINE Floats rounded(Floats x);
template <> BATON_INLINE Floats rounded<float>(Floats x) { return x; }
template <> BATON_INLINE Floats rounded<Bf16>(Floats x) { return from_bf16(to_bf16(x)); }
template <> BATON_INLINE Floats rounded<Fp16>(Floats x) { return from_fp16(to_fp16(x)); }

// Lane i of the result is lane i + 8, 4, 2 or 1 of x.
template <int BY> BATON_INLINE Floats shifted(Floats x) {
    return __builtin_shufflevector(x, x, BY, BY + 1, BY + 2, BY + 3, BY + 4, BY + 5, BY + 6, BY + 7, 15, 15, 15, 15, 15, 15, 15, 15);
}

BATON_INLINE float sum_of(Floats x) {
    x += shifted<8>(x);
    x += shifted<4>(x);
    x += shifted<2>(x);
    x += shifted<1>(x);
    return x[0];
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

// Eight integers of 64 bits.
using Wide = uint64_t __attribute__((vector_size(64)));
BATON_INLINE Wide all_wide(uint64_t x) { return x - Wide{}; }
BATON_INLINE Wide counting_wide() { return Wide{0, 1, 2, 3, 4, 5, 6, 7}; }

// Sixteen numbers below 2^52, rounded to fp32.
BATON_INLINE Floats floats_of(Wide a, Wide b) {
    using Signed = int64_t __attribute__((vector_size(64)));
    using Eight = float __attribute__((vector_size(32)));
    const Eight first = __builtin_convertvector((Signed)a, Eight), second = __builtin_convertvector((Signed)b, Eight);
    return __builtin_shufflevector(first, second, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

#if defined(__AVX512BF16__)
// 2^x of what is at most 120, off by 3 millionths: enough for what is rounded to the 8 bits of a bf16. 0 far below, a NaN of a NaN. Half
// the work of exponentials_below; polynomials were fitted to the least relative error, from 0 to 1 and from -0.5 to 0.5.
template <int N> BATON_INLINE void rough_powers_below(Floats (&x)[N]) {
    auto polynomial = [](Floats y, float a, float b, float c, float d) __attribute__((always_inline)) {
        const Floats p = multiply_add(multiply_add(y, all(a), all(b)), y, all(c));
        return multiply_add(multiply_add(p, y, all(d)), y, all(1.0f));
    };
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) {
#if defined(__AMX_BF16__)  // Intel's: 0.78 of the time of the other way
        const Floats y = (Floats)_mm512_reduce_ps((__m512)x[i], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        const Floats p = polynomial(y, 1.3426687e-2f, 5.2242470e-2f, 2.4128021e-1f, 6.9304484e-1f);
        x[i] = (Floats)_mm512_scalef_ps((__m512)p, (__m512)x[i]);
#else
        const Floats magic = all(12582912.0f);  // 1.5 * 2^23: its sum rounds to integers
        const Floats shifted = x[i] + magic, y = x[i] - (shifted - magic);
        const Floats p = polynomial(y, 9.5828529e-3f, 5.5906426e-2f, 2.4024099e-1f, 6.9312418e-1f);
        x[i] = as_floats(~(Bits)(x[i] < all(-126.0f)) & ((Bits)p + ((Bits)shifted << 23)));
#endif
    }
}
#endif

constexpr int EXPONENTIALS = 8;  // at once: so many have the room that they need in 32 registers

}  // namespace baton
