// Sixteen fp32 numbers in two registers of eight: what vector.h is made of where CPUs have no AVX-512.
//
// The compiler's own vectors of 64 bytes would do, and be slow: those it keeps in memory here, and does everything but sums and
// products of them number by number.
#pragma once

#include "numbers.h"

namespace baton {

struct Bits {
    __m256i low, high;

    BATON_INLINE uint32_t operator[](int lane) const {
        uint32_t lanes[LANES];
        std::memcpy(lanes, this, sizeof lanes);
        return lanes[lane];
    }
};

struct Floats {
    __m256 low, high;

    BATON_INLINE explicit operator Bits() const { return {_mm256_castps_si256(low), _mm256_castps_si256(high)}; }
    BATON_INLINE float operator[](int lane) const {
        float lanes[LANES];
        std::memcpy(lanes, this, sizeof lanes);
        return lanes[lane];
    }
};

BATON_INLINE Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
BATON_INLINE Bits all_bits(uint32_t x) { return {_mm256_set1_epi32(int(x)), _mm256_set1_epi32(int(x))}; }
BATON_INLINE Floats counting() { return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15)}; }

#define BATON_OF_TWO(Vector, Number, spread, operation, of_eight)                                                     \
    BATON_INLINE Vector operator operation(Vector a, Vector b) { return {of_eight(a.low, b.low), of_eight(a.high, b.high)}; } \
    BATON_INLINE Vector operator operation(Vector a, Number b) { return a operation spread(b); }
BATON_OF_TWO(Floats, float, all, +, _mm256_add_ps)
BATON_OF_TWO(Floats, float, all, -, _mm256_sub_ps)
BATON_OF_TWO(Floats, float, all, *, _mm256_mul_ps)
BATON_OF_TWO(Floats, float, all, /, _mm256_div_ps)
BATON_OF_TWO(Bits, uint32_t, all_bits, +, _mm256_add_epi32)
BATON_OF_TWO(Bits, uint32_t, all_bits, -, _mm256_sub_epi32)
BATON_OF_TWO(Bits, uint32_t, all_bits, &, _mm256_and_si256)
BATON_OF_TWO(Bits, uint32_t, all_bits, |, _mm256_or_si256)
#undef BATON_OF_TWO
BATON_INLINE Floats operator-(Floats x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_xor_ps(x.low, sign), _mm256_xor_ps(x.high, sign)};
}
BATON_INLINE Floats &operator+=(Floats &a, Floats b) { return a = a + b; }
BATON_INLINE Bits &operator|=(Bits &a, Bits b) { return a = a | b; }
BATON_INLINE Bits operator~(Bits x) {
    const __m256i ones = _mm256_set1_epi32(-1);
    return {_mm256_xor_si256(x.low, ones), _mm256_xor_si256(x.high, ones)};
}
BATON_INLINE Bits operator<<(Bits x, int by) { return {_mm256_slli_epi32(x.low, by), _mm256_slli_epi32(x.high, by)}; }
BATON_INLINE Floats as_floats(Bits x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }

// Comparisons give masks: all bits of a lane, or none.
template <int HOW> BATON_INLINE Bits compare(Floats a, Floats b) {
    return (Bits)Floats{_mm256_cmp_ps(a.low, b.low, HOW), _mm256_cmp_ps(a.high, b.high, HOW)};
}
BATON_INLINE Bits operator<(Floats a, Floats b) { return compare<_CMP_LT_OQ>(a, b); }
BATON_INLINE Bits operator<=(Floats a, Floats b) { return compare<_CMP_LE_OQ>(a, b); }
BATON_INLINE Bits operator>(Floats a, Floats b) { return compare<_CMP_GT_OQ>(a, b); }
BATON_INLINE Bits operator>=(Floats a, Floats b) { return compare<_CMP_GE_OQ>(a, b); }
BATON_INLINE Bits operator!=(Floats a, Floats b) { return compare<_CMP_NEQ_UQ>(a, b); }
BATON_INLINE Floats choose(Bits mask, Floats a, Floats b) {
    const Floats which = as_floats(mask);
    return {_mm256_blendv_ps(b.low, a.low, which.low), _mm256_blendv_ps(b.high, a.high, which.high)};
}
BATON_INLINE bool any_at_most(Floats a, Floats b) {
    const Bits is = a <= b;
    const __m256i any = _mm256_or_si256(is.low, is.high);
    return !_mm256_testz_si256(any, any);
}

BATON_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
BATON_INLINE __m256 larger(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }  // b where either is a NaN
BATON_INLINE Floats larger(Floats a, Floats b) { return {larger(a.low, b.low), larger(a.high, b.high)}; }
BATON_INLINE Floats at_least(float bound, Floats x) { return larger(all(bound), x); }  // a NaN stays one
BATON_INLINE Floats at_most(float bound, Floats x) {
    return {_mm256_min_ps(_mm256_set1_ps(bound), x.low), _mm256_min_ps(_mm256_set1_ps(bound), x.high)};
}

// Numbers as signed integers, and back.
BATON_INLINE Bits to_integers(Floats x) { return {_mm256_cvttps_epi32(x.low), _mm256_cvttps_epi32(x.high)}; }
BATON_INLINE Floats from_integers(Bits x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }

// Eight numbers as they are stored.
BATON_INLINE __m256 load_eight(const float *from) { return _mm256_loadu_ps(from); }
template <class T> BATON_INLINE __m256 widened(__m128i halves);
template <> BATON_INLINE __m256 widened<Bf16>(__m128i halves) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
template <> BATON_INLINE __m256 widened<Fp16>(__m128i halves) { return _mm256_cvtph_ps(halves); }
BATON_INLINE __m256 load_eight(const Bf16 *from) { return widened<Bf16>(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from))); }
BATON_INLINE __m256 load_eight(const Fp16 *from) { return widened<Fp16>(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from))); }
BATON_INLINE __m256 load_eight(const int8_t *from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from))));
}
template <class C> BATON_INLINE Floats load(const C *from) { return {load_eight(from), load_eight(from + 8)}; }

// Of eight pairs of bf16: a shift makes fp32 of the first ones, a mask of the second ones.
BATON_INLINE __m256 first_of_pairs(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
BATON_INLINE __m256 second_of_pairs(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xFFFF0000))));
}

// The bits of eight numbers rounded to nearest even; a NaN stays one.
BATON_INLINE __m256i to_bf16_bits(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
    const __m256i up = _mm256_add_epi32(_mm256_set1_epi32(0x7FFF), _mm256_and_si256(_mm256_srli_epi32(bits, 16), one));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, up), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), is_nan);
}
BATON_INLINE __m128i to_fp16_bits(__m256 x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }

BATON_INLINE void store(float *to, Floats x) { _mm256_storeu_ps(to, x.low), _mm256_storeu_ps(to + 8, x.high); }
BATON_INLINE void store(Bf16 *to, Floats x) {
    const __m256i packed = _mm256_packus_epi32(to_bf16_bits(x.low), to_bf16_bits(x.high));  // within halves
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm256_permute4x64_epi64(packed, 0xD8));
}
BATON_INLINE void store(Fp16 *to, Floats x) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), to_fp16_bits(x.low));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to + 8), to_fp16_bits(x.high));
}

// What is left of x after a store and a load.
template <class T> BATON_INLINE Floats rounded(Floats x);
template <> BATON_INLINE Floats rounded<float>(Floats x) { return x; }
template <> BATON_INLINE Floats rounded<Bf16>(Floats x) { return as_floats(Bits{to_bf16_bits(x.low), to_bf16_bits(x.high)} << 16); }
template <> BATON_INLINE Floats rounded<Fp16>(Floats x) {
    return {widened<Fp16>(to_fp16_bits(x.low)), widened<Fp16>(to_fp16_bits(x.high))};
}

// Lane 4 i is what `both`, taken of halves again and again, makes of the i-th.
template <class F> BATON_INLINE Floats reduce_four(Floats a, Floats b, Floats c, Floats d, F &&both) {
    auto quarters = [&](Floats x, Floats y) __attribute__((always_inline)) {
        const __m256 of_x = both(x.low, x.high), of_y = both(y.low, y.high);
        __m256 z = both(_mm256_permute2f128_ps(of_x, of_y, 0x20), _mm256_permute2f128_ps(of_x, of_y, 0x31));
        z = both(z, _mm256_permute_ps(z, 0xEE));
        return both(z, _mm256_permute_ps(z, 0x55));
    };
    return {quarters(a, b), quarters(c, d)};
}

BATON_INLINE float sum_of(Floats x) {
    return _mm256_cvtss_f32(reduce_four(x, x, x, x, [](__m256 a, __m256 b) __attribute__((always_inline)) { return a + b; }).low);
}

// Eight integers of 64 bits.
struct Wide {
    __m256i low, high;
};
BATON_INLINE Wide all_wide(uint64_t x) { return {_mm256_set1_epi64x(int64_t(x)), _mm256_set1_epi64x(int64_t(x))}; }
BATON_INLINE Wide counting_wide() { return {_mm256_setr_epi64x(0, 1, 2, 3), _mm256_setr_epi64x(4, 5, 6, 7)}; }
BATON_INLINE Wide operator+(Wide a, Wide b) { return {_mm256_add_epi64(a.low, b.low), _mm256_add_epi64(a.high, b.high)}; }
BATON_INLINE Wide operator-(Wide a, Wide b) { return {_mm256_sub_epi64(a.low, b.low), _mm256_sub_epi64(a.high, b.high)}; }
BATON_INLINE Wide operator^(Wide a, Wide b) { return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)}; }
BATON_INLINE Wide operator>>(Wide a, int by) { return {_mm256_srli_epi64(a.low, by), _mm256_srli_epi64(a.high, by)}; }
BATON_INLINE __m256i product_of_wide(__m256i a, __m256i b) {
    const __m256i first = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b), second = _mm256_mul_epu32(a, _mm256_srli_epi64(b, 32));
    return _mm256_add_epi64(_mm256_mul_epu32(a, b), _mm256_slli_epi64(_mm256_add_epi64(first, second), 32));
}
BATON_INLINE Wide operator*(Wide a, uint64_t b) {
    const Wide x = all_wide(b);
    return {product_of_wide(a.low, x.low), product_of_wide(a.high, x.high)};
}

// Sixteen numbers below 2^52, rounded to fp32.
BATON_INLINE Floats floats_of(Wide a, Wide b) {
    auto four = [](__m256i x) __attribute__((always_inline)) {  // which become the last bits of 2^52 in fp64
        const __m256d magic = _mm256_set1_pd(0x1p52);
        return _mm256_cvtpd_ps(_mm256_sub_pd(_mm256_castsi256_pd(_mm256_or_si256(x, _mm256_castpd_si256(magic))), magic));
    };
    return {_mm256_set_m128(four(a.high), four(a.low)), _mm256_set_m128(four(b.high), four(b.low))};
}

constexpr int EXPONENTIALS = 2;  // at once: so many have the room that they need in 16 registers

}  // namespace baton
