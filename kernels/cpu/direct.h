// A tile for one row, as in decode: keys and values are read where they lie, in the order of addresses, all KV heads together.
#pragma once

#include "tile.h"

namespace baton {

#if defined(__AVX512F__)
constexpr int WIDE = 4, NARROW = 2;  // vectors of 16 columns of one pass over values
#else
constexpr int WIDE = 1, NARROW = 1;
#endif
constexpr int POSITIONS_A_CHUNK = LANES / WIDE;  // of a pass of bf16

// A step of values where they lie: vectors of 16 columns. The second position's are read where a step has pairs.
template <class T, int VECTORS> BATON_INLINE void load_step(const T *first, const T *, Floats (&columns)[VECTORS]) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) columns[v] = load(first + v * LANES);
}
// Sums of a vector of load_step's, columns in order.
template <class T> BATON_INLINE Floats straight(Floats x) { return x; }
#if defined(__AVX512BF16__)
template <int VECTORS> BATON_INLINE void load_step(const Bf16 *first, const Bf16 *second, Floats (&columns)[VECTORS]) {
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v += 2) {
        const __m512i x = _mm512_loadu_si512(first + v * LANES), y = _mm512_loadu_si512(second + v * LANES);
        columns[v] = (Floats)_mm512_unpacklo_epi16(x, y), columns[v + 1] = (Floats)_mm512_unpackhi_epi16(x, y);
    }
}
#elif !defined(__AVX512F__)
template <int VECTORS> BATON_INLINE void load_step(const Bf16 *first, const Bf16 *, Floats (&columns)[VECTORS]) {
    for (int v = 0; v < VECTORS; v++) {
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(first + v * LANES));
        columns[v] = {first_of_pairs(pairs), second_of_pairs(pairs)};
    }
}
template <> BATON_INLINE Floats straight<Bf16>(Floats x) {
    const __m256 low = _mm256_unpacklo_ps(x.low, x.high), high = _mm256_unpackhi_ps(x.low, x.high);
    return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}
#endif

// What mix_where_they_lie does for all heads alike.
struct Mixing {
    int num_heads, head_dim, group, low, high;
    bool begins, ends;
    const float *shrink;            // [num_heads, group]
    float *sums;                    // [num_heads, group, head_dim]
    float *mixed;                   // [num_heads] of [group, head_dim], `mixed_size` numbers apart
    size_t mixed_size;
};

// Add weights [low, high) of M queries of each head times values where they lie to `sums`, which `begins` from zero; where it
// `ends`, add those to what the queries have so far. keys: the values are `values` numbers behind. ahead: what to bring nearer
// meanwhile, a chunk for every POSITIONS_A_CHUNK positions. weights: [num_heads, group, TILE].
template <class T, int M, int VECTORS>
void mix_where_they_lie(const T *const *keys, size_t values, int column, const Mixing &mixing, const Mixable<T> *weights,
                        Nearer ahead) {
    constexpr int W = Step<T>::WIDTH;
    static const T nothing[2 * PANEL] = {};
    const int D = mixing.head_dim, low = mixing.low, high = mixing.high;
    values += column;
    float *sums_memory = mixing.sums + column;
    const float *shrink = mixing.shrink;
    float *mixed = mixing.mixed + column;
    for (int head = 0; head < mixing.num_heads; head++) {
        Floats sums[M][VECTORS];
#pragma GCC unroll 4
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[m][v] = mixing.begins ? Floats{} : load(sums_memory + m * D + v * LANES);
        auto mix = [&](int i, const T *first, const T *second) __attribute__((always_inline)) {
            Floats part[VECTORS];
            load_step(first, second, part);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) {
                const Floats weight = Step<Mixable<T>>::spread(weights + m * TILE + i);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) sums[m][v] = Step<Mixable<T>>::add(sums[m][v], part[v], weight);
            }
        };
        auto mix_whole = [&](int i) __attribute__((always_inline)) { mix(i, keys[i] + values, keys[i + W - 1] + values); };
        int i = low;
        if (i % W) mix(i - 1, nothing, keys[i] + values), i++;
        for (; i + 4 <= high; i += 4) {
            if (i / 4 % (POSITIONS_A_CHUNK / 4) == 0) bring(ahead++);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j += W) mix_whole(i + j);
        }
        for (; i + W <= high; i += W) mix_whole(i);
        if (i < high) mix(i, keys[i] + values, nothing);
        if (!mixing.ends) {
#pragma GCC unroll 4
            for (int m = 0; m < M; m++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) store(sums_memory + m * D + v * LANES, sums[m][v]);
        } else {
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) {
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    float *at = mixed + m * D + v * LANES;
                    store(at, multiply_add(load(at), all(shrink[m]), straight<T>(sums[m][v])));
                }
            }
        }
        values += D, mixed += mixing.mixed_size;
        sums_memory += mixing.group * D, weights += mixing.group * TILE, shrink += mixing.group;
    }
}

constexpr int MOST_EARLIER = 64;  // chunks that are asked for while scores are weighed, instead of during the values

// What is asked for while one tile is gone through: as many chunks as it has.
struct Pace {
    KvStream &stream;
    int left, group;

    Nearer take(int most, int count) {
        const int fresh = std::min(most, left);
        left -= fresh;
        return stream.take(fresh, count);
    }
    // What the pass that begins with this query takes of the share of all passes.
    int part_of(int &share, int query) const {
        const int part = ceil_div(share, ceil_div(group - query, MAX_DIRECT));
        share -= part;
        return part;
    }
};

// A tile of all KV heads for one row, nothing unpacked, in the order of addresses.
template <class T>
void attend_directly(const Rows<T> &rows, int num_heads, int start, const TileRows<T> &tile, Scratch<T> &s, float *mixed,
                     size_t mixed_size, KvStream &stream) {
    const int group = rows.cache.group(), D = rows.cache.head_dim, low = std::max(rows.low(0) - start, 0), high = tile.count;
    const int first = low / LANES * LANES, key_chunks = 2 * num_heads * D * int(sizeof(T)) / 64, value_chunks = num_heads * LANES / POSITIONS_A_CHUNK;
    auto passes = [&](auto &&pass) {
        for (int query = 0; query < group; query += MAX_DIRECT)
            with_constant<MAX_DIRECT>(std::min(MAX_DIRECT, group - query), [&](auto constant) { pass(constant, query); });
    };
    Pace pace{stream, 2 * stream.chunks_of(start + first, high - first), group};
    const Ready<T> *queries;
    if constexpr (std::is_same_v<T, Ready<T>>) queries = rows.query(0);
    else widen(rows.query(0), num_heads * group * D, s.queries), queries = s.queries;
    for (int begin = first; begin < high; begin += LANES) {
        int share = key_chunks;
        passes([&](auto constant, int query) {
            score_where_they_lie<T, constant()>(queries + query * D, size_t(group) * D, tile.keys + begin, num_heads, D,
                                                s.scores + query * TILE + begin, size_t(group) * TILE,
                                                pace.take(pace.part_of(share, query), key_chunks));
        });
    }
    int spare = MOST_EARLIER;
    for (int head = 0; head < num_heads; head++) {
        const Mixed so_far(mixed + head * mixed_size, group, D);
        passes([&](auto constant, int query) {
            const size_t at = size_t(head * group + query) * TILE;
            auto weigh_and = [&](auto &&meanwhile) {
                weigh<constant()>(s.scores + at, s.weights + at, low, high, 1.0f / std::sqrt(float(D)), so_far.greatest + query,
                                  so_far.sums + query, s.shrink + head * group + query, meanwhile);
            };
            if (group > MAX_DIRECT) return weigh_and([] {});  // arithmetic has the longer part
            constexpr int CHUNKS = MEANWHILES * constant();
            const int fresh = std::min(ceil_div(spare, num_heads - head), CHUNKS);
            spare -= fresh;
            Nearer place = pace.take(fresh, CHUNKS);
            weigh_and([&]() __attribute__((always_inline)) { bring(place++); });
        });
    }
    for (int begin = first; begin < high; begin += LANES) {
        const int from = std::max(low, begin), until = std::min(begin + LANES, high);
        int share = ceil_div(pace.left, ceil_div(high - begin, LANES));
        passes([&](auto constant, int query) {
            const Mixing mixing = {num_heads, D, group, from, until, from == low, until == high, s.shrink + query,
                                   s.sums + size_t(query) * D, mixed + size_t(query) * D, mixed_size};
            const Mixable<T> *weights = s.weights + query * TILE;
            int part = pace.part_of(share, query);
            for (int column = 0; column < D;) {
                const bool is_wide = D - column >= WIDE * LANES;
                const int fresh = std::min(part, value_chunks);
                Nearer place = pace.take(fresh, value_chunks);
                part -= fresh;
                if (is_wide) mix_where_they_lie<T, constant(), WIDE>(tile.keys, tile.values, column, mixing, weights, place);
                else mix_where_they_lie<T, constant(), NARROW>(tile.keys, tile.values, column, mixing, weights, place);
                column += (is_wide ? WIDE : NARROW) * LANES;
            }
        });
    }
}

}  // namespace baton
