// The draws of a step whose rows their logits, a temperature and a seed decide, without a word of Python's.
#pragma once

#include "layout.h"
#include "screen.h"

namespace baton {

struct Draws {
    const Screen *screen;  // null: the step's logits are those in full
    Contest *contest;      // has room for all rows
    int64_t *drawn;        // [num_rows] token ids
    double margin;         // see winner()
};

constexpr double COLDEST = 1e-30;  // closer to 0 than this nothing but the greatest has a chance, and fp32 has no number

// The row's token, or UNDECIDED. What the contest says of the row is true either way.
template <class T> int64_t draw_row(const Draws &draws, const Slots &slots, const DecodeRows &rows, const T *logits, int row) {
    Contest &contest = *draws.contest;
    const int64_t slot = rows.slots[row];
    const double temperature = slots.temperatures[slot];
    contest.temperatures[row] = temperature > 0 ? float(std::max(temperature, COLDEST)) : 0;
    contest.streams[row] = mixed(mixed(slots.seeds[slot]) + uint64_t(slots.next_indices[slot]));
    const T *own = logits + size_t(row) * contest.vocab_size;
    if (!draws.screen) contend(own, contest, row);
    else if (!screen_row(own, *draws.screen, contest, row)) return UNDECIDED;
    return winner(contest, row, temperature, draws.margin);
}

// Whether every row has been drawn; only then the slots are told.
template <class T> bool draw(const Draws &draws, const Slots &slots, const DecodeRows &rows, const T *logits, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && rows.num_rows > 1)
    for (int row = 0; row < rows.num_rows; row++) draws.drawn[row] = draw_row(draws, slots, rows, logits, row);
    for (int row = 0; row < rows.num_rows; row++)
        if (draws.drawn[row] == UNDECIDED) return false;
    for (int row = 0; row < rows.num_rows; row++) {
        slots.token_ids[rows.slots[row]] = draws.drawn[row];
        slots.next_indices[rows.slots[row]]++;
    }
    return true;
}

}  // namespace baton
