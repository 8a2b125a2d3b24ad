// One step's attention as units of work, and the threads that take them.
//
// Spans of a few rows (decode) are cut into parts of all heads, in memory order: threads take stretches of them, and what
// the parts gave is merged when all are done. Longer spans are cut into rows and heads, which need no merging. Who computes
// what changes no bit.
#pragma once

#include "attention.h"
#include "turns.h"

namespace baton {

constexpr int MAX_SHARED_ROWS = 4;      // of a span that is cut into parts
constexpr int CHUNK_QUERIES = 96;       // rows times group of a unit of a longer span
constexpr int MOST_QUERIES = HAS_TILES<Bf16> ? 384 : CHUNK_QUERIES;  // where laying a tile out takes longer than multiplying it
constexpr int UNITS_A_THREAD = 4;       // at least, before a unit has more than CHUNK_QUERIES
constexpr int MIN_CHUNK_ROWS = 4;
constexpr int STRETCHES = 4;            // of parts, for each thread: the longer, the less is read twice or too late
constexpr int ATTENTION_PHASES = 3;

class StepPlan {
  public:
    // Raises std::bad_alloc.
    void make(const Batch &batch, const Cache &cache, int num_threads) {
        shared.clear(), drawn.clear();
        size_t mixed = 0;
        num_queries = std::max(MAX_SHARED_ROWS * cache.group(), cache.num_heads);
        const int least_rows = std::max(MIN_CHUNK_ROWS, CHUNK_QUERIES / cache.group()), most_rows = std::max(least_rows, MOST_QUERIES / cache.group());
        for (int i = 0; i < batch.num_spans; i++) {
            const Span &span = batch.spans[i];
            if (span.num_rows <= MAX_SHARED_ROWS) {
                for (int part = 0; part < num_parts(span); part++) {
                    shared.push_back({i, 0, span.num_rows, part, mixed});
                    mixed += mixed_size(span, cache) * cache.num_kv_heads;
                }
                continue;
            }
            const int chunk_rows = std::clamp(span.num_rows * cache.num_kv_heads / (num_threads * UNITS_A_THREAD), least_rows, most_rows);
            num_queries = std::max(num_queries, chunk_rows * cache.group());
            for (int end = span.num_rows; end > 0; end -= chunk_rows) {  // the longest first
                const int begin = std::max(0, end - chunk_rows);
                for (int head = 0; head < cache.num_kv_heads; head++) drawn.push_back({i, begin, end - begin, head, 0});
            }
        }
        mixed_memory = reinterpret_cast<float *>(mixed_buffer_.at_least(mixed * sizeof(float) + 64));
        scratch_bytes = (Scratch<float>::bytes(cache, num_queries) + 4095) / 4096 * 4096;
        scratch_memory = scratch_buffer_.at_least(scratch_bytes * num_threads);
    }

    static int num_parts(const Span &span) { return ceil_div(span.first_position + span.num_rows, PART); }
    static size_t mixed_size(const Span &span, const Cache &cache) {
        return size_t(span.num_rows) * cache.group() * (cache.padded() + 2);
    }
    size_t bytes() const {
        return mixed_buffer_.size() + scratch_buffer_.size() + (shared.capacity() + drawn.capacity()) * sizeof(Unit);
    }

    std::vector<Unit> shared, drawn;
    int num_queries = 0;
    float *mixed_memory = nullptr;
    char *scratch_memory = nullptr;
    size_t scratch_bytes = 0;

  private:
    Buffer mixed_buffer_, scratch_buffer_;
};

template <class T> Rows<T> rows_of(const Attend<T> &attend, const Cache &cache, const Batch &batch, const Unit &unit, int head) {
    const Span &span = batch.spans[unit.span];
    return {attend, cache, batch.tables + unit.span * batch.table_stride, span.first_row + unit.first_row,
            span.first_position + unit.first_row, unit.num_rows, head};
}

// A stretch of the units of spans that are cut into parts, by one thread with scratch memory of its own.
template <class T>
void attend_shared(const Attend<T> &attend, const Cache &cache, const Batch &batch, StepPlan &plan, int thread, int64_t first,
                   int64_t last) {
    Scratch<T> scratch(plan.scratch_memory + plan.scratch_bytes * thread, cache, plan.num_queries);
    KvStream stream(cache, batch, plan.shared.data() + first, plan.shared.data() + last, attend.layer, attend.window, sizeof(T));
    for (int64_t i = first; i < last; i++) {
        const Unit &unit = plan.shared[i];
        const Span &span = batch.spans[unit.span];
        const Rows<T> rows = rows_of(attend, cache, batch, unit, 0);
        stream.reach(&unit, rows.is_direct() ? 0 : 2 * stream.chunks_of(0, is_on_tiles<T>(cache.head_dim) ? PART : TILE));
        attend_part(rows, cache.num_kv_heads, unit.head, scratch, plan.mixed_memory + unit.mixed,
                    StepPlan::mixed_size(span, cache), &stream);
    }
}

// A unit of a longer span.
template <class T>
void attend_drawn(const Attend<T> &attend, const Cache &cache, const Batch &batch, StepPlan &plan, int thread, const Unit &unit) {
    Scratch<T> scratch(plan.scratch_memory + plan.scratch_bytes * thread, cache, plan.num_queries);
    const int padded = cache.padded();
    const Rows<T> rows = rows_of(attend, cache, batch, unit, unit.head);
    const Mixed part(scratch.part, rows.num_queries(), padded), row(scratch.row, rows.num_queries(), padded);
    Mixed(row).clear(rows.num_queries(), padded);
    if constexpr (HAS_TILES<T>)
        if (is_on_tiles<T>(cache.head_dim)) return attend_row_on_tiles(rows, scratch, part, row);
    for (int number = rows.low(0) / PART; number * PART <= rows.last_position(); number++) {
        attend_part(rows, 1, number, scratch, scratch.part, 0, static_cast<KvStream *>(nullptr));
        merge(row, part, rows.num_queries(), padded);
    }
    finish(rows, row);
}

// Merge the parts of the span whose first this unit is.
template <class T>
void attend_merge(const Attend<T> &attend, const Cache &cache, const Batch &batch, const StepPlan &plan, const Unit &unit) {
    if (unit.head != 0) return;
    const int padded = cache.padded();
    const Span &span = batch.spans[unit.span];
    const size_t size = StepPlan::mixed_size(span, cache);
    for (int head = 0; head < cache.num_kv_heads; head++) {
        const Rows<T> rows = rows_of(attend, cache, batch, unit, head);
        const Mixed row(plan.mixed_memory + unit.mixed + head * size, rows.num_queries(), padded);
        for (int part = 1; part < StepPlan::num_parts(span); part++) {
            const size_t at = unit.mixed + (size_t(part) * cache.num_kv_heads + head) * size;
            merge(row, Mixed(plan.mixed_memory + at, rows.num_queries(), padded), rows.num_queries(), padded);
        }
        finish(rows, row);
    }
}

// A thread's part in all of it, in three phases at most.
template <class T>
void attend_phases(Worker &worker, const Attend<T> &attend, const Cache &cache, const Batch &batch, StepPlan &plan, int thread,
                   int num_threads) {
    const int64_t num_shared = plan.shared.size(), stretch = ceil_div(int(num_shared), num_threads * STRETCHES);
    worker.phase(num_shared, stretch, false, [&](int64_t first, int64_t last, Hold &) {
        attend_shared(attend, cache, batch, plan, thread, first, last);
    });
    worker.phase(plan.drawn.size(), 1, false, [&](int64_t first, int64_t, Hold &) {
        attend_drawn(attend, cache, batch, plan, thread, plan.drawn[first]);
    });
    worker.phase(num_shared, ceil_div(int(num_shared), num_threads), false, [&](int64_t first, int64_t last, Hold &) {
        for (int64_t i = first; i < last; i++) attend_merge(attend, cache, batch, plan, plan.shared[i]);
    });
}

}  // namespace baton
