// A step whose rows are each their sequence's only one, laid out from what a runner keeps for its slots.
#pragma once

#include <algorithm>
#include <vector>

#include "paged.h"

namespace baton {

// What a runner keeps of each slot's sequence.
struct Slots {
    const int64_t *block_ids;    // [num_slots, max_blocks]
    const int64_t *num_blocks;   // [num_slots]: so many of each row are meant
    int64_t *token_ids;          // [num_slots]: what the next row feeds
    int64_t *next_indices;       // [num_slots]: of the token drawn next, in its completion
    const uint64_t *seeds;       // [num_slots]
    const double *temperatures;  // [num_slots]; 0: greedy
    int64_t max_blocks;
};

struct DecodeRows {
    const int64_t *slots, *positions;  // [num_rows]
    int32_t num_rows;
};

// Memory of one step's layout; grows to the largest step's need.
class Layout {
  public:
    // False where a position is past its sequence's blocks.
    bool make(const Slots &slots, const DecodeRows &rows, int block_size) {
        const size_t count = rows.num_rows;
        int64_t last = 0;
        for (size_t row = 0; row < count; row++) last = std::max(last, rows.positions[row]);
        const size_t width = last / block_size + 1;
        token_ids.resize(count), logit_rows.resize(count), writes.resize(count), spans.resize(count), tables.resize(count * width);
        for (size_t row = 0; row < count; row++) {
            const int64_t slot = rows.slots[row], position = rows.positions[row], block = position / block_size;
            const int64_t *own = slots.block_ids + slot * slots.max_blocks, num_own = slots.num_blocks[slot];
            if (block >= num_own) return false;
            std::copy_n(own, std::min<int64_t>(width, num_own), tables.data() + row * width);
            token_ids[row] = slots.token_ids[slot];
            logit_rows[row] = row;
            writes[row] = own[block] * block_size + position % block_size;
            spans[row] = {int32_t(row), 1, int32_t(position)};
        }
        batch = {spans.data(), tables.data(), writes.data(), int64_t(width), int32_t(count), int32_t(count)};
        return true;
    }

    size_t bytes() const {
        return (token_ids.capacity() + logit_rows.capacity() + writes.capacity() + tables.capacity()) * sizeof(int64_t) +
               spans.capacity() * sizeof(Span);
    }

    std::vector<int64_t> token_ids, logit_rows;  // as in Ends
    Batch batch;

  private:
    std::vector<int64_t> writes, tables;
    std::vector<Span> spans;
};

}  // namespace baton
