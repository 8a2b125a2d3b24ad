// Causal attention over paged KV that reads each KV byte once for all query heads that share it.
//
// A sequence's positions are cut into parts of PART and tiles of TILE at absolute positions. Of each row and query head:
//
//     score     one chain or four over head_dim (scores.h), times 1 / sqrt(head_dim)
//     tile      weights exp(score - greatest so far); their sum by a fixed tree; weighted values: one chain over the positions
//               that the row sees, first to last, by pairs from the tile's first on where CPUs have a dot product of bf16 pairs
//               (weights are rounded to bf16 there)
//     part      tiles one after the other, what came before scaled by exp(old greatest - new greatest)
//     row       parts one after the other, merged in the same way
//
// Nothing of it depends on other rows, so that a decode row (its parts shared out over threads) and the same row inside a
// chunk (many rows at a tile that was unpacked once) have the same bits. What lies at positions that a row does not see may be
// anything: their values are never multiplied, and what their keys gave is replaced.
#pragma once

#include <algorithm>

#include "direct.h"

namespace baton {

#if defined(__AVX512F__)
// 16 rows of 16 cells of 4 bytes become 16 columns, `stride` cells apart.
BATON_INLINE void transpose(const void *const *rows, size_t offset, char *to, size_t stride) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(static_cast<const char *>(rows[i]) + offset);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(to + (i)*stride, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
        _mm512_storeu_si512(to + (i + 4) * stride, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88));
        _mm512_storeu_si512(to + (i + 8) * stride, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
        _mm512_storeu_si512(to + (i + 12) * stride, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd));
    }
}

// Lay 16 rows of head_dim out as columns column .. column + 15 of a panel.
template <class T> void unpack_keys(const T *const *rows, int head_dim, T *panel, int column) {
    constexpr int W = Step<T>::WIDTH;
    const int steps = head_dim / W;
    int step = 0;
    if constexpr (W * sizeof(T) == 4)
        for (; step + LANES <= steps; step += LANES)
            transpose(reinterpret_cast<const void *const *>(rows), step * 4,
                      reinterpret_cast<char *>(panel + (size_t(step) * PANEL + column) * W), PANEL * 4);
    for (; step < steps; step++)
        for (int i = 0; i < LANES; i++)
            for (int w = 0; w < W; w++) panel[(size_t(step) * PANEL + column + i) * W + w] = rows[i][step * W + w];
}
#else
// Lay 16 rows of head_dim out as columns column .. column + 15 of a panel.
template <class T> void unpack_keys(const T *const *rows, int head_dim, float *panel, int column) {
    panel += column;
    int at = 0;
    for (; at + 8 <= head_dim; at += 8)
        for (int eight = 0; eight < LANES; eight += 8)
            transpose(rows + eight, at, [&](int i, __m256 keys) __attribute__((always_inline)) {
                _mm256_storeu_ps(panel + (at + i) * PANEL + eight, keys);
            });
    for (; at < head_dim; at++)
        for (int i = 0; i < LANES; i++) panel[at * PANEL + i] = number_of(rows[i][at]);
}
#endif

// The values of one step's positions, in the panels of a tile.
template <class T> BATON_INLINE void unpack_values(const T *const *values, int head_dim, float *to) {
    const T *value = values[0];
    int p = 0;
    for (; p + PANEL <= head_dim; p += PANEL, to += TILE * PANEL) {
        store(to, load(value + p));
        store(to + LANES, load(value + p + LANES));
    }
    const int left = head_dim - p;
    if (left > 0) {
        store(to, load_some(value + p, left));
        store(to + LANES, left > LANES ? load_some(value + p + LANES, left - LANES) : Floats{});
    }
}
#if defined(__AVX512BF16__)
BATON_INLINE void unpack_values(const Bf16 *const *values, int head_dim, Bf16 *to) {
    int p = 0;
    for (; p + PANEL <= head_dim; p += PANEL, to += TILE * PANEL) put_pair(values[0] + p, values[1] + p, to);
    if (p == head_dim) return;
    Bf16 last[2][PANEL] = {};
    for (int w = 0; w < 2; w++) std::copy(values[w] + p, values[w] + head_dim, last[w]);
    put_pair(last[0], last[1], to);
}
#endif

// Chunks to bring nearer while a tile is gone through, which are another one's.
struct AheadOfTile {
    Nearer next;
    int count;

    BATON_INLINE void bring_next() {
        if (count > 0) bring_far(*next++), count--;
    }
};

// Bring one KV head's tile into the form that products take; keys that it lacks are zero. ahead: what to bring nearer meanwhile.
template <class T>
void load_tile(const Cache &cache, const TileRows<T> &tile, int head, Scratch<T> &s, AheadOfTile &ahead) {
    constexpr int W = Step<Mixable<T>>::WIDTH;
    const int D = cache.head_dim;
    static const T nothing[1024] = {};
    const T *rows[LANES], *values[LANES];
    const int chunks = ceil_div(ahead.count, std::max(tile.count, 1));  // a position
    for (int begin = 0; begin < TILE; begin += LANES) {
        for (int i = 0; i < LANES; i++) {
            const bool is_there = begin + i < tile.count;
            rows[i] = is_there ? tile.keys[begin + i] + head * D : nothing;
            values[i] = is_there ? rows[i] + tile.values : nothing;
        }
        for (int i = 0; i < LANES && begin + i < tile.count; i += W) {
            unpack_values(values + i, D, s.values + size_t(begin + i) * PANEL);
            for (int n = 0; n < W * chunks; n++) ahead.bring_next();
        }
        unpack_keys(rows, D, s.keys + (begin / PANEL) * panel_size<T>(D), begin % PANEL);
    }
}

#if defined(__AVX512BF16__)
// Add the one position of a pair whose bits `seen` has; the other one's number may be anything.
template <int M, int VECTORS>
BATON_INLINE void mix_half(const Bf16 *const *weights, size_t offset, const Bf16 *at, size_t panel, int32_t seen,
                           Floats (&sums)[M][VECTORS]) {
    for (int v = 0; v < VECTORS; v++) {
        const __m512i pairs = _mm512_loadu_si512(at + (v / 2) * panel + (v % 2) * PANEL);
        const Floats column = (Floats)_mm512_and_si512(pairs, _mm512_set1_epi32(seen));
        for (int m = 0; m < M; m++) sums[m][v] = Step<Bf16>::add(sums[m][v], column, Step<Bf16>::spread(weights[m] + offset));
    }
}
constexpr int32_t FIRST_SEEN = 0xFFFF, SECOND_SEEN = ~0xFFFF;
#endif

constexpr int PASS_QUERIES = max_rows(MAX_PANELS);  // of one pass

// Multiply weights [low, high) of M queries by 16 columns of PANELS adjacent panels of values.
template <class T, int M, int PANELS>
BATON_INLINE void mix_panels(const T *const *weights, const T *values, int low, int high, Floats (&sums)[M][2 * PANELS]) {
    constexpr size_t panel = TILE * PANEL;
    const T *rows[M];
    clear(sums);
    int from = low, until = high;
#if defined(__AVX512BF16__)
    if constexpr (Step<T>::WIDTH == 2) {
        from = (low + 1) / 2 * 2, until = high / 2 * 2;
        if (low < from) mix_half(weights, from - 2, values + (from - 2) * PANEL, panel, SECOND_SEEN, sums);
    }
#endif
    for (int m = 0; m < M; m++) rows[m] = weights[m] + from;
    multiply_on<T, M, PANELS>(rows, values + from * PANEL, panel, (until - from) / Step<T>::WIDTH, sums);
#if defined(__AVX512BF16__)
    if constexpr (Step<T>::WIDTH == 2)
        if (until < high) mix_half(weights, until, values + until * PANEL, panel, FIRST_SEEN, sums);
#endif
}

// Multiply weights [low, high) of queries begin .. end by the tile's values and add them to what these have so far.
template <class T>
void mix_values(const Rows<T> &rows, int begin, int end, int low, int high, const float *shrink, Scratch<T> &s, Mixed &mixed) {
    const int padded = rows.cache.padded();
    for (int query = begin; query < end; query += PASS_QUERIES)
        with_constant<PASS_QUERIES>(std::min(PASS_QUERIES, end - query), [&](auto constant) {
            constexpr int M = constant();
            const Mixable<T> *weights[M];
            for (int m = 0; m < M; m++) weights[m] = s.weights + size_t(query + m) * TILE;
            for (int column = 0; column < padded; column += MAX_PANELS * PANEL)
                with_constant<MAX_PANELS>(std::min(MAX_PANELS, (padded - column) / PANEL), [&](auto panels) {
                    Floats sums[M][2 * panels()];
                    const Mixable<T> *values = s.values + size_t(column / PANEL) * TILE * PANEL;
                    mix_panels<Mixable<T>, M, panels()>(weights, values, low, high, sums);
                    for (int m = 0; m < M; m++)
                        for (int v = 0; v < 2 * panels(); v++) {
                            float *at = mixed.values + size_t(query + m) * padded + column + v * LANES;
                            store(at, multiply_add(load(at), all(shrink[query + m - begin]), sums[m][v]));
                        }
                });
        });
}

// One tile of one KV head.
template <class T>
void attend_tile(const Rows<T> &rows, int start, const TileRows<T> &tile, Scratch<T> &s, Mixed &mixed, AheadOfTile ahead) {
    load_tile(rows.cache, tile, rows.head, s, ahead);
    const int group = rows.cache.group(), D = rows.cache.head_dim;
    const float scale = 1.0f / std::sqrt(float(D));
    auto low = [&](int row) { return std::clamp(rows.low(row) - start, 0, TILE); };
    auto high = [&](int row) { return std::clamp(rows.first_position + row + 1 - start, 0, tile.count); };
    int first = 0, last = rows.num_rows;  // rows that see any of it
    while (first < last && high(first) <= low(first)) first++;
    while (first < last && high(last - 1) <= low(last - 1)) last--;
    for (int query = first * group; query < last * group; query += PASS_QUERIES)
        with_constant<PASS_QUERIES>(std::min(PASS_QUERIES, last * group - query), [&](auto constant) {
            constexpr int M = constant();
            const T *queries[M];
            for (int m = 0; m < M; m++) queries[m] = rows.query(query + m);
            score_panels<T, M>(queries, s.keys, D, s.scores + size_t(query) * TILE);
        });
    float shrink[256];
    const int most_rows = std::max(1, 256 / group);
    for (int row = first; row < last;) {  // rows that see the same of the tile go together
        int end = row + 1;
        while (end < last && end - row < most_rows && low(end) == low(row) && high(end) == high(row)) end++;
        for (int query = row * group; query < end * group; query += MAX_TOGETHER)
            with_constant<MAX_TOGETHER>(std::min(MAX_TOGETHER, end * group - query), [&](auto constant) {
                weigh<constant()>(s.scores + size_t(query) * TILE, s.weights + size_t(query) * TILE, low(row), high(row), scale,
                                  mixed.greatest + query, mixed.sums + query, shrink + (query - row * group));
            });
        mix_values(rows, row * group, end * group, low(row), high(row), shrink, s, mixed);
        row = end;
    }
}

// One part of some rows, for KV heads rows.head .. rows.head + num_heads - 1, each with its own `mixed_size` numbers from
// `mixed` on. `stream`: what brings this part and what follows it nearer, or null.
template <class T>
void attend_part(Rows<T> rows, int num_heads, int part, Scratch<T> &s, float *mixed, size_t mixed_size, KvStream *stream) {
    const int first_head = rows.head, padded = rows.cache.padded();
    for (int head = 0; head < num_heads; head++)
        Mixed(mixed + head * mixed_size, rows.num_queries(), padded).clear(rows.num_queries(), padded);
    const int end = std::min((part + 1) * PART, rows.last_position() + 1);
    int start = part * PART;
    while (start + TILE <= rows.low(0)) start += TILE;
    for (; start < end; start += TILE) {
        const TileRows<T> tile(rows.cache, rows.table, rows.attend.layer, start, end);
        if (stream && rows.is_direct()) {
            attend_directly(rows, num_heads, start, tile, s, mixed, mixed_size, *stream);
            continue;
        }
        // All heads' rows lie side by side, and the first head reads of each: what is asked for is a tile ahead.
        const int from = std::max(rows.low(0) - start, 0) / LANES * LANES;
        int chunks = stream ? 2 * stream->chunks_of(start + from, tile.count - from) : 0;
        for (int head = 0; head < num_heads; head++) {
            rows.head = first_head + head;
            const int share = ceil_div(chunks, num_heads - head);
            chunks -= share;
            Mixed so_far(mixed + head * mixed_size, rows.num_queries(), padded);
            attend_tile(rows, start, tile, s, so_far, {share ? stream->take(share, share) : nullptr, share});
        }
        rows.head = first_head;
    }
}

// Put a later part behind what a row has so far.
inline void merge(Mixed all_parts, const Mixed &part, int num_queries, int padded) {
    for (int query = 0; query < num_queries; query++) {
        if (part.has_nothing(query)) continue;
        float *to = all_parts.values + size_t(query) * padded;
        const float *from = part.values + size_t(query) * padded;
        if (all_parts.has_nothing(query)) {
            std::copy(from, from + padded, to);
            all_parts.greatest[query] = part.greatest[query];
            all_parts.sums[query] = part.sums[query];
            continue;
        }
        const float greatest = std::max(all_parts.greatest[query], part.greatest[query]);
        const float old_share = exponential(all(all_parts.greatest[query] - greatest))[0];
        const float new_share = exponential(all(part.greatest[query] - greatest))[0];
        for (int i = 0; i < padded; i += LANES)
            store(to + i, multiply_add(load(to + i), all(old_share), load(from + i) * new_share));
        all_parts.greatest[query] = greatest;
        all_parts.sums[query] = all_parts.sums[query] * old_share + part.sums[query] * new_share;
    }
}

template <class T> void finish(const Rows<T> &rows, const Mixed &mixed) {
    const int padded = rows.cache.padded(), D = rows.cache.head_dim;
    for (int query = 0; query < rows.num_queries(); query++)
        for (int i = 0; i < D; i += PANEL) {
            const float *from = mixed.values + size_t(query) * padded + i;
            Floats first = load(from), second = load(from + LANES);
            if constexpr (Step<T>::WIDTH == 2) in_order<T>(first, second);
            store_some(rows.to(query) + i, first / mixed.sums[query], D - i);
            if (D - i > LANES) store_some(rows.to(query) + i + LANES, second / mixed.sums[query], D - i - LANES);
        }
}

}  // namespace baton
