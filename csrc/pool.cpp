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
#if defined(__APPLE__)
#include <pthread/qos.h>
#endif

namespace longdraft {
namespace {

constexpr int SHARES = 2;  // of each thread, about, in which it takes the first of several pieces

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // some ten cycles; `yield` does nothing on most processors
#else
    std::this_thread::yield();
#endif
}

// Within its scope, the thread computes with subnormal numbers and rounds to nearest, whatever mode its owner has chosen
// (torch.set_flush_denormal): a row must not depend on the thread that computes it.
class UsualArithmetic {
#if defined(__SSE__)
  public:
    UsualArithmetic() : before_(_mm_getcsr()) { _mm_setcsr(USUAL); }
    ~UsualArithmetic() { _mm_setcsr(before_); }

  private:
    static constexpr unsigned USUAL = 0x1f80;  // all exceptions masked, no flags
    const unsigned before_;
#elif defined(__aarch64__)
  public:
    UsualArithmetic() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
    }
    ~UsualArithmetic() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

  private:
    uint64_t before_;
#endif
};

// The end of the piece that begins at `at`.
long end_of_piece(long at, long count, long least, long shares) { return std::min(count, at + std::max(least, (count - at) / shares)); }

// What a waiting thread fetches, a few lines at a time.
class Fetching {
  public:
    void begin(const char* data, long bytes) { at_ = data, end_ = data + std::min(bytes, MOST); }
    void go_on() {
        for (int i = 0; i < LINES && at_ < end_; i++, at_ += 64) __builtin_prefetch(at_, 0, 2);
    }

  private:
    static constexpr int LINES = 4;
    static constexpr long MOST = 256 << 10;  // bytes: what is fetched must stay in a cache of its own until it is read
    const char *at_ = nullptr, *end_ = nullptr;
};

class Pool {
  public:
    void expect(const void* data, long bytes, long count, long least) {
        expected_bytes_.store(bytes, std::memory_order_relaxed);
        expected_count_.store(count, std::memory_order_relaxed);
        expected_least_.store(least, std::memory_order_relaxed);
        expected_.store(data, std::memory_order_release);
    }

    ~Pool() { stop(); }

    int size() const { return size_; }

    // The threads start with the first work that needs them.
    void resize(int count) {
        std::lock_guard<std::mutex> one_caller(callers_);
        stop();
        size_ = count;
    }

    // One caller at a time has the threads. Another one, and a job of the caller that has them, works alone.
    void run(long count, const std::function<void(long)>& work) {
        static thread_local bool is_caller = false;  // this thread holds the lock, which it may not try to take again
        UsualArithmetic usual;
        std::unique_lock<std::mutex> one_caller(callers_, std::defer_lock);
        if (count <= 1 || size_ <= 1 || is_caller || !one_caller.try_lock()) {
            for (long i = 0; i < count; i++) work(i);
            return;
        }
        struct Mark {
            Mark() { is_caller = true; }
            ~Mark() { is_caller = false; }
        } mark;
        if (workers_.empty()) start();
        for (long first = 0; first < count; first += MAX_JOBS)
            run_round([&](long i) { work(first + i); }, std::min(MAX_JOBS, count - first));
    }

  private:
    // The number of jobs of the current round, and the next job, in one word: claiming a job is one atomic operation. The
    // round waits only for threads that claimed a job. On a busy machine, a thread may not run for milliseconds.
    using Jobs = uint64_t;
    static constexpr long MAX_JOBS = (1L << 32) - 1;
    static Jobs jobs(long count) { return static_cast<Jobs>(count) << 32; }
    static bool any_left(Jobs jobs) { return (jobs & MAX_JOBS) < jobs >> 32; }

    void run_round(const std::function<void(long)>& work, long count) {
        work_ = &work;
        failure_ = nullptr;
        has_failed_.store(false);
        done_.store(0);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            jobs_.store(jobs(count), std::memory_order_release);
        }
        if (sleeping_.load()) wake_.notify_all();
        take_jobs();
        for (int i = 1; done_.load(std::memory_order_acquire) < count; i++) {
            fetch_expected(0);
            if (i % 128) relax();
            else std::this_thread::yield();  // there are fewer cores than threads: let other threads run
        }
        if (failure_) std::rethrow_exception(failure_);
    }

    void start() {
        for (int i = 1; i < size_; i++) workers_.emplace_back([this, i] { serve(i); });
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

    // `work_` is valid until every claimed job is counted in `done_`: the round does not end before.
    void take_jobs() {
        Jobs now = jobs_.load(std::memory_order_acquire);
        while (any_left(now)) {
            if (!jobs_.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
            run_job(static_cast<long>(now & MAX_JOBS));
            now = jobs_.load(std::memory_order_acquire);
        }
    }

    // The caller of `run` rethrows the first exception of any thread. Jobs that start after it are skipped.
    void run_job(long job) {
        try {
            if (!has_failed_.load()) (*work_)(job);
        } catch (...) {
            std::lock_guard<std::mutex> lock(mutex_);
            if (!failure_) failure_ = std::current_exception();
            has_failed_.store(true);
        }
        done_.fetch_add(1, std::memory_order_release);
    }

    void serve(int thread) {
        UsualArithmetic usual;
#if defined(__APPLE__)
        pthread_set_qos_class_self_np(QOS_CLASS_USER_INITIATED, 0);  // otherwise threads may be kept to the slow cores
#endif
        while (wait_for_work(thread)) take_jobs();
    }

    // The thread that publishes work takes the first piece; the first waiting thread takes the next piece.
    void fetch_expected(int thread) {
        static thread_local Fetching fetching;
        static thread_local const void* known = nullptr;
        if (const void* data = expected_.load(std::memory_order_acquire); data != known) {
            known = data;
            const long bytes = expected_bytes_.load(std::memory_order_relaxed), count = expected_count_.load(std::memory_order_relaxed);
            const long least = expected_least_.load(std::memory_order_relaxed), shares = SHARES * size_;
            long first = 0;
            for (int i = 0; i < thread; i++) first = end_of_piece(first, count, least, shares);
            fetching.begin(static_cast<const char*>(data) + first * bytes, (end_of_piece(first, count, least, shares) - first) * bytes);
        }
        fetching.go_on();
    }

    // Wait for work; false: the pool stops. During a generation the next work comes within microseconds, so poll before
    // sleeping.
    bool wait_for_work(int thread) {
        auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(300);
        auto is_called = [this] { return stopping_.load() || any_left(jobs_.load(std::memory_order_acquire)); };
        for (int i = 0; !is_called(); i++) {
            fetch_expected(thread);
            relax();
            if (i % 64 != 63) continue;
            if (std::chrono::steady_clock::now() > until) break;
            std::this_thread::yield();  // another program may have work for this core
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
    std::atomic<const void*> expected_{nullptr};  // may be freed: fetching ahead never fails
    std::atomic<long> expected_bytes_{0}, expected_count_{0}, expected_least_{0};
    std::exception_ptr failure_;
    const std::function<void(long)>* work_ = nullptr;
};

// Never destroyed. A forked child replaces it, because it inherits the pool's data but none of its threads.
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
void expect(const void* data, long bytes, long count, long least) { pool().expect(data, bytes, count, least); }

std::vector<long> pieces_of(long count, long least) {
    const long shares = SHARES * threads();
    std::vector<long> ends;
    for (long at = 0; at < count; ends.push_back(at)) at = end_of_piece(at, count, least, shares);
    return ends;
}

}  // namespace longdraft
