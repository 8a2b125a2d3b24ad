// Who does which piece of a step. Threads begin at their own share of a phase, in memory order, then take what is left of the
// others', from the back; who computes a piece changes no bit of it.
//
// A phase ends when its pieces are done, not when its threads have come: one that has lost its core is missed by nobody, finds
// nothing left of the phases that passed without it, and catches up. What it was at when it lost the core is done again by one
// that waits, where the piece allows: its results are put into place only by whoever still holds the piece then. So a core
// that other processes take for a while costs a step what that core would have computed and little more, and of a step
// that memory bounds nearly nothing. Pieces that write as they go are held from the start; for these there is nothing but to wait.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>

#include "vector.h"

namespace baton {

// What is known of all phases and threads of a step. Numbers of earlier steps are as good as zero: nobody clears them.
class Turns {
  public:
    // For a step of so many phases at most. No thread is at work. Raises std::bad_alloc.
    void make(int num_phases, int num_threads) {
        const size_t count = (size_t(num_phases) + 1) * (num_threads + 1);
        if (count > capacity_) lines_.reset(new Line[count]), capacity_ = count, step_ = LAST_STEP;
        if (num_threads != shares || step_ == LAST_STEP) {
            for (size_t i = 0; i < capacity_; i++) lines_[i].word.store(0), lines_[i].sleepers.store(0);
            shares = num_threads, step_ = 0;
        }
        step_++;
    }
    size_t bytes() const { return capacity_ * sizeof(Line); }

    // A thread's piece; 0: none.
    std::atomic<uint64_t> &held(int share) { return lines_[share].word; }
    // Items of a phase, counted from 1, that are done.
    std::atomic<uint64_t> &done(int phase) { return lines_[size_t(phase) * (shares + 1)].word; }
    // How many pieces of a share were taken: from its front, and ONE_OF_BACK times from its back.
    std::atomic<uint64_t> &taken(int phase, int share) { return lines_[size_t(phase) * (shares + 1) + 1 + share].word; }
    // Beside `done`: those who have let go of their cores until the phase is over.
    std::atomic<uint32_t> &sleepers(int phase) { return lines_[size_t(phase) * (shares + 1)].sleepers; }

    // A word of `done` or `taken` as of this step, and the number in it.
    uint64_t fresh(uint64_t word) const { return word >> COUNT_BITS == step_ ? word : step_ << COUNT_BITS; }
    uint64_t number(uint64_t word) const { return fresh(word) & ((uint64_t(1) << COUNT_BITS) - 1); }

    static constexpr uint64_t ONE_OF_BACK = 1 << 22;
    int shares = 0;

  private:
    static constexpr int COUNT_BITS = 44;
    static constexpr uint64_t LAST_STEP = (1 << 20) - 1;
    struct alignas(64) Line {
        std::atomic<uint64_t> word;
        std::atomic<uint32_t> sleepers;
    };
    std::unique_ptr<Line[]> lines_;
    size_t capacity_ = 0;
    uint64_t step_ = LAST_STEP;
};

// A thread's hold on a piece that others may take over until it is kept.
struct Hold {
    std::atomic<uint64_t> *held;  // null: nobody can
    uint64_t word;
    bool is_lost;

    // Before results are put into place; false: they must not be. Once true it stays so.
    bool keep() {
        if (held) is_lost = !held->compare_exchange_strong(word, 0), held = nullptr;
        return !is_lost;
    }
};

// Pieces that were done again, of all steps of this process.
inline std::atomic<uint64_t> num_taken_over{0};

// One thread's way through a step. All threads name the same phases in the same order.
class Worker {
  public:
    Worker(Turns &turns, int share) : turns_(turns), share_(share), shares_(turns.shares) {}

    // A phase of `items` items in pieces of `width` at most: piece(first, last, hold) until all are done. `is_open`: a piece
    // puts nothing into place before it has kept its hold, so that others may take it over.
    template <class F> void phase(int64_t items, int64_t width, bool is_open, F &&piece) {
        if (items == 0) return;
        phase_++;
        const Shape shape = {items, width, is_open};
        for (int64_t number; (number = taken_of(shape, share_, false)) >= 0;) perform(shape, share_, number, piece);
        for (int i = 1; i < shares_; i++) {
            const int other = (share_ + i) % shares_;
            for (int64_t number; (number = taken_of(shape, other, true)) >= 0;) perform(shape, other, number, piece);
        }
        const auto &done = turns_.done(phase_);
        for (const uint64_t since = __rdtsc(); int64_t(turns_.number(done.load())) < items;) {
            _mm_pause();
            const uint64_t waited = __rdtsc() - since;
            if (is_open && waited > 2 * piece_cycles_ + LEAST_PATIENCE && take_over(shape, piece)) continue;
            if (waited > LONG) sleep(shape);
        }
    }

  private:
    static constexpr uint64_t LEAST_PATIENCE = 3000, LONG = 100000;  // cycles: 1 and 40 microseconds
    static constexpr int NUMBER_BITS = 28, SHARE_BITS = 12;           // of what a thread holds

    struct Shape {
        int64_t items, width;
        bool is_open;
    };

    // A piece of a share that nobody has taken; -1: there is none.
    int64_t taken_of(const Shape &shape, int share, bool from_back) {
        const int64_t items = begin_of(shape, share + 1) - begin_of(shape, share);
        const int64_t pieces = (items + shape.width - 1) / shape.width;
        auto &taken = turns_.taken(phase_, share);
        uint64_t before = taken.load();
        for (;;) {
            const uint64_t now = turns_.fresh(before), number = turns_.number(now);
            const int64_t front = number % Turns::ONE_OF_BACK, back = number / Turns::ONE_OF_BACK;
            if (front + back >= pieces) return -1;
            if (taken.compare_exchange_weak(before, now + (from_back ? Turns::ONE_OF_BACK : 1)))
                return from_back ? pieces - 1 - back : front;
        }
    }
    int64_t begin_of(const Shape &shape, int share) const { return shape.items * share / shares_; }

    template <class F> void perform(const Shape &shape, int share, int64_t number, F &piece) {
        const int64_t first = begin_of(shape, share) + number * shape.width;
        const int64_t last = std::min(first + shape.width, begin_of(shape, share + 1));
        const uint64_t word = ((uint64_t(phase_) << SHARE_BITS) + share) << NUMBER_BITS | number;
        Hold hold = {shape.is_open ? &turns_.held(share_) : nullptr, word, false};
        if (hold.held) hold.held->store(word);
        const uint64_t since = __rdtsc();
        piece(first, last, hold);
        piece_cycles_ = __rdtsc() - since;
        if (!hold.keep()) return;
        auto &done = turns_.done(phase_);
        uint64_t before = done.load(), now;
        do now = turns_.fresh(before) + uint64_t(last - first);
        while (!done.compare_exchange_weak(before, now));
        if (int64_t(turns_.number(now)) == shape.items && turns_.sleepers(phase_).load()) futex(FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr);
    }

    // Do a piece of this phase that another thread holds; false: there is none.
    template <class F> bool take_over(const Shape &shape, F &piece) {
        for (int i = 1; i < shares_; i++) {
            auto &held = turns_.held((share_ + i) % shares_);
            uint64_t word = held.load();
            if (word >> (SHARE_BITS + NUMBER_BITS) != uint64_t(phase_) || !held.compare_exchange_strong(word, 0)) continue;
            num_taken_over.fetch_add(1, std::memory_order_relaxed);
            const int share = word >> NUMBER_BITS & ((1 << SHARE_BITS) - 1);
            perform(shape, share, word & ((uint64_t(1) << NUMBER_BITS) - 1), piece);
            return true;
        }
        return false;
    }

    // Let another process, or the thread that is waited for, have the core.
    void sleep(const Shape &shape) {
        static constexpr timespec A_WHILE = {0, 1000000};
        turns_.sleepers(phase_).fetch_add(1);
        uint64_t done = turns_.done(phase_).load();
        if (turns_.fresh(done) == done) {  // else look again: half a word does not tell this step's number from another's
            if (int64_t(turns_.number(done)) < shape.items) futex(FUTEX_WAIT_PRIVATE, uint32_t(done), &A_WHILE);
        } else turns_.done(phase_).compare_exchange_strong(done, turns_.fresh(done));
        turns_.sleepers(phase_).fetch_sub(1);
    }
    void futex(int operation, uint32_t number, const timespec *at_most) {
        syscall(SYS_futex, &turns_.done(phase_), operation, number, at_most, nullptr, 0);  // its lower half, on such CPUs
    }

    Turns &turns_;
    const int share_, shares_;
    int phase_ = 0;
    uint64_t piece_cycles_ = 0;  // of the last one
};

}  // namespace baton
