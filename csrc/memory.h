// Memory of weights, of caches, and for intermediate values.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#if defined(__linux__) || defined(__APPLE__)
#include <sys/mman.h>
#define LONGDRAFT_MMAP
#endif

namespace longdraft {

inline long round_up(long x, long to) { return (x + to - 1) / to * to; }

constexpr size_t HUGE_PAGE = size_t{2} << 20, PAGE = size_t{1} << 16;  // bytes of a huge page; whole pages of any system

#if defined(LONGDRAFT_MMAP)
// Zeroed memory for a multiple of PAGE bytes. The system gives a page when it is first written to, and `munmap` gives all
// back at once: malloc would keep what was freed between blocks in use. Large memory is on huge pages where the system has
// them: with small pages, address translation would take half of the time of reading a long cache.
inline void* map_pages(size_t bytes) {
    const size_t spare = bytes < HUGE_PAGE ? 0 : HUGE_PAGE;  // to begin at a huge page
    char* mapped = static_cast<char*>(mmap(nullptr, bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    if (!spare) return mapped;
    const size_t before = (HUGE_PAGE - reinterpret_cast<uintptr_t>(mapped) % HUGE_PAGE) % HUGE_PAGE;
    if (before) munmap(mapped, before);
    munmap(mapped + before + bytes, spare - before);
#if defined(MADV_HUGEPAGE)
    madvise(mapped + before, bytes, MADV_HUGEPAGE);
#endif
    return mapped + before;
}
#endif

// Zeroed memory, aligned to 64 bytes.
class Memory {
  public:
    explicit Memory(size_t bytes) {
#if defined(LONGDRAFT_MMAP)
        if (bytes >= LEAST_MAPPED) {
            const size_t unit = bytes < HUGE_PAGE ? PAGE : HUGE_PAGE;
            mapped_ = (bytes + unit - 1) / unit * unit;
            data_ = map_pages(mapped_);
            return;
        }
#endif
        bytes = (bytes + 63) / 64 * 64;
        data_ = std::aligned_alloc(64, bytes);
        if (!data_) throw std::bad_alloc();
        std::memset(data_, 0, bytes);
    }
    // A part of other memory, which lives as long as its parts.
    Memory(std::shared_ptr<void> whole, void* data) : whole_(std::move(whole)), data_(data) {}
    ~Memory() {
        if (whole_) return;
#if defined(LONGDRAFT_MMAP)
        if (mapped_) {
            munmap(data_, mapped_);
            return;
        }
#endif
        std::free(data_);
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    uint32_t* words() const { return static_cast<uint32_t*>(data_); }

  private:
    static constexpr size_t LEAST_MAPPED = size_t{1} << 17;

    std::shared_ptr<void> whole_;
    void* data_;
    size_t mapped_ = 0;  // bytes
};

// Zeroed memory for a weight. Those of experts are smaller than a huge page, or fill the last one of a few badly, so
// weights of moderate size are parts of larger memory, one after another.
inline std::unique_ptr<Memory> weight_memory(size_t bytes) {
#if defined(LONGDRAFT_MMAP)
    constexpr size_t LEAST = size_t{1} << 16, MOST = size_t{16} << 20, WHOLE = size_t{64} << 20;
    if (bytes >= LEAST && bytes < MOST) {
        static std::mutex mutex;
        static std::weak_ptr<void> latest;
        static size_t used = 0;
        std::lock_guard<std::mutex> lock(mutex);
        bytes = (bytes + 63) / 64 * 64;
        std::shared_ptr<void> whole = latest.lock();
        if (!whole || used + bytes > WHOLE) {
            whole = std::shared_ptr<void>(map_pages(WHOLE), [](void* start) { munmap(start, WHOLE); });
            latest = whole;
            used = 0;
        }
        void* data = static_cast<char*>(whole.get()) + used;
        used += bytes;
        return std::make_unique<Memory>(std::move(whole), data);
    }
#endif
    return std::make_unique<Memory>(bytes);
}

// Bytes of the workspaces of all threads.
inline std::atomic<size_t> workspace_bytes{0};

// Memory that grows to what is asked for, and shrinks when far less has been asked for many times: a chunk of a prompt
// takes tens of megabytes, a step some kilobytes. Forwards whose layers need different sizes do not shrink it.
class Workspace {
  public:
    Workspace() = default;
    Workspace(const Workspace&) = delete;
    ~Workspace() { hold(0); }
    void* of(size_t bytes) {
        const bool is_far_less = held_ >= LARGE && bytes < held_ / 16;
        num_less_ = is_far_less ? num_less_ + 1 : 0;
        if (bytes > held_ || num_less_ >= PATIENCE) hold(bytes + std::min(bytes / 2, LARGE));
        return memory_ ? memory_->words() : nullptr;
    }

  private:
    static constexpr size_t LARGE = size_t{1} << 20;
    static constexpr int PATIENCE = 256;  // uses: some steps of all layers

    void hold(size_t bytes) {
        memory_.reset();
        workspace_bytes -= std::exchange(held_, 0);
        num_less_ = 0;
        if (bytes) memory_.reset(new Memory(bytes));
        workspace_bytes += held_ = bytes;
    }

    std::unique_ptr<Memory> memory_;
    size_t held_ = 0;
    int num_less_ = 0;
};

// Memory for intermediate values, kept by each thread. Uses of one SLOT must not overlap.
template <int SLOT> void* workspace(size_t bytes) {
    thread_local Workspace memory;
    return memory.of(bytes);
}

}  // namespace longdraft
