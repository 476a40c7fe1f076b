// A small thread pool. Its threads poll for the next work for a moment, then sleep. Results never depend on them.
#pragma once

#include <functional>
#include <vector>

namespace longdraft {

int threads();
void set_threads(int count);

// Run work(0) .. work(count - 1), in any order, on all threads. Returns when all are done; rethrows the first exception.
void parallel(long count, const std::function<void(long)>& work);

// The ends of the pieces of at least `least` in which threads take `count` things. They get ever smaller, so that all
// threads end together although one of them began late or is disturbed.
std::vector<long> pieces_of(long count, long least);

// Memory that will be read in such pieces, `count` things of `bytes` each. While a thread waits for work, it fetches the
// piece that it will probably take into its cache: between two products, memory would be idle otherwise. null: not known.
void expect(const void* data, long bytes, long count, long least);

}  // namespace longdraft
