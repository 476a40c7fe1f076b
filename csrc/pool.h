// A small thread pool. Its threads poll for the next work for a moment, then sleep. Results never depend on them.
#pragma once

#include <functional>

namespace longdraft {

int threads();
void set_threads(int count);

// Run work(0) .. work(count - 1), in any order, on all threads. Returns when all are done; rethrows the first exception.
void parallel(long count, const std::function<void(long)>& work);

}  // namespace longdraft
