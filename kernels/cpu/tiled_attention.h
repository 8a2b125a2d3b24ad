// A tile of attention (tile.h) on AMX's tiles (tiles.h), for many rows; for one: tiled_direct.h. Both take the sums of the instruction.
//
// All 64 positions are multiplied, those that a row does not see by weights of zero: what lies there must be finite, and is taken
// for zero where it is not.
#pragma once

#include "tile.h"

namespace baton {

#if defined(__AMX_BF16__)

// pass(query, multiply): up to 32 of queries begin .. end at a time, and what multiplies so many.
template <class F> BATON_INLINE void in_tiled_passes(int begin, int end, F &&pass) {
    for (int query = begin; query < end; query += TILED_ROWS)
        pass(query, end - query > TILE_ROWS ? multiply_tiles<true, Bf16> : multiply_tiles<false, Bf16>);
}

// Lay a unit's queries side by side, [queries, head_dim].
inline void put_on_tiles(const Rows<Bf16> &rows, Scratch<Bf16> &s) {
    const int num_queries = rows.num_queries(), head_dim = rows.cache.head_dim;
    for (int query = 0; query < num_queries; query++) std::copy_n(rows.query(query), head_dim, s.packed + size_t(query) * head_dim);
    s.tiles.shape(num_queries < TILE_ROWS ? num_queries : TILED_ROWS);
}

// Scores of queries begin .. end of a unit times a tile's keys. What lies behind them is written too, up to SPARE_QUERIES of it.
inline void score_on_tiles(const Scratch<Bf16> &s, int head_dim, int begin, int end) {
    const size_t panel = panel_size<Bf16>(head_dim);
    in_tiled_passes(begin, end, [&](int query, auto multiply) {
        for (int p = 0; p < TILE / PANEL; p++)
            multiply(s.packed + size_t(query) * head_dim, head_dim * sizeof(Bf16), s.keys + p * panel, head_dim / TILE_DEPTH,
                     s.scores + size_t(query) * TILE + p * PANEL, TILE * sizeof(float), {});
    });
}

// Multiply the weights of queries begin .. end by `values` and add them to what these have so far.
inline void mix_on_tiles(const Scratch<Bf16> &s, const Bf16 *values, int padded, int begin, int end, const Mixed &mixed) {
    alignas(64) float sums[TILED_ROWS * PANEL];
    in_tiled_passes(begin, end, [&](int query, auto multiply) {
        const int num = std::min(TILED_ROWS, end - query);
        for (int column = 0; column < padded; column += PANEL) {
            multiply(s.weights + size_t(query) * TILE, TILE * sizeof(Bf16), values + size_t(column) * TILE, TILE / TILE_DEPTH, sums,
                     PANEL * sizeof(float), {});
            for (int m = 0; m < num; m++)
                for (int v = 0; v < PANEL; v += LANES) {
                    float *at = mixed.values + size_t(query + m) * padded + column + v;
                    store(at, multiply_add(load(at), all(s.shrink[query + m]), load(sums + m * PANEL + v)));
                }
        }
    });
}

// Whether all of a tile's values are finite.
inline bool are_finite(const Bf16 *values, int padded) {
    const __m512i exponent = _mm512_set1_epi16(0x7F80);
    __mmask32 found = 0;
    for (int at = 0; at < padded * TILE; at += 2 * LANES)
        found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(values + at), exponent), exponent);
    return !found;
}

// A copy of a tile's values that is zero but at positions low .. high.
inline const Bf16 *seen_values(const Scratch<Bf16> &s, int padded, int low, int high) {
    for (int panel = 0; panel < padded; panel += PANEL)
        for (int i = 0; i < TILE; i++)
            for (int column = 0; column < PANEL; column++) {
                const size_t at = size_t(panel) * TILE + i / 2 * 2 * PANEL + column * 2 + i % 2;
                s.seen_values[at] = low <= i && i < high ? s.values[at] : Bf16{};
            }
    return s.seen_values;
}

#endif

}  // namespace baton
