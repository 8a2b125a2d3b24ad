// Scores of a tile: queries times keys, by panels for many queries, on the keys where they lie for one row's.
//
// Both take the same sums in the same order. Where CPUs have 16 cells of 4 bytes in a register, a pair of bf16 or a number widened,
// that order suits keys as they lie: cells 0 to 3, 4 to 7, 8 to 11 and 12 to 15 of every 16 are a chain each, and
//
//     score = (chain 0 + chain 1) + (chain 2 + chain 3)
//
// so that 4 x 4 cells within quarters of registers are all that must be transposed. Elsewhere a score is one chain.
#pragma once

#include "stream.h"

namespace baton {

constexpr int MAX_DIRECT = 4;  // queries of one pass over keys and values where they lie (direct.h)

#if defined(__AVX512F__)
constexpr bool HAS_QUARTERS = true;
#else
constexpr bool HAS_QUARTERS = false;
#endif

template <class T> constexpr bool has_chains(int head_dim) {
    return HAS_QUARTERS && head_dim % (LANES * Step<T>::WIDTH) == 0;
}
// Whether keys can be multiplied where they lie.
template <class T> constexpr bool scores_where_they_lie(int head_dim) { return HAS_QUARTERS ? has_chains<T>(head_dim) : head_dim % 16 == 0; }

// scores[m][i] = query m times column i of a tile's two panels.
template <class T, int M> void score_in_one_chain(const T *const *queries, const Ready<T> *panels, int head_dim, float *scores) {
    const size_t panel = panel_size<T>(head_dim);
    for (int p = 0; p < 2; p += MAX_PANELS) {
        Floats sums[M][2 * MAX_PANELS];
        multiply<T, M, MAX_PANELS>(queries, panels + p * panel, panel, head_dim / Step<T>::WIDTH, sums);
        for (int m = 0; m < M; m++)
            for (int v = 0; v < 2 * MAX_PANELS; v++) store(scores + m * TILE + p * PANEL + v * LANES, sums[m][v]);
    }
}

#if !defined(__AVX512F__)
// put(i, cells): cell i of 8 rows' 4, of 4 bytes each. Nothing crosses the halves of a register, for which some CPUs take long.
template <class F> BATON_INLINE void transpose_four(const float *const *rows, int offset, F &&put) {
    auto both = [&](int row) __attribute__((always_inline)) {
        return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[row] + offset)), _mm_loadu_ps(rows[row + 4] + offset), 1);
    };
    const __m256 a = both(0), b = both(1), c = both(2), d = both(3);
    const __m256 ab = _mm256_unpacklo_ps(a, b), cd = _mm256_unpacklo_ps(c, d);
    const __m256 ab_high = _mm256_unpackhi_ps(a, b), cd_high = _mm256_unpackhi_ps(c, d);
    put(0, _mm256_shuffle_ps(ab, cd, 0x44));
    put(1, _mm256_shuffle_ps(ab, cd, 0xEE));
    put(2, _mm256_shuffle_ps(ab_high, cd_high, 0x44));
    put(3, _mm256_shuffle_ps(ab_high, cd_high, 0xEE));
}
// put(i, numbers): number i of 8 rows' 8.
template <class F> BATON_INLINE void transpose(const float *const *rows, int offset, F &&put) {
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4)
        transpose_four(rows, offset + i, [&](int j, __m256 numbers) __attribute__((always_inline)) { put(i + j, numbers); });
}
// Numbers of 2 bytes are widened last.
template <class T, class F> BATON_INLINE void transpose(const T *const *rows, int offset, F &&put) {
    static_assert(sizeof(T) == 2);
    __m128i a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i *>(rows[i] + offset));
    // a[i] is row i; then b[i], b[i + 1] what rows i and i + 1 have, in pairs; then a[i .. i + 3] quadruples of rows i .. i + 3
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) b[i] = _mm_unpacklo_epi16(a[i], a[i + 1]), b[i + 1] = _mm_unpackhi_epi16(a[i], a[i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm_unpacklo_epi32(b[i], b[i + 2]), a[i + 1] = _mm_unpackhi_epi32(b[i], b[i + 2]);
        a[i + 2] = _mm_unpacklo_epi32(b[i + 1], b[i + 3]), a[i + 3] = _mm_unpackhi_epi32(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        put(2 * i, widened<T>(_mm_unpacklo_epi64(a[i], a[i + 4])));
        put(2 * i + 1, widened<T>(_mm_unpackhi_epi64(a[i], a[i + 4])));
    }
}

// Eight numbers of each of 8 rows: number(i) is the i-th of all.
template <class T> struct Eight {
    __m256 numbers[8];

    BATON_INLINE void load(const T *const *rows, int offset) {
        transpose(rows, offset, [&](int i, __m256 of_rows) __attribute__((always_inline)) { numbers[i] = of_rows; });
    }
    BATON_INLINE __m256 number(int i) const { return numbers[i]; }
};

// Pairs are transposed, and widened last: half as much to transpose.
template <> struct Eight<Bf16> {
    __m256 pairs[4];

    BATON_INLINE void load(const Bf16 *const *rows, int offset) {
        const float *cells[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) cells[i] = reinterpret_cast<const float *>(rows[i] + offset);
        transpose_four(cells, 0, [&](int i, __m256 of_rows) __attribute__((always_inline)) { pairs[i] = of_rows; });
    }
    BATON_INLINE __m256 number(int i) const {
        const __m256i bits = _mm256_castps_si256(pairs[i / 2]);
        return i % 2 ? second_of_pairs(bits) : first_of_pairs(bits);
    }
};

// Scores of M queries of each head and 16 rows of keys, in one chain each. A head's queries, widened, are `query_stride` numbers
// behind the last one's, its scores [M, TILE] `score_stride`. ahead: what to bring nearer meanwhile, a chunk for every 8 lines of keys.
template <class T, int M>
void score_where_they_lie(const float *queries, size_t query_stride, const T *const *keys, int num_heads, int head_dim, float *scores,
                          size_t score_stride, Nearer ahead) {
    constexpr int EVERY = 32 / sizeof(T);  // numbers of 16 rows that are 8 lines
    for (int head = 0; head < num_heads; head++, queries += query_stride, scores += score_stride) {
        Floats sums[M];
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) sums[m] = all(0);
        for (int at = 0; at < head_dim; at += 8) {
            if (at % EVERY == 0) bring(ahead++);
            Eight<T> low, high;
            low.load(keys, head * head_dim + at), high.load(keys + 8, head * head_dim + at);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                const Floats numbers = {low.number(i), high.number(i)};
#pragma GCC unroll 4
                for (int m = 0; m < M; m++) sums[m] = multiply_add(numbers, all(queries[m * head_dim + at + i]), sums[m]);
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) store(scores + m * TILE, sums[m]);
    }
}

template <class T, int M> void score_panels(const T *const *queries, const float *panels, int head_dim, float *scores) {
    score_in_one_chain<T, M>(queries, panels, head_dim, scores);
}
#else
template <class T, int M> void score_panels(const T *const *queries, const Ready<T> *panels, int head_dim, float *scores) {
    if (!has_chains<T>(head_dim)) return score_in_one_chain<T, M>(queries, panels, head_dim, scores);
    constexpr int W = Step<T>::WIDTH;
    const size_t panel = panel_size<T>(head_dim);
    Floats sums[M][4];
    auto put = [&](float *to, auto &&combined) {
        for (int m = 0; m < M; m++)
            for (int v = 0; v < 4; v++) store(to + m * TILE + v * LANES, combined(m * TILE + v * LANES, sums[m][v]));
    };
    alignas(64) float wide[IS_WIDENED<T> ? M : 1][IS_WIDENED<T> ? MAX_HEAD_DIM : 1];
    const Ready<T> *rows[M];
    for (int m = 0; m < M; m++) {
        if constexpr (IS_WIDENED<T>) widen(queries[m], head_dim, wide[m]), rows[m] = wide[m];
        else rows[m] = queries[m];
    }
    float third[M * TILE];
    for (int chain = 0; chain < 4; chain++) {
        clear(sums);
        for (int step = 4 * chain; step < head_dim / W; step += LANES)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) multiply_step(rows, (step + i) * W, panels + (step + i) * size_t(W * PANEL), panel, sums);
        if (chain == 0) put(scores, [](int, Floats sum) { return sum; });
        if (chain == 1) put(scores, [&](int at, Floats sum) { return load(scores + at) + sum; });
        if (chain == 2) put(third, [](int, Floats sum) { return sum; });
        if (chain == 3) put(scores, [&](int at, Floats sum) { return load(scores + at) + (load(third + at) + sum); });
    }
}

// Four rows of 16 cells: afterwards quarter q of columns[i] is cell 4 q + i of all four.
template <class T> BATON_INLINE void transpose_quarters(const T *const *rows, size_t offset, Floats (&columns)[4]) {
    auto cells = [&](int row) __attribute__((always_inline)) { return (__m512)cells_of(rows[row] + offset); };
    const __m512 a = cells(0), b = cells(1), c = cells(2), d = cells(3);
    const __m512d ab = (__m512d)_mm512_unpacklo_ps(a, b), cd = (__m512d)_mm512_unpacklo_ps(c, d);
    const __m512d ab_high = (__m512d)_mm512_unpackhi_ps(a, b), cd_high = (__m512d)_mm512_unpackhi_ps(c, d);
    columns[0] = (Floats)_mm512_unpacklo_pd(ab, cd);
    columns[1] = (Floats)_mm512_unpackhi_pd(ab, cd);
    columns[2] = (Floats)_mm512_unpacklo_pd(ab_high, cd_high);
    columns[3] = (Floats)_mm512_unpackhi_pd(ab_high, cd_high);
}

// Sums of neighbouring quarters, a's before b's.
BATON_INLINE Floats add_quarters(Floats a, Floats b) {
    return (Floats)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x88) + (Floats)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xdd);
}

// Scores of M queries of each head and 16 rows of keys. A head's queries, as keys are multiplied, are `query_stride` numbers behind
// the last one's, its scores [M, TILE] `score_stride`. ahead: what to bring nearer meanwhile, a chunk for every 8 lines of keys.
template <class T, int M>
void score_where_they_lie(const Ready<T> *queries, size_t query_stride, const T *const *keys, int num_heads, int head_dim,
                          float *scores, size_t score_stride, Nearer ahead) {
    constexpr int W = Step<T>::WIDTH, PAIR = 2, EVERY = 64 / sizeof(T);  // numbers of 8 rows that are 8 lines
    for (int head = 0; head < num_heads; head++, queries += query_stride, scores += score_stride) {
        Floats halves[2][M];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const T *rows[PAIR][4];
#pragma GCC unroll 8
            for (int i = 0; i < 4 * PAIR; i++) rows[i / 4][i % 4] = keys[8 * half + i];
            Floats sums[M][PAIR];
            clear(sums);
            for (int at = 0; at < head_dim; at += LANES * W) {
                if (at % EVERY == 0) bring(ahead++);
                Floats columns[PAIR][4];
#pragma GCC unroll 2
                for (int p = 0; p < PAIR; p++) transpose_quarters(rows[p], size_t(head) * head_dim + at, columns[p]);
                __m512i cells[M];
#pragma GCC unroll 4
                for (int m = 0; m < M; m++) cells[m] = _mm512_loadu_si512(queries + m * head_dim + at);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++)
#pragma GCC unroll 4
                    for (int m = 0; m < M; m++) {
                        const Floats spread = (Floats)_mm512_shuffle_epi32(cells[m], _MM_PERM_ENUM(i * 0x55));
#pragma GCC unroll 2
                        for (int p = 0; p < PAIR; p++) sums[m][p] = Step<Ready<T>>::add(sums[m][p], columns[p][i], spread);
                    }
            }
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) halves[half][m] = add_quarters(sums[m][0], sums[m][1]);
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) store(scores + m * TILE, add_quarters(halves[0][m], halves[1][m]));
    }
}
#endif

}  // namespace baton
