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
// On AMX's tiles both products have the order of the instruction (tiles.h, tiled_attention.h).
//
// Nothing of it depends on other rows, so that a decode row (its parts shared out over threads) and the same row inside a
// chunk (many rows at a tile that was unpacked once) have the same bits. What lies at positions that a row does not see may be
// anything: what their keys gave is replaced, and their values are never multiplied; on tiles they are, if finite, by zero.
#pragma once

#include <algorithm>

#include "tiled_attention.h"
#include "tiled_direct.h"
#include "unpack.h"

namespace baton {

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
void mix_values(const Rows<T> &rows, int begin, int end, int low, int high, const Scratch<T> &s, Mixed &mixed) {
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
                            store(at, multiply_add(load(at), all(s.shrink[query + m]), sums[m][v]));
                        }
                });
        });
}

// A tile of all KV heads for one row.
template <class T>
void attend_one(const Rows<T> &rows, int num_heads, int start, const TileRows<T> &tile, Scratch<T> &s, float *mixed, size_t mixed_size,
                KvStream &stream) {
    if constexpr (HAS_TILES<T>)
        if (is_on_tiles<T>(rows.cache.head_dim)) return attend_directly_on_tiles(rows, num_heads, start, tile, s, mixed, mixed_size, stream);
    attend_directly(rows, num_heads, start, tile, s, mixed, mixed_size, stream);
}

// Multiply rows first .. last by the tile's keys.
template <class T> void score_tile(const Rows<T> &rows, int first, int last, const Scratch<T> &s) {
    const int group = rows.cache.group(), D = rows.cache.head_dim;
    for (int query = first * group; query < last * group; query += PASS_QUERIES)
        with_constant<PASS_QUERIES>(std::min(PASS_QUERIES, last * group - query), [&](auto constant) {
            constexpr int M = constant();
            const T *queries[M];
            for (int m = 0; m < M; m++) queries[m] = rows.query(query + m);
            score_panels<T, M>(queries, s.keys, D, s.scores + size_t(query) * TILE);
        });
}

// One tile of one KV head.
template <class T>
void attend_tile(const Rows<T> &rows, int start, const TileRows<T> &tile, Scratch<T> &s, Mixed &mixed, AheadOfTile ahead) {
    load_tile(rows.cache, tile, rows.head, s.keys, s.values, ahead);
    const int group = rows.cache.group(), D = rows.cache.head_dim;
    const float scale = 1.0f / std::sqrt(float(D));
    auto low = [&](int row) { return std::clamp(rows.low(row) - start, 0, TILE); };
    auto high = [&](int row) { return std::clamp(rows.first_position + row + 1 - start, 0, tile.count); };
    int first = 0, last = rows.num_rows;  // rows that see any of it
    while (first < last && high(first) <= low(first)) first++;
    while (first < last && high(last - 1) <= low(last - 1)) last--;
    score_tile(rows, first, last, s);
    // Rows that see the same of the tile go together: each(row, end, low, high).
    auto for_runs = [&](auto &&each) {
        for (int row = first, end; row < last; row = end) {
            for (end = row + 1; end < last && low(end) == low(row) && high(end) == high(row);) end++;
            each(row, end, low(row), high(row));
        }
    };
    for_runs([&](int row, int end, int from, int until) {
        for (int query = row * group; query < end * group; query += MAX_TOGETHER)
            with_constant<MAX_TOGETHER>(std::min(MAX_TOGETHER, end * group - query), [&](auto constant) {
                weigh<constant()>(s.scores + size_t(query) * TILE, s.weights + size_t(query) * TILE, from, until, scale,
                                  mixed.greatest + query, mixed.sums + query, s.shrink + query);
            });
    });
    for_runs([&](int row, int end, int from, int until) { mix_values(rows, row * group, end * group, from, until, s, mixed); });
}

// Put a later part behind what a row has so far.
inline void merge(Mixed all_parts, const Mixed &part, int num_queries, int padded) {
    alignas(64) float greatest[LANES], old_shares[LANES], new_shares[LANES];
    for (int query = 0; query < num_queries; query++) {
        const int lane = query % LANES;
        if (lane == 0) {
            const Floats before = load_some(all_parts.greatest + query, num_queries - query);
            const Floats later = load_some(part.greatest + query, num_queries - query), most = choose(before < later, later, before);
            store(greatest, most), store(old_shares, exponential(before - most)), store(new_shares, exponential(later - most));
        }
        if (part.has_nothing(query)) continue;
        float *to = all_parts.values + size_t(query) * padded;
        const float *from = part.values + size_t(query) * padded;
        if (all_parts.has_nothing(query)) {
            std::copy(from, from + padded, to);
            all_parts.greatest[query] = part.greatest[query];
            all_parts.sums[query] = part.sums[query];
            continue;
        }
        for (int i = 0; i < padded; i += LANES)
            store(to + i, multiply_add(load(to + i), all(old_shares[lane]), load(from + i) * new_shares[lane]));
        all_parts.greatest[query] = greatest[lane];
        all_parts.sums[query] = all_parts.sums[query] * old_shares[lane] + part.sums[query] * new_shares[lane];
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

#if defined(__AMX_BF16__)
// All parts of one KV head, for some rows: `row` has nothing yet.
inline void attend_row_on_tiles(const Rows<Bf16> &rows, Scratch<Bf16> &s, Mixed part, const Mixed &row) {
    const int padded = rows.cache.padded();
    put_on_tiles(rows, s);
    for (int number = rows.low(0) / PART; number * PART <= rows.last_position(); number++) {
        part.clear_sums(rows.num_queries());
        attend_on_tiles(rows, number, s, part, {nullptr, 0}, [&](const QueryPass &pass) {
            const Mixed of_pass(s.of_pass, part.greatest + pass.begin, part.sums + pass.begin);
            merge(row.from(pass.begin, padded), of_pass, pass.end - pass.begin, padded);
        });
    }
    finish(rows, row);
}

// As attend_part, of many rows.
inline void attend_part_on_tiles(Rows<Bf16> rows, int num_heads, int part, Scratch<Bf16> &s, float *mixed, size_t mixed_size,
                                 KvStream &stream) {
    const int padded = rows.cache.padded(), start = std::max(part * PART, rows.low(0) / LANES * LANES);
    int chunks = 2 * stream.chunks_of(start, std::min((part + 1) * PART, rows.last_position() + 1) - start);
    for (; num_heads > 0; num_heads--, rows.head++, mixed += mixed_size) {
        const Mixed of_part(mixed, rows.num_queries(), padded);
        const int share = ceil_div(chunks, num_heads);
        chunks -= share;
        put_on_tiles(rows, s);
        attend_on_tiles(rows, part, s, of_part, {share ? stream.take(share, share) : nullptr, share}, [&](const QueryPass &pass) {
            std::copy_n(s.of_pass, size_t(pass.end - pass.begin) * padded, of_part.from(pass.begin, padded).values);
        });
    }
}
#endif

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
    const bool is_direct = stream && rows.is_direct();
    if constexpr (HAS_TILES<T>)
        if (is_on_tiles<T>(rows.cache.head_dim)) {
            if (!is_direct) return attend_part_on_tiles(rows, num_heads, part, s, mixed, mixed_size, *stream);
            put_queries_of_one(rows, num_heads, s);
        }
    for (; start < end; start += TILE) {
        const TileRows<T> tile(rows.cache, rows.table, rows.attend.layer, start, end);
        if (is_direct) {
            attend_one(rows, num_heads, start, tile, s, mixed, mixed_size, *stream);
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

}  // namespace baton
