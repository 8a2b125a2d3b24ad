// What the two ways through a tile share (unpacked, attention.h, or where keys and values lie, direct.h): whose rows and positions
// it has, a thread's memory, scores becoming weights.
#pragma once

#include <cmath>
#include <type_traits>

#include "scores.h"
#include "stream.h"
#include "tiles.h"
#include "workspace.h"

namespace baton {

constexpr int MAX_TOGETHER = 6;  // queries that are weighed together

// Weights and values as they are multiplied: in T where a CPU has a dot product of its pairs, in fp32 elsewhere.
template <class T> using Mixable = std::conditional_t<Step<T>::WIDTH == 2, T, float>;

// Two vectors of 16 columns of a pair of positions, in the order that is cheapest; in_order puts sums of such right again.
template <class T> BATON_INLINE void in_order(Floats &, Floats &) {}
#if defined(__AVX512BF16__)
BATON_INLINE void put_pair(const Bf16 *first, const Bf16 *second, Bf16 *to) {
    const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
    _mm512_storeu_si512(to, _mm512_unpacklo_epi16(a, b)), _mm512_storeu_si512(to + PANEL, _mm512_unpackhi_epi16(a, b));
}
template <> BATON_INLINE void in_order<Bf16>(Floats &first, Floats &second) {
    const Floats low = first, high = second;
    first = __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    second = __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
}
#endif

// Queries in, mixed values out, both [num_rows, stride], heads from the start of the row; window 0: a row sees all before it.
template <class T> struct Attend {
    const T *queries;
    T *to;
    int query_stride, to_stride, layer, window;
};

// Whether both products of attention are those of tiles.h.
#if defined(__AMX_BF16__)
template <class T> constexpr bool HAS_TILES = std::is_same_v<T, Bf16>;
constexpr int SPARE_QUERIES = 2 * TILED_ROWS - 1;  // of two passes, computed with the last ones, and nobody's
#else
template <class T> constexpr bool HAS_TILES = false;
constexpr int SPARE_QUERIES = 0, TILED_ROWS = 0;
#endif
template <class T> constexpr bool is_on_tiles(int head_dim) { return HAS_TILES<T> && head_dim % TILE_DEPTH == 0; }

// One thread's memory.
template <class T> struct Scratch {
    Ready<T> *keys;  // [2 panels]; of two tiles, where they are multiplied on tiles
    float *sums;      // [num_heads, head_dim]
    float *queries;   // [num_heads, head_dim], widened
    Mixable<T> *values;   // [padded / PANEL] panels of TILE positions; of all KV heads, where they are multiplied on tiles
    float *scores;        // [queries, TILE]
    Mixable<T> *weights;  // [queries, TILE]; the scores' memory where they are fp32
    float *shrink;    // [queries]
    float *part;      // a Mixed of one part
    float *row;       // and of all parts so far
    // where products are those of tiles.h
    T *packed;  // a unit's queries, as put_on_tiles lays them out
    float *of_pass;  // [TILED_ROWS, padded], what a pass has so far of a part
    Tiles tiles;

    // Enough for any T, if T is float.
    static size_t bytes(const Cache &cache, int queries) {
        const size_t mixed = size_t(queries) * (cache.padded() + 2), all_queries = queries + SPARE_QUERIES;
        return (HAS_TILES<Bf16> ? 4 : 2) * panel_size<T>(cache.head_dim) * sizeof(Ready<T>) +
               (2 * cache.num_heads * cache.head_dim + values_size(cache) + all_queries * (2 * TILE + 1) + 2 * mixed) * 4 +
               (packed_size(cache, all_queries) * sizeof(Bf16) + cache.padded() * TILED_ROWS * sizeof(float)) * HAS_TILES<Bf16> + 11 * 64;
    }
    Scratch(char *memory, const Cache &cache, int queries) {
        const size_t mixed = size_t(queries) * (cache.padded() + 2), all_queries = queries + SPARE_QUERIES;
        keys = take<Ready<T>>(memory, (HAS_TILES<T> ? 4 : 2) * panel_size<T>(cache.head_dim));
        sums = take<float>(memory, cache.num_heads * cache.head_dim);
        this->queries = take<float>(memory, cache.num_heads * cache.head_dim);
        values = take<Mixable<T>>(memory, values_size(cache));
        scores = take<float>(memory, all_queries * TILE);
        if constexpr (std::is_same_v<Mixable<T>, float>) weights = scores;
        else weights = take<T>(memory, all_queries * TILE);
        shrink = take<float>(memory, queries);
        part = take<float>(memory, mixed);
        row = take<float>(memory, mixed);
        if constexpr (HAS_TILES<T>) {
            packed = take<T>(memory, packed_size(cache, all_queries));
            of_pass = take<float>(memory, cache.padded() * TILED_ROWS);
        }
    }
    static size_t values_size(const Cache &cache) { return size_t(cache.padded()) * TILE * (HAS_TILES<Bf16> ? std::max(cache.num_kv_heads, PART / TILE) : 1); }
    static size_t packed_size(const Cache &cache, size_t queries) {
        return std::max<size_t>(queries, cache.num_kv_heads * LANES) * cache.head_dim;
    }
};

// Weighted values of some queries, not yet divided by the sum of weights.
struct Mixed {
    float *values;    // [queries, padded]
    float *greatest;  // [queries]
    float *sums;      // [queries]

    Mixed(float *memory, int queries, int padded)
        : values(memory), greatest(memory + size_t(queries) * padded), sums(greatest + queries) {}
    Mixed(float *values, float *greatest, float *sums) : values(values), greatest(greatest), sums(sums) {}
    Mixed from(int query, int padded) const { return {values + size_t(query) * padded, greatest + query, sums + query}; }
    void clear(int queries, int padded) {
        std::fill(values, values + size_t(queries) * padded, 0.0f);
        clear_sums(queries);
    }
    void clear_sums(int queries) {
        std::fill(greatest, greatest + queries, -std::numeric_limits<float>::infinity());
        std::fill(sums, sums + queries, 0.0f);
    }
    bool has_nothing(int query) const { return sums[query] == 0.0f; }  // false of a NaN
};

// Where a tile's positions are: KV head 0 of each position's keys; its values are `values` numbers behind.
template <class T> struct TileRows {
    const T *keys[TILE];  // a multiple of LANES of them: the last one is repeated
    size_t values;
    int count = 0;

    TileRows(const Cache &cache, const int64_t *table, int layer, int start, int end)
        : values(size_t(cache.block_size) * cache.position_size) {
        const int size = cache.block_size;
        int index = start / size, offset = start % size;
        const int most = std::min(TILE, end - start);
        for (; count < most; index++, offset = 0) {
            const T *row = cache.at<T>(layer, 0, table[index], offset);
            const int num = std::min(size - offset, most - count);
            for (int i = 0; i < num; i++) keys[count + i] = row + i * size_t(cache.position_size);
            count += num;
        }
        for (int i = count; count && i < ceil_div(count, LANES) * LANES; i++) keys[i] = keys[count - 1];
    }
};

// Where reduce_four leaves what it makes of the m-th vector, where as many calls as it takes are stored one after the other.
constexpr int lane_of(int m) { return m / 4 * LANES + m % 4 * 4; }

struct DoNothing {
    BATON_INLINE void operator()() const {}
};
// By how much a score may exceed what counts as the greatest: what is summed up so far is rescaled seldom then.
template <class Weight> constexpr float SLACK = HAS_TILES<Weight> ? 8.0f : 0.0f;
constexpr int MEANWHILES = 3;  // calls of `meanwhile` a query

// Turn M queries' scores of a tile into weights, [low, high) being what they see, and rescale the sums that they have so far.
// meanwhile: what else is to be done, bit by bit.
template <int M, class Weight, class Meanwhile = DoNothing>
BATON_INLINE void weigh(float *scores, Weight *weights, int low, int high, float scale, float *greatest, float *sums, float *shrink,
                        Meanwhile &&meanwhile = {}) {
    constexpr bool IS_ROUGH = sizeof(Weight) < sizeof(float);  // weights lose more by rounding
    constexpr float LOG2_E = 1.44269504088896341f;
    const Floats hidden = all(-std::numeric_limits<float>::infinity());
    const Floats lane = counting();
    const bool sees_a_part = low > 0 || high < TILE;
    Floats most[M], total[M];
    alignas(64) float reduced[lane_of(M + 3)], gaps[LANES] = {};
    auto reduce = [&](const Floats (&of)[M], auto &&both) {
        for (int m = 0; m < M; m += 4) {
            auto at = [&](int i) { return of[std::min(m + i, M - 1)]; };
            store(reduced + lane_of(m), reduce_four(at(0), at(1), at(2), at(3), both));
        }
    };
    for (int m = 0; m < M; m++) {
        meanwhile();
        most[m] = hidden;
        for (int v = 0; v < TILE / LANES; v++) {
            float *at = scores + m * TILE + v * LANES;
            Floats score = load(at);
            if (sees_a_part) {
                const Floats position = lane + float(v * LANES);
                score = choose((position >= all(low)) & (position < all(high)), score, hidden);
                store(at, score);
            }
            most[m] = larger(score, most[m]);
        }
    }
    reduce(most, [](auto a, auto b) __attribute__((always_inline)) { return larger(a, b); });
    for (int m = 0; m < M; m++) {
        const float scaled = reduced[lane_of(m)] * scale, now = scaled > greatest[m] + SLACK<Weight> ? scaled : greatest[m];
        gaps[m] = greatest[m] - now, greatest[m] = now;
    }
    store(gaps, exponential(load(gaps)));
    auto exponentials_of = [&](int m, auto num) {
        constexpr int V = TILE / LANES, QUERIES = num(), N = QUERIES * V;
        Floats sum[N];
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) {
            const Floats score = load(scores + m * TILE + i * LANES);
            const float most_of_all = greatest[m + i / V];
            sum[i] = IS_ROUGH ? multiply_add(score, all(scale * LOG2_E), all(-most_of_all * LOG2_E)) : score * scale - all(most_of_all);
        }
        for (int i = 0; i < QUERIES; i++) meanwhile();
        if constexpr (IS_ROUGH) rough_powers_below(sum);
        else exponentials_below(sum);
        for (int i = 0; i < QUERIES; i++) meanwhile();
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) store(weights + m * TILE + i * LANES, sum[i]);
#pragma GCC unroll 2
        for (int i = 0; i < QUERIES; i++) total[m + i] = (sum[V * i] + sum[V * i + 1]) + (sum[V * i + 2] + sum[V * i + 3]);
    };
    for (int m = 0; m + 1 < M; m += 2) exponentials_of(m, std::integral_constant<int, 2>{});
    if constexpr (M % 2) exponentials_of(M - 1, std::integral_constant<int, 1>{});
    reduce(total, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
    for (int m = 0; m < M; m++) shrink[m] = gaps[m], sums[m] = sums[m] * shrink[m] + reduced[lane_of(m)];
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
    // Whether so few queries share a KV head that unpacking its tiles costs more than it saves.
    bool is_direct() const {
        const int most = is_on_tiles<T>(cache.head_dim) ? LANES : 2 * MAX_DIRECT;
        return num_rows == 1 && cache.group() <= most && scores_where_they_lie<T>(cache.head_dim) && cache.head_dim % PANEL == 0;
    }
    int last_position() const { return first_position + num_rows - 1; }
    int low(int row) const { return attend.window ? std::max(0, first_position + row - attend.window + 1) : 0; }
};

}  // namespace baton
