// What Python calls (kernels/cpu_library.py), by plain C rules: pointers and integers, nothing is kept but a workspace.
#include "copy.h"
#include "draw.h"
#include "layers.h"
#include "share.h"

using namespace baton;

namespace {

// dtype everywhere: 0 fp32, 1 bf16, 2 fp16.

// Threads, each with its way through so many phases; one alone stays on the caller's.
template <class F> void in_threads(int num_phases, int num_threads, F &&f) {
    static thread_local Turns turns;
    Turns &own = turns;
    own.make(num_phases, num_threads);
    auto work = [&](int share) {
        Worker worker(own, share);
        f(worker, share);
    };
    if (num_threads == 1) return work(0);
#pragma omp parallel num_threads(num_threads)
    work(omp_get_thread_num());
}

template <class F> void in_dtype(int dtype, F &&f) {
    if (dtype == 0) f(float{});
    else if (dtype == 1) f(Bf16{});
    else f(Fp16{});
}

}  // namespace

extern "C" {

// Grows whenever a signature or structure here changes: a stale library is not loaded.
int baton_interface() { return 10; }

// Whether this process may run what was compiled, which the CPU can.
int baton_is_allowed() {
#if defined(__AMX_BF16__)
    return may_use_tiles();
#else
    return true;
#endif
}

// Pieces of work that a thread has done because the one that had begun them had lost its core.
uint64_t baton_num_taken_over() { return num_taken_over.load(); }

Workspace *baton_workspace_new() { return new Workspace; }

void baton_workspace_delete(Workspace *workspace) { delete workspace; }

size_t baton_workspace_bytes(const Workspace *workspace) { return workspace->bytes(); }

// Numbers of the packed form.
size_t baton_packed_size(const Linear *linear, int dtype) {
    size_t panel = 0;
    in_dtype(dtype, [&](auto t) { panel = panel_size<decltype(t)>(linear->in); });
    return panel * num_panels(*linear);
}

void baton_pack(const Linear *linear, const void *weight, void *packed, int dtype) {
    in_dtype(dtype, [&](auto t) { pack_linear<decltype(t)>(*linear, weight, packed); });
}

void baton_linear(const Linear *linear, const void *x, int num_rows, void *to, int num_threads, int dtype) {
    in_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        in_threads(1, num_threads, [&](Worker &worker, int) {
            const Output<T> output{static_cast<T *>(to), nullptr, linear->out};
            linear_phase(worker, *linear, static_cast<const T *>(x), num_rows, output);
        });
    });
}

void baton_rms_norm(const void *x, const void *weight, int num_rows, int width, float eps, void *to, int dtype) {
    in_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        for (int row = 0; row < num_rows; row++)
            norm_row(static_cast<const T *>(x) + size_t(row) * width, static_cast<const T *>(weight), width, eps,
                     static_cast<T *>(to) + size_t(row) * width);
    });
}

// x: [num_rows, heads, head_dim], a row `stride` numbers behind the one before; to: the same without gaps.
void baton_rotate(const void *x, const Rotation *rotation, const int32_t *shape, int64_t stride, void *to, int dtype) {
    const int num_rows = shape[0], heads = shape[1], D = shape[2];
    in_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        for (int64_t i = 0; i < int64_t(num_rows) * heads; i++) {
            const size_t angle = size_t(i / heads) * (D / 2);
            rotate_head(static_cast<const T *>(x) + (i / heads) * stride + (i % heads) * D, rotation->cos + angle,
                        rotation->sin + angle, D, static_cast<T *>(to) + i * D);
        }
    });
}

// gate_up: [num_rows, 2 * width], gate first.
void baton_gate(const void *gate_up, int num_rows, int width, void *to, int dtype) {
    in_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        for (int row = 0; row < num_rows; row++)
            for (int i = 0; i < width; i += LANES) {
                const T *gate = static_cast<const T *>(gate_up) + size_t(row) * 2 * width + i;
                const Floats value = gated<T>(load_some(gate, width - i), load_some(gate + width, width - i));
                store_some(static_cast<T *>(to) + size_t(row) * width + i, value, width - i);
            }
    });
}

// Attention by itself; queries and result [num_rows, num_heads, head_dim].
void baton_attend(Workspace *workspace, const Cache *cache, const Batch *batch, const void *queries, void *to, int layer,
                  int window, int num_threads, int dtype) {
    workspace->plan.make(*batch, *cache, num_threads);
    in_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        const int width = cache->num_heads * cache->head_dim;
        const Attend<T> attend{static_cast<const T *>(queries), static_cast<T *>(to), width, width, layer, window};
        in_threads(ATTENTION_PHASES, num_threads, [&](Worker &worker, int thread) {
            attend_phases(worker, attend, *cache, *batch, workspace->plan, thread, num_threads);
        });
    });
}

void baton_layers(Workspace *workspace, const Stack *stack, const Cache *cache, const Batch *batch, const Rotation *rotation,
                  void *hidden, int num_threads, double *seconds, int dtype) {
    in_dtype(dtype, [&](auto t) {
        workspace->run(*stack, *cache, *batch, *rotation, static_cast<decltype(t) *>(hidden), nullptr, num_threads, seconds);
    });
}

// The whole model. False, and nothing done, if a token id is not in the vocabulary.
int baton_forward(Workspace *workspace, const Stack *stack, const Cache *cache, const Batch *batch, const Rotation *rotation,
                  const Ends *ends, int num_threads, double *seconds, int dtype) {
    for (int row = 0; row < batch->num_rows; row++)
        if (ends->token_ids[row] < 0 || ends->token_ids[row] >= ends->head.out) return 0;
    in_dtype(dtype, [&](auto t) {
        workspace->run<decltype(t)>(*stack, *cache, *batch, *rotation, nullptr, ends, num_threads, seconds);
    });
    return 1;
}

// logits: [num_rows, vocab_size].
void baton_contend(const Contest *contest, const void *logits, int num_threads, int dtype) {
    in_dtype(dtype, [&](auto t) {
        using T = decltype(t);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && contest->num_rows > 1)
        for (int row = 0; row < contest->num_rows; row++)
            contend(static_cast<const T *>(logits) + size_t(row) * contest->vocab_size, *contest, row);
    });
}

// logits: [num_rows, vocab_size].
void baton_share(const Shares *shares, const void *logits, int num_threads, int dtype) {
    in_dtype(dtype, [&](auto t) {
        using T = decltype(t);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && shares->num_rows > 1)
        for (int row = 0; row < shares->num_rows; row++)
            if (shares->temperatures[row] > 0)
                share(static_cast<const T *>(logits) + size_t(row) * shares->vocab_size, *shares, row);
    });
}

// A step of decode rows that their logits, temperatures and seeds decide: laid out, computed, drawn, and noted in the slots. Returns 1;
// 0 where logits are all that there is, and the draws are the caller's; -1 or -2, and nothing done, where a row feeds a token id that is
// not in the vocabulary, or is past its sequence's blocks.
int baton_decode(Workspace *workspace, const Stack *stack, const Cache *cache, const Rotation *rotation, const Ends *ends,
                 const Slots *slots, const DecodeRows *rows, const Draws *draws, int num_threads, double *seconds, int dtype) {
    Layout &layout = workspace->layout;
    if (!layout.make(*slots, *rows, cache->block_size)) return -2;
    Rotation rotated = *rotation;
    rotated.positions = rows->positions;
    Ends from_slots = *ends;
    from_slots.token_ids = layout.token_ids.data(), from_slots.logit_rows = layout.logit_rows.data();
    from_slots.num_logits = rows->num_rows;
    if (!baton_forward(workspace, stack, cache, &layout.batch, &rotated, &from_slots, num_threads, seconds, dtype)) return -1;
    Clock clock(seconds);
    bool is_drawn = false;
    draws->contest->num_rows = rows->num_rows, draws->contest->vocab_size = ends->head.out;
    in_dtype(dtype, [&](auto t) {
        is_drawn = draw(*draws, *slots, *rows, static_cast<const decltype(t) *>(from_slots.logits), num_threads);
    });
    clock.phase(NUM_PHASES - 1);
    return is_drawn;
}

// Copies pieces that begin where lines do and are of whole stripes; with seeds, each of over 240 bytes, digests are of what was
// written.
void baton_copy(char *to, const char *from, const CopyPiece *pieces, int num_pieces, const uint64_t *seeds, uint64_t *digests) {
    const auto copy = is_amd() ? copy_pieces<PastCaches> : copy_pieces<IntoSecondCache>;
    copy(to, from, pieces, num_pieces, seeds, digests);
}

}  // extern "C"
