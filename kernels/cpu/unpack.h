// One KV head's keys and values of a tile, laid out as products of many rows take them.
#pragma once

#include "tile.h"

namespace baton {

#if defined(__AVX512F__)
// 16 rows of 16 cells of 4 bytes become 16 columns, `stride` bytes apart.
template <class T> BATON_INLINE void transpose(const T *const *rows, size_t offset, char *to, size_t stride) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = (__m512i)cells_of(rows[i] + offset);
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
template <class T> void unpack_keys(const T *const *rows, int head_dim, Ready<T> *panel, int column) {
    constexpr int W = Step<T>::WIDTH;
    const int steps = head_dim / W;
    int step = 0;
    for (; step + LANES <= steps; step += LANES)
        transpose(rows, step * W, reinterpret_cast<char *>(panel + (size_t(step) * PANEL + column) * W), PANEL * 4);
    for (; step < steps; step++)
        for (int i = 0; i < LANES; i++)
            for (int w = 0; w < W; w++) {
                Ready<T> &cell = panel[(size_t(step) * PANEL + column + i) * W + w];
                if constexpr (std::is_same_v<T, Ready<T>>) cell = rows[i][step * W + w];
                else cell = number_of(rows[i][step * W + w]);
            }
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
void load_tile(const Cache &cache, const TileRows<T> &tile, int head, Ready<T> *to_keys, Mixable<T> *to_values, AheadOfTile &ahead) {
    constexpr int W = Step<Mixable<T>>::WIDTH;
    const int D = cache.head_dim;
    static const T nothing[MAX_HEAD_DIM] = {};
    const T *rows[LANES], *values[LANES];
    const int chunks = ceil_div(ahead.count, std::max(tile.count, 1));  // a position
    for (int begin = 0; begin < TILE; begin += LANES) {
        for (int i = 0; i < LANES; i++) {
            const bool is_there = begin + i < tile.count;
            rows[i] = is_there ? tile.keys[begin + i] + head * D : nothing;
            values[i] = is_there ? rows[i] + tile.values : nothing;
        }
        const int num_values = HAS_TILES<T> ? LANES : std::min(LANES, tile.count - begin);  // tiles are multiplied whole
        for (int i = 0; i < num_values; i += W) {
            unpack_values(values + i, D, to_values + size_t(begin + i) * PANEL);
            for (int n = 0; n < W * chunks; n++) ahead.bring_next();
        }
        unpack_keys(rows, D, to_keys + (begin / PANEL) * panel_size<T>(D), begin % PANEL);
    }
}

}  // namespace baton
