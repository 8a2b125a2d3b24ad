// What a step's attention reads: rows of sequences, and their KV in blocks.
#pragma once

#include "product.h"

namespace baton {

constexpr int TILE = 2 * PANEL;  // positions
constexpr int PART = 2 * TILE;   // positions
constexpr int MAX_HEAD_DIM = 1024;

struct Span {
    int32_t first_row, num_rows, first_position;
};

struct Batch {
    const Span *spans;
    const int64_t *tables;           // [num_spans, table_stride] block ids
    const int64_t *write_positions;  // [num_rows] block id * block_size + offset
    int64_t table_stride;
    int32_t num_spans, num_rows;
};

struct Cache {
    void *kv;  // [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    int32_t num_layers, block_size, num_kv_heads, head_dim, num_heads;
    int32_t position_size;  // numbers from a position to the next: more than its heads have where others' lie between

    int group() const { return num_heads / num_kv_heads; }
    int padded() const { return ceil_div(head_dim, PANEL) * PANEL; }
    template <class T> T *at(int layer, int plane, int64_t block, int offset) const {
        const size_t row = ((size_t(block) * num_layers + layer) * 2 + plane) * block_size + offset;
        return static_cast<T *>(kv) + row * position_size;
    }
};

// A piece of work that one thread does.
struct Unit {
    int32_t span, first_row, num_rows;  // first_row within the span
    int32_t head;                       // or part, of the shared ones
    size_t mixed;                       // where its part goes; of the shared ones
};

}  // namespace baton
