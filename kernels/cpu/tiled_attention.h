// A part of attention (attention.h) on AMX's tiles (tiles.h), for many rows; for one: tiled_direct.h. Both take the sums of the
// instruction.
//
// All 64 positions of a tile are multiplied, those that a row does not see by weights of zero: what lies there must be finite, and is
// taken for zero where it is not. Queries go through both tiles of a part 32 at a time, so that what they have of it stays in a
// core's nearest cache; while some are weighed, the next ones' scores are multiplied, and the last ones' values.
#pragma once

#include "tiled_weights.h"
#include "unpack.h"

namespace baton {

#if defined(__AMX_BF16__)

// Lay a unit's queries side by side, [queries, head_dim].
inline void put_on_tiles(const Rows<Bf16> &rows, Scratch<Bf16> &s) {
    const int num_queries = rows.num_queries(), head_dim = rows.cache.head_dim;
    for (int query = 0; query < num_queries; query++) std::copy_n(rows.query(query), head_dim, s.packed + size_t(query) * head_dim);
    s.tiles.shape(num_queries < TILE_ROWS ? num_queries : TILED_ROWS);
}

// A tile of a part: rows first .. last see any of it, and each from low to high.
struct SeenTile {
    int start = 0, count = 0, first = 0, last = 0;
    bool is_seen_by_all = false;  // of those rows, all of it

    SeenTile() = default;
    SeenTile(const Rows<Bf16> &rows, int start, int count) : start(start), count(count), last(rows.num_rows) {
        while (first < last && high(rows, first) <= low(rows, first)) first++;
        while (first < last && high(rows, last - 1) <= low(rows, last - 1)) last--;
        is_seen_by_all = first < last && low(rows, last - 1) == 0 && high(rows, first) == TILE;
    }
    int low(const Rows<Bf16> &rows, int row) const { return std::clamp(rows.low(row) - start, 0, TILE); }
    int high(const Rows<Bf16> &rows, int row) const { return std::clamp(rows.first_position + row + 1 - start, 0, count); }
    // A bit for each position that a row sees.
    uint64_t seen(const Rows<Bf16> &rows, int row) const {
        const int from = low(rows, row), to = high(rows, row);
        return from < to ? ~uint64_t(0) >> (TILE - to) & ~uint64_t(0) << from : 0;
    }
};

// Up to TILED_ROWS queries of a unit in a tile of a part.
struct QueryPass {
    int begin, end, tile;
    bool is_first;  // tile that they see: they have nothing so far
    float *scores;
    Bf16 *weights;

    bool is_high() const { return end - begin > TILE_ROWS; }
};

// Whether all of a tile's values are finite.
inline bool are_finite(const Bf16 *values, int padded) {
    const __m512i exponent = _mm512_set1_epi16(0x7F80);
    __mmask32 found = 0;
    for (int at = 0; at < padded * TILE; at += 2 * LANES)
        found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(values + at), exponent), exponent);
    return !found;
}

// One part of one KV head, for some rows.
class PartOnTiles {
  public:
    // `part`: sums and greatest scores of all queries; values are in s.of_pass while a pass is under way.
    PartOnTiles(const Rows<Bf16> &rows, const Scratch<Bf16> &s, const Mixed &part) : rows_(rows), s_(s), part_(part) {}

    // Lay a tile out. ahead: what to bring nearer meanwhile.
    void load(int tile, const TileRows<Bf16> &from, int start, AheadOfTile &ahead) {
        load_tile(rows_.cache, from, rows_.head, keys_of(tile), values_of(tile), ahead);
        tiles_[tile] = SeenTile(rows_, start, from.count);
        is_safe_[tile] = tiles_[tile].is_seen_by_all || are_finite(values_of(tile), padded_);
    }

    // done(pass): what its queries have of the part is in s.of_pass.
    template <class Done> void attend(Done &&done) {
        QueryPass before{}, now{}, next{};
        if (!follow(now, 0)) return;
        for (int panel = 0; panel < SCORED; panel++) score(now, panel);
        bool has_before = false, has_now = true;
        for (int turn = 1; has_now; turn ^= 1) {
            next = now;
            const bool has_next = follow(next, turn);
            const int steps = (has_next ? SCORED : 0) + (has_before ? num_mixed_ : 0);
            int step = 0;
            auto take_step = [&]() {
                if (has_next && step < SCORED) score(next, step);
                else mix(before, step - (has_next ? SCORED : 0));
                step++;
            };
            weigh(now, [&]() {
                if (step < steps) take_step();
            });
            while (step < steps) take_step();
            if (has_before && before.begin != now.begin) done(before);
            before = now, now = next, has_before = true, has_now = has_next;
        }
        for (int panel = 0; panel < num_mixed_; panel++) mix(before, panel);
        done(before);
    }

  private:
    static constexpr int SCORED = TILE / PANEL, TILES = PART / TILE;
    static_assert(TILES == 2);  // with a third one, s.shrink would be overwritten before it is used

    // Take a pass to the next tile that it sees any of, or to the queries behind it; false: there are none.
    bool follow(QueryPass &pass, int turn) const {
        bool is_first = pass.end == 0;
        int tile = is_first ? 0 : pass.tile + 1, begin = pass.begin;
        for (const int all = rows_.num_queries(); begin < all; begin += TILED_ROWS, tile = 0, is_first = true) {
            const int end = std::min(begin + TILED_ROWS, all);
            for (; tile < TILES; tile++)
                if (tiles_[tile].first * group_ < end && begin < tiles_[tile].last * group_) {
                    const size_t at = size_t(turn) * TILED_ROWS * TILE;
                    pass = {begin, end, tile, is_first, s_.scores + at, s_.weights + at};
                    return true;
                }
        }
        return false;
    }

    // Scores of a panel of keys.
    void score(const QueryPass &pass, int panel) const {
        const auto multiply = pass.is_high() ? multiply_tiles<true, Bf16> : multiply_tiles<false, Bf16>;
        const Bf16 *queries = s_.packed + size_t(pass.begin) * head_dim_, *keys = keys_of(pass.tile) + panel * panel_size<Bf16>(head_dim_);
        multiply(queries, head_dim_ * sizeof(Bf16), keys, head_dim_ / TILE_DEPTH, pass.scores + panel * PANEL, TILE * sizeof(float), {}, {});
    }

    // meanwhile: what else is to be done, called twice with every 16 queries.
    template <class Meanwhile> void weigh(const QueryPass &pass, Meanwhile &&meanwhile) const {
        const SeenTile &tile = tiles_[pass.tile];
        const float scale = 1.0f / std::sqrt(float(head_dim_));
        const bool do_all_see_all = tile.is_seen_by_all && tile.first * group_ <= pass.begin && pass.end <= tile.last * group_;
        uint64_t seen[LANES];
        for (int query = pass.begin; query < pass.end; query += LANES) {
            const int num = std::min(LANES, pass.end - query);
            const size_t at = size_t(query - pass.begin) * TILE;
            const Sixteen some{pass.scores + at,    pass.weights + at, part_.greatest + query, part_.sums + query,
                               s_.shrink + query, seen,              num};
            if (do_all_see_all) {
                weigh_sixteen<true>(some, scale, meanwhile);
                continue;
            }
            for (int i = 0; i < num; i++) seen[i] = tile.seen(rows_, (query + i) / group_);
            weigh_sixteen<false>(some, scale, meanwhile);
        }
    }

    // Add weights times a panel of values to what the pass has so far.
    void mix(const QueryPass &pass, int panel) const {
        float *sums = s_.of_pass + panel * PANEL;
        const int num = pass.end - pass.begin;
        if (!pass.is_first)
            for (int m = 0; m < num; m++)
                if (const float shrink = s_.shrink[pass.begin + m]; shrink != 1.0f)
                    for (int i = 0; i < PANEL; i += LANES) {
                        float *at = sums + size_t(m) * padded_ + i;
                        store(at, baton::load(at) * shrink);
                    }
        const Bf16 *values = values_of(pass.tile) + size_t(panel) * PANEL * TILE;
        if (is_safe_[pass.tile]) return multiply(pass, values, sums, padded_);
        // Each query by itself, with the values that it sees: what comes of them for the others is dropped.
        alignas(64) float mixed[TILED_ROWS * PANEL], all[TILED_ROWS * PANEL];
        alignas(64) Bf16 only[TILE * PANEL];
        for (int m = 0; m < num; m++) {
            const uint64_t seen = tiles_[pass.tile].seen(rows_, (pass.begin + m) / group_);
            for (int i = 0; i < TILE * PANEL; i++) only[i] = seen >> (i / (2 * PANEL) * 2 + i % 2) & 1 ? values[i] : Bf16{};
            for (int row = 0; row < num; row++) std::copy_n(sums + size_t(row) * padded_, PANEL, all + row * PANEL);
            multiply(pass, only, all, PANEL);
            std::copy_n(all + m * PANEL, PANEL, mixed + m * PANEL);
        }
        for (int m = 0; m < num; m++) std::copy_n(mixed + m * PANEL, PANEL, sums + size_t(m) * padded_);
    }

    void multiply(const QueryPass &pass, const Bf16 *values, float *sums, int stride) const {
        const auto with = pass.is_first ? (pass.is_high() ? multiply_tiles<true, Bf16> : multiply_tiles<false, Bf16>)
                                        : (pass.is_high() ? multiply_tiles<true, Bf16, true> : multiply_tiles<false, Bf16, true>);
        with(pass.weights, TILE * sizeof(Bf16), values, TILE / TILE_DEPTH, sums, stride * sizeof(float), {}, {});
    }

    Bf16 *keys_of(int tile) const { return s_.keys + tile * SCORED * panel_size<Bf16>(head_dim_); }
    Bf16 *values_of(int tile) const { return s_.values + size_t(tile) * padded_ * TILE; }

    const Rows<Bf16> &rows_;
    const Scratch<Bf16> &s_;
    const Mixed part_;
    const int group_ = rows_.cache.group(), head_dim_ = rows_.cache.head_dim, padded_ = rows_.cache.padded(), num_mixed_ = padded_ / PANEL;
    SeenTile tiles_[TILES];
    bool is_safe_[TILES];
};

// One part of one KV head, for some rows whose queries are laid out: see PartOnTiles.
template <class Done>
void attend_on_tiles(const Rows<Bf16> &rows, int part, const Scratch<Bf16> &s, const Mixed &of_part, AheadOfTile ahead, Done &&done) {
    constexpr int TILES = PART / TILE;
    const int end = std::min((part + 1) * PART, rows.last_position() + 1);
    PartOnTiles on_tiles(rows, s, of_part);
    for (int tile = 0; tile < TILES; tile++) {
        const int start = part * PART + tile * TILE;
        if (start >= end || start + TILE <= rows.low(0)) continue;
        AheadOfTile share{ahead.next, ceil_div(ahead.count, TILES - tile)};
        ahead.next += share.count, ahead.count -= share.count;
        on_tiles.load(tile, TileRows<Bf16>(rows.cache, rows.table, rows.attend.layer, start, end), start, share);
    }
    on_tiles.attend(done);
}

#endif

}  // namespace baton
