// Linears of bf16 on tiles (tiles.h).
#pragma once

#include <algorithm>

#include "pass.h"
#include "tiles.h"

namespace baton {

#if defined(__AMX_BF16__)
// Rows begin .. begin + num_rows times a panel, on tiles.
template <class C>
void linear_tile_pass(const Linear &linear, const Bf16 *x, int begin, int num_rows, const Output<Bf16> &output, int panel,
                      const C *columns, Ahead ahead, Hold &hold) {
    constexpr int TOGETHER = 4;  // rows whose sums are finished at a time
    const int blocks = linear.in / TILE_DEPTH, steps_left = steps_of<Bf16>(linear.in) - blocks * BLOCK_STEPS;
    alignas(64) float sums[TILED_ROWS * PANEL];
    x += size_t(begin) * linear.in;
    const auto multiply = num_rows > TILE_ROWS ? multiply_tiles<true, C> : multiply_tiles<false, C>;
    multiply(x, linear.in * sizeof(Bf16), columns, blocks, sums, PANEL * sizeof(float), ahead);
    for (int row = 0; row < num_rows; row += TOGETHER)
        with_constant<TOGETHER>(std::min(TOGETHER, num_rows - row), [&](auto constant) {
            constexpr int M = constant();
            Floats own[M][2];
            const Bf16 *behind[M];  // the blocks
            for (int m = 0; m < M; m++) {
                const float *at = sums + (row + m) * PANEL;
                own[m][0] = load(at), own[m][1] = load(at + LANES);
                behind[m] = x + size_t(row + m) * linear.in + blocks * TILE_DEPTH;
            }
            if (steps_left) multiply_on<Bf16, M, 1>(behind, columns + size_t(blocks) * TILE_DEPTH * PANEL, 0, steps_left, own);
            finish_pass(Pass<Bf16>{linear, output, behind, M, begin + row, panel, {}, hold}, own);
        });
}

// Panels first .. last on tiles.
template <class C>
void linear_tiles(const Linear &linear, const Bf16 *x, int num_rows, const Output<Bf16> &output, int first, int last, Tiles &tiles,
                  Hold &hold) {
    const size_t size = panel_size<Bf16>(linear.in);
    const C *columns = static_cast<const C *>(linear.weight) + first * size;
    if (num_rows <= TILED_ROWS) {
        tiles.shape(num_rows);
        for (int panel = first; panel < last; panel++, columns += size)
            linear_tile_pass(linear, x, 0, num_rows, output, panel, columns, {NEAR}, hold);
        return;
    }
    const Bf16 *unpacked = unpacked_panels<Bf16>(columns, (last - first) * size);
    for (int begin = 0; begin < num_rows; begin += TILED_ROWS) {
        const int rows = std::min(TILED_ROWS, num_rows - begin);
        tiles.shape(rows);
        for (int panel = first; panel < last; panel++)
            linear_tile_pass(linear, x, begin, rows, output, panel, unpacked + (panel - first) * size, {}, hold);
    }
}
#endif

}  // namespace baton
