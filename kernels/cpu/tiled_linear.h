// Linears of bf16 on tiles (tiles.h).
#pragma once

#include <algorithm>
#include <optional>

#include "pass.h"
#include "tiles.h"

namespace baton {

#if defined(__AMX_BF16__)
// Rows times a panel: sums that lack what fills no block, and what is left to do with them.
template <class C> struct TiledPass {
    const Linear &linear;
    const Bf16 *x;  // all rows
    const Output<Bf16> &output;
    Hold &hold;
    const C *columns;  // of the panel
    int panel, begin, num_rows;
    float *sums;  // [num_rows, PANEL]

    int blocks() const { return linear.in / TILE_DEPTH; }

    template <bool HIGH, bool STREAMS = false, class F = Nothing> BATON_INLINE void multiply(Ahead ahead, F beside = {}) const {
        multiply_tiles<HIGH, C, false, STREAMS>(x + size_t(begin) * linear.in, linear.in * sizeof(Bf16), columns, blocks(), sums,
                                                PANEL * sizeof(float), ahead, beside);
    }

    // Put so many rows where they belong.
    template <int M> BATON_INLINE void finish(int first) const {
        const int steps_left = steps_of<Bf16>(linear.in) - blocks() * BLOCK_STEPS;
        Floats own[M][2];
        const Bf16 *behind[M];  // the blocks
        for (int m = 0; m < M; m++) {
            const float *at = sums + (first + m) * PANEL;
            own[m][0] = load(at), own[m][1] = load(at + LANES);
            behind[m] = x + size_t(begin + first + m) * linear.in + blocks() * TILE_DEPTH;
        }
        if (steps_left) multiply_on<Bf16, M, 1>(behind, columns + size_t(blocks()) * TILE_DEPTH * PANEL, 0, steps_left, own);
        finish_pass(Pass<Bf16>{linear, output, behind, M, begin + first, panel, {}, hold}, own);
    }
};

// Up to TILED_ROWS rows times panels first .. last.
template <class C>
void linear_few_on_tiles(const Linear &linear, const Bf16 *x, int num_rows, const Output<Bf16> &output, int first, int last,
                         Hold &hold) {
    constexpr int TOGETHER = 4;  // rows whose sums are finished at a time
    const size_t size = panel_size<Bf16>(linear.in);
    alignas(64) float sums[TILED_ROWS * PANEL];
    for (int panel = first; panel < last; panel++) {
        const C *columns = static_cast<const C *>(linear.weight) + panel * size;
        const TiledPass<C> pass{linear, x, output, hold, columns, panel, 0, num_rows, sums};
        if (num_rows > TILE_ROWS) pass.template multiply<true>({NEAR});
        else pass.template multiply<false>({NEAR});
        for (int row = 0; row < num_rows; row += TOGETHER)
            with_constant<TOGETHER>(std::min(TOGETHER, num_rows - row), [&](auto constant) { pass.template finish<constant()>(row); });
    }
}

constexpr size_t STAYS = 40 << 10;  // bytes of a panel that stay in the nearest cache, of 48 KB, if rows pass it by
constexpr size_t HELD = 768 << 10;  // bytes of rows that stay in the next one, of 2 MB, beside panels and what is written

// The pass before: its sums are finished, some rows at a time, beside the products of the next one, which leave the rest of the core
// idle.
template <class C> class Unfinished {
  public:
    void take(const TiledPass<C> &pass) {
        all();
        pass_.emplace(pass), left_ = pass.num_rows;
    }
    BATON_INLINE void some() {
        if (left_ == 0) return;
        const int first = pass_->num_rows - left_;
        if (left_ >= TOGETHER) pass_->template finish<TOGETHER>(first), left_ -= TOGETHER;
        else pass_->template finish<1>(first), left_ = 0;
    }
    void all() {
        while (left_) some();
    }

  private:
    static constexpr int TOGETHER = 2;

    std::optional<TiledPass<C>> pass_;
    int left_ = 0;  // rows
};

// More of them, in stretches that are held; while one goes through a panel, the next panel is brought nearer.
template <class C>
void linear_many_on_tiles(const Linear &linear, const Bf16 *x, int num_rows, const Output<Bf16> &output, int first, int last,
                          Tiles &tiles, Hold &hold) {
    const size_t size = panel_size<Bf16>(linear.in);
    const C *weight = static_cast<const C *>(linear.weight) + first * size;
    const Bf16 *unpacked = unpacked_panels<Bf16>(weight, (last - first) * size);
    const int blocks = linear.in / TILE_DEPTH, passes = ceil_div(num_rows, TILED_ROWS);
    const int held = std::max(1, int(HELD / (TILED_ROWS * linear.in * sizeof(Bf16))));  // passes of a stretch
    alignas(64) float sums[2][TILED_ROWS * PANEL];
    Unfinished<Bf16> before;
    int turn = 0;
    for (int stretch = 0; stretch < passes; stretch += held) {
        const int end = std::min(passes, stretch + held);
        const size_t bytes_a_block = ceil_div(BLOCK_STEPS * PANEL * 2 * sizeof(C) / 64, end - stretch) * 64;
        for (int panel = first; panel < last; panel++) {
            const bool has_next = panel + 1 < (end < passes ? last : num_panels(linear));
            const char *next = reinterpret_cast<const char *>(weight + (panel + 1 - first) * size);
            for (int number = stretch; number < end; number++, turn ^= 1) {
                const int begin = number * TILED_ROWS, rows = std::min(TILED_ROWS, num_rows - begin);
                const TiledPass<Bf16> pass{linear, x, output, hold, unpacked + (panel - first) * size, panel, begin, rows, sums[turn]};
                Ahead ahead;
                if (has_next) ahead = {0, next + (number - stretch) * blocks * bytes_a_block, bytes_a_block / BLOCK_STEPS};
                auto beside = [&]() __attribute__((always_inline)) { before.some(); };
                tiles.shape(rows);
                if (rows <= TILE_ROWS) pass.multiply<false>(ahead, beside);
                else if (size * sizeof(Bf16) <= STAYS) pass.multiply<true, true>(ahead, beside);
                else pass.multiply<true>(ahead, beside);
                before.take(pass);
            }
        }
    }
    before.all();
}

// Panels first .. last on tiles.
template <class C>
void linear_on_tiles(const Linear &linear, const Bf16 *x, int num_rows, const Output<Bf16> &output, int first, int last, Tiles &tiles,
                     Hold &hold) {
    if (num_rows > TILED_ROWS) return linear_many_on_tiles<C>(linear, x, num_rows, output, first, last, tiles, hold);
    tiles.shape(num_rows);
    linear_few_on_tiles<C>(linear, x, num_rows, output, first, last, hold);
}
#endif

}  // namespace baton
