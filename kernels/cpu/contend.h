// Which tokens of a row can win its draw at all, so that the sampler takes two logarithms of a few dozen and not of all.
//
// engine/sampler.py draws argmax(score + noise) with noise = -log(-log(u)), u a hash of (stream, token). That is the least
// -log(u) / exp(score): an exponential race. As -log(u) >= 1 - u, whoever has 1 - u above exp(score) times the least quotient
// so far is out. Most are out by logarithms already: the bits of a number, taken for an integer, are a straight line between its
// powers of two and never above its logarithm, so that one multiplication tells of a token that it cannot be in. The rest pay an
// exp. What is left is a superset, decided in double precision by the sampler.
#pragma once

#include <algorithm>
#include <cmath>

#include "vector.h"

namespace baton {

constexpr float MARGIN = 1.001f;  // thousandfold what fp32 loses of a score between -41 and 0
constexpr float OCTAVE = 0x1p23f;  // from a power of two to the next, in bits taken for an integer

struct Contest {
    float *temperatures;    // [num_rows]; 0: only the greatest is wanted
    uint64_t *streams;      // [num_rows]
    float *greatest;        // [num_rows]; a NaN where the row has one
    int32_t *greatest_ids;  // [num_rows], of equals the lowest
    int32_t *ids;           // [num_rows, limit], ascending
    float *values;          // [num_rows, limit]: their logits
    int32_t *counts;        // [num_rows]; above limit where more contend
    int32_t num_rows, vocab_size, limit;
};

inline uint64_t mixed(uint64_t x) {  // SplitMix64's finaliser
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

// -log(u) of a token.
inline double exponential_of(uint64_t stream, int id) {
    return -std::log((double(mixed(stream + uint64_t(id + 1) * GOLDEN) >> 12) + 0.5) * 0x1p-52);
}

// 2^52 times 1 - u of 8 tokens, and half less; `states`: where the stream is at each.
BATON_INLINE Wide complements(Wide states) {
    Wide x = (states ^ (states >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x = (x ^ (x >> 31)) >> 12;
    return all_wide((uint64_t(1) << 52) - 1) - x;
}

template <class T> void find_greatest(const T *logits, const Contest &contest, int row) {
    const int size = contest.vocab_size;
    const Floats lane = counting();
    Floats most = all(-std::numeric_limits<float>::infinity());
    const Bits first = to_integers(lane);
    Bits broken = {}, where = first;
    for (int id = 0; id < size; id += LANES) {
        const int left = size - id;
        Floats x = load_some(logits + id, left);
        if (left < LANES) x = choose(lane < all(left), x, all(-std::numeric_limits<float>::infinity()));
        broken |= (Bits)(x != x);
        const Bits is_larger = (Bits)(x > most);
        where = (is_larger & (first + uint32_t(id))) | (~is_larger & where);
        most = larger(x, most);
    }
    int best = 0;
    bool is_broken = false;
    for (int i = 0; i < LANES; i++) {
        is_broken |= broken[i] != 0;
        if (most[i] > most[best] || (most[i] == most[best] && where[i] < where[best])) best = i;
    }
    contest.greatest[row] = is_broken ? std::numeric_limits<float>::quiet_NaN() : most[best];
    contest.greatest_ids[row] = int32_t(where[best]);
}

// List those of a row that can win its draw. between(id, left, low, high): the next 16 logits, or what they are at least and at most;
// `left` of them are in the vocabulary. The row's greatest is known.
template <class F> void race(const Contest &contest, int row, F &&between) {
    contest.counts[row] = 0;
    const float greatest = contest.greatest[row];
    if (contest.temperatures[row] <= 0 || !std::isfinite(greatest)) return;
    const float sharpness = std::min(1.0f / contest.temperatures[row], std::numeric_limits<float>::max());
    const uint64_t stream = contest.streams[row];
    float least = float(exponential_of(stream, contest.greatest_ids[row])) * MARGIN;
    // The line of a number that is not above exp(score) * least; scores in octaves, with what is not exact on the side of more.
    auto line_of_least = [&] { return (std::log2(least) + 127.0f) * OCTAVE + 1000.0f; };
    float line = line_of_least();
    const float octaves = std::min(sharpness * 1.44269504f * OCTAVE, std::numeric_limits<float>::max());
    int32_t *ids = contest.ids + size_t(row) * contest.limit;
    Wide states = counting_wide() * GOLDEN + all_wide(stream + GOLDEN);
    const Wide eight_further = all_wide(8 * GOLDEN), further = all_wide(16 * GOLDEN);
    for (int id = 0; id < contest.vocab_size; id += LANES, states = states + further) {
        const int left = contest.vocab_size - id;
        const Floats complement = (floats_of(complements(states), complements(states + eight_further)) + 0.5f) * 0x1p-52f;
        Floats low, high;
        between(id, left, low, high);
        const Floats below = at_most(0, high - greatest);
        const Floats lines = from_integers((Bits)complement);
        if (!any_at_most(lines, multiply_add(below, all(octaves), all(line)))) continue;
        const Bits in = (Bits)(complement <= exponential(below * sharpness) * least);
        const Floats weight = exponential((low - greatest) * sharpness);
        for (int i = 0; i < std::min(LANES, left); i++) {
            if (!in[i]) continue;
            if (contest.counts[row] < contest.limit) ids[contest.counts[row]] = id + i;
            contest.counts[row]++;
            if (weight[i] > 0) least = std::min(least, float(exponential_of(stream, id + i)) / weight[i] * MARGIN);
        }
        line = line_of_least();
    }
}

// Of a row of logits [vocab_size].
template <class T> void contend(const T *logits, const Contest &contest, int row) {
    find_greatest(logits, contest, row);
    race(contest, row, [&](int id, int left, Floats &low, Floats &high) { low = high = load_some(logits + id, left); });
    const size_t first = size_t(row) * contest.limit;
    for (int i = 0; i < std::min(contest.counts[row], contest.limit); i++)
        contest.values[first + i] = load_some(logits + contest.ids[first + i], 1)[0];
}

constexpr int64_t UNDECIDED = -1;

// Who wins a row's draw, as engine/sampler.py has it. UNDECIDED: too many contend, or another library's logarithms, which may differ
// in their last places, might have somebody else within `margin` win.
inline int64_t winner(const Contest &contest, int row, double temperature, double margin) {
    if (!std::isfinite(contest.greatest[row]) || contest.counts[row] > contest.limit) return UNDECIDED;
    if (temperature <= 0) return contest.greatest_ids[row];
    const size_t first = size_t(row) * contest.limit;
    double best = -std::numeric_limits<double>::infinity(), second = best;
    int64_t best_id = UNDECIDED;
    for (size_t i = first; i < first + contest.counts[row]; i++) {
        const double score = double(contest.values[i] - contest.greatest[row]) / temperature;
        const double noisy = score - std::log(exponential_of(contest.streams[row], contest.ids[i]));
        if (noisy > best) second = best, best = noisy, best_id = contest.ids[i];
        else second = std::max(second, noisy);
    }
    return best - second > margin ? best_id : UNDECIDED;
}

}  // namespace baton
