// Memory of weights, of caches, and for intermediate values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace longdraft {

inline long round_up(long x, long to) { return (x + to - 1) / to * to; }

constexpr size_t HUGE_PAGE = size_t{2} << 20;  // of a huge page

// Zeroed memory, aligned to 64 bytes. Large allocations use huge pages where the system has them: with small pages,
// address translation would take half of the time of reading a long cache.
class Memory {
  public:
    explicit Memory(size_t bytes) {
        size_t alignment = bytes < HUGE_PAGE ? 64 : HUGE_PAGE;
        bytes = (bytes + alignment - 1) / alignment * alignment;
        data_ = std::aligned_alloc(alignment, bytes);
        if (!data_) throw std::bad_alloc();
#if defined(__linux__)
        if (alignment == HUGE_PAGE) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
        std::memset(data_, 0, bytes);
    }
    // A part of other memory, which lives as long as its parts.
    Memory(std::shared_ptr<void> whole, void* data) : whole_(std::move(whole)), data_(data) {}
    ~Memory() {
        if (!whole_) std::free(data_);
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    uint32_t* words() const { return static_cast<uint32_t*>(data_); }

  private:
    std::shared_ptr<void> whole_;
    void* data_;
};

// Zeroed memory for a weight. Those of experts are smaller than a huge page, or fill the last one of a few badly, so
// weights of moderate size are parts of larger memory, one behind another.
inline std::unique_ptr<Memory> weight_memory(size_t bytes) {
#if defined(__linux__)
    constexpr size_t LEAST = size_t{1} << 16, MOST = size_t{16} << 20, WHOLE = size_t{64} << 20;
    if (bytes >= LEAST && bytes < MOST) {
        static std::mutex mutex;
        static std::weak_ptr<void> latest;
        static size_t used = 0;
        std::lock_guard<std::mutex> lock(mutex);
        bytes = (bytes + 63) / 64 * 64;
        std::shared_ptr<void> whole = latest.lock();
        if (!whole || used + bytes > WHOLE) {  // the system gives pages of zeros when they are first written to
            constexpr size_t MAPPED = WHOLE + HUGE_PAGE;  // so that it holds a start aligned to huge pages
            void* mapped = mmap(nullptr, MAPPED, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (mapped == MAP_FAILED) throw std::bad_alloc();
            madvise(mapped, MAPPED, MADV_HUGEPAGE);
            whole = std::shared_ptr<void>(mapped, [](void* start) { munmap(start, MAPPED); });
            latest = whole;
            used = (HUGE_PAGE - reinterpret_cast<uintptr_t>(mapped) % HUGE_PAGE) % HUGE_PAGE;
        }
        void* data = static_cast<char*>(whole.get()) + used;
        used += bytes;
        return std::make_unique<Memory>(std::move(whole), data);
    }
#endif
    return std::make_unique<Memory>(bytes);
}

// Memory for intermediate values, kept by each thread and grown as needed. Uses of one SLOT must not overlap.
template <int SLOT> void* workspace(size_t bytes) {
    thread_local std::unique_ptr<Memory> memory;
    thread_local size_t held = 0;
    if (held < bytes) {
        memory.reset();
        held = 0;
        memory.reset(new Memory(bytes + bytes / 2));
        held = bytes + bytes / 2;
    }
    return memory->words();
}

}  // namespace longdraft
