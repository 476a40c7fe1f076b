#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace longdraft {
namespace {

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

class Pool {
  public:
    ~Pool() { stop(); }

    int size() const { return size_; }

    // Threads are started by the first piece of work that wants them.
    void resize(int count) {
        std::lock_guard<std::mutex> one_caller(callers_);
        stop();
        size_ = count;
    }

    void run(long count, const std::function<void(long)>& work) {
        std::unique_lock<std::mutex> one_caller(callers_, std::try_to_lock);
        if (count <= 1 || size_ <= 1 || !one_caller.owns_lock()) {
            for (long i = 0; i < count; i++) work(i);
            return;
        }
        if (workers_.empty()) start();
        for (long first = 0; first < count; first += MOST) {
            const long some = std::min(MOST, count - first);
            round([&](long i) { work(first + i); }, some);
        }
    }

  private:
    // Jobs of the current round: how many there are and which is next, in one word, so that a job is claimed or there is
    // none. Nobody is waited for but those who claimed one: on a busy machine a worker may be away for milliseconds.
    using Jobs = uint64_t;
    static constexpr long MOST = (1L << 32) - 1;
    static Jobs jobs(long count) { return static_cast<Jobs>(count) << 32; }
    static bool any(Jobs jobs) { return (jobs & MOST) < jobs >> 32; }

    void round(const std::function<void(long)>& work, long count) {
        work_ = &work;
        failure_ = nullptr;
        has_failed_.store(false);
        done_.store(0);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            jobs_.store(jobs(count), std::memory_order_release);
        }
        if (sleeping_.load()) wake_.notify_all();
        take();
        for (int i = 1; done_.load(std::memory_order_acquire) < count; i++)
            if (i % 4096) relax();
            else std::this_thread::yield();  // fewer cores than threads: let the others run
        if (failure_) std::rethrow_exception(failure_);
    }

    void start() {
        for (int i = 1; i < size_; i++) workers_.emplace_back([this] { serve(); });
    }

    void stop() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (std::thread& worker : workers_) worker.join();
        workers_.clear();
        stopping_ = false;
    }

    // Who claims a job may rely on `work_` until it is counted as done: the round does not end before.
    void take() {
        Jobs now = jobs_.load(std::memory_order_acquire);
        while (any(now)) {
            if (!jobs_.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
            one(static_cast<long>(now & MOST));
            now = jobs_.load(std::memory_order_acquire);
        }
    }

    // The first exception of any thread is thrown where the work was asked for; what comes after it is left undone.
    void one(long job) {
        try {
            if (!has_failed_.load()) (*work_)(job);
        } catch (...) {
            std::lock_guard<std::mutex> lock(mutex_);
            if (!failure_) failure_ = std::current_exception();
            has_failed_.store(true);
        }
        done_.fetch_add(1, std::memory_order_release);
    }

    void serve() {
        while (await()) take();
    }

    // Until there is work; false: no more. Within a generation it comes at once: worth waiting for. Longer, and nobody asks.
    bool await() {
        auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(300);
        auto is_called = [this] { return stopping_.load() || any(jobs_.load(std::memory_order_acquire)); };
        for (int i = 0; !is_called(); i++) {
            relax();
            if (i % 64 == 63 && std::chrono::steady_clock::now() > until) break;
        }
        if (!is_called()) {
            std::unique_lock<std::mutex> lock(mutex_);
            sleeping_.fetch_add(1);
            wake_.wait(lock, is_called);
            sleeping_.fetch_sub(1);
        }
        return !stopping_;
    }

    std::vector<std::thread> workers_;
    std::mutex callers_, mutex_;
    std::condition_variable wake_;
    std::atomic<Jobs> jobs_{0};
    std::atomic<long> done_{0};
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stopping_{false}, has_failed_{false};
    std::atomic<int> size_{1};
    std::exception_ptr failure_;
    const std::function<void(long)>* work_ = nullptr;
};

// Never destroyed, and replaced in a forked child, which inherits the pool's data but none of its threads.
Pool* the_pool = nullptr;

Pool& pool() {
    static std::once_flag once;
    std::call_once(once, [] {
        the_pool = new Pool;
#if defined(__unix__) || defined(__APPLE__)
        pthread_atfork(nullptr, nullptr, [] {
            int size = the_pool->size();
            the_pool = new Pool;
            the_pool->resize(size);
        });
#endif
    });
    return *the_pool;
}

}  // namespace

int threads() { return pool().size(); }
void set_threads(int count) { pool().resize(count); }
void parallel(long count, const std::function<void(long)>& work) { pool().run(count, work); }

}  // namespace longdraft
