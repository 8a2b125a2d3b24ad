// Memory that outlives a step: it grows to what the largest step needs and is then used again.
#pragma once

#include <cstdlib>
#include <new>
#include <vector>

#include "vector.h"

namespace baton {

// Cut `count` numbers of T, on a cache line of their own, off the front of `memory`.
template <class T> T *take(char *&memory, size_t count) {
    T *taken = reinterpret_cast<T *>(memory);
    memory += (count * sizeof(T) + 63) / 64 * 64;
    return taken;
}

class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    ~Buffer() { std::free(memory_); }

    // At least so many bytes; what was in them may be gone.
    char *at_least(size_t bytes) {
        if (bytes > size_) {
            const size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
            std::free(memory_);
            size_ = 0;
            memory_ = static_cast<char *>(std::aligned_alloc(4096, size));
            if (!memory_) throw std::bad_alloc();
            size_ = size;
        }
        return memory_;
    }
    size_t size() const { return size_; }

  private:
    char *memory_ = nullptr;
    size_t size_ = 0;
};

}  // namespace baton
