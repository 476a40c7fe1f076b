// What a CUDA C++ kernel needs to run on the CPU, one thread a program: see tests/unit/test_cuda_skeleton.py.
// A copy that was begun arrives when its group is waited for. Before that, its target holds other numbers.
#pragma once
#include <atomic>
#include <cstring>
#include <ctime>
#include <deque>
#include <thread>
#include <vector>

#define CUDA_SHIM
#define __device__
#define __global__
#define __shared__

struct Index { unsigned x; };
static thread_local Index blockIdx, threadIdx;
static Index blockDim{1}, gridDim{1};
static inline void __syncthreads() {}

struct Copy { void* to; const void* from; };
static thread_local std::deque<std::vector<Copy>> groups;
static thread_local std::vector<Copy> begun;

static inline void copy_ahead(void* to, const void* from) {
    std::memset(to, 0xA5, 16);
    begun.push_back({to, from});
}
static inline void end_group() {
    groups.push_back(begun);
    begun.clear();
}
template <int PENDING>
static inline void wait_for_groups() {
    for (; groups.size() > PENDING; groups.pop_front())
        for (const Copy& copy : groups.front()) std::memcpy(copy.to, copy.from, 16);
}
static inline void arrive(unsigned* counter) {
    reinterpret_cast<std::atomic<unsigned>*>(counter)->fetch_add(1, std::memory_order_release);
}
static inline unsigned arrived(const unsigned* counter) {
    std::this_thread::yield();
    return reinterpret_cast<const std::atomic<unsigned>*>(counter)->load(std::memory_order_acquire);
}
static inline long long now() { return clock(); }
