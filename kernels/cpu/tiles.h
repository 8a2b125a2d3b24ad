// Rows of bf16 times packed columns on AMX's tiles: 16 rows by 32 numbers times 32 by 16, as one instruction.
//
// A panel (panels.h) is two tiles of columns side by side: 16 steps of it are 32 numbers of the summed dimension. Each sum is one
// chain over blocks of 32, as the instruction adds them up (of each block first its even numbers and its odd ones by themselves),
// then over the steps that fill no block, as everywhere else: the same for one row and for many.
#pragma once

#include "product.h"

namespace baton {
constexpr int TILE_DEPTH = 32;  // numbers of the summed dimension
}

#if defined(__AMX_BF16__)

#include <sys/syscall.h>
#include <unistd.h>

namespace baton {

constexpr int TILE_ROWS = 16;
constexpr int TILED_ROWS = 2 * TILE_ROWS;  // of one pass over a panel: four tiles of sums, two of rows, two of columns
constexpr int BLOCK_STEPS = TILE_DEPTH / 2;

// Ask the kernel for the tiles, once for all threads of this process and those that it forks. Source: Linux, Documentation/arch/x86/xstate.rst
inline bool may_use_tiles() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

// GCC takes a tile's load, or that of their shapes, for one of an address, and what was stored there for nobody's, unless it is told.
BATON_INLINE void put_into_place(const void *at) { asm volatile("" : : "r"(at) : "memory"); }

// A thread's tiles while it is in a phase, of the shape that its pass needs; given back at the end, since they make each switch of
// threads dearer.
class Tiles {
  public:
    Tiles() = default;
    Tiles(const Tiles &) = delete;
    Tiles &operator=(const Tiles &) = delete;
    ~Tiles() {
        if (num_rows_) _tile_release();
    }
    // Of up to TILED_ROWS rows times a panel: sums in 0 .. 3, rows in 4 and 5, columns in 6 and 7.
    void shape(int num_rows) {
        const uint8_t low = uint8_t(num_rows < TILE_ROWS ? num_rows : TILE_ROWS), high = uint8_t(num_rows - low);
        if (num_rows != num_rows_) shape({1, 0, {}, {}, {low, low, high, high, low, high, BLOCK_STEPS, BLOCK_STEPS}}, LANES);
        num_rows_ = num_rows;
    }
    // Of one row's up to TILE_ROWS queries: keys times them (0, 4, 6), weights times values (2 and 3, 5, 7).
    void shape_for_one(int num_queries) {
        const uint8_t few = uint8_t(num_queries);
        if (-num_queries != num_rows_) shape({1, 0, {}, {}, {TILE_ROWS, 0, few, few, TILE_ROWS, few, BLOCK_STEPS, BLOCK_STEPS}}, num_queries);
        num_rows_ = -num_queries;
    }

  private:
    struct Shape {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    };
    static_assert(sizeof(Shape) == 64);

    // num_columns: of 0, 1 and 6; the others have as many as there are.
    void shape(Shape shape, int num_columns) {
        for (int tile = 0; tile < 8; tile++)
            if (shape.rows[tile]) shape.bytes[tile] = uint16_t(tile < 2 || tile == 6 ? num_columns * sizeof(float) : 64);
        alignas(64) const Shape aligned = shape;
        put_into_place(&aligned);
        _tile_loadconfig(&aligned);
    }
    int num_rows_ = 0;  // that it is in shape for; less than 0: queries of one row
};

// A block of a panel as tiles take it: where it lies, or widened into `to`.
BATON_INLINE const Bf16 *widened_block(const Bf16 *columns, Bf16 *) { return columns; }
BATON_INLINE const Bf16 *widened_block(const Int8 *columns, Bf16 *to) {
#pragma GCC unroll 4
    for (int at = 0; at < TILE_DEPTH * PANEL; at += 2 * PANEL) {
        Floats first, second;
        PanelStep<Bf16, Int8>::load_both(columns + at, first, second);
        Step<Bf16>::put(to + at, first), Step<Bf16>::put(to + at + PANEL, second);
    }
    put_into_place(to);
    return to;
}

// What is done beside a product, while tiles multiply: nothing.
struct Nothing {
    BATON_INLINE void operator()() const {}
};

// Rows, `stride` bytes apart, times the first `blocks` blocks of a panel; sums: [rows, PANEL], `sums_stride` bytes apart. HIGH: there
// are more than TILE_ROWS. ADDS: to what the sums are. STREAMS: rows pass the nearest cache by, where the panel stays. beside(): with
// each block.
template <bool HIGH, class C, bool ADDS = false, bool STREAMS = false, class F = Nothing>
void multiply_tiles(const Bf16 *x, size_t stride, const C *columns, int blocks, float *sums, size_t sums_stride, Ahead ahead,
                    F beside = {}) {
    constexpr int BLOCK = TILE_DEPTH * PANEL, STEP_BYTES = 2 * PANEL * sizeof(Bf16);
    alignas(64) Bf16 widened[2][BLOCK];
    const char *low = reinterpret_cast<const char *>(x), *high = low + TILE_ROWS * stride;
    char *to = reinterpret_cast<char *>(sums), *high_to = to + TILE_ROWS * sums_stride;
    put_into_place(x);
    if constexpr (ADDS) {
        put_into_place(sums);
        _tile_loadd(0, to, sums_stride);
        _tile_loadd(1, to + LANES * sizeof(float), sums_stride);
        if constexpr (HIGH) {
            _tile_loadd(2, high_to, sums_stride);
            _tile_loadd(3, high_to + LANES * sizeof(float), sums_stride);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (HIGH) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    for (int block = 0; block < blocks; block++) {
        bring_ahead<BLOCK * sizeof(C), 1>(reinterpret_cast<const char *>(columns), 0, BLOCK_STEPS, ahead);
        const char *at = reinterpret_cast<const char *>(widened_block(columns, widened[block % 2]));
        _tile_loadd(6, at, STEP_BYTES);
        _tile_loadd(7, at + STEP_BYTES / 2, STEP_BYTES);
        if constexpr (STREAMS) _tile_stream_loadd(4, low, stride);
        else _tile_loadd(4, low, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (HIGH) {
            if constexpr (STREAMS) _tile_stream_loadd(5, high, stride);
            else _tile_loadd(5, high, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        beside();
        columns += BLOCK, low += TILE_DEPTH * sizeof(Bf16), high += TILE_DEPTH * sizeof(Bf16);
    }
    _tile_stored(0, to, sums_stride);
    _tile_stored(1, to + LANES * sizeof(float), sums_stride);
    if constexpr (HIGH) {
        _tile_stored(2, high_to, sums_stride);
        _tile_stored(3, high_to + LANES * sizeof(float), sums_stride);
    }
}

}  // namespace baton

#else

namespace baton {
struct Tiles {};
}  // namespace baton

#endif
