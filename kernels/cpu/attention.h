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

#include "product.h"
#include "workspace.h"

namespace baton {

constexpr int TILE = 2 * PANEL;    // positions
constexpr int PART = 2 * TILE;     // positions
constexpr int MAX_DIRECT = 4;      // queries of a unit that read values where they lie

struct Span {
    int32_t first_row, num_rows, first_position;
};

struct Batch {
    const Span *spans;
    const int64_t *tables;           // [num_spans, table_stride] block ids
    const int64_t *write_positions;  // [num_rows] block id * block_size + offset
    int64_t table_stride;
    int32_t num_spans, num_rows;
};

struct Cache {
    void *kv;  // [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    int32_t num_layers, block_size, num_kv_heads, head_dim, num_heads;

    int group() const { return num_heads / num_kv_heads; }
    int padded() const { return ceil_div(head_dim, PANEL) * PANEL; }
    template <class T> T *at(int layer, int plane, int64_t block, int offset) const {
        const size_t row = ((size_t(block) * num_layers + layer) * 2 + plane) * block_size + offset;
        return static_cast<T *>(kv) + row * num_kv_heads * head_dim;
    }
};

// Queries in, mixed values out, both [num_rows, stride], heads from the start of the row; window 0: a row sees all before it.
template <class T> struct Attend {
    const T *queries;
    T *to;
    int query_stride, to_stride, layer, window;
};

// One thread's memory.
template <class T> struct Scratch {
    T *keys;          // [2 panels]
    float *values;    // [padded / PANEL, TILE, PANEL]
    float *scores;    // [queries, TILE], then weights
    float *part;      // a Mixed of one part
    float *row;       // and of all parts so far

    static size_t bytes(const Cache &cache, int queries) {
        const size_t mixed = size_t(queries) * (cache.padded() + 2);
        return 2 * panel_size<T>(cache.head_dim) * sizeof(T) + (cache.padded() * TILE + queries * TILE + 2 * mixed) * 4 + 5 * 64;
    }
    Scratch(char *memory, const Cache &cache, int queries) {
        const size_t mixed = size_t(queries) * (cache.padded() + 2);
        keys = take<T>(memory, 2 * panel_size<T>(cache.head_dim));
        values = take<float>(memory, cache.padded() * TILE);
        scores = take<float>(memory, queries * TILE);
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
    const T *keys[TILE];
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
    }
};

// Brings a tile's rows nearer, all heads as they lie, a few lines whenever a loop over an earlier tile calls: a CPU has a few
// dozen lines under way at most, so that asking for all at once would only wait.
template <class T> class Approach {
  public:
    Approach(const TileRows<T> &tile, const Cache &cache)
        : tile_(tile), row_bytes_(cache.num_kv_heads * cache.head_dim * sizeof(T)),
          lines_a_call_(ceil_div(cache.head_dim * int(sizeof(T)), 2 * 64)) {}
    // Two calls for each position and KV head of a tile bring all of the next.
    BATON_INLINE void call() {
        if (row_ >= tile_.count) return;
        const char *at = reinterpret_cast<const char *>(tile_.keys[row_]) + byte_;
        for (int line = 0; line < lines_a_call_; line++) {
            __builtin_prefetch(at + line * 64, 0, 3);
            __builtin_prefetch(at + tile_.values * sizeof(T) + line * 64, 0, 3);
        }
        byte_ += lines_a_call_ * 64;
        if (byte_ >= row_bytes_) byte_ = 0, row_++;
    }

  private:
    const TileRows<T> &tile_;
    const size_t row_bytes_;
    const int lines_a_call_;
    int row_ = 0;
    size_t byte_ = 0;
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
void load_tile(const Cache &cache, const TileRows<T> &tile, Approach<T> &next, int head, bool unpacks_values,
               Scratch<T> &s) {
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
            if (unpacks_values) unpack_value(rows[i] + tile.values, D, s.values + size_t(begin + i) * PANEL);
            next.call();
            if (unpacks_values) next.call();
        }
        unpack_keys(rows, D, s.keys + (begin / PANEL) * panel_size<T>(D), begin % PANEL);
    }
}

// Turn one query's scores of a tile into weights, [low, high) being what it sees, and rescale what it has so far.
BATON_INLINE float weigh(float *scores, int low, int high, float scale, float &greatest, float &sum) {
    const Floats hidden = all(-std::numeric_limits<float>::infinity());
    const Floats lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const bool sees_a_part = low > 0 || high < TILE;
    Floats score[TILE / LANES], most = hidden;
    for (int v = 0; v < TILE / LANES; v++) {
        score[v] = load(scores + v * LANES) * scale;
        if (sees_a_part) {
            const Floats at = lane + float(v * LANES);
            score[v] = (at >= float(low)) & (at < float(high)) ? score[v] : hidden;
        }
        most = score[v] > most ? score[v] : most;
    }
    const float before = greatest;
    greatest = std::max(before, largest_of(most));
    Floats weights[TILE / LANES];
    for (int v = 0; v < TILE / LANES; v++) {
        weights[v] = exponential(score[v] - greatest);
        store(scores + v * LANES, weights[v]);
    }
    const float shrink = before == greatest ? 1.0f : exponential(all(before - greatest))[0];  // exp(0) is 1 to the last bit
    sum = sum * shrink + sum_of((weights[0] + weights[1]) + (weights[2] + weights[3]));
    return shrink;
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
    bool unpacks_values() const { return num_queries() > MAX_DIRECT || cache.head_dim % PANEL; }
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

// The same for so few queries that values are read where they lie: M queries from `begin` on.
template <class T, int M>
void mix_where_they_lie(const Rows<T> &rows, const TileRows<T> &tile, int begin, int low, int high, const float *shrink,
                        Approach<T> &next, Scratch<T> &s, Mixed &mixed) {
    const int D = rows.cache.head_dim;
    const T *values = rows.head * D + tile.keys[0] + tile.values;
    for (int column = 0; column < D; column += 2 * PANEL)
        with_constant<2>(std::min(2, (D - column) / PANEL), [&](auto panels) {
            constexpr int VECTORS = 2 * panels();
            Floats sums[M][VECTORS] = {};
            for (int i = low; i < high; i++) {
                next.call();
                const T *value = values + (tile.keys[i] - tile.keys[0]) + column;
                Floats part[VECTORS];
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v += 2) load_pair(value + v * LANES, part[v], part[v + 1]);
#pragma GCC unroll 4
                for (int m = 0; m < M; m++) {
                    const Floats weight = all(s.scores[size_t(begin + m) * TILE + i]);
#pragma GCC unroll 4
                    for (int v = 0; v < VECTORS; v++) sums[m][v] = multiply_add(part[v], weight, sums[m][v]);
                }
            }
            for (int m = 0; m < M; m++) {
                for (int v = 0; v < VECTORS; v += 2) in_order<T>(sums[m][v], sums[m][v + 1]);
                for (int v = 0; v < VECTORS; v++) {
                    float *at = mixed.values + size_t(begin + m) * D + column + v * LANES;
                    store(at, multiply_add(load(at), all(shrink[m]), sums[m][v]));
                }
            }
        });
}

template <class T>
void attend_tile(const Rows<T> &rows, int start, const TileRows<T> &tile, Approach<T> &next, Scratch<T> &s, Mixed &mixed) {
    const int count = tile.count;
    const int group = rows.cache.group(), D = rows.cache.head_dim;
    const float scale = 1.0f / std::sqrt(float(D));
    auto low = [&](int row) { return std::clamp(rows.low(row) - start, 0, TILE); };
    auto high = [&](int row) { return std::clamp(rows.first_position + row + 1 - start, 0, count); };
    int first = 0, last = rows.num_rows;  // rows that see any of it
    while (first < last && high(first) <= low(first)) first++;
    while (first < last && high(last - 1) <= low(last - 1)) last--;
    for (int query = first * group; query < last * group; query += MAX_ROWS_OF_PAIR)
        with_constant<MAX_ROWS_OF_PAIR>(std::min(MAX_ROWS_OF_PAIR, last * group - query), [&](auto constant) {
            constexpr int M = constant();
            const T *queries[M];
            for (int m = 0; m < M; m++) queries[m] = rows.query(query + m);
            Floats sums[M][4];
            multiply<T, M, 2>(queries, s.keys, panel_size<T>(D), D / Step<T>::WIDTH, sums);
            for (int m = 0; m < M; m++)
                for (int v = 0; v < 4; v++) store(s.scores + size_t(query + m) * TILE + v * LANES, sums[m][v]);
        });
    float shrink[256];
    const int most_rows = std::max(1, 256 / group);
    for (int row = first; row < last;) {  // rows that see the same of the tile go together
        int end = row + 1;
        while (end < last && end - row < most_rows && low(end) == low(row) && high(end) == high(row)) end++;
        for (int query = row * group; query < end * group; query++)
            shrink[query - row * group] = weigh(s.scores + size_t(query) * TILE, low(row), high(row), scale, mixed.greatest[query],
                                                mixed.sums[query]);
        if (rows.unpacks_values()) mix_values(rows, row * group, end * group, low(row), high(row), shrink, s, mixed);
        else
            with_constant<MAX_DIRECT>((end - row) * group, [&](auto constant) {
                mix_where_they_lie<T, constant()>(rows, tile, row * group, low(row), high(row), shrink, next, s, mixed);
            });
        row = end;
    }
}

// One part of some rows, for KV heads rows.head .. rows.head + num_heads - 1, each with its own `mixed_size` numbers from
// `mixed` on. `ahead_end`: positions before it are brought nearer while the tile before them is computed.
template <class T>
void attend_part(Rows<T> rows, int num_heads, int part, int ahead_end, Scratch<T> &s, float *mixed, size_t mixed_size) {
    const int first_head = rows.head, padded = rows.cache.padded();
    for (int head = 0; head < num_heads; head++) Mixed(mixed + head * mixed_size, rows.num_queries(), padded).clear(rows.num_queries(), padded);
    const int end = std::min((part + 1) * PART, rows.last_position() + 1);
    int start = part * PART;
    while (start + TILE <= rows.low(0)) start += TILE;
    for (; start < end; start += TILE) {
        const TileRows<T> tile(rows.cache, rows.table, rows.attend.layer, start, end);
        const TileRows<T> next(rows.cache, rows.table, rows.attend.layer, start + TILE, ahead_end);
        Approach<T> approach(next, rows.cache);
        for (int head = 0; head < num_heads; head++) {
            rows.head = first_head + head;
            load_tile(rows.cache, tile, approach, rows.head, rows.unpacks_values(), s);
            Mixed so_far(mixed + head * mixed_size, rows.num_queries(), padded);
            attend_tile(rows, start, tile, approach, s, so_far);
        }
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
