// Some rows times one or two panels of a linear: what is done to their sums.
#pragma once

#include <type_traits>

#include "product.h"
#include "turns.h"
#include "workspace.h"

namespace baton {

struct Linear {
    const void *weight;  // panels; where gated, each has 16 columns of the gate and the 16 of `up` that belong to them
    const void *bias;    // fp32 [panels * PANEL] in the panels' order, or null
    const float *scales;  // the same, where the weight is Int8: what a column's numbers are multiples of; else null
    int32_t in, out;     // out: columns of the result
    int32_t gated;
};

inline int num_panels(const Linear &linear) { return ceil_div(linear.gated ? 2 * linear.out : linear.out, PANEL); }

// exp(-x), as far as T tells.
template <class T> BATON_INLINE Floats exponential_of_minus(Floats x) { return exponential(-x); }
#if defined(__AVX512BF16__)
template <> BATON_INLINE Floats exponential_of_minus<Bf16>(Floats x) {
    constexpr float LOG2_E = 1.44269504088896341f;
    Floats power[1] = {at_most(120.0f, x * -LOG2_E)};
    rough_powers_below(power);
    return power[0];
}
#endif

// silu(gate) * up, rounded where the reference rounds.
template <class T> BATON_INLINE Floats gated(Floats gate, Floats up) {
    gate = rounded<T>(gate);
    return rounded<T>(gate / (exponential_of_minus<T>(gate) + 1.0f)) * rounded<T>(up);
}

template <class T> struct Output {
    T *to;            // [rows, stride]
    const T *residual;  // added to the rounded product, or null; may be `to`
    int stride;
};

// Some rows times one or two panels.
template <class T> struct Pass {
    const Linear &linear;
    const Output<T> &output;
    const T *const *x;
    int num_rows, row, panel;  // the first row and panel
    Ahead ahead;
    Hold &hold;
};

// What is done to the sums of a pass.
template <class T, int M, int VECTORS> BATON_INLINE void finish_pass(const Pass<T> &pass, Floats (&sums)[M][VECTORS]) {
    constexpr int PANELS = VECTORS / 2;
    const Linear &linear = pass.linear;
    const Output<T> &output = pass.output;
    const int panel = pass.panel;
    auto for_columns = [&](const void *numbers, auto &&change) {
        for (int v = 0; v < 2 * PANELS; v++) {
            const Floats number = load(static_cast<const float *>(numbers) + panel * PANEL + v * LANES);
            for (int m = 0; m < M; m++) change(sums[m][v], number);
        }
    };
    if (!pass.hold.keep()) return;
    if (linear.scales) for_columns(linear.scales, [](Floats &sum, Floats scale) { sum = sum * scale; });
    if (linear.bias) for_columns(linear.bias, [](Floats &sum, Floats bias) { sum = sum + bias; });
    for (int m = 0; m < M; m++) {
        T *to = output.to + size_t(pass.row + m) * output.stride;
        if (linear.gated) {
            for (int p = 0; p < PANELS; p++)
                if (const int column = (panel + p) * LANES; column < linear.out)
                    store_some(to + column, gated<T>(sums[m][2 * p], sums[m][2 * p + 1]), linear.out - column);
            continue;
        }
        const T *residual = output.residual ? output.residual + size_t(pass.row + m) * output.stride : nullptr;
        for (int v = 0; v < 2 * PANELS; v++) {
            const int column = panel * PANEL + v * LANES, left = linear.out - column;
            if (left <= 0) break;
            Floats sum = sums[m][v];
            if (residual) sum = load_some(residual + column, left) + rounded<T>(sum);
            store_some(to + column, sum, left);
        }
    }
}

constexpr size_t NEAR = 8192;  // bytes that a pass of few rows looks ahead

#if defined(__AVX512F__)
// Columns as rows have them. Where many rows want the same panels they are widened once, into memory of the thread.
template <class T, class C> const Ready<T> *unpacked_panels(const C *columns, size_t numbers) {
    if constexpr (std::is_same_v<C, Ready<T>>) return columns;
    else {
        static thread_local Buffer buffer;
        auto *to = reinterpret_cast<Ready<T> *>(buffer.at_least(numbers * sizeof(Ready<T>)));
        constexpr int W = Step<T>::WIDTH;
        for (size_t at = 0; at < numbers; at += W * PANEL) {
            Floats first, second;
            PanelStep<T, C>::load_both(columns + at, first, second);
            Step<Ready<T>>::put(to + at, first), Step<Ready<T>>::put(to + at + W * LANES, second);
        }
        return to;
    }
}
#endif

}  // namespace baton
