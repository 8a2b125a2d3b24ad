// Causal attention over paged KV that reads each KV byte once for all query heads that share it.
//
// A sequence's positions are cut into parts of PART and tiles of TILE at absolute positions. Of each row and query head:
//
//     score     one chain over head_dim (product.h), times 1 / sqrt(head_dim)
//     tile      weights exp(score - greatest so far); their sum by a fixed tree; weighted values: one chain over the positions
//               that the row sees, first to last
//     part      tiles one after the other, what came before scaled by exp(old greatest - new greatest)
//     row       parts one after the other, merged in the same way
//
// Nothing of it depends on other rows, so that a decode row (its parts shared out over threads) and the same row inside a
// chunk (many rows at a tile that was unpacked once) have the same bits. Positions that a row does not see are never
// multiplied: what lies there may be anything.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "scores.h"
#include "stream.h"
#include "workspace.h"

namespace baton {

constexpr int MAX_TOGETHER = 6;    // queries that are weighed together

// Queries in, mixed values out, both [num_rows, stride], heads from the start of the row; window 0: a row sees all before it.
template <class T> struct Attend {
    const T *queries;
    T *to;
    int query_stride, to_stride, layer, window;
};

// One thread's memory.
template <class T> struct Scratch {
    T *keys;          // [2 panels]
    float *sums;      // [num_heads, head_dim]
    float *values;    // [padded / PANEL, TILE, PANEL]
    float *scores;    // [queries, TILE], then weights
    float *shrink;    // [queries]
    float *part;      // a Mixed of one part
    float *row;       // and of all parts so far

    static size_t bytes(const Cache &cache, int queries) {
        const size_t mixed = size_t(queries) * (cache.padded() + 2);
        return 2 * panel_size<T>(cache.head_dim) * sizeof(T) +
               (cache.num_heads * cache.head_dim + cache.padded() * TILE + queries * (TILE + 1) + 2 * mixed) * 4 + 7 * 64;
    }
    Scratch(char *memory, const Cache &cache, int queries) {
        const size_t mixed = size_t(queries) * (cache.padded() + 2);
        keys = take<T>(memory, 2 * panel_size<T>(cache.head_dim));
        sums = take<float>(memory, cache.num_heads * cache.head_dim);
        values = take<float>(memory, cache.padded() * TILE);
        scores = take<float>(memory, queries * TILE);
        shrink = take<float>(memory, queries);
        part = take<float>(memory, mixed);
        row = take<float>(memory, mixed);
    }
};

// Weighted values of some queries, not yet divided by the sum of weights.
struct Mixed {
    float *values;    // [queries, padded]
    float *greatest;  // [queries]
    float *sums;      // [queries]

    Mixed(float *memory, int queries, int padded)
        : values(memory), greatest(memory + size_t(queries) * padded), sums(greatest + queries) {}
    void clear(int queries, int padded) {
        std::fill(values, values + size_t(queries) * padded, 0.0f);
        std::fill(greatest, greatest + queries, -std::numeric_limits<float>::infinity());
        std::fill(sums, sums + queries, 0.0f);
    }
    bool has_nothing(int query) const { return sums[query] == 0.0f; }  // false of a NaN
};

// Call f with num (1 .. M) as a compile-time constant.
template <int M, class F> BATON_INLINE void with_constant(int num, F &&f) {
    if constexpr (M > 1)
        if (num < M) return with_constant<M - 1>(num, f);
    f(std::integral_constant<int, M>{});
}

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
#endif

// Lay 16 rows of head_dim out as columns column .. column + 15 of a panel.
template <class T> void unpack_keys(const T *const *rows, int head_dim, T *panel, int column) {
    constexpr int W = Step<T>::WIDTH;
    const int steps = head_dim / W;
    int step = 0;
#if defined(__AVX512F__)
    if constexpr (W * sizeof(T) == 4)
        for (; step + LANES <= steps; step += LANES)
            transpose(reinterpret_cast<const void *const *>(rows), step * 4,
                      reinterpret_cast<char *>(panel + (size_t(step) * PANEL + column) * W), PANEL * 4);
#endif
    for (; step < steps; step++)
        for (int i = 0; i < LANES; i++)
            for (int w = 0; w < W; w++) panel[(size_t(step) * PANEL + column + i) * W + w] = rows[i][step * W + w];
}

// Where a tile's positions are: KV head 0 of each position's keys; its values are `values` numbers behind.
template <class T> struct TileRows {
    const T *keys[TILE];  // a multiple of LANES of them: the last one is repeated
    size_t values;
    int count = 0;

    TileRows(const Cache &cache, const int64_t *table, int layer, int start, int end)
        : values(size_t(cache.block_size) * cache.num_kv_heads * cache.head_dim) {
        const int size = cache.block_size;
        int index = start / size, offset = start % size;
        for (; count < TILE && start + count < end; index++, offset = 0) {
            const T *row = cache.at<T>(layer, 0, table[index], offset);
            for (; offset < size && count < TILE && start + count < end; offset++, row += cache.num_kv_heads * cache.head_dim)
                keys[count++] = row;
        }
        for (int i = count; count && i < ceil_div(count, LANES) * LANES; i++) keys[i] = keys[count - 1];
    }
};

// One position's values, in the panels of a tile.
template <class T> BATON_INLINE void unpack_value(const T *value, int head_dim, float *to) {
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

// Bring one KV head's tile into the form that products take; positions that it lacks are zero.
template <class T>
void load_tile(const Cache &cache, const TileRows<T> &tile, int head, Scratch<T> &s) {
    const int D = cache.head_dim;
    static const T nothing[1024] = {};
    const T *rows[LANES];
    for (int begin = 0; begin < TILE; begin += LANES) {
        for (int i = 0; i < LANES; i++) {
            if (begin + i >= tile.count) {
                rows[i] = nothing;
                continue;
            }
            rows[i] = tile.keys[begin + i] + head * D;
            unpack_value(rows[i] + tile.values, D, s.values + size_t(begin + i) * PANEL);
        }
        unpack_keys(rows, D, s.keys + (begin / PANEL) * panel_size<T>(D), begin % PANEL);
    }
}

// Turn M queries' scores of a tile into weights, [low, high) being what they see, and rescale the sums that they have so far.
template <int M>
BATON_INLINE void weigh(float *scores, int low, int high, float scale, float *greatest, float *sums, float *shrink) {
    const Floats hidden = all(-std::numeric_limits<float>::infinity());
    const Floats lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const bool sees_a_part = low > 0 || high < TILE;
    Floats most[M];
    for (int m = 0; m < M; m++) {
        most[m] = all(greatest[m]);
        for (int v = 0; v < TILE / LANES; v++) {
            Floats score = load(scores + m * TILE + v * LANES) * scale;
            if (sees_a_part) {
                const Floats at = lane + float(v * LANES);
                score = (at >= float(low)) & (at < float(high)) ? score : hidden;
            }
            store(scores + m * TILE + v * LANES, score);
            most[m] = score > most[m] ? score : most[m];
        }
    }
    for (int m = 0; m < M; m++) most[m] = all(largest_of(most[m]));
    for (int m = 0; m < M; m++) {
        shrink[m] = exponential(all(greatest[m]) - most[m])[0];
        greatest[m] = most[m][0];
        Floats sum[TILE / LANES];
        for (int v = 0; v < TILE / LANES; v++) {
            sum[v] = exponential(load(scores + m * TILE + v * LANES) - most[m]);
            store(scores + m * TILE + v * LANES, sum[v]);
        }
        sums[m] = sums[m] * shrink[m] + sum_of((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
}

// What one unit of work is about: rows of one span, and one KV head.
template <class T> struct Rows {
    const Attend<T> &attend;
    const Cache &cache;
    const int64_t *table;
    int first_row, first_position, num_rows, head;

    int num_queries() const { return num_rows * cache.group(); }
    const T *query(int index) const {
        const int row = first_row + index / cache.group(), at = head * cache.group() + index % cache.group();
        return attend.queries + size_t(row) * attend.query_stride + size_t(at) * cache.head_dim;
    }
    T *to(int index) const {
        const int row = first_row + index / cache.group(), at = head * cache.group() + index % cache.group();
        return attend.to + size_t(row) * attend.to_stride + size_t(at) * cache.head_dim;
    }
    bool is_direct() const { return num_rows == 1 && cache.group() <= 2 * MAX_DIRECT && has_chains<T>(cache.head_dim) && cache.head_dim % PANEL == 0; }
    int last_position() const { return first_position + num_rows - 1; }
    int low(int row) const { return attend.window ? std::max(0, first_position + row - attend.window + 1) : 0; }
};

// Multiply weights [low, high) of queries begin .. end by the tile's values and add them to what these have so far.
template <class T>
void mix_values(const Rows<T> &rows, int begin, int end, int low, int high, const float *shrink, Scratch<T> &s, Mixed &mixed) {
    const int padded = rows.cache.padded();
    for (int query = begin; query < end; query += MAX_ROWS_OF_PAIR)
        with_constant<MAX_ROWS_OF_PAIR>(std::min(MAX_ROWS_OF_PAIR, end - query), [&](auto constant) {
            constexpr int M = constant();
            const float *weights[M];
            for (int m = 0; m < M; m++) weights[m] = s.scores + size_t(query + m) * TILE + low;
            for (int column = 0; column < padded; column += 2 * PANEL)
                with_constant<2>(std::min(2, (padded - column) / PANEL), [&](auto panels) {
                    Floats sums[M][2 * panels()];
                    const float *values = s.values + size_t(column / PANEL) * TILE * PANEL + low * PANEL;
                    multiply<float, M, panels()>(weights, values, TILE * PANEL, high - low, sums);
                    for (int m = 0; m < M; m++)
                        for (int v = 0; v < 2 * panels(); v++) {
                            float *at = mixed.values + size_t(query + m) * padded + column + v * LANES;
                            store(at, multiply_add(load(at), all(shrink[query + m - begin]), sums[m][v]));
                        }
                });
        });
}

// One tile of one KV head, unpacked.
template <class T> void attend_tile(const Rows<T> &rows, int start, const TileRows<T> &tile, Scratch<T> &s, Mixed &mixed) {
    const int group = rows.cache.group(), D = rows.cache.head_dim;
    const float scale = 1.0f / std::sqrt(float(D));
    auto low = [&](int row) { return std::clamp(rows.low(row) - start, 0, TILE); };
    auto high = [&](int row) { return std::clamp(rows.first_position + row + 1 - start, 0, tile.count); };
    int first = 0, last = rows.num_rows;  // rows that see any of it
    while (first < last && high(first) <= low(first)) first++;
    while (first < last && high(last - 1) <= low(last - 1)) last--;
    for (int query = first * group; query < last * group; query += MAX_ROWS_OF_PAIR)
        with_constant<MAX_ROWS_OF_PAIR>(std::min(MAX_ROWS_OF_PAIR, last * group - query), [&](auto constant) {
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
                weigh<constant()>(s.scores + size_t(query) * TILE, low(row), high(row), scale, mixed.greatest + query,
                                  mixed.sums + query, shrink + (query - row * group));
            });
        mix_values(rows, row * group, end * group, low(row), high(row), shrink, s, mixed);
        row = end;
    }
}

#if defined(__AVX512F__)
// What mix_where_they_lie does for all heads alike.
struct Mixing {
    int num_heads, head_dim, group, low, high;
    bool begins, ends;
    const float *weights, *shrink;  // [num_heads, group, TILE], [num_heads, group]
    float *sums;                    // [num_heads, group, head_dim]
    float *mixed;                   // [num_heads] of [group, head_dim], `mixed_size` numbers apart
    size_t mixed_size;
};

// Add weights [low, high) of M queries of each head times values where they lie to `sums`, which `begins` from zero; where it
// `ends`, add those to what the queries have so far. keys: the values are `values` numbers behind. ahead: what to bring nearer
// meanwhile, a chunk for every 8 lines of values.
template <class T, int M, int VECTORS>
void mix_where_they_lie(const T *const *keys, size_t values, int column, const Mixing &mixing, const char *const *ahead) {
    const int D = mixing.head_dim, high = mixing.high;
    values += column;
    float *sums_memory = mixing.sums + column;
    const float *weights = mixing.weights, *shrink = mixing.shrink;
    float *mixed = mixing.mixed + column;
    for (int head = 0; head < mixing.num_heads; head++) {
        Floats sums[M][VECTORS];
#pragma GCC unroll 4
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[m][v] = mixing.begins ? Floats{} : load(sums_memory + m * D + v * LANES);
        auto mix = [&](int i) __attribute__((always_inline)) {
            const T *value = keys[i] + values;
            Floats part[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v += 2) load_pair(value + v * LANES, part[v], part[v + 1]);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) {
                const Floats weight = all(weights[m * TILE + i]);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) sums[m][v] = multiply_add(part[v], weight, sums[m][v]);
            }
        };
        int i = mixing.low;
        for (; i + 4 <= high; i += 4) {
            bring(*ahead++);
            mix(i), mix(i + 1), mix(i + 2), mix(i + 3);
        }
        for (; i < high; i++) mix(i);
        if (!mixing.ends) {
#pragma GCC unroll 4
            for (int m = 0; m < M; m++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) store(sums_memory + m * D + v * LANES, sums[m][v]);
        } else {
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) {
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v += 2) in_order<T>(sums[m][v], sums[m][v + 1]);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    float *at = mixed + m * D + v * LANES;
                    store(at, multiply_add(load(at), all(shrink[m]), sums[m][v]));
                }
            }
        }
        values += D, sums_memory += mixing.group * D, weights += mixing.group * TILE, shrink += mixing.group, mixed += mixing.mixed_size;
    }
}
#endif

// A tile of all KV heads for one row, nothing unpacked, in the order of addresses.
template <class T>
void attend_directly(const Rows<T> &rows, int num_heads, int start, const TileRows<T> &tile, Scratch<T> &s, float *mixed,
                     size_t mixed_size, KvStream &stream) {
#if defined(__AVX512F__)
    const int group = rows.cache.group(), D = rows.cache.head_dim, low = std::max(rows.low(0) - start, 0), high = tile.count;
    auto passes = [&](auto &&pass) {
        for (int query = 0; query < group; query += MAX_DIRECT)
            with_constant<MAX_DIRECT>(std::min(MAX_DIRECT, group - query), [&](auto constant) { pass(constant, query); });
    };
    const T *queries = rows.query(0);
    const int fresh = 2 * num_heads * D * int(sizeof(T)) / 64;
    for (int begin = low / LANES * LANES; begin < high; begin += LANES)
        passes([&](auto constant, int query) {
            score_where_they_lie<T, constant()>(queries + query * D, size_t(group) * D, tile.keys + begin, num_heads, D,
                                                s.scores + query * TILE + begin, size_t(group) * TILE,
                                                stream.take(query ? 0 : fresh, fresh));
        });
    for (int head = 0; head < num_heads; head++) {
        const Mixed so_far(mixed + head * mixed_size, group, D);
        passes([&](auto constant, int query) {
            weigh<constant()>(s.scores + size_t(head * group + query) * TILE, low, high, 1.0f / std::sqrt(float(D)),
                              so_far.greatest + query, so_far.sums + query, s.shrink + head * group + query);
        });
    }
    for (int begin = low / LANES * LANES; begin < high; begin += LANES) {
        const int from = std::max(low, begin), until = std::min(begin + LANES, high);
        passes([&](auto constant, int query) {
            const Mixing mixing = {num_heads, D, group, from, until, from == low, until == high,
                                   s.scores + query * TILE, s.shrink + query, s.sums + size_t(query) * D,
                                   mixed + size_t(query) * D, mixed_size};
            for (int column = 0; column < D;) {
                const bool wide = D - column >= 2 * PANEL;
                const int chunks = num_heads * 4;
                const char *const *ahead = stream.take(query ? 0 : chunks, chunks);
                if (wide) mix_where_they_lie<T, constant(), 4>(tile.keys, tile.values, column, mixing, ahead);
                else mix_where_they_lie<T, constant(), 2>(tile.keys, tile.values, column, mixing, ahead);
                column += wide ? 2 * PANEL : PANEL;
            }
        });
    }
#endif
}

// One part of some rows, for KV heads rows.head .. rows.head + num_heads - 1, each with its own `mixed_size` numbers from
// `mixed` on. `stream`: what brings this part and what follows it nearer, or null.
template <class T>
void attend_part(Rows<T> rows, int num_heads, int part, Scratch<T> &s, float *mixed, size_t mixed_size, KvStream *stream) {
    const int first_head = rows.head, padded = rows.cache.padded();
    for (int head = 0; head < num_heads; head++) Mixed(mixed + head * mixed_size, rows.num_queries(), padded).clear(rows.num_queries(), padded);
    const int end = std::min((part + 1) * PART, rows.last_position() + 1);
    int start = part * PART;
    while (start + TILE <= rows.low(0)) start += TILE;
    for (; start < end; start += TILE) {
        const TileRows<T> tile(rows.cache, rows.table, rows.attend.layer, start, end);
        if (stream && rows.is_direct()) {
            attend_directly(rows, num_heads, start, tile, s, mixed, mixed_size, *stream);
            continue;
        }
        for (int head = 0; head < num_heads; head++) {
            rows.head = first_head + head;
            load_tile(rows.cache, tile, rows.head, s);
            Mixed so_far(mixed + head * mixed_size, rows.num_queries(), padded);
            attend_tile(rows, start, tile, s, so_far);
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
        for (int i = 0; i < D; i += LANES)
            store_some(rows.to(query) + i, load(mixed.values + size_t(query) * padded + i) / mixed.sums[query], D - i);
}

}  // namespace baton
