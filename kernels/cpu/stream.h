// Brings KV nearer before it is read: the blocks of a thread's part of a layer, in the order in which it will read them.
//
// Blocks lie scattered, and hardware prefetchers begin anew at each. A line that is asked for into the first level of the cache
// keeps one of its few places for misses until memory has answered (24 on Zen 4); one that is asked for into the second level
// only until that level has taken the request, and that level has twice as many. So every line is asked for twice: far ahead into
// the second level, and close before it is read into the first. Of each page, one line is asked for some blocks earlier: its
// address is then translated when the others are wanted.
#pragma once

#include <algorithm>
#include <vector>

#include "paged.h"

namespace baton {

constexpr size_t CHUNK = 512;  // bytes that are brought nearer at a time

// What to bring into the second level, and what lies there already and is to come into the first.
struct Nearer {
    const char *far, *close;
};

BATON_INLINE void bring_far(const char *chunk) {
#pragma GCC unroll 8
    for (size_t byte = 0; byte < CHUNK; byte += 64) __builtin_prefetch(chunk + byte, 0, 2);
}

BATON_INLINE void bring_close(const char *chunk) {
#pragma GCC unroll 8
    for (size_t byte = 0; byte < CHUNK; byte += 64) __builtin_prefetch(chunk + byte, 0, 3);
}

BATON_INLINE void bring(const Nearer &chunks) { bring_far(chunks.far), bring_close(chunks.close); }

class KvStream {
  public:
    // Units first .. last, which are parts of spans.
    KvStream(const Cache &cache, const Batch &batch, const Unit *first, const Unit *last, int layer, int window,
             size_t number_bytes)
        : cache_(cache), batch_(batch), last_(last), layer_(layer), window_(window),
          read_bytes_(cache.num_kv_heads * cache.head_dim * number_bytes), position_bytes_(cache.position_size * number_bytes) {
        go_to(first);
    }

    // Chunks to be brought nearer: `fresh` new ones, the last one again where there are no more; `count` can be read.
    const Nearer *take(int fresh, int count) {
        if (int(taken_.size()) < count) taken_.resize(count, {chunk_, chunk_});
        for (int i = 0; i < fresh; i++) {
            if (at_ >= end_) begin_next();
            if (at_ < end_) chunk_ = at_, at_ += CHUNK;
            const char *&oldest = far_[turn_of_far_];
            taken_[i] = {chunk_, oldest};
            oldest = chunk_;
            turn_of_far_ = (turn_of_far_ + 1) % NUM_FAR;
        }
        return taken_.data();
    }

    // The thread begins with this unit. What it read without taking chunks need not be brought any more.
    void reach(const Unit *unit) {
        if (unit_ < unit) go_to(unit);
        if (!is_new_) return;
        for (int i = 0; i < NUM_FAR; i++) bring_far(take(1, 1)->far);
        for (int i = 0; i < NUM_CLOSE; i++) bring(*take(1, 1));
        is_new_ = false;
    }

  private:
    static constexpr int NUM_COMING = 5;  // stretches whose pages were asked for
    static constexpr int NUM_FAR = 24;    // chunks on their way into the second level, or there
    static constexpr int NUM_CLOSE = 8;   // chunks on their way from there into the first

    struct Stretch {
        const char *begin, *end;
    };

    void go_to(const Unit *unit) {
        unit_ = unit;
        begin_unit();
        at_ = end_ = nullptr;
        is_new_ = true;
        for (Stretch &each : coming_) each = coming();
    }

    void begin_next() {
        Stretch &next = coming_[turn_];
        if (next.begin) at_ = next.begin, end_ = next.end;
        next = coming();
        turn_ = (turn_ + 1) % NUM_COMING;
    }

    Stretch coming() {
        constexpr uintptr_t PAGE = 4096;
        const Stretch stretch = next_stretch();
        for (const char *at = stretch.begin; at < stretch.end; at += PAGE - reinterpret_cast<uintptr_t>(at) % PAGE)
            __builtin_prefetch(at, 0, 2);
        return stretch;
    }

    // Go to the first position that is read of the unit, or of the next one that has any.
    void begin_unit() {
        for (plane_ = 0; unit_ < last_; unit_++) {
            const int seen_from = window_ ? std::max(0, batch_.spans[unit_->span].first_position - window_ + 1) : 0;
            position_ = std::max(unit_->head * PART, seen_from / TILE * TILE);
            if (position_ < unit_end()) return;
        }
    }
    int unit_end() const {
        const Span &span = batch_.spans[unit_->span];
        return std::min((unit_->head + 1) * PART, span.first_position + span.num_rows);
    }

    // The positions of one block in one plane, or, where others' heads lie between them, one; of a tile the keys first.
    Stretch next_stretch() {
        if (unit_ >= last_) return {};
        const int offset = position_ % cache_.block_size, end = unit_end();
        const int tile = position_ / TILE * TILE, tile_end = std::min(tile + TILE, end);
        const int count = read_bytes_ < position_bytes_ ? 1 : std::min(cache_.block_size - offset, tile_end - position_);
        const int64_t block = batch_.tables[unit_->span * batch_.table_stride + position_ / cache_.block_size];
        const char *from = static_cast<const char *>(cache_.kv);
        from += (((size_t(block) * cache_.num_layers + layer_) * 2 + plane_) * cache_.block_size + offset) * position_bytes_;
        position_ += count;
        if (position_ == tile_end) {
            if (plane_ == 0) position_ = tile;
            plane_ ^= 1;
        }
        if (position_ == end && plane_ == 0) unit_++, begin_unit();
        return {from, from + count * read_bytes_};
    }

    const Cache &cache_;
    const Batch &batch_;
    const Unit *unit_ = nullptr, *const last_;
    const int layer_, window_;
    const size_t read_bytes_, position_bytes_;  // of a position, and from it to the next
    int position_ = 0, plane_ = 0, turn_ = 0;
    bool is_new_ = true;
    const char *at_ = nullptr, *end_ = nullptr, *chunk_ = nullptr;
    std::vector<Nearer> taken_;
    const char *far_[NUM_FAR] = {};  // the last ones, from the oldest at turn_of_far_ on
    int turn_of_far_ = 0;
    Stretch coming_[NUM_COMING];
};

}  // namespace baton
