// Copies KV that arrives, and hashes what it writes as it goes: memory is read once and written once.
//
// The bytes go past the caches (nobody reads them before a later step does), so that a line is not fetched for the sake of being
// overwritten. What is hashed is what stands in a register between the load and the store: where the source is another process'
// memory and changes meanwhile, the digest is still that of the bytes that were written.
//
// The digest is xxh3-64 with a seed, of a number of bytes that is a multiple of 64 and over 240. Source: the description of
// XXH3 in https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md; names of constants are those of the description.
#pragma once

#include "vector.h"

namespace baton {

constexpr size_t STRIPE = 64;  // bytes
constexpr size_t STRIPES_A_BLOCK = 16;
constexpr int SECRET_WORDS = 24;

// One piece to copy; places are bytes from where all pieces' sources, and all their destinations, are counted.
struct CopyPiece {
    int64_t to, from, num_bytes;
};

constexpr uint64_t PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
constexpr uint64_t PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F, PRIME64_3 = 0x165667B19E3779F9,
                   PRIME64_4 = 0x85EBCA77C2B2AE63, PRIME64_5 = 0x27D4EB2F165667C5;
constexpr uint64_t SECRET[SECRET_WORDS] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
    0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};

// What one piece's digest grows from.
class Digest {
  public:
    explicit Digest(uint64_t seed) {
        for (int i = 0; i < SECRET_WORDS; i++) secret_[i] = SECRET[i] + (i % 2 ? -seed : seed);
    }

    // Eight numbers of a stripe, in two halves, under the secret from a word of it on.
    BATON_INLINE void add(const __m256i stripe[2], size_t word) { add(stripe, reinterpret_cast<const char *>(secret_ + word)); }

    // The last stripe of all stands under a place of the secret that is no word's.
    BATON_INLINE void add_last(const __m256i stripe[2]) { add(stripe, reinterpret_cast<const char *>(secret_) + 121); }

    BATON_INLINE void scramble() {
        const __m256i prime = _mm256_set1_epi32(int(PRIME32_1));
        for (int half = 0; half < 2; half++) {
            const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(secret_ + 16) + half);
            const __m256i x = _mm256_xor_si256(_mm256_xor_si256(sums_[half], _mm256_srli_epi64(sums_[half], 47)), key);
            const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
            sums_[half] = _mm256_add_epi64(_mm256_mul_epu32(x, prime), _mm256_slli_epi64(high, 32));
        }
    }

    uint64_t of(uint64_t num_bytes) const {
        uint64_t sums[8];
        std::memcpy(sums, sums_, sizeof sums);
        uint64_t merged = num_bytes * PRIME64_1;
        for (int i = 0; i < 4; i++) {
            uint64_t keys[2];
            std::memcpy(keys, reinterpret_cast<const char *>(secret_) + 11 + 16 * i, sizeof keys);
            const auto product = static_cast<unsigned __int128>(sums[2 * i] ^ keys[0]) * (sums[2 * i + 1] ^ keys[1]);
            merged += uint64_t(product) ^ uint64_t(product >> 64);
        }
        merged = (merged ^ (merged >> 37)) * 0x165667919E3779F9;
        return merged ^ (merged >> 32);
    }

  private:
    BATON_INLINE void add(const __m256i stripe[2], const char *secret) {
        for (int half = 0; half < 2; half++) {
            const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(secret) + half);
            const __m256i x = _mm256_xor_si256(stripe[half], key);
            const __m256i product = _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32));
            const __m256i swapped = _mm256_shuffle_epi32(stripe[half], 0x4E);
            sums_[half] = _mm256_add_epi64(_mm256_add_epi64(sums_[half], product), swapped);
        }
    }

    alignas(32) uint64_t secret_[SECRET_WORDS];
    __m256i sums_[2] = {
        _mm256_set_epi64x(int64_t(PRIME64_3), int64_t(PRIME64_2), int64_t(PRIME64_1), int64_t(PRIME32_3)),
        _mm256_set_epi64x(int64_t(PRIME32_1), int64_t(PRIME64_5), int64_t(PRIME32_2), int64_t(PRIME64_4)),
    };
};

// How what is read is asked for: into which cache, and how many bytes ahead. As AMD's CPUs like it, past the caches; with that Intel's
// take 2.5 times as long as with the other way.
struct PastCaches {
    static constexpr auto HINT = _MM_HINT_NTA;
    static constexpr size_t AHEAD = 2048;
};
struct IntoSecondCache {
    static constexpr auto HINT = _MM_HINT_T1;
    static constexpr size_t AHEAD = 4096;
};

// Copies whole stripes to where lines begin, each shown to `see` between its load and its store.
template <class Asks, class See> BATON_INLINE void copy_stripes(char *to, const char *from, size_t num_bytes, See &&see) {
    for (size_t byte = 0; byte < num_bytes; byte += STRIPE) {
        _mm_prefetch(from + byte + Asks::AHEAD, Asks::HINT);
        __m256i stripe[2];
        for (int half = 0; half < 2; half++)
            stripe[half] = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from + byte) + half);
        // From here on what is hashed is what is written: the compiler may not load it a second time.
        asm volatile("" : "+x"(stripe[0]), "+x"(stripe[1]));
        see(stripe, byte);
        for (int half = 0; half < 2; half++) _mm256_stream_si256(reinterpret_cast<__m256i *>(to + byte) + half, stripe[half]);
    }
}

template <class Asks> BATON_INLINE uint64_t copy_hashed(char *to, const char *from, size_t num_bytes, uint64_t seed) {
    Digest digest(seed);
    const size_t last = num_bytes - STRIPE;
    copy_stripes<Asks>(to, from, num_bytes, [&](const __m256i *stripe, size_t byte) {
        if (byte == last) return digest.add_last(stripe);
        const size_t word = byte / STRIPE % STRIPES_A_BLOCK;
        digest.add(stripe, word);
        if (word == STRIPES_A_BLOCK - 1) digest.scramble();
    });
    return digest.of(num_bytes);
}

// Pieces one after the other; digests: of each, where there are seeds.
template <class Asks>
void copy_pieces(char *to, const char *from, const CopyPiece *pieces, int num_pieces, const uint64_t *seeds, uint64_t *digests) {
    for (int i = 0; i < num_pieces; i++) {
        const CopyPiece &piece = pieces[i];
        if (seeds) digests[i] = copy_hashed<Asks>(to + piece.to, from + piece.from, size_t(piece.num_bytes), seeds[i]);
        else copy_stripes<Asks>(to + piece.to, from + piece.from, size_t(piece.num_bytes), [](const __m256i *, size_t) {});
    }
    _mm_sfence();
}

}  // namespace baton
