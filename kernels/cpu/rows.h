// What happens to one row by itself: norm and rotary positions. Rounded wherever the reference (torch_reference.py) rounds.
#pragma once

#include <algorithm>
#include <cmath>

#include "vector.h"

namespace baton {

// Scale to unit mean square, then by weight. Four sums by position: the same order for every row of this width.
template <class T> void norm_row(const T *x, const T *weight, int width, float eps, T *to) {
    Floats sums[4] = {};
    for (int i = 0, turn = 0; i < width; i += LANES, turn = (turn + 1) % 4) {
        const Floats part = load_some(x + i, width - i);
        sums[turn] = multiply_add(part, part, sums[turn]);
    }
    const float mean = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])) / float(width);
    const Floats scale = all(1.0f / std::sqrt(mean + eps));
    for (int i = 0; i < width; i += LANES) {
        const int left = width - i;
        store_some(to + i, rounded<T>(load_some(x + i, left) * scale) * load_some(weight + i, left), left);
    }
}

// Rotate one head: number i pairs with i + head_dim / 2. `to` may be `x`. cos, sin: [head_dim / 2].
template <class T> void rotate_head(const T *x, const float *cos, const float *sin, int head_dim, T *to) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i += LANES) {
        const int left = half - i;
        const Floats first = load_some(x + i, left), second = load_some(x + half + i, left);
        const Floats c = rounded<T>(load_some(cos + i, left)), s = rounded<T>(load_some(sin + i, left));
        store_some(to + i, rounded<T>(first * c) - rounded<T>(second * s), left);
        store_some(to + half + i, rounded<T>(second * c) + rounded<T>(first * s), left);
    }
}

}  // namespace baton
