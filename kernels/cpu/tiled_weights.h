// Scores that were multiplied on AMX's tiles becoming weights, of so many queries at once that no step waits for one before it.
#pragma once

#include "tile.h"

namespace baton {

#if defined(__AMX_BF16__)

// Lane 4 i + j of the result is lane 4 j of `rows[i]`.
BATON_INLINE Floats in_one(const Floats (&rows)[4]) {
    const __m512 ab = _mm512_unpacklo_ps((__m512)rows[0], (__m512)rows[1]), cd = _mm512_unpacklo_ps((__m512)rows[2], (__m512)rows[3]);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return (Floats)_mm512_permutexvar_ps(order, _mm512_shuffle_ps(ab, cd, 0x44));
}

// Up to 16 queries in a tile, each with a bit for each position that it sees.
struct Sixteen {
    const float *scores;  // [num, TILE]
    Bf16 *weights;        // [num rounded up to 2, TILE]
    float *greatest, *sums, *shrink;  // [num]
    const uint64_t *seen;             // [num]
    int num;

    // Of queries that see any.
    __mmask16 see() const {
        uint64_t all[LANES] = {};
        std::copy_n(seen, num, all);
        const __m512i first = _mm512_loadu_si512(all), second = _mm512_loadu_si512(all + 8);
        return __mmask16(_mm512_test_epi64_mask(first, first) | _mm512_test_epi64_mask(second, second) << 8);
    }
};

// What weigh (tile.h) does. Who sees nothing keeps what it has. meanwhile(): called twice, each with so much left to do behind it that
// what tiles then multiply is not waited for.
template <bool ALL_SEE_ALL, class F> void weigh_sixteen(const Sixteen &some, float scale, F &&meanwhile) {
    constexpr float LOG2_E = 1.44269504088896341f;
    constexpr int VECTORS = TILE / LANES;
    const int num = some.num;
    const __m512 hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    auto score = [&](int m, int v) __attribute__((always_inline)) {
        const float *at = some.scores + m * TILE + v * LANES;
        if constexpr (ALL_SEE_ALL) return load(at);
        else return (Floats)_mm512_mask_loadu_ps(hidden, __mmask16(some.seen[m] >> (v * LANES)), at);
    };
    auto reduce = [](const Floats (&of)[4], auto &&both) __attribute__((always_inline)) {
        return reduce_four(of[0], of[1], of[2], of[3], both);
    };
    Floats fours[4], four[4];
    for (int m = 0; m < LANES; m += 4) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            four[i] = (Floats)hidden;
            for (int v = 0; v < VECTORS; v++) four[i] = larger(score(std::min(m + i, num - 1), v), four[i]);
        }
        fours[m / 4] = reduce(four, [](auto a, auto b) __attribute__((always_inline)) { return larger(a, b); });
    }
    const Floats scaled = in_one(fours) * scale, before = load_some(some.greatest, num);
    const Floats greatest = choose(scaled > before + SLACK<Bf16>, scaled, before);
    Floats gap = before - greatest, below = -greatest * LOG2_E;
    if constexpr (!ALL_SEE_ALL) {
        const __mmask16 see = some.see();
        gap = (Floats)_mm512_maskz_mov_ps(see, (__m512)gap), below = (Floats)_mm512_maskz_mov_ps(see, (__m512)below);
    }
    const Floats shrink = exponential(gap);
    alignas(64) float add[LANES];
    store(add, below);
    store_some(some.greatest, greatest, num), store_some(some.shrink, shrink, num);
    for (int m = 0; m < LANES; m += 2) {
        if (m % (LANES / 2) == LANES / 2 - 2) meanwhile();
        Floats sum[2 * VECTORS] = {};
        if (m < num) {
#pragma GCC unroll 8
            for (int i = 0; i < 2 * VECTORS; i++) {
                const int query = std::min(m + i / VECTORS, num - 1);
                sum[i] = multiply_add(score(query, i % VECTORS), all(scale * LOG2_E), all(add[query]));
            }
            rough_powers_below(sum);
#pragma GCC unroll 8
            for (int i = 0; i < 2 * VECTORS; i++) store(some.weights + m * TILE + i * LANES, sum[i]);
        }
        for (int i = 0; i < 2; i++) four[m % 4 + i] = (sum[4 * i] + sum[4 * i + 1]) + (sum[4 * i + 2] + sum[4 * i + 3]);
        if (m % 4 == 2) fours[m / 4] = reduce(four, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
    }
    store_some(some.sums, load_some(some.sums, num) * shrink + in_one(fours), num);
}

#endif

}  // namespace baton
