// A tile for one row, as in decode: keys and values are read where they lie, in the order of addresses, all KV heads together.
#pragma once

#include "tile.h"

namespace baton {

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
        values += D, mixed += mixing.mixed_size;
        sums_memory += mixing.group * D, weights += mixing.group * TILE, shrink += mixing.group;
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

}  // namespace baton
