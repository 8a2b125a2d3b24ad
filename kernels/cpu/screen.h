// Which tokens can win their draws, told from a head in 8 bits: it has half the bytes of bf16, and a step of few rows does little
// but read.
//
// A row w of the head is kept as whole numbers and a scale, too; what that loses, e, is known from when it was packed. For any x the
// logit w . x and its near one differ by e . x, which is |e| |x| at most (Cauchy-Schwarz), and by what sums and roundings lose. So
// each logit lies between two bounds. Whoever's upper one cannot win against the others' lower ones is out; the few that are left
// are computed from w in full, in the order of the linears. Same bits, so same tokens.
#pragma once

#include "contend.h"
#include "product.h"

namespace baton {

struct Screen {
    const void *weight;  // [vocab_size, in]
    const float *radii;  // [vocab_size]: near sum and exact one differ by radius * |x| at most, before both are rounded to T
    const void *rows;    // [num_rows, in]: each x
    int32_t in;
};

constexpr float ROUNDINGS = 1.03f / 256;  // of a logit and of its near one: half a last place of bf16 each; other dtypes lose less
constexpr float SMALLEST = 1e-6f;         // more than fp16 loses of numbers next to zero

// The logits of these tokens as the head in full has them.
template <class T> void exact_logits(const Screen &screen, const T *x, const int32_t *ids, int count, float *values) {
    constexpr int W = Step<T>::WIDTH;
    const T *weight = static_cast<const T *>(screen.weight);
    for (int first = 0; first < count; first += LANES) {
        const T *from[LANES];
        for (int lane = 0; lane < LANES; lane++) from[lane] = weight + size_t(ids[std::min(first + lane, count - 1)]) * screen.in;
        Floats sum = {};
        for (int k = 0; k < screen.in; k += W) {
            T columns[LANES * W] = {}, own[W] = {};
            for (int w = 0; w < std::min(W, screen.in - k); w++) {
                for (int lane = 0; lane < LANES; lane++) columns[lane * W + w] = from[lane][k + w];
                own[w] = x[k + w];
            }
            sum = Step<T>::add(sum, Step<T>::columns(columns), Step<T>::spread(own));
        }
        store_some(values + first, rounded<T>(sum), count - first);
    }
}

// As contend() answers for a row of logits. near: the row's near ones, [vocab_size]. False: nothing can be told of it.
template <class T> bool screen_row(const T *near, const Screen &screen, const Contest &contest, int row) {
    const T *x = static_cast<const T *>(screen.rows) + size_t(row) * screen.in;
    const float infinity = std::numeric_limits<float>::infinity();
    const Floats lane = counting();
    Floats squares = {};
    for (int k = 0; k < screen.in; k += LANES) {
        const Floats numbers = load_some(x + k, screen.in - k);
        squares = multiply_add(numbers, numbers, squares);
    }
    const float length = std::sqrt(sum_of(squares)) * 1.004f;  // and a little for what follows
    auto between = [&](int id, int left, Floats &low, Floats &high) {
        const Floats logit = load_some(near + id, left);
        const Floats size = as_floats((Bits)logit & 0x7FFFFFFFu);
        const Floats apart = multiply_add(load_some(screen.radii + id, left), all(length), multiply_add(size, all(ROUNDINGS), all(SMALLEST)));
        low = logit - apart, high = logit + apart;
    };

    Floats most = all(-infinity), broken = {};
    for (int id = 0; id < contest.vocab_size; id += LANES) {
        const int left = contest.vocab_size - id;
        Floats low, high;
        between(id, left, low, high);
        broken += (low + high) * 0.0f;  // NaN of what is no number
        if (left < LANES) low = choose(lane < all(left), low, all(-infinity));
        most = larger(low, most);
    }
    float at_least = most[0];
    for (int i = 1; i < LANES; i++) at_least = std::max(at_least, most[i]);
    if (!(sum_of(broken) == 0)) return false;

    int32_t *ids = contest.ids + size_t(row) * contest.limit;
    float *values = contest.values + size_t(row) * contest.limit;
    int count = 0;
    for (int id = 0; id < contest.vocab_size; id += LANES) {
        const int left = contest.vocab_size - id;
        Floats low, high;
        between(id, left, low, high);
        if (!any_at_most(all(at_least), high)) continue;
        for (int i = 0; i < std::min(LANES, left); i++) {
            if (high[i] < at_least) continue;
            if (count == contest.limit) return false;
            ids[count++] = id + i;
        }
    }
    exact_logits(screen, x, ids, count, values);
    const int best = int(std::max_element(values, values + count) - values);  // of equals the first
    if (!std::isfinite(values[best])) return false;
    contest.greatest[row] = values[best], contest.greatest_ids[row] = ids[best];

    race(contest, row, between);
    if (contest.counts[row] > contest.limit) return false;
    exact_logits(screen, x, ids, contest.counts[row], values);
    return true;
}

}  // namespace baton
