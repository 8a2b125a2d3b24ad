// Linears on packed weights, with what follows them done while the sums are still in registers.
#pragma once

#include <algorithm>
#include <type_traits>

#include "halves.h"
#include "tiled_linear.h"
#include "turns.h"

namespace baton {

template <class T, int M, int PANELS, class C> void linear_block(const Pass<T> &pass, const C *columns) {
    Floats sums[M][2 * PANELS];
    multiply<T, M, PANELS>(pass.x, columns, panel_size<T>(pass.linear.in), steps_of<T>(pass.linear.in), sums, pass.ahead);
    finish_pass(pass, sums);
}

// Pick the block that is compiled for this number of rows.
template <class T, int PANELS, class C, int M = max_rows(PANELS)> void linear_rows(const Pass<T> &pass, const C *columns) {
    if constexpr (M > 1)
        if (pass.num_rows < M) return linear_rows<T, PANELS, C, M - 1>(pass, columns);
    linear_block<T, M, PANELS>(pass, columns);
}

// From so many rows on (fewer where weights take fewer bytes than rows' numbers) a pass asks for what it reads next. On AMD's CPUs with
// AVX-512 one panel behind the other is what prefetchers like best: a pass of few rows reads as fast as anything does, two panels
// side by side, or prefetches that are not needed, take a fifth off that, and only more rows keep it too busy to look far enough
// ahead by itself. Intel's do not look that far: unasked, one row took 1.3 to 1.6 of the time.
inline int rows_that_ask() {
#if defined(__AVX512F__)
    return is_amd() ? 5 : 1;
#else
    return 1;
#endif
}
constexpr int LARGE_BATCH = 24;   // rows; from here on two panels a pass save more loads than a third pass costs

// How a linear's panels are cut into pieces. The shape of the passes was measured.
struct Cut {
    int panels;      // of a piece
    int passes;      // over each piece, so many rows at a time
    bool is_direct;  // columns are unpacked anew by each pass, or need not be
    bool is_halved;  // by halves.h, whatever `passes` says

    // Whether a piece puts nothing into place before all of it is computed.
    bool is_open() const { return passes == 1 || is_halved; }

    int row_of(int pass, int num_rows) const { return int(int64_t(num_rows) * pass / passes); }  // the first
};

template <class T, class C> Cut cut_of(int num_rows) {
    const bool is_direct = std::is_same_v<Ready<T>, C> || num_rows <= ROWS_UNPACKING;
    const int panels = num_rows >= LARGE_BATCH ? MAX_PANELS : 1;
#if defined(__AVX512F__)
    const bool is_halved = false;
#else
    const bool is_halved = num_rows >= LEAST_ROWS && num_rows <= ROWS_UNPACKING;
#endif
    return {panels, ceil_div(num_rows, max_rows(panels)), is_direct, is_halved};
}

#if !defined(__AVX512F__)
// A panel times a few rows.
template <class T, class C>
void linear_by_halves(const Linear &linear, const T *x, int num_rows, const Output<T> &output, int panel, const C *columns, Hold &hold) {
    static thread_local Buffer buffer;
    char *memory = buffer.at_least((size_t(BLOCK_STEPS) + PANEL) * num_rows * sizeof(float));
    float *rows = take<float>(memory, size_t(num_rows) * BLOCK_STEPS), *sums = take<float>(memory, size_t(num_rows) * PANEL);
    multiply_by_halves(x, num_rows, linear.in, columns, rows, sums);
    for (int row = 0; row < num_rows; row++, sums += PANEL) {
        Floats own[1][2] = {{load(sums), load(sums + LANES)}};
        finish_pass(Pass<T>{linear, output, nullptr, 1, row, panel, {}, hold}, own);
    }
}

// A panel times many rows, some steps at a time: their columns, unpacked once, stay in the nearest cache for all passes. `next`:
// the panel to bring nearer, or null.
template <class T, class C>
void linear_step_by_step(const Linear &linear, const T *x, int num_rows, const Output<T> &output, const Cut &cut, int panel,
                         const C *columns, const C *next, Hold &hold) {
    constexpr int STEPS = 128;
    static thread_local Buffer buffer;
    char *memory = buffer.at_least((size_t(STEPS) + num_rows) * PANEL * sizeof(float));
    float *unpacked = take<float>(memory, STEPS * PANEL), *sums = take<float>(memory, size_t(num_rows) * PANEL);
    std::fill_n(sums, size_t(num_rows) * PANEL, 0.0f);
    auto each_pass = [&](int begin_step, auto &&with_sums) {
        for (int number = 0; number < cut.passes; number++) {
            const int begin = cut.row_of(number, num_rows), end = cut.row_of(number + 1, num_rows);
            const T *rows[MAX_ROWS];
            for (int row = begin; row < end; row++) rows[row - begin] = x + size_t(row) * linear.in + begin_step;
            with_constant<MAX_ROWS>(end - begin, [&](auto constant) {
                constexpr int M = constant();
                Floats own[M][2];
                float *at = sums + size_t(begin) * PANEL;
                for (int m = 0; m < M; m++) own[m][0] = load(at + m * PANEL), own[m][1] = load(at + m * PANEL + LANES);
                with_sums(number, Pass<T>{linear, output, rows, M, begin, panel, {}, hold}, own);
                for (int m = 0; m < M; m++) store(at + m * PANEL, own[m][0]), store(at + m * PANEL + LANES, own[m][1]);
            });
        }
    };
    for (int begin = 0; begin < linear.in; begin += STEPS) {
        const int count = std::min(STEPS, linear.in - begin);
        for (int i = 0; i < count * PANEL; i += 8) {
            const C *step = columns + size_t(begin) * PANEL + i / PANEL * PANEL;
            _mm256_store_ps(unpacked + i, PanelStep<T, C>::load(step, i % PANEL / 8));
        }
        each_pass(begin, [&](int number, const Pass<T> &pass, auto &own) {
            constexpr int M = sizeof own / sizeof *own;
            Ahead ahead;
            if (next && number == 0) ahead = {0, reinterpret_cast<const char *>(next + size_t(begin) * PANEL), PANEL * sizeof(C)};
            multiply_on<T, M, 1>(pass.x, unpacked, 0, count, own, ahead);
        });
    }
    each_pass(0, [&](int, const Pass<T> &pass, auto &own) { finish_pass(pass, own); });
}
#endif

// Panels first .. last: one, or two where MAX_PANELS is.
template <class T, class C>
void linear_piece(const Linear &linear, const T *x, int num_rows, const Output<T> &output, const Cut &cut, int first, int last,
                  Hold &hold) {
    const int width = last - first, steps = steps_of<T>(linear.in), passes_ahead = std::min(cut.passes, 4);
    const size_t size = panel_size<T>(linear.in), bytes = size * sizeof(C);
    const size_t bytes_next = std::min(cut.panels, num_panels(linear) - last) * bytes;
    const size_t bytes_a_step = (bytes_next / passes_ahead / steps + 63) / 64 * 64;
    const C *columns = static_cast<const C *>(linear.weight) + first * size;
    const char *at = reinterpret_cast<const char *>(columns + width * size);
#if defined(__AVX512F__)
    const Ready<T> *unpacked = std::is_same_v<Ready<T>, C> || !cut.is_direct ? unpacked_panels<T>(columns, width * size) : nullptr;
#else
    if (cut.is_halved) return linear_by_halves(linear, x, num_rows, output, first, columns, hold);
    if (!cut.is_direct)
        return linear_step_by_step(linear, x, num_rows, output, cut, first, columns, bytes_next ? columns + size : nullptr, hold);
#endif
    for (int number = 0; number < cut.passes; number++) {
        const int begin = cut.row_of(number, num_rows), end = cut.row_of(number + 1, num_rows);
        const T *rows[MAX_ROWS];
        for (int row = begin; row < end; row++) rows[row - begin] = x + size_t(row) * linear.in;
        Pass<T> pass{linear, output, rows, end - begin, begin, first, {}, hold};
        if (cut.passes == 1) pass.ahead.distance = num_rows * int(sizeof(T) / sizeof(C)) < rows_that_ask() ? 0 : NEAR;
        else if (bytes_next && number < passes_ahead) pass.ahead = {0, at + number * bytes_a_step * steps, bytes_a_step};
#if defined(__AVX512F__)
        if (!unpacked) linear_rows<T, 1>(pass, columns);
        else if (width == 2) linear_rows<T, 2>(pass, unpacked);
        else linear_rows<T, 1>(pass, unpacked);
#else
        linear_rows<T, 1>(pass, columns);
#endif
    }
}

// A thread's part in rows times the weight, which all threads take: whole panels, so that each weight is read by one thread.
template <class C, class T>
void linear_phase_of(Worker &worker, const Linear &linear, const T *x, int num_rows, const Output<T> &output) {
    const Cut cut = cut_of<T, C>(num_rows);
    worker.phase(num_panels(linear), cut.panels, cut.is_open(), [&](int64_t first, int64_t last, Hold &hold) {
        linear_piece<T, C>(linear, x, num_rows, output, cut, int(first), int(last), hold);
    });
}
#if defined(__AMX_BF16__)
template <class C>
void linear_phase_of(Worker &worker, const Linear &linear, const Bf16 *x, int num_rows, const Output<Bf16> &output) {
    const bool is_one_pass = num_rows <= TILED_ROWS;
    Tiles tiles;
    worker.phase(num_panels(linear), is_one_pass ? 1 : MAX_PANELS, is_one_pass, [&](int64_t first, int64_t last, Hold &hold) {
        linear_on_tiles<C>(linear, x, num_rows, output, int(first), int(last), tiles, hold);
    });
}
#endif

template <class T>
void linear_phase(Worker &worker, const Linear &linear, const T *x, int num_rows, const Output<T> &output) {
    if (num_rows == 0) return;
    if (linear.scales) linear_phase_of<Int8>(worker, linear, x, num_rows, output);
    else linear_phase_of<T>(worker, linear, x, num_rows, output);
}

// Which row of weight [out, in] (gated: [2 * out, in], gate first) is this column of the panels; -1: it only fills up the last.
inline int source_of(const Linear &linear, int panel, int column) {
    const int whole = panel * PANEL + column, within = panel * LANES + column % LANES;
    if (!linear.gated) return whole < linear.out ? whole : -1;
    return within < linear.out ? within + (column < LANES ? 0 : linear.out) : -1;
}

// Lay a weight out as panels; what fills them up is zero. put(to, column, w, number or null): store a number of the step at `to`.
template <class T, class C, class From, class F> void pack_panels(const Linear &linear, const From *weight, C *packed, F &&put) {
    constexpr int W = Step<T>::WIDTH;
    const int panels = num_panels(linear), steps = steps_of<T>(linear.in);
#pragma omp parallel for
    for (int panel = 0; panel < panels; panel++) {
        C *to = packed + panel * panel_size<T>(linear.in);
        for (int column = 0; column < PANEL; column++) {
            const int source = source_of(linear, panel, column);
            const From *from = weight + size_t(std::max(source, 0)) * linear.in;
            for (int step = 0; step < steps; step++)
                for (int w = 0; w < W; w++) {
                    const int k = step * W + w;
                    put(to + size_t(step) * PANEL * W, column, w, source >= 0 && k < linear.in ? from[k] : From{});
                }
        }
    }
}

// The weight in T, or int8_t where the linear has scales.
template <class T> void pack_linear(const Linear &linear, const void *weight, void *packed) {
    if (linear.scales)
        return pack_panels<T>(linear, static_cast<const int8_t *>(weight), static_cast<Int8 *>(packed),
                              [](Int8 *to, int column, int w, int8_t number) {
                                  to[PanelStep<T, Int8>::place(column, w)].bits = PanelStep<T, Int8>::code(number);
                              });
    pack_panels<T>(linear, static_cast<const T *>(weight), static_cast<T *>(packed),
                   [](T *to, int column, int w, T number) { to[PanelStep<T, T>::place(column, w)] = number; });
}

}  // namespace baton
