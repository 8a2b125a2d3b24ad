// Brings KV nearer before it is read: the blocks of a thread's part of a layer, in the order in which it will read them.
//
// Blocks lie scattered, and hardware prefetchers begin anew at each. A line that is asked for into the first level of the cache
// keeps one of its few places for misses until memory has answered (24 on Zen 4); one that is asked for into the second level
// only until that level has taken the request, and that level has twice as many. Where there is no place a request is dropped. So
// every line is asked for three times: far ahead into the second level, later into the first, and close before it is read.
// While a tile is gone through, as many chunks are asked for as it has: fewer, and requests come too late in the end, more, and
// what they bring is gone again before it is read. Intel's CPUs are asked twice: the request between cost them more than it brought.
// Of each page, one line is asked for some blocks earlier: its address is then translated when the others are wanted.
#pragma once

#include <algorithm>
#include <vector>

#include "paged.h"

namespace baton {

constexpr size_t CHUNK = 512;  // bytes that are brought nearer at a time
constexpr int NUM_FAR = 32;    // chunks between the first request for a line and the last

BATON_INLINE void bring_far(const char *chunk) {
#pragma GCC unroll 8
    for (size_t byte = 0; byte < CHUNK; byte += 64) __builtin_prefetch(chunk + byte, 0, 2);
}

BATON_INLINE void bring_close(const char *chunk) {
#pragma GCC unroll 8
    for (size_t byte = 0; byte < CHUNK; byte += 64) __builtin_prefetch(chunk + byte, 0, 3);
}

// A place in the list of chunks in the order in which they will be read.
using Nearer = const char *const *;

BATON_INLINE void bring(Nearer at) {
    bring_far(*at);
    if constexpr (!IS_INTELS) bring_close(at[-NUM_FAR / 2]);
    bring_close(at[-NUM_FAR]);
}

class KvStream {
  public:
    // Units first .. last, which are parts of spans. Nothing is asked for where chunks would be other heads' in part.
    KvStream(const Cache &cache, const Batch &batch, const Unit *first, const Unit *last, int layer, int window,
             size_t number_bytes)
        : cache_(cache), batch_(batch), window_(window), read_bytes_(cache.num_kv_heads * cache.head_dim * number_bytes),
          position_bytes_(cache.position_size * number_bytes), last_(is_whole() || read_bytes_ % CHUNK == 0 ? last : first),
          block_bytes_(size_t(cache.num_layers) * 2 * cache.block_size * position_bytes_),
          layer_at_(static_cast<const char *>(cache.kv) + size_t(layer) * 2 * cache.block_size * position_bytes_) {
        go_to(first);
    }

    // `count` chunks to be brought nearer: as many `fresh` ones, the last one again where there are no more, or those of before.
    Nearer take(int fresh, int count) {
        if (next_ + fresh > int(chunks_.size()) || next_ < NUM_FAR + count) make_room(fresh, count);
        const char **to = chunks_.data() + next_;
        for (int left = fresh; left > 0;) {
            if (at_ >= end_) begin_next();
            const int there = at_ < end_ ? int((end_ - at_ + CHUNK - 1) / CHUNK) : 0, num = there ? std::min(there, left) : left;
            const size_t step = there ? CHUNK : 0;
            const char *from = there ? at_ : to[-1];
            for (int i = 0; i < num; i++) to[i] = from + i * step;
            at_ += num * step, to += num, left -= num;
        }
        next_ += fresh;
        return chunks_.data() + next_ - count;
    }

    // Chunks of the keys, or of the values, of `count` positions.
    int chunks_of(int position, int count) const {
        int chunks = 0;
        for (const int end = position + count; position < end;) {
            const int num = std::min(cache_.block_size - position % cache_.block_size, end - position);
            chunks += ceil_div(num * int(read_bytes_), int(CHUNK)), position += num;
        }
        return chunks;
    }

    // The thread begins with this unit. What it read without taking chunks need not be brought any more. lead: chunks that are to be
    // under way at least, once it has begun.
    void reach(const Unit *unit, int lead) {
        if (unit_ < unit) go_to(unit);
        if (!is_new_) return;
        for (int i = 0; i < NUM_FAR; i++) bring_far(*take(1, 1));
        for (int i = 0; i < NUM_CLOSE; i++) bring(take(1, 1));
        for (int i = NUM_FAR + NUM_CLOSE; i < lead; i++) bring_far(*take(1, 1));
        is_new_ = false;
    }

  private:
    bool is_whole() const { return read_bytes_ == position_bytes_; }

    static constexpr int NUM_COMING = 8;  // stretches whose pages were asked for
    static constexpr int NUM_CLOSE = 12;  // chunks that were asked for three times, and are not read yet

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

    // Afterwards there are as many old ones as any place taken so far looks back to, few `fresh` ones or not.
    void make_room(int fresh, int count) {
        most_ = std::max(most_, count);
        const int kept = NUM_FAR + most_, there = std::min(next_, kept);
        if (int(chunks_.size()) < 4 * (kept + fresh)) chunks_.resize(4 * (kept + fresh));
        std::memmove(&chunks_[kept - there], &chunks_[next_ - there], there * sizeof chunks_[0]);
        std::fill_n(chunks_.begin(), kept - there, layer_at_);
        next_ = kept;
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
            const Span &span = batch_.spans[unit_->span];
            const int seen_from = window_ ? std::max(0, span.first_position - window_ + 1) : 0;
            position_ = std::max(unit_->head * PART, seen_from / LANES * LANES);
            unit_end_ = std::min((unit_->head + 1) * PART, span.first_position + span.num_rows);
            if (position_ >= unit_end_) continue;
            block_ = batch_.tables + unit_->span * batch_.table_stride + position_ / cache_.block_size;
            offset_ = position_ % cache_.block_size;
            return begin_tile();
        }
    }
    void begin_tile() {
        tile_ = position_, tile_end_ = std::min(position_ / TILE * TILE + TILE, unit_end_);
        block_of_tile_ = block_, offset_of_tile_ = offset_;
    }

    // The positions of one block in one plane, or, where others' heads lie between them, one; of a tile the keys first.
    Stretch next_stretch() {
        if (unit_ >= last_) return {};
        const int count = is_whole() ? std::min(cache_.block_size - offset_, tile_end_ - position_) : 1;
        const char *from = layer_at_ + size_t(*block_) * block_bytes_ + (plane_ * cache_.block_size + offset_) * position_bytes_;
        position_ += count, offset_ += count;
        if (offset_ == cache_.block_size) block_++, offset_ = 0;
        if (position_ == tile_end_) end_plane();
        return {from, from + count * read_bytes_};
    }
    void end_plane() {
        plane_ ^= 1;
        if (plane_) position_ = tile_, block_ = block_of_tile_, offset_ = offset_of_tile_;
        else if (position_ < unit_end_) begin_tile();
        else unit_++, begin_unit();
    }

    const Cache &cache_;
    const Batch &batch_;
    const int window_;
    const size_t read_bytes_, position_bytes_, block_bytes_;  // of a position, from it to the next, from a block to the next
    const Unit *unit_ = nullptr, *const last_;
    const char *const layer_at_;  // its keys in block 0
    const int64_t *block_ = nullptr, *block_of_tile_ = nullptr;
    int position_ = 0, offset_ = 0, plane_ = 0;  // offset_: of the position in its block
    int tile_ = 0, offset_of_tile_ = 0, tile_end_ = 0, unit_end_ = 0, turn_ = 0;
    bool is_new_ = true;
    const char *at_ = nullptr, *end_ = nullptr;
    std::vector<const char *> chunks_ = std::vector<const char *>(NUM_FAR + 1, layer_at_);  // taken, to next_; of old ones the last
    int next_ = NUM_FAR + 1, most_ = 1;  // the longest place so far
    Stretch coming_[NUM_COMING];
};

}  // namespace baton
