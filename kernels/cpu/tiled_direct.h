// A tile for one row on AMX's tiles, of all KV heads together, in the order of addresses (direct.h): keys where they lie are the rows
// of the first product, so that nothing is transposed but its scores; values are laid out as columns of the second.
#pragma once

#include "direct.h"

namespace baton {

#if defined(__AMX_BF16__)

// One row's queries of all KV heads as columns: [num_heads, head_dim / 2, 16] pairs.
inline void put_queries_of_one(const Rows<Bf16> &rows, int num_heads, Scratch<Bf16> &s) {
    const int group = rows.cache.group(), steps = rows.cache.head_dim / 2;
    const Bf16 *from = rows.query(0);
    for (int head = 0; head < num_heads; head++)
        for (int query = 0; query < group; query++)
            for (int step = 0; step < steps; step++, from += 2)
                std::copy_n(from, 2, s.packed + ((size_t(head) * steps + step) * LANES + query) * 2);
    s.tiles.shape_for_one(group);
}

// Columns 0 .. num_queries - 1 of 16 rows of 16, as rows that are TILE apart.
BATON_INLINE void transpose_scores(const float *rows, int num_queries, float *to) {
    for (int query = 0; query < num_queries; query += 4, rows += 4) {
        __m512 quarters[4];  // of rows i, 4 + i, 8 + i and 12 + i
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            quarters[i] = _mm512_castps128_ps512(_mm_load_ps(rows + i * LANES));
            quarters[i] = _mm512_mask_broadcast_f32x4(quarters[i], 0x00F0, _mm_load_ps(rows + (4 + i) * LANES));
            quarters[i] = _mm512_mask_broadcast_f32x4(quarters[i], 0x0F00, _mm_load_ps(rows + (8 + i) * LANES));
            quarters[i] = _mm512_mask_broadcast_f32x4(quarters[i], 0xF000, _mm_load_ps(rows + (12 + i) * LANES));
        }
        const __m512 ab = _mm512_unpacklo_ps(quarters[0], quarters[1]), cd = _mm512_unpacklo_ps(quarters[2], quarters[3]);
        const __m512 ab_high = _mm512_unpackhi_ps(quarters[0], quarters[1]), cd_high = _mm512_unpackhi_ps(quarters[2], quarters[3]);
        const __m512 columns[4] = {_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE),
                                   _mm512_shuffle_ps(ab_high, cd_high, 0x44), _mm512_shuffle_ps(ab_high, cd_high, 0xEE)};
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            if (query + i < num_queries) _mm512_storeu_ps(to + size_t(query + i) * TILE, columns[i]);
    }
}

// One row in a tile: its queries of all KV heads see positions low .. high.
struct One {
    const Scratch<Bf16> &s;
    int num_heads, head_dim, group, low, high;

    int width() const { return num_heads * head_dim; }
};

// Scores of one row's queries of all KV heads and 16 positions, of which these are the keys, `stride` bytes apart. They are the rows
// of the product: nothing is transposed but what comes of it. to: [num_heads, group, TILE].
inline void score_keys(const One &one, const Bf16 *keys, size_t stride, float *to, Nearer ahead, int chunks) {
    constexpr int ROW_BYTES = LANES * sizeof(float);
    alignas(64) float sums[TILE_ROWS * LANES];
    const Bf16 *queries = one.s.packed;
    put_into_place(keys);
    for (int head = 0; head < one.num_heads; head++, to += one.group * TILE) {
        for (int share = ceil_div(chunks, one.num_heads - head); share > 0; share--, chunks--) bring(ahead++);
        _tile_zero(0);
        for (int at = 0; at < one.head_dim; at += TILE_DEPTH, keys += TILE_DEPTH, queries += BLOCK_STEPS * LANES * 2) {
            _tile_loadd(4, keys, stride);
            _tile_loadd(6, queries, ROW_BYTES);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, sums, ROW_BYTES);
        transpose_scores(sums, one.group, to);
    }
}

// Turn all scores into weights.
inline void weigh_all(const One &one, float *mixed, size_t mixed_size, Pace &pace) {
    int spare = std::min(MOST_EARLIER, pace.left);
    for (int head = 0; head < one.num_heads; head++) {
        const Mixed so_far(mixed + head * mixed_size, one.group, one.head_dim);
        for (int query = 0; query < one.group; query += MAX_DIRECT)
            with_constant<MAX_DIRECT>(std::min(MAX_DIRECT, one.group - query), [&](auto constant) {
                constexpr int CHUNKS = MEANWHILES * constant();
                const int fresh = std::min(ceil_div(spare, one.num_heads - head), CHUNKS), at = head * one.group + query;
                spare -= fresh;
                Nearer place = pace.take(fresh, CHUNKS);
                weigh<constant()>(one.s.scores + size_t(at) * TILE, one.s.weights + size_t(at) * TILE, one.low, one.high,
                                  1.0f / std::sqrt(float(one.head_dim)), so_far.greatest + query, so_far.sums + query,
                                  one.s.shrink + at, [&]() __attribute__((always_inline)) { bring(place++); });
            });
    }
}

// Lay the values of positions low .. high of all KV heads out as columns, in the order of addresses; others of their blocks are zero.
inline void unpack_all_values(const One &one, const TileRows<Bf16> &tile, Nearer ahead, int chunks) {
    static const Bf16 nothing[2 * PANEL] = {};
    const int low = one.low, high = one.high, width = one.width();
    const int first = low / TILE_DEPTH * TILE_DEPTH, last = ceil_div(high, TILE_DEPTH) * TILE_DEPTH;
    for (int i = first; i < last; i += 2) {
        auto row = [&](int position) { return low <= position && position < high ? tile.keys[position] + tile.values : nullptr; };
        const Bf16 *even = row(i), *odd = row(i + 1);
        Bf16 *to = one.s.values + size_t(i) * PANEL;
        if (even && odd)
            for (int column = 0; column < width; column += PANEL) put_pair(even + column, odd + column, to + size_t(column) * TILE);
        else
            for (int column = 0; column < width; column += PANEL)
                put_pair(even ? even + column : nothing, odd ? odd + column : nothing, to + size_t(column) * TILE);
        for (int share = ceil_div(chunks, (last - i) / 2); share > 0; share--, chunks--) bring(ahead++);
    }
}

// Add weighted values of one KV head to what its queries have so far.
inline void mix_values_of_one(const One &one, int head, const Mixed &mixed) {
    constexpr int STEP_BYTES = 2 * PANEL * sizeof(Bf16);
    const Bf16 *weights = one.s.weights + size_t(head) * one.group * TILE;
    const Bf16 *values = one.s.values + size_t(head) * one.head_dim * TILE;
    for (int m = 0; m < one.group; m++)
        if (const float shrink = one.s.shrink[head * one.group + m]; shrink != 1.0f)
            for (int i = 0; i < one.head_dim; i += LANES) {
                float *at = mixed.values + size_t(m) * one.head_dim + i;
                store(at, load(at) * shrink);
            }
    put_into_place(weights);
    put_into_place(mixed.values);
    for (int column = 0; column < one.head_dim; column += PANEL, values += TILE * PANEL) {
        float *sums = mixed.values + column;
        _tile_loadd(2, sums, one.head_dim * sizeof(float));
        _tile_loadd(3, sums + LANES, one.head_dim * sizeof(float));
        for (int at = 0; at < TILE; at += TILE_DEPTH) {
            if (at + TILE_DEPTH <= one.low || at >= one.high) {
                _tile_zero(5);
                _tile_zero(7);
                _tile_dpbf16ps(2, 5, 7);
                _tile_dpbf16ps(3, 5, 7);
                continue;
            }
            _tile_loadd(5, weights + at, TILE * sizeof(Bf16));
            _tile_loadd(7, values + at * PANEL, STEP_BYTES);
            _tile_dpbf16ps(2, 5, 7);
            _tile_loadd(7, values + at * PANEL + PANEL, STEP_BYTES);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, sums, one.head_dim * sizeof(float));
        _tile_stored(3, sums + LANES, one.head_dim * sizeof(float));
    }
}

// A tile of all KV heads for one row, keys where they lie, in the order of addresses.
inline void attend_directly_on_tiles(const Rows<Bf16> &rows, int num_heads, int start, const TileRows<Bf16> &tile, Scratch<Bf16> &s,
                                     float *mixed, size_t mixed_size, KvStream &stream) {
    const int group = rows.cache.group(), D = rows.cache.head_dim, low = std::max(rows.low(0) - start, 0), high = tile.count;
    const int first = low / LANES * LANES;
    const One one = {s, num_heads, D, group, low, high};
    Pace pace{stream, 2 * stream.chunks_of(start + first, high - first), group};
    const bool are_in_blocks = rows.cache.block_size % LANES == 0;  // then 16 keys are equally far apart
    const size_t stride = (are_in_blocks ? rows.cache.position_size : one.width()) * sizeof(Bf16);
    for (int begin = first; begin < high; begin += LANES) {
        const Bf16 *keys = tile.keys[begin];
        if (!are_in_blocks) {
            for (int i = 0; i < LANES; i++) std::copy_n(tile.keys[begin + i], one.width(), s.values + i * one.width());
            keys = s.values;
        }
        const int chunks = std::min(ceil_div(LANES * one.width() * int(sizeof(Bf16)), int(CHUNK)), pace.left);
        score_keys(one, keys, stride, s.scores + begin, pace.take(chunks, chunks), chunks);
    }
    weigh_all(one, mixed, mixed_size, pace);
    const int chunks = pace.left;
    unpack_all_values(one, tile, pace.take(chunks, chunks), chunks);
    for (int head = 0; head < num_heads; head++) mix_values_of_one(one, head, Mixed(mixed + head * mixed_size, group, D));
}

#endif

}  // namespace baton
