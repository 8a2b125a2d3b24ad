// How much of a row's probability comes before a token, in one pass: whether top_p leaves it (engine/truncation.py).
#pragma once

#include <algorithm>

#include "vector.h"

namespace baton {

struct Shares {
    float *temperatures;    // [num_rows]; 0: not asked
    float *greatest;        // [num_rows], finite where asked
    int32_t *token_ids;     // [num_rows]
    double *above, *beside;  // [num_rows]: of the tokens whose logit is greater, of the others whose is the same
    int32_t num_rows, vocab_size;
};

constexpr int AT_ONCE = 4;            // vectors
constexpr int IN_SINGLE = 64 * LANES;  // numbers that are added up in fp32, 64 to a lane, before fp64 takes their sum

constexpr float NOTHING = -26;         // a score; a million such are 5e-6 of the greatest, and most of a row mostly are

// Of exp((logit - greatest) / temperature), off by less than 1e-5. Differences are compared, since they are what scores are of.
template <class T> void share(const T *logits, const Shares &shares, int row) {
    const int size = shares.vocab_size;
    const float greatest = shares.greatest[row];
    const Floats height = all(load_some(logits + shares.token_ids[row], 1)[0] - greatest);
    const float sharpness = std::min(1.0f / shares.temperatures[row], std::numeric_limits<float>::max());
    double total = 0, above = 0, beside = 0;
    for (int first = 0; first < size; first += IN_SINGLE) {
        const int end = std::min(size, first + IN_SINGLE);
        Floats sum = {}, sum_above = {}, sum_beside = {};
        auto add = [&](Floats below, Floats weight) {
            const Floats at_least = choose(below >= height, weight, all(0)), more = choose(below > height, weight, all(0));
            sum = sum + weight, sum_above = sum_above + more, sum_beside = sum_beside + (at_least - more);
        };
        int id = first;
        for (; id + AT_ONCE * LANES <= end; id += AT_ONCE * LANES) {
            Floats below[AT_ONCE], weights[AT_ONCE];
            for (int i = 0; i < AT_ONCE; i++) below[i] = load(logits + id + i * LANES) - greatest, weights[i] = below[i] * sharpness;
            static_assert(AT_ONCE == 4);
            const Floats most = larger(larger(weights[0], weights[1]), larger(weights[2], weights[3]));
            if (!any_at_most(all(NOTHING), most)) continue;
            exponentials_below(weights);
            for (int i = 0; i < AT_ONCE; i++) add(below[i], weights[i]);
        }
        for (; id < end; id += LANES) {
            const Floats below = load_some(logits + id, end - id) - greatest;
            add(below, choose(counting() < all(float(end - id)), exponential(below * sharpness), all(0)));
        }
        total += sum_of(sum), above += sum_of(sum_above), beside += sum_of(sum_beside);
    }
    const double own = exponential(height * sharpness)[0];
    shares.above[row] = above / total, shares.beside[row] = (beside - own) / total;
}

}  // namespace baton
