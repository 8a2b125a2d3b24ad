// Takes chunks of KV as attention does, few of them or none before the end of a row, and looks at each place that it is given.
#include <cstdio>

#include "stream.h"

using namespace baton;

constexpr int BLOCK = 16, POSITIONS = 65, NUM_BLOCKS = 5;  // the last block has one position

// False where a place reaches what is no chunk of KV, from NUM_FAR before it on, or does not end with what is read next.
bool is_good(int num_kv_heads, int head_dim, int lead, const int (*takes)[2], int num_takes) {
    std::vector<uint16_t> kv(size_t(NUM_BLOCKS) * 2 * BLOCK * num_kv_heads * head_dim);
    const Cache cache = {kv.data(), 1, BLOCK, num_kv_heads, head_dim, num_kv_heads, num_kv_heads * head_dim};
    const int64_t table[NUM_BLOCKS] = {3, 0, 4, 1, 2};
    const Span span = {0, 1, POSITIONS - 1};
    const Batch batch = {&span, table, nullptr, NUM_BLOCKS, 1, 1};
    const Unit unit = {0, 0, 1, 0, 0};
    KvStream stream(cache, batch, &unit, &unit + 1, 0, 0, sizeof kv[0]), again(cache, batch, &unit, &unit + 1, 0, 0, sizeof kv[0]);
    const char *begin = reinterpret_cast<const char *>(kv.data()), *end = begin + kv.size() * sizeof kv[0];
    for (KvStream *each : {&stream, &again}) each->reach(&unit, lead);
    for (int i = 0; i < num_takes; i++) {
        const int fresh = takes[i][0], count = takes[i][1];
        const Nearer place = stream.take(fresh, count);
        for (int at = -NUM_FAR; at < count; at++)
            if (place[at] < begin || place[at] >= end) return std::printf("take %d: place %d is outside of KV\n", i, at), false;
        for (int left = fresh; left > 0; left--)
            if (place[count - left] != *again.take(1, 1)) return std::printf("take %d: not what is read next\n", i), false;
    }
    return true;
}

int main() {
    constexpr int FEW[][2] = {{8, 64}, {0, 64}, {0, 12}, {0, 64}, {1, 32}, {0, 64}, {64, 64}, {0, 12}, {3, 64}};
    constexpr int LONG[][2] = {{32, 256}, {0, 12}, {5, 128}, {256, 256}, {0, 256}, {1, 1}, {200, 256}, {2, 256}};
    for (int lead : {0, 1, 96, 1000})
        if (!is_good(8, 128, lead, FEW, 9) || !is_good(32, 128, lead, LONG, 8) || !is_good(1, 32, lead, FEW, 9)) return 1;
    return 0;
}
