// How single numbers are stored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include <immintrin.h>

#define BATON_INLINE inline __attribute__((always_inline))

namespace baton {

constexpr int LANES = 16;

// Whose CPU this is: prefetchers, and what becomes of requests, are unlike each other. AMD's with AVX-512 have its bf16, and none
// has AMX.
#if defined(__AMX_BF16__) || (defined(__AVX512F__) && !defined(__AVX512BF16__))
constexpr bool IS_INTELS = true;  // such a variant is run by no other
#else
constexpr bool IS_INTELS = false;
#endif
inline bool is_amd() {
    static const bool is = __builtin_cpu_is("amd");
    return is;
}

struct Bf16 {
    uint16_t bits;
};

struct Fp16 {
    uint16_t bits;
};

BATON_INLINE float number_of(float x) { return x; }
BATON_INLINE float number_of(Fp16 x) { return _cvtsh_ss(x.bits); }
BATON_INLINE float number_of(Bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

}  // namespace baton
