// All decoder layers of one step, and what comes before and behind them, in one call: threads go through the phases
// of each layer together (turns.h), nobody goes back to Python.
#pragma once

#include <omp.h>

#include <chrono>

#include "layout.h"
#include "linear.h"
#include "rows.h"
#include "step.h"

namespace baton {

struct Layer {
    const void *attention_norm;  // [hidden_size]
    const void *mlp_norm;        // [hidden_size]
    const void *query_norm;      // [head_dim] or null
    const void *key_norm;        // [head_dim] or null
    Linear qkv, attention_out, gate_up, down;
    int32_t window;  // positions that a row sees, its own included; 0: all
};

struct Stack {
    const Layer *layers;
    int32_t num_layers, hidden_size;
    float norm_eps;
};

struct Rotation {
    const float *cos, *sin;    // [num_positions, head_dim / 2]
    const int64_t *positions;  // [num_rows]; null: a row's angles are those of its own number

    size_t of(int row) const { return positions ? positions[row] : row; }
};

// From token ids to logits.
struct Ends {
    const void *embedding;      // [vocab_size, hidden_size]
    const void *final_norm;     // [hidden_size]
    Linear head;                // hidden_size to vocab_size
    const int64_t *token_ids;   // [num_rows]
    const int64_t *logit_rows;  // [num_logits]
    void *logits;               // [num_logits, vocab_size]
    void *normed;               // [num_logits, hidden_size]: what the head multiplies; or null, where nobody asks
    int32_t num_logits;
};

constexpr int NUM_PHASES = 9;  // norm, qkv, rotate and write, attend, attention out, gate and up, down, head, draw
constexpr int LAYER_PHASES = 7 + ATTENTION_PHASES, END_PHASES = 3;  // that threads go through together, at most
constexpr int MAX_OWN_NORMS = 4;  // rows up to here each thread norms for itself: cheaper than meeting

// Store a step's keys and values of one layer for heads first .. last of all rows' heads, rotating queries in place and keys on
// their way.
template <class T>
void rotate_and_write(const Layer &layer, int index, float eps, const Cache &cache, const Batch &batch, const Rotation &rotation,
                      T *qkv, int64_t first, int64_t last) {
    const int D = cache.head_dim, heads = cache.num_heads + 2 * cache.num_kv_heads;
    for (int64_t i = first; i < last; i++) {
        const int row = int(i / heads), head = int(i % heads);
        T *x = qkv + i * D;
        const float *cos = rotation.cos + rotation.of(row) * (D / 2), *sin = rotation.sin + rotation.of(row) * (D / 2);
        if (head < cache.num_heads) {
            if (layer.query_norm) norm_row(x, static_cast<const T *>(layer.query_norm), D, eps, x);
            rotate_head(x, cos, sin, D, x);
            continue;
        }
        const bool is_key = head < cache.num_heads + cache.num_kv_heads;
        const int kv_head = (head - cache.num_heads) % cache.num_kv_heads;
        const int64_t position = batch.write_positions[row];
        T *to = cache.at<T>(index, is_key ? 0 : 1, position / cache.block_size, int(position % cache.block_size)) + kv_head * D;
        if (!is_key) {
            std::copy(x, x + D, to);
            continue;
        }
        if (layer.key_norm) norm_row(x, static_cast<const T *>(layer.key_norm), D, eps, x);
        rotate_head(x, cos, sin, D, to);
    }
}

// What a thread's first share does to all phases' clocks: nothing unless somebody asks where the time goes.
class Clock {
  public:
    Clock(double *seconds) : seconds_(seconds), last_(seconds ? now() : 0) {}
    void phase(int number) {
        if (!seconds_) return;
        const double at = now();
        seconds_[number] += at - last_;
        last_ = at;
    }

  private:
    static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
    double *seconds_, last_;
};

class Workspace {
  public:
    // Run the layers over hidden [num_rows, hidden_size], in place; or, where there are ends, the whole model. `seconds`
    // [NUM_PHASES]: added to, or null.
    template <class T>
    void run(const Stack &stack, const Cache &cache, const Batch &batch, const Rotation &rotation, T *hidden, const Ends *ends,
             int num_threads, double *seconds) {
        plan.make(batch, cache, num_threads);
        const int rows = batch.num_rows, width = stack.hidden_size, heads_width = cache.num_heads * cache.head_dim;
        const int qkv_width = heads_width + 2 * cache.num_kv_heads * cache.head_dim;
        int gated_width = 0;
        for (int i = 0; i < stack.num_layers; i++) gated_width = std::max(gated_width, stack.layers[i].down.in);
        const bool norms_alone = rows <= MAX_OWN_NORMS;
        const size_t normed_size = size_t(rows) * width + 64;
        const size_t numbers = normed_size * (norms_alone ? num_threads : 1) +
                               size_t(rows) * (qkv_width + heads_width + gated_width + (ends ? width : 0)) + 5 * 64;
        char *memory = activations_.at_least(numbers * sizeof(T));
        T *qkv = take<T>(memory, size_t(rows) * qkv_width), *attended = take<T>(memory, size_t(rows) * heads_width);
        T *gated = take<T>(memory, size_t(rows) * gated_width);
        if (ends) hidden = take<T>(memory, size_t(rows) * width);
        T *all_normed = reinterpret_cast<T *>(memory);
        turns.make(stack.num_layers * LAYER_PHASES + END_PHASES, num_threads);
#pragma omp parallel num_threads(num_threads)
        {
            const int share = omp_get_thread_num();
            Clock clock(share ? nullptr : seconds);
            Worker worker(turns, share);
            T *normed = norms_alone ? all_normed + share * normed_size : all_normed;
            auto in_rows = [&](int count, auto &&each) {
                worker.phase(count, ceil_div(count, num_threads), false, [&](int64_t first, int64_t last, Hold &) {
                    for (int row = int(first); row < last; row++) each(row);
                });
            };
            // `count` rows, all or those of `chosen`, to the front of normed.
            auto norm_rows = [&](const void *weight, int count, const int64_t *chosen) {
                auto norm_of = [&](int row) {
                    norm_row(hidden + size_t(chosen ? chosen[row] : row) * width, static_cast<const T *>(weight), width,
                             stack.norm_eps, normed + size_t(row) * width);
                };
                if (!norms_alone) in_rows(count, norm_of);
                else
                    for (int row = 0; row < count; row++) norm_of(row);
                clock.phase(0);
            };
            auto norm = [&](const void *weight) { norm_rows(weight, rows, nullptr); };
            auto linear_of = [&](const Linear &linear, const T *x, int count, const Output<T> &output, int phase) {
                linear_phase(worker, linear, x, count, output);
                clock.phase(phase);
            };
            auto linear = [&](const Linear &linear, const T *x, T *to, const T *residual, int phase) {
                linear_of(linear, x, rows, Output<T>{to, residual, linear.out}, phase);
            };
            if (ends)
                in_rows(rows, [&](int row) {
                    const T *from = static_cast<const T *>(ends->embedding) + size_t(ends->token_ids[row]) * width;
                    std::copy(from, from + width, hidden + size_t(row) * width);
                });
            for (int i = 0; i < stack.num_layers; i++) {
                const Layer &layer = stack.layers[i];
                norm(layer.attention_norm);
                linear(layer.qkv, normed, qkv, nullptr, 1);
                const int all_heads = rows * (cache.num_heads + 2 * cache.num_kv_heads);
                worker.phase(all_heads, ceil_div(all_heads, num_threads), false, [&](int64_t first, int64_t last, Hold &) {
                    rotate_and_write(layer, i, stack.norm_eps, cache, batch, rotation, qkv, first, last);
                });
                clock.phase(2);
                const Attend<T> attend{qkv, attended, qkv_width, heads_width, i, layer.window};
                attend_phases(worker, attend, cache, batch, plan, share, num_threads);
                clock.phase(3);
                linear(layer.attention_out, attended, hidden, hidden, 4);
                norm(layer.mlp_norm);
                linear(layer.gate_up, normed, gated, nullptr, 5);
                linear(layer.down, gated, hidden, hidden, 6);
            }
            if (ends && ends->num_logits) {
                norm_rows(ends->final_norm, ends->num_logits, ends->logit_rows);
                if (ends->normed && share == 0) std::copy_n(normed, size_t(ends->num_logits) * width, static_cast<T *>(ends->normed));
                const Output<T> logits{static_cast<T *>(ends->logits), nullptr, ends->head.out};
                linear_of(ends->head, normed, ends->num_logits, logits, 7);
            }
        }
    }

    size_t bytes() const { return plan.bytes() + turns.bytes() + layout.bytes() + activations_.size(); }
    Layout layout;
    StepPlan plan;
    Turns turns;

  private:
    Buffer activations_;
};

}  // namespace baton
