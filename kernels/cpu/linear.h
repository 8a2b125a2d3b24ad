// Linears on packed weights, with what follows them done while the sums are still in registers.
#pragma once

#include <algorithm>

#include "product.h"

namespace baton {

struct Linear {
    const void *weight;  // panels; where gated, each has 16 columns of the gate and the 16 of `up` that belong to them
    const void *bias;    // fp32 [panels * PANEL] in the panels' order, or null
    int32_t in, out;     // out: columns of the result
    int32_t gated;
};

inline int num_panels(const Linear &linear) { return ceil_div(linear.gated ? 2 * linear.out : linear.out, PANEL); }

// silu(gate) * up, rounded where the reference rounds.
template <class T> BATON_INLINE Floats gated(Floats gate, Floats up) {
    gate = rounded<T>(gate);
    return rounded<T>(gate / (exponential(-gate) + 1.0f)) * rounded<T>(up);
}

template <class T> struct Output {
    T *to;            // [rows, stride]
    const T *residual;  // added to the rounded product, or null; may be `to`
    int stride;
};

template <class T, int M, int PANELS>
void linear_block(const Linear &linear, const T *const *x, int row, int panel, const Output<T> &output, Ahead ahead) {
    Floats sums[M][2 * PANELS];
    const size_t size = panel_size<T>(linear.in);
    multiply<T, M, PANELS>(x, static_cast<const T *>(linear.weight) + panel * size, size, steps_of<T>(linear.in), sums, ahead);
    if (linear.bias)
        for (int m = 0; m < M; m++)
            for (int v = 0; v < 2 * PANELS; v++)
                sums[m][v] += load(static_cast<const float *>(linear.bias) + panel * PANEL + v * LANES);
    for (int m = 0; m < M; m++) {
        T *to = output.to + size_t(row + m) * output.stride;
        if (linear.gated) {
            for (int p = 0; p < PANELS; p++)
                if (const int column = (panel + p) * LANES; column < linear.out)
                    store_some(to + column, gated<T>(sums[m][2 * p], sums[m][2 * p + 1]), linear.out - column);
            continue;
        }
        const T *residual = output.residual ? output.residual + size_t(row + m) * output.stride : nullptr;
        for (int v = 0; v < 2 * PANELS; v++) {
            const int column = panel * PANEL + v * LANES, left = linear.out - column;
            if (left <= 0) break;
            Floats sum = sums[m][v];
            if (residual) sum = load_some(residual + column, left) + rounded<T>(sum);
            store_some(to + column, sum, left);
        }
    }
}

// Pick the block that is compiled for this number of rows.
template <class T, int PANELS, int M = PANELS == 2 ? MAX_ROWS_OF_PAIR : MAX_ROWS>
void linear_rows(const Linear &linear, const T *const *x, int num_rows, int row, int panel, const Output<T> &output, Ahead ahead) {
    if constexpr (M > 1)
        if (num_rows < M) return linear_rows<T, PANELS, M - 1>(linear, x, num_rows, row, panel, output, ahead);
    linear_block<T, M, PANELS>(linear, x, row, panel, output, ahead);
}

constexpr size_t NEAR = 4096;     // bytes
constexpr int LARGE_BATCH = 24;   // rows; from here on two panels a pass save more loads than a third pass costs

// One thread's share: whole panels, so that each weight is read by one thread. The shape of the passes was measured.
template <class T>
void linear_share(const Linear &linear, const T *x, int x_stride, int num_rows, const Output<T> &output, int share, int shares) {
    const int panels = num_panels(linear), steps = steps_of<T>(linear.in);
    const int first = int64_t(panels) * share / shares, last = int64_t(panels) * (share + 1) / shares;
    const bool pairs = num_rows <= MAX_ROWS_OF_PAIR || (num_rows >= LARGE_BATCH && MAX_ROWS_OF_PAIR > 1);
    const int passes = ceil_div(num_rows, pairs ? MAX_ROWS_OF_PAIR : MAX_ROWS), passes_ahead = std::min(passes, 4);
    const size_t bytes = panel_size<T>(linear.in) * sizeof(T);
    for (int panel = first; panel < last;) {
        const int width = pairs ? std::min(2, last - panel) : 1, next = panel + width;
        const size_t bytes_next = std::min(pairs ? 2 : 1, last - next) * bytes;
        const size_t bytes_a_step = (bytes_next / passes_ahead / steps + 63) / 64 * 64;
        const char *at = static_cast<const char *>(linear.weight) + next * bytes;
        for (int pass = 0; pass < passes; pass++) {
            const int begin = int64_t(num_rows) * pass / passes, end = int64_t(num_rows) * (pass + 1) / passes;
            const T *rows[MAX_ROWS];
            for (int row = begin; row < end; row++) rows[row - begin] = x + size_t(row) * x_stride;
            Ahead ahead;
            if (passes == 1) ahead.distance = NEAR;
            else if (bytes_next && pass < passes_ahead) ahead = {0, at + pass * bytes_a_step * steps, bytes_a_step};
            if (width == 2) linear_rows<T, 2>(linear, rows, end - begin, begin, panel, output, ahead);
            else linear_rows<T, 1>(linear, rows, end - begin, begin, panel, output, ahead);
        }
        panel = next;
    }
}

// Lay weight [out, in] (gated: [2 * out, in], gate first) out as panels; what fills up the last one is zero.
template <class T> void pack_linear(const Linear &linear, const T *weight, T *packed) {
    constexpr int W = Step<T>::WIDTH;
    const int panels = num_panels(linear), steps = steps_of<T>(linear.in);
#pragma omp parallel for
    for (int panel = 0; panel < panels; panel++) {
        T *to = packed + panel * panel_size<T>(linear.in);
        for (int column = 0; column < PANEL; column++) {
            int source = panel * PANEL + column;
            bool exists = source < linear.out;
            if (linear.gated) {
                const int within = panel * LANES + column % LANES;
                exists = within < linear.out;
                source = within + (column < LANES ? 0 : linear.out);
            }
            for (int step = 0; step < steps; step++)
                for (int w = 0; w < W; w++) {
                    const int k = step * W + w;
                    T &number = to[(size_t(step) * PANEL + column) * W + w];
                    number = exists && k < linear.in ? weight[size_t(source) * linear.in + k] : T{};
                }
        }
    }
}

}  // namespace baton
