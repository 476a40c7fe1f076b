#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
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
        work_ = &work;
        count_ = count;
        failure_ = nullptr;
        next_.store(0);
        busy_.store(static_cast<int>(workers_.size()));
        {
            std::lock_guard<std::mutex> lock(mutex_);
            round_.fetch_add(1, std::memory_order_release);
        }
        if (sleeping_.load()) wake_.notify_all();
        take();
        for (int i = 1; busy_.load(std::memory_order_acquire); i++)
            if (i % 4096) relax();
            else std::this_thread::yield();  // fewer cores than threads: let the others run
        if (failure_) std::rethrow_exception(failure_);
    }

  private:
    void start() {
        for (int i = 1; i < size_; i++) workers_.emplace_back([this, seen = round_.load()] { serve(seen); });
    }

    void stop() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
            round_.fetch_add(1);
        }
        wake_.notify_all();
        for (std::thread& worker : workers_) worker.join();
        workers_.clear();
        stopping_ = false;
    }

    // The first exception of any thread ends the round, and is thrown where the work was asked for.
    void take() {
        try {
            for (long i; (i = next_.fetch_add(1)) < count_;) (*work_)(i);
        } catch (...) {
            std::lock_guard<std::mutex> lock(mutex_);
            if (!failure_) failure_ = std::current_exception();
            next_.store(count_);
        }
    }

    void serve(long seen) {
        while (true) {
            await(seen);
            seen = round_.load(std::memory_order_acquire);
            if (stopping_) return;
            take();
            busy_.fetch_sub(1, std::memory_order_release);
        }
    }

    // Within a generation the next piece of work comes at once: worth waiting for. Longer, and nobody asks.
    void await(long seen) {
        auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(300);
        for (int i = 0; round_.load(std::memory_order_acquire) == seen; i++) {
            relax();
            if (i % 64 == 63 && std::chrono::steady_clock::now() > until) break;
        }
        if (round_.load(std::memory_order_acquire) != seen) return;
        std::unique_lock<std::mutex> lock(mutex_);
        sleeping_.fetch_add(1);
        wake_.wait(lock, [&] { return round_.load() != seen; });
        sleeping_.fetch_sub(1);
    }

    std::vector<std::thread> workers_;
    std::mutex callers_, mutex_;
    std::condition_variable wake_;
    std::atomic<long> round_{0}, next_{0};
    std::atomic<int> busy_{0}, sleeping_{0};
    std::atomic<bool> stopping_{false};
    std::atomic<int> size_{1};
    std::exception_ptr failure_;
    const std::function<void(long)>* work_ = nullptr;
    long count_ = 0;
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
