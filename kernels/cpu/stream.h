// Brings KV nearer before it is read: the blocks of a thread's part of a step, in the order in which it will read them.
//
// Blocks lie scattered, so that hardware prefetchers stop at each. What computes calls bring() every few hundred cycles: a CPU
// has a few dozen lines under way at most, and asking for many at once would only wait.
#pragma once

#include <algorithm>
#include <vector>

#include "scores.h"

namespace baton {

constexpr int PART = 2 * TILE;     // positions

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

    int group() const { return num_heads / num_kv_heads; }
    int padded() const { return ceil_div(head_dim, PANEL) * PANEL; }
    template <class T> T *at(int layer, int plane, int64_t block, int offset) const {
        const size_t row = ((size_t(block) * num_layers + layer) * 2 + plane) * block_size + offset;
        return static_cast<T *>(kv) + row * num_kv_heads * head_dim;
    }
};


struct Unit {
    int32_t span, first_row, num_rows;  // first_row within the span
    int32_t head;                       // or part, of the shared ones
    size_t mixed;                       // where its part goes; of the shared ones
};

class KvStream {
  public:
    // Units first .. last, which are parts of spans, layer by layer from `layer` to before `end_layer`.
    KvStream(const Cache &cache, const Batch &batch, const Unit *first, const Unit *last, int layer, int end_layer, size_t number_bytes)
        : cache_(cache), batch_(batch), first_(first), last_(last), unit_(first), layer_(layer), end_layer_(end_layer),
          position_bytes_(cache.num_kv_heads * cache.head_dim * number_bytes), position_(first == last ? 0 : first->head * PART) {
        for (int i = 0; i < NUM_COMING; i++) begin_next();
    }

    // The next `fresh` chunks to be brought nearer, the last one again where there are no more; and room for `count` to be read.
    const char *const *take(int fresh, int count) {
        if (int(taken_.size()) < count) taken_.resize(count, at_);
        for (int i = 0; i < fresh; i++) {
            if (at_ >= end_) begin_next();
            taken_[i] = at_;
            at_ += CHUNK;
        }
        return taken_.data();
    }
    void bring_next(size_t bytes) {
        for (; bytes >= CHUNK; bytes -= CHUNK) bring(*take(1, 1));
    }

  private:
    static constexpr int NUM_COMING = 6;

    struct Stretch {
        const char *begin, *end;
    };

    void begin_next() {
        if (coming_[turn_].begin) at_ = coming_[turn_].begin, end_ = coming_[turn_].end;
        coming_[turn_] = next_stretch();
        for (const char *at = coming_[turn_].begin; at < coming_[turn_].end; at = page_after(at)) {
            __builtin_prefetch(at, 0, 3);
            __builtin_prefetch(at + 64, 0, 3);
        }
        turn_ = (turn_ + 1) % NUM_COMING;
    }
    static const char *page_after(const char *at) { return reinterpret_cast<const char *>((reinterpret_cast<uintptr_t>(at) / 4096 + 1) * 4096); }

    // The positions of one block in one plane.
    Stretch next_stretch() {
        if (unit_ == last_) {
            if (first_ == last_ || layer_ + 1 >= end_layer_) return {};
            layer_++;
            unit_ = first_;
            position_ = unit_->head * PART;
        }
        const Span &span = batch_.spans[unit_->span];
        const int64_t block = batch_.tables[unit_->span * batch_.table_stride + position_ / cache_.block_size];
        const int offset = position_ % cache_.block_size;
        const int end = std::min((unit_->head + 1) * PART, span.first_position + span.num_rows);
        const int tile = position_ / TILE * TILE, tile_end = std::min(tile + TILE, end);
        const int count = std::min(cache_.block_size - offset, tile_end - position_);
        const char *from = static_cast<const char *>(cache_.kv);
        from += (((size_t(block) * cache_.num_layers + layer_) * 2 + plane_) * cache_.block_size + offset) * position_bytes_;
        const Stretch stretch = {from, from + count * position_bytes_};
        position_ += count;
        if (position_ == tile_end) {
            if (plane_ == 0) position_ = tile;
            plane_ ^= 1;
        }
        if (position_ == end && plane_ == 0) {
            unit_++;
            if (unit_ != last_) position_ = unit_->head * PART;
        }
        return stretch;
    }

    const Cache &cache_;
    const Batch &batch_;
    const Unit *const first_, *const last_, *unit_;
    int layer_, end_layer_;
    const size_t position_bytes_;
    int position_, plane_ = 0;
    const char *at_ = nullptr, *end_ = nullptr;
    std::vector<const char *> taken_;
    Stretch coming_[NUM_COMING] = {};
    int turn_ = 0;
};

}  // namespace baton
